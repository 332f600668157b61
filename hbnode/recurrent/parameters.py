"""What layers and cells have in common: their parameters, and the checks of what they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hbnode.recurrent import autocast
from hbnode.recurrent.cell_steps import CellStep, ReLUStep, TanhStep
from hbnode.recurrent.filter import is_traced
from hbnode.recurrent.rules import Rule, memory_dtype
from hbnode.recurrent.state import RecurrentState

SPACES = ("gates", "hidden")


def check_rule(rule: Rule) -> Rule:
    """A rule, or an error."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be one of hbnode.recurrent.rules, got {type(rule).__name__}. Fix: rules.Momentum()."
        )
    return rule


def check_switch(value: bool, name: str) -> bool:
    """True or False, or an error: a number here was meant for another argument."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} must be True or False, got {value!r}. Fix: pass momentum=, step_size= and the like by name; by "
            "position the arguments are torch.nn's."
        )
    return value


def check_space(space: str) -> str:
    """A name of a space, or an error."""
    if space not in SPACES:
        raise ValueError(f"momentum_space must be one of {SPACES}, got {space!r}. Fix: 'gates', as equation 9.")
    return space


def filter_width(step: CellStep, hidden_size: int, space: str) -> int:
    """The width of g, v and m."""
    return hidden_size if space == "hidden" else step.gates * hidden_size


def parameter_shapes(
    step: CellStep, input_size: int, hidden_size: int, space: str, bias: bool
) -> dict[str, tuple[int, ...]]:
    """The parameters of a cell."""
    gates, n = step.gates * hidden_size, filter_width(step, hidden_size, space)
    shapes = {"weight_ih": (n, input_size), "weight_hh": (gates, hidden_size)}
    return shapes | ({"bias_ih": (n,), "bias_hh": (gates,)} if bias else {})


def given_state(state: object, hx: object) -> object:
    """The state that was given, under our name or torch.nn's."""
    if state is not None and hx is not None:
        raise TypeError("state and hx are two names of one argument, and both were given. Fix: state alone.")
    return state if hx is None else hx


def read_state(
    state: RecurrentState | tuple[Tensor, Tensor] | Tensor | None,
    rule: Rule,
    step: CellStep,
    widths: tuple[int, int],
    places: tuple[int, ...],
    batch: tuple[int, ...],
    like: Tensor,
) -> RecurrentState:
    """A checked state with h and c; v is None at the start of a sequence.

    Arguments:
        state: what the caller gave.
        rule: what a state has to have.
        step: likewise.
        widths: of h and of v.
        places: (layers * directions,) of a layer, () of a cell.
        batch: (batch,), or () for a single sequence.
        like: a tensor of the dtype and device of the zeros.
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
    """A state of h, or of h and c, as torch.nn's layers take them."""
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


def check_weight_norm(module: nn.Module) -> None:
    """Refuse the NaN that weight_norm makes of the rows of zeros that W_hh has at first."""
    for name, made in getattr(module, "parametrizations", {}).items():
        if type(made[0]).__name__ != "_WeightNorm" or is_traced():
            continue
        if getattr(module, name).isnan().any() and made.original0.isfinite().all() and made.original1.isfinite().all():
            raise ValueError(
                f"weight_norm makes NaN of {name}: it divides by norms that are 0, and at first most rows of W_hh are "
                f"zero. Fix: torch.nn.init.orthogonal_(layer.{name}) before weight_norm(layer, {name!r})."
            )


def rnn_step(nonlinearity: str) -> CellStep:
    """The step of an Elman network."""
    steps = {"tanh": TanhStep(), "relu": ReLUStep()}
    if nonlinearity not in steps:
        raise ValueError(f"nonlinearity must be one of {tuple(steps)}, got {nonlinearity!r}. Fix: 'tanh'.")
    return steps[nonlinearity]


@torch.no_grad()
def init_gates_(module: nn.Module, names: Iterable[str], forget_bias: float = 0.0) -> None:
    """Appendices A and F: input weights orthogonal, recurrent ones with ones on the diagonal, biases 0.

    Arguments:
        module: a layer or cell.
        names: of its parameters, parametrized or not.
        forget_bias: what the forget gate of an LSTM has in each bias.
    """
    n = module.hidden_size
    for name in names:
        old = getattr(module, name)
        new = torch.zeros_like(old, dtype=torch.promote_types(old.dtype, torch.float32))
        if name.startswith("weight_ih"):
            nn.init.orthogonal_(new)
        elif name.startswith("weight_hh"):
            nn.init.eye_(new)
        elif len(new) == 4 * n:
            new[n : 2 * n] = forget_bias
        if name in module._parameters:
            old.copy_(new)
        else:
            setattr(module, name, new.to(old.dtype))
