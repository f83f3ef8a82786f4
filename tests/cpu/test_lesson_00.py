"""Lesson 00: the simulation, the checkers against wrong answers, the claims of its text, its figures on real traces."""

import shutil
import statistics

import nbformat
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from hpcattn.bench import records
from hpcattn.bench.protocol_study import EXPERIMENTS, protocol_study
from hpcattn.bench.provenance import provenance
from hpcattn.bench.timing import copies_to_exceed_l2, measure
from hpcattn.lessons import exercise
from hpcattn.lessons import measuring as sim
from hpcattn.lessons import measuring_figures as draw

NOTEBOOKS = records.DATA.parent / "notebooks"


def defined(notebook: str, cell: str) -> dict:
    """The names that one cell of a notebook defines, its last expression left out."""
    cells = nbformat.read(NOTEBOOKS / notebook, as_version=4).cells
    source = next(c.source for c in cells if c.id == cell)
    names = {"statistics": statistics}
    exec(source.split("\n\n\nexercise(")[0].split("\n\n\nattempt")[0], names)
    return names


@pytest.fixture(scope="module")
def solution():
    return defined("solutions/00_measuring.ipynb", "gpu-solution")["benchmark"]


def quiet_kernel(us: float, host_us: float = 5.0) -> sim.SimulatedKernel:
    return sim.SimulatedKernel("k", us, us, sim.MB, host_us=host_us)


# The simulated GPU


def test_eager_loops_report_host_plus_kernel_or_the_longer():
    for host, us in ((40.0, 10.0), (10.0, 40.0)):
        gpu, kernel = sim.SimulatedGPU(jitter=0), quiet_kernel(us, host)
        gpu.call(kernel)
        assert gpu.now() == host  # the call did not wait
        gpu.synchronize()
        assert gpu.now() == pytest.approx(host + gpu.latency_us + us)
        start = gpu.now()
        for _ in range(1000):
            gpu.call(kernel)
        gpu.synchronize()
        assert (gpu.now() - start) / 1000 == pytest.approx(max(host, us), rel=0.01)


def test_a_slow_wrapper_hides_the_kernel():
    gpu, kernel = sim.SimulatedGPU(jitter=0), quiet_kernel(118, 252)
    gpu.call(kernel)
    gpu.synchronize()
    assert gpu.now() == pytest.approx(370, rel=0.01)


def test_a_graph_pays_its_start_once():
    gpu, kernel = sim.SimulatedGPU(jitter=0), quiet_kernel(2)
    for count in (1, 10, 100):
        gpu.replay(gpu.capture([(kernel, 0)] * count))
        start, _, stop = gpu.record(), gpu.replay(gpu.capture([(kernel, 0)] * count)), gpu.record()
        gpu.synchronize()
        added = gpu.elapsed_us(start, stop) - 2 * count
        assert 0.8 * gpu.graph_start_us <= added <= 1.2 * gpu.graph_start_us + gpu.graph_host_us


def test_the_l2_keeps_the_newest_sets():
    gpu = sim.SimulatedGPU(jitter=0, l2_bytes=30)
    kernel = sim.SimulatedKernel("k", 10.0, 1.0, 10)
    for inputs in (0, 1, 2, 0, 3, 1, 0):
        gpu.call(kernel, inputs)
    durations = [round(s.end - s.start) for s in gpu.trace if s.row == "GPU"]
    assert durations == [10, 10, 10, 1, 10, 10, 1]  # 3 drove out 1, 1 drove out 2


def test_an_event_must_be_waited_for():
    gpu = sim.SimulatedGPU()
    start, _, stop = gpu.record(), gpu.call(quiet_kernel(50)), gpu.record()
    with pytest.raises(RuntimeError, match="synchronize"):
        gpu.elapsed_us(start, stop)
    gpu.synchronize()
    assert gpu.elapsed_us(start, stop) == pytest.approx(55, rel=0.05)


def test_one_seed_is_one_run(solution):
    assert sim.report(solution, seed=3).equals(sim.report(solution, seed=3))


# Exercise 2: the benchmark


def wrong_host_only(gpu, kernel):
    start = gpu.now()
    gpu.call(kernel)
    return gpu.now() - start


def wrong_synchronized(gpu, kernel):
    gpu.call(kernel)
    gpu.synchronize()
    start = gpu.now()
    for _ in range(50):
        gpu.call(kernel)
        gpu.synchronize()
    return (gpu.now() - start) / 50


def wrong_asynchronous(gpu, kernel):
    gpu.call(kernel)
    gpu.synchronize()
    start = gpu.now()
    for _ in range(200):
        gpu.call(kernel)
    gpu.synchronize()
    return (gpu.now() - start) / 200


def wrong_eager_events(gpu, kernel):
    times = []
    for _ in range(20):
        start, _, stop = gpu.record(), gpu.call(kernel), gpu.record()
        gpu.synchronize()
        times.append(gpu.elapsed_us(start, stop))
    return statistics.median(times)


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (wrong_host_only, "long kernel"),
        (wrong_synchronized, "slow wrapper"),
        (wrong_asynchronous, "cold cache"),
        (wrong_eager_events, "slow wrapper"),
        (lambda gpu, kernel: 30.0, "tiny kernel"),
        (lambda gpu, kernel: float("nan"), "first calls"),
    ],
)
def test_wrong_benchmarks_fail_and_the_case_is_named(wrong, case):
    with pytest.raises(AssertionError, match=f"{case}: reported .* the truth is"):
        sim.check_benchmark(wrong)
    assert exercise(sim.check_benchmark, wrong).status == "failed"


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ({"sets": 1}, "cold cache"),
        ({"sets": 1, "calls": 20}, "tiny kernel"),
        ({"summary": statistics.mean}, "noisy neighbor"),
        ({"summary": min}, "noisy neighbor"),
        ({"warmup": 0, "samples": 1}, "first calls"),
    ],
)
def test_every_part_of_the_solution_is_needed(solution, options, case):
    with pytest.raises(AssertionError, match=f"{case}: reported"):
        sim.check_benchmark(lambda gpu, kernel: solution(gpu, kernel, **options))


def test_a_benchmark_must_return_a_number():
    with pytest.raises(AssertionError, match="must return µs as a number, got None"):
        sim.check_benchmark(lambda gpu, kernel: None)


def test_the_solution_passes_on_many_kernels(solution):
    assert exercise(sim.check_benchmark, solution).passed
    for seed in range(5):
        assert sim.report(solution, seed).error.abs().max() < sim.TOLERANCE


def test_the_stubs_are_not_attempted():
    assert exercise(sim.check_benchmark, defined("00_measuring.ipynb", "exercise-stub")["benchmark"]).status == (
        "not attempted"
    )
    assert exercise(sim.check_cpu_timer, defined("00_measuring.ipynb", "cpu-stub")["cpu_timer"]).status == (
        "not attempted"
    )


def book(protocol):
    def benchmark(gpu, kernel):
        timer = sim.SimulatedTimer(gpu)
        calls = [timer.call(kernel, i) for i in range(copies_to_exceed_l2(kernel.bytes, gpu.l2_bytes))]
        return measure(protocol, {"it": calls}, timer)["it"].median_us

    return benchmark


def test_the_books_steady_protocol_passes_its_own_exercise_and_the_others_do_not():
    sim.check_benchmark(book("steady"))
    for protocol in ("single", "host"):
        with pytest.raises(AssertionError, match="cases are off"):
            sim.check_benchmark(book(protocol))


# Exercise 1: the timer


def timer(batch: int, samples: int = 21, warmup: int = 1, summary=statistics.median):
    def cpu_timer(call, clock):
        for _ in range(warmup):
            call()
        times = []
        for _ in range(samples):
            start = clock()
            for _ in range(batch):
                call()
            times.append((clock() - start) / batch * 1e6)
        return summary(times)

    return cpu_timer


@pytest.mark.parametrize(
    ("wrong", "circumstances"),
    [
        (timer(1), "shorter than the clock's tick"),
        (timer(1000, samples=1, warmup=0), "first call"),
        (timer(1000, summary=statistics.mean), "shared"),
        (timer(50_000, samples=3), "shared"),
        (lambda call, clock: None, "as a float"),
    ],
)
def test_wrong_cpu_timers_fail_and_say_where(wrong, circumstances):
    with pytest.raises(AssertionError, match=circumstances):
        sim.check_cpu_timer(wrong)


def test_the_cpu_timer_of_the_solutions_passes():
    assert exercise(sim.check_cpu_timer, defined("solutions/00_measuring.ipynb", "cpu-solution")["cpu_timer"]).passed


# What the text claims about the records


def peers():
    frame = records.load(*(records.DATA / "h200" / f"{name}.csv" for name in ("decode", "prefill")))
    return frame[frame.run_id.isin(sim.PEER_RUNS)]


@pytest.fixture(scope="module")
def pairs():
    return sim.protocol_pairs(peers())


def test_a_single_call_adds_more_to_short_kernels(pairs):
    short, long = pairs[pairs.steady < 13], pairs[(pairs.steady > 25) & (pairs.steady < 60)]
    assert len(short) > 5 and len(long) > 20
    assert short.delta.median() > long.delta.median() + 1


def test_a_floor_explains_single_better_than_a_constant(pairs):
    small = pairs[pairs.steady < 200]
    constant = (small.delta - small.delta.median()).abs().mean()
    models = [np.maximum(floor, small.steady + d) for floor in range(20) for d in np.arange(0, 4, 0.25)]
    assert min((small.reported - m).abs().mean() for m in models) < constant


def test_below_its_floor_only_the_floor_explains_single():
    frame = records.load(*(records.DATA / "h200" / f"{n}.csv" for n in ("decode", "prefill")))
    pairs = sim.protocol_pairs(frame[frame.run_id.str.startswith("portable-")])  # few of these kernels are that short
    small = pairs[pairs.same_run & (pairs.steady < 60)]
    assert len(small) > 50 and small.floor.notna().all()
    below = small.steady < small.floor

    def misfits(rows) -> tuple[float, float]:
        """Of the best constant, and of the best constant above each pair's own floor."""
        added = np.arange(0, 6, 0.1)
        own = min((rows.reported - np.maximum(rows.floor, rows.steady + d)).abs().mean() for d in added)
        return (rows.delta - rows.delta.median()).abs().mean(), own

    constant, own = misfits(small[below])
    assert below.sum() < len(small) / 10 and own < 0.6 * constant
    constant, own = misfits(small[~below])
    assert own == pytest.approx(constant, rel=0.1)
    assert (small.delta - 4.2).abs().mean() > 2 * misfits(small)[0], "one kernel's constant is far off"


def test_floors_differ_between_recorded_runs():
    floors = sim.floors().set_index("protocol")
    assert (floors.low <= floors.high).all() and (floors.readings > 0).all()
    assert floors.loc["single"].high.max() > 1.5 * floors.loc["single"].low.min() > 5 * floors.loc["steady"].high.max()


def test_protocols_disagree_about_the_schedules_on_the_smallest_workload():
    ratios = records.compare(peers(), "hpc_ops/static", "hpc_ops/dynamic")
    bf16 = {"case": "uniform_512", "dtype": "bf16", "layout": "NHD", "num_query_tokens": 1}
    ratios = ratios[(ratios[list(bf16)] == pd.Series(bf16)).all(axis=1)].groupby("protocol").ratio.last()
    assert ratios.steady < 0.95 < ratios.single


def test_the_predictions_that_the_text_calls_failed_did_fail():
    limit = sim.ceilings(live=False)["value"]
    assert limit.matmul_bf16 < 0.95 * limit.sm_count * 4096 * 1.83e-3
    spot = records.load(records.DATA / "h200" / "spot.csv", table="spot").set_index(["name", "case", "protocol"]).value
    steady, single = (spot["decode_spike", "uniform_512", protocol] for protocol in ("steady", "single"))
    assert not 0.9 < limit.single_floor / (limit.steady_floor + single - steady) < 1.1


def test_pairs_of_one_run_come_first():
    row = peers().query("protocol == 'steady'").iloc[0]
    frame = pd.DataFrame([row] * 4).assign(
        protocol=["steady", "single", "steady", "single"],
        run_id=["both", "both", "a", "b"],
        date=["2026-01-01", "2026-01-01", "2026-02-02", "2026-02-02"],
        median_us=[10.0, 15.0, 11.0, 12.0],
    )
    pair = sim.protocol_pairs(frame)
    assert len(pair) == 1 and pair.same_run.item()
    assert (pair.steady.item(), pair.delta.item()) == (10.0, 5.0)
    pair = sim.protocol_pairs(frame[frame.run_id != "both"])
    assert not pair.same_run.item() and pair.delta.item() == pytest.approx(1.0)


# Figures


def test_an_unknown_experiment_is_named():
    with pytest.raises(ValueError, match="experiment must be one of"):
        sim.trace("nothing", live=False)


@pytest.fixture(scope="module")
def recorded_folder(tmp_path_factory):
    """A data folder with a protocol study of this CPU, as the bench records it."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(records.DATA / "schema.csv", folder)
    origin = provenance("cpu", "test", "-")
    records.append(
        folder / "h200" / "measuring.csv", [r | origin for r in protocol_study("cpu", small=True)], "measuring"
    )
    return folder


def test_every_figure_draws_what_the_study_records(recorded_folder, pairs, monkeypatch):
    monkeypatch.setattr(records, "DATA", recorded_folder)
    traces = {name: sim.trace(name, live=False) for name in EXPERIMENTS}
    assert all(len(points) for points in traces.values())
    points = pd.DataFrame({"series": "k", "x": [1, 2], "value": [2.0, 1.0]})
    loops = pd.DataFrame({"eager_synchronized": [1.0, 2.0], "eager_asynchronous": [1.0, 1.0]}, index=[0, 1])
    sets = pd.DataFrame({"sets": [1, 2], "value": [1.0, 2.0], "true": 2.0})
    for source, of in (("recorded", traces.get), ("nothing", lambda name: traces[name].iloc[:0])):
        drawn = [
            draw.draw_clock_ramp(of("clock_ramp"), source),
            draw.draw_wrapper(loops, of("wrapper"), 1.0, source),
            draw.draw_graph_sizes(points, of("calls_per_graph"), source),
            draw.draw_l2(sets, of("working_set"), 6, source),
            draw.draw_protocols(pairs, pairs.head(3), (0.7, 17), (10, 17), 2.0, of("protocols"), source),
        ]
        assert all(isinstance(figure, Figure) for figure in drawn)
        if source == "recorded":
            assert all(len(line.get_xdata()) for figure in drawn for ax in figure.axes for line in ax.lines)
        texts = [text.get_text() for figure in drawn[:4] for ax in figure.axes for text in ax.texts]
        assert any("not recorded yet" in text for text in texts) == (source == "nothing")
        protocols = {line.get_label() for line in drawn[4].axes[0].lines}
        assert any("flush" in label for label in protocols) == (source == "recorded")


def test_the_spread_leaves_out_no_more_than_its_tail():
    values = [*np.linspace(9, 10, 199), 80.0]
    figure = draw.draw_spread(pd.DataFrame({"series": "single", "value": values}), "recorded")
    (ax,) = figure.axes
    assert sum(patch.get_height() for patch in ax.patches[:50]) == 198
    assert ax.get_legend().get_title().get_text() == "not shown: 2, up to 80.0 µs"
