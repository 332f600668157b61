"""Runge-Kutta methods for y' = f(t, y): any field, in particular NODE, ANODE, SONODE and GHBNODE."""

from __future__ import annotations

import torch
from torch import Tensor

from hbnode.solvers.explicit import ExplicitMethod, strictly_lower
from hbnode.solvers.tableaus import RungeKuttaTableau


class RungeKutta(ExplicitMethod):
    """The Runge-Kutta pair of a tableau: x_i = y + H Σ_j a_ij k_j."""

    state_rows = 1
    has_dense = True

    def __init__(self, tableau: RungeKuttaTableau) -> None:
        self.error_order = tableau.error_order
        self.nodes = tuple(map(float, tableau.c[1:]))
        a = strictly_lower(tableau.a)
        self.weights = torch.cat([a[1:], a.new_tensor([tableau.error])])
        self.is_y = a.new_ones(len(a))
        self.is_y[-1] = 0.0
        self.dense = a.new_tensor(tableau.dense)

    def matrix(self, damping: Tensor, step: Tensor, thetas: Tensor | None = None) -> Tensor:
        """C: a row of ones for y beside H a."""
        weights, is_y = self.weights.to(step.device), self.is_y.to(step.device)
        if thetas is not None:
            powers = thetas.unsqueeze(-1) ** torch.arange(1, 5, dtype=thetas.dtype, device=thetas.device)
            dense = powers @ self.dense.to(thetas.device).T
            weights = torch.cat([weights.expand(*dense.shape[:-2], *weights.shape), dense], -2)
            is_y = torch.cat([is_y, is_y.new_ones(dense.shape[-2])])
        rows = step[..., None, None] * weights
        return torch.cat([is_y.unsqueeze(-1).expand(*rows.shape[:-1], 1), rows], -1)
