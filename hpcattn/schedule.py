"""The decode schedule: which cluster of CTAs attends to which tiles of which (request, KV head) pair.

Lay the pairs end to end, request by request, head by head: each takes `pair_cost` places, the price of beginning with
a pair in tiles that could stream meanwhile, then one place for every 128-token tile. A request that is empty, or whose
length is out of range, has one tile, so that somebody writes its rows. Cluster c takes places
`[c * quota, (c + 1) * quota)` of that line, with `quota = max(ceil(total / num_clusters), min_quota)`, or as many
places as the longest pair that takes at most 1 / SPARE more: every cluster that has work has the same, but for the
last, whatever the lengths (Stream-K). The places of one pair in one cluster are a *segment*. The CTAs of the cluster
share its tiles out, contiguously: the share j of a segment that begins at place t goes to CTA `(j + t) % cluster_size`,
so that longer shares rotate. But a whole pair of up to `max(1, quota // (SMALL_SHARE * cluster_size))` tiles is left to
one CTA, pairs in turns: sharing it out would cost more. Small int32 tensors say where to begin:

* `header` = (quota, total, number of requests whose length is out of range, pair_cost);
* `offsets[b]`, `[batch + 1]`: places of the requests before b, counted for one head;
* `records[c]`, `[num_clusters, 8]` = (request, head, first, places, begin, end, quota, pair_cost): the pair in which
  cluster c begins, at which of its places, and how many it has, all 0 for a cluster without work; the cluster's range
  [begin, end) of the line, empty at its end for a cluster without work;
* `counters`, `[num_clusters * cluster_size * ROW_BLOCKS]`: zeros, for the kernels to count arrivals; left at zero.

They depend on the lengths alone, so one plan serves every layer of a step, and rebuilding it in place (`out=`) keeps a
captured graph right when lengths change. Calls with one plan must run one after another: they count in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hpcattn.explanation import Explanation, explains
from hpcattn.kernels.portable import plan as portable
from hpcattn.kernels.portable.decode import TILE
from hpcattn.kernels.portable.plan import PLAN_TILE, ROW_BLOCKS, SMALL_SHARE, SPARE, PlanTensors
from hpcattn.ops import define_operator
from hpcattn.quantization import FP8
from hpcattn.validation import check_seq_lens, check_tensor, check_value, resolve_implementation

__all__ = [
    "PLAN_TILE",
    "DecodePlan",
    "PlanTensors",
    "plan_chunks",
    "plan_decode",
    "plan_decode_reference",
    "portable_grid",
    "saturating_splits",
    "static_chunks",
    "static_splits",
]

CTAS_PER_SM = 2
LONG_REQUEST = 4096  # tokens, as the next
SHORTEST_CHUNK = 512
RAGGED_SPLITS = 32
MOST_WAVES = 16
CPU_SMS = 4  # what the interpreter pretends to have
MOST_TILES = 2**30  # of all pairs together, so that no tile number exceeds 32 bits
CLUSTER_SIZES = (1, 2, 4, 8)


class Policy(NamedTuple):
    """What suits requests of up to `max_seq_len` tokens and pairs of up to `query_rows` rows, measured on an H200."""

    max_seq_len: float
    query_rows: float
    cluster_size: int
    row_blocks: int  # at least: CTAs that share a pair's rows; never more than 32 rows for one
    tiles_per_cta: int  # at least: below, merging costs more than it balances
    reason: str


# the first row that fits counts
HOPPER_POLICY = (
    Policy(1024, math.inf, 1, 1, 8, "requests are short: nothing to share out"),
    Policy(LONG_REQUEST, 8, 2, 1, 1, "two CTAs share the keys of a pair"),
    Policy(LONG_REQUEST, math.inf, 1, 2, 1, "two CTAs share the rows of a pair: the second reads K and V from L2"),
    Policy(16384, 8, 4, 1, 1, "few tiles: the start and the merge count"),
    Policy(math.inf, 8, 2, 1, 1, "many tiles: more CTAs beat shorter merges"),
    Policy(math.inf, math.inf, 4, 1, 1, "many rows: four CTAs merge four times as fast as one"),
)
OTHER_POLICY = (Policy(math.inf, math.inf, 1, 1, 1, "clusters need a Hopper GPU"),)
# clusters on the GPU at once, where not multiprocessors // size: a cluster lies in one GPC, of 16 or 18 of them
RESIDENT_CLUSTERS = {(132, 4): 30, (132, 8): 15}


def pair_places(query_rows: int, dtype: torch.dtype) -> int:
    """What beginning with a pair costs a CTA, in tiles that stream meanwhile. Measured on an H200."""
    return 2 if dtype == FP8 else int(query_rows > 8)


@dataclass(frozen=True)
class DecodePlan:
    """A schedule on the device. Its capacity is `offsets.shape[0] - 1` requests of up to `max_seq_len` tokens."""

    header: Tensor
    offsets: Tensor
    records: Tensor
    counters: Tensor
    num_kv_heads: int
    max_seq_len: int
    min_quota: int
    cluster_size: int
    row_blocks: int = 1
    pair_cost: int = 0
    tile: int = PLAN_TILE

    @property
    def num_clusters(self) -> int:
        return self.records.shape[0]

    @property
    def one_cta_per_pair(self) -> bool:
        """Whether every pair gets a CTA, none of which has more to do than is worth sharing."""
        pairs = (self.offsets.shape[0] - 1) * self.num_kv_heads
        short = self.max_seq_len <= self.min_quota * self.tile
        return self.cluster_size == 1 and short and pairs * self.row_blocks <= self.num_clusters

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.header, self.offsets, self.records, self.counters

    @cached_property
    def metadata(self) -> tuple:
        """All but the contents, hashable: equal for plans that a call treats alike. Computed once, as a cache's."""
        settings = (
            self.num_kv_heads,
            self.max_seq_len,
            self.min_quota,
            self.cluster_size,
            self.row_blocks,
            self.pair_cost,
            self.tile,
        )
        return *((x.shape, x.stride(), x.dtype, x.device) for x in self.tensors), *settings


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number for the CPU, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_SMS


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9


def portable_grid(device: torch.device) -> dict[str, int]:
    """Settings of `plan_decode` for the portable kernels, which have no clusters."""
    return {"cluster_size": 1, "num_clusters": CTAS_PER_SM * multiprocessors(device)}


def policy(
    max_seq_len: float, query_rows: int, dtype: torch.dtype, sms: int, hopper: bool, cluster_size: int | None = None,
    row_blocks: int | None = None,
) -> dict[str, tuple[int, str]]:  # fmt: skip
    """cluster_size and row_blocks (chosen if None), pair_cost, num_clusters and min_quota, each with the reason."""
    rows = HOPPER_POLICY if hopper else OTHER_POLICY
    row = next(row for row in rows if max_seq_len <= row.max_seq_len and query_rows <= row.query_rows)
    size, why = (row.cluster_size, row.reason) if cluster_size is None else (cluster_size, "as asked")
    blocks = (max(row.row_blocks, math.ceil(query_rows / 32)), f"{query_rows} query rows")
    if row_blocks is not None:
        blocks = (row_blocks, "as asked")
    if hopper:
        resident = RESIDENT_CLUSTERS.get((sms, size), sms // size)
        clusters = (max(1, resident // blocks[0]), f"{resident} fit on {sms} multiprocessors")
    else:
        clusters = (max(1, CTAS_PER_SM * sms // size), f"{CTAS_PER_SM} CTAs on each of {sms} multiprocessors")
    quota = (row.tiles_per_cta * size, f"tiles per CTA: {row.tiles_per_cta} or more")
    cost = (
        pair_places(query_rows, dtype) if hopper else 0,
        f"tiles that stream while a CTA begins with a pair, {dtype}",
    )
    return dict(cluster_size=(size, why), row_blocks=blocks, pair_cost=cost, num_clusters=clusters, min_quota=quota)


def plan_decode(
    seq_lens: Tensor,
    num_kv_heads: int,
    *,
    query_rows: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    max_seq_len: int = 2**30,
    cluster_size: int | None = None,
    row_blocks: int | None = None,
    pair_cost: int | None = None,
    num_clusters: int | None = None,
    min_quota: int | None = None,
    out: DecodePlan | None = None,
    implementation: str = "auto",
) -> DecodePlan:
    """Build the schedule where `seq_lens` lives, without the host looking at it.

    seq_lens: int32 `[batch]`. query_rows: S * group_size, query rows per KV head; more than 32 take several blocks of
    CTAs. max_seq_len: longest request the plan may serve, usually `block_table.shape[1] * page_size`, and never more
    than 2**30 tiles of all pairs together allow; a longer (or negative) length gets one tile, is counted in
    `header[2]`, and its rows of the result will be NaN. cluster_size: CTAs per cluster, 1, 2, 4 or 8. num_clusters:
    grid size. min_quota: least tiles per cluster. None: see `explain(plan_decode, ...)`. out: a plan for the same batch
    size to rebuild in place; the other settings are then taken from it.
    implementation: `"auto"`, `"portable"` or `"reference"` (the plain Python twin, which reads the lengths).
    Raises ValueError or TypeError for arguments that do not fit.
    """
    chosen = _resolve(
        seq_lens,
        num_kv_heads,
        query_rows,
        dtype,
        max_seq_len,
        cluster_size,
        row_blocks,
        pair_cost,
        num_clusters,
        min_quota,
        out,
        implementation,
    )
    if out is None:
        n, size = chosen["num_clusters"], chosen["cluster_size"]
        shapes = ((4,), (seq_lens.shape[0] + 1,), (n, 8), (n * size * ROW_BLOCKS,))
        tensors = (torch.empty(shape, dtype=torch.int32, device=seq_lens.device) for shape in shapes)
        out = DecodePlan(
            *tensors,
            num_kv_heads,
            chosen["max_seq_len"],
            chosen["min_quota"],
            size,
            chosen["row_blocks"],
            chosen["pair_cost"],
        )
    torch.ops.hpcattn.plan_decode(
        seq_lens, num_kv_heads, out.min_quota, out.pair_cost, out.max_seq_len, chosen["implementation"], *out.tensors
    )
    return out


@explains(plan_decode)
def _resolve(
    seq_lens,
    num_kv_heads,
    query_rows,
    dtype,
    max_seq_len,
    cluster_size,
    row_blocks,
    pair_cost,
    num_clusters,
    min_quota,
    out,
    implementation,
) -> Explanation:
    """Check everything, and settle what is None or "auto"."""
    check_seq_lens(seq_lens)
    batch, device = seq_lens.shape[0], seq_lens.device
    kind = resolve_implementation(implementation, device, operator="plan_decode")
    if out is not None:
        check_plan(out, batch, device)
        same = num_kv_heads == out.num_kv_heads
        check_value("num_kv_heads", num_kv_heads, same, f"{out.num_kv_heads}, as the plan in out")
        names = ("max_seq_len", "cluster_size", "row_blocks", "pair_cost", "num_clusters", "min_quota")
        settled = {name: (getattr(out, name), "as the plan in out") for name in names}
        return Explanation("plan_decode", {"implementation": kind} | settled)
    check_value("seq_lens", [batch], batch < 65536, "at most 65535 requests long")
    given = dict(cluster_size=cluster_size, row_blocks=row_blocks, pair_cost=pair_cost)
    given |= dict(num_clusters=num_clusters, min_quota=min_quota)
    for name, value, least, most in (
        ("num_kv_heads", num_kv_heads, 1, 1024),
        ("query_rows", query_rows, 1, 80),
        ("row_blocks", row_blocks, 1, ROW_BLOCKS),
        ("pair_cost", pair_cost, 0, 8),
        ("max_seq_len", max_seq_len, 0, 2**30),
        ("num_clusters", num_clusters, 1, 65536),
        ("min_quota", min_quota, 1, 16384),
    ):
        fits = (value is None and name in given) or (isinstance(value, int) and least <= value <= most)
        check_value(name, value, fits, f"an integer from {least} to {most}")
    check_value("cluster_size", cluster_size, cluster_size in (None, *CLUSTER_SIZES), f"one of {CLUSTER_SIZES}")
    pairs = batch * num_kv_heads
    longest = MOST_TILES // max(1, pairs) * PLAN_TILE
    capacity = (max_seq_len, "as asked") if max_seq_len <= longest else (longest, f"{MOST_TILES} tiles in all")
    chosen = policy(
        max_seq_len, query_rows, dtype, multiprocessors(device), is_hopper(device), cluster_size, row_blocks
    )
    chosen |= {name: (value, "as asked") for name, value in given.items() if value is not None}
    return Explanation("plan_decode", {"implementation": kind, "max_seq_len": capacity} | chosen)


def check_plan(plan: DecodePlan, batch: int, device: torch.device) -> None:
    """A plan must be one for `batch` requests, on `device`, and for the tiles of the kernels."""
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must be a DecodePlan, got {type(plan).__name__}")
    check_value("plan.tile", plan.tile, plan.tile == PLAN_TILE, str(PLAN_TILE))
    size = plan.cluster_size
    check_value("plan.cluster_size", size, size in CLUSTER_SIZES, f"one of {CLUSTER_SIZES}")
    typed = dict(dtype=torch.int32, device=device, contiguous=True)
    check_tensor("plan.header", plan.header, shape=(4,), **typed)
    check_tensor("plan.offsets", plan.offsets, shape=(batch + 1,), **typed)
    check_tensor("plan.records", plan.records, shape=(None, 8), **typed)
    check_tensor("plan.counters", plan.counters, shape=(plan.num_clusters * size * ROW_BLOCKS,), **typed)


def plan_decode_reference(
    seq_lens: list[int], num_kv_heads: int, num_clusters: int, *, tile: int = PLAN_TILE, min_quota: int = 1,
    max_seq_len: int = 2**30, pair_cost: int = 0,
) -> tuple[list[int], list[int], list[list[int]]]:  # fmt: skip
    """The plan in plain Python: (header, offsets, records)."""
    valid = [0 <= n <= max_seq_len for n in seq_lens]
    offsets = [0]
    for n, ok in zip(seq_lens, valid, strict=True):
        offsets.append(offsets[-1] + (max(1, math.ceil(n / tile)) if ok else 1) + pair_cost)
    total = offsets[-1] * num_kv_heads
    quota = max(math.ceil(total / num_clusters), min_quota)
    most = quota + quota // SPARE
    quota = max([quota, *(b - a for a, b in pairwise(offsets) if b - a <= most)])

    def record(t: int) -> list[int]:
        if t >= total:
            return [0, 0, 0, 0, total, total, quota, pair_cost]
        b = bisect_right(offsets, t // num_kv_heads) - 1
        tiles = offsets[b + 1] - offsets[b]
        pair = [b, *divmod(t - offsets[b] * num_kv_heads, tiles), tiles]
        return [*pair, t, min(t + quota, total), quota, pair_cost]

    return [quota, total, valid.count(False), pair_cost], offsets, [record(c * quota) for c in range(num_clusters)]


def small_pair(quota: int, cluster_size: int) -> int:
    """Most tiles of a whole pair that one CTA of a cluster takes, as sharing it out would cost more."""
    return max(1, quota // (SMALL_SHARE * cluster_size))


def plan_chunks(plan: DecodePlan, shares: bool = True) -> list[list[list[int]]]:
    """`[request][head]`: the token positions at which the plan's chunks start (reads the plan back).

    shares: each segment is cut into the shares of its cluster's CTAs, as the Hopper kernels do; else it is one chunk.
    """
    quota, offsets, heads = int(plan.header[0]), plan.offsets.tolist(), plan.num_kv_heads
    ctas = plan.cluster_size if shares else 1

    cost = plan.pair_cost

    def chunks(begin: int, places: int) -> list[int]:
        starts, cuts = [], [0, *range(quota - begin % quota, places, quota), places]
        small = len(cuts) == 2 and places - cost <= small_pair(quota, ctas)
        if shares and (small or plan.one_cta_per_pair):
            return [0]
        for first, last in pairwise(max(cut - cost, 0) for cut in cuts):
            share, more = divmod(last - first, ctas)
            starts += [first + j * share + min(j, more) for j in range(min(ctas, last - first))]
        return [start * plan.tile for start in starts]

    return [
        [chunks(start * heads + h * (stop - start), stop - start) for h in range(heads)]
        for start, stop in pairwise(offsets)
    ]


def saturating_splits(batch: int, num_kv_heads: int, max_seq_len: int, device: torch.device) -> int:
    """Chunks per pair for the static schedule: enough to fill the GPU once, never more than a request can have tiles.

    Follows from the grid alone: unlike a rule on query or key length it cannot leave multiprocessors idle on a small
    batch, nor pay for merging on a large one.
    """
    wanted = CTAS_PER_SM * multiprocessors(device) // max(1, batch * num_kv_heads)
    return max(1, min(wanted, max_seq_len // TILE))


def static_splits(ctas: int, max_seq_len: int, device: torch.device) -> tuple[int, int]:
    """(chunks per pair, least tokens per chunk) of the Hopper kernels' static schedule; `ctas`: its grid unsplit.

    A CTA streams at twice its share of the memory's bandwidth, so that half as many CTAs as multiprocessors keep it
    busy: up to there, requests are split. Where lengths may differ much, because the table has room for requests longer
    than `LONG_REQUEST`, each is cut into `RAGGED_SPLITS` chunks, as long as that makes few waves of CTAs. No chunk is
    shorter than `SHORTEST_CHUNK` tokens, below which its share of the merge costs more than it saves. All measured on
    an H200.
    """
    sms = multiprocessors(device)
    splits = sms // (2 * max(1, ctas))
    if max_seq_len > LONG_REQUEST:
        splits = max(splits, min(RAGGED_SPLITS, MOST_WAVES * sms // max(1, ctas)))
    return max(1, min(splits, max_seq_len // SHORTEST_CHUNK)), SHORTEST_CHUNK


def static_chunks(
    seq_lens: list[int], num_kv_heads: int, num_splits: int, *, tile: int = TILE, min_tiles: int = 1
) -> list[list[list[int]]]:  # fmt: skip
    """`[request][head]`: where the chunks of the static schedule start, `tile` as the kernel's."""
    chunk = [max(min_tiles, math.ceil(math.ceil(n / tile) / num_splits)) * tile for n in seq_lens]
    return [[list(range(0, max(1, n), c))] * num_kv_heads for n, c in zip(seq_lens, chunk, strict=True)]


def _plan_decode(
    seq_lens, num_kv_heads, min_quota, pair_cost, max_seq_len, implementation, header, offsets, records, counters
) -> None:  # fmt: skip
    if implementation == "reference":
        plan = plan_decode_reference(
            seq_lens.tolist(),
            num_kv_heads,
            records.shape[0],
            min_quota=min_quota,
            max_seq_len=max_seq_len,
            pair_cost=pair_cost,
        )
        for tensor, values in zip((header, offsets, records), plan, strict=True):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
        counters.zero_()
    else:
        portable.launch(seq_lens, header, offsets, records, counters, num_kv_heads, min_quota, pair_cost, max_seq_len)


define_operator(
    "plan_decode(Tensor seq_lens, int num_kv_heads, int min_quota, int pair_cost, int max_seq_len, str implementation, "
    "Tensor(a!) header, Tensor(b!) offsets, Tensor(c!) records, Tensor(d!) counters)",
    _plan_decode,
)
