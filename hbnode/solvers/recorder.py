"""What a forward pass keeps for the backward pass: its accepted steps, and the graphs of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hbnode._closures import closed_over_leaves, refuse_unknown
from hbnode._recompute import random_state
from hbnode.solvers.step_method import StepResult
from hbnode.solvers.stepper import Stepper
from hbnode.solvers.time_grid import AnyStep, Step

SHORT = 16  # evaluations of a solve whose graph is kept whole


@dataclass(frozen=True)
class BackwardPlan:
    """What the backward pass of a solve will differentiate, decided before its first step.

    Attributes:
        by_matrix: whether it needs the gradients of coefficients.
        by_times: whether it needs those of stage times.
        known: ids of the leaves whose gradients it computes.
        checks_closures: whether to look for other leaves in each step: f is not a module, or may use others later.
    """

    by_matrix: bool
    by_times: bool
    known: frozenset[int]
    checks_closures: bool

    def step(
        self, stepper: Stepper, point: Tensor, step: AnyStep, leaves: tuple[Tensor, Tensor], *, error: bool, again: bool
    ) -> StepResult:
        """A step with its graph, from its coefficients and times, not counted; eagerly if it is taken again."""
        inputs: list[Tensor] = []
        if self.checks_closures:
            with torch.enable_grad():
                inputs = [point, *leaves, *stepper.coefficients.made_of(step, leaves[0], error=error)]
        take = stepper.step_eagerly if again else stepper.step
        return self.evaluate(lambda: take(point, step, *leaves, error=error), inputs)

    def evaluate(self, function: Callable[[], StepResult], inputs: Sequence[Tensor]) -> StepResult:
        """The value of a function with its graph, which may hold no leaf that the first evaluation did not use."""
        with torch.enable_grad():
            if not self.checks_closures:
                return function()
            values: list[StepResult] = []

            def point() -> Tensor:
                values.append(function())
                return values[0].point

            found, _ = closed_over_leaves(point, inputs)
        refuse_unknown(found, self.known)
        return values[0]


@dataclass
class StepGraph:
    """The graph of some steps in a row, or of the first evaluation, or of both.

    Attributes:
        points: what it starts from: a point, or the rows of the state if it begins with the first evaluation.
        tensors: what else it is differentiated with respect to: of each step its coefficients and its times. Of steps
            that share their coefficients the first one has them.
        output: the point after the last step.
        columns: of each step with outputs inside of it, which those are interpolated from.
        rows: those of the state after the last step, each by itself.
        steps: the steps.
        with_start: whether it begins with the first evaluation.
    """

    points: list[Tensor]
    tensors: tuple[tuple[AnyStep, Tensor | None, Tensor | None], ...]
    output: Tensor
    columns: tuple[Tensor, ...] = ()
    steps: tuple[AnyStep, ...] = ()
    with_start: bool = False
    rows: tuple[Tensor, ...] | None = None


class RecordedStep(NamedTuple):
    """An accepted step and the point where it starts; with a graph if it need not be recomputed."""

    step: AnyStep
    point: Tensor
    graph: StepGraph | None = None


class RecordedProgram(NamedTuple):
    """The equal steps of a compiled program and the points where they start; with a graph the first of those alone."""

    steps: list[Step]
    points: list[Tensor]
    graph: StepGraph | None = None


class StepRecorder:
    """Takes steps as a :class:`Stepper` does, and records them for the checkpointed gradient."""

    def __init__(
        self, stepper: Stepper, plan: BackwardPlan, *, first: StepGraph | None = None, draws: bool = True
    ) -> None:
        self.stepper, self.plan = stepper, plan
        self.first, self.draws = first, draws
        self.steps: list[RecordedStep | RecordedProgram] = []
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, point: Tensor, step: AnyStep, *, error: bool, following: int | None) -> StepResult:
        """Take a step; ``following`` others are planned after it, None if that is not known."""
        graph = None
        if self._keeps_graph(step, following):
            stepped, graph = self._take_with_graph(point, step, error=error)
        else:
            stepped = self.take_again(point, step, error=error)
        self.steps.append(RecordedStep(step, point, graph))
        return stepped

    def take_again(self, point: Tensor, step: AnyStep, *, error: bool) -> StepResult:
        """Take a step that the backward pass will recompute; it is not recorded here."""
        before = random_state(point.device) if self.draws else None
        stepped = self.stepper.take(point, step, error=error)
        step.random = _if_drawn(before, point.device)
        return stepped

    def take_all(self, point: Tensor, steps: list[Step]) -> Tensor | None:
        """The last point of equal steps in one compiled program, with its graph where it is kept; None without one."""
        stepper, plan = self.stepper, self.plan
        is_last = steps[0].interval == stepper.grid.count - 1
        keeps = self._keeps_graph(steps[0], len(steps) - 1 if is_last else None)
        if not keeps or stepper.grid.t.requires_grad:
            points = stepper.take_all(point, steps)
            if points is None:
                return None
            self.steps.append(RecordedProgram(steps, points[:-1]))
            return points[-1]
        before = self._graph_before(point)
        matrix, _ = self._leaf(stepper.coefficients.matrix(steps[0]), before)
        matrix = matrix.requires_grad_(plan.by_matrix)
        ends: list[Tensor | None] = []

        def take() -> StepResult:
            ends.append(stepper.end_of_all(before.output, steps, matrix))
            return StepResult(before.output if ends[0] is None else ends[0], None)

        end = plan.evaluate(take, (before.output, matrix)).point
        if ends[0] is None:
            return None
        stepper.count_all(steps)
        tensors = (*before.tensors, (steps[0], matrix if plan.by_matrix else None, None))
        graph = StepGraph(before.points, tensors, end, (), (*before.steps, *steps), before.with_start)
        self.steps.append(RecordedProgram(steps, [point], graph))
        return end.detach()

    def _take_with_graph(self, point: Tensor, step: AnyStep, *, error: bool) -> tuple[StepResult, StepGraph]:
        """Take a step and keep its graph, as a continuation of that of the steps before if there is one."""
        stepper, plan = self.stepper, self.plan
        before = self._graph_before(point)
        output = before.output
        matrix = stepper.coefficients.matrix(step, error=error)
        tensors = before.tensors
        if plan.by_matrix or plan.by_times:
            matrix, is_new = self._leaf(matrix, before) if plan.by_matrix else (matrix, False)
            times = stepper.coefficients.times(step).detach().requires_grad_(plan.by_times)
            tensors = (*tensors, (step, matrix if is_new else None, times if plan.by_times else None))
        else:
            times = stepper.coefficients.times(step)
        stepper.tally.add("evaluation", stepper.method.evaluations)
        state = random_state(point.device) if self.draws else None
        stepped = plan.step(stepper, output, step, (matrix, times), error=error, again=False)
        step.random = _if_drawn(state, point.device)
        columns = before.columns if stepped.columns is None else (*before.columns, stepped.columns)
        steps = (*before.steps, step)
        graph = StepGraph(before.points, tensors, stepped.point, columns, steps, before.with_start, stepped.rows)
        error_of_step = None if stepped.error is None else stepped.error.detach()
        columns_of_step = None if stepped.columns is None else stepped.columns.detach()
        return StepResult(stepped.point.detach(), error_of_step, columns_of_step), graph

    def _graph_before(self, point: Tensor) -> StepGraph:
        """The graph that the next step continues."""
        last = self.steps[-1] if self.steps else None
        before = last.graph if isinstance(last, RecordedStep) else None
        if last is None and self.first is not None:
            return self.first
        if before is None or before.steps[-1].reached is not None:
            start = point.detach().requires_grad_()
            return StepGraph([start], (), start)
        return before

    def _leaf(self, matrix: Tensor, before: StepGraph) -> tuple[Tensor, bool]:
        """Coefficients as a leaf, one for all steps of a graph that have them; and whether it is new in the graph.

        Where times have gradients, steps of one size have coefficients that depend on other times.
        """
        kept, leaf = self._leaves.get(id(matrix), (None, None))
        is_shared = kept is matrix and not self.stepper.grid.t.requires_grad
        if leaf is not None and is_shared and any(leaf is other for _, other, _ in before.tensors):
            return leaf, False
        leaf = matrix.detach().requires_grad_()
        self._leaves[id(matrix)] = (matrix, leaf)
        return leaf, True

    def _keeps_graph(self, step: AnyStep, following: int | None) -> bool:
        """Whether to keep the graph of a step: of the last one, where the backward pass begins, and of a short solve.

        ``following`` is known if the solve does not step onto another output time before its end.
        """
        if following is None:
            return False
        whole = self.stepper.grid.count == 1 or step.end is not None
        evaluations = (len(self.steps) + 1 + following) * self.stepper.method.evaluations
        return following == 0 or (whole and evaluations <= SHORT)


def _if_drawn(before: tuple[Tensor, ...] | None, device: torch.device) -> tuple[Tensor, ...] | None:
    """The state of the generators before a step, if the step has drawn from them."""
    return None if before is None or all(map(torch.equal, before, random_state(device))) else before
