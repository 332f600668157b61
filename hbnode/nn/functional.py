"""Attention, memory and oscillators as functions without parameters."""

from hbnode.nn._linear_attention import MomentumAttentionState, momentum_attention
from hbnode.nn.heavy_ball_memory import HeavyBallMemoryState, heavy_ball_memory
from hbnode.nn.oscillators import oscillator_step

__all__ = [
    "momentum_attention",
    "MomentumAttentionState",
    "heavy_ball_memory",
    "HeavyBallMemoryState",
    "oscillator_step",
]
