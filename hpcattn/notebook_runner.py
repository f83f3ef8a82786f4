"""Execute every notebook, render it to HTML and draw the figures: `python -m hpcattn run`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from hpcattn.machine import machine

__all__ = ["Outcome", "Runner", "discover", "main"]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook, or of the figures."""

    name: str
    seconds: float
    mode: str  # "live", "recorded" or "not stated"
    error: str  # empty if it passed
    result: str  # path of the rendered notebook

    @property
    def cells(self) -> list[str]:
        """A table row."""
        verdict = "passed" if not self.error else f"failed: {self.error}"
        return [self.name, f"{self.seconds:.1f}", self.mode, verdict, self.result]


COLUMNS = ["notebook", "seconds", "live or recorded", "verdict", "result"]


class _ThisInterpreter(AsyncKernelManager):
    """Starts kernels with this interpreter, whatever kernelspecs are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        options = ["-f", "{connection_file}", "--HistoryManager.enabled=False"]
        argv = [sys.executable, "-m", "ipykernel_launcher", *options]
        return KernelSpec(argv=argv, language="python", display_name="hpcattn")


@dataclass(frozen=True)
class Runner:
    """Executes notebooks, at most `jobs` at once, and renders them under `out`/html."""

    out: Path
    jobs: int = 1
    timeout: float = 600.0  # seconds for one notebook
    in_place: bool = False  # write the outputs of notebooks that pass back into them

    async def run(self, notebooks: Sequence[Path], progress: Progress) -> list[Outcome]:
        """Outcomes in the order of `notebooks`; each is announced as it becomes known."""
        # asyncio.run stops everything at Ctrl-C; nbclient's own handlers would stop one notebook
        asyncio.get_running_loop().add_signal_handler = lambda *_: None
        slots = asyncio.Semaphore(self.jobs)

        async def one(path: Path) -> Outcome:
            async with slots:
                outcome = await self._run_one(path, progress)
                announce(progress.console, outcome)
                return outcome

        return list(await asyncio.gather(*map(one, notebooks)))

    async def _run_one(self, path: Path, progress: Progress) -> Outcome:
        begin = time.monotonic()
        name, result, error, notebook = _name(path), "", "", None
        try:
            notebook = nbformat.read(path, as_version=4)
            error = await self._execute(notebook, path, progress)
            page = self.out / "html" / f"{name}.html"
            await asyncio.to_thread(_render, notebook, page)
            result = str(page)
            if self.in_place and not error:
                nbformat.write(_tidy(notebook), path)
        except Exception as failure:  # an unreadable notebook, a template that fails
            error = error or _one_line(failure)
        mode = _mode(notebook) if notebook else "not stated"
        return Outcome(name, time.monotonic() - begin, mode, error, result)

    async def _execute(self, notebook: NotebookNode, path: Path, progress: Progress) -> str:
        """Run all cells in the notebook's folder; returns what went wrong, in which code cell."""
        code = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and cell.source.strip()]
        task = progress.add_task(_name(path), total=len(code))
        current = 0

        def started(cell: NotebookNode, cell_index: int) -> None:
            nonlocal current
            progress.update(task, completed=current)
            current = code.index(cell_index) + 1

        deadline = time.monotonic() + self.timeout
        client = NotebookClient(
            notebook,
            kernel_manager_class=_ThisInterpreter,
            resources={"metadata": {"path": str(path.parent)}},
            timeout_func=lambda cell: max(1, deadline - time.monotonic()),
            record_timing=False,
            on_cell_execute=started,
        )
        log = self.out / "logs" / f"{_name(path)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as file:
                await client.async_execute(env=self._environment(), stdout=file, stderr=file)
            return ""
        except CellExecutionError as error:
            return f"cell {current}: {error.ename}: {error.evalue}".splitlines()[0]
        except CellTimeoutError:
            return f"cell {current}: the notebook took more than {self.timeout:g} s (see --timeout)"
        except Exception as error:  # a kernel that dies or doesn't start
            return f"cell {current}: {_one_line(error)}, see {log}"
        finally:
            progress.remove_task(task)

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = max(1, machine().cores // self.jobs)
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}


def discover(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """Lessons, then their solutions, in order; with `only`, those whose file names start with one of these.

    Raises ValueError for a start that no notebook has.
    """
    found = sorted(folder.glob("*.ipynb")) + sorted(folder.glob("solutions/*.ipynb"))
    if unknown := [prefix for prefix in only if not any(p.name.startswith(prefix) for p in found)]:
        raise ValueError(f"no notebook starts with {unknown}; there are {[p.name for p in found]}")
    return [p for p in found if not only or p.name.startswith(tuple(only))]


def _name(path: Path) -> str:
    return f"solutions/{path.stem}" if path.parent.name == "solutions" else path.stem


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _mode(notebook: NotebookNode) -> str:
    """What `hpcattn.lessons.begin` stated in the metadata of its output."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    stated = [output.metadata["hpcattn"]["mode"] for output in outputs if "hpcattn" in output.get("metadata", {})]
    return stated[0] if stated else "not stated"


def _render(notebook: NotebookNode, page: Path) -> None:
    html, _ = HTMLExporter().from_notebook_node(notebook, resources={"metadata": {"name": page.stem}})
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html)


def _tidy(notebook: NotebookNode) -> NotebookNode:
    """Drop metadata that changes from machine to machine."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = NotebookNode(kernelspec=kernel, language_info={"name": "python"})
    return notebook


def draw_figures(folder: Path) -> Outcome:
    """Draw every figure from the records."""
    begin, error = time.monotonic(), ""
    try:
        from hpcattn.bench import figures

        figures.main(["--out", str(folder)])
    except Exception as failure:
        error = _one_line(failure)
    return Outcome("figures", time.monotonic() - begin, "recorded", error, str(folder))


def announce(console: Console, outcome: Outcome) -> None:
    style = "red" if outcome.error else "green"
    console.print(Text(f"{outcome.name}: {outcome.cells[3]} in {outcome.seconds:.1f} s", style))


def summarize(outcomes: Sequence[Outcome], out: Path, console: Console) -> None:
    """Print the table and write it to summary.json and summary.md."""
    table = Table(*(Column(name, overflow="fold") for name in COLUMNS), box=SIMPLE)
    for outcome in outcomes:
        table.add_row(*map(Text, outcome.cells), style="red" if outcome.error else None)
    console.print(table)
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(o.cells for o in outcomes)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text("\n".join(lines) + "\n")
    (out / "summary.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hpcattn run`; exit status 1 if a notebook or a figure failed."""
    jobs = 1 if machine().gpu else min(4, machine().cores)
    parser = argparse.ArgumentParser(
        prog="hpcattn run",
        description="Execute every notebook top to bottom, render each to HTML, draw every figure and end "
        "with a table. The notebooks themselves are left alone. The exit status is 1 if anything failed.",
    )
    parser.add_argument("--only", default="", help="notebooks whose names start so, e.g. 00,01; draws no figures")
    parser.add_argument("--jobs", type=int, default=jobs, help=f"notebooks at once (here {jobs}; 1 with a GPU)")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of the results (build)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds one notebook may take (600)")
    parser.add_argument("--in-place", action="store_true", help="also write the outputs into the notebooks")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="folder of the notebooks")
    args = parser.parse_args(argv)
    try:
        notebooks = discover(args.notebooks, list(filter(None, args.only.split(","))))
    except ValueError as error:
        parser.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"notebooks: {len(notebooks)}, at most {args.jobs} at once; machine: {machine()}")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        runner = Runner(args.out, args.jobs, args.timeout, args.in_place)
        outcomes = asyncio.run(runner.run(notebooks, progress))
    if not args.only:
        outcomes.append(draw_figures(args.out / "figures"))
        announce(console, outcomes[-1])
    summarize(outcomes, args.out, console)
    return int(any(o.error for o in outcomes))
