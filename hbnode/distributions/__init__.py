"""Densities: normalizing flows on phase space, and annealed heavy-ball Langevin dynamics."""

from hbnode.distributions.annealing import HeavyBallAnnealing, LogZ
from hbnode.distributions.flow import HeavyBallFlow

__all__ = ["HeavyBallAnnealing", "HeavyBallFlow", "LogZ"]
