"""Features of series: oscillators against other solvers, what must not change them, and scikit-learn's checks."""

import dataclasses
import pickle
import re
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, clone
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import FeatureUnion
from sklearn.utils.estimator_checks import parametrize_with_checks

import hbnode
from hbnode.features import OscillatorFeatures, RocketFeatures, oscillator_states

COLUMNS = "the columns of X are times, and a series may have any number of them"
EXPECTED = {"check_n_features_in", "check_n_features_in_after_fitting", "check_transformer_general"}


def make_series(count=12, channels=2, seed=0):
    """Irregular series of different lengths, a third of the values missing, as pairs (t, x)."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        t = np.sort(random.uniform(0, 10, random.integers(5, 30)))
        x = np.sin((1 + i % 2) * t[:, None] + np.arange(channels)) + 0.1 * random.normal(size=(len(t), channels))
        found.append((t, np.where(random.random(x.shape) < 0.3, np.nan, x)))
    return found


def bank(size=6, seed=0):
    random = np.random.default_rng(seed)
    return np.geomspace(0.01, 2, size), random.uniform(0.05, 0.95, size)


@pytest.mark.parametrize("at_rest", [0, 1])
def test_states_under_a_linear_force_are_those_of_the_closed_form(at_rest):
    random = np.random.default_rng(1)
    t = np.sort(random.uniform(0, 20, (1, 40)))
    t[0, 7] = t[0, 6] + 1e-3
    frequency, ratio = (each[at_rest::2] for each in bank())
    size = len(frequency)
    u = random.normal(size=(1, 40, size))
    both = [np.repeat(each, 2, axis=-1) for each in (u, frequency, ratio)]  # the second of each pair starts at rest
    found = np.stack(oscillator_states(t, *both))[:, :, 0, at_rest::2]
    omega = 2 * np.pi * frequency
    x, v = u[0, 0] * at_rest, np.zeros(size)
    for i in range(1, 40):
        gap, (start, end) = t[0, i] - t[0, i - 1], u[0, i - 1 : i + 1]
        slope = (end - start) / gap
        lag = 2 * ratio * slope / omega  # u - lag is the solution that follows the force
        step = hbnode.nn.functional.oscillator_step(*map(torch.from_numpy, (2 * ratio * omega, omega**2)), gap)
        vv, vx, xv, xx = (entry.numpy() for entry in step)
        dv, dx = v - slope, x - (start - lag)
        x, v = xv * dv + xx * dx + end - lag, vv * dv + vx * dx + slope
        scale = 1 + np.abs(slope / omega)
        expected = np.stack([x, v / omega, end - 2 * ratio * v / omega - x])
        assert np.abs((found[:, i] - expected) / scale).max() < 1e-10


TRANSFORMERS = {
    "oscillators": OscillatorFeatures(8, random_state=0),
    "one": OscillatorFeatures(1, frequency=(0.01, 3.0), random_state=0),
    "rocket": RocketFeatures(168, random_state=0),
    "last": RocketFeatures(84, reconstruction="last", grid=20, random_state=0),
}


@pytest.mark.parametrize("transformer", TRANSFORMERS.values(), ids=TRANSFORMERS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), channels=st.sampled_from([1, 3]), has_ties=st.booleans())
def test_each_series_depends_on_itself_alone(transformer, seed, channels, has_ties):
    def draw(count):
        for length in random.integers(1, 50, count):
            times = random.integers(0, 25, length).astype(float) if has_ties else random.uniform(0, 25, length)
            x = random.normal(size=(length, channels))
            yield np.sort(times), np.where(random.random(x.shape) < random.choice([0, 0.3, 0.9]), np.nan, x)

    random = np.random.default_rng(seed)
    train, series = list(draw(10)), list(draw(5))
    features = clone(transformer).fit([*train, (np.r_[0.0, 25], np.zeros((2, channels)))])
    whole, order = features.transform(series), random.permutation(5)
    assert (np.concatenate([features.transform([one]) for one in series]) == whole).all()
    assert (features.transform([series[i] for i in order]) == whole[order]).all()
    padded = hbnode.data.as_series(series)
    x, t, mask = (torch.cat([z, z[:, -1:].expand(-1, 9, *z.shape[2:])], 1) for z in (padded.x, padded.t, padded.mask))
    mask[:, -9:] = False
    np.testing.assert_allclose(features.transform(dataclasses.replace(padded, x=x, t=t, mask=mask)), whole, rtol=1e-9)


def test_jobs_and_windows_of_a_long_series_change_nothing(monkeypatch):
    series = make_series(13)
    features = OscillatorFeatures(8, random_state=0).fit(series)
    whole = features.transform(series)
    with joblib.parallel_config("threading"):
        assert (features.set_params(n_jobs=2).transform(series) == whole).all()
    monkeypatch.setattr(hbnode.features, "_WINDOW", 7)
    np.testing.assert_allclose(features.set_params(n_jobs=None).transform(series), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize(("scale", "shift"), [(1 + 1e-13, 0.0), (3e-7, 0.0), (1e7, 0.0), (0.1, 1e3)])
def test_units_of_time_and_of_values_do_not_matter(is_constant, scale, shift):
    series = [(t, np.where(is_constant, np.nanmean(x, 0, keepdims=True), x)) for t, x in make_series(20)]
    changed = [(3600 * t + 5e4, scale * x + shift) for t, x in series]
    for second in (3600, None):  # with frequencies in that unit, or those of the data
        first, other = (
            OscillatorFeatures(8, frequency=second and (0.02 / unit, 1.0 / unit), random_state=0).fit_transform(each)
            for each, unit in ((series, 1), (changed, second))
        )
        np.testing.assert_allclose(first, other, rtol=0, atol=1e-9 if shift == 0 else 1e-7)


def test_other_origins_are_shifted_and_other_units_refused():
    series = dataclasses.replace(hbnode.data.as_series(make_series()), unit=3600.0, origin=np.datetime64("2024-01-01"))
    other = dataclasses.replace(series, t=series.t + 48, origin=np.datetime64("2023-12-30"))
    for features in (OscillatorFeatures(4, random_state=0), RocketFeatures(84, random_state=0)):
        features.fit(series)
        np.testing.assert_allclose(features.transform(other), features.transform(series), atol=1e-9)
        for unit, origin in ((60.0, series.origin), (3600.0, None), (None, None)):
            wrong = dataclasses.replace(series, t=series.t * 60, unit=unit, origin=origin)
            with pytest.raises(ValueError, match=r"times must be as in fit, dates in units of 3600 s, got .* Fix"):
                features.transform(wrong)


@pytest.mark.parametrize(
    ("gaps", "step"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 500], 1.0),  # integer times in bursts
        ([0.1, 0.2, 0.3], 0.1),
        ([5, 7, 11, 13], 7 / 4),  # the lattice is finer than a quarter of the median gap
        ([1.0, np.pi, np.e, np.sqrt(2)], np.sqrt(2) / 4),
    ],
)
def test_the_step_is_that_of_the_lattice_of_times(gaps, step):
    t = np.r_[0, np.tile(gaps, 6)].cumsum()
    for count in (1, 20):
        assert OscillatorFeatures(4, random_state=0).fit([(t, np.sin(t))] * count).step_ == pytest.approx(step)


def test_a_wrong_time_changes_no_frequency_and_no_grid_and_there_is_a_warning():
    series = [(t, np.nan_to_num(x)) for t, x in make_series(60, channels=1)]
    t, x = series[17]
    wrong = [*series[:17], (np.r_[t[:-1], 3e6], x), *series[18:]]
    right = OscillatorFeatures(8, random_state=0).fit(series)
    named = r"1 of 60 series last much longer .* series 17 \(id 17\): 3e\+06, where the others last at most 9.* Fix"
    with pytest.warns(UserWarning, match=named):
        features = OscillatorFeatures(8, random_state=0).fit(wrong)
    np.testing.assert_allclose(features.frequency_, right.frequency_, rtol=0.02)
    with pytest.warns(UserWarning, match=named):
        rocket = RocketFeatures(84, random_state=0).fit(wrong)
    assert rocket.grid_[-1] < 10


def test_a_long_series_with_as_many_samples_is_no_wrong_time():
    series = [(np.arange(20.0), np.sin(np.arange(20.0)))] * 30 + [(np.arange(2000.0), np.sin(np.arange(2000.0)))]
    assert OscillatorFeatures(4, random_state=0).fit(series).span_ == 1999
    assert RocketFeatures(84, random_state=0).fit(series).grid_[-1] == 1999


@pytest.mark.parametrize("transformer", [TRANSFORMERS["one"], TRANSFORMERS["rocket"]], ids=["oscillators", "rocket"])
def test_names_for_column_transformer_union_and_pandas(transformer):
    x = np.random.default_rng(0).normal(size=(10, 30))
    columns = [("series", clone(transformer), slice(0, 20)), ("rest", "passthrough", slice(20, 30))]
    table = ColumnTransformer(columns).set_output(transform="pandas").fit_transform(x)
    assert table.columns.is_unique
    series = dataclasses.replace(hbnode.data.as_series(make_series(10)), features=["a", "b"])
    series = dataclasses.replace(series, static=torch.zeros(10, 2), static_features=["age", "a_mean"])
    union = FeatureUnion([("one", clone(transformer)), ("other", OscillatorFeatures(2))]).set_output(transform="pandas")
    assert union.fit_transform(series).columns.is_unique
    with pytest.raises(TypeError, match=re.escape("table.to_numpy() for one series in each row.")):
        clone(transformer).fit(table)


def test_absent_channels_single_samples_and_static_features_have_finite_features():
    series = hbnode.data.as_series(make_series(4))
    series.mask[0, :, 1] = False
    series.x[0, :, 1] = torch.nan
    static = torch.tensor([[1.0, 3.0], [torch.nan, 1.0], [3.0, 1.0], [5.0, torch.nan]])
    series = dataclasses.replace(series, static=static, static_features=["age", "ward"])
    features = OscillatorFeatures(4, random_state=0).fit(series)
    found = features.transform(series)
    names = features.get_feature_names_out().tolist()
    assert found.shape == (4, len(names))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:, -2:], [[1, 3], [3, 1], [3, 1], [5, 5 / 3]])
    assert (found[0, [names.index(f"x1_{what}") for what in ("mean", "first", "log_count")]] == 0).all()
    alone = OscillatorFeatures(4, random_state=0).fit_transform([([2.0], [1.0]), ([3.0], [5.0]), ([0.0], [np.nan])])
    assert np.isfinite(alone).all()


def test_summaries_and_pooled_statistics_are_what_their_names_say():
    t, x, spread = np.array([1.0, 2.0, 3.8, 4.8]), np.array([2.0, np.nan, 6.0, 4.0]), np.sqrt(8 / 3)
    features = OscillatorFeatures(2, frequency=(1e-9, 1e-9), random_state=0).fit([(t, x)])
    # An oscillator too slow to move: its acceleration is u, or u less the first u where it starts in equilibrium
    gaps = np.repeat(np.diff(t) / [4, 7, 4], [4, 7, 4])  # in parts of about a quarter of the median gap
    weights = (np.r_[gaps, 0] + np.r_[0, gaps]) / 2 / 3.8
    line = np.interp(np.r_[0, gaps].cumsum(), [0, 2.8, 3.8], [2, 6, 4])
    values = (line - 4) / spread
    scale, deviation = values.std(), np.sqrt((values - values @ weights) ** 2 @ weights)
    expected = {
        "x0_minimum": -2 / spread,
        "x0_first": -2 / spread,
        "x0_last": 0,
        "x0_log_count": np.log(4),
        "oscillator0_acceleration_mean": values @ weights / scale,
        "oscillator1_acceleration_mean": (values - values[0]) @ weights / scale,
        "oscillator0_acceleration_spread": deviation / scale,
        "oscillator0_acceleration_log_maximum": np.log(2 / spread / scale + 1e-3),
        "oscillator0_acceleration_time_of_maximum": 2.8 / 3.8,
        "oscillator0_acceleration_share4": weights[line > np.median(line)].sum(),
    }
    found = dict(zip(features.get_feature_names_out(), features.transform([(t, x)])[0], strict=True))
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("transformer", [OscillatorFeatures(8), RocketFeatures(168)], ids=["oscillators", "rocket"])
def test_random_state_decides_everything_and_numpy_s_own_state_stays(transformer):
    series = make_series(channels=3)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, same, other = (clone(transformer).set_params(random_state=seed).fit(series) for seed in (0, 0, 1))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    for equal in (same, pickle.loads(pickle.dumps(first))):
        np.testing.assert_array_equal(first.transform(series), equal.transform(series))
    assert not np.array_equal(first.transform(series), other.transform(series))


@parametrize_with_checks(
    [OscillatorFeatures(4, random_state=0), RocketFeatures(84, random_state=0)],
    expected_failed_checks=lambda _: dict.fromkeys(EXPECTED, COLUMNS),
)
def test_scikit_learns_checks_pass(estimator, check):
    check(estimator)


class Line(BaseEstimator):
    """Linear interpolation of the first channel, by hand."""

    def fit(self, series):
        self.fitted_ = True
        return self

    def posterior(self, series, grid):
        rows = zip(series.t.numpy(), series.x[..., 0].numpy(), series.lengths.tolist(), strict=True)
        return SimpleNamespace(mean=np.stack([np.interp(grid, t[:n], x[:n]) for t, x, n in rows])[:, None])


def test_rocket_sees_the_values_between_samples():
    random = np.random.default_rng(0)
    grid = np.arange(20.0)
    knots = [np.r_[0.0, np.sort(random.choice(np.arange(1.0, 19), 6, replace=False)), 19.0] for _ in range(8)]
    series = [(t, random.normal(size=8)) for t in knots]
    line = np.array([np.interp(grid, t, x) for t, x in series])
    last = np.array([x[np.searchsorted(t, grid, side="right") - 1] for t, x in series])
    for reconstruction, values in (("linear", line), ("last", last), (Line(), line)):
        rocket = RocketFeatures(84, reconstruction=reconstruction, grid=20, random_state=0).fit(series)
        np.testing.assert_allclose(rocket.grid_, grid)
        full = [(grid, each) for each in values]
        np.testing.assert_allclose(rocket.transform(full), rocket.transform(series), atol=0.051)
        assert np.abs(rocket.transform(full) - rocket.transform(series)).mean() < 1e-3
    assert len(RocketFeatures(84, random_state=0).fit([(grid[1:], line[0, 1:]), (grid[:5], line[0, :5])]).grid_) == 20


def test_rocket_restores_the_number_of_threads():
    """The first kernels that numba runs in a process set the number of OpenMP's threads, which is torch's."""
    rocket = RocketFeatures(84, random_state=0).fit([(np.arange(9.0), np.arange(9.0))] * 2)

    def transform(values):
        torch.set_num_threads(3)
        return np.zeros((len(values), 84))

    rocket.kernels_ = SimpleNamespace(transform=transform)
    rocket.transform([(np.arange(9.0), np.arange(9.0))] * 2)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("transformer", "message"),
    [
        (OscillatorFeatures(damping_ratio=(0.1, 1.5)), r"damping_ratio must be .* < 1.0, got \(0.1, 1.5\)"),
        (RocketFeatures(84, reconstruction="cubic"), "reconstruction must be one of"),
        (RocketFeatures(84, grid=[0.0, 1.0]), "grid must be at least 9 increasing times"),
    ],
    ids=["damping", "reconstruction", "grid"],
)
def test_arguments_that_are_refused(transformer, message):
    with pytest.raises(ValueError, match=message):
        transformer.fit(make_series())
