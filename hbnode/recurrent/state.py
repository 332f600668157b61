"""The state that a momentum recurrent layer or cell carries from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class MomentumState(NamedTuple):
    """All that continues a sequence exactly; entries that a layer has no use for are None.

    Of a layer the first axis is that of layers and directions, as in torch.nn; a cell has none. ``n`` is the width of
    the drive: gates * hidden_size, or hidden_size with ``momentum_space="hidden"``.

    Attributes:
        h: hidden state (..., batch, hidden_size).
        c: cell state of an LSTM (..., batch, hidden_size).
        v: momentum (..., batch, n), but of RMSProp.
        m: running mean of squares of Adam and RMSProp (..., batch, n).
        g: the last W x + b, of adaptive momentum (..., batch, n).
        t: samples so far (batch,), int64, of NAG and scheduled restart.
    """

    h: Tensor
    c: Tensor | None = None
    v: Tensor | None = None
    m: Tensor | None = None
    g: Tensor | None = None
    t: Tensor | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether no sample has been seen."""
        return all(z is None for z in self[2:5])

    def detach(self) -> MomentumState:
        """The state without its history, for truncated backpropagation."""
        return self.map(lambda z: z.detach())

    def map(self, function: Callable[[Tensor], Tensor]) -> MomentumState:
        """The state with a function applied to each tensor in it."""
        return MomentumState(*(function(z) if isinstance(z, Tensor) else z for z in self))
