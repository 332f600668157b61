"""One step of each cell, and its transpose written out: what a scan over time is made of.

With the drive d_t and the recurrent bias, all of a_t but U h_{t-1} is ready for many samples at once. Likewise the
transpose of a step multiplies with factors that are ready for many samples at once; U apart, it is diagonal.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Taken(NamedTuple):
    """A step that was taken, or several, on a first axis.

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
        a: gradient of a_t (batch, gates * n).
        rest: gradient of the rest of the drive.
        h: gradient of h_{t-1} on ways besides a_t; None where there are none.
        c: gradient of c_{t-1} of an LSTM.
    """

    a: Tensor
    rest: Tensor | None = None
    h: Tensor | None = None
    c: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A cell's step. Its parameters are U and b_hh, or a bias of the activation, which are given to it."""

    gates: ClassVar[int] = 1
    has_cell_state: ClassVar[bool] = False
    bias_is_inside: ClassVar[bool] = False  # of the activation; else it is b_hh

    def prepare(self, d: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """All of a but U h, and what else of the drive a step needs, the rest.

        Arguments:
            d: drive (..., batch, gates * n).
            bias: b_hh, or that of the activation.
        """
        return (d if bias is None or self.bias_is_inside else d + bias), None

    def drive_gradient(self, da: Tensor, drest: Tensor | None) -> Tensor:
        """The gradient of the drive from those of what was prepared."""
        return da

    def forward(self, a: Tensor, rest: Tensor | None, before: Taken, bias: Tensor | None) -> Taken:
        """Take a step.

        Arguments:
            a: (batch, gates * n).
            rest: the rest of the drive.
            before: the step before.
            bias: as for :meth:`prepare`.
        """
        raise NotImplementedError

    def run(
        self, a: Tensor, rest: Tensor | None, u: Tensor, bias: Tensor | None, before: Taken, out: Tensor | None = None
    ) -> Taken:
        """Take several steps, samples on the first axis.

        Arguments:
            a: all of a but U h (T, batch, gates * n).
            rest: the rest of the drive.
            u: the transpose of U.
            bias: as for :meth:`prepare`.
            before: the step before.
            out: where h goes; without it everything is new, as torch.compile has it.
        """
        rest = [None] * len(a) if rest is None else rest.unbind()
        steps = [before]
        for a_t, rest_t in zip(a.unbind(), rest, strict=True):
            steps.append(self.forward(torch.addmm(a_t, steps[-1].h, u), rest_t, steps[-1], bias))
        h, c, parts = zip(*steps[1:], strict=True)
        h = torch.stack(h) if out is None else torch.stack(h, out=out)
        parts = tuple(torch.stack(part) for part in zip(*parts, strict=True))
        return Taken(h, None if c[0] is None else torch.stack(c), parts)

    def factors(self, before: Taken, taken: Taken) -> tuple[Tensor, ...]:
        """What the transposes of several steps multiply with; all tensors have the samples on their first axis."""
        raise NotImplementedError

    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        """Transpose a step: from the gradients of h_t and c_t, with its factors."""
        raise NotImplementedError


class _ElmanStep(Step):
    def backward(self, dh: Tensor, dc: None, slope: Tensor) -> Gradients:
        """As that of :class:`Step`."""
        return Gradients(dh * slope)


class TanhStep(_ElmanStep):
    """h_t = tanh(a_t)."""

    def forward(self, a: Tensor, rest: None, before: Taken, bias: Tensor | None) -> Taken:
        """As that of :class:`Step`."""
        return Taken(torch.tanh(a))

    def factors(self, before: Taken, taken: Taken) -> tuple[Tensor, ...]:
        """As that of :class:`Step`."""
        return (1 - taken.h * taken.h,)


class ReLUStep(_ElmanStep):
    """h_t = relu(a_t)."""

    def forward(self, a: Tensor, rest: None, before: Taken, bias: Tensor | None) -> Taken:
        """As that of :class:`Step`."""
        return Taken(torch.relu(a))

    def factors(self, before: Taken, taken: Taken) -> tuple[Tensor, ...]:
        """As that of :class:`Step`."""
        return ((taken.h > 0).to(taken.h),)


class ModReLUStep(_ElmanStep):
    """h_t = modrelu(a_t), modrelu(a) = sign(a) relu(|a| + b); the gradient of b is that of a times the sign of h."""

    bias_is_inside: ClassVar[bool] = True

    def forward(self, a: Tensor, rest: None, before: Taken, bias: Tensor) -> Taken:
        """As that of :class:`Step`."""
        return Taken(a.sign() * torch.relu(a.abs() + bias))

    def factors(self, before: Taken, taken: Taken) -> tuple[Tensor, ...]:
        """As that of :class:`Step`."""
        return ((taken.h != 0).to(taken.h),)


class LSTMStep(Step):
    """The gates i, f, g, o are those of torch.nn.LSTM."""

    gates: ClassVar[int] = 4
    has_cell_state: ClassVar[bool] = True

    def forward(self, a: Tensor, rest: None, before: Taken, bias: Tensor | None) -> Taken:
        """As that of :class:`Step`."""
        i, f, g, o = a.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = torch.addcmul(f * before.c, i, g)
        return Taken(o * c.tanh(), c, (i, f, g, o))

    def run(
        self, a: Tensor, rest: None, u: Tensor, bias: Tensor | None, before: Taken, out: Tensor | None = None
    ) -> Taken:
        """As that of :class:`Step`, in few calls on memory that is there already."""
        if out is None:
            return super().run(a, rest, u, bias, before)
        gates, cells, tanh_c = torch.empty_like(a), torch.empty_like(out), torch.empty_like(before.c)
        parts = gates.chunk(4, dim=-1)
        i_and_f = gates[..., : gates.shape[-1] // 2]
        h, c = before.h, before.c
        places = (z.unbind() for z in (a, gates, i_and_f, *parts, cells, out))
        for a_t, gates_t, i_and_f_t, i, f, g, o, c_t, h_t in zip(*places, strict=True):
            torch.addmm(a_t, h, u, out=gates_t)
            i_and_f_t.sigmoid_(), g.tanh_(), o.sigmoid_()
            c = torch.mul(f, c, out=c_t).addcmul_(i, g)
            h = torch.mul(o, torch.tanh(c, out=tanh_c), out=h_t)
        return Taken(out, cells, parts)

    def factors(self, before: Taken, taken: Taken) -> tuple[Tensor, ...]:
        """As that of :class:`Step`."""
        i, f, g, o = taken.parts
        tanh_c = taken.c.tanh()
        through_c = torch.stack([g * i * (1 - i), before.c * f * (1 - f), i * (1 - g * g)], dim=-2)
        return o * (1 - tanh_c * tanh_c), through_c, tanh_c * o * (1 - o), f

    def backward(self, dh: Tensor, dc: Tensor, h_to_c: Tensor, through_c: Tensor, to_o: Tensor, f: Tensor) -> Gradients:
        """As that of :class:`Step`."""
        dc = torch.addcmul(dc, dh, h_to_c)
        return Gradients(torch.cat([(through_c * dc.unsqueeze(-2)).flatten(-2), dh * to_o], dim=-1), c=dc * f)


class GRUStep(Step):
    """The gates r, z, n are those of torch.nn.GRU; r multiplies U h + b_hh of n, and not the drive, the rest."""

    gates: ClassVar[int] = 3

    def prepare(self, d: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """As that of :class:`Step`."""
        r, z, n = d.chunk(3, dim=-1)
        a = torch.cat([r, z, torch.zeros_like(n)], dim=-1)
        return (a if bias is None else a + bias), n

    def drive_gradient(self, da: Tensor, drest: Tensor) -> Tensor:
        """As that of :class:`Step`."""
        return torch.cat([da[..., : 2 * drest.shape[-1]], drest], dim=-1)

    def forward(self, a: Tensor, rest: Tensor, before: Taken, bias: Tensor | None) -> Taken:
        """As that of :class:`Step`."""
        r, z, un = a.chunk(3, dim=-1)
        r, z = r.sigmoid(), z.sigmoid()
        n = torch.addcmul(rest, r, un).tanh()
        return Taken(n + z * (before.h - n), None, (r, z, n, un))

    def run(
        self, a: Tensor, rest: Tensor, u: Tensor, bias: Tensor | None, before: Taken, out: Tensor | None = None
    ) -> Taken:
        """As that of :class:`Step`, in few calls on memory that is there already."""
        if out is None:
            return super().run(a, rest, u, bias, before)
        gates, new, h = torch.empty_like(a), torch.empty_like(out), before.h
        r, z, un = gates.chunk(3, dim=-1)
        r_and_z = gates[..., : 2 * out.shape[-1]]
        places = (z.unbind() for z in (a, rest, gates, r_and_z, r, z, un, new, out))
        for a_t, rest_t, gates_t, r_and_z_t, r_t, z_t, un_t, n_t, h_t in zip(*places, strict=True):
            torch.addmm(a_t, h, u, out=gates_t)
            r_and_z_t.sigmoid_()
            torch.addcmul(rest_t, r_t, un_t, out=n_t).tanh_()
            h = torch.lerp(n_t, h, z_t, out=h_t)
        return Taken(out, None, (r, z, new, un))

    def factors(self, before: Taken, taken: Taken) -> tuple[Tensor, ...]:
        """As that of :class:`Step`."""
        r, z, n, un = taken.parts
        to_n = (1 - z) * (1 - n * n)
        to_a = torch.stack([to_n * un * r * (1 - r), (before.h - n) * z * (1 - z), to_n * r], dim=-2)
        return to_a, to_n, z

    def backward(self, dh: Tensor, dc: None, to_a: Tensor, to_n: Tensor, z: Tensor) -> Gradients:
        """As that of :class:`Step`."""
        return Gradients((to_a * dh.unsqueeze(-2)).flatten(-2), rest=dh * to_n, h=dh * z)
