"""Lesson 07b, FP8 prefill: sums in the tensor core, the transpose of V, turns; a model, a checker, measurements."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pandas as pd
import torch

from hpcattn.bench import records
from hpcattn.bench.peers import ADAPTERS, Adapter, Ours
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.suites import BOUNDS
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import Inputs, Workload
from hpcattn.cache import flatten_scales
from hpcattn.inspection import Compiled, Variant
from hpcattn.kernels.hopper.launch import Bound, Launch
from hpcattn.kernels.hopper.prefill_launch import Config, launches
from hpcattn.lessons import fp8_operands, recording
from hpcattn.lessons.recording import RECORDED
from hpcattn.reference import relative_error

# --- Measurements ----------------------------------------------------------------------------------------------------

PREFIX = "fp8_prefill_"
HEADS, KV_HEADS = 32, 4
SHAPES = ((512, 32768), (4096, 4096))  # queries, keys
QUANTS = ("type1", "type0")
CONFIGS = {
    "k2v2": Config(2, 2, 2, False, False),
    "k3v2": Config(2, 3, 2, False, False),
    "k2v2_turns": Config(2, 2, 2, True, False),
    "k3v2_turns": Config(2, 3, 2, True, False),
    "k3v3_turns": Config(2, 3, 3, True, False),
}
ERROR_QUERIES, ERROR_KEYS, DECODE_BATCH = 512, (4096, 8192, 32768), 4
PEERS = ("hpc_ops", "flash_attn_3")
SUM_PROGRAMS = 32  # independent sums of each length
MEANS = (0.0, 1.0)


def workload(q_len: int, kv_len: int, quant: str = "type1", heads: tuple[int, int] = (HEADS, KV_HEADS)) -> Workload:
    """fp8 prefill of one request, NHD, pages of 64 tokens."""
    return Workload(
        suite="prefill", case=f"{q_len}x{kv_len}", q_lens=(q_len,), kv_lens=(kv_len,), dtype="fp8", quant=quant,
        num_q_heads=heads[0], num_kv_heads=heads[1],
    )  # fmt: skip


def decode_workload(kv_len: int, batch: int = DECODE_BATCH, heads: tuple[int, int] = (HEADS, KV_HEADS)) -> Workload:
    """fp8 type 1 decode of one query token for each of `batch` requests of one length."""
    return Workload(
        suite="decode", case=f"{batch}x{kv_len}", q_lens=(1,) * batch, kv_lens=(kv_len,) * batch, dtype="fp8",
        quant="type1", num_q_heads=heads[0], num_kv_heads=heads[1],
    )  # fmt: skip


def prefill_step(x: Inputs, config: Config | None = None) -> tuple[Launch, torch.Tensor]:
    """The launch of the library's prefill kernel on one request, in a configuration, and where it writes."""
    out = torch.full(x.q.shape, math.nan, dtype=torch.bfloat16, device=x.q.device)
    scales = flatten_scales(x.cache, x.scales)
    tensors = (x.q, x.cache.k, x.cache.v, x.block_table, x.cu_seqlens_q, x.seq_lens, *scales, x.block_mask)
    (step,) = launches(*tensors, x.q.shape[-1] ** -0.5, out, None, config=config)
    return step, out


def prefill_call(x: Inputs, config: Config | None = None) -> Callable[[], torch.Tensor]:
    """That launch as a call that returns its output; on a CPU it is emulated."""
    step, out = prefill_step(x, config)
    if not is_cuda(out.device):
        return lambda: (step.run(out.device), out)[1]
    bound = Bound(step)

    def call(inputs: Inputs = x) -> torch.Tensor:  # the arguments are addresses: `inputs` keeps what lies there
        bound(bound.flat, out.device.index)
        return out

    return call


@cache
def compiled(quant: str = "type1", config: str = "k3v2_turns") -> Compiled:
    """The prefill kernel of the measurements, compiled for Hopper without a GPU."""
    step, _ = prefill_step(workload(128, 128, quant).build(), CONFIGS[config])
    return Variant.from_launch(f"prefill, {quant}, {config}", step.kernel, *step.args, **step.options).compile()


def compile_ahead(quants: Sequence[str], configs: Sequence[str]) -> None:
    """Compile the variants to Triton's cache, each in a process of its own: one after the other takes a minute."""
    code = "import sys; from hpcattn.lessons.fp8_prefill import compiled; compiled(*sys.argv[1:])"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    pairs = [(quant, config) for quant in quants for config in configs]
    jobs = [subprocess.Popen([sys.executable, "-c", code, *pair], **quiet) for pair in pairs]
    for job in jobs:
        job.wait()  # what a failed one leaves out is compiled when it is needed


def measure_all(
    device: torch.device | str = "cuda",
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    quants: Sequence[str] = QUANTS,
    configs: Sequence[str] = tuple(CONFIGS),
    error_queries: int = ERROR_QUERIES,
    error_keys: Sequence[int] = ERROR_KEYS,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    sum_programs: int = SUM_PROGRAMS,
    replays: int = 20,
    warmup: int = 3,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time everything that the lesson shows; rows of table `records`, all cases with a prefix.

    `<config>_<queries>x<keys>`: the prefill kernel in a configuration, steady. Without a time, errors against float64
    on the same quantised inputs: `error_<prefill|decode>_<keys>_mean<0|1>`, ours and the peers that are installed;
    `sum_<fresh|chained>_<keys>_mean<0|1>`, lesson 05b's sums of P V, in fp32 or in the tensor core's accumulator.
    """
    origin = provenance(device, new_run_id(), commit)
    if is_cuda(device):
        compile_ahead(quants, configs)
    found = [*_sums(error_keys, sum_programs, device)]
    found += _errors(error_queries, error_keys, heads, device)
    for quant in quants:
        for q_len, kv_len in shapes:
            chosen = {name: CONFIGS[name] for name in configs}
            found += _times(workload(q_len, kv_len, quant, heads), chosen, device, replays, warmup)
    return pd.DataFrame([Record(**row, **origin) for row in found], columns=records.COLUMNS)


def _sums(lengths: Sequence[int], programs: int, device) -> Iterator[dict]:
    for kv_len in lengths:
        for mean in MEANS:
            v, p = fp8_operands.inputs("pairs", programs * kv_len, device, mean)
            for name, fresh in (("fresh", True), ("chained", False)):
                error = fp8_operands.error_of(v, p, kv_len // fp8_operands.TILE, method="pairs", fresh=fresh)
                yield _row(f"sum_{name}_{kv_len}_mean{mean:g}", error, suite="decode")


def _errors(queries: int, lengths: Sequence[int], heads: tuple[int, int], device) -> Iterator[dict]:
    for kv_len in lengths:
        for work in (workload(queries, kv_len, heads=heads), decode_workload(kv_len, heads=heads)):
            candidates = adapters_for(work, device)
            for mean in MEANS:
                poisoned, finite = (work.build(device, poison=p, v_mean=mean) for p in (True, False))
                want = poisoned.reference()[0]
                for adapter in candidates:
                    case = f"error_{work.suite}_{kv_len}_mean{mean:g}"
                    error = _error_of(adapter, poisoned if adapter.ours else finite, want, case)
                    yield _row(
                        case, error, suite=work.suite, layout=work.layout, page_size=64, schedule=adapter.schedule,
                        implementation=adapter.name, peer_version="-" if adapter.ours else adapter.version(),
                    )  # fmt: skip
                del poisoned, finite, want


def adapters_for(work: Workload, device) -> list[Adapter]:
    """Ours and, on a GPU, the peers that are installed: paged, decode with the schedule that balances."""
    schedule = "dynamic" if work.suite == "decode" else "-"
    if not is_cuda(device):
        return [Ours("hopper", schedule)]  # emulated
    found = []
    for adapter in ADAPTERS:
        fits = adapter.name in ("hopper", *PEERS) and adapter.supports(work) and adapter.page_size(work)
        if fits and adapter.schedule in ("-", schedule) and adapter.available()[0]:
            found.append(adapter)
    return found


def _error_of(adapter: Adapter, x: Inputs, want: torch.Tensor, case: str) -> float:
    """inf for a peer's NaN or failing call; AssertionError if ours is wrong."""
    try:
        error = relative_error(adapter.prepare(x)(), want)
    except Exception:  # whatever a peer raises is its result
        if adapter.ours:
            raise
        error = math.inf
    if adapter.ours and not error <= BOUNDS["fp8"]:
        raise AssertionError(f"{case}: relative error {error}")
    return error if error == error else math.inf


def _times(work: Workload, configs: Mapping[str, Config], device, replays: int, warmup: int) -> Iterator[dict]:
    errors = dict.fromkeys(configs, 0.0)
    for mean in MEANS:
        x = work.build(device, v_mean=mean)
        want = x.reference()[0]
        for name, config in configs.items():
            error = relative_error(prefill_call(x, config)(), want)
            if not error <= BOUNDS["fp8"]:
                raise AssertionError(f"{name}, {work.quant}, V of mean {mean:g}: relative error {error}")
            errors[name] = max(errors[name], error)
        del x, want
    sets = work.build_many(copies_to_exceed_l2(work.bytes_moved, l2_bytes(device)), device, poison=False)
    calls = {name: [prefill_call(x, config) for x in sets] for name, config in configs.items()}
    for name, timing in measure("steady", calls, timer_for(device), replays=replays, warmup=warmup).items():
        columns = ("median_us", "p10_us", "p90_us", "floor_us", "sm_clock_mhz")
        times = {column: getattr(timing, column) for column in columns}
        yield _row(
            f"{name}_{work.case}", errors[name], suite="prefill", quant=work.quant, layout=work.layout, page_size=64,
            tflop_per_s=work.flops / timing.median_us * 1e-6, **times,
        )  # fmt: skip


def _row(case: str, error: float, *, suite: str, **columns) -> dict:
    same = dict(dtype="fp8", quant="type1", layout="NHD", page_size=0, schedule="-", implementation="hopper")
    tokens = int(suite == "decode")
    return dict(
        suite=suite, case=PREFIX + case, num_query_tokens=tokens, protocol="steady", rel_error=error
    ) | same | columns  # fmt: skip


def record(path: Path | str = RECORDED, *, commit: str = "", **kwargs) -> pd.DataFrame:
    """`measure_all(**kwargs)`, appended to a CSV file of table `records`."""
    return recording.append(path, measure_all(commit=commit or None, **kwargs))


def recorded(path: Path | str = RECORDED) -> pd.DataFrame:
    """The newest recorded rows of this lesson, cases without prefix; none if nobody has measured yet."""
    frame = records.latest(records.load(path))
    return by_case(frame[frame.case.str.startswith(PREFIX)])


def by_case(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `measure_all` with their cases without prefix."""
    return frame.assign(case=frame.case.str.removeprefix(PREFIX)) if len(frame) else frame
