"""The gradients of a native solve that evaluate f again: ``"checkpoint"`` and ``"reversible"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode._closures import closed_over_leaves, refuse_unknown
from hbnode.errors import ReversalError
from hbnode.gradients.forward_pass import refuse_double_backward
from hbnode.sde.methods import SPLITTINGS, Point
from hbnode.sde.run import ForwardPass, Run
from hbnode.solvers.stepper import no_autocast

REVERSAL_TOLERANCE = 1e-4  # how far from where it began an undone interval may end, relative to the state

Gradients = list[Tensor | None]


def check_growth(run: Run, damping: Tensor, dtype: torch.dtype) -> None:
    """Refuse to undo a decay by e^{-γT} that takes all digits."""
    longest = max((end - start for start, end in zip(run.grid.t[:-1], run.grid.t[1:], strict=True)), default=0.0)
    strongest = float(damping.detach().max()) if damping.numel() else 0.0
    reach = math.log(REVERSAL_TOLERANCE / torch.finfo(dtype).eps)
    if reach < 0:
        raise run.failure(
            ReversalError,
            f"{dtype} carries {torch.finfo(dtype).eps:.1g}, and steps are to be undone to {REVERSAL_TOLERANCE:g} of "
            "the state. Fix: gradient='checkpoint', or a state and an SDE of float32",
            run.grid.t[0],
        )
    if strongest * longest > reach:
        raise run.failure(
            ReversalError,
            f"undoing the damping of {strongest:g} over {longest:g} between two output times grows rounding errors by "
            f"e^{strongest * longest:.3g}, more than {dtype} carries; expected at most e^{reach:.3g}. "
            "Fix: gradient='checkpoint', float64, or output times closer together",
            run.grid.t[0],
        )


def _with_graph(forward: ForwardPass, evaluate: Callable[[], Point], inputs: Sequence[Tensor]) -> Point:
    """The value of a function with its graph, which may hold no leaf that the first evaluation did not use."""
    with torch.enable_grad():
        if not forward.checks_closures:
            return evaluate()
        found, value = closed_over_leaves(evaluate, inputs)
    refuse_unknown(found, frozenset(map(id, forward.leaves)))
    return value


def _pull_back(
    forward: ForwardPass, value: Point, inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Gradients, Gradients]:
    """The vector-Jacobian product of a graph, for its inputs and for the leaves."""
    pairs = [(x, g) for x, g in zip(value, cotangents, strict=True) if g is not None and x.requires_grad]
    if not pairs:
        return [None] * len(inputs), [None] * len(forward.leaves)
    outputs, weights = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [*inputs, *forward.leaves], weights, allow_unused=True)
    return list(found[: len(inputs)]), list(found[len(inputs) :])


def _save(ctx: Any, forward: ForwardPass, *tensors: Tensor) -> None:
    """Save for the backward pass; autograd checks that the tensors of the evaluations are not changed."""
    forward.context.remember_masks()
    ctx.forward_pass, ctx.own = forward, len(tensors)
    others = {id(tensor): tensor for _, _, tensor in forward.context.tensors if not tensor.is_inference()}
    ctx.save_for_backward(*tensors, *({id(leaf): leaf for leaf in forward.leaves} | others).values())


def _size(state: Sequence[Tensor]) -> Tensor:
    """The root mean square of h and m together."""
    return torch.stack([x.square().sum() for x in state]).sum().div(max(state[0].numel(), 1)).sqrt()


def _add(total: Gradients, more: Gradients) -> None:
    """Add gradients to those so far; None is nothing."""
    for i, gradient in enumerate(more):
        if gradient is not None:
            so_far = total[i]
            total[i] = gradient if so_far is None else so_far + gradient


class Checkpoint(torch.autograd.Function):
    """The exact gradient from the points between the steps: each step is taken again, with its noise drawn again."""

    @staticmethod
    def forward(
        ctx: Any, forward: ForwardPass, coefficients: Tensor, h: Tensor, m: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The trajectories of h and m, (T, ...) each."""
        points: list[Point] = []
        trajectory = forward.run.integrate(coefficients, h, m, lambda _, point: points.append(point))
        _save(ctx, forward, coefficients, *(x for point in points for x in point))
        return trajectory

    @staticmethod
    def backward(ctx: Any, by_h: Tensor, by_m: Tensor) -> tuple[Tensor | None, ...]:
        """Each step again, from the last to the first."""
        refuse_double_backward("checkpoint")
        forward: ForwardPass = ctx.forward_pass
        run, (coefficients, *kept) = forward.run, ctx.saved_tensors[: ctx.own]
        rows = 2 + run.method.carries
        needed = ctx.needs_input_grad[1]
        by_coefficients = torch.zeros_like(coefficients) if needed else None
        leaves: Gradients = [None] * len(forward.leaves)
        carried: Gradients = [torch.zeros_like(by_h[0]), torch.zeros_like(by_m[0]), None][:rows]
        with forward.context(), no_autocast(by_h.device.type):
            for step in reversed(range(len(run.grid))):
                interval, reached = run.grid.intervals[step], run.grid.outputs[step]
                if reached is not None:
                    _add(carried, [by_h[reached], by_m[reached]])
                point = tuple(x.detach().requires_grad_() for x in kept[step * rows : (step + 1) * rows])
                own = coefficients[interval].detach().requires_grad_(needed)

                def again(point: Point = point, own: Tensor = own, step: int = step) -> Point:
                    packed = run.method.pack(own)
                    return run.method.step(point, packed, run.normals(step), run.times[step], run.evaluate)

                inputs = [*point, own] if needed else [*point]
                found, more = _pull_back(forward, _with_graph(forward, again, inputs), inputs, carried)
                run.tally.add("accepted")
                carried = found[:rows]
                _add(leaves, more)
                if by_coefficients is not None and (by_own := found[rows]) is not None:
                    by_coefficients[interval] += by_own
            _undo_start(forward, kept, carried, leaves)
        _add(carried, [by_h[0], by_m[0]])
        return None, by_coefficients, carried[0], carried[1], *leaves


def _undo_start(forward: ForwardPass, kept: Sequence[Tensor], carried: Gradients, leaves: Gradients) -> None:
    """The gradient of the first evaluation, of a method that carries its value."""
    run = forward.run
    if not run.method.carries or not len(run.grid) or carried[2] is None:
        return
    h = kept[0].detach().requires_grad_()
    value = _with_graph(forward, lambda: (run.evaluate(run.start_time(), h),), [h])
    (by_h,), more = _pull_back(forward, value, [h], [carried[2]])
    _add(carried, [by_h])
    _add(leaves, more)


class Reversible(torch.autograd.Function):
    """The exact gradient of a splitting from the outputs alone: its steps are undone, with their noise drawn again."""

    @staticmethod
    def forward(
        ctx: Any, forward: ForwardPass, coefficients: Tensor, h: Tensor, m: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The trajectories of h and m, (T, ...) each."""
        trajectory = forward.run.integrate(coefficients, h, m)
        _save(ctx, forward, coefficients, *(x.clone() for x in trajectory))  # the user may change the output in place
        return trajectory

    @staticmethod
    def backward(ctx: Any, by_h: Tensor, by_m: Tensor) -> tuple[Tensor | None, ...]:
        """Undo each step, from the last to the first, starting anew from every output."""
        refuse_double_backward("reversible")
        forward: ForwardPass = ctx.forward_pass
        coefficients, *outputs = ctx.saved_tensors[: ctx.own]
        undoing = _Undoing(forward, coefficients, outputs, (by_h, by_m), ctx.needs_input_grad[1])
        with forward.context(), no_autocast(by_h.device.type):
            undoing.run_back()
        return None, undoing.by_coefficients, undoing.by_h, undoing.by_m, *undoing.leaves


class _Undoing:
    """The backward pass of :class:`Reversible`: the state and the gradient with respect to it, on their way back.

    Flights and kicks are undone one by one. A kick is m ← m + w f(h, t) with h as it is, so f is evaluated once.
    """

    def __init__(
        self,
        forward: ForwardPass,
        coefficients: Tensor,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        needed: bool,
    ) -> None:
        self.forward, self.solve = forward, forward.run
        self.method = SPLITTINGS[self.solve.name]
        self.outputs, self.gradients = outputs, gradients
        self.packed = [one.unbind(0) for one in coefficients.unbind(0)]
        self.by_coefficients = torch.zeros_like(coefficients) if needed else None
        self.leaves: Gradients = [None] * len(forward.leaves)
        (self.h, self.m), (self.by_h, self.by_m) = (x[-1] for x in outputs), (x[-1] for x in gradients)
        self.size = _size((self.h, self.m))  # of the state where the interval ends
        self.errors: list[Tensor] = []

    def run_back(self) -> None:
        """All steps."""
        grid, two = self.solve.grid, self.method.flights == 2
        for step in reversed(range(len(grid))):
            interval, reached = grid.intervals[step], grid.outputs[step]
            normals = self.solve.normals(step).unbind(0)
            if two:
                if reached is not None and reached < len(grid.t) - 1:
                    self._land(reached)
                self._flight(interval, normals[2:])
                self._kick(self.solve.times[step][0], before=interval)
                self._flight(interval, normals[:2])
            else:
                after = grid.intervals[step + 1] if step + 1 < len(grid) else None
                self._kick(self.solve.times[step][0], before=interval, after=after, reached=reached)
                self._flight(interval, normals)
            self.solve.tally.add("accepted")
        if len(grid) and not two:
            self._kick(self.solve.start_time(), after=grid.intervals[0])
        if len(grid):
            self._land(0)
            self._check_errors()

    def _land(self, output: int) -> None:
        """Go on from an output that was stored, and add its gradient."""
        stored = [x[output] for x in self.outputs]
        size = _size(stored)
        distance = _size((self.h - stored[0], self.m - stored[1]))
        self.errors.append(distance / torch.maximum(size, self.size).clamp(min=1e-12))  # a solve may start from 0
        self.size = size
        self.h, self.m = stored
        self.by_h, self.by_m = self.by_h + self.gradients[0][output], self.by_m + self.gradients[1][output]

    def _check_errors(self) -> None:
        """Whether the steps of all intervals were undone."""
        worst = float(torch.stack(self.errors).max())
        if not worst <= REVERSAL_TOLERANCE:
            raise self.solve.failure(
                ReversalError,
                f"the steps, undone, end {worst:.2g} (relative) away from where they began: rounding errors grew too "
                "much. Fix: gradient='checkpoint', float64, output times closer together, or less damping",
                self.solve.grid.t[0],
            )

    def _flight(self, interval: int, normals: Sequence[Tensor]) -> None:
        packed = self.packed[interval]
        a, b, *_ = packed
        self.h, self.m = self.method.undo(self.h, self.m, packed, normals)
        if self.by_coefficients is not None:
            terms = [self.by_h * self.m, self.by_m * self.m, self.by_m * normals[0]]
            terms += [self.by_h * normal for normal in normals]
            own = self.by_coefficients[interval]
            for i, term in enumerate(terms):
                own[i] += term.sum_to_size(a.shape) if a.dim() else term.sum()
        self.by_m = a * self.by_h + b * self.by_m

    def _kick(
        self, t: Tensor, *, before: int | None = None, after: int | None = None, reached: int | None = None
    ) -> None:
        """Undo the kick that ends one step and the one that begins the next, which share a value of f.

        Arguments:
            t: the time.
            before: the interval of the step that ends here.
            after: that of the step that begins here.
            reached: the output between the two kicks, if any.
        """
        last = len(self.solve.grid.t) - 1
        landing = None if reached == last else reached  # the backward pass begins at the last
        h = (self.h if landing is None else self.outputs[0][landing]).detach().requires_grad_()
        value = _with_graph(self.forward, lambda: (self.solve.evaluate(t, h),), [h])
        f, by_f = value[0].detach(), torch.zeros_like(h)
        if after is not None:
            weight = self.packed[after][-1]
            by_f, self.m = weight * self.by_m, torch.addcmul(self.m, weight, f, value=-1)
        if landing is not None:
            self._land(landing)
        if before is not None:
            weight = self.packed[before][-1]
            by_f, self.m = torch.addcmul(by_f, weight, self.by_m), torch.addcmul(self.m, weight, f, value=-1)
        (by_h,), leaves = _pull_back(self.forward, value, [h], [by_f])
        self.by_h = self.by_h if by_h is None else self.by_h + by_h
        _add(self.leaves, leaves)
