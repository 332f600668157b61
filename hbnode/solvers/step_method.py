"""What every native method has: its coefficients for a step, and the step itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]


class StepResult(NamedTuple):
    """The outcome of a step.

    Attributes:
        point: the point after it.
        error: of its rows of the state, (state rows, ...).
        columns: K (columns, ...), to interpolate with.
        rows: those of the state after it, each by itself: the gradient of one does not pass through the others.
    """

    point: Tensor
    error: Tensor | None
    columns: Tensor | None = None
    rows: tuple[Tensor, ...] | None = None

    def state(self, count: int) -> tuple[Tensor, ...]:
        """The rows of the state after the step, of which there are so many."""
        return self.point[:count].unbind(0) if self.rows is None else self.rows


class StepMethod(ABC):
    """A one-step method.

    Attributes:
        carries: whether the value of the field at the end of a step is the first of the next.
        state_rows: rows of the state, 1 for y and 2 for (h, m).
        nodes: times of the stages that a step evaluates, as fractions of the step.
        error_order: order of the embedded solution of an adaptive method.
        has_numbers: whether it has :meth:`of_numbers`.
        inside: how many times the estimated error of a step the error of the interpolant inside of it may be.
    """

    carries: ClassVar[bool]
    state_rows: ClassVar[int]
    nodes: tuple[float, ...]
    error_order: int
    inside: ClassVar[float] = 1.0
    has_numbers: ClassVar[bool] = False

    @property
    def evaluations(self) -> int:
        """Of the field, in one step."""
        return len(self.nodes)

    @abstractmethod
    def matrix(self, damping: Tensor, step: Tensor) -> Tensor:
        """The coefficients of a step in one tensor (..., *), for step sizes (...) that γ broadcasts with."""

    def of_numbers(self, damping: float, step: float, *, error: bool, order: int = 0) -> Tensor:
        """:meth:`matrix` of numbers, in float64 on the host, or its derivative of any order with respect to γ.

        It is flat, in the order in which :meth:`pack` takes it apart, with or without what the error needs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no coefficients of numbers")

    def unpacked(self, numbers: Tensor) -> Tensor:
        """The elements of :meth:`of_numbers` at their places in :meth:`matrix`, and 0 elsewhere."""
        raise NotImplementedError(f"{type(self).__name__} has no coefficients of numbers")

    @abstractmethod
    def pack(self, matrix: Tensor, *, error: bool) -> Any:
        """The coefficients in the form that :meth:`step` uses, with or without those of the error.

        Arguments:
            matrix: from :meth:`matrix`, or from :meth:`of_numbers` with the same ``error``.
            error: whether the step estimates its error.
        """

    @abstractmethod
    def step(
        self,
        point: Tensor,
        coefficients: Any,
        times: Sequence[Tensor],
        evaluate: Evaluate,
        *,
        error: bool,
        activation: Activation | None = None,
    ) -> StepResult:
        """One step.

        Arguments:
            point: the rows of the state, and below them the field's value if the method carries it.
            coefficients: from :meth:`pack`, with the same ``error``.
            times: of the stages at ``nodes``.
            evaluate: ``(t, x)`` to the field's value, both of the shape of a row.
            error: whether to estimate the error.
            activation: σ of a splitting method; elsewhere it is a part of the field.
        """

    def blend(self, damping: Tensor, step: Tensor, thetas: Tensor) -> Tensor:
        """Coefficients of the interpolant: the state at fractions of steps, as rows that K is multiplied with.

        Arguments:
            damping: γ, (...).
            step: H of each time, (times,).
            thetas: where in its step each time lies, (times,).

        Returns:
            (times, state rows, columns, ...).
        """
        raise NotImplementedError(f"{type(self).__name__} has no interpolant: its grids step onto the output times")
