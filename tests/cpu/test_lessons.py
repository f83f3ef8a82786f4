import dataclasses
import json
import math
import os

import pytest
import triton.language as tl

from hpcattn import lessons
from hpcattn.kernels.jit import jit
from hpcattn.lessons import predictions, recording
from hpcattn.machine import machine


@pytest.fixture
def lesson(capsys):
    started = lessons.begin("01", "Naive attention")
    capsys.readouterr()
    return started


def on(gpu, capability):
    """A lesson on a machine with this GPU."""
    here = dataclasses.replace(machine(), gpu=gpu, capability=capability, driver="580.1")
    return predictions.Lesson("01", "Naive attention", here, "data recorded on X, 2026-01-02", "2026-02-03")


def test_begin_states_where_it_runs(capsys):
    started = lessons.begin("01", "Naive attention")
    text = capsys.readouterr().out
    assert "Lesson 01 · Naive attention" in text
    assert ("LIVE on" if started.live else "RECORDED: figures show") in text
    assert f"torch {machine().torch}" in text and f"triton {machine().triton}" in text
    assert started.date in text


@pytest.mark.parametrize(
    ("gpu", "capability", "live", "device", "text"),
    [
        ("NVIDIA H200", (9, 0), True, "cuda", "LIVE on NVIDIA H200, driver 580.1"),
        (
            "NVIDIA L4",
            (8, 9),
            False,
            "cuda",
            "data recorded on X, 2026-01-02; kernels run compiled on this GPU",
        ),
        (None, None, False, "cpu", "data recorded on X, 2026-01-02; kernels run interpreted on this CPU"),
    ],
)
def test_lesson_measures_live_only_on_hopper(gpu, capability, live, device, text):
    lesson = on(gpu, capability)
    assert (lesson.live, lesson.device) == (live, device)
    assert text in lesson.where
    data, metadata = lesson._repr_mimebundle_()
    assert text in data["text/plain"] and text in data["text/html"]
    assert metadata == {"hpcattn": {"lesson": "01", "mode": "live" if live else "recorded"}}


def test_recorded_data_names_the_newest_measurement(tmp_path):
    assert "none is recorded" in predictions.recorded_data(tmp_path)
    for gpu, rows in {"h100": "H100,2026-01-02\n", "h200": "H200,2026-03-04\nH200,2025-01-01\n"}.items():
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / "decode.csv").write_text("gpu,date\n" + rows)
    (tmp_path / "h100" / "other.csv").write_text("a\n1\n")
    assert predictions.recorded_data(tmp_path) == "data recorded on H200, 2026-03-04"


def test_verdict_shows_predicted_beside_measured(lesson):
    lesson.predict("traffic", 16, "ms")
    lesson.predict("speed-up", None, "×")
    lesson.measured("traffic", 20, "recorded on X")
    table = lesson.verdict()
    assert table.rows[0] == ["traffic", "16", "20", "ms", "1.25×", "recorded on X"]
    assert table.rows[1] == ["speed-up", "–", "–", "×", "–", ""]
    for text in (repr(table), table._repr_html_()):
        assert "1.25×" in text and "torch" in text


def test_prediction_says_how_far_it_got(lesson):
    assert repr(lesson.predict("a", None, "ms")) == "a: no prediction yet"
    assert repr(lesson.predict("a", 2, "ms")) == "a: predicted 2 ms"
    assert repr(lesson.measured("a", 1)) == "a: predicted 2 ms, measured 1 ms (live), 0.50×"
    assert lesson.predict("a", 2, "ms").ratio == 0.5


def test_prediction_changed_after_the_measurement_is_marked(lesson):
    lesson.predict("a", 1.0, "ms")
    lesson.measured("a", 3.0)
    assert not lesson.predict("a", 1.0, "ms").late
    assert lesson.predict("a", 3.0, "ms").late
    assert "changed afterwards" in repr(lesson.verdict())


def test_prediction_of_zero_has_no_ratio(lesson):
    lesson.predict("a", 0, "ms")
    assert lesson.measured("a", 3).ratio is None


def test_measured_needs_a_prediction(lesson):
    lesson.predict("a", 1, "ms")
    with pytest.raises(ValueError, match=r"id='b'.*\['a'\]"):
        lesson.measured("b", 1)


def test_export_keeps_everything(lesson, tmp_path):
    lesson.predict("a", 2, "ms")
    lesson.measured("a", 1)
    saved = json.loads(lesson.export(tmp_path / "me.json").read_text())
    assert saved["number"] == "01" and saved["live"] == lesson.live
    assert saved["machine"]["torch"] == machine().torch
    assert saved["predictions"] == [
        {"id": "a", "value": 2, "unit": "ms", "measured": 1, "source": "live", "late": False, "ratio": 0.5}
    ]


def check_addition(add):
    for a, b in [(0, 0), (1, 2)]:
        assert add(a, b) == a + b, f"add({a}, {b}) is {a + b}, got {add(a, b)}"


def empty(a, b):
    """Only a docstring."""


def returns_none(a, b):
    return None


def returns_ellipsis(a, b):
    total = a + b  # noqa: F841 what the exercise gave
    return ...


def raises(a, b):
    raise NotImplementedError("your code here")


def raises_from_below(a, b):
    try:
        raises(a, b)
    except NotImplementedError as error:
        raise RuntimeError("wrapped") from error


@jit
def empty_kernel(x, N: tl.constexpr):
    pass


@pytest.mark.parametrize(
    "stub", [None, ..., empty, returns_none, returns_ellipsis, raises, raises_from_below, empty_kernel]
)
def test_untouched_stub_is_not_attempted(stub):
    result = lessons.exercise(check_addition, stub)
    assert result.status == "not attempted" and not result.passed
    assert "addition: not attempted" in repr(result)


def test_right_answer_passes():
    result = lessons.exercise(check_addition, lambda a, b: a + b)
    assert result.passed and repr(result) == "addition: passed"


def test_wrong_answer_shows_the_counter_example():
    result = lessons.exercise(check_addition, lambda a, b: a - b)
    assert result.status == "failed" and not result.passed
    assert "add(1, 2) is 3, got -1" in repr(result)
    assert "add(1, 2) is 3, got -1" in result._repr_html_()


def test_crash_is_a_failure_that_names_the_line():
    def attempt(a, b):
        return a / b  # divides

    result = lessons.exercise(check_addition, attempt)
    assert result.status == "failed"
    assert "ZeroDivisionError" in result.message and "return a / b  # divides" in result.message


def test_answer_in_place_may_return_none():
    def check_doubling(double):
        numbers = [1, 2]
        double(numbers)
        assert numbers == [2, 4], f"[1, 2] became {numbers}"

    def right(numbers):
        numbers[:] = [2 * x for x in numbers]

    def wrong(numbers):
        numbers[:] = [3 * x for x in numbers]

    assert lessons.exercise(check_doubling, right).passed
    assert "[1, 2] became [3, 6]" in lessons.exercise(check_doubling, wrong).message


def test_value_can_be_an_answer():
    def check_answer(value):
        assert value == 42, f"{value} isn't it"

    assert lessons.exercise(check_answer, 42).passed
    assert lessons.exercise(check_answer, 0).status == "failed"


def test_check_raises_beyond_the_bound():
    assert repr(lessons.check("error", 1e-3, 4e-3)) == "error: 0.001 ≤ 0.004"
    for value in (5e-3, math.nan):
        with pytest.raises(AssertionError, match="error: .* exceeds 0.004"):
            lessons.check("error", value, 4e-3)


def test_show_source_of_functions_and_kernels():
    assert "def check_addition" in lessons.show_source(check_addition).data
    assert "def empty_kernel" in lessons.show_source(empty_kernel).data


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0001234, "0.0001234"),
        (12.3456, "12.35"),
        (12345.6, "12,346"),
        (4.3e12, "4.3e+12"),
    ],
)
def test_number_has_four_digits(value, text):
    assert lessons.number(value) == text


def test_table_aligns_text_and_escapes_html():
    table = lessons.Table(["name", "µs"], [["a<b", "1"], ["long name", "100"]], "measured & shown")
    assert repr(table).splitlines() == [
        "name        µs",
        "a<b          1",
        "long name  100",
        "measured & shown",
    ]
    html = table._repr_html_()
    assert "a&lt;b" in html and "measured &amp; shown" in html and html.count("<tr>") == 3


def test_functions_run_in_processes_of_their_own(tmp_path):
    paths = [tmp_path / "a", tmp_path / "missing" / "b", tmp_path / "c"]
    recording.in_processes(os.mkdir, [[str(path)] for path in paths])
    assert [path.is_dir() for path in paths] == [True, False, True], "what fails does not stop the others"
