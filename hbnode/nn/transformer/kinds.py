"""The attention modules and connections by the names that layers take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from hbnode._checks import nearest
from hbnode.nn.attention.base import MultiheadBase
from hbnode.nn.attention.multihead import HeavyBallMemory, MomentumAttention
from hbnode.nn.attention.softmax import SoftmaxAttention
from hbnode.nn.transformer.connections import CONNECTIONS, Connection

AttentionName = Literal["momentum", "linear", "softmax", "heavy_ball", "gated_delta", "gated_linear"]
ConnectionName = Literal["residual", "momentum", "momentum_state", "adaptive", "heavy_ball", "nesterov"]
MakeAttention = Callable[..., MultiheadBase[Any]]
MakeConnection = Callable[[], Connection]

ATTENTIONS: dict[str, tuple[MakeAttention, dict[str, Any]]] = {
    "momentum": (MomentumAttention, {}),
    "linear": (MomentumAttention, {"momentum": 0.0}),
    "softmax": (SoftmaxAttention, {}),
    "heavy_ball": (HeavyBallMemory, {}),
    "gated_delta": (HeavyBallMemory, {"momentum": False}),
    "gated_linear": (HeavyBallMemory, {"momentum": False, "delta": False}),
}


def make_attention(
    kind: AttentionName | MakeAttention, embed_dim: int, num_heads: int, options: Mapping[str, Any], **layout: Any
) -> MultiheadBase[Any]:
    """An attention module by its name, or from a function that takes what the modules' constructors take."""
    if isinstance(kind, nn.Module):
        raise TypeError(_one_for_each("attention", kind))
    if not callable(kind) and kind not in ATTENTIONS:
        raise ValueError(_unknown("attention", kind, tuple(ATTENTIONS)))
    make, own = (kind, {}) if callable(kind) else ATTENTIONS[kind]
    fixed = own.keys() & options.keys()
    if fixed:
        raise ValueError(
            f"attention={kind!r} has {', '.join(f'{x}={own[x]!r}' for x in sorted(fixed))}, which attention_options "
            f"cannot change. Fix: attention={'momentum' if make is MomentumAttention else 'heavy_ball'!r}."
        )
    makes = make.func if isinstance(make, functools.partial) else make
    if makes is HeavyBallMemory and not layout.pop("causal"):
        raise ValueError(
            f"attention={kind!r} reads its input in order, so it cannot see later tokens or another sequence. "
            "Fix: causal=True, or 'momentum', 'linear' or 'softmax'."
        )
    if makes in (MomentumAttention, HeavyBallMemory):
        layout.pop("dropout")  # of attention weights, which linear-time attention never forms
    return make(embed_dim, num_heads, **layout, **own, **options)


def make_connection(kind: ConnectionName | MakeConnection, momentum: float | None) -> Connection:
    """A connection by its name, with a momentum of its own or its class's default, or from a function."""
    if isinstance(kind, nn.Module):
        raise TypeError(_one_for_each("connection", kind))
    if callable(kind):
        if momentum is not None:
            raise ValueError(
                f"connection_momentum={momentum!r} is for connections by name, got a function. Fix: leave it out, and "
                f"let the function set it, as lambda: hbnode.nn.transformer.MomentumConnection({momentum!r})."
            )
        return kind()
    if kind not in CONNECTIONS:
        raise ValueError(_unknown("connection", kind, tuple(CONNECTIONS)))
    if kind in ("residual", "adaptive") or momentum is None:
        if momentum is not None:
            raise ValueError(f"connection={kind!r} takes no connection_momentum, got {momentum!r}. Fix: leave it out.")
        return CONNECTIONS[kind]()
    make: Callable[..., Connection] = CONNECTIONS[kind]
    return make(momentum=momentum)


def _one_for_each(what: str, module: nn.Module) -> str:
    name = type(module).__name__
    return f"{what} must be a name or a function that makes one for each layer, got a {name}. Fix: {what}={name}."


def _unknown(what: str, kind: object, names: tuple[str, ...]) -> str:
    near = nearest(kind, names)
    fix = f"{what}={near!r}" if near else f"one of {names}, or a function that makes one"
    return f"{what} must be one of {names}, got {kind!r}. Fix: {fix}."
