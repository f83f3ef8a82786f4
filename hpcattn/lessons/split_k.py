"""Lesson 06, split-K and the cluster merge: a model of 132 SMs, the task map, launches, measurements, checkers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import Timing, copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import DECODE_CASES, Workload
from hpcattn.inspection import Compiled, Variant
from hpcattn.kernels.hopper.launch import Launch
from hpcattn.lessons import recording
from hpcattn.lessons import split_k_kernels as kernels
from hpcattn.lessons.recording import BF16_BOUND, checked
from hpcattn.reference import relative_error
from hpcattn.schedule import RESIDENT_CLUSTERS, plan_decode, plan_decode_reference, small_pair

__all__ = [
    "CLUSTERS", "Merge", "Piece", "Rates", "Segment", "Span", "by_case", "calibrate", "chain", "check_bytes_expected",
    "check_plan", "cut_states", "decode_call", "decode_us", "dynamic_ctas", "makespan", "measure_all", "merge_calls",
    "occupy", "record", "recorded", "resident_clusters", "run", "shares", "simulate", "static_ctas", "task_map",
    "tiles_of", "workload",
]  # fmt: skip

HEAD_DIM, ROWS = 128, 8
TOKEN_BYTES = 2 * HEAD_DIM * 2  # K and V in bf16, one KV head
STATE_BYTES = ROWS * (HEAD_DIM + 2) * 4  # acc, m and l in fp32
TILE = 128  # tokens, of the task map
SMS = 132
CLUSTERS = (1, 2, 4, 8)
PREFIX = "splitk_"


# --- A model of the GPU: SMs that share the memory's bandwidth -------------------------------------------------------


class Piece(NamedTuple):
    """Part of a CTA's work: so many tokens of one request, and a merge that takes `merge_us`."""

    request: int
    tokens: int
    merge_us: float = 0.0


class Span(NamedTuple):
    """What an SM does from `start` to `stop`, in µs: stream tokens of a request, or merge."""

    sm: int
    start: float
    stop: float
    request: int
    merges: bool


@dataclass(frozen=True)
class Rates:
    """A GPU and a kernel on it, as the model sees them."""

    total: float  # KB/µs that the memory delivers
    most: float  # KB/µs that one SM can take
    start_us: float  # before the first tile counts: launch, dependent loads, the way back at the end
    sms: int = SMS


def calibrate(total: float, us_64x512: float, us_32x4096: float) -> Rates:
    """Rates of a kernel that gives each request one CTA, from its times for 64 requests of 512 tokens and for 32 of
    4,096 (beside which 32 of 128 tokens do not count).
    """
    short, long = (n * TOKEN_BYTES / 1e3 for n in (512, 4096))
    most = (long - short) / (us_32x4096 - us_64x512)  # if neither filled the memory
    start = us_64x512 - short / most
    if 64 * most > total:  # the first did
        start = us_64x512 - 64 * short / total
        most = long / (us_32x4096 - start)
    return Rates(float(total), most, float(start))


def simulate(ctas: Sequence[Sequence[Piece]], rates: Rates) -> list[Span]:
    """Run CTAs on SMs that hold one each, in order, the next where an SM is free.

    While n SMs stream, each gets `min(most, total / n)`. Merging takes no bandwidth worth counting; the next piece of
    the CTA streams meanwhile, so only the last merge of a CTA holds anything up.
    """
    waiting = [list(pieces) for pieces in reversed(ctas) if pieces]
    work: list[list[Piece]] = [[] for _ in range(rates.sms)]
    left = np.full(rates.sms, np.inf)  # KB of the current piece
    until = np.full(rates.sms, np.inf)  # when the current merge is over
    since = np.zeros(rates.sms)
    spans: list[Span] = []
    now = rates.start_us

    def take(sm: int) -> None:
        """The SM's next piece, or the next CTA."""
        if not work[sm] and waiting:
            work[sm] = waiting.pop()
        left[sm] = work[sm][0].tokens * TOKEN_BYTES / 1e3 if work[sm] else np.inf
        since[sm] = now

    for sm in range(rates.sms):
        take(sm)
    while np.isfinite(left).any() or np.isfinite(until).any():
        streaming = np.isfinite(left)
        rate = min(rates.most, rates.total / max(1, streaming.sum()))
        step = min((left / rate).min(), (until - now).min())
        now += step
        left[streaming] -= rate * step
        for sm in np.flatnonzero(left < 1e-9):
            piece = work[sm].pop(0)
            spans.append(Span(int(sm), float(since[sm]), now, piece.request, False))
            if piece.merge_us:
                spans.append(Span(int(sm), now, now + piece.merge_us, piece.request, True))
            if piece.merge_us and not work[sm]:
                left[sm], until[sm] = np.inf, now + piece.merge_us
            else:
                take(sm)
        for sm in np.flatnonzero(until - now < 1e-9):
            until[sm] = np.inf
            take(sm)
    return spans


def makespan(spans: Sequence[Span]) -> float:
    return max(span.stop for span in spans)


def decode_us(frame: pd.DataFrame, implementation: str, schedule: str = "-") -> dict[str, float]:
    """Recorded µs of each workload: bf16, NHD, one query token, a paged cache, the steady protocol."""
    same = {"dtype": "bf16", "layout": "NHD", "num_query_tokens": 1, "protocol": "steady", "schedule": schedule}
    rows = frame[(frame.implementation == implementation) & (frame.page_size > 0)]
    for column, value in same.items():
        rows = rows[rows[column] == value]
    return {row.case: float(row.median_us) for _, row in records.latest(rows).iterrows() if row.case in DECODE_CASES}


def static_ctas(lens: Sequence[int], splits: int, shortest: int, tile: int = 64) -> list[list[Piece]]:
    """A fixed split: a CTA for each of up to `splits` chunks of every request, none shorter than `shortest`."""
    ctas = []
    for request, n in enumerate(lens):
        chunk = max(shortest, -(-n // (splits * tile)) * tile)
        ctas += [[Piece(request, min(chunk, n - at))] for at in range(0, n, chunk)]
    return ctas


# --- The task map ----------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Tiles [first, last) of a (request, KV head) pair that has `tiles` of them."""

    pair: int
    first: int
    last: int
    tiles: int

    @property
    def cut(self) -> bool:
        """Whether other clusters have tiles of this pair."""
        return self.first > 0 or self.last < self.tiles


def tiles_of(lens: Sequence[int], tile: int = TILE) -> list[int]:
    """Tiles of each request; an empty one has one, so that somebody writes its rows."""
    return [max(1, -(-n // tile)) for n in lens]


def task_map(tiles: Sequence[int], clusters: int, least: int = 1) -> list[list[Segment]]:
    """Each cluster's segments: equal shares of the line on which all tiles lie."""
    starts = np.concatenate([[0], np.cumsum(tiles)])  # the prefix sum: where each pair begins on the line
    total = int(starts[-1])
    quota = max(-(-total // clusters), least)
    found: list[list[Segment]] = []
    for c in range(clusters):
        at, end, mine = min(c * quota, total), min((c + 1) * quota, total), []
        pair = int(np.searchsorted(starts, at, side="right")) - 1  # the record: found by bisection, once per cluster
        while at < end:
            first = at - int(starts[pair])
            last = min(first + end - at, tiles[pair])
            mine.append(Segment(pair, first, last, tiles[pair]))
            at += last - first
            pair += 1
        found.append(mine)
    return found


def alone(segment: Segment, cluster_size: int, quota: int) -> bool:
    """Whether one CTA takes all of it: a whole pair, short beside what each CTA of the cluster has to do."""
    return cluster_size == 1 or (not segment.cut and segment.tiles <= small_pair(quota, cluster_size))


def shares(segments: Sequence[Segment], cluster_size: int, start: int, quota: int) -> list[list[Segment]]:
    """Share out a cluster's segments: for each of its CTAs, the tiles it gets. start: where the cluster's range begins.

    Short pairs are left to one CTA. The others are cut into contiguous shares; who gets the extra tile rotates with the
    place on the line.
    """
    ctas: list[list[Segment]] = [[] for _ in range(cluster_size)]
    for segment in segments:
        pair, first, last, tiles = segment
        if alone(segment, cluster_size, quota):
            ctas[pair % cluster_size].append(segment)
        else:
            size, more = divmod(last - first, cluster_size)
            for j in range(cluster_size):
                at = first + j * size + min(j, more)
                ctas[(j + start) % cluster_size].append(Segment(pair, at, at + size + (j < more), tiles))
        start += last - first
    return ctas


def resident_clusters(cluster_size: int, sms: int = SMS) -> int:
    """Clusters of this size that run on the GPU at the same time."""
    return RESIDENT_CLUSTERS.get((sms, cluster_size), sms // cluster_size)


def dynamic_ctas(
    lens: Sequence[int], cluster_size: int, merge_us: float = 0.0, border_us: float = 0.0
) -> list[list[Piece]]:
    """What each CTA of the dynamic schedule does, as pieces for `simulate`.

    A merge takes `merge_us` within a cluster of more than one CTA, and `border_us` more for pairs that others share.
    The quota is the library's, which may be a little longer if that spares a pair a cut.
    """
    quota = plan_decode_reference(list(lens), 1, resident_clusters(cluster_size))[0][0]
    mapped = task_map(tiles_of(lens), resident_clusters(cluster_size), quota)
    ctas, start = [], 0
    for segments in mapped:
        price = {s.pair: merge_us * (not alone(s, cluster_size, quota)) + border_us * s.cut for s in segments}
        for mine in shares(segments, cluster_size, start, quota):
            tokens = [min(s.last * TILE, lens[s.pair]) - s.first * TILE for s in mine]
            ctas.append([Piece(s.pair, max(0, n), price[s.pair]) for s, n in zip(mine, tokens, strict=True)])
        start += sum(s.last - s.first for s in segments)
    return ctas


def cut_states(mapped: Sequence[Sequence[Segment]]) -> int:
    """Partial states that must leave their cluster: one per segment of a pair that lies in several."""
    return sum(segment.cut for segments in mapped for segment in segments)


# --- Launching the kernels -------------------------------------------------------------------------------------------


def compiled(kernel, *args, **options) -> Compiled:
    """For Hopper, without a GPU."""
    return Variant.from_launch(kernel.__name__, kernel, *args, **options).compile()


def run(kernel, ctas: int, *args, cluster: int = 1, schedule_seed: int = 0, **options) -> None:
    """Launch `ctas` CTAs in clusters of `cluster`: on a Hopper GPU, or emulated for tensors on the CPU.

    The kernel is compiled for one CTA: clusters are a matter of the launch.
    """
    device = next(x.device for x in args if isinstance(x, Tensor))
    grid = (ctas // cluster, 1, 1)  # in clusters
    if is_cuda(device):
        Launch(kernel, grid, args, options, cluster).run(device)
    else:
        emulator.launch(kernel, grid, *args, cluster=cluster, schedule_seed=schedule_seed, **options)


@dataclass(frozen=True)
class Merge:
    """`outputs` outputs of `cluster` CTAs each, one random state per CTA, and one of the four ways to merge them.

    kind: "alone" (no merge), "separate" (two kernels), "arrive" (the last one to arrive) or "push" (through DSM).
    """

    kind: str
    cluster: int
    outputs: int
    device: torch.device | str = "cpu"

    @property
    def ctas(self) -> int:
        return self.cluster * self.outputs

    @property
    def shape(self) -> dict[str, int]:
        return {"R": ROWS, "D": HEAD_DIM, "num_warps": 4}

    @cached_property
    def states(self) -> Tensor:
        """acc [CTAs, R, D], then (m, l) [CTAs, 2, R]."""
        random = torch.Generator(self.device).manual_seed(0)
        acc = torch.randn(self.ctas, ROWS, HEAD_DIM, generator=random, device=self.device)
        m = 3 * torch.randn(self.ctas, 1, ROWS, generator=random, device=self.device)
        l = 1 + torch.rand(self.ctas, 1, ROWS, generator=random, device=self.device)
        return torch.cat([acc.flatten(), torch.cat([m, l], 1).flatten()])

    @cached_property
    def workspace(self) -> Tensor:
        return torch.full_like(self.states, float("nan"))

    @cached_property
    def arrivals(self) -> Tensor:
        return torch.zeros(self.outputs, dtype=torch.int32, device=self.device)

    @cached_property
    def out(self) -> Tensor:
        outputs = self.ctas if self.kind == "alone" else self.outputs
        return torch.full((outputs, ROWS, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=self.device)

    def __call__(self, schedule_seed: int = 0, **options) -> Tensor:
        """out. options: constants of the push kernel."""
        shape = self.shape | {"schedule_seed": schedule_seed}
        if self.kind == "alone":
            run(kernels.alone_kernel, self.ctas, self.states, self.out, **shape)
        elif self.kind == "separate":
            run(kernels.leave_kernel, self.ctas, self.states, self.workspace, **shape)
            self.merge_only()
        elif self.kind == "arrive":
            args = (self.states, self.workspace, self.arrivals, self.out)
            run(kernels.arrive_kernel, self.ctas, *args, C=self.cluster, **shape)
        else:
            shape |= {"C": self.cluster, "cluster": self.cluster, "BYTES": STATE_BYTES} | options
            run(kernels.push_kernel, self.ctas, self.states, self.out, **shape)
        return self.out

    def merge_only(self) -> None:
        """The second of the two kernels of "separate"."""
        run(kernels.merge_kernel, self.ctas, self.workspace, self.out, C=self.cluster, **self.shape)

    def expected(self) -> Tensor:
        """In float64, for what `kind` writes."""
        group = 1 if self.kind == "alone" else self.cluster
        states = self.states.double()
        acc = states[: self.ctas * ROWS * HEAD_DIM].view(-1, group, ROWS, HEAD_DIM)
        m, l = states[self.ctas * ROWS * HEAD_DIM :].view(-1, group, 2, ROWS).unbind(2)
        weight = torch.exp2(m - m.amax(1, keepdim=True))
        return (acc * weight[..., None]).sum(1) / (l * weight).sum(1)[..., None]

    def error(self, schedule_seed: int = 0) -> float:
        self.out.fill_(float("nan"))
        return relative_error(self(schedule_seed), self.expected())


LEVELS = ("register", "warp", "cta", "cluster", "grid")


def chain(level: str, steps: int, device: torch.device | str = "cpu") -> Callable[..., Tensor]:
    """A call of `chain_kernel`: its result after `steps` steps from one thread to another on a level."""
    cluster = 2 if level == "cluster" else 1
    out, counter = torch.zeros(128 * cluster, device=device), torch.zeros(1, dtype=torch.int32, device=device)

    def call(schedule_seed: int = 0) -> Tensor:
        options = {"LEVEL": level, "num_warps": 4, "schedule_seed": schedule_seed}
        run(kernels.chain_kernel, cluster, out, counter, steps, cluster=cluster, **options)
        return out

    return call


def occupy(cluster: int, clusters: int, clocks: int, device: torch.device | str) -> Callable[[], None]:
    """A call in which every CTA keeps an SM for itself for so many clocks."""
    out = torch.empty(32 * cluster * clusters, device=device)
    return lambda: run(kernels.occupy_kernel, cluster * clusters, out, clocks, cluster=cluster, num_warps=1)


# --- Measurements ----------------------------------------------------------------------------------------------------

MERGE_CTAS = 128
CHAIN_STEPS = {"register": 16384, "warp": 16384, "cta": 4096, "cluster": 1024, "grid": 1024}
OCCUPY_CLOCKS = 20_000
OCCUPY = {2: (65, 66, 67), 4: (30, 31, 32, 33, 34), 8: (14, 15, 16, 17)}  # clusters


def measure_all(
    device: torch.device | str = "cuda",
    *,
    cases: Mapping[str, Sequence[int]] = DECODE_CASES,
    cluster_sizes: Sequence[int] = CLUSTERS,
    merge_ctas: int = MERGE_CTAS,
    chain_steps: Mapping[str, int] = CHAIN_STEPS,
    occupied: Mapping[int, Sequence[int]] = OCCUPY,
    replays: int = 10,
    warmup: int = 3,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time everything that the lesson shows, in the steady protocol; rows of table `records`.

    `splitk_<way>_<C>`: `merge_ctas` CTAs that merge in groups of C; `splitk_alone`: without a merge;
    `splitk_merge_<C>`: only the second of two kernels. `splitk_chain_<level>_<steps>`: so many steps in a row.
    `splitk_occupy_<C>_<n>`: n clusters of C CTAs that hold an SM each for `OCCUPY_CLOCKS`.
    `splitk_cluster<C>_<case>`: the library's dynamic decode with a plan for clusters of C.
    """
    origin = provenance(device, new_run_id(), commit)
    options = {"device": device, "replays": replays, "warmup": warmup}
    found = [*_measure_merges(merge_ctas, [c for c in cluster_sizes if c > 1], **options)]
    found += _measure_chains(chain_steps, **options)
    if occupied:
        found += _measure_occupancy(occupied, **options)
    for name, lens in cases.items():
        found += _measure_decode(name, lens, cluster_sizes, **options)
    return pd.DataFrame([Record(**row, **origin) for row in found], columns=records.COLUMNS)


def merge_calls(ctas: int, clusters: Sequence[int], device: torch.device | str) -> dict[str, Merge]:
    """Every way to merge, for groups of each size."""
    calls = {"alone": Merge("alone", 1, ctas, device)}
    for c in clusters:
        calls |= {f"{kind}_{c}": Merge(kind, c, ctas // c, device) for kind in ("separate", "arrive", "push")}
    return calls


def _measure_merges(ctas: int, clusters: Sequence[int], *, device, replays: int, warmup: int) -> Iterator[dict]:
    merges = merge_calls(ctas, clusters, device)
    errors = {name: checked(call.error(), name) for name, call in merges.items()}
    calls: dict[str, list[Callable]] = {name: [call] for name, call in merges.items()}
    calls |= {f"merge_{c}": [merges[f"separate_{c}"].merge_only] for c in clusters}
    for name, timing in _timed(calls, device, replays, warmup).items():
        yield _row(name, timing, errors.get(name, errors["alone"]), None)
    for name, call in merges.items():  # and once more: counters that were not set back would show
        checked(call.error(), f"{name}, after timing")


def _measure_chains(steps: Mapping[str, int], *, device, replays: int, warmup: int) -> Iterator[dict]:
    for level in steps:
        _check_chain(level, 5, device)
    calls = {f"chain_{level}_{n}": [chain(level, n, device)] for level, n in steps.items()}
    for name, timing in _timed(calls, device, replays, warmup).items():
        yield _row(name, timing, math.nan, None)


def _check_chain(level: str, steps: int, device: torch.device | str) -> None:
    """Raises if numbers did not travel as they should."""
    x, got = torch.arange(128.0), chain(level, steps, device)().cpu()[:128]
    if level == "register":
        for _ in range(steps):
            x = x * 0.5 + 1
    else:
        x = {"warp": x.view(-1, 2).flip(1).flatten(), "grid": x + sum(range(steps))}.get(level, x + steps)
    if not torch.equal(got, x):
        raise AssertionError(f"chain, {level}: {got.tolist()[:4]} instead of {x.tolist()[:4]}")


def _measure_occupancy(occupied: Mapping[int, Sequence[int]], *, device, replays: int, warmup: int) -> Iterator[dict]:
    calls = {f"occupy_{c}_{n}": [occupy(c, n, OCCUPY_CLOCKS, device)] for c, many in occupied.items() for n in many}
    for name, timing in _timed(calls, device, replays, warmup).items():
        yield _row(name, timing, math.nan, None)


def _measure_decode(
    name: str, lens: Sequence[int], cluster_sizes: Sequence[int], *, device, replays: int, warmup: int
) -> Iterator[dict]:
    work = workload(lens, name)
    errors: dict[int, float] = {}
    for v_mean in (0.0, 1.0):
        x = work.build(device, v_mean=v_mean)
        want = x.reference()[0]
        for c in cluster_sizes:
            error = checked(relative_error(decode_call(x, c)(), want), f"{name}, clusters of {c}, V of mean {v_mean:g}")
            errors[c] = max(errors.get(c, 0.0), error)
        del x, want
    sets = work.build_many(copies_to_exceed_l2(work.kv_bytes, l2_bytes(device)), device)
    calls = {str(c): [decode_call(x, c) for x in sets] for c in cluster_sizes}
    for c, timing in _timed(calls, device, replays, warmup).items():
        yield _row(f"cluster{c}_{name}", timing, errors[int(c)], work)


def workload(lens: Sequence[int], case: str = "lesson") -> Workload:
    """bf16, NHD, one query token, 8 query heads on one KV head, pages of 64 tokens."""
    return Workload(
        suite="decode", case=case, q_lens=(1,) * len(lens), kv_lens=tuple(lens), num_q_heads=ROWS, num_kv_heads=1
    )  # fmt: skip


def decode_call(x, cluster_size: int | None = None, **settings) -> Callable[[], Tensor]:
    """The library's dynamic decode on the inputs `x`, planned for clusters of this size (None: the policy's)."""
    from hpcattn import prepare_decode

    capacity = x.block_table.shape[1] * x.cache.page_size
    plan = plan_decode(
        x.seq_lens, x.cache.num_kv_heads, query_rows=ROWS, max_seq_len=capacity, cluster_size=cluster_size, **settings
    )
    return prepare_decode(x.q, x.cache, x.block_table, x.seq_lens, plan=plan, implementation="hopper")


def _timed(calls: Mapping[str, Sequence[Callable]], device, replays: int, warmup: int) -> dict[str, Timing]:
    return measure("steady", calls, timer_for(device), replays=replays, warmup=warmup)


def _row(case: str, timing: Timing, error: float, work: Workload | None) -> dict:
    return recording.row(
        PREFIX + case, timing, error, work, page_size=64 if work else 0, schedule="dynamic" if work else "-"
    )


_lesson = recording.LessonRows(PREFIX, measure_all)
record, recorded, by_case = _lesson.record, _lesson.recorded, _lesson.by_case


# --- The exercises ---------------------------------------------------------------------------------------------------

RAGGED = {"one cluster is enough": (100, 1, 300), "empty requests": (0, 1000, 0, 0, 5000, 0), "one token": (1,)}


def check_plan(plan: Callable[[list[int], int], list[list[tuple[int, int, int]]]]) -> None:
    """Raise AssertionError with a counter-example unless `plan(tiles, clusters)` is a task map: for each cluster a list
    of (pair, first tile, one past the last), for the nine workloads and some awkward ones.
    """
    for name, lens in {**DECODE_CASES, **RAGGED}.items():
        for clusters in (resident_clusters(c) for c in CLUSTERS):
            _check_one_plan(plan, tiles_of(lens), clusters, f"{name}, {clusters} clusters")


def _check_one_plan(plan: Callable, tiles: list[int], clusters: int, where: str) -> None:
    got = plan(list(tiles), clusters)
    assert isinstance(got, list) and len(got) == clusters, f"{where}: plan must return one list for each cluster"
    line = []
    for c, segments in enumerate(got):
        for segment in segments:
            assert len(segment) == 3, f"{where}: cluster {c} has {segment!r}, not (pair, first, last)"
            pair, first, last = segment
            inside = 0 <= pair < len(tiles) and 0 <= first < last <= tiles[min(max(pair, 0), len(tiles) - 1)]
            assert inside, f"{where}: cluster {c} has {tuple(segment)}, and there are no such tiles"
            line += [(pair, t, c) for t in range(first, last)]
    want = [(pair, t) for pair, n in enumerate(tiles) for t in range(n)]
    seen = sorted((pair, t) for pair, t, _ in line)
    if seen != want:
        twice = next((a for a, b in zip(seen, seen[1:], strict=False) if a == b), None)
        lost = next((x for x in want if x not in set(seen)), None)
        what = (
            f"tile {lost[1]} of pair {lost[0]} has no cluster" if lost else f"tile {twice[1]} of pair {twice[0]} twice"
        )
        raise AssertionError(f"{where}: {what}")
    for (pair, t, c), expected in zip(line, want, strict=True):
        assert (pair, t) == expected, (
            f"{where}: cluster {c} is at tile {t} of pair {pair} where the line has tile {expected[1]} of pair "
            f"{expected[0]}: neighbours on the line must be neighbours in the map"
        )
    sizes = [sum(last - first for _, first, last in segments) for segments in got]
    bound = math.ceil(sum(tiles) / clusters)
    assert max(sizes) <= 1.05 * bound, f"{where}: a cluster has {max(sizes)} tiles, {bound} would do"
    busy = [n for n in sizes if n]
    assert sizes[: len(busy)] == busy, f"{where}: a cluster is idle while a later one works"
    assert set(busy[:-1]) <= {max(sizes)}, (
        f"{where}: all but the last must have the same quota, got {sorted(set(busy))}"
    )


def check_bytes_expected(bytes_expected: Callable[[int, int, int], int]) -> None:
    """Raise AssertionError unless `bytes_expected(cluster, rows, dims)` is what a CTA of the push kernel receives.

    The emulator runs the kernel with it: a cluster of 2 and one of 4, each under several schedules.
    """
    for cluster in (2, 4):
        n = bytes_expected(cluster, ROWS, HEAD_DIM)
        assert isinstance(n, int) and 0 < n < 1 << 20, f"cluster of {cluster}: a barrier cannot expect {n!r} bytes"
        call = Merge("push", cluster, 1)
        for seed in range(4):
            try:
                error = relative_error(call(seed, BYTES=n), call.expected())
            except emulator.EmulatorError as stuck:
                told = str(stuck).splitlines()
                raise AssertionError(f"cluster of {cluster}, {n} bytes: {told[0]}\n" + "\n".join(told[1:2])) from None
            assert error < BF16_BOUND, f"cluster of {cluster}, {n} bytes: the result is wrong by {error:.2g}"
