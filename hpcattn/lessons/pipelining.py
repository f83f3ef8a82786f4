"""Lesson 04, TMA pipelining: launching its kernels, a model of the ring, the exercise's checker, measurements."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from IPython.display import Markdown
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.provenance import l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import DECODE_CASES, Inputs, Workload
from hpcattn.inspection import Compiled, Variant
from hpcattn.lessons import pipelining_kernels as kernels
from hpcattn.lessons import recording
from hpcattn.lessons.recording import RECORDED
from hpcattn.reference import relative_error

__all__ = [
    "LADDER",
    "MAX_STAGES",
    "RAGGED",
    "RECORDED",
    "STAGE_BYTES",
    "Step",
    "Trip",
    "UNIFORM",
    "altered",
    "arguments",
    "best",
    "check_phases",
    "delta",
    "enough",
    "errors_of",
    "fits",
    "ladder_verdict",
    "latency_verdict",
    "launch",
    "launch_once",
    "measure_movement",
    "merged",
    "movement",
    "record",
    "recorded",
    "ring_verdict",
    "share_reached",
    "simulate",
    "splits_for",
    "stages_for_a_turn",
    "sweep",
    "sweep_verdict",
    "times_of",
    "trips",
]

G, D, TILE = kernels.G.value, kernels.D.value, kernels.TILE.value
LAYOUT = kernels.TILE_LAYOUT.value
STAGE_BYTES = 2 * TILE * D * 2  # K and V of one tile, bf16
SHARED_PER_SM, SHARED_PER_CTA, RESERVED = 228 * 1024, 227 * 1024, 1024  # on Hopper; reserved: per CTA, by CUDA

_shape = dict(suite="decode", num_q_heads=G, num_kv_heads=1, head_dim=D, page_size=TILE)
UNIFORM = Workload(
    case="uniform_4096", q_lens=(1,) * 64, kv_lens=DECODE_CASES["uniform_4096"], **_shape
)  # what is timed
RAGGED = Workload(case="ragged", q_lens=(1,) * 3, kv_lens=(1, 150, 300), **_shape)  # a lone key, part-filled last pages


# --- Launching --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One rung of the ladder: a kernel, how K and V reach it, and its options."""

    name: str  # in records
    title: str
    kernel: JITFunction
    descriptors: bool = True  # K and V come as tensor descriptors, else as pointers
    ring: bool = True  # takes STAGES
    max_registers: int | None = None  # per thread at launch

    def options(self, stages: int) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        options: dict[str, Any] = {"num_warps": kernels.CONSUMERS.value}
        options |= {"STAGES": stages} if self.ring else {}
        return options | ({"maxnreg": self.max_registers} if self.max_registers else {})

    def with_kernel(self, kernel: JITFunction) -> Step:
        """The same step with another kernel, e.g. one of `altered`."""
        return replace(self, kernel=kernel)

    def compile(self, stages: int = 2) -> Compiled:
        """For sm_90a, without a GPU."""
        return _compiled(self, stages if self.ring else 1)


# Eight warps at 80 registers let three CTAs of step 5 share an SM: see the lesson.
LADDER = {
    step.name: step
    for step in (
        Step("sync", "1 synchronous", kernels.synchronous, descriptors=False, ring=False),
        Step("async", "2 cp.async", kernels.asynchronous, descriptors=False, ring=False),
        Step("wait", "3 one TMA", kernels.one_tma, ring=False),
        Step("ring", "4 TMA ring", kernels.tma_ring),
        Step("producer", "5 producer warp", kernels.producer_warp, max_registers=80),
    )
}


@cache
def _compiled(step: Step, stages: int) -> Compiled:
    args, _ = arguments(step, RAGGED.build("cpu"), 1)
    return Variant.from_launch(step.title, step.kernel, *args, **step.options(stages)).compile()


def arguments(step: Step, inputs: Inputs, splits: int) -> tuple[list[Any], tuple[Tensor, Tensor, Tensor]]:
    """What a step's kernel takes, and the state (m, l, acc) among it that the kernel writes."""
    requests, device = len(inputs.seq_lens), inputs.q.device
    rows = [x.reshape(-1, D) for x in (inputs.cache.k, inputs.cache.v)]  # [pages * TILE, D]
    if step.descriptors:
        rows = [TensorDescriptor.from_tensor(x, [TILE, D], LAYOUT) for x in rows]
    m, l = (torch.empty(requests, splits, G, device=device) for _ in range(2))
    acc = torch.empty(requests, splits, G, D, device=device)
    scale_log2 = D**-0.5 * math.log2(math.e)
    table = inputs.block_table
    return [inputs.q, *rows, table, inputs.seq_lens, m, l, acc, table.shape[1], scale_log2], (m, l, acc)


def launch(kernel: JITFunction, grid: tuple[int, ...], *args: Any, schedule_seed: int = 0, **options: Any) -> None:
    """On the GPU if the tensors lie there, else in the emulator."""
    if any(isinstance(x, Tensor) and x.is_cuda for x in args):
        kernel[grid](*args, **options)
    else:
        emulator.launch(kernel, grid, *args, schedule_seed=schedule_seed, **options)


def merged(m: Tensor, l: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
    """Lesson 03's merge over the splits (dimension 1): o [requests, G, D] and LSE [requests, G]."""
    top = m.amax(1)
    weight = torch.exp2(m - top.masked_fill(top == -math.inf, 0.0)[:, None])
    total = (weight * l).sum(1)
    o = (weight[..., None] * acc).sum(1) / total.masked_fill(total == 0, 1.0)[..., None]
    return o, (top + total.log2()) * math.log(2)


def errors_of(
    step: Step,
    inputs: Inputs,
    splits: int,
    stages: int = 2,
    *,
    schedule_seed: int = 0,
    reference: tuple[Tensor, Tensor] | None = None,
) -> dict[str, float]:
    """Run one step and hold it against the float64 oracle: relative error of o, largest error of the LSE."""
    args, state = arguments(step, inputs, splits)
    launch(step.kernel, (splits, len(inputs.seq_lens)), *args, schedule_seed=schedule_seed, **step.options(stages))
    o, lse = merged(*state)
    o_ref, lse_ref = reference or inputs.reference()
    return {"o": relative_error(o.reshape(o_ref.shape), o_ref), "lse": float((lse - lse_ref).abs().max())}


def launch_once(name: str, stages: int = 2, ctas: int = 2) -> None:
    """One step on uniform_4096 on the GPU, for a profiler to look at."""
    step, inputs = LADDER[name], UNIFORM.build("cuda")
    args, _ = arguments(step, inputs, splits_for(ctas))
    launch(step.kernel, (splits_for(ctas), len(inputs.seq_lens)), *args, **step.options(stages))
    torch.cuda.synchronize()


# --- Showing and breaking code ----------------------------------------------------------------------------------------


def delta(before: Any, after: Any) -> Markdown:
    """The difference between two kernels or functions, as a highlighted diff."""
    old, new = (inspect.getsource(getattr(f, "fn", f)).splitlines() for f in (before, after))
    lines = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    return Markdown("```diff\n" + "\n".join(line for line in lines if not line.startswith("@@")) + "\n```")


def altered(old: str, new: str) -> Any:
    """The module `pipelining_kernels` with one piece of its text replaced; ValueError unless it occurs exactly once."""
    source = inspect.getsource(kernels)
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in {kernels.__name__}, not once")
    text = source.replace(old, new)
    folder = Path(tempfile.gettempdir(), f"hpcattn-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    folder.mkdir(exist_ok=True)  # kept: Triton reads the source again when it compiles, and its cache knows the path
    path = folder / "altered_kernels.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"altered_kernels_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where annotations are looked up
    spec.loader.exec_module(module)
    return module


_numbers = itertools.count()


# --- A model of the ring ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trip:
    """One tile's way through the ring, in ns."""

    cta: int
    tile: int
    stage: int
    asked: float
    landed: float
    begun: float  # being consumed
    done: float  # and its stage is free again


def simulate(
    stages: int, ctas: int, tiles: int, *, latency: float, consume: float, tile_bytes: int, bytes_per_ns: float
) -> list[Trip]:
    """One SM: `ctas` rings of `stages` stages. ns and bytes.

    A tile lands `latency` after it was asked for, but no sooner than the SM's share of the bandwidth, `bytes_per_ns`,
    lets it follow the one before. A CTA consumes its tiles in order, for `consume` each, and asks for the next
    tile as soon as a stage is free. CTAs consume side by side.
    """
    trips: list[list[Trip]] = [[] for _ in range(ctas)]
    last_landed = -math.inf
    for _ in range(ctas * tiles):
        waiting = [c for c in range(ctas) if len(trips[c]) < tiles]
        free = {c: trips[c][-stages].done if len(trips[c]) >= stages else 0.0 for c in waiting}
        cta = min(waiting, key=lambda c: (free[c], len(trips[c])))
        mine, tile = trips[cta], len(trips[cta])
        landed = max(free[cta] + latency, last_landed + tile_bytes / bytes_per_ns)
        begun = max(landed, mine[-1].done if mine else 0.0)
        mine.append(Trip(cta, tile, tile % stages, free[cta], landed, begun, begun + consume))
        last_landed = landed
    return [trip for one in trips for trip in one]


def share_reached(trips: Sequence[Trip], tile_bytes: int, bytes_per_ns: float) -> float:
    """Bandwidth over the SM's share of it, between the first landing and the last: the steady state."""
    landed = sorted(trip.landed for trip in trips)
    half = len(landed) // 2  # the second half: the beginning is forgotten
    return (len(landed) - 1 - half) * tile_bytes / (landed[-1] - landed[half]) / bytes_per_ns


# --- Exercise ---------------------------------------------------------------------------------------------------------

_EXERCISE_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


def check_phases(ring: JITFunction, *, stages: Sequence[int] = (3, 2)) -> None:
    """Raise AssertionError unless `ring` doubles 1 ... 2 STAGES + 1 tiles under every kind of schedule.

    ring: a Gluon kernel (source, target, num_tiles, STAGES) for four warps: source describes float tiles of 64 x 32,
    stacked; target is a pointer to as many.
    """
    assert isinstance(ring, JITFunction), f"the ring must be a Gluon kernel, got {type(ring).__name__}"
    for count, seed in itertools.product(stages, range(4)):
        for num_tiles in range(1, 2 * count + 2):
            x = torch.randn(num_tiles * 64, 32, generator=torch.Generator().manual_seed(num_tiles))
            y = torch.full_like(x, math.nan)
            source = TensorDescriptor.from_tensor(x, [64, 32], _EXERCISE_LAYOUT)
            where = f"{count} stages, {num_tiles} tile(s), a schedule with {emulator.scheduler.KINDS[seed]}"
            try:
                options = {"STAGES": count, "num_warps": 4, "schedule_seed": seed, "max_steps": 200_000}
                emulator.launch(ring, (1,), source, y, num_tiles, **options)
            except emulator.EmulatorError as error:
                raise AssertionError(f"{where}:\n{type(error).__name__}: {error}") from error
            wrong = [i for i in range(num_tiles) if not torch.equal(y[i * 64 :][:64], 2 * x[i * 64 :][:64])]
            assert not wrong, f"{where}: must double every tile, but these are wrong: {wrong}"


# --- Measurements -----------------------------------------------------------------------------------------------------

MAX_STAGES = 6
_COLUMNS = ["step", "stages", "ctas"]


def splits_for(ctas: int) -> int:
    """Two splits of 64 requests put one CTA on each of 128 of an H200's 132 SMs."""
    return 2 * ctas


def fits(step: Step, stages: int, ctas: int) -> bool:
    """Whether that many CTAs of a step are on one SM at the same time, by shared memory and registers."""
    shared = stages * STAGE_BYTES + 4 * 1024
    threads = 32 * kernels.CONSUMERS.value * (2 if step.max_registers else 1)
    registers = threads * (step.max_registers or 128)  # no step without a limit uses more
    return shared <= SHARED_PER_CTA and ctas * (shared + RESERVED) <= SHARED_PER_SM and ctas * registers <= 1 << 16


def sweep() -> list[tuple[Step, int, int]]:
    """(step, stages, CTAs per SM) of everything that is timed."""
    return [
        (step, stages, ctas)
        for step in LADDER.values()
        for stages in range(1, (MAX_STAGES if step.ring else 1) + 1)
        for ctas in (1, 2, 3, 4)
        if fits(step, stages, ctas)
    ]


def case_name(step: Step, stages: int, ctas: int) -> str:
    return f"tma_{step.name}_s{stages}_c{ctas}"


def measure_movement(
    device: torch.device | str = "cuda",
    *,
    workload: Workload = UNIFORM,
    what: Sequence[tuple[Step, int, int]] | None = None,
    replays: int = 20,
    commit: str = "",
) -> pd.DataFrame:
    """Rows of table `records` for `what`, by default `sweep()`, and for the round trip of a tile: all in one process.

    A case is `tma_<step>_s<stages>_c<CTAs per SM>`: its kernel alone, without the merge of its splits. `tma_trip_idle`
    is the time from asking TMA for K and V of a tile until they have landed while the GPU does nothing else,
    `tma_trip_loaded` the same with one CTA on each SM doing that. Every configuration is held against the oracle first.
    """
    what = sweep() if what is None else list(what)
    probes = [which.build(device, v_mean=mean) for which in (workload, RAGGED) for mean in (0.0, 1.0)]
    checks = [(probe, probe.reference()) for probe in probes]
    errors = {case_name(*one): _worst_error(*one, checks) for one in what}
    copies = copies_to_exceed_l2(workload.kv_bytes, l2_bytes(device))
    sets = workload.build_many(copies, device)
    calls = {case_name(*one): [_call(*one, x) for x in sets] for one in what}
    timings = measure("steady", calls, timer_for(device), replays=replays)
    origin = provenance(device, new_run_id(), commit)
    rows = [
        _row(workload, case, timings[case], 1, workload.bytes_moved, errors[case], origin) for case in timings
    ] + list(_round_trips(sets[0], device, replays, origin))
    return pd.DataFrame(rows, columns=records.COLUMNS)


def _worst_error(step: Step, stages: int, ctas: int, checks: Sequence[tuple[Inputs, tuple[Tensor, Tensor]]]) -> float:
    """The largest relative error of o over inputs and their references; AssertionError beyond 4e-3."""
    worst = 0.0
    for inputs, reference in checks:
        errors = errors_of(step, inputs, splits_for(ctas), stages, reference=reference)
        name = f"{case_name(step, stages, ctas)} on {inputs.workload.case}"
        assert errors["o"] <= 4e-3 and errors["lse"] <= 1e-3, f"{name}: errors are {errors}"
        worst = max(worst, errors["o"])
    return worst


def _call(step: Step, stages: int, ctas: int, inputs: Inputs) -> partial:
    args, _ = arguments(step, inputs, splits_for(ctas))
    grid = (splits_for(ctas), len(inputs.seq_lens))
    return partial(launch, step.kernel, grid, *args, **step.options(stages))


def _row(workload: Workload, case: str, timing, count: int, nbytes: int, error: float, origin: dict[str, str]):
    """A record of the time of one in `count` parts of a call, which moves `nbytes` in all."""
    key = workload.key | {"case": case}
    times = {name: getattr(timing, name) / count for name in ("median_us", "p10_us", "p90_us", "floor_us")}
    rate = nbytes / timing.median_us * 1e-6
    return Record(
        **key, schedule="static", implementation="hopper", protocol="steady", **times, tb_per_s=rate,
        rel_error=error, sm_clock_mhz=timing.sm_clock_mhz, **origin,
    )  # fmt: skip


def trip_call(inputs: Inputs, requests: slice, splits: int) -> partial:
    """A call of `round_trips` for some requests that are equally long. It returns what went wrong, if anything."""
    rows = (x.reshape(-1, D) for x in (inputs.cache.k, inputs.cache.v))
    k, v = (TensorDescriptor.from_tensor(x, [TILE, D], LAYOUT) for x in rows)
    table = inputs.block_table[requests]
    out = torch.empty(len(table), splits, TILE, D, dtype=torch.bfloat16, device=table.device)
    args = (k, v, table, out, table.stride(0), trips_per_cta(inputs.workload, splits))
    return partial(launch, kernels.round_trips, (splits, len(table)), *args, num_warps=4)


def trips_per_cta(workload: Workload, splits: int) -> int:
    return workload.kv_lens[0] // TILE // splits


def check_trips(call: partial, inputs: Inputs, requests: slice, splits: int) -> None:
    """Raise AssertionError unless each CTA of a `trip_call` leaves the last K tile of its part."""
    call()
    tiles, out = trips_per_cta(inputs.workload, splits), call.args[5]
    last = inputs.block_table[requests, tiles - 1 :: tiles][:, :splits].long()
    assert torch.equal(out, inputs.cache.k[last][..., 0, :]), "round_trips must store the tile that it fetched last"


def _round_trips(inputs: Inputs, device: torch.device | str, replays: int, origin: dict[str, str]) -> Iterator[Record]:
    workload, requests = inputs.workload, len(inputs.seq_lens)
    alone = [(slice(b, b + 1), 1) for b in range(requests)]  # another request in each call: cold in the L2
    for name, which in (("idle", alone), ("loaded", [(slice(None), 2)])):
        calls = [trip_call(inputs, *one) for one in which]
        check_trips(calls[-1], inputs, *which[-1])
        timing = measure("steady", {name: calls}, timer_for(device), replays=replays)[name]
        tiles, ctas = trips_per_cta(workload, which[0][1]), math.prod(calls[0].args[1])
        yield _row(workload, f"tma_trip_{name}", timing, tiles, ctas * tiles * STAGE_BYTES, 0.0, origin)


def record(path: Path | str = RECORDED, *, commit: str = "", **kwargs: Any) -> pd.DataFrame:
    """`measure_movement(...)`, appended to a CSV file of table `records`.

    On an H200: `python -c "from hpcattn.lessons.pipelining import record; print(record())"`
    """
    return recording.append(path, measure_movement(commit=commit, **kwargs))


def recorded(path: Path | str = RECORDED) -> pd.DataFrame:
    """The newest recorded rows of this lesson; none if nobody has measured yet."""
    frame = records.latest(records.load(path))
    return frame[frame.case.str.match("tma_")]


def movement(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `measure_movement` with step, stages and CTAs per SM as columns; without the round trips."""
    parts = frame.case.astype(str).str.extract(r"tma_(?P<step>\w+)_s(?P<stages>\d+)_c(?P<ctas>\d+)").dropna()
    found = frame.loc[parts.index].assign(step=parts.step, stages=parts.stages.astype(int), ctas=parts.ctas.astype(int))
    return found[[*_COLUMNS, "median_us", "tb_per_s", "rel_error", "run_id"]].reset_index(drop=True)


def trips(frame: pd.DataFrame) -> dict[str, float]:
    """The round trip of a tile in µs, "idle" and "loaded", where it was measured; kernel launch subtracted."""
    rows = frame[frame.case.isin(["tma_trip_idle", "tma_trip_loaded"])]
    return {row.case.rpartition("_")[2]: row.median_us - row.floor_us for row in rows.itertuples()}


# --- What the rows say ------------------------------------------------------------------------------------------------

Times = Mapping[tuple[str, int, int], float]  # µs of (step, stages, CTAs per SM)


def times_of(rows: pd.DataFrame) -> Times:
    """The rows of `movement` as a dictionary."""
    return {(row.step, row.stages, row.ctas): row.median_us for row in rows.itertuples()}


def best(times: Times, step: str, ctas: int | None = None) -> tuple[float, int, int] | None:
    """The fastest (µs, stages, CTAs per SM) of a step; None if nothing was measured."""
    return min(((us, s, c) for (name, s, c), us in times.items() if name == step and ctas in (None, c)), default=None)


def enough(times: Times, step: str, ctas: int = 1, slack: float = 1.05) -> int | None:
    """The fewest stages that come within 5 % of the best number of stages."""
    line = {s: us for (name, s, c), us in times.items() if (name, c) == (step, ctas)}
    return min((s for s, us in line.items() if us <= slack * min(line.values())), default=None)


def stages_for_a_turn(times: Times, tiles: int, bytes_per_ns: float) -> float | None:
    """Stages that cover everything a tile goes through in step 3 with one CTA per SM; tiles: per CTA."""
    us = times.get(("wait", 1, 1))
    return 1e3 * us / tiles * bytes_per_ns / STAGE_BYTES if us else None


def latency_verdict(times: Times, trip_us: Mapping[str, float], tiles: int, bytes_per_ns: float) -> str:
    """What the round trips say about the stages that are needed. tiles: per CTA with one CTA per SM."""
    whole = stages_for_a_turn(times, tiles, bytes_per_ns)
    if not trip_us or not whole:
        return "**Latency.** Not recorded yet."
    needed = {name: 1e3 * us * bytes_per_ns / STAGE_BYTES for name, us in trip_us.items()}
    turn = times["wait", 1, 1] / tiles
    return (
        f"**Latency.** The round trip of a tile takes {trip_us['idle']:.2f} µs on an idle GPU and "
        f"{trip_us['loaded']:.2f} µs when every SM asks. Little's law asks for {needed['idle']:.2f} and "
        f"{needed['loaded']:.2f} stages in flight. A whole turn of step 3 takes {turn:.2f} µs a tile, with the block "
        f"table and `attend`; to cover all of it, a ring needs {whole:.2f} stages, so {math.ceil(whole)}."
    )


def ring_verdict(times: Times, predicted: int) -> str:
    """What the sweep says: stages, CTAs, and whether the producer warp is worth its registers."""
    ring, producer = best(times, "ring"), best(times, "producer")
    if not ring or not producer:
        return "**Verdict.** Not recorded yet."
    kept = "ring" if ring < producer else "producer"
    few, many = times[kept, min(predicted, MAX_STAGES), 1], times[kept, 3, 2]
    ratio = ring[0] / producer[0]
    title = LADDER[kept].title
    words = "the same within 2 %" if abs(ratio - 1) < 0.02 else f"a factor of {max(ratio, 1 / ratio):.2f} for {title}"
    return (
        f"**Verdict.** With one CTA per SM, {enough(times, 'ring')} stages bring step 4 within 5 % of its best, and "
        f"{enough(times, 'producer')} step 5; predicted were {predicted}. In step {title}, two CTAs of three stages "
        f"take {many:.1f} µs and one of {predicted} stages {few:.1f} µs: {few / many:.2f}×, where 1 was predicted. At "
        f"their best, step 4 takes {ring[0]:.1f} µs ({ring[1]} stages × {ring[2]} CTAs) and step 5 "
        f"{producer[0]:.1f} µs ({producer[1]} × {producer[2]}): {words}."
    )


def ladder_verdict(times: Times) -> str:
    """What each step gained, with one CTA per SM and with as many as are best."""
    one, top = ({name: best(times, name, ctas) for name in LADDER} for ctas in (1, None))
    if None in one.values():
        return "**The ladder.** Not recorded yet."
    sync, cp, wait, ring = (one[name][0] for name in ("sync", "async", "wait", "ring"))
    (cp_us, _, cp_ctas), (ring_us, _, _) = top["async"], top["ring"]
    return (
        f"**The ladder.** With one CTA per SM, loads through registers take {sync:.1f} µs, `cp.async` {cp:.1f}, and "
        f"TMA {wait:.1f} ({cp / wait:.2f}× as fast as `cp.async`). The ring takes {ring:.1f}, {wait / ring:.2f}× as "
        f"fast as one tile at a time. But with {cp_ctas} CTAs per SM, `cp.async` without any ring takes {cp_us:.1f} "
        f"µs: {cp_us / ring_us - 1:.1%} more than the best ring."
    )


def sweep_verdict(times: Times, floor_us: float, launch_us: float, first_us: float) -> str:
    """What more stages bring and cost. launch_us: of an empty kernel; first_us: until a CTA has its first tile."""
    shapes = ((1, 1), (2, 1), (3, 1), (6, 1), (3, 2), (2, 3))  # stages, CTAs per SM
    if any((step, *shape) not in times for step in ("ring", "producer") for shape in shapes):
        return "**Stages.** Not recorded yet."
    lines = ["**Stages.**\n"]
    for step in ("ring", "producer"):
        one, two, three, six, split, thrice = (times[step, *shape] for shape in shapes)
        lines.append(
            f"- Step {LADDER[step].title}: with one CTA per SM, one stage takes {one:.1f} µs, two take {two:.1f}, "
            f"three {three:.1f} and six {six:.1f}. The same six as two CTAs of three stages take {split:.1f}, as three "
            f"of two {thrice:.1f}."
        )
    above = min(us for (step, _, _), us in times.items() if step in ("ring", "producer")) - floor_us
    lines.append(
        f"- The best of all is {above:.1f} µs above bytes over bandwidth. An empty kernel takes {launch_us:.1f} µs; "
        f"and a CTA asks for a length, a table entry and a tile, one after the other, {first_us:.1f} µs on an idle "
        "GPU, before its first product."
    )
    return "\n".join(lines)
