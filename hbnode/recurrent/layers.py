"""Recurrent layers that filter their input with a rule: :class:`MomentumRNN`, :class:`MomentumLSTM`,
:class:`MomentumGRU`.
"""

from typing import Literal

import torch

from hbnode.recurrent.base import RecurrentLayer
from hbnode.recurrent.cell_steps import GRUStep, LSTMStep, elman_step
from hbnode.recurrent.initialization import init_gates_
from hbnode.recurrent.rules import Rule, RuleName, make_rule


class MomentumRNN(RecurrentLayer):
    """An Elman network that filters its input.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        h_t = tanh(U h_{t-1} + b_hh + d_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether a second cell runs backwards in time. Default: ``False``.
        nonlinearity: "tanh", or "relu" in its place. Default: ``"tanh"``.
        rule: the filter by its name, see :class:`MomentumLSTM`, or as an object of :mod:`hbnode.recurrent.rules`.
            Default: ``"momentum"``.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        compile: whether to compile the scan over time with torch.compile. Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and what the rule remembers, each (layers * directions, batch, hidden_size).

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> output, state = MomentumRNN(3, 5, nonlinearity="relu", rule="nag")(torch.ones(7, 2, 3))
        >>> output.shape, state.v.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        rule: RuleName | Rule = "momentum",
        momentum: float | None = None,
        step_size: float | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = nonlinearity
        step, stock, rule = elman_step(nonlinearity), f"rnn_{nonlinearity}", make_rule(rule, momentum, step_size)
        options = bias, batch_first, dropout, bidirectional, rule, compile, device, dtype
        super().__init__(step, stock, input_size, hidden_size, num_layers, *options)

    def reset_parameters(self) -> None:
        """Appendix A: W_ih orthogonal, W_hh the identity, the biases 0."""
        init_gates_(self, self._names(), self.hidden_size)


class MomentumLSTM(RecurrentLayer):
    """An LSTM that filters its input: MomentumLSTM, and by its rule NAG-LSTM, SRLSTM, AdamLSTM, RMSPropLSTM.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    If the rule is linear, d_t is W applied to filtered inputs, and torch's own layer runs over these. With other rules,
    and while the momentum of an earlier chunk decays, the cell runs over d_t; large cells on the CPU run in a scan
    written for that purpose.

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    equations 9, 14, 15.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether a second cell runs backwards in time. Default: ``False``.
        forget_bias: initial bias of the forget gate in b_ih and in b_hh. Default: ``1.0``.
        rule: the filter: "momentum", "nag" (Nesterov's accelerated gradient), "restart" (NAG with scheduled restart),
            "adam", "rmsprop" or "adaptive" (momentum that the inputs set), with its usual numbers; or an object of
            :mod:`hbnode.recurrent.rules`, which has numbers of its own: ``rule=Adam(beta=0.99)``.
            ``Momentum(0.0, 1.0)`` makes a torch.nn.LSTM; each loads the other's weights. Default: ``"momentum"``.
        momentum: μ of a rule given by name, in [0, 1]; "momentum" and "adam" have it. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive; all have it. Default: ``None``, 0.6.
        compile: whether to compile the scan over time with torch.compile; the first call then takes half a minute.
            Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and c (layers * directions, batch, hidden_size), what the rule remembers 4 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> layer = MomentumLSTM(3, 5, momentum=0.9, batch_first=True)
        >>> output, state = layer(torch.ones(2, 7, 3))
        >>> output.shape, state.c.shape, state.v.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 20]))
        >>> MomentumLSTM(3, 5, rule="adam", step_size=0.1)
        MomentumLSTM(3, 5, rule=Adam(momentum=0.6, step_size=0.1, beta=0.9, eps=1e-08))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        forget_bias: float = 1.0,
        rule: RuleName | Rule = "momentum",
        momentum: float | None = None,
        step_size: float | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.forget_bias = forget_bias
        rule = make_rule(rule, momentum, step_size)
        options = bias, batch_first, dropout, bidirectional, rule, compile, device, dtype
        super().__init__(LSTMStep(), "lstm", input_size, hidden_size, num_layers, *options)

    def reset_parameters(self) -> None:
        """Appendices A and F: W_ih orthogonal, W_hh with ones on its diagonal, the biases 0 but at the forget gate."""
        init_gates_(self, self._names(), self.hidden_size, forget_bias=self.forget_bias)


class MomentumGRU(RecurrentLayer):
    """A GRU that filters its input; the gates are those of torch.nn.GRU.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2, which puts momentum into any cell.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether a second cell runs backwards in time. Default: ``False``.
        rule: the filter by its name, see :class:`MomentumLSTM`, or as an object of :mod:`hbnode.recurrent.rules`.
            Default: ``"momentum"``.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        compile: whether to compile the scan over time with torch.compile. Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h (layers * directions, batch, hidden_size), what the rule remembers 3 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> output, state = MomentumGRU(3, 5, rule="rmsprop")(torch.ones(7, 2, 3))
        >>> output.shape, state.m.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 15]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        rule: RuleName | Rule = "momentum",
        momentum: float | None = None,
        step_size: float | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = make_rule(rule, momentum, step_size)
        options = bias, batch_first, dropout, bidirectional, rule, compile, device, dtype
        super().__init__(GRUStep(), "gru", input_size, hidden_size, num_layers, *options)

    def reset_parameters(self) -> None:
        """Initialise as an LSTM without a forget gate."""
        init_gates_(self, self._names(), self.hidden_size)
