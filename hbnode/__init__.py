"""Neural ODEs with momentum for PyTorch."""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from hbnode import errors, solve
from hbnode._checks import add_hints
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
from hbnode.signal import Signal
from hbnode.solve import odeint, sdeint
from hbnode.solve.events import Event
from hbnode.solve.registry import methods

if TYPE_CHECKING:
    from hbnode import data, diagnostics, distributions, nn, optim, torchdiffeq, training
    from hbnode import estimators as estimators
    from hbnode import features as features
    from hbnode.nn import ODERNN, HeavyBallODEBlock, ODEBlock

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


# Names that are imported at their first use. Layers map to the module that defines them, modules to "".
_LAZY = {
    **dict.fromkeys(("data", "diagnostics", "distributions", "estimators", "features", "nn", "optim"), ""),
    **dict.fromkeys(("torchdiffeq", "training"), ""),
    **dict.fromkeys(("ODEBlock", "HeavyBallODEBlock", "ODERNN"), "nn"),
}


def __getattr__(name: str) -> Any:
    """Import a lazy name at its first use; for an unknown name, raise AttributeError that suggests another name."""
    if (module := _LAZY.get(name)) is not None:
        found = importlib.import_module(f"hbnode.{module or name}")
        return globals().setdefault(name, getattr(found, name) if module else found)
    fixes: list[str] = []
    if not name.startswith("_"):
        near = [other for other in __all__ if other.lower() == name.lower()]
        fixes = [f"hbnode.{other}" for other in near or difflib.get_close_matches(name, __all__, 1, 0.8)]
        places = ("nn", "optim", "distributions", "diagnostics", "solve", "errors", "data", "training")
        modules = [importlib.import_module(f"hbnode.{place}") for place in places]
        fixes += [f"{module.__name__}.{name}" for module in modules if name in module.__all__]
    if name == "odeint_adjoint":
        fixes = ["hbnode.odeint(field, y0, t, gradient='adjoint')", "hbnode.torchdiffeq.odeint_adjoint"]
    if name == "odeint_event":
        fixes = ["hbnode.odeint(field, y0, t, events=hbnode.Event(fn))", "hbnode.torchdiffeq.odeint_event"]
    fix = f". Fix: {', or '.join(fixes)}." if fixes else ""
    raise AttributeError(f"module 'hbnode' has no attribute {name!r}{fix}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


add_hints(globals())
