"""The operators on a GPU: the CPU's grid at larger sizes, and what only a GPU can show."""

import cases
import pytest
import torch

from hpcattn import (
    PagedKVCache,
    append_tokens,
    attention_decode,
    attention_decode_reference,
    attention_prefill,
    decode_workspace,
    plan_decode,
    relative_error,
)
from hpcattn.bench.workloads import Workload
from hpcattn.kernels.portable.naive import naive_attention
from hpcattn.kernels.portable.online import online_attention
from hpcattn.schedule import plan_decode_reference

DECODE = cases.decode_grid(lengths=((1, 700, 4095), (0, 1300, 3, 64), (63, 64, 65), (2, 8000)))
PREFILL = cases.prefill_grid(
    lengths=(((5,), (5,)), ((700,), (1500,)), ((3, 0, 660), (130, 9, 660)), ((1, 9), (64, 4)), ((130,), (2590,)))
)


@pytest.mark.parametrize(("workload", "schedule", "splits"), DECODE)
def test_decode(workload, schedule, splits, device, coverage):
    inputs = cases.build(workload, device)
    error = cases.check_decode(inputs, "portable", schedule, splits)
    coverage(cases.describe(workload, schedule), "portable", error)


@pytest.mark.parametrize("workload", PREFILL)
def test_prefill(workload, device, coverage):
    coverage(cases.describe(workload), "portable", cases.check_prefill(cases.build(workload, device), "portable"))


@pytest.mark.parametrize("attention", [naive_attention, online_attention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", (*cases.SINGLE, (1000, 3000, 8, 2, 128)))
def test_single_sequence(attention, causal, shape, device):
    cases.check_single(attention, causal, shape, device)


@pytest.mark.parametrize("v_mean", [0.0, 1.0])
@pytest.mark.parametrize("quant", ["type0", "type1"])
def test_fp8_over_32k_keys(quant, v_mean, device):
    """Long sums, with and without a mean: an accumulator that loses bits shows only with one."""
    w = Workload(
        suite="prefill", case=f"v_mean={v_mean}", q_lens=(128,), kv_lens=(32768,), num_q_heads=4, num_kv_heads=1,
        dtype="fp8", quant=quant,
    )  # fmt: skip
    cases.check_prefill(cases.build(w, device), "portable")


@pytest.fixture
def step(device):
    return cases.decode_step(device)


def test_cache_of_more_than_two_to_the_31_elements(device):
    pages = 2**31 // (64 * 8 * 128) + 1000
    cache = PagedKVCache.allocate(pages, 64, 8, 128, device=device)
    table = torch.arange(pages - 20, pages, dtype=torch.int32, device=device).view(2, 10)  # behind 2^31
    lens = torch.tensor([600, 77], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 600, 677], dtype=torch.int32, device=device)
    k, v = torch.randn(2, 677, 8, 128, device=device).bfloat16()
    append_tokens(cache, k, v, table, lens, cu_seqlens_q=starts)
    q = torch.randn(2, 16, 128, device=device).bfloat16()
    expected, _ = attention_decode_reference(q, cache, table, lens)
    for how in (dict(schedule="dynamic"), dict(num_splits=3)):
        assert relative_error(attention_decode(q, cache, table, lens, **how), expected) < cases.BOUND["bf16"]
    q = torch.cat([q, q])
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    expected, _ = attention_decode_reference(q, cache, table, lens, num_query_tokens=2)
    assert relative_error(attention_prefill(q, cache, table, starts, lens), expected) < cases.BOUND["bf16"]


@pytest.mark.parametrize("how", [dict(schedule="dynamic"), dict(num_splits=5)], ids=str)
def test_bitwise_repeatable(step, how):
    plan = plan_decode(step["seq_lens"], 2) if "schedule" in how else None
    first = attention_decode(**step, plan=plan, **how)
    assert all(torch.equal(attention_decode(**step, plan=plan, **how), first) for _ in range(20))


def test_head_major_pool_with_a_head_stride_of_two_to_the_30(device):
    """Head times head stride exceeds 32 bits for the pool, the new tokens and the queries."""
    memory = torch.full((3 * 2**30,), torch.nan, dtype=torch.bfloat16, device=device)
    pool = torch.as_strided(memory, (8, 64, 3, 128), (64 * 128, 128, 2**30, 1))
    wide = torch.as_strided(memory, (70, 3, 128), (128, 2**30, 1), 2**29)
    wide.copy_(torch.randn(70, 3, 128))
    cache = PagedKVCache(pool, PagedKVCache.allocate(8, 64, 3, 128, layout="HND", device=device).k)
    table = torch.tensor([[5, 2]], dtype=torch.int32, device=device)
    lens = torch.tensor([70], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 70], dtype=torch.int32, device=device)
    append_tokens(cache, wide, wide, table, lens, cu_seqlens_q=starts)
    expected, _ = attention_decode_reference(wide[-1:].contiguous(), cache, table, lens)
    assert relative_error(attention_decode(wide[-1:], cache, table, lens), expected) < cases.BOUND["bf16"]
    o = attention_prefill(wide, cache, table, starts, lens)
    assert relative_error(o[-1:], expected) < cases.BOUND["bf16"]


@pytest.mark.parametrize("implementation", ["portable", "hopper"])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_no_synchronization_and_another_stream(step, implementation, schedule):
    expected, _ = attention_decode_reference(**step)
    step["implementation"] = implementation
    attention_decode(**step, schedule=schedule)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            o = attention_decode(**step, schedule=schedule)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert relative_error(o, expected) < cases.BOUND["bf16"]


def test_nothing_is_allocated_when_buffers_are_passed(step):
    q = step["q"]
    plan = plan_decode(step["seq_lens"], 2)
    buffers = dict(
        out=torch.empty_like(q), lse=q.new_empty(q.shape[:2], dtype=torch.float32),
        workspace=decode_workspace(**step, plan=plan),
    )  # fmt: skip
    attention_decode(**step, **buffers, plan=plan)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    attention_decode(**step, **buffers, plan=plan)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("implementation", ["portable", "hopper"])
def test_captured_graph_follows_changing_lengths(step, implementation):
    """One graph holds plan and decode; only the lengths change between replays."""
    lens = step["seq_lens"]
    plan, out = plan_decode(lens, 2), torch.empty_like(step["q"])

    def work():
        plan_decode(lens, 2, out=plan)
        attention_decode(**step, plan=plan, out=out, implementation=implementation)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for new in ([700, 5, 4096], [3, 0, 4000], [1, 1, 1], [64, 5, 65]):
        lens.copy_(torch.tensor(new, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        expected, _ = attention_decode_reference(**step)
        assert relative_error(out, expected) < cases.BOUND["bf16"], new


def test_plan_agrees_with_plain_python(device):
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 7, 256, 2048, 5000):
        lens = torch.randint(0, 50_000, (batch,), generator=generator, dtype=torch.int32)
        plan = plan_decode(lens.to(device), 3, max_seq_len=40_000)
        settings = dict(min_quota=plan.min_quota, max_seq_len=40_000)
        expected = plan_decode_reference(lens.tolist(), 3, plan.num_clusters, **settings)
        assert [x.tolist() for x in plan.tensors[:3]] == list(expected) and not plan.counters.any()


def test_compiled_and_opcheck(step):
    tensors = (step["q"], step["cache"].k, step["cache"].v, step["block_table"], step["seq_lens"])

    def model(q, k, v, table, lens):
        plan = plan_decode(lens, 2)
        return attention_decode(q * 2, PagedKVCache(k, v), table, lens, num_query_tokens=2, plan=plan) + 1

    assert torch.equal(torch.compile(model, fullgraph=True)(*tensors), model(*tensors))
    q = step["q"]
    flat = (*tensors, *[None] * 7, 1, 1, 2, 128**-0.5, 2, 1, "portable", None, torch.empty_like(q), None)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.hpcattn.decode.default, flat, test_utils=tests)
