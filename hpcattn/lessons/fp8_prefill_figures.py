"""Figures of lesson 07b: errors against length, the transpose of a block, a tile's budget, two warpgroups, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpcattn.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, axes_grid, styled
from hpcattn.lessons import fp8_prefill as lab
from hpcattn.lessons.fp8_prefill_model import Costs, Span

__all__ = ["draw_budget", "draw_errors", "draw_latency", "draw_times", "draw_transpose", "draw_turns"]

EVEN, ODD = ("#0072B2", "#9CC9E8"), ("#D55E00", "#F5C6A0")  # (a lane's own, others') bytes of even and of odd d
COLORS = {
    "exponentials": VERMILION, "maxima": SKY, "accumulation": BLUE, "wait for turn": "#DDDDDD", "wait for K": PURPLE,
    "qk": GREEN, "pv": ORANGE,
}  # fmt: skip
NAMES = {"qk": "Q Kᵀ", "pv": "P V", "wait for turn": "its turn awaited", "wait for K": "K awaited"}


@styled
def draw_errors(series: Sequence[tuple[str, str, str, Mapping[float, Mapping[int, float]]]]) -> Figure:
    """series: (label, color, marker or line style, error by mean of V and number of keys)."""
    figure, panels = axes_grid(1, 2, height=4.0, sharey=True)
    for axes, mean in zip(panels, (0.0, 1.0), strict=True):
        for name, color, style, errors in series:
            points = sorted(errors.get(mean, {}).items())
            if points:
                axes.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=7, fillstyle="none")
        axes.set(xscale="log", yscale="log", xlabel="keys", title=f"V of mean {mean:g}")
        keys = sorted({k for *_, errors in series for by_length in errors.values() for k in by_length})
        axes.set_xticks(keys, [f"{k:,}" for k in keys])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of O")
    handles = {h.get_label(): h for axes in panels for h in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


@styled
def draw_transpose(lane: int = 5) -> Figure:
    """A block of 16 tokens by 16 d on its way from V to Vᵀ, one lane's eight bytes in dark colors."""
    figure, panels = axes_grid(1, 4, height=4.1, width_ratios=[16, 9, 9, 16])
    mine = set(np.concatenate([register[lane] for register in lab.loaded_matrices()]).tolist())
    _draw_bytes(panels[0], lab.block_in_memory(), mine, "1. V in memory", "d", "token")
    panels[0].axhline(8, color=BLACK, lw=1.2)
    ticks = np.arange(16)
    panels[0].set_xticks(ticks + 0.5, ticks, fontsize=6.5)
    panels[0].set_yticks(ticks + 0.5, ticks, fontsize=6.5)
    x, y = (register[lane] for register in lab.loaded_matrices())
    _draw_registers(panels[1], "2. ldmatrix.trans", (("x", x), ("y", y)))
    even, odd = (register[lane] for register in lab.sorted_registers())
    _draw_registers(panels[2], "3. two PRMT", (("even", even), ("odd", odd)))
    block = lab.transposed_block()
    _draw_bytes(panels[3], block, mine, "4. Vᵀ after stmatrix", "token at each place along k", "d of each row")
    panels[3].axhline(8, color=BLACK, lw=1.2)
    panels[3].set_xticks(ticks + 0.5, block[0] // lab.HEAD_DIM, fontsize=6.5)
    panels[3].set_yticks(ticks + 0.5, block[:, 0] % lab.HEAD_DIM, fontsize=6.5)
    return figure


def _draw_bytes(axes: Axes, labels: np.ndarray, mine: set[int], title: str, x_label: str, y_label: str) -> None:
    for (row, column), name in np.ndenumerate(labels):
        own, pale = (EVEN, ODD)[name % 2]
        color = own if int(name) in mine else pale
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white", lw=0.7))
    axes.set(xlim=(0, 16), ylim=(16, 0), xlabel=x_label, ylabel=y_label, aspect="equal")
    axes.set_title(title)
    axes.tick_params(length=0)


def _draw_registers(axes: Axes, title: str, registers: Sequence[tuple[str, np.ndarray]]) -> None:
    """One under the other, the lowest byte on top."""
    for x, (name, labels) in enumerate(registers):
        axes.text(x + 0.45, -0.15, name, ha="center", va="bottom", fontweight="bold")
        for y, byte in enumerate(labels):
            token, d = divmod(int(byte), lab.HEAD_DIM)
            axes.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=(EVEN, ODD)[d % 2][0]))
            axes.text(x + 0.45, y + 0.45, f"t {token}\nd {d}", ha="center", va="center", fontsize=8, color="white")
    axes.set(xlim=(-0.1, 2), ylim=(4.1, -0.6), aspect="equal")
    axes.set_title(title)
    axes.axis("off")


@styled
def draw_budget(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> Figure:
    """rows: (resource, parts of (name, clocks)); a tile of 128 queries by 128 keys on one SM."""
    figure, (axes,) = axes_grid(height=0.9 + 0.55 * len(rows))
    shades = (VERMILION, SKY, BLUE, GREEN, ORANGE, PURPLE, GREY)
    for y, (_, parts) in enumerate(rows):
        left = 0.0
        for (part, clocks), color in zip(parts, shades, strict=False):
            axes.barh(y, clocks, left=left, color=color, height=0.62, edgecolor="white")
            if clocks > 90:
                axes.text(left + clocks / 2, y, part, ha="center", va="center", fontsize=7)
            left += clocks
        axes.text(left + 8, y, f"{left:,.0f}", va="center", fontweight="bold")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="clocks per tile of 128 queries × 128 keys", title="What a tile keeps busy, and how long")
    axes.margins(x=0.08)
    return figure


@styled
def draw_turns(runs: Sequence[tuple[str, Sequence[Span]]], width: float = 4200.0) -> Figure:
    """runs: (title, spans); the last `width` clocks but a few, of both warpgroups and the tensor core."""
    figure, panels = axes_grid(len(runs), 1, height=0.7 + 1.55 * len(runs), sharex=True)
    for axes, (title, spans) in zip(panels, runs, strict=True):
        stop = max(span.stop for span in spans if span.who == 0) - 500
        for who, begin, end, what in spans:
            kind = what if who < 2 else what[:2]
            if kind in COLORS and end > stop - width and begin < stop:
                x, end = max(begin, stop - width) - stop + width, min(end, stop) - stop + width
                axes.barh(who, end - x, left=x, color=COLORS[kind], height=0.72, edgecolor="white", lw=0.4)
        axes.set_yticks(range(3), ["warpgroup 0", "warpgroup 1", "tensor core"])
        axes.set(ylim=(2.5, -0.5), xlim=(0, width))
        axes.set_title(title)
    panels[-1].set_xlabel("clocks")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, [NAMES.get(name, name) for name in COLORS], loc="outside lower center", ncols=7, fontsize=8)
    return figure


@styled
def draw_latency(latencies: Sequence[float], lines: Mapping[str, Sequence[float]], other: float) -> Figure:
    """Clocks per tile against the latency added to the other half of a tile; `other`: its arithmetic."""
    figure, (axes,) = axes_grid(height=3.6)
    for (name, clocks), color in zip(lines.items(), (BLUE, VERMILION), strict=True):
        axes.plot(latencies, clocks, "o-", color=color, label=name, markersize=4)
    exponentials = Costs().exponentials
    axes.axvline(exponentials - other, color=GREY, ls=":", label="the other half is as long as the exponentials")
    axes.set(xlabel="latency in the other half of a tile, clocks", ylabel="clocks per tile", title="When turns pay")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


@styled
def draw_times(us: Mapping[tuple[str, str], Mapping[str, float]], names: Mapping[str, str]) -> Figure:
    """us: by (quant, shape), the µs of each configuration; names: labels of configurations, in order."""
    figure, panels = axes_grid(1, max(1, len(us)), height=3.6)
    for axes, ((quant, shape), times) in zip(panels, us.items(), strict=False):
        shown = [name for name in names if name in times]
        colors = [SKY if "turns" not in name else VERMILION for name in shown]
        best = min(times.values())
        axes.barh([names[name] for name in shown], [times[name] for name in shown], color=colors, height=0.65)
        for y, name in enumerate(shown):
            weight = "bold" if times[name] == best else "normal"
            axes.text(times[name], y, f" {times[name]:.1f}", va="center", fontsize=8, fontweight=weight)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set(xlabel="µs", title=f"{quant}\n{shape.replace('x', ' × ')}")
        axes.tick_params(axis="y", labelsize=8, labelleft=axes is panels[0])
    return figure
