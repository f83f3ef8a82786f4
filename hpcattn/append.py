"""`append_tokens`: write the newest keys and values of every request into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcattn.cache import PagedKVCache
from hpcattn.kernels.portable import append as portable
from hpcattn.ops import define_operator
from hpcattn.validation import (
    check_block_table,
    check_cache,
    check_content,
    check_options,
    check_seq_lens,
    check_starts,
    check_tensor,
    check_value,
    resolve_implementation,
)

__all__ = ["append_tokens"]


def append_tokens(
    cache: PagedKVCache,
    k_new: Tensor,
    v_new: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_query_tokens: int = 1,
    cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    implementation: str = "auto",
    check_inputs: str = "shapes",
) -> None:
    """Store each request's n newest tokens at its positions L - n ... L - 1, in place.

    k_new, v_new: `[tokens, num_kv_heads, head_dim]` in the cache's dtype, requests one after another, last dimension
        dense: `num_query_tokens` of them each, or as cu_seqlens_q (int32 `[batch + 1]`) says.
    seq_lens: int32 `[batch]`, the new tokens included. Tokens at negative positions, those of a request longer than its
        row of the block table can list, and those behind the last of cu_seqlens_q are dropped.
    k_scale: float32 `[tokens, num_kv_heads]`, for a cache that carries type 0 scales. `torch.compile` takes such a
        cache only if its scales are separate: it refuses to change one memory through views of two dtypes.
    Raises TypeError or ValueError naming the argument, before any launch.
    """
    check_options(check_inputs, None)
    check_value("num_query_tokens", num_query_tokens, num_query_tokens >= 1, "a positive integer")
    device = seq_lens.device if isinstance(seq_lens, Tensor) else torch.device("cpu")
    check_cache(cache, device)
    check_seq_lens(seq_lens, device)
    batch = seq_lens.shape[0]
    check_block_table(block_table, batch, device)
    shape = (None if cu_seqlens_q is not None else batch * num_query_tokens, cache.num_kv_heads, cache.head_dim)
    axes = "tokens, num_kv_heads, head_dim"
    check_tensor("k_new", k_new, shape=shape, dtype=cache.dtype, device=device, axes=axes, dense=True)
    check_tensor("v_new", v_new, shape=tuple(k_new.shape), dtype=cache.dtype, device=device, axes=axes, dense=True)
    if cache.k_scale is None:
        check_value("k_scale", k_scale, k_scale is None, "None for a cache without type 0 scales")
    else:
        shape = tuple(k_new.shape[:2])
        check_tensor("k_scale", k_scale, shape=shape, dtype=torch.float32, device=device, contiguous=True)
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(
            0, k_new.shape[0] + 1, num_query_tokens, dtype=torch.int32, device=device
        )  # one step of decode
    check_tensor("cu_seqlens_q", cu_seqlens_q, shape=(batch + 1,), dtype=torch.int32, device=device, contiguous=True)
    check_value("k_new", list(k_new.shape), batch > 0 or k_new.shape[0] == 0, "empty for an empty batch")
    if check_inputs == "full":
        check_starts(cu_seqlens_q, k_new.shape[0])
        check_content(cache, block_table, seq_lens)
    implementation, _ = resolve_implementation(implementation, device, operator="append_tokens")
    torch.ops.hpcattn.append(
        k_new, v_new, block_table, cu_seqlens_q, seq_lens, k_scale, implementation, cache.k, cache.v, cache.k_scale
    )


def _append(k_new, v_new, block_table, cu_seqlens_q, seq_lens, k_scale_new, implementation, k, v, k_scale) -> None:
    if k_new.numel() == 0:
        return
    if implementation == "portable":
        portable.launch(k_new, v_new, block_table, cu_seqlens_q, seq_lens, k_scale_new, k, v, k_scale)
        return
    page_size, starts = k.shape[1], cu_seqlens_q.tolist()
    for b, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        kv_len = int(seq_lens[b])
        start = max(start, stop - kv_len)  # drop what would lie before position 0
        if kv_len > block_table.shape[1] * page_size or start >= stop:
            continue
        position = torch.arange(kv_len - (stop - start), kv_len, device=k.device)
        page, slot = block_table[b, position // page_size].long(), position % page_size
        k[page, slot], v[page, slot] = k_new[start:stop], v_new[start:stop]
        if k_scale is not None:
            k_scale[page, slot // 32, :, slot % 32] = k_scale_new[start:stop]


define_operator(
    "append(Tensor k_new, Tensor v_new, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, Tensor? k_scale_new, "
    "str implementation, Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scale)",
    _append,
)
