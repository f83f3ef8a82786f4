"""What a kernel compiles to for Hopper: registers, spills, shared memory, instructions. Needs no GPU.

print(compile_kernel(kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 128}).registers)
with record_launches() as launches:        # kernels are noted, not run
    hpcattn.attention_decode(...)
launches[0].compile().families()
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from hpcattn import kernels
from hpcattn.kernels.jit import PortableFunction

__all__ = ["GLOSSARY", "Compiled", "Variant", "compile_kernel", "record_launches", "variants", "variants_of"]

HOPPER = GPUTarget("cuda", 90, 32)

# Families of SASS opcodes worth counting, in the order of a kernel's data flow.
GLOSSARY = {
    "UTMALDG": "TMA load, global to shared memory",
    "UTMASTG": "TMA store, shared to global memory",
    "LDGSTS": "asynchronous copy, global to shared memory (cp.async)",
    "LDG": "load from global memory",
    "STG": "store to global memory",
    "LDS": "load from shared memory",
    "STS": "store to shared memory",
    "LDSM": "load matrices from shared memory (ldmatrix)",
    "STSM": "store matrices to shared memory (stmatrix)",
    "LD": "load, generic or another CTA's shared memory",
    "ST": "store, generic or another CTA's shared memory",
    "LDL": "load from local memory (spill)",
    "STL": "store to local memory (spill)",
    "HGMMA": "warpgroup tensor-core product, bf16 or fp16 (wgmma)",
    "QGMMA": "warpgroup tensor-core product, fp8 (wgmma)",
    "HMMA": "warp tensor-core product, bf16 or fp16 (mma)",
    "QMMA": "warp tensor-core product, fp8 (mma)",
    "MUFU": "exponential, logarithm, reciprocal",
    "FFMA": "fp32 multiply and add",
    "F2FP": "conversion to a packed narrower float",
    "PRMT": "byte permutation",
    "SHFL": "exchange between the lanes of a warp",
    "VOTE": "ballot of a warp",
    "POPC": "count of set bits",
    "ATOM": "atomic operation or reduction in memory",
    "BAR": "barrier of a CTA",
    "SYNCS": "mbarrier operation",
    "WARPGROUP": "wgmma fence or wait",
    "USETMAXREG": "registers moved between warpgroups (setmaxnreg)",
    "UCGABAR": "barrier of a cluster",
    "MAPA": "address in another CTA's shared memory",
    "ACQBULK": "wait for the preceding grid",
    "PREEXIT": "release of the following grid",
}
_ALIASES = {"UMAPA": "MAPA", "VOTEU": "VOTE", "UCGABAR_ARV": "UCGABAR", "UCGABAR_WAIT": "UCGABAR"}
_ALIASES |= {"ATOMG": "ATOM", "ATOMS": "ATOM", "RED": "ATOM", "REDG": "ATOM", "UPOPC": "POPC"}


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for sm_90a, with what ptxas reports about it."""

    name: str
    ptx: str
    sass: str = field(repr=False)
    cubin: bytes = field(repr=False)
    num_warps: int  # with those that warp specialization adds
    shared_bytes: int
    registers: int  # per thread
    stack_bytes: int  # per thread, as are the spills
    spill_store_bytes: int
    spill_load_bytes: int

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How often each SASS opcode, with its modifiers, occurs in the code."""
        return Counter(m[1] + m[2] for m in map(_INSTRUCTION.match, self.sass.splitlines()) if m)

    def families(self) -> dict[str, int]:
        """Opcode counts without modifiers, for the families of `GLOSSARY` that occur, in its order."""
        count: Counter[str] = Counter()
        for opcode, n in self.opcodes.items():
            count[_family(opcode)] += n
        return {family: count[family] for family in GLOSSARY if count[family]}


_INSTRUCTION = re.compile(r"[^\t]*\t(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[\w.]+)?)")


def opcode_of(line: str) -> str:
    """Of a line of SASS, without modifiers; empty for what is no instruction."""
    match = _INSTRUCTION.match(line)
    return match[1] if match else ""


def count_opcodes(lines: Iterable[str]) -> Counter[str]:
    """How often each opcode, without modifiers, occurs in lines of SASS."""
    return Counter(filter(None, map(opcode_of, lines)))


def branches(lines: Sequence[str]) -> list[tuple[int, int]]:
    """(line of a branch, line of its label) of every branch to a label among the lines of SASS."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"LBB\d+:$", line)}
    found = ((i, labels.get(m[1])) for i, line in enumerate(lines) if (m := re.search(r"BRA (LBB\d+)", line)))
    return [(at, target) for at, target in found if target is not None]


def loops(lines: Sequence[str]) -> list[tuple[int, int]]:
    """(first line, last line) of every loop: a branch backwards."""
    return [(target, at) for at, target in branches(lines) if target < at]


def _family(opcode: str) -> str:
    stem = opcode.partition(".")[0]
    return _ALIASES.get(stem, stem)


@dataclass(frozen=True)
class Variant:
    """A kernel with its argument types and constants, as `compile_kernel` takes them."""

    name: str
    fn: JITFunction
    signature: Mapping[str, Any]
    constexprs: Mapping[str | tuple, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[tuple, Any] | None = None

    @classmethod
    def from_launch(cls, name: str, fn: JITFunction, *args, **kwargs) -> Variant:
        """What `fn[grid](*args, **kwargs)` would compile on a Hopper GPU; the tensors may lie on the CPU."""
        backend = make_backend(HOPPER)
        bind = create_function_from_signature(fn.signature, fn.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        _, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, specialization, options)
        return cls(name, fn, signature, constexprs, options, attrs)

    def compile(self) -> Compiled:
        return compile_kernel(
            self.fn, self.signature, self.constexprs, attrs=self.attrs, name=self.name, **self.options
        )


def compile_kernel(
    fn: JITFunction,
    signature: Mapping[str, Any],
    constexprs: Mapping[str | tuple, Any] | None = None,
    *,
    attrs: Mapping[tuple, Any] | None = None,
    name: str | None = None,
    **options: Any,
) -> Compiled:
    """Compile a Triton or Gluon kernel for sm_90a.

    `signature` maps run-time arguments to Triton types ("*bf16", "i32", "fp32", "tensordesc<…>", tuples of
    these), `constexprs` the others to values. `attrs` holds what is known of arguments, by position; by default
    that every pointer is a multiple of 16. Options are those of a launch: num_warps, num_stages, maxnreg …
    Raises TypeError for anything but a kernel, ValueError if an argument has neither a type nor a value, and
    whatever Triton raises.
    """
    if not isinstance(fn, JITFunction):
        raise TypeError(f"fn must be a Triton or Gluon kernel (is TRITON_INTERPRET set?), got {fn!r}")
    constexprs = dict(constexprs or {})
    missing = [a for a in fn.arg_names if a not in signature and a not in constexprs]
    if missing:
        raise ValueError(f"signature and constexprs of {fn.__name__} leave out {missing}")
    if attrs is None:
        pointers = [i for i, a in enumerate(fn.arg_names) if str(signature.get(a)).startswith("*")]
        attrs = {(i,): [["tt.divisibility", 16]] for i in pointers}
    types = {a: signature.get(a, "constexpr") for a in fn.arg_names}
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(fn, types, constexprs, dict(attrs))
    kernel = triton.compile(source, target=HOPPER, options=options)
    return Compiled(
        name=name or fn.__name__,
        ptx=kernel.asm["ptx"],
        sass=kernel.asm["sass"],
        cubin=kernel.asm["cubin"],
        num_warps=kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
        **_resources(kernel.asm["ptx"], kernel.metadata.enable_fp_fusion),
    )


def _resources(ptx: str, fp_fusion: bool) -> dict[str, int]:
    """Registers, stack and spills in ptxas' words: assembled once more, with the flags of Triton's own call."""
    flags = ["-v", "-lineinfo", "--regAllocOptLevel=2", *([] if fp_fusion else ["--fmad=false"])]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = f"--gpu-name={sm_arch_from_capability(HOPPER.arch)}"
        command = [get_ptxas(HOPPER.arch).path, *flags, target, str(source), "-o", str(source) + ".o"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack_bytes": r"(\d+) bytes stack frame",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
    }
    return {name: max(map(int, re.findall(pattern, report))) for name, pattern in patterns.items()}


@contextmanager
def record_launches() -> Iterator[list[Variant]]:
    """While active, launching a kernel doesn't run it but adds what it would compile to the list."""
    global _recording
    launches: list[Variant] = []

    def run(self, *args, grid, warmup=False, **kwargs):
        launches.append(Variant.from_launch(self.__name__, self, *args, **kwargs))

    with patch.object(JITFunction, "run", run), patch.object(PortableFunction, "run", run):
        _recording = True
        try:
            yield launches
        finally:
            _recording = False


_recording = False


def recording() -> bool:
    """Whether launches are being noted instead of run."""
    return _recording


def variants_of(name: str, call: Callable[[], Any]) -> list[Variant]:
    """The kernels that `call()` launches, as variants named "`name` kernel"."""
    with record_launches() as launches:
        call()
    return [replace(variant, name=f"{name} {variant.name}") for variant in launches]


def variants(*words: str) -> list[Variant]:
    """Every kernel of this package whose name holds all `words`.

    A module under `hpcattn.kernels` lists its kernels in `offline_variants() -> list[Variant]`.
    """
    found = []
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        found += getattr(importlib.import_module(module.name), "offline_variants", list)()
    return [v for v in found if all(word in v.name for word in words)]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hpcattn inspect`."""
    parser = argparse.ArgumentParser(
        prog="hpcattn inspect",
        description="Compile kernels for sm_90a, without a GPU, and show what they use. "
        "One kernel is shown with its instructions.",
    )
    parser.add_argument("words", nargs="*", help="kernels whose name holds all these words (default: every kernel)")
    parser.add_argument("--ptx", action="store_true", help="print the PTX of the one kernel named")
    parser.add_argument("--sass", action="store_true", help="print the machine code of the one kernel named")
    args = parser.parse_args(argv)
    found = variants(*args.words)
    if not found:
        parser.error(f"no kernel's name holds {args.words}; there are {[v.name for v in variants()]}")
    if (args.ptx or args.sass) and len(found) > 1:
        parser.error(f"--ptx and --sass need one kernel; found are {[v.name for v in found]}")
    errors = Console(stderr=True)
    compiled = [v.compile() for v in track(found, "compiling", console=errors, transient=True)]
    if args.ptx or args.sass:
        print(compiled[0].ptx if args.ptx else compiled[0].sass)
        return 0
    console = Console()
    console.print(_resource_table(compiled))
    if len(compiled) == 1:
        console.print(_instruction_table(compiled[0]))
    return 0


def _resource_table(compiled: Sequence[Compiled]) -> Table:
    table = Table(caption="registers, spills and stack per thread; shared memory and warps per CTA")
    table.add_column("kernel")
    for column in ["registers", "spills, B", "stack, B", "shared, B", "warps"]:
        table.add_column(column, justify="right")
    for c in compiled:
        spills = f"{c.spill_store_bytes}/{c.spill_load_bytes}"
        numbers = [c.registers, spills, c.stack_bytes, f"{c.shared_bytes:,}", c.num_warps]
        table.add_row(c.name, *map(str, numbers), style="red" if c.spill_store_bytes else None)
    return table


def _instruction_table(c: Compiled) -> Table:
    table = Table("family", "what it does", "opcodes", caption=f"{sum(c.opcodes.values())} instructions in all")
    for family in c.families():
        members = sorted((o, n) for o, n in c.opcodes.items() if _family(o) == family)
        table.add_row(family, GLOSSARY[family], ", ".join(f"{n} {o}" for o, n in members))
    return table
