"""Cells with RMSProp; the rule is :class:`hbnode.recurrent.rules.RMSProp`."""

from typing import Literal

import torch

from hbnode.recurrent.base import CellOptions
from hbnode.recurrent.cells import GRUCell, LSTMCell, RNNCell
from hbnode.recurrent.orthogonal import DTRIVCell
from hbnode.recurrent.rules import RMSProp


class RMSPropRNNCell(RNNCell):
    """One step of :class:`hbnode.RMSPropRNN`, whose state it takes and returns.

    With g_t = W x_t + b_ih and m_0 = 0::

        m_t = β m_{t-1} + (1 - β) g_t²
        d_t = s g_t / √(m_t + ε)
        h_t = tanh(U h_{t-1} + b_hh + d_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        beta: β, decay of the running mean of squares, in [0, 1) (default: 0.9).
        eps: ε, added under the root, positive (default: 1e-8).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        nonlinearity: "tanh", or "relu" in its place (default: "tanh").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and m (batch, hidden_size).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        *,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = RMSProp(step_size, beta, eps)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, nonlinearity, rule=rule, **options)


class RMSPropLSTMCell(LSTMCell):
    """One step of :class:`hbnode.RMSPropLSTM`, whose state it takes and returns.

    With g_t = W x_t + b_ih and m_0 = 0::

        m_t = β m_{t-1} + (1 - β) g_t²
        d_t = s g_t / √(m_t + ε)
        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        beta: β, decay of the running mean of squares, in [0, 1) (default: 0.9).
        eps: ε, added under the root, positive (default: 1e-8).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        forget_bias: initial bias of the forget gate, in b_ih and in b_hh (default: 1.0).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and c (batch, hidden_size), m (batch, 4 * hidden_size).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.

    Example:
        >>> cell, state = RMSPropLSTMCell(3, 5), None
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
        beta: float = 0.9,
        eps: float = 1e-8,
        bias: bool = True,
        *,
        forget_bias: float = 1.0,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = RMSProp(step_size, beta, eps)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, rule=rule, forget_bias=forget_bias, **options)


class RMSPropGRUCell(GRUCell):
    """One step of :class:`hbnode.RMSPropGRU`, whose state it takes and returns.

    With g_t = W x_t + b_ih and m_0 = 0::

        m_t = β m_{t-1} + (1 - β) g_t²
        d_t = s g_t / √(m_t + ε)
        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        beta: β, decay of the running mean of squares, in [0, 1) (default: 0.9).
        eps: ε, added under the root, positive (default: 1e-8).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h (batch, hidden_size), m (batch, 3 * hidden_size).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        bias: bool = True,
        *,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = RMSProp(step_size, beta, eps)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, rule=rule, **options)


class RMSPropDTRIVCell(DTRIVCell):
    """One step of :class:`hbnode.RMSPropDTRIV`, whose state it takes and returns.

    With g_t = W x_t and m_0 = 0::

        m_t = β m_{t-1} + (1 - β) g_t²
        d_t = s g_t / √(m_t + ε)
        h_t = modrelu(B h_{t-1} + d_t),  modrelu(z) = sign(z) relu(|z| + b)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.4.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        beta: β, decay of the running mean of squares, in [0, 1) (default: 0.9).
        eps: ε, added under the root, positive (default: 1e-8).
        init: initial B, rotations by angles from U(0, π/2), "cayley", or from U(-π, π), "henaff" (default: "cayley").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and m (batch, hidden_size).

    Raises:
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = RMSProp(step_size, beta, eps)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, rule=rule, init=init, **options)
