"""Records: one CSV row per timed configuration, described column by column in `data/schema.csv`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import pandas as pd

__all__ = [
    "CONFIGURATION",
    "DATA",
    "KEY",
    "Record",
    "append",
    "compare",
    "geomean",
    "latest",
    "load",
    "schema",
    "validate",
]

DATA = Path(__file__).resolve().parents[2] / "data"
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row; the columns are those of table `records` in `data/schema.csv`, in the same order."""

    suite: str
    case: str
    dtype: str
    quant: str
    layout: str
    num_query_tokens: int
    page_size: int
    schedule: str
    implementation: str
    protocol: str
    median_us: float = NAN
    p10_us: float = NAN
    p90_us: float = NAN
    floor_us: float = NAN
    tb_per_s: float = NAN
    tflop_per_s: float = NAN
    rel_error: float = NAN
    sm_clock_mhz: float = NAN
    gpu: str
    driver: str
    torch: str
    triton: str
    peer_version: str = "-"
    run_id: str
    date: str
    commit: str = "-"


COLUMNS = [field.name for field in fields(Record)]
CONFIGURATION = COLUMNS[: COLUMNS.index("schedule")]  # what is computed
KEY = [*COLUMNS[: COLUMNS.index("median_us")], "gpu"]  # what is computed, by whom, timed how and where


@cache
def schema(table: str) -> pd.DataFrame:
    """The data dictionary's rows for one table, indexed by column name."""
    dictionary = pd.read_csv(DATA / "schema.csv", keep_default_na=False)
    rows = dictionary[dictionary.table == table]
    if rows.empty:
        raise ValueError(f"table must be one of {sorted(set(dictionary.table))}, got {table!r}")
    return rows.set_index("column")


def validate(frame: pd.DataFrame, table: str = "records") -> pd.DataFrame:
    """The frame itself; raises ValueError naming the table, column and values that contradict `data/schema.csv`."""
    rules = schema(table)
    if list(frame.columns) != list(rules.index):
        raise ValueError(f"{table}: columns must be {list(rules.index)}, got {list(frame.columns)}")
    for name, rule in rules.iterrows():
        values = frame[name]
        if rule.type == "str":
            allowed = rule.allowed.split("|") if rule.allowed else None
            bad = values[values.isna() | (values == "") | (~values.isin(allowed) if allowed else False)]
        else:
            numbers = pd.to_numeric(values, errors="coerce")
            bad = values[numbers.isna() & (values.notna() if rule.type == "float" else True)]
            if rule.allowed == ">=0":
                bad = pd.concat([bad, values[numbers < 0]])
        if len(bad):
            accepted = rule.allowed or rule.type
            raise ValueError(f"{table}.{name}: accepted {accepted}, got {bad.unique().tolist()[:5]}")
    return frame


def load(*paths: Path | str, table: str = "records") -> pd.DataFrame:
    """Read and validate CSV files of one table into one frame (empty, with its columns, if no file exists)."""
    types = schema(table).type
    reading = {
        "keep_default_na": False,
        "na_values": {column: [""] for column in types.index[types != "str"]},
        "dtype": dict.fromkeys(types.index[types == "str"], str),
    }
    frames = [pd.read_csv(path, **reading) for path in map(Path, paths) if path.exists()]
    if not frames:
        return pd.DataFrame(columns=list(types.index))
    return validate(pd.concat(frames, ignore_index=True), table)


def append(path: Path | str, rows: Iterable[Record | Mapping], table: str = "records") -> None:
    """Validate rows and add them to a CSV file, creating it with its header if needed."""
    rows = [asdict(row) if isinstance(row, Record) else dict(row) for row in rows]
    frame = validate(pd.DataFrame(rows, columns=list(schema(table).index)), table)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.9g")


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The newest row per configuration, implementation, protocol and GPU (by date, then by order in the file)."""
    return frame.sort_values("date", kind="stable").drop_duplicates(KEY, keep="last").sort_index()


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers. Raises ValueError if there are none or one is not positive."""
    values = list(values)
    if not values or not all(v > 0 for v in values):
        raise ValueError(f"values must be positive and at least one, got {values}")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def compare(frame: pd.DataFrame, baseline: str, candidate: str, *, ignore: Sequence[str] = ()) -> pd.DataFrame:
    """Time of `baseline` over time of `candidate` (> 1: the candidate is faster), per workload and protocol.

    Names are implementations, or `implementation/schedule` to pick one schedule; else the fastest schedule of each
    side is taken. ignore: workload columns that may differ, such as "page_size" against a peer whose K and V are
    contiguous. Only rows of the same run are divided. Returns the workload columns, protocol, run_id, both medians and
    `ratio`.
    """
    index = [c for c in (*CONFIGURATION, "protocol", "gpu", "run_id") if c not in ignore]
    sides = [_rows_of(frame, name).groupby(index).median_us.min() for name in (baseline, candidate)]
    both = pd.concat(sides, axis=1, keys=["baseline_us", "candidate_us"]).dropna().reset_index()
    return both.assign(ratio=both.baseline_us / both.candidate_us)


def _rows_of(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    implementation, _, schedule = name.partition("/")
    rows = frame[frame.implementation == implementation]
    return rows[rows.schedule == schedule] if schedule else rows
