"""Run a suite: check every implementation, time it, append its records, and print what came out.

`python -m hpcattn bench --suite decode --implementations hopper,hpc_ops --protocol steady,single --out build/bench`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from hpcattn.bench import records, workloads
from hpcattn.bench.ceilings import Ceilings, measure_ceilings
from hpcattn.bench.peers import Adapter, adapters, report
from hpcattn.bench.protocol_study import protocol_study
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.style import label_of
from hpcattn.bench.timing import PROTOCOLS, copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import Inputs, Workload
from hpcattn.reference import relative_error

__all__ = ["BOUNDS", "SUITES", "Run", "check", "main", "summary"]

BOUNDS = {"bf16": 4e-3, "fp8": 5e-2}  # of the relative error against the plain float64 oracle
REPLAYS = {"cuda": {"replays": 30, "warmup": 3}, "cpu": {"replays": 3, "warmup": 0}}


@dataclass(frozen=True)
class Suite:
    """Workloads, the value of their records' `suite` column, and the protocols used by default."""

    column: str
    workloads: tuple[Workload, ...]
    protocols: tuple[str, ...]


def _nhd(name: str) -> tuple[Workload, ...]:
    return tuple(workloads.select(name, layout="NHD"))


SUITES = {
    "decode": Suite("decode", workloads.SUITES["decode"], ("steady", "single")),
    "prefill": Suite("prefill", workloads.SUITES["prefill"], ("steady", "single")),
    "plan": Suite("plan", tuple(workloads.select("decode", layout="NHD", dtype="bf16")), ("plan",)),
    "host": Suite("host", _nhd("decode") + _nhd("prefill"), ("host",)),
    "decode_small": Suite("decode", workloads.SUITES["decode_small"], ("host",)),
    "prefill_small": Suite("prefill", workloads.SUITES["prefill_small"], ("host",)),
}
STUDIES: dict[str, Callable] = {"ceilings": measure_ceilings, "measuring": protocol_study}


def check(candidates: Sequence[Adapter], workload: Workload, device: torch.device | str) -> dict[Adapter, float]:
    """Relative error of each candidate, the worse of v of mean 0 and of mean 1; inf for NaN or a failing call.

    Ours get NaN in everything they must not read, peers the same content with finite padding.
    """
    errors = dict.fromkeys(candidates, 0.0)
    if not errors:
        return errors
    for v_mean in (0.0, 1.0):
        poisoned, finite = (workload.build(device, poison=p, v_mean=v_mean) for p in (True, False))
        expected, _ = poisoned.reference()
        for adapter in candidates:
            error = _error(adapter, poisoned if adapter.ours else finite, expected)
            errors[adapter] = max(errors[adapter], error)
    return errors


def _error(adapter: Adapter, inputs: Inputs, expected: Tensor) -> float:
    try:
        error = relative_error(adapter.prepare(inputs)(), expected)
    except Exception as problem:  # whatever a peer raises is its result
        Console(stderr=True).print(
            f"{label_of(adapter.name, adapter.schedule)}: {problem!r}", style="red", markup=False
        )
        return float("inf")
    return error if error == error else float("inf")


@dataclass
class Run:
    """One run of a suite on one device; its rows share a run_id, and go to `path` workload by workload."""

    suite: Suite
    device: torch.device
    path: Path
    provenance: dict[str, str]

    def execute(self, candidates: Sequence[Adapter], protocols: Sequence[str], console: Console) -> pd.DataFrame:
        """Measure what the file does not hold yet under this run_id; returns the run's rows."""
        for workload in track(self.suite.workloads, description=self.path.stem, console=console):
            rows = self.rows()
            eligible = [adapter for adapter in candidates if adapter.supports(workload)]
            missing = {p: [a for a in eligible if self._lacks(rows, workload, a, p)] for p in protocols}
            errors = check(sorted(set().union(*missing.values()), key=eligible.index), workload, self.device)
            for protocol, wanted in missing.items():
                records.append(self.path, self.measure(workload, wanted, protocol, errors))
        return self.rows()

    def rows(self) -> pd.DataFrame:
        """The rows of this run that the file holds."""
        frame = records.load(self.path)
        return frame[frame.run_id == self.provenance["run_id"]]

    def measure(
        self, workload: Workload, candidates: Sequence[Adapter], protocol: str, errors: dict[Adapter, float]
    ) -> list[Record]:
        """Records of one workload and protocol. Ours is not timed unless correct, nor a peer that cannot run."""
        limits = {True: BOUNDS[workload.dtype], False: float("inf")}
        timed = [a for a in candidates if errors[a] <= limits[a.ours] and errors[a] < float("inf")]
        calls = self._calls(workload, timed, protocol)
        kind = self.device.type
        timings = measure(protocol, calls, timer_for(self.device), **REPLAYS[kind]) if calls else {}
        return [self._record(workload, a, protocol, errors[a], timings.get(a)) for a in candidates]

    def _calls(self, workload: Workload, timed: Sequence[Adapter], protocol: str) -> dict[Adapter, list[Callable]]:
        cold = protocol in ("steady", "plan")
        count = copies_to_exceed_l2(workload.bytes_moved, l2_bytes(self.device)) if cold else 1
        inputs = workload.build_many(count, self.device, poison=False)
        bind = "planner" if protocol == "plan" else "prepare"
        return {adapter: [getattr(adapter, bind)(i) for i in inputs] for adapter in timed}

    def _record(self, workload: Workload, adapter: Adapter, protocol: str, error: float, timing) -> Record:
        times = {}
        if timing is not None:
            times = {x: getattr(timing, x) for x in ("median_us", "p10_us", "p90_us", "floor_us", "sm_clock_mhz")}
            if protocol in ("steady", "single") and workload.suite == "decode":
                times["tb_per_s"] = workload.bytes_moved / timing.median_us * 1e-6
            elif protocol in ("steady", "single"):
                times["tflop_per_s"] = workload.flops / timing.median_us * 1e-6
        return Record(
            **self._key(workload, adapter, protocol),
            **times,
            rel_error=error,
            peer_version="-" if adapter.ours else adapter.version(),
            **self.provenance,
        )

    def _key(self, workload: Workload, adapter: Adapter, protocol: str) -> dict:
        return {
            **workload.key,
            "suite": self.suite.column,
            "page_size": adapter.page_size(workload),
            "schedule": adapter.schedule,
            "implementation": adapter.name,
            "protocol": protocol,
        }

    def _lacks(self, rows: pd.DataFrame, workload: Workload, adapter: Adapter, protocol: str) -> bool:
        """Whether this is still to be measured, and can be."""
        key = self._key(workload, adapter, protocol)
        recorded = (rows[list(key)] == pd.Series(key)).all(axis=1).any()
        return not recorded and (adapter.capturable or protocol == "host")


def summary(frame: pd.DataFrame, ceilings: Ceilings | None) -> list[Table]:
    """Tables of a run: per protocol, µs, rate and share of the ceiling of each workload and implementation; ratios."""
    tables = [_time_table(rows, protocol, ceilings) for protocol, rows in frame.groupby("protocol")]
    ratios = _ratio_table(frame)
    return [*tables, ratios] if ratios.row_count else tables


def _time_table(frame: pd.DataFrame, protocol: str, ceilings: Ceilings | None) -> Table:
    names = {(r.implementation, r.schedule, r.page_size == 0): None for r in frame.itertuples()}
    heads = (f"{label_of(i, s)}{' (contiguous)' if contiguous else ''}" for i, s, contiguous in names)
    table = Table("case", "format", *heads, title=f"{protocol}: median µs, rate, share of the ceiling")
    for key, rows in frame.groupby(list(workloads.IDENTITY), sort=False):
        cells = {(r.implementation, r.schedule, r.page_size == 0): _cell(r, ceilings) for r in rows.itertuples()}
        case, *form, tokens = key
        words = [*(x for x in form if x != "-"), *([f"S={tokens}"] if tokens else [])]
        table.add_row(case, " ".join(words), *(cells.get(name, "") for name in names))
    return table


def _cell(row, ceilings: Ceilings | None) -> str:
    if row.rel_error > BOUNDS[row.dtype]:
        return f"[red]{row.median_us:,.2f} error {row.rel_error:.1e}[/red]"
    parts = [f"{row.median_us:,.2f}"]
    if row.tb_per_s == row.tb_per_s:
        parts.append(f"{row.tb_per_s:.2f} TB/s")
    if row.tflop_per_s == row.tflop_per_s:
        parts.append(f"{row.tflop_per_s:.0f} TFLOP/s")
    if ceilings and len(parts) > 1:
        parts.append(f"{workloads.find(row).floor_us(ceilings) / row.median_us:.0%}")
    return " ".join(parts)


def _ratio_table(frame: pd.DataFrame) -> Table:
    table = Table("protocol", "dtype", "tokens", "ratio", "geometric mean", "workloads", title="Speed-up, per workload")
    names = frame.implementation.unique()
    ours = [name for name in ("hopper", "portable") if name in names]
    for candidate in ours:
        for baseline in (name for name in names if name != candidate):
            ratios = records.compare(frame, baseline, candidate, ignore=("page_size",))
            for key, group in ratios.groupby(["protocol", "dtype", "quant", "num_query_tokens"]):
                protocol, dtype, quant, tokens = key
                table.add_row(
                    protocol,
                    dtype if quant == "-" else f"{dtype} {quant}",
                    str(tokens or "-"),
                    f"{label_of(candidate)} over {label_of(baseline)}",
                    f"{records.geomean(group.ratio):.3f}x",
                    str(len(group)),
                )
    return table


def ceilings_of(gpu: str, paths: Iterable[Path]) -> Ceilings | None:
    """The recorded ceilings of a GPU, None if there are none: run the suite `ceilings` first."""
    frame = records.load(*paths, table="ceilings")
    frame = frame[frame.gpu == gpu]
    return Ceilings.of(frame) if len(frame) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if one of our implementations failed its numerical check."""
    args = _parser().parse_args(argv)
    console = Console()
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    origin = provenance(device, args.run_id or new_run_id(), args.commit)
    console.print(f"{origin['gpu']}, torch {origin['torch']}, triton {origin['triton']}, run {origin['run_id']}")
    console.print(f"timer: {timer_for(device).name}")
    if args.suite in STUDIES:
        options = {"small": args.small} if args.suite == "measuring" else {}
        rows = [row | origin for row in track(STUDIES[args.suite](device, **options), args.suite, console=console)]
        records.append(args.out / f"{args.suite}.csv", rows, table=args.suite)
        console.print(f"{len(rows)} rows in {args.out / args.suite}.csv")
        return 0
    suite = SUITES[args.suite]
    protocols = args.protocol.split(",") if args.protocol else suite.protocols
    if not is_cuda(device) and set(protocols) != {"host"}:
        _parser().error(f"on a CPU only --protocol host has a meaning, got {','.join(protocols)}")
    chosen = adapters(args.implementations.split(",") if args.implementations else None)
    status = report()
    for name in dict.fromkeys(adapter.name for adapter in chosen):
        console.print(f"  {label_of(name)}: {'ready' if status[name][0] else status[name][1]}", highlight=False)
    chosen = [a for a in chosen if status[a.name][0] and ("plan" not in protocols or a.schedule == "dynamic")]
    picked = tuple(w for w in suite.workloads if args.case in w.case)
    run = Run(Suite(suite.column, picked, suite.protocols), device, args.out / f"{suite.column}.csv", origin)
    frame = run.execute(chosen, protocols, console)
    known = [*records.DATA.glob("*/ceilings.csv"), args.out / "ceilings.csv"]
    for table in summary(frame, ceilings_of(origin["gpu"], known)):
        console.print(table)
    ours = frame[frame.implementation.isin({adapter.name for adapter in chosen if adapter.ours})]
    return int((ours.rel_error > ours.dtype.map(BOUNDS)).any())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcattn bench", description="Check and time implementations of attention.")
    parser.add_argument("--suite", required=True, choices=[*SUITES, *STUDIES])
    parser.add_argument("--implementations", default="", help="comma-separated; all that run here by default")
    parser.add_argument("--protocol", default="", help=f"comma-separated, of {', '.join(PROTOCOLS)}")
    parser.add_argument("--case", default="", help="only workloads whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the CSV files")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--run-id", default="", help="continue this run instead of starting one")
    parser.add_argument("--commit", default="", help="commit to record where there is no repository")
    parser.add_argument("--small", action="store_true", help="shrink the study `measuring` to seconds")
    return parser
