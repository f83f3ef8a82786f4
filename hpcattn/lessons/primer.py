"""Lesson 04a: what layouts mean, bank conflicts, mbarriers watched at work, SASS in words, the exercise's checker."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import triton
from triton._C.libtriton import gluon_ir, ir
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon import language as gl

from hpcattn.bench import records
from hpcattn.bench.provenance import is_cuda, l2_bytes, new_run_id, provenance
from hpcattn.bench.records import Record
from hpcattn.bench.timing import copies_to_exceed_l2, measure, timer_for
from hpcattn.emulator import barriers
from hpcattn.emulator.operands import source
from hpcattn.emulator.scheduler import Mbarrier
from hpcattn.inspection import HOPPER, Compiled, Variant
from hpcattn.lessons import recording
from hpcattn.lessons.display import Table
from hpcattn.lessons.primer_kernels import transpose_rounds
from hpcattn.lessons.recording import RECORDED

__all__ = [
    "ROUNDS", "SHARED_LAYOUTS", "SIDE", "THREAD_LAYOUT", "Access", "Event", "Trace", "access", "bases",
    "check_load_layout", "column_read", "held", "layouts_in", "measure_transposes", "place", "record", "recorded",
    "registers", "sass_order", "sass_table", "shared_offsets", "transpose", "watch_mbarriers", "wavefronts",
]  # fmt: skip

LANES, BANKS, WORD = 32, 32, 4  # lanes of a warp; banks of shared memory and the bytes of each


# --- Layouts --------------------------------------------------------------------------------------------------------


@cache
def _compiler() -> tuple[gluon_ir.GluonOpBuilder, ir.context]:
    """A builder of the compiler's attributes, and the context that must live as long."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(HOPPER).load_dialects(context)
    return gluon_ir.GluonOpBuilder(context), context


def bases(layout: Any, shape: Sequence[int]) -> gl.DistributedLinearLayout | gl.SharedLinearLayout:
    """The compiler's own normal form of a layout: a linear layout, that is, one basis vector per bit of an index."""
    if isinstance(layout, gl.DistributedLinearLayout | gl.SharedLinearLayout):
        return layout
    builder, _ = _compiler()
    return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def _span(vectors: Sequence[Sequence[int]], rank: int) -> np.ndarray:
    """XOR of the vectors whose bit is set, for each index: int `[2 ** len(vectors), rank]`."""
    out = np.zeros((1, rank), np.int64)
    for vector in vectors:
        out = np.concatenate([out, out ^ np.array(vector, np.int64)])
    return out


def held(layout: Any, shape: Sequence[int]) -> np.ndarray:
    """The element that each register of each thread holds: int `[warps, lanes, registers, rank]`.

    "Register" counts elements; two of 16 bits share one of the machine's registers.
    """
    linear, rank = bases(layout, shape), len(shape)
    warps, lanes, regs = (_span(v, rank) for v in (linear.warp_bases, linear.lane_bases, linear.reg_bases))
    return warps[:, None, None] ^ lanes[None, :, None] ^ regs[None, None]


def place(layout: Any, shape: Sequence[int], warp: int, lane: int, register: int) -> tuple[int, ...]:
    """The element in one register of one thread."""
    return tuple(int(x) for x in held(layout, shape)[warp, lane, register])


def registers(layout: Any, shape: Sequence[int], bits: int = 32) -> int:
    """32-bit registers that a tensor with elements of `bits` bits takes of each thread."""
    return -(-(1 << len(bases(layout, shape).reg_bases)) * bits // 32)


def shared_offsets(layout: Any, shape: Sequence[int]) -> np.ndarray:
    """Where each element lies in shared memory, counted in elements from the start: int array of shape `shape`."""
    elements = _span(bases(layout, shape).offset_bases, len(shape))
    offsets = np.empty(shape, np.int64)
    offsets[tuple(elements.T)] = np.arange(len(elements))
    return offsets


def layouts_in(kernel: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The layouts that Triton's compiler chose for a `triton.language` kernel, as its GPU dialect prints them."""
    v = Variant.from_launch(kernel.__name__, kernel, *args, **kwargs)
    types = {a: v.signature.get(a, "constexpr") for a in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, types, dict(v.constexprs), dict(v.attrs)), target=HOPPER, options=v.options
    )
    return re.findall(r"^#(?!loc)\w+ = #.*$", compiled.asm["ttgir"], re.MULTILINE)


# --- Bank conflicts -------------------------------------------------------------------------------------------------


def wavefronts(addresses: Sequence[int] | np.ndarray, width: int) -> int:
    """How many times shared memory is accessed for one load or store of a warp.

    addresses: the first byte of each lane, `width` bytes (2, 4, 8 or 16) each. Up to 128 bytes go at a time: all
    lanes, or groups of 16 (8 bytes) or 8 lanes (16 bytes). A bank delivers one word per access; lanes that want the
    same word share it.
    """
    addresses = np.asarray(addresses)
    group = min(LANES, BANKS * WORD // width)
    total = 0
    for part in addresses.reshape(-1, min(group, len(addresses))):
        words = np.unique((part[:, None] + np.arange(0, width, min(width, WORD))) // WORD)
        total += int(np.bincount(words % BANKS, minlength=BANKS).max())
    return total


@dataclass(frozen=True)
class Access:
    """What a tile costs a warpgroup in shared memory."""

    instructions: int  # of all warps
    wavefronts: int

    @property
    def ways(self) -> float:
        return self.wavefronts / self.instructions


def access(layout: Any, shared: Any, n: int, itemsize: int, *, transposed: bool = False) -> Access:
    """Loading or storing an `[n, n]` tile element by element: register layout `layout`, shared layout `shared`."""
    offsets = shared_offsets(shared, [n, n])
    offsets = offsets.T if transposed else offsets
    elements = held(layout, [n, n])
    counts = [
        wavefronts(itemsize * offsets[tuple(elements[warp, :, register].T)], itemsize)
        for warp in range(elements.shape[0])
        for register in range(elements.shape[2])
    ]
    return Access(len(counts), sum(counts))


def column_read(shared: Any, shape: Sequence[int], chunk: int, itemsize: int = 2) -> np.ndarray:
    """Byte addresses of 16-byte chunk number `chunk` in rows 0 to 7: what one step of ldmatrix or wgmma reads."""
    return itemsize * shared_offsets(shared, shape)[:8, chunk * 16 // itemsize]


# --- mbarriers, watched at work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something happened to an mbarrier. Then it is in phase number `phase`, lacking `pending` arrivals and `bytes`."""

    what: str  # "expect", "arrive", "land", "blocked" or "pass"
    who: str
    barrier: str
    amount: int  # bytes expected or landed, or the parity waited for
    states: Mapping[str, tuple[int, int, int]]  # of all barriers afterwards: phase, pending, bytes

    @property
    def text(self) -> str:
        return {
            "expect": f"expects {self.amount:,} bytes (and arrives)",
            "arrive": "arrives",
            "land": f"{self.amount:,} bytes land",
            "blocked": f"waits for parity {self.amount}: not yet",
            "pass": f"waits for parity {self.amount}: passes",
        }[self.what]


@dataclass
class Trace:
    """Events in the order in which they happened in the emulator."""

    names: list[str]  # barriers in order of their initialization
    warps: dict[int, str]  # warps whose waits are kept, and what to call them
    events: list[Event] = field(default_factory=list)
    _barriers: dict[int, Mbarrier] = field(default_factory=dict, repr=False)
    _waiting: dict[int, tuple] = field(default_factory=dict, repr=False)

    def note(self, what: str, who: str, barrier: Mbarrier, amount: int) -> None:
        self._barriers[barrier.number] = barrier
        known = {self.names[n]: (b.phases, b.pending, b.bytes) for n, b in self._barriers.items()}
        self.events.append(Event(what, who, self.names[barrier.number], amount, known))

    def table(self, first: int = 0, last: int | None = None) -> Table:
        """Events `first` to `last`, with the state of each barrier after them."""
        rows = []
        for number, event in list(enumerate(self.events, 1))[first:last]:
            states = [_state(event.states.get(name)) for name in self.names]
            rows.append([f"{number}. {event.who}, {event.barrier}: {event.text}", *states])
        caption = "state after the event: phase (its parity), arrivals and bytes that the phase still lacks"
        return Table(["event", *self.names], rows, caption)


def _state(state: tuple[int, int, int] | None) -> str:
    if state is None:
        return "phase 0 (0)"
    phase, pending, missing = state
    return f"phase {phase} ({phase & 1}): {pending} arr., {missing:,} B"


@contextmanager
def watch_mbarriers(names: Sequence[str], warps: Mapping[int, str]) -> Iterator[Trace]:
    """While active, what happens to the mbarriers of an emulated CTA is noted.

    names: of the barriers, in order of their initialization. warps: those whose waits are kept, and their names.
    """
    trace = Trace(list(names), dict(warps))
    find, update, current = barriers.mbarrier_at, Mbarrier.update, []

    def mbarrier_at(warp, addresses):
        barrier = find(warp, addresses)
        ins = warp.cluster.program.instructions[warp.pc - 1]
        current[:] = [trace.warps.get(warp.index, f"warp {warp.index}")]
        if "try_wait" in ins.parts and warp.index in trace.warps:
            parity = int(source(ins.operands[2], "u32", warp.cluster.program)(warp)[0]) & 1
            blocked = barrier.phases & 1 == parity
            if not (blocked and trace._waiting.get(warp.index) == (barrier.number, parity)):
                trace.note("blocked" if blocked else "pass", current[0], barrier, parity)
            trace._waiting[warp.index] = (barrier.number, parity) if blocked else ()
        return barrier

    def noted(barrier, arrivals=0, expected=0, transferred=0):
        update(barrier, arrivals, expected, transferred)
        if transferred:
            trace.note("land", "TMA", barrier, transferred)
        else:
            trace.note("expect" if expected else "arrive", *current, barrier, expected)

    with patch.object(barriers, "mbarrier_at", mbarrier_at), patch.object(Mbarrier, "update", noted):
        yield trace


# --- SASS in words --------------------------------------------------------------------------------------------------

# start of an opcode -> (what in Gluon makes it, what it does)
SASS_WORDS = {
    "SYNCS.EXCH": ("mbarrier.init", "writes a fresh mbarrier"),
    "SYNCS.ARRIVE": ("mbarrier.expect, mbarrier.arrive", "counts an arrival, announces bytes"),
    "SYNCS.PHASECHK": ("mbarrier.wait", "asks whether the phase of that parity is over; a loop around it"),
    "UTMALDG": ("tma.async_load", "one thread starts a TMA load; the TMA unit does the rest"),
    "LDG": ("gl.load", "global memory to registers"),
    "STG": ("gl.store", "registers to global memory"),
    "STS": ("box.store, allocate_shared_memory(value)", "registers to shared memory"),
    "STSM": ("box.store", "8 × 8 matrices from registers to shared memory"),
    "LDS": ("box.load", "shared memory to registers"),
    "LDSM": ("box.load", "8 × 8 matrices from shared memory to registers"),
    "FENCE.VIEW.ASYNC": ("fence_async_shared", "earlier ordinary accesses before later ones of TMA and wgmma"),
    "BAR": ("nothing: the compiler puts it in", "the warps of a CTA, or of a partition, meet"),
    "WARPGROUP.ARRIVE": ("warpgroup_mma", "registers of the accumulator are ready"),
    "HGMMA": ("warpgroup_mma", "4 warps: a product of 64 × N × 16 in bf16"),
    "WARPGROUP.DEPBAR": ("warpgroup_mma_wait", "at most n groups of products are still running"),
    "ELECT": ("nothing", "chooses the one thread that starts a copy"),
    "USETMAXREG": ("warp_specialize", "a warpgroup takes registers or gives them back"),
    "MEMBAR": ("nothing: goes with the fence", "earlier memory accesses of this thread become visible"),
}


def _count(compiled: Compiled, start: str) -> int:
    return sum(n for opcode, n in compiled.opcodes.items() if (opcode + ".").startswith(start + "."))


def sass_table(kernels: Mapping[str, Compiled]) -> Table:
    """How often each kernel's machine code has the instructions of `SASS_WORDS`, and what they are."""
    rows = []
    for start, (gluon, meaning) in SASS_WORDS.items():
        counts = [_count(c, start) for c in kernels.values()]
        if any(counts):
            rows.append([start, *(str(n or "–") for n in counts), gluon, meaning])
    return Table(["SASS", *kernels, "in Gluon", "what it does"], rows, "instructions in the code, not executed")


def sass_order(compiled: Compiled) -> str:
    """The opcodes of `SASS_WORDS` in the order of the code, repetitions counted."""
    line = re.compile(r"[^\t]*\t(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[\w.]+)?)")
    found = [m[1] for m in map(line.match, compiled.sass.splitlines()) if m]
    names = [max(hits, key=len) for o in found if (hits := [w for w in SASS_WORDS if f"{o}.".startswith(f"{w}.")])]
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    return " → ".join(name if n == 1 else f"{n} {name}" for name, n in runs)


# --- The exercise ---------------------------------------------------------------------------------------------------


def check_load_layout(load_layout: Callable[[int, int, int, int], gl.BlockedLayout], *, seed: int = 0) -> None:
    """`load_layout(rows, columns, itemsize, num_warps)` for loading a row-major tile from global memory.

    Raises AssertionError with the tile unless the layout holds every element once, each thread's loads are of 16
    bytes, and each such load of a warp covers whole 128-byte lines.
    """
    dice = random.Random(seed)
    cases = [(64, 128, 2, 4), (64, 64, 2, 4), (64, 128, 1, 4), (128, 32, 4, 8), (32, 256, 2, 1)]
    dice.shuffle(cases)
    for rows, columns, itemsize, num_warps in cases:
        about = f"load_layout({rows}, {columns}, itemsize={itemsize}, num_warps={num_warps})"
        layout = load_layout(rows, columns, itemsize, num_warps)
        assert isinstance(layout, gl.BlockedLayout), f"{about} must be a gl.BlockedLayout, got {layout!r}"
        lanes, warps = (int(np.prod(x)) for x in (layout.threads_per_warp, layout.warps_per_cta))
        assert lanes == LANES, f"{about}: threads_per_warp must multiply to 32, got {layout.threads_per_warp}"
        assert warps == num_warps, f"{about}: warps_per_cta must multiply to {num_warps}, got {layout.warps_per_cta}"
        elements = held(layout, [rows, columns])
        places = elements[..., 0] * columns + elements[..., 1]
        copies = np.bincount(places.ravel(), minlength=rows * columns)
        element = divmod(int(copies.argmax()), columns)
        assert (copies == 1).all(), f"{about}: element {element} must be held once, got {copies.max()} times"
        vector = 16 // itemsize
        steps = places.reshape(num_warps, LANES, -1, vector) if places.shape[2] % vector == 0 else None
        together = steps is not None and (steps - steps[..., :1] == np.arange(vector)).all()
        assert together, (
            f"{about}: {vector} registers in a row must hold {vector} neighbors (16 bytes); "
            f"thread 0 holds {[tuple(map(int, e)) for e in elements[0, 0, :vector]]}"
        )
        lines = steps[..., 0] * itemsize // 128
        touched = len(np.unique(lines[0, :, 0]))
        assert all(len(np.unique(lines[w, :, s])) == 4 for w in range(num_warps) for s in range(lines.shape[2])), (
            f"{about}: 32 loads of 16 bytes must touch 4 lines of 128 bytes, the first load of warp 0 touches {touched}"
        )


# --- What a bank conflict costs -------------------------------------------------------------------------------------

SIDE, ROUNDS = 64, 33  # side of a tile; rounds are odd, so that the result is transposed
THREAD_LAYOUT = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])  # a warp holds parts of rows
SHARED_LAYOUTS = {
    "plain": gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    "chunks": gl.NVMMASharedLayout(128, 16, 2),  # 16-byte chunks exchanged, as TMA and wgmma want it
    "words": gl.SwizzledSharedLayout(2, 1, 32, [1, 0]),  # 4-byte words exchanged
}


def transpose(x: torch.Tensor, y: torch.Tensor, name: str, launch: Callable[..., Any]) -> None:
    """y [tiles, n, n] = the tiles of x, transposed `ROUNDS` times. `launch(kernel, grid, *args, **constants)`."""
    constants = dict(N=x.shape[1], LAYOUT=THREAD_LAYOUT, SHARED=SHARED_LAYOUTS[name], num_warps=4)
    launch(transpose_rounds, (x.shape[0],), x, y, ROUNDS, **constants)


def _on_gpu(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, **constants)


def measure_transposes(
    *, device: torch.device | str = "cuda", launch: Callable[..., Any] = _on_gpu, tiles: int | None = None,
    replays: int = 10, commit: str | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Check, then time `transpose` with each shared layout, eight tiles per SM; rows of table `records`.

    Cases are `primer_transpose_<layout>`. The kernel stands for no operator: of the columns before the times only
    case, dtype and protocol say something.
    """
    tiles = tiles or 8 * torch.cuda.get_device_properties(device).multi_processor_count
    x = torch.randn(tiles, SIDE, SIDE, device=device).to(torch.bfloat16)
    for name in SHARED_LAYOUTS:
        y = torch.zeros_like(x)
        transpose(x, y, name, launch)
        assert torch.equal(y, x.mT), f"transposing with shared layout {name!r} gives wrong values"
    copies = copies_to_exceed_l2(2 * x.nbytes, l2_bytes(device)) if is_cuda(device) else 1
    sets = [(x.clone(), torch.empty_like(x)) for _ in range(copies)]
    calls = {name: [partial(transpose, *pair, name, launch) for pair in sets] for name in SHARED_LAYOUTS}
    timings = measure("steady", calls, timer_for(device), replays=replays)
    origin = provenance(device, new_run_id(), commit)
    rows = [
        Record(
            suite="prefill", case=f"primer_transpose_{name}", dtype="bf16", quant="-", layout="NHD",
            num_query_tokens=0, page_size=0, schedule="-", implementation="hopper", protocol="steady",
            median_us=t.median_us, p10_us=t.p10_us, p90_us=t.p90_us, floor_us=t.floor_us, rel_error=0.0,
            sm_clock_mhz=t.sm_clock_mhz, **origin,
        )
        for name, t in timings.items()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=records.COLUMNS)


def record(path: Path | str = RECORDED, *, commit: str | None = None, **kwargs) -> pd.DataFrame:
    """`measure_transposes(**kwargs)`, appended to a CSV file of table `records`.

    On an H200: `python -c "from hpcattn.lessons.primer import record; print(record())"`
    """
    return recording.append(path, measure_transposes(commit=commit or None, **kwargs))


def recorded(path: Path | str = RECORDED) -> dict[str, float]:
    """The newest recorded time in µs per shared layout, of one run; empty if nobody has measured yet."""
    frame = records.load(path)
    frame = frame[frame.case.isin([f"primer_transpose_{name}" for name in SHARED_LAYOUTS])]
    if frame.empty:
        return {}
    newest = frame[frame.run_id == frame.run_id.iloc[-1]]
    return {row.case.removeprefix("primer_transpose_"): float(row.median_us) for row in newest.itertuples()}
