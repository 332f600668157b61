"""Exports a trained momentum layer as layers of torch.nn, each with a filter before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hbnode.nn.recurrent.cells import Weights
from hbnode.nn.rules import LinearRule, Rule

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


class MomentumFilter(nn.Module):
    """The filter before a plain layer: applies a rule over time, from rest, to the inputs or a linear map of them.

    Arguments:
        rule: filters the input.
        weights: W and b of the linear map. None filters the inputs themselves, and with ``has_bias`` a constant input
            1, whose weight in the plain layer is b.
        has_bias: whether there is a b.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, rule: Rule, weights: tuple[Tensor, Tensor | None] | None, has_bias: bool) -> None:
        super().__init__()
        self.rule, self.has_bias = rule, has_bias
        w, b = weights or (None, None)
        self.register_buffer("weight", w)
        self.register_buffer("bias", b)

    def forward(self, x: Tensor) -> Tensor:
        """(T, batch, input_size) -> (T, batch, width of the plain layer's input)."""
        if self.weight is not None:
            x = linear(x, self.weight, self.bias)
        elif self.has_bias:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1)
        return self.rule(x, self.rule.start(x[0]))[0]


class StockLayers(nn.Module):
    """Filters and plain layers, for sequences from their start.

    Attributes:
        filters: a :class:`MomentumFilter` for each layer and direction.
        layers: a torch.nn.LSTM, GRU or RNN for each layer and direction.
    """

    def __init__(
        self, filters: list[MomentumFilter], layers: list[nn.RNNBase], directions: int, batch_first: bool
    ) -> None:
        super().__init__()
        self.filters, self.layers = nn.ModuleList(filters), nn.ModuleList(layers)
        self.directions, self.batch_first = directions, batch_first

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | Tensor]:
        """Return output and last state as torch.nn's layer does; x is (T, batch, input_size), or batch first."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            axis = 0 if self.batch_first else 1
            raise ValueError(
                f"x must be sequences of one length, a tensor with 3 axes, got {got}. Fix: x.unsqueeze({axis}) of one "
                "sequence; a PackedSequence goes into the momentum layer itself."
            )
        x = x.transpose(0, 1) if self.batch_first else x
        ended: list[tuple[Tensor, ...]] = []
        sides: list[Tensor] = []
        for k, (before, layer) in enumerate(zip(self.filters, self.layers, strict=True)):
            is_reverse = k % self.directions == 1
            out, state = layer(before(x.flip(0) if is_reverse else x))
            ended.append(state if isinstance(state, tuple) else (state,))
            sides.append(out.flip(0) if is_reverse else out)
            if len(sides) == self.directions:
                x, sides = torch.cat(sides, dim=-1), []
        h, *c = (torch.cat(parts) for parts in zip(*ended, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, (h, c[0]) if c else h


@torch.no_grad()
def plain_layer(stock: str, rule: Rule, weights: Weights) -> tuple[MomentumFilter, nn.RNNBase]:
    """A filter and a plain layer for one layer in one direction."""
    w, b, u = weights.w, weights.b, weights.u
    if isinstance(rule, LinearRule):
        before = MomentumFilter(rule, None, has_bias=b is not None)
        w = w if b is None else torch.cat([w, b.unsqueeze(1)], dim=1)
    else:
        before = MomentumFilter(rule, (w.clone(), None if b is None else b.clone()), has_bias=b is not None)
        w = torch.eye(len(u), dtype=u.dtype, device=u.device)
    options = {"nonlinearity": stock[4:]} if stock.startswith("rnn") else {}
    has_bias = weights.bias is not None
    layer = LAYERS[stock](w.shape[1], u.shape[1], bias=has_bias, device=u.device, dtype=u.dtype, **options)
    layer.weight_ih_l0.copy_(w)
    layer.weight_hh_l0.copy_(u)
    if has_bias:
        layer.bias_ih_l0.zero_()
        layer.bias_hh_l0.copy_(weights.bias)
    return before, layer
