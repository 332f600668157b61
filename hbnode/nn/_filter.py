"""A linear filter over time: v_t = mu_t v_{t-1} + s x_t.

It runs in blocks. Within a block it is a product with a small triangular matrix; between blocks a vector is carried. So
it is safe for any length and any mu_t. A cumulative sum of x_t / (mu_1 ... mu_t) is not: it overflows.

The zeros above the diagonal of that matrix must not meet NaN or inf, because 0 * NaN is NaN and would change samples
before its time. The matrix multiplies finite values only; the others are added from their time on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hbnode._torch import is_batched, is_exporting, is_tracing, no_autocast

LARGEST_BLOCK = 40
BLOCK, LEVELS = 32, 2  # of programs: samples of a block, and blocks of blocks; one matrix filters T / BLOCK**2


def linear_filter(x: Tensor, mu: float | Tensor, s: float, v: Tensor | None = None) -> Tensor:
    """Filter a sequence.

    Arguments:
        x: (T, batch, n).
        mu: a number, or (T,) in float64 on the CPU, or (T, batch).
        s: a factor.
        v: v_0 (batch, n); None is zero.

    Returns:
        v_1 to v_T, (T, batch, n). It can be differentiated any number of times. A sample that is NaN or inf changes no
        sample before it.
    """
    if not isinstance(mu, Tensor) and mu == 0:
        return s * x
    if x.shape[0] != 1 and (torch.jit.is_tracing() or is_exporting()):
        rates = mu if isinstance(mu, Tensor) else torch.full(x.shape[:1], mu, dtype=torch.float64)
        rates = rates.to(x.device).reshape(x.shape[0], -1)
        return _symbolic_filter(s * x, rates, torch.zeros_like(x[0]) if v is None else v)
    if x.shape[0] == 1 or (isinstance(mu, Tensor) and mu.dim() == 2) or is_tracing():  # a loop suits a program
        return _loop(x, mu, s, v)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(mu, Tensor):
        if not mu.any():
            return s * x
        kernel, decay = (z.to(x.device, dtype) for z in weights(_split_blocks(mu), s))
    else:
        kernel, decay = _constant_weights(float(mu), min(len(x), LARGEST_BLOCK), s, dtype, x.device)
    out: Tensor = _Filter.apply(x, kernel, decay, False)
    if v is None:
        return out
    powers = mu.cumprod(0) if isinstance(mu, Tensor) else float(mu) ** torch.arange(1, len(x) + 1, dtype=torch.float64)
    return torch.addcmul(out, powers.to(out).view(-1, 1, 1), v)


def _loop(x: Tensor, mu: float | Tensor, s: float, v: Tensor | None) -> Tensor:
    factors: Iterable[Any] = mu.to(x).reshape(len(x), -1, 1).unbind() if isinstance(mu, Tensor) else [mu] * len(x)
    v, out = torch.zeros_like(x[0]) if v is None else v, []
    for factor, x_t in zip(factors, x.unbind(), strict=True):
        v = factor * v + s * x_t
        out.append(v)
    return torch.stack(out)


def weights(mu: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """The filter as a matrix: v_t = sum_j kernel[t, j] x_j + decay[t] v_0.

    It divides by nothing, so it is exact with any mu, including 0.

    Arguments:
        mu: (..., T).
        s: a factor of x.

    Returns:
        (..., T, T), lower triangular, and (..., T).
    """
    steps = torch.arange(mu.shape[-1], device=mu.device)
    is_later = steps.unsqueeze(1) > steps
    kernel = torch.where(is_later, mu.unsqueeze(-1), 1.0).cumprod(-2).tril()  # mu_{j+1} ... mu_t
    return s * kernel, mu.cumprod(-1)


def _split_blocks(mu: Tensor) -> Tensor:
    """(T,) -> (blocks, size), with zeros after the end."""
    size = min(len(mu), LARGEST_BLOCK)
    return pad(mu, (0, -len(mu) % size)).view(-1, size)


def block_weights(mu: float, x: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """:func:`weights` of a constant mu, for blocks of x (T, ...)."""
    kernel, decay = _constant_weights(float(mu), min(len(x), LARGEST_BLOCK), s, x.dtype, x.device)
    return kernel[0], decay[0]


@functools.lru_cache(maxsize=64)
def _constant_weights(
    mu: float, steps: int, s: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """:func:`weights` of one block, which serve all blocks."""
    with torch.inference_mode(False), torch.no_grad():  # it is kept for training too
        kernel, decay = weights(torch.full((1, steps), mu, dtype=torch.float64), s)
        return kernel.to(device, dtype), decay.to(device, dtype)


class _Filter(torch.autograd.Function):
    """The filter from v_0 = 0 as a linear map of x, or the transpose of that map."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, decay: Tensor, is_transposed: bool) -> Tensor:
        with no_autocast(x):
            given, rest = _split_finite(x.to(kernel.dtype).contiguous())
            out = torch.empty_like(given)
            run = _transpose_blocks if is_transposed else _filter_blocks
            run(given.flatten(1), kernel, decay, out.flatten(1))
            if rest is not None:
                out += rest.flip(0).cumsum(0).flip(0) if is_transposed else rest.cumsum(0)
        return out.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, kernel, decay, ctx.is_transposed = inputs
        ctx.save_for_backward(kernel, decay)
        ctx.save_for_forward(kernel, decay)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_batched(grad):  # of grad(..., is_grads_batched=True), under which out= fails
            ones = torch.eye(len(grad), dtype=grad.dtype, device=grad.device)
            matrix = _Filter.apply(ones, *ctx.saved_tensors, not ctx.is_transposed)
            return torch.mm(matrix, grad.reshape(len(grad), -1)).reshape(grad.shape), None, None, None
        return _Filter.apply(grad, *ctx.saved_tensors, not ctx.is_transposed), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _Filter.apply(tangent, *ctx.saved_tensors, ctx.is_transposed)

    @staticmethod
    def vmap(
        info: object, dims: tuple[int, ...], x: Tensor, kernel: Tensor, decay: Tensor, is_transposed: bool
    ) -> tuple[Tensor, int]:
        return _Filter.apply(x.movedim(dims[0], 1), kernel, decay, is_transposed), 1


def _split_finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """X with zeros for NaN and inf, and the difference; None on the CPU if there is no difference."""
    if x.device.type == "cpu" and math.isfinite(x.sum()):  # a sum that overflows costs time and nothing else
        return x, None
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    return finite, x - finite


def _filter_blocks(x: Tensor, kernel: Tensor, decay: Tensor, out: Tensor) -> None:
    size, last = kernel.shape[-1], None
    kernel, decay = (z.expand(-(-len(x) // size), *z.shape[1:]) for z in (kernel, decay))
    for k, (given, found) in enumerate(zip(x.split(size), out.split(size), strict=True)):  # while it is in the cache
        m = len(given)
        torch.mm(kernel[k, :m, :m], given, out=found)
        if last is not None:
            found.addr_(decay[k, :m], last)
        last = found[-1]


def _transpose_blocks(x: Tensor, kernel: Tensor, decay: Tensor, out: Tensor) -> None:
    size, carry = kernel.shape[-1], None  # what the later blocks add to the last sample of this one
    kernel, decay = (z.expand(-(-len(x) // size), *z.shape[1:]) for z in (kernel, decay))
    pairs = enumerate(zip(x.split(size), out.split(size), strict=True))
    for k, (given, found) in reversed(list(pairs)):
        m = len(given)
        torch.mm(kernel[k, :m, :m].T, given, out=found)
        if carry is not None:
            found.addr_(kernel[k, m - 1, :m], carry)
        ahead = decay[k, :m] @ given
        carry = ahead if carry is None else ahead + decay[k, m - 1] * carry


def _symbolic_filter(x: Tensor, mu: Tensor, v: Tensor) -> Tensor:
    """v_t = mu_t v_{t-1} + x_t in programs whose length T is a symbol, which a loop over time would fix.

    Every operation acts on whole tensors. Matrices filter blocks of samples; then the values carried from block to
    block are filtered in the same way, with blocks in place of samples, and so on for a fixed number of levels.

    Arguments:
        x: (T, batch, n).
        mu: (T, 1) or (T, batch).
        v: v_0 (batch, n).
    """
    x, mu = torch.cat([v.unsqueeze(0), x]), pad(mu.double(), (0, 0, 1, 0))  # v_0 is a sample before the first
    finite = x.nan_to_num(0.0, 0.0, 0.0)  # the matrices' zeros must not meet NaN or inf
    return (_filter_levels(finite, mu, LEVELS) + (x - finite).cumsum(0))[1:]


def _filter_levels(x: Tensor, mu: Tensor, levels: int) -> Tensor:
    steps = x.shape[0]
    if levels == 0:
        kernel, _ = weights(mu.T, 1.0)
        return (kernel.to(x) @ x.transpose(0, 1)).transpose(0, 1)
    blocks = steps // BLOCK + 2  # never one, which programs take for an axis to be broadcast
    missing = blocks * BLOCK - steps
    x = pad(x, (0, 0, 0, 0, 0, missing)).unfold(0, BLOCK, BLOCK)  # (blocks, batch, n, BLOCK)
    kernel, decay = weights(pad(mu, (0, 0, 0, missing)).unfold(0, BLOCK, BLOCK), 1.0)
    inside = x @ kernel.to(x).transpose(-1, -2)
    ends = _filter_levels(inside[..., -1], decay[..., -1], levels - 1)
    before = pad(ends, (0, 0, 0, 0, 1, 0))[:-1]
    carried = decay.to(x).unsqueeze(-2) * before.unsqueeze(-1)
    out = (inside + carried).movedim(-1, 1).flatten(0, 1)
    return out.index_select(0, torch.arange(steps, device=x.device))  # a slice would have its bound proved
