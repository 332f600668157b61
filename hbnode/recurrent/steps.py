"""One step of each cell, and its transpose written out: what a scan over time is made of.

A step makes h_t of the drive d_t and of u_t = U h_{t-1} + b_hh, both ``gates`` times as wide as h.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


class Taken(NamedTuple):
    """A step that was taken.

    Attributes:
        h: h_t (batch, n).
        c: c_t (batch, n) of an LSTM.
        parts: values on the way that its transpose needs.
    """

    h: Tensor
    c: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class Gradients(NamedTuple):
    """What the transpose of a step gives.

    Attributes:
        d: gradient of the drive (batch, gates * n).
        u: gradient of u (batch, gates * n).
        h: gradient of h_{t-1} on ways besides u; None where there are none.
        c: gradient of c_{t-1} of an LSTM.
    """

    d: Tensor
    u: Tensor
    h: Tensor | None = None
    c: Tensor | None = None


class Step:
    """A cell's step. Its parameters are U and b_hh, or a bias of the activation, which are given to it."""

    gates: ClassVar[int] = 1
    has_cell_state: ClassVar[bool] = False
    bias_is_inside: ClassVar[bool] = False  # of the activation; else it is b_hh

    def forward(self, d: Tensor, u: Tensor, before: Taken, bias: Tensor | None) -> Taken:
        """Take a step from the one before; ``bias`` is that of the activation."""
        raise NotImplementedError

    def backward(self, dh: Tensor, dc: Tensor | None, before: Taken, taken: Taken) -> Gradients:
        """Transpose a step: from the gradients of h_t and c_t."""
        raise NotImplementedError


class TanhStep(Step):
    """h_t = tanh(d_t + u_t)."""

    def forward(self, d: Tensor, u: Tensor, before: Taken, bias: None) -> Taken:
        """As that of :class:`Step`."""
        return Taken(torch.tanh(d + u))

    def backward(self, dh: Tensor, dc: None, before: Taken, taken: Taken) -> Gradients:
        """As that of :class:`Step`."""
        dz = _tanh_backward(dh, taken.h)
        return Gradients(dz, dz)


class ReLUStep(Step):
    """h_t = relu(d_t + u_t)."""

    def forward(self, d: Tensor, u: Tensor, before: Taken, bias: None) -> Taken:
        """As that of :class:`Step`."""
        return Taken(torch.relu(d + u))

    def backward(self, dh: Tensor, dc: None, before: Taken, taken: Taken) -> Gradients:
        """As that of :class:`Step`."""
        dz = torch.where(taken.h > 0, dh, 0.0)
        return Gradients(dz, dz)


class ModReLUStep(Step):
    """h_t = modrelu(d_t + u_t), modrelu(z) = sign(z) relu(|z| + b)."""

    bias_is_inside: ClassVar[bool] = True

    def forward(self, d: Tensor, u: Tensor, before: Taken, bias: Tensor) -> Taken:
        """As that of :class:`Step`."""
        z = d + u
        return Taken(z.sign() * torch.relu(z.abs() + bias))

    def backward(self, dh: Tensor, dc: None, before: Taken, taken: Taken) -> Gradients:
        """As that of :class:`Step`; the bias has the gradient of d times the sign of h."""
        dz = torch.where(taken.h != 0, dh, 0.0)
        return Gradients(dz, dz)


class LSTMStep(Step):
    """The gates i, f, g, o are those of torch.nn.LSTM."""

    gates: ClassVar[int] = 4
    has_cell_state: ClassVar[bool] = True

    def forward(self, d: Tensor, u: Tensor, before: Taken, bias: None) -> Taken:
        """As that of :class:`Step`."""
        i, f, g, o = (d + u).chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * before.c + i * g
        return Taken(o * c.tanh(), c, (i, f, g, o))

    def backward(self, dh: Tensor, dc: Tensor, before: Taken, taken: Taken) -> Gradients:
        """As that of :class:`Step`."""
        i, f, g, o = taken.parts
        tanh_c = taken.c.tanh()
        dc = dc + _tanh_backward(dh * o, tanh_c)
        di, df = _sigmoid_backward(dc * g, i), _sigmoid_backward(dc * before.c, f)
        dg, do = _tanh_backward(dc * i, g), _sigmoid_backward(dh * tanh_c, o)
        dz = torch.cat([di, df, dg, do], dim=-1)
        return Gradients(dz, dz, c=dc * f)


class GRUStep(Step):
    """The gates r, z, n are those of torch.nn.GRU; r multiplies u of n, and not d."""

    gates: ClassVar[int] = 3

    def forward(self, d: Tensor, u: Tensor, before: Taken, bias: None) -> Taken:
        """As that of :class:`Step`."""
        (dr, dz, dn), (ur, uz, un) = d.chunk(3, dim=-1), u.chunk(3, dim=-1)
        r, z = (dr + ur).sigmoid(), (dz + uz).sigmoid()
        n = (dn + r * un).tanh()
        return Taken(n + z * (before.h - n), None, (r, z, n, un))

    def backward(self, dh: Tensor, dc: None, before: Taken, taken: Taken) -> Gradients:
        """As that of :class:`Step`."""
        r, z, n, un = taken.parts
        dn = _tanh_backward(dh * (1 - z), n)
        dz = _sigmoid_backward(dh * (before.h - n), z)
        dr = _sigmoid_backward(dn * un, r)
        return Gradients(torch.cat([dr, dz, dn], dim=-1), torch.cat([dr, dz, dn * r], dim=-1), h=dh * z)
