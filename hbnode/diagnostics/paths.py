"""The states that a block passes through, without a change to the block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hbnode._tree import State, parts
from hbnode.nfe import NFE
from hbnode.nn.blocks import ODEBlock
from hbnode.solve.odeint import solve
from hbnode.solve.settings import Settings

POINTS = 200  # output times where none are given


@contextmanager
def evaluating(field: nn.Module | Callable) -> Iterator[None]:
    """Evaluation mode, and afterwards the modes that there were; a function has none."""
    modes = [(part, part.training) for part in field.modules()] if isinstance(field, nn.Module) else []
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def with_graphs() -> Iterator[None]:
    """Gradients, also where the caller has switched them off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def check_block(block: nn.Module, caller: str) -> ODEBlock:
    """The block, if it is one."""
    if not isinstance(block, ODEBlock):
        raise TypeError(
            f"{caller} expected an ODEBlock, got {type(block).__name__}. "
            "Fix: pass the block inside of a model; ODEBlock(field) makes one of a field."
        )
    return block


def as_input(block: nn.Module, x: object) -> Tensor:
    """An input without its graph; an array or a list becomes a tensor of the block's dtype and device."""
    if x is None:
        raise TypeError(f"{type(block).__name__} was given without an input. Fix: pass x after the block.")
    if isinstance(x, Tensor):
        return x.detach()
    dtype, device = dtype_and_device(block.field)
    return torch.as_tensor(x).to(device=device, dtype=dtype)


def dtype_and_device(field: object) -> tuple[torch.dtype, torch.device | None]:
    """Those of the parameters of a field's f, else of the field; without any, the default dtype and no device."""
    for module in (getattr(field, "func", None), field):
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if parameter.is_floating_point():
                return parameter.dtype, parameter.device
    return torch.get_default_dtype(), None


def schedule(block: ODEBlock, t: Tensor | Sequence[float] | None, points: int = POINTS) -> tuple[Tensor, Settings]:
    """Output times, and the settings to solve with.

    Without times of the caller's, they are the block's own grid if it solves on one, else equally spaced.
    """
    settings = block.settings()
    if t is not None:
        times = torch.as_tensor(t, dtype=torch.float64).detach().cpu()
        if times.dim() != 1 or len(times) < 2:
            raise ValueError(
                f"t must hold two or more times (T,), got shape {tuple(times.shape)}. Fix: [0.0, 0.5, 1.0]."
            )
        return times, settings
    if settings.steps is not None:  # a grid: n steps between two outputs become one between each two of n + 1 outputs
        points = settings.steps + 1
        settings = dataclasses.replace(settings, steps=1)
    return torch.linspace(*block.t_span, points, dtype=torch.float64), settings


def solved(block: ODEBlock, state: State, t: Tensor | Sequence[float], settings: Settings) -> State:
    """The states at the times, without an effect on the block's count."""
    return solve(block.field, state, t, settings, NFE())


def states(
    block: ODEBlock, x: object, t: Tensor | Sequence[float] | None, points: int = POINTS
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Times (T,), and the parts of the state, h or h and m, at these times, each (T, batch, ...)."""
    times, settings = schedule(block, t, points)
    with torch.no_grad(), evaluating(block):
        trajectory = solved(block, block.start(as_input(block, x)), times, settings)
    return times, parts(trajectory)
