"""Lesson 07c: lists are the kernel's, the model adds up, wrong compactions are caught, measurements are checked."""

import nbformat
import numpy as np
import pytest
import torch
from lesson_cases import NOTEBOOKS, compute_nothing, defined_in
from matplotlib.figure import Figure

from hpcattn.bench import figures, records, timing
from hpcattn.bench.suites import BOUNDS
from hpcattn.lessons import block_sparsity as lab
from hpcattn.lessons import block_sparsity_figures as pictures
from hpcattn.lessons import exercise
from hpcattn.lessons.block_sparsity import DROPS, LANES, LANES_BELOW, SHAPES, Fit, Warp

NOTEBOOK = "07c_block_sparsity.ipynb"
LONG, SHORT = SHAPES


NAMES = {"np": np, "Warp": Warp, "LANES_BELOW": LANES_BELOW}  # of the cells before the exercise


# --- The exercise -----------------------------------------------------------------------------------------------------


def right(warp, flags, tiles, count):
    word = warp.ballot(flags != 0)
    warp.store(flags != 0, count + warp.popc(word & LANES_BELOW), tiles)
    return count + warp.popc(word)


def forgets_what_is_there(warp, flags, tiles, count):
    word = warp.ballot(flags != 0)
    warp.store(flags != 0, warp.popc(word & LANES_BELOW), tiles)
    return count + warp.popc(word)


def counts_itself(warp, flags, tiles, count):
    word = warp.ballot(flags != 0)
    warp.store(flags != 0, count + warp.popc(word & (2 * LANES_BELOW + 1)), tiles)
    return count + warp.popc(word)


def upside_down(warp, flags, tiles, count):
    word = warp.ballot(flags != 0)
    warp.store(flags != 0, count + warp.popc(word) - 1 - warp.popc(word & LANES_BELOW), tiles)
    return count + warp.popc(word)


def everybody_stores(warp, flags, tiles, count):
    word = warp.ballot(flags != 0)
    warp.store(np.ones(LANES, bool), count + warp.popc(word & LANES_BELOW), tiles)
    return count + warp.popc(word)


def no_gaps_closed(warp, flags, tiles, count):
    warp.store(flags != 0, count + np.arange(LANES), tiles)
    return count + warp.popc(warp.ballot(flags != 0))


def always_a_round(warp, flags, tiles, count):
    right(warp, flags, tiles, count)
    return count + LANES


def only_flags_of_1(warp, flags, tiles, count):
    return right(warp, flags == 1, tiles, count)


def a_ballot_for_each_lane(warp, flags, tiles, count):
    for lane in range(LANES):
        at = count + warp.popc(warp.ballot(flags != 0) & LANES_BELOW[lane])
        warp.store((np.arange(LANES) == lane) & (flags != 0), at, tiles)
    return count + int(np.count_nonzero(flags))


def forgets_to_count(warp, flags, tiles, count):
    right(warp, flags, tiles, count)


WRONG = [
    forgets_what_is_there, counts_itself, upside_down, everybody_stores, no_gaps_closed, always_a_round,
    only_flags_of_1, a_ballot_for_each_lane, forgets_to_count,
]  # fmt: skip


def test_the_stub_is_not_attempted():
    assert exercise(lab.check_compact, defined_in(NOTEBOOK, "compact", **NAMES)).status == "not attempted"


def test_the_solution_passes():
    assert exercise(lab.check_compact, defined_in(f"solutions/{NOTEBOOK}", "compact", **NAMES)).passed
    assert exercise(lab.check_compact, right).passed


@pytest.mark.parametrize("mutant", WRONG)
def test_wrong_compactions_fail_with_a_reason(mutant):
    result = exercise(lab.check_compact, mutant)
    assert result.status == "failed"
    assert "round" in result.message


def test_cells_are_short():
    for name in (NOTEBOOK, f"solutions/{NOTEBOOK}"):
        for cell in nbformat.read(NOTEBOOKS / name, as_version=4).cells:
            assert cell.cell_type != "code" or len(cell.source.splitlines()) <= 25


# --- Lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 32, 33, 255, 256, 257, 600])
def test_the_list_is_the_kernel_s(n):
    dice = np.random.default_rng(n)
    for drop in (0.0, 0.4, 0.95, 1.0):
        row = (dice.random(n) >= drop).astype(np.uint8) * dice.integers(1, 256, n).astype(np.uint8)
        want = np.flatnonzero(row)[::-1].tolist()
        assert lab.listed(right, row)[0] == want
        assert lab.kernel_list(row, schedule_seed=n % 4) == want


def test_instructions_of_a_lane():
    warp = Warp(4)
    assert warp.ballot(np.arange(LANES) % 31 == 0) == 1 | 1 << 31
    assert warp.popc(0xFFFFFFFF) == 32 and warp.popc(LANES_BELOW).tolist() == list(range(LANES))
    assert lab.lane_bits(0x80000001).tolist() == [1] + [0] * 30 + [1]
    with pytest.raises(AssertionError, match="same place"):
        warp.store(np.arange(LANES) < 2, 0, 7)
    with pytest.raises(AssertionError, match="place 4"):
        warp.store(np.arange(LANES) == 0, 4, 7)


def test_sass_says_what_the_text_says():
    opcodes = lab.compiled_list().opcodes
    assert (opcodes["VOTE.ANY"], opcodes["POPC"], opcodes["STS"]) == (8, 16, 8)
    assert not any(name.startswith("SHFL") for name in opcodes)
    sass = lab.excerpt(lab.compiled_list().sass, ("VOTE", "POPC"), 50).splitlines()
    assert len(sass) == 24 and all(line.startswith(("VOTE.ANY R", "POPC R", "@")) for line in sass)


# --- The longest item -------------------------------------------------------------------------------------------------


def test_items_are_in_the_kernel_s_order():
    """Of `Batch.item` without an order: the last rows of all heads first."""
    work = lab.workload(300, 700, 0.5, heads=(4, 2))
    mask, tiles = work.block_mask(), lab.tiles_per_item(work)
    count = 3 * 4
    for index in range(count):
        block, head = (count - 1 - index) // 4, index % 4
        sees = -(-(700 - 300 + min(300, 128 * (block + 1))) // 128)
        assert tiles[index] == int(mask[0, head, block, :sees].sum())
    assert lab.tiles_per_item(lab.workload(300, 700, heads=(4, 2))).tolist() == [6] * 4 + [6] * 4 + [5] * 4


def test_bounds_are_those_of_the_text():
    longest = {(s, d): lab.longest(lab.workload(*s, d)) for s in SHAPES for d in (0.0, 0.75)}
    assert 3.0 < longest[LONG, 0.0] / longest[LONG, 0.75] < 3.2
    assert 2.1 < longest[SHORT, 0.0] / longest[SHORT, 0.75] < 2.2
    assert len(lab.tiles_per_item(lab.workload(*LONG))) == 128 <= lab.SMS


def test_items_go_to_the_sm_that_is_free_first():
    spans = lab.schedule_items([3, 1, 2, 2], Fit(0.0, 1.0), sms=2)
    assert [(s.sm, s.start, s.stop) for s in spans] == [(0, 0, 3), (1, 0, 1), (1, 1, 3), (0, 3, 5)]
    assert lab.makespan(spans) == 5
    assert lab.makespan(lab.schedule_items(range(132), Fit(5.0, 2.0))) == 5 + 2 * 131


def test_lists_are_cut_evenly():
    assert lab.cut([5, 1, 8], 2) == [4, 4, 3, 2, 1]
    assert sum(lab.cut(range(100), 8)) == sum(range(100))


def test_a_fit_finds_the_line():
    f = lab.fit([(n, 5.5 + 1.25 * n) for n in (32, 256)])
    assert f == pytest.approx((5.5, 1.25)) and f.us(100) == pytest.approx(130.5)


# --- The kernel -------------------------------------------------------------------------------------------------------


def test_promises_for_masks():
    x = lab.workload(64, 300, heads=(2, 1)).build()
    dense, dense_lse = lab.kernel_call(x, None)
    ones = torch.ones(1, 2, 1, 3, dtype=torch.uint8)
    o, lse = lab.kernel_call(x, ones)
    assert torch.equal(o, dense) and torch.equal(lse, dense_lse)
    nothing = ones.clone()
    nothing[0, 1] = 0
    o, lse = lab.kernel_call(x, nothing)
    assert (o[:, 1] == 0).all() and (lse[:, 1] == -torch.inf).all() and torch.equal(o[:, 0], dense[:, 0])
    assert lab.kernel_call(x, ones[..., :2].contiguous())[0].isnan().all()


# --- Measurements -----------------------------------------------------------------------------------------------------

TINY = {"shapes": ((64, 300),), "drops": (0.0, 0.5), "quants": ("type1",), "heads": (2, 1), "replays": 1, "warmup": 0}


def test_record_checks_times_and_appends(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MIN_CALLS", 1)
    path = tmp_path / "lessons.csv"
    lab.record(path, commit="abc", device="cpu", **TINY)
    found, frame = lab.recorded(path), records.load(path)
    assert list(found) == ["type1_64x300_drop0", "type1_64x300_drop50", "type1_64x300_ones"]
    assert set(frame.commit) == {"abc"} and set(frame.quant) == {"type1"} and set(frame.suite) == {"prefill"}
    assert (frame.median_us > 0).all() and (frame.rel_error > 0).all() and (frame.rel_error < BOUNDS["fp8"]).all()
    flops = {name: row.tflop_per_s * row.median_us for name, row in found.items()}
    assert flops["type1_64x300_ones"] == pytest.approx(flops["type1_64x300_drop0"], rel=1e-6)
    assert flops["type1_64x300_drop50"] < flops["type1_64x300_drop0"]
    assert lab.by_case(frame).keys() == found.keys()


def test_every_mask_of_a_shape_takes_turns(monkeypatch):
    """The real shapes, without computing anything."""
    seen = compute_nothing(monkeypatch, lab, 0.01, "prefill_call")
    frame = lab.measure_all("cpu", commit="abc")
    assert len(frame) == len(seen) * 6 == 24 and {protocol for protocol, _ in seen} == {"steady"}
    assert all(set(calls.values()) == {3} for _, calls in seen)
    times = lab.times_of(lab.by_case(frame), "type0")
    assert set(times) == {(s, d) for s in SHAPES for d in DROPS} and set(times.values()) == {2.0}


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(lab, "relative_error", lambda got, want: float("nan"))
    monkeypatch.setattr(lab, "measure", lambda *args, **kwargs: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="relative error"):
        lab.measure_all("cpu", **TINY)


def test_nothing_recorded_is_no_error(tmp_path):
    assert lab.recorded(tmp_path / "none.csv") == {} and lab.times_of({}, "type1") == {}


def test_the_records_bear_out_the_text():
    """Below the bound by tiles, close to it for long requests, far from it for short ones."""
    found, suite = lab.recorded(), figures.recorded("prefill")
    for quant in lab.QUANTS:
        times = lab.times_of(found, quant) or lab.suite_times(suite, quant)
        if (LONG, 0.75) not in times or (SHORT, 0.75) not in times:
            pytest.skip("not recorded yet")
        longest = {case: lab.longest(lab.workload(*case[0], case[1])) for case in times}
        share = {}
        for shape, drop in times:
            bound = longest[shape, 0.0] / longest[shape, drop]
            share[shape, drop] = times[shape, 0.0] / times[shape, drop] / bound
            assert share[shape, drop] < 1.03
        assert share[LONG, 0.75] > 0.9 > share[SHORT, 0.75]
        dense = lab.fit([(longest[s, 0.0], times[s, 0.0]) for s in SHAPES])
        assert 2 < dense.fixed_us < 12
        assert all(abs(us / dense.us(longest[case]) - 1) < 0.25 for case, us in times.items())


def test_pictures_are_drawn_with_and_without_records():
    cases = {(s, d): lab.longest(lab.workload(*s, d)) for s in SHAPES for d in (0.0, 0.75)}
    times = {"type1": {case: 5.0 + n for case, n in cases.items()}}
    bounds = {(s, d): cases[s, 0.0] / n for (s, d), n in cases.items()}
    for shown, fits in ((times, {"type1": Fit(5.0, 1.0)}), ({"type1": {}}, {})):
        assert isinstance(pictures.draw_sweep(shown, cases, fits), Figure)
        assert isinstance(pictures.draw_speedups(bounds, bounds if fits else {}, shown), Figure)
    spans = lab.schedule_items([3, 1], Fit(0.0, 1.0))
    assert isinstance(pictures.draw_gantt({"one": spans}, {"one": {"even": 2.0, "recorded": 3.0}}, 132), Figure)
