"""``gradient="checkpoint"``: recomputes each accepted step from a stored state (discretise-then-optimise).

Gradients of the accepted steps that are recomputed one by one were introduced as adaptive checkpoint adjoint (ACA) by
Zhuang et al., arXiv:2006.02493.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hbnode._recompute import set_random_state
from hbnode.gradients.accumulator import GradientAccumulator
from hbnode.gradients.forward_pass import ForwardPass, graph_of_first, refuse_double_backward, required
from hbnode.solvers.recorder import SHORT, RecordedProgram, RecordedStep, StepGraph
from hbnode.solvers.stepper import Rows, no_autocast
from hbnode.solvers.time_grid import SampleStep, along_batch

SMALL = 2**15  # elements of a point; the graph of a step with more is recomputed alone


class Checkpoint(torch.autograd.Function):
    """The gradient of the accepted steps, from the points between them."""

    @staticmethod
    def forward(ctx: Any, forward: ForwardPass, t: Tensor, damping: Tensor, rows: Tensor, *leaves: Tensor) -> Rows:
        """The rows of the state at the output times, (T, state rows, ...), or each of those at the end."""
        solution = forward.record(rows)
        forward.save(ctx, rows)
        ctx.set_materialize_grads(not forward.end)
        return solution

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Undo each step, from the last to the first: by its graph where that was kept, else by recomputing it."""
        refuse_double_backward("checkpoint")
        forward: ForwardPass = ctx.forward_pass
        method, steps = forward.stepper.method, forward.steps
        rows, *_ = ctx.saved_tensors
        accumulator = GradientAccumulator(forward, *ctx.needs_input_grad[1:3])
        carried = rows.new_zeros(method.state_rows + method.carries, *rows.shape[1:])
        gradient = _of_trajectory(gradients, rows) if forward.end else required(gradients[0], "gradient")
        with forward.context(), no_autocast(rows.device.type):
            left, begins = len(steps), method.carries
            while left:
                last = steps[left - 1]
                if last.graph is not None and last.graph.with_start:
                    begins, forward.first_graph = False, None
                if isinstance(last, RecordedProgram):
                    carried = _undo_all(accumulator, last, carried, gradient)
                    left -= 1
                    steps[left] = RecordedProgram(*last[:2])
                    continue
                stretch = _stretch(steps, left, accumulator)
                if forward.end and left == len(steps) and last.graph is not None and last.graph.rows is not None:
                    carried = _undo_to_end(accumulator, last.graph, gradients)
                else:
                    carried = _undo(accumulator, stretch, carried, gradient)
                undone = range(left - len(stretch), left)
                for i in undone:  # a graph serves once; after that its steps are recomputed
                    steps[i] = RecordedStep(*steps[i][:2])
                left = undone.start
            if begins:
                carried = _undo_start(accumulator, forward, rows, carried)
        damping, t = accumulator.finish()
        return None, t, damping, carried + gradient[0], *accumulator.gradients


def _stretch(
    steps: list[RecordedStep | RecordedProgram], left: int, accumulator: GradientAccumulator
) -> list[RecordedStep]:
    """The steps before a place that are undone together: those of one graph, or those that are recomputed at once.

    One backward pass through the graph of several steps costs less than one through each. They have no more graph at a
    time than the solves whose graph is kept whole, and one step alone where the state is large.
    """
    recorded = steps[left - 1]
    assert isinstance(recorded, RecordedStep)
    if recorded.graph is not None:
        return [s for s in steps[left - len(recorded.graph.steps) : left] if isinstance(s, RecordedStep)]
    stepper, stretch = accumulator.stepper, [recorded]
    if stepper.compiled is not None or recorded.point.numel() > SMALL:
        return stretch
    while (len(stretch) + 1) * stepper.method.evaluations <= SHORT and left > len(stretch):
        before = steps[left - len(stretch) - 1]
        if not isinstance(before, RecordedStep) or before.graph is not None or isinstance(before.step, SampleStep):
            break
        if before.step.reached is not None or before.step.outputs or isinstance(recorded.step, SampleStep):
            break
        stretch.insert(0, before)
    return stretch


def _of_trajectory(gradients: tuple[Tensor | None, ...], rows: Tensor) -> Tensor:
    """The gradient of a trajectory from those of the rows of the state at its end, None for 0."""
    of_end = [torch.zeros_like(row) if g is None else g for row, g in zip(rows, gradients, strict=True)]
    return torch.stack([torch.zeros_like(rows), torch.stack(of_end)])


def _undo_to_end(accumulator: GradientAccumulator, graph: StepGraph, gradients: tuple[Tensor | None, ...]) -> Tensor:
    """:func:`_undo` for the graph at the end of a solve, through the rows of the state that have a gradient alone.

    That of h does not pass through the last value of f.
    """
    accumulator.stepper.tally.add("accepted", len(graph.steps))
    rows = required(graph.rows, "rows of the state")
    known = [(row, g) for row, g in zip(rows, gradients, strict=True) if g is not None]
    if not known:
        return torch.zeros_like(graph.points[0])
    (row, *others), cotangents = zip(*known, strict=True)
    graph = replace(graph, output=row, columns=tuple(others))
    return required(accumulator.pull_back(graph, cotangents)[0], "gradient of its first point")


def _undo(accumulator: GradientAccumulator, stretch: list[RecordedStep], carried: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with respect to the point before some steps in a row, from that with respect to the point after."""
    step, point, graph = stretch[-1]
    stepper = accumulator.stepper
    n = stepper.method.state_rows
    stayed = None
    if isinstance(step, SampleStep):
        batch_dim = stepper.grid.batch_dim
        carried = torch.cat([carried[:n] + _at_reached(step, gradient, batch_dim), carried[n:]])
        moved = along_batch(step.accepted, carried, batch_dim)
        stayed, carried = torch.where(moved, 0.0, carried), torch.where(moved, carried, 0.0)
    elif step.reached is not None:
        carried = torch.cat([carried[:n] + gradient[step.reached], carried[n:]])
    stepper.tally.add("accepted", len(stretch))
    pulled = None
    if graph is None:
        stepper.tally.add("evaluation", len(stretch) * stepper.method.evaluations)
        if stepper.compiled is not None and not step.outputs:
            matrix, times = stepper.coefficients.matrix(step), stepper.coefficients.times(step).detach()
            pulled = accumulator.pull_compiled("pull", (), point.detach(), matrix, times, carried)
    if pulled is not None:
        before, by_matrix, by_times = pulled
        accumulator.steps.append((step, by_matrix, by_times))
    else:
        graph = accumulator.graph(stretch) if graph is None else graph
        inner = [s for s in graph.steps if s.outputs]
        cotangents = [carried]
        for s, columns in zip(inner, graph.columns, strict=True):
            cotangents.append(accumulator.interpolated(s, columns, gradient))
        before = required(accumulator.pull_back(graph, cotangents)[0], "gradient of its first point")
    return before if stayed is None else before + stayed


def _undo_all(accumulator: GradientAccumulator, recorded: RecordedProgram, carried: Tensor, gradient: Tensor) -> Tensor:
    """:func:`_undo` for all the equal steps between two outputs, which were taken in one compiled program."""
    steps, points, graph = recorded
    stepper = accumulator.stepper
    n = stepper.method.state_rows
    start = torch.cat([carried[:n] + gradient[steps[-1].reached], carried[n:]])
    if graph is not None:
        stepper.tally.add("accepted", len(steps))
        return required(accumulator.pull_back(graph, [start])[0], "gradient of its first point")
    for step in steps[len(points) - 1 : -1]:  # a graph has served once
        with torch.no_grad():
            points.append(stepper.take(points[-1], step, error=False).point)
    times = [stepper.coefficients.times(step).detach() for step in steps]
    matrix = stepper.coefficients.matrix(steps[0])
    pulled = accumulator.pull_compiled("pull_grid", (len(steps),), [p.detach() for p in points], matrix, times, start)
    if pulled is None:
        for step, point in zip(reversed(steps), reversed(points), strict=True):
            carried = _undo(accumulator, [RecordedStep(step, point)], carried, gradient)
        return carried
    stepper.tally.add("evaluation", len(steps) * stepper.method.evaluations)
    stepper.tally.add("accepted", len(steps))
    carried, by_matrix, by_times = pulled
    for step, of_step in zip(steps, by_times, strict=True):
        accumulator.steps.append((step, by_matrix, of_step))
        by_matrix = None  # equal steps have the same coefficients: the sum is with the first
    return carried


def _undo_start(accumulator: GradientAccumulator, forward: ForwardPass, rows: Tensor, carried: Tensor) -> Tensor:
    """The gradient with respect to the rows of the state at the start, from that with respect to the first point."""
    stepper = accumulator.stepper
    graph, forward.first_graph = forward.first_graph, None
    if graph is None:
        stepper.tally.add("evaluation")
        t = stepper.grid.time_of(0).detach().requires_grad_(accumulator.needs_t)
        start = rows.detach().requires_grad_()
        with torch.enable_grad(), set_random_state(forward.random_start, rows.device):
            graph = graph_of_first(start, t, stepper.term.evaluate(t, start[0].clone()))
    by_rows, *by_t = accumulator.pull_back(graph, [carried])
    accumulator.first_time = by_t[0] if by_t else None
    return required(by_rows, "gradient of its first point")


def _at_reached(step: SampleStep, gradient: Tensor, batch_dim: int) -> Tensor:
    """The outputs' gradients of the samples that a step brings to an output time, 0 for the others."""
    index = (step.interval + 1).clamp(max=len(gradient) - 1)
    rows = gradient.movedim(batch_dim + 2, 1)[index, torch.arange(len(index), device=index.device)]
    rows = rows.movedim(0, batch_dim + 1)
    return torch.where(along_batch(step.reached, rows, batch_dim), rows, 0.0)
