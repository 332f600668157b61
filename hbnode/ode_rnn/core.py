"""One direction of one layer of an ODE-RNN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hbnode._arguments import checked_state
from hbnode._constants import KeepsConstants
from hbnode._state import parts
from hbnode.fields import Field
from hbnode.nfe import NFE
from hbnode.ode_rnn.by_hand.control import GivenUp
from hbnode.ode_rnn.by_hand.plan import Network, Plan, planned
from hbnode.ode_rnn.defaults import CellName, FieldName, make_cell, make_field
from hbnode.ode_rnn.gaps import Gaps
from hbnode.ode_rnn.grid import Grid
from hbnode.solvers.settings import Settings

CellArgument = CellName | nn.Module | Callable[[int, int], nn.Module]
FieldArgument = FieldName | nn.Module | Callable[[int], nn.Module]


@dataclass(frozen=True)
class Solver:
    """How gaps are solved: the settings, and the longest step of a grid if there is one."""

    settings: Settings
    step_size: float | None = None


@dataclass(frozen=True)
class Read:
    """What one direction of one layer made of a batch.

    Attributes:
        before: rows of the state just before each sample, (1 or 2, batch, T, n).
        after: those just after.
        end: those at the end, (1 or 2, batch, n).
        nfe: the evaluations of each gap, one count for each of the gap's solves.
    """

    before: Tensor
    after: Tensor
    end: Tensor
    nfe: list[list[NFE]]

    def beside(self, back: Read, order: Tensor) -> Read:
        """This and what was made of the turned series, side by side; ``order`` (batch, T) turns them back.

        The states before a sample have not seen it, and neither direction's has.
        """
        index = order.view(1, *order.shape, 1).expand_as(back.after)  # its own inverse
        paths = [
            (mine, theirs.gather(2, index)) for mine, theirs in ((self.before, back.before), (self.after, back.after))
        ]
        before, after, end = (torch.cat(pair, -1) for pair in (*paths, (self.end, back.end)))
        return Read(before, after, end, self.nfe)


class Core(KeepsConstants):
    """A state that follows an ODE from sample to sample, where a cell changes it; times are in units of time.

    The arguments are those of :class:`hbnode.ODERNN`; ``cell_input_size`` has all that the cell is fed.

    States: s is (batch, state_size), h or h and m side by side, as the cell has them; rows are (1 or 2, batch, n).
    """

    def __init__(
        self,
        cell_input_size: int,
        hidden_size: int,
        *,
        field: FieldArgument,
        cell: CellArgument,
        residual: bool,
        initial_state: Literal["learned", "zeros"] | nn.Module,
        static_size: int = 0,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.field: Field = make_field(field, hidden_size)
        self.augment = getattr(self.field, "augment", 0)
        if self.augment > hidden_size:
            raise ValueError(
                f"the field appends {self.augment} zeros, more than hidden_size={hidden_size}. Fix: a larger one."
            )
        like = next((p for p in self.field.parameters() if p.is_floating_point()), torch.zeros(()))
        with torch.no_grad():
            start = self.field.initial_state(like.new_zeros(1, hidden_size - self.augment))
        self.second_order = isinstance(start, tuple)
        self.state_size = hidden_size * (2 if self.second_order else 1)
        self.cell = make_cell(cell, cell_input_size, self.state_size)
        self.residual = bool(residual)
        self._make_start(initial_state, static_size)

    def _make_start(self, initial_state: str | nn.Module, static_size: int) -> None:
        """The parameter or the encoder that the state starts from; neither for zeros."""
        self.start: nn.Parameter | None = None
        self.static_start: nn.Linear | None = None
        self.encoder: nn.Module | None = None
        if isinstance(initial_state, nn.Module):
            self.encoder = initial_state
        elif initial_state == "learned":
            makes = [getattr(self.field, name, None) for name in ("initial_momentum", "initial_velocity")]
            size = self.hidden_size if any(net is not None for net in makes) else self.state_size - self.augment
            self.start = nn.Parameter(torch.zeros(size))  # of h alone, if the field makes m out of it
            if static_size:
                self.static_start = nn.Linear(static_size, size, bias=False)
        elif initial_state != "zeros":
            raise ValueError(
                f"initial_state must be 'learned', 'zeros' or a module, got {initial_state!r}. Fix: 'learned'."
            )

    def begin(self, window: Tensor, static: Tensor | None) -> Tensor:
        """The state s that a series starts from, given its samples (batch, T, ...)."""
        batch = window.shape[0]
        if self.encoder is not None:
            s = self.encoder(window)
        elif self.start is not None:
            s = self.start.expand(batch, -1)
            if self.static_start is not None and static is not None:
                s = s + self.static_start(static)
        else:
            s = window.new_zeros(batch, self.hidden_size - self.augment)
        sizes = (self.hidden_size - self.augment, self.state_size)
        if s.shape[:-1] != (batch,) or s.shape[-1] not in sizes:
            raise ValueError(
                f"initial_state returned shape {tuple(s.shape)}; expected (batch, size) = ({batch}, {sizes[0]}) for h"
                + (f", or ({batch}, {sizes[1]}) for h and m side by side." if self.second_order else ".")
                + " Fix: the size of its last layer."
            )
        return s if s.shape[1] == self.state_size else torch.cat(parts(self.field.initial_state(s)), 1)

    def read(self, x: Tensor, t: Tensor, seen: Tensor | None, s: Tensor, start: Tensor | None, solver: Solver) -> Read:
        """The states before and after each sample, from the state s.

        Arguments:
            x: what the cell is fed, (batch, T, cell_input_size).
            t: times (batch, T).
            seen: which samples the cell sees, (batch, T); None for all.
            s: the state at the start, (batch, state_size).
            start: its time, (batch,); None if that is the first of ``t``.
            solver: how to solve.
        """
        times = t if start is None else torch.cat([start.unsqueeze(1), t], 1)
        by_hand = self._read_by_hand(x, times, seen, s, begins=start is None, solver=solver)
        if by_hand is not None:
            return by_hand
        gaps, rows = self.gaps(s, times, solver)
        before, after = [], []
        for i in range(x.shape[1]):
            if i or start is not None:
                rows = gaps.advance(i if start is not None else i - 1, rows)
            before.append(rows)
            jumped = self.rows(self.jump(x[:, i], rows.movedim(0, 1).flatten(1)))
            rows = jumped if seen is None else torch.where(seen[:, i, None], jumped, rows)
            after.append(rows)
        return Read(torch.stack(before, 2), torch.stack(after, 2), rows, counts(gaps))

    def _read_by_hand(
        self, x: Tensor, times: Tensor, seen: Tensor | None, s: Tensor, *, begins: bool, solver: Solver
    ) -> Read | None:
        """:meth:`read` where the gradient is written by hand; None where it is not."""
        plan = self._plan(s, times, solver)
        if plan is None:
            return None
        if plan.cell is None:
            before, after = self._jumps(plan, x, times, seen, s, begins=begins, solver=solver)
        else:
            try:
                before, after = plan.read(x, seen, s, begins=begins)
            except GivenUp:
                return None
        paths = [path.unflatten(2, (-1, self.hidden_size)).permute(2, 1, 0, 3).contiguous() for path in (before, after)]
        return Read(paths[0], paths[1], paths[1][:, :, -1].clone(), plan.nfe)  # of its own, as it may be kept

    def _plan(self, s: Tensor, times: Tensor, solver: Solver) -> Plan | None:
        """How the gaps are solved with a gradient written by hand; None where they are not."""
        network = Network(self.field, self.cell, self.residual, self.hidden_size, self.second_order)
        return planned(network, s, times, solver.settings, solver.step_size)

    def _jumps(
        self, plan: Plan, x: Tensor, times: Tensor, seen: Tensor | None, s: Tensor, *, begins: bool, solver: Solver
    ) -> tuple[Tensor, Tensor]:
        """The states before and after each sample, (T, batch, S), where the cell is any module."""
        before: list[Tensor] = []
        after: list[Tensor] = []
        s = s.clone()  # the cell may change what it is given
        for i in range(x.shape[1]):
            if i or not begins:
                gap = i - begins
                try:
                    s = plan.flow(s, gap, 1)[0]
                except GivenUp:
                    gaps, rows = self.gaps(s, times[:, gap : gap + 2], solver)
                    s = gaps.advance(0, rows).movedim(0, 1).flatten(1)
                    plan.nfe += counts(gaps)
            before.append(s)
            jumped = self.jump(x[:, i], s)
            s = jumped if seen is None else torch.where(seen[:, i, None], jumped, s)
            after.append(s)
        return torch.stack(before), torch.stack(after)

    def flow(self, s: Tensor, times: Tensor, solver: Solver) -> tuple[Tensor, Tensor, list[list[NFE]]]:
        """Without samples: h at each of the times but the first, (batch, K, n), the rows at the last, evaluations."""
        plan = self._plan(s, times, solver) if times.shape[1] > 1 else None
        if plan is not None:
            with contextlib.suppress(GivenUp):
                states = plan.flow(s, 0, times.shape[1] - 1)
                ends = states[..., : self.hidden_size].transpose(0, 1).contiguous()
                return ends, self.rows(states[-1].clone()), plan.nfe
        gaps, rows = self.gaps(s, times, solver)
        path = []
        for interval in range(times.shape[1] - 1):
            rows = gaps.advance(interval, rows)
            path.append(rows[0])
        return torch.stack(path, 1), rows, counts(gaps)

    def gaps(self, s: Tensor, times: Tensor, solver: Solver) -> tuple[Gaps | Grid, Tensor]:
        """The solves between the times, (batch, T), and the rows to start from."""
        rows = self.rows(s)
        y0 = checked_state(self.field, (rows[0], rows[1]) if self.second_order else rows[0])
        rows = torch.stack(parts(y0))
        if solver.step_size is None:
            return Gaps(self.field, y0, times, solver.settings), rows
        return Grid(self.field, y0, times, solver.settings, solver.step_size), rows

    def jump(self, x: Tensor, s: Tensor) -> Tensor:
        """The state after a sample was seen."""
        new = self.cell(x, s)
        if not isinstance(new, Tensor) or new.shape != s.shape:
            got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(f"the cell returned {got}; expected the shape of the state, {tuple(s.shape)}.")
        new = new.to(s.dtype)  # autocast may have made it smaller
        return s + new if self.residual else new

    def rows(self, s: Tensor) -> Tensor:
        """The rows of a state s."""
        return s.unflatten(1, (-1, self.hidden_size)).movedim(1, 0)


def counts(gaps: Gaps | Grid) -> list[list[NFE]]:
    """The counts of each gap."""
    return gaps.nfe_per_gap if isinstance(gaps, Grid) else [[nfe] for nfe in gaps.nfe]
