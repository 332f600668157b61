"""Whether gaps and samples can be walked through by hand, and how."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hbnode import _second_derivatives, _torch_internals
from hbnode._arguments import check_precision, checked_state, resolved
from hbnode._tracing import is_tracing
from hbnode.fields import GHBNODE, HBNODE, Field
from hbnode.nfe import NFE, Tally, is_recording
from hbnode.ode_rnn.by_hand.cells import Cell
from hbnode.ode_rnn.by_hand.control import GivenUp
from hbnode.ode_rnn.by_hand.equations import Equation
from hbnode.ode_rnn.by_hand.gaps import Gaps
from hbnode.ode_rnn.by_hand.steps import ExplicitSteps, SplittingSteps, Steps
from hbnode.ode_rnn.by_hand.walk import Inputs, Walk, walked
from hbnode.ode_rnn.grid import steps_needed
from hbnode.solvers.explicit_method import ExplicitMethod
from hbnode.solvers.ode_term import is_compiled
from hbnode.solvers.registry import METHODS, NYSTROM, RUNGE_KUTTA, check_field
from hbnode.solvers.settings import ResolvedSettings, Settings
from hbnode.solvers.splitting import Splitting

LONGEST = 16.0  # γH of a step of a Nystrom method, as in hbnode.solvers.stepper


class Network(NamedTuple):
    """What is walked through: a network of an ODE-RNN, with the size of h and whether the state has an m."""

    field: Field
    cell: nn.Module
    residual: bool
    hidden_size: int
    second_order: bool


class Plan:
    """A walk through gaps by hand.

    Arguments:
        core: the network.
        gaps: solves the gaps.
        steps: how.
        damping: γ, in float64.
        settings: how to solve.
    """

    def __init__(self, core: Network, gaps: Gaps, steps: Steps, damping: Tensor, settings: ResolvedSettings) -> None:
        self.core, self.gaps, self.steps, self.damping, self.settings = core, gaps, steps, damping, settings
        self.cell = Cell.of(core.cell)
        self.nfe: list[list[NFE]] = []  # of each gap

    def read(self, x: Tensor, seen: Tensor | None, s: Tensor, *, begins: bool) -> tuple[Tensor, Tensor]:
        """The states before and after each sample, (T, batch, S)."""
        assert self.cell is not None
        gates = self.cell.gates(x.transpose(0, 1).contiguous())
        shown = None
        if seen is not None and not (seen.is_cpu and bool(seen.all())):
            shown = list(seen.T.unsqueeze(-1).unbind(0))
        count = x.shape[1] - begins
        walk = Walk(self.gaps, 0, count, self.cell, begins=begins, residual=self.core.residual, seen=shown)
        return self._walk(walk, s, gates, self.cell.weights())

    def flow(self, s: Tensor, first: int, count: int) -> Tensor:
        """The states at the ends of some gaps, (count, batch, S)."""
        return self._walk(Walk(self.gaps, first, count), s, None, [])[0]

    def _walk(self, walk: Walk, s: Tensor, gates: Tensor | None, of_cell: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        walk.recomputes = self.settings.gradient == "checkpoint"
        xi, friction = self.steps.equation.numbers
        weights = [*of_cell, *self.steps.equation.network.weights()]
        inputs = Inputs(s, gates, self.damping, xi, friction, len(of_cell), weights)
        states = walked(walk, inputs)
        if not self.gaps.is_adaptive and not bool(torch.isfinite(states[0].detach()).all()):
            raise GivenUp
        self._count(walk)
        return states

    def _count(self, walk: Walk) -> None:
        """Count the evaluations of a walk, and later those of its backward pass."""
        counts = []
        for gap in walk.taken:
            nfe, found = NFE(), gap.nfe
            nfe.keeps_graph = not walk.recomputes and torch.is_grad_enabled()
            tally = Tally(self.core.field, nfe)
            tally.add("evaluation", found.forward)
            tally.add("accepted", found.steps)
            tally.add("rejected", found.rejected)
            counts.append(nfe)
        self.nfe += [[nfe] for nfe in counts]
        field = self.core.field

        def count_again(stop: int, evaluations: int) -> None:
            Tally(field, counts[stop]).add("evaluation", evaluations)

        walk.count_again = count_again


def planned(core: Network, s: Tensor, times: Tensor, given: Settings, step_size: float | None) -> Plan | None:
    """How the gaps between times (batch, T) are walked through by hand; None where they are not.

    That is where the field's network is known, a native method takes steps of each sample's own, and nothing watches
    or changes what is computed: transforms, hooks, autocast, records of steps, gradients of times.
    """
    settings = resolved(given, core.field)
    method = METHODS.get(settings.method)
    if method is None or settings.options or settings.gradient not in ("direct", "checkpoint"):
        return None
    if settings.steps is None and (not settings.per_sample or not s.is_cpu):  # whose steps the host chooses
        return None
    if not _is_plain(core, s, times, settings):
        return None
    second_order = settings.method not in RUNGE_KUTTA
    if second_order:
        check_field(settings.method, core.field)
    equation = Equation.of(core.field, second_order=second_order)
    if equation is None or not _fits(equation, core, s):
        return None
    checked_state(core.field, tuple(s.chunk(2, 1)) if core.second_order else s)
    check_precision(settings, s.dtype)
    gamma = core.field.solver_damping() if isinstance(core.field, (HBNODE, GHBNODE)) and second_order else 0.0
    damping = torch.as_tensor(gamma, dtype=torch.float64, device=s.device)
    if damping.dim():
        return None
    if isinstance(method, ExplicitMethod):
        steps: Steps = ExplicitSteps(method, equation)
    else:
        assert isinstance(method, Splitting)
        steps = SplittingSteps(method, equation, is_bounded=isinstance(core.field, GHBNODE))
    gaps = _gaps(steps, times, step_size, settings, damping.detach().cpu())
    return None if gaps is None else Plan(core, gaps, steps, damping, settings)


def _is_plain(core: Network, s: Tensor, times: Tensor, settings: ResolvedSettings) -> bool:
    """Whether nothing watches or changes what is computed."""
    if _torch_internals.is_active() or _torch_internals.in_forward_mode() or _second_derivatives.are_wanted():
        return False
    if is_tracing() or is_recording() or torch.is_autocast_enabled(s.device.type) or is_compiled(core.field):
        return False
    if _torch_internals.has_global_hooks() or (times.requires_grad and torch.is_grad_enabled()):
        return False
    return s.is_cpu or not settings.compile


def _fits(equation: Equation, core: Network, s: Tensor) -> bool:
    """Whether the network has the sizes and the dtype of the state; if not, the field says so in words of its own."""
    n = core.hidden_size
    weights = [z for z in (*equation.network.weights(), *core.cell.parameters()) if z is not None]
    alike = all(z.dtype == s.dtype and z.device == s.device for z in weights)
    return alike and s.dtype in (torch.float32, torch.float64) and equation.network.maps(n * (1 + equation.joins), n)


def _gaps(
    steps: Steps, times: Tensor, step_size: float | None, settings: ResolvedSettings, damping: Tensor
) -> Gaps | None:
    """What solves the gaps; None where γ is not finite or a grid has too many steps, which is refused elsewhere."""
    on_host = times.detach().to("cpu", torch.float64)
    lengths = on_host.diff().T.contiguous()  # (gaps, batch)
    idle = (lengths == 0).all(1).tolist()
    grid = None
    if step_size is not None:
        needed = steps_needed(on_host, step_size).T
        most = needed.amax(1).tolist()
        if not all(count <= settings.max_steps for count in most):
            return None
        sizes = [
            torch.where(torch.arange(int(count)).unsqueeze(1) < needed[gap], lengths[gap] / needed[gap], 0.0)
            for gap, count in enumerate(most)
        ]
        ends = [0, *torch.tensor(most).long().cumsum(0).tolist()]
        grid = torch.cat([lengths[:0], *sizes]), [list(range(*pair)) for pair in itertools.pairwise(ends)]
    elif settings.steps is not None:
        count = settings.steps
        grid = lengths / count, [[gap] * count for gap in range(len(lengths))]
    longest = math.inf
    if settings.method in NYSTROM and grid is None and (gamma := abs(float(damping))) != 0:
        longest = LONGEST / gamma
        if math.isnan(longest):
            return None
    return Gaps(
        steps,
        damping,
        lengths,
        grid,
        idle,
        rtol=settings.rtol,
        atol=settings.atol,
        max_steps=settings.max_steps,
        longest=longest,
    )
