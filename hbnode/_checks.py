"""Checks of arguments that several modules make."""

from __future__ import annotations

import operator

CHANGES_INPUT = (
    "func changes its input in place, which is the solver's state. Fix: leave inplace=True out of its first layer, or "
    "let func work on h.clone()."
)


def as_count(value: object, name: str, least: int = 1) -> int:
    """A whole number that is at least ``least``."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}. Fix: pass a whole number.")
    return count
