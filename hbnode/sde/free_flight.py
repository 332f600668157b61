r"""The free flight with noise, :math:`dh = m\,dt,\; dm = -\gamma m\,dt + s\,dW` over a time :math:`\tau`, exactly.

With a = (1 - e^{-γτ})/γ, b = e^{-γτ} and z = γτ,

    h ← h + a m + s J,   m ← b m + s I,   I = ∫ e^{-γ(τ-t)} dW,   J = ∫ (1 - e^{-γ(τ-t)})/γ dW,

where (I, J) is Gaussian. Two independent standard normal variables make it:

    I = p ξ₁,   J = q ξ₁ + r ξ₂,
    p² = Var I = (1 - b²)/(2γ),   q = p Cov(I, J)/Var I = p a/(1 + b),   r² = Var(J | I) = (z - 2 tanh(z/2))/γ³.

The form for r² follows from J = (W - I)/γ and Var(W | I) = τ - a²/Var I = τ - (2/γ) tanh(z/2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FreeFlight(NamedTuple):
    """The coefficients a, b, p, q and r of the module's docstring."""

    a: Tensor
    b: Tensor
    p: Tensor
    q: Tensor
    r: Tensor


def free_flight(damping: Tensor, time: Tensor) -> FreeFlight:
    """The coefficients of a flight over a time, from broadcastable tensors in float64."""
    z = damping * time
    b = torch.exp(-z)
    a = time * _decay_mean(z)
    p = (time * _decay_mean(2 * z)).sqrt()
    return FreeFlight(a, b, p, p * a / (1 + b), (time**3 * _rest_variance(z)).sqrt())


def _decay_mean(z: Tensor) -> Tensor:
    """The mean of e^{-zs} over s in [0, 1], (1 - e^{-z})/z."""
    small = z < 1e-3
    safe = torch.where(small, torch.ones_like(z), z)
    return torch.where(small, 1 - z / 2 * (1 - z / 3 * (1 - z / 4 * (1 - z / 5))), -torch.expm1(-safe) / safe)


def _rest_variance(z: Tensor) -> Tensor:
    """The value of (z - 2 tanh(z/2))/z³; 1/12 at 0.

    For small z by the continued fraction tanh x = x/(1 + x²/(3 + x²/(5 + ...))), in which nothing cancels.
    """
    small = z < 2
    square = torch.where(small, z, torch.ones_like(z)).square() / 4
    tail = torch.full_like(z, 17.0)
    for odd in (15, 13, 11, 9, 7, 5, 3):
        tail = odd + square / tail
    by_fraction = 1 / (4 * (tail + square))
    safe = torch.where(small, torch.full_like(z, 2.0), z)
    return torch.where(small, by_fraction, (safe - 2 * torch.tanh(safe / 2)) / safe**3)
