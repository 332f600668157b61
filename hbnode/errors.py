"""The exceptions that a solver raises."""

from __future__ import annotations

from typing import Any

__all__ = [
    "SolverError",
    "NonFiniteError",
    "DivergenceError",
    "StepSizeUnderflowError",
    "MaxStepsError",
    "MaxNFEError",
    "ZenoError",
    "ReversalError",
    "RecomputationError",
]

DIVERGES = (
    "the solution diverges: the root mean square of the state is {:.3g} and grows by itself within a time of {:.1g}. "
    "Fix: end the solve earlier, or bound func (torch.tanh, or GHBNODE)"
)
ONLY_FIXED_GRIDS = (
    "this solve cannot be traced or exported: its number of steps depends on the data, or it needs Python in its loop. "
    "torch.export records adaptive steps of 'tsit5', 'exponential', 'nystrom4', 'nystrom6' and 'nystrom8'. A solve "
    "with fixed steps can also be traced: steps=n with a native method, 'euler', 'midpoint', 'heun2', 'heun3' or "
    "'rk4', with the direct gradient. Neither may have jump_times, events or count_nfe, and adaptive steps of an "
    "ODERNN need per_sample=True. Fix: method=None for torch.export at inference, otherwise steps=n, and gradient=None "
    "or 'direct'."
)


def diverges(state: float, slope: float, start: float, elapsed: float) -> bool:
    """Return whether a failed solve failed because the solution grows to infinity in finite time.

    ``state``, ``slope`` and ``start`` are the norms of the last state, of its time derivative and of the initial state.
    ``elapsed`` is the time since the start.
    """
    return state > 1e3 * start and state < 1e-4 * elapsed * slope


class SolverError(RuntimeError):
    """The base class of all exceptions that a failed solve raises.

    Arguments:
        message: what happened and how to fix it.
        t: the time of the failure, in the units of the solver's t.
        step_size: the size of the attempted step; ``nan`` if there is none to report.
        nfe: function evaluations of this solve so far, forward and backward together.
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
    """An error raised if the state, the field or the adjoint state became infinite or NaN."""


class DivergenceError(SolverError):
    """An error raised if the solution becomes infinite before the end of the solve, as 1 / (1 - t) does at t = 1."""


class StepSizeUnderflowError(SolverError):
    """An error raised if no step size meets the tolerance: the tolerance is too tight, or the field too stiff."""


class MaxStepsError(SolverError):
    """An error raised if a solve needs more than ``max_steps`` steps."""


class MaxNFEError(MaxStepsError):
    """An error raised if a solve needs more than ``max_nfe`` function evaluations."""


class ZenoError(SolverError):
    """An error raised if the times between successive events of a sample shrink to 0 (Zeno behaviour)."""


class ReversalError(SolverError):
    """An error raised if the backward solve for the gradient misses the states of the forward solve."""


class RecomputationError(SolverError):
    """An error raised if a step recomputed in the backward pass ends in another state than in the forward pass."""
