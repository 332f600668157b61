"""A running integral along a solution, as one more equation of the system: q' = g(t, y, y'), q(t0) = 0."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._state import State, cast, describe, like, parts
from hbnode._torch import is_tracing
from hbnode.solve.methods import SECOND_ORDER
from hbnode.solve.settings import Settings

Integrand = Callable[[Tensor, Any, Any], Tensor]  # of t and the state and its derivative, tensors or tuples

WITHOUT_GRAPH = (
    "integrand differentiates with torch.autograd, but is evaluated without a graph in the forward pass. "
    "Fix: torch.func, for instance torch.func.vjp(net, h) or torch.func.jacrev(net)(h)."
)


class WithIntegral(nn.Module):
    """A field with an integral: called ``(t, rows)`` with a row [y, q] for each sample, returns the row [y', g].

    Arguments:
        field: the field, called ``(t, state)``.
        integrand: g, called ``(t, state, derivative)``, returns (batch,).
        state: the state at the start, whose parts have the shapes (batch, ...).
    """

    _separate_elements = (
        1  # elements at the end of each row whose error has a norm of its own, not averaged with the others
    )

    def __init__(self, field: nn.Module, integrand: Integrand, state: State) -> None:
        super().__init__()
        _check_call(integrand)
        self.field, self.integrand = field, integrand
        self.single = isinstance(state, Tensor)
        if any(part.dim() == 0 or len(part) != len(parts(state)[0]) for part in parts(state)):
            raise ValueError(
                f"an integral along the path needs a state whose parts have the shape (batch, ...), got "
                f"{describe(state)}. Fix: x.unsqueeze(0)."
            )
        self.shapes = [part.shape[1:] for part in parts(state)]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    @property
    def counted_as(self) -> nn.Module:
        """Its evaluations are evaluations of the field."""
        return self.field

    def start(self, state: State) -> Tensor:
        """The rows at the start, with q = 0."""
        return self.rows(state, parts(state)[0].new_zeros(len(parts(state)[0])))

    def rows(self, state: State, q: Tensor) -> Tensor:
        """The row [y, q] of each sample, (batch, size of y + 1)."""
        flat = (part.reshape(len(part), size) for part, size in zip(parts(state), self.sizes, strict=True))
        return torch.cat([*flat, q.unsqueeze(1)], dim=1)

    def split(self, rows: Tensor) -> tuple[State, Tensor]:
        """The state and q of rows (..., batch, size of y + 1)."""
        *pieces, q = rows.split([*self.sizes, 1], dim=-1)
        state = tuple(
            piece.reshape(*piece.shape[:-1], *shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        )
        return (state[0] if self.single else state), q.squeeze(-1)

    def forward(self, t: Tensor, rows: Tensor) -> Tensor:
        """The derivative of the rows; t is a scalar, or (batch, 1)."""
        state, q = self.split(rows)
        if t.dim():
            t = t.reshape(-1, *[1] * len(self.shapes[0]))  # as the field expects it
        derivative = like(self.field(t, state), state)
        try:
            rate = self.integrand(t, state, derivative)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise ValueError(WITHOUT_GRAPH) from error
            raise
        if not isinstance(rate, Tensor) or rate.shape != q.shape:
            raise ValueError(
                f"integrand returned {describe(rate)}; expected one number for each sample, {tuple(q.shape)}. "
                "Fix: g.flatten(1).sum(1) adds up the rest."
            )
        return self.rows(derivative, cast(rate, rows))


def _check_call(integrand: Integrand) -> None:
    """Refuse a function that cannot be called ``(t, state, derivative)``, where its signature can be read."""
    if is_tracing():
        return
    try:
        signature = inspect.signature(integrand.forward if isinstance(integrand, nn.Module) else integrand)
    except ValueError:
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise TypeError(
            f"integrand takes {signature}; expected (t, state, derivative). "
            "Fix: lambda t, h, dh: ..., with the derivative dh of the state, used or not."
        ) from None


def settings_of_integral(settings: Settings) -> Settings:
    """The settings of a block as they are for its integral, refused where they are for h'' + γh' = f alone."""
    method, gradient = settings.method, settings.gradient
    if method in SECOND_ORDER or gradient == "reversible":
        raise ValueError(
            f"an integral along the path needs a method for any field, got method={method!r} with "
            f"gradient={gradient!r}. Fix: block.method, block.gradient = 'tsit5', 'checkpoint'."
        )
    return replace(settings, compile=False)
