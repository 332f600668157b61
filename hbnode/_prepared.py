"""A solve prepared once: what depends on the field's structure, the settings, the times, shapes, dtypes and devices.

That is the method, its checked options, the grid of times with the steps' coefficients and stage times where γ is
constant. It is kept with one of hbnode's fields, under a key of everything that it depends on:

- the settings and the values of the output times;
- shapes, dtypes and devices of the state, autocast and inference mode;
- what the field's equation depends on beside its networks: a constant γ, the activation, whether f takes the time,
  what its call does beside the equation (hooks, a forward of its own).

The list of modules that it is kept with is dropped when a module was replaced, and is not copied. A learned γ, the
parameters and buffers, modes and random numbers are looked at in each solve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hbnode import _second_derivatives, _torch_internals
from hbnode._arguments import check_precision, checked_times, resolved
from hbnode._native_solve import stepper_for
from hbnode._state import State, Times, apply, parts
from hbnode._structure import structure_of
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE
from hbnode.solvers import torchdiffeq_options
from hbnode.solvers.ode_term import change_of_call, is_compiled
from hbnode.solvers.settings import ResolvedSettings, Settings
from hbnode.solvers.stepper import Stepper

_FIELDS = (HBNODE, GHBNODE, NODE, ANODE, SONODE)  # themselves: others may depend on anything
_MOST_TIMES = 64  # output times whose values are compared


class Prepared(NamedTuple):
    """The settings with method and gradient, the times where the method wants them, and a native method's stepper."""

    settings: ResolvedSettings
    times: Tensor
    stepper: Stepper | None


def prepared(field: Callable, y0: State, t: Times, settings: Settings) -> Prepared:
    """What a solve of these settings needs, kept from the last one like it if there was one."""
    key = _key(field, y0, t, settings)
    if key is None:
        return _prepare(field, y0, t, settings)

    def make() -> Prepared:
        shapes = apply(lambda part: torch.empty((), dtype=part.dtype, device=part.device).expand(part.shape), y0)
        own = t.clone() if isinstance(t, Tensor) else t  # theirs may change
        made = _prepare(field, shapes, own, settings)
        return made if made.stepper is None else made._replace(stepper=made.stepper.of(None))

    kept: Prepared = structure_of(field).prepared(key, make)
    if kept.stepper is None:
        return kept._replace(times=kept.times.clone())  # f may change what it is given
    return kept._replace(stepper=kept.stepper.of(field))


def _prepare(field: Callable, y0: State, t: Times, settings: Settings) -> Prepared:
    times = checked_times(t, parts(y0)[0].device, rows=settings.method not in torchdiffeq_options.METHODS)
    final = resolved(settings, field, span=_span(times))
    check_precision(final, parts(y0)[0].dtype)
    native = final.method not in torchdiffeq_options.METHODS
    return Prepared(final, times, stepper_for(field, y0, times, final) if native else None)


def _key(field: Callable, y0: State, t: Times, settings: Settings) -> tuple | None:
    """Everything that a prepared solve depends on; None where it is not kept."""
    kind = type(field)
    if kind not in _FIELDS or is_compiled(field) or _torch_internals.is_active() or _torch_internals.in_forward_mode():
        return None
    times = _values(t)
    if times is None:
        return None
    of_field: tuple = ()
    inner: Any = field
    if kind in (HBNODE, GHBNODE):
        damping = inner._damping if inner.omega is None else None
        if isinstance(damping, Tensor):
            return None
        of_field = (damping, change_of_call(field), getattr(inner, "activation", None))
    device = parts(y0)[0].device.type
    try:
        settings_key = settings.key
        hash(of_field)
    except TypeError:
        return None
    return (
        settings_key,
        times,
        t.dtype if isinstance(t, Tensor) else None,
        isinstance(y0, Tensor),
        tuple([(part.shape, part.dtype, part.device) for part in parts(y0)]),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.is_inference_mode_enabled(),  # what is made there serves no gradients
        _second_derivatives.are_wanted(),
        inner.time_dependent,
        of_field,
    )


def _values(t: Times) -> tuple[float, ...] | None:
    """The output times as numbers, where they are few and without a gradient."""
    if isinstance(t, Tensor):
        if t.requires_grad or not t.is_cpu or t.dim() != 1 or len(t) > _MOST_TIMES or t.is_complex():
            return None
        return tuple(t.tolist())
    if not isinstance(t, (tuple, list)) or len(t) > _MOST_TIMES or not all(type(time) in (float, int) for time in t):
        return None
    return tuple(map(float, t))


def _span(t: Tensor) -> float:
    """The length of a solve; 0 where a device would have to be asked for it."""
    t = _torch_internals.plain(t)
    return float(t.max() - t.min()) if t.is_cpu and t.numel() else 0.0
