"""What every test shares: seeded random numbers, the device, and skipping what needs a GPU."""

from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # several processes share the cores
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture
def device(request) -> str:
    """ "cuda" for tests marked gpu, else "cpu"."""
    return "cuda" if request.node.get_closest_marker("gpu") else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def coverage(record_property):
    """Record one numerical check: `coverage(row, implementation, error)`; the table is printed at the end."""
    return lambda row, implementation, error: record_property("coverage", (row, implementation, error))


def pytest_terminal_summary(terminalreporter):
    """What was held to the oracle: operator x format x implementation, with the values of every other axis."""
    groups: dict[tuple[str, ...], list] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "coverage":
                row, implementation, error = value
                groups.setdefault((row["operator"], row["format"], implementation), []).append((row, error))
    if not groups:
        return
    axes = ("layout", "page", "group", "query tokens", "schedule")
    table = [("operator", "format", "implementation", "cases", *axes, "worst error")]
    for key, entries in sorted(groups.items()):
        values = [sorted({row[axis] for row, _ in entries}, key=lambda x: (len(x), x)) for axis in axes]
        table.append((*key, str(len(entries)), *map(" ".join, values), f"{max(e for _, e in entries):.1e}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    terminalreporter.section("held to the float64 oracle, unused memory poisoned")
    for line in table:
        terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
