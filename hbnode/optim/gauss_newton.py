"""Products with the damped Gauss-Newton matrix, by a cached double backward.

J^T u is linear in u, so its graph, made once, gives J v as its derivative in u in the direction v: a pass through the
graph of the backward pass. One pass more through the graph of the outputs gives J^T w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode.optim.twice import check_checkpoints, differentiating_twice, refuse, refusing_ends
from hbnode.optim.vectors import flat, shaped

PRECISION = 0.01  # of J^T and J being transposes, which rounding to float32 stays well below
Metric = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linearized:
    """The outputs of a model, and the metric of each.

    Attributes:
        outputs: tensors with a graph.
        metrics: symmetric, positive semi-definite functions; H_L comes first, those of structural damping are
            multiplied by lambda mu.
        losses: makes those of the cases, with a graph.
    """

    outputs: list[Tensor]
    metrics: list[Metric]
    losses: Callable[[], Tensor]


class GaussNewton:
    """Products v -> J^T H J v of flat vectors, for a fixed batch at fixed parameters.

    Arguments:
        parameters: what the outputs are differentiated in.
        linearized: the outputs with their graph, which is kept.
        checks: whether to refuse a model some of whose gradients are numbers, not functions: J and J^T would not fit
            together.
    """

    def __init__(self, parameters: Sequence[Tensor], linearized: Linearized, *, checks: bool = False) -> None:
        self.parameters, self.linearized = list(parameters), linearized
        generator = torch.Generator().manual_seed(0)
        self.u = [torch.zeros_like(z) for z in linearized.outputs]  # J^T u has the same derivative at any u
        for z in self.u:
            (z.copy_(torch.randn(z.shape, generator=generator)) if checks else z).requires_grad_()
        refusing = refusing_ends(linearized.outputs) if checks else nullcontext()
        with torch.enable_grad(), differentiating_twice(), refusing:
            pulled = torch.autograd.grad(
                linearized.outputs, self.parameters, self.u, create_graph=True, allow_unused=True
            )
        self.pulled = [(k, z) for k, z in enumerate(pulled) if z is not None and z.requires_grad]
        if any(z is None for z in pulled):
            check_checkpoints(linearized.outputs)
        if checks:
            self._check()

    def _check(self) -> None:
        """With w random and v = J^T w, the squared norm of v is the product of w and J v."""
        w = [z.detach() for z in self.u]
        v = self.pull(w)
        squared = float(torch.dot(v, v))
        if not math.isfinite(squared):
            raise FloatingPointError(
                "the Gauss-Newton matrix overflows, or a derivative of the model is not finite. Fix: look for values "
                "that are not finite in the inputs of the curvature batch; smaller initial weights; float64."
            )
        followed = {k for k, _ in self.pulled}
        if any(k not in followed and bool(part.any()) for k, part in enumerate(shaped(v, self.parameters))):
            refuse("a hook of a parameter takes the graph from its gradient")
        found = sum(float((a * b).sum()) for a, b in zip(w, self.push(v), strict=True))
        if not abs(found - squared) <= PRECISION * squared:
            refuse("the derivative of its backward pass is wrong")

    def __call__(self, vector: Tensor, damping: float) -> Tensor:
        """The product with J^T H J + damping * I."""
        weighted = [metric(z) for metric, z in zip(self.linearized.metrics, self.push(vector), strict=True)]
        return self.pull(weighted).add_(vector, alpha=damping)

    def curvature(self, vector: Tensor) -> float:
        """v^T J^T H_L J v, without any damping."""
        pushed = self.push(vector)[0]
        return float((pushed * self.linearized.metrics[0](pushed)).sum())

    def push(self, vector: Tensor) -> list[Tensor]:
        """J v for each output."""
        parts = shaped(vector, self.parameters)
        along = [parts[k] for k, _ in self.pulled]
        with differentiating_twice():
            found = torch.autograd.grad(
                [z for _, z in self.pulled], self.u, along, retain_graph=True, allow_unused=True
            )
        return [torch.zeros_like(u) if z is None else z for z, u in zip(found, self.u, strict=True)]

    def pull(self, weighted: Sequence[Tensor]) -> Tensor:
        """J^T w of all outputs together, flat."""
        found = torch.autograd.grad(
            self.linearized.outputs, self.parameters, weighted, retain_graph=True, allow_unused=True
        )
        return flat(found, self.parameters)
