"""Lesson 03: the state of an online softmax, and the checker of its exercise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["State", "check_merge", "empty_state", "state_of"]


class State(NamedTuple):
    """What attention has to remember of the keys it has seen, for some rows of queries.

    m `[rows]`: the largest base-2 score, -inf before the first. l `[rows]`: the sum of 2^(s - m). acc `[rows, D]`: the
    sum of 2^(s - m) v. The output is acc / l, the natural-log LSE (m + log2 l) ln 2.
    """

    m: Tensor
    l: Tensor
    acc: Tensor


def empty_state(rows: int, head_dim: int, dtype: torch.dtype = torch.float32) -> State:
    """No keys seen: the identity of the merge."""
    m = torch.full((rows,), -math.inf, dtype=dtype)
    return State(m, torch.zeros(rows, dtype=dtype), torch.zeros(rows, head_dim, dtype=dtype))


def state_of(s: Tensor, v: Tensor) -> State:
    """The state after keys of base-2 scores s `[rows, keys]` and values v `[keys, D]`; -inf hides a key from a row."""
    if s.shape[1] == 0:
        return empty_state(s.shape[0], v.shape[1], s.dtype)
    m = s.amax(1)
    p = torch.exp2(s - m.masked_fill(m == -math.inf, 0.0)[:, None])
    return State(m, p.sum(1), p @ v)


def check_merge(merge: Callable[[Sequence[State]], State], *, trials: int = 200, seed: int = 0) -> None:
    """Raise AssertionError with a counter-example unless `merge` merges states of any number, order and nesting.

    Keys with scores up to +-1e4, some hidden, are dealt to random chunks, some of them empty; an empty chunk's acc may
    hold NaN, as memory that nobody wrote does. Their float32 states are merged in random order along a random tree, and
    o and LSE are held against float64 over all keys at once. `merge` must leave its arguments as they are.
    """
    dice = random.Random(seed)
    torch_dice = torch.Generator().manual_seed(seed)
    for trial in range(trials):
        rows, head_dim, size = dice.randint(1, 3), dice.choice([1, 4]), [0, 1, 5, 12][trial % 4]
        magnitude = dice.choice([1.0, 30.0, 1e4])
        s = (torch.rand(rows, size, generator=torch_dice) * 2 - 1) * magnitude
        hidden = torch.rand(rows, size, generator=torch_dice) < 0.3
        s = s.masked_fill(hidden, -math.inf)
        v = torch.randn(size, head_dim, generator=torch_dice)
        chunks = _deal(s, v, dice)
        before = [State(*(x.clone() for x in state)) for state in chunks]
        got = _merge_along_a_tree(merge, list(chunks), dice)
        _compare(got, s, v, before)
        same = all(
            torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
            for a, b in zip(chunks, before, strict=True)
            for x, y in zip(a, b, strict=True)
        )
        assert same, "merge must not change the states it is given"


def _deal(s: Tensor, v: Tensor, dice: random.Random) -> list[State]:
    """Deal the keys to 1-6 chunks, of which some stay empty; chunks in random order, as float32 states."""
    count = dice.randint(1, 6)
    owner = torch.tensor([dice.randrange(count) for _ in range(s.shape[1])], dtype=torch.long)
    states = []
    for chunk in range(count):
        m, l, acc = (x.float() for x in state_of(s[:, owner == chunk].double(), v[owner == chunk].double()))
        nobody_wrote = (m == -math.inf) & (dice.random() < 0.5)
        states.append(State(m, l, acc.masked_fill(nobody_wrote[:, None], math.nan)))
    dice.shuffle(states)
    return states


def _merge_along_a_tree(merge: Callable, states: list[State], dice: random.Random) -> State:
    """Merge 1 to 4 random states at a time, until one is left that has been through `merge`."""
    while True:
        dice.shuffle(states)
        take = dice.randint(1, min(4, len(states)))
        merged = merge(states[:take])
        assert isinstance(merged, tuple) and len(merged) == 3, f"merge must return a State (m, l, acc), got {merged!r}"
        states = [State(*merged), *states[take:]]
        if len(states) == 1:
            return states[0]


def _compare(got: State, s: Tensor, v: Tensor, chunks: Sequence[State]) -> None:
    want = state_of(s.double(), v.double())
    example = f"\nbase-2 scores, a row per query: {s.tolist()}\nm of the states given: {[c.m.tolist() for c in chunks]}"
    for name, x, y in zip(State._fields, got, want, strict=True):
        assert isinstance(x, Tensor) and x.shape == y.shape, (
            f"{name} must be a tensor {list(y.shape)}, got {x!r}{example}"
        )
        assert not x.isnan().any(), f"{name} holds NaN: {x.tolist()}{example}"
    empty = want.m == -math.inf
    for name, x, neutral in zip(State._fields, got, (-math.inf, 0.0, 0.0), strict=True):
        assert (x[empty] == neutral).all(), (
            f"{name} of a row that has seen nothing must be {neutral}, got {x.tolist()}{example}"
        )
    m, l, acc = (x[~empty].double() for x in got)
    assert (l > 0).all(), f"l must be positive where a key was seen, got {got.l.tolist()}{example}"
    lse, exact_lse = m + l.log2(), (want.m + want.l.log2())[~empty]
    wrong = (lse - exact_lse).abs() > 1e-5 + 1e-6 * exact_lse.abs()
    assert not wrong.any(), f"m + log2(l) must be {exact_lse.tolist()}, got {lse.tolist()}{example}"
    o, exact_o = acc / l[:, None], (want.acc / want.l[:, None])[~empty]
    bound = 1e-5 * max(1.0, float(v.abs().amax()) if v.numel() else 1.0)
    assert ((o - exact_o).abs() <= bound).all(), f"acc / l must be {exact_o.tolist()}, got {o.tolist()}{example}"
