"""The steps of a solve: each interval between output times is divided into equal ones, none longer than ``dt``."""

from __future__ import annotations

import math
import numbers
from functools import cached_property

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode._arguments import checked_times
from hbnode._state import Times

ROUNDING = 1e-2  # of dt, by which a step may be longer for times that are rounded
MOST_STEPS = 10_000_000


class StepGrid:
    """Steps that end on every output time.

    Times of float32 are rounded: an interval that is longer than some steps by that alone has no step more.

    Arguments:
        t: output times, (T,), increasing, in float64 on the host.
        dt: the longest step.

    Attributes:
        t: the output times.
        sizes: the size of the steps of each interval.
        intervals: the interval of each step.
        starts: where each step starts, in units of time.
    """

    def __init__(self, t: Tensor, dt: float) -> None:
        self.t: list[float] = _torch_internals.numbers(t)
        self.sizes: list[float] = []
        self.intervals: list[int] = []
        self.starts: list[float] = []
        check_number(self.t[-1] - self.t[0], dt)
        precision = torch.finfo(torch.float32 if bool((t == t.float()).all()) else t.dtype).eps  # of what the user had
        for i, (start, end) in enumerate(zip(self.t[:-1], self.t[1:], strict=True)):
            rounded = min(precision * max(abs(start), abs(end)), ROUNDING * dt)
            count = max(1, math.ceil((end - start - rounded) / dt * (1 - 1e-9)))
            size = (end - start) / count
            self.sizes.append(size)
            self.intervals += [i] * count
            self.starts += [start + k * size for k in range(count)]

    def __len__(self) -> int:
        return len(self.intervals)

    @cached_property
    def outputs(self) -> list[int | None]:
        """The output that each step ends on, if any."""
        following = [*self.intervals[1:], len(self.sizes)][: len(self)]
        return [i + 1 if i != after else None for i, after in zip(self.intervals, following, strict=True)]

    def step_sizes(self) -> Tensor:
        """The size of each step, (steps,), in float64."""
        return torch.tensor(self.sizes, dtype=torch.float64)[self.intervals]

    def times(self, nodes: tuple[float, ...], like: Tensor) -> list[tuple[Tensor, ...]]:
        """The times at fractions of each step, as scalars of the dtype and on the device of ``like``."""
        starts = torch.tensor(self.starts, dtype=torch.float64).unsqueeze(-1)
        fractions = torch.tensor(nodes, dtype=torch.float64)
        times = starts + fractions * self.step_sizes().unsqueeze(-1)
        return [row.unbind(0) for row in times.to(like.device, like.dtype).unbind(0)]


def check_number(span: float, dt: float) -> None:
    """Refuse more steps than anybody waits for."""
    if span / dt > MOST_STEPS:
        raise ValueError(
            f"dt={dt:g} makes {span / dt:.2g} steps of a span of {span:g}; expected at most {MOST_STEPS:,}. "
            f"Fix: dt={2 * span / MOST_STEPS:.1g} or longer, or several solves, each from the end of the one before."
        )


def checked_step(dt: object) -> float:
    """A positive step size."""
    if isinstance(dt, Tensor) and dt.numel() == 1:
        dt = dt.item()
    if not isinstance(dt, numbers.Real) or not 0 < float(dt) < math.inf:
        raise ValueError(f"dt must be a positive number, got {dt!r}. Fix: dt=0.05, for instance.")
    return float(dt)


def checked_output_times(t: Times, device: torch.device) -> Tensor:
    """Finite, increasing times without a gradient, (T,), in float64 on the host."""
    t = checked_times(t, device, rows=True)
    if t.dim() == 2:
        raise ValueError(
            f"t must be one-dimensional, the times of the whole batch, got shape {tuple(t.shape)}. "
            "Fix: solve at all times of all samples, torch.unique(t), and select each sample's own."
        )
    if t.requires_grad:
        raise ValueError("t requires a gradient, which sdeint does not compute. Fix: t.detach().")
    if len(t) > 1 and bool(t[1] < t[0]):
        raise ValueError(
            "t must increase, because an SDE has no solution backwards in time, but "
            f"t[0]={float(t[0]):g} is followed by t[1]={float(t[1]):g}. Fix: sort the times; y0 is at the first."
        )
    return t.to(torch.float64)
