"""Adaptive step sizes, and the attempted steps that the loop of a solve takes.

Times and step sizes are NumPy arrays on the host. Their shape is () if one step size serves the whole batch, and
(lanes,) if every sample, a lane, has its own. Times are measured from the start of the solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode.errors import DIVERGES, DivergenceError, MaxStepsError, StepSizeUnderflowError, diverges
from hbnode.nfe import open_records

Array = np.ndarray

SAFETY = 0.9
SMALLEST, LARGEST = 0.1, 8.0  # factors by which the step size may change
PROPORTIONAL = 0.2
NON_FINITE_ATTEMPTS = 5  # attempts in a row, each ten times shorter, before a NonFiniteError

GOLDEN = (5**0.5 - 1) / 2
TRIALS = tuple(sorted(k * GOLDEN % 1 for k in range(1, 5)))  # fractions of the span; no harmonic is 0 at all four
UNEVEN = 0.9 + 0.1 * GOLDEN  # the first of several equal steps is shorter by this factor
NEGLIGIBLE, VISIBLE = 10.0, 0.01  # displacements over the span, in units of the tolerance
LONGEST_GAP = 1 / 6  # largest gap between two nodes of a step, as a fraction of the span

FIRST_LOOK = 100  # the remaining steps are estimated after 100, 200, 400, ... attempts
TOO_MANY = 5  # a solve fails if the estimate exceeds max_steps by this factor; below it, steps may still grow
GROWTH, DECAY = 1.2, 0.5  # between two estimates; step sizes that change by more are not extrapolated

BESIDE_JUMP = 4.0  # distance of a jump's left and right times from it, in rounding errors of the largest time

FIELD_NOT_FINITE = (
    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound "
    "(GHBNODE's activation bounds it)"
)


@dataclass
class Attempt:
    """An attempted step, or several equal fixed steps, without the initial state.

    Attributes:
        size: signed step size: an array, () or (lanes,). A tensor if the times need gradients or a graph is traced.
        times: the times of the function evaluations, one sequence per step.
        begin: the start of an adaptive step, measured from the start of the solve; the actual time of fixed steps.
        error: whether to estimate the error.
        lanes: the lane of each output time inside the step; None if all lanes have the same.
        outputs: indices of the output times inside the step; None if there are none.
        theta: positions of the outputs, as fractions of the step; None if all are at its end.
        number: index of the first of these steps, counted from the start of a solve with fixed steps.
        restart: the time just after a jump of f, at which the first stage is evaluated again; None without a jump.
        lag: the time of a jump on an output time minus its value, which is 0 with a gradient; else None.
    """

    size: Any
    times: list[Sequence[Tensor]]
    begin: Any
    error: bool = True
    lanes: Any = None
    outputs: Any = None
    theta: Any = None
    number: int = 0
    restart: Any = None
    lag: Any = None


class PIController:
    r"""A controller that chooses the next step size from the error ratios of the last two steps.

    The ratio :math:`r_n` of step n is the norm of (error / tolerance), H its size, and q = ``error_order`` the order
    of the embedded solution. After an accepted step the next size is
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)} r_{n-1}^{0.2/(q+1)}` (Gustafsson's PI control). After a rejected step it is
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)}`. The step after a rejection is not enlarged.

    ``like`` is an array with the shape of the ratios.
    """

    def __init__(self, error_order: int, like: Array) -> None:
        self.exponent = 1.0 / (error_order + 1)
        self.previous, self.rejected = np.ones_like(like), np.zeros_like(like, bool)
        self.failures = np.zeros_like(like)  # attempts in a row whose error was not finite

    def factor(self, ratio: Array, accepted: Array) -> Array:
        """Return the next step size divided by the last one."""
        finite = np.isfinite(ratio)
        self.failures = np.where(finite, 0, self.failures + 1)
        plain = SAFETY * np.maximum(ratio, 1e-10) ** -self.exponent
        up = np.minimum(plain * self.previous ** (PROPORTIONAL * self.exponent), np.where(self.rejected, 1.0, LARGEST))
        down = np.where(finite, np.minimum(plain, SAFETY), SMALLEST)
        self.previous = np.where(accepted, np.maximum(ratio, 1e-4), self.previous)
        self.rejected = ~accepted
        return np.maximum(np.where(accepted, up, down), SMALLEST)


def first_size(h: Array, f: Array, rtol: float, atol: float, rows: int, error_order: int) -> Array:
    r"""Return the initial step size H, without further function evaluations.

    A second-order equation is modelled as an oscillation about 0 of frequency :math:`\omega = (\|f\| / \|h\|)^{1/2}`,
    and a first-order one as a decay of rate :math:`\omega = \|f\| / \|h\|`. The error of the step is then about
    :math:`(\omega H / 2)^{q+1} \|h\|`, with q = ``error_order``; H makes it equal to the tolerance.

    ``h`` and ``f`` are the norms of the position (or first-order state) and of f. ``rows`` is the order of the ODE.
    """
    tolerance = atol + rtol * h
    rate = (f / (h + tolerance)) ** (1.0 / rows)
    return 2.0 * (tolerance / (h + tolerance)) ** (1.0 / (error_order + 1)) / (rate + 1e-12)


class AdaptiveSteps:
    """The adaptive steps of a solve: step sizes by PI control, equal up to the next time that a step must end on.

    An error estimate samples f only at the nodes of a step. If the state is zero, it would miss a force that is zero at
    those nodes. Therefore, if f depends on time:

    - If f is negligible at the start, it is evaluated at four further times, with the initial state.
    - If the initial state is zero, or these evaluations find a force, the nodes of a step are at most a sixth of the
      span apart. Errors must then be below the tolerance by the factor ``dense_error_factor`` of the method. A force
      that was found also shortens the first step, so that it moves the state by about the tolerance.
    - The first of several equal steps is an irrational fraction of the rest, so that its nodes miss no harmonic.
    """

    @np.errstate(all="ignore")
    def __init__(self, problem: Any, state: tuple[Tensor, ...]) -> None:
        self.problem, p, s = problem, problem, problem.settings
        norm = p.norms(state)
        if not np.isfinite(norm).all():
            raise p.start_not_finite(norm)
        h, self.start = norm[0], norm
        self.longest, self.error_factor = np.full_like(h, p.longest_step), np.ones_like(h)
        self.size = np.minimum(self._first_size(state, norm), self.longest)
        if p.common:
            self.size, self.longest = self._least_fraction(self.size), self._least_fraction(self.longest)
        self.control = PIController(p.method.error_order or 1, h)
        self.now = self.taken = self.left = self.target = self.last_taken = self.last_now = np.zeros_like(h)
        self.uneven, self.attempts = np.full_like(h, p.term.time_dependent, bool), 0
        self.last_look = 0
        most = 0 if s.jump_times or problem.ends_on_knots else max(int(0.999 / p.method.widest_gap) - 1, 0)
        self.most_jumps = np.full_like(h, most, int)
        self.jumps_passed = np.zeros_like(self.most_jumps)

    def _first_size(self, state: tuple[Tensor, ...], norm: Array) -> Array:
        p, s, h, f = self.problem, self.problem.settings, norm[0], norm[-1]
        if p.common:
            h, f = self._in_common(h), self._in_common(f)
        size = first_size(h, f, s.rtol, s.atol, p.method.rows, p.method.error_order)
        size = np.where(np.isfinite(size), size, p.end)
        if p.term.time_dependent:
            size = self._cautious(state[0].detach(), h, f, size)
        if s.options and s.options.get("first_step"):
            size = np.full_like(h, s.options["first_step"])
        return size

    def _in_common(self, x: Array) -> Array:
        """Return the root mean square of ``x`` over the lanes whose span is not 0, in every lane."""
        moving = self.problem.end > 0
        return np.full_like(x, np.sqrt((x[moving] ** 2).mean())) if moving.any() else x

    def _least_fraction(self, size: Array) -> Array:
        """Return step sizes at most as long as ``size`` that are the same fraction of the span in all lanes."""
        end = self.problem.end
        moving = end > 0
        return np.where(moving, end * (size[moving] / end[moving]).min(initial=np.inf), size)

    def _cautious(self, x: Tensor, h: Array, f: Array, size: Array) -> Array:
        """Return the first step size for a force that depends on time, and set the longest one and the error factor."""
        p, s = self.problem, self.problem.settings
        tolerance, span = s.atol + s.rtol * h, p.end
        time = span**p.method.rows  # a force times this is its displacement of the state, up to a constant
        is_negligible = f * time <= NEGLIGIBLE * tolerance
        is_forced = (h <= NEGLIGIBLE * s.atol) & ~is_negligible
        if (is_negligible & (span > 0)).any():
            values = tuple([p.term.trial(p.stages([p.time(c * span)])[0], x) for c in TRIALS])
            found = np.fmax.reduce(p.norms(values))  # without NaNs
            is_found = is_negligible & (found * time > VISIBLE * tolerance)
            size = np.where(is_found, np.minimum(size, 2.0 * np.sqrt(tolerance / found)), size)
            is_forced |= is_found
        longest = span * (LONGEST_GAP / p.method.widest_gap)
        self.longest = np.where(is_forced, np.minimum(self.longest, longest), self.longest)
        self.error_factor = np.where(is_forced, p.method.dense_error_factor, 1.0)
        return size

    @np.errstate(all="ignore")
    def next(self) -> Attempt | None:
        """Return the next attempted step, or None at the end of the solve."""
        p, now = self.problem, self.now
        if (now >= p.end).all():
            return None
        self._check_limits()
        target = self._stop()
        left = np.maximum(np.ceil((target - now) / self.size - 0.05), 1.0)
        is_under_way = (left == self.left - 1.0) & (target == self.target)  # equal steps keep their size
        if not is_under_way.all():
            self.taken = np.where(is_under_way, self.taken, (target - now) / left)
        self.target, self.left = target, left
        if self.uneven.any():
            uneven = self.uneven & (left > 1.0)
            self.taken = np.where(uneven, UNEVEN * self.taken, self.taken)
            self.left = np.where(uneven, np.inf, left)
        self.then = np.where(self.left == 1.0, target, now + self.taken)
        times: Sequence[Tensor] = p.no_times
        if p.t is not None:
            begin, end = p.differentiable(now), p.differentiable(self.then, empty=1.0)
            if p.wants_time:
                times = p.stages([begin * (1.0 - c) + end * c for c in p.method.nodes])
            attempt = Attempt(end - begin, [times], now)
        else:
            if p.wants_time:
                times = p.stages([p.time(np.minimum(now + c * self.taken, self.then)) for c in p.method.nodes])
            attempt = Attempt(p.sign * self.taken, [times], now)
        if not p.end_only or (self.then == p.end).any():
            self._find_outputs(attempt)
        return attempt

    def exclude(self, attempt: Attempt, refused: Array) -> Attempt:
        """Return the step with size 0 in the lanes that ``refused`` it because its error is not finite."""
        p, size = self.problem, attempt.size
        if p.t is None:
            size = np.where(refused, 0.0, size)
            times = [p.time(attempt.begin) + c * size for c in p.method.nodes]
        else:
            size = torch.where(torch.from_numpy(refused).to(size.device), 0.0, size)
            times = [p.differentiable(attempt.begin) + c * size for c in p.method.nodes]
        taken = replace(attempt, size=size, times=[p.stages(times) if p.wants_time else p.no_times])
        if attempt.outputs is not None and attempt.lanes is not None:
            stays = ~refused[attempt.lanes]
            taken.outputs = attempt.outputs[stays] if stays.any() else None
            taken.lanes, theta = attempt.lanes[stays], attempt.theta
            taken.theta = theta[stays] if theta is not None and stays.any() else None
        return taken

    def _stop(self) -> Array:
        """Return the time that a step must end on: the final time, an output time (``save="exact"``) or a jump of f.

        A step may contain jumps if at least one node is between any two of them; after a rejection, fewer.
        """
        p, now, target = self.problem, self.now, self.problem.end
        if p.settings.save == "exact":
            stops = p.stops()
            target = np.where(stops > now[..., None], stops, target[..., None]).min(-1)
        if p.jumps is None:
            return target
        rounding = np.finfo(float).eps * p.furthest  # less than the distance between the two sides of a jump
        first = (p.jumps <= (now + rounding)[..., None]).sum(-1)
        last = (p.jumps <= (now + 1.05 * self.size)[..., None]).sum(-1)
        last = np.minimum(np.clip(last, first + 1, first + 1 + self.most_jumps), p.jumps.shape[-1])
        self.jumps_passed = np.maximum(last - first - 1, 0)
        jump = np.take_along_axis(p.jumps, np.maximum(last - 1, 0)[..., None], -1)[..., 0]
        return np.where(jump > now, np.minimum(jump, target), target)

    def _find_outputs(self, attempt: Attempt) -> None:
        p, now, then = self.problem, self.now, self.then
        found = (p.outputs > now[..., None]) & (p.outputs <= then[..., None])
        *lanes, which = np.nonzero(found)
        if not len(which):
            return
        attempt.outputs, attempt.lanes = which, lanes[0] if lanes else np.zeros_like(which)
        begin, end, size = (x[tuple(lanes)] for x in (now, then, self.taken))
        index = (*lanes, which)
        t = p.outputs[index]
        theta = np.where(t == end, 1.0, (t - begin) / size)
        if (theta != 1.0).any():
            attempt.theta = theta

    @np.errstate(all="ignore")
    def accept(self, attempt: Attempt, before: tuple[Tensor, ...], after: tuple[Tensor, ...], error: Tensor) -> Array:
        """Return whether each lane accepts the step, (lanes,) or (), and choose the next step size.

        Raises a SolverError if the solve cannot continue.
        """
        p, now = self.problem, self.now
        ratio = self._ratio(attempt, before, after, error)
        accepted, moving = np.asarray(ratio <= 1.0), self.taken > 0
        size = self.taken * self.control.factor(ratio, accepted)
        is_cut = accepted & (self.taken < 0.5 * self.size)  # by its target, so its error may be far too small
        size = np.where(is_cut, np.maximum(size, self.size), size)
        fine, repeats = accepted | ~moving, self._refuse(before, after, accepted)
        self.size = np.where(moving & ~repeats, np.minimum(size, self.longest), self.size)
        accepted = accepted & ~repeats
        self.now = np.where(accepted, self.then, now)
        if p.jumps is not None:
            fewer = np.maximum(np.minimum(self.most_jumps, self.jumps_passed - 1), 0)
            self.most_jumps = np.where(accepted, self.most_jumps, fewer)
        moved = bool((accepted & moving).any())
        self.uneven = self.uneven & ~accepted
        p.counter.add("accepted" if moved else "rejected")
        if open_records:
            p.counter.report(p.time(now), self.taken, accepted)
        if not fine.all():
            self._check_progress(attempt, before, fine)
        return accepted

    def _refuse(self, before: tuple[Tensor, ...], after: tuple[Tensor, ...], accepted: Array) -> Array:
        """Return which lanes must repeat an accepted step; here none, and in solves with events those that have one."""
        return np.zeros_like(accepted)

    def _ratio(self, attempt: Attempt, before: tuple[Tensor, ...], after: tuple[Tensor, ...], error: Any) -> Array:
        """Return the error of each lane over its tolerance."""
        margin = self.error_factor
        if attempt.theta is not None and self.problem.method.dense_error_factor != 1.0:
            margin = self._margin(attempt)
        ratio = self.problem.ratio(before, after, error) * margin
        if self.problem.settings.jump_times and self.problem.jumps is not None:
            ends = (self.problem.jumps == self.then[..., None]).any(-1)
            over_jump = ends & (self.taken < 2.2 * self.problem.near) & np.isfinite(ratio)
            ratio = np.where(over_jump, np.minimum(ratio, 1.0), ratio)  # a shorter step is below the rounding of times
        return self._in_common(ratio) if self.problem.common else ratio

    def _margin(self, attempt: Attempt) -> Array:
        """Return the factor on each lane's error ratio before it is compared with 1.

        It is ``dense_error_factor`` in lanes with an output strictly inside the step, whose dense output is less
        accurate, and ``error_factor`` in the others.
        """
        inside = inside_of(attempt, len(self.now)) if self.now.ndim else True
        return np.where(inside, self.problem.method.dense_error_factor, self.error_factor)

    def _check_progress(self, attempt: Attempt, before: tuple[Tensor, ...], fine: Array) -> None:
        """Raise if a rejected step has an error that is not finite, or the next step size underflows."""
        p, failures = self.problem, self.control.failures
        now = p.time(self.now)
        floor = np.maximum(4 * p.resolution * abs(now), max((p.settings.options or {}).get("min_step", 0.0), 1e-300))
        small = ~fine & (self.size < floor)
        stuck = ~fine & ((failures >= NON_FINITE_ATTEMPTS) | (small & (failures > 0)))
        if stuck.any() or small.any():
            lane = first_index(stuck | small)
            index = (slice(None), *lane)
            (*_, y, f), start = p.norms(before)[index], self.start[index]
            if diverges(y, f, max(start[-2], p.settings.atol / p.settings.rtol), self.now[lane]):
                raise p.failure(DivergenceError, DIVERGES.format(y, y / f), now[lane], self.size[lane])
        if stuck.any():
            raise p.not_finite(attempt, before, first_index(stuck))
        if small.any():
            lane = first_index(small)
            jumps = "" if p.settings.jump_times else "jump_times=[...] for a known jump, "
            raise p.failure(
                StepSizeUnderflowError,
                "step size underflow: no step meets the tolerance; func may be discontinuous, or the tolerance below "
                f"rounding errors. Fix: {p.advice()}{jumps}loosen rtol and atol, or use float64",
                now[lane],
                self.size[lane],
            )

    def _check_limits(self) -> None:
        """Raise if the next step exceeds ``max_nfe`` or ``max_steps``, or far too many steps are left."""
        p, most = self.problem, self.problem.settings.max_steps
        if p.max_nfe is not None:
            p.check_nfe(p.time(self.now), self.size, p.method.evaluations)
        self.attempts += 1
        if p.settings.steps is not None:
            return
        if p.settings.save == "exact":
            most += p.outputs.shape[-1] - 1
        if self.attempts > most:
            raise p.failure(
                MaxStepsError,
                f"the solve needed more than max_steps={p.settings.max_steps} steps. Fix: {p.advice()}loosen rtol and "
                "atol, shorten the time span or divide t by a typical gap, or raise max_steps",
                p.time(self.now),
                self.taken,
            )
        looks, remainder = divmod(self.attempts, FIRST_LOOK)
        if remainder or looks & (looks - 1):
            return
        before, self.last_taken = self.last_taken, self.taken
        pace, self.last_now = (self.now - self.last_now) / (self.attempts - self.last_look), self.now
        self.last_look = self.attempts
        steady = (self.taken < GROWTH * before) & (self.taken > DECAY * before) & (self.now < p.end)
        needed = np.where(steady, (p.end - self.now) / np.maximum(self.taken, pace), 0.0).max()
        if needed > TOO_MANY * p.settings.max_steps:
            raise p.failure(
                MaxStepsError,
                f"after {self.attempts} steps of steady size about {needed:.1g} more are needed, and "
                f"max_steps={p.settings.max_steps}. Fix: {p.advice()}divide t by a typical gap or period, loosen "
                "rtol and atol, or raise max_steps",
                p.time(self.now),
                self.taken,
            )


def inside_of(attempt: Attempt, lanes: int) -> Array:
    """Return which lanes have an output strictly inside an attempted step, whose dense output they use."""
    inside = np.zeros(lanes, bool)
    inside[attempt.lanes[attempt.theta != 1.0]] = True
    return inside


def first_index(mask: Array) -> tuple[int, ...]:
    """Return the index of the first True in an array of any number of dimensions."""
    return tuple(int(i[0]) for i in np.nonzero(mask)) if mask.ndim else ()
