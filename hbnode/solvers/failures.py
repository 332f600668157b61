"""What went wrong in a native solve: which evaluation, at which time, with which step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hbnode.errors import NonFiniteError, SolverError, StepSizeUnderflowError
from hbnode.solvers.time_grid import Step

if TYPE_CHECKING:
    from hbnode.solvers.stepper import Stepper

_FIELD_NOT_FINITE = (
    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound "
    "(GHBNODE's activation bounds it)"
)


def check_start(stepper: Stepper, of_rows: Sequence[float], interval: int = 0, sample: int | None = None) -> None:
    """Refuse to start from what is not finite, given numbers that tell of each row of the first point."""
    if all(map(math.isfinite, of_rows)):
        return
    now = stepper.time(Step(interval, 0.0, 1.0), sample=sample)
    if not all(map(math.isfinite, of_rows[: stepper.method.state_rows])):
        message = "the initial state is not finite. Fix: look at the block's input, or at the cell of an ODERNN"
        raise stepper.failure(NonFiniteError, message, now)
    raise stepper.failure(NonFiniteError, _FIELD_NOT_FINITE, now)


def underflow(stepper: Stepper, step: Step, size: float, sample: int | None = None) -> SolverError:
    """The error for a step that has become too small."""
    stepper.step_size = size
    return stepper.failure(
        StepSizeUnderflowError,
        "the step size underflowed: no step is small enough for the tolerance. "
        "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func",
        stepper.time(step, sample=sample),
    )


def blame(stepper: Stepper, point: Tensor, step: Step, damping: Tensor, sample: int | None = None) -> SolverError:
    """The error for a step that is not finite: which evaluation was it?"""
    found: list[float] = []
    of_one = slice(None) if stepper.samples() is None else (slice(None),) * stepper.samples() + (sample,)
    fractions = iter(stepper.method.nodes)

    def evaluate(t: Tensor, x: Tensor) -> Tensor:
        f = stepper.term.evaluate(t, x)
        fraction = next(fractions)
        if not found and bool(torch.isfinite(x[of_one]).all()) and not bool(torch.isfinite(f[of_one]).all()):
            found.append(stepper.time(step, fraction, sample))
        return f

    with torch.no_grad():
        coefficients = stepper.method.pack(stepper.matrix(step, damping.detach()), error=False)
        times, activation = stepper.times(step).unbind(0), stepper.term.activation
        stepper.tally.add("evaluation", stepper.method.evaluations)
        stepper.method.step(point.detach(), coefficients, times, evaluate, error=False, activation=activation)
    now = stepper.at(step, sample)
    if found:
        return stepper.failure(
            NonFiniteError,
            _FIELD_NOT_FINITE,
            found[0],
        )
    return stepper.failure(
        NonFiniteError,
        "the state or its error is not finite. Look for: a field that grows without bound",
        now,
    )
