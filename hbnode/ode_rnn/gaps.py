"""A solve over many short intervals, between which the state is changed: what an ODE-RNN does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hbnode import _native_solve, _torch_internals
from hbnode._arguments import check_precision, checked_times, resolved
from hbnode._closures import own_parameters
from hbnode._state import State, apply, parts
from hbnode.errors import SolverError
from hbnode.fields import Field
from hbnode.nfe import NFE, Tally
from hbnode.solve import solve
from hbnode.solvers import torchdiffeq_options
from hbnode.solvers.settings import Settings
from hbnode.solvers.stepper import Stepper


class Gaps:
    """Solves a field from each of a row of times to the next, for each sample at times of its own.

    Native methods with the direct gradient are set up once for all intervals; all others solve each by itself.

    Arguments:
        field: what is solved.
        y0: a checked state like those that will come: their structure, shapes and dtype.
        t: times (batch, T); a sample stays where it is while its times repeat.
        settings: how to solve.
    """

    def __init__(self, field: Field, y0: State, t: Tensor, settings: Settings) -> None:
        self.field, self.is_pair = field, not isinstance(y0, Tensor)
        self.settings = resolved(settings, field)
        self.nfe: list[NFE] = []
        check_precision(self.settings, parts(y0)[0].dtype)
        if self.settings.gradient == "adjoint" and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "gradient='adjoint' gives no gradient with respect to times of each sample's own, and these require "
                "one. Fix: gradient='direct', or t.detach()."
            )
        self.t = checked_times(t.to(torch.float64), t.device, rows=True)  # on the host
        resting = (self.t.detach().diff() == 0) & (not t.requires_grad)  # a gap of 0 may have a gradient
        self.idle, self.resting = (_torch_internals.numbers(x) for x in (resting.all(0), resting.any(0)))
        self.stepper: Stepper | None = None
        native = self.settings.method not in torchdiffeq_options.METHODS
        if native and self.settings.gradient == "direct" and not _torch_internals.is_active():
            stepper = _native_solve.stepper_for(field, y0, self.t, self.settings, interrupted=True)
            self.stepper, _ = _native_solve.begin(stepper, NFE())

    def advance(self, interval: int, rows: Tensor) -> Tensor:
        """The state at the end of an interval from that at its beginning: (parts, batch, ...), h alone or h and m."""
        self.nfe.append(NFE())
        self.nfe[-1].keeps_graph = self.settings.gradient == "direct" and torch.is_grad_enabled()
        if self.idle[interval]:
            return rows
        t = self.t[:, interval : interval + 2]
        if self.resting[interval] and not self.settings.per_sample:
            # whoever stays must not count in the error of the common step
            moving = (t.diff() != 0)[:, 0].nonzero()[:, 0]
            index = moving.to(rows.device)
            self.nfe[-1].samples = moving.tolist()
            return rows.index_copy(1, index, self._solve(rows[:, index], t[moving]))
        if self.stepper is None:
            return self._solve(rows, t)
        self.stepper.tally = Tally(self.field, self.nfe[-1])
        end = _native_solve.advance(self.stepper, self._stacked(rows), interval)
        if end is None:
            self.stepper = None
            return self._solve(rows, t)
        return end.view(rows.shape)

    def _stacked(self, rows: Tensor) -> Tensor:
        """The rows of the solver: h and m of a second-order solve, else one row that holds them both."""
        assert self.stepper is not None
        return rows.unsqueeze(0) if self.stepper.term.stacked else rows

    def _solve(self, rows: Tensor, t: Tensor) -> Tensor:
        """From the first of two times to the second, by itself."""
        state: State = tuple(rows[i] for i in range(len(rows))) if self.is_pair else rows[0]
        if self.settings.method not in torchdiffeq_options.METHODS:
            return _last(solve(self.field, state, t, self.settings, self.nfe[-1]))
        rescaled = Rescaled(self.field, t, rows[0])
        try:
            return _last(solve(rescaled, state, [0.0, 1.0], self.settings, self.nfe[-1]))
        except SolverError as error:
            begin, end = (float(time) for time in t[0].detach())
            message = f"{error.message}; the time is that of the first sample, in its gap from {begin:g} to {end:g}"
            time, size = begin + (end - begin) * error.t, (end - begin) * error.step_size
            raise type(error)(message, t=time, step_size=size, nfe=error.nfe) from error


def _last(trajectory: State) -> Tensor:
    """The state at the last of the times, (parts, batch, ...)."""
    return torch.stack([part[-1] for part in parts(trajectory)])


class Rescaled(nn.Module):
    """A field over intervals of unlike lengths, each run through while s goes from 0 to 1: dy/ds = (t1 - t0) dy/dt.

    The intervals belong to this object and not to the field, so that an adjoint that evaluates it again much later
    finds them as they were.
    """

    def __init__(self, field: Field, t: Tensor, like: Tensor) -> None:
        super().__init__()
        self.field = field
        shape = (-1, *[1] * (like.dim() - 1))
        self.begin, self.length = t[:, 0].to(like).view(shape), t.diff()[:, 0].to(like).view(shape)

    @property
    def __self__(self) -> Field:
        """What its evaluations are counted for."""
        return self.field

    def dynamics_parameters(self) -> list[Tensor]:
        """Those of the field."""
        return own_parameters(self.field)

    def in_time(self, s: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """The start and length of a step of s, for each sample in its own time, (batch,)."""
        return (self.begin + s * self.length).flatten(), (length * self.length).flatten()

    def forward(self, s: Tensor, state: State) -> State:
        """The derivative with respect to s."""
        return apply(lambda part: self.length * part, self.field(self.begin + s * self.length, state))
