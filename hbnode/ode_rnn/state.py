"""The states of an ODE-RNN, and which of them a module can go on from."""

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


def joined(state: ODERNNState) -> Tensor:
    """H, or h and m side by side, as a cell has them."""
    return state.h if state.m is None else torch.cat([state.h, state.m], -1)


def state_of(s: Tensor, t: Tensor, sizes: list[int]) -> ODERNNState:
    """The state of s (..., h and m side by side) of so many features each, with storage of its own."""
    h, *m = s.split(sizes, -1)
    return ODERNNState(h.contiguous(), m[0].contiguous() if m else None, t)


def by_layer(state: ODERNNState | None) -> list[ODERNNState]:
    """The states of the layers, from the first."""
    return [] if state is None else [*by_layer(state.below), state]


def check_state(state: object, shape: torch.Size, hidden_size: int, *, second_order: bool) -> None:
    """Refuse what is no state of an ODERNN of these sizes."""
    if not isinstance(state, ODERNNState):
        raise TypeError(
            f"state must be an ODERNNState, got {type(state).__name__}. Fix: hbnode.ODERNNState(h, m, t), or the state "
            "that an earlier call returned."
        )
    h, m, t = state.h, state.m, state.t
    if (m is not None) != second_order or any(
        part.shape != (*shape, hidden_size) for part in (h, m) if part is not None
    ):
        wanted = "h and m" if second_order else "h, and None for m,"
        raise ValueError(
            f"the state must have {wanted} of shape {(*shape, hidden_size)}, got h {tuple(h.shape)} and m "
            f"{None if m is None else tuple(m.shape)}. Fix: a state that this module returned for such a batch."
        )
    if t.shape != shape:
        raise ValueError(f"the state's t must have shape {tuple(shape)}, got {tuple(t.shape)}. Fix: one time each.")


def check_start(state: ODERNNState, t: Tensor, num_layers: int) -> None:
    """Refuse a state from which a module of so many layers cannot go on through times (batch, T)."""
    layers = len(by_layer(state))
    if layers != num_layers:
        raise ValueError(
            f"the state has {layers} layers, the module {num_layers}. Fix: the state that forward returned, which has "
            "the layers below; those before and after each sample do not."
        )
    first = t[:, 0].detach()
    if bool((state.t.detach().to(first.dtype) > first).any()):
        raise ValueError(
            "the state's time lies after the first of t; expected the series to go on from it. "
            "Fix: times of the whole series, not of its part."
        )
