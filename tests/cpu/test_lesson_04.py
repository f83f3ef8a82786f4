"""Lesson 04: its kernels under hostile schedules, their machine code, the model of the ring, the exercise's checker."""

import importlib.util
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.timing import Timing
from hpcattn.lessons import exercise, pipelining
from hpcattn.lessons.pipelining import LADDER, RAGGED, STAGE_BYTES, check_phases, errors_of, simulate
from hpcattn.lessons.pipelining_figures import bytes_in_flight, draw_ladder, draw_sweep

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SEEDS = range(4)  # every kind of schedule

# --- The ladder -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return RAGGED.build("cpu")


@pytest.fixture(scope="module")
def reference(small):
    return small.reference()


@pytest.mark.parametrize("step", LADDER.values(), ids=LADDER)
def test_steps_agree_with_the_oracle(step, small, reference):
    runs = [(seed, *((2, 2) if seed % 2 else (1, 3))) for seed in SEEDS] if step.ring else [(1, 2, 1), (3, 8, 1)]
    for seed, splits, stages in runs:
        errors = errors_of(step, small, splits, stages, schedule_seed=seed, reference=reference)
        assert errors["o"] <= 4e-3 and errors["lse"] <= 1e-3, (seed, splits, stages)


def test_the_check_notices_a_wrong_result(small, reference):
    wrong = pipelining.altered("s * job.scale_log2, float", "s, float")
    errors = errors_of(LADDER["wait"].with_kernel(wrong.one_tma), small, 2, reference=reference)
    assert errors["o"] > 0.1 and errors["lse"] > 0.1


def test_tails_are_zeroed_for_a_reason(small, reference):
    careless = pipelining.altered("if inside < TILE:", "if inside < 0:")
    errors = errors_of(LADDER["wait"].with_kernel(careless.one_tma), small, 2, reference=reference)
    assert math.isnan(errors["o"])


RING_WAIT = "        mbarrier.wait(full.index(at), i // STAGES & 1)\n"
READ = "        state = attend(job, i, ring.k_s.index(at), ring.v_s.index(at), state)\n"
GIVE = "        mbarrier.arrive(ring.empty.index(at))\n"
FREE = "        mbarrier.wait(ring.empty.index(at), (i // ring.STAGES & 1) ^ 1)\n"
MISTAKES = {
    "no wait for the data": ("ring", RING_WAIT, ""),
    "parity of the first round": ("ring", RING_WAIT, RING_WAIT.replace("i // STAGES & 1", "0")),
    "stage given back before it is read": ("producer", READ + GIVE, GIVE + READ),
    "stage never given back": ("producer", GIVE, ""),
    "no wait for a free stage": ("producer", FREE, ""),
    "producer starts in the wrong phase": ("producer", FREE, FREE.replace(" ^ 1", "")),
    "cp.async not awaited": ("async", "        async_copy.wait_group(0)\n", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_seen_where_copies_are_late(name, small, reference):
    """The lesson says which kind of report each one gives."""
    step, old, new = MISTAKES[name]
    broken = LADDER[step].with_kernel(getattr(pipelining.altered(old, new), LADDER[step].kernel.__name__))
    with pytest.raises(emulator.EmulatorError) as caught:
        errors_of(broken, small, 1, schedule_seed=1, reference=reference)
    hangs = {"stage never given back", "producer starts in the wrong phase"}
    assert isinstance(caught.value, emulator.Deadlock) == (name in hangs | {"parity of the first round"})


def test_a_hang_names_the_producer_and_what_it_waits_for(small):
    forgetful = pipelining.altered(GIVE, "")
    with pytest.raises(emulator.Deadlock) as caught:
        errors_of(LADDER["producer"].with_kernel(forgetful.producer_warp), small, 1, schedule_seed=1)
    report = str(caught.value)
    assert "warp 6 of CTA (0, 1, 0) waits for phase parity 0 of mbarrier #1" in report
    assert "warps 0, 1, 2, 3 of CTA (0, 1, 0) wait for phase parity 1 of mbarrier #0" in report
    assert report.count("lacks 1 of 1 arrivals and 0 bytes") == 2


def test_altered_wants_text_that_occurs_once():
    with pytest.raises(ValueError, match="occurs 0 times"):
        pipelining.altered("no such text", "")


def test_machine_code():
    """LDG and STS become LDGSTS become UTMALDG; three CTAs of step 5 fit on an SM; nothing spills."""
    found = {name: step.compile() for name, step in LADDER.items()}
    families = {name: c.families() for name, c in found.items()}
    assert families["sync"]["LDG"] - families["async"]["LDG"] == 16 == families["async"]["LDGSTS"]
    assert families["sync"]["STS"] - families["async"]["STS"] == 16
    for name in ("wait", "ring", "producer"):
        assert families[name]["UTMALDG"] >= 2 and "LDGSTS" not in families[name]
    assert ["USETMAXREG" in f for f in families.values()] == [False] * 4 + [True]
    assert not any(c.spill_store_bytes + c.spill_load_bytes + c.stack_bytes for c in found.values())
    producer = found["producer"]
    assert producer.num_warps == 8 and 3 * producer.registers * 32 * producer.num_warps <= 1 << 16


@pytest.mark.parametrize("name", ["wait", "ring", "producer"])
def test_what_fits_is_what_the_compiler_uses(name):
    step = LADDER[name]
    for stages in (2, 6) if step.ring else (1,):
        compiled = step.compile(stages)
        assert compiled.shared_bytes <= stages * STAGE_BYTES + 4 * 1024
        assert compiled.registers <= (step.max_registers or 128)
        assert compiled.num_warps == (8 if name == "producer" else 4)


# --- The model --------------------------------------------------------------------------------------------------------

BYTES_PER_NS = Ceilings.load().tb_per_s * 1e3 / 132


@pytest.mark.parametrize(("latency", "consume"), [(1200.0, 0.0), (1200.0, 500.0), (350.0, 900.0), (2500.0, 800.0)])
@pytest.mark.parametrize("nbytes", [STAGE_BYTES, STAGE_BYTES // 2])
def test_bubbles_vanish_where_the_formula_says(latency, consume, nbytes):
    knee = math.ceil((latency + consume) * BYTES_PER_NS / nbytes)
    ring = {"latency": latency, "consume": consume, "tile_bytes": nbytes, "bytes_per_ns": BYTES_PER_NS}
    for stages in range(1, knee + 2):
        share = pipelining.share_reached(simulate(stages, 1, 200, **ring), nbytes, BYTES_PER_NS)
        slowest = max((latency + consume) / stages, consume, nbytes / BYTES_PER_NS)  # ns per tile
        assert share == pytest.approx(nbytes / BYTES_PER_NS / slowest, rel=0.03)
        assert (share > 0.99) == (stages >= knee and consume < nbytes / BYTES_PER_NS)


def test_the_prediction_of_the_lesson():
    """1.2 µs under load: two stages in bf16, three in fp8."""
    assert [math.ceil(1200 * BYTES_PER_NS / nbytes) for nbytes in (STAGE_BYTES, STAGE_BYTES // 2)] == [2, 3]


def test_the_model_keeps_its_rules():
    trips = simulate(3, 2, 20, latency=1000.0, consume=700.0, tile_bytes=STAGE_BYTES, bytes_per_ns=BYTES_PER_NS)
    landed = sorted(t.landed for t in trips)
    assert len(trips) == 40
    assert all(b - a >= STAGE_BYTES / BYTES_PER_NS - 1e-6 for a, b in itertools.pairwise(landed))
    assert all(t.landed - t.asked >= 1000.0 - 1e-9 and t.begun >= t.landed and t.done == t.begun + 700.0 for t in trips)
    for cta in range(2):
        mine = [t for t in trips if t.cta == cta]
        assert all(b.begun >= a.done for a, b in itertools.pairwise(mine))
        assert all(later.asked >= earlier.done for earlier, later in zip(mine, mine[3:], strict=False))
    flying = bytes_in_flight(trips, STAGE_BYTES, torch.linspace(0, landed[-1], 500).numpy())
    assert flying.max() == 6 * STAGE_BYTES


# --- Exercise ---------------------------------------------------------------------------------------------------------


def ring_in(notebook: str, folder: Path, *changes: tuple[str, str]):
    """The kernel `my_ring` as the notebook defines it, with pieces of its text replaced."""
    cells = [c.source for c in nbformat.read(NOTEBOOKS / notebook, as_version=4).cells if c.cell_type == "code"]
    parts = [next(c for c in cells if f"def {name}(" in c) for name in ("fill", "my_ring")]
    imports = "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl\n"
    imports += "from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma\n"
    text = imports + "\n\n".join(parts)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "ring.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"ring_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.my_ring


SOLUTION = "solutions/04_tma_pipelining.ipynb"
FULL = "        mbarrier.wait(full.index(at), i // STAGES & 1)  # 2\n"
EMPTY = "        mbarrier.wait(empty.index(at), (i // STAGES & 1) ^ 1)  # 1\n"
ARRIVE = "        mbarrier.arrive(empty.index(at))  # 3\n"
LOAD = "        tile = stages.index(at).load(layout)\n"
MUTANTS = {
    "dropped wait for full": [(FULL, "")],
    "dropped wait for empty": [(EMPTY, "")],
    "dropped arrival": [(ARRIVE, "")],
    "early arrival": [(ARRIVE, ""), (LOAD, ARRIVE + LOAD)],
    "parity by tile": [(FULL, FULL.replace("i // STAGES & 1", "i & 1"))],
    "parity of two stages": [(FULL, FULL.replace("// STAGES", "// 2")), (EMPTY, EMPTY.replace("// STAGES", "// 2"))],
    "producer in the wrong phase": [(EMPTY, EMPTY.replace("(i // STAGES & 1) ^ 1", "i // STAGES & 1"))],
    "half the bytes": [("source.nbytes_per_cta", "source.nbytes_per_cta // 2")],
    "forgets to double": [("2 * tile)", "tile)")],
}


def test_the_exercise_is_not_attempted_as_handed_out():
    cells = [c.source for c in nbformat.read(NOTEBOOKS / "04_tma_pipelining.ipynb", as_version=4).cells]
    (source,) = (c for c in cells if "exercise(check_phases, attempt)" in c)
    names = {"exercise": exercise, "check_phases": check_phases}
    exec(source.partition("exercise(")[0], names)
    assert exercise(check_phases, names["attempt"]).status == "not attempted"


def test_the_solution_passes(tmp_path):
    assert exercise(check_phases, ring_in(SOLUTION, tmp_path)).passed


def test_the_broken_ring_fails(tmp_path):
    result = exercise(check_phases, ring_in("04_tma_pipelining.ipynb", tmp_path))
    assert result.status == "failed" and "Deadlock" in result.message


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_rings_fail(name, tmp_path):
    result = exercise(check_phases, ring_in(SOLUTION, tmp_path, *MUTANTS[name]))
    assert result.status == "failed"
    assert "stages" in result.message and "tile(s)" in result.message, result.message
    reasons = ("Deadlock", "UnwrittenRead", "BarrierMisuse", "must double")
    assert any(reason in result.message for reason in reasons), result.message


def test_a_stage_given_back_early_goes_unnoticed_until_it_is_wanted(tmp_path):
    """The solution's last paragraph."""
    message = exercise(check_phases, ring_in(SOLUTION, tmp_path, *MUTANTS["early arrival"])).message
    stages, tiles = map(int, re.match(r"(\d) stages, (\d) tile", message).groups())
    assert tiles == stages + 1, message


def test_something_else_is_named():
    assert "must be a Gluon kernel" in exercise(check_phases, lambda: 1).message


# --- Measurements -----------------------------------------------------------------------------------------------------


def test_record_checks_times_and_writes(tmp_path, monkeypatch):
    def run_once(protocol, calls, timer, **_):
        assert protocol == "steady"
        for sequence in calls.values():
            sequence[0]()
        return {name: Timing((9.0, 10.0, 12.0), 1.0, 1980.0) for name in calls}

    monkeypatch.setattr(pipelining, "measure", run_once)
    workload = replace(RAGGED, case="uniform_256", q_lens=(1, 1), kv_lens=(256, 256))
    what = [one for one in pipelining.sweep() if one[0].name == "wait" and one[1:] == (1, 1)]
    path = tmp_path / "lessons.csv"
    pipelining.record(path, device="cpu", workload=workload, what=what, commit="abc")
    rows = pipelining.recorded(path)
    assert list(rows.case) == ["tma_wait_s1_c1", "tma_trip_idle", "tma_trip_loaded"]
    assert set(rows.commit) == {"abc"} and set(rows.protocol) == {"steady"} and (rows.rel_error <= 4e-3).all()
    assert pipelining.trips(rows) == {"idle": 9.0 / 4, "loaded": 9.0 / 2}  # four and two tiles per CTA
    assert pipelining.times_of(pipelining.movement(rows)) == {("wait", 1, 1): 10.0}


def test_what_is_timed_was_checked(monkeypatch):
    wrong = pipelining.altered("s * job.scale_log2, float", "s, float")
    monkeypatch.setattr(pipelining, "measure", lambda *_, **__: pytest.fail("timed before it was checked"))
    what = [(LADDER["wait"].with_kernel(wrong.one_tma), 1, 1)]
    with pytest.raises(AssertionError, match="tma_wait_s1_c1 on ragged"):
        pipelining.measure_movement("cpu", workload=RAGGED, what=what)


def test_the_sweep_covers_what_the_lesson_asks():
    names = {pipelining.case_name(*one) for one in pipelining.sweep()}
    assert {f"tma_{step}_s{s}_c1" for step in ("ring", "producer") for s in range(1, 7)} <= names
    assert {"tma_ring_s3_c2", "tma_producer_s3_c2", "tma_producer_s2_c3", "tma_sync_s1_c1"} <= names
    assert not {"tma_ring_s4_c2", "tma_producer_s1_c4"} & names  # no room for a second CTA, no registers for a fourth


def test_verdicts_follow_the_numbers():
    times = {("wait", 1, 1): 64.0}
    times |= {("ring", s, 1): us for s, us in enumerate((60.0, 45.0, 40.5, 40.0), 1)} | {("ring", 3, 2): 36.0}
    times |= {("producer", s, 1): us for s, us in enumerate((55.0, 36.0, 35.0), 1)} | {("producer", 3, 2): 30.0}
    assert pipelining.best(times, "ring") == (36.0, 3, 2) and pipelining.best(times, "ring", 1) == (40.0, 4, 1)
    assert pipelining.enough(times, "ring") == 3 and pipelining.enough(times, "producer") == 2
    assert pipelining.best(times, "sync") is None and pipelining.enough(times, "sync") is None
    said = pipelining.ring_verdict(times, 2)
    assert "a factor of 1.20 for 5 producer warp" in said and "1.20×, where 1 was predicted" in said
    assert "the same within 2 %" in pipelining.ring_verdict(times | {("ring", 3, 2): 30.1}, 2)
    turn = pipelining.stages_for_a_turn(times, 32, STAGE_BYTES / 1000)  # a tile per µs
    assert turn == pytest.approx(2.0)
    assert "so 2." in pipelining.latency_verdict(times, {"idle": 0.9, "loaded": 1.5}, 32, STAGE_BYTES / 1000)
    assert pipelining.ring_verdict({}, 2).endswith("Not recorded yet.")
    assert pipelining.latency_verdict({}, {}, 32, 1.0).endswith("Not recorded yet.")


def test_the_ladder_and_the_sweep_are_told_in_numbers():
    times = {("sync", 1, 1): 70.0, ("async", 1, 1): 51.0, ("async", 1, 3): 36.0, ("wait", 1, 1): 50.0}
    times |= {("ring", s, 1): us for s, us in enumerate((50.0, 40.0, 36.0, 37.0, 38.0, 39.0), 1)}
    times |= {("ring", 3, 2): 35.5, ("ring", 2, 3): 35.0}
    assert pipelining.ladder_verdict(times).endswith("Not recorded yet.")
    assert pipelining.sweep_verdict(times, 30.0, 1.0, 1.5).endswith("Not recorded yet.")
    times |= {("producer", s, c): us + 1 for (step, s, c), us in times.items() if step == "ring"}
    said = pipelining.ladder_verdict(times)
    assert "36.0, 1.39× as fast" in said and "with 3 CTAs per SM" in said and "2.9% more" in said
    said = pipelining.sweep_verdict(times, 30.0, 1.0, 1.5)
    assert "two take 40.0, three 36.0 and six 39.0" in said and "5.0 µs above" in said


def test_figures_cope_with_missing_rows():
    nothing = pipelining.movement(records.load(NOTEBOOKS / "no such file"))
    assert nothing.empty
    assert "not recorded yet" in [t.get_text() for t in draw_ladder(nothing, {}, 30.0, "").axes[0].texts]
    some = pd.DataFrame([("ring", 1, 1, 40.0)], columns=["step", "stages", "ctas", "median_us"])
    assert "not recorded yet" in [t.get_text() for t in draw_sweep(some, 30.0, 2, None, "").axes[0].texts]
