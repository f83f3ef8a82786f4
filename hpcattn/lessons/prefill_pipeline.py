"""Lesson 07a, the prefill pipeline: a tile's budget, the loop in SASS, items on 132 SMs, the checker, measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy import ndarray as Array
from torch import Tensor

from hpcattn.bench import figures, records
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import Inputs, Workload
from hpcattn.inspection import Compiled, Variant, branches, count_opcodes, loops, opcode_of
from hpcattn.kernels.hopper.launch import Bound, Launch
from hpcattn.kernels.hopper.prefill_launch import Config, launches
from hpcattn.kernels.portable import order
from hpcattn.lessons import block_sparsity, recording
from hpcattn.lessons.block_sparsity import SMS, Fit, makespan
from hpcattn.lessons.fp8_prefill_model import Costs, Section, Span, clocks_per_tile, simulate
from hpcattn.prefill import prepare_prefill
from hpcattn.reference import relative_error

TILE, HEAD_DIM = 128, 128

# --- A tile's budget --------------------------------------------------------------------------------------------------

TENSOR_FLOP_PER_CLK = 4096  # bf16, per SM
EXP_PER_CLK = 16  # per SM
SHARED_BYTES_PER_CLK = 128
TILE_FLOP = 4 * TILE * TILE * HEAD_DIM  # of 128 queries and 128 keys, both products


def tensor_clocks(rows: int = 128) -> float:
    """Of one of a tile's two products, for `rows` queries."""
    return 2 * rows * TILE * HEAD_DIM / TENSOR_FLOP_PER_CLK


def shared_bytes(groups: int = 2) -> dict[str, int]:
    """Bytes through an SM's shared memory for 64 `groups` queries by 128 keys, by who moves them.

    Every warpgroup's product reads all of K or V, and Q K^T its 64 rows of Q as well; P comes from registers.
    """
    tile = 2 * TILE * HEAD_DIM
    return {
        "TMA writes K and V": 2 * tile, "K read": groups * tile, "Q read": groups * 2 * 64 * HEAD_DIM,
        "V read": groups * tile,
    }  # fmt: skip


def accumulators(rows: int, keys: int = TILE) -> dict[str, int]:
    """32-bit registers per thread that a warpgroup of 128 threads needs for scores, output and bf16 weights."""
    return {"S": rows * keys // 128, "O": rows * HEAD_DIM // 128, "P": rows * keys // 2 // 128}


def matrix_clock(ceilings: Ceilings) -> float:
    """MHz at which 4096 FLOP a clock on every SM would give the measured rate of a large bf16 product."""
    return ceilings.tflop_bf16 * 1e6 / (TENSOR_FLOP_PER_CLK * SMS)


# --- The loop, in machine code ----------------------------------------------------------------------------------------


class Loop(NamedTuple):
    """A consumer warpgroup's loop over tiles, per warp and tile.

    sections: exponentials | maxima, once Q K^T is there | once P V is there; without the two parts that are branched
    around nearly always. stream: what the section of the exponentials issues, in order: "exp", "qk", "pv" or "other".
    """

    sections: list[Section]
    mask: int  # instructions of the causal mask
    rescale: int  # of the rescaling of O that LAZY branches around; 0 if it is not a branch
    lines: list[str]  # all of it
    stream: list[str]

    def section(self, name: str) -> Section:
        return next(s for s in self.sections if s.name == name)


NAMES = ("exponentials", "maxima", "accumulation")
RARE = 60  # of one opcode in a block: one for each of 64 registers, give or take what the compiler merges


def loop_of(kernel: Compiled) -> Loop:
    """Of a bf16 kernel: the shortest loop with a tile's exponentials and two waits for products."""
    lines = kernel.sass.splitlines()
    waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    found = [x for x in loops(lines) if count_opcodes(lines[slice(*x)])["MUFU"] >= 64]
    found = [x for x in found if sum(x[0] < w < x[1] for w in waits) == 2]
    start, stop = min(found, key=lambda x: x[1] - x[0])
    around: dict[str, set[int]] = {"FSEL": set(), "FMUL": set()}
    for at, target in branches(lines):
        if start < at < target <= stop:
            for opcode, rows in around.items():
                if count_opcodes(lines[at:target])[opcode] >= RARE:
                    rows |= set(range(at + 1, target))
    rare = around["FSEL"] | around["FMUL"]
    cuts = [start, *(w for w in waits if start < w < stop), stop + 1]
    parts = [[lines[i] for i in range(a, b) if i not in rare] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    mask, rescale = (count_opcodes(lines[i] for i in around[opcode]).total() for opcode in ("FSEL", "FMUL"))
    sections = [Section(name, count_opcodes(part)) for name, part in zip(NAMES, parts, strict=True)]
    return Loop(sections, mask, rescale, lines[start : stop + 1], [kind for x in parts[0] if (kind := kind_of(x))])


def kind_of(line: str) -> str:
    """A product is "qk" or "pv" (which reads V transposed), an exponential "exp"; else "other", or empty as above."""
    opcode = opcode_of(line)
    if opcode == "HGMMA":
        return "pv" if "tnspB" in line else "qk"
    return "exp" if opcode == "MUFU" else "other" if opcode else ""


def register_moves(kernel: Compiled) -> list[tuple[str, int]]:
    """(what, registers per thread) of every setmaxnreg in the code, in its order: "asks for" or "gives back to"."""
    found = re.findall(r"USETMAXREG\.(TRY_ALLOC|DEALLOC)\.CTAPOOL (?:UP\d, )?0x([0-9a-f]+)", kernel.sass)
    return [("asks for" if kind == "TRY_ALLOC" else "gives back to", int(n, 16)) for kind, n in found]


def costs_of(loop: Loop, load: float) -> Costs:
    """Of one warpgroup's part of a tile; load: clocks from a slot's release to its next tile, of K as of V."""
    e, m, a = (loop.section(name) for name in NAMES)
    return Costs(max(e.mufu, e.other), tensor_clocks(64), m.other, a.other, load=load, transpose=load)


def lone_clocks(loop: Loop) -> float:
    """Clocks per tile of 64 rows of a warpgroup that has its SM to itself, if memory is no limit.

    A product starts once it is issued, which is between exponentials, and the one before it is done.
    """
    each = tensor_clocks(64) / (HEAD_DIM // 16)
    e, _, a = (loop.section(name) for name in NAMES)
    issued, core = 0.0, 0.0
    for kind in loop.stream:
        if kind == "exp":
            issued += 8  # 32 lanes of each of four warps at 16 a clock
        elif kind in ("qk", "pv"):
            core = max(core, issued) + each
    shared = sum(shared_bytes(1).values()) / SHARED_BYTES_PER_CLK
    return max(core + a.other, e.other, shared)


def serial_clocks(costs: Costs) -> float:
    """Clocks per tile of 128 rows if nothing overlaps with anything."""
    return 2 * (2 * costs.product + costs.exponentials + costs.maxima + costs.accumulation)


def producer_spans(spans: Sequence[Span], slots: tuple[int, int], load: float) -> list[Span]:
    """When the tiles of a simulation are under way: who 3 for K, 4 for V; slots: of either ring.

    A slot is free when both warpgroups have passed the wait for the product that reads it, which ends with the span
    that follows. The tiles that come before anything is released are left out.
    """
    found = []
    for who, after, n in ((3, "maxima", slots[0]), (4, "accumulation", slots[1])):
        passed = [[s.start for s in spans if s.who == g and s.what == after] for g in (0, 1)]
        first = n + 1 if who == 3 else n  # K of tile 0 is read before the loop
        for i, released in enumerate(map(max, *passed)):
            found.append(Span(who, released, released + load, f"{'KV'[who - 3]}{i + first}"))
    return found


def busy(spans: Sequence[Span], who: int, start: float, stop: float) -> float:
    """Share of the time from start to stop."""
    return sum(max(0.0, min(s.stop, stop) - max(s.start, start)) for s in spans if s.who == who) / (stop - start)


# --- Lazy rescaling ---------------------------------------------------------------------------------------------------

BITS = 8  # by which a score may exceed what is subtracted
WARP_ROWS = 16  # of a warpgroup's 64


def subtracted(scores: Array, bits: float = BITS) -> Array:
    """What is subtracted from base-2 scores `[rows, keys]`, tile by tile from the last backwards: `[tiles, rows]`.

    A maximum that stays until a score exceeds it by more than `bits`; with 0, the running maximum.
    """
    m, found = np.full(len(scores), -np.inf), []
    for stop in range(scores.shape[1], 0, -TILE):
        mx = scores[:, max(0, stop - TILE) : stop].max(1)
        m = np.where(mx > m + bits, mx, m)
        found.append(m)
    return np.array(found)


class Online(NamedTuple):
    """Attention over tiles from the last backwards: o `[rows, D]`; see `online`."""

    o: Array
    rescaled: int  # how often a warp has to multiply its part of O
    steps: int  # of how many (warp, tile)
    largest: float  # weight


def online(scores: Array, v: Array, bits: float = BITS, rounded: bool = False) -> Online:
    """Softmax of base-2 scores `[rows, keys]` times v, tile by tile; rounded: weights to bf16, as in the kernel."""
    maxima = subtracted(scores, bits)
    o, l, old, largest = np.zeros((len(scores), v.shape[1])), np.zeros(len(scores)), maxima[0], 0.0
    for m, stop in zip(maxima, range(scores.shape[1], 0, -TILE), strict=True):
        tile = slice(max(0, stop - TILE), stop)
        alpha, p = np.exp2(old - m), np.exp2(scores[:, tile] - m[:, None])
        largest, l, old = max(largest, float(p.max())), l * alpha + p.sum(1), m
        p = torch.from_numpy(p).bfloat16().double().numpy() if rounded else p
        o = o * alpha[:, None] + p @ v[tile]
    grown = (np.diff(maxima, axis=0) != 0).reshape(len(maxima) - 1, -1, WARP_ROWS).any(2)  # [tiles, warps]
    return Online(o / l[:, None], int(grown.sum()), grown.size, largest)


def scores_and_values(kind: str, keys: int = 8192, rows: int = 64, seed: int = 0) -> tuple[Array, Array]:
    """Base-2 scores and v `[keys, 32]`. kind: "normal", or "growing", by 16 from the last tile to the first."""
    dice = np.random.default_rng(seed)
    scores = dice.standard_normal((rows, keys)) / math.log(2)
    if kind == "growing":
        scores += 16 * (1 - np.arange(keys) / keys)
    return scores, dice.standard_normal((keys, 32))


# --- Items ------------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """`rows` queries of one head, and how many tiles of keys they need; `request` and `block` as in the order."""

    request: int
    block: int
    head: int
    tiles: int


def items_of(q_lens: Sequence[int], kv_lens: Sequence[int], heads: int, block_m: int = 128) -> list[Item]:
    """In the order of arrival: request by request, block by block, heads fastest."""
    found = []
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for block in range(-(-q_len // block_m)):
            sees = max(0, kv_len - q_len + min(q_len, block_m * (block + 1)))
            found += [Item(request, block, head, max(1, -(-sees // TILE))) for head in range(heads)]
    return found


def longest_first(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: -item.tiles)


def by_counter(items: Sequence[Item], pace: Fit, sms: int = SMS) -> list[block_sparsity.Span]:
    """Items in order, each to the SM that asks first."""
    return block_sparsity.schedule_items([x.tiles for x in items], pace, sms, [x.request for x in items])


def in_rounds(items: Sequence[Item], pace: Fit, sms: int = SMS) -> list[block_sparsity.Span]:
    """Items in order, SM by SM, every other round backwards: known from the start, nobody asks."""
    free, spans = np.zeros(sms), []
    for i, item in enumerate(items):
        turn, place = divmod(i, sms)
        sm = sms - 1 - place if turn % 2 else place
        start, stop = float(free[sm]), float(free[sm]) + pace.us(item.tiles)
        spans.append(block_sparsity.Span(sm, start, stop, item.request))
        free[sm] = stop
    return spans


def kernel_order(q_lens: Sequence[int], kv_lens: Sequence[int], block_m: int = 128) -> list[tuple[int, int]]:
    """(request, block) in the order that the library's kernel makes of a batch; interpreted on a CPU."""
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = order.capacity(sum(q_lens), len(q_lens), block_m)
    table, header = torch.zeros(rows, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    order.launch(starts, lens, None, 1, block_m, max(kv_lens), table, header)
    return [(request, block) for request, block, *_ in table[: int(header[0])].tolist()]


# --- The exercise -----------------------------------------------------------------------------------------------------


def visible_pairs(q_len: int, kv_len: int, block: int) -> Array:
    """bool `[rows, keys up to the next multiple of 128]`: which keys the queries of a block of 128 may use."""
    rows = np.arange(TILE * block, min(q_len, TILE * (block + 1)))
    keys = np.arange(-(-kv_len // TILE) * TILE)
    return (keys[None, :] <= (kv_len - q_len + rows)[:, None]) & (keys < kv_len)[None, :]


def tiles_by_counting(q_len: int, kv_len: int, block: int) -> tuple[list[int], list[int]]:
    """(tiles that are computed, those of them that need a mask), one pair of query and key at a time."""
    seen = visible_pairs(q_len, kv_len, block)
    tiles = [seen[:, first : first + TILE] for first in range(0, seen.shape[1], TILE)]
    computed = [t for t, pairs in enumerate(tiles) if pairs.any()]
    return computed, [t for t in computed if not tiles[t].all()]


def exercise_cases(count: int = 60, seed: int = 7) -> list[tuple[int, int, int]]:
    """(q_len, kv_len, block): aligned and not, one query, more queries than keys."""
    dice = np.random.default_rng(seed)
    found = [(128, 128, 0), (128, 4096, 0), (1, 1, 0), (1, 128, 0), (1, 129, 0), (70, 130, 0), (300, 300, 2)]
    found += [(129, 129, 1), (200, 100, 0), (200, 100, 1), (300, 40, 0), (300, 40, 1), (256, 383, 1), (127, 127, 0)]
    for _ in range(count):
        q_len = int(dice.integers(1, 700))
        kv_len = max(1, q_len + int(dice.integers(-100, 900)))
        found.append((q_len, kv_len, int(dice.integers(0, -(-q_len // TILE)))))
    return found


def check_tiles_to_mask(tiles_to_mask: Callable[[int, int, int], Sequence[int]]) -> None:
    """`tiles_to_mask(q_len, kv_len, block)`: which tiles of an item are computed and need a mask, in any order.

    Raises AssertionError with a counter-example, found by counting pairs of query and key.
    """
    for q_len, kv_len, block in exercise_cases():
        where = f"{q_len} queries, {kv_len} keys, block {block}"
        got = tiles_to_mask(q_len, kv_len, block)
        whole = isinstance(got, Sequence | set | range) and all(isinstance(t, int | np.integer) for t in got)
        assert whole, f"{where}: tiles_to_mask must return whole numbers, got {got!r}"
        got = [int(t) for t in got]
        computed, want = tiles_by_counting(q_len, kv_len, block)
        assert len(set(got)) == len(got), f"{where}: a tile is named twice: {sorted(got)}"
        first = kv_len - q_len + TILE * block
        stop = first + min(TILE, q_len - TILE * block)
        which = f"tiles 0 to {computed[-1]} are computed" if computed else "no tile is computed"
        facts = f"(its queries sit at positions {first} to {stop - 1}, {which})"
        extra, missing = sorted(set(got) - set(want)), sorted(set(want) - set(got))
        assert not extra, f"{where}: {extra} need no mask, or are not computed {facts}"
        assert not missing, f"{where}: {missing} need a mask {facts}"


# --- Measurements -----------------------------------------------------------------------------------------------------

PREFIX = "prefill_pipeline_"
HEADS, KV_HEADS = 32, 4
SHAPES = ((512, 4096), (512, 32768), (4096, 4096), (16384, 16384))  # queries, keys
CONFIGS = {
    "one": Config(1, 2, 2, False, True),
    "eager": Config(2, 2, 2, False, False),
    "lazy": Config(2, 2, 2, False, True),  # the library's
    "lazy_k3": Config(2, 3, 2, False, True),
    "turns_k3": Config(2, 3, 2, True, True),
}
LIBRARY = "lazy"
RAGGED_Q = (1024, 512, 2048, 256, 768, 384, 1536, 128)
RAGGED_KV = (1024, 4096, 2048, 8192, 3072, 1024, 1536, 32768)
ORDERS = ("longest", "arrival", "library")


def workload(q_len: int, kv_len: int, heads: tuple[int, int] = (HEADS, KV_HEADS)) -> Workload:
    """bf16 prefill of one request, NHD, pages of 64 tokens."""
    return Workload(
        suite="prefill", case=f"{q_len}x{kv_len}", q_lens=(q_len,), kv_lens=(kv_len,), num_q_heads=heads[0],
        num_kv_heads=heads[1],
    )  # fmt: skip


def ragged(
    q_lens: Sequence[int] = RAGGED_Q, kv_lens: Sequence[int] = RAGGED_KV, heads: tuple[int, int] = (HEADS, KV_HEADS)
) -> Workload:
    """The same of several requests."""
    return Workload(
        suite="prefill", case="ragged", q_lens=tuple(q_lens), kv_lens=tuple(kv_lens), num_q_heads=heads[0],
        num_kv_heads=heads[1],
    )  # fmt: skip


def prefill_steps(x: Inputs, config: Config | None = None) -> tuple[list[Launch], Tensor]:
    """The launches of a call, in a configuration, and where it writes."""
    out = torch.full(x.q.shape, math.nan, dtype=torch.bfloat16, device=x.q.device)
    tensors = (x.q, x.cache.k, x.cache.v, x.block_table, x.cu_seqlens_q, x.seq_lens, None, None, None, None)
    return launches(*tensors, x.q.shape[-1] ** -0.5, out, None, config=config), out


def prefill_call(x: Inputs, config: Config | None = None) -> Callable[[], Tensor]:
    """The kernel on one request as a call that returns its output; on a CPU it is emulated."""
    (step,), out = prefill_steps(x, config)
    return _repeated(step, out, x)


def ordered_call(x: Inputs, how: str) -> Callable[[], Tensor]:
    """The kernel on several requests, whose items were put in an order before: of `ORDERS`, the last orders anew."""
    if how == "library":
        position = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
        return prepare_prefill(*position, implementation="hopper")
    (*ordering, step), out = prefill_steps(x)
    for before in ordering:
        before.run(out.device)
    table, header = (step.args[step.kernel.arg_names.index(name)] for name in ("order", "header"))
    fresh = header.clone()  # (number of units, 0): the second is the counter, which a call leaves used up
    if how == "arrival":
        n = int(fresh[0])
        table[:n] = torch.tensor(sorted(table[:n].tolist()), dtype=torch.int32, device=out.device)
    run = _repeated(step, out, x)

    def call() -> Tensor:
        header.copy_(fresh)
        return run()

    return call


def _repeated(step: Launch, out: Tensor, x: Inputs) -> Callable[[], Tensor]:
    if not is_cuda(out.device):
        return lambda: (step.run(out.device), out)[1]
    bound = Bound(step)

    def call(kept: tuple = (x, step)) -> Tensor:  # the arguments are addresses: `kept` keeps what lies there
        bound(bound.flat, out.device.index)
        return out

    return call


@cache
def compiled(config: str = LIBRARY) -> Compiled:
    """The bf16 prefill kernel in a configuration, or for several requests ("ragged"), compiled without a GPU."""
    work = ragged((128, 128), (128, 128)) if config == "ragged" else workload(128, 128)
    (*_, step), _ = prefill_steps(work.build(), CONFIGS.get(config, CONFIGS[LIBRARY]))
    return Variant.from_launch(f"prefill, {config}", step.kernel, *step.args, **step.options).compile()


def measure_all(
    device: torch.device | str = "cuda",
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    configs: Sequence[str] = tuple(CONFIGS),
    batch: tuple[Sequence[int], Sequence[int]] = (RAGGED_Q, RAGGED_KV),
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    replays: int = 8,
    warmup: int = 2,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time the kernel's configurations; steady; rows of table `records`.

    `<config>_<queries>x<keys>`: one request. `ragged_<order>`: several, `batch` being their queries and keys.
    """
    origin = provenance(device, new_run_id(), commit)
    if is_cuda(device):
        recording.in_processes(compiled, [[name] for name in (*configs, "ragged")])
    found: list[dict] = []
    for shape in shapes:
        makers = {name: lambda x, name=name: prefill_call(x, CONFIGS[name]) for name in configs}
        found += _times(workload(*shape, heads), makers, device, replays, warmup)
    makers = {how: lambda x, how=how: ordered_call(x, how) for how in ORDERS}
    work = ragged(*batch, heads)
    found += [row | {"case": _ragged_case(row["case"])} for row in _times(work, makers, device, replays, warmup)]
    return pd.DataFrame([Record(**row, **origin) for row in found], columns=records.COLUMNS)


def _ragged_case(case: str) -> str:
    """`<order>_ragged` turned round."""
    return f"{PREFIX}ragged_{case.removeprefix(PREFIX).removesuffix('_ragged')}"


def _times(
    work: Workload, makers: Mapping[str, Callable[[Inputs], Callable[[], Tensor]]], device, replays: int, warmup: int
) -> Iterator[dict]:
    x = work.build(device)
    want, errors = x.reference()[0], {}
    for name, make in makers.items():
        errors[name] = recording.checked(relative_error(make(x)(), want), f"{name}, {work.case}")
    del x, want
    sets = work.build_many(copies_to_exceed_l2(work.bytes_moved, l2_bytes(device)), device, poison=False)
    calls = {name: [make(x) for x in sets] for name, make in makers.items()}
    for name, timing in measure("steady", calls, timer_for(device), replays=replays, warmup=warmup).items():
        yield recording.prefill_row(f"{PREFIX}{name}_{work.case}", timing, errors[name], work)


_lesson = recording.LessonRows(PREFIX, measure_all)
record, recorded, by_case = _lesson.record, _lesson.recorded, _lesson.by_case


def times_of(rows: Mapping[str, pd.Series]) -> dict[tuple[str, tuple[int, int]], float]:
    """µs by (configuration, shape); only what is there."""
    cases = {(name, shape): f"{name}_{shape[0]}x{shape[1]}" for name in CONFIGS for shape in SHAPES}
    return {key: float(rows[case].median_us) for key, case in cases.items() if case in rows}


def suite_times() -> dict[tuple[int, int], float]:
    """µs of the library's bf16 prefill by shape, from the records of the suite `prefill`, NHD."""
    us = recording.suite_times(figures.recorded("prefill"), dtype="bf16", implementation="hopper")
    cases = {shape: f"{shape[0]}x{shape[1]}" for shape in SHAPES}
    return {shape: us[case] for shape, case in cases.items() if case in us}


# --- Predictions ------------------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """Clocks of an item: fixed + tile * its tiles."""

    fixed: float
    tile: float

    def at(self, mhz: float) -> Fit:
        """In µs."""
        return Fit(self.fixed / mhz, self.tile / mhz)


def pace_of(config: str, load: float) -> Pace:
    """From the machine code: a simulation of two warpgroups, or one that is alone.

    fixed: what nothing hides on an item's first and last tile, its first Q K^T, softmax and last P V; the producer has
    the next item's tiles ready.
    """
    same = CONFIGS[config]._replace(k_slots=2, v_slots=2, turns=False)  # barriers aside, the code is that of this one
    loop = loop_of(compiled(next(name for name, other in CONFIGS.items() if other == same)))
    costs = costs_of(loop, load)
    alone = CONFIGS[config].groups == 1
    tile = lone_clocks(loop) if alone else clocks_per_tile(simulate(CONFIGS[config], costs))
    return Pace(2 * costs.product + costs.exponentials + costs.maxima, tile)


def predicted_us(pace: Pace, groups: int, shape: tuple[int, int], mhz: float, load: float, heads: int = HEADS) -> float:
    """Of one request: items longest first, in rounds; the first one's tiles have to come from memory first."""
    items = longest_first(items_of(shape[:1], shape[1:], heads, 64 * groups))
    return load / mhz + makespan(in_rounds(items, pace.at(mhz)))
