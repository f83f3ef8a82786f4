"""`explain(operator, ...)`: what a call would run, and why, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Explanation", "explain", "explains"]


@dataclass(frozen=True)
class Explanation:
    """The choices of one call: `choices[name] = (value, reason)`."""

    operator: str
    choices: dict[str, tuple[object, str]]

    def __getitem__(self, name: str) -> object:
        return self.choices[name][0]

    def __str__(self) -> str:
        width = max(len(f"{name} = {value}") for name, (value, _) in self.choices.items())
        lines = [f"  {f'{name} = {value}':{width}}  {why}" for name, (value, why) in self.choices.items()]
        return "\n".join([self.operator, *lines])


_explainers: dict[Callable, Callable[..., Explanation]] = {}


def explains(operator: Callable) -> Callable:
    """Decorate the function that settles the choices of `operator`; it takes some of its arguments, by name."""
    return lambda explainer: _explainers.setdefault(operator, explainer)


def explain(operator: Callable, *args, **kwargs) -> Explanation:
    """Say what `operator(*args, **kwargs)` would run and why; arguments are checked, nothing is launched.

    Raises ValueError if `operator` is not one of hpcattn's, and what the operator raises for bad arguments.
    """
    if operator not in _explainers:
        names = ", ".join(sorted(f.__name__ for f in _explainers))
        raise ValueError(f"operator must be one of {names}, got {getattr(operator, '__name__', operator)!r}")
    bound = inspect.signature(operator).bind(*args, **kwargs)
    bound.apply_defaults()
    explainer = _explainers[operator]
    return explainer(**{name: bound.arguments[name] for name in inspect.signature(explainer).parameters})
