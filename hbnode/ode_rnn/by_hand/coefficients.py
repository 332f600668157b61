"""The coefficients of steps of any sizes, and their derivatives with respect to γ, in the order of their use.

Sizes are (N,), of all samples of one step or of many; coefficients have N behind, (..., N, 1). All is on the host.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hbnode.solvers.nystrom import Nystrom
from hbnode.solvers.splitting import Splitting
from hbnode.solvers.step_method import StepMethod

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class _Form:
    """The coefficients of a Nystrom method, H^w Q(z) e^{rz} with z = γH.

    Of order 1 they are the derivatives with respect to γ, without the rows of the error.
    """

    def __init__(self, method: Nystrom, order: int) -> None:
        import numpy as np  # here, as everywhere in hbnode, because it is slow to import

        polynomials, rates, powers = method.host_constants(error=order == 0, order=order)
        columns = len(method.c) + 2
        row, column = np.divmod(method.places(error=order == 0), columns)
        self.shape = columns, int(row.max()) + 1
        place = column * self.shape[1] + row
        self.polynomials = np.zeros((columns * self.shape[1], len(polynomials)))  # Q, of each coefficient
        self.polynomials[place] = polynomials.T
        rate, power = np.zeros((2, len(self.polynomials)))
        rate[place], power[place] = rates, powers
        different, self.of_rate = np.unique(rate, return_inverse=True)
        self.rates, self.of_power = different[:, None], power.astype(int) + 1

    def values(self, damping: Tensor, sizes: Tensor) -> Tensor:
        """The coefficients, (columns, rows, N, 1)."""
        import numpy as np

        h: Array = sizes.numpy()
        with np.errstate(all="ignore"):  # what is not finite is rejected
            z = float(damping) * h
            powers = np.empty((self.polynomials.shape[1], len(h)))
            powers[0], powers[1:] = 1.0, z
            values = self.polynomials @ np.multiply.accumulate(powers, out=powers)
            values *= np.exp(self.rates * z)[self.of_rate]
            units = np.empty((5, len(h)))
            units[0] = 1.0 / np.where(h == 0, 1.0, h)  # Q(0) is 0 where it counts
            units[1], units[2:] = 1.0, h
            np.multiply.accumulate(units[1:], out=units[1:])
            values *= units[self.of_power]
        return torch.from_numpy(values).view(*self.shape, -1, 1)


@functools.cache
def _nystrom(method: Nystrom, order: int) -> _Form:
    return _Form(method, order)


def coefficients(method: StepMethod, damping: Tensor, sizes: Tensor) -> Tensor:
    """Those of :meth:`StepMethod.matrix`: (columns, rows, N, 1) of explicit methods, (coefficients, N, 1) of others."""
    if isinstance(method, Nystrom):
        return _nystrom(method, 0).values(damping, sizes)
    return _turned(method.matrix(damping, sizes.unsqueeze(-1)))


def slopes(method: StepMethod, damping: Tensor, sizes: Tensor) -> Tensor:
    """The derivatives of :func:`coefficients` with respect to γ, of a method that solves the damping."""
    if isinstance(method, Nystrom):
        return _nystrom(method, 1).values(damping, sizes)
    if isinstance(method, Splitting):
        return _turned(_of_splitting(method, damping, sizes.unsqueeze(-1)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(damping, torch.ones_like(damping))
        slope = forward_ad.unpack_dual(method.matrix(dual, sizes.unsqueeze(-1))).tangent
        assert slope is not None
        return _turned(slope)


def _turned(matrix: Tensor) -> Tensor:
    """(N, 1, *) -> (*, N, 1), the columns of a matrix before its rows."""
    return matrix.permute(*range(matrix.dim() - 1, 1, -1), 0, 1).contiguous()


def _of_splitting(method: Splitting, damping: Tensor, step: Tensor) -> Tensor:
    """Of lengths of drifts, which do not depend on γ, decays and weights of kicks."""
    step = step.unsqueeze(-1)
    lengths = step * method.kicks
    z = damping * lengths
    near = z.abs() < 1e-3  # the derivative of (1 - e^{-z})/z by its series, where the quotient would cancel
    far = torch.where(near, 1.0, z)
    decay = torch.exp(-z)
    slope = torch.where(near, -0.5 + z / 3 - z * z / 8 + z**3 / 30, (decay * (1 + far) - 1) / (far * far))
    drifts = torch.zeros_like(z[..., :1]).expand(*z.shape[:-1], len(method.drifts))
    return torch.cat([drifts, -lengths * decay, lengths * lengths * slope], -1)
