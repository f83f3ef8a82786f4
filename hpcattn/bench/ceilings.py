"""What the machine can do at best, measured: bandwidths, matrix rates, latencies and the floors of the timers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import triton.language as tl
from torch import Tensor

from hpcattn.bench import records
from hpcattn.bench.provenance import is_cuda, l2_bytes
from hpcattn.bench.timing import EMPTY, Timing, measure, timer_for
from hpcattn.kernels.jit import jit

__all__ = ["Ceilings", "measure_ceilings"]

MB = 1 << 20
CHASE_STEPS = 4096
CHASE_STRIDE = 256  # bytes
MATMUL_SIZE = {"cuda": 8192, "cpu": 128}
STREAM_BYTES = {"cuda": 2048 * MB, "cpu": 16 * MB}


@dataclass(frozen=True)
class Ceilings:
    """The roofline of one GPU; `tb_per_s` is the copy bandwidth, bytes read and written."""

    tb_per_s: float
    tflop_bf16: float
    tflop_fp8: float

    def tflop_per_s(self, dtype: str) -> float:
        """Peak matrix rate for "bf16" or "fp8" operands."""
        return {"bf16": self.tflop_bf16, "fp8": self.tflop_fp8}[dtype]

    @classmethod
    def load(cls, path: Path | None = None) -> Ceilings:
        """The newest recorded ceilings, by default those of the H200. Raises ValueError if a quantity is missing."""
        path = path or records.DATA / "h200" / "ceilings.csv"
        return cls.of(records.load(path, table="ceilings"))

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Ceilings:
        """From rows of table `ceilings`; a machine without fp8 matrix units falls back on bf16."""
        newest = frame.groupby("quantity").value.last()
        if missing := {"dram_copy", "matmul_bf16"} - set(newest.index):
            raise ValueError(f"ceilings must hold {sorted(missing)}")
        return cls(newest.dram_copy, newest.matmul_bf16, newest.get("matmul_fp8", newest.matmul_bf16))


def measure_ceilings(device: torch.device | str) -> Iterator[dict]:
    """Rows of table `ceilings` without their provenance. On a CPU: its copy bandwidth, matrix rate and timer floors."""
    kind = torch.device(device).type
    how = timer_for(device).name
    copied, read = _stream_calls(device, STREAM_BYTES[kind])
    moved = STREAM_BYTES[kind]
    yield _row("dram_copy", moved / _steady(copied, device).median_us * 1e-6, "TB/s", f"negation, {how}")
    yield _row("dram_read", moved / 2 / _steady(read, device).median_us * 1e-6, "TB/s", f"reduction, {how}")
    n = MATMUL_SIZE[kind]
    for name, call in _matmul_calls(device, n):
        timing = _steady(call, device)
        yield _row(name, 2 * n**3 / timing.median_us * 1e-6, "TFLOP/s", f"{n} x {n} x {n}, {how}")
        if is_cuda(device):
            yield _row(f"{name}_clock", timing.sm_clock_mhz, "MHz", "read right after the products")
    for protocol in ("steady", "single", "host"):
        yield _row(f"{protocol}_floor", _floor(protocol, device).floor_us, "us", f"{EMPTY} kernel, {how}")
    if is_cuda(device):
        yield from _gpu_rows(device)


def _row(quantity: str, value: float, unit: str, method: str) -> dict:
    return {"quantity": quantity, "value": value, "unit": unit, "method": method}


def _floor(protocol: str, device) -> Timing:
    timer = timer_for(device)
    return measure(protocol, {"none": [timer.empty()]}, timer)["none"]


def _gpu_rows(device) -> Iterator[dict]:
    properties = torch.cuda.get_device_properties(device)
    yield _row("l2_size", l2_bytes(device) / MB, "MB", "device properties")
    yield _row("sm_count", properties.multi_processor_count, "SMs", "device properties")
    timing = _floor("steady", device)
    yield _row("sm_clock", timing.sm_clock_mhz, "MHz", "read right after a measurement")
    for name, size in (("l2_latency", CHASE_STEPS * CHASE_STRIDE), ("dram_latency", 2048 * MB)):
        yield _row(name, chase_ns(size, device), "ns", f"one thread, random cycle through {size // MB} MB")


def _steady(call: Callable, device) -> Timing:
    """One call in the steady protocol."""
    return measure("steady", {"call": [call]}, timer_for(device), replays=5, warmup=1)["call"]


def _stream_calls(device, size: int) -> tuple[Callable, Callable]:
    """A kernel that reads and writes `size` bytes in all, and a reduction that reads half as many.

    `Tensor.copy_` will not do: in a CUDA graph it becomes a node for the copy engine, which is slower than a kernel.
    """
    source = torch.ones(size // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target), lambda: source.sum()


def _matmul_calls(device, n: int) -> Iterator[tuple[str, Callable]]:
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    yield "matmul_bf16", lambda: torch.matmul(a, b, out=c)
    if is_cuda(device) and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        yield "matmul_fp8", lambda: torch._scaled_mm(a8, b8, **options)


@jit
def chase_kernel(links, place, steps):
    """Follow a chain of indices from where the last walk ended; every load waits for the one before it."""
    at = tl.load(place)
    for _ in range(steps):
        at = tl.load(links + at, cache_modifier=".cg")  # not from the L1
    tl.store(place, at)


def random_cycle(elements: int, stride: int, device: torch.device | str) -> Tensor:
    """int64 `[elements]` of indices: one random cycle from 0 through every `stride`-th element."""
    places = torch.randperm(elements // stride, device=device) * stride
    links = torch.zeros(elements, dtype=torch.int64, device=device)
    links[places] = places.roll(-1)
    return links


def chase_ns(size: int, device: torch.device | str, steps: int = CHASE_STEPS) -> float:
    """Latency of one dependent load in a random cycle through `size` bytes, one element in every `CHASE_STRIDE`.

    A cycle of `steps` elements is walked round and round and stays in the L2; of a long one every walk sees a new part,
    which comes from DRAM.
    """
    links = random_cycle(size // 8, CHASE_STRIDE // 8, device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    timer = timer_for(device)
    walk = timer.capture([lambda: chase_kernel[(1,)](links, place, steps, num_warps=1)])
    return 1e3 * float(np.median([timer.elapsed_us([walk])[0] for _ in range(5)])) / steps
