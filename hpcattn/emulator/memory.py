"""Global and shared memory. Both know which bytes were written; addresses are checked.

Global memory is the storages of the tensors passed, each at an address of its own. Shared memory is one array for
a whole cluster: byte `offset` of CTA `rank` is at `rank · CTA_STRIDE + offset`, where offsets start at `BASE`. As on
the hardware, an address carries `rank << 24`, a CTA's own too: with that masked off it means the first CTA's memory,
which only `.shared::cluster` instructions reach from elsewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hpcattn.emulator.errors import OutOfBounds, UnwrittenRead

BASE = 1024  # of dynamic shared memory; 1024 because swizzle patterns repeat at that period
LIMIT = 227 * 1024  # bytes of shared memory a CTA can have on Hopper
CTA_STRIDE = 1 << 18
TAG_SHIFT, OFFSET_MASK = 24, (1 << 24) - 1
POISON = 0xFF  # fills shared memory: NaN as bf16, fp16, fp32 and e4m3
_GLOBAL_BASE, _GLOBAL_ALIGNMENT = 1 << 32, 1 << 16


@dataclass(frozen=True)
class Unwritten:
    """A read of bytes that nothing wrote."""

    space: str  # "shared" or "global"
    addresses: tuple[int, ...]  # the first few
    count: int  # bytes
    reader: str  # instruction, warp and CTA

    def __str__(self) -> str:
        where = ", ".join(f"+{a}" for a in self.addresses)
        return f"{self.reader} reads {self.count} bytes of {self.space} memory that nothing wrote, first at {where}"


class _Space:
    """Bytes with a mark on each of those that were written."""

    name: str

    def __init__(self, raise_unwritten: bool, reports: list[Unwritten]):
        self.raise_unwritten, self.reports = raise_unwritten, reports

    def check(self, written: np.ndarray, addresses: np.ndarray, reader: Callable[[], str]) -> None:
        if written.all():
            return
        bad = np.unique(np.asarray(addresses)[~written])
        report = Unwritten(self.name, tuple(int(a) for a in bad[:4]), bad.size, reader())
        if self.raise_unwritten:
            raise UnwrittenRead(str(report))
        if report not in self.reports:
            self.reports.append(report)


class SharedMemory(_Space):
    """The shared memory of a cluster; `size` bytes per CTA from `BASE` on."""

    name = "shared"

    def __init__(self, num_ctas: int, size: int, raise_unwritten: bool, reports: list[Unwritten]):
        super().__init__(raise_unwritten, reports)
        self.num_ctas, self.end = num_ctas, BASE + size
        self.bytes = np.full(num_ctas * CTA_STRIDE, POISON, np.uint8)
        self.written = np.zeros(num_ctas * CTA_STRIDE, bool)
        self.exited = np.zeros(num_ctas, bool)  # CTAs whose memory is gone

    def locate(self, addresses: np.ndarray, cta: int, reader: Callable[[], str], remote: bool = False) -> np.ndarray:
        """Positions in `bytes` of addresses seen from `cta`, of its own memory unless `remote`; raises OutOfBounds."""
        addresses = addresses.astype(np.int64)
        ranks, offsets = addresses >> TAG_SHIFT, addresses & OFFSET_MASK
        bad = (offsets < BASE) | (offsets >= self.end) | (ranks >= self.num_ctas)
        if bad.any():
            worst = int(offsets[bad].flat[0]) - BASE
            raise OutOfBounds(
                f"{reader()} accesses byte {worst} of shared memory, which has {self.end - BASE} bytes in each of "
                f"{self.num_ctas} CTAs"
            )
        if not remote and (ranks != cta).any():
            other = int(ranks[ranks != cta].flat[0])
            raise OutOfBounds(
                f"{reader()} accesses the shared memory of CTA {other} of its cluster without .shared::cluster: was "
                "the rank masked off an address?"
            )
        if self.exited[ranks].any():
            raise OutOfBounds(f"{reader()} accesses the shared memory of a CTA that has exited")
        return ranks * CTA_STRIDE + offsets

    def read(self, where: np.ndarray, reader: Callable[[], str]) -> np.ndarray:
        self.check(self.written[where], where % CTA_STRIDE - BASE, reader)
        return self.bytes[where]

    def write(self, where: np.ndarray, data: np.ndarray) -> None:
        self.bytes[where] = data
        self.written[where] = True

    def await_copy(self, where: np.ndarray) -> None:
        """An asynchronous copy into `where` begins: until it lands, what stands there must not be read."""
        self.written[where] = False


class GlobalMemory(_Space):
    """The storages of all tensors passed to a kernel."""

    name = "global"

    def __init__(self, raise_unwritten: bool, reports: list[Unwritten]):
        super().__init__(raise_unwritten, reports)
        self.starts: list[int] = []
        self.buffers: list[tuple[np.ndarray, np.ndarray]] = []  # bytes, written
        self.known: dict[int, int] = {}  # data pointer of a storage → its index

    def add(self, tensor: torch.Tensor, unwritten: bool = False) -> tuple[int, int]:
        """The buffer of `tensor`'s storage and the address of its first element."""
        storage = tensor.untyped_storage()
        index = self.known.get(storage.data_ptr())
        if index is None:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            end = self.starts[-1] + len(self.buffers[-1][0]) if self.starts else _GLOBAL_BASE
            index = len(self.starts)
            self.starts.append((end // _GLOBAL_ALIGNMENT + 2) * _GLOBAL_ALIGNMENT)
            self.buffers.append((data, np.ones(len(data), bool)))
            self.known[storage.data_ptr()] = index
        first = tensor.storage_offset() * tensor.element_size()
        if unwritten:
            self.buffers[index][1][first : first + tensor.numel() * tensor.element_size()] = False
        return index, self.starts[index] + first

    def _locate(self, addresses: np.ndarray, reader: Callable[[], str]) -> tuple[int, np.ndarray]:
        """`addresses` [lanes, bytes] lie in one buffer: which, and where in it."""
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self.starts, low) - 1
        if index < 0 or high - self.starts[index] >= len(self.buffers[index][0]):
            nearest = max(index, 0)
            base, size = (self.starts[nearest], len(self.buffers[nearest][0])) if self.starts else (0, 0)
            outside = high if index >= 0 else low
            raise OutOfBounds(
                f"{reader()} accesses global memory outside every buffer: byte {outside - base} of one of {size} bytes"
            )
        return index, addresses - self.starts[index]

    def _groups(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Rows of `addresses` that lie in the same buffer."""
        owner = np.searchsorted(np.array(self.starts), addresses[:, 0], side="right")
        return [np.nonzero(owner == o)[0] for o in np.unique(owner)]

    def read(self, addresses: np.ndarray, reader: Callable[[], str]) -> np.ndarray:
        """The bytes at `addresses`, int64 [rows, bytes]; a row does not cross buffers."""
        out = np.empty(addresses.shape, np.uint8)
        for rows in self._groups(addresses):
            index, where = self._locate(addresses[rows], reader)
            data, written = self.buffers[index]
            self.check(written[where], where, reader)
            out[rows] = data[where]
        return out

    def write(self, addresses: np.ndarray, values: np.ndarray, reader: Callable[[], str]) -> None:
        for rows in self._groups(addresses):
            index, where = self._locate(addresses[rows], reader)
            data, written = self.buffers[index]
            data[where] = values[rows]
            written[where] = True
