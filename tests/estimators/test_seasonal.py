"""Forecasts of seasons, trends and levels against closed forms, and statsforecast against itself."""

import sys

import numpy
import pandas
import pytest
import torch

from hbnode.data import as_series
from hbnode.estimators import SeriesForecaster
from hbnode.estimators.seasonal import Candidate, Seasonal


def forecast(t, y, at):
    """Forecast a series in standardised units, and return means and deviations in its own."""
    mean, std = y.mean(), y.std() or 1.0
    series = as_series([(t, (y - mean) / std)])
    model = Seasonal(numpy.array([-mean / std])).fit(series, None, 0)
    found = model.forecast(series, torch.tensor(at - t[-1]).view(1, -1))
    return model, found[0].flatten().numpy() * std + mean, found[1].flatten().numpy() * std


@pytest.mark.parametrize("period", [7.3, 30.0])
def test_a_sine_with_gaps_is_continued(period):
    random = numpy.random.default_rng(0)
    t = numpy.sort(random.permutation(240)[:160]).astype(float)
    at = numpy.linspace(t[-1] + 0.5, t[-1] + 2 * period, 25)
    past, future = (5 + 2 * numpy.sin(2 * numpy.pi * times / period + 1) for times in (t, at))
    model, mean, std = forecast(t, past + 0.1 * random.normal(size=160), at)
    assert model.seasons[0][0] == pytest.approx(period, rel=0.01)
    assert numpy.abs(mean - future).max() < 0.3  # three deviations of the noise
    assert (numpy.abs(mean - future) < 4 * std).all()


def test_two_seasons_are_found_and_continued():
    t = numpy.arange(450.0)
    both = 3 * numpy.sin(2 * numpy.pi * t / 12) + 2 * numpy.cos(2 * numpy.pi * t / 84)
    noisy = both + 0.2 * numpy.random.default_rng(2).normal(size=450)
    model, mean, _ = forecast(t[:400], noisy[:400], t[400:])
    assert model.seasons[0] == pytest.approx([12, 84], rel=0.005)
    assert numpy.abs(mean - both[400:]).max() < 0.6


def test_a_line_is_continued_and_then_flattens():
    t = numpy.arange(80.0)
    _, mean, _ = forecast(t, 10 + 0.5 * t, numpy.array([80.0, 84.0, 1000.0]))
    assert mean[:2] == pytest.approx([50, 52], rel=0.01)
    assert mean[2] < 10 + 0.5 * 160  # within one range beyond the values


def test_noise_has_no_season_and_is_forecast_by_its_level():
    y = numpy.random.default_rng(3).normal(size=300)
    model, mean, std = forecast(numpy.arange(300.0), y, numpy.arange(300.0, 320))
    assert model.seasons == [[]]
    assert numpy.abs(mean).max() < 0.25  # the standard error of the level's estimate from some dozens of values
    assert std == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(("step", "period"), [("D", 7), ("MS", 12)])
def test_the_season_of_the_calendar_needs_no_proof(step, period):
    """A season that grows with its level, and noise without one."""
    times, k = pandas.date_range("2000-01-01", periods=5 * period, freq=step), numpy.arange(5 * period)
    grown = numpy.exp(0.3 * k / period + 0.5 * numpy.sin(2 * numpy.pi * k / period))
    for y in (grown, numpy.random.default_rng(0).normal(size=len(k))):
        model = SeriesForecaster("seasonal", time="time", level=50, random_state=0)
        model.fit(pandas.DataFrame({"time": times[:-period], "y": y[:-period]}), horizon=list(times[-period:]))
        assert model.fitted_.seasons == [[period]]
        if y is grown:
            found = model.predict(ahead=list(times[-period:]))["mean"]
            numpy.testing.assert_allclose(found, y[-period:], rtol=0.1)


def monthly(count):
    y = 100 + numpy.arange(count) + 10 * numpy.sin(numpy.arange(count) * numpy.pi / 6)
    y += numpy.random.default_rng(5).normal(size=count)
    return pandas.DataFrame({"id": 0, "time": pandas.date_range("2000-01-01", periods=count, freq="MS"), "y": y})


def test_statsforecast_is_called_as_it_is(tmp_path):
    models = pytest.importorskip("statsforecast.models")
    table, ahead = monthly(60), list(pandas.date_range("2005-01-01", periods=6, freq="MS"))
    names = [models.AutoETS(12), models.AutoTheta(12), models.MSTL(12)]
    expected = numpy.median([each.forecast(table["y"].to_numpy(), 6)["mean"] for each in names], 0)
    model = SeriesForecaster("statsforecast", id="id", time="time", random_state=0).fit(table)
    assert model.predict(table, ahead)["mean"].to_numpy() == pytest.approx(expected, rel=1e-6)
    model.save(tmp_path / "model")
    again = SeriesForecaster.load(tmp_path / "model").predict(table, ahead)
    pandas.testing.assert_frame_equal(again, model.predict(table, ahead))


@pytest.mark.slow
def test_without_statsforecast_auto_works_and_its_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsforecast", None)
    monkeypatch.setitem(sys.modules, "statsforecast.models", None)
    model = SeriesForecaster(id="id", time="time", random_state=0).fit(monthly(60))
    assert not any("statsforecast" in name for name in model.cv_loss_)
    with pytest.raises(ImportError, match=r"Fix: pip install statsforecast"):
        SeriesForecaster("statsforecast", id="id", time="time", random_state=0).fit(monthly(60))


@pytest.mark.slow
def test_the_mean_of_the_best_two_is_a_candidate_and_is_saved(tmp_path):
    model = SeriesForecaster(id="id", time="time", random_state=0).fit(monthly(60))
    first, second, *_ = sorted((name for name in model.cv_loss_ if "+" not in name), key=model.cv_loss_.get)
    assert f"{first} + {second}" in model.cv_loss_
    assert model.model_ == min(model.cv_loss_, key=model.cv_loss_.get)
    model.save(tmp_path / "model")
    again = SeriesForecaster.load(tmp_path / "model").predict(monthly(60), "10D")
    pandas.testing.assert_frame_equal(again, model.predict(monthly(60), "10D"))


@pytest.mark.parametrize("lowest", [-10, 1])
def test_a_single_value_has_the_usual_deviation_of_a_series(lowest):
    steps = numpy.random.default_rng(0).normal(size=(20, 30))
    y = 1000 * (lowest + numpy.arange(20.0))[:, None] + steps.cumsum(1)
    mean, std = y.mean(), y.std()
    model = Seasonal(numpy.array([-mean / std]))
    model.fit(as_series([(numpy.arange(30.0), (each - mean) / std) for each in y]), None, 0)
    last = as_series([(numpy.zeros(1), (y[10, -1:] - mean) / std)])
    found, deviation = (each.item() * std for each in model.forecast(last, torch.ones(1, 1)))
    assert found + mean == pytest.approx(y[10, -1], abs=1e-6)
    assert 0.3 < deviation < 10  # of steps with the deviation 1, in series whose levels have the deviation 5766


def test_logarithms_are_left_out_for_a_series_below_zero():
    random, steps = numpy.random.default_rng(0), numpy.arange(78.0)
    swing = numpy.sin(2 * numpy.pi * steps / 12)
    grown = [(steps, numpy.exp(0.03 * steps + 0.5 * swing + 0.05 * random.normal(size=78) + k)) for k in range(2)]
    model = SeriesForecaster("seasonal", level=50, random_state=0).fit(grown)
    assert all(Candidate(*kind[1:]).is_log for kind in model.fitted_.kinds[0])
    below = 5 * swing - 2
    found = model.predict([(steps[:72], below[:72])], list(range(1, 7)))["mean"]
    numpy.testing.assert_allclose(found, below[72:], atol=0.1)
