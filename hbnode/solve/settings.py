"""The solver arguments of :func:`hbnode.odeint` and their checks."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hbnode._checks import as_count, check_bool, is_one_of, nearest, nearest_method, refuse_gradient
from hbnode.solve.methods import ALL_METHODS, METHODS, TORCHDIFFEQ_METHODS, NativeMethod, TorchdiffeqMethod

Method = Literal[NativeMethod, TorchdiffeqMethod]
Gradient = Literal["checkpoint", "direct", "reversible", "adjoint"]
Save = Literal["interpolate", "exact"]

GRADIENTS, SAVES = get_args(Gradient), get_args(Save)

LENGTHS = ("step_size", "first_step", "max_step")
GRID = ("step_size", "grid_constructor")
STEPS = ("first_step", "min_step", "max_step", "safety", "ifactor", "dfactor", "norm", "step_t", "jump_t", "dtype")
OPTIONS = {  # names of the options of native methods, and of each kind of torchdiffeq's methods
    "native": ("first_step", "max_step", "min_step", "max_nfe"),
    "adaptive": STEPS,
    "fixed": (*GRID, "norm", "interp", "perturb"),
    "adams": (*GRID, "norm", "interp", "perturb", "max_iters", "max_order"),
    "scipy": ("min_step", "max_step", "norm", "solver"),
}
INSTEAD = {  # for options that a method does not support: the fix in the error message
    **dict.fromkeys(STEPS, "leave it out, or method='dopri5' or another with adaptive steps"),
    **dict.fromkeys(GRID, "steps=n, an argument of its own: n steps per output interval, for methods with fixed steps"),
    "max_nfe": "method=None or another native method",
    "max_num_steps": "max_steps=n, an argument of its own",
    "steps": "steps=n, an argument of its own",
    "dense": "save='interpolate' or save='exact', an argument of its own",
    "land": "save='exact', an argument of its own",
    "jump_t": "jump_times=[...], an argument of its own",
}


@dataclass(frozen=True)
class Settings:
    """The solver arguments of :func:`hbnode.odeint`, such as ``method`` and ``rtol``.

    Only :class:`hbnode.ODERNN` sets ``common_steps``. All samples then take steps that are the same fraction of their
    time spans.
    """

    method: Any = None  # a name; None chooses one for the field
    rtol: float = 1e-5
    atol: float = 1e-5
    gradient: Any = None
    steps: int | None = None
    per_sample: bool = False
    save: str = "interpolate"
    jump_times: Any = ()
    max_steps: int = 10_000
    compile: bool = False
    common_steps: bool = False  # steps are the same fraction of each sample's time span
    options: dict[str, Any] | None = None
    adjoint_options: dict[str, Any] | None = None

    @property
    def is_native(self) -> bool:
        """Whether the method is one of hbnode's, and not one of torchdiffeq's."""
        return self.method not in TORCHDIFFEQ_METHODS

    def checked(self) -> Settings:
        """Return the settings with values of standard types; raise an error if one is invalid or if two conflict."""
        is_torchdiffeq = is_one_of(self.method, tuple(TORCHDIFFEQ_METHODS))
        self._check_names(is_torchdiffeq)
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}. Fix: {name}=1e-5 is the default.")
        jumps, steps = checked_jumps(self.jump_times), None if self.steps is None else _checked_steps(self.steps)
        if not isinstance(self.per_sample, bool):
            raise ValueError(f"per_sample must be True or False, got {self.per_sample!r}. Fix: per_sample=True.")
        max_steps = as_count(self.max_steps, "max_steps")
        check_bool(self.compile, "compile")
        if not is_torchdiffeq:
            self._check_native()
        elif self.per_sample:
            why = f"method={self.method!r}, which has one step size for the batch"
            raise ValueError(f"per_sample=True is not possible with {why}. Fix: per_sample=False, or a native method.")
        elif self.compile:
            fix = "leave method out, or compile the network, torch.compile(func)"
            raise ValueError(f"compile=True is for native methods, got method={self.method!r}. Fix: {fix}.")
        rtol, atol = float(self.rtol), float(self.atol)
        return dataclasses.replace(self, rtol=rtol, atol=atol, steps=steps, max_steps=max_steps, jump_times=jumps)

    def _check_names(self, is_torchdiffeq: bool) -> None:
        """Raise ValueError if the value of ``method``, ``gradient`` or ``save`` is unknown."""
        method, methods = self.method, tuple(ALL_METHODS)
        if method is not None and not is_one_of(method, methods):
            raise ValueError(
                f"unknown method {method!r}; expected one of {methods}. Fix: {nearest_method(method, methods)}."
            )
        gradients = ("direct", "adjoint") if is_torchdiffeq else GRADIENTS
        is_object = not is_torchdiffeq and hasattr(self.gradient, "solve") and not isinstance(self.gradient, Tensor)
        if self.gradient is not None and not is_one_of(self.gradient, gradients) and not is_object:
            raise ValueError(
                f"unknown gradient {self.gradient!r} for method={method!r}; expected one of {gradients}. "
                f"Fix: gradient={nearest(self.gradient, gradients) or gradients[0]!r}."
            )
        if not is_one_of(self.save, SAVES):
            fix = f"save={near!r}" if (near := nearest(self.save, SAVES)) else "leave it out"
            raise ValueError(f"save must be one of {SAVES}, got {self.save!r}. Fix: {fix}.")

    def _check_native(self) -> None:
        """Raise an error if the native method ``method`` does not support the options, ``steps`` or ``gradient``."""
        method, gradient, options = self.method, self.gradient, self.options
        if method is None:
            method = "blanes_moan4" if gradient == "reversible" else "tsit5"
        known = METHODS[method]
        checked_options(options, method)
        if known.needs_fixed_steps and self.steps is None:
            raise ValueError(f"method={method!r} needs fixed steps. Fix: steps=n, n steps per output interval.")
        if gradient == "reversible" and not known.is_reversible:
            reversible = tuple(name for name, other in METHODS.items() if other.is_reversible)
            raise ValueError(
                f"gradient='reversible' needs a reversible method, one of {reversible}, got "
                f"method={method!r}. Fix: gradient='checkpoint', or method='leapfrog' with steps=n."
            )
        if gradient == "adjoint" and gradient not in known.gradients:
            why = "what decays fast forwards grows as fast backwards"
            raise ValueError(f"method={method!r} has no adjoint: {why}. Fix: gradient='checkpoint', which is exact.")
        if self.adjoint_options is not None:
            raise ValueError("adjoint_options are for torchdiffeq's methods. Fix: leave them out, or method='dopri5'.")


def checked_options(given: Any, method: str, name: str = "options") -> dict[str, Any]:
    """Return a copy of the dict of options ``given``; raise an error for an unknown name or an invalid value."""
    if method in TORCHDIFFEQ_METHODS:
        known = OPTIONS[TORCHDIFFEQ_METHODS[method].kind]
    else:
        known = ("max_nfe",) if METHODS[method].needs_fixed_steps else OPTIONS["native"]
    if given is not None and not isinstance(given, dict):
        raise TypeError(f"{name} must be a dict, got {type(given).__name__}. Fix: {name}={{{known[0]!r}: ...}}.")
    options, is_native = dict(given or {}), method not in TORCHDIFFEQ_METHODS
    kind: Any = numbers.Real if is_native else numbers.Real | Tensor
    for option, value in options.items():
        if option not in known:
            fix = INSTEAD.get(option) or nearest(option, known) or "leave it out"
            what = f"{name} has [{option!r}], which method={method!r} does not support; expected some of {known}"
            raise ValueError(f"{what}. Fix: {fix}.")
        if option == "max_nfe":
            as_count(value, "options['max_nfe']")
        elif value is None and not is_native:  # None is torchdiffeq's default
            continue
        elif (is_native or option in LENGTHS) and not (isinstance(value, kind) and float(value) > 0):
            raise ValueError(f"{name}[{option!r}] must be positive, got {value!r}. Fix: a length of time.")
    return options


def _checked_steps(steps: Any) -> int:
    try:
        is_count = not isinstance(steps, bool) and operator.index(steps) >= 1
    except TypeError:
        is_count = False
    if not is_count:
        raise ValueError(f"steps must be a positive integer, got {steps!r}. Fix: steps=8.")
    return operator.index(steps)


def checked_jumps(jump_times: Any) -> tuple[float, ...]:
    """Convert ``jump_times`` to sorted, distinct floats; raise ValueError if they are not K finite times, (K,)."""
    if jump_times is None or (isinstance(jump_times, tuple) and not jump_times):
        return ()
    refuse_gradient(jump_times, "jump_times")
    try:
        given = jump_times.to_numpy(copy=True) if hasattr(jump_times, "to_numpy") else jump_times
        times = torch.as_tensor(given, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        times = torch.empty((), dtype=torch.float64)
    if times.dim() != 1 or not bool(torch.isfinite(times).all()):
        raise ValueError(f"jump_times must be finite times (K,), got {jump_times!r}. Fix: jump_times=[0.5].")
    return tuple(sorted(set(times.tolist())))
