"""The coefficients and stage times of the steps of a solve; those of equal steps are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode.solvers.ode_term import ODETerm
from hbnode.solvers.step_method import StepMethod
from hbnode.solvers.time_grid import AnyStep, Step, TimeGrid

TOGETHER = 64  # intervals whose coefficients are computed at once


class StepCoefficients:
    """What a method multiplies the state and the values of f with, step by step.

    Arguments:
        method: whose coefficients they are.
        term: the equation; coefficients have the dtype of its state.
        grid: turns a step into its size and the times of its stages.
        damping: γ, in float64 on the grid's device.
    """

    def __init__(self, method: StepMethod, term: ODETerm, grid: TimeGrid, damping: Tensor) -> None:
        self.method, self.term, self.grid, self.damping = method, term, grid, damping
        self._of_size: dict[float, Tensor] = {}
        self._of_intervals: dict[int, tuple[Tensor, ...]] = {}
        self._packed: dict[tuple[float, bool], Any] = {}
        self.leaf: Tensor | None = None  # γ as a leaf, and
        self.graphs: dict[float, Tensor] = {}  # the coefficients of each size of step as functions of it
        self._no_times = term.template.new_zeros(len(method.nodes))

    def keep_graphs(self) -> None:
        """Keep the coefficients as functions of γ, so that a backward pass can differentiate them."""
        self.leaf = self.damping.detach().requires_grad_()

    def matrix(self, step: AnyStep, *, differentiable: bool = False) -> Tensor:
        """The coefficients of a step, in the state's dtype; differentiable in the times if asked."""
        grid, template = self.grid, self.term.template
        if step.whole is not None:
            return self._of_whole_interval(step.whole, differentiable)
        size = None if differentiable else grid.size(step)
        if size is None:
            sizes, _ = grid.affine(grid.t, step.interval, step.start, step.size, (), step.end)
            return self.method.matrix(self.damping, grid.for_rows(sizes)).to(template)
        if size not in self._of_size:
            sizes = torch.tensor(size, dtype=torch.float64, device=grid.t.device)
            if self.leaf is None:
                matrix = self.method.matrix(self.damping, sizes)
            else:
                with torch.enable_grad():
                    self.graphs[size] = self.method.matrix(self.leaf, sizes)
                matrix = self.graphs[size].detach()
            self._of_size[size] = matrix.to(template)
        return self._of_size[size]

    def _of_whole_interval(self, interval: int, differentiable: bool) -> Tensor:
        """The coefficients of a step over a whole interval, computed for many intervals at once."""
        group = interval // TOGETHER
        if group not in self._of_intervals:
            first = group * TOGETHER
            t = self.grid.t if differentiable else self.grid.t.detach()
            sizes = self.grid.for_rows(t[..., first : first + TOGETHER + 1].diff().movedim(-1, 0))
            self._of_intervals[group] = self.method.matrix(self.damping, sizes).to(self.term.template).unbind(0)
        return self._of_intervals[group][interval % TOGETHER]

    def pack(self, step: AnyStep, matrix: Tensor, *, error: bool) -> Any:
        """The coefficients in the form that the method uses."""
        size = None if matrix.requires_grad else self.grid.size(step)
        if size is None or _torch_internals.is_active():
            return self.method.pack(matrix, error=error)
        key = (size, error)
        if key not in self._packed:
            self._packed[key] = self.method.pack(matrix, error=error)
        return self._packed[key]

    def times(self, step: AnyStep, *, differentiable: bool = False) -> Tensor:
        """Times of the stages of a step, (stages, ...); zeros if the field does not take the time."""
        if not self.term.wants_time:
            return self._no_times
        grid, nodes = self.grid, self.method.nodes
        if isinstance(step, Step) and grid.times and not differentiable:
            return grid.stages(step, nodes)
        _, times = grid.affine(grid.t, step.interval, step.start, step.size, nodes, step.end)
        return grid.for_parts(times).to(self.term.template)

    def blends(self, steps: Sequence[AnyStep], damping: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """The coefficients of the outputs inside of each of these steps, differentiable in γ and ``t``."""
        blend = self.method.blend(damping, *self.grid.inside(t, steps)).to(self.term.template)
        return blend.split([len(step.outputs) for step in steps])
