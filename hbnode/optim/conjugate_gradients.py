"""Conjugate gradients with the stopping rule of Martens (2010), and two searches for a step along the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

# line search: factor of alpha after each trial, required fraction of the predicted reduction, maximum number of trials
SHRINK, SLOPE, TRIALS = 0.8, 1e-2, 60
Stop: TypeAlias = Literal["progress", "limit", "solved", "negative curvature"]


@dataclass(frozen=True)
class Solution:
    """The saved iterates of a conjugate gradient solve of A d = b.

    Attributes:
        iterates: pairs of an iterate d and phi(d) = d^T A d / 2 - b^T d, ending with the final iterate.
        iterations: the number of iterations.
        stop: the reason for stopping. "progress": Martens' stopping rule. "limit": the maximum number of iterations.
            "solved": the residual is zero within rounding. "negative curvature": p^T A p <= 0 for a search direction
            p. If A is positive definite, only rounding can cause negative curvature.
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

    Let phi(d) = d^T A d / 2 - b^T d and k = max(10, i // 10). Iteration i is the last one if phi(d_i) < 0 and
    (phi(d_i) - phi(d_{i-k})) / phi(d_i) < k * tolerance. The solution holds the iterates with i = ceil(1.3^j),
    j = 0, 1, ..., and the last iterate.

    Arguments:
        product: function that maps a vector v to A v, where A is symmetric and positive definite.
        b: the right-hand side.
        start: the initial d. If it is None or phi(start) > 0, the initial d is zero.
        limit: the maximum number of iterations.
        tolerance: the tolerance of the stopping rule. If it is 0, the iteration continues until phi no longer decreases
            because of rounding.
        preconditioner: the diagonal of a matrix that approximates A. None is the identity.
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
    _check_finite(left + smallest, "the squared norm of the gradient")
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
        curvature, next_value, left = torch.stack([pap, phi, rz]).tolist()  # one wait for the device
        _check_finite(curvature, f"in iteration {iteration + 1} of conjugate gradients, the curvature p^T A p")
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
            f"{name} is {number}. Fix: scale weights and inputs down, remove infinite derivatives from the model, or "
            "use float64."
        )


def backtrack(iterates: list[tuple[Tensor, float]], loss_at: Callable[[Tensor], float]) -> tuple[Tensor, float, float]:
    """Go back through the saved iterates as long as the loss decreases (Martens 2010, section 4.6).

    Arguments:
        iterates: pairs of an iterate d and the value phi(d) of the quadratic model, in order of iteration.
        loss_at: function that maps a vector d to the loss at theta + d, where theta are the parameters.

    Returns:
        The selected d, phi(d), and the loss at theta + d.
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
    """Find the first alpha of 1, 0.8, 0.8^2, ... with loss(theta + alpha d) <= loss(theta) + 0.01 alpha g^T d.

    Arguments:
        direction: the direction d.
        full_loss: the loss at theta + d.
        start: the loss at the parameters theta.
        gradient: the gradient g of the loss at theta.
        loss_at: function that maps a vector v to the loss at theta + v.

    Returns:
        alpha, and the loss at theta + alpha d. If none of the first 60 values meets the condition: 0, and the loss at
        theta.
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
