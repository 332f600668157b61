r"""The scan z_t = e^{ρ_t + iφ_t} z_{t-1} + b_t, real or complex, with coefficients that differ between time steps.

The module has a reference implementation, which loops over the samples, and a fast one with its own VJP. All tensors
are (T, ...), time first. The fast implementation divides the series into about √T chunks. It first runs all chunks in
parallel from zero states, then computes the states between chunks, and then runs all chunks in parallel from these
states. The product of the coefficients of a chunk is e to the power of the sum of ρ_t + iφ_t. No cumulative product is
inverted, so e^{ρ} may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hbnode import _torch
from hbnode.nn._oscillator_step import accumulation_dtype


def _exponential(rho: Tensor, phi: Tensor | None) -> Tensor:
    size = rho.exp()
    return size if phi is None else torch.complex(size * phi.cos(), size * phi.sin())  # torch.polar: NaN for tiny sizes


def scan_reference(_: object, rho: Tensor, phi: Tensor | None, b: Tensor, z0: Tensor) -> tuple[Tensor]:
    """Compute the states z_t = e^{ρ_t + iφ_t} z_{t-1} + b_t after all samples, in a loop over the samples.

    Return a tuple with the tensor of the states (T, ...).
    """
    states = [z0]
    for alpha, jump in zip(_exponential(rho, phi), b, strict=True):
        states.append(alpha * states[-1] + jump)
    return (torch.stack(states[1:]),)


def _chunk_size(length: int) -> int:
    return 2 ** round(math.log2(length) / 2)


def _chunked(x: Tensor) -> Tensor:
    """Divide x (T, ...) along time into chunks (count, size, ...); pad the last chunk with zeros."""
    size = _chunk_size(len(x))
    missing = -len(x) % size
    x = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
    return x.unflatten(0, (-1, size))


def _recur(alpha: Tensor, b: Tensor, total: Tensor, start: Tensor, is_reversed: bool) -> Tensor:
    """Compute the states of the recurrence h ← alpha h + b at all samples, in the shape of b.

    alpha and b are divided into chunks (count, size, ...). ``total`` holds the product of alpha over each chunk,
    (count, ...). ``start`` is the initial h. If ``is_reversed``, the recurrence runs from the last sample to the first.
    """
    order, chunks = range(b.shape[1]), range(len(b))
    steps = list(zip(b.unbind(1), alpha.unbind(1), strict=True))
    steps, chunks = (steps[::-1], chunks[::-1]) if is_reversed else (steps, chunks)
    if len(b) == 1:
        before = start.unsqueeze(0)
    else:
        h = steps[0][0]
        for jump, step in steps[1:]:
            h = torch.addcmul(jump, step, h)
        before = torch.empty_like(h)
        for j in chunks:
            before[j] = start
            start = torch.addcmul(h[j], total[j], start)
    states = torch.empty_like(b)
    out, h = states.unbind(1), before
    for i, (jump, step) in zip(order[::-1] if is_reversed else order, steps, strict=True):
        h = torch.addcmul(jump, step, h, out=out[i])
    return states


def _forward(_: object, keep: bool, rho: Tensor, phi: Tensor | None, b: Tensor, z0: Tensor) -> tuple[Any, Any]:
    _torch.keep_freed_memory(rho.device)
    rho, turns = _chunked(rho), None if phi is None else _chunked(phi)
    alpha, phase = _exponential(rho, turns), None
    if turns is not None:  # a sum of phases over a chunk loses digits in float32
        phase = turns.sum(1, dtype=accumulation_dtype(turns.dtype, turns.device))
        phase = (phase - 2 * math.pi * (phase / (2 * math.pi)).round()).to(rho.dtype)
    total = _exponential(rho.sum(1), phase)
    z = _recur(alpha, _chunked(b), total, z0, False).flatten(0, 1)[: len(b)]
    return (z,), (alpha, total, z)


def _vjp(
    _: object, tensors: Sequence[Any], residuals: Sequence[Tensor], grads: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the VJP of the scan by a recurrence of the same form, from the last sample to the first.

    Let α_t = e^{ρ_t + iφ_t} be the coefficient of sample t, and g_t the conjugate of the gradient of output t. Let λ_t
    be the conjugate of the total gradient of z_t, later samples included. Then λ_t = g_t + μ_{t+1} with μ_t = α_t λ_t,
    so μ_t = α_t g_t + α_t μ_{t+1}.
    """
    (_, phi, b, z0), (alpha, total, z) = tensors, residuals
    g = grads[0].conj().resolve_conj()
    mu = _recur(alpha, _chunked(g).mul(alpha), total, torch.zeros_like(z0), True).flatten(0, 1)[: len(b)]
    change = torch.cat([(mu[0] * z0).unsqueeze(0), mu[1:] * z[:-1]])
    db = g.clone()
    db[:-1] += mu[1:]
    if phi is None:
        return change, None, db, mu[0].clone()
    return change.real, -change.imag, db.conj().resolve_conj(), mu[0].conj().resolve_conj()


fast_scan = _torch.fast_form(scan_reference, _vjp)(_forward)


def _operator_forward(_: object, keep: bool, *tensors: Any) -> tuple[Any, Any]:
    ((z,), _) = _forward(None, keep, *tensors)
    return (z.clone(),), (z.new_empty(0),)


def _operator_vjp(
    _: object, tensors: Sequence[Any], residuals: object, grads: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    return _vjp(None, tensors, _forward(None, True, *tensors)[1], grads, needed)


_compiled_scan = _torch.operator_form(
    "selective_scan",
    "",
    "Tensor rho, Tensor? phi, Tensor b, Tensor z0",
    (1, 1),
    _operator_forward,
    lambda _, keep, rho, phi, b, z0: ((b.new_empty(b.shape),), (b.new_empty(0),)),
    _operator_vjp,
)


def scan(rho: Tensor, phi: Tensor | None, b: Tensor, z0: Tensor) -> Tensor:
    """Return the states z_t after all samples, (T, ...), computed by the fast implementation if it is applicable.

    Arguments:
        rho: logarithms of the moduli of the coefficients, (T, ...), at most 0.
        phi: phases of the coefficients, (T, ...); None if all coefficients are real.
        b: increments, (T, ...), complex unless ``phi`` is None.
        z0: the state before the first sample, (...).
    """
    if torch.compiler.is_compiling() and not _torch.is_transformed():
        return _compiled_scan((), rho, phi, b, z0)[0]
    return fast_scan(None, rho, phi, b, z0)[0]
