"""Executes compiled Hopper kernels on a CPU: NumPy runs the PTX that Triton and Gluon emit, warp by warp.

    from hpcattn import emulator
    emulator.launch(kernel, (num_tiles,), q, descriptor, o, TILE=64, num_warps=4)   # writes into o

`launch` takes what `kernel[grid](…)` takes, with tensors on the CPU, and compiles for sm_90a without a GPU; `run` takes
a compiled kernel or PTX text. Meant for tiny shapes: each instruction of a warp costs some twenty microseconds.

Modeled: warp specialization (brx.idx, named barriers), mbarriers with phases and transfer bytes, TMA loads and
stores with swizzle and bounds, cp.async, st.async, wgmma on bf16, fp16 and e4m3, mma, ldmatrix and stmatrix,
clusters with distributed shared memory, atomics. Warps run in the order of a schedule that `schedule_seed` picks,
hostile on purpose (`scheduler` lists the kinds); asynchronous copies land late and in pieces, and wgmma reads shared
memory and writes its accumulators only when waited for. So a missing wait, a wrong phase, a stage released too early
or a wrong byte count becomes an error or a wrong result under some seeds; test under several.

Raised, all as `EmulatorError` that names the instruction, its line and the warp: `UnsupportedInstruction`; `Deadlock`,
with who waits for which barrier and phase; `UnwrittenRead`, for shared memory that nothing wrote or whose copy is under
way (and global memory named in `unwritten`); `OutOfBounds`; `BarrierMisuse`.

Not modeled: proxy fences (a forgotten fence.proxy.async goes unnoticed) and any other weakness of memory order; races
between ordinary loads and stores; register limits and spills; time; branches that part the lanes of a warp (an error);
multicast TMA, blocks split over CTAs, im2col and wgmma operands without swizzle (errors); flushing of denormals; the
last bits of approximate functions and of the tensor cores' sums. Clusters run one after another, so a kernel that
spins on another cluster's progress does not end. Registers that wgmma reads are captured when it is issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from hpcattn.emulator import instructions, tensor_cores, transfers, warp_level  # noqa: F401 (register instructions)
from hpcattn.emulator.asynchronous import TensorMap
from hpcattn.emulator.errors import (
    BarrierMisuse,
    Deadlock,
    EmulatorError,
    OutOfBounds,
    UnsupportedInstruction,
    UnwrittenRead,
)
from hpcattn.emulator.memory import LIMIT, GlobalMemory, SharedMemory, Unwritten
from hpcattn.emulator.operands import LANES, build
from hpcattn.emulator.parser import Program, parse
from hpcattn.emulator.scheduler import Cluster, Guarded
from hpcattn.inspection import Compiled, Variant

__all__ = [
    "BarrierMisuse",
    "Deadlock",
    "EmulatorError",
    "OutOfBounds",
    "Result",
    "UnsupportedInstruction",
    "Unwritten",
    "UnwrittenRead",
    "launch",
    "run",
]

_SCRATCH_PARAMETERS = 2  # pointers that Triton appends: global and profile scratch


@dataclass
class Result:
    """What a run did besides writing the tensors."""

    instructions: int = 0  # executed, counted per warp
    unwritten_reads: list[Unwritten] = field(default_factory=list)  # if they were not errors


def launch(kernel: JITFunction, grid: Sequence[int], *args: Any, schedule_seed: int = 0, **kwargs: Any) -> Result:
    """Compile and run what `kernel[grid](*args, **kwargs)` would launch on a Hopper GPU.

    Tensors and the bases of Gluon's TensorDescriptors lie on the CPU. `num_warps`, `num_ctas` and other launch options
    go into `kwargs`, as do the keyword arguments of `run` that are left. Raises what `run` raises.
    """
    options = {k: kwargs.pop(k) for k in ("cluster", "unwritten", "unwritten_reads", "max_steps") if k in kwargs}
    variant = Variant.from_launch(kernel.__name__, kernel, *args, **kwargs)
    names = set(kernel.arg_names)
    bound = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    bound.apply_defaults()
    passed = [bound.arguments[name] for name in kernel.arg_names if variant.signature.get(name) != "constexpr"]
    return run(_compile(variant), grid, passed, schedule_seed=schedule_seed, **options)


def run(
    kernel: str | Compiled | Any,
    grid: Sequence[int],
    args: Sequence[Any],
    *,
    num_warps: int | None = None,
    cluster: int | None = None,
    schedule_seed: int = 0,
    unwritten: Sequence[torch.Tensor | np.ndarray] = (),
    unwritten_reads: str = "error",
    max_steps: int = 20_000_000,
) -> Result:
    """Run a compiled kernel on `grid` (up to three numbers: programs, that is clusters) and write its results.

    kernel: PTX text, an `hpcattn.inspection.Compiled` or what `triton.compile` returns.
    args: the run-time arguments in order, without constexprs: contiguous or strided CPU tensors, contiguous NumPy
      arrays, ints, floats (float32), Gluon TensorDescriptors. Tensors are changed in place.
    num_warps, cluster: warps per CTA and CTAs per cluster; by default what the PTX requires.
    schedule_seed: modulo 4 it picks the kind of schedule (see `hpcattn.emulator.scheduler`).
    unwritten: tensors among `args` whose content counts as unwritten until the kernel writes it.
    unwritten_reads: "error", or "list" to have them in the result.
    max_steps: instructions a cluster may execute.

    Raises EmulatorError (see the package) and TypeError or ValueError for arguments that do not fit the kernel.
    """
    if unwritten_reads not in ("error", "list"):
        raise ValueError(f'unwritten_reads must be "error" or "list", got {unwritten_reads!r}')
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise ValueError(f"grid must hold one to three positive numbers, got {tuple(grid)}")
    program, code = _program(kernel if isinstance(kernel, str) else _ptx(kernel))
    threads = num_warps * LANES if num_warps else program.threads
    if not threads or threads % LANES:
        raise ValueError(f"num_warps is needed: the PTX of {program.name} does not tell the threads per CTA")
    size = cluster or program.cluster or 1
    result, strict = Result(), unwritten_reads == "error"
    memory = GlobalMemory(strict, result.unwritten_reads)
    for tensor in unwritten:
        memory.add(_tensor(tensor), unwritten=True)
    parameters = _parameters(program, args, memory)
    grid = (*map(int, grid), 1, 1)[:3]
    positions = list(product(*map(range, grid)))
    Random(schedule_seed).shuffle(positions)
    for position in positions:
        shared = SharedMemory(size, _shared_bytes(kernel), strict, result.unwritten_reads)
        running = Cluster(
            program,
            code,
            position=position,
            grid=grid,
            size=size,
            num_warps=threads // LANES,
            shared=shared,
            memory=memory,
            parameters=parameters,
            seed=schedule_seed,
        )
        with np.errstate(all="ignore"):
            running.run(max_steps)
        result.instructions += running.steps
    return result


@lru_cache(maxsize=64)
def _program(ptx: str) -> tuple[Program, list[Guarded]]:
    program = parse(ptx)
    return program, [Guarded(build(i, program), i.predicate, i.negated) for i in program.instructions]


_compiled: dict[str, Compiled] = {}


def _compile(variant: Variant) -> Compiled:
    """Compiled once per process for the same types, constants and options."""
    key = repr((variant.fn.cache_key, variant.signature, variant.constexprs, variant.options, variant.attrs))
    if key not in _compiled:
        _compiled[key] = variant.compile()
    return _compiled[key]


def _ptx(kernel: Any) -> str:
    if isinstance(kernel, Compiled):
        return kernel.ptx
    asm = getattr(kernel, "asm", None)
    if asm is None or "ptx" not in asm:
        raise TypeError(f"kernel must be PTX text or a compiled kernel, got {type(kernel).__name__}")
    return asm["ptx"]


def _shared_bytes(kernel: Any) -> int:
    if isinstance(kernel, str):
        return LIMIT
    return kernel.shared_bytes if isinstance(kernel, Compiled) else kernel.metadata.shared


def _tensor(x: torch.Tensor | np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    if tensor.device.type != "cpu":
        raise ValueError(f"tensors must lie on the CPU, got one on {tensor.device}")
    return tensor.detach()


def _parameters(program: Program, args: Sequence[Any], memory: GlobalMemory) -> list[int | TensorMap]:
    values: list[int | TensorMap] = []
    for arg in args:
        if isinstance(arg, torch.Tensor | np.ndarray):
            values.append(memory.add(_tensor(arg))[1])
        elif isinstance(arg, int | np.integer):
            values.append(int(arg))
        elif isinstance(arg, float | np.floating):
            values.append(int(np.float32(arg).view(np.uint32)))
        elif hasattr(arg, "block_shape"):
            values += [_tensor_map(arg, memory), *map(int, arg.shape), *map(int, arg.strides)]
        else:
            raise TypeError(f"cannot pass a {type(arg).__name__} to an emulated kernel")
    extra = len(program.parameters) - len(values)
    if not 0 <= extra <= _SCRATCH_PARAMETERS:
        raise ValueError(f"{program.name} takes {len(program.parameters)} parameters, the arguments make {len(values)}")
    values += [0] * extra
    for value, (name, by_value) in zip(values, program.parameters, strict=True):
        if isinstance(value, TensorMap) != by_value:
            raise TypeError(f"{name} is {'a' if by_value else 'not a'} tensor descriptor in the PTX")
    return values


def _tensor_map(descriptor: Any, memory: GlobalMemory) -> TensorMap:
    """What the driver encodes; the innermost side of a box is at most one swizzle row."""
    base, layout = _tensor(descriptor.base), descriptor.layout
    split = any(map(any, layout.cga_layout or []))  # a block of which each CTA of a cluster loads a part
    if split or layout.fp4_padded or layout.transposed or descriptor.round_f32_to_tf32:
        raise ValueError(f"a descriptor with {layout} is not modeled")
    itemsize, swizzle = base.element_size(), layout.swizzle_byte_width
    box = [int(n) for n in descriptor.block_shape]
    if swizzle:
        box[-1] = min(box[-1], swizzle // itemsize)
    index, address = memory.add(base)
    start = address - memory.starts[index]
    shape, strides = ([int(n) for n in x] for x in (descriptor.shape, descriptor.strides))
    end = start + (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * itemsize
    if end > len(memory.buffers[index][0]):
        raise ValueError(f"a descriptor of shape {shape} and strides {strides} reaches beyond its tensor")
    nan = torch.full((1,), float("nan")).to(base.dtype) if descriptor.padding == "nan" else None
    fill = bytes(itemsize) if nan is None else nan.view(torch.uint8).numpy().tobytes()
    return TensorMap(
        index,
        start,
        tuple(shape),
        tuple(s * itemsize for s in strides),
        tuple(min(n, 256) for n in box),
        itemsize,
        swizzle,
        fill,
    )
