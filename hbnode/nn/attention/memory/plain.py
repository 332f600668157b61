"""The chunkwise form of the heavy-ball memory in operations that autograd differentiates any number of times.

Row r and column c ≤ r count the steps of a chunk; Lα[r, c] is the product of α_i over c < i ≤ r, Lμ likewise, ā_r and
m̄_r are the products from the chunk's start, k̃ = η k. Then

    G = Lα diag(s) Lμ,  f = Lα (s ∘ m̄)                    all terms are at least 0 where gates are: nothing cancels
    T[r, c] = G[r−1, c] (p_r · k̃_c)                       strictly lower triangular
    E = (I + T)⁻¹ [V − ā_{r−1} p_r S − f_{r−1} p_r P]     ā_{−1} = 1, f_{−1} = 0
    O = (G ∘ Q K̃ᵀ) E + (ā ∘ Q) S + (f ∘ Q) P
    S' = ā_C S + f_C P + K̃ᵀ diag(G[C−1, :]) E,   P' = m̄_C P + K̃ᵀ diag(Lμ[C−1, :]) E
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hbnode.nn.attention.memory.gates import Gates


class _Weights(NamedTuple):
    """What the gates of each chunk make, (batch, heads, chunks, ...); P has no weights without momentum.

    Attributes:
        g: G (C, C): weight of the write at step c in S_r.
        a: ā (C,).
        f: (C,), weight of the chunk's first P in S_r.
        m: m̄ (C,).
        last: Lμ[C−1, :] (C,).
    """

    g: Tensor
    a: Tensor
    f: Tensor | None
    m: Tensor | None
    last: Tensor | None


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, delta: str | bool, s: Tensor, p: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the recurrence, chunk by chunk.

    Arguments:
        q: (batch, heads, length, D), in the dtype of the state.
        k: likewise.
        v: (batch, heads, length, M), likewise.
        gates: gates of each step.
        delta: "decayed", "plain" or False.
        s: S before the first step (batch, heads, D, M).
        p: P before the first step; None without momentum.
        size: of a chunk.

    Returns:
        Outputs (batch, heads, length, M), and S and P after the last step.
    """
    length = q.shape[2]
    size = min(size, length)
    decay = torch.zeros_like(q[..., 0]) if gates.log_decay is None else gates.log_decay
    written = k if gates.write is None else gates.write.unsqueeze(-1) * k
    if gates.log_momentum is None and gates.step is not None:
        written = gates.step.unsqueeze(-1) * written
    read = decay.exp().unsqueeze(-1) * k if delta == "decayed" else k
    q, written, v, read = (_chunks(x, size) for x in (q, written, v, read))
    w = _weights(gates, decay, size)
    scores = w.g * (q @ written.mT)
    solved = _solved(w, v, read, written) if delta else None
    outputs = []
    # unbind, because the backward pass of an index allocates the whole tensor for each chunk
    kept = [x.unbind(2) for x in (scores, q, written, w.g[..., -1, :], w.a)]
    values = v.unbind(2) if solved is None else solved.unbind(2)
    momenta = [] if w.f is None or w.m is None or w.last is None else [x.unbind(2) for x in (w.f, w.m, w.last)]
    for i, (a_qk, q_i, k_i, g_last, a) in enumerate(zip(*kept, strict=True)):
        e = values[i] if solved is None else _errors(values[i], v.shape[-1], s, p)
        out = a_qk @ e + (a.unsqueeze(-1) * q_i) @ s
        after = a[..., -1:, None] * s + (g_last.unsqueeze(-1) * k_i).mT @ e
        if p is not None:
            f, m, last = (x[i] for x in momenta)
            out = out + (f.unsqueeze(-1) * q_i) @ p
            after = after + f[..., -1:, None] * p
            p = m[..., -1:, None] * p + (last.unsqueeze(-1) * k_i).mT @ e
        s = after
        outputs.append(out)
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length], s, p


def _chunks(x: Tensor, size: int) -> Tensor:
    """(batch, heads, length, n) -> (batch, heads, chunks, size, n); zeros follow the end, which change nothing."""
    return pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _weights(gates: Gates, decay: Tensor, size: int) -> _Weights:
    decay = _chunks(decay.unsqueeze(-1), size).squeeze(-1)
    decays, a = _products(decay), decay.cumsum(-1).exp()
    if gates.log_momentum is None or gates.step is None:
        return _Weights(decays, a, None, None, None)
    momentum, step = (_chunks(x.unsqueeze(-1), size).squeeze(-1) for x in (gates.log_momentum, gates.step))
    momenta, m = _products(momentum), momentum.cumsum(-1).exp()
    f = (decays @ (step * m).unsqueeze(-1)).squeeze(-1)
    return _Weights((decays * step.unsqueeze(-2)) @ momenta, a, f, m, momenta[..., -1, :])


def _products(log_gate: Tensor) -> Tensor:
    """The products of the gates of each segment c < i ≤ r, (..., C) -> (..., C, C), lower triangular.

    The logarithms of each segment are summed on their own. A difference of two cumulative sums would lose digits, and
    be NaN where a gate is 0.
    """
    size = log_gate.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_gate.device).tril()
    within = torch.where(lower.tril(-1), log_gate.unsqueeze(-1), 0.0)
    return torch.where(lower, within.cumsum(-2).exp(), 0.0)


def _solved(w: _Weights, v: Tensor, read: Tensor, written: Tensor) -> Tensor:
    """(I + T)⁻¹ [V, ā_{r−1} p_r, f_{r−1} p_r]; the last block only with momentum."""
    before = pad(w.g[..., :-1, :], (0, 0, 1, 0))
    size = before.shape[-1]
    t = (before * (read @ written.mT)).tril(-1) + torch.eye(size, dtype=v.dtype, device=v.device)
    sides = [v, pad(w.a[..., :-1], (1, 0), value=1.0).unsqueeze(-1) * read]
    if w.f is not None:
        sides.append(pad(w.f[..., :-1], (1, 0)).unsqueeze(-1) * read)
    return torch.linalg.solve_triangular(t, torch.cat(sides, -1), upper=False, unitriangular=True)


def _errors(solved: Tensor, width: int, s: Tensor, p: Tensor | None) -> Tensor:
    """E of a chunk, from what :func:`_solved` gives."""
    states = s if p is None else torch.cat([s, p], -2)
    return solved[..., :width] - solved[..., width:] @ states


def one_step(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, delta: str | bool, s: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The recurrence itself, for a length of one; arguments and results are those of :func:`chunkwise`."""
    momentum, decay = (None if z is None else z.exp().unsqueeze(-1) for z in gates[:2])
    written = k if gates.write is None else gates.write.unsqueeze(-1) * k
    if delta:
        v = v - (k if decay is None or delta == "plain" else decay * k) @ s
    s = s if decay is None else decay * s
    if momentum is not None and p is not None and gates.step is not None:
        p = torch.addcmul(momentum * p, written.mT, v)
        s = torch.addcmul(s, gates.step.unsqueeze(-1), p)
    else:
        s = torch.addcmul(s, (written if gates.step is None else gates.step.unsqueeze(-1) * written).mT, v)
    return q @ s, s, p
