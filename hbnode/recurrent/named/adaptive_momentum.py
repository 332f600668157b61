"""Layers with momentum that adapts to the input; the rule is :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""

from typing import Literal

import torch

from hbnode.recurrent.base import LayerOptions
from hbnode.recurrent.layers import GRU, LSTM, RNN
from hbnode.recurrent.orthogonal import DTRIV
from hbnode.recurrent.rules import AdaptiveMomentum


class AdaptiveMomentumRNN(RNN):
    """An Elman network that filters its input with momentum that adapts to the input.

    With g_t = W x_t + b_ih and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t
        μ_t = min(1 - δ, (1 - √(|g_t - g_{t-1}| / |g_{t-1}|))²),  μ_1 = 0
        h_t = tanh(U h_{t-1} + b_hh + v_t)

    References: Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers (default: 1).
        nonlinearity: "tanh", or "relu" in its place (default: "tanh").
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        compile: whether to compile the scan over time with torch.compile (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h, v and g (layers * directions, batch, hidden_size).

    Raises:
        TypeError: bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid.
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
        step_size: float = 0.6,
        delta: float = 1e-3,
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        layout = num_layers, nonlinearity, bias, batch_first, dropout, bidirectional
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, *layout, rule=rule, **options)


class AdaptiveMomentumLSTM(LSTM):
    """An LSTM that filters its input with momentum that adapts to the input.

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
        num_layers: number of stacked layers (default: 1).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        proj_size: must be 0, because no layer here projects its h (default: 0).
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        forget_bias: initial bias of the forget gate, in b_ih and in b_hh (default: 1.0).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        compile: whether to compile the scan over time with torch.compile (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and c (layers * directions, batch, hidden_size), v and g (layers * directions, batch, 4 * hidden_size).

    Raises:
        TypeError: bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid.

    Example:
        >>> layer = AdaptiveMomentumLSTM(3, 5, step_size=0.5, batch_first=True)
        >>> output, state = layer(torch.ones(2, 7, 3))
        >>> output.shape, state.c.shape, state.v.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 20]))
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
        step_size: float = 0.6,
        delta: float = 1e-3,
        forget_bias: float = 1.0,
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        layout = num_layers, bias, batch_first, dropout, bidirectional, proj_size
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, *layout, rule=rule, forget_bias=forget_bias, **options)


class AdaptiveMomentumGRU(GRU):
    """A GRU that filters its input with momentum that adapts to the input.

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
        num_layers: number of stacked layers (default: 1).
        bias: whether to have b_ih, which is filtered, and b_hh, which is not (default: True).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        compile: whether to compile the scan over time with torch.compile (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h (layers * directions, batch, hidden_size), v and g (layers * directions, batch, 3 * hidden_size).

    Raises:
        TypeError: bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid.
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
        step_size: float = 0.6,
        delta: float = 1e-3,
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        layout = num_layers, bias, batch_first, dropout, bidirectional
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, *layout, rule=rule, **options)


class AdaptiveMomentumDTRIV(DTRIV):
    """A recurrent layer with an orthogonal weight B that filters its input with momentum that adapts to the input.

    With g_t = W x_t and v_0 = 0::

        v_t = μ_t v_{t-1} + s g_t
        μ_t = min(1 - δ, (1 - √(|g_t - g_{t-1}| / |g_{t-1}|))²),  μ_1 = 0
        h_t = modrelu(B h_{t-1} + v_t),  modrelu(z) = sign(z) relu(|z| + b)

    See :class:`hbnode.DTRIV` for how B stays orthogonal; the bias b of modReLU is the only one.

    References: Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77;
    Lezcano-Casado, Trivializations for Gradient-Based Optimization on Manifolds (arXiv:1909.09501).

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers (default: 1).
        batch_first: whether x and the output are (batch, T, features) (default: False).
        dropout: probability of dropping an output between layers in training (default: 0.0).
        bidirectional: whether a second cell runs backwards in time (default: False).
        step_size: s, positive (default: 0.6).
        delta: δ, distance of the largest μ_t from 1, in (0, 1) (default: 1e-3).
        init: initial B, rotations by angles from U(0, π/2), "cayley", or from U(-π, π), "henaff" (default: "cayley").
        momentum_space: where to filter, "gates" or "hidden", see :class:`hbnode.recurrent.LSTM` (default: "gates").
        compile: whether to compile the scan over time with torch.compile (default: False).
        device: device of the parameters (default: torch's).
        dtype: dtype of the parameters (default: torch's).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h, v and g (layers * directions, batch, hidden_size).

    Raises:
        TypeError: batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        step_size: float = 0.6,
        delta: float = 1e-3,
        init: Literal["cayley", "henaff"] = "cayley",
        momentum_space: Literal["gates", "hidden"] = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = AdaptiveMomentum(step_size, delta)
        options: LayerOptions = {"momentum_space": momentum_space, "compile": compile, "device": device, "dtype": dtype}
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            rule=rule,
            init=init,
            **options,
        )
