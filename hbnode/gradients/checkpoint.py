"""``gradient="checkpoint"``: the backward pass of a native solve takes its steps again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode._recompute import ForwardContext, set_random_state
from hbnode.solvers.explicit_method import StepResult, interpolate
from hbnode.solvers.loops import integrate
from hbnode.solvers.stepper import StepGraph, Stepper, no_autocast
from hbnode.solvers.time_grid import Step, align


class GradientAccumulator:
    """What a backward pass collects: gradients of the leaves, and of the coefficients and times of each step."""

    def __init__(self, ctx: Any) -> None:
        self.stepper: Stepper = ctx.stepper
        self.damping, self.t = ctx.damping, ctx.clock_t
        self.needs_t, self.needs_damping = ctx.needs_input_grad[3:5]
        self.by_matrix, self.by_times = self.stepper.wanted
        self.leaves: list[Tensor] = ctx.leaves
        self.gradients: list[Tensor | None] = [None] * len(self.leaves)
        self.steps: list[tuple[Step, Tensor | None, Tensor | None]] = []
        self.blends: list[tuple[Step, Tensor]] = []
        self.first_time: Tensor | None = None  # gradient with respect to the time of the first evaluation

    def graph(self, step: Step, point: Tensor) -> StepGraph:
        """Take a step again, with its graph."""
        stepper = self.stepper
        matrix = stepper.matrix(step, self.damping).detach().requires_grad_(self.by_matrix)
        times = stepper.times(step).detach().requires_grad_(self.by_times)
        point = point.detach().requires_grad_()

        def take() -> StepResult:
            coefficients = stepper.pack(step, matrix, error=False)
            return stepper.step(point, coefficients, times, error=False, columns=bool(step.outputs))

        with set_random_state(step.random, point.device):
            stepped = stepper.checked(take, (point, matrix, times))
        tensors = [x for x in (matrix, times) if x.requires_grad]
        columns = () if stepped.columns is None else (stepped.columns,)
        return StepGraph([point], tensors, stepped.point, columns, (step,))

    def pull_back(self, graph: StepGraph, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients with respect to the points; those of the leaves are added up, those of the steps kept, here."""
        outputs = [graph.output, *graph.columns]
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]  # some may have been frozen since
        found = torch.autograd.grad(outputs, [*graph.points, *graph.tensors, *leaves], cotangents, allow_unused=True)
        n, k = len(graph.points), len(graph.points) + len(graph.tensors)
        of_leaves = iter(found[k:])
        self.add([next(of_leaves) if leaf.requires_grad else None for leaf in self.leaves])
        of_tensors = iter(found[n:k])
        for step in graph.steps:
            by_matrix = next(of_tensors) if self.by_matrix else None
            self.steps.append((step, by_matrix, next(of_tensors) if self.by_times else None))
        return list(found[:n])

    def interpolated(self, step: Step, columns: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with respect to a step's columns, from that of its outputs; that of their blend is kept."""
        with torch.enable_grad():
            columns = columns.detach().requires_grad_()
            blend = step.blend.detach().requires_grad_(self.by_matrix)
            inside = interpolate(columns, blend)
        wanted = [x for x in (columns, blend) if x.requires_grad]
        of_columns, *of_blend = torch.autograd.grad(inside, wanted, gradient[step.outputs.start : step.outputs.stop])
        self.blends.extend((step, g) for g in of_blend)
        return of_columns

    def pull_compiled(
        self, program: str, flags: tuple, points: Tensor | list, matrix: Tensor, times: Tensor | list, carried: Tensor
    ) -> tuple[Tensor, Tensor | None, Any] | None:
        """What :meth:`graph` and :meth:`pull_back` find, by a compiled program; None if there is none."""
        compiled = self.stepper.compiled
        if compiled is None or not {id(leaf) for leaf in self.leaves} <= set(map(id, compiled.parameters.values())):
            return None
        parameters = compiled.parameters
        with torch.no_grad():
            flags = (self.by_matrix, self.by_times, *flags)
            pulled = compiled.run(program, flags, points, matrix, times, parameters, carried)
        if pulled is None:
            self.stepper.compiled = None
            return None
        by_point, by_matrix, by_times, by_parameter = pulled
        found = {id(parameters[name]): g for name, g in by_parameter.items()}
        self.add([found.get(id(leaf)) for leaf in self.leaves])
        return by_point, by_matrix, by_times

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the leaves."""
        for i, (total, new) in enumerate(zip(self.gradients, gradients, strict=True)):
            if new is not None:
                self.gradients[i] = new if total is None else total + new

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients with respect to γ and t, of all steps in one go."""
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        groups = defaultdict(list)
        for entry in self.steps:
            groups[entry[0].end is None].append(entry)
        with torch.enable_grad():
            damping = self.damping.detach().requires_grad_(self.needs_damping)
            t = self.t.detach().requires_grad_(self.needs_t)
            if self.stepper.by_damping:
                damping = self.stepper.damping
                self._kept(outputs, cotangents)
            else:
                for group in groups.values():
                    self._contract(group, damping, t, outputs, cotangents)
            if self.blends:
                outputs.extend(self.stepper.blends([step for step, _ in self.blends], damping, t))
                cotangents.extend(g for _, g in self.blends)
        wanted = [x for x in (damping, t) if x.requires_grad]
        found = [None] * len(wanted)
        if outputs:
            found = torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True)
        found = iter(found)
        by_damping = next(found) if self.needs_damping else None
        by_t = next(found) if self.needs_t else None
        if self.first_time is not None:
            by_t = torch.zeros_like(self.t) if by_t is None else by_t
            by_t[..., 0] += self.first_time.reshape(by_t[..., 0].shape).to(by_t)
        return by_damping, by_t

    def _kept(self, outputs: list, cotangents: list) -> None:
        """The coefficients of each size of step as functions of γ, as the solve kept them, and the gradients."""
        totals: dict[float, Tensor] = {}
        for step, by_matrix, _ in self.steps:
            if by_matrix is not None:
                size = self.stepper.grid.size(step)
                totals[size] = totals[size] + by_matrix if size in totals else by_matrix
        outputs.extend(self.stepper.by_damping[size] for size in totals)
        if totals:
            together = torch.stack([*totals.values()]).to(outputs[0])  # one synchronisation
            cotangents.extend(together.unbind(0))

    def _contract(self, group: list, damping: Tensor, t: Tensor, outputs: list, cotangents: list) -> None:
        """The coefficients and times of steps as functions of γ and t, and the gradients with respect to them."""
        grid, method = self.stepper.grid, self.stepper.method
        steps = [step for step, _, _ in group]
        sizes, times = grid.affine_of(t, steps, method.nodes if self.by_times else ())
        if any(g is not None for _, g, _ in group):
            sizes = align(grid.for_rows(sizes), damping)
            matrix = method.matrix(damping, sizes)
            by_matrix = _filled([g for _, g, _ in group]).to(matrix)
            outputs.append(matrix)
            cotangents.append(by_matrix.sum_to_size(matrix.shape))
        if any(g is not None for _, _, g in group):
            by_times = _filled([g for _, _, g in group]).to(times).view(len(group), *times.shape[:1], *times.shape[2:])
            outputs.append(times)
            cotangents.append(by_times.movedim(0, 1))


def _filled(gradients: list[Tensor | None]) -> Tensor:
    """Stacked, with zeros for those that are None."""
    known = next(g for g in gradients if g is not None)
    return torch.stack([torch.zeros_like(known) if g is None else g for g in gradients])


class Checkpoint(torch.autograd.Function):
    """The gradient of the accepted steps from the points between them: the backward pass takes each step again."""

    @staticmethod
    def forward(
        ctx: Any,
        stepper: Stepper,
        context: ForwardContext,
        first: Tensor | None,
        t: Tensor,
        damping: Tensor,
        rows: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        """The rows of the state at the output times, (T, state rows, ...)."""
        record: list[tuple[Step, Tensor, StepGraph | None]] = []
        point = rows if first is None else torch.cat([rows, first[None]])
        trajectory = integrate(stepper, point, damping, record=record)
        ctx.record = record
        remember(ctx, stepper, context, t, damping, leaves, rows)
        return trajectory

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Undo each step, from the last to the first: by its graph where that was kept, else taking it again."""
        refuse_double_backward("checkpoint")
        stepper = ctx.stepper
        n = stepper.method.state_rows
        rows, *_ = ctx.saved_tensors
        accumulator = GradientAccumulator(ctx)
        carried = torch.zeros(n + stepper.method.carries, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        with ctx.context(), no_autocast(gradient.device.type):
            left = len(ctx.record)
            while left:
                step, point, graph = ctx.record[left - 1]
                undo = _undo_all if isinstance(step, list) else _undo
                carried = undo(accumulator, step, point, carried, gradient, graph)
                undone = range(left - (1 if graph is None else len(graph.steps)), left)
                for i in undone:  # a graph serves once; after that its steps are taken again
                    ctx.record[i] = (*ctx.record[i][:2], None)
                left = undone.start
            if stepper.method.carries:
                carried = _undo_start(accumulator, rows, carried)
        damping, t = accumulator.finish()
        return None, None, None, t, damping, carried + gradient[0], *accumulator.gradients


def solve_and_save(
    ctx: Any,
    stepper: Stepper,
    context: ForwardContext,
    first: Tensor | None,
    t: Tensor,
    damping: Tensor,
    rows: Tensor,
    *leaves: Tensor,
) -> Tensor:
    """The forward pass of the gradients that store the outputs alone: (T, state rows, ...)."""
    trajectory = integrate(stepper, rows if first is None else torch.cat([rows, first[None]]), damping)
    remember(ctx, stepper, context, t, damping, leaves, trajectory.clone())  # the caller may change his in place
    return trajectory


def remember(
    ctx: Any,
    stepper: Stepper,
    context: ForwardContext,
    t: Tensor,
    damping: Tensor,
    leaves: Sequence[Tensor],
    state: Tensor,
) -> None:
    """What a backward pass needs; the tensors that it evaluates with are saved for the check that they are the same."""
    context.remember_masks()
    ctx.stepper, ctx.context, ctx.leaves = stepper, context, list(leaves)
    ctx.clock_t, ctx.damping = t.detach(), damping.detach()
    others = {id(tensor): tensor for _, _, tensor in context.tensors if not tensor.is_inference()}
    ctx.save_for_backward(state, *({id(leaf): leaf for leaf in leaves} | others).values())


def _undo(
    accumulator: GradientAccumulator,
    step: Step,
    point: Tensor,
    carried: Tensor,
    gradient: Tensor,
    graph: StepGraph | None = None,
) -> Tensor:
    """The gradient with respect to the point before a step, from that with respect to the point after it."""
    stepper = accumulator.stepper
    n = stepper.method.state_rows
    if isinstance(step.reached, Tensor):
        carried = torch.cat([carried[:n] + _at_reached(step, gradient, stepper.samples()), carried[n:]])
    elif step.reached is not None:
        carried = torch.cat([carried[:n] + gradient[step.reached], carried[n:]])
    stayed = None
    if step.accepted is not None:
        moved = _marks(step.accepted, carried, stepper.samples())
        stayed, carried = torch.where(moved, 0.0, carried), torch.where(moved, carried, 0.0)
    stepper.tally.add("accepted", 1 if graph is None else len(graph.steps))
    pulled = None
    if graph is None:
        stepper.tally.add("evaluation", stepper.method.evaluations)
        if stepper.compiled is not None and not step.outputs:
            matrix, times = stepper.matrix(step, accumulator.damping), stepper.times(step).detach()
            pulled = accumulator.pull_compiled("pull", (), point.detach(), matrix, times, carried)
    if pulled is not None:
        before, *found = pulled
        accumulator.steps.append((step, *found))
    else:
        graph = accumulator.graph(step, point) if graph is None else graph
        inner = [s for s in graph.steps if s.outputs]
        cotangents = [carried]
        for s, columns in zip(inner, graph.columns, strict=True):
            cotangents.append(accumulator.interpolated(s, columns, gradient))
        (before,) = accumulator.pull_back(graph, cotangents)
    return before if stayed is None else before + stayed


def _undo_all(
    accumulator: GradientAccumulator,
    steps: list[Step],
    points: list[Tensor],
    carried: Tensor,
    gradient: Tensor,
    graph: None,
) -> Tensor:
    """:func:`_undo` for all the equal steps between two outputs, which were taken in one compiled program."""
    stepper = accumulator.stepper
    n = stepper.method.state_rows
    start = torch.cat([carried[:n] + gradient[steps[-1].reached], carried[n:]])
    times = [stepper.times(step).detach() for step in steps]
    matrix = stepper.matrix(steps[0], accumulator.damping)
    pulled = accumulator.pull_compiled("pull_grid", (len(steps),), [p.detach() for p in points], matrix, times, start)
    if pulled is None:
        for step, point in zip(reversed(steps), reversed(points), strict=True):
            carried = _undo(accumulator, step, point, carried, gradient)
        return carried
    stepper.tally.add("evaluation", len(steps) * stepper.method.evaluations)
    stepper.tally.add("accepted", len(steps))
    carried, by_matrix, by_times = pulled
    for step, of_step in zip(steps, by_times, strict=True):
        accumulator.steps.append((step, by_matrix, of_step))
        by_matrix = None  # equal steps have the same coefficients: the sum is with the first
    return carried


def _undo_start(accumulator: GradientAccumulator, rows: Tensor, carried: Tensor) -> Tensor:
    """The gradient with respect to the rows of the state at the start, from that with respect to the first point."""
    stepper = accumulator.stepper
    n = stepper.method.state_rows
    graph, stepper.first = stepper.first, None
    if graph is None:
        stepper.tally.add("evaluation")
        t = stepper.grid.time_of(0).detach().requires_grad_(accumulator.needs_t)
        x = rows[0].detach().requires_grad_()
        with torch.enable_grad(), set_random_state(stepper.random_start, rows.device):
            f = stepper.term.evaluate(t, x)
        graph = StepGraph([x, t] if accumulator.needs_t else [x], [], f)
    if not graph.output.requires_grad:
        return carried[:n]
    by_x, *by_t = accumulator.pull_back(graph, [carried[n]])
    accumulator.first_time = by_t[0] if by_t else None
    return carried[:n] if by_x is None else torch.cat([(carried[0] + by_x)[None], carried[1:n]])


def _marks(marks: Tensor, point: Tensor, batch_dim: int) -> Tensor:
    """Marks (batch,) to broadcast with a point (rows, ...), whose rows have the batch at a dimension."""
    return marks.view(*[1] * (batch_dim + 1), -1, *[1] * (point.dim() - batch_dim - 2))


def _at_reached(step: Step, gradient: Tensor, batch_dim: int) -> Tensor:
    """The outputs' gradients of the samples that a step brings to an output time, 0 for the others."""
    index = (step.interval + 1).clamp(max=len(gradient) - 1)
    rows = gradient.movedim(batch_dim + 2, 1)[index, torch.arange(len(index), device=index.device)]
    rows = rows.movedim(0, batch_dim + 1)
    return torch.where(_marks(step.reached, rows, batch_dim), rows, 0.0)


def refuse_double_backward(name: str) -> None:
    """These gradients are numbers, not functions."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"gradient={name!r} gives first derivatives only, and create_graph=True asks for more. "
            "Fix: gradient='direct'."
        )
