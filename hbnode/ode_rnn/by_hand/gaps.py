"""Gaps solved one after the other: which steps each takes, and their gradient."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from hbnode.nfe import NFE
from hbnode.ode_rnn.by_hand.coefficients import coefficients
from hbnode.ode_rnn.by_hand.control import Control, GivenUp
from hbnode.ode_rnn.by_hand.steps import Evaluation, Gradients, Parameters, Stepped, Steps

TOGETHER = 1024  # sizes of steps whose coefficients are computed at once
MOST_ATTEMPTS = 256  # in a gap


@dataclasses.dataclass
class Taken:
    """A step as it was taken.

    Attributes:
        sizes: of each sample's step, (batch,).
        place: which of the known steps it is, if it is one.
        index: which samples took it, all others were at the end; None for all of the batch.
        accepted: which of them moved, (samples, 1); None for all.
        step: the step with its stages, for the gradient.
    """

    sizes: Tensor
    place: int | None = None
    index: Tensor | None = None
    accepted: Tensor | None = None
    step: Stepped | None = None


@dataclasses.dataclass
class Gap:
    """The accepted steps of a gap, the evaluation at its start, and what it cost."""

    steps: list[Taken]
    start: Evaluation | None
    nfe: NFE

    def bare(self) -> Gap:
        """What is needed to take the steps again."""
        return Gap([dataclasses.replace(taken, step=None) for taken in self.steps], None, self.nfe)


class Gaps:
    """Solves gaps with steps of each sample's own.

    Arguments:
        steps: takes them.
        damping: γ of the method, without its graph, on the host as all sizes are.
        lengths: (gaps, batch), in float64.
        grid: sizes of steps, (any number, batch), and which of them each gap takes; None for steps that are chosen by
            their error.
        idle: which gaps are of length 0 for all samples.
        rtol: relative tolerance.
        atol: absolute tolerance.
        max_steps: of a gap.
        longest: no step is longer.
    """

    def __init__(
        self,
        steps: Steps,
        damping: Tensor,
        lengths: Tensor,
        grid: tuple[Tensor, list[list[int]]] | None,
        idle: list[bool],
        *,
        rtol: float,
        atol: float,
        max_steps: int,
        longest: float,
    ) -> None:
        self.steps, self.damping, self.lengths, self.idle = steps, damping, lengths, idle
        self.is_adaptive = grid is None
        self.sizes, self.places = (lengths, [[gap] for gap in range(len(lengths))]) if grid is None else grid
        self.rtol, self.atol, self.longest = rtol, atol, longest
        self.most = min(max_steps, MOST_ATTEMPTS)
        self._together = max(1, TOGETHER // max(1, lengths.shape[1]))
        self._group: tuple[int, tuple[Tensor, ...]] = (-1, ())

    def solve(self, gap: int, s: Tensor, given: Parameters, *, keep: bool) -> tuple[Tensor, Gap]:
        """The state at the end of a gap, and how it was reached; with what the gradient needs if asked."""
        found = Gap([], None, NFE())
        if self.idle[gap]:
            return s, found
        f = self._start(s, found, given, keep=keep)
        found.nfe.forward += self.steps.carries
        if self.is_adaptive:
            s = self._adaptive(gap, s, f, found, given, keep=keep)
        else:
            for place in self.places[gap]:
                s, f = self._take(Taken(self.sizes[place], place), s, f, found, given, keep=keep)
            found.nfe.forward += len(found.steps) * self.steps.evaluations
        found.nfe.steps = len(found.steps)
        return s, found

    def again(self, found: Gap, s: Tensor, given: Parameters) -> tuple[Tensor, Gap]:
        """The same steps once more, with what the gradient needs."""
        again = Gap([], None, NFE())
        if not found.steps:
            return s, again
        f = self._start(s, again, given, keep=True)
        for taken in found.steps:
            s, f = self._take(dataclasses.replace(taken, step=None), s, f, again, given, keep=True)
        again.nfe.backward = self.steps.carries + len(again.steps) * self.steps.evaluations
        return s, again

    def pull(self, found: Gap, of_s: Tensor, given: Parameters, sums: Gradients) -> Tensor:
        """The gradient at the beginning of a gap from that at its end."""
        of_f: Tensor | None = None
        for taken in reversed(found.steps):
            of_s, of_f = self._pull(taken, of_s, of_f, given, sums)
        if found.start is None or of_f is None:
            return of_s
        of_x = self.steps.pull_evaluation(found.start, of_f, given, sums)
        if of_x.shape == of_s.shape:
            return of_s + of_x
        of_s = of_s.clone()
        of_s[:, : of_x.shape[1]] += of_x
        return of_s

    def plain(self, found: Gap, s: Tensor, given: Parameters) -> Tensor:
        """:meth:`again` by operations of torch that record their graph: the state at the end."""
        steps, method = self.steps, self.steps.method

        def evaluate(t: Tensor, x: Tensor) -> Tensor:
            return steps.equation.run(x, given.weights, given.numbers, None)

        point = torch.stack(steps.split(s))
        if steps.carries and found.steps:
            point = torch.cat([point, evaluate(s, point[0]).unsqueeze(0)])
        for taken in found.steps:
            sizes = taken.sizes.to(given.damping.device).unsqueeze(-1)
            matrix = method.matrix(given.damping, sizes).to(s)
            times = s.new_zeros(steps.evaluations).unbind(0)
            packed = method.pack(matrix, error=False)
            before = point if taken.index is None else point[:, taken.index]
            new = method.step(before, packed, times, evaluate, error=False, activation=steps.activation).point
            new = new if taken.accepted is None else torch.where(taken.accepted, new, before)
            point = new if taken.index is None else point.index_copy(1, taken.index, new)
        return torch.cat(tuple(point[: method.state_rows]), 1)

    def _start(self, s: Tensor, found: Gap, given: Parameters, *, keep: bool) -> Tensor | None:
        """The value of the equation at the beginning, if the method carries it."""
        if not self.steps.carries:
            return None
        x = self.steps.split(s)[0]
        made = self.steps.evaluate(x, given, keep=keep)
        found.start = made if keep else None
        return made.value

    def _pull(
        self, taken: Taken, of_s: Tensor, of_f: Tensor | None, given: Parameters, sums: Gradients
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients before a step from those after it, of the state and of the value there."""
        step, index, moves = taken.step, taken.index, taken.accepted
        assert step is not None
        mine, my_f = of_s, of_f
        if index is not None:
            mine, my_f = mine[index], None if my_f is None else my_f[index]
        moved, moved_f = mine, my_f
        if moves is not None:
            moved, moved_f = torch.where(moves, mine, 0.0), None if my_f is None else torch.where(moves, my_f, 0.0)
        by_s, by_f = self.steps.pull(step, taken.sizes, moved, moved_f, given, sums)
        if moves is not None:
            by_s = by_s + torch.where(moves, 0.0, mine)
            by_f = by_f if by_f is None or my_f is None else by_f + torch.where(moves, 0.0, my_f)
        if index is not None:
            by_s = of_s.index_copy(0, index, by_s)
            if by_f is not None:
                by_f = (by_f.new_zeros(len(of_s), by_f.shape[1]) if of_f is None else of_f).index_copy(0, index, by_f)
        return by_s, by_f

    def _take(
        self, taken: Taken, s: Tensor, f: Tensor | None, found: Gap, given: Parameters, *, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A step that need not be tried."""
        mine, my_f = s, f
        if taken.index is not None and f is not None:
            mine, my_f = s[taken.index], f[taken.index]
        step = self.steps.take(mine, my_f, self._coefficients(taken, s), given, error=False, keep=keep)
        found.steps.append(dataclasses.replace(taken, step=step if keep else None))
        return self._moved(taken, step, s, f)

    def _moved(self, taken: Taken, step: Stepped, s: Tensor, f: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The state after a step, and the value there."""
        new, new_f, index, moves = step.s, step.f, taken.index, taken.accepted
        if moves is not None:
            before, before_f = step.start
            assert before_f is not None
            assert new_f is not None
            new, new_f = torch.where(moves, new, before), torch.where(moves, new_f, before_f)
        if index is not None:
            assert f is not None
            assert new_f is not None
            new, new_f = s.index_copy(0, index, new), f.index_copy(0, index, new_f)
        return new, new_f

    def _coefficients(self, taken: Taken, like: Tensor) -> Tensor:
        """Those of a step; of known steps they are computed for many at once."""
        method = self.steps.method
        if taken.place is None:
            return coefficients(method, self.damping, taken.sizes).to(like)
        group, index = divmod(taken.place, self._together)
        if self._group[0] != group:
            sizes = self.sizes[group * self._together : (group + 1) * self._together]
            of_group = coefficients(method, self.damping, sizes.flatten()).to(like)
            self._group = (group, of_group.split(sizes.shape[1], -2))
        return self._group[1][index]

    def _adaptive(self, gap: int, s: Tensor, f: Tensor | None, found: Gap, given: Parameters, *, keep: bool) -> Tensor:
        """The state at the end of a gap by steps chosen by their error."""
        assert f is not None
        length, h = self.lengths[gap], self.steps.split(s)[0]
        control = Control(self.steps.method, self.rtol, self.atol, self.longest, length, _norm(h), _norm(f))
        taken = Taken(length, gap) if control.is_whole else Taken(control.sizes())
        while True:
            mine, my_f = s, f
            if taken.index is not None:
                mine, my_f = s[taken.index], f[taken.index]
            step = self.steps.take(mine, my_f, self._coefficients(taken, s), given, error=True, keep=keep)
            ratio = self._ratio(step)
            found.nfe.forward += self.steps.evaluations
            is_done, moved = control.advance(ratio)
            if moved:
                taken.step = step if keep else None
                taken.accepted = control.moves()
                found.steps.append(taken)
                s, moved_f = self._moved(taken, step, s, f)
                f = f if moved_f is None else moved_f
            else:
                found.nfe.rejected += 1
            if is_done:
                return s
            if control.attempts >= self.most:
                raise GivenUp
            taken = Taken(control.sizes(), index=control.samples())

    def _ratio(self, step: Stepped) -> Tensor:
        """Norm of (error / tolerance) of each sample."""
        assert step.error is not None
        error = step.error.transpose(0, 1)
        scale = torch.maximum(step.start[0].abs(), step.s.abs()).mul_(self.rtol).add_(self.atol).view(error.shape)
        return _norm(torch.div(error, scale, out=scale).flatten(1))


def _norm(x: Tensor) -> Tensor:
    """Root mean square of each row, as float64."""
    return torch.linalg.vector_norm(x, dim=1).double() / math.sqrt(x.shape[1])
