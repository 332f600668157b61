r"""Reversible splitting methods for HBNODE and GHBNODE, with exact damping.

:math:`h' = \sigma(m),\; m' = -\gamma m + F(h, t)` with :math:`F = f` (HBNODE, :math:`\sigma` the identity) or
:math:`F = f - \xi h` (GHBNODE) splits into two parts that are solved exactly,

    drift (τ):  h ← h + τ σ(m),  t ← t + τ,
    kick (τ):   m ← e^{-γτ} m + (1 - e^{-γτ})/γ F(h, t),

each of which is undone exactly, so a composition of them can be run backwards without having been stored. Undoing a
kick divides by :math:`e^{-\gamma\tau}`: a rounding error grows by :math:`e^{\gamma T}` over the time T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hbnode.solvers.step_method import Activation, Evaluate, StepMethod, StepResult


class DriftsAndKicks(NamedTuple):
    """Lengths of the drifts, decays and weights of the kicks, each a tuple of tensors (...)."""

    drifts: tuple[Tensor, ...]
    decays: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


class Splitting(StepMethod):
    """A composition of drifts and kicks that begins and ends with a drift.

    Arguments:
        drifts: fractions of the step, one more than the kicks.
        kicks: fractions of the step.
    """

    carries = False
    state_rows = 2

    def __init__(self, drifts: Sequence[float], kicks: Sequence[float]) -> None:
        self.drifts = torch.tensor(drifts, dtype=torch.float64, device="cpu")
        self.kicks = torch.tensor(kicks, dtype=torch.float64, device="cpu")
        self.nodes = tuple(self.drifts.cumsum(0)[:-1].tolist())

    @override
    def matrix(self, damping: Tensor, step: Tensor) -> Tensor:
        """Lengths of the drifts, then decays and weights of the kicks, (..., 3 kicks + 1)."""
        step = step.unsqueeze(-1)
        lengths = step * self.kicks.to(step.device)
        z = damping.to(step).unsqueeze(-1) * lengths
        small = z.abs() < 1e-4  # (1 - e^{-z})/z by its series, where the quotient would divide 0 by 0
        safe = torch.where(small, torch.ones_like(z), z)
        phi = torch.where(small, 1 - z / 2 + z * z / 6 - z**3 / 24, -torch.expm1(-safe) / safe)
        drifts = (step * self.drifts.to(step.device)).expand(*z.shape[:-1], -1)
        return torch.cat([drifts, torch.exp(-z), lengths * phi], -1)

    @override
    def pack(self, matrix: Tensor, *, error: bool = False) -> DriftsAndKicks:
        parts, k = matrix.unbind(-1), self.evaluations
        return DriftsAndKicks(parts[: k + 1], parts[k + 1 : 2 * k + 1], parts[2 * k + 1 :])

    @override
    def step(
        self,
        point: Tensor,
        coefficients: DriftsAndKicks,
        times: Sequence[Tensor],
        evaluate: Evaluate,
        *,
        error: bool,
        activation: Activation | None = None,
    ) -> StepResult:
        """One step from the point (2, ...), which is (h, m); there is no error estimate."""
        drifts, decays, weights = coefficients
        h, m = point.unbind(0)
        h = self.drift(h, m, drifts[0], activation)
        for t, decay, weight, drift in zip(times, decays, weights, drifts[1:], strict=True):
            m = decay * m + weight * evaluate(t, h)
            h = self.drift(h, m, drift, activation)
        return StepResult(torch.stack([h, m]), None, None, (h, m))

    @staticmethod
    def drift(h: Tensor, m: Tensor, length: Tensor, activation: Activation | None) -> Tensor:
        """The position h + τ σ(m) after a drift; σ is the identity where there is no activation."""
        return h + length * (m if activation is None else activation(m))
