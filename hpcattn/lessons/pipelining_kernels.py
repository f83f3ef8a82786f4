"""Lesson 04: one decode, five ways to bring keys and values to the tensor core.

bf16, one KV head, one query token, pages of 64 tokens, NHD. One CTA of four warps for each (split, request) leaves the
state (m, l, acc) of its keys; `hpcattn.lessons.pipelining` merges. The kernels share `start`, `attend`
and `finish` and differ in how a tile travels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

__all__ = [
    "CONSUMERS", "D", "G", "TILE", "TILE_LAYOUT",
    "asynchronous", "one_tma", "producer_warp", "synchronous", "tma_ring",
]  # fmt: skip

G = gl.constexpr(8)  # query heads that share the KV head
D = gl.constexpr(128)
TILE = gl.constexpr(64)  # tokens: one page
CONSUMERS = gl.constexpr(4)  # warps

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread, 256 bytes a token


# --- What all steps share ---------------------------------------------------------------------------------------------


@gluon.aggregate
class Job:
    """One CTA's part: some tiles of one request, with the shared memory for its queries and probabilities."""

    pages: gl.tensor  # pointer to the first of the job's entries in the block table
    num_tiles: gl.tensor
    num_tokens: gl.tensor  # from the first tile to the end of the request
    scale_log2: gl.tensor
    q_s: gl.shared_memory_descriptor  # [G, D]
    p_s: gl.shared_memory_descriptor  # [G, TILE]

    @gluon.jit
    def row(self, i):
        """Where tile i begins in the cache, counted in tokens. Beyond the last tile: 0, without a look."""
        return gl.load(self.pages + i, mask=i < self.num_tiles, other=0) * TILE


@gluon.aggregate
class State:
    """Lesson 03's state, transposed: m [G], l [G], acc [D, G]."""

    m: gl.tensor
    l: gl.tensor
    acc: gl.tensor


@gluon.jit
def start(q, table, seq_lens, table_width, scale_log2):
    """Grid (splits, requests): which tiles are mine? Brings the queries to shared memory."""
    request = gl.program_id(1)
    kv_len = gl.load(seq_lens + request)
    per_split = gl.cdiv(gl.cdiv(kv_len, TILE), gl.num_programs(0))
    first = gl.program_id(0) * per_split
    num_tiles = gl.maximum(gl.minimum(per_split, gl.cdiv(kv_len, TILE) - first), 0)
    heads = gl.arange(0, G, gl.SliceLayout(1, ROWS))
    dims = gl.arange(0, D, gl.SliceLayout(0, ROWS))
    q_tile = gl.load(q + (request * G + heads)[:, None] * D + dims[None, :])
    q_s = gl.allocate_shared_memory(gl.bfloat16, [G, D], TILE_LAYOUT, q_tile)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [G, TILE], TILE_LAYOUT)
    fence_async_shared()
    return Job(table + request * table_width + first, num_tiles, kv_len - first * TILE, scale_log2, q_s, p_s)


@gluon.jit
def nothing_seen():
    m = gl.full([G], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCT))
    l = gl.zeros([G], gl.float32, gl.SliceLayout(0, PRODUCT))
    return State(m, l, gl.zeros([D, G], gl.float32, PRODUCT))


@gluon.jit
def attend(job, i, k_s, v_s, state):
    """Tile i, in shared memory, into the state: lesson 03's `take_in` with tokens as rows (lesson 05 says why)."""
    s = warpgroup_mma(k_s, job.q_s.permute([1, 0]), gl.zeros([TILE, G], gl.float32, PRODUCT), use_acc=False)
    tokens = gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    inside = job.num_tokens - i * TILE  # tokens of this tile that exist; at least one does
    s = gl.where((tokens < inside)[:, None], s * job.scale_log2, float("-inf"))
    m = gl.maximum(state.m, gl.max(s, 0))
    p = gl.exp2(s - m[None, :])
    alpha = gl.exp2(state.m - m)
    job.p_s.permute([1, 0]).store(p.to(gl.bfloat16))
    if inside < TILE:  # 0 x NaN is NaN: empty slots of the last page become zeros
        slots = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
        v_s.store(gl.where((slots < inside)[:, None], v_s.load(ROWS), 0.0))
    fence_async_shared()  # the tensor core reads shared memory by another way than `store` writes it
    acc = warpgroup_mma(v_s.permute([1, 0]), job.p_s.permute([1, 0]), state.acc * alpha[None, :])
    return State(m, state.l * alpha + gl.sum(p, 0), acc)


@gluon.jit
def finish(state, m_out, l_out, acc_out):
    heads = gl.arange(0, G, gl.SliceLayout(0, PRODUCT))
    dims = gl.arange(0, D, gl.SliceLayout(1, PRODUCT))
    row = (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) * G + heads
    gl.store(m_out + row, state.m)
    gl.store(l_out + row, state.l)
    gl.store(acc_out + row[None, :] * D + dims[:, None], state.acc)


# --- The ladder -------------------------------------------------------------------------------------------------------


@gluon.jit
def offsets(job, i):
    """Tile i in the cache, element by element [TILE, D]."""
    tokens = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
    dims = gl.arange(0, D, gl.SliceLayout(0, ROWS))
    return (job.row(i) + tokens)[:, None] * D + dims[None, :]


@gluon.jit(do_not_specialize=["table_width"])
def synchronous(q, k, v, table, seq_lens, m_out, l_out, acc_out, table_width, scale_log2):
    """Step 1: every thread loads its part of the tile into registers and stores it to shared memory."""
    job = start(q, table, seq_lens, table_width, scale_log2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    state = nothing_seen()
    for i in range(job.num_tiles):
        at = offsets(job, i)
        k_s.store(gl.load(k + at))
        v_s.store(gl.load(v + at))
        fence_async_shared()
        state = attend(job, i, k_s, v_s, state)
    finish(state, m_out, l_out, acc_out)


@gluon.jit(do_not_specialize=["table_width"])
def asynchronous(q, k, v, table, seq_lens, m_out, l_out, acc_out, table_width, scale_log2):
    """Step 2, cp.async: the same addresses, but the bytes go to shared memory without passing through registers."""
    job = start(q, table, seq_lens, table_width, scale_log2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    state = nothing_seen()
    for i in range(job.num_tiles):
        at = offsets(job, i)
        async_copy.async_load(k_s, k + at)
        async_copy.async_load(v_s, v + at)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        state = attend(job, i, k_s, v_s, state)
    finish(state, m_out, l_out, acc_out)


@gluon.jit
def fetch(row, k, v, bar, k_s, v_s, pred=True):
    """Ask TMA for a tile. `bar` completes its phase when all bytes of both copies have landed."""
    mbarrier.expect(bar, k.nbytes_per_cta + v.nbytes_per_cta, pred=pred)
    tma.async_load(k, [row, 0], bar, k_s, pred=pred)
    tma.async_load(v, [row, 0], bar, v_s, pred=pred)


@gluon.jit(do_not_specialize=["table_width"])
def one_tma(q, k, v, table, seq_lens, m_out, l_out, acc_out, table_width, scale_log2):
    """Step 3, TMA: one thread asks for the whole tile, an mbarrier says when it is there. k, v: tensor descriptors."""
    job = start(q, table, seq_lens, table_width, scale_log2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    state = nothing_seen()
    for i in range(job.num_tiles):
        fetch(job.row(i), k, v, full, k_s, v_s)
        mbarrier.wait(full, i & 1)
        state = attend(job, i, k_s, v_s, state)
    finish(state, m_out, l_out, acc_out)


@gluon.jit(do_not_specialize=["table_width"])
def tma_ring(q, k, v, table, seq_lens, m_out, l_out, acc_out, table_width, scale_log2, STAGES: gl.constexpr):
    """Step 4: STAGES tiles under way; tile i lives in stage i % STAGES, in that stage's phase i // STAGES."""
    job = start(q, table, seq_lens, table_width, scale_log2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], TILE_LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for j in gl.static_range(STAGES):
        fetch(job.row(j), k, v, full.index(j), k_s.index(j), v_s.index(j), j < job.num_tiles)
    state = nothing_seen()
    for i in range(job.num_tiles):
        at = i % STAGES
        row = job.row(i + STAGES)  # asked for early: a table entry has a latency, too
        mbarrier.wait(full.index(at), i // STAGES & 1)
        state = attend(job, i, k_s.index(at), v_s.index(at), state)
        gl.barrier()  # all four warps have read the stage
        fetch(row, k, v, full.index(at), k_s.index(at), v_s.index(at), i + STAGES < job.num_tiles)
    finish(state, m_out, l_out, acc_out)


# --- Step 5: a warp that does nothing but fetch -----------------------------------------------------------------------


@gluon.aggregate
class Ring:
    """Stages with a barrier on each side: `full` (the tile has landed) and `empty` (it has been read)."""

    k_s: gl.shared_memory_descriptor  # [STAGES, TILE, D]
    v_s: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr


@gluon.jit
def produce(job, ring, k, v):
    """One warp. A fresh barrier lets a wait for parity 1 pass, so the first round does not wait."""
    for i in range(job.num_tiles):
        at = i % ring.STAGES
        row = job.row(i)
        mbarrier.wait(ring.empty.index(at), (i // ring.STAGES & 1) ^ 1)
        fetch(row, k, v, ring.full.index(at), ring.k_s.index(at), ring.v_s.index(at))


@gluon.jit
def consume(job, ring, m_out, l_out, acc_out):
    """Four warps."""
    state = nothing_seen()
    for i in range(job.num_tiles):
        at = i % ring.STAGES
        mbarrier.wait(ring.full.index(at), i // ring.STAGES & 1)
        state = attend(job, i, ring.k_s.index(at), ring.v_s.index(at), state)
        mbarrier.arrive(ring.empty.index(at))
    finish(state, m_out, l_out, acc_out)


@gluon.jit(do_not_specialize=["table_width"])
def producer_warp(q, k, v, table, seq_lens, m_out, l_out, acc_out, table_width, scale_log2, STAGES: gl.constexpr):
    """Step 5: the ring of step 4, filled by a warp of its own."""
    job = start(q, table, seq_lens, table_width, scale_log2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], TILE_LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    ring = Ring(k_s, v_s, full, empty, STAGES)
    gl.warp_specialize(
        [(consume, (job, ring, m_out, l_out, acc_out)), (produce, (job, ring, k, v))],
        [1],  # warps of each worker; the first function runs on the CTA's own four
        [24],  # and registers per thread
    )


# --- A measurement: the round trip of a tile --------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["table_width", "num_tiles"])
def round_trips(k, v, table, out, table_width, num_tiles):
    """Grid (splits, requests): tiles one at a time, nothing computed. The last K tile goes to out [.., .., TILE, D]."""
    pages = table + gl.program_id(1) * table_width + gl.program_id(0) * num_tiles
    k_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], TILE_LAYOUT)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    row = gl.load(pages) * TILE
    for i in range(num_tiles):
        following = gl.load(pages + i + 1, mask=i + 1 < num_tiles, other=0) * TILE
        fetch(row, k, v, full, k_s, v_s)
        mbarrier.wait(full, i & 1)
        row = following
    tokens = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
    dims = gl.arange(0, D, gl.SliceLayout(0, ROWS))
    first = (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) * TILE
    gl.store(out + (first + tokens)[:, None] * D + dims[None, :], k_s.load(ROWS))
