"""A ring of tiles in shared memory, filled by TMA and emptied by the tensor cores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.aggregate
class Cursor:
    """A position in a ring: the slot, and the parity that its barriers have in this round."""

    slot: gl.tensor
    phase: gl.tensor

    @gluon.jit
    def start(phase):
        return Cursor(gl.to_tensor(0), gl.to_tensor(phase))

    @gluon.must_use_result
    @gluon.jit
    def next(self, SLOTS: gl.constexpr):
        wraps = self.slot == SLOTS - 1
        return Cursor(gl.where(wraps, 0, self.slot + 1), gl.where(wraps, self.phase ^ 1, self.phase))


@gluon.aggregate
class Ring:
    """Slots that a producer fills and a consumer empties, in the same order.

    A slot's `full` barrier completes when the bytes announced by `expect` have landed, or when it is published; its
    `empty` barrier when every consumer has released it. On a fresh barrier the parity 1 counts as complete, so that the
    producer, which starts there, finds every slot empty.
    """

    tiles: gl.shared_memory_descriptor  # [slots, tile, head_dim]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.jit
    def allocate(
        dtype: gl.constexpr, SLOTS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
        CONSUMERS: gl.constexpr = 1,
    ):  # fmt: skip
        """CONSUMERS: partitions of warps that release each slot."""
        tiles = gl.allocate_shared_memory(dtype, [SLOTS, TILE, D], layout)
        full = mbarrier.allocate_mbarrier(batch=SLOTS)
        empty = mbarrier.allocate_mbarrier(batch=SLOTS)
        for slot in gl.static_range(SLOTS):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=CONSUMERS)
        fence_async_shared()  # TMA, too, must see them initialised
        return Ring(tiles, full, empty, SLOTS)

    @gluon.jit
    def to_fill(self, at: Cursor, bytes: gl.constexpr):
        """The slot at a cursor and the barrier that `bytes` will complete, once the consumer has released it."""
        full = self.full.index(at.slot)
        mbarrier.wait(self.empty.index(at.slot), at.phase)
        mbarrier.expect(full, bytes)
        return self.tiles.index(at.slot), full

    @gluon.jit
    def to_write(self, at: Cursor):
        """The slot at a cursor, to be filled by ordinary stores and then published."""
        mbarrier.wait(self.empty.index(at.slot), at.phase)
        return self.tiles.index(at.slot)

    @gluon.jit
    def publish(self, at: Cursor):
        fence_async_shared()  # what was stored, before the tensor cores read it
        mbarrier.arrive(self.full.index(at.slot))
        return at.next(self.slots)

    @gluon.jit
    def filled(self, at: Cursor, pred=True):
        """The slot at a cursor, once its bytes have landed, if `pred`."""
        mbarrier.wait(self.full.index(at.slot), at.phase, pred=pred)
        return self.tiles.index(at.slot)

    @gluon.jit
    def release(self, at: Cursor):
        mbarrier.arrive(self.empty.index(at.slot))
        return at.next(self.slots)
