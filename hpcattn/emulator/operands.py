"""Operands of instructions as functions of a warp, and the registry of what each opcode does.

A register is an array over the 32 lanes of a warp: bool for predicates, otherwise uint16, uint32 or uint64. Arrays
are never changed in place, so they may be shared. A *builder* turns an `Instruction` into `execute(warp, mask)`,
once per program; `mask` is None when all lanes are active.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hpcattn.emulator.errors import EmulatorError, UnsupportedInstruction
from hpcattn.emulator.memory import BASE, TAG_SHIFT
from hpcattn.emulator.parser import Instruction, Program

if TYPE_CHECKING:
    from hpcattn.emulator.scheduler import Warp

Reader = Callable[["Warp"], np.ndarray]
Writer = Callable[["Warp", np.ndarray, np.ndarray | None], None]
Execute = Callable[["Warp", np.ndarray | None], None]

LANES = 32
LANE = np.arange(LANES, dtype=np.uint32)
PARAMETER_BASE, PARAMETER_STRIDE = 0x60000000, 128  # where kernel parameters, tensor maps among them, seem to lie

TYPES: dict[str, np.dtype] = {"pred": np.dtype(bool), "f64": np.dtype("f8"), "f32": np.dtype("f4")}
TYPES |= {f"{k}{8 * n}": np.dtype(f"{'i' if k == 's' else 'u'}{n}") for k in "bus" for n in (1, 2, 4, 8)}
TYPES |= {"f16": np.dtype("f2"), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")

_REGISTER_WIDTHS = (("%rs", 2), ("%rd", 8), ("%r", 4))  # bytes, by LLVM's names

SPECIAL: dict[str, Reader] = {
    "%laneid": lambda w: LANE,
    "%lanemask_lt": lambda w: ((np.uint64(1) << LANE.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
    "%lanemask_eq": lambda w: np.uint32(1) << LANE,
    "%warpid": lambda w: _full(w.index),
    "%tid.x": lambda w: LANE + np.uint32(LANES * w.index),
    "%tid.y": lambda w: _full(0),
    "%tid.z": lambda w: _full(0),
    "%ntid.x": lambda w: _full(w.cluster.threads),
    "%cluster_ctarank": lambda w: _full(w.cta),
    "%cluster_nctarank": lambda w: _full(w.cluster.size),
}
for _axis, _name in enumerate("xyz"):
    SPECIAL[f"%ctaid.{_name}"] = lambda w, a=_axis: _full(w.ctaid[a])
    SPECIAL[f"%nctaid.{_name}"] = lambda w, a=_axis: _full(w.cluster.grid[a] * (w.cluster.size if a == 0 else 1))
    SPECIAL[f"%clusterid.{_name}"] = lambda w, a=_axis: _full(w.cluster.position[a])
    SPECIAL[f"%nclusterid.{_name}"] = lambda w, a=_axis: _full(w.cluster.grid[a])

BUILDERS: dict[str, Callable[[Instruction, Program], Execute]] = {}


def _full(value: int) -> np.ndarray:
    return np.full(LANES, value, np.uint32)


def instruction(*stems: str):
    """Register a builder for every opcode equal to a stem or starting with the stem and a dot."""

    def register(builder):
        for stem in stems:
            BUILDERS[stem] = builder
        return builder

    return register


def build(ins: Instruction, program: Program) -> Execute:
    """What `ins` does. The longest registered stem wins. Raises UnsupportedInstruction."""
    parts = ins.parts
    for n in range(len(parts), 0, -1):
        builder = BUILDERS.get(".".join(parts[:n]))
        if builder:
            try:
                return builder(ins, program)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise UnsupportedInstruction(f"the emulator does not know {ins}") from error
    raise UnsupportedInstruction(f"the emulator does not know {ins}")


def dtype_of(type: str) -> np.dtype:
    return TYPES[type]


def unsigned_of(type: str) -> np.dtype:
    dtype = TYPES[type]
    return dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")


def vector(operand: str) -> tuple[str, ...]:
    """The registers of "{a, b}", or the one of "a"."""
    return tuple(x.strip() for x in operand.strip("{} ").split(","))


def integer(operand: str) -> int:
    return int(operand.rstrip("U"), 0)


SHARED = "global_smem"  # the symbol of dynamic shared memory


def shared_base(warp: Warp) -> int:
    """Where the shared memory of a warp's CTA begins."""
    return BASE + (warp.cta << TAG_SHIFT)


def _symbol(operand: str, program: Program) -> int | None:
    for i, (name, _) in enumerate(program.parameters):
        if name == operand:
            return PARAMETER_BASE + i * PARAMETER_STRIDE
    return None


def _constant(operand: str, type: str, program: Program) -> np.ndarray | None:
    dtype, unsigned = TYPES[type], unsigned_of(type)
    if type == "pred":
        return np.full(LANES, operand not in ("0", "false")) if re.fullmatch(r"-?\d+|true|false", operand) else None
    if operand[:2] in ("0f", "0d"):
        pattern = struct.unpack(">f" if operand[1] == "f" else ">d", bytes.fromhex(operand[2:]))[0]
        if dtype.kind == "f":
            return np.full(LANES, pattern, dtype)
        return np.full(LANES, int(operand[2:], 16), unsigned).view(dtype)
    number = re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand)
    value = integer(operand) if number else _symbol(operand, program)
    if value is None:
        return None
    return np.full(LANES, value & ((1 << 8 * unsigned.itemsize) - 1), unsigned).view(dtype)


def source(operand: str, type: str, program: Program) -> Reader:
    """Reads a register, constant, symbol or special register as `type`."""
    if operand.startswith("!"):
        positive = source(operand[1:], type, program)
        return lambda warp: ~positive(warp)
    dtype, unsigned = TYPES[type], unsigned_of(type)
    special = SPECIAL.get(operand)
    if special:
        return lambda warp: special(warp).astype(unsigned).view(dtype)
    if operand == SHARED:
        return lambda warp: np.full(LANES, shared_base(warp), unsigned).view(dtype)
    constant = _constant(operand, type, program)
    if constant is not None:
        return lambda warp: constant
    if not re.fullmatch(r"[%\w$]+", operand):
        raise ValueError(operand)

    def read(warp: Warp) -> np.ndarray:
        value = warp.registers.get(operand)
        if value is None:
            raise EmulatorError(f"{warp.here()} reads register {operand}, which nothing wrote")
        if value.dtype == dtype:
            return value
        if value.dtype.itemsize != unsigned.itemsize:
            value = value.astype(unsigned)
        return value.view(dtype)

    return read


def target(operand: str, type: str) -> Writer:
    """Writes a register; "_" takes nothing."""
    if operand == "_":
        return lambda warp, value, mask: None
    dtype, unsigned = TYPES[type], unsigned_of(type)
    width = next((w for prefix, w in _REGISTER_WIDTHS if operand.startswith(prefix)), 0)
    stored = unsigned if type == "pred" else np.dtype(f"u{max(width, unsigned.itemsize, 2)}")
    extended = np.dtype(f"{dtype.kind}{stored.itemsize}") if dtype.kind == "i" else stored

    def write(warp: Warp, value: np.ndarray, mask: np.ndarray | None) -> None:
        if value.dtype != unsigned:
            value = value.astype(dtype, copy=False).view(unsigned)
        if stored != unsigned:  # a register wider than the type: extended by the type's sign
            value = value.view(dtype).astype(extended).view(stored)
        if mask is not None:
            value = np.where(mask, value, warp.registers.get(operand, stored.type(0)))
        warp.registers[operand] = value

    return write


def address(operand: str, program: Program) -> Reader:
    """Reads "[register + offset]" as int64."""
    base, offset = _ADDRESS.fullmatch(operand).groups()
    offset = integer(offset or "0")
    if base == SHARED:
        return lambda warp: np.full(LANES, shared_base(warp) + offset, np.int64)
    symbol = _symbol(base, program)
    if symbol is not None:
        constant = np.full(LANES, symbol + offset, np.int64)
        return lambda warp: constant

    def read(warp: Warp) -> np.ndarray:
        value = warp.registers.get(base)
        if value is None:
            raise EmulatorError(f"{warp.here()} reads register {base}, which nothing wrote")
        return value.astype(np.int64) + offset

    return read


def uniform(values: np.ndarray, warp: Warp) -> int:
    """The one value that all lanes hold."""
    if (values != values[0]).any():
        raise EmulatorError(f"{warp.here()} needs an operand that is equal in all lanes, got {values.tolist()}")
    return int(values[0])


def active(mask: np.ndarray | None) -> np.ndarray:
    """The lanes of a mask."""
    return np.arange(LANES) if mask is None else np.nonzero(mask)[0]
