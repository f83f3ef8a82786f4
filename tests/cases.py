"""The grids on which every implementation of the operators is held to the oracle, on a CPU and on a GPU alike."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle, product

import torch

from hpcattn import attention_decode, attention_prefill, explain, gather_kv, plan_decode
from hpcattn.bench.workloads import Inputs, Workload
from hpcattn.kernels.hopper.decode_launch import configuration_of
from hpcattn.kernels.portable.decode import TILE
from hpcattn.quantization import dequantize, quantize_per_tensor, quantize_per_token_head
from hpcattn.reference import PModel, attention_decode_reference, attention_prefill_reference, relative_error
from hpcattn.schedule import plan_chunks, static_chunks

FORMATS = (("bf16", "-"), ("fp8", "type0"), ("fp8", "type1"))
PAGES = (16, 32, 64, 128, 256)
BOUND = {"bf16": 4e-3, "fp8": 1e-2}  # fp8 against the oracle that models the rounding of P
PLAIN_BOUND = 5e-2
LSE_BOUND = {"bf16": 1e-3, "fp8": 4e-3}  # the fp8 tensor core keeps some 13 bits of a sum: 2^-13 of scores up to 20


def decode_grid(
    lengths: tuple[tuple[int, ...], ...], *, rounds: int = 1, kv_heads: tuple[int, ...] = (1, 2, 3)
) -> list[tuple[Workload, str, int]]:
    """(workload, schedule, splits): every format x layout x page size, the other axes cycling through their values.

    The cycles have lengths without common factors, so that pairs of axes meet too.
    """
    others = zip(
        cycle((1, 8, 3, 4, 16, 5, 2)),  # group size
        cycle((1, 2, 3, 5, 4)),  # query tokens
        cycle(kv_heads),
        cycle(lengths),
        cycle((("static", 1), ("static", 3), ("dynamic", 1))),
        cycle((0.0, 1.0)),  # mean of V
        strict=False,
    )
    grid = []
    formats = list(product(FORMATS, ("NHD", "HND"), PAGES)) * rounds
    for ((dtype, quant), layout, page), other in zip(formats, others, strict=False):
        group, s, heads, kv_lens, (schedule, splits), v_mean = other
        workload = Workload(
            suite="decode", case=f"v_mean={v_mean}", q_lens=(s,) * len(kv_lens), kv_lens=kv_lens, dtype=dtype,
            quant=quant, layout=layout, num_q_heads=heads * group, num_kv_heads=heads, page_size=page,
            head_dim=64 if dtype == "bf16" and page in (32, 256) else 128,
        )  # fmt: skip
        grid.append((workload, schedule, splits))
    return grid


def prefill_grid(lengths: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> list[Workload]:
    """Every format x layout x page size, dense and masked in turn."""
    others = zip(cycle((1, 4, 3, 16, 2)), cycle((1, 2)), cycle(lengths), cycle((0.0, 0.6, 0.6)), strict=False)
    grid = []
    for ((dtype, quant), layout, page), other in zip(product(FORMATS, ("NHD", "HND"), PAGES), others, strict=False):
        group, heads, (q_lens, kv_lens), drop = other
        grid.append(
            Workload(
                suite="prefill", case="v_mean=1.0" if page < 64 else "v_mean=0.0", q_lens=q_lens, kv_lens=kv_lens,
                dtype=dtype, quant=quant, layout=layout, num_q_heads=heads * group, num_kv_heads=heads, page_size=page,
                drop=drop if len(q_lens) == 1 else 0.0, head_dim=64 if dtype == "bf16" and page == 32 else 128,
            )
        )  # fmt: skip
    return grid


def build(workload: Workload, device: str) -> Inputs:
    """Inputs with NaN wherever nothing may be read, and table entries that would fault or mislead if they were."""
    inputs = workload.build(device, poison=True, v_mean=float(workload.case.partition("v_mean=")[2] or 0.0))
    unused = inputs.block_table < 0
    garbage = torch.randint(-(2**31), 2**31 - 1, inputs.block_table.shape, dtype=torch.int32, device=device)
    return replace(inputs, block_table=torch.where(unused, garbage, inputs.block_table))


PLAN = dict(cluster_size=2, num_clusters=7, min_quota=1)  # cuts pairs between clusters, and segments inside


def check_decode(
    inputs: Inputs, implementation: str, schedule: str, splits: int | None, plan_settings: dict[str, int] = PLAN
) -> float:
    """Run a decode into poisoned buffers, hold o and LSE to the oracle, and give the error of o.

    splits: None for as many as the operator chooses. plan_settings: of `plan_decode`, for the dynamic schedule.
    """
    w = inputs.workload
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    common = dict(scales=inputs.scales, num_query_tokens=w.num_query_tokens)
    hopper, tile, plan = implementation == "hopper", TILE, None
    if schedule == "dynamic":
        plan = plan_decode(inputs.seq_lens, w.num_kv_heads, **plan_settings)
    if hopper:
        blocks = None if plan is None else plan.row_blocks
        tile = configuration_of(inputs.q, inputs.cache.k, inputs.block_table, w.num_query_tokens, blocks).tile
    if plan is not None:
        chunks, how = plan_chunks(plan, shares=hopper), dict(plan=plan)
    else:
        how = dict(schedule=schedule, num_splits=splits)
        chosen = explain(attention_decode, *args, **common, **how, implementation=implementation)
        counts = dict(num_splits=chosen["num_splits"], min_tiles=chosen["min_tiles"])
        chunks = static_chunks(list(w.kv_lens), w.num_kv_heads, tile=tile, **counts)
    out = torch.full_like(inputs.q, math.nan, dtype=torch.bfloat16)
    lse = torch.full(inputs.q.shape[:2], math.nan, device=inputs.q.device)
    attention_decode(*args, **common, **how, out=out, lse=lse, return_lse=True, implementation=implementation)
    model = PModel(tile, chunks=chunks) if w.dtype == "fp8" and implementation != "reference" else None
    return hold(out, lse, w.dtype, inputs, attention_decode_reference(*args, **common, p_model=model))


def run_hopper(inputs: Inputs, **options) -> torch.Tensor:
    """The output of the Hopper decode kernel."""
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    common = dict(scales=inputs.scales, num_query_tokens=inputs.workload.num_query_tokens)
    return attention_decode(*args, **common, **options, implementation="hopper")


def check_prefill(inputs: Inputs, implementation: str) -> float:
    """As `check_decode`, for prefill."""
    w = inputs.workload
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    common = dict(scales=inputs.scales, block_mask=inputs.block_mask)
    out = torch.full_like(inputs.q, math.nan, dtype=torch.bfloat16)
    lse = torch.full(inputs.q.shape[:2], math.nan, device=inputs.q.device)
    attention_prefill(*args, **common, out=out, lse=lse, return_lse=True, implementation=implementation)
    model = None
    if w.dtype == "fp8" and implementation != "reference":
        model = PModel(128, "descending") if implementation == "hopper" else PModel(TILE)
    return hold(out, lse, w.dtype, inputs, attention_prefill_reference(*args, **common, p_model=model))


def visible_keys(inputs: Inputs) -> torch.Tensor:
    """int64 `[tokens]`: the keys that each query sees, a block mask aside."""
    w = inputs.workload
    seen = [kv - q + 1 + torch.arange(q) for q, kv in zip(w.q_lens, w.kv_lens, strict=True)]
    return torch.cat(seen).clamp_min(0).to(inputs.q.device)


def hold(out, lse, dtype: str, inputs: Inputs, expected) -> float:
    """Assert that o and LSE are within the bounds; report the worst element with its position."""
    o, exact_lse = expected
    error = relative_error(out, o)
    if dtype == "fp8":  # rows that see few keys hang on how single weights round
        many = visible_keys(inputs) >= 16
        error = relative_error(out[many], o[many]) if bool(many.any()) else 0.0
    worst = (out.double() - o).abs().nan_to_num(math.inf).argmax()
    where = [int(i) for i in torch.unravel_index(worst, o.shape)]
    seen = f"worst at [token, head, dim] = {where}: {float(out.flatten()[worst])} against {float(o.flatten()[worst])}"
    assert error <= BOUND[dtype], f"relative error {error:.2e} > {BOUND[dtype]:.0e}; {seen}"
    if dtype == "fp8":
        assert relative_error(out, inputs.reference()[0]) <= PLAIN_BOUND
    blind = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind) and bool((out[blind] == 0).all()), "rows that see nothing"
    difference = (lse.double() - exact_lse)[~blind].abs()
    assert bool((difference <= LSE_BOUND[dtype]).all()), f"LSE off by {float(difference.max()):.1e}"
    return error


def eager_bf16(inputs: Inputs) -> torch.Tensor:
    """Decode as eager PyTorch in bf16 would do it: every intermediate result rounded to bf16."""
    w, o = inputs.workload, torch.zeros_like(inputs.q)
    group = w.num_q_heads // w.num_kv_heads
    for b, kv_len in enumerate(w.kv_lens):
        k, v, _ = gather_kv(inputs.cache, inputs.block_table, b, kv_len)
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        q = inputs.q.unflatten(0, (-1, w.num_query_tokens))[b].transpose(0, 1)
        last = kv_len - w.num_query_tokens + torch.arange(w.num_query_tokens)
        hidden = torch.arange(kv_len)[None, :] > last[:, None]
        s = (q @ k.transpose(1, 2) * w.head_dim**-0.5).masked_fill(hidden, -math.inf)
        rows = o.unflatten(0, (-1, w.num_query_tokens))[b]
        rows.copy_((s.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1))
    return o


def describe(workload: Workload, schedule: str = "-") -> dict[str, str]:
    """The row of the coverage table that a case belongs to."""
    w = workload
    return {
        "operator": f"{w.suite}{' masked' if w.drop else ''}",
        "format": w.dtype if w.quant == "-" else f"{w.dtype} {w.quant}",
        "layout": w.layout,
        "page": str(w.page_size),
        "group": str(w.num_q_heads // w.num_kv_heads),
        "query tokens": str(w.num_query_tokens) if w.suite == "decode" else "ragged",
        "schedule": schedule,
    }


def decode_step(device: str) -> dict:
    """Arguments of a decode of three ragged requests with two query tokens."""
    w = Workload(suite="decode", case="", q_lens=(2,) * 3, kv_lens=(700, 5, 4096), num_q_heads=16, num_kv_heads=2)
    x = build(w, device)
    return dict(q=x.q, cache=x.cache, block_table=x.block_table, seq_lens=x.seq_lens, num_query_tokens=2)


SINGLE = ((70, 130, 4, 2, 64), (1, 65, 3, 1, 128), (80, 20, 2, 2, 64))  # queries, keys, heads, KV heads, head_dim


def check_single(attention, causal: bool, shape: tuple[int, ...], device: str) -> None:
    """Hold `naive_attention` or `online_attention` to the oracle, in bf16 and in fp8."""
    q_len, kv_len, heads, kv_heads, dim = shape
    q = torch.randn(q_len, heads, dim, device=device)
    k, v = torch.randn(2, kv_len, kv_heads, dim, device=device)
    v = v + 1
    q8, q_scale = quantize_per_token_head(q)
    (k8, k_scale), (v8, v_scale) = quantize_per_tensor(k), quantize_per_tensor(v)
    fp8 = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    exact8 = [dequantize(q8, q_scale), dequantize(k8, k_scale), dequantize(v8, v_scale)]
    bf16 = [x.bfloat16() for x in (q, k, v)]
    for args, scales, exact, bound in ((bf16, {}, bf16, BOUND["bf16"]), ((q8, k8, v8), fp8, exact8, PLAIN_BOUND)):
        o, lse = attention(*args, **scales, causal=causal)
        expected, expected_lse = single_reference(*(x.double() for x in exact), causal)
        assert relative_error(o, expected) < bound
        torch.testing.assert_close(lse.double(), expected_lse, atol=LSE_BOUND["fp8" if scales else "bf16"], rtol=0)


def single_reference(q, k, v, causal: bool):
    """Materialized attention of one sequence in float64."""
    group = q.shape[1] // k.shape[1]
    s = torch.einsum("ihd,jhd->ihj", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    if causal:
        last = len(k) - len(q) + torch.arange(len(q), device=q.device)
        s = s.masked_fill((torch.arange(len(k), device=q.device)[None, :] > last[:, None])[:, None], -torch.inf)
    p = s.softmax(-1).nan_to_num(0.0)
    return torch.einsum("ihj,jhd->ihd", p, v.repeat_interleave(group, 1)), s.logsumexp(-1)
