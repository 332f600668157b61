"""The way from a field and a state through a native method to a trajectory, with the gradient that was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hbnode import _functorch
from hbnode._replay import Replay, random_state, refuse_changing_statistics, solving
from hbnode._state import State, parts
from hbnode.errors import NonFiniteError
from hbnode.gradients import closed_over_leaves, own_parameters
from hbnode.nets import SolveDropout
from hbnode.nfe import NFE, Tally
from hbnode.solvers.adjoint import Adjoint
from hbnode.solvers.clock import Clock, Step
from hbnode.solvers.compiled import CompiledSteps
from hbnode.solvers.dynamics import Dynamics
from hbnode.solvers.loops import integrate
from hbnode.solvers.native import RUNGE_KUTTA, check_field
from hbnode.solvers.replay import Checkpoint, Reversible
from hbnode.solvers.stepping import Graph, Solve, no_autocast

if TYPE_CHECKING:
    from hbnode.solve import Settings

_FUNCTIONS = {"checkpoint": Checkpoint, "reversible": Reversible, "adjoint": Adjoint}


def solve(field: Callable, y0: State, t: Tensor, settings: Settings, nfe: NFE) -> State:
    """Solve with one of our own methods; the arguments are those of :func:`hbnode.odeint`, already checked."""
    check_field(settings.method, field)
    options = settings.options or {}
    dynamics = Dynamics(field, y0, second_order=settings.method not in RUNGE_KUTTA)
    per_sample = settings.step_control == "sample" and "steps" not in options
    _check_batch(dynamics, t, per_sample, settings)
    clock = Clock(t, dynamics, per_sample=per_sample, dense=bool(options.get("dense")))
    run = Solve(dynamics, clock, settings, Tally(field, nfe))
    if settings.compile and not _functorch.is_active():
        run.compiled = CompiledSteps.of(dynamics, settings.method, run.method)
    with solving(field), no_autocast(dynamics.template.device.type):
        return dynamics.state(_trajectory(run, y0, settings))


def _trajectory(run: Solve, y0: State, settings: Settings) -> Tensor:
    """The rows of the state at the output times, connected to what needs a gradient."""
    dynamics, clock = run.dynamics, run.clock
    rows = torch.stack(dynamics.rows(y0))
    damping = dynamics.damping.to(clock.t.device, torch.float64)
    if settings.gradient == "direct" or not torch.is_grad_enabled():
        point = run.start(rows)
        differentiable = clock.t.requires_grad and torch.is_grad_enabled()
        trajectory = integrate(run, point, damping, differentiable=differentiable)
    else:
        trajectory = _with_function(run, rows, damping, settings.gradient)
    if not run.adaptive and not bool(torch.isfinite(_functorch.plain(trajectory)).all()):
        with torch.no_grad():  # once more, to see where
            integrate(run, run.start(rows), damping, watch=True)
        raise run.failure(NonFiniteError, "the solution is not finite", clock.times[0] if clock.times else math.nan)
    return trajectory


def _with_function(run: Solve, rows: Tensor, damping: Tensor, gradient: str) -> Tensor:
    """The trajectory with a gradient that evaluates the field again."""
    if _functorch.is_active():
        raise ValueError(
            f"gradient={gradient!r} does not work under the transforms of torch.func (vmap, grad, jvp, ...). "
            "Fix: gradient='direct'."
        )
    field = run.dynamics.field
    refuse_changing_statistics(field, gradient)
    first, leaves = _first_evaluation(run, rows, damping)
    if any(x.requires_grad for x in (rows, damping, run.clock.t, *leaves)):
        by_t = run.clock.t.requires_grad
        run.wanted = (by_t or damping.requires_grad, by_t and run.dynamics.wants_time)
        if damping.requires_grad and not by_t and gradient != "adjoint":
            run.damping, run.by_damping = damping.detach().requires_grad_(), {}
        replay = Replay(field, rows.device.type)
        return _FUNCTIONS[gradient].apply(run, replay, first, run.clock.t, damping, rows, *leaves)
    return integrate(run, rows if first is None else torch.cat([rows, first[None]]), damping)


def _first_evaluation(run: Solve, rows: Tensor, damping: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """The value of the field that a solve starts with, and all leaves whose gradients its backward pass must find.

    Those are the field's own parameters and whatever else it closes over, as seen in the graph of its first evaluation.
    A method that carries no value gets it in :attr:`Dynamics.prepared` for the first of its kicks.
    """
    dynamics, clock, method = run.dynamics, run.clock, run.method
    if not method.carries and clock.count == 0:
        return None, []
    rows = rows.detach()
    if method.carries:
        t, x = clock.first_time().detach().requires_grad_(clock.t.requires_grad), rows[0]
    else:
        step = Step(0, 0.0, 1.0 / run.options.steps)
        with torch.no_grad():
            drifts, _, _ = method.arranged(run.matrix(step, damping))
            t, x = run.times(step)[0], method.drift(rows[0], rows[1], drifts[0], dynamics.activation)
    x = x.detach().requires_grad_()
    run.random_start = random_state(x.device)
    found, value = closed_over_leaves(lambda: dynamics.evaluate(t, x), (t, x))
    if not all(map(torch.equal, run.random_start, random_state(x.device))):
        _check_random(run)
    own = own_parameters(dynamics.inner)
    leaves = list({id(p): p for p in (*own, *found) if p.requires_grad}.values())
    run.known = frozenset(map(id, leaves))
    func = getattr(dynamics.inner, "func", dynamics.inner)
    run.closed = isinstance(func, nn.Module) and {id(p) for p in found} <= {id(p) for p in own}
    if not method.carries:
        dynamics.prepared = value.detach()
        return None, leaves
    run.tally.add("evaluation")
    run.first = Graph([x, t] if t.requires_grad else [x], [], value)
    return value.detach(), leaves


def _check_random(run: Solve) -> None:
    """What follows from random numbers in f, other than the masks of SolveDropout."""
    run.compiled, run.random = None, None
    inner = run.dynamics.inner
    masks = isinstance(inner, nn.Module) and any(isinstance(module, SolveDropout) for module in inner.modules())
    if run.settings.gradient in ("adjoint", "reversible") and not masks:
        raise ValueError(
            f"func draws random numbers, which gradient={run.settings.gradient!r} cannot draw again. "
            "Fix: gradient='checkpoint', or hbnode.nets.SolveDropout for dropout."
        )


def _check_batch(dynamics: Dynamics, t: Tensor, per_sample: bool, settings: Settings) -> None:
    """Refuse times and steps for each sample where the state has no samples."""
    if not per_sample and t.dim() == 1:
        return
    what = "step_control='sample'" if t.dim() == 1 else "t of shape (batch, T)"
    shapes = {part.shape[:1] for part in parts(dynamics.structure)}
    if dynamics.strung or len(shapes) > 1 or dynamics.template.dim() == 0:
        raise ValueError(f"{what} needs a state whose parts have one shape (batch, ...). Fix: make them of one shape.")
    if t.dim() == 2 and len(t) != dynamics.template.shape[0]:
        raise ValueError(
            f"t has shape {tuple(t.shape)} for a batch of {dynamics.template.shape[0]}; expected (batch, T). "
            "Fix: one row of times for each sample, or t of shape (T,)."
        )
    if settings.gradient == "adjoint":
        raise ValueError(f"gradient='adjoint' does not know {what}. Fix: gradient='checkpoint'.")
    if (settings.options or {}).get("dense"):
        raise ValueError(f"dense output does not know {what}. Fix: leave 'dense' out.")
