"""Causal prefill: warp-specialised and persistent, as FlashAttention-3 (Shah et al., 2024), over pages and block masks.

A work item is BLOCK_M queries of one head (`items`). A producer warp takes items and feeds the others: it lists the
active tiles, looks pages up and issues TMA, ahead of the consumers across the borders of items. Each consumer warpgroup
has 64 query rows. Tiles come from the causal diagonal backwards, so that only the first two of an item need a mask. The
tensor cores work during softmax: K Q^T of tile i + 1 is in flight during the exponentials of tile i, P V of tile i
during the row maxima of tile i + 1.

fp8: two more warps transpose V on chip, once for all consumers, because WGMMA reads fp8 from shared memory only along
the contraction. P V of every tile starts from zero and is added in fp32: the tensor core's own accumulator keeps some
13 bits, and long sums would lose up to 30 % (lesson 07b).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hpcattn.kernels.hopper import fp8
from hpcattn.kernels.hopper.items import TILE, Batch, Inbox
from hpcattn.kernels.hopper.pages import load_tile, page_entries, zero_tail
from hpcattn.kernels.hopper.pipeline import Cursor, Ring
from hpcattn.kernels.hopper.states import normalizer, value_scale
from hpcattn.kernels.portable.common import NEG_INF, P_SCALE


@gluon.aggregate
class Shared:
    """Shared memory. `raw`: fp8 values as they come, v: V, or V^T of fp8; scales: type 0, on the barrier of their K."""

    inbox: Inbox
    q: Ring
    k: Ring
    v: Ring
    raw: object
    scales: object  # float32 [slots, rows of 32, 32]
    tail: gl.shared_memory_descriptor  # barrier of a bf16 V tile that is to be mended before it is used
    turns: gl.shared_memory_descriptor  # barriers: a consumer warpgroup may compute exponentials


@gluon.aggregate
class Results:
    """What consumers read and write beside the tiles."""

    q_scale: object
    scale_request: gl.tensor  # strides of q_scale
    scale_token: gl.tensor
    scale_head: gl.tensor
    k_scale: object
    v_scale: object
    o: gl.tensor
    lse: object
    num_q_heads: gl.tensor
    softmax_scale_log2: gl.tensor


@gluon.aggregate
class Shape:
    """Compile-time sizes; PAGE 0: packed keys. Views as in `pages.load_tile`."""

    G: gl.constexpr
    D: gl.constexpr
    BLOCK_M: gl.constexpr
    PAGE: gl.constexpr
    QUANT: gl.constexpr
    Q_VIEW: gl.tuple
    K_VIEW: gl.tuple
    V_VIEW: gl.tuple
    SCALE_VIEW: object
    TURNS: gl.constexpr  # as in `prefill_launch.Config`
    LAZY: gl.constexpr
    EARLY: gl.constexpr


@gluon.jit
def tile_token(inbox, box, item, i, batch):
    """The first token of an item's i-th tile."""
    if batch.mask is None:
        return item.first - i * TILE
    else:
        return inbox.list_token(box, i)


@gluon.jit
def entries_of(batch, item, token, shape):
    if shape.PAGE == 0:
        return (gl.to_tensor(0),)
    else:
        row = batch.table + item.request.to(gl.int64) * batch.table_stride
        return page_entries(row, item.kv_len, token, TILE, shape.PAGE)


@gluon.jit
def load(descriptor, dst, full, item, entries, token, UNIT: gl.constexpr, shape, VIEW: gl.constexpr):
    """Copy a tile, of which UNIT tokens are a row of what the descriptor describes. Packed tokens are one page's."""
    PAGE: gl.constexpr = shape.PAGE if shape.PAGE > 0 else TILE
    slot = item.row - item.local + token if shape.PAGE == 0 else token % PAGE // UNIT
    load_tile(descriptor, dst, full, entries, slot, item.kv_len - token, item.head // shape.G, PAGE, VIEW, None)


@gluon.jit
def load_k(shared, at, k, k_scale, item, entries, token, shape):
    TYPE0: gl.constexpr = shape.QUANT == "type0"
    BYTES: gl.constexpr = TILE * shape.D * k.dtype.primitive_bitwidth // 8
    SCALE_BYTES: gl.constexpr = shared.scales.shape[1] * 128 if TYPE0 else 0
    dst, full = shared.k.to_fill(at, BYTES + SCALE_BYTES)
    load(k, dst, full, item, entries, token, 1, shape, shape.K_VIEW)
    if TYPE0:
        load(k_scale, shared.scales.index(at.slot), full, item, entries, token, 32, shape, shape.SCALE_VIEW)
    return at.next(shared.k.slots)


@gluon.jit
def load_v(shared, at, at_tail, v, item, entries, token, last, shape):
    """last: whether the tile may reach behind the request's keys; what lies there must not be multiplied."""
    BYTES: gl.constexpr = TILE * shape.D * v.dtype.primitive_bitwidth // 8
    ring = shared.v if shape.QUANT == "none" else shared.raw
    if shape.QUANT == "none" and last and item.kv_len - token < TILE:
        dst = ring.to_write(at)
        mbarrier.expect(shared.tail, BYTES)
        load(v, dst, shared.tail, item, entries, token, 1, shape, shape.V_VIEW)
        mbarrier.wait(shared.tail, at_tail.phase)
        zero_tail(dst, item.kv_len - token)
        at = ring.publish(at)
        at_tail = at_tail.next(1)
    else:
        dst, full = ring.to_fill(at, BYTES)
        load(v, dst, full, item, entries, token, 1, shape, shape.V_VIEW)
        at = at.next(ring.slots)
    return at, at_tail


@gluon.jit
def feed(shared, q, k, v, k_scale, batch, shape):
    """The producer warp: items, and their tiles K0 K1 V0 K2 V1 ..., as far ahead as there is room."""
    Q_BYTES: gl.constexpr = shape.BLOCK_M * shape.D * q.dtype.primitive_bitwidth // 8
    box, at_q, at_k, at_v = Cursor.start(1), Cursor.start(1), Cursor.start(1), Cursor.start(1)
    at_tail = Cursor.start(0)
    inbox = shared.inbox
    count, turn = batch.count(), gl.to_tensor(0)
    index = batch.take(turn)
    while index < count:
        inbox.reserve(box)
        item = batch.item(index, count, inbox, box)
        here = box
        box = inbox.put(box, item)
        token = item.first
        ahead = entries_of(batch, item, token, shape)
        dst, full = shared.q.to_fill(at_q, Q_BYTES)
        tma.async_load(q, [item.head * shape.Q_VIEW[1] + item.row, item.head * shape.Q_VIEW[2]], full, dst)
        at_q = at_q.next(1)
        at_k = load_k(shared, at_k, k, k_scale, item, ahead, token, shape)
        for i in range(item.tiles):
            entries, now = ahead, token
            if i + 1 < item.tiles:
                token = tile_token(inbox, here, item, i + 1, batch)
                ahead = entries_of(batch, item, token, shape)
                at_k = load_k(shared, at_k, k, k_scale, item, ahead, token, shape)
            at_v, at_tail = load_v(shared, at_v, at_tail, v, item, entries, now, i == 0, shape)
        turn += 1
        index = batch.take(turn)
    inbox.reserve(box)
    inbox.end(box)


@gluon.jit
def transpose_values(shared):
    """fp8: V^T of every tile, for all consumers."""
    box, at_raw, at_v = Cursor.start(0), Cursor.start(0), Cursor.start(1)
    item = shared.inbox.open(box)
    while item.tiles > 0:
        for i in range(item.tiles):
            raw = shared.raw.filled(at_raw)
            if i == 0 and item.kv_len - item.first < TILE:
                zero_tail(raw, item.kv_len - item.first)
            dst = shared.v.to_write(at_v)
            fp8.transpose(raw, dst)
            at_v = shared.v.publish(at_v)
            at_raw = shared.raw.release(at_raw)
        box = shared.inbox.release(box)
        item = shared.inbox.open(box)


@gluon.jit
def row_max(s):
    """Maxima of rows of scores `[64, TILE]`: a thread has four independent chains, not one long one."""
    TN: gl.constexpr = s.shape[1]
    x = s.reshape([64, TN // 16, 2, 4, 2]).permute([0, 2, 3, 1, 4]).reshape([64, 2, 4, TN // 8])
    x = gl.max(gl.max(gl.max(x, 3), 1), 1)
    return gl.convert_layout(x, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def own_sum(p):
    """Sums of rows of `[64, TILE]` over what a thread holds, `[64, 4]`: nothing is exchanged."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def maxima(s, m, scale, LAZY: gl.constexpr = False):
    """New maxima of base-2 scores, and what is subtracted from these: 0 in rows that have seen nothing.

    LAZY: a maximum stays until it is exceeded by 8. Weights may then reach 2^8, and acc is seldom rescaled.
    """
    mx = row_max(s) * scale
    m = gl.where(mx > m + 8, mx, m) if LAZY else gl.maximum(m, mx)
    return m, gl.where(m == NEG_INF, 0.0, m)


@gluon.constexpr_function
def _any_changes(outputs, inputs):
    ((any_,),), (factors,) = outputs, inputs
    asm = ["{", ".reg .pred changes, any;", f"setp.ne.f32 changes, {factors[0]}, 0f3F800000;"]
    asm += [f"setp.ne.or.f32 changes, {x}, 0f3F800000, changes;" for x in factors[1:]]
    return "\n".join([*asm, "vote.sync.any.pred any, changes, 0xffffffff;", f"selp.b32 {any_}, 1, 0, any;", "}"])


@gluon.jit
def rescaled(acc, alpha, layout: gl.constexpr):
    """acc times alpha, in the warps in which a factor is not 1. Each decides for itself, on registers only."""
    if gl.inline_asm(_any_changes, ("=r", "f"), [alpha], gl.int32, is_pure=False) != 0:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None]
    return acc


@gluon.jit
def weights(x, l, alpha):
    """Weights of a tile, and the new sums."""
    p = gl.exp2(x)
    rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return p, l * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + own_sum(p)


@gluon.constexpr_function
def _mask(outputs, inputs):
    """-inf in columns behind a row's last one. A thread has columns 8 j + 2 (lane % 4) + (0, 1) of two rows."""
    (scores,) = outputs
    _, last = inputs
    asm = [
        "{",
        ".reg .b32 lane, last0, last1;",
        ".reg .pred behind;",
        "mov.u32 lane, %laneid;",
        "and.b32 lane, lane, 3;",
    ]
    asm += ["shl.b32 lane, lane, 1;", *(f"sub.s32 last{i}, {last[i]}, lane;" for i in range(2))]
    for i, score in enumerate(scores):
        asm += [f"setp.gt.s32 behind, {i // 4 * 8 + i % 2}, last{i // 2 % 2};", f"@behind mov.f32 {score}, 0fFF800000;"]
    return "\n".join([*asm, "}"])


@gluon.constexpr_function
def _in_place(n, more):
    """Constraints of n outputs that are the first n inputs, and more inputs."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * more)


@gluon.jit
def masked(s, item, first, w: gl.constexpr):
    """Scores of the tile from token `first` on; -inf for keys behind a query.

    In PTX, with columns as immediates: the compiler would keep 32 column numbers in registers throughout.
    """
    r = gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)) + 64 * w
    last = item.position - first + gl.minimum(r, item.rows - 1)
    return gl.inline_asm(_mask, _in_place(s.shape[1] // 2, 2), [s, last], s.type, is_pure=False)


@gluon.constexpr_function
def _scale(n, run):
    """Multiply n scores by their columns' scales, which lie `run` to a row of 32; columns as in `_mask`."""
    asm = ["{", ".reg .b32 at;", ".reg .f32 x, y;", "mov.u32 at, %laneid;", "and.b32 at, at, 3;"]
    asm += [f"mad.lo.u32 at, at, 8, ${2 * n};"]
    for i in range(0, n, 4):
        row, column = divmod(2 * i, run)
        asm += [f"ld.shared.v2.f32 {{x, y}}, [at + {row * 128 + column * 4}];"]
        asm += [f"mul.f32 ${i + k}, ${i + k}, {xy};" for k, xy in enumerate("xyxy")]
    return "\n".join([*asm, "}"])


@gluon.jit
def scaled(s, scales, shape):
    """Scores times the type 0 K scales of their tile; in PTX, to hold few scales at a time.

    TMA may write there again without a fence once the slot is released: what was read is in registers.
    """
    N: gl.constexpr = s.shape[1] // 2
    return gl.inline_asm(_scale(N, min(shape.PAGE, 32)), _in_place(N, 1), [s, scales], s.type, is_pure=False)


@gluon.jit
def scores_of(shared, st, at_k, shape, PENDING: gl.constexpr):
    """Scores once they are computed, with PENDING later products still in flight; their K may be released."""
    s = warpgroup_mma_wait(PENDING, deps=[st])
    if shape.QUANT == "type0":
        s = scaled(s, shared.scales.index(at_k.slot), shape)
    return s


@gluon.jit
def issue_qk(q, shared, at_k, fresh):
    k = shared.k.tiles.index(at_k.slot)
    return warpgroup_mma(q, k.permute([1, 0]), fresh, use_acc=False, is_async=True)


@gluon.jit
def issue_pv(p, shared, at_v, acc, fresh, alpha, shape, layout: gl.constexpr):
    """P V, added to acc by the tensor cores (bf16), or on its own (fp8: `accumulate`). p: `packed`."""
    v = shared.v.tiles.index(at_v.slot)
    if shape.QUANT == "none":
        if not shape.LAZY:
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None]
        t = warpgroup_mma(p, v, acc, is_async=True)
    else:
        t = warpgroup_mma(fp8.left_operand(p, layout), v.permute([1, 0]), fresh, use_acc=False, is_async=True)
    return t


@gluon.jit
def accumulate(acc, t, alpha, shape, layout: gl.constexpr):
    if shape.QUANT == "none":
        return t
    else:
        return acc * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None] + t


@gluon.jit
def packed(p, shape, layout: gl.constexpr):
    """P as left operand of P V: bf16, or e4m3 four to a word."""
    if shape.QUANT == "none":
        return gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    else:
        return fp8.pack(p)


@gluon.jit
def row_scale(results, item, w: gl.constexpr, shape, rows: gl.constexpr):
    """`[64]`: what turns q.k into base-2 scores."""
    scale = gl.full([64], results.softmax_scale_log2, gl.float32, rows)
    if shape.QUANT != "none":
        r = gl.arange(0, 64, rows) + 64 * w
        # padded scales count a request's tokens from 0, packed ones (request stride 0) from its start
        token = gl.where(results.scale_request > 0, item.local, item.row) + r
        at = results.q_scale + item.request.to(gl.int64) * results.scale_request
        at += item.head.to(gl.int64) * results.scale_head + token.to(gl.int64) * results.scale_token
        scale *= gl.load(at, mask=(r < item.rows) & (item.valid != 0), other=1.0)
    if shape.QUANT == "type1":
        scale *= gl.load(results.k_scale)
    # 0 would turn -inf into NaN; a negative one the maxima into minima
    return gl.where(scale > 0, scale, gl.where(scale == 0, 1e-30, float("nan")))


@gluon.jit
def store(results, item, w: gl.constexpr, m, l, acc, shape):
    """Normalise and write a warpgroup's rows of an item."""
    D: gl.constexpr = shape.D
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, 64, rows) + 64 * w
    l = gl.convert_layout(gl.sum(l, 1), rows)
    if shape.QUANT != "none":
        l /= P_SCALE
    l = gl.where(r < item.rows, l, 1.0)  # rows of nobody may hold anything
    scale = value_scale(results.v_scale, item.head // shape.G, shape.QUANT)
    factor, lse = normalizer(gl.convert_layout(m, rows), l, scale, item.valid != 0)
    # a row that has seen nothing is 0, whatever V is where others look
    o = gl.where((factor == 0)[:, None], 0.0, acc * factor[:, None]).to(gl.bfloat16)
    if shape.QUANT != "none":
        o = fp8.natural_columns(o)
    row = gl.arange(0, 64, gl.SliceLayout(1, o.type.layout)) + 64 * w
    at = ((item.row + row).to(gl.int64) * results.num_q_heads + item.head) * D
    column = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
    gl.store(results.o + at[:, None] + column[None, :], o, mask=(row < item.rows)[:, None])
    if results.lse is not None:
        at = (item.row + r).to(gl.int64) * results.num_q_heads + item.head
        gl.store(results.lse + at, lse, mask=r < item.rows)


@gluon.jit
def attend(shared, results, shape, w: gl.constexpr):
    """Consumer warpgroup w: 64 rows of every item."""
    FP8: gl.constexpr = shape.QUANT != "none"
    K_DIM: gl.constexpr = 32 if FP8 else 16
    OFFSET: gl.constexpr = 8.0 if FP8 else 0.0  # 256 times the weights: e4m3 reaches 448
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, K_DIM])
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.D, K_DIM])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    fresh = gl.zeros([64, TILE], gl.float32, mma)
    fresh_o = gl.zeros([64, shape.D], gl.float32, out)
    inbox = shared.inbox
    box, at_q, at_k, at_v = Cursor.start(0), Cursor.start(0), Cursor.start(0), Cursor.start(0)
    item = inbox.open(box)
    at_turn = Cursor.start(1 - w)  # warpgroup 0 begins
    while item.tiles > 0:
        scale = row_scale(results, item, w, shape, rows)
        m = gl.full([64], NEG_INF, gl.float32, rows)
        l = own_sum(fresh)
        acc = fresh_o
        q = shared.q.filled(at_q).slice(64 * w, 64, dim=0)
        shared.k.filled(at_k)
        s = scores_of(shared, issue_qk(q, shared, at_k, fresh), at_k, shape, 0)
        at_k = shared.k.release(at_k)
        s = masked(s, item, item.first, w)
        m, shift = maxima(s, m, scale)
        x, alpha = s * scale[:, None] - (shift - OFFSET)[:, None], gl.full([64], 1.0, gl.float32, rows)
        shared.k.filled(at_k, item.tiles > 1)
        shared.v.filled(at_v)
        for i in range(item.tiles - 1):
            # one basic block up to the wait: exponentials, packing and the issue of products interleave
            st = issue_qk(q, shared, at_k, fresh)
            p, l = weights(x, l, alpha)
            p = packed(p, shape, out)
            if shape.EARLY:
                s = scores_of(shared, st, at_k, shape, 0)
            t = issue_pv(p, shared, at_v, acc, fresh_o, alpha, shape, out)
            if shape.TURNS:
                mbarrier.wait(shared.turns.index(w), at_turn.phase)
            if not shape.EARLY:
                s = scores_of(shared, st, at_k, shape, 1)
            at_k = shared.k.release(at_k)
            if i == 0:
                again = inbox.read(box)
                s = masked(s, again, again.second, w)
            before, old = alpha, m
            m, shift = maxima(s, m, scale, shape.LAZY)
            alpha = gl.exp2(old - shift)
            # waits end the block, which keeps the maxima above the wait for P V
            shared.k.filled(at_k, i + 2 < item.tiles)
            shared.v.filled(at_v.next(shared.v.slots))
            t, _ = warpgroup_mma_wait(0, deps=[t, p])
            at_v = shared.v.release(at_v)
            acc = accumulate(acc, t, before, shape, out)
            if shape.LAZY:
                acc = rescaled(acc, alpha, out)
            # not the scores live on, which would have to move and make room for the next ones
            x = s * scale[:, None] - (shift - OFFSET)[:, None]
            if shape.TURNS:
                mbarrier.arrive(shared.turns.index(1 - w))
                at_turn = at_turn.next(1)
        at_q = shared.q.release(at_q)
        p, l = weights(x, l, alpha)
        p = packed(p, shape, out)
        t, _ = warpgroup_mma_wait(0, deps=[issue_pv(p, shared, at_v, acc, fresh_o, alpha, shape, out), p])
        at_v = shared.v.release(at_v)
        acc = accumulate(acc, t, alpha, shape, out)
        store(results, inbox.read(box), w, m, l, acc, shape)
        box = inbox.release(box)
        item = inbox.open(box)


@gluon.jit(
    do_not_specialize=[
        "scale_request",
        "scale_token",
        "scale_head",
        "q_pad",
        "table_stride",
        "capacity",
        "mask_request",
        "mask_head",
        "mask_row",
        "mask_rows",
        "mask_columns",
        "num_q_heads",
    ],  # fmt: skip
    do_not_specialize_on_alignment=[
        "q_scale",
        "k_scale",
        "v_scale",
        "block_table",
        "seq_lens",
        "cu_seqlens_q",
        "mask",
        "lse",
    ],
)
def prefill_kernel(
    q, k, v, k_scale, q_scale, v_scale, scale_request, scale_token, scale_head, q_pad, cu_seqlens_q, seq_lens,
    block_table, table_stride, capacity, mask, mask_request, mask_head, mask_row, mask_rows, mask_columns, order,
    header, num_q_heads, o, lse, softmax_scale_log2,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, QUANT: gl.constexpr, Q_VIEW: gl.constexpr,
    K_VIEW: gl.constexpr, V_VIEW: gl.constexpr, SCALE_VIEW: gl.constexpr, GROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, WORDS: gl.constexpr, REGISTERS: gl.constexpr,
    OTHERS: gl.constexpr,
    TURNS: gl.constexpr, LAZY: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as there are multiprocessors, or items. GROUPS: consumer warpgroups."""
    FP8: gl.constexpr = QUANT != "none"
    BLOCK_M: gl.constexpr = 64 * GROUPS
    shape = Shape(G, D, BLOCK_M, PAGE, QUANT, Q_VIEW, K_VIEW, V_VIEW, SCALE_VIEW, TURNS, LAZY, EARLY)
    batch = Batch(
        cu_seqlens_q, seq_lens, capacity, block_table, table_stride, q_pad, mask, mask_request, mask_head, mask_row,
        mask_rows, mask_columns, order, header, num_q_heads, BLOCK_M,
    )  # fmt: skip
    dtype: gl.constexpr = q.dtype
    values: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2) if FP8 else v.layout
    tail = mbarrier.allocate_mbarrier()
    mbarrier.init(tail, count=1)
    turns = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    shared = Shared(
        Inbox.allocate(WORDS, GROUPS + 1 if FP8 else GROUPS),
        Ring.allocate(dtype, 1, BLOCK_M, D, q.layout, GROUPS),
        Ring.allocate(dtype, K_SLOTS, TILE, D, k.layout, GROUPS),
        Ring.allocate(dtype, V_SLOTS, D if FP8 else TILE, TILE if FP8 else D, values, GROUPS),
        Ring.allocate(dtype, V_SLOTS, TILE, D, v.layout) if FP8 else None,
        gl.allocate_shared_memory(gl.float32, [K_SLOTS, TILE // min(PAGE, 32), 32], gl.NVMMASharedLayout(0, 32, 2))
        if QUANT == "type0"
        else None,
        tail,
        turns,
    )
    results = Results(
        q_scale, scale_request, scale_token, scale_head, None if QUANT == "type0" else k_scale, v_scale, o, lse,
        num_q_heads, softmax_scale_log2,
    )  # fmt: skip
    feeding = (shared, q, k, v, k_scale if QUANT == "type0" else None, batch, shape)
    if FP8 and GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (shared, results, shape, 0)),
                (attend, (shared, results, shape, 1)),
                (transpose_values, (shared,)),
                (feed, feeding),
            ],
            [4, 2, 1],
            [REGISTERS, OTHERS, OTHERS],
        )
    elif FP8:
        gl.warp_specialize(
            [(attend, (shared, results, shape, 0)), (transpose_values, (shared,)), (feed, feeding)],
            [2, 1],
            [OTHERS, OTHERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [(attend, (shared, results, shape, 0)), (attend, (shared, results, shape, 1)), (feed, feeding)],
            [4, 1],
            [REGISTERS, OTHERS],
        )
    else:
        gl.warp_specialize([(attend, (shared, results, shape, 0)), (feed, feeding)], [1], [OTHERS])
