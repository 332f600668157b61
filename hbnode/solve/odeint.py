"""The function :func:`odeint`, which checks its arguments, selects a solver and calls it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from hbnode import _torch
from hbnode._checks import as_real, check_call, check_real, conversion, diagnose_call, with_hints
from hbnode._torch import is_tracing, untraced
from hbnode._tree import State, Times, apply, describe, is_finite, last_of, parts
from hbnode.errors import ONLY_FIXED_GRIDS, MaxStepsError, NonFiniteError
from hbnode.fields import GHBNODE, HBNODE
from hbnode.nfe import NFE, Tally, open_counters, open_records
from hbnode.solve import compiled, graph, torchdiffeq_methods
from hbnode.solve.adjoints import Direct, gradient_mode, owning
from hbnode.solve.events import Event, EventRecord, checked_events
from hbnode.solve.loop import integrate, start_of
from hbnode.solve.methods import (
    ALL_METHODS,
    METHODS,
    TRACEABLE,
    Explicit,
    ForeignMethod,
    NativeMethod,
    Rosenbrock,
    Rows,
)
from hbnode.solve.settings import Gradient, Method, Save, Settings
from hbnode.solve.stepper import STRONG_DAMPING, Attempt, Setup, Taken, first_index
from hbnode.solve.term import ODETerm, Snapshot, change_of_call, is_heavy_ball, snapshot_of, solving, unwrap_compiled

logger = logging.getLogger("hbnode")
LONGEST_GRID = 64  # largest number of function evaluations in a compiled solve with fixed steps

StateT = TypeVar("StateT", bound=State)


# The overloads: the result has the structure of y0; with events it is a pair of the solution and the event record.
@overload
def odeint(
    field: Callable[[Tensor, StateT], State], y0: StateT, t: Times, *, method: Method | None = None,
    rtol: float = 1e-5, atol: float = 1e-5, gradient: Gradient | None = None, steps: int | None = None,
    per_sample: bool = False, save: Save = "interpolate", jump_times: Times | None = None, events: None = None,
    max_steps: int = 10_000, options: dict[str, Any] | None = None, adjoint_options: dict[str, Any] | None = None,
    compile: bool = False,
) -> StateT: ...  # fmt: skip


@overload
def odeint(
    field: Callable[[Tensor, StateT], State], y0: StateT, t: Times, *, method: NativeMethod | None = None,
    rtol: float = 1e-5, atol: float = 1e-5, gradient: Literal["direct", "checkpoint", "adjoint"] | None = None,
    steps: int | None = None, per_sample: bool = False, save: Save = "interpolate",
    jump_times: Times | None = None, events: Event, max_steps: int = 10_000, options: dict[str, Any] | None = None,
    adjoint_options: None = None, compile: bool = False,
) -> tuple[StateT, EventRecord]: ...  # fmt: skip


@overload
def odeint(
    field: Callable[[Tensor, StateT], State], y0: StateT, t: Times, *, method: NativeMethod | None = None,
    rtol: float = 1e-5, atol: float = 1e-5, gradient: Literal["direct", "checkpoint", "adjoint"] | None = None,
    steps: int | None = None, per_sample: bool = False, save: Save = "interpolate",
    jump_times: Times | None = None, events: Sequence[Event], max_steps: int = 10_000,
    options: dict[str, Any] | None = None, adjoint_options: None = None, compile: bool = False,
) -> tuple[StateT, tuple[EventRecord, ...]]: ...  # fmt: skip


@with_hints
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
    events: Event | Sequence[Event] | None = None,
    max_steps: int = 10_000,
    options: dict[str, Any] | None = None,
    adjoint_options: dict[str, Any] | None = None,
    compile: bool = False,
) -> State | tuple[State, EventRecord | tuple[EventRecord, ...]]:
    r"""Solve :math:`y' = \mathrm{field}(t, y),\; y(t_0) = y_0` and return y at the times ``t``.

    The defaults differ from those of torchdiffeq: rtol and atol are 1e-5 (torchdiffeq: 1e-7 and 1e-9), and the method
    is a native method of hbnode (torchdiffeq: ``"dopri5"``). :mod:`hbnode.torchdiffeq` has the functions, arguments and
    defaults of torchdiffeq.

    An adaptive method accepts a step if the root mean square of error / (atol + rtol * max \|y\|) is at most 1. The
    maximum is over the two ends of the step. The mean is over all elements of the batch and of the state's tensors. By
    default, outputs inside a step are interpolated within the tolerance (dense output), without further function
    evaluations.

    References:
        ``hbnode/solve/tableaus.py`` cites the paper of each native method; :doc:`/solvers` explains the methods. Chen,
        torchdiffeq (github.com/rtqichen/torchdiffeq), for its methods; Chen et al., arXiv:1806.07366, for the adjoint;
        Kidger, Chen and Lyons, "Hey, that's not an ODE", arXiv:2009.09457, for the adjoint's seminorm; Gholami, Keutzer
        and Biros, arXiv:1902.10298, and Zhuang et al., arXiv:2006.02493, for gradients from checkpoints.

    Arguments:
        field: the right-hand side, called as ``field(t, state)``: an hbnode field, another module, or a function. It
            returns d state/dt in the structure of the state. Its argument t is a scalar tensor, or (batch, 1, ...) if
            samples have their own times or steps.
        y0: state at ``t[0]``: a floating-point tensor (batch, ...), or a tuple of such tensors.
        t: times (T,), strictly increasing or strictly decreasing. Native methods also take (batch, T), one row of times
            per sample, in which times may repeat. The field gets times in the dtype of the state. If this dtype rounds
            large times too coarsely for the length of the solve, a ValueError is raised. The gradient with respect to t
            assumes that each step ends at a constant fraction of its output interval; jumps of f stay fixed.
            (torchdiffeq's adaptive methods with ``"direct"`` differentiate their interpolation instead. Its derivative
            is much less accurate than their solution.)
        method: name of the solver; :func:`hbnode.methods` lists all names and orders. Default: None, which selects a
            native method. For an HBNODE it selects ``"nystrom4"`` if rtol >= 1e-3, else ``"nystrom8"``. If the damping
            of the HBNODE is constant and exceeds 50 / (length of the solve), it selects ``"exponential"``; with
            ``steps`` the damping does not affect the choice. For all other fields it selects ``"tsit5"``, also for an
            HBNODE that has hooks or overrides ``forward`` or ``__call__``. With ``gradient="reversible"`` it selects
            ``"blanes_moan4"``. It never selects ``"rodas5p"``, the method for stiff equations.
        rtol: relative tolerance of adaptive methods. Default: 1e-5.
        atol: absolute tolerance of adaptive methods, in the units of the state. Default: 1e-5.
        gradient: how gradients are computed. Default: None, which is ``"checkpoint"`` for native methods and
            ``"direct"`` for torchdiffeq's methods.

            - ``"checkpoint"`` stores the autograd graph of the steps up to 64 MiB. Later steps are recomputed in the
              backward pass (``torch.utils.checkpoint``). The result is the exact gradient of the discrete solution
              (discretise-then-optimise).
            - ``"direct"`` backpropagates through the solver's operations. It is the only mode for higher derivatives
              and torch.func.
            - ``"reversible"`` stores only the outputs. The backward pass reconstructs the other states by reversing the
              steps of a splitting method.
            - ``"adjoint"`` solves the adjoint ODE backwards, in memory that does not grow with the number of steps.
              Over a solve of length T, a damping γ amplifies errors of the backward solve by e^{γT}. Native methods
              raise ``ReversalError`` if the backward solve misses y0 or an output. The whole batch shares the steps of
              the backward solve, also with ``per_sample=True`` or t of shape (batch, T).
        steps: number of equal steps in each output interval, for native methods and for torchdiffeq's methods with
            fixed steps. The tolerances are then ignored. ``jump_times`` divide an interval into pieces, each of which
            has this number of steps; the sample times of a :class:`hbnode.Signal` do not. The splitting methods need
            ``steps``. Without it, torchdiffeq's methods with fixed steps take one step per interval. Default: None,
            which means adaptive steps.
        per_sample: whether each sample has its own step sizes (native methods). The solution of a sample is then
            independent of the other samples of the batch, up to rounding errors of f. In both cases one call of f
            evaluates all samples. Default: False, which means one step size for the whole batch.
        save: ``"interpolate"``: adaptive steps do not stop at output times, and outputs are interpolated within the
            tolerance. ``"exact"``: a step ends at each output time. The interpolation of torchdiffeq's methods has
            order 4, which for dopri8 can be far less accurate than the tolerance. Default: ``"interpolate"``.
        jump_times: times (K,) at which f or its derivative jumps, or at which a narrow pulse of f begins or ends. Steps
            end on these times. f is evaluated just before and just after each of them. Adaptive native methods also use
            the sample times of a :class:`hbnode.Signal` in f. Default: None.
        events: an :class:`hbnode.Event`, or a list of them, for native methods. Each sample then has its own steps,
            which end on its events. All values of ``gradient`` except ``"reversible"`` support events. Default: None.
        max_steps: largest number of accepted and rejected steps of an adaptive method in one forward or backward pass.
            With ``save="exact"`` and with torchdiffeq's methods, each output interval after the first adds one step to
            this limit. The adjoint of native methods applies the limit to each output interval. For ``"scipy_solver"``,
            which does not report its steps, the limit applies to function evaluations. Fixed steps are not limited.
            Default: 10000.
        options: further options of the method. Native methods have ``first_step``, ``max_step`` and ``min_step``, step
            sizes in units of time, and ``max_nfe``, the largest number of function evaluations of a solve. Set
            ``max_step`` if f has pulses narrower than a tenth of the time span: a pulse between two evaluations of f is
            missed without an error. torchdiffeq's methods have their own options. Default: None.
        adjoint_options: torchdiffeq's options of the backward solve, added to those of the forward solve.
            Default: None, which is ``{"norm": "seminorm"}``; ``{}`` is torchdiffeq's own default, used in the papers.
        compile: whether to compile the steps of a native method and their gradients with torch.compile. It needs an
            hbnode field, and the first calls take tens of seconds. If compilation fails, a warning is issued and the
            solve runs without compilation. Default: False.

    Returns:
        The states at the times ``t``, (T, batch, ...), in the structure of ``y0``. With ``events``, the pair
        ``(solution, record)``, where ``record`` is an :class:`~hbnode.solve.EventRecord` for an Event, and a tuple of
        records for a list. An output at the time of an event is the state before or after the jump, depending on
        rounding errors.

    Raises:
        ValueError: an argument is out of its range, or the field returns another shape.
        TypeError: an argument has the wrong type or dtype.
        SolverError: the solve failed; the error has the time, the step size and the number of function evaluations.
            The following errors are its subclasses.
        NonFiniteError: the state, the field or the adjoint became infinite or NaN.
        DivergenceError: the solution grows without bound before the end of the solve.
        StepSizeUnderflowError: no step size meets the tolerance.
        ZenoError: infinitely many events before a finite time.
        MaxStepsError: more than ``max_steps`` steps, or (:class:`MaxNFEError`) more than ``max_nfe`` evaluations.
        RecomputationError: a step recomputed in the backward pass ends in another state, because the field was changed.
        ReversalError: the backward pass of ``"reversible"`` or ``"adjoint"`` missed y0 or an output.

    Example:
        >>> import math, torch, hbnode
        >>> spin = lambda t, y: (y[1], -y[0])
        >>> one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        >>> cos, _ = hbnode.odeint(spin, (one, zero), [0.0, 1.0, 2.0], rtol=1e-9, atol=1e-9)
        >>> torch.allclose(cos[:, 0], torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).cos())
        True
    """
    settings = Settings(
        method=method, rtol=rtol, atol=atol, gradient=gradient, steps=steps, per_sample=per_sample, save=save,
        jump_times=jump_times, max_steps=max_steps, options=options, adjoint_options=adjoint_options, compile=compile,
    )  # fmt: skip
    try:
        return solve(field, y0, t, settings.checked(), NFE(), events=events)
    except (TypeError, ValueError) as error:
        diagnose_call(error, field)
        raise


def solve(
    field: Callable[..., State], y0: State, t: Times, settings: Settings, nfe: NFE, *, end: bool = False,
    events: Any = None,
) -> Any:  # fmt: skip
    """Solve as :func:`odeint` does, with checked ``settings``, and count evaluations and steps in ``nfe``.

    With ``end`` the result is the last state instead of the trajectory.
    """
    if not is_tracing():
        return _solve(field, y0, t, settings, nfe, end, events)
    if events is None and is_traceable(settings):
        return _traced(field, y0, t, settings, Tally(field, nfe), end)
    if not torch.compiler.is_dynamo_compiling():  # torch.compile can call the solve outside its graphs
        raise ValueError(ONLY_FIXED_GRIDS)
    return untraced(_solve)(field, y0, t, settings, nfe, end, events)


def _solve(field: Any, y0: State, t: Times, settings: Settings, nfe: NFE, end: bool, given: Any) -> Any:
    snapshot, counter = snapshot_of(field, y0, t), Tally(field, nfe)
    key = compiled.key_of(field, y0, t, settings, snapshot, end=end) if settings.compile and given is None else None
    if key is not None and (solution := compiled.solve_again(key, field, y0, counter, snapshot)) is not None:
        return last_of(solution) if end and len(key[0]) > 2 else solution
    y0 = checked_state(field, y0, snapshot)
    events = () if given is None else checked_events(given, settings)
    dtype, device = parts(y0)[0].dtype, parts(y0)[0].device
    has_times = events or getattr(unwrap_compiled(field), "time_dependent", True)
    times = checked_times(t, device, rows=settings.is_native, dtype=dtype if has_times else None)
    settings = resolve(settings, field, times)
    method, end_only = ALL_METHODS[settings.method], end and times.shape[-1] == 2
    if settings.steps is None and not method.needs_fixed_steps and settings.rtol < torch.finfo(dtype).eps:
        check_precision(settings.rtol, dtype)
    if isinstance(method, ForeignMethod):
        nfe.keeps_graph = settings.gradient == "direct" and torch.is_grad_enabled()
        with _torch.refusing(f"method={settings.method!r}", "a native method with gradient='direct'"):
            found = torchdiffeq_methods.solve(field, y0, times, settings, counter, snapshot)
        return last_of(found) if end else found
    setup = native_setup(field, y0, times, settings, counter, events, end_only=end_only)
    found, records = _solve_natively(setup, field, y0, times, snapshot, key)
    found = last_of(found) if end and not end_only else found
    if records is None:
        return found
    return found, records[0] if isinstance(given, Event) else records


def _solve_natively(
    setup: Setup, field: Any, y0: State, t: Tensor, snapshot: Snapshot, key: Any
) -> tuple[State, tuple[EventRecord, ...] | None]:
    """Solve as :func:`run` does, but by compiled functions if ``compile`` is True and they support the solve.

    ``key`` is the result of :func:`hbnode.solve.compiled.key_of`.
    """
    settings, gradient = setup.settings, gradient_mode(setup.settings.gradient)
    if settings.compile and _torch.may_look():
        setup, found = _compiled(setup, field, y0, t, snapshot, getattr(gradient, "keep_bytes", None), key)
        if found is not None:
            return found, None
    return run(setup, y0, snapshot, gradient)


def native_setup(
    field: Any, y0: State, t: Tensor, settings: Settings, counter: Tally, events: Sequence[Event], *, end_only: bool
) -> Setup:
    """Return the setup of a solve of ``field`` from ``y0`` at the times ``t`` with a native method.

    ``settings`` have no defaults left: they are the result of :func:`resolve`.
    """
    method, template = METHODS[settings.method], parts(y0)[0]
    if any(hasattr(field, name) for name in torchdiffeq_methods.CALLBACKS):
        torchdiffeq_methods.warn_of_callbacks(field, settings.method, torchdiffeq_methods.CALLBACKS)
    if events and t.requires_grad and method.needs_fixed_steps:
        raise ValueError(
            f"method={settings.method!r} with events has no gradient of t. Fix: t.detach(), or method='nystrom4'."
        )
    lanes, is_empty = None, template.shape[:1] == (0,)  # an empty batch has no samples with different steps
    if t.dim() == 2 or events or (settings.per_sample and settings.steps is None and not is_empty):
        lanes = count_samples(y0, t, settings)
    term = ODETerm(field, y0, counter, second_order=is_second_order(settings.method, field), lanes=lanes)
    setup = Setup.of(term, method, t, settings, end_only=end_only, events=events)
    if settings.steps is None and not method.is_stiff:
        check_damping(setup, field)
    return setup


def run(setup: Setup, y0: State, snapshot: Snapshot, gradient: Any) -> tuple[State, tuple[EventRecord, ...] | None]:
    """Solve from ``y0`` with the mode object ``gradient``.

    Returns:
        The trajectory or the final state, and a tuple with the :class:`EventRecord` of each event, or None.
    """
    term = setup.stepper.term
    with solving(snapshot, term.template.device.type):
        rows, steps, objects = gradient.solve(setup, y0, snapshot)
        if setup.settings.steps is not None:
            check_finite(setup, y0, rows)
    solution = term.unflatten(rows, () if setup.end_only else (len(rows[0]),))
    own: Any = functools.partial(owning, objects=objects) if objects else lambda x: x
    return own(solution), None if steps is None else steps.record(own)


def resolve(settings: Settings, field: Callable[..., Any], t: Tensor | None = None) -> Settings:
    """Return the settings with defaults for ``method`` and ``gradient``, chosen for a field and its times ``t``.

    For an HBNODE, the choice is the Nyström method that needs fewer function evaluations at the given tolerance in the
    benchmarks. If the damping is constant and strong over the span of ``t``, the choice is ``"exponential"``, the only
    adaptive method whose step size the damping does not limit. Times on a GPU are not read for this choice, because
    reading them would synchronise the device.
    """
    method, gradient = settings.method, settings.gradient
    if method is not None:
        if ALL_METHODS[method].field != "any":
            check_field(method, field)
    elif gradient == "reversible":
        method = "blanes_moan4"
        check_field(method, field)
    elif not isinstance(inner := unwrap_compiled(field), HBNODE) or change_of_call(field) is not None:
        method = "tsit5"
    else:
        method = "nystrom4" if settings.rtol >= 1e-3 else "nystrom8"
        if inner.omega is None and settings.steps is None and t is not None and t.is_cpu and t.numel():
            span = float(_torch.plain(t.max() - t.min()))
            method = "exponential" if constant_damping(field) * span > STRONG_DAMPING else method
    if gradient != "direct" and _torch.double_backward_enabled():
        gradient = "direct"
    if gradient is None:
        gradient = (
            "direct" if "checkpoint" not in ALL_METHODS[method].gradients or _torch.is_transformed() else "checkpoint"
        )
    is_known = method == settings.method and gradient is settings.gradient
    return settings if is_known else dataclasses.replace(settings, method=method, gradient=gradient)


def is_second_order(method: str, field: Callable[..., Any]) -> bool:
    """Return whether ``method`` solves the field as the second-order equation h'' + γh' = f(h, t) with the damping γ.

    Other methods solve it as a first-order equation.
    """
    known = TRACEABLE[method]
    return known.rows == 2 or (isinstance(known, Rosenbrock) and is_heavy_ball(field, HBNODE))


def constant_damping(field: Callable[..., Any]) -> float:
    """Return the largest damping γ of the channels of an HBNODE or GHBNODE; 0 if γ is learned or for other fields."""
    inner = unwrap_compiled(field)
    if not isinstance(inner, (HBNODE, GHBNODE)) or inner.omega is not None:
        return 0.0
    damping = inner.solver_damping()
    return _torch.to_numpy(damping).max(initial=0.0).item() if isinstance(damping, Tensor) else damping


def check_field(method: str, field: Callable[..., Any]) -> None:
    """Raise ValueError if ``method``, which needs an HBNODE or a GHBNODE, cannot solve ``field``."""
    kinds: tuple[type, ...] = (HBNODE,)
    what = "solves h'' + γh' = f(h, t), an HBNODE"
    fix = "Fix: method='tsit5', or method=None for the default."
    if "GHBNODE" in ALL_METHODS[method].field:
        kinds, what = (HBNODE, GHBNODE), "splits the equation of an HBNODE or GHBNODE"
        fix = "Fix: method='tsit5' with gradient='checkpoint'."
    if not isinstance(unwrap_compiled(field), kinds):
        raise ValueError(f"method={method!r} {what}, got {type(field).__name__}. {fix}")
    change = change_of_call(field)
    if change is not None:
        raise ValueError(
            f"method={method!r} {what}, and evaluates func without a call of the field, but {change}. {fix}"
        )


def _compiled(
    setup: Setup, field: Any, y0: State, t: Tensor, snapshot: Snapshot, keep_bytes: int | None, key: Any
) -> tuple[Setup, State | None]:
    """Solve by compiled graphs if they can include the step size control or all fixed steps.

    Returns:
        The setup, and the trajectory or the final state. The solution is None if no graph supports the whole solve. The
        caller then solves with the returned setup, which has a compiled step if possible.
    """
    if setup.events:
        compiled.warn("events are searched for in Python", "leave compile out")
        return setup, None
    if not snapshot.masks and compiled.is_possible(setup, y0):
        return setup, compiled.solve(setup, y0, snapshot, keep_bytes, key)
    return _compiled_steps(setup, field, y0, t, snapshot)


def _compiled_steps(setup: Setup, field: Any, y0: State, t: Tensor, snapshot: Snapshot) -> tuple[Setup, State | None]:
    """Solve by one compiled function if there are few fixed steps; otherwise compile a single step.

    Returns:
        The setup and the solution, as :func:`_compiled` does. Without a solution, the setup has the compiled step.
    """
    settings, stepper, method, term = setup.settings, setup.stepper, setup.stepper.method, setup.stepper.term
    if not stepper.like.numel():
        return setup, None
    if snapshot.masks or isinstance(method, Rosenbrock):
        compiled.warn("func draws random numbers" if snapshot.masks else "the steps of Rosenbrock methods run eagerly")
        return setup, None
    steps = (settings.steps or 0) * (t.shape[-1] - 1)
    evaluations = steps * method.evaluations + method.is_fsal
    if settings.steps is None or settings.jump_times or evaluations > LONGEST_GRID or t.requires_grad or open_records:
        activation, error = getattr(term.inner, "activation", None), settings.steps is None
        make = functools.partial(compiled.attempt, term, method, settings.rtol, settings.atol, error=error)
        step_key = (settings.method, settings.rtol, settings.atol, error, activation, term.lanes is None)
        program = compiled.program(
            term, snapshot, step_key, lambda: compiled.Program(make(), term.template.device.type)
        )
        return dataclasses.replace(setup, stepper=dataclasses.replace(stepper, program=program)), None

    if evaluations > (setup.max_nfe or math.inf) - term.counter.nfe.forward:
        return setup, None

    def grid(y0: State, t: Tensor) -> State:
        return _traced(field, y0, t, dataclasses.replace(settings, options=None), graph.Uncounted(), False)

    key = (settings.method, settings.steps, t.shape[-1], getattr(term.inner, "activation", None))
    device = term.template.device
    trajectory = compiled.program(term, snapshot, key, lambda: compiled.Program(grid, device.type))(y0, t.to(device))
    if trajectory is not None:
        term.counter.add("evaluation", evaluations)
        term.counter.add("accepted", steps)
        term.counter.nfe.keeps_graph = torch.is_grad_enabled()
        with solving(snapshot, device.type):
            check_finite(setup, y0, parts(trajectory))
        trajectory = last_of(trajectory) if setup.end_only else trajectory
    return setup, trajectory


def count_samples(y0: State, t: Tensor, settings: Settings) -> int:
    """Return the batch size for a solve in which samples have their own times or steps.

    Raise ValueError if the state has no batch dimension, or if the batch must share its steps in this gradient mode.
    """
    what = "t of shape (batch, T)" if t.dim() == 2 else "per_sample=True" if settings.per_sample else "events="
    tensors = parts(y0)
    # torch.export would record len() as a constant
    if any(part.dim() == 0 or part.shape[0] != tensors[0].shape[0] for part in tensors):
        raise ValueError(
            f"{what} needs a state whose parts have the shape (batch, ...), got {describe(y0)}. Fix: y.unsqueeze(0)."
        )
    if t.dim() == 2 and _torch.may_look() and len(t) != len(tensors[0]):
        got = f"t has shape {tuple(t.shape)} for a batch of {len(tensors[0])}"
        raise ValueError(f"{got}; expected (batch, T). Fix: one row of times for each sample, or t of shape (T,).")
    return tensors[0].shape[0]


def is_traceable(settings: Settings) -> bool:
    """Return whether a solve can be recorded in one graph of torch.compile, torch.export or torch.jit.trace.

    Solves with fixed steps can be recorded; torch.export also records adaptive steps of explicit methods. Exported
    graphs ignore all gradient modes except ``"direct"``. torch.compile runs the other modes, and solves inside
    ``count_nfe``, outside its graphs.
    """
    method, is_exporting = settings.method, torch.compiler.is_exporting()
    if settings.jump_times:
        return False
    if settings.steps is None:
        is_explicit = isinstance(ALL_METHODS[method or "tsit5"], Explicit)
        return is_exporting and is_explicit and not settings.common_steps
    if method not in (None, *TRACEABLE):
        return False
    if is_exporting or not torch.compiler.is_dynamo_compiling():
        return True
    return settings.gradient in (None, "direct") and not open_counters


def _traced(field: Callable[..., State], y0: State, t: Times, settings: Settings, counter: Tally, end: bool) -> State:
    """Solve while torch.compile, torch.export or torch.jit.trace records the program.

    No values of tensors are read, and adaptive steps have no gradients. With ``end`` the result is the final state,
    else the trajectory.
    """
    snapshot, is_fixed = Snapshot(field, for_backward=False), settings.steps is not None  # a graph has no backward
    y0 = checked_state(field, y0, snapshot)
    settings = resolve(dataclasses.replace(settings, gradient="direct"), field)
    device = parts(y0)[0].device
    times = traced_times(t, device)
    has_lanes = times.dim() == 2 or (settings.per_sample and not is_fixed)
    lanes = count_samples(y0, times, settings) if has_lanes else None
    counter, second_order = counter if is_fixed else graph.Uncounted(), is_second_order(settings.method, field)
    term, end_only = ODETerm(field, y0, counter, second_order=second_order, lanes=lanes), False
    with solving(snapshot, device.type):
        if is_fixed:
            setup = Setup.of(term, TRACEABLE[settings.method], times, settings)
            solution = term.unflatten(Direct().solve(setup, y0, snapshot).rows, (times.shape[-1],))
        else:
            end_only = end and times.shape[-1] == 2
            solution = graph.exported(term, METHODS[settings.method], times, y0, settings, end_only=end_only)
    return last_of(solution) if end and not end_only else solution


def check_damping(setup: Setup, field: Callable[..., Any]) -> None:
    """Raise MaxStepsError before the solve if the damping requires more than ``max_steps`` steps.

    Explicit methods need a step size below a multiple of 1/γ for the damping γ.
    """
    settings, end, limit = setup.settings, setup.grid.end, setup.stepper.method.damping_limit
    damping, reach = (setup.stepper.strongest, limit) if limit < math.inf else (constant_damping(field), 4.0)
    span = float(end.max()) if damping and end.size else 0.0
    needed = damping * span / (1.0 if limit < math.inf else reach)
    if not needed >= settings.max_steps:  # if the damping is NaN, the solve raises an error
        return
    if is_heavy_ball(field, HBNODE):
        advice = "method='exponential', which solves the damping exactly"
    else:
        advice = f"max_steps={math.ceil(damping * span / 3)}"
        if is_heavy_ball(field, GHBNODE):
            advice += ", or method='leapfrog' with steps=n (exact damping)"
    what = f"the damping of {damping:g} over a time of {span:g} takes about {needed:.0f} steps"
    message = f"{what}, and max_steps={settings.max_steps}. Fix: {advice}, or a shorter time"
    raise setup.stepper.failure(MaxStepsError, message, setup.grid.begin, reach / damping)


def check_finite(setup: Setup, y0: State, rows: Rows) -> None:
    """Raise NonFiniteError if a solution ``rows``, computed with fixed steps, is not finite.

    Fixed steps are checked only after the solve. If the solution is not finite, a second solve finds the first step
    that is not finite.
    """
    if is_finite(rows):
        return
    stepper = setup.stepper

    def take(state: Rows, attempt: Attempt) -> Taken:
        taken = stepper.take(state, attempt)
        if not is_finite(taken.state):
            bad = ~np.isfinite(stepper.norms(taken.state))
            raise stepper.not_finite(attempt, state, first_index(bad.any(0)))
        return taken

    with torch.no_grad():
        begun = start_of(setup, y0)
        norm = stepper.norms(begun.state)
        if not np.isfinite(norm).all():
            raise stepper.start_not_finite(norm, setup.grid.begin)
        integrate(begun, take, every=1)
    raise stepper.failure(
        NonFiniteError, "the solution is not finite. Fix: bound func, or use more steps", setup.grid.begin, math.nan
    )


def traced_times(t: Times, device: torch.device) -> Tensor:
    """Convert ``t`` to a float64 tensor on ``device``; raise ValueError if times given as numbers are not ordered.

    The values of tensors cannot be checked while torch.compile or torch.export records the program.
    """
    if isinstance(t, (Tensor, np.ndarray)):
        return torch.as_tensor(t).to(device, torch.float64)
    given = list(t)
    if any(isinstance(time, Tensor) for time in given):
        return torch.stack([torch.as_tensor(time, dtype=torch.float64, device=device).reshape(()) for time in given])
    if isinstance(given[0], (list, tuple)):  # one row of times per sample
        return torch.tensor(given, dtype=torch.float64, device=device)
    times = [float(time) for time in given]
    rising, falling = ([sign * times[i] < sign * times[i + 1] for i in range(len(times) - 1)] for sign in (1, -1))
    if not (all(rising) or all(falling)):
        raise ValueError(f"t must be strictly increasing or strictly decreasing, got {times}. Fix: sort the times.")
    one = torch.ones((), dtype=torch.float64, device=device)
    return torch.stack([one * time for time in times])  # torch.tensor would make the times constant in the graph


def checked_span(t_span: Sequence[float]) -> tuple[float, float]:
    """Return the start and end time ``t_span`` as two floats; raise an error unless they are finite and different."""
    if not isinstance(t_span, Sequence) or any(isinstance(t, Tensor) for t in t_span):
        raise TypeError(
            f"t_span must be two numbers (t0, T), got {t_span!r}. Fix: (0.0, 1.0); learned times go to block(x, t)."
        )
    span = tuple(as_real(t, "a time of t_span", "(0.0, 1.0)") for t in t_span)
    if len(span) != 2 or span[0] == span[1] or not all(map(math.isfinite, span)):
        raise ValueError(f"t_span must be two different times (t0, T), got {span}. Fix: (0.0, 1.0).")
    return span


@functools.cache  # one warning per tolerance and dtype
def check_precision(rtol: float, dtype: torch.dtype) -> None:
    """Log a warning that ``rtol`` is below the machine epsilon of ``dtype``; if it is far below, raise ValueError."""
    eps = torch.finfo(dtype).eps
    if rtol < eps / 100:
        what = f"rtol={rtol:g} is far below the machine epsilon {eps:.2g} of {dtype}"
        raise ValueError(f"{what}; expected at least {eps / 100:.2g}. Fix: solve in float64, or loosen rtol.")
    logger.warning("rtol=%g is below the machine epsilon of %s: rounding errors alone may reject steps", rtol, dtype)


def checked_state(field: Callable, y0: State, snapshot: Snapshot) -> State:
    """Return the initial state; raise an error if the field, or the structure or dtypes of the state, are invalid.

    Under autocast, half-precision tensors of the state are converted to float32.
    """
    if not isinstance(field, nn.Module):
        if not callable(field):
            raise TypeError(
                f"field must be callable as field(t, state), got {type(field).__name__}. Fix: hbnode.NODE(func)"
            )
        check_call(field)
    tensors = (y0,) if isinstance(y0, Tensor) else y0
    if not isinstance(tensors, tuple) or not tensors or not all(isinstance(part, Tensor) for part in tensors):
        raise TypeError(_not_a_state(y0, field))
    dtypes = [part.dtype for part in tensors]
    dtype = dtypes[0]
    if not dtype.is_floating_point or dtypes.count(dtype) < len(dtypes):
        raise TypeError(
            f"the state must be floating point and of one dtype, got {', '.join(map(str, dtypes))}. "
            f"Fix: {'torch.view_as_real(x)' if dtype.is_complex else 'x.float() or x.double(), of each part'}."
        )
    if _torch.is_autocast(tensors[0]):  # autocast applies to networks, not to states
        return apply(lambda part: part.float() if part.element_size() < 4 else part, y0)
    if snapshot.dtypes and dtype not in snapshot.dtypes:
        kinds = ", ".join(map(str, snapshot.dtypes))
        raise TypeError(
            f"the state is {dtype}, the field's parameters are {kinds}; expected one dtype. "
            "Fix: convert the input (x.float(), x.double()) or the field (field.float(), field.double())."
        )
    return y0


def _not_a_state(y0: object, field: Callable) -> str:
    got, fix = type(y0).__name__, conversion(y0).replace("(x", "(y0")
    if isinstance(y0, (list, tuple)):
        got = f"{got} of ({', '.join(type(part).__name__ for part in y0)})"
    if isinstance(y0, list) and y0 and all(isinstance(part, Tensor) for part in y0):
        fix = "tuple(y0)"
    elif isinstance(y0, tuple):
        fix = f"make each part a tensor, x -> {conversion(next((x for x in y0 if not isinstance(x, Tensor)), None))}"
    elif hasattr(field, "initial_state"):
        fix = f"field.initial_state({fix})"
    return f"the state must be a tensor or a tuple of tensors, got {got}. Fix: {fix}."


def checked_times(t: Times, device: torch.device, *, rows: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Convert ``t`` to a tensor (T,); raise an error if the times are not finite or not ordered.

    Arguments:
        t: the times.
        device: the device of the result if ``rows`` is False.
        rows: whether the method is native. The times may then have the shape (batch, T), and the result is on the CPU,
            where steps are planned.
        dtype: the dtype of the state if the field or an event function gets times in this dtype, else None.
    """
    t = as_times(t, device)
    if t.dim() != 1 and not (rows and t.dim() == 2):
        fix = "(T,); native methods also take (batch, T), a row of times for each sample"
        raise ValueError(f"t must be one-dimensional, got shape {tuple(t.shape)}. Fix: {fix}.")
    if t.shape[-1] == 0:
        raise ValueError(f"t must hold at least one time, got shape {tuple(t.shape)}. Fix: [0.0, 1.0].")
    values = _torch.to_numpy(t)
    if not np.isfinite(values).all():
        where = np.argwhere(~np.isfinite(values))[0].tolist()
        raise ValueError(
            f"t must be finite, but t{where} is {values[tuple(where)]}. Fix: drop infinite times and NaNs."
        )
    check_order(values, t.dtype)
    if dtype is not None:
        check_resolution(values, dtype)
    return t.cpu() if rows else _torch.to_device(t, device)


def as_times(t: Times, device: torch.device) -> Tensor:
    """Convert times to a tensor of real numbers; a sequence may contain scalar tensors that require gradients."""
    if isinstance(t, Tensor):
        if not t.is_floating_point():
            return check_real(t, "t").to(torch.float64)
        if _torch.is_vmapped(t):
            raise ValueError(
                "t is mapped by torch.vmap. Fix: odeint with t of shape (batch, T), a row for each sample."
            )
        return t
    kind = type(t).__name__
    t = t.to_numpy() if hasattr(t, "to_numpy") else t  # iterating over a DataFrame gives column names
    if not isinstance(t, Iterable) or isinstance(t, (str, bytes, dict, set, frozenset)):
        fix = f"[0.0, {t}]" if isinstance(t, numbers.Real) else "a tensor or a list of numbers"
        raise TypeError(f"t must be times, a tensor or a sequence, got {kind}. Fix: {fix}.")
    given = t.copy() if isinstance(t, np.ndarray) else list(t)  # an array may be read-only
    if Tensor in map(type, given) or nn.Parameter in map(type, given):  # the times may need gradients
        times = [torch.as_tensor(time, dtype=torch.float64, device=device) for time in given]
        if any(time.numel() != 1 for time in times):
            raise ValueError(
                "t is a sequence with tensors that are not scalars. Fix: one tensor of all times, as torch.cat(t)."
            )
        return torch.stack([time.reshape(()) for time in times])
    try:
        return torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        fix = "dates and durations in days, t = pandas.Series(t), then (t - t.iloc[0]) / pandas.Timedelta(days=1)"
        if isinstance(given[0], str):
            fix = "[float(time) for time in t], or dates, t = pandas.to_datetime(t), in days since the first"
        raise TypeError(
            f"t must be numbers, in the time unit of f, got a {kind} of {type(given[0]).__name__}. Fix: {fix}."
        ) from error


def check_order(values: np.ndarray, dtype: torch.dtype) -> None:
    """Raise ValueError unless times (T,) are strictly monotonic, or times (batch, T) monotonic for each sample.

    ``dtype`` is the dtype in which the times were given, for the error message.
    """
    steps = np.diff(values)
    if values.ndim > 1:  # the times of a sample may repeat: it does not move between equal times
        if not ((steps >= 0).all() or (steps <= 0).all()):
            raise ValueError(
                "t of shape (batch, T) must increase along each row, or decrease along each. Fix: sort the times."
            )
    elif not ((steps > 0).all() or (steps < 0).all()):
        i = int(np.nonzero(np.sign(steps) != (-1.0 if steps[0] < 0 else 1.0))[0][0])
        fix = (
            "sort the times; for repeated ones, t, index = torch.as_tensor(t).unique_consecutive(return_inverse=True), "
            "and [index] of the solution."
        )
        if steps[i] == 0 and abs(values[i]) * torch.finfo(dtype).eps > 1e-3:
            fix = f"large times in float64, because {dtype} may round different times to one. Otherwise {fix}"
        raise ValueError(
            f"t must be strictly increasing or strictly decreasing, but t[{i}]={values[i]:.9g} is followed by "
            f"t[{i + 1}]={values[i + 1]:.9g}. Fix: {fix}"
        )


def check_resolution(times: np.ndarray, dtype: torch.dtype) -> None:
    """Raise ValueError if the dtype of the state rounds large times too coarsely for the time span of the solve.

    The time span must be at least 4 times the rounding error of the largest time. If this rounding error exceeds 0.01
    units of time, the span must be at least 1000 times the error, or 1 / (16 eps) times for half precision, where eps
    is the machine epsilon.
    """
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        return
    span, rounding = abs(times[..., -1] - times[..., 0]), eps * abs(times).max(-1)
    needed = np.where(rounding > 0.01, min(1000.0, 1 / (16 * eps)), 4.0)
    is_coarse = (span > 0) & (span < needed * rounding)
    if is_coarse.any():
        lane = first_index(is_coarse)
        raise ValueError(
            f"t spans {span[lane]:.4g} up to {times[lane][-1]:.9g}, but the {dtype} of the state rounds the times of f "
            f"by {rounding[lane]:.2g}. Fix: count all times from the start, t - t[0] in float64, or y0.double()."
        )
