"""The coefficients of steps of any sizes, and their derivatives with respect to γ, in the order of their use.

Sizes are (N,), of all samples of one step or of many; coefficients have N behind, (..., N, 1).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hbnode.solvers.nystrom import Nystrom
from hbnode.solvers.splitting import Splitting
from hbnode.solvers.step_method import StepMethod

GAMMA = 3  # the unit of Nystrom's constants that stands for γ; those before it are powers of H


class _Form(NamedTuple):
    """Coefficients as sums of H^w Q(z) e^{rz} with z = γH.

    Attributes:
        polynomials: Q, a row of each coefficient, (coefficients, degree + 1).
        rates: the different r, (rates, 1).
        of_rate: which of them each coefficient has.
        units: which of the units each coefficient has.
        shape: of the coefficients, columns and rows.
    """

    polynomials: Tensor
    rates: Tensor
    of_rate: Tensor
    units: Tensor
    shape: tuple[int, int]

    def values(self, z: Tensor, units: list[Tensor]) -> Tensor:
        """The coefficients for z and the values of the units, (columns, rows, N, 1)."""
        powers = z.expand(self.polynomials.shape[1], -1).clone()
        powers[0] = 1.0
        values = self.polynomials @ powers.cumprod(0)
        values.mul_(torch.exp(self.rates * z)[self.of_rate])
        return values.mul_(torch.stack(units)[self.units]).view(*self.shape, -1, 1)


@functools.cache
def _nystrom(method: Nystrom, device: torch.device, order: int) -> _Form:
    """The coefficients of a Nystrom method (order 0), or their derivatives with respect to γ (order 1).

    The derivative of H^w Q(γH) e^{rγH} is H^{w+1} (Q' + rQ) e^{rz}; a coefficient in units of γ is z Q(z) / H.
    """
    with torch.inference_mode(False), torch.no_grad():
        polynomials, rates, units = method.constants(device)
        columns = len(method.c) + 2
        if order:
            longer = torch.nn.functional.pad(polynomials, (0, 0, 0, 1))
            longer = torch.where(units == GAMMA, longer.roll(1, 0), longer)
            degrees = torch.arange(len(longer), dtype=rates.dtype, device=device).unsqueeze(1)
            polynomials = (degrees * longer).roll(-1, 0) + rates * longer
            units = torch.where(units == GAMMA, 0, units + 1)
        order_of = torch.arange(polynomials.shape[1], device=device).view(-1, columns).T.flatten()
        different, of_rate = rates[order_of].unique(return_inverse=True)
        shape = (columns, len(order_of) // columns)
        return _Form(polynomials[:, order_of].T.contiguous(), different.unsqueeze(1), of_rate, units[order_of], shape)


def coefficients(method: StepMethod, damping: Tensor, sizes: Tensor) -> Tensor:
    """Those of :meth:`StepMethod.matrix`: (columns, rows, N, 1) of explicit methods, (coefficients, N, 1) of others."""
    if isinstance(method, Nystrom):
        units = [torch.ones_like(sizes), sizes, sizes * sizes, damping.expand_as(sizes)]
        return _nystrom(method, sizes.device, 0).values(damping * sizes, units)
    return _turned(method.matrix(damping, sizes.unsqueeze(-1)))


def slopes(method: StepMethod, damping: Tensor, sizes: Tensor) -> Tensor:
    """The derivatives of :func:`coefficients` with respect to γ, of a method that solves the damping."""
    if isinstance(method, Nystrom):
        square = sizes * sizes
        units = [torch.ones_like(sizes), sizes, square, square * sizes]
        return _nystrom(method, sizes.device, 1).values(damping * sizes, units)
    if isinstance(method, Splitting):
        return _turned(_of_splitting(method, damping, sizes.unsqueeze(-1)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(damping.detach(), torch.ones_like(damping))
        slope = forward_ad.unpack_dual(method.matrix(dual, sizes.unsqueeze(-1))).tangent
        assert slope is not None
        return _turned(slope)


def _turned(matrix: Tensor) -> Tensor:
    """(N, 1, *) -> (*, N, 1), the columns of a matrix before its rows."""
    return matrix.permute(*range(matrix.dim() - 1, 1, -1), 0, 1).contiguous()


def _of_splitting(method: Splitting, damping: Tensor, step: Tensor) -> Tensor:
    """Of lengths of drifts, which do not depend on γ, decays and weights of kicks."""
    step = step.unsqueeze(-1)
    lengths = step * method.kicks.to(step.device)
    z = damping * lengths
    near = z.abs() < 1e-3  # the derivative of (1 - e^{-z})/z by its series, where the quotient would cancel
    far = torch.where(near, 1.0, z)
    decay = torch.exp(-z)
    slope = torch.where(near, -0.5 + z / 3 - z * z / 8 + z**3 / 30, (decay * (1 + far) - 1) / (far * far))
    drifts = torch.zeros_like(z[..., :1]).expand(*z.shape[:-1], len(method.drifts))
    return torch.cat([drifts, -lengths * decay, lengths * lengths * slope], -1)
