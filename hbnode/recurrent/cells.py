"""Cells for one step, with any rule: for streaming, for your own loops, and for torch.export."""

from typing import Literal

import torch

from hbnode.recurrent.base import RecurrentCell
from hbnode.recurrent.cell_steps import GRUStep, LSTMStep, elman_step
from hbnode.recurrent.initialization import init_gates_
from hbnode.recurrent.rules import Rule, RuleName, make_rule


class MomentumRNNCell(RecurrentCell):
    """One step of :class:`hbnode.MomentumRNN`, whose state it takes and returns.

    With g_t = W x_t + b_ih and the rule's next output d_t: h_t = tanh(U h_{t-1} + b_hh + d_t).

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        nonlinearity: "tanh", or "relu" in its place. Default: ``"tanh"``.
        rule: the filter by its name, see :class:`hbnode.MomentumLSTM`, or as an object of
            :mod:`hbnode.recurrent.rules`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and what the rule remembers, each (batch, hidden_size).

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        rule: RuleName | Rule = "momentum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = nonlinearity
        step, rule = elman_step(nonlinearity), make_rule(rule, momentum, step_size)
        super().__init__(step, input_size, hidden_size, bias, rule, device, dtype)


class MomentumLSTMCell(RecurrentCell):
    """One step of :class:`hbnode.MomentumLSTM`, whose state it takes and returns, as in appendix F of the paper.

    With g_t = W x_t + b_ih and the rule's next output d_t::

        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        forget_bias: initial bias of the forget gate in b_ih and in b_hh. Default: ``1.0``.
        rule: the filter by its name, see :class:`hbnode.MomentumLSTM`, or as an object of
            :mod:`hbnode.recurrent.rules`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and c (batch, hidden_size), what the rule remembers 4 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> cell, state = MomentumLSTMCell(3, 5, momentum=0.9), None
        >>> for x in torch.ones(7, 2, 3):
        ...     h, state = cell(x, state)
        >>> h.shape, state.v.shape
        (torch.Size([2, 5]), torch.Size([2, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        forget_bias: float = 1.0,
        rule: RuleName | Rule = "momentum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.forget_bias = forget_bias
        rule = make_rule(rule, momentum, step_size)
        super().__init__(LSTMStep(), input_size, hidden_size, bias, rule, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the initial weights in the same way as the layer."""
        init_gates_(self, self._shapes(), self.hidden_size, forget_bias=self.forget_bias)


class MomentumGRUCell(RecurrentCell):
    """One step of :class:`hbnode.MomentumGRU`, whose state it takes and returns.

    With g_t = W x_t + b_ih and the rule's next output d_t::

        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        rule: the filter by its name, see :class:`hbnode.MomentumLSTM`, or as an object of
            :mod:`hbnode.recurrent.rules`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h (batch, hidden_size), what the rule remembers 3 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        rule: RuleName | Rule = "momentum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = make_rule(rule, momentum, step_size)
        super().__init__(GRUStep(), input_size, hidden_size, bias, rule, device, dtype)
