"""Copies that complete later: TMA, cp.async, st.async.

From the moment an asynchronous copy is issued until it lands, its destination counts as unwritten, so a read that
does not wait is reported whatever the schedule. A TMA load lands in up to four pieces, in any order, each with
its own bytes. A TMA store reads shared memory when it lands, at the latest when its group is waited for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from hpcattn.emulator.barriers import mbarrier_at
from hpcattn.emulator.errors import EmulatorError, OutOfBounds
from hpcattn.emulator.memory import TAG_SHIFT
from hpcattn.emulator.operands import (
    PARAMETER_BASE,
    PARAMETER_STRIDE,
    active,
    address,
    instruction,
    integer,
    source,
    unsigned_of,
    vector,
)
from hpcattn.emulator.scheduler import Wait

_PIECES = 4  # of a TMA load


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor: a strided tensor in global memory and the box that one copy moves."""

    buffer: int  # of global memory
    start: int  # bytes into the buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]  # elements
    itemsize: int
    swizzle: int  # bytes: 0, 32, 64 or 128
    fill: bytes  # an element out of range: zero or NaN

    @property
    def row_bytes(self) -> int:
        return self.box[-1] * self.itemsize

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.box[:-1]))

    def elements(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Byte positions in the buffer and validity of a box's elements, each [rows, elements of a row]."""
        where, valid = np.int64(self.start), np.bool_(True)
        for axis, (first, n) in enumerate(zip(coordinates, self.box, strict=True)):
            shape = [-1 if axis == a else 1 for a in range(len(self.box))]
            index = np.arange(first, first + n).reshape(shape)
            where = where + index * self.strides[axis]
            valid = valid & (index >= 0) & (index < self.shape[axis])
        shape = (self.num_rows, self.box[-1])
        return np.broadcast_to(where, self.box).reshape(shape), np.broadcast_to(valid, self.box).reshape(shape)

    def shared_addresses(self, first: int) -> np.ndarray:
        """Where the bytes of a box lie in shared memory: int64 [rows, bytes of a row]."""
        return swizzle(first + _linear(self.num_rows, self.row_bytes), self.swizzle)


@lru_cache
def _linear(rows: int, row_bytes: int) -> np.ndarray:
    return np.arange(rows * row_bytes).reshape(rows, row_bytes)


def swizzle(addresses: np.ndarray, span: int) -> np.ndarray:
    """Exchange 16-byte units within rows of `span` bytes, as TMA and wgmma do; by absolute address."""
    units = {0: 0, 16: 0, 32: 1, 64: 3, 128: 7}[span]
    return addresses ^ ((addresses >> 7 & units) << 4)


def _tensor_map(warp, pointer: int) -> TensorMap:
    index, rest = divmod(pointer - PARAMETER_BASE, PARAMETER_STRIDE)
    parameters = warp.cluster.parameters
    if rest or not 0 <= index < len(parameters) or not isinstance(parameters[index], TensorMap):
        raise EmulatorError(f"{warp.here()}: its descriptor is not a tensor map among the kernel's parameters")
    return parameters[index]


@instruction("cp.async.bulk.tensor")
def _tensor_copy(ins, program):
    known = {"shared::cta", "shared::cluster", "global", "mbarrier::complete_tx::bytes", "bulk_group", "tile"}
    known |= {"L2::cache_hint"}
    if not set(ins.parts[5:]) <= known:
        raise KeyError(ins.opcode)
    store = ins.parts[5] == "global"
    shared_operand, map_operand = (ins.operands[1], ins.operands[0]) if store else ins.operands[:2]
    pointer, coordinates = re.fullmatch(r"\[\s*([%\w]+)\s*,\s*\{(.*)\}\s*\]", map_operand).groups()
    where, pointer = address(shared_operand, program), source(pointer, "u64", program)
    axes = [source(c, "s32", program) for c in reversed(vector(coordinates))]
    barrier_at = None if store else address(ins.operands[2], program)

    def execute(warp, mask):
        for lane in active(mask):
            tensor_map = _tensor_map(warp, int(pointer(warp)[lane]))
            box = tuple(int(axis(warp)[lane]) for axis in axes)
            first = int(where(warp)[lane])
            if first % 128:
                raise OutOfBounds(f"{warp.here()}: shared address {first} is not a multiple of 128")
            shared = warp.cluster.shared
            tile = shared.locate(tensor_map.shared_addresses(first), warp.cta, warp.here, remote=True)
            if store:
                what = f"TMA store of box {box} ({ins.source or ins.line})"
                land = partial(_land_store, warp.cluster, tensor_map, box, tile, warp.here())
                warp.bulk.open.append(warp.cluster.start_copy(what, land))
            else:
                _start_load(warp, ins, tensor_map, box, tile, mbarrier_at(warp, barrier_at(warp)[lane]))

    return execute


def _start_load(warp, ins, tensor_map, box, tile, barrier) -> None:
    cluster, here = warp.cluster, warp.here()
    cluster.shared.await_copy(tile)
    for rows in np.array_split(np.arange(tensor_map.num_rows), min(_PIECES, tensor_map.num_rows)):
        what = f"TMA load of box {box}, rows {rows[0]} to {rows[-1]} ({ins.source or ins.line})"
        land = partial(_land_load, cluster, tensor_map, box, tile[rows], rows, barrier, here)
        cluster.start_copy(what, land)


def _land_load(cluster, tensor_map, box, tile, rows, barrier, here) -> None:
    where, valid = (x[rows] for x in tensor_map.elements(box))
    data, written = cluster.memory.buffers[tensor_map.buffer]
    out = np.empty((*where.shape, tensor_map.itemsize), np.uint8)
    out[:] = np.frombuffer(tensor_map.fill, np.uint8)
    inside = where[valid][:, None] + np.arange(tensor_map.itemsize)
    cluster.memory.check(written[inside], inside, lambda: here)
    out[valid] = data[inside]
    cluster.shared.write(tile, out.reshape(tile.shape))
    barrier.update(transferred=tile.size)


def _land_store(cluster, tensor_map, box, tile, here) -> None:
    where, valid = tensor_map.elements(box)
    data, written = cluster.memory.buffers[tensor_map.buffer]
    values = cluster.shared.read(tile, lambda: here).reshape(*where.shape, tensor_map.itemsize)
    inside = where[valid][:, None] + np.arange(tensor_map.itemsize)
    data[inside] = values[valid]
    written[inside] = True


@instruction("cp.async.bulk.commit_group")
def _bulk_commit(ins, program):
    return lambda warp, mask: warp.bulk.commit()


@instruction("cp.async.bulk.wait_group")
def _bulk_wait(ins, program):
    return _wait_groups("bulk", integer(ins.operands[0]), ins)


@instruction("cp.async.commit_group")
def _copy_commit(ins, program):
    return lambda warp, mask: warp.copies.commit()


@instruction("cp.async.wait_group")
def _copy_wait(ins, program):
    return _wait_groups("copies", integer(ins.operands[0]), ins)


@instruction("cp.async.wait_all")
def _copy_wait_all(ins, program):
    wait = _wait_groups("copies", 0, ins)

    def execute(warp, mask):
        warp.copies.commit()
        wait(warp, mask)

    return execute


def _wait_groups(kind: str, remaining: int, ins):
    """Wait until all but the last `remaining` groups of copies have landed."""

    def execute(warp, mask):
        groups = getattr(warp, kind)
        cut = max(len(groups.committed) - remaining, 0)
        old, groups.committed = groups.committed[:cut], groups.committed[cut:]
        copies = [copy for group in old for copy in group]
        if not all(copy.landed for copy in copies):
            warp.wait = Wait(
                lambda: all(copy.landed for copy in copies),
                lambda: f"{sum(not c.landed for c in copies)} copies of {cut} groups; in {ins}",
            )

    return execute


@instruction("cp.async.ca", "cp.async.cg")
def _copy(ins, program):
    to, origin = (address(o, program) for o in ins.operands[:2])
    size = integer(ins.operands[2])
    given = source(ins.operands[3], "u32", program) if len(ins.operands) > 3 else None

    def execute(warp, mask):
        cluster, here, lanes = warp.cluster, warp.here(), active(mask)
        span = np.arange(size)
        tile = cluster.shared.locate(to(warp)[lanes, None] + span, warp.cta, warp.here)
        origins = origin(warp)[lanes, None] + span
        amounts = given(warp)[lanes] if given else np.full(len(lanes), size)

        def land():
            data = np.zeros(tile.shape, np.uint8)
            for amount in np.unique(amounts[amounts > 0]):
                rows = amounts == amount
                data[rows, :amount] = cluster.memory.read(origins[rows, :amount], lambda: here)
            cluster.shared.write(tile, data)

        cluster.shared.await_copy(tile)
        warp.copies.open.append(cluster.start_copy(f"cp.async ({ins.source or ins.line})", land))

    return execute


@instruction("cp.async.mbarrier.arrive.noinc")
def _copy_arrive(ins, program):
    where = address(ins.operands[0], program)

    def execute(warp, mask):
        lanes = active(mask)
        barriers = [mbarrier_at(warp, where(warp)[lane]) for lane in lanes]
        before = [copy for group in (*warp.copies.committed, warp.copies.open) for copy in group]

        def land():
            for barrier in barriers:
                barrier.update(arrivals=1)

        warp.cluster.start_copy(f"arrival of cp.async ({ins.source or ins.line})", land, before)

    return execute


@instruction("st.async")
def _store_async(ins, program):
    type = ins.parts[-1]
    unsigned, names = unsigned_of(type), vector(ins.operands[1])
    where, barrier_at = address(ins.operands[0], program), address(ins.operands[2], program)
    reads, span = [source(n, type, program) for n in names], np.arange(unsigned_of(type).itemsize * len(names))

    def execute(warp, mask):
        cluster, lanes = warp.cluster, active(mask)
        data = np.stack([r(warp).view(unsigned) for r in reads], 1)[lanes].view(np.uint8)
        tile = cluster.shared.locate(where(warp)[lanes, None] + span, warp.cta, warp.here, remote=True)
        pointers = barrier_at(warp)[lanes]
        if ((pointers >> TAG_SHIFT) != (where(warp)[lanes] >> TAG_SHIFT)).any():
            raise EmulatorError(f"{warp.here()}: data and mbarrier lie in different CTAs")
        cluster.shared.await_copy(tile)
        for pointer in np.unique(pointers):
            rows = pointers == pointer
            land = partial(_land_bytes, cluster, tile[rows], data[rows], mbarrier_at(warp, pointer))
            cluster.start_copy(f"st.async ({ins.source or ins.line})", land)

    return execute


def _land_bytes(cluster, tile, data, barrier) -> None:
    cluster.shared.write(tile, data)
    barrier.update(transferred=tile.size)
