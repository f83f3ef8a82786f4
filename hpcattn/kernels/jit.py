"""`@jit`: one kernel object, compiled for CUDA tensors and interpreted for CPU tensors.

Stock Triton decides at import time, by `TRITON_INTERPRET`, whether `triton.jit` gives a compiled or an interpreted
function. Here the decision falls at launch, by where the tensors live, so that one process can interpret a kernel,
compile it offline and show its SASS. Triton's own interpreter does the work.

This is also the one place that repairs three faults of the interpreter in Triton 3.9 (`tests/cpu/test_jit.py` fails
as soon as a newer Triton has mended one, so that its repair can go):

* `tl.dot` multiplies the raw bits of bf16 operands;
* the cast fp32 -> bf16 truncates instead of rounding to nearest even;
* the cast fp32 -> e4m3 drops the carry of the rounding (127.04 -> 64) and does not saturate (500 -> 256).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import contextmanager
from types import SimpleNamespace

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns when unset and 3.10 changes the default

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITCallable, JITFunction

__all__ = ["PortableFunction", "interpreted", "jit"]


class PortableFunction(JITFunction):
    """A `triton.jit` function that is interpreted when its tensor arguments lie on the CPU."""

    def run(self, *args, grid, warmup, **kwargs):
        if not knobs.runtime.interpret and (warmup or _any_cuda((args, kwargs.values()))):
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        with interpreted():
            return interpreter.GridExecutor(_rewritten(self.fn), self.arg_names, grid)(*args, **kwargs)


def _any_cuda(args) -> bool:
    return any(
        x.is_cuda
        if isinstance(x, torch.Tensor)
        else not isinstance(x, str) and isinstance(x, Iterable) and _any_cuda(x)
        for x in args
    )


def jit(fn) -> PortableFunction:
    """Decorate a Triton kernel or device function. Launch as usual: `kernel[grid](...)`."""
    return PortableFunction(fn)


@contextmanager
def interpreted():
    """While active, `triton.language` runs in NumPy, with the repairs above. Not thread-safe: it patches Triton."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    scope.set_attr(JITCallable, "__call__", lambda self, *args, **kwargs: _rewritten(self.fn)(*args, **kwargs))
    scope.set_attr(JITFunction, "__call__", JITCallable.__call__)
    for name, repaired in (("create_dot", _dot), ("cast_impl", _cast), ("create_fp_to_fp", _fp_to_fp)):
        scope.set_attr(_builder, name, repaired)
    try:
        yield
    finally:
        scope.restore()


class _Rewriter(interpreter.FunctionRewriter):
    """Triton's source rewriter, without its habit of copying a whole module's names into the kernel's globals."""

    def _compile_and_exec(self, tree):
        names = self.fn.__globals__
        for name in ("interpreter_semantic", "_InterpreterComparison"):
            names.setdefault(name, getattr(interpreter, name))
        found = {}
        exec(compile(tree, filename=self.filename, mode="exec"), names, found)
        return found[self.fn.__name__]


_cache: dict = {}


def _rewritten(fn):
    if fn not in _cache:
        _cache[fn] = _Rewriter(fn).rewrite_ast()
    return _cache[fn]


_builder = interpreter.interpreter_builder
_stock_dot, _stock_cast, _stock_fp_to_fp = _builder.create_dot, _builder.cast_impl, _builder.create_fp_to_fp


def _dot(a, b, acc, input_precision, max_num_imprecise_acc):
    a, b = (_stock_cast(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _stock_dot(a, b, acc, input_precision, max_num_imprecise_acc)


def _cast(src, dst_type):
    rounded = _round(src, dst_type)
    return _stock_cast(src, dst_type) if rounded is None else rounded


def _fp_to_fp(src, dst_type, rounding_mode):
    rounded = _round(src, dst_type)
    return _stock_fp_to_fp(src, dst_type, rounding_mode) if rounded is None else rounded


def _round(src, dst_type):
    """fp32 -> bf16 or e4m3 as the hardware does it: to nearest even, e4m3 saturating. None for other casts."""
    narrow = {tl.bfloat16: (torch.bfloat16, np.uint16), tl.float8e4nv: (torch.float8_e4m3fn, np.uint8)}
    if src.dtype.scalar != tl.float32 or dst_type.scalar not in narrow:
        return None
    dtype, bits = narrow[dst_type.scalar]
    x = torch.from_numpy(np.ascontiguousarray(src.data))
    x = x.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else x
    return interpreter.TensorHandle(x.to(dtype).view(getattr(torch, bits.__name__)).numpy(), dst_type.scalar)
