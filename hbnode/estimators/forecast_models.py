"""Models of the later values of irregular series, the questions by which they are tested, and bands from errors."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor
from typing_extensions import Self, override

from hbnode._tree import record
from hbnode.data import Series
from hbnode.estimators.smoother import OscillatorSmoother

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCALES = (1.0, 4.0, 16.0)  # of moving averages, in median gaps
ROUNDING = 1e-12  # of times, relative to the largest
NEAR, KNOTS = 200, 20  # held-out errors from which a band is calibrated; leads at which it is


@record
class Past(Series):
    """Series up to now, with covariates that are known at later times too.

    Attributes:
        known: the covariates, at times of their own; None if there are none.
        zone: the time zone of the user's dates; None if there is none.
    """

    known: Series | None = None
    zone: Any = None

    @override
    def select(self, index: Any) -> Past:
        found: Any = super().select(index)
        return dataclasses.replace(found, known=None if self.known is None else self.known.select(index))


def foreseen(past: Series, dt: Tensor, age: Tensor | float = 0.0) -> Tensor:
    """Return the F covariates at times ``dt`` (n, K) after the last sample, and their changes, (n, K, 2 F).

    The changes are those since ``age`` (n, 1) before the last sample, 0 by default. The covariates are linear between
    their samples and NaN outside of them.
    """
    series = getattr(past, "known", None)
    if series is None:
        return dt.new_zeros(*dt.shape, 0)
    end = past.t.amax(1, keepdim=True)
    at, t, x, mask = (part.numpy() for part in (torch.cat([end - age, end + dt], 1), series.t, series.x, series.mask))
    found, rounding = np.full((*at.shape, x.shape[2]), np.nan), ROUNDING * abs(t).max()
    for row, column in np.argwhere(mask.any(1)):
        seen = mask[row, :, column]
        times, values = np.pad(t[row, seen], 1, "edge"), np.pad(x[row, seen, column], 1, "edge")
        times[[0, -1]] += -rounding, rounding
        found[row, :, column] = np.interp(at[row], times, values, np.nan, np.nan)
    return torch.from_numpy(np.concatenate([found[:, 1:], found[:, 1:] - found[:, :1]], -1))


@dataclasses.dataclass
class Questions:
    """Series cut at one sample each, without the last values of some channels, and the values observed later.

    Attributes:
        past: the series, in units of the training data's deviations.
        dt: times (n, K) after the last sample of each; NaN on padding.
        values: the values (n, K, channels) at these times; NaN if missing.
        sample: the index (n, K) of each later sample among those of all series; -1 on padding.
    """

    past: Series
    dt: Tensor
    values: Tensor
    sample: Tensor


def questions(series: Series, random: np.random.RandomState, first: float, cuts: int, ahead: int) -> Questions:
    """Draw starts of forecasts after the share ``first`` of each series, with at most ``ahead`` later samples each."""
    rows, ends, later = [], [], []
    for row, length in enumerate(series.lengths.tolist()):
        least = max(1, int(first * length))
        for cut in random.permutation(np.arange(least, length))[:cuts]:
            rows.append(row)
            ends.append(int(cut))
            later.append(np.sort(random.permutation(np.arange(cut, length))[:ahead]))
    if not rows:
        raise ValueError("no series has two samples, so no forecast can be tested. Fix: longer series.")
    width = max(map(len, later))
    index = torch.tensor(np.stack([np.pad(each, (0, width - len(each)), constant_values=-1) for each in later]))
    which, last = torch.tensor(rows), torch.tensor(ends) - 1
    is_real = index >= 0
    dt = series.t[which.unsqueeze(1), index] - series.t[which, last].unsqueeze(1)
    values = torch.where(is_real.unsqueeze(-1), series.x[which.unsqueeze(1), index], torch.nan)
    sample = torch.where(is_real, which.unsqueeze(1) * series.x.shape[1] + index, -1)
    past = without_ends(cut_at(series.select(which), last + 1), random)
    return Questions(past, torch.where(is_real, dt, torch.nan), values, sample)


def cut_at(series: Series, lengths: Tensor) -> Series:
    """Return the first samples of each series."""
    total = int(lengths.max())
    is_kept = torch.arange(total) < lengths.unsqueeze(1)
    t = torch.where(is_kept, series.t[:, :total], series.t.gather(1, (lengths - 1).unsqueeze(1)))
    x = torch.where(is_kept.unsqueeze(-1), series.x[:, :total], torch.nan)
    mask = series.mask[:, :total] & is_kept.unsqueeze(-1)
    return dataclasses.replace(series, x=x, t=t, mask=mask, lengths=lengths)


def without_ends(series: Series, random: np.random.RandomState) -> Series:
    """Return series that lack the last values of some channels, so that their last values have all ages.

    A third of the series lack them in no channel, a third in each channel with probability 1/2, and a third in all. The
    logarithm of their number is uniform, and the first sample stays.
    """
    n, total, channels = series.x.shape
    is_cut = random.uniform(size=(n, channels)) < random.choice([0.0, 0.5, 1.0], (n, 1))
    lengths = series.lengths.unsqueeze(1)
    lost = (lengths.double() ** torch.from_numpy(random.uniform(size=(n, 1)))).long().minimum(lengths - 1)
    is_kept = torch.arange(total).view(1, -1, 1) < (lengths - lost * torch.from_numpy(is_cut)).unsqueeze(1)
    return dataclasses.replace(series, x=torch.where(is_kept, series.x, torch.nan), mask=series.mask & is_kept)


# Models of the mean and the standard deviation at times after the end of a series, in standardised units


class LastValue:
    """The last observed value; its error grows with its age at the horizon as it does in the training data."""

    def fit(self, series: Series, asked: Questions, seed: int) -> Self:
        last, _ = last_values(asked.past)
        error = (asked.values - last.unsqueeze(1)).abs().numpy()
        self.spread = Spread().fit(leads(asked.past, asked.dt), error)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        last, _ = last_values(past)
        mean = last.unsqueeze(1).expand(-1, dt.shape[1], -1)
        return mean, torch.as_tensor(self.spread(leads(past, dt)))


class Boosting:
    """Boosted trees for the change since the last value, from summaries of the past, the horizon and the calendar.

    The calendar has the phases of day and week in a time zone, whose None is UTC.
    """

    def __init__(self, zone: str | None = None) -> None:
        self.zone = zone

    def fit(self, series: Series, asked: Questions, seed: int) -> Self:
        gaps = series.t.diff()[torch.arange(1, series.t.shape[1]) < series.lengths.unsqueeze(1)]
        gaps = gaps[gaps > 0]
        self.gap = float(gaps.median()) if len(gaps) else 1.0
        last, _ = last_values(asked.past)
        self.trees, errors = [], np.full(asked.values.shape, np.nan)
        history = self._history(asked.past)
        for channel in range(asked.values.shape[2]):
            inputs = self._inputs(asked.past, history, asked.dt, channel)
            change = (asked.values[..., channel] - last[:, channel : channel + 1]).numpy()
            known = np.isfinite(change)
            tree = None
            if known.any():
                tree = HistGradientBoostingRegressor(random_state=seed, max_iter=100, min_samples_leaf=10)
                tree.fit(inputs[known], change[known])
                errors[..., channel] = abs(
                    change - tree.predict(inputs.reshape(-1, inputs.shape[-1])).reshape(change.shape)
                )
            self.trees.append(tree)
        self.spread = Spread().fit(leads(asked.past, asked.dt), errors)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        last, _ = last_values(past)
        mean, history = last.unsqueeze(1).repeat(1, dt.shape[1], 1), self._history(past)
        for channel, tree in enumerate(self.trees):
            if tree is not None:
                inputs = self._inputs(past, history, dt, channel)
                change = tree.predict(inputs.reshape(-1, inputs.shape[-1])).reshape(dt.shape)
                mean[..., channel] += torch.as_tensor(change)
        return mean, torch.as_tensor(self.spread(leads(past, dt)))

    def _history(self, past: Series) -> Tensor:
        """Return moving averages of each channel at the last sample, (n, channels, scales); NaN without a value."""
        end = past.t.amax(1, keepdim=True)
        weight = past.mask.double()
        values = torch.nan_to_num(past.x)
        averages = []
        for scale in SCALES:
            decay = torch.exp(-(end - past.t) / (scale * self.gap)).clamp(min=1e-300).unsqueeze(-1) * weight
            averages.append((decay * values).sum(1) / decay.sum(1))
        return torch.stack(averages, -1)

    def _inputs(self, past: Series, history: Tensor, dt: Tensor, channel: int) -> NDArray[Any]:
        last, age = last_values(past)
        mine, n = last[:, channel : channel + 1], len(last)
        columns = [
            history[:, channel] - mine,
            age[:, channel : channel + 1],
            last.nan_to_num(),
            past.lengths.view(n, 1).double(),
        ]
        if past.static is not None:
            columns.append(past.static)
        fixed = torch.cat(columns, 1).unsqueeze(1).expand(-1, dt.shape[1], -1)
        moving = [dt, dt + age[:, channel : channel + 1]]
        if past.unit is not None and past.origin is not None:  # the calendar
            dates = past.dates(past.t.amax(1, keepdim=True) + dt)
            if self.zone is not None:
                import pandas

                local = pandas.DatetimeIndex(dates.reshape(-1), tz="UTC").tz_convert(self.zone).tz_localize(None)
                dates = local.to_numpy().reshape(dates.shape)
            seconds = torch.from_numpy((dates - np.datetime64("1970-01-05")) / np.timedelta64(1, "s"))  # since a Monday
            for period in (86400.0, 7 * 86400.0):
                phase = 2 * math.pi * seconds / period
                moving += [phase.sin(), phase.cos()]
        covariates = foreseen(past, dt, age[:, channel : channel + 1])
        return torch.cat([fixed, torch.stack(moving, -1), covariates], -1).numpy()


class Smoothing:
    """Noisy oscillators with exact bands, for each channel by itself (:class:`OscillatorSmoother`)."""

    def fit(self, series: Series, asked: Questions, seed: int) -> Self:
        self.models = []
        for channel in range(series.x.shape[2]):
            one = self._channel(series, channel)
            one = one.select(one.mask.any(-1).any(-1))
            model = OscillatorSmoother(mean="constant", keep_observed=False, random_state=seed)
            self.models.append(model.fit(one) if int(one.mask.sum()) > 1 else None)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = torch.zeros(*dt.shape, len(self.models)).double(), torch.ones(*dt.shape, len(self.models)).double()
        at = past.t.amax(1, keepdim=True) + torch.nan_to_num(dt)
        order = at.argsort(1)
        for channel, model in enumerate(self.models):
            if model is not None:
                found = model.forecast(self._channel(past, channel), at.gather(1, order))
                mean[..., channel] = found.mean[..., 0].gather(1, order.argsort(1))
                std[..., channel] = found.std[..., 0].gather(1, order.argsort(1))
        return mean, std

    @staticmethod
    def _channel(series: Series, channel: int) -> Series:
        part = slice(channel, channel + 1)
        x, mask, features = series.x[..., part], series.mask[..., part], series.features[part]
        return dataclasses.replace(series, x=x, mask=mask, features=features)


class Spread:
    """The mean absolute error of each channel as a function of the lead, times √(π/2), interpolated in log lead."""

    def fit(self, lead: NDArray[Any], errors: NDArray[Any]) -> Self:
        self.knots, self.values = [], []
        for channel in range(errors.shape[2]):
            known = np.isfinite(errors[..., channel]) & np.isfinite(lead[..., channel])
            log_lead, error = np.log(lead[..., channel][known] + 1e-12), errors[..., channel][known]
            order = np.argsort(log_lead)
            parts = np.array_split(order, max(1, min(50, len(order) // 15)))
            self.knots.append(np.array([log_lead[part].mean() if len(part) else 0.0 for part in parts]))
            found = np.array([error[part].mean() if len(part) else 1.0 for part in parts])
            self.values.append(np.maximum(found * math.sqrt(math.pi / 2), 1e-6))
        return self

    def __call__(self, lead: NDArray[Any]) -> NDArray[Any]:
        log_lead = np.log(np.nan_to_num(lead) + 1e-12)
        each = zip(self.knots, self.values, strict=True)
        return np.stack([np.interp(log_lead[..., c], *points) for c, points in enumerate(each)], -1)


class Calibration:
    """Quantiles of held-out errors near a lead: the half widths of bands of a channel, in standard deviations.

    Without an observed value there is no lead. The half width is then a quantile of the held-out values themselves.
    """

    def __init__(self, sample: NDArray[Any], lead: NDArray[Any], error: NDArray[Any], value: NDArray[Any]) -> None:
        is_value, known = np.isfinite(value), np.isfinite(error) & np.isfinite(lead)
        self.values = abs(value[is_value]), sample[is_value]
        order = np.random.RandomState(0).permutation(int(known.sum()))  # equal leads of all series are mixed
        order = order[np.argsort(lead[known][order], kind="stable")]
        self.lead, self.error, self.sample = (part[known][order] for part in (lead, error, sample))
        self.longest = float(self.lead[-1]) if len(self.lead) else math.inf

    def __call__(self, lead: NDArray[Any], level: float) -> NDArray[Any]:
        """Return the half width at each lead, from the nearest errors, or from more if their values are too few."""
        total, none, log_lead = len(self.error), bound(*self.values, level), np.log(self.lead + 1e-12)
        size = min(total, max(NEAR, total // 5))
        while size:
            starts = np.unique(np.linspace(0, total - size, KNOTS).astype(int))
            found = [bound(self.error[k : k + size], self.sample[k : k + size], level) for k in starts]
            if size == total or np.isfinite(found).all():
                knots = [log_lead[k : k + size].mean() for k in starts]
                return np.where(np.isnan(lead), none, np.interp(np.log(lead + 1e-12), knots, found))
            size = min(total, 2 * size)
        return np.where(np.isnan(lead), none, math.inf)


def bound(error: NDArray[Any], sample: NDArray[Any], level: float) -> float:
    """Return the bound that conformal prediction gives for an error at a level in percent.

    A value that was held out is asked for from several cuts, and its errors count as one. Of n values the largest error
    is a bound of the level n / (n + 1), and the bound of a higher level is infinite.
    """
    count = len(np.unique(sample))
    rank = math.ceil((count + 1) * level / 100 - 1e-9)
    return float(np.sort(error)[math.ceil(rank / count * len(error) - 1e-9) - 1]) if rank <= count else math.inf


def last_values(past: Series) -> tuple[Tensor, Tensor]:
    """Return the last observed value of each channel and its age, (n, channels); NaN if there is none."""
    positions = torch.arange(past.x.shape[1]).view(1, -1, 1)
    latest = torch.where(past.mask, positions, -1).amax(1)
    rows = torch.arange(len(past)).unsqueeze(1)
    channels = torch.arange(past.x.shape[2])
    value = past.x[rows, latest.clamp(min=0), channels]
    age = past.t.amax(1, keepdim=True) - past.t.gather(1, latest.clamp(min=0))
    return torch.where(latest >= 0, value, torch.nan), torch.where(latest >= 0, age, torch.nan)


def leads(past: Series, dt: Tensor) -> NDArray[Any]:
    """Return times since the last observed value of each channel, (n, K, channels); NaN if there is none."""
    return (dt.unsqueeze(-1) + last_values(past)[1].unsqueeze(1)).numpy()
