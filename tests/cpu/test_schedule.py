"""The task map: plain Python, and its twin on the device."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcattn import explain, plan_decode
from hpcattn.bench.workloads import DECODE_CASES
from hpcattn.quantization import FP8
from hpcattn.schedule import (
    CLUSTER_SIZES,
    MOST_TILES,
    PLAN_TILE,
    ROW_BLOCKS,
    SMALL_SHARE,
    SPARE,
    plan_chunks,
    plan_decode_reference,
    policy,
    saturating_splits,
    static_chunks,
)

lengths = st.integers(0, 3000) | st.sampled_from([0, 1, 127, 128, 129, 4096, 200_000, -5, 2**30])
batches = st.lists(lengths, max_size=40)
sizes = st.sampled_from(CLUSTER_SIZES)
costs = st.integers(0, 8) | st.just(0)


def plan(lens, heads, **kwargs):
    return plan_decode(torch.tensor(lens, dtype=torch.int32), heads, **kwargs)


def tiles_of(lens, max_seq_len=2**30):
    return [max(1, -(-n // PLAN_TILE)) if 0 <= n <= max_seq_len else 1 for n in lens]


@settings(max_examples=25, deadline=None)
@given(batches, st.integers(1, 8), st.integers(1, 300), st.integers(1, 8), sizes, costs)
def test_portable_twin_agrees_exactly(lens, heads, num_clusters, min_quota, cluster_size, pair_cost):
    settings = dict(num_clusters=num_clusters, min_quota=min_quota, max_seq_len=100_000, pair_cost=pair_cost)
    portable = plan(lens, heads, cluster_size=cluster_size, implementation="portable", **settings)
    expected = plan_decode_reference(lens, heads, **settings)
    for name, values in zip(("header", "offsets", "records"), expected, strict=True):
        assert getattr(portable, name).tolist() == values, name
    assert portable.counters.tolist() == [0] * (num_clusters * cluster_size * ROW_BLOCKS)


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 8), st.integers(1, 300), st.integers(1, 4), sizes, costs)
def test_every_place_is_one_cluster_s_and_all_have_the_same(lens, heads, clusters, min_quota, cluster_size, cost):
    settings = dict(num_clusters=clusters, min_quota=min_quota, max_seq_len=5000, pair_cost=cost)
    p = plan(lens, heads, cluster_size=cluster_size, implementation="reference", **settings)
    places = [n + cost for n in tiles_of(lens, 5000)]
    quota, total, invalid, _ = p.header.tolist()
    assert p.header[3] == p.pair_cost == cost
    share = max(min_quota, -(-total // clusters))
    assert total == sum(places) * heads
    assert quota == max([share, *(n for n in places if n <= share + share // SPARE)]), "longer, if that spares a cut"
    assert invalid == sum(not 0 <= n <= 5000 for n in lens)
    line = [(b, h, t, n) for b, n in enumerate(places) for h in range(heads) for t in range(n)]
    starts = [c * quota for c in range(clusters)]
    for t, record in zip(starts, p.records.tolist(), strict=True):
        begin, end = min(t, total), min(t + quota, total)
        assert record == [*(line[t] if t < total else [0] * 4), begin, end, quota, cost]
    borders = {(b, h, max(0, t - cost)) for b, h, t, _ in (line[t] for t in starts if t < total)}
    for b, chunks in enumerate(plan_chunks(p, shares=False)):
        for h, cuts in enumerate(chunks):
            cut = {(b, h, x // PLAN_TILE) for x in cuts}
            assert cut == {(b, h, 0)} | {x for x in borders if x[:2] == (b, h)}, "segments end where clusters do"


def walk(p, lens):
    """(cluster, CTA) of every tile of every pair, as the kernels go: from the records, segment by segment."""
    owners, size = {}, p.cluster_size
    tiles, offsets = tiles_of(lens, p.max_seq_len), p.offsets.tolist()
    for cluster, (b, h, first, places, t, end, quota, cost) in enumerate(p.records.tolist()):
        while t < end:
            last = min(first + end - t, places)
            n, at = max(0, last - cost) - max(0, first - cost), max(0, first - cost)
            alone = first == 0 and last == places and places - cost <= max(1, quota // (SMALL_SHARE * size))
            for j in range(size):
                share = n // size + (j < n % size)
                rank = (b * p.num_kv_heads + h) % size if alone else (j + t) % size
                for tile in range(at, at + share):
                    assert (b, h, tile) not in owners
                    owners[b, h, tile] = cluster, rank
                at += share
            t += last - first
            first, b, h = 0, b + (h + 1) // p.num_kv_heads, (h + 1) % p.num_kv_heads
            places = offsets[b + 1] - offsets[b] if t < end else 0
    assert set(owners) == {(b, h, t) for b, n in enumerate(tiles) for h in range(p.num_kv_heads) for t in range(n)}
    return owners


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(1, 3), st.integers(1, 60), sizes, costs)
def test_every_tile_is_done_once_in_the_chunks_of_the_plan(lens, heads, num_clusters, cluster_size, cost):
    """A chunk is what one CTA does of a pair; a small pair is one, the others are shared out evenly."""
    settings = dict(cluster_size=cluster_size, num_clusters=num_clusters, max_seq_len=50_000, pair_cost=cost)
    p = plan(lens, heads, **settings, implementation="reference")
    owners, chunks = walk(p, lens), plan_chunks(p)
    small = max(1, int(p.header[0]) // (SMALL_SHARE * cluster_size))
    for b, n in enumerate(tiles_of(lens, p.max_seq_len)):
        for h in range(heads):
            mine = [owners[b, h, t] for t in range(n)]
            starts = [0, *(t for t in range(1, n) if mine[t] != mine[t - 1])]
            if p.one_cta_per_pair:
                assert chunks[b][h] == [0]
                continue
            assert sorted(set(chunks[b][h])) == [t * PLAN_TILE for t in starts]
            clusters = {c for c, _ in mine}
            if len(clusters) == 1 and n <= small:
                assert len(set(mine)) == 1 or 0 < cost > plan_offset(p, b, h), "small pairs are whole"
            for c in clusters:
                loads = [mine.count((c, r)) for r in range(cluster_size)]
                assert len(set(mine)) == 1 or max(loads) - min(loads) <= 1


def plan_offset(p, b, h):
    """Places of a pair from where a cluster's range begins in it, or more than any."""
    places = int(p.offsets[b + 1] - p.offsets[b])
    begin = int(p.offsets[b]) * p.num_kv_heads + h * places
    return -begin % int(p.header[0])


def test_longer_shares_and_small_pairs_rotate():
    """Pairs of 5 tiles in clusters of 4: the fifth tile goes to every CTA in turns; small ones go to CTAs in turns."""
    p = plan([5 * PLAN_TILE] * 8, 1, cluster_size=4, num_clusters=1, pair_cost=0, implementation="reference")
    owners = list(walk(p, [5 * PLAN_TILE] * 8).values())
    assert [owners.count((0, rank)) for rank in range(4)] == [10] * 4 and plan_chunks(p)[0] == [[0, 256, 384, 512]]
    p = plan([5 * PLAN_TILE] * 64, 1, cluster_size=4, num_clusters=1, pair_cost=3, implementation="reference")
    owners = walk(p, [5 * PLAN_TILE] * 64)
    assert all(owners[b, 0, t] == (0, b % 4) for b, _, t in owners) and plan_chunks(p) == [[[0]]] * 64


def test_a_cut_may_lie_before_the_first_tile():
    """Then the first cluster has none of the pair's tiles."""
    p = plan([300, 300], 1, cluster_size=1, num_clusters=2, pair_cost=4, min_quota=10, implementation="reference")
    assert p.records.tolist() == [[0, 0, 0, 7, 0, 10, 10, 4], [1, 0, 3, 7, 10, 14, 10, 4]]
    assert {c for (b, *_), (c, _) in walk(p, [300, 300]).items() if b == 1} == {1}
    assert set(plan_chunks(p)[1][0]) == {0}


def test_where_every_pair_has_a_cta_none_is_cut():
    """The Hopper kernel then runs as the static one."""
    settings = dict(cluster_size=1, num_clusters=6, min_quota=8, max_seq_len=8 * PLAN_TILE)
    assert plan([1000, 3, 0], 2, **settings).one_cta_per_pair
    assert plan_chunks(plan([1000, 3, 0], 2, **settings, pair_cost=5)) == [[[0], [0]]] * 3
    for lens, change in (
        ([1, 2, 3, 4], {}), ([1], dict(cluster_size=2)), ([1], dict(max_seq_len=1025)), ([1], dict(min_quota=7)),
        ([1, 2, 3], dict(row_blocks=2)),
    ):  # fmt: skip
        assert not plan(lens, 2, **settings | change).one_cta_per_pair


@pytest.mark.parametrize("case", DECODE_CASES)
def test_balance_on_the_named_workloads(case):
    """The segments of every pair add up to clusters of equal load, but for the last one at work."""
    lens = DECODE_CASES[case]
    p = plan(lens, 1, cluster_size=4, num_clusters=32, min_quota=1, pair_cost=0, implementation="reference")
    loads = [0] * 32
    for b, (starts,) in enumerate(plan_chunks(p, shares=False)):
        for start, stop in pairwise(x // PLAN_TILE for x in [*starts, tiles_of(lens)[b] * PLAN_TILE]):
            loads[(int(p.offsets[b]) + start) // int(p.header[0])] += stop - start
    working = [x for x in loads if x]
    assert sum(working) == int(p.header[1]) and max(working) == min(working[:-1], default=working[-1]) >= working[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_clusters", 0), ("num_clusters", 65537), ("min_quota", 0), ("min_quota", 10**9), ("max_seq_len", -1),
        ("query_rows", 97), ("num_clusters", 2.0), ("row_blocks", 0), ("row_blocks", ROW_BLOCKS + 1),
        ("pair_cost", -1), ("pair_cost", 17),
    ],
)  # fmt: skip
def test_numbers_that_would_overflow_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer from"):
        plan([1], 1, **{name: value})


def test_no_tile_number_exceeds_32_bits():
    """The longest requests that many pairs may have are bounded, and longer ones are out of range."""
    heads, num_clusters = 1024, 1000
    longest = MOST_TILES // (3001 * heads) * PLAN_TILE
    assert explain(plan_decode, torch.zeros(3001).int(), heads)["max_seq_len"] == longest
    how = dict(min_quota=16384, pair_cost=8)
    for lens in ([2**30] * 3001, [longest] * 3001):
        p = plan(lens, heads, num_clusters=num_clusters, **how, implementation="portable")
        expected = plan_decode_reference(lens, heads, num_clusters, **how, max_seq_len=longest)
        assert [x.tolist() for x in p.tensors[:3]] == list(expected)
    assert p.header[2] == 0 and 2**29 < p.header[1] - 8 * 3001 * heads <= 2**30


def test_empty_and_out_of_range_requests_have_a_tile():
    p = plan([10, -1, 5000, 0], 2, max_seq_len=4096, pair_cost=2, implementation="portable")
    assert p.header.tolist()[1:] == [24, 2, 2] and p.offsets.tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_rebuilt_in_place(implementation):
    how = dict(num_clusters=9, cluster_size=2, min_quota=2, pair_cost=1, row_blocks=2)
    p = plan([100, 3000], 2, **how, implementation=implementation)
    pointers = [x.data_ptr() for x in p.tensors]
    for lens in ([5000, 1], [0, 0], [1, 5000]):
        p.counters.fill_(7)
        again = plan_decode(torch.tensor(lens, dtype=torch.int32), 2, out=p, implementation=implementation)
        assert again is p and pointers == [x.data_ptr() for x in p.tensors]
        expected = plan_decode_reference(lens, 2, 9, min_quota=2, pair_cost=1)
        assert [x.tolist() for x in p.tensors[:3]] == list(expected) and not p.counters.any()
    assert (p.pair_cost, p.row_blocks, p.cluster_size) == (1, 2, 2)


@pytest.mark.parametrize("size", [None, *CLUSTER_SIZES])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("max_seq_len", [500, 100_000])
@pytest.mark.parametrize("query_rows", [1, 32, 80])
@pytest.mark.parametrize("row_blocks", [None, 1, 2])
def test_policy_fills_the_gpu_and_no_more(size, hopper, max_seq_len, query_rows, row_blocks):
    settled = policy(max_seq_len, query_rows, FP8, 132, hopper, size, row_blocks)
    chosen = {name: value for name, (value, _) in settled.items()}
    assert list(chosen) == ["cluster_size", "row_blocks", "pair_cost", "num_clusters", "min_quota"]
    assert chosen["cluster_size"] == size or size is None and chosen["cluster_size"] in CLUSTER_SIZES
    assert hopper or size or chosen["cluster_size"] == 1
    assert chosen["row_blocks"] == row_blocks or row_blocks is None and 1 <= chosen["row_blocks"] <= ROW_BLOCKS
    assert chosen["num_clusters"] >= 1 <= chosen["min_quota"] and chosen["pair_cost"] >= 0
    ctas = chosen["cluster_size"] * chosen["num_clusters"] * chosen["row_blocks"]
    assert ctas <= 132 if hopper else 132 < chosen["cluster_size"] * chosen["num_clusters"] <= 264


def test_explained():
    lens = torch.tensor([5, 70], dtype=torch.int32)
    chosen = explain(plan_decode, lens, 2, num_clusters=12)
    p = plan_decode(lens, 2, num_clusters=12)
    assert chosen["num_clusters"] == p.num_clusters == 12 and chosen["cluster_size"] == p.cluster_size == 1
    assert "num_clusters = 12" in str(chosen) and "as asked" in str(chosen) and "Hopper" in str(chosen)
    assert explain(plan_decode, lens, 2, out=p).choices["num_clusters"] == (12, "as the plan in out")
    for name in ("row_blocks", "pair_cost", "min_quota", "cluster_size"):
        assert explain(plan_decode, lens, 2, **{name: 2}).choices[name] == (2, "as asked")
        assert getattr(plan_decode(lens, 2, **{name: 2}), name) == 2
        assert explain(plan_decode, lens, 2)[name] == getattr(p, name)


def test_bad_input():
    with pytest.raises(TypeError, match="seq_lens must have dtype torch.int32, got torch.int64"):
        plan_decode(torch.tensor([1, 2]), 1)
    with pytest.raises(ValueError, match="num_kv_heads must be an integer from 1 to 1024, got 0"):
        plan([1], 0)
    with pytest.raises(ValueError, match=r"cluster_size must be one of \(1, 2, 4, 8\), got 3"):
        plan([1], 1, cluster_size=3)
    with pytest.raises(ValueError, match=r"plan.offsets must have shape \[2\]"):
        plan([1], 1, out=plan([1, 2], 1))
    with pytest.raises(ValueError, match="num_kv_heads must be 2"):
        plan([1], 1, out=plan([1], 2))


def test_static_schedule():
    assert static_chunks([200, 0, 64], 1, 2) == [[[0, 128]], [[0]], [[0]]]
    cpu = torch.device("cpu")
    assert saturating_splits(1, 1, 10_000, cpu) > 1
    assert saturating_splits(1, 1, 64, cpu) == 1, "a request of one tile cannot be split"
    assert saturating_splits(1000, 1, 10_000, cpu) == 1, "the grid is full already"


def test_opcheck():
    outputs = [torch.zeros(shape, dtype=torch.int32) for shape in (4, 3, (5, 8), 5 * ROW_BLOCKS)]
    args = (torch.tensor([5, 200], dtype=torch.int32), 2, 1, 3, 4096, "portable", *outputs)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.hpcattn.plan_decode.default, args, test_utils=tests)
