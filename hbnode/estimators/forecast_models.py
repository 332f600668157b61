"""Models that forecast irregular series, backtests of these models, and calibrated bands."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Ridge, RidgeCV
from torch import Tensor
from typing_extensions import Self, override

from hbnode._tree import record
from hbnode.data import Series
from hbnode.estimators.seasonal import gaps_and_seasons, lagged
from hbnode.estimators.smoother import OscillatorSmoother

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

BLOCK = 1_000_000  # maximum number of values of the histories that are in memory at once
TREES: dict[str, Any] = {"max_iter": 100, "learning_rate": 0.05, "max_leaf_nodes": 15, "random_state": 0}
WIDE = 8  # maximum number of channels for which all candidates are compared, and trees with two losses
FOLDS, LEAST = 2, 1e-6  # number of folds that measure the errors of trees; smallest standard deviation of a forecast
FEW_SERIES = 10  # with fewer series, the end of each series is held out instead of whole series
MEMORY = 1000  # number of last samples of a history that oscillators and networks use
ALPHAS = np.logspace(-2, 4, 13)  # penalties of the ridge regression
SCALES = (1.0, 4.0, 16.0)  # time constants of moving averages, in median gaps
ROUNDING = 1e-12  # rounding error of times, relative to the largest time
NEAREST_ERRORS, KNOTS = 200, 20  # minimum number of errors for a half width; number of leads at which it is computed


@record
class Past(Series):
    """Histories of series, with covariates that are also known at later times.

    Attributes:
        known: series of the covariates, which have their own sampling times; None without covariates.
        zone: the time zone of the user's dates; None if they have none.
    """

    known: Series | None = None
    zone: Any = None

    @override
    def select(self, index: Any) -> Past:
        found: Any = super().select(index)
        return dataclasses.replace(found, known=None if self.known is None else self.known.select(index))


def foreseen(past: Series, dt: Tensor, age: Tensor | float = 0.0) -> Tensor:
    """Return F covariates, then the F changes of these covariates, at K times after each of n histories, (n, K, 2 F).

    ``dt`` (n, K) are the times after the last sample of the history. A change is the difference from the covariate at
    the time ``age`` (n, 1) before the last sample. Covariates are interpolated linearly. They are NaN outside of the
    range of their samples.
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
class Backtest:
    """n test cases of a forecast: the history of a series up to a cut, and K samples after the cut.

    In some histories the last values of some channels are removed. So the age of the last value varies between test
    cases. Histories are not stored: ``past`` computes all of them, and :meth:`over` computes a block of them at a time.

    Attributes:
        series: all series, standardised by the training data.
        row: index of the series of each test case, (n,).
        ends: number of samples before the cut, (n,).
        lost: number of samples at the end of the history whose values are removed, for each channel, (n, channels).
        dt: times of the later samples after the last sample of the history, (n, K); NaN on padding.
        values: values of the later samples, (n, K, channels); NaN if missing.
        sample: index of each later sample among the samples of all series, (n, K); -1 on padding.
        units: units of each series to which histories and values are converted; None without a conversion.
    """

    series: Series
    row: Tensor
    ends: Tensor
    lost: Tensor
    dt: Tensor
    values: Tensor
    sample: Tensor
    units: Units | None = None

    def __len__(self) -> int:
        return len(self.row)

    @property
    def past(self) -> Series:
        past = cut_at(self.series.select(self.row), self.ends)
        positions = torch.arange(past.x.shape[1]).view(1, -1, 1)
        is_kept = positions < (self.ends.unsqueeze(1) - self.lost).unsqueeze(1)
        past = dataclasses.replace(past, x=torch.where(is_kept, past.x, torch.nan), mask=past.mask & is_kept)
        return past if self.units is None else self.units.scaled(past)

    def select(self, rows: Tensor | slice) -> Backtest:
        parts = {name: getattr(self, name)[rows] for name in ("row", "ends", "lost", "dt", "values", "sample")}
        return dataclasses.replace(self, **parts)

    def over(self, function: Callable[[Series, Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return ``function(self.past, self.dt)``, a tuple of tensors.

        To save memory, it is computed for a block of test cases at a time.
        """
        size = max(1, BLOCK // (int(self.ends.max()) * self.values.shape[2]))
        blocks = [self.select(slice(k, k + size)) for k in range(0, len(self), size)]
        return tuple(torch.cat(each) for each in zip(*(function(b.past, b.dt) for b in blocks), strict=True))

    def in_units(self, units: Units) -> Backtest:
        """Return the backtest with histories and later values converted to the units of each history."""
        loc, scale = self.over(lambda past, dt: units(past))
        return dataclasses.replace(self, values=(self.values - loc) / scale, units=units)


def draw_backtest(
    series: Series,
    random: np.random.RandomState,
    first: float,
    cuts: int,
    ahead: int,
    horizon: float,
    rows: NDArray[Any] | None = None,
) -> Backtest:
    """Return test cases with random cuts of the series, random later samples, and some last values removed.

    Arguments:
        series: the series.
        random: random number generator.
        first: share of the samples of a series that lie before the first possible cut.
        cuts: maximum number of cuts of each series.
        ahead: maximum number of later samples for each cut. If there are more, half of the chosen indices are uniformly
            distributed, and half are log-uniformly, so that near and far samples are tested.
        horizon: maximum time after the last sample. The next sample is always allowed.
        rows: indices of the series; None takes all series. Default: ``None``
    """
    which, ends, later = [], [], []
    for row in range(len(series)) if rows is None else rows.tolist():
        length = int(series.lengths[row])
        least, t = max(1, int(first * length)), series.t[row, :length].numpy()
        for cut in np.sort(random.permutation(np.arange(least, length))[:cuts]):
            count = max(1, int(np.searchsorted(t, t[cut - 1] + horizon, "right")) - int(cut))
            share = (np.arange(ahead) + random.uniform(size=ahead)) / ahead
            drawn = np.concatenate([count * share[::2], (count + 1.0) ** share[1::2] - 1]).astype(int)
            which.append(row)
            ends.append(int(cut))
            later.append(cut + (np.unique(drawn) if count > ahead else np.arange(count)))
    if not which:
        raise ValueError("no series has two samples, so no forecast can be tested. Fix: longer series.")
    width = max(map(len, later))
    index = torch.tensor(np.stack([np.pad(each, (0, width - len(each)), constant_values=-1) for each in later]))
    row, last = torch.tensor(which), torch.tensor(ends) - 1
    is_real = index >= 0
    dt = series.t[row.unsqueeze(1), index] - series.t[row, last].unsqueeze(1)
    values = torch.where(is_real.unsqueeze(-1), series.x[row.unsqueeze(1), index], torch.nan)
    sample = torch.where(is_real, row.unsqueeze(1) * series.x.shape[1] + index, -1)
    lost = lost_ends(last + 1, series.x.shape[2], random)
    return Backtest(series, row, last + 1, lost, torch.where(is_real, dt, torch.nan), values, sample)


def cut_at(series: Series, lengths: Tensor) -> Series:
    """Return the beginning of each series: its first ``lengths[i]`` samples for series i. ``lengths`` is (batch,)."""
    total = int(lengths.max())
    is_kept = torch.arange(total) < lengths.unsqueeze(1)
    t = torch.where(is_kept, series.t[:, :total], series.t.gather(1, (lengths - 1).unsqueeze(1)))
    x = torch.where(is_kept.unsqueeze(-1), series.x[:, :total], torch.nan)
    mask = series.mask[:, :total] & is_kept.unsqueeze(-1)
    return dataclasses.replace(series, x=x, t=t, mask=mask, lengths=lengths)


def last_samples(series: Series, count: int) -> Series:
    """Return the last ``count`` samples of each series, or all samples of a shorter series."""
    first = (series.lengths - count).clamp(min=0).unsqueeze(1)
    index = (first + torch.arange(min(count, series.x.shape[1]))).clamp(max=series.x.shape[1] - 1)
    rows = torch.arange(len(series)).unsqueeze(1)
    x, t, mask = (part[rows, index] for part in (series.x, series.t, series.mask))
    return dataclasses.replace(series, x=x, t=t, mask=mask, lengths=series.lengths.clamp(max=count))


def lost_ends(lengths: Tensor, channels: int, random: np.random.RandomState) -> Tensor:
    """Choose at random how many of the last values of each channel are removed from each history, (n, channels).

    ``lengths`` (n,) are the numbers of samples of the histories. Half of the histories lose no values. In a quarter,
    each channel loses values with probability 1/2. In the last quarter, all channels lose values. The numbers are
    log-uniform. At least the first sample keeps its values.
    """
    n = len(lengths)
    is_cut = random.uniform(size=(n, channels)) < random.choice([0.0, 0.0, 0.5, 1.0], (n, 1))
    lost = (lengths.double() ** torch.from_numpy(random.uniform(size=n))).long().minimum(lengths - 1)
    return lost.unsqueeze(1) * torch.from_numpy(is_cut)


class Units:
    """The location and the scale of each series and channel, computed from the values of its history only.

    The location is the median of the values. The scale is (mean √|Δ|)² over the differences Δ of successive values. It
    depends little on changes of the level and on rare outliers. It is multiplied by one factor for each channel, so
    that it has the size of a typical deviation from the median.

    Location and scale are shrunk towards values that all series share, by empirical Bayes. The estimate from a single
    series has the weight B / (B + V). B is the variance of the true values between series. V is the variance of the
    estimation error, which decreases with the number of values. So all series have the same scale if their scales
    differ by chance only. A history without a value has the location 0 and the scale 1 of the standardised data.

    References:
        Efron and Morris, Data Analysis Using Stein's Estimator and its Generalizations, JASA 70 (1975).
    """

    def __init__(self, channels: int) -> None:
        self.centre, self.ratio, self.between, self.log_between = np.zeros((4, channels))

    def fit(self, series: Series) -> Self:
        middle, step, spread, count = (each.numpy() for each in _moments(series))
        for c in range(series.x.shape[2]):
            known = (count[:, c] > 2) & (step[:, c] > 0)
            if not known.any():
                continue
            log, values = np.log(step[known, c]), count[known, c]
            self.centre[c], self.ratio[c] = np.median(log), np.median(np.log(spread[known, c]) - log)
            if len(log) > 1:
                self.log_between[c] = max(0.0, log.var(ddof=1) - (1 / (values - 1)).mean())
                own = middle[known, c].var(ddof=1) - (spread[known, c] ** 2 / values).mean()
                self.between[c] = max(0.0, own)
        return self

    @property
    def differ(self) -> bool:
        """Whether the units of different series can differ."""
        return bool((self.between + self.log_between > 0).any())

    def __call__(self, past: Series) -> tuple[Tensor, Tensor]:
        """Return the location and the scale of each history and channel, (n, 1, channels) each."""
        middle, step, _, count = _moments(past)
        centre, ratio, between, log_between = map(
            torch.from_numpy, (self.centre, self.ratio, self.between, self.log_between)
        )
        weight = log_between / (log_between + 1 / (count - 1).clamp(min=1)) * (step > 0)
        scale = (centre + ratio + weight * torch.where(step > 0, step.log() - centre, 0.0)).exp()
        scale = torch.where(count > 0, scale, 1.0)
        loc = between / (between + scale**2 / count.clamp(min=1)) * middle
        return torch.where(count > 0, loc, 0.0).unsqueeze(1), scale.unsqueeze(1)

    def scaled(self, past: Series) -> Series:
        """Standardise histories: return them after subtraction of the location and division by the scale.

        If the units of different series can differ, the location and log scale are added to the static features.
        """
        loc, scale = self(past)
        if not self.differ:
            return dataclasses.replace(past, x=(past.x - loc) / scale)
        level = torch.cat([loc, scale.log() - torch.from_numpy(self.centre + self.ratio)], 2)[:, 0]
        static = level if past.static is None else torch.cat([past.static, level], 1)
        names = [*past.static_features, *(f"{kind} {name}" for kind in ("location", "scale") for name in past.features)]
        return dataclasses.replace(past, x=(past.x - loc) / scale, static=static, static_features=names)


def _moments(series: Series) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return statistics of each series and channel: median, typical step, typical deviation, and number of values.

    Each is a tensor (n, channels). The typical step is (mean √|Δ|)² over the differences Δ of successive values. The
    typical deviation is (mean √|x - median|)² over the values x.
    """
    positions = torch.arange(series.x.shape[1]).view(1, -1, 1)
    filled = series.x.gather(1, torch.where(series.mask, positions, 0).cummax(1).values)
    middle = series.x.nanmedian(1).values
    step = (series.x[:, 1:] - filled[:, :-1]).abs().sqrt().nanmean(1).square().nan_to_num()
    spread = (series.x - middle.unsqueeze(1)).abs().sqrt().nanmean(1).square().nan_to_num()
    return middle, step, spread, series.mask.sum(1)


class InUnits:
    """A model that converts series to :class:`Units`, passes them to another model, and converts its forecasts back."""

    def __init__(self, model: Any, units: Units) -> None:
        self.model, self.units = model, units

    def fit(self, series: Series, backtest: Backtest, seed: int) -> Self:
        self.model.fit(self.units.scaled(series), backtest.in_units(self.units), seed)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.units(past)
        mean, std = self.model.forecast(self.units.scaled(past), dt)
        return mean * scale + loc, std * scale


# Models that predict the mean and the standard deviation of later values, in standardised units


class LastValue:
    """A model that forecasts the last observed value.

    The standard deviation is 1.48 (mean √|e|)², where e are the errors in a backtest. Isotonic regression fits the mean
    of √|e| as a non-decreasing function of the time since the last value. The factor 1.48 makes the result exact for
    normally distributed errors. Outliers have little influence.
    """

    def fit(self, series: Series, backtest: Backtest, seed: int) -> Self:
        last, lead = backtest.over(lambda past, dt: (last_values(past)[0], torch.from_numpy(leads(past, dt))))
        root = (backtest.values - last.unsqueeze(1)).abs().sqrt()
        self.growth = []
        for each, error in zip(lead.unbind(2), root.unbind(2), strict=True):
            known = each.isfinite() & error.isfinite()
            growth = IsotonicRegression(out_of_bounds="clip")
            self.growth.append(growth.fit(each[known].numpy(), error[known].numpy()) if known.any() else None)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        last, _ = last_values(past)
        mean = last.unsqueeze(1).expand(-1, dt.shape[1], -1)
        std = torch.ones_like(mean)
        for channel, growth in enumerate(self.growth):
            if growth is not None:
                root = growth.predict(np.nan_to_num(leads(past, dt)[..., channel]).reshape(-1))
                std[..., channel] = torch.from_numpy(np.maximum(1.48 * root**2, LEAST)).view(dt.shape)
        return mean, std


class Boosting:
    """A linear model and boosted trees that predict the difference of a later value from the last value.

    The inputs are summaries and lagged values of the history, the time ahead and covariates. For dates, the time of the
    day and of the week are further inputs.

    Arguments:
        zone: name of the time zone in which the time of the day is computed. None is UTC. Default: ``None``
    """

    def __init__(self, zone: str | None = None) -> None:
        self.zone = zone

    def fit(self, series: Series, backtest: Backtest, seed: int) -> Self:
        gaps = series.t.diff()[torch.arange(1, series.t.shape[1]) < series.lengths.unsqueeze(1)]
        gaps = gaps[gaps > 0]
        self.gap, self.is_panel = float(gaps.median()) if len(gaps) else 1.0, len(series) >= FEW_SERIES
        self.seasons = [[gap * each for each in found] for gap, found in zip(*gaps_and_seasons(series), strict=True)]
        last, _, *inputs = backtest.over(lambda past, dt: (*last_values(past), *self._inputs(past, dt)))
        places = backtest.row % FOLDS if self.is_panel else torch.arange(len(backtest)) * FOLDS // len(backtest)
        self.trees, folds = [], places.numpy()  # two folds: of the series if there are many, else of the test cases
        for channel, (each, lags) in enumerate(zip(inputs[::2], inputs[1::2], strict=True)):
            change = (backtest.values[..., channel] - last[:, channel : channel + 1]).numpy()
            known = np.isfinite(change)
            parts = lags.numpy()[known], each.numpy()[known], change[known], folds[np.nonzero(known)[0]]
            self.trees.append(self._trees(*parts, is_wide=last.shape[1] > WIDE))
        return self

    @staticmethod
    def _trees(
        lags: NDArray[Any], inputs: NDArray[Any], change: NDArray[Any], folds: NDArray[Any], is_wide: bool
    ) -> Any:
        """Fit the models of one channel to N examples of a change from the last value.

        Errors are measured on folds that were not used to fit the models. The trees minimise the squared or the
        absolute error, whichever gives the smaller mean error.

        Arguments:
            lags: inputs of the linear model, (N, inputs).
            inputs: inputs of the trees, (N, inputs).
            change: the changes, (N,).
            folds: fold of each example, (N,).
            is_wide: whether there are many channels. Then only the squared error and fewer trees are used.

        Returns:
            A linear model of the change, trees that predict its residuals, and trees that predict the absolute error;
            None without examples.
        """
        if not len(change):
            return None
        tried, options = [], {**TREES, "max_iter": 40, "learning_rate": 0.1} if is_wide else TREES
        for loss in ("squared_error",) if is_wide else ("squared_error", "absolute_error"):
            error, tree = abs(change - np.median(change)), HistGradientBoostingRegressor(loss=loss, **options)
            for held in (folds == fold for fold in np.unique(folds)):
                if not held.all():
                    parts = _both(lags[~held], inputs[~held], change[~held], clone(tree))
                    error[held] = abs(change[held] - parts[0].predict(lags[held]) - parts[1].predict(inputs[held]))
            tried.append((error, tree))
        error, tree = min(tried, key=lambda pair: float(pair[0].mean()))
        size = HistGradientBoostingRegressor(loss="poisson", **options).fit(inputs, error) if error.any() else None
        return *_both(lags, inputs, change, tree), size

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        last, _ = last_values(past)
        mean = last.unsqueeze(1).repeat(1, dt.shape[1], 1)
        std, inputs = torch.full_like(mean, LEAST), self._inputs(past, dt)
        for channel, (parts, each, lags) in enumerate(zip(self.trees, inputs[::2], inputs[1::2], strict=True)):
            for part, given, out in zip(parts or (), (lags, each, each), (mean, mean, std), strict=False):
                if part is not None:
                    out[..., channel] += torch.as_tensor(part.predict(given.flatten(0, 1).numpy())).view(dt.shape)
        return mean, std * math.sqrt(math.pi / 2)

    def _history(self, past: Series) -> Tensor:
        """Return the exponential moving averages of each channel at the end of the history, for several time constants.

        The shape is (n, channels, time constants). Channels without a value are NaN.
        """
        end = past.t.amax(1, keepdim=True)
        weight = past.mask.double()
        values = torch.nan_to_num(past.x)
        averages = []
        for scale in SCALES:
            decay = torch.exp(-(end - past.t) / (scale * self.gap)).clamp(min=1e-300).unsqueeze(-1) * weight
            averages.append((decay * values).sum(1) / decay.sum(1))
        return torch.stack(averages, -1)

    def _inputs(self, past: Series, dt: Tensor) -> list[Tensor]:
        """Return the inputs from which the models of each channel forecast n histories at K times ``dt`` (n, K).

        The result is a list with two tensors for each channel in turn: the inputs of the boosted trees (n, K, a), then
        the inputs of the linear model (n, K, b). ``dt`` counts from the last sample of each history.
        """
        (last, age), history, n = last_values(past), self._history(past), len(past)
        fixed = [last.nan_to_num()]
        if self.is_panel:  # with few series these inputs would exceed the range of the training data
            fixed += [past.lengths.view(n, 1).double(), past.t.amax(1, keepdim=True) - past.t[:, :1]]
        if past.static is not None:
            fixed.append(past.static)
        moving = [dt]
        if past.unit is not None and past.origin is not None:  # add the time of the day and of the week
            dates = past.dates(past.t.amax(1, keepdim=True) + dt)
            if self.zone is not None:
                import pandas

                local = pandas.DatetimeIndex(dates.reshape(-1), tz="UTC").tz_convert(self.zone).tz_localize(None)
                dates = local.to_numpy().reshape(dates.shape)
            seconds = torch.from_numpy((dates - np.datetime64("1970-01-05")) / np.timedelta64(1, "s"))  # since a Monday
            for period in (86400.0, 7 * 86400.0):
                phase = 2 * math.pi * seconds / period
                moving += [phase.sin(), phase.cos()]
        decays = [torch.exp(-dt / (scale * self.gap)).nan_to_num().unsqueeze(-1) for scale in SCALES]
        found = []
        for channel in range(last.shape[1]):
            part = slice(channel, channel + 1)
            each = torch.cat([history[:, channel] - last[:, part], age[:, part], *fixed], 1)
            own = torch.stack([*moving, dt + age[:, part]], -1)
            lags = lagged(past, dt, channel, self.gap, self.seasons[channel])
            lags = torch.cat([foreseen(past, dt, age[:, part]), lags], -1).nan_to_num()
            found.append(torch.cat([each.unsqueeze(1).expand(-1, dt.shape[1], -1), own, lags], -1))
            found.append(
                torch.cat([lags, *(lags * decay for decay in decays)], -1)
            )  # lagged values whose coefficients decay with the horizon
        return found


def _both(lags: NDArray[Any], inputs: NDArray[Any], change: NDArray[Any], tree: Any) -> tuple[Any, Any]:
    """Fit a linear model that predicts ``change`` from ``lags``, and trees that predict its residuals from ``inputs``.

    Return both fitted models. ``tree`` is the unfitted estimator of the trees.
    """
    line = RidgeCV(ALPHAS) if len(change) > 2 else Ridge(ALPHAS[-1])
    line.fit(lags, change)
    return line, tree.fit(inputs, change - line.predict(lags))


class Smoothing:
    """A model that forecasts each channel by a separate :class:`OscillatorSmoother`."""

    def fit(self, series: Series, backtest: Backtest, seed: int) -> Self:
        self.models = []
        for channel in range(series.x.shape[2]):
            one = self._channel(series, channel)
            one = one.select(one.mask.any(-1).any(-1))
            model = OscillatorSmoother(mean="constant", keep_observed=False, random_state=seed)
            self.models.append(model if int(one.mask.sum()) > 1 and model.fit(one).has_scale_.all() else None)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = torch.zeros(*dt.shape, len(self.models)).double(), torch.ones(*dt.shape, len(self.models)).double()
        at = past.t.amax(1, keepdim=True) + torch.nan_to_num(dt)
        past = last_samples(past, MEMORY)
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


class Calibration:
    """The half width of a channel's forecast bands, as a function of the forecast's lead and the band's level.

    The lead is the time from the last observed value to the forecast. The half width is in units of the predicted
    standard deviation. It is a quantile of the absolute errors of held-out forecasts with similar leads.

    A history without any value has the lead NaN. Its forecast is 0 with standard deviation 1, so that the absolute
    error is the absolute value. The half width is then a quantile of all absolute held-out values.

    Arguments:
        sample: index of the sample that each of n held-out forecasts predicts, (n,).
        lead: lead of each forecast, (n,).
        error: absolute error of each forecast divided by its predicted standard deviation, (n,).
        value: true value of each sample, (n,).
    """

    def __init__(self, sample: NDArray[Any], lead: NDArray[Any], error: NDArray[Any], value: NDArray[Any]) -> None:
        is_value, known = np.isfinite(value), np.isfinite(error) & np.isfinite(lead)
        self.values = abs(value[is_value]), sample[is_value]
        order = np.random.RandomState(0).permutation(int(known.sum()))  # shuffle errors with equal leads
        order = order[np.argsort(lead[known][order], kind="stable")]
        self.lead, self.error, self.sample = (part[known][order] for part in (lead, error, sample))
        self.longest = float(self.lead[-1]) if len(self.lead) else math.inf

    def __call__(self, lead: NDArray[Any], level: float) -> NDArray[Any]:
        """Return the half width of the band of a level (in percent) for each lead, in the shape of ``lead``.

        Half widths are computed from the errors with the nearest leads, and interpolated. If these errors come from too
        few different samples for the level, more errors are used. If even all errors are too few, the half widths are
        infinite.
        """
        total, none, log_lead = len(self.error), bound(*self.values, level), np.log(self.lead + 1e-12)
        size = min(total, max(NEAREST_ERRORS, total // 5))
        while size:
            starts = np.unique(np.linspace(0, total - size, KNOTS).astype(int))
            found = [bound(self.error[k : k + size], self.sample[k : k + size], level) for k in starts]
            if size == total or np.isfinite(found).all():
                knots = [log_lead[k : k + size].mean() for k in starts]
                return np.where(np.isnan(lead), none, np.interp(np.log(lead + 1e-12), knots, found))
            size = min(total, 2 * size)
        return np.where(np.isnan(lead), none, math.inf)


def check_level(level: Any) -> float:
    """Return the level of a band, in percent, as a float. Raise ValueError if it is not between 1 and 100."""
    if not isinstance(level, numbers.Real) or not 1 < float(level) < 100:  # 0.9 is probably meant as 90
        raise ValueError(f"level must be a number in (1, 100), in percent, got {level!r}. Fix: level=90.")
    return float(level)


def bound(error: NDArray[Any], sample: NDArray[Any], level: float) -> float:
    """Return a bound that a new absolute error does not exceed in ``level`` percent of cases, by conformal prediction.

    A sample may be forecast from several cuts; its errors count as one. With n samples, the largest error is the bound
    for the level 100 n / (n + 1) %. The bound for a higher level is infinite.

    Arguments:
        error: absolute errors, (N,).
        sample: index of the sample that belongs to each error, (N,).
        level: level in percent.
    """
    count = len(np.unique(sample))
    rank = math.ceil((count + 1) * level / 100 - 1e-9)
    return float(np.sort(error)[math.ceil(rank / count * len(error) - 1e-9) - 1]) if rank <= count else math.inf


def last_values(past: Series) -> tuple[Tensor, Tensor]:
    """Return the last observed value of each channel and its age, (n, channels) each; NaN for channels without a value.

    The age is the time from this value to the last sample of the history.
    """
    positions = torch.arange(past.x.shape[1]).view(1, -1, 1)
    latest = torch.where(past.mask, positions, -1).amax(1)
    rows = torch.arange(len(past)).unsqueeze(1)
    channels = torch.arange(past.x.shape[2])
    value = past.x[rows, latest.clamp(min=0), channels]
    age = past.t.amax(1, keepdim=True) - past.t.gather(1, latest.clamp(min=0))
    return torch.where(latest >= 0, value, torch.nan), torch.where(latest >= 0, age, torch.nan)


def leads(past: Series, dt: Tensor) -> NDArray[Any]:
    """Return the lead of each forecast: the time from the last observed value of the channel, (n, K, channels).

    Forecasts are at times ``dt`` (n, K) after the last sample. The result is NaN for channels without a value.
    """
    return (dt.unsqueeze(-1) + last_values(past)[1].unsqueeze(1)).numpy()
