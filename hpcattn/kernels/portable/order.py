"""The work of a prefill of many requests, longest first: a counting sort on the GPU, of which nothing is read back.

A unit of work is BLOCK_M queries of a request, of all its heads, or, with a block mask, of one head. Units are numbered
as programs of `hpcattn.kernels.portable.prefill` are: request b owns the numbers from `cu_seqlens_q[b] // BLOCK_M + b`
on, of which at most one is idle; heads, if any, vary fastest. A unit's length is the number of its tiles of 128 keys:
those that its last query sees and, with a mask, that are active. Lengths fall in `BINS` equally wide bins.

A program places BLOCK units: in each bin, behind all longer units and those of earlier programs. It takes the number of
these from histograms: with a mask those that `count_kernel` left, without one its own, of all units, since a length
costs little more to compute than to load. Inside a bin, units of one program come in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcattn.kernels.jit import jit
from hpcattn.kernels.portable.prefill import find_request

TILE = 128  # keys; rows and columns of a block mask
BINS = 512
BLOCK, MASKED_BLOCK = 2048, 512  # units per program


@jit
def find_unit(cu_seqlens_q, seq_lens, number, batch, max_kv, STEPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of blocks of queries: the request, the block in it, the request's queries, and its keys less its queries.

    A request whose length is invalid has no keys.
    """
    request, first = find_request(cu_seqlens_q, number, batch, STEPS, BLOCK_M)
    q_len = tl.load(cu_seqlens_q + request + 1) - tl.load(cu_seqlens_q + request)
    kv_len = q_len
    if seq_lens is not None:
        kv_len = tl.load(seq_lens + request)
    kv_len = tl.where((kv_len >= 0) & (kv_len <= max_kv), kv_len, 0)
    return request, number - first, q_len, kv_len - q_len


@jit
def tiles_seen(block, q_len, behind, BLOCK_M: tl.constexpr, TILE: tl.constexpr):
    """Tiles that hold a key that a query of the block sees."""
    return tl.cdiv(tl.maximum(behind + tl.minimum((block + 1) * BLOCK_M, q_len), 0), TILE)


@jit
def count_kernel(
    cu_seqlens_q, seq_lens, mask, mask_request, mask_head, mask_row, mask_rows, mask_columns, bins, histograms,
    batch, num_q_heads, capacity, max_kv, width,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(capacity, BLOCK),): the bin of each unit, -1 if idle, and how many of the program are in each bin."""
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, block, q_len, behind = find_unit(
        cu_seqlens_q, seq_lens, unit // num_q_heads, batch, max_kv, STEPS, BLOCK_M
    )
    exists = (unit < capacity) & (block >= 0) & (block * BLOCK_M < q_len)
    # no tile, if the mask is narrower than what its row of 128 queries sees
    row = block * BLOCK_M // TILE
    fits = behind + tl.minimum(row * TILE + TILE, q_len) <= mask_columns * TILE
    valid = exists & (row < mask_rows) & fits
    seen = tl.where(valid, tiles_seen(block, q_len, behind, BLOCK_M, TILE), 0)
    head = (unit % num_q_heads).to(tl.int64)
    mask += request.to(tl.int64) * mask_request + head * mask_head + row.to(tl.int64) * mask_row
    tiles = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tl.max(seen, 0), CHUNK):
        column = first + tl.arange(0, CHUNK)[None, :]
        active = tl.load(mask[:, None] + column, mask=valid[:, None] & (column < mask_columns), other=0)
        tiles += tl.sum(((active != 0) & (column < seen[:, None])).to(tl.int32), 1)
    bin = (tl.cdiv(max_kv, TILE) - tiles) // width
    tl.store(bins + unit, tl.where(exists, bin, -1), mask=unit < capacity)
    histogram = tl.histogram(bin, BINS, mask=exists)
    tl.store(histograms + tl.program_id(0) * BINS + tl.arange(0, BINS), histogram)


@jit
def find_bin(
    cu_seqlens_q, seq_lens, first, batch, capacity, max_kv, width,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Without a mask: whether the units from `first` on exist, their requests, blocks and bins."""
    unit = first + tl.arange(0, BLOCK)
    request, block, q_len, behind = find_unit(cu_seqlens_q, seq_lens, unit, batch, max_kv, STEPS, BLOCK_M)
    exists = (unit < capacity) & (block >= 0) & (block * BLOCK_M < q_len)
    bin = (tl.cdiv(max_kv, TILE) - tiles_seen(block, q_len, behind, BLOCK_M, TILE)) // width
    return exists, request, block, bin


@jit
def place_kernel(
    cu_seqlens_q, seq_lens, bins, histograms, cursors, order, header, batch, num_q_heads, capacity, max_kv, width,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(capacity, BLOCK),): the order and its header. bins and histograms: None without a mask."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cursors += program * BINS
    tl.store(cursors + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
    before = tl.zeros([BINS], tl.int32)
    unit = program * BLOCK + tl.arange(0, BLOCK)
    if bins is None:
        head = tl.zeros([BLOCK], tl.int32)
        exists, request, block, bin = find_bin(
            cu_seqlens_q, seq_lens, program * BLOCK, batch, capacity, max_kv, width, BLOCK_M, TILE, STEPS, BLOCK
        )
        total = tl.histogram(bin, BINS, mask=exists)
        for i in range(programs - 1):
            other = i + (i >= program).to(tl.int32)
            others, _, _, their_bin = find_bin(
                cu_seqlens_q, seq_lens, other * BLOCK, batch, capacity, max_kv, width, BLOCK_M, TILE, STEPS, BLOCK
            )
            histogram = tl.histogram(their_bin, BINS, mask=others)
            total += histogram
            before += tl.where(other < program, histogram, 0)
    else:
        head = unit % num_q_heads
        bin = tl.load(bins + unit, mask=unit < capacity, other=-1)
        exists = bin >= 0
        bin = tl.maximum(bin, 0)
        request, first = find_request(cu_seqlens_q, unit // num_q_heads, batch, STEPS, BLOCK_M)
        block = unit // num_q_heads - first
        total = tl.zeros([BINS], tl.int32)
        for start in range(0, programs, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            histogram = tl.load(histograms + row * BINS + tl.arange(0, BINS)[None, :], mask=row < programs, other=0)
            total += tl.sum(histogram, 0)
            before += tl.sum(tl.where(row < program, histogram, 0), 0)
    if program == 0:
        tl.store(header, tl.sum(total, 0))
        tl.store(header + 1, 0)
    tl.debug_barrier()  # the cursors are zero
    place = tl.gather(tl.cumsum(total, 0) - total + before, bin, 0)
    place += tl.atomic_add(cursors + bin, 1, mask=exists, sem="relaxed")
    words = tl.join(tl.join(request, head), tl.join(block, tl.zeros([BLOCK], tl.int32))).reshape([BLOCK, 4])
    tl.store(order + place[:, None] * 4 + tl.arange(0, 4)[None, :], words, mask=exists[:, None])


class Step(NamedTuple):
    """`kernel[grid](*args, **options)`, not yet done."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple
    options: dict[str, Any]


def capacity(total_q: int, batch: int, block_m: int, num_q_heads: int = 1) -> int:
    """Rows of `order`: units that there can be. num_q_heads: with a block mask only."""
    return (total_q // block_m + batch) * num_q_heads


def _programs(rows: int, masked: bool) -> int:
    return triton.cdiv(rows, MASKED_BLOCK if masked else BLOCK)


def scratch_words(rows: int, masked: bool) -> int:
    """int32 words of scratch for an `order` of so many rows: cursors and, with a mask, histograms and bins."""
    words = _programs(rows, masked) * BINS
    return 2 * words + rows if masked else words


def launches(
    cu_seqlens_q: Tensor, seq_lens: Tensor | None, block_mask: Tensor | None, num_q_heads: int, block_m: int,
    max_kv: int, order: Tensor, header: Tensor, scratch: Tensor,
) -> list[Step]:  # fmt: skip
    """The launches of `launch`. scratch: int32, at least `scratch_words` of them, of any content."""
    rows, batch, masked = order.shape[0], cu_seqlens_q.shape[0] - 1, block_mask is not None
    programs = _programs(rows, masked)
    size = programs * BINS
    cursors, histograms, unit_bins = scratch[:size], None, None
    width = triton.cdiv(triton.cdiv(max_kv, TILE) + 1, BINS)  # of a bin, in tiles
    block = MASKED_BLOCK if masked else BLOCK
    constants = dict(BLOCK_M=block_m, TILE=TILE, STEPS=batch.bit_length(), BINS=BINS, BLOCK=block)
    sizes = (batch, num_q_heads if masked else 1, rows, max_kv, width)
    steps = []
    if masked:
        histograms, unit_bins = scratch[size : 2 * size], scratch[2 * size : 2 * size + rows]
        args = (cu_seqlens_q, seq_lens, block_mask, *block_mask.stride()[:3], *block_mask.shape[2:])
        args += (unit_bins, histograms, *sizes)
        steps.append(Step(count_kernel, (programs, 1, 1), args, dict(**constants, CHUNK=16, num_warps=16)))
    args = (cu_seqlens_q, seq_lens, unit_bins, histograms, cursors, order, header, *sizes)
    return [
        *steps,
        Step(place_kernel, (programs, 1, 1), args, dict(**constants, ROWS=16, num_warps=8 if masked else 16)),
    ]


def launch(
    cu_seqlens_q: Tensor, seq_lens: Tensor | None, block_mask: Tensor | None, num_q_heads: int, block_m: int,
    max_kv: int, order: Tensor, header: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill order and header in place.

    cu_seqlens_q: int32 `[batch + 1]`; seq_lens: int32 `[batch]`, or None where keys are the queries; block_mask: uint8
    `[batch, num_q_heads, rows, columns]`, its last dimension dense, or None; block_m: 64 or 128; max_kv: the most keys
    that a request may have: one with more, or fewer than none, has units without tiles, as does a row that the mask
    lacks or is too narrow for. order: int32 `[capacity(...), 4]`, whose first rows become (request, block, head, 0),
    the longest unit first, head being 0 without a mask; the others are left as they are. header: int32 `[2]`, which
    becomes (number of units, 0). scratch: as in `launches`; allocated if None.
    """
    if scratch is None:
        words = scratch_words(order.shape[0], block_mask is not None)
        scratch = torch.empty(words, dtype=torch.int32, device=order.device)
    for kernel, grid, args, options in launches(
        cu_seqlens_q, seq_lens, block_mask, num_q_heads, block_m, max_kv, order, header, scratch
    ):
        kernel[grid](*args, **options)
