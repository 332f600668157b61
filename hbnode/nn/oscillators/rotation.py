r"""Oscillators that swing, in coordinates in which a gap is a rotation and a decay.

With a = γ/2, ω = √(κ - a²) and λ = -a + iω, a free oscillator is z' = λz for z = p + iq, where (p, q) = T (v, x):

.. math:: p = v + a x, \quad q = \omega x, \qquad \text{or}\qquad p = -a v - \kappa x, \quad q = \omega v,

the second being λ times the first. An impulse on v is one on p in the first; in the second an input u, held over the
gap Δ, adds (e^{λΔ} - 1) u. Errors are those of rounding relative to the energy, v² + κx². With g the gradient of z(Δ),
that of -a is Δ Re(ḡ z) and that of ω is Δ Im(ḡ z), z without the impulse, or with u added to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hbnode.nn.oscillators import fused
from hbnode.nn.oscillators.coefficients import Coefficients, Entries, Products
from hbnode.nn.oscillators.layout import Piece
from hbnode.nn.oscillators.plain import ScanInput

Pair = tuple[Tensor, Tensor]


class Rotating(Coefficients):
    """The transitions e^{λΔ} over any gaps.

    Arguments:
        rates: a and ω.
        dtype: that of the scan.
        is_held: whether the input is held over the gap.
    """

    def __init__(self, rates: Tensor, dtype: torch.dtype, is_held: bool) -> None:
        super().__init__(rates, dtype)
        self.is_held = is_held
        self.low = rates.to(dtype)
        self.sums = torch.zeros_like(rates)

    @override
    def entries(self, gaps: Tensor, *, for_gradient: bool = False) -> Entries:
        a, omega = self.low
        if not self.is_held:
            fall, phase = (gaps * -a).exp_(), gaps * omega
            c = phase.cos().mul_(fall)
            s = phase.sin_().mul_(fall)
            return _entries(c, s)
        lost, half = (gaps * -a).expm1_(), gaps * (omega / 2)
        sine, fall = half.sin(), lost + 1
        s = half.cos_().mul_(sine).mul_(fall).mul_(2)
        fallen = sine.square_().mul_(fall).mul_(2)  # e^{-aΔ} (1 - cos ωΔ)
        return _entries(fall.sub_(fallen), s, lost.sub_(fallen))

    @override
    def carries(self, gaps: Tensor, entries: Entries) -> list[Tensor]:
        a, omega = self.rates
        total = gaps.to(self.rates.dtype).sum(0)
        phase = total * omega
        phase -= (phase / (2 * math.pi)).round_() * (2 * math.pi)
        fall, phase = (total * -a).to(self.dtype).exp_(), phase.to(self.dtype)
        c, s = phase.cos() * fall, phase.sin() * fall
        return [c, -s, s, c]

    @override
    def add(self, gaps: Tensor, entries: Entries, products: Products, wants_gaps: bool) -> Tensor | None:
        v, x, u, gv, gx = products
        p, q = (v[1:] + u if self.is_held else v[1:] - u), x[1:]
        along, across = (gv * p).addcmul_(gx, q), (gx * p).addcmul_(gv, q, value=-1)
        weights = gaps.expand(*v[1:].shape[:2], *gaps.shape[2:]).reshape(1, -1)
        for total, each in zip(self.sums, (along, across), strict=True):
            total.add_((weights @ each.view(-1, self.size))[0])
        if not wants_gaps:
            return None
        a, omega = self.low
        shape = (*across.shape[:2], -1, self.size)
        return (across.view(shape) * omega - along.view(shape) * a).sum(-1, keepdim=True)

    @override
    def gradient(self) -> Tensor:
        return torch.stack([-self.sums[0], self.sums[1]])


def _entries(c: Tensor, s: Tensor, lost: Tensor | None = None) -> Entries:
    """Rows of a rotation, and of what an input adds."""
    c, s = c.flatten(2), s.flatten(2)
    return Entries(c, -s, s, c) if lost is None else Entries(c, -s, s, c, lost.flatten(2), s)


class _Coordinates:
    """T and T⁻¹, four rows (P,) each, and what goes through them."""

    def __init__(self, is_held: bool, inputs: ScanInput) -> None:
        self.is_held, self.inputs = is_held, inputs
        gamma, kappa = inputs.rates
        a = gamma / 2
        omega = (kappa - a.square()).sqrt()
        one, zero, slope = torch.ones_like(a), torch.zeros_like(a), a / omega
        if is_held:
            to, back = [-a, -kappa, omega, zero], [zero, 1 / omega, -1 / kappa, -slope / kappa]
        else:
            to, back = [one, a, zero, omega], [one, -slope, zero, 1 / omega]
        self.rates = a, kappa, omega
        rows = torch.stack(to + back).to(inputs.v0.dtype).unbind()
        self.to, self.back = rows[:4], rows[4:]
        self.c = inputs.c.chunk(2, 1)

    def turned(self) -> ScanInput:
        """The inputs of a scan of p and q."""
        p, q = _times(self.to, self.inputs.v0, self.inputs.x0)
        a, _, omega = self.rates
        c = torch.cat(_transposed(self.back, *self.c), 1)
        return self.inputs._replace(v0=p, x0=q, c=c, rates=torch.stack([a, omega]))

    def end(self, p: Tensor, q: Tensor) -> Pair:
        """V and x."""
        return _times(self.back, p, q)

    def end_backward(self, dv: Tensor, dx: Tensor) -> Pair:
        """The gradients of p and q at the end."""
        return _transposed(self.back, dv, dx)

    def gradients(self, found: ScanInput, end: Pair, of_end: Pair) -> ScanInput:
        """Those of the inputs, from those of :meth:`turned`, p and q at the end, and the gradient of v and x there."""
        of_start, of_c = (found.v0, found.x0), found.c.chunk(2, 1)
        dv, dx = _transposed(self.to, *of_start)
        dc = torch.cat(_times(self.back, *of_c), 1)
        rates: Any = found.rates
        if rates is not None:
            of_to = _outer(of_start, (self.inputs.v0, self.inputs.x0))
            of_back = _outer(self.c, of_c) + _outer(of_end, end)
            rates = self._of_rates(rates, of_to.to(rates), of_back.to(rates))
        return found._replace(v0=dv, x0=dx, c=dc, rates=rates)

    def _of_rates(self, rates: Tensor, to: Tensor, back: Tensor) -> Tensor:
        """The gradient of γ and κ, from that of a and ω, and those of T and T⁻¹, (4, P)."""
        a, kappa, omega = self.rates
        da, domega = rates
        if self.is_held:
            of_slope = -back[3] / kappa  # T⁻¹ has -a/ω/κ
            dkappa = (back[2] + back[3] * a / omega) / kappa / kappa - to[1]
            da, domega = da - to[0], domega + to[2] - back[1] / omega / omega
        else:
            of_slope = -back[1]  # T⁻¹ has -a/ω
            dkappa = torch.zeros_like(da)
            da, domega = da + to[1], domega + to[3] - back[3] / omega / omega
        da = da + of_slope / omega
        domega = (domega - of_slope * a / omega / omega) / omega  # of ω², twice
        return torch.stack([(da - a * domega) / 2, dkappa + domega / 2])


def _times(matrix: Sequence[Tensor], one: Tensor, other: Tensor) -> Pair:
    """The product of matrices of rows (P,) and vectors (n, P)."""
    a, b, c, d = matrix
    return torch.addcmul(one * a, other, b), torch.addcmul(one * c, other, d)


def _transposed(matrix: Sequence[Tensor], one: Tensor, other: Tensor) -> Pair:
    """Likewise of the transposes."""
    a, b, c, d = matrix
    return _times((a, c, b, d), one, other)


def _outer(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """The products of vectors (n, P), summed over n, (4, P)."""
    return torch.stack([(a * b).sum(0) for a in one for b in other])


def forward(is_held: bool, inputs: ScanInput, cut: list[Piece]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`hbnode.nn.oscillators.fused.forward`; the states that are kept are p and q."""
    coordinates = _Coordinates(is_held, inputs)
    turned = coordinates.turned()
    y, p, q, kept = fused.forward(Rotating(turned.rates, turned.v0.dtype, is_held), turned, cut)
    return y, *coordinates.end(p, q), kept


def backward(
    is_held: bool,
    inputs: ScanInput,
    cut: list[Piece],
    kept: Tensor,
    wanted: Sequence[bool],
    grads: tuple[Tensor, Tensor, Tensor],
) -> fused.Grads:
    """As :func:`hbnode.nn.oscillators.fused.backward`."""
    coordinates = _Coordinates(is_held, inputs)
    turned = coordinates.turned()
    needed: Any = ScanInput(*wanted)._replace(v0=True, x0=True, c=True)  # type: ignore[arg-type]  # which, not what
    dy, dv, dx = grads
    p, q = kept[:, :, -1]
    of_turned = dy, *coordinates.end_backward(dv, dx)
    coefficients = Rotating(turned.rates, turned.v0.dtype, is_held)
    all_found: Any = fused.backward(coefficients, turned, cut, kept, needed, of_turned)
    found = coordinates.gradients(ScanInput(*all_found), (p, q), (dv, dx))
    return tuple(grad if is_wanted else None for grad, is_wanted in zip(found, wanted, strict=True))
