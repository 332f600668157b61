"""What a native solve is made of, and its loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode._recompute import ForwardContext
from hbnode.errors import NonFiniteError, SolverError
from hbnode.nfe import Tally, is_recording
from hbnode.sde.grid import StepGrid
from hbnode.sde.methods import Point, SDEMethod
from hbnode.signal import refuse_queries_outside
from hbnode.solvers.ode_term import ODETerm


@dataclass
class Run:
    """A native solve.

    Attributes:
        name: of the method.
        method: takes the steps.
        term: evaluates f.
        grid: the steps.
        normals: the standard normal variables of a step, by its number.
        times: of the nodes of each step.
        tally: counts evaluations and steps.
        first: the value of f at the start, if the method carries it and it is known.
    """

    name: str
    method: SDEMethod
    term: ODETerm
    grid: StepGrid
    normals: Callable[[int], Tensor]
    times: list[tuple[Tensor, ...]]
    tally: Tally
    first: Tensor | None = None

    def evaluate(self, t: Tensor, h: Tensor) -> Tensor:
        """The force f(h, t), counted."""
        self.tally.add("evaluation")
        return self.term.evaluate(t, h)

    def start_time(self) -> Tensor:
        """The first time, as f receives it."""
        return torch.full((), self.grid.t[0], dtype=self.term.template.dtype, device=self.term.template.device)

    def start(self, h: Tensor, m: Tensor) -> Point:
        """The first point."""
        if not self.method.carries or not len(self.grid):
            return h, m
        return h, m, self.evaluate(self.start_time(), h) if self.first is None else self.first

    def integrate(
        self, coefficients: Tensor, h: Tensor, m: Tensor, watch: Callable[[int, Point], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The trajectories of h and m at the output times, (T, ...) each.

        Arguments:
            coefficients: of all intervals, from the method.
            h: initial h, (...).
            m: initial m, (...).
            watch: is called with the number of each step and the point that it starts from.
        """
        packed = [self.method.pack(one) for one in coefficients.unbind(0)]
        outputs, point = [(h, m)], self.start(h, m)
        for step, (interval, reached) in enumerate(zip(self.grid.intervals, self.grid.outputs, strict=True)):
            if watch is not None:
                watch(step, point)
            point = self.method.step(point, packed[interval], self.normals(step), self.times[step], self.evaluate)
            self.tally.add("accepted")
            if reached is not None:
                outputs.append((point[0], point[1]))
        if is_recording():
            self.tally.report(torch.tensor(self.grid.starts), self.grid.step_sizes(), accepted=True)
        return torch.stack([h for h, _ in outputs]), torch.stack([m for _, m in outputs])

    def failure(self, kind: type[SolverError], message: str, t: float, step_size: float = math.nan) -> SolverError:
        """An error with the time, the step size and the evaluations; a query outside of a signal is raised instead."""
        refuse_queries_outside()
        return kind(f"{message} (method {self.name!r})", t=t, step_size=step_size, nfe=self.tally.nfe.total)

    def check_finite(self, coefficients: Tensor, trajectory: Sequence[Tensor], h: Tensor, m: Tensor) -> None:
        """Raise if the solution is not finite; solve once more to see where."""
        if bool(torch.stack([torch.isfinite(x).all() for x in trajectory]).all()):
            return
        if not bool(torch.isfinite(h).all() & torch.isfinite(m).all()):
            message = "the initial state is not finite. Fix: look at what made it"
            raise self.failure(NonFiniteError, message, self.grid.t[0])
        reached = 0

        def watch(step: int, point: Point) -> None:
            nonlocal reached
            reached = step
            if not all(bool(torch.isfinite(x).all()) for x in point):
                raise self._not_finite(max(step - 1, 0))

        with torch.no_grad():
            self.integrate(coefficients.detach(), h.detach(), m.detach(), watch)
        raise self._not_finite(reached)

    def _not_finite(self, step: int) -> SolverError:
        message = (
            "the state or the field became infinite or NaN. Look for: log, sqrt or a division in func, growth without "
            "bound, or a step that is too long for a steep force. Fix: a smaller dt"
        )
        start, size = self.grid.starts[step], self.grid.sizes[self.grid.intervals[step]]
        return self.failure(NonFiniteError, message, start, size)


@dataclass
class ForwardPass:
    """What the backward pass of a gradient that evaluates f again needs.

    Attributes:
        run: the solve.
        context: modes, masks and tensors of the field's modules.
        leaves: the tensors that f depends on.
        checks_closures: whether f may depend on others at another time.
    """

    run: Run
    context: ForwardContext
    leaves: list[Tensor]
    checks_closures: bool
