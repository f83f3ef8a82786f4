"""Lesson 07c, block sparsity: from a mask to a list, 132 SMs and their longest item, the checker, measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy import ndarray as Array
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import MASK_DROP, Inputs, Workload
from hpcattn.cache import flatten_scales
from hpcattn.inspection import Compiled, Variant
from hpcattn.kernels.hopper.items import Inbox
from hpcattn.kernels.hopper.launch import Launch
from hpcattn.kernels.hopper.pipeline import Cursor
from hpcattn.kernels.hopper.prefill_launch import launches
from hpcattn.lessons import recording
from hpcattn.masks import MASK_TILE, active_tiles
from hpcattn.prefill import prepare_prefill
from hpcattn.reference import relative_error

__all__ = [
    "DROPS", "Fit", "LANES", "LANES_BELOW", "ONES", "SHAPES", "SMS", "Span", "Warp", "by_case", "case_of",
    "check_compact", "compiled_list", "cut", "emulated", "excerpt", "fit", "instructions", "kernel_call",
    "kernel_list", "lane_bits", "list_kernel", "listed", "longest", "makespan", "measure_all", "prefill_launch",
    "record", "recorded", "rounds", "schedule_items", "suite_times", "tiles_per_item", "times_of", "workload",
]  # fmt: skip

SMS = 132
LANES = 32
PREFIX = "block_sparsity_"

# --- From a mask to a list --------------------------------------------------------------------------------------------


def lane_bits(word: int) -> Array:
    """The 32 bits of a word as 0 and 1, lane 0 first."""
    return word >> np.arange(LANES) & 1


class Warp:
    """32 lanes, a list in shared memory, and the instructions that a lane of its own would need to build it.

    places: words of the list; all hold EMPTY before the first store.
    """

    EMPTY = -1

    def __init__(self, places: int):
        self.list = np.full(places, self.EMPTY)
        self.ballots = 0

    def ballot(self, active: Array) -> int:
        """vote.sync.ballot: a word whose bit i says whether lane i's `[32]` predicate is true; all lanes get it."""
        active = np.asarray(active)
        if active.shape != (LANES,):
            raise AssertionError(f"ballot takes one predicate for each of {LANES} lanes, got shape {active.shape}")
        self.ballots += 1
        return sum(1 << lane for lane in np.flatnonzero(active).tolist())

    def popc(self, words: int | Array) -> int | Array:
        """popc: how many bits are set, of one word or of each lane's."""
        if np.ndim(words):
            return np.array([int(word).bit_count() for word in np.asarray(words)])
        return int(words).bit_count()

    def store(self, active: Array, at: Array, values: Array) -> None:
        """@active st.shared: lanes whose predicate is true store their value at their place, all at once."""
        lanes = np.flatnonzero(np.asarray(active))
        at, values = np.broadcast_to(at, (LANES,)), np.broadcast_to(values, (LANES,))
        for lane in lanes:
            if not 0 <= at[lane] < len(self.list):
                raise AssertionError(f"lane {lane} stores at place {at[lane]} of a list of {len(self.list)} words")
            if (others := [n for n in lanes if at[n] == at[lane]]) != [lane]:
                raise AssertionError(f"lanes {[int(n) for n in others]} store at the same place, {at[lane]}")
        self.list[at[lanes]] = values[lanes]


LANES_BELOW = np.array([(1 << lane) - 1 for lane in range(LANES)])  # %lanemask_lt of each lane

Round = Callable[[Warp, Array, Array, int], int]


def rounds(mask_row: Array) -> list[tuple[Array, Array]]:
    """(flags `[32]`, tiles `[32]`) of each round over a mask's row, the last tile first; flags beyond the row are 0."""
    n = len(mask_row)
    found = []
    for start in range(0, n, LANES):
        tiles = n - 1 - start - np.arange(LANES)
        found.append((np.where(tiles >= 0, mask_row[np.maximum(tiles, 0)], 0), tiles))
    return found


def listed(compact: Round, mask_row: Array) -> tuple[list[int], Warp]:
    """The list that rounds of `compact` make of a mask's row, and the warp that made it."""
    warp, count = Warp(len(mask_row) + LANES), 0
    for flags, tiles in rounds(mask_row):
        count = compact(warp, flags, tiles, count)
    return warp.list[:count].tolist(), warp


@gluon.jit
def list_kernel(mask_row, tiles, out, WORDS: gl.constexpr):
    """The library's compaction alone, by one warp: out = how many of the first `tiles` tiles are active, which ones."""
    inbox = Inbox.allocate(WORDS, 1)
    at = Cursor.start(0)
    count = inbox.compact(at, mask_row, tiles)
    gl.store(out, count)
    for i in range(count):
        gl.store(out + 1 + i, inbox.list_token(at, i) // 128)


LIST_OPTIONS = {"WORDS": 1024, "num_warps": 1}


def kernel_list(mask_row: Array, schedule_seed: int = 0) -> list[int]:
    """What the library's compaction makes of a mask's row, in the emulator."""
    row = torch.from_numpy(np.ascontiguousarray(mask_row, dtype=np.uint8))
    out = torch.full((len(mask_row) + 1,), -1, dtype=torch.int32)
    emulator.launch(list_kernel, (1,), row, len(mask_row), out, schedule_seed=schedule_seed, **LIST_OPTIONS)
    return out[1 : 1 + int(out[0])].tolist()


@cache
def compiled_list() -> Compiled:
    """`list_kernel`, compiled for Hopper without a GPU."""
    args = torch.zeros(300, dtype=torch.uint8), 300, torch.zeros(301, dtype=torch.int32)
    return Variant.from_launch("compaction", list_kernel, *args, **LIST_OPTIONS).compile()


def excerpt(code: str, words: Sequence[str], lines: int) -> str:
    """The first `lines` lines of PTX or SASS that contain one of the words, without comments and control codes."""
    found = [re.sub(r"\s+", " ", line.split("//")[0]).strip() for line in code.splitlines()]
    found = [re.sub(r"^[-\dA-Z]+(:[-\dA-Z]+){4} ", "", line) for line in found]
    return "\n".join([line for line in found if any(word in line for word in words)][:lines])


# --- The exercise -----------------------------------------------------------------------------------------------------


def _rows() -> dict[str, Array]:
    """Rows of masks to list."""
    dice = np.random.default_rng(7)
    found = {"all ones": np.ones(64, int), "all zeros": np.zeros(70, int), "one tile": np.ones(1, int)}
    found |= {"every other tile": np.arange(96) % 2, "flags other than 1": 255 * (np.arange(40) % 3 == 0)}
    for n in (31, 32, 33, 100, 256):
        for drop in (0.25, 0.75, 0.97):
            found[f"{n} tiles, each dropped with probability {drop}"] = (dice.random(n) >= drop).astype(int)
    return found


def check_compact(compact: Round) -> None:
    """Raise AssertionError with a counter-example unless `compact(warp, flags, tiles, count)` appends, in the order of
    the lanes, the tiles whose flag is not 0 to a list of `count`, and returns the new count: one round of 32 lanes.
    """
    for name, row in _rows().items():
        got, warp, count = [], Warp(len(row) + LANES), 0
        for i, (flags, tiles) in enumerate(rounds(row)):
            where = f"{name}, round {i}"
            before = warp.list.copy()
            try:
                after = compact(warp, flags, tiles, count)
            except AssertionError as wrong:
                raise AssertionError(f"{where}: {wrong}") from None
            want = tiles[flags != 0].tolist()
            whole = isinstance(after, int | np.integer) and not isinstance(after, bool)
            assert whole, f"{where}: compact must return the new count, an int, got {after!r}"
            assert after == count + len(want), f"{where}: {len(want)} tiles are active after {count}, got count {after}"
            assert (warp.list[:count] == before[:count]).all(), f"{where}: what was in the list is overwritten"
            got = warp.list[count:after].tolist()
            assert sorted(got) == sorted(want), f"{where}: appended {got}, but the active tiles are {want}"
            assert got == want, f"{where}: appended {got}, the order of the lanes is {want}"
            beyond = (warp.list[after:] == Warp.EMPTY).all()
            assert beyond, f"{where}: a tile that is not active was stored behind the list"
            assert warp.ballots == i + 1, f"{where}: one ballot a round is enough, got {warp.ballots} in {i + 1} rounds"
            count = int(after)


# --- 132 SMs and their longest item -----------------------------------------------------------------------------------


class Span(NamedTuple):
    """An item on an SM, from `start` to `stop`; row: which 128 queries of its head."""

    sm: int
    start: float
    stop: float
    row: int


class Fit(NamedTuple):
    """Time of a kernel whose longest item has n tiles: fixed_us + n tile_us."""

    fixed_us: float
    tile_us: float

    def us(self, tiles: float) -> float:
        return self.fixed_us + self.tile_us * tiles


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Of (tiles of the longest item, µs), by least squares of the relative error."""
    tiles, us = np.array(points, dtype=float).T
    lines = np.stack([1 / us, tiles / us], 1)
    fixed, tile = np.linalg.lstsq(lines, np.ones(len(us)), rcond=None)[0]
    return Fit(float(fixed), float(tile))


def tiles_per_item(work: Workload) -> Array:
    """Tiles that each item computes, in the order in which CTAs take items: the last 128 queries of all heads first."""
    tiles = active_tiles(work.block_mask(), *_shape(work)).expand(1, work.num_q_heads, -1)[0]  # [heads, rows]
    return tiles.T.flip(0).flatten().numpy()


def longest(work: Workload) -> int:
    return int(tiles_per_item(work).max())


def schedule_items(tiles: Sequence[float], model: Fit, sms: int = SMS, rows: Sequence[int] | None = None) -> list[Span]:
    """Items in order, each to the SM that is free first; rows: a color for each."""
    free = np.zeros(sms)
    spans = []
    for i, n in enumerate(tiles):
        sm = int(free.argmin())
        stop = float(free[sm]) + model.us(float(n))
        spans.append(Span(sm, float(free[sm]), stop, 0 if rows is None else int(rows[i])))
        free[sm] = stop
    return spans


def makespan(spans: Sequence[Span]) -> float:
    return max(span.stop for span in spans)


def cut(tiles: Sequence[int], parts: int) -> list[int]:
    """Every item's list cut into so many lists of nearly equal length, the longest of all first."""
    pieces = [n // parts + (j < n % parts) for n in map(int, tiles) for j in range(parts)]
    return sorted((n for n in pieces if n), reverse=True)


# --- The kernel on tiny shapes ----------------------------------------------------------------------------------------


def kernel_call(x: Inputs, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, lse) of the library's Hopper kernel; emulated on a CPU."""
    position = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
    options = {"block_mask": mask, "return_lse": True, "implementation": "hopper"}
    return prepare_prefill(*position, scales=x.scales, **options)()


def prefill_launch(x: Inputs, mask: Tensor | None) -> tuple[Launch, Tensor]:
    """That kernel's launch for one request, and where it writes."""
    out = torch.full(x.q.shape, math.nan, dtype=torch.bfloat16)
    lse = torch.full(x.q.shape[:2], math.nan)
    scales = flatten_scales(x.cache, x.scales)
    tensors = (x.q, x.cache.k, x.cache.v, x.block_table, x.cu_seqlens_q, x.seq_lens, *scales, mask)
    (step,) = launches(*tensors, x.q.shape[-1] ** -0.5, out, lse)
    return step, out


def instructions(x: Inputs, mask: Tensor) -> int:
    """Warp instructions that the emulator executes for it, waiting included."""
    step, _ = prefill_launch(x, mask)
    return emulator.launch(step.kernel, step.grid, *step.args, **step.options).instructions


def emulated(x: Inputs, mask: Tensor, schedule_seed: int) -> Tensor:
    """o under a schedule of warps."""
    step, out = prefill_launch(x, mask)
    emulator.launch(step.kernel, step.grid, *step.args, schedule_seed=schedule_seed, **step.options)
    return out


# --- Measurements -----------------------------------------------------------------------------------------------------

HEADS, KV_HEADS = 32, 4
SHAPES = ((512, 32768), (512, 4096))  # queries, keys
DROPS = (0.0, 0.25, 0.5, 0.75, 0.9)
QUANTS = ("type1", "type0")
ONES = "ones"  # a mask that drops nothing
MEANS = (0.0, 1.0)


def workload(
    q_len: int, kv_len: int, drop: float = 0.0, quant: str = "type1", heads: tuple[int, int] = (HEADS, KV_HEADS)
) -> Workload:
    """fp8 prefill of one request, NHD, pages of 64 tokens, with the library's seeded mask."""
    return Workload(
        suite="prefill", case=f"{q_len}x{kv_len}", q_lens=(q_len,), kv_lens=(kv_len,), dtype="fp8", quant=quant,
        num_q_heads=heads[0], num_kv_heads=heads[1], drop=drop,
    )  # fmt: skip


def case_of(quant: str, q_len: int, kv_len: int, drop: float | str) -> str:
    """Name of a measurement, without the lesson's prefix; drop: a probability, or `ONES`."""
    return f"{quant}_{q_len}x{kv_len}_" + (drop if isinstance(drop, str) else f"drop{100 * drop:.0f}")


def masks_of(work: Workload, drops: Sequence[float], device: torch.device | str) -> dict[float | str, Tensor | None]:
    """The mask of each drop probability (0: none), and one of ones."""
    found: dict[float | str, Tensor | None] = {drop: replace(work, drop=drop).block_mask(device) for drop in drops}
    tiles = (-(-work.q_lens[0] // MASK_TILE), -(-work.kv_lens[0] // MASK_TILE))
    found[ONES] = torch.ones(1, work.num_q_heads, *tiles, dtype=torch.uint8, device=device)
    return found


def prefill_call(x: Inputs, mask: Tensor | None) -> Callable[[], Tensor]:
    """The library's prefill on the inputs, with this mask in memory of the call's own; emulated on a CPU."""
    mask = None if mask is None else mask.clone()
    position = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
    return prepare_prefill(*position, scales=x.scales, block_mask=mask, implementation="hopper")


def compile_ahead(quants: Sequence[str], shapes: Sequence[tuple[int, int]], heads: tuple[int, int]) -> None:
    """`recording.in_processes` of the kernels of these shapes, without a mask and with one."""
    columns = sorted({-(-kv_len // MASK_TILE) for _, kv_len in shapes})
    recording.in_processes(launch_once, [[quant, str(n), *map(str, heads)] for quant in quants for n in (0, *columns)])


def launch_once(quant: str, columns: str, num_q_heads: str, num_kv_heads: str) -> None:
    """The kernel for masks of so many columns (0: none), on few keys: compiled as for many."""
    heads = (int(num_q_heads), int(num_kv_heads))
    x = workload(512, 512, 0.0, quant, heads).build("cuda")
    mask = torch.ones(1, heads[0], 4, int(columns), dtype=torch.uint8, device="cuda") if int(columns) else None
    prefill_call(x, mask)()
    torch.cuda.synchronize()


def measure_all(
    device: torch.device | str = "cuda",
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    drops: Sequence[float] = DROPS,
    quants: Sequence[str] = QUANTS,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    replays: int = 20,
    warmup: int = 3,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time the library's prefill for every drop probability; steady; rows of table `records`.

    `block_sparsity_<quant>_<queries>x<keys>_drop<percent>`, drop0 without a mask; `..._ones`: with a mask of ones. All
    masks of a shape take turns, on the same inputs.
    """
    origin = provenance(device, new_run_id(), commit)
    if is_cuda(device):
        compile_ahead(quants, shapes, heads)
    found: list[dict] = []
    for quant in quants:
        for q_len, kv_len in shapes:
            found += _measure(workload(q_len, kv_len, 0.0, quant, heads), drops, device, replays, warmup)
    return pd.DataFrame([Record(**row, **origin) for row in found], columns=records.COLUMNS)


def _measure(work: Workload, drops: Sequence[float], device, replays: int, warmup: int) -> Iterator[dict]:
    masks = masks_of(work, drops, device)
    errors = _errors(work, masks, device)
    sets = work.build_many(copies_to_exceed_l2(work.bytes_moved, l2_bytes(device)), device)
    calls = {case_of(work.quant, *_shape(work), drop): [prefill_call(x, m) for x in sets] for drop, m in masks.items()}
    timings = measure("steady", calls, timer_for(device), replays=replays, warmup=warmup)
    for drop in masks:
        case = case_of(work.quant, *_shape(work), drop)
        if not bool(torch.isfinite(calls[case][-1]()).all()):
            raise AssertionError(f"{case}: a timed call gives NaN")
        flops = replace(work, drop=0.0 if drop == ONES else drop).flops
        yield recording.prefill_row(PREFIX + case, timings[case], errors[drop], work, flops)


def _shape(work: Workload) -> tuple[int, int]:
    return work.q_lens[0], work.kv_lens[0]


def _errors(work: Workload, masks: Mapping[float | str, Tensor | None], device) -> dict[float | str, float]:
    """Relative errors against the oracle, the worse of v of mean 0 and of mean 1; AssertionError for a large one."""
    errors: dict[float | str, float] = dict.fromkeys(masks, 0.0)
    for mean in MEANS:
        x, dense = work.build(device, v_mean=mean), None
        for drop, mask in masks.items():
            got = prefill_call(x, mask)()
            if drop == 0.0:
                dense = got
            if drop == ONES and dense is not None and not torch.equal(got, dense):
                raise AssertionError(f"{work.case}, {work.quant}: a mask of ones changes the result")
            error = relative_error(got, replace(x, block_mask=mask).reference()[0])
            what = f"{work.case}, {work.quant}, {drop}, V of mean {mean:g}"
            errors[drop] = max(errors[drop], recording.checked(error, what, "fp8"))
    return errors


_lesson = recording.LessonRows(PREFIX, measure_all)
record, recorded, by_case = _lesson.record, _lesson.recorded, _lesson.by_case


def times_of(rows: Mapping[str, pd.Series], quant: str, drops: Sequence[float | str] = DROPS) -> dict[tuple, float]:
    """µs by (shape, drop) of one format; only what is there."""
    cases = {(shape, drop): case_of(quant, *shape, drop) for shape in SHAPES for drop in drops}
    return {key: float(rows[case].median_us) for key, case in cases.items() if case in rows}


def suite_times(frame: pd.DataFrame, quant: str, implementation: str = "hopper") -> dict[tuple, float]:
    """The same from the records of the suite `prefill`: without a mask, and with the benchmark's, of drop 0.75."""
    us = recording.suite_times(frame, dtype="fp8", quant=quant, implementation=implementation)
    cases = {(s, d): f"{s[0]}x{s[1]}" + "-masked" * bool(d) for s in SHAPES for d in (0.0, MASK_DROP)}
    return {key: us[case] for key, case in cases.items() if case in us}
