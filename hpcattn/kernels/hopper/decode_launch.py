"""From tensors to launches of the Hopper decode kernel: its configuration, its tensor maps, its cheap repetition."""

from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hpcattn.kernels.hopper.decode import decode_kernel
from hpcattn.kernels.hopper.launch import Bound, Launch, matrix_view, tile_descriptor
from hpcattn.kernels.hopper.states import merge_kernel
from hpcattn.kernels.portable.common import LOG2_E
from hpcattn.kernels.portable.decode import workspace_floats
from hpcattn.quantization import FP8
from hpcattn.schedule import LONG_REQUEST, PLAN_TILE, multiprocessors


def unsupported(k: Tensor, v: Tensor, k_scale: Tensor | None) -> str | None:
    """Why TMA cannot read this cache, None if it can."""
    paged = (k, v) if k_scale is None or k_scale.dim() != 4 else (k, v, k_scale)
    if not torch.compiler.is_compiling() and any(type(x) is Tensor and x.data_ptr() % 16 for x in paged):
        return "the cache must start at a multiple of 16 bytes"
    return next((why for why in map(matrix_view, paged) if isinstance(why, str)), None)


class Config(NamedTuple):
    """Query rows per CTA, CTAs that share a pair's rows, tokens per tile, slots of the ring (two per tile)."""

    n: int
    blocks: int
    tile: int
    slots: int


RING_BYTES = 128 * 1024  # in flight; one CTA per multiprocessor
# Per thread at launch. Static, 8 warps: 128 x 232 for the consumers, 128 x 56 around the producer; a merge kernel fits
# beside. Planned: 128 x 248 for the consumers, which also merge; in clusters 12 warps, four that merge come to it.
REGISTERS, PLANNED_REGISTERS, CLUSTER_REGISTERS = 144, 152, 168


@cache
def configuration(
    dtype: torch.dtype, head_dim: int, page_size: int, rows: int, pairs: int, max_seq_len: int, sms: int,
    row_blocks: int | None,
) -> Config:  # fmt: skip
    """How the `rows` = S * G query rows of each (request, KV head) pair are computed; row_blocks: as a plan says.

    Static schedule: where half of the multiprocessors would idle, two CTAs with half of the rows each beat one with
    all: the second reads K and V from L2. Long tiles pay the latency of the softmax, which the exchange of the maximum
    between warps dominates, less often; wide ones in fp8 run out of registers. All measured on an H200.
    """
    planned = row_blocks is not None
    if not planned:
        row_blocks = 2 if 2 * pairs <= sms and max_seq_len <= LONG_REQUEST else 1
    n = min(32, max(8, triton.next_power_of_2(triton.cdiv(rows, row_blocks))))
    fits = page_size <= PLAN_TILE or not planned  # shares start at any tile of the plan: no page may span two
    tile = 256 if dtype == FP8 and n < 32 and fits else PLAN_TILE
    return Config(n, triton.cdiv(rows, n), tile, RING_BYTES // (tile * head_dim * dtype.itemsize))


def configuration_of(
    q: Tensor, k: Tensor, block_table: Tensor, num_query_tokens: int, row_blocks: int | None = None
) -> Config:
    """The `configuration` of a call."""
    num_kv_heads = k.shape[2]
    rows = num_query_tokens * (q.shape[1] // num_kv_heads)
    pairs, max_seq_len = block_table.shape[0] * num_kv_heads, block_table.shape[1] * k.shape[1]
    sizes = (q.shape[2], k.shape[1], rows, pairs, max_seq_len)
    return configuration(q.dtype, *sizes, multiprocessors(q.device), row_blocks)


def _requests_per_cluster(batch: int, num_kv_heads: int, num_clusters: int) -> int:
    """Of a plan for equally long requests, in 1 / 65536: pairs are cut evenly where there are more clusters."""
    pairs = batch * num_kv_heads
    if batch >= 2**15:
        return 0  # no guess: the kernel counts in 32 bits
    return (batch << 16) // (pairs * (num_clusters // pairs) if pairs <= num_clusters else num_clusters)


def launches(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, plan, num_query_tokens, softmax_scale, num_splits,
    min_tiles, workspace, out, lse,
) -> list[Launch]:  # fmt: skip
    """The launches of a call: the decode kernel, and the merge of the static schedule. Arguments as in `prepare`."""
    batch, num_kv_heads, page_size = seq_lens.shape[0], k.shape[2], k.shape[1]
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    quant = "none" if q_scale is None else "type0" if k_scale.dim() == 4 else "type1"
    rows = num_query_tokens * group
    capacity = block_table.shape[1] * page_size
    n, blocks, tile, slots = configuration_of(
        q, k, block_table, num_query_tokens, None if plan is None else plan.row_blocks
    )
    tokens = min(page_size, tile)
    k_tiles, k_view = tile_descriptor(k, tokens)
    v_tiles, v_view = tile_descriptor(v, tokens)
    scale_view = None
    if quant == "type0":
        k_scale, scale_view = tile_descriptor(k_scale, max(1, tokens // 32))
    if plan is None:
        cluster, grid = 1, (num_splits * blocks, num_kv_heads, batch)
    else:
        cluster, grid = plan.cluster_size, (plan.records.shape[0] * blocks, 1, 1)
    planned = (None,) * 3 if plan is None else plan.pointers
    split = plan is None and num_splits > 1
    guess = _requests_per_cluster(batch, num_kv_heads, max(1, grid[0] // blocks))
    shape = dict(S=num_query_tokens, G=group, D=head_dim, TILE=tile, QUANT=quant, MIN_TILES=min_tiles)
    decode = Launch(
        decode_kernel,
        grid,
        (
            k_tiles, v_tiles, k_scale, q, *q.stride()[:2], q_scale, v_scale, block_table, block_table.stride(0),
            seq_lens, capacity, batch, guess, num_kv_heads, out, lse, workspace, *planned,
            num_splits if split else None, softmax_scale * LOG2_E,
        ),
        dict(
            **shape, N=n, PAGE=page_size, K_VIEW=k_view, V_VIEW=v_view, SCALE_VIEW=scale_view, SLOTS=slots, C=cluster,
            UNIT=tile if plan is None else PLAN_TILE, num_warps=4,
            maxnreg=REGISTERS if plan is None else PLANNED_REGISTERS if cluster == 1 else CLUSTER_REGISTERS,
        ),
        cluster,
    )  # fmt: skip
    if not split:
        return [decode]
    args = (v_scale, seq_lens, capacity, out, lse, workspace, num_splits)
    return [
        decode,
        Launch(merge_kernel, (rows, num_kv_heads, batch), args, dict(**shape, num_warps=4, launch_pdl=True)),
    ]


_bound: dict[tuple, list[Bound]] = {}  # what was launched before, by everything but addresses
MAX_BOUND = 1024


def prepare(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, plan, num_query_tokens, softmax_scale, num_splits,
    min_tiles, workspace, out, lse, key: Hashable | None = None,
) -> Callable[[], None]:  # fmt: skip
    """This call as a function without arguments, which costs the host a few microseconds on a GPU.

    Arguments as in `hpcattn.attention_decode`, checked there; plan: `PlanTensors` or None. key: something that is equal
    for two calls only if all their arguments but the addresses are.
    """
    if num_splits == 1 and plan is None:
        workspace = None  # whether one was given makes no difference
    elif workspace is None:
        floats = workspace_floats(q, k, seq_lens, num_splits, None if plan is None else plan.records.shape[0])
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
    call = (q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, plan, num_query_tokens, softmax_scale)
    call += (num_splits, min_tiles, workspace, out, lse)
    planned = () if plan is None else plan.pointers
    type0 = k_scale is not None and k_scale.dim() == 4
    aligned = (q, k, v, out, *planned, *([] if workspace is None else [workspace]), *([k_scale] if type0 else []))
    if not q.is_cuda or any(x.data_ptr() % 16 for x in aligned):
        steps = launches(*call)
        return lambda: [step.run(q.device) for step in steps]
    if key is None:
        key = (
            q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.stride(),
            k_scale.stride() if type0 else k_scale is None, block_table.shape, block_table.stride(),
            num_query_tokens, softmax_scale, num_splits, min_tiles, lse is None,
            None if plan is None else (plan.records.shape, plan.cluster_size, plan.row_blocks),
        )  # fmt: skip
    kernels = _bound.get(key)
    if kernels is None:
        if len(_bound) >= MAX_BOUND:
            _bound.clear()
        kernels = _bound[key] = [Bound(launch) for launch in launches(*call)]
    tensors = (None if type0 else k_scale, q, q_scale, v_scale, block_table, seq_lens, out, lse, workspace, *planned)
    steps = [kernels[0].arguments(tensors, (k, v, k_scale) if type0 else (k, v))]
    if len(kernels) > 1:
        steps.append(kernels[1].arguments((v_scale, seq_lens, out, lse, workspace), ()))

    def run(tensors=call, device=q.device.index):  # their addresses are in the steps: `tensors` keeps them alive
        for kernel, arguments in zip(kernels, steps, strict=True):
            kernel(arguments, device)

    return run
