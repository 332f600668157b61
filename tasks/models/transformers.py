"""The transformers that tasks compare: one stack, with the attention and the connection that a name stands for.

``linear_gain`` is linear attention times 1 / (1 - β), the weight that momentum gives to keys long past: what momentum
adds to it is more than a gain. ``gated_delta`` (Gated DeltaNet) and ``gated_linear`` are newer rivals of linear time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from hbnode.nn import MomentumTransformer
from hbnode.nn.transformer import AttentionName, ConnectionName


@dataclasses.dataclass(frozen=True)
class Contender:
    """What a name stands for."""

    attention: AttentionName
    connection: ConnectionName = "residual"
    causal_only: bool = False  # cannot see later tokens, so not for bidirectional encoders


CONTENDERS: dict[str, Contender] = {
    "softmax": Contender("softmax"),
    "linear": Contender("linear"),
    "linear_gain": Contender("linear"),
    "momentum": Contender("momentum"),
    "momentum_connection": Contender("momentum", "momentum"),
    "adaptive": Contender("momentum", "adaptive"),
    "gated_linear": Contender("gated_linear", causal_only=True),
    "gated_delta": Contender("gated_delta", causal_only=True),
    "heavy_ball": Contender("heavy_ball", causal_only=True),
}


def attention_of(name: str, momentum: float = 0.6, step_size: float = 1.0) -> dict[str, Any]:
    """The arguments of a layer that a contender stands for.

    Arguments:
        name: one of :data:`CONTENDERS`.
        momentum: β of momentum attention, and of the gain of ``linear_gain``.
        step_size: γ of momentum attention.
    """
    contender = CONTENDERS[name]
    options: Mapping[str, Any] = {}
    if contender.attention == "momentum":
        options = {"momentum": momentum, "step_size": step_size}
    elif name == "linear_gain":
        options = {"step_size": step_size / (1 - momentum)}
    return {"attention": contender.attention, "attention_options": options, "connection": contender.connection}


def make_transformer(
    name: str,
    num_embeddings: int | None,
    *,
    momentum: float = 0.6,
    step_size: float = 1.0,
    connection_momentum: float = 0.9,
    positions: Literal["sinusoidal", "rotary"] | Literal["auto"] | None = "auto",
    **options: Any,
) -> MomentumTransformer:
    """A contender's transformer.

    Arguments:
        name: one of :data:`CONTENDERS`.
        num_embeddings: of :class:`hbnode.nn.MomentumTransformer`.
        momentum: β of momentum attention, and of the gain of ``linear_gain``.
        step_size: γ of momentum attention.
        connection_momentum: β of the momentum connection.
        positions: of the transformer; "auto" is rotary for softmax attention that is causal, else sinusoidal.
        **options: further arguments of :class:`hbnode.nn.MomentumTransformer`.
    """
    layer = attention_of(name, momentum, step_size)
    if layer["connection"] == "momentum":
        layer["connection_momentum"] = connection_momentum
    if positions == "auto":
        positions = "rotary" if name == "softmax" and options.get("causal", True) else "sinusoidal"
    return MomentumTransformer(num_embeddings, positions=positions, **layer, **options)
