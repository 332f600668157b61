"""Gradients of native solves that take their steps again in the backward pass: checkpoint and reversible."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode._replay import Replay, set_random_state
from hbnode.errors import ReversalError
from hbnode.gradients import closed_over_leaves, refuse_unknown
from hbnode.solvers.clock import Step
from hbnode.solvers.loops import integrate
from hbnode.solvers.stepping import Solve, no_autocast


class Tape:
    """What a backward pass collects: gradients of the leaves, and of the coefficients and times of each step."""

    def __init__(self, ctx: Any, leaves: Sequence[Tensor]) -> None:
        self.solve: Solve = ctx.solve
        self.damping, self.t = ctx.damping, ctx.clock_t
        self.needs_t, self.needs_damping = ctx.needs_input_grad[3:5]
        self.leaves = list(leaves)
        self.gradients: list[Tensor | None] = [None] * len(self.leaves)
        self.steps: list[tuple[Step, list[Tensor | None], list[Tensor | None]]] = []
        self.first_time: Tensor | None = None  # gradient with respect to the time of the first evaluation
        self.watched = False

    def inputs(self, step: Step) -> tuple[tuple, tuple, list[Tensor]]:
        """Coefficients and times of a step, and those of them whose gradients are wanted."""
        solve, method = self.solve, self.solve.method
        coefficients, times = solve.coefficients(step, self.damping, error=False)
        tensors: list[Tensor] = []
        if self.needs_damping or self.needs_t:
            tensors = [part.detach().requires_grad_() for part in method.tensors(coefficients)]
            coefficients = method.from_tensors(tensors)
        if self.needs_t and solve.dynamics.wants_time:
            times = tuple(time.detach().requires_grad_() for time in times)
            tensors = [*tensors, *times]
        return coefficients, times, tensors

    def watch(self, evaluate: Callable[[], Any], inputs: Sequence[Tensor]) -> Any:
        """The value of ``evaluate`` with its graph, in which no leaf may be that the forward pass did not see.

        If all leaves belong to a module, looking once is enough; a function may use others at each call.
        """
        with torch.enable_grad():
            if self.watched and self.solve.closed:
                return evaluate()
            values = []

            def first_tensor() -> Tensor:
                values.append(evaluate())
                return values[0] if isinstance(values[0], Tensor) else values[0].point

            found, _ = closed_over_leaves(first_tensor, inputs)
        refuse_unknown(found, self.solve.known)
        self.watched = True
        return values[0]

    def pull_compiled(
        self,
        program: str,
        flags: tuple,
        points: Tensor | list,
        coefficients: tuple,
        times: tuple | list,
        carried: Tensor,
    ) -> tuple[Tensor, list] | None:
        """What :meth:`pull_back` finds, by a compiled program; None if there is none."""
        compiled = self.solve.compiled
        if compiled is None or not self.solve.closed:
            return None
        by_tensors, by_times = self.needs_damping or self.needs_t, self.needs_t and self.solve.dynamics.wants_time
        parameters = compiled.parameters()
        with torch.no_grad():
            tensors = [part.detach() for part in self.solve.method.tensors(coefficients)]
            pulled = compiled.run(
                program,
                (by_tensors, by_times, *flags),
                _detached(points),
                tensors,
                _detached(times),
                parameters,
                carried,
            )
        if pulled is None:
            self.solve.compiled = None
            return None
        by_point, by_tensor, by_time, by_parameter = pulled
        found = {id(parameters[name]): g for name, g in by_parameter.items()}
        self.add([found.get(id(leaf)) for leaf in self.leaves])
        if program == "pull":
            return by_point, [*by_tensor, *by_time]
        return by_point, (by_tensor, by_time)

    def pull_back(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], points: Sequence[Tensor], tensors: list[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients with respect to the points and the tensors; those of the leaves are added up here."""
        wanted = [*points, *tensors, *self.leaves]
        found = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
        n, k = len(points), len(points) + len(tensors)
        self.add(found[k:])
        return list(found[:n]), list(found[n:k])

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the leaves."""
        for i, (total, new) in enumerate(zip(self.gradients, gradients, strict=True)):
            if new is not None:
                self.gradients[i] = new if total is None else total + new

    def keep(self, step: Step, found: list[Tensor | None]) -> None:
        """Remember the gradients of a step's coefficients and times."""
        if self.needs_damping or self.needs_t:
            times = len(self.solve.method.nodes) if self.needs_t and self.solve.dynamics.wants_time else 0
            split = len(found) - times
            self.steps.append((step, found[:split], found[split:]))

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients with respect to γ and t, of all steps in one go."""
        if not self.steps:
            return None, self._at_start()
        with torch.enable_grad():
            damping = self.damping.detach().requires_grad_(self.needs_damping)
            t = self.t.detach().requires_grad_(self.needs_t)
            outputs, cotangents = [], []
            groups = defaultdict(list)
            for entry in self.steps:  # dense output gives steps more or fewer rows
                groups[len(entry[0].thetas)].append(entry)
            for group in groups.values():
                self._contract(group, damping, t, outputs, cotangents)
            wanted = [x for x in (damping, t) if x.requires_grad]
            found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
        by_damping = next(found) if self.needs_damping else None
        by_t = next(found) if self.needs_t else None
        if self.first_time is not None:
            by_t = self._at_start() if by_t is None else by_t + self._at_start()
        return by_damping, by_t

    def _at_start(self) -> Tensor | None:
        """The gradient with respect to t of the first evaluation, which is made at its first time."""
        if self.first_time is None:
            return None
        by_t = torch.zeros_like(self.t)
        by_t[..., 0] = self.first_time.reshape(by_t[..., 0].shape).to(by_t)
        return by_t

    def _contract(self, group: list, damping: Tensor, t: Tensor, outputs: list, cotangents: list) -> None:
        solve, clock = self.solve, self.solve.clock
        steps = [step for step, _, _ in group]
        interval, start, size = (
            _stacked([getattr(s, name) for s in steps], t) for name in ("interval", "start", "size")
        )
        sizes, times = clock.affine(t, interval.long(), start, size, solve.method.nodes)
        coefficients = solve.method.coefficients(
            damping, _align(clock.for_rows(sizes), damping), error=False, thetas=clock.thetas(t, steps)
        )
        trailing = _align(clock.for_rows(sizes), damping).dim() - 1
        for i, tensor in enumerate(solve.method.tensors(coefficients)):
            gradients = [found[i] for _, found, _ in group]
            known = next((g for g in gradients if g is not None), None)
            if known is not None and tensor.requires_grad:
                gradients = [torch.zeros_like(known) if g is None else g for g in gradients]
                outputs.append(tensor)
                cotangents.append(torch.stack(gradients, known.dim() - trailing).to(tensor).sum_to_size(tensor.shape))
        for i, time in enumerate(times):
            gradients = [found[i] for _, _, found in group if found]
            if gradients and any(g is not None for g in gradients):
                shape = next(g.shape for g in gradients if g is not None)
                gradients = [torch.zeros(shape, device=t.device) if g is None else g for g in gradients]
                outputs.append(time)
                cotangents.append(torch.stack([g.to(time) for g in gradients]).view(time.shape))


def _detached(x: Tensor | Sequence) -> Tensor | list:
    return x.detach() if isinstance(x, Tensor) else [_detached(part) for part in x]


def _stacked(values: list, t: Tensor) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values).to(t.device)
    return torch.tensor(values, dtype=torch.float64, device=t.device)


def _align(sizes: Tensor, damping: Tensor) -> Tensor:
    """Step sizes (steps, ...) with the dimensions that a damping for each channel needs behind the first."""
    missing = damping.dim() - (sizes.dim() - 1)
    return sizes.view(len(sizes), *[1] * missing, *sizes.shape[1:]) if missing > 0 else sizes


class Checkpoint(torch.autograd.Function):
    """The gradient of the accepted steps from the points between them: the backward pass takes each step again."""

    @staticmethod
    def forward(
        ctx: Any,
        solve: Solve,
        replay: Replay,
        first: Tensor | None,
        t: Tensor,
        damping: Tensor,
        rows: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        """The rows of the state at the output times, (T, state rows, ...)."""
        record: list[tuple[Step, Tensor]] = []
        point = rows if first is None else torch.cat([rows, first[None]])
        solve.random = None
        trajectory = integrate(solve, point, damping, record=record)
        ctx.solve, ctx.replay, ctx.record = solve, replay, record
        ctx.clock_t, ctx.damping = t.detach(), damping.detach()
        ctx.save_for_backward(rows, *leaves)
        return trajectory

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Take each step again, from the last to the first, and evaluate the field once more at the start."""
        refuse_double_backward("checkpoint")
        solve = ctx.solve
        n = solve.method.state_rows
        rows, *leaves = ctx.saved_tensors
        tape = Tape(ctx, leaves)
        carried = torch.zeros(n + solve.method.carries, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        with ctx.replay(), no_autocast(gradient.device.type):
            for step, point in reversed(ctx.record):
                undo = _undo_all if isinstance(step, list) else _undo
                carried = undo(tape, step, point, carried, gradient)
            if solve.method.carries:
                carried = _undo_start(tape, rows, carried)
        damping, t = tape.finish()
        return None, None, None, t, damping, carried + gradient[0], *tape.gradients


def _undo(tape: Tape, step: Step, point: Tensor, carried: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with respect to the point before a step, from that with respect to the point after it."""
    solve = tape.solve
    n = solve.method.state_rows
    if isinstance(step.reached, Tensor):
        carried = torch.cat([carried[:n] + _at_reached(step, gradient, solve.samples()), carried[n:]])
    elif step.reached is not None and not solve.clock.dense:
        carried = torch.cat([carried[:n] + gradient[step.reached], carried[n:]])
    stayed = None
    if step.accepted is not None:
        moved = _marks(step.accepted, carried, solve.samples())
        stayed, carried = torch.where(moved, 0.0, carried), torch.where(moved, carried, 0.0)
    coefficients, times, tensors = tape.inputs(step)
    point = point.detach().requires_grad_()
    solve.tally.add("evaluation", solve.method.evaluations)
    solve.tally.add("accepted")
    pulled = None if step.thetas else tape.pull_compiled("pull", (), point, coefficients, times, carried)
    if pulled is not None:
        before, found = pulled
        tape.keep(step, found)
        return before if stayed is None else before + stayed
    with set_random_state(step.random, point.device):
        stepped = tape.watch(lambda: solve.step(point, coefficients, times, error=False), (point, *tensors))
    outputs, cotangents = [stepped.point], [carried]
    if step.thetas:
        outputs.append(stepped.dense)
        cotangents.append(gradient[step.outputs.start : step.outputs.stop].reshape(stepped.dense.shape))
    (before,), found = tape.pull_back(outputs, cotangents, [point], tensors)
    tape.keep(step, found)
    return before if stayed is None else before + stayed


def _undo_all(tape: Tape, steps: list[Step], points: list[Tensor], carried: Tensor, gradient: Tensor) -> Tensor:
    """:func:`_undo` for all the equal steps between two outputs, which were taken in one compiled program."""
    solve = tape.solve
    n = solve.method.state_rows
    start = torch.cat([carried[:n] + gradient[steps[-1].reached], carried[n:]])
    coefficients, _ = solve.coefficients(steps[0], tape.damping, error=False)
    times = [solve.coefficients(step, tape.damping, error=False)[1] for step in steps]
    pulled = tape.pull_compiled("pull_grid", (len(steps),), points, coefficients, times, start)
    if pulled is None:
        for step, point in zip(reversed(steps), reversed(points), strict=True):
            carried = _undo(tape, step, point, carried, gradient)
        return carried
    solve.tally.add("evaluation", len(steps) * solve.method.evaluations)
    solve.tally.add("accepted", len(steps))
    carried, found = pulled
    for step, by_times in zip(steps, found[1], strict=True):
        tape.keep(step, [*found[0], *by_times])
        found = ([None] * len(found[0]), found[1])  # equal steps have the same coefficients: the sum is with the first
    return carried


def _undo_start(tape: Tape, rows: Tensor, carried: Tensor) -> Tensor:
    """The gradient with respect to the rows of the state at the start, from that with respect to the first point."""
    solve = tape.solve
    n = solve.method.state_rows
    solve.tally.add("evaluation")
    random = solve.random_start if solve.random else None
    with torch.enable_grad(), set_random_state(random, rows.device):
        t = solve.clock.first_time().detach().requires_grad_(tape.needs_t)
        x = rows[0].detach().requires_grad_()
        f = solve.dynamics.evaluate(t, x)
    if not f.requires_grad:
        return carried[:n]
    (by_x,), by_t = tape.pull_back([f], [carried[n]], [x], [t] if tape.needs_t else [])
    tape.first_time = by_t[0] if by_t else None
    return carried[:n] if by_x is None else torch.cat([(carried[0] + by_x)[None], carried[1:n]])


def _marks(marks: Tensor, point: Tensor, batch_dim: int) -> Tensor:
    """Marks (batch,) to broadcast with a point (rows, ...), whose rows have the batch at a dimension."""
    return marks.view(*[1] * (batch_dim + 1), -1, *[1] * (point.dim() - batch_dim - 2))


def _at_reached(step: Step, gradient: Tensor, batch_dim: int) -> Tensor:
    """The outputs' gradients of the samples that a step brings to an output time, 0 for the others."""
    index = (step.interval + 1).clamp(max=len(gradient) - 1)
    rows = gradient.movedim(batch_dim + 2, 1)[index, torch.arange(len(index), device=index.device)]
    rows = rows.movedim(0, batch_dim + 1)
    return torch.where(_marks(step.reached, rows, batch_dim), rows, 0.0)


def refuse_double_backward(name: str) -> None:
    """These gradients are numbers, not functions."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"gradient={name!r} gives first derivatives only, and create_graph=True asks for more. "
            "Fix: gradient='direct'."
        )


class Reversible(torch.autograd.Function):
    """The gradient of a splitting method whose steps are undone in the backward pass: it stores the outputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        solve: Solve,
        replay: Replay,
        first: None,
        t: Tensor,
        damping: Tensor,
        rows: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        """The rows of the state at the output times, (T, 2, ...)."""
        trajectory = integrate(solve, rows, damping)
        ctx.solve, ctx.replay = solve, replay
        ctx.clock_t, ctx.damping = t.detach(), damping.detach()
        ctx.save_for_backward(trajectory, *leaves)
        return trajectory

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Undo each step, from the last to the first, starting anew from every output."""
        refuse_double_backward("reversible")
        solve = ctx.solve
        trajectory, *leaves = ctx.saved_tensors
        tape = Tape(ctx, leaves)
        carried = torch.zeros_like(trajectory[0])
        steps = solve.options.steps
        with ctx.replay(), no_autocast(gradient.device.type):
            for interval in reversed(range(solve.clock.count)):
                point, carried = trajectory[interval + 1], carried + gradient[interval + 1]
                for i in reversed(range(steps)):
                    point, carried = _reverse(tape, Step(interval, i / steps, 1 / steps), point, carried)
                _check_return(solve, point, trajectory[interval], interval)
        damping, t = tape.finish()
        return None, None, None, t, damping, carried + gradient[0], *tape.gradients


def _reverse(tape: Tape, step: Step, point: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """Undo a step: the point before it and the gradient with respect to it. One evaluation for each kick."""
    solve = tape.solve
    sigma = solve.dynamics.activation or (lambda m: m)
    (drifts, decays, weights), times, tensors = tape.inputs(step)
    total: list[Tensor | None] = [None] * len(tensors)
    h, m = point.detach().unbind(0)
    h_gradient, m_gradient = carried.unbind(0)

    def pull(outputs: list[Tensor], h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        (h_new, m_new), found = tape.pull_back(outputs, [h_gradient, m_gradient], [h, m], tensors)
        for i, x in enumerate(found):
            if x is not None:
                total[i] = x if total[i] is None else total[i] + x
        return torch.zeros_like(h) if h_new is None else h_new, torch.zeros_like(m) if m_new is None else m_new

    for kick in reversed(range(len(times))):
        with torch.no_grad():
            h = h - drifts[kick + 1] * sigma(m)
        h = h.detach().requires_grad_()
        evaluate = functools.partial(solve.dynamics.evaluate, times[kick], h)
        f = tape.watch(evaluate, (h, *tensors))
        with torch.enable_grad():
            m = ((m - weights[kick] * f) / decays[kick]).detach().requires_grad_()
            m_after = decays[kick] * m + weights[kick] * f
            h_after = h + drifts[kick + 1] * sigma(m_after)
        h_gradient, m_gradient = pull([h_after, m_after], h, m)
        h, m = h.detach(), m.detach()
    with torch.enable_grad():
        m_leaf = m.requires_grad_()
        h_leaf = (h - drifts[0] * sigma(m)).detach().requires_grad_()
        h_after = h_leaf + drifts[0] * sigma(m_leaf)
        h_gradient, m_gradient = pull([h_after, m_leaf * 1.0], h_leaf, m_leaf)
    solve.tally.add("evaluation", solve.method.evaluations)
    solve.tally.add("accepted")
    tape.keep(step, total)
    return torch.stack([h_leaf.detach(), m_leaf.detach()]), torch.stack([h_gradient, m_gradient])


REVERSAL_TOLERANCE = 1e-3


def _check_return(solve: Solve, reached: Tensor, expected: Tensor, interval: int) -> None:
    """Whether the steps of an interval were undone: relative to the state, within REVERSAL_TOLERANCE."""
    error = torch.linalg.vector_norm(reached - expected)
    size = torch.linalg.vector_norm(expected) + solve.atol
    if not bool(error <= REVERSAL_TOLERANCE * size):
        raise solve.failure(
            ReversalError,
            f"the steps, undone, end {float(error / size):.2g} (relative) away from where they began: rounding errors "
            "grew too much. Fix: gradient='checkpoint', float64, a shorter interval between outputs, or less damping",
            solve.time(Step(interval, 0.0, 1.0)),
        )
