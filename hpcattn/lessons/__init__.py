"""Support for the notebooks: what a lesson states first, predictions, checks and exercises.

lesson = begin("01", "Naive attention")             # LIVE on … or RECORDED: …
lesson.predict("naive_16k", None, "ms")             # the reader's number
lesson.measured("naive_16k", 16.4, "recorded …")    # beside what was measured
lesson.verdict()
exercise(check_bytes_formula, my_formula)           # checkers live in hpcattn/lessons/<topic>.py
"""

from hpcattn.lessons.display import Note, Table, number
from hpcattn.lessons.exercises import ExerciseResult, check, exercise, show_source
from hpcattn.lessons.predictions import Lesson, Prediction, begin

__all__ = [
    "ExerciseResult",
    "Lesson",
    "Note",
    "Prediction",
    "Table",
    "begin",
    "check",
    "exercise",
    "number",
    "show_source",
]
