"""Times, masks, padding, parts and forecasts of series, in every layer that takes irregular ones."""

import copy
import pickle

import numpy
import pandas
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hbnode
from hbnode.nn import _oscillator_step

DATES = numpy.datetime64("2020-01-01") + numpy.arange(0, 18, 3) * numpy.timedelta64(1, "h")
close = torch.testing.assert_close


def make_series(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 2, generator=generator, dtype=dtype)
    return x, (0.2 + torch.rand(3, 6, generator=generator, dtype=torch.float64)).cumsum(1).to(dtype)


# Units of time


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


def test_the_unit_is_saved():
    rnn, fresh = hbnode.ODERNN(2, 4, time_unit=86400.25), hbnode.ODERNN(2, 4)
    fresh.load_state_dict(rnn.state_dict())
    assert fresh.time_unit == copy.deepcopy(rnn).half().time_unit == 86400.25
    rnn.time_unit = torch.tensor(3600.0)
    assert rnn.time_unit == 3600
    for wrong in (0.0, -1, float("nan"), None):
        with pytest.raises(ValueError, match="time_unit must be a positive number"):
            rnn.time_unit = wrong


@pytest.mark.parametrize("field", ["hbnode", "ghbnode"])
def test_a_unit_that_was_never_set_warns_from_gaps_of_about_one(field):
    rnn, x, t = hbnode.ODERNN(2, 8, field=field, rtol=1e-5, atol=1e-5), torch.randn(4, 9, 2), torch.arange(9.0)
    with pytest.warns(UserWarning, match=r"function evaluations.*Fix: before training.*time_unit=10\)"):
        rnn(x, t)
    rnn(x, t)  # warns once
    fitted = copy.deepcopy(rnn).fit_time_unit(t)
    fitted.has_warned = False
    fitted(x, t)
    assert fitted.nfe.forward < rnn.nfe.forward / 1.5
    hbnode.ODERNN(2, 8)(x, t / 2)  # these gaps are short enough
    hbnode.ODERNN(2, 8, time_unit=1.0)(x, t)  # a choice


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


@pytest.mark.parametrize(
    ("call", "name", "value", "right"),
    [
        ("rnn.forecast(state, {})[1].t", "dt", ["1h", "6h"], 21.0),
        ("rnn.forecast(state, {})[1].t", "dt", pandas.to_timedelta([1, 6], "h"), 21.0),
        ("rnn(x, {})[1].t", "t", pandas.Series(DATES), 15.0),
        ("rnn.fit_time_unit({}).time_unit", "t", DATES, 30.0),
        ("hbnode.ODERNN(1, 4, time_unit={}).time_unit", "time_unit", "10h", 10.0),
    ],
)
def test_dates_and_durations_are_refused_with_a_fix_that_works(call, name, value, right):
    table = {"id": numpy.repeat([1, 2], 6), "date": numpy.tile(DATES, 2), "a": numpy.arange(12.0)}
    series = hbnode.data.from_long(table, id="id", time="date", values="a", unit="h", origin="2020-01-01")
    rnn = hbnode.ODERNN(1, 4).fit_time_unit(series.t)
    names = {"series": series, "rnn": rnn, "x": series.x, "hbnode": hbnode, name: value}
    names["state"] = rnn(**series.inputs())[1]
    with pytest.raises(TypeError, match=rf"^{name} must hold numbers in the unit of t, got \w+, which.*Fix") as error:
        eval(call.format(name), names)
    fix = str(error.value).split("Fix: ")[1].split(", where")[0].removeprefix("time_unit=")
    found = torch.as_tensor(eval(call.format(fix), names)).double()
    close(found, torch.full_like(found, right))


LAYERS = {
    "ode_rnn": lambda: hbnode.ODERNN(2, 4, method="leapfrog", steps=1),
    "oscillators": lambda: hbnode.nn.Oscillators(2, 4),
    "selective": lambda: hbnode.nn.Oscillators(2, 4, selective=True),
    "likelihood": lambda: hbnode.nn.Oscillators(2, 2, noise=True).log_likelihood,
    "latent_ode": lambda: hbnode.nn.LatentODE(2, 2, 4),
    "predict": lambda: hbnode.nn.LatentODE(2, 2, 4).predict,
}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@every_layer
def test_times_that_float32_rounds_are_refused(layer):
    """Floats are 128 apart at 1.7e9, and 1/32 at 3e5: a gap may be wrong by a hundredth and more."""
    x, call = torch.randn(1, 6, 2), layer()
    for times in (1.7e9 + numpy.arange(6), 1.7e9 + 300.0 * numpy.arange(6), 3e5 + 0.7 * numpy.arange(6)):
        with pytest.raises(ValueError, match=r"t has lost digits: torch\.float32 stores times near") as error:
            call(x, torch.tensor(times, dtype=torch.float32))
    fix = str(error.value).split("from the start, ")[1].split(";")[0]
    if layer in (LAYERS["ode_rnn"], LAYERS["selective"], LAYERS["likelihood"]):
        call(x, eval(fix, {"torch": torch, "times": times}))
    for t in (1j * torch.arange(6), torch.arange(6) > 2, numpy.arange(6) * 1j, [False] * 3 + [True] * 3):
        with pytest.raises(TypeError, match=r"t must hold real numbers, got .*(complex|bool)"):
            call(x, t)


@pytest.mark.parametrize("layer", [hbnode.ODERNN(2, 4, time_unit=1e5), hbnode.nn.Oscillators(2, 4)], ids=["rnn", "osc"])
def test_times_without_lost_digits_are_those_of_float64(layer):
    x, count = torch.randn(2, 6, 2), torch.arange(6.0)
    days = 1.7e9 + 86_400 * count.double()  # of which half a minute is lost
    for t in (torch.full((6,), 5.0), days.float(), 87_000 + count / 2, count.half()):
        close(layer(x, t)[0], layer(x, t.double())[0], rtol=1e-4, atol=1e-5)


def test_digits_are_not_looked_at_while_tracing():
    layer, x, t = hbnode.nn.Oscillators(2, 4), torch.randn(3, 1, 6, 2), torch.full((3, 6), 1.7e9)
    assert torch.func.vmap(lambda x, t: layer(x, t)[0])(x, t).equal(torch.stack([layer(z, [0] * 6)[0] for z in x]))


FEATURES = {"missing": "decay", "mask_features": True, "elapsed_features": True, "static_size": 2, "decay": (0.01, 0.2)}
SOLVER = {"rtol": 1e-9, "atol": 1e-9, "time_unit": 5.0}
CONTINUED = {  # of which a state goes on
    **{
        f"Oscillators, {options}": lambda options=options: hbnode.nn.Oscillators(3, 4, 5, **options)
        for options in (
            *({}, {"input": "hold"}, {"discretization": "imex"}, {"input": "hold", "discretization": "imex"}),
            *({"selective": True}, {"selective": True, "frequency": None}, FEATURES, FEATURES | {"input": "hold"}),
            *({"missing": "zero", "mask_features": True}, {"missing": "hold", "elapsed_features": True}),
        )
    },
    "stack": lambda: hbnode.nn.OscillatorStack(3, 4, input="hold", **FEATURES),
    "selective stack": lambda: hbnode.nn.OscillatorStack(3, 4, selective=True),
    **{
        f"ODERNN, {options}": lambda options=options: hbnode.ODERNN(3, 4, **SOLVER, **options)
        for options in (
            *({"field": "ghbnode"}, {"field": "anode"}, {"missing": "hold"}, {"num_layers": 2, "residual": True}),
            {name: value for name, value in FEATURES.items() if name != "decay"},
        )
    },
}
BIDIRECTIONAL = {
    "ODERNN, both": lambda: hbnode.ODERNN(3, 4, **SOLVER, bidirectional=True, num_layers=2),
    "Oscillators, both": lambda: hbnode.nn.Oscillators(3, 4, 5, bidirectional=True, **FEATURES),
    "selective, both": lambda: hbnode.nn.Oscillators(3, 4, 5, bidirectional=True, selective=True),
}


def make_case(make, times):
    """A layer with series of which half the values are missing, some times equal, and the longest ends before T."""
    layer = make().double()
    length, counted = (6, torch.arange(6.0).double()) if isinstance(layer, hbnode.ODERNN) else (40, None)
    x, mask = torch.randn(4, length, 3).double(), torch.rand(4, length, 3) < 0.5
    t = (torch.rand(4, length).double() - 0.33).relu().cumsum(1) + 1
    t = {"own": t, "shared": t[0], "none": counted}[times]
    options = {"static": torch.randn(4, 2).double()} if layer.static_size else {}
    return layer, torch.where(mask, x, torch.nan), t, mask, options


def rows(t, which):
    """A part of the samples of times of each series, of all, or of none."""
    return None if t is None else t[which] if t.dim() == 2 else t[which[1]]


@pytest.mark.sparse
@pytest.mark.parametrize("name", CONTINUED | BIDIRECTIONAL)
@pytest.mark.parametrize("times", ["own", "shared", "none"])
def test_padding_and_other_series_change_nothing(name, times, monkeypatch):
    """Values behind masks and padding may be NaN, and times anything."""
    monkeypatch.setattr(_oscillator_step, "_OPERATION_SIZE", 64)  # many segments
    layer, x, t, mask, options = make_case((CONTINUED | BIDIRECTIONAL)[name], times)
    longest = x.shape[1] - 2 * (times == "shared")
    lengths = torch.tensor([longest, longest // 2 + 1, 2, 1])
    is_padding = torch.arange(x.shape[1]) >= lengths[:, None]
    given = t.masked_fill(is_padding, -5.0) if times == "own" else t
    if times == "shared":
        given = torch.cat([t[:-2], torch.full((2,), torch.nan)])
    wild = x.masked_fill(is_padding[..., None], torch.nan)
    output, state = layer(wild, given, mask=mask | is_padding[..., None], lengths=lengths, **options)
    assert not output[is_padding].any()
    first = next(iter(state.as_dict()))
    losses = [output.square().sum() + getattr(state, first).square().sum(), 0.0]
    for b, length in enumerate(lengths):
        one, own = (slice(b, b + 1), slice(length)), {name: z[b : b + 1] for name, z in options.items()}
        alone, last = layer(x[one], rows(t, one), mask=mask[one], **own)
        close(output[one], alone, rtol=1e-10, atol=1e-11)
        close(getattr(state, first)[..., b, :], getattr(last, first)[..., 0, :], rtol=1e-10, atol=1e-11)
        assert state.t[b] == last.t
        losses[1] += alone.square().sum() + getattr(last, first).square().sum()
    slopes = (torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True) for loss in losses)
    close(*slopes, rtol=1e-8, atol=1e-9)
    if times == "own" and "stack" not in name:
        packed = [pack_padded_sequence(z, lengths, batch_first=True) for z in (x, t, mask)]
        again, _ = layer(packed[0], packed[1], mask=packed[2], **options)
        close(pad_packed_sequence(again, batch_first=True)[0], output, rtol=1e-10, atol=1e-11)


@pytest.mark.sparse
@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("times", ["own", "shared", "none"])
def test_parts_and_forecasts(name, times):
    """A forecast is what the layer gives for samples that nobody saw."""
    layer, x, t, mask, options = make_case(CONTINUED[name], times)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if "ODERNN" in name else {"rtol": 1e-10, "atol": 1e-11}
    whole, end = layer(x, t, mask=mask, **options)
    run = lambda one, state: layer(x[one], rows(t, one), state, mask=mask[one], **options)
    with torch.inference_mode():
        first, state = run((slice(None), slice(1)), None)
    second, state = run((slice(None), slice(1, 3)), state)
    third, state = run((slice(None), slice(3, None)), pickle.loads(pickle.dumps(state.detach())))
    close(torch.cat([first, second, third], 1), whole, rtol=1e-11, atol=1e-12)
    assert state.t.equal(end.t)
    (second.sum() + third.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    ahead, later = layer.forecast(state, [0.5, 0.5, 3.0])
    unseen, nothing = torch.full((4, 3, 3), torch.nan).double(), torch.zeros(4, 3, dtype=torch.bool)
    expected, last = layer(unseen, end.t[:, None] + torch.tensor([0.5, 0.5, 3.0]), end, mask=nothing, **options)
    close((ahead, later.t), (expected, last.t), **tolerance)
    if "imex" not in name:  # whose steps are not exact
        own, _ = layer.forecast(state, torch.tensor([[3.0], [0.5], [0.5], [3.0]]))
        close(own[:, 0], ahead[range(4), [2, 0, 1, 2]], **tolerance)
        close(layer.forecast(later, [1.0])[0], layer.forecast(state, [4.0])[0], **tolerance)


# What is refused


def test_wrong_series():
    rnn, latent, (x, t) = hbnode.ODERNN(2, 4), hbnode.nn.LatentODE(2, 2, 4), make_series()
    rounded, ranges = 1.7e9 + 300 * torch.arange(6.0), hbnode.nn.oscillator_ranges
    digits = r"lost digits: torch\.float32 stores times near"
    times = pack_padded_sequence(t, torch.tensor([6, 4, 2]), batch_first=True)
    for message, call in (
        ("input_size=2.*Fix: input_size=3", lambda: rnn(torch.zeros(3, 6, 3), t)),
        (r"Fix: x.to\(torch.float32\), or .to\(torch.float64\)", lambda: rnn(x.double(), t)),
        ("mask=torch.isfinite", lambda: rnn(torch.nan * x, t)),
        (r"sequence 0 t\[0\]=5 is followed by 4. Fix: lengths=", lambda: rnn(x, 5 - torch.arange(6.0))),
        ("t is not finite", lambda: rnn(x, [0.0, 1.0, torch.nan, 3.0, 4.0, 5.0])),
        ("mask must be bool", lambda: rnn(x, t, mask=torch.ones(3, 6))),
        (r"got list. Fix: series = hbnode.data.as_series", lambda: rnn([x[0], x[1, :3]], [t[0], t[1, :3]])),
        (r"Fix: series = series.select\(series.lengths > 0\)", lambda: rnn(x, t, lengths=torch.tensor([1, 0, 3]))),
        ("between 1 and T=6", lambda: rnn(x, t, lengths=torch.tensor([1, 7, 3]))),
        (r"t is a PackedSequence and x is not.*Fix: pad_packed_sequence", lambda: rnn(x, times)),
        ("must not decrease.*lengths=", lambda: rnn.fit_time_unit([0.0, 1.0, 0.5])),
        *((digits, use) for use in (lambda: rnn.fit_time_unit(rounded), lambda: latent.sample(rounded))),
        *((digits, use) for use in (lambda: ranges(rounded), lambda: latent.predict(x, t.double(), at=rounded))),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
