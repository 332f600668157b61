"""torchdiffeq's methods: its solvers and its adjoint, with evaluations counted and failures named.

The state's error norm is the RMS over all its parts together, so a tuple ``(h, m)`` is solved step for step as
torchdiffeq solves the stacked tensor ``[h, m]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hbnode._recompute import solving
from hbnode._state import State, apply, parts
from hbnode._torchdiffeq_field import AdaptiveField, FixedField, WatchedField
from hbnode.errors import MaxStepsError, SolverError
from hbnode.nfe import NFE, Tally
from hbnode.solvers.settings import ResolvedSettings
from hbnode.solvers.step_size_control import rms
from hbnode.solvers.torchdiffeq_options import (
    ADAPTIVE,
    FIXED,
    SCIPY,
    adjoint_solver_options,
    all_options,
    check_event,
)


def solve(
    field: Callable[[Tensor, State], State],
    y0: State,
    t: Tensor,
    settings: ResolvedSettings,
    nfe: NFE,
) -> State:
    """Solve with one of torchdiffeq's methods; the arguments are those of :func:`hbnode.odeint`, already checked."""
    watched, solution = _solved(field, y0, t, settings, nfe, None)
    watched.check_solution(solution, t)
    return solution


def find_event(
    field: Callable[[Tensor, State], State],
    y0: State,
    t: Tensor,
    settings: ResolvedSettings,
    nfe: NFE,
    event_fn: Callable[[Tensor, State], Tensor],
) -> tuple[Tensor, State]:
    """:func:`solve` until an event: its time, and the states at the start and there."""
    watched, (time, states) = _solved(field, y0, t, settings, nfe, event_fn)
    watched.check_solution(states, t)
    return time.detach(), states  # the gradient of the event's time is odeint_event's business


def _solved(
    field: Callable[[Tensor, State], State],
    y0: State,
    t: Tensor,
    settings: ResolvedSettings,
    nfe: NFE,
    event_fn: Callable[[Tensor, State], Tensor] | None,
) -> tuple[WatchedField, Any]:
    """What torchdiffeq answers, and the field that it called; its failures are named."""
    method, adjoint = settings.method, settings.gradient == "adjoint"
    own = all_options(settings, t)
    if event_fn is not None:
        check_event(method, own)
    kind = AdaptiveField if method in ADAPTIVE else FixedField if method in FIXED else WatchedField
    watched = kind(
        field,
        y0,
        t,
        Tally(field, nfe),
        method=method,
        max_steps=settings.max_steps,
        adjoint=adjoint,
        reports_steps=method in ADAPTIVE or (method in FIXED and event_fn is None),
    )
    common: dict[str, Any] = {"rtol": settings.rtol, "atol": settings.atol, "method": method}
    common["options"] = {"norm": _norm(field)} | own
    if event_fn is not None:
        common["event_fn"] = lambda t, y: _event_value(event_fn(t, y))
    try:
        with solving(field):
            return watched, _solution(watched, y0, t, common, own, settings)
    except AssertionError as error:
        if not _raised_by_torchdiffeq(error):
            raise
        raise watched.failure(SolverError, f"torchdiffeq's {method} gave up: {error}") from error
    except RuntimeError as error:
        if "Reached maximum number of iterations" not in str(error):
            raise
        raise watched.failure(MaxStepsError, f"no event was found by {method}: {error}") from error


def _solution(
    watched: WatchedField,
    y0: State,
    t: Tensor,
    common: dict[str, Any],
    own: dict[str, Any],
    settings: ResolvedSettings,
) -> Any:
    """What torchdiffeq, which has no types, answers with the gradient that was asked for."""
    import torchdiffeq  # here, because it imports scipy

    if settings.gradient == "adjoint":
        solution = torchdiffeq.odeint_adjoint(
            watched,
            y0,
            t,
            **common,
            adjoint_options=adjoint_solver_options(own, settings.adjoint_options, settings.method),
            adjoint_params=watched.adjoint_parameters(_first_time(t, watched.dtype, own), y0),
        )
        if "event_fn" in common:
            return solution
        return apply(torch.clone, solution)  # the backward pass needs its own, and the caller may change his in place
    if settings.method in SCIPY:
        _refuse_direct(watched, y0, t)
    return torchdiffeq.odeint(watched, y0, t, **common)


def _first_time(t: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    """Where the solver first evaluates the field: ``perturb`` keeps away from the start itself."""
    start, end = t[0].detach().to(dtype), t[-1].detach().to(dtype)
    return torch.nextafter(start, end) if options.get("perturb") else start


def _event_value(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"event_fn must return a tensor, got {type(value).__name__}. Fix: compute it from the state.")
    return value


def _refuse_direct(watched: WatchedField, y0: State, t: Tensor) -> None:
    """Refuse to leave torch for scipy if a gradient would be lost, that of a closure included."""
    if torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in (t, *parts(y0)))
        or watched.adjoint_parameters(_first_time(t, watched.dtype, {}), y0)
    ):
        raise ValueError(
            "method='scipy_solver' leaves torch, so it has no direct gradient; expected gradient='adjoint'. "
            "Fix: pass gradient='adjoint', or solve under torch.no_grad()."
        )


def _norm(field: Callable[..., Any]) -> Callable[[State], Tensor]:
    """The error norm: RMS over all elements; where rows end with an integral, the larger of its RMS and the others'."""
    apart = getattr(field, "apart", 0)
    if not apart:
        return _rms

    def larger(rows: State) -> Tensor:
        (one,) = parts(rows)
        return torch.maximum(rms(one[:, :-apart]), rms(one[:, -apart:]))

    return larger


def _rms(state: State) -> Tensor:
    """RMS over all elements of all parts, as if they were stacked in one tensor; 0 for an empty batch."""
    flat = state if isinstance(state, Tensor) else torch.cat([part.reshape(-1) for part in state])
    return flat.pow(2).mean().sqrt() if flat.numel() else flat.sum()


def _raised_by_torchdiffeq(error: BaseException) -> bool:
    """Whether the innermost frame of an error is torchdiffeq's, rather than the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("torchdiffeq.")
