"""The names of torchdiffeq's methods, and the options that each of them knows."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor

from hbnode.solvers.settings import Settings

ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
ADAMS = ("explicit_adams", "implicit_adams", "fixed_adams")
FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", *ADAMS)
SCIPY = ("scipy_solver",)
METHODS = (*ADAPTIVE, *FIXED, *SCIPY)
GRADIENTS = ("direct", "adjoint")
_STEP_OPTIONS = ("min_step", "max_step", "first_step", "safety", "ifactor", "dfactor")
_ADAPTIVE_OPTIONS = (*_STEP_OPTIONS, "norm", "step_t", "jump_t", "dtype")
_GRID_OPTIONS = ("step_size", "grid_constructor")
_FIXED_OPTIONS = (*_GRID_OPTIONS, "norm", "interp", "perturb")
_OPTIONS = {
    **dict.fromkeys(ADAPTIVE, _ADAPTIVE_OPTIONS),
    **dict.fromkeys(FIXED, _FIXED_OPTIONS),
    **dict.fromkeys(ADAMS, (*_FIXED_OPTIONS, "max_iters", "max_order")),
    **dict.fromkeys(SCIPY, ("norm", "solver", "min_step", "max_step")),
}
ARGUMENTS = {  # what is an argument and no option, and how it is written
    "max_num_steps": "max_steps=n, an argument and no option",
    "steps": "steps=n, an argument and no option",
    "dense": "save='interpolate' or save='exact', an argument and no option",
    "land": "save='exact', an argument and no option",
    "jump_t": "jump_times=[...], an argument and no option",
}


def solver_options(given: dict[str, Any] | None, method: str, name: str) -> dict[str, Any]:
    """The options, checked."""
    if given is not None and not isinstance(given, dict):
        example = {"first_step": 0.1} if method in ADAPTIVE else {"step_size": 0.1} if method in FIXED else {}
        raise TypeError(f"{name} must be a dict, got {type(given).__name__}. Fix: {name}={example}.")
    options = dict(given or {})
    unknown = [option for option in options if option not in _OPTIONS[method]]
    if unknown:
        raise ValueError(
            f"{name} has {unknown}, which method={method!r} does not know; expected some of {_OPTIONS[method]}. "
            f"Fix: {_instead(unknown[0], method)}."
        )
    for option in ("step_size", "first_step", "max_step"):
        if option in options and options[option] is not None and not options[option] > 0:
            raise ValueError(f"{name}[{option!r}] must be positive, got {options[option]!r}. Fix: a length of time.")
    if sum(option in options for option in _GRID_OPTIONS) > 1:
        raise ValueError(f"{name} has more than one of {_GRID_OPTIONS}. Fix: give one of them.")
    return options


def check(settings: Settings) -> None:
    """Refuse arguments that the method does not know."""
    method, options = settings.method, settings.options if isinstance(settings.options, dict) else {}
    if settings.steps is not None and method not in FIXED:
        raise ValueError(
            f"steps={settings.steps} is a fixed grid, which method={method!r} does not have. Fix: method='rk4'."
        )
    if settings.steps is not None and any(option in options for option in _GRID_OPTIONS):
        raise ValueError(f"steps was given, and options has one of {_GRID_OPTIONS}. Fix: give one of them.")
    if settings.jump_times is not None and "jump_t" in options:
        raise ValueError("jump_times was given, and options has 'jump_t'. Fix: jump_times alone.")
    if settings.save == "exact" and (method in SCIPY or any(option in options for option in _GRID_OPTIONS)):
        what = f"options={{{next(iter(options))!r}: ...}}" if method in FIXED else f"method={method!r}"
        raise ValueError(f"save='exact' is not possible with {what}. Fix: leave save out.")
    if method not in ADAPTIVE and settings.jump_times is not None:
        raise ValueError(
            f"jump_times are for adaptive steps, got method={method!r}. Fix: method='dopri5', or the jumps among the "
            "output times."
        )


def all_options(settings: Settings, t: Tensor) -> dict[str, Any]:
    """The options of the forward solve, with the arguments that are options to torchdiffeq."""
    assert settings.method is not None
    options, steps = solver_options(settings.options, settings.method, "options"), settings.steps
    if steps is not None:
        options["grid_constructor"] = lambda func, y0, t: _equal_steps(t, steps)
    if settings.jump_times is not None:
        options["jump_t"] = torch.tensor(settings.jump_times, dtype=t.dtype, device=t.device)
    if settings.save == "exact" and settings.method in ADAPTIVE:
        jumps = options.get("jump_t")
        options["step_t"] = t.detach() if jumps is None else t.detach()[~torch.isin(t.detach(), jumps.to(t))]
    return options


def _instead(option: str, method: str) -> str:
    """What to write in place of an unknown option."""
    if option in ARGUMENTS and option != "jump_t":
        return ARGUMENTS[option]
    if option in _GRID_OPTIONS:
        return "method='rk4' or another with fixed steps"
    if option in _ADAPTIVE_OPTIONS:
        return "method='dopri5' or another with adaptive steps"
    if option == "max_nfe":
        return "method=None or another native method"
    near = difflib.get_close_matches(option, _OPTIONS[method], 1)
    return f"{near[0]!r}" if near else "leave it out"


def adjoint_solver_options(own: dict[str, Any], given: dict[str, Any] | None, method: str) -> dict[str, Any]:
    """The options of the backward solve: those of the forward one, but for its norm, and the ones given."""
    given = solver_options({"norm": "seminorm"} if given is None else given, method, "adjoint_options")
    if given.get("norm", "seminorm") != "seminorm" and not callable(given["norm"]):
        raise ValueError(
            f"adjoint_options['norm'] must be 'seminorm' or a function, got {given['norm']!r}. "
            "Fix: leave the norm out for torchdiffeq's own, over all of the adjoint's state."
        )
    dropped = {"norm"} | (set(_GRID_OPTIONS) if any(option in given for option in _GRID_OPTIONS) else set())
    return {option: value for option, value in own.items() if option not in dropped} | given


def check_event(method: str, options: dict[str, Any]) -> None:
    """Refuse events with methods that cannot find them."""
    if method in SCIPY or (method in FIXED and "step_size" not in options):
        raise ValueError(
            f"event_fn with method={method!r} is not possible"
            + (" without options={'step_size': dt}" if method in FIXED else "")
            + f"; expected an adaptive method, one of {ADAPTIVE}. Fix: method='dopri5'."
        )


def _equal_steps(t: Tensor, steps: int) -> Tensor:
    """Grid of ``steps`` equal steps in each interval of ``t``, differentiable in t, exact at the output times."""
    fractions = torch.arange(steps, dtype=t.dtype, device=t.device) / steps
    starts, lengths = t[:-1, None], t.diff()[:, None]
    return torch.cat([(starts + lengths * fractions).reshape(-1), t[-1:]])
