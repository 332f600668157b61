"""The integral q of a function g along a solution y, computed by solving q' = g(t, y, y'), q(t0) = 0 with the ODE."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hbnode._torch import may_look
from hbnode._tree import State, describe, like, parts
from hbnode.solve.methods import ALL_METHODS
from hbnode.solve.settings import Settings

Integrand = Callable[[Tensor, Any, Any], Tensor]  # (t, state, derivative) -> (batch,); a state is a tensor or a tuple

WITHOUT_GRAPH = (
    "integrand calls torch.autograd, but the forward pass evaluates it without a graph. "
    "Fix: torch.func, for instance torch.func.vjp(net, h) or torch.func.jacrev(net)(h)."
)


class WithIntegral(nn.Module):
    """A field for the state (*y, q), where q (batch,) is the integral of ``integrand`` along the solution y.

    ``integrand`` is called as ``integrand(t, y, y')`` and returns a tensor (batch,). Step size control uses the larger
    of the error norms of y and of q.
    """

    has_integral = True

    def __init__(self, field: nn.Module, integrand: Integrand, state: State) -> None:
        super().__init__()
        _check_call(integrand)
        self.field, self.integrand = field, integrand
        self.single = isinstance(state, Tensor)
        if any(part.dim() == 0 or len(part) != len(parts(state)[0]) for part in parts(state)):
            got = describe(state)
            raise ValueError(f"an integral needs parts of the shape (batch, ...), got {got}. Fix: x.unsqueeze(0).")

    @property
    def counted_as(self) -> nn.Module:
        """The wrapped field, for which :func:`hbnode.count_nfe` counts the evaluations of this field."""
        return self.field

    def start(self, state: State) -> tuple[Tensor, ...]:
        """Return the initial state (*y, q) with q = 0, where y are the tensors of ``state``."""
        y = parts(state)
        return (*y, y[0].new_zeros(len(y[0])))

    def split(self, *pieces: Tensor) -> tuple[State, Tensor]:
        """Return y in the structure of the user's state, and q, from the tensors of a state (*y, q) or a trajectory."""
        *y, q = pieces
        return (y[0] if self.single else tuple(y)), q

    def forward(self, t: Tensor, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state, q = self.split(*pieces)
        derivative = like(self.field(t, state), state)
        try:
            rate = self.integrand(t, state, derivative)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise ValueError(WITHOUT_GRAPH) from error
            raise
        if not isinstance(rate, Tensor) or rate.shape != q.shape:
            what = f"integrand returned {describe(rate)}; expected one number per sample, {tuple(q.shape)}"
            raise ValueError(f"{what}. Fix: g.flatten(1).sum(1) sums over the other dimensions.")
        return (*parts(derivative), rate)


def _check_call(integrand: Integrand) -> None:
    """Raise TypeError if ``integrand`` cannot be called as ``integrand(t, state, derivative)``."""
    if not may_look():
        return
    try:
        signature = inspect.signature(integrand.forward if isinstance(integrand, nn.Module) else integrand)
    except ValueError:
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        expected = "expected (t, state, derivative). Fix: lambda t, h, dh: ..., with the derivative dh"
        raise TypeError(f"integrand has the signature {signature}; {expected} of the state.") from None


def settings_of_integral(settings: Settings) -> Settings:
    """Return the settings with ``compile=False`` for a solve with an integral.

    Raise ValueError if the method needs an HBNODE or another special field.
    """
    method, gradient = settings.method, settings.gradient
    if (method is not None and ALL_METHODS[method].field != "any") or gradient == "reversible":
        got = f"got method={method!r} with gradient={gradient!r}"
        fix = "block.method, block.gradient = 'tsit5', 'checkpoint'"
        raise ValueError(f"an integral along the path needs a method for any field, {got}. Fix: {fix}.")
    return replace(settings, compile=False)
