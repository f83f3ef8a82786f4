"""Matrix products: wgmma, which reads shared memory and writes its registers only when waited for, and mma."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from hpcattn.emulator.asynchronous import swizzle
from hpcattn.emulator.errors import EmulatorError
from hpcattn.emulator.memory import TAG_SHIFT
from hpcattn.emulator.numerics import decode
from hpcattn.emulator.operands import LANE, LANES, instruction, integer, source, target, uniform, vector

_G, _T = (LANE // 4).astype(np.int64), (LANE % 4).astype(np.int64)  # row and column quad of a lane in a fragment
_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}  # bytes of a swizzle row, by the descriptor's top bits


@lru_cache
def _offsets(rows: int, row_bytes: int, leading: int, stride: int, span: int, mn_major: bool) -> np.ndarray:
    """Where an operand's bytes lie from its start. K-major: [rows, bytes of k]; MN-major: [k, bytes of a row]."""
    if mn_major:
        k, n = np.arange(row_bytes // 2)[:, None], np.arange(2 * rows)[None, :]
        return n // span * leading + k // 8 * stride + k % 8 * span + n % span
    n, k = np.arange(rows)[:, None], np.arange(row_bytes)[None, :]
    return n // 8 * stride + n % 8 * span + k


def _shared_operand(warp, descriptor: int, rows: int, k_bytes: int, kind: str, mn_major: bool, here) -> np.ndarray:
    """The matrix [rows, k] that a wgmma descriptor describes, float32."""
    start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = _SPANS[descriptor >> 62]
    if not span:
        raise EmulatorError(f"{here}: an operand without swizzle isn't modelled")
    addresses = swizzle(start + _offsets(rows, k_bytes, leading, stride, span, mn_major), span)
    addresses = addresses + (warp.cta << TAG_SHIFT)  # a descriptor has no room for the rank
    data = warp.cluster.shared.read(warp.cluster.shared.locate(addresses, warp.cta, lambda: here), lambda: here)
    values = decode(data, kind)
    return values.T if mn_major else values


def _register_operand(registers: list[np.ndarray], k_bytes: int) -> np.ndarray:
    """A fragment [16, k bytes] of a warp: register i holds rows g + 8 (i & 1), bytes 16 (i >> 1) + 4 t."""
    out = np.empty((16, k_bytes // 4), np.uint32)
    for i, values in enumerate(registers):
        out[_G + 8 * (i & 1), 4 * (i >> 1) + _T] = values
    return out.view(np.uint8)


def _add_product(warp, writes, old: list[np.ndarray], product: np.ndarray) -> None:
    """Accumulator i of a lane is element [g + 8 (i >> 1 & 1), 8 (i >> 2) + 2 t + (i & 1)]."""
    for i, (write, before) in enumerate(zip(writes, old, strict=True)):
        values = product[_G + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * _T + (i & 1)]
        write(warp, (values + before).astype(np.float32), None)


@instruction("wgmma.mma_async.sync.aligned")
def _wgmma(ins, program):
    n, k = map(int, re.search(r"\.m64n(\d+)k(\d+)\.f32\.", ins.opcode).groups())
    kind = ins.parts[-1]
    k_bytes = k * {"e4m3": 1, "bf16": 2, "f16": 2}[kind]
    in_registers = ins.operands[1].startswith("{")
    accumulators = vector(ins.operands[0])
    writes = [target(r, "f32") for r in accumulators]
    olds = [source(r, "f32", program) for r in accumulators]
    scale_a, scale_b, *major = (integer(o) for o in ins.operands[4:])
    if (scale_a, scale_b) != (1, 1) or ins.parts[-2] != kind:
        raise KeyError(ins.opcode)
    a_major, b_major = (major if len(major) == 2 else (0, *major, 0)[:2]) if kind != "e4m3" else (0, 0)
    if in_registers:
        a_reads = [source(r, "b32", program) for r in vector(ins.operands[1])]
    else:
        a_read = source(ins.operands[1], "u64", program)
    b_read, use_old = source(ins.operands[2], "u64", program), source(ins.operands[3], "pred", program)

    def execute(warp, mask):
        here, accumulate = warp.here(), bool(uniform(use_old(warp), warp))
        b_descriptor = uniform(b_read(warp), warp)
        if in_registers:
            a_bytes = _register_operand([r(warp) for r in a_reads], k_bytes)
        else:
            a_descriptor = uniform(a_read(warp), warp)

        def multiply():
            if in_registers:
                a = decode(a_bytes, kind)
            else:
                rows = slice(16 * (warp.index % 4), 16 * (warp.index % 4) + 16)
                a = _shared_operand(warp, a_descriptor, 64, k_bytes, kind, bool(a_major), here)[rows]
            b = _shared_operand(warp, b_descriptor, n, k_bytes, kind, bool(b_major), here)
            zero = np.zeros(LANES, np.float32)
            old = [r(warp) for r in olds] if accumulate else [zero] * len(olds)
            _add_product(warp, writes, old, a.astype(np.float64) @ b.T.astype(np.float64))

        warp.products.open.append(multiply)

    return execute


@instruction("wgmma.commit_group")
def _commit(ins, program):
    return lambda warp, mask: warp.products.commit()


@instruction("wgmma.wait_group")
def _wait(ins, program):
    remaining = integer(ins.operands[0])

    def execute(warp, mask):
        committed = warp.products.committed
        while len(committed) > remaining:
            for multiply in committed.pop(0):
                multiply()

    return execute


@instruction("mma.sync.aligned")
def _mma(ins, program):
    k = int(re.search(r"\.m16n8k(\d+)\.row\.col\.f32\.", ins.opcode)[1])
    kind = ins.parts[-2]
    k_bytes = k * {"e4m3": 1, "bf16": 2, "f16": 2}[kind]
    if ins.parts[-1] != "f32" or ins.parts[-3] != kind:
        raise KeyError(ins.opcode)
    writes = [target(r, "f32") for r in vector(ins.operands[0])]
    a_reads, b_reads = ([source(r, "b32", program) for r in vector(o)] for o in ins.operands[1:3])
    olds = [source(r, "f32", program) for r in vector(ins.operands[3])]

    def execute(warp, mask):
        a = decode(_register_operand([r(warp) for r in a_reads], k_bytes), kind).astype(np.float64)
        b = np.empty((8, k_bytes // 4), np.uint32)
        for i, read in enumerate(b_reads):
            b[_G, 4 * i + _T] = read(warp)
        b = decode(b.view(np.uint8), kind).astype(np.float64)
        _add_product(warp, writes, [r(warp) for r in olds], a @ b.T)

    return execute
