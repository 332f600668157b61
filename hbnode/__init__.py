"""Neural ODEs with momentum for PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from hbnode import data, diagnostics, distributions, errors, nn, optim, solve
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
    "errors",
]


def __getattr__(name: str) -> Any:
    """Import the modules that need scikit-learn or torchdiffeq when they are first used."""
    if name in ("estimators", "features", "torchdiffeq"):
        return importlib.import_module(f"hbnode.{name}")
    raise AttributeError(f"module 'hbnode' has no attribute {name!r}")
