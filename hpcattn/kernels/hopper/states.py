"""Partial softmax states (m, l, acc) of query rows whose keys were split: where they lie, and how they merge.

As in Flash-Decoding (Dao et al., 2023). Scores are in base 2; acc and l are not normalised. A state of n rows is m and
l `[n, 1]` and acc `[n, D]`, in the layout `gl.SliceLayout(0, state_layout(n, D))`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from hpcattn.kernels.portable.common import LN_2, NEG_INF, P_SCALE


@gluon.jit
def visible_length(seq_lens, capacity, request):
    """(length, whether it is one that the block table can hold)."""
    n = gl.load(seq_lens + request)
    valid = (n >= 0) & (n <= capacity)
    return gl.where(valid, n, 0), valid


@gluon.jit
def chunk_tiles(tiles, num_splits, MIN_TILES: gl.constexpr):
    """Tiles per chunk of a request: an equal share, unless that is not worth a CTA."""
    return gl.maximum(gl.cdiv(tiles, num_splits), MIN_TILES)


@gluon.jit
def normalizer(m, l, v_scale, valid):
    """(what acc is multiplied by, natural-log lse): 0 and -inf for rows that have seen nothing, NaN if not `valid`."""
    nan = float("nan")
    seen = l != 0  # NaN, from visible NaN, stays NaN
    l = gl.where(seen, l, 1.0)
    factor = gl.where(seen, v_scale, 0.0) / l
    lse = (m + gl.log2(l)) * LN_2  # m is -inf where nothing was seen
    return gl.where(valid, factor, nan), gl.where(valid, lse, nan)


@gluon.jit
def value_scale(v_scale, head, QUANT: gl.constexpr):
    """What the sum of P V is multiplied by: the scale of V, and P's taken back."""
    if QUANT == "none":
        return 1.0
    elif QUANT == "type0":
        return gl.load(v_scale + head) / P_SCALE
    else:
        return gl.load(v_scale) / P_SCALE


@gluon.constexpr_function
def state_layout(n, D):
    """States `[any number, n, D]` on four warps: a warp holds whole rows while there are four."""
    width = max(1, min(4, n * D // 128))
    lanes = min(32, D // width)
    across = D // (width * lanes)
    return gl.BlockedLayout([1, 1, width], [1, 32 // lanes, lanes], [1, 4 // across, across], [2, 1, 0])


@gluon.constexpr_function
def slots_layout(n, D):
    """The same for states in the workspace: few rows leave the warps to different states."""
    lanes = min(32, D // 4)
    return state_layout(n, D) if n >= 4 else gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [4, 1, 1], [2, 1, 0])


@gluon.jit
def row_ids(n: gl.constexpr, D: gl.constexpr):
    """0, 1, ..., n - 1, placed as the rows of a state."""
    return gl.arange(0, n, gl.SliceLayout(1, gl.SliceLayout(0, state_layout(n, D))))


@gluon.jit
def empty_state(n: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = gl.SliceLayout(0, state_layout(n, D))
    l = gl.zeros([n, 1], gl.float32, layout)
    return l + NEG_INF, l, gl.zeros([n, D], gl.float32, layout)


@gluon.jit
def take_in(m, l, acc, m_new, l_new, acc_new):
    """Merge the states `[b, n, ...]` into one `[n, ...]`."""
    m_all = gl.maximum(m, gl.max(m_new, 0))
    shift = gl.where(m_all == NEG_INF, 0.0, m_all)  # rows that have seen nothing: avoids -inf - -inf
    alpha = gl.exp2(m - shift)
    weight = gl.exp2(m_new - shift[None, :, :])
    return m_all, l * alpha + gl.sum(l_new * weight, 0), acc * alpha + gl.sum(acc_new * weight, 0)


@gluon.jit
def state_offsets(slot, r, num_slots, R: gl.constexpr, D: gl.constexpr):
    """Where acc, m and l of row r of a state lie in the workspace: acc `[slots, R, D]`, then (m, l) `[slots, 2, R]`."""
    at = slot.to(gl.int64) * R + r
    m = num_slots.to(gl.int64) * R * D + at + slot.to(gl.int64) * R
    return at * D, m, m + R


@gluon.jit
def store_state(states, slot, num_slots, first, m, l, acc, R: gl.constexpr):
    """Write the rows from `first` on of a state into the workspace."""
    n: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    r = first + row_ids(n, D)[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))[None, :]
    acc_at, m_at, l_at = state_offsets(slot, r, num_slots, R, D)
    gl.store(states + acc_at + d, acc, mask=r < R)
    gl.store(states + m_at, m, mask=r < R)
    gl.store(states + l_at, l, mask=r < R)


@gluon.jit
def merge_slots(states, slot, count, num_slots, first, n: gl.constexpr, R: gl.constexpr, D: gl.constexpr):
    """Merge the states in slots [slot, slot + count), rows [first, first + n) of each."""
    BLOCK: gl.constexpr = (
        64 // n if 2 <= n <= 8 else 32 // min(n, 32) if n > 8 else 32
    )  # what fits into registers: every round is a trip to L2
    layout: gl.constexpr = slots_layout(n, D)
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    r = first + gl.arange(0, n, gl.SliceLayout(1, flat))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, flat))[None, :]
    l = gl.zeros([n, 1], gl.float32, flat)
    m, acc = l + NEG_INF, gl.zeros([n, D], gl.float32, flat)
    for start in range(0, count, BLOCK):
        i = start + gl.arange(0, BLOCK, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
        acc_at, m_at, l_at = state_offsets(slot + i, r[None, :, :], num_slots, R, D)
        there = (i < count) & (r < R)[None, :, :]
        m_new = gl.load(states + m_at, mask=there, other=NEG_INF)
        l_new = gl.load(states + l_at, mask=there, other=0.0)
        acc_new = gl.load(states + acc_at + d[None, :, :], mask=there, other=0.0)
        m, l, acc = take_in(m, l, acc, m_new, l_new, acc_new)
    rows: gl.constexpr = gl.SliceLayout(0, state_layout(n, D))
    return gl.convert_layout(m, rows), gl.convert_layout(l, rows), gl.convert_layout(acc, rows)


@gluon.jit
def result_row(request, token, head, head_of_group, S: gl.constexpr, G: gl.constexpr, num_kv_heads):
    """Row of q, o and lse, seen as `[batch * S * num_q_heads, ...]`."""
    return ((request.to(gl.int64) * S + token) * num_kv_heads + head) * G + head_of_group


@gluon.jit
def store_result(
    o, lse, request, head, num_kv_heads, first, m, l, acc, v_scale, valid, S: gl.constexpr, G: gl.constexpr
):
    """Normalise and write rows [first, first + n) of a pair: NaN, never truncated attention, if not `valid`."""
    n: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    factor, row_lse = normalizer(m, l, v_scale, valid)
    r = first + row_ids(n, D)[:, None]
    row = result_row(request, r // G, head, r % G, S, G, num_kv_heads)
    d = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))[None, :]
    # a row that has seen nothing is 0, whatever V is where others look
    gl.store(o + row * D + d, gl.where(factor == 0, 0.0, acc * factor).to(gl.bfloat16), mask=r < S * G)
    if lse is not None:
        gl.store(lse + row, row_lse, mask=r < S * G)


@gluon.jit(
    do_not_specialize=["capacity", "num_splits"],
    do_not_specialize_on_alignment=["v_scale", "seq_lens", "lse"],
)
def merge_kernel(
    v_scale, seq_lens, capacity, o, lse, states, num_splits,
    S: gl.constexpr, G: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, QUANT: gl.constexpr, MIN_TILES: gl.constexpr,
):  # fmt: skip
    """Grid (S * G rows, KV heads, requests): merge a row's partial states of the static schedule."""
    r = gl.program_id(0)
    head = gl.program_id(1)
    request = gl.program_id(2)
    num_kv_heads = gl.num_programs(1)
    kv_len, valid = visible_length(seq_lens, capacity, request)
    tiles = gl.cdiv(kv_len, TILE)
    chunks = gl.cdiv(tiles, chunk_tiles(tiles, num_splits, MIN_TILES))
    scale = value_scale(v_scale, head, QUANT)
    gdc_wait()
    if chunks <= 1:
        return  # written by the one CTA that saw all keys
    slot = (request * num_kv_heads + head) * num_splits
    m, l, acc = merge_slots(states, slot, chunks, gl.num_programs(2) * num_kv_heads * num_splits, r, 1, S * G, D)
    store_result(o, lse, request, head, num_kv_heads, r, m, l, acc, scale, valid, S, G)
