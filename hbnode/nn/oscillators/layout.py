"""How the samples of a scan are cut into pieces, and a piece into chunks that are scanned side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

WIDTH = 28_672  # numbers that an operation works on: what a step needs then stays in the second-level cache
STEPS = 32  # samples of a chunk
PIECE = 1_048_576  # numbers in a piece of v


class Piece(NamedTuple):
    """Samples ``start`` to ``start + steps * chunks``."""

    start: int
    steps: int
    chunks: int

    def of(self, z: Tensor) -> Tensor:
        """The piece of (batch, T, ...), as a view (steps, batch, chunks, ...)."""
        part = z[:, self.start : self.start + self.steps * self.chunks].unflatten(1, (self.chunks, self.steps))
        return part.movedim(2, 0)


def pieces(batch: int, length: int, size: int, *, is_local: bool) -> list[Piece]:
    """The pieces of (batch, length) samples of ``size`` oscillators.

    Arguments:
        batch: number of sequences.
        length: samples of each.
        size: number of oscillators.
        is_local: whether an operation is cheap to start and memory far away, as on a CPU.
    """
    row = max(1, batch * size)
    root = math.isqrt(length)
    most = max(1, WIDTH // row) if is_local else length
    steps = max(8, min(STEPS, root) if is_local else root)
    if is_local and most == 1:  # wide enough as it is: no second pass
        steps = max(8, min(length, PIECE // row))
    return list(_cut(length, steps, most))


def _cut(length: int, steps: int, most: int) -> Iterator[Piece]:
    start = 0
    while length - start >= steps:
        chunks = min(most, (length - start) // steps)
        yield Piece(start, steps, chunks)
        start += steps * chunks
    if start < length:
        yield Piece(start, length - start, 1)
