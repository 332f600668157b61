"""SeriesClassifier and SeriesRegressor: forms of data, scikit-learn's conventions, files."""

import dataclasses
import re

import numpy
import pandas
import pytest
import skops.io
import torch
from sklearn.base import clone
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from hbnode.data import as_series
from hbnode.estimators import OscillatorSmoother, SeriesClassifier, SeriesForecaster, SeriesRegressor
from hbnode.estimators.models import ALPHAS
from hbnode.features import OscillatorFeatures, RocketFeatures
from tests.models import slow


def swings(count=40, seed=0, classes=2):
    """Irregular sines of two channels, whose frequency is the label, with missing values."""
    random = numpy.random.default_rng(seed)
    labels = numpy.arange(count) % classes
    series = []
    for label in labels:
        t = numpy.sort(random.uniform(0, 10, random.integers(20, 40)))
        x = numpy.stack([numpy.sin((1 + label) * t + random.uniform(0, 6)), random.normal(size=len(t))], 1)
        x[random.uniform(size=x.shape) < 0.2] = numpy.nan
        series.append((t, x))
    return series, numpy.array(["slow", "fast", "faster"])[labels]


def small(model, kind=SeriesClassifier, **options):
    return kind(model, n_members=1, max_epochs=15, hidden_size=8, random_state=0, **options)


@pytest.mark.parametrize("model", ["features", *slow("gru", "odernn")])
def test_frequencies_are_told_apart_and_files_keep_the_answer(model, tmp_path):
    series, labels = swings(100)
    classifier = SeriesClassifier(model, n_members=1, max_epochs=40, learning_rate=0.02, hidden_size=16, random_state=0)
    classifier.fit(series[:80], labels[:80])
    assert classifier.score(series[80:], labels[80:]) >= 0.8
    probability = classifier.predict_proba(series)
    numpy.testing.assert_allclose(probability.sum(1), 1.0)
    classifier.save(tmp_path / "model")
    loaded = SeriesClassifier.load(tmp_path / "model")
    numpy.testing.assert_array_equal(loaded.predict_proba(series), probability)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_series_go_through_cross_validation_and_pipelines():
    series, labels = swings(30)
    for data in (series, as_series(series)):
        assert cross_val_score(small("features"), data, labels, cv=2).mean() > 0.8
    pipeline = make_pipeline(FunctionTransformer(as_series), small("features")).fit(series, labels)
    assert pipeline.score(series, labels) > 0.8


@pytest.mark.parametrize("model", ["features", *slow("gru")])
def test_targets_keep_their_shape_and_unit(model):
    series, _ = swings(40)
    means = numpy.array([1000 + 50 * numpy.nanmean(x[:, 1]) for _, x in series])
    both = SeriesRegressor(model, n_members=1, random_state=0, max_epochs=60).fit(series, numpy.c_[means, -means])
    assert both.score(series, numpy.c_[means, -means]) > 0.7
    one = small(model, SeriesRegressor).fit(series, means)
    assert one.predict(series).shape == (40,)


def test_auto_is_the_mean_of_the_models_that_cross_validation_cannot_tell_apart():
    auto = SeriesClassifier(random_state=0).fit(*bumps(16))
    names = auto.model_.split(" + ")
    assert len(names) == len(auto.members_) > 1
    assert names[0] == min({"features", "rocket, linear", "rocket, last"}, key=auto.cv_loss_.get)
    assert auto.score(*bumps(seed=1)) > 0.9


def test_trees_are_tried_for_static_features():
    static = numpy.random.default_rng(0).uniform(size=(150, 1))
    series = as_series(numpy.random.default_rng(1).normal(size=(150, 1, 8)))
    series = dataclasses.replace(series, static=torch.tensor(static), static_features=["age"])
    labels = abs(static[:, 0] - 0.5) < 0.25
    model = SeriesClassifier("features", random_state=0).fit(series.select(slice(100)), labels[:100])
    assert model.model_ == "features, boosting"
    assert model.score(series.select(slice(100, None)), labels[100:]) > 0.9


def test_a_time_budget_that_is_spent_says_what_it_left_out():
    series, labels = bumps()
    with pytest.warns(UserWarning, match=r"time_budget=0 left out the models \['rocket, linear', "):
        model = SeriesClassifier(time_budget=0, random_state=0).fit(series, labels)
    assert model.model_ == "features"
    assert set(model.left_out_) >= {"rocket, linear", "rocket, last"}
    assert set(model.left_out_.values()) == {"time_budget"}
    whole = SeriesClassifier(time_budget=1e6, random_state=0).fit(series, labels)
    assert "time_budget" not in whole.left_out_.values()


@pytest.mark.parametrize("model", ["features", "rocket"])
def test_static_features_count_among_thousands_of_others(model):
    random, labels = numpy.random.default_rng(0), numpy.arange(80) % 2
    static = torch.tensor(labels[:, None] * 1.0)
    series = as_series([(numpy.sort(random.uniform(0, 10, 20)), random.normal(size=20)) for _ in labels])
    series = dataclasses.replace(series, static=static, static_features=["ward"])
    half = SeriesClassifier(model, reconstruction="linear", random_state=0).fit(series.select(slice(40)), labels[:40])
    assert half.score(series.select(slice(40, None)), labels[40:]) == 1.0
    missing = dataclasses.replace(series, static=torch.full_like(static, torch.nan))
    assert numpy.isfinite(half.predict_proba(missing)).all()


def in_months(series):
    """Series as a table, each in a month of its own."""
    parts = [pandas.DataFrame({"id": f"p{i}", "t": 700.0 * i + t, "x": x}) for i, (t, x) in enumerate(series)]
    return pandas.concat(parts, ignore_index=True)


def bumps(count=24, seed=0):
    """A bump at the hour 12 or 36 of two days, at 30 random hours of 48."""
    random, labels = numpy.random.default_rng(seed), numpy.arange(count) % 2
    times = [numpy.sort(random.permutation(48)[:30]) * 1.0 for _ in labels]
    return [(t, numpy.exp(-((t - 12 - 24 * y) ** 2) / 30)) for t, y in zip(times, labels, strict=True)], labels


def dated(series, start, zone=None):
    return [(pandas.Timestamp(start, tz=zone) + pandas.to_timedelta(t, unit="h"), x) for t, x in series]


@pytest.mark.parametrize("model", ["features", "rocket", "gru", *slow("oscillators", "odernn")])
def test_dates_count_from_the_first_sample_of_each_series(model):
    series, labels = bumps()
    later = dated(series, "2024-03-30", "Europe/Berlin")  # the clocks change in the night
    options = {"max_epochs": 2, "reconstruction": "linear"}
    of_dates = small(model).set_params(**options).fit(dated(series, "2024-01-01", "Europe/Berlin"), labels)
    expected = of_dates.predict_proba(dated(series, "2024-01-01", "Europe/Berlin"))
    numpy.testing.assert_array_equal(of_dates.predict_proba(later), expected)
    of_hours = small(model, clock="relative").set_params(**options).fit(series, labels)
    shifted = [(t + 1e6, x) for t, x in series]
    numpy.testing.assert_allclose(of_hours.predict_proba(shifted), expected, rtol=1e-5)
    absolute = small(model, clock="absolute").set_params(**options).fit(dated(series, "2024-01-01"), labels)
    with pytest.raises(ValueError, match=r"from 2024-01-01T00:.* to 2024-01-02T23:.*series 0 .* from 2024-02-01T"):
        absolute.predict(dated(series, "2024-02-01"))


@pytest.mark.parametrize("kind", [SeriesClassifier, RocketFeatures])
def test_dates_that_count_have_a_time_zone_as_in_fit_or_none(kind):
    series, labels = bumps(10)
    plain, zoned = dated(series, "2024-01-01"), dated(series, "2024-01-01", "UTC")
    options = {"num_features": 84} if kind is RocketFeatures else {"model": "features", "clock": "absolute"}
    for seen, other, word in ((plain, zoned, "without"), (zoned, plain, "with")):
        model = kind(random_state=0, **options).fit(seen, labels)
        with pytest.raises(ValueError, match=f"{word} a time zone, as in fit"):
            model.transform(other) if kind is RocketFeatures else model.predict(other)
    assert small("features").fit(plain, labels).score(zoned, labels) == 1.0  # a relative clock needs no zone


@pytest.mark.parametrize("unit", [None, "s"])
def test_numbers_and_durations_outside_those_of_fit_raise_or_warn(unit):
    series, labels = bumps()

    def at(shift):
        moved = [(t + shift, x) for t, x in series]
        return moved if unit is None else [(pandas.to_timedelta(t, unit=unit), x) for t, x in moved]

    model = small("rocket", reconstruction="linear").fit(at(1.7e9), labels)
    assert model.score(at(1.7e9 + 4), labels) == 1.0  # within a tenth
    with pytest.warns(UserWarning, match=r"series \d+ \(id \d+\) lasts from 17000000.* % of it.*clock='relative'"):
        model.predict(at(1.7e9 + 20))
    for shift in (0.0, 1.8e9):
        with pytest.raises(ValueError, match=r"fit saw nothing there.*clock='relative'"):
            model.predict(at(shift))


@pytest.mark.parametrize("model", ["features", *slow("auto", "gru")])
def test_each_warning_of_times_comes_once_and_at_the_caller(model, recwarn):
    series, labels = bumps()
    wrong = [*series[:-1], (numpy.r_[series[-1][0][:-1], 1e7], series[-1][1])]
    options = {"model": model, "reconstruction": "linear", "n_members": 1, "max_epochs": 1, "random_state": 0}
    found = SeriesClassifier(**options).fit(wrong, labels)
    found.score([(t + 20, x) for t, x in series], labels)
    apart = SeriesClassifier(**options).fit([(t + 1e4 * i, x) for i, (t, x) in enumerate(wrong)], labels)
    apart.predict([(1.3 * t, x) for t, x in series])
    expected = ["1 of 24 series last", "times must.*'relative'", "1 of 24 series last", "times must.*as long"]
    assert [warning.filename for warning in recwarn] == [__file__] * 4
    assert all(re.match(text, str(warning.message)) for text, warning in zip(expected, recwarn, strict=True))


def noise(count=20, samples=4):
    """A table of values that have nothing to do with the labels, the labels, and a function of columns to rows."""
    random, labels = numpy.random.default_rng(0), numpy.random.default_rng(1).permutation(numpy.arange(count) % 2)
    places = {"id": numpy.repeat(numpy.arange(count), samples), "t": numpy.tile(numpy.arange(samples), count)}
    table = pandas.DataFrame(places).assign(x=random.normal(size=count * samples))
    return table, labels, lambda column: numpy.repeat(column, samples)


@pytest.mark.parametrize("missing", [0.0, numpy.nan])
def test_a_column_that_tells_y_is_refused_unless_it_is_named(missing):
    table, labels, rows = noise()
    order = numpy.random.default_rng(0).permutation(20) + 0.0
    gaps = numpy.where(numpy.arange(20) % 3 > 1, missing, 0.0)
    table = table.assign(label=rows(7.5 - 3 * labels + gaps), z=rows(7.5 - 3 * order + gaps))
    for kind, name, y in (
        (SeriesClassifier, "label", numpy.array(["yes", "no"])[labels]),
        (SeriesRegressor, "label", labels + 1.0),
        (SeriesRegressor, "z", numpy.stack([order[::-1] % 7, order**2], 1)),
    ):
        model = small("features", kind, id="id", time="t")
        with pytest.raises(ValueError, match=rf"'{name}'.* equal y or a code of it. Fix: values="):
            model.fit(table, y)
    assert model.set_params(values=["z"]).fit(table, order).features_ == ["z"]


def test_constant_columns_that_were_not_named_are_told():
    table, labels, rows = noise()
    table["age"] = rows(numpy.random.default_rng(2).integers(20, 90, 20))
    model = small("features", id="id", time="t")
    with pytest.warns(UserWarning, match=r"takes the columns \['x', 'age'\], and \['age'\] are constant") as caught:
        model.fit(table, labels)
    assert caught[0].filename == __file__
    assert model.set_params(static=["age"]).fit(table, labels).features_ == ["x"]


@pytest.mark.parametrize(
    ("model", "call"),
    [
        (small("features"), lambda m, s: m.predict_proba(s)),
        (small("gru").set_params(max_epochs=1), lambda m, s: m.predict_proba(s)),
        (SeriesForecaster("last"), lambda m, s: m.predict(s, 1.0)["mean"].to_numpy()),
        (OscillatorFeatures(8, random_state=0), lambda m, s: m.transform(s)),
        (RocketFeatures(84, random_state=0), lambda m, s: m.transform(s)),
        (OscillatorSmoother(max_iter=1), lambda m, s: m.posterior(s, [1.0, 2.0]).mean),
    ],
    ids=["classifier", "network", "forecaster", "oscillators", "rocket", "smoother"],
)
def test_channels_are_matched_by_name(model, call):
    pairs, labels = swings(20)
    series = dataclasses.replace(as_series(pairs), features=["hr", "sbp"])
    y = () if isinstance(model, (SeriesForecaster, OscillatorSmoother)) else (labels,)
    of_pairs, model = clone(model).fit(pairs, *y), model.fit(series, *y)
    expected = call(model, series)
    swapped = dataclasses.replace(series, x=series.x.flip(-1), mask=series.mask.flip(-1), features=["sbp", "hr"])
    for same in (swapped, dataclasses.replace(series, features=()), pairs):  # those without names by position
        numpy.testing.assert_allclose(call(model, same), expected, rtol=1e-9)
    numpy.testing.assert_allclose(call(of_pairs, series), expected, rtol=1e-9)
    with pytest.raises(ValueError, match=r"missing \['sbp'\], unknown \['temp'\]"):
        call(model, dataclasses.replace(series, features=["hr", "temp"]))


def test_labels_are_paired_by_id_in_fit_score_and_cross_validation():
    series, labels = bumps()
    ids = [f"p{i}" for i in range(24)]
    data, by_id = dataclasses.replace(as_series(series), ids=ids), pandas.Series(labels, index=ids)
    data, shuffled = [data[i] for i in range(24)], by_id.sample(frac=1.0, random_state=0)
    model = small("features", id="id", time="t")
    for form in (data, in_months(series)):
        model.fit(form, shuffled)
        assert model.score(form, shuffled) == model.score(form, labels) == 1.0
    weights = pandas.Series(numpy.arange(24.0) % 3, index=ids)
    assert model.score(data, 1 - by_id.where(weights > 0, 1 - by_id), weights.iloc[::-1]) == 0.0
    assert small("features", SeriesRegressor).fit(data, shuffled.astype(float)).score(data, shuffled) > 0.9
    with pytest.raises(ValueError, match=r"y\.loc\[list\(series\.ids\)\]"):
        cross_val_score(model, data, shuffled, cv=2)
    rows = numpy.random.default_rng(0).integers(24, size=30)
    bootstrap = [data[int(i)] for i in rows]
    model.fit(bootstrap, by_id.iloc[rows].sample(frac=1.0, random_state=0))
    assert model.score(bootstrap, labels[rows]) == 1.0


@pytest.mark.parametrize("model", ["features", "gru"])
def test_static_categories_may_be_new_missing_in_some_rows_and_read_as_float(model):
    table, labels, rows = noise()
    table["ward"] = pandas.Series(rows(labels + 1), dtype="category")
    classifier = small(model, id="id", time="t", static="ward", learning_rate=0.02).fit(table, labels)
    assert classifier.score(table, labels) == 1.0
    partly = table["ward"].astype("Int64").where(table.groupby("id").cumcount() > 0)
    expected = classifier.predict_proba(table)
    for ward in (partly, partly.astype(float)):
        numpy.testing.assert_array_equal(classifier.predict_proba(table.assign(ward=ward)), expected)
    assert classifier.predict_proba(table.assign(ward=7)).shape == (20, 2)


@pytest.mark.parametrize("model", ["features", "gru", *slow("rocket", "odernn")])
def test_a_series_without_a_value_has_the_prior(model):
    series, labels = swings(24)
    labels[:16] = "common"
    options = {"reconstruction": "linear", "max_epochs": 2}
    classifier = small(model).set_params(**options).fit(series, labels)
    regressor = small(model, SeriesRegressor).set_params(**options).fit(series, numpy.arange(24.0))
    whole = as_series(series)
    forms = {
        "missing": [(t, numpy.full_like(x, numpy.nan)) for t, x in series],
        "no rows": [([], numpy.zeros((0, 2)))] * 24,
        "no samples": dataclasses.replace(whole, lengths=0 * whole.lengths).select(range(24)),
    }
    for form, empty in forms.items():
        with pytest.warns(UserWarning, match=r"24 of 24 series have no observed value.* X\.select") as caught:
            found = classifier.predict_proba(empty), regressor.predict(empty)
        assert {each.filename for each in caught} == {__file__}
        numpy.testing.assert_allclose(found[0], numpy.tile([16, 4, 4], (24, 1)) / 24, err_msg=form)
        numpy.testing.assert_allclose(found[1], 11.5, err_msg=form)
    with pytest.warns(UserWarning, match="1 of 3"):
        mixed = classifier.predict_proba([*series[:2], forms["missing"][0]])
    numpy.testing.assert_allclose(mixed[:2], classifier.predict_proba(series[:2]), rtol=1e-5)


NETWORKS = ["gru", *slow("oscillators", "odernn")]


@pytest.mark.parametrize("model", ["features", "rocket", *NETWORKS])
def test_the_values_behind_the_mask_do_not_matter(model):
    series, labels = bumps(12)
    whole = as_series(series)
    mask = torch.rand(whole.x.shape, generator=torch.Generator().manual_seed(0)) < 0.6

    def answer(fill, mask=mask):
        filled = dataclasses.replace(whole, x=torch.where(mask, whole.x, fill), mask=mask)
        fitted = small(model, reconstruction="linear").set_params(max_epochs=1).fit(filled, labels)
        return fitted.predict_proba(filled)

    expected = answer(torch.nan)
    for fill in (whole.x, torch.inf):
        numpy.testing.assert_array_equal(answer(fill), expected)
    missing = dataclasses.replace(whole, x=torch.where(mask, whole.x, torch.nan))  # the mask says that all are observed
    fitted = small(model, reconstruction="linear").set_params(max_epochs=1).fit(missing, labels)
    numpy.testing.assert_array_equal(fitted.predict_proba(missing), expected)


@pytest.mark.parametrize("model", ["features", "rocket", "gru"])
def test_what_did_not_vary_in_fit_is_not_read(model):
    series, labels = swings(20)
    data = as_series([(t, numpy.c_[x, x]) for t, x in series])
    data = dataclasses.replace(data, static=torch.rand(20, 2), static_features=["age", "site"])
    fixed = dataclasses.replace(data, x=data.x.clone(), mask=data.mask.clone(), static=data.static.clone())
    fixed.x[..., 2], fixed.mask[..., 3], fixed.static[:, 1] = 7.0, False, 5.0
    classifier = small(model, reconstruction="linear").fit(fixed, labels)
    expected = classifier.predict_proba(fixed)
    fixed.x[..., 2], fixed.x[..., 3], fixed.static[:, 1] = 1e6 * data.x[..., 2], 1e6, -3.0
    numpy.testing.assert_allclose(classifier.predict_proba(fixed), expected, atol=1e-9)
    found = classifier.predict_proba(dataclasses.replace(fixed, mask=data.mask))
    numpy.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("model", ["features", *NETWORKS])
def test_modes_of_autograd_change_nothing_and_no_gradient_reaches_the_data(model):
    series, labels = bumps(12)
    plain = small(model).set_params(max_epochs=1)
    expected = plain.fit(series, labels).predict_proba(series)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inside = as_series(series)
            found = plain.fit(inside, labels).predict_proba(inside)
        numpy.testing.assert_array_equal(found, expected)
        numpy.testing.assert_array_equal(plain.fit(inside, labels).predict_proba(inside), expected)
    x, static = as_series(series).x.requires_grad_(), torch.zeros(12, 1, requires_grad=True)
    leaf = dataclasses.replace(as_series(series), x=x, static=static, static_features=["age"])
    assert len(plain.fit(leaf, labels).predict(leaf)) == 12
    assert x.grad is static.grad is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_rare_class_stays_in_training_and_leaves_the_choice_to_the_others(count, recwarn):
    series, labels = swings(24)
    rare = [(numpy.arange(20.0), numpy.full((20, 2), 2.0 + i)) for i in range(count)]
    both = SeriesClassifier("features", random_state=0).fit([*series, *rare], [*labels, *["rare"] * count])
    assert both.cv_loss_[both.model_] < numpy.log(3)
    assert both.predict(rare).tolist() == ["rare"] * count
    warned = [each for each in recwarn if "['rare'] have one series each" in str(each.message)]
    assert [each.filename for each in warned] == [__file__] * (count == 1)


def features_of(series):
    """The features of a model with the random state 0, and the ridge on them."""
    seed = int(numpy.random.RandomState(0).randint(2**31 - 1))
    features = OscillatorFeatures(random_state=seed).fit_transform(as_series(series))
    return features, make_pipeline(StandardScaler(), RidgeCV(ALPHAS))


def test_weights_are_those_of_the_ridge():
    series, _ = swings(24)
    random = numpy.random.default_rng(0)
    numbers, weights = random.normal(size=24), random.uniform(0.1, 2.0, 24)
    features, ridge = features_of(series)
    mean = numpy.average(numbers, weights=weights)
    std = numpy.sqrt(numpy.average((numbers - mean) ** 2, weights=weights))
    ridge.fit(features, (numbers - mean) / std, ridgecv__sample_weight=weights / weights.mean())
    found = small("features", SeriesRegressor).fit(series, numbers, weights)
    predicted = found.predict(series)
    numpy.testing.assert_allclose(predicted, mean + std * ridge.predict(features))
    assert found.score(series, numbers, weights) == pytest.approx(r2_score(numbers, predicted, sample_weight=weights))


@pytest.mark.sparse
@pytest.mark.parametrize("model", ["features", "rocket", "gru"])
@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
def test_a_weight_of_0_is_no_series_and_equal_weights_are_none(model, kind):
    series, labels = swings(20)
    y = labels if kind is SeriesClassifier else numpy.arange(20.0)
    plain = small(model, kind, reconstruction="linear").set_params(max_epochs=2)
    answer = "predict_proba" if kind is SeriesClassifier else "predict"
    expected = getattr(clone(plain).fit(series[4:], y[4:]), answer)(series)
    found = clone(plain).fit(series, y, numpy.r_[numpy.zeros(4), numpy.full(16, 3.0)])
    numpy.testing.assert_allclose(getattr(found, answer)(series), expected)


@pytest.mark.parametrize("model", ["features", "gru"])
def test_weights_of_classes_are_weights_of_their_series(model):
    series, labels = swings(30)
    labels[:10] = "slow"
    plain, share = small(model).set_params(max_epochs=2), {"slow": 30 / 40, "fast": 30 / 20}
    expected = clone(plain).fit(series, labels, [share[label] for label in labels]).predict_proba(series)
    for weight in ("balanced", share):
        found = clone(plain).set_params(class_weight=weight).fit(series, labels).predict_proba(series)
        numpy.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
def test_series_of_one_group_are_held_out_together(kind):
    random = numpy.random.default_rng(0)
    X = numpy.repeat(random.normal(size=(12, 1, 30)), 4, 0)  # four copies of each, with labels at random
    y, groups = numpy.repeat(numpy.arange(12) % 2, 4), numpy.repeat(numpy.arange(12), 4)
    alone, together = (small("features", kind).fit(X, y, groups=of).cv_loss_["features"] for of in (None, groups))
    assert alone < 0.1
    assert together > 0.5
    with pytest.raises(ValueError, match="2 different entries"):
        small("features", kind).fit(X, y, groups=0 * groups)


def test_intervals_are_quantiles_of_errors_that_were_held_out():
    random = numpy.random.default_rng(0)
    X = random.normal(size=(460, 1, 20)).cumsum(-1)
    y = 50 + X[:, 0].mean(1) + 0.3 * random.normal(size=460)
    model = small("features", SeriesRegressor).fit(X[:60], y[:60])
    lower, upper = model.predict_interval(X[60:], level=80)
    features, ridge = features_of(X[:60])
    folds, z = KFold(4, shuffle=True, random_state=0), (y[:60] - y[:60].mean()) / y[:60].std()
    errors = numpy.sort(abs(z - cross_val_predict(ridge, features, z, cv=folds)))
    width = errors[49 - 1] * y[:60].std()  # ceil(61 * 0.8) = 49
    numpy.testing.assert_allclose([model.predict(X[60:]) - lower, upper - model.predict(X[60:])], width)
    assert 0.7 < ((lower < y[60:]) & (y[60:] < upper)).mean() < 0.95  # four standard errors of a rank are 0.2
    with pytest.warns(UserWarning, match="no observed value"):
        ends = numpy.ravel(model.predict_interval([([0.0], [numpy.nan])], 80))
    around = numpy.sort(abs(y[:60] - y[:60].mean()))[49 - 1]
    numpy.testing.assert_allclose(ends, y[:60].mean() + numpy.array([-around, around]))


@pytest.mark.parametrize("model", ["features", "gru"])
def test_an_interval_that_the_series_cannot_show_is_infinite(model):
    X = numpy.random.default_rng(0).normal(size=(12, 1, 20))
    y, pairs = X[:, 0].mean(1), numpy.arange(12) // 2
    fitted = SeriesRegressor(model, n_members=6, max_epochs=1, hidden_size=4, random_state=0).fit(X, y)
    known = 9 if model == "gru" else 12  # six networks need not hold out all
    assert numpy.isfinite(fitted.predict_interval(X, 100 * (known - 2) / (known + 1))).all()
    assert numpy.isinf(fitted.predict_interval(X, 95)).all()
    grouped = small("features", SeriesRegressor).fit(X, y, groups=pairs)
    assert numpy.isinf(grouped.predict_interval(X, 90)).all()  # six groups are no nine
    with pytest.raises(ValueError, match="level=90"):
        fitted.predict_interval(X, 0.9)


TABLE, Y = in_months(bumps(10)[0]), bumps(10)[1]
BY_ID = pandas.Series(Y, index=[f"p{i}" for i in range(10)])


@pytest.mark.parametrize(
    ("options", "data", "y", "kind", "message"),
    [
        ({"model": "rockets"}, TABLE, Y, ValueError, "'rocket'"),
        ({"static": ["w", "w=a"]}, TABLE.assign(w="a", **{"w=a": 3.0}), Y, ValueError, "name of the level 'a' of 'w'"),
        ({}, TABLE, Y[:9], ValueError, "one entry for each of 10 series"),
        ({}, TABLE, 0 * Y, ValueError, "one class, 0"),
        ({}, TABLE, BY_ID.rename({"p9": "p9b"}), ValueError, "'p9b'"),
        ({}, TABLE, BY_ID.rename({"p9": "p8"}), ValueError, "an id more than once"),
        ({}, TABLE, BY_ID.to_dict(), ValueError, r"pandas\.Series\(y\)"),
        ({}, TABLE.set_index(["id", "t"]), Y, KeyError, "reset_index"),
    ],
)
def test_what_fit_refuses(options, data, y, kind, message):
    with pytest.raises(kind, match=message):
        SeriesClassifier(**{"model": "features", "id": "id", "time": "t", "values": "x", **options}).fit(data, y)


def test_swapped_axes_of_an_array_are_named():
    X, labels = torch.rand(8, 20, 2), numpy.arange(8) % 2  # the layout of torch
    with pytest.warns(UserWarning, match="20 channels of 2 samples. Fix") as caught:
        small("features").fit(X, labels)
    assert caught[0].filename == __file__


def test_a_file_of_other_classes_is_refused(tmp_path):
    path = tmp_path / "model"
    small("features", device=torch.device("cpu")).fit(*swings(10)).save(path)
    assert SeriesClassifier.load(path).device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"SeriesClassifier\.load"):
        SeriesRegressor.load(path)
    stored, whole = torch.load(path, weights_only=True), path.read_bytes()
    foreign = skops.io.dumps({"x": pandas.Timestamp(0)})
    torch.save(stored | {"rest": torch.frombuffer(bytearray(foreign), dtype=torch.uint8)}, path)
    with pytest.raises(ValueError, match="not trusted"):
        SeriesClassifier.load(path)
    path.write_bytes(whole[:2000])
    with pytest.raises(ValueError, match="made by save"):
        SeriesClassifier.load(path)


INAPPLICABLE = {
    "check_classifier_data_not_an_array": "a DataFrame is a table in long form, with named columns",
    "check_regressor_data_not_an_array": "a DataFrame is a table in long form, with named columns",
    "check_n_features_in_after_fitting": "series may have other lengths than in fit",
    "check_sample_weights_pandas_series": "a DataFrame is a table in long form, with named columns",
    "check_sample_weight_equivalence_on_dense_data": "a copy of a series is held out without the other",
}


@pytest.mark.slow
@parametrize_with_checks(
    [SeriesClassifier("features", random_state=0), SeriesRegressor("features", random_state=0)],
    expected_failed_checks=lambda _: INAPPLICABLE,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)
