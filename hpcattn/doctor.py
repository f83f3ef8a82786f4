"""What this machine can do with the workbook, and what to install for more: `python -m hpcattn doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.language as tl
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hpcattn.kernels.jit import jit
from hpcattn.machine import machine

__all__ = ["Finding", "diagnose", "main"]

FREE_GB = 1  # rendered notebooks, figures and Triton's cache of compiled kernels
REINSTALL = "reinstall: make clean, then make run"
PEERS = {
    "hpc_ops": "build HPC-Ops, https://github.com/Tencent/hpc-ops",
    "flash_attn_3": "build hopper/ of https://github.com/Dao-AILab/flash-attention",
    "flashinfer": "pip install flashinfer-python",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: str  # "ok", "missing" (optional, something is left out) or "broken" (required)
    detail: str
    advice: str = ""


def diagnose() -> list[Finding]:
    """Look at everything; takes a few seconds, since it runs one kernel and compiles another."""
    findings = []
    for name, look in LOOKS.items():
        try:
            findings += look()
        except Exception as error:
            findings.append(Finding(name, "broken", f"{type(error).__name__}: {error}", REINSTALL))
    return findings


def _python() -> Iterator[Finding]:
    wanted = SpecifierSet(importlib.metadata.metadata("hpcattn")["Requires-Python"])
    found = platform.python_version()
    yield _judge(found in wanted, "Python", f"{found} (wanted: {wanted})", f"install Python {wanted}")


def _packages() -> Iterator[Finding]:
    requirements = [Requirement(line) for line in importlib.metadata.requires("hpcattn") or []]
    for wanted in (r for r in requirements if r.marker is None):
        found = _version(wanted.name)
        fits = found is not None and wanted.specifier.contains(found, prereleases=True)
        detail = f"{found or 'not installed'} (wanted: {wanted.specifier or 'any'})"
        yield _judge(fits, wanted.name, detail, f"pip install '{wanted.name}{wanted.specifier}'")
    for extra, use in {"notebooks": "execute and render notebooks", "dev": "run the tests"}.items():
        members = [r.name for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        lacking = [name for name in members if _version(name) is None]
        detail = f"lacks {', '.join(lacking)}" if lacking else f"can {use}"
        yield _judge(not lacking, f"extra {extra}", detail, f"pip install -e '.[{extra}]'", otherwise="missing")


def _gpu() -> Iterator[Finding]:
    here = machine()
    if here.gpu is None:
        detail = f"none that torch {here.torch} can use: kernels run interpreted, figures show recorded data"
        advice = "an NVIDIA GPU (Hopper to measure live), its driver and a CUDA build of torch"
        yield Finding("GPU", "missing", detail, advice)
        return
    facts = f"{here.gpu}, capability {here.capability[0]}.{here.capability[1]}, driver {here.driver}"
    use = "measures live" if here.hopper else "runs the portable kernels; figures show recorded data"
    yield _judge(here.hopper, "GPU", f"{facts}: {use}", "a Hopper GPU to measure live", otherwise="missing")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield _judge(compiler is not None, "C compiler", str(compiler), "apt install gcc: Triton needs it to launch")


@jit
def _double(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, 2 * tl.load(x + i))


def _interpreter() -> Iterator[Finding]:
    unset = "TRITON_INTERPRET" not in os.environ
    detail = "not set" if unset else f"set to {os.environ['TRITON_INTERPRET']!r}: nothing runs compiled"
    yield _judge(
        unset, "TRITON_INTERPRET", detail, "unset TRITON_INTERPRET; kernels on CPU tensors are interpreted anyway"
    )
    x = torch.arange(16.0)
    y = torch.zeros_like(x)
    _double[(1,)](x, y, 16)
    detail = "runs kernels on this CPU" if torch.equal(y, 2 * x) else f"wrong: doubling 0 … 15 gave {y.tolist()}"
    yield _judge(torch.equal(y, 2 * x), "interpreter", detail, REINSTALL)


def _compilation() -> Iterator[Finding]:
    from hpcattn.inspection import compile_kernel

    compiled = compile_kernel(_double, {"x": "*fp32", "y": "*fp32"}, {"N": 1024})
    detail = f"compiles for Hopper without a GPU ({compiled.registers} registers for a small kernel)"
    yield Finding("offline compilation", "ok", detail)


def _peers() -> Iterator[Finding]:
    from hpcattn.bench.peers import report

    for name, (found, detail) in report().items():
        if name in PEERS:
            yield _judge(found, f"peer {name}", detail, PEERS[name], otherwise="missing")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield _judge(free >= FREE_GB, "disk", f"{free:.1f} GB free", f"free {FREE_GB} GB", otherwise="missing")


LOOKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _python,
    "packages": _packages,
    "GPU": _gpu,
    "interpreter": _interpreter,
    "offline compilation": _compilation,
    "peers": _peers,
    "disk": _disk,
}


def _judge(fits: bool, name: str, detail: str, advice: str, otherwise: str = "broken") -> Finding:
    return Finding(name, "ok", detail) if fits else Finding(name, otherwise, detail, advice)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hpcattn doctor`; exit status 1 if something required is broken."""
    parser = argparse.ArgumentParser(
        prog="hpcattn doctor",
        description="Say what this machine can do and what to install for more. "
        "The exit status is 1 only if something required is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(argv)
    findings = diagnose()
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        Console().print(_table(findings))
    return int(any(f.status == "broken" for f in findings))


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "status", "found", Column("for more", overflow="fold"), title=str(machine()))
    colors = {"ok": "green", "missing": "yellow", "broken": "red"}
    for f in findings:
        table.add_row(f.name, Text(f.status, colors[f.status]), Text(f.detail), Text(f.advice))
    return table
