"""Tables and notes that read well in JupyterLab, in rendered HTML and in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Note", "Table", "number"]

_COLORS = {"good": "#2e7d32", "bad": "#c62828", "neutral": "#f9a825"}


def number(x: float | None) -> str:
    """Four significant digits, thousands separated; a dash for None."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if 1e4 <= abs(x) < 1e12 else f"{x:.4g}"


@dataclass(frozen=True)
class Table:
    """A table of strings. Columns after the first are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for first, *others in lines:
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text + [self.caption] * bool(self.caption))

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            sides = ["left"] + ["right"] * (len(cells) - 1)
            pairs = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align:{side}">{escape(c)}</{tag}>' for c, side in pairs)

        head = f"<thead><tr>{row(self.columns, 'th')}</tr></thead>"
        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in self.rows)
        caption = f'<p style="font-size:smaller">{escape(self.caption)}</p>' if self.caption else ""
        return f"<table>{head}<tbody>{body}</tbody></table>{caption}"


@dataclass(frozen=True)
class Note:
    """A titled note with a colored edge; `mood` is good, bad or neutral."""

    mood: str
    title: str
    text: str = ""

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text}" if self.text else self.title

    def _repr_html_(self) -> str:
        text = f'<div style="white-space:pre-wrap">{escape(self.text)}</div>' if self.text else ""
        edge = f"border-left:4px solid {_COLORS[self.mood]};padding:4px 12px;margin:4px 0"
        return f'<div style="{edge}"><b>{escape(self.title)}</b>{text}</div>'
