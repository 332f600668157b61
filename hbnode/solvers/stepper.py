"""One step of a native solve: its stages, its result and its error."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode.nfe import Tally, is_recording
from hbnode.signal import listening
from hbnode.solvers.coefficients import StepCoefficients
from hbnode.solvers.compiled_steps import Programs
from hbnode.solvers.explicit_method import StepResult
from hbnode.solvers.ode_term import ODETerm
from hbnode.solvers.registry import METHODS, NYSTROM, native_options
from hbnode.solvers.settings import ResolvedSettings
from hbnode.solvers.step_size_control import most_knots, norms, rms
from hbnode.solvers.time_grid import AnyStep, Step, TimeGrid

Value = TypeVar("Value")
Rows = Tensor | tuple[Tensor, ...]  # of a state: in one tensor, or each by itself


class Stepper:
    """Takes the steps of a solve, and counts their evaluations.

    A *point*, what a step starts from, is the rows of the state and, if the method carries it, the field's value there.

    Arguments:
        term: the equation.
        grid: the output times.
        settings: tolerances and limits, with the method and the gradient filled in.
        interrupted: whether the state is changed between the intervals, as an ODERNN does.
        counted: how many elements of a row count in the error; None for all.

    A solve begins with :meth:`begun`. What it was made of serves any number of solves, also at once.

    Attributes:
        tally: counts evaluations and steps.
        coefficients: those of the steps.
        max_step: no step is longer.
        strongest: the largest γ, if it limits the steps.
        sees_time: whether f takes the time.
        knots: those of the signals in f and the jumps of f, in increasing order.
        most_knots: how many of them one step may pass.
        passes: whether steps pass output times; None where they are longer than the intervals.
    """

    def __init__(
        self,
        term: ODETerm,
        grid: TimeGrid,
        settings: ResolvedSettings,
        *,
        interrupted: bool = False,
        counted: int | None = None,
    ) -> None:
        self.term, self.grid, self.settings = term, grid, settings
        self.tally: Tally
        self.coefficients: StepCoefficients
        self.name, self.method = settings.method, METHODS[settings.method]
        self.options = native_options(settings.options, settings.method)
        self.rtol, self.atol, self.max_steps = settings.rtol, settings.atol, settings.max_steps
        self.interrupted, self.counted = interrupted, counted
        self.compiled: Programs | None = None
        self._of_constant: list[StepCoefficients] = []  # at most one; that of all copies
        self.sees_time: bool = getattr(term.inner, "time_dependent", True)
        near = 4.0 * torch.finfo(term.template.dtype).eps * max(grid.furthest, 1e-300)
        self.jumps = [jump + side for jump in settings.jump_times or () for side in (-near, near)]
        self.knots: list[float] = self.jumps
        self.most_knots = most_knots(self.method.nodes) if self.adaptive and not self.jumps else 0
        self.max_step, self.strongest = self.options.max_step, 0.0
        shared = self.adaptive and bool(grid.elapsed) and settings.gradient != "reversible"
        self.passes = shared and settings.save == "interpolate"

    def of(self, field: Callable | None) -> Stepper:
        """The same for a field, or for none, as it is kept with a field."""
        other = copy.copy(self)
        other.term = self.term.of(field)
        return other

    def begun(self, tally: Tally, damping: Tensor) -> Stepper:
        """The stepper of one solve.

        Arguments:
            tally: counts evaluations and steps.
            damping: γ, in float64 on the grid's device.
        """
        other = copy.copy(self)
        other.tally = tally
        kept = self._of_constant[0] if self._of_constant else None
        if kept is not None and not damping.requires_grad and kept.serves(damping):
            other.coefficients = kept
        else:
            other.coefficients = StepCoefficients(self.method, self.term, self.grid, damping)
            if other.coefficients.number is not None and not damping.requires_grad:
                self._of_constant[:] = [other.coefficients]
        if self.name in NYSTROM and self.adaptive:
            other._limit_step(other.coefficients)
        return other

    def _limit_step(self, coefficients: StepCoefficients) -> None:
        """Keep γH below 16: beyond 32 the decay of a single step hides its error, and any answer would pass."""
        number = coefficients.number
        self.strongest = (
            float(_torch_internals.plain(coefficients.damping).abs().max()) if number is None else abs(number)
        )
        if self.strongest > 0:
            self.max_step = min(self.max_step, 16.0 / self.strongest)

    def on_grid(self, grid: TimeGrid) -> Stepper:
        """The same solve with the knots of signals among its output times."""
        other = copy.copy(self)
        other.grid, other.passes, other.knots = grid, False, []
        other.coefficients = StepCoefficients(self.method, self.term, grid, self.coefficients.damping)
        return other

    @property
    def adaptive(self) -> bool:
        """Whether steps are chosen by their error."""
        return self.settings.steps is None

    def samples(self) -> int | None:
        """The dimension of the batch in a row, if every sample has steps of its own."""
        return self.grid.batch_dim if self.grid.per_sample else None

    def start(self, rows: Rows, interval: int = 0) -> Tensor:
        """The point at the beginning of an interval."""
        if not self.method.carries:
            return rows if isinstance(rows, Tensor) else torch.stack(rows)
        self.tally.add("evaluation")
        h = rows[0] if isinstance(rows, Tensor) else rows[0].clone()  # not the user's own, which f might change
        value = self.listen(lambda: self.term.evaluate(self.grid.time_of(interval), h))
        return torch.cat([rows, value.unsqueeze(0)]) if isinstance(rows, Tensor) else torch.stack([*rows, value])

    def listen(self, evaluate: Callable[[], Value]) -> Value:
        """The first evaluation of f, which finds the knots of the signals in it."""
        with listening() as signals:
            value = evaluate()
        if signals and self.sees_time:
            self.knots = sorted({*self.jumps, *(knot for signal in signals for knot in signal.knots)})
            if torch.is_grad_enabled() and any(signal.u.requires_grad for signal in signals):
                self.most_knots = 0  # the gradient for a sample is an integral with kinks at its neighbours
        return value

    def knots_inside(self, first: int, last: int) -> list[float]:
        """The knots between two output times, as fractions of the time between them."""
        if not self.knots or not self.grid.times:
            return []
        begin, end = self.grid.times[first], self.grid.times[last]
        inside = self.knots[bisect_right(self.knots, min(begin, end)) : bisect_left(self.knots, max(begin, end))]
        return sorted((knot - begin) / (end - begin) for knot in inside)

    def take(self, point: Tensor, step: AnyStep, *, error: bool, differentiable: bool = False) -> StepResult:
        """Take a step, counted."""
        matrix = self.coefficients.matrix(step, error=error, differentiable=differentiable)
        times = self.coefficients.times(step, differentiable=differentiable)
        self.tally.add("evaluation", self.method.evaluations)
        return self.step(point, step, matrix, times, error=error)

    def step(self, point: Tensor, step: AnyStep, matrix: Tensor, times: Tensor, *, error: bool) -> StepResult:
        """A step with given coefficients, not counted; compiled if it can be."""
        if self.compiled is not None and not step.outputs:
            stepped = self.run_compiled("step", (error,), point, matrix, times)
            if stepped is not None:
                return stepped
        return self.step_eagerly(point, step, matrix, times, error=error)

    def step_eagerly(self, point: Tensor, step: AnyStep, matrix: Tensor, times: Tensor, *, error: bool) -> StepResult:
        """:meth:`step`, not compiled; with the columns to interpolate from, if outputs lie inside of the step."""
        coefficients = self.coefficients.pack(step, matrix, error=error)
        evaluate, activation = self.term.evaluate, self.term.activation
        if not step.outputs:
            return self.method.step(point, coefficients, times.unbind(0), evaluate, error=error, activation=activation)
        columns = [point]

        def evaluate_and_keep(t: Tensor, x: Tensor) -> Tensor:
            columns.append(evaluate(t, x).unsqueeze(0))
            return columns[-1].squeeze(0)

        stepped = self.method.step(point, coefficients, times.unbind(0), evaluate_and_keep, error=error)
        return stepped._replace(columns=torch.cat(columns))

    def take_all(self, point: Tensor, steps: list[Step]) -> list[Tensor] | None:
        """Equal steps in one compiled program, counted: the points between them; None if there is no program."""
        if self.compiled is None:
            return None
        points = self.run_compiled("grid", (len(steps),), point, self.coefficients.matrix(steps[0]), self._times(steps))
        if points is not None:
            self.count_all(steps)
        return points

    def end_of_all(self, point: Tensor, steps: list[Step], matrix: Tensor) -> Tensor | None:
        """The last point of :meth:`take_all` with its graph, not counted."""
        if self.compiled is None:
            return None
        return self.run_compiled("end", (len(steps),), point, matrix, self._times(steps))

    def solve_all(self, rows: tuple[Tensor, ...], steps: list[Step]) -> tuple[Tensor, ...] | None:
        """The first evaluation and equal steps in one compiled program, counted: the rows of the state at its end.

        None if there is no program.
        """
        matrix, times = self.coefficients.matrix(steps[0]), self._times(steps)
        start = self.grid.time_of(0)
        end = self.run_compiled("solve", (len(steps),), [*rows], start, matrix, times)
        if end is None:
            return None
        self.tally.add("evaluation", int(self.method.carries))
        self.count_all(steps)
        return tuple(end)

    def _times(self, steps: list[Step]) -> list[Tensor]:
        return [self.coefficients.times(step) for step in steps]

    def count_all(self, steps: list[Step]) -> None:
        """Count the steps of a program."""
        self.tally.add("evaluation", len(steps) * self.method.evaluations)
        self.tally.add("accepted", len(steps))
        for step in steps:
            self.report(step, accepted=True)

    def run_compiled(self, kind: str, flags: tuple, *args: Any) -> Any:
        """The value of a compiled program; None, now and from now on, if it cannot be compiled."""
        assert self.compiled is not None
        value = self.compiled.run(kind, flags, *args)
        if value is None:
            self.compiled = None
        return value

    def report(self, step: AnyStep, *, accepted: bool | Tensor) -> None:
        """Pass a step on to open :func:`hbnode.record_steps` contexts."""
        if is_recording():
            t = self.grid.t.detach()
            size, (start,) = self.grid.affine(t, step.interval, step.start, step.size, (0.0,), step.end)
            self.tally.report(_torch_internals.plain(start), _torch_internals.plain(size), accepted=accepted)

    def norms(self, x: Tensor) -> Tensor:
        """Root mean square of each row of (rows, ...): (rows,), or (rows, batch) if every sample has its own steps."""
        norm = norms(x, self.samples())
        if _torch_internals.is_active():
            norm = _torch_internals.plain(norm).reshape(-1, len(x)).pow(2).mean(0).sqrt()
        return norm

    def scaled_error(self, stepped: StepResult, before: Tensor) -> tuple[Tensor, ...]:
        """Error / (atol + rtol |state|) of a step from the point ``before``, in pieces that have norms of their own."""
        assert stepped.error is not None
        n = self.method.state_rows
        scale = torch.maximum(before[:n].detach().abs(), stepped.point[:n].detach().abs())
        error = stepped.error.detach() / scale.mul_(self.rtol).add_(self.atol)
        if self.term.apart:
            return self.term.error_parts(error)
        return (error if self.counted is None else error[..., : self.counted],)

    def ratio(self, stepped: StepResult, before: Tensor) -> float:
        """Norm of (error / tolerance): the root mean square over all elements. The one synchronisation of a step."""
        error, *apart = self.scaled_error(stepped, before)
        ratio = rms(error)
        for other in apart:
            ratio = torch.maximum(ratio, rms(other))
        if _torch_internals.is_active():
            ratio = _torch_internals.plain(ratio).pow(2).mean().sqrt()
        value = float(ratio)
        return value if math.isfinite(value) else math.inf


def no_autocast(device_type: str) -> torch.autocast | nullcontext[None]:
    """Autocast is for the field; the solver's own arithmetic keeps its precision."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
