"""Transformer layers with a choice of attention and of the connection over depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hbnode._checks import as_count
from hbnode.nn.attention.softmax import SoftmaxAttention
from hbnode.nn.transformer.connections import DepthState
from hbnode.nn.transformer.kinds import (
    AttentionName,
    ConnectionName,
    MakeAttention,
    MakeConnection,
    make_attention,
    make_connection,
)

Activation = Literal["relu", "gelu"] | Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": nn.functional.relu, "gelu": nn.functional.gelu}
Attend = Callable[[Tensor], Tensor]


class _Layer(nn.Module):
    """What both layers have: self-attention, a feedforward block, their norms, and a connection."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        dropout: float,
        activation: Activation,
        layer_norm_eps: float,
        batch_first: bool,
        norm_first: bool,
        attention: AttentionName | MakeAttention,
        attention_options: Mapping[str, Any] | None,
        connection: ConnectionName | MakeConnection,
        connection_momentum: float | None,
        causal: bool,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        d_model, nhead, dim_feedforward = sizes
        as_count(d_model, "d_model"), as_count(nhead, "nhead"), as_count(dim_feedforward, "dim_feedforward")
        self.batch_first, self.norm_first, self.causal = batch_first, norm_first, causal
        layout = {"dropout": dropout, "batch_first": batch_first, "causal": causal, **options}
        self.self_attn = make_attention(attention, d_model, nhead, attention_options or {}, **layout)
        self.linear1 = nn.Linear(d_model, dim_feedforward, **options)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **options)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **options)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **options)
        self.dropout = nn.Dropout(dropout)
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be 'relu', 'gelu' or a function, got {activation!r}. "
                f"Fix: torch.nn.functional.{activation}."
            )
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.connection = make_connection(connection, connection_momentum).to(self.linear1.weight)

    def _start(self, x: Tensor, depth_state: DepthState | None) -> DepthState:
        """What the layers before have carried so far, or an error if a layer's two outputs came as one input."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor, got {type(x).__name__}; a layer returns its output and a depth state. "
                "Fix: x, depth_state = layer(x, depth_state) for each layer, or MomentumTransformer."
            )
        if depth_state is not None and not isinstance(depth_state, DepthState):
            raise TypeError(
                f"depth_state must be what the layer before returned, got {type(depth_state).__name__}. "
                "Fix: key_padding_mask=mask by name."
            )
        return DepthState() if depth_state is None else depth_state

    def _attention(self, x: Tensor, depth: DepthState, norm: nn.Module, attend: Attend) -> tuple[Tensor, DepthState]:
        """Attention, its norm, and how it joins the stream."""
        start = self.connection.look_ahead(x, depth)
        update = self.dropout(attend(norm(start) if self.norm_first else start))
        x, depth = self.connection.attention(x, update, depth)
        return (x if self.norm_first else norm(x)), depth

    def _block(self, x: Tensor, depth: DepthState, norm: nn.Module, block: Attend) -> tuple[Tensor, DepthState]:
        """Any other sublayer, its norm, and how it joins the stream."""
        start = self.connection.look_ahead(x, depth)
        update = self.dropout(block(norm(start) if self.norm_first else start))
        x, depth = self.connection.feedforward(x, update, depth)
        return (x if self.norm_first else norm(x)), depth

    def _feedforward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return hidden


class MomentumTransformerLayer(_Layer):
    r"""Self-attention and a feedforward block, as ``torch.nn.TransformerEncoderLayer``, with momentum where wanted.

    ``attention`` says how tokens are mixed, ``connection`` how the outputs of the two blocks join the stream that runs
    through the layers. A connection with momentum carries something from layer to layer, so the layer returns it and
    takes it::

        depth_state = None
        for layer in layers:
            x, depth_state = layer(x, depth_state)

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), section 4.3.

    Arguments:
        d_model: features of the input and of the output.
        nhead: heads; d_model is a multiple of it.
        dim_feedforward: hidden features of the feedforward block. Default: ``2048``.
        dropout: probability of dropping a block's output, its hidden features and, in softmax attention, its weights.
            Default: ``0.1``.
        activation: of the feedforward block, "relu", "gelu" or a function. Default: ``"relu"``.
        layer_norm_eps: ε of the layer norms. Default: ``1e-5``.
        batch_first: whether x is (batch, length, d_model). Default: ``False``.
        norm_first: whether norms come before the blocks (pre-norm) or after the connection. Default: ``False``.
        attention: "momentum", "linear", "softmax", "heavy_ball" (:class:`hbnode.nn.HeavyBallMemory`), "gated_delta",
            "gated_linear", or a function like the constructors of these. Default: ``"momentum"``.
        attention_options: further arguments of the attention module. Default: ``None``, none.
        connection: "residual", the paper's "momentum" (75) and "adaptive" (77), "momentum_state" (75 as the published
            code has it), the learned "heavy_ball" and "nesterov" streams, or a function that makes a
            :class:`hbnode.nn.transformer.Connection`. Default: ``"residual"``.
        connection_momentum: β of the connection, or its start if it is learned. Default: ``None``, the connection's.
        causal: whether a token sees only itself and those before. Default: ``True``.
        device: of the parameters. Default: ``None``, torch's.
        dtype: of the parameters. Default: ``None``, torch's.

    Raises:
        ValueError: a size, number or name is not valid.

    Example:
        >>> layer = MomentumTransformerLayer(32, 4, 64, batch_first=True, connection="adaptive")
        >>> x, depth_state = layer(torch.ones(2, 7, 32))
        >>> x, depth_state = layer(x, depth_state)
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
        attention: AttentionName | MakeAttention = "momentum",
        attention_options: Mapping[str, Any] | None = None,
        connection: ConnectionName | MakeConnection = "residual",
        connection_momentum: float | None = None,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            (d_model, nhead, dim_feedforward),
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            attention,
            attention_options,
            connection,
            connection_momentum,
            causal,
            {"device": device, "dtype": dtype},
        )

    def forward(
        self, x: Tensor, depth_state: DepthState | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, DepthState]:
        """The stream after the layer, and what its connection carries on.

        Arguments:
            x: (length, batch, d_model), with ``batch_first`` (batch, length, d_model).
            depth_state: of the layer before. Default: ``None``, this is the first layer.
            key_padding_mask: (batch, length), True = ignore. Default: ``None``.
        """
        return self._run(x, depth_state, lambda h: self.self_attn(h, h, h, key_padding_mask)[0])

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_padding_mask: Tensor | None = None,
        depth_state: DepthState | None = None,
    ) -> tuple[Tensor, Any, DepthState]:
        """The same for the next tokens of a stream: the output, the attention's state, and the connection's.

        Arguments:
            x: as of a call.
            state: of the attention after the tokens before. Default: ``None``, none.
            key_padding_mask: (batch, length), True = ignore. Default: ``None``.
            depth_state: of the layer before. Default: ``None``, this is the first layer.
        """
        after = []

        def attend(h: Tensor) -> Tensor:
            output, new = self.self_attn.prefill(h, state, key_padding_mask)
            after.append(new)
            return output

        x, depth_state = self._run(x, depth_state, attend)
        return x, after[0], depth_state

    def _run(self, x: Tensor, depth_state: DepthState | None, attend: Attend) -> tuple[Tensor, DepthState]:
        x, depth = self._attention(x, self._start(x, depth_state), self.norm1, attend)
        return self._block(x, depth, self.norm2, self._feedforward)


class MomentumTransformerDecoderLayer(_Layer):
    r"""Self-attention, attention to an encoder's output, and a feedforward block.

    This is ``torch.nn.TransformerDecoderLayer`` with the attentions and connections of
    :class:`MomentumTransformerLayer`. The paper's connections act on self-attention; the heavy-ball and Nesterov
    streams on all three blocks. Attention to the encoder's output is never causal, so kinds that are causal only need
    another ``cross_attention``.

    Arguments:
        d_model: features of the input, of the encoder's output and of the output.
        nhead: heads; d_model is a multiple of it.
        dim_feedforward: hidden features of the feedforward block. Default: ``2048``.
        dropout: probability of dropping a block's output, its hidden features and, in softmax attention, its weights.
            Default: ``0.1``.
        activation: of the feedforward block, "relu", "gelu" or a function. Default: ``"relu"``.
        layer_norm_eps: ε of the layer norms. Default: ``1e-5``.
        batch_first: whether x is (batch, length, d_model). Default: ``False``.
        norm_first: whether norms come before the blocks (pre-norm) or after the connection. Default: ``False``.
        attention: of :class:`MomentumTransformerLayer`. Default: ``"momentum"``.
        attention_options: further arguments of the self-attention module. Default: ``None``, none.
        cross_attention: the kind that attends to the encoder's output. Default: ``None``, that of ``attention``, with
            its options.
        connection: of :class:`MomentumTransformerLayer`. Default: ``"residual"``.
        connection_momentum: β of the connection, or its start if it is learned. Default: ``None``, the connection's.
        causal: whether self-attention sees only the token itself and those before. Default: ``True``.
        device: of the parameters. Default: ``None``, torch's.
        dtype: of the parameters. Default: ``None``, torch's.

    Raises:
        ValueError: a size, number or name is not valid.

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
        attention: AttentionName | MakeAttention = "momentum",
        attention_options: Mapping[str, Any] | None = None,
        cross_attention: AttentionName | MakeAttention | None = None,
        connection: ConnectionName | MakeConnection = "residual",
        connection_momentum: float | None = None,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            (d_model, nhead, dim_feedforward),
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            attention,
            attention_options,
            connection,
            connection_momentum,
            causal,
            options,
        )
        kind, own = (attention, attention_options or {}) if cross_attention is None else (cross_attention, {})
        if kind in ("softmax", SoftmaxAttention):
            own = {"rotary": False, **own}  # positions of two sequences do not compare
        layout = {"dropout": dropout, "batch_first": batch_first, "causal": False, **options}
        self.multihead_attn = make_attention(kind, d_model, nhead, own, **layout)
        self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, **options)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        depth_state: DepthState | None = None,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, DepthState]:
        """The stream after the layer, and what its connection carries on.

        Arguments:
            x: (length, batch, d_model), with ``batch_first`` (batch, length, d_model).
            memory: the encoder's output, of any length.
            depth_state: of the layer before. Default: ``None``, this is the first layer.
            key_padding_mask: of x (batch, length), True = ignore. Default: ``None``.
            memory_key_padding_mask: of the encoder's output (batch, its length), True = ignore. Default: ``None``.
        """

        def attend(h: Tensor) -> Tensor:
            return self.self_attn(h, h, h, key_padding_mask)[0]

        def attend_to_memory(h: Tensor) -> Tensor:
            return self.multihead_attn(h, memory, memory, memory_key_padding_mask)[0]

        x, depth = self._attention(x, self._start(x, depth_state), self.norm1, attend)
        x, depth = self._block(x, depth, self.norm2, attend_to_memory)
        return self._block(x, depth, self.norm3, self._feedforward)
