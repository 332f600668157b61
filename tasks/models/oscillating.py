"""Linear oscillators that forecast a series, by a linear output layer or by a Kalman filter.

Blocks of oscillators with gates between them are "oscillators" in :mod:`tasks.models.baselines`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn.oscillators import Gaussian

TITLES = {"oscillators": "oscillators", "oscillator_stack": "oscillator stack", "kalman": "noisy oscillators"}
Range = tuple[float, float]
LONGEST = 8  # gaps before a forecast are limited to this number of time steps


class RowForecaster(nn.Module):
    """One layer of oscillators whose outputs at a sample are forecasts for the next time steps.

    The inputs are the sample, and the sample multiplied by the number of missing time steps before it.

    Arguments:
        channels: number of channels of a sample.
        horizon: number of time steps to forecast after the last sample.
        parameters: the approximate number of parameters.
        frequency: range of initial frequencies, in cycles per time step.
        decay: range of initial decay rates per time step.
    """

    def __init__(self, channels: int, horizon: int, parameters: int, frequency: Range, decay: Range) -> None:
        super().__init__()
        self.channels, self.horizon = channels, horizon
        outputs = channels * (LONGEST - 1 + horizon)

        def layer(size: int) -> hbnode.nn.Oscillators:
            return hbnode.nn.Oscillators(2 * channels, outputs, size, frequency=frequency, decay=decay)

        self.oscillators = hbnode.nn.match_parameters(layer, parameters)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the forecast (batch, horizon, channels), and the predictions of the next samples (batch, T, channels).

        Arguments:
            x: samples (batch, T, channels).
            t: times (batch, T + 1), in time steps. The forecast begins at the last one.
        """
        gaps = t.diff(dim=1)
        missing = nn.functional.pad(gaps[:, :-1] - 1, (1, 0)).unsqueeze(2)
        y, _ = self.oscillators(torch.cat([x, x * missing], 2), t[:, :-1])
        rows = y.unflatten(2, (-1, self.channels))
        first = gaps.clamp(max=LONGEST).long() - 1  # which of the forecast time steps is the time of the next sample
        places = (first[:, -1:] + torch.arange(self.horizon, device=x.device)).unsqueeze(2)
        forecast = rows[:, -1].gather(1, places.expand(-1, -1, self.channels))
        following = rows.gather(2, first[..., None, None].expand(-1, -1, 1, self.channels)).squeeze(2)
        return forecast, following


class NoisyOscillators(nn.Module):
    """Oscillators driven by noise, with a Kalman filter. Their forecasts have prediction intervals.

    Arguments:
        channels: number of channels of a sample.
        size: number of oscillators.
        noise: initial standard deviation of the observation noise.
        ranges: the ranges ``frequency`` and ``decay`` of initial values.
    """

    def __init__(self, channels: int, size: int, noise: float, **ranges: Any) -> None:
        super().__init__()
        self.oscillators = hbnode.nn.Oscillators(channels, channels, size, noise=True, **ranges)
        if self.oscillators.log_observation_noise is not None:
            nn.init.constant_(self.oscillators.log_observation_noise, math.log(noise))

    def forward(self, x: Tensor, t: Tensor, seen: Tensor) -> tuple[Gaussian, Tensor]:
        """Return the distribution of each sample given the earlier observations, and the log-likelihood of each series.

        Arguments:
            x: samples (batch, T, channels).
            t: times (batch, T) or (T,).
            seen: mask of the observed samples, bool (batch, T).
        """
        before, _, log_likelihood, _ = self.oscillators.filter(x, t, mask=seen)
        return before, log_likelihood.sum(1)


class NoisyForecaster(nn.Module):
    """A forecaster with noisy oscillators, which treats the future as unobserved samples.

    Arguments:
        model: the oscillators.
        horizon: see :class:`RowForecaster`.
    """

    def __init__(self, model: NoisyOscillators, horizon: int) -> None:
        super().__init__()
        self.model, self.horizon = model, horizon

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of :class:`RowForecaster`, and the log-likelihood of each series, (batch,)."""
        ahead = t[:, -1:] + torch.arange(self.horizon, device=x.device)
        padded = nn.functional.pad(x, (0, 0, 0, self.horizon))
        seen = torch.arange(padded.shape[1], device=x.device) < x.shape[1]
        before, log_likelihood = self.model(padded, torch.cat([t[:, :-1], ahead], 1), seen.expand(len(x), -1))
        mean = before.mean.to(x.dtype)
        return mean[:, x.shape[1] :], mean[:, 1 : x.shape[1] + 1], log_likelihood
