"""Solvers for ODEs and SDEs."""

from hbnode.solve.events import EventRecord
from hbnode.solve.odeint import odeint
from hbnode.solve.registry import MethodInfo, SDEMethodInfo, sde_methods
from hbnode.solve.sde import BrownianIncrements, sdeint
from hbnode.solve.settings import Gradient, Method, Save

__all__ = [
    "odeint",
    "sdeint",
    "sde_methods",
    "EventRecord",
    "MethodInfo",
    "SDEMethodInfo",
    "BrownianIncrements",
    "Method",
    "Gradient",
    "Save",
]
