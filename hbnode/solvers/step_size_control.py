"""The choice of step sizes: no probe at the start, equal steps for the rest of an interval, PI control.

An interval between two output times is divided into steps that are fractions of it, so the last ends on the output
time exactly, and a step's size is a constant times the interval's length when gradients for the times are taken.
Everything here works on floats, one step for the batch, and on tensors (batch,), a step for each sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hbnode.solvers.step_method import StepMethod

Number = TypeVar("Number", float, Tensor)

SAFETY = 0.9
SMALLEST, LARGEST = 0.1, 8.0  # factors by which a step may change
PROPORTIONAL, INTEGRAL = 0.2, 1.0


def after_acceptance(ratio: Number, previous: Number, exponent: float) -> Number:
    """The PI controller: the factor for the step after one with this error ratio and the ratio before it."""
    return SAFETY * ratio ** (-INTEGRAL * exponent) * previous ** (PROPORTIONAL * exponent)


def after_rejection(ratio: Number, exponent: float) -> Number:
    """The factor for the next attempt."""
    return SAFETY * ratio**-exponent


class Controller:
    r"""The step size, from the error ratios of the steps before.

    A ratio is the norm of (error / tolerance). With q the order of the embedded solution, an accepted step is followed
    by one of :math:`H \cdot 0.9\, r_n^{-1/(q+1)} r_{n-1}^{0.2/(q+1)}` (Gustafsson's PI control), a rejected one by
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)}`, and the step after a rejection is not enlarged.
    """

    def __init__(self, error_order: int) -> None:
        self.exponent = 1.0 / (error_order + 1)
        self.previous = 1.0
        self.rejected = False

    def accept(self, ratio: float) -> float:
        """The factor for the next step."""
        factor = after_acceptance(max(ratio, 1e-10), self.previous, self.exponent)
        self.previous = max(ratio, 1e-4)
        largest = 1.0 if self.rejected else LARGEST
        self.rejected = False
        return min(max(factor, SMALLEST), largest)

    def reject(self, ratio: float) -> float:
        """The factor for the next attempt."""
        self.rejected = True
        if not math.isfinite(ratio):
            return SMALLEST
        return min(max(after_rejection(ratio, self.exponent), SMALLEST), SAFETY)


class SampleController:
    """:class:`Controller` for each sample of a batch."""

    def __init__(self, error_order: int, batch: Tensor) -> None:
        self.exponent = 1.0 / (error_order + 1)
        self.previous = torch.ones_like(batch)
        self.rejected = torch.zeros_like(batch, dtype=torch.bool)

    def factor(self, ratio: Tensor, accepted: Tensor) -> Tensor:
        """The factors for the next steps of those that were accepted and those that were not."""
        bounded = ratio.clamp(min=1e-10)
        up = after_acceptance(bounded, self.previous, self.exponent)
        up = torch.where(self.rejected, up.clamp(SMALLEST, 1.0), up.clamp(SMALLEST, LARGEST))
        down = after_rejection(bounded, self.exponent).clamp(SMALLEST, SAFETY)
        down = torch.where(torch.isfinite(ratio), down, SMALLEST)
        self.previous = torch.where(accepted, ratio.clamp(min=1e-4), self.previous)
        self.rejected = ~accepted
        return torch.where(accepted, up, down)


def steps_to(remaining: float, size: float) -> int:
    """How many equal steps of at most about ``size`` cover what remains."""
    return max(1, math.ceil(remaining / size - 0.05))


def rms(x: Tensor) -> Tensor:
    """Root mean square of all elements; 0 of none."""
    return torch.linalg.vector_norm(x) / math.sqrt(max(x.numel(), 1))


def widest_gap(nodes: Sequence[float]) -> float:
    """Between two nodes of a step, as a fraction of it."""
    return max(b - a for a, b in itertools.pairwise(sorted({0.0, *nodes})))


def most_knots(nodes: Sequence[float]) -> int:
    """How many knots a step may pass, so that one of its nodes lies between any two."""
    return max(int(0.999 / widest_gap(nodes)) - 1, 0)


def norms(x: Tensor, samples: int | None) -> Tensor:
    """Root mean square of each row of (rows, ...): (rows,), or (rows, batch) where every sample counts alone.

    Arguments:
        x: rows.
        samples: the dimension of the batch in a row; None takes all samples together.
    """
    if samples is None:
        x = x.unsqueeze(-1).flatten(1)
        return torch.linalg.vector_norm(x, dim=1) / math.sqrt(max(x.shape[1], 1))
    x = x.movedim(samples + 1, 1).unsqueeze(-1).flatten(2)
    return torch.linalg.vector_norm(x, dim=2) / math.sqrt(max(x.shape[2], 1))


def first_size(h: Number, f: Number, rtol: float, atol: float, method: StepMethod) -> Number:
    r"""Size of the first step, without an evaluation of its own.

    The ball is taken to oscillate about 0 with the frequency :math:`\omega = (\|f\| / \|h\|)^{1/2}`, a first-order
    state to decay at the rate :math:`\omega = \|f\| / \|y\|`, so that a step H has an error of about
    :math:`(\omega H / 2)^{q+1} \|h\|`.

    Arguments:
        h: norm of the state, or of its position; numbers or (batch,).
        f: norm of the field's value.
        rtol: relative tolerance.
        atol: absolute tolerance.
        method: whose error estimate has the order q.
    """
    tolerance = atol + rtol * h
    rate = (f / (h + tolerance)) ** (1.0 / method.state_rows)
    return 2.0 * (tolerance / (h + tolerance)) ** (1.0 / (method.error_order + 1)) / (rate + 1e-12)
