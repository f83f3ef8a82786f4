"""`attention_prefill`: causal attention of many query tokens per request, over a paged cache or packed keys."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from hpcattn.cache import PackedKV, PagedKVCache, flatten_scales, unflatten_scales
from hpcattn.explanation import Explanation, explains
from hpcattn.kernels.hopper import prefill_launch as hopper
from hpcattn.kernels.portable import prefill as portable
from hpcattn.masks import MASK_TILE
from hpcattn.ops import define_operator
from hpcattn.quantization import Scales
from hpcattn.reference import attention_prefill_reference
from hpcattn.validation import (
    Settled,
    check_block_table,
    check_content,
    check_heads,
    check_kv,
    check_options,
    check_out,
    check_scales,
    check_seq_lens,
    check_starts,
    check_tensor,
    check_value,
    resolve_implementation,
)

__all__ = ["attention_prefill", "prepare_prefill"]


def attention_prefill(
    q: Tensor,
    kv: PagedKVCache | PackedKV,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor | None,
    *,
    scales: Scales | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    check_inputs: str = "shapes",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention, aligned bottom-right, of a ragged batch. For inference only.

    The n queries of a request of length L sit at positions L - n ... L - 1. A query that sees nothing (more queries
    than keys, or no active tile) gives 0 and LSE -inf; what lies outside `seq_lens` is never read into the result.

    q: bf16 or e4m3 `[total_q, num_q_heads, head_dim]`, requests one after another, last dimension dense.
    kv: a `PagedKVCache` with block_table int32 `[batch, max_pages]` and seq_lens int32 `[batch]` (all keys, the current
        queries included), or a bf16 `PackedKV` with block_table and seq_lens None (self-attention).
    cu_seqlens_q: int32 `[batch + 1]`, where each request's queries start; rows of q behind the last are not computed.
    scales: for fp8, see `Scales`; scales.q is `[total_q, num_q_heads]` or HPC-Ops' padded `[batch, num_q_heads, pad]`,
        where a request of more than `pad` queries gives NaN.
    softmax_scale: `head_dim ** -0.5` if None.
    block_mask: uint8 `[batch, num_q_heads, ceil(longest q / 128), ceil(longest kv / 128)]`, see `hpcattn.masks`. A
        query tile whose causal range is wider than the mask gives NaN, never a guess.
    out: bf16 like q, lse: float32 `[total_q, num_q_heads]`, both contiguous.
    implementation, check_inputs: as in `attention_decode`.
    Returns o, or (o, lse) with return_lse. Raises TypeError or ValueError naming the argument, before any launch.
    """
    call, result, known = _bind(
        q, kv, block_table, cu_seqlens_q, seq_lens, scales, softmax_scale, block_mask, out, lse, return_lse,
        implementation, check_inputs,
    )  # fmt: skip
    if known is not None and q.is_cuda and type(q) is Tensor and torch.cuda.current_device() == q.device.index:
        _prepare(*call, key=known)()  # what the dispatcher would do, sooner; modes and profilers see kernels only
    else:
        torch.ops.hpcattn.prefill(*call)
    return result


def prepare_prefill(*args, **kwargs) -> Callable[[], Tensor | tuple[Tensor, Tensor]]:
    """`attention_prefill` with these arguments, as a function without any: the cheapest eager launch.

    Kernels, tensor maps and addresses are bound. A call reads what the tensors hold at that time, runs on the current
    stream, and returns the same result tensors every time; calls must not overlap, and it must outlive graphs that
    captured it. Raises what `attention_prefill` raises.
    """
    bound = inspect.signature(attention_prefill).bind(*args, **kwargs)
    bound.apply_defaults()
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


_settled = Settled()


def _bind(
    q, kv, block_table, cu_seqlens_q, seq_lens, scales, softmax_scale, block_mask, out, lse, return_lse,
    implementation, check_inputs,
) -> tuple[tuple, Tensor | tuple[Tensor, Tensor], tuple | None]:  # fmt: skip
    """Check and settle everything: arguments of `torch.ops.hpcattn.prefill`, what to return, `Settled`'s key."""
    known = call = None
    if check_inputs == "shapes" and not torch.compiler.is_compiling():
        tensors, options = (q, block_table, cu_seqlens_q, seq_lens, block_mask, out, lse), (softmax_scale, return_lse)
        known, call = _settled.find(kv, tensors, scales, (*options, implementation))
    if call is None:
        check_options(check_inputs, softmax_scale)
        call = _resolve(q, kv, block_table, cu_seqlens_q, seq_lens, scales, block_mask, implementation)
        check_out(q, out, lse)
        _settled.keep(known, call)
    if check_inputs == "full":
        _check_content(q, kv, block_table, cu_seqlens_q, seq_lens, scales, block_mask)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    arguments = (
        q, kv.k, kv.v, block_table, cu_seqlens_q, seq_lens, *flatten_scales(kv, scales), block_mask,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, call["implementation"], out, lse,
    )  # fmt: skip
    return arguments, (out, lse) if return_lse else out, known


@explains(attention_prefill)
def _resolve(q, kv, block_table, cu_seqlens_q, seq_lens, scales, block_mask, implementation) -> Explanation:
    """Check everything but the buffers, and settle "auto"."""
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    total = q.shape[0] if isinstance(q, Tensor) and q.dim() else 0
    check_kv(kv, device, total=total)
    shape, axes = (None, None, kv.k.shape[-1]), "total_q, num_q_heads, head_dim"
    check_tensor("q", q, shape=shape, dtype=kv.k.dtype, device=device, axes=axes, dense=True)
    check_tensor("cu_seqlens_q", cu_seqlens_q, shape=(None,), dtype=torch.int32, device=device, contiguous=True)
    batch = cu_seqlens_q.shape[0] - 1
    check_value("cu_seqlens_q", [batch + 1], batch > 0 or (batch == 0 and total == 0), "[batch + 1] long")
    check_heads(q.shape[1], kv.k.shape[-2])
    check_scales(scales, kv, (tuple(q.shape[:2]), (batch, q.shape[1], None)), device)
    if isinstance(kv, PagedKVCache):
        check_seq_lens(seq_lens, device)
        check_value("seq_lens", list(seq_lens.shape), seq_lens.shape[0] == batch, f"[{batch}] long, like cu_seqlens_q")
        check_block_table(block_table, batch, device)
    else:
        check_value("block_table", block_table, block_table is None, "None for packed keys and values")
        check_value("seq_lens", seq_lens, seq_lens is None, "None for packed keys and values")
    if block_mask is not None:
        axes = f"batch, num_q_heads, ceil(longest q / {MASK_TILE}), ceil(longest kv / {MASK_TILE})"
        shape = (batch, q.shape[1], None, None)
        check_tensor("block_mask", block_mask, shape=shape, dtype=torch.uint8, device=device, axes=axes, dense=True)
    tiles = ("dense", "no block mask") if block_mask is None else ("block mask", "masked tiles are skipped")
    no_hopper = hopper.unsupported(q, kv.k, kv.v, getattr(kv, "k_scale", None), block_mask)
    kind = resolve_implementation(implementation, device, operator="attention_prefill", no_hopper=no_hopper)
    return Explanation("attention_prefill", {"implementation": kind, "tiles": tiles})


def _check_content(q, kv, block_table, cu_seqlens_q, seq_lens, scales, block_mask) -> None:
    """Starts, lengths and table entries are in range; padded scales and the mask are large enough. Waits."""
    starts = check_starts(cu_seqlens_q, q.shape[0], all_used=False)
    q_lens = [stop - start for start, stop in zip(starts[:-1], starts[1:], strict=True)]
    kv_lens = q_lens
    if seq_lens is not None:
        check_content(kv, block_table, seq_lens)
        kv_lens = seq_lens.tolist()
    longest = max(q_lens, default=0)
    if scales is not None and scales.q.dim() == 3:
        wide = scales.q.shape[2] >= longest
        check_value("scales.q", list(scales.q.shape), wide, f"[batch, num_q_heads, >= {longest}]")
    if block_mask is not None:
        rows, columns = -(-longest // MASK_TILE), -(-max(kv_lens, default=0) // MASK_TILE)
        fits = block_mask.shape[2] >= rows and block_mask.shape[3] >= columns
        check_value("block_mask", list(block_mask.shape), fits, f"[batch, num_q_heads, >= {rows}, >= {columns}]")


def _prepare(
    q, k, v, block_table, cu_seqlens_q, seq_lens, q_scale, k_scale, v_scale, block_mask, softmax_scale, implementation,
    out, lse, key=None,
) -> Callable[[], None]:  # fmt: skip
    """What is to run, bound to its arguments; key as in `hopper.prepare`."""
    inputs = (q, k, v, block_table, cu_seqlens_q, seq_lens, q_scale, k_scale, v_scale, block_mask, softmax_scale)
    if q.numel() == 0:
        return lambda: None
    if implementation == "hopper":
        return hopper.prepare(*inputs, out, lse, key=key)
    if implementation == "portable":
        return lambda: portable.launch(*inputs, out, lse)

    def reference():
        kv, scales = unflatten_scales(k, v, q_scale, k_scale, v_scale)
        common = dict(scales=scales, softmax_scale=softmax_scale, block_mask=block_mask)
        o, exact_lse = attention_prefill_reference(q, kv, block_table, cu_seqlens_q, seq_lens, **common)
        out.copy_(o)
        if lse is not None:
            lse.copy_(exact_lse)

    return reference


def _prefill(*call) -> None:
    _prepare(*call)()


define_operator(
    "prefill(Tensor q, Tensor k, Tensor v, Tensor? block_table, Tensor cu_seqlens_q, Tensor? seq_lens, "
    "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? block_mask, float softmax_scale, "
    "str implementation, Tensor(a!) out, Tensor(b!)? lse)",
    _prefill,
)
