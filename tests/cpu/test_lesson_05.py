"""Lesson 05: both kernels are right under hostile schedules, and say in SASS and in the records what the text says."""

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch
from lesson_cases import defined_in

from hpcattn.bench import records, timing
from hpcattn.bench.ceilings import Ceilings
from hpcattn.emulator import EmulatorError
from hpcattn.lessons import exercise, small_m, small_m_kernels
from hpcattn.lessons.small_m import Decode, check_place, ctas_per_sm, loop_opcodes, place_of, tile_budget, workload
from hpcattn.reference import relative_error

KINDS = ("padded", "swapped")


# --- The exercise -----------------------------------------------------------------------------------------------------


def one_product_only(thread, register, n):
    return place_of(thread, register % (n // 2), n)


def forgets_the_warp(thread, register, n):
    return place_of(thread % 32, register, n, 128)


def rows_before_columns(thread, register, n):
    within = register % 4
    return place_of(thread, register - within + within // 2 + 2 * (within % 2), n, 128)


def transposed(thread, register, n):
    return place_of(thread, register, n, 128)[::-1]


def not_a_pair(thread, register, n):
    return sum(place_of(thread, register, n, 128))


def test_the_stub_is_not_attempted():
    assert exercise(check_place, defined_in("05_small_m_wgmma.ipynb", "place")).status == "not attempted"


def test_the_solution_passes():
    assert exercise(check_place, defined_in("solutions/05_small_m_wgmma.ipynb", "place")).passed


@pytest.mark.parametrize("mutant", [one_product_only, forgets_the_warp, rows_before_columns, transposed, not_a_pair])
def test_wrong_places_fail_with_a_reason(mutant):
    result = exercise(check_place, mutant)
    assert result.status == "failed"
    assert "holds" in result.message or "must return" in result.message


@pytest.mark.parametrize("n", [8, 16, 32, 64])
@pytest.mark.parametrize("height", [64, 128])
def test_the_compiler_agrees_with_the_checker(n, height):
    small_m.prove_layout(n, height)
    places = {place_of(t, r, n, height) for t in range(128) for r in range(n * height // 128)}
    assert places == {(row, column) for row in range(height) for column in range(n)}


def test_the_compiler_refuses_a_wrong_layout(monkeypatch):
    monkeypatch.setattr(small_m, "WARPS", small_m.WARPS[::-1])
    with pytest.raises(Exception, match="static_assert"):
        small_m.prove_layout(8)


# --- The kernels ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ragged():
    return workload((130, 1, 0)).build()


@pytest.fixture(scope="module")
def compiled():
    x = workload((64,)).build()
    return {
        "padded": Decode("padded", x).compiled(),
        "swapped": Decode("swapped", x).compiled(),
        "sum in the loop": Decode("swapped", x, defer_sum=False).compiled(),
        "wide": Decode("swapped", x, columns=64).compiled(),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_right_under_every_kind_of_schedule(kind, ragged):
    want_o, want_lse = ragged.reference()
    for splits, seed in ((1, 0), (1, 1), (2, 2), (2, 3)):
        call = Decode(kind, ragged, splits)
        call.attend(seed)
        o, lse = call.merge()
        assert relative_error(o, want_o) < small_m.BF16_BOUND
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_several_query_tokens_on_several_heads(kind):
    x = workload((70, 2), 24, num_query_tokens=3, heads=2).build(v_mean=1.0)
    assert Decode(kind, x).error() < small_m.BF16_BOUND


def test_more_columns_than_rows_and_a_sum_in_the_loop(ragged):
    assert Decode("swapped", ragged, columns=16, defer_sum=False).error() < small_m.BF16_BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_a_resident_ring_sees_its_pages_again_and_again(kind):
    assert Decode(kind, small_m.repeated(1, 5, 2), stages=2, resident=True).error() < small_m.BF16_BOUND
    assert Decode(kind, small_m.repeated(1, 5, 3), stages=2, resident=True).error() > 0.1  # a third page, never seen


def altered(tmp_path, old, new):
    """The kernels with one piece of their text replaced."""
    source = inspect.getsource(small_m_kernels)
    assert source.count(old) == 1, old
    path = tmp_path / "altered_kernels.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("altered_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (self.steps > 0) & (inside < TILE):", "if inside < -TILE:"),  # NaN past the end gets through
        ("(i // STAGES) & 1, pred", "((i // STAGES) & 1) ^ 1, pred"),  # the phase before the one that is wanted
        ("ring.load(gl.to_tensor(i))", "ring.load(gl.to_tensor(i + 1))"),  # the first tile is never sent for
    ],
)
def test_mistakes_in_the_ring_are_caught(old, new, tmp_path, monkeypatch, ragged):
    monkeypatch.setattr(small_m, "swapped_kernel", altered(tmp_path, old, new).swapped_kernel)
    want, caught = ragged.reference()[0], 0
    for seed in range(4):
        call = Decode("swapped", ragged)
        try:
            call.attend(seed)
            caught += not relative_error(call.merge()[0], want) < small_m.BF16_BOUND
        except EmulatorError:
            caught += 1
    assert caught


def test_columns_must_be_a_power_of_two():
    with pytest.raises(Exception, match=r"(?s)power|N = 24|got 24"):
        Decode("swapped", workload((64,), 24).build(), columns=24).compiled()


# --- Counts -----------------------------------------------------------------------------------------------------------


def count(opcodes, *stems):
    return sum(n for opcode, n in opcodes.items() if opcode.split(".")[0] in stems)


def test_sass_says_what_the_text_says(compiled):
    loops = {name: loop_opcodes(kernel) for name, kernel in compiled.items()}
    padded, swapped, eager = loops["padded"], loops["swapped"], loops["sum in the loop"]
    hgmma = {o: n for o, n in padded.items() if o.startswith("HGMMA")}
    assert hgmma == {"HGMMA.64x64x16.F32.BF16": 8, "HGMMA.64x128x16.F32.BF16": 4}
    assert {o: n for o, n in swapped.items() if o.startswith("HGMMA")} == {"HGMMA.64x8x16.F32.BF16": 16}
    memory = ("STS", "STSM", "LDS", "LDSM", "STG")
    assert count(padded, *memory) == 0
    # swapped: P and the maximum are stored, the maximum is read again; V is left alone
    assert (count(swapped, "STS", "STSM"), count(swapped, "LDS", "LDSM"), count(swapped, "STG")) == (2, 1, 0)
    for stem in ("SHFL", "BAR"):
        assert count(padded, stem) < count(swapped, stem) < count(eager, stem)
    assert count(swapped, "UTMALDG") == count(padded, "UTMALDG") == 2
    for name, operand in (("padded", "tnspB"), ("swapped", "tnspA")):
        assert compiled[name].sass.count(operand) == (4 if name == "padded" else 8)
    assert all(kernel.spill_store_bytes == 0 for kernel in compiled.values())


def test_occupancy_counts_each_resource():
    kernel = SimpleNamespace(registers=126, num_warps=4, shared_bytes=114744)
    assert ctas_per_sm(kernel) == {"registers": 4, "shared memory": 2, "warps": 16, "CTAs": 32}
    kernel = SimpleNamespace(registers=33, num_warps=8, shared_bytes=0)
    assert ctas_per_sm(kernel) == {"registers": 65536 // (40 * 32 * 8), "shared memory": 228, "warps": 8, "CTAs": 32}


def test_a_kernel_without_a_loop_has_no_loop():
    with pytest.raises(ValueError, match="no loop"):
        loop_opcodes(SimpleNamespace(name="x", sass="\tHGMMA.64x8x16 R0;\n\tEXIT;"))


def test_the_budget_adds_up():
    ceilings = Ceilings.load()
    padded, swapped = tile_budget("padded", 64, "bf16", ceilings), tile_budget("swapped", 8, "bf16", ceilings)
    assert (padded["tensor cores"], swapped["tensor cores"], padded["exponential"]) == (512, 64, 256)
    tile = 64 * 128 * 2 / 128  # clocks to move K or V once
    assert padded["shared memory"] == 2 * tile + 3 * tile
    assert swapped["shared memory"] == 2 * tile + 2 * tile + tile / 8 + 3 * tile / 16
    resident = tile_budget("swapped", 8, "bf16", ceilings, resident=True)
    assert resident["DRAM"] == 0 and resident["shared memory"] == swapped["shared memory"] - 2 * tile


# --- Measurements -----------------------------------------------------------------------------------------------------


def test_record_checks_times_and_appends(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MIN_CALLS", 1)
    path = tmp_path / "lessons.csv"
    options = {"rows": (8,), "columns": (), "tiles": 2, "num_sms": 1, "replays": 1, "warmup": 0}
    small_m.record(path, commit="abc", device="cpu", cases={"tiny": (3,)}, **options)
    names = {f"{k}_{what}" for k in KINDS for what in ("tiny", "tiny_unmerged", "rows_8")}
    names |= {f"{k}_resident_{n}" for k in ("padded", "swapped_n8") for n in (1, 2)}
    frame = records.load(path)
    assert set(small_m.recorded(path)) == names and len(frame) == len(names)
    assert set(frame.commit) == {"abc"} and (frame.median_us > 0).all() and (frame.rel_error < 4e-3).all()


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(small_m, "relative_error", lambda got, want: float("nan"))
    monkeypatch.setattr(small_m, "measure", lambda *args, **kwargs: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="relative error"):
        small_m.measure_all("cpu", cases={"tiny": (3,)}, rows=(8,), columns=(), tiles=2, num_sms=1)


def test_nothing_recorded_is_no_error(tmp_path):
    assert small_m.recorded(tmp_path / "none.csv") == {}


def test_the_records_bear_out_the_verdicts():
    us = {name: row.median_us for name, row in small_m.recorded().items()}
    clocks = {n: row.median_us * row.sm_clock_mhz / 384 for n, row in small_m.recorded().items() if "resident" in n}
    dram = tile_budget("padded", 64, "bf16", Ceilings.load())["DRAM"]
    assert all(row.rel_error < small_m.BF16_BOUND for row in small_m.recorded().values())
    for case in small_m.CASES:
        assert 1 < us[f"padded_{case}_unmerged"] / us[f"swapped_{case}_unmerged"] < 1.1
        assert us[f"swapped_n64_{case}_unmerged"] > 1.15 * us[f"swapped_n32_{case}_unmerged"]
    for rows in (8, 16, 24):
        assert us[f"swapped_rows_{rows}"] < us[f"padded_rows_{rows}"]
    for rows in (32, 40, 64):
        assert us[f"swapped_rows_{rows}"] > us[f"padded_rows_{rows}"]
    for rows in (40, 64):
        assert us[f"swapped_2_stages_rows_{rows}"] == pytest.approx(us[f"padded_rows_{rows}"], rel=0.02)
    alone = {n.removesuffix("_resident_1"): x for n, x in clocks.items() if n.endswith("_1")}
    assert alone.pop("swapped_n64") > dram > max(alone.values())
    assert max(x / 2 for n, x in clocks.items() if n.endswith("_2")) < dram
    assert 0.6 < alone["swapped_n8"] / alone["padded"] < 0.75  # a third, not seven eighths
