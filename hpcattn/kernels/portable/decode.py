"""Paged decode: all query tokens of a request against its keys, split over programs, then merged.

One program handles the S * G query rows that share a KV head, so K and V are read once for all of them. The static
schedule cuts every (request, KV head) pair into the same number of chunks; the dynamic one gives every program the
same number of tiles of the concatenation of all pairs (`hpcattn.schedule`: a program is one of its clusters), so that a
program may finish one pair and go on with the next: Stream-K (Osama et al., 2023) for attention. A second kernel merges
the partial states (acc, m, l), as in Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hpcattn.kernels.jit import jit
from hpcattn.kernels.portable.common import KV, LOG2_E, NEG_INF, attend, finish, make_kv
from hpcattn.kernels.portable.plan import PLAN_TILE

TILE = 64
NUM_STAGES = 5  # tiles of K in flight: 3 leave an H200's memory idle a tenth of the time


class Rows(NamedTuple):
    """The query rows, their results and the partial states of a decode call, as one kernel argument."""

    q: object  # [batch * S, num_q_heads, D], strides (token, head)
    q_strides: tuple
    q_scale: object  # float32 [batch * S, num_q_heads] or None
    v_scale: object
    seq_lens: object
    capacity: int  # tokens that a row of the block table can list
    o: object
    lse: object  # or None
    states: object  # float32: acc [num_slots, S * G, D], then (m, l) [num_slots, 2, S * G]
    num_slots: int


@jit
def visible_length(rows: Rows, request):
    """(length, whether it is one that the block table can hold)."""
    n = tl.load(rows.seq_lens + request)
    valid = (n >= 0) & (n <= rows.capacity)
    return tl.where(valid, n, 0), valid


@jit
def row_ids(request, head, num_kv_heads, S: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """Row r of a pair is query token r // G, head r % G of the group: (token, query head, row of o and lse, exists)."""
    r = tl.arange(0, M)
    token = request.to(tl.int64) * S + r // G
    q_head = head * G + r % G
    return token, q_head, token * num_kv_heads * G + q_head, r < S * G


@jit
def decode_chunk(
    rows: Rows, kv: KV, request, head, num_kv_heads, kv_len, start, stop, softmax_scale_log2,
    S: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """The state (m, l, acc) of a pair's rows after the keys [start, stop)."""
    token, q_head, row, exists = row_ids(request, head, num_kv_heads, S, G, M)
    at = token * rows.q_strides[0] + q_head.to(tl.int64) * rows.q_strides[1]
    q = tl.load(rows.q + at[:, None] + tl.arange(0, D)[None, :], mask=exists[:, None], other=0.0)
    row_scale = tl.full([M], 1.0, tl.float32) * softmax_scale_log2
    if QUANT != "none":
        row_scale *= tl.load(rows.q_scale + row, mask=exists, other=0.0)
    q_pos = kv_len - S + tl.arange(0, M) // G
    return attend(q, row_scale, q_pos, kv, request, 0, head, start, stop, kv.table, TILE, PAGE, QUANT, False)


@jit
def store_result(rows: Rows, head, row, exists, m, l, acc, valid, QUANT: tl.constexpr):
    """Normalise and write the rows `row`; NaN rather than truncated attention if the request's length is not valid."""
    D: tl.constexpr = acc.shape[1]
    o, lse = finish(m, l, acc, rows.v_scale, head, QUANT)
    o = tl.where(valid, o, float("nan")).to(rows.o.dtype.element_ty)
    tl.store(rows.o + row[:, None] * D + tl.arange(0, D)[None, :], o, mask=exists[:, None])
    if rows.lse is not None:
        tl.store(rows.lse + row, tl.where(valid, lse, float("nan")), mask=exists)


@jit
def state_offsets(rows: Rows, slot, r, R: tl.constexpr, D: tl.constexpr):
    """Offsets of acc `[n, D]`, m and l `[n]` for `slot` and row `r` of the pair, of which one is `[n]`."""
    at = slot.to(tl.int64) * R + r
    m = rows.num_slots.to(tl.int64) * R * D + at + slot.to(tl.int64) * R
    return at[:, None] * D + tl.arange(0, D)[None, :], m, m + R


@jit
def store_state(rows: Rows, slot, m, l, acc, R: tl.constexpr):
    r = tl.arange(0, acc.shape[0])
    acc_at, m_at, l_at = state_offsets(rows, slot, r, R, acc.shape[1])
    tl.store(rows.states + acc_at, acc, mask=(r < R)[:, None])
    tl.store(rows.states + m_at, m, mask=r < R)
    tl.store(rows.states + l_at, l, mask=r < R)


@jit
def static_kernel(
    rows: Rows, kv: KV, num_splits, num_kv_heads, softmax_scale_log2,
    S: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    QUANT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (splits, KV heads, requests)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    kv_len, valid = visible_length(rows, request)
    chunk = tl.cdiv(tl.cdiv(kv_len, TILE), num_splits) * TILE
    start = split * chunk
    stop = tl.minimum(start + chunk, kv_len)
    m, l, acc = decode_chunk(
        rows, kv, request, head, num_kv_heads, kv_len, start, stop, softmax_scale_log2, S, G, M, D, TILE, PAGE, QUANT
    )
    if SPLIT:
        store_state(rows, (request * num_kv_heads + head) * num_splits + split, m, l, acc, S * G)
    else:
        _, _, row, exists = row_ids(request, head, num_kv_heads, S, G, M)
        store_result(rows, head, row, exists, m, l, acc, valid, QUANT)


@jit
def fits(kv_len, tiles, PLAN_TILE: tl.constexpr):
    """Whether a plan that gives a request's pairs `tiles` tiles is for its length."""
    return tiles == tl.maximum(tl.cdiv(kv_len, PLAN_TILE), 1)


@jit
def dynamic_kernel(
    rows: Rows, kv: KV, offsets, records, num_kv_heads, softmax_scale_log2,
    S: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    QUANT: tl.constexpr, PLAN_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (clusters of the plan,). Each walks its `quota` tiles of the concatenated pairs."""
    cluster = tl.program_id(0)
    record = records + 8 * cluster
    request, head, first, places = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    t, end, cost = tl.load(record + 4), tl.load(record + 5), tl.load(record + 7)
    while t < end:
        last = tl.minimum(first + end - t, places)
        kv_len, valid = visible_length(rows, request)
        start = tl.maximum(first - cost, 0) * PLAN_TILE
        stop = tl.minimum(tl.maximum(last - cost, 0) * PLAN_TILE, kv_len)
        m, l, acc = decode_chunk(
            rows, kv, request, head, num_kv_heads, kv_len, start, stop, softmax_scale_log2,
            S, G, M, D, TILE, PAGE, QUANT,
        )  # fmt: skip
        if (first == 0) & (last == places):
            _, _, row, exists = row_ids(request, head, num_kv_heads, S, G, M)
            store_result(rows, head, row, exists, m, l, acc, valid & fits(kv_len, places - cost, PLAN_TILE), QUANT)
        else:  # slot 2c + 1: the pair that starts here and goes on; 2c: the pair that began in an earlier cluster
            store_state(rows, 2 * cluster + (first == 0).to(tl.int32), m, l, acc, S * G)
        t += last - first
        first = 0
        request += (head + 1) // num_kv_heads
        head = (head + 1) % num_kv_heads
        places = tl.load(offsets + request + 1, mask=t < end, other=0) - tl.load(offsets + request)


@jit
def merge_kernel(
    rows: Rows, header, offsets, num_splits, num_kv_heads,
    S: tl.constexpr, G: tl.constexpr, D: tl.constexpr, QUANT: tl.constexpr, PLAN_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (S * G rows, KV heads, requests): merge a row's partial states. header: None for the static schedule."""
    r = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    kv_len, valid = visible_length(rows, request)
    first = (request * num_kv_heads + head) * num_splits
    last = first + num_splits
    done = False
    if header is not None:
        quota = tl.load(header)
        offset = tl.load(offsets + request)
        places = tl.load(offsets + request + 1) - offset
        valid = valid & fits(kv_len, places - tl.load(header + 3), PLAN_TILE)
        begin = offset * num_kv_heads + head * places
        first = begin // quota
        last = (begin + places - 1) // quota + 1
        done = last - first == 1
    if not done:
        m = tl.full([1], NEG_INF, tl.float32)
        l = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, D], tl.float32)
        for block in range(first, last, BLOCK):
            chunk = block + tl.arange(0, BLOCK)
            exists = chunk < last
            slot = chunk
            if header is not None:
                slot = 2 * chunk + (chunk == first).to(tl.int32)
            acc_at, m_at, l_at = state_offsets(rows, slot, r, S * G, D)
            m_chunk = tl.load(rows.states + m_at, mask=exists, other=NEG_INF)
            m_new = tl.maximum(m, tl.max(m_chunk, 0))
            shift = tl.where(m_new == NEG_INF, 0.0, m_new)
            alpha = tl.exp2(m - shift)
            weight = tl.exp2(m_chunk - shift)
            l_chunk = tl.load(rows.states + l_at, mask=exists, other=0.0)
            acc_chunk = tl.load(rows.states + acc_at, mask=exists[:, None], other=0.0)
            l = l * alpha + tl.sum(l_chunk * weight, 0)
            acc = acc * alpha[:, None] + tl.sum(acc_chunk * weight[:, None], 0)[None, :]
            m = m_new
        token = request.to(tl.int64) * S + r // G
        row = token * num_kv_heads * G + head * G + r % G + tl.zeros([1], tl.int64)
        store_result(rows, head, row, row >= 0, m, l, acc, valid, QUANT)


def num_floats(num_slots: int, rows_per_pair: int, head_dim: int) -> int:
    """Length of the workspace: each partial state has (acc, m, l) for every row of a pair."""
    return num_slots * rows_per_pair * (head_dim + 2)


def num_states(num_pairs: int, num_splits: int, num_clusters: int | None) -> int:
    """Partial states that a call may write: two per cluster of a plan, one per chunk otherwise."""
    if num_clusters is not None:
        return 2 * num_clusters
    return num_pairs * num_splits if num_splits > 1 else 0


def workspace_floats(q, k, seq_lens, num_splits: int, num_clusters: int | None) -> int:
    """Length of the workspace of a call."""
    pairs = seq_lens.shape[0] * k.shape[2]
    return num_floats(num_states(pairs, num_splits, num_clusters), q.shape[0] * q.shape[1] // max(1, pairs), q.shape[2])


def launch(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, plan, num_query_tokens, softmax_scale, num_splits,
    workspace, out, lse,
) -> None:  # fmt: skip
    """Run decode. Arguments as in `hpcattn.attention_decode`, checked there; plan: `PlanTensors` or None."""
    batch, num_kv_heads, page_size = seq_lens.shape[0], k.shape[2], k.shape[1]
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    num_clusters = None if plan is None else plan.records.shape[0]
    num_slots = num_states(batch * num_kv_heads, num_splits, num_clusters)
    rows_per_pair = num_query_tokens * group
    if workspace is None:
        floats = workspace_floats(q, k, seq_lens, num_splits, num_clusters)
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
    kv, quant = make_kv(k, v, block_table, k_scale, quantized=q_scale is not None)
    rows = Rows(
        q, q.stride()[:2], q_scale, v_scale, seq_lens, block_table.shape[1] * page_size, out, lse, workspace, num_slots
    )
    shape = dict(S=num_query_tokens, G=group, D=head_dim, QUANT=quant)
    loop = dict(M=max(16, triton.next_power_of_2(rows_per_pair)), TILE=TILE, PAGE=page_size, num_stages=NUM_STAGES)
    scale, header, offsets = softmax_scale * LOG2_E, None, None
    if plan is None:
        grid = (num_splits, num_kv_heads, batch)
        static_kernel[grid](rows, kv, num_splits, num_kv_heads, scale, **shape, **loop, SPLIT=num_splits > 1)
    else:
        header, offsets, records = plan[:3]
        dynamic_kernel[num_clusters,](
            rows, kv, offsets, records, num_kv_heads, scale, **shape, **loop, PLAN_TILE=PLAN_TILE
        )
    if plan is not None or num_splits > 1:
        merge_kernel[rows_per_pair, num_kv_heads, batch](
            rows, header, offsets, num_splits, num_kv_heads, **shape, PLAN_TILE=PLAN_TILE, BLOCK=16
        )
