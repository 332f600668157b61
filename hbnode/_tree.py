"""States as trees of tensors: tuples of a solve, and named states that recurrent modules hand on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from typing_extensions import dataclass_transform

from hbnode._checks import check_input
from hbnode._torch import plain

State = Tensor | tuple[Tensor, ...]
Times = Tensor | Iterable[float | Tensor]  # an array of numpy is an iterable too


def parts(state: State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def apply(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Return the function of every tensor of a state, in the structure of the state."""
    return function(state) if isinstance(state, Tensor) else tuple(function(part) for part in state)


def last_of(trajectory: State) -> State:
    return apply(lambda part: part[-1], trajectory)


def is_finite(state: State) -> bool:
    """Return whether all elements are. A sum that is finite says so at a third of the price; that of large ones may not
    be.
    """
    state = tuple(map(plain, (state,) if isinstance(state, Tensor) else state))
    return math.isfinite(sum(map(Tensor.sum, state))) or bool(all_finite(state))


def all_finite(state: State) -> Tensor:
    """Return whether all elements are, without a synchronisation."""
    return torch.stack([torch.isfinite(part).all() for part in parts(state)]).all()


def describe(state: object) -> str:
    """Structure and shapes, for messages."""
    if isinstance(state, Tensor):
        return f"shape {tuple(state.shape)}"
    if isinstance(state, tuple):
        return "(" + ", ".join(describe(part) for part in state) + ")"
    return f"type {type(state).__name__}"


def append_zeros(x: Tensor, augment: int) -> Tensor:
    """Append ``augment`` zeros along dimension 1: (batch, d, ...) -> (batch, d + augment, ...)."""
    check_input(x, "the input")
    if augment == 0:
        return x
    if x.dim() < 2:
        raise ValueError(
            f"augmentation appends zeros along dimension 1, so it needs an input of shape (batch, features, ...); "
            f"got shape {tuple(x.shape)}. Fix: x.unsqueeze(-1)."
        )
    zeros = x.new_zeros(x.shape[0], augment, *x.shape[2:])
    return torch.cat([x, zeros], dim=1)


def like(value: State, y: State) -> State:
    """Return the field's value checked to have the structure, shapes and dtype of the state."""
    if isinstance(y, Tensor):
        if isinstance(value, Tensor) and value.shape == y.shape:
            return cast(value, y)
    elif isinstance(value, tuple) and len(value) == len(y):
        pairs = list(zip(value, y, strict=True))
        if all(isinstance(v, Tensor) and v.shape == part.shape for v, part in pairs):
            return tuple(cast(v, part) for v, part in pairs)
    raise ValueError(
        f"the field returned {describe(value)} for a state of {describe(y)}; expected the same. "
        "Fix: return d state/dt with the structure and shapes of the state."
    )


def cast(value: Tensor, y: Tensor) -> Tensor:
    """``value`` in the dtype of the state: autocast may have computed it in a smaller one."""
    if value.dtype == y.dtype:
        return value
    if torch.is_autocast_enabled(y.device.type):
        return value.to(y.dtype)
    raise TypeError(
        f"the field returned {value.dtype} for a state of {y.dtype}; expected the same dtype. "
        "Fix: convert the field (field.double(), field.float()) or the input to one dtype."
    )


Kind = TypeVar("Kind", bound="Record")


class Record:
    """Base of the states: a frozen dataclass of tensors, None and other records, registered by :func:`record`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __match_args__: ClassVar[tuple[str, ...]]  # the names of the entries

    def map(self: Kind, function: Callable[[Tensor], Tensor]) -> Kind:
        """Return the same with a function applied to every tensor."""

        def mapped(value: object) -> object:
            if isinstance(value, Tensor):
                return function(value)
            return value.map(function) if isinstance(value, Record) else value

        return self._of({name: mapped(value) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """Return the entries that there are, by name."""
        entries = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in entries if value is not None}

    def detach(self: Kind) -> Kind:
        """Return the same without its history, for truncated backpropagation."""
        return self.map(torch.Tensor.detach)

    def to(self: Kind, *args: Any, **kwargs: Any) -> Kind:
        """Return the same on another device or in another dtype, with the arguments of :meth:`torch.Tensor.to`.

        ``t`` changes its device alone: it counts samples, or is a time that float32 may be too coarse for.
        """
        moved = {}
        for name, value in self.as_dict().items():
            if isinstance(value, Record):
                value = value.to(*args, **kwargs)
            elif isinstance(value, Tensor):
                there = value.to(*args, **kwargs)
                dtype = self._dtype(name, value.dtype, there.dtype)
                value = there if there.dtype == dtype else value.to(there.device, dtype)
            moved[name] = value
        return self._of(moved)

    def cpu(self: Kind) -> Kind:
        return self.to("cpu")

    @classmethod
    def _of(cls: type[Kind], entries: dict[str, Any]) -> Kind:
        return cls(**{name: entries.get(name) for name in cls.__match_args__})

    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        """That of an entry after :meth:`to`."""
        return old if name == "t" else new

    def __repr__(self) -> str:
        shown = (
            f"{name}={tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}={value!r}"
            for name, value in self.as_dict().items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass_transform(eq_default=False, frozen_default=True)
def record(kind: type[Kind]) -> type[Kind]:
    """Make a subclass of :class:`Record` known to torch's transforms and to ``torch.load(weights_only=True)``."""
    kind = dataclasses.dataclass(frozen=True, eq=False, repr=False)(kind)

    def flatten(value: Kind) -> tuple[list[Any], list[str]]:
        entries = value.as_dict()
        return list(entries.values()), list(entries)

    def flatten_with_keys(value: Kind) -> tuple[list[Any], list[str]]:
        children, names = flatten(value)
        return [(_pytree.GetAttrKey(name), child) for name, child in zip(names, children, strict=True)], names

    def unflatten(children: Iterable[Any], names: list[str]) -> Kind:
        return kind._of(dict(zip(names, children, strict=True)))

    _pytree.register_pytree_node(
        kind, flatten, unflatten, serialized_type_name=f"hbnode.{kind.__name__}", flatten_with_keys_fn=flatten_with_keys
    )
    torch.serialization.add_safe_globals([kind])
    return kind
