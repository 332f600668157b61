"""Step size control by pure functions, on arrays of NumPy or tensors of torch.

What changes from one attempt to the next is a :class:`Control`, a tuple of arrays. Their shape is () if one step size
serves the whole batch, and (lanes,) if every sample, a lane, has its own. Times are measured from the start of the
solve. ``xp`` is NumPy on the host, for a loop in Python, or :class:`OfTorch` inside a graph.
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
TRIALS = tuple(sorted(k * GOLDEN % 1 for k in range(1, 5)))  # fractions of the span; no harmonic is 0 at all four
UNEVEN = 0.9 + 0.1 * GOLDEN  # the first of several equal steps is shorter by this factor
NEGLIGIBLE, VISIBLE = 10.0, 0.01  # displacements over the span, in units of the tolerance
LONGEST_GAP = 1 / 6  # largest gap between two nodes of a step, as a fraction of the span
AHEAD = 1.05  # a step may end on a jump that is that many step sizes away


class OfTorch:
    """The functions of NumPy that a controller calls, for tensors of torch."""

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
    """The state of a controller.

    Attributes:
        now: the time that a lane has reached.
        size: the size of the next step by the error of the last one.
        taken: the size of the last planned step, which is at most ``size`` and divides the time to ``target`` equally.
        left: how many steps of the size ``taken`` were left to ``target``; inf if the planned one was not equal.
        target: the time on which the last of them ends.
        uneven: whether the next of several equal steps shall be shorter, so that its nodes miss no harmonic.
        previous: error over tolerance of the last accepted step.
        rejected: whether the last attempt was rejected.
        failures: how many attempts in a row had an error that was not finite.
        most: how many jumps the next step may contain.
        passed: how many the last planned one contained.
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
    """The times on which steps must end: the final time, and those of ``stops`` and ``jumps``.

    A step may contain jumps of f if at least one of its nodes is between any two of them; after a rejection, fewer.

    Attributes:
        end: final times.
        stops: times on which steps end, (T,) or (lanes, T), padded by the end; None if there are none.
        jumps: sorted times of jumps, padded by inf, (K,) or (lanes, K); None if there are none.
        rounding: the rounding error of times, which is less than the distance between the two sides of a jump.
    """

    end: Array
    stops: Array = None
    jumps: Array = None
    rounding: float = 0.0

    def target(self, xp: Any, c: Control) -> tuple[Array, Array]:
        """Return the time that the next steps must end on, and the number of jumps that such a step contains."""
        target, now, jumps = self.end, c.now, self.jumps
        if self.stops is not None:
            target = xp.minimum(xp.amin(xp.where(self.stops > now[..., None], self.stops, math.inf), -1), target)
        if jumps is None:
            return target, c.passed
        first = (jumps <= (now + self.rounding)[..., None]).sum(-1)
        last = (jumps <= (now + AHEAD * c.size)[..., None]).sum(-1)
        last = xp.maximum(xp.minimum(last, first + 1 + c.most), first + 1)
        number = xp.cumsum(xp.ones_like(jumps), -1)  # of each jump, from 1
        jump = xp.amax(xp.where(number <= last[..., None], jumps, -math.inf), -1)
        return xp.where((jump > now) & (jump < target), jump, target), last - first - 1


@dataclass(frozen=True)
class PIController:
    r"""A controller that chooses the next step size from the error ratios of the last two steps.

    The ratio :math:`r_n` of step n is the norm of (error / tolerance), H its size, and q = ``error_order`` the order
    of the embedded solution. After an accepted step the next size is
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)} r_{n-1}^{0.2/(q+1)}` (Gustafsson's PI control). After a rejected step it is
    :math:`H \cdot 0.9\, r_n^{-1/(q+1)}`. The step after a rejection is not enlarged.

    Attributes:
        error_order: q.
        longest: the largest step size.
    """

    error_order: int
    longest: Array = math.inf

    def start(self, xp: Any, size: Array, uneven: Array, most: Array) -> Control:
        """Return the first state, for a step size, whether it may be uneven, and how many jumps a step may contain."""
        zero = xp.zeros_like(size)
        none = zero < 0.0
        return Control(zero, size, zero, zero, zero, uneven, zero + 1.0, none, zero, most, 0 * most)

    def plan(self, xp: Any, clip: Clip, c: Control) -> tuple[Array, Control]:
        """Return the time at which the next step ends, and the state with its size ``taken``; 0 in lanes at the end."""
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
        """Return which lanes accept the step that ends at ``then``, and the state after it.

        ``ratio`` is error over tolerance, inf if it is not finite. Lanes of ``repeats`` take an accepted step again.
        """
        accepted, is_finite, is_new = ratio <= 1.0, xp.isfinite(ratio), c.taken > 0.0
        k = 1.0 / (self.error_order + 1)
        plain = SAFETY * xp.maximum(ratio, 1e-10) ** -k
        up = xp.minimum(plain * c.previous ** (PROPORTIONAL * k), xp.where(c.rejected, 1.0, LARGEST))
        down = xp.where(is_finite, xp.minimum(plain, SAFETY), SMALLEST)
        size = c.taken * xp.maximum(xp.where(accepted, up, down), SMALLEST)
        is_cut = accepted & (c.taken < 0.5 * c.size)  # by its target, so its error may be far too small
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

    A second-order equation is modelled as an oscillation about 0 of frequency :math:`\omega = (\|f\| / \|h\|)^{1/2}`,
    and a first-order one as a decay of rate :math:`\omega = \|f\| / \|h\|`. The error of the step is then about
    :math:`(\omega H / 2)^{q+1} \|h\|`, with q = ``error_order``; H makes it equal to the tolerance.

    ``h`` and ``f`` are the norms of the position (or first-order state) and of f. ``rows`` is the order of the ODE.
    """
    tolerance = atol + rtol * h
    rate = (f / (h + tolerance)) ** (1.0 / rows)
    return 2.0 * (tolerance / (h + tolerance)) ** (1.0 / (error_order + 1)) / (rate + 1e-12)


def is_negligible(h: Array, f: Array, end: Array, rtol: float, atol: float, method: Method) -> Array:
    """Return whether a constant force moves the state by less than ten tolerances until the end."""
    return f * end**method.rows <= NEGLIGIBLE * (atol + rtol * h)


def forced_start(
    xp: Any, h: Array, f: Array, found: Array, end: Array, rtol: float, atol: float, method: Method, size: Array,
    longest: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the first size, the longest size and the factor on error ratios for a force that depends on time.

    An error estimate samples f only at the nodes of a step. If the state is zero, it would miss a force that is zero at
    those nodes. Therefore:

    - If f is negligible at the start, it is evaluated at the times :data:`TRIALS`, with the initial state. The largest
      norm is ``found``; it is 0 where f is not negligible.
    - If the initial state is zero, or these evaluations find a force, the nodes of a step are at most a sixth of the
      span apart. Errors must then be below the tolerance by the factor ``dense_error_factor`` of the method. A force
      that was found also shortens the first step, so that it moves the state by about the tolerance.
    """
    tolerance, negligible = atol + rtol * h, is_negligible(h, f, end, rtol, atol, method)
    is_found = negligible & (found * end**method.rows > VISIBLE * tolerance)
    shorter = 2.0 * (tolerance / xp.where(is_found, found, 1.0)) ** 0.5
    size = xp.where(is_found & (shorter < size), shorter, size)
    is_forced = is_found | ((h <= NEGLIGIBLE * atol) & ~negligible)
    gap = end * (LONGEST_GAP / method.widest_gap)
    longest = xp.where(is_forced & (gap < longest), gap, longest)
    return size, longest, xp.where(is_forced, method.dense_error_factor, xp.ones_like(h))
