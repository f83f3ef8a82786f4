"""Pictures of lesson 02: block tables and their pages, a pool's occupancy, the bytes of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from hpcattn.bench.style import axes_grid, styled

__all__ = ["REQUEST_COLORS", "draw_block_tables", "draw_page", "draw_pool"]

REQUEST_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
SHARED, FREE = "#555555", "#F2F2F2"


def _pale(color: str, strength: float = 0.25) -> tuple[float, ...]:
    return tuple(strength * c + 1 - strength for c in to_rgb(color))


@styled
def draw_block_tables(
    block_table: Tensor | Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    page_size: int,
    num_pages: int,
    *,
    title: str = "",
    highlight: Mapping[tuple[int, int], str] | None = None,
) -> Figure:
    """Each request's row of the block table above the pool; arrows lead from an entry to its page.

    Unused entries (negative) and unused slots are pale, pages of several requests grey.
    highlight: `(page, slot)` -> text drawn at that slot.
    """
    table = [[int(p) for p in row] for row in block_table]
    lens = [int(n) for n in seq_lens]
    columns = max(len(row) for row in table)
    figure, (axes,) = axes_grid(height=3.0)
    cell = num_pages / (len(table) * (columns + 0.8))
    owners: dict[int, list[tuple[int, int]]] = {}
    for b, row in enumerate(table):
        color, left = REQUEST_COLORS[b % len(REQUEST_COLORS)], b * (columns + 0.8) * cell + 0.2
        axes.text(left, 3.55, f"request {b}: {lens[b]} tokens", color=color, weight="bold")
        for i, page in enumerate(row):
            used = i * page_size < lens[b]
            x = left + i * cell
            axes.add_patch(Rectangle((x, 2.5), cell * 0.94, 0.55, fc=_pale(color) if used else FREE, ec=color, lw=0.8))
            axes.text(x + cell * 0.47, 2.77, str(page), ha="center", va="center", color="black" if used else "#AAAAAA")
            if used:
                last = min(lens[b], (i + 1) * page_size) - 1
                axes.text(x + cell * 0.47, 3.13, f"{i * page_size}–{last}", ha="center", fontsize=7, color="#555555")
                owners.setdefault(page, []).append((b, last - i * page_size + 1))
                shape = dict(arrowstyle="-|>", mutation_scale=9, color=color, alpha=0.75, lw=1.1)
                axes.add_patch(FancyArrowPatch((x + cell * 0.47, 2.48), (page + 0.45, 0.93), **shape))
    for page in range(num_pages):
        mine = owners.get(page, [])
        color = SHARED if len(mine) > 1 else REQUEST_COLORS[mine[0][0] % len(REQUEST_COLORS)] if mine else "#BBBBBB"
        for slot in range(page_size):
            filled = any(slot < n for _, n in mine)
            x = page + 0.9 * slot / page_size
            axes.add_patch(Rectangle((x, 0.3), 0.9 / page_size, 0.6, fc=color if filled else FREE, ec="none"))
        axes.add_patch(Rectangle((page, 0.3), 0.9, 0.6, fill=False, ec=color, lw=1.0))
        axes.text(page + 0.45, 0.02, str(page), ha="center", fontsize=8)
    for (page, slot), text in (highlight or {}).items():
        x = page + 0.9 * (slot + 0.5) / page_size
        axes.annotate(text, (x, 0.6), (x, -0.75), ha="center", fontsize=8, arrowprops=dict(arrowstyle="->", lw=1.0))
    axes.text(num_pages + 0.05, 0.6, "pool", va="center")
    axes.text(num_pages + 0.05, 0.1, "page", fontsize=8, va="center")
    axes.set(xlim=(-0.2, num_pages + 0.7), ylim=(-1.0 if highlight else -0.2, 4.0), title=title)
    axes.axis("off")
    return figure


def draw_pool(axes: Axes, owner: np.ndarray, filled: np.ndarray, *, width: int = 256, title: str = "") -> None:
    """A pool of token slots, `width` to a row: a color per request, pale if claimed but empty, white if free."""
    colors = np.array([to_rgb(c) for c in REQUEST_COLORS])
    image = np.ones((owner.size, 3))
    image[owner >= 0] = 0.22 * colors[owner[owner >= 0] % len(colors)] + 0.78
    image[filled] = colors[owner[filled] % len(colors)]
    axes.imshow(image.reshape(-1, width, 3), aspect="auto", interpolation="nearest")
    axes.set(title=title, xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(True)


def draw_page(
    axes: Axes, parts: Mapping[str, Tensor], head: int, *, origin: int, num_bytes: int, row: int, title: str = ""
) -> None:
    """The bytes of one page, `row` to a line, from byte address `origin` on: the rows of one head are dark.

    parts: name -> one page's view `[page_size, num_kv_heads, head_dim]`; what no part covers is white.
    """
    first = next(iter(parts.values()))
    unit = first.shape[2] * first.element_size()
    image = np.ones((num_bytes // unit, 3))
    lines = row // unit
    for color, (name, part) in zip(("#0072B2", "#D55E00"), parts.items(), strict=False):
        tile = np.array([(part[token, head].data_ptr() - origin) // unit for token in range(part.shape[0])])
        center = ((tile % lines).mean() + 0.5) * unit, (tile // lines + 0.5).mean() * row / 1024
        axes.text(*center, f"{name}\nhead {head}", color="white", ha="center", va="center", fontsize=8)
        for token in range(part.shape[0]):
            for h in range(part.shape[1]):
                at = (part[token, h].data_ptr() - origin) // unit
                image[at] = to_rgb(color) if h == head else _pale(color, 0.14 + 0.12 * (h % 2))
    image = image.reshape(-1, row // unit, 3)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, row, num_bytes / 1024, 0))
    axes.set(title=title, xlabel=f"byte in a line of {row:,} bytes", xticks=range(0, row + 1, row // 4))
