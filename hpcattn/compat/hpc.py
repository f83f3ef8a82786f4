"""HPC-Ops' attention functions over our operators: `import hpcattn.compat.hpc as hpc` in place of `import hpc`.

Names, parameters and defaults are those of HPC-Ops at commit 6e2eced. What a correct call of HPC-Ops computes, the same
call computes here; where its documentation and its kernels disagree, the result here is the attention that was asked
for. The differences that a caller can see:

* Errors are ValueError and TypeError, and name the argument. More is accepted: any ratio of heads from 1 to 16, pages
  of 16 to 256 tokens, five query tokens on every decode path, NaN in unused slots of the cache.
* A query that sees nothing gives 0, in prefill too: more queries than keys, or no active tile.
* `num_seq_kvcache` counts in both schedules. A length with more or fewer 128-token tiles than the task map has for it
  gives NaN rows.
* `split_flag` is accepted and left alone. `splitk=False` cannot be combined with a task map.
* A task map holds a `hpcattn.DecodePlan`, so its bytes mean something else and are fewer; it must be passed on with the
  batch size, KV heads and query tokens that it was assigned for, and one map must not serve two streams at once.
* With `new_kv_included=False` a small kernel adds the new tokens to the lengths; calls with True are cheaper.
* In prefill `seqlens_kvcache` counts the current queries too, as in HPC-Ops' kernels. `max_seqlens_q` only serves to
  check a block mask; a tensor in its place is not read, so that nothing waits for the GPU.

Shapes: B requests, S = mtp + 1 query tokens each in decode, T in all in prefill, Hq query heads, Hkv KV heads, D = 128
(or 64 in bf16).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from hpcattn.cache import PackedKV, PagedKVCache
from hpcattn.decode import attention_decode
from hpcattn.kernels.portable.plan import PLAN_TILE, ROW_BLOCKS
from hpcattn.masks import MASK_TILE
from hpcattn.prefill import attention_prefill
from hpcattn.quantization import FP8, Scales, k_scale_rows
from hpcattn.schedule import MOST_TILES, DecodePlan, is_hopper, multiprocessors, plan_decode, policy
from hpcattn.validation import check_tensor, check_value

__all__ = [
    "QuantType",
    "assign_attention_decode_task",
    "attention_decode_bf16",
    "attention_decode_fp8",
    "attention_prefill_bf16",
    "attention_with_kvcache_blocksparse_prefill_fp8",
    "attention_with_kvcache_prefill_bf16",
    "attention_with_kvcache_prefill_fp8",
    "get_attention_decode_task_workspace",
]

DEFAULT_PROCESS_LEN = 512
GROUP_SIZE = 8  # query heads per KV head that a plan is shaped for: it is made before the query is seen
MOST_CTAS_PER_SM = 4  # what a task map has room for
IMPLEMENTATION = "auto"  # what the operators run


class QuantType(Enum):
    """Which scales an fp8 call has; the first two are implemented, here as in HPC-Ops."""

    QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD = 0
    QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR = 1
    QPERTENSOR_KPERTENSOR_VPERTENSOR = 2
    QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD_QKHADAMARD = 3


def attention_decode_bf16(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    block_ids: Tensor,
    num_seq_kvcache: Tensor,
    mtp: int = 0,
    new_kv_included: bool = False,
    splitk: bool = True,
    task_map: Tensor = None,
    split_flag: Tensor = None,
    output: Tensor = None,
) -> Tensor:
    """Attention of the S = mtp + 1 newest tokens of every request over its pages, in bf16.

    q: bf16 `[B * S, Hq, D]`, request-major. kcache, vcache: bf16 `[num_pages, page_size, Hkv, D]`, any page, token and
        head strides; the new tokens are stored already.
    block_ids: int32 `[B, max_pages]`. num_seq_kvcache: int32 `[B]`, lengths with the S new tokens if new_kv_included,
        else without them.
    splitk: False keeps every request's keys in one chunk. task_map: see `assign_attention_decode_task`; selects the
        dynamic schedule. split_flag: ignored.
    output: bf16 `[B * S, Hq, D]`, contiguous, or None to allocate it.
    Returns output. Raises TypeError or ValueError naming the argument, before anything is launched.
    """
    cache = _bf16_cache(q, kcache, vcache)
    return _decode(
        q, cache, None, block_ids, num_seq_kvcache, mtp, new_kv_included, splitk, task_map, split_flag, output
    )


def attention_decode_fp8(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    block_ids: Tensor,
    num_seq_kvcache: Tensor,
    qscale: Tensor,
    kscale: Tensor,
    vscale: Tensor,
    mtp: int = 0,
    new_kv_included: bool = False,
    quant_type: QuantType = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR,
    splitk: bool = True,
    task_map: Tensor = None,
    split_flag: Tensor = None,
    output: Tensor = None,
) -> Tensor:
    """As `attention_decode_bf16`, for e4m3 q and caches with float32 scales; the result is bf16 all the same.

    kcache, vcache: e4m3, or the same bytes as uint8 or int8. qscale: `[B * S, Hq]`.
    kscale, vscale: for quant_type 1 (K and V per tensor) one element each. For quant_type 0, vscale is `[Hkv]` and
        kscale lies in the K pages: the rows that follow page_size rows of K, one-byte
        `[num_pages, ceil(page_size / 32), Hkv, 128]` or float32 with a last dimension of 32. The scale of token t is
        the (t % 32)-th float32 of row t // 32. As in HPC-Ops kcache's strides lead from row to row, whatever kscale's
        own are; a kscale with a storage of its own goes by its own strides.
    """
    cache, scales = _fp8_cache(q, kcache, vcache, qscale, kscale, vscale, quant_type, _scales_in_page)
    return _decode(
        q, cache, scales, block_ids, num_seq_kvcache, mtp, new_kv_included, splitk, task_map, split_flag, output
    )


def get_attention_decode_task_workspace(
    max_num_batch: int, max_seqlen: int, num_head_kv: int, min_process_len: int = DEFAULT_PROCESS_LEN
):
    """An empty task map for up to max_num_batch requests: int8, contiguous, on the current GPU (the CPU without one).

    It has room for lengths of any size, so max_seqlen does not matter. It is of no use before
    `assign_attention_decode_task` has filled it. Raises ValueError for numbers that are not positive.
    """
    sizes = dict(max_num_batch=max_num_batch, max_seqlen=max_seqlen, num_head_kv=num_head_kv)
    for name, value in sizes.items():
        check_value(name, value, isinstance(value, int) and 1 <= value < 2**31, "a positive integer below 2**31")
    _check_process_len(min_process_len)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    ctas = MOST_CTAS_PER_SM * multiprocessors(device)
    ints = 8 + (8 + ROW_BLOCKS) * ctas + max_num_batch + 1  # records and counters, as in `_layout`
    return torch.zeros(4 * ints, dtype=torch.int8, device=device)


def assign_attention_decode_task(
    num_seq_kvcache: Tensor,
    task_map: Tensor,
    num_head_kv: int,
    mtp: int,
    new_kv_included: bool,
    min_process_len: int = DEFAULT_PROCESS_LEN,
) -> Tensor:
    """Fill a task map for these lengths, in place and without the host waiting; it then serves every layer of a step.

    num_seq_kvcache: int32 `[B]`, contiguous, on task_map's device or on the CPU; with the new tokens if
        new_kv_included, else without them. The decode calls must have the same lengths, counted either way.
    task_map: from `get_attention_decode_task_workspace`, for B requests or more.
    mtp: S, from 1 to 5: despite the name the number of query tokens, draft tokens + 1, as HPC-Ops counts here.
    min_process_len: least tokens that a worker gets. Our kernels have a least of their own; above the default this
        raises it.
    Returns task_map. Raises TypeError or ValueError naming the argument.
    """
    _check_tensors(num_seq_kvcache=num_seq_kvcache, task_map=task_map)
    few = isinstance(mtp, int) and 1 <= mtp <= 5
    check_value("mtp", mtp, few, "the number of query tokens here (draft tokens + 1), an integer from 1 to 5")
    many = isinstance(num_head_kv, int) and 1 <= num_head_kv <= 1024
    check_value("num_head_kv", num_head_kv, many, "an integer from 1 to 1024")
    _check_process_len(min_process_len)
    lens = num_seq_kvcache
    device = lens.device if lens.device.type == "cpu" else task_map.device
    lengths = dict(shape=(None,), dtype=torch.int32, axes="batch", contiguous=True)
    check_tensor("num_seq_kvcache", lens, device=device, **lengths)
    if lens.device != task_map.device:  # few bytes: pageable memory is staged at once, nothing waits
        lens = lens.to(task_map.device, non_blocking=not lens.is_pinned())
    least = min(min_process_len, 2**20) // PLAN_TILE if min_process_len > DEFAULT_PROCESS_LEN else 1
    plan = _plan(task_map, lens.shape[0], num_head_kv, mtp)
    plan = replace(plan, min_quota=max(plan.min_quota, least))
    lens = lens if new_kv_included else lens + mtp
    plan_decode(lens, num_head_kv, out=plan, implementation=IMPLEMENTATION)
    return task_map


def attention_prefill_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens_q: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlens_q: int,
    output: Tensor = None,
) -> Tensor:
    """Causal self-attention of a ragged batch over its own packed keys and values, in bf16.

    q: bf16 `[T, Hq, D]`, requests one after another. k, v: bf16 `[T, Hkv, D]`. Token and head strides are free, so that
        all three may be slices of one tensor.
    seqlens_q: int32 `[B]`, lengths. cu_seqlens_q: int32 `[B + 1]`, where each request's tokens start; its differences
        are the lengths that count, so there can be no gaps between requests.
    max_seqlens_q: the longest request, an integer or a tensor that holds one.
    output: bf16 `[T, Hq, D]`, contiguous, or None to allocate it.
    Returns output. Raises TypeError or ValueError naming the argument, before anything is launched.
    """
    _check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    shape = (cu_seqlens_q.numel() - 1,)
    check_tensor("seqlens_q", seqlens_q, shape=shape, dtype=torch.int32, device=q.device, axes="num_batch")
    _longest(max_seqlens_q)
    return _call(attention_prefill, _PACKED_NAMES, q, PackedKV(k, v), None, cu_seqlens_q, None, out=output)


def attention_with_kvcache_prefill_bf16(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    cu_seqlens_q: Tensor,
    block_ids: Tensor,
    seqlens_kvcache: Tensor,
    max_seqlens_q: int,
    output: Tensor = None,
) -> Tensor:
    """Causal attention of a ragged batch over its pages, in bf16; the last query of a request sees all its keys.

    q: bf16 `[T, Hq, D]`, requests one after another. kcache, vcache: bf16 `[num_pages, page_size, Hkv, D]`, any page,
        token and head strides; the keys and values of the current queries are stored already.
    cu_seqlens_q: int32 `[B + 1]`, where each request's queries start. block_ids: int32 `[B, max_pages]`.
    seqlens_kvcache: int32 `[B]`, all keys of a request: those before the current queries and theirs.
    max_seqlens_q: the most queries of a request, an integer or a tensor that holds one.
    output: bf16 `[T, Hq, D]`, contiguous, or None to allocate it.
    Returns output. Raises TypeError or ValueError naming the argument, before anything is launched.
    """
    cache = _bf16_cache(q, kcache, vcache)
    _longest(max_seqlens_q)
    return _call(attention_prefill, _PREFILL_NAMES, q, cache, block_ids, cu_seqlens_q, seqlens_kvcache, out=output)


def attention_with_kvcache_prefill_fp8(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    qscale: Tensor,
    kscale: Tensor,
    vscale: Tensor,
    cu_seqlens_q: Tensor,
    block_ids: Tensor,
    seqlens_kvcache: Tensor,
    max_seqlens_q: int,
    quant_type: QuantType = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR,
    output: Tensor = None,
) -> Tensor:
    """As `attention_with_kvcache_prefill_bf16`, for e4m3 q and caches with float32 scales; the result is bf16.

    kcache, vcache: e4m3, or the same bytes as uint8 or int8.
    qscale: `[B, Hq, pad]`, contiguous; the last index counts a request's own queries. A request with more queries than
        pad gives NaN rows. `[T, Hq]` is accepted too.
    kscale, vscale: for quant_type 1 (K and V per tensor) one element each. For quant_type 0, vscale is `[Hkv]` and
        kscale, of any page, row and head strides, float32 `[num_pages, ceil(page_size / 32), Hkv, 32]` or its bytes,
        `[..., 128]`. Unlike in decode its own strides count; token t of a page has element `[page, t // 32, head,
        t % 32]`.
    """
    cache, scales = _fp8_cache(q, kcache, vcache, qscale, kscale, vscale, quant_type, _scales_by_stride)
    _longest(max_seqlens_q)
    paged = (cache, block_ids, cu_seqlens_q, seqlens_kvcache)
    return _call(attention_prefill, _PREFILL_NAMES, q, *paged, scales=scales, out=output)


def attention_with_kvcache_blocksparse_prefill_fp8(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    qscale: Tensor,
    kscale: Tensor,
    vscale: Tensor,
    cu_seqlens_q: Tensor,
    block_ids: Tensor,
    seqlens_kvcache: Tensor,
    max_seqlens_q: int,
    quant_type: QuantType = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR,
    block_mask: Tensor = None,
    output: Tensor = None,
) -> Tensor:
    """As `attention_with_kvcache_prefill_fp8`, over those tiles of 128 queries x 128 keys that block_mask names.

    block_mask: uint8 `[B, Hq, ceil(max_seqlens_q / 128), Kb]`, dense in the last dimension, or None to skip nothing.
        Rows are tiles of a request's own queries, columns tiles of its keys from position 0; tiles other than 0 are
        computed, causality applies inside them. With max_seqlens_q as a tensor, queries that the rows do not reach give
        NaN. Where more than Kb columns are visible, column Kb counts as active and all behind it as inactive, as in
        HPC-Ops. A mask that covers all tokens which a row of block_ids can list is not copied.
    """
    cache, scales = _fp8_cache(q, kcache, vcache, qscale, kscale, vscale, quant_type, _scales_by_stride)
    longest = _longest(max_seqlens_q)
    if block_mask is not None:
        block_mask = _widen(block_mask, q, cache, block_ids, longest)
    paged = (cache, block_ids, cu_seqlens_q, seqlens_kvcache)
    return _call(attention_prefill, _PREFILL_NAMES, q, *paged, scales=scales, block_mask=block_mask, out=output)


def _decode(
    q, cache, scales, block_ids, num_seq_kvcache, mtp, new_kv_included, splitk, task_map, split_flag, output
) -> Tensor:
    check_value("mtp", mtp, isinstance(mtp, int) and 0 <= mtp <= 4, "an integer from 0 to 4")
    _check_tensors(num_seq_kvcache=num_seq_kvcache)
    if split_flag is not None:
        _check_tensors(split_flag=split_flag)
    _check_rank("kcache", cache.k, _CACHE_AXES)
    plan, how = None, dict(schedule="static", num_splits=None if splitk else 1)
    if task_map is not None:
        check_value("splitk", splitk, splitk, "True with a task_map")
        check_value("num_seq_kvcache", list(num_seq_kvcache.shape), num_seq_kvcache.dim() == 1, "[batch]")
        plan, how = _plan(task_map, num_seq_kvcache.shape[0], cache.num_kv_heads, mtp + 1), {}
    lens = num_seq_kvcache if new_kv_included else num_seq_kvcache + (mtp + 1)
    return _call(
        attention_decode, _NAMES, q, cache, block_ids, lens,
        scales=scales, num_query_tokens=mtp + 1, plan=plan, out=output, **how,
    )  # fmt: skip


def _call(operator: Callable, names: dict[str, str], *args, **options) -> Tensor:
    """An operator of ours; its errors name the arguments as they are called here."""
    try:
        return operator(*args, implementation=IMPLEMENTATION, **options)
    except (TypeError, ValueError) as error:
        ours, must, rest = str(error).partition(" must ")
        if ours not in names:
            raise
        raise type(error)(f"{names[ours]}{must}{rest}") from None


_NAMES = {  # our operators' arguments, as they are called here
    "block_table": "block_ids",
    "cache.k": "kcache",
    "cache.k_scale": "kscale",
    "cache.page_size": "kcache.shape[1], the page size,",
    "cache.v": "vcache",
    "head_dim": "kcache.shape[3], head_dim,",
    "out": "output",
    "scales.k": "kscale",
    "scales.q": "qscale",
    "scales.v": "vscale",
    "seq_lens": "num_seq_kvcache",
}
_PREFILL_NAMES = _NAMES | {"seq_lens": "seqlens_kvcache"}
_PACKED_NAMES = {"kv.k": "k", "kv.v": "v", "head_dim": "k.shape[2], head_dim,", "out": "output"}
_CACHE_AXES = "num_pages, page_size, num_kv_heads, head_dim"


def _check_tensors(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def _check_rank(name: str, x: Tensor, axes: str) -> None:
    _check_tensors(**{name: x})
    if x.dim() != axes.count(",") + 1:
        raise ValueError(f"{name} must be [{axes}], got {list(x.shape)}")


def _check_process_len(min_process_len: int) -> None:
    positive = isinstance(min_process_len, int) and min_process_len >= 1
    check_value("min_process_len", min_process_len, positive, "a positive integer")


def _longest(max_seqlens_q: int) -> int:
    """max_seqlens_q if the host has it; 0 for a tensor, which may be on a GPU that has not got there yet."""
    if not isinstance(max_seqlens_q, Tensor):
        whole = isinstance(max_seqlens_q, Integral) and max_seqlens_q >= 0
        check_value("max_seqlens_q", max_seqlens_q, whole, "an integer, not negative, or a tensor that holds one")
        return max_seqlens_q
    one = max_seqlens_q.numel() == 1 and not max_seqlens_q.is_floating_point()
    what = f"{max_seqlens_q.dtype} {list(max_seqlens_q.shape)}"
    check_value("max_seqlens_q", what, one, "an integer or a tensor that holds one")
    return 0


def _widen(block_mask: Tensor, q: Tensor, cache: PagedKVCache, block_ids: Tensor, longest: int) -> Tensor:
    """A mask over all that a row of block_ids can list, as our operator wants it whatever the lengths are.

    HPC-Ops computes one tile behind the last column, and none behind that one.
    """
    _check_rank("q", q, "total_q, num_q_heads, head_dim")
    _check_rank("kcache", cache.k, _CACHE_AXES)
    _check_rank("block_ids", block_ids, "batch, max_pages")
    shape, axes = (block_ids.shape[0], q.shape[1], None, None), "batch, num_q_heads, q tiles, kv tiles"
    check_tensor("block_mask", block_mask, shape=shape, dtype=torch.uint8, device=q.device, axes=axes, dense=True)
    *outer, have = block_mask.shape
    rows = -(-longest // MASK_TILE)
    tall = f"[batch, num_q_heads, >= {rows}, >= 1], a row for every {MASK_TILE} queries of max_seqlens_q"
    check_value("block_mask", [*outer, have], outer[-1] >= rows and have > 0, tall)
    need = -(-block_ids.shape[1] * cache.page_size // MASK_TILE)
    if have >= need:
        return block_mask
    wide = block_mask.new_zeros((*outer, need))
    wide[..., :have] = block_mask
    wide[..., have] = 1
    return wide


def _bf16_cache(q: Tensor, kcache: Tensor, vcache: Tensor) -> PagedKVCache:
    _check_tensors(q=q, kcache=kcache, vcache=vcache)
    if kcache.dtype != torch.bfloat16:
        raise TypeError(f"kcache must have dtype torch.bfloat16, got {kcache.dtype}")
    return PagedKVCache(kcache, vcache)


def _fp8_cache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    qscale: Tensor,
    kscale: Tensor,
    vscale: Tensor,
    quant_type: QuantType,
    k_scales: Callable[[Tensor, Tensor], Tensor],
) -> tuple[PagedKVCache, Scales]:
    """k_scales: how (kcache, kscale) of type 0 become float32 `[num_pages, ceil(page_size / 32), Hkv, 32]`."""
    _check_tensors(q=q, kcache=kcache, vcache=vcache, qscale=qscale, kscale=kscale, vscale=vscale)
    kcache, vcache = _as_fp8("kcache", kcache), _as_fp8("vcache", vcache)
    if quant_type is QuantType.QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD:
        return PagedKVCache(kcache, vcache, k_scales(kcache, kscale)), Scales(qscale, vscale)
    if quant_type is QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR:
        one_k, one_v = (x.reshape(1) if x.dim() != 1 and x.numel() == 1 else x for x in (kscale, vscale))
        return PagedKVCache(kcache, vcache), Scales(qscale, one_v, one_k)
    if isinstance(quant_type, QuantType):
        raise ValueError(f"quant_type must be one of the first two, the others are not implemented, got {quant_type}")
    raise TypeError(f"quant_type must be a QuantType of this module, got {quant_type!r}")


def _as_fp8(name: str, x: Tensor) -> Tensor:
    """e4m3, or bytes taken for it: HPC-Ops' decode accepts any dtype of one byte."""
    if x.dtype == FP8:
        return x
    if x.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{name} must have dtype {FP8}, torch.uint8 or torch.int8, got {x.dtype}")
    return x.view(FP8)


def _check_k_scales(kcache: Tensor, kscale: Tensor) -> None:
    """Type 0 K scales: float32 or their bytes, of a shape that fits kcache."""
    _check_rank("kcache", kcache, _CACHE_AXES)
    wide = kscale.dtype == torch.float32
    if not wide and kscale.dtype.itemsize != 1:
        raise TypeError(f"kscale must have dtype torch.float32 or one of one byte, got {kscale.dtype}")
    shape = (kcache.shape[0], k_scale_rows(kcache.shape[1]), kcache.shape[2], 32 if wide else 128)
    if kscale.shape != shape:
        axes = f"num_pages, ceil(page_size / 32), num_kv_heads, {'32' if wide else '128 bytes'}"
        raise ValueError(f"kscale must have shape {list(shape)} ({axes}), got {list(kscale.shape)}")


def _scales_by_stride(kcache: Tensor, kscale: Tensor) -> Tensor:
    """Type 0 K scales of prefill as a view, float32 `[num_pages, ceil(page_size / 32), Hkv, 32]`."""
    _check_k_scales(kcache, kscale)
    try:
        return kscale.view(torch.float32)
    except RuntimeError:
        wanted = "aligned to 4 bytes and dense in its last dimension"
        raise ValueError(f"kscale must be {wanted}; got strides {kscale.stride()}") from None


def _scales_in_page(kcache: Tensor, kscale: Tensor) -> Tensor:
    """As `_scales_by_stride`, for decode; see `attention_decode_fp8`."""
    _check_k_scales(kcache, kscale)
    page, token, head, _ = kcache.stride()
    words = (page // 4, token // 4, head // 4)
    try:
        if kscale.stride(3) != 1 or (page | token | head) % 4:
            raise RuntimeError
        own = kscale if kscale.dtype == torch.float32 else kscale.view(torch.float32)
        if own.stride()[:3] == words or kscale.untyped_storage().data_ptr() != kcache.untyped_storage().data_ptr():
            return own
        return own.as_strided(own.shape, (*words, 1))
    except RuntimeError:
        wanted = "aligned to 4 bytes, dense in its last dimension, and in kcache's pages, behind their rows of K"
        strides = f"strides {kscale.stride()}, kcache's {kcache.stride()}"
        raise ValueError(f"kscale must be {wanted}; got {strides}") from None


class _Layout(NamedTuple):
    """How a plan lies in a task map."""

    parts: tuple[int, ...]  # int32 words: header, records, counters, padding to 16 bytes, offsets
    settings: tuple[int, int, int]  # DecodePlan's max_seq_len, min_quota, cluster_size


@functools.lru_cache(maxsize=1024)
def _layout(device: torch.device, batch: int, num_kv_heads: int, num_query_tokens: int) -> _Layout:
    """Follows from what both functions that take a task map are given, so that nothing has to be read back."""
    pairs = batch * num_kv_heads
    chosen = policy(math.inf, GROUP_SIZE * num_query_tokens, torch.bfloat16, multiprocessors(device), is_hopper(device))
    names = ("cluster_size", "row_blocks", "num_clusters", "min_quota")
    size, blocks, clusters, quota = (chosen[name][0] for name in names)
    counters = clusters * size * ROW_BLOCKS
    longest = min(2**30, MOST_TILES // max(1, pairs) * PLAN_TILE)
    return _Layout((4, 8 * clusters, counters, -counters % 4, batch + 1), (longest, quota, size, blocks))


def _plan(task_map: Tensor, batch: int, num_kv_heads: int, num_query_tokens: int) -> DecodePlan:
    """The plan that lies in a task map, as views of it."""
    if not isinstance(task_map, Tensor):
        raise TypeError(f"task_map must be a torch.Tensor, got {type(task_map).__name__}")
    if torch.compiler.is_compiling():
        layout = _layout.__wrapped__(task_map.device, batch, num_kv_heads, num_query_tokens)
        _check_map(task_map, layout, batch)
        words = task_map.view(-1).view(torch.int32)
        sizes = (*layout.parts, words.numel() - sum(layout.parts))
        header, records, counters, _, offsets, _ = words.split_with_sizes(sizes)
        return DecodePlan(header, offsets, records.view(-1, 8), counters, num_kv_heads, *layout.settings)
    key = (batch, num_kv_heads, num_query_tokens, task_map.data_ptr(), task_map.shape, task_map.dtype)
    kept = vars(task_map).get("_hpcattn_plan")  # made of it last: spares every layer the views
    if kept is not None and kept[0] == key:
        return kept[1]
    layout = _layout(task_map.device, batch, num_kv_heads, num_query_tokens)
    _check_map(task_map, layout, batch)
    storage, at, tensors = task_map.untyped_storage(), task_map.storage_offset() * task_map.dtype.itemsize // 4, []
    for n in layout.parts:  # by storage: an ordinary view refers to task_map, which will refer to it
        tensors.append(torch.empty(0, dtype=torch.int32, device=task_map.device).set_(storage, at, (n,), (1,)))
        at += n
    header, records, counters, _, offsets = tensors
    plan = DecodePlan(header, offsets, records.view(-1, 8), counters, num_kv_heads, *layout.settings)
    task_map._hpcattn_plan = (key, plan)
    return plan


def _check_map(task_map: Tensor, layout: _Layout, batch: int) -> None:
    """A task map must be contiguous, aligned and large enough."""
    if task_map.dtype not in (torch.int8, torch.int32):
        raise TypeError(f"task_map must have dtype torch.int8 or torch.int32, got {task_map.dtype}")
    itemsize = task_map.dtype.itemsize
    size, need = task_map.numel() * itemsize, 4 * sum(layout.parts)
    check_value("task_map", f"{size} bytes", size >= need, f"{need} bytes or more, for {batch} requests")
    usable = task_map.is_contiguous() and size % 4 == 0
    if not torch.compiler.is_compiling():  # there, offsets are not to be had
        usable = usable and task_map.storage_offset() * itemsize % 16 == 0
    check_value("task_map", f"strides {task_map.stride()}", usable, "contiguous, aligned to 16 bytes and whole int32")
