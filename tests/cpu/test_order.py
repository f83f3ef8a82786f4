"""The kernels that order the work of a prefill, against plain Python, and what they compile to."""

from itertools import product

import pytest
import torch

from hpcattn.inspection import record_launches
from hpcattn.kernels.portable import order as kernels
from hpcattn.masks import active_tiles


def twin(q_lens, kv_lens, mask, block_m, max_kv):
    """Tiles of every unit (request, block, head), one query at a time."""
    units = {}
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        kv_len = kv_len if 0 <= kv_len <= max_kv else 0
        for block, head in product(range(-(-q_len // block_m)), range(1 if mask is None else mask.shape[1])):
            last = min(q_len, (block + 1) * block_m) - 1
            seen = -(-max(kv_len - q_len + last + 1, 0) // 128)
            if mask is not None:
                row = block * block_m // 128
                widest = kv_len - q_len + min(q_len, row * 128 + 128)
                fits = row < mask.shape[2] and widest <= 128 * mask.shape[3]
                seen = int((mask[request, head, row, :seen] != 0).sum()) if fits else 0
            units[request, block, head] = seen
    return units


def run(q_lens, seq_lens, mask=None, block_m=128, max_kv=8192, num_q_heads=2):
    """Order the units, check that they are complete and in order, and return their tiles in this order."""
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    lens = None if seq_lens is None else torch.tensor(seq_lens, dtype=torch.int32)
    rows = kernels.capacity(sum(q_lens), len(q_lens), block_m, 1 if mask is None else num_q_heads)
    order, header = torch.full((rows, 4), -7, dtype=torch.int32), torch.full((2,), 9, dtype=torch.int32)
    scratch = torch.full((kernels.scratch_words(rows, mask is not None),), -5, dtype=torch.int32)
    kernels.launch(starts, lens, mask, num_q_heads, block_m, max_kv, order, header, scratch)
    expected = twin(q_lens, q_lens if seq_lens is None else seq_lens, mask, block_m, max_kv)
    assert header.tolist() == [len(expected), 0]
    assert (order[len(expected) :] == -7).all() and (order[: len(expected), 3] == 0).all()
    units = [tuple(row) for row in order[: len(expected), :3].tolist()]
    assert sorted(units) == sorted(expected)
    longest = -(-max_kv // 128)
    width = -(-(longest + 1) // kernels.BINS)
    bins = [(longest - expected[unit]) // width for unit in units]
    assert bins == sorted(bins)
    return [expected[unit] for unit in units]


def lengths(batch, longest, seed):
    """Of queries and keys, random, some of them zero or invalid (keys < 0, > longest, fewer than queries)."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, max(2, 8192 // batch), (batch,), generator=generator)
    q[torch.rand(batch, generator=generator) < 0.2] = 0
    kv = (q + torch.randint(0, 2000, (batch,), generator=generator)).clamp_max(longest)
    kind = torch.rand(batch, generator=generator)
    kv[kind < 0.1] = -3
    kv[(kind > 0.1) & (kind < 0.2)] = longest + 1
    kv[(kind > 0.2) & (kind < 0.3)] //= 2
    return q.tolist(), kv.tolist()


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 33, 64, 70])
def test_dense(batch, block_m):
    q, kv = lengths(batch, 8192, seed=batch)
    run(q, kv, block_m=block_m)
    run(q, None, block_m=block_m)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (4, 8), (5, 1), (17, 2), (70, 6), (3, 128)])
def test_masked(batch, heads, block_m):
    q, kv = lengths(batch, 4096, seed=batch)
    generator = torch.Generator().manual_seed(heads)
    mask = torch.randint(0, 3, (batch, heads, max(-(-max(q) // 128), 1), 32), generator=generator, dtype=torch.uint8)
    mask[torch.rand(mask.shape[:3], generator=generator) < 0.2] = 0
    run(q, kv, mask, block_m, 4096, heads)
    strided = torch.empty(heads, batch, mask.shape[2] + 1, 51, dtype=torch.uint8).fill_(1)
    strided = strided.transpose(0, 1)[:, :, 1:, 3:35]
    run(q, kv, strided.copy_(mask), block_m, 4096, heads)
    run(q, None, mask[:, :, :-1], block_m, 4096, heads)  # lacks a row
    run(q, kv, mask[..., :7], block_m, 4096, heads)  # and columns


def test_counts_are_active_tiles():
    mask = torch.randint(0, 2, (1, 4, 5, 9), dtype=torch.uint8)
    tiles = run([600], [1100], mask, max_kv=1100, num_q_heads=4)
    assert tiles == sorted(active_tiles(mask, 600, 1100).flatten().tolist(), reverse=True)


def test_several_programs():
    """More units than a program places, most of them in one bin."""
    tiles = run([1] * 5000 + [60000], [1] * 5000 + [60000], block_m=64, max_kv=60000)
    assert len(tiles) > 2 * kernels.BLOCK and tiles[:3] == [469, 469, 468]


def test_bins_may_be_wide():
    tiles = run([0, 3000, 0, 500], [0, 260000, 0, 131073], max_kv=262144)
    assert tiles[0] > tiles[-1] > 1000


def test_nothing_to_do():
    assert run([0, 0, 0], [5, 0, -1]) == []


def test_scratch_is_allocated():
    order, header = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    kernels.launch(torch.tensor([0, 128, 300], dtype=torch.int32), None, None, 8, 128, 1000, order, header)
    assert header.tolist() == [3, 0] and order[0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("max_kv", [8000, 131072])
@pytest.mark.parametrize("columns", [0, 33, 64])
def test_compiles_without_spills(columns, max_kv):
    starts, lens = torch.zeros(71, dtype=torch.int32), torch.zeros(70, dtype=torch.int32)
    mask = torch.ones(70, 8, 8, columns, dtype=torch.uint8) if columns else None
    order, header = torch.zeros(2000, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with record_launches() as launches:
        kernels.launch(starts, lens, mask, 8, 128, max_kv, order, header)
    assert len(launches) == (2 if columns else 1)
    for launch in launches:
        compiled = launch.compile()
        assert compiled.spill_store_bytes == compiled.spill_load_bytes == compiled.stack_bytes == 0
    assert compiled.opcodes["STG.E.128"]  # a row of the order at once
