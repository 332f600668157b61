"""A whole adaptive solve in graphs of torch: attempts with the controller inside.

The controller is that of :mod:`hbnode.solve.control`, with torch instead of NumPy, so an attempt, a step that is then
accepted or rejected, is one function of tensors. :func:`solve` compiles such functions and calls them until the solve
is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hbnode._tree import State, apply, parts
from hbnode.nfe import NFE, Tally
from hbnode.solve import compiled
from hbnode.solve.control import Array, Clip, Control, PIController, first_size
from hbnode.solve.methods import Method, combined
from hbnode.solve.term import ODETerm

Rows = tuple[Tensor, ...]

FAILURES = 5  # attempts in a row whose error is not finite, before the solve fails
STABLE = 3  # solves in a row with the same number of attempts, before a graph of that many is made
LONGEST = 16  # attempts in one graph


class Limits(NamedTuple):
    """Numbers of a solve, () or (lanes,), which a graph has in one tensor, so that other values need no other graph.

    Attributes:
        begin, sign: initial time, and 1.0 or -1.0 for solving forward or backward.
        end: final time, measured from the start.
        rtol, atol: tolerances.
        longest, shortest: the largest and the smallest step size.
        margin: the factor on error ratios in steps without outputs inside.
        rounding: the rounding error of times.
        resolution: the relative rounding error of the times that the field gets.
    """

    begin: Any
    sign: Any
    end: Any
    rtol: Any
    atol: Any
    longest: Any = math.inf
    shortest: Any = 0.0
    margin: Any = 1.0
    rounding: Any = 0.0
    resolution: Any = 2.0**-52


class Times(NamedTuple):
    """The tensors of a solve that do not change: γ, times of outputs and of jumps from the start, or None."""

    limits: Tensor
    gamma: Tensor
    outputs: Tensor | None = None
    jumps: Tensor | None = None


class Report(NamedTuple):
    """What the host is told after attempts: numbers of accepted and rejected ones, and whether the solve is done.

    ``excluded`` is the number of attempts of which some lane has an error that is not finite, and ``failed`` says
    whether no step size can meet the tolerance.
    """

    accepted: int
    rejected: int
    excluded: int
    failed: int
    done: int


def packed(control: Control, shape: tuple[int, ...]) -> Array:
    """Return the state of a controller as one array, (fields, *shape), from arrays that broadcast to ``shape``."""
    return np.stack([np.broadcast_to(np.asarray(x, float), shape) for x in control])


def _joined(control: Control) -> Tensor:
    return torch.stack([x.double() for x in control])


def _split(packed: Tensor) -> Control:
    c = Control(*packed.unbind(0))
    return c._replace(uneven=c.uneven > 0, rejected=c.rejected > 0, most=c.most.long(), passed=c.passed.long())


class Attempts:
    """The attempts of a solve: pure functions of the rows of the state and of the state of the controller.

    Arguments:
        term: the equation; with ``lanes``, each sample has its own step sizes.
        method: an adaptive method whose state ends with the field's value.
        times: what is constant during the solve.
        is_exact: whether steps end on the output times, which are then not interpolated.
    """

    def __init__(self, term: ODETerm, method: Method, times: Times, *, is_exact: bool = False) -> None:
        self.term, self.method, self.times, self.is_exact = term, method, times, is_exact
        self.limits = Limits(*times.limits.unbind(0))
        self.dims = term.template.dim() if term.per_channel else 1 if term.lanes is None else 2
        self.control = PIController(method.error_order or 1, self.limits.longest)
        stops = times.outputs if is_exact else None
        self.clip = Clip(self.limits.end, stops, times.jumps, self.limits.rounding)

    def start(self, y0: State) -> tuple[Rows, Tensor]:
        """Return the initial state of the method and of the controller, for a field that does not depend on time."""
        rows, limits = self.term.flatten(y0), self.limits
        (t,) = self._stages([limits.begin])
        rows = (*rows, self.term(t, rows[0]))
        with torch.no_grad():
            norms = torch.stack([self._norm(row) for row in rows])
            size = first_size(norms[0], norms[-1], limits.rtol, limits.atol, self.method.rows, self.method.error_order)
            size = torch.where(torch.isfinite(size), size, limits.end)
            size = torch.where(size < limits.longest, size, limits.longest)
            size = torch.where(torch.isfinite(norms).all(0), size, math.nan)
            none = torch.zeros_like(size)
            return rows, _joined(self.control.start(torch, size, none > 0, none))

    def saved(self, rows: Rows) -> Rows | None:
        """Return the rows of all output times, (T, ...) or (lanes, T, ...), with the initial state in them."""
        if self.times.outputs is None:
            return None
        count = self.times.outputs.shape[-1]
        if self.term.lanes is None:
            return tuple([row.expand(count, *row.shape).contiguous() for row in rows[: self.term.rows]])
        return tuple([row.unsqueeze(1).repeat(1, count, *[1] * (row.dim() - 1)) for row in rows[: self.term.rows]])

    def attempt(
        self, rows: Rows, control: Tensor, saved: Rows | None, excluded: Tensor | None = None
    ) -> tuple[Rows, Tensor, Rows | None, Tensor]:
        """Return the state, that of the controller, the outputs and the :class:`Report` after an attempt.

        Lanes that are done take a step of size 0, and so do lanes that are ``excluded``, which reject it. An error that
        is not finite would otherwise reach the gradients of all lanes, as 0 * NaN.
        """
        term, method, limits, n = self.term, self.method, self.limits, self.term.rows
        with torch.no_grad():
            before = _split(control)
            then, c = self.control.plan(torch, self.clip, before)
            size = c.taken if excluded is None else torch.where(excluded, 0.0, c.taken)
            ends = [before.now + node * size for node in method.nodes]
            stages = self._stages([limits.begin + limits.sign * torch.where(t < then, t, then) for t in ends])
        of_step = self._of_gamma(lambda *args: method.packed(*args, error=True), limits.sign * size)
        coefficients = method.unpack(of_step, self.dims, error=True)
        dense = saved is not None and not self.is_exact
        result = method.step(rows, coefficients, stages, term, error=True, dense=dense)
        with torch.no_grad():
            margin, found = limits.margin, None
            if saved is not None:
                t = self.times.outputs
                found = (t > before.now[..., None]) & (t <= then[..., None])
                inside = found & (t < then[..., None])
                margin = torch.where(inside.any(-1), method.dense_error_factor, margin)
            ratio = self._ratio(rows[:n], result.state[:n], result.error) * margin
            is_finite = torch.isfinite(ratio) if excluded is None else torch.isfinite(ratio) & ~excluded
            accepted, c = self.control.judge(torch, c, then, torch.where(is_finite, ratio, math.inf))
            report = self._report(before, c, accepted)
        if saved is not None:
            ends = [self._of_lanes(row) for row in result.state[:n]]
            if dense:
                theta = (t - before.now[..., None]) / torch.where(size > 0, size, 1.0)[..., None]
                rows_inside = self._interpolated(result.columns, size, torch.where(inside, theta, 1.0))
                ends = [torch.where(self._wide(inside, x), x, end) for x, end in zip(rows_inside, ends, strict=True)]
            new = found & (accepted if term.lanes is None else accepted[:, None])
            saved = tuple([torch.where(self._wide(new, x), end, x) for end, x in zip(ends, saved, strict=True)])
        after = [torch.where(self._wide(accepted, a), a, b) for a, b in zip(result.state, rows, strict=True)]
        return tuple(after), _joined(c), saved, report

    def _report(self, before: Control, c: Control, accepted: Tensor) -> Tensor:
        active, moving = before.now < self.limits.end, c.taken > 0
        now = abs(self.limits.begin + self.limits.sign * c.now)
        floor = 4 * self.limits.resolution * now
        floor = torch.where(floor > self.limits.shortest, floor, self.limits.shortest)
        failed = (~accepted & ((c.failures >= FAILURES) | (c.size < floor))) | torch.isnan(before.size)
        excluded = ~accepted & (c.failures > 0)
        moved = (accepted & moving).any()
        rejected = active.any() & ~moved
        return torch.stack([moved, rejected, excluded.any(), failed.any(), (c.now >= self.limits.end).all()]).long()

    def _stages(self, times: list[Tensor]) -> tuple[Tensor, ...]:
        """Return times as arguments of the field: scalars, or (lanes, 1, ...) to broadcast with the state."""
        stages = torch.stack(times).to(self.term.template)
        if stages.dim() > 1:
            stages = stages.reshape(*stages.shape, *[1] * (self.term.dims - 1))
        return stages.unbind(0)

    def _of_gamma(self, formula: Callable[..., Tensor], *args: Tensor, count: int = 1) -> Tensor:
        """Return ``formula(torch, γ, *args)``; ``args`` have ``count`` elements of each lane, one after the other."""
        gamma = self.times.gamma
        if gamma.dim():  # its dimensions follow those of outputs, or are those of lanes
            if count > 1 and len(gamma) > 1:
                gamma = gamma.repeat_interleave(count, 0)
            ones = [1] * (gamma.dim() - (self.term.lanes is not None))
            args = tuple([x.reshape(*x.shape, *ones) for x in args])
        return formula(torch, gamma, *args).to(self.term.template)

    def _interpolated(self, columns: Any, size: Tensor, theta: Tensor) -> Rows:
        """Return the rows at fractions θ (T,) or (lanes, T) of a step, (T, ...) or (lanes, T, ...)."""
        signed, count = self.limits.sign * size, theta.shape[-1]
        signed = signed[..., None].expand(theta.shape).reshape(-1)
        weights = self._of_gamma(self.method.blend, signed, theta.reshape(-1), count=count)
        if self.term.lanes is None:
            return combined(weights, columns.unsqueeze(1)).unbind(1)
        wide = columns.unsqueeze(2).expand(*columns.shape[:2], count, *columns.shape[2:]).flatten(1, 2)
        inside = combined(weights, wide)
        return inside.reshape(*theta.shape, *inside.shape[1:]).unbind(2)

    def _of_lanes(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0 if self.term.lanes is None else 1)

    def _wide(self, mask: Tensor, like: Tensor) -> Tensor:
        return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim())) if mask.dim() else mask

    def _norm(self, x: Tensor) -> Tensor:
        """Return the root mean square, () or (lanes,), in float64, because squares may overflow in float32."""
        x = x.double().square()
        return (x.mean() if self.term.lanes is None else x.flatten(1).mean(1)).sqrt()

    def _ratio(self, before: Rows, after: Rows, error: Any) -> Tensor:
        """Return the root mean square of error / tolerance, () or (lanes,), the largest of all ``error_groups``."""
        scale = torch.maximum(torch.stack(before).abs(), torch.stack(after).abs())
        wide = [self._wide(x, error[0]) for x in (self.limits.rtol, self.limits.atol)]
        x = error / (scale * wide[0].to(error) + wide[1].to(error))
        x = x if self.term.lanes is None else x.movedim(1, 0)
        norms = [self._norm(x[..., group]) for group in self.term.error_groups]
        return norms[0] if len(norms) == 1 else torch.stack(norms).amax(0)


def attempts(
    term: ODETerm, method: Method, count: int, *, starts: bool, is_exact: bool
) -> Callable[..., tuple[Rows, Tensor, Rows | None, Tensor]]:
    """Return a function of tensors that takes ``count`` attempts, with the start of the solve if ``starts``."""
    field, second_order, own_steps = term.inner, term.second_order, term.lanes is not None
    in_autocast = term.in_autocast

    def run(y0: State, times: Times, rows: Any, control: Any, saved: Any, excluded: Tensor | None) -> Any:
        lanes = len(parts(y0)[0]) if own_steps else None
        evaluate = ODETerm(field, y0, Tally(compiled.uncounted, NFE()), second_order=second_order, lanes=lanes)
        evaluate.in_autocast = in_autocast  # autocast is disabled outside the field
        steps = Attempts(evaluate, method, times, is_exact=is_exact)
        if starts:
            rows, control = steps.start(y0)
            saved = steps.saved(rows)
        reports = []
        for _ in range(count):
            rows, control, saved, report = steps.attempt(rows, control, saved, excluded)
            reports.append(report)
        total = torch.stack(reports).sum(0)
        return rows, control, saved, torch.cat([total[:-1], reports[-1][-1:]])

    return run


class Solution(NamedTuple):
    """The rows at the end, or at all output times after the first, (T, ...), and the counts of a solve."""

    rows: Rows
    evaluations: int
    accepted: int
    rejected: int


def solve(
    term: ODETerm, method: Method, times: Times, y0: State, start: tuple[Rows, Tensor] | None, *,
    is_exact: bool = False, most: int = 10_000, max_nfe: float = math.inf, call: Callable[..., Any] | None = None,
) -> Solution | None:  # fmt: skip
    """Solve by compiled attempts; return None if they cannot be compiled, or fail, so that a solve says why.

    A graph of one attempt is called until the solve is done. If the last solves took the same number of attempts, one
    graph has all of them.

    Arguments:
        term: the equation.
        method: an adaptive method whose state ends with the field's value.
        times: what is constant during the solve.
        y0: the initial state.
        start: the initial state of the method and of the controller; None computes them for a field that does not
            depend on time.
        is_exact: whether steps end on the output times.
        most: the largest number of attempts.
        max_nfe: the largest number of function evaluations.
        call: calls a program with its arguments; it may store less for the backward pass. Default: None, a plain call.
    """
    field, needs_gradient = term.inner, torch.is_grad_enabled()
    like = apply(Tensor.detach, y0)
    key = (method, is_exact, term.lanes is None, times.outputs is None, times.jumps is None)
    history: list[int] = field.compiled.setdefault((*key, "attempts", needs_gradient), [])

    def run(count: int, starts: bool, *args: Any) -> Any:
        make = lambda: attempts(term, method, count, starts=starts, is_exact=is_exact)  # noqa: E731
        program = compiled.program(term, (*key, count, starts), make)
        return program(*args) if call is None else call(program, *args)

    count = history[-1] if len(history) == STABLE and len({*history}) == 1 and history[-1] <= LONGEST else 0
    result: Any = None
    spent = accepted = rejected = 0
    if count:
        rows, control, saved = _begin(term, method, times, y0, start) if start is not None else (None, None, None)
        result = run(count, start is None, like if start is not None else y0, times, rows, control, saved, None)
        report = Report(*result[3].tolist()) if result is not None else None
        if report is None or (report.excluded and needs_gradient):
            result = None
        else:
            spent, accepted, rejected = int(start is None), report.accepted, report.rejected
    if result is None:
        rows, control, saved = _begin(term, method, times, y0, start)
        report = Report(0, 0, 0, 0, 0)
    else:
        rows, control, saved, _ = result
    while not report.done:
        if report.failed or accepted + rejected >= most or spent + (accepted + rejected) * method.evaluations > max_nfe:
            return None
        result = run(1, False, like, times, rows, control, saved, None)
        if result is None:
            return None
        report = Report(*result[3].tolist())
        if report.excluded and report.accepted and needs_gradient:
            c = _split(result[1])
            result = run(1, False, like, times, rows, control, saved, c.rejected & (c.failures > 0))
            if result is None:
                return None
            spent += method.evaluations
        control = result[1]
        if report.accepted:
            rows, _, saved, _ = result
        accepted, rejected = accepted + report.accepted, rejected + report.rejected
    if report.failed:
        return None
    history[:] = [*history, accepted + rejected][-STABLE:]
    found = rows[: term.rows] if saved is None else saved
    if saved is not None and term.lanes is not None:
        found = tuple([row.movedim(1, 0) for row in found])
    return Solution(found, spent + (accepted + rejected) * method.evaluations, accepted, rejected)


def _begin(
    term: ODETerm, method: Method, times: Times, y0: State, start: tuple[Rows, Tensor] | None
) -> tuple[Rows, Tensor, Rows | None]:
    """Return the rows, the controller's state and the outputs at the start, as an attempt returns them."""
    steps = Attempts(term, method, times)
    rows, control = steps.start(y0) if start is None else start
    if torch.is_grad_enabled():  # as after an attempt, else it would need a graph of its own
        rows = tuple([row if row.requires_grad else row.detach().requires_grad_() for row in rows])
    return rows, control, steps.saved(rows)
