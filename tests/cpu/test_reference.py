"""The oracle itself: against PyTorch where PyTorch can do it, and against a slow loop where it cannot."""

import math

import pytest
import torch
import torch.nn.functional as F

from hpcattn import PackedKV, PModel, attention_prefill_reference, relative_error
from hpcattn.bench.workloads import Workload


def test_against_pytorch_float64():
    q, k, v = (torch.randn(30, heads, 64, dtype=torch.float64).bfloat16() for heads in (4, 2, 2))
    starts = torch.tensor([0, 30], dtype=torch.int32)
    o, lse = attention_prefill_reference(q, PackedKV(k, v), None, starts, None)
    batched = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(o, expected)
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double().repeat_interleave(2, 1)) / 8
    scores = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T)


def test_row_blocks_do_not_change_the_result(monkeypatch):
    w = Workload(suite="prefill", case="", q_lens=(50, 7), kv_lens=(90, 7), num_q_heads=4, num_kv_heads=2, page_size=16)
    inputs = w.build()
    whole = inputs.reference()
    monkeypatch.setattr("hpcattn.reference._MAX_SCORES", 90 * 2 * 8)
    for got, expected in zip(inputs.reference(), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_what_is_not_visible_cannot_matter():
    w = Workload(suite="decode", case="", q_lens=(2, 2), kv_lens=(1, 37), num_q_heads=4, num_kv_heads=2, page_size=16)
    for got, expected in zip(w.build(poison=True).reference(), w.build(poison=False).reference(), strict=True):
        assert torch.equal(got, expected)
    o, lse = w.build().reference()
    assert (o[0] == 0).all() and (lse[0] == -math.inf).all() and lse[1:].isfinite().all()


def _slow_fp8(q, k, v, order, tile, chunks):
    """One row, one key at a time within a tile: the definition of the P model, spelled out."""
    states = []
    for start, stop in zip(chunks, [*chunks[1:], len(k)], strict=True):
        tiles = [range(i, min(i + tile, stop)) for i in range(start, stop, tile)]
        tiles = {"ascending": tiles, "descending": tiles[::-1], "tail_first": tiles[-1:] + tiles[:-1]}[order]
        m, l, acc = -math.inf, 0.0, torch.zeros_like(q)
        for keys in tiles:
            scores = [float(q @ k[j]) for j in keys]
            m_new = max(m, *scores)
            acc, l = acc * math.exp(m - m_new), l * math.exp(m - m_new)
            for j, s in zip(keys, scores, strict=True):
                p = math.exp(s - m_new)
                l += p
                acc += torch.tensor(p * 256).to(torch.float8_e4m3fn).double() / 256 * v[j]
            m = m_new
        states.append((m, l, acc))
    top = max(m for m, _, _ in states)
    weights = [math.exp(m - top) for m, _, _ in states]
    total = sum(w * l for w, (_, l, _) in zip(weights, states, strict=True))
    return sum(w * acc for w, (_, _, acc) in zip(weights, states, strict=True)) / total


@pytest.mark.parametrize("order", ["ascending", "descending", "tail_first"])
@pytest.mark.parametrize("chunks", [[0], [0, 64]])
def test_p_model(order, chunks):
    w = Workload(
        suite="decode", case="", q_lens=(1,), kv_lens=(150,), num_q_heads=2, num_kv_heads=1, dtype="fp8", quant="type1"
    )
    i = w.build()
    model = PModel(32, order, chunks=[[chunks]])
    args = (i.q, i.cache, i.block_table, i.cu_seqlens_q, i.seq_lens)
    o, _ = attention_prefill_reference(*args, scales=i.scales, p_model=model)
    k, v = (x[i.block_table[0].long()].flatten(0, 1)[:150, 0].double() for x in (i.cache.k, i.cache.v))
    q = i.q[0].double() * i.scales.q[0].double()[:, None] * i.scales.k.double() * 128**-0.5
    for h in range(2):
        expected = _slow_fp8(q[h], k, v * i.scales.v.double(), order, 32, chunks)
        torch.testing.assert_close(o[0, h], expected, rtol=1e-6, atol=1e-9)
    plain, _ = i.reference()
    assert 2e-3 < relative_error(o, plain) < 5e-2, "the model must round something, and not more than e4m3 does"


def test_relative_error():
    reference = torch.randn(5, dtype=torch.float64)
    assert relative_error(reference, reference) == 0 and relative_error(torch.zeros(5), reference) == 1
    assert math.isnan(relative_error(torch.full((5,), math.nan), reference))
