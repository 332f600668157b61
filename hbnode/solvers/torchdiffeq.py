"""torchdiffeq's methods: its solvers and its adjoint, with evaluations counted and failures named.

The state's error norm is the RMS over all its parts together, so a tuple ``(h, m)`` is solved step for step as
torchdiffeq solves the stacked tensor ``[h, m]``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torchdiffeq
from torch import Tensor

from hbnode.errors import MaxStepsError, NonFiniteError, SolverError, StepSizeUnderflowError
from hbnode.gradients import closed_over_leaves
from hbnode.nfe import NFE, Tally, in_backward_pass

ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")
SCIPY = ("scipy_solver",)
METHODS = (*ADAPTIVE, *FIXED, *SCIPY)
GRADIENTS = ("direct", "adjoint")

State = Tensor | tuple[Tensor, ...]


def solve(
    field: Callable[[Tensor, State], State],
    y0: State,
    t: Tensor,
    *,
    method: str,
    rtol: float,
    atol: float,
    gradient: str,
    options: dict[str, Any],
    adjoint_options: dict[str, Any] | None,
    event_fn: Callable | None,
    max_steps: int,
) -> tuple[State | tuple[Tensor, State], NFE]:
    """Solve with one of torchdiffeq's methods; the arguments are those of :func:`hbnode.odeint`, already checked."""
    options = _solver_options(options, method, t, event_fn)
    if not isinstance(y0, Tensor):
        options.setdefault("norm", _stacked_rms)
    if method in SCIPY and gradient == "direct" and _needs_gradient(field, y0, t):
        raise ValueError(
            "method='scipy_solver' leaves torch, so it has no direct gradient; expected gradient='adjoint'. "
            "Fix: pass gradient='adjoint', or solve under torch.no_grad()."
        )
    watched = _WatchedField(field, method=method, y0=y0, t=t, max_steps=max_steps, event=event_fn is not None)
    watched.check_start(y0, t[0])
    common = {"rtol": rtol, "atol": atol, "method": method, "options": options, "event_fn": event_fn}
    try:
        if gradient == "adjoint":
            if adjoint_options is None:
                adjoint_options = {"norm": "seminorm"}
            inherited = {name: value for name, value in options.items() if name != "norm"}
            solution = torchdiffeq.odeint_adjoint(
                watched,
                y0,
                t,
                **common,
                adjoint_options=inherited | adjoint_options,
                adjoint_params=watched.adjoint_parameters(t[0], y0),
            )
        else:
            solution = torchdiffeq.odeint(watched, y0, t, **common)
    except AssertionError as error:
        if not _raised_by_torchdiffeq(error):
            raise
        raise watched.failure(SolverError, f"torchdiffeq's {method} gave up: {error}") from error
    watched.check_solution(solution if event_fn is None else solution[1], t)
    return solution, watched.tally.nfe


class _WatchedField:
    """The field as torchdiffeq calls it: counts evaluations and steps, and stops a solve that has gone wrong."""

    def __init__(self, field: Callable, *, method: str, y0: State, t: Tensor, max_steps: int, event: bool) -> None:
        self.field = field
        self.method = method
        self.max_steps = max_steps
        self.tally = Tally(field)
        self.decreasing = len(t) > 1 and bool(t[1] < t[0])
        self.recent: deque[tuple[Tensor, State]] = deque(maxlen=32)  # the evaluations since the last step began
        self.first: tuple[Tensor, State, State] | None = None  # an evaluation made ahead of the solver
        self.step_size = math.nan
        self.attempts = {False: 0, True: 0}  # steps tried in the forward pass and in the backward pass
        self.autocast = _autocast_of(_first(y0).device.type)
        # torchdiffeq reports steps through these attributes, and warns of those that a method never calls.
        self.reports_steps = method not in SCIPY and not (event and method in FIXED)
        if method not in SCIPY:
            self.callback_step = self._before_step
            self.callback_step_adjoint = self._before_adjoint_step
        if method in ADAPTIVE:
            self.callback_accept_step = self.callback_accept_step_adjoint = lambda *_: self.tally.add("accepted")
            self.callback_reject_step = self.callback_reject_step_adjoint = lambda *_: self.tally.add("rejected")

    def __call__(self, t: Tensor, y: State) -> State:
        if self.first is not None:
            (t0, y0, value), self.first = self.first, None
            if _equal(y, y0) and bool(t == t0):
                return value
        value = self._evaluate(t, y)
        self.recent.append((t, value))
        if not self.reports_steps:
            self._check_evaluation(t, value)
        return value

    def _evaluate(self, t: Tensor, y: State) -> State:
        self.tally.add("evaluation")
        with self.autocast() if in_backward_pass() else nullcontext():
            return _like(self.field(t, y), y)

    def adjoint_parameters(self, t0: Tensor, y0: State) -> tuple[Tensor, ...]:
        """All tensors that the adjoint method must differentiate with respect to.

        The field's own parameters, and any other leaf that it closes over, seen in the graph of the solver's first
        evaluation: made here, handed to the solver when it asks for it.
        """
        if not torch.is_grad_enabled():
            return ()
        t0 = t0.detach().to(_first(y0).dtype)
        with torch.enable_grad():
            leaves, value = closed_over_leaves(lambda: self._evaluate(t0, _map(Tensor.detach, y0)))
        value = _map(Tensor.detach, value)
        self.first = (t0, y0, value)
        self.recent.append((t0, value))
        return tuple({id(p): p for p in (*_parameters(self.field), *leaves) if p.requires_grad}.values())

    def _before_step(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        self._check_step(t0, y0, dt, "state")

    def _before_adjoint_step(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        # The adjoint runs in the solver's own, increasing time where the forward solve went down.
        self._check_step(-t0 if self.decreasing else t0, y0, dt, "adjoint state")

    def _check_step(self, t0: Tensor, y0: State, dt: Tensor, what: str) -> None:
        """Called by torchdiffeq before each step of size ``dt`` from ``(t0, y0)``."""
        t0, dt = t0.detach(), dt.detach()
        self.step_size = float(dt)
        if not _finite(y0):
            self._blame_field()
            hint = "a field that grows without bound" if what == "state" else "a loss whose gradient is not finite"
            raise self.failure(NonFiniteError, f"the {what} is not finite. Look for: {hint}", t0)
        if bool((t0 + dt == t0) | (t0 - dt == t0)):
            self._blame_field()
            if self.step_size == 0:  # what torchdiffeq makes of an error estimate that is not a number
                raise self.failure(NonFiniteError, f"the {what}'s derivative is not finite. Look for: sqrt at 0", t0)
            raise self.failure(
                StepSizeUnderflowError,
                "the step size underflowed: no step is small enough for the tolerance. "
                "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func",
                t0,
            )
        in_backward = in_backward_pass()
        if self.attempts[in_backward] >= self.max_steps:
            raise self._too_many(t0)
        self.attempts[in_backward] += 1
        if self.method in FIXED:
            self.tally.add("accepted")
        self.recent.clear()

    def _blame_field(self) -> None:
        """Raise if the field returned anything non-finite since the last step began."""
        for t, value in self.recent:
            if not _finite(value):
                raise self.failure(
                    NonFiniteError,
                    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth "
                    "without bound (GHBNODE's activation bounds it)",
                    t,
                )

    def _check_evaluation(self, t: Tensor, value: State) -> None:
        """What stands in for :meth:`_check_step` where the method does not report its steps."""
        if not _finite(value):
            raise self.failure(NonFiniteError, "the field returned non-finite values", t)
        if self.tally.nfe.total > self.max_steps:
            raise self._too_many(t)

    def check_start(self, y0: State, t0: Tensor) -> None:
        """Tell a bad input from a bad field."""
        if not _finite(y0):
            raise self.failure(NonFiniteError, "the initial state is not finite. Fix: look at the block's input", t0)

    def check_solution(self, solution: State, t: Tensor) -> None:
        """Catch what no step could have caught: a bad last step, and scipy's silent early end."""
        if len(_first(solution)) != len(t):
            raise self.failure(
                SolverError, f"scipy stopped after {len(_first(solution))} of {len(t)} output times", t[-1]
            )
        if not _finite(solution):
            self._blame_field()
            raise self.failure(NonFiniteError, "the solution is not finite. Fix: use more steps or bound func", t[-1])
        self.recent.clear()

    def failure(self, kind: type[SolverError], message: str, t: Tensor | None = None) -> SolverError:
        """An error that knows where the solve was."""
        if t is None:
            t = self.recent[-1][0] if self.recent else torch.tensor(math.nan)
        return kind(
            f"{message} (method {self.method!r})",
            t=float(t.detach()),
            step_size=self.step_size,
            nfe=self.tally.nfe.total,
        )

    def _too_many(self, t: Tensor) -> SolverError:
        counted = "steps" if self.reports_steps else "evaluations"
        return self.failure(
            MaxStepsError,
            f"the solve needed more than max_steps={self.max_steps} {counted}. "
            "Fix: loosen rtol and atol, shorten the time span, or raise max_steps",
            t,
        )


def _solver_options(options: dict[str, Any], method: str, t: Tensor, event_fn: Callable | None) -> dict[str, Any]:
    """``options`` with our ``steps`` and ``land`` turned into the grid and times that torchdiffeq understands."""
    options = dict(options)
    if options.pop("land", False):
        if method not in ADAPTIVE or "step_t" in options:
            raise ValueError(
                f"options={{'land': True}} makes an adaptive method step onto the output times; got method={method!r}"
                f"{' beside step_t' if 'step_t' in options else ''}, expected one of {ADAPTIVE}. Fix: leave land out."
            )
        options["step_t"] = t.detach()
    steps = options.pop("steps", None)
    if steps is not None:
        if method not in FIXED:
            raise ValueError(
                f"options={{'steps': n}} sets a fixed grid, which method={method!r} does not have; "
                f"expected one of {FIXED}. Fix: choose one of these, or give a tolerance instead."
            )
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"options['steps'] must be an integer >= 1, got {steps!r}. Fix: steps per interval.")
        if "step_size" in options or "grid_constructor" in options:
            raise ValueError("options has steps beside step_size or grid_constructor. Fix: give one of them.")
        options["grid_constructor"] = lambda func, y0, t: _equal_steps(t, steps)
    if event_fn is not None and (method in SCIPY or (method in FIXED and "step_size" not in options)):
        raise ValueError(
            f"event_fn with method={method!r} is not possible"
            + (" without options={'step_size': dt}" if method in FIXED else "")
            + f"; expected an adaptive method, one of {ADAPTIVE}. Fix: method='dopri5'."
        )
    return options


def _equal_steps(t: Tensor, steps: int) -> Tensor:
    """Grid of ``steps`` equal steps in each interval of ``t``, differentiable in t, exact at the output times."""
    fractions = torch.arange(steps, dtype=t.dtype, device=t.device) / steps
    starts, lengths = t[:-1, None], t.diff()[:, None]
    return torch.cat([(starts + lengths * fractions).reshape(-1), t[-1:]])


def _stacked_rms(parts: tuple[Tensor, ...]) -> Tensor:
    """RMS over all elements of all parts, as if they were stacked in one tensor."""
    return torch.cat([part.reshape(-1) for part in parts]).pow(2).mean().sqrt()


def _needs_gradient(field: Callable, y0: State, t: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (t, *_parts(y0), *_parameters(field)))


def _parameters(field: Callable) -> list[Tensor]:
    """The parameters of the right-hand side, as far as ``field`` can name them."""
    if hasattr(field, "dynamics_parameters"):
        return field.dynamics_parameters()
    return list(field.parameters()) if isinstance(field, torch.nn.Module) else []


def _autocast_of(device_type: str) -> Callable[[], AbstractContextManager]:
    """A maker of contexts that repeat the autocast in force now, for evaluations in the backward pass."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype)


def _like(value: State, y: State) -> State:
    """The field's value checked to have the structure, shapes and dtype of the state."""
    if isinstance(y, Tensor):
        if isinstance(value, Tensor) and value.shape == y.shape:
            return _cast(value, y)
    elif isinstance(value, tuple) and len(value) == len(y):
        pairs = list(zip(value, y, strict=True))
        if all(isinstance(v, Tensor) and v.shape == part.shape for v, part in pairs):
            return tuple(_cast(v, part) for v, part in pairs)
    raise ValueError(
        f"the field returned {_describe(value)} for a state of {_describe(y)}; expected the same. "
        "Fix: return d state/dt with the structure and shapes of the state."
    )


def _cast(value: Tensor, y: Tensor) -> Tensor:
    """``value`` in the dtype of the state: autocast may have computed it in a smaller one."""
    if value.dtype == y.dtype:
        return value
    if torch.is_autocast_enabled(y.device.type):
        return value.to(y.dtype)
    raise TypeError(
        f"the field returned {value.dtype} for a state of {y.dtype}; expected the same dtype. "
        "Fix: convert the field (field.double(), field.float()) or the input to one dtype."
    )


def _describe(state: object) -> str:
    if isinstance(state, Tensor):
        return f"shape {tuple(state.shape)}"
    if isinstance(state, tuple):
        return "(" + ", ".join(_describe(part) for part in state) + ")"
    return f"type {type(state).__name__}"


def _parts(state: State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def _first(state: State) -> Tensor:
    return _parts(state)[0]


def _map(function: Callable[[Tensor], Tensor], state: State) -> State:
    return function(state) if isinstance(state, Tensor) else tuple(function(part) for part in state)


def _finite(state: State) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in _parts(state))


def _equal(a: State, b: State) -> bool:
    return len(_parts(a)) == len(_parts(b)) and all(
        bool(torch.equal(x, y)) for x, y in zip(_parts(a), _parts(b), strict=True)
    )


def _raised_by_torchdiffeq(error: BaseException) -> bool:
    """Whether the innermost frame of an error is torchdiffeq's, rather than the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("torchdiffeq.")
