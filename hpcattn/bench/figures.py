"""Figures, from records alone: every number drawn was read from a CSV file under `data/` or given as a frame.

`python -m hpcattn figures --out build/figures` draws all that have data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcattn.bench import records, workloads
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.records import DATA
from hpcattn.bench.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    axes_grid,
    color_of,
    label_of,
    styled,
)

__all__ = [
    "calls_per_graph",
    "cycle_budget",
    "decode_times",
    "draw_all",
    "main",
    "prefill_rates",
    "protocol_scatter",
    "published_speedups",
    "roofline",
    "sample_spread",
    "working_set",
    "wrapper_overhead",
]

H200 = DATA / "h200"
SERIES_COLORS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)


def recorded(table: str, folder: Path = H200) -> pd.DataFrame:
    """A table of `data/h200`: "decode" and "prefill" (of records), "ceilings" or "measuring"."""
    kind = "records" if table in ("decode", "prefill") else table
    return records.load(folder / f"{table}.csv", table=kind)


@styled
def protocol_scatter(frame: pd.DataFrame, measuring: pd.DataFrame | None = None) -> Figure:
    """Picture 1: what a protocol reports against the steady time; small kernels are compressed together.

    frame: records; rows that differ only in protocol and run make a pair. measuring: adds the copies of the protocol
    study, whose empty kernel shows each protocol's floor.
    """
    figure, (ax,) = axes_grid(height=5.2)
    index = [c for c in records.KEY if c != "protocol"]
    times = records.latest(frame).pivot_table(index=index, columns="protocol", values="median_us").reset_index()
    times = times.dropna(subset=["steady", "single"])
    for (name, schedule), rows in _by_color(times):
        ax.scatter(
            rows.steady, rows.single, s=22, color=color_of(name, schedule), label=f"{label_of(name, schedule)}, single"
        )
    low, high = times[["steady", "single"]].min().min() / 2, times[["steady", "single"]].max().max() * 1.5
    if measuring is not None and len(measuring):
        study = measuring[measuring.experiment == "protocols"].pivot_table(index="x", columns="series", values="value")
        marks = zip(("single", "eager_asynchronous", "eager_synchronized", "host"), "x+1_", strict=True)
        for (series, mark), color in zip(marks, SERIES_COLORS, strict=False):
            ax.scatter(
                study.steady, study[series], marker=mark, color=color, label=f"copies, {series.replace('_', ' ')}"
            )
        low = min(low, study.steady.min() / 1.5)
    ax.plot([low, high], [low, high], color=BLACK, lw=1, ls="--", label="no protocol cost")
    ax.set(xscale="log", yscale="log", xlabel="steady protocol, µs", ylabel="reported by the protocol, µs")
    ax.set_title("A timer adds its own floor: what small kernels differ by, it hides")
    ax.legend(ncols=2)
    return figure


SM_CLOCK_GHZ = 1.98  # the H200's highest: column sm_clock_mhz of the recorded decode rows, which do not slow it down
TILE, HEAD_DIM = 64, 128
MMA_FLOP_PER_CLK = {"bf16": 4096, "fp8": 8192}
EXP_PER_CLK = 16
SHARED_BYTES_PER_CLK = 128


def tile_clocks(rows: int, dtype: str, ceilings: Ceilings, *, num_sms: int = 132, from_dram: bool = True) -> dict:
    """Clocks one SM needs per 64-token tile of K and V, resource by resource, for `rows` query rows on the MMA.

    Tensor: two products of rows x 64 x 128. Exponential: one per score, 16 a clock. Shared memory: K and V written once
    and read once per 64 rows (or per call, for fewer), 128 bytes a clock. DRAM: this SM's share of the measured
    bandwidth, at SM_CLOCK_GHZ; prefill finds its tiles in the L2 (from_dram=False).
    """
    tile_bytes = 2 * TILE * HEAD_DIM * (2 if dtype == "bf16" else 1)
    dram_bytes_per_clk = ceilings.tb_per_s * 1e3 / num_sms / SM_CLOCK_GHZ
    return {
        "DRAM": tile_bytes / dram_bytes_per_clk if from_dram else 0.0,
        "tensor cores": 4 * rows * TILE * HEAD_DIM / MMA_FLOP_PER_CLK[dtype],
        "exponential": rows * TILE / EXP_PER_CLK,
        "shared memory": (1 + max(1, rows // 64)) * tile_bytes / SHARED_BYTES_PER_CLK,
    }


@styled
def cycle_budget(ceilings: Ceilings) -> Figure:
    """Picture 2: clocks per 64-token tile and SM; with overlap the longest bar is the time, without it their sum."""
    kernels = {
        "decode, padded to 64 rows": (64, True),
        "decode, swapped operands, 8 rows": (8, True),
        "prefill, 128 rows": (128, False),
    }
    figure, axes = axes_grid(1, 2, height=4.4, sharey=True)
    colors = dict(zip(("DRAM", "tensor cores", "exponential", "shared memory"), SERIES_COLORS, strict=False))
    for ax, dtype in zip(axes, MMA_FLOP_PER_CLK, strict=True):
        for place, (rows, from_dram) in enumerate(kernels.values()):
            clocks = tile_clocks(rows, dtype, ceilings, from_dram=from_dram)
            for i, (resource, value) in enumerate(clocks.items()):
                at = place + (1.5 - i) * 0.18
                ax.barh(at, value, 0.17, color=colors[resource], label=resource if place == 0 else None)
                ax.text(value, at, f" {value:.0f}", va="center", fontsize=8)
            ax.plot([sum(clocks.values())] * 2, [place - 0.4, place + 0.4], color=BLACK, lw=1.2, ls=":")
        ax.set_yticks(range(len(kernels)), list(kernels))
        ax.set(xlabel="clocks per tile (dotted: sum, if nothing overlaps)", title=dtype)
        ax.margins(x=0.12)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _by_color(frame: pd.DataFrame):
    """Groups ((implementation, schedule), rows); the dynamic schedule is what an implementation does by default."""
    return frame.assign(schedule=frame.schedule.replace("dynamic", "-")).groupby(["implementation", "schedule"])


def _bars(ax: Axes, frame: pd.DataFrame, cases: Sequence[str], column: str) -> None:
    """One group of bars per case, one bar per implementation and schedule."""
    groups = list(_by_color(frame))
    width = 0.82 / max(1, len(groups))
    for i, ((name, schedule), rows) in enumerate(groups):
        values = rows.groupby("case")[column].last().reindex(cases)
        at = np.arange(len(cases)) + (i - (len(groups) - 1) / 2) * width
        ax.bar(at, values, width * 0.94, color=color_of(name, schedule), label=label_of(name, schedule))
    ax.set_xticks(range(len(cases)), cases, rotation=25, ha="right")


@styled
def decode_times(
    frame: pd.DataFrame,
    ceilings: Ceilings,
    *,
    num_query_tokens: int = 1,
    protocol: str = "steady",
    layout: str = "NHD",
) -> Figure:
    """Decode µs per workload, bf16 and fp8 (type 1), with each workload's DRAM floor as a line."""
    figure, axes = axes_grid(2, 1, height=7.0, sharex=True)
    rows = records.latest(frame)
    rows = rows[(rows.protocol == protocol) & (rows.layout == layout) & (rows.num_query_tokens == num_query_tokens)]
    cases = list(workloads.DECODE_CASES)
    for ax, (dtype, quant) in zip(axes, (("bf16", "-"), ("fp8", "type1")), strict=True):
        _bars(ax, rows[(rows.dtype == dtype) & (rows.quant == quant) & (rows.page_size == 64)], cases, "median_us")
        fields = {"dtype": dtype, "quant": quant, "layout": layout}
        floors = {w.case: w.floor_us(ceilings) for w in workloads.select("decode", **fields)}
        for place, case in enumerate(cases):
            label = "DRAM floor" if place == 0 else None
            ax.plot([place - 0.45, place + 0.45], [floors[case]] * 2, color=BLACK, lw=1.5, label=label)
        ax.set(ylabel="µs per call", title=f"decode, {dtype}, {num_query_tokens} query token(s), {layout}, {protocol}")
    axes[0].legend(ncols=3)
    return figure


@styled
def prefill_rates(frame: pd.DataFrame, ceilings: Ceilings, *, protocol: str = "steady", layout: str = "NHD") -> Figure:
    """Prefill TFLOP/s over visible pairs, per shape, with the measured matrix rate as a line."""
    figure, axes = axes_grid(1, 3, height=4.2, sharey=True)
    rows = records.latest(frame)
    rows = rows[(rows.protocol == protocol) & (rows.layout == layout) & (rows.page_size > 0)]
    cases = [f"{q}x{kv}" for q, kv in (*workloads.PREFILL_SHAPES, *workloads.LONG_PREFILL_SHAPES)]
    for ax, (dtype, quant) in zip(axes, workloads.FORMATS, strict=True):
        _bars(ax, rows[(rows.dtype == dtype) & (rows.quant == quant)], cases, "tflop_per_s")
        ax.axhline(ceilings.tflop_per_s(dtype), color=BLACK, lw=1.2, ls="--", label="8192³ matrix product")
        ax.set(title=dtype if quant == "-" else f"{dtype}, {quant}")
    axes[0].set_ylabel("TFLOP/s over visible pairs")
    axes[0].legend(loc="upper left")
    return figure


@styled
def roofline(frame: pd.DataFrame, ceilings: Ceilings, *, protocol: str = "steady") -> Figure:
    """Every recorded kernel under the measured roof: decode on the bandwidth slope, prefill below the matrix rate."""
    figure, axes = axes_grid(1, 2, height=4.6, sharey=True)
    rows = records.latest(frame)
    rows = rows[(rows.protocol == protocol) & rows.median_us.notna()]
    for ax, dtype in zip(axes, ("bf16", "fp8"), strict=True):
        intensity = np.logspace(0, 5, 200)
        roof = np.minimum(intensity * ceilings.tb_per_s, ceilings.tflop_per_s(dtype))
        ax.plot(intensity, roof, color=BLACK, label="measured roof")
        for (name, schedule), group in _by_color(rows[rows.dtype == dtype]):
            points = [
                (w.flops / w.bytes_moved, w.flops / row.median_us * 1e-6)
                for row in group.itertuples()
                if (w := workloads.find(row))
            ]
            ax.scatter(*np.array(points).T, s=18, color=color_of(name, schedule), label=label_of(name, schedule))
        ax.set(xscale="log", yscale="log", xlabel="FLOP per byte", title=dtype, ylim=(1, 2e3))
    axes[0].set_ylabel("TFLOP/s")
    axes[0].legend(loc="lower right")
    return figure


@styled
def published_speedups(published: pd.DataFrame, frame: pd.DataFrame | None = None) -> Figure:
    """Geometric-mean speed-ups over HPC-Ops that the Triton-TLE article states, with its ranges, beside ours.

    published: table `published`. frame: records; ours appear where one run timed us and HPC-Ops.
    """
    figure, (ax,) = axes_grid(height=4.0)
    means = published[(published.statistic == "geomean") & (published.baseline == "hpc_ops")]
    labels = []
    for place, row in enumerate(means.itertuples()):
        of_row = {c: getattr(row, c) for c in ("suite", "dtype", "quant", "num_query_tokens", "subset", "layout")}
        ends = published[
            (published[list(of_row)] == pd.Series(of_row)).all(axis=1) & (published.baseline == row.baseline)
        ]
        ends = ends[ends.statistic != "geomean"].speedup
        if len(ends):
            ax.plot([place, place], [ends.min(), ends.max()], color=GREY, lw=5, alpha=0.5, zorder=1)
        ax.scatter(place, row.speedup, color=BLUE, zorder=2, label="published, H100" if place == 0 else None)
        what = f"S={row.num_query_tokens}" if row.suite == "decode" else row.subset.replace("_", " ")
        labels.append(f"{row.suite}\n{row.dtype}{'' if row.quant == 'all' else ' ' + row.quant}\n{what}")
        if (ours := _our_geomean(frame, row)) is not None:
            ax.scatter(place, ours, color=VERMILION, marker="D", zorder=3, label="ours, recorded")
    ax.axhline(1, color=BLACK, lw=1, ls="--")
    ax.set_xticks(range(len(labels)), labels)
    ax.set(ylabel="speed-up over HPC-Ops", title="Published geometric means (bars: range over workloads)")
    handles, names = ax.get_legend_handles_labels()
    ax.legend(*zip(*dict(zip(names, zip(handles, names, strict=True), strict=True)).values(), strict=True))
    return figure


def _our_geomean(frame: pd.DataFrame | None, row) -> float | None:
    """Our geometric mean on the rows that a published figure covers; None without a common run."""
    if frame is None or row.subset == "effective_sparse":
        return None
    baseline = "hpc_ops" if row.schedule == "-" else f"hpc_ops/{row.schedule}"
    ratios = records.compare(frame[frame.protocol == "single"], baseline, "hopper")
    keep = (ratios.suite == row.suite) & (ratios.dtype == row.dtype) & (ratios.num_query_tokens == row.num_query_tokens)
    keep &= (row.quant == "all") | (ratios.quant == row.quant)
    keep &= (row.subset == "all") | ~ratios.case.str.endswith("-masked")
    return records.geomean(ratios[keep].ratio) if keep.any() else None


def _curves(ax: Axes, rows: pd.DataFrame, **style) -> None:
    for (series, points), color in zip(rows.groupby("series", sort=False), SERIES_COLORS, strict=False):
        ax.plot(points.x, points.value, color=color, label=series.replace("_", " "), **style)


def _experiment(measuring: pd.DataFrame, name: str) -> pd.DataFrame:
    """The newest run's rows of one experiment. Raises ValueError if there are none."""
    rows = measuring[measuring.experiment == name]
    if rows.empty:
        raise ValueError(f"no rows of experiment {name!r}: run the suite `measuring` on a GPU first")
    return rows[rows.run_id == rows.run_id.iloc[-1]]


@styled
def calls_per_graph(measuring: pd.DataFrame) -> Figure:
    """Time per call over the number of calls in a graph."""
    figure, (ax,) = axes_grid(height=3.8)
    _curves(ax, _experiment(measuring, "calls_per_graph"), marker="o", ms=4)
    ax.set(xscale="log", yscale="log", xlabel="calls in one graph", ylabel="µs per call")
    ax.set_title("Twenty calls share what one call pays")
    ax.legend()
    return figure


@styled
def working_set(measuring: pd.DataFrame) -> Figure:
    """Bandwidth of a repeated copy against one that rotates its buffers."""
    figure, (ax,) = axes_grid(height=3.8)
    rows = _experiment(measuring, "working_set")
    _curves(ax, rows.assign(x=rows.x / 2**20, value=rows.value / 1e3), marker="o", ms=4)
    ax.set(xscale="log", xlabel="MB moved per call", ylabel="TB/s", title="A warm L2 is not the memory")
    ax.legend()
    return figure


@styled
def wrapper_overhead(measuring: pd.DataFrame) -> Figure:
    """What the wall clock reports of one kernel behind wrappers of growing cost."""
    figure, (ax,) = axes_grid(height=3.8)
    _curves(ax, _experiment(measuring, "wrapper"), marker="o", ms=4)
    ax.set(xlabel="host µs that the wrapper adds", ylabel="µs reported per call", ylim=(0, None))
    ax.set_title("Asynchronous: the longer of host and kernel; synchronized: their sum")
    ax.legend()
    return figure


@styled
def sample_spread(measuring: pd.DataFrame) -> Figure:
    """Distribution of repeated samples, with median and 10-90 % band."""
    rows = _experiment(measuring, "spread")
    figure, axes = axes_grid(1, rows.series.nunique(), height=3.4)
    for ax, (series, points) in zip(axes, rows.groupby("series", sort=False), strict=True):
        low, median, high = points.value.quantile([0.1, 0.5, 0.9])
        ax.hist(points.value, bins=60, color=SKY)
        ax.axvspan(low, high, color=GREY, alpha=0.25, label="10-90 %")
        ax.axvline(median, color=VERMILION, label=f"median {median:.2f} µs")
        ax.set(xlabel="µs per call", ylabel="samples", title=series)
        ax.legend()
    return figure


def draw_all() -> dict[str, Figure]:
    """Every figure for which `data/` holds what it needs."""
    decode, prefill, measuring = (recorded(name) for name in ("decode", "prefill", "measuring"))
    both, ceilings = pd.concat([decode, prefill], ignore_index=True), Ceilings.load()
    published = records.load(DATA / "published" / "triton_tle_article.csv", table="published")
    figures = {
        "protocol_scatter": protocol_scatter(both, measuring),
        "cycle_budget": cycle_budget(ceilings),
        "decode_times": decode_times(decode, ceilings),
        "prefill_rates": prefill_rates(prefill, ceilings),
        "roofline": roofline(both, ceilings),
        "published_speedups": published_speedups(published, both),
    }
    if len(measuring):
        studies = (calls_per_graph, working_set, wrapper_overhead, sample_spread)
        figures |= {draw.__name__: draw(measuring) for draw in studies}
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: draw every figure that has data."""
    parser = argparse.ArgumentParser(prog="hpcattn figures", description="Draw the figures from the recorded data.")
    parser.add_argument("--out", type=Path, default=Path("build/figures"), help="folder for the PNG files")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in draw_all().items():
        figure.savefig(out / f"{name}.png", dpi=150)
        print(out / f"{name}.png")
    return 0
