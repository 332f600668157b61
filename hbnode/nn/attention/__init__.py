"""Attention and memory with momentum, in time linear in the length; softmax attention under the same interface."""

from hbnode.nn.attention.memory import HeavyBallMemoryState, heavy_ball_memory
from hbnode.nn.attention.momentum import MomentumAttentionState, momentum_attention
from hbnode.nn.attention.multihead import HeavyBallMemory, MomentumAttention
from hbnode.nn.attention.softmax import KeyValueCache, SoftmaxAttention

__all__ = [
    "momentum_attention",
    "MomentumAttentionState",
    "heavy_ball_memory",
    "HeavyBallMemoryState",
    "MomentumAttention",
    "HeavyBallMemory",
    "SoftmaxAttention",
    "KeyValueCache",
]
