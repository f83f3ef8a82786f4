"""What a timer sees: the protocols every figure in this book is measured with.

| protocol | what is timed |
|---|---|
| `steady` | one CUDA graph of 20 or more calls that rotate over input sets larger than twice the L2, per call |
| `single` | one call per graph replay between two events, the inputs warm (how the published tables were made) |
| `host` | host time of one eager call on an empty queue |
| `plan` | `steady`, over the kernel that builds a decode plan |

Implementations take turns, so that a drifting clock meets all of them; an empty kernel takes part
in every measurement and gives the protocol's floor. Without a GPU `CpuTimer` stands in: it times the same calls with
`perf_counter`, and its name says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton

from hpcattn.bench.provenance import clock_mhz, is_cuda

__all__ = ["CpuTimer", "CudaTimer", "EMPTY", "PROTOCOLS", "Timing", "copies_to_exceed_l2", "measure", "timer_for"]

Call = Callable[[], object]
EMPTY = "empty"
MIN_CALLS = 20
MAX_COPIES = 256


@dataclass(frozen=True)
class Timing:
    """µs per call: one sample per turn, the median floor of the same measurement, and the SM clock at its end."""

    samples: tuple[float, ...]
    floor_us: float
    sm_clock_mhz: float = float("nan")

    median_us = property(lambda self: float(np.median(self.samples)))
    p10_us = property(lambda self: float(np.percentile(self.samples, 10)))
    p90_us = property(lambda self: float(np.percentile(self.samples, 90)))


class Timer(Protocol):
    """What `measure` needs of a device."""

    name: str

    def capture(self, calls: Sequence[Call]) -> Call: ...

    def elapsed_us(self, launches: Sequence[Call]) -> list[float]: ...

    def host_us(self, call: Call) -> float: ...

    def empty(self) -> Call: ...

    def clock_mhz(self) -> float: ...


class CudaTimer:
    """CUDA graphs between events."""

    name = "CUDA graphs and events"

    def capture(self, calls: Sequence[Call]) -> Call:
        """A graph of `calls`, one after the other; run once on a side stream first to compile and allocate."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def elapsed_us(self, launches: Sequence[Call]) -> list[float]:
        """Time each launch between two events, all queued at once behind one untimed launch.

        The first would otherwise meet an idle GPU and be charged for the host's launch.
        """
        launches[0]()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in launches]
        for (start, stop), launch in zip(events, launches, strict=True):
            start.record()
            launch()
            stop.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(stop) for start, stop in events]

    def host_us(self, call: Call) -> float:
        """Time the host spends in one call, with nothing queued before it."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)

    def empty(self) -> Call:
        return lambda: _nothing[(1,)]()

    def clock_mhz(self) -> float:
        return clock_mhz()


class CpuTimer:
    """`perf_counter` around the same calls: for rehearsals and lessons, not for claims."""

    name = "CPU, perf_counter"

    def capture(self, calls: Sequence[Call]) -> Call:
        calls = tuple(calls)

        def replay() -> None:
            for call in calls:
                call()

        replay()
        return replay

    def elapsed_us(self, launches: Sequence[Call]) -> list[float]:
        return [self.host_us(launch) for launch in launches]

    def host_us(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)

    def empty(self) -> Call:
        return lambda: None

    def clock_mhz(self) -> float:
        return float("nan")


def timer_for(device: torch.device | str) -> CudaTimer | CpuTimer:
    """The timer of a device."""
    return CudaTimer() if is_cuda(device) else CpuTimer()


@triton.jit
def _nothing():
    pass


def copies_to_exceed_l2(bytes_per_call: int, l2_bytes: int) -> int:
    """Input sets that together exceed twice the L2 (at most `MAX_COPIES`; one where there is no L2 to speak of)."""
    return min(MAX_COPIES, 2 * l2_bytes // max(1, bytes_per_call) + 1)


def rotate(calls: Sequence[Call]) -> list[Call]:
    """At least `MIN_CALLS` calls, every input set equally often."""
    return list(calls) * -(-MIN_CALLS // len(calls))


def measure(
    protocol: str, calls: Mapping[str, Sequence[Call]], timer: Timer, *, replays: int = 30, warmup: int = 3
) -> dict[str, Timing]:
    """Time several implementations of one workload, interleaved.

    calls: per implementation, one zero-argument call per input set. protocol: a key of `PROTOCOLS`.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {sorted(PROTOCOLS)}, got {protocol!r}")
    if EMPTY in calls or not calls:
        raise ValueError(f"calls must name implementations, none of them {EMPTY!r}; got {sorted(calls)}")
    sample = PROTOCOLS[protocol]({**calls, EMPTY: [timer.empty()]}, timer)
    for _ in range(warmup):
        sample()
    rounds = [sample() for _ in range(replays)]
    clock = timer.clock_mhz()
    floor = float(np.median([r[EMPTY] for r in rounds]))
    return {name: Timing(tuple(r[name] for r in rounds), floor, clock) for name in calls}


def _steady(calls: Mapping[str, Sequence[Call]], timer: Timer) -> Callable[[], dict[str, float]]:
    graphs = {name: timer.capture(rotate(sequence)) for name, sequence in calls.items()}

    def sample() -> dict[str, float]:
        times = timer.elapsed_us(list(graphs.values()))
        return {name: t / len(rotate(calls[name])) for name, t in zip(graphs, times, strict=True)}

    return sample


def _single(calls: Mapping[str, Sequence[Call]], timer: Timer) -> Callable[[], dict[str, float]]:
    graphs = {name: timer.capture(sequence[:1]) for name, sequence in calls.items()}
    # a loop of its own for each: beside a longer kernel the launch would hide
    return lambda: {name: float(np.median(timer.elapsed_us([graph] * 10))) for name, graph in graphs.items()}


def _host(calls: Mapping[str, Sequence[Call]], timer: Timer) -> Callable[[], dict[str, float]]:
    return lambda: {name: timer.host_us(sequence[0]) for name, sequence in calls.items()}


PROTOCOLS = {"steady": _steady, "single": _single, "host": _host, "plan": _steady}
