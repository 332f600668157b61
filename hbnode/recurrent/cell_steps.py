"""One step of each cell, and its transpose written out; a scan over time calls these.

The input d_t and the recurrent bias make up all of a_t but U h_{t-1}: that part is computed for many samples at once.
Likewise the transpose of a step multiplies with factors that are computed for many samples at once. Apart from U, the
transpose is diagonal.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override


class CellOutput(NamedTuple):
    """The output of one step, or of several steps stacked on a first axis.

    Attributes:
        h: h_t (batch, n).
        c: c_t (batch, n) of an LSTM.
        parts: intermediate values that the transpose needs.
    """

    h: Tensor
    c: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class Gradients(NamedTuple):
    """Gradients that the transpose of a step returns.

    Attributes:
        a: gradient of a_t (batch, gates * n).
        rest: gradient of the rest of d_t.
        h: gradient of h_{t-1} on paths other than through a_t; None if there are none.
        c: gradient of c_{t-1} of an LSTM.
    """

    a: Tensor
    rest: Tensor | None = None
    h: Tensor | None = None
    c: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class CellStep:
    """A cell's step. The caller passes its parameters: U, and b_hh or the bias of the activation."""

    gates: ClassVar[int] = 1
    has_cell_state: ClassVar[bool] = False
    bias_is_inside: ClassVar[bool] = False  # of the activation; else it is b_hh

    def prepare(self, d: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return all of a but U h, and the rest: the part of d that a step needs beside a.

        Arguments:
            d: filtered input (..., batch, gates * n).
            bias: b_hh, or that of the activation.
        """
        return (d if bias is None or self.bias_is_inside else d + bias), None

    def input_gradient(self, da: Tensor, drest: Tensor | None) -> Tensor:
        """Gradient of d from the gradients of what :meth:`prepare` returned."""
        return da

    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        """Take a step.

        Arguments:
            a: (batch, gates * n).
            rest: the rest of d.
            before: the output of the step before.
            bias: as for :meth:`prepare`.
        """
        raise NotImplementedError

    def run(
        self,
        a: Tensor,
        rest: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        before: CellOutput,
        out: Tensor | None = None,
    ) -> CellOutput:
        """Take several steps, with the samples on the first axis.

        Arguments:
            a: all of a but U h (T, batch, gates * n).
            rest: the rest of d.
            u: the transpose of U.
            bias: as for :meth:`prepare`.
            before: the output of the step before.
            out: memory for h; without it all results are new tensors, which torch.compile needs.
        """
        rests = [None] * len(a) if rest is None else rest.unbind()
        steps = [before]
        for a_t, rest_t in zip(a.unbind(), rests, strict=True):
            steps.append(self.forward(torch.addmm(a_t, steps[-1].h, u), rest_t, steps[-1], bias))
        h = torch.stack([step.h for step in steps[1:]], out=out)
        c = None if steps[-1].c is None else torch.stack([step.c for step in steps[1:] if step.c is not None])
        parts = zip(*(step.parts for step in steps[1:]), strict=True)
        return CellOutput(h, c, tuple(torch.stack(part) for part in parts))

    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        """Factors of the transposes of several steps; all tensors have the samples on their first axis.

        Arguments:
            before: the outputs of the steps before each step.
            after: the outputs of the steps.
        """
        raise NotImplementedError

    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        """Transpose a step: from the gradients of h_t and c_t, with its factors."""
        raise NotImplementedError


class _ElmanStep(CellStep):
    @override
    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        (slope,) = factors
        return Gradients(dh * slope)


class TanhStep(_ElmanStep):
    """h_t = tanh(a_t)."""

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        return CellOutput(torch.tanh(a))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        return (1 - after.h * after.h,)


class ReLUStep(_ElmanStep):
    """h_t = relu(a_t)."""

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        return CellOutput(torch.relu(a))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        return ((after.h > 0).to(after.h),)


class ModReLUStep(_ElmanStep):
    """h_t = modrelu(a_t), modrelu(a) = sign(a) relu(|a| + b); the gradient of b is that of a times the sign of h."""

    bias_is_inside: ClassVar[bool] = True

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        assert bias is not None
        return CellOutput(a.sign() * torch.relu(a.abs() + bias))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        return ((after.h != 0).to(after.h),)


class LSTMStep(CellStep):
    """The gates i, f, g, o are those of torch.nn.LSTM."""

    gates: ClassVar[int] = 4
    has_cell_state: ClassVar[bool] = True

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        i, f, g, o = a.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        assert before.c is not None
        c = torch.addcmul(f * before.c, i, g)
        return CellOutput(o * c.tanh(), c, (i, f, g, o))

    @override
    def run(
        self,
        a: Tensor,
        rest: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        before: CellOutput,
        out: Tensor | None = None,
    ) -> CellOutput:
        if out is None:
            return super().run(a, rest, u, bias, before)
        assert before.c is not None  # what follows is few calls on memory that is there already
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
        return CellOutput(out, cells, parts)

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        i, f, g, o = after.parts
        assert before.c is not None
        assert after.c is not None
        tanh_c = after.c.tanh()
        through_c = torch.stack([g * i * (1 - i), before.c * f * (1 - f), i * (1 - g * g)], dim=-2)
        return o * (1 - tanh_c * tanh_c), through_c, tanh_c * o * (1 - o), f

    @override
    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        h_to_c, through_c, to_o, f = factors
        assert dc is not None
        dc = torch.addcmul(dc, dh, h_to_c)
        return Gradients(torch.cat([(through_c * dc.unsqueeze(-2)).flatten(-2), dh * to_o], dim=-1), c=dc * f)


class GRUStep(CellStep):
    """The gates r, z, n are those of torch.nn.GRU; r multiplies U h + b_hh of n, but not d of n, which is the rest."""

    gates: ClassVar[int] = 3

    @override
    def prepare(self, d: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        r, z, n = d.chunk(3, dim=-1)
        a = torch.cat([r, z, torch.zeros_like(n)], dim=-1)
        return (a if bias is None else a + bias), n

    @override
    def input_gradient(self, da: Tensor, drest: Tensor | None) -> Tensor:
        assert drest is not None
        return torch.cat([da[..., : 2 * drest.shape[-1]], drest], dim=-1)

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        r, z, un = a.chunk(3, dim=-1)
        r, z = r.sigmoid(), z.sigmoid()
        assert rest is not None
        n = torch.addcmul(rest, r, un).tanh()
        return CellOutput(n + z * (before.h - n), None, (r, z, n, un))

    @override
    def run(
        self,
        a: Tensor,
        rest: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        before: CellOutput,
        out: Tensor | None = None,
    ) -> CellOutput:
        if out is None:
            return super().run(a, rest, u, bias, before)
        assert rest is not None  # what follows is few calls on memory that is there already
        gates, new, h = torch.empty_like(a), torch.empty_like(out), before.h
        r, z, un = gates.chunk(3, dim=-1)
        r_and_z = gates[..., : 2 * out.shape[-1]]
        places = (z.unbind() for z in (a, rest, gates, r_and_z, r, z, un, new, out))
        for a_t, rest_t, gates_t, r_and_z_t, r_t, z_t, un_t, n_t, h_t in zip(*places, strict=True):
            torch.addmm(a_t, h, u, out=gates_t)
            r_and_z_t.sigmoid_()
            torch.addcmul(rest_t, r_t, un_t, out=n_t).tanh_()
            h = torch.lerp(n_t, h, z_t, out=h_t)
        return CellOutput(out, None, (r, z, new, un))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        r, z, n, un = after.parts
        to_n = (1 - z) * (1 - n * n)
        to_a = torch.stack([to_n * un * r * (1 - r), (before.h - n) * z * (1 - z), to_n * r], dim=-2)
        return to_a, to_n, z

    @override
    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        to_a, to_n, z = factors
        return Gradients((to_a * dh.unsqueeze(-2)).flatten(-2), rest=dh * to_n, h=dh * z)


def elman_step(nonlinearity: str) -> CellStep:
    """The step of an Elman network, "tanh" or "relu"."""
    steps = {"tanh": TanhStep(), "relu": ReLUStep()}
    if nonlinearity not in steps:
        raise ValueError(f"nonlinearity must be one of {tuple(steps)}, got {nonlinearity!r}. Fix: 'tanh'.")
    return steps[nonlinearity]
