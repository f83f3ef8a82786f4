"""The task map: plain Python, and its twin on the device."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcattn import explain, plan_decode
from hpcattn.bench.workloads import DECODE_CASES
from hpcattn.schedule import (
    CLUSTER_SIZES,
    PLAN_TILE,
    ROW_BLOCKS,
    SMALL_SHARE,
    plan_chunks,
    plan_decode_reference,
    policy,
    saturating_splits,
    static_chunks,
)

lengths = st.integers(0, 3000) | st.sampled_from([0, 1, 127, 128, 129, 4096, 200_000, -5, 2**30])
batches = st.lists(lengths, max_size=40)
sizes = st.sampled_from(CLUSTER_SIZES)


def plan(lens, heads, **kwargs):
    return plan_decode(torch.tensor(lens, dtype=torch.int32), heads, **kwargs)


def tiles_of(lens, max_seq_len=2**30):
    return [max(1, -(-n // PLAN_TILE)) if 0 <= n <= max_seq_len else 1 for n in lens]


@settings(max_examples=25, deadline=None)
@given(batches, st.integers(1, 8), st.integers(1, 300), st.integers(1, 8), sizes)
def test_portable_twin_agrees_exactly(lens, heads, num_clusters, min_quota, cluster_size):
    settings = dict(num_clusters=num_clusters, min_quota=min_quota, max_seq_len=100_000)
    portable = plan(lens, heads, cluster_size=cluster_size, implementation="portable", **settings)
    expected = plan_decode_reference(lens, heads, **settings, cluster_size=cluster_size)
    for name, values in zip(("header", "offsets", "records"), expected, strict=True):
        assert getattr(portable, name).tolist() == values, name
    assert portable.counters.tolist() == [0] * (num_clusters * cluster_size * ROW_BLOCKS)


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 8), st.integers(1, 300), st.integers(1, 4), sizes)
def test_every_tile_is_done_once_by_clusters_of_equal_load(lens, heads, num_clusters, min_quota, cluster_size):
    settings = dict(num_clusters=num_clusters, min_quota=min_quota, max_seq_len=5000)
    p = plan(lens, heads, cluster_size=cluster_size, implementation="reference", **settings)
    tiles = tiles_of(lens, 5000)
    quota, total, invalid, _ = p.header.tolist()
    assert total == sum(tiles) * heads and quota == max(min_quota, -(-total // num_clusters))
    assert invalid == sum(not 0 <= n <= 5000 for n in lens)
    line = [(b, h, t, n) for b, n in enumerate(tiles) for h in range(heads) for t in range(n)]
    starts = [c * quota for c in range(num_clusters)]
    for t, (*pair, begin, end, own_quota, small) in zip(starts, p.records.tolist(), strict=True):
        assert pair == (list(line[t]) if t < total else [0] * 4)
        assert [begin, end, own_quota] == [min(t, total), min(t + quota, total), quota]
        assert small == max(1, quota // (SMALL_SHARE * cluster_size))
    borders = {line[t][:3] for t in starts if t < total}
    for b, chunks in enumerate(plan_chunks(p, shares=False)):
        for h, cuts in enumerate(chunks):
            cut = {(b, h, x // PLAN_TILE) for x in cuts}
            assert cut == {(b, h, 0)} | {x for x in borders if x[:2] == (b, h)}, "segments end where clusters do"


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 60), sizes)
def test_a_cluster_shares_its_tiles_out_evenly(lens, heads, num_clusters, cluster_size):
    """Shares of a segment are contiguous and differ by a tile at most; so do the loads of a cluster's CTAs."""
    settings = dict(cluster_size=cluster_size, num_clusters=num_clusters, max_seq_len=300_000)
    p = plan(lens, heads, **settings, implementation="reference")
    quota, total = p.header.tolist()[:2]
    loads, t = torch.zeros(num_clusters, cluster_size, dtype=torch.int32), 0
    for b, n in enumerate(tiles_of(lens, p.max_seq_len)):
        for segments, chunks in zip(plan_chunks(p, shares=False)[b], plan_chunks(p)[b], strict=True):
            assert set(segments) <= set(chunks)
            for first, last in pairwise([*segments, n * PLAN_TILE]):
                cuts = [*(x for x in chunks if first <= x < last), last]
                shares = [(stop - start) // PLAN_TILE for start, stop in pairwise(cuts)]
                assert len(shares) == min(cluster_size, (last - first) // PLAN_TILE)
                assert shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1
                for j, share in enumerate(shares):
                    loads[t // quota, (j + t) % cluster_size] += share
                t += sum(shares)
    assert t == total and bool((loads.amax(1) - loads.amin(1) <= 1).all())


@pytest.mark.parametrize("case", DECODE_CASES)
def test_balance_on_the_named_workloads(case):
    """The segments of every pair add up to clusters of equal load, but for the last one at work."""
    lens = DECODE_CASES[case]
    p = plan(lens, 1, cluster_size=4, num_clusters=32, min_quota=1, implementation="reference")
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
        ("query_rows", 97), ("num_clusters", 2.0),
    ],
)  # fmt: skip
def test_numbers_that_would_overflow_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer from"):
        plan([1], 1, **{name: value})


def test_no_tile_number_exceeds_32_bits():
    """The longest requests that many pairs may have are bounded, and longer ones are out of range."""
    heads, num_clusters = 1024, 1000
    longest = 2**30 // (3001 * heads) * PLAN_TILE
    assert explain(plan_decode, torch.zeros(3001).int(), heads)["max_seq_len"] == longest
    for lens in ([2**30] * 3001, [longest] * 3001):
        p = plan(lens, heads, num_clusters=num_clusters, min_quota=16384, implementation="portable")
        expected = plan_decode_reference(lens, heads, num_clusters, min_quota=16384, max_seq_len=longest)
        assert [x.tolist() for x in p.tensors[:3]] == list(expected)
    assert p.header[2] == 0 and 2**29 < p.header[1] <= 2**30


def test_empty_and_out_of_range_requests_have_a_tile():
    p = plan([10, -1, 5000, 0], 2, max_seq_len=4096, implementation="portable")
    assert p.header.tolist()[1:3] == [8, 2] and p.offsets.tolist() == [0, 1, 2, 3, 4]


def test_rebuilt_in_place():
    p = plan([100, 3000], 2, num_clusters=9, cluster_size=2, implementation="portable")
    pointers = [x.data_ptr() for x in p.tensors]
    p.counters.fill_(7)
    again = plan_decode(torch.tensor([5000, 1], dtype=torch.int32), 2, out=p, implementation="portable")
    assert again is p and pointers == [x.data_ptr() for x in p.tensors]
    expected = plan_decode_reference([5000, 1], 2, 9, min_quota=2)
    assert [x.tolist() for x in p.tensors[:3]] == list(expected) and not p.counters.any()


@pytest.mark.parametrize("size", [None, *CLUSTER_SIZES])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("max_seq_len", [500, 100_000])
@pytest.mark.parametrize("query_rows", [1, 32, 80])
def test_policy_fills_the_gpu_and_no_more(size, hopper, max_seq_len, query_rows):
    chosen = {k: v for k, (v, _) in policy(64, max_seq_len, query_rows, 132, hopper, size).items()}
    assert chosen["cluster_size"] == size or size is None and (chosen["cluster_size"] > 1) == hopper
    ctas = chosen["cluster_size"] * chosen["num_clusters"]
    assert ctas <= 264 and (not hopper or 100 < ctas * -(-query_rows // 32) <= 132)


def test_explained():
    lens = torch.tensor([5, 70], dtype=torch.int32)
    chosen = explain(plan_decode, lens, 2, num_clusters=12)
    p = plan_decode(lens, 2, num_clusters=12)
    assert chosen["num_clusters"] == p.num_clusters == 12 and chosen["cluster_size"] == p.cluster_size == 1
    assert "num_clusters = 12" in str(chosen) and "as asked" in str(chosen) and "Hopper" in str(chosen)
    assert explain(plan_decode, lens, 2, out=p).choices["num_clusters"] == (12, "as the plan in out")


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
    outputs = [torch.zeros(shape, dtype=torch.int32) for shape in (4, 3, (5, 4), 15)]
    args = (torch.tensor([5, 200], dtype=torch.int32), 2, 1, 4096, "portable", *outputs)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.hpcattn.plan_decode.default, args, test_utils=tests)
