"""torch.nn's cells, with their gradient written by hand; what they make of the inputs is computed for all samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from typing_extensions import override

from hbnode._structure import is_as_torch_has_it
from hbnode.ode_rnn.by_hand.networks import TANH, Sums, Weights, aten, is_plain


class Cell(ABC):
    """A cell: the state after a sample from the state before it, and *gates* that its input gives."""

    def __init__(self, module: nn.RNNCellBase) -> None:
        self.module = module

    @staticmethod
    def of(module: nn.Module) -> Cell | None:
        """That of a module of torch.nn; None if it is none that is known."""
        if not isinstance(module, nn.RNNCellBase) or not is_plain(module) or not is_as_torch_has_it(module):
            return None
        if type(module) is nn.RNNCell and module.nonlinearity == "tanh":
            return RNN(module)
        return GRU(module) if type(module) is nn.GRUCell else None

    def gates(self, x: Tensor) -> Tensor:
        """What inputs (..., input_size) give: (..., gates)."""
        return linear(x, self.module.weight_ih, self.module.bias_ih)

    def weights(self) -> list[Tensor | None]:
        """Of the linear layer that sees the state: the weight and the bias."""
        return [self.module.weight_hh, self.module.bias_hh]

    @abstractmethod
    def run(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The new state, and what the gradient needs."""

    @abstractmethod
    def plain(self, gates: Tensor, s: Tensor, weights: Weights) -> Tensor:
        """The new state by operations of torch that record their graph."""

    @abstractmethod
    def pull(self, gradient: Tensor, kept: Sequence[Tensor], weights: Weights, sums: Sums, of_gates: Tensor) -> Tensor:
        """The gradient at s; that at the gates is written into ``of_gates``."""


class GRU(Cell):
    """torch.nn.GRUCell. The gates are r, z and n."""

    @override
    def run(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        n = s.shape[1]
        weight, bias = weights
        assert weight is not None
        rz, own = linear(s, weight, bias).split((2 * n, n), 1)
        r, z = rz.add_(gates[:, : 2 * n]).sigmoid_().chunk(2, 1)
        new = torch.addcmul(gates[:, 2 * n :], r, own).tanh_()
        return torch.lerp(new, s, z), (s, rz, own, new)

    @override
    def plain(self, gates: Tensor, s: Tensor, weights: Weights) -> Tensor:
        weight, bias = weights
        assert weight is not None
        r, z, n = gates.chunk(3, 1)
        own_r, own_z, own_n = linear(s, weight, bias).chunk(3, 1)
        z = torch.sigmoid(z + own_z)
        return (1 - z) * torch.tanh(n + torch.sigmoid(r + own_r) * own_n) + z * s

    @override
    def pull(self, gradient: Tensor, kept: Sequence[Tensor], weights: Weights, sums: Sums, of_gates: Tensor) -> Tensor:
        s, rz, own, new = kept
        assert weights[0] is not None
        r, z = rz.chunk(2, 1)
        of_s = gradient * z
        of_new = TANH.pull(gradient - of_s, new)
        of_rz = aten.sigmoid_backward.default(torch.cat((of_new * own, gradient * (s - new)), 1), rz)
        torch.cat((of_rz, of_new), 1, out=of_gates)
        of_own = torch.cat((of_rz, of_new * r), 1)
        sums.add(0, s, of_own)
        return of_s.addmm_(of_own, weights[0])


class RNN(Cell):
    """torch.nn.RNNCell with tanh."""

    @override
    def run(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, bias = weights
        assert weight is not None
        new = linear(s, weight, bias).add_(gates).tanh_()
        return new, (s, new)

    @override
    def plain(self, gates: Tensor, s: Tensor, weights: Weights) -> Tensor:
        weight, bias = weights
        assert weight is not None
        return torch.tanh(linear(s, weight, bias) + gates)

    @override
    def pull(self, gradient: Tensor, kept: Sequence[Tensor], weights: Weights, sums: Sums, of_gates: Tensor) -> Tensor:
        s, new = kept
        assert weights[0] is not None
        of_own = TANH.pull(gradient, new)
        of_gates.copy_(of_own)
        sums.add(0, s, of_own)
        return of_own @ weights[0]
