"""Lesson 05: two bf16 decode kernels that differ in which operand of the tensor core lies on the long side.

`padded_kernel` puts the queries on WGMMA's M = 64, `swapped_kernel` the tokens. Both take one chunk of one (request,
KV head) pair per program, load K and V through the same TMA ring, and leave their partial state (acc, m, l) to the
merge of `hpcattn.kernels.portable.decode`, in its layout. NHD caches with pages of TILE = 64 tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

NEG_INF = gl.constexpr(float("-inf"))


@gluon.constexpr_function
def wgmma_layout(N):
    """Where the accumulators of a product with N columns lie: four warps, each with 16 of every 64 rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.aggregate
class Ring:
    """Tiles of K and V on their way through shared memory. Step i is tile `last - 1 - i`: a partial one comes first."""

    k_desc: tma.tensor_descriptor  # rows are slots of pages, columns are heads x D
    v_desc: tma.tensor_descriptor
    pages: gl.tensor  # this request's row of the block table
    head: gl.tensor
    last: gl.tensor  # one past the chunk's last tile
    steps: gl.tensor
    k: gl.shared_memory_descriptor  # [STAGES, TILE, D]
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    RESIDENT: gl.constexpr  # load every stage once and take its tile again and again: for measuring what a tile costs

    @gluon.jit
    def start(k_desc, v_desc, pages, head, last, steps, STAGES: gl.constexpr, RESIDENT: gl.constexpr):
        k = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
        v = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)
        k_full = mbarrier.allocate_mbarrier(batch=STAGES)
        v_full = mbarrier.allocate_mbarrier(batch=STAGES)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
        ring = Ring(k_desc, v_desc, pages, head, last, steps, k, v, k_full, v_full, RESIDENT)
        for i in gl.static_range(STAGES - 1):
            ring.load(gl.to_tensor(i))
        return ring

    @gluon.jit
    def load(self, i):
        """Send for the tile of step i. Its stage is the one that step i - STAGES has left."""
        STAGES: gl.constexpr = self.k.shape[0]
        TILE: gl.constexpr = self.k.shape[1]
        D: gl.constexpr = self.k.shape[2]
        wanted = i < self.steps
        if self.RESIDENT:
            wanted = wanted & (i < STAGES)
        stage = i % STAGES
        row = gl.load(self.pages + self.last - 1 - i, mask=wanted, other=0) * TILE
        mbarrier.expect(self.k_full.index(stage), self.k_desc.nbytes_per_cta, pred=wanted)
        tma.async_load(self.k_desc, [row, self.head * D], self.k_full.index(stage), self.k.index(stage), pred=wanted)
        mbarrier.expect(self.v_full.index(stage), self.v_desc.nbytes_per_cta, pred=wanted)
        tma.async_load(self.v_desc, [row, self.head * D], self.v_full.index(stage), self.v.index(stage), pred=wanted)

    @gluon.jit
    def await_tile(self, full, tiles, i):
        STAGES: gl.constexpr = self.k.shape[0]
        pending = i < STAGES if self.RESIDENT else True
        mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1, pred=pending)
        return tiles.index(i % STAGES)

    @gluon.jit
    def clear_tail(self, length):
        """Zero the rows of V that lie past the request's end: 0 x NaN is NaN. Only step 0 can have such rows."""
        TILE: gl.constexpr = self.k.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        inside = length - (self.last - 1) * TILE
        if (self.steps > 0) & (inside < TILE):
            v = self.await_tile(self.v_full, self.v, gl.to_tensor(0))
            token = gl.arange(0, TILE, gl.SliceLayout(1, layout))
            v.store(gl.where((token < inside)[:, None], v.load(layout), 0.0))
            fence_async_shared()  # WGMMA reads what ordinary stores wrote


@gluon.jit
def my_chunk(lens, TILE: gl.constexpr):
    """Grid (splits, KV heads, requests): (request, KV head, length, one past the last tile, number of tiles, slot)."""
    split = gl.program_id(0)
    head = gl.program_id(1)
    request = gl.program_id(2)
    length = gl.load(lens + request)
    tiles = gl.cdiv(length, TILE)
    chunk = gl.cdiv(tiles, gl.num_programs(0))
    last = gl.minimum((split + 1) * chunk, tiles)
    slot = (request * gl.num_programs(1) + head) * gl.num_programs(0) + split
    return request, head, length, last, gl.maximum(last - split * chunk, 0), slot


@gluon.jit
def load_queries(q, request, head, S: gl.constexpr, G: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """The S * G query rows of a pair as `[ROWS, D]` in shared memory; the rows that do not exist are zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = ((request * S + row // G) * gl.num_programs(1) + head) * G + row % G
    values = gl.load(q + at[:, None] * D + d[None, :], mask=(row < S * G)[:, None], other=0.0)
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], shared, values)
    fence_async_shared()
    return tile


@gluon.jit
def store_state(states, slot, row, d, rows_first: gl.constexpr, m, l, acc, R: gl.constexpr, D: gl.constexpr):
    """acc `[slots, R, D]`, then (m, l) `[slots, 2, R]`. rows_first: whether acc is `[rows, D]` or `[D, rows]`."""
    num_slots = gl.num_programs(0) * gl.num_programs(1) * gl.num_programs(2)
    if rows_first:
        at = (slot * R + row)[:, None] * D + d[None, :]
        inside = ((row < R)[:, None]) & (d < D)[None, :]
    else:
        at = (slot * R + row)[None, :] * D + d[:, None]
        inside = ((row < R)[None, :]) & (d < D)[:, None]
    gl.store(states + at, acc, mask=inside)
    state = states + num_slots * R * D + 2 * slot * R + row
    gl.store(state, gl.convert_layout(m, row.type.layout), mask=row < R)
    gl.store(state + R, gl.convert_layout(l, row.type.layout), mask=row < R)


@gluon.jit
def padded_kernel(
    q, k_desc, v_desc, table, lens, states, table_stride, scale_log2,
    S: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr = False,
):  # fmt: skip
    """Queries on M: S = Q Kᵀ is [64 rows, TILE], of which S * G rows mean something; O += P V is [64 rows, D]."""
    TILE: gl.constexpr = k_desc.block_shape[0]
    D: gl.constexpr = k_desc.block_shape[1]
    M: gl.constexpr = 64
    s_layout: gl.constexpr = wgmma_layout(TILE)
    o_layout: gl.constexpr = wgmma_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)  # P stays in registers
    request, head, length, last, steps, slot = my_chunk(lens, TILE)
    ring = Ring.start(k_desc, v_desc, table + request * table_stride, head, last, steps, STAGES, RESIDENT)
    q_s = load_queries(q, request, head, S, G, M, D)
    row = gl.arange(0, M, gl.SliceLayout(1, s_layout))
    token = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
    visible = length - S + 1 + row // G  # keys that a row may see
    m = gl.full([M], NEG_INF, gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([M, D], gl.float32, o_layout)
    ring.clear_tail(length)
    for i in range(steps):
        ring.load(i + STAGES - 1)
        k = ring.await_tile(ring.k_full, ring.k, i)
        s = warpgroup_mma(q_s, k.permute([1, 0]), gl.zeros([M, TILE], gl.float32, s_layout), use_acc=False)
        position = (last - 1 - i) * TILE + token
        s = gl.where(position[None, :] < visible[:, None], s * scale_log2, NEG_INF)
        m_new = gl.maximum(m, gl.max(s, 1))  # tokens lie along a row: 16 registers of each of 4 lanes
        shift = gl.where(m_new == NEG_INF, 0.0, m_new)
        alpha = gl.exp2(m - shift)
        p = gl.exp2(s - shift[:, None])
        l = l * alpha + gl.sum(p, 1)
        m = m_new
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        v = ring.await_tile(ring.v_full, ring.v, i)
        acc = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), p_layout), v, acc)
    row = gl.arange(0, M, gl.SliceLayout(1, o_layout))
    d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    store_state(states, slot, row, d, True, m, l, acc, S * G, D)


@gluon.jit
def swapped_kernel(
    q, k_desc, v_desc, table, lens, states, table_stride, scale_log2,
    S: gl.constexpr, G: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, DEFER_SUM: gl.constexpr = True,
    RESIDENT: gl.constexpr = False,
):  # fmt: skip
    """Tokens on M: Sᵀ = K Qᵀ is [TILE, N], N >= S * G a power of two; Oᵀ += Vᵀ Pᵀ is [D, N]."""
    TILE: gl.constexpr = k_desc.block_shape[0]
    D: gl.constexpr = k_desc.block_shape[1]
    layout: gl.constexpr = wgmma_layout(N)
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    request, head, length, last, steps, slot = my_chunk(lens, TILE)
    ring = Ring.start(k_desc, v_desc, table + request * table_stride, head, last, steps, STAGES, RESIDENT)
    q_s = load_queries(q, request, head, S, G, N, D)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], shared)  # an operand B comes from shared memory only
    row = gl.arange(0, N, gl.SliceLayout(0, layout))
    token = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    visible = length - S + 1 + row // G
    m = gl.full([N], NEG_INF, gl.float32, gl.SliceLayout(0, layout))
    l = gl.zeros([TILE, N], gl.float32, layout) if DEFER_SUM else gl.zeros([N], gl.float32, gl.SliceLayout(0, layout))
    acc = gl.zeros([D, N], gl.float32, layout)
    ring.clear_tail(length)
    for i in range(steps):
        ring.load(i + STAGES - 1)
        k = ring.await_tile(ring.k_full, ring.k, i)
        s = warpgroup_mma(k, q_s.permute([1, 0]), gl.zeros([TILE, N], gl.float32, layout), use_acc=False)
        position = (last - 1 - i) * TILE + token
        s = gl.where(position[:, None] < visible[None, :], s * scale_log2, NEG_INF)
        m_new = gl.maximum(m, gl.max(s, 0))  # tokens lie across lanes and warps
        shift = gl.where(m_new == NEG_INF, 0.0, m_new)
        alpha = gl.exp2(m - shift)
        p = gl.exp2(s - shift[None, :])
        # deferred: each thread sums its own tokens, in as many registers as it has scores
        l = l * alpha[None, :] + p if DEFER_SUM else l * alpha + gl.sum(p, 0)
        m = m_new
        p_s.permute([1, 0]).store(p.to(gl.bfloat16))
        fence_async_shared()
        v = ring.await_tile(ring.v_full, ring.v, i)
        acc = warpgroup_mma(v.permute([1, 0]), p_s.permute([1, 0]), acc * alpha[None, :])  # V read transposed, in place
    if DEFER_SUM:
        l = gl.sum(l, 0)
    d = gl.arange(0, D, gl.SliceLayout(1, layout))
    store_state(states, slot, row, d, False, m, l, acc, S * G, D)


@gluon.jit
def layout_probe(
    out, N: gl.constexpr, HEIGHT: gl.constexpr, REGISTERS: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr
):
    """Compiles only if the accumulators [HEIGHT, N] lie as the bases say: what each bit of a number stands for."""
    claimed: gl.constexpr = gl.DistributedLinearLayout(REGISTERS, LANES, WARPS, [], [HEIGHT, N])
    gl.static_assert(gl.to_linear_layout(wgmma_layout(N), [HEIGHT, N]) == claimed)
