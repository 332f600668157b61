r"""Runge-Kutta-Nystrom methods for :math:`h'' + \gamma h' = f(h, t)`.

With :math:`u(s) = e^{\gamma s/2} h(t_n + s)`, local to the step that starts at :math:`t_n`, the damping disappears:

    u'' = (γ²/4) u + e^{γs/2} f(e^{-γs/2} u, t_n + s) =: g(u, s),   u(0) = h_n,   u'(0) = m_n + (γ/2) h_n,
    h = e^{-γH/2} u,   m = e^{-γH/2} (u' - (γ/2) u),

and a right-hand side without velocity is what Nystrom methods are made for: their order with fewer evaluations than
any Runge-Kutta method. The stages u_i = u_0 + c_i H u'_0 + H² Σ_j a_ij g_j are linear in h_n, m_n and the values f_j.
With z = γH, E = diag(e^{zc_j/2}) and the nilpotent A = (a_ij),

    H² g = (I - z²A/4)^{-1} [(z²/4) (1 + cz/2) h_n + (z²/4) c (H m_n) + E (H² f)],

so every coefficient is a polynomial in z times an exponential and a power of H (or γ, where a power would be negative).
The polynomials are worked out once, from (I - z²A/4)^{-1} = Σ_k (z²/4)^k A^k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hbnode._tracing import is_tracing
from hbnode.solvers.explicit_method import ExplicitMethod, strictly_lower
from hbnode.solvers.tableaus import NystromTableau


class Nystrom(ExplicitMethod):
    """The Nystrom pair of a tableau."""

    has_numbers = True
    state_rows = 2

    def __init__(self, tableau: NystromTableau) -> None:
        self.error_order = tableau.error_order
        self.nodes = tuple(map(float, tableau.c[1:]))
        self.c = _vector(tableau.c)
        stages = strictly_lower(tableau.a)
        self.forces = self._forces(stages)
        stages = stages[1:]  # the last of them is h_1
        zero, nothing = torch.zeros_like(self.c), torch.zeros_like(stages)
        b, b_velocity, error, error_velocity = map(
            _vector, (tableau.b, tableau.b_velocity, tableau.error, tableau.error_velocity)
        )
        self.at = torch.cat([self.c[1:], _vector([1, 1, 1])])  # the time of each row, as a fraction of the step
        self.of_m = torch.tensor([False] * len(stages) + [True, False, True], device="cpu")
        self.polynomials = self._rows(
            at=self.at,
            is_h=_vector([1] * len(stages) + [0, 0, 0]),
            is_m=_vector([0] * len(stages) + [1, 0, 0]),
            weights=torch.cat([stages, torch.stack([b_velocity, error, error_velocity])]),
            gauge=torch.cat([nothing, torch.stack([b, zero, error])]),
        )
        self.inner = _interpolant(tableau)

    def _forces(self, a: Tensor) -> Tensor:
        """H² g as polynomials in z of h_n, H m_n and E H² f: (degree + 1, stages, columns)."""
        size = len(a)
        forces = a.new_zeros(2 * size + 2, size, size + 2)
        power = torch.eye(size).to(a)  # (A/4)^k
        for k in range(size):
            forces[2 * k, :, 2:] += power
            forces[2 * k + 2, :, 0] += power.sum(1) / 4
            forces[2 * k + 2, :, 1] += power @ self.c / 4
            forces[2 * k + 3, :, 0] += power @ self.c / 8
            power = power @ a / 4
            if not power.any():
                return forces[: 2 * k + 4]
        raise ValueError("the matrix A of an explicit method is nilpotent")

    def _rows(self, *, at: Tensor, is_h: Tensor, is_m: Tensor, weights: Tensor, gauge: Tensor) -> Tensor:
        """Rows of C without their exponentials, as polynomials in z: (degree + 1, rows, columns).

        With the weights (rows, stages) of the forces,

            h = e^{-z at/2} (h_n + at (H m_n + (z/2) h_n) + weights H² g),
            H m = e^{-z at/2} (H m_n - (z/2) at (H m_n + (z/2) h_n) + (weights - (z/2) gauge) H² g).
        """
        # one small product after another: a large one would start OpenMP's threads at import, and no fork survives them
        of_weights, of_gauge = (torch.stack([x @ force for force in self.forces]) for x in (weights, gauge / 2))
        nothing = torch.zeros_like(of_weights[:1])
        rows = torch.cat([of_weights, nothing]) - torch.cat([nothing, of_gauge])
        rows[0, ..., 0] += is_h
        rows[1, ..., 0] += is_h * at / 2
        rows[2, ..., 0] -= is_m * at / 4
        rows[0, ..., 1] += is_h * at + is_m
        rows[1, ..., 1] -= is_m * at / 2
        # H m is made of z² h_n and higher powers; for m itself, z/H = γ takes one of them
        by_h = torch.where(is_m.bool(), rows[..., 0].roll(-1, 0), rows[..., 0])
        return torch.cat([by_h.unsqueeze(-1), rows[..., 1:]], -1)

    @override
    def matrix(self, damping: Tensor, step: Tensor) -> Tensor:
        """C, from the module's docstring."""
        damping = damping.to(step)
        constants = self.make_constants if is_tracing() else self.constants  # what is traced may not be kept
        polynomials, rates, units = constants(step.device)
        z = (damping * step).unsqueeze(-1)
        values = _powers(z, len(polynomials)) @ polynomials
        values = values * torch.exp(z * rates) * _units(damping, step).index_select(-1, units)
        return values.unflatten(-1, (-1, len(self.c) + 2))

    @override
    def of_numbers(self, damping: float, step: float, *, error: bool, order: int = 0) -> Tensor:
        import numpy as np  # here, as everywhere in hbnode, because it is slow to import

        polynomials, rates, powers = self.host_constants(error, order)
        z = damping * step
        with np.errstate(all="ignore"):  # what is not finite is named by the solve
            powers_of_z = z ** np.arange(len(polynomials))
            return torch.from_numpy(powers_of_z @ polynomials * np.exp(z * rates) * step**powers)

    @functools.cache  # noqa: B019, the methods live as long as the module
    def host_constants(self, error: bool, order: int) -> tuple[Any, Any, Any]:
        """Q, r and w of the derivative of this order with respect to γ, H^w Q(z) e^{rz}, packed; arrays of numpy.

        A coefficient in units of γ is z Q(z) / H. The derivative with respect to z takes Q to Q' + rQ.
        """
        import numpy as np

        places = self.places(error)
        polynomials, rates, units = (x[..., places].numpy() for x in self.make_constants(torch.device("cpu")))
        of_gamma = units == 3
        longer = np.pad(polynomials, ((0, 1), (0, 0)))
        q = np.where(of_gamma, np.roll(longer, 1, 0), longer)
        degrees = np.arange(len(q))[:, None]
        for _ in range(order):
            q = np.roll(degrees * q, -1, 0) + rates * q
        return q, rates, np.where(of_gamma, -1.0, units) + order

    @functools.cache  # noqa: B019, the methods live as long as the module
    def constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`make_constants`, once for each device."""
        with torch.inference_mode(False), torch.no_grad():  # whatever the mode of the first solve
            polynomials, rates, units = self.make_constants(device)
            return polynomials.clone(), rates.clone(), units.clone()

    def make_constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Polynomials, rates of the exponentials and units of all coefficients, each flat: (rows * columns,)."""
        rates, units = self._rates_and_units(self.at, self.of_m)
        return self.polynomials.flatten(1).to(device), rates.flatten().to(device), units.flatten().to(device)

    def _rates_and_units(self, at: Tensor, of_m: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows at fractions ``at`` of the step, (rows, columns)."""
        c = self.c
        rates = (torch.cat([c.new_zeros(2), c]) - at.unsqueeze(-1)) / 2
        of_h_row, of_m_row = (
            torch.tensor([*pair, *[pair[1] + 1] * len(c)], device=at.device) for pair in ((0, 1), (-1, 0))
        )
        units = torch.where(of_m.unsqueeze(-1), of_m_row, of_h_row) % 4  # powers of H; -1 is γ
        return rates, units

    @override
    def blend(self, damping: Tensor, step: Tensor, thetas: Tensor) -> Tensor:
        """Of u(θ) = u_0 + θ H u'_0 + H² Σ b_i(θ) g_i and its derivative, with those of :func:`_interpolant`."""
        inner, forces, c = (x.to(step) for x in (self.inner, self.forces, self.c))
        k = torch.arange(len(inner), dtype=step.dtype, device=step.device)
        powers = thetas.unsqueeze(-1) ** (k + 1) / (k + 1)
        slopes = powers @ inner
        values = (thetas.unsqueeze(-1) * powers / (k + 2)) @ inner
        thetas, step = (x.view(-1, *[1] * damping.dim()) for x in (thetas, step))
        half = damping * step / 2
        g = torch.tensordot(
            _powers(2 * half.unsqueeze(-1), len(forces)), forces, 1
        )  # H² g, (times, ..., stages, columns)
        of_h, of_m = torch.eye(2, len(c) + 2).to(step)
        step, half, thetas = (x.unsqueeze(-1) for x in (step, half, thetas))
        grown = torch.cat([torch.ones_like(half), step + 0 * half, step * step * torch.exp(half * c)], -1)
        values, slopes = (torch.einsum("ts,t...sk->t...k", x, g) * grown for x in (values, slopes))
        h = values + of_h * (1 + half * thetas) + of_m * step * thetas
        m = (slopes - half * values - of_h * half * half * thetas + of_m * step * (1 - half * thetas)) / step
        decay = torch.exp(-half * thetas)
        return torch.stack([decay * h, decay * m], 1).movedim(-1, 2)


def _powers(z: Tensor, count: int) -> Tensor:
    """The first powers of z (..., 1) along its last dimension, by products, which have all derivatives at 0."""
    powers = [torch.ones_like(z)]
    for _ in range(count - 1):
        powers.append(powers[-1] * z)
    return torch.cat(powers, -1)


def _units(damping: Tensor, step: Tensor) -> Tensor:
    """1, H, H² and γ, the last in place of 1/H."""
    return torch.stack(torch.broadcast_tensors(torch.ones_like(step), step, step * step, damping), -1)


def _interpolant(tableau: NystromTableau) -> Tensor:
    r"""Polynomials :math:`\ell_i` with :math:`u''(\theta) \approx \sum_i \ell_i(\theta) g_i`: (powers, stages).

    The weights b' are those of the quadrature that interpolates g at the nodes where b' is not 0. The same polynomial,
    integrated from 0 to :math:`\theta` only, gives u' and u, which end where the step ends. For RKN6 this is the
    interpolant of Dormand and Prince.

    RKN8 has two stages at the end of the step, of which only the first has a weight. The second takes over as much of
    it as makes :math:`\sum_i b_i(\theta) \sum_j a_{ij} c_j^3 = \theta^7 / 840` hold as well, an order condition that is
    missed by most otherwise. What the conditions of order 7 then still miss is 1e-8.
    """
    c = _vector(tableau.c)
    nodes = [i for i, weight in enumerate(tableau.b_velocity) if weight]
    inner = c.new_zeros(len(nodes), len(c))
    for i in nodes:
        polynomial = _vector([1.0])
        for j in nodes:
            if j != i:
                longer = torch.nn.functional.pad(polynomial, (1, 1))
                polynomial = (longer[:-1] - c[j] * longer[1:]) / (c[i] - c[j])
        inner[:, i] = polynomial
    if tableau.b_velocity[-1] == 0:
        defect = strictly_lower(tableau.a) @ c**3 - c**5 / 20
        share = inner @ defect / (defect[-2] - defect[-1])
        inner[:, -2:] += torch.stack([-share, share], -1)
    return inner


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
