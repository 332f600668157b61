"""All parameters as one vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def flat(parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """One vector of tensors shaped like the parameters; None is zeros."""
    return torch.cat([(torch.zeros_like(p) if z is None else z).reshape(-1) for z, p in zip(parts, like, strict=True)])


def shaped(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`flat`."""
    parts = vector.split([parameter.numel() for parameter in like])
    return [part.view(parameter.shape) for part, parameter in zip(parts, like, strict=True)]


def assign(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Set the parameters. Graphs made before keep their versions, and are valid again when the values are back."""
    for parameter, part in zip(parameters, shaped(vector, parameters), strict=True):
        parameter.data.copy_(part)


@contextmanager
def assigned(parameters: Sequence[Tensor], vector: Tensor) -> Iterator[None]:
    """Set the parameters, and set them back at the end, whatever happens."""
    before = flat([parameter.data for parameter in parameters], parameters)
    try:
        assign(parameters, vector)
        yield
    finally:
        assign(parameters, before)


def check_parameters(parameters: Sequence[Tensor]) -> None:
    """Refuse what cannot be one vector of float32 or float64."""
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ValueError("a parameter is given twice. Fix: list(dict.fromkeys(parameters)), where weights are tied.")
    for parameter in parameters:
        if parameter.is_complex():
            raise ValueError(
                f"the parameters must be real, got {parameter.dtype}. Fix: parameters of their real and imaginary "
                "parts, and torch.view_as_complex in the model."
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the parameters must be float32 or float64, got {parameter.dtype}: a step weighs small changes of the "
                "loss. Fix: model.float()."
            )
        first = parameters[0]
        if parameter.dtype != first.dtype or parameter.device != first.device:
            raise ValueError(
                "the parameters must have one dtype and one device, got "
                f"{first.dtype} on {first.device} and {parameter.dtype} on {parameter.device}. Fix: model.to(...)."
            )


def check_gradient(parts: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Refuse gradients that are sparse, and name the first that is not finite."""
    for part, name in zip(parts, names, strict=True):
        if part is None:
            continue
        if part.layout != torch.strided:
            raise ValueError(f"the gradient of {name} is sparse. Fix: torch.nn.Embedding(..., sparse=False).")
        if not bool(torch.isfinite(part).all()):
            raise FloatingPointError(
                f"the gradient of {name} is not finite, though the loss is. Fix: smaller initial weights, or float64; "
                "torch.autograd.detect_anomaly() tells which operation it is."
            )
