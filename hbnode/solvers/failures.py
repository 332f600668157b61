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
    from hbnode.solvers.stepper import Solve

_FIELD_NOT_FINITE = (
    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound "
    "(GHBNODE's activation bounds it)"
)


def check_start(solve: Solve, of_rows: Sequence[float], interval: int = 0, sample: int | None = None) -> None:
    """Refuse to start from what is not finite, given numbers that tell of each row of the first point."""
    if all(map(math.isfinite, of_rows)):
        return
    now = solve.time(Step(interval, 0.0, 1.0), sample=sample)
    if not all(map(math.isfinite, of_rows[: solve.method.state_rows])):
        message = "the initial state is not finite. Fix: look at the block's input, or at the cell of an ODERNN"
        raise solve.failure(NonFiniteError, message, now)
    raise solve.failure(NonFiniteError, _FIELD_NOT_FINITE, now)


def underflow(solve: Solve, step: Step, size: float, sample: int | None = None) -> SolverError:
    """The error for a step that has become too small."""
    solve.step_size = size
    return solve.failure(
        StepSizeUnderflowError,
        "the step size underflowed: no step is small enough for the tolerance. "
        "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func",
        solve.time(step, sample=sample),
    )


def blame(solve: Solve, point: Tensor, step: Step, damping: Tensor, sample: int | None = None) -> SolverError:
    """The error for a step that is not finite: which evaluation was it?"""
    found: list[float] = []
    of_one = slice(None) if solve.samples() is None else (slice(None),) * solve.samples() + (sample,)
    fractions = iter(solve.method.nodes)

    def evaluate(t: Tensor, x: Tensor) -> Tensor:
        f = solve.dynamics.evaluate(t, x)
        fraction = next(fractions)
        if not found and bool(torch.isfinite(x[of_one]).all()) and not bool(torch.isfinite(f[of_one]).all()):
            found.append(solve.time(step, fraction, sample))
        return f

    with torch.no_grad():
        coefficients = solve.method.arranged(solve.matrix(step, damping.detach()), error=False)
        times, activation = solve.times(step).unbind(0), solve.dynamics.activation
        solve.tally.add("evaluation", solve.method.evaluations)
        solve.method.step(point.detach(), coefficients, times, evaluate, error=False, activation=activation)
    now = solve.at(step, sample)
    if found:
        return solve.failure(
            NonFiniteError,
            _FIELD_NOT_FINITE,
            found[0],
        )
    return solve.failure(
        NonFiniteError,
        "the state or its error is not finite. Look for: a field that grows without bound",
        now,
    )
