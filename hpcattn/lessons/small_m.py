"""Lesson 05, small-M WGMMA: launches, counts, measurements and the checker of its exercise."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pandas as pd
import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.figures import SHARED_BYTES_PER_CLK, tile_clocks
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import Timing, copies_to_exceed_l2, measure, timer_for
from hpcattn.bench.workloads import DECODE_CASES, Inputs, Workload
from hpcattn.inspection import Compiled, Variant, compile_kernel
from hpcattn.kernels.portable.common import LOG2_E
from hpcattn.kernels.portable.decode import PLAN_TILE, Rows, merge_kernel, num_floats
from hpcattn.lessons import recording
from hpcattn.lessons.recording import BF16_BOUND, checked
from hpcattn.lessons.small_m_kernels import layout_probe, padded_kernel, swapped_kernel
from hpcattn.reference import relative_error
from hpcattn.schedule import multiprocessors, saturating_splits

__all__ = [
    "BF16_BOUND", "COLUMNS", "ROWS", "Decode", "by_case", "check_place", "ctas_per_sm", "loop_opcodes", "measure_all",
    "place_of", "prove_layout", "record", "recorded", "register_bases", "repeated", "resident_calls", "workload",
]  # fmt: skip

TILE, HEAD_DIM, STAGES = 64, 128, 3
PREFIX = "small_m_"


# --- Launching the two kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decode:
    """One of the two kernels, with what a launch on `inputs` needs. bf16, NHD, pages of 64 tokens, D = 128.

    kind: "padded" or "swapped". columns: N of the swapped kernel; by default the smallest that holds the rows.
    """

    kind: str
    inputs: Inputs
    num_splits: int = 1
    stages: int = STAGES
    columns: int | None = None
    resident: bool = False
    defer_sum: bool = True

    @property
    def num_query_tokens(self) -> int:
        return self.inputs.workload.num_query_tokens

    @property
    def rows(self) -> int:
        """Query rows that share a KV head: S * G."""
        work = self.inputs.workload
        return work.num_query_tokens * work.num_q_heads // work.num_kv_heads

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.num_splits, self.inputs.cache.num_kv_heads, len(self.inputs.seq_lens)

    @cached_property
    def states(self) -> Tensor:
        """Every program's partial state, in the layout of `hpcattn.kernels.portable.decode`."""
        floats = num_floats(math.prod(self.grid), self.rows, HEAD_DIM)
        return torch.empty(floats, dtype=torch.float32, device=self.inputs.q.device)

    @cached_property
    def _descriptors(self) -> list[TensorDescriptor]:
        """K and V as matrices: a row per slot of the pool, a column per head and dimension."""
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        matrices = [x.flatten(0, 1).flatten(1, 2) for x in (self.inputs.cache.k, self.inputs.cache.v)]
        return [TensorDescriptor.from_tensor(x, [TILE, HEAD_DIM], layout) for x in matrices]

    @property
    def kernel(self):
        return padded_kernel if self.kind == "padded" else swapped_kernel

    @property
    def args(self) -> tuple:
        x = self.inputs
        scale = LOG2_E / math.sqrt(HEAD_DIM)
        return x.q, *self._descriptors, x.block_table, x.seq_lens, self.states, x.block_table.stride(0), scale

    @property
    def options(self) -> dict:
        options = {"S": self.num_query_tokens, "G": self.rows // self.num_query_tokens, "STAGES": self.stages}
        options |= {"RESIDENT": self.resident, "num_warps": 4}
        if self.kind == "swapped":
            options |= {"N": self.columns or max(8, triton.next_power_of_2(self.rows)), "DEFER_SUM": self.defer_sum}
        return options

    def compiled(self) -> Compiled:
        """For Hopper, without a GPU."""
        return Variant.from_launch(self.kind, self.kernel, *self.args, **self.options).compile()

    def attend(self, schedule_seed: int = 0) -> None:
        """Fill `states`: on a Hopper GPU, or emulated for tensors on the CPU."""
        if is_cuda(self.states.device):
            self.kernel[self.grid](*self.args, **self.options)
        else:
            options = self.options | {"schedule_seed": schedule_seed}
            emulator.launch(self.kernel, self.grid, *self.args, **options, unwritten=[self.states])

    def merge(self) -> tuple[Tensor, Tensor]:
        """(o, lse) of the states, by the portable merge kernel of lesson 03."""
        x, (splits, heads, batch) = self.inputs, self.grid
        o, lse = torch.empty_like(x.q), x.q.new_empty(x.q.shape[:2], dtype=torch.float32)
        capacity = x.block_table.shape[1] * TILE
        rows = Rows(x.q, x.q.stride()[:2], None, None, x.seq_lens, capacity, o, lse, self.states, math.prod(self.grid))
        shape = {"S": self.num_query_tokens, "G": self.rows // self.num_query_tokens, "D": HEAD_DIM}
        merge_kernel[self.rows, heads, batch](
            rows, None, None, splits, heads, **shape, QUANT="none", PLAN_TILE=PLAN_TILE, BLOCK=16
        )
        return o, lse

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.attend()
        return self.merge()

    def error(self) -> float:
        """Relative error of o against the float64 oracle."""
        return relative_error(self()[0], self.inputs.reference()[0])


def workload(kv_lens: Sequence[int], rows: int = 8, *, case: str = "", num_query_tokens: int = 1, heads: int = 1):
    """A bf16 decode of one query token (or more) with `rows` query rows on each KV head, in pages of 64 tokens."""
    q_heads = heads * rows // num_query_tokens
    return Workload(
        suite="decode", case=case or "lesson", q_lens=(num_query_tokens,) * len(kv_lens), kv_lens=tuple(kv_lens),
        num_q_heads=q_heads, num_kv_heads=heads, page_size=TILE,
    )  # fmt: skip


def repeated(requests: int, tiles: int, period: int, rows: int = 8, **kwargs) -> Inputs:
    """Requests of `tiles` tiles each whose block tables repeat the same `period` pages: what a resident ring sees."""
    x = workload((period * TILE,) * requests, rows).build(**kwargs)
    table = x.block_table[:1, torch.arange(tiles, device=x.q.device) % period].repeat(requests, 1)
    return replace(x, block_table=table, seq_lens=torch.full_like(x.seq_lens, tiles * TILE))


# --- Counting -------------------------------------------------------------------------------------------------------


def ctas_per_sm(kernel: Compiled) -> dict[str, int]:
    """How many CTAs one Hopper SM can hold as far as each of its resources goes; the smallest is the occupancy.

    65,536 registers, given to a warp in portions of 256; 228 KiB of shared memory, of which each CTA takes one KiB
    more than it asks for; 64 warps; 32 CTAs.
    """
    registers_of_a_warp = -(-kernel.registers * 32 // 256) * 256
    return {
        "registers": 65536 // (registers_of_a_warp * kernel.num_warps),
        "shared memory": 228 * 1024 // (kernel.shared_bytes + 1024),
        "warps": 64 // kernel.num_warps,
        "CTAs": 32,
    }


def loop_opcodes(kernel: Compiled) -> Counter[str]:
    """How often each SASS opcode, with its modifiers, occurs in the tile loop. Instructions under a predicate count.

    The loop ends with the conditional branch back over all tensor-core instructions of the kernel; where a wait spins,
    the code lies elsewhere and does not count.
    """
    lines = [line.partition("\t")[2] or line for line in kernel.sass.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\w+:", line)}
    products = sum("HGMMA" in line for line in lines)
    bodies = []
    for end, line in enumerate(lines):
        branch = re.match(r"@!?U?P\w+ BRA.*?(\w+);", line)
        body = lines[labels.get(branch[1], end) : end + 1] if branch else []
        if sum("HGMMA" in x for x in body) == products > 0:
            bodies.append(body)
    if not bodies:
        raise ValueError(f"{kernel.name} has no loop around its tensor-core instructions")
    opcode = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)[ ;]")
    return Counter(m[1] for m in map(opcode.match, min(bodies, key=len)) if m)


def tile_budget(kind: str, columns: int, dtype: str, ceilings: Ceilings, *, resident: bool = False) -> dict[str, float]:
    """Clocks that one 64-token tile keeps each resource of an SM busy. columns: N of the swapped kernel.

    As `hpcattn.bench.figures.tile_clocks`, with the shared memory counted operand by operand: what TMA and the softmax
    write, and what WGMMA reads: A once for each 64 rows, B once for each 64 rows of A. (A padded P stays in registers.)
    resident: the tile is in shared memory already.
    """
    element = 2 if dtype == "bf16" else 1
    tile = TILE * HEAD_DIM * element
    moved = 0 if resident else 2 * tile  # K and V by TMA
    if kind == "padded":
        moved += 3 * tile  # Q, K and V
    else:
        p = TILE * columns * element
        moved += 2 * tile + HEAD_DIM * columns * element + (1 + HEAD_DIM // 64) * p
    clocks = tile_clocks(64 if kind == "padded" else columns, dtype, ceilings, from_dram=not resident)
    return clocks | {"shared memory": moved / SHARED_BYTES_PER_CLK}


# --- Measurements ---------------------------------------------------------------------------------------------------

ROWS = (8, 16, 24, 32, 40, 64)
COLUMNS = (16, 32, 64)  # N beyond what 8 rows need
CASES = {name: DECODE_CASES[name] for name in ("uniform_4096", "uniform_512")}
RESIDENT_STAGES = 2  # so that two CTAs fit on an SM whatever N


def contenders(sets: Sequence[Inputs], num_splits: int, columns: Sequence[int] = ()) -> dict[str, list[Decode]]:
    """Both kernels on every input set; the swapped one also with more columns than its 8 rows need."""
    kinds = {"padded": ("padded", None), "swapped": ("swapped", None)}
    kinds |= {f"swapped_n{n}": ("swapped", n) for n in columns}
    return {
        name: [Decode(kind, x, num_splits, columns=columns) for x in sets] for name, (kind, columns) in kinds.items()
    }


def resident_calls(
    device: torch.device | str, ctas_per_sm: int, tiles: int, num_sms: int, columns: Sequence[int]
) -> dict[str, Decode]:
    """Calls whose CTAs, so many on every SM, take two resident tiles again and again."""
    x = repeated(ctas_per_sm * num_sms, tiles, RESIDENT_STAGES, device=device)
    calls = {"padded": Decode("padded", x, stages=RESIDENT_STAGES, resident=True)}
    for n in (8, *columns):
        calls[f"swapped_n{n}"] = Decode("swapped", x, stages=RESIDENT_STAGES, resident=True, columns=n)
    return calls


def measure_all(
    device: torch.device | str = "cuda",
    *,
    cases: Mapping[str, Sequence[int]] = CASES,
    rows: Sequence[int] = ROWS,
    columns: Sequence[int] = COLUMNS,
    tiles: int = 384,
    num_sms: int | None = None,
    replays: int = 10,
    warmup: int = 3,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time everything that the lesson shows, in the steady protocol; rows of table `records`.

    `small_m_<kernel>_<case>`: 8 rows, with the merge; `…_unmerged`: the attention kernel alone.
    `small_m_<kernel>_rows_<rows>`: the attention kernel alone on the first case.
    `small_m_<kernel>_resident_<CTAs per SM>`: `tiles` tiles per CTA that stay in shared memory.
    """
    origin = provenance(device, new_run_id(), commit)
    options = {"device": device, "replays": replays, "warmup": warmup}
    found = [row for name, lens in cases.items() for row in _measure_case(name, lens, columns, **options)]
    name, lens = next(iter(cases.items()))
    found += [row for n in rows for row in _measure_rows(name, lens, n, **options)]
    num_sms = num_sms or multiprocessors(torch.device(device))
    found += [row for ctas in (1, 2) for row in _measure_resident(ctas, tiles, num_sms, columns, **options)]
    return pd.DataFrame([Record(**row, **origin) for row in found], columns=records.COLUMNS)


def _measure_case(
    name: str, lens: Sequence[int], columns: Sequence[int], *, device, replays: int, warmup: int
) -> Iterator[dict]:
    work = workload(lens)
    num_splits = saturating_splits(len(lens), 1, max(lens), torch.device(device))
    errors = _errors(work, num_splits, device, columns)
    sets = work.build_many(copies_to_exceed_l2(work.kv_bytes, l2_bytes(device)), device)
    calls = contenders(sets, num_splits, columns)
    timed = _timed({k: [x.attend for x in v] for k, v in calls.items()}, device, replays, warmup)
    for kind, timing in timed.items():
        yield _row(f"{kind}_{name}_unmerged", timing, errors[kind], work)
    whole = {k: calls[k] for k in ("padded", "swapped")}
    for kind, timing in _timed(whole, device, replays, warmup).items():
        yield _row(f"{kind}_{name}", timing, errors[kind], work)


def _measure_rows(name: str, lens: Sequence[int], rows: int, *, device, replays: int, warmup: int) -> Iterator[dict]:
    work = workload(lens, rows)
    num_splits = saturating_splits(len(lens), 1, max(lens), torch.device(device))
    errors = _errors(work, num_splits, device)
    sets = work.build_many(copies_to_exceed_l2(work.kv_bytes, l2_bytes(device)), device)
    calls = {kind: [Decode(kind, x, num_splits).attend for x in sets] for kind in ("padded", "swapped")}
    if rows > 32:  # with three stages only one CTA of the swapped kernel fits on an SM
        calls["swapped_2_stages"] = [Decode("swapped", x, num_splits, stages=2).attend for x in sets]
        errors["swapped_2_stages"] = checked(Decode("swapped", sets[0], num_splits, stages=2).error(), "two stages")
    for kind, timing in _timed(calls, device, replays, warmup).items():
        yield _row(f"{kind}_rows_{rows}", timing, errors[kind], work)


def _measure_resident(
    ctas: int, tiles: int, num_sms: int, columns: Sequence[int], *, device, replays: int, warmup: int
) -> Iterator[dict]:
    few = resident_calls(device, 1, 2 * RESIDENT_STAGES, 2, columns)
    errors = {kind: checked(call.error(), f"{kind}, resident") for kind, call in few.items()}
    calls = resident_calls(device, ctas, tiles, num_sms, columns)
    timed = _timed({kind: [call.attend] for kind, call in calls.items()}, device, replays, warmup)
    for kind, timing in timed.items():
        yield _row(f"{kind}_resident_{ctas}", timing, errors[kind], None)


def _errors(work: Workload, num_splits: int, device, columns: Sequence[int] = ()) -> dict[str, float]:
    """Relative error against the float64 oracle, the worse of V of mean 0 and of mean 1. Raises if one is too large."""
    errors: dict[str, float] = {}
    for v_mean in (0.0, 1.0):
        x = work.build(device, v_mean=v_mean)
        want = x.reference()[0]
        for kind, (call,) in contenders([x], num_splits, columns).items():
            error = checked(relative_error(call()[0], want), f"{kind}, {work.num_q_heads} rows, V of mean {v_mean:g}")
            errors[kind] = max(errors.get(kind, 0.0), error)
    return errors


def _timed(calls: Mapping[str, Sequence[Callable]], device, replays: int, warmup: int) -> dict[str, Timing]:
    return measure("steady", calls, timer_for(device), replays=replays, warmup=warmup)


def _row(case: str, timing: Timing, error: float, work: Workload | None) -> dict:
    return recording.row(PREFIX + case, timing, error, work, page_size=TILE, schedule="static")


_lesson = recording.LessonRows(PREFIX, measure_all)
record, recorded, by_case = _lesson.record, _lesson.recorded, _lesson.by_case


# --- The exercise ---------------------------------------------------------------------------------------------------

# Powers of two of (register, lane, warp) of a WGMMA accumulator [64, n] and the (row, column) they stand for; places
# add up. Registers from n / 2 on hold the next 64 rows.
LANES = ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0))
WARPS = ((16, 0), (32, 0))


def register_bases(n: int, height: int = 64) -> list[tuple[int, int]]:
    """What the bits of a register's number stand for, for accumulators `[height, n]`."""
    columns = [(0, 8 << i) for i in range((n // 8).bit_length() - 1)]
    blocks = [(64 << i, 0) for i in range((height // 64).bit_length() - 1)]
    return [(0, 1), (8, 0), *columns, *blocks]


def place_of(thread: int, register: int, n: int, height: int = 64) -> tuple[int, int]:
    """(row, column) of what a thread of the warpgroup has in one of its accumulator registers."""
    bits = [*register_bases(n, height), *LANES, *WARPS]
    number = register | thread << len(register_bases(n, height))
    chosen = [base for i, base in enumerate(bits) if number >> i & 1]
    return sum(row for row, _ in chosen), sum(column for _, column in chosen)


def prove_layout(n: int, height: int = 64) -> None:
    """Have the compiler compare its layout of accumulators `[height, n]` with `place_of`; it raises if they differ."""
    bases = {"REGISTERS": register_bases(n, height), "LANES": LANES, "WARPS": WARPS}
    lists = {name: [list(base) for base in pairs] for name, pairs in bases.items()}
    compile_kernel(layout_probe, {"out": "*fp32"}, {"N": n, "HEIGHT": height, **lists}, num_warps=4)


def check_place(place: Callable[[int, int, int], tuple[int, int]]) -> None:
    """Raise AssertionError with a counter-example unless `place(thread, register, n)` is right for the accumulators of
    both swapped products: Sᵀ `[64, n]`, n / 2 registers, and Oᵀ `[128, n]`, n registers, for n = 8, 16, 32, 64.
    """
    for n in (8, 16, 32, 64):
        for register in range(n):
            for thread in range(128):
                want, got = place_of(thread, register, n, 128), place(thread, register, n)
                assert isinstance(got, tuple) and len(got) == 2, f"place must return (row, column), got {got!r}"
                assert tuple(got) == want, (
                    f"n = {n}: register {register} of thread {thread} (warp {thread // 32}, lane {thread % 32}) holds "
                    f"row {want[0]}, column {want[1]}; yours says row {got[0]}, column {got[1]}"
                )
