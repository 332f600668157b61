"""Constants of a module that its ``state_dict`` holds and that no change of dtype rounds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class KeepsConstants(nn.Module):
    """Keeps Python floats and float64 tensors as constants: in the ``state_dict``, but neither cast nor learned.

    A constant is not a buffer, because ``.half()`` or ``.float()`` would round it. Its attribute holds a float, or a
    tensor on the CPU; of a tensor there is a copy on the module's device, always float64. Version 1 of a ``state_dict``
    lacks the constants: it is loaded with a warning, and the module keeps its own.
    """

    _version = 2
    defaults: ClassVar[dict[str, float]] = {}  # what version 1 stood for, where that goes without saying
    renamed: ClassVar[dict[str, str]] = {}  # keys of version 1

    def constants(self) -> dict[str, str]:
        """The attribute of each constant, by its key in the ``state_dict``."""
        return {}

    def keep(self, attribute: str, value: float | Tensor) -> None:
        """Set a constant, and the copy of a tensor."""
        setattr(self, attribute, value)
        if isinstance(value, Tensor):
            before = self._buffers.get(attribute + "_there")
            copy = value.to(value.device if before is None else before.device, copy=True)
            self.register_buffer(attribute + "_there", copy, persistent=False)
            self.__dict__[attribute + "_copy"] = copy

    def kept(self, attribute: str) -> float | Tensor:
        """A constant, on the module's device."""
        there = self._buffers.get(attribute + "_there")  # which functional_call may have lent
        return getattr(self, attribute) if there is None else there

    def on_host(self, attribute: str, value: float | Tensor) -> float | Tensor:
        """The constant on the host, which waits for no device, if ``value`` is its copy; else ``value``."""
        return getattr(self, attribute) if value is self.__dict__.get(attribute + "_copy") else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsConstants:
        super()._apply(fn, recurse)
        for attribute in self.constants().values():
            self.keep(attribute, getattr(self, attribute))  # a cast must not round it, nor to_empty lose it
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, attribute in self.constants().items():
            destination[prefix + name] = _tensor(getattr(self, attribute)).clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        constants = {prefix + name: attribute for name, attribute in self.constants().items()}
        for before, name in self.renamed.items():
            if prefix + before in state_dict and prefix + name in constants:
                state_dict = {**state_dict, prefix + name: state_dict[prefix + before]}
                del state_dict[prefix + before]
        others = {key: value for key, value in state_dict.items() if key not in constants}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for key, attribute in constants.items():
            if key in state_dict:
                self._load_constant(key, attribute, state_dict[key], error_msgs)
            elif (local_metadata.get("version") or 1) >= 2:
                missing_keys.append(key)
            elif self.defaults.get(attribute) != getattr(self, attribute):
                warnings.warn(
                    f"the state_dict does not hold the constant {key!r}: it was saved by an earlier version, or by "
                    "another module. "
                    f"{type(self).__name__} keeps its own, {_tensor(getattr(self, attribute)).tolist()}. "
                    "Fix: make sure that it is the one of the training, and save the state_dict again.",
                    stacklevel=2,
                )

    def _load_constant(self, key: str, attribute: str, value: Tensor, error_msgs: list[str]) -> None:
        value, own = torch.as_tensor(value).detach(), _tensor(getattr(self, attribute))
        if value.shape != own.shape:
            error_msgs.append(
                f"the constant {key!r} has shape {tuple(value.shape)} in the state_dict and {tuple(own.shape)} here. "
                "Fix: make the module with constants of the shape of the checkpoint's."
            )
        elif not value.is_meta and not torch.equal(value.cpu(), own.to(value.dtype)):  # equal if rounded: keep our own
            value = value.to("cpu", torch.float64)
            self.keep(attribute, value.clone() if value.dim() else value.item())


def _tensor(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")
