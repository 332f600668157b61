r"""Features of irregular series for scikit-learn: statistics of oscillators, and MiniRocket on a regular grid.

Both transformers accept all data that :func:`hbnode.data.as_series` converts. They return an array with one row for
each series and one column for each feature.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from typing_extensions import Self, override

from hbnode._checks import as_count, as_numbers, check_choice, level_of_user, warn_if_swapped
from hbnode.data import Series, aligned, check_zone, has_zone, is_list_of_series, is_table, observed, on_clock

try:
    from joblib import Parallel, delayed, effective_n_jobs
    from sklearn.base import BaseEstimator, TransformerMixin, clone
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError(
        f"hbnode.features needs further packages: {error}. Fix: pip install joblib pandas scikit-learn skops tqdm."
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["OscillatorFeatures", "RocketFeatures"]

Array: TypeAlias = "NDArray[Any]"

STATES = ("displacement", "velocity", "acceleration")
SHARES = 9  # number of thresholds for each state of an oscillator
POOLED = (*(f"share{i}" for i in range(SHARES)), "log_maximum", "mean", "spread", "time_of_maximum")
SUMMARIES = ("mean", "spread", "minimum", "maximum", "first", "last", "log_count")
_CHUNK = 262_144  # maximum number of displacements (or velocities, or accelerations) in a chunk of series
_WINDOW = 4096  # number of times whose states are in memory; the same for all batches, so that rounding is the same
_PARTS = 64  # maximum number of parts into which a gap between samples is divided
_SAMPLES = 4096  # number of states from which thresholds are computed; maximum number of samples used of a series
_VALUES = 16_777_216  # maximum number of values on the grid in memory when MiniRocket chooses its thresholds
_DIGITS = 9  # decimals to which scaled states are rounded; smaller differences are rounding errors
_FLOOR = 1e-6  # states of standardised series with a smaller standard deviation count as constant
_FAR = 10  # a series whose duration and mean gap exceed the medians by this factor has a wrong time
_MARGIN = 0.1  # share by which the range of times is widened; largest share of samples outside without a warning
_MULTIPLE = 20  # longer gaps, in steps, are ignored in the test whether gaps are multiples of a step
_LONGEST = 2048  # maximum number of points of a grid that is chosen automatically
_SHORTEST = 9  # number of points that a kernel of MiniRocket needs


class _Block(NamedTuple):
    """A chunk of series of similar length, with standardised values.

    Attributes:
        x: values (n, T, channels); NaN for missing values and on padding.
        t: times (n, T) since the first sample. Padding repeats the time of the last sample.
        start: time of the first sample, (n,).
        lengths: number of samples, (n,).
    """

    x: Array
    t: Array
    start: Array
    lengths: Array

    @property
    def weights(self) -> Array:
        """The weight of each sample in a time average, (n, T); 0 on padding. The weights of a series sum to 1.

        The weight is the share of the duration during which the sample is the nearest one.
        """
        gaps = np.diff(self.t, axis=1, prepend=self.t[:, :1], append=self.t[:, -1:])
        time = gaps[:, :-1] + gaps[:, 1:]
        valid = np.arange(self.t.shape[1]) < self.lengths[:, None]
        time = np.where(self.t[:, -1:] > 0, time, valid)
        return time / np.maximum(_ordered_sum(time)[:, None], 1e-300)

    def refined(self, step: float) -> _Block:
        """Return the block with equally spaced points added between the samples, about ``step`` apart.

        Values at the new points and missing values are interpolated linearly.
        """
        x = np.take_along_axis(self.x, np.minimum(np.arange(self.t.shape[1]), self.lengths[:, None] - 1)[..., None], 1)
        if np.isnan(x).any():  # missing values only: two samples at the same time are a jump
            x = np.where(np.isnan(x), _interpolated(self, self.t, "linear"), x)
        gaps = np.diff(self.t, axis=1)
        parts = _parts_of_gaps(gaps, self.lengths, step)
        counts = parts.sum(1)
        row, sample = np.nonzero(parts)
        of_gap = parts[row, sample]
        row, sample = np.repeat(row, of_gap), np.repeat(sample, of_gap)
        share = _joined_ranges(of_gap) / np.repeat(of_gap, of_gap)
        at = row, _joined_ranges(counts)
        longest = counts.max(initial=0) + 1
        t = np.repeat(self.t[:, -1:], longest, 1)
        values = np.repeat(x[:, -1:], longest, 1)
        t[at] = self.t[row, sample] + share * gaps[row, sample]
        values[at] = x[row, sample] + share[:, None] * (x[row, sample + 1] - x[row, sample])
        return _Block(values, t, self.start, counts + 1)


class _Transformer(TransformerMixin, BaseEstimator):
    """The base class of the transformers: it converts data to series, and computes features in chunks of series."""

    random_state: Any
    n_jobs: int | None
    _is_relative = True  # whether features depend on times since the first sample only

    def _series(self, data: Any, is_new: bool = False) -> Series:
        """Convert data to series with the channels, the unit and the origin of the training series.

        With ``is_new``, data are the training series, whose channels, means, scales, unit and origin are stored.
        """
        if is_table(data):
            fix = "hbnode.data.from_long(table, id=..., time=...); table.to_numpy() for one series in each row"
            raise TypeError(f"X must be series, got a table, {type(data).__name__}, without column names. Fix: {fix}.")
        data = checked(data)
        series = observed(data)
        channels = series.x.shape[2]
        if not len(series):
            raise ValueError("X must have at least one series, got none. Fix: leave the call out.")
        if is_new:
            self.clock_, self.has_zone_ = (series.unit, series.origin), has_zone(data)
            mean, spread = moments(series.x)
            self.mean_, self.scale_ = np.nan_to_num(mean), np.where(spread > 0, spread, np.inf)
            self.n_features_in_, self._width = channels, data.shape[1] if getattr(data, "ndim", 0) == 2 else None
            self.channels_ = _unique(series.features, channels, "x")
            self.static_channels_ = list(map(str, series.static_features))
            if series.static is not None:
                self.static_mean_ = np.nan_to_num(moments(series.static)[0])
        if not self._is_relative:
            check_zone(has_zone(data), self.has_zone_)
        return on_clock(aligned(series, self.channels_, self.static_channels_), self.clock_)

    def _block(self, series: Series, rows: Array) -> _Block:
        """Return the series with the indices ``rows`` as a block: standardised values at times since the start."""
        part = series.select(torch.from_numpy(rows))
        x, start = (part.x.double().numpy() - self.mean_) / self.scale_, part.t[:, :1]
        return _Block(x, (part.t - start).numpy(), start[:, 0].numpy(), part.lengths.numpy())

    def _rows(
        self, compute: Callable[[Any], Array], prepare: Callable[[Array], Any], series: Series, cost: Array
    ) -> Array:
        """Compute the features of all series in chunks, and append their static features. Return (batch, features).

        The features of the series with the indices ``rows`` are ``compute(prepare(rows))``. This is evaluated for
        chunks of series of similar cost; joblib runs ``compute`` in parallel jobs. ``cost`` (batch,) is the number of
        values that each series needs in memory.
        """
        if self.n_jobs is not None and not isinstance(self.n_jobs, numbers.Integral):
            raise TypeError(f"n_jobs must be a whole number or None, got {self.n_jobs!r}. Fix: n_jobs=1.")
        order, chunks = np.argsort(cost, kind="stable"), []
        most = -(-len(order) // effective_n_jobs(self.n_jobs))
        while len(order):
            count = max(1, min(most, _CHUNK // max(1, int(cost[order[-1]]))))
            chunks.append(order[-count:])
            order = order[:-count]
        found = Parallel(n_jobs=self.n_jobs)(delayed(compute)(prepare(rows)) for rows in chunks)
        result = np.empty((len(series), found[0].shape[1]))
        for rows, part in zip(chunks, found, strict=True):
            result[rows] = part
        return self._with_static(result, series)

    def _with_static(self, found: Array, series: Series) -> Array:
        """Append the static features of the series to the features ``found`` (batch, features).

        A missing static feature is replaced by its training mean.
        """
        if series.static is None:
            return found
        static = series.static.double().numpy()
        return np.concatenate([found, np.where(np.isnan(static), self.static_mean_, static)], 1)

    @override
    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.three_d_array = True
        return tags


def checked(data: Any) -> Any:
    """Validate an array with scikit-learn, which allows NaN, and return it as float64. Return other data unchanged."""
    if isinstance(data, Series) or is_table(data) or is_list_of_series(data):
        return data
    try:
        array = data.detach().cpu().numpy() if isinstance(data, torch.Tensor) else data
        return check_array(array, dtype=np.float64, allow_nd=True, ensure_all_finite="allow-nan", input_name="X")
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        fix = "an array (batch, T) or (batch, channels, T), or a list of pairs (t, x)"
        raise kind(f"X must be series: {error} Fix: {fix}.") from None


def moments(x: torch.Tensor) -> tuple[Array, Array]:
    """Return the means and standard deviations of the columns of x (..., columns), (columns,) each. NaN is ignored.

    The standard deviation of a column that is constant up to rounding is 0.
    """
    x = x.double().flatten(0, -2)
    mean = x.nanmean(0)
    spread = (x - mean).square().nanmean(0).sqrt()
    return mean.numpy(), torch.where(spread > 1e-12 * mean.abs(), spread, 0.0).numpy()


def _joined_ranges(counts: Array) -> Array:
    """Concatenate the ranges 0, ..., c - 1 of all counts c: [2, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def _ordered_sum(values: Array) -> Array:
    """Return the sum over axis 1, with the terms added in order from first to last.

    Padding with zeros then does not change the result. With numpy.sum it would change the order of the additions, and
    so the rounding errors.
    """
    return np.cumsum(values, 1)[:, -1]


def _parts_of_gaps(gaps: Array, lengths: Array, step: float) -> Array:
    """Return the number of parts of length about ``step`` into which each gap between samples is divided, (n, T - 1).

    It is at least 1 and at most 64. On padding it is 0.
    """
    parts = np.clip(np.rint(gaps / step), 1, _PARTS).astype(np.int64)
    return np.where(np.arange(1, gaps.shape[1] + 1) < lengths[:, None], parts, 0)


def _name(series: Series, row: int) -> str:
    return f"series {row}" + (f" (id {series.ids[row]!r})" if len(series.ids) else "")


def _unique(names: Any, count: int, default: str, others: Any = ()) -> list[str]:
    """Return a list of ``count`` different names: the given names as strings, or default names such as "x0", "x1".

    Default names (``default`` and a number) are used if there are not ``count`` names, if two of them are equal, or if
    one is in ``others``, the names that are already in use.
    """
    found = list(map(str, names))
    return found if len({*found} - {*others}) == count else [f"{default}{i}" for i in range(count)]


# Oscillators


class _Bank(NamedTuple):
    """P fitted oscillators, and the scales and thresholds of their states.

    Each oscillator has three states: displacement, velocity and acceleration.

    Attributes:
        frequency: ω / 2π, (P,).
        damping_ratio: ζ, (P,).
        weights: weights of the channels in the force on each oscillator, (channels, P).
        step: time between the points at which states are computed.
        span: the longest duration of a training series.
        scales: standard deviation of each state, (3 P,).
        thresholds: thresholds of each state in units of ``scales``, (thresholds, 3 P).
    """

    frequency: Array
    damping_ratio: Array
    weights: Array
    step: float
    span: float
    scales: Array
    thresholds: Array

    def states(self, block: _Block) -> Iterator[tuple[slice, Array]]:
        """Yield pairs for successive windows of time: the slice of time indices, and the scaled states (times, n, 3 P).

        ``block`` is a result of :meth:`_Block.refined`.
        """
        start = None
        for first in range(0, block.t.shape[1], _WINDOW):
            last = max(first - 1, 0)  # the last index of the previous window
            part = slice(last, first + _WINDOW)
            force = np.einsum("ntc,cp->ntp", block.x[:, part], self.weights)
            found = oscillator_states(block.t[:, part], force, self.frequency, self.damping_ratio, start)
            start = found[0][-1], found[1][-1]
            y = np.concatenate(found, 2)[first - last :]
            y /= self.scales
            yield slice(first, first + _WINDOW), np.round(y, _DIGITS, out=y)

    def features(self, samples: _Block) -> Array:
        """Return the features of n series: statistics of each oscillator's states, and summaries of each channel.

        The shape is (n, features).
        """
        block = samples.refined(self.step)
        weights, shape = block.weights.T, (len(block.t), len(STATES), len(self.frequency))
        shares: Array = np.zeros((SHARES, len(block.t), len(self.scales)))
        first = mean = square = time = np.zeros_like(shares[0])
        lowest, highest = first + np.inf, first - np.inf
        for part, y in self.states(block):
            weight = weights[part]
            for share, threshold in zip(shares, self.thresholds, strict=True):
                share += np.einsum("tnp,tn->np", y > threshold, weight)
            at, most = np.take_along_axis(block.t[:, part], y.argmax(0), 1), y.max(0)
            time, highest, lowest = (
                np.where(most > highest, at, time), np.maximum(most, highest), np.minimum(y.min(0), lowest)
            )  # fmt: skip
            first = first if part.start else y[0].copy()
            y -= first  # exactly 0 for a constant
            mean = mean + np.einsum("tnp,tn->np", y, weight)
            square = square + np.einsum("tnp,tnp,tn->np", y, y, weight)
        spread = np.sqrt(np.maximum(square - np.square(mean), 0))
        largest = np.log(np.maximum(highest, -lowest) + 1e-3)
        pooled = np.stack([*shares, largest, first + mean, spread, time / self.span]).reshape(len(POOLED), *shape)
        pooled = pooled.transpose(1, 2, 0, 3).reshape(len(block.t), -1)
        return np.concatenate([pooled, *_summaries(samples)], 1)


def oscillator_states(
    t: Array, force: Array, frequency: Array, damping_ratio: Array, start: tuple[Array, Array] | None = None
) -> tuple[Array, Array, Array]:
    r"""Return the states of P oscillators, each driven by a force that is linear in time between the samples.

    Each oscillator follows x'' + 2ζω x' + ω² x = ω² u(t) and starts with velocity 0. Oscillators 0, 2, 4, ... start at
    x = 0. Oscillators 1, 3, 5, ... start at x = u, the equilibrium under the first force. The state is one complex
    number z with z' = λ z + ω u and λ = ω(-ζ + i√(1 - ζ²)). Then x is Im z / √(1 - ζ²), and x'/ω is Re z - ζx. Over a
    gap Δ, with y = λΔ, φ₁(y) = (e^y - 1)/y and φ₂(y) = (φ₁(y) - 1)/y,

    .. math:: z_i = e^y z_{i-1} + \omega\Delta\,((\varphi_1(y) - \varphi_2(y))\,u_{i-1} + \varphi_2(y)\,u_i).

    Arguments:
        t: times (n, T), not decreasing.
        force: u at these times, (n, T, P).
        frequency: ω / 2π, (P,).
        damping_ratio: ζ, (P,), 0 < ζ < 1.
        start: x and x'/ω at the first time, (n, P) each. None takes the initial states above. Default: ``None``

    Returns:
        x, x'/ω and x''/ω² at the times, (T, n, P) each.
    """
    omega = 2 * np.pi * frequency
    ring = np.sqrt(1 - np.square(damping_ratio))
    digits, power = np.frexp(np.diff(t, axis=1))
    gaps, index = np.unique(np.ldexp(np.round(digits, 12), power), return_inverse=True)  # equal up to rounding of t
    index = index.reshape(len(t), -1)
    step = gaps[:, None] * omega
    y = step * (-damping_ratio + 1j * ring)
    decay, phi1, phi2 = _phi(y)
    before, after = step * (phi1 - phi2), step * phi2
    u = np.ascontiguousarray(force.swapaxes(0, 1))
    z = np.empty(u.shape, np.complex128)
    if start is None:
        start = u[0] * (np.arange(len(omega)) % 2), np.zeros_like(u[0])
    z[0] = start[1] + (damping_ratio + 1j * ring) * start[0]
    for i in range(1, len(z)):
        gap = index[:, i - 1]
        z[i] = decay[gap] * z[i - 1] + before[gap] * u[i - 1] + after[gap] * u[i]
    x = z.imag / ring
    velocity = z.real - damping_ratio * x
    return x, velocity, u - 2 * damping_ratio * velocity - x


def _phi(y: Array) -> tuple[Array, Array, Array]:
    """Return e^y, φ₁(y) = (e^y - 1)/y and φ₂(y) = (φ₁(y) - 1)/y, the factors of an exact step under a linear force."""
    is_small = np.abs(y) < 0.01
    some, few = np.where(is_small, 1.0, y), np.where(is_small, y, 0.0)
    lost = np.expm1(y)
    phi2 = np.where(is_small, 1 / 2 + few * (1 / 6 + few * (1 / 24 + few * (1 / 120 + few / 720))), 0.0)
    phi1 = np.where(is_small, 1 + few * phi2, lost / some)
    return lost + 1, phi1, np.where(is_small, phi2, (phi1 - 1) / some)


def _summaries(block: _Block) -> list[Array]:
    """Return a list with one array (n, channels) for each of the ``SUMMARIES``; 0 for channels without a value."""
    x, seen = np.nan_to_num(block.x), ~np.isnan(block.x)
    count = seen.sum(1)
    first, last = seen.argmax(1), seen.shape[1] - 1 - seen[:, ::-1].argmax(1)
    start, end = (np.take_along_axis(x, place[:, None], 1) for place in (first, last))
    change = (x - start) * seen  # exactly 0 for a constant
    shift = _ordered_sum(change) / np.maximum(count, 1)
    spread = np.sqrt(_ordered_sum(np.square(change - shift[:, None]) * seen) / np.maximum(count, 1))
    spread = np.where(spread > 10.0**-_DIGITS, spread, 0.0)
    lowest, highest = np.where(seen, x, np.inf).min(1), np.where(seen, x, -np.inf).max(1)
    found = [start[:, 0] + shift, spread, lowest, highest, start[:, 0], end[:, 0], np.log1p(count)]
    return [np.where(count > 0, each, 0.0) for each in found]


def _interpolated(block: _Block, at: Array, kind: str) -> Array:
    """Interpolate the series of a block at G times ``at``, (n, G) or (G,). Return values, (n, G, channels).

    Observed values are interpolated linearly. With ``kind="last"``, the last observed value is used. Before the first
    and after the last value, the result is constant. It is 0 for a channel without a value.
    """
    at = np.broadcast_to(at, (len(block.x), np.shape(at)[-1]))
    found = np.zeros((*at.shape, block.x.shape[2]))
    seen = ~np.isnan(block.x)
    for i, channel in np.argwhere(seen.any(1)):
        here = seen[i, :, channel]
        t, x = block.t[i, here], block.x[i, here, channel]
        if kind == "linear":
            found[i, :, channel] = np.interp(at[i], t, x)
        else:
            found[i, :, channel] = x[np.maximum(np.searchsorted(t, at[i], side="right") - 1, 0)]
    return found


class OscillatorFeatures(_Transformer):
    r"""A scikit-learn transformer that drives damped oscillators with each series and returns statistics of them.

    It has no trained parameters. Each channel is standardised. A random combination u of the channels drives each of P
    oscillators x'' + 2ζω x' + ω² x = ω² u(t); u is linear in time between observed values. The solution is exact for
    gaps of any length. Half of the oscillators start at x = 0, half at the equilibrium under the first force. The
    frequencies ω/2π are log-spaced; the damping ratios ζ are sampled log-uniformly. Displacement x, velocity x'/ω and
    acceleration x''/ω² are a low-pass, a band-pass and a high-pass filter of u.

    The features are statistics of each of these states y over the samples and over equally spaced points in the gaps.
    Each point is weighted by the length of time to which it is the nearest point. States are divided by their standard
    deviation and rounded to nine decimals, so that a constant series has a velocity of exactly 0:

    - ``share0``, ..., ``share8``: the share of the time in which y exceeds a quantile of the training series;
    - ``log_maximum``: the logarithm of the maximum of \|y\|;
    - ``mean`` and ``spread``: the mean and the standard deviation of y;
    - ``time_of_maximum``: the time of the maximum of y since the first sample, in units of the longest training series.

    They are followed by seven summaries of the observed values of each channel: mean, standard deviation, minimum,
    maximum, first and last value, and log(1 + count). The static features of a :class:`hbnode.data.Series` come last; a
    missing one is the training mean.

    Computing time is linear in the number of samples. Series are processed in chunks to limit memory. The features of a
    series do not depend on the other series, not even in the last bit. They do not depend on the units of values and
    time if the transformer is fitted in the same units. Standardise the features before a linear model.

    Arguments:
        num_oscillators: P. Default: ``64``.
        frequency: lowest and highest ω/2π, in cycles per unit of time. None takes 1 / (30 span) and 1 / (4 ``step_``),
            where span is the longest duration of a training series. Default: ``None``.
        damping_ratio: lowest and highest ζ, between 0 and 1. Default: ``(0.05, 0.9)``.
        random_state: seed of damping ratios, combinations and training samples, an int or a RandomState. None takes a
            new seed in each fit. Default: ``None``.
        n_jobs: number of parallel jobs of joblib; each job takes chunks of series. None is one job, or what
            ``joblib.parallel_config`` specifies, such as a Dask cluster. Default: ``None``.

    A series whose duration and mean gap are both more than ten times their medians probably has a wrong time. Then
    there is a warning, and :meth:`fit` ignores the series when it chooses frequencies and ``step_``.

    Attributes:
        frequency_: ω/2π, (P,).
        damping_ratio_: ζ, (P,).
        weights_: combinations of the standardised channels, (channels, P).
        mean_, scale_: mean and standard deviation of each channel, (channels,). ``scale_`` is infinite for a constant
            channel, so its standardised values are 0.
        step_: time between the points in the gaps: the median gap, or a half, a third or a quarter of it. It is the
            longest of these of which nearly all gaps are multiples, or the quarter if there is none. For integer times
            with some missing it is 1.

    Raises:
        ValueError: if the series have other channels, static features or another unit of time than the training
            series, or infinite values.

    Example:
        >>> import numpy as np
        >>> from hbnode.features import OscillatorFeatures
        >>> from sklearn.linear_model import RidgeClassifierCV
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import StandardScaler
        >>> random = np.random.default_rng(0)
        >>> t = [np.sort(random.uniform(0, 10, 40)) for _ in range(60)]
        >>> slow = np.arange(60) % 2
        >>> series = [(times, np.sin((3 - one) * times + random.uniform(0, 6))) for times, one in zip(t, slow)]
        >>> model = make_pipeline(OscillatorFeatures(random_state=0), StandardScaler(), RidgeClassifierCV())
        >>> float(model.fit(series[:40], slow[:40]).score(series[40:], slow[40:]))
        1.0
    """

    def __init__(
        self,
        num_oscillators: int = 64,
        *,
        frequency: tuple[float, float] | None = None,
        damping_ratio: tuple[float, float] = (0.05, 0.9),
        random_state: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.num_oscillators = num_oscillators
        self.frequency = frequency
        self.damping_ratio = damping_ratio
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose the oscillators by the times of the series, and the thresholds by quantiles of the states.

        Arguments:
            X: a :class:`hbnode.data.Series`, or data that :func:`hbnode.data.as_series` converts.
            y: ignored. Default: ``None``
        """
        warn_if_swapped(X)
        series = self._series(X, is_new=True)
        random = check_random_state(self.random_state)
        size = as_count(self.num_oscillators, "num_oscillators")
        self.step_, self.span_ = _step_and_span(usual(series))
        high = 0.25 / self.step_
        low = min(high, 1 / (30 * self.span_))
        low, high = (low, high) if self.frequency is None else _range(self.frequency, "frequency", np.inf)
        self.frequency_ = np.geomspace(low, high, size)
        bounds = np.log(_range(self.damping_ratio, "damping_ratio", 1.0))
        self.damping_ratio_ = np.exp(random.uniform(*bounds, size))
        weights = random.standard_normal((self.n_features_in_, size))
        self.weights_ = weights / np.linalg.norm(weights, axis=0) if len(weights) > 1 else np.ones_like(weights)
        fixed = self.frequency_, self.damping_ratio_, self.weights_, self.step_, self.span_
        states = len(STATES) * size
        samples = self._samples(_Bank(*fixed, np.ones(states), np.zeros((SHARES, states))), series, random)
        scales = samples.std(0)
        scales = np.where(scales > _FLOOR, scales, 1.0)
        shares = np.arange(1, SHARES + 1) / (SHARES + 1)
        thresholds = np.quantile(np.round(samples / scales, _DIGITS), shares, axis=0)
        self._bank = _Bank(*fixed, scales, thresholds + 0.5 * 10.0**-_DIGITS)  # halfway between two rounded states
        if series.static is not None:
            count = series.static.shape[1]
            self.static_channels_ = _unique(series.static_features, count, "static", self._names(self.channels_))
        return self

    def _samples(self, bank: _Bank, series: Series, random: np.random.RandomState) -> Array:
        """Return the states of P oscillators at random times of random training series, (number of times, 3 P).

        The scales and thresholds of the features are computed from these states.
        """
        order = random.permutation(len(series))
        lengths = series.lengths.numpy()[order]
        count = max(1, min(len(order), int(np.searchsorted(lengths.cumsum(), _SAMPLES)) + 1))
        blocks = []
        for row in np.array_split(order[:count], -(-count // 64)):
            block = self._block(series, row)
            x, t = block.x[:, :_SAMPLES], block.t[:, :_SAMPLES]
            blocks.append(_Block(x, t, block.start, np.minimum(block.lengths, _SAMPLES)).refined(bank.step))
        share, found = _SAMPLES / sum(block.lengths.sum() for block in blocks), []
        for block in blocks:
            kept = random.random_sample(block.t.shape) < share
            kept = (kept & (np.arange(block.t.shape[1]) < block.lengths[:, None])).T
            found += [y[kept[part]] for part, y in bank.states(block)]
        return np.concatenate(found)

    def transform(self, X: Any) -> Array:
        """Return the features of each series, (batch, features).

        Arguments:
            X: a :class:`hbnode.data.Series`, or what :func:`hbnode.data.as_series` converts.

        Raises:
            ValueError: if the channels or static features differ from the training series.
        """
        check_is_fitted(self)
        series = self._series(X)
        gaps, lengths = np.diff(series.t.numpy(), axis=1), series.lengths.numpy()
        points = _parts_of_gaps(gaps, lengths, self.step_).sum(1) + 1
        cost = np.minimum(points, _WINDOW) * len(self.frequency_) + points * self.n_features_in_
        return self._rows(self._bank.features, lambda rows: self._block(series, rows), series, cost)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Return the names of the features, such as ``"oscillator3_velocity_mean"`` and ``"pulse_last"``.

        Arguments:
            input_features: names of the channels. Names of the columns of an array (batch, T) are ignored, because
                these columns are times. None takes the names of the training series. Default: ``None``.
        """
        check_is_fitted(self)
        channels = self.channels_ if input_features is None else list(input_features)
        if len(channels) not in (self.n_features_in_, self._width):
            count = self.n_features_in_
            raise ValueError(f"input_features must have {count} names, got {len(channels)}. Fix: input_features=None.")
        channels = channels if len(channels) == self.n_features_in_ else self.channels_
        return np.array([*self._names(channels), *self.static_channels_], dtype=object)

    def _names(self, channels: list[str]) -> list[str]:
        places = range(len(self.frequency_))
        names = [f"oscillator{p}_{state}_{what}" for state in STATES for what in POOLED for p in places]
        return names + [f"{channel}_{what}" for what in SUMMARIES for channel in channels]


class Summaries(_Transformer):
    """A scikit-learn transformer that returns summaries of each channel, as inputs of decision trees.

    The summaries are those of :class:`OscillatorFeatures`, the slope of a least-squares line, the time of the last
    value and the share of the samples that have a value. They are NaN for a channel without a value. The static
    features come last.
    """

    random_state = n_jobs = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Store the mean and the scale of each channel. :meth:`transform` leaves missing static features NaN."""
        if self._series(X, is_new=True).static is not None:
            self.static_mean_ = np.full_like(self.static_mean_, np.nan)
        return self

    def transform(self, X: Any) -> Array:
        """Return the summaries of the series X, (batch, summaries)."""
        check_is_fitted(self)
        series = self._series(X)
        cost = series.lengths.numpy() * self.n_features_in_
        return self._rows(self._summaries, lambda rows: self._block(series, rows), series, cost)

    @staticmethod
    def _summaries(block: _Block) -> Array:
        x, seen, t = np.nan_to_num(block.x), ~np.isnan(block.x), block.t[..., None]
        count = seen.sum(1)
        centred = (t - (t * seen).sum(1, keepdims=True) / np.maximum(count, 1)[:, None]) * seen
        slope = (centred * x).sum(1) / np.maximum(np.square(centred).sum(1), 1e-12)
        found = [*_summaries(block), slope, (t * seen).max(1), count / np.maximum(block.lengths, 1)[:, None]]
        return np.concatenate([np.where(count > 0, each, np.nan) for each in found], 1)


def _step_and_span(series: Series) -> tuple[float, float]:
    """Return the typical interval between samples, and the duration of the longest series.

    Both are 1 if no series has two different times.
    """
    gaps, spans, _ = _gaps(series)
    if not len(gaps):
        return 1.0, 1.0
    median = np.quantile(gaps, 0.5, method="lower")
    for step in median / np.arange(1, 5):
        steps = gaps[gaps < _MULTIPLE * step] / step
        if (np.abs(steps - np.maximum(np.rint(steps), 1)) < 0.05).mean() > 0.95:
            break
    return float(step), float(spans.max())


def usual(series: Series) -> Series:
    """Remove series that probably contain a wrong time (see :func:`_gaps`), and warn of the removed series."""
    _, spans, is_far = _gaps(series)
    if not is_far.any():
        return series
    row = int(is_far.argmax())
    warnings.warn(
        f"{is_far.sum()} of {len(series)} series last much longer than others, with much longer gaps, first "
        f"{_name(series, row)}: {spans[row]:.4g}, where the others last at most {spans[~is_far].max():.4g}. They do "
        "not count for the range of times. Fix: correct their times.",
        stacklevel=level_of_user(),
    )
    return series.select(np.flatnonzero(~is_far).tolist())


def _gaps(series: Series) -> tuple[Array, Array, Array]:
    """Return the gaps between successive samples of all series, (gaps,), without gaps of length 0.

    Also return the duration of each series, (batch,), and whether the series probably has a wrong time, (batch,): its
    duration and its mean gap both exceed ten times the median over series. In this median each series is counted once
    for each of its gaps.
    """
    t = (series.t - series.t[:, :1]).double().numpy()
    spans, gaps = t[:, -1], np.diff(t, axis=1)
    is_gap = gaps > 1e-9 * spans[:, None]
    counts = is_gap.sum(1)
    sizes = np.stack([spans, spans / np.maximum(counts, 1)])
    typical = np.quantile(np.repeat(sizes, counts, 1), 0.5, axis=1, method="lower") if counts.any() else sizes.max(1)
    return gaps[is_gap], spans, (sizes > _FAR * typical[:, None]).all(0)


def _range(value: tuple[float, float], name: str, most: float) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError):
        low, high = np.nan, np.nan
    if not 0 < low <= high < most:
        raise ValueError(f"{name} must be 0 < low <= high < {most}, got {value!r}. Fix: {name}=(0.1, 0.5).")
    return low, high


# MiniRocket


def _with_numba(function: Callable[[Array], Any], values: Array) -> Any:
    """Call a function that uses numba, and return its result.

    Afterwards restore torch's number of threads, which numba changes.
    """
    threads = torch.get_num_threads()
    try:
        return function(values)
    finally:
        torch.set_num_threads(threads)


class RocketFeatures(_Transformer):
    """A scikit-learn transformer that reconstructs series on a regular grid and returns the features of MiniRocket.

    Each channel is standardised and interpolated on the grid. aeon's MiniRocket then measures how often convolutions
    with 84 fixed kernels, at several dilations, exceed a threshold. The package aeon is required. It compiles the
    kernels in the first call (20 seconds, then cached). The static features of a :class:`hbnode.data.Series` come last;
    a missing static feature is replaced by its training mean.

    All series share one grid, so t = 0 must have the same meaning in every series. The range of the training times is
    widened by a tenth at each end. There is a warning if more than a tenth of the samples of a series lie outside. A
    training series whose duration and mean gap are both more than ten times their medians probably has a wrong time; it
    does not extend the grid.

    References:
        Dempster, Schmidt and Webb, MiniRocket, KDD 2021, arXiv:2012.08791.

    Arguments:
        num_features: number of features, rounded down to a multiple of 84. Default: ``4956``.
        reconstruction: how to interpolate each channel. ``"linear"`` interpolates linearly between observed values;
            ``"last"`` takes the last observed value. Both are constant outside of the observed times. Another option is
            an object with methods ``fit(series)`` and ``posterior(series, grid)``, such as an
            :class:`hbnode.estimators.OscillatorSmoother`. The result of ``posterior`` must have an attribute ``mean``,
            (batch, channels, points); NaN in it is replaced by the channel's mean. The object is cloned before it is
            fitted. Default: ``"linear"``.
        grid: number of equally spaced points from the first to the last training time, at least 9; or the times of the
            grid. None takes as many points as there are different training times, but at most 16 times the length of
            the longest series and at most 2,048. Default: ``None``.
        random_state: seed of thresholds and combinations of channels, an int or a RandomState. None takes a new seed in
            each fit. Default: ``None``.
        n_jobs: number of parallel jobs of joblib; each job takes chunks of series. None is one job, or what
            ``joblib.parallel_config`` specifies. Default: ``None``.

    Attributes:
        grid_: the times of the grid, (points,).
        mean_, scale_: mean and standard deviation of each channel, (channels,). ``scale_`` is infinite for a constant
            channel, so its standardised values are 0.

    Raises:
        ImportError: if aeon is not installed.
        ValueError: if the series have other channels, static features or another unit of time than the training
            series; if they have infinite values or lie outside of the training times; if only the new or only the
            training dates have a time zone.

    Example:
        >>> from hbnode.features import RocketFeatures
        >>> features = RocketFeatures(num_features=840, random_state=0).fit_transform(series)  # doctest: +SKIP
    """

    _is_relative = False

    def __init__(
        self,
        num_features: int = 4956,
        *,
        reconstruction: Literal["linear", "last"] | Any = "linear",
        grid: Any = None,
        random_state: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.num_features = num_features
        self.reconstruction = reconstruction
        self.grid = grid
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose the grid and the thresholds of the kernels.

        Arguments:
            X: a :class:`hbnode.data.Series`, or data that :func:`hbnode.data.as_series` converts.
            y: ignored. Default: ``None``
        """
        warn_if_swapped(X)
        self._fit(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Array:
        """Fit, and return the features of each series, (batch, features). The series are reconstructed only once.

        Arguments:
            X: a :class:`hbnode.data.Series`, or data that :func:`hbnode.data.as_series` converts.
            y: ignored. Default: ``None``
        """
        warn_if_swapped(X)
        series, values = self._fit(X)
        if len(values) < len(series):
            return self._features(series)
        return self._with_static(np.asarray(_with_numba(self.kernels_.transform, values), dtype=np.float64), series)

    def _fit(self, X: Any) -> tuple[Series, Array]:
        """Fit the transformer to the data X. Return X as series, and the values of n of them on the grid.

        The values are (n, channels, points). If all values fit in memory, they contain all series, otherwise a random
        sample.
        """
        try:
            from aeon.transformations.collection.convolution_based import MiniRocket
        except ImportError as error:
            raise ImportError(f"RocketFeatures needs aeon: {error}. Fix: pip install aeon.") from error
        series = self._series(X, is_new=True)
        if isinstance(self.reconstruction, str):
            check_choice(self.reconstruction, "reconstruction", ("linear", "last"))
        elif not hasattr(self.reconstruction, "posterior"):
            got = f"got {self.reconstruction!r}. Fix: reconstruction='linear'"
            raise TypeError(f"reconstruction must have the methods fit and posterior, {got}.")
        else:
            self.reconstruction_ = clone(self.reconstruction, safe=False).fit(series)
        self.grid_, self._range = grid_of(self.grid, usual(series))
        random = check_random_state(self.random_state)
        kernels = MiniRocket(as_count(self.num_features, "num_features"), random_state=int(random.randint(2**31 - 1)))
        rows, most = np.arange(len(series)), max(1, _VALUES // (len(self.grid_) * self.n_features_in_))
        values = self._values(series, rows if len(rows) <= most else random.permutation(rows)[:most])
        before = np.random.get_state()  # noqa: NPY002, because aeon seeds NumPy's global generator
        try:
            self.kernels_ = _with_numba(kernels.fit, values)
        finally:
            np.random.set_state(before)  # noqa: NPY002
        return series, values

    def transform(self, X: Any) -> Array:
        """Return the features of each series, (batch, features).

        Arguments:
            X: a :class:`hbnode.data.Series`, or what :func:`hbnode.data.as_series` converts.
        """
        check_is_fitted(self)
        series = self._series(X)
        check_range(series, *self._range, "times that count from the beginning of each series; or correct its times")
        return self._features(series)

    def _features(self, series: Series) -> Array:
        cost = np.full(len(series), len(self.grid_) * self.n_features_in_)
        transform = partial(_with_numba, self.kernels_.transform)
        return self._rows(transform, lambda rows: self._values(series, rows), series, cost)

    def _values(self, series: Series, rows: Array) -> Array:
        """Return the n series with the indices ``rows``, reconstructed on the grid and standardised.

        The shape is (n, channels, points).
        """
        if isinstance(self.reconstruction, str):
            block = self._block(series, rows)
            at = self.grid_ - block.start[:, None]
            return _interpolated(block, at, self.reconstruction).swapaxes(1, 2)
        values = np.asarray(
            self.reconstruction_.posterior(series.select(rows.tolist()), self.grid_).mean, dtype=np.float64
        )
        expected = len(rows), self.n_features_in_, len(self.grid_)
        if values.shape != expected:
            raise ValueError(f"posterior must return a mean {expected}, got {values.shape}. Fix: mean.swapaxes(1, 2).")
        return np.nan_to_num((values - self.mean_[:, None]) / self.scale_[:, None])

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Return the names of the features, ``"minirocket0"``, ``"minirocket1"``, ..., and of the static features.

        Arguments:
            input_features: ignored. Default: ``None``
        """
        check_is_fitted(self)
        count = max(84, self.num_features // 84 * 84)
        return np.array([*(f"minirocket{i}" for i in range(count)), *self.static_channels_], dtype=object)


def check_range(series: Series, first: float, last: float, fix: str) -> None:
    """Check that series lie in the range of times from ``first`` to ``last``.

    Raise ValueError if all samples of a series lie outside of the range. Warn if more than a tenth of its samples do.
    The range is widened by a tenth at each end, because series of few samples rarely reach its ends.
    """
    seen, t, margin = series.mask.any(2).numpy(), series.t.numpy(), _MARGIN * (last - first)
    is_out = seen & ((t < first - margin) | (t > last + margin))
    share = is_out.sum(1) / np.maximum(seen.sum(1), 1)
    row, others = int(share.argmax()), (share > _MARGIN).sum() - 1
    if others < 0:
        return
    times = [first, last, *t[row][seen[row]][[0, -1]]]
    names = [f"{each:.10g}" for each in times] if series.origin is None else list(map(str, series.dates(times)))
    lost = "fit saw nothing there" if share[row] == 1 else f"fit did not see {100 * share[row]:.0f} % of it"
    message = (
        f"times must be those of fit, from {names[0]} to {names[1]}, but {_name(series, row)} lasts from {names[2]} to "
        f"{names[3]}, and there are {others} others: {lost}. Fix: {fix}."
    )
    if share[row] == 1:
        raise ValueError(message)
    warnings.warn(message, stacklevel=level_of_user())


def grid_of(grid: Any, series: Series) -> tuple[Array, tuple[float, float]]:
    """Return the times of the grid (points,), and the first and the last time between which series must lie.

    ``grid`` is the argument of :class:`RocketFeatures`: times, a number of points, or None.
    """
    times = series.t[series.mask.any(2)].double().unique().numpy()
    times = times if len(times) else np.zeros(1)
    if np.ndim(grid) == 1:
        points: Array = as_numbers(np.asarray(grid), "grid", f"grid={_SHORTEST}").numpy()
        if len(points) < _SHORTEST or not (np.diff(points) > 0).all():
            least = _SHORTEST
            raise ValueError(f"grid must be at least {least} increasing times, got {grid!r}. Fix: grid={least}.")
        return points, (min(points[0], times[0]), max(points[-1], times[-1]))
    most = min(_LONGEST, 16 * int(series.lengths.max()))
    count = min(len(times), most) if grid is None else as_count(grid, "grid", _SHORTEST)
    return np.linspace(times[0], times[-1], max(_SHORTEST, count)), (times[0], times[-1])
