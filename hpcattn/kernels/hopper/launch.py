"""Launching: a cache as TMA sees it, and calls that cost the host a few microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import GluonJITFunction
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from hpcattn import emulator
from hpcattn.inspection import recording

__all__ = ["Bound", "Launch", "matrix_view", "tile_descriptor"]


def matrix_view(x: Tensor) -> tuple[int, int, tuple[int, int, int]] | str:
    """Pages `[pages, tokens, heads, D]` as a matrix whose rows are `x.stride(1)` apart, or why there is none.

    Token t of page p and head h is row `p * view[0] + h * view[1] + t`, from column `h * view[2]` on: heads lie side by
    side within a row (NHD) or in rows of their own (HND). Returns (rows, columns, view).
    """
    pages, tokens, heads, dim = x.shape
    page, row, head, _ = x.stride()
    if row <= 0 or pages <= 0:
        return "it has no pages, or tokens that lie in one place"
    row_bytes = row * x.element_size()
    page_rows, in_page = (page // row, page % row) if pages > 1 else (0, 0)
    head_rows, head_columns = (0, 0) if heads == 1 else (head // row, head % row)
    if in_page or (head_rows and head_columns) or row_bytes % 16 or head_columns * x.element_size() % 16:
        return "page and head strides must be multiples of the token stride, and all of 16 bytes"
    rows = (pages - 1) * page_rows + (heads - 1) * head_rows + tokens
    if rows >= 2**31:
        return f"TMA counts rows in 32 bits, and the cache has {rows}"
    return rows, (heads - 1) * head_columns + dim, (page_rows, head_rows, head_columns)


def tile_descriptor(x: Tensor, tokens: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """A descriptor that copies `tokens` tokens of one page and head, and the view it counts in (`matrix_view`)."""
    if x.data_ptr() % 16:
        raise ValueError("q, keys and values must start at a multiple of 16 bytes: use implementation='portable'")
    rows, columns, view = matrix_view(x)
    bits = 8 * x.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0 if bits == 32 else 128, element_bitwidth=bits, rank=2)
    return TensorDescriptor(x, [rows, columns], [x.stride(1), 1], [tokens, x.shape[3]], layout), view


@dataclass(frozen=True)
class Launch:
    """`kernel[grid](*args, **options)`, not yet done; with `cluster` CTAs for every program along the grid's x."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple
    options: dict[str, Any] = field(default_factory=dict)
    cluster: int = 1

    def run(self, device: torch.device) -> None:
        """On a GPU; on a CPU, in the emulator if it is Gluon."""
        if device.type == "cpu" and not recording() and isinstance(self.kernel, GluonJITFunction):
            emulator.launch(self.kernel, self.grid, *self.args, **self.options, cluster=self.cluster)
        elif self.cluster > 1 and not recording():
            bound = Bound(self)
            bound(bound.flat, device.index)
        else:
            self.kernel[self.grid](*self.args, **self.options)


class Bound:
    """A launch compiled once and repeated with other addresses, on the current stream.

    Triton's own launch looks the kernel up by its arguments, inspects every pointer and encodes every tensor map anew:
    20-60 µs. Here tensor maps are kept, and pointers are passed as integers. Whoever calls must see to it that dtypes,
    shapes, strides, scalars and the alignment of pointers are those of `launch`. Uses private interfaces of Triton 3.9.
    """

    MAX_MAPS = 4096  # tensor maps kept: those of a model's layers

    def __init__(self, launch: Launch):
        kernel = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        run = kernel.run  # loads the module
        if run.global_scratch_size or run.profile_scratch_size or run.gsan_enabled:
            raise RuntimeError(
                f"{launch.kernel.__name__} is instrumented and needs scratch memory: launch it with Triton"
            )
        self._launch, self._stream = driver.active.utils.launch, driver.active.get_current_stream
        warps, _, shared = kernel.packed_metadata
        self._head = (kernel.function, run.launch_cooperative_grid, run.launch_pdl, (warps, launch.cluster, shared))
        self._head += (None,) * 5 + (run.arg_annotations, run.kernel_signature)  # hooks, scratch
        self._grid = launch.grid
        self._maps: dict[tuple[int, int], Any] = {}
        self._meta = kernel.metadata.tensordesc_meta or ()
        self.flat: list[Any] = []
        self._tensors: list[int] = []  # positions of pointers in the flat arguments
        self._descriptors: list[tuple[int, TensorDescriptor]] = []  # and of tensor maps
        for arg in launch.args:
            at = len(self.flat)
            if isinstance(arg, TensorDescriptor):
                self.flat += make_tensordesc_arg(arg, self._meta[len(self._descriptors)], None)  # with sizes, strides
                self._descriptors.append((at, replace(arg, base=arg.base.new_empty(0))))  # keeps no cache alive
            else:
                self._tensors += [at] * isinstance(arg, Tensor)
                self.flat.append(arg.data_ptr() if isinstance(arg, Tensor) else arg)
        self.flat += [None] * (len(launch.kernel.arg_names) - len(launch.args))  # constants

    def arguments(self, tensors: Iterable[Tensor | int | None], bases: Iterable[Tensor]) -> list:
        """The kernel's arguments with these tensors or addresses (None is passed over) and bases of descriptors."""
        flat = self.flat.copy()
        pointers = [x if isinstance(x, int) else x.data_ptr() for x in tensors if x is not None]
        for at, pointer in zip(self._tensors, pointers, strict=True):
            flat[at] = pointer
        for index, base in enumerate(bases):
            key = index, base.data_ptr()
            flat[self._descriptors[index][0]] = self._maps.get(key) or self._encode(key, base)
        return flat

    def _encode(self, key: tuple[int, int], base: Tensor) -> Any:
        """The tensor map of a descriptor with another base address."""
        if len(self._maps) >= self.MAX_MAPS:
            self._maps.clear()
        descriptor = replace(self._descriptors[key[0]][1], base=base)
        self._maps[key], *_ = make_tensordesc_arg(descriptor, self._meta[key[0]], None)
        return self._maps[key]

    def __call__(self, arguments: list, device: int) -> None:
        self._launch(*self._grid, self._stream(device), *self._head, arguments)
