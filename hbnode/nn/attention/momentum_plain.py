"""Linear attention with momentum for all chunks at once, in operations that autograd, torch.func and programs know."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hbnode._torch import is_exporting
from hbnode.nn.attention.momentum_weights import (
    MomentumAttentionState,
    Rate,
    feature_map,
    make_tables,
    powers,
    weigh,
    weigh_writes,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: tuple[Rate, Rate],
    state: MomentumAttentionState,
    ignored: Tensor | None,
    *,
    eps: float,
    chunk_size: int,
) -> tuple[Tensor, MomentumAttentionState]:
    """The outputs, in the dtype of the state, and the state after the last key.

    Arguments:
        q: queries (batch, heads, queries, dim).
        k: keys (batch, heads, length, dim), where the length is not 0.
        v: values (batch, heads, length, value_dim).
        rates: β and γ.
        state: before the first key, in the dtype of the sums.
        ignored: (batch, length) or None.
        eps: ε.
        chunk_size: C.
    """
    dtype, length = state.s.dtype, k.shape[2]
    phi_q, phi_k, v = feature_map(q.to(dtype)), feature_map(k.to(dtype)), v.to(dtype)
    if ignored is not None:
        phi_k, v = (x.masked_fill(ignored[:, None, :, None], 0.0) for x in (phi_k, v))
    is_open = is_exporting() and not isinstance(length, int)  # a number of chunks that is left open is not exported
    size = length if is_open else min(chunk_size, length)
    missing = -length % size
    keys, values = (pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (phi_k, v))
    present = (
        torch.arange(length + missing, device=k.device) < length if ignored is None else pad(~ignored, (0, missing))
    )
    counts = present.unflatten(-1, (-1, size)).cumsum(-1)  # ([batch,] chunks, C)
    weights = weigh(make_tables(*rates, size, k.device, dtype), counts, has_batch=ignored is not None)

    writes = keys.mT @ (weights.decay * values)
    p = _decayed(writes, rates[0], counts[..., -1], state.p)  # before each chunk and after all
    gains = keys.mT @ (weights.gain * values) + weights.carry * p[:, :, :-1]
    s = state.s.unsqueeze(2) + pad(gains.cumsum(2), (0, 0, 0, 0, 1, 0))
    z = state.z.unsqueeze(2) + pad(keys.sum(3).cumsum(2), (0, 0, 1, 0))
    after = MomentumAttentionState(s[:, :, -1], p[:, :, -1], z[:, :, -1])
    rows = pad(phi_q, (0, 0, 0, missing)).unflatten(2, (-1, size))
    scores = rows @ keys.mT
    above = (scores * weights.within) @ values + rows @ s[:, :, :-1] + weights.read * (rows @ p[:, :, :-1])
    below = (scores * weights.seen).sum(-1, keepdim=True) + rows @ z[:, :, :-1].unsqueeze(-1) + eps
    return (above / below).flatten(2, 3)[:, :, :length], after


def attend_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: tuple[Rate, Rate],
    state: MomentumAttentionState,
    ignored: Tensor | None,
    eps: float,
) -> tuple[Tensor, MomentumAttentionState]:
    """The outputs of queries that see all keys, equation 74, and the state; arguments are those of :func:`attend`."""
    dtype, (s, p, z), length = state.s.dtype, state, k.shape[2]
    phi_k, v = feature_map(k.to(dtype)), v.to(dtype)
    if ignored is None:
        counts = torch.arange(1, length + 1, device=k.device)
    else:
        counts = (~ignored).cumsum(-1)
        phi_k, v = (x.masked_fill(ignored[:, None, :, None], 0.0) for x in (phi_k, v))
    tables = make_tables(*rates, length, k.device, dtype)
    gain, decay, carry, rest = weigh_writes(tables, counts, has_batch=ignored is not None)
    after = MomentumAttentionState(
        s + carry * p + phi_k.mT @ (gain * v), rest * p + phi_k.mT @ (decay * v), z + phi_k.sum(2)
    )
    return _read(q, after, eps), after


def _read(q: Tensor, state: MomentumAttentionState, eps: float) -> Tensor:
    phi_q = feature_map(q.to(state.s.dtype))
    return phi_q @ state.s / (phi_q @ state.z.unsqueeze(-1) + eps)


def _decayed(writes: Tensor, momentum: Rate, counts: Tensor, start: Tensor) -> Tensor:
    """P before each chunk and after all, from what each adds to it: P' = β^n P + write.

    Arguments:
        writes: (batch, heads, chunks, dim, value_dim).
        momentum: β.
        counts: n of each chunk ([batch,] chunks).
        start: P before the first (batch, heads, dim, value_dim).
    """
    ends = counts.cumsum(-1)
    gaps = (ends.unsqueeze(-1) - ends.unsqueeze(-2)).clamp(min=0)
    decay, since_start = (powers(momentum, n).to(writes.dtype) for n in (gaps, ends))
    if counts.dim() == 2:
        decay, since_start = decay.movedim(1, 0), since_start.movedim(1, 0)
    after = (decay.tril() @ writes.flatten(-2)).unflatten(-1, writes.shape[-2:])
    after = after + since_start[..., None, None] * start.unsqueeze(2)
    return torch.cat([start.unsqueeze(2), after], 2)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: tuple[Rate, Rate],
    state: MomentumAttentionState,
    ignored: Tensor | None,
    eps: float,
) -> tuple[Tensor, MomentumAttentionState]:
    """The recurrence as it stands, for at most one key; arguments are those of :func:`attend`."""
    dtype = state.s.dtype
    if k.shape[2]:
        s, p, z = state
        phi_k = feature_map(k.to(dtype))
        p = _plus(phi_k.mT * v.to(dtype), rates[0], p)
        after = MomentumAttentionState(_plus(s, rates[1], p), p, z + phi_k.squeeze(2))
        if ignored is not None:
            frozen = ignored.unsqueeze(-1)
            s, p = (torch.where(frozen.unsqueeze(-1), *pair) for pair in zip(state[:2], after[:2], strict=True))
            after = MomentumAttentionState(s, p, torch.where(frozen, z, after.z))
        state = after
    return _read(q, state, eps), state


def _plus(x: Tensor, rate: Rate, y: Tensor) -> Tensor:
    """The sum x + rate y."""
    if not isinstance(rate, Tensor):
        return torch.add(x, y, alpha=rate)
    return torch.addcmul(x, rate.to(x.dtype).reshape(-1, 1, 1), y)


def last_write(k: Tensor, v: Tensor, ignored: Tensor | None, p: Tensor) -> Tensor:
    """P after the last key where β = 0: what the last key that is not ignored has written, or else P as it was."""
    if ignored is None:
        return feature_map(k[:, :, -1:].to(p.dtype)).mT * v[:, :, -1:].to(p.dtype)
    places = (torch.arange(k.shape[2], device=k.device) * ~ignored).amax(1).view(-1, 1, 1, 1)
    none = ignored.all(1).view(-1, 1, 1, 1)
    k, v = (torch.take_along_dim(x, places, 2).to(p.dtype).masked_fill(none, 0.0) for x in (k, v))
    return torch.where(none, p, feature_map(k).mT * v)
