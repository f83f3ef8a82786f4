"""Warps, the barriers between them, and the order in which they run.

Order is what tests of synchronization are about, so `schedule_seed` picks one of four kinds of schedule
(modulo 4) and its details:

0. fair: warps in random order, runs of random length, copies land now and then;
1. late copies: an asynchronous copy lands only when nothing else can happen;
2. early copies: it lands at once, before the warp that issued it goes on;
3. a favorite: warps have a fixed order of precedence and run until they block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcattn.emulator.errors import BarrierMisuse, Deadlock, EmulatorError
from hpcattn.emulator.memory import BASE, CTA_STRIDE, GlobalMemory, SharedMemory
from hpcattn.emulator.operands import LANES, Execute
from hpcattn.emulator.parser import Program

KINDS = ("fair", "late copies", "early copies", "a favorite")
_QUANTA = (1, 20, 200, 2000)  # instructions of a warp at a stretch


@dataclass
class Wait:
    """Why a warp does not run: until `ready()`; `reason()` says for what."""

    ready: Callable[[], bool]
    reason: Callable[[], str]


@dataclass
class Copy:
    """An asynchronous copy under way. It may land once those in `after` have landed."""

    what: str
    land: Callable[[], None]
    after: Sequence[Copy] = ()
    landed: bool = False

    @property
    def may_land(self) -> bool:
        return all(copy.landed for copy in self.after)


@dataclass
class Groups:
    """Work that is committed in groups and waited for in order: cp.async, bulk stores, wgmma."""

    open: list = field(default_factory=list)
    committed: list[list] = field(default_factory=list)

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def unfinished(self) -> bool:
        """Whether anything has not happened yet."""
        work = [*self.open, *(item for group in self.committed for item in group)]
        return any(not getattr(item, "landed", False) for item in work)


@dataclass
class Mbarrier:
    """An mbarrier: a phase ends when no arrivals and no transfer bytes are outstanding."""

    where: int  # position in the cluster's shared memory
    number: int  # in order of initialization
    count: int  # arrivals per phase
    made_by: str
    pending: int
    bytes: int = 0  # expected and not yet transferred; negative: transferred before expected
    phases: int = 0  # completed

    def __str__(self) -> str:
        cta, offset = divmod(self.where, CTA_STRIDE)
        return f"mbarrier #{self.number} (shared +{offset - BASE} of CTA {cta}, {self.made_by})"

    @property
    def state(self) -> str:
        return (
            f"{self.phases} phases completed; phase {self.phases} (parity {self.phases & 1}) lacks {self.pending} of "
            f"{self.count} arrivals and {self.bytes} bytes"
        )

    def update(self, arrivals: int = 0, expected: int = 0, transferred: int = 0) -> None:
        self.bytes += expected - transferred
        self.pending -= arrivals
        if self.pending < 0:
            raise BarrierMisuse(f"{self} gets more than its {self.count} arrivals in phase {self.phases}")
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phases += 1


@dataclass
class NamedBarrier:
    arrived: int = 0
    generation: int = 0


class Warp:
    """32 lanes that execute together."""

    def __init__(self, cluster: Cluster, cta: int, index: int):
        self.cluster, self.cta, self.index = cluster, cta, index
        x, y, z = cluster.position
        self.ctaid = (x * cluster.size + cta, y, z)
        self.pc = 0
        self.registers: dict[str, np.ndarray] = {}
        self.wait: Wait | None = None
        self.done = False
        self.copies, self.bulk, self.products = Groups(), Groups(), Groups()
        self.cluster_generation: int | None = None  # of the cluster barrier it arrived at and has not waited for

    def here(self) -> str:
        """The instruction being executed, for messages."""
        return f"{self.name} at {self.cluster.program.instructions[self.pc - 1]}"

    @property
    def name(self) -> str:
        return f"warp {self.index} of CTA {self.ctaid}"

    def exit(self) -> None:
        for groups, what in ((self.products, "wgmma"), (self.bulk, "bulk stores"), (self.copies, "cp.async copies")):
            if groups.unfinished():
                raise EmulatorError(f"{self.name} exits without having waited for its {what}")
        self.done = True


@dataclass(frozen=True)
class Guarded:
    """An instruction ready to run."""

    execute: Execute
    predicate: str | None
    negated: bool


class Cluster:
    """The CTAs of one cluster (usually one) while they run."""

    def __init__(
        self,
        program: Program,
        code: Sequence[Guarded],
        *,
        position: tuple[int, int, int],
        grid: tuple[int, int, int],
        size: int,
        num_warps: int,
        shared: SharedMemory,
        memory: GlobalMemory,
        parameters: Sequence,
        seed: int,
    ):
        self.program, self.code, self.position, self.grid, self.size = program, code, position, grid, size
        self.threads = num_warps * LANES
        self.shared, self.memory, self.parameters = shared, memory, parameters
        self.kind = KINDS[seed % len(KINDS)]
        self.random = random.Random(f"{seed} {position}")
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[tuple[int, int], NamedBarrier] = {}
        self.cluster_barrier = NamedBarrier()
        self.copies: list[Copy] = []
        self.warps = [Warp(self, cta, index) for cta in range(size) for index in range(num_warps)]
        self.steps = 0

    def start_copy(self, what: str, land: Callable[[], None], after: Sequence[Copy] = ()) -> Copy:
        copy = Copy(what, land, after)
        self.copies.append(copy)
        return copy

    def arrive(self, barrier: NamedBarrier, count: int, warp: Warp, what: str) -> int:
        """A warp arrives; returns the generation it belongs to."""
        generation = barrier.generation
        barrier.arrived += LANES
        if barrier.arrived > count:
            raise BarrierMisuse(f"{warp.here()}: {barrier.arrived} threads at {what}, which takes {count}")
        if barrier.arrived == count:
            barrier.arrived = 0
            barrier.generation += 1
        return generation

    def run(self, max_steps: int) -> None:
        """Run to the end. Raises Deadlock, or what an instruction raises."""
        order = list(self.warps)
        self.random.shuffle(order)
        while live := [w for w in order if not w.done]:
            ready = [w for w in live if w.wait is None or w.wait.ready()]
            if self._land(bool(ready)):
                continue
            if not ready:
                raise Deadlock(self._deadlock(live))
            favorite = self.kind == "a favorite"
            warp = ready[0] if favorite else self.random.choice(ready)
            warp.wait = None
            self._run(warp, _QUANTA[-1] if favorite else self.random.choice(_QUANTA))
            if self.steps > max_steps:
                raise EmulatorError(f"{warp.here()}: more than {max_steps} instructions; raise max_steps if meant")
        self._check_end()

    def _land(self, ready: bool) -> bool:
        """Perhaps let a copy land."""
        landable = [c for c in self.copies if not c.after or c.may_land]
        chance = {"late copies": 0.0, "early copies": 1.0}.get(self.kind, 0.3)
        if not landable or (ready and self.random.random() >= chance):
            return False
        copy = self.random.choice(landable)
        self.copies.remove(copy)
        copy.land()
        copy.landed = True
        return True

    def _run(self, warp: Warp, quantum: int) -> None:
        code = self.code
        for _ in range(quantum):
            step = code[warp.pc]
            warp.pc += 1
            self.steps += 1
            mask = None
            if step.predicate is not None:
                mask = warp.registers[step.predicate]
                if step.negated:
                    mask = ~mask
                if mask.all():
                    mask = None
                elif not mask.any():
                    continue
            try:
                step.execute(warp, mask)
            except EmulatorError:
                raise
            except Exception as error:
                error.add_note(f"while emulating {warp.here()}")
                raise
            if warp.done:
                if all(w.done for w in self.warps if w.cta == warp.cta):
                    self.shared.exited[warp.cta] = True
                return
            if warp.wait is not None or (self.copies and self.kind == "early copies"):
                return

    def _deadlock(self, live: Sequence[Warp]) -> str:
        reasons: dict[tuple, list[Warp]] = {}
        for warp in sorted(live, key=lambda w: (w.cta, w.index)):
            reasons.setdefault((warp.ctaid, warp.wait.reason()), []).append(warp)
        waits = []
        for (cta, reason), warps in reasons.items():
            names = ", ".join(str(w.index) for w in warps)
            subject = f"warps {names} of CTA {cta} wait" if len(warps) > 1 else f"{warps[0].name} waits"
            waits.append(f"{subject} for {reason}")
        stuck = [f"{copy.what} cannot land" for copy in self.copies]
        return "\n  ".join([f"no warp of {self.program.name} can go on (schedule: {self.kind}):", *waits, *stuck])

    def _check_end(self) -> None:
        if self.copies:
            names = "; ".join(copy.what for copy in self.copies[:4])
            raise EmulatorError(f"{self.program.name} exits while {len(self.copies)} copies are under way: {names}")
        for barrier in self.mbarriers.values():
            if barrier.bytes:
                raise BarrierMisuse(f"{barrier} is left with transfer bytes that do not add up: {barrier.state}")
