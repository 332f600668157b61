"""Neural ODEs with momentum for PyTorch."""

import difflib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from hbnode import data, diagnostics, distributions, errors, nn, optim, solve, training
from hbnode._checks import with_hints
from hbnode.errors import SolverError
from hbnode.fields import (
    ANODE,
    GHBNODE,
    HBNODE,
    NODE,
    SONODE,
    AdamNODE,
    Field,
    HeavyBallSDE,
    NesterovNODE,
    PortHamiltonian,
)
from hbnode.nfe import count_nfe
from hbnode.nn import ODERNN, HeavyBallODEBlock, ODEBlock
from hbnode.signal import Signal
from hbnode.solve import odeint, sdeint
from hbnode.solve.events import Event
from hbnode.solve.registry import methods

if TYPE_CHECKING:
    from hbnode import estimators, features, torchdiffeq  # noqa: F401

__version__ = "0.1.0"

__all__ = [
    # fields
    "NODE",
    "ANODE",
    "SONODE",
    "HBNODE",
    "GHBNODE",
    "NesterovNODE",
    "AdamNODE",
    "PortHamiltonian",
    "Field",
    "HeavyBallSDE",
    # solving
    "odeint",
    "sdeint",
    "methods",
    "Event",
    "Signal",
    "SolverError",
    "count_nfe",
    # layers
    "ODEBlock",
    "HeavyBallODEBlock",
    "ODERNN",
    # modules
    "nn",
    "optim",
    "distributions",
    "data",
    "diagnostics",
    "solve",
    "torchdiffeq",
    "training",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Import the modules that need scikit-learn or torchdiffeq when they are first used; say where other names are."""
    if name in ("estimators", "features", "torchdiffeq"):
        return importlib.import_module(f"hbnode.{name}")
    modules = (nn, optim, distributions, diagnostics, solve, errors, data, training)
    near = [other for other in __all__ if other.lower() == name.lower()]
    fixes = [f"hbnode.{other}" for other in near or difflib.get_close_matches(name, __all__, 1, 0.8)]
    fixes += [f"{module.__name__}.{name}" for module in modules if name in module.__all__]
    if name == "odeint_adjoint":
        fixes = ["hbnode.odeint(field, y0, t, gradient='adjoint')", "hbnode.torchdiffeq.odeint_adjoint"]
    if name == "odeint_event":
        fixes = ["hbnode.odeint(field, y0, t, events=hbnode.Event(fn))", "hbnode.torchdiffeq.odeint_event"]
    fix = f". Fix: {', or '.join(fixes)}." if fixes and not name.startswith("_") else ""
    raise AttributeError(f"module 'hbnode' has no attribute {name!r}{fix}")


for _module in (sys.modules[__name__], nn, distributions):
    _kind: Any  # vars() leaves out the modules that are imported when they are first used
    for _kind in (vars(_module).get(name) for name in _module.__all__):
        _is_module = isinstance(_kind, type) and issubclass(_kind, torch.nn.Module)
        if _is_module and not hasattr(_kind.__init__, "__wrapped__"):
            _kind.__init__ = with_hints(_kind.__init__)  # an error for an unknown argument names the right one
