"""Lesson 06: four ways for CTAs to bring their partial states together, so that nothing but the way differs.

Every CTA begins with a state of its own (acc, m, l), read from global memory in place of an attention loop. `C` of
them belong to one output. Each kernel is written as what one CTA does; `push_kernel` is compiled like the others, for
one CTA, and launched in clusters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def merge(m, l, acc):
    """Of states [C, rows] and acc [C, rows, D], the normalised output [rows, D]: all weights against one maximum."""
    m = gl.expand_dims(m, 2)
    m_all = gl.max(m, 0)  # [rows, 1]
    weight = gl.exp2(m - gl.where(m_all == NEG_INF, 0.0, m_all)[None, :, :])
    return gl.sum(acc * weight, 0) / gl.sum(gl.expand_dims(l, 2) * weight, 0)


@gluon.constexpr_function
def own_layout(D):
    """A state [R, D]: a warp for a row, four columns for a lane."""
    return gl.BlockedLayout([1, 4], [1, D // 4], [4, 1], [1, 0])


@gluon.constexpr_function
def merge_layout(C, ROWS, D):
    """C states [ROWS, D] next to each other: every thread has all C values of its places, so a merge needs no talk."""
    columns = min(4, max(1, ROWS * D // 128))  # of a thread
    across = D // columns  # threads in a row
    lanes = [1, 32 // min(32, across), min(32, across)]
    warps = [1, 4 // max(1, across // 32), max(1, across // 32)]
    return gl.BlockedLayout([C, 1, columns], lanes, warps, [2, 1, 0])


@gluon.jit
def load_state(states, slot, slots, R: gl.constexpr, D: gl.constexpr):
    """(m, l, acc) of a slot. In memory: acc [slots, R, D], then (m, l) [slots, 2, R]."""
    layout: gl.constexpr = own_layout(D)
    row = gl.arange(0, R, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    tail = states + slots * R * D + slot * 2 * R + row
    return gl.load(tail), gl.load(tail + R), gl.load(states + (slot * R + row)[:, None] * D + d[None, :])


@gluon.jit
def store_state(states, slot, slots, m, l, acc, R: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = own_layout(D)
    row = gl.arange(0, R, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    tail = states + slots * R * D + slot * 2 * R + row
    gl.store(states + (slot * R + row)[:, None] * D + d[None, :], acc)
    gl.store(tail, m)
    gl.store(tail + R, l)


@gluon.jit
def merge_from_memory(states, first, slots, row0, out, pair,
                      C: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Merge rows [row0, row0 + ROWS) of the C slots from `first` on, and write them."""
    layout: gl.constexpr = merge_layout(C, ROWS, D)
    c = gl.arange(0, C, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = row0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = (first + c)[:, None] * R + row[None, :]
    tail = states + slots * R * D + at + (first + c)[:, None] * R
    o = merge(gl.load(tail), gl.load(tail + R), gl.load(states + gl.expand_dims(at, 2) * D + d[None, None, :]))
    store_rows(out, pair * R + row0, o, ROWS, D)


@gluon.jit
def store_rows(out, row0, o, ROWS: gl.constexpr, D: gl.constexpr):
    row = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, o.type.layout))
    d = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
    gl.store(out + row[:, None] * D + d[None, :], o.to(gl.bfloat16))


# --- No merge, and merges through global memory ---------------------------------------------------------------------


@gluon.jit
def alone_kernel(states, out, R: gl.constexpr, D: gl.constexpr):
    """No merge: every CTA normalises and writes what it has. What the others are compared with."""
    cta = gl.program_id(0)
    m, l, acc = load_state(states, cta, gl.num_programs(0), R, D)
    store_rows(out, cta * R, acc / l[:, None], R, D)


@gluon.jit
def leave_kernel(states, workspace, R: gl.constexpr, D: gl.constexpr):
    """The first of two kernels: leave the state in the workspace."""
    cta = gl.program_id(0)
    slots = gl.num_programs(0)
    m, l, acc = load_state(states, cta, slots, R, D)
    store_state(workspace, cta, slots, m, l, acc, R, D)


@gluon.jit
def merge_kernel(workspace, out, C: gl.constexpr, R: gl.constexpr, D: gl.constexpr):
    """The second: a CTA merges R // C rows of one output."""
    cta = gl.program_id(0)
    rank = cta % C
    merge_from_memory(workspace, cta - rank, gl.num_programs(0), rank * (R // C), out, cta // C, C, R // C, R, D)


@gluon.jit
def arrive_kernel(states, workspace, arrivals, out, C: gl.constexpr, R: gl.constexpr, D: gl.constexpr):
    """One kernel: whoever arrives last at an output's counter merges it, and sets the counter back."""
    cta = gl.program_id(0)
    pair = cta // C
    slots = gl.num_programs(0)
    m, l, acc = load_state(states, cta, slots, R, D)
    store_state(workspace, cta, slots, m, l, acc, R, D)
    gl.barrier()  # every thread of this CTA has stored
    before = gl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")  # release mine, acquire theirs
    if before == C - 1:
        gl.barrier()
        merge_from_memory(workspace, pair * C, slots, 0, out, pair, C, R, R, D)
        gl.store(arrivals + pair, 0)


# --- Through distributed shared memory ------------------------------------------------------------------------------


@gluon.constexpr_function
def _rank(outputs, inputs):
    return f"mov.u32 {outputs[0][0]}, %cluster_ctarank;"


@gluon.jit
def cluster_rank():
    return gl.inline_asm(_rank, ("=r",), [], gl.int32, is_pure=True)


@gluon.jit
def meet_at_start():
    """Nobody passes before every CTA of the cluster is running and has set up its mbarrier."""
    gl.inline_asm(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; "
        "barrier.cluster.wait.acquire.aligned;",
        "", [], (), is_pure=False,
    )  # fmt: skip


@gluon.constexpr_function
def _push_rows(outputs, inputs):
    """Sends a thread's part of every row, four floats at a time, and once per row its m and l."""
    (acc_box,), (m_box,), (l_box,), (bar,), ranks, slots, columns, m, l, acc = inputs
    send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    lines = ["{", ".reg .b32 to, there;", ".reg .pred first;", f"setp.eq.s32 first, {columns[0]}, 0;"]
    for i, rank in enumerate(ranks):
        part = ", ".join(acc[4 * i : 4 * i + 4])
        lines += [
            f"mapa.shared::cluster.u32 there, {bar}, {rank};",  # where that CTA has its mbarrier
            f"mapa.shared::cluster.u32 to, {acc_box}, {rank};",  # and its inbox
            f"mad.lo.s32 to, {slots[i]}, 512, to;",
            f"add.u32 to, to, {columns[0]};",
            f"{send}.v4.b32 [to], {{{part}}}, [there];",
        ]
        for box, value in ((m_box, m[i]), (l_box, l[i])):
            lines += [f"mapa.shared::cluster.u32 to, {box}, {rank};", f"mad.lo.s32 to, {slots[i]}, 4, to;"]
            lines += [f"@first {send}.b32 [to], {value}, [there];"]
    return "\n".join([*lines, "}"])


@gluon.jit
def push_kernel(states, out, C: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
                BYTES: gl.constexpr, MEET: gl.constexpr = True, WAIT: gl.constexpr = True):  # fmt: skip
    """A cluster of C CTAs merges its C states; CTA r gets rows [r * R // C, (r + 1) * R // C) of all of them.

    BYTES: what a CTA is to receive. MEET, WAIT: the two waits of the protocol, to see what happens without.
    """
    ROWS: gl.constexpr = R // C
    gl.static_assert(D == 128)
    layout: gl.constexpr = own_layout(D)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rank = cluster_rank()
    acc_box = gl.allocate_shared_memory(gl.float32, [C, ROWS, D], plain)  # C senders' share of each of my rows
    m_box = gl.allocate_shared_memory(gl.float32, [C, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    l_box = gl.allocate_shared_memory(gl.float32, [C, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    arrived = mbarrier.allocate_mbarrier()
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, BYTES)  # 1. the one arrival, and how many bytes are still to come
    if MEET:
        meet_at_start()  # 2. peers run, and their mbarriers exist
    m, l, acc = load_state(states, gl.program_id(0), gl.num_programs(0), R, D)
    row = gl.arange(0, R, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout)) * 4
    slot = rank * ROWS + row % ROWS  # in the inbox of the CTA that merges this row
    gl.inline_asm(  # 3. push
        _push_rows,
        ("r", "r", "r", "r", "r", "r", "r", "f", "f", "f"),
        [acc_box, m_box, l_box, arrived, row // ROWS, slot, column, m, l, acc],
        is_pure=False,
    )
    if WAIT:
        mbarrier.wait(arrived, 0)  # 4. everybody's share of my rows is here
    recv: gl.constexpr = merge_layout(C, ROWS, D)
    of_rows: gl.constexpr = gl.SliceLayout(2, recv)
    o = merge(m_box.load(of_rows), l_box.load(of_rows), acc_box.load(recv))  # 5. merge and write
    store_rows(out, gl.program_id(0) // C * R + rank * ROWS, o, ROWS, D)


# --- Two probes -----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _neighbour(outputs, inputs):
    return "\n".join(
        f"shfl.sync.bfly.b32 {to}, {x}, 1, 31, -1;" for to, x in zip(outputs[0], inputs[0], strict=True)
    )  # fmt: skip


@gluon.constexpr_function
def _push_one(outputs, inputs):
    (box,), (bar,), (peer,), offsets, values = inputs
    send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32"
    lines = ["{", ".reg .b32 to, there;", f"mapa.shared::cluster.u32 there, {bar}, {peer};"]
    lines += [f"mapa.shared::cluster.u32 to, {box}, {peer};", f"add.u32 to, to, {offsets[0]};"]
    return "\n".join([*lines, f"{send} [to], {values[0]}, [there];", "}"])


@gluon.jit
def chain_kernel(out, counter, steps, LEVEL: gl.constexpr):
    """`steps` times, each thread passes a number on and cannot go on before it has one: what a level's step costs.

    LEVEL: "register", "warp" (a shuffle), "cta" (shared memory), "cluster" (push and wait, between two CTAs) or "grid"
    (an atomic that orders memory).
    """
    N: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, N, layout)
    x = i.to(gl.float32)
    boxes = gl.allocate_shared_memory(gl.float32, [2, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if LEVEL == "cluster":
        arrived = mbarrier.allocate_mbarrier(batch=2)
        mbarrier.init(arrived.index(0), count=1)
        mbarrier.init(arrived.index(1), count=1)
        meet_at_start()
        peer = cluster_rank() ^ 1
    for step in range(steps):
        if LEVEL == "register":
            x = x * 0.5 + 1.0
        elif LEVEL == "warp":
            x = gl.inline_asm(_neighbour, ("=f", "f"), [x], x.type, is_pure=True)
        elif LEVEL == "cta":
            box = boxes.index(step % 2)
            box.store(x)
            x = box.load(layout) + 1.0
        elif LEVEL == "cluster":
            box = boxes.index(step % 2)
            bar = arrived.index(step % 2)
            mbarrier.expect(bar, N * 4)
            gl.inline_asm(_push_one, ("r", "r", "r", "r", "f"), [box, bar, peer, i * 4, x], is_pure=False)
            mbarrier.wait(bar, step // 2 & 1)
            x = box.load(layout) + 1.0
        else:
            x = x + gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu").to(gl.float32)
    gl.store(out + gl.program_id(0) * N + i, x)


@gluon.constexpr_function
def _clock(outputs, inputs):
    return f"mov.u64 {outputs[0][0]}, %clock64;"


@gluon.jit
def occupy_kernel(out, clocks):
    """Takes an SM (by more than half of its shared memory) for so many clocks: shows how many clusters run at once."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    room = gl.allocate_shared_memory(gl.float32, [32768], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.arange(0, 32, layout)
    room.slice(0, 32).store(i.to(gl.float32))
    start = gl.inline_asm(_clock, ("=l",), [], gl.int64, is_pure=False)
    now = start
    while now - start < clocks:
        now = gl.inline_asm(_clock, ("=l",), [], gl.int64, is_pure=False)
    gl.store(out + gl.program_id(0) * 32 + i, room.slice(0, 32).load(layout) + (now - start).to(gl.float32) * 0)
