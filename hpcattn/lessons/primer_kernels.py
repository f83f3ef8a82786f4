"""The kernel that lesson 04a times: transposes through shared memory, with and without bank conflicts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["transpose_rounds"]


@gluon.jit
def transpose_rounds(x, y, rounds, N: gl.constexpr, LAYOUT: gl.constexpr, SHARED: gl.constexpr):
    """Each program takes an [N, N] tile of x and transposes it `rounds` times; y gets the result."""
    i = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    places = gl.program_id(0) * N * N + i * N + j
    box = gl.allocate_shared_memory(x.dtype.element_ty, [N, N], SHARED)
    tile = gl.load(x + places)
    for _ in range(rounds):
        box.store(tile)
        tile = box.permute([1, 0]).load(LAYOUT)
    gl.store(y + places, tile)
