"""Models of densities in the plane: a heavy-ball flow, and a continuous normalizing flow with the exact trace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import hbnode

TITLES = {"flow": "heavy-ball flow", "generalized": "generalized heavy-ball flow", "cnf": "CNF, exact trace"}


class Flow(nn.Module):
    """A heavy-ball flow with the interface of the CNF."""

    def __init__(self, hidden: int, **options: Any) -> None:
        super().__init__()
        net = hbnode.nn.MLP(2, [hidden] * 2, 2, activation=nn.Tanh, time_dependent=True)
        self.flow = hbnode.distributions.HeavyBallFlow(net, 2, **options)

    def log_prob(self, x: Tensor, samples: int) -> Tensor:
        """Return a lower bound (ELBO) of the log-density of x (batch, 2), from several samples of the momentum."""
        return self.flow.log_prob_bound(x, samples)

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        """Return sampled positions (n, 2), differentiable, and log p(h, m) - log q(m | h)."""
        h, m, log_prob = self.flow.rsample_and_log_prob(n)
        return h, log_prob - self.flow.posterior(h).log_prob(m)


class CNF(nn.Module):
    """A continuous normalizing flow: a NODE that maps data at t = 0 to the standard normal at t = 1, with the exact
    trace.

    Arguments:
        hidden: units of the two hidden layers of f.
        tol: relative and absolute tolerance of the solver tsit5.
    """

    def __init__(self, hidden: int, tol: float = 1e-3) -> None:
        super().__init__()
        net = hbnode.nn.MLP(2, [hidden] * 2, 2, activation=nn.Tanh, time_dependent=True)
        self.block = hbnode.ODEBlock(hbnode.NODE(net), rtol=tol, atol=tol)

    def change(self, t: Tensor, h: Tensor, dh: Tensor) -> Tensor:
        """Return the rate of change -tr(∂f / ∂h) of the log-density, from the columns of the Jacobian."""
        axes = torch.eye(2, dtype=h.dtype, device=h.device).unsqueeze(1).expand(2, *h.shape)

        def column(axis: Tensor) -> Tensor:
            return torch.func.jvp(lambda x: self.block.field(t, x), (h,), (axis,))[1]

        return -torch.func.vmap(column)(axes).diagonal(dim1=0, dim2=2).sum(1)  # f itself is evaluated once

    def log_prob(self, x: Tensor, samples: int) -> Tensor:
        """Return the log-density. It is exact up to the solver's error; ``samples`` is not used."""
        z, change = self.block.with_integral(x, self.change)
        return log_normal(z) - change

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        """Return sampled points and their log-densities."""
        z = torch.randn(n, 2, device=next(self.parameters()).device)
        x, change = self.block.with_integral(z, self.change, [1.0, 0.0])
        return x[-1], log_normal(z) + change[-1]


def log_normal(z: Tensor) -> Tensor:
    """Return the log-density of the standard normal in the plane."""
    return -z.square().sum(1) / 2 - math.log(2 * math.pi)
