"""The pictures of lesson 04a. What they show comes from layouts, or from a trace of the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpcattn.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, axes_grid, styled
from hpcattn.lessons.primer import BANKS, WORD, Trace, held, registers, shared_offsets, wavefronts

__all__ = ["draw_ownership", "draw_padding", "draw_ring", "draw_swizzle", "draw_trace"]

PALE = ("#D6E8F5", "#FBE7C0", "#D3EFE4", "#F3DEEA")  # one per warp
BANK_GROUPS = ("#56B4E9", "#E69F00", "#8FD3B6", "#F0E442", "#CC79A7", "#9DB7D9", "#F2B48C", "#BFBFBF")
PARITY = ("#D6E8F5", "#FBE7C0")


def _cell(axes: Axes, x: float, y: float, color: str, text: str = "", size: float = 6, bold: bool = False) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=0.6))
    weight = "bold" if bold else "normal"
    axes.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=size, fontweight=weight)


def _frame(axes: Axes, rows: int, columns: int) -> None:
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    axes.set_xticks(np.arange(0, columns, 4) + 0.5, np.arange(0, columns, 4))
    axes.set_yticks(np.arange(0, rows, 4) + 0.5, np.arange(0, rows, 4))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


@styled
def draw_ownership(panels: Sequence[tuple[str, Any, Sequence[int]]], lane: int, window: int = 16) -> Figure:
    """Which lane and register holds each element of the first `window` rows and columns; color = warp.

    panels: (title, layout, shape). One lane of warp 0 is picked out.
    """
    figure, grid = axes_grid(1, len(panels), height=5.5)
    for axes, (title, layout, shape) in zip(grid, panels, strict=True):
        elements = held(layout, shape)
        for warp, thread, register in np.ndindex(*elements.shape[:3]):
            row, column = elements[warp, thread, register]
            if row < window and column < window:
                mine = warp == 0 and thread == lane
                color = VERMILION if mine else PALE[warp % 4]
                _cell(axes, column, row, color, f"{thread}:{register}", bold=mine)
        _frame(axes, min(window, shape[0]), min(window, shape[1]))
        axes.set_title(title)
        axes.set_xlabel(f"lane:register; red: lane {lane} of warp 0; one pale color per warp")
    return figure


@styled
def draw_swizzle(panels: Sequence[tuple[str, Any]], shape: Sequence[int], chunk: int, itemsize: int = 2) -> Figure:
    """Eight rows of 128 bytes in shared memory, in 16-byte chunks: which part of the tile lies on which banks.

    panels: (title, shared layout). Framed: chunk `chunk` of all rows, and what it costs to read them at once.
    """
    figure, grid = axes_grid(1, len(panels), height=3.9)
    per_chunk, group = 16 // itemsize, 16 // WORD
    for axes, (title, layout) in zip(grid, panels, strict=True):
        first = itemsize * shared_offsets(layout, shape)[:8, :: 16 // itemsize]
        for (row, column), address in np.ndenumerate(first[:, :8]):
            line, x = divmod(int(address) // 16, 8)
            _cell(axes, x, line, BANK_GROUPS[column], f"{row}, {column}", size=7.5, bold=column == chunk)
            if column == chunk:
                frame = Rectangle((x + 0.05, line + 0.05), 0.9, 0.9, fill=False, edgecolor=BLACK, linewidth=2, zorder=3)
                axes.add_patch(frame)
        times = wavefronts(first[:, chunk], 16)
        axes.set(xlim=(0, BANKS // group), ylim=(8, 0), aspect="equal")
        axes.set_xticks(np.arange(8) + 0.5, [f"{4 * i}–{4 * i + 3}" for i in range(8)])
        axes.set_yticks(np.arange(8) + 0.5, [str(128 * i) for i in range(8)])
        axes.tick_params(length=0, labelsize=7.5)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="bank", ylabel="byte address of the line")
        axes.set_title(f"{title}: {times} access{'es' if times > 1 else ''}")
    figure.supxlabel(
        f"cell: row of the tile, chunk of {per_chunk} elements; color: chunk; framed: chunk {chunk} of eight rows",
        fontsize=8.5,
    )
    return figure


@styled
def draw_ring(num_tiles: int, stages: int) -> Figure:
    """Tiles on their way round a ring: stage and phase of each."""
    figure, (axes,) = axes_grid(height=0.75 + 0.5 * stages)
    for i in range(num_tiles):
        stage, phase = i % stages, (i // stages) & 1
        axes.add_patch(Rectangle((i, stage), 1, 1, facecolor=PARITY[phase], edgecolor="white", linewidth=1.5))
        axes.text(i + 0.5, stage + 0.5, f"tile {i}\nparity {phase}", ha="center", va="center", fontsize=8.5)
    axes.set(xlim=(0, num_tiles), ylim=(stages, 0))
    axes.set_yticks(np.arange(stages) + 0.5, [f"stage {s}" for s in range(stages)])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{stages} stages: tile i lies in stage i mod {stages}, in round i div {stages} of that stage's barrier"
    )
    return figure


MARKS = {"expect": ("v", BLUE), "land": (".", BLACK), "blocked": ("x", VERMILION), "pass": ("o", GREEN)}
MARKS |= {"arrive": ("^", ORANGE)}
WORDS = {"expect": "expect", "land": "bytes land", "blocked": "wait: blocked", "pass": "wait: passes"}
WORDS |= {"arrive": "arrive"}


@styled
def draw_trace(trace: Trace) -> Figure:
    """One strip per mbarrier over the events: its phase (color: parity), bytes still to come, and who does what."""
    events, names = trace.events, trace.names
    figure, (axes,) = axes_grid(height=1.3 + 0.75 * len(names))
    total = max((e.states[n][2] for e in events for n in e.states), default=1) or 1
    for strip, name in enumerate(names):
        phase, start = 0, 0
        for at, event in [*enumerate(events), (len(events), None)]:
            now = event.states.get(name, (0, 0, 0))[0] if event else None
            if now != phase:
                axes.add_patch(Rectangle((start, strip), at + 1 - start, 0.8, facecolor=PARITY[phase & 1], zorder=0))
                if at + 1 - start > max(2, 0.06 * len(events)):  # else the label has no room
                    axes.text(start + 0.15, strip + 0.13, f"phase {phase}", fontsize=7.5, va="center", color="#444444")
                phase, start = now, at + 1
        missing = [event.states.get(name, (0, 0, 0))[2] / total for event in events]
        axes.fill_between(
            np.arange(len(events)) + 0.5, strip + 0.8, strip + 0.8 - 0.5 * np.array(missing), step="post",
            color=GREY, alpha=0.45, lw=0, label="bytes still to come" if strip == 0 else None,
        )  # fmt: skip
    seen: set[str] = set()
    for at, event in enumerate(events):
        marker, color = MARKS[event.what]
        label = WORDS[event.what] if event.what not in seen else None
        seen.add(event.what)
        y = names.index(event.barrier) + 0.45
        axes.plot(at + 0.5, y, marker, color=color, ms=6, mew=1.8, label=label, zorder=3)
    axes.set(xlim=(0, len(events) + 1), ylim=(len(names) - 0.1, -0.1), xlabel="event, in the emulator's order")
    axes.set_yticks(np.arange(len(names)) + 0.4, names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8.5)
    return figure


@styled
def draw_padding(panels: Sequence[tuple[str, Any, Sequence[int], int]]) -> Figure:
    """Accumulators as wide as they are; filled: what anybody wants. panels: (title, layout, shape, axis of queries)."""
    figure, grid = axes_grid(1, len(panels), height=3.7)
    for axes, (title, layout, shape, query_axis) in zip(grid, panels, strict=True):
        rows, columns = shape
        wanted = (8, columns) if query_axis == 0 else (rows, 8)
        axes.add_patch(Rectangle((0, 0), columns, rows, facecolor="#E6E6E6", edgecolor=GREY))
        axes.add_patch(Rectangle((0, 0), wanted[1], wanted[0], facecolor=BLUE))
        for warp in range(4):
            y = warp * rows / 4
            axes.hlines(y, 0, columns, color="white", lw=1.5)
            axes.text(columns + 1.5, y + rows / 8, f"warp {warp}", va="center", fontsize=8)
        share = wanted[0] * wanted[1] / (rows * columns)
        axes.set(xlim=(-1, 78), ylim=(rows + 1, -1), aspect="equal")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_title(title)
        names = ("query rows", "tokens") if query_axis == 0 else ("tokens", "query rows")
        axes.set_ylabel(f"{rows} {names[0]} (M)")
        axes.set_xlabel(
            f"{columns} {names[1]} (N); {registers(layout, shape)} registers a thread, {100 * share:.3g}% wanted",
            loc="left",
        )
    return figure
