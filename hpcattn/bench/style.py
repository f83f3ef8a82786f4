"""One look for every figure: Okabe and Ito's colors, which colour-blind readers can tell apart, at laptop width."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLORS", "LABELS", "WIDTH", "axes_grid", "color_of", "label_of", "styled"]

WIDTH = 9.6  # inches
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#999999"

COLORS = {
    "hopper": VERMILION,
    "hopper/static": "#EE9F6B",
    "portable": ORANGE,
    "portable/static": "#F7D48A",
    "reference": GREY,
    "hpc_ops": BLUE,
    "hpc_ops/static": SKY,
    "flash_attn_3": GREEN,
    "flashinfer": PURPLE,
    "torch_sdpa_flash": YELLOW,
    "torch_sdpa_cudnn": BLACK,
    "torch_sdpa_math": GREY,
    "tilelang": PURPLE,
}
LABELS = {
    "hopper": "ours, Hopper",
    "portable": "ours, portable",
    "reference": "reference",
    "hpc_ops": "HPC-Ops",
    "flash_attn_3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "torch_sdpa_flash": "PyTorch FlashAttention-2",
    "torch_sdpa_cudnn": "PyTorch cuDNN",
    "torch_sdpa_math": "PyTorch math",
    "tilelang": "TileLang",
}
PARAMETERS = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.size": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def axes_grid(rows: int = 1, columns: int = 1, *, height: float = 4.2, **kwargs) -> tuple[Figure, list[Axes]]:
    """A figure of laptop width and its axes, row by row."""
    figure, grid = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **kwargs)
    plt.close(figure)  # notebooks show what a cell returns, once
    return figure, list(grid.flat)


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorator of a figure function: draw in this style, leave the reader's settings alone."""

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        with plt.rc_context(PARAMETERS):
            return draw(*args, **kwargs)

    return wrapper


def color_of(implementation: str, schedule: str = "-") -> str:
    """The color of an implementation everywhere in the book."""
    return COLORS.get(f"{implementation}/{schedule}", COLORS.get(implementation, GREY))


def label_of(implementation: str, schedule: str = "-") -> str:
    """Its name in legends."""
    label = LABELS.get(implementation, implementation)
    return label if schedule == "-" else f"{label}, {schedule}"
