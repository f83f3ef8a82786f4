"""The pictures of lesson 04. Numbers come in as arguments: from the model, from a live run or from `data/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpcattn.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, axes_grid, styled
from hpcattn.lessons.pipelining import Trip

__all__ = ["bytes_in_flight", "draw_knee", "draw_ladder", "draw_paths", "draw_ring", "draw_sweep"]

KIB = 1024
ASKED, QUEUED, LANDED, CONSUMED = SKY, "#CFE3F2", "#DDDDDD", ORANGE


@styled
def draw_paths() -> Figure:
    """The way of a tile in steps 1, 2 and 3."""
    figure, grid = axes_grid(1, 3, height=2.9)
    titles = ("1 synchronous: LDG, then STS", "2 cp.async: LDGSTS", "3 TMA: UTMALDG")
    for step, (ax, title) in enumerate(zip(grid, titles, strict=True), 1):
        for y, name, color in ((0, "global memory", "#D9E9F7"), (2.4, "shared memory", "#F8DEC8")):
            ax.add_patch(Rectangle((0, y), 8, 0.8, fc=color, ec="#444444"))
            ax.text(4, y + 0.4, name, ha="center", va="center")
        for i in range(4):
            x = 0.25 + 1.9 * i
            label = ("registers\nof warp" if step == 1 else "addresses\nof warp") + f" {i}"
            if step < 3:
                ax.add_patch(Rectangle((x, 1.25), 1.75, 0.7, fc="white", ec=BLUE, ls="-" if step == 1 else ":"))
                ax.text(x + 0.875, 1.6, label, ha="center", va="center", fontsize=7)
            if step == 1:
                _arrow(ax, (x + 0.4, 0.8), (x + 0.4, 1.25), BLUE)
                _arrow(ax, (x + 0.4, 1.95), (x + 0.4, 2.4), BLUE)
            elif step == 2:
                _arrow(ax, (x + 1.82, 0.8), (x + 1.82, 2.4), VERMILION)
        if step == 3:
            ax.add_patch(Rectangle((0.25, 1.25), 2.6, 0.7, fc="white", ec=BLUE, ls=":"))
            ax.text(1.55, 1.6, "one thread:\nrow, column", ha="center", va="center", fontsize=7.5)
            ax.add_patch(Rectangle((3.7, 1.25), 2.1, 0.7, fc="#E3F1E3", ec="#444444"))
            ax.text(4.75, 1.6, "TMA unit", ha="center", va="center", fontsize=8)
            _arrow(ax, (2.85, 1.6), (3.7, 1.6), BLUE)
            _arrow(ax, (4.75, 0.8), (4.75, 1.25), VERMILION, width=3)
            _arrow(ax, (4.75, 1.95), (4.75, 2.4), VERMILION, width=3)
            ax.text(7, 1.6, "mbarrier\ncounts bytes", ha="center", va="center", fontsize=7.5)
        ax.set(xlim=(-0.1, 8.1), ylim=(-0.1, 3.3))
        ax.set_title(title, fontsize=9.5)
        ax.axis("off")
    return figure


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, width: float = 1.2) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": width})


def bytes_in_flight(trips: Sequence[Trip], tile_bytes: int, times: np.ndarray) -> np.ndarray:
    """Bytes asked for and not landed, at each of `times`."""
    asked, landed = (np.array([getattr(trip, name) for trip in trips]) for name in ("asked", "landed"))
    under_way = (asked[None] <= times[:, None]) & (times[:, None] < landed[None])
    return under_way.sum(1) * tile_bytes


@styled
def draw_ring(
    frames: Mapping[str, Sequence[Trip]],
    *,
    latency: float,
    tile_bytes: int,
    bytes_per_ns: float,
    until: float,
    shares: Sequence[float],
) -> Figure:
    """Picture 3. One column a frame: what memory and each stage of one SM do over time, above the bytes in flight.

    The dashed line is Little's: latency times the SM's share of the bandwidth. until: ns. shares: of the bandwidth.
    """
    figure, grid = axes_grid(2, len(frames), height=4.8, sharex=True, height_ratios=[3, 2])
    rows = max(len({(t.cta, t.stage) for t in trips}) for trips in frames.values())
    times = np.linspace(0, until, 1500)
    for column, (name, trips) in enumerate(frames.items()):
        above, below = grid[column], grid[len(frames) + column]
        places = sorted({(t.cta, t.stage) for t in trips})
        for trip in trips:
            y = -1 - places.index((trip.cta, trip.stage))
            due = min(trip.asked + latency, trip.landed)
            _span(above, y, trip.asked, due, ASKED, until)
            _span(above, y, due, trip.landed, QUEUED, until)
            _span(above, y, trip.landed, trip.begun, LANDED, until)
            _span(above, y, trip.begun, trip.done, CONSUMED, until)
            _span(above, 0, trip.landed - tile_bytes / bytes_per_ns, trip.landed, GREEN, until, edge=True)
            if trip.asked < until:
                above.text(trip.asked / 1e3 + 0.05, y, str(trip.tile), fontsize=7, va="center", clip_on=True)
        several = places[-1][0] > 0
        labels = [f"CTA {cta}: {stage}" if several else f"stage {stage}" for cta, stage in places]
        above.set_yticks([-i for i in range(len(places) + 1)], ["memory", *labels], fontsize=8)
        above.set(xlim=(0, until / 1e3), ylim=(-0.4 - rows, 0.6))
        above.set_title(f"{name}: {shares[column]:.0%}", fontsize=9.5)
        below.fill_between(times / 1e3, bytes_in_flight(trips, tile_bytes, times) / KIB, step="mid", color=ASKED)
        below.axhline(latency * bytes_per_ns / KIB, color=BLACK, ls="--", lw=1.2)
        below.set(xlabel="µs", ylim=(0, 1.15 * rows * tile_bytes / KIB))
    grid[len(frames)].set_ylabel("KiB in flight")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in (GREEN, ASKED, QUEUED, LANDED, CONSUMED)]
    labels = ["memory delivers", "under way", "under way, behind others", "landed", "being consumed"]
    figure.legend([*handles, grid[-1].lines[0]], [*labels, "latency × bandwidth"], loc="outside lower center", ncols=3)
    return figure


def _span(ax: Axes, y: float, start: float, end: float, color: str, until: float, *, edge: bool = False) -> None:
    if start < until and end > start:
        line = {"edgecolor": "white", "lw": 0.6} if edge else {"lw": 0}
        ax.broken_barh([(start / 1e3, (end - start) / 1e3)], (y - 0.4, 0.8), facecolors=color, **line)


@styled
def draw_knee(shares: Mapping[str, Mapping[int, float]], predicted: Mapping[str, int]) -> Figure:
    """The model: share of the bandwidth over stages, a line per setting; a tick where the formula puts the knee."""
    figure, (ax,) = axes_grid(height=3.3)
    for (name, line), color in zip(shares.items(), (VERMILION, ORANGE, BLUE, GREEN), strict=False):
        ax.plot(list(line), list(line.values()), "o-", color=color, label=name)
        if name in predicted:
            ax.axvline(predicted[name], color=color, ls=":", lw=1.2)
    ax.set(xlabel="stages per SM", ylabel="share of the bandwidth", ylim=(0, 1.08))
    ax.set_title("The model: where the bubbles vanish (dotted: the formula, rounded up)")
    ax.legend(loc="lower right")
    return figure


@styled
def draw_ladder(rows: pd.DataFrame, titles: Mapping[str, str], floor_us: float, source: str) -> Figure:
    """µs of each step, a bar for each number of CTAs per SM; rings at the number of stages that is best there."""
    figure, (ax,) = axes_grid(height=3.6)
    if rows.empty:
        return _not_recorded(figure, ax)
    best = rows.groupby(["step", "ctas"]).median_us.min()
    colors = dict(zip((1, 2, 3, 4), (VERMILION, ORANGE, SKY, BLUE), strict=True))
    for x, step in enumerate(titles):
        for ctas, color in colors.items():
            if (step, ctas) in best.index:
                at = x + 0.2 * (ctas - 2.5)
                ax.bar(at, best[step, ctas], width=0.19, color=color, label=f"{ctas} per SM" if x == 0 else None)
    ax.axhline(floor_us, color=BLACK, ls="--", lw=1.2)
    ax.text(len(titles) - 0.48, floor_us, " bytes /\n bandwidth", va="center", fontsize=8)
    ax.set_xticks(range(len(titles)), list(titles.values()))
    ax.set(ylabel="µs", xlim=(-0.55, len(titles) - 0.5), title=f"uniform_4096, bf16: {source}")
    ax.legend(title="CTAs", loc="upper right")
    return figure


@styled
def draw_sweep(rows: pd.DataFrame, floor_us: float, predicted: int, needed: float | None, source: str) -> Figure:
    """µs over stages for the ring and the producer warp, from the floor up; the bandwidth of both over an SM's stages.

    needed: stages that cover a whole turn, for the line of Little's law; None if unknown.
    """
    figure, grid = axes_grid(1, 3, height=3.7)
    panels = {"ring": ("4 TMA ring", "o"), "producer": ("5 producer warp", "s")}
    colors = dict(zip((1, 2, 3, 4), (VERMILION, ORANGE, SKY, BLUE), strict=True))
    if not set(panels) <= set(rows.step):
        return _not_recorded(figure, *grid)
    top = 1.05 * rows.median_us[rows.step.isin(list(panels))].max()
    for ax, (step, (title, mark)) in zip(grid, panels.items(), strict=False):
        for ctas, line in rows[rows.step == step].sort_values("stages").groupby("ctas"):
            label = f"{ctas} CTA{'s' * (ctas > 1)} per SM"
            ax.plot(line.stages, line.median_us, mark + "-", ms=5, color=colors[ctas], label=label)
            points = {"color": colors[ctas], "mfc": colors[ctas] if step == "ring" else "white"}
            grid[2].plot(ctas * line.stages, floor_us / line.median_us, mark, ms=5, **points)
        ax.axhline(floor_us, color=BLACK, ls="--", lw=1.2, label="bytes / bandwidth")
        ax.axvline(predicted, color=GREY, ls=":", label="predicted stages")
        ax.set(xlabel="stages per CTA", ylabel="µs", title=title, ylim=(0.95 * floor_us, top))
    if needed:
        x = np.linspace(0, rows.stages.max(), 100)
        grid[2].plot(x, np.minimum(1, x / needed), color=BLACK, lw=1, label="Little's law, a whole turn")
        grid[2].legend(loc="lower right")
    grid[2].set(xlabel="stages per SM, all CTAs", ylabel="share of the bandwidth", ylim=(0, 1.08), title="both")
    grid[0].legend(loc="upper right", fontsize=8, title=source, title_fontsize=8)
    return figure


def _not_recorded(figure: Figure, *axes: Axes) -> Figure:
    for ax in axes:
        ax.text(0.5, 0.5, "not recorded yet", ha="center", va="center", transform=ax.transAxes, color="#555555")
        ax.set(xticks=[], yticks=[])
    return figure
