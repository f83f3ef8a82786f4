"""Pictures of lesson 00: the machine, samples of a timer, timelines of a queue, and what protocols report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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
from hpcattn.lessons.measuring import MB, Span

__all__ = [
    "draw_clock_ramp",
    "draw_graph_sizes",
    "draw_l2",
    "draw_machine",
    "draw_protocols",
    "draw_samples",
    "draw_spread",
    "draw_timelines",
    "draw_wrapper",
]

HOW_TO_RECORD = "not recorded yet; on a Hopper GPU:\npython -m hpcattn bench --suite measuring --out data/h200"


def _not_recorded(ax: Axes) -> None:
    ax.text(0.5, 0.5, HOW_TO_RECORD, ha="center", va="center", transform=ax.transAxes, color="#555555", fontsize=9)
    ax.set(xticks=[], yticks=[])


def _box(ax: Axes, x: float, y: float, w: float, h: float, text: str, color: str, *, size: float = 8.5) -> None:
    ax.add_patch(Rectangle((x, y), w, h, fc=color, ec="#444444", lw=0.8, alpha=0.9))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size)


@styled
def draw_machine(num_sms: int, l2_mb: float, dram_tb_per_s: float, clock_ghz: float) -> Figure:
    """One streaming multiprocessor in full, its siblings in small, and the memory below them."""
    figure, (ax,) = axes_grid(height=5.0)
    ax.set(xlim=(0, 16), ylim=(0, 9.2))
    ax.axis("off")
    ax.add_patch(Rectangle((0.1, 3.35), 10.9, 5.4, fc="#F7F7F7", ec="#444444", lw=1.2))
    ax.text(0.3, 8.85, "one SM: up to 64 warps live here, on 4 partitions", weight="bold", va="bottom")
    for i in range(4):
        x = 0.35 + 2.65 * i
        _box(ax, x, 7.65, 2.45, 0.85, "warp scheduler\n1 instruction / clk", "#E8E8E8")
        _box(ax, x, 6.7, 2.45, 0.8, "registers 64 KiB\n(16,384 of 32 bits)", "#CFE3F2")
        _box(ax, x, 5.75, 2.45, 0.8, "32 lanes fp32\n4 exponentials / clk", "#E3F1E3")
        _box(ax, x, 4.8, 2.45, 0.8, "tensor core\n1,024 FLOP / clk (bf16)", "#F8DEC8")
    _box(
        ax,
        0.35,
        3.55,
        10.4,
        0.95,
        "shared memory and L1: 256 KiB, up to 228 KiB shared, 128 bytes / clk",
        "#D9E9F7",
        size=9.5,
    )
    for row in range(6):
        for column in range(6):
            ax.add_patch(
                Rectangle((11.5 + 0.7 * column, 4.3 + 0.7 * row), 0.55, 0.55, fc="#F7F7F7", ec="#888888", lw=0.7)
            )
    ax.text(11.5, 8.85, f"… × {num_sms} SMs", weight="bold", va="bottom")
    ax.text(13.5, 3.85, "a CTA (thread block) runs on one SM", ha="center", fontsize=8.5)
    _box(ax, 0.1, 1.75, 15.7, 0.95, f"L2: {l2_mb:.0f} MB, shared by all SMs", "#BFD9EE", size=10)
    per_clk = dram_tb_per_s * 1e3 / num_sms / clock_ghz
    text = f"HBM (DRAM): {dram_tb_per_s:.2f} TB/s measured = {per_clk:.1f} bytes / clk for each SM at {clock_ghz} GHz"
    _box(ax, 0.1, 0.15, 15.7, 0.95, text, "#9FC5E3", size=10)
    for x in (3, 8, 13):
        for low, high in ((1.12, 1.73), (2.72, 3.33)):
            ax.annotate("", (x, high), (x, low), arrowprops={"arrowstyle": "<->", "color": "#444444"})
    return figure


@styled
def draw_samples(samples_us: Sequence[float], first_us: float, title: str) -> Figure:
    """Samples in the order they were taken, with the first call, and their distribution."""
    samples = np.asarray(samples_us)
    low, median, high = np.percentile(samples, [10, 50, 90])
    figure, (left, right) = axes_grid(1, 2, height=3.6, width_ratios=[3, 2], sharey=True)
    left.plot(np.arange(1, len(samples) + 1), samples, ".", ms=2.5, color=BLUE)
    left.plot(0, first_us, "D", color=VERMILION, clip_on=False)
    left.annotate("first call", (0, first_us), (len(samples) * 0.05, first_us), va="center", color=VERMILION)
    left.set(yscale="log", xlabel="call", ylabel="µs", title=title)
    edges = np.geomspace(samples.min() * 0.97, samples.max() * 1.03, 70)
    right.hist(samples, edges, orientation="horizontal", color=SKY)
    right.axhspan(low, high, color=GREY, alpha=0.3, label="10–90 %")
    right.axhline(median, color=VERMILION, label=f"median {median:.3g} µs")
    right.axhline(samples.mean(), color=BLACK, ls=":", label=f"mean {samples.mean():.3g} µs")
    right.set(xscale="log", xlabel="samples")
    right.legend(loc="upper right")
    return figure


@styled
def draw_timelines(timelines: Mapping[str, Sequence[Span]], until_us: float) -> Figure:
    """What host and GPU do over time, one pair of rows per program; empty stretches are waiting."""
    figure, axes = axes_grid(len(timelines), 1, height=1.25 * len(timelines) + 0.6, sharex=True)
    colors = {"host": ORANGE, "GPU": BLUE}
    for ax, (title, spans) in zip(axes, timelines.items(), strict=True):
        for span in spans:
            y = 0 if span.row == "GPU" else 1
            visible = min(span.end, until_us) - span.start
            if visible > 0:
                ax.add_patch(Rectangle((span.start, y + 0.1), visible, 0.8, fc=colors[span.row], ec="white", lw=0.8))
            if visible > 0.035 * until_us:
                x = span.start + visible / 2
                ax.text(x, y + 0.5, span.label, ha="center", va="center", color="white", fontsize=8, clip_on=True)
        ax.set(xlim=(0, until_us), ylim=(0, 2), title=title)
        ax.set_yticks([0.5, 1.5], ["GPU", "host"])
    axes[-1].set_xlabel("µs")
    return figure


LOOPS = {"eager_synchronized": (VERMILION, "synchronised loop"), "eager_asynchronous": (BLUE, "asynchronous loop")}


@styled
def draw_wrapper(simulated: pd.DataFrame, recorded: pd.DataFrame, kernel_us: float, source: str) -> Figure:
    """What two eager loops report of one kernel as the host in front of it gets slower; lines are the formulas.

    simulated: index host_us, one column per loop. recorded: points of experiment `wrapper`, may be empty.
    """
    figure, (left, right) = axes_grid(1, 2, height=3.8)
    host = np.linspace(0, simulated.index.max(), 100)
    formulas = {"eager_synchronized": host + kernel_us, "eager_asynchronous": np.maximum(host, kernel_us)}
    for series, (color, label) in LOOPS.items():
        left.plot(host, formulas[series], color=color, lw=1)
        left.plot(simulated.index, simulated[series], "o", ms=5, color=color, label=label)
    left.axhline(kernel_us, color=GREEN, ls="--", label=f"the kernel: {kernel_us:.0f} µs")
    left.set(xlabel="host µs per call", ylabel="µs reported per call", title="simulated GPU", ylim=(0, None))
    left.legend()
    right.set_title(source)
    if recorded.empty:
        _not_recorded(right)
        return figure
    curves = recorded.pivot_table(index="x", columns="series", values="value")
    for series, (color, label) in LOOPS.items():
        right.plot(curves.index, curves[series], "o-", ms=5, lw=1, color=color, label=label)
    right.plot(curves.index, curves.kernel, color=GREEN, ls="--", label="the kernel, steady")
    right.set(xlabel="host µs that the wrapper adds", ylim=(0, None))
    right.legend()
    return figure


@styled
def draw_graph_sizes(simulated: pd.DataFrame, recorded: pd.DataFrame, source: str) -> Figure:
    """Time per call over the calls in one graph. Both frames hold points (series, x, value); recorded may be empty."""
    figure, axes = axes_grid(1, 2, height=3.8)
    colors = (VERMILION, ORANGE, BLUE, GREEN)
    for ax, points, title in zip(axes, (simulated, recorded), ("simulated GPU", source), strict=True):
        ax.set_title(title)
        if points.empty:
            _not_recorded(ax)
            continue
        for (series, curve), color in zip(points.groupby("series", sort=False), colors, strict=False):
            ax.plot(curve.x, curve.value, "o-", ms=4, lw=1, color=color, label=series.replace("_", " "))
        ax.set(xscale="log", yscale="log", xlabel="calls in one graph")
        ax.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"], minor=False)
        ax.set_xticks([], minor=True)
        ax.legend()
    axes[0].set_ylabel("µs per call")
    return figure


@styled
def draw_l2(simulated: pd.DataFrame, recorded: pd.DataFrame, l2_sets: float, source: str) -> Figure:
    """Left: reported µs over the input sets a benchmark rotates through. Right: bandwidth, warm and cold, over bytes.

    simulated: columns sets, value, true. recorded: points of experiment `working_set`, may be empty.
    """
    figure, (left, right) = axes_grid(1, 2, height=3.8)
    left.plot(simulated.sets, simulated.value, "o-", ms=4, lw=1, color=BLUE, label="reported")
    left.axhline(simulated.true.iloc[0], color=GREEN, ls="--", label="inputs in DRAM: the truth")
    left.axvline(l2_sets, color=GREY, ls=":", label="the sets fill the L2")
    left.set(xlabel="input sets in rotation", ylabel="µs per call", ylim=(0, None), title="simulated GPU")
    left.legend(loc="lower right")
    right.set_title(source)
    if recorded.empty:
        _not_recorded(right)
        return figure
    for (series, curve), color in zip(recorded.groupby("series", sort=False), (ORANGE, BLUE), strict=False):
        right.plot(curve.x / MB, curve.value / 1e3, "o-", ms=4, lw=1, color=color, label=series)
    right.set(xscale="log", xlabel="MB moved per call", ylabel="TB/s")
    right.legend(loc="upper left")
    return figure


MARKS = {"decode": "o", "prefill": "s"}
STUDY = {
    "single": ("x", BLACK),
    "eager_synchronized": ("v", PURPLE),
    "eager_asynchronous": ("1", PURPLE),
    "flush_and_events": ("+", GREEN),
}


@styled
def draw_protocols(
    pairs: pd.DataFrame,
    eager: pd.DataFrame,
    empty_us: tuple[float, float],
    floors: tuple[float, float],
    added_us: float,
    study: pd.DataFrame,
    source: str,
) -> Figure:
    """Picture 1: what a protocol reports against the steady time, and what it added.

    pairs, eager: from `protocol_pairs`; those timed in one run get a black rim. empty_us: an empty kernel's (steady,
    single) µs. floors, added_us: the model max(floor, steady + added) is drawn for each floor. study: points of
    experiment `protocols`, may be empty.
    """
    figure, (left, right) = axes_grid(1, 2, height=6.8, width_ratios=[3, 2])
    for (name, schedule, suite), rows in pairs.groupby(["implementation", "schedule", "suite"]):
        rims = [BLACK if same else "none" for same in rows.same_run]
        style = {"color": color_of(name, schedule), "marker": MARKS[suite], "s": 20, "lw": 0.8, "edgecolors": rims}
        left.scatter(rows.steady, rows.reported, label=f"{label_of(name, schedule)}, {suite}", **style)
        right.scatter(rows.steady, rows.delta, **style)
    left.scatter(eager.steady, eager.reported, marker="^", s=26, color=ORANGE, label="TileLang, one eager call")
    curves = study.pivot_table(index="x", columns="series", values="value") if len(study) else pd.DataFrame()
    for series, (mark, color) in STUDY.items() if len(curves) else ():
        label = f"copies, {series.replace('_', ' ')} ({source})"
        left.plot(curves.steady, curves[series], mark, ms=6, color=color, label=label)
    left.scatter(*empty_us, marker="*", s=130, color=VERMILION, zorder=3, label="empty kernel, single")
    line = np.geomspace(0.5, 5e3, 200)
    left.plot(line, line, color=BLACK, lw=1, ls="--", label="nothing added")
    for delta in (2, 10, 50):
        left.plot(line, line + delta, color=GREY, lw=0.8, ls=":")
        left.text(0.52, 0.55 + delta, f"+ {delta} µs", fontsize=8, color="#666666", va="bottom")
    left.set(xscale="log", yscale="log", xlim=(0.5, 5e3), ylim=(0.5, 5e3))
    left.set(xlabel="steady, µs", ylabel="reported, µs", title="Small kernels are pushed up against the timer's floor")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    right.axhline(0, color=BLACK, lw=1, ls="--")
    line = np.geomspace(5, 200, 200)
    for floor_us, style in zip(floors, ("-", ":"), strict=True):
        label = f"max({floor_us:.1f} µs, steady + {added_us:.1f} µs)"
        right.plot(line, np.maximum(floor_us, line + added_us) - line, color=BLACK, ls=style, lw=1, label=label)
    right.legend()
    right.set(xscale="log", xlim=(5, 200), ylim=(-4, 12), xlabel="steady, µs", ylabel="single − steady, µs")
    right.set_title("What a single call adds is no constant")
    return figure


@styled
def draw_spread(samples: pd.DataFrame, source: str) -> Figure:
    """Repeated samples of one kernel by protocol, up to the 99th percentile: points of experiment `spread`."""
    names = list(dict.fromkeys(samples.series))
    figure, axes = axes_grid(1, len(names), height=3.2)
    for ax, name in zip(axes, names, strict=True):
        values = samples.value[samples.series == name].to_numpy()
        low, median, high, top = np.percentile(values, [10, 50, 90, 99])
        ax.hist(values[values <= top], 50, color=SKY)
        ax.axvspan(low, high, color=GREY, alpha=0.3, label=f"10–90 %: {low:.2f}–{high:.2f} µs")
        ax.axvline(median, color=VERMILION, label=f"median {median:.2f} µs")
        ax.set(xlabel="µs per call", ylabel="samples", title=f"{name} ({source})")
        ax.legend(fontsize=8, title=f"not shown: {(values > top).sum()}, up to {values.max():.1f} µs", title_fontsize=8)
    return figure


@styled
def draw_clock_ramp(recorded: pd.DataFrame, source: str) -> Figure:
    """One kernel's time and the SM clock after a second of idling: points of experiment `clock_ramp`, may be empty."""
    figure, axes = axes_grid(1, 2, height=3.0)
    panels = {"us": ("µs per call", BLUE), "MHz": ("SM clock, MHz", VERMILION)}
    for ax, (unit, (label, color)) in zip(axes, panels.items(), strict=True):
        ax.set_title(source if unit == "us" else "")
        if recorded.empty:
            _not_recorded(ax)
            continue
        points = recorded[recorded.unit == unit]
        ax.plot(points.x, points.value, "o-", ms=4, lw=1, color=color)
        ax.set(
            xlabel="ms since the first call after idling",
            ylabel=label,
            ylim=(0, 1.15 * np.nan_to_num(points.value).max() or 1),
        )
    return figure
