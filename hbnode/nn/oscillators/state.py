"""The state of a layer of oscillators."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hbnode._tree import Record, record


@record
class OscillatorState(Record):
    """The state of :class:`Oscillators`, from which a series goes on.

    Attributes:
        v: velocities, (batch, num_oscillators), after the last sample was seen.
        x: displacements, of the same shape.
        t: the time of the last sample, (batch,).
        held: the last observed sample (batch, input_size), which ``input="hold"`` holds; else None.
    """

    v: Tensor
    x: Tensor
    t: Tensor
    held: Tensor | None = None

    @override
    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name == "t" else new if name == "held" or new.itemsize >= 4 else torch.float32


def check_state(state: object, batch: int, size: int, input_size: int, *, is_held: bool) -> OscillatorState:
    """A state that a layer of these sizes can go on from, or an error."""
    if not isinstance(state, OscillatorState):
        raise TypeError(
            f"state must be an OscillatorState, got {type(state).__name__}. Fix: hbnode.nn.OscillatorState(v, x, t), "
            "or the state that an earlier call returned."
        )
    wanted = {"v": (batch, size), "x": (batch, size), "t": (batch,)}
    wanted |= {"held": (batch, input_size)} if is_held else {}
    for name, shape in wanted.items():
        part = getattr(state, name)
        if part is None or part.shape != shape:
            got = None if part is None else tuple(part.shape)
            raise ValueError(
                f"the state's {name} must have shape {shape}, got {got}. "
                "Fix: a state that this module returned for such a batch."
            )
    return state
