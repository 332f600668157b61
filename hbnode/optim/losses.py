"""Losses, and products with their Hessians H_L with respect to the outputs, for the Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hbnode._checks import nearest

IGNORED = -100  # the default ignore_index of torch.nn.CrossEntropyLoss


class SquaredError:
    """Half the squared error. Its Hessian with respect to the outputs is the identity."""

    class_dims = 0  # number of dimensions of the outputs that the targets lack: 1 for the classes, else 0

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError if the targets do not fit the outputs, even if broadcasting would accept them."""
        if outputs.shape != targets.shape:
            raise ValueError(
                f"the targets must have the shape of the outputs, {tuple(outputs.shape)}, got {tuple(targets.shape)}. "
                "Fix: outputs.squeeze(-1) or targets.unsqueeze(-1) if one has an extra dimension."
            )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each position, in the shape of the outputs without their class dimension, if any."""
        return (outputs - targets).square() / 2

    def hessian(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that maps a tensor z to the product H z, in which both have the shape of the outputs.

        H is the Hessian of the loss with respect to the outputs.
        """
        return lambda z: z


class BinaryCrossEntropy(SquaredError):
    """The binary cross-entropy of logits z. Its Hessian is diag(p (1 - p)), where p = sigmoid(z)."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        super().check(outputs, targets)
        if targets.numel() and not bool(((targets >= 0) & (targets <= 1)).all()):
            low, high = targets.min().item(), targets.max().item()
            raise ValueError(
                f"loss='bce' expects targets in [0, 1], got values from {low:g} to {high:g}. Fix: rescale them, or "
                "loss='mse'."
            )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")

    def hessian(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        p = torch.sigmoid(outputs.detach())
        factor = p * (1 - p)
        return lambda z: factor * z


class CrossEntropy(SquaredError):
    """The cross-entropy of logits z over the last dimension. Its Hessian is diag(p) - p p^T, where p = softmax(z)."""

    class_dims = 1

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise ValueError(
                f"loss='cross_entropy' expects class indices as targets, got {targets.dtype} of shape "
                f"{tuple(targets.shape)}. Fix: targets.argmax(-1) if they are one-hot, targets.long() if they are "
                "indices."
            )
        if outputs.dim() == 0 or targets.shape != outputs.shape[:-1]:
            is_column = targets.shape[-1:] == (1,) and targets.shape[:-1] == outputs.shape[:-1]
            fix = "outputs.movedim(1, -1) if the classes come second, as torch.nn.CrossEntropyLoss has them"
            raise ValueError(
                "loss='cross_entropy' expects outputs (cases, ..., classes) and targets (cases, ...), got outputs "
                f"{tuple(outputs.shape)} and targets {tuple(targets.shape)}. "
                f"Fix: {'targets.squeeze(-1)' if is_column else fix}."
            )
        is_valid = (targets == IGNORED) | ((targets >= 0) & (targets < outputs.shape[-1]))
        if not bool(is_valid.all()):
            raise ValueError(
                f"targets must be in [0, {outputs.shape[-1]}), one of the classes of the outputs, or {IGNORED} to be "
                f"ignored, got {int(targets[~is_valid][0])}. Fix: more outputs, or targets that start at 0."
            )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        flat = cross_entropy(outputs.flatten(0, -2), targets.flatten().long(), ignore_index=IGNORED, reduction="none")
        return flat.view(targets.shape)

    def hessian(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        p = torch.softmax(outputs.detach(), -1)
        masked = p * (targets != IGNORED).unsqueeze(-1)

        def product(z: Tensor) -> Tensor:
            scaled = masked * z
            return scaled - p * scaled.sum(-1, keepdim=True)

        return product


LOSSES: dict[str, SquaredError] = {
    "mse": SquaredError(),
    "bce": BinaryCrossEntropy(),
    "cross_entropy": CrossEntropy(),
}

# Names of torch's classes and functions for these losses, in lower case and without "loss"
_ALIASES = {
    "bce": ("bcewithlogits", "binary_cross_entropy_with_logits", "binary_cross_entropy"),
    "cross_entropy": ("crossentropy", "nll", "ce"),
}


def check_loss(loss: object) -> None:
    if isinstance(loss, str) and loss in LOSSES:
        return
    text = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    bare = text.lower().removesuffix("loss").rstrip("_")
    near = next((name for name, others in _ALIASES.items() if bare in others), None) or nearest(bare, list(LOSSES))
    fix = f"loss={near!r}" if near else "loss='mse', for instance"
    raise ValueError(f"loss must be one of {tuple(LOSSES)}, got {loss!r}. Fix: {fix}.")
