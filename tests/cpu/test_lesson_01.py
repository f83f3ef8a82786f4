"""Lesson 01: counting requested bytes, the checker of the bytes formula, and the measuring of the benchmark cells."""

from pathlib import Path

import nbformat
import pytest
import torch
import triton.language as tl

from hpcattn.bench import records, timing
from hpcattn.kernels.jit import jit
from hpcattn.lessons import exercise
from hpcattn.lessons.naive import CONTENDERS, check_naive_bytes, count_traffic, measure_lengths, recorded

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def naive_bytes_of(path: str, tag: str):
    """The function `naive_bytes` of the cell with this tag."""
    (cell,) = (c for c in nbformat.read(NOTEBOOKS / path, 4).cells if tag in c.metadata.get("tags", ()))
    names = {}
    exec(cell.source.partition("exercise(")[0], names)
    return names["naive_bytes"]


@pytest.fixture(scope="module")
def solution():
    return naive_bytes_of("solutions/01_naive_attention.ipynb", "solution")


def test_solution_passes(solution):
    check_naive_bytes(solution)
    assert exercise(check_naive_bytes, solution).passed


def test_stub_is_not_attempted_and_would_fail():
    stub = naive_bytes_of("01_naive_attention.ipynb", "exercise")
    assert exercise(check_naive_bytes, stub).status == "not attempted"
    with pytest.raises(AssertionError, match=r"the kernels: +\d+"):
        check_naive_bytes(stub)


WRONG = {
    "K and V once per group": lambda f, Lq, Lkv, Hq, Hkv, D, causal, b: (
        f(Lq, Lkv, Hq, Hkv, D, causal, b) - 4 * (Hq - Hkv) * Lkv * D * -(-Lq // 64)
    ),
    "every tensor read once": lambda f, Lq, Lkv, Hq, Hkv, D, causal, b: (
        Hq * Lq * Lkv * (3 * b + 4) + 4 * Hq * Lq * D + 4 * Hq * Lkv * D + 12 * Hq * Lq
    ),
    "one pass of softmax": lambda f, Lq, Lkv, Hq, Hkv, D, causal, b: (
        f(Lq, Lkv, Hq, Hkv, D, causal, b) - Hq * Lq * Lkv * b
    ),
    "masked scores are free": lambda f, Lq, Lkv, Hq, Hkv, D, causal, b: (
        f(Lq, Lkv, Hq, Hkv, D, causal, b) - causal * Hq * Lq * (Lq - 1) // 2 * (3 * b + 4)
    ),
    "scores always in float32": lambda f, *args: f(*args[:-1], 4),
    "masked lanes are read": lambda f, Lq, Lkv, *rest: f(-(-Lq // 64) * 64, -(-Lkv // 64) * 64, *rest),
    "no log-sum-exp": lambda f, Lq, Lkv, Hq, *rest: f(Lq, Lkv, Hq, *rest) - 4 * Hq * Lq,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_formula_fails_with_a_counterexample(name, solution):
    result = exercise(check_naive_bytes, lambda *shape: WRONG[name](solution, *shape))
    assert result.status == "failed"
    assert "naive_bytes(Lq=" in result.message and "softmax_kernel" in result.message


@jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < n, other=0.0) + tl.load(source)
    tl.store(target + at, x.to(target.dtype.element_ty), mask=at < n)


def test_traffic_counts_unmasked_lanes_of_every_program():
    source, target = torch.ones(10), torch.zeros(10, dtype=torch.bfloat16)
    with count_traffic() as traffic:
        copy_kernel[(3,)](source, target, 10, BLOCK=4)
    copy_kernel[(3,)](source, target, 10, BLOCK=4)  # outside: not counted
    assert (target == 2).all()
    assert traffic.loads == {"copy_kernel": 4 * (10 + 3)} and traffic.stores == {"copy_kernel": 2 * 10}
    assert traffic.total == 72 and "copy_kernel" in repr(traffic.table())


def test_measurements_are_valid_records(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "MIN_CALLS", 1)
    frame = measure_lengths([6], device="cpu", heads=(2, 1, 16), replays=1, commit="-")
    records.append(tmp_path / "lessons.csv", frame.to_dict("records"))
    rows = recorded(tmp_path / "lessons.csv")
    assert set(rows.case) == {f"{name}_6" for name in CONTENDERS}
    assert (rows.rel_error <= 8e-3).all() and (rows.median_us > 0).all() and rows.run_id.nunique() == 1
    assert recorded(tmp_path / "missing.csv").empty
