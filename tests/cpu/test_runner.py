import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from hpcattn import notebook_runner
from hpcattn.machine import machine
from hpcattn.notebook_runner import discover

NOTEBOOKS = {
    "00_good": [
        "from hpcattn.lessons import begin\nlesson = begin('00', 'Good')",
        "import os, sys\nprint('runs on', sys.executable, 'in', os.getcwd())",
    ],
    "01_wrong": ["total = 1", "", "assert total == 2, 'one isn\\'t two'", "never = 'reached'"],
    "02_plain": ["print(1)"],
    "03_dies": ["import os", "os._exit(1)"],
    "solutions/00_good": ["print('solved')"],
}


def write(folder: Path, notebooks: dict[str, list[str]] = NOTEBOOKS) -> Path:
    (folder / "solutions").mkdir(parents=True)
    for name, sources in notebooks.items():
        cells = [new_markdown_cell("# Title"), *map(new_code_cell, sources)]
        kernel = {"name": "no-such-kernel", "display_name": "?", "language": "python"}
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / f"{name}.ipynb")
    return folder


def run(folder: Path, *options: str) -> int:
    return notebook_runner.main(["--notebooks", str(folder / "notebooks"), "--out", str(folder / "build"), *options])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """All notebooks run once: the folder, the exit status and the bytes of the notebooks before."""
    folder = tmp_path_factory.mktemp("runner")
    (write(folder / "notebooks") / "04_garbage.ipynb").write_text("not a notebook")
    before = {path: path.read_bytes() for path in folder.rglob("*.ipynb")}
    with pytest.MonkeyPatch.context() as patch:
        figures = notebook_runner.Outcome("figures", 0.0, "recorded", "", "build/figures")
        patch.setattr(notebook_runner, "draw_figures", lambda folder: figures)
        status = run(folder, "--jobs", "2")
    return folder, status, before


@pytest.fixture
def outcomes(finished):
    return {row["name"]: row for row in json.loads((finished[0] / "build" / "summary.json").read_text())}


def test_every_notebook_is_in_the_summary_in_order(finished, outcomes):
    assert list(outcomes) == [
        "00_good", "01_wrong", "02_plain", "03_dies", "04_garbage", "solutions/00_good", "figures",
    ]  # fmt: skip
    table = (finished[0] / "build" / "summary.md").read_text().splitlines()
    assert len(table) == 2 + len(outcomes)
    assert table[0] == "| notebook | seconds | live or recorded | verdict | result |"


def test_passing_notebook_is_rendered(finished, outcomes):
    row = outcomes["00_good"]
    assert row["error"] == "" and row["mode"] == ("live" if machine().hopper else "recorded")
    page = Path(row["result"]).read_text()
    assert f"runs on {sys.executable} in {finished[0] / 'notebooks'}" in page
    assert "Lesson 00 · Good" in page


def test_solution_is_rendered_beside_its_lesson(finished, outcomes):
    row = outcomes["solutions/00_good"]
    assert row["error"] == "" and row["mode"] == "not stated"
    assert Path(row["result"]) == finished[0] / "build" / "html" / "solutions" / "00_good.html"
    assert "solved" in Path(row["result"]).read_text()


def test_failing_notebook_names_the_cell_and_is_rendered_with_its_traceback(finished, outcomes):
    assert finished[1] == 1
    row = outcomes["01_wrong"]
    assert row["error"] == "cell 2: AssertionError: one isn't two"
    page = Path(row["result"]).read_text()
    assert "Traceback" in page and "</span>: one isn't two" in page


def test_slow_notebook_is_stopped(tmp_path):
    write(tmp_path / "notebooks", {"02_slow": ["import time", "time.sleep(100)"]})
    assert run(tmp_path, "--timeout", "3", "--only", "02") == 1
    (row,) = json.loads((tmp_path / "build" / "summary.json").read_text())
    assert row["error"].endswith("the notebook took more than 3 s (see --timeout)") and row["seconds"] < 60


def test_interrupt_stops_every_notebook(tmp_path):
    sources = ["import time", f"open({str(tmp_path / 'began')!r}, 'w').close()", "time.sleep(100)"]
    write(tmp_path / "notebooks", {name: sources for name in ("00", "01", "02")})
    options = ["--notebooks", str(tmp_path / "notebooks"), "--out", str(tmp_path / "build"), "--jobs", "2"]
    runner = subprocess.Popen([sys.executable, "-m", "hpcattn", "run", *options], stderr=subprocess.PIPE)
    while not (tmp_path / "began").exists() and runner.poll() is None:
        time.sleep(0.2)
    runner.send_signal(signal.SIGINT)
    assert runner.wait(timeout=60) == 130
    assert not (tmp_path / "build" / "summary.md").exists()


def test_dead_kernel_and_unreadable_notebook_fail_alone(outcomes):
    assert outcomes["03_dies"]["error"].startswith("cell 2: DeadKernelError: Kernel died, see ")
    assert Path(outcomes["03_dies"]["error"].split(", see ")[1]).exists()
    assert "NotJSONError" in outcomes["04_garbage"]["error"] and outcomes["04_garbage"]["result"] == ""


def test_notebooks_are_left_alone(finished):
    assert {path: path.read_bytes() for path in finished[2]} == finished[2]


def test_in_place_writes_only_what_passed(tmp_path):
    folder = write(tmp_path / "notebooks")
    failing = (folder / "01_wrong.ipynb").read_bytes()
    assert run(tmp_path, "--only", "00,01", "--in-place") == 1
    assert (folder / "01_wrong.ipynb").read_bytes() == failing
    written = nbformat.read(folder / "00_good.ipynb", as_version=4)
    assert written.metadata.kernelspec.name == "python3"
    assert written.metadata.language_info == {"name": "python"}
    assert all("execution" not in cell.metadata for cell in written.cells)
    assert [len(cell.outputs) for cell in written.cells if cell.cell_type == "code"] == [1, 1]
    names = [row["name"] for row in json.loads((tmp_path / "build" / "summary.json").read_text())]
    assert names == ["00_good", "01_wrong", "solutions/00_good"]  # no figures


def test_discover_picks_by_prefix(tmp_path):
    folder = write(tmp_path / "notebooks")
    assert [p.name for p in discover(folder, ["02", "01"])] == ["01_wrong.ipynb", "02_plain.ipynb"]
    with pytest.raises(ValueError, match=r"starts with \['07'\].*00_good.ipynb"):
        discover(folder, ["00", "07"])


def test_figures_that_fail_are_reported(tmp_path, monkeypatch):
    def fail(argv):
        raise ValueError(f"no records for {argv[1]}")

    monkeypatch.setattr("hpcattn.bench.figures.main", fail)
    outcome = notebook_runner.draw_figures(tmp_path)
    assert (outcome.name, outcome.error) == ("figures", f"ValueError: no records for {tmp_path}")
