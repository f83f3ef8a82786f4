"""Lesson 05b: its checker, its kernel in the emulator, what it says about SASS and banks, and its records."""

import itertools
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from hpcattn.bench import records
from hpcattn.bench.timing import Timing
from hpcattn.lessons import exercise
from hpcattn.lessons import fp8_operands as fp8
from hpcattn.lessons import fp8_operands_figures as pictures
from hpcattn.lessons.fp8_operands import HEAD_DIM, LANE, TILE

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NEIGHBOURS = {"even": 0x6240, "odd": 0x7351, "neighbours": True}


def selectors_in(notebook: str):
    """The function `selectors` as the notebook defines it."""
    cells = nbformat.read(NOTEBOOKS / notebook, as_version=4).cells
    (source,) = (c.source for c in cells if c.cell_type == "code" and "def selectors(" in c.source)
    names = {}
    exec(re.match(r"def selectors.*?(?=\n\n\n)", source, re.DOTALL)[0], names)
    return names["selectors"]


# --- The exercise ---------------------------------------------------------------------------------------------------


def test_the_stub_is_not_attempted():
    assert exercise(fp8.check_selectors, selectors_in("05b_fp8_operands.ipynb")).status == "not attempted"


def test_the_solution_passes():
    assert exercise(fp8.check_selectors, selectors_in("solutions/05b_fp8_operands.ipynb")).passed


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((0x6420, 0x7531), "4096 of 8192 bytes are in the wrong place"),  # the lesson's own order
        ((0x0426, 0x1537), r"must hold \(token 0, d 0\)\nbut holds \(token 9, d 0\)"),  # backwards
        ((0x7351, 0x6240), r"must hold \(token 0, d 0\)\nbut holds \(token 0, d 1\)"),  # exchanged
        ((0x6240, 0x7531), r"the odd-d register of lane 0, warp 0 .*\nmust hold \(token 8, d 1\)"),
        ((0x2604, 0x3715), "8192 of 8192"),  # y before x
        ((0x6240, 0xF351), "four digits"),
        ((0x6240, 0x17351), "four digits"),
        ((0x6240,), "two selectors"),
        (("0x6240", "0x7351"), "must be an int"),
    ],
)
def test_wrong_selectors_fail_with_a_reason(answer, reason):
    result = exercise(fp8.check_selectors, lambda: answer)
    assert result.status == "failed" and re.search(reason, result.message), result.message


def test_only_one_pair_of_selectors_is_right():
    """Of all that pick four different bytes, one selector gives the even rows their bytes."""
    row, k = np.mgrid[:16, :16]
    want = HEAD_DIM * fp8.token_of_k(k, neighbours=True) + fp8.d_of_row(row)
    x, y = (fp8.ldmatrix_trans(fp8.shared_tile(), fp8.matrix_addresses(8 * j, 0)) for j in (0, 1))
    wanted = want[LANE // 4][np.arange(32)[:, None], 4 * (LANE % 4)[:, None] + np.arange(4)]
    digits = itertools.permutations(range(8), 4)
    choices = [sum(digit << 4 * i for i, digit in enumerate(four)) for four in digits]
    assert [s for s in choices if (fp8.prmt(x, y, s) == wanted).all()] == [0x6240]


def test_the_checker_looks_at_the_compiled_loop(monkeypatch):
    monkeypatch.setattr(fp8, "compiled", lambda *_, real=fp8.compiled, **__: real("bytes"))
    result = exercise(fp8.check_selectors, lambda: (0x6240, 0x7351))
    assert result.status == "failed" and "must have no LDS, but it has 64" in result.message


# --- The way of a byte ----------------------------------------------------------------------------------------------


def test_the_operand_has_every_byte_once_and_where_the_lesson_says():
    row, k = np.mgrid[:HEAD_DIM, :TILE]
    for even, odd, neighbours in ((0x6420, 0x7531, False), (0x6240, 0x7351, True)):
        operand = fp8.operand(even, odd)
        assert (operand == HEAD_DIM * fp8.token_of_k(k, neighbours) + fp8.d_of_row(row)).all()
        assert sorted(operand.flat) == list(range(TILE * HEAD_DIM))


def test_prmt_reads_digits_from_the_right():
    x, y = np.array([10, 11, 12, 13]), np.array([20, 21, 22, 23])
    assert fp8.prmt(x, y, 0x7410).tolist() == [10, 11, 20, 23]


def test_wavefronts():
    assert fp8.wavefronts(4 * LANE, 4) == 1
    assert fp8.wavefronts(0 * LANE, 4) == 1  # one word for all
    assert fp8.wavefronts(128 * LANE, 4) == 32
    assert fp8.wavefronts(8 * LANE, 4) == 2
    g, t = LANE // 4, LANE % 4
    assert fp8.wavefronts(HEAD_DIM * 4 * t + g) == 4
    assert fp8.wavefronts(fp8.swizzled(4 * t, g)) == 2
    assert fp8.wavefronts(fp8.matrix_addresses(24, 112)[:, None], 16) == 1


@pytest.mark.parametrize(("method", "per_tile"), [("bytes", {"LDS": 512}), ("pairs", {"LDSM": 64})])
def test_wavefronts_of_the_emulated_kernel(method, per_tile):
    v, p = fp8.inputs(method, 3 * TILE, "cpu")
    counted = fp8.count_wavefronts(lambda: fp8.weigh(v, p, 3, method=method))
    assert counted == {name: 3 * n for name, n in per_tile.items()}


# --- The kernel -----------------------------------------------------------------------------------------------------

METHODS = [("in place", {}), ("bytes", {}), ("pairs", {}), ("pairs", NEIGHBOURS)]
IDS = ["in place", "bytes", "pairs", "neighbours"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("method", "order"), METHODS, ids=IDS)
def test_the_kernel_weighs_tiles_from_memory(method, order, seed):
    num_tiles = (1, 2, 4, 9)[seed]  # shorter than the ring, as long, longer
    v, p = fp8.inputs(method, 2 * num_tiles * TILE, "cpu", mean=seed % 2)
    assert fp8.error_of(v, p, num_tiles, method=method, schedule_seed=seed, **order) < 1e-6


@pytest.mark.parametrize(("method", "order"), METHODS, ids=IDS)
def test_the_kernel_weighs_resident_tiles(method, order):
    v, p = fp8.inputs(method, 2 * 4 * TILE, "cpu")
    assert fp8.error_of(v, p, 8, schedule_seed=3, method=method, resident=True, **order) < 1e-6


@pytest.mark.parametrize("method", ["in place", "bytes", "pairs"])
def test_the_kernel_with_one_accumulator(method):
    v, p = fp8.inputs(method, 5 * TILE, "cpu", mean=1.0)
    assert fp8.error_of(v, p, 5, schedule_seed=2, method=method, fresh=False) < 1e-6


@pytest.mark.parametrize("wrong", [{"even": 0x6240}, {"odd": 0x6420}, {"neighbours": True}])
def test_a_wrong_order_gives_a_wrong_result(wrong):
    v, p = fp8.inputs("pairs", 2 * TILE, "cpu")
    assert fp8.error_of(v, p, 2, method="pairs", **wrong) > 0.1


# --- What the compiler makes of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("method", "order", "expected"),
    [
        ("in place", {}, {"LDS": 0, "LDSM": 0, "PRMT": 0, "HGMMA": 8}),
        ("bytes", {}, {"LDS": 64, "LDSM": 0, "PRMT": 48, "QGMMA": 4}),
        ("pairs", {}, {"LDS": 0, "LDSM": 4, "PRMT": 16, "QGMMA": 4}),
        ("pairs", NEIGHBOURS, {"LDS": 0, "LDSM": 4, "PRMT": 16, "QGMMA": 4}),
    ],
    ids=IDS,
)
def test_instructions_of_the_loop(method, order, expected, resident):
    kernel = fp8.compiled(method, resident=resident, **order)
    opcodes = fp8.loop_opcodes(kernel)
    assert {name: opcodes[name] for name in expected} == expected
    assert not opcodes["STS"] and not opcodes["STG"]  # the loop and nothing else
    assert kernel.spill_store_bytes == kernel.stack_bytes == 0
    # as many CTAs as are timed fit on an SM
    assert fp8.CTAS_PER_SM * (kernel.shared_bytes + 1024) <= 228 * 1024
    assert fp8.CTAS_PER_SM * 128 * kernel.registers <= 65536


def test_bytes_are_loaded_one_by_one():
    assert {line.split()[0] for line in fp8.loop_of(fp8.compiled("bytes")) if "LDS" in line} == {"LDS.U8"}


def test_relabelling_adds_no_instruction_outside_the_loop():
    plain, pairs = fp8.compiled("bytes").opcodes, fp8.compiled("pairs").opcodes
    for family in ("STS", "STG", "SHFL", "MOVM"):
        assert [sum(n for o, n in x.items() if o.startswith(family)) for x in (plain, pairs)] in (
            [4, 4],
            [8, 8],
            [0, 0],
        )


def test_neighbours_are_stored_together():
    plain, neighbours = (fp8.compiled("pairs", **order).opcodes for order in ({}, NEIGHBOURS))
    assert plain["STS.U8"] == 4 and not plain["STS.U16"]
    assert neighbours["STS.U16"] == 2 and not neighbours["STS.U8"]
    assert plain["PRMT"] == 16 and neighbours["PRMT"] == 18


def test_only_the_bf16_product_has_flags_that_turn_an_operand():
    endings = {
        method: re.search(r"wgmma\.mma_async[^;]*?((?:, \d)*);", fp8.compiled(method).ptx)[1]
        for method in ("in place", "pairs")
    }
    assert endings["in place"].endswith(", 1, 1, 1, 0") and endings["pairs"].endswith(", 1, 1")
    assert endings["in place"].count(",") == endings["pairs"].count(",") + 2


# --- Records and pictures -------------------------------------------------------------------------------------------

SMALL = {"device": "cpu", "programs": 1, "num_tiles": {"resident": 4, "ring": 5}, "long_sum": 128}


def once(protocol, calls, timer, replays):
    assert protocol == "steady"
    for call in itertools.chain.from_iterable(calls.values()):
        call()
    return {name: Timing((8.0, 10.0, 12.0), 1.0, 1980.0) for name in calls}


def test_measurements_become_records(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8, "measure", once)
    path = tmp_path / "lessons.csv"
    fp8.record(path, commit="0123456", **SMALL)
    assert set(records.load(path).commit) == {"0123456"}
    rows = fp8.recorded(path)
    times = {f"{kind}_{key}" for kind in ("resident", "ring") for key in fp8.METHODS}
    assert set(rows.index) == times | {f"{name}_mean{mean}" for name in ("fresh", "chained") for mean in (0, 1)}
    assert (rows.rel_error < 1e-6).all()
    assert (rows.median_us[list(times)] == 10).all() and rows.median_us.isna().sum() == 4
    nbytes = 5 * TILE * HEAD_DIM
    assert rows.tb_per_s["ring_pairs"] == pytest.approx(nbytes / 10 * 1e-6)
    assert rows.tb_per_s["ring_in_place"] == pytest.approx(2 * nbytes / 10 * 1e-6)
    assert dict(rows.dtype.groupby(rows.dtype).size()) == {"bf16": 2, "fp8": 8}


def test_nothing_recorded_is_no_error(tmp_path):
    assert fp8.recorded(tmp_path / "none.csv").empty


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda o: o * float("nan")])
def test_a_wrong_kernel_is_not_timed(monkeypatch, wrong):
    monkeypatch.setattr(fp8, "measure", once)
    monkeypatch.setattr(fp8, "weigh", lambda *args, real=fp8.weigh, **kwargs: wrong(real(*args, **kwargs)))
    with pytest.raises(AssertionError, match="resident, in place: relative error"):
        fp8.measure_operands(**SMALL)


def test_pictures():
    g, t = LANE // 4, LANE % 4
    figure = pictures.draw_banks([("bytes", fp8.swizzled(4 * t, g), 1), ("matrix", fp8.matrix_addresses(0, 0), 16)])
    assert [axes.get_title("left") for axes in figure.axes] == ["bytes:\n2 wavefronts", "matrix:\n1 wavefront"]
    texts = {text.get_text() for text in pictures.draw_fragment(lane=13).axes[2].texts}
    assert {"token 2\nd 6", "token 3\nd 6", "token 10\nd 6", "token 11\nd 6", "token 10\nd 7"} <= texts
    figure = pictures.draw_clocks([("a", 64, None, 500.0)], {"a": 504})
    assert "not recorded yet" in {text.get_text() for text in figure.axes[0].texts}
