"""The files around the package agree with each other."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import hpcattn
from hpcattn.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE)


def extras(text: str) -> list[list[str]]:
    """The extras of every installation of this package, `.[a,b]`, that a text names."""
    return [sorted(names.split(",")) for names in re.findall(r"\.\[([\w,]+)\]", text)]


def test_pins_are_the_promised_ones():
    assert {"torch>=2.11", "triton==3.9.*"} <= set(PROJECT["dependencies"])
    assert PROJECT["requires-python"] == ">=3.11" and PROJECT["license"] == "Apache-2.0"
    assert PROJECT["version"] == hpcattn.__version__


def test_conda_installs_the_same_package_with_the_same_extras():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    plain = [d for d in dependencies if isinstance(d, str)]
    (pip,) = [d["pip"] for d in dependencies if isinstance(d, dict)]
    assert plain == [f"python{PROJECT['requires-python']}", "pip"]
    assert [line.split(".[")[0] for line in pip] == ["-e "]
    assert extras(pip[0]) == [sorted(PROJECT["optional-dependencies"])]


def test_make_and_readme_install_the_same_extras():
    (names,) = re.findall(r"^EXTRAS +:= (.*)$", MAKEFILE, re.MULTILINE)
    assert sorted(names.split(",")) == sorted(PROJECT["optional-dependencies"])
    assert "-e '.[$(EXTRAS)]'" in MAKEFILE
    assert extras(README) == [sorted(PROJECT["optional-dependencies"])]


def test_every_import_is_a_declared_dependency():
    every = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    declared = {re.match(r"[\w-]+", line)[0] for line in every} | {"IPython", "jupyter_client", "hpcattn"}
    declared |= {"hpc", "flash_attn_interface", "flashinfer"}  # peers, found by import
    found = set()
    for path in (ROOT / "hpcattn").rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
    assert found - set(sys.stdlib_module_names) <= declared


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?://)([^)#]+)\)", README))
def test_readme_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_readme_names_targets_and_commands_that_exist():
    targets = re.findall(r"(?:^    |`|&& )make ([a-z]+)", README, re.MULTILINE)
    commands = re.findall(r"python -m hpcattn (\w+)", README)
    assert {"run", "test", "lab", "bench", "figures", "help"} <= set(targets) <= set(TARGETS)
    assert set(commands) == set(COMMANDS)


def test_make_help_lists_every_target():
    text = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in text.splitlines()] == TARGETS
    assert set(TARGETS) == set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "no Python 3.11 or newer in ./python"),  # too old
        ('case "$2" in *ensurepip*) exit 1;; esac', "apt install python3-venv"),
    ],
)
def test_make_says_what_is_missing(tmp_path, script, message):
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    done = subprocess.run(["make", "env", "PYTHON=./python"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert "set -euo pipefail" in script.read_text() and script.read_text().rstrip().endswith("make test")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"hpcattn {command}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2 and "invalid choice: 'fly'" in capsys.readouterr().err


def test_commands_import_only_what_they_need():
    code = "import sys; from hpcattn.__main__ import main; assert not {'nbclient', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_license_is_the_full_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text.split()) > 1500
