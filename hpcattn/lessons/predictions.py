"""Predict, then measure: what a lesson asks of its reader, and how the answer compares."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from IPython.display import display

from hpcattn.bench.records import DATA
from hpcattn.lessons.display import Note, Table, number
from hpcattn.machine import Machine, machine

__all__ = ["Lesson", "Prediction", "begin"]


@dataclass
class Prediction:
    """One number the reader commits to before the measurement is shown."""

    id: str
    value: float | None
    unit: str
    measured: float | None = None
    source: str = ""
    late: bool = False  # changed after the measurement was shown

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, if both are known and the prediction isn't zero."""
        return self.measured / self.value if self.value and self.measured is not None else None

    def __repr__(self) -> str:
        text = f"{self.id}: "
        text += "no prediction yet" if self.value is None else f"predicted {number(self.value)} {self.unit}"
        if self.measured is not None:
            text += f", measured {number(self.measured)} {self.unit} ({self.source}), {self._verdict}"
        return text

    @property
    def _verdict(self) -> str:
        ratio = f"{self.ratio:.2f}×" if self.ratio is not None else "–"
        return f"{ratio} (changed afterwards)" if self.late else ratio

    @property
    def _row(self) -> list[str]:
        return [self.id, number(self.value), number(self.measured), self.unit, self._verdict, self.source]


@dataclass
class Lesson:
    """The reader's predictions in one notebook, and whether it measures live. Made by `begin`."""

    number: str
    title: str
    machine: Machine
    recorded: str
    date: str
    predictions: dict[str, Prediction] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """True where the benchmark cells measure; False where they show recorded data."""
        return self.machine.hopper

    @property
    def device(self) -> str:
        """Where tensors belong: "cuda" with any usable GPU, else "cpu" (kernels then run interpreted)."""
        return "cuda" if self.machine.gpu else "cpu"

    def predict(self, id: str, value: float | None, unit: str) -> Prediction:
        """Store the reader's number. None means "no prediction yet" and the notebook goes on."""
        new = Prediction(id, None if value is None else float(value), unit)
        old = self.predictions.get(id)
        if old is not None and old.unit == unit:
            new.measured, new.source = old.measured, old.source
            new.late = old.late or (old.measured is not None and old.value != new.value)
        self.predictions[id] = new
        return new

    def measured(self, id: str, value: float, source: str = "live") -> Prediction:
        """Set what was measured beside the prediction, in the same unit.

        `source` is "live" or says what was recorded where. Raises ValueError for an id never predicted.
        """
        if id not in self.predictions:
            raise ValueError(f"id={id!r} was never predicted; known are {sorted(self.predictions)}")
        prediction = self.predictions[id]
        prediction.measured, prediction.source = float(value), source
        return prediction

    def verdict(self) -> Table:
        """Predicted beside measured, with their ratio, the GPU and the versions."""
        columns = ["prediction", "predicted", "measured", "unit", "measured / predicted", "source"]
        return Table(columns, [p._row for p in self.predictions.values()], self.where)

    def export(self, path: str | Path) -> Path:
        """Write the predictions, their measurements and the machine as JSON, e.g. for a course."""
        lesson = {key: value for key, value in asdict(self).items() if key != "predictions"}
        predictions = [asdict(p) | {"ratio": p.ratio} for p in self.predictions.values()]
        path = Path(path)
        path.write_text(json.dumps(lesson | {"live": self.live, "predictions": predictions}, indent=2) + "\n")
        return path

    @property
    def where(self) -> str:
        """One line: live or recorded, on what, with which versions, when."""
        if self.live:
            return f"LIVE on {self.machine}, {self.date}"
        here = "compiled on this GPU" if self.machine.gpu else "interpreted on this CPU"
        return f"RECORDED: figures show {self.recorded}; kernels run {here} ({self.machine}), {self.date}"

    def __str__(self) -> str:
        return f"Lesson {self.number} · {self.title}\n{self.where}"

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        note = Note("good" if self.live else "neutral", f"Lesson {self.number} · {self.title}", self.where)
        data = {"text/plain": repr(note), "text/html": note._repr_html_()}
        return data, {"hpcattn": {"lesson": self.number, "mode": "live" if self.live else "recorded"}}


def begin(lesson: str, title: str) -> Lesson:
    """Start a notebook: its first output states whether it measures live or shows recorded data, and on what.

    The metadata of that output is `{"hpcattn": {"lesson": lesson, "mode": "live" or "recorded"}}`.
    """
    started = Lesson(lesson, title, machine(), recorded_data(), date.today().isoformat())
    display(started)
    return started


def recorded_data(folder: Path = DATA) -> str:
    """The newest measurement among `folder`/<gpu>/*.csv, in words."""
    rows = []
    for path in folder.glob("*/*.csv"):
        with path.open(newline="") as file:
            rows += [(row.get("date"), row.get("gpu")) for row in csv.DictReader(file)]
    rows = [row for row in rows if all(row)]
    if not rows:
        return "no data, since none is recorded"
    day, gpu = max(rows)
    return f"data recorded on {gpu}, {day}"
