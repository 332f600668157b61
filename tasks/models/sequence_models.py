"""Recurrent networks for long sequences of equal or different lengths.

- "tanh": :class:`hbnode.nn.TanhRNN` with sparse initial weights (15 nonzero entries per unit, also in the output layer)
  and random biases.
- "lstm": torch.nn.LSTM, with a forget-gate bias of 1.
- "lstm_chrono": the same with chrono initialisation (Tallec and Ollivier, arXiv:1804.11188): biases log u at the forget
  gate and -log u at the input gate, u uniform in [1, length - 1].
- "gru": torch.nn.GRU.
- "dtriv": :class:`hbnode.nn.DTRIV`, a recurrent layer with an orthogonal weight.
- "adam_lstm": the LSTM with the momentum rule "adam" and a forget-gate bias of 1, split between its two bias vectors.
- "oscillators": a network applied to each sample, then :class:`hbnode.nn.Oscillators`, one for each unit.

Further layers can be added to :data:`LAYERS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn.recurrent import sparse_
from hbnode.optim import tanh_hidden

MakeLayer = Callable[[int, int, int], nn.Module]  # (features, units, steps to remember) -> layer


class Swinging(nn.Sequential):
    """A one-hidden-layer network applied to each sample, then oscillators that remember ``length`` steps."""

    def __init__(self, input_size: int, hidden: int, length: int) -> None:
        slowest = 0.1 / length
        ranges = (slowest, max(0.1, slowest))
        super().__init__(
            nn.Linear(input_size, 2 * hidden),
            nn.GELU(),
            nn.Linear(2 * hidden, hidden),
            hbnode.nn.Oscillators(hidden, hidden, frequency=ranges, decay=ranges),
        )


def lstm(input_size: int, hidden: int, length: int) -> nn.LSTM:
    """Return torch's LSTM with a forget-gate bias of 1 and all other biases 0."""
    layer = nn.LSTM(input_size, hidden, batch_first=True)
    input_gate, forget_gate, *others = _biases(layer, hidden)
    for bias in (input_gate, *others):
        bias.zero_()
    forget_gate.fill_(1.0)
    return layer


def lstm_chrono(input_size: int, hidden: int, length: int) -> nn.LSTM:
    """Return torch's LSTM with chrono initialisation: units initially remember for 1 to ``length`` steps."""
    layer = lstm(input_size, hidden, length)
    input_gate, forget_gate, *_ = _biases(layer, hidden)
    forget_gate.copy_(torch.empty(hidden).uniform_(1, max(length - 1, 1)).log())
    input_gate.copy_(-forget_gate)
    return layer


def _biases(layer: nn.LSTM, hidden: int) -> list[Tensor]:
    """Return views of the first bias vector, split by gate (input, forget, ...), and then the second bias vector."""
    of_input, of_state = (p.detach() for name, p in layer.named_parameters() if name.startswith("bias"))
    return [*of_input.split(hidden), of_state]


def adam_lstm(input_size: int, hidden: int, length: int) -> nn.Module:
    """Return an AdamLSTM with the rule of tables 8 and 9 of Nguyen et al. (2020) for adding and copying."""
    rule = hbnode.nn.rules.Adam(momentum=0.6, step_size=2.0, beta=0.999)
    return hbnode.nn.MomentumLSTM(input_size, hidden, rule=rule, forget_bias=0.5, batch_first=True)


LAYERS: dict[str, MakeLayer] = {
    "tanh": lambda inputs, hidden, length: hbnode.nn.TanhRNN(inputs, hidden, batch_first=True),
    "lstm": lstm,
    "lstm_chrono": lstm_chrono,
    "gru": lambda inputs, hidden, length: nn.GRU(inputs, hidden, batch_first=True),
    "dtriv": lambda inputs, hidden, length: hbnode.nn.DTRIV(inputs, hidden, batch_first=True),
    "adam_lstm": adam_lstm,
    "oscillators": Swinging,
}


class SequenceModel(nn.Module):
    """A recurrent layer, and a linear output layer that is applied to the last h or to each h.

    Arguments:
        name: name of the layer in :data:`LAYERS`.
        input_size: number of features of a step.
        hidden: size of h.
        output_size: number of features of an output.
        length: the approximate number of steps to remember.
        reads_end: whether there is a single output, after the last step.
    """

    def __init__(
        self, name: str, input_size: int, hidden: int, output_size: int, *, length: int, reads_end: bool
    ) -> None:
        super().__init__()
        self.reads_end = reads_end
        self.layer = LAYERS[name](input_size, hidden, length)
        self.head = nn.Linear(hidden, output_size)
        if isinstance(self.layer, hbnode.nn.TanhRNN):
            connections = self.layer.connections
            sparse_(self.head.weight, connections)
            nn.init.normal_(self.head.bias, std=connections**-0.5)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        """Return outputs (batch, output_size), or (batch, T, output_size).

        Arguments:
            x: sequences (batch, T, input_size), padded at their end.
            last: index of the last step of each sequence, (batch,).
        """
        return self.read(self.layer(x)[0], last)

    def read(self, h: Tensor, last: Tensor) -> Tensor:
        """Return the outputs, given h at all steps (batch, T, hidden)."""
        return self.head(h[torch.arange(len(h), device=h.device), last] if self.reads_end else h)

    def with_hidden(self, x: Tensor, last: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the outputs, and the hidden states with their metric for structural damping. The metric is 0 in
        padding.

        The hidden states of a tanh network are its pre-activations, see :func:`hbnode.optim.tanh_hidden`.
        """
        h = self.layer(x)[0]
        counts = (torch.arange(h.shape[1], device=h.device) <= last[:, None]).to(h.dtype).unsqueeze(2)
        if isinstance(self.layer, hbnode.nn.TanhRNN):
            counts = counts * tanh_hidden(h)[1]
        return self.read(h, last), (h, counts)
