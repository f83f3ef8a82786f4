"""Partial states exchanged through the shared memory of a cluster (distributed shared memory).

The kernel is compiled for one CTA and launched in clusters (`launch.Launch.cluster`), so that its layouts know of one
CTA only; what crosses CTAs is said here, in PTX. All CTAs of a cluster run at the same time, but a peer's memory may be
used only once the peer has set its mbarriers up: every warp calls `arrive`, and whoever sends first calls `wait`.

In a cluster, addresses of shared memory carry the rank of their CTA. Gluon masks it off those that it hands to inline
assembly: `mapa` puts one in again, an ordinary store would go to the first CTA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hpcattn.kernels.hopper.pipeline import Cursor
from hpcattn.kernels.hopper.states import empty_state, row_ids, state_layout, take_in


@gluon.jit
def arrive():
    """This CTA's mbarriers may be used from now on: by every warp, once, after they were initialised."""
    gl.inline_asm("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;", "~{memory}")


@gluon.jit
def arrive_only(unused):
    """A partition for warps that have nothing to do: the cluster's barrier counts them."""
    arrive()


@gluon.jit
def wait():
    """Until every warp of the cluster has arrived."""
    gl.inline_asm("barrier.cluster.wait.acquire.aligned;", "~{memory}")


@gluon.constexpr_function
def _push(outputs, inputs):
    """Send each row of a thread's part of acc, four floats at a time, with its m and l to the CTA that merges it."""
    (acc_box,), (m_box,), (l_box,), (full,), ranks, acc_at, ml_at, column, m, l, acc = inputs
    send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    rows = len(acc) // 4
    asm = ["{", ".reg .b32 a, b;", ".reg .pred first;", f"setp.eq.s32 first, {column[0]}, 0;"]
    for i in range(rows):
        rank, at, slot, m_row, l_row = (x[i * len(x) // rows] for x in (ranks, acc_at, ml_at, m, l))
        asm += [f"mapa.shared::cluster.u32 b, {full}, {rank};", f"mapa.shared::cluster.u32 a, {acc_box}, {rank};"]
        asm += [f"add.u32 a, a, {at};", f"add.u32 a, a, {column[0]};"]
        asm += [f"{send}.v4.b32 [a], {{{', '.join(acc[4 * i : 4 * i + 4])}}}, [b];"]
        for box, x in ((m_box, m_row), (l_box, l_row)):
            asm += [f"mapa.shared::cluster.u32 a, {box}, {rank};", f"add.u32 a, a, {slot};"]
            asm += [f"@first {send}.b32 [a], {x}, [b];"]
    return "\n".join([*asm, "}"])


# one thread for each of the peers
_RELEASE = gl.constexpr(
    """{
    .reg .pred one;
    .reg .b32 a;
    setp.lt.s32 one, $1, $2;
    @one mapa.shared::cluster.u32 a, $0, $1;
    @one mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a];
}"""
)


@gluon.aggregate
class Inbox:
    """Two boxes, used in turns, in which a CTA of C gets its own n = N / C rows of every peer's state.

    `full`, on the receiver's side, completes when the bytes have landed; `empty`, on the sender's, when all receivers
    have read. As in a `pipeline.Ring`, but the two sides lie in different CTAs.
    """

    acc: gl.shared_memory_descriptor  # float32 [2, C, n, D]
    m: gl.shared_memory_descriptor  # float32 [2, C, n], as l
    l: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(C: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        full, empty = mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2)
        for box in gl.static_range(2):
            mbarrier.init(full.index(box), count=1)
            mbarrier.init(empty.index(box), count=C)
        acc = gl.allocate_shared_memory(gl.float32, [2, C, N // C, D], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        m = gl.allocate_shared_memory(gl.float32, [2, C, N // C], rows)
        return Inbox(acc, m, gl.allocate_shared_memory(gl.float32, [2, C, N // C], rows), full, empty)

    @gluon.jit
    def send(self, at: Cursor, rank, m, l, acc):
        """The consumers' side: a state of m, l `[N, 1]` and acc `[N, D]`."""
        N: gl.constexpr = acc.shape[0]
        D: gl.constexpr = acc.shape[1]
        n: gl.constexpr = self.acc.shape[2]
        acc_box, m_box, l_box = self.acc.index(at.slot), self.m.index(at.slot), self.l.index(at.slot)
        full = self.full.index(at.slot)
        mbarrier.wait(self.empty.index(at.slot), at.phase)
        r = row_ids(N, D)
        where = rank * n + r % n
        column = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout)) * 4
        gl.inline_asm(
            _push,
            ("r", "r", "r", "r", "r", "r", "r", "r", "f", "f", "f"),
            [acc_box, m_box, l_box, full, r // n, where * (D * 4), where * 4, column, m, l, acc],
        )
        return at.next(2)

    @gluon.jit
    def drain(self, at: Cursor):
        """Until everything sent was read: no peer will touch this CTA's memory any more."""
        mbarrier.wait(self.empty.index(at.slot), at.phase)
        at = at.next(2)
        mbarrier.wait(self.empty.index(at.slot), at.phase)

    @gluon.jit
    def receive(self, at: Cursor):
        """The other side, four warps: the cluster's states merged, rows [rank * n, rank * n + n)."""
        C: gl.constexpr = self.acc.shape[1]
        n: gl.constexpr = self.acc.shape[2]
        D: gl.constexpr = self.acc.shape[3]
        layout: gl.constexpr = state_layout(n, D)
        full = self.full.index(at.slot)
        mbarrier.expect(full, C * n * (D + 2) * 4)
        mbarrier.wait(full, at.phase)
        m = self.m.index(at.slot).load(gl.SliceLayout(2, layout))[:, :, None]
        l = self.l.index(at.slot).load(gl.SliceLayout(2, layout))[:, :, None]
        acc = self.acc.index(at.slot).load(layout)
        none = empty_state(n, D)
        m, l, acc = take_in(none[0], none[1], none[2], m, l, acc)
        gl.barrier()  # all have read
        peer = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm(_RELEASE, "r,r,r", [self.empty.index(at.slot), peer, gl.to_tensor(C)])
        return at.next(2), m, l, acc
