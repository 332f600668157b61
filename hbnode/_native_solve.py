"""The way from a field and a state through a native method to a trajectory, with the gradient that was asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hbnode import _torch_internals
from hbnode._closures import closed_over_leaves, own_parameters
from hbnode._recompute import ForwardContext, random_state, restore_random_state, solving
from hbnode._state import State, apply, from_to, is_finite, last_of, parts
from hbnode._structure import structure_of
from hbnode.errors import MaxStepsError, NonFiniteError
from hbnode.fields import HBNODE
from hbnode.gradients.adjoint import Adjoint
from hbnode.gradients.checkpoint import Checkpoint
from hbnode.gradients.forward_pass import ForwardPass, graph_of_first
from hbnode.gradients.reversible import Reversible
from hbnode.nets import SolveDropout
from hbnode.nfe import NFE, Tally
from hbnode.solvers.compiled_steps import CompilationWarning, CompiledSteps
from hbnode.solvers.failures import failure, start_time
from hbnode.solvers.loops import integrate, integrate_to_end
from hbnode.solvers.ode_term import ODETerm, is_heavy_ball
from hbnode.solvers.recorder import SHORT, BackwardPlan
from hbnode.solvers.registry import EXPONENTIAL, NYSTROM, RUNGE_KUTTA, check_field, constant_damping
from hbnode.solvers.settings import ResolvedSettings
from hbnode.solvers.stepper import Rows, Stepper, no_autocast
from hbnode.solvers.time_grid import Step, TimeGrid

_CHANGES_BUFFERS = (
    "func changes its buffers (BatchNorm or spectral_norm in training mode?), and gradient={!r} would evaluate it "
    "again in the backward pass. Fix: put that layer in eval mode, use GroupNorm, or gradient='direct'."
)
_HOOKS = (
    "a parameter or another leaf that func depends on has a hook of register_hook. With gradient={!r} it would run on "
    "each part of the gradient and once more on their sum. Fix: register_post_accumulate_grad_hook, or "
    "gradient='direct'."
)
_FUNCTIONS = {"checkpoint": Checkpoint, "reversible": Reversible, "adjoint": Adjoint}


def solve(stepper: Stepper, y0: State, nfe: NFE, *, end: bool = False) -> State:
    """Solve with one of our own methods, by a stepper of :func:`stepper_for`: a trajectory, or its ``end`` alone."""
    field, term = stepper.term.field, stepper.term
    stepper, damping = begin(stepper, nfe)
    _check_damping(stepper, field)
    with solving(field), no_autocast(term.template.device.type):
        by_end = stepper.settings.gradient in ("direct", "checkpoint") and not stepper.grid.t.requires_grad
        if by_end and stepper.grid.count == 1:
            state = term.state_of(_end(stepper, y0, damping))
            return state if end else from_to(y0, state)
        trajectory = term.state(_trajectory(stepper, y0, damping))
        return last_of(trajectory) if end else trajectory


def stepper_for(
    field: Callable, y0: State, t: Tensor, settings: ResolvedSettings, *, interrupted: bool = False
) -> Stepper:
    """All of a solve that does not depend on its numbers: what :func:`begin` makes a stepper of.

    Arguments:
        field: the field.
        y0: a state of the structure, shapes and dtype of those that will come.
        t: the output times, checked.
        settings: how to solve, checked.
        interrupted: whether the state is changed between the intervals.
    """
    method = settings.method
    check_field(method, field)
    term = ODETerm(field, y0, second_order=method not in RUNGE_KUTTA)
    per_sample = settings.per_sample and settings.steps is None
    _check_batch(term, t, per_sample, settings)
    return Stepper(term, TimeGrid(t, term, per_sample=per_sample), settings, interrupted=interrupted)


def begin(stepper: Stepper, nfe: NFE) -> tuple[Stepper, Tensor]:
    """The stepper of one solve, and γ with its graph."""
    term, settings = stepper.term, stepper.settings
    damping = term.damping.to(stepper.grid.t.device, torch.float64)
    is_direct = settings.gradient == "direct" or not torch.is_grad_enabled()
    stepper = stepper.begun(Tally(term.field, nfe), damping if is_direct else damping.detach())
    if settings.compile and not _torch_internals.is_active():
        stepper.compiled = CompiledSteps.of(term, settings.method, stepper.method)
    return stepper, damping


def _check_damping(stepper: Stepper, field: Callable) -> None:
    """Raise at once where the damping alone takes more steps than there may be."""
    nystrom = stepper.name in NYSTROM
    damping, reach = (stepper.strongest, 1.0) if nystrom else (constant_damping(field), 4.0)
    span = sum(stepper.grid.lengths)
    needed = damping * span / reach
    if not stepper.adaptive or stepper.name in EXPONENTIAL or needed < stepper.max_steps:
        return
    if is_heavy_ball(field, HBNODE):
        advice = "method='exponential', which solves the damping exactly"
    else:
        advice = (
            f"max_steps={math.ceil(damping * span / 3)}, a grid of method='leapfrog', which solves the damping exactly"
        )
    message = (
        f"the damping of {damping:g} over a time of {span:g} takes about {needed:.0f} steps, and "
        f"max_steps={stepper.max_steps}. Fix: {advice}, or a shorter time"
    )
    raise failure(stepper, MaxStepsError, message, start_time(stepper, 0), reach / damping)


def _end(stepper: Stepper, y0: State, damping: Tensor) -> tuple[Tensor, ...]:
    """The rows of the state at the end of a solve of one interval."""
    rows = stepper.term.rows(y0)
    if _keeps_its_graph(stepper):
        stepper = stepper.begun(stepper.tally, damping)
        stepper.tally.nfe.keeps_graph = torch.is_grad_enabled()
        end = _in_one_program(stepper, rows) if stepper.compiled is not None else None
        if end is not None:
            return end
    elif stepper.settings.gradient == "checkpoint" and torch.is_grad_enabled():
        return _with_function(stepper, torch.stack(rows), damping, end=True)
    end = integrate_to_end(stepper, stepper.start(rows))
    _check_finite(stepper, end, rows)
    return tuple(row.clone() for row in end)  # the user may change it in place


def _keeps_its_graph(stepper: Stepper) -> bool:
    """Whether a solve of one interval is on a grid so short that its graph is kept whole, and needs no more than that.

    The field must be known to depend on nothing but its parameters and its input; of any other, the first evaluation
    is looked at.
    """
    steps, structure = stepper.settings.steps, structure_of(stepper.term.field)
    if steps is None or 1 + steps * stepper.method.evaluations > SHORT:
        return False
    return structure.is_closed() and not structure.has_buffers()


def _in_one_program(stepper: Stepper, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """:func:`_end` by one compiled program; None where that may not be."""
    steps = stepper.settings.steps
    if steps is None or stepper.options.max_nfe < math.inf:
        return None
    end = stepper.solve_all(rows, [Step(0, i / steps, 1 / steps) for i in range(steps)])
    if end is not None:
        _check_finite(stepper, end, rows)
    return end


def _trajectory(stepper: Stepper, y0: State, damping: Tensor) -> Tensor:
    """The rows of the state at the output times, connected to what needs a gradient."""
    rows = torch.stack(stepper.term.rows(y0))
    if stepper.settings.gradient != "direct" and torch.is_grad_enabled():
        return _with_function(stepper, rows, damping)
    differentiable = stepper.grid.t.requires_grad and torch.is_grad_enabled()
    point = stepper.start(rows)
    stepper, outputs = _land_on_knots(stepper) if differentiable else (stepper, None)
    trajectory = integrate(stepper, point, differentiable=differentiable)
    _check_finite(stepper, trajectory, rows)
    return trajectory if outputs is None else outputs(trajectory)


def advance(stepper: Stepper, rows: Tensor, interval: int) -> Tensor | None:
    """The rows of the state at the end of one interval of an interrupted solve, with their direct gradient.

    None if gradients of times are wanted and steps would end on knots of a signal: see :func:`_land_on_knots`.
    """
    with solving(stepper.term.field), no_autocast(stepper.term.template.device.type):
        differentiable = stepper.grid.t.requires_grad and torch.is_grad_enabled()
        point = stepper.start(rows, interval)
        if differentiable and stepper.knots:
            return None
        end = integrate(stepper, point, differentiable=differentiable, interval=interval)[-1]
        _check_finite(stepper, end, rows, interval)
    return end


def _check_finite(stepper: Stepper, solution: State, rows: Rows, interval: int | None = None) -> None:
    """The solution of a fixed grid is checked at its end; if it is not finite, solve once more to see where."""
    if not stepper.adaptive and not is_finite(apply(_torch_internals.plain, solution)):
        with torch.no_grad():
            integrate(stepper, stepper.start(rows, interval or 0), watch=True, interval=interval)
        raise failure(stepper, NonFiniteError, "the solution is not finite", start_time(stepper, interval or 0))


def _with_function(stepper: Stepper, rows: Tensor, damping: Tensor, *, end: bool = False) -> Any:
    """The trajectory, or the rows of the state at its end, with a gradient that evaluates the field again."""
    gradient = stepper.settings.gradient
    if _torch_internals.is_active() or _torch_internals.in_forward_mode():
        raise ValueError(
            f"gradient={gradient!r} does not work under the transforms of torch.func (vmap, grad, jvp, ...), nor in "
            "forward mode. Fix: gradient='direct'."
        )
    forward = _first_evaluation(stepper, rows, damping)
    forward.end = end
    outputs = None
    if any(map(_torch_internals.has_hooks, forward.leaves)):
        raise ValueError(_HOOKS.format(gradient))
    if any(x.requires_grad for x in (rows, damping, stepper.grid.t, *forward.leaves)):
        by_t = stepper.grid.t.requires_grad
        if by_t and gradient != "adjoint":
            stepper, outputs = _land_on_knots(stepper)
            forward.stepper = stepper
        function = _FUNCTIONS[gradient]
        trajectory = function.apply(forward, stepper.grid.t, damping, rows, *forward.leaves)
    else:
        trajectory = forward.solve(rows)
    _check_finite(stepper, trajectory, rows)
    return trajectory if outputs is None else outputs(trajectory)


def _land_on_knots(stepper: Stepper) -> tuple[Stepper, Callable[[Tensor], Tensor] | None]:
    """Make the knots of signals output times, where gradients of times are wanted; also what selects the outputs.

    A step that ended on a knot as a fraction of its interval would move with the interval. At a kink of the signal the
    gradient would then take the slope of the wrong side.
    """
    grid = stepper.grid
    if not (stepper.knots and stepper.adaptive):
        return stepper, None
    t = grid.t if grid.t.dim() == 2 else grid.t.unsqueeze(0)
    first, last = t[:, :1], t[:, -1:]
    knots = t.new_tensor(stepper.knots).expand(len(t), -1)  # those outside become empty intervals at an end
    knots = torch.minimum(torch.maximum(knots, torch.minimum(first, last)), torch.maximum(first, last))
    times = torch.cat([t, knots], 1)
    order = (torch.where(last >= first, 1.0, -1.0) * times.detach()).argsort(dim=1, stable=True)
    places = order.argsort(dim=1)[:, : t.shape[1]]
    times = times.gather(1, order)
    if grid.t.dim() == 1:
        is_new = times[0].detach().diff(prepend=times[0, :1].detach() - 1) != 0
        times, places = times[0][is_new], (is_new.cumsum(0) - 1)[places[0]]
    stepper = stepper.on_grid(TimeGrid(times, stepper.term, per_sample=grid.per_sample))
    if grid.t.dim() == 1:
        return stepper, lambda trajectory: trajectory[places.to(trajectory.device)]
    batch = 2 + grid.row_dims - grid.template.dim()

    def own(trajectory: Tensor) -> Tensor:
        of_samples = torch.arange(len(places), device=places.device)
        return trajectory.movedim(batch, 1)[places.T, of_samples].movedim(1, batch)

    return stepper, own


def _first_evaluation(stepper: Stepper, rows: Tensor, damping: Tensor) -> ForwardPass:
    """Evaluate the field where a solve starts, and find all leaves whose gradients its backward pass must find.

    Those are the field's own parameters and whatever else it closes over, as seen in the graph of this evaluation. A
    method that carries no value has no other use for it.
    """
    term, grid, gradient = stepper.term, stepper.grid, stepper.settings.gradient
    context = ForwardContext(term.field)
    stepper.tally.add("evaluation")
    t = grid.time_of(0).detach().requires_grad_(grid.t.requires_grad)
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        x = leaf[0].clone()  # of a leaf, torch refuses what is in place in words of its own
    before = random_state(x.device)
    sigma = term.activation

    def evaluate() -> State:
        value = term.evaluate(t, x)
        return value if sigma is None else (value, sigma(rows[1].detach()))

    is_closed = context.structure.is_closed()
    found: list[Tensor] = []
    if is_closed:  # nothing need be searched in its graph
        with torch.enable_grad():
            value = stepper.listen(lambda: term.evaluate(t, x))
    else:
        found, state = stepper.listen(lambda: closed_over_leaves(evaluate, (t, x)))
        value = parts(state)[0]
    if context.changed():
        raise ValueError(_CHANGES_BUFFERS.format(gradient))
    after = random_state(x.device)
    has_drawn = not all(map(torch.equal, before, after))
    draws_again = has_drawn and not _draws_masks(stepper)
    own = own_parameters(term.inner) if gradient == "adjoint" else context.parameters
    leaves = list({id(p): p for p in (*own, *found) if p.requires_grad}.values())
    func = getattr(term.inner, "func", term.inner)
    is_closed |= (
        isinstance(func, nn.Module) and {id(p) for p in found} <= {id(p) for p in own} and not stepper.sees_time
    )
    plan = BackwardPlan(
        by_matrix=grid.t.requires_grad or damping.requires_grad,
        by_times=grid.t.requires_grad and term.wants_time,
        known=frozenset(map(id, (*own, *found))),
        checks_closures=not is_closed,
    )
    forward = ForwardPass(stepper, plan, context, leaves, random_start=before if has_drawn else None)
    if stepper.method.carries:
        with torch.enable_grad():
            graph = graph_of_first(leaf, t, value)
        forward.first = graph.output.detach()
        if gradient == "checkpoint":
            forward.first_graph = graph
    elif draws_again:  # by the first step, as it would have without this evaluation
        restore_random_state(before, x.device)
    return forward


def _draws_masks(stepper: Stepper) -> bool:
    """Whether the random numbers in f are masks of SolveDropout; others are not for every gradient."""
    if stepper.compiled is not None:
        stepper.compiled = None
        warnings.warn("compile=True has no effect: func draws random numbers.", CompilationWarning, stacklevel=2)
    inner = stepper.term.inner
    masks = isinstance(inner, nn.Module) and any(isinstance(module, SolveDropout) for module in inner.modules())
    if stepper.settings.gradient in ("adjoint", "reversible") and not masks:
        raise ValueError(
            f"func draws random numbers, which gradient={stepper.settings.gradient!r} cannot draw again. "
            "Fix: gradient='checkpoint', or hbnode.nets.SolveDropout for dropout."
        )
    return masks


def _check_batch(term: ODETerm, t: Tensor, per_sample: bool, settings: ResolvedSettings) -> None:
    """Refuse times and steps for each sample where the state has no samples."""
    if not per_sample and t.dim() == 1:
        return
    what = "per_sample=True" if t.dim() == 1 else "t of shape (batch, T)"
    shapes = {part.shape[:1] for part in parts(term.structure)}
    if term.strung or len(shapes) > 1 or term.template.dim() == 0:
        raise ValueError(f"{what} needs a state whose parts have one shape (batch, ...). Fix: make them of one shape.")
    if t.dim() == 2 and len(t) != term.template.shape[0]:
        raise ValueError(
            f"t has shape {tuple(t.shape)} for a batch of {term.template.shape[0]}; expected (batch, T). "
            "Fix: one row of times for each sample, or t of shape (T,)."
        )
    if settings.gradient == "adjoint":
        raise ValueError(f"gradient='adjoint' does not know {what}. Fix: gradient='checkpoint'.")
    if settings.jump_times is not None and not per_sample:
        raise ValueError(f"jump_times with {what} needs steps of each sample's own. Fix: per_sample=True.")
