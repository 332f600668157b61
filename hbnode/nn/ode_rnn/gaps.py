"""The gaps of irregular series solved one after the other, for any field, method and gradient."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode import _torch
from hbnode._tree import State, apply, parts
from hbnode.errors import MaxStepsError, SolverError
from hbnode.fields import Field
from hbnode.nfe import NFE
from hbnode.solve.adjoints import Checkpoint, own_parameters
from hbnode.solve.odeint import resolve, solve
from hbnode.solve.settings import Settings

_ROUNDING = 1e-9  # relative; a gap of three steps, but for its rounding, takes three


@dataclass(frozen=True)
class Solver:
    """How gaps are solved: the settings of a solve, and the longest step of a grid if there is one."""

    settings: Settings
    step_size: float | None = None


def checked_solver(settings: Settings, field: Field) -> Solver:
    """How to solve; refuse what no times of each sample's own can be solved with."""
    options, step_size = dict(settings.options or {}), None
    if "step_size" in options and settings.is_native:
        step_size = options.pop("step_size")
        if not isinstance(step_size, numbers.Real) or not 0 < float(step_size) < math.inf:
            raise ValueError(f"step_size must be a positive number, got {step_size!r}. Fix: a tenth of a time_unit.")
        if settings.steps is not None:
            raise ValueError("steps and options={'step_size': h} were both given. Fix: leave steps out.")
        settings, step_size = dataclasses.replace(settings, options=options, steps=1), float(step_size)
    settings = settings.checked()
    if settings.is_native and resolve(settings, field).gradient == "adjoint":
        raise ValueError(
            "gradient='adjoint' of native methods does not know times of each sample's own. Fix: leave gradient "
            "out, or method='dopri5' with per_sample=False."
        )
    return Solver(settings, step_size)


def steps_needed(t: Tensor, step_size: float) -> Tensor:
    """How many equal steps no longer than a size each gap between times (batch, T) takes, (batch, T - 1)."""
    return (t.detach().diff() / step_size * (1 - _ROUNDING)).ceil().clamp(min=1)


class Gaps:
    """Solves a field from each of a row of times to the next, for each sample at times of its own.

    Arguments:
        field: what is solved.
        t: times (batch, T); a sample stays where it is while its times repeat.
        solver: how to solve.
        second_order: whether a state (batch, n) is h and m side by side.

    Attributes:
        nfe: the evaluations of each gap.
    """

    def __init__(self, field: Field, t: Tensor, solver: Solver, *, second_order: bool) -> None:
        self.field, self.second_order = field, second_order
        self.settings, self.step_size = resolve(solver.settings, field), solver.step_size
        if self.settings.gradient == "adjoint" and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "gradient='adjoint' gives no gradient with respect to times of each sample's own, and these require "
                "one. Fix: gradient='direct', or t.detach()."
            )
        if self.settings.is_native:
            gradient = Checkpoint(keep_bytes=0) if self.settings.gradient == "checkpoint" else self.settings.gradient
            self.settings = dataclasses.replace(
                self.settings, gradient=gradient, common_steps=not self.settings.per_sample
            )
        self.t = t.to("cpu", torch.float64)
        self.moves = self.t.detach().diff() != 0
        self.rests = _torch.numbers(~self.moves.any(0) & (not t.requires_grad))  # a gap of 0 may have a gradient
        self.nfe = [NFE() for _ in self.rests]

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        """The state at the end of a gap from that at its beginning."""
        t, nfe = self.t[:, gap : gap + 2], self.nfe[gap]
        if self.rests[gap]:
            return s
        if not self.settings.is_native:
            return self._by_torchdiffeq(s, t, self.moves[:, gap], nfe)
        times = t if self.step_size is None else self._grid(t, self.step_size)
        return torch.cat(parts(solve(self.field, self._state(s), times, self.settings, nfe, end=True)), 1)

    def _state(self, s: Tensor) -> State:
        return tuple(s.chunk(2, 1)) if self.second_order else s

    def _grid(self, t: Tensor, step_size: float) -> Tensor:
        """The times (batch, K) of steps no longer than a size; samples that need fewer rest in the last."""
        needed = steps_needed(t, step_size)
        most = float(needed.max())
        if not most <= self.settings.max_steps:
            raise MaxStepsError(
                f"step_size={step_size:g} makes {most:.0f} steps of a gap, more than "
                f"max_steps={self.settings.max_steps}. Fix: a longer step_size, or divide t by a typical gap",
                t=float(t[0, 0]), step_size=step_size, nfe=0,
            )  # fmt: skip
        fraction = (torch.arange(int(most) + 1) / needed).clamp(max=1.0)
        return torch.where(fraction < 1, torch.lerp(t[:, :1], t[:, 1:], fraction), t[:, 1:])

    def _by_torchdiffeq(self, s: Tensor, t: Tensor, moves: Tensor, nfe: NFE) -> Tensor:
        """By one of torchdiffeq's methods, from 0 to 1 of each gap; samples that rest do not count in its error."""
        index, given = None, s
        if not (t.requires_grad or bool(moves.all())):
            index = moves.nonzero()[:, 0]
            nfe.samples = index.tolist()
            t, index = t[index], index.to(s.device)
            given = s[index]
        field = _InFractions(self.field, t, given)
        try:
            end = torch.cat(parts(solve(field, self._state(given), [0.0, 1.0], self.settings, nfe, end=True)), 1)
        except SolverError as error:
            first, last = t[0].tolist()
            message = f"{error.message}; the time is that of the first sample, in its gap from {first:g} to {last:g}"
            time, size = first + (last - first) * error.t, (last - first) * error.step_size
            raise type(error)(message, t=time, step_size=size, nfe=error.nfe) from error
        return end if index is None else s.to(end.dtype).index_copy(0, index, end)


class _InFractions(torch.nn.Module):
    """A field over gaps of unlike lengths, each run through while c goes from 0 to 1: dy/dc = (t1 - t0) dy/dt."""

    def __init__(self, field: Field, t: Tensor, like: Tensor) -> None:
        super().__init__()
        self.field = self.counted_as = field
        self.begin, self.length = (z.to(like).view(-1, 1) for z in (t[:, 0], t.diff()[:, 0]))

    def dynamics_parameters(self) -> list[Tensor]:
        """Those of the field."""
        return own_parameters(self.field)

    def _in_time(self, c: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """The start and length of a step in c, for each sample in its own time, (batch,)."""
        return (self.begin + c * self.length).flatten(), (length * self.length).flatten()

    def forward(self, c: Tensor, state: State) -> State:
        """The derivative with respect to c."""
        return apply(lambda part: self.length * part, self.field(self.begin + c * self.length, state))
