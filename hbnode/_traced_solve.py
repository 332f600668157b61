"""A fixed grid as tensor operations and nothing else, for torch.compile, torch.export and torch.jit.trace.

No value is looked at, so a solve is one graph, for a batch of any size. Its gradient is that of its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hbnode._recompute import solving
from hbnode._state import State, Times
from hbnode._tracing import is_exporting
from hbnode.nfe import NFE, is_counting
from hbnode.solvers import registry
from hbnode.solvers.ode_term import ODETerm
from hbnode.solvers.settings import Settings
from hbnode.solvers.step_method import Evaluate, StepMethod
from hbnode.solvers.stepper import no_autocast
from hbnode.solvers.time_grid import align, spread

# torchdiffeq's explicit methods: rows of A after the first, and weights
EXPLICIT = {
    "euler": ((), (1.0,)),
    "midpoint": (((0.5,),), (0.0, 1.0)),
    "heun2": (((1.0,),), (0.5, 0.5)),
    "heun3": (((1 / 3,), (0.0, 2 / 3)), (0.25, 0.0, 0.75)),
    "rk4": (((1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), (0.125, 0.375, 0.375, 0.125)),
}
METHODS = (*registry.METHODS, *EXPLICIT)


def is_possible(settings: Settings) -> bool:
    """Whether a solve can be one graph that does what was asked for.

    Other gradients than the direct one are for the memory that they save; an exported graph has none of them.
    """
    if settings.steps is None or settings.method not in (None, *METHODS):
        return False
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        return True
    if not hasattr(torch.compiler, "is_exporting"):  # torch.compile before torch 2.7 rounds what it traces here
        return False
    return settings.gradient in (None, "direct") and not is_counting()


def solve(field: Callable, y0: State, t: Times, settings: Settings, nfe: NFE) -> State:
    """The state at the times, by one of METHODS in ``steps`` equal steps; t is not checked if it is a tensor."""
    name = settings.method or registry.best_method(field, settings, 0.0)
    steps = settings.steps
    assert steps is not None
    registry.check_field(name, field)
    term = ODETerm(field, y0, second_order=name in registry.SECOND_ORDER)
    t = _times(t, term)
    nfe.keeps_graph = torch.is_grad_enabled()
    with solving(field), no_autocast(term.template.device.type):
        rows = torch.stack(term.rows(y0))
        if name in EXPLICIT:
            trajectory, evaluations = _explicit(term, *EXPLICIT[name], rows, t, steps), len(EXPLICIT[name][1])
        else:
            method = registry.METHODS[name]
            trajectory, evaluations = _native(term, method, rows, t, steps), method.evaluations
            nfe.forward += int(method.carries)
    nfe.forward += (len(trajectory) - 1) * steps * evaluations
    nfe.steps += (len(trajectory) - 1) * steps
    return term.state(torch.stack(trajectory))


def _native(term: ODETerm, method: StepMethod, rows: Tensor, t: Tensor, steps: int) -> list[Tensor]:
    """The rows of the state at the times, by one of our own methods."""
    template, n = term.template, method.state_rows
    evaluate = _evaluation(term)
    sizes, times = _sizes(term, t, steps), _stages(term, t, steps, method.nodes)
    damping = term.damping.to(sizes)
    matrices = method.matrix(damping, align(sizes, damping)).to(template).unbind(0)
    point, trajectory = rows, [rows]
    if method.carries:
        start = spread(t[..., 0].to(template), template.dim(), template.dim()) if t.dim() == 2 else t[0].to(template)
        point = torch.cat([rows, evaluate(start, rows[0]).unsqueeze(0)])
    for matrix, of_interval in zip(matrices, times.unbind(0), strict=True):
        coefficients = method.pack(matrix, error=False)
        for of_step in of_interval.unbind(0):
            point = method.step(
                point, coefficients, of_step.unbind(0), evaluate, error=False, activation=term.activation
            ).point
        trajectory.append(point[:n])
    return trajectory


def _explicit(
    term: ODETerm,
    a: Sequence[Sequence[float]],
    b: Sequence[float],
    rows: Tensor,
    t: Tensor,
    steps: int,
) -> list[Tensor]:
    """The row of the state at the times, by one of torchdiffeq's Runge-Kutta methods."""
    (y,) = rows.unbind(0)
    evaluate = _evaluation(term)
    sizes = _sizes(term, t, steps).to(y).unbind(0)
    times = _stages(term, t, steps, [sum(row) for row in ((), *a)])
    trajectory = [rows]
    for size, of_interval in zip(sizes, times.unbind(0), strict=True):
        for of_step in of_interval.unbind(0):
            slopes: list[Tensor] = []
            for time, row in zip(of_step.unbind(0), ((), *a), strict=True):
                slopes.append(evaluate(time, _moved(y, size, row, slopes)))
            y = _moved(y, size, b, slopes)
        trajectory.append(y.unsqueeze(0))
    return trajectory


def _evaluation(term: ODETerm) -> Evaluate:
    """The field on a copy of its input, which a func that begins with an in-place layer would change."""
    return lambda t, x: term.value(t, x.clone())


def _moved(y: Tensor, size: Tensor, weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    """Y + H Σ_j w_j k_j."""
    terms = [w * k for w, k in zip(weights, slopes, strict=True) if w]
    return y + size * sum(terms) if terms else y


def _times(t: Times, term: ODETerm) -> Tensor:
    """The times (T,) or (batch, T) in float64 on the device of the state."""
    device = term.template.device
    if isinstance(t, Tensor):
        return t.to(device, torch.float64)
    given = list(t)
    if any(isinstance(time, Tensor) for time in given):
        return torch.stack([torch.as_tensor(time, dtype=torch.float64, device=device).reshape(()) for time in given])
    times = [float(time) for time in given]
    rising, falling = ([sign * times[i] < sign * times[i + 1] for i in range(len(times) - 1)] for sign in (1, -1))
    if not (all(rising) or all(falling)):
        raise ValueError(f"t must be strictly increasing or strictly decreasing, got {times}. Fix: sort the times.")
    return torch.tensor(times, dtype=torch.float64, device=device)


def _sizes(term: ODETerm, t: Tensor, steps: int) -> Tensor:
    """The size of the steps in each interval, (intervals, ...), to broadcast with a row of the state."""
    sizes = t.diff().movedim(-1, 0) / steps
    dims = term.template.dim()
    return spread(sizes, dims, dims + term.stacked) if t.dim() == 2 else sizes


def _stages(term: ODETerm, t: Tensor, steps: int, nodes: Sequence[float]) -> Tensor:
    """Times of all stages, (intervals, steps, stages, ...), to broadcast with a part of the state."""
    template = term.template
    fractions = torch.tensor(
        [[min((i + node) / steps, 1.0) for node in nodes] for i in range(steps)], dtype=t.dtype, device=t.device
    ).view(steps, len(nodes), *[1] * (t.dim() - 1))
    begin, end = (x.movedim(-1, 0)[:, None, None] for x in (t[..., :-1], t[..., 1:]))
    times = (begin * (1.0 - fractions) + end * fractions).to(template)
    return spread(times, template.dim(), template.dim()) if t.dim() == 2 else times
