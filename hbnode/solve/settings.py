"""The solver arguments of :func:`hbnode.odeint` and their checks."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
from collections.abc import Sequence
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

ARGUMENTS = {  # names given as options, and the argument of odeint that replaces each
    "max_num_steps": "max_steps=n, an argument of its own",
    "steps": "steps=n, an argument of its own",
    "dense": "save='interpolate' or save='exact', an argument of its own",
    "land": "save='exact', an argument of its own",
    "jump_t": "jump_times=[...], an argument of its own",
}
_NATIVE_OPTIONS = ("first_step", "max_step", "min_step", "max_nfe")


@dataclass(frozen=True)
class Settings:
    """The solver arguments of :func:`hbnode.odeint`, and ``common_steps``, which only :class:`hbnode.ODERNN` sets."""

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
    common_steps: bool = False  # samples with their own times take the same fraction of their spans in each step
    options: dict[str, Any] | None = None
    adjoint_options: dict[str, Any] | None = None

    @property
    def is_native(self) -> bool:
        """Whether hbnode implements the method."""
        return self.method not in TORCHDIFFEQ_METHODS

    def checked(self) -> Settings:
        """Return the settings with normalized types; raise if a value is out of range or two values conflict."""
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
            raise ValueError(
                f"per_sample=True is not possible with method={self.method!r}, which has one step size for the whole "
                "batch. Fix: per_sample=False, or a native method."
            )
        elif self.compile:
            raise ValueError(
                f"compile=True is for native methods, got method={self.method!r}. "
                "Fix: leave method out, or compile the network, torch.compile(func)."
            )
        rtol, atol = float(self.rtol), float(self.atol)
        return dataclasses.replace(self, rtol=rtol, atol=atol, steps=steps, max_steps=max_steps, jump_times=jumps)

    def _check_names(self, is_torchdiffeq: bool) -> None:
        """Raise ValueError if a method, a gradient mode or a way to save is unknown."""
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
        """Raise TypeError or ValueError for options, steps or a gradient that the native method does not support."""
        method, gradient, options = self.method, self.gradient, self.options
        if method is None:
            method = "blanes_moan4" if gradient == "reversible" else "tsit5"
        known = METHODS[method]
        _check_options(options, method)
        if known.needs_fixed_steps and self.steps is None:
            raise ValueError(f"method={method!r} needs fixed steps. Fix: steps=n, n steps per output interval.")
        if gradient == "reversible" and not known.is_reversible:
            reversible = tuple(name for name, other in METHODS.items() if other.is_reversible)
            raise ValueError(
                f"gradient='reversible' needs a reversible method, one of {reversible}, got "
                f"method={method!r}. Fix: gradient='checkpoint', or method='leapfrog' with steps=n."
            )
        if gradient == "adjoint" and gradient not in known.gradients:
            raise ValueError(
                f"gradient='adjoint' does not support method={method!r}: components that decay fast forwards grow as "
                "fast backwards. Fix: gradient='checkpoint', which is exact."
            )
        if self.adjoint_options is not None:
            raise ValueError(
                "adjoint_options are for torchdiffeq's methods; the native ones solve their adjoint with 'tsit5' at "
                "the tolerances of the forward solve. Fix: leave them out, or method='dopri5' with gradient='adjoint'."
            )


def _check_options(options: Any, method: str) -> None:
    """Raise TypeError or ValueError for options that a native method does not have."""
    if options is not None and not isinstance(options, dict):
        fix = "steps=8 for fixed steps, else options={'max_nfe': 1000}"
        raise TypeError(f"options must be a dict, got {type(options).__name__}. Fix: {fix}.")
    known = ("max_nfe",) if METHODS[method].needs_fixed_steps else _NATIVE_OPTIONS
    unknown = [name for name in options or {} if name not in known]
    if unknown:
        raise ValueError(
            f"options has {unknown}, which method={method!r} does not support; expected some of {known}. "
            f"Fix: {_replacement(unknown[0], method, known)}."
        )
    for name, value in (options or {}).items():
        if name == "max_nfe":
            as_count(value, "options['max_nfe']")
        elif not isinstance(value, numbers.Real) or not float(value) > 0:
            raise ValueError(f"options[{name!r}] must be positive, got {value!r}. Fix: a length of time.")


def _checked_steps(steps: Any) -> int:
    try:
        is_count = not isinstance(steps, bool) and operator.index(steps) >= 1
    except TypeError:
        is_count = False
    if not is_count:
        raise ValueError(f"steps must be a positive integer, got {steps!r}. Fix: steps=8.")
    return operator.index(steps)


def checked_jumps(jump_times: Any) -> tuple[float, ...]:
    """Return ``jump_times`` as sorted distinct floats; raise ValueError if they are not finite times (K,)."""
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


_TORCHDIFFEQ_OPTIONS = ("norm", "step_t", "dtype", "safety", "ifactor", "dfactor")


def _replacement(option: str, method: str, known: Sequence[str]) -> str:
    if option in ARGUMENTS:
        return ARGUMENTS[option]
    if option in ("step_size", "grid_constructor"):
        return "steps=n, an argument of its own: n steps per output interval"
    if option in _NATIVE_OPTIONS:
        return f"leave it out, {method!r} takes fixed steps"
    if option in _TORCHDIFFEQ_OPTIONS:
        return "method='dopri5', which has torchdiffeq's options"
    near = difflib.get_close_matches(option, known, 1)
    return f"options={{{near[0]!r}: ...}}" if near else "leave it out"
