"""hbnode.data: tables to padded series, and batches of them."""

import copy
import dataclasses
import datetime
import io
import math
import zoneinfo

import numpy
import pandas
import pytest
import torch
from torch.utils.data import DataLoader

import hbnode
from hbnode import data


def make_table(rows=200, seed=0):
    """A shuffled table with holes, duplicates and static columns, as a dictionary of columns."""
    generator = numpy.random.default_rng(seed)
    ids = generator.integers(0, 9, rows)
    table = {
        "id": numpy.array([f"p{i}" for i in ids], dtype=object),
        "time": generator.integers(0, 12, rows) / 4,
        "a": generator.normal(size=rows),
        "b": generator.normal(size=rows),
        "age": 20.0 + ids,
        "sex": ids % 2,
    }
    table["a"][generator.random(rows) < 0.4] = numpy.nan
    table["b"][generator.random(rows) < 0.7] = numpy.nan
    return table


def test_a_row_for_each_measurement():
    table = pandas.DataFrame(make_table()).dropna(how="all", subset=["a", "b"])
    long = table.melt(["id", "time"], ["a", "b"], "what", "value").dropna()
    names = {"id": "id", "time": "time"}
    expected = data.from_long(table, **names, values=["a", "b"])
    series = data.from_long(long, **names, values="value", variable="what")
    assert table_of(series) == table_of(expected)
    turned = data.from_long(long, **names, values="value", variable="what", features=["b", "c", "a"])
    assert turned.features == ["b", "c", "a"]
    assert turned.x[..., [2, 0]].nan_to_num().equal(series.x.nan_to_num())
    assert not turned.mask[..., 1].any()


BEGIN = datetime.datetime(2024, 3, 30, 20, tzinfo=datetime.timezone.utc)  # clocks in Berlin change five hours later


STEPS = {
    "numbers": lambda step: step / 8,
    "whole": lambda step: step,
    "durations": lambda step: datetime.timedelta(minutes=step),
    "dates": lambda step: BEGIN.replace(tzinfo=None) + datetime.timedelta(minutes=step),
    "days": lambda step: BEGIN.date() + datetime.timedelta(days=step),
    "Berlin": lambda step: (BEGIN + datetime.timedelta(minutes=step)).astimezone(zoneinfo.ZoneInfo("Europe/Berlin")),
}


def in_every_library(rows):
    """A table of lists as a dictionary and as frames of pandas (three backends) and polars (each with categories)."""
    polars, plain = pytest.importorskip("polars"), pandas.DataFrame(rows)
    yield "dictionary", rows
    yield "objects", plain.astype(dict.fromkeys(("id", "a", "s"), object))
    yield "pandas", plain
    yield "nullable", plain.convert_dtypes()
    yield "pyarrow", plain.convert_dtypes(dtype_backend="pyarrow")
    yield "categories", plain.astype({"id": "category"})
    frame = polars.DataFrame(rows, strict=False)
    yield "polars", frame
    if frame["id"].dtype == polars.String:
        yield "categorical", frame.with_columns(polars.col("id").cast(polars.Categorical))
        yield "enum", frame.with_columns(polars.col("id").cast(polars.Enum(sorted(set(rows["id"])))))
    if frame["time"].dtype.is_temporal() and frame["time"].dtype != polars.Date:
        for unit in ("ms", "ns"):
            yield unit, frame.with_columns(polars.col("time").dt.cast_time_unit(unit))


def random_rows(kind, random):
    count = int(random.integers(1, 12))
    names = random.choice([["p0", "p1", "p2"], [7, 5, 6]]).tolist()
    ids = [names[i] for i in random.integers(0, 3, count)]
    a, b, static = (random.integers(-9, 9, count).tolist() for _ in range(3))
    is_missing = random.random((2, count)) < 0.4
    return {
        "id": [int(one) if str(one).isdigit() else one for one in ids],
        "time": [STEPS[kind](45 * step) for step in random.integers(0, 8, count).tolist()],
        "a": [None if lost else float(x) for x, lost in zip(a, is_missing[0], strict=True)],
        "b": list(map(float, b)),
        "s": [None if lost else static[ids.index(one)] for one, lost in zip(ids, is_missing[1], strict=True)],
    }


RULES = {"mean": lambda x: sum(x) / len(x), "first": lambda x: x[0], "last": lambda x: x[-1]}


def observed_rows(rows, seconds, rule):
    """What :func:`table_of` must return, row by row, by the standard library's arithmetic of dates."""
    cells, fixed = {}, {}
    for one, time_, a, b, s in zip(*rows.values(), strict=True):
        if type(time_) is datetime.date:
            time_ = datetime.datetime.combine(time_, datetime.time())
        if isinstance(time_, datetime.datetime):
            time_ -= datetime.datetime(1970, 1, 1, tzinfo=time_.tzinfo and datetime.timezone.utc)
        row = cells.setdefault((one, time_ if seconds is None else time_.total_seconds() / seconds), {})
        for feature, value in (("a", a), ("b", b)):
            if value is not None:
                row.setdefault(feature, []).append(value)
        fixed.setdefault(one, {})
        fixed[one] |= {} if s is None else {"s": s}
    merged = {place: {feature: RULES[rule](x) for feature, x in row.items()} for place, row in cells.items()}
    return merged, fixed


UNITS = {"h": 3600.0, "D": 86400.0, datetime.timedelta(minutes=30): 1800.0}


@pytest.mark.parametrize("kind", STEPS)
def test_every_library_gives_the_rows_of_the_table(kind):
    for seed in range(15):
        random = numpy.random.default_rng(seed)
        rows, rule = random_rows(kind, random), random.choice(list(RULES))
        unit = None if kind in ("numbers", "whole") else random.choice(list(UNITS))
        options = {"values": ["a", "b"], "static": "s", "unit": unit, "duplicates": rule, "dtype": torch.float64}
        for library, table in in_every_library(rows):
            series = data.from_long(table, id="id", time="time", **options)
            assert table_of(series) == observed_rows(rows, UNITS.get(unit), rule), library
            assert series.ids == list(dict.fromkeys(rows["id"])), library
            assert series.unit == UNITS.get(unit)
            for b, length in enumerate(series.lengths):
                assert series.t[b].diff().ge(0).all()
                assert (series.t[b, length:] == series.t[b, length - 1]).all()
                assert series.x[b, length:].isnan().all()
                assert not series.mask[b, length:].any()


@pytest.mark.parametrize("unit", ["s", "ns"])
def test_dates_and_durations_as_ids(unit):
    for ids in (STAMPS[:1].astype("datetime64[s]"), numpy.array([90], "timedelta64[m]")):
        column = pandas.Series(ids).astype(f"{ids.dtype.kind}8[{unit}]")
        series = data.from_long({"id": column, "t": [0.0], "a": [1.0]}, id="id", time="t", values="a")
        assert data.Dataset(series, pandas.Series([5.0], index=column)).targets.tolist() == [5.0]


STAMPS = numpy.datetime64("2024-01-01T12:00:00", "ns") + 10 * numpy.arange(6)


def of_times(times, **options):
    rows = numpy.arange(len(times))
    return data.from_long({"id": 0 * rows, "t": times, "a": rows}, id="id", time="t", values="a", **options)


NANOSECONDS = {
    "reversed": STAMPS[::-1],
    "zoned": pandas.Series(STAMPS).dt.tz_localize("Asia/Tokyo"),
    "timedeltas": [pandas.Timedelta(each - STAMPS[0]) for each in STAMPS],
    "integers": STAMPS.astype(numpy.int64) - STAMPS[0].astype(numpy.int64),
}


@pytest.mark.parametrize("kind", NANOSECONDS)
def test_samples_that_are_nanoseconds_apart_stay_apart(kind):
    times, unit = NANOSECONDS[kind], 1e-9 if kind == "integers" else 1.0
    for one in (of_times(times), data.as_series([(times, numpy.arange(6.0)), ([], [])])):
        numpy.testing.assert_allclose(one.t[0] * unit, numpy.arange(6) * 1e-8, rtol=1e-9)
        assert sorted(one.x[0].flatten().tolist()) == [0, 1, 2, 3, 4, 5]
    twice = of_times(numpy.concatenate([times, times]))
    assert twice.x.sort(1).values[0, :, 0].tolist() == [3, 4, 5, 6, 7, 8]  # means of 0 and 6, 1 and 7, ...


def test_dates_with_nanoseconds_and_back():
    for options, last in (({}, 5e-8), ({"origin": STAMPS[1], "unit": numpy.timedelta64(1, "ns")}, 40)):
        series = of_times(STAMPS, **options)
        assert series.dates(series.t).tolist() == [STAMPS.tolist()]
        assert series.times(STAMPS).tolist() == series.t[0].tolist()
        assert series.t[0, -1] == pytest.approx(last)


def test_dates_that_nanoseconds_cannot_reach():
    assert of_times(STAMPS[:1], origin="1600-01-01").t.item() == 13380206400
    months = of_times(numpy.array(["1500-01", "2020-02"], "datetime64[M]"), unit="D")
    assert months.t[0].tolist() == [-171664.0, 18293.0]
    far, near = datetime.datetime(9999, 12, 31), pandas.Timestamp("2024-01-01").as_unit("ns")
    for series in (of_times([far, near]), data.as_series([([far], [1.0]), (numpy.array([near]), [1.0])])):
        assert sorted(series.t.flatten().tolist()) == [1704067200.0, 253402214400.0]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_a_gap_may_exceed_the_largest_integer_of_its_dtype(dtype):
    times = numpy.array([numpy.iinfo(dtype).min, numpy.iinfo(dtype).max], dtype)
    for column in (times, pandas.Series(times, dtype=object)):
        assert of_times(column).t[0].tolist() == times.astype(float).tolist()


def test_times_that_float64_cannot_tell_apart_are_refused():
    numbers = STAMPS.astype(numpy.int64)
    for call in (lambda: of_times(STAMPS, origin="1970-01-01"), lambda: data.as_series([(numbers, numpy.arange(6.0))])):
        with pytest.raises(ValueError, match=r"has .* too close .* Fix: origin=None .*\.min\(\)"):
            call()


def test_a_period_is_its_start():
    months = pandas.period_range("2020-01", periods=3, freq="M")
    for column in (months, pandas.Series(months), list(months), pandas.Series(months, dtype=object)):
        series = of_times(column, unit="D", origin="2020-01-01")
        assert series.t[0].tolist() == series.times(column).tolist() == [0.0, 31.0, 60.0]
    assert series.times(months[1]) == 31.0


def test_time_zones_are_not_mixed():
    zoned = [pandas.Timestamp("2020-01-01", tz="Asia/Tokyo"), pandas.Timestamp("2020-01-01")]
    for column in (zoned, zoned[::-1], pandas.Series(zoned, dtype=object), [zoned[0], datetime.date(2020, 1, 1)]):
        with pytest.raises(TypeError, match="time zone in all entries or in none, got both"):
            of_times(column)
    with pytest.raises(TypeError, match="with a time zone in all or in none, got both in the series"):
        data.as_series([([one], [1.0]) for one in zoned])


def in_hours():
    """A series in hours since the beginning of 2020."""
    dates = pandas.Timestamp("2020-01-01") + pandas.to_timedelta([0.0, 30.5, 48.0], "h")
    frame = pandas.DataFrame({"id": [1, 1, 2], "time": dates, "a": [1.0, 2, 3]})
    return data.from_long(frame, id="id", time="time", values="a", unit="h", origin="2020-01-01")


def test_a_series_knows_its_unit_and_its_origin():
    series = in_hours()
    saved = io.BytesIO()
    torch.save(series, saved)
    saved.seek(0)
    parts = [series.select([0]), series.select(torch.tensor([False, True]))]
    loaded = torch.load(saved, weights_only=True)
    for one in (series, *parts, data.collate(parts), series.to(torch.float64), loaded, copy.deepcopy(series)):
        assert (one.unit, one.origin) == (3600.0, numpy.datetime64("2020-01-01"))
    with pytest.raises(ValueError, match="one unit and origin of time"):
        data.collate([series, data.from_long(make_table(), id="id", time="time", values="a")])


def test_durations_in_the_unit_of_a_series():
    series, hour = in_hours(), datetime.timedelta(hours=1)
    for one in (hour, numpy.timedelta64(1, "h"), pandas.Timedelta("1h"), "1h", 1, torch.tensor(1.0)):
        assert series.durations(one).shape == ()
        assert series.durations([one, one]).tolist() == series.durations([[one], [one]])[:, 0].tolist() == [1.0, 1.0]
    column = pandas.to_timedelta(["1h", "90min", None])
    for kind in (column, pandas.Series(column), column.to_numpy(), list(column)):
        numpy.testing.assert_array_equal(series.durations(kind), [1.0, 1.5, numpy.nan])
    for dates, kind in ((numpy.datetime64("2020-01-02"), TypeError), ([hour, 2.0], TypeError), ("1MS", ValueError)):
        with pytest.raises(kind, match=r"series.times\(dates\)|got 2.0 among them|text such as '1h'"):
            series.durations(dates)


def test_dates_on_the_axis_of_a_series_and_back():
    series, day = in_hours(), datetime.datetime(2020, 1, 2)
    days = [day, day.date(), day.replace(tzinfo=datetime.timezone.utc), numpy.datetime64("2020-01-02"), "2020-01-02"]
    for one in (*days, pandas.Timestamp("2020-01-02 01:00", tz="Europe/Berlin"), 24):
        assert series.times(one).shape == ()
        assert series.times([one, one]).tolist() == series.times([[one], [one]])[:, 0].tolist() == [24.0, 24.0]
    column = pandas.Series(pandas.to_datetime(["2020-01-02 00:00", "2020-01-02 06:30", None]))
    for kind in (column, column.to_numpy(), column.dt.tz_localize("UTC"), list(column)):
        numpy.testing.assert_array_equal(series.times(kind), [24.0, 30.5, numpy.nan])
    numpy.testing.assert_array_equal(series.dates(torch.tensor([24.0, 30.5, torch.nan])), column)
    assert series.dates(torch.tensor(-1e-9)) == numpy.datetime64("2019-12-31T23:59:59.999996")
    for dates, kind in ((datetime.timedelta(1), TypeError), ([day, 2.0], TypeError), (["02/01/2020"], ValueError)):
        with pytest.raises(kind, match=r"series.durations\(durations\)|got 2.0 among them|ISO text.*to_datetime"):
            series.times(dates)


def test_numbers_have_no_unit_until_the_user_says_so():
    plain = data.from_long(make_table(), id="id", time="time", values="a")
    assert plain.durations([0.5]).tolist() == plain.times([0.5]).tolist() == [0.5]
    for call in (lambda: plain.durations("1h"), lambda: plain.times("2020-01-01"), lambda: plain.dates(plain.t)):
        with pytest.raises(TypeError, match=r"unit=None and origin=None.*Fix: numbers in the unit of t; or"):
            call()


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        ({}, {"unit": "h"}, ValueError, "unit='h' is for dates, .* holds numbers"),
        ({"t": STAMPS[:3]}, {"origin": pandas.NaT}, ValueError, "origin must be one date, got NaT"),
        ({"t": STAMPS[:3]}, {"unit": "minutes"}, ValueError, "unit must be one of .* Fix: 'min'"),
        ({}, {"values": "b"}, KeyError, r"no column 'b'.* Fix: 'id', or another of them\."),
        ({"id": pandas.array(["x", None, "y"], dtype="string")}, {}, ValueError, "'id' has missing entries"),
        ({"t": [0.0, math.nan, 1.0]}, {}, ValueError, r"table\['t'\] is missing or infinite in row 1"),
        ({"t": ["2020-01-01"] * 3}, {}, TypeError, r"must hold numbers or dates, got text. Fix: pandas.to_datetime"),
        ({"a": list("xyz")}, {"values": ["a", "s"]}, TypeError, r"must hold numbers.* Fix: values=\['s'\]; codes"),
        ({"a": [1.0, math.inf, 2.0]}, {}, ValueError, "'a' holds infinite values"),
        ({"a": [1.0]}, {}, ValueError, "one entry per row, got lengths .*'a': 1"),
        ({}, {"values": ["a", "s", "a"]}, ValueError, r"values must name each column once.* Fix: values=\['a', 's'\]"),
        ({"s": [1.0, 2.0, 2.0]}, {"static": "s"}, ValueError, "static column 's' changes within series 1"),
        ({"t": [0.0] * 3, "a": [1.0, 2.0, 3.0]}, {"duplicates": "error"}, ValueError, "first 'a' of .* at t=0.0. Fix"),
        ({}, {"features": ["a"]}, ValueError, "features= needs variable="),
    ],
)
def test_tables_that_are_refused(change, options, kind, message):
    good = {"id": [1, 1, 2], "t": [0.0, 1.0, 0.0], "a": [1.0, None, 3.0], "s": [1.0, 1.0, 2.0]}
    with pytest.raises(kind, match=message):
        data.from_long(good | change, **{"id": "id", "time": "t", "values": "a"} | options)


@pytest.mark.parametrize("kind", [hbnode.ODERNN, hbnode.nn.Oscillators, hbnode.nn.OscillatorStack])
def test_every_layer_takes_a_series(kind):
    series = data.from_long(make_table(), id="id", time="time", values=["a", "b"], static=["age", "sex"])
    series = dataclasses.replace(series, static=series.static / 30)
    layer, short = kind(2, 4, static_size=2), int(series.lengths.argmin())
    output, state = layer(**series.inputs())
    by_hand, end = layer(series.x, series.t, None, series.mask, series.lengths, series.static)
    assert output.equal(by_hand)
    alone, _ = layer(**series.select([short]).inputs())
    torch.testing.assert_close(alone[0], output[short, : series.lengths.min()], rtol=1e-4, atol=1e-5)
    ahead, _ = layer.forecast(state, series.durations([0.5, 2.0]))
    assert ahead.equal(layer.forecast(end, [0.5, 2.0])[0])
    with pytest.raises(ValueError, match=rf"Fix: {kind.__name__}\(..., static_size=2\)"):
        kind(2, 4)(**series.inputs())


def test_batches_for_a_data_loader():
    series = data.from_long(make_table(), id="id", time="time", values=["a", "b"], static="age")
    dataset, indices = data.Dataset(series, torch.arange(9)), []
    sampler = data.bucketed_batches(series.lengths, 4)
    for batch, y in DataLoader(dataset, batch_sampler=sampler, collate_fn=data.collate):
        assert batch.ids == series.select(y).ids
        assert table_of(batch) == table_of(series.select(y))
        indices += y.tolist()
    assert sorted(indices) == list(range(9))
    (batch,) = DataLoader(data.Dataset(series), batch_size=9, collate_fn=data.collate)
    assert batch.ids == series.ids
    with pytest.raises(ValueError, match="got 1 targets of 2 series"):
        data.collate([series.select([0]), (series.select([1]), 1.0)])


def test_targets_are_paired_by_id():
    series = data.from_long(make_table(), id="id", time="time", values="a")
    by_id, no_ids = pandas.Series(range(9), index=series.ids)[::-1], pandas.Series(range(9))
    for one in (by_id, by_id.to_frame(), no_ids, no_ids.to_frame()):
        ((_, y),) = DataLoader(data.Dataset(series, one), batch_size=9, collate_fn=data.collate)
        assert y.flatten().tolist() == list(range(9))
    again = series.select(torch.tensor([3, 0, 3, 5]))  # as a bootstrap draws them
    assert data.Dataset(again, by_id.loc[again.ids[::-1]]).targets.tolist() == [3, 0, 3, 5]
    for index in (range(9, 0, -1), [*series.ids[:8], series.ids[0]]):
        with pytest.raises(ValueError, match=r"the index of targets must be the ids.*Fix: targets.to_numpy\(\)"):
            data.Dataset(series, by_id.set_axis(index))
    with pytest.raises(ValueError, match="an id more than once"):  # and another one less often
        data.Dataset(series.select([0, 0, 1]), pandas.Series(range(3), index=[series.ids[i] for i in (0, 1, 1)]))
    with pytest.raises(TypeError, match=r"got dict\. Fix"):  # len() and [0] work for some
        data.Dataset(series, by_id.to_dict())
    with pytest.raises(ValueError, match="targets must be one for each of 9 series, got 8"):
        data.Dataset(series, torch.arange(8))


def test_batches_of_like_length():
    lengths = torch.randint(1, 1000, (640,))
    sampler = data.bucketed_batches(lengths, 16, generator=torch.Generator().manual_seed(0))
    first, second = list(sampler), list(sampler)
    assert len(first) == len(sampler) == 40
    assert sorted(i for batch in first for i in batch) == list(range(640))
    assert first != second
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in first)
    assert padded < 1.05 * lengths.sum()
    assert list(data.bucketed_batches(lengths, 16, generator=torch.Generator().manual_seed(0))) == first
    assert [len(batch) for batch in data.bucketed_batches(lengths[:21], 5, drop_last=True)] == [5] * 4
    in_order = list(data.bucketed_batches(lengths[:21], 5, shuffle=False, drop_last=True))
    assert [len(batch) for batch in in_order] == [5] * 4
    assert [int(lengths[i]) for batch in in_order for i in batch] == sorted(lengths[:21].tolist())[:20]


def test_features_that_are_not_wanted_leave_no_samples():
    rows = [(1, 0.0, "hr", 1.0), (1, 1.0, "x", 2.0), (1, 2.0, "hr", 3.0), (2, 0.0, "x", 4.0), (3, 5.0, "hr", 6.0)]
    table = dict(zip(("id", "t", "what", "y"), zip(*rows, strict=True), strict=True)) | {"age": [7, 7, 7, 8, 9]}
    options = {"id": "id", "time": "t", "values": "y", "variable": "what", "static": "age"}
    series = data.from_long(table, **options, features="hr")
    cells = {(1, 0.0): {"hr": 1.0}, (1, 2.0): {"hr": 3.0}, (3, 5.0): {"hr": 6.0}}
    assert table_of(series) == (cells, {1: {"age": 7.0}, 2: {"age": 8.0}, 3: {"age": 9.0}})
    assert series.t.tolist() == [[0.0, 2.0], [0.0, 0.0], [5.0, 5.0]]
    batch = data.collate([series.select([i]) for i in (1, 2, 0)])
    assert batch.lengths.tolist() == [0, 1, 2]
    assert batch.t.tolist() == [[0.0, 0.0], [5.0, 5.0], [0.0, 2.0]]
    for layer in (hbnode.ODERNN(1, 4, time_unit=10.0), hbnode.nn.Oscillators(1, 4), hbnode.nn.OscillatorStack(1, 4)):
        plain = dataclasses.replace(series, static=None)
        with pytest.raises(ValueError, match=r"Fix: series = series.select\(series.lengths > 0\)"):
            layer(**plain.inputs())
        assert len(layer(**plain.select(plain.lengths > 0).inputs())[0]) == 2
    with pytest.raises(ValueError, match=r"'what' has none of the features \['bp'\]; it has \['hr', 'x'\]"):
        data.from_long(table, **options, features="bp")


# Series as in fit


def test_channels_and_static_features_are_put_in_the_order_of_fit():
    table, names = make_table(), {"id": "id", "time": "time"}
    fit = data.from_long(table, **names, values=["a", "b"], static=["age", "sex"])
    other = data.from_long(table, **names, values=["b", "a"], static=["sex", "age"])
    found = data.aligned(other, fit.features, fit.static_features)
    assert found.features == fit.features
    assert table_of(found) == table_of(fit)
    unnamed = data.as_series(dataclasses.replace(other, features=(), static_features=()))
    assert data.aligned(unnamed, fit.features, fit.static_features) is unnamed  # by position
    assert data.aligned(other, unnamed.features, unnamed.static_features) is other
    for names, statics, message in (
        (["a", "b"], ["age"], r"1 static features as in fit, got 2: missing \[\], unknown \['sex'\]"),
        (["a", "c"], None, r"2 channels as in fit, got 2: missing \['c'\], unknown \['b'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            data.aligned(other, names, statics)
    with pytest.raises(ValueError, match=r"features must be 2 different names, got \['a', 'a'\]. Fix"):
        data.as_series(dataclasses.replace(other, features=["a", "a"]))


# Other forms of data


def test_series_are_indexed_like_a_list():
    series = data.from_long(make_table(), id="id", time="time", values=["a", "b"], static="age")
    names, mask = series.ids, numpy.arange(9) % 2 == 0
    for index in (slice(0, 2), slice(None, None, -2), range(3), [], [4, -1, 4], numpy.arange(9)[::-1]):
        expected = names[index] if isinstance(index, slice) else [names[i] for i in index]
        assert series[index].ids == expected
        assert series[index].static[:, 0].tolist() == [20.0 + int(name[1:]) for name in expected]
    for form in (mask, mask.tolist(), torch.tensor(mask), pandas.Series(mask, index=names)):
        assert series[form].ids == names[::2]
    assert series[numpy.int64(-1)].ids == series[torch.tensor(8)].ids == names[-1:]
    with pytest.raises(IndexError):  # ends a loop over the series
        series[9]
    for index in ([True], [[0]], [0.5]):
        with pytest.raises(ValueError, match=r"index must be integers \(n,\), a slice, or a bool mask \(9,\)"):
            series[index]


def table_of(series):
    """The observed values of series as {(id, time): {feature: value}} and {id: {static feature: value}}."""
    cells, fixed = {}, {}
    for b, name in enumerate(series.ids):
        for i in range(int(series.lengths[b])):
            row = cells.setdefault((name, float(series.t[b, i])), {})
            row |= {f: float(series.x[b, i, c]) for c, f in enumerate(series.features) if series.mask[b, i, c]}
        static = [] if series.static is None else series.static[b].tolist()
        pairs = zip(series.static_features, static, strict=True)
        fixed[name] = {f: value for f, value in pairs if not math.isnan(value)}
    return cells, fixed


def test_batches_of_items_in_other_orders_and_without_static_features():
    table = make_table()
    for seed in range(10):
        random = numpy.random.default_rng(seed)
        parts, expected = [], ({}, {})
        for one in dict.fromkeys(table["id"]):
            rows = {name: column[table["id"] == one] for name, column in table.items()}
            static = random.permutation(["age", "sex"]).tolist() if random.random() < 0.6 else None
            names = {"id": "id", "time": "time", "values": random.permutation(["a", "b"])}
            parts.append(data.from_long(rows, **names, static=static))
            for whole, part in zip(expected, table_of(parts[-1]), strict=True):
                whole |= part
        for batch in (data.collate(parts), data.as_series(parts), data.collate([(one, 0.0) for one in parts])[0]):
            assert table_of(batch) == expected
            assert batch.features == parts[0].features
    first, second = (dataclasses.replace(part, features=["a", "b"]) for part in parts[:2])
    with pytest.raises(ValueError, match="all series must have ids, or none, got 1 ids of 2 series"):
        data.collate([dataclasses.replace(first, ids=()), second])
    with pytest.raises(ValueError, match=r"missing \['b'\], unknown \['c'\]"):
        data.collate([first, dataclasses.replace(second, features=["a", "c"])])


def test_infinite_values_are_refused_unless_the_mask_hides_them():
    series = data.from_long(make_table(), id="id", time="time", values=["a", "b"], static="age")
    x = torch.where(torch.tensor([False, True]), torch.inf, series.x)
    hidden = dataclasses.replace(series, x=x, mask=series.mask & torch.tensor([True, False]))
    assert data.as_series(hidden) is hidden
    assert len(data.collate([hidden])) == 9
    static = torch.full_like(series.static, -torch.inf)
    for wrong, name in ((dataclasses.replace(series, x=x), "b"), (dataclasses.replace(series, static=static), "age")):
        for call in (data.as_series, lambda s: data.as_series([s]), lambda s: data.collate([(s, 0.0)])):
            with pytest.raises(ValueError, match=f"'{name}' holds infinite values"):
                call(wrong)


def test_a_dtype_that_makes_numbers_infinite_is_refused():
    series = data.as_series([([0.0, 1.0], [[1.0, 2.0], [3.0, 1e39]]), ([0.0], [[1.0, 2.0]])])
    static = dataclasses.replace(data.as_series([([0.0], [1.0])]), static=torch.tensor([[1e39]], dtype=torch.float64))
    for wrong, name in ((series, "x1"), (static, "static0")):
        with pytest.raises(ValueError, match=rf"'{name}' .* infinite in torch.float32.*torch.float64\)\."):
            wrong.to("cpu", torch.float32)
    hidden = dataclasses.replace(series, mask=series.x < 1e39)
    assert hidden.to(torch.float32).x.dtype == torch.float32
    assert series.to("meta", torch.float32).x.is_meta
    assert dataclasses.replace(series, x=series.x * torch.inf).to(torch.float32).x[0].isinf().all()
    table = {"id": [1, 1], "t": [0.0, 1.0], "a": [0.0, 1.0], "big": [1e39, 1e39]}
    for options in ({"values": ["a", "big"]}, {"values": "a", "static": "big"}):
        with pytest.raises(ValueError, match=r"'big' .* infinite in torch.float32. Fix: dtype=torch.float64"):
            data.from_long(table, id="id", time="t", **options)


TIMES = {
    "numbers": lambda hours: hours / 7,
    "durations": lambda hours: pandas.to_timedelta(3_600_000 * hours, "ms").round("ms"),
    "dates": lambda hours: pandas.Timestamp("2024-02-29 01:02:03.456789") + TIMES["durations"](hours),
    "nanoseconds": lambda hours: STAMPS[0] + numpy.round(hours * 1e3).astype("timedelta64[ns]"),
}


@pytest.mark.parametrize("kind", TIMES)
def test_a_table_of_a_series_gives_the_series(kind):
    for seed in range(15):
        table, random = make_table(40, seed), numpy.random.default_rng(seed)
        table["time"] = TIMES[kind](random.uniform(0, 100, 40).round(3))
        unit = random.choice(["s", "min", "h", "D", "W"]) if kind != "numbers" else None
        options = {"values": ["a", "b"], "static": ["age", "sex"], "unit": unit}
        series = data.from_long(table, id="id", time="time", **options)
        frame = series.to_frame(id="who", time="when")
        assert list(frame) == ["who", "when", "a", "b", "age", "sex"]
        again = data.from_long(frame.sample(frac=1.0), id="who", time="when", **options, origin=series.origin)
        assert table_of(again) == table_of(series)
        assert (again.unit, again.origin) == (series.unit, series.origin)
        numpy.testing.assert_array_equal(numpy.sort(frame["when"]), numpy.sort(table["time"]))


def test_tables_of_series_without_names_and_with_hidden_values():
    plain = dataclasses.replace(data.as_series([([0.5, 1.0], [1.0, 2.0]), ([], [])]), ids=(), features=())
    hidden = dataclasses.replace(plain, mask=plain.mask & (plain.x < 2), lengths=torch.tensor([2, 0]))
    frame = hidden.to_frame()
    expected = pandas.DataFrame({"id": [0, 0], "time": [0.5, 1.0], "x0": [1.0, math.nan]})
    pandas.testing.assert_frame_equal(frame, expected)


def test_lists_are_pairs_if_no_array_can_be_meant():
    t, x = numpy.arange(3.0), numpy.ones((3, 2))
    days = pandas.date_range("2020-01-01", periods=3)
    for one in ((t, x), (days, x), (days, [1, 2, 3]), (list(days - days[0]), [1, 2, 3])):
        expected = data.as_series([one, one])
        for form in ((one, one), [list(one)] * 2, [(tuple(one[0]), tuple(one[1]))] * 2):
            assert data.is_list_of_series(form)
            found = data.as_series(form)
            assert found.t.equal(expected.t)
            assert found.x.equal(expected.x)
    assert data.as_series([[[0, 1, 2], [3, 4, 5]]]).x.shape == (1, 3, 2)  # an array of one series with two channels


def test_pairs_arrays_and_tables_give_the_same_series():
    t, x = [0.0, 0.5, 2.0], numpy.array([[1.0, 4.0], [numpy.nan, 5.0], [3.0, numpy.nan]])
    pairs = data.as_series([(t[::-1], x[::-1]), ([1.0], [[7.0, 8.0]])])
    rows = [(0, *row) for row in zip(t, *x.T, strict=True)] + [(1, 1.0, 7.0, 8.0)]
    table = data.as_series(pandas.DataFrame(rows, columns=["id", "t", "x0", "x1"]), id="id", time="t")
    assert table_of(dataclasses.replace(pairs, ids=[0, 1])) == table_of(table)
    assert data.as_series(pairs) is pairs


def test_arrays_have_channels_before_times_and_nan_padding():
    x = numpy.arange(12.0).reshape(2, 2, 3)
    x[1, :, 2] = numpy.nan
    series = data.as_series(x)
    assert series.lengths.tolist() == [3, 2]
    assert series.t.tolist() == [[0.0, 1.0, 2.0], [0.0, 1.0, 1.0]]
    assert series.x[0].T.tolist() == x[0].tolist()
    unequal = data.as_series([x[0], x[1, :, :2]])
    torch.testing.assert_close(unequal.x, series.x, equal_nan=True)
    assert data.as_series(x[:, 0]).x.shape == (2, 3, 1)


@pytest.mark.parametrize("gap", [1, 300])
def test_times_that_float32_has_rounded_are_refused(gap):
    """At 1.7e9 it stores multiples of 128, which would merge samples to one, or move them."""
    exact = 1.7e9 + gap * numpy.arange(6.0)
    t, x = exact.astype(numpy.float32), numpy.ones(6)
    table = pandas.DataFrame({"id": 1, "time": t, "x": x})
    series = dataclasses.replace(data.as_series([(exact, x)]), t=torch.tensor(t).unsqueeze(0))
    for given in ([(t, x)], [(torch.tensor(t), x)], table, table.to_dict("series"), series):
        options = {} if given is series or type(given) is list else {"id": "id", "time": "time"}
        with pytest.raises(ValueError, match=r"has lost digits: torch\.float32 stores times near 1.7e\+09"):
            data.as_series(given, **options)
    assert data.as_series([(exact, x)]).t.diff().unique().tolist() == [gap]


def test_series_without_values_keep_one_missing_sample():
    assert data.as_series([([], numpy.zeros((0, 2))), ([0.0], [[1.0, 2.0]])]).lengths.tolist() == [1, 1]
    assert data.as_series(numpy.full((1, 2, 4), numpy.nan)).lengths.tolist() == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([numpy.zeros((2, 3)), numpy.zeros((3, 3))], "one number of channels"),
        ([(numpy.zeros(3), numpy.zeros((2, 3)))], r"\(t, x.T\)"),
        ({"a": [1]}, "id=None"),
        (pandas.DataFrame(numpy.zeros((3, 4))), r"table\.to_numpy\(\) for one series"),
        ([[numpy.zeros(4), numpy.ones(4)]], r"tuple \(t, x\)"),  # an array (1, 2, 4), of which t would be a channel
        ((numpy.zeros(4), numpy.ones(4)), r"\[\(t, x\)\]"),
    ],
)
def test_other_data_are_refused_by_name(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        data.as_series(given)
