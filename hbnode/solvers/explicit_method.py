"""One step of any explicit method whose stages are linear in the state and in the values of the field.

Runge-Kutta and Nystrom methods (after the change of gauge of :mod:`hbnode.solvers.nystrom`) share one form. With the
columns K = [state rows, F_1, ..., F_s],

    x_i = sum_k C[i, k] K_k,  F_i = f(t_i, x_i),  i = 2..s,

and the new state and its error are further such rows. The last stage is evaluated at the new state, so its value is
the first of the next step. What a step starts from and ends with is therefore a *point*: the rows of the state and the
value of the field there, stacked. Only the coefficients C know of the step size and the damping.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hbnode import _torch_internals
from hbnode._tracing import is_tracing
from hbnode.solvers.step_method import Activation, Evaluate, StepMethod, StepResult


class PackedMatrix(NamedTuple):
    """C in the order in which a step uses it.

    Attributes:
        first: columns of the state rows and F_1, (rows, state rows + 1, ...).
        columns: those of F_2 to F_s, each from the row after its own stage on, (rows - i + 1, ...).

    Trailing dimensions, if there are any, broadcast against a row of the state: a step size for each sample, a damping
    for each channel.
    """

    first: Tensor
    columns: tuple[Tensor, ...]


class ExplicitMethod(StepMethod):
    """A pair of explicit methods; its nodes are those of the stages after the first."""

    carries = True

    @override
    @abstractmethod
    def matrix(self, damping: Tensor, step: Tensor) -> Tensor:
        """C for the stages, the new state and its error.

        Arguments:
            damping: γ, broadcastable with ``step``; ignored where there is none.
            step: H, of any shape (...).

        Returns:
            (..., rows, columns). Rows: s - 1 stages, of which the last is the first row of the new state; the other
            state rows; their errors.
        """

    @override
    def pack(self, matrix: Tensor, *, error: bool) -> PackedMatrix:
        if matrix.dim() == 1:
            first, *rest = matrix.split_with_sizes(self._sizes(error))
            return PackedMatrix(first.view(-1, self.state_rows + 1), tuple(rest))
        n = self.state_rows
        c = matrix if matrix.dim() == 2 else matrix.movedim((-2, -1), (0, 1))
        if not error:
            c = c[: len(self.nodes) + n - 1]
        columns = c.unbind(1)[n + 1 :]
        return PackedMatrix(c[:, : n + 1], tuple(column[i + 1 :] for i, column in enumerate(columns)))

    def _sizes(self, error: bool) -> list[int]:
        """The numbers of elements in the parts of a packed matrix."""
        stages, n = len(self.nodes), self.state_rows
        rows = stages + n - 1 + (n if error else 0)
        return [rows * (n + 1), *range(rows - 1, rows - 1 - stages, -1)]

    @override
    def unpacked(self, numbers: Tensor) -> Tensor:
        places = self.places(len(numbers) == sum(self._sizes(True)))
        width = self.state_rows + 1 + len(self.nodes)
        matrix = numbers.new_zeros((len(self.nodes) + 2 * self.state_rows - 1) * width)
        matrix[places] = numbers
        return matrix.view(-1, width)

    @functools.cache  # noqa: B019, the methods live as long as the module
    def places(self, error: bool) -> list[int]:
        """Where the elements of a packed matrix are in C, row by row."""
        stages, n = len(self.nodes), self.state_rows
        rows, width = stages + n - 1 + (n if error else 0), n + 1 + stages
        first = [row * width + column for row in range(rows) for column in range(n + 1)]
        return first + [row * width + n + 1 + i for i in range(stages) for row in range(i + 1, rows)]

    @override
    def step(
        self,
        point: Tensor,
        coefficients: PackedMatrix,
        times: Sequence[Tensor],
        evaluate: Evaluate,
        *,
        error: bool,
        activation: Activation | None = None,
    ) -> StepResult:
        n, shape = self.state_rows, point.shape[1:]
        first, columns = coefficients
        uniform = first.dim() == 2  # one step size and one damping for all elements
        rows = first @ point.reshape(n + 1, -1) if uniform else (first * point).sum(1)
        in_place = not (torch.is_grad_enabled() or is_tracing() or _torch_internals.is_active())
        left = rows.shape[0]
        for t, column in zip(times, columns, strict=True):
            left -= 1
            x, rows = rows.split_with_sizes((1, left))
            first_row = x.view(shape)
            f = evaluate(t, first_row)
            if uniform:
                rows = rows.addr_(column, f.reshape(-1)) if in_place else torch.addr(rows, column, f.reshape(-1))
            else:
                rows = torch.addcmul(rows, column, f)
        more, errors = rows.split_with_sizes((n - 1, n if error else 0))
        ends = torch.cat((x, more, f.reshape(x.shape))).view(point.shape)
        state = (first_row,) if n == 1 else (first_row, more.view(shape))
        return StepResult(ends, errors.view(n, *shape) if error else None, None, state)


def interpolate(columns: Tensor, blend: Tensor) -> Tensor:
    """The state (times, state rows, ...) inside of a step, from K and the coefficients of :meth:`StepMethod.blend`."""
    if blend.dim() > 3:  # a damping for each channel
        return torch.einsum("tnk...,k...->tn...", blend, columns)
    rows = blend.reshape(-1, blend.shape[-1]) @ columns.reshape(len(columns), -1)
    return rows.view(*blend.shape[:2], *columns.shape[1:])


def strictly_lower(rows: Sequence[Sequence[float]]) -> Tensor:
    """The square matrix A of a tableau from its rows after the first."""
    size = len(rows) + 1
    padded = [[0.0] * size, *([*map(float, row)] + [0.0] * (size - len(row)) for row in rows)]
    return torch.tensor(padded, dtype=torch.float64, device="cpu")
