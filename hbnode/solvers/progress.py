"""Whether a solve that goes on as it does ends within ``max_steps``: it is given up early if not."""

from __future__ import annotations

import torch
from torch import Tensor

from hbnode.solvers.time_grid import Step

FIRST_LOOK = 100  # attempted steps; then at twice as many, and so on
TOO_MANY = 5  # times max_steps: by less the steps may still grow, up to where they are unstable
GROWTH = 1.2  # between two looks: steps that grow are waited for,
DECAY = 0.5  # and steps that shrink like this are on their way to an underflow, which has an error of its own


class Progress:
    """The steps of a solve over one interval, looked at now and then."""

    def __init__(self) -> None:
        self.before: tuple[Tensor, Tensor] | None = None  # intervals and step sizes at the last look

    def steps_needed(self, attempts: int, step: Step, max_steps: int) -> float | None:
        """For the rest of the interval, if hopelessly many; None if not, or if this is not the time to look.

        Arguments:
            attempts: steps attempted so far, accepted or not.
            step: the next one; its start and size are fractions of the interval.
            max_steps: the limit.
        """
        looks, remainder = divmod(attempts, FIRST_LOOK)
        if remainder or looks == 0 or looks & (looks - 1):
            return None
        interval, start, size = (torch.as_tensor(z) for z in (step.interval, step.start, step.size))
        before, self.before = self.before, (interval, size)
        if looks == 1 or before is None:
            return None
        needed = torch.where(size > 0, (1.0 - start) / size, 0.0)
        is_stuck = (interval == before[0]) & (size < GROWTH * before[1]) & (size > DECAY * before[1])
        most = float(torch.where(is_stuck, needed, 0.0).max())
        return most if most > TOO_MANY * max_steps else None
