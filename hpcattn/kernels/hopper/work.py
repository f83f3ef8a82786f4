"""Which tiles a CTA works on: one chunk of a pair (static), or its shares of a plan's segments (dynamic).

The tiles of all (request, KV head) pairs form a line, of which every cluster gets `quota` (`hpcattn.schedule`). A
segment is what lies of one pair in that range; the CTAs of the cluster share it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpcattn.kernels.hopper.states import chunk_tiles, visible_length
from hpcattn.kernels.portable import plan

SMALL_SHARE = gl.constexpr(plan.SMALL_SHARE)


@gluon.aggregate
class Requests:
    """Lengths and pages of the requests."""

    seq_lens: gl.tensor
    capacity: gl.tensor  # tokens that a row of the block table can list
    table: gl.tensor
    table_stride: gl.tensor
    num_kv_heads: gl.tensor


@gluon.aggregate
class Segment:
    """Places [first, last) of a pair of `places`, in the line from `at` on: the last ones are the pair's tiles.

    What comes before them, `Range.cost` places of a plan, is the price of beginning with a pair.
    """

    request: gl.tensor
    head: gl.tensor
    places: gl.tensor
    first: gl.tensor
    last: gl.tensor
    at: gl.tensor

    @gluon.jit
    def whole(self):
        return (self.first == 0) & (self.last == self.places)

    @gluon.jit
    def lengths(self, requests, cost, UNIT: gl.constexpr):
        """(visible keys, whether the request is as long as it was planned); none if not."""
        kv_len, valid = visible_length(requests.seq_lens, requests.capacity, self.request)
        valid = valid & (gl.maximum(gl.cdiv(kv_len, UNIT), 1) + cost == self.places)
        return gl.where(valid, kv_len, 0), valid


@gluon.jit
def static_segment(requests, request, head, split, num_splits, UNIT: gl.constexpr, MIN_TILES: gl.constexpr):
    """A chunk of the static schedule; num_splits None: the whole pair."""
    kv_len, _ = visible_length(requests.seq_lens, requests.capacity, request)
    tiles = gl.maximum(gl.cdiv(kv_len, UNIT), 1)
    first, last = gl.to_tensor(0), tiles
    if num_splits is not None:
        share = chunk_tiles(tiles, num_splits, MIN_TILES)
        first = split * share
        last = gl.minimum(first + share, tiles)
    return Segment(request, head, tiles, first, last, gl.to_tensor(0))


@gluon.aggregate
class Range:
    """A CTA's place in a plan: cluster `cluster`, CTA `rank` of C, the line's tiles up to `end`."""

    offsets: gl.tensor
    num_kv_heads: gl.tensor
    cluster: gl.tensor
    rank: gl.tensor
    end: gl.tensor
    quota: gl.tensor
    cost: gl.tensor  # places of a pair that are not tiles
    C: gl.constexpr

    @gluon.jit
    def open(records, offsets, num_kv_heads, C: gl.constexpr, BLOCKS: gl.constexpr):
        """(the range, its first segment). The clusters of a range, one for each block of rows, are neighbours."""
        cluster, rank = gl.program_id(0) // (C * BLOCKS), gl.program_id(0) % C
        record = records + cluster * 8
        request, head, first, places = gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)
        at, end, quota, cost = gl.load(record + 4), gl.load(record + 5), gl.load(record + 6), gl.load(record + 7)
        mine = Range(offsets, num_kv_heads, cluster, rank, end, quota, cost, C)
        segment = Segment(request, head, places, first, gl.minimum(places, first + end - at), at)
        return mine, mine.seek(segment)

    @gluon.jit
    def request_after(self, segment):
        """The request of the pair after a segment's, if that is in the range; known without reading anything."""
        more = segment.at + segment.last - segment.first < self.end
        return gl.where(more & (segment.head == self.num_kv_heads - 1), segment.request + 1, segment.request)

    @gluon.jit
    def next(self, segment):
        return self.seek(self.step(segment))

    @gluon.jit
    def step(self, segment):
        at = segment.at + segment.last - segment.first
        more = at < self.end  # else the pair stays the same: what is read of it in advance exists
        request = self.request_after(segment)
        wraps = request != segment.request
        head = gl.where(more, gl.where(wraps, 0, segment.head + 1), segment.head)
        begin = gl.load(self.offsets + request, mask=wraps, other=0)
        end = gl.load(self.offsets + request + 1, mask=wraps, other=0)
        places = gl.where(wraps, end - begin, segment.places)
        return Segment(request, head, places, at * 0, gl.minimum(places, self.end - at), at)

    @gluon.jit
    def alone(self, segment):
        """Whether one CTA has all of a pair: in a cluster, one much shorter than a CTA's part of the line."""
        if self.C == 1:
            return segment.whole()
        else:
            small = gl.maximum(self.quota // (SMALL_SHARE * self.C), 1)
            return segment.whole() & (segment.places - self.cost <= small)

    @gluon.jit
    def seek(self, segment):
        """Pass over what other CTAs have alone: pairs in turns."""
        if self.C > 1:
            while (
                (segment.at < self.end)
                & self.alone(segment)
                & ((segment.request * self.num_kv_heads + segment.head) % self.C != self.rank)
            ):
                segment = self.step(segment)
        return segment

    @gluon.jit
    def share(self, segment):
        """This CTA's tiles [first, last) of a segment: contiguous shares, the longer ones taken in turns."""
        first, last = gl.maximum(segment.first - self.cost, 0), gl.maximum(segment.last - self.cost, 0)
        if self.C == 1:
            return first, last
        else:
            n = last - first
            j = (self.rank - segment.at) & (self.C - 1)
            mine = first + j * (n // self.C) + gl.minimum(j, n % self.C)
            end = mine + n // self.C + (j < n % self.C).to(gl.int32)
            alone = self.alone(segment)
            return gl.where(alone, first, mine), gl.where(alone, last, end)

    @gluon.jit
    def cut(self, segment):
        """(the first cluster that a pair touches, how many it touches)."""
        begin = segment.at - segment.first
        first = begin // self.quota
        return first, (begin + segment.places - 1) // self.quota - first + 1
