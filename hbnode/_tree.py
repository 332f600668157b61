"""States of solvers, which are tensors or tuples of tensors, and states of recurrent modules, which are dataclasses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from typing_extensions import dataclass_transform

from hbnode._checks import check_input
from hbnode._torch import may_look, plain

State = Tensor | tuple[Tensor, ...]
Times = Tensor | Iterable[float | Tensor]  # includes NumPy arrays


def parts(state: State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def apply(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply a function to every tensor of a state; return the results in the same structure."""
    return function(state) if isinstance(state, Tensor) else tuple(function(part) for part in state)


def last_of(trajectory: State) -> State:
    return apply(lambda part: part[-1], trajectory)


def is_finite(state: State) -> bool:
    """Return whether all elements of a state are finite.

    If the sum of the elements is finite, all elements are; this check takes a third of the time. If the sum is not
    finite, it may have overflowed, and every element is checked.
    """
    state = tuple(map(plain, (state,) if isinstance(state, Tensor) else state))
    return math.isfinite(sum(map(Tensor.sum, state))) or bool(all_finite(state))


def all_finite(state: State) -> Tensor:
    """Return a boolean scalar tensor, True if all elements of a state are finite, without reading its value."""
    return torch.stack([torch.isfinite(part).all() for part in parts(state)]).all()


def describe(state: object) -> str:
    """Return a text with the structure and shapes of a state, for error messages."""
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
        got = f"got shape {tuple(x.shape)}. Fix: x.unsqueeze(-1)"
        raise ValueError(f"augmentation needs an input of shape (batch, features, ...), {got}.")
    zeros = x.new_zeros(x.shape[0], augment, *x.shape[2:])
    return torch.cat([x, zeros], dim=1)


def like(value: State, y: State) -> State:
    """Return ``value``; raise an error if its structure, shapes or dtype differ from those of the state ``y``.

    Arguments:
        value: what the field returned, the time derivative of the state.
        y: the state.
    """
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
    """Convert ``value`` to the dtype of the state ``y`` under autocast; otherwise raise TypeError if they differ."""
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
    """The base class of the states of recurrent modules.

    A subclass is decorated with :func:`record`, which makes it a frozen dataclass. Its entries are tensors, None, other
    records, or tuples of them.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __match_args__: ClassVar[tuple[str, ...]]  # the names of the entries of the record

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self.__match_args__])

    def map(self: Kind, function: Callable[[Tensor], Tensor]) -> Kind:
        """Apply a function to every tensor; return a new state with the results."""

        def mapped(value: object) -> object:
            if isinstance(value, Tensor):
                return function(value)
            if isinstance(value, tuple):
                return tuple(map(mapped, value))
            return value.map(function) if isinstance(value, Record) else value

        return self._of({name: mapped(value) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the state's entries that are not None."""
        entries = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in entries if value is not None}

    def detach(self: Kind) -> Kind:
        """Return the state without its autograd graph, for truncated backpropagation."""
        return self.map(torch.Tensor.detach)

    def outside_inference_mode(self: Kind) -> Kind:
        """Return the state with copies of tensors made in inference mode, because autograd cannot save such tensors."""
        if not may_look() or torch.is_inference_mode_enabled():
            return self
        return self.map(lambda z: z.clone() if z.is_inference() else z)

    def to(self: Kind, *args: Any, **kwargs: Any) -> Kind:
        """Convert the tensors to another device or dtype, with the arguments of :meth:`torch.Tensor.to`.

        The entry ``t`` keeps its dtype. It is a count or a time, which another dtype may round too much.
        """

        def moved(name: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(moved(name, each) for each in value)
            if isinstance(value, Record):
                return value.to(*args, **kwargs)
            if not isinstance(value, Tensor):
                return value
            new = value.to(*args, **kwargs)
            dtype = self._dtype(name, value.dtype, new.dtype)
            return new if new.dtype == dtype else value.to(new.device, dtype)

        return self._of({name: moved(name, value) for name, value in self.as_dict().items()})

    def cpu(self: Kind) -> Kind:
        return self.to("cpu")

    @classmethod
    def _of(cls: type[Kind], entries: dict[str, Any]) -> Kind:
        return cls(**{name: entries.get(name) for name in cls.__match_args__})

    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        """Return the dtype of the entry ``name`` after :meth:`to`, given its old dtype and the requested dtype."""
        return old if name == "t" else new

    def __repr__(self) -> str:
        shown = (
            f"{name}={tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}={value!r}"
            for name, value in self.as_dict().items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass_transform(eq_default=False, frozen_default=True)
def record(kind: type[Kind]) -> type[Kind]:
    """A class decorator that makes a subclass of :class:`Record` a frozen dataclass and applies :func:`register`."""
    return register(dataclasses.dataclass(frozen=True, eq=False, repr=False)(kind))


def register(kind: type[Kind]) -> type[Kind]:
    """Register a dataclass of tensors as a pytree node and as safe for ``torch.load(weights_only=True)``; return it."""

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
