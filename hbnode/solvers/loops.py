"""The loops of a native solve over its steps: a fixed grid, one adaptive step for all, or one for each sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hbnode.solvers.clock import Clock, Step
from hbnode.solvers.compiled import LONGEST_GRID
from hbnode.solvers.control import Controller, norms
from hbnode.solvers.explicit import Stepped
from hbnode.solvers.forcing import Plan
from hbnode.solvers.per_sample import PerSample
from hbnode.solvers.stepping import NON_FINITE_ATTEMPTS, Solve

SHORT = 16  # evaluations of a solve whose graph is kept whole


def integrate(
    solve: Solve,
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
        solve: what is solved.
        point: where it starts.
        damping: γ, on the clock's device in float64.
        record: gets ``(step, point, graph)`` for every accepted step, with a graph for the last ones.
        differentiable: whether gradients are to flow to the times.
        watch: check each step of a fixed grid, and name the first that is not finite.
        interval: the only one to solve; None for all.
    """
    intervals = range(solve.clock.count) if interval is None else range(interval, interval + 1)
    if not solve.adaptive:
        return _grid(solve, point, damping, record, differentiable, watch, intervals)
    if solve.clock.per_sample:
        return PerSample(solve, point, intervals).run(damping, record, differentiable)
    return _adaptive(solve, point, damping, record, differentiable, intervals)


def _grid(
    solve: Solve,
    point: Tensor,
    damping: Tensor,
    record: list | None,
    differentiable: bool,
    watch: bool,
    intervals: range,
) -> Tensor:
    n, count = solve.method.state_rows, solve.options.steps
    outputs = [point[:n]]
    if watch:
        solve.check_start(norms(point, None).tolist(), intervals.start)
    for interval in intervals:
        steps = [Step(interval, i / count, 1 / count) for i in range(count)]
        steps[-1].reached = interval + 1
        if not (watch or differentiable) and count * solve.method.evaluations <= LONGEST_GRID:
            points = solve.take_all(point, steps, damping)
            if points is not None:
                if record is not None:
                    record.append((steps, points[:-1], None))
                point = points[-1]
                outputs.append(point[:n])
                continue
        for i, step in enumerate(steps):
            solve.check_nfe(step)
            before = point
            if record is not None:
                keep = _keeps(solve, step, len(record), count - 1 - i)
                point = _recorded(solve, point, step, damping, record, keep, error=False).point
            else:
                point = solve.take(point, step, damping, error=False, differentiable=differentiable).point
            solve.tally.add("accepted")
            if watch and not bool(torch.isfinite(point).all()):
                raise solve.blame(before, step, damping)
        outputs.append(point[:n])
    return torch.stack(outputs)


def _adaptive(
    solve: Solve, point: Tensor, damping: Tensor, record: list | None, differentiable: bool, intervals: range
) -> Tensor:
    n, clock = solve.method.state_rows, solve.clock
    controller = Controller(solve.method.error_order)
    outputs = [point[:n]]
    size = solve.first_size(point, intervals.start) if intervals else 0.0
    uneven = solve.sees_time
    for interval in intervals:
        length, failures = clock.lengths[interval], 0
        plan = Plan(length, solve.knots_inside(interval), solve.most_knots)
        plan.choose(size, uneven=uneven)
        while plan.left:
            step = Step(interval, plan.start, plan.fraction, reached=interval + 1 if plan.is_last else None)
            if solve.interrupted and plan.fraction == 1.0:
                step.whole = interval
            if clock.dense:
                _mark_outputs(clock, step)
            solve.step_size = plan.fraction * length
            solve.count_attempt(step)
            if record is not None:
                following = plan.left - 1 if plan.stop == 1.0 else plan.left
                keep = _keeps(solve, step, len(record), following)
                stepped = _recorded(solve, point, step, damping, record, keep, error=True)
            else:
                stepped = solve.take(point, step, damping, error=True, differentiable=differentiable)
            ratio = solve.ratio(stepped.error, point, stepped.point)
            if ratio <= 1.0:
                solve.tally.add("accepted")
                point, failures, uneven = stepped.point, 0, False
                if step.thetas:
                    outputs.extend(stepped.dense.view(-1, n, *point.shape[1:]).unbind(0))
                if length:
                    size = min(solve.step_size * controller.accept(ratio), solve.max_step)
                plan.advance()
                if plan.start < 1.0:
                    plan.choose(size)
            else:
                solve.tally.add("rejected")
                if record is not None:
                    record.pop()
                failures = 0 if math.isfinite(ratio) else failures + 1
                size = solve.step_size * controller.reject(ratio)
                too_small = solve.is_too_small(step, size)
                if failures == NON_FINITE_ATTEMPTS or (failures and too_small):
                    raise solve.blame(point, step, damping)
                if too_small:
                    raise solve.underflow(step, size)
                solve.most_knots = plan.most_knots = min(plan.most_knots, max(plan.passes() - 1, 0))
                plan.choose(size, shorter=True, uneven=uneven)
        if not clock.dense:
            outputs.append(point[:n])
    return torch.stack(outputs)


def _keeps(solve: Solve, step: Step, taken: int, following: int) -> bool:
    """Whether a step keeps its graph: the last one, with which the backward pass begins, and all of a short solve."""
    if solve.clock.count == 1 and (taken + 1 + following) * solve.method.evaluations <= SHORT:
        return True
    return following == 0 and step.interval == solve.clock.count - 1


def _recorded(
    solve: Solve, point: Tensor, step: Step, damping: Tensor, record: list, keep: bool, *, error: bool
) -> Stepped:
    """Take a step and record it: ``(step, point, graph)``, without a graph if it is to be taken again."""
    if keep:
        before = record[-1][2] if record else None
        stepped, graph = solve.take_and_keep(point, step, damping, before, error=error)
    else:
        stepped, graph = solve.take(point, step, damping, error=error, differentiable=False), None
    record.append((step, point, graph))
    return stepped


def _mark_outputs(clock: Clock, step: Step) -> None:
    """Which outputs lie in a step, to be interpolated."""
    begin, length = clock.times[0], clock.times[-1] - clock.times[0]
    fractions = [(t - begin) / length for t in clock.times]
    end = 1.0 if step.reached is not None else step.start + step.size
    inside = [j for j, fraction in enumerate(fractions) if j and step.start < fraction <= end]
    if inside:
        step.outputs = range(inside[0], inside[-1] + 1)
        step.thetas = tuple((fractions[j] - step.start) / step.size for j in inside)
