"""Oscillators under autocast, the compiler and transforms; strong damping; what cannot be computed is named."""

import copy
import math

import numpy
import pytest
import torch

import hbnode

both = pytest.mark.parametrize("input", ["impulse", "hold"])


def make(**options):
    torch.manual_seed(0)
    layer = hbnode.nn.Oscillators(3, 4, **options)
    return layer, torch.randn(2, 30, 3), (0.1 + torch.rand(2, 30)).cumsum(1)


@both
@pytest.mark.parametrize(("damping", "stiffness"), [(3.0, 1.0), (10.0, 1.0), (100.0, 1.0), (0.05, 1.0), (0.01, 1e-3)])
def test_gradients_in_float32(input, damping, stiffness):
    layer = hbnode.nn.Oscillators(1, 1, input=input)
    with torch.no_grad():
        layer.log_damping.fill_(math.log(damping))
        layer.log_stiffness.fill_(math.log(stiffness))
    x, weight = torch.randn(2, 1, 500, 1, generator=torch.Generator().manual_seed(1))
    t = (0.1 + 0.3 * torch.rand(1, 500, dtype=torch.float64)).cumsum(1)
    found, right = (
        torch.autograd.grad(each(x.to(dtype), t)[0], [each.log_damping, each.log_stiffness], weight.to(dtype))
        for each, dtype in ((layer, torch.float32), (copy.deepcopy(layer).double(), torch.float64))
    )
    size = max(grad.abs().item() for grad in right)
    for one, other in zip(found, right, strict=True):
        assert abs(one.item() - other.item()) <= 1e-5 * size


@both
def test_damping_that_underflows_is_none(input):
    layer, x, t = make(input=input)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.log_damping.fill_(-800.0)  # γ = 0, in float64 too
        twin.log_damping.fill_(-60.0)
    found, right = layer(x, t)[0], twin(x, t)[0]
    torch.testing.assert_close(found, right)
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), list(each.parameters())) for y, each in ((found, layer), (right, twin))
    )
    torch.testing.assert_close(ours, theirs)


@both
def test_autocast_changes_no_number(input):
    layer, x, t = make(input=input)
    cell = hbnode.nn.OscillatorCell(3, 4, input=input)
    cell.load_state_dict(layer.state_dict())

    def run():
        y, state = layer(x, t)
        ahead, later = layer.forecast(state, [0.5, 2.0])
        last, after = cell(x[:, 0], state, 0.5)
        return y, state.v, ahead, later.x, last, after.v

    usual = run()
    with torch.autocast("cpu", torch.bfloat16):
        under = run()
    for one, other in zip(under, usual, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[30, 4], [20, 4]])
def test_one_graph_with_lengths_and_forecast(lengths):
    layer, x, t = make()

    def run(x, t, lengths):
        y, state = layer(x, t, None, None, lengths)
        ahead, _ = layer.forecast(state, torch.tensor([0.5, 1.0]))
        return y, ahead, state.t

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(x, t, torch.tensor(lengths))
    torch.testing.assert_close(found, run(x, t, lengths))


def test_a_cell_is_one_graph():
    cell, x = hbnode.nn.OscillatorCell(3, 4), torch.randn(2, 2, 3)
    compiled = torch.compile(cell, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        _, state = cell(x[0])
    torch.testing.assert_close(compiled(x[1], state, 0.5)[0], cell(x[1], state, 0.5)[0])


@both
def test_vmap_over_series(input):
    layer, x, t = make(input=input)
    each = torch.func.vmap(lambda x, t: layer(x[None], t[None])[0][0])(x, t)
    torch.testing.assert_close(each, layer(x, t)[0])


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
def test_transforms_inside_of_compiled_functions(transform, backend):
    layer, x, _ = make()
    functions = {
        "jvp": lambda x: torch.func.jvp(lambda x: layer(x)[0], (x,), (x,))[1],
        "grad": lambda x: torch.func.grad(lambda x: layer(x)[0].square().sum())(x),
        "vmap": lambda x: torch.func.vmap(lambda x: layer(x[None])[0][0])(x),
    }
    function = functions[transform]
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))


def test_compiled_gradients_do_not_see_the_times_of_padding():
    layer, x, t = make()
    with torch.no_grad():
        layer.log_damping.copy_(torch.tensor([0.2, 2.0, 5.0, 100.0]).log())
        layer.log_stiffness.zero_()
    t = torch.cat([t[0, :20], torch.zeros(10)])
    lengths = torch.tensor([20, 9])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found, right = (
        torch.autograd.grad(run(x, t, lengths=lengths)[0].sum(), list(layer.parameters())) for run in (compiled, layer)
    )
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    layer, x, t = make()
    batch = torch.export.Dim("batch")
    shapes = {"x": {0: batch}, "t": {0: batch}}
    exported = torch.export.export(layer, (x, t), strict=strict, dynamic_shapes=shapes).module()
    x, t = torch.cat([x, 2 * x, 3 * x]), torch.cat([t, 2 * t, 3 * t])
    torch.testing.assert_close(exported(x, t)[0], layer(x, t)[0])


@both
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_jit_trace(input):
    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make(input=input)[0]

        def forward(self, x):
            return self.layer(x)[0]

    model, x = Outputs(), torch.randn(2, 30, 3)
    traced = torch.jit.trace(model, (x,), check_trace=False)
    torch.testing.assert_close(traced(2 * x), model(2 * x))


def test_dates_and_durations():
    layer, x, _ = make()
    days = numpy.arange(30).astype("datetime64[D]")
    y, state = layer(x, days)
    wanted, last = layer(x, torch.arange(30, dtype=torch.float64) * 86_400)
    torch.testing.assert_close((y, state.t), (wanted, last.t))
    ahead, _ = layer.forecast(state, numpy.array([1, 2], dtype="timedelta64[m]"))
    torch.testing.assert_close(ahead, layer.forecast(state, [60.0, 120.0])[0])


@pytest.mark.parametrize("name", ["log_damping", "log_stiffness", "weight_in", "weight_out"])
@both
def test_a_parameter_that_is_not_finite_is_named(name, input):
    layer, x, t = make(input=input)
    with torch.no_grad():
        getattr(layer, name).view(-1)[1] = math.nan
    with pytest.raises(FloatingPointError, match=f"^{name} is NaN"):
        layer(x, t)


def test_steps_that_are_unstable_are_named():
    layer, x, _ = make(discretization="imex", frequency=(1.0, 2.0))
    with pytest.raises(FloatingPointError, match=r"longer than about 2/√κ.*discretization='exact'"):
        layer(x.repeat(1, 20, 1), 3.0 * torch.arange(600))


def test_samples_that_overflow_are_named():
    layer, x, _ = make(frequency=(1e-6, 1e-5), decay=(1e-7, 1e-6))
    with pytest.raises(FloatingPointError, match=r"too large for torch.float32\. Fix: standardise x"):
        layer(1e38 * x.abs().repeat(1, 50, 1), 100.0 * torch.arange(1500))
    with torch.no_grad():
        layer.weight_out.mul_(1e6)
        layer.weight_skip.mul_(1e6)
    with pytest.raises(FloatingPointError, match=r"too large for torch.float16\."):
        layer(x.half())


def test_noise_that_is_lost_in_rounding_is_named():
    layer = hbnode.nn.Oscillators(2, 2, 4, noise=True)
    x = torch.randn(1, 5, 2)
    with torch.no_grad():
        layer.log_observation_noise.fill_(-25.0)
    with pytest.raises(FloatingPointError, match="times that of the noise of observation") as raised:
        layer.filter(x)
    least = float(str(raised.value).split("clamp_(min=")[1].split(")")[0])
    layer.log_observation_noise.data.clamp_(min=least)  # as the message says
    assert layer.filter(x).after.std.isfinite().all()
    with torch.no_grad():
        layer.log_spread[0] = math.nan
    with pytest.raises(FloatingPointError, match="log_spread is NaN"):
        layer.log_likelihood(x)


def test_habits_are_answered():
    layer, x, t = make()
    _, state = layer(x, t)
    with pytest.raises(TypeError, match=r"Fix: layer\(x, None, state\)"):
        layer(x, state)
    for dt in ([math.inf], [math.nan], [1.0, 0.5]):
        with pytest.raises(ValueError, match="dt must be finite, increase"):
            layer.forecast(state, dt)
    with pytest.raises(ValueError, match="dt must be finite and not negative"):
        hbnode.nn.OscillatorCell(3, 4)(x[:, 0], state, math.inf)
    with pytest.raises(ValueError, match="forwards in time alone"):
        hbnode.nn.Oscillators(3, 3, noise=True, bidirectional=True)
    for last in (math.nan, math.inf):
        with pytest.raises(ValueError, match="t is not finite where samples are observed"):
            hbnode.nn.oscillator_ranges([0.0, 1.0, last])
