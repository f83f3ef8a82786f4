"""What every portable kernel shares: where a token lies in memory, and one step of online softmax.

Scores are kept in base 2, `log2(e) * scale * q.k`, so that the exponential is one `exp2`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from hpcattn.kernels.jit import jit

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
P_SCALE = tl.constexpr(256.0)
NEG_INF = tl.constexpr(float("-inf"))


class KV(NamedTuple):
    """Pointers and strides of keys and values, paged or packed, as one kernel argument.

    Strides are in elements, (page, token, head). k_scale is None (bf16), one float (type 1) or the paged scales of
    type 0, whose strides are (page, row of 32, head). table is None for packed keys and values.
    """

    k: object
    v: object
    k_strides: tuple
    v_strides: tuple
    table: object
    table_stride: int
    k_scale: object
    k_scale_strides: tuple


@jit
def token_offsets(kv: KV, request, base, first, tokens, valid, TILE: tl.constexpr, PAGE: tl.constexpr):
    """(page, slot) of a tile's `tokens`; packed keys and values (PAGE = 0) start at row `base` of a single page."""
    table = kv.table + request.to(tl.int64) * kv.table_stride if PAGE > 0 else kv.table
    if PAGE == 0:
        return base.to(tl.int64) * 0, base + tokens
    elif PAGE % TILE == 0:  # the tile lies in one page: one scalar load
        return tl.load(table + first // PAGE).to(tl.int64), tokens % PAGE
    else:
        return tl.load(table + tokens // PAGE, mask=valid, other=0).to(tl.int64), tokens % PAGE


@jit
def load_rows(ptr, strides, page, slot, head, valid, D: tl.constexpr):
    """`[tokens, D]`; rows that are not `valid` are zero and never read, whatever lies there."""
    rows = page * strides[0] + slot.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    return tl.load(ptr + rows[:, None] + tl.arange(0, D)[None, :], mask=valid[:, None], other=0.0)


@jit
def load_k_scale(kv: KV, page, slot, head, valid, QUANT: tl.constexpr):
    """What the scores of each token are multiplied by; 1 for bf16."""
    if QUANT == "type0":
        strides = kv.k_scale_strides
        at = page * strides[0] + (slot // 32) * strides[1] + head.to(tl.int64) * strides[2] + slot % 32
        return tl.load(kv.k_scale + at, mask=valid, other=0.0)
    elif QUANT == "type1":
        return tl.zeros(slot.shape, tl.float32) + tl.load(kv.k_scale)
    else:
        return tl.full(slot.shape, 1.0, tl.float32)


@jit
def online_softmax(s, m, l):
    """Take in a tile of scores `[rows, tile]`: the weights p, the factor alpha for what came before, new m and l."""
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == NEG_INF, 0.0, m_new)  # rows that have seen nothing: avoids -inf - -inf
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@jit
def accumulate(p, v, acc, alpha):
    """`acc * alpha + p @ v`. With fp8 V, P is rounded to e4m3 at 256 times its value; `finish` takes that out again."""
    acc = acc * alpha[:, None]
    if v.dtype == tl.float8e4nv:
        # a fresh tensor-core accumulator per tile: across tiles its few bits would lose up to 30 % (lesson 03)
        return tl.dot((p * P_SCALE).to(v.dtype), v, acc, max_num_imprecise_acc=v.shape[0])
    else:
        return tl.dot(p.to(v.dtype), v, acc)


@jit
def finish(m, l, acc, v_scale_ptr, head, QUANT: tl.constexpr):
    """Normalise a softmax state: (o, natural-log lse); 0 and -inf for rows that have seen nothing."""
    seen = l != 0  # NaN, from visible NaN, stays NaN
    l = tl.where(seen, l, 1.0)
    inverse = tl.where(seen, 1.0 / l, 0.0)
    if QUANT == "type0":
        inverse = inverse * (tl.load(v_scale_ptr + head) / P_SCALE)
    elif QUANT == "type1":
        inverse = inverse * (tl.load(v_scale_ptr) / P_SCALE)
    lse = tl.where(seen, (m + tl.log2(l)) * LN_2, NEG_INF)
    return tl.where(seen[:, None], acc * inverse[:, None], 0.0), lse


@jit
def attend(
    q, row_scale, q_pos, kv: KV, request, base, head, start, stop, mask_ptr,
    TILE: tl.constexpr, PAGE: tl.constexpr, QUANT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """The inner loop of everything here: rows of queries against the keys [start, stop) of one KV head.

    q `[M, D]`; row_scale `[M]` turns q.k into base-2 scores; q_pos `[M]` is each query's position. mask_ptr: a row of
    the block mask, one byte per 128 keys. Returns the un-normalised state (m, l, acc).
    """
    m = tl.full([q.shape[0]], NEG_INF, tl.float32)
    l = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    for first in range(start, stop, TILE):
        active = True
        if HAS_MASK:
            active = tl.load(mask_ptr + first // 128) != 0
        if active:
            tokens = first + tl.arange(0, TILE)
            valid = tokens < stop
            page, slot = token_offsets(kv, request, base, first, tokens, valid, TILE, PAGE)
            k = load_rows(kv.k, kv.k_strides, page, slot, head, valid, q.shape[1])
            s = tl.dot(q, tl.trans(k)) * row_scale[:, None]
            s *= load_k_scale(kv, page, slot, head, valid, QUANT)[None, :]
            s = tl.where(valid[None, :] & (tokens[None, :] <= q_pos[:, None]), s, NEG_INF)
            p, alpha, m, l = online_softmax(s, m, l)
            v = load_rows(kv.v, kv.v_strides, page, slot, head, valid, q.shape[1])
            acc = accumulate(p, v, acc, alpha)
    return m, l, acc


def make_kv(k, v, block_table, k_scale, *, quantized: bool) -> tuple[KV, str]:
    """Bundle `[pages, page_size, heads, D]` or packed `[tokens, heads, D]` tensors, and say which QUANT they have."""
    table_stride = 0
    if block_table is None:
        k, v = k[None], v[None]  # a single page
    else:
        table_stride = block_table.stride(0)
    quant = "none" if not quantized else "type0" if k_scale.dim() == 4 else "type1"
    scale_strides = k_scale.stride()[:3] if quant == "type0" else (0, 0, 0)
    return KV(k, v, k.stride()[:3], v.stride()[:3], block_table, table_stride, k_scale, scale_strides), quant
