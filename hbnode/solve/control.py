"""Step size control by pure functions of NumPy arrays or torch tensors.

An attempt is a step that is then accepted or rejected. :class:`Control` holds the arrays that change from one attempt
to the next. Their shape is () if the whole batch shares its steps, or (batch,) if samples have different steps. Times
are measured from the start of the solve. The argument ``xp`` is NumPy for a loop in Python, or :class:`OfTorch` inside
a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hbnode.solve.methods import Array, Method

SAFETY = 0.9
SMALLEST, LARGEST = 0.1, 8.0  # factors by which the step size may change
PROPORTIONAL = 0.2
GOLDEN = (5**0.5 - 1) / 2
TRIALS = tuple(sorted(k * GOLDEN % 1 for k in range(1, 5)))  # trial times as fractions of the time span of the solve
UNEVEN = 0.9 + 0.1 * GOLDEN  # the first of several equal steps is shorter by this factor
NEGLIGIBLE, VISIBLE = 10.0, 0.01  # displacements of the state over the time span, in units of the tolerance
LONGEST_GAP = 1 / 6  # largest gap between two evaluation times of a step, as a fraction of the time span
AHEAD = 1.05  # a step may end on a jump that is at most this many step sizes away


class OfTorch:
    """A namespace like NumPy, with the functions that a controller calls, for torch tensors instead of arrays."""

    where, ceil, isfinite, zeros_like, ones_like, cumsum, amin, amax = (
        *(torch.where, torch.ceil, torch.isfinite, torch.zeros_like),
        *(torch.ones_like, torch.cumsum, torch.amin, torch.amax),
    )

    @staticmethod
    def minimum(x: Tensor, y: Any) -> Tensor:
        return x.clamp(max=y)

    @staticmethod
    def maximum(x: Tensor, y: Any) -> Tensor:
        return x.clamp(min=y)


class Control(NamedTuple):
    """The state of a step size controller.

    Attributes:
        now: the time that the solve has reached.
        size: the next step size that the error of the last step allows.
        taken: the size of the last planned step, at most about ``size``; equal steps of this size reach ``target``.
        left: the number of steps of size ``taken`` to ``target``, including the planned step; inf if that step was
            uneven.
        target: the next time on which a step must end.
        uneven: whether the first of the next equal steps is shorter by the factor :data:`UNEVEN`.
        previous: the error ratio, error / tolerance, of the last accepted step.
        rejected: whether the last attempt was rejected.
        failures: the number of consecutive attempts whose error was not finite.
        most: the largest number of jumps of f that the next step may contain.
        passed: the number of jumps that the last planned step contained.
    """

    now: Array
    size: Array
    taken: Array
    left: Array
    target: Array
    uneven: Array
    previous: Array
    rejected: Array
    failures: Array
    most: Array
    passed: Array


@dataclass(frozen=True)
class Clip:
    """The times on which steps must end: the final time, the times in ``stops``, and the jumps of f in ``jumps``.

    A step may contain several jumps if the method evaluates f between any two of them. After a rejection, the next step
    contains fewer.

    Attributes:
        end: final times, () or (batch,).
        stops: times on which steps end, (T,) or (batch, T), padded with the final time; None if there are none.
        jumps: sorted times of jumps, (K,) or (batch, K), padded with inf; None if there are none.
        rounding: the rounding error of times. A step ends before or after a jump, at a larger distance than this error.
    """

    end: Array
    stops: Array = None
    jumps: Array = None
    rounding: float = 0.0

    def target(self, xp: Any, c: Control) -> tuple[Array, Array]:
        """Return the next time on which a step must end, and the number of jumps of f between now and then.

        ``xp`` is NumPy or :class:`OfTorch`, and ``c`` the state of the controller.
        """
        target, now, jumps = self.end, c.now, self.jumps
        if self.stops is not None:
            target = xp.minimum(xp.amin(xp.where(self.stops > now[..., None], self.stops, math.inf), -1), target)
        if jumps is None:
            return target, c.passed
        first = (jumps <= (now + self.rounding)[..., None]).sum(-1)
        last = (jumps <= (now + AHEAD * c.size)[..., None]).sum(-1)
        last = xp.maximum(xp.minimum(last, first + 1 + c.most), first + 1)
        number = xp.cumsum(xp.ones_like(jumps), -1)  # the number of each jump, counted from 1
        jump = xp.amax(xp.where(number <= last[..., None], jumps, -math.inf), -1)
        return xp.where((jump > now) & (jump < target), jump, target), last - first - 1


@dataclass(frozen=True)
class PIController:
    r"""A controller that chooses the next step size from the error ratios of the last two steps.

    The error ratio :math:`r_n` of step n is the norm of (error / tolerance). Let H be the size of the step, and
    q = ``error_order`` the order of the embedded solution. After an accepted step the next size is
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)} r_{n-1}^{0.2/(q+1)}` (Gustafsson's PI control). After a rejected step it is
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)}`. The step after a rejection is not enlarged.

    Attributes:
        error_order: the order q of the embedded solution.
        longest: the largest allowed step size.
    """

    error_order: int
    longest: Array = math.inf

    def start(self, xp: Any, size: Array, uneven: Array, most: Array) -> Control:
        """Return the state of the controller at the start, given three entries of :class:`Control`."""
        zero = xp.zeros_like(size)
        none = zero < 0.0
        return Control(zero, size, zero, zero, zero, uneven, zero + 1.0, none, zero, most, 0 * most)

    def plan(self, xp: Any, clip: Clip, c: Control) -> tuple[Array, Control]:
        """Return the time at which the next step ends, and the state of the controller with the step's size ``taken``.

        The step ends on the next time that ``clip`` requires, or earlier. ``c`` is the state of the controller before
        the step. The size is 0 for samples that have reached the final time.
        """
        target, passed = clip.target(xp, c)
        left = xp.maximum(xp.ceil((target - c.now) / c.size - 0.05), 1.0)
        is_under_way = (left == c.left - 1.0) & (target == c.target)  # equal steps keep their size
        taken = xp.where(is_under_way, c.taken, (target - c.now) / left)
        uneven = c.uneven & (left > 1.0)
        taken, left = xp.where(uneven, UNEVEN * taken, taken), xp.where(uneven, math.inf, left)
        then = xp.where(left == 1.0, target, c.now + taken)
        return then, c._replace(taken=taken, left=left, target=target, passed=passed)

    def judge(
        self, xp: Any, c: Control, then: Array, ratio: Array, repeats: Array | None = None
    ) -> tuple[Array, Control]:
        """Return a mask of the samples that accept the step, and the state of the controller after it.

        Arguments:
            xp: NumPy or :class:`OfTorch`.
            c: the state of the controller.
            then: the time at which the step ends.
            ratio: the error ratio, inf if it is not finite.
            repeats: a mask of samples that repeat the step although its error is small enough, or None.
        """
        accepted, is_finite, is_new = ratio <= 1.0, xp.isfinite(ratio), c.taken > 0.0
        k = 1.0 / (self.error_order + 1)
        plain = SAFETY * xp.maximum(ratio, 1e-10) ** -k
        up = xp.minimum(plain * c.previous ** (PROPORTIONAL * k), xp.where(c.rejected, 1.0, LARGEST))
        down = xp.where(is_finite, xp.minimum(plain, SAFETY), SMALLEST)
        size = c.taken * xp.maximum(xp.where(accepted, up, down), SMALLEST)
        is_cut = accepted & (c.taken < 0.5 * c.size)  # cut short to end on its target, so its error may be tiny
        size = xp.minimum(xp.where(is_cut, xp.maximum(size, c.size), size), self.longest)
        previous, rejected = xp.where(accepted, xp.maximum(ratio, 1e-4), c.previous), ~accepted
        if repeats is not None:
            accepted, is_new = accepted & ~repeats, is_new & ~repeats
        after = c._replace(
            now=xp.where(accepted, then, c.now),
            size=xp.where(is_new, size, c.size),
            uneven=c.uneven & ~accepted,
            previous=previous,
            rejected=rejected,
            failures=xp.where(is_finite, 0.0, c.failures + 1.0),
            most=xp.where(accepted, c.most, xp.maximum(c.passed - 1, 0)),
        )
        return accepted, after


def first_size(h: Array, f: Array, rtol: float, atol: float, rows: int, error_order: int) -> Array:
    r"""Return the initial step size H, without further function evaluations.

    A second-order equation is modelled as an oscillation about 0 with frequency
    :math:`\omega = (\|f\| / \|h\|)^{1/2}`, and a first-order equation as a decay with rate
    :math:`\omega = \|f\| / \|h\|`. The error of a step of size H is then about :math:`(\omega H / 2)^{q+1} \|h\|`, with
    q = ``error_order``. The step size is the H for which this error equals the tolerance.

    ``h`` is the norm of the position (or of the first-order state), and ``f`` the norm of f. ``rows`` is the order of
    the ODE, 1 or 2.
    """
    tolerance = atol + rtol * h
    rate = (f / (h + tolerance)) ** (1.0 / rows)
    return 2.0 * (tolerance / (h + tolerance)) ** (1.0 / (error_order + 1)) / (rate + 1e-12)


def is_negligible(h: Array, f: Array, end: Array, rtol: float, atol: float, method: Method) -> Array:
    """Return whether a constant f would move the state by less than ten tolerances over the time span ``end``.

    ``h`` is the norm of the position (or of the first-order state), and ``f`` the norm of f, each () or (batch,).
    """
    return f * end**method.rows <= NEGLIGIBLE * (atol + rtol * h)


def forced_start(
    xp: Any, h: Array, f: Array, found: Array, end: Array, rtol: float, atol: float, method: Method, size: Array,
    longest: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the first step size, the largest step size and the error factor for a force f that depends on time.

    A method evaluates f only at the nodes of a step, that is, at a few times. If the state is zero, the error estimate
    would miss a force that is zero at these times. Therefore:

    - If f is negligible at the start, the caller evaluates f with the initial state at the times :data:`TRIALS`.
      ``found`` is the largest norm of these values. It is 0 if f is not negligible at the start.
    - If the initial state is zero or ``found`` is not negligible, the largest step size is limited, so that the nodes
      are at most a sixth of the time span apart. The error ratio is then multiplied by the method's
      ``dense_error_factor``.
    - If ``found`` is not negligible, the first step is so short that f moves the state by about the tolerance.
    """
    tolerance, negligible = atol + rtol * h, is_negligible(h, f, end, rtol, atol, method)
    is_found = negligible & (found * end**method.rows > VISIBLE * tolerance)
    shorter = 2.0 * (tolerance / xp.where(is_found, found, 1.0)) ** 0.5
    size = xp.where(is_found & (shorter < size), shorter, size)
    is_forced = is_found | ((h <= NEGLIGIBLE * atol) & ~negligible)
    gap = end * (LONGEST_GAP / method.widest_gap)
    longest = xp.where(is_forced & (gap < longest), gap, longest)
    return size, longest, xp.where(is_forced, method.dense_error_factor, xp.ones_like(h))
