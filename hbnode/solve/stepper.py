"""A single step of a solve: its coefficients, its computation, the outputs inside it and the norm of its error.

A shape "() or (batch,)" means one number for the whole batch, or one per sample if samples have their own step sizes.
Variables named ``lanes`` hold sample indices or the batch size. ``rows`` are the tensors of a state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from hbnode import _torch
from hbnode.errors import MaxNFEError, NonFiniteError, SolverError
from hbnode.signal import refuse_queries_outside
from hbnode.solve.grid import Grid, TracedGrid, to_device
from hbnode.solve.methods import RHS, Array, HostFormula, Method, Rosenbrock, Rows, combined, on_host
from hbnode.solve.settings import Settings
from hbnode.solve.term import ODETerm

STRONG_DAMPING = 50.0  # smallest γT for which the damping limits the steps of Nystrom methods

FIELD_NOT_FINITE = (
    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound "
    "(GHBNODE's activation bounds it)"
)


@dataclass
class Attempt:
    """The plan of a step, which is then accepted or rejected, or of several equal fixed steps.

    Attributes:
        time: the time t at which the step starts.
        size: the signed step size, () or (batch,): a tensor if the times need gradients or while
            torch.compile or torch.export records the solve, else an array.
        times: the times of the function evaluations, one sequence per step.
        error: whether to estimate the error.
        lanes: the sample index of each output inside the step; None if all samples have the same outputs.
        outputs: the indices of the output times inside the step; None if there are none.
        theta: the positions of the outputs in the step, from 0 to 1; None if all are at its end.
        place: the positions as a tensor with gradients, and the step size for each output; None without gradients.
        late: output times minus the end of the step, for outputs at the end; its value is 0, but it has a gradient.
            None without gradients.
        number: the index of the first step of the attempt, counted from the start of a solve with fixed steps.
        restart: the time just after a jump of f, at which the first stage is evaluated again; None without a jump.
        lag: the output time on a jump minus its value; its value is 0, but it has a gradient. None without gradients.
    """

    time: Any
    size: Any
    times: list[Sequence[Tensor]]
    error: bool = True
    lanes: Any = None
    outputs: Any = None
    theta: Any = None
    place: tuple[Tensor, Tensor] | None = None
    late: Tensor | None = None
    number: int = 0
    restart: Any = None
    lag: Tensor | None = None

    def inside(self, lanes: int) -> Array:
        """Return a mask (batch,) of the samples that have an output time before the end of the step.

        These outputs are computed by dense output. ``lanes`` is the batch size.
        """
        found = np.zeros(lanes, bool)
        found[self.lanes[self.theta != 1.0]] = True
        return found


class Taken(NamedTuple):
    """The result of an attempted step, before it is accepted or rejected.

    Attributes:
        state: the state after the step.
        error: the error estimate, or its norm from a compiled step.
        outputs: the tensors of the state at the output times inside the step.
        columns: the ``columns`` of the method's StepResult, in which events are searched, or None.
    """

    state: Rows
    error: Any
    outputs: Rows = ()
    columns: Tensor | None = None


@dataclass(frozen=True)
class Stepper:
    """An equation, a method and a damping, with functions that compute single steps.

    The functions change only ``latest``, a cache of the coefficients of the last step.

    Attributes:
        term: the right-hand side.
        method: the method, bound to the term.
        name: the name of the method.
        gamma: the damping γ, a number or a tensor.
        gamma_on_host: γ as a Python number if it is a scalar whose value can be read, else None.
        rtol: relative tolerance.
        atol: absolute tolerance.
        noise: a function that maps the index of a fixed step to the standard normal variables of the step,
            (normals, ...), which become its last coefficient; None for an ODE.
        program: the compiled step; None if steps are not compiled.
        has_events: whether each step returns the columns of dense output, for the search for events.
        like: a tensor of the shape, dtype and device of the state, without a graph.
        no_times: the stage times that a field gets if it does not depend on time.
    """

    term: ODETerm
    method: Method
    name: str
    gamma: Any
    gamma_on_host: float | None
    rtol: float
    atol: float
    like: Tensor
    no_times: list[Tensor]
    noise: Callable[[int], Tensor] | None = None
    program: Callable[..., Any] | None = None
    has_events: bool = False
    latest: list[Any] = field(init=False, default_factory=list)  # step size, error flag and coefficients of a step

    @classmethod
    def of(cls, term: ODETerm, method: Method, settings: Settings, gamma: Any = None, **others: Any) -> Self:
        """Return the stepper for an equation and a method; ``gamma``, if not None, replaces the damping of the term."""
        gamma, number = term.damping if gamma is None else gamma, None
        if not isinstance(gamma, Tensor):
            number = gamma
        elif not term.traced:
            if not gamma.dim() and not _torch.is_transformed():
                number = gamma.item()
            if number is None or gamma.is_cpu:  # otherwise gradients of γ would synchronise the device
                gamma = gamma.to("cpu", torch.float64)
        like = term.template.detach()  # detached, so that it adds no edge to the graph
        no_times = [like.new_zeros(())] * method.evaluations
        parts = settings.method, gamma, number, settings.rtol, settings.atol, like, no_times
        return cls(term, method.bind(term), *parts, **others)

    @property
    def strongest(self) -> float:
        """The largest absolute value of the damping γ over all channels.

        It is 0 if γ does not limit the step size of the method.
        """
        if self.method.damping_limit == math.inf:
            return 0.0
        gamma = self.gamma if self.gamma_on_host is None else self.gamma_on_host
        return abs(float(_torch.plain(torch.as_tensor(gamma)).abs().max()))

    @property
    def constants(self) -> Tensor:
        """The constants of the equation as one tensor, here the damping γ.

        The gradient modes compute the gradient with respect to this tensor.
        """
        return self.damping

    @property
    def damping(self) -> Tensor:
        """The damping γ as a tensor, in float64 if it is a number."""
        return self.gamma if isinstance(self.gamma, Tensor) else torch.tensor(self.gamma, dtype=torch.float64)

    def with_constants(self, constants: Tensor) -> Self:
        """Return a copy of this stepper with the tensor ``constants``, which has equal values, for gradients."""
        return replace(self, gamma=constants)

    # Coefficients

    def coefficients(self, attempt: Attempt) -> tuple[Any, Tensor | None]:
        """Return the coefficients of a step, and the weights of dense output for its outputs.

        The weights are None if all outputs are at the end of the step. Both results are differentiable with respect to
        the damping γ and the times.
        """
        method, size, theta, lanes = self.method, attempt.size, attempt.theta, attempt.lanes
        last_size, error, coefficients = self.latest or (None, None, None)
        if isinstance(size, Tensor) or error != attempt.error or (last_size is not size and (last_size != size).any()):
            packed = self.at_gamma(functools.partial(method.packed, error=attempt.error), size)
            coefficients = method.unpack(packed, self.term.dims_of_row, error=attempt.error)
            self.latest[:] = None if isinstance(size, Tensor) else size, attempt.error, coefficients
        if theta is None:
            return coefficients, None
        if attempt.place is not None:
            theta, size = attempt.place
        else:
            size = size[lanes] if size.ndim else np.full_like(theta, size)
        return coefficients, self.at_gamma(method.dense_weights, size, theta, lanes=lanes)

    def at_gamma(self, formula: Callable[..., Any], *args: Any, lanes: Any = None) -> Tensor:
        """Return ``formula(xp, γ, *args)`` for the damping γ as a tensor; xp is NumPy or torch.

        ``lanes`` holds the sample index of each element of ``args``. The formula runs on the CPU if γ is a known
        number, unless a backward pass would then synchronise a GPU.
        """
        gamma, has_lanes = self.gamma, self.term.lanes is not None
        needs_gradient = isinstance(gamma, Tensor) and gamma.requires_grad and torch.is_grad_enabled()
        is_host = self.gamma_on_host is not None and not self.term.traced and not isinstance(args[0], Tensor)
        if is_host and needs_gradient and args[0].ndim and not self.like.is_cpu:
            is_host = False  # the backward pass of HostFormula would synchronise the device
        if self.gamma_on_host is not None and is_host:
            xp = torch if args[0].ndim else np
            if needs_gradient:
                return HostFormula.apply(gamma, self.gamma_on_host, formula, args, xp, self.like)
            return on_host(formula, self.gamma_on_host, args, xp, self.like)
        at = self.like.device if _torch.widest(self.like.device) == torch.float64 else torch.device("cpu")
        args = tuple([(x if isinstance(x, Tensor) else torch.tensor(x)).to(at, torch.float64) for x in args])
        gamma = self.damping.to(at, torch.float64)
        if gamma.dim() and has_lanes and lanes is not None and len(gamma) > 1:
            gamma = gamma[torch.tensor(lanes, device=at)]
        if gamma.dim():  # first the dimension of samples or outputs, then the dimensions of γ
            ones = [1] * (gamma.dim() - (args[0].dim() if has_lanes else 0))
            args = tuple([x.reshape(*x.shape, *ones) for x in args])
        return formula(torch, gamma, *args).to(self.like)

    # Steps

    def take(self, state: Rows, attempt: Attempt) -> Taken:
        return self.step(state, self.coefficients(attempt), attempt)

    def step(
        self, state: Rows, coefficients: tuple[Any, Tensor | None], attempt: Attempt, field: RHS | None = None
    ) -> Taken:
        """Compute the steps of an attempt, and return their result.

        Arguments:
            state: the state of the method before the steps.
            coefficients: what :meth:`coefficients` returns for the attempt.
            attempt: the plan of the steps.
            field: a function that replaces the right-hand side, or None.
        """
        packed, weights = coefficients
        program = self.program if weights is None and field is None and not self.has_events else None
        field, error, columns, lanes = self.term if field is None else field, None, None, self.term.lanes
        dense: Any = weights is not None or self.has_events
        if dense and lanes is not None and not self.has_events and isinstance(self.method, Rosenbrock):
            dense = to_device(attempt.inside(lanes), self.like)
        if attempt.restart is not None:
            state = self._restarted(state, attempt, field)
        for number, times in enumerate(attempt.times, attempt.number):
            if program is not None and (result := program(state, packed, list(times), self.term.like)) is not None:
                self.term.counter.add("evaluation", self.method.evaluations)
                state, error = result
                continue
            own = packed if self.noise is None else (*packed, self.noise(number))
            state, error, columns = self.method.step(state, own, times, field, error=attempt.error, dense=dense)
        event_columns = columns.detach() if self.has_events and columns is not None else None
        if attempt.outputs is None:
            return Taken(state, error, (), event_columns)
        outputs = self._at_end(state, attempt)
        if weights is not None and columns is not None:
            outputs = self._interpolated(outputs, columns, weights, attempt)
        return Taken(state, error, tuple(outputs), event_columns)

    def _at_end(self, state: Rows, attempt: Attempt) -> list[Tensor]:
        """Return the state at the end of a step for each output of the step, with gradients for the output times.

        The result is a list with a tensor (outputs, ...) for each tensor of the ODE state.
        """
        index = None if self.term.lanes is None or attempt.lanes is None else attempt.lanes
        outputs = [row.unsqueeze(0) if index is None else row[index] for row in state[: self.term.rows]]
        if attempt.late is None:
            return outputs
        late = attempt.late.to(state[0]).view(-1, *[1] * (outputs[0].dim() - 1))
        slopes = [slope.unsqueeze(0) if index is None else slope[index] for slope in self.slopes(state)]
        return [row + late * slope for row, slope in zip(outputs, slopes, strict=False)]  # y + y' (t - end), t = end

    def _restarted(self, state: Rows, attempt: Attempt, field: RHS) -> Rows:
        """Return the state of the method with the value of the field just after a jump instead of before it.

        If the jump is on an output time, ``lag`` removes the gradient with respect to this time from later states.
        """
        *rows, _ = state
        if attempt.lag is not None:
            lag = attempt.lag.to(rows[0]).reshape(-1, *[1] * (rows[0].dim() - 1))
            rows = [row - lag * slope for row, slope in zip(rows, self.slopes(state), strict=True)]
        return (*rows, field(attempt.restart, rows[0]))

    def _interpolated(self, ends: list[Tensor], columns: Tensor, weights: Tensor, attempt: Attempt) -> list[Tensor]:
        """Return the states at the outputs of a step: a list with a tensor (outputs, ...) for each tensor of the state.

        Outputs inside the step are dense output, computed from ``columns`` and ``weights``. Outputs at the end of the
        step are taken from ``ends``, the result of :meth:`_at_end`.
        """
        output_columns = columns.unsqueeze(1) if self.term.lanes is None else columns[:, attempt.lanes]
        inside, is_end = combined(weights, output_columns).unbind(1), attempt.theta == 1.0
        if not is_end.any():
            return list(inside)
        is_end = to_device(is_end, self.like).view(-1, *[1] * (inside[0].dim() - 1))
        return [torch.where(is_end, end, x) for end, x in zip(ends, inside, strict=True)]

    def slopes(self, state: Rows) -> Rows:
        """Return the time derivatives of the ODE state: (y',), or (h', m') for a second-order equation.

        The field is not evaluated: ``state`` is the tuple (y, f) or (h, m, f) of an FSAL method, which also holds the
        value f of the field at the same time.
        """
        if not self.term.second_order:
            return state[1:]
        _, m, f = state
        gamma = self.damping.to(m)
        return m, f - gamma * m

    # Norms

    def norms(self, rows: Rows) -> Array:
        """Return the root mean square of each of the tensors ``rows``, (tensors,) or (tensors, batch), in NumPy."""
        x = torch.stack(rows).detach().unsqueeze(-1).flatten(1 if self.term.lanes is None else 2)
        return to_host(_torch.root_mean_square(x, (-1,)))

    def ratio(self, before: Rows, taken: Taken) -> Array:
        """Return the root mean square of error / tolerance, () or (batch,).

        ``before`` is the state before the step, and ``taken`` its result. If the elements of the state are divided into
        error groups, the result is the largest of the root mean squares of the groups.

        This is the only transfer from a GPU to the CPU in a step.
        """
        n, after, error = self.term.rows, taken.state, taken.error
        if self.program is not None and error.dim() < after[0].dim():  # the compiled step returns the norm
            ratio = to_host(error.detach())
            return np.where(np.isfinite(ratio), ratio, np.inf)
        with torch.no_grad():
            scale = torch.maximum(torch.stack(before[:n]).abs(), torch.stack(after[:n]).abs())
            x = error / scale.mul_(self.rtol).add_(self.atol)
            dims, groups = self.term.dims_of_norm, self.term.error_groups
            norms = [_torch.root_mean_square(x[..., group], dims) for group in groups]
            ratio = to_host(norms[0] if len(norms) == 1 else torch.stack(norms).amax(0))
        return np.where(np.isfinite(ratio), ratio, np.inf)

    # Failures

    def failure(self, kind: type[SolverError], message: str, t: Any, size: Any) -> SolverError:
        """Return an exception of the class ``kind`` with the time ``t``, the step size ``size`` and the NFE.

        If a signal was evaluated outside its sample times, raise ValueError instead. On a GPU the signal then returned
        NaN, which made the solve fail.
        """
        refuse_queries_outside()
        t, size = (float(np.ravel(as_array(x))[0]) for x in (t, size))
        return kind(f"{message} (method {self.name!r})", t=t, step_size=abs(size), nfe=self.term.counter.nfe.total)

    def start_not_finite(self, norm: Array, begin: Array) -> SolverError:
        """Return the exception for an initial state, or a field at the start, that is not finite.

        ``norm`` holds the norms of the tensors of the method's state, (tensors,) or (tensors, batch). ``begin`` is the
        initial time.
        """
        bad = ~np.isfinite(norm)
        lane = first_index(bad.any(0))
        message = FIELD_NOT_FINITE
        state_rows = (slice(self.term.rows), *lane)
        if bad[state_rows].any():
            message = "the initial state is not finite. Fix: look at the block's input, or at the cell of an ODERNN"
        return self.failure(NonFiniteError, message, begin[lane], math.nan)

    def not_finite(self, attempt: Attempt, state: Rows, lane: tuple[int, ...] = ()) -> SolverError:
        """Return the exception for a step whose result is not finite.

        The step is repeated from ``state`` to find the first evaluation of the field that is not finite. ``lane`` is
        the index (i,) of the sample, or () if all samples share their steps.
        """
        found: list[Any] = []
        begin, size = (float(as_array(x)[lane]) for x in (attempt.time, attempt.size))
        nodes = iter((*[0.0] * (attempt.restart is not None), *self.method.nodes * len(attempt.times)))

        def checked(t: Tensor, x: Tensor) -> Tensor:
            f, node = self.term(t, x), next(nodes, 0.5)  # rodas5p also evaluates f at 0.5, for dense output
            if not found and bool(torch.isfinite(x[lane]).all()) and not bool(torch.isfinite(f[lane]).all()):
                found.append(begin + node * size)
            return f

        with torch.no_grad():
            coefficients, _ = self.coefficients(attempt)
            self.step(state, (coefficients, None), attempt, checked)
        if found:
            return self.failure(NonFiniteError, FIELD_NOT_FINITE, found[0], size)
        message = "the state or its error is not finite. Look for: a field that grows without bound"
        return self.failure(NonFiniteError, message, begin, size)


@dataclass(frozen=True)
class Setup:
    """The specification of a solve.

    Attributes:
        stepper: the equation and the method.
        grid: the times, a :class:`~hbnode.solve.grid.Grid`, or a ``TracedGrid`` while torch.compile or
            torch.export records the solve.
        settings: the arguments of :func:`hbnode.odeint`.
        counts: the number of fixed steps in each output interval. Steps are fixed if ``settings.steps`` is not None.
        end_only: whether to return the final state only.
        events: the events of each sample.
        max_nfe: the largest number of function evaluations; None if there is no limit.
    """

    stepper: Stepper
    grid: Any  # a Grid or a TracedGrid
    settings: Settings
    counts: Sequence[int]
    end_only: bool = False
    events: Sequence[Any] = ()
    max_nfe: int | None = None

    @classmethod
    def of(cls, term: ODETerm, method: Method, t: Tensor, settings: Settings, **others: Any) -> Setup:
        """Return the setup to solve the equation ``term`` by ``method`` at the times ``t``, (T,) or (batch, T)."""
        has_events = bool(others.get("events"))
        stepper = Stepper.of(term, method, settings, has_events=has_events)
        grid = TracedGrid(t) if term.traced else Grid.of(t, stepper.like, term.lanes)
        if settings.jump_times and settings.steps is not None and isinstance(grid, Grid):
            grid = grid.with_jumps(settings.jump_times, both_sides=has_events)
        counts = [settings.steps or 1] * (t.shape[-1] - 1)
        return cls(stepper, grid, settings, counts, max_nfe=(settings.options or {}).get("max_nfe"), **others)

    @property
    def advice(self) -> str:
        """The beginning of the fix in error messages: a text that names a better method, or "".

        It is ``"exponential"`` if the damping is strong, else ``"rodas5p"`` for a field that may be stiff.
        """
        strongest = self.stepper.strongest
        if strongest > max(1.0, STRONG_DAMPING / max(float(self.grid.end.max()), 1e-300)):
            return (
                f"method='exponential', because the damping of {strongest:g} limits the steps of "
                f"{self.stepper.name!r}, or "
            )
        return "" if isinstance(self.stepper.method, Rosenbrock) else "method='rodas5p' if func is stiff, or "

    def check_nfe(self, t: Any, size: Any, evaluations: int) -> None:
        """Raise MaxNFEError if the given number of further function evaluations would exceed ``max_nfe``.

        ``t`` and ``size`` are the time and the step size for the error message.
        """
        most, nfe = self.max_nfe, self.stepper.term.counter.nfe
        if most is None:
            return
        spent = nfe.forward if _torch.backward_pass() == -1 else nfe.backward
        if spent + evaluations > most:
            message = (
                f"the solve needs more than max_nfe={most} function evaluations. "
                "Fix: loosen rtol and atol, shorten the time span, or raise max_nfe"
            )
            raise self.stepper.failure(MaxNFEError, message, t, size)


def first_index(mask: Array) -> tuple[int, ...]:
    """Return the index of the first True of a mask (batch,) as a tuple (i,), or () for a mask without dimensions."""
    return tuple(int(i[0]) for i in np.nonzero(mask)) if mask.ndim else ()


def as_array(x: Any) -> Array:
    return _torch.to_numpy(x) if isinstance(x, Tensor) else np.asarray(x)


def to_host(x: Tensor) -> Array:
    """Convert norms to a NumPy array in float64.

    Under torch.func.vmap, step sizes cannot differ between the mapped entries, so the result is the root mean square
    over the mapped dimensions.
    """
    if _torch.is_transformed():
        return np.sqrt((_torch.to_numpy(x) ** 2).reshape(-1, *x.shape).mean(0))
    if x.is_meta and type(x) is Tensor:
        raise ValueError("adaptive steps need numbers, and the device meta stores none. Fix: steps=8, or a device.")
    return x.to("cpu", torch.float64).numpy()
