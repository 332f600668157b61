"""The states of an ODE-RNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import Tensor

from hbnode._records import Record, record

_READ_BY_NAME = (
    "an ODERNNState is read by name: it has no axis of layers, and carries a time. Fix: state.h, (batch, hidden_size), "
    "for the h[-1] of torch.nn.GRU; state.m and state.t for the rest."
)


@record
class ODERNNState(Record):
    """The state of an :class:`ODERNN`, from which a series goes on.

    It has no axis of layers, unlike the h of torch.nn.GRU: where that takes ``h[-1]``, take ``state.h``.

    Attributes:
        h: hidden state, (batch, hidden_size).
        m: its momentum or velocity, of the same shape; None for first-order fields.
        t: the time that it belongs to, (batch,).
    """

    h: Tensor
    m: Tensor | None
    t: Tensor

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(_READ_BY_NAME)

    def __iter__(self) -> NoReturn:
        raise TypeError(_READ_BY_NAME)


@record
class Filtered(Record):
    """What :meth:`ODERNN.filter` returns; it unpacks into its three attributes.

    Attributes:
        before: the states just before each sample was seen, with h and m (batch, T, hidden_size) and t (batch, T).
        after: the states just after.
        state: the state at the end of each sequence.
    """

    before: ODERNNState
    after: ODERNNState
    state: ODERNNState

    def __iter__(self) -> Iterator[ODERNNState]:
        return iter((self.before, self.after, self.state))


def check_kind(state: object) -> None:
    """Refuse a state that no ODERNN has returned."""
    if not isinstance(state, ODERNNState):
        raise TypeError(
            f"state must be an ODERNNState, got {type(state).__name__}. Fix: hbnode.ODERNNState(h, m, t), or the state "
            "that an earlier call returned."
        )
