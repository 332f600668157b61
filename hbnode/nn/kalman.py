"""The exact Kalman filter of noisy oscillators at irregular times, and the distributions that it returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hbnode._torch import may_look
from hbnode._tree import Record, record
from hbnode.nn._oscillator_scan import oscillator_step
from hbnode.nn.sequences import Sequences


@record
class Gaussian(Record):
    """Independent normal distributions of values.

    Attributes:
        mean: means of the values.
        std: standard deviations in the shape of the means; for observations they include the observation noise.
    """

    mean: Tensor
    std: Tensor


@record
class OscillatorBelief(Record):
    """The joint normal distribution of the states of noisy oscillators at a time.

    Attributes:
        v: means of the velocities, (batch, num_oscillators), in float64.
        x: means of the displacements, (batch, num_oscillators).
        t: the time, (batch,).
        covariance: the covariance of (v, √κ x) with the stiffness κ, (batch, 2 num_oscillators, 2 num_oscillators).
    """

    v: Tensor
    x: Tensor
    t: Tensor
    covariance: Tensor


@record
class OscillatorFiltered(Record):
    """The result of :meth:`Oscillators.filter`, which unpacks into its four attributes.

    Attributes:
        before: the distribution of each sample given the earlier samples, (batch, T, input_size).
        after: the distribution of a second observation at the same time, given this sample and the earlier ones.
        log_likelihood: log density of each sample given the earlier samples, (batch, T); 0 if nothing is observed.
        state: the distribution of the states after the last sample.
    """

    before: Gaussian
    after: Gaussian
    log_likelihood: Tensor
    state: OscillatorBelief

    def __iter__(self) -> Iterator[Any]:
        return iter((self.before, self.after, self.log_likelihood, self.state))


class KalmanFilter:
    """The Kalman filter of P oscillators with states (v, √κ x) of stationary covariance σ² I and n observed features.

    Arguments:
        rates: the damping γ and the stiffness κ (2, P), in the dtype of the filter.
        c: the matrix C (n, 2 P) that maps states to observations.
        log_spread: log σ (P,).
        log_observation_noise: logarithm of the standard deviation of the observation noise (n,).
    """

    def __init__(self, rates: Tensor, c: Tensor, log_spread: Tensor, log_observation_noise: Tensor) -> None:
        self.dtype = rates.dtype
        self.gamma, self.kappa = rates
        self.root, self.c = self.kappa.sqrt(), c.to(self.dtype)
        self.stationary = (2 * log_spread.to(self.dtype)).exp().repeat(2)  # the diagonal of the covariance
        self.noise = (2 * log_observation_noise.to(self.dtype)).exp()
        if may_look():
            self._check_digits()

    def _check_digits(self) -> None:
        """Raise FloatingPointError if the sum of signal and noise variance loses the noise variance by rounding."""
        signal = (self.c.square() * self.stationary).sum(-1)
        ratio = float((signal / self.noise).detach().amax().sqrt())
        most = torch.finfo(self.dtype).eps ** -0.5
        if ratio > most:
            least = math.log(float(signal.detach().amax().sqrt()) / most) + 1
            raise FloatingPointError(
                f"the standard deviation of the observed signal is {ratio:.3g} times that of the observation noise; "
                f"expected at most {most:.3g}, because {self.dtype} loses a smaller noise variance in the sum. Fix: "
                f"layer.log_observation_noise.data.clamp_(min={least:.1f}) after each step of training."
            )

    def filter(self, sequences: Sequences, state: OscillatorBelief | None) -> OscillatorFiltered:
        """Filter the sequences from a state, or from the stationary distribution if the state is None."""
        t = sequences.t
        if state is None:
            mean = self.c.new_zeros(len(t), len(self.stationary))
            covariance, start = self.stationary.diag().expand(len(t), -1, -1), t[:, 0].detach()
        else:
            (mean, covariance), start = self._unpack(state), state.t
        gaps = t.to(self.dtype).diff(prepend=start.to(self.dtype).unsqueeze(1))
        mask = sequences.observed
        mask = torch.ones_like(sequences.x, dtype=torch.bool) if mask is None else mask.expand_as(sequences.x)
        steps: list[tuple[Tensor, ...]] = []
        for gap, sample, observed in zip(gaps.unbind(1), sequences.x.unbind(1), mask.unbind(1), strict=True):
            mean, covariance = self._predict(mean, covariance, gap)
            before = self._observation(mean, covariance)
            mean, covariance, log_density = self._update(mean, covariance, sample, observed)
            steps.append((*before, *self._observation(mean, covariance), log_density))
        *bands, log_densities = (torch.stack(each, 1) for each in zip(*steps, strict=True))
        padded = [sequences.padded(band) for band in bands]
        log_densities = functional.pad(log_densities, (0, sequences.total - log_densities.shape[1]))
        after = self._pack(mean, covariance, t[:, -1])
        return OscillatorFiltered(Gaussian(*padded[:2]), Gaussian(*padded[2:]), log_densities, after)

    def forecast(self, state: OscillatorBelief, dt: Tensor) -> tuple[Gaussian, OscillatorBelief]:
        """Return the distributions of observations at times dt (batch, K) after the state, and the last state."""
        ends = [self._predict(*self._unpack(state), gap) for gap in dt.to(self.dtype).unbind(1)]
        bands = zip(*(self._observation(*end) for end in ends), strict=True)
        time = state.t + dt[:, -1].to(state.t.dtype)
        return Gaussian(*(torch.stack(band, 1) for band in bands)), self._pack(*ends[-1], time)

    def _unpack(self, state: OscillatorBelief) -> tuple[Tensor, Tensor]:
        return torch.cat([state.v.to(self.dtype), state.x.to(self.dtype) * self.root], -1), state.covariance

    def _pack(self, mean: Tensor, covariance: Tensor, t: Tensor) -> OscillatorBelief:
        v, x = mean.chunk(2, -1)
        return OscillatorBelief(v, x / self.root, t, covariance)

    def _predict(self, mean: Tensor, covariance: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean Φ m and the covariance Φ (P - σ² I) Φᵀ + σ² I after gaps (batch,).

        Here m and P are the given mean and covariance, and Φ is the transition matrix over the gap.
        """
        step = oscillator_step(self.gamma, self.kappa, gap.unsqueeze(-1))
        a, b, c, d = (z.unsqueeze(-1) for z in (step.vv, step.vx / self.root, step.xv * self.root, step.xx))

        def transition(z: Tensor) -> Tensor:  # (batch, 2 P, n)
            v, x = z.chunk(2, 1)
            return torch.cat([a * v + b * x, c * v + d * x], 1)

        stationary = self.stationary.diag()
        covariance = transition(transition(covariance - stationary).mT) + stationary
        return transition(mean.unsqueeze(-1)).squeeze(-1), covariance

    def _observation(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation of an observation, (batch, n), from those of the state."""
        variance = ((self.c @ covariance) * self.c).sum(-1).clamp(min=0.0) + self.noise
        return mean @ self.c.T, variance.sqrt()

    def _update(self, mean: Tensor, covariance: Tensor, sample: Tensor, observed: Tensor) -> tuple[Tensor, ...]:
        """Return the mean and covariance of the state given a sample's observed features, and their log density."""
        c = self.c * observed.unsqueeze(-1)
        innovation = torch.where(observed, sample.to(self.dtype) - mean @ self.c.T, 0.0)
        cross = c @ covariance  # (batch, n, 2 P)
        own = cross @ c.mT + torch.where(observed, self.noise, 1.0).diag_embed()
        factor: Any = torch.linalg.cholesky(own)
        white = torch.linalg.solve_triangular(factor, torch.cat([innovation.unsqueeze(-1), cross], -1), upper=False)
        innovation, cross = white[..., :1], white[..., 1:]
        covariance = covariance - cross.mT @ cross
        logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        count = observed.sum(-1).to(self.dtype) * (0.5 * math.log(2 * math.pi))
        log_density = -0.5 * innovation.square().sum((-2, -1)) - logs - count
        return mean + (cross.mT @ innovation).squeeze(-1), (covariance + covariance.mT) / 2, log_density
