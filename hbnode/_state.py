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


def like(value: State, y: State) -> State:
    """The field's value checked to have the structure, shapes and dtype of the state."""
    if isinstance(y, Tensor):
        if isinstance(value, Tensor) and value.shape == y.shape:
            return cast(value, y)
    elif isinstance(value, tuple) and len(value) == len(y):
        pairs = list(zip(value, y, strict=True))
        if all(isinstance(v, Tensor) and v.shape == part.shape for v, part in pairs):
            return tuple(cast(v, part) for v, part in pairs)
    raise ValueError(
        f"the field returned {describe(value)} for a state of {describe(y)}; expected the same. "
        "Fix: return d state/dt with the structure and shapes of the state."
    )


def cast(value: Tensor, y: Tensor) -> Tensor:
    """``value`` in the dtype of the state: autocast may have computed it in a smaller one."""
    if value.dtype == y.dtype:
        return value
    if torch.is_autocast_enabled(y.device.type):
        return value.to(y.dtype)
    raise TypeError(
        f"the field returned {value.dtype} for a state of {y.dtype}; expected the same dtype. "
        "Fix: convert the field (field.double(), field.float()) or the input to one dtype."
    )
