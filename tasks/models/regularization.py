"""Kinetic-energy and Jacobian penalties for neural ODEs, integrated together with the state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hbnode

PenalizedState = Tensor | tuple[Tensor, Tensor, Tensor]  # h, or in training h and the two penalties


class Regularized(nn.Module):
    r"""A first-order field that in training also integrates two regularisation penalties.

    The kinetic energy :math:`\int \|f\|^2 / d\,dt` and Hutchinson's estimate of the Jacobian's Frobenius norm,
    :math:`\int \|\varepsilon^\top \partial f / \partial h\|^2 / d\,dt` with one standard normal :math:`\varepsilon` for
    each solve; d is the number of elements of h. In evaluation mode there are no penalties.

    References:
        Finlay, Jacobsen, Nurbekyan and Oberman, How to Train Your Neural ODE, arXiv:2002.02798.

    Arguments:
        field: a field whose state is one tensor.

    Shape:
        - readout in training: (T, batch, d + 2), the flattened h and the two penalties; in evaluation: as for the
          field.
    """

    def __init__(self, field: hbnode.Field) -> None:
        super().__init__()
        self.field = field
        self.noise: Tensor | None = None  # epsilon of the current or most recent solve

    def initial_state(self, x: Tensor) -> PenalizedState:
        """Return the field's initial state, and in training two penalties of zero."""
        h = self.field.initial_state(x)
        if not isinstance(h, Tensor):
            raise TypeError(f"the field's state must be one tensor, got {len(h)} of them. Fix: a NODE or an ANODE.")
        if not self.training:
            return h
        self.noise = torch.randn_like(h).detach()
        return h, h.new_zeros(len(h)), h.new_zeros(len(h))

    def forward(self, t: Tensor, state: PenalizedState) -> PenalizedState:
        """Return the derivatives of the state and of the penalties."""
        if isinstance(state, Tensor):
            return self.field(t, state)
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            h = state[0] if state[0].requires_grad else state[0].detach().requires_grad_()
            f = self.field(t, h)
            (product,) = torch.autograd.grad(f, h, self.noise, create_graph=wanted)
        f = f if wanted else f.detach()
        return f, _mean_square(f), _mean_square(product)

    def readout(self, state: PenalizedState) -> Tensor:
        """Return h of a state or trajectory, and in training the penalties after it."""
        if isinstance(state, Tensor):
            return self.field.readout(state)
        h, *penalties = state
        return torch.cat([self.field.readout(h).flatten(2), torch.stack(penalties, -1)], -1)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().flatten(1).mean(1)
