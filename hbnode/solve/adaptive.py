"""Adaptive step size control in Python with NumPy: the first step, the next steps, and the errors of failed solves.

Samples may have different step sizes. Arrays with one entry per sample have the shape (batch,), or () if all samples
share their steps. Variables named ``lanes`` hold sample indices or the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode.errors import DIVERGES, DivergenceError, MaxStepsError, StepSizeUnderflowError, diverges
from hbnode.nfe import open_records
from hbnode.solve.control import TRIALS, Clip, Control, PIController, first_size, forced_start, is_negligible
from hbnode.solve.grid import to_device
from hbnode.solve.methods import Array, Rows
from hbnode.solve.stepper import Attempt, Setup, Taken, first_index

NON_FINITE_ATTEMPTS = 5  # consecutive attempts with NaN or infinity, each ten times shorter, before a NonFiniteError
FIRST_LOOK = 100  # the number of remaining steps is estimated after 100, 200, 400, ... attempts
TOO_MANY = 5  # a solve fails early if the estimate exceeds max_steps by this factor
GROWTH, DECAY = 1.2, 0.5  # estimates are extrapolated only if the step size changed by a factor within these limits


def common_norm(x: Array, span: Array) -> Array:
    """Return an array (batch,) whose entries all are the root mean square of ``x`` (batch,).

    Samples whose time span is 0 are left out of the mean.
    """
    moves = span > 0
    return np.full_like(x, np.sqrt((x[moves] ** 2).mean())) if moves.any() else x


def common_fraction(size: Array, span: Array) -> Array:
    """Return step sizes (batch,) that are the same fraction of each sample's time span, and at most ``size``.

    Samples whose time span is 0 keep their step sizes.
    """
    moves = span > 0
    return np.where(moves, span * (size[moves] / span[moves]).min(initial=np.inf), size)


class AdaptiveSteps:
    """The adaptive steps of a solve, with step sizes from a PI controller.

    If a step must end on a time, such as a jump, the steps up to that time have equal sizes. If f depends on time, the
    first of these steps is shorter by an irrational factor, so that the evaluation times do not coincide with the
    period of a forcing. :func:`hbnode.solve.control.forced_start` then chooses the first step of the solve.

    Attributes:
        control: the state of the controller.
        then: the time at which the planned step ends, measured from the start of the solve.
    """

    @np.errstate(all="ignore")
    def __init__(self, setup: Setup, state: Rows) -> None:
        self.setup, self.stepper, self.grid = setup, setup.stepper, setup.grid
        settings, method, grid, norm = setup.settings, setup.stepper.method, setup.grid, setup.stepper.norms(state)
        self.options, strongest = settings.options or {}, setup.stepper.strongest
        most = min(self.options.get("max_step", np.inf), method.damping_limit / strongest if strongest else np.inf)
        if not np.isfinite(norm).all():
            raise self.stepper.start_not_finite(norm, grid.begin)
        h, self.start = norm[0], norm
        self.is_common = settings.common_steps and grid.lanes is not None
        self.error_factor, longest = np.ones_like(h), np.full_like(h, most)
        size, longest = self._first_size(state, norm, longest)
        size = np.minimum(size, longest)
        if self.is_common:
            size, longest = common_fraction(size, grid.end), common_fraction(longest, grid.end)
        rounding = np.finfo(float).eps * grid.furthest
        self.clip = Clip(grid.end, grid.stops if settings.save == "exact" else None, grid.jumps, rounding)
        self.controller = PIController(method.error_order or 1, longest)
        most = 0 if settings.jump_times or grid.ends_on_knots else max(int(0.999 / method.widest_gap) - 1, 0)
        uneven = np.full_like(h, self.stepper.term.time_dependent, bool)
        self.control: Control = self.controller.start(np, size, uneven, np.full_like(h, most, int))
        self.then = self.control.now
        self.attempts = self.last_look = 0
        self.last_taken = self.last_now = self.control.now

    def _first_size(self, state: Rows, norm: Array, longest: Array) -> tuple[Array, Array]:
        """Return the first step size and the largest allowed step size, each () or (batch,); set ``error_factor``.

        The solver multiplies the error of each step by ``error_factor``. It is 1, or more than 1 if f depends on time
        and error estimates at the start may miss it, see :func:`hbnode.solve.control.forced_start`.

        Arguments:
            state: the initial state of the method.
            norm: the norms of the tensors of ``state``, (tensors,) or (tensors, batch).
            longest: the limit of the step size without regard to f, () or (batch,).
        """
        settings, method, h, f = self.setup.settings, self.stepper.method, norm[0], norm[-1]
        if self.is_common:
            h, f = common_norm(h, self.grid.end), common_norm(f, self.grid.end)
        size = first_size(h, f, settings.rtol, settings.atol, method.rows, method.error_order or 1)
        size = np.where(np.isfinite(size), size, self.grid.end)
        if self.stepper.term.time_dependent:
            known = h, f, self._found(state[0].detach(), h, f), self.grid.end, settings.rtol, settings.atol
            size, longest, self.error_factor = forced_start(np, *known, method, size, longest)
        return np.full_like(h, self.options.get("first_step", size)), longest

    def _found(self, x: Tensor, h: Array, f: Array) -> Array:
        """Return the largest norm of f at the times ``TRIALS``, () or (batch,).

        A force that is about 0 at the start may act later. If f is negligible at the start for no sample, f is not
        evaluated, and the result is 0.

        Arguments:
            x: the initial state y, or the initial position h of a second-order equation.
            h: the norm of ``x``, () or (batch,).
            f: the norm of f at the start, () or (batch,).
        """
        grid, settings, term, method = self.grid, self.setup.settings, self.stepper.term, self.stepper.method
        negligible = is_negligible(h, f, grid.end, settings.rtol, settings.atol, method)
        if not (negligible & (grid.end > 0)).any():
            return 0.0 * h
        values = tuple([term.trial(term.stages([grid.time(c * grid.end)])[0], x) for c in TRIALS])
        return np.fmax.reduce(self.stepper.norms(values))  # ignores NaNs

    # Plan

    @np.errstate(all="ignore")
    def next(self) -> Attempt | None:
        """Return the next step to attempt, or None at the end of the solve."""
        grid, stepper = self.grid, self.stepper
        if (self.control.now >= grid.end).all():
            return None
        self._check_limits()
        self._plan()
        now, taken = self.control.now, self.control.taken
        times: Sequence[Tensor] = stepper.no_times
        nodes, wants_time = stepper.method.nodes, stepper.term.wants_time
        if grid.t is not None:
            begin, end = grid.differentiable(now), grid.differentiable(self.then, empty=1.0)
            if wants_time:
                times = stepper.term.stages([begin * (1.0 - c) + end * c for c in nodes])
            attempt = Attempt(grid.time(now), end - begin, [times])
        else:
            if wants_time:
                times = stepper.term.stages([grid.time(np.minimum(now + c * taken, self.then)) for c in nodes])
            attempt = Attempt(grid.time(now), grid.sign * taken, [times])
        if not self.setup.end_only or (self.then == grid.end).any():
            self._find_outputs(attempt)
        return attempt

    def _plan(self) -> None:
        self.then, self.control = self.controller.plan(np, self.clip, self.control)

    def _find_outputs(self, attempt: Attempt) -> None:
        grid, now, then = self.grid, self.control.now, self.then
        found = (grid.outputs > now[..., None]) & (grid.outputs <= then[..., None])
        *lanes, which = np.nonzero(found)
        if not len(which):
            return
        attempt.outputs, attempt.lanes = which, lanes[0] if lanes else np.zeros_like(which)
        index, output = tuple(lanes), (*lanes, which)
        t = grid.outputs[output]
        theta = np.where(t == then[index], 1.0, (t - now[index]) / self.control.taken[index])
        if (theta != 1.0).any():
            attempt.theta = theta
        if grid.t is not None:
            self._place(attempt)

    def _place(self, attempt: Attempt) -> None:
        """Store in ``attempt`` the positions of its output times within the step, from 0 to 1, as a tensor.

        The positions have gradients with respect to the output times, which NumPy arrays could not have.
        """
        grid, size = self.grid, attempt.size
        t, begin, which = grid.lane_times, grid.differentiable(self.control.now), to_device(attempt.outputs, grid.t) + 1
        if grid.lanes is None:
            t, size = t[which], size.expand(len(which))
        else:
            index = to_device(attempt.lanes, t)
            t, begin, size = t[index, which], begin[index], size[index]
        late = t - (begin + size)
        attempt.late, attempt.place = late - late.detach(), ((t - begin) / size, size)

    def zero_failed_lanes(self, attempt: Attempt, refused: Array, before: Control) -> Attempt:
        """Return a copy of the step ``attempt`` in which the samples in the mask ``refused`` take a step of size 0.

        The error of these samples is not finite. In the original step, they would turn gradients into NaN. ``before``
        is the state of the controller at the start of the step.
        """
        grid, stepper, size, begin = self.grid, self.stepper, attempt.size, attempt.time
        if grid.t is None:
            size = np.where(refused, 0.0, size)
        else:
            size = torch.where(to_device(refused, size), 0.0, size)
            begin = grid.differentiable(before.now)
        times: Sequence[Tensor] = stepper.no_times
        if stepper.term.wants_time:
            times = stepper.term.stages([begin + c * size for c in stepper.method.nodes])
        taken = replace(attempt, size=size, times=[times])
        if attempt.outputs is not None and attempt.lanes is not None:
            stays = ~refused[attempt.lanes]
            taken.outputs, taken.lanes = attempt.outputs[stays] if stays.any() else None, attempt.lanes[stays]
            taken.theta = attempt.theta[stays] if attempt.theta is not None and stays.any() else None
            if taken.outputs is not None and grid.t is not None:
                self.control, after = before, self.control
                self._place(taken)
                self.control = after
        return taken

    # Judgement

    @np.errstate(all="ignore")
    def accept(self, attempt: Attempt, state: Rows, taken: Taken) -> Array:
        """Return a mask of the samples that accept the step, (batch,) or (), and choose the next step size.

        ``state`` is the state before the step ``attempt``, and ``taken`` the result of the step. Raises a SolverError
        if the solve cannot continue.
        """
        counter, size = self.stepper.term.counter, self.control.taken
        ratio, is_moving = self._ratio(attempt, state, taken), size > 0
        is_fine = (ratio <= 1.0) | ~is_moving
        repeats = self._refuse(state, taken, np.asarray(ratio <= 1.0))
        accepted, self.control = self.controller.judge(np, self.control, self.then, ratio, repeats)
        counter.add("accepted" if (accepted & is_moving).any() else "rejected")
        if open_records:
            counter.report(attempt.time, size, accepted)
        if not is_fine.all():
            self._check_progress(attempt, state, is_fine)
        return accepted

    def _refuse(self, before: Rows, taken: Taken, accepted: Array) -> Array | None:
        """Return a mask of the samples that must repeat the step although its error is small enough; None for none.

        A subclass can override this method to reject steps for other reasons than their error, such as events.

        Arguments:
            before: the state before the step.
            taken: the result of the step.
            accepted: mask of the samples whose error is small enough, (batch,) or ().
        """
        return None

    def _ratio(self, attempt: Attempt, before: Rows, taken: Taken) -> Array:
        """Return the error of the step divided by the tolerance, (batch,) or (); a step is accepted up to 1.

        ``before`` is the state before the step, and ``taken`` the result of the step.
        """
        grid, factor, margin = self.grid, self.stepper.method.dense_error_factor, self.error_factor
        if attempt.theta is not None and factor != 1.0:  # dense output is less accurate
            inside = attempt.inside(len(self.then)) if self.then.ndim else True
            margin = np.where(inside, factor, margin)
        ratio = self.stepper.ratio(before, taken) * margin
        if self.setup.settings.jump_times and grid.jumps is not None:
            ends = (grid.jumps == self.then[..., None]).any(-1)
            over_jump = ends & (self.control.taken < 2.2 * grid.near) & np.isfinite(ratio)
            ratio = np.where(over_jump, np.minimum(ratio, 1.0), ratio)  # times cannot resolve less
        return common_norm(ratio, self.grid.end) if self.is_common else ratio

    # Failures

    @property
    def resolution(self) -> float:
        """The relative rounding error of times.

        If f depends on time, it gets times in the dtype of the state, which round more than float64.
        """
        term = self.stepper.term
        return torch.finfo(term.template.dtype if term.time_dependent else torch.float64).eps

    def _check_progress(self, attempt: Attempt, before: Rows, fine: Array) -> None:
        """Raise a SolverError if the rejected step ``attempt`` shows that the solve cannot continue.

        This is the case if the error was not finite in several steps in succession, or if the next step size is so
        small that the time would hardly change. ``before`` is the state before the step. ``fine`` is a mask of the
        samples whose error is small enough.
        """
        setup, stepper, c, least = self.setup, self.stepper, self.control, self.options.get("min_step", 0.0)
        now = self.grid.time(c.now)
        floor = np.maximum(4 * self.resolution * abs(now), max(least, 1e-300))
        small = ~fine & (c.size < floor)
        stuck = ~fine & ((c.failures >= NON_FINITE_ATTEMPTS) | (small & (c.failures > 0)))
        if not (stuck.any() or small.any()):
            return
        lane = first_index(stuck | small)
        index = (slice(None), *lane)
        (*_, y, f), start = (stepper.norms(before)[index], self.start[index])
        if diverges(y, f, max(start[-2], stepper.atol / stepper.rtol), c.now[lane]):
            raise stepper.failure(DivergenceError, DIVERGES.format(y, y / f), now[lane], c.size[lane])
        if stuck.any():
            raise stepper.not_finite(attempt, before, first_index(stuck))
        lane = first_index(small)
        jumps = "" if setup.settings.jump_times else "jump_times=[...] for a known jump, "
        why = "no step meets the tolerance; func may be discontinuous, or the tolerance below rounding errors"
        message = f"step size underflow: {why}. Fix: {setup.advice}{jumps}loosen rtol and atol, or use float64"
        raise stepper.failure(StepSizeUnderflowError, message, now[lane], c.size[lane])

    def _check_limits(self) -> None:
        """Raise MaxNFEError or MaxStepsError if the next step would exceed ``max_nfe`` or ``max_steps``.

        Also raise MaxStepsError early if the present step size would need many times ``max_steps`` steps.
        """
        setup, c, most = self.setup, self.control, self.setup.settings.max_steps
        if setup.max_nfe is not None:
            setup.check_nfe(self.grid.time(c.now), c.size, self.stepper.method.evaluations)
        self.attempts += 1
        if setup.settings.steps is not None:
            return
        if setup.settings.save == "exact":
            most += self.grid.outputs.shape[-1] - 1
        if self.attempts > most:
            raise self._too_many("the solve needed")
        looks, remainder = divmod(self.attempts, FIRST_LOOK)
        if remainder or looks & (looks - 1):
            return
        before, self.last_taken = self.last_taken, c.taken
        pace, self.last_now = (c.now - self.last_now) / (self.attempts - self.last_look), c.now
        self.last_look = self.attempts
        steady = (c.taken < GROWTH * before) & (c.taken > DECAY * before) & (c.now < self.grid.end)
        needed = np.where(steady, (self.grid.end - c.now) / np.maximum(c.taken, pace), 0.0).max()
        if needed > TOO_MANY * setup.settings.max_steps:
            raise self._too_many(f"after {self.attempts} equal steps, another {needed:.1g} are needed, which is")

    def _too_many(self, needed: str) -> MaxStepsError:
        fix = f"{self.setup.advice}loosen rtol and atol, shorten the time span or divide t by a typical gap or period"
        t, size = self.grid.time(self.control.now), self.control.taken
        message = f"{needed} more than max_steps={self.setup.settings.max_steps} steps. Fix: {fix}, or raise max_steps"
        failure: Any = self.stepper.failure(MaxStepsError, message, t, size)
        return failure
