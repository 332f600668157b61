"""A running integral along a solution, as one more equation of the system: q' = g(t, y, y'), q(t0) = 0."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hbnode._torch import may_look
from hbnode._tree import State, describe, like, parts
from hbnode.solve.methods import SECOND_ORDER
from hbnode.solve.settings import Settings

Integrand = Callable[[Tensor, Any, Any], Tensor]  # of t and the state and its derivative, tensors or tuples

WITHOUT_GRAPH = (
    "integrand differentiates with torch.autograd, but is evaluated without a graph in the forward pass. "
    "Fix: torch.func, for instance torch.func.vjp(net, h) or torch.func.jacrev(net)(h)."
)


class WithIntegral(nn.Module):
    """A field with an integral q as the last part of its state: called ``(t, (*state, q))``, returns (*y', g).

    The error of q has a norm of its own, which is not averaged with that of y.
    The integrand g, called ``(t, state, derivative)``, returns (batch,).
    """

    has_integral = True

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

    @property
    def counted_as(self) -> nn.Module:
        """Its evaluations are evaluations of the field."""
        return self.field

    def start(self, state: State) -> tuple[Tensor, ...]:
        """Return the state at the start, with q = 0."""
        y = parts(state)
        return (*y, y[0].new_zeros(len(y[0])))

    def split(self, *pieces: Tensor) -> tuple[State, Tensor]:
        """Return the state, or its trajectory, and q."""
        *y, q = pieces
        return (y[0] if self.single else tuple(y)), q

    def forward(self, t: Tensor, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the derivative; t is a scalar, or (batch, 1, ...)."""
        state, q = self.split(*pieces)
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
        return (*parts(derivative), rate)


def _check_call(integrand: Integrand) -> None:
    """Refuse a function that cannot be called ``(t, state, derivative)``, where its signature can be read."""
    if not may_look():
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
    """Return the settings of a block as they are for its integral, refused where they are for h'' + γh' = f alone."""
    method, gradient = settings.method, settings.gradient
    if method in SECOND_ORDER or gradient == "reversible":
        raise ValueError(
            f"an integral along the path needs a method for any field, got method={method!r} with "
            f"gradient={gradient!r}. Fix: block.method, block.gradient = 'tsit5', 'checkpoint'."
        )
    return replace(settings, compile=False)
