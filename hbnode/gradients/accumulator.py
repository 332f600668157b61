"""What the backward passes of ``"checkpoint"`` and ``"reversible"`` add up, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode._recompute import set_random_state
from hbnode.gradients.forward_pass import ForwardPass, required
from hbnode.solvers.explicit_method import interpolate
from hbnode.solvers.recorder import RecordedStep, StepGraph
from hbnode.solvers.time_grid import AnyStep, align


class GradientAccumulator:
    """The gradients of the leaves, and those of the coefficients and times of each step.

    Arguments:
        forward: the forward pass.
        needs_t: whether the output times require a gradient.
        needs_damping: whether γ does.
    """

    def __init__(self, forward: ForwardPass, needs_t: bool, needs_damping: bool) -> None:
        self.stepper, self.plan, self.leaves = forward.stepper, forward.plan, forward.leaves
        self.coefficients = forward.stepper.coefficients
        self.t = forward.stepper.grid.t.detach()
        self.needs_t, self.needs_damping = needs_t, needs_damping
        self.gradients: list[Tensor | None] = [None] * len(self.leaves)
        self.steps: list[tuple[AnyStep, Tensor | None, Tensor | None]] = []
        self.blends: list[tuple[AnyStep, Tensor]] = []
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # of the coefficients of equal steps
        self.first_time: Tensor | None = None  # gradient with respect to the time of the first evaluation

    def leaves_of(self, step: AnyStep) -> tuple[Tensor, Tensor]:
        """The coefficients and stage times of a step, as leaves if their gradients are needed.

        Steps of one size share a leaf, except where times have gradients: their sizes depend on other times then.
        """
        matrix, times = self.coefficients.matrix(step), self.coefficients.times(step)
        if self.plan.by_matrix:
            kept, leaf = self._leaves.get(id(matrix), (None, None))
            if leaf is None or kept is not matrix or self.needs_t:
                leaf = matrix.detach().requires_grad_()
                self._leaves[id(matrix)] = (matrix, leaf)
            matrix = leaf
        return matrix, times.detach().requires_grad_() if self.plan.by_times else times

    def graph(self, stretch: Sequence[RecordedStep]) -> StepGraph:
        """Take steps in a row again, with their graph."""
        point = stretch[0].point.detach().requires_grad_()
        graph = StepGraph([point], (), point)
        for step, *_ in stretch:
            matrix, times = self.leaves_of(step)
            with set_random_state(step.random, point.device):
                stepped = self.plan.step(self.stepper, graph.output, step, (matrix, times), error=False, again=True)
            is_new = self.plan.by_matrix and not any(matrix is leaf for _, leaf, _ in graph.tensors)
            leaves = (step, matrix if is_new else None, times if self.plan.by_times else None)
            columns = graph.columns if stepped.columns is None else (*graph.columns, stepped.columns)
            graph = StepGraph([point], (*graph.tensors, leaves), stepped.point, columns, (*graph.steps, step))
        return graph

    def pull_back(self, graph: StepGraph, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients with respect to the points; those of the leaves are added up, those of the steps kept, here."""
        outputs = [graph.output, *graph.columns]
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]  # some may have been frozen since
        tensors = [x for _, *of_step in graph.tensors for x in of_step if x is not None]
        n, k = len(graph.points), len(graph.points) + len(tensors)
        found = torch.autograd.grad(outputs, [*graph.points, *tensors, *leaves], cotangents, allow_unused=True)
        of_leaves = iter(found[k:])
        self.add([next(of_leaves) if leaf.requires_grad else None for leaf in self.leaves])
        of_tensors = iter(found[n:k])
        for step, *of_step in graph.tensors:
            by_matrix, by_times = (None if x is None else next(of_tensors) for x in of_step)
            self.steps.append((step, by_matrix, by_times))
        return list(found[:n])

    def interpolated(self, step: AnyStep, columns: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with respect to a step's columns, from that of its outputs; that of their blend is kept."""
        with torch.enable_grad():
            columns = columns.detach().requires_grad_()
            blend = required(step.blend, "coefficients of its outputs").detach().requires_grad_(self.plan.by_matrix)
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
            flags = (self.plan.by_matrix, self.plan.by_times, *flags)
            pulled = self.stepper.run_compiled(program, flags, points, matrix, times, parameters, carried)
        if pulled is None:
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
        shared = self.coefficients.number is not None and not self.stepper.grid.has_batch and not self.needs_t
        by_numbers = self._by_numbers() if shared else None
        if by_numbers is not None and not self.blends:
            return by_numbers, None
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        groups: dict[bool, list] = defaultdict(list)
        for entry in self.steps:
            groups[entry[0].end is None].append(entry)
        with torch.enable_grad():
            damping = self.coefficients.damping.detach().requires_grad_(self.needs_damping)
            t = self.t.detach().requires_grad_(self.needs_t)
            if by_numbers is None:
                for group in groups.values():
                    self._contract(group, damping, t, outputs, cotangents)
            if self.blends:
                outputs.extend(self.coefficients.blends([step for step, _ in self.blends], damping, t))
                cotangents.extend(g for _, g in self.blends)
        wanted = [x for x in (damping, t) if x.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if outputs:
            found = torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True)
        by_damping = found[0] if self.needs_damping else None
        if by_numbers is not None:
            by_damping = by_numbers if by_damping is None else by_numbers + by_damping
        by_t = found[-1] if self.needs_t else None
        if self.first_time is not None:
            by_t = torch.zeros_like(self.t) if by_t is None else by_t
            by_t[..., 0] += self.first_time.reshape(by_t[..., 0].shape).to(by_t)
        return by_damping, by_t

    def _by_numbers(self) -> Tensor | None:
        """The gradient with respect to γ, a number: that of each size of step times the derivative of its coefficients.

        Several steps of one size are added up first, and all sizes take one synchronisation.
        """
        if not self.needs_damping:
            return None
        totals: dict[tuple[float, int], Tensor] = {}
        for step, by_matrix, _ in self.steps:
            size = self.stepper.grid.size(step)
            if by_matrix is not None and size is not None:
                key = size, len(by_matrix)
                totals[key] = totals[key] + by_matrix if key in totals else by_matrix
        if not totals:
            return torch.zeros_like(self.coefficients.damping)
        slopes = torch.cat([self.coefficients.slope(size, total) for (size, _), total in totals.items()])
        return torch.dot(torch.cat([*totals.values()]).to(slopes), slopes)

    def _of_matrix(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of coefficients as that of the matrix that they are the elements of."""
        if gradient is None or gradient.dim() > 1 or self.coefficients.number is None:
            return gradient
        return self.stepper.method.unpacked(gradient)

    def _contract(self, group: list, damping: Tensor, t: Tensor, outputs: list, cotangents: list) -> None:
        """The coefficients and times of steps as functions of γ and t, and the gradients with respect to them."""
        grid, method = self.stepper.grid, self.stepper.method
        steps = [step for step, _, _ in group]
        sizes, times = grid.affine_of(t, steps, method.nodes if self.plan.by_times else ())
        if any(g is not None for _, g, _ in group):
            sizes = align(grid.for_rows(sizes), damping)
            matrix = method.matrix(damping, sizes)
            by_matrix = _filled([self._of_matrix(g) for _, g, _ in group]).to(matrix)
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
