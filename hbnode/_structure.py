"""The modules of a field, walked once and kept with it.

A solve looks at all modules of its field: for dropout, for the tensors that its backward pass must find again, for what
f may depend on. Which modules there are changes rarely, so one of hbnode's fields keeps the list. What must be looked
at in each solve is looked at in each solve, and is cheap:

- the children of each module, by identity: a module that was assigned, added or removed makes a new list;
- parameters, buffers and their versions, modes, hooks and masks, which any code may change at any time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hbnode import _torch_internals
from hbnode._tracing import is_tracing
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE, Field
from hbnode.nets import MLP, ConvNet, SolveDropout

_LAYERS: dict[
    type, Callable
] = {  # of torch and networks of hbnode, whose values depend on nothing else, with what their call does
    kind: kind.forward
    for kind in (*vars(nn).values(), MLP, ConvNet)
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and (kind in (MLP, ConvNet) or kind.__module__.startswith("torch.nn.modules."))
}
_METHODS = ("forward", "evaluate", "force", "friction")
_FIELDS: dict[type, list[Any]] = {  # with what they do
    kind: [getattr(kind, name, None) for name in _METHODS] for kind in (HBNODE, GHBNODE, NODE, ANODE, SONODE)
}
_PLAIN = (HBNODE, NODE, ANODE, SONODE)  # those whose values depend on func and on parameters only
_MOST_SOLVES = 16  # settings, shapes and times for which a solve is kept prepared


def is_as_torch_has_it(module: nn.Module) -> bool:
    """Whether the class of a module is torch's or one of hbnode's networks, and its call what it was."""
    kind = type(module)
    return kind in _LAYERS and _LAYERS[kind] is kind.forward


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer as torch or hbnode has it."""
    return is_as_torch_has_it(module) and not any(isinstance(value, Tensor) for value in module.__dict__.values())


class Structure:
    """The modules of a field, which it holds weakly: it is kept with the field.

    Attributes:
        masks: those that draw a mask for a solve.
        random: torch's own dropout layers, which no solve takes in training mode.
        solves: what solves of the field have prepared, by their keys.
    """

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._field = weakref.ref(modules[0]) if modules else lambda: None
        self._others = modules[1:]
        self.masks = tuple(module for module in modules if isinstance(module, SolveDropout))
        self.random = tuple(module for module in modules if isinstance(module, nn.modules.dropout._DropoutNd))
        self.solves: dict[Any, Any] = {}
        self._scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
        self._children = [(module._modules, tuple(module._modules.values())) for module in modules]
        self._are_layers = all(map(_is_layer, self._others))
        self._attributes = [len(module.__dict__) for module in modules]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All of them, the field first."""
        field = self._field()
        return self._others if field is None else (field, *self._others)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Those that are fields of hbnode."""
        return tuple([module for module in self.modules if isinstance(module, Field)])

    def is_of(self, field: nn.Module) -> bool:
        """Whether these are still the modules of a field."""
        return self._field() is field and all(tuple(now.values()) == then for now, then in self._children)

    def tensors(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """The parameters and buffers, each with the dict that holds it and its name."""
        kept = [own for module in self.modules for own in (module._parameters, module._buffers)]
        if self._scripted:  # copies of the dicts of those of TorchScript, whose stay the same
            kept = [own for module in self.modules for own in _tensors_of(module)]
        return [(own, name, tensor) for own in kept for name, tensor in own.items() if tensor is not None]

    def parameters(self) -> Iterator[Tensor]:
        """The parameters, or what ``functional_call`` lent in their place."""
        if self._scripted:
            yield from self.modules[0].parameters()
        for module in () if self._scripted else self.modules:
            yield from (tensor for tensor in module._parameters.values() if tensor is not None)

    def has_buffers(self) -> bool:
        """Whether there are buffers, which an evaluation may change."""
        return any(tensor is not None for module in self.modules for tensor in module._buffers.values())

    def is_closed(self) -> bool:
        """Whether the field can depend on its parameters and buffers only, because it is made of layers known to."""
        return type(self._field()) in _PLAIN and self.is_as_written()

    def is_as_written(self) -> bool:
        """Whether the field is one of hbnode's around layers of torch and hbnode, and nothing of them was replaced."""
        modules = self.modules
        field = modules[0] if modules else None
        if type(field) not in _FIELDS or not isinstance(field, Field) or not isinstance(field.func, nn.Module):
            return False
        if not self._are_layers or not self.is_of(field) or _torch_internals.has_global_hooks():
            return False
        if not field.__dict__.keys().isdisjoint(_METHODS):
            return False
        if [getattr(type(field), name, None) for name in _METHODS] != _FIELDS[type(field)]:
            return False
        for module, count in zip(modules, self._attributes, strict=True):
            own = module.__dict__
            if len(own) != count or "forward" in own:  # a weight may be a plain tensor by now
                return False
            if module is not field and not is_as_torch_has_it(module):
                return False
            if module._forward_hooks or module._forward_pre_hooks:
                return False
        return True

    def prepared(self, key: Any, make: Callable[[], Any]) -> Any:
        """What a solve of these settings and shapes needs, made at its first time."""
        kept = self.solves.get(key)
        if kept is None:
            kept = make()
            if len(self.solves) >= _MOST_SOLVES:
                self.solves.pop(next(iter(self.solves)), None)
            self.solves[key] = kept
        return kept


_NONE = Structure(())


def structure_of(field: Callable) -> Structure:
    """The modules of a field now; those of one of hbnode's fields are walked only when they have changed."""
    if not isinstance(field, nn.Module):
        return _NONE
    kept: Structure | None = field.__dict__.get("_structure")
    if kept is not None and kept.is_of(field):
        return kept
    structure = Structure(tuple(field.modules()))
    if "_structure" in field.__dict__ and not structure._scripted:
        field.__dict__["_structure"] = structure
    return structure


def parameters_of(field: nn.Module) -> Iterator[Tensor]:
    """The parameters of a field, in graphs of torch.compile too."""
    return field.parameters() if is_tracing() else structure_of(field).parameters()


def dropouts_of(field: Callable) -> tuple[tuple[SolveDropout, ...], tuple[nn.modules.dropout._DropoutNd, ...]]:
    """The modules of a field that draw a mask for a solve, and torch's own dropout, in graphs of torch.compile too."""
    if not is_tracing():
        structure = structure_of(field)
        return structure.masks, structure.random
    modules = list(field.modules()) if isinstance(field, nn.Module) else []
    masks = tuple(module for module in modules if isinstance(module, SolveDropout))
    return masks, tuple(module for module in modules if isinstance(module, nn.modules.dropout._DropoutNd))


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(module, torch.jit.ScriptModule):
        return dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
    return module._parameters, module._buffers
