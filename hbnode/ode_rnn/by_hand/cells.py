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

    @abstractmethod
    def gates(self, x: Tensor) -> Tensor:
        """What inputs (..., input_size) give: (..., gates)."""

    @abstractmethod
    def weights(self) -> list[Tensor | None]:
        """Of the linear layers that see the state: the weight and the bias of each."""

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
    """torch.nn.GRUCell. The gates are r, z and n; the state's linear layers are that of r and z, and that of n."""

    @override
    def gates(self, x: Tensor) -> Tensor:
        own, n = self.module.bias_hh, 2 * self.module.hidden_size
        bias: Tensor | None = self.module.bias_ih
        if bias is not None and own is not None:
            bias = torch.cat([bias[:n] + own[:n], bias[n:]])
        return linear(x, self.module.weight_ih, bias)

    @override
    def weights(self) -> list[Tensor | None]:
        weight, bias, n = self.module.weight_hh, self.module.bias_hh, 2 * self.module.hidden_size
        return [weight[:n], None, weight[n:], None if bias is None else bias[n:]]

    @override
    def run(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        n = s.shape[1]
        of_rz, _, of_n, bias = weights
        assert of_rz is not None
        assert of_n is not None
        rz = torch.addmm(gates[:, : 2 * n], s, of_rz.T).sigmoid_()
        own = linear(s, of_n, bias)
        new = torch.addcmul(gates[:, 2 * n :], rz[:, :n], own).tanh_()
        return torch.lerp(new, s, rz[:, n:]), (s, rz, own, new)

    @override
    def plain(self, gates: Tensor, s: Tensor, weights: Weights) -> Tensor:
        of_rz, _, of_n, bias = weights
        assert of_rz is not None
        assert of_n is not None
        r, z, n = gates.chunk(3, 1)
        own_r, own_z = linear(s, of_rz).chunk(2, 1)
        z = torch.sigmoid(z + own_z)
        return (1 - z) * torch.tanh(n + torch.sigmoid(r + own_r) * linear(s, of_n, bias)) + z * s

    @override
    def pull(self, gradient: Tensor, kept: Sequence[Tensor], weights: Weights, sums: Sums, of_gates: Tensor) -> Tensor:
        s, rz, own, new = kept
        n = s.shape[1]
        of_rz, _, of_n, _ = weights
        assert of_rz is not None
        assert of_n is not None
        of_s = gradient * rz[:, n:]
        of_new = TANH.pull(gradient - of_s, new)
        both = torch.empty_like(rz)
        torch.mul(of_new, own, out=both[:, :n])
        torch.mul(gradient, s - new, out=both[:, n:])
        both = aten.sigmoid_backward.default(both, rz)
        of_own = of_new * rz[:, :n]
        torch.cat((both, of_new), 1, out=of_gates)
        sums.add(0, s, both)
        sums.add(1, s, of_own)
        return of_s.addmm_(both, of_rz).addmm_(of_own, of_n)


class RNN(Cell):
    """torch.nn.RNNCell with tanh."""

    @override
    def gates(self, x: Tensor) -> Tensor:
        return linear(x, self.module.weight_ih, self.module.bias_ih)

    @override
    def weights(self) -> list[Tensor | None]:
        return [self.module.weight_hh, self.module.bias_hh]

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
