"""A whole adaptive solve in graphs of torch: attempts with the controller inside.

The controller is that of :mod:`hbnode.solve.control`, with torch instead of NumPy, so an attempt, a step that is then
accepted or rejected, is one function of tensors. :func:`solve` compiles such functions and calls them until the solve
is done.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hbnode._torch import new_sequence_number
from hbnode._tree import State, apply, parts
from hbnode.errors import RecomputationError
from hbnode.nfe import NFE, Tally, open_records
from hbnode.solve import compiled
from hbnode.solve.adaptive import NON_FINITE_ATTEMPTS, AdaptiveSteps
from hbnode.solve.adjoints import CHANGED, CHANGES_BUFFERS, SHORT, is_same, owned, saved_bytes
from hbnode.solve.control import Array, Clip, Control, PIController, first_size
from hbnode.solve.grid import Grid, to_device
from hbnode.solve.methods import Explicit, Method, combined
from hbnode.solve.start import start_of
from hbnode.solve.stepper import Rows, Setup
from hbnode.solve.term import ODETerm, Snapshot

STABLE = 3  # solves in a row with the same number of attempts, before a graph of that many is made
LONGEST = 16  # attempts in one graph
MOST_OUTPUTS = 16  # output times of a solve in graphs, whose attempts interpolate all of them


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
    longest: Any
    shortest: Any
    margin: Any
    rounding: Any
    resolution: Any


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


def joined(numbers: tuple[Array, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return arrays or numbers that broadcast to ``shape`` as one tensor, (numbers, *shape)."""
    packed = np.empty((len(numbers), *shape))
    for k, number in enumerate(numbers):
        packed[k] = number
    return torch.from_numpy(packed).to(device)


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
        self.control = PIController(method.error_order or 1, self.limits.longest)
        stops = times.outputs if is_exact else None
        self.clip = Clip(self.limits.end, stops, times.jumps, self.limits.rounding)

    def start(self, y0: State) -> tuple[Rows, Tensor]:
        """Return the initial state of the method and of the controller, for a field that does not depend on time."""
        term, limits = self.term, self.limits
        rows = term.flatten(y0)
        (t,) = term.stages([limits.begin])
        rows = (*rows, term(t, rows[0]))
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
        outputs, place = self.times.outputs, int(self.term.lanes is not None)
        if outputs is None:
            return None
        rows = rows[: self.term.rows]
        return tuple([row.unsqueeze(place).repeat_interleave(outputs.shape[-1], place) for row in rows])

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
            stages = term.stages([limits.begin + limits.sign * torch.where(t < then, t, then) for t in ends])
        of_step = self._of_gamma(lambda *args: method.packed(*args, error=True), limits.sign * size)
        coefficients = method.unpack(of_step, term.dims_of_row, error=True)
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
        failed = (~accepted & ((c.failures >= NON_FINITE_ATTEMPTS) | (c.size < floor))) | torch.isnan(before.size)
        excluded = ~accepted & (c.failures > 0)
        moved = (accepted & moving).any()
        rejected = active.any() & ~moved
        return torch.stack([moved, rejected, excluded.any(), failed.any(), (c.now >= self.limits.end).all()]).long()

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


class GraphSolution(NamedTuple):
    """The rows of a solve as :func:`hbnode.solve.loop.integrate` returns them, and what their gradient needs."""

    rows: Rows
    owned: tuple[Any, ...]


def is_possible(setup: Setup, y0: State) -> bool:
    """Return whether graphs can solve: adaptive explicit methods, at few times without gradients, without events."""
    settings, grid, gradient = setup.settings, setup.grid, setup.settings.gradient
    if not isinstance(setup.stepper.method, Explicit) or not isinstance(grid, Grid) or grid.t is not None:
        return False
    if settings.steps is not None or settings.jump_times or settings.common_steps or setup.events or open_records:
        return False
    if getattr(gradient, "name", gradient) not in ("direct", "checkpoint"):
        return False
    return 0 < grid.outputs.shape[-1] <= MOST_OUTPUTS and parts(y0)[0].numel() > 0


def solve(setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None) -> GraphSolution | None:
    """Solve by compiled attempts; return None if they cannot be compiled or fail, for a solve in Python that says why.

    A graph of one attempt is called until the solve is done. If the last solves took the same number of attempts, one
    graph has all of them. With gradients, more than ``keep_bytes`` of their graph are recomputed, if it is not None.
    """
    run = _Run(setup, y0, snapshot, keep_bytes)
    counter = setup.stepper.term.counter
    before = counter.nfe.forward
    found = run.whole() or run.one_by_one()
    if run.keep_bytes is not None and snapshot.changed():
        raise ValueError(CHANGES_BUFFERS.format("checkpoint"))
    if found is None:
        counter.add("evaluation", before - counter.nfe.forward)
    return found


class _Run:
    """A solve by compiled attempts."""

    def __init__(self, setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None) -> None:
        self.setup, self.y0, self.snapshot, self.needs_gradient = setup, y0, snapshot, torch.is_grad_enabled()
        self.keep_bytes = keep_bytes if self.needs_gradient else None
        term, self.method, self.is_exact = setup.stepper.term, setup.stepper.method, setup.settings.save == "exact"
        self.term, self.is_exact = term, self.is_exact and not setup.end_only
        self.key = (setup.settings.method, self.is_exact, term.lanes is None, setup.end_only)
        self.like, self.owned, self.bytes = apply(Tensor.detach, y0), (), -1.0
        self.history: list[int] = compiled.store(term).setdefault((*self.key, self.needs_gradient), [])

    def times(self, setup: Setup, longest: Array, margin: Array) -> Times:
        """Return what the graphs need to know of a setup."""
        grid, settings, device = setup.grid, setup.settings, setup.stepper.like.device
        resolution = torch.finfo(setup.stepper.like.dtype if self.term.time_dependent else torch.float64).eps
        limits = Limits(
            grid.begin, grid.sign, grid.end, settings.rtol, settings.atol, longest, setup.option("min_step", 1e-300),
            margin, np.finfo(float).eps * grid.furthest, resolution,
        )  # fmt: skip
        outputs, jumps = None if setup.end_only else to_device(grid.outputs, setup.stepper.like), grid.jumps
        if jumps is not None:  # padded to few lengths, each of which has a graph
            more = 2 ** (jumps.shape[-1] - 1).bit_length() - jumps.shape[-1]
            jumps = to_device(
                np.pad(jumps, [(0, 0)] * (jumps.ndim - 1) + [(0, more)], constant_values=math.inf), outputs
            )
        gamma = torch.as_tensor(setup.stepper.gamma, dtype=torch.float64, device=device)
        return Times(joined(limits, np.shape(grid.end), device), gamma, outputs, jumps)

    def program(self, count: int, *, starts: bool) -> compiled.Program:
        make = lambda: attempts(self.term, self.method, count, starts=starts, is_exact=self.is_exact)  # noqa: E731
        return compiled.program(self.term, (*self.key, count, starts), make)

    def solution(self, rows: Rows, saved: Rows | None) -> GraphSolution:
        """Return the rows at all times, or at the end."""
        if saved is None:
            return GraphSolution(tuple([row.unsqueeze(0) for row in rows[: self.term.rows]]), self.owned)
        if self.term.lanes is not None:
            saved = tuple([row.movedim(1, 0) for row in saved])
        first = self.term.flatten(self.y0)
        return GraphSolution(
            tuple([torch.cat([a.unsqueeze(0), b]) for a, b in zip(first, saved, strict=True)]), self.owned
        )

    def count(self, evaluations: int, accepted: int, rejected: int) -> None:
        counter = self.term.counter
        counter.nfe.keeps_graph = self.needs_gradient and not self.owned
        for event, number in (("evaluation", evaluations), ("accepted", accepted), ("rejected", rejected)):
            counter.add(event, number)
        self.history[:] = [*self.history, accepted + rejected][-STABLE:]

    def whole(self) -> GraphSolution | None:
        """Solve by one graph that has the start and as many attempts as the last solves; None if they differed."""
        attempts, setup = self.history[-1] if self.history else 0, self.setup
        if len(self.history) < STABLE or len({*self.history}) > 1 or attempts > LONGEST:
            return None
        if self.term.time_dependent or setup.option("first_step") or not self.stores(attempts):
            return None
        times = self.times(setup, setup.longest_step, 1.0)
        result = self.program(attempts, starts=True)(self.y0, times, None, None, None, None)
        if result is None:
            return None
        report = Report(*result[3].tolist())
        if not report.done or report.failed or (report.excluded and self.needs_gradient):
            self.history.clear()
            return None
        self.count(1 + attempts * self.method.evaluations, report.accepted, report.rejected)
        return self.solution(result[0], result[2])

    def one_by_one(self) -> GraphSolution | None:
        """Solve by a graph of one attempt, with the start in Python."""
        program = self.program(1, starts=False)
        if program.failed:
            return None
        setup, rows = start_of(self.setup, self.y0)
        steps, grid, most = AdaptiveSteps(setup, rows), setup.grid, setup.settings.max_steps
        times = self.times(setup, steps.controller.longest, steps.error_factor)
        control = joined(steps.control, np.shape(grid.end), setup.stepper.like.device)
        if self.needs_gradient:  # as after an attempt, else it would need a graph of its own
            rows = tuple([row if row.requires_grad else row.detach().requires_grad_() for row in rows])
        saved = Attempts(self.term, self.method, times).saved(rows)
        most += grid.outputs.shape[-1] - 1 if self.is_exact else 0
        left = setup.option("max_nfe", math.inf) - self.term.counter.nfe.forward
        evaluations = accepted = rejected = 0
        report = Report(0, 0, 0, 0, int((grid.end <= 0).all()))
        while not report.done:
            evaluations += self.method.evaluations
            if report.failed or accepted + rejected >= most or evaluations > left:
                return None
            given, done = (self.like, times, rows, control, saved), accepted + rejected + 1
            result = self.take(program, done, *given, None)
            if result is None:
                return None
            report = Report(*result[3].tolist())
            if report.excluded and report.accepted and self.needs_gradient:
                c = _split(result[1])
                result = self.take(program, done, *given, c.rejected & (c.failures > 0))
                evaluations += self.method.evaluations
            control = result[1]
            if report.accepted:
                rows, _, saved, _ = result
            accepted, rejected = accepted + report.accepted, rejected + report.rejected
        self.count(evaluations, accepted, rejected)
        return self.solution(rows, saved)

    # Gradients

    def stores(self, attempts: int) -> bool:
        """Return whether the graph of that many attempts is stored."""
        if self.keep_bytes is None or attempts * self.method.evaluations <= SHORT * (self.keep_bytes > 0):
            return True
        self.bytes = compiled.store(self.term).get((*self.key, "bytes", parts(self.y0)[0].shape), -1.0)
        return 0 <= attempts * self.bytes <= self.keep_bytes

    def take(self, program: compiled.Program, attempts: int, *args: Any) -> Any:
        """Call the program, and store its graph, or recompute it in the backward pass if it becomes too large."""
        if self.stores(attempts):
            return program(*args)
        if self.bytes < 0 and self.keep_bytes:
            first, own = new_sequence_number(), [tensor for _, _, tensor in self.snapshot.slots]
            result = program(*args)
            if result is not None:
                saved = saved_bytes((*result[0], *(result[2] or ())), (*args[2], *(args[4] or ())), own, first)
                compiled.store(self.term)[(*self.key, "bytes", parts(self.y0)[0].shape)] = saved
            return result
        self.owned = (self.setup.stepper, self.snapshot, program)
        with set_checkpoint_early_stop(False):
            again = _recomputed(*self.owned)
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _recomputed(stepper: Any, snapshot: Snapshot, program: compiled.Program) -> Callable[..., Any]:
    """Return a call of the program that must end in the same state in both passes."""
    references, end = [weakref.ref(x) for x in (stepper, snapshot, program)], []

    def run(*args: Any) -> Any:
        stepper, snapshot, program = map(owned, references)
        if not end:
            result = program(*args)
            end.extend(() if result is None else [x.detach() for x in result[0]])
            return result
        with snapshot:
            result = program(*args)
            stepper.term.counter.add("evaluation", stepper.method.evaluations)
            stepper.term.counter.add("accepted")
            if snapshot.changed() or result is None or not is_same(result[0], tuple(end)):
                raise stepper.failure(RecomputationError, CHANGED, math.nan, math.nan)
        return result

    return run
