"""A normalizing flow on phase space, and a sampler based on annealed underdamped Langevin dynamics."""

from hbnode._checks import add_hints
from hbnode.distributions.annealing import HeavyBallAnnealing, LogZ
from hbnode.distributions.flow import HeavyBallFlow

__all__ = ["HeavyBallAnnealing", "HeavyBallFlow", "LogZ"]

add_hints(globals())
