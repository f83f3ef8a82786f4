"""The timers themselves, studied: recorded traces for the lesson on measuring (table `measuring`).

Every experiment is a generator of points (series, x, value, unit). The kernels are copies of growing size: plain enough
that only the protocol can explain a difference, and of known traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hpcattn.bench.provenance import is_cuda, l2_bytes
from hpcattn.bench.timing import Timer, copies_to_exceed_l2, measure, timer_for

__all__ = ["EXPERIMENTS", "Point", "Study", "protocol_study"]

KB, MB = 1 << 10, 1 << 20


class Point(NamedTuple):
    """One point of a trace: row `series`, at `x`, has `value`."""

    series: str
    x: float
    value: float
    unit: str = "us"


@dataclass(frozen=True)
class Study:
    """Where to measure and how much: `small` shrinks every sweep to seconds on a CPU."""

    device: torch.device | str
    small: bool = False

    @property
    def timer(self) -> Timer:
        return timer_for(self.device)

    @property
    def typical(self) -> int:
        """Bytes that the copies of the smaller experiments move."""
        return MB if self.small else 16 * MB

    @property
    def sizes(self) -> list[int]:
        """Bytes that a call moves, read and written."""
        return [64 * KB << i for i in range(3 if self.small else 14)]

    def copy(self, moved: int) -> Callable:
        """A call that moves `moved` bytes: a kernel that negates half as many (see `ceilings` on why not `copy_`)."""
        source = torch.ones(moved // 8, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        return lambda: torch.neg(source, out=target)

    def copies(self, moved: int) -> list[Callable]:
        """Enough copies, in memory of their own, that no call finds its input in the L2."""
        return [self.copy(moved) for _ in range(copies_to_exceed_l2(moved, l2_bytes(self.device)))]

    def wait(self) -> None:
        if is_cuda(self.device):
            torch.cuda.synchronize()

    def wall_us(self, body: Callable, count: int) -> float:
        """Wall time of `body()` and of all it queued, over `count`."""
        self.wait()
        start = time.perf_counter()
        body()
        self.wait()
        return 1e6 * (time.perf_counter() - start) / count


def protocols(study: Study) -> Iterator[Point]:
    """The same copies through every protocol: only large kernels agree. x: bytes moved (0: the empty kernel)."""
    kernels = {0: [study.timer.empty()]} | {moved: study.copies(moved) for moved in study.sizes}
    for moved, calls in kernels.items():
        for protocol in ("steady", "single", "host"):
            yield Point(protocol, moved, measure(protocol, {"it": calls}, study.timer, replays=10)["it"].median_us)
        yield Point("eager_synchronized", moved, _eager_us(study, calls[0], synchronized=True))
        yield Point("eager_asynchronous", moved, _eager_us(study, calls[0], synchronized=False))
        yield Point("flush_and_events", moved, _flushed_us(study, calls[0]))


def _eager_us(study: Study, call: Callable, *, synchronized: bool, count: int = 20) -> float:
    """A loop of eager calls by the wall clock: host + kernel with a wait after each, the longer of both without."""

    def loop() -> None:
        for _ in range(count):
            call()
            if synchronized:
                study.wait()

    return float(np.median([study.wall_us(loop, count) for _ in range(5)]))


def _flushed_us(study: Study, call: Callable) -> float:
    """Eager calls between events, each after a kernel that flushes the L2 (as `triton.testing.do_bench` does)."""
    flush = torch.empty(max(MB, 2 * l2_bytes(study.device)), dtype=torch.uint8, device=study.device)
    return float(np.median([study.timer.elapsed_us([flush.zero_, call])[1] for _ in range(20)]))


def calls_per_graph(study: Study) -> Iterator[Point]:
    """Time per call over the calls in one graph: the protocol's share fades as 1 / N. x: calls."""
    counts = (1, 2, 4) if study.small else (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
    for name, call in (
        ("empty", study.timer.empty()),
        ("small_copy", study.copy(MB // 4)),
        ("copy", study.copy(study.typical)),
    ):
        for count in counts:
            graph = study.timer.capture([call] * count)
            times = study.timer.elapsed_us([graph] * 10)
            yield Point(name, count, float(np.median(times)) / count)


def working_set(study: Study) -> Iterator[Point]:
    """Bandwidth of a copy on one buffer (warm) and of one that rotates over buffers (cold). x: bytes moved."""
    for moved in study.sizes:
        for series, calls in (("warm", [study.copy(moved)]), ("cold", study.copies(moved))):
            timing = measure("steady", {"it": calls}, study.timer, replays=10)["it"]
            yield Point(series, moved, moved / timing.median_us * 1e-3, "GB/s")


def wrapper(study: Study) -> Iterator[Point]:
    """A kernel behind a wrapper that keeps the host busy: the wall clock reports the wrapper. x: host µs added."""
    call = study.copy(study.typical if study.small else 512 * MB)
    kernel_us = measure("steady", {"it": [call]}, study.timer, replays=5)["it"].median_us
    for delay in (0, 100) if study.small else (0, 50, 100, 150, 200, 250, 300, 350, 400, 500):

        def wrapped(delay=delay) -> None:
            end = time.perf_counter() + 1e-6 * delay
            while time.perf_counter() < end:
                pass
            call()

        yield Point("kernel", delay, kernel_us)
        yield Point("eager_asynchronous", delay, _eager_us(study, wrapped, synchronized=False))
        yield Point("eager_synchronized", delay, _eager_us(study, wrapped, synchronized=True))


def spread(study: Study) -> Iterator[Point]:
    """Repeated samples of one kernel: look at the distribution before quoting a number. x: sample."""
    calls, count = study.copies(study.typical), 50 if study.small else 1000
    for protocol in ("steady", "single"):
        timing = measure(protocol, {"it": calls[:8]}, study.timer, replays=count)["it"]
        yield from (Point(protocol, i, sample) for i, sample in enumerate(timing.samples))


def clock_ramp(study: Study) -> Iterator[Point]:
    """One kernel again and again after a second of idling, and the SM clock. x: ms since the first call."""
    call = study.copy(study.typical)
    graph = study.timer.capture([call] * 20)
    study.wait()
    time.sleep(0.1 if study.small else 1.0)
    start = time.perf_counter()
    for _ in range(3 if study.small else 20):
        at = 1e3 * (time.perf_counter() - start)
        yield Point("copy", at, float(np.median(study.timer.elapsed_us([graph] * 10))) / 20)
        yield Point("sm_clock", at, study.timer.clock_mhz(), "MHz")


EXPERIMENTS = {f.__name__: f for f in (protocols, calls_per_graph, working_set, wrapper, spread, clock_ramp)}


def protocol_study(device: torch.device | str, *, small: bool = False) -> Iterator[dict]:
    """Rows of table `measuring` without their provenance, experiment after experiment."""
    study = Study(device, small)
    for name, experiment in EXPERIMENTS.items():
        yield from ({"experiment": name, **point._asdict()} for point in experiment(study))
