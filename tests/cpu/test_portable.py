"""The two single-sequence kernels of lessons 01 and 03, and offline compilation of every portable kernel."""

import cases
import pytest
import torch

from hpcattn import (
    PackedKV,
    append_tokens,
    attention_decode,
    attention_prefill,
    attention_prefill_reference,
    plan_decode,
)
from hpcattn import relative_error as error
from hpcattn.bench.workloads import Workload
from hpcattn.inspection import record_launches
from hpcattn.kernels.portable.naive import naive_attention
from hpcattn.kernels.portable.online import online_attention


@pytest.mark.parametrize("attention", [naive_attention, online_attention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", cases.SINGLE)
def test_single_sequence(attention, causal, shape, device):
    cases.check_single(attention, causal, shape, device)


def test_low_precision_scores_cost_accuracy():
    q, k, v = torch.randn(3, 200, 1, 64).bfloat16()
    expected, _ = cases.single_reference(q.double() * 4, k.double(), v.double(), True)
    errors = [
        error(naive_attention(q * 4, k, v, score_dtype=dtype)[0], expected) for dtype in (torch.float32, torch.bfloat16)
    ]
    assert errors[0] < 4e-3 < errors[1]


@pytest.mark.parametrize(("dtype", "quant"), [("bf16", "-"), ("fp8", "type0"), ("fp8", "type1")])
def test_portable_kernels_compile_for_hopper(dtype, quant):
    heads = dict(num_q_heads=8, num_kv_heads=1, dtype=dtype, quant=quant)
    d = Workload(suite="decode", case="", q_lens=(2,), kv_lens=(100,), **heads).build()
    p = Workload(suite="prefill", case="", q_lens=(70,), kv_lens=(100,), drop=0.5, **heads).build()
    with record_launches() as launches:
        plan = plan_decode(d.seq_lens, 1, implementation="portable")
        common = dict(scales=d.scales, num_query_tokens=2, implementation="portable", return_lse=True)
        for how in (dict(plan=plan), dict(num_splits=1), dict(num_splits=2)):
            attention_decode(d.q, d.cache, d.block_table, d.seq_lens, **common, **how)
        args = (p.q, p.cache, p.block_table, p.cu_seqlens_q, p.seq_lens)
        attention_prefill(*args, scales=p.scales, block_mask=p.block_mask, implementation="portable")
        k = d.cache.k[0, :2]
        scale = None if d.cache.k_scale is None else torch.ones(2, 1)
        append_tokens(
            d.cache, k, k, d.block_table, d.seq_lens, num_query_tokens=2, k_scale=scale, implementation="portable"
        )
        if quant != "type0":
            tensors = [x.view(-1, 8, 128) for x in (d.q, d.cache.k, d.cache.v)]
            scales = {} if d.scales is None else dict(q_scale=d.scales.q, k_scale=d.scales.k, v_scale=d.scales.v)
            naive_attention(*tensors, **scales)
            online_attention(*tensors, **scales)
    dots = {"dynamic", "static", "prefill", "scores", "values", "online"}
    assert {v.fn.__name__ for v in launches} >= {
        f"{name}_kernel" for name in (dots if quant != "type0" else {"prefill"})
    }
    for variant in launches:
        kernel = variant.compile()
        matrix = {"HGMMA", "HMMA", "QGMMA", "QMMA"} & set(kernel.families())
        assert bool(matrix) == (variant.fn.__name__.removesuffix("_kernel") in dots), kernel.name
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0, kernel.name
        assert kernel.shared_bytes < 227 * 1024


def test_packed_agrees_with_online():
    q, k, v = (torch.randn(90, heads, 128).bfloat16() for heads in (4, 2, 2))
    starts = torch.tensor([0, 90], dtype=torch.int32)
    packed = attention_prefill(q, PackedKV(k, v), None, starts, None, implementation="portable")
    assert torch.equal(packed, online_attention(q, k, v)[0])
    assert error(packed, attention_prefill_reference(q, PackedKV(k, v), None, starts, None)[0]) < 4e-3
