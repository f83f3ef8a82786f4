"""Lesson 07a: its checker, its models of a tile and of 132 SMs, what it says about SASS, and its records."""

import nbformat
import numpy as np
import pytest
import torch
from lesson_cases import NOTEBOOKS, compute_nothing, defined_in

from hpcattn.bench import records
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.timing import MIN_CALLS
from hpcattn.kernels.hopper.prefill_launch import configuration
from hpcattn.lessons import exercise
from hpcattn.lessons import fp8_prefill_model as model
from hpcattn.lessons import prefill_pipeline as lab
from hpcattn.lessons import prefill_pipeline_figures as pictures
from hpcattn.lessons.prefill_pipeline import Fit

NOTEBOOK = "07a_prefill_pipeline.ipynb"
LOAD = 1000.0  # clocks


# --- The exercise -----------------------------------------------------------------------------------------------------


def computed(q_len, kv_len, block, block_m=128):
    return range(-(-max(0, kv_len - q_len + min(q_len, block_m * (block + 1))) // 128))


def right(q_len, kv_len, block):
    first = kv_len - q_len + 128 * block
    return [t for t in computed(q_len, kv_len, block) if 128 * t + 127 > first]


def test_the_stub_is_not_attempted():
    assert exercise(lab.check_tiles_to_mask, defined_in(NOTEBOOK, "tiles_to_mask")).status == "not attempted"


def test_the_solution_passes():
    solution = defined_in(f"solutions/{NOTEBOOK}", "tiles_to_mask")
    assert exercise(lab.check_tiles_to_mask, solution).passed
    assert exercise(lab.check_tiles_to_mask, lambda *item: set(right(*item))).passed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda *item: list(computed(*item))[-2:], "[30] need no mask"),
        (lambda *item: right(*item)[-1:], "[0] need a mask"),
        (lambda q, kv, b: [t for t in computed(q, kv, b) if 128 * t + 127 >= kv - q + 128 * b], "need no mask"),
        (lambda q, kv, b: [t for t in computed(q, kv, b) if 128 * t + 128 > kv - q + 128 * b + 127], "need a mask"),
        (lambda q, kv, b: right(q, max(q, kv), b), "not computed"),
        (lambda q, kv, b: right(-(-q // 128) * 128, kv + -q % 128, b), "not computed"),  # rows that are not there
        (lambda *item: right(*item) * 2, "named twice"),
        (lambda *item: [float(t) for t in right(*item)], "whole numbers"),
        (lambda *item: len(right(*item)), "whole numbers"),
    ],
)
def test_wrong_answers_fail_with_a_reason(wrong, reason):
    result = exercise(lab.check_tiles_to_mask, wrong)
    assert result.status == "failed" and reason in result.message, result.message


def test_counting_pairs():
    assert lab.tiles_by_counting(600, 1000, 0) == ([0, 1, 2, 3, 4], [3, 4])
    assert lab.tiles_by_counting(128, 256, 0) == ([0, 1], [1])
    assert lab.tiles_by_counting(300, 40, 0) == ([], [])
    for item in lab.exercise_cases():
        seen, masked = lab.tiles_by_counting(*item)
        assert seen == list(computed(*item)) and len(masked) <= 2 and masked == seen[len(seen) - len(masked) :]


def test_cells_are_short():
    for name in (NOTEBOOK, f"solutions/{NOTEBOOK}"):
        for cell in nbformat.read(NOTEBOOKS / name, as_version=4).cells:
            assert cell.cell_type != "code" or len(cell.source.splitlines()) <= 25


# --- A tile's budget, and the loop ------------------------------------------------------------------------------------


def test_the_budget():
    assert 2 * lab.tensor_clocks(128) == lab.TILE_FLOP / lab.TENSOR_FLOP_PER_CLK == 2048
    clocks = {groups: sum(lab.shared_bytes(groups).values()) / lab.SHARED_BYTES_PER_CLK for groups in (1, 2)}
    assert clocks == {1: 1152, 2: 1792} and clocks[1] > 2 * lab.tensor_clocks(64)
    assert lab.accumulators(64) == {"S": 64, "O": 64, "P": 32} and sum(lab.accumulators(128).values()) > 255
    mhz = lab.matrix_clock(Ceilings.load())
    assert lab.TILE_FLOP * lab.SMS * mhz / 2048 * 1e-6 == pytest.approx(Ceilings.load().tflop_bf16)


@pytest.fixture(scope="module")
def loops():
    return {name: lab.loop_of(lab.compiled(name)) for name in ("one", "eager", "lazy")}


@pytest.mark.parametrize("name", ["one", "eager", "lazy"])
def test_the_loop_in_three(loops, name):
    loop = loops[name]
    e, m, a = (loop.section(part) for part in lab.NAMES)
    assert [part.name for part in loop.sections] == list(lab.NAMES)
    assert e.opcodes["HGMMA"] == 16 and e.opcodes["MUFU"] == 64 and e.mufu == 512 and e.opcodes["F2FP"] == 32
    assert m.opcodes["FMNMX"] >= 60 and m.opcodes["SHFL"] == 4 and m.opcodes["MUFU"] == 2
    assert a.opcodes["FFMA"] >= 64 and not a.opcodes["MUFU"]
    assert all(part.opcodes["FSEL"] < 8 for part in loop.sections) and loop.mask > 64, "without the mask"
    assert (loop.rescale >= 64) == lab.CONFIGS[name].lazy and a.opcodes["FMUL"] < 8
    assert (e.opcodes["FMUL"] >= 64) != lab.CONFIGS[name].lazy, "before P V, if it is not lazy"
    assert loop.stream.count("exp") == 64 and loop.stream.count("qk") == loop.stream.count("pv") == 8
    assert "exp" not in loop.stream[loop.stream.index("pv") :], "P V needs all weights"
    assert "qk" in loop.stream[loop.stream.index("exp") :], "Q K^T is strewn among the exponentials"
    assert loop.lines and not any("LDL" in line or "STL" in line for line in loop.lines)


def test_registers_move():
    kernel = lab.compiled()
    assert kernel.registers == 168 and not kernel.spill_store_bytes
    assert {("gives back to", 232), ("asks for", 232), ("gives back to", 40)} <= set(lab.register_moves(kernel))


def test_kinds_of_instructions():
    wgmma = "\t{}HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR4]{}, R24"
    assert lab.opcode_of(wgmma.format("", "")) == "HGMMA" and lab.kind_of(wgmma.format("", "")) == "qk"
    assert lab.kind_of(wgmma.format("@P0 ", ".tnspB")) == "pv"
    assert [lab.kind_of(x) for x in ("\tMUFU.EX2 R4, R4", "\tFADD R1, R2, R3", "LBB0_1:")] == ["exp", "other", ""]


# --- Clocks -----------------------------------------------------------------------------------------------------------


def test_two_warpgroups_keep_the_tensor_core_busy(loops):
    costs = lab.costs_of(loops["lazy"], LOAD)
    assert costs.product == 512 and 512 <= costs.exponentials < 700
    spans = model.simulate(lab.CONFIGS["lazy"], costs)
    assert model.clocks_per_tile(spans) == pytest.approx(2048, rel=0.01)
    stop = max(span.stop for span in spans if span.who == 0) - 6000
    assert lab.busy(spans, 2, stop - 20_000, stop) > 0.99
    assert model.together(spans) < 0.05, "the exponentials do not meet"
    assert lab.serial_clocks(costs) > 1.5 * 2048
    assert 1024 < lab.lone_clocks(loops["one"]) < 2048


def test_the_producer_s_lanes(loops):
    spans = model.simulate(lab.CONFIGS["lazy"], lab.costs_of(loops["lazy"], LOAD), tiles=20)
    tiles = lab.producer_spans(spans, (2, 2), LOAD)
    assert {s.who for s in tiles} == {3, 4} and all(s.stop - s.start == LOAD for s in tiles)
    assert [s.what for s in tiles if s.who == 3][:2] == ["K3", "K4"]
    assert [s.what for s in tiles if s.who == 4][:2] == ["V2", "V3"]
    for who, what in ((3, "exponentials"), (4, "accumulation")):
        assert min(s.start for s in tiles if s.who == who) > min(s.stop for s in spans if s.what == what)


def test_predictions_of_the_ladder():
    """None of the steps but the second warpgroup shortens a product."""
    paces = {name: lab.pace_of(name, LOAD) for name in lab.CONFIGS}
    assert all(paces[name].tile == pytest.approx(2048, rel=0.01) for name in lab.CONFIGS if name != "one")
    assert 1.1 < 2 * paces["one"].tile / paces["lazy"].tile < 1.5
    mhz = 1500.0
    us = lab.predicted_us(paces["lazy"], 2, (512, 32768), mhz, LOAD)
    assert us == pytest.approx((LOAD + paces["lazy"].fixed + 256 * paces["lazy"].tile) / mhz)
    assert lab.predicted_us(paces["one"], 1, (512, 32768), mhz, LOAD) > us
    assert paces["lazy"].at(mhz).us(10) * mhz == pytest.approx(paces["lazy"].fixed + 10 * paces["lazy"].tile)


# --- Lazy rescaling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "growing"])
def test_lazy_rescaling_changes_nothing(kind):
    scores, v = lab.scores_and_values(kind, keys=1000)
    exact = np.exp2(scores - scores.max(1, keepdims=True))
    want = exact @ v / exact.sum(1, keepdims=True)
    eager, lazy = (lab.online(scores, v, bits) for bits in (0, lab.BITS))
    for got in (eager, lazy):
        assert np.allclose(got.o, want, rtol=1e-12, atol=1e-14) and got.steps == 7 * 4
    assert eager.largest == 1 < lazy.largest <= 2**lab.BITS and lazy.rescaled < eager.rescaled
    assert (lazy.rescaled == 0) == (kind == "normal")
    error = np.linalg.norm(lab.online(scores, v, rounded=True).o - want) / np.linalg.norm(want)
    assert 1e-4 < error < 4e-3


def test_what_is_subtracted():
    tiles = [3.0, 5.0, 11.5, 10.0, 30.0]  # maxima, in the order in which tiles are computed
    scores = np.repeat(tiles[::-1], lab.TILE)[None].repeat(16, 0)
    assert lab.subtracted(scores, 0)[:, 0].tolist() == [3, 5, 11.5, 11.5, 30]
    assert lab.subtracted(scores)[:, 0].tolist() == [3, 3, 11.5, 11.5, 30]
    assert lab.online(scores, np.ones((len(scores[0]), 1))).rescaled == 2


# --- Items ------------------------------------------------------------------------------------------------------------


def test_items():
    items = lab.items_of((300, 128), (300, 1000), heads=2)
    assert [(x.request, x.block, x.head, x.tiles) for x in items[:3]] == [(0, 0, 0, 1), (0, 0, 1, 1), (0, 1, 0, 2)]
    assert [x.tiles for x in items] == [1, 1, 2, 2, 3, 3, 8, 8]
    assert [x.tiles for x in lab.longest_first(items)] == [8, 8, 3, 3, 2, 2, 1, 1]
    assert lab.items_of((200,), (100,), 1)[0].tiles == 1, "an item that sees nothing is not free"
    assert len(lab.items_of((300,), (300,), 2, block_m=64)) == 10


def test_rounds_and_counter():
    items = [lab.Item(i, 0, 0, n) for i, n in enumerate((4, 3, 2, 1))]
    spans = lab.in_rounds(items, Fit(0.0, 1.0), sms=2)
    assert [(s.sm, s.start, s.stop, s.row) for s in spans] == [(0, 0, 4, 0), (1, 0, 3, 1), (1, 3, 5, 2), (0, 4, 5, 3)]
    uneven = [lab.Item(i, 0, 0, n) for i, n in enumerate((9, 1, 1, 1))]
    assert lab.makespan(lab.in_rounds(uneven, Fit(0.0, 1.0), sms=2)) == 10
    assert lab.makespan(lab.by_counter(uneven, Fit(0.0, 1.0), sms=2)) == 9
    assert lab.makespan(lab.by_counter(uneven[::-1], Fit(0.0, 1.0), sms=2)) == 10
    assert lab.makespan(lab.by_counter(items, Fit(0.5, 1.0), sms=4)) == 4.5


def test_longest_first_ends_with_the_longest_item():
    items, pace = lab.items_of(lab.RAGGED_Q, lab.RAGGED_KV, lab.HEADS), Fit(1.0, 2.0)
    longest = pace.us(max(x.tiles for x in items))
    first_come, rounds = lab.by_counter(items, pace), lab.in_rounds(lab.longest_first(items), pace)
    best = lab.makespan(lab.by_counter(lab.longest_first(items), pace))
    assert best == longest < lab.makespan(rounds) < lab.makespan(first_come)


def test_the_order_is_the_kernel_s():
    q_lens, kv_lens = (300, 64, 128), (300, 2000, 700)
    blocks = {(x.request, x.block): x.tiles for x in lab.items_of(q_lens, kv_lens, 1)}
    order = lab.kernel_order(q_lens, kv_lens)
    assert sorted(order) == sorted(blocks) and order[0] == (1, 0)
    assert [blocks[unit] for unit in order] == sorted(blocks.values(), reverse=True)


# --- Records ----------------------------------------------------------------------------------------------------------

TINY = {"shapes": ((40, 300),), "configs": ("lazy", "turns_k3"), "batch": ((20, 30), (40, 260)), "heads": (1, 1)}
TINY |= {"replays": 1, "warmup": 0}


class FakeTimer:
    """Runs nothing: the kernel is emulated by the checks only."""

    def capture(self, calls):
        return tuple(calls)

    def elapsed_us(self, launches):
        return [2.0] * len(launches)

    def empty(self):
        return lambda: None

    def clock_mhz(self):
        return 1980.0


def test_record_checks_times_and_appends(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "timer_for", lambda device: FakeTimer())
    path = tmp_path / "lessons.csv"
    lab.record(path, commit="abc", device="cpu", **TINY)
    found, frame = lab.recorded(path), records.load(path)
    assert list(found) == ["lazy_40x300", "turns_k3_40x300", *(f"ragged_{how}" for how in lab.ORDERS)]
    assert set(frame.commit) == {"abc"} and set(frame.suite) == {"prefill"} and set(frame.dtype) == {"bf16"}
    assert set(frame.median_us) == {2.0 / MIN_CALLS} and set(frame.protocol) == {"steady"}
    flops = lab.workload(40, 300, (1, 1)).flops
    assert found["lazy_40x300"].tflop_per_s == pytest.approx(flops / frame.median_us[0] * 1e-6)
    assert (frame.rel_error > 0).all() and (frame.rel_error < 1e-2).all()
    assert lab.by_case(frame).keys() == found.keys()


@pytest.mark.parametrize("name", ["one", "eager", "lazy_k3"])
def test_the_other_configurations(name):
    x = lab.workload(40, 300, heads=(1, 1)).build()
    assert lab.relative_error(lab.prefill_call(x, lab.CONFIGS[name])(), x.reference()[0]) < 4e-3


def test_orders_are_kept_from_call_to_call():
    """The counter is reset by every call, so that the second computes what the first did."""
    x = lab.ragged((150, 20), (150, 400), heads=(1, 1)).build()
    call = lab.ordered_call(x, "arrival")
    first = call().clone()
    out = call()
    assert torch.equal(first, out) and lab.relative_error(out, x.reference()[0]) < 4e-3


def test_orders_of_arrival_and_of_length(monkeypatch):
    """What the kernel finds, which itself is not run."""
    x = lab.ragged((150, 20), (150, 400), heads=(2, 1)).build()
    at = lab.prefill_steps(x)[0][-1].kernel.arg_names.index("order")
    monkeypatch.setattr(lab, "_repeated", lambda step, out, x: tables.append(step.args[at]))
    tables: list[torch.Tensor] = []
    for how in ("longest", "arrival"):
        lab.ordered_call(x, how)
    longest, arrival = (table[:3, :2].tolist() for table in tables)
    assert longest == [[1, 0], [0, 1], [0, 0]] and arrival == [[0, 0], [0, 1], [1, 0]]


def test_everything_is_timed_in_turns(monkeypatch):
    """The real shapes, without computing anything."""
    seen = compute_nothing(monkeypatch, lab, 0.001, "prefill_call", "ordered_call")
    frame = lab.measure_all("cpu", commit="abc")
    assert [len(calls) for _, calls in seen] == [len(lab.CONFIGS)] * len(lab.SHAPES) + [len(lab.ORDERS)]
    assert all(protocol == "steady" and set(calls.values()) == {3} for protocol, calls in seen)
    rows = lab.by_case(frame)
    assert len(rows) == len(frame) == 23 and (frame.rel_error == 0.001).all()
    assert lab.times_of(rows) == {(name, shape): 2.0 for name in lab.CONFIGS for shape in lab.SHAPES}
    assert {f"ragged_{how}" for how in lab.ORDERS} < set(rows)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(lab, "relative_error", lambda got, want: float("nan"))
    monkeypatch.setattr(lab, "measure", lambda *args, **kwargs: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="lazy, 40x300: relative error"):
        lab.measure_all("cpu", **TINY)


@pytest.mark.parametrize(
    ("name", "work"),
    [("one", lab.workload(512, 4096)), ("lazy", lab.workload(4096, 4096)), ("ragged", lab.ragged())],
)
def test_what_is_compiled_ahead_is_what_is_launched(name, work, monkeypatch):
    """Else kernels were compiled again between measurements."""
    found = []

    class Seen(lab.Variant):
        def compile(self):
            found.append((self.signature, self.constexprs, self.options, self.attrs))

    monkeypatch.setattr(lab, "Variant", Seen)
    lab.compiled.__wrapped__(name)
    (*_, step), _ = lab.prefill_steps(work.build(), lab.CONFIGS.get(name))
    Seen.from_launch("", step.kernel, *step.args, **step.options).compile()
    assert repr(found[0]) == repr(found[1])


def test_nothing_recorded_is_no_error(tmp_path):
    assert lab.recorded(tmp_path / "none.csv") == {} and lab.times_of({}) == {}


def test_what_is_measured_holds_what_the_library_chooses():
    for shape in lab.SHAPES:
        blocks = -(-shape[0] // 64) * lab.HEADS
        assert configuration("none", blocks, lab.SMS) == lab.CONFIGS[lab.LIBRARY]
    blocks = (sum(lab.RAGGED_Q) // 64 + len(lab.RAGGED_Q) - 1) * lab.HEADS
    assert configuration("none", blocks, lab.SMS) == lab.CONFIGS[lab.LIBRARY]


def test_the_records_bear_out_the_text():
    us = lab.times_of(lab.recorded())
    if not us:
        pytest.skip("not recorded yet")
    long = {name: us[name, (512, 32768)] for name in lab.CONFIGS}
    assert long["one"] > 1.05 * long["lazy"], "the second warpgroup is worth most"
    assert long["eager"] > long["lazy"], "lazy rescaling helps"
    assert all(us[name, shape] > 0.96 * us["lazy", shape] for name, shape in us), "the library's is among the best"
    turns = {shape: us["turns_k3", shape] / us["lazy", shape] for shape in lab.SHAPES}
    assert turns[512, 4096] < 1 < turns[16384, 16384] < 1.04, "turns gain a little or lose a little"
    for (name, shape), time in us.items():
        tflop_per_s = lab.workload(*shape).flops / time * 1e-6
        assert tflop_per_s < 1.05 * Ceilings.load().tflop_bf16, (name, shape)
    suite = lab.suite_times()
    for shape in suite:
        assert us["lazy", shape] == pytest.approx(suite[shape], rel=0.15), "the benchmark measures the same"
    longest, arrival, library = (float(lab.recorded()[f"ragged_{how}"].median_us) for how in lab.ORDERS)
    assert arrival > 1.2 * longest and library < arrival


# --- Pictures ---------------------------------------------------------------------------------------------------------


def test_pictures(loops):
    budget = [("a", [("x", 100.0), ("a long name", 20.0)]), ("b", [("y", 50.0)])]
    texts = {t.get_text() for t in pictures.draw_budget(budget, [("sum", 170.0)]).axes[0].texts}
    assert {"x", "120", "50", "170"} <= texts and "a long name" not in texts
    spans = model.simulate(lab.CONFIGS["lazy"], model.Costs(), tiles=20)
    figure = pictures.draw_roles([*spans, *lab.producer_spans(spans, (2, 2), LOAD)], 2000, 7000)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()][::4] == ["producer: K", "tensor core"]
    labels = [t.get_text() for t in pictures.draw_loop(loops["lazy"].lines).axes[0].get_yticklabels()]
    assert "HGMMA, Q Kᵀ (8)" in labels and "HGMMA, P V (8)" in labels
    tiles = [t.get_text() for t in pictures.draw_tiles(200, 400).axes[0].texts]
    assert tiles == ["2", "1", "0", "3", "2", "1", "0"]
    scores, _ = lab.scores_and_values("normal", keys=500)
    both = lab.subtracted(scores, 0), lab.subtracted(scores)
    assert len(pictures.draw_maxima({"normal": both, "same": both}).axes) == 2
    predicted = {(name, shape): 600.0 for name in lab.CONFIGS for shape in lab.SHAPES}
    measured = {("lazy", lab.SHAPES[0]): 589.6}
    first, *others = pictures.draw_ladder(predicted, measured, {name: name for name in lab.CONFIGS}, 670.0).axes
    assert [t.get_text() for t in first.texts] == ["590"] and not any(axes.texts for axes in others)
