import pytest
import torch

from hpcattn.bench import suites
from hpcattn.bench.ceilings import chase_kernel, random_cycle
from hpcattn.bench.peers import Adapter
from hpcattn.bench.protocol_study import EXPERIMENTS
from hpcattn.bench.records import load
from hpcattn.bench.workloads import select


def run(out, *arguments) -> int:
    return suites.main(["--device", "cpu", "--out", str(out), *arguments])


@pytest.mark.parametrize("suite", ["decode", "prefill"])
def test_a_small_suite_from_end_to_end(tmp_path, suite, capsys):
    arguments = ("--suite", f"{suite}_small", "--implementations", "reference,torch_sdpa_math,flash_attn_3")
    assert run(tmp_path, *arguments, "--run-id", "r1") == 0
    frame = load(tmp_path / f"{suite}.csv")
    reference = frame[frame.implementation == "reference"]
    assert len(reference) == len(suites.SUITES[f"{suite}_small"].workloads)
    assert (frame.median_us > 0).all() and (frame.rel_error < 1e-2).all() and (frame.rel_error > 0).all()
    assert set(frame.protocol) == {"host"} and set(frame.gpu) == {"cpu"} and set(frame.run_id) == {"r1"}
    printed = capsys.readouterr().out
    assert "perf_counter" in printed
    assert torch.cuda.is_available() or "FlashAttention-3: needs a CUDA GPU" in printed
    assert run(tmp_path, *arguments, "--run-id", "r1") == 0  # nothing is left to do
    assert len(load(tmp_path / f"{suite}.csv")) == len(frame)


@pytest.fixture
def one_workload(monkeypatch):
    (w,) = select("decode_small", quant="type1", case="small_uniform", layout="HND")
    monkeypatch.setitem(suites.SUITES, "decode_small", suites.Suite("decode", (w,), ("host",)))


def test_portable_kernels_are_checked_and_timed(tmp_path, one_workload, capsys):
    assert run(tmp_path, "--suite", "decode_small", "--implementations", "portable,reference") == 0
    frame = load(tmp_path / "decode.csv")
    assert frame.schedule.tolist() == ["dynamic", "static", "-"]
    assert (frame.median_us > 0).all()
    assert "Speed-up, per workload" in capsys.readouterr().out


class Wrong(Adapter):
    name = "hopper"
    module = "torch"

    def __init__(self, result):
        self.result = result

    def available(self):
        return True, "-"

    def supports(self, workload):
        return True

    def prepare(self, inputs):
        return lambda: self.result(inputs)


def raising(inputs):
    raise RuntimeError("illegal instruction")


@pytest.mark.parametrize(
    "result", [lambda i: torch.zeros_like(i.q, dtype=torch.bfloat16), lambda i: i.reference()[0] * torch.nan, raising]
)
@pytest.mark.parametrize("ours", [True, False])
def test_a_failing_implementation_is_recorded_as_failing(tmp_path, monkeypatch, one_workload, result, ours):
    adapter = Wrong(result)
    adapter.ours = ours
    monkeypatch.setattr(suites, "adapters", lambda names: [adapter])
    monkeypatch.setattr(suites, "report", lambda: {"hopper": (True, "-")})
    status = run(tmp_path, "--suite", "decode_small")
    frame = load(tmp_path / "decode.csv")
    assert (frame.rel_error > 0.9).all()
    timed = frame.median_us.notna()
    # ours is never timed when wrong; a peer that gives a finite wrong answer is, and carries its error
    assert not timed.any() if ours else timed.all() == bool((frame.rel_error < float("inf")).all())
    assert status == int(ours)


def test_every_check_uses_both_means_of_v(monkeypatch):
    seen = []
    w = select("decode_small", dtype="bf16")[0]

    class Spy(Wrong):
        def prepare(self, inputs):
            seen.append((inputs.reference()[0].mean() > 0.5, bool(inputs.cache.v.float().isnan().any())))
            return super().prepare(inputs)

    spy = Spy(lambda i: i.reference()[0])
    spy.ours = True
    assert suites.check([spy], w, "cpu") == {spy: 0.0}
    assert seen == [(False, True), (True, True)]


def test_a_cpu_makes_no_claims(tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, "--suite", "decode_small", "--protocol", "steady")


def test_the_protocol_study_rehearses(tmp_path):
    assert run(tmp_path, "--suite", "measuring", "--small") == 0
    frame = load(tmp_path / "measuring.csv", table="measuring")
    assert set(frame.experiment) == set(EXPERIMENTS)
    wrapper = frame[(frame.experiment == "wrapper") & (frame.x == 100)].set_index("series").value
    assert wrapper.eager_synchronized > 100


def test_ceilings_of_a_cpu(tmp_path):
    assert run(tmp_path, "--suite", "ceilings") == 0
    frame = load(tmp_path / "ceilings.csv", table="ceilings").set_index("quantity")
    assert {"dram_copy", "dram_read", "matmul_bf16", "steady_floor"} <= set(frame.index)
    assert (frame.value > 0).all() and frame.method.str.contains("CPU").all()
    assert suites.ceilings_of("cpu", [tmp_path / "ceilings.csv"]).tb_per_s == frame.value.dram_copy
    assert suites.ceilings_of("another", [tmp_path / "ceilings.csv"]) is None


def test_pointer_chase_walks_one_cycle():
    links = random_cycle(256, 8, "cpu")
    at, seen = 0, []
    for _ in range(32):
        seen.append(at)
        at = int(links[at])
    assert at == 0 and sorted(seen) == list(range(0, 256, 8))
    place = torch.zeros(1, dtype=torch.int64)
    chase_kernel[(1,)](links, place, 5)
    assert int(place) == seen[5]
