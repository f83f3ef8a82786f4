"""Lesson 07b's model of an SM in fp8 prefill: what a tile keeps busy, and how two warpgroups share it."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcattn.bench import records
from hpcattn.inspection import Compiled, branches, count_opcodes, loops
from hpcattn.kernels.hopper.prefill_launch import Config
from hpcattn.lessons import recording
from hpcattn.lessons.recording import RECORDED

TILE, HEAD_DIM = 128, 128

# --- A tile's budget --------------------------------------------------------------------------------------------------

QUARTERS = 4  # of an SM: each issues one instruction a clock
TENSOR_FLOP_PER_CLK = 8192  # fp8, per SM
SHARED_BYTES_PER_CLK = 128
FP32 = {"FFMA", "FADD", "FMUL"}  # 32 lanes a clock and quarter
MUFU_CLK, FP32_CLK, OTHER_CLK = 8, 1, 2  # clocks of a warp's instruction in its unit: 4, 32 and 16 lanes a clock


def shared_bytes(type0: bool = False) -> dict[str, int]:
    """Bytes through an SM's shared memory for a tile, by who moves them; 128 a clock is what it can do.

    Every warpgroup's product reads all of K or V^T, and Q K^T its 64 rows of Q as well. Type 0: a warp reads a scale
    once for the lanes that share a column, a wavefront of 128 bytes for every 16 columns.
    """
    tile = TILE * HEAD_DIM
    moved = {"TMA writes K and V": 2 * tile, "V is transposed": 2 * tile, "K for two warpgroups": 2 * tile}
    moved |= {"Q for both": 2 * 64 * HEAD_DIM, "V for two warpgroups": 2 * tile}
    return moved | ({"scales": 8 * TILE // 16 * 128} if type0 else {})


class Section(NamedTuple):
    """Part of a loop: how often each opcode occurs, per warp and tile."""

    name: str
    opcodes: Counter[str]

    @property
    def issue(self) -> int:
        """Issue slots."""
        return self.opcodes.total()

    @property
    def mufu(self) -> int:
        """Clocks of the exponential unit."""
        return MUFU_CLK * self.opcodes["MUFU"]

    @property
    def other(self) -> int:
        """Clocks of whichever unit the rest of the arithmetic keeps longest, at least the issue slots."""
        ordinary = {o: n for o, n in self.opcodes.items() if not o.startswith(("U", "QGMMA", "WARPGROUP", "SYNCS"))}
        slow = sum(n for o, n in ordinary.items() if o not in FP32 | {"MUFU", "BRA"})
        return max(self.issue, OTHER_CLK * slow, FP32_CLK * sum(self.opcodes[o] for o in FP32))


def consumer_loop(kernel: Compiled) -> list[Section]:
    """A consumer warpgroup's loop over tiles in three: exponentials | maxima, once Q K^T is there | once P V is there.

    Without the mask, which only an item's first two tiles need.
    """
    body = _loop_body(kernel)
    waits = [i for i, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 2
    cuts = [0, *waits, len(body)]
    names = ("exponentials", "maxima", "accumulation")
    return [Section(name, count_opcodes(body[a:b])) for name, a, b in zip(names, cuts[:-1], cuts[1:], strict=True)]


class ScaleReads(NamedTuple):
    """How a consumer reads the K scales of a tile; registers: that they pass through, early: before P V is issued."""

    loads: int
    registers: int
    early: bool


def scale_reads(kernel: Compiled) -> ScaleReads:
    body = _loop_body(kernel)
    loads = {i: m[1] for i, line in enumerate(body) if (m := re.search(r"LDS\.64 (R\d+)", line))}
    products = [i for i, line in enumerate(body) if "QGMMA" in line]
    return ScaleReads(len(loads), 2 * len(set(loads.values())), max(loads, default=0) < products[-1])


def _loop_body(kernel: Compiled) -> list[str]:
    lines = kernel.sass.splitlines()
    found = [x for x in loops(lines) if count_opcodes(lines[slice(*x)])["MUFU"] >= 64 and _products(lines, *x) == 2]
    start, stop = min(found, key=lambda x: x[1] - x[0])
    skipped: set[int] = set()
    for at, target in branches(lines):
        if start < at < target <= stop and count_opcodes(lines[at:target])["FSEL"] >= 60:
            skipped = set(range(at + 1, target))
    return [line for i, line in enumerate(lines[start : stop + 1], start) if i not in skipped]


def transposer_issue(kernel: Compiled) -> int:
    """Issue slots of a transposer warp's loop over tiles."""
    lines = kernel.sass.splitlines()
    bodies = [count_opcodes(lines[start : stop + 1]) for start, stop in loops(lines)]
    return min(body.total() for body in bodies if body["LDSM"] >= 16)


def _products(lines: Sequence[str], start: int, stop: int) -> int:
    """Groups of wgmma that are waited for between two lines."""
    return sum("WARPGROUP.DEPBAR" in line for line in lines[start:stop])


# --- Two warpgroups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Clocks of one warpgroup's part of a tile, if it is alone."""

    exponentials: float = 512.0  # the exponential unit
    product: float = 256.0  # the tensor core, for Q K^T as for P V
    maxima: float = 250.0  # the rest of the arithmetic, once Q K^T is there
    accumulation: float = 150.0  # and once P V is there
    latency: float = 0.0  # waiting in between that nobody is disturbed by
    load: float = 1000.0  # from a K slot's release to its next tile
    transpose: float = 500.0  # the same for V
    jitter: float = 0.1  # by which every duration varies

    @classmethod
    def of(cls, kernel: Compiled, load: float, **more) -> Costs:
        """From the kernel's instructions."""
        exponentials, maxima, accumulation = consumer_loop(kernel)
        return cls(
            max(exponentials.mufu, exponentials.other), TILE * 64 * HEAD_DIM * 2 / TENSOR_FLOP_PER_CLK, maxima.other,
            accumulation.other, load=load, **more,
        )  # fmt: skip


class Span(NamedTuple):
    """What warpgroup 0 or 1, or the tensor core (2), does from `start` to `stop`, in clocks."""

    who: int
    start: float
    stop: float
    what: str


class _Sm:
    """State that the warpgroups share."""

    def __init__(self, config: Config, costs: Costs):
        self.config, self.costs, self.now = config, costs, 0.0
        self.queue: list[list] = []  # products: [warpgroup, "qk" or "pv", tile, clocks left]
        self.done: set[tuple[int, str, int]] = set()
        self.released: dict[tuple[int, str, int], float] = {(g, "k", 0): 0.0 for g in (0, 1)}
        self.turn = 0

    def there(self, ring: str, tile: int) -> bool:
        """Whether a tile of K or V has come."""
        slots = self.config.k_slots if ring == "k" else self.config.v_slots
        before = [self.released.get((g, ring, tile - slots), math.inf) for g in (0, 1)]
        delay = self.costs.load if ring == "k" else self.costs.transpose
        return tile < slots or self.now >= max(before) + delay


def _warpgroup(sm: _Sm, g: int, tiles: int, start: float, dice: random.Random) -> Iterator[tuple]:
    """The kernel's loop as steps: ("until", condition, name) or ("work", unit or None, clocks, name)."""
    costs = sm.costs

    def work(unit: str | None, clocks: float, name: str) -> tuple:
        return "work", unit, clocks * (1 + costs.jitter * dice.uniform(-1, 1)), name

    yield "until", lambda: sm.now >= start, "start"
    for i in range(tiles):
        yield "until", lambda i=i: sm.there("k", i + 1), "wait for K"
        sm.queue.append([g, "qk", i + 1, costs.product])
        yield work("exponential unit", costs.exponentials, "exponentials")
        yield "until", lambda i=i: sm.there("v", i), "wait for V"
        sm.queue.append([g, "pv", i, costs.product])
        if sm.config.turns:
            yield "until", lambda: sm.turn == g, "wait for turn"
        yield "until", lambda i=i: (g, "qk", i + 1) in sm.done, "wait for Q K^T"
        sm.released[g, "k", i + 1] = sm.now
        yield work(None, costs.latency, "maxima")
        yield work("arithmetic", costs.maxima, "maxima")
        yield "until", lambda i=i: sm.there("k", i + 2), "wait for K"
        yield "until", lambda i=i: (g, "pv", i) in sm.done, "wait for P V"
        sm.released[g, "v", i] = sm.now
        yield work("arithmetic", costs.accumulation, "accumulation")
        sm.turn = 1 - g


def simulate(config: Config, costs: Costs, tiles: int = 60, offset: float = 0.0, seed: int = 0) -> list[Span]:
    """Two consumer warpgroups of one SM, warpgroup 1 starting `offset` clocks later.

    Who works in the same unit at the same time gets half of it; the tensor core does one product after the other.
    """
    sm, dice, clock = _Sm(config, costs), random.Random(seed), 2.0
    warpgroups = [_warpgroup(sm, g, tiles, offset * g, dice) for g in (0, 1)]
    steps: list[tuple | None] = [next(w) for w in warpgroups]
    left, since, spans = [0.0, 0.0], [0.0, 0.0], []
    while any(steps):
        for g in (0, 1):
            while (step := steps[g]) and (left[g] <= 0 if step[0] == "work" else step[1]()):
                if sm.now > since[g]:
                    spans.append(Span(g, since[g], sm.now, step[-1]))
                steps[g], since[g] = next(warpgroups[g], None), sm.now
                if steps[g] and steps[g][0] == "work":
                    left[g] = steps[g][2]
        units = [step[1] if step and step[0] == "work" else "" for step in steps]
        for g in (0, 1):
            left[g] -= clock / 2 if units[0] == units[1] and units[g] else clock
        if sm.queue:
            sm.queue[0][3] -= clock
            if sm.queue[0][3] <= 0:
                g, kind, tile, _ = sm.queue.pop(0)
                sm.done.add((g, kind, tile))
                spans.append(Span(2, sm.now + clock - costs.product, sm.now + clock, f"{kind}{g}"))
        sm.now += clock
    return spans


def clocks_per_tile(spans: Sequence[Span], skip: int = 20) -> float:
    """Of a simulation, once it has settled: from tile to tile of warpgroup 0."""
    ends = [span.stop for span in spans if span.who == 0 and span.what == "accumulation"]
    return (ends[-1] - ends[skip]) / (len(ends) - 1 - skip)


def together(spans: Sequence[Span], skip: int = 20) -> float:
    """Share of the time of warpgroup 0's exponentials in which those of warpgroup 1 are computed as well."""
    mine, theirs = ([s for s in spans if s.who == g and s.what == "exponentials"][skip:] for g in (0, 1))
    both = sum(max(0.0, min(a.stop, b.stop) - max(a.start, b.start)) for a in mine for b in theirs)
    return both / sum(a.stop - a.start for a in mine)


def load_clocks(default: float = 1000.0) -> float:
    """Clocks of a tile's way by TMA on an idle GPU (lesson 04), at the clock that fp8 products leave (lesson 00)."""
    trip = recording.newest(RECORDED, "tma_").get("trip_idle")
    ceilings = records.load(RECORDED.parent / "ceilings.csv", table="ceilings")
    clock = ceilings[ceilings.quantity == "matmul_fp8_clock"].value
    return float(trip.median_us * clock.iloc[-1]) if trip is not None and len(clock) else default
