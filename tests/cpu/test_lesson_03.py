"""Lesson 03: its checker tells right merges from wrong ones, and the states obey the laws that the lesson claims."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lesson_cases import defined_in

from hpcattn.bench import figures
from hpcattn.lessons import exercise
from hpcattn.lessons.online import State, check_merge, empty_state, state_of


def merge_in(notebook: str):
    return defined_in(notebook, "merge", State=State, torch=torch, math=math)


solution = merge_in("solutions/03_online_softmax.ipynb")


def stacked(states):
    return (torch.stack(part) for part in zip(*states, strict=True))


def weights(m, reference):
    return torch.exp2(m - reference.masked_fill(reference == -math.inf, 0.0))


def forgets_to_rescale_l(states):
    m, l, acc = stacked(states)
    return solution(states)._replace(l=l.sum(0))


def forgets_to_rescale_acc(states):
    m, l, acc = stacked(states)
    return solution(states)._replace(acc=acc.masked_fill((m == -math.inf)[..., None], 0.0).sum(0))


def takes_m_of_the_first(states):
    m, l, acc = stacked(states)
    w = weights(m, m[0])
    acc = acc.masked_fill((m == -math.inf)[..., None], 0.0)
    return State(m[0], (w * l).sum(0), (w[..., None] * acc).sum(0))


def gives_nan_on_two_empties(states):
    m, l, acc = stacked(states)
    w = torch.exp2(m - m.amax(0))
    acc = acc.masked_fill((m == -math.inf)[..., None], 0.0)
    return State(m.amax(0), (w * l).sum(0), (w[..., None] * acc).sum(0))


def lets_unwritten_memory_through(states):
    m, l, acc = stacked(states)
    w = weights(m, m.amax(0))
    return State(m.amax(0), (w * l).sum(0), (w[..., None] * acc).sum(0))


def repairs_nan_afterwards(states):
    """Throws away what the other states of the row contributed."""
    m, l, acc = lets_unwritten_memory_through(states)
    return State(m, l, acc.nan_to_num(0.0))


def uses_base_e(states):
    m, l, acc = stacked(states)
    w = torch.exp(m - m.amax(0).masked_fill(m.amax(0) == -math.inf, 0.0))
    acc = acc.masked_fill((m == -math.inf)[..., None], 0.0)
    return State(m.amax(0), (w * l).sum(0), (w[..., None] * acc).sum(0))


def does_without_a_maximum(states):
    m, l, acc = stacked(states)
    w = torch.exp2(m)
    acc = acc.masked_fill((m == -math.inf)[..., None], 0.0)
    l = (w * l).sum(0)
    return State(torch.where(l > 0, 0.0, -math.inf), l, (w[..., None] * acc).sum(0))


def normalizes(states):
    m, l, acc = solution(states)
    return State(m, l, acc / l.clamp_min(1e-30)[:, None])


def averages(states):
    m, l, acc = solution(states)
    return State(m, l / len(states), acc / len(states))


def keeps_the_last(states):
    return states[-1]


def writes_into_its_arguments(states):
    merged = solution(states)
    states[0].l.add_(1.0)
    return merged


MUTANTS = [
    averages,
    does_without_a_maximum,
    forgets_to_rescale_acc,
    forgets_to_rescale_l,
    gives_nan_on_two_empties,
    keeps_the_last,
    lets_unwritten_memory_through,
    normalizes,
    repairs_nan_afterwards,
    takes_m_of_the_first,
    uses_base_e,
    writes_into_its_arguments,
]


def test_the_stub_is_not_attempted():
    assert exercise(check_merge, merge_in("03_online_softmax.ipynb")).status == "not attempted"


@pytest.mark.parametrize("seed", range(3))
def test_the_solution_passes(seed):
    check_merge(solution, seed=seed)
    assert exercise(check_merge, solution).passed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_wrong_merges_fail_with_a_reason(mutant):
    result = exercise(check_merge, mutant)
    assert result.status == "failed"
    assert any(word in result.message for word in ("must", "NaN")), result.message


def test_a_merge_of_the_wrong_shape_is_named():
    assert "must return a State" in exercise(check_merge, lambda states: 3.0).message
    column = exercise(check_merge, lambda states: solution(states)._replace(m=solution(states).m[:, None]))
    assert column.status == "failed"


chunks = st.lists(st.lists(st.floats(-1e4, 1e4, width=32) | st.just(-math.inf), max_size=5), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(chunks, st.randoms(use_true_random=False))
def test_any_tree_and_order_gives_the_state_of_all_keys(chunks, dice):
    v = torch.arange(sum(map(len, chunks)), dtype=torch.float64)[:, None].cos()
    s = torch.tensor([sum(chunks, [])], dtype=torch.float64)
    sizes = [len(c) for c in chunks]
    states = [state_of(*part) for part in zip(s.split(sizes, 1), v.split(sizes), strict=True)]
    while len(states) > 1:
        dice.shuffle(states)
        states = [solution([states[0], states[1]]), *states[2:]]
    for got, want in zip(states[0], state_of(s, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=5))
def test_the_empty_state_changes_nothing_and_order_not_a_bit(scores):
    s = torch.tensor([scores])
    a, b = state_of(s, torch.ones(len(scores), 2)), state_of(-s, torch.ones(len(scores), 2))
    identity = empty_state(1, 2)
    for states, want in (
        ([a, identity], a),
        ([identity, a], a),
        ([identity, identity], identity),
        ([a, b], solution([b, a])),
    ):
        assert all(torch.equal(x, y) for x, y in zip(solution(states), want, strict=True))


def test_state_of_gives_softmax():
    s, v = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    m, l, acc = state_of(s, v)
    torch.testing.assert_close(acc / l[:, None], torch.softmax(s * math.log(2), 1) @ v)
    torch.testing.assert_close((m + l.log2()) * math.log(2), torch.logsumexp(s * math.log(2), 1))


def test_states_fold_pairwise():
    s, v = torch.randn(2, 9, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    states = [state_of(x, y) for x, y in zip(s.split(2, 1), v.split(2), strict=True)]
    folded = functools.reduce(lambda a, b: solution([a, b]), states, empty_state(2, 3, torch.float64))
    for got, want in zip(folded, state_of(s, v), strict=True):
        torch.testing.assert_close(got, want)


def test_the_clock_of_the_cycle_budget_is_the_recorded_one():
    assert figures.recorded("decode").sm_clock_mhz.median() == pytest.approx(1e3 * figures.SM_CLOCK_GHZ, rel=0.01)
