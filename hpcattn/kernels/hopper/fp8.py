"""Transposed fp8 values: as a register operand of WGMMA (decode), in shared memory (prefill).

Decode multiplies V^T by P^T. WGMMA reads a bf16 tile transposed from shared memory, an fp8 tile never: in memory the
bytes of one feature d lie a row apart, and the operand wants four tokens of one d in a register. `ldmatrix.trans` moves
pairs of bytes, (token, d) and (token, d + 1), so that two of its registers hold two features of four tokens; one PRMT
each sorts them by feature. What order the features and tokens then have is a matter of labels: `transposed` gives the
operand with relabelled rows and tokens, P^T is relabelled the same way (`operand_tokens`), and the product's rows are
named back when they are written (`natural_rows`). No data moves for that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Bytes 0 2 and 1 3 of two registers (tokens t, t + 1 | t + 8, t + 9): even and odd features. The two registers take
# turns in the result, which exchanges token bits 0 and 3: neighbours in P become tokens t and t + 8.
_SORT = gl.constexpr("prmt.b32 $0, $2, $3, 0x6240;\nprmt.b32 $1, $2, $3, 0x7351;")


@gluon.constexpr_function
def _pairs(D, TILE):
    """Layout of the tile seen as pairs of features, `[D / 2, TILE]`, in which a load is `ldmatrix.trans`."""
    registers = [[0, 1], [0, 8], *([0, 1 << i] for i in range(4, TILE.bit_length() - 1)), [8, 0]]
    registers += [[1 << i, 0] for i in range(6, (D // 2).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [D // 2, TILE])


@gluon.jit
def transposed(v, mma: gl.constexpr):
    """e4m3 v `[TILE, D]` in shared memory, 128-byte swizzle, as left operand `[D, TILE]` of products in layout mma."""
    TILE: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[1]
    pairs = v.reinterpret(gl.int16, [TILE, D // 2], gl.NVMMASharedLayout(128, 16, 2)).permute([1, 0])
    even, odd = gl.inline_asm_elementwise(
        _SORT,
        "=r,=r,r,r",
        [pairs.load(_pairs(D, TILE))],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    x = gl.join(even, odd).reshape([D // 128, 4, 2, 8, TILE // 16, 2, 4, 2, 2])
    x = x.permute([0, 2, 1, 8, 3, 4, 6, 5, 7]).reshape([D, TILE])
    return gl.convert_layout(x, gl.DotOperandLayout(0, mma, 4), assert_trivial=True)


@gluon.jit
def operand_tokens(p):
    """P^T `[TILE, N]` with its tokens in the order of the operand."""
    TILE: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return p.reshape([TILE // 16, 2, 4, 2, N]).permute([0, 2, 3, 1, 4]).reshape([TILE, N])


@gluon.constexpr_function
def _part(D, TOKENS, WARPS):
    """As `_pairs`, for `[D / 2, TOKENS]` on some warps, each of which has all tokens of its features."""
    warps = [[16 << i, 0] for i in range(WARPS.bit_length() - 1)]
    registers = [[0, 1], [0, 8], *([0, 1 << i] for i in range(4, TOKENS.bit_length() - 1)), [8, 0]]
    registers += [[1 << i, 0] for i in range(3 + WARPS.bit_length(), (D // 2).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warps, [], [D // 2, TOKENS])


# Prefill: bytes 0 2 and 1 3, tokens left in their order
_SORT_IN_ORDER = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420;\nprmt.b32 $1, $2, $3, 0x7531;")


@gluon.jit
def transpose(v, vt):
    """Write e4m3 v `[TILE, D]`, 128-byte swizzle, to vt `[D, TILE]`, in blocks small enough for 40 registers a thread.

    Rows of vt are features in the order of 8 even, 8 odd ones (`natural_columns`); a store is `stmatrix`.
    """
    TILE: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[1]
    TOKENS: gl.constexpr = 32
    FEATURES: gl.constexpr = 32 * gl.num_warps()
    pairs = v.reinterpret(gl.int16, [TILE, D // 2], gl.NVMMASharedLayout(128, 16, 2))
    for token in gl.static_range(0, TILE, TOKENS):
        for d in gl.static_range(0, D, FEATURES):
            block = pairs.slice(token, TOKENS, dim=0).slice(d // 2, FEATURES // 2, dim=1)
            even, odd = gl.inline_asm_elementwise(
                _SORT_IN_ORDER,
                "=r,=r,r,r",
                [block.permute([1, 0]).load(_part(FEATURES, TOKENS, gl.num_warps()))],
                dtype=(gl.float8e4nv, gl.float8e4nv),
                is_pure=True,
                pack=4,
            )
            x = gl.join(even, odd).reshape([FEATURES // 16, 8, TOKENS // 16, 2, 4, 2, 2])
            x = x.permute([0, 6, 1, 2, 4, 3, 5]).reshape([FEATURES, TOKENS])
            vt.slice(d, FEATURES, dim=0).slice(token, TOKENS, dim=1).store(x)


_PACK = gl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@gluon.jit
def pack(p):
    """Weights `[M, TILE]`, placed as scores are, as words of four e4m3, `[M, TILE / 4]`.

    Words, because fp8 values that live across an iteration take a register each. The four are tokens 0 1 8 9 of the
    thread: the order in which `transpose` leaves the tokens of V.
    """
    M: gl.constexpr = p.shape[0]
    TILE: gl.constexpr = p.shape[1]
    even, odd = gl.split(p.reshape([M, TILE // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]))
    even0, even8 = gl.split(even)
    odd0, odd8 = gl.split(odd)
    x = gl.inline_asm_elementwise(_PACK, "=r,r,r,r,r", [even0, odd0, even8, odd8], dtype=gl.int32, is_pure=True, pack=1)
    return x.reshape([M, TILE // 4])


@gluon.jit
def left_operand(words, mma: gl.constexpr):
    """Packed weights as left operand of products in layout mma; no instructions."""
    M: gl.constexpr = words.shape[0]
    x = gl.join(gl.join(words, words), gl.join(words, words)).reshape([M, 4 * words.shape[1]])
    x = gl.convert_layout(x, gl.DotOperandLayout(0, mma, 4), assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def natural_columns(acc):
    """A product with `transpose`d values, `[M, D]`, with its columns in the order of the features."""
    M: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    x = acc.reshape([M, D // 16, 2, 8]).permute([0, 1, 3, 2]).reshape([M, D])
    return gl.convert_layout(x, _wide(x.type.layout, 1), assert_trivial=True)


@gluon.constexpr_function
def _wide(layout, axis):
    """The same placement, registers ordered so that neighbouring features, along axis, come first: wider stores."""
    registers = sorted(layout.reg_bases, key=lambda base: (base[1 - axis] != 0, base))
    return gl.DistributedLinearLayout(registers, layout.lane_bases, layout.warp_bases, layout.block_bases, layout.shape)


@gluon.jit
def natural_rows(acc):
    """The product `[D, N]` with its rows in the order of the features."""
    D: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    x = acc.reshape([D // 128, 2, 4, 2, 8, N]).permute([0, 2, 1, 4, 3, 5]).reshape([D, N])
    return gl.convert_layout(x, _wide(x.type.layout, 0), assert_trivial=True)
