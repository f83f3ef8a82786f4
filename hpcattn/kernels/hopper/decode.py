"""Paged decode: TMA into a ring of tiles, small-M WGMMA, online softmax; the keys of a request split over CTAs.

Scores are computed transposed, S^T = K Q^T: 64 tokens fill WGMMA's M, and the S * G query rows that share a KV head lie
on N = 8, 16 or 32 instead of being padded to 64. The output follows as O^T += V^T P^T. One warp produces: it looks
pages up and issues TMA copies, K and V of a tile in turn, as far ahead as the ring has slots. Four warps consume.

Static schedule: a CTA has one chunk of a pair; a second kernel merges the states of pairs that were split (`states`).
Dynamic: a cluster walks its range of the plan's line (`work`), the producer ahead of the consumers. Four more warps
merge the states of the cluster's CTAs, which come through shared memory (`cluster`), so that no consumer waits for a
merge. Only pairs that reach beyond a cluster's range leave a state in global memory; the last cluster to do so finishes
the pair.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    CachePolicy,
    FractionalEvictionPolicy,
    fence_async_shared,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents

from hpcattn.kernels.hopper import cluster, fp8
from hpcattn.kernels.hopper.pages import load_tile, page_entries, zero_tail
from hpcattn.kernels.hopper.pipeline import Cursor, Ring
from hpcattn.kernels.hopper.states import (
    merge_slots,
    result_row,
    state_layout,
    store_result,
    store_state,
    value_scale,
)
from hpcattn.kernels.hopper.work import Range, Requests, static_segment
from hpcattn.kernels.portable.common import NEG_INF, P_SCALE

# K and V pass through L2 once, or twice at the same time where two CTAs share them: 2 % faster on an H200
STREAM = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.aggregate
class Tiles:
    """Shared memory for K and V, two slots of the ring a tile; type 0 K scales ride on the barrier of their K."""

    ring: Ring
    scales: object  # float32 [slots, rows of 32, 32], or None


@gluon.aggregate
class Operands:
    """Shared memory for the narrow operands of the products."""

    q: gl.shared_memory_descriptor  # [N, D]
    p: gl.shared_memory_descriptor  # [N, TILE]


@gluon.aggregate
class Shape:
    """Compile-time sizes; a view is (rows per page, rows per head, columns per head) of a cache seen as a matrix.

    UNIT: tokens per tile of a plan, or of a chunk of at least MIN_TILES of the static schedule. C: CTAs per cluster.
    BLOCKS: of N query rows.
    """

    S: gl.constexpr
    G: gl.constexpr
    N: gl.constexpr
    D: gl.constexpr
    TILE: gl.constexpr
    UNIT: gl.constexpr
    MIN_TILES: gl.constexpr
    PAGE: gl.constexpr
    QUANT: gl.constexpr
    C: gl.constexpr
    BLOCKS: gl.constexpr
    K_VIEW: gl.tuple
    V_VIEW: gl.tuple
    SCALE_VIEW: object


@gluon.jit
def prefetch_line(pointer):
    """Bring what will be read first to L2, while the warps are told their parts."""
    gl.inline_asm("prefetch.global.L2 [$0];", "l", [pointer])


@gluon.jit
def produce_share(tiles, at, k, v, k_scale, requests, segment, cost, first, last, shape):
    """Load the tiles of [first, last) of a segment's pair, counted in units."""
    ring = tiles.ring
    TILE_BYTES: gl.constexpr = shape.TILE * shape.D * ring.tiles.dtype.primitive_bitwidth // 8
    TYPE0: gl.constexpr = shape.QUANT == "type0"
    SCALE_BYTES: gl.constexpr = tiles.scales.shape[1] * 128 if TYPE0 else 0
    request, head = segment.request, segment.head
    table_row = requests.table + request.to(gl.int64) * requests.table_stride
    token = first * shape.UNIT
    ahead = page_entries(table_row, requests.capacity, token, shape.TILE, shape.PAGE)  # while the length comes
    kv_len, _ = segment.lengths(requests, cost, shape.UNIT)
    stop = gl.minimum(last * shape.UNIT, kv_len)
    for token in range(first * shape.UNIT, stop, shape.TILE):
        entries = ahead
        ahead = page_entries(table_row, requests.capacity, token + shape.TILE, shape.TILE, shape.PAGE)
        slot, visible = token % shape.PAGE, stop - token
        dst, full = ring.to_fill(at, TILE_BYTES + SCALE_BYTES)
        load_tile(k, dst, full, entries, slot, visible, head, shape.PAGE, shape.K_VIEW, STREAM)
        if TYPE0:
            scales = tiles.scales.index(at.slot)
            load_tile(k_scale, scales, full, entries, slot // 32, visible, head, shape.PAGE, shape.SCALE_VIEW, STREAM)
        at = at.next(ring.slots)
        dst, full = ring.to_fill(at, TILE_BYTES)
        load_tile(v, dst, full, entries, slot, visible, head, shape.PAGE, shape.V_VIEW, STREAM)
        at = at.next(ring.slots)
    return at


@gluon.jit
def static_chunk(requests, split, num_splits, shape):
    return static_segment(
        requests, gl.program_id(2), gl.program_id(1), split, num_splits, shape.UNIT, shape.MIN_TILES
    )  # fmt: skip


@gluon.jit
def produce(tiles, k, v, k_scale, requests, split, num_splits, shape):
    """The producer warp of the static schedule: keep the ring full."""
    chunk = static_chunk(requests, split, num_splits, shape)
    produce_share(tiles, Cursor.start(1), k, v, k_scale, requests, chunk, 0, chunk.first, chunk.last, shape)


@gluon.jit
def produce_range(tiles, k, v, k_scale, requests, records, offsets, shape):
    """The producer warp of a plan, ahead of the consumers across the borders of segments."""
    if shape.C > 1:
        cluster.arrive()
    at = Cursor.start(1)
    mine, segment = Range.open(records, offsets, requests.num_kv_heads, shape.C, shape.BLOCKS)
    while segment.at < mine.end:
        prefetch_line(requests.table + mine.request_after(segment).to(gl.int64) * requests.table_stride)
        first, last = mine.share(segment)
        at = produce_share(tiles, at, k, v, k_scale, requests, segment, mine.cost, first, last, shape)
        segment = mine.next(segment)


@gluon.aggregate
class Rows:
    """The query rows [first, first + N) of a pair, their results, and the workspace for partial states."""

    q: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor
    softmax_scale_log2: gl.tensor
    q_scale: object  # None for bf16, as v_scale
    k_scale: object
    v_scale: object
    o: gl.tensor
    lse: object
    states: object
    first: gl.tensor


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
def consume(tiles, operands, at, start, stop, q_scale, limit, shape, mma: gl.constexpr):
    """The four consumer warps: the state (m `[N]`, l `[N]`, acc `[D, N]`) of the keys [start, stop).

    q_scale `[N]` turns q.k into base-2 scores; limit `[N]`: the number of keys that a row sees.
    """
    ring = tiles.ring
    ROWS: gl.constexpr = gl.SliceLayout(1, mma)
    FP8: gl.constexpr = shape.QUANT != "none"
    m = gl.full([shape.N], NEG_INF, gl.float32, gl.SliceLayout(0, mma))
    l = own_sum(gl.zeros([shape.TILE, shape.N], gl.float32, mma))
    acc = gl.zeros([shape.D, shape.N], gl.float32, mma)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    fresh = gl.zeros([shape.TILE, shape.N], gl.float32, mma)
    for first in range(start, stop, shape.TILE):
        k = ring.filled(at)
        s = warpgroup_mma(k, operands.q.permute([1, 0]), fresh, use_acc=False)
        if shape.QUANT == "type0":
            s *= token_scales(tiles.scales.index(at.slot), shape, ROWS)[:, None]
            fence_async_shared()  # ordinary reads of the scales, before TMA may write there again
        at = ring.release(at)
        token = first + gl.arange(0, shape.TILE, ROWS)
        s = gl.where(token[:, None] < limit[None, :], s * q_scale[None, :], NEG_INF)
        p, alpha, m = online_softmax(s, m)
        l = l * gl.convert_layout(alpha, COLUMNS, assert_trivial=True)[None, None, :] + own_sum(p)
        if FP8:
            operands.p.permute([1, 0]).store(fp8.operand_tokens((p * P_SCALE).to(gl.float8e4nv)))
            fence_async_shared()  # P, before the barrier that comes with loading V
        else:
            operands.p.permute([1, 0]).store(p.to(gl.bfloat16))
        v = ring.filled(at)
        if first + shape.TILE > stop:
            zero_tail(v, stop - first)
        vt = fp8.transposed(v, mma) if FP8 else v.permute([1, 0])
        fence_async_shared()  # what was stored, before the product; what was read, before TMA may write there again
        # a fresh accumulator per tile: across tiles the few bits of fp8's would lose up to 30 % (lesson 03)
        o = warpgroup_mma(vt, operands.p.permute([1, 0]), gl.zeros([shape.D, shape.N], gl.float32, mma), use_acc=False)
        at = ring.release(at)
        acc = acc * alpha[None, :] + o
    return at, m, gl.convert_layout(gl.sum(gl.sum(l, 0), 0), gl.SliceLayout(0, mma)), acc


@gluon.jit
def by_rows(m, l, acc, shape):
    """The state in the layout in which states merge."""
    if shape.QUANT != "none":
        acc = fp8.natural_rows(acc)
    layout: gl.constexpr = gl.SliceLayout(0, state_layout(shape.N, shape.D))
    column: gl.constexpr = gl.SliceLayout(1, layout)
    m, l = gl.convert_layout(m, column)[:, None], gl.convert_layout(l, column)[:, None]
    return m, l, gl.convert_layout(acc.permute([1, 0]), layout)


@gluon.aggregate
class Query:
    """What is read of a segment before its keys."""

    q: gl.tensor  # [N, D]
    scale: gl.tensor  # [N], turns q.k into base-2 scores
    kv_len: gl.tensor
    valid: gl.tensor


@gluon.jit
def load_query(rows, requests, segment, cost, shape, mma: gl.constexpr):
    S: gl.constexpr = shape.S
    G: gl.constexpr = shape.G
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 128 // rows.q.dtype.element_ty.primitive_bitwidth], [2, 16], [4, 1], [1, 0]
    )
    request, head = segment.request, segment.head
    r = rows.first + gl.arange(0, shape.N, gl.SliceLayout(1, layout))
    at = (request.to(gl.int64) * S + r // G) * rows.token_stride + (head * G + r % G).to(gl.int64) * rows.head_stride
    d = gl.arange(0, shape.D, gl.SliceLayout(0, layout))
    q = gl.load(rows.q + at[:, None] + d[None, :], mask=(r < S * G)[:, None], other=0.0)
    scale = gl.full([shape.N], rows.softmax_scale_log2, gl.float32, gl.SliceLayout(0, mma))
    if shape.QUANT != "none":
        r = rows.first + gl.arange(0, shape.N, gl.SliceLayout(0, mma))
        row = result_row(request, r // G, head, r % G, S, G, requests.num_kv_heads)
        scale *= gl.load(rows.q_scale + row, mask=r < S * G, other=0.0)
    if shape.QUANT == "type1":
        scale *= gl.load(rows.k_scale)
    kv_len, valid = segment.lengths(requests, cost, shape.UNIT)
    return Query(q, scale, kv_len, valid)


@gluon.jit
def attend_share(tiles, operands, at, rows, requests, query, segment, first, last, mine, shape, mma: gl.constexpr):
    """The state, by rows, of the units [first, last) of a segment's pair; and what follows it in a plan's range."""
    operands.q.store(query.q)
    fence_async_shared()
    kv_len, scale = query.kv_len, query.scale
    r = rows.first + gl.arange(0, shape.N, gl.SliceLayout(0, mma))
    stop = gl.minimum(last * shape.UNIT, kv_len)
    # rows that do not exist have token >= S: they see what exists, so that their columns stay finite
    limit = gl.minimum(kv_len - shape.S + 1 + r // shape.G, stop)
    AHEAD: gl.constexpr = mine is not None and shape.N < 32  # 32 rows leave no registers to load the next ones
    if AHEAD:
        segment = mine.next(segment)
        query = load_query(rows, requests, segment, mine.cost, shape, mma)
    at, m, l, acc = consume(tiles, operands, at, first * shape.UNIT, stop, scale, limit, shape, mma)
    if mine is not None and not AHEAD:
        segment = mine.next(segment)
        query = load_query(rows, requests, segment, mine.cost, shape, mma)
    m, l, acc = by_rows(m, l, acc, shape)
    return at, segment, query, m, l, acc


@gluon.jit
def finish(rows, requests, segment, first, m, l, acc, valid, shape):
    """Write the rows of a pair from `first` on."""
    request, head, num_kv_heads = segment.request, segment.head, requests.num_kv_heads
    scale = value_scale(rows.v_scale, head, shape.QUANT)
    store_result(
        rows.o, rows.lse, request, head, num_kv_heads, first, m, l, acc, scale, valid, shape.S, shape.G
    )  # fmt: skip


@gluon.constexpr_function
def mma_layout(N, QUANT):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16 if QUANT == "none" else 32])


@gluon.jit
def attend(tiles, operands, rows, requests, split, num_splits, shape):
    """The consumer warps of the static schedule."""
    mma: gl.constexpr = mma_layout(shape.N, shape.QUANT)
    chunk = static_chunk(requests, split, num_splits, shape)
    query = load_query(rows, requests, chunk, 0, shape, mma)
    valid = query.valid
    _, _, _, m, l, acc = attend_share(
        tiles, operands, Cursor.start(0), rows, requests, query, chunk, chunk.first, chunk.last, None, shape, mma
    )
    if chunk.whole():
        finish(rows, requests, chunk, rows.first, m, l, acc, valid, shape)
    elif num_splits is not None:
        slot = (chunk.request * requests.num_kv_heads + chunk.head) * num_splits + split
        slots = gl.num_programs(2) * requests.num_kv_heads * num_splits
        store_state(rows.states, slot, slots, rows.first, m, l, acc, shape.S * shape.G)


@gluon.jit
def settle(rows, requests, segment, mine, counters, first, m, l, acc, valid, shape):
    """Leave the state of a cut pair's rows from `first` on; whoever is the last to do so merges them all.

    The plan says how many clusters a pair touches. Its counter is the one of the first, to which no other pair that
    reaches beyond it belongs; it is left at zero.
    """
    R: gl.constexpr = shape.S * shape.G
    n: gl.constexpr = acc.shape[0]
    first_cluster, count = mine.cut(segment)
    num_clusters = gl.num_programs(0) // (shape.C * shape.BLOCKS)
    store_state(rows.states, first_cluster + mine.cluster, 2 * num_clusters, first, m, l, acc, R)
    counter = counters + (rows.first // shape.N * num_clusters + first_cluster) * shape.C + mine.rank
    gl.barrier()  # all warps have stored, before the one that arrives releases
    if gl.atomic_add(counter, 1) == count - 1:
        m, l, acc = merge_slots(rows.states, 2 * first_cluster, count, 2 * num_clusters, first, n, R, shape.D)
        finish(rows, requests, segment, first, m, l, acc, valid, shape)
        gl.store(counter, 0)


@gluon.jit
def attend_range(tiles, operands, inbox, rows, requests, records, offsets, counters, shape):
    """The consumer warps of a plan: results of pairs that are this CTA's alone; states of others go to the mergers."""
    mma: gl.constexpr = mma_layout(shape.N, shape.QUANT)
    at, box = Cursor.start(0), Cursor.start(1)
    mine, segment = Range.open(records, offsets, requests.num_kv_heads, shape.C, shape.BLOCKS)
    query = load_query(rows, requests, segment, mine.cost, shape, mma)
    if shape.C > 1:
        cluster.wait()
    while segment.at < mine.end:
        this, valid = segment, query.valid
        first, last = mine.share(this)
        at, segment, query, m, l, acc = attend_share(
            tiles, operands, at, rows, requests, query, this, first, last, mine, shape, mma
        )
        if mine.alone(this):
            finish(rows, requests, this, rows.first, m, l, acc, valid, shape)
        elif shape.C == 1:
            settle(rows, requests, this, mine, counters, rows.first, m, l, acc, valid, shape)
        else:
            box = inbox.send(box, mine.rank, m, l, acc)
    if shape.C > 1:
        inbox.drain(box)


@gluon.jit
def merge_range(inbox, rows, requests, records, offsets, counters, shape):
    """Four warps of a plan that merge what the cluster's consumers send."""
    cluster.arrive()
    box = Cursor.start(0)
    mine, segment = Range.open(records, offsets, requests.num_kv_heads, shape.C, shape.BLOCKS)
    first = rows.first + mine.rank * (shape.N // shape.C)
    while segment.at < mine.end:
        if not mine.alone(segment):
            _, valid = segment.lengths(requests, mine.cost, shape.UNIT)
            box, m, l, acc = inbox.receive(box)
            if segment.whole():
                finish(rows, requests, segment, first, m, l, acc, valid, shape)
            else:
                settle(rows, requests, segment, mine, counters, first, m, l, acc, valid, shape)
        segment = mine.next(segment)


@gluon.jit(
    do_not_specialize=[
        "table_stride",
        "capacity",
        "num_requests",
        "requests_per_cluster",
        "num_kv_heads",
        "num_splits",
    ],  # fmt: skip
    do_not_specialize_on_alignment=["q_scale", "k_scale", "v_scale", "block_table", "seq_lens", "lse"],
)
def decode_kernel(
    k, v, k_scale, q, q_token_stride, q_head_stride, q_scale, v_scale, block_table, table_stride, seq_lens, capacity,
    num_requests, requests_per_cluster, num_kv_heads, o, lse, states, records, offsets, counters, num_splits,
    softmax_scale_log2,
    S: gl.constexpr, G: gl.constexpr, N: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
    QUANT: gl.constexpr, K_VIEW: gl.constexpr, V_VIEW: gl.constexpr, SCALE_VIEW: gl.constexpr, SLOTS: gl.constexpr,
    UNIT: gl.constexpr, MIN_TILES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Static: grid (chunks x blocks of N rows, KV heads, requests). Planned: (ranges x blocks of N rows) of C CTAs."""
    BLOCKS: gl.constexpr = (S * G + N - 1) // N
    PLANNED: gl.constexpr = records is not None
    shape = Shape(S, G, N, D, TILE, UNIT, MIN_TILES, PAGE, QUANT, C, BLOCKS, K_VIEW, V_VIEW, SCALE_VIEW)
    requests = Requests(seq_lens, capacity, block_table, table_stride, num_kv_heads)
    if PLANNED:
        range_id = gl.program_id(0) // (C * BLOCKS)
        prefetch_line(records + range_id * 8)
        request = gl.minimum(range_id * requests_per_cluster >> 16, num_requests - 1)  # if all are equally long
        row_block = gl.program_id(0) // C % BLOCKS
    else:
        request = gl.program_id(2)
        row_block = gl.program_id(0) % BLOCKS
    prefetch_line(seq_lens + request)
    prefetch_line(block_table + request.to(gl.int64) * table_stride)
    split = gl.program_id(0) // BLOCKS
    if num_splits is not None:
        gdc_launch_dependents()  # the merge may come as soon as every CTA has a place
        chunk = static_chunk(requests, split, num_splits, shape)
        if chunk.first >= chunk.places:
            return
    dtype: gl.constexpr = k.dtype
    ring = Ring.allocate(dtype, SLOTS, TILE, D, k.layout)
    tiles = Tiles(
        ring,
        gl.allocate_shared_memory(gl.float32, [SLOTS, TILE // min(PAGE, 32), 32], gl.NVMMASharedLayout(0, 32, 2))
        if QUANT == "type0"
        else None,
    )
    operands = Operands(
        gl.allocate_shared_memory(dtype, [N, D], gl.NVMMASharedLayout.get_default_for([N, D], dtype)),
        gl.allocate_shared_memory(dtype, [N, TILE], gl.NVMMASharedLayout.get_default_for([N, TILE], dtype)),
    )
    rows = Rows(
        q, q_token_stride, q_head_stride, softmax_scale_log2, q_scale, k_scale, v_scale, o, lse, states, row_block * N,
    )  # fmt: skip
    if C > 1:
        inbox = cluster.Inbox.allocate(C, N, D)
        cluster.arrive()
        gl.warp_specialize(
            [
                (attend_range, (tiles, operands, inbox, rows, requests, records, offsets, counters, shape)),
                (merge_range, (inbox, rows, requests, records, offsets, counters, shape)),
                (produce_range, (tiles, k, v, k_scale, requests, records, offsets, shape)),
                (cluster.arrive_only, (capacity,)),
                (cluster.arrive_only, (capacity,)),
            ],
            [4, 1, 1, 2],
            [168, 56, 56, 56],
        )
    elif PLANNED:
        gl.warp_specialize(
            [
                (attend_range, (tiles, operands, None, rows, requests, records, offsets, counters, shape)),
                (produce_range, (tiles, k, v, k_scale, requests, records, offsets, shape)),
            ],
            [1],
            [56],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (tiles, operands, rows, requests, split, num_splits, shape)),
                (produce, (tiles, k, v, k_scale, requests, split, num_splits, shape)),
            ],
            [1],
            [56],
        )
