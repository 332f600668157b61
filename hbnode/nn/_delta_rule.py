"""The chunked delta rule of the heavy-ball memory: a reference implementation, and a fused one with its own VJP.

:func:`reference` computes the recurrence of :func:`hbnode.nn.functional.heavy_ball_memory` chunk by chunk. Its
docstring defines the matrices Q, K, V, K̃, p, G, T, E and O. The fused implementation computes the same values. A
training step with it is 1.8 times as fast (benchmarks/attention.py, table *forms*).

The fused implementation stacks S and P as one state matrix of shape (parts D, M), with parts = 2, or parts = 1 without
momentum. In shapes, D is the number of features of a key, M is that of a value, and rows is batch * heads. For each
chunk of C steps the fused implementation computes

* the *decay mask*. It holds weights g_r and l_r: after step r, S and P are the sums of [S, P, e_0, ..., e_{C-1}] with
  these weights, where S and P in the brackets are their values before the chunk.
* Q and p, stacked to R = 2 C rows (C rows without a delta rule), and the product of this matrix with K̃ᵀ. The rows of
  Q, times the weights g_r, give the scores G ∘ Q K̃ᵀ. The rows of p, times the weights g_{r-1}, give T.
* q̄ and p̄, with parts D columns: Q and p times the weights of each part of the state.
* K̄, with parts D columns: K̃ times the weights in the last row of the decay mask.

Let carry denote the weights of the old state in the last row of the decay mask. The results are::

    E = (I + T)⁻¹ (V - p̄ state),   O = scores E + q̄ state,   state' = carry state + K̄ᵀ E

The state before each chunk and, with a delta rule, E are saved for backward. The VJP recomputes the rest.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hbnode._torch import fast_form

BLOCK = 8  # number of rows of the decay mask that are computed sequentially; C is a multiple of BLOCK
CHUNKS_AT_ONCE = 32  # number of chunks, over all heads, that a CPU computes together, so that they fit its cache

Outputs = tuple[Tensor, Tensor, Tensor | None]


def reference(options: tuple[Any, int], q: Tensor, k: Tensor, v: Tensor, *gates_and_state: Tensor | None) -> Outputs:
    """Compute the recurrence chunk by chunk in differentiable torch operations.

    A chunk has C steps. Row r of the matrices Q, K, V, p, E and O holds the query, key, value, p, e and output of step
    r of the chunk. The gates of a step are α, μ, s and η, and K̃ has the rows η k. Lα[r, c] is the product of α_i over
    c < i ≤ r, and ā[r] is the product of α_i over i ≤ r. Lμ and m̄ are the same products of μ_i. The rows of G₋, ā₋ and
    f₋ are the previous rows of G, ā and f; their first rows are 0, 1 and 0. S and P are the state before the chunk, and
    S' and P' are the state after the chunk::

        G = Lα diag(s) Lμ,   f = Lα (s ∘ m̄)                    sums of products of gates >= 0: no cancellation
        T = G₋ ∘ p K̃ᵀ,   E = (I + T)⁻¹ (V − ā₋ p S − f₋ p P)    the UT transform
        O = (G ∘ Q K̃ᵀ) E + ā Q S + f Q P
        S' = ā_C S + f_C P + K̃ᵀ diag(G_C) E,   P' = m̄_C P + K̃ᵀ diag(Lμ_C) E

    The arguments after ``v`` are log μ, log α, s and η, each (batch, heads, length) or None, and the initial S and P.
    ``options`` is the pair of ``delta`` and ``chunk_size``. Return the outputs, and the final S and P.
    """
    log_momentum, log_decay, step, write, s, p = gates_and_state
    assert s is not None
    delta, length, dtype = options[0], q.shape[2], torch.promote_types(q.dtype, v.dtype)
    size = min(options[1], length)
    if log_decay is None:
        log_decay = torch.zeros_like(q[..., 0], dtype=s.dtype)

    def chunks(x: Tensor) -> Tensor:
        """Pad x (batch, heads, length, n) with zeros, and divide its steps into chunks of C steps.

        Return a tensor (batch, heads, chunks, C, n).
        """
        # graphs with dynamic shapes need a contiguous tensor
        return pad(x.to(s.dtype).contiguous(), (0, 0, 0, -length % size)).unflatten(2, (-1, size))

    k_tilde = k if write is None else write.unsqueeze(-1) * k
    if log_momentum is None and step is not None:
        k_tilde = step.unsqueeze(-1) * k_tilde
    k = log_decay.exp().unsqueeze(-1) * k if delta == "decayed" else k
    q, k, k_tilde, v = chunks(q), chunks(k), chunks(k_tilde), chunks(v)
    g, starts = _gate_products(chunks(log_decay.unsqueeze(-1)))
    k_last, carry = g[..., -1:, :].mT * k_tilde, starts[..., -1:, :]
    if log_momentum is not None and step is not None and p is not None:
        (momenta, m), step = _gate_products(chunks(log_momentum.unsqueeze(-1))), chunks(step.unsqueeze(-1))
        g, starts = (g * step.mT) @ momenta, torch.cat([starts, g @ (step * m)], -1)  # G (C, C); ā and f (C, 2)
        k_last = torch.cat([g[..., -1:, :].mT * k_tilde, momenta[..., -1:, :].mT * k_tilde], -1)
        carry = torch.cat([starts[..., -1:, :], pad(m[..., -1:, :], (1, 0))], -2)
    scores, q = g * (q @ k_tilde.mT), _weigh_parts(starts, q)
    if delta:
        first = torch.eye(1, starts.shape[-1], dtype=s.dtype, device=s.device).expand_as(starts[..., :1, :])
        p_bar = _weigh_parts(torch.cat([first, starts[..., :-1, :]], -2), k)
        t = pad(g[..., :-1, :], (0, 0, 1, 0)) * (k @ k_tilde.mT) + torch.eye(size, dtype=s.dtype, device=s.device)
        solved = torch.linalg.solve_triangular(t, torch.cat([v, p_bar], -1), upper=False, unitriangular=True)
        v, k = solved.split([v.shape[-1], p_bar.shape[-1]], -1)
    state, outputs = (s if p is None else torch.cat([s, p], 2)), []
    # zip instead of indexing: the backward pass of an index allocates the whole tensor for each chunk
    for q_i, k_i, v_i, scores_i, last_i, carry_i in zip(
        *(x.unbind(2) for x in (q, k, v, scores, k_last, carry)), strict=True
    ):
        e = v_i - k_i @ state if delta else v_i
        outputs.append(scores_i @ e + q_i @ state)
        parts = state.chunk(carry.shape[-1], 2)
        carried = [sum(w * x for w, x in zip(row.split(1, -1), parts, strict=True)) for row in carry_i.split(1, -2)]
        state = torch.cat(carried, 2) + last_i.mT @ e
    out = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].to(dtype)
    if p is None:
        return out, state, None
    after_s, after_p = state.chunk(2, 2)
    return out, after_s, after_p


def _gate_products(log_gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of products of gates, given the logarithms of the gates of C steps (..., C, 1).

    Row r and column c of the first, (..., C, C), is the product of the gates i with c < i ≤ r. Row r of the second,
    (..., C, 1), is the product of the gates i ≤ r. The logarithms of each product are summed separately: a difference
    of two cumulative sums would lose digits, and would be NaN after a gate of 0.
    """
    lower = torch.ones(*[log_gate.shape[-2]] * 2, dtype=torch.bool, device=log_gate.device).tril()
    sums = torch.where(lower.tril(-1), log_gate, 0.0).cumsum(-2)
    return torch.where(lower, sums.exp(), 0.0), log_gate.cumsum(-2).exp()


def _weigh_parts(weights: Tensor, x: Tensor) -> Tensor:
    """Multiply each row of x (..., C, D) by each of the n weights in the same row of ``weights`` (..., C, n).

    Return the n scaled copies of x, concatenated along the last dimension to (..., C, n D).
    """
    return torch.cat([weight * x for weight in weights.split(1, -1)], -1)


def forward(
    options: tuple[Any, int], keep: bool, q: Tensor, k: Tensor, v: Tensor, *gates_and_state: Tensor | None
) -> tuple[Outputs, list[Tensor]]:
    """Compute the outputs and the final S and P that :func:`reference` returns, without an autograd graph.

    Return them, and the list of tensors that :func:`vjp` needs. The list is empty unless ``keep`` is True.
    """
    *gates, s, p = gates_and_state
    assert s is not None
    chunks = _Chunks(options, q, k, gates, s.dtype)
    start, size = (s if p is None else torch.cat([s, p], 2)), chunks.size
    out, end = torch.empty_like(v, dtype=torch.promote_types(q.dtype, v.dtype)), torch.empty_like(start)
    residuals = list(map(s.new_empty, residual_shapes(options, q, v, p is not None))) if keep else []
    for spans in chunks.spans():
        state = start[spans[0].batch].flatten(0, 1)
        for span in spans:
            x = chunks.matrices(span)
            e = chunks.load(v, span, out=residuals[1][span.at] if keep and chunks.delta else None)
            states = residuals[0][span.at] if keep else e.new_empty(len(e), *state.shape)
            for i in range(len(e)):
                states[i] = state
                if chunks.delta:
                    side = torch.baddbmm(e[i], x.qp_bar[i, :, size:], state, alpha=-1)
                    e[i] = torch.linalg.solve_triangular(x.t[i], side, upper=False, unitriangular=True)
                state = _carry(x.carry[i], state).baddbmm_(x.k_bar[i].mT, e[i])
            o = torch.bmm(x.qp_bar[:, :, :size].flatten(0, 1), states.flatten(0, 1))
            o.baddbmm_(x.scores.flatten(0, 1), e.flatten(0, 1))
            chunks.store(o.view_as(e), out, span)
        end[spans[0].batch] = state.view_as(end[spans[0].batch])
    if p is None:
        return (out, end, None), residuals
    s, p = end.chunk(2, 2)
    return (out, s.contiguous(), p.contiguous()), residuals


def residual_shapes(options: tuple[Any, int], q: Tensor, v: Tensor, has_momentum: bool) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors saved for backward: the state before each chunk and, with a delta rule, E.

    The first two dimensions of each are chunks and rows = batch * heads.
    """
    (batch, heads, length, dim), width = q.shape, v.shape[-1]
    size = _chunk_size(options[1], length)
    count, rows = (length + size - 1) // size, batch * heads
    shapes: list[tuple[int, ...]] = [(count, rows, dim * (2 if has_momentum else 1), width), (count, rows, size, width)]
    return shapes if options[0] else shapes[:1]


def _chunk_size(size: int, length: int) -> int:
    """Return the number of steps per chunk: the smaller of ``size`` and ``length``, rounded up to a multiple of BLOCK.

    While torch.compile or torch.export records the program, ``length`` may be a symbolic integer.
    """
    return (torch.sym_min(size, length) + BLOCK - 1) // BLOCK * BLOCK


def vjp(options: tuple[Any, int], tensors: Any, residuals: Any, grads: Any, needed: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to ``tensors``: q, k, v, log μ, log α, s, η, and the initial S and P.

    ``grads`` are the gradients of the outputs and of the final S and P. ``needed`` holds, for each of ``tensors``,
    whether its gradient is needed; the result may have None for the others.
    """
    q, k, v, *gates, s, p = tensors
    chunks = _Chunks(options, q, k, gates, s.dtype)
    size, parts, mask = chunks.size, chunks.parts, chunks.mask
    dout = torch.zeros_like(v) if grads[0] is None else grads[0]
    ds = torch.zeros_like(s) if grads[1] is None else grads[1]
    dp = torch.zeros_like(s) if grads[2] is None else grads[2]
    dend = ds if p is None else torch.cat([ds, dp], 2)
    dstart, dq, dk, dv = torch.empty_like(dend), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dread, dwrite, dmask = torch.empty_like(chunks.read), torch.empty_like(chunks.write), None
    if any(needed[3:6]):
        dmask = torch.empty_like(mask.coefficients), torch.empty_like(mask.inner), torch.empty_like(mask.rows)
    for spans in reversed(chunks.spans()):
        dstate = dend[spans[0].batch].flatten(0, 1)
        for span in reversed(spans):
            e = residuals[1][span.at] if chunks.delta else chunks.load(v, span)
            states, x = residuals[0][span.at], chunks.matrices(span)
            # dy stacks the gradient of O and the negated gradient of the right-hand side of the triangular system
            dy = e.new_empty(*e.shape[:2], x.qp.shape[2], e.shape[-1])
            do = chunks.load(dout, span, out=dy[:, :, :size]).flatten(0, 1)
            de = torch.bmm(x.scores.flatten(0, 1).mT, do).view_as(e)
            dstates = torch.bmm(x.qp_bar[:, :, :size].flatten(0, 1).mT, do).view_as(states)
            dends = torch.empty_like(dstates)
            for i in reversed(range(len(e))):
                dends[i] = dstate
                de[i].baddbmm_(x.k_bar[i], dstate)
                dstate = _carry(x.carry[i].mT, dstate, dstates[i])
                if chunks.delta:
                    side = torch.linalg.solve_triangular(x.t[i], de[i].mT, upper=False, left=False, unitriangular=True)
                    torch.neg(side.mT, out=dy[i, :, size:])
                    dstate.baddbmm_(x.qp_bar[i, :, size:].mT, dy[i, :, size:])
            chunks.store(dy[:, :, size:].neg() if chunks.delta else de, dv, span)

            e, dy, states, dends = e.flatten(0, 1), dy.flatten(0, 1), states.flatten(0, 1), dends.flatten(0, 1)
            x = _Matrices(*map(methodcaller("flatten", 0, 1), x))
            da, dqp_bar, dk_bar = torch.bmm(dy, e.mT), torch.bmm(dy, states.mT), torch.bmm(e, dends.mT)
            if dmask is not None:
                dstarts = _inner(dqp_bar, x.qp, parts)
                dw = torch.cat([dstarts[:, :size], da[:, :size] * x.products[:, :size]], -1)
                if chunks.delta:
                    dw[:, :-1, :parts] += dstarts[:, size + 1 :]
                    dw[:, :-1, parts:].addcmul_(da[:, size + 1 :], x.products[:, size + 1 :])
                dcarry = torch.bmm(dends.view(len(e), parts, -1), states.view(len(e), parts, -1).mT)
                dlast = torch.cat([dcarry, _inner(dk_bar, x.k_tilde, parts).mT], -1)
                mask.matrix_vjp(span, dw, dlast, dmask)
            da[:, :size] *= x.w[..., parts:]
            if chunks.delta:
                da[:, size] = 0.0
                da[:, size + 1 :] *= x.w[:, :-1, parts:]
            dqp, dk_tilde = torch.bmm(da, x.k_tilde), torch.bmm(da.mT, x.qp)
            for part, grad in enumerate(dqp_bar.chunk(parts, -1)):
                dqp.addcmul_(grad, x.starts[..., part : part + 1])
            for part, grad in enumerate(dk_bar.chunk(parts, -1)):
                dk_tilde.addcmul_(grad, x.last[:, part, parts:].unsqueeze(-1))
            chunks.store(dqp[:, :size].unflatten(0, (-1, len(dstate))), dq, span)
            dwrite[span.at] = (dk_tilde * x.k).sum(-1, keepdim=True).view_as(dwrite[span.at])
            dk_tilde *= chunks.write[span.at].flatten(0, 1)
            if chunks.delta:
                dread[span.at] = (dqp[:, size:] * x.k).sum(-1, keepdim=True).view_as(dread[span.at])
                dk_tilde.addcmul_(dqp[:, size:], chunks.read[span.at].flatten(0, 1))
            chunks.store(dk_tilde.unflatten(0, (-1, len(dstate))), dk, span)
        dstart[spans[0].batch] = dstate.view_as(dstart[spans[0].batch])
    dstart, dvelocity = (dstart, None) if p is None else dstart.chunk(2, 2)
    dgates = chunks.gates_vjp(gates, dread, dwrite, dmask) if any(needed[3:7]) else (None,) * 4
    return dq, dk, dv, *dgates, dstart, dvelocity


class _Span(NamedTuple):
    """A range of sequences of the batch, and a range of the chunks of these sequences. They are computed together."""

    batch: slice
    chunks: slice
    at: tuple[slice, slice]  # index that selects the span from a tensor (chunks, rows, ...)


class _Matrices(NamedTuple):
    """The matrices that the module docstring defines, for all chunks of a span.

    Each tensor has the shape (chunks, rows, ...), with rows = batch * heads. The comments give the last dimensions.
    """

    k: Tensor  # K (C, D)
    k_tilde: Tensor  # K̃ (C, D)
    qp: Tensor  # Q and p, stacked (R, D)
    products: Tensor  # qp K̃ᵀ (R, C)
    scores: Tensor  # G ∘ Q K̃ᵀ (C, C)
    t: Tensor  # T (C, C); the scores if there is no delta rule
    starts: Tensor  # for each row of qp, weights of S and P before the chunk (R, parts)
    w: Tensor  # weights g after each step (C, parts + C)
    last: Tensor  # weights g and l after the last step (parts, parts + C)
    qp_bar: Tensor  # q̄ and p̄, stacked (R, parts D)
    k_bar: Tensor  # K̄ (C, parts D)
    carry: Tensor  # weights of the old state in the new state (parts, parts)


class _Chunks:
    """The inputs of one call of the delta rule, divided into chunks.

    Its methods divide other tensors into chunks, join chunks, and compute the matrices that the module docstring
    defines.
    """

    def __init__(
        self, options: tuple[Any, int], q: Tensor, k: Tensor, gates: list[Tensor | None], dtype: torch.dtype
    ) -> None:
        self.delta, size = options
        self.q, self.k, self.dtype = q, k, dtype
        self.batch, self.heads, self.length, _ = q.shape
        self.size = _chunk_size(size, self.length)
        self.count = -(-self.length // self.size)
        log_momentum, log_decay, step, write = gates
        ones = q.new_ones((), dtype=dtype).expand(q.shape[:3])
        alpha = ones if log_decay is None else log_decay.exp()
        write = ones if write is None else write
        if log_momentum is None and step is not None:
            write = step * write
        self.parts = 1 if log_momentum is None else 2
        self.write = self.by_chunk(write).unsqueeze(-1)  # k̃ = write * k
        self.read = self.by_chunk(alpha if self.delta == "decayed" else ones).unsqueeze(-1)  # p = read * k
        momentum = None
        if log_momentum is not None and step is not None:
            momentum = self.by_chunk(log_momentum.exp(), 1.0), self.by_chunk(step)
        self.mask = _DecayMask(self.by_chunk(alpha, 1.0), momentum)

    def spans(self) -> list[list[_Span]]:
        """Divide the batch into groups of sequences, and the chunks of each group into spans.

        The chunks of a span are computed together. Return a list that holds, for each group, the list of its spans in
        order of time.
        """
        sequences, chunks = self.batch, self.count
        if self.q.device.type == "cpu":
            sequences = min(self.batch, max(1, CHUNKS_AT_ONCE // self.heads))
            chunks = max(1, CHUNKS_AT_ONCE // (sequences * self.heads))
        found: list[list[_Span]] = []
        for first in range(0, self.batch, sequences):
            batch = slice(first, min(first + sequences, self.batch))
            rows = slice(batch.start * self.heads, batch.stop * self.heads)
            found.append([])
            for i in range(0, self.count, chunks):
                at = slice(i, min(i + chunks, self.count))
                found[-1].append(_Span(batch, at, (at, rows)))
        return found

    def load(self, x: Tensor, span: _Span, out: Tensor | None = None) -> Tensor:
        """Copy the steps of a span out of x (batch, heads, length, n), padded with zeros to whole chunks.

        Return them as a tensor (chunks, batch * heads, C, n), which is ``out`` if that is given.
        """
        start, stop = span.chunks.start * self.size, span.chunks.stop * self.size
        x = x[span.batch, :, start:stop]
        x = pad(x, (0, 0, 0, stop - start - x.shape[2])) if x.shape[2] < stop - start else x
        x = x.unflatten(2, (-1, self.size)).permute(2, 0, 1, 3, 4)
        if out is None:
            out = x.new_empty(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:], dtype=self.dtype)
        out.unflatten(1, x.shape[1:3]).copy_(x)
        return out

    def store(self, x: Tensor, out: Tensor, span: _Span) -> None:
        """Copy the chunks x (chunks, batch * heads, C, n) of a span into ``out`` (batch, heads, length, n)."""
        out = out[span.batch, :, span.chunks.start * self.size : span.chunks.stop * self.size]
        x = x.unflatten(1, out.shape[:2]).permute(1, 2, 0, 3, 4)
        if out.shape[2] == x.shape[2] * self.size:
            out.unflatten(2, (-1, self.size)).copy_(x)
        else:
            out.copy_(x.flatten(2, 3)[:, :, : out.shape[2]])

    def by_chunk(self, gate: Tensor, after: float = 0.0) -> Tensor:
        """Divide the values of a gate (batch, heads, length) into chunks (chunks, batch * heads, C).

        The last chunk is padded with the value ``after``.
        """
        gate = pad(gate.flatten(0, 1), (0, self.count * self.size - self.length), value=after)
        return gate.unflatten(1, (-1, self.size)).transpose(0, 1).contiguous()

    def from_chunk(self, gate: Tensor) -> Tensor:
        """Join the chunks of a gate (chunks, batch * heads, C) to (batch, heads, length); the inverse of by_chunk."""
        return gate.transpose(0, 1).flatten(1)[:, : self.length].unflatten(0, (self.batch, self.heads))

    def matrices(self, span: _Span) -> _Matrices:
        size, parts = self.size, self.parts
        k = self.load(self.k, span)
        k_tilde = k * self.write[span.at]
        qp = k.new_empty(*k.shape[:2], size * (2 if self.delta else 1), k.shape[-1])
        self.load(self.q, span, out=qp[:, :, :size])
        if self.delta:
            torch.mul(k, self.read[span.at], out=qp[:, :, size:])
        products = torch.bmm(qp.flatten(0, 1), k_tilde.flatten(0, 1).mT).unflatten(0, k.shape[:2])
        w, last = self.mask.matrix(span)
        starts, g = w[..., :parts], w[..., parts:]
        scores = t = products[:, :, :size] * g
        if self.delta:  # the rows of p take the weights of the previous step
            first = torch.zeros_like(starts[:, :, :1])
            first[..., 0] = 1.0
            starts = torch.cat([starts, first, starts[:, :, :-1]], 2)
            t = torch.empty_like(scores)
            t[:, :, 0] = 0.0
            torch.mul(products[:, :, size + 1 :], g[:, :, :-1], out=t[:, :, 1:])
        qp_bar, k_bar, carry = _outer(starts, qp), _outer(last[..., parts:].mT, k_tilde), last[..., :parts]
        return _Matrices(k, k_tilde, qp, products, scores, t, starts, w, last, qp_bar, k_bar, carry)

    def gates_vjp(self, gates: list[Tensor | None], dread: Tensor, dwrite: Tensor, dmask: Any) -> list[Tensor | None]:
        """Return the gradients of log μ, log α, s and η, with None for a gate that is None.

        ``dread`` and ``dwrite`` are the gradients of ``self.read`` and ``self.write``. ``dmask`` is a tuple of the
        arguments of ``self.mask.vjp``, or None if no gate needs a gradient through the mask.
        """
        log_momentum, log_decay, step, write = gates
        dalpha = dmu = dstep = None
        if dmask is not None:
            dalpha, dmu, dstep = self.mask.vjp(*dmask)
            dalpha = self.from_chunk(dalpha)
        grad = self.from_chunk(dwrite.squeeze(-1))
        if log_momentum is not None and dmu is not None and dstep is not None:
            dmu, dstep = self.from_chunk(dmu) * log_momentum.exp(), self.from_chunk(dstep)
        elif log_momentum is None and step is not None:
            dstep = grad if write is None else grad * write
            grad = grad * step
        if log_decay is not None and dalpha is not None:
            if self.delta == "decayed":
                dalpha = dalpha + self.from_chunk(dread.squeeze(-1))
            dalpha = dalpha * log_decay.exp()
        return [dmu, None if log_decay is None else dalpha, dstep, None if write is None else grad]


class _DecayMask:
    """The decay masks of all chunks, and their VJP.

    After step r of a chunk, S and P are sums of [S, P, e_0, ..., e_{C-1}] with weights g_r and l_r. In the brackets, S
    and P are their values before the chunk. The initial weights are g = (1, 0, 0, ...) and l = (0, 1, 0, ...), and::

        l_r = μ_r l_{r-1} + (1 in column e_r),   g_r = α_r g_{r-1} + s_r l_r

    All weights are sums of products of gates >= 0, so nothing cancels. Without momentum there are no weights l and no
    column P, and g_r = α_r g_{r-1} + (1 in column e_r).

    The recursion first runs over the BLOCK steps of a block, for all blocks in parallel, and then over the blocks. Step
    i of block b has the weights g = ``coefficients[b, i] @ rows[b]``, plus ``inner[b, i]`` in the columns of block b.

    Arguments:
        alpha: α (chunks, rows, C).
        momentum: μ and s, each (chunks, rows, C); None without momentum.
    """

    def __init__(self, alpha: Tensor, momentum: tuple[Tensor, Tensor] | None) -> None:
        count, heads, size = alpha.shape
        n = count * heads  # size of the last dimension here, which other code divides into (chunks, rows)

        def blocks(gate: Tensor) -> tuple[Tensor, ...]:
            """Return BLOCK tensors (blocks, chunks * rows); tensor i has the gate at step i of each block."""
            return gate.flatten(0, 1).T.contiguous().unflatten(0, (-1, BLOCK)).unbind(1)

        self.parts, self.blocks = (1 if momentum is None else 2), size // BLOCK
        self.count, self.alpha = count, blocks(alpha)
        # row i: g and l after step i of a block, row 0: before it. P does not depend on S, so l has no column for S
        g = alpha.new_zeros(BLOCK + 1, self.parts + BLOCK, self.blocks, n)
        rows = alpha.new_zeros(self.blocks + 1, self.parts, self.parts + size, n)
        rows[0].diagonal().fill_(1.0)
        g[0, 0] = 1.0
        self.g, self.ell, self.by_block = g, None, rows
        if momentum is None:
            g.diagonal().fill_(1.0)
            for i in range(BLOCK):
                torch.mul(g[i, : i + 1], self.alpha[i], out=g[i + 1, : i + 1])
        else:
            self.mu, self.step = blocks(momentum[0]), blocks(momentum[1])
            self.ell = alpha.new_zeros(BLOCK + 1, 1 + BLOCK, self.blocks, n)
            self.ell.diagonal().fill_(1.0)
            for i in range(BLOCK):
                torch.mul(self.ell[i, : i + 1], self.mu[i], out=self.ell[i + 1, : i + 1])
                torch.mul(self.ell[i + 1, : i + 2], self.step[i], out=g[i + 1, 1 : i + 3])
                g[i + 1, : i + 2].addcmul_(g[i, : i + 2], self.alpha[i])
        for b in range(self.blocks):
            width = self.parts + b * BLOCK
            old, new = rows[b, :, :width], rows[b + 1]
            torch.mul(old[0], g[-1, 0, b], out=new[0, :width])
            new[0, width : width + BLOCK] = g[-1, self.parts :, b]
            if self.ell is not None:
                new[0, :width].addcmul_(old[1], g[-1, 1, b])
                torch.mul(old[1], self.ell[-1, 0, b], out=new[1, :width])
                new[1, width : width + BLOCK] = self.ell[-1, 1:, b]

        def by_chunk(x: Tensor) -> Tensor:
            """Rearrange (..., chunks * rows) to (chunks, rows, ...), where rows = batch * heads."""
            return x.reshape(-1, n).T.contiguous().view(count, heads, *x.shape[:-1])

        self.coefficients = by_chunk(g[1:, : self.parts].permute(2, 0, 1, 3))  # (..., blocks, BLOCK, parts)
        self.inner = by_chunk(g[1:, self.parts :].permute(2, 0, 1, 3))  # (..., blocks, BLOCK, BLOCK)
        self.rows = by_chunk(rows)  # g and l before each block, and after all (..., blocks + 1, parts, parts + C)

    def matrix(self, span: _Span) -> tuple[Tensor, Tensor]:
        """Return the weights of the decay mask for the chunks of a span, as two tensors (chunks, rows, ...).

        The first holds the weights g after each step, (C, parts + C). The second holds the weights g and l after the
        last step, (parts, parts + C). The module docstring defines these weights.
        """
        coefficients, rows = self.coefficients[span.at], self.rows[span.at]
        g = torch.bmm(coefficients.flatten(0, 2), rows[:, :, :-1].flatten(0, 2))
        g = g.view(*rows.shape[:2], -1, rows.shape[-1])
        _diagonal(g, self.parts).add_(self.inner[span.at])
        return g, rows[:, :, -1]

    def matrix_vjp(self, span: _Span, dg: Tensor, dlast: Tensor, grads: tuple[Tensor, Tensor, Tensor]) -> None:
        """Compute the VJP of :meth:`matrix`; write the gradients of coefficients, inner and rows into ``grads``.

        ``dg`` and ``dlast`` are the gradients of the two results of :meth:`matrix`.
        """
        dcoefficients, dinner, drows = (x[span.at] for x in grads)
        coefficients, rows = self.coefficients[span.at].flatten(0, 2), self.rows[span.at][:, :, :-1].flatten(0, 2)
        dg = dg.unflatten(0, dinner.shape[:2])
        dinner.copy_(_diagonal(dg, self.parts))
        dg = dg.unflatten(2, (-1, BLOCK)).flatten(0, 2)
        dcoefficients.copy_(torch.bmm(dg, rows.mT).view_as(dcoefficients))
        drows[:, :, :-1] = torch.bmm(coefficients.mT, dg).view_as(drows[:, :, :-1])
        drows[:, :, -1] = dlast.view_as(drows[:, :, -1])

    def vjp(self, dcoefficients: Tensor, dinner: Tensor, drows: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the gates α, μ and s, each (chunks, rows, C).

        The gradients of μ and s are None without momentum. The arguments are the gradients of the attributes
        ``coefficients``, ``inner`` and ``rows``.
        """
        g, ell, rows, parts = self.g, self.ell, self.by_block, self.parts

        def by_step(x: Tensor) -> Tensor:
            """Rearrange (chunks, rows, ...) to (..., chunks * rows), where rows = batch * heads."""
            return x.flatten(2).flatten(0, 1).T.contiguous().view(*x.shape[2:], -1)

        def from_blocks(x: Tensor) -> Tensor:
            """Rearrange (BLOCK, blocks, chunks * rows) to (chunks, rows, C)."""
            return x.transpose(0, 1).flatten(0, 1).T.unflatten(0, (self.count, -1))

        def block_columns(rows: Tensor) -> Tensor:
            """Select, from the weights after each block, the weights of the terms e_r of the block's steps r.

            Return them as a tensor (BLOCK, blocks, n).
            """
            return rows[:, parts:].unflatten(1, (-1, BLOCK)).diagonal(dim1=0, dim2=1).permute(0, 2, 1)

        drows = by_step(drows)
        dg = torch.cat([by_step(dcoefficients), by_step(dinner)], 2).permute(1, 2, 0, 3).contiguous()
        for b in reversed(range(self.blocks)):
            width = parts + b * BLOCK
            old, new = drows[b, :, :width], drows[b + 1, :, :width]
            old[0].addcmul_(new[0], g[-1, 0, b])
            if ell is not None:
                old[1].addcmul_(new[0], g[-1, 1, b]).addcmul_(new[1], ell[-1, 0, b])
        # the weight of e_r before step r is 0, and its gradient has no effect
        old, new = rows[:-1], drows[1:]
        dg[-1, 0] += (new[:, 0] * old[:, 0]).sum(1)
        dg[-1, parts:] += block_columns(new[:, 0])
        if ell is None:
            for i in reversed(range(1, BLOCK)):
                dg[i - 1, : i + 1].addcmul_(dg[i, : i + 1], self.alpha[i])
            return from_blocks((dg * g[:-1]).sum(1)), None, None
        dl = torch.zeros_like(ell[1:])
        dg[-1, 1] += (new[:, 0] * old[:, 1]).sum(1)
        dl[-1, 0] = (new[:, 1] * old[:, 1]).sum(1)
        dl[-1, 1:] = block_columns(new[:, 1])
        for i in reversed(range(BLOCK)):
            dl[i, : i + 2].addcmul_(dg[i, 1 : i + 3], self.step[i])
            if i > 0:
                dg[i - 1, : i + 2].addcmul_(dg[i, : i + 2], self.alpha[i])
                dl[i - 1, : i + 1].addcmul_(dl[i, : i + 1], self.mu[i])
        dalpha, dmu, dstep = (dg * g[:-1]).sum(1), (dl * ell[:-1]).sum(1), (dg[:, 1:] * ell[1:]).sum(1)
        return from_blocks(dalpha), from_blocks(dmu), from_blocks(dstep)


def _carry(carry: Tensor, state: Tensor, new: Tensor | None = None) -> Tensor:
    """Multiply the state before a chunk by the weights ``carry``, and add ``new`` if it is given.

    The state and ``new`` hold S and P, stacked, (rows, parts D, M). ``carry`` (rows, parts, parts) holds the weights of
    the old S and P in the new S and P.
    """
    shape = (*carry.shape[:2], -1)
    if new is None:
        return torch.bmm(carry, state.view(shape)).view_as(state)
    return torch.baddbmm(new.view(shape), carry, state.view(shape)).view_as(state)


def _diagonal(g: Tensor, parts: int) -> Tensor:
    """Return the diagonal blocks of the matrices g (..., C, parts + C), without their first ``parts`` columns.

    The result is a view (..., blocks, BLOCK, BLOCK).
    """
    blocks = g[..., parts:].unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)


def _outer(weights: Tensor, x: Tensor) -> Tensor:
    """Multiply each row of x (..., R, D) by each of the weights in the same row of ``weights`` (..., R, parts).

    Return the scaled copies of x, concatenated along the last dimension to (..., R, parts D).
    """
    out = x.new_empty(*weights.shape, x.shape[-1])
    for part, weight in enumerate(weights.unbind(-1)):  # faster than one broadcast product
        torch.mul(x, weight.unsqueeze(-1), out=out[..., part, :])
    return out.flatten(-2)


def _inner(x: Tensor, y: Tensor, parts: int) -> Tensor:
    """Divide each row of x (..., R, parts D) into parts of D elements; multiply each part by the same row of y.

    The products are inner products. y is (..., R, D), and the result is (..., R, parts).
    """
    return (x.unflatten(-1, (parts, -1)) * y.unsqueeze(-2)).sum(-1)


chunkwise = fast_form(reference, vjp)(forward)
