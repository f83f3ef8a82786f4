"""Loads, stores and atomics that complete at once: ld, st, ldmatrix, stmatrix, atom, mapa."""

from __future__ import annotations

import numpy as np

from hpcattn.emulator.memory import OFFSET_MASK, TAG_SHIFT
from hpcattn.emulator.operands import (
    LANE,
    LANES,
    active,
    address,
    dtype_of,
    instruction,
    source,
    target,
    unsigned_of,
    vector,
)

_ROW, _PAIR = (LANE // 4).astype(np.int64), (2 * (LANE % 4)).astype(np.int64)  # of an 8×8 matrix, per lane


def read_bytes(warp, space: str, addresses: np.ndarray) -> np.ndarray:
    """Bytes at int64 `addresses` [rows, bytes] of "global", "shared" or "shared::cluster" memory."""
    if space != "global":
        return warp.cluster.shared.read(_locate(warp, space, addresses), warp.here)
    return warp.cluster.memory.read(addresses, warp.here)


def write_bytes(warp, space: str, addresses: np.ndarray, data: np.ndarray) -> None:
    if space != "global":
        warp.cluster.shared.write(_locate(warp, space, addresses), data)
    else:
        warp.cluster.memory.write(addresses, data, warp.here)


def _locate(warp, space: str, addresses: np.ndarray) -> np.ndarray:
    return warp.cluster.shared.locate(addresses, warp.cta, warp.here, remote=space == "shared::cluster")


def _space(ins) -> str:
    """ "global", "shared" or "shared::cluster": generic and local addresses are not modelled."""
    return next(s for s in (p.removesuffix("::cta") for p in ins.parts) if s in ("global", "shared", "shared::cluster"))


def _spread(values: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    out = np.zeros(LANES, values.dtype)
    out[lanes] = values
    return out


@instruction("ld.param")
def _load_parameter(ins, program):
    names = [name for name, _ in program.parameters]
    index = names.index(ins.operands[1].strip("[] "))
    type = ins.parts[-1]
    unsigned, write = unsigned_of(type), target(ins.operands[0], type)
    bits = 8 * unsigned.itemsize

    def execute(warp, mask):
        value = warp.cluster.parameters[index] & ((1 << bits) - 1)
        write(warp, np.full(LANES, value, unsigned), mask)

    return execute


@instruction("ld")
def _load(ins, program):
    space, type = _space(ins), ins.parts[-1]
    unsigned, names = unsigned_of(type), vector(ins.operands[0])
    # LLVM pads vectors with elements that it never uses, and that may never have been written
    used = [i for i, name in enumerate(names) if program.occurrences[name] > 1] or [0]
    where, writes = address(ins.operands[1], program), [target(names[i], type) for i in used]
    span = (np.array(used)[:, None] * unsigned.itemsize + np.arange(unsigned.itemsize)).ravel()

    def execute(warp, mask):
        lanes = active(mask)
        data = np.ascontiguousarray(read_bytes(warp, space, where(warp)[lanes, None] + span)).view(unsigned)
        for i, write in enumerate(writes):
            write(warp, data[:, i].copy() if mask is None else _spread(data[:, i], lanes), mask)

    return execute


@instruction("st")
def _store(ins, program):
    space, type = _space(ins), ins.parts[-1]
    unsigned, names = unsigned_of(type), vector(ins.operands[1])
    where, reads = address(ins.operands[0], program), [source(n, type, program) for n in names]
    span = np.arange(unsigned.itemsize * len(names))

    def execute(warp, mask):
        lanes = active(mask)
        data = np.stack([r(warp).view(unsigned) for r in reads], 1)[lanes]
        write_bytes(warp, space, where(warp)[lanes, None] + span, np.ascontiguousarray(data).view(np.uint8))

    return execute


@instruction("ldmatrix.sync.aligned.m8n8")
def _load_matrix(ins, program):
    if ins.parts[-1] != "b16":
        raise KeyError(ins.opcode)
    names, where = vector(ins.operands[0]), address(ins.operands[1], program)
    writes, transposed = [target(n, "b32") for n in names], "trans" in ins.parts
    span = np.arange(16)

    def execute(warp, mask):
        rows = where(warp)[: 8 * len(names), None] + span
        matrices = read_bytes(warp, "shared", rows).view(np.uint16).reshape(len(names), 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        for matrix, write in zip(matrices, writes, strict=True):
            pairs = np.stack([matrix[_ROW, _PAIR], matrix[_ROW, _PAIR + 1]], 1)
            write(warp, pairs.view(np.uint32)[:, 0], mask)

    return execute


@instruction("stmatrix.sync.aligned.m8n8")
def _store_matrix(ins, program):
    if ins.parts[-1] != "b16":
        raise KeyError(ins.opcode)
    where, names = address(ins.operands[0], program), vector(ins.operands[1])
    reads, transposed = [source(n, "b32", program) for n in names], "trans" in ins.parts
    span = np.arange(16)

    def execute(warp, mask):
        matrices = np.empty((len(names), 8, 8), np.uint16)
        for matrix, read in zip(matrices, reads, strict=True):
            matrix[_ROW, _PAIR], matrix[_ROW, _PAIR + 1] = read(warp).reshape(LANES, 1).view(np.uint16).T
        if transposed:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        rows = where(warp)[: 8 * len(names), None] + span
        write_bytes(warp, "shared", rows, matrices.view(np.uint8).reshape(-1, 16))

    return execute


@instruction("mapa")
def _map_address(ins, program):
    if "shared::cluster" not in ins.parts:
        raise KeyError(ins.opcode)
    type = ins.parts[-1]
    where, rank = source(ins.operands[1], type, program), source(ins.operands[2], "u32", program)
    write, dtype = target(ins.operands[0], type), dtype_of(type)

    def execute(warp, mask):
        tag = rank(warp).astype(dtype) << dtype.type(TAG_SHIFT)
        write(warp, (where(warp) & dtype.type(OFFSET_MASK)) | tag, mask)

    return execute


_ATOMIC = {
    "add": lambda old, x: old + x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "max": lambda old, x: max(old, x),
    "min": lambda old, x: min(old, x),
    "exch": lambda old, x: x,
}


@instruction("atom", "red")
def _atomic(ins, program):
    space, type = _space(ins), ins.parts[-1]
    operands = ins.operands if ins.parts[0] == "atom" else ("_", *ins.operands)
    swap = "cas" in ins.parts
    dtype, span = dtype_of(type), np.arange(dtype_of(type).itemsize)
    write, where = target(operands[0], type), address(operands[1], program)
    reads = [source(o, type, program) for o in operands[2:4] if not o.startswith("%rd") or dtype.itemsize == 8]
    f = None if swap else next(_ATOMIC[p] for p in ins.parts if p in _ATOMIC)
    if type in ("f16x2", "bf16x2", "bf16") or len(reads) < 1 + swap:
        raise KeyError(ins.opcode)

    def execute(warp, mask):
        old, places, values = np.zeros(LANES, dtype), where(warp), [r(warp) for r in reads]
        for lane in active(mask):
            at = places[lane] + span[None, :]
            old[lane] = np.ascontiguousarray(read_bytes(warp, space, at)).view(dtype)[0, 0]
            if swap:
                new = values[1][lane] if old[lane] == values[0][lane] else old[lane]
            else:
                new = f(old[lane], values[0][lane])
            write_bytes(warp, space, at, np.array([[new]], dtype).view(np.uint8))
        write(warp, old, mask)

    return execute
