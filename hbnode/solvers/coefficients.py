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
_MOST_SIZES = 64  # of steps whose coefficients are kept


class StepCoefficients:
    """What a method multiplies the state and the values of f with, step by step.

    Arguments:
        method: whose coefficients they are.
        term: the equation; coefficients have the dtype of its state.
        grid: turns a step into its size and the times of its stages.
        damping: γ, in float64 on the grid's device.

    Attributes:
        number: γ where it is one number that is known on the host; None elsewhere.
    """

    def __init__(self, method: StepMethod, term: ODETerm, grid: TimeGrid, damping: Tensor) -> None:
        self.method, self.grid, self.damping = method, grid, damping
        self.template, self.wants_time = term.template, term.wants_time
        self._of_size: dict[tuple[float, bool], Tensor] = {}
        self._of_intervals: dict[int, tuple[Tensor, ...]] = {}
        self._packed: dict[tuple[int, bool], tuple[Tensor, Any]] = {}
        self._times: dict[tuple[int, float, float], Tensor] = {}
        self._no_times = term.template.new_zeros(len(method.nodes))
        self.number: float | None = None
        if not (damping.dim() or _torch_internals.is_active() or _torch_internals.in_forward_mode()):
            self.number = damping.item() if method.has_numbers else None

    def serves(self, damping: Tensor) -> bool:
        """Whether these are the coefficients for a γ without a gradient."""
        return self.number is not None and not damping.dim() and damping.item() == self.number

    def matrix(self, step: AnyStep, *, error: bool = False, differentiable: bool = False) -> Tensor:
        """The coefficients of a step, in the state's dtype, to be packed with or without those of its error.

        They are differentiable in γ, and in the times if asked.
        """
        grid, template = self.grid, self.template
        if step.whole is not None:
            return self._of_whole_interval(step.whole, differentiable)
        size = None if differentiable else grid.size(step)
        if size is None:
            sizes, _ = grid.affine(grid.t, step.interval, step.start, step.size, (), step.end)
            return self.method.matrix(self.damping, grid.for_rows(sizes)).to(template)
        error &= self.number is not None  # else one matrix serves both
        matrix = self._of_size.get((size, error))
        if matrix is None:
            matrix = _kept(self._of_size, (size, error), self._of_number(size, error))
        return matrix

    def _of_number(self, size: float, error: bool) -> Tensor:
        """The coefficients of a step of one size for all samples."""
        template = self.template
        if self.number is None:
            sizes = torch.tensor(size, dtype=torch.float64, device=self.grid.t.device)
            return self.method.matrix(self.damping, sizes).to(template)
        if self.damping.requires_grad and torch.is_grad_enabled():
            return _OfDamping.apply(self.damping, self.method, self.number, size, error, 0, template)
        return self.method.of_numbers(self.number, size, error=error).to(template)

    def slope(self, size: float, like: Tensor) -> Tensor:
        """The derivative of :meth:`matrix` with respect to γ, where that is a number: in float64, on the host.

        It has the elements of ``like``, those of the error or not.
        """
        assert self.number is not None
        slope = self.method.of_numbers(self.number, size, error=False, order=1)
        return slope if len(slope) == len(like) else self.method.of_numbers(self.number, size, error=True, order=1)

    def _of_whole_interval(self, interval: int, differentiable: bool) -> Tensor:
        """The coefficients of a step over a whole interval, computed for many intervals at once."""
        group = interval // TOGETHER
        if group not in self._of_intervals:
            first = group * TOGETHER
            t = self.grid.t if differentiable else self.grid.t.detach()
            sizes = self.grid.for_rows(t[..., first : first + TOGETHER + 1].diff().movedim(-1, 0))
            self._of_intervals[group] = self.method.matrix(self.damping, sizes).to(self.template).unbind(0)
        return self._of_intervals[group][interval % TOGETHER]

    def pack(self, step: AnyStep, matrix: Tensor, *, error: bool) -> Any:
        """The coefficients in the form that the method uses, with their graph; that of equal steps is one."""
        if step.whole is not None or _torch_internals.is_active():
            return self.method.pack(matrix, error=error)
        key = (id(matrix), error)
        kept, packed = self._packed.get(key, (None, None))
        if kept is not matrix:
            _, packed = _kept(self._packed, key, (matrix, self.method.pack(matrix, error=error)))
        return packed

    def made_of(self, step: AnyStep, matrix: Tensor, *, error: bool) -> list[Tensor]:
        """The tensors of :meth:`pack`. Their graph is older than the step if one before had the same coefficients."""
        packed = self.pack(step, matrix, error=error)
        return [tensor for part in packed for tensor in ((part,) if isinstance(part, Tensor) else part)]

    def times(self, step: AnyStep, *, differentiable: bool = False) -> Tensor:
        """Times of the stages of a step, (stages, ...); zeros if the field does not take the time."""
        if not self.wants_time:
            return self._no_times
        grid, nodes = self.grid, self.method.nodes
        if isinstance(step, Step) and grid.times and not differentiable:
            if step.end is not None:
                return grid.stages(step, nodes)
            key = (step.interval, step.start, step.size)
            times = self._times.get(key)
            times = _kept(self._times, key, grid.stages(step, nodes)) if times is None else times
            return times.clone()  # f may change what it is given
        _, times = grid.affine(grid.t, step.interval, step.start, step.size, nodes, step.end)
        return grid.for_parts(times).to(self.template)

    def blends(self, steps: Sequence[AnyStep], damping: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """The coefficients of the outputs inside of each of these steps, differentiable in γ and ``t``."""
        blend = self.method.blend(damping, *self.grid.inside(t, steps)).to(self.template)
        return blend.split([len(step.outputs) for step in steps])


class _OfDamping(torch.autograd.Function):
    """The coefficients of a step as a function of γ, a number: computed on the host, differentiable at any order."""

    @staticmethod
    def forward(
        ctx: Any, damping: Tensor, method: StepMethod, number: float, size: float, error: bool, order: int, like: Tensor
    ) -> Tensor:
        ctx.save_for_backward(damping)
        ctx.rest = (method, number, size, error, order)
        return method.of_numbers(number, size, error=error, order=order).to(like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (damping,), (method, number, size, error, order) = ctx.saved_tensors, ctx.rest
        gradient = gradient.to(torch.float64)
        if torch.is_grad_enabled():
            slope = _OfDamping.apply(damping, method, number, size, error, order + 1, gradient)
        else:
            slope = method.of_numbers(number, size, error=error, order=order + 1).to(gradient.device)
        return torch.dot(gradient, slope).to(damping), None, None, None, None, None, None


def _kept(values: dict, key: Any, value: Any) -> Any:
    """``value``, kept under a key; as the coefficients of constant damping outlive a solve, not too many are."""
    if len(values) >= _MOST_SIZES:
        values.clear()
    values[key] = value
    return value
