"""Distributions in the plane for density estimation: two that give samples, and one that gives an energy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

EXTENT = 4.5  # half the side of a square that holds nearly all of each distribution


def pinwheel(count: int, generator: torch.Generator) -> Tensor:
    """Draw points (count, 2) from five curved arms, as in figure 1 of Johnson et al., arXiv:1603.06277."""
    noise = torch.randn(count, 2, generator=generator)
    radial, tangential = 1 + 0.3 * noise[:, 0], 0.1 * noise[:, 1]
    angle = 2 * math.pi / 5 * torch.randint(5, (count,), generator=generator) + 0.25 * radial.exp()
    return 2 * _rotate(torch.stack([radial, tangential], 1), angle)


def checkerboard(count: int, generator: torch.Generator) -> Tensor:
    """Draw points (count, 2), uniform on the eight dark 2 x 2 squares of an 8 x 8 board. The entropy is log 32."""
    column = torch.randint(4, (count,), generator=generator)
    row = 2 * torch.randint(2, (count,), generator=generator) + column % 2
    corner = torch.stack([column, row], 1) - 2
    return 2 * (corner + torch.rand(count, 2, generator=generator))


DATASETS = {"pinwheel": pinwheel, "checkerboard": checkerboard}


def ring(x: Tensor) -> Tensor:
    """Return the energy at points (..., 2): two crescents, the first energy in table 1 of arXiv:1505.05770."""
    radius = ((x.norm(dim=-1) - 2) / 0.4).square() / 2
    sides = torch.stack([x[..., 0] - 2, x[..., 0] + 2]) / 0.6
    return radius - (-sides.square() / 2).logsumexp(0)


def log_normalizer(energy: Callable[[Tensor], Tensor], points: int = 801) -> float:
    """Return the logarithm of the integral of exp(-energy) over the plane, approximated by a sum over a grid."""
    return float((-energy(grid(points).double())).logsumexp(0) + 2 * math.log(2 * EXTENT / (points - 1)))


def grid(points: int) -> Tensor:
    """Return a square grid with ``points`` per side, as points (points², 2). The first coordinate changes fastest."""
    axis = torch.linspace(-EXTENT, EXTENT, points)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    c, s = angle.cos(), angle.sin()
    return torch.stack([c * x[:, 0] - s * x[:, 1], s * x[:, 0] + c * x[:, 1]], 1)
