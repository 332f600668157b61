"""Networks of known layers, with their gradient written by hand.

Autograd sums the gradient of a weight at every use. Here the inputs of a layer and the gradients at its outputs are
kept, and the weight's gradient is one product for many uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hbnode.nets import MLP

Weights = Sequence[Tensor | None]  # the weight and the bias of each linear layer

MANY = 1024  # rows of a batch, of so many or more uses a gradient is summed in one product
aten = torch.ops.aten


class Elementwise(NamedTuple):
    """An activation: its value, and the gradient at its input from the one at its output and that output."""

    run: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]


TANH = Elementwise(torch.tanh, aten.tanh_backward.default)
_ELEMENTWISE: dict[type[nn.Module], Elementwise] = {
    nn.Tanh: TANH,
    nn.Sigmoid: Elementwise(torch.sigmoid, aten.sigmoid_backward.default),
    nn.ReLU: Elementwise(torch.relu, lambda g, y: aten.threshold_backward.default(g, y, 0)),
    nn.ELU: Elementwise(nn.functional.elu, lambda g, y: aten.elu_backward.default(g, 1.0, 1.0, 1.0, True, y)),
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """Whether a call of a module of torch or hbnode does what its class says, and nothing else."""
    if any(getattr(module, hooks) for hooks in HOOKS) or "forward" in module.__dict__:
        return False
    return not any(isinstance(value, Tensor) for value in module.__dict__.values())


class Sums:
    """The gradients of weights, from many uses of each."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.totals: list[Tensor | None] = [None] * len(weights)
        self._uses: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in weights[::2]]
        self._rows = [0 for _ in self._uses]

    def add(self, layer: int, x: Tensor, gradient: Tensor) -> None:
        """A use of a linear layer: its input and the gradient at its output."""
        inputs, gradients = self._uses[layer]
        inputs.append(x)
        gradients.append(gradient)
        self._rows[layer] += len(x)
        if self._rows[layer] >= MANY:
            self._settle(layer)

    def all(self) -> list[Tensor | None]:
        """The gradients of all weights; None for one that was not used."""
        for layer in range(len(self._uses)):
            self._settle(layer)
        return self.totals

    def _settle(self, layer: int) -> None:
        inputs, gradients = self._uses[layer]
        if not inputs:
            return
        g, x = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (gradients, inputs))
        self._uses[layer], self._rows[layer] = ([], []), 0
        self._add(2 * layer, g.T @ x)
        if self.weights[2 * layer + 1] is not None:
            self._add(2 * layer + 1, g.sum(0))

    def _add(self, index: int, gradient: Tensor) -> None:
        total = self.totals[index]
        self.totals[index] = gradient if total is None else total.add_(gradient)


class Network:
    """Linear layers with activations between them.

    Arguments:
        layers: in their order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.elementwise = [_ELEMENTWISE.get(type(layer)) for layer in layers]  # None for a linear layer

    @staticmethod
    def of(func: object) -> Network | None:
        """The network that a module is; None if it is none, or does more than that."""
        layers = _layers(func)
        if layers is None or not any(isinstance(layer, nn.Linear) for layer in layers):
            return None
        return Network(layers)

    def maps(self, inputs: int, outputs: int) -> bool:
        """Whether the network is one of so many inputs and outputs."""
        sizes = [size for layer in self.linear for size in (layer.in_features, layer.out_features)]
        return [inputs, *sizes[1:-1:2]] == sizes[::2] and sizes[-1] == outputs

    def weights(self) -> list[Tensor | None]:
        """The weight and the bias of each linear layer."""
        return [tensor for layer in self.linear for tensor in (layer.weight, layer.bias)]

    def run(self, x: Tensor, weights: Weights, kept: list[Tensor] | None) -> Tensor:
        """The output for (batch, n). What the gradient needs is added to ``kept``."""
        layer = 0
        for elementwise in self.elementwise:
            if elementwise is not None:
                x = elementwise.run(x)
            if kept is not None:  # the input of a linear layer, or the output of an activation
                kept.append(x)
            if elementwise is None:
                x = linear(x, weights[layer], weights[layer + 1])  # type: ignore[arg-type]  # a weight is a tensor
                layer += 2
        return x

    def pull(self, gradient: Tensor, weights: Weights, kept: Sequence[Tensor], sums: Sums) -> Tensor:
        """The gradient at the input from the one at the output; those of the weights are added to ``sums``."""
        layer = len(self.linear)
        for elementwise, value in zip(reversed(self.elementwise), reversed(kept), strict=True):
            if elementwise is not None:
                gradient = elementwise.pull(gradient, value)
                continue
            layer -= 1
            sums.add(layer, value, gradient)
            gradient = gradient @ weights[2 * layer]  # type: ignore[operator]  # a weight is a tensor
        return gradient


def _layers(func: object) -> list[nn.Module] | None:
    """The layers of a network, those of the networks inside in their places."""
    if not isinstance(func, nn.Module) or not is_plain(func):
        return None
    if type(func) is MLP and func.time_dependent:
        return None
    if type(func) in (nn.Sequential, MLP):
        found = []
        for child in func if isinstance(func, nn.Sequential) else func.children():  # one may be there twice
            layers = _layers(child)
            if layers is None:
                return None
            found += layers
        return found
    if type(func) is nn.ELU and func.alpha != 1.0:
        return None
    return [func] if type(func) is nn.Linear or type(func) in _ELEMENTWISE else None
