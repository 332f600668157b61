"""The continuous adjoint of a native solve: the adjoint ODE, solved backwards by Tsitouras' method.

With a = ∂L/∂y, a' = -a ∂F/∂y and dL/dθ = ∫ a ∂F/∂θ dt, where y' = F(t, y) is the whole first-order equation; for an
HBNODE that is the heavy-ball adjoint of arXiv:2110.04840. y is solved backwards along with it, from each output anew.
What a damping γ shrinks on the way there, its error too, grows by e^{γT} on the way back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hbnode._closures import closed_over_leaves, refuse_unknown
from hbnode._state import State, parts
from hbnode.errors import ReversalError
from hbnode.gradients.forward_pass import ForwardPass, refuse_double_backward, solve_and_save
from hbnode.gradients.reversible import missed
from hbnode.solvers.failures import failure, start_time
from hbnode.solvers.loops import integrate
from hbnode.solvers.ode_term import ODETerm
from hbnode.solvers.stepper import Stepper, no_autocast
from hbnode.solvers.time_grid import TimeGrid

MOST_MISSED = 0.1  # how far from where it began the state, solved backwards, may end: the gradient is off by about that


class Adjoint(torch.autograd.Function):
    """Solves forwards without storing anything but the outputs, and the adjoint ODE in the backward pass."""

    forward = staticmethod(solve_and_save)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """One solve for each interval between outputs, from the last to the first."""
        refuse_double_backward("adjoint")
        trajectory, *_ = ctx.saved_tensors
        forward: ForwardPass = ctx.forward_pass
        t, leaves = forward.stepper.grid.t.detach(), forward.leaves
        field = _Backward(forward)
        adjoint = torch.zeros_like(trajectory[0])
        quadratures = [torch.zeros_like(leaf) for leaf in leaves]
        t_gradient = torch.zeros_like(t)
        with forward.context(), no_autocast(gradient.device.type):
            for k in reversed(range(1, len(t))):
                if ctx.needs_input_grad[1]:
                    t_gradient[k] = field.slope(t[k], trajectory[k], gradient[k])
                adjoint = adjoint + gradient[k]
                reached, adjoint, quadratures = field.interval(
                    t[k - 1 : k + 1].flip(0), trajectory[k], adjoint, quadratures
                )
                _check_return(forward.stepper, reached, trajectory, k - 1)
            if ctx.needs_input_grad[1]:
                t_gradient[0] = -field.slope(t[0], trajectory[0], adjoint)
        return None, t_gradient, None, adjoint + gradient[0], *quadratures


class _Backward:
    """The augmented field: state, adjoint and the integrals of the parameters' gradients."""

    def __init__(self, forward: ForwardPass) -> None:
        self.stepper, self.plan, self.leaves = forward.stepper, forward.plan, forward.leaves
        self.time_dependent = self.stepper.sees_time

    def __call__(self, t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y, a = state[0].detach().requires_grad_(), state[1]
            found, value = closed_over_leaves(lambda: self.derivative(t, y), (t, y))
            refuse_unknown(found, self.plan.known)
            wanted = [x for x in (y, *self.leaves) if x.requires_grad]
            found_for: dict[int, Tensor | None] = {}
            if value.requires_grad:
                gradients = torch.autograd.grad(value, wanted, -a, allow_unused=True)
                found_for = {id(x): g for x, g in zip(wanted, gradients, strict=True)}
        return (value.detach(), *(_or_zeros(found_for.get(id(x)), x) for x in (y, *self.leaves)))

    def derivative(self, t: Tensor, rows: Tensor) -> Tensor:
        """The whole first-order field on the rows of the state."""
        term = self.stepper.term
        with term.autocast():
            value = term.field(t, term.state(rows))
        return torch.stack(term.rows(value)).to(rows.dtype)

    def slope(self, t: Tensor, rows: Tensor, a: Tensor) -> Tensor:
        """The rate a y' at which a function with the gradient a changes in time."""
        self.stepper.tally.add("evaluation")
        with torch.no_grad():
            return (self.derivative(t.to(rows), rows) * a).sum().to(t)

    def interval(
        self, t: Tensor, rows: Tensor, adjoint: Tensor, quadratures: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The state, the adjoint and the integrals at the other end of an interval."""
        state: State = (rows, adjoint, *quadratures)
        term = ODETerm(self, state, second_order=False, strung=True)
        grid = TimeGrid(t, term, per_sample=False)
        given = self.stepper.settings
        settings = replace(given, method="tsit5", gradient="direct", options=_backward_options(given.options))
        counted = rows.numel() + adjoint.numel()  # the integrals do not feed back: no step is refused for them
        stepper = Stepper(term, grid, settings, counted=counted).begun(self.stepper.tally, grid.t.new_zeros(()))
        with torch.no_grad():
            ends = integrate(stepper, stepper.start(torch.stack(term.rows(state))))
        end = parts(term.state(ends))
        return end[0][-1], end[1][-1], [part[-1] for part in end[2:]]


def _check_return(stepper: Stepper, reached: Tensor, trajectory: Tensor, interval: int) -> None:
    """Whether the state, solved backwards, came near its start."""
    error, size = missed(stepper, reached, trajectory, interval)
    if not bool(error <= MOST_MISSED * size):
        raise failure(
            stepper,
            ReversalError,
            f"the adjoint solves the state backwards, and it ends {float(error / size):.2g} (relative) away from where "
            "it began, because what is damped on the way there grows on the way back; the gradient would be as far "
            f"off. Expected at most {MOST_MISSED:g}. Fix: gradient='checkpoint', which is exact, output times closer "
            "together, or a smaller rtol and atol",
            start_time(stepper, interval),
        )


def _or_zeros(gradient: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if gradient is None else gradient


def _backward_options(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of the forward solve's options, what holds for the backward one: its grid and its limits."""
    kept = {k: v for k, v in (options or {}).items() if k != "first_step"}
    return kept or None
