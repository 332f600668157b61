"""Cells with Nesterov's accelerated gradient; the rule is :class:`hbnode.recurrent.rules.NAG`."""

from typing import Literal

import torch

from hbnode.recurrent.base import CellOptions
from hbnode.recurrent.cells import GRUCell, LSTMCell, RNNCell
from hbnode.recurrent.orthogonal import DTRIVCell
from hbnode.recurrent.rules import NAG


class NAGRNNCell(RNNCell):
    """One step of :class:`hbnode.NAGRNN`, whose state it takes and returns.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t,  μ_t = (t - 1)/(t + 2),  t = 1, 2, ...
        h_t = tanh(U h_{t-1} + b_hh + v_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        nonlinearity: "tanh", or "relu" in its place (default: "tanh").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and v (batch, hidden_size), t (batch,).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        *,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = NAG(step_size)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, nonlinearity, rule=rule, **options)


class NAGLSTMCell(LSTMCell):
    """One step of :class:`hbnode.NAGLSTM`, whose state it takes and returns.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t,  μ_t = (t - 1)/(t + 2),  t = 1, 2, ...
        (i, f, c~, o) = U h_{t-1} + b_hh + v_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        forget_bias: initial bias of the forget gate, in b_ih and in b_hh (default: 1.0).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and c (batch, hidden_size), v (batch, 4 * hidden_size), t (batch,).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.

    Example:
        >>> cell, state = NAGLSTMCell(3, 5), None
        >>> for x in torch.ones(7, 2, 3):
        ...     h, state = cell(x, state)
        >>> h.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        bias: bool = True,
        *,
        forget_bias: float = 1.0,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = NAG(step_size)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, rule=rule, forget_bias=forget_bias, **options)


class NAGGRUCell(GRUCell):
    """One step of :class:`hbnode.NAGGRU`, whose state it takes and returns.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t,  μ_t = (t - 1)/(t + 2),  t = 1, 2, ...
        r = sigmoid(U_r h_{t-1} + b_hr + v_r),  z = sigmoid(U_z h_{t-1} + b_hz + v_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + v_n)
        h_t = (1 - z) n + z h_{t-1}

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h (batch, hidden_size), v (batch, 3 * hidden_size), t (batch,).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        bias: bool = True,
        *,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = NAG(step_size)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, rule=rule, **options)


class NAGDTRIVCell(DTRIVCell):
    """One step of :class:`hbnode.NAGDTRIV`, whose state it takes and returns.

    With g_t = W x_t and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t,  μ_t = (t - 1)/(t + 2),  t = 1, 2, ...
        h_t = modrelu(B h_{t-1} + v_t),  modrelu(z) = sign(z) relu(|z| + b)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        init: initial B, rotations by angles from U(0, π/2), "cayley", or from U(-π, π), "henaff" (default: "cayley").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and v (batch, hidden_size), t (batch,).

    Raises:
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = NAG(step_size)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, rule=rule, init=init, **options)
