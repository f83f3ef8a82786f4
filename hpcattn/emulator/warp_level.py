"""Exchanges between the lanes of a warp, branches, and what has no effect here."""

from __future__ import annotations

from functools import reduce

import numpy as np

from hpcattn.emulator.operands import LANE, LANES, dtype_of, instruction, source, target, uniform

_REDUCTIONS = {
    "add": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
}


@instruction("shfl.sync")
def _shuffle(ins, program):
    mode = ins.parts[2]
    outputs = ins.operands[0].split("|")
    read, amount, clamp = (source(o, "b32", program) for o in ins.operands[1:4])
    write = target(outputs[0], "b32")
    valid = target(outputs[1], "pred") if len(outputs) > 1 else None
    lane = LANE.astype(np.int64)

    def execute(warp, mask):
        n, c = amount(warp).astype(np.int64), clamp(warp).astype(np.int64)
        segment = (c >> 8) & 31
        last = (lane & segment) | (c & 31 & ~segment)
        first = lane & segment
        if mode == "up":
            origin, inside = lane - n, lane - n >= last
        elif mode == "down":
            origin, inside = lane + n, lane + n <= last
        elif mode == "bfly":
            origin, inside = lane ^ n, lane ^ n <= last
        else:
            origin = first | (n & 31 & ~segment)
            inside = origin <= last
        value = read(warp)
        write(warp, value[np.where(inside, origin, lane)], mask)
        if valid:
            valid(warp, inside, mask)

    if mode not in ("up", "down", "bfly", "idx"):
        raise KeyError(mode)
    return execute


@instruction("vote.sync")
def _vote(ins, program):
    mode = ins.parts[2]
    read = source(ins.operands[1], "pred", program)
    write = target(ins.operands[0], "b32" if mode == "ballot" else "pred")
    decide = {
        "ballot": lambda p: np.full(LANES, (p.astype(np.uint64) << LANE.astype(np.uint64)).sum(), np.uint32),
        "all": lambda p: np.full(LANES, p.all()),
        "any": lambda p: np.full(LANES, p.any()),
    }[mode]

    def execute(warp, mask):
        p = read(warp)
        if mask is not None:
            p = p | ~mask if mode == "all" else p & mask
        write(warp, decide(p), mask)

    return execute


@instruction("redux.sync")
def _reduce(ins, program):
    type = ins.parts[-1]
    f, dtype = _REDUCTIONS[ins.parts[2]], dtype_of(type)
    read, write = source(ins.operands[1], type, program), target(ins.operands[0], type)

    def execute(warp, mask):
        values = read(warp) if mask is None else read(warp)[mask]
        write(warp, np.full(LANES, reduce(f, values), dtype), mask)

    return execute


@instruction("elect.sync")
def _elect(ins, program):
    leader, chosen = ins.operands[0].split("|")
    write_leader, write_chosen = target(leader, "b32"), target(chosen, "pred")

    def execute(warp, mask):
        first = 0 if mask is None else int(np.argmax(mask))
        write_leader(warp, np.full(LANES, first, np.uint32), mask)
        write_chosen(warp, first == LANE, mask)

    return execute


@instruction("bra")
def _branch(ins, program):
    goal = program.target(ins, ins.operands[0])

    def execute(warp, mask):
        if mask is not None:
            uniform(mask, warp)  # raises: the lanes of a warp part ways
        warp.pc = goal

    return execute


@instruction("brx.idx")
def _branch_indexed(ins, program):
    index = source(ins.operands[0], "u32", program)
    goals = [program.target(ins, label) for label in program.tables[ins.operands[1]]]

    def execute(warp, mask):
        warp.pc = goals[uniform(index(warp), warp)]

    return execute


@instruction("ret", "exit")
def _return(ins, program):
    def execute(warp, mask):
        if mask is not None:
            uniform(mask, warp)
        warp.exit()

    return execute


@instruction("fence", "membar", "setmaxnreg", "griddepcontrol", "bar.warp.sync", "prefetch", "nanosleep")
@instruction("cp.async.bulk.prefetch", "prefetchu", "discard", "applypriority", "wgmma.fence")
def _no_effect(ins, program):
    return lambda warp, mask: None


@instruction("createpolicy")
def _cache_policy(ins, program):
    write = target(ins.operands[0], "b64")
    return lambda warp, mask: write(warp, np.zeros(LANES, np.uint64), mask)
