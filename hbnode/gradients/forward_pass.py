"""What a forward pass hands to its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hbnode._recompute import ForwardContext
from hbnode.solvers.loops import integrate
from hbnode.solvers.recorder import BackwardPlan, RecordedProgram, RecordedStep, StepGraph
from hbnode.solvers.stepper import Stepper


@dataclass
class ForwardPass:
    """A forward pass, and what its backward pass needs of it.

    Attributes:
        stepper: took the steps.
        plan: what the backward pass will differentiate.
        context: modes, masks and tensors of the field's modules.
        leaves: the tensors that f depends on.
        first: the value of f at the start, if the method carries it.
        first_graph: the graph of that evaluation, for one backward pass.
        random_start: the state of the generators before it, if f draws random numbers.
        steps: the accepted steps, if the backward pass recomputes them.
    """

    stepper: Stepper
    plan: BackwardPlan
    context: ForwardContext
    leaves: list[Tensor]
    first: Tensor | None = None
    first_graph: StepGraph | None = None
    random_start: tuple[Tensor, ...] | None = None
    steps: list[RecordedStep | RecordedProgram] = field(default_factory=list)

    def point(self, rows: Tensor) -> Tensor:
        """The first point."""
        return rows if self.first is None else torch.cat([rows, self.first[None]])

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


def required(x: Tensor | None, what: str) -> Tensor:
    """A tensor that every step has, or an error that names what is missing."""
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
