"""FP8 (e4m3) quantization with the two scale layouts of HPC-Ops' attention operators.

| | Q | K | V |
|---|---|---|---|
| type 0 | per token and head | per token and head | per head |
| type 1 | per token and head | per tensor | per tensor |

A scale is float32 and multiplies: `value = fp8.float() * scale`. Type 0 K scales are addressed as
`[num_pages, ceil(page_size / 32), num_kv_heads, 32]`: token t of a page has its at `[page, t // 32, head, t % 32]`.
For decode these are bytes inside the K pages (one 128-byte row of scales follows every 32 rows of K: rows
`page_size ...` of the allocation), for prefill a tensor of their own. Both are one logical tensor with different
strides, so a kernel needs no switch. For decode with 64-token pages the bytes are those of HPC-Ops (commit 6e2eced).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "FP8",
    "FP8_MAX",
    "P_SCALE",
    "SCALES_PER_ROW",
    "Scales",
    "dequantize",
    "k_scale_rows",
    "k_scales_in_page",
    "pad_q_scale",
    "quantize_per_head",
    "quantize_per_tensor",
    "quantize_per_token_head",
    "to_fp8",
    "unpad_q_scale",
]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
P_SCALE = 256.0  # softmax probabilities (<= 1) are multiplied by this before they are rounded to e4m3
SCALES_PER_ROW = 32  # float32 scales that fit one 128-byte row of fp8 K


@dataclass(frozen=True)
class Scales:
    """Scales of an fp8 attention call.

    q: float32 `[tokens, num_q_heads]`; prefill also takes HPC-Ops' padded `[batch, num_q_heads, pad]`.
    v: float32 `[num_kv_heads]` (type 0) or `[1]` (type 1).
    k: float32 `[1]` (type 1); None for type 0, whose scales belong to the cache (`PagedKVCache.k_scale`).
    """

    q: Tensor
    v: Tensor
    k: Tensor | None = None

    @property
    def quant(self) -> str:
        """`"type0"` or `"type1"`."""
        return "type0" if self.k is None else "type1"


def quantize_per_token_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `[..., heads, head_dim]` with one scale per token and head: (e4m3, float32 `[..., heads]`)."""
    return _quantize(x, (-1,))


def quantize_per_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `[..., heads, head_dim]` with one scale per head: (e4m3, float32 `[heads]`)."""
    return _quantize(x, (*range(x.dim() - 2), -1))


def quantize_per_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a tensor with a single scale: (e4m3, float32 `[1]`)."""
    scale = x.float().abs().amax().clamp_min(1e-12).reshape(1) / FP8_MAX
    return to_fp8(x, scale), scale


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """`x / scale` in e4m3, saturating; x `[..., heads, head_dim]`, scale `[..., heads]`, `[heads]` or `[1]`."""
    # PyTorch's cast does not saturate, and the rounding of the quotient can end just above the maximum
    return (x.float() / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _quantize(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(dims).clamp_min(1e-12) / FP8_MAX
    return to_fp8(x, scale), scale


def dequantize(x: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """`x * scale` for x `[..., heads, head_dim]` and scale `[..., heads]`, `[heads]` or `[1]`."""
    return x.to(dtype) * scale.to(dtype).unsqueeze(-1)


def k_scale_rows(page_size: int) -> int:
    """Rows of scales per page and head: `ceil(page_size / 32)`."""
    return -(-page_size // SCALES_PER_ROW)


def k_scales_in_page(k_rows: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Split fp8 K pages that carry their scales into (k, k_scale), both views.

    k_rows: e4m3 or uint8, logical `[num_pages, page_size + ceil(page_size / 32), num_kv_heads, 128]`, any strides with
    a dense last dimension.
    Returns k `[num_pages, page_size, num_kv_heads, 128]` and k_scale float32
    `[num_pages, ceil(page_size / 32), num_kv_heads, 32]`.
    Raises ValueError if the number of rows does not fit `page_size`.
    """
    rows = k_scale_rows(page_size)
    if k_rows.shape[1] != page_size + rows or k_rows.shape[3] != 4 * SCALES_PER_ROW:
        raise ValueError(
            f"k_rows must be [num_pages, {page_size + rows}, num_kv_heads, 128] for page_size={page_size}, "
            f"got {list(k_rows.shape)}"
        )
    return k_rows[:, :page_size], k_rows[:, page_size:].view(torch.float32)


def pad_q_scale(q_scale: Tensor, cu_seqlens_q: Tensor, pad: int) -> Tensor:
    """HPC-Ops' prefill layout: float32 `[tokens, heads]` -> `[batch, heads, pad]`, request-local, zero-filled."""
    bounds = cu_seqlens_q.tolist()
    out = q_scale.new_zeros(len(bounds) - 1, q_scale.shape[1], pad)
    for b, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        out[b, :, : stop - start] = q_scale[start:stop].T
    return out


def unpad_q_scale(q_scale: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Inverse of `pad_q_scale`: `[batch, heads, pad]` -> `[tokens, heads]`; zero for tokens beyond `pad`."""
    bounds = cu_seqlens_q.tolist()
    rows = q_scale.new_zeros(bounds[-1], q_scale.shape[1])
    for b, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows[start : min(stop, start + q_scale.shape[2])] = q_scale[b, :, : stop - start].T
    return rows
