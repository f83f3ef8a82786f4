"""Kernels of lesson 07b: one tile of fp8 V transposed in shared memory, byte by byte or by matrices."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from hpcattn.kernels.hopper import fp8


@gluon.jit
def transpose_bytes(v, vt):
    """v `[TILE, D]` to vt `[D, TILE]` in a plain layout: runs of 16 tokens of one feature, which are stored at once."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [gl.num_warps(), 1], [1, 0])
    vt.store(v.permute([1, 0]).load(layout))


@gluon.jit
def transpose_kernel(v_desc, out, METHOD: gl.constexpr):
    """One tile `[TILE, D]`: out `[D, TILE]`, bytes. METHOD: "bytes" or "matrices"."""
    TILE: gl.constexpr = v_desc.block_shape[0]
    D: gl.constexpr = v_desc.block_shape[1]
    v = gl.allocate_shared_memory(v_desc.dtype, [TILE, D], v_desc.layout)
    vt = gl.allocate_shared_memory(v_desc.dtype, [D, TILE], gl.NVMMASharedLayout(128, 8, 2))
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, v_desc.nbytes_per_cta)
    tma.async_load(v_desc, [0, 0], full, v)
    mbarrier.wait(full, 0)
    if METHOD == "bytes":
        transpose_bytes(v, vt)
    else:
        fp8.transpose(v, vt)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, D, gl.SliceLayout(1, layout))
    column = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * TILE + column[None, :], vt.load(layout))
