"""Lesson 00: a simulated GPU with a clock of its own, and the checkers of two benchmarks that readers write.

The simulation holds what misleads a timer and nothing else: a host that runs ahead of a queue, a wrapper that keeps the
host busy, a graph that pays once to start, an L2, compilation, a clock that ramps up, and disturbances. Its truth is
known, so a benchmark can be judged. All times are in µs; every run with one seed is the same.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch

from hpcattn.bench import records
from hpcattn.bench.ceilings import measure_ceilings
from hpcattn.bench.protocol_study import EXPERIMENTS, Study

__all__ = [
    "EMPTY_KERNEL",
    "MB",
    "PEER_RUNS",
    "Case",
    "SimulatedCPU",
    "SimulatedGPU",
    "SimulatedKernel",
    "SimulatedTimer",
    "Span",
    "cases",
    "ceilings",
    "check_benchmark",
    "check_cpu_timer",
    "floors",
    "protocol_pairs",
    "report",
    "trace",
]

MB = 1 << 20
TOLERANCE = 0.05
PEER_RUNS = (  # the recorded runs that the lesson's text speaks of
    "peers-steady-2026-11-30",
    "hpc-ops-single-2026-11-30",
    "fa3-contiguous-single-2026-11-30",
    "fa3-paged-single-2026-11-30",
)


class Span(NamedTuple):
    """A stretch of work in a simulation, for the timelines."""

    row: str  # "host" or "GPU"
    start: float
    end: float
    label: str  # the number of the call, "graph" for the launch of a graph


@dataclass(frozen=True)
class SimulatedKernel:
    """One kernel and the Python in front of it. `cold_us` is the truth that a benchmark looks for."""

    name: str
    cold_us: float  # GPU time of one call whose inputs lie in DRAM
    warm_us: float  # the same with its inputs in the L2
    bytes: int  # that one call reads
    host_us: float = 5.0  # host time of one eager call: the wrapper and the launch
    compile_us: float = 0.0  # host time, at the first call only


EMPTY_KERNEL = SimulatedKernel("empty", 0.5, 0.5, 1)


@dataclass
class SimulatedGPU:
    """A host and a GPU that share a queue: calls return at once, the GPU works them off in order."""

    seed: int = 0
    l2_bytes: int = 60 * MB
    latency_us: float = 3.0  # from the host's launch to the start on an idle GPU
    graph_host_us: float = 6.0  # host time of one graph launch, whatever it holds
    graph_start_us: float = 4.2  # GPU time before the first kernel of a graph, give or take a fifth
    jitter: float = 0.01  # relative standard deviation of one kernel's time
    disturbed: float = 0.0  # share of launches that run at another speed
    ramp_us: float = 0.0  # the GPU starts at two thirds of its clock and takes about this long to speed up
    trace: list[Span] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._host = self._gpu = self._busy = 0.0  # the host's clock, the GPU's last work, GPU time so far
        self._compiled: set[SimulatedKernel] = set()
        self._l2: OrderedDict[tuple[SimulatedKernel, int], None] = OrderedDict()
        self._l2_used = self._queued = 0

    # What a benchmark may use

    def now(self) -> float:
        """The host's clock."""
        return self._host

    def call(self, kernel: SimulatedKernel, inputs: int = 0) -> None:
        """One eager call on input set number `inputs`. Returns when the launch is queued, not when the GPU is done."""
        self._compile(kernel)
        self._host_works(kernel.host_us, str(self._queued + 1))
        self._queue([(kernel, inputs)])

    def capture(self, calls: Sequence[tuple[SimulatedKernel, int]]) -> tuple:
        """A graph of calls, each a (kernel, inputs) pair. Nothing runs yet."""
        for kernel, _ in calls:
            self._compile(kernel)
        return tuple(calls)

    def replay(self, graph: tuple) -> None:
        """Launch a graph: one launch for all its calls, and no wrapper."""
        self._host_works(self.graph_host_us, "graph")
        self._queue(graph, self.graph_start_us * self._random.uniform(0.8, 1.2))

    def record(self) -> float:
        """Queue an event; the GPU stamps it when everything queued before is done."""
        self._gpu = max(self._gpu, self._host + self.latency_us)
        return self._gpu

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""
        self._host = max(self._host, self._gpu)

    def elapsed_us(self, start: float, stop: float) -> float:
        """Time between two events. Raises RuntimeError if the host has not waited for them."""
        if self._host < max(start, stop):
            raise RuntimeError("an event is not reached yet: call gpu.synchronize() first")
        return stop - start

    # How it works

    def _compile(self, kernel: SimulatedKernel) -> None:
        if kernel not in self._compiled:
            self._compiled.add(kernel)
            self._host += kernel.compile_us

    def _host_works(self, us: float, label: str) -> None:
        self.trace.append(Span("host", self._host, self._host + us, label))
        self._host += us

    def _queue(self, calls: Sequence[tuple[SimulatedKernel, int]], start_us: float = 0.0) -> None:
        """The GPU starts when the launch has arrived and all earlier work is done, whichever is later."""
        at = max(self._host + self.latency_us, self._gpu) + start_us
        slowdown = self._disturbance()
        for kernel, inputs in calls:
            us = kernel.warm_us if self._in_l2(kernel, inputs) else kernel.cold_us
            us *= slowdown * self._clock_period() * (1 + self.jitter * self._random.gauss(0, 1))
            self._queued += 1
            self.trace.append(Span("GPU", at, at + us, str(self._queued)))
            self._busy += us
            at += us
        self._gpu = at

    def _in_l2(self, kernel: SimulatedKernel, inputs: int) -> bool:
        """Whether a call finds its inputs. Afterwards they are the newest in the L2, and the oldest had to leave."""
        found = (kernel, inputs) in self._l2
        self._l2[kernel, inputs] = None
        self._l2.move_to_end((kernel, inputs))
        self._l2_used += 0 if found else kernel.bytes
        while self._l2_used > self.l2_bytes:
            (oldest, _), _ = self._l2.popitem(last=False)
            self._l2_used -= oldest.bytes
        return found

    def _clock_period(self) -> float:
        return 1 + 0.5 * math.exp(-self._busy / self.ramp_us) if self.ramp_us else 1.0

    def _disturbance(self) -> float:
        if self._random.random() >= self.disturbed:
            return 1.0
        return self._random.choice((0.7, self._random.uniform(1.5, 4.0), self._random.uniform(1.5, 4.0)))


@dataclass(frozen=True)
class SimulatedTimer:
    """Lets `hpcattn.bench.timing.measure`, the book's own benchmark, run on a simulated GPU (its `Timer` protocol)."""

    gpu: SimulatedGPU
    name: str = "simulated GPU"

    def call(self, kernel: SimulatedKernel, inputs: int = 0) -> Callable[[], None]:
        """A call as `measure` takes them."""

        def run() -> None:
            self.gpu.call(kernel, inputs)

        run.pair = (kernel, inputs)
        return run

    def empty(self) -> Callable[[], None]:
        return self.call(EMPTY_KERNEL)

    def capture(self, calls: Sequence[Callable]) -> Callable[[], None]:
        graph = self.gpu.capture([call.pair for call in calls])
        return lambda: self.gpu.replay(graph)

    def elapsed_us(self, launches: Sequence[Callable]) -> list[float]:
        """Each launch between two events, all queued behind one untimed launch, as `CudaTimer` does it."""
        launches[0]()
        events = []
        for launch in launches:
            start = self.gpu.record()
            launch()
            events.append((start, self.gpu.record()))
        self.gpu.synchronize()
        return [self.gpu.elapsed_us(*pair) for pair in events]

    def host_us(self, call: Callable) -> float:
        self.gpu.synchronize()
        start = self.gpu.now()
        call()
        return self.gpu.now() - start

    def clock_mhz(self) -> float:
        return math.nan


class Case(NamedTuple):
    """One trap for a benchmark: a GPU, a kernel on it, and what goes wrong."""

    name: str
    gpu: SimulatedGPU
    kernel: SimulatedKernel
    hint: str


def cases(seed: int) -> Iterator[Case]:
    """The six traps, on fresh GPUs; each seed draws other kernel times."""
    draw = random.Random(seed)

    def case(
        name: str, cold_us: float, hint: str, *, warm: float = 0.8, mb: float = 200, gpu: dict | None = None, **more
    ):
        true_us = cold_us * draw.uniform(0.8, 1.25)
        simulated = SimulatedKernel(name, true_us, warm * true_us, int(mb * MB), **more)
        return Case(name, SimulatedGPU(draw.randrange(10**6), **(gpu or {})), simulated, hint)

    hint = "Its floor is larger than the kernel: how many calls share one start?"
    yield case("tiny kernel", 2.0, hint, warm=1.0, mb=0.0625)
    hint = "Do its inputs come from DRAM at every call, or has the last call left them in the L2?"
    yield case("cold cache", 6.5, hint, warm=0.55, mb=10)
    hint = "How long does Python take before the kernel starts? Is that between your two time stamps?"
    yield case("slow wrapper", 118, hint, host_us=252)
    hint = "Some launches are slower and some faster than the rest: which statistic ignores both?"
    yield case("noisy neighbor", 30, hint, mb=90, gpu={"disturbed": 0.3})
    hint = "The first call compiles, and the clock takes a while to rise: what do you do before you time?"
    yield case("first calls", 24, hint, mb=90, gpu={"ramp_us": 2500.0}, compile_us=3e5)
    hint = "Does your second time stamp wait for the GPU?"
    yield case("long kernel", 900, hint, host_us=8.0)


def report(benchmark: Callable[[SimulatedGPU, SimulatedKernel], float], seed: int = 0) -> pd.DataFrame:
    """What a benchmark reports in the six cases: columns true_us, reported_us, error (relative), one row per case."""
    rows = {}
    for case in cases(seed):
        reported = benchmark(case.gpu, case.kernel)
        if isinstance(reported, bool) or not isinstance(reported, (int, float)):
            raise AssertionError(f"{case.name}: the benchmark must return µs as a number, got {reported!r}")
        true = case.kernel.cold_us
        rows[case.name] = {"true_us": true, "reported_us": float(reported), "error": reported / true - 1}
    return pd.DataFrame.from_dict(rows, orient="index")


def check_benchmark(benchmark: Callable[[SimulatedGPU, SimulatedKernel], float]) -> None:
    """Hold `benchmark(gpu, kernel)` to within 5 % of the truth in six cases.

    Raises AssertionError with what was reported, the truth and a hint for every case that is off.
    """
    hidden = 20261130
    table = report(benchmark, hidden)
    hints = {case.name: case.hint for case in cases(hidden)}
    wrong = table[~(table.error.abs() <= TOLERANCE)]  # NaN is wrong too
    lines = [
        f"{name}: reported {row.reported_us:.4g} µs, the truth is {row.true_us:.4g} µs. {hints[name]}"
        for name, row in wrong.iterrows()
    ]
    assert not lines, f"{len(lines)} of {len(table)} cases are off by more than {TOLERANCE:.0%}\n" + "\n".join(lines)


@dataclass
class SimulatedCPU:
    """A clock that ticks coarsely and a call whose cost is known, all times in µs."""

    call_us: float
    first_us: float = 0.0  # added to the first call
    tick_us: float = 0.1
    interrupted: bool = False  # another process takes the core for 5 ms, every 10 ms or so
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now, self._first = 0.0, True
        self._next_interrupt = self._random.expovariate(1 / 1e4)

    def clock(self) -> float:
        """Seconds, like `time.perf_counter`: rounded down to a tick; reading it costs 0.05 µs."""
        self._pass(0.05)
        return self._now // self.tick_us * self.tick_us * 1e-6

    def call(self) -> None:
        self._pass((self.call_us + self._first * self.first_us) * (1 + 0.01 * self._random.gauss(0, 1)))
        self._first = False

    def _pass(self, us: float) -> None:
        self._now += us
        if self.interrupted and self._now > self._next_interrupt:
            self._now += 5e3
            self._next_interrupt = self._now + self._random.expovariate(1 / 1e4)


def check_cpu_timer(timer: Callable[[Callable[[], None], Callable[[], float]], float]) -> None:
    """Hold `timer(call, clock)`, µs per call, to within 5 % on four simulated CPUs.

    Raises AssertionError with what was reported, the truth and the circumstances.
    """
    simulated = {
        "an ordinary call": SimulatedCPU(40.0),
        "a first call that is 2000 times slower": SimulatedCPU(25.0, first_us=5e4, seed=1),
        "a call shorter than the clock's tick": SimulatedCPU(0.37, tick_us=1.0, seed=2),
        "a core that is shared": SimulatedCPU(1.7, interrupted=True, seed=3),
    }
    for name, cpu in simulated.items():
        reported = timer(cpu.call, cpu.clock)
        assert isinstance(reported, float), f"{name}: return µs per call as a float, got {reported!r}"
        error = reported / cpu.call_us - 1
        assert abs(error) <= TOLERANCE, (
            f"{name}: reported {reported:.4g} µs, the truth is {cpu.call_us:.4g} µs ({error:+.0%})"
        )


# Recorded and live traces


def trace(experiment: str, live: bool) -> pd.DataFrame:
    """Points (series, x, value, unit) of one experiment of `hpcattn.bench.protocol_study`, measured now or recorded.

    Empty where nothing is recorded yet. Raises ValueError for an unknown experiment.
    """
    if experiment not in EXPERIMENTS:
        raise ValueError(f"experiment must be one of {sorted(EXPERIMENTS)}, got {experiment!r}")
    if live and torch.cuda.is_available():
        return pd.DataFrame(EXPERIMENTS[experiment](Study("cuda")))
    frame = records.load(records.DATA / "h200" / "measuring.csv", table="measuring")
    frame = frame[frame.experiment == experiment]
    return frame[frame.run_id == frame.run_id.iloc[-1]].reset_index(drop=True) if len(frame) else frame


def ceilings(live: bool) -> pd.DataFrame:
    """Rows of table `ceilings`, indexed by quantity: measured now on this GPU, or the newest recorded on the H200."""
    if live and torch.cuda.is_available():
        return pd.DataFrame(measure_ceilings("cuda")).set_index("quantity")
    frame = records.load(records.DATA / "h200" / "ceilings.csv", table="ceilings")
    return frame.drop_duplicates("quantity", keep="last").set_index("quantity")


def floors() -> pd.DataFrame:
    """What an empty kernel read on the H200, one row per recorded run and protocol (steady, single).

    Columns: run_id, protocol, readings (distinct ones), low and high (µs).
    """
    folder, columns = records.DATA / "h200", ["run_id", "protocol", "us"]
    limits = records.load(folder / "ceilings.csv", table="ceilings").rename(columns={"value": "us"})
    limits = limits.assign(protocol=limits.quantity.str.removesuffix("_floor"))
    study = records.load(folder / "measuring.csv", table="measuring").query("experiment == 'protocols' and x == 0")
    study = study.rename(columns={"series": "protocol", "value": "us"})
    timed = records.load(folder / "decode.csv", folder / "prefill.csv").rename(columns={"floor_us": "us"})
    seen = pd.concat([frame[columns] for frame in (limits, study, timed)]).dropna().drop_duplicates()
    seen = seen[seen.protocol.isin(["steady", "single"])]
    return seen.groupby(["protocol", "run_id"]).us.agg(readings="size", low="min", high="max").reset_index()


def protocol_pairs(frame: pd.DataFrame, protocol: str = "single") -> pd.DataFrame:
    """Rows of `records` that were timed both ways: columns steady, reported, delta, floor (µs) and same_run.

    floor: the empty kernel's time beside `reported`, NaN where it was not recorded.

    Pairs of one run are preferred; otherwise the newest row of each protocol is taken, and `same_run` is False.
    """
    index = [column for column in records.KEY if column != "protocol"]
    timed = frame[frame.median_us.notna()].sort_values("date", kind="stable")
    timed = timed.drop_duplicates([*index, "protocol", "run_id"], keep="last")
    columns = [*index, "run_id", "median_us", "floor_us"]
    steady, other = (timed.loc[timed.protocol == p, columns] for p in ("steady", protocol))
    pairs = steady.merge(other, on=index, suffixes=("_steady", "_other"))
    pairs["same_run"] = pairs.run_id_steady == pairs.run_id_other
    pairs = pairs.sort_values("same_run", kind="stable").drop_duplicates(index, keep="last")
    names = {"median_us_steady": "steady", "median_us_other": "reported", "floor_us_other": "floor"}
    pairs = pairs.rename(columns=names).assign(delta=lambda pair: pair.reported - pair.steady)
    return pairs[[*index, "steady", "reported", "delta", "floor", "same_run"]]
