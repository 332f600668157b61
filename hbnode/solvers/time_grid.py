"""Output times, and steps whose ends are fractions of the intervals between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hbnode import _torch_internals
from hbnode.solvers.ode_term import ODETerm

_NAMES = ("interval", "start", "size")


@dataclass
class Step:
    """A step of the whole batch, as far as it is needed to take it again.

    Attributes:
        interval: which interval between output times it lies in.
        start: where it starts, as a fraction of the interval.
        size: its size, as a fraction of the interval.
        reached: the output that it ends on, if any.
        end: of a step that passes output times: the interval in which it ends, and the fraction of it;
        length: its size in time,
        outputs: the outputs inside of it, and
        blend: the coefficients that interpolate them, (outputs, state rows, columns, ...).
        random: state of the random number generators before the step, if the field draws from them.
        whole: the interval of which it is the whole, where coefficients are computed for many intervals at once.
    """

    interval: int
    start: float
    size: float
    reached: int | None = None
    end: tuple[int, float] | None = None
    length: float | None = None
    outputs: range = range(0)
    blend: Tensor | None = None
    random: tuple[Tensor, ...] | None = None
    whole: int | None = None


@dataclass
class SampleStep:
    """A step of its own for each sample; ``interval``, ``start`` and ``size`` are (batch,), the rest as in a Step.

    Attributes:
        accepted: which samples move.
        reached: which samples end on an output time.
    """

    interval: Tensor
    start: Tensor
    size: Tensor
    whole: int | None = None
    random: tuple[Tensor, ...] | None = None
    accepted: Tensor = field(init=False, repr=False)
    reached: Tensor = field(init=False, repr=False)

    outputs: ClassVar[range] = range(0)
    end: ClassVar[None] = None
    length: ClassVar[None] = None
    blend: ClassVar[None] = None


AnyStep = Step | SampleStep


class TimeGrid:
    """Turns steps into step sizes and times of stages.

    Arguments:
        t: times (T,), or (batch, T) for a time of its own for each sample; on the host.
        dynamics: whose rows the step sizes broadcast with.
        per_sample: whether every sample has steps of its own.
    """

    def __init__(self, t: Tensor, term: ODETerm, *, per_sample: bool) -> None:
        self.template = term.template
        self.row_dims = term.template.dim() + (1 if term.stacked else 0)
        self.shared = t.dim() == 1
        self.per_sample = per_sample
        self.t = t.to(self.template.device if self.has_batch else "cpu", torch.float64)
        grid = _torch_internals.plain(t).to(torch.float64)
        self.times: list[float] = [] if self.has_batch else _torch_internals.numbers(grid)
        self.elapsed: list[float] = _torch_internals.numbers((grid - grid[0]).abs()) if self.times else []
        self.furthest = float(grid.abs().max()) if grid.numel() else 0.0
        spans = grid.diff().abs()
        self.lengths = (
            _torch_internals.numbers(spans.reshape(-1, self.count).amax(0)) if spans.numel() else [0.0] * self.count
        )

    @property
    def count(self) -> int:
        """Of intervals."""
        return self.t.shape[-1] - 1

    def time_of(self, output: int) -> Tensor:
        """An output time, to broadcast with a part of the state."""
        if not self.has_batch:
            return self.t[output].to(self.template, copy=True)  # f may change what it is given
        if self.shared:
            return self.for_parts(self.t[output : output + 1]).to(self.template)
        return self.for_parts(self.t[:, output]).to(self.template)

    def between(self, first: int, last: int, fraction: float) -> Tensor:
        """A time between two output times, to broadcast with a part of the state."""
        time = torch.lerp(self.t[..., first], self.t[..., last], fraction).detach()
        if not self.has_batch:
            return time.to(self.template)
        return self.for_parts(time.reshape(-1)).to(self.template)

    def size(self, step: AnyStep) -> float | None:
        """Size of a step, if it is one number for all samples."""
        if not self.times or isinstance(step, SampleStep):
            return None
        if step.length is not None:
            return step.length if self.times[-1] > self.times[0] else -step.length
        return step.size * (self.times[step.interval + 1] - self.times[step.interval])

    def stages(self, step: Step, nodes: Sequence[float]) -> Tensor:
        """Times of a step's stages, if they are numbers for all samples."""
        begin, end = self.times[step.interval : step.interval + 2]
        if step.end is None:
            fractions: Sequence[float] = [min(step.start + c * step.size, 1.0) for c in nodes]
        else:
            begin, end = self._at(step.interval, step.start), self._at(*step.end)
            fractions = nodes
        times = [begin * (1.0 - fraction) + end * fraction for fraction in fractions]  # the end exactly at 1
        return torch.tensor(times, dtype=self.template.dtype, device=self.template.device)

    def _at(self, interval: int, fraction: float) -> float:
        return self.times[interval] * (1.0 - fraction) + self.times[interval + 1] * fraction

    def affine(
        self,
        t: Tensor,
        interval: Tensor | int,
        start: Tensor | float,
        size: Tensor | float,
        nodes: Sequence[float],
        end: tuple[Tensor | int, Tensor | float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sizes (...) and stage times (stages, ...) of steps, differentiable in ``t``.

        (...) is the shape of ``interval``, () for one step and (steps,) for many; where samples have steps or times of
        their own it is followed by (batch,).
        """
        if self.shared:
            first, last = t[interval], t[interval + 1]
        elif self.per_sample:
            assert isinstance(interval, Tensor)
            index = interval.reshape(-1, len(t))
            first, last = (t.T.gather(0, i).view(interval.shape) for i in (index, index + 1))
        else:
            first, last = t[:, interval].movedim(0, -1), t[:, interval + 1].movedim(0, -1)
            if isinstance(start, Tensor) and isinstance(size, Tensor):
                start, size = start.unsqueeze(-1), size.unsqueeze(-1)
        length = last - first
        c = torch.tensor(nodes, dtype=torch.float64, device=t.device).view(-1, *[1] * length.dim())
        if end is None:
            fractions = (start + c * size).clamp(max=1.0)
            return size * length, first * (1.0 - fractions) + last * fractions
        begin = first * (1.0 - start) + last * start
        ahead, fraction = end
        stop = t[ahead] * (1.0 - fraction) + t[ahead + 1] * fraction
        return stop - begin, begin * (1.0 - c) + stop * c

    def affine_of(self, t: Tensor, steps: Sequence[AnyStep], nodes: Sequence[float]) -> tuple[Tensor, Tensor]:
        """:meth:`affine` for many steps, which all pass output times or none of which does."""
        interval, start, size = (_stacked([getattr(s, name) for s in steps], t) for name in _NAMES)
        if steps[0].end is None:
            return self.affine(t, interval.long(), start, size, nodes)
        ahead, fraction = (_stacked(column, t) for column in zip(*(s.end or () for s in steps), strict=True))
        return self.affine(t, interval.long(), start, size, nodes, (ahead.long(), fraction))

    @property
    def batch_dim(self) -> int:
        """The dimension of the batch in a row."""
        return self.row_dims - self.template.dim()

    @property
    def has_batch(self) -> bool:
        """Whether step sizes have a batch dimension."""
        return self.per_sample or not self.shared

    def for_rows(self, x: Tensor) -> Tensor:
        """Step sizes (...) or (..., batch), to broadcast with a row of the state."""
        return spread(x, self.template.dim(), self.row_dims) if self.has_batch else x

    def for_parts(self, x: Tensor) -> Tensor:
        """Times (...) or (..., batch), to broadcast with a part of the state."""
        return spread(x, self.template.dim(), self.template.dim()) if self.has_batch else x

    def inside(self, t: Tensor, steps: Sequence[AnyStep]) -> tuple[Tensor, Tensor]:
        """Of all outputs inside of steps: the sizes of their steps, and the fractions at which they lie in them."""
        sizes, (begins,) = self.affine_of(t, steps, (0.0,))
        counts = torch.tensor([len(step.outputs) for step in steps], device=t.device)
        outputs = torch.tensor([i for step in steps for i in step.outputs], device=t.device)
        sizes, begins = sizes.repeat_interleave(counts), begins.repeat_interleave(counts)
        return sizes, (t[outputs] - begins) / sizes


def _stacked(values: Sequence[Any], t: Tensor) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values)).to(t.device)
    return torch.tensor(values, dtype=torch.float64, device=t.device)


def spread(x: Tensor, part_dims: int, dims: int) -> Tensor:
    """(..., batch) -> (..., 1, batch, 1, ...): the batch is the first dimension of a part of so many dimensions."""
    return x.view(*x.shape[:-1], *[1] * (dims - part_dims), x.shape[-1], *[1] * (part_dims - 1))


def along_batch(marks: Tensor, point: Tensor, batch_dim: int) -> Tensor:
    """Marks (batch,), to broadcast with a point (rows, ...) whose rows have the batch at a dimension."""
    return marks.view(*[1] * (batch_dim + 1), -1, *[1] * (point.dim() - batch_dim - 2))


def align(sizes: Tensor, damping: Tensor) -> Tensor:
    """Step sizes (steps, ...) with the dimensions that a damping for each channel needs behind the first."""
    missing = damping.dim() - (sizes.dim() - 1)
    return sizes.view(len(sizes), *[1] * missing, *sizes.shape[1:]) if missing > 0 else sizes
