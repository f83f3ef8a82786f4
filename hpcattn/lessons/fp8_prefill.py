"""Lesson 07b, FP8 prefill: rounding, sums in the tensor core, the transpose of V; the checker, measurements."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy import ndarray as Array
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.peers import ADAPTERS, Adapter, Ours
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import Inputs, Workload
from hpcattn.cache import flatten_scales
from hpcattn.inspection import Compiled, Variant
from hpcattn.kernels.hopper.launch import Bound, Launch
from hpcattn.kernels.hopper.prefill_launch import Config, launches
from hpcattn.lessons import fp8_operands, recording
from hpcattn.lessons.fp8_operands import LANE, ldmatrix_trans, prmt
from hpcattn.lessons.fp8_prefill_kernels import transpose_kernel
from hpcattn.lessons.recording import RECORDED
from hpcattn.quantization import FP8, FP8_MAX
from hpcattn.reference import relative_error

TILE, HEAD_DIM = 128, 128
BITS = 13  # behind the leading one, of whatever the fp8 tensor core adds
K_STEP = 32  # k of one fp8 wgmma

# --- Rounding and sums ------------------------------------------------------------------------------------------------


def rounded(x: Array) -> Array:
    """To e4m3 and back, saturating, in float64."""
    clipped = torch.from_numpy(np.clip(x, -FP8_MAX, FP8_MAX).astype(np.float32))
    return clipped.to(FP8).double().numpy()


def weights_and_values(kv_len: int, mean: float, sink: float = 0.0, rows: int = 8, columns: int = 32, seed: int = 0):
    """(p, v): softmax numerators `[rows, kv_len]`, at most 1, of normal scores; e4m3 values `[kv_len, columns]`.

    sink: the first key's score lies so far above all others, as that of an "attention sink" does.
    """
    dice = np.random.default_rng(seed)
    scores = dice.standard_normal((rows, kv_len))
    if sink:
        scores[:, 0] = scores.max(1) + sink
    v = dice.standard_normal((kv_len, columns)) + mean
    return np.exp(scores - scores.max(1, keepdims=True)), rounded(v * FP8_MAX / np.abs(v).max())


def norm_error(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def rounding_error(kv_len: int, mean: float, factor: float = 256.0, sink: float = 0.0) -> float:
    """Of O, if weights are rounded to e4m3 after multiplication by `factor` and O to bf16, and nothing else is."""
    p, v = weights_and_values(kv_len, mean, sink)
    total = p.sum(1)[:, None]  # as in the kernel, of weights before rounding
    o = torch.from_numpy(rounded(factor * p) @ v / factor / total)
    return norm_error(o.bfloat16().double().numpy(), p @ v / total)


def grid_of(largest: Array, bits: int) -> Array:
    """The step to which addends are truncated that are summed with one of this size."""
    return np.exp2(np.floor(np.log2(np.maximum(largest, 1e-30))) - bits)


def add_products(acc: Array, products: Array, bits: int = BITS) -> Array:
    """acc and its `[..., 32]` products, each truncated to `bits` bits below the largest of them, then summed."""
    step = grid_of(np.maximum(np.abs(products).max(-1), np.abs(acc)), bits)
    total = np.trunc(acc / step) + np.trunc(products / step[..., None]).sum(-1)
    return total * step


def tensor_core_sum(p: Array, v: Array, *, fresh_every: int | None = None, bits: int = BITS) -> Array:
    """p v `[rows, columns]` as the fp8 tensor core sums it, 32 tokens at a time.

    fresh_every: tokens after which the accumulator starts from zero and what it held is added elsewhere, exactly.
    """
    total = np.zeros((p.shape[0], v.shape[1]))
    acc = np.zeros_like(total)
    for k in range(0, p.shape[1], K_STEP):
        if fresh_every and k % fresh_every == 0:
            total, acc = total + acc, np.zeros_like(acc)
        acc = add_products(acc, p[:, None, k : k + K_STEP] * v.T[None, :, k : k + K_STEP], bits)
    return total + acc


def sum_error(kv_len: int, mean: float, *, fresh_every: int | None = None, bits: int = BITS) -> float:
    """Relative error of that sum for rounded weights: nothing but the accumulator."""
    p, v = weights_and_values(kv_len, mean)
    p = rounded(256 * p)
    return norm_error(tensor_core_sum(p, v, fresh_every=fresh_every, bits=bits), p @ v)


# --- The transpose ----------------------------------------------------------------------------------------------------

BLOCK = 16  # tokens, and bytes of each


def label(token: Array | int, d: Array | int) -> Array | int:
    return HEAD_DIM * token + d


def block_in_memory() -> Array:
    """Labels `[16 tokens, 16 d]` of a block of V."""
    return label(np.arange(BLOCK)[:, None], np.arange(BLOCK)[None, :])


def loaded_matrices() -> tuple[Array, Array]:
    """What `ldmatrix.trans` gives each lane of the block's tokens 0-7 and 8-15: labels `[32, 4]`, lowest byte first."""
    shared = block_in_memory().ravel()
    return ldmatrix_trans(shared, BLOCK * np.arange(8)), ldmatrix_trans(shared, BLOCK * np.arange(8, 16))


def sorted_registers() -> tuple[Array, Array]:
    """The registers of even and of odd d after the two PRMT."""
    x, y = loaded_matrices()
    return prmt(x, y, 0x6420), prmt(x, y, 0x7531)


def stmatrix(registers: Array) -> Array:
    """One 8 x 16-byte matrix: lane 4 g + t gives bytes 4 t to 4 t + 3 of row g."""
    return registers.reshape(8, 16)


def transposed_block() -> Array:
    """Labels of the block of V^T in shared memory, `[16 rows, 16 places along k]`."""
    return np.concatenate([stmatrix(register) for register in sorted_registers()])


def feature_of_row(row: Array | int) -> Array | int:
    """Which d a row of V^T is: 8 even ones, then 8 odd ones, of every 16."""
    return 16 * (row >> 4) + 2 * (row & 7) + (row >> 3 & 1)


def held_columns(lane: int) -> list[int]:
    """Columns of 16 scores that a lane has, of its rows g and g + 8: 2t, 2t + 1, and 8 more."""
    t = lane % 4
    return [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]


def transposed(method: str, v: Tensor) -> Tensor:
    """V^T as `transpose_kernel` leaves it in shared memory, of e4m3 v `[128, 128]`; emulated on a CPU."""
    args, options = _transposition(method, v)
    if v.is_cuda:
        transpose_kernel[(1,)](*args, **options)
    else:
        emulator.launch(transpose_kernel, (1,), *args, **options)
    return args[1]


def _transposition(method: str, v: Tensor) -> tuple[tuple, dict]:
    descriptor = TensorDescriptor.from_tensor(v, list(v.shape), gl.NVMMASharedLayout(128, 8, 2))
    return (descriptor, torch.empty_like(v)), {"METHOD": method, "num_warps": 2}


@cache
def compiled_transpose(method: str) -> Compiled:
    """`transpose_kernel` for two warps, compiled for Hopper without a GPU."""
    args, options = _transposition(method, torch.zeros(TILE, HEAD_DIM, dtype=FP8))
    return Variant.from_launch(f"transpose, {method}", transpose_kernel, *args, **options).compile()


# --- The exercise -----------------------------------------------------------------------------------------------------


def check_token_at(token_at: Callable[[int], int]) -> None:
    """`token_at(k)`: which token of a tile of 128 must stand at place k of a row of V^T, so that each meets its weight.

    Every byte of P and V has a label of its own. Raises AssertionError with a place that is wrong, and why.
    """
    order = [token_at(k) for k in range(TILE)]
    for k, token in enumerate(order):
        assert isinstance(token, int | np.integer), f"token_at({k}) must be an int, got {token!r}"
    twice = next((token for token, n in Counter(order).items() if n > 1), None)
    assert twice is None, f"token {twice} stands at places {[k for k, x in enumerate(order) if x == twice]}"
    assert set(order) == set(range(TILE)), f"token_at must stay within 0 to {TILE - 1}, got {min(order)} … {max(order)}"
    for block in range(TILE // BLOCK):
        start = BLOCK * block
        weights = _packed_weights(start)  # [16 rows, 16 places], labels (row, token)
        values = label(np.array(order[start : start + BLOCK])[None, :], np.arange(BLOCK)[:, None])
        wrong = np.argwhere(weights[:, None, :] % TILE != values[None] // HEAD_DIM)  # [rows, d, places]
        if len(wrong):
            place = int(wrong[:, 2].min())
            lane = place // 4
            have, want = order[start + place], int(weights[0, place] % TILE)
            raise AssertionError(
                f"{len(wrong)} of {16**3} products pair a weight with another token's value. The first: place "
                f"{start + place} has the value of token {have}, but byte {place % 4} of lane {lane}'s register is the "
                f"weight of token {want} (lane {lane} holds tokens {[start + x for x in held_columns(lane)]})"
            )


def _packed_weights(start: int) -> Array:
    """Labels, TILE row + token, of 16 rows of P for 16 tokens as the tensor core takes them from packed registers."""
    operand = np.full((16, BLOCK), -1)
    for lane in LANE:
        for half in (0, 8):
            row = lane // 4 + half
            four = [TILE * row + start + x for x in held_columns(lane)]  # `fp8.pack`, lowest byte first
            operand[row, 4 * (lane % 4) : 4 * (lane % 4) + 4] = four
    return operand


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
    "k3v2_early": Config(2, 3, 2, False, False, True),
    "k3v2_early_turns": Config(2, 3, 2, True, False, True),
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


def prefill_step(x: Inputs, config: Config | None = None) -> tuple[Launch, Tensor]:
    """The launch of the library's prefill kernel on one request, in a configuration, and where it writes."""
    out = torch.full(x.q.shape, math.nan, dtype=torch.bfloat16, device=x.q.device)
    scales = flatten_scales(x.cache, x.scales)
    tensors = (x.q, x.cache.k, x.cache.v, x.block_table, x.cu_seqlens_q, x.seq_lens, *scales, x.block_mask)
    (step,) = launches(*tensors, x.q.shape[-1] ** -0.5, out, None, config=config)
    return step, out


def prefill_call(x: Inputs, config: Config | None = None) -> Callable[[], Tensor]:
    """That launch as a call that returns its output; on a CPU it is emulated."""
    step, out = prefill_step(x, config)
    if not is_cuda(out.device):
        return lambda: (step.run(out.device), out)[1]
    bound = Bound(step)

    def call(inputs: Inputs = x) -> Tensor:  # the arguments are addresses: `inputs` keeps what lies there
        bound(bound.flat, out.device.index)
        return out

    return call


@cache
def compiled(quant: str = "type1", config: str = "k3v2_turns") -> Compiled:
    """The prefill kernel of the measurements, compiled for Hopper without a GPU."""
    step, _ = prefill_step(workload(128, 128, quant).build(), CONFIGS[config])
    return Variant.from_launch(f"prefill, {quant}, {config}", step.kernel, *step.args, **step.options).compile()


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
        recording.in_processes(compiled, [(quant, config) for quant in quants for config in configs])
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


def _error_of(adapter: Adapter, x: Inputs, want: Tensor, case: str) -> float:
    """inf for a peer's NaN or failing call; AssertionError if ours is wrong."""
    try:
        error = relative_error(adapter.prepare(x)(), want)
    except Exception:  # whatever a peer raises is its result
        if adapter.ours:
            raise
        error = math.inf
    if adapter.ours:
        return recording.checked(error, case, "fp8")
    return error if error == error else math.inf


def _times(work: Workload, configs: Mapping[str, Config], device, replays: int, warmup: int) -> Iterator[dict]:
    errors = dict.fromkeys(configs, 0.0)
    for mean in MEANS:
        x = work.build(device, v_mean=mean)
        want = x.reference()[0]
        for name, config in configs.items():
            error = relative_error(prefill_call(x, config)(), want)
            what = f"{name}, {work.quant}, V of mean {mean:g}"
            errors[name] = max(errors[name], recording.checked(error, what, "fp8"))
        del x, want
    sets = work.build_many(copies_to_exceed_l2(work.bytes_moved, l2_bytes(device)), device, poison=False)
    calls = {name: [prefill_call(x, config) for x in sets] for name, config in configs.items()}
    for name, timing in measure("steady", calls, timer_for(device), replays=replays, warmup=warmup).items():
        yield recording.prefill_row(f"{PREFIX}{name}_{work.case}", timing, errors[name], work)


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


def times_of(rows: pd.DataFrame) -> dict[tuple[str, str], dict[str, float]]:
    """µs of each configuration, by (quant, shape); only what is there."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.dropna(subset="median_us").itertuples():
        name, _, shape = row.case.rpartition("_")
        if name in CONFIGS:
            found.setdefault((row.quant, shape), {})[name] = float(row.median_us)
    return found


Errors = dict[str, dict[float, dict[int, float]]]  # by implementation or kind, mean of V, keys


def errors_of(rows: pd.DataFrame, suite: str = "prefill") -> Errors:
    """Relative errors of ours and of peers; for prefill, peers of `data/<gpu>/accuracy.csv` where there is no row."""
    found: Errors = {}
    if suite == "prefill":
        for row in records.load(RECORDED.parent / "accuracy.csv", table="accuracy").itertuples():
            found.setdefault(row.implementation, {}).setdefault(row.v_mean, {})[row.kv_len] = row.rel_error
    for row in rows.itertuples():
        if match := re.fullmatch(rf"error_{suite}_(\d+)_mean([01])", row.case):
            found.setdefault(row.implementation, {}).setdefault(float(match[2]), {})[int(match[1])] = row.rel_error
    return found


def sums_of(rows: pd.DataFrame) -> Errors:
    """Errors of lesson 05b's sums, "fresh" and "chained": those measured there, and those of `rows`."""
    found: Errors = {}
    earlier = fp8_operands.recorded()
    for case, row in earlier.iterrows():
        if match := re.fullmatch(r"(fresh|chained)_mean([01])", str(case)):
            found.setdefault(match[1], {}).setdefault(float(match[2]), {})[fp8_operands.LONG_SUM] = row.rel_error
    for row in rows.itertuples():
        if match := re.fullmatch(r"sum_(fresh|chained)_(\d+)_mean([01])", row.case):
            found.setdefault(match[1], {}).setdefault(float(match[3]), {})[int(match[2])] = row.rel_error
    return found
