"""Lesson 01, naive attention: bytes that kernels request, the checker of the bytes formula, measurements, pictures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import interpreter

from hpcattn.bench import records
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, package_version, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.style import BLUE, GREY, ORANGE, SKY, VERMILION, axes_grid, styled
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.cache import PackedKV
from hpcattn.kernels.jit import PortableFunction
from hpcattn.kernels.portable.naive import naive_attention
from hpcattn.kernels.portable.online import online_attention
from hpcattn.lessons import recording
from hpcattn.lessons.display import Table
from hpcattn.lessons.recording import RECORDED
from hpcattn.reference import attention_prefill_reference, relative_error

__all__ = [
    "CONTENDERS",
    "LENGTHS",
    "RECORDED",
    "Traffic",
    "check_naive_bytes",
    "count_traffic",
    "draw_causal",
    "draw_passes",
    "draw_programs",
    "draw_tile",
    "measure_lengths",
    "record",
    "recorded",
]


# --- Bytes requested by kernels -------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Bytes that interpreted kernels requested, per kernel name.

    Requested: element size times the unmasked lanes of every `tl.load` and `tl.store` of every program. A byte that is
    loaded twice counts twice; which requests a GPU's caches answer instead of its DRAM is a question of its own.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.loads.total() + self.stores.total()

    def table(self, caption: str = "") -> Table:
        """Loads, stores and their sum per kernel, in bytes."""
        names = list(dict.fromkeys([*self.loads, *self.stores]))
        rows = [(n, self.loads[n], self.stores[n], self.loads[n] + self.stores[n]) for n in names]
        rows.append(("all", self.loads.total(), self.stores.total(), self.total))
        columns = ["kernel", "loaded, bytes", "stored, bytes", "together"]
        return Table(columns, [[name, *(f"{n:,}" for n in numbers)] for name, *numbers in rows], caption)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """While active, every `hpcattn.kernels.jit.jit` kernel that is interpreted adds what it requests to the result.

    Atomics are not counted. Compiled launches leave no trace here: give the kernels CPU tensors.
    """
    traffic, running = Traffic(), []
    builder = interpreter.interpreter_builder
    launch, load, store = PortableFunction.run, builder.create_masked_load, builder.create_masked_store

    def count(bytes_of: Counter[str], pointers, mask) -> None:
        lanes = np.count_nonzero(np.broadcast_to(mask.data, pointers.data.shape))
        bytes_of[running[-1]] += int(lanes) * max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def counted_load(pointers, mask, *rest):
        count(traffic.loads, pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers, value, mask, *rest):
        count(traffic.stores, pointers, mask)
        return store(pointers, value, mask, *rest)

    def named_launch(self, *args, **kwargs):
        running.append(self.__name__)
        try:
            return launch(self, *args, **kwargs)
        finally:
            running.pop()

    with (
        patch.object(PortableFunction, "run", named_launch),
        patch.object(builder, "create_masked_load", counted_load),
        patch.object(builder, "create_masked_store", counted_store),
    ):
        yield traffic


BytesFormula = Callable[[int, int, int, int, int, bool, int], int]


def check_naive_bytes(formula: BytesFormula, seed: int = 0) -> None:
    """Compare `formula(Lq, Lkv, Hq, Hkv, D, causal, score_bytes)` with the bytes that the kernels of
    `hpcattn.kernels.portable.naive` request, counted while they run interpreted on three random shapes.

    q, k, v are bf16; the scores have `score_bytes` = 4 (float32) or 2 (bf16). Raises AssertionError with the first
    shape on which the two differ.
    """
    for shape in _random_shapes(seed):
        traffic, answer = _requested(**shape), formula(*shape.values())
        if answer != traffic.total:
            call = ", ".join(f"{name}={value}" for name, value in shape.items())
            raise AssertionError(
                f"naive_bytes({call})\nyour formula:  {answer!r}\nthe kernels:   {traffic.total}\n\n{traffic.table()}"
            )


def _random_shapes(seed: int) -> Iterator[dict[str, int | bool]]:
    """Three shapes with GQA, none a multiple of a tile: few queries, few keys, several tiles of both."""
    rng = random.Random(seed)
    for q_range, kv_range, causal, score_bytes in (
        ((3, 30), (130, 190), True, 4),
        ((66, 80), (3, 60), False, 2),
        ((66, 80), (130, 190), True, 2),
    ):
        kv_heads, group = rng.choice(((1, 2), (1, 3), (2, 2)))
        yield {
            "Lq": rng.randint(*q_range), "Lkv": rng.randint(*kv_range), "Hq": kv_heads * group, "Hkv": kv_heads,
            "D": rng.choice((16, 32, 64)), "causal": causal, "score_bytes": score_bytes,
        }  # fmt: skip


@cache
def _requested(Lq: int, Lkv: int, Hq: int, Hkv: int, D: int, causal: bool, score_bytes: int) -> Traffic:
    q, k, v = (torch.zeros(n, h, D, dtype=torch.bfloat16) for n, h in ((Lq, Hq), (Lkv, Hkv), (Lkv, Hkv)))
    with count_traffic() as traffic:
        naive_attention(q, k, v, causal=causal, score_dtype={2: torch.bfloat16, 4: torch.float32}[score_bytes])
    return traffic


# --- Measurements ---------------------------------------------------------------------------------------------------

LENGTHS = (1024, 2048, 4096, 8192, 16384)
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 128


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own fused attention over `[tokens, heads, dim]`: FlashAttention-2 on a GPU."""
    backend = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


# name of the case -> (column `implementation`, call). Naive comes with float32 scores (correct) and with bf16 scores
# (at the error bound of 4e-3, and past it where scores are sharper; timed because they test the model of bytes).
CONTENDERS: dict[str, tuple[str, Callable[..., Tensor | tuple[Tensor, Tensor]]]] = {
    "naive": ("portable", naive_attention),
    "naive_bf16": ("portable", partial(naive_attention, score_dtype=torch.bfloat16)),
    "online": ("portable", online_attention),
    "sdpa": ("torch_sdpa_flash", _sdpa),
}


def measure_lengths(
    lengths: Sequence[int] = LENGTHS,
    *,
    device: torch.device | str = "cuda",
    heads: tuple[int, int, int] = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM),
    replays: int = 10,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time causal bf16 self-attention of one sequence, in the steady protocol; rows of table `records`.

    Cases are `<name>_<length>` with the names of `CONTENDERS`; they take turns except that those which fill the memory
    (naive) have a graph to themselves. heads: (num_q_heads, num_kv_heads, head_dim).
    """
    origin = provenance(device, new_run_id(), commit)
    rows = [row for n in lengths for row in _measure_length(n, device, heads, replays, origin)]
    return pd.DataFrame(rows, columns=records.COLUMNS)


def _measure_length(
    length: int, device: torch.device | str, heads: tuple[int, int, int], replays: int, origin: dict[str, str]
) -> Iterator[Record]:
    errors = {name: 0.0 for name in CONTENDERS}
    for v_mean in (0.0, 1.0):
        for name, error in _errors(_inputs(length, heads, device, v_mean=v_mean)).items():
            errors[name] = max(errors[name], error)
    _release(device)
    copies = copies_to_exceed_l2(sum(x.nbytes for x in _inputs(length, heads, device)), l2_bytes(device))
    inputs = [_inputs(length, heads, device, seed=seed) for seed in range(copies)]
    flops = 4 * heads[2] * heads[0] * length * (length + 1) // 2
    for group in (["naive"], ["naive_bf16"], ["online", "sdpa"]):
        calls = {name: [partial(CONTENDERS[name][1], *x) for x in inputs] for name in group}
        timings = measure("steady", calls, timer_for(device), replays=replays)
        _release(device)
        for name, timing in timings.items():
            implementation = CONTENDERS[name][0]
            yield Record(
                suite="prefill", case=f"{name}_{length}", dtype="bf16", quant="-", layout="NHD", num_query_tokens=0,
                page_size=0, schedule="-", implementation=implementation, protocol="steady",
                median_us=timing.median_us, p10_us=timing.p10_us, p90_us=timing.p90_us, floor_us=timing.floor_us,
                tflop_per_s=flops / timing.median_us * 1e-6, rel_error=errors[name], sm_clock_mhz=timing.sm_clock_mhz,
                peer_version="-" if implementation == "portable" else package_version("torch"), **origin,
            )  # fmt: skip


def _release(device: torch.device | str) -> None:
    """Give the scores' memory back: each stream and each graph would otherwise keep its own."""
    if is_cuda(device):
        torch.cuda.empty_cache()


def _inputs(
    length: int, heads: tuple[int, int, int], device: torch.device | str, *, seed: int = 0, v_mean: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    random_state = torch.Generator(device).manual_seed(seed)

    def normal(num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, heads[2], generator=random_state, device=device).to(torch.bfloat16)

    return normal(heads[0]), normal(heads[1]), normal(heads[1]) + v_mean


def _errors(inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Relative error of each contender against the float64 oracle."""
    q, k, v = inputs
    starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    expected, _ = attention_prefill_reference(q, PackedKV(k, v), None, starts, None)
    results = {name: call(q, k, v) for name, (_, call) in CONTENDERS.items()}
    return {name: relative_error(o[0] if isinstance(o, tuple) else o, expected) for name, o in results.items()}


def record(path: Path | str = RECORDED, **kwargs) -> pd.DataFrame:
    """`measure_lengths(**kwargs)`, appended to a CSV file of table `records`.

    On an H200: `python -c "from hpcattn.lessons.naive import record; print(record())"`
    """
    return recording.append(path, measure_lengths(**kwargs))


def recorded(path: Path | str = RECORDED) -> pd.DataFrame:
    """The newest recorded rows of this lesson; none if nobody has measured yet."""
    frame = records.latest(records.load(path))
    return frame[frame.case.str.fullmatch("|".join(f"{name}_[0-9]+" for name in CONTENDERS))]


# --- Pictures -------------------------------------------------------------------------------------------------------

PROGRAM_COLORS = (SKY, ORANGE, "#8FD3B6", "#E8B7D0")


@styled
def draw_programs(owner: Tensor, n: int, block: int) -> Figure:
    """Which program wrote which element. owner: int `[elements]`, -1 where none did; the array has `n` elements."""
    figure, (axes,) = axes_grid(height=1.7)
    for i, program in enumerate(owner.tolist()):
        written = program >= 0
        color = PROGRAM_COLORS[program % len(PROGRAM_COLORS)] if written else "white"
        axes.add_patch(Rectangle((i, 0), 1, 1, facecolor=color, edgecolor="black", hatch=None if i < n else "///"))
        back = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
        axes.text(i + 0.5, 0.5, str(i), ha="center", va="center", bbox=back)
    for program in range(-(-len(owner) // block)):
        axes.annotate(
            "", (program * block + 0.08, 1.25), ((program + 1) * block - 0.08, 1.25), arrowprops={"arrowstyle": "<->"}
        )
        axes.text((program + 0.5) * block, 1.35, f"program {program}", ha="center", va="bottom")
    if n < len(owner):
        axes.text((n + len(owner)) / 2, -0.15, "masked", ha="center", va="top")
    _frame(axes, (-0.2, len(owner) + 0.2), (-0.6, 1.9))
    axes.set_aspect("equal")
    return figure


@styled
def draw_tile(addresses: Tensor, rows: int, columns: int, stride: int) -> Figure:
    """A tile of a row-major matrix: its elements' addresses in the matrix and along memory. addresses: int `[m, n]`."""
    figure, (left, right) = axes_grid(1, 2, height=2.3, width_ratios=[2, 3])
    tile = set(addresses.flatten().tolist())
    for address in range(rows * stride):
        row, column = divmod(address, stride)
        inside, padding = address in tile, column >= columns
        style = {"facecolor": ORANGE if inside else "white", "edgecolor": GREY, "hatch": "///" if padding else None}
        left.add_patch(Rectangle((column, row), 1, 1, **style))
        back = {"facecolor": style["facecolor"], "edgecolor": "none", "pad": 1}
        left.text(column + 0.5, row + 0.5, str(address), ha="center", va="center", fontsize=8, bbox=back)
        right.add_patch(Rectangle((address, 0), 1, 1, **style))
    _frame(left, (-0.1, stride + 0.1), (rows + 0.1, -0.1))
    _frame(right, (-0.5, rows * stride + 0.5), (2.0, -0.9))
    left.set_title("the matrix, with addresses")
    right.set_title("memory, one row after the other", y=0.75)
    for row in addresses.tolist():
        right.text((row[0] + row[-1] + 1) / 2, 1.3, f"{row[0]}–{row[-1]}", ha="center", va="top", fontsize=8)
    left.set_aspect("equal")
    return figure


@styled
def draw_causal(q_len: int, kv_len: int) -> Figure:
    """Causal masks: a whole sequence, its last `q_len` queries aligned bottom-right, and the wrong alignment."""
    figure, panels = axes_grid(1, 3, height=3.0, width_ratios=[1, 1, 1])
    square = torch.ones(kv_len, kv_len).tril()
    bottom_right, top_left = square[-q_len:], torch.ones(q_len, kv_len).tril()
    titles = ("all queries", f"the last {q_len}: bottom-right", "top-left: wrong")
    for axes, mask, title, color in zip(
        panels, (square, bottom_right, top_left), titles, (BLUE, BLUE, VERMILION), strict=True
    ):
        for i, j in np.ndindex(*mask.shape):
            visible = bool(mask[i, j])
            row = kv_len - len(mask) + i
            style = {"facecolor": color if visible else "white", "alpha": 0.75 if visible else 1.0, "edgecolor": GREY}
            axes.add_patch(Rectangle((j, row), 1, 1, **style))
        _frame(axes, (-0.1, kv_len + 0.1), (kv_len + 0.1, -0.1))
        axes.set_title(title, color=color if color == VERMILION else "black")
        axes.set_aspect("equal")
        axes.text(kv_len / 2, kv_len + 0.3, "key", ha="center", va="top")
        axes.text(-0.3, kv_len - len(mask) / 2, "query", ha="right", va="center", rotation=90)
    return figure


@styled
def draw_passes() -> Figure:
    """The three kernels on top, memory below: what is big (scores) passes four times, what is small is read aside."""
    figure, (axes,) = axes_grid(height=3.0)
    kernels = ((1.0, "scores", "Q, K"), (4.5, "softmax", ""), (8.0, "values", "V"))
    for x, name, reads in kernels:
        axes.add_patch(Rectangle((x, 2.2), 1.6, 0.8, facecolor=SKY, edgecolor="black"))
        axes.text(x + 0.8, 2.6, name, ha="center", va="center")
        axes.text(x + 0.8, 3.15, f"reads {reads} too" if reads else "", ha="center", va="bottom", fontsize=8)
    for x, name in ((2.9, "S"), (6.4, "P")):
        axes.add_patch(Rectangle((x, 0), 1.3, 1.3, facecolor=ORANGE, edgecolor="black"))
        axes.text(x + 0.65, 0.65, f"{name}\n$H L^2$", ha="center", va="center")
    arrows = (((2.3, 2.2), (3.1, 1.3)), ((3.9, 1.3), (4.8, 2.2)), ((5.8, 2.2), (6.6, 1.3)), ((7.4, 1.3), (8.3, 2.2)))
    for number, (start, end) in enumerate(arrows, 1):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": VERMILION, "linewidth": 6})
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        disc = {"boxstyle": "circle", "facecolor": "white", "edgecolor": VERMILION}
        axes.text(x, y, str(number), ha="center", va="center", fontsize=8, bbox=disc)
    axes.annotate("", (10.2, 1.3), (9.4, 2.2), arrowprops={"arrowstyle": "-|>", "color": BLUE})
    axes.text(10.25, 1.25, "O", ha="center", va="top")
    axes.axhline(1.75, color=GREY, linestyle=":")
    axes.text(0, 1.85, "on chip", color=GREY, va="bottom")
    axes.text(0, 1.65, "in memory", color=GREY, va="top")
    _frame(axes, (0, 11), (-0.1, 3.5))
    return figure


def _frame(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
