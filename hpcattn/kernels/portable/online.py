"""Attention of one sequence without ever storing a score: a tile of queries walks over tiles of keys.

FlashAttention's loop (Dao et al., 2022; online softmax: Milakov and Gimelshein, 2018) in its simplest setting. Paged
decode and prefill are the same inner loop, `common.attend`, with other addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcattn.kernels.jit import jit
from hpcattn.kernels.portable.common import LOG2_E, NEG_INF, accumulate, finish, online_softmax
from hpcattn.quantization import FP8

BLOCK_M, TILE = 64, 64


@jit
def online_kernel(
    q, k, v, q_scale, k_scale, v_scale, o, lse, q_len, kv_len, q_strides, k_strides, v_strides,
    softmax_scale_log2,
    G: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, QUANT: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, query heads)."""
    i = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    q_tile = tl.load(q + i[:, None] * q_strides[0] + h * q_strides[1] + d[None, :], mask=i[:, None] < q_len, other=0.0)
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32) * softmax_scale_log2
    if QUANT != "none":
        row_scale *= tl.load(q_scale + i * tl.num_programs(1) + h, mask=i < q_len, other=0.0) * tl.load(k_scale)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    stop = kv_len
    if CAUSAL:
        stop = tl.minimum(kv_len, kv_len - q_len + (tl.program_id(0) + 1) * BLOCK_M)
    for first in range(0, stop, TILE):
        j = (first + tl.arange(0, TILE)).to(tl.int64)
        inside = j[:, None] < kv_len
        k_tile = tl.load(k + j[:, None] * k_strides[0] + h // G * k_strides[1] + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile)) * row_scale[:, None]
        visible = j[None, :] < kv_len
        if CAUSAL:
            visible = visible & (j[None, :] <= (kv_len - q_len + i)[:, None])
        p, alpha, m, l = online_softmax(tl.where(visible, s, NEG_INF), m, l)
        v_tile = tl.load(v + j[:, None] * v_strides[0] + h // G * v_strides[1] + d[None, :], mask=inside, other=0.0)
        acc = accumulate(p, v_tile, acc, alpha)
    result, log_sum = finish(m, l, acc, v_scale, h // G, QUANT)
    at = i * tl.num_programs(1) + h
    tl.store(o + at[:, None] * D + d[None, :], result.to(o.dtype.element_ty), mask=i[:, None] < q_len)
    tl.store(lse + at, log_sum, mask=i < q_len)


def online_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, one kernel, no scores in memory. Arguments and results as `naive.naive_attention`."""
    (q_len, heads, dim), (kv_len, kv_heads, _) = q.shape, k.shape
    o = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q_len, heads, dtype=torch.float32, device=q.device)
    scale = (dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E
    online_kernel[triton.cdiv(q_len, BLOCK_M), heads](
        q, k, v, q_scale, k_scale, v_scale, o, lse, q_len, kv_len,
        q.stride()[:2], k.stride()[:2], v.stride()[:2], scale,
        G=heads // kv_heads, D=dim, CAUSAL=causal, QUANT="type1" if q.dtype == FP8 else "none",
        BLOCK_M=BLOCK_M, TILE=TILE,
    )  # fmt: skip
    return o, lse
