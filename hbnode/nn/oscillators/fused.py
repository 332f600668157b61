"""The scan with its input and output maps, and its gradient by hand, for one kind of coefficients.

A piece of samples at a time goes through all steps, so that what is in between stays in the cache and is never stored.
Kept for the backward pass are the inputs and the states between chunks; all else is computed again, piece by piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode.nn.oscillators.coefficients import Coefficients, Entries, Products
from hbnode.nn.oscillators.layout import Piece
from hbnode.nn.oscillators.passes import run, run_backward, starts
from hbnode.nn.oscillators.plain import ScanInput

Grads = tuple[Tensor | None, ...]


@dataclasses.dataclass
class _Setting:
    """What both passes work with, piece by piece."""

    inputs: ScanInput
    coefficients: Coefficients

    def rows(self, piece: Piece, z: Tensor) -> Tensor:
        """The rows of a piece of (batch, T, n), in the dtype of the scan."""
        return piece.of(z).to(self.inputs.v0.dtype, memory_format=torch.contiguous_format).reshape(-1, z.shape[-1])

    def gaps(self, piece: Piece) -> Tensor:
        """Those of a piece, (steps, batch or 1, chunks, 1)."""
        gaps, like = self.inputs.gaps, self.inputs.v0
        if gaps is None:
            return like.new_empty(1).expand(piece.steps, 1, piece.chunks, 1)
        return piece.of(gaps).to(like.dtype, memory_format=torch.contiguous_format).unsqueeze(-1)

    def drive(self, piece: Piece, rows: Tensor, entries: Entries) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """W x, and the inputs of v and x, None for zeros."""
        u = (rows @ self.inputs.w.T).view(piece.steps, len(self.inputs.v0), -1)
        if entries.fv is None or entries.fx is None:
            return u, (u, None)
        return u, (u * entries.fv, u * entries.fx)

    def at_ends(self, piece: Piece) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Which sequences end in the piece, and the indices of their ends in (steps, batch, chunks)."""
        ends = self.inputs.ends
        assert ends is not None
        at = ends - piece.start
        size = piece.steps * piece.chunks
        is_here, at = (at >= 0) & (at < size), at.clamp(0, size - 1)
        return is_here.unsqueeze(1), (at % piece.steps, torch.arange(len(at), device=at.device), at // piece.steps)


def forward(coefficients: Coefficients, inputs: ScanInput, cut: list[Piece]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs, the last v and x, and the states before all chunks and the last, (2, batch, chunks + 1, P)."""
    setting = _Setting(inputs, coefficients)
    x, v0, c, d = inputs.x, inputs.v0, inputs.c, inputs.d
    (batch, length, _), size = x.shape, v0.shape[1]
    y = v0.new_empty(batch, length, len(c), dtype=output_dtype(inputs))
    before = inputs.v0, inputs.x0
    end = before
    kept = v0.new_empty(2, batch, sum(piece.chunks for piece in cut) + 1, size)
    chunk = 0
    for piece in cut:
        rows, gaps = setting.rows(piece, x), setting.gaps(piece)
        entries = setting.coefficients.entries(gaps)
        _, b = setting.drive(piece, rows, entries)
        carries = setting.coefficients.carries(gaps, entries) if piece.chunks > 1 else [v0.unsqueeze(1)]
        first = starts(entries, carries, b, before)
        torch.stack(first, out=kept[:, :, chunk : chunk + piece.chunks])
        chunk += piece.chunks
        v, q = run(entries, b, first)
        out = v[1:].view(-1, size) @ c[:, :size].T
        out.addmm_(q[1:].view(-1, size), c[:, size:].T)
        if d is not None:
            out.addmm_(rows, d.T)
        piece.of(y).copy_(out.view(piece.steps, batch, piece.chunks, -1))
        shape = (piece.steps, batch, piece.chunks, size)
        before = v[-1].view(shape[1:])[:, -1], q[-1].view(shape[1:])[:, -1]
        if inputs.ends is None:
            end = before
        else:
            is_here, at = setting.at_ends(piece)
            ends = [torch.where(is_here, z[1:].view(shape)[at], old) for z, old in zip((v, q), end, strict=True)]
            end = ends[0], ends[1]
    torch.stack(end, out=kept[:, :, -1])
    return y, end[0].contiguous(), end[1].contiguous(), kept


def output_dtype(inputs: ScanInput) -> torch.dtype:
    """That of the samples where it is a half precision, else that of the scan."""
    return inputs.x.dtype if inputs.x.dtype.itemsize < inputs.v0.dtype.itemsize else inputs.v0.dtype


def backward(
    coefficients: Coefficients,
    inputs: ScanInput,
    cut: list[Piece],
    kept: Tensor,
    wanted: Sequence[bool],
    grads: tuple[Tensor, Tensor, Tensor],
) -> Grads:
    """The gradients of ``inputs``, those that are wanted."""
    each_wanted: Any = wanted
    found = _Gradients(_Setting(inputs, coefficients), ScanInput(*each_wanted), grads)
    chunk = kept.shape[2] - 1
    for piece in reversed(cut):
        chunk -= piece.chunks
        found.add(piece, kept[:, :, chunk : chunk + piece.chunks])
    return found.all()


class _Gradients:
    """Collects the gradients of a scan piece by piece, from the last to the first."""

    def __init__(self, setting: _Setting, wanted: Any, grads: tuple[Tensor, Tensor, Tensor]) -> None:
        self.setting, self.wanted = setting, wanted
        inputs = setting.inputs
        self.dy, self.dends = grads[0], (grads[1], grads[2])
        zeros = torch.zeros_like(inputs.v0)
        self.after = (zeros, zeros) if inputs.ends is not None else self.dends
        self.dx = inputs.v0.new_empty(inputs.x.shape, dtype=inputs.x.dtype) if wanted.x else None
        self.dgaps = None if inputs.gaps is None or not wanted.gaps else torch.empty_like(inputs.gaps)
        self.dw, self.dc = torch.zeros_like(inputs.w), torch.zeros_like(inputs.c)
        self.dd = None if inputs.d is None else torch.zeros_like(inputs.d)

    def add(self, piece: Piece, before: Tensor) -> None:
        """Those of a piece; ``before`` are the states before its chunks."""
        setting, inputs = self.setting, self.setting.inputs
        batch, size = inputs.v0.shape
        shape = (piece.steps, batch, piece.chunks, -1)
        rows, gaps, dy = setting.rows(piece, inputs.x), setting.gaps(piece), setting.rows(piece, self.dy)
        entries = setting.coefficients.entries(gaps, for_gradient=self.wanted.rates or self.wanted.gaps)
        carries = setting.coefficients.carries(gaps, entries) if piece.chunks > 1 else [inputs.v0.unsqueeze(1)]
        u, b = setting.drive(piece, rows, entries)
        v, x = run(entries, b, (before[0], before[1]))
        self.dc[:, :size].addmm_(dy.T, v[1:].view(-1, size))
        self.dc[:, size:].addmm_(dy.T, x[1:].view(-1, size))
        gv = torch.mm(dy, inputs.c[:, :size]).view(v[1:].shape)
        gx = torch.mm(dy, inputs.c[:, size:]).view(v[1:].shape)
        if inputs.ends is not None:
            is_here, at = setting.at_ends(piece)
            for of, end in zip((gv, gx), self.dends, strict=True):
                of.view(shape).index_put_(at, torch.where(is_here, end, 0.0), accumulate=True)
        self.after = run_backward(entries, carries, (gv, gx), self.after)
        of_u = gv
        if entries.fv is not None and entries.fx is not None:
            of_u = (gv * entries.fv).addcmul_(gx, entries.fx)
        of_rows = of_u.view(-1, size)
        self.dw.addmm_(of_rows.T, rows)
        if self.dx is not None:
            of_x = of_rows @ inputs.w
            of_x = of_x if inputs.d is None else of_x.addmm_(dy, inputs.d)
            piece.of(self.dx).copy_(of_x.view(shape))
        if self.dd is not None:
            self.dd.addmm_(dy.T, rows)
        if self.wanted.rates or self.wanted.gaps:
            dgaps = setting.coefficients.add(gaps, entries, Products(v, x, u, gv, gx), self.wanted.gaps)
            if self.dgaps is not None and dgaps is not None:
                of_gaps = piece.of(self.dgaps)
                of_gaps.copy_(dgaps.squeeze(-1).sum_to_size(of_gaps.shape))

    def all(self) -> Grads:
        """The gradients of all inputs, None for those that are not wanted."""
        rates = self.setting.coefficients.gradient() if self.wanted.rates else None
        dv, dx = (grad.contiguous() for grad in self.after)
        every = (self.dx, dv, dx, self.dw, self.dc, self.dd, rates, self.dgaps, None)
        return tuple(grad if wanted else None for grad, wanted in zip(every, self.wanted, strict=True))
