"""Forecasts of irregular series, from tables to tables, with calibrated bands."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from sklearn.base import clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.distributions import Normal
from typing_extensions import Self

from hbnode._checks import as_count, check_choice, warn_if_swapped
from hbnode._times import kind_of
from hbnode.data import Series, from_long, is_table, on_clock, zones_in
from hbnode.estimators.base import SeriesEstimator, listed
from hbnode.estimators.forecast_models import (
    FEW_SERIES,
    MEMORY,
    ROUNDING,
    WIDE,
    Backtest,
    Boosting,
    Calibration,
    InUnits,
    LastValue,
    Past,
    Smoothing,
    Units,
    check_level,
    cut_at,
    draw_backtest,
    foreseen,
    last_samples,
    last_values,
    leads,
)
from hbnode.estimators.networks import ForecastNetwork, config_of, kept_random_state
from hbnode.estimators.seasonal import Mixture, Seasonal, StatsForecast, mixture

if TYPE_CHECKING:
    from numpy.typing import NDArray

Model = Literal["auto", "last", "features", "seasonal", "oscillators", "statsforecast", "odernn", "gru"]
CHEAP = ("last", "features", "seasonal", "oscillators")
NETWORKS = ("odernn", "gru")
PLAIN = ("seasonal", "statsforecast")  # models without a conversion of each series to its Units
# Backtests on held-out series: minimum number of cuts per series; later samples per cut; number of cuts of all series.
CUTS, AHEAD, MOST_STARTS = 10, 16, 500
PAIRS = 20_000  # maximum number of training examples (cut of a series, later sample) for each channel
PART = 256  # number of held-out forecasts that a network computes at once
GROUPS, END, MOST = 3, 0.3, 0.6  # number of groups of series; default and largest held-out share at the end of a series
START = 0.3  # share of the samples of a held-out series that lie before its first cut


class SeriesForecaster(SeriesEstimator):
    """Forecasts of irregular series with calibrated bands, in the user's units and dates.

    A forecast consists of a mean and one band for each level. The bands are calibrated by split conformal prediction.
    Let e be the absolute errors on held-out series, divided by the standard deviations that the model predicts. The
    lead of a forecast is the time since the last observed value of its column: the horizon plus the age of this value.
    The half width of a band is the predicted standard deviation times a quantile of e at similar leads of the same
    column. For training and for e, the last values of some histories are removed, so that all leads occur.

    Each third of the series is held out in turn. With 500 series or more, or a network, only one third is held out.
    With fewer than ten series, the last 30 % of each series are held out instead, or twice ``horizon``, but at most
    60 %. Then the model is fitted to all series, except for a network, which needs the held-out series for early
    stopping. Therefore the guarantee of conformal prediction for new series is only approximate. It assumes that the
    errors of the final model are distributed as those of the models that did not see the held-out series, and that e
    has the same distribution at similar leads.

    Each column of a series is scaled by its history: by the median and the typical size of a step. Both are shrunk
    towards common values of all series, completely if the series differ by chance only. ``"last"``, ``"features"`` and
    ``"oscillators"`` are also compared with a common scale for all series if there are at most eight columns.
    ``"seasonal"`` and ``"statsforecast"`` always use a common scale. Models are compared by forecasts from complete
    histories. Their errors are divided by the scale of each series, so that series with large values do not dominate.

    A band of a level L in percent needs at least L / (100 - L) held-out values: 9 for 90 %, 19 for 95 %, 99 for 99 %.
    With fewer values it is infinite, as in the theory of conformal prediction; a finite band would need an assumption
    about the tails of the distribution. If a column has no value in a series, its forecast is the training mean, with
    a band from the held-out values themselves. If a column has no value in the training data, its forecast is NaN.

    References:
        Lei et al., Distribution-Free Predictive Inference for Regression, JASA 113 (2018).

    Arguments:
        model: one of

            - ``"last"``, the last value;
            - ``"features"``, a linear model and boosted trees. Their inputs are summaries of the history, values one
              season ago, the horizon, and for dates the time of the day and of the week. These are in the time zone of
              the training table, or in UTC if pandas does not know the zone by name;
            - ``"seasonal"``, a level, a damped linear trend and seasons whose periods are estimated;
            - ``"oscillators"``, an :class:`OscillatorSmoother` for each column;
            - ``"statsforecast"``, for regular series: the median of AutoETS, AutoTheta and MSTL of the package
              statsforecast, fitted to each series separately;
            - ``"odernn"`` or ``"gru"``, a recurrent network;
            - ``"auto"``, the best of the first four models, or the mean of the best two, by the continuous ranked
              probability score on held-out series. ``"statsforecast"`` is also compared if it is installed and the
              series are regular and have at most 20,000 values in total. With more than eight columns only ``"last"``
              and ``"features"`` are compared, and the trees learn from fewer values of each column, to save time.

            Default: ``"auto"``
        id: for a table in long form, the column that identifies the series. None for a table of one series.
            Default: ``None``
        time: for a table, the column of times: numbers, durations or dates. None takes the index of a pandas Series, or
            the dates in the index of a DataFrame. Default: ``None``
        values: for a table, the columns to forecast. None takes all columns that no other argument names.
            Default: ``None``
        static: for a table, columns that are constant within each series; categories are allowed. Default: ``None``
        future: for a table, columns of numbers whose later values are known, such as a holiday or a weather forecast.
            They are interpolated linearly. Only the model ``"features"`` uses them. Default: ``None``
        level: levels of the bands in percent. Default: ``90``
        hidden_size: size of a network's state. Default: ``32``
        dropout: dropout of a network. Default: ``0.1``
        weight_decay: weight decay of a network. Default: ``0.01``
        learning_rate: learning rate of a network. Default: ``0.005``
        max_epochs: maximum number of epochs of a network. Default: ``100``
        patience: number of epochs without a smaller validation loss after which training stops. Default: ``10``
        n_members: number of networks whose forecasts are averaged. Default: ``3``
        device: device of the networks. Default: ``None``
        random_state: seed. Default: ``None``
        progress: whether to show a progress bar; None shows it on a terminal. Default: ``None``

    Attributes:
        features_: names of the columns to forecast.
        model_: name of the selected model.
        cv_loss_: with ``model="auto"``, the score of each model on held-out series.
        history_: the series of :meth:`fit` and :meth:`update`. :meth:`save` does not store them.

    Example:
        >>> import numpy as np, pandas as pd, hbnode.estimators
        >>> hours = np.arange(0, 30, 1.5)
        >>> table = pd.concat([pd.DataFrame({"id": i, "hour": hours, "y": np.sin(hours / 4 + i)}) for i in range(6)])
        >>> forecaster = hbnode.estimators.SeriesForecaster("features", id="id", time="hour", level=80, random_state=0)
        >>> forecaster.fit(table).predict(table, ahead=[1.5, 3.0]).columns.tolist()
        ['id', 'hour', 'column', 'mean', 'lower', 'upper']
    """

    def __init__(
        self,
        model: Model = "auto",
        *,
        id: str | None = None,
        time: str | None = None,
        values: str | Sequence[str] | None = None,
        static: str | Sequence[str] | None = None,
        future: str | Sequence[str] | None = None,
        level: float | Sequence[float] = 90,
        hidden_size: int = 32,
        dropout: float = 0.1,
        weight_decay: float = 0.01,
        learning_rate: float = 0.005,
        max_epochs: int = 100,
        patience: int = 10,
        n_members: int = 3,
        device: torch.device | str | None = None,
        random_state: Any = None,
        progress: bool | None = None,
    ) -> None:
        self.model: Any = model
        self.id, self.time, self.values, self.static = id, time, values, static
        self.future, self.level = future, level
        self.hidden_size, self.dropout, self.weight_decay = hidden_size, dropout, weight_decay
        self.learning_rate, self.max_epochs, self.patience = learning_rate, max_epochs, patience
        self.n_members, self.device, self.random_state, self.progress = n_members, device, random_state, progress

    _network = ForecastNetwork

    def fit(self, X: Any, y: Any = None, horizon: Any = None) -> Self:
        """Fit the model and calibrate its bands.

        Arguments:
            X: the series.
            y: ignored. Default: ``None``
            horizon: the farthest time ahead for which forecasts are needed, in the same form as ``ahead`` of
                :meth:`predict`. The model is trained, selected and calibrated with values up to this time. None is no
                limit with ten series or more. With fewer series, None is 15 % of the median duration, half of the
                held-out part. Default: ``None``

        Raises:
            ValueError: if ``model`` is unknown, or no value was observed.
        """
        check_choice(self.model, "model", get_args(Model))
        self._levels()
        warn_if_swapped(X)
        random = check_random_state(self.random_state)
        series = self._to_series(X, reset=True)
        self.zone_ = _zone_name(series.zone)
        self.is_known_ = series.mask.any(0).any(0).numpy()
        if not self.is_known_.any():
            raise ValueError("X must have an observed value, got missing ones only. Fix: another column in values=.")
        series = series.select(torch.from_numpy(_order(series)))
        self._fit_scale(series, 1.0)
        self.mean_ = np.nan_to_num(self.mean_)
        ahead = None if horizon is None else float(self._horizons(series, horizon, isinstance(X, Series)).max())
        series = self._scaled(series)
        self.units_ = Units(series.x.shape[2]).fit(series)
        whole = series.select(series.lengths > 1)
        splits, self.horizon_ = _splits(series, whole, ahead, random)
        train, test = splits[0]
        is_held = bool((train.lengths > 1).any())
        names = self._names(series, is_held)
        model, *forecast = self._best_model(names, train if is_held else series, test, random)
        forecasts: list[Any] = [forecast]
        is_network = self.model_ in NETWORKS
        if not is_network:  # a network needs its held-out series for early stopping
            for train, other in splits[1 : None if len(whole) < MOST_STARTS else 1]:
                forecasts.append(self._evaluate(model, train, self._cases(train, random), other, random)[1:])
        self._calibrate([test for _, test in splits], forecasts, is_held or self.model_ == "last")
        if is_held and not is_network:
            model = self._fitted(model, series, self._cases(whole, random), test, random)
        self.networks_ = model if is_network else []
        self.fitted_: Any = None if is_network else model
        return self

    def _names(self, series: Series, is_held: bool) -> Sequence[str]:
        """Return the names of the models to compare.

        There is a single name if the user chose a model, or if no values are held out to compare models.
        """
        if self.model != "auto" or not is_held:
            return [CHEAP[0] if self.model == "auto" else self.model]
        if series.x.shape[2] > WIDE:
            return CHEAP[:2]
        return (*CHEAP, "statsforecast") if StatsForecast.admits(series) else CHEAP

    def _best_model(self, names: Sequence[str], train: Series, test: Backtest, random: np.random.RandomState) -> Any:
        """Fit the models with the given names to ``train``, and choose the one with the best score on ``test``.

        A mixture of the best two models is a further candidate.

        Returns:
            The model, and its means and standard deviations for the test cases, (n, K, channels) each.
        """
        backtest = self._cases(train, random)
        scale = self.units_(test.series)[1][test.row]  # scale of each series, so that all series have the same weight
        is_scored = (test.lost == 0).all(1) & test.values.isfinite().any(-1).any(-1)  # complete histories
        is_scored |= ~is_scored.any()

        def score(found: tuple[Any, Tensor, Tensor]) -> float:
            return _score(*((each / scale)[is_scored] for each in (*found[1:], test.values)))

        found = {}
        for name in names:
            models = self._models(name, train.x.shape[2] > WIDE)
            found[name] = min((self._evaluate(each, train, backtest, test, random) for each in models), key=score)
        self.cv_loss_ = {name: score(each) for name, each in found.items()}
        best = sorted(found, key=self.cv_loss_.__getitem__)[:2]
        if len(best) > 1:
            parts, *forecasts = zip(*(found[name] for name in best), strict=True)
            pair = " + ".join(best)
            found[pair] = Mixture(parts), *mixture(list(zip(*forecasts, strict=True)))
            self.cv_loss_[pair] = score(found[pair])
        self.model_ = min(self.cv_loss_, key=self.cv_loss_.__getitem__)
        return found[self.model_]

    def _evaluate(
        self, model: Any, train: Series, backtest: Backtest, test: Backtest, random: np.random.RandomState
    ) -> tuple[Any, Tensor, Tensor]:
        """Fit a model to ``train`` and ``backtest``, and forecast the cases in ``test``.

        Return the fitted model, and the means and standard deviations of its forecasts, (n, K, channels) each.
        """
        model = self._fitted(model, train, backtest, test, random)
        return model, *test.over(lambda past, dt: self._forecast(model, past, dt))

    def _calibrate(self, tests: list[Backtest], forecasts: list[Any], is_held: bool) -> None:
        """Store a :class:`Calibration` for each column, computed from the errors of forecasts of held-out values.

        If no values were held out (``is_held=False``), errors are unknown and bands are infinite. ``forecasts`` holds
        a mean and a standard deviation, (n, K, channels) each, for each backtest in ``tests``.
        """
        parts = []
        for test, (mean, std) in zip(tests, forecasts, strict=False):
            _, age = test.over(lambda past, dt: last_values(past))
            error = ((test.values - mean) / std).abs() if is_held else torch.full_like(mean, math.nan)
            lead = test.dt.unsqueeze(-1) + age.unsqueeze(1)
            sample = test.sample.unsqueeze(-1).expand_as(lead)
            parts.append(torch.stack([sample, lead, error, test.values]).flatten(1, 2))
        joined = torch.cat(parts, 1).numpy()
        self.calibrations_ = [Calibration(*joined[..., channel]) for channel in range(joined.shape[2])]

    def predict(self, X: Any = None, ahead: Any = None, *, future: Any = None) -> Any:
        """Return the forecasts as a pandas DataFrame with one row for each series, time and column.

        The DataFrame has the columns of ids and times of the training table (``id`` and ``time`` if they have no name),
        ``column``, ``mean``, ``lower`` and ``upper``. With several levels the last two are ``lower_50``, ``upper_50``
        and so on. Dates are in the time zone of the table, or in UTC if it has several.

        Arguments:
            X: the histories of the series to forecast, which may be other series than in :meth:`fit`. None takes the
                series of :meth:`fit` and :meth:`update`. Default: ``None``
            ahead: one or several times after the last observed value of each series. Rows without a value at the end of
                a series are ignored; a series without any value ends at its last row. For times that are dates,
                ``ahead`` may be a duration such as ``"1h"``, a pandas offset such as ``"1MS"`` or
                ``pandas.DateOffset(months=1)``, or a date that is not before the last value. Dates need a time zone if
                the table has one. Text is read by pandas.to_timedelta if possible, so ``"1ms"`` is a millisecond and
                ``"1W"`` has seven days; only ``"MS"`` is the start of a month. For times that are numbers, or a Series,
                ``ahead`` may be numbers in the unit of the times. None takes the times of the rows of ``X`` and
                ``future`` after the last value. Default: ``None``
            future: a table of later rows with the columns of ids, times and ``future``. These rows may also be in X,
                without values. If both have a value at the same time, ``future`` is used. Default: ``None``

        Raises:
            ValueError: if only the new or only the training dates have a time zone (a Series fits both); if a column of
                ``future`` is not known at a time to forecast; if the forecaster was loaded from a file and X is None.

        Warns:
            UserWarning: if the lead of a forecast is larger than all leads of the held-out values; if a band is
                infinite because there are too few held-out values for its level; if a forecast is NaN because its
                column had no value in the training data.
        """
        import pandas

        check_is_fitted(self)
        X = getattr(self, "history_", None) if X is None else X
        if X is None:
            raise ValueError("X must be given, because a file of save has no series. Fix: update(table) before.")
        if future is not None and ahead is not None and not listed(self.future):
            raise ValueError("future must be named before fit, got None. Fix: SeriesForecaster(future=['holiday']).")
        later: Any = future if isinstance(future, Past) else None
        series: Any = self._to_series(X, reset=False, future=None if later is future else future)
        if ahead is None:
            later = later or series.known or self._rows(self._frame(X), future, series.ids)
            dt = _times_after(series, later)
        else:
            dt = self._horizons(series, ahead, type(X) is Series)
        self._check_known(series, dt)
        series = self._scaled(series)
        mean, std = self._forecast(self._model, series, dt)
        mean[..., ~self.is_known_] = math.nan
        times = series.t.amax(1, keepdim=True) + dt
        of_time = _of_user(series, times)
        id, time = self.id or "id", self.time or "time"
        if len({id, time, "column", "mean"}) < 4:
            raise ValueError(f"ids and times need names of their own, got {id!r} and {time!r}. Fix: rename.")
        shape = mean.shape
        count = int(np.prod(shape[1:]))
        table = {
            id: [name for name in series.ids for _ in range(count)],
            time: of_time.repeat(shape[2]),
            "column": np.tile(np.array(self.features_, dtype=object), shape[0] * shape[1]),
            "mean": (mean.numpy() * self.std_ + self.mean_).reshape(-1),
        }
        levels, lead = self._levels(), leads(series, dt)
        for level in levels:
            width = np.stack([each(lead[..., c], level) for c, each in enumerate(self.calibrations_)], -1) * std.numpy()
            suffix = f"_{level:g}" if len(levels) > 1 else ""
            for name, sign in (("lower", -1), ("upper", 1)):
                table[name + suffix] = ((mean.numpy() + sign * width) * self.std_ + self.mean_).reshape(-1)
        self._warn(lead, width, series.unit)
        result = pandas.DataFrame(table)[np.repeat(dt.isfinite().numpy().reshape(-1), shape[2])].infer_objects()
        return result.reset_index(drop=True)

    def update(self, X: Any) -> Self:
        """Append rows to the series that :meth:`predict` forecasts by default. The model does not change.

        Arguments:
            X: a table as in :meth:`fit`, with later rows of known series, or new series. A row replaces existing rows
                of the same series and time.

        Raises:
            TypeError: if the data of :meth:`fit` or of this call are not a table.
        """
        import pandas

        check_is_fitted(self)
        new, old = self._frame(X), getattr(self, "history_", None)
        if not hasattr(new, "columns") or isinstance(old, Series):
            raise TypeError("update needs tables, in fit too. Fix: predict(series, ahead) for whole series.")
        self._to_series(new, reset=False)
        keys = list(self._keys)
        if old is not None:
            old = old[~pandas.MultiIndex.from_frame(old[keys]).isin(pandas.MultiIndex.from_frame(new[keys]))]
        self.history_ = pandas.concat([old, new], ignore_index=True)
        return self

    def backtest(self, X: Any, horizon: Any, *, n_origins: int = 3, refit: bool = False) -> Any:
        """Forecast the last values of each series from rolling origins, and return forecasts and observed values.

        The origins are 1, 2, ... horizons before the end of each series. A new forecaster with the same arguments is
        fitted to the values before the first origin, or before each origin with ``refit``. It forecasts the observed
        times up to the next origin. The columns are those of :meth:`predict`, ``origin`` (the time of the last value
        before the forecast) and ``truth``. Columns of ``future`` are known at all times.

        Arguments:
            X: the series.
            horizon: a duration, a pandas offset, or a number in the unit of the times.
            n_origins: number of origins of each series. Default: ``3``
            refit: whether to fit a new forecaster for each origin. Default: ``False``

        Raises:
            ValueError: if no series has values before and after an origin.
        """
        import pandas

        whole: Any = clone(self)._to_series(X, reset=True)
        (step,), end = _steps([horizon]), whole.t.amax(1, keepdim=True)
        rounding, place = ROUNDING * whole.t.abs().max(), torch.arange(whole.x.shape[1])
        parts, fitted = [], None

        def samples(k: int) -> Tensor:
            """Return the number of samples of each series up to the time k horizons before its end, (batch,)."""
            if k and hasattr(step, "rollforward"):
                until = whole.times([[each - k * step] for each in _of_user(whole, end)])
            else:
                until = end - k * float(whole.durations(step)) if k else end
            return ((whole.t <= until + rounding) & (place < whole.lengths.unsqueeze(1))).sum(1)

        for k in range(as_count(n_origins, "n_origins"), 0, -1):
            count, until = samples(k), samples(k - 1)
            is_asked = (count > 0) & (until > count)
            if not is_asked.any():
                raise ValueError("no series has values before and after its first origin. Fix: a smaller horizon.")
            past = _until_last_value(cut_at(whole, count.clamp(min=1)).select(count > 0))
            fitted = clone(self).fit(past, horizon=horizon) if refit or fitted is None else fitted
            past, later = past.select(is_asked[count > 0]), cut_at(whole, until.clamp(min=1)).select(is_asked)
            table, is_later = fitted.predict(past, future=later), _times_after(past, later).isfinite()
            origin = _of_user(past, past.t.amax(1))
            table.insert(1, "origin", origin.repeat(is_later.sum(1).numpy() * len(fitted.features_)))
            table.insert(4, "truth", later.x[is_later].reshape(-1).numpy())
            parts.append(table)
        return pandas.concat(parts, ignore_index=True)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the negative mean continuous ranked probability score of forecasts within the series.

        Errors are in standard deviations of the training data; 0 is the best score. Forecasts start after 30 % of each
        series. To cross-validate with a table, split it by series with GroupKFold of scikit-learn and
        ``groups=table[id]``, or sort it by time and use TimeSeriesSplit.

        Arguments:
            X: series, as for :meth:`predict`.
            y: ignored. Default: ``None``
        """
        check_is_fitted(self)
        series = self._scaled(self._to_series(X, reset=False))
        backtest = draw_backtest(series, check_random_state(0), START, CUTS, AHEAD, self.horizon_)
        mean, std = backtest.over(lambda past, dt: self._forecast(self._model, past, dt))
        return -_score(mean, std, backtest.values)

    @property
    def _model(self) -> Any:
        return self.networks_ if self.model_ in NETWORKS else self.fitted_

    def _levels(self) -> list[float]:
        levels: Any = self.level if np.iterable(self.level) and not isinstance(self.level, str) else [self.level]
        return sorted({check_level(each) for each in list(levels) or [None]})

    @property
    def _keys(self) -> tuple[str, str]:
        return "(id)" if self.id is None else self.id, "(time)" if self.time is None else self.time

    def _frame(self, data: Any) -> Any:
        """Convert a table to a pandas DataFrame that has columns of ids and times. Return other data unchanged."""
        import pandas

        id, time = self._keys
        is_named = isinstance(data, pandas.Series)
        if is_named:
            data = data.to_frame("y" if data.name is None else data.name)
        if not is_table(data) or hasattr(data, "collect") or hasattr(data, "column_names"):  # as_series raises an error
            return data
        if not isinstance(data, pandas.DataFrame):
            data = pandas.DataFrame({name: _entries(data[name]) for name in getattr(data, "columns", data)})
        if self.time is None and time not in data:
            if not is_named and kind_of(data.index) is None:
                raise ValueError("a table needs dates as its index, or a column of times. Fix: time='hour'.")
            data = data.assign(**{time: data.index})
        if self.id is None and id not in data:
            repeated = data[time].duplicated() if time in data else np.zeros(1)
            if repeated.any():
                twice, fix = (
                    data[time][repeated].iloc[0],
                    f"table.groupby({time!r}, as_index=False).mean()",
                )
                raise ValueError(f"without id=, a table is one series, got {twice} twice. Fix: id='patient', or {fix}.")
            data = data.assign(**{id: 0})
        return data

    def _to_series(self, data: Any, *, reset: bool, future: Any = None) -> Any:
        """Convert data to histories that end with the last observed value of each series.

        Covariates are taken from the data and from the table ``future``. With ``reset``, data are the training series.
        """
        if isinstance(data, Past):
            return super()._to_series(data, reset=reset)
        data, names = self._frame(data), listed(self.future)
        has_columns = hasattr(data, "columns")
        if names and not has_columns:
            raise TypeError("future= needs a table with these columns. Fix: a DataFrame, id='patient', time='hour'.")
        if names and self.model not in ("auto", "features"):
            raise ValueError(f"model={self.model!r} does not read columns of future=. Fix: model='features'.")
        series = super()._to_series(data.drop(columns=names, errors="ignore") if names else data, reset=reset)
        if has_columns and reset:
            self._check_columns(series, np.empty((len(series), 0)))
        known = self._rows(data, future, series.ids) if names else None
        zones = zones_in(data, self._keys[1]) or {}
        zone = zones.popitem()[1] if len(zones) == 1 else datetime.timezone.utc if zones else None
        past = _until_last_value(Past(**vars(series.detach()), known=known, zone=zone))
        if reset:
            self.history_ = data.copy() if has_columns else past
        return past

    def _rows(self, table: Any, future: Any, ids: Sequence[Any]) -> Series:
        """Return the covariates in the tables ``table`` and ``future`` as series in the order of ``ids``.

        Rows at the end of a table that have no observed value are included.
        """
        import pandas

        (id, time), names = self._keys, listed(self.future)
        tables = [table] if future is None else [table, self._frame(future)]
        if not all(hasattr(each, "columns") for each in tables):
            raise TypeError("ahead=None needs tables. Fix: ahead=1.0.")
        lost = [name for each in tables for name in (id, time, *names) if name not in each]
        if lost:
            raise KeyError(f"the table has no column {lost[0]!r}, which is known later. Fix: its values in each row.")
        rows = pandas.concat([each[[id, time, *names]] for each in tables], ignore_index=True).assign(**{"(row)": 0.0})
        found = from_long(rows, id=id, time=time, values=names or ["(row)"], duplicates="last", dtype=torch.float64)
        place = {name: row for row, name in enumerate(found.ids)}
        if len(place) > len(ids):
            raise ValueError(f"future must have the ids of X, got {list(place)[len(ids)]!r}. Fix: its rows in X, too.")
        found = on_clock(found.select([place[name] for name in ids]), self.clock_)
        x, mask = found.x[..., : len(names)], found.mask[..., : len(names)]
        return dataclasses.replace(found, x=x, mask=mask, features=names)

    def _check_known(self, series: Any, dt: Tensor) -> None:
        names = listed(self.future)
        missing = (foreseen(series, dt)[..., : len(names)].isnan() & dt.isfinite().unsqueeze(-1)).nonzero()
        if len(missing):
            row, at, column = missing[0].tolist()
            time = _of_user(series, series.t[row].amax() + dt[row, at])[0]
            lost = f"for series {series.ids[row]!r} at {time}. Fix: predict(X, ahead, future=table), rows until then"
            fault = f"column {names[column]!r} must be known at all times that are forecast, got none"
            raise ValueError(f"{fault} {lost}.")

    def _horizons(self, series: Any, ahead: Any, is_unit_known: bool) -> Tensor:
        """Convert ``ahead`` of :meth:`predict` to times after the last sample of each series, (batch, K)."""
        given = ahead if isinstance(ahead, (list, tuple, np.ndarray, Tensor)) or hasattr(ahead, "to_numpy") else [ahead]
        if not np.size(given):
            return torch.full((len(series), 1), math.nan, dtype=torch.float64)
        given, last = _steps(given), series.t.amax(1, keepdim=True)
        kind = kind_of(given)
        is_offset = isinstance(given, list) and any(hasattr(each, "rollforward") for each in given)
        if kind is None and series.unit is not None and not (is_offset or is_unit_known):
            raise TypeError(f"ahead must be durations, offsets or dates, as the times are, got {ahead!r}. Fix: '1h'.")
        if is_offset:
            series._known(series.origin, f"{ahead!r}")
            dt = series.times(_offsets_from(_of_user(series, last), given)) - last
        elif kind in ("dates", "text"):
            if series.origin is not None:
                _check_zone(given, series.zone)
            dt = series.times(given).view(1, -1) - last
        else:
            dt = series.durations(given).double().view(1, -1).expand(len(series), -1)
        if not bool(((dt >= 0) & dt.square().isfinite()).all()):
            fault = "got a negative, infinite or huge time, or NaN"
            fix = "1h" if series.unit else 1.0
            raise ValueError(f"ahead must not lie before the last sample of a series, {fault}. Fix: ahead={fix!r}.")
        return dt

    def _cases(self, series: Series, random: np.random.RandomState) -> Backtest:
        """Return random training cases for a model: histories of the series, and values after each history."""
        pairs = PAIRS * WIDE // max(WIDE, series.x.shape[2])
        return draw_backtest(series, random, 0.0, max(3, pairs // 8 // len(series)), 8, self.horizon_)

    def _models(self, name: str, is_wide: bool) -> list[Any]:
        """Return a list of unfitted models with this name; for a network, return its name.

        If the :class:`Units` of the series can differ, there are two models: one converts each series to its own units,
        and one converts all series to the same units.
        """
        if name in PLAIN:
            return [Seasonal(-self.mean_ / self.std_) if name == "seasonal" else StatsForecast(self.mean_, self.std_)]
        if name in NETWORKS:
            return [name]
        units = [self.units_] if is_wide or not self.units_.differ else [self.units_, Units(len(self.mean_))]
        kinds: dict[str, Any] = {"last": LastValue, "features": partial(Boosting, self.zone_), "oscillators": Smoothing}
        return [InUnits(kinds[name](), each) for each in units]

    @kept_random_state()
    def _fitted(
        self, model: Any, train: Series, backtest: Backtest, held_out: Backtest, random: np.random.RandomState
    ) -> Any:
        """Fit a model to the series ``train`` and their test cases ``backtest``. Return the fitted model.

        If ``model`` is the name of a network, return a list of networks, whose training stops early by ``held_out``.
        """
        seed = int(random.randint(2**31 - 1))
        if model not in NETWORKS:
            return model.fit(train, backtest, seed)
        name = model
        backtest, held_out = backtest.in_units(self.units_), held_out.in_units(self.units_)
        device, networks, parts = self.device or "cpu", [], torch.arange(len(held_out)).split(PART)
        config = config_of(self.units_.scaled(train), name, 1, self.hidden_size, self.dropout)
        for member in range(self.n_members):
            torch.manual_seed(seed + member)
            network = self._trained(
                ForecastNetwork(**config),
                lambda network, rows: _nll(network, backtest, rows, device),
                backtest.ends,
                lambda network: float(np.mean([float(_nll(network, held_out, part, device)) for part in parts])),
                seed + member,
                f"{name} {member + 1}/{self.n_members}",
            )
            networks.append(network)
        return networks

    @kept_random_state()
    def _forecast(self, model: Any, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Forecast with a fitted model or with a list of networks, at times ``dt`` (batch, K) after the last sample.

        Return means and standard deviations, (batch, K, channels) each, standardised by the training data. Channels
        without a value in the history have the mean 0 and the standard deviation 1.
        """
        is_seen = past.mask.any(1, keepdim=True)
        if not isinstance(model, list):
            mean, std = model.forecast(past, dt)
        else:
            (loc, scale), past = self.units_(past), self.units_.scaled(past)
            device, ahead = self.device or "cpu", torch.nan_to_num(dt)
            with torch.no_grad():
                found = [each.to(device)(_networks_input(past, device), ahead.to(device)) for each in model]
            means, stds = mixture([(mean.double().cpu(), std.double().cpu()) for mean, std in found])
            mean, std = means * scale + loc, stds * scale
        return torch.where(is_seen, mean, 0.0), torch.where(is_seen, std, 1.0)

    def _warn(self, lead: NDArray[Any], width: NDArray[Any], unit: float | None) -> None:
        """Warn if forecasts are NaN, if bands are infinite, or if leads are longer than all leads in the calibration.

        Arguments:
            lead: time from the last observed value to each forecast, (batch, K, channels).
            width: half widths of the bands of the highest level, (batch, K, channels).
            unit: length of one unit of time in seconds; None if it is unknown.
        """
        known, level, names = self.is_known_, self._levels()[-1], np.array(self.features_, dtype=object)
        if not known.all():
            lost, rest = names[~known].tolist(), names[known].tolist()
            text = f"columns {lost} had no value in fit, so their forecasts are NaN. Fix: values={rest} for a table."
            warnings.warn(text, stacklevel=3)
        is_infinite = np.isinf(width).any((0, 1)) & known
        if is_infinite.any():
            first = int(is_infinite.argmax())
            count, least = len(np.unique(self.calibrations_[first].sample)), math.ceil(level / (100 - level) - 1e-9)
            fix = f"level={100 * count // (count + 1)}, or " if count else ""
            warnings.warn(
                f"a band of {level:g} % needs {least} held-out values, and column {names[first]!r} has {count}: it is "
                f"infinite. Fix: {fix}more or longer series in fit.",
                stacklevel=3,
            )
        farthest, tested = np.nan_to_num(lead).max((0, 1)), np.array([each.longest for each in self.calibrations_])
        is_far = farthest > 1.001 * tested
        if is_far.any():
            first = int(is_far.argmax())
            far, longest = (f"{each[first] * (unit or 1):.4g}{' s' if unit else ''}" for each in (farthest, tested))
            warnings.warn(
                f"a forecast lies {far} after the last value of column {names[first]!r}, and bands were calibrated up "
                f"to {longest}: they may be too narrow. Fix: fit(X, horizon=ahead), a smaller ahead, or longer series.",
                stacklevel=3,
            )


def _order(series: Series) -> NDArray[Any]:
    """Return indices (batch,) that sort the series by times and values, so that the given order has no influence."""
    sums = [series.t.sum(1), series.x.nansum((1, 2)), series.lengths, series.t[:, 0]]
    return np.lexsort([each.numpy() for each in sums])


def _splits(
    series: Series, whole: Series, ahead: float | None, random: np.random.RandomState
) -> tuple[list[tuple[Series, Backtest]], float]:
    """Split series into training data and held-out data.

    With many series, each of three groups of series is held out in turn. With few series, the end of each is held out.

    Arguments:
        series: all series.
        whole: the series with at least two samples.
        ahead: the farthest time ahead for which forecasts are needed; None chooses it.
        random: random number generator.

    Returns:
        A list of pairs (training series, backtest on held-out values), and the farthest time ahead.
    """
    if len(whole) >= FEW_SERIES:
        ahead = math.inf if ahead is None else ahead
        groups = [np.sort(rows) for rows in np.array_split(random.permutation(len(whole)), GROUPS)]
        trains = [whole.select(torch.from_numpy(np.setdiff1d(range(len(whole)), rows))) for rows in groups]
        cuts = max(CUTS, MOST_STARTS // len(whole))
        tests = [draw_backtest(whole, random, START, cuts, AHEAD, ahead, rows) for rows in groups]
        return list(zip(trains, tests, strict=True)), ahead
    span = float((series.t.amax(1) - series.t[:, 0]).median())
    share = END if ahead is None or not span else min(max(END, 2 * ahead / span), MOST)
    ahead = END / 2 * span if ahead is None else ahead
    train = cut_at(series, ((1 - share) * series.lengths.double()).long().clamp(min=1))
    return [(train, draw_backtest(series, random, 1 - share, MOST_STARTS // len(series), AHEAD, ahead))], ahead


def _offsets_from(ends: Any, offsets: list[Any]) -> list[list[Any]]:
    """Add each of the offsets to each date in ``ends``. Return one list of dates for each date in ``ends``."""
    if not all(hasattr(each, "rollforward") or isinstance(each, datetime.timedelta) for each in offsets):
        raise TypeError(f"ahead must be durations and offsets, or dates, got {offsets!r}. Fix: ['1h', '1MS'].")
    return [[end + each for each in offsets] for end in ends]


def _check_zone(dates: Any, zone: Any) -> None:
    """Raise TypeError if ``dates`` have a time zone and the times of the data have none, or the other way round.

    ``zone`` is the time zone of the data; None if they have none.
    """
    import pandas

    first = np.asarray(dates, dtype=object).reshape(-1)[0]
    if (zone is not None) != (pandas.Timestamp(getattr(first, "start_time", first)).tzinfo is not None):
        wanted, zone = "without" if zone is None else "with", None if zone is None else str(zone)
        fix = f"pandas.Timestamp('2024-01-31 12:00', tz={zone!r})"
        raise TypeError(f"ahead must be dates {wanted} a time zone, as the times, got {dates!r}. Fix: {fix}.")


def _steps(given: Any) -> Any:
    """Convert text such as "1h" or "MS" to a list of durations or pandas offsets, in which dates in text stay text.

    Return ``given`` unchanged if it contains neither text nor offsets.
    """
    import pandas
    from pandas.tseries.frequencies import to_offset

    def duration(text: str) -> Any:
        return pandas.to_timedelta(text if text[0] in "+-.P0123456789" else f"1{text}")

    def step(value: Any) -> Any:
        text = value.strip() if isinstance(value, str) else ""
        if re.search("[A-Za-z:]", text) and not re.search(r"Ms$|mS$|^P[^T]*M", text):
            for read in (to_offset, duration) if text.endswith("MS") else (duration, to_offset):
                with suppress(ValueError):
                    value = read(text)
                    break
        if isinstance(value, str) and not re.match(r"\d{4}-", text):
            fix = "'1MS' for the start of the next month, '1ME' for its end"
            raise ValueError(f"ahead must be durations such as '1h', offsets or dates, got {value!r}. Fix: {fix}.")
        return pandas.Timedelta(value) if isinstance(value, pandas.tseries.offsets.Tick) else value

    entries = list(np.asarray(given, dtype=object).reshape(-1))
    is_read = any(isinstance(each, str) or hasattr(each, "rollforward") for each in entries)
    return [step(each) for each in entries] if is_read else given


def _times_after(past: Series, later: Series) -> Tensor:
    """Return the times from the end of each history in ``past`` to the samples in ``later``, (n, K).

    Samples that are not later than the end of the history are NaN.
    """
    dt = later.t - past.t.amax(1, keepdim=True)
    is_after = (torch.arange(dt.shape[1]) < later.lengths.unsqueeze(1)) & (dt > 0)
    if not is_after.any():
        raise ValueError("ahead must be given if no row lies after the last observed value. Fix: ahead='1h'.")
    return torch.where(is_after, dt, torch.nan)


def _until_last_value(series: Any) -> Any:
    """Cut each series after its last sample with an observed value. A series without any value is not changed."""
    last = torch.where(series.mask.any(-1), torch.arange(series.x.shape[1]), -1).amax(1) + 1
    return cut_at(series, torch.where(last > 0, last, series.lengths))


def _of_user(series: Any, t: Tensor) -> Any:
    """Convert times t, in the unit of the series, to a pandas index of the type of the user's times.

    The type is dates if the series has an origin, durations if it has only a unit, otherwise numbers.
    """
    import pandas

    if series.origin is not None:
        dates = pandas.DatetimeIndex(series.dates(t).reshape(-1))
        return dates if series.zone is None else dates.tz_localize("UTC").tz_convert(series.zone)
    times = t.reshape(-1).numpy() * (series.unit or 1.0)
    return pandas.Index(times) if series.unit is None else pandas.to_timedelta(times, unit="s").round("us")


def _entries(column: Any) -> Any:
    """Convert a column of a table to an array or list from which ``pandas.DataFrame`` keeps the time zones of dates."""
    column = column.numpy(force=True) if isinstance(column, Tensor) else getattr(column, "array", column)  # pandas
    return column.to_list() if hasattr(column, "to_list") else column


def _zone_name(zone: Any) -> str | None:
    """Return the name of a time zone that pandas can read; None if ``zone`` is None or pandas knows no such name."""
    if zone is None:
        return None
    import pandas

    offset = zone.utcoffset(None)  # None unless the zone is a fixed offset, whose name may be arbitrary
    try:
        return str(pandas.Timestamp(0, tz=str(zone if offset is None else datetime.timezone(offset))).tz)
    except (LookupError, OSError, ValueError):  # raised by pytz, zoneinfo or dateutil
        return None


def _networks_input(past: Series, device: torch.device | str) -> Series:
    past = last_samples(past, MEMORY)
    return dataclasses.replace(past, x=torch.nan_to_num(past.x)).to(device, torch.float32)


def _nll(network: ForecastNetwork, backtest: Backtest, rows: Tensor, device: torch.device | str) -> Tensor:
    backtest = backtest.select(rows)
    mean, std = network(_networks_input(backtest.past, device), torch.nan_to_num(backtest.dt).to(device))
    values = backtest.values.to(device, torch.float32)
    known = values.isfinite()
    return -(Normal(mean, std).log_prob(torch.nan_to_num(values)) * known).sum() / known.sum().clamp(min=1)


def _score(mean: Tensor, std: Tensor, values: Tensor) -> float:
    """Return the mean continuous ranked probability score of normal distributions that forecast ``values``.

    See Gneiting and Raftery 2007, eq. 5. Missing values (NaN) are ignored.
    """
    known = values.isfinite()
    z = ((values - mean) / std)[known]
    normal = Normal(0.0, 1.0)
    crps = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.sqrt(math.pi)
    return float((std.expand(values.shape)[known] * crps).mean())
