"""Which (query, key) pairs an attention call sees: causal geometry and block masks.

Causality is aligned bottom-right: of `q_len` queries and `kv_len` keys, query i sits at position
`kv_len - q_len + i` and sees the keys up to and including that position. A block mask is uint8
`[batch, num_q_heads, ceil(max q_len / 128), ceil(max kv_len / 128)]`; a tile that is 0 is skipped. Rows are tiles of a
request's own queries, columns tiles of its keys from position 0; causality applies inside the tiles that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["MASK_TILE", "active_tiles", "causal_tiles", "random_block_mask", "visible_pairs"]

MASK_TILE = 128


def visible_pairs(q_lens: Iterable[int], kv_lens: Iterable[int]) -> int:
    """Number of (query, key) pairs a causal call computes, summed over requests (of one head)."""
    total = 0
    for q, kv in zip(q_lens, kv_lens, strict=True):
        seen = min(q, kv)  # queries that see something; the last of them sees kv keys, each earlier one a key less
        total += seen * kv - seen * (seen - 1) // 2
    return total


def causal_tiles(q_len: int, kv_len: int, tile: int = MASK_TILE, device: torch.device | str = "cpu") -> Tensor:
    """bool `[ceil(q_len / tile), ceil(kv_len / tile)]`: tiles that hold at least one visible pair."""
    last_query = (torch.arange(0, q_len, tile, device=device) + tile).clamp_max(q_len) - 1
    first_key = torch.arange(0, kv_len, tile, device=device)
    return first_key[None, :] <= (kv_len - q_len + last_query)[:, None]


def random_block_mask(
    batch: int,
    num_q_heads: int,
    q_len: int,
    kv_len: int,
    *,
    drop: float = 0.75,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Seeded mask that drops each tile with probability `drop`, but never the last tile a row of tiles can see."""
    visible = causal_tiles(q_len, kv_len)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, num_q_heads, *visible.shape, generator=generator) >= drop
    if kv_len:
        frontier = visible.sum(1).sub(1).clamp_min(0)
        mask[:, :, torch.arange(visible.shape[0]), frontier] = True
    return mask.to(torch.uint8).to(device)


def active_tiles(mask: Tensor | None, q_len: int, kv_len: int) -> Tensor:
    """int64 `[batch, heads, q tiles]` (`[1, 1, q tiles]` without a mask): 128 x 128 tiles that each row computes."""
    visible = causal_tiles(q_len, kv_len)
    if mask is None:
        return visible.sum(1)[None, None]
    rows, columns = visible.shape
    return ((mask[..., :rows, :columns].cpu() != 0) & visible).sum(-1)
