"""Scales, rounding and HPC-Ops' byte layouts."""

import pytest
import torch

from hpcattn import PagedKVCache, Scales, quantize_cache
from hpcattn.quantization import (
    FP8,
    dequantize,
    k_scales_in_page,
    pad_q_scale,
    quantize_per_head,
    quantize_per_tensor,
    quantize_per_token_head,
    to_fp8,
    unpad_q_scale,
)


@pytest.mark.parametrize(
    ("quantize", "shape"), [(quantize_per_token_head, (7, 3)), (quantize_per_head, (3,)), (quantize_per_tensor, (1,))]
)
def test_round_trip_is_as_good_as_e4m3_can_be(quantize, shape):
    x = torch.randn(7, 3, 128) * torch.tensor([0.01, 1.0, 300.0])[:, None]
    x8, scale = quantize(x)
    assert x8.dtype == FP8 and scale.shape == shape and scale.dtype == torch.float32
    error = (dequantize(x8, scale) - x).abs()
    # half a step of a 3-bit mantissa, or of the smallest subnormal
    assert (error <= torch.maximum(x.abs() * 2**-4, scale.unsqueeze(-1) * 2**-10) * 1.001).all()
    assert x8.float().abs().max() == 448.0


def test_zeros_and_saturation():
    x8, scale = quantize_per_head(torch.zeros(2, 3, 4))
    assert (scale > 0).all() and (x8.float() == 0).all()
    assert to_fp8(torch.tensor([[1000.0, -1000.0]]), torch.ones(1)).float().tolist() == [[448.0, -448.0]]


def test_scales_know_their_type():
    one = torch.ones(1)
    assert Scales(one, one).quant == "type0" and Scales(one, one, one).quant == "type1"


def test_padded_q_scale():
    q_scale = torch.rand(9, 2)
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    padded = pad_q_scale(q_scale, starts, 8)
    assert padded.shape == (3, 2, 8) and padded[2, 1, 3] == q_scale[7, 1] and padded[1].abs().sum() == 0
    assert torch.equal(unpad_q_scale(padded, starts), q_scale)


def test_k_rows_must_fit():
    with pytest.raises(ValueError, match=r"\[num_pages, 66, num_kv_heads, 128\] for page_size=64"):
        k_scales_in_page(torch.zeros(2, 65, 1, 128).to(FP8), 64)


@pytest.mark.parametrize("where", ["page", "separate"])
@pytest.mark.parametrize(("layout", "page_size"), [("NHD", 16), ("HND", 128)])
def test_quantize_cache(layout, page_size, where):
    cache = PagedKVCache.allocate(3, page_size, 2, 128, layout=layout)
    cache.k[:2], cache.v[:2] = torch.randn(2, 2, page_size, 2, 128)
    for quant in ("type0", "type1"):
        out, k_scale, v_scale = quantize_cache(cache, quant, k_scales=where)
        assert out.layout == layout and out.k[2].float().isnan().all(), "unused slots stay poisoned"
        assert v_scale.shape == ((2,) if quant == "type0" else (1,)) and v_scale.isfinite().all()
        if quant == "type0":
            assert k_scale is None
            token = 13
            k = out.k[1, token].double() * out.k_scale[1, token // 32, :, token % 32].double()[:, None]
        else:
            k = dequantize(out.k[1, 13], k_scale)
        assert (k - cache.k[1, 13].double()).norm() < 0.04 * cache.k[1, 13].double().norm()
        assert (dequantize(out.v[1], v_scale) - cache.v[1]).norm() < 0.04 * cache.v[1].double().norm()
    with pytest.raises(ValueError, match="quant must be"):
        quantize_cache(cache, "type2")
