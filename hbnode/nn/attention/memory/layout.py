"""How the sequences of a batch are cut into chunks, and which chunks are worked on together."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

AT_ONCE = 32  # chunks of a head that are worked on together on the CPU, so that their matrices stay in its cache


class Span(NamedTuple):
    """Chunks that are worked on together.

    Attributes:
        batch: sequences.
        rows: the same, counted by batch and heads.
        chunks: chunks of these sequences.
    """

    batch: slice
    rows: slice
    chunks: slice


@dataclasses.dataclass(frozen=True)
class Layout:
    """The chunks of a batch of sequences.

    Arguments:
        batch: number of sequences.
        heads: number of heads.
        length: steps of a sequence.
        size: steps of a chunk.
        dtype: of all that is computed.
        is_local: whether few chunks are worked on at a time, for the cache of a CPU.
    """

    batch: int
    heads: int
    length: int
    size: int
    dtype: torch.dtype
    is_local: bool

    @property
    def count(self) -> int:
        """Chunks of a sequence. The last one may go beyond the end."""
        return -(-self.length // self.size)

    def spans(self) -> list[list[Span]]:
        """For some sequences after the other, their spans in the order of time."""
        sequences = max(1, AT_ONCE // self.heads) if self.is_local else self.batch
        chunks = max(1, AT_ONCE // (min(sequences, self.batch) * self.heads)) if self.is_local else self.count
        found = []
        for first in range(0, self.batch, sequences):
            at = slice(first, min(first + sequences, self.batch))
            rows = slice(at.start * self.heads, at.stop * self.heads)
            starts = range(0, self.count, chunks)
            found.append([Span(at, rows, slice(i, min(i + chunks, self.count))) for i in starts])
        return found

    def load(self, x: Tensor, span: Span, out: Tensor | None = None) -> Tensor:
        """(batch, heads, length, n) -> (chunks, rows, C, n) of a span, with zeros after the end.

        Arguments:
            x: in any dtype and memory format.
            span: which chunks.
            out: where to write; None is a new tensor.
        """
        start, stop = span.chunks.start * self.size, span.chunks.stop * self.size
        part = x[span.batch, :, start:stop]
        part = pad(part, (0, 0, 0, stop - start - part.shape[2])) if part.shape[2] < stop - start else part
        part = part.unflatten(2, (-1, self.size)).permute(2, 0, 1, 3, 4)
        if out is None:
            out = x.new_empty(part.shape[0], part.shape[1] * part.shape[2], *part.shape[3:], dtype=self.dtype)
        out.unflatten(1, part.shape[1:3]).copy_(part)
        return out

    def store(self, x: Tensor, out: Tensor, span: Span) -> None:
        """The inverse of :meth:`load`: write x (chunks, rows, C, n) to its place in out (batch, heads, length, n)."""
        place = out[span.batch, :, span.chunks.start * self.size : span.chunks.stop * self.size]
        batch, heads, length = place.shape[:3]
        x = x.unflatten(1, (batch, heads)).permute(1, 2, 0, 3, 4)
        if length == x.shape[2] * self.size:
            place.unflatten(2, (-1, self.size)).copy_(x)
        else:
            place.copy_(x.flatten(2, 3)[:, :, :length])

    def gate(self, gate: Tensor, after: float) -> Tensor:
        """(batch, heads, length) -> (C, chunks * rows), with a constant after the end."""
        gate = pad(gate.flatten(0, 1), (0, self.count * self.size - self.length), value=after)
        return gate.unflatten(1, (-1, self.size)).permute(2, 1, 0).flatten(1).contiguous()

    def ungate(self, gate: Tensor) -> Tensor:
        """The inverse of :meth:`gate`."""
        gate = gate.unflatten(1, (self.count, -1)).permute(2, 1, 0).flatten(1)
        return gate[:, : self.length].unflatten(0, (self.batch, self.heads))

    def by_chunk(self, x: Tensor) -> Tensor:
        """(..., chunks * rows) -> (chunks, rows, ...)."""
        return x.reshape(-1, x.shape[-1]).T.contiguous().view(self.count, -1, *x.shape[:-1])

    def by_place(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`by_chunk`."""
        return x.flatten(2).flatten(0, 1).T.contiguous().view(*x.shape[2:], -1)
