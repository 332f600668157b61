r"""Runge-Kutta-Nystrom methods for :math:`h'' + \gamma h' = f(h, t)`.

With :math:`u(s) = e^{\gamma s/2} h(t_n + s)`, local to the step that starts at :math:`t_n`, the damping disappears:

    u'' = (γ²/4) u + e^{γs/2} f(e^{-γs/2} u, t_n + s) =: g(u, s),   u(0) = h_n,   u'(0) = m_n + (γ/2) h_n,
    h = e^{-γH/2} u,   m = e^{-γH/2} (u' - (γ/2) u),

and a right-hand side without velocity is what Nystrom methods are made for: their order with fewer evaluations than
any Runge-Kutta method. The stages u_i = u_0 + c_i H u'_0 + H² Σ_j a_ij g_j are linear in h_n, m_n and the values f_j.
With q = γ²H²/4, E = diag(e^{γHc_j/2}) and the nilpotent A = (a_ij),

    g = (I - qA)^{-1} [(γ²/4) (1 + cγH/2) h_n + (γ²/4) c H m_n + E f],   (I - qA)^{-1} = Σ_k q^k A^k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hbnode.solvers.explicit import ExplicitMethod, strictly_lower
from hbnode.solvers.tableaus import NystromTableau


class Nystrom(ExplicitMethod):
    """The Nystrom pair of a tableau."""

    state_rows = 2

    def __init__(self, tableau: NystromTableau) -> None:
        self.order, self.error_order = tableau.order, tableau.error_order
        self.nodes = tuple(map(float, tableau.c[1:]))
        self.has_dense = tableau.dense is not None
        double = {"dtype": torch.float64}
        a = strictly_lower(tableau.a)
        size = len(a)
        self.c = torch.tensor(tableau.c, **double)
        self.a_powers = torch.stack([torch.linalg.matrix_power(a, k) for k in range(size)])
        b, b_velocity = torch.tensor(tableau.b, **double), torch.tensor(tableau.b_velocity, **double)
        error, error_velocity = torch.tensor(tableau.error, **double), torch.tensor(tableau.error_velocity, **double)
        zero = torch.zeros(size, **double)
        # Rows: stages 2..s (the last is h_1), m_1, error of h, error of m. The weights of g are
        # H² position + H velocity - H² (γ/2) position_in_velocity, since m = e^{-γs/2} (u' - (γ/2) u).
        self.position = torch.cat([a[1:], torch.stack([zero, error, zero])])
        self.velocity = torch.cat([torch.zeros_like(a[1:]), torch.stack([b_velocity, zero, error_velocity])])
        self.gauge = torch.cat([torch.zeros_like(a[1:]), torch.stack([b, zero, error])])
        self.is_h = torch.tensor([1.0] * (size - 1) + [0.0, 0.0, 0.0], **double)
        self.is_m = torch.tensor([0.0] * (size - 1) + [1.0, 0.0, 0.0], **double)
        self.at = torch.cat([self.c[1:], torch.ones(3, **double)])  # the time of each row, as a fraction of the step
        if self.has_dense:
            self.dense = torch.tensor(tableau.dense, **double)
            self.dense_velocity = torch.tensor(tableau.dense_velocity, **double)

    def matrix(self, damping: Tensor, step: Tensor, thetas: Tensor | None = None) -> Tensor:
        """C, from the module's docstring."""
        step = step[..., None]
        gamma = damping[..., None].to(step)
        z = gamma * step
        size = len(self.c)
        c, at, is_h, is_m = (x.to(step.device) for x in (self.c, self.at, self.is_h, self.is_m))
        position, velocity, gauge = (x.to(step.device) for x in (self.position, self.velocity, self.gauge))
        if thetas is not None:
            more = self._dense_rows(thetas)
            at, is_h, is_m = (_append(x, y, -1) for x, y in zip((at, is_h, is_m), more[:3], strict=True))
            position, velocity, gauge = (
                _append(x, y, -2) for x, y in zip((position, velocity, gauge), more[3:], strict=True)
            )

        powers = (z * z / 4) ** torch.arange(size, dtype=z.dtype, device=z.device)
        inverse = (powers @ self.a_powers.to(step.device).flatten(1)).unflatten(-1, (size, size))
        source = (gamma * gamma / 4).unsqueeze(-1) * torch.stack([1 + z * c / 2, (step * c).expand_as(z * c)], -1)
        g = torch.cat([inverse @ source, inverse * torch.exp(z * c / 2).unsqueeze(-2)], -1)

        h2 = (step * step).unsqueeze(-1)
        weights = h2 * position + step.unsqueeze(-1) * velocity - (h2 * gamma.unsqueeze(-1) / 2) * gauge
        base_h = is_h * (1 + at * z / 2) - is_m * gamma * at * z / 4
        base_m = is_h * at * step + is_m * (1 - at * z / 2)
        base = torch.stack([base_h, base_m.expand_as(base_h)], -1)
        rows = weights @ g
        rows = torch.cat([rows[..., :2] + base, rows[..., 2:]], -1)
        return torch.exp(-z * at / 2).unsqueeze(-1) * rows

    def _dense_rows(self, thetas: Tensor) -> tuple[Tensor, ...]:
        """Times, marks and weights of rows for h and m at each θ: those of the step with b(θ) in place of b."""
        powers = thetas.unsqueeze(-1) ** torch.arange(self.dense.shape[1], dtype=thetas.dtype, device=thetas.device)
        b = thetas.unsqueeze(-1) ** 2 * (powers @ self.dense.to(thetas.device).T)
        b_velocity = thetas.unsqueeze(-1) * (powers @ self.dense_velocity.to(thetas.device).T)
        one, none, zero = torch.ones_like(thetas), torch.zeros_like(thetas), torch.zeros_like(b)
        marks = ((thetas, thetas), (one, none), (none, one))
        weights = ((b, zero), (zero, b_velocity), (zero, b))
        return (
            *(torch.stack(pair, -1).flatten(-2) for pair in marks),
            *(torch.stack(pair, -2).flatten(-3, -2) for pair in weights),
        )


def _append(constant: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``rows`` behind the ``constant`` ones, which have no leading dimensions."""
    leading = rows.shape[: rows.dim() - constant.dim()]
    return torch.cat([constant.expand(*leading, *constant.shape), rows], dim)
