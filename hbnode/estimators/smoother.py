"""Reconstruction of irregular series by a model of noisy oscillators, with the interface of scikit-learn."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from typing_extensions import Self

from hbnode._checks import as_count, check_bool, check_choice, warn_if_swapped
from hbnode.data import Series, aligned, as_series, check_zone, has_zone, observed
from hbnode.features import moments
from hbnode.nn.kalman import Gaussian, KalmanFilter
from hbnode.nn.oscillators import Oscillators
from hbnode.nn.sequences import Sequences

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW, WINDOWS = 48, 100  # maximum number of samples in a window of the fit; maximum number of windows
FEW_SERIES = 10  # with fewer series there is no shared mean by default, and windows are longer
SAMPLES = 2400  # number of samples in all windows if there are few series
SIZES, SIZE = (2, 3, 4, 6), 3  # candidate numbers of oscillators for few series; number for more series
BINS = 200  # number of bins of time for the shared mean
FLOOR = 1e-3  # smallest standard deviation of the noise, in standard deviations of the data
GAPS_PER_CYCLE, MOST_DAMPING = 4.0, 2.0  # limits of the fit: smallest number of median gaps per cycle; largest ζ
NYQUIST = 2.0  # gaps per cycle of the fastest oscillator for few series, whose windows are long enough to identify it
MOST_SPREAD = 30.0  # largest standard deviation of an oscillator, in standard deviations of the data
FARTHEST = 15.0  # maximum distance of a fitted parameter, a logarithm, from its initial value
PRIOR_STD, PRIOR_WEIGHT = 3.0, 0.02  # standard deviation and weight of the normal prior of all logarithms
OVERSHOOT = 0.1  # means are clipped to the range of the training values, widened by this share
ROUNDING = 4 * np.finfo(np.float64).eps  # relative difference up to which two times are equal
MOST_VALUES = 100_000  # maximum number of values that are smoothed at once


class Posterior(NamedTuple):
    """The distribution of series at K times, given their samples. As in aeon, channels come before times.

    Attributes:
        mean: means of the signal, (batch, channels, K).
        std: standard deviations of the signal, or of observations with ``noise=True``, (batch, channels, K).
        paths: random paths of the signal at all times, (paths, batch, channels, K); None with ``paths=0``.
    """

    mean: NDArray[Any]
    std: NDArray[Any]
    paths: NDArray[Any] | None = None


class _Rows(NamedTuple):
    """Standardised values as R = batch · channels sequences, one for each channel of each series, padded at the end.

    Attributes:
        x: values, (R, n).
        t: times, (R, n).
        seen: True for observed values, False for padding, (R, n).
    """

    x: Tensor
    t: Tensor
    seen: Tensor

    def sequences(self) -> Sequences:
        return Sequences(1, self.x.unsqueeze(-1), self.t, self.seen, None)

    def select(self, rows: Any) -> _Rows:
        return _Rows(*(z[rows] for z in self))


class OscillatorSmoother(BaseEstimator):
    r"""An estimator that reconstructs irregular, noisy series by the posterior mean of oscillators.

    The oscillators are fitted to all series. A value of series i at time t is μ(t) + a_i Σ_p σ_p y_p(t) + a_i ε, with
    Var y_p = 1 and independent noise ε ~ N(0, s²). Each y_p is an oscillator that is driven by white noise,
    y'' + 2ζωy' + ω²y = noise. Each channel is standardised, and channels are modelled as independent. All series and
    channels share ω, ζ, σ and s. They are fitted by the exact likelihood (:class:`hbnode.nn.Oscillators` with
    ``noise=True``), which allows irregular times.

    With ``student=True`` the variance a_i² of each series has an inverse gamma distribution, which is integrated out.
    The likelihood is then a multivariate t distribution, and a series with larger errors has wider bands.

    In the fit, an oscillator has at most one cycle in four median gaps, and ζ < 2. A faster oscillator could not be
    distinguished from noise. Fewer than ten series are fitted in longer windows, with up to one cycle in two gaps. The
    initial oscillators are then a slow one, a strongly damped one, and sines at the peaks of the spectrum.

    The posterior mean is smooth. Its errors are small, but for rough series it lacks details that help a classifier.
    Therefore ``keep_observed=True`` keeps the observed values. Compare reconstructions for a classifier by its
    accuracy, not by their errors.

    Bands do not include the uncertainty of μ(t) and of the fitted parameters. Instead they are widened by
    √(n / (n - k)) for k parameters and n values, as in a regression. The variance of a mean of N series is 1/N of
    theirs, and a mean that is fitted to few series follows each of them. ``mean="auto"`` therefore uses a shared mean
    only for ten series or more; its error would then widen bands by 5 % or less.

    References:
        Shah, Wilson and Ghahramani, Student-t Processes as Alternatives to Gaussian Processes, AISTATS 2014;
        Foreman-Mackey et al., Fast and Scalable Gaussian Process Modeling, AJ 154 (2017) (the oscillator as a kernel).

    Arguments:
        num_oscillators: P. None is 3. With fewer than ten series, None is the best of 2, 3, 4 and 6 by Schwarz's
            criterion (BIC). Default: ``None``
        mean: ``"shared"`` for a mean μ(t) over all series, if t = 0 has the same meaning in all series, as for days or
            spectra. ``"constant"`` for the mean of all values of a channel. ``"auto"`` is ``"shared"`` for a channel if
            ten series or more cover a time on average, otherwise ``"constant"``. Default: ``"auto"``
        keep_observed: whether the mean at the time of an observed value is this value. Default: ``True``
        student: whether each series has a separate variance a². Default: ``True``
        max_iter: maximum number of iterations of L-BFGS. Default: ``50``
        random_state: seed for the windows of the fit and for paths. The fit uses at most 100 windows of 48 samples.
            With fewer than ten series it uses one window of each series, with 2,400 samples in total.
            Default: ``None``

    A channel whose training values are all equal has a constant mean. A channel without training values has the mean
    NaN. Both have infinite standard deviations. New series must have the ``unit`` and ``origin`` of the training
    series. With a shared mean, their dates must have a time zone if and only if the training dates have one.

    Attributes:
        is_shared_: which channels have a shared mean, (channels,).
        noise_std: standard deviation s of the observation noise of each channel, in units of the data, (channels,).
        layer_: the fitted :class:`hbnode.nn.Oscillators`, for one channel of standard deviation 1.

    Example:
        >>> import numpy as np, hbnode
        >>> times = np.linspace(0, 10, 40)
        >>> series = [(times, np.sin(2 * times + phase)) for phase in range(8)]
        >>> smoother = hbnode.estimators.OscillatorSmoother(mean="constant", random_state=0).fit(series)
        >>> mean, std, _ = smoother.posterior([(times[::4], series[0][1][::4])], times)
        >>> mean.shape, bool(abs(mean[0, 0] - series[0][1]).max() < 0.1)
        ((1, 1, 40), True)
    """

    def __init__(
        self,
        num_oscillators: int | None = None,
        mean: Literal["auto", "shared", "constant"] = "auto",
        keep_observed: bool = True,
        student: bool = True,
        max_iter: int = 50,
        random_state: Any = None,
    ) -> None:
        self.num_oscillators = num_oscillators
        self.mean = mean
        self.keep_observed = keep_observed
        self.student = student
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, series: Any, y: Any = None) -> Self:
        """Fit the oscillators, the noise and the mean to all series.

        Arguments:
            series: a :class:`hbnode.data.Series`, a list of (t, x) with t (n,) and x (n,) or (n, channels), or an array
                (batch, channels, T); NaN is missing. See :func:`hbnode.data.as_series`.
            y: ignored. Default: ``None``

        Raises:
            ValueError: if ``mean`` is unknown, or the series have fewer than two observed values.
        """
        as_count(self.max_iter, "max_iter")
        check_bool(self.student, "student")
        check_bool(self.keep_observed, "keep_observed")
        check_choice(self.mean, "mean", ("auto", "shared", "constant"))
        size, rng = self.num_oscillators, check_random_state(self.random_state)
        size = as_count(size, "num_oscillators") if size is not None else None
        warn_if_swapped(series)
        data = observed(series)
        few = len(data) < FEW_SERIES
        self.is_shared_ = _at_once(data) >= {"auto": FEW_SERIES, "shared": 0, "constant": math.inf}[self.mean]
        if int(data.mask.sum()) < 2:
            raise ValueError("the series have fewer than two observed values. Fix: fit them to more series.")
        self.clock_, self.has_zone_, self.features_ = (data.unit, data.origin), has_zone(series), list(data.features)
        self.level_, deviation = moments(data.x)
        self.has_scale_ = deviation > 0
        self.scale_ = np.where(self.has_scale_, deviation, 1.0)
        ends = data.x.nan_to_num(torch.inf).amin((0, 1)), data.x.nan_to_num(-torch.inf).amax((0, 1))
        self.range_ = torch.stack(ends).double().numpy()
        self.mean_times_, self.mean_values_ = np.zeros(1), np.zeros((len(self.level_), 1))
        rows = self._rows(data)
        gaps, span = rows.t.diff()[rows.seen[:, 1:]], float((rows.t[:, -1] - rows.t[:, 0]).max())
        gaps = gaps[gaps > 0]
        if not len(gaps):
            warnings.warn(
                "no series has two samples of a channel at different times, so frequencies are guessed from the times "
                "of all series. Fix: fit to series with two samples or more.",
                stacklevel=2,
            )
            gaps = rows.t[rows.seen].unique().diff()
            gaps, span = (gaps, float(gaps.sum())) if len(gaps) else (torch.ones(1), 1.0)
        if self.is_shared_.any():
            self._fit_mean(data)
            rows = self._rows(data)
        gap = float(gaps.median())
        windows = _windows(rows, rng, few)
        count, variance = int(windows.seen.sum()), max(float(rows.x[rows.seen].square().mean()), FLOOR**2)
        low, most = math.log(math.pi / span), math.log(2 * math.pi / ((NYQUIST if few else GAPS_PER_CYCLE) * gap))
        sizes = (size,) if size else SIZES if few else (SIZE,)
        if few:
            omega, zeta = _starts(windows, gap, most, max(sizes))
        else:
            high = max(math.log(2 * math.pi / (6 * gap)), low + 1)
            omega = torch.linspace(low, high, sizes[0] + 2, dtype=torch.float64)[1:-1].clamp(max=most - 0.1)
            zeta = torch.full_like(omega, math.log(0.5))
        noise = omega.new_tensor([0.5 * math.log(variance) + math.log(0.1), math.log(2.0)])
        floor = FLOOR * math.sqrt(variance)

        def logs(parameters: Tensor) -> list[Tensor]:
            (omega, zeta, spread), (noise, excess) = parameters[:-2].chunk(3), parameters[-2:].split(1)
            noise = 0.5 * ((2 * noise).exp() + floor**2).log()
            spread = _below(math.log(MOST_SPREAD) + 0.5 * math.log(variance), spread)
            return [_below(most, omega), _below(math.log(MOST_DAMPING), zeta), spread, noise, excess]

        def log_density(parameters: Tensor) -> Tensor:
            *rest, log_excess = logs(parameters)
            return _log_density(_kalman(*rest), windows, log_excess if self.student else None).sum()

        least, fitted = math.inf, omega.new_empty(3, 0)
        for size in sizes:  # the fit of one size gives initial values of the next
            spread = torch.full_like(omega, 0.5 * math.log(variance / size) - 1.5 * (fitted.shape[1] > 0))
            added = torch.stack([omega, zeta, spread])[:, fitted.shape[1] : size]
            start = torch.cat([torch.cat([fitted, added], 1).flatten(), noise])
            found = _maximised(log_density, start, count, self.max_iter, few)
            fitted, noise = found[:-2].view(3, -1), found[-2:]
            with torch.no_grad():
                cost = 1.5 * size * math.log(count) - float(log_density(found))  # half of the BIC
            if cost < least:
                least, best = cost, found
        self.log_omega_, self.log_zeta_, self.log_spread_, self.log_noise_, self.log_excess_ = (
            each.numpy() for each in logs(best)
        )
        self.widening_ = math.sqrt(count / max(count - len(best), 1))
        return self

    @property
    def noise_std(self) -> NDArray[Any]:
        """The standard deviation of the observation noise of each channel, in units of the data, (channels,)."""
        check_is_fitted(self)
        return np.asarray(self.scale_ * math.exp(self.log_noise_[0]))

    @property
    def layer_(self) -> Oscillators:
        """The fitted oscillators as a layer for one standardised channel."""
        check_is_fitted(self)
        omega, zeta = torch.from_numpy(self.log_omega_), torch.from_numpy(self.log_zeta_)
        with torch.random.fork_rng(devices=[]):
            layer = Oscillators(1, 1, len(omega), noise=True, dtype=torch.float64).requires_grad_(False)
        layer.load_state_dict({
            **layer.state_dict(),
            "log_stiffness": 2 * omega,
            "log_damping": math.log(2) + zeta + omega,
            "log_spread": torch.from_numpy(self.log_spread_),
            "log_observation_noise": torch.from_numpy(self.log_noise_),
            "weight_out": torch.cat([torch.zeros_like(omega), torch.ones_like(omega)]).unsqueeze(0),
        })  # fmt: skip
        return layer

    @torch.no_grad()
    def log_likelihood(self, series: Any) -> NDArray[Any]:
        """Return the log density of the observed values of each series, (batch,), in units of the data."""
        check_is_fitted(self)
        data = self._checked(series)
        log_excess = torch.from_numpy(self.log_excess_) if self.student else None
        found = _log_density(self.layer_._kalman_filter(), self._rows(data), log_excess).unflatten(0, (len(data), -1))
        scales = data.mask.sum(1) * torch.from_numpy(self.scale_).log()
        return np.asarray((found - scales).sum(1))

    def posterior(self, series: Any, grid: Any, paths: int = 0, noise: bool = False) -> Posterior:
        """Return the distribution of the signal of each series at given times.

        The signal does not include the observation noise. For intervals of observed values use ``noise=True``.

        Arguments:
            series: as in :meth:`fit`, with the channels of the training data.
            grid: times (K,) for all series, or (batch, K); dates if the times of the series are dates.
            paths: number of random paths. Default: ``0``
            noise: whether ``std`` includes the observation noise. Paths never include it. Default: ``False``

        Returns:
            A :class:`Posterior` with means, standard deviations and paths. Means are clipped to the range of the
            training data, widened by a tenth. With ``keep_observed``, means at the times of observed values are these
            values.
        """
        check_is_fitted(self)
        data = self._checked(series)
        at = self._times(data, grid)
        mean, std, error = self._smoothed(data, at)
        drawn = self._paths(data, at, mean, as_count(paths, "paths")).numpy() if paths else None
        means = self._clipped(mean)
        if self.keep_observed:
            means = _with_observed(means, at, data)
        std = torch.hypot(std, error) if check_bool(noise, "noise") else std
        return Posterior(means.numpy(), std.numpy(), drawn)

    def reconstruct(self, series: Any, grid: Any) -> NDArray[Any]:
        """Return the means of :meth:`posterior`, (batch, channels, K).

        The features of these means are computed by ``hbnode.features.RocketFeatures(reconstruction=smoother)``.

        Arguments:
            series: as in :meth:`fit`, with the channels of the training data.
            grid: times (K,) for all series, or (batch, K).
        """
        return self.posterior(series, grid).mean

    def forecast(self, series: Any, at: Any) -> Gaussian:
        """Return the distribution of observations at given times, (batch, K, channels), as tensors.

        Unlike in :meth:`posterior`, standard deviations include the observation noise, and means are neither clipped
        nor replaced by observed values.

        Arguments:
            series: as in :meth:`fit`, with the channels of the training data.
            at: times (K,) for all series, or (batch, K), which may lie after the last sample; dates if the times of
                the series are dates.
        """
        check_is_fitted(self)
        data = self._checked(series)
        times = self._times(data, at)
        mean, std, error = self._smoothed(data, times)
        return Gaussian(mean.transpose(1, 2), torch.hypot(std, error).transpose(1, 2))

    def impute(self, series: Any, causal: bool = False) -> Any:
        """Return the series in the same form, with missing values replaced by posterior means.

        An array (batch, channels, T) or (batch, T) remains an array, in which padding stays NaN. A list of (t, x)
        remains a list, sorted by time. Any other form gives a :class:`hbnode.data.Series`. With ``keep_observed=False``
        observed values are replaced too.

        Arguments:
            series: as in :meth:`fit`, with the channels of the training data.
            causal: whether each mean uses only the samples up to its time. Use this to test forecasts and decision
                rules that must not use the future. Default: ``False``
        """
        check_is_fitted(self)
        data = self._checked(series)
        causal = check_bool(causal, "causal")
        found = self._filtered(data) if causal else torch.from_numpy(self.posterior(data, data.t).mean)
        found = found.transpose(1, 2).to(data.x)
        valid = torch.arange(data.t.shape[1]) < data.lengths.unsqueeze(1)
        filled = torch.where(data.mask & self.keep_observed, data.x, found)
        filled = torch.where(valid.unsqueeze(-1), filled, torch.nan)
        if isinstance(series, (np.ndarray, Tensor)):
            out = np.full(np.shape(series), np.nan)
            out[..., : filled.shape[1]] = filled.transpose(1, 2).numpy().reshape(*out.shape[:-1], -1)
            return out
        if isinstance(series, (list, tuple)) and isinstance(series[0], tuple):
            pairs = zip(filled.numpy(), series, strict=True)
            return [(np.sort(np.asarray(t)), x[: len(t)].reshape(np.shape(given))) for x, (t, given) in pairs]
        return dataclasses.replace(data, x=filled, mask=valid.unsqueeze(-1).expand_as(filled))

    # Data

    def _checked(self, series: Any) -> Series:
        """Convert data to series, with the channels of the training series.

        Raise ValueError if the unit of time differs from that in :meth:`fit`. With a shared mean, which depends on
        absolute times, also raise ValueError if the origin differs.
        """
        data, is_shared = aligned(as_series(series), self.features_), bool(self.is_shared_.any())
        unit, origin = self.clock_
        is_same = data.origin == origin if is_shared else (data.origin is None) == (origin is None)
        if data.unit != unit or not is_same:
            fix = "the same unit= and origin= of as_series, for dates in both or in none"
            clocks = f"{self.clock_}, got {(data.unit, data.origin)}"
            raise ValueError(f"series must have the unit and the origin of time as in fit, {clocks}. Fix: {fix}.")
        if is_shared:
            check_zone(has_zone(series), self.has_zone_)
        return data

    def _times(self, data: Series, grid: Any) -> Tensor:
        at = data.times(grid).double()
        if at.dim() not in (1, 2) or (at.dim() == 2 and len(at) != len(data)) or not at.shape[-1]:
            wanted = f"(K,) or (batch, K) with batch={len(data)}"
            raise ValueError(f"the times must be {wanted}, got {tuple(at.shape)}. Fix: numpy.linspace(0, 1, 100).")
        return at.expand(len(data), -1)

    def _mean_at(self, t: NDArray[Any]) -> NDArray[Any]:
        """Evaluate the mean function μ at times t (batch, K). Return (batch, channels, K), in units of the data."""
        shared = np.stack([np.interp(t, self.mean_times_, values) for values in self.mean_values_], 1)
        return np.asarray(self.level_[:, None] + self.scale_[:, None] * shared)

    def _clipped(self, means: Tensor) -> Tensor:
        """Clip means (batch, channels, K) to the range of the training values, widened by a tenth at both ends."""
        low, high = torch.from_numpy(self.range_).unsqueeze(-1)
        widened = OVERSHOOT * (high - low)
        return means.clamp(low - widened, high + widened)

    def _all_rows(self, data: Series) -> _Rows:
        """Standardise all samples. Return one sequence per series and channel, in which missing values are 0."""
        level, scale = torch.from_numpy(self._mean_at(data.t.numpy())), torch.from_numpy(self.scale_).unsqueeze(1)
        x = ((data.x.transpose(1, 2) - level) / scale).flatten(0, 1)
        seen = (data.mask & torch.from_numpy(np.isfinite(self.level_))).transpose(1, 2).flatten(0, 1)
        return _Rows(torch.where(seen, x, 0.0), data.t.double().repeat_interleave(data.x.shape[-1], 0), seen)

    def _rows(self, data: Series) -> _Rows:
        """Standardise the observed values. Return one sequence per series and channel, without missing values."""
        rows = self._all_rows(data)
        order = (~rows.seen).byte().argsort(dim=1, stable=True)[:, : max(1, int(rows.seen.sum(1).max()))]
        x, t, seen = (z.gather(1, order) for z in rows)
        last = t.gather(1, (seen.sum(1, keepdim=True) - 1).clamp(min=0))
        return _Rows(x, torch.where(seen, t, last), seen)

    # Fit

    def _fit_mean(self, data: Series) -> None:
        """Fit the mean function μ(t) of all series.

        The values of all series are averaged in bins of time. A Gaussian process (Matern 3/2) is fitted to the
        averages. The noise variance of an average is the variance within bins divided by the number of values in the
        bin.
        """
        seen = data.mask.numpy() & self.is_shared_
        times = data.t.numpy()[seen.any(2)]
        start, span = times.min(), max(times.max() - times.min(), 1e-300)
        centres = np.linspace(0.0, 1.0, BINS + 1)
        self.mean_times_, self.mean_values_ = start + span * centres, np.zeros((seen.shape[2], BINS + 1))
        for i in np.flatnonzero(seen.any((0, 1))):
            x = (data.x[..., i].double().numpy()[seen[..., i]] - self.level_[i]) / self.scale_[i]
            index = np.rint((data.t.numpy()[seen[..., i]] - start) / span * BINS).astype(int)
            count = np.bincount(index, minlength=BINS + 1)
            means = np.bincount(index, x, BINS + 1) / np.maximum(count, 1)
            free = len(x) - (count > 0).sum()
            within = (np.square(x - means[index]).sum() + 1) / (free + 1)  # shrunk to 1, the variance of all values
            kernel = ConstantKernel(1.0, (1e-4, 1e4)) * Matern(0.1, (1e-3, 1e3), nu=1.5)
            known = count > 0
            process = GaussianProcessRegressor(kernel, alpha=np.maximum(within / count[known], FLOOR**2))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The optimal value found|lbfgs")  # harmless for flat likelihoods
                process.fit(centres[known, None], means[known])
            self.mean_values_[i] = process.predict(centres[:, None])

    # Posterior

    @torch.no_grad()
    def _smoothed(self, data: Series, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the posterior mean and standard deviation of the signal at times ``at`` (batch, K), in data units.

        The third result is the standard deviation of the observation noise. All have the shape (batch, channels, K).
        """
        layer, rows = self.layer_, self._rows(data)
        found = [layer.smooth(each.x.unsqueeze(-1), each.t, each.seen, at=times) for each, times in _parts(rows, at, 1)]
        mean, std = (torch.cat([getattr(z, name) for z in found]).squeeze(-1) for name in ("mean", "std"))
        spread = self._spread(rows).unsqueeze(1)
        std, noise = ((spread * each).unflatten(0, (len(data), -1)) for each in (std, math.exp(self.log_noise_[0])))
        is_shown, scale = torch.from_numpy(self.has_scale_), torch.from_numpy(self.scale_)
        std, noise = scale.unsqueeze(1) * std.where(is_shown.unsqueeze(1), torch.inf), scale.unsqueeze(1) * noise
        return self._in_units(mean, at), std, noise

    def _in_units(self, z: Tensor, at: Tensor) -> Tensor:
        """Convert standardised values (..., batch · channels, K) to units of the data, (..., batch, channels, K)."""
        scaled = torch.from_numpy(self.scale_).unsqueeze(1) * z.unflatten(-2, (len(at), -1))
        return torch.from_numpy(self._mean_at(at.numpy())) + scaled

    @torch.no_grad()
    def _filtered(self, data: Series) -> Tensor:
        """Return the mean of the signal at each sample, given this and all earlier samples, (batch, channels, T)."""
        layer, parts = self.layer_, _parts(self._all_rows(data), data.t.double(), 1)
        z = torch.cat([layer.filter(each.x.unsqueeze(-1), each.t, mask=each.seen).after.mean for each, _ in parts])
        return self._clipped(self._in_units(z.squeeze(-1), data.t))

    @torch.no_grad()
    def _paths(self, data: Series, at: Tensor, mean: Tensor, paths: int) -> Tensor:
        """Return random paths of the signal from its posterior, (paths, batch, channels, K).

        ``mean`` (batch, channels, K) is the posterior mean at the times ``at`` (batch, K).
        """
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator, layer, rows = torch.Generator().manual_seed(seed), self.layer_, self._rows(data)
        drawn = [
            layer.sample_paths(each.x.unsqueeze(-1), each.t, each.seen, at=times, paths=paths, generator=generator)
            for each, times in _parts(rows, at, paths)
        ]
        found = self._in_units(torch.cat(drawn, 1).squeeze(-1), at)
        spread = self._spread(rows).unflatten(0, (len(data), -1)).unsqueeze(-1)
        return mean + (found - mean) * spread

    @torch.no_grad()
    def _spread(self, rows: _Rows) -> Tensor:
        """Return the factor by which the posterior standard deviations of each sequence are multiplied, (R,).

        It is ``widening_``. With ``student=True`` it includes an estimate of a_i, the amplitude of the series.
        """
        if not self.student:
            return torch.full((len(rows.x),), self.widening_, dtype=torch.float64)
        count, square, _ = _statistics(self.layer_._kalman_filter(), rows)
        excess = math.exp(self.log_excess_[0])
        return self.widening_ * ((2 + excess + square) / (excess + count)).sqrt()


def _kalman(log_omega: Tensor, log_zeta: Tensor, log_spread: Tensor, log_noise: Tensor) -> KalmanFilter:
    """Return the Kalman filter of a sum of oscillators with observation noise, given logarithms of its parameters.

    These are frequencies ω, damping ratios ζ and standard deviations σ of the oscillators, (size,) each, and the
    standard deviation s of the noise.
    """
    omega = log_omega.exp()
    c = torch.cat([torch.zeros_like(omega), torch.ones_like(omega)]).unsqueeze(0)
    return KalmanFilter(torch.stack([2 * log_zeta.exp() * omega, omega.square()]), c, log_spread, log_noise)


def _statistics(kalman: KalmanFilter, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return three terms of the log density of each sequence x under the model of a Kalman filter, (R,) each.

    They are the number of values in x, xᵀS⁻¹x, and ½ log det S, where S is the covariance matrix of x in the model.
    """
    blocks, found = kalman.run(rows.sequences())
    logs = found.factor.diagonal(dim1=-2, dim2=-1).log()
    return blocks.seen.sum((0, 2)), found.white.square().sum((0, 2, 3)), logs.sum((0, 2))


def _log_density(kalman: KalmanFilter, rows: _Rows, log_excess: Tensor | None) -> Tensor:
    """Return the log density of each sequence under the model of a Kalman filter, (R,).

    The distribution is normal if ``log_excess`` is None, otherwise multivariate t with ν = 2 + e^{log_excess} degrees
    of freedom.
    """
    n, square, logs = _statistics(kalman, rows)
    if log_excess is None:
        return -0.5 * square - logs - 0.5 * n * math.log(2 * math.pi)
    nu = 2 + log_excess.exp()
    constant = torch.lgamma((nu + n) / 2) - torch.lgamma(nu / 2) - 0.5 * n * (nu * math.pi).log()
    return constant - logs - 0.5 * (nu + n) * torch.log1p(square / nu)


def _maximised(
    log_density: Callable[[Tensor], Tensor], start: Tensor, count: int, iterations: int, few: bool = False
) -> Tensor:
    """Return the parameters that maximise ``log_density`` plus the log of a weak normal prior around ``start``.

    ``log_density`` is a function of the parameters; ``count`` is the number of observed values in it. For few series
    (``few=True``) the prior has the weight of one value, because a single sine needs a damping ratio far from the
    initial one.
    """
    weight, tolerance = (1 / count, 1e-7) if few else (PRIOR_WEIGHT, 1e-5)

    def bounded(parameters: Tensor) -> Tensor:
        return start + FARTHEST * ((parameters - start) / FARTHEST).tanh()

    parameters = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=iterations, history_size=10, tolerance_change=tolerance, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        prior = weight / 2 * ((parameters - start) / PRIOR_STD).square().sum()
        loss = prior - log_density(bounded(parameters)) / max(count, 1)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return bounded(parameters.detach())


def _below(most: float, value: Tensor) -> Tensor:
    """Return a smooth approximation of min(value, most) that stays below ``most``, to bound fitted parameters."""
    return most - torch.nn.functional.softplus(most - value)


def _at_once(data: Series) -> NDArray[Any]:
    """Return, per channel, the mean over time of the number of series under way, (channels,).

    A series is under way from its first to its last sample with a value of the channel.
    """
    t = data.t.double().unsqueeze(-1)
    first, last = torch.where(data.mask, t, torch.inf).amin(1), torch.where(data.mask, t, -torch.inf).amax(1)
    return ((last - first).clamp(min=0.0).sum(0) / (last.amax(0) - first.amin(0))).nan_to_num().numpy()


def _starts(rows: _Rows, gap: float, most: float, size: int) -> tuple[Tensor, Tensor]:
    """Return initial values of log ω and log ζ, (size,) each: one slow, one strongly damped, others at spectral peaks.

    Peaks are found one at a time: a line and the sines of the previous peaks are fitted by least squares and
    subtracted. The damping ratio of a peak gives it the spectral width of an undamped sine of the same duration.

    Arguments:
        rows: the sequences.
        gap: the median time between samples.
        most: the largest log ω.
        size: number of oscillators.
    """
    t, seen = rows.t - rows.t[:, :1], rows.seen.to(rows.x.dtype)
    span = float(t[:, -1].max()) or gap
    cycles = min(max(math.exp(most) * span / (2 * math.pi), 2.0), 4.0 * int(seen.sum()))
    cells = math.ceil(16 * cycles)  # number of cells of the regular grid
    index = (t / span * cells).round().long()
    number = torch.arange(math.ceil(4 * cycles), dtype=t.dtype)  # frequencies in quarters of a cycle per span
    basis, is_free, found = torch.stack([seen, seen * t / span], -1), number > 5, []
    for _ in range(size):
        x = rows.x - (basis @ torch.linalg.lstsq(basis, rows.x.unsqueeze(-1), driver="gelsd").solution).squeeze(-1)
        grid = x.new_zeros(len(x), cells + 1).scatter_add(1, index, x)
        power = torch.fft.rfft(grid, 4 * cells).abs().square() / seen.sum(1, keepdim=True)
        found.append(number[torch.where(is_free, power.sum(0)[: len(number)], -1.0).argmax().clamp(min=1)])
        is_free &= (number - found[-1]).abs() > 4
        angle = found[-1] * (math.pi / 2 / span) * t
        basis = torch.cat([basis, torch.stack([seen * angle.cos(), seen * angle.sin()], -1)], -1)
    peaks = (torch.stack(found) * (math.pi / 2 / span)).log()
    slow, rough = peaks.new_tensor([[math.log(2 * math.pi / span)], [-math.log(gap)]])
    omega = torch.cat([slow, peaks[:1], rough, peaks[1:]])[:size].clamp(max=most - 0.1)
    width = math.log(2 / span) - omega
    width[:3:2] = 0.0
    return omega, width


def _windows(rows: _Rows, rng: Any, few: bool) -> _Rows:
    """Cut windows of successive samples at random positions from the sequences. Return them as sequences.

    For few series (``few=True``) there are as many windows as sequences, and they are longer.
    """
    counts = rows.seen.sum(1).tolist()
    number = sum(count > 0 for count in counts) if few else WINDOWS
    length = max(WINDOW, SAMPLES // number) if few else WINDOW
    starts = [(row, k) for row, count in enumerate(counts) for k in range(0, count, length)]
    chosen = torch.tensor([starts[i] for i in rng.permutation(len(starts))[:number]])
    index = chosen[:, 1:] + torch.arange(min(length, rows.x.shape[1]))
    inside = index < rows.x.shape[1]
    index = index.clamp(max=rows.x.shape[1] - 1)
    x, t, seen = (z[chosen[:, :1], index] for z in rows)
    return _Rows(torch.where(inside, x, 0.0), t, seen & inside)


def _parts(rows: _Rows, at: Tensor, copies: int) -> Iterator[tuple[_Rows, Tensor]]:
    """Divide the sequences into chunks whose results fit in memory. Yield pairs of a chunk and its times in ``at``.

    ``at`` (batch, K) holds the times at which results are computed; those of a chunk are (sequences, K). ``copies`` is
    the number of results that are computed for each sequence.
    """
    at = at.repeat_interleave(len(rows.x) // len(at), 0)
    size = max(1, MOST_VALUES // ((rows.x.shape[1] + at.shape[1]) * copies))
    for k in range(0, len(at), size):
        yield rows.select(slice(k, k + size)), at[k : k + size]


def _with_observed(mean: Tensor, at: Tensor, data: Series) -> Tensor:
    """Replace means (batch, channels, K) by the observed value wherever the time ``at`` (batch, K) has one."""
    t, seen = data.t.double().unsqueeze(1), data.mask.transpose(1, 2)
    steps = torch.arange(t.shape[-1]).expand(seen.shape)
    last = torch.where(seen, steps, -1).cummax(-1).values  # index of the last observed sample up to each sample
    rounding = 1e-9 * (t[..., -1] - t[..., 0]) + ROUNDING * t.abs().amax(-1)  # shape (batch, 1)
    before = torch.searchsorted(data.t.double().contiguous(), at + rounding, right=True) - 1
    index = last.gather(-1, before.clamp(min=0).unsqueeze(1).expand(-1, last.shape[1], -1))
    times, values = (z.expand(seen.shape).gather(-1, index.clamp(min=0)) for z in (t, data.x.transpose(1, 2).double()))
    is_there = (index >= 0) & (before >= 0).unsqueeze(1) & ((times - at.unsqueeze(1)).abs() <= rounding.unsqueeze(-1))
    return torch.where(is_there, values, mean)
