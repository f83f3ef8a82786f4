"""Causal geometry and block masks against brute force."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcattn.masks import active_tiles, causal_tiles, random_block_mask, visible_pairs

lengths = st.integers(0, 300)


def visible(q_len: int, kv_len: int) -> torch.Tensor:
    return torch.arange(kv_len)[None, :] <= (kv_len - q_len + torch.arange(q_len))[:, None]


@settings(max_examples=50, deadline=None)
@given(lengths, lengths)
def test_visible_pairs_and_tiles(q_len, kv_len):
    pairs = visible(q_len, kv_len)
    assert visible_pairs([q_len], [kv_len]) == int(pairs.sum())
    tiles = causal_tiles(q_len, kv_len, tile=32)
    for i in range(tiles.shape[0]):
        for j in range(tiles.shape[1]):
            assert tiles[i, j] == pairs[32 * i : 32 * i + 32, 32 * j : 32 * j + 32].any()


def test_random_mask_is_seeded_and_keeps_the_frontier():
    mask = random_block_mask(2, 4, 512, 4096, seed=3)
    assert mask.shape == (2, 4, 4, 32) and mask.dtype == torch.uint8
    assert torch.equal(mask, random_block_mask(2, 4, 512, 4096, seed=3))
    tiles = causal_tiles(512, 4096)
    for i in range(4):
        assert (mask[:, :, i, int(tiles[i].sum()) - 1] == 1).all()
    kept = float(mask.float().mean())
    assert 0.22 < kept < 0.33  # a quarter, and the frontier
    assert torch.equal(active_tiles(mask, 512, 4096), (mask.bool() & tiles).sum(-1))
    assert active_tiles(None, 512, 4096).tolist() == [[[29, 30, 31, 32]]]


def test_mask_where_nothing_is_visible():
    assert random_block_mask(1, 1, 300, 20).shape == (1, 1, 3, 1)
    assert causal_tiles(300, 20)[:, 0].tolist() == [False, False, True]
