"""The oracle: attention in float64 on exactly the (quantized) inputs a kernel gets.

One plain function per operator, used by tests, benchmarks and notebooks alike. Both gather what a request's block table
and length make visible and nothing else, so whatever lies in unused slots, pages or table entries cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcattn.cache import PackedKV, PagedKVCache, gather_kv
from hpcattn.masks import MASK_TILE
from hpcattn.quantization import FP8, P_SCALE, Scales, dequantize, unpad_q_scale

__all__ = ["PModel", "attention_decode_reference", "attention_prefill_reference", "relative_error"]

_MAX_SCORES = 1 << 26  # score elements held at once: 512 MiB in float64


@dataclass(frozen=True)
class PModel:
    """How an fp8 kernel rounds its probabilities: `e4m3(256 * exp(score - running max))`.

    The running maximum depends on the order in which keys are met, hence so does the rounding: about 2-3 % of the
    result, zero on average. A kernel's own model lets a test bound its error far below that.

    tile: keys per step of the running maximum.
    order: `"ascending"`, `"descending"` or `"tail_first"` (the last tile, then ascending).
    chunks: `chunks[request][kv_head]` are the token positions at which independent partial states start, the first
        being 0; None for a single chunk.
    """

    tile: int = 64
    order: str = "ascending"
    chunks: Sequence[Sequence[Sequence[int]]] | None = None

    def tiles(self, request: int, head: int, kv_len: int) -> Iterator[list[slice]]:
        """For each chunk, the key slices in the order in which they are met."""
        starts = list(self.chunks[request][head]) if self.chunks else [0]
        for start, stop in zip(starts, [*starts[1:], kv_len], strict=True):
            stop = min(stop, kv_len)
            tiles = [slice(i, min(i + self.tile, stop)) for i in range(start, stop, self.tile)]
            if self.order == "descending":
                tiles.reverse()
            elif self.order == "tail_first":
                tiles = tiles[-1:] + tiles[:-1]
            yield tiles


def attention_decode_reference(
    q: Tensor,
    cache: PagedKVCache,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scales: Scales | None = None,
    num_query_tokens: int = 1,
    softmax_scale: float | None = None,
    p_model: PModel | None = None,
) -> tuple[Tensor, Tensor]:
    """Paged decode. Query i of S sits at position L - S + i and sees the keys up to it.

    q: `[batch * S, num_q_heads, head_dim]`, request-major. block_table: int32 `[batch, max_pages]`. seq_lens: int32
    `[batch]`, the new tokens included. p_model: model the rounding of P (fp8 only); None rounds nothing.
    Returns o float64 like q, and lse float64 `[batch * S, num_q_heads]` (natural log); a query that sees nothing has
    o = 0 and lse = -inf.
    """
    starts = torch.arange(0, q.shape[0] + 1, num_query_tokens, device=q.device)
    return attention_prefill_reference(
        q, cache, block_table, starts, seq_lens, scales=scales, softmax_scale=softmax_scale, p_model=p_model
    )


def attention_prefill_reference(
    q: Tensor,
    kv: PagedKVCache | PackedKV,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor | None,
    *,
    scales: Scales | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
    p_model: PModel | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal (bottom-right) attention of ragged requests over a paged cache or packed keys and values.

    q: `[total_q, num_q_heads, head_dim]`. cu_seqlens_q: int32 `[batch + 1]`. seq_lens: int32 `[batch]`, all keys
    including the current queries; None with PackedKV (self-attention). block_mask: see `hpcattn.masks`.
    Returns o float64 like q and lse float64 `[total_q, num_q_heads]`; o = 0 and lse = -inf where nothing is visible.
    """
    bounds = cu_seqlens_q.tolist()
    if scales is not None:
        q_scale = scales.q if scales.q.dim() == 2 else unpad_q_scale(scales.q, cu_seqlens_q)[: q.shape[0]]
        q = dequantize(q, q_scale)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float64)
    for b, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        padded = scales is not None and scales.q.dim() == 3 and scales.q.shape[2] < stop - start
        if padded or (seq_lens is not None and not 0 <= int(seq_lens[b]) <= block_table.shape[1] * kv.page_size):
            o[start:stop], lse[start:stop] = math.nan, math.nan
            continue
        k, v = _keys_and_values(kv, block_table, b, start, stop, seq_lens, scales)
        kv_len, num_kv_heads = k.shape[:2]
        group = q.shape[1] // num_kv_heads
        step = max(1, _MAX_SCORES // max(1, kv_len * group))
        for h in range(num_kv_heads if kv_len else 0):
            heads = slice(h * group, (h + 1) * group)
            tiles = None if p_model is None else list(p_model.tiles(b, h, kv_len))
            for first in range(start, stop, step):
                rows = slice(first, min(first + step, stop))
                local = torch.arange(rows.start - start, rows.stop - start, device=q.device)
                visible = _visible(local, stop - start, kv_len, None if block_mask is None else block_mask[b, heads])
                s = (q[rows, heads].double() * scale) @ k[:, h].T  # [rows, group, kv_len]
                s = s.masked_fill(~visible, -math.inf)
                o[rows, heads], lse[rows, heads] = _attend(s, v[:, h], tiles)
        if block_mask is not None:
            beyond = _beyond_mask(stop - start, kv_len, block_mask)
            o[start:stop][beyond], lse[start:stop][beyond] = math.nan, math.nan
    return o, lse


def relative_error(o: Tensor, reference: Tensor) -> float:
    """`|o - reference| / |reference|` in the Frobenius norm; NaN if `o` holds one."""
    return float((o.double() - reference).norm() / reference.norm().clamp_min(1e-300))


def _keys_and_values(kv, block_table, b, start, stop, seq_lens, scales) -> tuple[Tensor, Tensor]:
    """One request's keys and values `[kv_len, num_kv_heads, head_dim]` in float64, dequantized."""
    if isinstance(kv, PackedKV):
        return kv.k[start:stop].double(), kv.v[start:stop].double()
    k, v, k_scale = gather_kv(kv, block_table, b, int(seq_lens[b]))
    if scales is None:
        return k.double(), v.double()
    return dequantize(k, k_scale if scales.k is None else scales.k), dequantize(v, scales.v)


def _visible(local: Tensor, q_len: int, kv_len: int, block_mask: Tensor | None) -> Tensor:
    """bool `[rows, 1 or group, kv_len]` for the queries `local` of a request."""
    keys = torch.arange(kv_len, device=local.device)
    causal = (keys[None, :] <= (kv_len - q_len + local)[:, None])[:, None]
    if block_mask is None:
        return causal
    rows, columns = (
        (x // MASK_TILE).clamp_max(n - 1) for x, n in zip((local, keys), block_mask.shape[1:], strict=True)
    )
    return causal & (block_mask[:, rows][..., columns] != 0).transpose(0, 1)


def _beyond_mask(q_len: int, kv_len: int, block_mask: Tensor) -> Tensor:
    """bool `[q_len]`: queries in a tile of 128 whose rows or causal range the mask does not cover."""
    row = torch.arange(q_len, device=block_mask.device) // MASK_TILE
    widest = kv_len - q_len + ((row + 1) * MASK_TILE).clamp_max(q_len)
    return (row >= block_mask.shape[2]) | (widest > block_mask.shape[3] * MASK_TILE)


def _attend(s: Tensor, v: Tensor, tiles: list[list[slice]] | None) -> tuple[Tensor, Tensor]:
    """Softmax of masked scores `[..., kv_len]` applied to v `[kv_len, head_dim]`: (o, lse)."""
    lse = s.logsumexp(-1)
    blind = lse == -math.inf  # rows that see nothing: avoids -inf - -inf
    if tiles is None:
        return torch.exp(s - lse.masked_fill(blind, 0.0)[..., None]) @ v, lse
    o = torch.zeros_like(s[..., :1] @ v[:1])
    for chunk in tiles:
        m = torch.full_like(lse, -math.inf)
        acc = torch.zeros_like(o)
        for tile in chunk:
            m_new = torch.maximum(m, s[..., tile].amax(-1))
            shift = m_new.masked_fill(m_new == -math.inf, 0.0)
            p = torch.exp(s[..., tile] - shift[..., None])
            p = (p * P_SCALE).float().to(FP8).double() / P_SCALE
            acc = acc * torch.exp(m - shift)[..., None] + p @ v[tile]
            m = m_new
        o += acc * torch.exp(m - lse.masked_fill(blind, 0.0))[..., None]
    return o, lse
