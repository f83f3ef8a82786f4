"""The two single-sequence kernels of lessons 01 and 03, and offline compilation of every portable kernel."""

import cases
import pytest
import torch

from hpcattn import PackedKV, attention_prefill, attention_prefill_reference
from hpcattn import relative_error as error
from hpcattn.inspection import variants
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


def test_offline_variants_are_complete():
    kernels = {v.fn.__name__.removesuffix("_kernel") for v in variants()}
    assert kernels == {
        "static", "dynamic", "merge", "prefill", "append", "prefix", "records", "scores", "softmax", "values", "online",
        "decode", "count", "place",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words", [("static", "bf16"), ("dynamic", "type0"), ("prefill masked", "type1"), ("naive", "bf16")]
)
def test_products_run_on_tensor_cores(words):
    """Scores and weighted sums do, and nothing else has a matrix product."""
    for variant in variants(*words):
        matrix = {"HGMMA", "HMMA", "QGMMA", "QMMA"} & set(variant.compile().families())
        kernel = variant.fn.__name__.removesuffix("_kernel")
        assert bool(matrix) == (kernel in ("dynamic", "static", "prefill", "scores", "values", "online"))


def test_packed_agrees_with_online():
    q, k, v = (torch.randn(90, heads, 128).bfloat16() for heads in (4, 2, 2))
    starts = torch.tensor([0, 90], dtype=torch.int32)
    packed = attention_prefill(q, PackedKV(k, v), None, starts, None, implementation="portable")
    assert torch.equal(packed, online_attention(q, k, v)[0])
    assert error(packed, attention_prefill_reference(q, PackedKV(k, v), None, starts, None)[0]) < 4e-3
