"""The state of the random number generators that a network may draw from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The state of the generators that an evaluation on the device may draw from."""
    states = (torch.get_rng_state(),)
    own = None if device.type == "cpu" else getattr(torch, device.type, None)
    return (*states, own.get_rng_state(device)) if own is not None and hasattr(own, "get_rng_state") else states


@contextmanager
def set_random_state(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Draw from the given state, and put the generators back where they were; None leaves them alone."""
    if states is None:
        yield
        return
    now = random_state(device)
    try:
        _put(states, device)
        yield
    finally:
        _put(now, device)


def _put(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        getattr(torch, device.type).set_rng_state(states[1], device)
