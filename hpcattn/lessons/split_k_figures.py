"""The pictures of lesson 06. Numbers come in as arguments: from a computation in the notebook, or from `data/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from hpcattn.bench.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    axes_grid,
    styled,
)
from hpcattn.lessons.split_k import CLUSTERS, Segment, Span

__all__ = [
    "draw_gantt",
    "draw_line",
    "draw_merges",
    "draw_model",
    "draw_occupancy",
    "draw_push",
    "draw_sweep",
    "draw_tree",
    "draw_workloads",
]

OTHERS = (SKY, "#8FD3B6", "#E8B7D0", "#F7D48A", "#9DB9D6", "#C9E3A8")  # requests of ordinary length, in turn
MERGE_COLORS = {"alone": GREY, "separate": BLUE, "arrive": ORANGE, "push": VERMILION}


def request_color(request: int, lens: Sequence[int]) -> str:
    """Vermilion for requests longer than half of the longest where lengths differ, pale colors in turn for the rest."""
    long = lens[request] * 2 > max(lens) and max(lens) > 2 * min(lens)
    return (VERMILION, ORANGE)[request % 2] if long else OTHERS[request % len(OTHERS)]


@styled
def draw_gantt(
    panels: Mapping[str, Sequence[Span]], lens: Sequence[int], lines: Mapping[str, Mapping[str, float]], sms: int = 132
) -> Figure:
    """Picture 4: SMs over time, one panel for each schedule, colored by request; merges hatched.

    lines[panel][label]: µs at which to draw a line, "floor" in black, the others (recorded) in vermilion.
    """
    figure, grid = axes_grid(1, len(panels), height=5.2, sharey=True)
    end = max(span.stop for spans in panels.values() for span in spans)
    end = max([end, *(us for of_panel in lines.values() for us in of_panel.values())])
    for axes, (title, spans) in zip(grid, panels.items(), strict=True):
        for span in spans:
            look = {"facecolor": request_color(span.request, lens), "lw": 0.15, "edgecolor": "white"}
            if span.merges:
                look = {"facecolor": "none", "edgecolor": BLACK, "hatch": "//////", "lw": 0.2, "zorder": 3}
            axes.add_patch(Rectangle((span.start, span.sm), max(span.stop - span.start, 0.02), 1, **look))
        for label, us in lines.get(title, {}).items():
            floor = label == "floor"
            axes.axvline(us, color=BLACK if floor else VERMILION, lw=1.4, ls="--" if floor else "-", zorder=4)
            side = {"ha": "right", "x": us - end * 0.008} if us > 0.8 * end else {"ha": "left", "x": us + end * 0.008}
            look = side | {"fontsize": 8, "va": "top", "transform": axes.get_xaxis_transform()}
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            axes.text(s=f"{label}, {us:.1f} µs", y=0.99 if floor else 0.93, bbox=back, zorder=5, **look)
        axes.set(xlim=(0, end * 1.03), ylim=(0, sms), xlabel="µs", title=title)
    grid[0].set_ylabel("SM")
    return figure


@styled
def draw_line(tiles: Sequence[int], mapped: Sequence[Sequence[Segment]], lens: Sequence[int]) -> Figure:
    """The line of all tiles, requests above, clusters below; cut requests are hatched."""
    figure, (axes,) = axes_grid(height=2.5)
    starts = np.concatenate([[0], np.cumsum(tiles)])
    cut = {segment.pair for segments in mapped for segment in segments if segment.cut}
    for pair, n in enumerate(tiles):
        look = {"facecolor": request_color(pair, lens), "edgecolor": BLACK, "lw": 0.8}
        axes.add_patch(Rectangle((starts[pair], 1), n, 0.8, hatch="///" if pair in cut else None, **look))
        axes.text(starts[pair] + n / 2, 1.95, f"request {pair}\n{lens[pair]:,} tokens", ha="center", fontsize=8)
    at = 0
    for c, segments in enumerate(mapped):
        n = sum(s.last - s.first for s in segments)
        if n:
            axes.add_patch(Rectangle((at, 0), n, 0.8, facecolor="white", edgecolor=BLACK, lw=1.5))
            inside = at
            for s in segments:
                look = {"facecolor": request_color(s.pair, lens), "edgecolor": GREY, "lw": 0.5}
                axes.add_patch(Rectangle((inside + 0.08, 0.08), s.last - s.first - 0.16, 0.64, **look))
                inside += s.last - s.first
            axes.text(at + n / 2, -0.12, f"cluster {c}", ha="center", va="top", fontsize=8)
            at += n
    for tile in range(int(starts[-1]) + 1):
        axes.plot([tile, tile], [0.86, 0.94], color=GREY, lw=0.6)
    axes.set(xlim=(-0.3, starts[-1] + 0.3), ylim=(-0.6, 2.9))
    axes.axis("off")
    return figure


@styled
def draw_model(rows: Mapping[str, Mapping[str, float]], floors: Mapping[str, float], title: str) -> Figure:
    """µs for each workload; rows[kind][workload]; kinds whose name begins with "recorded" are drawn as bars."""
    figure, (axes,) = axes_grid(height=3.8)
    cases = list(floors)
    marks = iter(zip("sDo^", (BLUE, GREEN, PURPLE, BLACK), strict=True))
    bars = [kind for kind in rows if kind.startswith("recorded")]
    for i, kind in enumerate(bars):
        width = 0.7 / len(bars)
        at = [x - 0.35 + (i + 0.5) * width for x, case in enumerate(cases) if case in rows[kind]]
        heights = [rows[kind][case] for case in cases if case in rows[kind]]
        axes.bar(at, heights, width * 0.94, color=(SKY, ORANGE)[i % 2], label=kind)
    for i, kind in enumerate(kind for kind in rows if kind not in bars):
        mark, color = next(marks)
        offset = (i % len(bars) + 0.5) * 0.7 / len(bars) - 0.35
        at = [x for x, case in enumerate(cases) if case in rows[kind]]
        values = [rows[kind][cases[x]] for x in at]
        axes.plot([x + offset for x in at], values, mark, color=color, label=kind, ms=5.5)
    for x, case in enumerate(cases):
        axes.plot([x - 0.4, x + 0.4], [floors[case]] * 2, color=BLACK, lw=1.2, label="floor" if x == 0 else None)
    axes.set_xticks(range(len(cases)), [case.replace("_", "\n", 1) for case in cases], fontsize=8)
    axes.set(ylabel="µs", title=title)
    axes.legend()
    return figure


LEVELS = ("registers of a thread", "lanes of a warp", "warps of a CTA", "CTAs of a cluster", "clusters of the grid")


@styled
def draw_tree(fans: Sequence[int], notes: Sequence[str]) -> Figure:
    """The same merge, level by level. fans: how many states become one on each level; notes: what moves, beside it."""
    figure, (axes,) = axes_grid(height=4.6)
    height, width = len(fans), 60.0
    positions = [np.array([width / 2])]
    for fan in reversed(fans):
        shown = min(fan, 4) if len(positions[0]) <= 4 else min(fan, 2)
        gap = width / (len(positions[0]) * shown)
        positions.insert(0, np.concatenate([p + gap * (np.arange(shown) - (shown - 1) / 2) for p in positions[0]]))
    colors = (GREY, SKY, BLUE, ORANGE, VERMILION, BLACK)
    for level in range(height):
        below, above = positions[level], positions[level + 1]
        for i, x in enumerate(below):
            axes.plot([x, above[i * len(above) // len(below)]], [level, level + 1], color=GREY, lw=0.7, zorder=1)
    for level, places in enumerate(positions):
        axes.scatter(places, [level] * len(places), s=16 + 12 * level, color=colors[level], zorder=2)
    for level, (fan, note) in enumerate(zip(fans, notes, strict=True)):
        axes.text(width + 2, level + 0.5, f"{LEVELS[level]}: {fan} → 1\n{note}", va="center", fontsize=8.5)
    axes.text(width / 2 + 1.5, height + 0.1, "normalise once, write", fontsize=8.5)
    axes.set(xlim=(-1, width + 46), ylim=(-0.4, height + 0.5))
    axes.axis("off")
    return figure


@styled
def draw_push(cluster: int, rows: int) -> Figure:
    """Whose rows go where: every CTA's state, and the inbox in which each CTA collects its share of all states."""
    figure, (axes,) = axes_grid(height=3.9)
    colors, share, gap = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, "#E8B7D0", GREY), rows // cluster, 3.2
    for cta in range(cluster):
        x = cta * gap * 2
        for row in range(rows):
            look = {"facecolor": colors[cta], "edgecolor": "white", "lw": 0.6}
            axes.add_patch(Rectangle((x, rows - row + 5.0), 3.4, 1, **look))
            axes.text(x + 1.7, rows - row + 5.5, f"row {row}", ha="center", va="center", fontsize=6.5)
            if row % share == 0:
                axes.plot([x, x + 3.4], [rows - row + 6.0] * 2, color=BLACK, lw=0.9)
        axes.text(x + 1.7, rows + 6.4, f"CTA {cta}: its state", ha="center", fontsize=8.5)
        for sender in range(cluster):
            for row in range(share):
                y = 3.2 - (sender * share + row) * (4.0 / rows)
                look = {"facecolor": colors[sender], "edgecolor": "white", "lw": 0.6, "height": 4.0 / rows}
                axes.add_patch(Rectangle((x, y), 3.4, **look))
            arrow = {"arrowstyle": "-|>", "mutation_scale": 7, "lw": 0.7, "color": colors[sender], "zorder": 3}
            start = (sender * gap * 2 + 0.4 + (cta + 0.5) * 2.6 / cluster, 6.0)
            axes.add_patch(FancyArrowPatch(start, (x + 1.7, 3.2 + 4.0 / rows), alpha=0.75, **arrow))
        axes.text(x + 1.7, -1.5, f"inbox of CTA {cta}: rows\n{cta * share} to {cta * share + share - 1} of all",
                  ha="center", va="center", fontsize=8)  # fmt: skip
    axes.set(xlim=(-0.5, cluster * gap * 2), ylim=(-2.6, rows + 7.2))
    axes.axis("off")
    return figure


@styled
def draw_merges(us: Mapping[str, float]) -> Figure:
    """Whole kernels, by the way they merge; us["alone"], us["push_4"], ..."""
    figure, (axes,) = axes_grid(height=3.2)
    sizes = sorted({int(name.split("_")[1]) for name in us if "_" in name})
    kinds = [kind for kind in MERGE_COLORS if kind != "alone"]
    labels = {"separate": "two kernels", "arrive": "last arriver, global memory", "push": "push, cluster"}
    for i, kind in enumerate(kinds):
        at = np.arange(len(sizes)) + (i - 1) * 0.26
        heights = [us.get(f"{kind}_{c}", np.nan) for c in sizes]
        axes.bar(at, heights, 0.24, color=MERGE_COLORS[kind], label=labels[kind])
        for x, y in zip(at, heights, strict=True):
            if np.isfinite(y):
                axes.text(x, y, f"{y:.2f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(us["alone"], color=BLACK, ls="--", lw=1.2, label="no merge at all")
    axes.set_xticks(range(len(sizes)), [f"{c} CTAs" for c in sizes])
    axes.set(ylabel="µs per call", title="The same states, three ways to merge them", ylim=(0, None))
    axes.margins(y=0.12)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


@styled
def draw_occupancy(us: Mapping[tuple[int, int], float], held_us: float) -> Figure:
    """µs of a grid in which every CTA holds an SM for `held_us`, by (cluster size, clusters)."""
    figure, (axes,) = axes_grid(height=3.0)
    for color, size in zip((BLUE, ORANGE, VERMILION), sorted({size for size, _ in us}), strict=False):
        points = sorted((n * size, value) for (c, n), value in us.items() if c == size)
        axes.plot(*zip(*points, strict=True), "o-", color=color, label=f"clusters of {size}")
    for waves in (1, 2):
        axes.axhline(waves * held_us, color=GREY, ls=":", lw=0.9)
    axes.axvline(132, color=BLACK, lw=0.9, ls="--")
    axes.set(xlabel="CTAs, each of which holds an SM", ylabel="µs", title="One wave, or two", ylim=(0, None))
    axes.legend()
    return figure


@styled
def draw_sweep(
    times: Mapping[str, Mapping[int, float]], chosen: Mapping[str, int], floors: Mapping[str, float]
) -> Figure:
    """µs of each workload by cluster size, over its floor; a ring: what the policy takes."""
    figure, (axes,) = axes_grid(height=3.9)
    colors = (GREY, SKY, BLUE, VERMILION)
    for i, size in enumerate(CLUSTERS):
        at = [x - 0.3 + i * 0.2 for x, case in enumerate(times) if size in times[case]]
        axes.bar(at, [t[size] for t in times.values() if size in t], 0.18, color=colors[i], label=f"clusters of {size}")
    for x, (case, of_case) in enumerate(times.items()):
        if chosen.get(case) in of_case:
            size = chosen[case]
            axes.plot(x - 0.3 + CLUSTERS.index(size) * 0.2, of_case[size], "o", mfc="none", mec=BLACK, ms=8,
                      label="the policy's choice" if x == 0 else None)  # fmt: skip
        axes.plot([x - 0.42, x + 0.42], [floors[case]] * 2, color=BLACK, lw=1.2, label="floor" if x == 0 else None)
    axes.set_xticks(range(len(times)), [case.replace("_", "\n", 1) for case in times], fontsize=8)
    axes.set(ylabel="µs per call", ylim=(0, None))
    axes.legend(ncols=2)
    return figure


@styled
def draw_workloads(
    bars: Mapping[str, Mapping[str, float]], floors: Mapping[str, float], colors: Mapping[str, str]
) -> Figure:
    """µs of every workload; bars[implementation][workload]; missing ones leave a gap."""
    figure, (axes,) = axes_grid(height=4.2)
    width = 0.82 / max(1, len(bars))
    for i, (name, times) in enumerate(bars.items()):
        at = [x - 0.41 + (i + 0.5) * width for x, case in enumerate(floors) if case in times]
        axes.bar(at, [times[case] for case in floors if case in times], width * 0.94, color=colors[name], label=name)
    for x, (_, floor) in enumerate(floors.items()):
        axes.plot([x - 0.43, x + 0.43], [floor] * 2, color=BLACK, lw=1.4, label="floor" if x == 0 else None)
    axes.set_xticks(range(len(floors)), [case.replace("_", "\n", 1) for case in floors], fontsize=8)
    axes.set(ylabel="µs per call", title="bf16, one query token", ylim=(0, None))
    axes.legend(ncols=2)
    return figure
