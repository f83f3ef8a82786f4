"""mbarriers, named barriers of a CTA, and the barrier of a cluster."""

from __future__ import annotations

import numpy as np

from hpcattn.emulator.errors import BarrierMisuse
from hpcattn.emulator.memory import CTA_STRIDE
from hpcattn.emulator.operands import LANES, active, address, instruction, source, target, uniform
from hpcattn.emulator.scheduler import Mbarrier, NamedBarrier, Wait


def mbarrier_at(warp, addresses: np.ndarray | int) -> Mbarrier:
    where = int(warp.cluster.shared.locate(np.asarray(addresses), warp.cta, warp.here, remote=True))
    barrier = warp.cluster.mbarriers.get(where)
    if barrier is None:
        raise BarrierMisuse(f"{warp.here()} uses shared +{where % CTA_STRIDE}, where no mbarrier is initialized")
    return barrier


@instruction("mbarrier.init")
def _init(ins, program):
    where, count = address(ins.operands[0], program), source(ins.operands[1], "u32", program)
    made_by = f"initialized at {ins.source or f'PTX line {ins.line}'}"

    def execute(warp, mask):
        barriers = warp.cluster.mbarriers
        for lane in active(mask):
            at = int(warp.cluster.shared.locate(where(warp)[lane], warp.cta, warp.here))
            n = int(count(warp)[lane])
            number = len([b for b in barriers if b // CTA_STRIDE == warp.cta])
            barriers[at] = Mbarrier(at, number, n, made_by, n)

    return execute


@instruction("mbarrier.inval")
def _invalidate(ins, program):
    where = address(ins.operands[0], program)

    def execute(warp, mask):
        for lane in active(mask):
            barrier = mbarrier_at(warp, where(warp)[lane])
            del warp.cluster.mbarriers[barrier.where]

    return execute


@instruction("mbarrier.arrive", "mbarrier.expect_tx")
def _arrive(ins, program):
    if "noComplete" in ins.parts or "drop" in ins.parts:
        raise KeyError(ins.opcode)
    arrives, expects = ins.parts[1] == "arrive", "expect_tx" in ins.parts
    operands = ins.operands[1:] if arrives else ins.operands  # the first takes the state
    if arrives and ins.operands[0] != "_":
        raise KeyError(ins.operands[0])
    where = address(operands[0], program)
    amount = source(operands[1] if len(operands) > 1 else "1", "u32", program)

    def execute(warp, mask):
        for lane in active(mask):
            n = int(amount(warp)[lane])
            barrier = mbarrier_at(warp, where(warp)[lane])
            barrier.update(arrivals=(1 if expects else n) if arrives else 0, expected=n if expects else 0)

    return execute


@instruction("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")
def _wait_parity(ins, program):
    if ins.parts[1] == "test_wait":
        raise KeyError(ins.opcode)
    where, parity = address(ins.operands[1], program), source(ins.operands[2], "u32", program)
    write = target(ins.operands[0], "pred")

    def execute(warp, mask):
        lane = active(mask)[0]
        barrier, wanted = mbarrier_at(warp, where(warp)[lane]), int(parity(warp)[lane]) & 1

        def ready() -> bool:
            return barrier.phases & 1 != wanted

        if ready():
            write(warp, np.ones(LANES, bool), mask)
            return
        warp.pc -= 1  # try again when woken
        warp.wait = Wait(ready, lambda: f"phase parity {wanted} of {barrier}: {barrier.state}; in {ins}")

    return execute


@instruction("bar", "barrier")
def _named_barrier(ins, program):
    mode = "arrive" if "arrive" in ins.parts else "sync"
    if mode not in ins.parts or "cluster" in ins.parts:
        raise KeyError(ins.opcode)
    number = source(ins.operands[0], "u32", program)
    threads = source(ins.operands[1], "u32", program) if len(ins.operands) > 1 else None

    def execute(warp, mask):
        cluster, index = warp.cluster, uniform(number(warp), warp)
        count = uniform(threads(warp), warp) if threads else cluster.threads
        barrier = cluster.named.setdefault((warp.cta, index), NamedBarrier())
        generation = cluster.arrive(barrier, count, warp, f"named barrier {index} of CTA {warp.cta}")
        if mode == "sync":
            _wait_for_all(warp, barrier, generation, count, f"named barrier {index}", ins)

    return execute


def _wait_for_all(warp, barrier: NamedBarrier, generation: int, count: int, name: str, ins) -> None:
    """Let `warp` wait until `count` threads have arrived, unless they have."""
    if barrier.generation == generation:
        warp.wait = Wait(
            lambda: barrier.generation != generation,
            lambda: f"{name}, phase {generation}: {barrier.arrived} of {count} threads have arrived; in {ins}",
        )


@instruction("barrier.cluster.arrive")
def _cluster_arrive(ins, program):
    def execute(warp, mask):
        cluster = warp.cluster
        if warp.cluster_generation is not None:
            raise BarrierMisuse(f"{warp.here()} arrives twice at the cluster barrier without waiting")
        count = cluster.threads * cluster.size
        warp.cluster_generation = cluster.arrive(cluster.cluster_barrier, count, warp, "the cluster barrier")

    return execute


@instruction("barrier.cluster.wait")
def _cluster_wait(ins, program):
    def execute(warp, mask):
        barrier, generation = warp.cluster.cluster_barrier, warp.cluster_generation
        if generation is None:
            raise BarrierMisuse(f"{warp.here()} waits at the cluster barrier without having arrived")
        warp.cluster_generation = None
        count = warp.cluster.threads * warp.cluster.size
        _wait_for_all(warp, barrier, generation, count, "the cluster barrier", ins)

    return execute
