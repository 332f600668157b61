"""Steps of native methods around an :class:`Equation`, with their gradient written by hand.

The arithmetic is that of :mod:`hbnode.solvers.explicit_method` and :mod:`hbnode.solvers.splitting`, in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hbnode.ode_rnn.by_hand.coefficients import slopes
from hbnode.ode_rnn.by_hand.equations import Equation, Number
from hbnode.ode_rnn.by_hand.networks import MANY, TANH, Sums, Weights
from hbnode.solvers.explicit_method import ExplicitMethod
from hbnode.solvers.splitting import Splitting
from hbnode.solvers.step_method import Activation, StepMethod


class Evaluation(NamedTuple):
    """A stage: the x where the equation was evaluated, its value, and what the gradient of the network needs."""

    x: Tensor
    value: Tensor
    kept: list[Tensor]


class Stepped(NamedTuple):
    """A step.

    Attributes:
        s: the state after it, (batch, S).
        f: the equation's value there, if the method carries it.
        start: the state and the value before it.
        coefficients: what it was taken with.
        stages: its evaluations; empty if they are not kept.
        error: that of its rows, (parts, batch, w), of a method that estimates it.
    """

    s: Tensor
    f: Tensor | None
    start: tuple[Tensor, Tensor | None]
    coefficients: Tensor
    stages: list[Evaluation]
    error: Tensor | None = None


class Gradients:
    """What a backward pass adds up: gradients of the weights, of ξ and γ in the equation, of γ in the method."""

    def __init__(self, steps: Steps, damping: Tensor, parameters: Parameters, *, by_damping: bool) -> None:
        self.steps, self.damping, self.by_damping = steps, damping, by_damping
        self.weights = Sums(parameters.weights)
        self.numbers: list[Tensor | None] = [None, None]
        self._total: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor, Sequence[Tensor]]] = []
        self._rows = 0

    def add(self, sizes: Tensor, gradients: Tensor, columns: Sequence[Tensor]) -> None:
        """A step: its sizes (batch,), the gradients of what its coefficients make, and what they multiply."""
        self._waiting.append((sizes, gradients, columns))
        self._rows += len(sizes)
        if self._rows >= MANY:
            self._settle()

    def of_damping(self) -> Tensor | None:
        """The gradient of γ in the method."""
        self._settle()
        return self._total

    def _settle(self) -> None:
        if not self._waiting:
            return
        sizes, gradients, columns = zip(*self._waiting, strict=True)
        self._waiting, self._rows = [], 0
        each = slopes(self.steps.method, self.damping, torch.cat(sizes)).to(gradients[0])
        moved = self.steps.combined(each, [torch.cat(column) for column in zip(*columns, strict=True)])
        total = (moved * torch.cat(gradients, 1)).sum(dtype=torch.float64)
        self._total = total if self._total is None else self._total + total


class Parameters(NamedTuple):
    """What a solve depends on beside its state: γ of the method in float64, ξ and γ of the equation, the weights."""

    damping: Tensor
    numbers: tuple[Number, Number]
    weights: Weights


class Steps(ABC):
    """The steps of a method around an equation.

    Attributes:
        method: the method.
        equation: what its stages evaluate.
        carries: whether the value of the equation at the end of a step is the first of the next.
    """

    carries: bool
    method: StepMethod
    activation: Activation | None = None  # of a splitting method

    def __init__(self, equation: Equation) -> None:
        self.equation = equation

    @property
    def evaluations(self) -> int:
        """Of one step."""
        return self.method.evaluations

    @abstractmethod
    def combined(self, coefficients: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """What the coefficients make of the columns that :meth:`pull` hands to ``Gradients.add``."""

    @abstractmethod
    def take(
        self, s: Tensor, f: Tensor | None, coefficients: Tensor, given: Parameters, *, error: bool, keep: bool
    ) -> Stepped:
        """A step from the state s (batch, S), and the equation's value there if the method carries it."""

    @abstractmethod
    def pull(
        self, step: Stepped, sizes: Tensor, of_s: Tensor, of_f: Tensor | None, given: Parameters, sums: Gradients
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients before a step from those after it, of the state and of the value."""

    def split(self, s: Tensor) -> tuple[Tensor, ...]:
        """The rows of the method, (batch, w)."""
        return tuple(s.chunk(2, 1))

    def evaluate(self, x: Tensor, given: Parameters, *, keep: bool) -> Evaluation:
        """The equation at x."""
        kept: list[Tensor] = []
        value = self.equation.run(x, given.weights, given.numbers, kept if keep else None)
        return Evaluation(x, value, kept)

    def pull_evaluation(self, made: Evaluation, gradient: Tensor, given: Parameters, sums: Gradients) -> Tensor:
        """The gradient at x."""
        weights, numbers = given.weights, given.numbers
        return self.equation.pull(gradient, made.x, made.value, weights, numbers, made.kept, sums.weights, sums.numbers)


class ExplicitSteps(Steps):
    """Those of an explicit method: the columns are those of :mod:`hbnode.solvers.explicit_method`."""

    carries = True

    def __init__(self, method: ExplicitMethod, equation: Equation) -> None:
        super().__init__(equation)
        self.method = method
        self.parts = method.state_rows
        self.stages = len(method.nodes)
        self.rows = self.stages + self.parts - 1  # without those of the error

    @override
    def combined(self, coefficients: Tensor, columns: Sequence[Tensor]) -> Tensor:
        each = coefficients[:, : self.rows].unbind(0)
        rows = each[0] * columns[0]
        for coefficient, column in zip(each[1:], columns[1:], strict=True):
            rows.addcmul_(coefficient, column)
        return rows

    @override
    def split(self, s: Tensor) -> tuple[Tensor, ...]:
        return (s,) if self.parts == 1 else tuple(s.chunk(2, 1))

    @override
    def take(
        self, s: Tensor, f: Tensor | None, coefficients: Tensor, given: Parameters, *, error: bool, keep: bool
    ) -> Stepped:
        assert f is not None
        columns = (coefficients if error else coefficients[:, : self.rows]).unbind(0)
        parts = self.split(s)
        rows = columns[0] * parts[0]
        for column, part in zip(columns[1:], (*parts[1:], f), strict=False):
            rows.addcmul_(column, part)
        stages, value = [], f
        for x, column in zip(rows.unbind(0), columns[self.parts + 1 :], strict=False):
            made = self.evaluate(x, given, keep=keep)
            value = made.value
            if keep:
                stages.append(made)
            rows.addcmul_(column, value)  # its coefficients are 0 in the rows before
        ends = rows[self.stages - 1 : self.rows]
        after = ends[0] if self.parts == 1 else torch.cat((ends[0], ends[1]), 1)
        return Stepped(after, value, (s, f), coefficients, stages, rows[self.rows :] if error else None)

    @override
    def pull(
        self, step: Stepped, sizes: Tensor, of_s: Tensor, of_f: Tensor | None, given: Parameters, sums: Gradients
    ) -> tuple[Tensor, Tensor | None]:
        by_row = step.coefficients.unbind(1)
        *of_rows, of_end = self.split(of_s)[::-1]  # from the last row to the first
        of_columns: Tensor | None = None
        for row, of_row in zip(by_row[self.stages : self.rows], of_rows, strict=True):
            of_columns = row * of_row
        for j in range(self.stages - 1, -1, -1):
            of_x = of_end if j == self.stages - 1 else None
            gradient = None if of_columns is None else of_columns[self.parts + 1 + j]
            if of_x is not None and of_f is not None:
                gradient = of_f if gradient is None else gradient + of_f
            if gradient is not None:
                by_value = self.pull_evaluation(step.stages[j], gradient, given, sums)
                of_x = by_value if of_x is None else of_x + by_value
            assert of_x is not None
            of_rows.append(of_x)
            of_columns = by_row[j] * of_x if of_columns is None else of_columns.addcmul_(by_row[j], of_x)
        assert of_columns is not None
        if sums.by_damping and self.parts == 2:
            s, f = step.start
            assert f is not None
            sums.add(sizes, torch.stack(of_rows[::-1]), [*self.split(s), f, *(made.value for made in step.stages)])
        *of_parts, of_value = of_columns[: self.parts + 1].unbind(0)
        return of_parts[0] if self.parts == 1 else torch.cat(of_parts, 1), of_value


class SplittingSteps(Steps):
    """Those of a splitting method: drifts and kicks."""

    carries = False

    def __init__(self, method: Splitting, equation: Equation, *, is_bounded: bool) -> None:
        super().__init__(equation)
        self.method, self.is_bounded = method, is_bounded  # whether h' is tanh(m)
        self.activation = torch.tanh if is_bounded else None
        self.kicks = method.evaluations

    @override
    def combined(self, coefficients: Tensor, columns: Sequence[Tensor]) -> Tensor:
        k = self.kicks
        each = coefficients.unbind(0)[k + 1 :]
        return torch.stack([each[i] * columns[i] + each[k + i] * columns[k + i] for i in range(k)])

    def speed(self, m: Tensor) -> Tensor:
        """How h drifts."""
        return TANH.run(m) if self.is_bounded else m

    @override
    def take(
        self, s: Tensor, f: Tensor | None, coefficients: Tensor, given: Parameters, *, error: bool, keep: bool
    ) -> Stepped:
        k = self.kicks
        coefficient: Sequence[Tensor] = coefficients.unbind(0)
        h, m = s.chunk(2, 1)
        h = torch.addcmul(h, coefficient[0], self.speed(m))
        stages: list[Evaluation] = []
        for i in range(k):
            made = self.evaluate(h, given, keep=keep)
            if keep:
                stages.append(made._replace(kept=[m, *made.kept]))
            m = (coefficient[k + 1 + i] * m).addcmul_(coefficient[2 * k + 1 + i], made.value)
            h = torch.addcmul(h, coefficient[i + 1], self.speed(m))
        return Stepped(torch.cat((h, m), 1), None, (s, None), coefficients, stages)

    @override
    def pull(
        self, step: Stepped, sizes: Tensor, of_s: Tensor, of_f: Tensor | None, given: Parameters, sums: Gradients
    ) -> tuple[Tensor, Tensor | None]:
        k = self.kicks
        coefficient = step.coefficients.unbind(0)
        of_h, of_m = of_s.chunk(2, 1)
        after, kicked, values = step.s.chunk(2, 1)[1], [], []
        for i in range(k - 1, -1, -1):
            made = step.stages[i]
            m, *kept = made.kept
            of_m = torch.addcmul(of_m, coefficient[i + 1], self._of_speed(of_h, after))
            kicked.append(of_m)
            values.append((m, made.value))
            gradient = coefficient[2 * k + 1 + i] * of_m
            of_h = of_h + self.pull_evaluation(made._replace(kept=kept), gradient, given, sums)
            of_m, after = coefficient[k + 1 + i] * of_m, m
        if sums.by_damping:
            befores, forces = zip(*values[::-1], strict=True)
            sums.add(sizes, torch.stack(kicked[::-1]), [*befores, *forces])
        of_m = torch.addcmul(of_m, coefficient[0], self._of_speed(of_h, after))
        return torch.cat((of_h, of_m), 1), None

    def _of_speed(self, of_h: Tensor, m: Tensor) -> Tensor:
        return TANH.pull(of_h, TANH.run(m)) if self.is_bounded else of_h
