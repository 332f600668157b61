"""Models of seasonal series: level, trend and Fourier terms with an exact likelihood, and models of statsforecast."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.signal import find_peaks, lombscargle
from torch import Tensor
from typing_extensions import Self

from hbnode.data import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMORY, LEARNED = 2000, 4000  # maximum number of last samples of a series; number of values that select a model
BLOCK, SPECTRUM = 4_000_000, 1400  # number of values in a block of problems; number of last samples for spectra
# Maximum number of Fourier terms of a season; number of those that change with time; basis functions of a change.
HARMONICS, EVOLVING, TERMS = 60, 6, 4
FLAT, FLOOR = 1e4, 1e-6  # prior variance of unregularised coefficients; smallest residual variance
HEAT = 4.0  # a model whose log likelihood is lower by HEAT has a weight that is smaller by the factor e
LEAST, MOST = 8, 20_000  # minimum number of values of a series, and maximum number of all values, for statsforecast
SIGMA = 68.26894921370858  # percentage of normal values within one standard deviation of the mean
APART = 2.5  # smallest ratio of two periods, because a changing season has further peaks near its frequency
RECENT = 1000  # number of last samples of a series that statsforecast's models use
LAGS, CYCLES = 8, 4  # number of lagged values; number of past cycles whose values at the same phase are averaged
SNAP, SURE = 1 / 7, 3.0  # largest change, in gaps, by rounding a time to multiples of a gap; clear gain of likelihood
# Decay times of the residuals in typical gaps; calendar periods in seconds: a day, a week and a year.
DECAYS, CALENDAR = (0.1, 3.0, 10.0, 30.0, 1e6), (86400.0, 7 * 86400.0, 365.2425 * 86400.0)
SIZES, CHANGES = (0.0, 0.01, 0.1, 1.0, 10.0, 100.0), (0.1, 1.0)  # prior variances of a season, and of its change
NOISES = (0.01, 0.1, 0.5, 2.0, 30.0)  # variances of the change of the level in a step, relative to the noise


class Candidate(NamedTuple):
    """The hyperparameters of a seasonal model of one channel.

    Attributes:
        trend: ``"constant"``, ``"walk"`` or ``"line"``: whether the level decays to a constant, is a random walk, or is
            a random walk with a linear trend.
        decay: decay time of the level, in typical gaps between samples; infinite for a random walk.
        noise: variance of the level, or of one step of a random walk, divided by the variance of the observation noise.
        is_log: whether logarithms of the values are modelled.
        season: prior variance of the season.
        change: prior variance of the change of the season, relative to ``season``.
    """

    trend: str
    decay: float
    noise: float
    is_log: bool = False
    season: float = 0.0
    change: float = 0.0


CANDIDATES = [
    *(Candidate("constant", decay, noise) for decay in (2.0, 8.0, 30.0) for noise in (0.3, 3.0, 30.0)),
    Candidate("constant", 1.0, 0.0),
    *(Candidate("walk", math.inf, noise) for noise in NOISES),
    *(Candidate("line", math.inf, noise) for noise in NOISES),
]


class Seasonal:
    """A model of each channel with a stochastic level, a damped linear trend and seasons whose periods are estimated.

    The values, or their logarithms, are βx(t) + μ(t) + noise. The vector x(t) contains a line and Fourier terms, whose
    coefficients may change with time. The level μ(t) is a random walk or decays to a constant. The coefficients β have
    normal priors and are integrated out. The likelihood, summed over series, selects the periods and all variances.
    Several kinds of models are averaged; models with a larger likelihood have larger weights. A forecast uses the
    values of one series only. It is clipped to the range of these values, extended by its width at both ends.

    Arguments:
        zero: the standardised value of each channel that is 0 in the user's units; logarithms are relative to it.
    """

    def __init__(self, zero: NDArray[Any]) -> None:
        self.zero = zero

    def fit(self, series: Series, backtest: Any, seed: int) -> Self:
        self.gaps, self.seasons = gaps_and_seasons(series)
        self.scales, self.kinds = list[float](), list[list[tuple[Any, ...]]]()
        for channel, gap in enumerate(self.gaps):
            u, y, known, *_ = observed(series, channel, gap)
            spread = np.array([value[here].std() for value, here in zip(y, known, strict=True) if here.any()])
            self.scales.append(float(np.median(spread[spread > 0])) if spread.any() else 1.0)
            order = np.argsort(-known.sum(1), kind="stable")
            rows = order[: 1 + int(np.searchsorted(np.cumsum(known.sum(1)[order]), LEARNED))]
            self.kinds.append(self._select(channel, u[rows], y[rows], known[rows]))
        return self

    def _select(self, channel: int, u: NDArray[Any], y: NDArray[Any], known: NDArray[Any]) -> list[tuple[Any, ...]]:
        """Select the models of a channel, given the times u, the values y and the mask ``known`` from :func:`observed`.

        Return a list of tuples (weight, *hyperparameters) with the most likely model for each kind of trend, of values
        and of logarithms. Models with a small weight are left out.
        """
        seasons, found, zero = self.seasons[channel], list[tuple[float, Candidate]](), float(self.zero[channel])

        def likelihoods(kinds: list[Candidate], sizes: Sequence[float | None] = (None,)) -> NDArray[Any]:
            """Return the log likelihood, summed over series, of each model with each season variance, (sizes, kinds).

            ``kinds`` are the models, ``sizes`` the season variances; None is the variance in the model.
            """
            total = np.zeros((len(sizes), len(kinds)))
            for row in range(len(u)):
                one = [row] * len(kinds)
                problem = Problem(kinds, u[one], y[one], known[one], zero, self.scales[channel], seasons)
                total += np.stack([problem.solve(size) for size in sizes])
            return total

        scales = [False, True] if (y - zero)[known].min(initial=math.inf) > 1e-6 else [False]
        for is_log in scales:
            for trend in dict.fromkeys(kind.trend for kind in CANDIDATES):
                kinds = [kind._replace(is_log=is_log) for kind in CANDIDATES if kind.trend == trend]
                totals = likelihoods(kinds, SIZES if seasons else SIZES[:1])
                size, k = np.unravel_index(totals.argmax(), totals.shape)
                kind = kinds[k]._replace(season=SIZES[size])
                choices = [kind, *(kind._replace(change=change) for change in CHANGES if kind.season)]
                likelihood = likelihoods(choices)[0]
                found.append((likelihood.max(), choices[likelihood.argmax()]))
        top = max(likelihood for likelihood, _ in found)
        weighed = [(math.exp((each - top) / HEAT), *kind) for each, kind in found]
        return [each for each in weighed if each[0] > 0.05]

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = torch.zeros(2, *dt.shape, len(self.kinds), dtype=torch.float64)
        for channel, (usual, seasons, weighed) in enumerate(zip(self.gaps, self.seasons, self.kinds, strict=True)):
            u, y, known, gap, is_regular, last = observed(past, channel, usual)
            at, weights = later(past, dt, gap, is_regular, last), np.array([each[0] for each in weighed])
            weights, kinds = weights / weights.sum(), [Candidate(*each[1:]) for each in weighed]
            width = (2 + 2 * len(harmonics(seasons)[0])) * u.shape[1] * len(kinds)
            for rows in np.array_split(np.arange(len(u)), max(1, min(len(u), len(u) * width // BLOCK))):
                each = np.repeat(rows, len(kinds))
                parts = u[each], y[each], known[each], float(self.zero[channel]), self.scales[channel]
                problem = Problem(kinds * len(rows), *parts, seasons)
                problem.solve()
                m, s = (part.reshape(len(rows), len(kinds), -1) for part in problem.forecast(at[each]))
                middle = np.einsum("k,nkt->nt", weights, m)
                spread = np.einsum("k,nkt->nt", weights, s**2 + (m - middle[:, None]) ** 2)
                mean[rows, :, channel], std[rows, :, channel] = torch.from_numpy(middle), torch.from_numpy(spread**0.5)
        return mean, std


class Problem:
    """B linear regressions, one for each pair of a series and a model.

    A Kalman filter of the level turns the correlated residuals of each regression into independent ones.

    Arguments:
        kinds: the hyperparameters of the model of each pair.
        u: times relative to the last value, in typical gaps, (B, T); not positive.
        y: values, (B, T).
        known: True for values, False for padding, (B, T).
        zero: the standardised value that is 0 in the user's units.
        usual: typical standard deviation of a series, for series whose values are all equal.
        seasons: periods of the seasons, in typical gaps.
    """

    def __init__(
        self, kinds: list[Candidate], u: Any, y: Any, known: Any, zero: float, usual: float, seasons: list[float]
    ) -> None:
        self.kinds, self.zero, self.seasons = kinds, zero, seasons
        self.is_evolving = any(kind.change for kind in kinds)
        self.level = np.array([(kind.decay, kind.noise) for kind in kinds]).T
        self.count = known.sum(1)
        count = np.maximum(self.count, 1)[:, None]
        is_used = known | ~known.any(1, keepdims=True)  # a series without any value is treated as zeros
        self.low = np.where(is_used, y, math.inf).min(1, keepdims=True)
        self.high = np.where(is_used, y, -math.inf).max(1, keepdims=True)
        self.is_log = np.array([[kind.is_log] for kind in kinds]) & (self.low > zero)  # logarithms need positive values
        log = np.where(self.is_log, np.log(np.maximum(y - zero, 1e-6)), 0.0) * known
        z = np.where(self.is_log, log, y) * known
        self.shift = z.sum(1, keepdims=True) / count
        spread = ((z - self.shift) ** 2 * known).sum(1, keepdims=True)
        self.usual = usual
        deviation = usual / np.where(self.is_log, np.maximum(self.high - zero, usual), 1.0)  # relative for logarithms
        self.scale = np.where(self.high > self.low, np.sqrt(spread / count), deviation)
        z = (z - self.shift) / self.scale
        self.jacobian = -self.count * np.log(self.scale[:, 0]) - log.sum(1)
        self.span = np.maximum(-u[:, :1], 1.0)
        columns = np.append(design(u, seasons, self.span, self.is_evolving), z[..., None], 2) * known[..., None]
        out, self.log, self.m, self.p = filtered(self.level, u, known, columns)
        self.gram = out.swapaxes(1, 2) @ out

    def solve(self, season: float | None = None) -> NDArray[Any]:
        """Compute the regression coefficients. Return the log likelihood of each pair of a series and a model, (B,).

        If ``season`` is given, it replaces the prior variance of the season in all models. Default: ``None``
        """
        kinds = [kind if season is None else kind._replace(season=season) for kind in self.kinds]
        self.prior = np.stack([prior_deviations(kind, self.seasons, self.is_evolving) for kind in kinds])
        gram, right = self.gram[:, :-1, :-1], self.gram[:, :-1, -1] * self.prior
        root = np.linalg.cholesky(np.eye(gram.shape[1]) + self.prior[:, :, None] * gram * self.prior[:, None])
        self.inverse = np.linalg.inv(root)
        part = np.einsum("bij,bj->bi", self.inverse, right)
        self.beta = self.prior * np.einsum("bji,bj->bi", self.inverse, part)
        rest = np.maximum(self.gram[:, -1, -1] - (part**2).sum(1), 0)
        self.variance = (rest + FLOOR) / np.maximum(self.count, 1)
        determinant = np.log(np.diagonal(root, axis1=1, axis2=2)).sum(1)
        return self.jacobian - (self.log + self.count * np.log(self.variance)) / 2 - determinant

    def forecast(self, at: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Forecast the series of each pair by its model, at times ``at`` (B, K) after its last value.

        The times are in units of the gap. Return means and standard deviations, (B, K) each.
        """
        a, variance = advance(self.level[..., None], at, self.p[:, None])
        x = design(at, self.seasons, self.span, self.is_evolving)
        along = a[..., None] * self.m[:, None]
        x -= along[..., :-1]
        mean = np.einsum("bkp,bp->bk", x, self.beta) + along[..., -1]
        known = np.einsum("bij,bkj->bki", self.inverse, x * self.prior[:, None])
        doubt = (1 / (1 + self.level[1]) + self.count * self.variance) / (1 + self.count)  # adds one virtual value
        std = np.sqrt(doubt[:, None] * (1 + variance + (known**2).sum(-1))) * self.scale
        mean = mean * self.scale + self.shift
        value = np.where(self.is_log, np.exp(np.minimum(mean, 300.0)) + self.zero, mean)
        std = np.where(self.is_log, np.exp(np.minimum(mean, 300.0)) * np.minimum(std, 10.0), std)
        margin = np.maximum(self.high - self.low, 1e-9)
        value = np.clip(value, self.low - margin, self.high + margin)
        return value, np.clip(std, 1e-6 * self.usual, 10 * np.maximum(margin, self.usual))


def clock(times: NDArray[Any], usual: float) -> tuple[NDArray[Any], float, bool]:
    """Convert the times of one series to multiples of its gap, counted from its last time.

    ``usual`` is the typical gap of all series. Times are regular if they are near multiples of a gap, such as calendar
    months. Regular times are rounded to multiples.

    Returns:
        The converted times, the gap, and whether the times are regular.
    """
    count = np.round(np.diff(times) / usual)
    is_regular = len(times) > 1 and bool((count > 0).all() and count.sum() < 1.5 * len(times))
    gap = float((times[-1] - times[0]) / count.sum()) if is_regular else usual
    u = (times - times[-1]) / gap
    is_regular = is_regular and bool(abs(u - np.round(u)).max() < SNAP)
    return (np.round(u) if is_regular else u), gap, is_regular


def observed(series: Series, channel: int, usual: float) -> tuple[NDArray[Any], ...]:
    """Return the most recent values of a channel and their times. Series are padded at the start, not at the end.

    Returns:
        Six arrays. Times, values and a mask that is False on padding are (batch, T) each. The gap that is the unit of
        the times, whether the times are regular, and the time of the last value are (batch,) each.
    """
    mask = series.mask[..., channel].numpy()
    width = int(mask.sum(1).clip(1, MEMORY).max())
    u, y, known = np.zeros((len(mask), width)), np.zeros((len(mask), width)), np.zeros((len(mask), width), dtype=bool)
    gap, is_regular, last = np.full(len(mask), usual), np.zeros(len(mask), dtype=bool), np.zeros(len(mask))
    for row, here in enumerate(mask):
        index = np.flatnonzero(here)[-width:]
        if len(index):
            times = series.t[row].double().numpy()[index]
            u[row, -len(index) :], gap[row], is_regular[row] = clock(times, usual)
            u[row, : -len(index)], last[row] = u[row, -len(index)], times[-1]
            y[row, -len(index) :] = series.x[row, :, channel].double().numpy()[index]
            known[row, -len(index) :] = True
    return u, y, known, gap, is_regular, last


def usual_gap(series: Series, channel: int) -> float:
    """Return the typical time between values of a channel: the mean gap if most gaps are nearly equal, else the median.

    The gaps between calendar months, for example, are nearly equal.
    """
    each = [t[here].diff() for t, here in zip(series.t.double(), series.mask[..., channel], strict=True)]
    gaps = torch.cat(each)
    gaps = gaps[gaps > 0]
    if not len(gaps):
        return 1.0
    near = gaps[(gaps / gaps.median() - 1).abs() < SNAP]
    return float(near.mean() if len(near) > len(gaps) / 2 else gaps.median())


def later(past: Series, dt: Tensor, gap: NDArray[Any], is_regular: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
    """Return the time from the last value of a channel to each forecast, in units of the gap, (n, K).

    ``dt`` (n, K) are times after the last sample. ``gap``, ``is_regular`` and ``last`` are results of :func:`observed`.
    """
    at = (past.t.amax(1, keepdim=True) + dt).double().nan_to_num().numpy()
    u = np.maximum(at - last[:, None], 0) / gap[:, None]
    return np.where(is_regular[:, None] & (abs(u - np.round(u)) < SNAP), np.round(u), u)


def filtered(level: NDArray[Any], u: NDArray[Any], known: NDArray[Any], columns: NDArray[Any]) -> tuple[Any, ...]:
    """Run the Kalman filter of "level plus white noise of variance 1" over each of several sequences.

    There are B models of the level. The filter of model b is applied to all C sequences of times u[b].

    Arguments:
        level: decay time and noise variance of each level, as in :class:`Candidate`, (2, B).
        u: times, (B, T).
        known: True for values, False for padding, (B, T).
        columns: the sequences, (B, T, C).

    Returns:
        A tuple of four arrays:

        - the one-step prediction errors divided by their standard deviations, (B, T, C);
        - the log determinant of the covariance matrix of a sequence, (B,);
        - the mean of the level at the last time, (B, C), and its variance, (B,).
    """
    steps = np.diff(u, axis=1, prepend=u[:, :1])
    out, log, m = np.zeros(columns.shape), np.zeros(len(u)), np.zeros(columns[:, 0].shape)
    p = np.where(np.isinf(level[0]), 0.0, level[1])
    for k in range(u.shape[1]):
        a, p = advance(level, steps[:, k], p)
        m, here = a[:, None] * m, known[:, k]
        error = (columns[:, k] - m) * here[:, None]
        out[:, k] = error / np.sqrt(p + 1)[:, None]
        log += np.log(p + 1) * here
        gain = p / (p + 1) * here
        m, p = m + gain[:, None] * error, p * (1 - gain)
    return out, log, m, p


def advance(level: NDArray[Any], step: Any, p: Any) -> tuple[Any, Any]:
    """Advance the level of a series, a random process, by a time step. Return its decay factor and its new variance.

    ``level`` holds the decay time and the noise variance; ``p`` is the variance of the level before the step.
    """
    decay, noise = level
    a = np.exp(-step / decay)
    return a, a * a * p + np.where(np.isinf(decay), noise * step, noise * (1 - a * a))


def design(u: NDArray[Any], seasons: list[float], span: NDArray[Any], is_evolving: bool) -> NDArray[Any]:
    """Return the design matrix of the regression at times u (...), (..., coefficients); the last value is at u = 0.

    Its columns are a constant, a damped line and Fourier terms. The line is linear for u < 0 and flattens for u > 0.
    With ``is_evolving`` the coefficients of the slow Fourier terms change with time. Each is a Brownian motion that
    starts at u = 0 and runs backwards in time, approximated by the first terms of its Karhunen-Loeve series. The terms
    are further columns, which are 0 for u > 0.
    """
    frequency, rank = harmonics(seasons)
    line = np.where(u > 0, -span / 2 * np.expm1(-np.maximum(u, 0) / (span / 2)), u) / span
    terms = fourier(u, frequency)
    parts = [np.ones((*u.shape, 1)), line[..., None], terms]
    if is_evolving:
        slow = terms[..., np.tile(rank <= EVOLVING, 2)]
        share = np.clip(-u / span, 0, 1)[..., None]
        parts += [slow * math.sqrt(2) * np.sin(k * math.pi * share) / (k * math.pi) for k in np.arange(TERMS) + 0.5]
    return np.concatenate(parts, -1)


def harmonics(seasons: list[float]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two arrays: the frequencies j / period of the harmonics j = 1, 2, ... of all seasons, and the numbers j.

    A frequency that several seasons share occurs once.
    """
    found: dict[float, int] = {}
    for period in seasons:
        for j in range(1, 1 + min(HARMONICS, int(period / 2 + 1e-6))):
            found.setdefault(round(j / period, 7), j)
    return np.array(list(found)), np.array(list(found.values()))


def prior_deviations(kind: Candidate, seasons: list[float], is_evolving: bool) -> NDArray[Any]:
    """Return the prior standard deviation of each regression coefficient of a model, (coefficients,).

    It is divided by the standard deviation of the noise. The coefficients belong to the columns of :func:`design`.
    """
    rank = np.tile(harmonics(seasons)[1], 2)
    terms, flat = kind.season / np.maximum(rank, 1) ** 2, np.array([FLAT, FLAT * (kind.trend == "line")])
    slow = [kind.change * terms[rank <= EVOLVING]] * TERMS if is_evolving else []
    return np.sqrt((1 + kind.noise) * np.concatenate([flat, terms, *slow]))


def fourier(u: NDArray[Any], frequency: NDArray[Any]) -> NDArray[Any]:
    """Return sines of all frequencies at times u (...), followed by the cosines, (..., 2 * frequencies)."""
    angle = 2 * math.pi * u[..., None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], -1)


def gaps_and_seasons(series: Series) -> tuple[list[float], list[list[float]]]:
    """Return two lists: the typical gap of each channel, and the periods of its seasons in units of this gap."""
    gaps = [usual_gap(series, channel) for channel in range(series.x.shape[2])]
    return gaps, [seasons_of(series, channel, gap) for channel, gap in enumerate(gaps)]


def seasons_of(series: Series, channel: int, gap: float) -> list[float]:
    """Return a list of the periods of a channel's seasons in units of ``gap``, estimated from the longest series."""
    u, y, known, _, is_regular, _ = observed(series, channel, gap)
    rows = [row for row in np.argsort(-known.sum(1), kind="stable")[:8] if known[row].sum() >= LEAST]
    calendar = [each / series.unit / gap for each in CALENDAR] if series.unit else []
    parts = [(u[row][known[row]], y[row][known[row]]) for row in rows]
    return periods(parts, bool(is_regular[rows].all()), calendar)


def periods(parts: list[tuple[NDArray[Any], NDArray[Any]]], is_regular: bool, calendar: list[float]) -> list[float]:
    """Return the periods of at most two seasons that all series share, in the unit of the times.

    The model is a sum of Fourier terms for each season, a line, and an Ornstein-Uhlenbeck process (which lies between
    white noise and a random walk). Candidates are the periods of the highest spectral peaks, their doubles and triples,
    and calendar periods. The candidate with the largest penalised likelihood (Bayesian information criterion) is added
    if it clearly increases this likelihood. A calendar period is preferred unless another one is clearly more likely.

    For regular times the shortest possible calendar period is always added, such as 12 months; models can set the size
    of this season to 0. The second period must not be shorter than an added calendar period. It must not be a multiple
    of it either, unless it is a calendar period itself.

    Arguments:
        parts: a pair (times, values) for each series.
        is_regular: whether the times of all series are regular.
        calendar: the calendar periods (day, week, year) in the unit of the times.
    """
    parts = [(u[-SPECTRUM:], y[-SPECTRUM:]) for u, y in parts]
    if not parts:
        return []
    u, y = max(parts, key=lambda part: part[0][-1] - part[0][0])
    span = float(u[-1] - u[0])
    frequency = np.linspace(1.9 / span, 0.5, int(np.clip(2 * span, 8, 2 * SPECTRUM)))
    calendar = [float(round(p)) if is_regular and abs(p - round(p)) < 0.03 else float(p) for p in calendar]
    found = [p for p in calendar if is_regular and 2 <= p <= span / 2][:1]

    def best(period: float) -> float:
        return max(likelihood(parts, found, period, decay) for decay in DECAYS)

    while len(found) < 2:
        none = [likelihood(parts, found, None, decay) for decay in DECAYS]
        decays = {DECAYS[int(np.argmax(none))], DECAYS[0]}
        likely = [k / f for decay in decays for f in peaks(u, y, found, decay, frequency) for k in (1, 2, 3)]
        preferred = {*calendar, *(float(round(p)) for p in likely if is_regular)}
        shorter = {p for p in (*likely, *preferred) if 2 <= p <= span / (2 if p in calendar else 3)}
        candidates = sorted(p for p in shorter if all(is_apart(p, one, calendar) for one in found))
        scores = [best(p) + SURE * (p in preferred) for p in candidates]
        if not candidates or max(scores) < max(none) + SURE + math.log(len(frequency)):
            break
        period, top = candidates[int(np.argmax(scores))], max(scores)
        fine = np.maximum(period / (1 + period / span * np.linspace(-0.5, 0.5, 21)), 2.0)
        refined = [best(float(p)) for p in fine]
        is_better = max(refined) > top + SURE * (period in preferred)
        found.append(float(fine[int(np.argmax(refined))]) if is_better else period)
    return found


def is_apart(period: float, other: float, calendar: list[float]) -> bool:
    ratio = period / other if other in calendar else max(period, other) / min(period, other)
    return ratio > APART and (abs(ratio - round(ratio)) > 0.1 or period in calendar)


def season_terms(u: NDArray[Any], period: float) -> NDArray[Any]:
    """Return the sine and the cosine of each harmonic of a season at times u (T,), in turn, (T, 2 * harmonics)."""
    count = min(int(period / 2 + 1e-6), 16, max(1, len(u) // 6))
    return np.stack(np.split(fourier(u, np.arange(1, count + 1) / period), 2, 1), -1).reshape(len(u), -1)


def line_and_seasons(u: NDArray[Any], found: list[float]) -> NDArray[Any]:
    return np.concatenate([np.ones((len(u), 1)), u[:, None], *(season_terms(u, period) for period in found)], 1)


def likelihood(
    parts: list[tuple[NDArray[Any], NDArray[Any]]], found: list[float], period: float | None, decay: float
) -> float:
    """Return the penalised log likelihood of a model with the seasons ``found`` and one more season.

    The number of Fourier terms of the new season is chosen to maximise the result. ``period`` is the period of the new
    season; None adds no season. ``decay`` is the decay time of the residuals. ``parts`` is a list of
    pairs (times, values), one for each series.
    """
    total = np.zeros(1)
    for u, y in parts:
        x, z = line_and_seasons(u, found), whitened(y[:, None], u, decay)[:, 0]
        fixed, x = x.shape[1], x if period is None else np.append(x, season_terms(u, period), 1)
        q, r = np.linalg.qr(whitened(x, u, decay))
        size = abs(np.diag(r))
        fitted = np.cumsum((q.T @ z) ** 2 * (size > 1e-7 * size.max()))[fixed - 1 :: 2]
        n, free = len(z), 2 * np.arange(len(fitted))
        each = -(n * np.log(np.maximum(z @ z - fitted, 0) / n + 1e-9) + free * math.log(n)) / 2
        each -= np.log(-np.expm1(-2 * np.diff(u) / decay)).sum() / 2
        total = total + each if len(total) == 1 else total[: len(each)] + each[: len(total)]
    return float(total[0] if period is None else total[1:].max(initial=-math.inf))


def peaks(u: NDArray[Any], y: NDArray[Any], found: list[float], decay: float, frequency: NDArray[Any]) -> NDArray[Any]:
    """Return the frequencies of the five highest spectral peaks of a series after its known seasons are removed.

    ``y`` are the values at times ``u``, (T,) each; ``found`` are the periods of known seasons; ``decay`` is the decay
    time of the residuals; ``frequency`` holds the frequencies of the spectrum.
    """
    x, z = whitened(line_and_seasons(u, found), u, decay), whitened(y[:, None], u, decay)
    rest = z - x @ np.linalg.lstsq(x, z, rcond=1e-8)[0]
    power = lombscargle(u[1:], rest[:, 0], 2 * math.pi * frequency)
    places = find_peaks(np.pad(power, 1))[0] - 1
    return frequency[places[np.argsort(-power[places], kind="stable")[:5]]]


def whitened(columns: NDArray[Any], u: NDArray[Any], decay: float) -> NDArray[Any]:
    """Whiten columns (T, columns) at times u, modelled as Ornstein-Uhlenbeck processes with the decay time ``decay``.

    Return the errors of one-step predictions divided by their standard deviations, (T - 1, columns).
    """
    rho = np.exp(-np.diff(u) / decay)[:, None]
    innovation: NDArray[Any] = (columns[1:] - rho * columns[:-1]) / np.sqrt(-np.expm1(-2 * np.diff(u) / decay))[:, None]
    return innovation


class StatsForecast:
    """A model that forecasts the median of several models of statsforecast, which are fitted to each series separately.

    Without a season the models are AutoETS and AutoTheta. With one season of at most 24 samples MSTL is added. With a
    longer season, or two seasons, only MSTL is used. The models use the last :data:`RECENT` samples, and gaps are
    filled by linear interpolation. A series that is constant or has fewer than :data:`LEAST` values is forecast by its
    last value. In a backtest with several histories of one series, models are fitted to a history and reused for
    histories of up to twice its length.

    Arguments:
        mean, std: the mean and the standard deviation of each channel in the user's units.
    """

    def __init__(self, mean: NDArray[Any], std: NDArray[Any]) -> None:
        self.mean, self.std = mean, std

    @staticmethod
    def admits(series: Series) -> bool:
        """Return whether statsforecast is installed, and the series are regular, long enough and not too many."""
        if importlib.util.find_spec("statsforecast") is None or int(series.lengths.sum()) * series.x.shape[2] > MOST:
            return False
        found = [observed(series, c, usual_gap(series, c)) for c in range(series.x.shape[2])]
        return all(
            (is_regular | (known.sum(1) < 2)).all() and (known.sum(1) >= LEAST).any()
            for _, _, known, _, is_regular, _ in found
        )

    def fit(self, series: Series, backtest: Any, seed: int) -> Self:
        statsforecast_models()
        self.gaps, found = gaps_and_seasons(series)
        self.seasons = [sorted({max(2, round(period)) for period in each}) for each in found]
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        std = torch.ones(*dt.shape, len(self.seasons), dtype=torch.float64)
        mean, ids = torch.zeros_like(std), past.ids or range(len(past))
        for channel, seasons in enumerate(self.seasons):
            u, y, known, gap, is_regular, last = observed(past, channel, self.gaps[channel])
            at, fitted = later(past, dt, gap, is_regular, last), dict[Any, tuple[int, list[Any]]]()
            for row in np.argsort(known.sum(1), kind="stable"):
                times, values = u[row][known[row]][-RECENT:], y[row][known[row]][-RECENT:]
                if not len(values):
                    continue
                whole = np.interp(np.arange(math.ceil(times[0]), 1), times, values)
                whole = whole * self.std[channel] + self.mean[channel]
                path, width = np.repeat(whole[-1], 2), np.full(2, 1e-6)
                if len(whole) >= LEAST and np.ptp(whole) > 0:
                    count, models = fitted.get(ids[row], (0, []))
                    if 2 * count < len(whole):
                        models = [model.fit(whole) for model in statsforecast_models_for(seasons, len(whole))]
                        fitted[ids[row]] = len(whole), models
                    steps = max(1, math.ceil(at[row].max()))
                    found = [model.forward(whole, steps, level=[SIGMA]) for model in models]
                    path = np.append(whole[-1], np.median([each["mean"] for each in found], 0))
                    width = np.append(0, np.median([each[f"hi-{SIGMA}"] - each["mean"] for each in found], 0))
                path, width = (path - self.mean[channel]) / self.std[channel], width / self.std[channel]
                mean[row, :, channel] = torch.from_numpy(np.interp(at[row], np.arange(len(path)), path))
                std[row, :, channel] = torch.from_numpy(np.interp(at[row], np.arange(len(path)), width).clip(1e-6))
        return mean, std


def statsforecast_models_for(seasons: list[int], count: int) -> list[Any]:
    """Return a list of unfitted models of statsforecast for a series.

    The series has ``count`` samples, and ``seasons`` are the periods of its seasons in samples.
    """
    models = statsforecast_models()
    seasons = [season for season in seasons if 2 * season <= count]
    if len(seasons) > 1 or max(seasons, default=1) > 24:
        return [models.MSTL(seasons)]
    return [models.AutoETS(*seasons), models.AutoTheta(*seasons), *(models.MSTL(season) for season in seasons)]


def statsforecast_models() -> Any:
    try:
        import statsforecast.models
    except ImportError as error:
        raise ImportError(f"model='statsforecast': {error}. Fix: pip install statsforecast") from error
    return statsforecast.models


class Mixture:
    """A model whose forecast distribution is a mixture of those of several models, with equal weights."""

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = list(models)

    def fit(self, series: Series, backtest: Any, seed: int) -> Self:
        for model in self.models:
            model.fit(series, backtest, seed)
        return self

    def forecast(self, past: Series, dt: Tensor) -> tuple[Tensor, Tensor]:
        return mixture([model.forecast(past, dt) for model in self.models])


def mixture(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of a mixture of distributions with equal weights.

    ``found`` is a list with a pair for each distribution: its mean and its standard deviation.
    """
    means, stds = (torch.stack(each) for each in zip(*found, strict=True))
    return means.mean(0), (stds.square().mean(0) + means.var(0, correction=0)).sqrt()


def lagged(past: Series, dt: Tensor, channel: int, gap: float, seasons: list[float]) -> Tensor:
    """Return earlier values of a channel minus its last value, (n, K, inputs), interpolated linearly in time.

    The first 8 inputs are the values 1, 2, ..., 8 typical gaps before the end of the history. Each season adds three
    inputs: the value one period before the end, the last value that has the same phase as the forecast, and the mean of
    the last four such values. There are K forecasts for each of n histories, ``dt`` (n, K) after the end.
    """
    found = np.full((*dt.shape, LAGS + 3 * len(seasons)), np.nan)
    ahead, t, x = (each.double().numpy() for each in (dt, past.t, past.x[..., channel]))
    for row, here in enumerate(past.mask[..., channel].numpy()):
        if here.any():
            times, values, end = t[row][here], x[row][here], t[row].max()
            before = partial(np.interp, xp=times, fp=values - values[-1], left=np.nan)
            found[row, :, :LAGS] = before(end - gap * np.arange(1, LAGS + 1))
            for k, period in enumerate(seasons):
                at = end + ahead[row]
                phase = at - period * np.ceil(np.maximum((at - times[-1]) / period, 1e-9))
                cycles = torch.from_numpy(before(phase - period * np.arange(CYCLES)[:, None]))
                found[row, :, LAGS + 3 * k] = before(end - period)
                found[row, :, LAGS + 3 * k + 1] = cycles[0]
                found[row, :, LAGS + 3 * k + 2] = cycles.nanmean(0)
    return torch.from_numpy(found)
