"""A linear filter over time, in blocks: v_t = mu_t v_{t-1} + s x_t.

Within a block it is a product with a small triangular matrix, and between blocks a vector is carried. So it is safe for
any length and any mu_t, which a cumulative sum of x_t / (mu_1 ... mu_t) is not: that overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hbnode.recurrent.rules import weights

LARGEST_BLOCK = 40


def linear_filter(x: Tensor, mu: Tensor, s: float) -> Tensor:
    """Filter a sequence from v_0 = 0.

    Arguments:
        x: (T, batch, n).
        mu: (T,), float64.
        s: a factor.

    Returns:
        v_1 to v_T, (T, batch, n). It can be differentiated any number of times.
    """
    if not mu.any():
        return s * x
    block = _block(len(x))
    mu = torch.nn.functional.pad(mu, (0, -len(mu) % block))
    kernel, decay = weights(mu.view(-1, block), s)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return _Filter.apply(x, kernel.to(x.device, dtype), decay.to(x.device, dtype), False)


def _block(steps: int) -> int:
    """A size of blocks, if possible one that leaves no remainder, for which all would be copied."""
    if steps <= LARGEST_BLOCK:
        return steps
    return next((size for size in range(LARGEST_BLOCK, LARGEST_BLOCK // 4, -1) if steps % size == 0), LARGEST_BLOCK)


class _Filter(torch.autograd.Function):
    """The filter as a linear map of x, or its transpose."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, decay: Tensor, is_transposed: bool) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            blocks = _cut(x, *decay.shape).to(kernel.dtype)
            out = torch.empty_like(blocks)
            (_transposed if is_transposed else _filtered)(blocks, kernel, decay, out)
        return out.view(-1, *x.shape[1:])[: len(x)].to(x.dtype)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, kernel, decay, ctx.is_transposed = inputs
        ctx.save_for_backward(kernel, decay)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, decay = ctx.saved_tensors
        return _Filter.apply(grad, kernel, decay, not ctx.is_transposed), None, None, None


def _cut(x: Tensor, blocks: int, size: int) -> Tensor:
    """(T, batch, n) -> (blocks, size, batch * n), with zeros after the end."""
    x = x.flatten(1)
    missing = blocks * size - len(x)
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return x.view(blocks, size, -1)


def _filtered(x: Tensor, kernel: Tensor, decay: Tensor, out: Tensor) -> None:
    for k in range(len(x)):  # a block at a time, while it is in the cache
        torch.mm(kernel[k], x[k], out=out[k])
        if k > 0:
            out[k].addr_(decay[k], out[k - 1, -1])


def _transposed(x: Tensor, kernel: Tensor, decay: Tensor, out: Tensor) -> None:
    carry = torch.zeros_like(x[0, 0])  # what the later blocks add to the last sample of this one
    for k in reversed(range(len(x))):
        torch.mm(kernel[k].T, x[k], out=out[k]).addr_(kernel[k, -1], carry)
        carry = decay[k] @ x[k] + decay[k, -1] * carry
