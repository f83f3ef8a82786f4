"""The pictures of lesson 05. Numbers come in as arguments: from a computation in the notebook, or from `data/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
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
    styled,
)

__all__ = ["draw_budget", "draw_operands", "draw_resident", "draw_row_of_scores", "draw_rows"]

WARP_COLORS = (SKY, ORANGE, "#8FD3B6", "#E8B7D0")
RESOURCE_COLORS = {"DRAM": BLUE, "tensor cores": VERMILION, "exponential": GREEN, "shared memory": ORANGE}
KERNEL_COLORS = {"padded": BLUE, "swapped": VERMILION, "swapped_2_stages": PURPLE}


@styled
def draw_operands(rows: int) -> Figure:
    """The two products of a tile, queries on M (above) and tokens on M (below), to scale; padding is hatched."""
    figure, grid = axes_grid(2, 2, height=5.6)
    padded = (
        ("S = Q Kᵀ", ("Q", 64, 128, "rows"), ("Kᵀ", 128, 64, None), ("S", 64, 64, "rows")),
        ("O += P V", ("P", 64, 64, "rows"), ("V", 64, 128, None), ("O", 64, 128, "rows")),
    )
    swapped = (
        ("Sᵀ = K Qᵀ", ("K", 64, 128, None), ("Qᵀ", 128, 8, None), ("Sᵀ", 64, 8, None)),
        ("Oᵀ += Vᵀ Pᵀ", ("Vᵀ", 128, 64, None), ("Pᵀ", 64, 8, None), ("Oᵀ", 128, 8, None)),
    )
    for axes, (title, a, b, c) in zip(grid, (*padded, *swapped), strict=True):
        axes.set_title(title)
        x = 0
        for (name, height, width, part), sign in zip((a, b, c), ("×", "=", ""), strict=True):
            _matrix(axes, x, name, height, width, rows if part else height)
            x += width + 16
            if sign:
                axes.text(x - 8, 64, sign, ha="center", va="center", fontsize=14)
                x += 4
            x += 8 if width < 20 else 0
        axes.set(xlim=(-8, 372), ylim=(136, -26), aspect="equal")
        axes.axis("off")
    figure.suptitle(f"{rows} query rows: 64 on M, or {rows} on N", x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure


def _matrix(axes: Axes, x: float, name: str, height: int, width: int, useful: int) -> None:
    """A matrix with its top left corner at x, middle at 64; rows from `useful` on are padding."""
    top = 64 - height / 2
    axes.add_patch(Rectangle((x, top), width, height, facecolor="white", edgecolor=GREY, hatch="////"))
    axes.add_patch(Rectangle((x, top), width, useful, facecolor=SKY, edgecolor=BLACK))
    back = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
    if width > 20:
        axes.text(x + width / 2, 64, f"{name}\n{height} × {width}", ha="center", va="center", fontsize=8, bbox=back)
    else:
        axes.text(x + width / 2, top - 3, f"{name}\n{height} × {width}", ha="center", va="bottom", fontsize=8)


@styled
def draw_row_of_scores(place: Callable[[int, int, int], tuple[int, int]], row: int) -> Figure:
    """Which warp owns which score of a tile, queries on M and tokens on M; the scores of one query row show their lane.

    place(thread, register, n): (row, column) of the accumulator.
    """
    figure, (left, right) = axes_grid(1, 2, height=6.6, width_ratios=[3, 2])
    for axes, n, swapped in ((left, 64, False), (right, 8, True)):
        owner = np.full((64, n), -1)
        for thread in range(128):
            for register in range(n // 2):
                owner[place(thread, register, n)] = thread
        for (y, x), thread in np.ndenumerate(owner):
            mine = (x if swapped else y) == row
            face = WARP_COLORS[thread // 32]
            size = {"width": 1, "height": 1, "facecolor": face, "alpha": 1 if mine else 0.3}
            axes.add_patch(Rectangle((x, y), edgecolor=BLACK if mine else "white", lw=0.6 if mine else 0.15, **size))
            if mine and swapped:
                axes.text(x + 0.5, y + 0.52, str(thread % 32), ha="center", va="center", fontsize=5.5)
        axes.set(xlim=(0, n), ylim=(64, 0), xlabel="query row" if swapped else "token")
        axes.set_ylabel("token" if swapped else "query row")
    lanes = sorted({t % 32 for t in range(128) for r in range(32) if place(t, r, 64)[0] == row})
    left.set_title(f"S = Q Kᵀ: row {row} in lanes {lanes[0]} to {lanes[-1]}")
    left.set_aspect("equal")
    right.set_title(f"Sᵀ = K Qᵀ: row {row}, with lanes")
    right.set_xticks(range(9))
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color in WARP_COLORS]
    figure.legend(handles, [f"warp {i}" for i in range(4)], loc="outside lower center", ncols=4)
    return figure


@styled
def draw_budget(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Picture 2: panels[dtype][kernel][resource] in clocks; dotted: the sum."""
    groups = max(len(kernels) for kernels in panels.values())
    figure, grid = axes_grid(1, len(panels), height=0.9 + 0.78 * groups, sharey=True)
    for axes, (dtype, kernels) in zip(grid, panels.items(), strict=True):
        for y, clocks in enumerate(kernels.values()):
            for i, (resource, value) in enumerate(clocks.items()):
                at = y + (1.5 - i) * -0.19
                label = resource if y == 0 else None
                binds = value == max(clocks.values())
                axes.barh(at, value, 0.18, color=RESOURCE_COLORS[resource], label=label)
                weight = "bold" if binds else "normal"
                axes.text(value, at, f" {value:,.0f}", va="center", fontsize=7.5, fontweight=weight)
            axes.plot([sum(clocks.values())] * 2, [y - 0.42, y + 0.42], color=BLACK, lw=1.2, ls=":")
        axes.set_yticks(range(len(kernels)), list(kernels))
        axes.set(xlabel="clocks per tile (bold: the longest; dotted: the sum)", title=dtype)
        axes.margins(x=0.14, y=0.01)
    grid[0].invert_yaxis()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@styled
def draw_resident(
    predicted: Mapping[str, tuple[float, float]], measured: Mapping[int, Mapping[str, float]], dram: float
) -> Figure:
    """Clocks that a tile costs an SM once it is in shared memory.

    predicted[kernel]: (longest resource, sum); measured[CTAs per SM][kernel]; dram: clocks in which a tile arrives.
    """
    figure, (axes,) = axes_grid(height=1.2 + 0.62 * len(predicted))
    width = 0.8 / max(1, len(measured))
    for y, (low, high) in enumerate(predicted.values()):
        axes.plot([low, high], [y - 0.42] * 2, color=GREY, lw=4, label="longest resource to sum" if y == 0 else None)
    for i, (ctas, clocks) in enumerate(measured.items()):
        for y, kernel in enumerate(predicted):
            at, value = y - 0.32 + (i + 0.5) * width, clocks[kernel]
            label = f"measured, {ctas} CTA{'s' if ctas > 1 else ''} per SM" if y == 0 else None
            axes.barh(at, value, width * 0.9, color=(VERMILION, ORANGE)[i % 2], label=label)
            axes.text(value, at, f" {value:,.0f}", va="center", fontsize=8)
    axes.axvline(dram, color=BLUE, lw=1.5, ls="--", label="DRAM delivers a tile")
    axes.set_yticks(range(len(predicted)), [name.replace("_n", ", N = ") for name in predicted])
    axes.set_ylim(len(predicted) - 0.4, -0.6)
    axes.set(xlabel="clocks per tile and SM", title="A tile that is already there", xlim=(0, None))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
    return figure


@styled
def draw_rows(rows: Sequence[int], times: Mapping[str, Mapping[int, float]], floor_us: Sequence[float]) -> Figure:
    """µs against query rows; times[kernel][rows]; floor_us: bytes over bandwidth, for each of `rows`."""
    figure, (axes,) = axes_grid(height=3.8)
    axes.plot(rows, floor_us, color=BLACK, ls="--", lw=1.2, label="bytes over bandwidth")
    for name, line in times.items():
        label = name.replace("_2_stages", ", two stages")
        axes.plot(list(line), list(line.values()), "o-", color=KERNEL_COLORS[name], label=label)
    for n in (8, 16, 32, 64):
        axes.axvline(n, color=GREY, lw=0.7, ls=":")
        axes.text(n, 1.01, f"N = {n}", transform=axes.get_xaxis_transform(), ha="center", fontsize=8, color=GREY)
    axes.set(xlabel="query rows on a KV head, S · G", ylabel="µs per call", ylim=(0, None))
    axes.set_xticks(rows)
    axes.legend(loc="lower right")
    return figure
