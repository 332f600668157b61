"""Step sizes: given in advance, or chosen by the error.

The host knows times and sizes only, as arrays of NumPy: of no dimension where one step serves the whole batch, or
(lanes,) where every sample, a lane, has steps of its own. Times are measured from the start of the solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode.errors import MaxStepsError, StepSizeUnderflowError
from hbnode.nfe import open_records

Array = np.ndarray

SAFETY = 0.9
SMALLEST, LARGEST = 0.1, 8.0  # factors by which a step may change
PROPORTIONAL = 0.2
NON_FINITE_ATTEMPTS = 5  # steps ten times smaller each, before a NonFiniteError

GOLDEN = (5**0.5 - 1) / 2
PROBES = tuple(sorted(k * GOLDEN % 1 for k in range(1, 5)))  # fractions of the span; no harmonic is 0 at all four
UNEVEN = 0.9 + 0.1 * GOLDEN  # the first of several equal steps is shorter by this factor
NEGLIGIBLE, VISIBLE = 10.0, 0.01  # displacements over the span, in units of the tolerance
LONGEST_GAP = 1 / 6  # between two nodes of a step, as a fraction of the span

FIRST_LOOK = 100  # attempted steps; then at twice as many, and so on
TOO_MANY = 5  # times max_steps: by less the steps may still grow, up to where they are unstable
GROWTH, DECAY = 1.2, 0.5  # between two looks: steps that grow are waited for, those that shrink will underflow

LONGEST_DECAY = 16.0  # γH of a step of a Nystrom method: beyond 32 its decay hides its error, and any answer passes
BESIDE_JUMP = 4.0  # how far from a jump its two sides are, in roundings of the largest time

FIELD_NOT_FINITE = (
    "the field returned non-finite values. Look for: log, sqrt or a division in func, or growth without bound "
    "(GHBNODE's activation bounds it)"
)


@dataclass
class Attempt:
    """A step, beside the state in which it starts; on a grid, several equal ones.

    Attributes:
        size: signed: an array (), or (lanes,); a tensor where gradients flow to the times, or where a graph is traced.
        times: those of the evaluations, for each step.
        begin: where it begins, from the start of the solve.
        error: whether to estimate the error.
        lanes: the lane of each output inside of the step; None if all lanes reach their outputs together.
        outputs: which output times these are; None if there are none.
        theta: where in the step they lie; None if all lie at its end.
        number: of its first step, counted from the start of a grid.
    """

    size: Any
    times: list[Sequence[Tensor]]
    begin: Any
    error: bool = True
    lanes: Any = None
    outputs: Any = None
    theta: Any = None
    number: int = 0


class PIController:
    r"""The factor by which the next step is longer, from the error ratios of the steps before.

    A ratio is the norm of (error / tolerance). With q the order of the embedded solution, an accepted step is followed
    by one of :math:`H \cdot 0.9\, r_n^{-1/(q+1)} r_{n-1}^{0.2/(q+1)}` (Gustafsson's PI control), a rejected one by
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)}`, and the step after a rejection is not enlarged.

    ``like`` is an array of the shape of the ratios.
    """

    def __init__(self, error_order: int, like: Array) -> None:
        self.exponent = 1.0 / (error_order + 1)
        self.previous, self.rejected = np.ones_like(like), np.zeros_like(like, bool)
        self.failures = np.zeros_like(like)  # attempts in a row whose error was not finite

    def factor(self, ratio: Array, accepted: Array) -> Array:
        finite = np.isfinite(ratio)
        self.failures = np.where(finite, 0, self.failures + 1)
        plain = SAFETY * np.maximum(ratio, 1e-10) ** -self.exponent
        up = np.minimum(plain * self.previous ** (PROPORTIONAL * self.exponent), np.where(self.rejected, 1.0, LARGEST))
        down = np.where(finite, np.minimum(plain, SAFETY), SMALLEST)
        self.previous = np.where(accepted, np.maximum(ratio, 1e-4), self.previous)
        self.rejected = ~accepted
        return np.maximum(np.where(accepted, up, down), SMALLEST)


def first_size(h: Array, f: Array, rtol: float, atol: float, rows: int, error_order: int) -> Array:
    r"""Return the size of the first step, without an evaluation of its own.

    The ball is taken to oscillate about 0 with the frequency :math:`\omega = (\|f\| / \|h\|)^{1/2}`, a first-order
    state to decay at the rate :math:`\omega = \|f\| / \|y\|`, so that a step H has an error of about
    :math:`(\omega H / 2)^{q+1} \|h\|`.

    ``h`` and ``f`` are the norms of the position or the state, and of the field's value; ``rows`` is 2 for the ball.
    """
    tolerance = atol + rtol * h
    rate = (f / (h + tolerance)) ** (1.0 / rows)
    return 2.0 * (tolerance / (h + tolerance)) ** (1.0 / (error_order + 1)) / (rate + 1e-12)


class AdaptiveSteps:
    """Steps chosen by their error: PI control, no probe at the start, equal steps to the next stop.

    An error estimate knows f at the nodes of its step only. From rest, a force that is zero there would be stepped over
    at any tolerance. So, if f depends on time,

    - where the first guess rests on nothing, f is evaluated at four times of the span, where the solve starts;
    - where a solve starts at rest, or these evaluations find a force, it starts with steps that the force moves by no
      more than the tolerance, no later step has more than a sixth of the span between two of its nodes, and errors must
      be smaller than the tolerance by the factor ``inside`` of the method;
    - the first of several steps is no rational fraction of what is left, so its nodes share no harmonic with it.
    """

    @np.errstate(all="ignore")
    def __init__(self, problem: Any, state: tuple[Tensor, ...]) -> None:
        self.problem, p, s = problem, problem, problem.settings
        norm = p.norms(state)
        if not np.isfinite(norm).all():
            raise p.start_not_finite(norm)
        h, f = norm[0], norm[-1]
        if p.common:
            h, f = self._in_common(h), self._in_common(f)
        size = first_size(h, f, s.rtol, s.atol, p.method.rows, p.method.error_order)
        size = np.where(np.isfinite(size), size, p.end)
        self.longest, self.error_factor = np.full_like(h, p.longest_step), np.ones_like(h)
        if p.term.time_dependent:
            size = self._cautious(state[0].detach(), h, f, size)
        if s.options and s.options.get("first_step"):
            size = np.full_like(h, s.options["first_step"])
        self.size = np.minimum(size, self.longest)
        if p.common:
            self.size, self.longest = self._least_fraction(self.size), self._least_fraction(self.longest)
        self.control = PIController(p.method.error_order, h)
        self.now = self.taken = self.left = self.stop = self.look = np.zeros_like(h)
        self.uneven, self.attempts = np.full_like(h, p.term.time_dependent, bool), 0
        most = 0 if s.jump_times else max(int(0.999 / p.method.widest_gap) - 1, 0)
        self.most_jumps = np.full_like(h, most, int)
        self.jumps_passed = np.zeros_like(self.most_jumps)

    def _in_common(self, x: Array) -> Array:
        """Return the root mean square over the lanes that move, which take a common step."""
        moving = self.problem.end > 0
        return np.full_like(x, np.sqrt((x[moving] ** 2).mean())) if moving.any() else x

    def _least_fraction(self, size: Array) -> Array:
        """Sizes that are the same fraction of the span for all lanes, at most as long as these."""
        end = self.problem.end
        moving = end > 0
        return np.where(moving, end * (size[moving] / end[moving]).min(initial=np.inf), size)

    def _cautious(self, x: Tensor, h: Array, f: Array, size: Array) -> Array:
        """Return the first step size for a force that depends on time; set the longest step and the error factor."""
        p, s = self.problem, self.problem.settings
        tolerance, span = s.atol + s.rtol * h, p.end
        time = span**p.method.rows  # a force times this is what it moves the state by, but for a constant
        is_negligible = f * time <= NEGLIGIBLE * tolerance
        is_forced = (h <= NEGLIGIBLE * s.atol) & ~is_negligible
        if (is_negligible & (span > 0)).any():
            with torch.no_grad():
                values = tuple([p.term(p.stages([p.time(c * span)])[0], x) for c in PROBES])
            found = p.norms(values).max(0)
            is_found = is_negligible & (found * time > VISIBLE * tolerance)
            size = np.where(is_found, np.minimum(size, 2.0 * np.sqrt(tolerance / found)), size)
            is_forced |= is_found
        longest = span * (LONGEST_GAP / p.method.widest_gap)
        self.longest = np.where(is_forced, np.minimum(self.longest, longest), self.longest)
        self.error_factor = np.where(is_forced, p.method.dense_error_factor, 1.0)
        return size

    @np.errstate(all="ignore")
    def next(self) -> Attempt | None:
        """Return the next step; None at the end."""
        p, now = self.problem, self.now
        if (now >= p.end).all():
            return None
        self._check_limits()
        stop = p.end
        if p.jumps is not None or p.settings.save == "exact":
            stop = self._next_stop()
        left = np.maximum(np.ceil((stop - now) / self.size - 0.05), 1.0)
        is_under_way = (left == self.left - 1.0) & (stop == self.stop)  # equal steps stay as they are
        if not is_under_way.all():
            self.taken = np.where(is_under_way, self.taken, (stop - now) / left)
        self.stop, self.left = stop, left
        if self.uneven.any():
            uneven = self.uneven & (left > 1.0)
            self.taken = np.where(uneven, UNEVEN * self.taken, self.taken)
            self.left = np.where(uneven, np.inf, left)
        self.then = np.where(self.left == 1.0, stop, now + self.taken)
        times: Sequence[Tensor] = p.no_times
        if p.t is not None:
            begin, end = p.differentiable(now), p.differentiable(self.then, at_rest=1.0)
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
        """Return the step in which lanes that refuse it, because it is not finite, rest where they are."""
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

    def _next_stop(self) -> Array:
        """Return where a step must end next: at the end, on an output with ``save="exact"``, or on a jump.

        A step may pass as many jumps as leave a node between any two, and fewer after a rejection.
        """
        p, now, stop = self.problem, self.now, self.problem.end
        if p.settings.save == "exact":
            stop = np.where(p.outputs > now[..., None], p.outputs, stop[..., None]).min(-1)
        if p.jumps is None:
            return stop
        rounding = np.finfo(float).eps * p.furthest  # less than there is between the two sides of a jump
        first = (p.jumps <= (now + rounding)[..., None]).sum(-1)
        last = (p.jumps <= (now + 1.05 * self.size)[..., None]).sum(-1)
        last = np.minimum(np.clip(last, first + 1, first + 1 + self.most_jumps), p.jumps.shape[-1])
        self.jumps_passed = np.maximum(last - first - 1, 0)
        jump = np.take_along_axis(p.jumps, np.maximum(last - 1, 0)[..., None], -1)[..., 0]
        return np.where(jump > now, np.minimum(jump, stop), stop)

    def _find_outputs(self, attempt: Attempt) -> None:
        p, now, then = self.problem, self.now, self.then
        found = (p.outputs > now[..., None]) & (p.outputs <= then[..., None])
        *lanes, which = np.nonzero(found)
        if not len(which):
            return
        attempt.outputs, attempt.lanes = which, lanes[0] if lanes else np.zeros_like(which)
        if lanes:
            begin, end, size = now[lanes[0]], then[lanes[0]], self.taken[lanes[0]]
        else:
            begin, end, size = now, then, self.taken
        index = (*lanes, which)
        t = p.outputs[index]
        theta = np.where(t == end, 1.0, (t - begin) / size)
        if (theta != 1.0).any():
            attempt.theta = theta

    @np.errstate(all="ignore")
    def accept(self, attempt: Attempt, before: tuple[Tensor, ...], after: tuple[Tensor, ...], error: Tensor) -> Array:
        """Which lanes accept the step; chooses the next one, and stops a solve that cannot go on."""
        p, now = self.problem, self.now
        margin = self.error_factor
        if attempt.theta is not None and p.method.dense_error_factor != 1.0:
            margin = self._margin(attempt)
        ratio = p.ratio(before, after, error) * margin
        if p.common:
            ratio = self._in_common(ratio)
        accepted, moving = np.asarray(ratio <= 1.0), self.taken > 0
        size = self.taken * self.control.factor(ratio, accepted)
        is_cut = accepted & (self.taken < 0.5 * self.size)  # by a stop: it says little of the steps after it
        size = np.where(is_cut, np.maximum(size, self.size), size)
        self.size = np.where(moving, np.minimum(size, self.longest), self.size)
        self.now = np.where(accepted, self.then, now)
        if p.jumps is not None:
            fewer = np.maximum(np.minimum(self.most_jumps, self.jumps_passed - 1), 0)
            self.most_jumps = np.where(accepted, self.most_jumps, fewer)
        moved = bool((accepted & moving).any())
        self.uneven = self.uneven & ~accepted
        p.tally.add("accepted" if moved else "rejected")
        if open_records:
            p.tally.report(p.time(now), self.taken, accepted)
        if not accepted.all():
            self._check_progress(attempt, before, accepted | ~moving)
        return accepted

    def _margin(self, attempt: Attempt) -> Array:
        """By which factor the error must be smaller than the tolerance, where there are outputs inside of a step."""
        inside = np.zeros_like(self.now, bool)
        if inside.ndim:
            inside[attempt.lanes[attempt.theta != 1.0]] = True
        else:
            inside = np.asarray(True)
        return np.where(inside, self.problem.method.dense_error_factor, self.error_factor)

    def _check_progress(self, attempt: Attempt, before: tuple[Tensor, ...], fine: Array) -> None:
        """After a rejection: raise where the error is not finite, or no step is small enough."""
        p, failures = self.problem, self.control.failures
        now = p.time(self.now)
        floor = np.maximum(4 * p.resolution * abs(now), max((p.settings.options or {}).get("min_step", 0.0), 1e-300))
        small = ~fine & (self.size < floor)
        stuck = ~fine & ((failures >= NON_FINITE_ATTEMPTS) | (small & (failures > 0)))
        if stuck.any():
            raise p.not_finite(attempt, before, first_index(stuck))
        if small.any():
            lane = first_index(small)
            raise p.failure(
                StepSizeUnderflowError,
                "the step size underflowed: no step is small enough for the tolerance. "
                "Fix: loosen rtol and atol, use float64, or look for a discontinuity or stiffness in func",
                now[lane],
                self.size[lane],
            )

    def _check_limits(self) -> None:
        """Before a step: raise if the solve has run away."""
        p, most = self.problem, self.problem.settings.max_steps
        if p.max_nfe is not None:
            p.check_nfe(p.time(self.now), self.size, 1)
        self.attempts += 1
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
        before, self.look = self.look, self.taken
        stuck = (self.taken < GROWTH * before) & (self.taken > DECAY * before) & (self.now < p.end)
        needed = np.where(stuck, (p.end - self.now) / self.taken, 0.0).max()
        if needed > TOO_MANY * p.settings.max_steps:
            raise p.failure(
                MaxStepsError,
                f"after {self.attempts} steps, which do not grow, about {needed:.1g} are left, far more than "
                f"max_steps={p.settings.max_steps}. Fix: {p.advice()}divide t by a typical gap or period, so that f "
                "acts over about one unit of time, or loosen rtol and atol, or raise max_steps",
                p.time(self.now),
                self.taken,
            )


def first_index(marks: Array) -> Any:
    """Return the index of the first mark, of an array of any number of dimensions."""
    return tuple(int(i[0]) for i in np.nonzero(marks)) if marks.ndim else ()
