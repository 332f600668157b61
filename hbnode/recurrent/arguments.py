"""Checks of the arguments of layers and cells, and of the states that they are given."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hbnode.recurrent import autocast
from hbnode.recurrent.cell_steps import CellStep
from hbnode.recurrent.rules import Rule, memory_dtype
from hbnode.recurrent.state import InitialState, RecurrentState


def check_switch(value: bool, name: str, fix: str = "") -> bool:
    """Return True or False, or raise an error: a number was meant for another argument."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}. Fix: {fix or f'{name}=True'}.")
    return value


def given_state(state: InitialState, hx: InitialState) -> InitialState:
    """The state that the caller passed, under our name or torch.nn's."""
    if state is not None and hx is not None:
        raise TypeError("state and hx are two names of one argument, and both were given. Fix: state alone.")
    return state if hx is None else hx


def read_state(
    state: InitialState,
    rule: Rule,
    step: CellStep,
    widths: tuple[int, int],
    places: tuple[int, ...],
    batch: tuple[int, ...],
    like: Tensor,
) -> RecurrentState:
    """Check a state and complete it: h and c are there, and v is None at the start of a sequence.

    Arguments:
        state: the state that the caller passed.
        rule: has to find its memory in the state.
        step: has to find c in the state if the cell has one.
        widths: of h and of v.
        places: (layers * directions,) of a layer, () of a cell.
        batch: (batch,), or () for a single sequence.
        like: a tensor with the dtype and device of the zeros.
    """
    shape = (*places, *batch)
    if state is None:
        state = RecurrentState(like.new_zeros(*shape, widths[0]))
    elif not isinstance(state, RecurrentState):
        state = _from_plain(state, step.has_cell_state)
    if step.has_cell_state and state.c is None:
        state = dataclasses.replace(state, c=like.new_zeros(*shape, widths[0]))
    expected = {"h": widths[0]} | ({"c": widths[0]} if step.has_cell_state else {})
    if any(z is not None for z in state.memory):
        expected |= dict.fromkeys(rule.memory, widths[1])
    for name in (field.name for field in dataclasses.fields(state)):
        z = getattr(state, name)
        wanted = None if name not in expected else batch if name == "t" else (*shape, expected[name])
        found = None if z is None else tuple(z.shape)
        if found != wanted:
            raise ValueError(
                f"state.{name} must be {wanted}, got {found}. Fix: pass on the state of the same layer and batch, h "
                "alone, or None at the start of a sequence."
            )
        if z is not None:
            _check_values(name, z, like)
    return state


def _from_plain(state: object, has_cell_state: bool) -> RecurrentState:
    """Make a state from h, or from h and c, as torch.nn's layers take them."""
    if isinstance(state, Tensor):
        return RecurrentState(state)
    parts = tuple(state) if isinstance(state, (tuple, list)) else ()
    if has_cell_state and len(parts) == 2 and all(isinstance(z, Tensor) for z in parts):
        return RecurrentState(*parts)
    pair = ", a pair (h, c)" if has_cell_state else ""
    got = ", ".join(type(z).__name__ for z in parts)
    fix = "pass on the state that the call before returned, state.detach() where its history is to end."
    if any(isinstance(z, RecurrentState) for z in parts):
        fix = "output, state = cell(x, state), also of a cell, where torch.nn's returns the state alone."
    got = f"{type(state).__name__} of ({got})" if parts else type(state).__name__
    raise TypeError(f"state must be a RecurrentState, h{pair} or None, got a {got}. Fix: {fix}")


def _check_values(name: str, z: Tensor, like: Tensor) -> None:
    if name == "t" and (z.is_floating_point() or z.dtype == torch.bool):
        raise ValueError(f"state.t must be whole numbers of samples, got {z.dtype}. Fix: t.long().")
    wanted = like.dtype if name in ("h", "c") else memory_dtype(like.dtype)
    if name != "t" and z.dtype != wanted and not autocast.is_on(like):
        raise ValueError(f"state.{name} must be {wanted}, x being {like.dtype}, got {z.dtype}. Fix: .to({wanted}).")
