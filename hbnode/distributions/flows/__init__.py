"""Normalizing flows on phase space."""

from hbnode.distributions.flows.heavy_ball import HeavyBallFlow

__all__ = ["HeavyBallFlow"]
