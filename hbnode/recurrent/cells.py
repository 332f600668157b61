"""Cells for one step, with any rule: for streaming, for your own loops, and for torch.export."""

from typing import Literal

import torch

from hbnode.recurrent.base import CellOptions, RecurrentCell
from hbnode.recurrent.cell_steps import GRUStep, LSTMStep, elman_step
from hbnode.recurrent.initialization import init_gates_
from hbnode.recurrent.rules import Rule


class RNNCell(RecurrentCell):
    """One step of :class:`hbnode.recurrent.RNN`.

    With g_t = W x_t + b_ih, the rule's next output d_t: h_t = tanh(U h_{t-1} + b_hh + d_t).

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        bias: whether to have b_ih and b_hh (default: True).
        nonlinearity: "tanh" or "relu" (default: "tanh").
        rule: one of :mod:`hbnode.recurrent.rules`.
        momentum_space: "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and the rule's memory, each (batch, hidden_size).

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        *,
        rule: Rule,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = nonlinearity
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(elman_step(nonlinearity), input_size, hidden_size, bias, rule=rule, **options)


class LSTMCell(RecurrentCell):
    """One step of :class:`hbnode.recurrent.LSTM`, as in appendix F of the MomentumRNN paper.

    With g_t = W x_t + b_ih and the rule's next output d_t::

        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        bias: whether to have b_ih and b_hh (default: True).
        rule: one of :mod:`hbnode.recurrent.rules`. The named cells take its coefficients in place of it, by position
            before ``bias``: ``MomentumLSTMCell(3, 4, 0.9, 0.6)`` has μ = 0.9 and s = 0.6.
        forget_bias: initial bias of the forget gate in b_ih and in b_hh; with "hidden" in b_hh alone (default: 1.0).
        momentum_space: "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and c (batch, hidden_size), the rule's memory 4 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size or name is not valid.

    Example:
        >>> from hbnode.recurrent.rules import Momentum
        >>> cell = LSTMCell(3, 5, rule=Momentum(momentum=0.6, step_size=0.6))
        >>> state = None
        >>> for x in torch.ones(7, 2, 3):
        ...     h, state = cell(x, state)
        >>> h.shape, state.v.shape
        (torch.Size([2, 5]), torch.Size([2, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        rule: Rule,
        forget_bias: float = 1.0,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.forget_bias = forget_bias
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(LSTMStep(), input_size, hidden_size, bias, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Draw the initial weights in the same way as the layer."""
        init_gates_(self, self._shapes(), self.hidden_size, forget_bias=self.forget_bias)


class GRUCell(RecurrentCell):
    """One step of :class:`hbnode.recurrent.GRU`.

    With g_t = W x_t + b_ih and the rule's next output d_t::

        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        bias: whether to have b_ih and b_hh (default: True).
        rule: one of :mod:`hbnode.recurrent.rules`.
        momentum_space: "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h (batch, hidden_size), the rule's memory 3 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        rule: Rule,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(GRUStep(), input_size, hidden_size, bias, rule=rule, **options)
