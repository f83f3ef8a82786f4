"""Work items of prefill: BLOCK_M queries of one head, taken by a producer and told to everybody else through a box.

Without an order, of a single request, CTAs take items in rounds, longest first, every other round backwards, so that
the sums come out even. With one (`hpcattn.kernels.portable.order`), a CTA takes its first item by its number and all
others by a counter, so that one that is done early takes more.

A box has two slots, so that the producer can be an item ahead. A slot holds what the item is, and, for a block mask,
the list of its active tiles, from the causal diagonal backwards.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hpcattn.kernels.hopper.pipeline import Cursor

TILE = gl.constexpr(128)  # keys per tile, as in a block mask
HEADER = gl.constexpr(12)  # words of a slot before its list
CHUNK = gl.constexpr(256)  # mask bytes that a warp has in flight: 8 a lane


@gluon.aggregate
class Item:
    """Rows [row, row + rows) of q and o, which are tokens [local, local + rows) of their request.

    position: of the first row among the keys; tiles: how many tiles of keys to compute (0: no more items), the first
    two beginning with tokens `first` and `second`; kv_len: the request's keys; valid: whether it is as declared.
    """

    row: gl.tensor
    rows: gl.tensor
    position: gl.tensor
    head: gl.tensor
    tiles: gl.tensor
    first: gl.tensor
    second: gl.tensor
    kv_len: gl.tensor
    request: gl.tensor
    local: gl.tensor
    valid: gl.tensor


@gluon.constexpr_function
def _put(outputs, inputs):
    """Store the words of an item; all lanes store the same."""
    (base,), *words = inputs
    words = [w for (w,) in words]
    rows = [words[i : i + 4] for i in range(0, len(words), 4)]
    return "\n".join(f"st.shared.v4.b32 [{base} + {16 * i}], {{{', '.join(row)}}};" for i, row in enumerate(rows))


@gluon.constexpr_function
def _get(outputs, inputs):
    ((word,),), ((base,), (index,)) = outputs, inputs
    return f"{{ .reg .b32 a; mad.lo.u32 a, {index}, 4, {base}; ld.shared.b32 {word}, [a]; }}"


@gluon.constexpr_function
def _compact(outputs, inputs):
    """Append the values whose flag is set to a list of `count` words: every lane knows where its own go."""
    ((count,),) = outputs
    (base,), (before,), flags, values = inputs
    asm = ["{", ".reg .b32 set, at, address;", ".reg .pred active;", ".reg .b32 below;", "mov.u32 below, %lanemask_lt;"]
    asm += [f"mov.b32 {count}, {before};"]
    for flag, value in zip(flags, values, strict=True):
        asm += [f"setp.ne.s32 active, {flag}, 0;", "vote.sync.ballot.b32 set, active, 0xffffffff;"]
        asm += ["and.b32 at, set, below;", "popc.b32 at, at;", f"add.u32 at, at, {count};"]
        asm += [f"mad.lo.u32 address, at, 4, {base};", f"@active st.shared.b32 [address], {value};"]
        asm += ["popc.b32 set, set;", f"add.u32 {count}, {count}, set;"]
    return "\n".join([*asm, "bar.warp.sync 0xffffffff;", "}"])


@gluon.constexpr_function
def _flags_layout():
    return gl.DistributedLinearLayout([[32], [64], [128]], [[1], [2], [4], [8], [16]], [], [], [256])


@gluon.aggregate
class Inbox:
    """Two items on their way from the producer; `full` and `empty` as in a `Ring`."""

    words: gl.shared_memory_descriptor  # int32 [2, words]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(WORDS: gl.constexpr, READERS: gl.constexpr):
        """WORDS: HEADER and the longest list; READERS: partitions of warps that read every item."""
        words = gl.allocate_shared_memory(gl.int32, [2, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        full = mbarrier.allocate_mbarrier(batch=2)
        empty = mbarrier.allocate_mbarrier(batch=2)
        for slot in gl.static_range(2):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=READERS)
        fence_async_shared()
        return Inbox(words, full, empty)

    @gluon.jit
    def word(self, at: Cursor, index):
        """A word of a slot, in all lanes."""
        return gl.inline_asm(_get, ("=r", "r", "r"), [self.words.index(at.slot), index], gl.int32, is_pure=False)

    @gluon.jit
    def list_token(self, at: Cursor, i):
        """The first token of the i-th active tile."""
        return self.word(at, HEADER + i) * TILE

    @gluon.jit
    def reserve(self, at: Cursor):
        mbarrier.wait(self.empty.index(at.slot), at.phase)

    @gluon.jit
    def compact(self, at: Cursor, mask_row, tiles):
        """List the active ones of the first `tiles` tiles, the last first; how many they are."""
        layout: gl.constexpr = _flags_layout()
        count = gl.to_tensor(0)
        base = self.words.index(at.slot)
        for start in range(0, tiles, CHUNK):
            tile = tiles - 1 - start - gl.arange(0, CHUNK, layout)
            active = gl.load(mask_row + tile, mask=tile >= 0, other=0).to(gl.int32)
            count = gl.inline_asm(
                _compact, ("=&r", "r", "r", "r", "r"), [base, count + HEADER, active, tile], gl.int32, is_pure=False
            ) - HEADER  # fmt: skip
        return count

    @gluon.jit
    def put(self, at: Cursor, item):
        """Tell the readers; the slot was reserved."""
        gl.inline_asm(
            _put,
            ("r",) * 13,
            [
                self.words.index(at.slot), item.row, item.rows, item.position, item.head, item.tiles, item.first,
                item.second, item.kv_len, item.request, item.local, item.valid, item.valid,
            ],
            is_pure=False,
        )  # fmt: skip
        mbarrier.arrive(self.full.index(at.slot))
        return at.next(2)

    @gluon.jit
    def end(self, at: Cursor):
        """Tell the readers that there are no more items."""
        zero = gl.to_tensor(0)
        self.put(at, Item(zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero))

    @gluon.jit
    def open(self, at: Cursor):
        """The item in a slot, once it is there."""
        mbarrier.wait(self.full.index(at.slot), at.phase)
        return self.read(at)

    @gluon.jit
    def read(self, at: Cursor):
        return Item(
            self.word(at, 0), self.word(at, 1), self.word(at, 2), self.word(at, 3), self.word(at, 4), self.word(at, 5),
            self.word(at, 6), self.word(at, 7), self.word(at, 8), self.word(at, 9), self.word(at, 10),
        )  # fmt: skip

    @gluon.jit
    def release(self, at: Cursor):
        mbarrier.arrive(self.empty.index(at.slot))
        return at.next(2)


@gluon.aggregate
class Batch:
    """The requests, their pages and their block mask."""

    cu_seqlens_q: gl.tensor
    seq_lens: object  # None: packed keys, as many as queries
    capacity: gl.tensor  # tokens that a row of the block table can list
    table: object
    table_stride: gl.tensor
    q_pad: gl.tensor  # queries per request that there are scales for
    mask: object  # uint8 [batch, num_q_heads, rows, columns], or None
    mask_request: gl.tensor  # strides
    mask_head: gl.tensor
    mask_row: gl.tensor
    mask_rows: gl.tensor
    mask_columns: gl.tensor
    order: object  # int32 [items or blocks of queries, 4], or None; see `hpcattn.kernels.portable.order`
    header: object
    num_q_heads: gl.tensor
    BLOCK_M: gl.constexpr

    @gluon.jit
    def count(self):
        """Number of items."""
        if self.order is None:
            return gl.cdiv(self._queries(0), self.BLOCK_M) * self.num_q_heads
        elif self.mask is None:
            return gl.load(self.header) * self.num_q_heads
        else:
            return gl.load(self.header)

    @gluon.jit
    def _queries(self, request):
        return gl.load(self.cu_seqlens_q + request + 1) - gl.load(self.cu_seqlens_q + request)

    @gluon.jit
    def take(self, turn):
        """The index of this CTA's item in its `turn`."""
        ctas = gl.num_programs(0)
        if self.order is not None:
            return gl.program_id(0) if turn == 0 else gl.atomic_add(self.header + 1, 1) + ctas
        else:
            backwards = turn % 2 == 1
            return turn * ctas + gl.where(backwards, ctas - 1 - gl.program_id(0), gl.program_id(0))

    @gluon.jit
    def item(self, index, count, inbox, at):
        """Item number `index`; lists its active tiles in the slot at the cursor, if there is a mask."""
        if self.order is None:
            request = gl.to_tensor(0)
            block = (count - 1 - index) // self.num_q_heads
            head = index % self.num_q_heads
        elif self.mask is None:
            entry = self.order + index // self.num_q_heads * 4
            request, block, head = gl.load(entry), gl.load(entry + 1), index % self.num_q_heads
        else:
            entry = self.order + index * 4
            request, block, head = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        start = gl.load(self.cu_seqlens_q + request)
        q_len = gl.load(self.cu_seqlens_q + request + 1) - start
        kv_len, valid = q_len, q_len <= self.q_pad
        if self.seq_lens is not None:
            kv_len = gl.load(self.seq_lens + request)
            valid = valid & (kv_len >= 0) & (kv_len <= self.capacity)
        local = block * self.BLOCK_M
        rows = gl.minimum(q_len - local, self.BLOCK_M)
        if self.mask is not None:  # one narrower than what its row of 128 queries sees is an error, not a guess
            row = local // TILE
            widest = kv_len - q_len + gl.minimum(row * TILE + TILE, q_len)
            valid = valid & (row < self.mask_rows) & (widest <= self.mask_columns * TILE)
        kv_len = gl.where(valid, kv_len, 0)
        position = gl.where(valid, kv_len - q_len + local, -(1 << 24))
        tiles = gl.cdiv(gl.maximum(position + rows, 0), TILE)  # that the last row sees
        first = (tiles - 1) * TILE
        second = first - TILE
        if self.mask is not None:
            mask_row = self.mask + request.to(gl.int64) * self.mask_request
            mask_row += head.to(gl.int64) * self.mask_head + row.to(gl.int64) * self.mask_row
            tiles = inbox.compact(at, mask_row, tiles)
            if tiles > 0:
                first = inbox.list_token(at, 0)
                second = inbox.list_token(at, gl.minimum(tiles - 1, 1))
        # an item that sees nothing computes a tile of no keys
        kv_len = gl.where(tiles > 0, kv_len, 0)
        position = gl.where(tiles > 0, position, -(1 << 24))
        first = gl.where(tiles > 0, first, 0)
        return Item(
            start + local, rows, position, head, gl.maximum(tiles, 1), first, second, kv_len, request, local,
            valid.to(gl.int32),
        )  # fmt: skip
