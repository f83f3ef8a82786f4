"""The pictures of lesson 05b: banks, the fragment explorer, clocks per tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpcattn.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, axes_grid, styled
from hpcattn.lessons.fp8_operands import (
    HEAD_DIM,
    ldmatrix_trans,
    matrix_addresses,
    operand,
    prmt,
    shared_tile,
    wavefronts,
)

__all__ = ["draw_banks", "draw_clocks", "draw_fragment"]

PARITY = (BLUE, ORANGE)  # of d
PALE = ("#cfe3f1", "#f9e3b8")


@styled
def draw_banks(accesses: Sequence[tuple[str, np.ndarray, int]]) -> Figure:
    """Which words of which banks an access touches: (title, addresses, bytes from each address), a panel each."""
    figure, panels = axes_grid(1, len(accesses), height=3.0, sharey=True)
    for axes, (title, addresses, width) in zip(panels, accesses, strict=True):
        words = {(int(a) + i) // 4 for a in addresses for i in range(width)}
        busy = Counter(word % 32 for word in words)
        for word in words:
            color = VERMILION if busy[word % 32] > 1 else GREEN
            axes.add_patch(Rectangle((word % 32, word // 32), 1, 1, color=color))
        times = wavefronts(addresses, width)
        axes.set_title(f"{title}:\n{times} wavefront{'s' * (times > 1)}")
        axes.set(xlim=(0, 32), ylim=(16, 0), xlabel="bank (4 bytes)")
        axes.set_xticks(range(0, 33, 4))
        axes.set_yticks(np.arange(16) + 0.5, range(16), fontsize=7)
        axes.grid(color=GREY, alpha=0.3, lw=0.5)
    panels[0].set_ylabel("token (a line of 128 bytes)")
    return figure


@styled
def draw_fragment(
    lane: int = 0, warp: int = 0, half: int = 0, group: int = 0, even: int = 0x6420, odd: int = 0x7531
) -> Figure:
    """Eight bytes of one lane on their way: shared memory, after ldmatrix.trans, after prmt, in the operand.

    warp, half and group (of 16 tokens) pick two of the matrices that a warp loads. Blue bytes are of even d.
    """
    byte = 32 * warp + 16 * half
    rows = [matrix_addresses(16 * group + 8 * j, byte) for j in (0, 1)]
    pairs = [ldmatrix_trans(shared_tile(), r) for r in rows]
    figure, (memory, loaded, sorted_, product) = axes_grid(2, 2, height=6.4, width_ratios=[5, 4], height_ratios=[5, 6])
    _draw_memory(memory, rows, np.concatenate([x[lane] for x in pairs]), 16 * group)
    axes_title = f"2. lane {lane} of warp {warp} after ldmatrix.trans"
    _draw_registers(loaded, axes_title, (("x", pairs[0][lane], "3210"), ("y", pairs[1][lane], "7654")))
    results = [prmt(*pairs, selector)[lane] for selector in (even, odd)]
    names = [
        (f"{name} d", result, f"{s:04x}") for name, result, s in zip(("even", "odd"), results, (even, odd), strict=True)
    ]
    _draw_registers(sorted_, f"3. after prmt with {even:#06x} and {odd:#06x}", names)
    _draw_operand(product, operand(even, odd), lane, warp, half, group)
    return figure


def _draw_memory(axes: Axes, rows: Sequence[np.ndarray], mine: np.ndarray, first: int) -> None:
    """Sixteen lines of shared memory; the 16-byte rows of both matrices, and in them the lane's bytes."""
    where = {int(label): address for address, label in enumerate(shared_tile())}
    for addresses, color in zip(rows, ("#dddddd", "#bbbbbb"), strict=True):
        for address in addresses:
            axes.add_patch(Rectangle((address % 128 / 4, address // 128), 4, 1, facecolor=color, edgecolor="white"))
    for label in mine:
        line, byte = divmod(where[int(label)], 128)
        axes.add_patch(Rectangle((byte / 4, line + 0.05), 0.25, 0.9, color=PARITY[label % 2]))
    for name, addresses in zip("xy", rows, strict=True):
        right = addresses[3] % 128 / 4 + 4.6
        axes.text(right, addresses[3] // 128 + 0.5, name, va="center", fontweight="bold")
    axes.set(xlim=(0, 32), ylim=(first + 16, first), xlabel="bank", ylabel="token")
    axes.set_xticks(range(0, 33, 4))
    axes.set_yticks(np.arange(16) + first + 0.5, range(first, first + 16), fontsize=7)
    axes.set_title("1. the swizzled bytes, by bank")
    axes.grid(color=GREY, alpha=0.3, lw=0.5)


def _draw_registers(axes: Axes, title: str, registers: Sequence[tuple[str, np.ndarray, str]]) -> None:
    """(name, labels with the lowest byte first, a digit above each byte with the highest first), a line each."""
    for y, (name, labels, digits) in enumerate(registers):
        axes.text(-0.15, y + 0.35, name, ha="right", va="center", fontweight="bold")
        for x, (label, digit) in enumerate(zip(labels[::-1], digits, strict=True)):
            token, d = divmod(int(label), HEAD_DIM)
            axes.add_patch(Rectangle((x, y), 0.94, 0.7, facecolor=PALE[d % 2], edgecolor=PARITY[d % 2], lw=1.5))
            axes.text(x + 0.47, y + 0.35, f"token {token}\nd {d}", ha="center", va="center", fontsize=8)
            axes.text(x + 0.47, y - 0.03, digit, ha="center", va="bottom", color=VERMILION, fontsize=9)
    axes.set(xlim=(-0.9, 4), ylim=(2, -0.25))
    axes.set_title(title)
    axes.axis("off")


def _draw_operand(axes: Axes, labels: np.ndarray, lane: int, warp: int, half: int, group: int) -> None:
    """Sixteen rows and sixteen k of the operand with the lane's bytes, the d of each row and the token of each k."""
    top, left = 64 * half + 16 * warp, 16 * group
    block = labels[top : top + 16, left : left + 16]
    owner = 4 * (np.arange(16) % 8)[:, None] + np.arange(16) // 4
    for (row, k), label in np.ndenumerate(block):
        token, d = divmod(int(label), HEAD_DIM)
        mine = owner[row, k] == lane
        color = PARITY[d % 2] if mine else PALE[d % 2]
        axes.add_patch(Rectangle((k, row), 1, 1, facecolor=color, edgecolor="white", lw=0.8))
        if mine:
            axes.text(k + 0.5, row + 0.5, f"{token},{d}", ha="center", va="center", color="white", fontsize=6)
    axes.set(xlim=(0, 16), ylim=(16, 0), xlabel="token at each k, from lane to lane", ylabel="d of each row")
    axes.set_xticks(np.arange(16) + 0.5, [str(x // HEAD_DIM) for x in block[0]], fontsize=7)
    axes.set_yticks(np.arange(16) + 0.5, [str(x % HEAD_DIM) for x in block[:, 0]], fontsize=7)
    axes.set_title(f"4. rows {top} to {top + 15} of the operand, k {left} to {left + 15}")


@styled
def draw_clocks(rows: Sequence[tuple[str, float, float | None, float | None]], memory: Mapping[str, float]) -> Figure:
    """(method, predicted, resident, ring) in clocks per tile and SM; memory: what HBM needs for a tile, by method."""
    figure, (axes,) = axes_grid(height=0.9 + 0.75 * len(rows))
    for y, (name, predicted, resident, ring) in enumerate(rows):
        bars = ((resident, SKY, "from shared memory"), (ring, VERMILION, "from memory, through a ring"))
        for offset, (value, color, label) in zip((-0.18, 0.18), bars, strict=True):
            axes.barh(y + offset, value or 0, color=color, height=0.34, label=label if y == 0 else None)
            text = "not recorded yet" if value is None else f"{value:.0f}"
            axes.text((value or 0) + 5, y + offset, text, va="center", fontsize=8)
        for value, style, label in ((predicted, "-", "predicted: wavefronts"), (memory[name], ":", "predicted: HBM")):
            axes.vlines(value, y - 0.42, y + 0.42, color=BLACK, ls=style, label=label if y == 0 else None)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="clocks per tile of 64 tokens and SM", title="What a tile of V costs")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4)
    return figure
