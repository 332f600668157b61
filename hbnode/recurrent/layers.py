"""Recurrent layers that filter their input: RNN, LSTM and GRU with any rule of :mod:`hbnode.recurrent.rules`."""

from typing import Literal

import torch

from hbnode.recurrent.base import LayerOptions, RecurrentLayer
from hbnode.recurrent.cell_steps import GRUStep, LSTMStep, elman_step
from hbnode.recurrent.initialization import init_gates_
from hbnode.recurrent.rules import Rule


class RNN(RecurrentLayer):
    """An Elman network that filters its input with a rule.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t)
        h_t = tanh(U h_{t-1} + b_hh + d_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.

    Arguments:
        input_size: number of features of x. Up to ``bidirectional`` the order of arguments is that of torch.nn.RNN.
        hidden_size: number of features of h.
        num_layers: number of stacked layers (default: 1).
        nonlinearity: "tanh" or "relu" (default: "tanh").
        bias: whether to have b_ih, which the rule filters, and b_hh, which it does not (default: True).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        rule: one of :mod:`hbnode.recurrent.rules`. ``Momentum(0.0, 1.0)`` makes a torch.nn.RNN.
        momentum_space: "gates" or "hidden", see :class:`LSTM` (default: "gates").
        compile: whether to compile the scan over time with torch.compile (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and the rule's memory, each (layers * directions, batch, hidden_size).

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, probability or name is not valid.

    Example:
        >>> from hbnode.recurrent.rules import NAG
        >>> output, state = RNN(3, 5, nonlinearity="relu", rule=NAG(step_size=0.6))(torch.ones(7, 2, 3))
        >>> output.shape, state.v.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        rule: Rule,
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = nonlinearity
        step, stock = elman_step(nonlinearity), f"rnn_{nonlinearity}"
        layout = num_layers, bias, batch_first, dropout, bidirectional
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(step, stock, input_size, hidden_size, *layout, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Appendix A: W_ih orthogonal, W_hh the identity, the biases 0."""
        init_gates_(self, self._names(), self.hidden_size)


class LSTM(RecurrentLayer):
    """An LSTM that filters its input with a rule (equations 9, 14, 15 of the MomentumRNN paper).

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t)
        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    If the rule is linear, d_t is W applied to filtered inputs, and torch's own layer runs over these. With other rules,
    and while the momentum of an earlier chunk decays, the cell runs over d_t; large cells on the CPU run in a scan
    written for that purpose.

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919).

    Arguments:
        input_size: number of features of x. Up to ``proj_size`` the order of arguments is that of torch.nn.LSTM.
        hidden_size: number of features of h.
        num_layers: number of stacked layers (default: 1).
        bias: whether to have b_ih, which the rule filters, and b_hh, which it does not (default: True).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        proj_size: must be 0, because no layer here projects its h (default: 0).
        rule: one of :mod:`hbnode.recurrent.rules`. ``Momentum(0.0, 1.0)`` makes a torch.nn.LSTM; each loads the other's
            weights.
        forget_bias: initial bias of the forget gate in b_ih and in b_hh; with "hidden" in b_hh alone (default: 1.0).
        momentum_space: "gates" filters g_t as above. With "hidden", W and b_ih make a g_t of the size of h, and U
            multiplies d_t as it does h (remarks 1 and 4): U (h_{t-1} + d_t) + b_hh (default: "gates").
        compile: whether to compile the scan over time with torch.compile; the first call then takes half a minute
            (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and c (layers * directions, batch, hidden_size), the rule's memory 4 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, probability or name is not valid.

    Example:
        >>> from hbnode.recurrent.rules import Momentum
        >>> layer = LSTM(3, 5, rule=Momentum(momentum=0.6, step_size=0.6))
        >>> output, state = layer(torch.ones(7, 2, 3))
        >>> output.shape, state.c.shape, state.v.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        rule: Rule,
        forget_bias: float = 1.0,
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if proj_size:
            raise ValueError(
                f"proj_size must be 0, as no layer here projects h, got {proj_size!r}. Fix: a smaller hidden_size, "
                "or torch.nn.Linear(hidden_size, proj_size) over the output."
            )
        self.forget_bias = forget_bias
        layout = num_layers, bias, batch_first, dropout, bidirectional
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(LSTMStep(), "lstm", input_size, hidden_size, *layout, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Appendices A and F: W_ih orthogonal, W_hh with ones on its diagonal, the biases 0 but at the forget gate."""
        init_gates_(self, self._names(), self.hidden_size, forget_bias=self.forget_bias)


class GRU(RecurrentLayer):
    """A GRU that filters its input with a rule; the gates are those of torch.nn.GRU.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t)
        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    Arguments:
        input_size: number of features of x. Up to ``bidirectional`` the order of arguments is that of torch.nn.GRU.
        hidden_size: number of features of h.
        num_layers: number of stacked layers (default: 1).
        bias: whether to have b_ih, which the rule filters, and b_hh, which it does not (default: True).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        rule: one of :mod:`hbnode.recurrent.rules`. ``Momentum(0.0, 1.0)`` makes a torch.nn.GRU.
        momentum_space: "gates" or "hidden", see :class:`LSTM` (default: "gates").
        compile: whether to compile the scan over time with torch.compile (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h (layers * directions, batch, hidden_size), the rule's memory 3 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, probability or name is not valid.

    Example:
        >>> from hbnode.recurrent.rules import RMSProp
        >>> output, state = GRU(3, 5, rule=RMSProp(step_size=0.6))(torch.ones(7, 2, 3))
        >>> output.shape, state.m.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 15]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        rule: Rule,
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layout = num_layers, bias, batch_first, dropout, bidirectional
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(GRUStep(), "gru", input_size, hidden_size, *layout, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Initialise as an LSTM without a forget gate."""
        init_gates_(self, self._names(), self.hidden_size)
