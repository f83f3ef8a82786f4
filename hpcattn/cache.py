"""The paged KV cache: fixed-size pages, a block table per request, any layout that strides can express.

The idea is PagedAttention's (Kwon et al., 2023): a request's keys and values live in pages scattered over one pool,
and its row of the block table lists them in order, so memory is claimed a page at a time and never moved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpcattn.quantization import (
    FP8,
    Scales,
    k_scale_rows,
    k_scales_in_page,
    quantize_per_head,
    quantize_per_tensor,
    quantize_per_token_head,
    to_fp8,
)

__all__ = ["PAGE_SIZES", "PackedKV", "PageAllocator", "PagedKVCache", "gather_kv", "make_block_table", "quantize_cache"]

PAGE_SIZES = (16, 32, 64, 128, 256)


def _facts(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


@dataclass(frozen=True)
class PackedKV:
    """Keys and values without a cache: `[total_tokens, num_kv_heads, head_dim]`, request after request."""

    k: Tensor
    v: Tensor

    @property
    def metadata(self) -> tuple:
        """As `PagedKVCache.metadata`."""
        return "packed", *(_facts(x) for x in (self.k, self.v))


@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values in pages.

    k, v: bf16 or e4m3, logical `[num_pages, page_size, num_kv_heads, head_dim]`. Page, token and head strides are free
    and may differ between k and v (NHD, HND, slices of a joint-KV tensor); head_dim is dense.
    k_scale: float32, logical `[num_pages, ceil(page_size / 32), num_kv_heads, 32]`, for type 0 fp8 only; see
    `hpcattn.quantization`.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None

    @cached_property
    def metadata(self) -> tuple:
        """Shapes, strides, dtypes, devices and alignment, hashable: equal for caches that a call treats alike.

        Computed once: give the tensors no other storage, shape or strides afterwards.
        """
        return tuple(None if x is None else _facts(x) for x in (self.k, self.v, self.k_scale))

    num_pages = property(lambda self: self.k.shape[0])
    page_size = property(lambda self: self.k.shape[1])
    num_kv_heads = property(lambda self: self.k.shape[2])
    head_dim = property(lambda self: self.k.shape[3])
    dtype = property(lambda self: self.k.dtype)
    device = property(lambda self: self.k.device)

    @property
    def layout(self) -> str:
        """`"NHD"` if the heads of a token lie together, `"HND"` if the tokens of a head do."""
        return "HND" if self.k.stride(1) < self.k.stride(2) else "NHD"

    @staticmethod
    def allocate(
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "NHD",
        device: torch.device | str = "cpu",
        joint: bool = False,
        k_scales: str | None = None,
        fill: float = float("nan"),
    ) -> PagedKVCache:
        """An empty cache, every slot set to `fill`.

        joint: k and v are slices of one tensor, page by page.
        k_scales: None, `"page"` (type 0 scales inside the K pages, as decode wants them) or `"separate"` (prefill).
        Raises ValueError for a page size, layout, dtype or k_scales that is not supported.
        """
        for name, value, accepted in (
            ("page_size", page_size, PAGE_SIZES),
            ("layout", layout, ("NHD", "HND")),
            ("dtype", dtype, (torch.bfloat16, FP8)),
            ("k_scales", k_scales, (None, "page", "separate") if dtype == FP8 else (None,)),
        ):
            if value not in accepted:
                raise ValueError(f"{name} must be one of {accepted}, got {value!r}")
        rows = page_size + (k_scale_rows(page_size) if k_scales == "page" else 0)
        # physical order: pages, (k|v if joint,) then tokens and heads as the layout says
        inner = (rows, num_kv_heads) if layout == "NHD" else (num_kv_heads, rows)
        shape = (num_pages, 2, *inner, head_dim) if joint else (2, num_pages, *inner, head_dim)
        pool = torch.full(shape, fill, dtype=dtype, device=device)
        k, v = (x if layout == "NHD" else x.transpose(1, 2) for x in pool.unbind(1 if joint else 0))
        k_scale = None
        if k_scales == "page":
            k, k_scale = k_scales_in_page(k, page_size)
            k_scale.fill_(fill)
        elif k_scales == "separate":
            shape = (num_pages, k_scale_rows(page_size), num_kv_heads, 32)
            k_scale = torch.full(shape, fill, dtype=torch.float32, device=device)
        return PagedKVCache(k, v[:, :page_size], k_scale)


class PageAllocator:
    """Hands out pages from a shuffled free list, so that neighbours in a request are not neighbours in memory."""

    def __init__(self, num_pages: int, *, seed: int = 0):
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises MemoryError if fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free: release finished requests or add pages")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back; the last ones released are the first ones reused. Raises ValueError for a free page."""
        if free := set(pages) & set(self._free):
            raise ValueError(f"pages {sorted(free)} are free already")
        self._free = [*reversed(pages), *self._free]


def make_block_table(
    seq_lens: Sequence[int] | Tensor,
    page_size: int,
    *,
    num_pages: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    fill: int = -1,
) -> Tensor:
    """Shuffled block table, int32 `[batch, max_pages]`, for requests of these lengths; unused entries are `fill`."""
    counts = [-(-int(n) // page_size) for n in seq_lens]
    allocator = PageAllocator(sum(counts) if num_pages is None else num_pages, seed=seed)
    table = torch.full((len(counts), max(1, *counts)), fill, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor(allocator.allocate(count), dtype=torch.int32)
    return table.to(device)


def gather_kv(
    cache: PagedKVCache, block_table: Tensor, request: int, seq_len: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One request's contiguous k and v `[seq_len, num_kv_heads, head_dim]` and k_scale `[seq_len, num_kv_heads]`."""
    pages = block_table[request, : -(-seq_len // cache.page_size)].long()
    k, v = (x[pages].flatten(0, 1)[:seq_len] for x in (cache.k, cache.v))
    if cache.k_scale is None:
        return k, v, None
    by_token = cache.k_scale[pages].transpose(2, 3)[..., : cache.page_size, :]  # [pages, rows, 32 or page_size, heads]
    return k, v, by_token.flatten(0, 2)[:seq_len]


def flatten_scales(
    kv: PagedKVCache | PackedKV, scales: Scales | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The (q, k, v) scales of a call as tensors, as registered operators take them; K scales of type 0 have rank 4."""
    if scales is None:
        return None, None, None
    return scales.q, kv.k_scale if scales.k is None else scales.k, scales.v


def unflatten_scales(
    k: Tensor, v: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[PagedKVCache | PackedKV, Scales | None]:
    """The keys and values and scales that an operator was given as tensors."""
    if q_scale is None:
        return PackedKV(k, v) if k.dim() == 3 else PagedKVCache(k, v), None
    if k_scale.dim() == 4:
        return PagedKVCache(k, v, k_scale), Scales(q_scale, v_scale)
    return PagedKVCache(k, v), Scales(q_scale, v_scale, k_scale)


def quantize_cache(
    cache: PagedKVCache, quant: str, *, k_scales: str = "page"
) -> tuple[PagedKVCache, Tensor | None, Tensor]:
    """Quantize a bf16 cache to fp8 type 0 or type 1, keeping its layout.

    Unused slots that hold NaN or Inf do not enter any scale; NaN stays NaN.
    k_scales: where type 0 puts the K scales, `"page"` (decode) or `"separate"` (prefill).
    Returns (cache, k scale `[1]` or None for type 0, v scale `[num_kv_heads]` or `[1]`).
    """
    if quant not in ("type0", "type1"):
        raise ValueError(f"quant must be 'type0' or 'type1', got {quant!r}")
    out = PagedKVCache.allocate(
        *cache.k.shape,
        dtype=FP8,
        layout=cache.layout,
        device=cache.device,
        k_scales=k_scales if quant == "type0" else None,
    )
    quantize_k, quantize_v = (
        (quantize_per_token_head, quantize_per_head) if quant == "type0" else (quantize_per_tensor, quantize_per_tensor)
    )
    _, v_scale = quantize_v(cache.v.nan_to_num(0.0, 0.0, 0.0))
    out.v.copy_(to_fp8(cache.v, v_scale))
    _, k_scale = quantize_k(cache.k.nan_to_num(0.0, 0.0, 0.0))
    out.k.copy_(to_fp8(cache.k, k_scale))
    if quant == "type1":
        return out, k_scale, v_scale
    write_k_scales(out, k_scale)
    return out, None, v_scale


def write_k_scales(cache: PagedKVCache, k_scale: Tensor) -> None:
    """Store type 0 scales, float32 `[num_pages, page_size, num_kv_heads]`, where the cache keeps them."""
    rows = k_scale.unflatten(1, (-1, min(32, cache.page_size)))  # [pages, rows, 32, heads]
    cache.k_scale[..., : rows.shape[2]].copy_(rows.transpose(2, 3))
