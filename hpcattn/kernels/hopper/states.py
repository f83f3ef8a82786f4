"""Partial softmax states (m, l, acc) of requests that were split over CTAs: where they lie, and their merge.

As in Flash-Decoding (Dao et al., 2023). Scores are in base 2; acc and l are not normalised.
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


@gluon.jit
def state_offsets(slot, r, num_slots, R: gl.constexpr, D: gl.constexpr):
    """Where acc, m and l of row r of a state lie in the workspace: acc `[slots, R, D]`, then (m, l) `[slots, 2, R]`."""
    at = slot.to(gl.int64) * R + r
    m = num_slots.to(gl.int64) * R * D + at + slot.to(gl.int64) * R
    return at * D, m, m + R


@gluon.jit(
    do_not_specialize=["capacity", "num_splits"],
    do_not_specialize_on_alignment=["v_scale", "seq_lens", "lse"],
)
def merge_kernel(
    v_scale, seq_lens, capacity, o, lse, states, num_splits,
    S: gl.constexpr, G: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, QUANT: gl.constexpr, MIN_TILES: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Grid (S * G rows, KV heads, requests): merge a row's partial states, `BLOCK` at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [4, 1], [1, 0])
    r = gl.program_id(0)
    head = gl.program_id(1)
    request = gl.program_id(2)
    kv_len, valid = visible_length(seq_lens, capacity, request)
    tiles = gl.cdiv(kv_len, TILE)
    chunks = gl.cdiv(tiles, chunk_tiles(tiles, num_splits, MIN_TILES))
    scale = value_scale(v_scale, head, QUANT)
    gdc_wait()
    if chunks <= 1:
        return  # written by the one CTA that saw all keys
    pair = request * gl.num_programs(1) + head
    num_slots = gl.num_programs(2) * gl.num_programs(1) * num_splits
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    m = gl.to_tensor(NEG_INF)
    l = gl.to_tensor(0.0)
    acc = gl.zeros([D], gl.float32, gl.SliceLayout(0, layout))
    for first in range(0, chunks, BLOCK):
        chunk = first + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
        exists = chunk < chunks
        acc_at, m_at, l_at = state_offsets(pair * num_splits + chunk, r, num_slots, S * G, D)
        m_chunk = gl.load(states + m_at, mask=exists, other=NEG_INF)
        l_chunk = gl.load(states + l_at, mask=exists, other=0.0)
        acc_chunk = gl.load(states + acc_at[:, None] + d[None, :], mask=exists[:, None], other=0.0)
        m_new = gl.maximum(m, gl.max(m_chunk, 0))
        shift = gl.where(m_new == NEG_INF, 0.0, m_new)
        alpha = gl.exp2(m - shift)
        weight = gl.exp2(m_chunk - shift)
        l = l * alpha + gl.sum(l_chunk * weight, 0)
        acc = acc * alpha + gl.sum(acc_chunk * weight[:, None], 0)
        m = m_new
    factor, row_lse = normalizer(m, l, scale, valid)
    row = ((request.to(gl.int64) * S + r // G) * gl.num_programs(1) + head) * G + r % G
    gl.store(o + row * D + d, (acc * factor).to(gl.bfloat16))
    if lse is not None:
        gl.store(lse + row, row_lse)
