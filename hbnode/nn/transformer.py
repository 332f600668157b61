r"""Transformers with momentum over time (in the attention) and over depth (in the residual connections).

A connection adds the output g of a sublayer to the residual stream x, as x + g or with momentum. A connection with
momentum passes a :class:`DepthState` from layer to layer. No connection passes a state from token to token, so all
support streaming.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from hbnode._checks import as_count, as_real, check_bool, check_callable, check_input, is_one_of, nearest
from hbnode._tree import Record, record
from hbnode.nn._signatures import shares_arguments
from hbnode.nn.attention import (
    HeavyBallMemory,
    MomentumAttention,
    MultiheadBase,
    SoftmaxAttention,
    count_before,
    read_mask,
)
from hbnode.nn.sequences import check_choice, check_dtype, shown


@record
class DepthState(Record):
    """The state that a connection passes from one layer to the next; entries that the connection does not use are None.

    Attributes:
        previous: input of the previous layer, x_{l-1}.
        update: attention output of the previous layer, g_{l-1}.
        velocity: velocity v of the residual stream.
    """

    previous: Tensor | None = None
    update: Tensor | None = None
    velocity: Tensor | None = None


class Connection(nn.Module):
    """The residual connection x + g, with x the input and g the output of a sublayer; base class of all connections.

    References:
        He et al., Deep Residual Learning (arXiv:1512.03385).
    """

    _shown: ClassVar[tuple[str, ...]] = ()  # names of the attributes that repr shows

    @override
    def extra_repr(self) -> str:
        return shown(self, self._shown)

    def look_ahead(self, x: Tensor, depth: DepthState) -> Tensor:
        """Return the input of the next sublayer, given the residual stream x; here it is x itself."""
        return x

    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Add the output ``update`` of self-attention to its input x; return the sum and the new depth state."""
        return x + update, depth

    def feedforward(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Add the output ``update`` of any other sublayer to its input x; return the sum and the new depth state."""
        return x + update, depth


class MomentumConnection(Connection):
    r"""The momentum connection of Wang et al.: x_l + g_l + β (x_l - x_{l-1}).

    x_l is the input of layer l, and g_l its attention output. The first layer has no momentum term. In the
    paper the equation has T_{l-1}(X) instead of x_{l-1}. If T_{l-1}(X) is the output of layer l - 1, this momentum term
    is zero.

    References:
        Wang et al. (2022), equation 75.

    Arguments:
        momentum: β in [0, 1). Default: ``0.9``.
    """

    _shown = ("momentum",)

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = _check_momentum(momentum)

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Return x + g + β (x - x_{l-1}), where g is the output ``update`` of self-attention.

        x_{l-1} is the x of the previous layer. Also return the new depth state, which holds x for the next layer.
        """
        after = x + update
        if depth.previous is not None:
            after = after + self.momentum * (x - depth.previous)
        return after, dataclasses.replace(depth, previous=x)


class AdaptiveConnection(Connection):
    r"""The adaptive momentum connection x_l + g_l + β_l (x_l - x_{l-1}), with a β_l per token.

    x_l is the input of layer l, and g_l its attention output. The first layer has no momentum term. In other layers::

        β_l = clamp((1 - sqrt(|g_l - g_{l-1}| / |g_{l-1}|))^2, 0, 1 - threshold)

    The norms are over features, so β_l depends only on its own token. The square comes before the clamp, because the
    opposite order gives β_l = 0 almost everywhere.

    References:
        Wang et al. (2022), equations 75 to 77.

    Arguments:
        threshold: in (0, 1]; β_l is at most 1 - threshold. Default: ``1e-3``.

    Raises:
        ValueError: if ``threshold`` is not in (0, 1].
    """

    _shown = ("threshold",)

    def __init__(self, threshold: float = 1e-3) -> None:
        super().__init__()
        self.threshold = as_real(threshold, "threshold", "threshold=1e-3")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be in (0, 1], got {threshold!r}. Fix: the paper's 1e-3.")

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Return x + g + β_l (x - x_{l-1}), where g is the output ``update`` of self-attention.

        x_{l-1} is the x of the previous layer. Also return the new depth state, which holds x and g for the next layer.
        """
        after = x + update
        if depth.previous is not None and depth.update is not None:
            after = after + self.momentum(update, depth.update) * (x - depth.previous)
        return after, dataclasses.replace(depth, previous=x, update=update)

    def momentum(self, update: Tensor, previous: Tensor) -> Tensor:
        """Compute β_l of each token, (..., 1).

        Arguments:
            update: attention output g_l of this layer (..., features).
            previous: attention output g_{l-1} of the previous layer (..., features).
        """
        wide = torch.promote_types(update.dtype, torch.float32)
        change, size = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide) for x in (update - previous, previous)
        )
        ratio = change / size.clamp(min=torch.finfo(wide).tiny)
        # the lower bound avoids the infinite slope of sqrt at 0, and the upper bound avoids NaN; for a ratio of 4 or
        # more, β has its maximum
        root = ratio.clamp(1e-12, 4.0).sqrt()
        return (1 - root).square().clamp(0, 1 - self.threshold).to(update.dtype)


class MomentumStateConnection(Connection):
    r"""The momentum connection of the published code of Wang et al., which stores a velocity v.

    With x the residual stream, v = 0 before the first layer, and g_l the attention output of layer l::

        v <- β v + g_l,   x <- x + s v

    It equals :class:`MomentumConnection` only if s = 1 and the layers have neither feedforward blocks nor norms.

    References:
        Wang et al. (2022), section 4.3.2.

    Arguments:
        momentum: β in [0, 1). Default: ``0.9``.
        step_size: s > 0. Default: ``1.0``.
    """

    _shown = ("momentum", "step_size")

    def __init__(self, momentum: float = 0.9, step_size: float = 1.0) -> None:
        super().__init__()
        self.momentum, self.step_size = _check_momentum(momentum), _check_positive(step_size, "step_size")

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Return x + s v' with the new velocity v' = β v + g, where g is the output ``update`` of self-attention.

        Also return the new depth state, which holds v' for the next layer.
        """
        velocity = update if depth.velocity is None else self.momentum * depth.velocity + update
        return x + self.step_size * velocity, dataclasses.replace(depth, velocity=velocity)


class HeavyBallConnection(Connection):
    r"""A connection in which attention and feedforward blocks update a velocity v of the residual stream x.

    Each sublayer updates v, which is 0 before the first sublayer::

        g = block(x),   v <- β v + γ g,   x <- x + v

    Each layer learns a β in (0, 1) and a γ > 0 for attention, and another pair for the other sublayers. β = 0 and γ = 1
    is the residual connection.

    References:
        Zimin et al., YuriiFormer (arXiv:2601.23236); Momentum Streams (arXiv:2605.24425).

    Arguments:
        momentum: initial β in [0, 1). It is learned, except that 0 stays 0. Default: ``0.5``.
        step_size: initial γ > 0, which is learned. Default: ``1.0``.
    """

    def __init__(self, momentum: float = 0.5, step_size: float = 1.0) -> None:
        super().__init__()
        momentum, step_size = _check_momentum(momentum), _check_positive(step_size, "step_size")
        sublayers = 2  # attention, feedforward
        logit = math.log(momentum / (1 - momentum)) if momentum > 0 else 0.0
        self.momentum_logit = nn.Parameter(torch.full((sublayers,), logit)) if momentum > 0 else None
        self.log_step_size = nn.Parameter(torch.full((sublayers,), math.log(step_size)))

    @property
    def momentum(self) -> Tensor:
        """The current momentum coefficients β (2,), first of self-attention, then of the other sublayers."""
        zero = torch.zeros_like(self.log_step_size)
        return zero if self.momentum_logit is None else torch.sigmoid(self.momentum_logit)

    @property
    def step_size(self) -> Tensor:
        """The current step sizes γ (2,), first of self-attention, then of the other sublayers."""
        return self.log_step_size.exp()

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Return x + v' with the new velocity v' = β v + γ g, where g is the output ``update`` of self-attention.

        Also return the new depth state, which holds v' for the next sublayer.
        """
        return self._move(x, update, depth, 0)

    @override
    def feedforward(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """Do the same as :meth:`attention` for another sublayer, with the β and γ of these sublayers."""
        return self._move(x, update, depth, 1)

    def _move(self, x: Tensor, update: Tensor, depth: DepthState, sublayer: int) -> tuple[Tensor, DepthState]:
        velocity = self.step_size[sublayer] * update
        if depth.velocity is not None:
            velocity = velocity + self.momentum[sublayer] * depth.velocity
        return x + velocity, dataclasses.replace(depth, velocity=velocity)


class NesterovConnection(HeavyBallConnection):
    r"""A :class:`HeavyBallConnection` whose sublayers are evaluated at x + μ v, as in Nesterov's method.

    For each sublayer, with x the residual stream and v its velocity::

        g = block(x + μ v),   v <- β v + γ g,   x <- x + v

    Each layer learns a μ. β = μ = 0 and γ = 1 is the residual connection.

    References:
        Zimin et al., YuriiFormer (arXiv:2601.23236).

    Arguments:
        momentum: initial β and μ in [0, 1). Both are learned, except that a β of 0 stays 0. Default: ``0.5``.
        step_size: initial γ > 0, which is learned. Default: ``1.0``.
    """

    def __init__(self, momentum: float = 0.5, step_size: float = 1.0) -> None:
        super().__init__(momentum, step_size)
        self.look_ahead_size = nn.Parameter(torch.tensor(float(momentum)))

    @override
    def look_ahead(self, x: Tensor, depth: DepthState) -> Tensor:
        """Return x + μ v, the input of a sublayer; for the first sublayer, which has no velocity v yet, return x."""
        return x if depth.velocity is None else x + self.look_ahead_size * depth.velocity


def _check_momentum(value: float) -> float:
    if not 0 <= as_real(value, "momentum", "momentum=0.9") < 1:
        raise ValueError(f"momentum must be in [0, 1), got {value!r}. Fix: 0.9, for instance.")
    return float(value)


def _check_positive(value: float, name: str) -> float:
    if not 0 < as_real(value, name, f"{name}=1.0") < math.inf:
        raise ValueError(f"{name} must be positive, got {value!r}. Fix: 1.0.")
    return float(value)


CONNECTIONS: dict[str, type[Connection]] = {
    "residual": Connection,
    "momentum": MomentumConnection,
    "momentum_state": MomentumStateConnection,
    "adaptive": AdaptiveConnection,
    "heavy_ball": HeavyBallConnection,
    "nesterov": NesterovConnection,
}

AttentionName = Literal["momentum", "linear", "softmax", "heavy_ball", "gated_delta", "gated_linear"]
ConnectionName = Literal["residual", "momentum", "momentum_state", "adaptive", "heavy_ball", "nesterov"]
MakeAttention = Callable[..., MultiheadBase[Any]]
MakeConnection = Callable[[], Connection]

ATTENTIONS: dict[str, MakeAttention] = {
    "momentum": MomentumAttention,
    "linear": functools.partial(MomentumAttention, momentum=0.0),
    "softmax": SoftmaxAttention,
    "heavy_ball": HeavyBallMemory,
    "gated_delta": functools.partial(HeavyBallMemory, momentum=False),
    "gated_linear": functools.partial(HeavyBallMemory, momentum=False, delta=False),
}


def make_attention(
    kind: AttentionName | MakeAttention,
    embed_dim: int,
    num_heads: int,
    options: Mapping[str, Any],
    *,
    causal: bool,
    batch_first: bool,
    **layout: Any,
) -> MultiheadBase[Any]:
    """Return a new attention module of the given kind.

    ``kind`` is the name of a built-in kind, or a function that returns a module. The module gets the arguments
    ``options`` and ``layout``; those in ``options`` override those in ``layout``. An error is raised if the module has
    another ``causal`` or ``batch_first`` than these arguments say.
    """
    make, own = _unwrap(kind)
    if make is HeavyBallMemory and not causal:
        raise ValueError(
            f"attention={kind!r} supports only causal self-attention, got causal=False or cross-attention. "
            "Fix: causal=True, or 'momentum', 'linear' or 'softmax'; for cross-attention cross_attention='momentum'."
        )
    if make in (MomentumAttention, HeavyBallMemory):
        layout.pop("dropout")  # linear-time attention has no attention weights
    wanted = {"causal": causal, "batch_first": batch_first}
    layout |= {"batch_first": batch_first} if make is HeavyBallMemory else wanted
    layout = {name: value for name, value in layout.items() if name not in own} | dict(options)
    module = make(embed_dim, num_heads, **own, **layout)  # an option that is set twice raises TypeError
    for name, value in wanted.items():
        if getattr(module, name, value) != value:
            raise ValueError(
                f"the attention module of this layer must have {name}={value}, got {name}={getattr(module, name)}. "
                f"Fix: leave {name} out of attention_options, or {name}={value} in the function that makes the module."
            )
    return module


def _unwrap(kind: AttentionName | MakeAttention) -> tuple[MakeAttention, dict[str, Any]]:
    """Return the class or function that makes attention modules of this kind, and the options that the kind sets.

    ``kind`` is a name, a function, a class, or a functools.partial, whose keyword arguments are such options.
    """
    _refuse_module("attention", kind)
    if not callable(kind) and not is_one_of(kind, tuple(ATTENTIONS)):
        raise ValueError(_unknown("attention", kind, tuple(ATTENTIONS)))
    make = kind if callable(kind) else ATTENTIONS[kind]
    return (make.func, make.keywords) if isinstance(make, functools.partial) and not make.args else (make, {})


def _with_rotary(kind: AttentionName | MakeAttention, options: Mapping[str, Any], rotary: bool) -> dict[str, Any]:
    """Return the attention options, with ``rotary`` added if it applies.

    It applies if ``kind`` is softmax attention and does not set ``rotary`` itself.
    """
    make, own = _unwrap(kind)
    is_free = make is SoftmaxAttention and "rotary" not in own
    return ({"rotary": rotary} if is_free else {}) | dict(options)


def _check_rotary(attention: object, rotary: bool, what: str, fix: str) -> None:
    if getattr(attention, "rotary", False) != rotary:
        needed, got = ("with", "without") if rotary else ("without", "with")
        raise ValueError(
            f"{what} needs attention {needed} rotary positions, got {type(attention).__name__} {got} them. Fix: {fix}."
        )


def make_connection(kind: ConnectionName | MakeConnection, momentum: float | None) -> Connection:
    """Return a new connection of the given kind.

    ``kind`` is the name of a built-in kind, or a function that returns a connection. ``momentum`` is its momentum
    coefficient; with None it has its default.
    """
    _refuse_module("connection", kind)
    if callable(kind):
        if momentum is not None:
            raise ValueError(
                f"connection_momentum={momentum!r} needs a connection name, got a function. Fix: leave it out, "
                "and set the momentum in the function."
            )
        made = kind()
        if not isinstance(made, Connection):
            got = type(made).__name__
            raise TypeError(f"connection must return a Connection, got {got}. Fix: connection='residual'.")
        return made
    if not is_one_of(kind, tuple(CONNECTIONS)):
        raise ValueError(_unknown("connection", kind, tuple(CONNECTIONS)))
    if momentum is None:
        return CONNECTIONS[kind]()
    if kind in ("residual", "adaptive"):
        raise ValueError(f"connection={kind!r} takes no connection_momentum, got {momentum!r}. Fix: leave it out.")
    make: Callable[..., Connection] = CONNECTIONS[kind]
    return make(momentum=momentum)


def _refuse_module(what: str, kind: object) -> None:
    """Raise TypeError if ``kind`` is a module.

    Each layer needs a new module, so the user must pass a function that returns one. ``what`` is the argument's name.
    """
    if isinstance(kind, nn.Module):
        fix = f"{what}={type(kind).__name__}"
        raise TypeError(f"{what} must be a name or a function that returns a new module, got a module. Fix: {fix}.")


def _unknown(what: str, kind: object, names: tuple[str, ...]) -> str:
    near = nearest(kind, names)
    fix = f"{what}={near!r}" if near else f"one of {names}, or a function that returns one"
    return f"{what} must be one of {names}, got {kind!r}. Fix: {fix}."


Activation = Literal["relu", "gelu"] | Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": nn.functional.relu, "gelu": nn.functional.gelu}
Block = Callable[[Tensor], Tensor]
Stream = tuple[Tensor, DepthState]
Join = Callable[[Tensor, Tensor, DepthState], Stream]


class LayerOptions(TypedDict, total=False):
    """The keyword arguments of every layer."""

    attention: AttentionName | MakeAttention
    attention_options: Mapping[str, Any] | None
    connection: ConnectionName | MakeConnection
    connection_momentum: float | None
    causal: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class TransformerLayerBase(nn.Module):
    """The base class of the transformer layers: self-attention, a feedforward block, layer norms and a connection.

    Arguments:
        d_model: number of features of the input and of the output.
        nhead: number of heads, a divisor of d_model.
        dim_feedforward: number of hidden features of the feedforward block. Default: ``2048``.
        dropout: dropout probability of block outputs, hidden features and softmax attention weights. Default: ``0.1``.
        activation: activation of the feedforward block, "relu", "gelu" or a function. Default: ``"relu"``.
        layer_norm_eps: ε of the layer norms. Default: ``1e-5``.
        batch_first: whether x is (batch, length, d_model), not (length, batch, d_model). Default: ``False``.
        norm_first: whether norms come before the blocks (pre-norm) or after the connections. Default: ``False``.
        attention: "momentum", "linear", "softmax", "heavy_ball" (:class:`hbnode.nn.HeavyBallMemory`), "gated_delta",
            "gated_linear", or a function with the arguments of their constructors. Default: ``"momentum"``.
        attention_options: further arguments of the attention module. Its dropout, if given, applies to attention
            weights instead of ``dropout``. Default: ``None``, no further arguments.
        connection: "residual"; "momentum" or "adaptive", equations 75 and 77 of the paper; "momentum_state", equation
            75 as in the published code; "heavy_ball" or "nesterov", with learned coefficients. A function must return
            a :class:`hbnode.nn.transformer.Connection`. Default: ``"residual"``.
        connection_momentum: β of the connection, or the initial β if it is learned. Default: ``None``, the connection's
            default.
        causal: whether a token attends only to itself and to previous tokens. Default: ``True``.
        device: device of the parameters. Default: ``None``, torch's default.
        dtype: dtype of the parameters. Default: ``None``, torch's default.

    Raises:
        ValueError: a size, number or name is not valid.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        *,
        attention: AttentionName | MakeAttention = "momentum",
        attention_options: Mapping[str, Any] | None = None,
        connection: ConnectionName | MakeConnection = "residual",
        connection_momentum: float | None = None,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        as_count(d_model, "d_model"), as_count(nhead, "nhead"), as_count(dim_feedforward, "dim_feedforward")
        for name, flag in (("batch_first", batch_first), ("norm_first", norm_first), ("causal", causal)):
            check_bool(flag, name)
        dropout = as_real(dropout, "dropout", "dropout=0.1")
        layer_norm_eps = as_real(layer_norm_eps, "layer_norm_eps", "layer_norm_eps=1e-5")
        self.batch_first, self.norm_first, self.causal = batch_first, norm_first, causal
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        layout = {"dropout": dropout, "batch_first": batch_first, "causal": causal, **options}
        self.self_attn = make_attention(attention, d_model, nhead, attention_options or {}, **layout)
        self.linear1 = nn.Linear(d_model, dim_feedforward, **options)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **options)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **options)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **options)
        self.dropout = nn.Dropout(dropout)
        if not callable(activation):
            activation = ACTIVATIONS[check_choice(activation, "activation", tuple(ACTIVATIONS))]
        self.activation = activation
        self.connection = make_connection(connection, connection_momentum).to(self.linear1.weight)

    def _start(self, x: Tensor, depth_state: DepthState | None) -> DepthState:
        """Check the inputs of a layer; return its depth state, which is empty in the first layer.

        Raise TypeError if an input has the wrong type.
        """
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor, got {type(x).__name__}. A layer returns a pair, its output and a depth state. "
                "Fix: x, depth_state = layer(x, depth_state) for each layer, or MomentumTransformer."
            )
        if depth_state is not None and not isinstance(depth_state, DepthState):
            raise TypeError(
                f"depth_state must be the DepthState returned by the previous layer, got {type(depth_state).__name__}. "
                "Fix: pass a mask by name, key_padding_mask=mask."
            )
        check_dtype(x, [next(self.parameters()).dtype])
        depth = DepthState() if depth_state is None else depth_state
        for part in (depth.previous, depth.update, depth.velocity):
            if part is not None and part.shape != x.shape:
                got = f"{tuple(x.shape)}, got {tuple(part.shape)}"
                raise ValueError(f"depth_state must hold tensors like x, {got}. Fix: depth_state=None at first.")
        return depth

    def _sublayer(self, x: Tensor, depth: DepthState, norm: nn.Module, block: Block, join: Join) -> Stream:
        """Apply a sublayer, such as attention, to the residual stream x, with its norm and the layer's connection.

        Return the new residual stream and the new depth state. ``block`` computes the sublayer, and ``join`` is the
        method of the connection that adds its output to x.
        """
        start = self.connection.look_ahead(x, depth)
        x, depth = join(x, self.dropout(block(norm(start) if self.norm_first else start)), depth)
        return (x if self.norm_first else norm(x)), depth

    def _feedforward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return hidden


@shares_arguments
class MomentumTransformerLayer(TransformerLayerBase):
    r"""A transformer layer of self-attention and a feedforward block, with momentum in attention or connections.

    It corresponds to ``torch.nn.TransformerEncoderLayer``. The argument ``attention`` selects the attention module.
    ``connection`` selects how the outputs of the two blocks are added to the residual stream. With momentum, the
    connection needs a state from the previous layer, so each layer returns a depth state for the next layer::

        depth_state = None
        for layer in layers:
            x, depth_state = layer(x, depth_state)

    Two things differ from torch: the layer is causal by default, and ``torch.nn.TransformerEncoder`` cannot call it.
    As in torch, there is no error if the batch and length axes of x are exchanged, unless the ``key_padding_mask`` does
    not fit. The layer would then attend to the other samples of the batch.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), section 4.3.

    Example:
        >>> layer = MomentumTransformerLayer(32, 4, 64, batch_first=True, connection="adaptive")
        >>> x, depth_state = layer(torch.ones(2, 7, 32))
        >>> x, depth_state = layer(x, depth_state)
        >>> x.shape
        torch.Size([2, 7, 32])
    """

    def forward(
        self, x: Tensor, depth_state: DepthState | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, DepthState]:
        """Return the output, shaped like x, and the depth state for the next layer.

        Arguments:
            x: (length, batch, d_model), or (batch, length, d_model) with ``batch_first``.
            depth_state: depth state from the previous layer. Default: ``None``, for the first layer.
            key_padding_mask: (batch, length), True = ignore. Default: ``None``.
        """
        return self._layer(x, depth_state, lambda h: self.self_attn(h, h, h, key_padding_mask)[0])

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_padding_mask: Tensor | None = None,
        depth_state: DepthState | None = None,
    ) -> tuple[Tensor, Any, DepthState]:
        """Apply the layer to the next tokens; return the output, the attention state and the depth state.

        Arguments:
            x: (length, batch, d_model), or (batch, length, d_model) with ``batch_first``.
            state: attention state after the previous tokens. Default: ``None``, no previous tokens.
            key_padding_mask: (batch, length), True = ignore. Default: ``None``.
            depth_state: depth state from the previous layer. Default: ``None``, for the first layer.
        """
        after = []

        def attend(h: Tensor) -> Tensor:
            output, new = self.self_attn.prefill(h, state, key_padding_mask)
            after.append(new)
            return output

        x, depth_state = self._layer(x, depth_state, attend)
        return x, after[0], depth_state

    def _layer(self, x: Tensor, depth_state: DepthState | None, attend: Block) -> Stream:
        x, depth = self._sublayer(x, self._start(x, depth_state), self.norm1, attend, self.connection.attention)
        return self._sublayer(x, depth, self.norm2, self._feedforward, self.connection.feedforward)


@shares_arguments
class MomentumTransformerDecoderLayer(TransformerLayerBase):
    r"""A transformer layer of self-attention, cross-attention to an encoder's output, and a feedforward block.

    It corresponds to ``torch.nn.TransformerDecoderLayer``, with the attentions and connections of
    :class:`MomentumTransformerLayer`. The connections "momentum", "momentum_state" and "adaptive" act only on
    self-attention; "heavy_ball" and "nesterov" act on all three blocks. Cross-attention is not causal. If ``attention``
    supports only causal attention, set ``cross_attention`` to another one.

    Arguments:
        cross_attention: attention module for cross-attention, with the same choices as ``attention``. It has no rotary
            positions, because positions of two sequences are not comparable. Default: ``None``, ``attention`` with its
            options.

    Example:
        >>> layer = MomentumTransformerDecoderLayer(32, 4, 64, batch_first=True)
        >>> x, depth_state = layer(torch.ones(2, 7, 32), torch.ones(2, 5, 32))
        >>> x.shape
        torch.Size([2, 7, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        *,
        cross_attention: AttentionName | MakeAttention | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, **options
        )
        kind = cross_attention if cross_attention is not None else options.get("attention", "momentum")
        own = None if cross_attention is not None else options.get("attention_options")
        factory: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        layout = {"dropout": dropout, "batch_first": batch_first, "causal": False, **factory}
        self.multihead_attn = make_attention(kind, d_model, nhead, _with_rotary(kind, own or {}, False), **layout)
        _check_rotary(self.multihead_attn, False, "cross-attention", "cross_attention='softmax'")
        self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        depth_state: DepthState | None = None,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, DepthState]:
        """Return the output, shaped like x, and the depth state for the next layer.

        Arguments:
            x: (length, batch, d_model), or (batch, length, d_model) with ``batch_first``.
            memory: the encoder's output, in the layout of x, of any length.
            depth_state: depth state from the previous layer. Default: ``None``, for the first layer.
            key_padding_mask: mask of x (batch, length), True = ignore. Default: ``None``.
            memory_key_padding_mask: mask of memory (batch, length of memory), True = ignore. Default: ``None``.
        """

        def attend(h: Tensor) -> Tensor:
            return self.self_attn(h, h, h, key_padding_mask)[0]

        def attend_to_memory(h: Tensor) -> Tensor:
            return self.multihead_attn(h, memory, memory, memory_key_padding_mask)[0]

        join = self.connection.feedforward
        x, depth = self._sublayer(x, self._start(x, depth_state), self.norm1, attend, self.connection.attention)
        x, depth = self._sublayer(x, depth, self.norm2, attend_to_memory, join)
        return self._sublayer(x, depth, self.norm3, self._feedforward, join)


@record
class TransformerState(Record):
    """The state of a :class:`MomentumTransformer` after the tokens processed so far.

    Attributes:
        position: number of tokens processed in each sequence, not counting padding; int64, (batch,).
        layers: the attention state of each layer.
    """

    position: Tensor
    layers: tuple[Any, ...]

    @override
    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name == "position" else new


@functools.partial(shares_arguments, base=TransformerLayerBase)
class MomentumTransformer(nn.Module):
    r"""A transformer of :class:`MomentumTransformerLayer` between an embedding and a linear output layer.

    A call processes whole sequences. With ``causal=True`` the model also supports streaming: :meth:`prefill` takes the
    next tokens, :meth:`step` takes one token, and :meth:`generate` samples new tokens. With linear-time attention, the
    size of the state and the time per token do not depend on the number of previous tokens.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), section 4.

    Arguments:
        num_embeddings: size of the vocabulary, or None for inputs that are vectors (batch, length, d_model).
        d_model: number of features of the residual stream. Default: ``512``.
        nhead: number of heads, a divisor of d_model. Default: ``8``.
        num_layers: number of layers. Default: ``6``.
        dim_feedforward: number of hidden features of the feedforward blocks. Default: ``2048``.
        dropout: dropout probability in the layers and after the embedding. Default: ``0.1``.
        activation: activation of the feedforward blocks, "relu", "gelu" or a function. Default: ``"relu"``.
        norm_first: whether norms come before the blocks, with another norm after the last layer. Default: ``False``.
        output_size: number of output features. Default: ``None``, num_embeddings, or d_model for vectors.
        positions: "sinusoidal" adds a position embedding to the inputs. "rotary" applies rotary position embedding in
            softmax attention. None uses no position embedding. An error is raised if ``attention`` or its options
            set other positions. Default: ``"sinusoidal"``.

    Shape:
        tokens: (batch, length), int64 or int32, or with ``num_embeddings=None`` (batch, length, d_model).
        output: (batch, length, output_size).

    Raises:
        ValueError: a size, number or name is not valid.

    Example:
        >>> model = MomentumTransformer(10, d_model=32, nhead=4, num_layers=2, dim_feedforward=64)
        >>> tokens = torch.zeros(3, 7, dtype=torch.int64)
        >>> model(tokens).shape, model.generate(tokens, 5).shape
        (torch.Size([3, 7, 10]), torch.Size([3, 12]))
    """

    def __init__(
        self,
        num_embeddings: int | None,
        d_model: int = 512,
        nhead: int = 8,
        num_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        norm_first: bool = False,
        *,
        output_size: int | None = None,
        positions: Literal["sinusoidal", "rotary"] | None = "sinusoidal",
        **options: Unpack[LayerOptions],
    ) -> None:
        for name in options.keys() - LayerOptions.__annotations__.keys():
            raise TypeError(f"MomentumTransformer.__init__() got an unexpected keyword argument {name!r}")
        super().__init__()
        if positions is not None:
            check_choice(positions, "positions", ("sinusoidal", "rotary"))
        rotary = positions == "rotary"
        own = options.get("attention_options") or {}
        options["attention_options"] = _with_rotary(options.get("attention", "momentum"), own, rotary)
        factory: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        self.d_model, self.positions = as_count(d_model, "d_model"), positions
        self.causal = options.get("causal", True)
        self.num_embeddings = None if num_embeddings is None else as_count(num_embeddings, "num_embeddings")
        self.embedding = None if num_embeddings is None else nn.Embedding(num_embeddings, d_model, **factory)
        self.dropout = nn.Dropout(as_real(dropout, "dropout", "dropout=0.1"))
        self.layers: Any = nn.ModuleList(
            MomentumTransformerLayer(
                d_model, nhead, dim_feedforward, dropout, activation, 1e-5, True, norm_first, **options
            )
            for _ in range(as_count(num_layers, "num_layers"))
        )
        fix = "positions='sinusoidal'" if rotary else "positions='rotary', or the option rotary=False of the attention"
        for layer in self.layers:  # a function may return another attention for each
            _check_rotary(layer.self_attn, rotary, f"positions={positions!r}", fix)
        self.norm = nn.LayerNorm(d_model, **factory) if norm_first else nn.Identity()
        features = (num_embeddings or d_model) if output_size is None else as_count(output_size, "output_size")
        self.readout = nn.Linear(d_model, features, **factory)
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(d_model))

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the outputs (batch, length, output_size) for whole sequences.

        Arguments:
            tokens: (batch, length), or vectors (batch, length, d_model).
            key_padding_mask: (batch, length), True = ignore. Ignored tokens may have any value. Default: ``None``.

        Raises:
            TypeError: tokens are not int64 or int32, or vectors are not of the parameters' dtype.
            ValueError: the shape of the tokens or of the mask does not fit.
            IndexError: a token is negative, or not below num_embeddings.
        """
        self._check(tokens)
        key_padding_mask = read_mask(key_padding_mask, tokens.shape[:2])
        start = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        x, _ = self._embed(tokens, start, key_padding_mask)
        depth = None
        for layer in self.layers:
            x, depth = layer(x, depth, key_padding_mask)
        return self._read(x)

    def init_state(self, batch_size: int) -> TransformerState:
        """Return the state of ``batch_size`` sequences before their first token."""
        batch_size = as_count(batch_size, "batch_size", least=0)
        layers = tuple(layer.self_attn.init_state(batch_size) for layer in self.layers)
        device = next(self.parameters()).device
        return TransformerState(torch.zeros(batch_size, dtype=torch.int64, device=device), layers)

    def prefill(
        self, tokens: Tensor, state: TransformerState | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, TransformerState]:
        """Return the outputs (batch, length, output_size) for the next tokens, and the state after them.

        Arguments:
            tokens: (batch, length), or vectors (batch, length, d_model).
            state: state after the previous tokens. Default: ``None``, no previous tokens.
            key_padding_mask: (batch, length), True = ignore: the token does not change the state. Default: ``None``.

        Raises:
            ValueError: if the state has another batch size or another number of layers.
        """
        self._check(tokens)
        key_padding_mask = read_mask(key_padding_mask, tokens.shape[:2])
        if state is None:
            start = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
            state = TransformerState(start, (None,) * len(self.layers))
        if not isinstance(state, TransformerState) or state.position.shape[0] != tokens.shape[0]:
            given = f"{len(state.position)} sequences" if isinstance(state, TransformerState) else type(state).__name__
            raise ValueError(
                f"state must be a TransformerState of {tokens.shape[0]} sequences, got {given}. "
                f"Fix: init_state({tokens.shape[0]}), or the state that prefill or step returned."
            )
        if len(state.layers) != len(self.layers):
            raise ValueError(
                f"state must have {len(self.layers)} layers, like the model, got {len(state.layers)}. "
                f"Fix: init_state({tokens.shape[0]}) of this model."
            )
        x, position = self._embed(tokens, state.position, key_padding_mask)
        depth, after = None, []
        for layer, before in zip(self.layers, state.layers, strict=True):
            x, new, depth = layer.prefill(x, before, key_padding_mask, depth)
            after.append(new)
        return self._read(x), TransformerState(position, tuple(after))

    def step(self, token: Tensor, state: TransformerState | None = None) -> tuple[Tensor, TransformerState]:
        """Return the output (batch, output_size) for the next token, and the state after it.

        Arguments:
            token: (batch,), or a vector (batch, d_model).
            state: state after the previous tokens. Default: ``None``, no previous tokens.

        Raises:
            ValueError: if ``token`` has the shape of several tokens.
        """
        check_input(token, "token")
        if token.dim() != (1 if self.embedding is not None else 2):
            wanted = "(batch,)" if self.embedding is not None else f"(batch, {self.d_model})"
            raise ValueError(
                f"step takes one token per sequence, {wanted}, got shape {tuple(token.shape)}. "
                "Fix: tokens[:, i], or prefill for several tokens."
            )
        output, state = self.prefill(token.unsqueeze(1), state)
        return output[:, 0], state

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        steps: int,
        *,
        key_padding_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        sample: Callable[[Tensor], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt token by token, in evaluation mode and without gradients.

        Arguments:
            prompt: (batch, length), or vectors (batch, length, d_model), of at least one token.
            steps: number of new tokens.
            key_padding_mask: mask of the prompt (batch, length), True = ignore, for prompts of different lengths. The
                first new token is sampled from the output at the last token that is not ignored. Default: ``None``.
            temperature: divisor of the outputs before the softmax; 0 selects the largest output. Default: ``1.0``.
            top_k: number of largest outputs to sample from. Default: ``None``, all.
            sample: function that maps outputs (batch, output_size) to the next input, instead of sampling from the
                softmax. Default: ``None``.
            generator: generator of the random numbers. Default: ``None``, torch's default.

        Returns:
            The prompt followed by the new tokens, in the dtype of the prompt: (batch, length + steps), or vectors
            (batch, length + steps, d_model).

        Raises:
            ValueError: if the prompt is empty, ``temperature`` is negative, or ``num_embeddings=None`` and there is no
                ``sample``.
        """
        self._check(prompt)
        if not 0 <= as_real(temperature, "temperature", "leave it out") < math.inf:
            raise ValueError(f"temperature must be a number >= 0, got {temperature!r}. Fix: leave it out.")
        top_k = None if top_k is None else as_count(top_k, "top_k")
        if prompt.shape[1] == 0:
            raise ValueError("prompt must have at least one token, got length 0. Fix: begin with a start token.")
        if sample is None:
            if self.embedding is None:
                fix = "sample=lambda output: output, or another function to the next vectors (batch, d_model)"
                raise ValueError(f"generate needs sample= for num_embeddings=None. Fix: {fix}.")

            def sample(output: Tensor) -> Tensor:
                return draw(output, temperature, top_k, generator).to(prompt.dtype)

        check_callable(sample, "sample", "sample=lambda output: output.argmax(-1)")

        parts, modes = [prompt], {module: module.training for module in self.modules()}
        self.eval()
        try:
            outputs, state = self.prefill(prompt, key_padding_mask=key_padding_mask)
            ignored = read_mask(key_padding_mask, prompt.shape[:2])
            last = torch.arange(prompt.shape[1], device=prompt.device).expand(prompt.shape[:2])
            last = (last if ignored is None else last.masked_fill(ignored, 0)).amax(1)
            output = outputs.take_along_dim(last[:, None, None], 1).squeeze(1)
            for index in range(as_count(steps, "steps", least=0)):
                token = sample(output)
                parts.append(token.unsqueeze(1))
                if index + 1 < steps:
                    output, state = self.step(token, state)
        finally:
            for module, mode in modes.items():
                module.training = mode
        return torch.cat(parts, 1)

    def _embed(self, tokens: Tensor, start: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
        """Embed the tokens (batch, length), the first of which has the position ``start`` (batch,).

        Return the inputs of the first layer (batch, length, d_model), and the position (batch,) of the next token.
        """
        if self.embedding is not None:
            tokens = tokens if ignored is None else tokens.masked_fill(ignored, 0)
            x = self._vectors(tokens) * math.sqrt(self.d_model)
        else:  # 0 * NaN is NaN
            x = tokens if ignored is None else tokens.masked_fill(ignored.unsqueeze(-1) & ~tokens.isfinite(), 0.0)
        positions, after = next_positions(start, tokens.shape[1], ignored)
        if self.positions == "sinusoidal":
            x = x + sinusoids(positions, self.d_model, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        return self.dropout(x), after

    def _vectors(self, tokens: Tensor) -> Tensor:
        try:
            vectors: Tensor = self.embedding(tokens)  # type: ignore[misc]
        except IndexError as error:
            low, high = (bound.item() for bound in tokens.aminmax())
            fix = "key_padding_mask=tokens < 0, if they are padding" if low < 0 else f"num_embeddings={high + 1}"
            raise IndexError(
                f"tokens must be >= 0 and < num_embeddings = {self.num_embeddings}, got {low} to {high}. Fix: {fix}."
            ) from error
        return vectors

    def _read(self, x: Tensor) -> Tensor:
        output: Tensor = self.readout(self.norm(x))
        return output

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}. Fix: torch.tensor(tokens).")
        check_input(tokens, "tokens")
        if self.embedding is None:
            if tokens.dim() != 3 or tokens.shape[-1] != self.d_model:
                raise ValueError(
                    f"inputs must be (batch, length, d_model = {self.d_model}), got {tuple(tokens.shape)}. Fix: that "
                    "shape, or num_embeddings= for tokens."
                )
            check_dtype(tokens, [next(self.parameters()).dtype], "tokens")
        elif tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"tokens must be int64 or int32, got {tokens.dtype}. Fix: tokens.long(), or num_embeddings=None for "
                "vectors."
            )
        elif tokens.dim() != 2:
            raise ValueError(
                f"tokens must be (batch, length), got shape {tuple(tokens.shape)}. Fix: tokens[None] for one sequence."
            )


def draw(output: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample tokens (batch,) from softmax(output / temperature), restricted to the ``top_k`` largest outputs.

    A temperature of 0 selects the largest output.
    """
    scores = output.to(torch.promote_types(output.dtype, torch.float32))
    if temperature < torch.finfo(scores.dtype).tiny:
        return output.argmax(-1)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # without subtraction of the maximum, ∞ / ∞ is NaN
    tokens = None
    if top_k is not None and top_k < scores.shape[-1]:
        scores, tokens = scores.topk(top_k)
    try:
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator)
    except RuntimeError as error:
        if scores.isfinite().all():
            raise
        raise ValueError(
            "generate needs finite outputs to sample from, got NaN or infinity. "
            "Fix: check the model's parameters and inputs with torch.isfinite."
        ) from error
    return (drawn if tokens is None else tokens.gather(1, drawn)).squeeze(1)


def sinusoids(positions: Tensor, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sinusoidal embedding (..., features) of positions (...).

    Features 2i and 2i + 1 of a position p are sin(p w_i) and cos(p w_i), with w_i = 10000^(-2i / features).

    References:
        Vaswani et al., Attention Is All You Need (arXiv:1706.03762), section 3.5.
    """
    even = torch.arange(0, features, 2, device=positions.device, dtype=dtype)
    angles = positions.to(dtype).unsqueeze(-1) * torch.exp(even * (-math.log(10_000.0) / features))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :features]


def next_positions(start: Tensor, length: int, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions of the next tokens (batch, length), and the position after them (batch,).

    ``start`` is the position of the first of these tokens. Padding does not count as a position.
    """
    after = start + (length if ignored is None else (~ignored).sum(1))
    return start.unsqueeze(1) + count_before(length, ignored, start.device), after
