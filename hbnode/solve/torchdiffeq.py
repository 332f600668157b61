"""torchdiffeq's methods: its solvers and its adjoint, with evaluations and steps counted and failures named.

The state's error norm is the RMS over all its parts together, so a tuple ``(h, m)`` is solved step for step as
torchdiffeq solves the stacked tensor ``[h, m]``.
"""

from __future__ import annotations

import difflib
import functools
import math
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hbnode._checks import CHANGES_INPUT
from hbnode._closures import closed_over_leaves, own_parameters, refuse_unknown
from hbnode._state import State, all_finite, apply, is_equal, is_finite, like, parts
from hbnode._torch import backward_pass
from hbnode.errors import MaxStepsError, NonFiniteError, SolverError, StepSizeUnderflowError
from hbnode.nfe import Tally, open_records
from hbnode.signal import refuse_queries_outside
from hbnode.solve.settings import ADAMS, ADAPTIVE, ARGUMENTS, FIXED, SCIPY, Settings
from hbnode.solve.term import Snapshot, solving

CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")  # names that torchdiffeq looks for

Field = Callable[..., State]
EventFn = Callable[[Tensor, Any], Tensor]

_GRID = ("step_size", "grid_constructor")
_ADAPTIVE = ["min_step", "max_step", "first_step", "safety", "ifactor", "dfactor", "norm", "step_t", "jump_t", "dtype"]
_OPTIONS = {
    **dict.fromkeys(ADAPTIVE, tuple(_ADAPTIVE)),
    **dict.fromkeys(FIXED, (*_GRID, "norm", "interp", "perturb")),
    **dict.fromkeys(ADAMS, (*_GRID, "norm", "interp", "perturb", "max_iters", "max_order")),
    **dict.fromkeys(SCIPY, ("norm", "solver", "min_step", "max_step")),
}
_UNDERFLOW = (
    "the step size underflowed: no step is small enough for the tolerance. "
    "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func"
)
_ESTIMATE = (
    "the error estimate is not finite: the {}'s derivative is not, or is too large for its dtype. "
    "Look for: a derivative like that of sqrt at 0"
)


def solve(field: Field, y0: State, t: Tensor, settings: Settings, tally: Tally, snapshot: Snapshot) -> State:
    """Solve with one of torchdiffeq's methods; the arguments are those of :func:`hbnode.odeint`, already checked."""
    solution = _solve(field, y0, t, settings, tally, snapshot, None)
    # the backward pass of the adjoint needs its own, and the caller may change his in place
    return apply(torch.clone, solution) if settings.gradient == "adjoint" else solution


def find_event(
    field: Field, y0: State, t: Tensor, settings: Settings, tally: Tally, snapshot: Snapshot, event_fn: EventFn
) -> tuple[Tensor, State]:
    """:func:`solve` until an event: its time, and the states at the start and there."""
    time, states = _solve(field, y0, t, settings, tally, snapshot, event_fn)
    return time.detach(), states  # the gradient of the event's time is odeint_event's business


def _solve(
    field: Field, y0: State, t: Tensor, settings: Settings, tally: Tally, snapshot: Snapshot, event_fn: EventFn | None
) -> Any:
    """What torchdiffeq answers; its failures are named."""
    method, torchdiffeq = settings.method, _torchdiffeq()
    options = _options(settings, t, event=event_fn is not None)
    watched = WatchedField(field, y0, t, settings, tally, snapshot, event=event_fn is not None)
    given: dict[str, Any] = {"rtol": settings.rtol, "atol": settings.atol, "method": method}
    given["options"] = {"norm": _norm(field)} | options
    if event_fn is not None:
        given["event_fn"] = lambda t, y: _event_value(event_fn(t, y))
    with solving(snapshot, watched.device):
        try:
            if settings.gradient == "adjoint":
                given["adjoint_options"] = _adjoint_options(options, settings, decreasing=watched.decreasing)
                given["adjoint_params"] = watched.leaves(t, y0, perturb=options.get("perturb", False))
                solution = torchdiffeq.odeint_adjoint(watched, y0, t, **given)
            else:
                if method in SCIPY and torch.is_grad_enabled():
                    _refuse_gradient(t, *parts(y0), *watched.leaves(t, y0))
                solution = torchdiffeq.odeint(watched, y0, t, **given)
        except (AssertionError, RuntimeError) as error:
            if "Reached maximum number of iterations" in str(error):
                raise watched.failure(MaxStepsError, f"no event was found by {method}: {error}") from error
            if not _is_assertion_of_torchdiffeq(error):
                raise
            raise watched.failure(SolverError, f"torchdiffeq's {method} gave up: {error}") from error
        watched.check_solution(solution if event_fn is None else solution[1], t)
    return solution


def _torchdiffeq() -> Any:
    """The library, which has no types; imported on the first solve, because it imports scipy."""
    with torch.inference_mode(False):  # else its tableaus would be tensors that no graph may save, ever
        import torchdiffeq
    return torchdiffeq


def _is_assertion_of_torchdiffeq(error: BaseException) -> bool:
    """Whether it is an assertion that failed in torchdiffeq, rather than in the user's code."""
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return isinstance(error, AssertionError) and innermost.f_globals.get("__name__", "").startswith("torchdiffeq.")


def _refuse_gradient(*tensors: Tensor) -> None:
    """Refuse to leave torch for scipy if a gradient would be lost, that of a closure included."""
    if any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "method='scipy_solver' leaves torch, so it has no direct gradient; expected gradient='adjoint'. "
            "Fix: pass gradient='adjoint', or solve under torch.no_grad()."
        )


def _event_value(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"event_fn must return a tensor, got {type(value).__name__}. Fix: compute it from the state.")
    return value


def _norm(field: Field) -> Callable[[State], Tensor]:
    """The error norm: RMS over all elements; where rows end with an integral, the larger of its RMS and the others'."""
    separate = getattr(field, "separate", 0)

    def larger(rows: Any) -> Tensor:  # by a norm that has a gradient at 0, where an integral starts
        pieces = rows[:, :-separate], rows[:, -separate:]
        return torch.maximum(*(torch.linalg.vector_norm(x) / max(x.numel(), 1) ** 0.5 for x in pieces))

    return larger if separate else _rms


def _rms(state: State) -> Tensor:
    """RMS over all elements of all parts, as if they were stacked in one tensor; 0 for an empty batch."""
    flat = state if isinstance(state, Tensor) else torch.cat([part.reshape(-1) for part in state])
    return flat.pow(2).mean().sqrt() if flat.numel() else flat.sum()


class WatchedField:
    """The field as torchdiffeq calls it: counts evaluations and steps, and stops a solve that has gone wrong."""

    def __init__(
        self, field: Field, y0: State, t: Tensor, settings: Settings, tally: Tally, snapshot: Snapshot, *, event: bool
    ) -> None:
        self.field, self.tally, self.snapshot = field, tally, snapshot
        self.method, self.max_steps = settings.method, settings.max_steps
        self.limit = self.max_steps + max(len(t) - 2, 0)  # the adjoint takes at least one step in each output interval
        heard = CALLBACKS if self.method in ADAPTIVE else CALLBACKS[:1] if self.method in FIXED else ()
        self.heard = (*heard, *(f"{name}_adjoint" for name in heard))
        self.reports_steps = bool(heard) and not (event and self.method in FIXED)  # else max_steps limits evaluations
        self.forward_pass = backward_pass() if settings.gradient == "adjoint" else None  # that of an adjoint around it
        self.known: frozenset[int] = frozenset()  # ids of the tensors that the adjoint differentiates
        finite, self.decreasing = torch.stack([all_finite(y0), (t[:2].diff() < 0).any()]).tolist()
        self.dtype, self.device = parts(y0)[0].dtype, parts(y0)[0].device.type
        self.autocast = torch.get_autocast_dtype(self.device) if torch.is_autocast_enabled(self.device) else None
        self.recent: deque[tuple[Tensor, State]] = deque(maxlen=32)  # the evaluations since the last step began
        self.first: tuple[Tensor, State, State] | None = None  # an evaluation made ahead of the solver
        self.step_size = math.nan
        self.tried: Counter[int] = Counter()  # steps in each pass
        warn_of_callbacks(field, self.method, [name for name in CALLBACKS if name not in heard])
        if not finite:
            raise self.failure(NonFiniteError, "the initial state is not finite. Fix: look at the block's input", t[0])

    def __call__(self, t: Tensor, y: State) -> State:
        """The derivative, of an evaluation made ahead or a new one."""
        # a scalar state and its time are promoted by times of another dtype
        t, y = t.to(self.dtype), apply(lambda part: part.to(self.dtype), y)
        if self.first is not None:
            (t0, y0, value), self.first = self.first, None
            if is_equal((t, *parts(y)), (t0, *parts(y0))):
                return value
        again = self.forward_pass is not None and self.forward_pass != backward_pass()
        value = self._evaluate_again(t, y) if again else self._evaluate(t, y)
        self.recent.append((t.detach(), apply(Tensor.detach, value)))
        if not self.reports_steps:
            if not is_finite(value):
                raise self.failure(NonFiniteError, "the field returned non-finite values", t)
            self._limit(t, self.tally.nfe.total, "evaluations")
        return value

    def _evaluate(self, t: Tensor, y: State) -> State:
        self.tally.add("evaluation")
        # a leaf that is changed in place, or a tensor without a version, is refused or missed by torch itself
        if any(part.is_leaf and (part.requires_grad or part.is_inference()) for part in parts(y)):
            y = apply(torch.clone, y)
        versions = _versions(y)
        autocast = self.autocast and torch.autocast(self.device, dtype=self.autocast, cache_enabled=False)
        with autocast or nullcontext():
            value = like(self.field(t, y), y)
        if versions != _versions(y):
            raise ValueError(CHANGES_INPUT)
        return value

    def _evaluate_again(self, t: Tensor, y: State) -> State:
        """In the backward pass, as in the forward pass; it may depend on nothing that the adjoint does not know."""
        with self.snapshot, torch.autocast(self.device, enabled=False):
            if not torch.is_grad_enabled():  # for the gradient of an output time
                return self._evaluate(t, y)
            leaves, value = closed_over_leaves(lambda: self._evaluate(t, y), (t, *parts(y)))
        refuse_unknown(leaves, self.known)
        return value

    def leaves(self, t: Tensor, y0: State, *, perturb: bool = False) -> tuple[Tensor, ...]:
        """All tensors that the adjoint method must differentiate with respect to.

        The field's own parameters, and any other leaf that it closes over, seen in the graph of the solver's first
        evaluation: made here, handed to the solver when it asks for it.
        """
        if not torch.is_grad_enabled():
            return ()
        t0, end = t[0].detach().to(self.dtype), t[-1].detach().to(self.dtype)
        t0 = torch.nextafter(t0, end) if perturb else t0  # an option that keeps away from the start itself
        y0 = apply(lambda part: part.detach().requires_grad_(), y0)
        leaves, value = closed_over_leaves(lambda: self._evaluate(t0, y0), parts(y0))
        self.first = (t0, apply(Tensor.detach, y0), apply(Tensor.detach, value))
        self.recent.append((t0, self.first[2]))
        found = {id(p): p for p in (*own_parameters(self.field), *leaves) if p.requires_grad}
        self.known = frozenset(found)
        return tuple(found.values())

    def __getattr__(self, name: str) -> Callable[[Tensor, State, Tensor], None]:
        """The callbacks that the method calls; torchdiffeq warns of others."""
        if name not in self.__dict__.get("heard", ()):
            raise AttributeError(name)
        return functools.partial(self._hear, name)

    def _hear(self, name: str, t0: Tensor, y0: State, dt: Tensor) -> None:
        """One of the callbacks: a step of size ``dt`` from ``(t0, y0)`` begins, is accepted or is rejected."""
        event, in_adjoint = name.removesuffix("_adjoint"), name.endswith("_adjoint")
        if in_adjoint and self.decreasing:  # where a solve goes down, torchdiffeq's adjoint runs in one that goes up
            t0 = -t0
        if event == "callback_step":
            self._begin_step(t0.detach(), y0, dt.detach(), "adjoint state" if in_adjoint else "state")
        if event != "callback_step" or self.method in FIXED:  # which accept every step
            accepted = event != "callback_reject_step"
            self.tally.add("accepted" if accepted else "rejected")
            if open_records:
                in_time = getattr(self.field, "in_time", lambda *step: step)  # of a field whose time is rescaled
                start, size = in_time(t0, dt)
                self.tally.report(start, size, accepted)
        if (callback := getattr(self.field, name, None)) is not None:
            callback(t0, y0, dt)

    def _begin_step(self, t0: Tensor, y0: State, dt: Tensor, what: str) -> None:
        """Stop at a state that is not finite, a step too small to advance the time, and one step too many."""
        numbers = [x.double().reshape(()) for x in (dt, all_finite(y0), (t0 + dt == t0) | (t0 - dt == t0))]
        self.step_size, finite, stuck = torch.stack(numbers).tolist()  # the device is waited for once
        if not finite:
            self._blame_field()
            hint = "a field that grows without bound" if what == "state" else "a loss whose gradient is not finite"
            raise self.failure(NonFiniteError, f"the {what} is not finite. Look for: {hint}", t0)
        if self.method in ADAPTIVE:
            if stuck:
                self._blame_field()
                if self.step_size == 0:  # what torchdiffeq makes of an error estimate that is not a number
                    raise self.failure(NonFiniteError, _ESTIMATE.format(what), t0)
                raise self.failure(StepSizeUnderflowError, _UNDERFLOW, t0)
            self.tried[backward_pass()] += 1
            self._limit(t0, self.tried[backward_pass()], "steps")
        self.recent.clear()

    def _limit(self, t: Tensor, count: int, counted: str) -> None:
        if count > self.limit:
            message = f"the solve needed more than max_steps={self.max_steps} {counted}"
            fix = "Fix: loosen rtol and atol, shorten the time span, or raise max_steps"
            raise self.failure(MaxStepsError, f"{message}. {fix}", t)

    def _blame_field(self) -> None:
        """Raise if the field returned anything non-finite since the last step began."""
        for t, value in self.recent:
            if not is_finite(value):
                hint = "log, sqrt or a division in func, or growth without bound (GHBNODE's activation bounds it)"
                raise self.failure(NonFiniteError, f"the field returned non-finite values. Look for: {hint}", t)

    def check_solution(self, solution: State, t: Tensor) -> None:
        """Catch what no step could have caught: a bad last step, and scipy's silent early end."""
        got = len(parts(solution)[0])
        if got != len(t):
            raise self.failure(SolverError, f"scipy stopped after {got} of {len(t)} output times", t[-1])
        if not is_finite(solution):
            self._blame_field()
            raise self.failure(NonFiniteError, "the solution is not finite. Fix: use more steps or bound func", t[-1])
        self.recent.clear()
        self.first = None

    def failure(self, kind: type[SolverError], message: str, t: Tensor | None = None) -> SolverError:
        """An error that knows where the solve was; a signal that was asked for too much is named instead."""
        refuse_queries_outside()
        if t is None:
            t = self.recent[-1][0] if self.recent else torch.tensor(math.nan)
        message = f"{message} (method {self.method!r})"
        return kind(message, t=float(t.detach()), step_size=self.step_size, nfe=self.tally.nfe.total)


def _versions(y: State) -> list[int]:
    """Those of the tensors, which tell of changes in place; tensors of inference mode have none."""
    return [0 if part.is_inference() else part._version for part in parts(y)]


def warn_of_callbacks(field: Callable[..., Any], method: str | None, names: Sequence[str]) -> None:
    """Say which of these callbacks a field has: its method never calls them."""
    own, kind = getattr(field, "__dict__", {}), type(field)
    unheard = [name for name in names if name in own or hasattr(kind, name)]
    if unheard:
        message = f"method={method!r} does not call {', '.join(unheard)} of the field. Fix: method='dopri5'."
        warnings.warn(message, stacklevel=2)


def _options(settings: Settings, t: Tensor, *, event: bool) -> dict[str, Any]:
    """The options of a solve: those given, and those that our arguments become."""
    method, steps, exact = settings.method, settings.steps, settings.save == "exact"
    options, times = _checked_options(settings.options, method, "options"), t.detach()
    on_grid = next((name for name in _GRID if name in options), None)
    if steps is not None and method not in FIXED:
        raise ValueError(f"steps={steps} is a fixed grid, which method={method!r} does not have. Fix: method='rk4'.")
    if steps is not None and on_grid:
        raise ValueError(f"steps was given, and options has one of {_GRID}. Fix: give one of them.")
    if settings.jump_times and method not in ADAPTIVE:
        fix = "Fix: method='dopri5', or the jumps among the output times."
        raise ValueError(f"jump_times are for adaptive steps, got method={method!r}. {fix}")
    if settings.jump_times and "jump_t" in options:
        raise ValueError("jump_times was given, and options has 'jump_t'. Fix: jump_times alone.")
    if exact and (method in SCIPY or on_grid):
        what = f"options={{{on_grid!r}: ...}}" if on_grid else f"method={method!r}"
        raise ValueError(f"save='exact' is not possible with {what}. Fix: leave save out.")
    if event and (method in SCIPY or (method in FIXED and "step_size" not in options)):
        without = " without options={'step_size': dt}" if method in FIXED else ""
        expected = f"expected an adaptive method, one of {ADAPTIVE}. Fix: method='dopri5'."
        raise ValueError(f"event_fn with method={method!r} is not possible{without}; {expected}")
    if steps is not None:
        options["grid_constructor"] = functools.partial(_equal_steps, steps=steps)
    if settings.jump_times:
        options["jump_t"] = torch.tensor(settings.jump_times, dtype=times.dtype, device=times.device)
    if exact and method in ADAPTIVE:  # torchdiffeq refuses times that are also jumps
        options["step_t"] = times[~torch.isin(times, options["jump_t"].to(times))] if "jump_t" in options else times
    return options


def _equal_steps(func: object, y0: Tensor, t: Tensor, *, steps: int) -> Tensor:
    """Grid of ``steps`` equal steps in each interval of ``t``, differentiable in t, exact at the output times."""
    fractions = torch.arange(steps, dtype=t.dtype, device=t.device) / steps
    starts, lengths = t[:-1, None], t.diff()[:, None]
    return torch.cat([(starts + lengths * fractions).reshape(-1), t[-1:]])


def _adjoint_options(own: dict[str, Any], settings: Settings, *, decreasing: bool) -> dict[str, Any]:
    """The options of the backward solve: those of the forward one, but for its norm, and the ones given."""
    given = {"norm": "seminorm"} if settings.adjoint_options is None else settings.adjoint_options
    given = _checked_options(given, settings.method, "adjoint_options")
    if given.get("norm", "seminorm") != "seminorm" and not callable(given["norm"]):
        raise ValueError(
            f"adjoint_options['norm'] must be 'seminorm' or a function, got {given['norm']!r}. "
            "Fix: leave the norm out for torchdiffeq's own, over all of the adjoint's state."
        )
    dropped = {"norm", *(_GRID if any(name in given for name in _GRID) else ())}
    options = {name: value for name, value in own.items() if name not in dropped} | given
    turned = {"step_t", "jump_t"} & options.keys() if decreasing else ()  # torchdiffeq negates them once, times twice
    return options | {name: -options[name] for name in turned}


def _checked_options(given: Any, method: str | None, name: str) -> dict[str, Any]:
    """A copy of the options, refused where the method does not know them."""
    if given is not None and not isinstance(given, dict):
        example = {"first_step": 0.1} if method in ADAPTIVE else {"step_size": 0.1} if method in FIXED else {}
        raise TypeError(f"{name} must be a dict, got {type(given).__name__}. Fix: {name}={example}.")
    options, known = dict(given or {}), _OPTIONS[method or ""]
    unknown = [option for option in options if option not in known]
    if unknown:
        what = f"{name} has {unknown}, which method={method!r} does not know; expected some of {known}"
        raise ValueError(f"{what}. Fix: {_instead(unknown[0], known)}.")
    for option in ("step_size", "first_step", "max_step"):
        if options.get(option) is not None and not options[option] > 0:
            raise ValueError(f"{name}[{option!r}] must be positive, got {options[option]!r}. Fix: a length of time.")
    if all(option in options for option in _GRID):
        raise ValueError(f"{name} has more than one of {_GRID}. Fix: give one of them.")
    return options


def _instead(option: str, known: Sequence[str]) -> str:
    """What to write in place of an unknown option."""
    if option in ARGUMENTS and option != "jump_t":
        return ARGUMENTS[option]
    if option in _GRID:
        return "method='rk4' or another with fixed steps"
    if option in _ADAPTIVE:
        return "method='dopri5' or another with adaptive steps"
    if option == "max_nfe":
        return "method=None or another native method"
    near = difflib.get_close_matches(option, known, 1)
    return f"{near[0]!r}" if near else "leave it out"
