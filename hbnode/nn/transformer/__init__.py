"""Transformers with momentum: over time in the attention, over depth in the connections."""

from hbnode.nn.transformer.connections import (
    AdaptiveConnection,
    Connection,
    DepthState,
    HeavyBallConnection,
    MomentumConnection,
    MomentumStateConnection,
    NesterovConnection,
)
from hbnode.nn.transformer.layers import MomentumTransformerDecoderLayer, MomentumTransformerLayer
from hbnode.nn.transformer.model import MomentumTransformer, TransformerState

__all__ = [
    "AdaptiveConnection",
    "Connection",
    "DepthState",
    "HeavyBallConnection",
    "MomentumConnection",
    "MomentumStateConnection",
    "MomentumTransformer",
    "MomentumTransformerDecoderLayer",
    "MomentumTransformerLayer",
    "NesterovConnection",
    "TransformerState",
]
