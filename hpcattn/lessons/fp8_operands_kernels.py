"""Lesson 05b: a weighted sum of values, O = P V, with three ways to bring Vᵀ to the tensor core.

The product is transposed (Oᵀ += Vᵀ Pᵀ), as in decode: D rows on the long side, G query rows on the short one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

TILE, HEAD_DIM = gl.constexpr(64), gl.constexpr(128)  # tokens and width of a tile of V
P_SCALE = gl.constexpr(256.0)  # lifts P out of e4m3's subnormals (lesson 03)


@gluon.jit
def transposed_bytes(v_s, mma: gl.constexpr):
    """Vᵀ as a register operand, the plain way: ask for the layout and let the compiler find the bytes."""
    return v_s.permute([1, 0]).load(gl.DotOperandLayout(0, mma, 4))


@gluon.constexpr_function
def pair_layout():
    """Where a thread finds Vᵀ as pairs [d / 2, token]: [pair, token] steps for each bit of register, lane and warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32], [8, 0]],  # halves of a register, then the registers
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )


@gluon.constexpr_function
def sort_bytes(even, odd):
    """Two registers of pairs in ($2, $3), the bytes of even d ($0) and of odd d ($1) out."""
    return f"prmt.b32 $0, $2, $3, {even:#06x};\nprmt.b32 $1, $2, $3, {odd:#06x};"


@gluon.jit
def transposed_pairs(v_s, mma: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr):
    """Vᵀ as a register operand through ldmatrix.trans and prmt; its rows and tokens are permuted."""
    pairs = v_s.reinterpret(gl.int16, [TILE, HEAD_DIM // 2], gl.NVMMASharedLayout(128, 16, 2))
    x = pairs.permute([1, 0]).load(pair_layout())
    even, odd = gl.inline_asm_elementwise(
        sort_bytes(EVEN, ODD), "=r,=r,r,r", [x], (gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )
    v = gl.join(even, odd).reshape([4, 2, 8, TILE // 16, 2, 4, 2, 2])  # d: warp, half, g; token: u, t3, t21, t0; e
    v = v.permute([1, 0, 7, 2, 3, 5, 4, 6]).reshape([HEAD_DIM, TILE])  # rows: half, warp, e, g; k: u, t21, t3, t0
    return gl.convert_layout(v, gl.DotOperandLayout(0, mma, 4), assert_trivial=True)


@gluon.jit
def permute_tokens(p, G: gl.constexpr, NEIGHBOURS: gl.constexpr):
    """P in the token order of Vᵀ's columns: k = (u, t21, t3, t0); (u, t21, t0, t3) makes t and t + 8 neighbours."""
    p = p.reshape([TILE // 16, 2, 4, 2, G])  # u, t3, t21, t0
    return p.permute([0, 2, 3, 1, 4] if NEIGHBOURS else [0, 2, 1, 3, 4]).reshape([TILE, G])


@gluon.jit
def restore_rows(o, G: gl.constexpr):
    """Rows of O from the operand's order (half, warp, e, g) back to d = (warp, half, g, e)."""
    return o.reshape([2, 4, 2, 8, G]).permute([1, 0, 3, 2, 4]).reshape([HEAD_DIM, G])


@gluon.jit
def load_stage(v_desc, first, i, num_tiles, v_s, full, STAGES: gl.constexpr):
    stage = i % STAGES
    mbarrier.expect(full.index(stage), v_desc.nbytes_per_cta, pred=i < num_tiles)
    tma.async_load(v_desc, [(first + i) * TILE, 0], full.index(stage), v_s.index(stage), pred=i < num_tiles)


@gluon.jit
def store_p(
    p_ptr, mma: gl.constexpr, dtype: gl.constexpr, G: gl.constexpr, METHOD: gl.constexpr, NEIGHBOURS: gl.constexpr
):
    """P `[G, TILE]` to shared memory, as a decode would store it: from the registers of the scores Sᵀ `[TILE, G]`."""
    tokens = gl.arange(0, TILE, gl.SliceLayout(1, mma))
    rows = gl.arange(0, G, gl.SliceLayout(0, mma))
    p = (gl.load(p_ptr + rows[None, :] * TILE + tokens[:, None]) * P_SCALE).to(dtype)
    if METHOD == "pairs":
        p = permute_tokens(p, G, NEIGHBOURS)
    p_s = gl.allocate_shared_memory(dtype, [G, TILE], gl.NVMMASharedLayout.get_default_for([G, TILE], dtype))
    p_s.permute([1, 0]).store(p)
    fence_async_shared()
    return p_s


@gluon.jit
def store_o(o_ptr, o, G: gl.constexpr):
    rows = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, o.type.layout))
    columns = gl.arange(0, G, gl.SliceLayout(0, o.type.layout))
    start = gl.program_id(0) * G
    gl.store(o_ptr + (start + columns)[None, :] * HEAD_DIM + rows[:, None], o / P_SCALE)


@gluon.jit
def weighted_sum(
    v_desc, p_ptr, o_ptr, num_tiles,
    G: gl.constexpr, STAGES: gl.constexpr, METHOD: gl.constexpr,
    EVEN: gl.constexpr = 0x6420, ODD: gl.constexpr = 0x7531, NEIGHBOURS: gl.constexpr = False,
    FRESH: gl.constexpr = True, RESIDENT: gl.constexpr = False,
):  # fmt: skip
    """O `[programs, G, D]`: each program weighs `num_tiles` tiles of V `[tokens, D]` with the same P `[G, TILE]`.

    METHOD: "in place" (bf16), "bytes" or "pairs" (e4m3). FRESH: a new accumulator for every tile, added in fp32.
    RESIDENT: STAGES tiles are loaded once and used over and over, so that memory plays no part.
    """
    dtype: gl.constexpr = v_desc.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G, 256 // dtype.primitive_bitwidth])
    v_s = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], v_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    first = gl.program_id(0) * (STAGES if RESIDENT else num_tiles)
    for i in gl.static_range(STAGES if RESIDENT else STAGES - 1):
        load_stage(v_desc, first, gl.to_tensor(i), num_tiles, v_s, full, STAGES)
    p_s = store_p(p_ptr, mma, dtype, G, METHOD, NEIGHBOURS)
    acc = gl.zeros([HEAD_DIM, G], gl.float32, mma)
    if RESIDENT:
        for i in gl.static_range(STAGES):
            mbarrier.wait(full.index(i), 0)
    for i in range(num_tiles):
        stage = i % STAGES
        if not RESIDENT:
            load_stage(v_desc, first, i + STAGES - 1, num_tiles, v_s, full, STAGES)
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if METHOD == "in place":
            v = v_s.index(stage).permute([1, 0])
        elif METHOD == "bytes":
            v = transposed_bytes(v_s.index(stage), mma)
        else:
            v = transposed_pairs(v_s.index(stage), mma, EVEN, ODD)
        if FRESH:
            acc += warpgroup_mma(v, p_s.permute([1, 0]), gl.zeros([HEAD_DIM, G], gl.float32, mma), use_acc=False)
        else:
            acc = warpgroup_mma(v, p_s.permute([1, 0]), acc)
        if METHOD != "in place" and not RESIDENT:
            fence_async_shared()  # our reads of the stage come before the copy that will overwrite it
    store_o(o_ptr, restore_rows(acc, G) if METHOD == "pairs" else acc, G)
