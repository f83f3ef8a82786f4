"""`@jit` interprets and compiles in one process, and repairs what Triton's interpreter gets wrong."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from hpcattn.inspection import record_launches
from hpcattn.kernels import jit as jit_module
from hpcattn.kernels.jit import interpreted, jit

REPAIR_CAN_GO = "Triton's interpreter has been mended: remove the repair from hpcattn/kernels/jit.py"


@jit
def doubled(x):
    return tl.sum(x, 0) * 2


@jit
def sum_kernel(x, o, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i, mask=i < n, other=0.0) + doubled(tl.load(x + i, mask=i < n, other=0.0)))


@jit
def cast_kernel(x, o, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


@jit
def dot_kernel(a, b, o, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_interprets_compiles_and_interprets_again():
    x, o = torch.randn(8), torch.empty(8)
    for _ in range(2):
        o.fill_(torch.nan)
        sum_kernel[1,](x, o, 8, BLOCK=8)
        torch.testing.assert_close(o, x + 2 * x.sum())
        with record_launches() as launches:
            sum_kernel[1,](x, o.fill_(torch.nan), 8, BLOCK=8)
        assert o.isnan().all(), "a recorded launch must not run"
        assert ".target sm_90" in launches[0].compile().ptx


def test_interpretation_leaves_triton_as_it_was():
    before = (tl.load, tl.core.load, tl.sum, interpreter.interpreter_builder.create_dot)
    with pytest.raises(ZeroDivisionError), interpreted():
        assert tl.load is not before[0]
        raise ZeroDivisionError
    assert (tl.load, tl.core.load, tl.sum) == before[:3]
    assert interpreter.interpreter_builder.create_dot == before[3]


def test_casts_round_as_hardware_does():
    x = torch.cat([torch.randn(1000) * 50, torch.tensor([127.04, 500.0, -1e9, 2.0**-9, 0.0, 1e-4, 17.0, -19.0])])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        o = torch.empty(1024, dtype=dtype)
        padded = torch.cat([x, torch.zeros(16)])
        cast_kernel[1,](padded, o, BLOCK=1024)
        expected = (padded.clamp(-448, 448) if dtype == torch.float8_e4m3fn else padded).to(dtype)
        assert torch.equal(o.float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_dot(dtype):
    a, b = (torch.randn(2, 32, 32)).to(dtype)
    o = torch.empty(32, 32)
    dot_kernel[1,](a, b, o, N=32)
    torch.testing.assert_close(o, a.float() @ b.float(), rtol=1e-3, atol=1e-3)


def handle(x: torch.Tensor, dtype, bits) -> interpreter.TensorHandle:
    return interpreter.TensorHandle(x.view(bits).numpy() if bits else x.numpy(), dtype)


def test_stock_interpreter_still_multiplies_bf16_bits():
    a = handle(torch.ones(16, 16).bfloat16(), tl.bfloat16, torch.uint16)
    zero = interpreter.TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
    assert jit_module._stock_dot(a, a, zero, None, 0).data[0, 0] != 16.0, REPAIR_CAN_GO


def test_stock_interpreter_still_truncates_to_bf16():
    x = torch.tensor([1.0 + 3 * 2**-9])  # halfway and a bit: nearest is 1 + 2^-7
    got = jit_module._stock_cast(handle(x, tl.float32, None), tl.bfloat16).data.view(np.int16)
    assert got[0] != x.bfloat16().view(torch.int16).item(), REPAIR_CAN_GO


@pytest.mark.parametrize("value", [127.04, 500.0])
def test_stock_interpreter_still_miscasts_to_e4m3(value):
    x = torch.tensor([value])
    got = jit_module._stock_fp_to_fp(handle(x, tl.float32, None), tl.float8e4nv, interpreter._ir.ROUNDING_MODE.RTNE)
    right = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).item()
    assert got.data[0] != right, REPAIR_CAN_GO
