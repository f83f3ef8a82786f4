import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.workloads import SUITES, Workload, select
from hpcattn.masks import MASK_TILE

SMALL = SUITES["decode_small"] + SUITES["prefill_small"]


def name_of(w: Workload) -> str:
    return "-".join(str(x) for x in w.key.values())


def prefill(q_len: int, kv_len: int, **fields) -> Workload:
    defaults = {"num_q_heads": 4, "num_kv_heads": 1, "case": "test"}
    return Workload(suite="prefill", q_lens=(q_len,), kv_lens=(kv_len,), **{**defaults, **fields})


def test_catalog():
    assert len({w.case for w in SUITES["decode"]}) == 9
    assert {w.num_query_tokens for w in select("decode", dtype="bf16")} == {1, 2, 3}
    assert {w.num_query_tokens for w in select("decode", dtype="fp8")} == {1, 2, 4}
    assert len(select("prefill", dtype="fp8")) == 24 + 8
    assert len(select("prefill", dtype="bf16")) == 10
    assert {w.case for w in select("prefill", drop=0.75)} == {
        "127x127-masked",
        "512x4096-masked",
        "512x32768-masked",
    }
    for workloads in SUITES.values():
        keys = [tuple(w.key.values()) for w in workloads]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("w", SMALL, ids=name_of)
def test_inputs_fit_the_workload(w):
    inputs = w.build()
    assert inputs.q.shape == (sum(w.q_lens), w.num_q_heads, w.head_dim)
    assert inputs.cache.layout == w.layout
    assert inputs.cache.page_size == w.page_size
    assert inputs.seq_lens.tolist() == list(w.kv_lens)
    assert (inputs.scales is None) == (w.dtype == "bf16")
    assert inputs.scales is None or inputs.scales.quant == w.quant
    assert (inputs.cache.k_scale is not None) == (w.quant == "type0")
    pages = inputs.block_table[inputs.block_table >= 0]
    assert len(pages) == len(pages.unique()) < inputs.cache.num_pages
    assert pages.tolist() != sorted(pages.tolist()) or len(pages) < 4


@pytest.mark.parametrize("w", SMALL[:3] + SMALL[-3:], ids=name_of)
def test_poison_is_there_and_the_oracle_does_not_see_it(w):
    poisoned, finite = (w.build(poison=p) for p in (True, False))
    assert poisoned.cache.v.float().isnan().any()
    assert not finite.cache.v.float().isnan().any()
    assert (finite.block_table >= 0).all()
    for a, b in zip(poisoned.reference(), finite.reference(), strict=True):
        assert torch.equal(a, b)
        assert not a.isnan().any()


def test_v_mean_and_seed():
    w = select("decode_small", dtype="bf16")[0]
    o, _ = w.build(v_mean=1.0).reference()
    assert o.mean().item() == pytest.approx(1.0, abs=0.1)
    first, second = w.build_many(2)
    assert first.q.data_ptr() != second.q.data_ptr()
    assert not torch.equal(first.q, second.q)
    assert torch.equal(first.q, w.build().q)


@given(q_len=st.integers(1, 300), extra=st.integers(0, 300), drop=st.sampled_from([0.0, 0.75]), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_flops_count_visible_pairs(q_len, extra, drop, seed):
    kv_len = q_len + extra
    w = prefill(q_len, kv_len, drop=drop, seed=seed)
    q, k = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    visible = (k <= q + extra).expand(4, -1, -1)
    if drop:
        visible = visible & (w.block_mask()[0][:, q // MASK_TILE, k // MASK_TILE] != 0)
    assert w.flops == 4 * 128 * int(visible.sum())


def test_bytes_and_floor():
    (w,) = select("decode", case="uniform_512", dtype="bf16", layout="NHD", q_lens=(1,) * 64)
    assert w.kv_bytes == 64 * 512 * 2 * 128 * 2
    assert w.bytes_moved == w.kv_bytes + 64 * 8 * 128 * (2 + 2)
    (scaled,) = select("decode", case="uniform_512", quant="type0", layout="NHD", q_lens=(1,) * 64)
    assert scaled.kv_bytes == w.kv_bytes // 2 + 64 * 512 * 4
    ceilings = Ceilings(tb_per_s=4.0, tflop_bf16=700.0, tflop_fp8=1300.0)
    assert w.floor_us(ceilings) == pytest.approx(w.bytes_moved / 4e6)
    (long,) = select("prefill", case="16384x16384", layout="NHD", dtype="bf16")
    assert long.floor_us(ceilings) == pytest.approx(long.flops / 700e6)
