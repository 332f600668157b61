"""The loops of a native solve over its steps: a fixed grid, one adaptive step for all, or one for each sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hbnode.solvers import failures
from hbnode.solvers.compiled_steps import LONGEST_GRID
from hbnode.solvers.explicit_method import StepResult, interpolate
from hbnode.solvers.per_sample import PerSample
from hbnode.solvers.step_planner import StepPlanner
from hbnode.solvers.step_size_control import Controller, norms
from hbnode.solvers.stepper import NON_FINITE_ATTEMPTS, Stepper
from hbnode.solvers.time_grid import Step

SHORT = 16  # evaluations of a solve whose graph is kept whole
TOGETHER = 16  # steps whose outputs are interpolated at once


def integrate(
    stepper: Stepper,
    point: Tensor,
    damping: Tensor,
    *,
    record: list | None = None,
    differentiable: bool = False,
    watch: bool = False,
    interval: int | None = None,
) -> Tensor:
    """The rows of the state at the output times, (T, state rows, ...); of an interrupted solve, the last at least.

    Arguments:
        stepper: what takes the steps.
        point: where it starts.
        damping: γ, on the clock's device in float64.
        record: gets ``(step, point, graph)`` for every accepted step, with a graph for the last ones.
        differentiable: whether gradients are to flow to the times.
        watch: check each step of a fixed grid, and name the first that is not finite.
        interval: the only one to solve; None for all.
    """
    intervals = range(stepper.grid.count) if interval is None else range(interval, interval + 1)
    if not stepper.adaptive:
        return _grid(stepper, point, damping, record, differentiable, watch, intervals)
    if stepper.grid.per_sample:
        return PerSample(stepper, point, intervals).run(damping, record, differentiable)
    return _adaptive(stepper, point, damping, record, differentiable, intervals)


def _grid(
    stepper: Stepper,
    point: Tensor,
    damping: Tensor,
    record: list | None,
    differentiable: bool,
    watch: bool,
    intervals: range,
) -> Tensor:
    n, count = stepper.method.state_rows, stepper.options.steps
    outputs = [point[:n]]
    if watch:
        failures.check_start(stepper, norms(point, None).tolist(), intervals.start)
    for interval in intervals:
        steps = [Step(interval, i / count, 1 / count) for i in range(count)]
        steps[-1].reached = interval + 1
        if not (watch or differentiable) and count * stepper.method.evaluations <= LONGEST_GRID:
            points = stepper.take_all(point, steps, damping)
            if points is not None:
                if record is not None:
                    record.append((steps, points[:-1], None))
                point = points[-1]
                outputs.append(point[:n])
                continue
        for i, step in enumerate(steps):
            stepper.check_nfe(step)
            before = point
            if record is not None:
                following = count - 1 - i if interval == stepper.grid.count - 1 else None
                keep = _keeps(stepper, step, len(record), following)
                point = _recorded(stepper, point, step, damping, record, keep, error=False).point
            else:
                point = stepper.take(point, step, damping, error=False, differentiable=differentiable).point
            stepper.tally.add("accepted")
            stepper.report(step, accepted=True)
            if watch and not bool(torch.isfinite(point).all()):
                raise failures.blame(stepper, before, step, damping)
        outputs.append(point[:n])
    return torch.stack(outputs)


def _adaptive(
    stepper: Stepper, point: Tensor, damping: Tensor, record: list | None, differentiable: bool, intervals: range
) -> Tensor:
    n = stepper.method.state_rows
    controller = Controller(stepper.method.error_order)
    outputs = _Outputs(stepper, damping, point[:n], differentiable)
    route, not_finite = StepPlanner(stepper, intervals), 0
    size = stepper.first_size(point, intervals.start) if intervals else 0.0
    if intervals:
        route.choose(size)
    while not route.done:
        step = route.step()
        stepper.step_size = route.size
        stepper.count_attempt(step)
        if record is not None:
            keep = _keeps(stepper, step, len(record), route.following)
            stepped = _recorded(stepper, point, step, damping, record, keep, error=True)
        else:
            stepped = stepper.take(point, step, damping, error=True, differentiable=differentiable)
        strictness = stepper.method.inside if step.outputs else stepper.strictness
        ratio = strictness * stepper.ratio(stepped.error, point, stepped.point)
        if ratio <= 1.0:
            stepper.tally.add("accepted")
            stepper.report(step, accepted=True)
            point, not_finite = stepped.point, 0
            outputs.add(step, stepped)
            if route.size:
                size = min(route.size * controller.accept(ratio), stepper.max_step)
            route.advance(step, size)
        else:
            stepper.tally.add("rejected")
            stepper.report(step, accepted=False)
            if record is not None:
                record.pop()
            not_finite = 0 if math.isfinite(ratio) else not_finite + 1
            size = route.size * controller.reject(ratio)
            too_small = stepper.is_too_small(step, size)
            if not_finite == NON_FINITE_ATTEMPTS or (not_finite and too_small):
                raise failures.blame(stepper, point, step, damping)
            if too_small:
                raise failures.underflow(stepper, step, size)
            route.retreat(size)
    return outputs.all()


class _Outputs:
    """The outputs of a solve, in order: where steps end, and interpolated inside of steps, those of many at once."""

    def __init__(self, stepper: Stepper, damping: Tensor, first: Tensor, differentiable: bool) -> None:
        self.stepper, self.damping = stepper, damping
        self.t = stepper.grid.t if differentiable else stepper.grid.t.detach()
        self.pieces: list[Tensor] = [first.unsqueeze(0)]
        self.waiting: list[tuple[int, Step, Tensor]] = []

    def add(self, step: Step, stepped: StepResult) -> None:
        """Those of a step."""
        if step.outputs:
            self.waiting.append((len(self.pieces), step, stepped.columns))
            self.pieces.append(stepped.columns)
        if step.reached is not None:
            self.pieces.append(stepped.point[None, : self.stepper.method.state_rows])
        if len(self.waiting) == TOGETHER:
            self.interpolate()

    def interpolate(self) -> None:
        """Those that wait for it."""
        if self.waiting:
            steps = [step for _, step, _ in self.waiting]
            blends = self.stepper.blends(steps, self.damping, self.t)
            for (place, step, columns), blend in zip(self.waiting, blends, strict=True):
                step.blend = blend.detach()
                self.pieces[place] = interpolate(columns, blend)
            self.waiting = []

    def all(self) -> Tensor:
        """(T, state rows, ...)."""
        self.interpolate()
        return torch.cat(self.pieces)


def _keeps(stepper: Stepper, step: Step, taken: int, following: int | None) -> bool:
    """Whether a step keeps its graph: the last one, with which the backward pass begins, and all of a short solve.

    How many are following is known if the solve does not step onto another output time before its end.
    """
    if following is None:
        return False
    whole = stepper.grid.count == 1 or step.end is not None
    return following == 0 or (whole and (taken + 1 + following) * stepper.method.evaluations <= SHORT)


def _recorded(
    stepper: Stepper, point: Tensor, step: Step, damping: Tensor, record: list, keep: bool, *, error: bool
) -> StepResult:
    """Take a step and record it: ``(step, point, graph)``, without a graph if it is to be taken again."""
    if keep:
        before = record[-1][2] if record else None
        stepped, graph = stepper.take_and_keep(point, step, damping, before, error=error)
    else:
        stepped, graph = stepper.take(point, step, damping, error=error, differentiable=False), None
    record.append((step, point, graph))
    return stepped
