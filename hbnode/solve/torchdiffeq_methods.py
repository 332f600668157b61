"""torchdiffeq's solvers and adjoint, with counts of function evaluations and steps, and with hbnode's errors.

A state is flattened to one tensor, and its error norm is the root mean square (RMS) over all elements. A solve of a
tuple ``(h, m)`` therefore takes the same steps as torchdiffeq takes for ``torch.stack([h, m])``.
"""

from __future__ import annotations

import functools
import math
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hbnode import _torch, errors
from hbnode._torch import backward_pass
from hbnode._tree import State, all_finite, is_finite, parts
from hbnode.nfe import Tally, open_records
from hbnode.signal import refuse_queries_outside
from hbnode.solve.adjoints import closed_over_leaves, evaluate_known, own_parameters, owning
from hbnode.solve.methods import TORCHDIFFEQ_METHODS
from hbnode.solve.settings import GRID, Settings, checked_options
from hbnode.solve.term import ODETerm, Snapshot, solving

CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")  # torchdiffeq's names
FIELD = "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound"
STATE = "the {} is not finite, or its error. Look for: growth without bound, sqrt at 0, or a loss of infinite gradient"
UNDERFLOW = (
    "the step size underflowed. Fix: method='rodas5p' if func is stiff, loosen rtol and atol, use float64, or look for "
    "a jump in func"
)
TOO_MANY = "the solve needed more than max_steps={} {}. Fix: loosen rtol and atol, a shorter span, or more max_steps"


def solve(field: Any, y0: State, t: Tensor, settings: Settings, counter: Tally, snapshot: Snapshot) -> State:
    """Return the trajectory of a solve with one of torchdiffeq's methods; the arguments have been checked."""
    method, is_adjoint = settings.method, settings.gradient == "adjoint"
    is_scipy = TORCHDIFFEQ_METHODS[method].kind == "scipy"
    term = ODETerm(field, y0, counter, second_order=False, keeps_shape=isinstance(y0, Tensor))
    (row,), options = term.flatten(y0), all_options(settings, t.detach())
    counted = CountedField(term, row, t, settings, snapshot)
    given: dict[str, Any] = {"rtol": settings.rtol, "atol": settings.atol, "method": method}
    given["options"] = options | {"norm": functools.partial(norm, weakref.proxy(term), options.get("norm"))}

    with solving(snapshot, row.device.type):
        leaves: tuple[Tensor, ...] = ()
        if torch.is_grad_enabled() and (is_adjoint or is_scipy):
            leaves = counted.leaves(t, row, options.get("perturb", False))
            snapshot.changed()  # removes counters from the snapshot
        if is_adjoint:
            given |= {"adjoint_params": leaves, "adjoint_options": adjoint_options(options, settings, counted)}
        elif is_scipy and torch.is_grad_enabled() and any(x.requires_grad for x in (t, row, *leaves)):
            fix = "gradient='adjoint', or solve under torch.no_grad()"
            raise ValueError(f"method='scipy_solver' runs outside torch and has no direct gradient. Fix: {fix}.")
        integrate = original().odeint_adjoint if is_adjoint else original().odeint
        try:
            rows = integrate(weakref.proxy(counted), row, t, **given)
        except AssertionError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("torchdiffeq."):
                raise
            message = f"torchdiffeq's {method} gave up: {error}. Fix: method='tsit5', without options"
            raise counted.failure(errors.SolverError, message) from error
        counted.check_solution(rows, t)
    # the caller may change the outputs in place, and the backward pass of the adjoint needs them
    solution = term.unflatten((rows.clone() if is_adjoint else rows,), (len(rows),))
    return owning(solution, [counted], is_first_order=True) if is_adjoint else solution


@functools.cache
def original() -> SimpleNamespace:
    """Return a namespace with the functions of the installed torchdiffeq.

    torchdiffeq is imported here and not with hbnode, because it imports scipy. The namespace does not change if a
    program replaces torchdiffeq or its functions by :mod:`hbnode.torchdiffeq`.
    """
    with torch.inference_mode(False):  # autograd cannot save tensors that were created in inference mode
        import torchdiffeq
    return SimpleNamespace(**vars(torchdiffeq))


def solver_of(method: str | None) -> Any:
    """Return torchdiffeq's solver class for a method, or None if it has none; raise TypeError unless it is a string."""
    if method is not None and not isinstance(method, str):
        raise TypeError(f"method must be a name, got {method!r}. Fix: method='dopri5'.")
    return original()._impl.adjoint.SOLVERS.get(method)


def step_events(method: str | None) -> dict[str, str]:
    """Return a dict that maps the names of torchdiffeq's callbacks after a step to ``"accepted"`` or ``"rejected"``.

    Methods with fixed steps have no such callbacks; their callback before a step counts as accepted.
    """
    names: set[str] = getattr(solver_of(method), "valid_callbacks", set)()
    if "callback_accept_step" in names:
        return {"callback_accept_step": "accepted", "callback_reject_step": "rejected"}
    return {"callback_step": "accepted"} if "callback_step" in names else {}


def count_step(
    counter: Tally, event: str, t0: Tensor, dt: Tensor, in_time: Callable[..., tuple[Tensor, Tensor]] | None = None
) -> None:
    """Count a step of size ``dt`` from ``t0``; if time is rescaled, ``in_time`` converts both to the user's time.

    ``event`` is ``"accepted"`` or ``"rejected"``.
    """
    counter.add(event)
    if open_records:
        counter.report(*(in_time(t0, dt) if in_time else (t0, dt)), event == "accepted")


def norm(term: Any, own: Callable[[Any], Tensor] | None, row: Tensor) -> Tensor:
    """Return the error norm of a flat state ``row``: the user's norm ``own``, or the RMS of all elements if it is None.

    If the state ends with an integral, the norm is the larger one of the RMS of the integral and of the other elements.
    """
    if own is not None:
        return own(term.unflatten((row,)))
    if len(term.error_groups) == 1:
        return row.pow(2).mean().sqrt() if row.numel() else row.sum()
    pieces = [row[group] for group in term.error_groups]  # vector_norm has a finite gradient at 0
    return torch.maximum(*(torch.linalg.vector_norm(x) / max(x.numel(), 1) ** 0.5 for x in pieces))


class CountedField:
    """A wrapper of the field for torchdiffeq that counts evaluations and steps, and raises hbnode's errors."""

    def __init__(self, term: ODETerm, row: Tensor, t: Tensor, settings: Settings, snapshot: Snapshot) -> None:
        self.term, self.counter, self.snapshot, self.settings = term, term.counter, snapshot, settings
        self.method, self.dtype, self.listed = settings.method, row.dtype, TORCHDIFFEQ_METHODS[settings.method]
        self.limit = settings.max_steps + max(len(t) - 2, 0)  # the adjoint takes at least one step per output interval
        callbacks, own = solver_of(self.method).valid_callbacks(), cast(Any, weakref.proxy(self))
        warn_of_callbacks(term.field, self.method, [name for name in CALLBACKS if name not in callbacks])
        for name in (*callbacks, *(f"{name}_adjoint" for name in callbacks)):
            setattr(self, name, functools.partial(CountedField._call_back, own, name))
        self.events = step_events(self.method)  # if empty, max_steps limits evaluations instead of steps
        self.forward_pass = backward_pass()  # >= 0 if the backward pass of an outer adjoint runs this solve
        self.known: frozenset[int] = frozenset()  # ids of the leaf tensors whose gradients the adjoint computes
        self.recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=32)  # times and values of f in this step
        self.first: tuple[Tensor, Tensor, Tensor] | None = None  # time, state and value of f at the start of the solve
        self.start = t[0].detach(), row.detach()
        self.step_size, self.tried = math.nan, Counter[int]()  # attempted steps by backward pass
        finite, self.is_down = torch.stack([all_finite(row), (t[:2].diff() < 0).any()]).tolist()
        if not finite:
            message = "the initial state is not finite. Fix: look at the block's input"
            raise self.failure(errors.NonFiniteError, message, t[0])

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the value of the field; reuse the value that :meth:`leaves` computed if the arguments are equal."""
        t, y = t.to(self.dtype), y.to(self.dtype)  # times of a wider dtype would change the dtype of a scalar state
        first, self.first = self.first, None
        if first is not None and torch.equal(t, first[0]) and torch.equal(y, first[1]):
            return first[2]
        in_backward = self.settings.gradient == "adjoint" and self.forward_pass != backward_pass()
        value = self._evaluate_in_backward(t, y) if in_backward else self._evaluate(t, y)
        self.recent.append((t.detach(), value.detach()))
        if not self.events:
            if not is_finite(value):
                raise self.failure(errors.NonFiniteError, FIELD, t)
            self._limit(t, self.counter.nfe.total, "evaluations")
        return value

    def _evaluate(self, t: Tensor, y: Tensor) -> Tensor:
        return self.term(t, y.clone() if y.is_leaf and y.requires_grad else y)  # f may change it in place

    def _evaluate_in_backward(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the value of the field in the backward pass, computed with the parameters of the forward pass.

        Raise ValueError if the value depends on leaf tensors for which the adjoint computes no gradient.
        """
        with self.snapshot, torch.autocast(y.device.type, enabled=False, cache_enabled=False):
            if not torch.is_grad_enabled():  # for the gradient of an output time
                return self._evaluate(t, y)
            return evaluate_known(lambda: self._evaluate(t, y), (t, y), self.known)

    def leaves(self, t: Tensor, row: Tensor, perturb: bool) -> tuple[Tensor, ...]:
        """Return the leaf tensors for which the adjoint must compute gradients.

        These are the field's parameters, and all leaf tensors in the graph of an evaluation at the start. The next call
        of the field with equal arguments reuses the value of this evaluation.
        """
        t0, end, y0 = t[0].detach().to(self.dtype), t[-1].detach().to(self.dtype), row.detach().requires_grad_()
        t0 = torch.nextafter(t0, end) if perturb else t0  # the option "perturb" evaluates just after the start
        leaves, value = closed_over_leaves(lambda: self._evaluate(t0, y0), (y0,), is_dense=True)
        self.first = (t0, y0.detach(), value.detach())
        self.recent.append((t0, value.detach()))
        found = {id(p): p for p in (*own_parameters(self.term.field), *leaves) if p.requires_grad}
        self.known = frozenset(found)
        return tuple(found.values())

    def _call_back(self, name: str, t0: Tensor, y0: State, dt: Tensor) -> None:
        """Handle torchdiffeq's callback ``name``, called before or after a step of size ``dt`` from ``(t0, y0)``.

        A finished step is counted. Before a step, the state and the step size are checked.
        """
        in_adjoint, called = name.endswith("_adjoint"), name.removesuffix("_adjoint")
        t0 = -t0 if in_adjoint and self.is_down else t0  # torchdiffeq's adjoint negates decreasing times
        if called == "callback_step":
            self._begin_step(t0.detach(), y0, dt.detach(), "adjoint state" if in_adjoint else "state")
        if called in self.events:
            count_step(self.counter, self.events[called], t0, dt, getattr(self.term.field, "_in_time", None))
        if (callback := getattr(self.term.field, name, None)) is not None:
            callback(t0, y0 if in_adjoint else self.term.unflatten((y0,)), dt)  # type: ignore[arg-type] # a flat state

    def _begin_step(self, t0: Tensor, y0: State, dt: Tensor, what: str) -> None:
        """Check a step before torchdiffeq takes it.

        Raise an error if the state is not finite, the step is too small, or there are too many steps. ``what`` names
        the state in the error message.
        """
        numbers = [x.to(dt).reshape(()) for x in (dt, all_finite(y0), (t0 + dt == t0) | (t0 - dt == t0))]
        self.step_size, finite, stuck = torch.stack(numbers).tolist()  # one check, so that a GPU is synchronised once
        is_adaptive = self.listed.kind == "adaptive"
        if not finite or (is_adaptive and self.step_size == 0):  # an error estimate of NaN makes the step size 0
            raise self.failure(errors.NonFiniteError, STATE.format(what), t0)
        if is_adaptive:
            if stuck:
                y, f, start = (
                    float(x.square().mean().sqrt()) for x in (*parts(y0)[:1], self.recent[-1][1], self.start[1])
                )
                if not what.startswith("adjoint") and errors.diverges(y, f, start, float(abs(t0 - self.start[0]))):
                    raise self.failure(errors.DivergenceError, errors.DIVERGES.format(y, y / f), t0)
                raise self.failure(errors.StepSizeUnderflowError, UNDERFLOW, t0)
            self.tried[backward_pass()] += 1
            self._limit(t0, self.tried[backward_pass()], "steps")
        self.recent.clear()

    def _limit(self, t: Tensor, count: int, counted: str) -> None:
        if count > self.limit:
            raise self.failure(errors.MaxStepsError, TOO_MANY.format(self.settings.max_steps, counted), t)

    def check_solution(self, rows: Tensor, t: Tensor) -> None:
        """Raise an error if the solution is not finite, or if scipy's solver stopped before the last time.

        torchdiffeq's callbacks do not report this.
        """
        if len(rows) != len(t):
            message = f"scipy stopped after {len(rows)} of {len(t)} output times. Fix: method='dopri5'"
            raise self.failure(errors.SolverError, message, t[-1])
        if not is_finite(rows):
            message = "the solution is not finite. Fix: use more steps or bound func"
            raise self.failure(errors.NonFiniteError, message, t[-1])
        self.recent.clear()
        self.first = None

    def failure(self, kind: type[errors.SolverError], message: str, t: Tensor | None = None) -> errors.SolverError:
        """Return an error with the time, step size and evaluations of the solve.

        If a recent value of the field is not finite, the error reports this cause instead. Raise ValueError if the
        field called a Signal outside its samples.
        """
        refuse_queries_outside()
        for time, value in self.recent:
            if not is_finite(value):
                kind, message, t = errors.NonFiniteError, FIELD, time
                break
        t = t if t is not None else self.recent[-1][0] if self.recent else torch.tensor(math.nan)
        message = f"{message} (method {self.method!r})"
        return kind(message, t=float(t.detach()), step_size=self.step_size, nfe=self.counter.nfe.total)


def warn_of_callbacks(field: Callable[..., Any], method: str | None, names: Sequence[str]) -> None:
    """Warn about the callbacks in ``names`` that the field has, because ``method`` never calls them."""
    own, kind = getattr(field, "__dict__", {}), type(field)
    ignored = [name for name in names if name in own or hasattr(kind, name)]
    if ignored:
        message = f"method={method!r} does not call {', '.join(ignored)} of the field. Fix: method='dopri5'."
        warnings.warn(message, stacklevel=2)


def all_options(settings: Settings, t: Tensor) -> dict[str, Any]:
    """Return the options for torchdiffeq: the given options, and options for ``steps``, ``save`` and ``jump_times``."""
    method, steps, jumps = settings.method, settings.steps, settings.jump_times
    options, listed = checked_options(settings.options, method), TORCHDIFFEQ_METHODS[method]
    _refuse_conflicts(settings, options)
    if steps is not None or (jumps and listed.needs_fixed_steps):
        options["grid_constructor"] = functools.partial(equal_steps, steps=steps or 1, jumps=jumps)
    if jumps and listed.needs_fixed_steps:
        options["perturb"] = True  # f is evaluated just inside the step instead of at its ends
    elif jumps:
        options["jump_t"] = torch.tensor(jumps, dtype=t.dtype, device=t.device)
    if listed.kind == "adaptive":
        options.setdefault("dtype", _torch.widest(t.device))  # torchdiffeq's default is float64
        if settings.save == "exact":  # torchdiffeq rejects step times that are jumps
            options["step_t"] = t[~torch.isin(t, options["jump_t"].to(t))] if "jump_t" in options else t
    return options


def _refuse_conflicts(settings: Settings, options: dict[str, Any]) -> None:
    """Raise ValueError if ``steps``, ``save`` or ``jump_times`` conflicts with the method or with its options."""
    method, steps, jumps = settings.method, settings.steps, settings.jump_times
    listed = TORCHDIFFEQ_METHODS[method]
    on_grid = next((name for name in GRID if name in options), None)
    if steps is not None and not listed.needs_fixed_steps:
        raise ValueError(f"steps={steps} needs fixed steps, which method={method!r} does not have. Fix: method='rk4'.")
    if steps is not None and on_grid:
        raise ValueError(f"steps was given, and options has {on_grid!r}. Fix: give one of them.")
    if jumps and listed.kind in ("adams", "scipy"):
        what = f"method={method!r}, which uses values of f from before a jump after it"
        raise ValueError(f"jump_times are not possible with {what}. Fix: method='dopri5'.")
    if jumps and (also := next((name for name in ("jump_t", *GRID) if name in options), None)):
        fix = "give only jump_times" if also == "jump_t" else "steps=n instead, n steps between two outputs or jumps"
        raise ValueError(f"jump_times was given, and options has {also!r}. Fix: {fix}.")
    if settings.save == "exact" and (listed.kind == "scipy" or on_grid):
        what = f"options={{{on_grid!r}: ...}}" if on_grid else f"method={method!r}"
        raise ValueError(f"save='exact' is not possible with {what}. Fix: leave save out.")


def equal_steps(func: object, y0: Tensor, t: Tensor, *, steps: int, jumps: Sequence[float] = ()) -> Tensor:
    """Return the end points of steps: ``steps`` equal steps between each two neighbouring times of ``t`` and ``jumps``.

    Jumps outside the time span are ignored. The result contains t exactly, and is differentiable with respect to t.
    """
    if jumps:
        inside = torch.tensor(jumps, dtype=t.dtype, device=t.device)
        inside = inside[(inside > t.min()) & (inside < t.max()) & ~torch.isin(inside, t)]
        t, is_down = torch.cat([t, inside]), bool(t[-1] < t[0])
        t = t[t.detach().argsort(descending=is_down)]
    fractions = torch.arange(steps, dtype=t.dtype, device=t.device) / steps
    return torch.cat([(t[:-1, None] + t.diff()[:, None] * fractions).reshape(-1), t[-1:]])


def adjoint_options(own: dict[str, Any], settings: Settings, counted: CountedField) -> dict[str, Any]:
    """Return the options for the backward solve of torchdiffeq's adjoint.

    They are the user's ``adjoint_options``, and the options ``own`` of the forward solve except its norm. Jump times
    are negated if the times decrease, because torchdiffeq negates the times of the adjoint.
    """
    given: Any = {"norm": "seminorm"} if settings.adjoint_options is None else settings.adjoint_options
    given, term = checked_options(given, settings.method, "adjoint_options"), weakref.proxy(counted.term)
    if (norm := given.get("norm", "seminorm")) != "seminorm":
        if not callable(norm):
            fix = "leave the norm out for torchdiffeq's own, over all of the adjoint's state"
            raise ValueError(f"adjoint_options['norm'] must be 'seminorm' or a function, got {norm!r}. Fix: {fix}.")
        if not isinstance(term.like, Tensor):  # the norm gets the tensors of y and of its adjoint separately
            given["norm"] = lambda x: norm((x[0], *term.unflatten(x[1:2]), *term.unflatten(x[2:3]), *x[3:]))
    dropped = {"norm", *(GRID if any(name in given for name in GRID) else ())}
    options = {name: value for name, value in own.items() if name not in dropped} | given
    turned = {"step_t", "jump_t"} & options.keys() if counted.is_down else ()  # torchdiffeq negates these only once
    return options | {name: -options[name] for name in turned}
