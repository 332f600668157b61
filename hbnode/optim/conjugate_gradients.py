"""Conjugate gradients on phi(d) = d^T A d / 2 - b^T d, as Hessian-free optimization stops them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode.optim.progress import Stop


@dataclass(frozen=True)
class Solution:
    """What conjugate gradients found.

    Attributes:
        iterates: some of the d, the last one last.
        values: phi at each of them.
        iterations: how many were taken.
        stop: why they ended: "progress" (Martens' rule), "limit", "solved" (the residual vanished), "negative
            curvature" (d^T A d <= 0 for some d, which rounding alone can cause).
    """

    iterates: list[Tensor]
    values: list[float]
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
    max(10, i / 10). The iterates after ceil(1.3^j) iterations are kept.

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
        value = float(_value(start, residual, b))
        if value < 0:
            d, r = start, residual
        else:
            value = 0.0
    z = r if preconditioner is None else r / preconditioner
    p, rz = z, torch.dot(r, z)
    values, kept, kept_values, power = [value], [], [], 0
    scale = torch.dot(b, b if preconditioner is None else b / preconditioner)
    left, smallest = torch.stack([rz, torch.finfo(b.dtype).eps ** 2 * scale]).tolist()
    _check_finite(left + smallest, "the square of the gradient")
    stop: Stop = "limit"
    iteration = 0
    while iteration < limit:
        if not left > smallest:
            stop = "solved"
            break
        ap = product(p)
        along = torch.dot(p, ap)
        step = rz / along
        d_next, r = d + step * p, r - step * ap
        z = r if preconditioner is None else r / preconditioner
        before, rz = rz, torch.dot(r, z)
        curvature, next_value, left = torch.stack([along, _value(d_next, r, b), rz]).tolist()  # the host waits once
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
            kept.append(d)
            kept_values.append(value)
            while iteration >= math.ceil(1.3**power):
                power += 1
        p = z + (rz / before) * p
    if not kept or kept[-1] is not d:
        kept.append(d)
        kept_values.append(value)
    return Solution(kept, kept_values, iteration, stop)


def _check_finite(number: float, name: str) -> None:
    if not math.isfinite(number):
        raise FloatingPointError(
            f"{name} is {number}. Fix: start from smaller weights, inputs of the size of 1, look for infinite "
            "derivatives in the model, or use float64."
        )


def _value(d: Tensor, residual: Tensor, b: Tensor) -> Tensor:
    """Phi of d, from its residual b - A d."""
    return -0.5 * torch.dot(d, residual + b)
