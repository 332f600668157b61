"""Times, units of time, masks and lengths of series, as an ODERNN takes them."""

import copy
import dataclasses
import datetime
import re
import warnings

import numpy
import pandas
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import hbnode

LENGTHS = torch.tensor([6, 4, 2])
close = torch.testing.assert_close


def make_series(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 2, generator=generator, dtype=dtype)
    return x, (0.2 + torch.rand(3, 6, generator=generator, dtype=torch.float64)).cumsum(1).to(dtype)


# Units of time


@pytest.mark.sparse
@pytest.mark.parametrize("scale", [1000.0, 1e-3])
@pytest.mark.parametrize(("field", "missing"), [("hbnode", "decay"), ("ghbnode", "zero"), ("node", "hold")])
def test_equal_answers_for_t_and_multiples_of_t(field, missing, scale):
    x, t = make_series()
    mask = torch.rand(3, 6, 2, generator=torch.Generator().manual_seed(1)) < 0.7
    rnn = hbnode.ODERNN(2, 5, field=field, missing=missing, elapsed_features=True)
    other = copy.deepcopy(rnn)
    rnn.fit_time_unit(t, mask, LENGTHS)
    other.fit_time_unit(scale * t, mask, LENGTHS)
    (output, state), (same, end) = (one(x, s * t, mask=mask, lengths=LENGTHS) for one, s in ((rnn, 1), (other, scale)))
    close(same, output, rtol=1e-5, atol=1e-5)
    close(end.t, scale * state.t)
    (ahead, later), (same, end) = rnn.forecast(state, [0.5, 2.0]), other.forecast(end, [0.5 * scale, 2.0 * scale])
    close(same, ahead, rtol=1e-5, atol=1e-5)
    close(end.t, scale * later.t)


def test_a_unit_is_a_change_of_the_field():
    """h' = f(t / u, h) / u."""
    inner = hbnode.nn.MLP(4, [6], 4, activation=torch.nn.Tanh, time_dependent=True)
    rnn = hbnode.ODERNN(2, 4, field=hbnode.NODE(inner), time_unit=3.0, rtol=1e-9, atol=1e-9).double()
    other = hbnode.ODERNN(2, 4, field=hbnode.NODE(lambda t, h: inner(t / 3, h) / 3), rtol=1e-9, atol=1e-9).double()
    other.cell, other.start = rnn.cell, rnn.start
    x, t = make_series(torch.float64)
    close(rnn(x, t)[0], other(x, t)[0], rtol=1e-7, atol=1e-8)
    t.requires_grad_()
    slopes = [torch.autograd.grad(one(x, t)[0].square().sum(), t)[0] for one in (rnn, other)]
    close(*slopes, rtol=1e-6, atol=1e-7)


def test_the_fitted_unit_is_ten_median_gaps_without_padding():
    rnn = hbnode.ODERNN(2, 4)
    t = torch.tensor([[0.0, 1.0, 3.0, 6.0], [5.0, 15.0, 0.0, 0.0]])
    assert rnn.fit_time_unit(t, lengths=torch.tensor([4, 2])) is rnn
    assert rnn.time_unit == 20.0  # gaps 1, 2, 3, 10
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    assert rnn.fit_time_unit(t, mask).time_unit == 30.0  # gaps 3, 3, 10
    assert rnn.fit_time_unit(t, mask.unsqueeze(-1).expand(2, 4, 3)).time_unit == 30.0
    assert rnn.fit_time_unit([0, 2, 2, 2, 4]).time_unit == 20.0  # equal times are no gap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0.0], [1.0]],), "no two samples"),
        (([0.0, 1.0, 0.5],), "must not decrease.*lengths="),
        ((torch.zeros(2, 2, 2),), r"t must be \(batch, T\)"),
        (([0.0, float("nan")],), "not finite"),
        (([0.0, 1.0], torch.ones(3, dtype=torch.bool)), "mask must be"),
        (([[0.0, 1.0]], None, [1, 2]), "lengths must be"),
    ],
)
def test_times_that_cannot_be_fitted(arguments, message):
    with pytest.raises(ValueError, match=message):
        hbnode.ODERNN(2, 4).fit_time_unit(*arguments)


def test_the_unit_is_saved_and_shown():
    rnn, fresh = hbnode.ODERNN(2, 4, time_unit=86400.25), hbnode.ODERNN(2, 4)
    fresh.load_state_dict(rnn.state_dict())
    assert fresh.time_unit == copy.deepcopy(rnn).half().time_unit == 86400.25
    assert "time_unit=86400" in repr(rnn)
    rnn.time_unit = torch.tensor(3600.0)
    assert rnn.time_unit == 3600
    for wrong in (0.0, -1, float("nan"), None):
        with pytest.raises(ValueError, match="time_unit must be a positive number"):
            rnn.time_unit = wrong
    without = {key: value for key, value in fresh.state_dict().items() if key != "time_unit"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"time_unit"'):
        fresh.load_state_dict(without)


def test_slow_gaps_warn_once():
    rnn = hbnode.ODERNN(2, 8, field="ghbnode")
    with torch.no_grad():
        for p in rnn.field.parameters():
            p.mul_(2)
    x, t = make_series()
    with pytest.warns(UserWarning, match=r"time_unit=1\. Fix: before training, rnn.fit_time_unit\(t\)"):
        rnn(x, 20 * t)
    rnn(x, 20 * t)
    fitted = copy.deepcopy(rnn).fit_time_unit(20 * t)
    fitted.has_warned = False
    fitted(x, 20 * t)
    assert fitted.nfe.forward < rnn.nfe.forward / 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hbnode.ODERNN(2, 8, field=rnn.field, rtol=1e-6, atol=1e-6)(x, 20 * t)


def test_a_unit_that_was_never_set_warns_from_gaps_of_about_one():
    x, t = torch.randn(4, 9, 2), torch.arange(9.0)
    tight = {"rtol": 1e-5, "atol": 1e-5}
    fresh = {"hbnode": hbnode.ODERNN(2, 8, **tight), "ghbnode": hbnode.ODERNN(2, 8, field="ghbnode", **tight)}
    for rnn in fresh.values():
        with pytest.warns(UserWarning, match=r"1[3-9]|[2-4]\d function evaluations.*Fix: before training") as caught:
            rnn(x, t)
        rnn(x, t)  # once
        unit = float(str(caught[0].message).split("time_unit=")[-1].rstrip(")."))
        assert unit == 10.0
        fitted = copy.deepcopy(rnn)
        fitted.time_unit, fitted.has_warned = unit, False
        fitted(x, t)
        assert fitted.nfe.forward < rnn.nfe.forward / 1.5
    hbnode.ODERNN(2, 8)(x, t / 2)  # these gaps are short enough
    hbnode.ODERNN(2, 8, time_unit=1.0)(x, t)  # a choice
    hbnode.ODERNN(2, 8, method="leapfrog", steps=1)(x, t)


def test_a_failure_tells_the_users_time():
    rnn, (x, t) = hbnode.ODERNN(2, 4, time_unit=2.0, max_steps=3, options={"max_step": 0.1}), make_series()
    with pytest.raises(
        hbnode.errors.MaxStepsError, match=r"rnn.fit_time_unit\(t\), or time_unit= \(it is 2\)"
    ) as error:
        rnn(x, 100.0 + 10 * t)
    assert 100 < error.value.t < 200


# Times


@pytest.mark.parametrize("per_sample", [True, False])
def test_times_since_1970(per_sample):
    """Only gaps count: large times in float64 beside samples in float32."""
    field = hbnode.HBNODE(lambda h: -4e-4 * h * (1 + 20 * h * h), damping=0.001)
    rnn = hbnode.ODERNN(2, 4, field=field, per_sample=per_sample, rtol=1e-3, atol=1e-4)
    rnn.has_warned = True
    x, t = make_series()[0][:, :4], 100.0 * torch.arange(4, dtype=torch.float64)
    (near, _), (far, state) = rnn(x, t), rnn(x, t + 1.7e9)
    close(far, near, rtol=1e-4, atol=1e-5)
    (moved, end), (soon, _) = rnn.forecast(state, [10.0]), rnn.forecast(state, torch.tensor([10.0]))
    assert moved.equal(soon)
    assert not moved[:, 0].equal(state.h)
    assert end.t.equal(state.t + 10)


def test_dates_and_durations_are_refused_with_a_fix_that_works():
    dates = numpy.datetime64("2020-01-01") + numpy.arange(0, 18, 3) * numpy.timedelta64(1, "h")
    table = {"id": numpy.repeat([1, 2], 6), "date": numpy.tile(dates, 2), "a": numpy.random.default_rng(0).random(12)}
    series = hbnode.data.from_long(table, id="id", time="date", values="a", unit="h", origin="2020-01-01")
    rnn = hbnode.ODERNN(1, 4, rtol=1e-8, atol=1e-8)
    rnn.fit_time_unit(series.t)
    assert rnn.time_unit == 30.0
    _, state = rnn(**series.inputs())
    expected, _ = rnn.forecast(state, [1.0, 6.0])
    names = {"series": series, "rnn": rnn, "state": state, "x": series.x, "hbnode": hbnode}
    steps = [["1h", "6h"], [datetime.timedelta(hours=1), datetime.timedelta(hours=6)], pandas.to_timedelta([1, 6], "h")]
    later = dates[-1] + numpy.array([1, 6]) * numpy.timedelta64(1, "h")
    calls = [
        *(("rnn.forecast(state, {})[0]", "dt", one, expected) for one in (*steps, later, list(later))),
        *(("rnn(x, {})[1].h", "t", one, state.h) for one in (dates, pandas.Series(dates), dates.tolist())),
        ("rnn.fit_time_unit({}).time_unit", "t", dates, 30.0),
        ("hbnode.ODERNN(1, 4, time_unit={}).time_unit", "time_unit", "10h", 10.0),
        ("hbnode.ODERNN(1, 4, time_unit={}).time_unit", "time_unit", pandas.Timedelta("10h"), 10.0),
    ]
    for call, name, value, right in calls:
        with pytest.raises(
            TypeError, match=rf"^{name} must hold numbers in the unit of t, got \w+, which.*Fix"
        ) as error:
            eval(call.format(name), names | {name: value})
        fix = str(error.value).split("Fix: ")[1].split(", where")[0].removeprefix("time_unit=")
        close(eval(call.format(fix), names | {name: value}), right)


LAYERS = {
    "ode_rnn": lambda: hbnode.ODERNN(2, 4, method="leapfrog", steps=1),
    "oscillators": lambda: hbnode.nn.Oscillators(2, 4),
    "selective": lambda: hbnode.nn.Oscillators(2, 4, selective=True),
    "stack": lambda: hbnode.nn.OscillatorStack(2, 4),
    "likelihood": lambda: hbnode.nn.Oscillators(2, 2, noise=True).log_likelihood,
    "smooth": lambda: hbnode.nn.Oscillators(2, 2, noise=True).smooth,
    "latent_ode": lambda: hbnode.nn.LatentODE(2, 2, 4),
    "latent_sde": lambda: hbnode.nn.LatentSDE(2, 2, 4),
    "predict": lambda: hbnode.nn.LatentODE(2, 2, 4).predict,
}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@pytest.mark.sparse
@every_layer
@pytest.mark.parametrize(
    "times",
    [
        1.7e9 + numpy.arange(6),
        1.7e9 + 130.0 * numpy.arange(6),
        1.7e9 + 300.0 * numpy.arange(6),
        3e5 + 0.7 * numpy.arange(6),
    ],
    ids=["equal", "130", "300", "near"],
)
def test_times_that_float32_rounds_are_refused(layer, times):
    """Floats are 128 apart at 1.7e9, and 1/32 at 3e5: a gap may be wrong by a hundredth and more."""
    x, call = torch.randn(1, 6, 2), layer()
    with pytest.raises(ValueError, match=r"t has lost digits: torch\.float32 stores times near") as error:
        call(x, torch.tensor(times, dtype=torch.float32))
    fix = str(error.value).split("from the start, ")[1].split(";")[0]
    if layer in (LAYERS["ode_rnn"], LAYERS["selective"], LAYERS["likelihood"]):
        call(x, eval(fix, {"torch": torch, "times": times}))


@pytest.mark.parametrize(
    "use",
    [
        lambda t: hbnode.ODERNN(1, 2).fit_time_unit(t),
        hbnode.nn.oscillator_ranges,
        lambda t: hbnode.nn.LatentODE(1, 2, 4).sample(t),
        lambda t: hbnode.nn.LatentODE(1, 2, 4).predict(torch.zeros(1, 6, 1), t.double(), at=t),
        lambda t: hbnode.nn.Oscillators(1, 1, noise=True).smooth(torch.zeros(1, 6, 1), t.double(), at=t),
    ],
    ids=["fit_time_unit", "ranges", "sample", "predict", "smooth"],
)
def test_rounded_times_are_refused_wherever_times_enter(use):
    with pytest.raises(ValueError, match=r"lost digits: torch\.float32 stores times near"):
        use(1.7e9 + 300 * torch.arange(6.0))


@pytest.mark.parametrize(
    "t",
    [
        torch.full((6,), 5.0),
        1.7e9 + 86_400 * torch.arange(6.0, dtype=torch.float64).float(),  # half a minute in a day
        1e6 + torch.arange(6.0),  # whole, hence exact
        87_000 + torch.arange(6.0) / 2,  # half hours of ten years, exact as well
        torch.tensor([0.0, 0.0, 3.0, 3.0, 3.0, 4.5]),
        torch.arange(6.0).half(),
    ],
    ids=["equal", "days", "whole", "half_hours", "ties", "half"],
)
def test_times_without_lost_digits_are_those_of_float64(t):
    x = torch.randn(2, 6, 2)
    for layer in (hbnode.ODERNN(2, 4, time_unit=1e5), hbnode.nn.Oscillators(2, 4)):
        torch.testing.assert_close(layer(x, t)[0], layer(x, t.double())[0], rtol=1e-4, atol=1e-5)


def test_equal_times_are_rounded_in_proportion_to_the_unit():
    x, t = torch.randn(2, 6, 2), torch.full((6,), 1.7e9)
    hbnode.ODERNN(2, 4, time_unit=12_801.0)(x, t)
    with pytest.raises(ValueError, match="multiples of 128, more than a hundredth of the unit of time 12799"):
        hbnode.ODERNN(2, 4, time_unit=12_799.0)(x, t)
    hbnode.ODERNN(2, 4)(x, t.double())


def test_digits_are_not_looked_at_while_tracing():
    layer, x, t = hbnode.nn.Oscillators(2, 4), torch.randn(3, 1, 6, 2), torch.full((3, 6), 1.7e9)
    assert torch.func.vmap(lambda x, t: layer(x, t)[0])(x, t).equal(torch.stack([layer(z, [0] * 6)[0] for z in x]))


@pytest.mark.sparse
@every_layer
@pytest.mark.parametrize(
    "t",
    [1j * torch.arange(6), torch.arange(6) > 2, numpy.arange(6) * 1j, numpy.arange(6) > 2, [False] * 3 + [True] * 3],
    ids=["complex", "bool", "complex array", "bool array", "bool list"],
)
def test_times_are_real_numbers(layer, t):
    with pytest.raises(TypeError, match=r"t must hold real numbers, got .*(complex|bool)"):
        layer()(torch.randn(1, 6, 2), t)


@every_layer
def test_the_device_meta_is_refused(layer):
    x, t, call = torch.randn(1, 6, 2), torch.arange(6.0), layer()
    module, message = getattr(call, "__self__", call), " is on the device meta, which stores no numbers. Fix: "
    for given in (
        {"x": x.to("meta")},
        {"t": t.to("meta")},
        {"mask": torch.ones(1, 6, dtype=torch.bool, device="meta")},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(given))}{message}"):
            call(**{"x": x, "t": t} | given)
    module.to("meta")
    with pytest.raises(ValueError, match=f"the module{message}"):
        call(x, t)


def continued(name):
    """A state, and the calls that take it."""
    x, t = torch.randn(1, 6, 2), torch.arange(6.0)
    if name == "cell":
        cell = hbnode.nn.OscillatorCell(2, 4, input="hold")
        return cell(x[:, 0])[1], [lambda s: cell(x[:, 1], s)]
    if name == "belief":
        layer = hbnode.nn.Oscillators(2, 2, noise=True)
        return layer.filter(x, t).state, [lambda s: layer.filter(x, 6 + t, s), lambda s: layer.forecast(s, [1.0])]
    layer = {
        "ode_rnn": lambda: hbnode.ODERNN(2, 4, num_layers=2, missing="hold"),
        "oscillators": lambda: hbnode.nn.Oscillators(2, 4, input="hold", elapsed_features=True),
        "selective": lambda: hbnode.nn.Oscillators(2, 4, selective=True),
        "stack": lambda: hbnode.nn.OscillatorStack(2, 4, missing="hold", static_size=1),
    }[name]()
    static = torch.ones(1, 1) if name == "stack" else None
    _, state = layer(x, t, static=static)
    return state, [lambda s: layer(x, 6 + t, s, static=static), lambda s: layer.forecast(s, [1.0])]


@pytest.mark.parametrize("name", ["ode_rnn", "oscillators", "selective", "stack", "belief", "cell"])
def test_states_are_real_numbers(name):
    state, calls = continued(name)
    for entry, value in state.as_dict().items():
        for kind in (torch.complex64, torch.bool, "meta"):
            wrong = dataclasses.replace(state, **{entry: value.to(kind)})
            if isinstance(value, hbnode.nn.ODERNNState):  # of the layer below, whose times keep their dtype
                wrong = dataclasses.replace(state, below=dataclasses.replace(value, h=value.h.to(kind)))
            message = "the state is on the device meta" if kind == "meta" else "the state must hold real numbers"
            for call in calls:
                with pytest.raises((TypeError, ValueError), match=message):
                    call(wrong)


def test_times_and_masks_as_arrays_and_lists():
    rnn, (x, _) = hbnode.ODERNN(2, 4, time_unit=10.0), make_series()
    mask, whole = torch.tensor([True, False, True, True, False, True]).expand(3, 6), numpy.arange(6)
    expected, _ = rnn(x, torch.arange(6.0, dtype=torch.float64).expand(3, 6), mask=mask)
    for times in (whole, whole.astype(float), pandas.Series(whole), range(6), [0, 1, 2, 3, 4, 5], torch.arange(6)):
        assert rnn(x, times, mask=pandas.DataFrame(mask.numpy()))[0].equal(expected)


# What is refused


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"x": torch.zeros(3, 6, 3)}, ValueError, "input_size=2.*Fix: input_size=3"),
        ({"x": torch.zeros(6, 2)}, ValueError, r"Fix: x.unsqueeze\(0\) for a single series"),
        ({"x": torch.zeros(3, 0, 2)}, ValueError, "at least one sample.*Fix: leave out series without samples"),
        ({"x": torch.zeros(3, 6, 2, dtype=torch.long)}, TypeError, "floating point"),
        ({"x": torch.zeros(3, 6, 2).double()}, TypeError, r"Fix: x.to\(torch.float32\), or .to\(torch.float64\)"),
        ({"x": torch.full((3, 6, 2), torch.nan)}, ValueError, "mask=torch.isfinite"),
        ({"x": [torch.ones(6, 2)] * 2}, TypeError, r"Fix: torch.stack\(x\)"),
        ({"t": 5 - torch.arange(6.0)}, ValueError, r"sequence 0 t\[0\]=5 is followed by 4. Fix: lengths="),
        ({"t": [0.0, 1.0, torch.nan, 3.0, 4.0, 5.0]}, ValueError, "t is not finite"),
        ({"t": None}, TypeError, r"got NoneType\. Fix: pass one number per sample"),
        ({"mask": torch.ones(3, 6)}, ValueError, "mask must be bool"),
        ({"mask": torch.ones(3, 6, 1, dtype=torch.bool)}, ValueError, r"Fix: .*mask.squeeze\(-1\)"),
        ({"lengths": torch.tensor([1, 2, 3, 4])}, ValueError, "3 whole numbers"),
        ({"lengths": torch.tensor([1, 0, 3])}, ValueError, r"Fix: series = series.select\(series.lengths > 0\)"),
        ({"lengths": torch.tensor([1, 7, 3])}, ValueError, "between 1 and T=6"),
    ],
)
def test_wrong_series(change, kind, message):
    x, t = make_series()
    with pytest.raises(kind, match=message):
        hbnode.ODERNN(2, 4)(**{"x": x, "t": t} | change)


def test_the_fix_for_times_that_decrease_sorts_samples_with_them():
    rnn, (x, t) = hbnode.ODERNN(2, 4), make_series()
    names = {"x": x.flip(1), "t": t.flip(1)}
    with pytest.raises(ValueError, match=r"shape \(batch, T\), ") as error:
        rnn(**names)
    exec(str(error.value).split("shape (batch, T), ")[1].rstrip("."), names)
    assert names["x"].equal(x)
    assert names["t"].equal(t)


@pytest.mark.parametrize("array", [numpy.asarray, torch.as_tensor])
def test_the_fix_for_lists_of_arrays_makes_a_series_of_them(array):
    x = [array(numpy.ones((n, 2))) for n in (3, 2)]
    t = [array(0.5 * numpy.arange(len(one))) for one in x]
    for rnn in (hbnode.ODERNN(2, 4), hbnode.nn.Oscillators(2, 4), hbnode.nn.OscillatorStack(2, 4)):
        with pytest.raises(TypeError, match=r"got list. Fix: series = hbnode.data.as_series") as error:
            rnn(x, t)
        names = {"hbnode": hbnode, "torch": torch, "rnn": rnn, "x": x, "t": t}
        make, call = str(error.value).split("Fix: series = ")[1].rstrip(".").split(", and ")
        assert eval(call, names | {"series": eval(make, names)})[0].shape == (2, 3, 4)


def test_packed_and_padded_do_not_mix():
    rnn, (x, t) = hbnode.ODERNN(2, 4), make_series()
    packed, times = (pack_padded_sequence(z, LENGTHS, batch_first=True) for z in (x, t))
    with pytest.raises(ValueError, match="has its own"):
        rnn(packed, times, lengths=LENGTHS)
    with pytest.raises(TypeError, match=r"expected a padded tensor.*Fix"):
        rnn.filter(packed, times)
    with pytest.raises(ValueError, match=r"t is a PackedSequence and x is not.*Fix: pad_packed_sequence"):
        rnn(x, times)
    with pytest.raises(ValueError, match=r"mask is a PackedSequence and x is not"):
        rnn(x, t, mask=times)


def test_samples_that_are_no_tensor_say_how_to_make_one():
    rnn, t, values = hbnode.ODERNN(2, 4), torch.arange(6.0), numpy.ones((6, 2))
    for x, array in ((values, "x"), (values.tolist(), "x"), (pandas.DataFrame(values), "x.to_numpy()")):
        fix = f"torch.tensor({array}, dtype=torch.float32)"
        for call in (hbnode.nn.MomentumLSTM(2, 4), hbnode.nn.MomentumLSTMCell(2, 4), lambda x: rnn(x, t)):
            with pytest.raises(TypeError, match="Fix: " + re.escape(fix)):
                call(x)
        assert eval(fix, {"torch": torch, "x": x}).shape == (6, 2)
