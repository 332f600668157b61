"""Oscillators in noise: a Kalman filter with exact gaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._checks import ArrayLike
from hbnode._torch import may_look
from hbnode._tree import Record, record
from hbnode.nn.oscillators.closed_form import oscillator_step
from hbnode.nn.oscillators.coefficients import wide
from hbnode.nn.oscillators.rates import OscillatorBank
from hbnode.nn.sequences import Sequences


@record
class Gaussian(Record):
    """Independent normal distributions of values.

    Attributes:
        mean: their means.
        std: their standard deviations, of the same shape; those of observations contain the noise of observation.
    """

    mean: Tensor
    std: Tensor


@record
class OscillatorBelief(Record):
    """What is known of noisy oscillators at a time: a normal distribution of all states together.

    Attributes:
        v: means of the velocities, (batch, num_oscillators), in float64.
        x: means of the displacements, of the same shape.
        t: the time, (batch,).
        covariance: that of (v, √κ x), (batch, 2 num_oscillators, 2 num_oscillators).
    """

    v: Tensor
    x: Tensor
    t: Tensor
    covariance: Tensor


@record
class OscillatorFiltered(Record):
    """What :meth:`Oscillators.filter` returns; it unpacks into its four attributes.

    Attributes:
        before: the distribution of each sample given those before it, (batch, T, input_size) each.
        after: given the sample too: of another observation at the same time.
        log_likelihood: log density of each sample given those before it, (batch, T); 0 where nothing is observed.
        state: what is known after the last sample.
    """

    before: Gaussian
    after: Gaussian
    log_likelihood: Tensor
    state: OscillatorBelief

    def __iter__(self) -> Iterator[Any]:
        return iter((self.before, self.after, self.log_likelihood, self.state))


class KalmanBank(OscillatorBank):
    """Oscillators whose velocities random forces kick, and that are observed with noise; see :class:`Oscillators`."""

    log_spread: nn.Parameter | None
    log_observation_noise: nn.Parameter | None

    def _add_noise(self, noise: bool) -> None:
        """The parameters of noise, if there is any."""
        self.noise = bool(noise)
        if self.noise and self.hidden_size != self.input_size:
            raise ValueError(
                f"noise=True reads samples as outputs with noise, so that hidden_size={self.hidden_size} must be "
                f"input_size={self.input_size}. Fix: hidden_size={self.input_size}, and num_oscillators= for the rest."
            )
        if self.noise and self.discretization != "exact":
            raise ValueError("noise=True has exact steps alone. Fix: discretization='exact'.")
        for name, like in (("log_spread", self.log_damping), ("log_observation_noise", self.weight_skip[:, 0])):
            value = nn.Parameter(torch.zeros_like(like.detach())) if self.noise else None
            self.register_parameter(name, value)
        if self.log_observation_noise is not None:
            with torch.no_grad():
                self.log_observation_noise.fill_(math.log(0.3))

    @property
    def process_noise(self) -> Tensor | None:
        """The current s of each oscillator, σ √(2γ): its velocity diffuses by s² per time. None without noise."""
        return None if self.log_spread is None else self.log_spread.exp() * (2 * self.damping).sqrt()

    @property
    def observation_noise(self) -> Tensor | None:
        """The current standard deviation of the noise of each feature, (input_size,). None without noise."""
        return None if self.log_observation_noise is None else self.log_observation_noise.exp()

    def _noise(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise ValueError("the layer has no noise. Fix: Oscillators(..., noise=True).")
        return value

    def log_likelihood(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """The log density of the observed values of each series, (batch,), in float64; with ``noise=True``.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for all; None is a unit of time from each sample to the next. Default: ``None``
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool; the others may be NaN.
                Default: ``None``
            lengths: length of each sequence, (batch,); what follows is padding. Default: ``None``
        """
        return self.filter(x, t, None, mask, lengths).log_likelihood.sum(1)

    def filter(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        state: OscillatorBelief | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> OscillatorFiltered:
        """What samples say of the oscillators, one after another, in float64; with ``noise=True``.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for all; None is a unit of time from each sample to the next. Default: ``None``
            state: where to go on from, of an earlier call. None is the stationary distribution. Default: ``None``
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool; the others may be NaN.
                Default: ``None``
            lengths: length of each sequence, (batch,); what follows is padding. Default: ``None``
        """
        self._noise("log_spread")
        times = torch.arange(x.shape[1] if isinstance(x, Tensor) and x.dim() == 3 else 0, dtype=torch.float64)
        if t is None and state is not None:
            times = times + 1 + state.t.cpu().unsqueeze(1)
        sequences = Sequences(self.input_size, x, times if t is None else t, mask, lengths)
        model = _Model(self)
        belief = model.stationary(sequences.t[:, 0]) if state is None else self._checked_belief(state, len(x))
        if may_look() and bool((sequences.t[:, 0].detach() < belief.t.detach()).any()):
            raise ValueError(
                "the state's time lies after the first of t; expected the series to go on from it. "
                "Fix: times of the whole series, not of its part."
            )
        mean, covariance = model.scaled(belief), belief.covariance
        gaps = sequences.t.to(model.dtype).diff(prepend=belief.t.to(model.dtype).unsqueeze(1))
        seen = sequences.observed
        seen = torch.ones_like(sequences.x, dtype=torch.bool) if seen is None else seen.expand_as(sequences.x)
        found: list[tuple[Tensor, ...]] = []
        for gap, sample, is_seen in zip(gaps.unbind(1), sequences.x.unbind(1), seen.unbind(1), strict=True):
            mean, covariance = model.advance(mean, covariance, gap)
            before = model.read(mean, covariance)
            mean, covariance, log_density = model.update(mean, covariance, sample, is_seen)
            found.append((*before, *model.read(mean, covariance), log_density))
        *bands, log_densities = (torch.stack(each, 1) for each in zip(*found, strict=True))
        padded = [sequences.padded(band) for band in bands]
        log_densities = torch.nn.functional.pad(log_densities, (0, sequences.total - log_densities.shape[1]))
        after = model.belief(mean, covariance, sequences.t[:, -1])
        return OscillatorFiltered(Gaussian(*padded[:2]), Gaussian(*padded[2:]), log_densities, after)

    def _forecast_belief(self, state: OscillatorBelief, dt: Tensor) -> tuple[Gaussian, OscillatorBelief]:
        """Observations after times dt (batch, K), and what is known at the last of them."""
        model, state = _Model(self), self._checked_belief(state, len(dt))
        mean, covariance = model.scaled(state), state.covariance
        ends = [model.advance(mean, covariance, gap) for gap in dt.to(model.dtype).unbind(1)]
        bands = zip(*(model.read(*end) for end in ends), strict=True)
        time = state.t + dt[:, -1].to(state.t.dtype)
        return Gaussian(*(torch.stack(band, 1) for band in bands)), model.belief(*ends[-1], time)

    def _checked_belief(self, state: object, batch: int) -> OscillatorBelief:
        size = self.num_oscillators
        if not isinstance(state, OscillatorBelief):
            raise TypeError(
                f"state must be an OscillatorBelief, got {type(state).__name__}. Fix: the state that filter returned."
            )
        if state.v.shape != (batch, size) or state.covariance.shape != (batch, 2 * size, 2 * size):
            raise ValueError(
                f"the state's v must have shape {(batch, size)}, got {tuple(state.v.shape)}. "
                "Fix: a state that this module returned for such a batch."
            )
        return state


class _Model:
    """The layer's numbers for states (v, √κ x), whose stationary covariance is σ² for both of an oscillator."""

    def __init__(self, layer: KalmanBank) -> None:
        self.dtype = wide(layer._dtype, layer.weight_out.device)
        self.gamma, self.kappa = layer._rates()
        self.root = self.kappa.sqrt()
        self.c = layer.weight_out.to(self.dtype)
        self.spread = (2 * layer._noise("log_spread").to(self.dtype)).exp().repeat(2)
        self.noise = (2 * layer._noise("log_observation_noise").to(self.dtype)).exp()
        if may_look():
            layer._check_parameters()
            self._check_digits()

    def _check_digits(self) -> None:
        """Refuse noise of observation that is lost in the rounding of what is observed."""
        signal = (self.c.square() * self.spread).sum(-1)
        ratio = float((signal / self.noise).detach().amax().sqrt())
        most = torch.finfo(self.dtype).eps ** -0.5
        if ratio > most:
            least = math.log(float(signal.detach().amax().sqrt()) / most) + 1
            raise FloatingPointError(
                f"the standard deviation of what is observed is {ratio:.3g} times that of the noise of observation; "
                f"expected at most {most:.3g}, beyond which {self.dtype} keeps no digit of it. Fix: "
                f"layer.log_observation_noise.data.clamp_(min={least:.1f}) after each step of training."
            )

    def stationary(self, t: Tensor) -> OscillatorBelief:
        zeros = torch.zeros(len(t), len(self.root), dtype=self.dtype, device=self.c.device)
        return OscillatorBelief(zeros, zeros, t.detach(), self.spread.diag().expand(len(t), -1, -1))

    def scaled(self, belief: OscillatorBelief) -> Tensor:
        return torch.cat([belief.v.to(self.dtype), belief.x.to(self.dtype) * self.root], -1)

    def belief(self, mean: Tensor, covariance: Tensor, t: Tensor) -> OscillatorBelief:
        v, x = mean.chunk(2, -1)
        return OscillatorBelief(v, x / self.root, t, covariance)

    def advance(self, mean: Tensor, covariance: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        """Over gaps (batch,): Φ m, and Φ (P - σ²) Φᵀ + σ², which is Φ P Φᵀ + Q."""
        vv, vx, xv, xx = oscillator_step(self.gamma, self.kappa, gap.unsqueeze(-1))
        rows = vv, vx / self.root, xv * self.root, xx

        def moved(z: Tensor) -> Tensor:  # (batch, 2 P, n)
            v, x = z.chunk(2, 1)
            a, b, c, d = (entry.unsqueeze(-1) for entry in rows)
            return torch.cat([a * v + b * x, c * v + d * x], 1)

        rest = moved(moved(covariance - self.spread.diag()).mT)
        return moved(mean.unsqueeze(-1)).squeeze(-1), rest + self.spread.diag()

    def read(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of an observation."""
        variance = ((self.c @ covariance) * self.c).sum(-1).clamp(min=0.0) + self.noise
        return mean @ self.c.T, variance.sqrt()

    def update(self, mean: Tensor, covariance: Tensor, sample: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        """Mean and covariance given a sample, and its log density; what is not seen has no row in C."""
        c = self.c * seen.unsqueeze(-1)
        error = torch.where(seen, sample.to(self.dtype) - mean @ self.c.T, 0.0)
        cross = c @ covariance  # (batch, n, 2 P)
        own = cross @ c.mT + torch.where(seen, self.noise, 1.0).diag_embed()
        factor: Any = torch.linalg.cholesky(own)
        white = torch.linalg.solve_triangular(factor, torch.cat([error.unsqueeze(-1), cross], -1), upper=False)
        error, gain = white[..., :1], white[..., 1:]
        covariance = covariance - gain.mT @ gain
        logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        count = seen.sum(-1).to(self.dtype) * (0.5 * math.log(2 * math.pi))
        log_density = -0.5 * error.square().sum((-2, -1)) - logs - count
        return mean + (gain.mT @ error).squeeze(-1), (covariance + covariance.mT) / 2, log_density
