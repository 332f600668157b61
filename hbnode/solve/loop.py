"""The time loop of a solve: attempt a step, accept or reject it, save the outputs inside it."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode.errors import MaxNFEError, NonFiniteError, SolverError
from hbnode.nfe import open_records
from hbnode.signal import Signal, queries, refuse_queries_outside
from hbnode.solve.control import (
    BESIDE_JUMP,
    FIELD_NOT_FINITE,
    TRIALS,
    AdaptiveSteps,
    Array,
    Attempt,
    first_index,
    inside_of,
)
from hbnode.solve.events import EventSteps
from hbnode.solve.methods import Field, HostFormula, Method, Rosenbrock, Splitting, combined, on_host
from hbnode.solve.settings import Settings
from hbnode.solve.term import ODETerm

UNKNOWN_QUERIES = (
    "func asks a Signal at times that are not one linear function of t for all samples, or one for each sample with "
    "per_sample=True. Steps do not end on its sample times, and may miss its pulses. Fix: "
    "options={'max_step': w} with the width w of the narrowest pulse, or jump_times=[...]."
)
Rows = tuple[Tensor, ...]
Take = Callable[[Rows, Attempt], tuple[Rows, Any, Rows]]  # returns the new state, its error and the outputs
STRONG = 50.0  # smallest γT for which the damping limits the steps of Nystrom methods


class Problem:
    """An equation, a method, output times (T,) or (lanes, T) and settings, with functions that take single steps.

    A lane is a sample with its own step sizes; ``lanes`` is their number, or None if all samples share each step.

    Attributes:
        gamma: the damping γ, a number or a tensor, which is float64 on the CPU unless it is traced.
        number: γ as a Python number, if it is a scalar that can be read from the host; else None.
        strongest: the largest γ if it limits the step size; else 0.
        longest_step: the largest adaptive step size H; Nystrom methods need γH <= 16.
        max_nfe: the largest number of function evaluations; None if there is no limit.
        t: the times as a tensor if they need gradients or a graph is traced; else None.
        begin, sign: initial time, and 1.0 or -1.0 for solving forward or backward, () or (lanes,).
        outputs, end: output times measured from the start, (T - 1,) or (lanes, T - 1), and the last of them.
        common: whether lanes with different times take the same fraction of their spans in each step.
        jumps: sorted times of the jumps of f from the start, padded by inf, (K,) or (lanes, K); None without jumps.
            Adaptive steps and those of events end just before and just after a jump, which are two times of the array.
        knows_jumps: whether ``jumps`` was set before the solve, so that the signals of f are not asked for theirs.
        ends_on_knots: whether steps end on every sample time of a signal, whose values need gradients.
        near: distance of these times from the jump; output times are on a jump if they are not farther from it.
        noise: maps the index of a step to its standard normal variables; None for an ODE.
        program: the compiled step; None if steps are not compiled.
        end_only: whether to return the final state only.
        events: the events of each sample, and the ``stepper`` of their solve, which has their record.
        columns: the columns of the last step for the search for events.
        owned: the objects that the backward pass needs, and to which the graph has only weak references.
    """

    def __init__(
        self, term: ODETerm, method: Method, t: Tensor, settings: Settings, *, end_only: bool = False, events: Any = ()
    ) -> None:  # fmt: skip
        self.term, self.settings, self.counter, self.end_only = term, settings, term.counter, end_only
        self.method: Any = method
        if isinstance(method, Splitting) and (activation := getattr(term.inner, "activation", None)) is not None:
            shape = term.template.shape  # rows may be flat, and σ need not be elementwise
            self.method = method.with_activation(lambda m: activation(m.view(shape)).reshape(m.shape))
        elif isinstance(method, Rosenbrock):
            self.method = method.for_term(term)
        self.lanes, self.template = term.lanes, term.template.detach()  # detached, else it would add a graph edge
        self.dims = self.template.dim() if term.per_channel else 1 if self.lanes is None else 2  # dimensions of a row
        self.wants_time = not term.second_order or term.time_dependent
        self.no_times = [self.template.new_zeros(())] * method.evaluations
        self.gamma, self.traced = term.damping, term.traced
        self.number: Any = None
        self.jumps: Array | None = None
        self.common = settings.common_steps and term.lanes is not None
        self.noise: Callable[[int], Tensor] | None = None
        self.program: Callable[..., Any] | None = None
        self.events, self.columns = events, None
        self.stepper: Any = None
        self.owned: list[Any] = []
        self.knows_jumps = self.ends_on_knots = False
        self._last: tuple[Any, ...] = (None, None, None)  # the last step size, error flag and coefficients
        self.t: Any = t
        self.max_nfe: Any = None
        if isinstance(self.gamma, float):
            self.number = self.gamma
        elif not self.traced:
            if not self.gamma.dim() and not _torch.is_transformed():
                self.number = self.gamma.item()
            if self.number is None or self.gamma.is_cpu:  # else gradients of γ would wait for the device
                self.gamma = self.gamma.to("cpu", torch.float64)
        if self.traced:
            return
        options = settings.options or {}
        self.max_nfe = options.get("max_nfe")
        self.strongest, self.longest_step = 0.0, float(options.get("max_step", math.inf))
        if method.damping_limit < math.inf:
            largest = _torch.plain(torch.as_tensor(self.gamma)).abs().max() if self.number is None else self.number
            self.strongest = abs(float(largest))
            if self.strongest:
                self.longest_step = min(self.longest_step, method.damping_limit / self.strongest)
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
        self.near = BESIDE_JUMP * torch.finfo(self.template.dtype).eps * max(self.furthest, 1e-300)
        if settings.jump_times and settings.steps is not None:
            self.jumps = self._jumps_inside(settings.jump_times, [])

    def replace(self, gamma: Any, t: Tensor | None) -> None:
        """Set γ and the times to tensors of the same values, with respect to which gradients are computed."""
        self.gamma, self.t, self._last = gamma, t, (None, None, None)

    # Times and sizes

    def grid(self) -> Any:
        """Return the times, including the initial time, in the shape (T,) or (T, lanes)."""
        if self.t is not None:
            return self.t.movedim(-1, 0)
        first = np.zeros_like(self.end)[..., None]
        times = np.concatenate([first, self.outputs], -1)
        return np.moveaxis(self.begin[..., None] + self.sign[..., None] * times, -1, 0)

    def counts(self) -> Sequence[int]:
        """Return the number of fixed steps in each output interval."""
        return [self.settings.steps or 1] * (self.grid().shape[0] - 1)

    def pieces(self) -> Iterator[tuple[int, tuple[Array, Array] | None, int]]:
        """Yield the parts of the output intervals between jumps of f, each with its own fixed steps.

        They are the index of the interval, the start and end of the part, and its number of steps. Without jumps the
        part is None, the whole interval. If a lane has fewer jumps than others, its last parts have length 0.
        """
        for interval, count in enumerate(self.counts()):
            if self.jumps is None:
                yield interval, None, count
                continue
            begin, end = self.outputs[..., interval - 1] if interval else 0 * self.end, self.outputs[..., interval]
            inside = (self.jumps > (begin + self.near)[..., None]) & (self.jumps < (end - self.near)[..., None])
            cuts = np.sort(np.where(inside, self.jumps, end[..., None]), -1)[..., : inside.sum(-1).max()]
            for part in itertools.pairwise([begin, *np.moveaxis(cuts, -1, 0), end]):
                yield interval, part, count

    def bound(self, elapsed: Array, interval: int) -> Any:
        """Return the time for a bound of a part of an interval; jumps have no gradient."""
        time, grid = self.time(elapsed), self.grid()
        if self.t is None:
            return time
        time = self._on_device(time).to(self.t)
        for k in (interval, interval + 1):
            is_output = elapsed == (self.outputs[..., k - 1] if k else 0.0)
            time = torch.where(self._on_device(is_output), grid[k], time)
        return time

    def lag(self, begin: Tensor, elapsed: Array, interval: int) -> Tensor | None:
        """Return 0 with the gradient of ``begin``, in the lanes in which it is an output time on a jump; or None."""
        if self.t is None or interval == 0 or not (elapsed == self.outputs[..., interval - 1]).all():
            return None
        is_jump = self.beside_jump(elapsed) != 0
        if not self.method.is_fsal and is_jump.any():
            raise ValueError(
                f"the gradient of an output time on a jump is not known with method={self.settings.method!r}. "
                "Fix: t.detach(), or method='nystrom4'."
            )
        return torch.where(is_jump, begin - begin.detach(), 0.0)

    def beside_jump(self, elapsed: Array) -> Any:
        """Return a short time, signed as a step, if ``elapsed`` is the time of a jump, else 0."""
        is_jump = (abs(self.jumps - elapsed[..., None]) <= self.near).any(-1)
        short = np.where(is_jump, self.sign * 2.0 * self.near, 0.0)
        return short if self.t is None else self._on_device(short).to(self.t)

    def stops(self) -> Array:
        """Return the output times on which steps end, padded by the end.

        If the times need gradients, a step passes an output time on a jump of f, which stays fixed.
        """
        if self.t is None or self.jumps is None:
            return self.outputs
        distance = abs(self.jumps[..., None, :] - self.outputs[..., None]).min(-1)
        return np.where(distance <= 2.0 * self.near, self.end[..., None], self.outputs)

    def time(self, elapsed: Array) -> Any:
        """Return the time t, () or (lanes,), for a time ``elapsed`` since the start."""
        return self.begin + self.sign * elapsed

    def stages(self, times: Sequence[Any]) -> Sequence[Tensor]:
        """Return times as arguments of the field: scalar tensors, or (lanes, 1, ...) to broadcast with the state."""
        if isinstance(times[0], Tensor):
            stages = torch.stack(list(times)).to(self.template)
        else:
            stages = torch.from_numpy(np.stack(times)).to(self.template)
        if stages.dim() > 1:
            stages = stages.reshape(*stages.shape, *[1] * (self.term.dims - 1))
        return stages.unbind(0)

    def differentiable(self, elapsed: Array, empty: float = 0.0) -> Tensor:
        """Return the time for ``elapsed`` as a tensor with gradients with respect to the output times.

        The time lies at a constant fraction between its neighbouring output times, or ``empty`` if those are equal.
        Jumps of f are treated as output times without gradients.
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
        i = np.where(elapsed == 0, 0, i)[..., None]  # the first time, even if the next output times equal it
        first, last = (np.take_along_axis(values, i + k, -1)[..., 0] for k in (0, 1))
        with np.errstate(all="ignore"):
            fraction = self._on_device(np.where(last > first, (elapsed - first) / (last - first), empty))
        begin, end = (known.gather(-1, self._on_device(i + k)).squeeze(-1) for k in (0, 1))
        return begin + fraction * (end - begin)

    def _on_device(self, x: Array) -> Tensor:
        return torch.from_numpy(np.array(x)).to(self.template.device)  # np.array copies, also from arrays without dims

    # Steps

    def start(self, y0: Any) -> Rows:
        """Return the method's initial state, and set ``jumps`` from the signals that the field evaluates."""
        rows, is_fixed = self.term.flatten(y0), self.settings.steps is not None
        asked: list[tuple[Signal, Tensor]] = []
        if self.method.is_fsal:
            t = self.no_times[0]
            if self.wants_time:
                begin = self.grid()[0] if self.t is not None else self.begin
                if is_fixed and self.jumps is not None:
                    begin = begin + self.beside_jump(0.0 * self.end)
                (t,) = self.stages([begin])
            if self.traced:
                return (*rows, self.term(t, rows[0]))
            before, queries.asked = queries.asked, asked
            try:
                rows = (*rows, self.term(t, rows[0].clone()))  # a copy, because f may change its input in place
            finally:
                queries.asked = before
        if (self.settings.jump_times or asked) and not is_fixed and not self.knows_jumps:
            self.jumps = self._jumps_inside(self.settings.jump_times, self._knots(asked, t, rows[0]))
            self.ends_on_knots = torch.is_grad_enabled() and any(signal.u.requires_grad for signal, _ in asked)
        return rows

    def _knots(self, asked: Sequence[tuple[Signal, Tensor]], t: Tensor, x: Tensor) -> list[Array]:
        """Return the times since the start at which signals are asked for their samples, (K,) or (lanes, K).

        A signal asked at t itself, or a view of it, has them at its sample times. For others, two further evaluations
        of the field find the query time as a linear function of t.
        """
        if not asked or not self.wants_time:
            return []
        address, *asked_at = (_torch.plain(x).untyped_storage()._cdata for x in (t, *(q for _, q in asked)))
        if all(place == address for place in asked_at):
            return [self.sign[..., None] * (np.array(signal.knots) - self.begin[..., None]) for signal, _ in asked]
        queries_at, before, places = [[q for _, q in asked]], queries.asked, (0.0, TRIALS[0], TRIALS[-1])
        try:
            for place in places[1:]:
                queries.asked = []
                self.term.trial(self.stages([self.time(place * self.end)])[0], x.clone())
                queries_at.append([q for _, q in queries.asked])
        finally:
            queries.asked = before
        found: list[Array] = []
        for k, (signal, _) in enumerate(asked):
            q = [_torch.to_numpy(of_time[k]).reshape(-1) for of_time in queries_at if k < len(of_time)]
            slack = 64 * torch.finfo(self.template.dtype).eps * max(abs(x).max() for x in q)
            if all(x.shape == q[0].shape and (abs(x - q[0]) <= slack).all() for x in q):  # it does not depend on t
                continue
            is_known = len(q) == 3 and q[0].size in (1, self.lanes)
            q0, q1, q2 = (x.reshape(self.end.shape) if is_known and x.size == self.end.size else x for x in q)
            if not is_known or (abs((q2 - q0) * places[1] - (q1 - q0) * places[2]) > slack).any():
                if "max_step" not in (self.settings.options or {}) and not self.settings.jump_times:
                    warnings.warn(UNKNOWN_QUERIES, stacklevel=2)
                continue
            with np.errstate(all="ignore"):
                found.append((np.array(signal.knots) - q0[..., None]) / ((q1 - q0) / (places[1] * self.end))[..., None])
        return found

    def _jumps_inside(self, jump_times: Sequence[float], knots: Sequence[Array]) -> Array | None:
        sides: tuple[float, ...] = (-self.near, self.near)  # left and right limits of f differ
        slack = 0.0
        if self.settings.steps is not None and not self.events:
            sides, slack = (0.0,), self.near
        times = {jump + side for jump in jump_times for side in sides}
        elapsed = self.sign[..., None] * (np.array(sorted(times)) - self.begin[..., None])
        elapsed = np.concatenate([elapsed, *knots], -1)
        inside = (elapsed > -slack) & (elapsed <= self.end[..., None] + slack)
        return np.sort(np.where(inside, elapsed, np.inf), -1) if inside.any() else None

    def coefficients(self, attempt: Attempt) -> tuple[Any, Tensor | None]:
        """Return the coefficients of a step, and those of its outputs; both are differentiable in γ and the times."""
        method, size = self.method, attempt.size
        last_size, error, coefficients = self._last
        if isinstance(size, Tensor) or error != attempt.error or (last_size is not size and (last_size != size).any()):
            packed = self._of_gamma(functools.partial(method.packed, error=attempt.error), size)
            coefficients = method.unpack(packed, self.dims, error=attempt.error)
            self._last = (None if isinstance(size, Tensor) else size, attempt.error, coefficients)
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
        """Return ``formula(xp, γ, *args)`` as a tensor; ``lanes`` are the lanes of the elements of ``args``.

        The module xp is NumPy or torch. The formula runs on the host if γ is a known number and gradients allow it.
        """
        gamma = self.gamma
        needs_gradient = isinstance(gamma, Tensor) and gamma.requires_grad and torch.is_grad_enabled()
        is_host = self.number is not None and not self.traced and not isinstance(args[0], Tensor)
        if is_host and needs_gradient and args[0].ndim and not self.template.is_cpu:
            is_host = False  # the backward pass of HostFormula would wait for the device
        if is_host:
            xp = torch if args[0].ndim else np
            if needs_gradient:
                return HostFormula.apply(gamma, self.number, formula, args, xp, self.template)
            return on_host(formula, self.number, args, xp, self.template)
        args = tuple([x.double() if isinstance(x, Tensor) else self._on_device(x) for x in args])
        gamma = torch.as_tensor(gamma, dtype=torch.float64, device=args[0].device)
        if gamma.dim() and self.lanes is not None and lanes is not None and len(gamma) > 1:
            gamma = gamma[self._on_device(lanes)]
        if gamma.dim():  # its dimensions follow those of lanes or outputs
            args = tuple(
                [
                    x.reshape(*x.shape, *[1] * (gamma.dim() - (args[0].dim() if self.lanes is not None else 0)))
                    for x in args
                ]
            )
        return formula(torch, gamma, *args).to(self.template)

    def take(self, state: Rows, attempt: Attempt) -> tuple[Rows, Any, Rows]:
        return self.step(state, self.coefficients(attempt), attempt)

    def step(
        self, state: Rows, coefficients: tuple[Any, Tensor | None], attempt: Attempt, field: Field | None = None
    ) -> tuple[Rows, Any, Rows]:
        """Take the steps of an attempt; return the new state, its error and the rows of the outputs, (outputs, ...)."""
        packed, blend = coefficients
        program = self.program if blend is None and field is None and not self.events else None
        field, error, columns = self.term if field is None else field, None, None
        dense: Any = blend is not None or bool(self.events)
        if dense and self.lanes is not None and not self.events and isinstance(self.method, Rosenbrock):
            dense = self._on_device(inside_of(attempt, self.lanes))
        if attempt.restart is not None:
            state = self._restarted(state, attempt, field)
        for number, times in enumerate(attempt.times, attempt.number):
            if program is not None and (result := program(state, packed, list(times), self.term.like)) is not None:
                self.counter.add("evaluation", self.method.evaluations)
                state, error = result
                continue
            own = packed if self.noise is None else (*packed, self.noise(number))
            state, error, columns = self.method.step(state, own, times, field, error=attempt.error, dense=dense)
        if self.events and columns is not None:
            self.columns = columns.detach()
        if attempt.outputs is None:
            return state, error, ()
        outputs: list[Tensor] = []  # the state at the end of the step, once per output
        for row in state[: self.term.rows]:
            outputs.append(row.unsqueeze(0) if self.lanes is None or attempt.lanes is None else row[attempt.lanes])
        if self.t is not None and attempt.error:
            outputs = self._with_slopes(outputs, state, attempt)
        if blend is not None and columns is not None:
            outputs = self._interpolated(outputs, columns, blend, attempt)
        return state, error, tuple(outputs)

    def _restarted(self, state: Rows, attempt: Attempt, field: Field) -> Rows:
        """Return the state with the value of the field just after a jump.

        If the jump is on an output time, its ``lag`` takes the gradient of this time from the later states.
        """
        *rows, _ = state
        if attempt.lag is not None:
            lag = attempt.lag.to(rows[0]).reshape(-1, *[1] * (rows[0].dim() - 1))
            rows = [row - lag * slope for row, slope in zip(rows, self.slopes(state), strict=True)]
        return (*rows, field(attempt.restart, rows[0]))

    def _with_slopes(self, outputs: list[Tensor], state: Rows, attempt: Attempt) -> list[Tensor]:
        """Return the outputs y at the end of a step with gradients with respect to their times.

        The values do not change: y + y' (t - end), where the output time t equals the end of the step.
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
        """Return the rows of the outputs inside a step, (outputs, ...), from dense output, or ``ends`` at its end."""
        of_outputs = columns.unsqueeze(1) if self.lanes is None else columns[:, attempt.lanes]
        inside, is_end = combined(blend, of_outputs).unbind(1), attempt.theta == 1.0
        if not is_end.any():
            return list(inside)
        is_end = self._on_device(is_end).view(-1, *[1] * (inside[0].dim() - 1))
        return [torch.where(is_end, end, x) for end, x in zip(ends, inside, strict=True)]

    def slopes(self, state: Rows) -> Rows:
        """Return the time derivatives of the rows of a state; the last entry of ``state`` is the field's value."""
        if not self.term.second_order:
            return state[1:]
        _, m, f = state
        gamma = torch.as_tensor(self.gamma).to(m)
        return m, f - gamma * m

    # Norms

    def norms(self, rows: Rows) -> Array:
        """Return the root mean square of each row, (rows,) or (rows, lanes)."""
        x = torch.stack(rows).detach()
        x = x.unsqueeze(-1).flatten(1 if self.lanes is None else 2)
        for dtype in (None if self.lanes is None else torch.float64, torch.float64):  # squares may overflow in float32
            norms = to_host(torch.linalg.vector_norm(x, dim=-1, dtype=dtype) / math.sqrt(max(x.shape[-1], 1)))
            if np.isfinite(norms).all():
                break
        return norms

    def ratio(self, before: Rows, after: Rows, error: Tensor) -> Array:
        """Return the root mean square of error / tolerance, () or (lanes,), the largest of all ``error_groups``.

        This is the only transfer to the host in a step.
        """
        n, term = self.term.rows, self.term
        if self.program is not None and error.dim() < after[0].dim():  # the compiled step returns the norm
            ratio = to_host(error.detach())
            return np.where(np.isfinite(ratio), ratio, np.inf)
        with torch.no_grad():
            scale = torch.maximum(torch.stack(before[:n]).abs(), torch.stack(after[:n]).abs())
            x = error / scale.mul_(self.settings.rtol).add_(self.settings.atol)
            for dtype in (None, torch.float64):  # squares may overflow in float32
                norms: list[Tensor] = []
                for group in term.error_groups:
                    piece = x[..., group]
                    if self.lanes is None:
                        norms.append(torch.linalg.vector_norm(piece, dtype=dtype) / math.sqrt(max(piece.numel(), 1)))
                        continue
                    dims, elements = [0, *range(2, piece.dim())], max(piece[:, :1].numel(), 1)
                    norms.append(torch.linalg.vector_norm(piece, dim=dims, dtype=torch.float64) / math.sqrt(elements))
                ratio = to_host(norms[0] if len(norms) == 1 else torch.stack(norms).amax(0))
                if np.isfinite(ratio).all():
                    break
        return np.where(np.isfinite(ratio), ratio, np.inf)

    # Limits and failures

    @property
    def resolution(self) -> float:
        """Relative rounding error of times, in the dtype of the state if f depends on time."""
        return torch.finfo(self.template.dtype if self.term.time_dependent else torch.float64).eps

    def check_nfe(self, t: Any, size: Any, evaluations: int) -> None:
        """Raise MaxNFEError if that many further evaluations would exceed ``max_nfe``."""
        nfe = self.counter.nfe
        spent = nfe.forward if _torch.backward_pass() == -1 else nfe.backward
        if spent + evaluations > self.max_nfe:
            message = (
                f"the solve needs more than max_nfe={self.max_nfe} function evaluations. "
                "Fix: loosen rtol and atol, shorten the time span, or raise max_nfe"
            )
            raise self.failure(MaxNFEError, message, t, size)

    def start_not_finite(self, norm: Array) -> SolverError:
        """Return the error for an initial state that is not finite, given the norms of its rows."""
        bad = ~np.isfinite(norm)
        lane = first_index(bad.any(0))
        message = FIELD_NOT_FINITE
        of_rows = (slice(self.term.rows), *lane)
        if bad[of_rows].any():
            message = "the initial state is not finite. Fix: look at the block's input, or at the cell of an ODERNN"
        return self.failure(NonFiniteError, message, self.begin[lane], math.nan)

    def failure(self, kind: type[SolverError], message: str, t: Any, size: Any) -> SolverError:
        """Return an error with time, step size and NFE; raise instead if a signal was queried outside its times."""
        refuse_queries_outside()
        t, size = (float(np.ravel(_torch.to_numpy(x) if isinstance(x, Tensor) else x)[0]) for x in (t, size))
        return kind(
            f"{message} (method {self.settings.method!r})", t=t, step_size=abs(size), nfe=self.counter.nfe.total
        )

    def not_finite(self, attempt: Attempt, state: Rows, lane: tuple[int, ...] = ()) -> SolverError:
        """Return the error for a step that is not finite, after repeating it to find the first such evaluation."""
        found: list[Any] = []
        size = attempt.size.detach().numpy() if isinstance(attempt.size, Tensor) else np.asarray(attempt.size)
        begin = self.time(attempt.begin) if attempt.error else attempt.begin
        begin, size = float(np.asarray(begin)[lane]), float(size[lane])  # type: ignore[assignment]
        nodes = iter((*[0.0] * (attempt.restart is not None), *self.method.nodes * len(attempt.times)))

        def checked(t: Tensor, x: Tensor) -> Tensor:
            f, node = self.term(t, x), next(nodes, 0.5)  # dense output of rodas5p has one more, in the middle
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

    def advice(self) -> str:
        """Return a method as a further fix for error messages: for strong damping, or for a stiff field."""
        if self.strongest > max(1.0, STRONG / max(float(self.end.max()), 1e-300)):
            return (
                f"method='exponential', because the damping of {self.strongest:g} limits the steps of "
                f"{self.settings.method!r}, or "
            )
        return "" if isinstance(self.method, Rosenbrock) else "method='rodas5p' if func is stiff, or "


def integrate(problem: Problem, state: Rows, take: Take | None = None, *, every: int = 1_000_000) -> Rows:
    """Solve from a method's initial state and return its rows at all times, (T, elements) or (T, lanes, elements).

    ``take`` computes an attempt; its default is ``problem.take``. An attempt has at most ``every`` fixed steps.
    """
    take = problem.take if take is None else take
    adaptive: Any = None
    if problem.events:
        adaptive = problem.stepper = EventSteps(problem, state)
    elif problem.settings.steps is None:
        adaptive = AdaptiveSteps(problem, state)
    saved = Outputs(problem, state)
    for attempt in fixed_steps(problem, every) if adaptive is None else iter(adaptive.next, None):
        after, error, outputs = take(state, attempt)
        accepted: Any = True
        if adaptive is None:
            problem.counter.add("accepted", len(attempt.times))
            if open_records:
                problem.counter.report(attempt.begin, attempt.size, np.asarray(True))
        else:
            accepted = adaptive.accept(attempt, state, after, error)
        if accepted is True or accepted.all():
            state = after
        elif accepted.any():
            if after[0].requires_grad and (adaptive.control.failures[~accepted] > 0).any():
                attempt = adaptive.exclude(attempt, ~accepted)  # else gradients 0 * NaN = NaN reach the parameters
                after, _, outputs = take(state, attempt)
            moved = torch.from_numpy(accepted).to(problem.template.device)
            moved = moved.view(-1, *[1] * (state[0].dim() - 1))
            state = tuple([torch.where(moved, new, old) for new, old in zip(after, state, strict=True)])
        if attempt.outputs is not None and (accepted is True or accepted.any()):
            saved.add(attempt, outputs, accepted)
        if problem.events:
            state = adaptive.happen(state)
            if adaptive.ended is not None:
                lanes, rows = adaptive.ended
                saved.hold(lanes, rows, adaptive.now)
                adaptive.end()
    return saved.rows()


def fixed_steps(problem: Problem, every: int) -> Iterator[Attempt]:
    """Yield the fixed steps of a solve as attempts, each at most ``every`` equal steps of one output interval."""
    p, nodes, number, times = problem, problem.method.nodes, 0, problem.grid()  # (T,) or (T, lanes)
    every = 1 if open_records else every
    for interval, part, count in p.pieces():
        for done in range(0, count, every):
            steps = min(every, count - done)
            begin, end = times[interval], times[interval + 1]  # here, so that each attempt has its own graph
            if part is not None:
                begin, end = p.bound(part[0], interval), p.bound(part[1], interval)
                lag = p.lag(begin, part[0], interval)
                begin = begin if lag is None else begin - lag
            size = (end - begin) / count
            attempt = Attempt(size, [p.no_times] * steps, begin + done * size, error=False, number=number)
            if p.wants_time:
                if part is not None:
                    short = p.beside_jump(part[0])
                    begin, end = begin + short, end - p.beside_jump(part[1])
                    if number and not done and p.method.is_fsal and short.any():
                        (attempt.restart,), attempt.lag = p.stages([begin]), lag
                fractions = [min((i + node) / count, 1.0) for i in range(done, done + steps) for node in nodes]
                stages, k = p.stages([begin * (1.0 - c) + end * c for c in fractions]), len(nodes)
                attempt.times = [stages[i : i + k] for i in range(0, len(stages), k)]
            if p.max_nfe is not None:
                p.check_nfe(attempt.begin, size, steps * p.method.evaluations + (attempt.restart is not None))
            if done + steps == count and (part is None or (part[1] == p.outputs[..., interval]).all()):
                attempt.outputs = np.array([interval])
            yield attempt
            number += steps


class Outputs:
    """The rows at the output times, in the order of computation, and the index of each output among them."""

    def __init__(self, problem: Problem, state: Rows) -> None:
        self.problem, rows = problem, state[: problem.term.rows]
        self.scattered = problem.lanes is not None and (problem.settings.steps is None or bool(problem.events))
        self.pieces: tuple[list[Tensor], ...] = ([], [])[: len(rows)]
        self.count, starts = 0, not problem.end_only
        if self.scattered:
            at_start = np.concatenate([np.zeros_like(problem.end)[:, None], problem.outputs], -1).T == 0
            self.place = np.where(at_start, np.arange(problem.lanes or 0), 0)  # later times may equal the first
            starts |= bool(at_start[1:].any())
        if starts:
            for pieces, row in zip(self.pieces, rows, strict=True):
                pieces.append(row if self.scattered else row.unsqueeze(0))
            self.count = problem.lanes or 0
        if self.scattered and starts and problem.t is not None:
            self._add_at_start(state, at_start)

    def _add_at_start(self, state: Rows, at_start: Array) -> None:
        """Add the outputs whose time t equals the initial time t_0, as y + (t - t_0) y', for gradients of t."""
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

    def hold(self, lanes: Array, rows: Rows, now: Array) -> None:
        """Set the outputs after the times ``now`` (all lanes,) to ``rows``, the last states of ``lanes``."""
        for pieces, row in zip(self.pieces, rows, strict=True):
            pieces.append(row)
        which, outputs = np.nonzero(self.problem.outputs[lanes] > now[lanes, None])
        self.place[outputs + 1, lanes[which]] = self.count + which
        self.count += len(lanes)

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
    """Return norms as a NumPy array, as root mean squares over the batch dimensions of torch.func transforms."""
    if _torch.is_transformed():
        return np.sqrt((_torch.to_numpy(x) ** 2).reshape(-1, *x.shape).mean(0))
    if x.is_meta and type(x) is Tensor:
        raise ValueError("adaptive steps need numbers, and the device meta stores none. Fix: steps=8, or a device.")
    return x.double().cpu().numpy()
