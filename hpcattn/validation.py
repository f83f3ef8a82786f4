"""Input checks: every message names the argument, what was given and what is accepted.

Nothing here reads device memory, except where a function says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hpcattn.cache import PAGE_SIZES, PackedKV, PagedKVCache
from hpcattn.quantization import FP8, Scales, k_scale_rows

__all__ = ["CHECKS", "check_value", "check_tensor"]

CHECKS = ("shapes", "full")
IMPLEMENTATIONS = ("auto", "reference", "portable", "hopper")


def check_value(name: str, value, ok: bool, accepted: str) -> None:
    """Raise ValueError unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_tensor(
    name: str,
    x: Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    axes: str = "",
    dense: bool = False,
    contiguous: bool = False,
) -> None:
    """Check a tensor's type, dtype (TypeError), rank, sizes (None: any), device and strides (ValueError).

    axes: what the dimensions mean, for the message. dense: the last dimension must have stride 1.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.dim() != len(shape) or any(n is not None and n != have for n, have in zip(shape, x.shape, strict=True)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{wanted}]{f' ({axes})' if axes else ''}, got {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, like the other tensors, got {x.device}")
    if dense and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} must have a last dimension of stride 1, got strides {x.stride()}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {list(x.shape)} with strides {x.stride()}")


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Query heads must be 1-16 times the KV heads."""
    fits = num_kv_heads > 0 and num_q_heads % num_kv_heads == 0 and 1 <= num_q_heads // num_kv_heads <= 16
    ratio = f"{num_q_heads} / {num_kv_heads}"
    check_value("num_q_heads / num_kv_heads (the GQA ratio)", ratio, fits, "an integer from 1 to 16")


def check_options(check_inputs: str, softmax_scale: float | None) -> None:
    check_value("check_inputs", check_inputs, check_inputs in CHECKS, f"one of {CHECKS}")
    usable = softmax_scale is None or (isinstance(softmax_scale, int | float) and 0 <= softmax_scale < math.inf)
    check_value("softmax_scale", softmax_scale, usable, "a number >= 0, or None")


def check_seq_lens(seq_lens: Tensor, device: torch.device | None = None) -> None:
    device = device or (seq_lens.device if isinstance(seq_lens, Tensor) else torch.device("cpu"))
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, device=device, axes="batch", contiguous=True)


def check_cache(cache: PagedKVCache, device: torch.device) -> None:
    """A cache's own consistency."""
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
    axes = "num_pages, page_size, num_kv_heads, head_dim"
    check_tensor(
        "cache.k", cache.k, shape=(None,) * 4, dtype=(torch.bfloat16, FP8), device=device, axes=axes, dense=True
    )
    check_tensor(
        "cache.v", cache.v, shape=tuple(cache.k.shape), dtype=cache.dtype, device=device, axes=axes, dense=True
    )
    check_value("cache.page_size", cache.page_size, cache.page_size in PAGE_SIZES, f"one of {PAGE_SIZES}")
    dims = (128,) if cache.dtype == FP8 else (64, 128)
    check_value("head_dim", cache.head_dim, cache.head_dim in dims, f"one of {dims} for {cache.dtype}")
    if cache.k_scale is not None:
        check_value("cache.k_scale", cache.k_scale.dtype, cache.dtype == FP8, "None for a bf16 cache")
        shape = (cache.num_pages, k_scale_rows(cache.page_size), cache.num_kv_heads, 32)
        axes = "num_pages, ceil(page_size / 32), num_kv_heads, 32"
        check_tensor(
            "cache.k_scale", cache.k_scale, shape=shape, dtype=torch.float32, device=device, axes=axes, dense=True
        )


def check_kv(kv: PagedKVCache | PackedKV, device: torch.device, *, total: int) -> None:
    """A cache, or packed bf16 keys and values of `total` tokens."""
    if isinstance(kv, PagedKVCache):
        return check_cache(kv, device)
    if not isinstance(kv, PackedKV):
        raise TypeError(f"kv must be a PagedKVCache or a PackedKV, got {type(kv).__name__}")
    packed = dict(dtype=torch.bfloat16, device=device, axes="total_q, num_kv_heads, head_dim", dense=True)
    check_tensor("kv.k", kv.k, shape=(total, None, None), **packed)
    check_tensor("kv.v", kv.v, shape=tuple(kv.k.shape), **packed)
    check_value("head_dim", kv.k.shape[2], kv.k.shape[2] in (64, 128), "one of (64, 128)")


def check_scales(scales: Scales | None, kv: PagedKVCache | PackedKV, q_scale_shapes: tuple[tuple, ...], device) -> None:
    """fp8 inputs need scales, and bf16 inputs must have none."""
    fp8 = isinstance(kv, PagedKVCache) and kv.dtype == FP8
    if not fp8:
        return check_value("scales", scales, scales is None, "None for bf16 inputs")
    if not isinstance(scales, Scales):
        raise TypeError(f"scales must be a Scales for fp8 inputs, got {type(scales).__name__}")
    q_shapes = {len(shape): shape for shape in q_scale_shapes}
    rank = scales.q.dim() if isinstance(scales.q, Tensor) else 2
    typed = dict(dtype=torch.float32, device=device, contiguous=True)
    check_tensor("scales.q", scales.q, shape=q_shapes.get(rank, q_scale_shapes[0]), **typed)
    if scales.quant == "type0":
        have = kv.k_scale is not None
        check_value("scales.k", None, have, "a float32 [1] tensor (type 1), or cache.k_scale must be set (type 0)")
        check_tensor("scales.v", scales.v, shape=(kv.num_kv_heads,), **typed, axes="num_kv_heads, for type 0")
    else:
        check_tensor("scales.k", scales.k, shape=(1,), **typed, axes="type 1")
        check_tensor("scales.v", scales.v, shape=(1,), **typed, axes="type 1")


def check_block_table(block_table: Tensor, batch: int, device: torch.device) -> None:
    axes = "batch, max_pages"
    check_tensor(
        "block_table", block_table, shape=(batch, None), dtype=torch.int32, device=device, axes=axes, dense=True
    )


def check_out(q: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    """Result buffers, where given: contiguous, bf16 like q and float32 per query and head."""
    if out is not None:
        check_tensor("out", out, shape=tuple(q.shape), dtype=torch.bfloat16, device=q.device, contiguous=True)
    if lse is not None:
        check_tensor("lse", lse, shape=tuple(q.shape[:2]), dtype=torch.float32, device=q.device, contiguous=True)


def check_starts(cu_seqlens_q: Tensor, total: int, all_used: bool = True) -> list[int]:
    """cu_seqlens_q rises from 0 to the number of tokens, or to at most that unless `all_used`; gives it as a list.

    Reads device memory, so it waits.
    """
    starts = cu_seqlens_q.tolist()
    rises = starts == sorted(starts) and starts[0] == 0 and (total if all_used else 0) <= starts[-1] <= total
    check_value("cu_seqlens_q", starts, rises, f"rising from 0 to {total}, the number of tokens")
    return starts


def check_content(cache: PagedKVCache, block_table: Tensor, seq_lens: Tensor) -> None:
    """Lengths, and the table entries they use, are in range. Reads device memory, so it waits."""
    capacity = block_table.shape[1] * cache.page_size
    bad = (seq_lens < 0) | (seq_lens > capacity)
    if bool(bad.any()):
        b = int(bad.nonzero()[0])
        raise ValueError(
            f"seq_lens[{b}] must be between 0 and {capacity} (block_table.shape[1] * page_size), got {int(seq_lens[b])}"
        )
    column = torch.arange(block_table.shape[1], device=block_table.device)
    used = column[None, :] * cache.page_size < seq_lens[:, None]
    bad = used & ((block_table < 0) | (block_table >= cache.num_pages))
    if bool(bad.any()):
        b, i = (int(x) for x in bad.nonzero()[0])
        last = cache.num_pages - 1
        raise ValueError(
            f"block_table[{b}, {i}] must be between 0 and {last} (num_pages - 1), got {int(block_table[b, i])}"
        )


def resolve_implementation(
    implementation: str, device: torch.device, *, operator: str, no_hopper: str | None = "not written yet"
) -> tuple[str, str]:
    """Turn `"auto"` into what runs here and say why; refuse what does not run. no_hopper: why Hopper kernels cannot."""
    check_value("implementation", implementation, implementation in IMPLEMENTATIONS, f"one of {IMPLEMENTATIONS}")
    cuda = device.type == "cuda"
    if cuda and no_hopper is None and torch.cuda.get_device_properties(device).major != 9:
        no_hopper = "this GPU is no Hopper GPU"
    if implementation == "hopper" and no_hopper is not None:
        raise ValueError(
            f"implementation='hopper' does not offer this {operator} ({no_hopper}): use 'portable' or 'auto'"
        )
    if implementation != "auto":
        return implementation, "as asked"
    if cuda and no_hopper is None:
        return "hopper", "the tensors are on a Hopper GPU"
    if cuda:
        return "portable", f"Triton runs on any recent GPU; Hopper kernels: {no_hopper}"
    return "reference", "the tensors are on the CPU, where float64 PyTorch is faster than interpreted Triton"


class Settled:
    """Calls that passed their checks: what these settled, by all that they looked at."""

    LIMIT = 4096

    def __init__(self):
        self.calls: dict[tuple, Any] = {}

    def find(self, kv: Any, tensors: Iterable[Tensor | None], scales: Any, options: tuple) -> tuple:
        """(key, what was settled or None). The key is None where the checks must run and say what is wrong.

        kv: a cache or packed keys and values; tensors: the first is q; options: everything else, hashable.
        """
        try:
            tensors = (*tensors, scales.q, scales.k, scales.v) if scales is not None else tensors
            seen = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
            key = (kv.metadata, tensors[0].data_ptr() % 16, *seen, scales is None, *options)
            return key, self.calls.get(key)
        except (AttributeError, TypeError, RuntimeError):  # RuntimeError: a tensor without memory
            return None, None

    def keep(self, key: tuple | None, call: Any) -> None:
        if key is not None:
            if len(self.calls) >= self.LIMIT:
                self.calls.clear()
            self.calls[key] = call
