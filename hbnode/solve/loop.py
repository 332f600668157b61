"""The loop of a solve: attempt a step, accept it, save what lies in it, go on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode.errors import MaxNFEError, NonFiniteError, SolverError
from hbnode.nfe import open_records
from hbnode.signal import queries, refuse_queries_outside
from hbnode.solve.control import (
    BESIDE_JUMP,
    FIELD_NOT_FINITE,
    LONGEST_DECAY,
    AdaptiveSteps,
    Array,
    Attempt,
    first_index,
)
from hbnode.solve.methods import NYSTROM, Field, HostFormula, Method, Splitting, combined, on_host
from hbnode.solve.settings import Settings
from hbnode.solve.term import ODETerm

Rows = tuple[Tensor, ...]
Take = Callable[[Rows, Attempt], tuple[Rows, Any, Rows]]  # the state after an attempt, its error, the outputs in it
STRONG = 50.0  # γT from which the damping keeps the steps of Nystrom methods short


class Problem:
    """A term with its method, its output times (T,) or (lanes, T) and how to solve; takes single steps.

    Attributes:
        gamma: the damping: a number, or a tensor; in float64 on the host, but where its number is known.
        number: the damping where it is a number that the host knows; else None.
        strongest: the largest γ, where it limits the steps; else 0.
        longest_step: no adaptive step is longer: γH stays below 16 for Nystrom methods.
        max_nfe: the most evaluations of the solve; None if there is no limit.
        t: the times, where gradients flow to them or a graph is traced; else None.
        begin, sign: of times: the start, and the direction.
        outputs, end: times elapsed since the start, (T - 1,) or (lanes, T - 1), and their last.
        common: whether lanes with times of their own take the same fraction of their spans in each step.
        jumps: elapsed times of the jumps of f, in order and then inf, (K,) or (lanes, K); None if there are none.
        noise: the standard normal variables of a step by its number; None of an ODE.
        program: a compiled step; None if steps are not compiled.
        end_only: whether only the state at the last of two times is wanted.
    """

    def __init__(self, term: ODETerm, method: Method, t: Tensor, settings: Settings, *, end_only: bool = False) -> None:
        self.term, self.settings, self.tally, self.end_only = term, settings, term.tally, end_only
        self.method: Any = method
        if isinstance(method, Splitting) and (activation := getattr(term.inner, "activation", None)) is not None:
            shape = term.template.shape  # rows may be flat, and σ need not act on each element alone
            self.method = method.with_activation(lambda m: activation(m.view(shape)).reshape(m.shape))
        self.lanes, self.template = term.lanes, term.template.detach()  # as an argument it must add no edge
        self.dims = self.template.dim() if term.per_channel else 1 if self.lanes is None else 2  # of a row
        self.wants_time = not term.second_order or term.time_dependent
        self.no_times = [self.template.new_zeros(())] * method.evaluations
        self.gamma, self.traced = term.damping, term.traced
        self.number: Any = None
        self.jumps: Array | None = None
        self.common = settings.common_steps and term.lanes is not None
        self.noise: Callable[[int], Tensor] | None = None
        self.program: Callable[..., Any] | None = None
        self._equal: tuple[Any, ...] = (None, None, None)  # the last size, and its coefficients
        self.t: Any = t
        self.max_nfe: Any = None
        if isinstance(self.gamma, float):
            self.number = self.gamma
        elif not self.traced:
            if not self.gamma.dim() and not _torch.is_transformed():
                self.number = self.gamma.item()
            if self.number is None or self.gamma.is_cpu:  # else its gradients would wait for the device
                self.gamma = self.gamma.to("cpu", torch.float64)
        if self.traced:
            return
        options = settings.options or {}
        self.max_nfe = options.get("max_nfe")
        self.strongest, self.longest_step = 0.0, float(options.get("max_step", math.inf))
        if settings.method in NYSTROM:
            largest = _torch.plain(torch.as_tensor(self.gamma)).abs().max() if self.number is None else self.number
            self.strongest = abs(float(largest))
            if self.strongest:
                self.longest_step = min(self.longest_step, LONGEST_DECAY / self.strongest)
        needs_gradient = t.requires_grad and torch.is_grad_enabled()
        needs_gradient |= _torch.is_transformed() and _torch.has_tangent(t)
        self.t = t.to(self.template.device) if needs_gradient and t.shape[-1] > 1 else None
        values = _torch.to_numpy(t)
        self.begin, self.sign = values[..., 0], np.where(values[..., -1] >= values[..., 0], 1.0, -1.0)
        elapsed = abs(values - self.begin[..., None])
        if self.lanes is not None and values.ndim == 1:
            self.begin, self.sign = np.broadcast_to(self.begin, self.lanes), np.broadcast_to(self.sign, self.lanes)
            elapsed = np.broadcast_to(elapsed, (self.lanes, len(values)))
        self.outputs, self.end = elapsed[..., 1:], elapsed[..., -1]
        self.furthest = abs(values).max() if values.size else 0.0

    def replace(self, gamma: Any, t: Tensor | None) -> None:
        """Go on with another damping and other times of the same values, which gradients are wanted of."""
        self.gamma, self.t, self._equal = gamma, t, (None, None, None)

    # Times and sizes

    def grid(self) -> Any:
        """Return the output times, first: (T,) or (T, lanes)."""
        if self.t is not None:
            return self.t.movedim(-1, 0)
        first = np.zeros_like(self.end)[..., None]
        times = np.concatenate([first, self.outputs], -1)
        return np.moveaxis(self.begin[..., None] + self.sign[..., None] * times, -1, 0)

    def counts(self) -> Sequence[int]:
        return [self.settings.steps or 1] * (self.grid().shape[0] - 1)

    def time(self, elapsed: Array) -> Any:
        """Return a time, () or (lanes,), from the time elapsed since the start."""
        return self.begin + self.sign * elapsed

    def stages(self, times: Sequence[Any]) -> Sequence[Tensor]:
        """Times of evaluations as the field gets them: scalars, or (lanes, 1, ...) to broadcast with the state."""
        if isinstance(times[0], Tensor):
            stages = torch.stack(list(times)).to(self.template)
        else:
            stages = torch.from_numpy(np.stack(times)).to(self.template)
        if stages.dim() > 1:
            stages = stages.reshape(*stages.shape, *[1] * (self.term.dims - 1))
        return stages.unbind(0)

    def differentiable(self, elapsed: Array, at_rest: float = 0.0) -> Tensor:
        """Return a time that moves with the output times around it, at a constant fraction between them; jumps do not
        move.

        In an interval of length 0 the fraction is ``at_rest``.
        """
        values, known = np.concatenate([np.zeros_like(self.end)[..., None], self.outputs], -1), self.t
        if self.lanes is not None and known.dim() == 1:
            known = known.expand(self.lanes, -1)
        if self.jumps is not None:
            jumps = np.minimum(self.jumps, self.end[..., None])
            fixed = self._on_device(self.begin[..., None] + self.sign[..., None] * jumps)
            values, known = np.concatenate([values, self.jumps], -1), torch.cat([known, fixed.to(known)], -1)
            order = values.argsort(-1, kind="stable")
            values = np.take_along_axis(values, order, -1)
            known = known.gather(-1, self._on_device(order))
        i = np.clip((values <= elapsed[..., None]).sum(-1) - 1, 0, values.shape[-1] - 2)
        i = np.where(elapsed == 0, 0, i)[..., None]  # a solve starts at its first time, though others be the same
        first, last = (np.take_along_axis(values, i + k, -1)[..., 0] for k in (0, 1))
        with np.errstate(all="ignore"):
            fraction = self._on_device(np.where(last > first, (elapsed - first) / (last - first), at_rest))
        begin, end = (known.gather(-1, self._on_device(i + k)).squeeze(-1) for k in (0, 1))
        return begin + fraction * (end - begin)

    def _on_device(self, x: Array) -> Tensor:
        """Return an array on the device of the state, where the times are that gradients flow to."""
        return torch.from_numpy(np.array(x)).to(self.template.device)  # a copy that keeps the number of dimensions

    # Steps

    def start(self, y0: Any) -> Rows:
        """Return the state of the method where the solve begins; finds the signals that the field asks for their
        values.
        """
        rows, jumps = self.term.flatten(y0), self.settings.jump_times
        if self.method.is_fsal:
            t = self.no_times[0]
            if self.wants_time:
                (t,) = self.stages([self.grid()[0] if self.t is not None else self.begin])
            if self.traced:
                return (*rows, self.term(t, rows[0]))
            before, queries.signals = queries.signals, []
            try:
                rows = (*rows, self.term(t, rows[0].clone()))  # f may try to change it in place
            finally:
                signals, queries.signals = queries.signals, before
        else:
            signals = []
        if (jumps or signals) and self.method.error_order is not None and self.settings.steps is None:
            self.jumps = self._jumps_inside(jumps, signals)
        return rows

    def _jumps_inside(self, jump_times: Sequence[float], signals: Sequence[Any]) -> Array | None:
        """Return the elapsed times of jumps inside of the solve, on which adaptive steps end."""
        near = BESIDE_JUMP * torch.finfo(self.template.dtype).eps * max(self.furthest, 1e-300)
        times = {jump + side for jump in jump_times for side in (-near, near)}  # f has two values there
        times.update(*(signal.knots for signal in signals))
        elapsed = self.sign[..., None] * (np.array(sorted(times)) - self.begin[..., None])
        inside = (elapsed > 0) & (elapsed <= self.end[..., None])
        return np.sort(np.where(inside, elapsed, np.inf), -1) if inside.any() else None

    def coefficients(self, attempt: Attempt) -> tuple[Any, Tensor | None]:
        """Return what a step and the outputs inside of it are made with; differentiable in γ and the times."""
        method, size = self.method, attempt.size
        kept, error, coefficients = self._equal
        if isinstance(size, Tensor) or error != attempt.error or (kept is not size and (kept != size).any()):
            packed = self._of_gamma(functools.partial(method.packed, error=attempt.error), size)
            coefficients = method.unpack(packed, self.dims, error=attempt.error)
            self._equal = (None if isinstance(size, Tensor) else size, attempt.error, coefficients)
        if attempt.theta is None:
            return coefficients, None
        theta, lanes = attempt.theta, attempt.lanes
        if isinstance(size, Tensor):
            begin, outputs = self.differentiable(attempt.begin), self._on_device(attempt.outputs)
            if self.lanes is not None:
                index, t = self._on_device(lanes), self.t.expand(self.lanes, -1)
                begin, size, t = begin[index], size[index], t[index, outputs + 1]
            else:
                t, size = self.t[outputs + 1], size.expand(len(outputs))
            theta = (t - begin) / size
        elif size.ndim:
            size = size[lanes]
        else:
            size = np.full_like(theta, size)
        return coefficients, self._of_gamma(method.blend, size, theta, lanes=lanes)

    def _of_gamma(self, formula: Callable[..., Any], *args: Any, lanes: Any = None) -> Tensor:
        """Return a formula of γ, sizes (of outputs with their ``lanes``) and fractions: in NumPy if all are numbers."""
        gamma = self.gamma
        needs_gradient = isinstance(gamma, Tensor) and gamma.requires_grad and torch.is_grad_enabled()
        is_host = self.number is not None and not self.traced and not isinstance(args[0], Tensor)
        if is_host and needs_gradient and args[0].ndim and not self.template.is_cpu:
            is_host = False  # the derivative of an array by γ would wait for the device
        if is_host:
            xp = torch if args[0].ndim else np
            if needs_gradient:
                return HostFormula.apply(gamma, self.number, formula, args, xp, self.template)
            return on_host(formula, self.number, args, xp, self.template)
        args = tuple([x.double() if isinstance(x, Tensor) else self._on_device(x) for x in args])
        gamma = torch.as_tensor(gamma, dtype=torch.float64, device=args[0].device)
        if gamma.dim() and self.lanes is not None and lanes is not None and len(gamma) > 1:
            gamma = gamma[self._on_device(lanes)]
        if gamma.dim():  # behind the lanes, or the outputs
            args = tuple(
                [x.reshape(*x.shape, *[1] * (gamma.dim() - (x.dim() if self.lanes is not None else 0))) for x in args]
            )
        return formula(torch, gamma, *args).to(self.template)

    def take(self, state: Rows, attempt: Attempt) -> tuple[Rows, Any, Rows]:
        return self.step(state, self.coefficients(attempt), attempt)

    def step(
        self, state: Rows, coefficients: tuple[Any, Tensor | None], attempt: Attempt, field: Field | None = None
    ) -> tuple[Rows, Any, Rows]:
        """Return the steps of an attempt: the state after it, its error, and the rows of the outputs in it, outputs
        first.
        """
        packed, blend = coefficients
        program = self.program if blend is None and field is None else None
        field, error, columns = self.term if field is None else field, None, None
        keep = blend is not None
        for number, times in enumerate(attempt.times, attempt.number):
            if program is not None and (result := program(state, packed, list(times), self.term.like)) is not None:
                self.tally.add("evaluation", self.method.evaluations)
                state, error = result
                continue
            own = packed if self.noise is None else (*packed, self.noise(number))
            state, error, columns = self.method.step(state, own, times, field, error=attempt.error, keep=keep)
        if attempt.outputs is None:
            return state, error, ()
        outputs: list[Tensor] = []  # as if all were at the end of the step
        for row in state[: self.term.rows]:
            outputs.append(row.unsqueeze(0) if self.lanes is None or attempt.lanes is None else row[attempt.lanes])
        if self.t is not None and attempt.error:
            outputs = self._with_slopes(outputs, state, attempt)
        if blend is not None and columns is not None:
            outputs = self._interpolated(outputs, columns, blend, attempt)
        return state, error, tuple(outputs)

    def _with_slopes(self, outputs: list[Tensor], state: Rows, attempt: Attempt) -> list[Tensor]:
        """Return the outputs h at the end of a step, with the gradient of their own times: h + h' (t - end), where t =
        end.
        """
        end, which = self.differentiable(attempt.begin) + attempt.size, self._on_device(attempt.outputs)
        if self.lanes is None:
            lag, slopes = self.t[which + 1] - end, [slope.unsqueeze(0) for slope in self.slopes(state)]
        else:
            index = self._on_device(attempt.lanes)
            lag = self.t.expand(self.lanes, -1)[index, which + 1] - end[index]
            slopes = [slope[index] for slope in self.slopes(state)]
        lag = (lag - lag.detach()).to(state[0]).view(-1, *[1] * (outputs[0].dim() - 1))
        return [row + lag * slope for row, slope in zip(outputs, slopes, strict=False)]

    def _interpolated(self, ends: list[Tensor], columns: Tensor, blend: Tensor, attempt: Attempt) -> list[Tensor]:
        """Return the outputs inside of a step, (outputs, ...), or one for each lane, (outputs, elements)."""
        of_outputs = columns.unsqueeze(1) if self.lanes is None else columns[:, attempt.lanes]
        inside, is_end = combined(blend, of_outputs).unbind(1), attempt.theta == 1.0
        if not is_end.any():
            return list(inside)
        is_end = self._on_device(is_end).view(-1, *[1] * (inside[0].dim() - 1))
        return [torch.where(is_end, end, x) for end, x in zip(ends, inside, strict=True)]  # there the step itself

    def slopes(self, state: Rows) -> Rows:
        """Return the derivatives of the rows of a state that ends with the field's value."""
        if not self.term.second_order:
            return state[1:]
        _, m, f = state
        gamma = torch.as_tensor(self.gamma).to(m)
        return m, f - gamma * m

    # Norms

    def norms(self, rows: Rows) -> Array:
        """Root mean square of each row: (rows,), or (rows, lanes)."""
        x = torch.stack(rows).detach()
        x = x.unsqueeze(-1).flatten(1 if self.lanes is None else 2)
        wide = torch.float64 if self.lanes is not None else None
        return to_host(torch.linalg.vector_norm(x, dim=-1, dtype=wide) / math.sqrt(max(x.shape[-1], 1)))

    def ratio(self, before: Rows, after: Rows, error: Tensor) -> Array:
        """Norm of (error / tolerance), the RMS over all elements: the one transfer to the host in a step."""
        n, term = self.term.rows, self.term
        if self.program is not None and error.dim() < after[0].dim():  # the norm was a part of the program
            ratio = to_host(error.detach())
            return np.where(np.isfinite(ratio), ratio, np.inf)
        with torch.no_grad():
            scale = torch.maximum(torch.stack(before[:n]).abs(), torch.stack(after[:n]).abs())
            x = error / scale.mul_(self.settings.rtol).add_(self.settings.atol)
            norms: list[Tensor] = []
            for group in term.error_groups:
                piece = x[..., group]
                if self.lanes is None:
                    norms.append(torch.linalg.vector_norm(piece) / math.sqrt(max(piece.numel(), 1)))
                    continue
                dims, elements = [0, *range(2, piece.dim())], max(piece[:, :1].numel(), 1)
                norms.append(torch.linalg.vector_norm(piece, dim=dims, dtype=torch.float64) / math.sqrt(elements))
            ratio = to_host(norms[0] if len(norms) == 1 else torch.stack(norms).amax(0))
        return np.where(np.isfinite(ratio), ratio, np.inf)

    # Limits and failures

    @property
    def resolution(self) -> float:
        """Relative rounding of the time: that of the host, or of the dtype in which f receives it."""
        return torch.finfo(self.template.dtype if self.term.time_dependent else torch.float64).eps

    def check_nfe(self, t: Any, size: Any, steps: int) -> None:
        """Before steps: raise if they would exceed ``max_nfe``."""
        nfe = self.tally.nfe
        spent = nfe.forward if _torch.backward_pass() == -1 else nfe.backward
        if spent + steps * self.method.evaluations > self.max_nfe:
            message = (
                f"the solve needs more than max_nfe={self.max_nfe} evaluations. "
                "Fix: loosen rtol and atol, shorten the time span, or raise max_nfe"
            )
            raise self.failure(MaxNFEError, message, t, size)

    def start_not_finite(self, norm: Array) -> SolverError:
        """Return the error for a first state that is not finite, given the norms of its rows."""
        bad = ~np.isfinite(norm)
        lane = first_index(bad.any(0))
        message = FIELD_NOT_FINITE
        of_rows = (slice(self.term.rows), *lane)
        if bad[of_rows].any():
            message = "the initial state is not finite. Fix: look at the block's input, or at the cell of an ODERNN"
        return self.failure(NonFiniteError, message, self.begin[lane], math.nan)

    def failure(self, kind: type[SolverError], message: str, t: Any, size: Any) -> SolverError:
        """Return an error with the time, the step size and the evaluations; a query outside of a signal is raised
        instead.
        """
        refuse_queries_outside()
        t, size = (float(np.ravel(_torch.to_numpy(x) if isinstance(x, Tensor) else x)[0]) for x in (t, size))
        return kind(f"{message} (method {self.settings.method!r})", t=t, step_size=abs(size), nfe=self.tally.nfe.total)

    def not_finite(self, attempt: Attempt, state: Rows, lane: tuple[int, ...] = ()) -> SolverError:
        """Return the error for a step that is not finite. It takes the step once more to find the first such
        evaluation.
        """
        found: list[Any] = []
        size = attempt.size.detach().numpy() if isinstance(attempt.size, Tensor) else np.asarray(attempt.size)
        begin = self.time(attempt.begin) if attempt.error else attempt.begin
        begin, size = float(np.asarray(begin)[lane]), float(size[lane])  # type: ignore[assignment]
        nodes = iter(self.method.nodes * len(attempt.times))

        def watched(t: Tensor, x: Tensor) -> Tensor:
            f, node = self.term(t, x), next(nodes)
            if not found and bool(torch.isfinite(x[lane]).all()) and not bool(torch.isfinite(f[lane]).all()):
                found.append(begin + node * size)
            return f

        with torch.no_grad():
            coefficients, _ = self.coefficients(attempt)
            self.step(state, (coefficients, None), attempt, watched)
        if found:
            return self.failure(NonFiniteError, FIELD_NOT_FINITE, found[0], size)
        message = "the state or its error is not finite. Look for: a field that grows without bound"
        return self.failure(NonFiniteError, message, begin, size)

    def advice(self) -> str:
        """Advice where steps are short because of the damping."""
        if self.strongest <= max(1.0, STRONG / max(float(self.end.max()), 1e-300)):  # with less, the span is long
            return ""
        return (
            f"method='exponential', because the damping of {self.strongest:g} keeps the steps of "
            f"{self.settings.method!r} short, or "
        )


def integrate(problem: Problem, state: Rows, take: Take | None = None, *, every: int = 1_000_000) -> Rows:
    """Solve from a state of the method: return the rows at the output times, (T, elements) or (T, lanes, elements).

    ``take`` takes the steps of an attempt, of which there are at most ``every`` on a grid.
    """
    take = problem.take if take is None else take
    adaptive: Any = AdaptiveSteps(problem, state) if problem.settings.steps is None else None
    saved = Outputs(problem, state)
    for attempt in fixed_steps(problem, every) if adaptive is None else iter(adaptive.next, None):
        after, error, outputs = take(state, attempt)
        accepted: Any = True
        if adaptive is None:
            problem.tally.add("accepted", len(attempt.times))
            if open_records:
                problem.tally.report(attempt.begin, attempt.size, np.asarray(True))
        else:
            accepted = adaptive.accept(attempt, state, after, error)
        if accepted is True or accepted.all():
            state = after
        elif accepted.any():
            if after[0].requires_grad and (adaptive.control.failures[~accepted] > 0).any():
                attempt = adaptive.exclude(attempt, ~accepted)  # 0 times NaN is NaN in a graph
                after, _, outputs = take(state, attempt)
            moved = torch.from_numpy(accepted).to(problem.template.device)
            moved = moved.view(-1, *[1] * (state[0].dim() - 1))
            state = tuple([torch.where(moved, new, old) for new, old in zip(after, state, strict=True)])
        if attempt.outputs is not None and (accepted is True or accepted.any()):
            saved.add(attempt, outputs, accepted)
    return saved.rows()


def fixed_steps(problem: Problem, every: int) -> Iterator[Attempt]:
    """Return the steps of a grid, a number of equal ones between two output times, in segments of at most ``every``.

    Sizes are arrays, or tensors where a graph is traced or gradients flow to the times.
    """
    p, nodes, number, times = problem, problem.method.nodes, 0, problem.grid()  # (T,) or (T, lanes)
    every = 1 if open_records else every
    for interval, count in enumerate(p.counts()):
        for done in range(0, count, every):
            steps = min(every, count - done)
            begin, end = times[interval], times[interval + 1]  # each segment has a graph of its own
            size = (end - begin) / count
            if p.max_nfe is not None:
                p.check_nfe(begin + done * size, size, steps)
            attempt = Attempt(size, [p.no_times] * steps, begin + done * size, error=False, number=number)
            if p.wants_time:
                fractions = [min((i + node) / count, 1.0) for i in range(done, done + steps) for node in nodes]
                stages, k = p.stages([begin * (1.0 - c) + end * c for c in fractions]), len(nodes)
                attempt.times = [stages[i : i + k] for i in range(0, len(stages), k)]
            if done + steps == count:
                attempt.outputs = np.array([interval])
            yield attempt
            number += steps


class Outputs:
    """The rows at the output times, in the order in which they are made, and the place of each."""

    def __init__(self, problem: Problem, state: Rows) -> None:
        self.problem, rows = problem, state[: problem.term.rows]
        self.scattered = problem.lanes is not None and problem.settings.steps is None
        self.pieces: tuple[list[Tensor], ...] = ([], [])[: len(rows)]
        self.count, starts = 0, not problem.end_only
        if self.scattered:
            at_start = np.concatenate([np.zeros_like(problem.end)[:, None], problem.outputs], -1).T == 0
            self.place = np.where(at_start, np.arange(problem.lanes or 0), 0)  # a lane may rest there
            starts |= bool(at_start[1:].any())
        if starts:
            for pieces, row in zip(self.pieces, rows, strict=True):
                pieces.append(row if self.scattered else row.unsqueeze(0))
            self.count = problem.lanes or 0
        if self.scattered and starts and problem.t is not None:
            self._rest(state, at_start)

    def _rest(self, state: Rows, at_start: Array) -> None:
        """Give the outputs of lanes that rest where they start the gradient of their times: h + (t - t_0) h'."""
        outputs, lanes = np.nonzero(at_start[1:])
        if not len(lanes):
            return
        p, index = self.problem, self.problem._on_device(lanes)
        t = p.t.expand(p.lanes or 0, -1)
        moved = (t[index, p._on_device(outputs + 1)] - t[index, 0]).to(state[0])
        for pieces, row, slope in zip(self.pieces, state, p.slopes(state), strict=False):
            pieces.append(row[index] + moved.view(-1, *[1] * (row.dim() - 1)) * slope[index])
        self.place[outputs + 1, lanes] = self.count + np.arange(len(lanes))
        self.count += len(lanes)

    def add(self, attempt: Attempt, rows: Rows, accepted: Any) -> None:
        for pieces, row in zip(self.pieces, rows, strict=True):
            pieces.append(row)
        if self.scattered:
            good = accepted[attempt.lanes]
            self.place[attempt.outputs[good] + 1, attempt.lanes[good]] = self.count + np.nonzero(good)[0]
            self.count += len(good)

    def rows(self) -> Rows:
        made: list[Tensor] = []
        for pieces in self.pieces:
            row = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
            if self.scattered:
                place = torch.from_numpy(self.place[1:] if self.problem.end_only else self.place)
                row = row[place.to(row.device)]
            made.append(row)
        return tuple(made)


def to_host(x: Tensor) -> Array:
    """Return the values of a norm on the host; dimensions of torch.func's transforms count as more elements."""
    if _torch.is_transformed():
        return np.sqrt((_torch.to_numpy(x) ** 2).reshape(-1, *x.shape).mean(0))
    return x.double().cpu().numpy()
