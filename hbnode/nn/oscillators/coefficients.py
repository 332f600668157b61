"""The coefficients of a scan over a piece of the samples: of one gap, of exact steps over any gaps, or of any function.

A piece has ``steps`` positions in each of ``chunks`` chunks. Its coefficients are (steps, 1 or batch, chunks * P), for
P oscillators. Each kind gives the transitions between samples, those over whole chunks, and their gradients.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hbnode.nn.oscillators.closed_form import Waves, any_waves, held_response, oscillator_step


class Entries(NamedTuple):
    """Those of M and f in h_t = M_t h_{t-1} + f_t u_t; without fv and fx the input is added to v."""

    vv: Tensor
    vx: Tensor
    xv: Tensor
    xx: Tensor
    fv: Tensor | None = None
    fx: Tensor | None = None


class Products(NamedTuple):
    """What the gradient of a piece's coefficients is made of; (steps, batch, chunks * P) each.

    Attributes:
        v: v before the first transition and after each, with its input: of one more step.
        x: x likewise.
        u: inputs.
        gv: gradient of v after the transitions.
        gx: likewise of x.
    """

    v: Tensor
    x: Tensor
    u: Tensor
    gv: Tensor
    gx: Tensor

    def pairs(self, entries: Entries) -> list[tuple[Tensor, Tensor]]:
        """The gradient and the factor of each entry of M, and of f if there is one."""
        v, x, u, gv, gx = self.v[:-1], self.x[:-1], self.u, self.gv, self.gx
        return [(gv, v), (gv, x), (gx, v), (gx, x)] + ([] if entries.fv is None else [(gv, u), (gx, u)])


def imex_step(gamma: Tensor, kappa: Tensor, dt: Tensor) -> Entries:
    """The entries of the step that takes damping implicitly and stiffness explicitly, those of the input too."""
    implicit = 1 / (1 + gamma * dt)
    kick = implicit * dt
    slide = kick * dt
    return Entries(implicit, -kappa * kick, kick, 1 - kappa * slide, kick, slide)


def entries_of(kind: str, is_held: bool, gamma: Tensor, kappa: Tensor, dt: Tensor) -> Entries:
    """All entries for one gap or many, by operations that autograd knows."""
    if kind == "imex":
        entries = imex_step(gamma, kappa, dt)
        return entries if is_held else Entries(*entries[:4])
    step = oscillator_step(gamma, kappa, dt)
    return Entries(*step, *held_response(gamma, kappa, dt)) if is_held else Entries(*step)


def wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of what is computed once for a chunk: float64, where the device has it."""
    return dtype if device.type == "mps" else torch.float64


class Coefficients(abc.ABC):
    """Coefficients of all pieces, and the sum of their gradients.

    Arguments:
        rates: what they depend on, (n, P), in float64 where the device has it.
        dtype: that of the scan.
    """

    def __init__(self, rates: Tensor, dtype: torch.dtype) -> None:
        self.rates, self.dtype = rates, dtype
        self.size = rates.shape[1]

    @abc.abstractmethod
    def entries(self, gaps: Tensor, *, for_gradient: bool = False) -> Entries:
        """Those of a piece, from its gaps (steps, 1 or batch, chunks, 1)."""

    @abc.abstractmethod
    def carries(self, gaps: Tensor, entries: Entries) -> list[Tensor]:
        """M over each chunk: the entries (1 or batch, chunks, P) each."""

    @abc.abstractmethod
    def add(self, gaps: Tensor, entries: Entries, products: Products, wants_gaps: bool) -> Tensor | None:
        """Add the gradient of a piece, after :meth:`entries` of it; returns that of its gaps, if wanted."""

    @abc.abstractmethod
    def gradient(self) -> Tensor:
        """The gradient of ``rates``."""


class Fixed(Coefficients):
    """The same entries at every sample; ``rates`` are these."""

    def __init__(self, rates: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rates, dtype)
        self.sums = torch.zeros_like(rates)

    @override
    def entries(self, gaps: Tensor, *, for_gradient: bool = False) -> Entries:
        steps, _, chunks, _ = gaps.shape
        rows = self.rates.to(self.dtype).repeat(1, chunks)
        return Entries(*(row.expand(steps, 1, -1) for row in rows))

    @override
    def carries(self, gaps: Tensor, entries: Entries) -> list[Tensor]:
        matrix = torch.linalg.matrix_power(self.rates[:4].T.unflatten(1, (2, 2)), len(gaps))
        rows = matrix.flatten(1).T.to(self.dtype)
        return [row.expand(1, gaps.shape[2], -1) for row in rows]

    @override
    def add(self, gaps: Tensor, entries: Entries, products: Products, wants_gaps: bool) -> Tensor | None:
        pairs = products.pairs(entries)
        ones = products.gv.new_ones(1, products.gv.numel() // self.size)
        buffer = torch.empty_like(products.gv)
        for total, (one, other) in zip(self.sums, pairs, strict=True):
            total.add_((ones @ torch.mul(one, other, out=buffer).view(-1, self.size))[0])
        return None

    @override
    def gradient(self) -> Tensor:
        return self.sums


class AnyRegime(Coefficients):
    """Φ over any gaps, from ``rates`` (γ, κ); the gradient of all entries together is a formula of C, S and Q.

    With α = g_v v + g_x x, β = g_x x - g_v v and σ = aβ + g_x v - κ g_v x the gradient of gᵀΦh is α with respect to C
    and σ to S, and besides βS to a and -g_v x S to κ. With strong damping, C - aS is a small difference, and so is the
    gradient of γ: all is computed in the dtype of the rates.
    """

    def __init__(self, rates: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rates, dtype)
        self.a, self.kappa = rates[0] / 2, rates[1]
        self.sums = rates.new_zeros(6, self.size)
        self.waves: Waves | None = None

    @override
    def entries(self, gaps: Tensor, *, for_gradient: bool = False) -> Entries:
        waves = any_waves(self.a, self.kappa, gaps.to(self.rates.dtype), with_q=for_gradient)
        self.waves = waves if for_gradient else None
        return Entries(*(entry.flatten(2).to(self.dtype) for entry in self._matrix(waves)))

    @override
    def carries(self, gaps: Tensor, entries: Entries) -> list[Tensor]:
        total = gaps.to(self.rates.dtype).sum(0)
        return [entry.to(self.dtype) for entry in self._matrix(any_waves(self.a, self.kappa, total))]

    def _matrix(self, waves: Waves) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The entries of Φ."""
        product = waves.s * self.a
        return waves.c - product, waves.s * -self.kappa, waves.s, waves.c + product

    @override
    def add(self, gaps: Tensor, entries: Entries, products: Products, wants_gaps: bool) -> Tensor | None:
        assert self.waves is not None
        c, s, third = self.waves
        assert third is not None
        v, x, gv, gx = (z.to(c) for z in (products.v[:-1], products.x[:-1], products.gv, products.gx))
        shape = (*gv.shape[:2], -1, self.size)
        weights = gaps.to(c).expand(*gv.shape[:2], *gaps.shape[2:]).reshape(1, -1)
        ones = torch.ones_like(weights)
        beta = (gv * v).view(shape)
        alpha = torch.addcmul(beta.view(gv.shape), gx, x).view(shape)
        torch.sub(alpha, beta, alpha=2, out=beta)
        cross = (gv * x).view(shape)
        sigma = (gx * v).view(shape).addcmul_(self.a, beta).addcmul_(self.kappa, cross, value=-1)
        found = None
        if wants_gaps:  # C' = -aC - ω²S, S' = C - aS
            square = self.kappa - self.a.square()
            slope = alpha * torch.addcmul(c * -self.a, s, square, value=-1)
            slope += sigma * torch.addcmul(c, s, self.a, value=-1)
            found = slope.sum(-1, keepdim=True)
        self._sum(0, ones, cross.mul_(s))
        self._sum(1, ones, beta.mul_(s))
        self._sum(2, weights, torch.mul(alpha, c, out=cross))
        self._sum(3, weights, alpha.mul_(s))
        self._sum(4, weights, torch.mul(sigma, s, out=cross))
        self._sum(5, ones, sigma.mul_(third))
        self.waves = None
        return found

    def _sum(self, row: int, weights: Tensor, values: Tensor) -> None:
        """The sum of values, with weights, is added to a row of ``sums``."""
        self.sums[row].add_((weights @ values.reshape(-1, self.size))[0])

    @override
    def gradient(self) -> Tensor:
        cross, beta, alpha_c, alpha_s, sigma_s, third = self.sums
        of_a = self.a * alpha_s - alpha_c - sigma_s - self.a * third + beta
        return torch.stack([of_a / 2, (third - alpha_s) / 2 - cross])


def swings(rates: Tensor) -> Tensor:
    """Which oscillators are so far from critical damping that sines and cosines keep their digits."""
    return rates[0].square() < 3.0 * rates[1]  # (γ/2)² < 3/4 κ


class Traced(Coefficients):
    """Entries of :func:`entries_of` over any gaps; they are differentiated piece by piece.

    Arguments:
        rates: γ and κ.
        dtype: that of the scan.
        kind: "exact" or "imex".
        is_held: whether the input is held over the gap.
    """

    def __init__(self, rates: Tensor, dtype: torch.dtype, kind: str, is_held: bool) -> None:
        super().__init__(rates, dtype)
        self.kind, self.is_held = kind, is_held
        self.sums = torch.zeros_like(rates)
        self.transpose: Callable[..., tuple[Tensor, ...]] | None = None

    @override
    def entries(self, gaps: Tensor, *, for_gradient: bool = False) -> Entries:
        rates = self.rates.to(self.dtype)
        if not for_gradient:
            return Entries(*self._flat(rates, gaps))
        pulled: Any = torch.func.vjp(self._flat, rates, gaps)  # autograd is off inside operations of torch
        found, self.transpose = pulled
        return Entries(*found)

    def _flat(self, rates: Tensor, gaps: Tensor) -> tuple[Tensor, ...]:
        """The entries as rows."""
        found = entries_of(self.kind, self.is_held, rates[0], rates[1], gaps)
        return tuple(entry.flatten(2) for entry in found if entry is not None)

    @override
    def carries(self, gaps: Tensor, entries: Entries) -> list[Tensor]:
        if self.kind == "exact":
            total = gaps.to(self.rates.dtype).sum(0)
            return [entry.to(self.dtype) for entry in oscillator_step(self.rates[0], self.rates[1], total)]
        vv, vx, xv, xx = (entry[0] for entry in entries[:4])
        for a, b, c, d in zip(*(entry[1:] for entry in entries[:4]), strict=True):
            vv, xv = a * vv + b * xv, c * vv + d * xv
            vx, xx = a * vx + b * xx, c * vx + d * xx
        return [entry.unflatten(1, (-1, self.size)) for entry in (vv, vx, xv, xx)]

    @override
    def add(self, gaps: Tensor, entries: Entries, products: Products, wants_gaps: bool) -> Tensor | None:
        assert self.transpose is not None
        transpose, self.transpose = self.transpose, None
        grads = zip([entry for entry in entries if entry is not None], products.pairs(entries), strict=True)
        of_rates, of_gaps = transpose(tuple((one * other).sum_to_size(e.shape) for e, (one, other) in grads))
        self.sums.add_(of_rates)
        return of_gaps if wants_gaps else None

    @override
    def gradient(self) -> Tensor:
        return self.sums


def coefficients_of(kind: str, is_held: bool, rates: Tensor, dtype: torch.dtype) -> Coefficients:
    """Of the kind "fixed", "exact" or "imex"."""
    if kind == "fixed":
        return Fixed(rates, dtype)
    return AnyRegime(rates, dtype) if kind == "exact" and not is_held else Traced(rates, dtype, kind, is_held)
