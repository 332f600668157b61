"""What can go wrong inside a solve, by name."""

from __future__ import annotations

from typing import Any

__all__ = [
    "SolverError",
    "NonFiniteError",
    "StepSizeUnderflowError",
    "MaxStepsError",
    "MaxNFEError",
    "ReversalError",
    "RecomputationError",
]

ONLY_FIXED_GRIDS = (
    "hbnode runs its loops outside of graphs, because their length depends on values. A solve on a fixed grid is a "
    "graph: steps=n with a native method, 'euler', 'midpoint', 'heun2', 'heun3' or 'rk4', with the direct "
    "gradient and without count_nfe. Fix: steps=n, and gradient=None or 'direct'."
)


class SolverError(RuntimeError):
    """A solve failed. Every failure of a solver is a subclass of this.

    Arguments:
        message: what happened and what to try.
        t: the time at which it happened (the solver's own units of time).
        step_size: the size of the step being tried, ``nan`` where the method has no step to report.
        nfe: evaluations of the field so far, in this solve, forward and backward together.
    """

    def __init__(self, message: str, *, t: float, step_size: float, nfe: int) -> None:
        super().__init__(f"{message} [t={t:.9g}, step size={step_size:.3g}, evaluations so far={nfe}]")
        self.message = message
        self.t = t
        self.step_size = step_size
        self.nfe = nfe

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.t, self.step_size, self.nfe)


def _rebuild(kind: type[SolverError], message: str, t: float, step_size: float, nfe: int) -> SolverError:
    return kind(message, t=t, step_size=step_size, nfe=nfe)


class NonFiniteError(SolverError):
    """The state, the field or the adjoint state became infinite or not a number."""


class StepSizeUnderflowError(SolverError):
    """The step size became so small that time no longer advances: too tight a tolerance, or a stiff field."""


class MaxStepsError(SolverError):
    """The solve needed more than ``max_steps`` steps."""


class MaxNFEError(MaxStepsError):
    """The solve needed more than ``max_nfe`` evaluations of the field."""


class ReversalError(SolverError):
    """A solve that is undone for its gradient does not come back to where it started."""


class RecomputationError(SolverError):
    """A step that the backward pass computed again does not end where it ended in the forward pass."""
