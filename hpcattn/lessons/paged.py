"""Checkers of lesson 02: append and gather on the raw memory of a paged HND cache.

The memory is flat float64, so that every element can carry a code of its own: a wrong element then tells where it came
from. Whatever no request may see (unused slots, unused pages) is NaN; unused table entries are out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcattn.cache import make_block_table

__all__ = ["check_append_hnd", "check_gather_hnd"]

NAN = float("nan")
BEFORE_ZERO = -1.0  # code of new tokens whose position is negative, which must not be stored


@dataclass
class _Case:
    """A pool of pages `[num_pages, num_kv_heads, page_size, head_dim]` in flat memory, shared by ragged requests."""

    page_size: int
    num_kv_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]
    num_query_tokens: int
    seed: int
    unused: int  # what unused table entries hold

    def __post_init__(self):
        used = sum(-(-n // self.page_size) for n in self.seq_lens)
        self.shape = (used + 3, self.num_kv_heads, self.page_size, self.head_dim)
        self.block_table = make_block_table(
            self.seq_lens, self.page_size, num_pages=self.shape[0], seed=self.seed, fill=self.unused
        )
        self.block_table = torch.nn.functional.pad(self.block_table, (0, 1), value=self.unused)

    def tokens(self, request: int, start: int, stop: int) -> Tensor:
        """Codes of a request's tokens: float64 `[stop - start, num_kv_heads, head_dim]`, no two elements equal."""
        codes = torch.arange(start, stop)[:, None, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)[:, None]
        codes = codes * self.head_dim + torch.arange(self.head_dim)
        return (codes * len(self.seq_lens) + request + 1).double()

    def write(self, memory: Tensor, request: int, start: int, stop: int) -> None:
        pages = memory.view(self.shape)
        for position, token in zip(range(start, stop), self.tokens(request, start, stop), strict=True):
            page = int(self.block_table[request, position // self.page_size])
            pages[page, :, position % self.page_size] = token

    def memory(self, *, without_newest: bool) -> Tensor:
        """NaN, except for what the requests hold (before or after their newest tokens are stored)."""
        memory = torch.full((torch.Size(self.shape).numel(),), NAN, dtype=torch.float64)
        for request, n in enumerate(self.seq_lens):
            self.write(memory, request, 0, max(0, n - self.num_query_tokens) if without_newest else n)
        return memory

    def meaning(self, value: float) -> str:
        """What a value in memory is."""
        if value != value:
            return "NaN (not to be seen)"
        rest, request = divmod(abs(int(value)) - 1, len(self.seq_lens))
        rest, d = divmod(rest, self.head_dim)
        token, head = divmod(rest, self.num_kv_heads)
        if value == BEFORE_ZERO:
            return "a token that lies before position 0"
        if value < 0 or value != int(value) or token >= max(self.seq_lens):
            return f"{value:g}, which nobody stored"
        return f"request {request}, token {token}, head {head}, d {d}"

    def place(self, index: int) -> str:
        """Where an element of the flat memory lies, and whose it is."""
        rest, d = divmod(index, self.head_dim)
        rest, slot = divmod(rest, self.page_size)
        page, head = divmod(rest, self.num_kv_heads)
        for request, n in enumerate(self.seq_lens):
            pages = self.block_table[request, : -(-n // self.page_size)].tolist()
            if page in pages:
                token = pages.index(page) * self.page_size + slot
                whose = f"token {token} of request {request}" if token < n else f"an unused slot of request {request}"
                break
        else:
            whose = "a page of no request"
        return f"memory[{index}] (page {page}, head {head}, slot {slot}, d {d}: {whose})"

    def __str__(self) -> str:
        return (
            f"page_size {self.page_size}, {self.num_kv_heads} KV heads, head_dim {self.head_dim}, "
            f"seq_lens {list(self.seq_lens)}, num_query_tokens {self.num_query_tokens}"
        )


def _cases() -> Iterator[_Case]:
    """Every length class: empty, shorter than the new tokens, one slot, full pages and their neighbors."""
    yield _Case(16, 1, 4, (5,), 1, seed=0, unused=-1)
    yield _Case(16, 2, 4, (1, 16, 17, 40), 1, seed=1, unused=-1)
    yield _Case(32, 3, 2, (33, 0, 2, 64, 65), 3, seed=2, unused=1 << 20)
    yield _Case(64, 2, 8, (130, 4, 64, 3), 5, seed=3, unused=-1)
    yield _Case(16, 4, 2, (0, 1, 90, 31), 2, seed=4, unused=1 << 20)


def check_append_hnd(append_hnd: Callable[[Tensor, Tensor, Tensor, Tensor, int], None]) -> None:
    """`append_hnd(memory, new, block_table, seq_lens, page_size)` stores each request's newest tokens, in place.

    Raises AssertionError naming the first element of memory that is not as it must be.
    """
    for case in _cases():
        memory, expected = case.memory(without_newest=True), case.memory(without_newest=False)
        s = case.num_query_tokens
        new = [case.tokens(request, n - s, n) for request, n in enumerate(case.seq_lens)]
        new = torch.cat([torch.where(x > 0, x, BEFORE_ZERO) for x in new])
        seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        append_hnd(memory, new, case.block_table.clone(), seq_lens, case.page_size)
        wrong = (~_same(memory, expected)).nonzero().flatten().tolist()
        assert not wrong, (
            f"{case}:\n{len(wrong)} elements are wrong; the first is {case.place(wrong[0])}\n"
            f"  expected: {case.meaning(expected[wrong[0]].item())}\n"
            f"  found:    {case.meaning(memory[wrong[0]].item())}"
        )


def check_gather_hnd(gather_hnd: Callable[[Tensor, Tensor, int, int, int, int, int], Tensor]) -> None:
    """`gather_hnd(memory, block_table, request, seq_len, page_size, num_kv_heads, head_dim)` returns the tokens.

    The result is `[seq_len, num_kv_heads, head_dim]`. Raises AssertionError naming its first element that is wrong.
    """
    for case in _cases():
        memory = case.memory(without_newest=False)
        before = memory.clone()
        for request, n in enumerate(case.seq_lens):
            sizes = (case.page_size, case.num_kv_heads, case.head_dim)
            got = gather_hnd(memory, case.block_table.clone(), request, n, *sizes)
            expected = case.tokens(request, 0, n)
            about = f"{case}, request {request}:\n"
            assert isinstance(got, Tensor), f"{about}expected a tensor, got {type(got).__name__}"
            assert got.shape == expected.shape, f"{about}expected shape {[*expected.shape]}, got {[*got.shape]}"
            wrong = (~_same(got, expected)).nonzero().tolist()
            assert not wrong, (
                f"{about}{len(wrong)} elements are wrong; the first is (token, head, d) = {tuple(wrong[0])}\n"
                f"  expected: {case.meaning(expected[tuple(wrong[0])].item())}\n"
                f"  found:    {case.meaning(got[tuple(wrong[0])].item())}"
            )
        assert _same(memory, before).all(), f"{case}: gathering changed the memory"


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())
