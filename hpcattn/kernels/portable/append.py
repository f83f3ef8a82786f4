"""Write new keys and values into a paged cache: one program per token and KV head."""

from __future__ import annotations

import triton.language as tl

from hpcattn.kernels.jit import jit
from hpcattn.kernels.portable.common import KV, make_kv


@jit
def append_kernel(
    kv: KV, k_new, v_new, k_strides, v_strides, k_scale_new, cu_seqlens_q, seq_lens, capacity, batch,
    D: tl.constexpr, PAGE: tl.constexpr, QUANT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (new tokens, KV heads). Token i of a request's n new ones goes to position seq_len - n + i."""
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    low = 0
    high = batch
    for _ in tl.static_range(STEPS):  # the last request that starts at or before this token
        middle = (low + high) // 2
        owns = tl.load(cu_seqlens_q + middle) <= token
        low = tl.where(owns, middle, low)
        high = tl.where(owns, high, middle)
    kv_len = tl.load(seq_lens + low)
    position = kv_len - tl.load(cu_seqlens_q + low + 1) + token
    if (position >= 0) & (position < kv_len) & (kv_len <= capacity):
        page = tl.load(kv.table + low.to(tl.int64) * kv.table_stride + position // PAGE).to(tl.int64)
        slot = (position % PAGE).to(tl.int64)
        d = tl.arange(0, D)
        k = tl.load(k_new + token.to(tl.int64) * k_strides[0] + head * k_strides[1] + d)
        tl.store(kv.k + page * kv.k_strides[0] + slot * kv.k_strides[1] + head * kv.k_strides[2] + d, k)
        v = tl.load(v_new + token.to(tl.int64) * v_strides[0] + head * v_strides[1] + d)
        tl.store(kv.v + page * kv.v_strides[0] + slot * kv.v_strides[1] + head * kv.v_strides[2] + d, v)
        if QUANT == "type0":
            at = page * kv.k_scale_strides[0] + slot // 32 * kv.k_scale_strides[1] + head * kv.k_scale_strides[2]
            scale = tl.load(k_scale_new + token.to(tl.int64) * tl.num_programs(1) + head)
            tl.store(kv.k_scale + at + slot % 32, scale)


def launch(k_new, v_new, block_table, cu_seqlens_q, seq_lens, k_scale_new, k, v, k_scale) -> None:
    """Arguments as in `hpcattn.append_tokens`, validated there."""
    batch = seq_lens.shape[0]
    kv, quant = make_kv(k, v, block_table, k_scale, quantized=k_scale is not None)
    append_kernel[k_new.shape[:2]](
        kv, k_new, v_new, k_new.stride()[:2], v_new.stride()[:2], k_scale_new, cu_seqlens_q, seq_lens,
        block_table.shape[1] * k.shape[1], batch, D=k.shape[3], PAGE=k.shape[1], QUANT=quant, STEPS=batch.bit_length(),
    )  # fmt: skip
