"""Normalizing flows on phase space."""

from hbnode.flows.heavy_ball import HeavyBallFlow

__all__ = ["HeavyBallFlow"]
