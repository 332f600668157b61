"""Solvers for ODEs and SDEs."""

from hbnode.solve import settings
from hbnode.solve.events import EventRecord
from hbnode.solve.graph import Reported
from hbnode.solve.odeint import odeint
from hbnode.solve.registry import MethodInfo, SDEMethodInfo, sde_methods
from hbnode.solve.sde import BrownianIncrements, sdeint

#: The names of the ODE solvers, for type hints. :func:`hbnode.methods` lists them with their order and cost.
Method = settings.Method

#: The names of the gradient modes, for type hints. The argument ``gradient`` of :func:`hbnode.odeint` describes them,
#: and :func:`hbnode.methods` lists the gradient modes of each solver.
Gradient = settings.Gradient

#: The values of the argument ``save`` of :func:`hbnode.odeint`, for type hints. With ``"exact"``, steps end on the
#: output times. With ``"interpolate"``, steps may pass output times, and the states there are interpolated.
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
