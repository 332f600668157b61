"""Runge-Kutta methods for y' = f(t, y): any field, in particular NODE, ANODE, SONODE and GHBNODE."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hbnode.solvers.explicit_method import ExplicitMethod, strictly_lower
from hbnode.solvers.tableaus import RungeKuttaTableau


class RungeKutta(ExplicitMethod):
    """The Runge-Kutta pair of a tableau: x_i = y + H Σ_j a_ij k_j."""

    has_numbers = True
    state_rows = 1
    inside = 3.0  # measured over fields of many kinds

    def __init__(self, tableau: RungeKuttaTableau) -> None:
        self.error_order = tableau.error_order
        self.nodes = tuple(map(float, tableau.c[1:]))
        a = strictly_lower(tableau.a)
        self.weights = torch.cat([a[1:], a.new_tensor([tableau.error])])
        self.is_y = a.new_ones(len(a))
        self.is_y[-1] = 0.0
        self.dense = a.new_tensor(tableau.dense)

    @override
    def matrix(self, damping: Tensor, step: Tensor) -> Tensor:
        """C: a row of ones for y beside H a."""
        rows = step[..., None, None] * self.weights.to(step.device)
        is_y = self.is_y.to(step.device).unsqueeze(-1)
        return torch.cat([is_y.expand(*rows.shape[:-1], 1), rows], -1)

    @override
    def of_numbers(self, damping: float, step: float, *, error: bool, order: int = 0) -> Tensor:
        matrix = torch.cat([self.is_y.unsqueeze(-1), step * self.weights], -1).flatten()[self.places(error)]
        return torch.zeros_like(matrix) if order else matrix

    @override
    def blend(self, damping: Tensor, step: Tensor, thetas: Tensor) -> Tensor:
        """Y + H Σ b_j(θ) k_j."""
        powers = thetas.unsqueeze(-1) ** torch.arange(1, 5, dtype=thetas.dtype, device=thetas.device)
        rows = step.unsqueeze(-1) * (powers @ self.dense.to(thetas.device).T)
        return torch.cat([torch.ones_like(thetas).unsqueeze(-1), rows], -1).unsqueeze(1)
