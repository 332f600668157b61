"""Recurrent networks for long sequences of equal or different lengths.

- "tanh": :class:`hbnode.nn.TanhRNN`, whose weights, also of the readout, have 15 nonzero entries per unit initially,
  with random biases.
- "lstm": torch's, with a bias of 1 at the forget gate.
- "lstm_chrono": the same with chrono initialisation (Tallec and Ollivier, arXiv:1804.11188): biases log u at the forget
  gate and -log u at the input gate, u uniform in [1, length - 1].
- "gru": torch's.
- "dtriv": an orthogonal weight, :class:`hbnode.nn.DTRIV`.
- "adam_lstm": the LSTM with the momentum rule "adam", with a bias of 1 at the forget gate, half of it in each of two.
- "oscillators": a network of each sample, and a linear layer of as many :class:`hbnode.nn.Oscillators` as units.

Another layer is one line in :data:`LAYERS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn.recurrent import sparse_
from hbnode.optim import tanh_hidden

MakeLayer = Callable[[int, int, int], nn.Module]  # of features, units and the length to remember


class Swinging(nn.Sequential):
    """A network of each sample with one hidden layer, and oscillators whose memory reaches over the length."""

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
    """Return torch's LSTM with a bias of 1 at the forget gate and no other biases."""
    layer = nn.LSTM(input_size, hidden, batch_first=True)
    input_gate, forget_gate, *others = _biases(layer, hidden)
    for bias in (input_gate, *others):
        bias.zero_()
    forget_gate.fill_(1.0)
    return layer


def lstm_chrono(input_size: int, hidden: int, length: int) -> nn.LSTM:
    """Return torch's LSTM whose units initially forget after 1 to ``length`` steps."""
    layer = lstm(input_size, hidden, length)
    input_gate, forget_gate, *_ = _biases(layer, hidden)
    forget_gate.copy_(torch.empty(hidden).uniform_(1, max(length - 1, 1)).log())
    input_gate.copy_(-forget_gate)
    return layer


def _biases(layer: nn.LSTM, hidden: int) -> list[Tensor]:
    """Return the first biases of the gates, input and forget gate first, and then all of torch's second biases."""
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
    """A recurrent layer and a linear readout of its last h, or of each h.

    Arguments:
        name: of the layer in :data:`LAYERS`.
        input_size: features of a step.
        hidden: features of h.
        output_size: features of an output.
        length: the approximate number of steps to remember.
        reads_end: whether there is one output, of the last step.
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
            last: index of the last step of each (batch,).
        """
        return self.read(self.layer(x)[0], last)

    def read(self, h: Tensor, last: Tensor) -> Tensor:
        """Return the outputs for all h (batch, T, hidden)."""
        return self.head(h[torch.arange(len(h), device=h.device), last] if self.reads_end else h)

    def with_hidden(self, x: Tensor, last: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return outputs, and hidden states for structural damping with their metric, which is 0 on padding.

        The hidden states of a tanh network are its pre-activations, see :func:`hbnode.optim.tanh_hidden`.
        """
        h = self.layer(x)[0]
        counts = (torch.arange(h.shape[1], device=h.device) <= last[:, None]).to(h.dtype).unsqueeze(2)
        if isinstance(self.layer, hbnode.nn.TanhRNN):
            counts = counts * tanh_hidden(h)[1]
        return self.read(h, last), (h, counts)
