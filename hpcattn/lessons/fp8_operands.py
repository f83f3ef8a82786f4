"""Lesson 05b, FP8 operands: the way of every byte of V to the tensor core, the exercise's checker, measurements.

Bytes are stood in for by labels, 128 token + d, so that each of the 8192 bytes of a tile can be told from the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from numpy import ndarray as Array
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hpcattn import emulator
from hpcattn.bench import records
from hpcattn.bench.provenance import is_cuda, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import measure, timer_for
from hpcattn.emulator.memory import SharedMemory
from hpcattn.inspection import Compiled, Variant
from hpcattn.lessons import recording
from hpcattn.lessons.fp8_operands_kernels import weighted_sum
from hpcattn.lessons.recording import RECORDED
from hpcattn.reference import relative_error

__all__ = [
    "EXPECTED_PRMT",
    "GROUP",
    "LANE",
    "LONG_SUM",
    "MAX_ERROR",
    "CTAS_PER_SM",
    "HEAD_DIM",
    "NUM_TILES",
    "TILE",
    "by_case",
    "check_selectors",
    "compiled",
    "count_wavefronts",
    "d_of_row",
    "ldmatrix_trans",
    "error_of",
    "expected",
    "inputs",
    "loop_of",
    "loop_opcodes",
    "matrix_addresses",
    "measure_operands",
    "name_of",
    "operand",
    "prmt",
    "record",
    "recorded",
    "shared_tile",
    "swizzled",
    "token_of_k",
    "wavefronts",
    "weigh",
]

TILE, HEAD_DIM, GROUP = 64, 128, 8  # tokens, width of V, query rows
LANE = np.arange(32)
EXPECTED_PRMT = 16  # one per register of the operand

# --- The way of a byte ----------------------------------------------------------------------------------------------


def name_of(label: int) -> str:
    """(token, d) of a label."""
    return f"(token {label // HEAD_DIM}, d {label % HEAD_DIM})"


def swizzled(token: Array | int, byte: Array | int) -> Array | int:
    """Address of a byte of a tile in shared memory: the 16-byte chunks of a row are xored with the row number."""
    return token * 128 + (((byte >> 4) ^ (token & 7)) << 4 | (byte & 15))


def shared_tile() -> Array:
    """Labels of a tile by their address in shared memory."""
    token, d = np.divmod(np.arange(TILE * HEAD_DIM), HEAD_DIM)
    labels = np.empty(TILE * HEAD_DIM, np.int64)
    labels[swizzled(token, d)] = np.arange(TILE * HEAD_DIM)
    return labels


def wavefronts(addresses: Array, width: int = 1) -> int:
    """How often shared memory must be read for one access: `width` bytes from each of the addresses.

    A wavefront delivers one 4-byte word from each of the 32 banks, to any number of lanes.
    """
    words = {(int(a) + i) // 4 for a in np.ravel(addresses) for i in range(width)}
    return max(Counter(word % 32 for word in words).values())


def matrix_addresses(tokens: int, byte: int) -> Array:
    """The eight row addresses of an ldmatrix: 16 bytes each of tokens `tokens` to `tokens` + 7, from `byte` on."""
    return swizzled(tokens + np.arange(8), byte)


def ldmatrix_trans(shared: Array, rows: Array) -> Array:
    """One 8 × 8 matrix of 16-bit elements, transposed: the register of each lane, labels `[32, 4]`, lowest byte first.

    Lane 4g + t gets column g of rows 2t and 2t + 1.
    """
    matrix = shared[rows[:, None] + np.arange(16)].reshape(8, 8, 2)
    return np.concatenate([matrix[2 * (LANE % 4), LANE // 4], matrix[2 * (LANE % 4) + 1, LANE // 4]], axis=1)


def prmt(x: Array, y: Array, selector: int) -> Array:
    """Byte permutation: digit i of `selector`, from the right, picks byte i of the result: 0-3 from x, 4-7 from y."""
    return np.concatenate([x, y], axis=-1)[..., [(selector >> 4 * i) & 7 for i in range(4)]]


def operand(even: int, odd: int) -> Array:
    """Labels `[128 rows, 64 k]` of the operand that the tensor core sees after ldmatrix.trans and prmt."""
    shared, result = shared_tile(), np.full((HEAD_DIM, TILE), -1, np.int64)
    for warp in range(4):
        for half in range(2):  # 16 d each; the warp owns 16 rows in each half of the rows
            for group in range(TILE // 16):
                byte = 32 * warp + 16 * half
                x, y = (ldmatrix_trans(shared, matrix_addresses(16 * group + 8 * j, byte)) for j in (0, 1))
                for e, selector in enumerate((even, odd)):
                    row = 64 * half + 16 * warp + 8 * e + LANE // 4
                    k = 16 * group + 4 * (LANE % 4)
                    result[row[:, None], k[:, None] + np.arange(4)] = prmt(x, y, selector)
    return result


def d_of_row(row: Array | int) -> Array | int:
    """Which d a row of the operand holds: row bits (half, warp, e, g) are d bits (warp, half, g, e)."""
    half, warp, e, g = row >> 6, row >> 4 & 3, row >> 3 & 1, row & 7
    return 32 * warp + 16 * half + 2 * g + e


def token_of_k(k: Array | int, neighbours: bool = False) -> Array | int:
    """Which token stands at place k of a row. Of the four bytes of lane t's register, in a group of 16 tokens:

    2t, 2t + 1, 2t + 8, 2t + 9; with `neighbours`, 2t, 2t + 8, 2t + 1, 2t + 9.
    """
    group, t, low, high = k >> 4, k >> 2 & 3, k & 1, k >> 1 & 1
    eight, one = (low, high) if neighbours else (high, low)
    return 16 * group + 8 * eight + 2 * t + one


# --- The kernel -----------------------------------------------------------------------------------------------------


def _arguments(v: Tensor, p: Tensor, o: Tensor, num_tiles: int, **constants) -> tuple[tuple, dict]:
    layout = gl.NVMMASharedLayout(128, 8 * v.element_size(), 2)
    descriptor = TensorDescriptor.from_tensor(v, [TILE, HEAD_DIM], layout)
    stages = constants.pop("stages", 4)
    constants = {name.upper(): value for name, value in constants.items()}
    return (descriptor, p, o, num_tiles), {"G": p.shape[0], "STAGES": stages, "num_warps": 4, **constants}


def weigh(v: Tensor, p: Tensor, num_tiles: int, *, schedule_seed: int = 0, out: Tensor | None = None, **constants):
    """`weighted_sum` over v `[tokens, 128]` with p `[8, 64]`, on the GPU or in the emulator: o `[programs, 8, 128]`.

    constants: method ("in place", "bytes", "pairs"), even, odd, neighbours, fresh, resident, stages.
    """
    per_program = constants.get("stages", 4) if constants.get("resident") else num_tiles
    programs = v.shape[0] // (per_program * TILE)
    o = torch.empty(programs, p.shape[0], HEAD_DIM, device=v.device) if out is None else out
    args, kwargs = _arguments(v, p, o, num_tiles, **constants)
    if v.is_cuda:
        weighted_sum[(programs,)](*args, **kwargs)
    else:
        emulator.launch(weighted_sum, (programs,), *args, schedule_seed=schedule_seed, **kwargs)
    return o


def expected(v: Tensor, p: Tensor, programs: int, uses: int = 1) -> Tensor:
    """What `weighted_sum` should give, in float64 from the same rounded inputs; each tile is used `uses` times."""
    p = (256 * p).to(v.dtype).double() / 256
    sums = torch.stack([x.double().sum(0) for x in v.view(programs, -1, TILE, HEAD_DIM)])
    return uses * (p @ sums)


@cache
def compiled(method: str, **constants) -> Compiled:
    """`weighted_sum` compiled for Hopper, without a GPU."""
    v = torch.zeros(TILE, HEAD_DIM, dtype=torch.bfloat16 if method == "in place" else torch.float8_e4m3fn)
    p = torch.zeros(GROUP, TILE)
    args, kwargs = _arguments(v, p, torch.zeros(1, GROUP, HEAD_DIM), 8, method=method, **constants)
    return Variant.from_launch(f"weighted_sum, {method}", weighted_sum, *args, **kwargs).compile()


def loop_of(kernel: Compiled) -> list[str]:
    """The SASS of the loop around the tensor-core product, one instruction per line, without control codes."""
    lines = kernel.sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.?L\w+):", line))}
    product = next(i for i, line in enumerate(lines) if "GMMA" in line)
    jumps = [(i, labels.get(m[1], i)) for i, line in enumerate(lines) if (m := re.search(r"BRA.*?(\.?L\w+)", line))]
    end, start = min((last, first) for last, first in jumps if first < product < last)  # waits spin further down
    return [line.partition("\t")[2].rstrip("; \n") for line in lines[start + 1 : end + 1] if "\t" in line]


def count_wavefronts(call: Callable[[], object]) -> Counter[str]:
    """Wavefronts of the loads from shared memory to registers (LDS, LDSM) that emulated warps make during `call()`."""
    count: Counter[str] = Counter()
    read = SharedMemory.read

    def counted(self, where, reader):
        if where.shape == (32, 16):  # the rows of four matrices, one matrix after the other
            count["LDSM"] += sum(wavefronts(rows[:, None], 16) for rows in where[:, 0].reshape(4, 8))
        elif len(where) == 32:
            count["LDS"] += wavefronts(where[:, 0], where.shape[1])
        return read(self, where, reader)

    with patch.object(SharedMemory, "read", counted):
        call()
    return count


def loop_opcodes(kernel: Compiled) -> Counter[str]:
    """How often each opcode, without modifiers, occurs in the loop around the tensor-core product."""
    return Counter(line.split()[line.startswith("@")].partition(".")[0] for line in loop_of(kernel))


# --- The exercise ---------------------------------------------------------------------------------------------------


def check_selectors(selectors: Callable[[], tuple[int, int]]) -> None:
    """`selectors()` gives the two prmt selectors (even d, odd d) after which tokens t and t + 8 are neighbours.

    First every byte of a tile is followed to its place, then the kernel is compiled with the selectors. Raises
    AssertionError with a byte that is in the wrong place, or with what the compiler made of it.
    """
    answer = selectors()
    assert isinstance(answer, tuple) and len(answer) == 2, f"Must return two selectors (even, odd), got {answer!r}"
    for name, selector in zip(("even", "odd"), answer, strict=True):
        assert isinstance(selector, int), f"The selector of {name} d must be an int such as 0x6420, got {selector!r}"
        assert 0 <= selector <= 0x7777 and not selector & 0x8888, (
            f"The selector of {name} d must have four digits, each 0 to 7, got {selector:#06x} (a digit of 8 or more "
            "would spread a sign bit)"
        )
    even, odd = answer
    got, (row, k) = operand(even, odd), np.mgrid[:HEAD_DIM, :TILE]
    want = HEAD_DIM * token_of_k(k, neighbours=True) + d_of_row(row)
    wrong = np.argwhere(got != want)
    if len(wrong):
        row, k = (int(x) for x in wrong[0])
        kind = ("even", "odd")[row >> 3 & 1]
        lane = 4 * (row & 7) + (k >> 2 & 3)
        raise AssertionError(
            f"{len(wrong)} of {got.size} bytes are in the wrong place. The first: byte {k & 3} of the {kind}-d "
            f"register of lane {lane}, warp {row >> 4 & 3} (row {row}, k {k} of the operand)\n"
            f"must hold {name_of(want[row, k])}\nbut holds {name_of(got[row, k])}"
        )
    opcodes = loop_opcodes(compiled("pairs", even=even, odd=odd, neighbours=True))
    assert not opcodes["LDS"], f"The loop must have no LDS, but it has {opcodes['LDS']}"
    assert opcodes["PRMT"] == EXPECTED_PRMT, f"The loop must have {EXPECTED_PRMT} PRMT, but it has {opcodes['PRMT']}"


# --- Measurements ---------------------------------------------------------------------------------------------------

PREFIX = "fp8_operands_"
METHODS = {"in_place": "in place", "bytes": "bytes", "pairs": "pairs"}
CTAS_PER_SM = 3
NUM_TILES = {"resident": 480, "ring": 96}  # of a program; 96 tiles of 396 programs are more than twice the L2
LONG_SUM = 32768  # tokens
MAX_ERROR = {"in place": 4e-3, "bytes": 1e-2, "pairs": 1e-2}  # both sides round alike, so that only the sums differ


def inputs(method: str, tokens: int, device: torch.device | str, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    """Normal v `[tokens, 128]` around `mean`, in bf16 for "in place" and else in e4m3, and p `[8, 64]` in [0, 1)."""
    dice = torch.Generator(device).manual_seed(tokens)
    dtype = torch.bfloat16 if method == "in place" else torch.float8_e4m3fn
    v = torch.empty(tokens, HEAD_DIM, dtype=dtype, device=device)
    for part in v.split(1 << 18):
        part.copy_(torch.randn(part.shape, generator=dice, device=device) + mean)
    return v, torch.rand(GROUP, TILE, generator=dice, device=device)


def error_of(v: Tensor, p: Tensor, num_tiles: int, **constants) -> float:
    """Relative error of `weigh` against float64."""
    o = weigh(v, p, num_tiles, **constants)
    uses = num_tiles * o.shape[0] * TILE // len(v)
    return relative_error(o, expected(v, p, o.shape[0], uses))


def measure_operands(
    *,
    device: torch.device | str = "cuda",
    programs: int | None = None,
    num_tiles: Mapping[str, int] = NUM_TILES,
    long_sum: int = LONG_SUM,
    replays: int = 20,
    commit: str | None = None,
) -> pd.DataFrame:
    """Check, then time the kernel, steady; rows of table `records`.

    Cases: `ring_<method>`, tiles from memory through a ring; `resident_<method>`, tiles that stay in shared memory;
    `<fresh|chained>_mean<0|1>`, the error (no time) of long sums of V with that mean; all with a prefix.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda(device) else 1
    programs, origin = programs or CTAS_PER_SM * sms, provenance(device, new_run_id(), commit)
    rows = [*_times(device, programs, num_tiles, replays, origin), *_errors(device, long_sum // TILE, origin)]
    return pd.DataFrame(rows, columns=records.COLUMNS)


def _times(
    device, programs: int, num_tiles: Mapping[str, int], replays: int, origin: dict[str, str]
) -> Iterator[Record]:
    for kind in ("resident", "ring"):
        calls, errors, sizes = {}, {}, {}
        for name, method in METHODS.items():
            constants = {"method": method, "resident": kind == "resident"}
            tokens = programs * TILE * (4 if kind == "resident" else num_tiles[kind])
            for mean in (0.0, 1.0):
                v, p = inputs(method, tokens, device, mean)
                error = error_of(v, p, num_tiles[kind], **constants)
                if not error <= MAX_ERROR[method]:
                    raise AssertionError(f"{kind}, {method}: relative error {error:.2g} > {MAX_ERROR[method]:g}")
                errors[name] = max(errors.get(name, 0.0), error)
            out = torch.empty(programs, GROUP, HEAD_DIM, device=device)
            calls[name] = [partial(weigh, v, p, num_tiles[kind], out=out, **constants)]
            sizes[name] = v.nbytes if kind == "ring" else 0
        for name, timing in measure("steady", calls, timer_for(device), replays=replays).items():
            rate = {"tb_per_s": sizes[name] / timing.median_us * 1e-6} if sizes[name] else {}
            columns = ("median_us", "p10_us", "p90_us", "floor_us", "sm_clock_mhz")
            times = {column: getattr(timing, column) for column in columns}
            yield _row(f"{kind}_{name}", errors[name], origin, **times, **rate)


def _errors(device, num_tiles: int, origin: dict[str, str]) -> Iterator[Record]:
    programs = 32 if is_cuda(device) else 1
    for mean in (0, 1):
        v, p = inputs("pairs", programs * num_tiles * TILE, device, mean)
        for name, fresh in (("fresh", True), ("chained", False)):
            error = error_of(v, p, num_tiles, method="pairs", fresh=fresh)
            yield _row(f"{name}_mean{mean}", error, origin)


def _row(case: str, error: float, origin: dict[str, str], **times) -> Record:
    dtype = "bf16" if case.endswith("in_place") else "fp8"
    return Record(
        suite="decode", case=PREFIX + case, dtype=dtype, quant="-", layout="NHD", num_query_tokens=1, page_size=0,
        schedule="-", implementation="hopper", protocol="steady", rel_error=error, **times, **origin,
    )  # fmt: skip


def record(path: Path | str = RECORDED, *, commit: str = "", **kwargs) -> pd.DataFrame:
    """`measure_operands(**kwargs)`, appended to a CSV file of table `records`."""
    return recording.append(path, measure_operands(commit=commit or None, **kwargs))


def recorded(path: Path | str = RECORDED) -> pd.DataFrame:
    """The newest recorded rows of this lesson, indexed by case without prefix; none if nobody has measured yet."""
    frame = records.latest(records.load(path))
    return by_case(frame[frame.case.str.startswith(PREFIX)])


def by_case(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `measure_operands` indexed by case without prefix."""
    return frame.set_index(frame.case.str.removeprefix(PREFIX)) if len(frame) else frame
