"""States, a tensor or a tuple of tensors, handled alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]


def parts(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return (state,) if isinstance(state, Tensor) else state


def apply(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The function of every tensor of a state, in the structure of the state."""
    return function(state) if isinstance(state, Tensor) else tuple(function(part) for part in state)


def is_finite(state: State) -> bool:
    """Whether all elements are."""
    return all(bool(torch.isfinite(part).all()) for part in parts(state))


def is_equal(a: State, b: State) -> bool:
    """Whether all elements are."""
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def describe(state: object) -> str:
    """Structure and shapes, for messages."""
    if isinstance(state, Tensor):
        return f"shape {tuple(state.shape)}"
    if isinstance(state, tuple):
        return "(" + ", ".join(describe(part) for part in state) + ")"
    return f"type {type(state).__name__}"
