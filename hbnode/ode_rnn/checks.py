"""Checks of an ODE-RNN's arguments, and how it is printed."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._arguments import checked_settings, resolved
from hbnode._checks import ArrayLike, check_input
from hbnode._times import as_times
from hbnode.fields import Field
from hbnode.ode_rnn.core import Core, Solver
from hbnode.ode_rnn.state import ODERNNState, check_kind
from hbnode.solvers.registry import METHODS
from hbnode.solvers.settings import Settings
from hbnode.solvers.torchdiffeq_options import METHODS as THEIRS


def check_layers(num_layers: int, bidirectional: bool, dropout: float, core: dict[str, Any]) -> float:
    """Refuse modules that several networks would share; return the dropout."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout!r}. Fix: the share of outputs to be dropped.")
    if dropout and num_layers == 1:
        raise ValueError("dropout is applied between layers, and there is one. Fix: num_layers=2, or nn.Dropout.")
    fixes = {"field": "field=lambda n: hbnode.HBNODE(net(n))", "cell": "cell=lambda inputs, size: Cell(inputs, size)"}
    for name, fix in fixes.items():
        if isinstance(core[name], nn.Module) and (num_layers > 1 or bidirectional):
            raise ValueError(
                f"{name} is one module, and there are {num_layers * (1 + bidirectional)} networks; expected a function "
                f"that makes one for each. Fix: {fix}."
            )
    if bidirectional and isinstance(core["initial_state"], nn.Module):
        raise ValueError(
            "initial_state is one module, and there are two directions; expected 'learned' or 'zeros'. Fix: 'learned'."
        )
    return float(dropout)


def checked_solver(settings: Settings, field: Field) -> Solver:
    """How to solve; refuse what no times of each sample's own can be solved with."""
    options = dict(settings.options or {})
    step_size = None
    if "step_size" in options and settings.method not in THEIRS:
        step_size = options.pop("step_size")
        if not isinstance(step_size, numbers.Real) or not 0 < float(step_size) < math.inf:
            raise ValueError(f"step_size must be a positive number, got {step_size!r}. Fix: a tenth of a time_unit.")
        if settings.steps is not None:
            raise ValueError("steps and options={'step_size': h} were both given. Fix: leave steps out.")
        settings = dataclasses.replace(settings, options=options or None, steps=1)
        step_size = float(step_size)
    settings = checked_settings(settings)
    known = resolved(settings, field)
    if known.method in METHODS and known.gradient == "adjoint":
        raise ValueError(
            "gradient='adjoint' of native methods does not know times of each sample's own. Fix: leave gradient "
            "out, or method='dopri5' with per_sample=False."
        )
    return Solver(settings, step_size)


def check_dtype(rnn: nn.Module, x: Tensor) -> None:
    """Refuse samples of another dtype than the parameters."""
    dtypes = {p.dtype for p in rnn.parameters() if p.is_floating_point()}
    if dtypes and x.dtype not in dtypes and not torch.is_autocast_enabled(x.device.type):
        kinds = ", ".join(map(str, dtypes))
        raise TypeError(
            f"x is {x.dtype}, the parameters are {kinds}; expected one dtype. "
            f"Fix: x.to({kinds.split(', ')[0]}), or .to({x.dtype}) of the module."
        )


def checked_static(static: Tensor | None, size: int, x: Tensor) -> Tensor | None:
    """The static features, in the dtype and on the device of the samples."""
    if static is None and size == 0:
        return None
    if static is not None:
        check_input(static, "static")
    shape = None if static is None else tuple(static.shape)
    if static is None or shape != (len(x), size):
        raise ValueError(
            f"static must be (batch, static_size) = ({len(x)}, {size}), got {shape}. "
            + ("Fix: ODERNN(..., static_size=)." if size == 0 else "Fix: a row of features for each series.")
        )
    if not bool(torch.isfinite(static).all()):
        raise ValueError("static is not finite. Fix: standardise, then static.nan_to_num(): missing ones are the mean.")
    return static.to(x)


def check_layers_of(state: ODERNNState, num_layers: int, bidirectional: bool) -> None:
    """Refuse a state from which a module of so many layers cannot go on."""
    if bidirectional:
        raise ValueError("a bidirectional ODERNN reads whole series. Fix: leave the state out, or bidirectional=False.")
    check_kind(state)
    layers, below = 1, state.below
    while below is not None:
        layers, below = layers + 1, below.below
    if layers != num_layers:
        raise ValueError(
            f"the state has {layers} layers, the module {num_layers}. Fix: the state that forward returned, which has "
            "the layers below; those before and after each sample do not."
        )


def check_time_of(state: ODERNNState, t: Tensor) -> None:
    """Refuse a state later than the first of the times (batch, T)."""
    first = t[:, 0].detach()
    if bool((state.t.detach().to(first.dtype) > first).any()):
        raise ValueError(
            "the state's time lies after the first of t; expected the series to go on from it. "
            "Fix: times of the whole series, not of its part."
        )


def check_state(state: ODERNNState, shape: torch.Size, core: Core) -> None:
    """Refuse a state of other shapes."""
    h, m, t = state.h, state.m, state.t
    if (m is not None) != core.second_order or any(
        part.shape != (*shape, core.hidden_size) for part in (h, m) if part is not None
    ):
        wanted = "h and m" if core.second_order else "h, and None for m,"
        raise ValueError(
            f"the state must have {wanted} of shape {(*shape, core.hidden_size)}, got h {tuple(h.shape)} and m "
            f"{None if m is None else tuple(m.shape)}. Fix: a state that this module returned for such a batch."
        )
    if t.shape != shape:
        raise ValueError(f"the state's t must have shape {tuple(shape)}, got {tuple(t.shape)}. Fix: one time each.")


def checked_dt(dt: ArrayLike, shape: torch.Size) -> Tensor:
    """How long to forecast, (K,) or (..., K), for states of a shape."""
    times = torch.tensor(dt, dtype=torch.float64) if isinstance(dt, numbers.Real) else as_times(dt, "dt")
    if times.dim() == 0 or times.shape[-1] == 0 or (times.dim() > 1 and times.shape[:-1] != shape):
        raise ValueError(
            f"dt must be (K,) or (*batch, K) with batch {tuple(shape)}, got {tuple(times.shape)}. Fix: [0.5, 1.0]."
        )
    if not bool((times[..., :1] >= 0).all() & (times.diff() >= 0).all()):
        raise ValueError("dt must increase and not be negative: it is time after that of the state. Fix: sort it.")
    return times
