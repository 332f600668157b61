"""Output times, and steps as fractions of the intervals between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode import _functorch
from hbnode.solvers.dynamics import Dynamics


@dataclass
class Step:
    """A step of a solve, as far as it is needed to take it again.

    Attributes:
        interval: which interval between output times it lies in; with per-sample steps a tensor (batch,).
        start: where it starts, as a fraction of the interval.
        size: its size, as a fraction of the interval.
        reached: the output that it ends on, if any; per sample: a tensor (batch,) of marks.
        accepted: which samples move; None for all.
        thetas: fractions of the step at which it gives dense output, and
        outputs: which outputs those are.
        random: state of the random number generators before the step, if the field draws from them.
        whole: the interval of which it is the whole, for all samples, where coefficients are made for all at once.
    """

    interval: int | Tensor
    start: float | Tensor
    size: float | Tensor
    reached: int | Tensor | None = None
    accepted: Tensor | None = None
    thetas: tuple[float, ...] = ()
    outputs: range = range(0)
    random: tuple[Tensor, ...] | None = None
    whole: int | None = None


class Clock:
    """Turns steps into step sizes and times of stages.

    Arguments:
        t: times (T,), or (batch, T) for a time of its own for each sample.
        dynamics: whose rows the step sizes broadcast with.
        per_sample: whether every sample has steps of its own.
        dense: whether the only interval is the whole span.
    """

    def __init__(self, t: Tensor, dynamics: Dynamics, *, per_sample: bool, dense: bool = False) -> None:
        self.template = dynamics.template
        self.row_dims = dynamics.template.dim() + (1 if dynamics.stacked else 0)
        self.shared = t.dim() == 1
        self.per_sample = per_sample
        self.dense = dense
        self.t = t.to(self.template.device if self.has_batch else "cpu", torch.float64)
        grid = _functorch.plain(self.t)
        self.times = None if self.has_batch else grid.tolist()
        self.host = self.ends(grid).tolist() if self.times is not None else None
        self.furthest = float(grid.abs().max()) if grid.numel() else 0.0
        spans = self.ends(grid).diff().abs()
        self.lengths = spans.reshape(-1, self.count).amax(0).tolist() if spans.numel() else [0.0] * self.count

    @property
    def count(self) -> int:
        """Of intervals."""
        return 1 if self.dense else self.t.shape[-1] - 1

    def ends(self, t: Tensor) -> Tensor:
        """The ends of the intervals."""
        return t[..., [0, -1]] if self.dense else t

    def time_of(self, output: int) -> Tensor:
        """An output time, to broadcast with a part of the state."""
        if not self.has_batch:
            return self.t[output].to(self.template)
        if self.shared:
            return self.for_parts(self.t[output : output + 1]).to(self.template)
        return self.for_parts(self.t[:, output]).to(self.template)

    def between(self, first: int, last: int, fraction: float) -> Tensor:
        """A time between two output times, to broadcast with a part of the state."""
        time = torch.lerp(self.t[..., first], self.t[..., last], fraction).detach()
        if not self.has_batch:
            return time.to(self.template)
        return self.for_parts(time.reshape(-1)).to(self.template)

    def size(self, step: Step) -> float | None:
        """Size of a step, if it is one number for all samples."""
        if self.host is None:
            return None
        return step.size * (self.host[step.interval + 1] - self.host[step.interval])

    def stages(self, step: Step, nodes: Sequence[float]) -> Tensor:
        """Times of a step's stages, if they are numbers for all samples."""
        begin, end = self.host[step.interval : step.interval + 2]
        fractions = (min(step.start + c * step.size, 1.0) for c in nodes)
        times = [begin * (1.0 - fraction) + end * fraction for fraction in fractions]  # the end exactly at 1
        return torch.tensor(times, dtype=self.template.dtype, device=self.template.device)

    def affine(
        self, t: Tensor, interval: Tensor | int, start: Tensor | float, size: Tensor | float, nodes: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Sizes (...) and stage times (stages, ...) of steps, differentiable in ``t``.

        (...) is the shape of ``interval``, () for one step and (steps,) for many; where samples have steps or times of
        their own it is followed by (batch,).
        """
        ends = self.ends(t)
        if self.shared:
            begin, end = ends[interval], ends[interval + 1]
        elif self.per_sample:
            index = interval.reshape(-1, len(t))
            begin, end = (ends.T.gather(0, i).view(interval.shape) for i in (index, index + 1))
        else:
            begin, end = ends[:, interval].movedim(0, -1), ends[:, interval + 1].movedim(0, -1)
            if isinstance(start, Tensor):
                start, size = start.unsqueeze(-1), size.unsqueeze(-1)
        length = end - begin
        nodes = torch.tensor(nodes, dtype=torch.float64, device=t.device).view(-1, *[1] * length.dim())
        fractions = (start + nodes * size).clamp(max=1.0)
        return size * length, begin * (1.0 - fractions) + end * fractions

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

    def thetas(self, t: Tensor, steps: Sequence[Step]) -> Tensor | None:
        """Where in each of these steps its dense output lies, (steps, outputs), differentiable in ``t``."""
        if not self.dense or not steps[0].thetas:
            return None
        begin, length = t[0], t[-1] - t[0]
        rows = [((t[s.outputs.start : s.outputs.stop] - begin) / length - s.start) / s.size for s in steps]
        return torch.stack(rows)


def spread(x: Tensor, part_dims: int, dims: int) -> Tensor:
    """(..., batch) -> (..., 1, batch, 1, ...): the batch is the first dimension of a part of so many dimensions."""
    return x.view(*x.shape[:-1], *[1] * (dims - part_dims), x.shape[-1], *[1] * (part_dims - 1))


def align(sizes: Tensor, damping: Tensor) -> Tensor:
    """Step sizes (steps, ...) with the dimensions that a damping for each channel needs behind the first."""
    missing = damping.dim() - (sizes.dim() - 1)
    return sizes.view(len(sizes), *[1] * missing, *sizes.shape[1:]) if missing > 0 else sizes
