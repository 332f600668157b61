"""A row of gaps and samples as one function, with its gradient written by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hbnode._allocator import keep_freed_memory
from hbnode._torch_internals import is_batched, keeps_graph
from hbnode.ode_rnn.by_hand.cells import Cell
from hbnode.ode_rnn.by_hand.equations import Number
from hbnode.ode_rnn.by_hand.gaps import Gap, Gaps
from hbnode.ode_rnn.by_hand.networks import Sums, Weights
from hbnode.ode_rnn.by_hand.steps import Gradients, Parameters


@dataclasses.dataclass
class Walk:
    """Gaps one after the other, and by choice a sample after each of them, and one before the first.

    A *stop* is the end of a gap, or the first sample.

    Attributes:
        gaps: solves them.
        first: the first gap.
        count: how many there are.
        cell: what sees the samples; None without samples.
        begins: whether there is a sample before the first gap.
        residual: whether the cell's output is added to the state.
        seen: for each stop which samples the cell sees, (batch, 1); None for all.
        recomputes: whether the backward pass takes the steps again, a stretch of stops at a time.
        keeps: whether there may be a backward pass.
        taken: the gaps as they were solved.
        count_again: is told how many evaluations the backward pass has made again in a gap of ``taken``.
    """

    gaps: Gaps
    first: int
    count: int
    cell: Cell | None = None
    begins: bool = False
    residual: bool = False
    seen: Sequence[Tensor] | None = None
    recomputes: bool = False
    keeps: bool = True
    taken: list[Gap] = dataclasses.field(default_factory=list)
    count_again: Callable[[int, int], None] = lambda gap, evaluations: None

    @property
    def stops(self) -> int:
        """How many there are."""
        return self.count + self.begins

    def gap(self, stop: int) -> int | None:
        """The number of the gap before a stop; None for the first sample."""
        return None if self.begins and stop == 0 else self.first + stop - self.begins

    def stretches(self) -> list[range]:
        """The stops in stretches, of which one at a time is taken again."""
        size = max(1, math.isqrt(max(self.stops - 1, 0)) + 1) if self.recomputes else self.stops
        return [range(first, min(first + size, self.stops)) for first in range(0, self.stops, size)]

    def shown(self, stop: int) -> Tensor | None:
        """Which samples the cell sees."""
        return None if self.seen is None else self.seen[stop]


class Inputs(NamedTuple):
    """The tensors of a walk.

    Attributes:
        s: the state at its beginning, (batch, S).
        gates: what the inputs give to the cell, (stops, batch, gates); None without a cell.
        damping: γ, in float64.
        xi: ξ of the equation, a tensor if it is learned.
        friction: γ of the equation, likewise.
        of_cell: how many of the weights are the cell's, which come first.
        weights: of the cell and of f.
    """

    s: Tensor
    gates: Tensor | None
    damping: Tensor
    xi: Number
    friction: Number
    of_cell: int
    weights: Weights

    @property
    def parameters(self) -> Parameters:
        """Those of the equation."""
        return Parameters(self.damping, (self.xi, self.friction), self.weights[self.of_cell :])


class Kept(NamedTuple):
    """What the gradient of a stop needs."""

    gap: Gap | None
    cell: tuple[Tensor, ...]


def walked(walk: Walk, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The states at the stops before samples are seen, and after, (stops, batch, S)."""
    keep_freed_memory(inputs.s.device)
    *others, weights = inputs
    walk.keeps = torch.is_grad_enabled()
    # a parameter whose p.data is replaced afterwards takes its saved self with it, a view stays as it was
    given = [z.view_as(z) if isinstance(z, Tensor) and z.is_leaf else z for z in (*others, *weights)]
    before, after = _Walk.apply(walk, *given)
    return before, before if after is None else after


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, *given: Any) -> tuple[Tensor, Tensor | None]:
        inputs = _inputs(given)
        keeps = walk.keeps and not walk.recomputes and any(isinstance(z, Tensor) and z.requires_grad for z in given)
        before = inputs.s.new_empty(walk.stops, *inputs.s.shape)
        after = None if walk.cell is None else torch.empty_like(before)
        ctx.kept = _forward(walk, inputs, before, after) if keeps else None
        if not keeps:
            _forward(walk, inputs, before, after, keep=False)
        ctx.set_materialize_grads(False)
        ctx.walk, ctx.numbers = walk, [None if isinstance(z, Tensor) else z for z in given]
        starts = [stops.start - 1 for stops in walk.stretches()[1:]]  # copies: outputs may be changed in place
        states = (before if after is None else after)[starts] if starts else None
        ctx.save_for_backward(*[z if isinstance(z, Tensor) else None for z in given], states)
        return before, after

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, starts = ctx.saved_tensors
        inputs = _inputs([z if number is None else number for z, number in zip(tensors, ctx.numbers, strict=True)])
        with torch.autocast(inputs.s.device.type, enabled=False):  # as in the forward pass
            many = any(grad is not None and is_batched(grad) for grad in grads)
            if torch.is_grad_enabled() or many:  # create_graph=True
                return None, *_differentiable(ctx.walk, inputs, grads, ctx.needs_input_grad[1:])
            kept = ctx.kept
            if not keeps_graph():
                ctx.kept = None
            return None, *_Backward(ctx.walk, inputs, starts, grads).run(kept)


def _inputs(given: Sequence[Any]) -> Inputs:
    s, gates, damping, xi, friction, of_cell, *weights = given
    return Inputs(s, gates, damping, xi, friction, of_cell, weights)


def _forward(walk: Walk, inputs: Inputs, before: Tensor, after: Tensor | None, *, keep: bool = True) -> list[Kept]:
    """Write the states, and note the steps; what the gradient needs, if asked."""
    s, found = inputs.s, []
    for stop in range(walk.stops):
        gap = walk.gap(stop)
        of_gap = None
        if gap is not None:
            s, of_gap = walk.gaps.solve(gap, s, inputs.parameters, keep=keep)
            walk.taken.append(of_gap.bare())
        before[stop] = s
        s, of_cell = _seen(walk, inputs, stop, s)
        if after is not None:
            after[stop] = s
        if keep:
            found.append(Kept(of_gap, of_cell))
    return found


def _again(walk: Walk, inputs: Inputs, stops: range, s: Tensor) -> list[Kept]:
    """What the gradient of some stops needs, from the same steps taken once more."""
    found = []
    for stop in stops:
        gap, of_gap = walk.gap(stop), None
        if gap is not None:
            number = gap - walk.first
            s, of_gap = walk.gaps.again(walk.taken[number], s, inputs.parameters)
            walk.count_again(number, of_gap.nfe.backward)
        s, of_cell = _seen(walk, inputs, stop, s)
        found.append(Kept(of_gap, of_cell))
    return found


def _seen(walk: Walk, inputs: Inputs, stop: int, s: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The state after a sample was seen, and what the cell's gradient needs."""
    if walk.cell is None or inputs.gates is None:
        return s, ()
    new, kept = walk.cell.run(inputs.gates[stop], s, inputs.weights[: inputs.of_cell])
    new = s + new if walk.residual else new
    shown = walk.shown(stop)
    return new if shown is None else torch.where(shown, new, s), kept


class _Backward:
    """The gradients of a walk's inputs, from the last stop to the first."""

    def __init__(self, walk: Walk, inputs: Inputs, starts: Tensor | None, grads: Sequence[Tensor | None]) -> None:
        self.walk, self.inputs, self.grads = walk, inputs, grads
        self.starts = [inputs.s, *(() if starts is None else starts)]  # of the stretches
        self.of_cell = Sums(inputs.weights[: inputs.of_cell])
        by_damping = inputs.damping.requires_grad
        self.rest = Gradients(walk.gaps.steps, walk.gaps.damping, inputs.parameters, by_damping=by_damping)
        self.of_gates = None if inputs.gates is None else torch.empty_like(inputs.gates)

    def run(self, kept: list[Kept] | None) -> list[Tensor | None]:
        """The gradients; ``kept`` is what the forward pass kept."""
        of_s = torch.zeros_like(self.inputs.s)
        for stops, start in reversed(list(zip(self.walk.stretches(), self.starts, strict=True))):
            found = _again(self.walk, self.inputs, stops, start) if kept is None else kept
            for stop, one in zip(reversed(stops), reversed(found), strict=True):
                of_s = self._pull(stop, one, of_s)
        of_xi, of_friction = self.rest.numbers
        weights = (*self.of_cell.all(), *self.rest.weights.all())
        return [of_s, self.of_gates, self.rest.of_damping(), of_xi, of_friction, None, *weights]

    def _pull(self, stop: int, kept: Kept, of_s: Tensor) -> Tensor:
        """The gradient before the gap of a stop from that after its sample."""
        walk, inputs = self.walk, self.inputs
        of_before, of_after = self.grads if walk.cell is not None else (self.grads[0], None)
        if of_after is not None:
            of_s = of_s + of_after[stop]
        if walk.cell is not None and self.of_gates is not None:
            shown = walk.shown(stop)
            of_new = of_s if shown is None else torch.where(shown, of_s, 0.0)
            weights = inputs.weights[: inputs.of_cell]
            by_cell = walk.cell.pull(of_new, kept.cell, weights, self.of_cell, self.of_gates[stop])
            if walk.residual:
                of_s = of_s + by_cell
            else:
                of_s = by_cell if shown is None else by_cell + torch.where(shown, 0.0, of_s)
        if of_before is not None:
            of_s = of_s + of_before[stop]
        return of_s if kept.gap is None else walk.gaps.pull(kept.gap, of_s, inputs.parameters, self.rest)


def _differentiable(
    walk: Walk, inputs: Inputs, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients by autograd, which can be differentiated again."""
    again = torch.is_grad_enabled()
    *others, weights = inputs
    with torch.enable_grad():
        views = [z.view_as(z) if isinstance(z, Tensor) else z for z in (*others, *weights)]
        outputs = replayed(walk, _inputs(views))
    made = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y is not None and dy is not None]
    leaves = [z for z, is_wanted in zip(views, wanted, strict=True) if is_wanted and isinstance(z, Tensor)]
    gradients = torch.autograd.grad(
        [y for y, _ in made], leaves, [dy for _, dy in made], create_graph=again, allow_unused=True
    )
    found = iter(gradients)
    return [next(found) if is_wanted else None for is_wanted in wanted]


def replayed(walk: Walk, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """What :func:`walked` returns, by operations of torch that record their graph, from the same steps."""
    s, befores, afters = inputs.s, [], []
    for stop in range(walk.stops):
        gap = walk.gap(stop)
        if gap is not None:
            s = walk.gaps.plain(walk.taken[gap - walk.first], s, inputs.parameters)
        befores.append(s)
        if walk.cell is not None and inputs.gates is not None:
            new = walk.cell.plain(inputs.gates[stop], s, inputs.weights[: inputs.of_cell])
            new = s + new if walk.residual else new
            shown = walk.shown(stop)
            s = new if shown is None else torch.where(shown, new, s)
            afters.append(s)
    return torch.stack(befores), torch.stack(afters) if afters else None
