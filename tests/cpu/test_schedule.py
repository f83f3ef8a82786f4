"""The task map: plain Python, and its twin on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcattn import plan_decode
from hpcattn.bench.workloads import DECODE_CASES
from hpcattn.schedule import TILE, plan_chunks, plan_decode_reference, saturating_splits, static_chunks

batches = st.lists(st.integers(0, 3000) | st.sampled_from([0, 1, 63, 64, 65, 4096, 200_000]), min_size=1, max_size=40)


def plan(lens, heads, **kwargs):
    return plan_decode(torch.tensor(lens, dtype=torch.int32), heads, **kwargs)


@settings(max_examples=25, deadline=None)
@given(batches, st.integers(1, 8), st.integers(1, 300), st.integers(1, 8))
def test_portable_twin_agrees_exactly(lens, heads, num_ctas, min_quota):
    settings = dict(num_ctas=num_ctas, min_quota=min_quota, max_seq_len=100_000)
    portable = plan(lens, heads, implementation="portable", **settings)
    for name, expected in zip(
        ("header", "offsets", "starts"), plan_decode_reference(lens, heads, **settings), strict=True
    ):
        assert getattr(portable, name).tolist() == expected, name


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 8), st.integers(1, 300))
def test_every_tile_is_done_once_by_ctas_of_equal_load(lens, heads, num_ctas):
    p = plan(lens, heads, num_ctas=num_ctas, min_quota=1, implementation="reference")
    quota, total = p.header[:2].tolist()
    tiles = [-(-n // TILE) for n in lens]
    assert total == sum(tiles) * heads and quota == max(1, -(-total // num_ctas))
    line = [(b, h) for b, n in enumerate(tiles) for h in range(heads) for _ in range(n)]
    for c in range(min(num_ctas, -(-total // quota))):
        assert p.starts[c] == line[c * quota][0]
    for b, n in enumerate(tiles):
        for h, starts in enumerate(plan_chunks(p)[b]):
            cuts = [x // TILE for x in starts] + [n]
            assert cuts[0] == 0 and cuts == sorted(cuts) and (n == 0 or len(set(cuts)) == len(cuts))
            assert max((b - a for a, b in zip(cuts, cuts[1:], strict=False)), default=0) <= quota
            begin = line.index((b, h)) if n else 0
            assert all((begin + x) % quota == 0 for x in cuts[1:-1]), "a cut lies on the border of two CTAs"


@pytest.mark.parametrize("case", DECODE_CASES)
def test_balance_on_the_named_workloads(case):
    """The chunks of every pair add up to CTAs whose loads differ by less than a tile, but for the last one at work."""
    p = plan(DECODE_CASES[case], 1, num_ctas=264, min_quota=1, implementation="reference")
    loads = [0] * 264
    for b, (starts,) in enumerate(plan_chunks(p)):
        for start, stop in zip(starts, [*starts[1:], -(-DECODE_CASES[case][b] // TILE) * TILE], strict=True):
            loads[(int(p.offsets[b]) + start // TILE) // int(p.header[0])] += (stop - start) // TILE
    working = [x for x in loads if x]
    assert sum(working) == int(p.header[1]) and max(working) == min(working[:-1]) >= working[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_ctas", 0), ("num_ctas", 65537), ("min_quota", 0), ("min_quota", 10**9), ("max_seq_len", -1)],
)
def test_numbers_that_would_overflow_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer from"):
        plan([1], 1, **{name: value})


def test_out_of_range_lengths_are_marked_and_get_no_work():
    p = plan([10, -1, 5000], 2, max_seq_len=4096, implementation="portable")
    assert p.header.tolist()[1:3] == [2, 2] and p.offsets.tolist() == [0, 1, 1, 1]


def test_rebuilt_in_place():
    p = plan([100, 3000], 2, num_ctas=9, implementation="portable")
    pointers = [x.data_ptr() for x in (p.header, p.offsets, p.starts)]
    again = plan_decode(torch.tensor([5000, 1], dtype=torch.int32), 2, out=p, implementation="portable")
    assert again is p and pointers == [x.data_ptr() for x in (p.header, p.offsets, p.starts)]
    assert p.header.tolist()[:2] == plan_decode_reference([5000, 1], 2, 9)[0][:2]


def test_bad_input():
    with pytest.raises(TypeError, match="seq_lens must have dtype torch.int32, got torch.int64"):
        plan_decode(torch.tensor([1, 2]), 1)
    with pytest.raises(ValueError, match="num_kv_heads must be an integer from 1 to 1024, got 0"):
        plan([1], 0)
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
    outputs = [torch.zeros(n, dtype=torch.int32) for n in (4, 3, 5)]
    args = (torch.tensor([5, 200], dtype=torch.int32), 2, TILE, 1, 4096, "portable", *outputs)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.hpcattn.plan_decode.default, args, test_utils=tests)
