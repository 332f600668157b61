"""Dropout with one mask for a solve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SolveDropout(nn.Module):
    r"""Dropout for the inside of a field: one mask for each solve, instead of one for each evaluation.

    A field with an ordinary dropout is another function at each evaluation; it has no solution, and an adaptive
    solver chases its noise. Here the mask is drawn at the first evaluation of a solve and kept to its end, its
    backward pass included. Used twice in a network on inputs of one shape, it has one mask for both.

    In evaluation mode it does nothing; called outside of a solve it draws a mask each time. One module serves one solve
    at a time: give threads copies of their own.

    Arguments:
        p: probability with which an element is set to 0; the others are divided by 1 - p. Default: 0.5.

    Raises:
        ValueError: if p is not in [0, 1).
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p must be a probability in [0, 1), got {p}. Fix: SolveDropout(0.1).")
        self.p = float(p)
        self.solve: dict[str, Tensor] | None = None  # the mask of the solve that runs, put here by it

    def forward(self, x: Tensor) -> Tensor:
        """``x`` times the solve's mask."""
        if not self.training or self.p == 0:
            return x
        if self.solve is None:
            return nn.functional.dropout(x, self.p)
        if "mask" not in self.solve:
            self.solve["mask"] = nn.functional.dropout(torch.ones_like(x, requires_grad=False).detach(), self.p)
        mask = self.solve["mask"]
        if mask.shape != x.shape:
            raise ValueError(
                f"SolveDropout drew a mask of shape {tuple(mask.shape)} in this solve and now got an input of "
                f"shape {tuple(x.shape)}. Fix: use one SolveDropout for each place in the network."
            )
        return x * mask.to(x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Without the mask, which belongs to a solve and not to the module."""
        return {**self.__dict__, "solve": None}

    def extra_repr(self) -> str:
        return f"p={self.p:g}"
