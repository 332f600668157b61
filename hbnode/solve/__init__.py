"""Solvers for ODEs and SDEs."""

from hbnode.solve import settings
from hbnode.solve.events import EventRecord
from hbnode.solve.graph import Reported
from hbnode.solve.odeint import odeint
from hbnode.solve.registry import MethodInfo, SDEMethodInfo, sde_methods
from hbnode.solve.sde import BrownianIncrements, sdeint

#: The names of the ODE solvers, for type hints. :func:`hbnode.methods` lists them with their order and cost.
Method = settings.Method

#: The ways to compute the gradient of a solve. :func:`hbnode.odeint` describes them at its argument ``gradient``.
#: :func:`hbnode.methods` lists those of each solver.
Gradient = settings.Gradient

#: How a solve reaches its output times, the argument ``save`` of :func:`hbnode.odeint`. With ``"interpolate"`` steps
#: pass the output times, and dense output gives the states there. With ``"exact"`` steps end on them.
Save = settings.Save

__all__ = [
    "odeint",
    "sdeint",
    "sde_methods",
    "EventRecord",
    "Reported",
    "MethodInfo",
    "SDEMethodInfo",
    "BrownianIncrements",
    "Method",
    "Gradient",
    "Save",
]
