"""SeriesClassifier and SeriesRegressor: forms of data, scikit-learn's conventions, files."""

import numpy
import pandas
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from hbnode.data import as_series
from hbnode.estimators import SeriesClassifier, SeriesRegressor

NETWORKS = ["gru", "odernn", "oscillators"]


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


@pytest.mark.parametrize("model", ["features", *NETWORKS])
def test_frequencies_are_told_apart_and_files_keep_the_answer(model, tmp_path):
    series, labels = swings(60)
    classifier = SeriesClassifier(model, n_members=1, max_epochs=40, learning_rate=0.02, hidden_size=16, random_state=0)
    classifier.fit(series[:40], labels[:40])
    assert classifier.score(series[40:], labels[40:]) >= 0.8
    probability = classifier.predict_proba(series)
    numpy.testing.assert_allclose(probability.sum(1), 1.0)
    classifier.save(tmp_path / "model")
    loaded = SeriesClassifier.load(tmp_path / "model")
    numpy.testing.assert_array_equal(loaded.predict_proba(series), probability)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_form_of_the_data_gives_the_same_answer():
    model, (series, labels) = "features", swings(20)
    rows = [(f"p{i}", t, *x) for i, (times, values) in enumerate(series) for t, x in zip(times, values, strict=True)]
    table = pandas.DataFrame(rows, columns=["id", "t", "a", "b"]).sample(frac=1.0, random_state=0)
    by_id = pandas.Series(labels, index=[f"p{i}" for i in range(20)]).sample(frac=1.0, random_state=1)
    of_pairs = small(model).fit(series, labels)
    of_series = small(model).fit(as_series(series), labels)
    numpy.testing.assert_array_equal(of_pairs.predict_proba(series), of_series.predict_proba(as_series(series)))
    of_table = small(model, id="id", time="t").fit(table, by_id)
    found = of_table.predict(table)
    order = [int(name[1:]) for name in table["id"].drop_duplicates()]
    assert (found == labels[order]).mean() > 0.9


def test_static_categories_are_used_and_new_ones_are_allowed():
    random = numpy.random.default_rng(0)
    table = pandas.DataFrame({"id": numpy.repeat(numpy.arange(60), 3), "t": numpy.tile([0.0, 1.0, 2.0], 60)})
    table["x"] = random.normal(size=180)
    table["ward"] = numpy.repeat(numpy.where(numpy.arange(60) % 2 == 0, "A", "B"), 3)
    labels = numpy.arange(60) % 2
    for model in ("features", "gru"):
        classifier = SeriesClassifier(model, id="id", time="t", static="ward", n_members=1, random_state=0)
        classifier.fit(table, labels)
        assert classifier.score(table, labels) == 1.0
        assert classifier.predict_proba(table.assign(ward="C")).shape == (60, 2)


def test_series_go_through_cross_validation_pipelines_and_grids():
    series, labels = swings(30)
    classifier = small("features")
    assert cross_val_score(classifier, series, labels, cv=3).mean() > 0.8
    assert cross_val_score(classifier, as_series(series), labels, cv=3).mean() > 0.8
    pipeline = make_pipeline(FunctionTransformer(as_series), clone(classifier)).fit(series, labels)
    assert pipeline.score(series, labels) > 0.8
    grid = GridSearchCV(small("gru"), {"hidden_size": [4, 8]}, cv=2).fit(series, labels)
    assert grid.best_params_["hidden_size"] in (4, 8)


@pytest.mark.parametrize("model", ["features", "gru"])
def test_targets_keep_their_shape_and_unit(model):
    series, _ = swings(40)
    means = numpy.array([1000 + 50 * numpy.nanmean(x[:, 1]) for _, x in series])
    regressor = SeriesRegressor(model, n_members=1, random_state=0, max_epochs=60).fit(series, means)
    assert regressor.predict(series).shape == (40,)
    assert regressor.score(series, means) > 0.7
    both = small(model, SeriesRegressor).fit(series, numpy.stack([means, -means], 1))
    assert both.predict(series).shape == (40, 2)


def test_rocket_and_auto_choose_by_cross_validation():
    series, labels = swings(40)
    auto = SeriesClassifier(random_state=0).fit(series, labels)
    assert auto.model_ == min(auto.cv_loss_, key=auto.cv_loss_.get)
    assert auto.score(*swings(40, seed=1)) > 0.9


def test_what_is_wrong_is_named():
    series, labels = swings(10)
    with pytest.raises(ValueError, match="'rocket'"):
        SeriesClassifier("rockets").fit(series, labels)
    with pytest.raises(ValueError, match="one target for each of 10 series"):
        SeriesClassifier().fit(series, labels[:9])
    fitted = small("features").fit(series, labels)
    with pytest.raises(ValueError, match="same columns"):
        fitted.predict([(t, x[:, :1]) for t, x in series])


def test_a_file_of_other_classes_is_refused(tmp_path):
    series, labels = swings(10)
    small("features").fit(series, labels).save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"SeriesClassifier\.load"):
        SeriesRegressor.load(tmp_path / "model")
    stored = torch.load(tmp_path / "model", weights_only=True)
    import skops.io

    stored["rest"] = torch.frombuffer(bytearray(skops.io.dumps({"x": pandas.Timestamp(0)})), dtype=torch.uint8)
    torch.save(stored, tmp_path / "model")
    with pytest.raises(ValueError, match="not trusted"):
        SeriesClassifier.load(tmp_path / "model")


INAPPLICABLE = {
    "check_classifier_data_not_an_array": "a DataFrame is a table in long form, with named columns",
    "check_regressor_data_not_an_array": "a DataFrame is a table in long form, with named columns",
    "check_n_features_in_after_fitting": "series may have other lengths than in fit",
}


@parametrize_with_checks(
    [SeriesClassifier("features", random_state=0), SeriesRegressor("features", random_state=0)],
    expected_failed_checks=lambda _: INAPPLICABLE,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)
