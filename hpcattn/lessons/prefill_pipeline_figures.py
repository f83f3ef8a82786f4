"""Figures of lesson 07a: a tile's budget, warps over time, the loop's instructions, tiles, maxima, the ladder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpcattn.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, axes_grid, styled
from hpcattn.lessons import prefill_pipeline as lab
from hpcattn.lessons.fp8_prefill_model import Span

__all__ = ["draw_budget", "draw_ladder", "draw_loop", "draw_maxima", "draw_roles", "draw_tiles"]

KINDS = {
    "exponentials": (VERMILION, "exponentials"), "maxima": (SKY, "row maxima"), "accumulation": (BLUE, "rest"),
    "qk": (GREEN, "Q Kᵀ"), "pv": (ORANGE, "P V"), "K": (PURPLE, "TMA: K"), "V": ("#C9A6D8", "TMA: V"),
}  # fmt: skip
LANES = {3: 0, 4: 1, 0: 2, 1: 3, 2: 4}  # of who: producer's K and V, the two warpgroups, the tensor core


@styled
def draw_budget(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], sums: Sequence[tuple[str, float]]) -> Figure:
    """Picture 2. rows: (resource, parts of (name, clocks)); sums: (name, clocks) of whole kernels, in grey below."""
    figure, (axes,) = axes_grid(height=1.0 + 0.5 * (len(rows) + len(sums)))
    shades = (VERMILION, SKY, ORANGE, GREEN, PURPLE, BLUE)
    for y, (_, parts) in enumerate(rows):
        left = 0.0
        for (part, clocks), color in zip(parts, shades, strict=False):
            axes.barh(y, clocks, left=left, color=color, height=0.62, edgecolor="white")
            if clocks > 27 * len(part):  # it fits
                axes.text(left + clocks / 2, y, part, ha="center", va="center", fontsize=7.5)
            left += clocks
        axes.text(left + 20, y, f"{left:,.0f}", va="center", fontweight="bold")
    for y, (_, clocks) in enumerate(sums, len(rows)):
        axes.barh(y, clocks, color="#CCCCCC", height=0.62, edgecolor=GREY)
        axes.text(clocks + 20, y, f"{clocks:,.0f}", va="center", fontweight="bold")
    axes.axvline(max(sum(n for _, n in parts) for _, parts in rows), color=BLACK, ls=":", lw=1)
    axes.set_yticks(range(len(rows) + len(sums)), [name for name, _ in (*rows, *sums)])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="clocks per tile of 128 queries × 128 keys", title="What a bf16 tile keeps busy, and how long")
    return figure


@styled
def draw_roles(spans: Sequence[Span], start: float, stop: float) -> Figure:
    """Producer, warpgroups and tensor core between two times."""
    figure, (axes,) = axes_grid(height=3.4)
    for who, begin, end, what in spans:
        kind = what[:2] if who == 2 else what[0] if who > 2 else what
        if kind not in KINDS or end <= start or begin >= stop:
            continue
        left, right = max(begin, start) - start, min(end, stop) - start
        color, _ = KINDS[kind]
        axes.barh(LANES[who], right - left, left=left, color=color, height=0.74, edgecolor="white", lw=0.5)
        if who >= 2 and right - left > 150:
            label = what[2:] if who == 2 else f"{what[0]} {what[1:]}"
            text = f"warpgroup {label}" if who == 2 and right - left > 350 else label
            ink = "black" if kind in ("pv", "V") else "white"
            axes.text((left + right) / 2, LANES[who], text, ha="center", va="center", fontsize=7, color=ink)
    names = ["producer: K", "producer: V", "warpgroup 0", "warpgroup 1", "tensor core"]
    axes.set_yticks(range(5), names)
    axes.set(xlim=(0, stop - start), ylim=(4.5, -0.5), xlabel="clocks", title="Who does what (simulated)")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color, _ in KINDS.values()]
    figure.legend(handles, [name for _, name in KINDS.values()], loc="outside lower center", ncols=7, fontsize=8)
    return figure


MARKS = {
    "MUFU": ("MUFU, exponentials", VERMILION), "qk": ("HGMMA, Q Kᵀ", GREEN), "pv": ("HGMMA, P V", ORANGE),
    "F2FP": ("F2FP, P to bf16", BLUE), "FSEL": ("FSEL, causal mask", PURPLE), "FMNMX": ("FMNMX, row maxima", SKY),
    "FMUL": ("FMUL, rescaling O", BLACK), "FFMA": ("FFMA, next exponents", GREY),
}  # fmt: skip


@styled
def draw_loop(lines: Sequence[str]) -> Figure:
    """The loop's machine code from left to right, an instruction a tick; waits for products as lines."""
    figure, (axes,) = axes_grid(height=3.3)
    found: dict[str, list[int]] = {name: [] for name in MARKS}
    waits, n = [], 0
    for line in lines:
        opcode, kind = lab.opcode_of(line), lab.kind_of(line)
        if opcode:
            name = kind if kind in ("qk", "pv") else opcode
            if name in found:
                found[name].append(n)
            if "WARPGROUP.DEPBAR" in line:
                waits.append(n)
            n += 1
    for y, (name, (_, color)) in enumerate(MARKS.items()):
        axes.vlines(found[name], y - 0.38, y + 0.38, color=color, lw=1.3)
    for at, text in zip(waits, ("wait: Q Kᵀ", "wait: P V"), strict=False):
        axes.axvline(at, color=BLACK, lw=1.2, ls="--")
        axes.text(at, -0.75, text, ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(MARKS)), [f"{text} ({len(found[name])})" for name, (text, _) in MARKS.items()])
    axes.set(xlim=(-4, n + 4), ylim=(len(MARKS) - 0.4, -0.7), xlabel="instruction of the loop")
    return figure


@styled
def draw_tiles(q_len: int, kv_len: int) -> Figure:
    """A request's blocks of 128 queries against its tiles of keys, numbered as they are computed."""
    blocks, tiles = -(-q_len // 128), -(-kv_len // 128)
    figure, (axes,) = axes_grid(height=0.9 + 0.42 * blocks)
    for block in range(blocks):
        computed, masked = lab.tiles_by_counting(q_len, kv_len, block)
        for t in range(tiles):
            color = VERMILION if t in masked else SKY if t in computed else "#F0F0F0"
            axes.add_patch(Rectangle((t, block), 0.94, 0.9, facecolor=color, edgecolor=GREY, lw=0.4))
            if t in computed:
                axes.text(t + 0.47, block + 0.46, str(computed[-1] - t), ha="center", va="center", fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in (VERMILION, SKY, "#F0F0F0")]
    axes.legend(handles, ["needs a mask", "computed whole", "never loaded"], loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_yticks(np.arange(blocks) + 0.45, [f"block {b}" for b in range(blocks)])
    axes.set_xticks(np.arange(tiles) + 0.47, range(tiles))
    axes.set(xlim=(-0.1, tiles), ylim=(blocks, -0.1), xlabel="tile of 128 keys")
    axes.set_title(f"{q_len} queries, {kv_len} keys")
    axes.tick_params(length=0)
    return figure


@styled
def draw_maxima(maxima: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """maxima: by kind of scores, (the running maximum, what the kernel subtracts), each `[tiles, rows]`; three rows."""
    figure, panels = axes_grid(1, len(maxima), height=3.0)
    for axes, (kind, (running, kept)) in zip(panels, maxima.items(), strict=True):
        for row, color in enumerate((VERMILION, BLUE, GREEN)):
            axes.step(range(len(running)), running[:, row], where="post", color=color, lw=1, ls=":")
            axes.step(range(len(kept)), kept[:, row], where="post", color=color, lw=1.8)
        axes.set(xlabel="tile, from the diagonal backwards", title=f"{kind} scores")
    panels[0].set_ylabel("base-2 score")
    lines = [panels[0].plot([], [], style, color=GREY)[0] for style in (":", "-")]
    figure.legend(lines, ["running maximum", "what is subtracted"], loc="outside lower center", ncols=2)
    return figure


@styled
def draw_ladder(
    predicted: Mapping[tuple, float], measured: Mapping[tuple, float], names: Mapping[str, str], ceiling: float
) -> Figure:
    """TFLOP/s by (configuration, shape), predicted as outlines, measured filled; ceiling: of a large product."""
    shapes = list(dict.fromkeys(shape for _, shape in predicted))
    figure, panels = axes_grid(1, len(shapes), height=3.6, sharey=True)
    for axes, shape in zip(panels, shapes, strict=True):
        for y, name in enumerate(names):
            value = measured.get((name, shape))
            if value is not None:
                axes.barh(y, value, color=VERMILION if name == lab.LIBRARY else SKY, height=0.62)
                axes.text(12, y, f"{value:.0f}", va="center", fontsize=8, fontweight="bold")
            axes.barh(y, predicted[name, shape], fill=False, edgecolor=BLACK, ls="--", height=0.74, lw=1)
        axes.axvline(ceiling, color=GREY, ls=":", lw=1.5)
        axes.set(xlabel="TFLOP/s", xlim=(0, ceiling * 1.12))
        axes.set_title(f"{shape[0]:,} × {shape[1]:,}", fontsize=9.5)
        axes.set_yticks(range(len(names)), list(names.values()), fontsize=8)
    panels[0].invert_yaxis()
    return figure
