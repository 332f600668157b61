r"""Exponential methods for :math:`h'' + \gamma h' = f(h, t)`, which solve the damping exactly.

If f along a step of size H is a polynomial Σ_k p_k θ^k in the fraction θ = τ / H, then

    h(τ) = h_n + τ φ_1(z) m_n + τ² Σ_k k! φ_{k+2}(z) θ^k p_k,
    m(τ) = φ_0(z) m_n + τ Σ_k k! φ_{k+1}(z) θ^k p_k,                            z = -γτ,

with φ_0(z) = e^z and φ_{k+1}(z) = (φ_k(z) - 1/k!) / z, whose value at 0 is 1/(k+1)!. Stage i takes the polynomial
P_i through the values at the nodes before it. Let h(c; P) be the position at the node c for the polynomial P. Then

    h_i = h(c_i; P_i) + Σ_{1<j<i} κ_ij (h(c_j; P_i) - h_j),

where the sum corrects what earlier stages have missed. The step takes the polynomial through all values.

The κ are such that the defects d_i of the stages, times the weights w_i of the quadrature on [0, 1], cancel:
Σ w_i d_i = 0. The position h + m/γ, where the ball would come to rest, is integrated with these weights whatever γ is,
so the defects cancel for every γ, and for a γ of each channel.

Without damping such a method is a Nystrom method. Where the damping is strong it is a Runge-Kutta method for
:math:`h' = f/\gamma`, because τ² k! φ_{k+2}(z) tends to τ / ((k + 1) γ).

References:
    Hochbruck and Ostermann, "Exponential integrators", Acta Numerica 19 (2010) 209-286.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from hbnode.solvers.explicit_method import ExplicitMethod
from hbnode.solvers.tableaus import ExponentialTableau

NEAR = 2.0  # |z| below which the φ functions come from their series,
TERMS = 32  # of so many terms, a power of 2; the next is below 1e-25


class Exponential(ExplicitMethod):
    """The exponential pair of a tableau."""

    state_rows = 2

    def __init__(self, tableau: ExponentialTableau) -> None:
        self.error_order = tableau.error_order
        self.c = torch.tensor(tableau.c, dtype=torch.float64, device="cpu")
        self.ends = self.c[1:]  # where polynomials are integrated to
        self.nodes = (*self.ends.tolist(), 1.0)  # the last evaluation is that at the new state
        self.powers = len(tableau.c)
        last = len(self.ends) - 1
        rows: list[Tensor] = []
        for i, corrections in enumerate(tableau.corrections):
            row = self._integral(i + 1, i)
            for j, weight in enumerate(corrections):
                row = row + weight * (self._integral(i + 1, j) - rows[j])
            rows.append(row)
        self.whole = self._interpolation(list(range(self.powers)))
        self.positions = torch.stack([*rows, self._integral(self.powers, last)])  # (rows, ends, powers, stages)
        *others, _ = range(self.powers)
        values = [*others, self.powers]  # those whose stages have no defect at the end of the step
        kept = [i for i in values if i != tableau.left_out]
        self.error = self._interpolation(values) - self._interpolation(kept)
        self.inner = self._interpolant()

    def _interpolation(self, values: list[int]) -> Tensor:
        """The polynomial through some of the values of f, (powers, stages)."""
        polynomial = self.c.new_zeros(self.powers, self.powers + 1)
        nodes = torch.cat([self.c, self.c[-1:]])[values]
        powers = nodes.unsqueeze(-1) ** torch.arange(len(values), dtype=nodes.dtype, device="cpu")
        polynomial[: len(values), values] = torch.linalg.inv(powers)
        return polynomial

    def _integral(self, count: int, end: int) -> Tensor:
        """The polynomial through the first ``count`` values, integrated to one of the ends: (ends, powers, stages)."""
        row = self.c.new_zeros(len(self.ends), self.powers, self.powers + 1)
        row[end] = self._interpolation(list(range(count)))
        return row

    def _interpolant(self) -> Tensor:
        """The cubic with f at both ends of the step, and with the moments 0 and 1 of the method: (powers, stages).

        The moments are Σ w_i F_i and Σ w_i c_i F_i, in which the defects of the stages cancel. The values at the inner
        nodes would bring them in.
        """
        weights = (1 / torch.arange(1, self.powers + 1, dtype=torch.float64, device="cpu")) @ self.whole
        first, second = torch.eye(self.powers + 1, dtype=torch.float64, device="cpu")[[0, -1]]
        moment = weights - (first + second) / 2  # without that of the straight line between the ends
        other = weights * torch.cat([self.c, self.c[-1:]]) - first / 6 - second / 3
        bump, skew = 36 * moment - 60 * other, 120 * other - 60 * moment  # of θ(1 - θ) and θ²(1 - θ)
        return torch.stack([first, second - first + bump, skew - bump, -skew])

    @override
    def matrix(self, damping: Tensor, step: Tensor) -> Tensor:
        """C, from the module's docstring."""
        ends, positions, whole, error = (x.to(step.device) for x in (self.ends, self.positions, self.whole, self.error))
        of_h, of_m = _weights(damping.to(step).unsqueeze(-1), step.unsqueeze(-1), ends, self.powers)
        state_of_h = of_h[..., :2]
        state_of_h = torch.cat([state_of_h, state_of_h[..., -1:, :]], -2)  # the last stage and the end
        state = torch.stack([of_m[..., -1, :2], *[torch.zeros_like(of_m[..., -1, :2])] * 2], -2)
        h = torch.einsum("...ek,rekc->...rc", of_h[..., 2:], positions)
        m = of_m[..., -1, 2:].unsqueeze(-2)
        errors = [of_h[..., -1, 2:].unsqueeze(-2) @ error, m @ error]
        return torch.cat([torch.cat([state_of_h, state], -2), torch.cat([h, m @ whole, *errors], -2)], -1)

    @override
    def blend(self, damping: Tensor, step: Tensor, thetas: Tensor) -> Tensor:
        """Of the cubic of :meth:`_interpolant`."""
        thetas, step = (x.view(-1, *[1] * damping.dim()) for x in (thetas, step))
        inner = self.inner.to(step)
        weights = _weights(damping.to(step), step, thetas, self.powers)
        rows = [torch.cat([row[..., :2], row[..., 2:] @ inner], -1) for row in weights]
        return torch.stack(rows, 1).movedim(-1, 2)


def _weights(damping: Tensor, step: Tensor, at: Tensor, powers: int) -> tuple[Tensor, Tensor]:
    """Weights of h, m and the coefficients of a polynomial in h and in m at fractions of steps: (..., 2 + powers)."""
    time = at * step
    phi = phi_functions(-damping * time, powers + 2).unbind(-1)
    time = time.expand_as(phi[0])
    scales = [math.factorial(k) * at**k * time for k in range(powers)]
    of_h = [torch.ones_like(time), time * phi[1], *(scale * time * phi[k + 2] for k, scale in enumerate(scales))]
    of_m = [torch.zeros_like(time), phi[0], *(scale * phi[k + 1] for k, scale in enumerate(scales))]
    return torch.stack(of_h, -1), torch.stack(of_m, -1)


def phi_functions(z: Tensor, count: int) -> Tensor:
    r"""The functions φ_0(z) to φ_{count - 1}(z), in float64 to about 14 digits: (..., count).

    Near 0, where their recursion would subtract equal numbers, they come from :math:`\sum_j z^j / (j + k)!`.
    """
    is_near = z.abs() < NEAR
    near, far = torch.where(is_near, z, 0.0), torch.where(is_near, NEAR, z)  # finite, with finite derivatives
    series = [[1 / math.factorial(j + k) for k in range(count)] for j in range(TERMS)]
    powers, factor = torch.ones_like(z).unsqueeze(-1), near.unsqueeze(-1)
    while powers.shape[-1] < TERMS:  # not by torch's power, which has no second derivative at 0
        powers, factor = torch.cat([powers, powers * factor], -1), factor * factor
    recursion = [torch.exp(far)]
    for k in range(count - 1):
        recursion.append((recursion[-1] - 1 / math.factorial(k)) / far)
    of_near = powers @ torch.tensor(series, dtype=z.dtype, device=z.device)
    return torch.where(is_near.unsqueeze(-1), of_near, torch.stack(recursion, -1))
