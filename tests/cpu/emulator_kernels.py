"""Small Gluon kernels for test_emulator.py. `BUG` names a deliberate mistake; "" is the right kernel."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

ROWS, COLUMNS = gl.constexpr(64), gl.constexpr(64)  # of a tile


@gluon.jit
def store_tile(target, i, tile):
    layout: gl.constexpr = tile.type.layout
    rows = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(target + rows[:, None] * COLUMNS + columns[None, :], tile)


@gluon.jit
def load_stage(source, i, full, stages, num_tiles, STAGES: gl.constexpr, BUG: gl.constexpr):
    nbytes: gl.constexpr = source.nbytes_per_cta
    expected: gl.constexpr = nbytes // 2 if BUG == "few bytes" else 2 * nbytes if BUG == "many bytes" else nbytes
    mbarrier.expect(full.index(i % STAGES), expected, pred=i < num_tiles)
    tma.async_load(source, [i * ROWS, 0], full.index(i % STAGES), stages.index(i % STAGES), pred=i < num_tiles)


@gluon.jit
def ring_copy(source, target, num_tiles, STAGES: gl.constexpr, BUG: gl.constexpr):
    """Tiles through a ring of stages: TMA in, plain stores out."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    stages = gl.allocate_shared_memory(source.dtype, [STAGES, ROWS, COLUMNS], source.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES - 1):
        load_stage(source, gl.to_tensor(i), full, stages, num_tiles, STAGES, BUG)
    for i in range(num_tiles):
        load_stage(source, i + STAGES - 1, full, stages, num_tiles, STAGES, BUG)
        phase = (i // STAGES) & 1
        if BUG == "wrong phase":
            phase = phase ^ 1
        if BUG != "no wait":
            mbarrier.wait(full.index(i % STAGES), phase)
        store_tile(target, i, stages.index(i % STAGES).load(layout))


@gluon.jit
def tma_round_trip(source, target):
    """One box in and out; both descriptors may be smaller than the box."""
    tile = gl.allocate_shared_memory(source.dtype, [ROWS, COLUMNS], source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.nbytes_per_cta)
    tma.async_load(source, [0, 0], bar, tile)
    mbarrier.wait(bar, 0)
    tma.async_store(target, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def product(a_desc, b_desc, c_ptr, N: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """C [64, N] = A · B in bf16; A lies as [64, K] or [K, 64], B as [K, N] or [N, K]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
    tma.async_load(a_desc, [0, 0], bar, a)
    tma.async_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    left = a.permute([1, 0]) if A_TRANSPOSED else a
    right = b.permute([1, 0]) if B_TRANSPOSED else b
    c = warpgroup_mma(left, right, gl.zeros([64, N], gl.float32, layout), use_acc=False)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, gl.SliceLayout(0, layout))
    gl.store(c_ptr + rows[:, None] * N + columns[None, :], c)


@gluon.jit
def produce(source, target, stages, full, empty, num_tiles, STAGES: gl.constexpr, BUG: gl.constexpr):
    for i in range(num_tiles):
        free = ((i // STAGES) & 1) ^ (0 if BUG == "producer phase" else 1)
        if BUG != "no wait for empty":
            mbarrier.wait(empty.index(i % STAGES), free)
        mbarrier.expect(full.index(i % STAGES), source.nbytes_per_cta)
        tma.async_load(source, [i * ROWS, 0], full.index(i % STAGES), stages.index(i % STAGES))


@gluon.jit
def consume(source, target, stages, full, empty, num_tiles, STAGES: gl.constexpr, BUG: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    for i in range(num_tiles):
        mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        if BUG == "early arrive":
            mbarrier.arrive(empty.index(i % STAGES))
        tile = stages.index(i % STAGES).load(layout)
        fence_async_shared()
        if BUG != "early arrive" and BUG != "no arrive":
            mbarrier.arrive(empty.index(i % STAGES))
        store_tile(target, i, tile + 1.0)


@gluon.jit
def specialized(source, target, num_tiles, STAGES: gl.constexpr, BUG: gl.constexpr):
    """A producer warp loads tiles, a consumer warpgroup adds one."""
    stages = gl.allocate_shared_memory(source.dtype, [STAGES, ROWS, COLUMNS], source.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (consume, (source, target, stages, full, empty, num_tiles, STAGES, BUG)),
            (produce, (source, target, stages, full, empty, num_tiles, STAGES, BUG)),
        ],
        [1],
        [24],
    )


@gluon.constexpr_function
def _peer_load(outputs, inputs):
    (base,), offsets, (rank,) = inputs
    lines = ["{", ".reg .b32 a, r;", f"mapa.shared::cluster.u32 r, {base}, {rank};"]
    for output, offset in zip(outputs[0], offsets, strict=True):
        lines += [f"add.u32 a, r, {offset};", f"ld.shared::cluster.f32 {output}, [a];"]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _rank(outputs, inputs):
    return f"mov.u32 {outputs[0][0]}, %cluster_ctarank;"


@gluon.constexpr_function
def _moves(outputs, inputs):
    return "\n".join(f"mov.b32 {o}, {i};" for o, i in zip(outputs[0], inputs[0], strict=True))


@gluon.jit
def exchange(x_ptr, y_ptr, BUG: gl.constexpr):
    """Clusters of two CTAs: y[128 i + t] of each is what the other loaded; row = CTA. 128 floats a CTA."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[0]])
    split: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=[[1, 0]])
    rank = gl.inline_asm(_rank, ("=r",), [], gl.int32, is_pure=True)
    i = gl.arange(0, 128, layout)
    mine = gl.load(x_ptr + (gl.program_id(0) * 2 + rank) * 128 + i)
    box = gl.allocate_shared_memory(gl.float32, [128], shared)
    box.store(mine)
    if BUG != "no barrier":
        gl.barrier(cluster=True)
    theirs = gl.inline_asm(_peer_load, ("=f", "r", "r", "r"), [box, i * 4, rank ^ 1], mine.type, is_pure=False)
    # one row for each CTA: only rank 0 would store a tensor that both hold, so its registers get a split type
    rows = gl.inline_asm(_moves, ("=f", "f"), [theirs], gl.distributed_type(gl.float32, [2, 128], split), is_pure=True)
    row = gl.program_id(0) * 2 + gl.arange(0, 2, gl.SliceLayout(1, split))
    gl.store(y_ptr + row[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, split))[None, :], rows)


@gluon.constexpr_function
def pair_layout(TOKENS, DIMS):
    registers = [[0, 1], [0, 8], *([0, 1 << i] for i in range(4, TOKENS.bit_length() - 1)), [8, 0]]
    registers += [[1 << i, 0] for i in range(6, (DIMS // 2).bit_length() - 1)]
    lanes, warps = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [DIMS // 2, TOKENS])


@gluon.jit
def fp8_transposed(v_desc, p_ptr, o_ptr, TOKENS: gl.constexpr, SELECTORS: gl.constexpr):
    """O [8, 128] = P · V with V e4m3: Vᵀ goes through ldmatrix.trans and prmt into wgmma's register operand."""
    G: gl.constexpr = 8
    D: gl.constexpr = 128
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, G, 32])
    v_s = gl.allocate_shared_memory(v_desc.dtype, [TOKENS, D], v_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, v_desc.nbytes_per_cta)
    tma.async_load(v_desc, [0, 0], bar, v_s)
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    heads = gl.arange(0, G, gl.SliceLayout(0, layout))
    p = gl.load(p_ptr + heads[None, :] * TOKENS + tokens[:, None]).to(gl.float8e4nv)
    p_s = gl.allocate_shared_memory(gl.float8e4nv, [G, TOKENS], gl.NVMMASharedLayout(64, 8, 2))
    p = p.reshape([TOKENS // 16, 2, 4, 2, G]).permute([0, 2, 3, 1, 4]).reshape([TOKENS, G])
    p_s.permute([1, 0]).store(p)
    fence_async_shared()
    mbarrier.wait(bar, 0)
    pairs = v_s.reinterpret(gl.int16, [TOKENS, D // 2], gl.NVMMASharedLayout(128, 16, 2)).permute([1, 0])
    even, odd = gl.inline_asm_elementwise(
        SELECTORS, "=r,=r,r,r", [pairs.load(pair_layout(TOKENS, D))], (gl.float8e4nv, gl.float8e4nv), True, 4
    )
    v = gl.join(even, odd).reshape([D // 128, 4, 2, 8, TOKENS // 16, 2, 4, 2, 2])
    v = v.permute([0, 2, 1, 8, 3, 4, 6, 5, 7]).reshape([D, TOKENS])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
    o = warpgroup_mma(v, p_s.permute([1, 0]), gl.zeros([D, G], gl.float32, layout), use_acc=False)
    o = o.reshape([D // 128, 2, 4, 2, 8, G]).permute([0, 2, 1, 4, 3, 5]).reshape([D, G])
    dims = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    gl.store(o_ptr + gl.arange(0, G, gl.SliceLayout(0, o.type.layout))[None, :] * D + dims[:, None], o)


@gluon.jit
def cp_async_copy(x_ptr, y_ptr, BUG: gl.constexpr):
    """A tile through cp.async; rows 48 to 63 are masked off and become zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    inside = (rows[:, None] < 48) & (columns[None, :] < COLUMNS)
    async_copy.async_load(tile, x_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=inside)
    async_copy.commit_group()
    if BUG != "no wait":
        async_copy.wait_group(0)
    store_tile(y_ptr, 0, tile.load(layout))


@gluon.jit
def cp_async_mbarrier(x_ptr, y_ptr):
    """A tile through cp.async, awaited on an mbarrier at which all 128 threads arrive."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=128)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    async_copy.async_load(tile, x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    async_copy.mbarrier_arrive(bar, increment_count=False)
    mbarrier.wait(bar, 0)
    store_tile(y_ptr, 0, tile.load(layout))


@triton.jit
def small_product(a_ptr, b_ptr, c_ptr):
    """C [16, 16] = A [16, 32] · B [32, 16], too small for wgmma."""
    i, k = tl.arange(0, 16), tl.arange(0, 32)
    a = tl.load(a_ptr + i[:, None] * 32 + k[None, :])
    b = tl.load(b_ptr + k[:, None] * 16 + i[None, :])
    tl.store(c_ptr + i[:, None] * 16 + i[None, :], tl.dot(a, b))


@gluon.jit
def unwritten_read(y_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    store_tile(y_ptr, 0, tile.load(layout))


@gluon.jit
def count_arrivals(counter, order):
    """Each program takes a ticket and notes it."""
    ticket = gl.atomic_add(counter, 1)
    gl.store(order + gl.program_id(0), ticket)
