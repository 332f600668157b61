"""A field as torchdiffeq calls it: evaluations and steps are counted, failures are named."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from hbnode._checks import CHANGES_INPUT
from hbnode._closures import closed_over_leaves, own_parameters, refuse_unknown
from hbnode._recompute import ForwardContext, autocast_of
from hbnode._state import State, all_finite, apply, is_equal, is_finite, like, parts
from hbnode._torch_internals import backward_pass
from hbnode.errors import MaxStepsError, NonFiniteError, SolverError, StepSizeUnderflowError
from hbnode.nfe import Tally, is_recording
from hbnode.signal import refuse_queries_outside
from hbnode.solvers.torchdiffeq_options import ADAPTIVE

CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")


class WatchedField:
    """The field as torchdiffeq calls it: counts evaluations and steps, and stops a solve that has gone wrong."""

    def __init__(
        self,
        field: Callable,
        y0: State,
        t: Tensor,
        tally: Tally,
        *,
        method: str,
        max_steps: int,
        adjoint: bool,
        reports_steps: bool,
    ) -> None:
        self.field = field
        self.method = method
        self.max_steps = max_steps
        self.limit = max_steps + max(len(t) - 2, 0)  # the adjoint takes at least one step for each output interval
        self.tally = tally
        self.adjoint = adjoint
        self.reports_steps = reports_steps  # if not, max_steps limits the evaluations
        self.known: frozenset[int] = frozenset()  # ids of the tensors that the adjoint differentiates
        finite, self.decreasing = torch.stack([all_finite(y0), (t[:2].diff() < 0).any()]).tolist()
        self.dtype = parts(y0)[0].dtype
        self.recent: deque[tuple[Tensor, State]] = deque(maxlen=32)  # the evaluations since the last step began
        self.first: tuple[Tensor, State, State] | None = None  # an evaluation made ahead of the solver
        self.step_size = math.nan
        self.attempts = (-1, 0)  # which pass, and the steps tried in it
        self.replay: ForwardContext | None = None
        self.closed: tuple[int, bool] | None = None  # in which pass, and whether it is
        self.autocast = autocast_of(parts(y0)[0].device.type) if adjoint else nullcontext
        warn_of_callbacks(field, method, [name for name in CALLBACKS if not hasattr(self, name)])
        if not finite:
            raise self.failure(NonFiniteError, "the initial state is not finite. Fix: look at the block's input", t[0])

    def __call__(self, t: Tensor, y: State) -> State:
        # a scalar state and its time are promoted by times of another dtype
        if t.dtype != self.dtype or any(part.dtype != self.dtype for part in parts(y)):
            t, y = t.to(self.dtype), apply(lambda part: part.to(self.dtype), y)
        if self.first is not None:
            (t0, y0, value), self.first = self.first, None
            if is_equal((t, *parts(y)), (t0, *parts(y0))):
                return value
        in_backward = self.adjoint and torch.is_grad_enabled()
        value = self._evaluate_again(t, y) if in_backward else self._evaluate(t, y)
        self.recent.append((t.detach(), apply(Tensor.detach, value)))
        if not self.reports_steps:
            self._check_evaluation(t, value)
        return value

    def _evaluate_again(self, t: Tensor, y: State) -> State:
        """In the backward pass, as in the forward pass; it may depend on nothing that the adjoint does not know."""
        if self._is_closed() and self.replay is not None and self.replay.is_current():
            return self._evaluate(t, y)
        with self.replay() if self.replay is not None else nullcontext():
            if self._is_closed():
                return self._evaluate(t, y)
            leaves, value = closed_over_leaves(lambda: self._evaluate(t, y), (t, *parts(y)))
        refuse_unknown(leaves, self.known)
        return value

    def _is_closed(self) -> bool:
        """Whether the field depends on its parameters and buffers only, looked at once in a backward pass."""
        now = backward_pass()
        if self.closed is None or self.closed[0] != now:
            self.closed = (now, self.replay is not None and self.replay.structure.is_closed())
        return self.closed[1]

    def _evaluate(self, t: Tensor, y: State) -> State:
        self.tally.add("evaluation")
        # a leaf that is changed in place, or a tensor without a version, is refused or missed by torch itself
        if any(part.is_leaf and (part.requires_grad or part.is_inference()) for part in parts(y)):
            y = apply(torch.clone, y)
        versions = _versions(y)
        with self.autocast():
            value = like(self.field(t, y), y)
        if versions != _versions(y):
            raise ValueError(CHANGES_INPUT)
        return value

    def adjoint_parameters(self, t0: Tensor, y0: State) -> tuple[Tensor, ...]:
        """All tensors that the adjoint method must differentiate with respect to.

        The field's own parameters, and any other leaf that it closes over, seen in the graph of the solver's first
        evaluation: made here, handed to the solver when it asks for it.
        """
        if not torch.is_grad_enabled():
            return ()
        t0 = t0.detach()
        y0 = apply(lambda part: part.detach().requires_grad_(), y0)
        leaves, value = closed_over_leaves(lambda: self._evaluate(t0, y0), parts(y0))
        value = apply(Tensor.detach, value)
        self.replay = ForwardContext(self.field)
        self.replay.remember_masks()
        self.first = (t0, apply(Tensor.detach, y0), value)
        self.recent.append((t0, value))
        found = {id(p): p for p in (*own_parameters(self.field), *leaves) if p.requires_grad}
        self.known = frozenset(found)
        return tuple(found.values())

    def begin_step(self, t0: Tensor, y0: State, dt: Tensor, what: str = "state") -> None:
        """Called before each step of size ``dt`` from ``(t0, y0)``."""
        t0, dt = t0.detach(), dt.detach()
        if t0.dtype == dt.dtype == torch.float64 and parts(y0)[0].is_cpu:
            start, self.step_size = t0.item(), dt.item()
            stuck, finite = start in (start + self.step_size, start - self.step_size), is_finite(y0)
        else:
            numbers = (x.double() for x in (dt, all_finite(y0), (t0 + dt == t0) | (t0 - dt == t0)))
            self.step_size, finite, stuck = torch.stack([x.reshape(()) for x in numbers]).tolist()  # one look
        if not finite:
            self._blame_field()
            hint = "a field that grows without bound" if what == "state" else "a loss whose gradient is not finite"
            raise self.failure(NonFiniteError, f"the {what} is not finite. Look for: {hint}", t0)
        if self.method in ADAPTIVE:
            self._check_step_size(t0, bool(stuck), what)
        self.recent.clear()

    def report(self, t0: Tensor, dt: Tensor, *, accepted: bool) -> None:
        """Pass a step on to open :func:`hbnode.record_steps` contexts, in the time of a field that is rescaled."""
        if is_recording():
            in_time = getattr(self.field, "in_time", None)
            self.tally.report(*((t0, dt) if in_time is None else in_time(t0, dt)), accepted=accepted)

    def own_time(self, t0: Tensor) -> Tensor:
        """The time as the field sees it; where a solve goes down, the adjoint runs in one that goes up."""
        return -t0 if self.decreasing else t0

    def tell(self, name: str, t0: Tensor, y0: State, dt: Tensor) -> None:
        """Call the field's own callback of that name, if it has one."""
        callback = getattr(self.field, name, None)
        if callback is not None:
            callback(t0, y0, dt)

    def _check_step_size(self, t0: Tensor, stuck: bool, what: str) -> None:
        if stuck:
            self._blame_field()
            if self.step_size == 0:  # what torchdiffeq makes of an error estimate that is not a number
                raise self.failure(
                    NonFiniteError,
                    f"the error estimate is not finite: the {what}'s derivative is not, or is too large for its "
                    "dtype. Look for: a derivative like that of sqrt at 0",
                    t0,
                )
            raise self.failure(
                StepSizeUnderflowError,
                "the step size underflowed: no step is small enough for the tolerance. "
                "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func",
                t0,
            )
        last, tried = self.attempts
        tried = tried + 1 if last == backward_pass() else 1
        if tried > self.limit:
            raise self._too_many(t0, "steps")
        self.attempts = (backward_pass(), tried)

    def _blame_field(self) -> None:
        """Raise if the field returned anything non-finite since the last step began."""
        for t, value in self.recent:
            if not is_finite(value):
                raise self.failure(
                    NonFiniteError,
                    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth "
                    "without bound (GHBNODE's activation bounds it)",
                    t,
                )

    def _check_evaluation(self, t: Tensor, value: State) -> None:
        """What stands in for :meth:`begin_step` where the method does not report its steps."""
        if not is_finite(value):
            raise self.failure(NonFiniteError, "the field returned non-finite values", t)
        if self.tally.nfe.total > self.limit:
            raise self._too_many(t, "evaluations")

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
        return kind(
            f"{message} (method {self.method!r})",
            t=float(t.detach()),
            step_size=self.step_size,
            nfe=self.tally.nfe.total,
        )

    def _too_many(self, t: Tensor, counted: str) -> SolverError:
        return self.failure(
            MaxStepsError,
            f"the solve needed more than max_steps={self.max_steps} {counted}. "
            "Fix: loosen rtol and atol, shorten the time span, or raise max_steps",
            t,
        )


def _versions(y: State) -> list[int]:
    """Those of the tensors, which tell of changes in place; tensors of inference mode have none."""
    return [0 if part.is_inference() else part._version for part in parts(y)]


# torchdiffeq reports steps to methods of these names, and warns of those that a solver never calls.


class FixedField(WatchedField):
    def callback_step(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        self.begin_step(t0, y0, dt)
        self.tally.add("accepted")
        self.report(t0, dt, accepted=True)
        self.tell("callback_step", t0, y0, dt)

    def callback_step_adjoint(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        t0 = self.own_time(t0)
        self.begin_step(t0, y0, dt, "adjoint state")
        self.tally.add("accepted")
        self.report(t0, dt, accepted=True)
        self.tell("callback_step_adjoint", t0, y0, dt)


class AdaptiveField(WatchedField):
    def callback_step(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        self.begin_step(t0, y0, dt)
        self.tell("callback_step", t0, y0, dt)

    def callback_accept_step(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        self.tally.add("accepted")
        self.report(t0, dt, accepted=True)
        self.tell("callback_accept_step", t0, y0, dt)

    def callback_reject_step(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        self.tally.add("rejected")
        self.report(t0, dt, accepted=False)
        self.tell("callback_reject_step", t0, y0, dt)

    def callback_step_adjoint(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        t0 = self.own_time(t0)
        self.begin_step(t0, y0, dt, "adjoint state")
        self.tell("callback_step_adjoint", t0, y0, dt)

    def callback_accept_step_adjoint(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        t0 = self.own_time(t0)
        self.tally.add("accepted")
        self.report(t0, dt, accepted=True)
        self.tell("callback_accept_step_adjoint", t0, y0, dt)

    def callback_reject_step_adjoint(self, t0: Tensor, y0: State, dt: Tensor) -> None:
        t0 = self.own_time(t0)
        self.tally.add("rejected")
        self.report(t0, dt, accepted=False)
        self.tell("callback_reject_step_adjoint", t0, y0, dt)


def warn_of_callbacks(field: Callable, method: str, names: Sequence[str]) -> None:
    """Say which of these callbacks a field has: its method never calls them."""
    own, kind = getattr(field, "__dict__", {}), type(field)
    unheard = [name for name in names if name in own or hasattr(kind, name)]
    if unheard:
        message = f"method={method!r} does not call {', '.join(unheard)} of the field. Fix: method='dopri5'."
        warnings.warn(message, stacklevel=2)
