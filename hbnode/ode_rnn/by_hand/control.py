"""The steps of each sample of a gap, chosen by their error, on the host.

The rules are those of :mod:`hbnode.solvers.per_sample` and :mod:`hbnode.solvers.step_size_control`, for one interval.
The arrays are short, and numpy's operations on such cost a third of torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hbnode.solvers.step_method import StepMethod
from hbnode.solvers.step_size_control import (
    LARGEST,
    SAFETY,
    SMALLEST,
    after_acceptance,
    after_rejection,
    first_size,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class GivenUp(Exception):
    """A gap that the solver proper should look at: it is not finite, or takes very many steps."""


class Control:
    """Where the samples of a gap are; arrays of shape (samples,), of those that are still on their way.

    Arguments:
        method: of the steps.
        rtol: relative tolerance.
        atol: absolute tolerance.
        longest: no step is longer.
        length: of the gap, for each sample.
        h: norms of the position, or of the state of a first-order method, at the beginning.
        f: norms of the equation's value there.

    Attributes:
        is_whole: whether each sample takes the gap in one step.
        attempts: how many steps were tried.
        index: which samples take the next step; None for all.
    """

    def __init__(
        self, method: StepMethod, rtol: float, atol: float, longest: float, length: Tensor, h: Tensor, f: Tensor
    ) -> None:
        import numpy as np  # here, as everywhere in hbnode, because it is slow to import

        self.exponent, self.longest = 1.0 / (method.error_order + 1), longest
        self.norms = h, f
        self.length: Array = length.numpy()
        with np.errstate(all="ignore"):  # what is not finite is rejected
            size: Any = first_size(h.numpy(), f.numpy(), rtol, atol, method)  # type: ignore[type-var]  # as of tensors
            self.size: Array = np.fmin(np.where(np.isfinite(size), size, self.length), longest)
            self.left: Array = np.fmax(np.ceil(self.length / self.size - 0.05), 1.0)
        self.is_whole = bool((self.left <= 1.0).all())
        self.attempts = 0
        self.index: Array | None = None
        self.fraction: Array = 1.0 / self.left
        self._moves: Array | None = None

    def sizes(self) -> Tensor:
        """Of the next steps."""
        return torch.from_numpy(self.fraction * self.length)

    def samples(self) -> Tensor | None:
        """Which samples take them; None for all."""
        return None if self.index is None else torch.from_numpy(self.index)

    def moves(self) -> Tensor | None:
        """Which of them were accepted, (samples, 1); None for all."""
        return None if self._moves is None else torch.from_numpy(self._moves).unsqueeze(1)

    def advance(self, ratio: Tensor) -> tuple[bool, bool]:
        """Accept steps by their errors, and choose the next; whether all have arrived, and whether any has moved."""
        import numpy as np

        ratios: Array = ratio.numpy()
        self.attempts += 1
        accepted = ratios <= 1.0  # not those that are not finite
        everyone = bool(accepted.all())
        self._moves = None if everyone else accepted
        if not everyone and self.attempts == 1 and not all(torch.isfinite(norm).all() for norm in self.norms):
            raise GivenUp  # no step is short enough
        if everyone and self.attempts == 1 and self.is_whole:
            return True, True
        with np.errstate(all="ignore"):
            self._choose(ratios, accepted, everyone)
        return len(self.left) == 0, everyone or bool(accepted.any())

    def _choose(self, ratio: Array, accepted: Array, everyone: bool) -> None:
        """The next steps of those that have not arrived."""
        import numpy as np

        if self.attempts == 1:
            self.start: Array = np.zeros_like(self.length)
            self.previous: Array = np.ones_like(self.length)
            self.rejected: Array = np.zeros_like(accepted)
            self.everyone: Array = np.arange(len(accepted))
        taken = self.fraction * self.length
        bounded = np.maximum(ratio, 1e-10)
        factor: Any = after_acceptance(bounded, self.previous, self.exponent)  # type: ignore[type-var]  # as of tensors
        factor = np.minimum(np.maximum(factor, SMALLEST), np.where(self.rejected, 1.0, LARGEST))
        start, previous = self.start + self.fraction, np.maximum(ratio, 1e-4)
        fewest: Any = 1.0
        if not everyone:
            down: Any = after_rejection(bounded, self.exponent)  # type: ignore[type-var]  # as of tensors
            factor = np.where(accepted, factor, np.fmin(np.fmax(down, SMALLEST), SAFETY))  # of NaN the smallest
            start, previous = np.where(accepted, start, self.start), np.where(accepted, previous, self.previous)
            fewest = np.where(accepted, 1.0, self.left + 1.0)  # a rejected step must become shorter
        arrived = accepted & (self.left <= 1.0)
        self.start, self.previous, self.rejected = start, previous, ~accepted
        self.size = np.where(taken > 0, np.minimum(taken * factor, self.longest), self.size)
        self.left = np.fmax(np.ceil((1.0 - start) * self.length / self.size - 0.05), fewest)
        if arrived.any():
            stay = ~arrived
            for name in ("length", "size", "left", "start", "previous", "rejected", "everyone"):
                setattr(self, name, getattr(self, name)[stay])
            self.index = self.everyone
        self.fraction = (1.0 - self.start) / self.left
