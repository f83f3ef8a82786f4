"""The pictures of lesson 03. Numbers come in as arguments: from a computation in the notebook, or from `data/`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpcattn.bench.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    axes_grid,
    color_of,
    label_of,
    styled,
)
from hpcattn.quantization import FP8, FP8_MAX

__all__ = [
    "draw_accumulation", "draw_e4m3", "draw_merge_tree", "draw_overlap", "draw_rates",
    "draw_splits", "draw_underflow", "draw_walk",
]  # fmt: skip

TILE_COLORS = (BLUE, ORANGE, GREEN, PURPLE)


@styled
def draw_walk(tiles: Sequence[Sequence[float]], steps: Sequence[tuple[float, float]]) -> Figure:
    """Base-2 scores, tile by tile, with the running maximum; and the running sum as a stack, shrinking when m rises.

    steps: (m, l) after each tile.
    """
    figure, (scores, sums) = axes_grid(1, 2, height=3.4, width_ratios=[3, 2])
    start = 0
    for tile, color, (m, _) in zip(tiles, TILE_COLORS, steps, strict=False):
        x = np.arange(start, start + len(tile))
        scores.bar(x, tile, color=color, width=0.8)
        scores.hlines(m, start - 0.5, start + len(tile) - 0.5, color=BLACK, lw=2)
        scores.text(start + len(tile) / 2 - 0.5, m + 0.12, f"m = {m:g}", ha="center", fontweight="bold")
        start += len(tile)
    scores.set(title="Scores, and the running maximum", xlabel="key", ylabel="base-2 score", ylim=(0, 6))
    for after, (m, l) in enumerate(steps):
        bottom = 0.0
        for tile, color in zip(tiles[: after + 1], TILE_COLORS, strict=False):
            height = sum(2.0 ** (s - m) for s in tile)
            sums.bar(after, height, bottom=bottom, color=color, width=0.6)
            bottom += height
        sums.text(after, l + 0.05, f"l = {l:g}", ha="center", fontweight="bold")
    sums.set(title="Their sum, rescaled when m rises", ylabel="l", ylim=(0, 1.18 * max(l for _, l in steps)))
    sums.set_xticks(range(len(steps)), [f"tile {i + 1}" for i in range(len(steps))])
    return figure


@styled
def draw_merge_tree() -> Figure:
    """Where on a Hopper GPU two states meet, level by level."""
    levels = [
        ("thread", "its scores of a row", "registers", 16),
        ("warp", "4 threads share a row", "shuffles", 8),
        ("CTA", "tiles, one after another", "registers", 4),
        ("cluster", "up to 16 CTAs", "distributed shared memory", 2),
        ("grid", "chunks of a request", "global memory", 1),
    ]
    figure, (axes,) = axes_grid(height=3.6)
    for y, (name, who, where, count) in enumerate(levels):
        xs = (np.arange(count) + 0.5) / count
        axes.scatter(xs, [y] * count, s=110 + 60 * y, color=TILE_COLORS[y % 4], zorder=3)
        if y:
            for child in (np.arange(2 * count) + 0.5) / (2 * count):
                axes.plot([child, xs[int(child * count)]], [y - 1, y], color=GREY, lw=1, zorder=1)
        axes.text(-0.03, y, name, ha="right", va="center", fontweight="bold")
        axes.text(1.03, y, f"{who}: through {where}", va="center")
    axes.set(title="One merge, five distances", xlim=(-0.16, 1.62), ylim=(-0.5, len(levels) - 0.5))
    axes.axis("off")
    return figure


@styled
def draw_e4m3(p_scale: float) -> Figure:
    """Every positive e4m3 value, the step to its neighbour, and what probabilities use of them, unscaled and scaled."""
    values = torch.arange(127, dtype=torch.uint8).view(FP8).float().numpy()  # 0x7f is NaN
    figure, (axes,) = axes_grid(height=3.6)
    step = np.diff(values)[1:] / values[1:-1]
    axes.plot(values[1:-1], step, "|-", color=BLUE, ms=9, lw=1)
    axes.set(
        xscale="log", yscale="log", xlim=(2.0**-11, 700), ylim=(0.05, 1.6), xlabel="e4m3 value", ylabel="step / value"
    )
    axes.set_xscale("log", base=2)
    axes.axvspan(2.0**-11, 2.0**-10, color=GREY, alpha=0.35, lw=0)
    axes.text(2.0**-10.95, 0.055, "rounds\nto 0", fontsize=8, va="bottom")
    axes.axvline(FP8_MAX, color=BLACK, lw=1)
    axes.text(FP8_MAX * 0.93, 1.2, f"max {FP8_MAX:g}", ha="right")
    axes.text(2.0**-7.8, 0.9, "subnormals:\nfixed step 2⁻⁹", fontsize=8.5)
    for y, scale, color in ((0.35, 1.0, ORANGE), (0.22, p_scale, GREEN)):
        axes.hlines(y, 2.0**-10, scale, color=color, lw=5)
        label = f"P × {scale:g}: from $2^{{{math.log2(2.0**-10 / scale):g}}}$ to 1"
        axes.text(2.0**-3 if scale == 1 else 4, y * 1.17, label, color=color, ha="center", fontweight="bold")
    axes.set_title("e4m3: three bits of mantissa, eighteen binades, and how much of them P can use")
    return figure


@styled
def draw_underflow(spreads: Sequence[float], errors: Mapping[float, Sequence[float]]) -> Figure:
    """Error of o against the spread of the scores, one line per P scale."""
    figure, (axes,) = axes_grid(height=3.3)
    for (scale, line), color in zip(errors.items(), (VERMILION, ORANGE, GREEN, BLUE), strict=False):
        axes.plot(spreads, line, "o-", color=color, label=f"P × {scale:g}")
    axes.set(yscale="log", xlabel="standard deviation of the scores (natural units)", ylabel="relative error of o")
    axes.set_title("What underflow costs: V of mean 1")
    axes.legend()
    return figure


@styled
def draw_accumulation(
    recorded: Mapping[str, Mapping[float, tuple]], simulated: Mapping[float, Mapping[int, tuple]]
) -> Figure:
    """Errors against the number of keys: recorded[implementation][v_mean], simulated[v_mean][bits]: (keys, errors)."""
    figure, grid = axes_grid(1, 2, height=3.6, sharey=True)
    for axes, mean in zip(grid, (0.0, 1.0), strict=True):
        for name, lines in recorded.items():
            axes.plot(*lines[mean], "o-", color=color_of(name), label=f"{label_of(name)}, recorded", alpha=0.85)
        for (bits, line), style in zip(simulated[mean].items(), (":", "--", "-."), strict=False):
            axes.plot(*line, style, color=BLACK, lw=1.1, label=f"{bits}-bit accumulator, simulated")
        axes.set(xscale="log", yscale="log", xlabel="keys", title=f"V of mean {mean:g}", ylim=(1e-3, 0.7))
        axes.set_xticks([4096, 8192, 32768], ["4k", "8k", "32k"])
        axes.minorticks_off()
    grid[0].set_ylabel("relative error of o")
    figure.legend(*grid[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@styled
def draw_splits(num_sms: int, ctas: Sequence[int]) -> Figure:
    """One square per SM, filled where a CTA runs."""
    figure, grid = axes_grid(1, len(ctas), height=1.9)
    for axes, busy in zip(grid, ctas, strict=True):
        for sm in range(num_sms):
            color = VERMILION if sm < busy else "#e6e6e6"
            axes.add_patch(Rectangle((sm % 22, -(sm // 22)), 0.86, 0.86, color=color))
        axes.set(xlim=(-0.3, 22.3), ylim=(-num_sms / 22 + 0.8, 1.2), aspect="equal")
        axes.set_title(f"{busy} CTAs on {num_sms} SMs: {num_sms - busy} idle")
        axes.axis("off")
    return figure


@styled
def draw_overlap(mma: float, exp: float) -> Figure:
    """Two warpgroups over time on the two units they share: strictly in turn, or each when its unit is free."""
    figure, grid = axes_grid(1, 2, height=2.5, sharey=True)
    tiles = 3
    for axes, overlapped in zip(grid, (False, True), strict=True):
        for w, (shade, phase) in enumerate(((VERMILION, 0.0), (ORANGE, 1.0))):
            for i in range(tiles):
                period = 2 * (mma if overlapped else mma + exp)
                start = i * period + phase * period / 2
                axes.broken_barh([(start, mma)], (1.1, 0.8), color=shade, edgecolor="white")
                axes.broken_barh([(start + mma, exp)], (0.1, 0.8), color=shade, edgecolor="white")
                axes.text(start + mma / 2, 1.5, f"W{w}", ha="center", va="center", color="white", fontsize=8)
                axes.text(start + mma + exp / 2, 0.5, f"W{w}", ha="center", va="center", color="white", fontsize=8)
        axes.set_yticks([0.5, 1.5], ["exponential\nunit", "tensor\ncore"])
        axes.set(xlim=(0, 2 * tiles * (mma + exp)), xlabel="clocks, per score of a warpgroup", ylim=(0, 2.1))
        axes.set_title("overlapped: the slower unit never waits" if overlapped else "serial: one unit always waits")
    return figure


@styled
def draw_rates(rows: Sequence[tuple[str, float, float, float]]) -> Figure:
    """(name, serial bound, overlapped bound, recorded) in TFLOP/s, one bar each."""
    figure, (axes,) = axes_grid(height=0.75 + 0.55 * len(rows))
    for y, (_, serial, overlapped, recorded) in enumerate(rows):
        axes.barh(y, recorded, color=VERMILION, height=0.5, label="recorded" if y == 0 else None)
        for bound, style, label in ((serial, ":", "predicted, serial"), (overlapped, "-", "predicted, overlapped")):
            axes.vlines(bound, y - 0.36, y + 0.36, color=BLACK, ls=style, lw=2, label=label if y == 0 else None)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="TFLOP/s", xlim=(0, 1.08 * max(r[2] for r in rows)), title="The two bounds and what was recorded")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=3)
    return figure
