"""Right-hand sides around a known network, with their gradient written by hand.

A state s is (batch, n) of a first-order field, else (batch, 2 n) with h and m, or h and v, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hbnode._structure import structure_of
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE, Field
from hbnode.ode_rnn.by_hand.networks import HOOKS, TANH, Network, Sums, Weights
from hbnode.solvers.ode_term import change_of_call

Number = Tensor | float | None


class Equation:
    """The function that the stages of a solve evaluate: the force on h, or the derivative of s.

    Arguments:
        network: f.
        xi: ξ of the force f - ξh; None without it.
        damping: γ, of a derivative that holds the damping; None in methods that solve it themselves.
        halves: how h' is made in the derivative of s: "m", or "tanh" of m; None for a force or a first-order field.
        joins: whether f sees both halves.
    """

    def __init__(self, network: Network, xi: Number, damping: Number, halves: str | None, joins: bool) -> None:
        self.network, self.halves, self.joins = network, halves, joins
        self.numbers: tuple[Number, Number] = (xi, damping)

    @staticmethod
    def of(field: Field, *, second_order: bool) -> Equation | None:
        """That of a field, for methods that solve second-order equations or others; None if it is not known."""
        kind = type(field)
        if kind not in (NODE, ANODE, SONODE, HBNODE, GHBNODE) or field.time_dependent:
            return None
        if not structure_of(field).is_as_written() or any(getattr(field, hooks) for hooks in HOOKS):
            return None
        network = Network.of(field.func)
        if network is None:
            return None
        if isinstance(field, (HBNODE, GHBNODE)):
            if change_of_call(field) is not None:
                return None
            xi = field.xi if isinstance(field, GHBNODE) else None
            damping = field.damping
            is_known = not isinstance(field, GHBNODE) or field.activation is torch.tanh
            if not is_known or (isinstance(damping, Tensor) and damping.dim()):
                return None
            if second_order:
                return Equation(network, xi, None, None, joins=False)
            return Equation(network, xi, damping, "tanh" if isinstance(field, GHBNODE) else "m", joins=False)
        if kind is SONODE:
            return Equation(network, None, None, "m", joins=True)
        return Equation(network, None, None, None, joins=False)

    def run(self, x: Tensor, weights: Weights, numbers: Sequence[Number], kept: list[Tensor] | None) -> Tensor:
        """The value for x, the h of a force, or s; of the shape of x."""
        xi, damping = numbers
        if self.halves is None:
            value = self.network.run(x, weights, kept)
            return value if xi is None else value - xi * x
        n = x.shape[1] // 2
        h, m = x[:, :n], x[:, n:]
        value = self.network.run(x if self.joins else h, weights, kept)
        if xi is not None:
            value = value - xi * h
        if damping is not None:
            value = value - damping * m
        return torch.cat((m if self.halves == "m" else TANH.run(m), value), 1)

    def pull(
        self,
        gradient: Tensor,
        x: Tensor,
        value: Tensor,
        weights: Weights,
        numbers: Sequence[Number],
        kept: Sequence[Tensor],
        sums: Sums,
        of_numbers: list[Tensor | None],
    ) -> Tensor:
        """The gradient at x from the one at the value; those of learned ξ and γ are added to ``of_numbers``."""
        xi, damping = numbers
        if self.halves is None:
            back = self.network.pull(gradient, weights, kept, sums)
            if xi is not None:
                _subtract(of_numbers, 0, xi, gradient, x)
                back = back - xi * gradient
            return back
        n = x.shape[1] // 2
        of_h, of_m = gradient[:, :n], gradient[:, n:]
        back = self.network.pull(of_m, weights, kept, sums)
        by_m = of_h if self.halves == "m" else TANH.pull(of_h, value[:, :n])
        if xi is not None:
            _subtract(of_numbers, 0, xi, of_m, x[:, :n])
            back = back - xi * of_m
        if damping is not None:
            _subtract(of_numbers, 1, damping, of_m, x[:, n:])
            by_m = by_m - damping * of_m
        if self.joins:
            back[:, n:] += by_m
            return back
        return torch.cat((back, by_m), 1)


def _subtract(totals: list[Tensor | None], index: int, number: Number, gradient: Tensor, factor: Tensor) -> None:
    """What a number adds to its gradient, if it has one, where its product with ``factor`` is subtracted."""
    if isinstance(number, Tensor):
        part = (gradient * factor).sum()
        total = totals[index]
        totals[index] = -part if total is None else total - part
