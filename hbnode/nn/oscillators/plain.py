"""The scan as a loop of operations that autograd, transforms and second derivatives know."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hbnode.nn.oscillators.coefficients import Entries, entries_of


class ScanInput(NamedTuple):
    """What a scan works on: y = C [v; x] + D x, where h = (v, x) follows h_t = M_t h_{t-1} + f_t W x_t.

    Attributes:
        x: samples (batch, T, input_size).
        v0: v before the first transition, (batch, P), in the dtype of the scan.
        x0: x likewise.
        w: W, (P, input_size).
        c: C, (output_size, 2 P).
        d: D, (output_size, input_size); None for zeros.
        rates: γ and κ; of the kind "fixed" the entries of M, and of f if the input is held, (n, P).
        gaps: time before each sample, (batch or 1, T); None of the kind "fixed".
        ends: index of the last sample of each sequence (batch,); None for T - 1.
    """

    x: Tensor
    v0: Tensor
    x0: Tensor
    w: Tensor
    c: Tensor
    d: Tensor | None
    rates: Tensor
    gaps: Tensor | None
    ends: Tensor | None


def plain_scan(kind: str, is_held: bool, inputs: ScanInput) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, and the last v and x; as :func:`hbnode.nn.oscillators.scan.scan`."""
    dtype = inputs.v0.dtype
    samples = inputs.x.to(dtype)
    u = samples @ inputs.w.T
    rates = inputs.rates.to(dtype)
    if inputs.gaps is None:
        steps = [Entries(*rates)] * samples.shape[1]
    else:
        every = entries_of(kind, is_held, rates[0], rates[1], inputs.gaps.to(dtype).unsqueeze(-1))
        rows = zip(*(entry.unbind(1) for entry in every if entry is not None), strict=True)
        steps = [Entries(*row) for row in rows]
    v, x = inputs.v0, inputs.x0
    path = []
    for u_t, (vv, vx, xv, xx, fv, fx) in zip(u.unbind(1), steps, strict=True):
        v, x = vv * v + vx * x, xv * v + xx * x
        v, x = (v + u_t, x) if fv is None or fx is None else (v + fv * u_t, x + fx * u_t)
        path.append(torch.cat([v, x], -1))
    states = torch.stack(path, 1)
    y = states @ inputs.c.T
    y = y if inputs.d is None else y + samples @ inputs.d.T
    if inputs.ends is not None:
        last = states.gather(1, inputs.ends.view(-1, 1, 1).expand(-1, 1, states.shape[-1]))[:, 0]
        v, x = last.chunk(2, -1)
    return y.to(inputs.x.dtype if inputs.x.dtype.itemsize < dtype.itemsize else dtype), v, x
