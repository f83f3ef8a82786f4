"""Lesson 07b: its models, its checker, the transposes in the emulator, what it says about SASS, and its records."""

import re

import numpy as np
import pytest
import torch
from lesson_cases import defined_in

from hpcattn.bench import records, timing
from hpcattn.bench.peers import FlashAttention3, HpcOps
from hpcattn.kernels.hopper.prefill_launch import configuration
from hpcattn.lessons import exercise
from hpcattn.lessons import fp8_prefill as lab
from hpcattn.lessons import fp8_prefill_figures as pictures
from hpcattn.lessons import fp8_prefill_model as model
from hpcattn.quantization import FP8
from hpcattn.reference import PModel, attention_prefill_reference, relative_error

ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


# --- The exercise -----------------------------------------------------------------------------------------------------


def test_the_stub_is_not_attempted():
    assert exercise(lab.check_token_at, defined_in("07b_fp8_prefill.ipynb", "token_at")).status == "not attempted"


def test_the_solution_passes():
    token_at = defined_in("solutions/07b_fp8_prefill.ipynb", "token_at")
    assert exercise(lab.check_token_at, token_at).passed
    assert [token_at(k) for k in range(32)] == ORDER + [16 + t for t in ORDER]


@pytest.mark.parametrize(
    ("token_at", "reason"),
    [
        (lambda k: k, "3072 of 4096 products .*place 2 has the value of token 2, .*byte 2 of lane 0.* token 8"),
        (lambda k: 16 * (k // 16) + ORDER.index(k % 16), "place 2 has the value of token 4"),  # the inverse
        (lambda k: 16 * (k // 16) + 8 * (k % 2) + k % 16 // 2, "place 1 has the value of token 8"),  # lesson 05b's
        (lambda k: 127 - k, "4096 of 4096"),
        (lambda k: ORDER[k % 16], r"token 0 stands at places \[0, 16, "),
        (lambda k: k + 1, "within 0 to 127"),
        (lambda k: k / 1, "must be an int"),
    ],
)
def test_wrong_orders_fail_with_a_reason(token_at, reason):
    result = exercise(lab.check_token_at, token_at)
    assert result.status == "failed" and re.search(reason, result.message), result.message


# --- Rounding and sums ------------------------------------------------------------------------------------------------


def test_truncation():
    acc = np.array([8192.0])
    products = np.zeros((1, 32))
    products[0, :3] = 1.75, -1.75, 0.5
    assert lab.add_products(acc, products, bits=13) == 8192  # a grid of 1: 1 - 1 + 0
    assert lab.add_products(acc, products, bits=14) == 8192.5
    assert lab.add_products(acc, np.abs(products), bits=13) == 8194
    assert lab.add_products(np.array([4.0]), np.abs(products), bits=13) == 8  # nothing is lost


def test_one_accumulator_loses_what_was_recorded():
    recorded = lab.errors_of(lab.recorded().iloc[:0])["flash_attn_3"]
    for keys in lab.ERROR_KEYS:
        assert lab.sum_error(keys, 1.0) == pytest.approx(recorded[1][keys], rel=0.1)
        assert lab.sum_error(keys, 1.0, fresh_every=lab.TILE) < 5e-4
    assert lab.sum_error(4096, 0.0) < 2e-3, "zero-mean data hides it"
    long = lab.sums_of(lab.recorded().iloc[:0])["chained"][1.0]
    assert lab.sum_error(32768, 1.0) == pytest.approx(long[32768], rel=0.15)


def test_rounding_of_weights():
    assert lab.rounding_error(8192, 0.0) == pytest.approx(2**-4 / 3**0.5 * 0.74, rel=0.1)
    assert lab.rounding_error(8192, 1.0) < 3e-3
    with_sink = [lab.rounding_error(8192, 1.0, factor, sink=8) for factor in (1, 16, 256, 1024)]
    assert min(with_sink) == with_sink[2] < 0.1 * min(with_sink[:2] + with_sink[3:])


# --- The transpose ----------------------------------------------------------------------------------------------------


def test_the_block_has_every_byte_where_the_lesson_says():
    block = lab.transposed_block()
    rows, places = np.mgrid[:16, :16]
    assert (block == lab.label(np.array(ORDER)[places], lab.feature_of_row(rows))).all()
    x, y = lab.loaded_matrices()
    for lane in range(32):
        tokens = {int(name) // lab.HEAD_DIM for name in (*x[lane], *y[lane])}
        assert sorted(tokens) == lab.held_columns(lane), "the tokens of which it has scores"


@pytest.mark.parametrize("method", ["bytes", "matrices"])
def test_transposes_in_the_emulator(method):
    v = torch.randint(0, 120, (128, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = lab.transposed(method, v.view(FP8)).view(torch.uint8)
    rows, places = np.arange(128), np.arange(128)
    if method == "matrices":
        rows, places = lab.feature_of_row(rows), 16 * (places // 16) + np.array(ORDER)[places % 16]
    assert torch.equal(got, v.T[rows][:, places])


def test_instructions_of_the_transposes():
    plain, matrices = (lab.compiled_transpose(method) for method in ("bytes", "matrices"))
    assert plain.opcodes["LDS.U8"] == 256 and plain.opcodes["PRMT"] == 192
    families = matrices.families()
    assert (families["LDSM"], families["PRMT"], families["STSM"]) == (16, 64, 16)
    assert not any(opcode.startswith("LDS.U") for opcode in matrices.opcodes) and not families.get("SHFL")
    assert matrices.registers < plain.registers and not plain.spill_store_bytes


# --- The kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", lab.QUANTS)
@pytest.mark.parametrize("name", ["k2v2_turns", "k3v3_turns"])
def test_the_kernel_in_the_emulator(quant, name):
    x = lab.workload(40, 300, quant, heads=(1, 1)).build(v_mean=1.0)
    arguments = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
    want = attention_prefill_reference(*arguments, scales=x.scales, p_model=PModel(128, "descending"))[0]
    assert relative_error(lab.prefill_call(x, lab.CONFIGS[name])(), want) < 1e-2


@pytest.mark.parametrize("quant", lab.QUANTS)
def test_the_loop_in_three(quant):
    kernel = lab.compiled(quant, "k3v2_turns")
    exponentials, maxima, accumulation = model.consumer_loop(kernel)
    assert exponentials.opcodes["MUFU"] == 64 and exponentials.mufu == 512
    assert maxima.opcodes["FMNMX"] >= 60 and maxima.opcodes["SHFL"] == 4 and not exponentials.opcodes["SHFL"]
    assert accumulation.opcodes["FFMA"] == 128
    assert all(section.opcodes["FSEL"] < 8 for section in (exponentials, maxima, accumulation)), "without the mask"
    assert (maxima.opcodes["FMUL"] >= 64) == (maxima.opcodes["LDS"] > 0) == (quant == "type0")
    late, early = (model.scale_reads(lab.compiled(quant, name)) for name in ("k3v2_turns", "k3v2_early_turns"))
    assert late.loads == early.loads == (16 if quant == "type0" else 0)
    assert (not late.early and late.registers <= 8 and early.early and early.registers >= 16) or not late.loads
    families = kernel.families()
    assert families["LDSM"] == families["STSM"] == 16 and kernel.opcodes["LDS.U8"] <= 1
    assert 16 + 64 + 16 < model.transposer_issue(kernel) < 400


def test_the_budget():
    assert sum(model.shared_bytes().values()) / model.SHARED_BYTES_PER_CLK == 1152
    assert sum(model.shared_bytes(type0=True).values()) > sum(model.shared_bytes().values())


# --- Two warpgroups ---------------------------------------------------------------------------------------------------


def clocks(name: str, **costs) -> float:
    return model.clocks_per_tile(model.simulate(lab.CONFIGS[name], model.Costs(**costs)))


def test_turns_keep_exponentials_apart():
    assert clocks("k3v2") > 1.15 * clocks("k3v2_turns") and clocks("k3v2_turns") >= 1024
    for offset in (0, 300, 600):
        spans = model.simulate(lab.CONFIGS["k3v2"], model.Costs(), offset=offset)
        assert model.together(spans) > 0.7, "they fall into step from wherever they start"
        assert model.together(model.simulate(lab.CONFIGS["k3v2_turns"], model.Costs(), offset=offset)) < 0.6


def test_two_slots_are_few_for_turns():
    slow = {"load": 1300.0}
    assert clocks("k2v2_turns", **slow) > 1.1 * clocks("k3v2_turns", **slow)
    assert clocks("k2v2", **slow) == pytest.approx(clocks("k3v2", **slow), rel=0.05)


def test_turns_do_not_pay_if_the_rest_is_long():
    assert clocks("k3v2_turns", latency=1000.0) > 1.1 * clocks("k3v2", latency=1000.0)


def test_a_simulation_is_consistent():
    spans = model.simulate(lab.CONFIGS["k3v2_turns"], model.Costs(jitter=0.0), tiles=20)
    for who in range(3):
        mine = sorted((s.start, s.stop) for s in spans if s.who == who)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:], strict=False)), "one thing at a time"
    assert sum(s.who == 2 for s in spans) == 80  # two products for each of 20 tiles and two warpgroups
    assert len([s for s in spans if s.what == "exponentials"]) == 40


# --- Records and pictures ---------------------------------------------------------------------------------------------

SMALL = {"device": "cpu", "shapes": ((40, 130),), "configs": ("k3v2", "k3v2_turns"), "error_queries": 30}
SMALL |= {"error_keys": (128,), "heads": (1, 1), "sum_programs": 1, "replays": 1, "warmup": 0}


def test_record_checks_times_and_appends(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MIN_CALLS", 1)
    path = tmp_path / "lessons.csv"
    lab.record(path, commit="abc", quants=("type1",), **SMALL)
    frame = records.load(path)
    assert set(frame.commit) == {"abc"} and frame.case.str.startswith(lab.PREFIX).all()
    rows = lab.recorded(path)
    assert len(rows) == 10 and (rows.rel_error < 5e-2).all()
    times = lab.times_of(rows)
    assert set(times) == {("type1", "40x130")} and set(times["type1", "40x130"]) == {"k3v2", "k3v2_turns"}
    for suite in ("prefill", "decode"):
        ours = lab.errors_of(rows, suite)["hopper"]
        assert set(ours) == {0.0, 1.0} and set(ours[0.0]) == {128}
    assert lab.sums_of(rows)["fresh"][1.0][128] < 1e-6
    assert set(rows[rows.suite == "decode"].num_query_tokens) == {1}


def test_the_peers_that_are_compared(monkeypatch):
    monkeypatch.setattr(lab, "is_cuda", lambda device: True)
    for kind in {type(adapter) for adapter in lab.ADAPTERS}:
        monkeypatch.setattr(kind, "available", lambda self: (True, "1"))
    names = {
        work.suite: [(a.name, a.schedule) for a in lab.adapters_for(work, "cuda")]
        for work in (lab.workload(512, 4096), lab.decode_workload(4096))
    }
    assert names["prefill"] == [("hopper", "-"), ("hpc_ops", "-"), ("flash_attn_3", "-")]
    assert names["decode"] == [("hopper", "dynamic"), ("hpc_ops", "dynamic"), ("flash_attn_3", "-")]


def test_a_failing_peer_is_recorded_and_a_failing_kernel_of_ours_raises(monkeypatch):
    x = lab.workload(30, 60, heads=(4, 1)).build()
    want = x.reference()[0]
    broken = lambda self, inputs: lambda: torch.zeros(())[1]  # noqa: E731
    for peer in (HpcOps(), FlashAttention3()):
        monkeypatch.setattr(type(peer), "prepare", broken)
        assert lab._error_of(peer, x, want, "case") == float("inf")
    monkeypatch.setattr(lab.Ours, "prepare", lambda self, inputs: lambda: torch.full_like(inputs.q.float(), 1e6))
    with pytest.raises(AssertionError, match="case: relative error"):
        lab._error_of(lab.Ours("hopper"), x, want, "case")


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(lab, "relative_error", lambda got, want: float("nan"))
    monkeypatch.setattr(lab, "measure", lambda *args, **kwargs: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="relative error"):
        list(lab._times(lab.workload(20, 40, heads=(1, 1)), {"k3v2": lab.CONFIGS["k3v2"]}, "cpu", 1, 0))


def test_nothing_recorded_is_no_error(tmp_path):
    rows = lab.recorded(tmp_path / "none.csv")
    assert rows.empty and lab.times_of(rows) == {}
    assert "hopper" not in lab.errors_of(rows) and lab.errors_of(rows, "decode") == {}


def test_what_is_measured_holds_what_the_library_chooses():
    assert configuration("type1", 256, 132) == lab.CONFIGS["k3v2_turns"]
    assert configuration("type0", 256, 132) == lab.CONFIGS["k3v2_early_turns"]


def test_the_records_bear_out_the_text():
    rows = lab.recorded()
    us = lab.times_of(rows).get(("type1", "512x32768"))
    if us is None:
        pytest.skip("not recorded yet")
    assert us["k3v2_turns"] < us["k3v2"] and us["k3v2_turns"] < us["k2v2_turns"]
    us = lab.times_of(rows)["type0", "512x32768"]
    assert us["k3v2_early_turns"] < us["k3v2_early"] < us["k3v2"] < us["k3v2_turns"]
    ours, hpc = (lab.errors_of(rows)[name] for name in ("hopper", "hpc_ops"))
    for mean in lab.MEANS:
        for keys in lab.ERROR_KEYS:
            assert ours[mean][keys] <= max(1.2 * hpc[mean][keys], 3e-3)


def test_pictures():
    texts = {text.get_text() for text in pictures.draw_transpose(lane=5).axes[2].texts}
    assert {"even", "odd", "t 2\nd 2", "t 11\nd 3"} <= texts
    errors = {1.0: {4096: 0.1, 8192: 0.2}}
    assert len(pictures.draw_errors([("a", "#000000", "-", errors), ("b", "#000000", "o", {})]).axes) == 2
    spans = model.simulate(lab.CONFIGS["k3v2_turns"], model.Costs(), tiles=20)
    assert [axes.get_title("left") for axes in pictures.draw_turns([("one", spans), ("two", spans)]).axes] == [
        "one",
        "two",
    ]
    assert "30" in {t.get_text() for t in pictures.draw_budget([("a", [("x", 10.0), ("y", 20.0)])]).axes[0].texts}
    assert pictures.draw_latency([0, 1], {"no turns": [1, 2], "turns": [1, 3]}, 300.0).axes[0].get_legend()
    figure = pictures.draw_times({("type1", "1x2"): {"k3v2": 2.0, "k3v2_turns": 1.0}}, {"k3v2": "a", "k3v2_turns": "b"})
    assert {" 2.0", " 1.0"} <= {text.get_text() for text in figure.axes[0].texts}
