"""What must be the same when a backward pass evaluates a field again: autocast, mode, dropout masks, random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hbnode.nets import SolveDropout

_REFUSED_DROPOUT = (
    "{name} is in training mode inside a solve, where each evaluation would draw another mask and no step size would "
    "meet the tolerance. Fix: hbnode.nets.SolveDropout(p) draws one mask for the whole solve; or {fix}"
)


@contextmanager
def solving(field: Callable) -> Iterator[None]:
    """Refuse random layers, and let every :class:`~hbnode.nets.SolveDropout` draw a new mask and keep it."""
    drawing = []
    for module in field.modules() if isinstance(field, nn.Module) else ():
        if isinstance(module, SolveDropout):
            drawing.append(module)
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise ValueError(_REFUSED_DROPOUT.format(name=type(module).__name__, fix="move it out of func."))
    for module in drawing:
        module.mask, module.solving = None, True
    try:
        yield
    finally:
        for module in drawing:
            module.solving = False


def refuse_changing_statistics(field: Callable, gradient: str) -> None:
    """Refuse batch normalisation whose running statistics a replay would change twice."""
    if isinstance(field, nn.Module):
        for module in field.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats:
                raise ValueError(
                    f"{type(module).__name__} is in training mode inside a solve, and gradient={gradient!r} would "
                    "update its running statistics once more for each evaluation of the backward pass. "
                    "Fix: put it in eval mode, use GroupNorm, or gradient='direct'."
                )


class Replay:
    """The conditions of a forward pass, to be restored in its backward pass.

    Arguments:
        field: whose modes and masks are remembered, as they are now.
        device_type: of the state.
    """

    def __init__(self, field: Callable, device_type: str) -> None:
        modules = list(field.modules()) if isinstance(field, nn.Module) else []
        self.modes = [(module, module.training) for module in modules]
        self.masks = [(module, module.mask, True) for module in modules if isinstance(module, SolveDropout)]
        self.autocast = autocast_of(device_type)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which modes and masks are those of the forward pass. Autocast is for the evaluations alone."""
        now = [(module, module.training) for module, _ in self.modes]
        masks = [(module, module.mask, module.solving) for module, _, _ in self.masks]
        try:
            _restore(self.modes, self.masks)
            yield
        finally:
            _restore(now, masks)


def _restore(modes: list[tuple[nn.Module, bool]], masks: list[tuple[SolveDropout, Tensor | None, bool]]) -> None:
    for module, mode in modes:
        if module.training != mode:
            module.training = mode
    for module, mask, solving_now in masks:
        module.mask, module.solving = mask, solving_now


def autocast_of(device_type: str) -> Callable[[], AbstractContextManager]:
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
    return states if device.type != "cuda" else (*states, torch.cuda.get_rng_state(device))


@contextmanager
def set_random_state(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Draw from the given state, and put the generators back where they were; None leaves them alone."""
    if states is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], device)
        yield
