"""Where the steps of a solve with one step for the batch end: on output times, or past them."""

from __future__ import annotations

from bisect import bisect_left

from hbnode.solvers.forcing import Plan
from hbnode.solvers.stepper import Stepper
from hbnode.solvers.time_grid import Step

LONGER = 1.5  # than the interval in which it begins is the first step that passes output times,
AS_LONG = 1.0  # and every one that follows
SAME = 1e-14  # times no further apart than this, as a fraction of the span, are one


class StepPlanner:
    """The next steps of a solve.

    They divide what is left of the interval between two output times, and the last lands on the output time. Where
    steps are longer than the interval in which they begin they divide what is left of the whole span instead. They pass
    output times then, and the outputs inside of them are interpolated.

    Arguments:
        stepper: what takes the steps.
        intervals: those to solve.
        size: of the first step, at most about.

    Attributes:
        interval: the interval in which the next step begins,
        start: and at which fraction of it.
        past: whether steps pass output times.
        plan: of the steps in the interval, or in the whole span.
    """

    def __init__(self, stepper: Stepper, intervals: range, size: float) -> None:
        self.stepper, self.grid = stepper, stepper.grid
        self.interval, self.last = intervals.start, intervals.stop
        self.start, self.past = 0.0, False
        self.most_knots = stepper.most_knots
        self.uneven = stepper.sees_time  # the first step
        self.whole: Plan | None = None
        if stepper.passes is not False and len(intervals) > 1:
            self.span = self.grid.elapsed[-1]
            self.whole = Plan(self.span, stepper.knots_inside(0, self.last), self.most_knots)
        self.plan, self.is_new = self._of_interval(), True
        self.choose(size)

    @property
    def done(self) -> bool:
        """Whether the last output time is reached."""
        return self.interval >= self.last

    @property
    def size(self) -> float:
        """Of the next step, a length of time."""
        return self.plan.fraction * self.plan.length

    @property
    def following(self) -> int | None:
        """How many steps are planned after the next one; None if they end on another output time first."""
        if not self.past and self.interval < self.last - 1:
            return None
        return self.plan.left - 1 if self.plan.stop == 1.0 else self.plan.left

    def choose(self, size: float, *, shorter: bool = False) -> None:
        """Choose the next steps, of at most about a size; see :meth:`Plan.choose`."""
        past = self._passes(size, shorter)
        if not past:
            if self.past or self.is_new:
                self.plan, self.is_new, shorter = self._of_interval(), False, False
            self.plan.choose(size, shorter=shorter, uneven=self.uneven)
        elif self.whole is not None:
            self.plan = self.whole
        self.past = past

    def _of_interval(self) -> Plan:
        """The steps in what is left of the interval."""
        knots = self.stepper.knots_inside(self.interval, self.interval + 1)
        return _from(Plan(self.grid.lengths[self.interval], knots, self.most_knots), self.start)

    def _passes(self, size: float, shorter: bool) -> bool:
        if self.whole is None or self.interval == self.last - 1:
            return False
        length = self.grid.lengths[self.interval]
        least = (AS_LONG if self.past else LONGER) * length
        if not self.past:
            if self.stepper.passes is None and size <= least:
                return False
            _from(self.whole, (self.grid.elapsed[self.interval] + self.start * length) / self.span)
        self.whole.choose(size, shorter=shorter and self.past, uneven=self.uneven)
        return self.stepper.passes is True or self.whole.fraction * self.span > least

    def step(self) -> Step:
        """The next step."""
        plan, interval = self.plan, self.interval
        if not self.past:
            step = Step(interval, self.start, plan.fraction, reached=interval + 1 if plan.is_last else None)
            if self.stepper.interrupted and plan.fraction == 1.0:
                step.whole = interval
            return step
        lengths, elapsed = self.grid.lengths, self.grid.elapsed
        step = Step(interval, self.start, self.size / lengths[interval], length=self.size)
        now = (plan.stop if plan.left == 1 else plan.start + plan.fraction) * self.span
        ahead = self.last if plan.is_last else bisect_left(elapsed, now - SAME * self.span, interval + 1, self.last)
        if plan.is_last or elapsed[ahead] - now <= SAME * self.span:
            step.reached, step.end = ahead, (ahead - 1, 1.0)
        else:
            step.end = (ahead - 1, (now - elapsed[ahead - 1]) / lengths[ahead - 1])
        step.outputs = range(interval + 1, ahead)
        return step

    def advance(self, step: Step, size: float) -> None:
        """Go to the end of a step that was accepted, and on with steps of at most about a size."""
        self.uneven = False
        self.plan.advance()
        if step.reached is not None:
            self.interval, self.start = step.reached, 0.0
            self.is_new = not self.past
        else:
            self.interval, self.start = step.end or (self.interval, self.plan.start)
        if not self.done:
            self.choose(size)

    def retreat(self, size: float) -> None:
        """Go on with steps of at most about a size, shorter than the one that was rejected."""
        fewer = min(self.plan.most_knots, max(self.plan.passes() - 1, 0))
        self.most_knots = fewer
        for plan in (self.plan, self.whole):
            if plan is not None:
                plan.most_knots = fewer
        self.choose(size, shorter=True)


def _from(plan: Plan, start: float) -> Plan:
    """A plan that begins at a fraction of its length."""
    plan.start, plan.left = start, 0
    return plan
