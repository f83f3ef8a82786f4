"""The two single-sequence kernels of lessons 01 and 03, and offline compilation of every portable kernel."""

import pytest
import torch

from hpcattn import PackedKV, attention_decode, attention_prefill, attention_prefill_reference, plan_decode
from hpcattn import relative_error as error
from hpcattn.bench.workloads import Workload
from hpcattn.kernels.jit import compile_launch, record_launches
from hpcattn.kernels.portable.naive import naive_attention
from hpcattn.kernels.portable.online import online_attention
from hpcattn.quantization import dequantize, quantize_per_tensor, quantize_per_token_head


@pytest.mark.parametrize("attention", [naive_attention, online_attention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads", "dim"), [(70, 130, 4, 2, 64), (1, 65, 3, 1, 128), (80, 20, 2, 2, 64)]
)
def test_single_sequence(attention, causal, q_len, kv_len, heads, kv_heads, dim):
    q, k, v = torch.randn(q_len, heads, dim), torch.randn(kv_len, kv_heads, dim), torch.randn(kv_len, kv_heads, dim) + 1
    q8, q_scale = quantize_per_token_head(q)
    (k8, k_scale), (v8, v_scale) = quantize_per_tensor(k), quantize_per_tensor(v)
    bf16 = [x.bfloat16() for x in (q, k, v)]
    fp8 = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    exact8 = [dequantize(q8, q_scale), dequantize(k8, k_scale), dequantize(v8, v_scale)]
    for args, scales, exact, bound in ((bf16, {}, bf16, 4e-3), ((q8, k8, v8), fp8, exact8, 5e-2)):
        o, lse = attention(*args, **scales, causal=causal)
        expected, expected_lse = plain(*(x.double() for x in exact), causal)
        assert error(o, expected) < bound
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)


def plain(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->ihj", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.arange(len(k))[None, :] > (len(k) - len(q) + torch.arange(len(q)))[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("ihj,jhd->ihd", p, v.repeat_interleave(group, 1)), scores.logsumexp(-1)


def test_low_precision_scores_cost_accuracy():
    q, k, v = torch.randn(3, 200, 1, 64).bfloat16()
    expected, _ = plain(q.double() * 4, k.double(), v.double(), True)
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
    names = [launch.fn.__name__ for launch in launches]
    assert names == [
        "prefix_kernel", "search_kernel", "dynamic_kernel", "merge_kernel", "static_kernel", "static_kernel",
        "merge_kernel", "prefill_kernel",
    ]  # fmt: skip
    for launch in launches:
        kernel = compile_launch(launch)
        matrix = "wgmma" in kernel.asm["ptx"] or "mma.sync" in kernel.asm["ptx"]
        assert matrix == (launch.fn.__name__ in ("dynamic_kernel", "static_kernel", "prefill_kernel"))
        assert kernel.metadata.shared < 227 * 1024


def test_packed_agrees_with_online():
    q, k, v = (torch.randn(90, heads, 128).bfloat16() for heads in (4, 2, 2))
    starts = torch.tensor([0, 90], dtype=torch.int32)
    packed = attention_prefill(q, PackedKV(k, v), None, starts, None, implementation="portable")
    assert torch.equal(packed, online_attention(q, k, v)[0])
    assert error(packed, attention_prefill_reference(q, PackedKV(k, v), None, starts, None)[0]) < 4e-3
