"""States, a tensor or a tuple of tensors, handled alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hbnode._checks import check_input
from hbnode._torch import plain

State = Tensor | tuple[Tensor, ...]
Times = Tensor | Iterable[float | Tensor]  # an array of numpy is an iterable too


def parts(state: State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def apply(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The function of every tensor of a state, in the structure of the state."""
    return function(state) if isinstance(state, Tensor) else tuple(function(part) for part in state)


def last_of(trajectory: State) -> State:
    return apply(lambda part: part[-1], trajectory)


def is_finite(state: State) -> bool:
    """Whether all elements are. A sum that is finite says so at a third of the price; that of large ones may not be."""
    state = tuple(map(plain, (state,) if isinstance(state, Tensor) else state))
    return math.isfinite(sum(map(Tensor.sum, state))) or bool(all_finite(state))


def all_finite(state: State) -> Tensor:
    """Whether all elements are, without a synchronisation."""
    return torch.stack([torch.isfinite(part).all() for part in parts(state)]).all()


def describe(state: object) -> str:
    """Structure and shapes, for messages."""
    if isinstance(state, Tensor):
        return f"shape {tuple(state.shape)}"
    if isinstance(state, tuple):
        return "(" + ", ".join(describe(part) for part in state) + ")"
    return f"type {type(state).__name__}"


def append_zeros(x: Tensor, augment: int) -> Tensor:
    """Append ``augment`` zeros along dimension 1: (batch, d, ...) -> (batch, d + augment, ...)."""
    check_input(x, "the input")
    if augment == 0:
        return x
    if x.dim() < 2:
        raise ValueError(
            f"augmentation appends zeros along dimension 1, so it needs an input of shape (batch, features, ...); "
            f"got shape {tuple(x.shape)}. Fix: x.unsqueeze(-1)."
        )
    zeros = x.new_zeros(x.shape[0], augment, *x.shape[2:])
    return torch.cat([x, zeros], dim=1)


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
