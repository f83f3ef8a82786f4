import dataclasses
import importlib.metadata
import json
import shutil

import pytest

from hpcattn import doctor
from hpcattn.bench import peers
from hpcattn.doctor import Finding, diagnose
from hpcattn.machine import machine


def found(name: str) -> Finding:
    (finding,) = [f for f in diagnose() if f.name == name]
    return finding


def pretend(monkeypatch, **facts):
    monkeypatch.setattr(doctor, "machine", lambda: dataclasses.replace(machine(), **facts))


@pytest.fixture(autouse=True)
def no_triton_interpret(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_this_machine_has_all_that_is_required(capsys):
    assert doctor.main(["--json"]) == 0
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    assert not [f for f in findings.values() if f["status"] == "broken"]
    installed = findings["torch"]["detail"].partition(" ")[0]
    assert machine().torch.startswith(installed)  # 2.15.0+cu132 is installed as 2.15.0
    for name in ("Python", "triton", "extra dev", "interpreter", "offline compilation"):
        assert findings[name]["status"] == "ok"
    assert {"peer hpc_ops", "peer flash_attn_3", "peer flashinfer"} <= set(findings)


def test_table_shows_status_and_advice(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    advice = "pip install -e '.[notebooks]'"  # brackets are no markup
    monkeypatch.setattr(doctor, "diagnose", lambda: [Finding("extra notebooks", "missing", "lacks x", advice)])
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "missing" in text and advice in text and str(machine()) in text


def test_broken_requirement_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: [Finding("torch", "broken", "2.0", "upgrade")])
    assert doctor.main(["--json"]) == 1


def test_versions_are_held_against_the_package(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.8.1" if name == "triton" else real(name))
    finding = found("triton")
    assert finding.status == "broken" and "3.8.1" in finding.detail
    assert finding.advice == "pip install 'triton==3.9.*'"


def test_missing_extra_is_named(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "nbclient":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = found("extra notebooks")
    assert (finding.status, finding.detail) == ("missing", "lacks nbclient")
    assert finding.advice == "pip install -e '.[notebooks]'"


@pytest.mark.parametrize(
    ("gpu", "capability", "status", "text"),
    [
        (None, None, "missing", "kernels run interpreted"),
        ("NVIDIA L4", (8, 9), "missing", "capability 8.9, driver 580.1: runs the portable kernels"),
        ("NVIDIA H200", (9, 0), "ok", "measures live"),
    ],
)
def test_gpu_decides_what_is_measured(monkeypatch, gpu, capability, status, text):
    pretend(monkeypatch, gpu=gpu, capability=capability, driver=gpu and "580.1")
    finding = found("GPU")
    assert finding.status == status and text in finding.detail


def test_gpu_needs_a_c_compiler(monkeypatch):
    pretend(monkeypatch, gpu="NVIDIA H200", capability=(9, 0), driver="580.1")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert found("C compiler").status == "broken"


def test_triton_interpret_set_by_mistake_is_found(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    finding = found("TRITON_INTERPRET")
    assert finding.status == "broken" and finding.advice.startswith("unset TRITON_INTERPRET")


def test_peers_are_reported(monkeypatch):
    report = {"flashinfer": (True, "0.9"), "hpc_ops": (False, "not installed"), "reference": (True, "-")}
    monkeypatch.setattr(peers, "report", lambda: report)
    assert found("peer flashinfer") == Finding("peer flashinfer", "ok", "0.9")
    assert found("peer hpc_ops").status == "missing" and "HPC-Ops" in found("peer hpc_ops").advice
    assert "peer reference" not in [f.name for f in diagnose()]


def test_look_that_fails_is_a_finding_not_a_crash(monkeypatch):
    def raises():
        raise OSError("no such device")

    monkeypatch.setitem(doctor.LOOKS, "interpreter", raises)
    assert found("interpreter") == Finding("interpreter", "broken", "OSError: no such device", doctor.REINSTALL)


def test_full_disk_is_seen(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1e6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert found("disk").status == "missing"
