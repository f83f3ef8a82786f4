"""Where, with what and when something was measured."""

from __future__ import annotations

import secrets
import subprocess
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

from hpcattn.machine import machine

__all__ = ["clock_mhz", "git_commit", "is_cuda", "l2_bytes", "new_run_id", "package_version", "provenance"]


def provenance(device: torch.device | str, run_id: str, commit: str | None = None) -> dict[str, str]:
    """The columns of every table in `data/` that say where, with what and when a row was measured."""
    here = machine()
    return {
        "gpu": here.gpu if is_cuda(device) else "cpu",
        "driver": here.driver if is_cuda(device) else "-",
        "torch": here.torch,
        "triton": here.triton,
        "run_id": run_id,
        "date": str(date.today()),
        "commit": commit or git_commit(),
    }


def new_run_id() -> str:
    """A name no other run has: the date and six random hexadecimal digits."""
    return f"{date.today()}-{secrets.token_hex(3)}"


def is_cuda(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def l2_bytes(device: torch.device | str) -> int:
    """Size of the L2 of a CUDA device; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if is_cuda(device) else 0


def clock_mhz() -> float:
    """SM clock of the current GPU now, NaN if it cannot be read. Clocks are read, never set."""
    with suppress(Exception):  # PyTorch asks NVML through an optional package
        return float(torch.cuda.clock_rate())
    gpu = f"--id={torch.cuda.current_device()}"
    try:
        return float(_output_of("nvidia-smi", gpu, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"))
    except ValueError:
        return float("nan")


@cache
def package_version(module: str) -> str:
    """Version of the distribution that installed a top-level module, "-" if none did."""
    return next((version(name) for name in packages_distributions().get(module, ())), "-")


def git_commit() -> str:
    """Short commit of the repository that holds this package, "-" outside one."""
    return _output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "-"
    except (OSError, subprocess.CalledProcessError):
        return "-"
