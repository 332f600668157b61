"""Gates of :func:`hbnode.nn.functional.heavy_ball_memory`: what callers pass, and what the algorithms take."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Gate = Tensor | float


class Gates(NamedTuple):
    """Gates of every step, each (batch, heads, length) and possibly expanded; None leaves the gate out.

    Attributes:
        log_momentum: log μ. None is a memory without momentum, μ = 0.
        log_decay: log α. None is α = 1.
        step: s. None is 1, and only without momentum.
        write: η. None is 1.
    """

    log_momentum: Tensor | None
    log_decay: Tensor | None
    step: Tensor | None
    write: Tensor | None


def read_gates(
    log_momentum: Gate | None,
    log_decay: Gate | None,
    step: Gate | None,
    write: Gate | None,
    like: Tensor,
    ignored: Tensor | None,
) -> Gates:
    """Check the gates and bring them into one form.

    Arguments:
        log_momentum: as the caller passed it.
        log_decay: likewise.
        step: likewise.
        write: likewise.
        like: (batch, heads, length), with the dtype and device that the gates take.
        ignored: (batch, 1, length), True where the state is frozen.
    """

    def read(gate: Gate | None, name: str) -> Tensor | None:
        found = _read(gate, name, like)
        return found if found is None or ignored is None else found.masked_fill(ignored, 0.0)

    momentum, decay = read(log_momentum, "log_momentum"), read(log_decay, "log_decay")
    stepped, written = read(step, "step"), read(write, "write")
    if stepped is None and momentum is not None:
        stepped = -torch.expm1(momentum)  # 0 where ignored
    return Gates(momentum, decay, stepped, written)


def _read(gate: Gate | None, name: str, like: Tensor) -> Tensor | None:
    """A gate as (batch, heads, length)."""
    if gate is None:
        return None
    if not isinstance(gate, Tensor):
        return like.new_full((), _number(gate, name)).expand(like.shape)
    batch, heads, length = like.shape
    shape = tuple(gate.shape)
    # a comparison of (batch, heads, length) with (heads,) would compare batch with heads, in exported programs too
    fits = gate.dim() == 0 or (gate.dim() == 1 and shape == (heads,))
    if not fits and not (gate.dim() == 3 and _expands(shape, (batch, heads, length))):
        raise ValueError(
            f"{name} must be (batch, heads, length) = {(batch, heads, length)}, (heads,) = {(heads,)} or a number, got "
            f"shape {shape}. Fix: {_shape_fix(name, shape, (batch, heads, length))}."
        )
    if not gate.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {gate.dtype}. Fix: {name}.to({like.dtype}).")
    gate = gate.to(like.dtype)
    return (gate.unsqueeze(-1) if gate.dim() == 1 else gate).expand(like.shape)


def _expands(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(shape, wanted, strict=True))


def _shape_fix(name: str, shape: tuple[int, ...], wanted: tuple[int, int, int]) -> str:
    batch, heads, length = wanted
    if shape == (batch, length, heads):
        return f"{name}.transpose(1, 2)"
    if shape == (batch, heads, length, 1):
        return f"{name}.squeeze(-1)"
    return "one gate for each step, for each head, or for all"


def _number(gate: object, name: str) -> float:
    try:
        number = float(gate)  # type: ignore[arg-type]  # what is no number is refused below
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a tensor, a number or None, got {type(gate).__name__}. Fix: a tensor (batch, heads, "
            "length)."
        ) from None
    is_log = name.startswith("log_")
    if math.isnan(number) or number == math.inf or (number == -math.inf and not is_log):
        raise ValueError(f"{name} must be finite{', or -inf' if is_log else ''}, got {number}. Fix: {name}=None.")
    if is_log and number > 0:
        raise ValueError(
            f"{name} must be the logarithm of a gate in [0, 1], so at most 0, got {number}. Fix: math.log({number})."
        )
    return number
