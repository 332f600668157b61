"""Heavy-ball fields whose f sees a condition beside h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import takes_time
from hbnode.fields import GHBNODE, HBNODE


class ConditionedHBNODE(HBNODE):
    """An HBNODE on h = [position, condition]: f sees the condition, which stays at rest.

    As a part of the state the condition gets its gradient in every mode.
    """

    def __init__(self, func: Callable[..., Tensor], dim: int, condition_dim: int, **options: Any) -> None:
        super().__init__(func, **_with_time(func, condition_dim, options))
        self.dim, self.condition_dim = dim, condition_dim

    @override
    def force(self, t: Tensor, h: Tensor) -> Tensor:
        position, *condition = _split(h, self.dim)
        return _padded(self.evaluate(t, position, *condition), self.condition_dim)

    @override
    def solver_damping(self) -> Tensor | float:
        return _padded(super().solver_damping(), self.condition_dim)


class ConditionedGHBNODE(GHBNODE):
    """A GHBNODE on h = [position, condition] likewise; the activation leaves the condition at rest."""

    def __init__(self, func: Callable[..., Tensor], dim: int, condition_dim: int, **options: Any) -> None:
        super().__init__(func, **_with_time(func, condition_dim, options))
        self.dim, self.condition_dim = dim, condition_dim
        if condition_dim:
            self.activation = _OfPosition(self.activation, dim)

    @override
    def force(self, t: Tensor, h: Tensor) -> Tensor:
        position, *condition = _split(h, self.dim)
        return _padded(self.evaluate(t, position, *condition) - self.xi * position, self.condition_dim)

    @override
    def solver_damping(self) -> Tensor | float:
        return _padded(super().solver_damping(), self.condition_dim)


class _OfPosition(nn.Module):
    """An activation of the first features; the others stay as they are, 0."""

    def __init__(self, activation: Callable[[Tensor], Tensor], dim: int) -> None:
        super().__init__()
        self.activation, self.dim = activation, dim

    @override
    def forward(self, m: Tensor) -> Tensor:
        return torch.cat([self.activation(m[..., : self.dim]), m[..., self.dim :]], -1)


def _with_time(func: Callable[..., Tensor], condition_dim: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a field, with whether f takes the time in front of h and a condition."""
    if options["time_dependent"] is None:
        options["time_dependent"] = takes_time(func, 2 if condition_dim else 1, "condition")
    return options


def _split(h: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Position and condition, or the position alone."""
    return (h,) if h.shape[-1] == dim else h.tensor_split([dim], -1)


def _padded(x: Tensor | float, count: int) -> Any:
    """A tensor with zeros for the condition, or a number as it is."""
    return nn.functional.pad(x, (0, count)) if isinstance(x, Tensor) and x.dim() and count else x
