"""The heavy-ball stochastic differential equation: its field, its solvers and their noise."""

from hbnode.sde.field import HeavyBallSDE
from hbnode.sde.noise import BrownianIncrements
from hbnode.sde.solve import sdeint

__all__ = ["BrownianIncrements", "HeavyBallSDE", "sdeint"]
