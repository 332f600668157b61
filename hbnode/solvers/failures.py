"""What went wrong in a native solve: which evaluation, at which time, with which step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode.errors import NonFiniteError, SolverError, StepSizeUnderflowError
from hbnode.signal import refuse_queries_outside
from hbnode.solvers.stepper import Stepper
from hbnode.solvers.time_grid import AnyStep, Step

NON_FINITE_ATTEMPTS = 5  # steps ten times smaller each, before a NonFiniteError

_FIELD_NOT_FINITE = (
    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound "
    "(GHBNODE's activation bounds it)"
)


def failure(
    stepper: Stepper, kind: type[SolverError], message: str, t: float, step_size: float = math.nan
) -> SolverError:
    """An error with the time, the step size and the evaluations; a query outside of a signal is raised instead."""
    refuse_queries_outside()
    return kind(f"{message} (method {stepper.name!r})", t=t, step_size=step_size, nfe=stepper.tally.nfe.total)


def failure_at(
    stepper: Stepper, kind: type[SolverError], message: str, step: AnyStep, sample: int | None = None
) -> SolverError:
    """:func:`failure` in a step."""
    now, end = time_of(stepper, step, sample=sample), time_of(stepper, step, 1.0, sample)
    return failure(stepper, kind, message, now, abs(end - now))


def time_of(stepper: Stepper, step: AnyStep, fraction: float = 0.0, sample: int | None = None) -> float:
    """The time at which a step starts, or a fraction of it later; of the first sample that moves, unless given."""
    if sample is None:
        sample = int((step.size > 0).nonzero()[0]) if isinstance(step.size, Tensor) else 0
    t = _torch_internals.plain(stepper.grid.t)
    t = t if t.dim() == 1 else t[sample]
    place = (step.interval, step.start, step.size)
    interval, start, size = (float(x[sample]) if isinstance(x, Tensor) else x for x in place)
    begin, end = t[int(interval)], t[int(interval) + 1]
    return float(begin + (start + fraction * size) * (end - begin))


def start_time(stepper: Stepper, interval: int, sample: int | None = None) -> float:
    """The time at which an interval starts."""
    return time_of(stepper, Step(interval, 0.0, 1.0), sample=sample)


def check_start(stepper: Stepper, of_rows: Sequence[float], interval: int = 0, sample: int | None = None) -> None:
    """Raise if the first point is not finite, given the norm of each of its rows."""
    if all(map(math.isfinite, of_rows)):
        return
    now = start_time(stepper, interval, sample)
    if not all(map(math.isfinite, of_rows[: stepper.method.state_rows])):
        message = "the initial state is not finite. Fix: look at the block's input, or at the cell of an ODERNN"
        raise failure(stepper, NonFiniteError, message, now)
    raise failure(stepper, NonFiniteError, _FIELD_NOT_FINITE, now)


def underflow(stepper: Stepper, step: AnyStep, size: float, sample: int | None = None) -> SolverError:
    """The error for a step that has become too small."""
    message = (
        "the step size underflowed: no step is small enough for the tolerance. "
        "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func"
    )
    return failure(stepper, StepSizeUnderflowError, message, time_of(stepper, step, sample=sample), size)


def non_finite(stepper: Stepper, point: Tensor, step: AnyStep, sample: int | None = None) -> SolverError:
    """The error for a step that is not finite. It takes the step once more to find the first such evaluation."""
    found: list[float] = []
    batch_dim = stepper.samples()
    of_one = slice(None) if batch_dim is None else (slice(None),) * batch_dim + (sample,)
    fractions = iter(stepper.method.nodes)

    def evaluate(t: Tensor, x: Tensor) -> Tensor:
        f = stepper.term.evaluate(t, x)
        fraction = next(fractions)
        if not found and bool(torch.isfinite(x[of_one]).all()) and not bool(torch.isfinite(f[of_one]).all()):
            found.append(time_of(stepper, step, fraction, sample))
        return f

    with torch.no_grad():
        packed = stepper.method.pack(stepper.coefficients.matrix(step).detach(), error=False)
        times, activation = stepper.coefficients.times(step).unbind(0), stepper.term.activation
        stepper.tally.add("evaluation", stepper.method.evaluations)
        stepper.method.step(point.detach(), packed, times, evaluate, error=False, activation=activation)
    if found:
        size = abs(time_of(stepper, step, 1.0, sample) - time_of(stepper, step, sample=sample))
        return failure(stepper, NonFiniteError, _FIELD_NOT_FINITE, found[0], size)
    message = "the state or its error is not finite. Look for: a field that grows without bound"
    return failure_at(stepper, NonFiniteError, message, step, sample)
