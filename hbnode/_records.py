"""States that recurrent modules hand on: tensors by name that move, detach, load and are transformed together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from typing_extensions import dataclass_transform

Kind = TypeVar("Kind", bound="Record")


class Record:
    """Base of the states: a frozen dataclass of tensors, None and other records, registered by :func:`record`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __match_args__: ClassVar[tuple[str, ...]]  # the names of the entries

    def map(self: Kind, function: Callable[[Tensor], Tensor]) -> Kind:
        """The same with a function applied to every tensor."""

        def mapped(value: object) -> object:
            if isinstance(value, Tensor):
                return function(value)
            return value.map(function) if isinstance(value, Record) else value

        return self._of({name: mapped(value) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """The entries that there are, by name."""
        entries = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in entries if value is not None}

    def detach(self: Kind) -> Kind:
        """The same without its history, for truncated backpropagation."""
        return self.map(torch.Tensor.detach)

    def to(self: Kind, *args: Any, **kwargs: Any) -> Kind:
        """The same on another device or in another dtype, with the arguments of :meth:`torch.Tensor.to`.

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
