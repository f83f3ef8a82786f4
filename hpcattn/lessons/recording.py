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

__all__ = ["BF16_BOUND", "RECORDED", "append", "by_case", "checked", "in_processes", "newest", "row"]

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


def checked(error: float, what: str) -> float:
    """The relative error of a bf16 output, unless it is too large: then AssertionError, before anything is timed."""
    if not error <= BF16_BOUND:
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
        schedule=schedule, implementation="hopper", protocol="steady", median_us=timing.median_us,
        p10_us=timing.p10_us, p90_us=timing.p90_us, floor_us=timing.floor_us, rel_error=error,
        sm_clock_mhz=timing.sm_clock_mhz, **rates,
    )  # fmt: skip


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
