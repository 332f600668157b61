"""What the gates make of a chunk, and the gradients of the gates.

The state S, P before a chunk and the error e_c that is written at each of its steps reach S and P at step r with
weights g_r and l_r, rows over the columns [S, P, e_0, …, e_{C−1}]:

    l_r = μ_r l_{r−1} + (1 at e_r),   g_r = α_r g_{r−1} + s_r l_r.

So G[r, c] = g_r[e_c], Lμ[r, c] = l_r[e_c], ā_r = g_r[S], f_r = g_r[P] and m̄_r = l_r[P]. Everything is a product or a
sum of gates: no logarithms are added up and no difference is taken. Without momentum there is no l and no column P,
and g_r = α_r g_{r−1} + (1 at e_r).

The recursion runs within blocks of a few steps, for all blocks at once, then from block to block. The rows of a block
are combinations of the two rows before it, plus what is written within it. The last axis is that of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 8


class ChunkWeights(NamedTuple):
    """Row i of block b is g = ``combining[i, :, b] @ rows[b]``, plus ``inner[i, :, b]`` at the columns of the block.

    The number of parts is 2, or 1 without momentum.

    Attributes:
        combining: (BLOCK, parts, blocks, chunks).
        inner: (BLOCK, BLOCK, blocks, chunks).
        rows: g and l before each block and after the last (blocks + 1, parts, parts + C, chunks).
    """

    combining: Tensor
    inner: Tensor
    rows: Tensor


class WeightRecursion:
    """The recursion over the gates of all chunks, and its transpose.

    Arguments:
        decay: α (C, chunks), where BLOCK divides C; None is 1, and only with momentum.
        momentum: μ, likewise; None is a memory without momentum.
        step: s, likewise; None without momentum.
    """

    def __init__(self, decay: Tensor | None, momentum: Tensor | None, step: Tensor | None) -> None:
        self.decay, self.momentum, self.step = (
            () if z is None else z.unflatten(0, (-1, BLOCK)).unbind(1) for z in (decay, momentum, step)
        )
        like = momentum if decay is None else decay
        assert like is not None
        steps, chunks = like.shape
        self.parts = 1 if momentum is None else 2
        self.blocks = steps // BLOCK
        # g and l within blocks; row 0 is that before the block. l has no column for S, which P does not depend on
        self.g = like.new_zeros(BLOCK + 1, self.parts + BLOCK, self.blocks, chunks)
        self.l = like.new_zeros(BLOCK + 1, 1 + BLOCK, self.blocks, chunks) if self.parts == 2 else None
        self.rows = like.new_zeros(self.blocks + 1, self.parts, self.parts + steps, chunks)
        self.g[0, 0] = 1.0
        (self.g if self.l is None else self.l).diagonal().fill_(1.0)
        self.rows[0].diagonal().fill_(1.0)
        for i in range(BLOCK):
            self._step(i)
        for block in range(self.blocks):
            self._block(block)

    def weights(self) -> ChunkWeights:
        """The weights of each chunk."""
        return ChunkWeights(self.g[1:, : self.parts], self.g[1:, self.parts :], self.rows)

    def _step(self, i: int) -> None:
        """Row i + 1 of every block from row i."""
        old, new = self.g[i, : i + self.parts], self.g[i + 1, : i + self.parts]
        if self.l is None:
            torch.mul(old, self.decay[i], out=new)
            return
        torch.mul(self.l[i, : i + 1], self.momentum[i], out=self.l[i + 1, : i + 1])
        torch.mul(self.l[i + 1, : i + 2], self.step[i], out=self.g[i + 1, 1 : i + 3])
        if self.decay:
            new.addcmul_(old, self.decay[i])
        else:
            new += old

    def _block(self, block: int) -> None:
        """The rows after a block from those before it."""
        width, parts = self.parts + block * BLOCK, self.parts
        old, new, g = self.rows[block, :, :width], self.rows[block + 1], self.g[-1, :, block]
        torch.mul(old[0], g[0], out=new[0, :width])
        new[0, width : width + BLOCK] = g[parts:]
        if self.l is not None:
            new[0, :width].addcmul_(old[1], g[1])
            torch.mul(old[1], self.l[-1, 0, block], out=new[1, :width])
            new[1, width : width + BLOCK] = self.l[-1, 1:, block]

    def backward(self, grads: ChunkWeights) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of decay, momentum and step from those of the weights, which are changed in place."""
        dg = torch.cat([grads.combining, grads.inner], 1)
        dl = None if self.l is None else torch.zeros_like(self.l[1:])
        for block in reversed(range(self.blocks)):
            self._block_backward(block, grads.rows)
        # where a row or column is before its time the weight is 0, and its gradient is of no account
        old, new = self.rows[:-1], grads.rows[1:]
        dg[-1, 0] += (new[:, 0] * old[:, 0]).sum(1)
        dg[-1, self.parts :] += self._written(new[:, 0])
        if dl is not None:
            dg[-1, 1] += (new[:, 0] * old[:, 1]).sum(1)
            dl[-1, 0] = (new[:, 1] * old[:, 1]).sum(1)
            dl[-1, 1:] = self._written(new[:, 1])
        for i in reversed(range(BLOCK)):
            self._step_backward(i, dg, dl)
        decay = _joined((dg * self.g[:-1]).sum(1)) if self.decay else None
        if self.l is None or dl is None:
            return decay, None, None
        return decay, _joined((dl * self.l[:-1]).sum(1)), _joined((dg[:, 1:] * self.l[1:]).sum(1))

    def _written(self, rows: Tensor) -> Tensor:
        """Of the rows after each block, what is at the columns of its own steps (BLOCK, blocks, chunks)."""
        steps = rows[:, self.parts :].unflatten(1, (-1, BLOCK))
        return steps.diagonal(dim1=0, dim2=1).permute(0, 2, 1)

    def _block_backward(self, block: int, drows: Tensor) -> None:
        """Add to the gradients of the rows before a block those that come through the rows after it."""
        width = self.parts + block * BLOCK
        g, old, new = self.g[-1, :, block], drows[block, :, :width], drows[block + 1, :, :width]
        old[0].addcmul_(new[0], g[0])
        if self.l is not None:
            old[1].addcmul_(new[0], g[1]).addcmul_(new[1], self.l[-1, 0, block])

    def _step_backward(self, i: int, dg: Tensor, dl: Tensor | None) -> None:
        """Add to the gradients of row i of every block those that come through row i + 1.

        The first axis of dg and dl is that of rows 1 to BLOCK.
        """
        if dl is not None:
            dl[i, : i + 2].addcmul_(dg[i, 1 : i + 3], self.step[i])
        if i == 0:
            return
        end = i + self.parts
        if self.decay:
            dg[i - 1, :end].addcmul_(dg[i, :end], self.decay[i])
        else:
            dg[i - 1, :end] += dg[i, :end]
        if dl is not None:
            dl[i - 1, : i + 1].addcmul_(dl[i, : i + 1], self.momentum[i])


def _joined(steps: Tensor) -> Tensor:
    """(BLOCK, blocks, chunks) -> (C, chunks)."""
    return steps.transpose(0, 1).flatten(0, 1)
