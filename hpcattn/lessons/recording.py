"""What lessons measure, as rows of table `records`, and the way back from the file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

from hpcattn.bench import records
from hpcattn.bench.suites import BOUNDS
from hpcattn.bench.timing import Timing
from hpcattn.bench.workloads import Workload

__all__ = [
    "BF16_BOUND", "RECORDED", "LessonRows", "append", "by_case", "checked", "in_processes", "newest", "prefill_row",
    "row", "suite_times",
]  # fmt: skip

RECORDED = records.DATA / "h200" / "lessons.csv"
BF16_BOUND = BOUNDS["bf16"]  # of the relative error of o


def in_processes(function: Callable, calls: Iterable[Sequence[str]]) -> None:
    """Call a module's function with strings, each call in a process of its own.

    To compile kernels to Triton's cache: one after the other they take a minute. What a failed call leaves out is
    compiled when it is needed.
    """
    code = f"import sys; from {function.__module__} import {function.__name__} as f; f(*sys.argv[1:])"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": Path(__file__).parents[2]}
    jobs = [subprocess.Popen([sys.executable, "-c", code, *call], **quiet) for call in calls]
    for job in jobs:
        try:
            job.wait(timeout=120)
        except subprocess.TimeoutExpired:
            job.kill()


def checked(error: float, what: str, dtype: str = "bf16") -> float:
    """The relative error of an output, unless it is too large: then AssertionError, before anything is timed."""
    if not error <= BOUNDS[dtype]:
        raise AssertionError(f"{what}: relative error {error}")
    return error


def row(case: str, timing: Timing, error: float, work: Workload | None, *, page_size: int, schedule: str) -> dict:
    """A bf16 decode with one query token, steady; with rates if the workload is known."""
    rates = {}
    if work is not None:
        rates = {
            "tb_per_s": work.bytes_moved / timing.median_us * 1e-6, "tflop_per_s": work.flops / timing.median_us * 1e-6,
        }  # fmt: skip
    return dict(
        suite="decode", case=case, dtype="bf16", quant="-", layout="NHD", num_query_tokens=1, page_size=page_size,
        schedule=schedule, implementation="hopper", protocol="steady", rel_error=error, **_times(timing), **rates,
    )  # fmt: skip


def prefill_row(case: str, timing: Timing, error: float, work: Workload, flops: int | None = None) -> dict:
    """The library's prefill, steady; flops: other than the workload's."""
    return work.key | dict(
        case=case, schedule="-", implementation="hopper", protocol="steady", rel_error=error,
        tflop_per_s=(work.flops if flops is None else flops) / timing.median_us * 1e-6, **_times(timing),
    )  # fmt: skip


def _times(timing: Timing) -> dict[str, float]:
    columns = ("median_us", "p10_us", "p90_us", "floor_us", "sm_clock_mhz")
    return {column: getattr(timing, column) for column in columns}


def append(path: Path | str, frame: pd.DataFrame) -> pd.DataFrame:
    """Add rows to a CSV file of table `records`, and give them back."""
    records.append(path, frame.to_dict("records"))
    return frame


def by_case(frame: pd.DataFrame, prefix: str) -> dict[str, pd.Series]:
    """The last row of each case that starts with the prefix, by its name without it."""
    frame = frame[frame.case.str.startswith(prefix)]
    return {row.case.removeprefix(prefix): row for _, row in frame.iterrows()}


def newest(path: Path | str, prefix: str) -> dict[str, pd.Series]:
    """The same for the newest row of each configuration in a file; empty if there is none."""
    return by_case(records.latest(records.load(path)), prefix)


class LessonRows:
    """Rows of table `records` of one lesson: the functions that its module offers."""

    def __init__(self, prefix: str, measure: Callable[..., pd.DataFrame]):
        self._prefix, self._measure = prefix, measure

    def record(self, path: Path | str = RECORDED, *, commit: str = "", **kwargs) -> pd.DataFrame:
        """`measure_all(**kwargs)`, appended to a CSV file of table `records`."""
        return append(path, self._measure(commit=commit or None, **kwargs))

    def recorded(self, path: Path | str = RECORDED) -> dict[str, pd.Series]:
        """The newest recorded row of each case of this lesson, by its name without prefix; empty before the first."""
        return newest(path, self._prefix)

    def by_case(self, frame: pd.DataFrame) -> dict[str, pd.Series]:
        """The last row of each case of this lesson, by its name without prefix."""
        return by_case(frame, self._prefix)


def suite_times(frame: pd.DataFrame, **same: str) -> dict[str, float]:
    """µs of each case in the newest records of a suite, of the rows whose columns are as stated; steady, NHD."""
    for column, value in {"layout": "NHD", "protocol": "steady", **same}.items():
        frame = frame[frame[column] == value]
    return {row.case: float(row.median_us) for row in records.latest(frame).itertuples()}
