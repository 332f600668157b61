"""Solves that would not end: ``max_steps``, ``max_nfe``, and steps too small to advance the time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hbnode._torch_internals import backward_pass
from hbnode.errors import MaxNFEError, MaxStepsError
from hbnode.solvers.failures import failure_at, time_of
from hbnode.solvers.registry import STRONG
from hbnode.solvers.stepper import Stepper
from hbnode.solvers.time_grid import AnyStep

FIRST_LOOK = 100  # attempted steps; then at twice as many, and so on
TOO_MANY = 5  # times max_steps: by less the steps may still grow, up to where they are unstable
GROWTH = 1.2  # between two looks: steps that grow are waited for,
DECAY = 0.5  # and steps that shrink like this are on their way to an underflow, which has an error of its own


class Limits:
    """The limits of one pass over the steps of a solve."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.attempts = 0
        self.last_look: tuple[Tensor, Tensor] | None = None  # intervals and step sizes

    def check_nfe(self, step: AnyStep, count: int = 1) -> None:
        """Before ``count`` steps: raise if they would exceed ``max_nfe``."""
        stepper = self.stepper
        most = stepper.options.max_nfe
        if most == math.inf:
            return
        nfe = stepper.tally.nfe
        spent = nfe.forward if backward_pass() == -1 else nfe.backward
        if spent + count * stepper.method.evaluations > most:
            message = (
                f"the solve needs more than max_nfe={most} evaluations. "
                "Fix: loosen rtol and atol, shorten the time span, or raise max_nfe"
            )
            raise failure_at(stepper, MaxNFEError, message, step)

    def count_attempt(self, step: AnyStep) -> None:
        """Before each adaptive step: raise if the solve has run away."""
        self.check_nfe(step)
        self.attempts += 1
        self._check_progress(step)
        stepper = self.stepper
        outputs = 0 if stepper.interrupted else max(stepper.grid.t.shape[-1] - 2, 0)
        if self.attempts > stepper.max_steps + outputs:
            message = (
                f"the solve needed more than max_steps={stepper.max_steps} steps. Fix: {self._fewer_steps()}"
                "loosen rtol and atol, shorten the time span or divide t by a typical gap, or raise max_steps"
            )
            raise failure_at(stepper, MaxStepsError, message, step)

    def _check_progress(self, step: AnyStep) -> None:
        """Now and then: raise if the interval will not end within ``max_steps``."""
        stepper = self.stepper
        needed = self._steps_needed(step)
        if needed > TOO_MANY * stepper.max_steps:
            message = (
                f"after {self.attempts} steps, which do not grow, about {needed:.1g} are left, far more than "
                f"max_steps={stepper.max_steps}. Fix: {self._fewer_steps()}divide t by a typical gap or period, so "
                "that f acts over about one unit of time, or loosen rtol and atol, or raise max_steps"
            )
            raise failure_at(stepper, MaxStepsError, message, step)

    def _steps_needed(self, step: AnyStep) -> float:
        """For the rest of the interval, if the steps neither grow nor shrink; 0 between two looks."""
        looks, remainder = divmod(self.attempts, FIRST_LOOK)
        if remainder or looks == 0 or looks & (looks - 1):
            return 0.0
        interval, start, size = (torch.as_tensor(z) for z in (step.interval, step.start, step.size))
        before, self.last_look = self.last_look, (interval, size)
        if looks == 1 or before is None:
            return 0.0
        needed = torch.where(size > 0, (1.0 - start) / size, 0.0)
        is_stuck = (interval == before[0]) & (size < GROWTH * before[1]) & (size > DECAY * before[1])
        return float(torch.where(is_stuck, needed, 0.0).max())

    def _fewer_steps(self) -> str:
        """Advice where steps are short because of the damping."""
        stepper = self.stepper
        if stepper.strongest <= max(1.0, STRONG / sum(stepper.grid.lengths)):  # with less, the span is long
            return ""
        return (
            f"method='exponential', because the damping of {stepper.strongest:g} keeps the steps of {stepper.name!r} "
            "short, or "
        )

    def is_too_small(self, step: AnyStep, size: float) -> bool:
        """After a rejected step: whether a step of this size would not advance the time."""
        grid = self.stepper.grid
        now = grid.furthest if grid.has_batch else abs(time_of(self.stepper, step))
        floor = 4 * resolution(self.stepper) * now
        return size < max(floor, self.stepper.options.min_step, 1e-300)


def resolution(stepper: Stepper) -> float:
    """Relative rounding of the time: that of the grid, or that of the dtype in which f receives it."""
    return torch.finfo(stepper.term.template.dtype if stepper.sees_time else torch.float64).eps
