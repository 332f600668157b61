"""The times of a solve: the start, the output times and the jumps of f.

Times are NumPy arrays on the CPU, measured from the start of the solve. Their shape is () if all samples have the same
times, or (batch,) if samples have different times or steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode.solve.methods import Array

Piece = tuple[int, tuple[Array, Array] | None, int]

BESIDE_JUMP = 4.0  # distance of the times just before and after a jump, in rounding errors of the largest time


@dataclass(frozen=True)
class Grid:
    """The times of a solve.

    Attributes:
        begin: initial time, () or (batch,).
        sign: 1.0 for solving forward in time, -1.0 for solving backward, () or (batch,).
        outputs: output times measured from the start, without the initial time, (T - 1,) or (batch, T - 1).
        end: the last output time, () or (batch,).
        lanes: the number of samples if their steps may differ, else None.
        furthest: the largest absolute time.
        near: distance between a jump and the times just before and just after it. An output time within this distance
            counts as the time of the jump.
        t: the times as a tensor (T,) or (batch, T) on the device of the state if they need gradients; else None.
        jumps: sorted times of the jumps of f, (K,) or (batch, K), padded with inf; None without jumps. For adaptive
            steps and for events, the array has two times per jump, just before and just after it.
        ends_on_knots: whether steps end on every sample time of a signal, because the signal's values need gradients.
    """

    begin: Array
    sign: Array
    outputs: Array
    end: Array
    lanes: int | None
    furthest: float
    near: float
    t: Tensor | None = None
    jumps: Array = None
    ends_on_knots: bool = False

    @classmethod
    def of(cls, t: Tensor, like: Tensor, lanes: int | None) -> Grid:
        """Return the grid for the times ``t``, (T,) or (batch, T); ``like`` has the dtype and device of the state."""
        needs_gradient = t.requires_grad and torch.is_grad_enabled()
        needs_gradient |= _torch.is_transformed() and _torch.has_tangent(t)
        values = _torch.to_numpy(t)
        begin, sign = values[..., 0], np.where(values[..., -1] >= values[..., 0], 1.0, -1.0)
        elapsed = abs(values - begin[..., None])
        if lanes is not None and values.ndim == 1:
            begin, sign = np.broadcast_to(begin, lanes), np.broadcast_to(sign, lanes)
            elapsed = np.broadcast_to(elapsed, (lanes, len(values)))
        furthest = abs(values).max() if values.size else 0.0
        near = BESIDE_JUMP * torch.finfo(like.dtype).eps * max(furthest, 1e-300)
        known = t.to(like.device) if needs_gradient and t.shape[-1] > 1 else None
        return cls(begin, sign, elapsed[..., 1:], elapsed[..., -1], lanes, furthest, near, known)

    def with_jumps(self, times: Sequence[float], knots: Sequence[Array] = (), *, both_sides: bool) -> Grid:
        """Return the grid with jumps of f at ``times`` and at ``knots``.

        Arguments:
            times: jump times in the user's time t.
            knots: jump times measured from the start of the solve, each (K,) or (batch, K).
            both_sides: whether each of ``times`` becomes two times, just before and after the jump, as steps that end
                on jumps need. If False, for fixed steps, jumps within rounding of the start or the end also count.
        """
        sides, slack = ((-self.near, self.near), 0.0) if both_sides else ((0.0,), self.near)
        moved = {jump + side for jump in times for side in sides}
        elapsed = self.sign[..., None] * (np.array(sorted(moved)) - self.begin[..., None])
        elapsed = np.concatenate([elapsed, *knots], -1)
        inside = (elapsed > -slack) & (elapsed <= self.end[..., None] + slack)
        jumps = np.sort(np.where(inside, elapsed, np.inf), -1) if inside.any() else None
        return dataclasses.replace(self, jumps=jumps)

    @property
    def points(self) -> Any:
        """The initial time and the output times, (T,) or (T, batch), not measured from the start."""
        if self.t is not None:
            return self.t.movedim(-1, 0)
        times = np.concatenate([np.zeros_like(self.end)[..., None], self.outputs], -1)
        return np.moveaxis(self.begin[..., None] + self.sign[..., None] * times, -1, 0)

    def time(self, elapsed: Array) -> Array:
        """Return the times t, () or (batch,), for the times ``elapsed`` measured from the start of the solve."""
        return self.begin + self.sign * elapsed

    def pieces(self, counts: Sequence[int]) -> Iterator[Piece]:
        """Divide the output intervals at the jumps of f into pieces; each piece is then divided into equal steps.

        Yield for each piece the index of its interval, its start and end, and its number of steps. The number of steps
        is the entry of the interval in ``counts``. Without jumps, a piece is a whole interval, and None replaces its
        start and end. If a sample has fewer jumps than others, its last pieces have length 0.
        """
        for interval, count in enumerate(counts):
            if self.jumps is None:
                yield interval, None, count
                continue
            begin, end = self.outputs[..., interval - 1] if interval else 0 * self.end, self.outputs[..., interval]
            inside = (self.jumps > (begin + self.near)[..., None]) & (self.jumps < (end - self.near)[..., None])
            cuts = np.sort(np.where(inside, self.jumps, end[..., None]), -1)[..., : inside.sum(-1).max()]
            for part in itertools.pairwise([begin, *np.moveaxis(cuts, -1, 0), end]):
                yield interval, part, count

    def bound(self, elapsed: Array, interval: int) -> Any:
        """Return the time t at which a piece of an output interval starts or ends, () or (batch,).

        If it is an output time, it has a gradient with respect to this output time.

        Arguments:
            elapsed: the time, measured from the start of the solve, () or (batch,).
            interval: the index of the output interval.
        """
        time, points = self.time(elapsed), self.points
        if self.t is None:
            return time
        time = to_device(time, self.t).to(self.t)
        for k in (interval, interval + 1):
            is_output = elapsed == (self.outputs[..., k - 1] if k else 0.0)
            time = torch.where(to_device(is_output, self.t), points[k], time)
        return time

    def is_on_jump(self, elapsed: Array) -> Array:
        return (abs(self.jumps - elapsed[..., None]) <= self.near).any(-1)

    def lag(self, begin: Tensor, elapsed: Array, interval: int) -> Tensor | None:
        """Return zeros, () or (batch,), that have the gradient of ``begin`` for samples with a jump of f at this time.

        The jump does not move with the output time, so the caller subtracts this gradient from later states. The
        result is None if no correction is needed.

        Arguments:
            begin: the time t at which the first piece of an output interval starts.
            elapsed: the same time, measured from the start of the solve.
            interval: the index of the output interval.
        """
        if self.t is None or interval == 0 or not (elapsed == self.outputs[..., interval - 1]).all():
            return None
        return torch.where(to_device(self.is_on_jump(elapsed), self.t), begin - begin.detach(), 0.0)

    def beside_jump(self, elapsed: Array) -> Any:
        """Return the time to add to ``elapsed`` so that f is evaluated just after a jump; 0 if there is no jump.

        It has the shape () or (batch,), and is negative for a solve backwards in time.
        """
        short = np.where(self.is_on_jump(elapsed), self.sign * 2.0 * self.near, 0.0)
        return short if self.t is None else to_device(short, self.t).to(self.t)

    @property
    def stops(self) -> Array:
        """The output times at which steps must end, (T - 1,) or (batch, T - 1).

        If the output times need gradients, an output time at a jump of f does not count: steps end just before and
        after the jump, whose time has no gradient. The array holds the final time in its place.
        """
        if self.t is None or self.jumps is None:
            return self.outputs
        distance = abs(self.jumps[..., None, :] - self.outputs[..., None]).min(-1)
        return np.where(distance <= 2.0 * self.near, self.end[..., None], self.outputs)

    def differentiable(self, elapsed: Array, empty: float = 0.0) -> Tensor:
        """Return the times t for the times ``elapsed`` since the start, with gradients for the output times.

        The time moves with the two output times around it, at a constant fraction of their interval. If they are equal,
        the fraction is ``empty``. Jumps of f are treated as output times without gradients.
        """
        values, known = np.concatenate([np.zeros_like(self.end)[..., None], self.outputs], -1), self.lane_times
        if self.jumps is not None:
            jumps = np.minimum(self.jumps, self.end[..., None])
            fixed = to_device(self.begin[..., None] + self.sign[..., None] * jumps, known)
            values, known = np.concatenate([values, self.jumps], -1), torch.cat([known, fixed.to(known)], -1)
            order = values.argsort(-1, kind="stable")
            values = np.take_along_axis(values, order, -1)
            known = known.gather(-1, to_device(order, known))
        i = np.clip((values <= elapsed[..., None]).sum(-1) - 1, 0, values.shape[-1] - 2)
        i = np.where(elapsed == 0, 0, i)[..., None]  # the first time, even if the next output times equal it
        first, last = (np.take_along_axis(values, i + k, -1)[..., 0] for k in (0, 1))
        with np.errstate(all="ignore"):
            fraction = to_device(np.where(last > first, (elapsed - first) / (last - first), empty), known)
        begin, end = (known.gather(-1, to_device(i + k, known)).squeeze(-1) for k in (0, 1))
        return begin + fraction * (end - begin)

    @property
    def lane_times(self) -> Tensor:
        """The tensor ``t`` of the times, (T,), or (batch, T) if samples may have different steps."""
        if self.t is None:
            raise TypeError("the times of this grid have no gradients")
        return self.t if self.lanes is None or self.t.dim() > 1 else self.t.expand(self.lanes, -1)


@dataclass(frozen=True)
class TracedGrid:
    """The times ``t`` of a solve with fixed steps while torch.compile or torch.export records it.

    It replaces :class:`Grid`, whose methods need the values of the times.
    """

    t: Tensor
    jumps = None

    @property
    def points(self) -> Tensor:
        return self.t.movedim(-1, 0)

    def pieces(self, counts: Sequence[int]) -> Iterator[Piece]:
        for interval, count in enumerate(counts):
            yield interval, None, count


def to_device(x: Array, like: Tensor) -> Tensor:
    """Copy a NumPy array to a tensor on the device of the tensor ``like``."""
    copy = np.array(x, order="C")  # copies arrays without dimensions, too
    return _torch.to_device(torch.from_numpy(copy), like.device)
