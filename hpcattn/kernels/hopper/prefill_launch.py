"""From tensors to launches of the Hopper prefill kernel: its configuration, its tensor maps, its cheap repetition."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hpcattn.kernels.hopper.items import HEADER
from hpcattn.kernels.hopper.launch import Bound, Launch, matrix_view, tile_descriptor
from hpcattn.kernels.hopper.prefill import TILE, prefill_kernel
from hpcattn.kernels.portable import order
from hpcattn.kernels.portable.common import LOG2_E
from hpcattn.schedule import multiprocessors

MAX_COLUMNS = 8192 - HEADER.value  # of a block mask: the list of its active tiles lies in shared memory
REGISTERS = {1: (240, 48), 2: (232, 40)}  # per thread, of one or two consumer warpgroups and of the four other warps


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None = None, block_mask: Tensor | None = None
) -> str | None:
    """Why the kernel cannot read these tensors, None if it can."""
    if block_mask is not None and block_mask.shape[3] > MAX_COLUMNS:
        return f"block_mask has more than {MAX_COLUMNS} columns"
    tensors = [x if x.dim() == 4 else x[None] for x in (q, k, v)]
    if k_scale is not None and k_scale.dim() == 4:
        tensors.append(k_scale)
    if not torch.compiler.is_compiling() and any(type(x) is Tensor and x.data_ptr() % 16 for x in tensors):
        return "q, keys and values must start at a multiple of 16 bytes"
    return next((why for why in map(matrix_view, tensors) if isinstance(why, str)), None)


class Config(NamedTuple):
    """Consumer warpgroups of 64 query rows; slots of the rings of K and V.

    turns: the warpgroups alternate between exponentials and the rest of a tile; lazy: the output is rescaled only where
    a maximum has grown by a factor of 2^8; early: the scores of the next tile are waited for, and scaled, next to the
    exponentials, before P V takes registers, and not in the rest of the tile.
    """

    groups: int
    k_slots: int
    v_slots: int
    turns: bool
    lazy: bool
    early: bool = False


def configuration(quant: str, blocks: int, sms: int) -> Config:
    """blocks: of 64 query rows, of all heads. All measured on an H200.

    A warpgroup to itself is faster, as long as there are multiprocessors for all. In fp8, taking turns keeps one
    warpgroup's exponentials from meeting the other's, with a third slot for K, since the warpgroups are half a tile
    apart. It pays if the other half of a tile is short: type 0 scales its scores early, where registers are free, so
    that all scales are on their way at once. bf16 waits for the tensor cores, not for exponentials. bf16 weights may
    exceed 1, those of fp8 would overflow e4m3.
    """
    groups, bf16 = 1 if blocks <= sms else 2, quant == "none"
    return Config(groups, 2 if bf16 else 3, 2, groups == 2 and not bf16, bf16, quant == "type0")


def launches(
    q, k, v, block_table, cu_seqlens_q, seq_lens, q_scale, k_scale, v_scale, block_mask, softmax_scale, out, lse,
    *, config: Config | None = None, num_ctas: int | None = None,
) -> list[Launch]:  # fmt: skip
    """The launches of a call: the prefill kernel, behind those that order the work of several requests.

    Arguments as in `prepare`; config, num_ctas: other than what is chosen.
    """
    batch, (total_q, num_q_heads, head_dim) = cu_seqlens_q.shape[0] - 1, q.shape
    packed, masked = block_table is None, block_mask is not None
    page_size, num_kv_heads = 0 if packed else k.shape[1], k.shape[-2]
    quant = "none" if q_scale is None else "type0" if k_scale.dim() == 4 else "type1"
    sms = multiprocessors(q.device)
    config = config or configuration(quant, (triton.cdiv(total_q, 64) + batch - 1) * num_q_heads, sms)
    block_m, (consumers, others) = 64 * config.groups, REGISTERS[config.groups]
    tokens = TILE.value if packed else min(page_size, TILE.value)
    q_rows, q_view = tile_descriptor(q[None], block_m)
    k_tiles, k_view = tile_descriptor(k[None] if packed else k, tokens)
    v_tiles, v_view = tile_descriptor(v[None] if packed else v, tokens)
    scale_view = None
    if quant == "type0":
        k_scale, scale_view = tile_descriptor(k_scale, max(1, tokens // 32))
    scale_strides, pad = (0, 0, 0), total_q
    if q_scale is not None:  # [tokens, heads], or [batch, heads, pad]
        s = q_scale.stride()
        scale_strides, pad = ((0, *s), total_q) if q_scale.dim() == 2 else ((s[0], s[2], s[1]), q_scale.shape[2])
    capacity = 0 if packed else block_table.shape[1] * page_size
    mask = (*block_mask.stride()[:3], *block_mask.shape[2:]) if masked else (0,) * 5
    items = triton.cdiv(total_q, block_m) * num_q_heads
    ordering, ordered, header = [], None, None
    if batch > 1 or (masked and items > (num_ctas or sms)):
        rows = order.capacity(total_q, batch, block_m, num_q_heads if masked else 1)
        items = rows if masked else rows * num_q_heads
        words = torch.empty(4 + 4 * rows + order.scratch_words(rows, masked), dtype=torch.int32, device=q.device)
        header, ordered, scratch = words[:2], words[4 : 4 + 4 * rows].view(rows, 4), words[4 + 4 * rows :]
        sizes = (num_q_heads, block_m, total_q if packed else capacity)
        steps = order.launches(cu_seqlens_q, seq_lens, block_mask, *sizes, ordered, header, scratch)
        ordering = [Launch(*step) for step in steps]
    kernel = Launch(
        prefill_kernel,
        (num_ctas or min(sms, items), 1, 1),
        (
            q_rows, k_tiles, v_tiles, k_scale, q_scale, v_scale, *scale_strides, pad, cu_seqlens_q, seq_lens,
            block_table, 0 if packed else block_table.stride(0), capacity, block_mask, *mask, ordered, header,
            num_q_heads, out, lse, softmax_scale * LOG2_E,
        ),
        dict(
            G=num_q_heads // num_kv_heads, D=head_dim, PAGE=page_size, QUANT=quant, Q_VIEW=q_view, K_VIEW=k_view,
            V_VIEW=v_view, SCALE_VIEW=scale_view, GROUPS=config.groups, K_SLOTS=config.k_slots,
            V_SLOTS=config.v_slots, WORDS=max(16, triton.next_power_of_2(HEADER.value + mask[4])),
            REGISTERS=consumers, OTHERS=others, TURNS=config.turns, LAZY=config.lazy, EARLY=config.early,
            num_warps=4,
            maxnreg=(config.groups * consumers + others) // (config.groups + 1),
        ),
    )  # fmt: skip
    return [*ordering, kernel]


class Calls:
    """Launches of a call, repeated with other tensors and a workspace of their own."""

    def __init__(self, steps: list[Launch], call: tuple):
        self.kernels = [Bound(step) for step in steps]
        self.bytes = 0
        self._sources = [[self._source(x, call) for x in step.args if isinstance(x, Tensor)] for step in steps]

    def _source(self, x: Tensor, call: tuple) -> int:
        """Where an address comes from: the place of a tensor in the call, or ~offset in the workspace."""
        place = next((i for i, y in enumerate(call) if y is x), None)
        if place is None:
            self.bytes = x.untyped_storage().nbytes()
            place = ~(x.storage_offset() * x.element_size())
        return place

    def arguments(self, call: tuple, bases: tuple) -> tuple[list[list], Tensor | None]:
        """Arguments of each kernel, and the workspace; bases: of the descriptors, all of which the last kernel has."""
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=call[0].device) if self.bytes else None
        start = workspace.data_ptr() if self.bytes else 0
        found = []
        for kernel, sources in zip(self.kernels, self._sources, strict=True):
            addresses = [start + ~i if i < 0 else call[i] for i in sources]
            found.append(kernel.arguments(addresses, bases if kernel is self.kernels[-1] else ()))
        return found, workspace


_calls: dict[Hashable, Calls] = {}  # what was launched before, by everything but addresses
MAX_CALLS = 1024


def prepare(
    q, k, v, block_table, cu_seqlens_q, seq_lens, q_scale, k_scale, v_scale, block_mask, softmax_scale, out, lse,
    key: Hashable | None = None,
) -> Callable[[], None]:  # fmt: skip
    """This call as a function without arguments, which costs the host a few microseconds on a GPU.

    Arguments as in `hpcattn.attention_prefill`, checked there. key: something that is equal for two calls only if all
    their arguments but the addresses are.
    """
    call = (q, k, v, block_table, cu_seqlens_q, seq_lens, q_scale, k_scale, v_scale, block_mask)
    call += (softmax_scale, out, lse)
    type0 = k_scale is not None and k_scale.dim() == 4
    aligned = [q, k, v, out, *([k_scale] if type0 else [])]
    if cu_seqlens_q.shape[0] > 2 or block_mask is not None:  # read by kernels that Triton compiles for alignment
        aligned += [x for x in (cu_seqlens_q, seq_lens, block_mask) if x is not None]
    if not q.is_cuda or any(x.data_ptr() % 16 for x in aligned):
        steps = launches(*call)
        return lambda: [step.run(q.device) for step in steps]
    if key is None:
        tensors = (q, k, v, block_table, cu_seqlens_q, q_scale, k_scale, block_mask)
        key = tuple(None if x is None else (x.shape, x.stride()) for x in tensors)
        key += (q.device, q.dtype, seq_lens is None, softmax_scale, lse is None)
    calls = _calls.get(key)
    if calls is None:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        calls = _calls[key] = Calls(launches(*call), call)
    arguments, workspace = calls.arguments(call, (q, k, v, k_scale) if type0 else (q, k, v))

    def run(tensors=(*call, workspace), device=q.device.index):  # whose addresses the arguments are: kept alive
        for kernel, flat in zip(calls.kernels, arguments, strict=True):
            kernel(flat, device)

    return run
