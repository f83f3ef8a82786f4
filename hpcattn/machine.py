"""What this machine is: the facts that every notebook and `python -m hpcattn doctor` state."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

__all__ = ["Machine", "machine"]


@dataclass(frozen=True)
class Machine:
    """Hardware and versions; `gpu`, `capability` and `driver` are None where torch finds no CUDA GPU."""

    gpu: str | None
    capability: tuple[int, int] | None
    driver: str | None
    cpu: str
    cores: int
    python: str
    torch: str
    triton: str

    @property
    def hopper(self) -> bool:
        """Whether the Hopper kernels run here, so that notebooks measure live."""
        return self.capability is not None and self.capability[0] == 9

    def __str__(self) -> str:
        where = f"{self.gpu}, driver {self.driver}" if self.gpu else f"{self.cpu}, {self.cores} cores"
        return f"{where}, torch {self.torch}, triton {self.triton}"


@cache
def machine() -> Machine:
    """The machine this process runs on; GPU facts are those of the current CUDA device."""
    gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_name() if gpu else None,
        capability=torch.cuda.get_device_capability() if gpu else None,
        driver=_driver() if gpu else None,
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version("triton"),
    )


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
