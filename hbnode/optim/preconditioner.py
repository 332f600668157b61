"""Martens' diagonal preconditioner, from sums of the cases' gradients with random signs."""

from __future__ import annotations

import torch
from torch import Tensor

from hbnode.optim.gauss_newton import GaussNewton
from hbnode.optim.vectors import flat

EXPONENT = 0.75


def preconditioner(matrix: GaussNewton, samples: int, damping: float) -> Tensor:
    """(mean of g_n^2 + lambda)^0.75, of Martens (2010), section 4.7, g_n the gradient of case n.

    The square of sum_n s_n g_n, with random signs s_n, has the sum of g_n^2 as its mean. The signs are the same in
    every step, so that runs repeat.

    Arguments:
        matrix: knows the losses of the cases.
        samples: how many sums are drawn.
        damping: lambda.
    """
    losses = matrix.linearized.losses()
    generator = torch.Generator().manual_seed(0)
    squares = torch.zeros_like(flat(matrix.parameters, matrix.parameters))
    for _ in range(samples):
        signs = 2 * torch.randint(2, losses.shape, generator=generator) - 1
        parts = torch.autograd.grad(losses, matrix.parameters, signs.to(losses), retain_graph=True, allow_unused=True)
        squares = squares + flat(parts, matrix.parameters).square()
    found = (squares / (samples * len(losses)) + damping).pow(EXPONENT)
    return found.clamp(min=torch.finfo(found.dtype).eps * found.max())  # of parameters that are not used it may be 0
