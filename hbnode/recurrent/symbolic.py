"""The filter of :mod:`hbnode.recurrent.filter` for exported programs, in which the length T is a symbol.

A loop over time would fix T. Here every operation acts on whole tensors. Matrices filter blocks of samples; then the
values carried from block to block are filtered in the same way, with blocks in place of samples, and so on for a fixed
number of levels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
LEVELS = 2  # of blocks; what is left after them, T / BLOCK**2, is filtered by one matrix


def symbolic_filter(x: Tensor, mu: Tensor, v: Tensor) -> Tensor:
    """v_t = mu_t v_{t-1} + x_t for any length.

    Arguments:
        x: (T, batch, n).
        mu: (T, 1) or (T, batch).
        v: v_0 (batch, n).
    """
    x, mu = torch.cat([v.unsqueeze(0), x]), pad(mu.double(), (0, 0, 1, 0))  # v_0 is a sample before the first
    finite = x.nan_to_num(0.0, 0.0, 0.0)  # the matrices' zeros must not meet NaN or inf
    return (_filtered(finite, mu, LEVELS) + (x - finite).cumsum(0))[1:]


def _filtered(x: Tensor, mu: Tensor, levels: int) -> Tensor:
    steps = x.shape[0]
    if levels == 0:
        kernel, _ = _weights(mu.T)
        return (kernel.to(x) @ x.transpose(0, 1)).transpose(0, 1)
    blocks = steps // BLOCK + 2  # never one, which programs take for an axis to be broadcast
    missing = blocks * BLOCK - steps
    x = pad(x, (0, 0, 0, 0, 0, missing)).unfold(0, BLOCK, BLOCK)  # (blocks, batch, n, BLOCK)
    kernel, decay = _weights(pad(mu, (0, 0, 0, missing)).unfold(0, BLOCK, BLOCK))
    inside = x @ kernel.to(x).transpose(-1, -2)
    ends = _filtered(inside[..., -1], decay[..., -1], levels - 1)
    before = pad(ends, (0, 0, 0, 0, 1, 0))[:-1]
    carried = decay.to(x).unsqueeze(-2) * before.unsqueeze(-1)
    out = (inside + carried).movedim(-1, 1).flatten(0, 1)
    return out.index_select(0, torch.arange(steps, device=x.device))  # a slice would have its bound proved


def _weights(mu: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`hbnode.recurrent.filter.weights`, (..., T) -> (..., T, T) and (..., T)."""
    steps = torch.arange(mu.shape[-1], device=mu.device)
    kernel = torch.where(steps.unsqueeze(1) > steps, mu.unsqueeze(-1), 1.0).cumprod(-2).tril()
    return kernel, mu.cumprod(-1)
