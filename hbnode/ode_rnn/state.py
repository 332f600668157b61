"""The states of an ODE-RNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

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
        h: hidden state of the last layer, (batch, hidden_size); (batch, 2 hidden_size) of a bidirectional module, the
            ends of its two directions side by side.
        m: its momentum or velocity, of the same shape; None for first-order fields.
        t: the time that it belongs to, (batch,).
        last: the last value observed of each feature, (batch, input_size); None where the module does not use it.
        last_t: when that was, (batch, input_size); where nothing was observed, when the series began.
        below: the state of the layer below; None for the first layer.
    """

    h: Tensor
    m: Tensor | None
    t: Tensor
    last: Tensor | None = None
    last_t: Tensor | None = None
    below: ODERNNState | None = None

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(_READ_BY_NAME)

    def __iter__(self) -> NoReturn:
        raise TypeError(_READ_BY_NAME)

    @staticmethod
    @override
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name in ("t", "last_t") else new


@record
class Filtered(Record):
    """What :meth:`ODERNN.filter` returns; it unpacks into its three attributes.

    Attributes:
        before: the states of the last layer just before each sample was seen, with h and m (batch, T, hidden_size) and
            t (batch, T).
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


def joined(state: ODERNNState) -> Tensor:
    """H, or h and m side by side, as a cell has them."""
    return state.h if state.m is None else torch.cat([state.h, state.m], -1)
