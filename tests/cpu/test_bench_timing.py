from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcattn.bench.timing import EMPTY, MIN_CALLS, PROTOCOLS, CpuTimer, copies_to_exceed_l2, measure, timer_for

LAUNCH, EMPTY_US = 5.0, 0.5


class FakeTimer:
    """A clock that advances by what each call says it costs, plus a launch cost per graph."""

    name = "fake"

    def __init__(self):
        self.now, self.log = 0.0, []

    def call(self, name, cost):
        return partial(self._run, name, cost)

    def _run(self, name, cost):
        self.now += cost
        self.log.append(name)

    def capture(self, calls):
        calls = tuple(calls)
        return lambda: [call() for call in calls]

    def elapsed_us(self, launches):
        return [LAUNCH + self.host_us(launch) for launch in launches]

    def host_us(self, call):
        start = self.now
        call()
        return self.now - start

    def empty(self):
        return self.call(EMPTY, EMPTY_US)

    def clock_mhz(self):
        return 1980.0


def test_steady_divides_by_the_calls_and_rotates():
    timer = FakeTimer()
    calls = [timer.call(f"set{i}", 7.0) for i in range(3)]
    timing = measure("steady", {"a": calls}, timer, replays=4, warmup=0)["a"]
    assert timing.median_us == pytest.approx(7.0 + LAUNCH / 21)
    assert timing.floor_us == pytest.approx(EMPTY_US + LAUNCH / MIN_CALLS)
    assert timing.sm_clock_mhz == 1980.0
    assert len(timing.samples) == 4
    counts = {name: timer.log.count(name) for name in ("set0", "set1", "set2")}
    assert len(set(counts.values())) == 1
    assert timer.log[:4] == ["set0", "set1", "set2", "set0"]


def test_single_pays_the_launch_every_time():
    timer = FakeTimer()
    timings = measure("single", {"a": [timer.call("a", 7.5)], "b": [timer.call("b", 11.6)]}, timer, replays=2)
    assert timings["a"].median_us == pytest.approx(7.5 + LAUNCH)
    assert timings["a"].floor_us == pytest.approx(LAUNCH + EMPTY_US)
    # what the launch hides: 1.55x is reported as less
    assert timings["b"].median_us / timings["a"].median_us < 1.35 < 11.6 / 7.5


def test_implementations_take_turns():
    timer = FakeTimer()
    measure("host", {"a": [timer.call("a", 1)], "b": [timer.call("b", 1)]}, timer, replays=3, warmup=0)
    assert timer.log == ["a", "b", EMPTY] * 3


def test_percentiles():
    timer = FakeTimer()
    costs = iter(range(1, 101))
    timing = measure("host", {"a": [lambda: timer.call("a", next(costs))()]}, timer, replays=100, warmup=0)["a"]
    assert (timing.p10_us, timing.median_us, timing.p90_us) == pytest.approx((10.9, 50.5, 90.1))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cpu_timer_runs_every_protocol_and_says_what_it_is(protocol):
    timer = timer_for("cpu")
    assert "CPU" in timer.name and "perf_counter" in timer.name
    x = torch.ones(1 << 16)
    timing = measure(protocol, {"sum": [x.sum]}, timer, replays=5)["sum"]
    assert timing.p90_us >= timing.median_us >= timing.p10_us > 0
    assert timing.median_us > timing.floor_us


def test_bad_arguments():
    with pytest.raises(ValueError, match="protocol must be one of"):
        measure("fast", {"a": [lambda: None]}, CpuTimer())
    with pytest.raises(ValueError, match="calls must name"):
        measure("host", {}, CpuTimer())


@given(call=st.integers(1, 1 << 30), l2=st.integers(0, 1 << 27))
def test_copies_exceed_twice_the_l2(call, l2):
    copies = copies_to_exceed_l2(call, l2)
    assert copies * call > 2 * l2 or copies == 256
    assert copies == 1 or (copies - 1) * call <= 2 * l2
