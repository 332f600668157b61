"""One entry to every solver, and the check of what it is given."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hbnode import _native_solve, _torch_internals, _torchdiffeq_solve, _traced_solve
from hbnode._checks import ONLY_FIXED_GRIDS, as_count, conversion
from hbnode._signature import check_call
from hbnode._state import State, apply, parts
from hbnode._tracing import is_tracing, untraced
from hbnode.nfe import NFE
from hbnode.solvers import registry
from hbnode.solvers.settings import Settings

logger = logging.getLogger("hbnode")


def odeint(
    field: Callable[[Tensor, State], State],
    y0: State,
    t: Tensor | Sequence[float],
    *,
    method: str | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    gradient: str | None = None,
    options: dict[str, Any] | None = None,
    adjoint_options: dict[str, Any] | None = None,
    step_control: str = "batch",
    event_fn: Callable[[Tensor, State], Tensor] | None = None,
    max_steps: int = 10_000,
    compile: bool = False,
) -> State | tuple[Tensor, State]:
    r"""Solve :math:`y' = \mathrm{field}(t, y),\; y(t_0) = y_0` and return y at the times ``t``.

    Where output times are further apart than the steps, the native methods step exactly onto them. Where a step would
    be longer than one and a half intervals between them, steps pass them, and the outputs inside of a step are
    interpolated, within the tolerance and without a further evaluation. A step is accepted when the root mean square,
    over all elements of the whole batch and of h and m together, of (error / (atol + rtol * max \|y\|)) is at most 1.

    References:
        The methods' papers stand with their coefficients, in ``hbnode/solvers/tableaus.py``; their idea in
        :doc:`solvers`. Chen, torchdiffeq (github.com/rtqichen/torchdiffeq), for the methods of its names; Chen et al.,
        arXiv:1806.07366, for the adjoint; Kidger, Chen and Lyons, "Hey, that's not an ODE", arXiv:2009.09457, for its
        seminorm; Gholami, Keutzer and Biros, arXiv:1902.10298, for checkpointing a solve.

    Arguments:
        field: called ``(t, state)`` with t a scalar tensor (or (batch, 1, ...), where samples have times of their
            own), returns d state/dt in the structure of the state. One of hbnode's fields, any module, or a function.
        y0: state at ``t[0]``: a floating tensor (batch, ...), or a tuple of them.
        t: times (T,), strictly increasing or decreasing, or for native methods (batch, T), a row for each sample, in
            which times may repeat. A tensor that requires a gradient gets it: that of the map in which each step ends
            at a constant fraction of the output interval that it ends in. (Of torchdiffeq's methods, adaptive ones with
            ``"direct"`` give that of their interpolation, a good deal less exact than their values.)
        method: None picks a native method: for HBNODE ``"nystrom4"`` if rtol >= 1e-3, else ``"nystrom8"``; for
            all others ``"tsit5"``, and for an HBNODE with a constant damping above 1000 over the length of the solve,
            or with hooks or a forward or ``__call__`` that was changed.
            Native on a fixed grid, for HBNODE and GHBNODE, and exactly reversible: ``"leapfrog"`` (order 2),
            ``"blanes_moan4"``. Of torchdiffeq: ``"dopri5"``, ``"dopri8"``, ``"bosh3"``, ``"fehlberg2"``,
            ``"adaptive_heun"``; on a fixed grid ``"euler"``, ``"midpoint"``, ``"heun2"``, ``"heun3"``, ``"rk4"``,
            ``"explicit_adams"``, ``"implicit_adams"``, ``"fixed_adams"``; or ``"scipy_solver"``.
        rtol: relative tolerance, of adaptive methods.
        atol: absolute tolerance, in the units of the state.
        gradient: ``"checkpoint"`` (None, for native methods) takes its steps again in the backward pass: the exact
            gradient of the numbers computed, from one stored point for each step. (The last step, and all of a solve
            of up to 16 evaluations, keep their graphs instead.) ``"direct"`` (None, for
            torchdiffeq's) backpropagates through the solver's operations; the only one for higher derivatives and
            torch.func. ``"reversible"`` undoes the steps of the splitting methods, and stores outputs only.
            ``"adjoint"`` solves the adjoint ODE backwards, in memory that does not grow with the steps.
        options: of native methods ``{"steps": n}``, n equal steps in each output interval, whatever the tolerances;
            ``{"dense": True}`` or ``False``, steps that always or never pass output times (None: where they are longer
            than the intervals; neither ``step_control="sample"`` nor t of shape (batch, T) can pass them);
            ``first_step``, ``max_step`` and ``min_step``, lengths of time (a
            ``max_step`` is what finds pulses of f that are narrower than a tenth of the time span); and
            ``max_nfe``, evaluations after which a solve is given up. Of torchdiffeq's methods: its own options,
            ``steps`` as above, and ``{"land": True}``: adaptive methods step exactly onto the output times. By
            themselves they step past them and interpolate, to order 4 only, which for dopri8 can be far worse than the
            tolerance.
        adjoint_options: torchdiffeq's options of its backward solve, added to those of the forward one.
            ``{"norm": "seminorm"}`` unless given; ``{}`` is torchdiffeq's own default, as the papers used it.
        step_control: ``"batch"``: one step size for the whole batch. ``"sample"``, for native methods: every sample
            has its own steps and its own acceptance, so its answer does not depend on its batch-mates (but for the
            rounding of f itself); one call of f still serves them all.
        event_fn: as in torchdiffeq, for its methods: ``event_fn(t, state)`` whose change of sign ends the solve. ``t``
            then holds two times, of which the second gives the direction only, and the result is ``(event_time,
            state)``. The time carries no gradient: ``torchdiffeq.odeint_event(..., odeint_interface=hbnode.odeint)``
            gives it one.
        max_steps: steps of an adaptive method, accepted and rejected, after which a forward or backward pass is given
            up; one more is granted for each further output interval. Where a method does not report its steps
            (``"scipy_solver"``, and events on a fixed grid) it limits evaluations. A fixed grid is as long as it is.
        compile: compile the steps of a native method, and their gradients, with torch.compile, in one graph each. The
            first calls take tens of seconds. Needs one of hbnode's fields; if the network cannot be compiled, a
            warning says so and the solve goes on without.

    Returns:
        States at the times, time first, (T, batch, ...), in the structure of ``y0``.

    Raises:
        ValueError: an argument out of its range, or a field that returns another shape.
        TypeError: an argument of the wrong type or dtype.
        NonFiniteError: the state, field or adjoint became infinite or not a number.
        StepSizeUnderflowError: the tolerance cannot be met.
        MaxStepsError: more than ``max_steps`` steps, or (:class:`MaxNFEError`) more than ``max_nfe`` evaluations.
        ReversalError: in the backward pass of ``"reversible"``: rounding errors grew too much to undo the steps. Like
            the others a :class:`SolverError`, which carries the time, the step size and the evaluations so far.

    Example:
        >>> import math, torch, hbnode
        >>> spin = lambda t, y: (y[1], -y[0])
        >>> one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        >>> cos, _ = hbnode.odeint(spin, (one, zero), [0.0, 1.0, 2.0], rtol=1e-9, atol=1e-9)
        >>> torch.allclose(cos[:, 0], torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).cos())
        True
    """
    settings = Settings(method, rtol, atol, gradient, options, adjoint_options, step_control, max_steps, compile)
    return solve(field, y0, t, checked_settings(settings), NFE(), event_fn)


def checked_settings(settings: Settings) -> Settings:
    """The settings, refused where a value is out of its range or two of them do not go together."""
    method = settings.method
    methods = (*registry.METHODS, *_torchdiffeq_solve.METHODS)
    if method is not None and method not in methods:
        raise ValueError(f"unknown method {method!r}; expected one of {methods}. Fix: {_nearest(method, methods)}.")
    theirs = method in _torchdiffeq_solve.METHODS
    gradients = _torchdiffeq_solve.GRADIENTS if theirs else registry.GRADIENTS
    gradient = ("direct" if theirs else "checkpoint") if settings.gradient is None else settings.gradient
    if gradient not in gradients:
        raise ValueError(
            f"unknown gradient {gradient!r} for method={method!r}; expected one of {gradients}. "
            f"Fix: gradient={gradients[0]!r}."
        )
    if settings.step_control not in ("batch", "sample"):
        raise ValueError(f"step_control must be 'batch' or 'sample', got {settings.step_control!r}. Fix: leave it out.")
    if theirs and settings.step_control != "batch":
        raise ValueError(
            f"step_control={settings.step_control!r} is not possible with method={method!r}, which has one step "
            "size for the whole batch; expected 'batch'. Fix: a native method, or leave step_control out."
        )
    for name in ("rtol", "atol"):
        value = getattr(settings, name)
        if not isinstance(value, numbers.Real) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}. Fix: {name}=1e-5 is the default.")
    settings = dataclasses.replace(settings, max_steps=as_count(settings.max_steps, "max_steps"))
    if not theirs:
        registry.check(settings)
    elif settings.compile:
        raise ValueError(
            f"compile=True is for native methods, got method={method!r}. "
            "Fix: leave method out, or compile the network, torch.compile(func)."
        )
    return settings


def resolved(settings: Settings, field: Callable, event: bool = False, span: float = 0.0) -> Settings:
    """The settings with method and gradient filled in for a field and the length of a solve."""
    method = settings.method
    if method is None:
        method = "dopri5" if event else registry.best_method(field, settings, span)
    gradient = settings.gradient
    if gradient is None:
        gradient = "direct" if method in _torchdiffeq_solve.METHODS else "checkpoint"
    return dataclasses.replace(settings, method=method, gradient=gradient)


def solve(
    field: Callable,
    y0: State,
    t: Tensor | Sequence[float],
    settings: Settings,
    nfe: NFE,
    event_fn: Callable | None = None,
) -> State | tuple[Tensor, State]:
    """:func:`odeint` that fills in ``nfe``, now and in the backward pass."""
    if is_tracing():
        if event_fn is None and _traced_solve.is_possible(settings):
            return _traced_solve.solve(field, checked_state(field, y0), t, settings, nfe)
        if not torch.compiler.is_dynamo_compiling():
            raise ValueError(ONLY_FIXED_GRIDS)
    return _solve(field, y0, t, settings, nfe, event_fn)


@untraced
def _solve(
    field: Callable,
    y0: State,
    t: Tensor | Sequence[float],
    settings: Settings,
    nfe: NFE,
    event_fn: Callable | None,
) -> State | tuple[Tensor, State]:
    """:func:`solve` without a graph of torch.compile."""
    y0 = checked_state(field, y0)
    check_call(field)
    t = checked_times(
        t, parts(y0)[0].device, rows=settings.method not in _torchdiffeq_solve.METHODS and event_fn is None
    )
    settings = resolved(settings, field, event_fn is not None, _span(t))
    nfe.keeps_graph = settings.gradient == "direct" and torch.is_grad_enabled()
    theirs = settings.method in _torchdiffeq_solve.METHODS
    first = parts(y0)[0]
    check_precision(settings, first.dtype)
    if not theirs:
        _torchdiffeq_solve.warn_of_callbacks(field, settings.method, _torchdiffeq_solve.CALLBACKS)
    if event_fn is None and theirs:
        with _torch_internals.refusing(f"method={settings.method!r}", "a native method with gradient='direct'"):
            return _torchdiffeq_solve.solve(field, y0, t, settings, nfe, None)
    if event_fn is None:
        return _native_solve.solve(field, y0, t, settings, nfe)
    if not theirs:
        raise ValueError(f"event_fn is for torchdiffeq's methods, got {settings.method!r}. Fix: method='dopri5'.")
    if len(t) != 2:
        raise ValueError(f"with event_fn, t must hold two times (start and direction), got {len(t)}. Fix: [t0, t1].")
    return _torchdiffeq_solve.solve(field, y0, t, settings, nfe, event_fn)


_SCIPY = {"lsoda": "LSODA", "radau": "Radau", "bdf": "BDF"}
_SYNONYMS = {  # of scipy, MATLAB, torchdyn, torchode, diffrax
    "rk45": "dopri5",
    "ode45": "dopri5",
    "dopri": "dopri5",
    "scipy": "scipy_solver",
    "tsitouras": "tsit5",
    "dormandprince": "dopri5",
    "dop853": "dopri8",
    "dormandprince8": "dopri8",
    "rk23": "bosh3",
    "ode23": "bosh3",
    "heun": "heun2",
    "tsitouras45": "tsit5",
    "rkn": "nystrom8",
    "verlet": "leapfrog",
    "stormerverlet": "leapfrog",
    "alf": "leapfrog",
    "asynchronousleapfrog": "leapfrog",
    **dict.fromkeys(_SCIPY, "scipy_solver"),
}


def _nearest(name: object, methods: Sequence[str]) -> str:
    """What to write in place of an unknown method."""
    plain = "".join(filter(str.isalnum, str(name).lower()))
    near = _SYNONYMS.get(plain)
    near = [near] if near else difflib.get_close_matches(plain, methods, 1)
    if plain in _SCIPY:
        return f"method='scipy_solver' with options={{'solver': {_SCIPY[plain]!r}}} and gradient='adjoint'"
    return f"method={near[0]!r}, or method=None for the best there is" if near else "method=None for the best there is"


def _span(t: Tensor) -> float:
    """The length of a solve; 0 where a device would have to be asked for it."""
    t = _torch_internals.plain(t)
    return float(t.max() - t.min()) if t.is_cpu and t.numel() else 0.0


def check_precision(settings: Settings, dtype: torch.dtype) -> None:
    """Refuse a tolerance that is not within what the dtype can carry, if the method goes by it."""
    if settings.method in _torchdiffeq_solve.FIXED or "steps" in (settings.options or {}):
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
        for p in field.parameters():
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


def checked_times(t: Tensor | Sequence[float], device: torch.device, *, rows: bool) -> Tensor:
    """Finite, ordered times as a tensor: (T,), or (batch, T) if each sample may have a row of its own.

    Native methods (``rows``) have them on the host, which plans the steps; torchdiffeq's on the device of the state.
    """
    if not isinstance(t, Tensor):
        if not isinstance(t, Iterable) or isinstance(t, (str, bytes, dict)):
            fix = f"[0.0, {t}]" if isinstance(t, numbers.Real) else "a tensor or a list of numbers"
            raise TypeError(f"t must be times, a tensor or a sequence, got {type(t).__name__}. Fix: {fix}.")
        t = list(t)
        if any(isinstance(time, Tensor) for time in t):  # keep the gradients of learned times
            t = [torch.as_tensor(time, dtype=torch.float64, device=device) for time in t]
            if any(time.numel() != 1 for time in t):
                raise ValueError("t is a sequence of tensors that are no single times. Fix: torch.stack or cat them.")
            t = torch.stack([time.reshape(()) for time in t])
        else:
            t = torch.as_tensor(t, dtype=torch.float64)
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
        raise ValueError(f"t must be finite, got {values.tolist()}. Fix: drop the infinite times and the NaNs.")
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
