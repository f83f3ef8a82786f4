"""Tiles of keys or values, page by page, by TMA; and what lies behind the last key of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


@gluon.jit
def page_entries(table_row, capacity, token, TILE: gl.constexpr, PAGE: gl.constexpr):
    """Block table entries of the pages of a tile from `token` on; 0 outside of the table."""
    PAGES: gl.constexpr = max(1, TILE // PAGE)
    entries = ()
    for i in gl.static_range(PAGES):
        at = token + i * PAGE
        entries = entries + (gl.load(table_row + at // PAGE, mask=(at >= 0) & (at < capacity), other=0),)
    return entries


@gluon.jit
def load_tile(
    descriptor, dst, full, entries, slot, visible, head, PAGE: gl.constexpr, VIEW: gl.constexpr, policy: gl.constexpr
):  # fmt: skip
    """Copy a tile, from `slot` of its first page on, page by page: `dst` lies on `full`.

    VIEW: (rows per page, rows per head, columns per head) of a cache seen as a matrix. Pages behind the last of
    `visible` tokens are not the request's: the tile's first is read instead.
    """
    ROWS: gl.constexpr = descriptor.block_shape[0]
    for i in gl.static_range(len(entries)):
        entry = gl.where(i * PAGE < visible, entries[i], entries[0])
        row = entry * VIEW[0] + head * VIEW[1] + slot
        tma.async_load(descriptor, [row, head * VIEW[2]], full, dst.slice(i * ROWS, ROWS, dim=0), cache_policy=policy)


@gluon.jit
def zero_tail(tile, visible):
    """Zero a tile's rows from `visible` on: their weights are zero, but 0 x NaN is not.

    A row is one or two segments of 128 bytes, within which swizzling stays.
    """
    ROWS: gl.constexpr = tile.shape[0]
    SEGMENTS: gl.constexpr = tile.shape[1] * tile.dtype.primitive_bitwidth // 1024
    STEP: gl.constexpr = 4 * gl.num_warps()  # rows at a time, 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = tile.reinterpret(gl.int32, [SEGMENTS * ROWS // STEP, STEP, 32], linear)
    row = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    for i in range(gl.maximum(visible, 0) // STEP, ROWS // STEP):
        for segment in gl.static_range(SEGMENTS):
            part = parts.index(segment * (ROWS // STEP) + i)
            part.store(gl.where((i * STEP + row < visible)[:, None], part.load(layout), 0))
