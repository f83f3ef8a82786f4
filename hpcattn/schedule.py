"""The decode schedule: which CTA attends to which tiles of which (request, KV head) pair.

Lay the 64-token tiles of all pairs end to end, request by request and head by head. CTA c takes tiles
`[c * quota, (c + 1) * quota)` of that line, with `quota = max(ceil(total / num_ctas), min_quota)`: every CTA that has
work has the same, but for the last, whatever the lengths. Three small int32 tensors say all there is to say:

* `header` = (quota, total tiles of all pairs, number of requests whose length is out of range, 0);
* `offsets[b]`, `[batch + 1]`: tiles of the requests before b, counted for one head;
* `starts[c]`, `[num_ctas]`: the request that tile `c * quota` belongs to.

They depend on the lengths alone, so one plan serves every layer of a step, and rebuilding it in place (`out=`) keeps a
captured graph right when lengths change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcattn.kernels.portable import plan as portable
from hpcattn.kernels.portable.decode import TILE
from hpcattn.ops import define_operator
from hpcattn.validation import check_seq_lens, check_tensor, check_value, resolve_implementation

__all__ = [
    "DecodePlan",
    "plan_chunks",
    "plan_decode",
    "plan_decode_reference",
    "saturating_splits",
    "static_chunks",
    "static_splits",
]

CTAS_PER_SM = 2
MIN_QUOTA = 2  # tiles: below this, merging costs more than it balances
LONG_REQUEST = 4096  # tokens, as the next
SHORTEST_CHUNK = 512
RAGGED_SPLITS = 32
MOST_WAVES = 16
CPU_SMS = 4  # what the interpreter pretends to have


@dataclass(frozen=True)
class DecodePlan:
    """A schedule on the device. Its capacity is `offsets.shape[0] - 1` requests of up to `max_seq_len` tokens."""

    header: Tensor
    offsets: Tensor
    starts: Tensor
    num_kv_heads: int
    max_seq_len: int
    min_quota: int = MIN_QUOTA
    tile: int = TILE

    @property
    def num_ctas(self) -> int:
        return self.starts.shape[0]


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number for the CPU, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_SMS


def plan_decode(
    seq_lens: Tensor,
    num_kv_heads: int,
    *,
    max_seq_len: int = 2**30,
    num_ctas: int | None = None,
    min_quota: int = MIN_QUOTA,
    out: DecodePlan | None = None,
    implementation: str = "auto",
) -> DecodePlan:
    """Build the schedule where `seq_lens` lives, without the host looking at it.

    seq_lens: int32 `[batch]`. max_seq_len: longest request the plan may serve, usually
    `block_table.shape[1] * page_size`; a longer (or negative) length gets no tiles, is counted in `header[2]`, and its
    rows of the result will be NaN. num_ctas: grid size, two per multiprocessor if None. out: a plan for the same batch
    size to rebuild in place; the other settings are then taken from it.
    implementation: `"auto"`, `"portable"` or `"reference"` (the plain Python twin, which reads the lengths).
    Raises ValueError or TypeError for arguments that do not fit.
    """
    check_seq_lens(seq_lens)
    batch = seq_lens.shape[0]
    if out is None:
        num_ctas = CTAS_PER_SM * multiprocessors(seq_lens.device) if num_ctas is None else num_ctas
        # so that no tile number exceeds 32 bits
        check_value("num_kv_heads", num_kv_heads, 1 <= num_kv_heads <= 1024, "an integer from 1 to 1024")
        check_value("num_ctas", num_ctas, 1 <= num_ctas <= 65536, "an integer from 1 to 65536")
        check_value("min_quota", min_quota, 1 <= min_quota <= 16384, "an integer from 1 to 16384")
        check_value("max_seq_len", max_seq_len, 0 <= max_seq_len <= 2**30, "an integer from 0 to 2**30")
        header, offsets, starts = (
            torch.empty(n, dtype=torch.int32, device=seq_lens.device) for n in (4, batch + 1, num_ctas)
        )
        out = DecodePlan(header, offsets, starts, num_kv_heads, max_seq_len, min_quota)
    check_plan(out, batch, seq_lens.device)
    check_value(
        "num_kv_heads", num_kv_heads, num_kv_heads == out.num_kv_heads, f"{out.num_kv_heads}, as the plan in out"
    )
    implementation, _ = resolve_implementation(implementation, seq_lens.device, operator="plan_decode")
    torch.ops.hpcattn.plan_decode(
        seq_lens,
        num_kv_heads,
        out.tile,
        out.min_quota,
        out.max_seq_len,
        implementation,
        out.header,
        out.offsets,
        out.starts,
    )
    return out


def check_plan(plan: DecodePlan, batch: int, device: torch.device) -> None:
    """A plan must be one for `batch` requests, on `device`, and for the tiles of the kernels."""
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must be a DecodePlan, got {type(plan).__name__}")
    for name, n in (("header", 4), ("offsets", batch + 1), ("starts", None)):
        x = getattr(plan, name)
        check_tensor(f"plan.{name}", x, shape=(n,), dtype=torch.int32, device=device, contiguous=True)
    check_value("plan.tile", plan.tile, plan.tile == TILE, str(TILE))


def plan_decode_reference(
    seq_lens: list[int], num_kv_heads: int, num_ctas: int, *, tile: int = TILE, min_quota: int = MIN_QUOTA,
    max_seq_len: int = 2**30,
) -> tuple[list[int], list[int], list[int]]:  # fmt: skip
    """The plan in plain Python: (header, offsets, starts)."""
    valid = [0 <= n <= max_seq_len for n in seq_lens]
    offsets = [0]
    for n, ok in zip(seq_lens, valid, strict=True):
        offsets.append(offsets[-1] + (math.ceil(n / tile) if ok else 0))
    total = offsets[-1] * num_kv_heads
    quota = max(math.ceil(total / num_ctas), min_quota)
    starts = [
        next((b for b in range(len(seq_lens)) if offsets[b + 1] * num_kv_heads > c * quota), len(seq_lens))
        for c in range(num_ctas)
    ]
    return [quota, total, valid.count(False), 0], offsets, starts


def plan_chunks(plan: DecodePlan) -> list[list[list[int]]]:
    """`[request][head]`: the token positions at which the plan's chunks start (reads the plan back)."""
    quota, offsets = int(plan.header[0]), plan.offsets.tolist()
    chunks = []
    for b, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        first = [offsets[b] * plan.num_kv_heads + h * (stop - start) for h in range(plan.num_kv_heads)]
        cuts = [[0, *(t - f for t in range((f // quota + 1) * quota, f + stop - start, quota))] for f in first]
        chunks.append([[tile * plan.tile for tile in cut] for cut in cuts])
    return chunks


def saturating_splits(batch: int, num_kv_heads: int, max_seq_len: int, device: torch.device) -> int:
    """Chunks per pair for the static schedule: enough to fill the GPU once, never more than a request can have tiles.

    Follows from the grid alone: unlike a rule on query or key length it cannot leave multiprocessors idle on a small
    batch, nor pay for merging on a large one.
    """
    wanted = CTAS_PER_SM * multiprocessors(device) // max(1, batch * num_kv_heads)
    return max(1, min(wanted, max_seq_len // TILE))


def static_splits(ctas: int, max_seq_len: int, device: torch.device) -> tuple[int, int]:
    """(chunks per pair, least tokens per chunk) of the Hopper kernels' static schedule; `ctas`: its grid unsplit.

    A CTA streams at twice its share of the memory's bandwidth, so that half as many CTAs as multiprocessors keep it
    busy: up to there, requests are split. Where lengths may differ much, because the table has room for requests longer
    than `LONG_REQUEST`, each is cut into `RAGGED_SPLITS` chunks, as long as that makes few waves of CTAs. No chunk is
    shorter than `SHORTEST_CHUNK` tokens, below which its share of the merge costs more than it saves. All measured on
    an H200.
    """
    sms = multiprocessors(device)
    splits = sms // (2 * max(1, ctas))
    if max_seq_len > LONG_REQUEST:
        splits = max(splits, min(RAGGED_SPLITS, MOST_WAVES * sms // max(1, ctas)))
    return max(1, min(splits, max_seq_len // SHORTEST_CHUNK)), SHORTEST_CHUNK


def static_chunks(
    seq_lens: list[int], num_kv_heads: int, num_splits: int, *, tile: int = TILE, min_tiles: int = 1
) -> list[list[list[int]]]:  # fmt: skip
    """`[request][head]`: where the chunks of the static schedule start, `tile` as the kernel's."""
    chunk = [max(min_tiles, math.ceil(math.ceil(n / tile) / num_splits)) * tile for n in seq_lens]
    return [[list(range(0, max(1, n), c))] * num_kv_heads for n, c in zip(seq_lens, chunk, strict=True)]


def _plan_decode(
    seq_lens, num_kv_heads, tile, min_quota, max_seq_len, implementation, header, offsets, starts
) -> None:  # fmt: skip
    if implementation == "reference":
        plan = plan_decode_reference(
            seq_lens.tolist(), num_kv_heads, starts.shape[0], tile=tile, min_quota=min_quota, max_seq_len=max_seq_len
        )
        for tensor, values in zip((header, offsets, starts), plan, strict=True):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
    else:
        portable.launch(seq_lens, header, offsets, starts, num_kv_heads, tile, min_quota, max_seq_len)


define_operator(
    "plan_decode(Tensor seq_lens, int num_kv_heads, int tile, int min_quota, int max_seq_len, str implementation, "
    "Tensor(a!) header, Tensor(b!) offsets, Tensor(c!) starts)",
    _plan_decode,
)
