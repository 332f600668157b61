"""What must be the same when a backward pass evaluates a field again: autocast, mode, dropout masks, random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._structure import dropouts_of, structure_of
from hbnode.fields import Field
from hbnode.nets import SolveDropout
from hbnode.signal import checking_later

_REFUSED_DROPOUT = (
    "{name} is in training mode inside a solve, where each evaluation would draw another mask and no step size would "
    "meet the tolerance. Fix: hbnode.nets.SolveDropout(p) draws one mask for the whole solve; or {fix}"
)


@contextmanager
def solving(field: Callable) -> Iterator[None]:
    """Refuse random layers, and let every :class:`~hbnode.nets.SolveDropout` draw a new mask and keep it."""
    masks, random = dropouts_of(field)
    for layer in random:
        if layer.training and layer.p > 0:
            raise ValueError(_REFUSED_DROPOUT.format(name=type(layer).__name__, fix="move it out of func."))
    drawing = [module for module in masks if not module.solving]  # else it is of a solve around this one
    for module in drawing:
        module.mask, module.solving = None, True
    try:
        with checking_later():
            yield
    finally:
        for module in drawing:
            module.solving = False


class ForwardContext:
    """The conditions of a forward pass, to be restored in its backward pass.

    Those are the parameters and buffers that the field's modules had, be it those that ``functional_call`` lent them,
    their modes, the masks of :class:`~hbnode.nets.SolveDropout`, and f itself.

    Arguments:
        field: as it is now; its masks are remembered by :meth:`remember_masks`, when the solve has drawn them.
    """

    def __init__(self, field: Callable) -> None:
        self.structure = structure_of(field)
        self.modes = [(module, module.training) for module in self.structure.modules]
        self.functions = [(module, module.func) for module in self.structure.fields]
        self.tensors = self.structure.tensors()
        self.versions = [None if tensor.is_inference() else tensor._version for _, _, tensor in self.tensors]
        self.masks: list[tuple[SolveDropout, Tensor | None, bool]] = []

    @property
    def parameters(self) -> list[Tensor]:
        """All that the modules had."""
        return [tensor for kept, _, tensor in self.tensors if tensor.requires_grad or isinstance(tensor, nn.Parameter)]

    def changed(self) -> bool:
        """Whether a tensor of the modules was replaced or changed in place since."""
        return any(
            kept.get(name) is not tensor or (version is not None and tensor._version != version)
            for (kept, name, tensor), version in zip(self.tensors, self.versions, strict=True)
        )

    def remember_masks(self) -> None:
        """Remember the masks that the solve has drawn."""
        self.masks = [(module, module.mask, True) for module in self.structure.masks]

    def is_current(self) -> bool:
        """Whether all is now as in the forward pass, so that the context would change nothing."""
        for module, mode in self.modes:
            if module.training != mode:
                return False
        for kept, name, tensor in self.tensors:
            if kept.get(name) is not tensor:
                return False
        return not self.masks and all(field.func is func for field, func in self.functions)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which all is as in the forward pass. Autocast is for the evaluations alone."""
        modes = [(module, module.training) for module, _ in self.modes]
        masks = [(module, module.mask, module.solving) for module, _, _ in self.masks]
        tensors = [(kept, name, kept.get(name)) for kept, name, _ in self.tensors]
        functions = [(module, module.func) for module, _ in self.functions]
        try:
            _restore(self.modes, self.masks, self.tensors, self.functions)
            with checking_later():
                yield
        finally:
            _restore(modes, masks, tensors, functions)


def _restore(
    modes: list[tuple[nn.Module, bool]],
    masks: list[tuple[SolveDropout, Tensor | None, bool]],
    tensors: Sequence[tuple[dict[str, Any], str, Tensor | None]],
    functions: Sequence[tuple[Field, Callable[..., Tensor]]],
) -> None:
    for module, mode in modes:
        if module.training != mode:
            module.training = mode
    for module, mask, solving_now in masks:
        module.mask, module.solving = mask, solving_now
    for kept, name, tensor in tensors:
        if kept.get(name) is not tensor:
            kept[name] = tensor
    for field, func in functions:
        if field.func is not func:
            if isinstance(field.func, nn.Module) != isinstance(func, nn.Module):
                del field.func  # which torch keeps in another place
            field.func = func


def autocast_of(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of contexts that repeat the autocast in force now, in the backward pass too.

    Without its cache, which would hand out copies of the weights made before the evaluation.
    """
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, cache_enabled=False)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The state of the generators that an evaluation on the device may draw from."""
    states = (torch.get_rng_state(),)
    own = None if device.type == "cpu" else getattr(torch, device.type, None)
    return (*states, own.get_rng_state(device)) if own is not None and hasattr(own, "get_rng_state") else states


@contextmanager
def set_random_state(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Draw from the given state, and put the generators back where they were; None leaves them alone."""
    if states is None:
        yield
        return
    now = random_state(device)
    try:
        restore_random_state(states, device)
        yield
    finally:
        restore_random_state(now, device)


def restore_random_state(states: tuple[Tensor, ...], device: torch.device) -> None:
    """Put the generators into this state."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        getattr(torch, device.type).set_rng_state(states[1], device)
