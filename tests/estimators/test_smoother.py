"""Reconstruction by noisy oscillators against dense covariances, and what it does with the forms of data."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pandas
import pytest
import torch

pytest.importorskip("sklearn")
from scipy.stats import multivariate_normal, multivariate_t
from sklearn.exceptions import NotFittedError

import hbnode
from hbnode.data import as_series
from hbnode.estimators import OscillatorSmoother


def pairs(count, samples, seed=0, noise=0.2):
    """Noisy waves of random phases and amplitudes, at random times."""
    rng = np.random.default_rng(seed)
    series = []
    for _ in range(count):
        t = np.sort(rng.uniform(0, 10, samples))
        x = 3 + rng.gamma(2.0) * np.sin(2 * t + rng.uniform(0, 6)) + noise * rng.normal(size=samples)
        series.append((t, x))
    return series


def kernel(smoother, t, s):
    """The covariance of the signal at times t and s, for a standard deviation 1 of the data."""
    layer, gaps = smoother.layer_, torch.as_tensor(np.abs(np.subtract.outer(t, s)))
    step = hbnode.nn.functional.oscillator_step(layer.damping, layer.stiffness, gaps.unsqueeze(-1))
    return (step.xx * (2 * layer.log_spread).exp()).sum(-1).numpy()


@pytest.fixture(scope="module")
def fitted():
    return OscillatorSmoother(2, mean="constant", max_iter=15, random_state=0).fit(pairs(12, 30))


def changed(fitted, **options):
    """The smoother with other options, as if it had been fitted with them."""
    return copy.copy(fitted).set_params(**options)


@pytest.mark.parametrize("student", [True, False])
def test_likelihood_and_posterior_are_those_of_the_dense_distribution(fitted, student):
    smoother = changed(fitted, student=student, keep_observed=False)
    (t, x), grid = pairs(1, 12, seed=5)[0], np.array([-1.0, 2.5, 2.6, 11.0])
    scale, level, nu = smoother.scale_[0], smoother.level_[0], 2 + math.exp(fitted.log_excess_[0])
    noise = smoother.noise_std[0] / scale
    z, covariance = (x - level) / scale, kernel(smoother, t, t) + noise**2 * np.eye(12)
    if student:
        right = multivariate_t(np.zeros(12), covariance, nu).logpdf(z)
        factor = (nu + z @ np.linalg.solve(covariance, z)) / (nu + 12 - 2)
    else:
        right, factor = multivariate_normal(np.zeros(12), covariance).logpdf(z), 1.0
    factor *= 360 / (360 - 8)  # 360 values, and eight fitted numbers
    np.testing.assert_allclose(smoother.log_likelihood([(t, x)]), right - 12 * math.log(scale), rtol=0, atol=1e-9)
    weights = np.linalg.solve(covariance, kernel(smoother, t, grid)).T
    posterior = factor * scale**2 * (kernel(smoother, grid, grid) - weights @ kernel(smoother, t, grid))
    found = smoother.posterior([(t, x)], grid, paths=4000)
    np.testing.assert_allclose(found.mean[0, 0], level + scale * weights @ z, rtol=0, atol=1e-8)
    np.testing.assert_allclose(found.std[0, 0], np.sqrt(posterior.diagonal()), rtol=0, atol=1e-8)
    drawn, std = np.cov(found.paths[:, 0, 0].T), found.std[0, 0]
    assert (np.abs(drawn - posterior) < 0.12 * np.outer(std, std)).all()
    with_noise = np.sqrt(posterior.diagonal() + factor * smoother.noise_std[0] ** 2)
    ahead = smoother.forecast([(t, x)], grid).std[0, :, 0]
    for std in (ahead, smoother.posterior([(t, x)], grid, noise=True).std[0, 0]):
        np.testing.assert_allclose(std, with_noise, rtol=0, atol=1e-8)
    empty = smoother.posterior([(t, np.full(12, np.nan))], grid).std[0, 0] ** 2
    prior = 360 / (360 - 8) * (nu / (nu - 2) if student else 1.0) * scale**2 * kernel(smoother, grid, grid).diagonal()
    np.testing.assert_allclose(empty, prior, rtol=1e-9, atol=0)


def test_the_fit_finds_the_noise_and_its_bands_hold_what_they_say():
    train, test = pairs(60, 40), pairs(60, 40, seed=1)
    smoother = OscillatorSmoother(mean="constant", max_iter=30, random_state=0).fit(train)
    assert 0.15 < smoother.noise_std[0] < 0.25
    held = [(t[::2], x[::2]) for t, x in test]
    at, x = np.stack([t[1::2] for t, _ in test]), np.stack([x[1::2] for _, x in test])
    mean, std, _ = smoother.posterior(held, at, noise=True)
    assert 0.85 < (np.abs(x - mean[:, 0]) < 1.645 * std[:, 0]).mean() < 0.95


def test_one_series_of_a_trend_seasons_and_noise():
    rng, t = np.random.default_rng(0), np.arange(160.0)
    signal = 0.02 * t + np.sin(2 * np.pi * t / 12) + 0.5 * np.sin(2 * np.pi * t / 5.3 + 1)
    x = signal + 0.2 * rng.normal(size=160)
    held = (rng.random(160) < 0.2) | ((t > 70) & (t < 90))
    series = [(t[~held], x[~held])]
    mean, std, _ = OscillatorSmoother(max_iter=20, random_state=0).fit(series).posterior(series, t[held])
    assert np.abs(mean[0, 0] - signal[held]).mean() < 0.1  # half the noise; a constant has 1.0 at best
    assert 0.02 < std.mean() < 0.2


def test_the_mean_is_shared_if_ten_series_are_observed_at_a_time():
    def is_shared(series):
        return OscillatorSmoother(1, max_iter=1, random_state=0).fit(series).is_shared_.tolist()

    assert is_shared(pairs(9, 20)) == [False]
    assert is_shared(pairs(14, 20)) == [True]
    assert is_shared([(t + 12 * i, x) for i, (t, x) in enumerate(pairs(14, 20))]) == [False]  # one after another
    array = np.random.default_rng(0).normal(size=(14, 2, 20))
    array[4:, 1] = np.nan  # four series have the second channel
    assert is_shared(array) == [True, False]


@pytest.mark.parametrize("seed", range(2))
def test_sparse_channels_and_equal_times_agree_with_dense_distributions(seed):
    rng = np.random.default_rng(seed)
    smoother = OscillatorSmoother(2, "constant", keep_observed=False, student=False, max_iter=2, random_state=0)
    smoother.fit([(np.arange(8.0), rng.normal(size=(8, 2))) for _ in range(3)])
    smoother.range_ *= 1e9  # no mean is clipped
    t, x = np.sort(rng.uniform(0, 5, 15)), rng.normal(size=(15, 2))
    t[6], x[rng.random((15, 2)) < 0.4] = t[5], np.nan
    grid, noise, likelihood = np.array([-1.0, t[5], 2.2, 30.0]), math.exp(smoother.log_noise_[0]), 0.0
    found = smoother.posterior([(t, x)], grid)
    for k, (scale, level) in enumerate(zip(smoother.scale_, smoother.level_, strict=True)):
        seen = np.isfinite(x[:, k])
        s, z = t[seen], (x[seen, k] - level) / scale
        covariance = kernel(smoother, s, s) + noise**2 * np.eye(len(s))
        weights = np.linalg.solve(covariance, kernel(smoother, s, grid)).T
        variance = (kernel(smoother, grid, grid) - weights @ kernel(smoother, s, grid)).diagonal()
        std = smoother.widening_ * scale * np.sqrt(variance)
        np.testing.assert_allclose(found.mean[0, k], level + scale * weights @ z, rtol=0, atol=1e-8)
        np.testing.assert_allclose(found.std[0, k], std, rtol=0, atol=1e-8)
        likelihood += multivariate_normal(np.zeros(len(s)), covariance).logpdf(z) - len(s) * math.log(scale)
    np.testing.assert_allclose(smoother.log_likelihood([(t, x)]), likelihood, rtol=0, atol=1e-8)


def test_a_shared_mean_fills_what_aligned_series_have_in_common():
    rng, times = np.random.default_rng(0), np.arange(60.0)
    shape = np.where(times < 30, 0.0, 4.0) + np.sin(times / 3)
    full = [shape + 0.3 * rng.normal() for _ in range(80)]
    series = [(times[i], x[i]) for x in full for i in [np.sort(rng.choice(60, 4, replace=False))]]
    errors = {}
    for mean in ("shared", "constant"):
        found = OscillatorSmoother(mean=mean, max_iter=15, random_state=0).fit(series).posterior(series, times)
        errors[mean] = float(np.abs(found.mean[:, 0] - np.stack(full)).mean())
    assert errors["shared"] < 0.3 < 0.6 < errors["constant"]


def test_observed_values_are_kept_and_means_stay_in_the_range_of_the_data(fitted):
    series = pairs(3, 20, seed=2)
    grid = np.concatenate([series[0][0][:5], [100.0]])
    kept = fitted.posterior(series, grid).mean
    np.testing.assert_array_equal(kept[0, 0, :5], series[0][1][:5])
    np.testing.assert_array_equal(kept[1:], changed(fitted, keep_observed=False).posterior(series, grid).mean[1:])
    steep = fitted.posterior([(np.array([0.0, 0.01]), np.array([0.0, 1e3]))], np.linspace(0.1, 1, 10)).mean
    assert steep.max() < 1.5 * fitted.range_[1].max()


def test_forms_of_data_agree():
    array = np.random.default_rng(0).normal(size=(6, 2, 25)).cumsum(-1)
    array[0, 1, 3:9] = array[1, :, 4] = np.nan
    array[2, :, 20:] = np.nan  # padding
    smoother = OscillatorSmoother(random_state=0, max_iter=5).fit(array)
    filled, known = smoother.impute(array), np.isfinite(array)
    np.testing.assert_array_equal(filled[known], array[known])
    assert np.isnan(filled[2, :, 20:]).all()
    assert np.isfinite(np.delete(filled, 2, 0)).all()
    whole = smoother.impute(as_series(array))
    assert whole.mask.sum((1, 2)).tolist() == [50, 50, 40, 50, 50, 50]
    np.testing.assert_array_equal(whole.x[0].T, filled[0])
    listed = smoother.impute([(np.arange(25.0), row.T) for row in array[:2]])
    np.testing.assert_allclose(listed[0][1].T, filled[0], rtol=0, atol=1e-12)
    again = pickle.loads(pickle.dumps(smoother)).posterior(array, np.arange(25.0))
    np.testing.assert_allclose(again.mean[0], filled[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("keep_observed", [True, False])
def test_causal_imputation_is_the_posterior_given_the_past(fitted, keep_observed):
    smoother = changed(fitted, keep_observed=keep_observed)
    t, x = pairs(1, 30, seed=4)[0]
    t[12], is_missing = t[11], np.random.default_rng(0).random(30) < 0.4
    x[is_missing] = np.nan
    filled = smoother.impute([(t, x)], causal=True)[0][1]
    for k in range(1, 30):
        right = smoother.posterior([(t[: k + 1], x[: k + 1])], t[k : k + 1]).mean[0, 0, 0]
        if k != 11:  # of two values at one time the posterior takes the last
            np.testing.assert_allclose(filled[k], right, rtol=0, atol=1e-8)
    x[20:] = 9.0
    np.testing.assert_array_equal(smoother.impute([(t, x)], causal=True)[0][1][:20], filled[:20])


def test_values_behind_the_mask_do_not_matter():
    data = as_series(np.random.default_rng(0).normal(size=(4, 2, 25)))
    mask = torch.rand(4, 25, 2, generator=torch.Generator().manual_seed(0)) < 0.6
    found = []
    for hidden in (data.x, torch.full_like(data.x, torch.nan), torch.full_like(data.x, 1e30)):
        each = dataclasses.replace(data, x=torch.where(mask, data.x, hidden), mask=mask)
        smoother = OscillatorSmoother(max_iter=3, random_state=0).fit(each)
        filled = smoother.impute(each).x, smoother.impute(each, causal=True).x
        found.append([*smoother.posterior(each, [3.5, 40.0])[:2], *filled, smoother.log_likelihood(each)])
    for right, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, right)


def test_times_count_as_in_the_training_data():
    def fit(series, mean="shared"):
        return OscillatorSmoother(1, mean=mean, max_iter=3, random_state=0).fit(series)

    series = [(1.7e9 + t / 10, x) for t, x in pairs(6, 20)]  # steps below 0.1 s, in seconds since 1970
    found = fit(series, "constant").posterior(series, np.stack([t for t, _ in series])).mean[:, 0]
    np.testing.assert_array_equal(found, np.stack([x for _, x in series]))
    dates = [(np.datetime64("2024-01-01T00", "s") + (60 * t).astype("timedelta64[s]"), x) for t, x in pairs(6, 20)]
    local = [(pandas.DatetimeIndex(t).tz_localize("Asia/Tokyo"), x) for t, x in dates]
    hours, at = as_series(dates, unit="h", origin="2024-01-01"), np.array(["2024-01-01T00:03"], "datetime64[m]")
    shared, constant = fit(hours), fit(hours, "constant")
    right = shared.posterior(hours, hours.times(at).numpy()).mean
    np.testing.assert_array_equal(shared.posterior(hours, at).mean, right)
    for other in (as_series(dates), as_series(dates, unit="h"), pairs(6, 20)):
        with pytest.raises(ValueError, match="unit and the origin of time as in fit"):
            shared.posterior(other, [0.0])
    with pytest.raises(ValueError, match="a time zone, as in fit"):
        fit(dates).posterior(local, [0.0])
    moved = constant.posterior(as_series(local, unit="h"), at + np.timedelta64(-9, "h")).mean  # any origin will do
    np.testing.assert_allclose(moved, constant.posterior(hours, at).mean, rtol=0, atol=1e-6)


def test_channels_and_series_with_few_values():
    array = np.full((6, 3, 25), np.nan)
    array[:, 0] = np.random.default_rng(0).normal(size=(6, 25))
    array[2, 1, 4] = 5.0
    smoother = OscillatorSmoother(max_iter=3, random_state=0).fit(array)
    filled = smoother.impute(array)
    assert (filled[:, 1] == 5.0).all()
    assert np.isnan(filled[:, 2]).all()
    std = smoother.posterior(array, [3.0], noise=True).std
    assert np.isfinite(std[:, 0]).all()
    assert np.isinf(std[:, 1:]).all()  # one value or none tells nothing of a spread
    array[0, 2, 3] = 1.0  # a channel that the fit has never seen
    again = smoother.impute(array)
    assert again[0, 2, 3] == 1.0
    np.testing.assert_array_equal(again[:, :2], filled[:, :2])
    equal = OscillatorSmoother(max_iter=3, random_state=0).fit([([0.0, 1.0, 2.0], [0.1, 0.1, 0.1])])
    mean, std, _ = equal.posterior([([0.0, 1.0], [0.1, 0.1])], [0.0, 0.5, 9.0], noise=True)
    np.testing.assert_allclose(mean, 0.1)
    assert np.isinf(std).all()  # equal values tell nothing of a spread, either
    with pytest.warns(UserWarning, match="no series has two samples of a channel at different times"):
        smoother = OscillatorSmoother(max_iter=3, random_state=0).fit([([i], [i % 3.0]) for i in range(8)])
    assert np.isfinite(smoother.posterior([([1.0], [2.0])], [0.0, 1.0, 50.0]).mean).all()


def test_wrong_uses(fitted):
    with pytest.raises(ValueError, match="fewer than two observed"):
        OscillatorSmoother().fit(np.full((2, 1, 5), np.nan))
    with pytest.raises(NotFittedError, match="not fitted"):
        OscillatorSmoother().posterior(pairs(2, 5), [0.0])
    with pytest.raises(ValueError, match="must have 1 channels as in fit, got 3"):
        fitted.posterior(np.zeros((2, 3, 5)), [0.0])
    with pytest.raises(ValueError, match=r"\(K,\) or \(batch, K\) with batch=2"):
        fitted.posterior(pairs(2, 5), np.zeros((3, 4)))
