"""What a forward pass hands to its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hbnode._recompute import ForwardContext, random_state, restore_random_state
from hbnode.solvers.loops import integrate, integrate_to_end
from hbnode.solvers.recorder import BackwardPlan, RecordedProgram, RecordedStep, StepGraph, StepRecorder
from hbnode.solvers.stepper import Rows, Stepper

Value = TypeVar("Value")


@dataclass
class ForwardPass:
    """A forward pass, and what its backward pass needs of it.

    Attributes:
        stepper: took the steps.
        plan: what the backward pass will differentiate.
        context: modes, masks and tensors of the field's modules.
        leaves: the tensors that f depends on.
        first: the first point, if the method carries the value of f.
        first_graph: its graph, for one backward pass.
        random_start: the state of the generators before it, if f draws random numbers.
        steps: the accepted steps, if the backward pass recomputes them.
        end: whether the end of the solve is wanted alone.
    """

    stepper: Stepper
    plan: BackwardPlan
    context: ForwardContext
    leaves: list[Tensor]
    first: Tensor | None = None
    first_graph: StepGraph | None = None
    random_start: tuple[Tensor, ...] | None = None
    steps: list[RecordedStep | RecordedProgram] = field(default_factory=list)
    end: bool = False

    def point(self, rows: Tensor) -> Tensor:
        """The first point."""
        return rows if self.first is None else self.first

    def solve(self, rows: Tensor, recorder: StepRecorder | None = None) -> Rows:
        """The trajectory, or the rows of the state at its end."""
        if self.end:
            return tuple(row.clone() for row in integrate_to_end(self.stepper, self.point(rows), recorder))
        return integrate(self.stepper, self.point(rows), recorder=recorder)

    def record(self, rows: Tensor) -> Rows:
        """:meth:`solve`, and keep the accepted steps; states of random generators only if f has drawn from them."""
        device = rows.device
        before = random_state(device)
        trajectory = self._record(rows, draws=self.random_start is not None)
        if self.random_start is None and not all(map(torch.equal, before, random_state(device))):
            restore_random_state(before, device)  # f draws, though at first it did not
            trajectory = self._record(rows, draws=True)
        return trajectory

    def _record(self, rows: Tensor, *, draws: bool) -> Rows:
        # the time of the first evaluation has a gradient of its own
        first = None if self.first_graph is None or len(self.first_graph.points) > 1 else self.first_graph
        recorder = StepRecorder(self.stepper, self.plan, first=first, draws=draws)
        trajectory = self.solve(rows, recorder)
        self.steps = recorder.steps
        return trajectory

    def save(self, ctx: Any, state: Tensor) -> None:
        """Save for the backward pass; autograd checks that the tensors of the evaluations are not changed."""
        self.context.remember_masks()
        ctx.forward_pass = self
        others = {id(tensor): tensor for _, _, tensor in self.context.tensors if not tensor.is_inference()}
        ctx.save_for_backward(state, *({id(leaf): leaf for leaf in self.leaves} | others).values())


def solve_and_save(ctx: Any, forward: ForwardPass, t: Tensor, damping: Tensor, rows: Tensor, *leaves: Tensor) -> Tensor:
    """The forward pass of the gradients that store the outputs alone: (T, state rows, ...)."""
    trajectory = integrate(forward.stepper, forward.point(rows))
    forward.save(ctx, trajectory.clone())  # the user may change the output in place
    return trajectory


def graph_of_first(rows: Tensor, t: Tensor, value: Tensor) -> StepGraph:
    """The graph of the first point, from the rows of the state and the time of the first evaluation."""
    points = [rows, t] if t.requires_grad else [rows]
    return StepGraph(points, (), torch.cat([rows, value.unsqueeze(0)]), with_start=True)


def required(x: Value | None, what: str) -> Value:
    """What every step has, or an error that names what is missing."""
    if x is None:
        raise RuntimeError(f"a step has no {what}; this is an error in hbnode. Fix: gradient='direct', and report it.")
    return x


def refuse_double_backward(name: str) -> None:
    """These gradients are numbers, not functions."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"gradient={name!r} gives first derivatives only, and create_graph=True asks for more. "
            "Fix: gradient='direct'."
        )
