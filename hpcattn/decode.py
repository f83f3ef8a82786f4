"""`attention_decode`: attention of a few new query tokens per request over a paged KV cache."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from hpcattn.cache import PagedKVCache, flatten_scales, unflatten_scales
from hpcattn.explanation import Explanation, explains
from hpcattn.kernels.hopper import decode_launch as hopper
from hpcattn.kernels.portable import decode as portable
from hpcattn.ops import define_operator
from hpcattn.quantization import Scales
from hpcattn.reference import attention_decode_reference
from hpcattn.schedule import (
    DecodePlan,
    PlanTensors,
    check_plan,
    multiprocessors,
    plan_decode,
    portable_grid,
    saturating_splits,
    static_splits,
)
from hpcattn.validation import (
    Settled,
    check_block_table,
    check_cache,
    check_content,
    check_heads,
    check_options,
    check_out,
    check_scales,
    check_seq_lens,
    check_tensor,
    check_value,
    resolve_implementation,
)

__all__ = ["attention_decode", "decode_workspace", "prepare_decode"]


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
    """Attention of the S newest tokens of every request over its pages, the new tokens included. For inference only.

    Query i of S sits at position L - S + i of a request of length L and sees the keys up to it. A query that sees
    nothing (L = 0, or L < S for the first ones) gives 0 and LSE -inf. Whatever lies outside `seq_lens`, in unused
    slots, pages or table entries, is never read into the result.

    q: bf16 or e4m3 `[batch * S, num_q_heads, head_dim]`, request-major, last dimension dense.
    cache: see `PagedKVCache`; head_dim 64 or 128 in bf16, 128 in fp8; num_q_heads is 1-16 times num_kv_heads.
    block_table: int32 `[batch, max_pages]`. seq_lens: int32 `[batch]`. A length beyond `max_pages * page_size`, or one
        of another number of tiles than `plan` was built for and cuts by, gives NaN rows, never truncated attention.
    scales: for fp8, see `Scales`; scales.q is `[batch * S, num_q_heads]`.
    softmax_scale: `head_dim ** -0.5` if None.
    plan: a `plan_decode` result; selects the dynamic schedule of the kernels (the reference has none). Calls that share
        one must run one after another.
    schedule: `"auto"` (dynamic with a plan, else static), `"static"`, or `"dynamic"` (builds a plan if none is given).
    num_splits: chunks per pair of the static schedule; see `schedule.static_splits` for what None does.
    out: bf16 `[batch * S, num_q_heads, head_dim]`, lse: float32 `[batch * S, num_q_heads]`, both contiguous, and
        workspace: float32, see `decode_workspace`. With all three given, and a plan or the static schedule, nothing
        is allocated.
    implementation: `"auto"`, `"reference"` (float64, rounded at the end), `"portable"`, `"hopper"`.
    check_inputs: `"shapes"` never waits for the device; `"full"` also checks lengths and table entries, and does.
    Returns o, or (o, lse) with return_lse; LSE is the natural-log log-sum-exp of the scaled scores.
    Raises TypeError or ValueError naming the argument, before anything is launched.
    """
    call, result, known = _bind(
        q, cache, block_table, seq_lens, scales, num_query_tokens, softmax_scale, plan, schedule, num_splits, out, lse,
        workspace, return_lse, implementation, check_inputs,
    )  # fmt: skip
    if known is not None and q.is_cuda and type(q) is Tensor and torch.cuda.current_device() == q.device.index:
        _prepare(*call, key=known)()  # what the dispatcher would do, 6 µs sooner; modes and profilers see kernels only
    else:
        torch.ops.hpcattn.decode(*call)
    return result


def prepare_decode(*args, **kwargs) -> Callable[[], Tensor | tuple[Tensor, Tensor]]:
    """`attention_decode` with these arguments, as a function without any: the cheapest eager launch.

    Kernels, tensor maps and addresses are bound. A call reads what the tensors hold at that time, runs on the current
    stream, and returns the same result tensors every time; it has one workspace and perhaps a plan, so calls must not
    overlap, and it must outlive graphs that captured it. Raises what `attention_decode` raises, and ValueError for the
    dynamic schedule without a plan.
    """
    bound = inspect.signature(attention_decode).bind(*args, **kwargs)
    bound.apply_defaults()
    planned = bound.arguments["schedule"] != "dynamic" or bound.arguments["plan"] is not None
    check_value("plan", None, planned, "given for schedule='dynamic': a prepared call does not build it anew")
    call, result, _ = _bind(**bound.arguments)
    device = call[0].device
    guard = contextlib.nullcontext() if device.type != "cuda" else torch.cuda.device(device)
    with guard:
        run = _prepare(*call)

    def prepared():
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            with guard:
                run()
        else:
            run()
        return result

    return prepared


def _bind(
    q, cache, block_table, seq_lens, scales, num_query_tokens, softmax_scale, plan, schedule, num_splits, out, lse,
    workspace, return_lse, implementation, check_inputs,
) -> tuple[tuple, Tensor | tuple[Tensor, Tensor], tuple | None]:  # fmt: skip
    """Check and settle everything: arguments of `torch.ops.hpcattn.decode`, what to return, `Settled`'s key."""
    known = call = None
    if (plan is not None or schedule != "dynamic") and check_inputs == "shapes" and not torch.compiler.is_compiling():
        options = (num_query_tokens, softmax_scale, schedule, num_splits, return_lse, implementation)
        options += (plan.metadata if isinstance(plan, DecodePlan) else plan,)
        known, call = _settled.find(cache, (q, block_table, seq_lens, out, lse, workspace), scales, options)
    checked = call is not None
    if not checked:
        check_options(check_inputs, softmax_scale)
        call = _resolve(
            q, cache, block_table, seq_lens, scales, num_query_tokens, plan, schedule, num_splits, implementation
        )
        check_out(q, out, lse)
    if check_inputs == "full":
        check_content(cache, block_table, seq_lens)
    if call["schedule"] == "dynamic" and plan is None:
        plan = plan_decode(
            seq_lens,
            cache.num_kv_heads,
            query_rows=num_query_tokens * q.shape[1] // cache.num_kv_heads,
            dtype=q.dtype,
            max_seq_len=min(block_table.shape[1] * cache.page_size, 2**30),
            **({} if call["implementation"] == "hopper" else portable_grid(q.device)),
            implementation="auto" if call["implementation"] == "hopper" else call["implementation"],
        )
    if not checked:
        if workspace is not None:
            floats = _workspace_floats(q, cache, seq_lens, call["num_splits"], plan)
            check_tensor("workspace", workspace, shape=(None,), dtype=torch.float32, device=q.device, contiguous=True)
            long_enough = workspace.numel() >= floats
            check_value("workspace", list(workspace.shape), long_enough, f"[{floats}] or longer, see decode_workspace")
        _settled.keep(known, call)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    arguments = (
        q, cache.k, cache.v, block_table, seq_lens, *flatten_scales(cache, scales),
        *_plan_arguments(plan, call["implementation"]), num_query_tokens,
        cache.head_dim**-0.5 if softmax_scale is None else softmax_scale, call["num_splits"], call["min_tiles"],
        call["implementation"], workspace, out, lse,
    )  # fmt: skip
    return arguments, (out, lse) if return_lse else out, known


_settled = Settled()


@explains(attention_decode)
def _resolve(
    q, cache, block_table, seq_lens, scales, num_query_tokens, plan, schedule, num_splits, implementation
) -> Explanation:
    """Check everything but the buffers, and settle every "auto"."""
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    check_cache(cache, device)
    few = isinstance(num_query_tokens, int) and 1 <= num_query_tokens <= 5
    check_value("num_query_tokens", num_query_tokens, few, "an integer from 1 to 5")
    check_seq_lens(seq_lens, device)
    batch = seq_lens.shape[0]
    check_value("seq_lens", [batch], batch < 65536, "at most 65535 requests long")
    shape = (batch * int(num_query_tokens), None, cache.head_dim)
    check_tensor(
        "q", q, shape=shape, dtype=cache.dtype, device=device, axes="batch * S, num_q_heads, head_dim", dense=True
    )
    check_heads(q.shape[1], cache.num_kv_heads)
    check_block_table(block_table, batch, device)
    check_scales(scales, cache, (tuple(q.shape[:2]),), device)
    check_value("schedule", schedule, schedule in ("auto", "static", "dynamic"), "'auto', 'static' or 'dynamic'")
    if plan is not None:
        check_plan(plan, batch, device)
        fits = plan.num_kv_heads == cache.num_kv_heads
        check_value("plan", plan.num_kv_heads, fits, f"for {cache.num_kv_heads} KV heads")
        check_value("schedule", schedule, schedule != "static", "'dynamic' or 'auto' when a plan is given")
    whole = num_splits is None or (isinstance(num_splits, int) and num_splits >= 1)
    check_value("num_splits", num_splits, whole, "None or a positive integer")

    if schedule == "auto":
        chosen = ("static", "no plan was given") if plan is None else ("dynamic", "a plan was given")
    else:
        chosen = (schedule, "as asked")
    no_hopper = hopper.unsupported(cache.k, cache.v, cache.k_scale)
    kind = resolve_implementation(implementation, device, operator="attention_decode", no_hopper=no_hopper)
    splits, min_tiles = (num_splits, "as asked"), (1, "chunks are equal shares")
    if chosen[0] == "dynamic":
        splits = (1, "chunks come from the plan")
    elif num_splits is None:
        capacity = block_table.shape[1] * cache.page_size
        pairs = batch * cache.num_kv_heads
        why = f"{pairs} pairs, {multiprocessors(device)} multiprocessors"
        if kind[0] == "hopper":
            config = hopper.configuration_of(q, cache.k, block_table, num_query_tokens)
            wanted, least = static_splits(pairs * config.blocks, capacity, device)
            splits = (wanted, f"{why}, requests of up to {capacity} tokens")
            min_tiles = (least // config.tile, f"{least} tokens: shorter chunks are not worth their merge")
        else:
            splits = (saturating_splits(batch, cache.num_kv_heads, capacity, device), why)
    choices = {"implementation": kind, "schedule": chosen, "num_splits": splits, "min_tiles": min_tiles}
    return Explanation("attention_decode", choices)


def decode_workspace(
    q: Tensor,
    cache: PagedKVCache,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scales: Scales | None = None,
    num_query_tokens: int = 1,
    plan: DecodePlan | None = None,
    num_splits: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """The float32 workspace of `attention_decode` with these arguments; one serves all layers of a step in turn."""
    call = _resolve(q, cache, block_table, seq_lens, scales, num_query_tokens, plan, "auto", num_splits, implementation)
    floats = _workspace_floats(q, cache, seq_lens, call["num_splits"], plan)
    return torch.empty(floats, dtype=torch.float32, device=q.device)


def _plan_arguments(plan: DecodePlan | None, implementation: str) -> tuple:
    """A plan as the operator takes it; where every pair has a CTA of its own, the Hopper kernels need none."""
    if plan is None or (implementation == "hopper" and plan.one_cta_per_pair):
        return None, None, None, None, 1, 1
    return *plan.tensors, plan.cluster_size, plan.row_blocks


def _workspace_floats(q, cache, seq_lens, num_splits: int, plan: DecodePlan | None) -> int:
    num_clusters = None if plan is None else plan.num_clusters
    return portable.workspace_floats(q, cache.k, seq_lens, num_splits, num_clusters)


def _prepare(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, header, offsets, records, counters, cluster_size,
    row_blocks, num_query_tokens, softmax_scale, num_splits, min_tiles, implementation, workspace, out, lse, key=None,
) -> Callable[[], None]:  # fmt: skip
    """What is to run, bound to its arguments; key as in `hopper.prepare`."""
    plan = None if header is None else PlanTensors(header, offsets, records, counters, cluster_size, row_blocks)
    inputs = (q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, plan, num_query_tokens, softmax_scale)
    if q.numel() == 0:
        return lambda: None
    if implementation == "hopper":
        return hopper.prepare(*inputs, num_splits, min_tiles, workspace, out, lse, key=key)
    if implementation == "portable":
        return lambda: portable.launch(*inputs, num_splits, workspace, out, lse)

    def reference():
        cache, scales = unflatten_scales(k, v, q_scale, k_scale, v_scale)
        common = dict(scales=scales, num_query_tokens=num_query_tokens, softmax_scale=softmax_scale)
        o, exact_lse = attention_decode_reference(q, cache, block_table, seq_lens, **common)
        out.copy_(o)
        if lse is not None:
            lse.copy_(exact_lse)

    return reference


def _decode(*call) -> None:
    _prepare(*call)()


define_operator(
    "decode(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor seq_lens, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? header, Tensor? offsets, Tensor? records, Tensor(d!)? counters, int cluster_size, "
    "int row_blocks, int num_query_tokens, float softmax_scale, int num_splits, int min_tiles, str implementation, "
    "Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? lse)",
    _decode,
)
