"""The quadratic model of a step, and the loss around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode.optim.evaluation import Batch, Evaluation
from hbnode.optim.gauss_newton import GaussNewton
from hbnode.optim.twice import plain_paths
from hbnode.optim.vectors import assigned, shaped


@dataclass
class LocalModel:
    """The curvature of a step: on which batch, at which parameters, damped how.

    Attributes:
        evaluation: the closure of the curvature batch.
        parameters: what is optimized.
        theta: their values before the step.
        damping: lambda.
        structural: lambda mu.
        checks: whether the model is checked to have second derivatives.
        matrix: made when it is first needed.
        versions: of the parameters when it was made.
    """

    evaluation: Evaluation
    parameters: list[Tensor]
    theta: Tensor
    damping: float
    structural: float
    checks: bool = False
    matrix: GaussNewton | None = None
    versions: tuple[int, ...] = ()

    def linearize(self, batch: Batch) -> GaussNewton:
        """Make the matrix of a batch that has a graph."""
        linearized = self.evaluation.linearized(batch, self.structural)
        self.matrix = GaussNewton(self.parameters, linearized, checks=self.checks)
        self.versions = tuple(parameter._version for parameter in self.parameters)
        return self.matrix

    def ready(self) -> GaussNewton:
        """The matrix; the parameters must have the values that they had before the step."""
        versions = tuple(parameter._version for parameter in self.parameters)
        if self.matrix is not None and versions == self.versions:
            return self.matrix
        with torch.enable_grad(), plain_paths(self.theta.device):
            batch = self.evaluation.batch()
        return self.linearize(batch)

    def loss_at(self, vector: Tensor, evaluation: Evaluation | None = None) -> float:
        """The loss at theta plus a vector, on the curvature batch unless told; infinite if it is not a number."""
        with assigned(self.parameters, self.theta + vector):
            loss = (evaluation or self.evaluation).value()
        return loss if math.isfinite(loss) else math.inf

    def take(self, vector: Tensor) -> None:
        """Move from theta for good; autograd refuses graphs that were made before."""
        for parameter, part in zip(self.parameters, shaped(self.theta + vector, self.parameters), strict=True):
            parameter.copy_(part)

    def product(self, vector: Tensor) -> Tensor:
        """The product with the damped matrix."""
        return self.ready()(vector, self.damping)

    def precision(self, loss: float, evaluation: Evaluation) -> float:
        """Which changes of the loss are rounding: as large as those that the last digits of all parameters make."""
        eps = torch.finfo(self.theta.dtype).eps
        signs = 2 * torch.randint(2, self.theta.shape, generator=torch.Generator().manual_seed(0)) - 1
        last_digits = eps * self.theta * signs.to(self.theta)
        changes = [abs(self.loss_at(change, evaluation) - loss) for change in (last_digits, -last_digits)]
        return max([eps * abs(loss), *filter(math.isfinite, changes)])

    def undamped_reduction(self, gradient: Tensor, direction: Tensor) -> float:
        """What the model without any damping predicts along a direction, if the step has the best length."""
        slope, curvature = float(torch.dot(gradient, direction)), self.ready().curvature(direction)
        if slope == 0:
            return 0.0
        return slope**2 / (2 * curvature) if curvature > 0 else math.inf
