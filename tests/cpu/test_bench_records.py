import math
from dataclasses import asdict, fields, replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcattn.bench.records import KEY, Record, append, compare, geomean, latest, load, schema, validate

RECORD = Record(
    suite="decode",
    case="uniform_512",
    dtype="bf16",
    quant="-",
    layout="NHD",
    num_query_tokens=1,
    page_size=64,
    schedule="dynamic",
    implementation="hpc_ops",
    protocol="steady",
    median_us=11.58,
    gpu="NVIDIA H200",
    driver="580.159",
    torch="2.11.0",
    triton="3.9.0",
    run_id="r1",
    date="2026-11-30",
)


def frame_of(*records: Record) -> pd.DataFrame:
    return pd.DataFrame([asdict(r) for r in records])


def test_columns_are_those_of_the_data_dictionary():
    assert [f.name for f in fields(Record)] == list(schema("records").index)
    types = {"str": "str", "int": "int", "float": "float"}
    assert {f.name: f.type for f in fields(Record)} == {n: types[t] for n, t in schema("records").type.items()}


def test_round_trip(tmp_path):
    path = tmp_path / "sub" / "decode.csv"
    append(path, [RECORD])
    append(path, [replace(RECORD, implementation="hopper", median_us=7.5, rel_error=1.5e-3)])
    frame = load(path)
    assert frame.median_us.tolist() == [11.58, 7.5]
    assert math.isnan(frame.rel_error[0]) and frame.rel_error[1] == 1.5e-3
    assert frame.quant.tolist() == ["-", "-"]
    assert Record(**frame.iloc[1].to_dict()).implementation == "hopper"
    assert load(tmp_path / "absent.csv").columns.tolist() == frame.columns.tolist()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("suite", "training"),
        ("protocol", "fast"),
        ("gpu", ""),
        ("median_us", -1.0),
        ("median_us", "quick"),
        ("page_size", None),
    ],
)
def test_bad_rows_are_refused(tmp_path, column, value):
    row = {**asdict(RECORD), column: value}
    with pytest.raises(ValueError, match=f"records.{column}"):
        append(tmp_path / "x.csv", [row])
    assert not (tmp_path / "x.csv").exists()


def test_wrong_columns_and_tables_are_refused():
    with pytest.raises(ValueError, match="columns must be"):
        validate(frame_of(RECORD).drop(columns="gpu"))
    with pytest.raises(ValueError, match="table must be one of"):
        schema("nothing")


def test_latest_keeps_the_newest_per_key():
    new = replace(RECORD, median_us=10.0, date="2026-12-01", run_id="r2")
    other = replace(RECORD, layout="HND")
    kept = latest(frame_of(new, RECORD, other))
    assert len(kept) == 2 and not kept.duplicated(KEY).any()
    assert kept[kept.layout == "NHD"].median_us.item() == 10.0


def test_compare_stays_within_one_run_and_one_workload():
    ours = replace(RECORD, implementation="hopper", median_us=5.79)
    static = replace(RECORD, schedule="static", median_us=23.16)
    elsewhere = replace(RECORD, implementation="hopper", case="uniform_4096", run_id="r2", median_us=1.0)
    frame = frame_of(RECORD, static, ours, elsewhere)
    assert compare(frame, "hpc_ops", "hopper").ratio.tolist() == pytest.approx([2.0])
    assert compare(frame, "hpc_ops/static", "hopper").ratio.tolist() == pytest.approx([4.0])
    assert compare(frame, "flashinfer", "hopper").empty
    contiguous = replace(RECORD, implementation="torch_sdpa_cudnn", page_size=0, schedule="-")
    frame = frame_of(contiguous, ours)
    assert compare(frame, "torch_sdpa_cudnn", "hopper").empty
    assert compare(frame, "torch_sdpa_cudnn", "hopper", ignore=("page_size",)).ratio.tolist() == pytest.approx([2.0])


positive = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=30)


@given(positive, st.floats(1e-3, 1e3))
def test_geomean_scales_and_lies_between_the_extremes(values, factor):
    mean = geomean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert geomean([factor * v for v in values]) == pytest.approx(factor * mean)
    assert geomean([1 / v for v in values]) == pytest.approx(1 / mean)


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)), min_size=1, max_size=9))
def test_geomean_of_ratios_is_the_ratio_of_geomeans(pairs):
    a, b = zip(*pairs, strict=True)
    assert geomean([x / y for x, y in pairs]) == pytest.approx(geomean(a) / geomean(b))


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0], [float("nan")]])
def test_geomean_refuses_what_has_no_logarithm(values):
    with pytest.raises(ValueError, match="values must be positive"):
        geomean(values)
