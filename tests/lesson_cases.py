"""What the tests of lessons share: functions that notebooks define, and measurements in which nothing is computed."""

from pathlib import Path
from types import SimpleNamespace

import nbformat
import torch

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
TIMING = {"median_us": 2.0, "p10_us": 1.0, "p90_us": 3.0, "floor_us": 0.5, "sm_clock_mhz": 1980.0}


def cell_of(notebook: str, name: str) -> str:
    """The source of the cell that defines `name`, without the exercise call below it."""
    cells = nbformat.read(NOTEBOOKS / notebook, as_version=4).cells
    (source,) = (c.source for c in cells if c.cell_type == "code" and f"def {name}(" in c.source)
    return source.partition("\n\n\nexercise(")[0]


def defined_in(notebook: str, name: str, **names):
    """The function that a cell of a notebook defines; names: what it uses of the cells before."""
    exec(cell_of(notebook, name), names)
    return names[name]


def compute_nothing(monkeypatch, lab, error: float, *calls: str) -> list[tuple[str, dict[str, int]]]:
    """Let a prefill lesson measure its real shapes with calls that do nothing, of which there are three each.

    calls: the functions of the lesson that make one. Gives a list that will hold (protocol, {name: calls}) of every
    measurement, whose times are those of `TIMING`.
    """
    seen = []

    def measure(protocol, calls, timer, **options):
        seen.append((protocol, {name: len(sequence) for name, sequence in calls.items()}))
        return {name: SimpleNamespace(**TIMING) for name in calls}

    one = torch.ones(1)
    monkeypatch.setattr(lab, "measure", measure)
    for name in calls:
        monkeypatch.setattr(lab, name, lambda x, how: lambda: one)
    monkeypatch.setattr(lab, "relative_error", lambda got, want: error)
    monkeypatch.setattr(lab.Inputs, "reference", lambda self: (one, one))
    monkeypatch.setattr(lab.Workload, "build", lambda self, *_, **__: lab.Inputs(self, *[None] * 7))
    monkeypatch.setattr(lab, "copies_to_exceed_l2", lambda *_: 3)
    return seen
