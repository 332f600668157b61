"""Forces that depend on time, and what an error estimate does not see of them.

An error estimate knows f at the nodes of its step only, and the first guess of a step size at one time. From rest, a
force that is zero at these times would be stepped over at any tolerance. Three things prevent it:

- Where the first guess rests on nothing, f is evaluated at four times of the span, at the state in which the solve
  starts. Their fractions of the span are multiples of the golden ratio: no harmonic of the span is zero at all four.
- Where a solve starts at rest, or these evaluations find a force, it starts with steps that the force moves by no
  more than the tolerance, and no later step has more than a sixth of the span between two of its nodes.
  Their error must be smaller than the tolerance by the factor ``inside`` of the method, as that of steps with outputs
  inside: the estimate of ``tsit5`` is too small where a step holds more than a period of the force.
- The first of several steps is not a rational fraction of an interval, so that its nodes share no harmonic with it.

The knots of a :class:`~hbnode.Signal` are known. Steps end on them, and pass so few that a node lies between any two.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode.solvers.failures import check_start
from hbnode.solvers.step_size_control import first_size, steps_to, widest_gap
from hbnode.solvers.stepper import Stepper

GOLDEN = (5**0.5 - 1) / 2
PROBES = tuple(sorted(k * GOLDEN % 1 for k in range(1, 5)))  # fractions of the span
UNEVEN = 0.9 + 0.1 * GOLDEN  # the first of several equal steps is shorter by this factor
NEGLIGIBLE, VISIBLE = 10.0, 0.01  # displacements over the span, in units of the tolerance
LONGEST_GAP = 1 / 6  # between two nodes of a step, as a fraction of the span


class FirstStep(NamedTuple):
    """The size of the first step; no step is longer than ``longest``, and errors must be smaller by ``strictness``."""

    size: float
    longest: float
    strictness: float


def first_step(stepper: Stepper, point: Tensor, interval: int = 0) -> FirstStep:
    """The first step of a solve with one step size for the batch, from the beginning of an interval."""
    norm = stepper.norms(point.detach()).double().cpu()
    of_rows = _torch_internals.numbers(norm)
    check_start(stepper, of_rows, interval)
    size = first_size(of_rows[0], of_rows[-1], stepper.rtol, stepper.atol, stepper.method)
    longest, strictness = stepper.max_step, 1.0
    if stepper.sees_time:
        span = stepper.grid.lengths[interval] if stepper.interrupted else sum(stepper.grid.lengths)
        sizes = limited(stepper, point, interval, norm, norm.new_tensor(span), norm.new_tensor(size))
        size, longest_by_force = _torch_internals.numbers(torch.stack(sizes))
        longest = min(longest, longest_by_force)
        strictness = stepper.method.inside if math.isfinite(longest_by_force) else 1.0
    return FirstStep(min(stepper.options.first_step or size, longest), longest, strictness)


def limited(
    stepper: Stepper, point: Tensor, interval: int, norm: Tensor, span: Tensor, size: Tensor
) -> tuple[Tensor, Tensor]:
    """The size of the first step, and one that no step may exceed, where f takes the time.

    Arguments:
        stepper: what takes the steps.
        point: where it starts.
        interval: in which interval.
        norm: of each row of the point, (rows,) or (rows, batch).
        span: length of the time that is solved for, () or (batch,).
        size: of the first step by a guess that knows nothing of other times, likewise.
    """
    h, f = norm[0], norm[-1]
    tolerance = stepper.atol + stepper.rtol * h
    time = span**stepper.method.state_rows  # a force times this is what it moves the state by, but for a constant
    is_silent = f * time <= NEGLIGIBLE * tolerance
    is_forced = (h <= NEGLIGIBLE * stepper.atol) & ~is_silent
    if bool(is_silent.any()):
        found = probe(stepper, point, interval).to(h)
        is_heard = is_silent & (found * time > VISIBLE * tolerance)
        cautious = 2.0 * (tolerance / found).sqrt()  # in which the force moves h by about the tolerance
        size = torch.where(is_heard, torch.minimum(size, cautious), size)
        is_forced = is_forced | is_heard
    longest = torch.where(is_forced, span * (LONGEST_GAP / widest_gap(stepper.method.nodes)), torch.inf)
    return torch.minimum(size, longest), longest


def probe(stepper: Stepper, point: Tensor, interval: int) -> Tensor:
    """The largest norm of f at :data:`PROBES` of the span and the first point, () or (batch,)."""
    x = point[0].detach()
    ends = (interval, interval + 1) if stepper.interrupted else (0, -1)
    with torch.no_grad():
        values = [stepper.term.evaluate(stepper.grid.between(*ends, fraction), x) for fraction in PROBES]
    stepper.tally.add("evaluation", len(PROBES))
    return stepper.norms(torch.stack(values)).amax(0)


class Plan:
    """Equal steps from where an interval was reached to its next stop: a knot of a signal, or its end.

    Attributes:
        start: how much of the interval is done, a fraction of it.
        fraction: size of the next step, likewise.
        left: steps to the next stop.
    """

    def __init__(self, length: float, knots: Sequence[float], most_knots: int) -> None:
        self.length = length
        self.stops = (*knots, 1.0)
        self.most_knots = most_knots
        self.start, self.fraction, self.left, self.stop = 0.0, 1.0, 1, 1.0
        self.was_uneven = False

    @property
    def is_last(self) -> bool:
        """Whether the next step ends the interval."""
        return self.left == 1 and self.stop == 1.0

    def choose(self, size: float, *, shorter: bool = False, uneven: bool = False) -> None:
        """Choose the next steps, of at most about a size; equal steps that are under way stay as they are.

        Arguments:
            size: a length of time.
            shorter: whether the next step must be shorter than the last choice.
            uneven: whether the first of several steps is to be no rational fraction of the interval.
        """
        stop = self._next_stop(size)
        rest = stop - self.start
        left = steps_to(rest * self.length, size) if self.length else 1
        if shorter and stop == self.stop:
            left = max(left, self.left + 1)
        if left != self.left or stop != self.stop or self.was_uneven:
            self.left, self.stop, self.fraction = left, stop, rest / left
        self.was_uneven = uneven and left > 1
        if self.was_uneven:
            self.fraction *= UNEVEN

    def advance(self) -> None:
        """Past a step that was accepted."""
        self.left -= 1
        self.start = self.start + self.fraction if self.left else self.stop

    def passes(self) -> int:
        """How many knots lie inside the next step."""
        end = self.stop if self.left == 1 else self.start + self.fraction
        return bisect_left(self.stops, end) - bisect_right(self.stops, self.start)

    def _next_stop(self, size: float) -> float:
        if len(self.stops) == 1:
            return 1.0
        first = bisect_right(self.stops, self.start)
        reach = self.start + 1.05 * size / self.length
        last = min(max(bisect_right(self.stops, reach), first + 1), first + 1 + self.most_knots, len(self.stops))
        return self.stops[last - 1]
