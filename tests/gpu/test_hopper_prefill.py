"""The Hopper prefill kernel on a GPU: 210 configurations against the oracle, and what only a GPU can show."""

from dataclasses import replace

import cases
import pytest
import torch

from hpcattn import attention_prefill, prepare_prefill, relative_error
from hpcattn.bench.workloads import Workload

SHAPES = cases.prefill_grid(lengths=(((1,), (1,)),))
LENGTHS = (
    ((1,), (4095,)), ((1, 0, 63, 300), (700, 5, 63, 0)), ((127,), (127,)), ((640,), (1111,)), ((257,), (256,)),
    ((128,) * 3 + (1,), (128, 256, 384, 512)), ((500, 3, 200), (4096, 3, 2000)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize(("index", "workload"), list(enumerate(SHAPES)))
def test_prefill(index, workload, device, coverage):
    """Every shape with seven batches, masked every other time where there is one request."""
    for i, (q_lens, kv_lens) in enumerate(LENGTHS):
        drop = 0.6 * ((index + i) % 2) if len(q_lens) == 1 else 0.0
        w = replace(workload, q_lens=q_lens, kv_lens=kv_lens, drop=drop, case=f"v_mean={i % 2}.0")
        coverage(cases.describe(w), "hopper", cases.check_prefill(cases.build(w, device), "hopper"))


@pytest.mark.parametrize("v_mean", [0.0, 1.0])
@pytest.mark.parametrize("keys", [4096, 8192, 32768])
def test_fp8_sums_do_not_lose_bits(keys, v_mean, device):
    w = Workload(
        suite="prefill", case=f"v_mean={v_mean}", q_lens=(512,), kv_lens=(keys,), num_q_heads=4, num_kv_heads=1,
        dtype="fp8", quant="type1",
    )  # fmt: skip
    x = cases.build(w, device)
    o = attention_prefill(x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens, scales=x.scales)
    assert relative_error(o, x.reference()[0]) < (3e-2 if v_mean == 0 else 2.7e-3)


@pytest.mark.parametrize(("dtype", "quant"), cases.FORMATS)
def test_many_masked_items(dtype, quant, device):
    """More than there are multiprocessors, in the order of their active tiles."""
    w = Workload(
        suite="prefill", case="v_mean=0.0", q_lens=(1500,), kv_lens=(2000,), num_q_heads=16, num_kv_heads=2,
        dtype=dtype, quant=quant, drop=0.7,
    )  # fmt: skip
    cases.check_prefill(cases.build(w, device), "hopper")


def test_streams_graphs_and_repetition(device):
    """A captured graph of a varlen batch, replayed under changing lengths; bitwise what an eager call gives."""
    w = Workload(
        suite="prefill", case="", q_lens=(300, 1, 700), kv_lens=(300, 900, 2000), num_q_heads=8, num_kv_heads=2
    )  # fmt: skip
    x = cases.build(w, device)
    args = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
    first = attention_prefill(*args)
    out = torch.empty_like(first)
    call = prepare_prefill(*args, out=out)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    assert torch.equal(out, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    lens = x.seq_lens.clone()
    for i in range(200):
        x.seq_lens.copy_(lens - torch.tensor([i % 7, i % 100, 3 * i], dtype=torch.int32, device=device))
        out.fill_(torch.nan)
        graph.replay()
        if i % 20 == 0:
            assert torch.equal(out, attention_prefill(*args))
    assert not out.isnan().any()


@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_and_compile(masked, device):
    w = Workload(
        suite="prefill", case="", q_lens=(140,), kv_lens=(300,), num_q_heads=4, num_kv_heads=2, drop=0.5 * masked
    )  # fmt: skip
    x = cases.build(w, device)
    args = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
    eager = attention_prefill(*args, block_mask=x.block_mask)
    compiled = torch.compile(attention_prefill, fullgraph=True)(*args, block_mask=x.block_mask)
    assert torch.equal(compiled, eager)
    out = torch.empty_like(eager)
    call = (x.q, x.cache.k, x.cache.v, x.block_table, x.cu_seqlens_q, x.seq_lens, None, None, None, x.block_mask)
    torch.library.opcheck(torch.ops.hpcattn.prefill, (*call, 128**-0.5, "hopper", out, None))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "quant"), cases.FORMATS)
def test_repeated_calls_of_ordered_work(dtype, quant, masked, device):
    """Plain calls that differ in addresses only, whose kernels and order are launched with the addresses of each."""
    q_lens, kv_lens = ((1500,), (2000,)) if masked else ((300, 70, 200), (400, 70, 900))
    w = Workload(
        suite="prefill", case="v_mean=1.0", q_lens=q_lens, kv_lens=kv_lens, num_q_heads=16, num_kv_heads=2,
        dtype=dtype, quant=quant, drop=0.5 * masked,
    )  # fmt: skip
    sets = [cases.build(w, device) for _ in range(3)]
    outputs = [
        attention_prefill(
            x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens, scales=x.scales, block_mask=x.block_mask
        )
        for x in sets
    ]
    for x, o in zip(sets, outputs, strict=True):
        assert relative_error(o, x.reference()[0]) < (cases.BOUND["bf16"] if dtype == "bf16" else cases.PLAIN_BOUND)


def test_a_mask_of_a_quarter_million_tokens(device):
    """As wide as a context of 256 Ki tokens; its list of active tiles takes 16 KiB of shared memory."""
    w = Workload(
        suite="prefill", case="v_mean=1.0", q_lens=(200,), kv_lens=(262144,), num_q_heads=2, num_kv_heads=1, drop=0.9
    )
    x = cases.build(w, device)
    arguments = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
    o = attention_prefill(*arguments, block_mask=x.block_mask, implementation="hopper")
    assert relative_error(o, x.reference()[0]) < cases.BOUND["bf16"]
