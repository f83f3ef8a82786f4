"""Arithmetic, comparisons, conversions and moves: what each lane does by itself."""

from __future__ import annotations

import numpy as np

from hpcattn.emulator.numerics import bf16_to_float, e4m3_to_float, float_to_bf16, float_to_e4m3
from hpcattn.emulator.operands import (
    LANES,
    dtype_of,
    instruction,
    integer,
    source,
    target,
    unsigned_of,
    vector,
)

_UNARY = {
    "neg": np.negative,
    "not": np.invert,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "tanh": np.tanh,
    "popc": lambda x: np.bitwise_count(x) if hasattr(np, "bitwise_count") else _popcount(x),
    "clz": lambda x: np.array([8 * x.dtype.itemsize - int(v).bit_length() for v in x], np.uint32),
}
_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind == "f" else _divide(a, b),
    "rem": lambda a, b: a - b * _divide(a, b),
}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_LOGICAL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_PACKED = {"bf16", "bf16x2", "f16", "f16x2"}  # arithmetic on these isn't modelled


def _popcount(x: np.ndarray) -> np.ndarray:
    return np.array([int(v).bit_count() for v in x], np.uint32)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division that truncates, all ones for a zero divisor."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    quotients = [-1 if d == 0 else abs(n) // abs(d) * (1 if (n < 0) == (d < 0) else -1) for n, d in pairs]
    return np.array(quotients).astype(a.dtype)


def _modelled(ins) -> str:
    type = ins.parts[-1]
    if type in _PACKED or "sat" in ins.parts or "cc" in ins.parts:
        raise KeyError(type)
    return type


@instruction(*_UNARY)
def _unary(ins, program):
    stem, type = ins.parts[0], _modelled(ins)
    result = "b32" if stem in ("popc", "clz") else type
    f, read, write = _UNARY[stem], source(ins.operands[1], type, program), target(ins.operands[0], result)
    return lambda warp, mask: write(warp, f(read(warp)), mask)


@instruction(*_BINARY)
def _binary(ins, program):
    stem, type = ins.parts[0], _modelled(ins)
    f = _BINARY[stem]
    if stem in ("max", "min") and type in ("f32", "f64") and "NaN" not in ins.parts:
        f = np.fmax if stem == "max" else np.fmin
    if len(ins.operands) != 3:
        raise ValueError(ins.operands)
    a, b = (source(o, type, program) for o in ins.operands[1:])
    write = target(ins.operands[0], type)
    return lambda warp, mask: write(warp, f(a(warp), b(warp)), mask)


@instruction("mul", "mad", "fma")
def _multiply(ins, program):
    type = _modelled(ins)
    dtype = dtype_of(type)
    a, b = (source(o, type, program) for o in ins.operands[1:3])
    wide = f"{type[0]}{2 * int(type[1:])}" if "wide" in ins.parts else type
    c = source(ins.operands[3], wide, program) if ins.parts[0] != "mul" else None
    write = target(ins.operands[0], wide)
    if dtype.kind == "f":
        if c is None:
            return lambda warp, mask: write(warp, a(warp) * b(warp), mask)
        if type != "f32":
            raise KeyError(type)
        return lambda warp, mask: write(warp, (a(warp).astype(np.float64) * b(warp) + c(warp)).astype(np.float32), mask)
    high = "hi" in ins.parts
    if high and dtype.itemsize == 8:
        raise KeyError("mul.hi of 64 bits")
    bits, double = 8 * dtype.itemsize, np.dtype(f"{dtype.kind}8")

    def execute(warp, mask):
        x, y = a(warp), b(warp)
        if high:
            product = ((x.astype(double) * y.astype(double)) >> double.type(bits)).astype(dtype)
        else:
            product = x.astype(dtype_of(wide)) * y.astype(dtype_of(wide))
        write(warp, product if c is None else product + c(warp), mask)

    return execute


@instruction("shl", "shr")
def _shift(ins, program):
    type = ins.parts[-1]
    read, amount = source(ins.operands[1], type, program), source(ins.operands[2], "b32", program)
    write, bits = target(ins.operands[0], type), 8 * dtype_of(type).itemsize
    left, signed = ins.parts[0] == "shl", type[0] == "s"

    def execute(warp, mask):
        x, n = read(warp), amount(warp)
        by = np.minimum(n, np.uint32(bits - 1)).astype(x.dtype)
        y = x << by if left else x >> by
        write(warp, y if signed and not left else np.where(n < bits, y, x.dtype.type(0)), mask)

    return execute


@instruction("shf")
def _funnel_shift(ins, program):
    low, high, amount = (source(o, "u32", program) for o in ins.operands[1:])
    write, left, wrap = target(ins.operands[0], "b32"), ins.parts[1] == "l", ins.parts[2] == "wrap"

    def execute(warp, mask):
        n = amount(warp) & np.uint32(31) if wrap else np.minimum(amount(warp), np.uint32(32))
        n = n.astype(np.uint64)
        both = low(warp).astype(np.uint64) | high(warp).astype(np.uint64) << np.uint64(32)
        shifted = (both << n) >> np.uint64(32) if left else both >> n
        write(warp, shifted.astype(np.uint32), mask)

    return execute


@instruction("bfe")
def _extract_bits(ins, program):
    type = ins.parts[-1]
    read = source(ins.operands[1], type, program)
    position, length = integer(ins.operands[2]), integer(ins.operands[3])
    bits, dtype, write = 8 * dtype_of(type).itemsize, dtype_of(type), target(ins.operands[0], type)
    if not 0 < length <= bits - position:
        raise ValueError(ins.operands)
    up, down = dtype.type(bits - position - length), dtype.type(bits - length)
    return lambda warp, mask: write(warp, (read(warp) << up) >> down, mask)


@instruction("prmt.b32")
def _permute_bytes(ins, program):
    if len(ins.parts) > 2:
        raise KeyError(ins.opcode)
    a, b, selector = (source(o, "b32", program) for o in ins.operands[1:])
    write = target(ins.operands[0], "b32")

    def execute(warp, mask):
        data = np.stack([a(warp), b(warp)], 1).view(np.uint8)
        nibbles = (selector(warp)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
        chosen = np.take_along_axis(data, (nibbles & 7).astype(np.int64), 1)
        signs = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
        write(warp, np.where(nibbles & 8, signs, chosen).view(np.uint32)[:, 0], mask)

    return execute


@instruction("setp")
def _compare(ins, program):
    parts, type = ins.parts, _modelled(ins)
    unordered = parts[1] not in _COMPARE and parts[1].endswith("u")
    f = _COMPARE[parts[1].removesuffix("u") if unordered else parts[1]]
    a, b = (source(o, type, program) for o in ins.operands[1:3])
    combine = _LOGICAL.get(parts[2])
    other = source(ins.operands[3], "pred", program) if combine else None
    outputs = ins.operands[0].split("|")
    write = target(outputs[0], "pred")
    complement = target(outputs[1], "pred") if len(outputs) > 1 else None
    ordered_only = parts[1] == "ne" and type in ("f32", "f64")

    def execute(warp, mask):
        x, y = a(warp), b(warp)
        result = f(x, y)
        if unordered:
            result = result | np.isnan(x) | np.isnan(y)
        elif ordered_only:
            result = result & ~(np.isnan(x) | np.isnan(y))
        opposite = ~result
        if combine:
            result, opposite = combine(result, other(warp)), combine(opposite, other(warp))
        write(warp, result, mask)
        if complement:
            complement(warp, opposite, mask)

    return execute


@instruction("selp")
def _select(ins, program):
    type = ins.parts[-1]
    a, b = (source(o, type, program) for o in ins.operands[1:3])
    chosen, write = source(ins.operands[3], "pred", program), target(ins.operands[0], type)
    return lambda warp, mask: write(warp, np.where(chosen(warp), a(warp), b(warp)), mask)


@instruction("mov")
def _move(ins, program):
    type, (output, operand) = ins.parts[-1], ins.operands
    unsigned = unsigned_of(type)
    if operand.startswith("{"):
        names = vector(operand)
        part = f"b{8 * unsigned.itemsize // len(names)}"
        reads, write = [source(n, part, program) for n in names], target(output, type)
        return lambda warp, mask: write(warp, np.stack([r(warp) for r in reads], 1).view(unsigned)[:, 0], mask)
    read = source(operand, type, program)
    if output.startswith("{"):
        names = vector(output)
        part = f"b{8 * unsigned.itemsize // len(names)}"
        writes = [target(n, part) for n in names]

        def unpack(warp, mask):
            pieces = read(warp).view(unsigned).reshape(LANES, 1).view(unsigned_of(part))
            for i, write in enumerate(writes):
                write(warp, pieces[:, i].copy(), mask)

        return unpack
    write = target(output, type)
    return lambda warp, mask: write(warp, read(warp), mask)


@instruction("cvta")
def _convert_address(ins, program):
    type = "u64" if ins.parts[-1] == "u64" or ins.parts[-1] == "b64" else "u32"
    read, write = source(ins.operands[1], type, program), target(ins.operands[0], type)
    return lambda warp, mask: write(warp, read(warp), mask)


def _pack(f, dtype):
    """Two floats → one register; the first operand is the upper half."""
    return lambda a, b: np.stack([f(b), f(a)], 1).view(dtype)[:, 0]


_HALVES = {"f16x2": lambda x: x.astype(np.float16), "bf16x2": float_to_bf16, "e4m3x2": float_to_e4m3}
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_CONVERT_MODIFIERS = {"rn", "rz", "rm", "rp", "ftz", "sat", "satfinite", *_ROUND}


@instruction("cvt")
def _convert(ins, program):
    *modifiers, to, origin = ins.parts[1:]
    if not set(modifiers) <= _CONVERT_MODIFIERS or ("sat" in modifiers):
        raise KeyError(ins.opcode)
    if to in _HALVES and origin == "f32":
        if modifiers[0] != "rn" or (to == "e4m3x2") != ("satfinite" in modifiers):
            raise KeyError(ins.opcode)
        type = "b16" if to == "e4m3x2" else "b32"
        f, write = _pack(_HALVES[to], dtype_of(type)), target(ins.operands[0], type)
        a, b = (source(o, "f32", program) for o in ins.operands[1:])
        return lambda warp, mask: write(warp, f(a(warp), b(warp)), mask)
    if origin == "e4m3x2" and to == "f16x2":
        read, write = source(ins.operands[1], "b16", program), target(ins.operands[0], "b32")
        return lambda warp, mask: write(
            warp, e4m3_to_float(read(warp).view(np.uint8)).astype(np.float16).view(np.uint32), mask
        )
    read, write = source(ins.operands[1], origin, program), target(ins.operands[0], to)
    f = _scalar_conversion(to, origin, modifiers)
    return lambda warp, mask: write(warp, f(read(warp)), mask)


def _scalar_conversion(to, origin, modifiers):
    if "bf16" in (to, origin):
        if (to, origin) == ("f32", "bf16"):
            return bf16_to_float
        if (to, origin) == ("bf16", "f32") and "rn" in modifiers:
            return float_to_bf16
        raise KeyError(to)
    goal, given = dtype_of(to), dtype_of(origin)
    if goal.kind == "f":
        if {"rz", "rm", "rp"} & set(modifiers):
            raise KeyError(modifiers)
        return lambda x: x.astype(goal)
    if given.kind == "f":
        rounding, limits = _ROUND[next(m for m in modifiers if m in _ROUND)], np.iinfo(goal)

        def clamp(x):
            values = rounding(np.nan_to_num(x.astype(np.float64), nan=0.0)).tolist()
            return np.array([int(max(limits.min, min(limits.max, v))) for v in values], goal)

        return clamp
    return lambda x: x.astype(goal)
