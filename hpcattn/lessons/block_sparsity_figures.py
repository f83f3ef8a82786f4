"""The pictures of lesson 07c. Numbers come in as arguments: from a computation in the notebook, or from `data/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from hpcattn.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, axes_grid, styled
from hpcattn.lessons.block_sparsity import LANES, SHAPES, Fit, Span, makespan

__all__ = ["draw_compaction", "draw_gantt", "draw_lengths", "draw_mask", "draw_parts", "draw_speedups", "draw_sweep"]

ROW_COLORS = (SKY, "#8FD3B6", "#E8B7D0", "#F7D48A")  # the rows of 128 queries of a head
SHAPE_MARKS = dict(zip(SHAPES, "so", strict=True))
QUANT_COLORS = {"type1": VERMILION, "type0": BLUE}


@styled
def draw_mask(mask: Tensor, head: int, visible: Tensor) -> Figure:
    """One head's mask `[q tiles, kv tiles]`: kept, dropped, and never seen."""
    figure, (axes,) = axes_grid(height=1.5)
    rows, columns = mask.shape[2:]
    for r in range(rows):
        for c in range(columns):
            kept = bool(mask[0, head, r, c])
            color = "white" if not visible[r, c] else VERMILION if kept else "#E4E4E4"
            axes.add_patch(Rectangle((c, rows - 1 - r), 0.92, 0.88, facecolor=color, edgecolor=GREY, lw=0.4))
        n = int((mask[0, head, r] != 0).logical_and(visible[r]).sum())
        axes.text(columns + 0.5, rows - 0.56 - r, f"{n} of {int(visible[r].sum())}", va="center", fontsize=8.5)
    axes.set(xlim=(-0.2, columns + 4), ylim=(-0.2, rows + 0.1), title=f"Head {head}: active tiles in red")
    axes.axis("off")
    return figure


@styled
def draw_compaction(flags: Sequence[int], tiles: Sequence[int], places: Sequence[int]) -> Figure:
    """A round: lanes with their tiles above, the list below, an arrow for each lane that stores."""
    figure, (axes,) = axes_grid(height=2.6)
    for lane in range(LANES):
        active = bool(flags[lane])
        look = {"facecolor": VERMILION if active else "#E4E4E4", "edgecolor": GREY, "lw": 0.5}
        axes.add_patch(Rectangle((lane, 2), 0.9, 0.7, **look))
        axes.text(lane + 0.45, 2.35, str(tiles[lane]), ha="center", va="center", fontsize=7.5)
        axes.text(lane + 0.45, 2.95, str(int(active)), ha="center", va="center", fontsize=8)
        axes.add_patch(Rectangle((lane, 0), 0.9, 0.7, facecolor="white", edgecolor=GREY, lw=0.5))
        if active:
            arrow = {"arrowstyle": "-|>", "lw": 0.8, "color": BLACK, "mutation_scale": 7}
            axes.annotate("", (places[lane] + 0.45, 0.75), (lane + 0.45, 1.97), arrowprops=arrow)
            axes.text(places[lane] + 0.45, 0.35, str(tiles[lane]), ha="center", va="center", fontsize=7.5)
    for y, text in ((2.95, "ballot"), (2.35, "tile of the lane"), (0.35, "list")):
        axes.text(-0.4, y, text, ha="right", va="center", fontsize=8.5)
    axes.set(xlim=(-4.2, LANES + 0.2), ylim=(-0.1, 3.3))
    axes.axis("off")
    return figure


@styled
def draw_gantt(panels: Mapping[str, Sequence[Span]], lines: Mapping[str, Mapping[str, float]], sms: int) -> Figure:
    """Picture 4: SMs over time, a panel for each run of items, colored by the item's row of queries.

    A longest item that stands out is red.

    lines[panel][label]: µs at which to draw a line, "even" (perfect balance) in black, the others (measured) in red.
    """
    figure, grid = axes_grid(1, len(panels), height=4.4, sharey=True)
    end = max(makespan(spans) for spans in panels.values())
    end = max([end, *(us for of_panel in lines.values() for us in of_panel.values())])
    for axes, (title, spans) in zip(grid, panels.items(), strict=True):
        last = makespan(spans)
        alone = sum(span.stop == last for span in spans) < 4
        for span in spans:
            longest = alone and span.stop == last
            look = {"facecolor": VERMILION if longest else ROW_COLORS[span.row % len(ROW_COLORS)]}
            axes.add_patch(
                Rectangle((span.start, span.sm), span.stop - span.start, 1, edgecolor="white", lw=0.15, **look)
            )
        for label, us in lines.get(title, {}).items():
            even = label == "even"
            axes.axvline(us, color=BLACK if even else VERMILION, lw=1.4, ls="--" if even else "-", zorder=4)
            side = {"ha": "right", "x": us - end * 0.01} if us > 0.7 * end else {"ha": "left", "x": us + end * 0.01}
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            look = side | {"fontsize": 8, "va": "top", "transform": axes.get_xaxis_transform(), "bbox": back}
            axes.text(s=f"{label}, {us:.1f} µs", y=0.99 if even else 0.91, zorder=5, **look)
        axes.set(xlim=(0, end * 1.04), ylim=(0, sms), xlabel="µs", title=title)
    grid[0].set_ylabel("SM")
    return figure


@styled
def draw_lengths(items: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Tiles of each item, sorted, for several masks; dots at the longest."""
    figure, (axes,) = axes_grid(height=3.2)
    colors = (BLACK, GREEN, ORANGE, VERMILION, PURPLE)
    for color, (name, tiles) in zip(colors, items.items(), strict=False):
        ordered = sorted(map(int, tiles), reverse=True)
        axes.step(range(len(ordered)), ordered, where="post", color=color, label=f"{name}: mean {np.mean(ordered):.1f}")
        axes.axhline(np.mean(ordered), color=color, lw=0.8, ls=":")
        axes.plot(0, ordered[0], "o", color=color, ms=5)
    axes.set(xlabel="items, the longest first", ylabel="tiles", ylim=(0, None), title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


@styled
def draw_parts(ratios: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Longest share of work over the even one; ratios[how items are cut][case]."""
    figure, (axes,) = axes_grid(height=3.0)
    cases = list(next(iter(ratios.values())))
    width = 0.8 / len(ratios)
    for i, (color, (name, of_case)) in enumerate(zip((VERMILION, ORANGE, SKY, GREEN), ratios.items(), strict=False)):
        at = np.arange(len(cases)) - 0.4 + (i + 0.5) * width
        axes.bar(at, [of_case[case] for case in cases], width * 0.92, color=color, label=name)
    axes.axhline(1, color=BLACK, lw=1)
    axes.set_xticks(range(len(cases)), cases)
    axes.set(ylabel="busiest SM over an even share", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


Times = Mapping[tuple, float]  # µs by (shape, drop)


@styled
def draw_sweep(times: Mapping[str, Times], longest: Mapping[tuple, int], fits: Mapping[str, Fit]) -> Figure:
    """µs against tiles of the longest item: times[quant][shape, drop], with the fitted lines; right: its lower end."""
    figure, grid = axes_grid(1, 2, height=4.0)
    ends = (max(longest.values()) * 1.05, max(n for (shape, _), n in longest.items() if shape == SHAPES[1]) * 1.15)
    for axes, end in zip(grid, ends, strict=True):
        top = 1.0
        for quant, of_quant in times.items():
            color = QUANT_COLORS[quant]
            for shape, mark in SHAPE_MARKS.items():
                points = [(longest[key], us) for key, us in of_quant.items() if key[0] == shape and longest[key] < end]
                if points:
                    label = f"{quant}, {shape[0]} x {shape[1]:,}"
                    axes.plot(
                        *zip(*points, strict=True),
                        mark,
                        color=color,
                        mfc="white" if mark == "o" else color,
                        label=label,
                    )
                    top = max(top, *(us for _, us in points))
            if quant in fits:
                axes.plot([0, end], [fits[quant].us(0), fits[quant].us(end)], "--", color=color, lw=1)
        axes.set(xlim=(0, end), ylim=(0, top * 1.08), xlabel="tiles of the longest item", ylabel="µs")
    grid[0].set_title("Measured time against the longest item")
    grid[1].set_title("The same, near zero")
    if grid[0].get_legend_handles_labels()[0]:
        grid[0].legend()
    return figure


@styled
def draw_speedups(
    bounds: Mapping[tuple, float], predicted: Mapping[tuple, float], measured: Mapping[str, Times]
) -> Figure:
    """Speed-up over dense by drop probability, a panel for each shape: skipped work, longest item, model, measured."""
    figure, grid = axes_grid(1, len(SHAPES), height=4.0, sharey=True)
    for axes, shape in zip(grid, SHAPES, strict=True):
        drops = sorted({drop for s, drop in bounds if s == shape})
        axes.plot(drops, [1 / (1 - d) for d in drops], ":", color=BLACK, label="skipped work, 1 / (1 − p)")
        axes.plot(drops, [bounds[shape, d] for d in drops], "--", color=GREEN, label="longest item")
        if predicted:
            axes.plot(
                drops, [predicted[shape, d] for d in drops], "-", color=ORANGE, label="longest item and fixed cost"
            )
        for quant, of_quant in measured.items():
            points = [(d, of_quant[shape, 0.0] / of_quant[shape, d]) for d in drops if (shape, d) in of_quant]
            if points:
                mark = "os"[quant == "type0"]
                axes.plot(*zip(*points, strict=True), mark, color=QUANT_COLORS[quant], label=f"measured, {quant}")
        axes.set(xlabel="drop probability", title=f"{shape[0]} queries, {shape[1]:,} keys", yscale="log")
        axes.set_yticks([1, 2, 3, 4, 6, 10], ["1", "2", "3", "4", "6", "10"])
        axes.minorticks_off()
    grid[0].set_ylabel("times faster than dense")
    if grid[0].get_legend_handles_labels()[0]:
        grid[0].legend()
    return figure
