"""Build the load-balanced decode schedule on the GPU: a prefix sum over tiles, then one binary search per cluster.

The GPU twin of `hpcattn.schedule.plan_decode_reference`; `hpcattn.schedule` says what the tensors mean. Nothing is
read back.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hpcattn.kernels.jit import jit

PLAN_TILE = 128  # tokens
SMALL_SHARE = 4  # a whole pair of up to quota / (SMALL_SHARE * cluster_size) tiles is left to one CTA
SPARE = 8  # pairs up to 1/8 longer than a cluster's share of the line are worth a longer share, rather than a cut
ROW_BLOCKS = 4  # at most: CTAs that share a pair's query rows


class PlanTensors(NamedTuple):
    """What a decode kernel reads of a `hpcattn.schedule.DecodePlan`."""

    header: Tensor
    offsets: Tensor
    records: Tensor
    counters: Tensor
    cluster_size: int
    row_blocks: int

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the Hopper kernel takes, in its order."""
        return self.records, self.offsets, self.counters


@jit
def prefix_kernel(
    seq_lens, header, offsets, batch, num_kv_heads, num_clusters, min_quota, pair_cost, max_seq_len,
    TILE: tl.constexpr, SPARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,): offsets `[batch + 1]` and the header."""
    total = 0
    invalid = 0
    tl.store(offsets, total)
    for first in range(0, batch, BLOCK):
        i = first + tl.arange(0, BLOCK)
        exists = i < batch
        n = tl.load(seq_lens + i, mask=exists, other=0)
        bad = (n < 0) | (n > max_seq_len)
        tiles = tl.where(exists, tl.maximum(tl.cdiv(tl.where(bad, 0, n), TILE), 1) + pair_cost, 0)
        tl.store(offsets + 1 + i, total + tl.cumsum(tiles, 0), mask=exists)
        total += tl.sum(tiles, 0)
        invalid += tl.sum(bad.to(tl.int32), 0)
    total *= num_kv_heads
    quota = tl.maximum(tl.cdiv(total, num_clusters), min_quota)
    most = quota + quota // SPARE
    for first in range(0, batch, BLOCK):
        i = first + tl.arange(0, BLOCK)
        n = tl.load(seq_lens + i, mask=i < batch, other=0)
        places = tl.maximum(tl.cdiv(tl.where((n < 0) | (n > max_seq_len), 0, n), TILE), 1) + pair_cost
        quota = tl.maximum(quota, tl.max(tl.where((i < batch) & (places <= most), places, 0), 0))
    tl.store(header, quota)
    tl.store(header + 1, total)
    tl.store(header + 2, invalid)
    tl.store(header + 3, pair_cost)


@jit
def records_kernel(
    header, offsets, records, counters, batch, num_kv_heads, num_clusters,
    STEPS: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_clusters, BLOCK),): where each cluster's range begins, and its COUNTERS zeroed."""
    cluster = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = cluster < num_clusters
    for i in tl.static_range(COUNTERS):
        tl.store(counters + i * num_clusters + cluster, 0, mask=exists)
    t = cluster * tl.load(header)
    low = tl.zeros([BLOCK], tl.int32)  # the first request that ends behind t, or batch
    high = tl.zeros([BLOCK], tl.int32) + batch
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        ends_behind = tl.load(offsets + 1 + middle, mask=searching, other=0) > t // num_kv_heads
        high = tl.where(searching & ends_behind, middle, high)
        low = tl.where(searching & ~ends_behind, middle + 1, low)
    busy = low < batch
    offset = tl.load(offsets + low, mask=busy, other=0)
    tiles = tl.load(offsets + 1 + low, mask=busy, other=1) - offset
    t = tl.where(busy, t - offset * num_kv_heads, 0)
    quota = tl.load(header)
    begin = tl.minimum(cluster * quota, tl.load(header + 1))
    record = records + 8 * cluster
    tl.store(record, tl.where(busy, low, 0), mask=exists)
    tl.store(record + 1, t // tiles, mask=exists)
    tl.store(record + 2, t % tiles, mask=exists)
    tl.store(record + 3, tl.where(busy, tiles, 0), mask=exists)
    tl.store(record + 4, begin, mask=exists)
    tl.store(record + 5, tl.minimum(begin + quota, tl.load(header + 1)), mask=exists)
    tl.store(record + 6, quota, mask=exists)
    tl.store(record + 7, tl.load(header + 3), mask=exists)


def launch(seq_lens, header, offsets, records, counters, num_kv_heads, min_quota, pair_cost, max_seq_len) -> None:
    """Fill header `[4]`, offsets `[batch + 1]`, records `[num_clusters, 8]` and counters (zeros) in place."""
    batch, num_clusters = seq_lens.shape[0], records.shape[0]
    block = min(1024, max(16, triton.next_power_of_2(batch)))
    prefix_kernel[1,](
        seq_lens, header, offsets, batch, num_kv_heads, num_clusters, min_quota, pair_cost, max_seq_len,
        TILE=PLAN_TILE, SPARE=SPARE, BLOCK=block,
    )  # fmt: skip
    records_kernel[triton.cdiv(num_clusters, 128),](
        header, offsets, records, counters, batch, num_kv_heads, num_clusters,
        STEPS=batch.bit_length(), COUNTERS=counters.shape[0] // num_clusters, BLOCK=128,
    )  # fmt: skip
