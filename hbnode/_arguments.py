"""The checks of what :func:`hbnode.odeint` is given: its state, its times and how to solve."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from hbnode import _second_derivatives
from hbnode._checks import as_count, conversion
from hbnode._state import State, Times, apply, parts
from hbnode._structure import parameters_of
from hbnode._suggestions import nearest, nearest_method
from hbnode._tracing import is_tracing
from hbnode.solvers import registry, torchdiffeq_options
from hbnode.solvers.settings import ResolvedSettings, Settings

logger = logging.getLogger("hbnode")

_MOST_SETTINGS = 64
SAVES = ("interpolate", "exact")


_checked: dict[tuple, Settings] = {}  # the last settings that were checked


def checked_settings(settings: Settings) -> Settings:
    """The settings, refused where a value is out of its range or two of them do not go together."""
    if is_tracing():
        return _check_settings(settings)
    try:
        checked = _checked.get(settings.key)
    except TypeError:  # something in them has no hash
        return _check_settings(settings)
    if checked is None:
        if len(_checked) >= _MOST_SETTINGS:
            _checked.clear()
        both = (settings.options, settings.adjoint_options)
        options, of_adjoint = (dict(x) if isinstance(x, dict) else x for x in both)
        own = dataclasses.replace(settings, options=options, adjoint_options=of_adjoint)  # theirs may change
        checked = _checked[settings.key] = _check_settings(own)
    return checked


def _check_settings(settings: Settings) -> Settings:
    method = settings.method
    methods = (*registry.METHODS, *torchdiffeq_options.METHODS)
    if method is not None and method not in methods:
        raise ValueError(
            f"unknown method {method!r}; expected one of {methods}. Fix: {nearest_method(method, methods)}."
        )
    theirs = method in torchdiffeq_options.METHODS
    gradients = torchdiffeq_options.GRADIENTS if theirs else registry.GRADIENTS
    gradient = ("direct" if theirs else "checkpoint") if settings.gradient is None else settings.gradient
    if gradient not in gradients:
        raise ValueError(
            f"unknown gradient {gradient!r} for method={method!r}; expected one of {gradients}. "
            f"Fix: gradient={nearest(gradient, gradients) or gradients[0]!r}."
        )
    settings = _check_steps(settings)
    if theirs and settings.per_sample:
        raise ValueError(
            f"per_sample=True is not possible with method={method!r}, which has one step size for the whole batch. "
            "Fix: per_sample=False, or a native method."
        )
    for name in ("rtol", "atol"):
        value = getattr(settings, name)
        if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}. Fix: {name}=1e-5 is the default.")
    settings = dataclasses.replace(settings, max_steps=as_count(settings.max_steps, "max_steps"))
    if theirs:
        torchdiffeq_options.check(settings)
    else:
        registry.check(settings)
    if theirs and settings.compile:
        raise ValueError(
            f"compile=True is for native methods, got method={method!r}. "
            "Fix: leave method out, or compile the network, torch.compile(func)."
        )
    return settings


def _check_steps(settings: Settings) -> Settings:
    """Where steps end: refused where it is out of its range."""
    if settings.steps is not None:
        try:
            steps = operator.index(settings.steps)
        except TypeError:
            steps = 0
        if steps < 1 or isinstance(settings.steps, bool):
            raise ValueError(f"steps must be a positive integer, got {settings.steps!r}. Fix: steps=8.")
        settings = dataclasses.replace(settings, steps=steps)
    if not isinstance(settings.per_sample, bool):
        raise ValueError(f"per_sample must be True or False, got {settings.per_sample!r}. Fix: per_sample=True.")
    if settings.save not in SAVES:
        fix = f"save={near!r}" if (near := nearest(settings.save, SAVES)) else "leave it out"
        raise ValueError(f"save must be one of {SAVES}, got {settings.save!r}. Fix: {fix}.")
    if settings.jump_times is not None and settings.steps is not None:
        raise ValueError(
            f"jump_times are for adaptive steps, got steps={settings.steps}. Fix: leave steps out, or the jumps among "
            "the output times."
        )
    return settings


def checked_jump_times(jump_times: Times | None) -> tuple[float, ...] | None:
    """The times at which f jumps, in increasing order; None without any."""
    if jump_times is None:
        return None
    try:
        times = torch.as_tensor(jump_times, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        times = torch.empty((), dtype=torch.float64)
    if times.dim() != 1 or not bool(torch.isfinite(times).all()):
        raise ValueError(f"jump_times must be finite times (K,), got {jump_times!r}. Fix: jump_times=[0.5].")
    return tuple(sorted(set(times.tolist()))) or None


def resolved(settings: Settings, field: Callable, event: bool = False, span: float = 0.0) -> ResolvedSettings:
    """The settings with method and gradient filled in for a field and the length of a solve."""
    method = settings.method
    if method is None:
        method = "dopri5" if event else registry.best_method(field, settings, span)
    gradient = "direct" if _second_derivatives.are_wanted() else settings.gradient
    if gradient is None:
        gradient = "direct" if method in torchdiffeq_options.METHODS else "checkpoint"
    values = {part.name: getattr(settings, part.name) for part in dataclasses.fields(Settings)}
    return ResolvedSettings(**(values | {"method": method, "gradient": gradient}))


def checked_span(t_span: Sequence[float]) -> tuple[float, float]:
    """Two different times, of a block or a flow."""
    if not isinstance(t_span, Sequence) or any(isinstance(t, Tensor) for t in t_span):
        raise TypeError(
            f"t_span must be two numbers (t0, T), got {t_span!r}. Fix: (0.0, 1.0); learned times go to block(x, t)."
        )
    span = tuple(float(t) for t in t_span)
    if len(span) != 2 or span[0] == span[1] or not all(map(math.isfinite, span)):
        raise ValueError(f"t_span must be two different times (t0, T), got {span}. Fix: (0.0, 1.0).")
    return span


def check_precision(settings: Settings, dtype: torch.dtype) -> None:
    """Refuse a tolerance that is not within what the dtype can carry, if the method goes by it."""
    if settings.method in torchdiffeq_options.FIXED or settings.steps is not None:
        return
    rtol, eps = settings.rtol, torch.finfo(dtype).eps
    if rtol < eps / 100:
        raise ValueError(
            f"rtol={rtol:g} is far below what {dtype} carries (eps={eps:.2g}); expected at least {eps / 100:.2g}. "
            "Fix: solve in float64, or loosen rtol."
        )
    if rtol < eps:
        _log_tight_tolerance(rtol, dtype)


@functools.cache
def _log_tight_tolerance(rtol: float, dtype: torch.dtype) -> None:
    """Cached, so that each tolerance is mentioned once."""
    logger.warning("rtol=%g is below the rounding of %s: steps may be refused for rounding errors alone", rtol, dtype)


def checked_state(field: Callable, y0: State) -> State:
    """The state, floating point and of the field's dtype; under autocast at least float32."""
    if not callable(field):
        raise TypeError(
            f"field must be callable as field(t, state), got {type(field).__name__}. Fix: hbnode.NODE(func)"
        )
    tensors = parts(y0)
    if not isinstance(tensors, tuple) or not tensors or not all(isinstance(part, Tensor) for part in tensors):
        raise TypeError(
            f"the state must be a tensor or a tuple of tensors, got {_kinds(y0)}. Fix: {_made_state(y0, field)}."
        )
    dtype = tensors[0].dtype
    if not all(part.is_floating_point() and part.dtype == dtype for part in tensors):
        raise TypeError(
            f"the state must be floating point and of one dtype, got {', '.join(str(part.dtype) for part in tensors)}. "
            f"Fix: {'torch.view_as_real(x)' if dtype.is_complex else 'x.float() or x.double(), of each part'}."
        )
    if torch.is_autocast_enabled(tensors[0].device.type):  # the networks may run in half precision, the state may not
        return apply(lambda part: part.float() if part.element_size() < 4 else part, y0)
    if isinstance(field, nn.Module):
        dtypes = []
        for p in parameters_of(field):
            dtypes += [p.dtype] if p.is_floating_point() else []
            if dtype in dtypes:
                return y0
        if dtypes:
            kinds = ", ".join(map(str, set(dtypes)))
            raise TypeError(
                f"the state is {dtype}, the field's parameters are {kinds}; expected one dtype. "
                "Fix: convert the input (x.float(), x.double()) or the field (field.float(), field.double())."
            )
    return y0


def _kinds(y0: object) -> str:
    """The types of a state, for messages."""
    if isinstance(y0, (list, tuple)):
        return f"{type(y0).__name__} of ({', '.join(type(part).__name__ for part in y0)})"
    return type(y0).__name__


def _made_state(y0: object, field: Callable) -> str:
    """How to make a state of what is none, for messages."""
    if isinstance(y0, list) and y0 and all(isinstance(part, Tensor) for part in y0):
        return "tuple(y0)"
    if isinstance(y0, tuple):
        return f"make each part a tensor, x -> {conversion(next((x for x in y0 if not isinstance(x, Tensor)), None))}"
    made = conversion(y0).replace("(x", "(y0")
    return f"field.initial_state({made})" if hasattr(field, "initial_state") else made


def checked_times(t: Times, device: torch.device, *, rows: bool) -> Tensor:
    """Finite, ordered times as a tensor: (T,), or (batch, T) if each sample may have a row of its own.

    Native methods (``rows``) have them on the host, which plans the steps; torchdiffeq's on the device of the state.
    """
    if not isinstance(t, Tensor):
        if not isinstance(t, Iterable) or isinstance(t, (str, bytes, dict)):
            fix = f"[0.0, {t}]" if isinstance(t, numbers.Real) else "a tensor or a list of numbers"
            raise TypeError(f"t must be times, a tensor or a sequence, got {type(t).__name__}. Fix: {fix}.")
        given = list(t)
        if any(isinstance(time, Tensor) for time in given):  # keep the gradients of learned times
            times = [torch.as_tensor(time, dtype=torch.float64, device=device) for time in given]
            if any(time.numel() != 1 for time in times):
                raise ValueError("t is a sequence of tensors that are no single times. Fix: torch.stack or cat them.")
            t = torch.stack([time.reshape(()) for time in times])
        else:
            t = torch.as_tensor(given, dtype=torch.float64)
    elif not t.is_floating_point():
        t = t.to(torch.float64)
    if t.dim() != 1 and not (rows and t.dim() == 2):
        raise ValueError(
            f"t must be one-dimensional, got shape {tuple(t.shape)}. "
            "Fix: (T,); native methods also take (batch, T), a row of times for each sample."
        )
    if t.shape[-1] == 0:
        raise ValueError(f"t must hold at least one time, got shape {tuple(t.shape)}. Fix: [0.0, 1.0].")
    on_host = t.cpu()
    values = on_host.detach()
    if not bool(torch.isfinite(values).all()):
        where = torch.nonzero(~torch.isfinite(values))[0].tolist()
        raise ValueError(
            f"t must be finite, but t{where} is {float(values[tuple(where)])}. Fix: drop infinite times and NaNs."
        )
    _check_order(values)
    return on_host if rows else t.to(device)


def _check_order(t: Tensor) -> None:
    """Shared times must be strictly monotone; of a sample's own, some may be repeated: it stays where it is."""
    steps = t.diff()
    if t.dim() == 2:
        up, down = (steps >= 0).all(), (steps <= 0).all()
        if not bool(up | down):
            raise ValueError(
                "t of shape (batch, T) must increase along each row, or decrease along each. Fix: sort the times."
            )
        return
    if not bool((steps > 0).all() | (steps < 0).all()):
        sign = -1.0 if bool(steps[0] < 0) else 1.0
        where = int(torch.nonzero(torch.sign(steps) != sign)[0])
        raise ValueError(
            f"t must be strictly increasing or strictly decreasing, but t[{where}]={float(t[where]):g} is followed by "
            f"t[{where + 1}]={float(t[where + 1]):g}. Fix: sort the times and drop repeated ones."
        )
