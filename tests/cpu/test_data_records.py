"""The recorded data: valid, complete, and equal to the figures that were published with it."""

import re

import pandas as pd
import pytest

from hpcattn.bench import workloads
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.records import DATA, geomean, load, schema, validate

H200 = DATA / "h200"
TABLES = {
    **dict.fromkeys(("decode", "prefill", "plan", "host", "lessons", "sliding_window", "varlen"), "records"),
    **{name: name for name in ("ceilings", "measuring", "accuracy", "spot", "sliding_window_cases")},
    "triton_tle_article": "published",
}
FILES = sorted(path for path in DATA.rglob("*.csv") if path.name != "schema.csv")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DATA)))
def test_every_file_obeys_the_data_dictionary(path):
    assert len(load(path, table=TABLES[path.stem]))


def test_the_dictionary_describes_every_column():
    dictionary = pd.read_csv(DATA / "schema.csv", keep_default_na=False)
    assert (dictionary.meaning != "").all()
    assert set(dictionary.type) == {"str", "int", "float"}
    assert not dictionary.duplicated(["table", "column"]).any()
    assert set(dictionary.table) == set(TABLES.values())


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_recorded_workloads_are_ours(name):
    """Cases and formats of the records exist as workloads, so that figures can compute their floors."""
    unknown = [row for row in load(H200 / f"{name}.csv").itertuples() if workloads.find(row) is None]
    assert all(row.case in ("4096x4096", "16384x16384") and row.dtype == "fp8" for row in unknown)


def runs(name: str, run: str) -> pd.DataFrame:
    frame = load(H200 / f"{name}.csv")
    return frame[frame.run_id == run]


def test_row_counts():
    counts = {
        ("decode", "hpc-ops-single-2026-11-30"): 324,
        ("prefill", "hpc-ops-single-2026-11-30"): 32,
        ("decode", "fa3-paged-single-2026-11-30"): 72,
        ("prefill", "fa3-paged-single-2026-11-30"): 30,
        ("prefill", "fa3-contiguous-single-2026-11-30"): 15,
        ("decode", "peers-steady-2026-11-30"): 162,
        ("prefill", "peers-steady-2026-11-30"): 25,
        ("sliding_window", "hils-tilelang-2026-11-30"): 22,
        ("varlen", "varlen-peers-2026-11-30"): 38,
    }
    assert {key: len(runs(*key)) for key in counts} == counts


GEOMEANS = {
    ("bf16", "hpc_ops", "dynamic"): (26.7, 29.1, 31.6),
    ("bf16", "hpc_ops", "static"): (45.6, 52.4, 61.7),
    ("bf16", "flash_attn_3", "-"): (31.4, 31.8, 31.9),
    ("fp8", "hpc_ops", "dynamic"): (20.2, 22.0, 27.0),
    ("fp8", "hpc_ops", "static"): (47.9, 56.4, 78.8),
    ("fp8", "flash_attn_3", "-"): (27.3, 27.5, 27.7),
}


@pytest.mark.parametrize(("key", "expected"), GEOMEANS.items())
def test_decode_geomeans(key, expected):
    dtype, implementation, schedule = key
    rows = runs("decode", "peers-steady-2026-11-30")
    rows = rows[(rows.dtype == dtype) & (rows.implementation == implementation) & (rows.schedule == schedule)]
    means = rows.groupby("num_query_tokens").median_us.apply(geomean)
    assert tuple(means.round(1)) == expected
    assert rows.groupby("num_query_tokens").size().tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("name", "column", "work"), [("decode", "tb_per_s", "kv_bytes"), ("prefill", "tflop_per_s", "flops")]
)
def test_rates_agree_with_times(name, column, work):
    """A digit copied wrongly breaks work / time = rate: the bytes of k and v, or the FLOPs over visible pairs."""
    by_shape = {(w.case, w.dtype): w for w in workloads.SUITES[name] if w.quant != "type0"}
    by_shape |= {(case, "fp8"): by_shape[case, "bf16"] for case in ("4096x4096", "16384x16384") if name == "prefill"}
    rows = load(H200 / f"{name}.csv")
    rows = rows[(rows.commit == "-") & ~rows.case.str.endswith("-masked")]  # transcribed
    assert len(rows) > 80
    for row in rows.itertuples():
        rate = getattr(by_shape[row.case, row.dtype], work) / row.median_us * 1e-6
        rounding = 6e-4 + rate * (0.005 / row.median_us + 1e-6)  # times were rounded to 0.01 µs, rates to 0.001
        assert abs(getattr(row, column) - rate) <= rounding, row


def test_ceilings():
    rows = load(H200 / "ceilings.csv", table="ceilings")
    ceilings = Ceilings.of(rows[rows.run_id == "ceilings-2026-11-30"])
    assert (ceilings.tb_per_s, ceilings.tflop_fp8) == (4.27, 1312)
    with pytest.raises(ValueError, match="ceilings must hold"):
        Ceilings.load(DATA / "nowhere.csv")


def test_published_article():
    rows = load(DATA / "published" / "triton_tle_article.csv", table="published")
    decode = rows[(rows.suite == "decode") & (rows.statistic == "geomean")]
    assert decode.speedup.tolist() == [1.088, 1.067, 1.101, 1.075, 1.055, 0.964]
    means = rows[(rows.suite == "prefill") & (rows.statistic == "geomean")]
    assert means.speedup.tolist() == [0.973, 0.994, 0.886, 1.024]
    ranges = rows.pivot_table(
        index=["suite", "dtype", "layout", "num_query_tokens", "baseline"], columns="statistic", values="speedup"
    )
    assert ((ranges["min"] < ranges["max"]) | ranges["min"].isna()).all()
    assert len(rows) == 28


def test_fp8_accumulation():
    rows = load(H200 / "accuracy.csv", table="accuracy")
    rows = rows[rows.run_id == "fp8-accumulation-2026-11-30"]
    rows = rows.set_index(["implementation", "kv_len", "v_mean"]).rel_error
    assert rows["flash_attn_3", 32768, 1] == 0.3
    assert rows["hpc_ops", 32768, 1] == 2e-3
    assert len(rows) == 12


def test_validation_sees_a_mistake():
    frame = load(H200 / "decode.csv")
    with pytest.raises(ValueError, match="records.dtype"):
        validate(frame.assign(dtype="fp16"))
    assert schema("records").loc["median_us", "unit"] == "us"


def test_dynamic_decode_against_its_peers():
    """What the README says of the dynamic schedule, from one run on one set of tensors, everything checked."""
    rows = runs("decode", "hopper-dynamic-2026-12-01")
    rows = rows[rows.protocol == "steady"]
    assert (rows.rel_error <= rows.dtype.map({"bf16": 4e-3, "fp8": 5e-2})).all()
    form = ["dtype", "quant", "num_query_tokens"]
    kind = rows.implementation + " " + rows.schedule
    times = rows.assign(kind=kind).pivot(index=[*form, "layout", "case"], columns="kind", values="median_us")
    assert times.shape == (162, 4)
    cuda, ours = times["hpc_ops dynamic"], times["hopper dynamic"]
    other = (
        times["flash_attn_3 -"].groupby(["dtype", "num_query_tokens", "layout", "case"]).transform("max")
    )  # fp8: type 1
    best = pd.concat([cuda, other], axis=1).min(axis=1)
    over_cuda, over_best = ((times / ours).groupby(form).apply(geomean) for times in (cuda, best))
    stated = re.search(
        r"dynamic CUDA in every configuration: ([\d.]+) to ([\d.]+) times in bf16 and ([\d.]+)\s+to ([\d.]+) times in "
        r"fp8.*?better of HPC-Ops and FlashAttention-3 it is ([\d.]+)\s+to ([\d.]+) times as fast, nowhere less than "
        r"([\d.]+) times",
        (DATA.parent / "README.md").read_text(),
        re.DOTALL,
    )
    ranges = [over_cuda["bf16"], over_cuda["fp8"], over_best]
    found = [f"{x:.2f}" for group in ranges for x in (group.min(), group.max())]
    assert list(stated.groups()) == [*found, f"{(best / ours).min():.2f}"]
    uniform = (ours / times["hopper static"])[ours.index.get_level_values("case").str.startswith("uniform")]
    assert uniform.max() <= 1.03, "balancing costs a batch that needs none next to nothing"


def test_prefill_against_its_peers():
    """What the README says of prefill, from one run on one set of tensors, everything checked."""
    rows = runs("prefill", "hopper-prefill-2026-12-01-2")
    ours = rows[rows.implementation == "hopper"]
    assert (ours.rel_error <= ours.dtype.map({"bf16": 4e-3, "fp8": 5e-2})).all() and len(ours) == 42
    paged = rows[rows.page_size == 64]
    keys = ["dtype", "quant", "layout", "case"]
    times = paged.pivot(index=keys, columns="implementation", values="median_us")
    errors = paged.pivot(index=keys, columns="implementation", values="rel_error")
    assert (errors.hopper <= 1.2 * errors.hpc_ops).all(), "nothing is bought with accuracy"
    over_cuda, over_fa3 = times.hpc_ops / times.hopper, times.flash_attn_3 / times.hopper
    cases = over_cuda.index.get_level_values("case")
    table = over_cuda["fp8"][~cases[over_cuda.index.get_level_values("dtype") == "fp8"].str.contains("4096x4096|16384")]
    assert len(table) == 24
    stated = re.search(
        r"24 fp8 configurations.*?is ([\d.]+)\s+times\s+as\s+fast\s+as\s+HPC-Ops\s+\(geometric\s+mean\),\s+nowhere"
        r"\s+less\s+than\s+([\d.]+)\s+times,\s+and\s+([\d.]+)\s+to\s+([\d.]+)\s+times\s+in\s+bf16.*?FlashAttention-3"
        r".*?([\d.]+)\s+to\s+([\d.]+)\s+times\s+in\s+bf16\s+and\s+([\d.]+)\s+to\s+([\d.]+)\s+times\s+in\s+fp8.*?"
        r"error\s+reaches\s+([\d.]+)\s+there,\s+ours\s+([\d.]+\d)",
        (DATA.parent / "README.md").read_text(),
        re.DOTALL,
    )
    fa3 = over_fa3.dropna()
    found = [geomean(table), table.min()]
    found += [x for group in (over_cuda["bf16"], fa3["bf16"], fa3["fp8"]) for x in (group.min(), group.max())]
    found += [errors.loc["fp8"].flash_attn_3.max(), errors.loc["fp8"].hopper.max()]
    assert [float(x) for x in stated.groups()] == [round(x, 2) for x in found[:-1]] + [round(found[-1], 3)]
