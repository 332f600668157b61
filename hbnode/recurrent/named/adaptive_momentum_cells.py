"""Cells with momentum that adapts to the input; the rule is :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""

from typing import Literal

import torch

from hbnode.recurrent.base import CellOptions
from hbnode.recurrent.cells import GRUCell, LSTMCell, RNNCell
from hbnode.recurrent.orthogonal import DTRIVCell
from hbnode.recurrent.rules import AdaptiveMomentum


class AdaptiveMomentumRNNCell(RNNCell):
    """One step of :class:`hbnode.AdaptiveMomentumRNN`, whose state it takes and returns.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t
        μ_t = min(1 - δ, (1 - √(|g_t - g_{t-1}| / |g_{t-1}|))²),  μ_1 = 0
        h_t = tanh(U h_{t-1} + b_hh + v_t)

    References: Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        nonlinearity: "tanh", or "relu" in its place (default: "tanh").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h, v and g (batch, hidden_size).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        delta: float = 1e-3,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        *,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, nonlinearity, rule=rule, **options)


class AdaptiveMomentumLSTMCell(LSTMCell):
    """One step of :class:`hbnode.AdaptiveMomentumLSTM`, whose state it takes and returns.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t
        μ_t = min(1 - δ, (1 - √(|g_t - g_{t-1}| / |g_{t-1}|))²),  μ_1 = 0
        (i, f, c~, o) = U h_{t-1} + b_hh + v_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    References: Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        forget_bias: initial bias of the forget gate, in b_ih and in b_hh (default: 1.0).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and c (batch, hidden_size), v and g (batch, 4 * hidden_size).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.

    Example:
        >>> cell, state = AdaptiveMomentumLSTMCell(3, 5), None
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
        delta: float = 1e-3,
        bias: bool = True,
        *,
        forget_bias: float = 1.0,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, rule=rule, forget_bias=forget_bias, **options)


class AdaptiveMomentumGRUCell(GRUCell):
    """One step of :class:`hbnode.AdaptiveMomentumGRU`, whose state it takes and returns.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t
        μ_t = min(1 - δ, (1 - √(|g_t - g_{t-1}| / |g_{t-1}|))²),  μ_1 = 0
        r = sigmoid(U_r h_{t-1} + b_hr + v_r),  z = sigmoid(U_z h_{t-1} + b_hz + v_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + v_n)
        h_t = (1 - z) n + z h_{t-1}

    References: Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h (batch, hidden_size), v and g (batch, 3 * hidden_size).

    Raises:
        TypeError: bias is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        delta: float = 1e-3,
        bias: bool = True,
        *,
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, rule=rule, **options)


class AdaptiveMomentumDTRIVCell(DTRIVCell):
    """One step of :class:`hbnode.AdaptiveMomentumDTRIV`, whose state it takes and returns.

    With g_t = W x_t and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t
        μ_t = min(1 - δ, (1 - √(|g_t - g_{t-1}| / |g_{t-1}|))²),  μ_1 = 0
        h_t = modrelu(B h_{t-1} + v_t),  modrelu(z) = sign(z) relu(|z| + b)

    References: Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        init: initial B, rotations by angles from U(0, π/2), "cayley", or from U(-π, π), "henaff" (default: "cayley").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h, v and g (batch, hidden_size).

    Raises:
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        delta: float = 1e-3,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        momentum_space: Literal["gates", "hidden"] = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        options: CellOptions = {"momentum_space": momentum_space, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, rule=rule, init=init, **options)
