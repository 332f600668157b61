"""SeriesForecaster: tables in and out, units, dates, calibrated bands."""

import dataclasses
import datetime

import numpy
import pandas
import pytest
import torch
from pandas.tseries import offsets
from sklearn.model_selection import GroupKFold, TimeSeriesSplit, cross_val_score

from hbnode.data import as_series
from hbnode.estimators import SeriesForecaster, forecast_models
from hbnode.estimators.forecast_models import bound, draw_backtest
from tests.models import slow


def drifting(count, seed, dates=True):
    """Mean-reverting series with heavy-tailed noise, whose level is its own, as a table."""
    random, rows = numpy.random.default_rng(seed), []
    for one in range(count):
        t = numpy.cumsum(random.exponential(1.0, random.integers(15, 40)) + 0.1)
        x = numpy.zeros(len(t))
        for i in range(1, len(t)):
            decay = numpy.exp(-(t[i] - t[i - 1]) / 4)
            x[i] = decay * x[i - 1] + numpy.sqrt(1 - decay**2) * random.standard_t(4)
        rows.append(pandas.DataFrame({"id": f"s{one}", "time": t, "hr": 80 + 10 * x + random.standard_t(3, len(t))}))
    table = pandas.concat(rows, ignore_index=True)
    if dates:
        table["time"] = pandas.Timestamp("2024-03-01") + pandas.to_timedelta(table["time"], unit="h")
    table["sbp"] = 120 + 0.3 * table["hr"]
    table.loc[random.uniform(size=len(table)) < 0.2, "sbp"] = numpy.nan
    return table


def forecaster(model, **options):
    return SeriesForecaster(model, id="id", time="time", random_state=0, **options)


def fewer_trees(monkeypatch):
    """Let boosted trees learn from few values."""
    monkeypatch.setattr("hbnode.estimators.forecaster.PAIRS", 1000)
    for name, value in {"max_iter": 15, "learning_rate": 0.2, "max_leaf_nodes": 8}.items():
        monkeypatch.setitem(forecast_models.TREES, name, value)


def test_a_table_gives_a_table_in_the_users_units_and_dates():
    table = drifting(12, 0)
    model = forecaster("last", values=["hr", "sbp"], level=(50, 75)).fit(table)
    found = model.predict(table, ahead=["30min", "6h"])
    assert list(found) == ["id", "time", "column", "mean", "lower_50", "upper_50", "lower_75", "upper_75"]
    assert len(found) == 12 * 2 * 2
    last = table.groupby("id")["time"].max()
    first = found[(found["column"] == "hr")].groupby("id")["time"].min()
    assert ((first - last) - pandas.Timedelta("30min")).abs().max() < pandas.Timedelta("1ms")
    assert (found["lower_75"] <= found["lower_50"]).all()
    assert (found["lower_50"] <= found["mean"]).all()
    assert found.loc[found["column"] == "sbp", "mean"].between(120, 180).all()


def test_a_series_is_in_utc_and_fits_tables_of_any_time_zone():
    zoned = drifting(12, 0)
    zoned["time"] = zoned["time"].dt.tz_localize("Asia/Tokyo")
    series = as_series(zoned, id="id", time="time")
    model, expected = forecaster("last").fit(series), forecaster("last").fit(zoned).predict(zoned, "1h")
    found = model.predict(series, 3600.0)
    numpy.testing.assert_allclose(found[["mean", "lower"]], expected[["mean", "lower"]])
    for times in (found["time"].dt.tz_localize("UTC"), model.predict(zoned, "1h")["time"]):
        assert (times == expected["time"]).all()


def test_the_hour_of_the_day_is_that_of_the_time_zone(tmp_path, monkeypatch):
    """A value that is 1 from 9 to 17 o'clock, learned in winter and forecast in summer."""
    fewer_trees(monkeypatch)

    def office(start):
        times = pandas.date_range(start, periods=8 * 24, freq="h", tz="Europe/Berlin")
        return pandas.DataFrame({"id": 0, "time": times, "y": times.hour.isin(range(9, 17)).astype(float)})

    forecaster("features").fit(office("2024-01-01")).save(tmp_path / "model")
    found = SeriesForecaster.load(tmp_path / "model").predict(office("2024-06-01"), [f"{i}h" for i in range(1, 25)])
    numpy.testing.assert_allclose(found["mean"], found["time"].dt.hour.isin(range(9, 17)), rtol=0, atol=0.1)


@pytest.mark.parametrize("model", ["last", "gru", *slow("features", "oscillators", "odernn")])
def test_a_forecast_depends_on_its_series_alone_and_on_no_unit_of_a_static_feature(model):
    table = drifting(12, 0, dates=False).groupby("id").head(8)
    table["year"] = table["id"].str[1:].astype(float)
    table.loc[table["id"] == "s3", ["hr", "sbp"]] = numpy.nan
    table = table[(table["id"] != "s5") | (table["time"] < table["time"][table["id"] == "s5"].iloc[1])]
    options = {"static": "year", "values": ["hr", "sbp"], "n_members": 1, "max_epochs": 1}
    state = torch.get_rng_state()
    fitted = forecaster(model, **options).fit(table)
    assert torch.equal(state, torch.get_rng_state())
    found = fitted.predict(table, [2.0, 1.0, 1.0, 0.0]).set_index(["id", "time", "column"])
    assert numpy.isfinite(found).all(axis=None)
    for name in ("s3", "s5"):
        alone = fitted.predict(table[table["id"] == name], [0.0, 1.0, 2.0]).set_index(["id", "time", "column"])
        same = found[~found.index.duplicated()].loc[alone.index]
        numpy.testing.assert_allclose(same, alone, rtol=1e-5)
    if model in ("gru", "odernn"):  # boosted trees have ties
        other = table.assign(year=2000 + 100 * table["year"])
        again = forecaster(model, **options).fit(other).predict(other, [2.0, 1.0, 1.0, 0.0])
        numpy.testing.assert_allclose(again["mean"], found["mean"], rtol=1e-4)


@pytest.mark.parametrize("model", ["gru", *slow("odernn")])
def test_networks_learn_a_sine(model, tmp_path):
    random = numpy.random.default_rng(0)
    times = numpy.sort(random.uniform(0, 6, (30, 15)))
    series = [(t, numpy.sin(2 * t + random.uniform(0, 6))) for t in times]
    fitted = SeriesForecaster(model, n_members=1, max_epochs=8, random_state=0, learning_rate=0.02).fit(series)
    last = SeriesForecaster("last", random_state=0).fit(series)
    assert fitted.cv_loss_[model] < 0.8 * last.cv_loss_["last"]
    fitted.save(tmp_path / "model")
    found = SeriesForecaster.load(tmp_path / "model").predict(series[20:], [0.5, 1.0])
    pandas.testing.assert_frame_equal(found, fitted.predict(series[20:], [0.5, 1.0]))


def test_a_band_without_observations_has_the_width_of_the_data():
    table = drifting(30, 0)
    fitted = forecaster("last", values=["hr", "sbp"]).fit(table)
    table.loc[table["id"] == "s3", "hr"] = numpy.nan
    found = fitted.predict(table, "30min").query("column == 'hr'").set_index("id")
    width = (found["upper"] - found["lower"]) / 2
    expected = (table["hr"] - table["hr"].mean()).abs().quantile(0.9)
    assert abs(width["s3"] / expected - 1) < 0.2  # nine held-out series
    assert width["s4"] < width["s3"]
    assert abs(found["mean"]["s3"] - table["hr"].mean()) < 2


def test_bands_of_random_walks_hold_whatever_the_age_of_the_last_value():
    random = numpy.random.default_rng(0)
    train, new = (random.normal(size=(count, 1, length)).cumsum(-1) for count, length in ((120, 40), (700, 31)))
    fitted = SeriesForecaster("last", random_state=0).fit(train)
    times = numpy.arange(30.0)
    for missing in (0, 2, 8):
        past = numpy.where(times >= 30 - missing, numpy.nan, new[:, 0, :30])
        found = fitted.predict([(times, x) for x in past], 1.0 + missing)  # after the last value
        held = (found["lower"] <= new[:, 0, 30]) & (new[:, 0, 30] <= found["upper"])
        assert abs(held.mean() - 0.9) < 0.06, missing  # 36 held-out series; a standard error of .025


@pytest.mark.parametrize(("count", "level"), [(9, 90), (19, 95), (99, 99), (30, 50), (1, 50)])
def test_the_bound_of_conformal_prediction(count, level):
    """The ⌈(n + 1) L⌉-th of n errors (Lei et al., 2018); it does not change if each value has several errors."""
    errors, samples = numpy.random.default_rng(0).exponential(size=count), numpy.arange(count)
    expected = sorted(errors)[-(-(count + 1) * level // 100) - 1]
    assert bound(errors, samples, level) == expected
    assert bound(numpy.tile(errors, 7), numpy.tile(samples, 7), level) == expected
    assert bound(errors, samples, 100 * count / (count + 1) + 0.01) == numpy.inf
    assert bound(errors[:0], samples[:0], level) == numpy.inf


def test_a_level_beyond_the_held_out_values_has_an_infinite_band():
    one = [(numpy.arange(8.0), numpy.random.default_rng(0).normal(size=8).cumsum())]
    fitted = SeriesForecaster("last", level=(50, 75, 95), random_state=0).fit(one)
    with pytest.warns(UserWarning, match="needs 19 held-out values, and column 'x0' has 3: .* Fix: level=75, or") as w:
        found = fitted.predict(one, 1.0)
    assert w[0].filename == __file__
    assert found[["lower_95", "upper_95"]].to_numpy().tolist() == [[-numpy.inf, numpy.inf]]
    assert found[["upper_50", "upper_75"]].max(axis=None) < numpy.inf


def test_the_errors_of_a_model_that_saw_the_values_are_no_held_out_errors():
    """Two series of two rows: only the last value needs no fit, and the larger of two errors is a band of 66 %."""
    pairs = [(numpy.arange(2.0), numpy.array([1.0, 1.5])), (numpy.arange(2.0), numpy.array([3.0, 1.0]))]
    fitted = SeriesForecaster(level=66, random_state=0).fit(pairs)
    found = fitted.predict(pairs, 1.0)
    assert fitted.model_ == "last"
    numpy.testing.assert_allclose(found[["lower", "mean", "upper"]], [[-0.5, 1.5, 3.5], [-1.0, 1.0, 3.0]])
    for model in ("features", "oscillators"):
        fitted = SeriesForecaster(model, level=50, random_state=0).fit(pairs)
        with pytest.warns(UserWarning, match="needs 1 held-out values, and column 'x0' has 0.* Fix: more or longer"):
            assert (fitted.predict(pairs, 1.0)["upper"] == numpy.inf).all()


@pytest.mark.parametrize("model", ["last", "gru", *slow("features")])
def test_a_column_that_was_never_observed_has_no_forecast(model):
    table = drifting(12, 0).assign(sbp=numpy.nan)
    fitted = forecaster(model, n_members=1, max_epochs=1).fit(table)
    with pytest.warns(UserWarning, match=r"columns \['sbp'\] had no value in fit.* Fix: values=\['hr'\]"):
        found = fitted.predict(table, "1h").set_index("column")[["mean", "lower", "upper"]]
    assert found.loc["sbp"].isna().all(axis=None)
    assert found.loc["hr"].notna().all(axis=None)


def test_a_forecast_beyond_the_tested_horizons_warns():
    table = drifting(30, 0)
    model = forecaster("last", values="hr").fit(table)
    with pytest.warns(UserWarning, match=r"lies 8.64e\+06 s after the last value of .* up to .* too narrow"):
        model.predict(table, "100D")


def walks(count, length, level, step, seed):
    random = numpy.random.default_rng(seed)
    return [(numpy.arange(float(length)), level + step * random.normal(size=length).cumsum()) for _ in range(count)]


@pytest.mark.parametrize("model", ["last", *slow("oscillators")])
def test_series_of_all_scales_are_forecast_in_their_own(model):
    """Steps of 1 at 10 and of 1e5 at 1e7: the deviation one step ahead is that of a step in both groups."""
    fitted = SeriesForecaster(model, level=68, random_state=0).fit(walks(20, 40, 10, 1, 0) + walks(20, 40, 1e7, 1e5, 1))
    for level, step in ((10, 1), (1e7, 1e5)):
        new = walks(30, 40, level, step, 2)
        found = fitted.predict(new, 1.0)
        last = numpy.array([x[-1] for _, x in new])
        assert numpy.median(abs(found["mean"] - last)) < step
        assert 0.6 < ((found["upper"] - found["lower"]) / 2 / step).median() < 1.7


def test_bands_of_one_random_walk_widen_with_the_horizon():
    """Half widths of a band of 80 % are 1.28 √h: 1.28, 2.56 and 4.05 at 1, 4 and 10 steps."""
    walk = walks(1, 1500, 0, 1, 5)
    found = SeriesForecaster("last", level=80, random_state=0).fit(walk, horizon=10.0).predict(walk, [1.0, 4.0, 10.0])
    numpy.testing.assert_allclose((found["upper"] - found["lower"]) / 2, 1.2816 * numpy.sqrt([1, 4, 10]), rtol=0.25)


def test_the_last_values_are_learned_from(monkeypatch):
    """A daily shape that turns over in the last 30 %; without them the forecast is the old shape."""
    fewer_trees(monkeypatch)
    t = numpy.arange(500.0)
    shape = numpy.sin(2 * numpy.pi * numpy.arange(512) / 24)
    dates = pandas.Timestamp("2024-01-01") + pandas.to_timedelta(t, unit="h")
    table = pandas.DataFrame({"id": 0, "time": dates, "y": numpy.where(t < 350, 1, -1) * shape[:500]})
    found = forecaster("features").fit(table, horizon="12h").predict(table, [f"{h}h" for h in range(1, 13)])
    assert abs(found["mean"] + shape[500:]).mean() < abs(found["mean"] - shape[500:]).mean()


@pytest.mark.parametrize("model", ["last", "gru", *slow("features")])
def test_hidden_values_and_padding_do_not_matter(model):
    random = numpy.random.default_rng(0)
    x, t = random.normal(size=(12, 10, 2)).cumsum(1), numpy.sort(random.uniform(0, 9, (12, 10)), 1)
    mask, lengths = random.uniform(size=x.shape) < 0.7, random.integers(4, 11, 12)
    is_sample = numpy.arange(10) < lengths[:, None]
    given = as_series([(a, b) for a, b in zip(t, x, strict=True)])
    found = []
    for hidden, padding in ((x, t), (1e30, 1e3), (numpy.nan, numpy.nan)):
        values = torch.tensor(numpy.where(mask & is_sample[..., None], x, hidden))
        times = torch.tensor(numpy.where(is_sample, t, padding))
        said = torch.tensor(mask) | values.isnan()  # a missing value is none, whatever the mask says
        series = dataclasses.replace(given, x=values, t=times, mask=said, lengths=torch.tensor(lengths))
        fitted = SeriesForecaster(model, level=50, n_members=1, max_epochs=1, random_state=0).fit(series)
        found.append(fitted.predict(series, [1.0, 2.0]))
    for other in found[1:]:
        pandas.testing.assert_frame_equal(other, found[0])


def test_blocks_of_pasts_are_bounded_and_change_nothing(monkeypatch):
    """The pasts of 200 starts in a series of 2,000 samples have 400,000 places, and a block has 10,000."""
    sizes, asked = [], draw_backtest(as_series(walks(1, 2000, 0, 1, 0)), numpy.random.RandomState(0), 0.0, 200, 8, 50.0)

    def last(past, dt):
        sizes.append(past.x.numel())
        return past.x[torch.arange(len(dt)), past.lengths - 1], dt

    whole = asked.over(last)
    sizes.clear()
    monkeypatch.setattr(forecast_models, "BLOCK", 10_000)
    torch.testing.assert_close(asked.over(last), whole, rtol=0, atol=0, equal_nan=True)
    assert max(sizes) <= 10_000
    assert len(sizes) >= 20


def test_a_forecast_starts_at_the_last_observed_value():
    table = drifting(12, 0)[["id", "time", "hr"]]
    model, cut = forecaster("last").fit(table), table.groupby("id").cumcount() >= 10
    expected = model.predict(table[~cut], ["1h", "2h"])
    pandas.testing.assert_frame_equal(model.predict(table.assign(hr=table["hr"].mask(cut)), ["1h", "2h"]), expected)


HOUR, BEGIN = pandas.Timedelta("1h"), pandas.Timestamp("2024-01-01")
TOKYO = datetime.timezone(datetime.timedelta(hours=9))


def of_objects(table):
    return table.assign(time=pandas.Series([each.tz_localize(TOKYO) for each in table["time"]], dtype=object))


def of_several_zones(table):
    utc = of_objects(table)["time"].map(lambda t: t.astimezone(datetime.timezone.utc))
    return table.assign(time=of_objects(table)["time"].where(table.index % 2 == 0, utc))


def of_pairs(table):
    return [(list(one["time"]), one["hr"].to_numpy()) for _, one in of_objects(table).groupby("id", sort=False)]


FORMS = [(of_objects, "UTC+09:00"), (of_several_zones, "UTC"), (of_pairs, "UTC+09:00")]


@pytest.mark.parametrize(("form", "zone"), FORMS)
def test_forecasts_have_the_time_zone_of_the_dates(form, zone):
    table = drifting(12, 0)[["id", "time", "hr"]]
    table["time"] = table["time"].dt.floor("s")
    names = {} if form is of_pairs else {"id": "id", "time": "time"}
    found = SeriesForecaster("last", random_state=0, **names).fit(form(table)).predict(form(table), "1h")
    last = table.groupby("id", sort=False).last()
    assert (found["time"].to_numpy() == (last["time"].dt.tz_localize(TOKYO) + HOUR).to_numpy()).all()
    assert str(found["time"].dt.tz) == zone
    numpy.testing.assert_allclose(found["mean"], last["hr"])


def test_horizons_are_durations_dates_or_numbers():
    table = drifting(12, 0)
    one, model = table[table["id"] == "s3"], forecaster("last").fit(table)
    when = one["time"].max() + pandas.Timedelta("90min")
    expected = model.predict(one, ahead=[when])
    series = as_series(one, id="id", time="time")  # its unit is known
    for X, ahead in ((one, pandas.Timedelta("90min")), (one, str(when)), (series, 5400)):
        pandas.testing.assert_frame_equal(expected, model.predict(X, ahead))
    pandas.testing.assert_frame_equal(model.predict(one, []), expected.iloc[:0])
    durations = table.assign(time=table["time"] - BEGIN)
    found = forecaster("last").fit(durations).predict(durations, "90min").set_index("id")
    assert abs(found["time"]["s3"].iloc[0] + BEGIN - when) < pandas.Timedelta("1ms")


STEPS = {
    "3MS": offsets.MonthBegin(3),
    "ME": offsets.MonthEnd(1),
    "B": offsets.BDay(1),
    "W-MON": offsets.Week(weekday=0),
    "1W": pandas.Timedelta(days=7),
    pandas.DateOffset(months=1): pandas.DateOffset(months=1),
    offsets.Hour(3): pandas.Timedelta("3h"),
}


@pytest.mark.filterwarnings("ignore:a forecast lies")
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_text_ahead_is_what_pandas_means_by_it(zone):
    table = drifting(3, 0)[["id", "time", "hr"]]
    days = table["id"].map({"s0": 0, "s1": 20, "s2": 65})
    table["time"] = (table["time"] + pandas.to_timedelta(days, unit="D")).dt.floor("s").dt.tz_localize(zone)
    model, last = forecaster("last").fit(table), table.groupby("id")["time"].max()
    for ahead, step in STEPS.items():
        found = model.predict(table, ["1h", ahead]).groupby("id")["time"].last()
        assert found.tolist() == [each + step for each in last]


DATES, NUMBERS = drifting(12, 0), drifting(12, 0, dates=False)
ZONED, FIRST = DATES.assign(time=DATES["time"].dt.tz_localize("Europe/Berlin")), DATES["time"].min()


@pytest.mark.parametrize(
    ("fitted", "call", "kind", "message"),
    [
        (DATES, {"ahead": 5400}, TypeError, "durations"),
        (DATES, {"ahead": ["1h", "1M"]}, ValueError, "durations such as '1h', offsets"),
        (DATES, {"ahead": FIRST.tz_localize("Asia/Tokyo")}, TypeError, "without a time zone"),
        (DATES, {"ahead": [FIRST]}, ValueError, "last sample"),
        (DATES, {"ahead": ["1MS", FIRST]}, TypeError, "must be durations and offsets, or dates"),
        (ZONED, {"ahead": "2025-01-01 12:00"}, TypeError, "tz='Europe/Berlin'"),
        (ZONED, {"X": DATES, "ahead": "1h"}, ValueError, "with a time zone, as in fit"),
        (NUMBERS, {"ahead": "1h"}, TypeError, "unit"),
        (NUMBERS, {"X": DATES, "ahead": 1.5}, ValueError, "as in fit"),
        (DATES, {"X": None}, ValueError, "no row lies after"),
        (DATES, {"ahead": "1h", "future": DATES}, ValueError, "must be named before fit"),
    ],
)
def test_horizons_that_are_refused(fitted, call, kind, message):
    with pytest.raises(kind, match=message):
        forecaster("last").fit(fitted).predict(**{"X": fitted, **call})


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"model": "feature"}, DATES, "'features'"),
        ({"level": 0.9}, DATES, "percent"),
        ({}, DATES.assign(hr=numpy.nan, sbp=numpy.nan), "must have an observed value"),
        ({"id": None, "values": "hr"}, pandas.concat([DATES] * 2), "without id=, a table is one series"),
        ({"id": None, "time": None}, NUMBERS, "dates as its index"),
        ({"model": "oscillators", "future": "sbp"}, DATES, "does not read columns of future"),
    ],
)
def test_what_fit_refuses(options, data, message):
    with pytest.raises(ValueError, match=message):
        SeriesForecaster(**{"model": "last", "id": "id", "time": "time", **options}).fit(data)


def test_one_series_needs_no_ids_and_may_have_its_times_in_the_index():
    times = pandas.date_range("2000-01", periods=60, freq="MS", tz="UTC", name="month")
    y = pandas.Series(numpy.random.default_rng(0).normal(size=60).cumsum(), index=times, name="y")
    table, found = y.reset_index(), []
    for one, who, when in ((table.assign(who=0), "who", "month"), (table, None, "month"), (y, None, None)):
        model = SeriesForecaster("last", id=who, time=when, level=50, random_state=0).fit(one)
        found.append(model.predict(one, ["1MS", "2MS"]))
        assert list(found[-1])[:3] == [who or "id", when or "time", "column"]
        pandas.testing.assert_frame_equal(found[-1].set_axis(list(found[0]), axis=1), found[0])


@pytest.mark.parametrize("model", ["last", "gru"])
def test_series_may_have_a_gradient_no_names_and_be_of_inference_mode(model):
    named = as_series([(numpy.arange(9.0), each) for each in numpy.random.default_rng(0).normal(size=(12, 9))])
    x, found = named.x.clone().requires_grad_(), []
    leaf = dataclasses.replace(named, x=x, ids=(), features=())
    for mode, each in ((torch.enable_grad, named), (torch.inference_mode, named), (torch.no_grad, leaf)):
        with mode():
            fitted = SeriesForecaster(model, n_members=1, max_epochs=2, level=50, random_state=0).fit(each)
            found.append(fitted.predict(each, 1.0))
        pandas.testing.assert_frame_equal(found[-1], found[0])
        assert not any(part.is_inference() for network in fitted.networks_ for part in network.parameters())
    assert x.grad is None


@pytest.fixture(scope="module")
def driven():
    """A model of levels and three times a temperature at irregular times, the table, and which rows are to come."""
    random, rows = numpy.random.default_rng(0), []
    for one in range(6):
        t, temperature = numpy.cumsum(0.1 + random.exponential(1.0, 70)), random.normal(size=70).cumsum()
        rows.append(pandas.DataFrame({"who": one, "when": t, "temperature": temperature, "y": 3 * temperature + one}))
    table = pandas.concat(rows, ignore_index=True)
    table["when"] = (FIRST + table["when"] * HOUR).dt.floor("s")
    is_later = table.groupby("who").cumcount() >= 60
    model = SeriesForecaster("features", id="who", time="when", values="y", future="temperature", random_state=0)
    with pytest.MonkeyPatch.context() as patch:
        fewer_trees(patch)
        return model.fit(table[~is_later]), table, is_later


def test_a_future_covariate_that_determines_the_value_is_used(driven):
    model, table, is_later = driven
    past, later = table[~is_later], table[is_later].drop(columns="y")
    found = model.predict(past, future=later)
    both = found.merge(table, on=["who", "when"])
    assert len(both) == is_later.sum()
    spread = abs(both["y"] - both["who"].map(past.groupby("who")["y"].last())).mean()  # of the last value
    assert abs(both["mean"] - both["y"]).mean() < 0.2 * spread
    for same in (model.predict(future=later), model.predict(pandas.concat([past, later]))):
        pandas.testing.assert_frame_equal(same, found)
    last = past.groupby("who", as_index=False).last()  # covariates are linear between their rows
    ends = last.assign(when=last["when"] + 4 * HOUR, temperature=last["temperature"] + 8)
    middle = last.assign(when=last["when"] + HOUR, temperature=last["temperature"] + 2)
    found = model.predict(past, "1h", future=ends)
    pandas.testing.assert_frame_equal(model.predict(past, "1h", future=pandas.concat([middle, ends])), found)
    assert not numpy.allclose(found["mean"], model.predict(past, "1h", future=ends.assign(temperature=0.0))["mean"])


@pytest.mark.parametrize("ahead", ["1h", "50h"])
def test_a_future_covariate_that_is_not_known_is_refused(driven, ahead):
    model, table, is_later = driven
    future = table[is_later] if ahead == "50h" else None
    with pytest.raises(ValueError, match="'temperature' must be known at all times that are forecast, got none"):
        model.predict(table[~is_later], ahead, future=future)


@pytest.mark.parametrize("refit", [False, True])
def test_a_backtest_is_a_loop_of_fit_and_predict(refit):
    i, t = numpy.repeat(numpy.arange(12), 40), numpy.tile(numpy.arange(40.0), 12)
    table, rows, model = pandas.DataFrame({"id": i, "time": t + i, "y": numpy.sin(t / 3 + i)}), [], None
    found = forecaster("last", level=50).backtest(table, 4.0, n_origins=2, refit=refit)
    for steps in (8, 4):
        past = table.groupby("id").head(40 - steps)
        if refit or model is None:
            model = forecaster("last", level=50).fit(past, horizon=4.0)
        rows.append(model.predict(past, [1.0, 2.0, 3.0, 4.0]).merge(table, on=["id", "time"]))
        rows[-1]["origin"] = rows[-1]["id"].map(past.groupby("id")["time"].max())
    expected = pandas.concat(rows, ignore_index=True).rename(columns={"y": "truth"})
    pandas.testing.assert_frame_equal(found, expected[list(found)])
    dates = table.assign(time=pandas.Timestamp("2020-01-01") + table["time"].map(lambda k: pandas.DateOffset(months=k)))
    by_offset = forecaster("last", level=50).backtest(dates, "4MS", n_origins=2, refit=refit)
    assert (by_offset["truth"] == found["truth"]).all()


def test_an_updated_forecaster_forecasts_from_the_new_rows(tmp_path):
    table = drifting(12, 0)
    row = table.groupby("id").cumcount()
    given, later = table[row < 10].copy(), table[row >= 10]
    model = forecaster("last").fit(given)
    given.loc[:, "hr"] = 0.0  # what is remembered is a copy
    corrected = table.assign(hr=table["hr"].where(row != 9, table["hr"] + 1))
    model.update(corrected[row == 9])
    pandas.testing.assert_frame_equal(model.predict(ahead="1h"), model.predict(corrected[row < 10], "1h"))
    model.update(later).save(tmp_path / "model")
    loaded = SeriesForecaster.load(tmp_path / "model")
    with pytest.raises(ValueError, match="a file of save has no series"):
        loaded.predict(ahead="1h")
    found = loaded.update(later).predict(ahead="1h")
    pandas.testing.assert_frame_equal(found, model.predict(later, "1h"))
    with pytest.raises(ValueError, match="without a time zone"):
        model.update(table.assign(time=table["time"].dt.tz_localize("UTC")))


def test_scores_of_tables_are_cross_validated_by_id_and_by_time():
    i, t = numpy.tile(numpy.arange(12), 20), numpy.repeat(numpy.arange(20.0), 12)
    table = pandas.DataFrame({"id": i, "time": t, "y": numpy.sin(t / 2 + i)})
    for options in ({"groups": table["id"], "cv": GroupKFold(2)}, {"cv": TimeSeriesSplit(2)}):
        scores = cross_val_score(forecaster("last", level=50), table, **options)
        assert len(scores) == 2
        assert (scores < 0).all()
