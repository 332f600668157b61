"""Positions of tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoids(positions: Tensor, features: int) -> Tensor:
    r"""Sinusoidal position embedding: sin(p w_i) and cos(p w_i) side by side, w_i = 10000^(-2i / features).

    References:
        Vaswani et al., Attention Is All You Need (arXiv:1706.03762), section 3.5.

    Arguments:
        positions: (...), whole numbers.
        features: how many; an odd number has one sine more than cosines.

    Returns:
        (..., features), float32.
    """
    even = torch.arange(0, features, 2, device=positions.device, dtype=torch.float32)
    angles = positions.to(torch.float32).unsqueeze(-1) * torch.exp(even * (-math.log(10_000.0) / features))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :features]


def next_positions(start: Tensor, length: int, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions of the next tokens (batch, length), and that of the one after (batch,); ignored tokens do not count.

    Arguments:
        start: how many tokens came before (batch,).
        length: of the tokens.
        ignored: (batch, length) where a token is padding, or None.
    """
    if ignored is None:
        return start.unsqueeze(1) + torch.arange(length, device=start.device), start + length
    counted = (~ignored).long()
    upto = counted.cumsum(1)
    return start.unsqueeze(1) + upto - counted, start + counted.sum(1)
