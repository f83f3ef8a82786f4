"""Causal prefill of ragged requests over paged or packed keys and values, with an optional block mask.

One program takes BLOCK_M queries of one head. Programs find their request themselves: request b owns the program ids
from `cu_seqlens_q[b] // BLOCK_M + b` on, a bound that needs no prefix sum over tiles and leaves at most one idle
program per request. Masked tiles are skipped by the inner loop, one byte per 128 keys.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from hpcattn.kernels.jit import jit
from hpcattn.kernels.portable.common import KV, LOG2_E, attend, finish, make_kv

BLOCK_M, TILE = 128, 64  # both divide the 128 of the block mask; 64 rows take 1.4-2 times as long on an H200


class Prefill(NamedTuple):
    """Queries, results and geometry of a prefill call, as one kernel argument."""

    q: object  # [total_q, num_q_heads, D], strides (token, head)
    q_strides: tuple
    q_scale: object  # float32 or None, strides (request, token, head)
    q_scale_strides: tuple
    q_scale_pad: int  # queries per request that there are scales for
    v_scale: object
    cu_seqlens_q: object
    seq_lens: object  # or None: self-attention over packed keys
    capacity: int  # tokens that a row of the block table can list
    mask: object  # uint8 [batch, num_q_heads, rows, columns] or None
    mask_strides: tuple
    mask_shape: tuple  # (rows, columns)
    o: object
    lse: object


@jit
def find_request(cu_seqlens_q, program, batch, STEPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last request whose first program id is not behind `program`, and that id."""
    low = 0
    high = batch
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        owns = tl.load(cu_seqlens_q + middle) // BLOCK_M + middle <= program
        low = tl.where(owns, middle, low)
        high = tl.where(owns, high, middle)
    return low, tl.load(cu_seqlens_q + low) // BLOCK_M + low


@jit
def prefill_kernel(
    a: Prefill, kv: KV, batch, softmax_scale_log2,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    QUANT: tl.constexpr, HAS_MASK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, query heads)."""
    q_head = tl.program_id(1)
    request, first_program = find_request(a.cu_seqlens_q, tl.program_id(0), batch, STEPS, BLOCK_M)
    start = tl.load(a.cu_seqlens_q + request)
    q_len = tl.load(a.cu_seqlens_q + request + 1) - start
    first = (tl.program_id(0) - first_program) * BLOCK_M
    if (first >= 0) & (first < q_len):  # tokens before the first request are nobody's
        kv_len = q_len
        valid = q_len >= 0
        if a.seq_lens is not None:
            kv_len = tl.load(a.seq_lens + request)
            valid = (kv_len >= 0) & (kv_len <= a.capacity)
            kv_len = tl.where(valid, kv_len, 0)
        local = first + tl.arange(0, BLOCK_M)
        exists = local < q_len
        token = (start + local).to(tl.int64)
        d = tl.arange(0, D)
        at = token * a.q_strides[0] + q_head.to(tl.int64) * a.q_strides[1]
        q = tl.load(a.q + at[:, None] + d[None, :], mask=exists[:, None], other=0.0)
        row_scale = tl.full([BLOCK_M], 1.0, tl.float32) * softmax_scale_log2
        if QUANT != "none":
            # padded scales count a request's tokens from 0, packed ones (request stride 0) from its start
            row = tl.where(a.q_scale_strides[0] > 0, local, start + local)
            at = (
                request.to(tl.int64) * a.q_scale_strides[0] + row * a.q_scale_strides[1] + q_head * a.q_scale_strides[2]
            )
            row_scale *= tl.load(a.q_scale + at, mask=exists & (local < a.q_scale_pad), other=0.0)
            valid = valid & (q_len <= a.q_scale_pad)
        stop = tl.maximum(kv_len - q_len + tl.minimum(first + BLOCK_M, q_len), 0)  # keys the last query sees
        mask_row = a.o
        if HAS_MASK:
            # a mask narrower than what its 128 queries see is an error, not a guess
            widest = kv_len - q_len + tl.minimum(first // 128 * 128 + 128, q_len)
            valid = valid & (first // 128 < a.mask_shape[0]) & (widest <= a.mask_shape[1] * 128)
            stop = tl.where(valid, stop, 0)
            mask_row = (
                a.mask
                + request.to(tl.int64) * a.mask_strides[0]
                + q_head * a.mask_strides[1]
                + first // 128 * a.mask_strides[2]
            )
        m, l, acc = attend(
            q, row_scale, kv_len - q_len + local, kv, request, start, q_head // G, 0, stop, mask_row,
            TILE, PAGE, QUANT, HAS_MASK,
        )  # fmt: skip
        o, lse = finish(m, l, acc, a.v_scale, q_head // G, QUANT)
        out_row = token * tl.num_programs(1) + q_head
        o = tl.where(valid, o, float("nan")).to(a.o.dtype.element_ty)
        tl.store(a.o + out_row[:, None] * D + d[None, :], o, mask=exists[:, None])
        if a.lse is not None:
            tl.store(a.lse + out_row, tl.where(valid, lse, float("nan")), mask=exists)


def launch(
    q, k, v, block_table, cu_seqlens_q, seq_lens, q_scale, k_scale, v_scale, block_mask, softmax_scale, out, lse
) -> None:
    """Run prefill. Arguments as in `hpcattn.attention_prefill`, validated there."""
    batch, (total_q, num_q_heads, head_dim) = cu_seqlens_q.shape[0] - 1, q.shape
    num_kv_heads, page_size = k.shape[-2], 0 if block_table is None else k.shape[1]
    kv, quant = make_kv(k, v, block_table, k_scale, quantized=q_scale is not None)
    scale_strides, pad = (0, 0, 0), total_q
    if q_scale is not None:  # [tokens, heads], or [batch, heads, pad]
        s = q_scale.stride()
        scale_strides, pad = ((0, *s), total_q) if q_scale.dim() == 2 else ((s[0], s[2], s[1]), q_scale.shape[2])
    args = Prefill(
        q, q.stride()[:2], q_scale, scale_strides, pad, v_scale, cu_seqlens_q, seq_lens,
        0 if block_table is None else block_table.shape[1] * page_size,
        block_mask, (0, 0, 0) if block_mask is None else block_mask.stride()[:3],
        (0, 0) if block_mask is None else block_mask.shape[2:], out, lse,
    )  # fmt: skip
    prefill_kernel[total_q // BLOCK_M + batch, num_q_heads](
        args, kv, batch, softmax_scale * LOG2_E, G=num_q_heads // num_kv_heads, D=head_dim, BLOCK_M=BLOCK_M, TILE=TILE,
        PAGE=page_size, QUANT=quant, HAS_MASK=block_mask is not None, STEPS=batch.bit_length(), num_warps=8,
    )  # fmt: skip
