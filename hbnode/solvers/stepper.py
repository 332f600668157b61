"""One native solve: its steps, their errors and its failures."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode._closures import closed_over_leaves, refuse_unknown
from hbnode._recompute import random_state
from hbnode.errors import MaxNFEError, MaxStepsError, SolverError
from hbnode.nfe import Tally, backward_pass, is_recording
from hbnode.signal import listening, refuse_queries_outside
from hbnode.solvers import failures, forcing
from hbnode.solvers.compiled_steps import Programs
from hbnode.solvers.explicit_method import StepResult
from hbnode.solvers.ode_term import ODETerm
from hbnode.solvers.progress import Progress
from hbnode.solvers.registry import METHODS, STRONG, native_options
from hbnode.solvers.settings import Settings
from hbnode.solvers.step_size_control import first_size, norms, rms
from hbnode.solvers.time_grid import Step, TimeGrid

Value = TypeVar("Value")

TOGETHER = 64  # intervals whose coefficients are made at once
NON_FINITE_ATTEMPTS = 5  # steps ten times smaller each, before what is not finite is blamed


@dataclass
class StepGraph:
    """Some steps in a row, or the first evaluation, with what gradients are wanted for: points, coefficients, times.

    Steps with outputs inside of them have their columns, which those are interpolated from.
    """

    points: list[Tensor]
    tensors: list[Tensor]
    output: Tensor
    columns: tuple[Tensor, ...] = ()
    steps: tuple[Step, ...] = ()


class Stepper:
    """One solve: its equation, clock, tolerances and counts.

    A *point*, what a step starts from, is the rows of the state and, if the method carries it, the field's value there.
    """

    def __init__(self, term: ODETerm, grid: TimeGrid, settings: Settings, tally: Tally) -> None:
        self.term = term
        self.grid = grid
        self.settings = settings
        self.name = settings.method
        self.method = METHODS[settings.method]
        self.options = native_options(settings.options, settings.method)
        self.rtol, self.atol = settings.rtol, settings.atol
        self.max_steps = settings.max_steps
        self.attempts = 0
        self.progress = Progress()
        self.tally = tally
        self.step_size = math.nan
        self.compiled: Programs | None = None
        self.counted: int | None = None  # how many elements of a row count in the error; None for all
        self.known: frozenset[int] = frozenset()  # ids of the leaves that a backward pass differentiates
        self.checks_closures = (
            True  # whether replays must look for others: f is no network, or may use others at other times
        )
        self.wanted = (False, False)  # whether a backward pass needs gradients of coefficients, and of times
        self.first: StepGraph | None = None  # of the first evaluation
        self.recording = False  # random numbers are to be drawn again in the backward pass
        self.random_start: tuple[Tensor, ...] | None = None  # the generators' state before the first evaluation
        self.max_step = self.options.max_step
        self.strictness = 1.0  # by how much the error of a step must be smaller than the tolerance
        self.strongest = 0.0  # damping of the field, where it limits the steps
        self.sees_time = getattr(term.inner, "time_dependent", True)
        self.knots: list[float] = []  # of the signals in f, in increasing order
        self.most_knots = forcing.most_knots(self.method) if self.adaptive else 0  # that one step may pass
        self.interrupted = False  # between intervals, where the state is changed: see hbnode/ode_rnn/gaps.py
        self._cache: dict = {}
        self._packed: dict = {}
        self.damping: Tensor | None = None  # a leaf to differentiate coefficients with respect to, and
        self.by_damping: dict | None = None  # those coefficients, with their graphs; None if there is no need
        shared = self.adaptive and grid.elapsed is not None and settings.gradient != "reversible"
        self.passes = self.options.dense if shared else False  # output times, or None: where steps are longer
        self._no_times = term.template.new_zeros(len(self.method.nodes))

    @property
    def adaptive(self) -> bool:
        """Whether steps are chosen by their error."""
        return self.options.steps is None

    def samples(self) -> int | None:
        """The dimension of the batch in a row, if every sample has steps of its own."""
        return self.grid.row_dims - self.grid.template.dim() if self.grid.per_sample else None

    # Steps

    def start(self, rows: Tensor, interval: int = 0) -> Tensor:
        """The point at the beginning of an interval."""
        if not self.method.carries:
            return rows
        self.tally.add("evaluation")
        value = self.listen(lambda: self.term.evaluate(self.grid.time_of(interval), rows[0]))
        return torch.cat([rows, value.unsqueeze(0)])

    def listen(self, evaluate: Callable[[], Value]) -> Value:
        """The first evaluation of f, in which the signals in it tell of their knots."""
        with listening() as signals:
            value = evaluate()
        if signals and self.sees_time:
            self.knots = sorted({knot for signal in signals for knot in signal.knots})
            if torch.is_grad_enabled() and any(signal.u.requires_grad for signal in signals):
                self.most_knots = 0  # the gradient for a sample is an integral with kinks at its neighbours
        return value

    def knots_inside(self, first: int, last: int) -> list[float]:
        """The knots between two output times, as fractions of the time between them."""
        if not self.knots or self.grid.times is None:
            return []
        begin, end = self.grid.times[first], self.grid.times[last]
        inside = self.knots[bisect_right(self.knots, min(begin, end)) : bisect_left(self.knots, max(begin, end))]
        return sorted((knot - begin) / (end - begin) for knot in inside)

    def matrix(self, step: Step, damping: Tensor, *, differentiable: bool = False) -> Tensor:
        """The coefficients of a step, in the state's dtype; those of equal steps are worked out once."""
        grid, template = self.grid, self.term.template
        if step.whole is not None:
            return self._of_whole_interval(step.whole, damping, differentiable)
        size = None if differentiable else grid.size(step)
        if size is None:
            sizes, _ = grid.affine(grid.t, step.interval, step.start, step.size, (), step.end)
            return self.method.matrix(damping, grid.for_rows(sizes)).to(template)
        if size not in self._cache:
            sizes = torch.tensor(size, dtype=torch.float64, device=self.grid.t.device)
            if self.by_damping is not None:
                with torch.enable_grad():
                    self.by_damping[size] = self.method.matrix(self.damping, sizes)
                matrix = self.by_damping[size].detach().to(template)
            else:
                matrix = self.method.matrix(damping, sizes).to(template)
            self._cache[size] = matrix
        return self._cache[size]

    def _of_whole_interval(self, interval: int, damping: Tensor, differentiable: bool) -> Tensor:
        """The coefficients of a step over a whole interval, for a good many intervals at once."""
        key = ("whole", interval // TOGETHER)
        if key not in self._cache:
            first = key[1] * TOGETHER
            t = self.grid.t if differentiable else self.grid.t.detach()
            sizes = self.grid.for_rows(t[..., first : first + TOGETHER + 1].diff().movedim(-1, 0))
            self._cache[key] = self.method.matrix(damping, sizes).to(self.term.template).unbind(0)
        return self._cache[key][interval % TOGETHER]

    def pack(self, step: Step, matrix: Tensor, *, error: bool) -> tuple:
        """The coefficients as the method uses them, once for equal steps."""
        size = None if matrix.requires_grad else self.grid.size(step)
        if size is None or _torch_internals.is_active():
            return self.method.pack(matrix, error=error)
        key = (size, error)
        if key not in self._packed:
            self._packed[key] = self.method.pack(matrix, error=error)
        return self._packed[key]

    def times(self, step: Step, *, differentiable: bool = False) -> Tensor:
        """Times of the stages of a step, (stages, ...); zeros if the field does not ask for them."""
        if not self.term.wants_time:
            return self._no_times
        grid, nodes = self.grid, self.method.nodes
        if grid.times is not None and not differentiable:
            return grid.stages(step, nodes)
        _, times = grid.affine(grid.t, step.interval, step.start, step.size, nodes, step.end)
        return grid.for_parts(times).to(self.term.template)

    def step(
        self, point: Tensor, coefficients: tuple, times: Tensor, *, error: bool, columns: bool = False
    ) -> StepResult:
        """One step of the method, not counted; with the columns to interpolate from, if asked."""
        evaluate, activation = self.term.evaluate, self.term.activation
        if not columns:
            return self.method.step(point, coefficients, times.unbind(0), evaluate, error=error, activation=activation)
        found = [point]

        def evaluate_and_keep(t: Tensor, x: Tensor) -> Tensor:
            found.append(evaluate(t, x).unsqueeze(0))
            return found[-1].squeeze(0)

        stepped = self.method.step(point, coefficients, times.unbind(0), evaluate_and_keep, error=error)
        return stepped._replace(columns=torch.cat(found))

    def blends(self, steps: Sequence[Step], damping: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """The coefficients of the outputs inside of each of these steps, differentiable in γ and ``t``."""
        blend = self.method.blend(damping, *self.grid.inside(t, steps)).to(self.term.template)
        return blend.split([len(step.outputs) for step in steps])

    def take(self, point: Tensor, step: Step, damping: Tensor, *, error: bool, differentiable: bool) -> StepResult:
        """Take a step, counted."""
        matrix = self.matrix(step, damping, differentiable=differentiable)
        times = self.times(step, differentiable=differentiable)
        self.tally.add("evaluation", self.method.evaluations)
        if not self.recording:
            return self._take(point, step, matrix, times, error=error)
        device = self.term.template.device
        before = random_state(device)
        stepped = self._take(point, step, matrix, times, error=error)
        step.random = None if all(map(torch.equal, before, random_state(device))) else before
        return stepped

    def take_and_keep(
        self, point: Tensor, step: Step, damping: Tensor, before: StepGraph | None, *, error: bool
    ) -> tuple[StepResult, StepGraph]:
        """Take a step, counted, and keep its graph, as a continuation of that of the steps before if there is one."""
        by_matrix, by_times = self.wanted
        matrix = self.matrix(step, damping).detach().requires_grad_(by_matrix)
        times = self.times(step).detach().requires_grad_(by_times and self.term.wants_time)
        if before is None or before.steps[-1].reached is not None:
            start = point.detach().requires_grad_()
            before = StepGraph([start], [], start)
        self.tally.add("evaluation", self.method.evaluations)
        device = self.term.template.device
        state = random_state(device)
        inputs = (before.output, matrix, times)
        stepped = self.checked(lambda: self._take(before.output, step, matrix, times, error=error), inputs)
        step.random = None if all(map(torch.equal, state, random_state(device))) else state
        tensors = [*before.tensors, *(x for x in (matrix, times) if x.requires_grad)]
        columns = before.columns if stepped.columns is None else (*before.columns, stepped.columns)
        graph = StepGraph(before.points, tensors, stepped.point, columns, (*before.steps, step))
        return StepResult(*(None if x is None else x.detach() for x in stepped)), graph

    def checked(self, evaluate: Callable[[], StepResult], inputs: Sequence[Tensor]) -> StepResult:
        """The value of ``evaluate`` with its graph, in which no leaf may be that the first evaluation did not see.

        A network that is the same at all times has no others than its parameters.
        """
        with torch.enable_grad():
            if not self.checks_closures:
                return evaluate()
            values: list[StepResult] = []

            def point() -> Tensor:
                values.append(evaluate())
                return values[0].point

            found, _ = closed_over_leaves(point, inputs)
        refuse_unknown(found, self.known)
        return values[0]

    def _take(self, point: Tensor, step: Step, matrix: Tensor, times: Tensor, *, error: bool) -> StepResult:
        """A step, compiled if it can be."""
        if self.compiled is not None and not step.outputs:
            stepped = self.compiled.run("step", (error,), point, matrix, times)
            if stepped is not None:
                return stepped
            self.compiled = None
        coefficients = self.pack(step, matrix, error=error)
        return self.step(point, coefficients, times, error=error, columns=bool(step.outputs))

    def first_size(self, point: Tensor, interval: int = 0) -> float:
        """Size of the first step, from the beginning of an interval."""
        norm = self.norms(point.detach()).double().cpu()
        of_rows = norm.tolist()
        failures.check_start(self, of_rows, interval)
        size = first_size(of_rows[0], of_rows[-1], self.rtol, self.atol, self.method)
        if self.sees_time:
            span = self.grid.lengths[interval] if self.interrupted else sum(self.grid.lengths)
            sizes = forcing.first_step(self, point, interval, norm, norm.new_tensor(span), norm.new_tensor(size))
            size, longest = torch.stack(sizes).tolist()
            self.max_step = min(self.max_step, longest)
            self.strictness = self.method.inside if math.isfinite(longest) else 1.0
        return min(self.options.first_step or size, self.max_step)

    def norms(self, x: Tensor) -> Tensor:
        """Root mean square of each row of (rows, ...): (rows,), or (rows, batch) if every sample has its own steps."""
        norm = norms(x, self.samples())
        if _torch_internals.is_active():
            norm = _torch_internals.plain(norm).reshape(-1, len(x)).pow(2).mean(0).sqrt()
        return norm

    def limit_step(self, damping: Tensor) -> None:
        """Keep γH below 16: beyond 32 the decay of a single step hides its error, and any answer would pass."""
        self.strongest = float(_torch_internals.plain(damping).abs().max())
        if self.strongest > 0:
            self.max_step = min(self.max_step, 16.0 / self.strongest)

    def ratio(self, error: Tensor, before: Tensor, after: Tensor) -> float:
        """Norm of (error / tolerance): the root mean square over all elements. The one synchronisation of a step."""
        n = self.method.state_rows
        scale = torch.maximum(before[:n].detach().abs(), after[:n].detach().abs())
        error = error.detach() / scale.mul_(self.rtol).add_(self.atol)
        error = error if self.counted is None else error[..., : self.counted]
        ratio = reduce(torch.maximum, map(rms, self.term.judged(error)))
        if _torch_internals.is_active():
            ratio = _torch_internals.plain(ratio).pow(2).mean().sqrt()
        value = float(ratio)
        return value if math.isfinite(value) else math.inf

    def take_all(self, point: Tensor, steps: list[Step], damping: Tensor) -> list[Tensor] | None:
        """Equal steps in one compiled program, counted: the points between them; None if there is no program."""
        if self.compiled is None:
            return None
        self.check_nfe(steps[0], count=len(steps))
        times = [self.times(step) for step in steps]
        points = self.compiled.run("grid", (len(steps),), point, self.matrix(steps[0], damping), times)
        if points is None:
            self.compiled = None
            return None
        self.tally.add("evaluation", len(steps) * self.method.evaluations)
        self.tally.add("accepted", len(steps))
        for step in steps:
            self.report(step, accepted=True)
        return points

    def report(self, step: Step, *, accepted: bool | Tensor) -> None:
        """Pass a step on to the open :func:`hbnode.record_steps` contexts."""
        if is_recording():
            t = self.grid.t.detach()
            size, (start,) = self.grid.affine(t, step.interval, step.start, step.size, (0.0,), step.end)
            self.tally.report(_torch_internals.plain(start), _torch_internals.plain(size), accepted=accepted)

    # Failures

    def time(self, step: Step, fraction: float = 0.0, sample: int | None = None) -> float:
        """The time at which a step starts, or a fraction of it later; of the first sample that moves, unless given."""
        if sample is None:
            sample = int((step.size > 0).nonzero()[0]) if isinstance(step.size, Tensor) else 0
        t = _torch_internals.plain(self.grid.t)
        t = t if t.dim() == 1 else t[sample]
        interval, start, size = (
            x[sample] if isinstance(x, Tensor) else x for x in (step.interval, step.start, step.size)
        )
        return float(t[interval] + (start + fraction * size) * (t[interval + 1] - t[interval]))

    def check_nfe(self, step: Step, count: int = 1) -> None:
        """Before so many steps: are they still within ``max_nfe``?"""
        spent = self.tally.nfe.forward if backward_pass() == -1 else self.tally.nfe.backward
        if spent + count * self.method.evaluations > self.options.max_nfe:
            raise self.failure(
                MaxNFEError,
                f"the solve needs more than max_nfe={self.options.max_nfe} evaluations. "
                "Fix: loosen rtol and atol, shorten the time span, or raise max_nfe",
                self.at(step),
            )

    def count_attempt(self, step: Step) -> None:
        """Before each adaptive step: has the solve run away?"""
        self.check_nfe(step)
        self.attempts += 1
        self._check_progress(step)
        outputs = 0 if self.interrupted else max(self.grid.t.shape[-1] - 2, 0)
        if self.attempts > self.max_steps + outputs:
            raise self.failure(
                MaxStepsError,
                f"the solve needed more than max_steps={self.max_steps} steps. Fix: {self._fewer_steps()}"
                "loosen rtol and atol, shorten the time span or divide t by a typical gap, or raise max_steps",
                self.at(step),
            )

    def _check_progress(self, step: Step) -> None:
        """Now and then: will the interval end within ``max_steps``?"""
        needed = self.progress.steps_needed(self.attempts, step, self.max_steps)
        if needed is not None:
            raise self.failure(
                MaxStepsError,
                f"after {self.attempts} steps, which do not grow, about {needed:.1g} are left, far more than "
                f"max_steps={self.max_steps}. Fix: {self._fewer_steps()}divide t by a typical gap or period, so that f "
                "acts over about one unit of time, or loosen rtol and atol, or raise max_steps",
                self.at(step),
            )

    def _fewer_steps(self) -> str:
        """Advice where steps are short because of the damping."""
        if self.strongest <= max(1.0, STRONG / sum(self.grid.lengths)):  # with less, the span is long
            return ""
        return f"method='tsit5', because the damping of {self.strongest:g} keeps the steps of {self.name!r} short, or "

    @property
    def resolution(self) -> float:
        """Relative rounding of the time: the clock's own, or that in which f is told it."""
        return torch.finfo(self.term.template.dtype if self.sees_time else torch.float64).eps

    def is_too_small(self, step: Step, size: float) -> bool:
        """After a rejected step: is the next one, of this size, no step any more?"""
        now = self.grid.furthest if self.grid.has_batch else abs(self.time(step))
        floor = 4 * self.resolution * now
        return size < max(floor, self.options.min_step, 1e-300)

    def at(self, step: Step, sample: int | None = None) -> float:
        """The time of a step that failed, whose size is noted."""
        now, end = self.time(step, sample=sample), self.time(step, 1.0, sample)
        self.step_size = abs(end - now)
        return now

    def failure(self, kind: type[SolverError], message: str, t: float) -> SolverError:
        """An error that knows where the solve was; a signal that was asked for too much is named instead."""
        refuse_queries_outside()
        return kind(f"{message} (method {self.name!r})", t=t, step_size=self.step_size, nfe=self.tally.nfe.total)


def no_autocast(device_type: str) -> torch.autocast | nullcontext:
    """Autocast is for the field; the solver's own arithmetic keeps its precision."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
