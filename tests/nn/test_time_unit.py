"""The unit of time of an ODE-RNN: fitted, kept, in the user's units at the edges; dates as times."""

import copy
import datetime
import warnings

import numpy
import pytest
import torch

import hbnode
from hbnode._times import as_duration, as_times

EASY = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = torch.tensor([6, 4, 2])


def make_series(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 2, generator=generator, dtype=dtype)
    return x, (0.2 + torch.rand(3, 6, generator=generator, dtype=torch.float64)).cumsum(1).to(dtype)


@pytest.mark.parametrize("scale", [1000.0, 1e-3])
@pytest.mark.parametrize(("field", "missing"), [("hbnode", "decay"), ("ghbnode", "zero"), ("node", "hold")])
def test_equal_answers_for_t_and_multiples_of_t(field, missing, scale):
    x, t = make_series(torch.float32)
    mask = torch.rand(3, 6, 2, generator=torch.Generator().manual_seed(1)) < 0.7
    rnn = hbnode.ODERNN(2, 5, field=field, missing=missing, elapsed_features=True, **EASY)
    other = copy.deepcopy(rnn)
    rnn.fit_time_unit(t, mask, LENGTHS)
    other.fit_time_unit(scale * t, mask, LENGTHS)
    (output, state), (same, end) = (one(x, s * t, mask=mask, lengths=LENGTHS) for one, s in ((rnn, 1), (other, scale)))
    torch.testing.assert_close(same, output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end.t, scale * state.t)
    ahead, later = rnn.forecast(state, [0.5, 2.0])
    same, end = other.forecast(end, [0.5 * scale, 2.0 * scale])
    torch.testing.assert_close(same, ahead, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end.t, scale * later.t)


def test_a_unit_is_a_change_of_the_field():
    """h' = f(t / u, h) / u: against an ODE-RNN whose field is rescaled by hand."""
    inner = hbnode.nn.MLP(4, [6], 4, activation=torch.nn.Tanh, time_dependent=True)
    rnn = hbnode.ODERNN(2, 4, field=hbnode.NODE(inner), time_unit=3.0, rtol=1e-9, atol=1e-9).double()
    twin = hbnode.ODERNN(2, 4, field=hbnode.NODE(lambda t, h: inner(t / 3, h) / 3), rtol=1e-9, atol=1e-9).double()
    twin.cell, twin.start = rnn.cell, rnn.start
    x, t = make_series()
    torch.testing.assert_close(rnn(x, t)[0], twin(x, t)[0], rtol=1e-7, atol=1e-8)
    t.requires_grad_()
    slopes = [torch.autograd.grad(one(x, t)[0].square().sum(), t)[0] for one in (rnn, twin)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-7)


def test_the_median_gap_without_padding():
    rnn = hbnode.ODERNN(2, 4)
    t = torch.tensor([[0.0, 1.0, 3.0, 6.0], [5.0, 15.0, 0.0, 0.0]])
    assert rnn.fit_time_unit(t, lengths=torch.tensor([4, 2])) is rnn
    assert rnn.time_unit == 20.0  # gaps 1, 2, 3, 10
    seen = torch.tensor([[True, False, True, True], [True, True, False, False]])
    assert rnn.fit_time_unit(t, seen).time_unit == 30.0  # gaps 3, 3, 10
    assert rnn.fit_time_unit(t, seen.unsqueeze(-1).expand(2, 4, 3)).time_unit == 30.0
    assert rnn.fit_time_unit([0, 2, 4]).time_unit == 20.0
    days = numpy.datetime64("2020-01-01") + numpy.arange(3)
    assert rnn.fit_time_unit(days).time_unit == 864000.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0.0], [1.0]],), "no two samples"),
        (([0.0, 1.0, 1.0],), "must increase.*from_long"),
        ((torch.zeros(2, 2, 2),), r"t must be \(batch, T\)"),
        (([0.0, float("nan")],), "not finite"),
        (([0.0, 1.0], torch.ones(3, dtype=torch.bool)), "mask must be"),
        (([0.0, 1.0], None, [1, 2]), "lengths must be"),
    ],
    ids=["one", "ties", "shape", "nan", "mask", "lengths"],
)
def test_times_that_cannot_be_fitted(arguments, message):
    with pytest.raises(ValueError, match=message):
        hbnode.ODERNN(2, 4).fit_time_unit(*arguments)


def test_the_unit_is_kept_and_shown():
    rnn = hbnode.ODERNN(2, 4, time_unit=86400.25)
    fresh = hbnode.ODERNN(2, 4)
    fresh.load_state_dict(rnn.state_dict())
    assert fresh.time_unit == copy.deepcopy(rnn).half().time_unit == 86400.25
    assert "time_unit=86400" in repr(rnn)
    rnn.time_unit = datetime.timedelta(hours=1)
    assert rnn.time_unit == 3600
    for wrong in (0.0, -1, float("nan"), "h", None):
        with pytest.raises(ValueError, match="time_unit must be a positive number or a duration"):
            rnn.time_unit = wrong
    before = {key: value for key, value in fresh.state_dict().items() if key != "time_unit"}
    hbnode.ODERNN(2, 4).load_state_dict(before)  # of a version that had no unit, which was 1
    with pytest.warns(UserWarning, match="does not hold the constant 'time_unit'"):
        fresh.load_state_dict(before)


def test_slow_gaps_are_told_once():
    rnn = hbnode.ODERNN(2, 8, field="ghbnode")
    with torch.no_grad():
        for p in rnn.field.parameters():
            p.mul_(2)
    x, t = make_series(torch.float32)
    with pytest.warns(UserWarning, match=r"time_unit=1\. Fix: before training, rnn.fit_time_unit\(t\)"):
        rnn(x, 20 * t)
    rnn(x, 20 * t)
    fitted = copy.deepcopy(rnn).fit_time_unit(20 * t)
    fitted.has_warned = False
    fitted(x, 20 * t)
    assert fitted.nfe.forward < rnn.nfe.forward / 4
    tight = hbnode.ODERNN(2, 8, field=rnn.field, rtol=1e-6, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tight(x, 20 * t)


def test_a_failure_tells_the_users_time():
    rnn = hbnode.ODERNN(2, 4, time_unit=2.0, max_steps=3, options={"max_step": 0.1})
    x, t = make_series(torch.float32)
    with pytest.raises(
        hbnode.errors.MaxStepsError, match=r"rnn.fit_time_unit\(t\), or time_unit= \(it is 2\)"
    ) as failure:
        rnn(x, 100.0 + 10 * t)
    assert 100 < failure.value.t < 200


class Column:
    """As much of a column of polars as is asked for."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values


def test_dates_and_durations_are_seconds():
    days = numpy.array(["2020-01-01", "2020-01-02", "2020-01-04"], dtype="datetime64[D]")
    seconds = torch.tensor([1577836800.0, 1577923200.0, 1578096000.0], dtype=torch.float64)
    standard = [datetime.datetime(2020, 1, day) for day in (1, 2, 4)]
    aware = [date.replace(tzinfo=datetime.timezone.utc) for date in standard]
    kinds = (days, days.astype("datetime64[ns]"), Column(days), list(days), standard, aware)
    for dates in (*kinds, [date.date() for date in standard], numpy.array(aware, dtype=object)):
        assert as_times(dates, "t").equal(seconds)
        if isinstance(dates, list):
            assert as_times([dates], "t").equal(seconds[None])
    assert as_times(days - days[0], "dt").equal(seconds - seconds[0])
    assert as_times([datetime.timedelta(hours=1)], "dt").tolist() == [3600.0]
    assert as_duration(numpy.timedelta64(2, "h"), "time_unit") == 7200.0


def test_dates_of_pandas():
    pandas = pytest.importorskip("pandas")
    dates = pandas.Series(pandas.to_datetime(["2020-01-01", "2020-01-02", "2020-01-04"]))
    expected = as_times(dates.to_numpy(), "t")
    for kind in (dates, pandas.DatetimeIndex(dates), dates.dt.tz_localize("UTC"), list(dates), dates.to_frame().T):
        assert as_times(kind, "t").reshape(-1).equal(expected)
    berlin = dates.dt.tz_localize("Europe/Berlin")
    assert as_times(berlin, "t").equal(expected - 3600)
    assert as_duration(pandas.Timedelta("1h"), "time_unit") == 3600
    x = torch.randn(2, 3, 2)
    rnn = hbnode.ODERNN(2, 4).fit_time_unit(dates)
    output, state = rnn(x, dates)
    by_number = hbnode.ODERNN(2, 4, time_unit=10.0 * 1.5)
    by_number.load_state_dict(rnn.state_dict() | {"time_unit": torch.tensor(rnn.time_unit / 86400)})
    torch.testing.assert_close(output, by_number(x, [0.0, 1.0, 3.0])[0], rtol=1e-4, atol=1e-5)
    ahead, _ = rnn.forecast(state, pandas.to_timedelta(["1h", "2h"]))
    assert ahead.equal(rnn.forecast(state, [3600.0, 7200.0])[0])
    with pytest.raises(ValueError, match="t is not finite"):
        rnn(x, pandas.Series([dates[0], pandas.NaT, dates[2]]))
