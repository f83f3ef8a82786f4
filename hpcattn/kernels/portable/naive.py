"""Attention the obvious way: write all scores to memory, normalise them, multiply by V. Three kernels, O(L²) traffic.

For lesson 01, and as the thing to beat; nothing else uses it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcattn.kernels.jit import jit
from hpcattn.kernels.portable.common import LN_2, LOG2_E, NEG_INF, P_SCALE
from hpcattn.quantization import FP8
from hpcattn.quantization import P_SCALE as HOST_P_SCALE

BLOCK_M, BLOCK_N = 64, 64


@jit
def scores_kernel(
    q, k, scores, q_scale, k_scale, q_len, kv_len, q_strides, k_strides, softmax_scale_log2,
    G: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles, query tiles, query heads): base-2 scores `[heads, q_len, kv_len]`, -inf where masked."""
    i = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    j = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    h = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, D)
    q_tile = tl.load(q + i[:, None] * q_strides[0] + h * q_strides[1] + d[None, :], mask=i[:, None] < q_len, other=0.0)
    k_tile = tl.load(
        k + j[:, None] * k_strides[0] + h // G * k_strides[1] + d[None, :], mask=j[:, None] < kv_len, other=0.0
    )
    s = tl.dot(q_tile, tl.trans(k_tile)) * softmax_scale_log2
    if FP8:
        rows = tl.load(q_scale + i * tl.num_programs(2) + h, mask=i < q_len, other=0.0)
        s = s * rows[:, None] * tl.load(k_scale)
    if CAUSAL:
        s = tl.where(j[None, :] <= (kv_len - q_len + i)[:, None], s, NEG_INF)
    at = (h * q_len + i)[:, None] * kv_len + j[None, :]
    tl.store(scores + at, s.to(scores.dtype.element_ty), mask=(i[:, None] < q_len) & (j[None, :] < kv_len))


@jit
def softmax_kernel(scores, p, l_out, lse, q_len, kv_len, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (queries, query heads): p = SCALE * 2^(score - max) and its un-rounded sum; two passes over a row."""
    row = tl.program_id(1).to(tl.int64) * q_len + tl.program_id(0)
    m = NEG_INF
    for first in range(0, kv_len, BLOCK):
        j = first + tl.arange(0, BLOCK)
        s = tl.load(scores + row * kv_len + j, mask=j < kv_len, other=NEG_INF).to(tl.float32)
        m = tl.maximum(m, tl.max(s, 0))
    m = tl.where(m == NEG_INF, 0.0, m)  # nothing visible
    l = 0.0
    for first in range(0, kv_len, BLOCK):
        j = first + tl.arange(0, BLOCK)
        s = tl.load(scores + row * kv_len + j, mask=j < kv_len, other=NEG_INF).to(tl.float32)
        e = tl.exp2(s - m)
        l += tl.sum(e, 0)
        tl.store(p + row * kv_len + j, (e * SCALE).to(p.dtype.element_ty), mask=j < kv_len)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)  # l and lse are [queries, heads]
    tl.store(l_out + at, l)
    tl.store(lse + at, tl.where(l != 0, (m + tl.log2(tl.where(l != 0, l, 1.0))) * LN_2, NEG_INF))


@jit
def values_kernel(
    p, v, l_in, o, v_scale, q_len, kv_len, v_strides,
    G: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, query heads): o = p @ v / l."""
    i = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for first in range(0, kv_len, BLOCK_N):
        j = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        at = (h * q_len + i)[:, None] * kv_len + j[None, :]
        p_tile = tl.load(p + at, mask=(i[:, None] < q_len) & (j[None, :] < kv_len), other=0.0)
        v_tile = tl.load(
            v + j[:, None] * v_strides[0] + h // G * v_strides[1] + d[None, :], mask=j[:, None] < kv_len, other=0.0
        )
        acc = tl.dot(p_tile, v_tile, acc, max_num_imprecise_acc=BLOCK_N)
    at = i * tl.num_programs(1) + h
    l = tl.load(l_in + at, mask=i < q_len, other=0.0)
    inverse = tl.where(l != 0, 1.0 / tl.where(l != 0, l, 1.0), 0.0)
    if FP8:
        inverse *= tl.load(v_scale) / P_SCALE
    tl.store(o + at[:, None] * D + d[None, :], (acc * inverse[:, None]).to(o.dtype.element_ty), mask=i[:, None] < q_len)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    score_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One sequence, scores and probabilities in memory.

    q: bf16 or e4m3 `[q_len, num_q_heads, head_dim]`; k, v: `[kv_len, num_kv_heads, head_dim]`, last dimension dense.
    q_scale: float32 `[q_len, num_q_heads]`, k_scale and v_scale: float32 `[1]`, for e4m3 (type 1).
    score_dtype: what the scores are stored as; float32 keeps the error below 4e-3, bfloat16 halves the traffic.
    Returns o bf16 like q and lse float32 `[q_len, num_q_heads]`. Causality is aligned bottom-right.
    """
    (q_len, heads, dim), (kv_len, kv_heads, _) = q.shape, k.shape
    fp8, group = q.dtype == FP8, heads // kv_heads
    scale = (dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E
    scores = torch.empty(heads, q_len, kv_len, dtype=score_dtype, device=q.device)
    p = torch.empty(heads, q_len, kv_len, dtype=q.dtype, device=q.device)
    l, lse = torch.empty(2, q_len, heads, dtype=torch.float32, device=q.device)
    o = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    m_tiles, n_tiles = triton.cdiv(q_len, BLOCK_M), triton.cdiv(kv_len, BLOCK_N)
    shape = dict(G=group, D=dim, FP8=fp8, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    scores_kernel[n_tiles, m_tiles, heads](
        q, k, scores, q_scale, k_scale, q_len, kv_len, q.stride()[:2], k.stride()[:2], scale, **shape, CAUSAL=causal
    )
    softmax_kernel[q_len, heads](scores, p, l, lse, q_len, kv_len, SCALE=HOST_P_SCALE if fp8 else 1.0, BLOCK=1024)
    values_kernel[m_tiles, heads](p, v, l, o, v_scale, q_len, kv_len, v.stride()[:2], **shape)
    return o, lse
