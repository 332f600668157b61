"""``gradient="reversible"``: the backward pass of a splitting method undoes its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hbnode.errors import ReversalError
from hbnode.gradients.accumulator import GradientAccumulator
from hbnode.gradients.forward_pass import ForwardPass, refuse_double_backward, solve_and_save
from hbnode.solvers.failures import failure, start_time
from hbnode.solvers.recorder import StepGraph
from hbnode.solvers.splitting import Splitting
from hbnode.solvers.step_method import StepResult
from hbnode.solvers.stepper import Stepper, no_autocast
from hbnode.solvers.time_grid import Step

REVERSAL_TOLERANCE = 1e-3  # how far from where it began an undone interval may end, relative to the state


class Reversible(torch.autograd.Function):
    """The gradient of a splitting method whose steps are undone in the backward pass: it stores the outputs alone."""

    forward = staticmethod(solve_and_save)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Undo each step, from the last to the first, starting anew from every output."""
        refuse_double_backward("reversible")
        forward: ForwardPass = ctx.forward_pass
        stepper = forward.stepper
        trajectory, *_ = ctx.saved_tensors
        accumulator = GradientAccumulator(forward, *ctx.needs_input_grad[1:3])
        carried = torch.zeros_like(trajectory[0])
        steps = stepper.settings.steps or 1
        with forward.context(), no_autocast(gradient.device.type):
            for interval in reversed(range(stepper.grid.count)):
                point, carried = trajectory[interval + 1], carried + gradient[interval + 1]
                for i in reversed(range(steps)):
                    point, carried = _reverse(accumulator, Step(interval, i / steps, 1 / steps), point, carried)
                _check_return(stepper, point, trajectory, interval)
        damping, t = accumulator.finish()
        return None, t, damping, carried + gradient[0], *accumulator.gradients


def _reverse(accumulator: GradientAccumulator, step: Step, point: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """Undo a step: the point before it and the gradient with respect to it. One evaluation for each kick."""
    stepper = accumulator.stepper
    method, activation = stepper.method, stepper.term.activation
    assert isinstance(method, Splitting)
    matrix, times = accumulator.leaves_of(step)
    tensors = ((step, matrix if matrix.requires_grad else None, times if times.requires_grad else None),)
    drifts, decays, weights = method.pack(matrix.detach())
    h, m = point.detach().unbind(0)
    cotangent = carried

    def pull(output: Tensor, h: Tensor, m: Tensor) -> Tensor:
        found = accumulator.pull_back(StepGraph([h, m], tensors, output, (), (step,)), [cotangent])
        return torch.stack([torch.zeros_like(h) if x is None else x for x in found])

    for kick in reversed(range(method.evaluations)):
        with torch.no_grad():
            h = method.drift(h, m, -drifts[kick + 1], activation)
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            time = times[kick]

        def evaluate(time: Tensor = time, h: Tensor = h) -> StepResult:
            return StepResult(stepper.term.evaluate(time, h), None)

        f = accumulator.plan.evaluate(evaluate, (h, time)).point
        with torch.enable_grad():
            with_drifts, with_decays, with_weights = method.pack(matrix)
            m = ((m - weights[kick] * f.detach()) / decays[kick]).detach().requires_grad_()
            m_after = with_decays[kick] * m + with_weights[kick] * f
            h_after = method.drift(h, m_after, with_drifts[kick + 1], activation)
            output = torch.stack([h_after, m_after])
        cotangent = pull(output, h, m)
        h, m = h.detach(), m.detach()
    with torch.enable_grad():
        m = m.requires_grad_()
        h = method.drift(h, m, -drifts[0], activation).detach().requires_grad_()
        output = torch.stack([method.drift(h, m, method.pack(matrix)[0][0], activation), m])
    cotangent = pull(output, h, m)
    stepper.tally.add("evaluation", method.evaluations)
    stepper.tally.add("accepted")
    return torch.stack([h.detach(), m.detach()]), cotangent


def _check_return(stepper: Stepper, reached: Tensor, trajectory: Tensor, interval: int) -> None:
    """Whether the steps of an interval were undone within REVERSAL_TOLERANCE."""
    error, size = missed(stepper, reached, trajectory, interval)
    if not bool(error <= REVERSAL_TOLERANCE * size):
        raise failure(
            stepper,
            ReversalError,
            f"the steps, undone, end {float(error / size):.2g} (relative) away from where they began: rounding errors "
            "grew too much. Fix: gradient='checkpoint', float64, a shorter interval between outputs, or less damping",
            start_time(stepper, interval),
        )


def missed(stepper: Stepper, reached: Tensor, trajectory: Tensor, interval: int) -> tuple[Tensor, Tensor]:
    """By how much a way back through an interval missed its start, and the state's size at the larger of its ends.

    A solve may start from 0, where an error relative to the start would say nothing.
    """
    start, end = trajectory[interval], trajectory[interval + 1]
    size = torch.maximum(torch.linalg.vector_norm(start), torch.linalg.vector_norm(end)) + stepper.atol
    return torch.linalg.vector_norm(reached - start), size
