"""Build the load-balanced decode schedule on the GPU: a prefix sum over tiles, then one binary search per CTA.

The GPU twin of `hpcattn.schedule.plan_decode_reference`, which says what the tensors mean. Nothing is read back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hpcattn.kernels.jit import jit


@jit
def prefix_kernel(
    seq_lens, header, offsets, batch, num_kv_heads, num_ctas, min_quota, max_seq_len,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,): offsets `[batch + 1]` and the header (quota, total tiles, status)."""
    total = 0
    overflow = 0
    tl.store(offsets, total)
    for first in range(0, batch, BLOCK):
        i = first + tl.arange(0, BLOCK)
        n = tl.load(seq_lens + i, mask=i < batch, other=0)
        bad = (n < 0) | (n > max_seq_len)
        tiles = tl.cdiv(tl.where(bad, 0, n), TILE)
        tl.store(offsets + 1 + i, total + tl.cumsum(tiles, 0), mask=i < batch)
        total += tl.sum(tiles, 0)
        overflow += tl.sum(bad.to(tl.int32), 0)
    total *= num_kv_heads
    tl.store(header, tl.maximum(tl.cdiv(total, num_ctas), min_quota))
    tl.store(header + 1, total)
    tl.store(header + 2, overflow)
    tl.store(header + 3, 0)


@jit
def search_kernel(header, offsets, starts, batch, num_kv_heads, num_ctas, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (cdiv(num_ctas, BLOCK),): the first request whose tiles end behind a CTA's first tile."""
    cta = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = cta * tl.load(header)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + batch
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        ends_behind = tl.load(offsets + 1 + middle, mask=searching, other=0) * num_kv_heads > t
        high = tl.where(searching & ends_behind, middle, high)
        low = tl.where(searching & ~ends_behind, middle + 1, low)
    tl.store(starts + cta, low, mask=cta < num_ctas)


def launch(seq_lens, header, offsets, starts, num_kv_heads, tile, min_quota, max_seq_len) -> None:
    """Fill header `[4]`, offsets `[batch + 1]` and starts `[num_ctas]` in place."""
    batch, num_ctas = seq_lens.shape[0], starts.shape[0]
    block = min(1024, max(16, triton.next_power_of_2(batch)))
    prefix_kernel[1,](
        seq_lens, header, offsets, batch, num_kv_heads, num_ctas, min_quota, max_seq_len, TILE=tile, BLOCK=block
    )
    search_kernel[triton.cdiv(num_ctas, 128),](
        header, offsets, starts, batch, num_kv_heads, num_ctas, STEPS=batch.bit_length(), BLOCK=128
    )
