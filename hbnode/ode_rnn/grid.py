"""A grid that follows the lengths of the gaps: equal steps in each, as many as that sample's gap needs."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from hbnode._state import State
from hbnode.errors import MaxStepsError
from hbnode.fields import Field
from hbnode.nfe import NFE
from hbnode.ode_rnn.gaps import Gaps
from hbnode.solvers.settings import Settings

_ROUNDING = 1e-9  # relative; a gap of three steps, but for its rounding, takes three


def steps_needed(t: Tensor, step_size: float) -> Tensor:
    """How many equal steps no longer than a size each gap between times (batch, T) takes, (batch, T - 1)."""
    return (t.detach().diff() / step_size * (1 - _ROUNDING)).ceil().clamp(min=1)


class Grid:
    """Solves a field from each of a row of times to the next, for each sample in equal steps no longer than a size.

    A gap of length L takes ``ceil(L / step_size)`` steps. Samples whose gap needs fewer steps than others' rest in the
    last ones: one loop serves all.

    Arguments:
        field: what is solved.
        y0: a checked state, as for :class:`Gaps`.
        t: times (batch, T).
        settings: how to solve; a native method.
        step_size: the longest step, in the unit of ``t``.
    """

    def __init__(self, field: Field, y0: State, t: Tensor, settings: Settings, step_size: float) -> None:
        t = t.to(torch.float64).cpu()
        needed = steps_needed(t, step_size)
        most = [int(count) for count in needed.amax(0).tolist() if math.isfinite(count)]
        if max(most, default=0) > settings.max_steps:
            raise MaxStepsError(
                f"step_size={step_size:g} makes {max(most)} steps of a gap, more than max_steps={settings.max_steps}. "
                "Fix: a longer step_size, or divide t by a typical gap",
                t=float(t[0, 0]),
                step_size=step_size,
                nfe=0,
            )
        self.ends = torch.tensor([0, *most]).cumsum(0).tolist()
        interval = torch.arange(len(most)).repeat_interleave(torch.tensor(most, dtype=torch.long))
        place = torch.arange(1, len(interval) + 1) - torch.tensor(self.ends)[:-1][interval]
        fraction = (place / needed[:, interval]).clamp(max=1.0)
        first, last = t[:, interval], t[:, interval + 1]
        times = torch.where(fraction < 1, torch.lerp(first, last, fraction), last)
        settings = dataclasses.replace(settings, steps=1, per_sample=True)  # samples that rest stay in it
        self.steps = Gaps(field, y0, torch.cat([t[:, :1], times], 1), settings)

    @property
    def nfe_per_gap(self) -> list[list[NFE]]:
        """The counts of each gap, one for each of its steps."""
        pairs = zip(self.ends[:-1], self.ends[1:], strict=True)
        return [self.steps.nfe[first:last] for first, last in pairs]

    def advance(self, interval: int, rows: Tensor) -> Tensor:
        """The state at the end of an interval from that at its beginning."""
        for step in range(self.ends[interval], self.ends[interval + 1]):
            rows = self.steps.advance(step, rows)
        return rows
