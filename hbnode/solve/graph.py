"""Adaptive solves as functions of tensors, for graphs of torch.compile and torch.export.

An attempt is a step that is then accepted or rejected by the controller of :mod:`hbnode.solve.control`, which here uses
torch instead of NumPy. torch.compile compiles the functions that :func:`one_attempt` and :func:`whole_solve` return.
torch.export records :func:`loop`, which takes any number of attempts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._torch import while_loop
from hbnode._tree import State, parts
from hbnode.nfe import NFE, Tally, count_nfe
from hbnode.solve.adaptive import NON_FINITE_ATTEMPTS
from hbnode.solve.control import TRIALS, Clip, Control, OfTorch, PIController, first_size, forced_start, is_negligible
from hbnode.solve.methods import Array, Method, Rows, combined
from hbnode.solve.settings import Settings
from hbnode.solve.term import ODETerm

NOT_FINITE, UNDERFLOW, TOO_MANY = 1, 2, 3  # the reasons for which an exported solve can fail


class Limits(NamedTuple):
    """The time limits and tolerances of a solve, each () or (batch,).

    They are stacked into one tensor, an input of the graph, so that a graph serves solves with other values.

    Attributes:
        begin: initial time.
        sign: 1.0 for solving forward in time, -1.0 for solving backward.
        end: final time, measured from the start.
        rtol: relative tolerance.
        atol: absolute tolerance.
        longest: largest step size.
        shortest: smallest step size.
        margin: factor on the error ratios of steps that contain no output times.
        rounding: rounding error of times.
        resolution: relative rounding error of the times that the field gets.
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
    """The tensors of a solve that are constant: its limits, damping, output times and jump times.

    Attributes:
        limits: the :class:`Limits`, (numbers,) or (numbers, batch).
        gamma: the damping γ; None if the graph computes it from the field's parameters. As an input of a compiled
            function it has a first dimension of length 1, because a tensor without dimensions counts as a number.
        outputs: output times measured from the start, or None.
        jumps: times of the jumps of f measured from the start, or None.
    """

    limits: Tensor
    gamma: Any
    outputs: Tensor | None = None
    jumps: Tensor | None = None


class Report(NamedTuple):
    """What the loop in Python needs to know about the attempts in a graph.

    Attributes:
        accepted: number of accepted attempts.
        rejected: number of rejected attempts.
        excluded: number of attempts in which the error of any sample is not finite.
        failed: whether no step size meets the tolerance, so that the solve fails.
        done: whether the solve is finished.
    """

    accepted: int
    rejected: int
    excluded: int
    failed: int
    done: int


def stack_numbers(numbers: tuple[Array, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Broadcast ``numbers``, which are arrays or floats, to ``shape``; return them as one tensor (numbers, *shape)."""
    packed = np.empty((len(numbers), *shape))
    for k, number in enumerate(numbers):
        packed[k] = number
    return torch.from_numpy(packed).to(device)


def _pack_control(control: Control) -> Tensor:
    return torch.stack([x.double() for x in control])


def unpack_control(packed: Tensor) -> Control:
    """Convert the tensor ``packed`` to the state of a step size controller.

    ``packed`` holds the entries of :class:`~hbnode.solve.control.Control` as float64, (entries,) or (entries, batch).
    """
    c = Control(*packed.unbind(0))
    return c._replace(uneven=c.uneven > 0, rejected=c.rejected > 0, most=c.most.long(), passed=c.passed.long())


def start(
    term: ODETerm, method: Method, times: Times, y0: State, first_step: float | None = None
) -> tuple[Rows, Tensor, Times, Tensor]:
    """Choose the first step size of a solve from the initial state ``y0``.

    Returns:
        The initial state of the method, that of the controller as one tensor, ``times`` with the final limits, and the
        number of function evaluations.

    A field that depends on time is also evaluated at four trial times, because a graph cannot skip these evaluations.
    They are counted only if the eager solve would need them (:func:`hbnode.solve.control.forced_start`).
    """
    limits, rows = Limits(*times.limits.unbind(0)), term.flatten(y0)
    (t,) = term.stages([limits.begin])
    rows = (*rows, term(t, rows[0]))
    with torch.no_grad():
        norms = torch.stack([norm(term, row) for row in rows])
        h, f, end, longest = norms[0], norms[-1], limits.end, limits.longest
        if method.damping_limit < math.inf:
            rate = times.gamma.detach().abs().max() / method.damping_limit
            longest = torch.where(longest * rate > 1, 1 / torch.where(rate > 0, rate, 1.0), longest)
        size = first_size(h, f, limits.rtol, limits.atol, method.rows, method.error_order or 1)
        size, margin = torch.where(torch.isfinite(size), size, end), limits.margin
        spent = torch.ones((), dtype=torch.int64, device=size.device)
        if term.time_dependent:
            trials = term.stages([limits.begin + limits.sign * c * end for c in TRIALS])
            found = torch.stack([norm(term, term(t, rows[0])) for t in trials]).nan_to_num(0.0, math.inf).amax(0)
            known = h, f, found, end, limits.rtol, limits.atol
            size, longest, margin = forced_start(OfTorch, *known, method, size, longest)
            spent = spent + len(TRIALS) * (is_negligible(h, f, *known[3:], method) & (end > 0)).any()
        size = size if first_step is None else torch.full_like(size, first_step)
        size = torch.where(size < longest, size, longest)
        size = torch.where(torch.isfinite(norms).all(0), size, math.nan)
        none = torch.zeros_like(size)
        is_uneven = none >= 0 if term.time_dependent else none > 0
        times = times._replace(limits=torch.stack(limits._replace(longest=longest, margin=margin)))
        control = PIController(method.error_order or 1).start(OfTorch, size, is_uneven, none)
        return rows, _pack_control(control), times, spent


def norm(term: ODETerm, x: Tensor) -> Tensor:
    """Return the root mean square of the tensor ``x``, (), or (batch,) if samples have their own steps.

    It is computed in float64, because squares may overflow in float32.
    """
    x = x.double().square()
    return (x.mean() if term.lanes is None else x.flatten(1).mean(1)).sqrt()


def error_ratio(term: ODETerm, before: Rows, after: Rows, error: Any, rtol: Any, atol: Any) -> Tensor:
    """Return the root mean square of error / tolerance, () or (batch,).

    The tolerance is ``atol`` plus ``rtol`` times the larger magnitude in the states ``before`` and ``after`` the step.
    If the elements of the state are divided into error groups, the result is the largest of their root mean squares.
    """
    scale = torch.maximum(torch.stack(before).abs(), torch.stack(after).abs())
    x = error / (scale * rtol + atol)
    x = x if term.lanes is None else x.movedim(1, 0)
    norms = [norm(term, x[..., group]) for group in term.error_groups]
    return norms[0] if len(norms) == 1 else torch.stack(norms).amax(0)


class Attempts:
    """The attempted steps of a solve, as pure functions of the state of the method and that of the controller.

    Arguments:
        term: the equation. If ``term.lanes`` is not None, each sample has its own step sizes.
        method: an adaptive method whose state ends with the value of the field (FSAL).
        times: the tensors that are constant during the solve.
        is_exact: whether steps end on the output times. Outputs are then not interpolated.
    """

    def __init__(self, term: ODETerm, method: Method, times: Times, *, is_exact: bool = False) -> None:
        self.term, self.method, self.times, self.is_exact = term, method, times, is_exact
        self.limits = Limits(*times.limits.unbind(0))
        self.control = PIController(method.error_order or 1, self.limits.longest)
        stops = times.outputs if is_exact else None
        self.clip = Clip(self.limits.end, stops, times.jumps, self.limits.rounding)

    def saved(self, rows: Rows) -> Rows | None:
        """Return tensors in which attempts will store the outputs, each (T, ...) or (batch, T, ...).

        At first they hold the state ``rows`` for each of the T output times. Without output times, return None.
        """
        outputs, place = self.times.outputs, int(self.term.lanes is not None)
        if outputs is None:
            return None
        rows = rows[: self.term.rows]
        count = outputs.shape[-1]  # copies, because a graph for tensors that are views cannot be used for other tensors
        return tuple([row.unsqueeze(place).repeat_interleave(count, place).clone() for row in rows])

    def attempt(
        self, rows: Rows, control: Tensor, saved: Rows | None, excluded: Tensor | None = None
    ) -> tuple[Rows, Tensor, Rows | None, tuple[Tensor, Tensor]]:
        """Take one attempt.

        Finished samples take a step of size 0. Samples in the mask ``excluded`` also take a step of size 0 and reject
        it: their error is not finite, and would turn the gradients of all samples into 0 * NaN = NaN.

        Returns:
            The state after the attempt, the state of the controller, the saved outputs, and a pair of masks: the
            samples that accept the step, and the samples for which no step size meets the tolerance.
        """
        term, method, limits, n = self.term, self.method, self.limits, self.term.rows
        with torch.no_grad():
            before = unpack_control(control)
            then, c = self.control.plan(OfTorch, self.clip, before)
            size = c.taken if excluded is None else torch.where(excluded, 0.0, c.taken)
            ends = [before.now + node * size for node in method.nodes]
            stages = term.stages([limits.begin + limits.sign * torch.where(t < then, t, then) for t in ends])
        packed = self._at_gamma(functools.partial(method.packed, error=True), limits.sign * size)
        coefficients = method.unpack(packed, term.dims_of_row, error=True)
        dense = saved is not None and not self.is_exact
        result = method.step(rows, coefficients, stages, term, error=True, dense=dense)
        with torch.no_grad():
            margin, found = limits.margin, None
            if saved is not None:
                t = self.times.outputs
                found = (t > before.now[..., None]) & (t <= then[..., None])
                inside = found & (t < then[..., None])
                margin = torch.where(inside.any(-1), method.dense_error_factor, margin)
            tolerances = [self.wide(x, rows[0]).to(rows[0]) for x in (limits.rtol, limits.atol)]
            ratio = error_ratio(term, rows[:n], result.state[:n], result.error, *tolerances) * margin
            is_finite = torch.isfinite(ratio) if excluded is None else torch.isfinite(ratio) & ~excluded
            accepted, c = self.control.judge(OfTorch, c, then, torch.where(is_finite, ratio, math.inf))
            now = abs(limits.begin + limits.sign * c.now)
            floor = 4 * limits.resolution * now
            floor = torch.where(floor > limits.shortest, floor, limits.shortest)
            fails = (~accepted & ((c.failures >= NON_FINITE_ATTEMPTS) | (c.size < floor))) | torch.isnan(before.size)
            fails = fails & (before.now < limits.end)
        if saved is not None:
            ends = [self._of_lanes(row) for row in result.state[:n]]
            if dense:
                theta = (t - before.now[..., None]) / torch.where(size > 0, size, 1.0)[..., None]
                rows_inside = self._interpolated(result.columns, size, torch.where(inside, theta, 1.0))
                ends = [torch.where(self.wide(inside, x), x, end) for x, end in zip(rows_inside, ends, strict=True)]
            new = found & (accepted if term.lanes is None else accepted[:, None])
            both = [torch.where(self.wide(new, x), end, x) for end, x in zip(ends, saved, strict=True)]
            saved = tuple([x.contiguous() for x in both])  # tensors with different strides would need different graphs
        after = [torch.where(self.wide(accepted, a), a, b) for a, b in zip(result.state, rows, strict=True)]
        return tuple(after), _pack_control(c), saved, (accepted, fails)

    def _at_gamma(self, formula: Callable[..., Tensor], *args: Tensor, count: int = 1) -> Tensor:
        """Return ``formula(torch, γ, *args)`` for the damping γ.

        ``args`` are tensors () or (n,). If samples have their own steps, n is ``count`` times the number of samples,
        and each sample has ``count`` successive elements.
        """
        gamma = self.times.gamma
        if gamma.dim():  # the first dimension is that of the outputs or of the samples
            if count > 1 and len(gamma) > 1:
                gamma = gamma.repeat_interleave(count, 0)
            ones = [1] * (gamma.dim() - (self.term.lanes is not None))
            args = tuple([x.reshape(*x.shape, *ones) for x in args])
        return formula(torch, gamma, *args).to(self.term.template)

    def _interpolated(self, columns: Any, size: Tensor, theta: Tensor) -> Rows:
        """Return the states at positions in a step, computed by dense output, each (T, ...) or (batch, T, ...).

        Arguments:
            columns: the columns of the step's StepResult.
            size: the step size without its sign, () or (batch,).
            theta: the positions, from 0 to 1, (T,) or (batch, T).
        """
        signed, count = self.limits.sign * size, theta.shape[-1]
        signed = signed[..., None].expand(theta.shape).reshape(-1)
        weights = self._at_gamma(self.method.dense_weights, signed, theta.reshape(-1), count=count)
        if self.term.lanes is None:
            return combined(weights, columns.unsqueeze(1)).unbind(1)
        wide = columns.unsqueeze(2).expand(*columns.shape[:2], count, *columns.shape[2:]).flatten(1, 2)
        inside = combined(weights, wide)
        return inside.reshape(*theta.shape, *inside.shape[1:]).unbind(2)

    def _of_lanes(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0 if self.term.lanes is None else 1)

    def wide(self, mask: Tensor, like: Tensor) -> Tensor:
        return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim())) if mask.dim() else mask


Inside = Callable[[State], ODETerm]
Made = tuple[Rows, Tensor, Rows | None, Tensor]


def one_attempt(inside: Inside, method: Method, *, is_exact: bool) -> Callable[..., Made]:
    """Return a function of tensors, for torch.compile, that takes one attempted step.

    It returns the state of the method and of the controller, the stored outputs and the :class:`Report`. The values of
    its argument ``y0`` are not used, only the shapes. ``inside`` is the result of :func:`inside_of`.
    """

    def run(y0: State, times: Times, rows: Any, control: Any, saved: Any, excluded: Tensor | None) -> Made:
        times = times._replace(gamma=times.gamma[0])
        steps = Attempts(inside(y0), method, times, is_exact=is_exact)
        return _reported(steps, rows, control, saved, excluded)

    return run


def whole_solve(inside: Inside, method: Method, count: int, *, is_exact: bool) -> Callable[..., tuple[State, Tensor]]:
    """Return a function of tensors, for torch.compile, that starts a solve and takes ``count`` attempts.

    The function returns the state at the end or the trajectory, and the :class:`Report` of all attempts.
    """

    def run(y0: State, times: Times) -> tuple[State, Tensor]:
        term = inside(y0)
        gamma = torch.as_tensor(term.damping).double() if times.gamma is None else times.gamma[0]
        times = times._replace(gamma=gamma)
        rows, control, times, _ = start(term, method, times, y0)
        steps, reports = Attempts(term, method, times, is_exact=is_exact), []
        saved = steps.saved(rows)
        for _ in range(count):
            rows, control, saved, report = _reported(steps, rows, control, saved)
            reports.append(report)
        report = torch.cat([torch.stack(reports).sum(0)[:-1], reports[-1][-1:]])
        return trajectory(term, y0, rows, saved), report

    return run


def inside_of(term: ODETerm) -> Inside:
    """Return a function that creates a term like ``term`` from an initial state.

    Compiled functions call it while torch.compile records them, because the batch size may differ between calls.
    """
    field, second_order, own_steps = term.inner, term.second_order, term.lanes is not None
    in_autocast = term.in_autocast

    def inside(y0: State) -> ODETerm:
        lanes = len(parts(y0)[0]) if own_steps else None
        evaluate = ODETerm(field, y0, Uncounted(), second_order=second_order, lanes=lanes)
        evaluate.in_autocast = in_autocast  # autocast is disabled outside the field
        return evaluate

    return inside


def _reported(steps: Attempts, rows: Rows, control: Tensor, saved: Rows | None, excluded: Tensor | None = None) -> Made:
    """Take one attempted step with ``steps``.

    Returns:
        The state of the method, the state of the controller, the stored outputs, and the :class:`Report` as a tensor.
    """
    now = control[0]
    rows, control, saved, (accepted, fails) = steps.attempt(rows, control, saved, excluded)
    with torch.no_grad():
        c, end = unpack_control(control), steps.limits.end
        moved = (accepted & (c.taken > 0)).any()
        rejected, excludes = (now < end).any() & ~moved, (~accepted & (c.failures > 0)).any()
        report = torch.stack([moved, rejected, excludes, fails.any(), (c.now >= end).all()]).long()
    return rows, control, saved, report


def trajectory(term: ODETerm, y0: State, rows: Rows, saved: Rows | None) -> State:
    """Return the trajectory, made from ``y0`` and the stored outputs; if ``saved`` is None, return the final state."""
    if saved is None:
        # copies, because the user may change them in place
        return term.unflatten(tuple([row.clone() for row in rows[: term.rows]]))
    if term.lanes is not None:
        saved = tuple([row.movedim(1, 0) for row in saved])
    made = tuple([torch.cat([a.unsqueeze(0), b]) for a, b in zip(term.flatten(y0), saved, strict=True)])
    return term.unflatten(made, (len(made[0]),))


def loop(term: ODETerm, method: Method, times: Times, y0: State, settings: Settings) -> tuple[State, Tensor, Tensor]:
    """Solve in one graph with any number of attempts, for torch.export.

    Returns:
        The final state or the trajectory, which is NaN for samples whose solve failed; the number of function
        evaluations; and the reason why the solve failed, or 0, with the shape () or (batch,).
    """
    options, is_exact = settings.options or {}, settings.save == "exact"
    rows, control, times, spent = start(term, method, times, y0, options.get("first_step"))
    steps, n = Attempts(term, method, times, is_exact=is_exact), len(rows)
    saved, end = steps.saved(rows) or (), steps.limits.end.clone()  # tensors of a loop must not share memory
    code = torch.where(torch.isnan(control[1]), NOT_FINITE, 0)
    outputs = times.outputs if is_exact else None
    most = torch.full_like(spent, settings.max_steps + (0 if outputs is None else outputs.shape[-1] - 1))
    if (most_evaluations := options.get("max_nfe")) is not None:
        most = torch.minimum(most, (most_evaluations - spent) // method.evaluations)

    def goes_on(count: Tensor, code: Tensor, control: Tensor, *others: Tensor) -> Tensor:
        return ((control[0] < end) & (code == 0)).any() & (count < most)

    def body(count: Tensor, code: Tensor, control: Tensor, *others: Tensor) -> Rows:
        inner = Attempts(term, method, times, is_exact=is_exact)
        rows, control, saved, (_, fails) = inner.attempt(others[:n], control, others[n:] or None, code > 0)
        why = torch.where(unpack_control(control).failures > 0, NOT_FINITE, UNDERFLOW)
        code = torch.where((code == 0) & fails, why, code)
        return tuple([x.clone() for x in (count + 1, code, control, *rows, *(saved or ()))])

    carried = tuple([x.clone() for x in (0 * spent, code, control, *rows, *saved)])
    count, code, control, *others = while_loop(goes_on, body, carried)
    is_done = control[0] >= end
    others = [torch.where(steps.wide(is_done, x), x, math.nan) for x in others]
    code = torch.where(is_done, 0, torch.where(code > 0, code, TOO_MANY))
    solution = trajectory(term, y0, tuple(others), tuple(others[n:]) or None)
    return solution, spent + count * method.evaluations, code


@torch.no_grad()
def exported(term: ODETerm, method: Method, t: Tensor, y0: State, settings: Settings, *, end_only: bool) -> State:
    """Solve while torch.export records the solve, and return the trajectory or, with ``end_only``, the final state.

    If this happens in the forward pass of a :class:`Reported`, that wrapper also returns whether the solve failed.
    """
    begin, options = t[..., 0], settings.options or {}
    sign, elapsed = torch.where(t[..., -1] >= begin, 1.0, -1.0), abs(t - begin[..., None])
    none = 0.0 * elapsed[..., -1]
    if term.lanes is not None and t.dim() == 1:
        none, elapsed = none.expand(term.lanes), elapsed.expand(term.lanes, -1)
    gamma = torch.as_tensor(term.damping, dtype=torch.float64, device=t.device)
    eps = torch.finfo(torch.float64).eps
    limits = Limits(
        begin, sign, elapsed[..., -1], settings.rtol, settings.atol, options.get("max_step", math.inf),
        options.get("min_step", 1e-300), 1.0, eps * abs(t).max(),
        torch.finfo(term.template.dtype).eps if term.time_dependent else eps,
    )  # fmt: skip
    times = Times(torch.stack([none + x for x in limits]), gamma, None if end_only else elapsed[..., 1:])
    solution, *report = loop(term, method, times, y0, settings)
    if open_reports:
        open_reports[-1].append(report)
    return solution


class Reported(nn.Module):
    """A wrapper of a module, for ``torch.export``, that also returns whether its adaptive solves failed.

    An exported graph cannot raise exceptions. A solve that fails returns NaN instead. The wrapped module returns its
    output, the number of function evaluations, and a reason: 0 for success, or

    - 1: the state or the field is not finite;
    - 2: no step size meets the tolerance;
    - 3: the solve needs more than ``max_steps`` steps, or more than ``options={"max_nfe": n}`` evaluations.

    A call outside an exported graph solves eagerly. A solve that fails then raises its error, and the reason is 0.

    Arguments:
        module: the module, with at least one adaptive solve, for example :class:`hbnode.ODEBlock`.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2))
        >>> output, evaluations, reason = hbnode.solve.Reported(block)(torch.ones(3, 2))
        >>> int(evaluations) == block.nfe.forward, int(reason)
        (True, 0)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> tuple[Any, Tensor, Tensor]:
        """Return the output of the module, the number of evaluations (), and the reason.

        The reason is one integer (), or with ``per_sample=True`` one for each sample, (batch,).
        """
        if not torch.compiler.is_exporting():
            with count_nfe(self.module) as nfe:
                return self.module(*args), torch.tensor(nfe.forward), torch.tensor(0)
        open_reports.append([])
        try:
            output = self.module(*args)
        finally:
            found = open_reports.pop()
        if not found:
            raise ValueError("Reported has a module without adaptive solves. Fix: export the module itself.")
        spent, codes = zip(*found, strict=True)
        return output, torch.stack(spent).sum(), torch.stack(torch.broadcast_tensors(*codes)).amax(0)


open_reports: list[list[list[Tensor]]] = []  # for each active Reported, the reports of its solves


class Uncounted(Tally):
    """A counter that ignores all evaluations, for compiled functions: their caller counts the evaluations."""

    def __init__(self) -> None:
        self.started_with = NFE()

    def add(self, event: str, count: int = 1) -> None: ...
