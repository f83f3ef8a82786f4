"""Adapters on a CPU: PyTorch's for real, the others against stand-ins that follow their documented contracts."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hpcattn.bench.peers import ADAPTERS, FlashAttention3, FlashInfer, HpcOps, adapters, report
from hpcattn.bench.suites import BOUNDS
from hpcattn.bench.workloads import SUITES, Workload, select
from hpcattn.cache import PagedKVCache
from hpcattn.quantization import Scales
from hpcattn.reference import attention_decode_reference, attention_prefill_reference, relative_error


def check(adapter, workload, bound=None):
    inputs = workload.build(poison=False, v_mean=1.0)
    call = adapter.prepare(inputs)
    first, second = call(), call()
    expected, _ = inputs.reference()
    assert first.shape == expected.shape
    assert torch.equal(first, second)
    assert relative_error(first, expected) < (bound or BOUNDS[workload.dtype])


@pytest.fixture
def stand_in(monkeypatch):
    def install(name: str, **members) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    return install


def test_report_names_what_is_missing():
    state = report()
    assert set(state) == {adapter.name for adapter in ADAPTERS}
    assert state["reference"][0] and state["portable"][0] and state["torch_sdpa_math"][0]
    if not torch.cuda.is_available():
        assert state["flash_attn_3"] == (False, "needs a CUDA GPU")


def test_an_absent_or_broken_peer_is_reported(monkeypatch, stand_in):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert FlashInfer().available() == (False, "not installed")
    stand_in("hpc")
    assert HpcOps().available() == (True, "-")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="implementations must be among"):
        adapters(["cutlass"])


def test_every_workload_has_one_adapter_of_ours_per_schedule():
    for workload in SUITES["decode"] + SUITES["prefill"]:
        hopper = [a.schedule for a in adapters(["hopper"]) if a.supports(workload)]
        assert hopper == (["dynamic", "static"] if workload.suite == "decode" else ["-"])


@pytest.mark.parametrize("w", select("decode_small", dtype="bf16") + select("prefill_small", dtype="bf16", drop=0.0))
def test_torch_sdpa(w: Workload):
    (math,) = adapters(["torch_sdpa_math"])
    if math.supports(w):
        check(math, w)
    else:
        assert len(set(w.kv_lens)) > 1


def test_sdpa_flash_sees_a_bottom_right_mask():
    (flash,) = adapters(["torch_sdpa_flash"])
    (w,) = select("prefill_small", dtype="bf16", case="40x300", layout="NHD")
    assert flash.supports(w)
    inputs = w.build(poison=False)
    from torch.nn.attention.bias import CausalBias

    seen = {}

    def record(q, k, v, attn_mask=None, **options):
        seen.update(mask=attn_mask, shapes=(q.shape, k.shape), **options)
        return q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
        flash.prepare(inputs)()
    assert isinstance(seen["mask"], CausalBias)
    assert seen["shapes"] == ((1, 4, 40, 128), (1, 1, 300, 128))
    assert seen["enable_gqa"]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, causal, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
    q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """FlashAttention-3's documented semantics, by the oracle; descales are `[batch, num_kv_heads]`."""
    assert causal
    batch = len(cache_seqlens)
    if page_table is None:
        assert k_cache.shape[0] == batch
        page = 16
        pad = -k_cache.shape[1] % page
        padded = [torch.cat([x, x[:, :1].expand(-1, pad, -1, -1)], 1) for x in (k_cache, v_cache)]
        k_cache, v_cache = (x.unflatten(1, (-1, page)).flatten(0, 1) for x in padded)
        page_table = torch.arange(k_cache.shape[0], dtype=torch.int32).view(batch, -1)
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(batch + 1) * q.shape[1]
    else:
        assert q.dim() == 3 and max_seqlen_q == cu_seqlens_q.diff().max()
    flat, scales = q.reshape(-1, *q.shape[-2:]), None
    if q_descale is not None:
        assert q_descale.shape == k_descale.shape == v_descale.shape == (batch, k_cache.shape[2])
        scales = Scales(q_descale[:1, :1].expand(flat.shape[:2]), v_descale[0, :1], k_descale[0, :1])
    cache = PagedKVCache(k_cache, v_cache)
    o, _ = attention_prefill_reference(flat, cache, page_table, cu_seqlens_q, cache_seqlens, scales=scales)
    return o.to(torch.bfloat16).view(q.shape)


@pytest.mark.parametrize("w", SUITES["decode_small"] + SUITES["prefill_small"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_flash_attention_3_arguments(stand_in, w, contiguous):
    stand_in("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    adapter = FlashAttention3(contiguous=contiguous)
    if adapter.supports(w):
        check(adapter, w)
    else:
        assert w.quant == "type0" or w.drop or contiguous


class QuantType(Enum):
    TYPE0 = 0
    TYPE1 = 1


def hpc_scales(q_scale, k_scale, v_scale, quant_type):
    return Scales(q_scale, v_scale, k_scale if quant_type is QuantType.TYPE1 else None)


def hpc_decode(q, k, v, table, lens, *scales, mtp, new_kv_included, task_map, output, quant_type=None):
    assert new_kv_included and output.dtype == torch.bfloat16
    k_scale = None
    if scales:
        k_scale = None if quant_type is QuantType.TYPE1 else scales[1].view(torch.float32)
        scales = hpc_scales(*scales, quant_type)
    o, _ = attention_decode_reference(
        q, PagedKVCache(k, v, k_scale), table, lens, scales=scales or None, num_query_tokens=mtp + 1
    )
    return output.copy_(o)


def hpc_prefill(q, k, v, *rest, output, quant_type=None, block_mask=None):
    *scales, starts, table, lens, longest = rest
    assert longest == int(starts.diff().max())
    k_scale = None
    if scales:
        assert scales[0].shape[-1] % 4 == 0
        k_scale = scales[1] if quant_type is QuantType.TYPE0 else None
        scales = hpc_scales(*scales, quant_type)
    cache = PagedKVCache(k, v, k_scale)
    o, _ = attention_prefill_reference(q, cache, table, starts, lens, scales=scales or None, block_mask=block_mask)
    return output.copy_(o)


@pytest.fixture
def hpc(stand_in):
    calls = SimpleNamespace(planned=[])
    stand_in(
        "hpc",
        QuantType=QuantType,
        attention_decode_bf16=hpc_decode,
        attention_decode_fp8=hpc_decode,
        attention_with_kvcache_prefill_bf16=hpc_prefill,
        attention_with_kvcache_prefill_fp8=hpc_prefill,
        attention_with_kvcache_blocksparse_prefill_fp8=hpc_prefill,
        get_attention_decode_task_workspace=lambda *sizes: torch.zeros(8, dtype=torch.int8),
        assign_attention_decode_task=lambda *arguments: calls.planned.append(arguments),
    )
    return calls


@pytest.mark.parametrize("w", SUITES["prefill_small"])
def test_hpc_ops_prefill_arguments(hpc, w):
    assert HpcOps().supports(w) == (w.dtype == "fp8" or not w.drop)
    if HpcOps().supports(w):
        check(HpcOps(), w)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("form", [("bf16", "-", 2), ("fp8", "type0", 1), ("fp8", "type1", 1)])
def test_hpc_ops_decode_arguments(hpc, schedule, form):
    dtype, quant, tokens = form
    w = Workload(
        suite="decode", case="t", q_lens=(tokens,) * 2, kv_lens=(70, 5), num_q_heads=8, num_kv_heads=1, dtype=dtype,
        quant=quant,
    )  # fmt: skip
    assert HpcOps(schedule).supports(w) and not HpcOps().supports(w)
    check(HpcOps(schedule), w)
    assert [arguments[3] for arguments in hpc.planned] == ([tokens] if schedule == "dynamic" else [])


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout):
        self.layout = kv_layout

    def plan(self, starts, kv_indptr, indices, last_page_len, hq, hkv, d, page, *, causal, q_data_type):
        assert causal and q_data_type == torch.bfloat16 and len(indices) == kv_indptr[-1]
        pages = kv_indptr.diff()
        self.lens = ((pages - 1) * page + last_page_len).int()
        self.table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for b, (start, stop) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)):
            self.table[b, : stop - start] = indices[start:stop]
        self.starts = starts

    def run(self, q, kv, *, out):
        k, v = kv if self.layout == "NHD" else (x.transpose(1, 2) for x in kv)
        o, _ = attention_prefill_reference(q, PagedKVCache(k, v), self.table, self.starts, self.lens)
        return out.copy_(o)


@pytest.mark.parametrize("w", select("decode_small", dtype="bf16") + select("prefill_small", dtype="bf16", drop=0.0))
def test_flashinfer_arguments(stand_in, w):
    stand_in("flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    assert FlashInfer().supports(w)
    check(FlashInfer(), w)
