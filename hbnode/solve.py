"""One entry to every solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from hbnode import _native_solve, _torch_internals, _torchdiffeq_solve, _traced_solve
from hbnode._arguments import (
    check_precision,
    checked_jump_times,
    checked_settings,
    checked_state,
    checked_times,
    resolved,
)
from hbnode._checks import ONLY_FIXED_GRIDS
from hbnode._prepared import prepared
from hbnode._signature import check_call
from hbnode._state import State, Times, last_of, parts
from hbnode._torchdiffeq_field import CALLBACKS, warn_of_callbacks
from hbnode._tracing import is_tracing, untraced
from hbnode.nfe import NFE
from hbnode.solvers import torchdiffeq_options
from hbnode.solvers.names import Gradient, Method, Save, TorchdiffeqMethod
from hbnode.solvers.settings import Settings

StateT = TypeVar("StateT", bound=State)


# A tensor gives a tensor, a pair of tensors a pair; with an event, its time and the state there.
@overload
def odeint(
    field: Callable[[Tensor, StateT], State],
    y0: StateT,
    t: Times,
    *,
    method: Method | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    gradient: Gradient | None = None,
    steps: int | None = None,
    per_sample: bool = False,
    save: Save = "interpolate",
    jump_times: Times | None = None,
    event_fn: None = None,
    max_steps: int = 10_000,
    options: dict[str, Any] | None = None,
    adjoint_options: dict[str, Any] | None = None,
    compile: bool = False,
) -> StateT: ...


@overload
def odeint(
    field: Callable[[Tensor, StateT], State],
    y0: StateT,
    t: Times,
    *,
    method: TorchdiffeqMethod | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    gradient: Literal["direct", "adjoint"] | None = None,
    steps: int | None = None,
    per_sample: Literal[False] = False,
    save: Save = "interpolate",
    jump_times: Times | None = None,
    event_fn: Callable[[Tensor, StateT], Tensor],
    max_steps: int = 10_000,
    options: dict[str, Any] | None = None,
    adjoint_options: dict[str, Any] | None = None,
    compile: Literal[False] = False,
) -> tuple[Tensor, StateT]: ...


def odeint(
    field: Callable[[Tensor, Any], State],
    y0: State,
    t: Times,
    *,
    method: Method | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    gradient: Gradient | None = None,
    steps: int | None = None,
    per_sample: bool = False,
    save: Save = "interpolate",
    jump_times: Times | None = None,
    event_fn: Callable[[Tensor, Any], Tensor] | None = None,
    max_steps: int = 10_000,
    options: dict[str, Any] | None = None,
    adjoint_options: dict[str, Any] | None = None,
    compile: bool = False,
) -> State | tuple[Tensor, State]:
    r"""Solve :math:`y' = \mathrm{field}(t, y),\; y(t_0) = y_0` and return y at the times ``t``.

    An adaptive method accepts a step when the root mean square of (error / (atol + rtol * max \|y\|)), over all
    elements of the batch and of all parts of the state together, is at most 1. Adaptive steps pass output times; the
    outputs inside of a step are interpolated within the tolerance, at no further evaluations.

    References:
        ``hbnode/solvers/tableaus.py`` cites the paper of each native method; :doc:`solvers` explains the idea. Chen,
        torchdiffeq (github.com/rtqichen/torchdiffeq), for its methods; Chen et al., arXiv:1806.07366, for the adjoint;
        Kidger, Chen and Lyons, "Hey, that's not an ODE", arXiv:2009.09457, for its seminorm; Gholami, Keutzer and
        Biros, arXiv:1902.10298, and Zhuang et al., arXiv:2006.02493, for gradients from checkpoints.

    Arguments:
        field: the right-hand side, called ``(t, state)``: one of hbnode's fields, any module, or a function. It returns
            d state/dt in the structure of the state. t is a scalar tensor, or (batch, 1, ...) where samples have times
            of their own.
        y0: state at ``t[0]``: a floating-point tensor (batch, ...), or a tuple of them.
        t: times (T,), strictly increasing or strictly decreasing. Native methods also take (batch, T), a row of times
            for each sample, in which times may repeat. If t requires a gradient it gets one: that of the map in which
            each step ends at a constant fraction of its output interval. (torchdiffeq's adaptive methods with
            ``"direct"`` differentiate their interpolation instead, which is much less exact than their values.)
        method: name of the solver; :func:`hbnode.methods` lists them with their orders. Default: None, which picks a
            native method: for an HBNODE ``"nystrom4"`` if rtol >= 1e-3, else ``"nystrom8"``, or ``"exponential"`` if
            its damping is constant and exceeds 50 over the length of the solve; for all others ``"tsit5"``, also for an
            HBNODE that has hooks or a ``forward`` or ``__call__`` of its own. On a grid (``steps``) the damping is not
            looked at.
        rtol: relative tolerance of adaptive methods. Default: 1e-5.
        atol: absolute tolerance of adaptive methods, in the units of the state. Default: 1e-5.
        gradient: how gradients are computed. Default: None, ``"checkpoint"`` for native methods and ``"direct"`` for
            torchdiffeq's.

            - ``"checkpoint"`` stores one point for each accepted step and recomputes the step in the backward pass: the
              exact gradient of the numbers computed (discretise-then-optimise). The last step, and a whole solve of up
              to 16 evaluations, keep their graphs instead.
            - ``"direct"`` backpropagates through the solver's operations, and is the only mode for higher derivatives
              and torch.func.
            - ``"reversible"`` undoes the steps of the splitting methods, and stores the outputs only.
            - ``"adjoint"`` solves the adjoint ODE backwards, in memory that does not grow with the number of steps.
              A damping γ makes errors grow by e^{γT} on the way back. Native methods refuse what misses its start.
        steps: a fixed grid: the number of equal steps in each output interval, whatever the tolerances (native methods,
            and torchdiffeq's with fixed steps). Default: None, steps are adaptive. The splitting methods need it;
            torchdiffeq's methods with fixed steps take one step without it.
        per_sample: whether each sample has its own steps and its own acceptance, so that its answer does not depend on
            the rest of the batch (apart from the rounding of f); native methods. One call of f serves all samples
            either way. Default: False, one step size for the whole batch.
        save: ``"interpolate"``: adaptive steps pass output times, which are interpolated within the tolerance.
            ``"exact"``: a step ends on each. torchdiffeq's methods interpolate to order 4, which for dopri8 can be far
            worse than the tolerance. Default: ``"interpolate"``.
        jump_times: times (K,) at which f or its derivative jumps; adaptive steps end on them. A
            :class:`hbnode.Signal` in f gives its own to native methods. Default: None.
        event_fn: as in torchdiffeq, for its methods: the solve ends where ``event_fn(t, state)`` changes its sign.
            ``t`` then holds the start and a second time that gives the direction only. The result is ``(event_time,
            state)``. The time has no gradient; ``torchdiffeq.odeint_event(..., odeint_interface=hbnode.odeint)`` gives
            it one. Default: None.
        max_steps: number of accepted and rejected steps after which a forward or backward pass of an adaptive method is
            given up with an error; each further output interval adds one. It limits evaluations where a method does not
            report its steps (``"scipy_solver"``, and events on a fixed grid), and does not limit a fixed grid.
            Default: 10000.
        options: further options of the method. Native methods know ``first_step``, ``max_step`` and ``min_step``,
            lengths of time (set ``max_step`` where f has pulses narrower than a tenth of the time span), and
            ``max_nfe``, the most evaluations of a solve. torchdiffeq's methods know their own. Default: None.
        adjoint_options: torchdiffeq's options of the backward solve, added to those of the forward one. Default: None,
            which is ``{"norm": "seminorm"}``; ``{}`` is torchdiffeq's own default, as the papers used it.
        compile: compile the steps of a native method, and their gradients, with torch.compile. The first calls take
            tens of seconds. Needs one of hbnode's fields. If the network cannot be compiled, a warning says so and the
            solve runs without. Default: False.

    Returns:
        The states at the times, time first: (T, batch, ...), in the structure of ``y0``. With ``event_fn``, the pair
        ``(event_time, state)``.

    Raises:
        ValueError: an argument is out of its range, or the field returns another shape.
        TypeError: an argument has the wrong type or dtype.
        NonFiniteError: the state, the field or the adjoint became infinite or NaN.
        StepSizeUnderflowError: the tolerance cannot be met.
        MaxStepsError: more than ``max_steps`` steps, or (:class:`MaxNFEError`) more than ``max_nfe`` evaluations.
        ReversalError: rounding errors grew too much to undo the steps of ``"reversible"``. This and the three errors
            above are :class:`SolverError`: they carry the time, the step size and the evaluations so far.

    Example:
        >>> import math, torch, hbnode
        >>> spin = lambda t, y: (y[1], -y[0])
        >>> one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        >>> cos, _ = hbnode.odeint(spin, (one, zero), [0.0, 1.0, 2.0], rtol=1e-9, atol=1e-9)
        >>> torch.allclose(cos[:, 0], torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).cos())
        True
    """
    settings = checked_settings(
        Settings(
            method=method,
            rtol=rtol,
            atol=atol,
            gradient=gradient,
            steps=steps,
            per_sample=per_sample,
            save=save,
            jump_times=checked_jump_times(jump_times),
            max_steps=max_steps,
            options=options,
            adjoint_options=adjoint_options,
            compile=compile,
        )
    )
    if event_fn is None:
        return solve(field, y0, t, settings, NFE())
    if is_tracing():
        _refuse_tracing()
    return _find_event(field, y0, t, settings, NFE(), event_fn)


def solve(
    field: Callable[..., State], y0: State, t: Times, settings: Settings, nfe: NFE, *, end: bool = False
) -> State:
    """:func:`odeint` that fills in ``nfe``, now and in the backward pass; with ``end``, the last state alone."""
    if is_tracing():
        if _traced_solve.is_possible(settings):
            trajectory = _traced_solve.solve(field, checked_state(field, y0), t, settings, nfe)
            return last_of(trajectory) if end else trajectory
        _refuse_tracing()
    return _solve(field, y0, t, settings, nfe, end)


def _refuse_tracing() -> None:
    """Raise where a solve would have to be part of a graph; torch.compile can call it from outside of its graphs."""
    if not torch.compiler.is_dynamo_compiling():
        raise ValueError(ONLY_FIXED_GRIDS)


@untraced
def _solve(field: Callable[..., State], y0: State, t: Times, settings: Settings, nfe: NFE, end: bool) -> State:
    """:func:`solve` without a graph of torch.compile."""
    y0 = checked_state(field, y0)
    check_call(field)
    final, times, stepper = prepared(field, y0, t, settings)
    nfe.keeps_graph = final.gradient == "direct" and torch.is_grad_enabled()
    if stepper is None:
        with _torch_internals.refusing(f"method={final.method!r}", "a native method with gradient='direct'"):
            trajectory = _torchdiffeq_solve.solve(field, y0, times, final, nfe)
            return last_of(trajectory) if end else trajectory
    warn_of_callbacks(field, final.method, CALLBACKS)
    return _native_solve.solve(stepper, y0, nfe, end=end)


@untraced
def _find_event(
    field: Callable[..., State],
    y0: State,
    t: Times,
    settings: Settings,
    nfe: NFE,
    event_fn: Callable[..., Tensor],
) -> tuple[Tensor, State]:
    """The time of an event and the states at the start and there."""
    y0 = checked_state(field, y0)
    check_call(field)
    times = checked_times(t, parts(y0)[0].device, rows=False)
    final = resolved(settings, field, event=True)
    nfe.keeps_graph = final.gradient == "direct" and torch.is_grad_enabled()
    check_precision(final, parts(y0)[0].dtype)
    if final.method not in torchdiffeq_options.METHODS:
        raise ValueError(f"event_fn is for torchdiffeq's methods, got {final.method!r}. Fix: method='dopri5'.")
    if len(times) != 2:
        raise ValueError(
            f"with event_fn, t must hold two times (start and direction), got {len(times)}. Fix: [t0, t1]."
        )
    return _torchdiffeq_solve.find_event(field, y0, times, final, nfe, event_fn)
