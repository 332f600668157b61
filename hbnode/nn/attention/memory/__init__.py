"""A memory that learns by the heavy-ball method while it reads: the recurrence, and its exact form by chunks."""

from hbnode.nn.attention.memory.functional import HeavyBallMemoryState, heavy_ball_memory

__all__ = ["HeavyBallMemoryState", "heavy_ball_memory"]
