"""Conjugate gradients on phi(d) = d^T A d / 2 - b^T d as Martens (2010) stops them, and the searches that follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

SHRINK, SLOPE, TRIALS = 0.8, 1e-2, 60  # of the line search: factor of alpha, share of the linear reduction, most trials
Stop: TypeAlias = Literal["progress", "limit", "solved", "negative curvature"]


@dataclass(frozen=True)
class Solution:
    """The iterates of conjugate gradients.

    Attributes:
        iterates: some of the d with phi(d), the last one last.
        iterations: how many were taken.
        stop: why they ended: "progress" (Martens' rule), "limit", "solved" (the residual vanished), "negative
            curvature" (d^T A d <= 0 for some d, which rounding alone can cause).
    """

    iterates: list[tuple[Tensor, float]]
    iterations: int
    stop: Stop


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    start: Tensor | None,
    *,
    limit: int,
    tolerance: float = 5e-4,
    preconditioner: Tensor | None = None,
) -> Solution:
    """Solve A d = b by preconditioned conjugate gradients (Martens 2010, section 4.4).

    They stop after iteration i if phi(d_i) < 0 and (phi(d_i) - phi(d_{i-k})) / phi(d_i) < k * tolerance, where k =
    max(10, i / 10). The iterates after ceil(1.3^j) iterations are returned.

    Arguments:
        product: the product with A, which is symmetric and positive definite.
        b: the right-hand side.
        start: the first d. None is zero; so is a start at which phi > 0, as zero is then nearer.
        limit: the most iterations.
        tolerance: of the stopping rule; 0 solves as well as rounding allows.
        preconditioner: the diagonal of M, which approximates A; None is the identity.
    """
    d, r, value = torch.zeros_like(b), b, 0.0
    if start is not None:
        residual = b - product(start)
        value = min(-0.5 * float(torch.dot(start, residual + b)), 0.0)
        if value < 0:
            d, r = start, residual
    z = r if preconditioner is None else r / preconditioner
    p, rz = z, torch.dot(r, z)
    scale = torch.dot(b, b if preconditioner is None else b / preconditioner)
    left, smallest = torch.stack([rz, torch.finfo(b.dtype).eps ** 2 * scale]).tolist()
    _check_finite(left + smallest, "the square of the gradient")
    values, power = [value], 0
    iterates: list[tuple[Tensor, float]] = []
    stop: Stop = "limit"
    iteration = 0
    while iteration < limit:
        if not left > smallest:
            stop = "solved"
            break
        ap = product(p)
        pap = torch.dot(p, ap)
        step = rz / pap
        d_next, r = d + step * p, r - step * ap
        z = r if preconditioner is None else r / preconditioner
        before, rz = rz, torch.dot(r, z)
        phi = -0.5 * torch.dot(d_next, r + b)
        curvature, next_value, left = torch.stack([pap, phi, rz]).tolist()  # the host waits once
        _check_finite(curvature, f"in iteration {iteration + 1} of conjugate gradients, the curvature d^T A d")
        if not curvature > 0:
            stop = "negative curvature"
            break
        d, value = d_next, next_value
        iteration += 1
        values.append(value)
        k = max(10, iteration // 10)
        if iteration > k and value < 0 and (value - values[iteration - k]) / value < k * tolerance:
            stop = "progress"
            break
        if iteration >= math.ceil(1.3**power):
            iterates.append((d, value))
            while iteration >= math.ceil(1.3**power):
                power += 1
        p = z + (rz / before) * p
    if not iterates or iterates[-1][0] is not d:
        iterates.append((d, value))
    return Solution(iterates, iteration, stop)


def _check_finite(number: float, name: str) -> None:
    if not math.isfinite(number):
        raise FloatingPointError(
            f"{name} is {number}. Fix: start from smaller weights, inputs of the size of 1, look for infinite "
            "derivatives in the model, or use float64."
        )


def backtrack(iterates: list[tuple[Tensor, float]], loss_at: Callable[[Tensor], float]) -> tuple[Tensor, float, float]:
    """Go back over the iterates, from the last, while the loss becomes smaller (Martens 2010, section 4.6).

    Arguments:
        iterates: d and phi(d), the last one last.
        loss_at: the loss at theta plus a vector.

    Returns:
        The best d, phi(d), and the loss at theta + d.
    """
    direction, value = iterates[-1]
    best = direction, value, loss_at(direction)
    for direction, value in reversed(iterates[:-1]):
        loss = loss_at(direction)
        if not loss < best[2]:
            break
        best = direction, value, loss
    return best


def line_search(
    direction: Tensor, full_loss: float, start: float, gradient: Tensor, loss_at: Callable[[Tensor], float]
) -> tuple[float, float]:
    """Find the first alpha of 1, 0.8, 0.8^2, ... with loss(theta + alpha d) <= start + 0.01 alpha g^T d.

    Arguments:
        direction: d.
        full_loss: the loss at theta + d.
        start: the loss at theta.
        gradient: g.
        loss_at: the loss at theta plus a vector.

    Returns:
        alpha and the loss there; 0 and the loss at theta if there is none.
    """
    slope, alpha, loss = float(torch.dot(gradient, direction)), 1.0, full_loss
    if not slope < 0:
        return 0.0, start
    for _ in range(TRIALS):
        if loss <= start + SLOPE * alpha * slope:
            return alpha, loss
        alpha *= SHRINK
        loss = loss_at(alpha * direction)
    return 0.0, start
