"""Where along the iterates of conjugate gradients, and how far, the loss itself is smallest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode.optim.conjugate_gradients import Solution

SHRINK, SLOPE, TRIALS = 0.8, 1e-2, 60  # of the line search: factor of alpha, share of the linear reduction, most trials


@dataclass(frozen=True)
class Trial:
    """A direction that was tried.

    Attributes:
        direction: d.
        model: phi(d), what the quadratic model predicts for the change of the loss.
        loss: at theta + d; infinite if it is not a number.
    """

    direction: Tensor
    model: float
    loss: float


def backtrack(solution: Solution, loss_at: Callable[[Tensor], float]) -> Trial:
    """Go back over the iterates, from the last, while the loss becomes smaller (Martens 2010, section 4.6)."""
    best: Trial | None = None
    for direction, model in zip(reversed(solution.iterates), reversed(solution.values), strict=True):
        loss = loss_at(direction)
        if best is not None and not loss < best.loss:
            break
        best = Trial(direction, model, loss)
    assert best is not None
    return best


def line_search(
    trial: Trial, start: float, gradient: Tensor, loss_at: Callable[[Tensor], float]
) -> tuple[float, float]:
    """The first alpha of 1, 0.8, 0.8^2, ... with loss(theta + alpha d) <= start + 0.01 alpha g^T d.

    Arguments:
        trial: the direction d, with the loss at alpha = 1.
        start: the loss at theta.
        gradient: g.
        loss_at: the loss at theta plus a vector.

    Returns:
        alpha and the loss there; 0 and the loss at theta if there is none.
    """
    slope, alpha, loss = float(torch.dot(gradient, trial.direction)), 1.0, trial.loss
    if not slope < 0:
        return 0.0, start
    for _ in range(TRIALS):
        if loss <= start + SLOPE * alpha * slope:
            return alpha, loss
        alpha *= SHRINK
        loss = loss_at(alpha * trial.direction)
    return 0.0, start
