"""The products of a chunk: all that its gates, queries and keys determine, and the gradients of these.

The equations are those of :mod:`hbnode.nn.attention.memory.plain`. Queries and the keys at which the memory is read
stand one above the other, because every product with k̃ or with the state takes both. The state stacks S on P; its
parts are two, or one without momentum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hbnode.nn.attention.memory.gates import Gates
from hbnode.nn.attention.memory.layout import Layout, Span
from hbnode.nn.attention.memory.weights import BLOCK, ChunkWeights, WeightRecursion


class Products(NamedTuple):
    """What a span determines without its state, (chunks * rows, ...). R is 2 C with a delta rule, C without.

    Attributes:
        k: keys (C, D).
        written: k̃ (C, D).
        reading: queries, and below them the keys p at which the memory is read (R, D).
        raw: ``reading @ k̃ᵀ`` (R, C).
        scores: G ∘ Q K̃ᵀ (C, C).
        overlaps: T (C, C); None without a delta rule.
        readers: ``reading``, times the weights of each part of the state before the chunk (R, parts * D).
        writers: k̃, times the weights of E in each part of the state after the chunk (C, parts * D).
        of_state: weights of each part of the state in ``readers`` (R, parts); None without momentum and decay.
        weights: g of each step (C, parts + C); likewise.
        last: g and l of the last step (parts, parts + C); likewise.
    """

    k: Tensor
    written: Tensor
    reading: Tensor
    raw: Tensor
    scores: Tensor
    overlaps: Tensor | None
    readers: Tensor
    writers: Tensor
    of_state: Tensor | None
    weights: Tensor | None
    last: Tensor | None


class ProductGradients(NamedTuple):
    """Gradients with respect to the entries of :class:`Products`, and to ``carry``, the first columns of ``last``."""

    raw: Tensor
    readers: Tensor
    writers: Tensor
    carry: Tensor


class Chunks:
    """The chunks of a call.

    Arguments:
        layout: how the sequences are cut.
        delta: "decayed", "plain" or False.
        q: queries (batch, heads, length, D).
        k: keys, likewise.
        gates: gates of each step.
    """

    def __init__(self, layout: Layout, delta: str | bool, q: Tensor, k: Tensor, gates: Gates) -> None:
        self.layout, self.delta, self.q, self.k = layout, delta, q, k
        momentum, decay = (None if z is None else z.exp() for z in gates[:2])
        self.parts = 1 if momentum is None else 2
        written = gates.write
        if momentum is None and gates.step is not None:  # the step is then a factor of what is written
            written = gates.step if written is None else gates.step * written
        self.write = None if written is None else self._factor(written)
        self.decay = None if decay is None or delta != "decayed" else self._factor(decay)
        self.recursion: WeightRecursion | None = None
        if decay is not None or momentum is not None:
            self.recursion = WeightRecursion(
                None if decay is None else layout.gate(decay, 1.0),
                None if momentum is None else layout.gate(momentum, 1.0),
                None if momentum is None or gates.step is None else layout.gate(gates.step, 0.0),
            )
            combining, inner, rows = self.recursion.weights()
            by_block = (combining.permute(2, 0, 1, 3), inner.permute(2, 0, 1, 3), rows)
            self.combining, self.inner, self.rows = (layout.by_chunk(z) for z in by_block)

    def _factor(self, gate: Tensor) -> Tensor:
        """(batch, heads, length) -> (chunks, rows, C, 1)."""
        return self.layout.by_chunk(self.layout.gate(gate, 0.0)).unsqueeze(-1)

    def of(self, span: Span) -> Products:
        """The products of a span."""
        layout, size = self.layout, self.layout.size
        k = layout.load(self.k, span)
        reading = k.new_empty(*k.shape[:2], size * (2 if self.delta else 1), k.shape[-1])
        layout.load(self.q, span, out=reading[:, :, :size])
        if self.delta and self.decay is None:
            reading[:, :, size:] = k
        elif self.decay is not None:
            torch.mul(k, self.decay[span.chunks, span.rows], out=reading[:, :, size:])
        written = (k if self.write is None else k * self.write[span.chunks, span.rows]).flatten(0, 1)
        k, reading = k.flatten(0, 1), reading.flatten(0, 1)
        raw = torch.bmm(reading, written.mT)
        if self.recursion is None:
            overlaps = raw[:, size:].tril(-1) if self.delta else None
            return Products(
                k, written, reading, raw, raw[:, :size].tril(), overlaps, reading, written, None, None, None
            )
        weights, last = self._weights(span)
        g, overlaps = weights[..., self.parts :], None
        if self.delta:
            overlaps = torch.empty_like(raw[:, size:], memory_format=torch.contiguous_format)
            overlaps[:, 0] = 0.0
            torch.mul(raw[:, size + 1 :], g[:, :-1], out=overlaps[:, 1:])
        of_state = self._of_state(weights)
        readers, writers = _scaled(reading, of_state), _scaled(written, last[..., self.parts :].mT)
        scores = raw[:, :size] * g
        return Products(k, written, reading, raw, scores, overlaps, readers, writers, of_state, weights, last)

    def _weights(self, span: Span) -> tuple[Tensor, Tensor]:
        """``weights`` and ``last`` of a span."""
        combining, inner, rows = (
            z[span.chunks, span.rows].flatten(0, 1) for z in (self.combining, self.inner, self.rows)
        )
        weights = torch.bmm(combining.flatten(0, 1), rows[:, :-1].flatten(0, 1)).view(len(rows), -1, rows.shape[-1])
        _diagonal(weights, self.parts).add_(inner)
        return weights, rows[:, -1]

    def _of_state(self, weights: Tensor) -> Tensor:
        """The weights of the state before the chunk at each row of ``reading`` (n, R, parts)."""
        weights = weights[..., : self.parts]
        if not self.delta:
            return weights
        first = torch.zeros_like(weights[:, :1])
        first[..., 0] = 1.0
        return torch.cat([weights, first, weights[:, :-1]], 1)


def _diagonal(weights: Tensor, parts: int) -> Tensor:
    """A view of what is written and read within the same block (n, blocks, BLOCK, BLOCK)."""
    view = weights[..., parts:].unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return view.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _scaled(x: Tensor, weights: Tensor) -> Tensor:
    """(n, R, D), (n, R, parts) -> (n, R, parts * D)."""
    parts = weights.shape[-1]
    out = x.new_empty(*x.shape[:2], parts, x.shape[-1])
    for part in range(parts):
        torch.mul(x, weights[..., part : part + 1], out=out[:, :, part])
    return out.flatten(2)


class ChunkGradients:
    """Gradients of queries, keys and gates, collected from span to span.

    Arguments:
        chunks: the chunks of the call.
        needs_weights: whether a gate needs a gradient that the weights of chunks depend on.
    """

    def __init__(self, chunks: Chunks, needs_weights: bool) -> None:
        self.chunks = chunks
        self.q, self.k = torch.empty_like(chunks.q), torch.empty_like(chunks.k)
        self.write, self.decay = (None if z is None else torch.empty_like(z) for z in (chunks.write, chunks.decay))
        self.needs_weights = needs_weights and chunks.recursion is not None
        if self.needs_weights:
            parts = (chunks.combining, chunks.inner, chunks.rows)
            self.combining, self.inner, self.rows = (torch.empty_like(z) for z in parts)

    def add(self, span: Span, of: Products, grads: ProductGradients) -> None:
        """Enter the gradients of a span; those of the products are changed in place."""
        layout, size = self.chunks.layout, self.chunks.layout.size
        if of.weights is not None and of.last is not None and self.needs_weights:
            self._add_weights(span, of, grads)
        self._unweigh(of, grads.raw)
        reading, written = torch.bmm(grads.raw, of.written), torch.bmm(grads.raw.mT, of.reading)
        if of.of_state is None or of.last is None:
            reading, written = reading.add_(grads.readers), written.add_(grads.writers)
        else:
            _add_scaled(reading, grads.readers, of.of_state)
            _add_scaled(written, grads.writers, of.last[..., self.chunks.parts :].mT)
        layout.store(_by_chunk(reading[:, :size], span), self.q, span)
        k = written
        if self.write is not None and self.chunks.write is not None:
            self.write[span.chunks, span.rows] = _by_chunk(_dots(written, of.k), span).unsqueeze(-1)
            k = written.mul_(self.chunks.write[span.chunks, span.rows].flatten(0, 1))
        if self.decay is not None and self.chunks.decay is not None:
            self.decay[span.chunks, span.rows] = _by_chunk(_dots(reading[:, size:], of.k), span).unsqueeze(-1)
            k.addcmul_(reading[:, size:], self.chunks.decay[span.chunks, span.rows].flatten(0, 1))
        elif self.chunks.delta:
            k += reading[:, size:]
        layout.store(_by_chunk(k, span), self.k, span)

    def _unweigh(self, of: Products, raw: Tensor) -> None:
        """Turn the gradients of scores and overlaps, one above the other, into those of ``raw``."""
        size = self.chunks.layout.size
        if of.weights is None:
            raw[:, :size].tril_()
            raw[:, size:].tril_(-1)
            return
        g = of.weights[..., self.chunks.parts :]
        raw[:, :size] *= g
        if self.chunks.delta:
            raw[:, size] = 0.0
            raw[:, size + 1 :] *= g[:, :-1]

    def _add_weights(self, span: Span, of: Products, grads: ProductGradients) -> None:
        """Enter the gradients of the weights of a span."""
        assert of.weights is not None
        assert of.last is not None
        size, parts, chunks = self.chunks.layout.size, self.chunks.parts, self.chunks
        weights, last = torch.empty_like(of.weights), torch.empty_like(of.last)
        torch.mul(grads.raw[:, :size], of.raw[:, :size], out=weights[..., parts:])
        state = _parts_dots(grads.readers, of.reading, parts)
        weights[..., :parts] = state[:, :size]
        if chunks.delta:
            weights[:, :-1, parts:].addcmul_(grads.raw[:, size + 1 :], of.raw[:, size + 1 :])
            weights[:, :-1, :parts] += state[:, size + 1 :]
        last[..., parts:] = _parts_dots(grads.writers, of.written, parts).mT
        last[..., :parts] = grads.carry
        at = (span.chunks, span.rows)
        combining, rows = (z[at].flatten(0, 1) for z in (chunks.combining, chunks.rows[:, :, :-1]))
        blocks = weights.unflatten(1, (-1, BLOCK)).flatten(0, 1)
        self.inner[at] = _by_chunk(_diagonal(weights, parts), span)
        self.combining[at] = torch.bmm(blocks, rows.flatten(0, 1).mT).view_as(self.combining[at])
        self.rows[at][:, :, :-1] = torch.bmm(combining.flatten(0, 1).mT, blocks).view_as(self.rows[at][:, :, :-1])
        self.rows[at][:, :, -1] = _by_chunk(last, span)

    def of_gates(self, gates: Gates) -> Gates:
        """The gradients of the gates, once all spans are entered."""
        layout, recursion = self.chunks.layout, self.chunks.recursion
        decay = momentum = step = None
        if self.needs_weights and recursion is not None:
            combining, inner, rows = (layout.by_place(z) for z in (self.combining, self.inner, self.rows))
            found = recursion.backward(ChunkWeights(combining.permute(1, 2, 0, 3), inner.permute(1, 2, 0, 3), rows))
            decay, momentum, step = (None if z is None else layout.ungate(z) for z in found)
        if self.decay is not None:
            at_keys = layout.ungate(layout.by_place(self.decay.squeeze(-1)))
            decay = at_keys if decay is None else decay + at_keys
        write = None if self.write is None else layout.ungate(layout.by_place(self.write.squeeze(-1)))
        if gates.log_momentum is None and gates.step is not None and write is not None:
            step = write if gates.write is None else write * gates.write
            write = None if gates.write is None else write * gates.step
        if decay is not None and gates.log_decay is not None:
            decay = decay * gates.log_decay.exp()
        if momentum is not None and gates.log_momentum is not None:
            momentum = momentum * gates.log_momentum.exp()
        return Gates(momentum, decay, step, write)


def _by_chunk(x: Tensor, span: Span) -> Tensor:
    """(chunks * rows, ...) -> (chunks, rows, ...)."""
    return x.unflatten(0, (span.chunks.stop - span.chunks.start, -1))


def _dots(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _parts_dots(x: Tensor, y: Tensor, parts: int) -> Tensor:
    """(n, R, parts * D), (n, R, D) -> (n, R, parts)."""
    return torch.stack([_dots(part, y) for part in x.chunk(parts, -1)], -1)


def _add_scaled(out: Tensor, x: Tensor, weights: Tensor) -> None:
    """Add x (n, R, parts * D) times weights (n, R, parts) to out (n, R, D)."""
    for part, of in enumerate(x.chunk(weights.shape[-1], -1)):
        out.addcmul_(of, weights[..., part : part + 1])
