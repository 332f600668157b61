"""Noisy paths of the stochastic Lorenz equations."""

from __future__ import annotations

import torch
from torch import Tensor

DRIFT = (10.0, 28.0, 8 / 3)
DIFFUSION = (0.1, 0.28, 0.3)
STEPS = 20  # simulation steps between two output times


def stochastic_lorenz(count: int, rows: int, spacing: float, generator: torch.Generator) -> Tensor:
    """Return paths from x(0) ~ N(0, 1), (count, rows, 3), by the Euler-Maruyama method with 20 steps per output time.

        dx = 10 (y - x) dt + 0.1 x dW,  dy = (28 x - y - x z) dt + 0.28 y dW,  dz = (x y - 8/3 z) dt + 0.3 z dW

    The three Brownian motions are independent.

    References:
        Section 7.2 of Li et al., Scalable Gradients for Stochastic Differential Equations, arXiv:2001.01328, with the
        coefficients of torchsde's example.

    Arguments:
        count: the number of paths.
        rows: number of output times of each path.
        spacing: time between two output times.
        generator: random generator.
    """
    a, b, c = DRIFT
    state = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    diffusion = torch.tensor(DIFFUSION, dtype=torch.float64)
    step, path = spacing / STEPS, [state]
    for _ in range(rows - 1):
        for _ in range(STEPS):
            x, y, z = state.unbind(1)
            drift = torch.stack([a * (y - x), b * x - y - x * z, x * y - c * z], 1)
            noise = torch.randn(count, 3, generator=generator, dtype=torch.float64)
            state = state + step * drift + step**0.5 * diffusion * state * noise
        path.append(state)
    return torch.stack(path, 1)
