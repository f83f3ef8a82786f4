"""The Hopper decode kernel on a Hopper GPU: the numerical grid at larger sizes, and what only a GPU can show."""

from dataclasses import replace

import cases
import pytest
import torch

from hpcattn import (
    PagedKVCache,
    append_tokens,
    attention_decode,
    attention_decode_reference,
    decode_workspace,
    prepare_decode,
    relative_error,
)
from hpcattn.bench.workloads import Workload

SHAPES = cases.decode_grid(lengths=((1,),), rounds=3, kv_heads=(1, 3, 8))
LENGTHS = (
    (1, 63, 64, 65, 300, 500, 41), (4095, 3, 0, 1000), (127, 129, 256, 400, 222, 333), (2, 255, 257, 5000), (9000, 700)
)  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize(("workload", "_", "splits"), SHAPES)
def test_decode(workload, _, splits, device, coverage):
    """Every shape with five batches, unsplit and split: 450 configurations."""
    for i, kv_lens in enumerate(LENGTHS):
        w = replace(workload, kv_lens=kv_lens, q_lens=(workload.q_lens[0],) * len(kv_lens))
        w = replace(w, case=f"v_mean={i % 2}.0")
        error = cases.check_decode(cases.build(w, device), "hopper", "static", (1, 3, None, 7, None)[i])
        coverage(cases.describe(w, "static"), "hopper", error)


@pytest.mark.parametrize("v_mean", [0.0, 1.0])
@pytest.mark.parametrize("quant", ["type0", "type1"])
def test_fp8_over_32k_keys(quant, v_mean, device):
    w = Workload(
        suite="decode", case=f"v_mean={v_mean}", q_lens=(1, 1), kv_lens=(32768, 32000), num_q_heads=8, num_kv_heads=1,
        dtype="fp8", quant=quant,
    )  # fmt: skip
    for splits in (1, 16):
        cases.check_decode(cases.build(w, device), "hopper", "static", splits)


def test_cache_of_more_than_two_to_the_31_elements(device):
    pages = 2**31 // (64 * 8 * 128) + 1000
    for layout in ("NHD", "HND"):
        cache = PagedKVCache.allocate(pages, 64, 8, 128, layout=layout, device=device)
        table = torch.arange(pages - 20, pages, dtype=torch.int32, device=device).view(2, 10)  # behind 2^31
        lens = torch.tensor([600, 77], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 600, 677], dtype=torch.int32, device=device)
        k, v = torch.randn(2, 677, 8, 128, device=device).bfloat16()
        append_tokens(cache, k, v, table, lens, cu_seqlens_q=starts)
        q = torch.randn(2, 16, 128, device=device).bfloat16()
        expected, _ = attention_decode_reference(q, cache, table, lens)
        o = attention_decode(q, cache, table, lens, num_splits=3, implementation="hopper")
        assert relative_error(o, expected) < cases.BOUND["bf16"]
        del cache


@pytest.fixture
def step(device):
    return cases.decode_step(device) | dict(implementation="hopper")


@pytest.mark.parametrize("splits", [1, 5])
def test_bitwise_repeatable_prepared_and_plain(step, splits):
    first = attention_decode(**step, num_splits=splits)
    call = prepare_decode(**step, num_splits=splits)
    for _ in range(20):
        assert torch.equal(attention_decode(**step, num_splits=splits), first)
        assert torch.equal(call(), first)


def test_nothing_is_allocated_when_buffers_are_passed(step):
    q = step["q"]
    buffers = dict(
        out=torch.empty_like(q), lse=q.new_empty(q.shape[:2], dtype=torch.float32), num_splits=3,
        workspace=decode_workspace(**step, num_splits=3),
    )  # fmt: skip
    attention_decode(**step, **buffers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    attention_decode(**step, **buffers)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("splits", [1, 3])
def test_other_tensors_of_the_same_shape(step, splits):
    """A cached launch takes new addresses, also those of another cache, of unaligned queries and results."""
    for shift in (0, 0, 1, 3):
        q = torch.randn(6 * 16 * 128 + shift, device=step["q"].device).bfloat16()[shift:].view(6, 16, 128)
        cache = PagedKVCache(*(x.clone().nan_to_num(0.0) for x in (step["cache"].k, step["cache"].v)))
        cache.v.neg_()
        out = torch.empty(6 * 16 * 128 + shift, device=q.device, dtype=q.dtype)[shift:].view(6, 16, 128)
        other = step | dict(q=q, cache=cache, out=out)
        expected, _ = attention_decode_reference(q, cache, step["block_table"], step["seq_lens"], num_query_tokens=2)
        assert relative_error(attention_decode(**other, num_splits=splits), expected) < cases.BOUND["bf16"]


def test_captured_graph_follows_changing_lengths(step):
    lens, out = step["seq_lens"], torch.empty_like(step["q"])
    call = prepare_decode(**step, num_splits=4, out=out)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    reference = {k: v for k, v in step.items() if k != "implementation"}
    for new in ([700, 5, 4096], [3, 0, 4000], [1, 1, 1], [64, 5, 65]):
        lens.copy_(torch.tensor(new, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, attention_decode_reference(**reference)[0]) < cases.BOUND["bf16"], new


def test_table_without_columns(device):
    cache = PagedKVCache.allocate(1, 64, 1, 128, device=device)
    empty = torch.zeros(2, 0, dtype=torch.int32, device=device)
    q = torch.randn(2, 8, 128, device=device).bfloat16()
    lens = torch.tensor([0, 5], dtype=torch.int32, device=device)
    o = attention_decode(q, cache, empty, lens, implementation="hopper")
    assert (o[0] == 0).all() and o[1].isnan().all()


def test_compiled_and_opcheck(step):
    tensors = (step["q"], step["cache"].k, step["cache"].v, step["block_table"], step["seq_lens"])

    def model(q, k, v, table, lens):
        return attention_decode(q * 2, PagedKVCache(k, v), table, lens, num_query_tokens=2, implementation="hopper") + 1

    assert torch.equal(torch.compile(model, fullgraph=True)(*tensors), model(*tensors))
    q = step["q"]
    flat = (*tensors, *[None] * 7, 1, 1, 2, 128**-0.5, 2, 1, "hopper", None, torch.empty_like(q), None)
    torch.library.opcheck(torch.ops.hpcattn.decode.default, flat, test_utils=("test_schema", "test_faketensor"))


def test_with_and_without_lse_in_turn(step):
    for return_lse in (True, False, True):
        o = attention_decode(**step, return_lse=return_lse)
        if return_lse:
            o, lse = o
            reference = {k: v for k, v in step.items() if k != "implementation"}
            torch.testing.assert_close(lse.double(), attention_decode_reference(**reference)[1], atol=1e-3, rtol=0)
        assert torch.equal(o, attention_decode(**step, out=torch.empty_like(o)))


def test_auto_is_hopper_here(step):
    step["implementation"] = "auto"
    assert torch.equal(attention_decode(**step), attention_decode(**step | dict(implementation="hopper")))
