"""Paged decode: TMA into a ring of tiles, small-M WGMMA, online softmax; the keys of a request split over CTAs.

Scores are computed transposed, S^T = K Q^T: 64 tokens fill WGMMA's M, and the S * G query rows that share a KV head lie
on N = 8, 16 or 32 instead of being padded to 64. The output follows as O^T += V^T P^T. One warp produces: it looks
pages up and issues TMA copies, K and V of a tile in turn, as far ahead as the ring has slots. Four warps consume. A
second kernel merges the partial states of requests that were split (`states`).
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    CachePolicy,
    FractionalEvictionPolicy,
    fence_async_shared,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents

from hpcattn.kernels.hopper import fp8
from hpcattn.kernels.hopper.launch import Bound, Launch, matrix_view, tile_descriptor
from hpcattn.kernels.hopper.pipeline import Cursor, Ring
from hpcattn.kernels.hopper.states import (
    chunk_tiles,
    merge_kernel,
    normalizer,
    state_offsets,
    value_scale,
    visible_length,
)
from hpcattn.kernels.portable.common import LOG2_E, NEG_INF, P_SCALE
from hpcattn.kernels.portable.decode import workspace_floats
from hpcattn.quantization import FP8
from hpcattn.schedule import LONG_REQUEST, multiprocessors

# K and V pass through L2 once, or twice at the same time where two CTAs share them: 2 % faster on an H200
STREAM = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.aggregate
class Chunk:
    """Tiles [first, last) of the keys of one (request, KV head) pair."""

    request: gl.tensor
    head: gl.tensor
    kv_len: gl.tensor
    first: gl.tensor
    last: gl.tensor


@gluon.aggregate
class Buffers:
    """Shared memory. K and V of a tile take two slots of the ring; type 0 K scales ride on the barrier of their K."""

    ring: Ring
    scales: object  # float32 [slots, rows of 32, 32], or None
    q: gl.shared_memory_descriptor  # [N, D]
    p: gl.shared_memory_descriptor  # [N, TILE]


@gluon.aggregate
class Shape:
    """Compile-time sizes; a view is (rows per page, rows per head, columns per head) of a cache seen as a matrix."""

    S: gl.constexpr
    G: gl.constexpr
    N: gl.constexpr
    D: gl.constexpr
    TILE: gl.constexpr
    PAGE: gl.constexpr
    QUANT: gl.constexpr
    K_VIEW: gl.tuple
    V_VIEW: gl.tuple
    SCALE_VIEW: object


@gluon.jit
def prefetch_table(table, entries):
    """Bring a request's row of the block table (the first 16 KB of it) to L2: it is needed right after the length."""
    LINE: gl.constexpr = 32  # entries
    line = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    where = table + gl.minimum(line * LINE, gl.maximum(entries - 1, 0))
    gl.inline_asm("prefetch.global.L2 [$0];", "l", [where])


@gluon.jit
def page_entries(table, chunk, tile, shape):
    """Block table entries of a tile's pages. Pages behind the last visible token repeat the tile's first."""
    PAGES: gl.constexpr = max(1, shape.TILE // shape.PAGE)
    first = gl.load(table + tile * shape.TILE // shape.PAGE, mask=tile < chunk.last, other=0)
    entries = (first,)
    for i in gl.static_range(1, PAGES):
        token = tile * shape.TILE + i * shape.PAGE
        entries = entries + (gl.load(table + token // shape.PAGE, mask=token < chunk.kv_len, other=first),)
    return entries


@gluon.jit
def load_tile(descriptor, dst, full, entries, slot, head, VIEW: gl.constexpr):
    """Copy a tile, from `slot` of its first page on, page by page: `dst` lies on `full`."""
    ROWS: gl.constexpr = descriptor.block_shape[0]
    for i in gl.static_range(len(entries)):
        row = entries[i] * VIEW[0] + head * VIEW[1] + slot
        tma.async_load(descriptor, [row, head * VIEW[2]], full, dst.slice(i * ROWS, ROWS, dim=0), cache_policy=STREAM)


@gluon.jit
def produce(buffers, k, v, k_scale, table, chunk, shape):
    """The producer warp: keep the ring full."""
    ring = buffers.ring
    TILE_BYTES: gl.constexpr = shape.TILE * shape.D * ring.tiles.dtype.primitive_bitwidth // 8
    TYPE0: gl.constexpr = shape.QUANT == "type0"
    SCALE_BYTES: gl.constexpr = buffers.scales.shape[1] * 128 if TYPE0 else 0
    at = Cursor.start(1)
    ahead = page_entries(table, chunk, chunk.first, shape)
    for tile in range(chunk.first, chunk.last):
        entries = ahead
        ahead = page_entries(table, chunk, tile + 1, shape)
        slot = tile * shape.TILE % shape.PAGE
        dst, full = ring.to_fill(at, TILE_BYTES + SCALE_BYTES)
        load_tile(k, dst, full, entries, slot, chunk.head, shape.K_VIEW)
        if TYPE0:
            load_tile(k_scale, buffers.scales.index(at.slot), full, entries, slot // 32, chunk.head, shape.SCALE_VIEW)
        at = at.next(ring.slots)
        dst, full = ring.to_fill(at, TILE_BYTES)
        load_tile(v, dst, full, entries, slot, chunk.head, shape.V_VIEW)
        at = at.next(ring.slots)


@gluon.aggregate
class Rows:
    """The query rows [first, first + N) of a pair, their results, and the workspace for partial states."""

    q: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor
    softmax_scale_log2: gl.tensor
    q_scale: object  # None for bf16, as v_scale
    v_scale: object
    o: gl.tensor
    lse: object
    states: object
    first: gl.tensor
    valid: gl.tensor


@gluon.jit
def query_rows(rows, chunk, num_kv_heads, shape, layout: gl.constexpr):
    """Row r of a pair is query token r // G, head r % G: (token of S, row of the results, whether it exists)."""
    r = rows.first + gl.arange(0, shape.N, layout)
    token = r // shape.G
    row = (chunk.request.to(gl.int64) * shape.S + token) * num_kv_heads * shape.G + chunk.head * shape.G + r % shape.G
    return token, row, r < shape.S * shape.G


@gluon.constexpr_function
def _scale_layout(TILE, RUN):
    """K scales of a tile, `[TILE / RUN, RUN]`, placed as the rows of S^T are."""
    at = lambda token: [token // RUN, token % RUN]  # noqa: E731
    registers = [at(8), *(at(1 << i) for i in range(6, TILE.bit_length() - 1))]
    lanes = [[0, 0], [0, 0], at(1), at(2), at(4)]
    return gl.DistributedLinearLayout(registers, lanes, [at(16), at(32)], [], [TILE // RUN, RUN])


@gluon.jit
def token_scales(scales, shape, rows: gl.constexpr):
    """Type 0 K scales of a tile; a page of 16 tokens uses half of its row of 32."""
    RUN: gl.constexpr = min(shape.PAGE, 32)
    x = scales.slice(0, RUN, dim=1).load(_scale_layout(shape.TILE, RUN)).reshape([shape.TILE])
    return gl.convert_layout(x, rows, assert_trivial=True)


@gluon.jit
def zero_tail(tile, visible):
    """Zero a tile's rows from `visible` on: their weights are zero, but 0 x NaN is not."""
    BYTES: gl.constexpr = tile.dtype.primitive_bitwidth // 8
    TILE: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1] * BYTES // 2
    words = tile.reinterpret(gl.int16, [TILE, WORDS], gl.NVMMASharedLayout(128, 16, 2))
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WORDS, WORDS // 8], [4, 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    words.store(gl.where((row < visible)[:, None], words.load(layout), 0))


@gluon.jit
def own_sum(p):
    """Sum `[TILE, N]` over the tokens that a thread holds: `[4 warps, 8 lanes, N]`, nothing is exchanged."""
    TILE: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([TILE // 64, 4, 2, 8, N]), 2), 0)


@gluon.jit
def online_softmax(s, m):
    """Take in a tile of base-2 scores `[TILE, N]`: weights, the factor for what came before, the new maximum."""
    m_new = gl.maximum(m, gl.max(s, 0))
    shift = gl.where(m_new == NEG_INF, 0.0, m_new)  # columns that have seen nothing: avoids -inf - -inf
    return gl.exp2(s - shift[None, :]), gl.exp2(m - shift), m_new


@gluon.jit
def consume(buffers, chunk, q_scale, limit, shape, mma: gl.constexpr):
    """The four consumer warps: the state (m `[N]`, l `[N]`, acc `[D, N]`) of a chunk.

    q_scale `[N]` turns q.k into base-2 scores; limit `[N]`: the number of keys that a row sees.
    """
    ring = buffers.ring
    ROWS: gl.constexpr = gl.SliceLayout(1, mma)
    FP8: gl.constexpr = shape.QUANT != "none"
    m = gl.full([shape.N], NEG_INF, gl.float32, gl.SliceLayout(0, mma))
    l = own_sum(gl.zeros([shape.TILE, shape.N], gl.float32, mma))
    acc = gl.zeros([shape.D, shape.N], gl.float32, mma)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    fresh = gl.zeros([shape.TILE, shape.N], gl.float32, mma)
    at = Cursor.start(0)
    for tile in range(chunk.first, chunk.last):
        k = ring.filled(at)
        s = warpgroup_mma(k, buffers.q.permute([1, 0]), fresh, use_acc=False)
        if shape.QUANT == "type0":
            s *= token_scales(buffers.scales.index(at.slot), shape, ROWS)[:, None]
            fence_async_shared()  # ordinary reads of the scales, before TMA may write there again
        at = ring.release(at)
        token = tile * shape.TILE + gl.arange(0, shape.TILE, ROWS)
        s = gl.where(token[:, None] < limit[None, :], s * q_scale[None, :], NEG_INF)
        p, alpha, m = online_softmax(s, m)
        l = l * gl.convert_layout(alpha, COLUMNS, assert_trivial=True)[None, None, :] + own_sum(p)
        if FP8:
            buffers.p.permute([1, 0]).store(fp8.operand_tokens((p * P_SCALE).to(gl.float8e4nv)))
            fence_async_shared()  # P, before the barrier that comes with loading V
        else:
            buffers.p.permute([1, 0]).store(p.to(gl.bfloat16))
        v = ring.filled(at)
        if (tile + 1) * shape.TILE > chunk.kv_len:
            zero_tail(v, chunk.kv_len - tile * shape.TILE)
        vt = fp8.transposed(v, mma) if FP8 else v.permute([1, 0])
        fence_async_shared()  # what was stored, before the product; what was read, before TMA may write there again
        # a fresh accumulator per tile: across tiles the few bits of fp8's would lose up to 30 % (lesson 03)
        o = warpgroup_mma(vt, buffers.p.permute([1, 0]), gl.zeros([shape.D, shape.N], gl.float32, mma), use_acc=False)
        at = ring.release(at)
        acc = acc * alpha[None, :] + o
    return m, gl.convert_layout(gl.sum(gl.sum(l, 0), 0), gl.SliceLayout(0, mma)), acc


@gluon.jit
def store_result(rows, chunk, m, l, acc, v_scale, shape):
    """Normalise and write; NaN rather than truncated attention if the request's length is not valid."""
    factor, lse = normalizer(m, l, v_scale, rows.valid)
    o = acc * factor[None, :]
    num_kv_heads = gl.num_programs(1)
    if rows.lse is not None:
        _, row, exists = query_rows(rows, chunk, num_kv_heads, shape, lse.type.layout)
        gl.store(rows.lse + row, lse, mask=exists)
    if shape.QUANT != "none":
        o = fp8.natural_rows(o)
    _, row, exists = query_rows(rows, chunk, num_kv_heads, shape, gl.SliceLayout(0, o.type.layout))
    d = gl.arange(0, shape.D, gl.SliceLayout(1, o.type.layout))
    gl.store(rows.o + row[None, :] * shape.D + d[:, None], o.to(gl.bfloat16), mask=exists[None, :])


@gluon.jit
def store_state(rows, chunk, split, num_splits, m, l, acc, shape):
    R: gl.constexpr = shape.S * shape.G
    pairs = gl.num_programs(2) * gl.num_programs(1)
    slot = (chunk.request * gl.num_programs(1) + chunk.head) * num_splits + split
    r = rows.first + gl.arange(0, shape.N, m.type.layout)
    _, m_at, l_at = state_offsets(slot, r, pairs * num_splits, R, shape.D)
    gl.store(rows.states + m_at, m, mask=r < R)
    gl.store(rows.states + l_at, l, mask=r < R)
    if shape.QUANT != "none":
        acc = fp8.natural_rows(acc)
    r = rows.first + gl.arange(0, shape.N, gl.SliceLayout(0, acc.type.layout))
    at, _, _ = state_offsets(slot, r, pairs * num_splits, R, shape.D)
    d = gl.arange(0, shape.D, gl.SliceLayout(1, acc.type.layout))
    gl.store(rows.states + at[None, :] + d[:, None], acc, mask=(r < R)[None, :])


@gluon.jit
def attend(buffers, rows, k_scale, chunk, split, num_splits, shape, SPLIT: gl.constexpr):
    """The consumer warps, from loading q to storing the result or the partial state."""
    FP8: gl.constexpr = shape.QUANT != "none"
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.N, 32 if FP8 else 16])
    load: gl.constexpr = gl.BlockedLayout(
        [1, 128 // rows.q.dtype.element_ty.primitive_bitwidth], [2, 16], [4, 1], [1, 0]
    )
    num_kv_heads = gl.num_programs(1)

    token, row, exists = query_rows(rows, chunk, num_kv_heads, shape, gl.SliceLayout(1, load))
    at = (chunk.request.to(gl.int64) * shape.S + token) * rows.token_stride
    at += (row % (num_kv_heads * shape.G)) * rows.head_stride
    d = gl.arange(0, shape.D, gl.SliceLayout(0, load))
    buffers.q.store(gl.load(rows.q + at[:, None] + d[None, :], mask=exists[:, None], other=0.0))

    token, row, exists = query_rows(rows, chunk, num_kv_heads, shape, gl.SliceLayout(0, mma))
    scale = gl.full([shape.N], rows.softmax_scale_log2, gl.float32, gl.SliceLayout(0, mma))
    if FP8:
        scale *= gl.load(rows.q_scale + row, mask=exists, other=0.0)
    if shape.QUANT == "type1":
        scale *= gl.load(k_scale)
    v_scale = value_scale(rows.v_scale, chunk.head, shape.QUANT)
    # rows that do not exist have token >= S: they see what exists, so that their columns stay finite
    limit = gl.minimum(chunk.kv_len - shape.S + 1 + token, chunk.kv_len)
    fence_async_shared()
    m, l, acc = consume(buffers, chunk, scale, limit, shape, mma)

    if (chunk.first == 0) & (chunk.last * shape.TILE >= chunk.kv_len):
        store_result(rows, chunk, m, l, acc, v_scale, shape)
    elif SPLIT:
        store_state(rows, chunk, split, num_splits, m, l, acc, shape)


@gluon.jit(
    do_not_specialize=["table_stride", "capacity", "num_splits"],
    do_not_specialize_on_alignment=["q_scale", "k_scale", "v_scale", "block_table", "seq_lens", "lse"],
)
def decode_kernel(
    k, v, k_scale, q, q_token_stride, q_head_stride, q_scale, v_scale, block_table, table_stride, seq_lens, capacity,
    o, lse, states, num_splits, softmax_scale_log2,
    S: gl.constexpr, G: gl.constexpr, N: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
    QUANT: gl.constexpr, K_VIEW: gl.constexpr, V_VIEW: gl.constexpr, SCALE_VIEW: gl.constexpr, SLOTS: gl.constexpr,
    MIN_TILES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Grid (chunks x blocks of N rows, KV heads, requests)."""
    BLOCKS: gl.constexpr = (S * G + N - 1) // N
    split = gl.program_id(0) // BLOCKS
    row_block = gl.program_id(0) % BLOCKS
    head = gl.program_id(1)
    request = gl.program_id(2)
    table = block_table + request.to(gl.int64) * table_stride
    if SPLIT:
        gdc_launch_dependents()  # the merge may come as soon as every CTA has a place
    prefetch_table(table, capacity // PAGE)
    kv_len, valid = visible_length(seq_lens, capacity, request)
    tiles = gl.cdiv(kv_len, TILE)
    share = tiles
    if SPLIT:
        share = chunk_tiles(tiles, num_splits, MIN_TILES)
    if (split > 0) & (split * share >= tiles):
        return
    chunk = Chunk(request, head, kv_len, split * share, gl.minimum(split * share + share, tiles))
    shape = Shape(S, G, N, D, TILE, PAGE, QUANT, K_VIEW, V_VIEW, SCALE_VIEW)
    dtype: gl.constexpr = k.dtype
    ring = Ring.allocate(dtype, SLOTS, TILE, D, k.layout)
    buffers = Buffers(
        ring,
        gl.allocate_shared_memory(gl.float32, [SLOTS, TILE // min(PAGE, 32), 32], gl.NVMMASharedLayout(0, 32, 2))
        if QUANT == "type0"
        else None,
        gl.allocate_shared_memory(dtype, [N, D], gl.NVMMASharedLayout.get_default_for([N, D], dtype)),
        gl.allocate_shared_memory(dtype, [N, TILE], gl.NVMMASharedLayout.get_default_for([N, TILE], dtype)),
    )
    rows = Rows(
        q, q_token_stride, q_head_stride, softmax_scale_log2, q_scale, v_scale, o, lse, states,
        row_block * N, valid,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend, (buffers, rows, k_scale, chunk, split, num_splits, shape, SPLIT)),
            (produce, (buffers, k, v, k_scale, table, chunk, shape)),
        ],
        [1],
        [40],
    )


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
# Per thread at launch, 8 warps: 128 x 248 for the consumers, 128 x 40 around the producer; a merge fits beside
REGISTERS = 144


@cache
def configuration(
    dtype: torch.dtype, head_dim: int, rows: int, pairs: int, max_seq_len: int, multiprocessors: int
) -> Config:
    """How the `rows` = S * G query rows of each (request, KV head) pair are computed.

    Where half of the multiprocessors would idle, two CTAs with half of the rows each beat one with all: the second
    reads K and V from L2. Long tiles pay the latency of the softmax, which the exchange of the maximum between warps
    dominates, less often; wide ones in fp8 run out of registers. All measured on an H200.
    """
    n = max(8, triton.next_power_of_2(rows))
    if 2 * pairs <= multiprocessors and max_seq_len <= LONG_REQUEST:
        n = max(8, n // 2)
    n = min(32, n)
    tile = 256 if dtype == FP8 and n < 32 else 128
    return Config(n, triton.cdiv(rows, n), tile, RING_BYTES // (tile * head_dim * dtype.itemsize))


def configuration_of(q: Tensor, k: Tensor, block_table: Tensor, num_query_tokens: int) -> Config:
    """The `configuration` of a call."""
    num_kv_heads = k.shape[2]
    rows = num_query_tokens * (q.shape[1] // num_kv_heads)
    pairs, max_seq_len = block_table.shape[0] * num_kv_heads, block_table.shape[1] * k.shape[1]
    return configuration(q.dtype, q.shape[2], rows, pairs, max_seq_len, multiprocessors(q.device))


def launches(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, num_query_tokens, softmax_scale, num_splits, min_tiles,
    workspace, out, lse,
) -> list[Launch]:  # fmt: skip
    """The launches of a call: the decode kernel, and the merge if requests are split. Arguments as in `prepare`."""
    batch, num_kv_heads, page_size = seq_lens.shape[0], k.shape[2], k.shape[1]
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    quant = "none" if q_scale is None else "type0" if k_scale.dim() == 4 else "type1"
    rows = num_query_tokens * group
    capacity = block_table.shape[1] * page_size
    n, blocks, tile, slots = configuration_of(q, k, block_table, num_query_tokens)
    tokens = min(page_size, tile)
    k_tiles, k_view = tile_descriptor(k, tokens)
    v_tiles, v_view = tile_descriptor(v, tokens)
    scale_view = None
    if quant == "type0":
        k_scale, scale_view = tile_descriptor(k_scale, max(1, tokens // 32))
    shape = dict(S=num_query_tokens, G=group, D=head_dim, TILE=tile, QUANT=quant, MIN_TILES=min_tiles)
    decode = Launch(
        decode_kernel,
        (num_splits * blocks, num_kv_heads, batch),
        (
            k_tiles, v_tiles, k_scale, q, *q.stride()[:2], q_scale, v_scale, block_table, block_table.stride(0),
            seq_lens, capacity, out, lse, workspace, num_splits, softmax_scale * LOG2_E,
        ),
        dict(
            **shape, N=n, PAGE=page_size, K_VIEW=k_view, V_VIEW=v_view, SCALE_VIEW=scale_view, SPLIT=num_splits > 1,
            SLOTS=slots, num_warps=4, maxnreg=REGISTERS,
        ),
    )  # fmt: skip
    if num_splits == 1:
        return [decode]
    args = (v_scale, seq_lens, capacity, out, lse, workspace, num_splits)
    merge = Launch(
        merge_kernel, (rows, num_kv_heads, batch), args, dict(**shape, BLOCK=16, num_warps=4, launch_pdl=True)
    )
    return [decode, merge]


_bound: dict[tuple, list[Bound]] = {}  # what was launched before, by everything but addresses
MAX_BOUND = 1024


def prepare(
    q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, num_query_tokens, softmax_scale, num_splits, min_tiles,
    workspace, out, lse, key: Hashable | None = None,
) -> Callable[[], None]:  # fmt: skip
    """This call as a function without arguments, which costs the host a few microseconds on a GPU.

    Arguments as in `hpcattn.attention_decode`, checked there. key: something that is equal for two calls only if all
    their arguments but the addresses are.
    """
    if num_splits == 1:
        workspace = None  # whether one was given makes no difference
    elif workspace is None:
        floats = workspace_floats(q, k, seq_lens, num_splits, None)
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
    call = (q, k, v, block_table, seq_lens, q_scale, k_scale, v_scale, num_query_tokens, softmax_scale, num_splits)
    call += (min_tiles, workspace, out, lse)
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    addresses |= workspace.data_ptr() if num_splits > 1 else 0
    type0 = k_scale is not None and k_scale.dim() == 4
    if type0:
        addresses |= k_scale.data_ptr()
    if not q.is_cuda or addresses % 16:
        steps = launches(*call)
        return lambda: [step.run(q.device) for step in steps]
    if key is None:
        key = (
            q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.stride(),
            k_scale.stride() if type0 else k_scale is None, block_table.shape, block_table.stride(),
            num_query_tokens, softmax_scale, num_splits, min_tiles, lse is None,
        )  # fmt: skip
    kernels = _bound.get(key)
    if kernels is None:
        if len(_bound) >= MAX_BOUND:
            _bound.clear()
        kernels = _bound[key] = [Bound(launch) for launch in launches(*call)]
    tensors = (None if type0 else k_scale, q, q_scale, v_scale, block_table, seq_lens, out, lse, workspace)
    steps = [kernels[0].arguments(tensors, (k, v, k_scale) if type0 else (k, v))]
    if num_splits > 1:
        steps.append(kernels[1].arguments((v_scale, seq_lens, out, lse, workspace), ()))

    def run(tensors=call, device=q.device.index):  # their addresses are in the steps: `tensors` keeps them alive
        for kernel, arguments in zip(kernels, steps, strict=True):
            kernel(arguments, device)

    return run
