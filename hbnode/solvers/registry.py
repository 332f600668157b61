"""Our own methods: which there are, and what may be asked of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hbnode._checks import as_count
from hbnode.fields import GHBNODE, HBNODE
from hbnode.solvers import tableaus
from hbnode.solvers.exponential import Exponential
from hbnode.solvers.nystrom import Nystrom
from hbnode.solvers.ode_term import change_of_call, is_heavy_ball, unwrapped
from hbnode.solvers.runge_kutta import RungeKutta
from hbnode.solvers.settings import Options, Settings
from hbnode.solvers.splitting import Splitting
from hbnode.solvers.step_method import StepMethod
from hbnode.solvers.tableaus import (
    BLANES_MOAN4_DRIFTS,
    BLANES_MOAN4_KICKS,
    RKN4,
    RKN6,
    RKN8,
    STRANG_DRIFTS,
    STRANG_KICKS,
    TSIT5,
)
from hbnode.solvers.torchdiffeq_options import ARGUMENTS

NYSTROM = {"nystrom4": Nystrom(RKN4), "nystrom6": Nystrom(RKN6), "nystrom8": Nystrom(RKN8)}
EXPONENTIAL = {"exponential": Exponential(tableaus.EXPONENTIAL)}
SPLITTING = {
    "leapfrog": Splitting(STRANG_DRIFTS, STRANG_KICKS),
    "blanes_moan4": Splitting(BLANES_MOAN4_DRIFTS, BLANES_MOAN4_KICKS),
}
RUNGE_KUTTA = {"tsit5": RungeKutta(TSIT5)}
SECOND_ORDER: dict[str, StepMethod] = {**NYSTROM, **EXPONENTIAL, **SPLITTING}  # they take h and m apart
METHODS: dict[str, StepMethod] = {**SECOND_ORDER, **RUNGE_KUTTA}
STRONG = 50.0  # γT from which the damping keeps the steps of Nystrom methods short
GRADIENTS = ("checkpoint", "direct", "reversible", "adjoint")
_ADAPTIVE_OPTIONS = ("first_step", "max_step", "min_step", "max_nfe")
_SPLITTING_OPTIONS = ("max_nfe",)


def native_options(given: dict[str, Any] | None, method: str) -> Options:
    """The options, checked for a method."""
    if given is not None and not isinstance(given, dict):
        fix = "steps=8 for a grid, else options={'max_nfe': 1000}"
        raise TypeError(f"options must be a dict, got {type(given).__name__}. Fix: {fix}.")
    given = dict(given or {})
    known = _SPLITTING_OPTIONS if method in SPLITTING else _ADAPTIVE_OPTIONS
    unknown = [option for option in given if option not in known]
    if unknown:
        raise ValueError(
            f"options has {unknown}, which method={method!r} does not know; expected some of {known}. "
            f"Fix: {_instead(unknown[0], method, known)}."
        )
    for name in ("first_step", "max_step", "min_step"):
        if name in given and not given[name] > 0:
            raise ValueError(f"options[{name!r}] must be positive, got {given[name]!r}. Fix: a length of time.")
    if "max_nfe" in given:
        given["max_nfe"] = as_count(given["max_nfe"], "options['max_nfe']")
    return Options(**given)


_THEIRS = ("norm", "step_t", "dtype", "safety", "ifactor", "dfactor")  # options of torchdiffeq's methods


def _instead(option: str, method: str, known: Sequence[str]) -> str:
    """What to write in place of an unknown option."""
    if option == "max_num_steps":
        return "max_steps=n, an argument and no option"
    if option in ARGUMENTS:
        return ARGUMENTS[option]
    if option in ("step_size", "grid_constructor"):
        return "steps=n, an argument: n steps in each output interval"
    if option in _ADAPTIVE_OPTIONS:
        return f"leave it out, the steps of {method!r} are a grid"
    if option in _THEIRS:
        return "method='dopri5', which has torchdiffeq's options"
    near = difflib.get_close_matches(option, known, 1)
    return f"options={{{near[0]!r}: ...}}" if near else "leave it out"


def best_method(field: Callable, settings: Settings, span: float) -> str:
    """What ``method=None`` means: Nystrom for HBNODE, its order by the tolerance, and ``"tsit5"`` for all others.

    The order is that of fewer evaluations at the tolerance, measured over problems like those of the benchmarks. A
    constant damping that is strong over the time ``span`` limits the steps of all but ``"exponential"``.
    """
    if settings.gradient == "reversible":
        return "blanes_moan4"
    if not is_heavy_ball(field, HBNODE):
        return "tsit5"
    if settings.steps is None and constant_damping(field) * span > STRONG:
        return "exponential"
    return "nystrom4" if settings.rtol >= 1e-3 else "nystrom8"


def constant_damping(field: Callable) -> float:
    """The largest γ of a heavy-ball field if it is constant, which no device has to be asked for; else 0."""
    inner = unwrapped(field)
    if not isinstance(inner, (HBNODE, GHBNODE)) or inner.omega is not None:
        return 0.0
    damping = inner.solver_damping()
    return float(damping.max()) if isinstance(damping, Tensor) else damping


def check(settings: Settings) -> None:
    """Refuse what native methods cannot do; ``settings.method`` may still be None."""
    method, gradient = settings.method, settings.gradient
    if method is None:
        method = "blanes_moan4" if gradient == "reversible" else "tsit5"
    native_options(settings.options, method)
    if method in SPLITTING and settings.steps is None:
        raise ValueError(f"method={method!r} has a fixed grid. Fix: steps=n, n steps in each output interval.")
    if gradient == "reversible" and method not in SPLITTING:
        raise ValueError(
            f"gradient='reversible' needs a method that can be undone exactly, one of {tuple(SPLITTING)}, got "
            f"method={method!r}. Fix: gradient='checkpoint', or method='leapfrog' with steps=n."
        )
    if settings.adjoint_options is not None:
        raise ValueError(
            "adjoint_options are for torchdiffeq's methods; the native ones solve their adjoint with 'tsit5' at the "
            "tolerances of the forward solve. Fix: leave them out, or method='dopri5' with gradient='adjoint'."
        )


def check_field(method: str, field: Callable) -> None:
    """Refuse a field that a method cannot solve."""
    if method not in SECOND_ORDER:
        return
    kinds: tuple[type, ...] = (HBNODE,)
    what = "solves h'' + γh' = f(h, t), an HBNODE"
    fix = "Fix: method='tsit5', or method=None for the best there is."
    if method in SPLITTING:
        kinds, what = (HBNODE, GHBNODE), "splits the equation of an HBNODE or GHBNODE"
        fix = "Fix: method='tsit5' with gradient='checkpoint'."
    if not isinstance(unwrapped(field), kinds):
        raise ValueError(f"method={method!r} {what}, got {type(field).__name__}. {fix}")
    change = change_of_call(field)
    if change is not None:
        raise ValueError(
            f"method={method!r} {what}, and evaluates func without a call of the field, but {change}. {fix}"
        )
