"""Checks and exercises: a check raises, an exercise never stops the notebook."""

from __future__ import annotations

import dis
import functools
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from IPython.display import Markdown

from hpcattn.lessons.display import Note, number

__all__ = ["ExerciseResult", "check", "exercise", "show_source"]


@dataclass(frozen=True)
class ExerciseResult:
    """Outcome of `exercise`; as the last expression of a cell it shows itself."""

    name: str
    status: str  # "passed", "failed" or "not attempted"
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def _note(self) -> Note:
        mood = {"passed": "good", "failed": "bad"}.get(self.status, "neutral")
        return Note(mood, f"{self.name}: {self.status}", self.message)

    def __repr__(self) -> str:
        return repr(self._note)

    def _repr_html_(self) -> str:
        return self._note._repr_html_()


def exercise(checker: Callable[[Any], None], attempt: Any) -> ExerciseResult:
    """Judge the reader's `attempt` (a function, kernel or value) with `checker(attempt)`.

    A checker raises AssertionError with a counter-example when the attempt is wrong. An untouched stub is
    "not attempted": None or `...`, an empty body, one that returns `...` or raises NotImplementedError.
    (A stub with some code must do one of the last two: returning None is right for work done in place.)
    """
    name = checker.__name__.removeprefix("check_").replace("_", " ")
    untouched = ExerciseResult(name, "not attempted", "Replace the stub by your code and run the cell again.")
    if attempt is None or attempt is ... or _is_empty(attempt):
        return untouched
    try:
        checker(_refusing_ellipsis(attempt))
    except Exception as error:
        if _is_caused_by(error, NotImplementedError):
            return untouched
        return ExerciseResult(name, "failed", _explain(error, _function(attempt)))
    return ExerciseResult(name, "passed")


def check(label: str, value: float, bound: float) -> Note:
    """Raise AssertionError unless `value` <= `bound` (NaN fails); the returned note shows both."""
    if not value <= bound:
        raise AssertionError(f"{label}: {number(value)} exceeds {number(bound)}")
    return Note("good", f"{label}: {number(value)} ≤ {number(bound)}")


def show_source(fn: Any) -> Markdown:
    """The source of a function or kernel, highlighted."""
    return Markdown(f"```python\n{inspect.getsource(_function(fn))}```")


def _function(attempt: Any) -> Any:
    """The Python function inside a kernel; anything else as it is."""
    return getattr(attempt, "fn", attempt)


def _is_empty(attempt: Any) -> bool:
    """Whether a function does nothing but return None or `...`."""
    code = getattr(_function(attempt), "__code__", None)
    if code is None:
        return False
    steps = [i for i in dis.get_instructions(code) if i.opname not in {"RESUME", "NOP", "RETURN_VALUE"}]
    return all(i.opname in {"LOAD_CONST", "RETURN_CONST"} and i.argval in (None, ...) for i in steps)


def _refusing_ellipsis(attempt: Any) -> Any:
    if not isinstance(attempt, FunctionType):
        return attempt

    @functools.wraps(attempt)
    def wrapper(*args, **kwargs):
        result = attempt(*args, **kwargs)
        if result is ...:
            raise NotImplementedError
        return result

    return wrapper


def _is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def _explain(error: Exception, attempt: Any) -> str:
    """The checker's message, or the error and the line of the attempt that raised it."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    filename = getattr(getattr(attempt, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    return f"{text}\nin line {frames[-1].lineno} of your code: {frames[-1].line}" if frames else text
