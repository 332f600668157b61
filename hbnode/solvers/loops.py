"""The loops of a native solve over its steps: a fixed grid, one adaptive step for all, or one for each sample."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode.solvers import failures
from hbnode.solvers.compiled_steps import LONGEST_GRID
from hbnode.solvers.explicit_method import interpolate
from hbnode.solvers.forcing import first_step
from hbnode.solvers.limits import Limits
from hbnode.solvers.per_sample import PerSample
from hbnode.solvers.recorder import StepRecorder
from hbnode.solvers.step_method import StepResult
from hbnode.solvers.step_planner import StepPlanner
from hbnode.solvers.step_size_control import Controller, norms
from hbnode.solvers.stepper import Stepper
from hbnode.solvers.time_grid import Step

TOGETHER = 16  # steps whose outputs are interpolated at once


def integrate(
    stepper: Stepper,
    point: Tensor,
    *,
    recorder: StepRecorder | None = None,
    differentiable: bool = False,
    watch: bool = False,
    interval: int | None = None,
) -> Tensor:
    """The rows of the state at the output times, (T, state rows, ...); of an interrupted solve, the last at least.

    Arguments:
        stepper: takes the steps.
        point: where the first one starts.
        recorder: records the accepted steps for a backward pass.
        differentiable: whether gradients are to flow to the times.
        watch: check each step of a fixed grid, and name the first that is not finite.
        interval: the only one to solve; None for all.
    """
    intervals = range(stepper.grid.count) if interval is None else range(interval, interval + 1)
    if not stepper.adaptive:
        return _FixedGrid(stepper, recorder, differentiable, watch).run(point, intervals)
    if stepper.grid.per_sample:
        return PerSample(stepper, point, intervals).run(recorder, differentiable)
    return _adaptive(stepper, point, recorder, differentiable, intervals)


def integrate_to_end(stepper: Stepper, point: Tensor, recorder: StepRecorder | None = None) -> tuple[Tensor, ...]:
    """The rows of the state at the end of a solve of one interval, each by itself.

    What the gradient of one of them does not pass through is left out of its backward pass, as the last value of f is
    out of that of h.
    """
    if not stepper.adaptive:
        return _FixedGrid(stepper, recorder, differentiable=False, watch=False).end(point)
    if stepper.grid.per_sample:
        return PerSample(stepper, point, range(1)).run(recorder, differentiable=False)[-1].unbind(0)
    ((_, stepped),) = deque(_accepted(stepper, point, recorder, False, range(1)), maxlen=1)  # those before are let go
    return stepped.state(stepper.method.state_rows)


class _FixedGrid:
    """``steps=n``: n equal steps in each interval."""

    def __init__(self, stepper: Stepper, recorder: StepRecorder | None, differentiable: bool, watch: bool) -> None:
        assert stepper.settings.steps is not None
        self.stepper, self.recorder = stepper, recorder
        self.differentiable, self.watch = differentiable, watch
        self.count = stepper.settings.steps
        self.limits = Limits(stepper)
        evaluations = self.count * stepper.method.evaluations
        self.is_one_program = not (watch or differentiable) and evaluations <= LONGEST_GRID

    def run(self, point: Tensor, intervals: range) -> Tensor:
        """Step through the intervals."""
        n = self.stepper.method.state_rows
        outputs = [point[:n]]
        if self.watch:
            failures.check_start(self.stepper, _torch_internals.numbers(norms(point, None)), intervals.start)
        for interval in intervals:
            point = self._interval(point, interval).point
            outputs.append(point[:n])
        return torch.stack(outputs)

    def end(self, point: Tensor) -> tuple[Tensor, ...]:
        """The rows of the state after the first interval."""
        return self._interval(point, 0).state(self.stepper.method.state_rows)

    def _interval(self, point: Tensor, interval: int) -> StepResult:
        """The outcome of its last step."""
        steps = [Step(interval, i / self.count, 1 / self.count) for i in range(self.count)]
        steps[-1].reached = interval + 1
        end = self._in_one_program(point, steps)
        return self._one_by_one(point, steps) if end is None else StepResult(end, None)

    def _in_one_program(self, point: Tensor, steps: list[Step]) -> Tensor | None:
        """The end of an interval by a compiled program for all of its steps; None if there is none."""
        if not self.is_one_program or self.stepper.compiled is None:
            return None
        self.limits.check_nfe(steps[0], count=len(steps))
        if self.recorder is not None:
            return self.recorder.take_all(point, steps)
        points = self.stepper.take_all(point, steps)
        return None if points is None else points[-1]

    def _one_by_one(self, point: Tensor, steps: list[Step]) -> StepResult:
        stepper, is_last = self.stepper, steps[0].interval == self.stepper.grid.count - 1
        stepped = StepResult(point, None)
        for i, step in enumerate(steps):
            self.limits.check_nfe(step)
            before = stepped.point
            if self.recorder is not None:
                following = self.count - 1 - i if is_last else None
                stepped = self.recorder.take(before, step, error=False, following=following)
            else:
                stepped = stepper.take(before, step, error=False, differentiable=self.differentiable)
            stepper.tally.add("accepted")
            stepper.report(step, accepted=True)
            if self.watch and not bool(torch.isfinite(stepped.point).all()):
                raise failures.non_finite(stepper, before, step)
        return stepped


def _adaptive(
    stepper: Stepper, point: Tensor, recorder: StepRecorder | None, differentiable: bool, intervals: range
) -> Tensor:
    """One step for the whole batch, chosen by its error."""
    outputs = _Outputs(stepper, point[: stepper.method.state_rows], differentiable)
    if intervals:
        for step, stepped in _accepted(stepper, point, recorder, differentiable, intervals):
            outputs.add(step, stepped)
    return outputs.all()


def _accepted(
    stepper: Stepper, point: Tensor, recorder: StepRecorder | None, differentiable: bool, intervals: range
) -> Iterator[tuple[Step, StepResult]]:
    """The accepted steps and their outcomes."""
    controller, limits = Controller(stepper.method.error_order), Limits(stepper)
    size, longest, strictness = first_step(stepper, point, intervals.start)
    planner = StepPlanner(stepper, intervals, size)
    not_finite = 0
    while not planner.done:
        step = planner.step()
        limits.count_attempt(step)
        if recorder is not None:
            stepped = recorder.take(point, step, error=True, following=planner.following)
        else:
            stepped = stepper.take(point, step, error=True, differentiable=differentiable)
        margin = stepper.method.inside if step.outputs else strictness
        ratio = margin * stepper.ratio(stepped, point)
        stepper.report(step, accepted=ratio <= 1.0)
        if ratio <= 1.0:
            stepper.tally.add("accepted")
            point, not_finite = stepped.point, 0
            yield step, stepped
            if planner.size:
                size = min(planner.size * controller.accept(ratio), longest)
            planner.advance(step, size)
        else:
            stepper.tally.add("rejected")
            if recorder is not None:
                recorder.steps.pop()
            not_finite = 0 if math.isfinite(ratio) else not_finite + 1
            size = planner.size * controller.reject(ratio)
            too_small = limits.is_too_small(step, size)
            if not_finite == failures.NON_FINITE_ATTEMPTS or (not_finite and too_small):
                raise failures.non_finite(stepper, point, step)
            if too_small:
                raise failures.underflow(stepper, step, size)
            planner.retreat(size)


class _Outputs:
    """The outputs of a solve, in order: where steps end, and interpolated inside of steps, those of many at once."""

    def __init__(self, stepper: Stepper, first: Tensor, differentiable: bool) -> None:
        self.stepper = stepper
        self.t = stepper.grid.t if differentiable else stepper.grid.t.detach()
        self.pieces: list[Tensor] = [first.unsqueeze(0)]
        self.waiting: list[tuple[int, Step, Tensor]] = []

    def add(self, step: Step, stepped: StepResult) -> None:
        """Those of a step."""
        if stepped.columns is not None:
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
            coefficients = self.stepper.coefficients
            blends = coefficients.blends(steps, coefficients.damping, self.t)
            for (place, step, columns), blend in zip(self.waiting, blends, strict=True):
                step.blend = blend.detach()
                self.pieces[place] = interpolate(columns, blend)
            self.waiting = []

    def all(self) -> Tensor:
        """(T, state rows, ...)."""
        self.interpolate()
        return torch.cat(self.pieces)
