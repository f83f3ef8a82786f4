"""`attention_decode`: attention of a few new query tokens per request over a paged KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcattn.cache import PagedKVCache
from hpcattn.explanation import Explanation, explains
from hpcattn.kernels.portable import decode as portable
from hpcattn.ops import define_operator
from hpcattn.quantization import Scales
from hpcattn.reference import attention_decode_reference
from hpcattn.schedule import DecodePlan, multiprocessors, plan_decode, saturating_splits
from hpcattn.validation import (
    check_block_table,
    check_cache,
    check_content,
    check_heads,
    check_out,
    check_scales,
    check_seq_lens,
    check_tensor,
    check_value,
    resolve_implementation,
)

__all__ = ["attention_decode", "decode_workspace"]


def attention_decode(
    q: Tensor,
    cache: PagedKVCache,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scales: Scales | None = None,
    num_query_tokens: int = 1,
    softmax_scale: float | None = None,
    plan: DecodePlan | None = None,
    schedule: str = "auto",
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    check_inputs: str = "shapes",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the S newest tokens of every request over its pages, the new tokens included.

    Query i of S sits at position L - S + i of a request of length L and sees the keys up to it. A query that sees
    nothing (L = 0, or L < S for the first ones) gives 0 and LSE -inf. Whatever lies outside `seq_lens`, in unused
    slots, pages or table entries, is never read into the result.

    q: bf16 or e4m3 `[batch * S, num_q_heads, head_dim]`, request-major, last dimension dense.
    cache: see `PagedKVCache`; head_dim 64 or 128 in bf16, 128 in fp8; num_q_heads is 1-16 times num_kv_heads.
    block_table: int32 `[batch, max_pages]`. seq_lens: int32 `[batch]`. A length beyond `max_pages * page_size`, or one
        that `plan` was not built for, gives NaN rows, never truncated attention.
    scales: for fp8, see `Scales`; scales.q is `[batch * S, num_q_heads]`.
    softmax_scale: `head_dim ** -0.5` if None.
    plan: a `plan_decode` result; selects the dynamic schedule. schedule: `"auto"` (dynamic with a plan, else static),
        `"static"`, or `"dynamic"` (builds a plan if none is given). num_splits: chunks per pair of the static schedule.
    out: bf16 `[batch * S, num_q_heads, head_dim]`, lse: float32 `[batch * S, num_q_heads]`, both contiguous, and
        workspace: float32, see `decode_workspace`; with all three given nothing is allocated.
    implementation: `"auto"`, `"reference"` (float64, rounded at the end), `"portable"`, `"hopper"`.
    check_inputs: `"shapes"` never waits for the device; `"full"` also checks lengths and table entries, and does.
    Returns o, or (o, lse) with return_lse; LSE is the natural-log log-sum-exp of the scaled scores.
    Raises TypeError or ValueError naming the argument, before anything is launched.
    """
    call = _resolve(
        q, cache, block_table, seq_lens, scales, num_query_tokens, plan, schedule, num_splits, implementation,
        check_inputs,
    )  # fmt: skip
    check_out(q, out, lse)
    if workspace is not None:
        check_tensor("workspace", workspace, shape=(None,), dtype=torch.float32, device=q.device, contiguous=True)
    if call.schedule == "dynamic" and plan is None:
        plan = plan_decode(
            seq_lens,
            cache.num_kv_heads,
            max_seq_len=block_table.shape[1] * cache.page_size,
            implementation=call.implementation,
        )
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    torch.ops.hpcattn.decode(
        q,
        cache.k,
        cache.v,
        block_table,
        seq_lens,
        None if scales is None else scales.q,
        cache.k_scale if scales is None or scales.k is None else scales.k,
        None if scales is None else scales.v,
        *((None, None, None) if plan is None else (plan.header, plan.offsets, plan.starts)),
        num_query_tokens,
        cache.head_dim**-0.5 if softmax_scale is None else softmax_scale,
        call.num_splits,
        call.implementation,
        workspace,
        out,
        lse,
    )
    return (out, lse) if return_lse else out


class _Call(NamedTuple):
    """What a decode call runs, and why."""

    implementation: str
    schedule: str
    num_splits: int
    why_implementation: str
    why_schedule: str
    why_splits: str


def _resolve(
    q, cache, block_table, seq_lens, scales, num_query_tokens, plan, schedule, num_splits, implementation, check_inputs
) -> _Call:  # fmt: skip
    """Check everything but the buffers, and settle every "auto"."""
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    check_cache(cache, device)
    check_value("num_query_tokens", num_query_tokens, num_query_tokens in range(1, 6), "an integer from 1 to 5")
    check_seq_lens(seq_lens, device)
    batch = seq_lens.shape[0]
    shape = (batch * num_query_tokens, None, cache.head_dim)
    check_tensor(
        "q", q, shape=shape, dtype=cache.dtype, device=device, axes="batch * S, num_q_heads, head_dim", dense=True
    )
    check_heads(q.shape[1], cache.num_kv_heads)
    check_block_table(block_table, batch, device)
    check_scales(scales, cache, (tuple(q.shape[:2]),), device)
    check_value("schedule", schedule, schedule in ("auto", "static", "dynamic"), "'auto', 'static' or 'dynamic'")
    if plan is not None:
        check_value(
            "plan", plan.num_kv_heads, plan.num_kv_heads == cache.num_kv_heads, f"for {cache.num_kv_heads} KV heads"
        )
        check_tensor(
            "plan.offsets", plan.offsets, shape=(batch + 1,), dtype=torch.int32, device=device, axes="batch + 1"
        )
        check_value("schedule", schedule, schedule != "static", "'dynamic' or 'auto' when a plan is given")
    check_value("num_splits", num_splits, num_splits is None or num_splits >= 1, "None or a positive integer")
    check_content(check_inputs, cache, block_table, seq_lens)

    implementation, why_implementation = resolve_implementation(implementation, device, operator="attention_decode")
    if schedule != "auto":
        why_schedule = "as asked"
    else:
        schedule = "static" if plan is None else "dynamic"
        why_schedule = "no plan was given" if plan is None else "a plan was given"
    why_splits = "as asked"
    if schedule == "dynamic":
        num_splits, why_splits = 1, "chunks come from the plan"
    elif num_splits is None:
        num_splits = saturating_splits(batch, cache.num_kv_heads, block_table.shape[1] * cache.page_size, device)
        why_splits = f"{batch * cache.num_kv_heads} pairs, {multiprocessors(device)} multiprocessors"
    return _Call(implementation, schedule, num_splits, why_implementation, why_schedule, why_splits)


@explains(attention_decode)
def _explain(
    q, cache, block_table, seq_lens, *, scales=None, num_query_tokens=1, plan=None, schedule="auto", num_splits=None,
    implementation="auto", check_inputs="shapes", **_,
) -> Explanation:  # fmt: skip
    call = _resolve(
        q, cache, block_table, seq_lens, scales, num_query_tokens, plan, schedule, num_splits, implementation,
        check_inputs,
    )  # fmt: skip
    choices = {
        "implementation": (call.implementation, call.why_implementation),
        "schedule": (call.schedule, call.why_schedule),
        "num_splits": (call.num_splits, call.why_splits),
    }
    return Explanation("attention_decode", choices)


def decode_workspace(
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    num_query_tokens: int = 1,
    num_splits: int = 1,
    plan: DecodePlan | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A float32 workspace large enough for such a call; one may serve all layers of a step, one after another."""
    slots = portable.num_states(batch * num_kv_heads, num_splits, None if plan is None else plan.num_ctas)
    rows = num_query_tokens * num_q_heads // num_kv_heads
    return torch.empty(max(1, slots * rows * (head_dim + 2)), dtype=torch.float32, device=device)


def _decode(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, header, offsets, starts, num_query_tokens, softmax_scale,
    num_splits, implementation, workspace, out, lse,
) -> None:  # fmt: skip
    if q.numel() == 0:
        return
    plan = None if header is None else (header, offsets, starts)
    if implementation == "portable":
        portable.launch(
            q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, plan, num_query_tokens, softmax_scale,
            num_splits, workspace, out, lse,
        )  # fmt: skip
        return
    in_cache = k_scale is not None and k_scale.dim() == 4
    scales = None if q_scale is None else Scales(q_scale, v_scale, None if in_cache else k_scale)
    o, exact_lse = attention_decode_reference(
        q, PagedKVCache(k, v, k_scale if in_cache else None), block_table, seq_lens, scales=scales,
        num_query_tokens=num_query_tokens, softmax_scale=softmax_scale,
    )  # fmt: skip
    out.copy_(o)
    if lse is not None:
        lse.copy_(exact_lse)


define_operator(
    "decode(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor seq_lens, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? header, Tensor? offsets, Tensor? starts, int num_query_tokens, float softmax_scale, "
    "int num_splits, str implementation, Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? lse)",
    _decode,
)
