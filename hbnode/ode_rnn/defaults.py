"""What the names of fields and cells stand for in an ODERNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from torch import nn

from hbnode import nets
from hbnode._suggestions import nearest
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE, Field

FieldName = Literal["node", "anode", "sonode", "hbnode", "ghbnode"]
CellName = Literal["gru", "rnn"]


def make_field(field: FieldName | nn.Module | Callable[[int], nn.Module], n: int) -> Field:
    """A field on states of size n."""
    if isinstance(field, str):
        if field not in _FIELDS:
            near = nearest(field, tuple(_FIELDS)) or "hbnode"
            raise ValueError(f"field must be one of {tuple(_FIELDS)}, got {field!r}. Fix: {near!r}, or give a field.")
        return _FIELDS[field](n)
    made = field if isinstance(field, nn.Module) else field(n) if callable(field) else None
    if not (isinstance(made, nn.Module) and hasattr(made, "initial_state") and hasattr(made, "readout")):
        raise TypeError(
            f"field must be a name, a field, or a function hidden_size -> field, got {type(field).__name__} that gave "
            f"{type(made).__name__}. Fix: field=lambda n: hbnode.HBNODE(net(n))."
        )
    return cast(Field, made)  # or what has its methods


_FIELDS: dict[str, Callable[[int], Field]] = {
    "node": lambda n: NODE(_net(n, n)),
    "anode": lambda n: ANODE(_net(n, n), augment=n // 2),
    "sonode": lambda n: SONODE(_net(2 * n, n)),
    "hbnode": lambda n: HBNODE(_net(n, n)),
    "ghbnode": lambda n: GHBNODE(_net(n, n)),
}


def _net(inputs: int, n: int) -> nn.Module:
    return nets.MLP(inputs, [n], n, activation=nn.Tanh)


def make_cell(cell: CellName | nn.Module | Callable[[int, int], nn.Module], input_size: int, size: int) -> nn.Module:
    """A cell on states of a size."""
    kinds = {"gru": nn.GRUCell, "rnn": nn.RNNCell}
    if isinstance(cell, str) and cell in kinds:
        return kinds[cell](input_size, size)
    made = cell(input_size, size) if callable(cell) and not isinstance(cell, nn.Module) else cell
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"cell must be one of {tuple(kinds)}, a module cell(x, s), or a function (input_size, state_size) -> "
            f"module, got {cell!r}. Fix: 'gru'."
        )
    return made
