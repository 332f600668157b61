"""Oscillators: the closed form against mpmath, the scan against a loop, times, features, number formats, transforms."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import hbnode
from hbnode import _torch
from hbnode.nn import _oscillator_step
from hbnode.nn.functional import oscillator_step
from hbnode.nn.oscillators import held_response
from tests.models import slow
from tests.reference_irregular import fed
from tests.reference_oscillators import exact_entries, layer_loop

GAMMAS = [0.0, 1e-8, 1e-3, 0.1, 1.0, 2.0, 2.0000001, 3.0, 10.0, 200.0]
KAPPAS = [0.0, 1e-12, 1e-6, 1e-4, 0.1, 0.25, 1.0, 1.0000001, 2.25, 30.0, 1e4]
GRID = list(itertools.product(GAMMAS, KAPPAS, [1e-4, 1e-2, 0.03, 0.5, 1.0, 1.5, 10.0, 100.0]))
VARIANTS = list(itertools.product(["exact", "imex"], ["impulse", "hold"]))
variants = pytest.mark.parametrize(("discretization", "input"), VARIANTS)
both = pytest.mark.parametrize("input", ["impulse", "hold"])
FEATURES = {
    "zero": {"missing": "zero", "mask_features": True},
    "hold": {"missing": "hold", "elapsed_features": True},
    "all": {"missing": "decay", "mask_features": True, "elapsed_features": True, "static_size": 2},
}
features = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
STATIC = torch.tensor([[0.5, -1.0], [0.0, 2.0]], dtype=torch.float64)


def make(*sizes, dtype=torch.float64, mixed=False, **options):
    torch.manual_seed(0)
    layer = hbnode.nn.Oscillators(*(sizes or (3, 4, 5)), **options).to(dtype)
    if mixed:  # overdamped, critical and underdamped oscillators
        with torch.no_grad():
            layer.log_damping.copy_(torch.linspace(-4, 1.5, layer.num_oscillators))
            layer.log_stiffness.zero_()
            layer.log_damping[-2] = math.log(2.0)
    return layer


def case(**options):
    torch.manual_seed(0)
    return hbnode.nn.Oscillators(3, 4, **options), torch.randn(2, 30, 3), (0.1 + torch.rand(2, 30)).cumsum(1)


def times_with_ties(*shape):
    """Times of which a third repeats the time before."""
    return (torch.rand(*shape, dtype=torch.float64) - 0.33).relu().cumsum(-1)


def gaps_before(t, batch, start=None):
    t = t.expand(batch, -1)
    return t.diff(prepend=t[:, :1] if start is None else start.unsqueeze(1))


def gradients(outputs, weights, leaves):
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, leaves)


def compare(found, right, leaves, tolerance):
    """Compare values and gradients of two triples."""
    weights = [torch.randn_like(y) for y in right]
    pairs = [*zip(found, right, strict=True)]
    pairs += zip(gradients(found, weights, leaves), gradients(right, weights, leaves), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= tolerance * max(1.0, other.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["64", "32"])
def test_entries_against_mpmath(dtype, tolerance):
    grid = [point for point in GRID if dtype == torch.float64 or math.sqrt(point[1]) * point[2] <= 10]
    points = torch.tensor(grid, dtype=torch.float64).to(dtype)
    found = torch.stack([*oscillator_step(*points.T), *held_response(*points.T)], 1).double()
    for point, row in zip(points.double().tolist(), found.tolist(), strict=True):
        exact = exact_entries(*point)
        root = math.sqrt(point[1])
        slide = min(point[2], 1 / root if root else math.inf)  # the size of what v adds to x
        for value, right, size in zip(row, exact, (1, root, slide, 1, slide, float(exact[5])), strict=True):
            assert abs(value - float(right)) <= tolerance * size, (point, value, right)


@pytest.mark.parametrize("dt", [0.01, 1.5, 3.0])
def test_gradients_of_the_closed_form(dt):
    pairs = list(itertools.product([0.0, 0.1, 2.0, 3.0, 10.0], [0.0, 1e-4, 0.25, 1.0, 2.25, 30.0]))
    points = torch.tensor([(*pair, dt) for pair in pairs], dtype=torch.float64).T
    leaves = [part.clone().requires_grad_() for part in points]
    for function in (lambda *z: tuple(oscillator_step(*z)), held_response):
        torch.autograd.gradcheck(function, leaves, atol=1e-6, rtol=1e-5, fast_mode=True)
    z = torch.tensor([[0.1, 1.0, 0.7], [2.0, 1.0, 0.5], [5.0, 1.0, 2.0]], dtype=torch.float64).T
    leaves = [part.clone().requires_grad_() for part in z]
    torch.autograd.gradgradcheck(lambda *z: tuple(oscillator_step(*z)), leaves, atol=1e-6)


@pytest.mark.parametrize("dt", [-0.5, math.nan, math.inf])
def test_a_step_over_no_time_that_can_pass_is_refused(dt):
    gaps = torch.tensor([0.0, 1.0, dt])
    for function, wrong in itertools.product((oscillator_step, held_response), (dt, gaps)):
        with pytest.raises(ValueError, match=rf"dt must hold finite times >= 0, got {dt}. Fix: dt = later - earlier"):
            function(0.5, 2.0, wrong)
    found = torch.func.vmap(lambda gap: oscillator_step(0.5, 2.0, gap)[0])(gaps)  # values are unknown while tracing
    torch.testing.assert_close(found[:2], oscillator_step(0.5, 2.0, gaps[:2])[0])


@pytest.mark.sparse
@variants
@pytest.mark.parametrize(
    ("times", "length", "mixed"),
    [
        *(("own", 53, True), ("even", 53, True), ("shared", 53, True), ("none", 53, False), ("none", 1, True)),
        *slow(("own", 53, False), ("own", 1, True)),
    ],
)
def test_scan_against_the_loop(monkeypatch, discretization, input, mixed, times, length):
    monkeypatch.setattr(_oscillator_step, "_OPERATION_SIZE", 64)  # many segments, of many chunks and of one
    layer = make(discretization=discretization, input=input, mixed=mixed)
    x = torch.randn(2, length, 3, dtype=torch.float64).requires_grad_()
    t = {
        "none": None,
        "even": 0.3 * torch.arange(length, dtype=torch.float64),
        "shared": times_with_ties(length),
        "own": times_with_ties(2, length).requires_grad_(),
    }[times]
    rest = [torch.randn(2, 5, dtype=torch.float64).requires_grad_() for _ in range(2)]
    held = torch.randn(2, 3, dtype=torch.float64) if input == "hold" else None
    counted = torch.arange(length, dtype=torch.float64) if t is None else t
    start = counted.expand(2, -1)[:, 0] - {"even": 0.3, "shared": 0.0}.get(times, 1.0)
    mask = None if times == "even" else torch.rand(2, length, 3) < 0.7
    y, after = layer(x, t, hbnode.nn.OscillatorState(*rest, start, held), mask)
    expected = layer_loop(layer, x, gaps_before(counted, 2, start), *rest, mask, held)
    leaves = [x, *rest, *layer.parameters(), *([t] if times == "own" and length > 1 else [])]
    compare((y, after.v, after.x), expected, leaves, 1e-10)


@pytest.mark.sparse
@both
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize(("damping", "stiffness"), [(0.05, 1.0), (3.0, 1.0), (100.0, 1.0), (0.01, 1e-3)])
def test_single_precision(input, is_even, damping, stiffness):
    """Values and gradients of the same numbers."""
    single, count = hbnode.nn.Oscillators(1, 1, input=input), 500
    nn.init.constant_(single.log_damping, math.log(damping))
    nn.init.constant_(single.log_stiffness, math.log(stiffness))
    double = copy.deepcopy(single).double()
    x, weights = torch.randn(2, 1, count, 1, generator=torch.Generator().manual_seed(1))
    t = (torch.full((count,), 0.5) if is_even else torch.rand(count) + 0.1).double().cumsum(0)
    low, right = single(x, t)[0], double(x.double(), t)[0]
    assert (low - right).norm() <= 1e-5 * right.norm()
    ours = gradients([low], [weights], list(single.parameters()))
    theirs = gradients([right], [weights.double()], list(double.parameters()))
    dynamics = max(other.norm() for other in theirs[:2])  # the gradient of one of the two may vanish beside the other
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one - other).norm() <= 1e-5 * (dynamics if i < 2 else other.norm())


def test_the_gradient_of_times_passes_through_the_time_of_a_state():
    layer, t = hbnode.nn.Oscillators(1, 1, 4).double(), torch.arange(5, dtype=torch.float64, requires_grad=True)
    x, rest = torch.randn(1, 10, 1, dtype=torch.float64), torch.arange(5, 10, dtype=torch.float64)
    _, state = layer(x[:, :5], t)
    y, _ = layer(x[:, 5:], rest, state)
    whole, _ = layer(x, torch.cat([t, rest]))
    got, expected = (torch.autograd.grad(z.square().sum(), t)[0] for z in (y, whole[:, 5:]))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_times_that_drift_slowly_are_not_taken_as_equally_spaced():
    count, unit, start = 4_000, 1e-3, 1.7e9
    gaps = unit * torch.cat([torch.full((count // 2,), g, dtype=torch.float64) for g in (0.9997, 1.0003)])
    layer = hbnode.nn.Oscillators(
        1, 1, 4, frequency=(0.1 / unit, 0.25 / unit), decay=(1e-3 / unit, 2e-3 / unit)
    ).double()
    x, since = torch.randn(1, count, 1, dtype=torch.float64), gaps.cumsum(0)
    t = start + since
    y, _ = layer(x, t)
    exact, _ = layer(x, t.clone().requires_grad_())  # by its gaps, whatever they are
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-6)
    even = start + unit * torch.arange(count, dtype=torch.float64)
    torch.testing.assert_close(layer(x, even)[0], layer(x, even.clone().requires_grad_())[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"input": "hold"}, {"selective": True}], ids=str)
def test_both_directions(options):
    layer = make(bidirectional=True, **options)
    x, t, lengths = torch.randn(3, 30, 3, dtype=torch.float64), times_with_ties(3, 30), [30, 12, 1]
    y, _ = layer(x, t, lengths=lengths)
    for i, length in enumerate(lengths):
        turned = (t[i, length - 1] - t[i, :length]).flip(0)
        behind, _ = layer.reverse(x[i : i + 1, :length].flip(1), turned)
        torch.testing.assert_close(y[i, :length, 4:], behind[0].flip(0), rtol=0, atol=1e-12)


@both
def test_the_cell_continues_a_layer(input):
    layer, cell = make(input=input), hbnode.nn.OscillatorCell(3, 4, 5, input=input).double()
    cell.load_state_dict(layer.state_dict())
    x, t = torch.randn(2, 12, 3, dtype=torch.float64), torch.rand(2, 12).double().cumsum(1)
    whole, end = layer(x, t)
    torch.testing.assert_close(cell(x[:, 0])[0], whole[:, 0])
    _, state = layer(x[:, :7], t[:, :7])
    for i in range(7, 12):
        y, state = cell(x[:, i], state, t[:, i] - t[:, i - 1])
        torch.testing.assert_close(y, whole[:, i], rtol=0, atol=1e-12)
    torch.testing.assert_close((state.v, state.x, state.t), (end.v, end.x, end.t), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wanted", ["x", "t", "log_damping", "weight_in", "weight_out"])
def test_one_gradient_is_that_of_all(wanted):
    layer, x, t = case()
    leaves = {"x": x.requires_grad_(), "t": t.requires_grad_(), **dict(layer.named_parameters())}
    (right,) = torch.autograd.grad(layer(x, t)[0].square().sum(), leaves[wanted])
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    torch.testing.assert_close(torch.autograd.grad(layer(x, t)[0].square().sum(), leaves[wanted])[0], right)


def test_second_derivatives_and_forward_mode():
    layer = make(2, 2, 3, mixed=True)
    x, t = torch.randn(1, 6, 2, dtype=torch.float64), torch.rand(6).double().cumsum(0)

    def second():
        (grad,) = torch.autograd.grad(layer(x, t)[0].square().sum(), layer.log_stiffness, create_graph=True)
        return torch.autograd.grad(grad.sum(), layer.log_stiffness)[0]

    with _torch.double_backward():
        right = second()
    torch.testing.assert_close(second(), right)
    assert right.abs().min() > 0
    _, tangent = torch.func.jvp(lambda x: layer(x, t)[0], (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, layer(torch.ones_like(x), t)[0])


def test_initial_oscillators_are_in_their_ranges():
    layer = hbnode.nn.Oscillators(1, 1, 500, frequency=(0.1, 2.0), decay=(0.01, 0.3))
    damped = (layer.stiffness - (layer.damping / 2).square()).sqrt() / (2 * math.pi)
    torch.testing.assert_close(torch.stack(damped.aminmax()), torch.tensor([0.1, 2.0]), rtol=0.1, atol=0)
    torch.testing.assert_close(torch.stack(layer.damping.aminmax()) / 2, torch.tensor([0.01, 0.3]), rtol=0.1, atol=0)


def test_ranges_of_gaps():
    t = torch.tensor([[0.0, 1.0, 2.0, 10.0], [5.0, 6.0, 0.0, 0.0]])
    slowest = 1 / 300  # a thirtieth of 1 / span
    for selective, lowest in ((False, slowest), (True, 2 / 10)):
        ranges = {"frequency": pytest.approx((lowest, 0.25)), "decay": pytest.approx((slowest, 0.1))}
        assert hbnode.nn.oscillator_ranges(t, lengths=[4, 2], selective=selective) == ranges
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    assert hbnode.nn.oscillator_ranges(t, mask)["frequency"] == pytest.approx((slowest, 0.125))
    with pytest.raises(ValueError, match="no two observed samples"):
        hbnode.nn.oscillator_ranges([1.0])


def test_wrong_input():
    layer, x, t = make(dtype=torch.float32), torch.randn(2, 5, 3), torch.arange(5.0)
    cell, stack = hbnode.nn.OscillatorCell(3, 4, 5), hbnode.nn.OscillatorStack(3, 4, head="classification")
    (_, state), (_, states) = layer(x, t), stack(x, t)
    for call, arguments, kind, message in (
        (layer, (x, state), TypeError, r"Fix: layer\(x, None, state\)"),
        (layer, (x, t, state), ValueError, "state's time lies after"),
        (cell, (x[:, 0].double(),), TypeError, r"x is torch.float64, .* torch.float32;.*Fix: x.to\(torch.float32\)"),
        (stack.forecast, (states, [1.0]), ValueError, "forecast is for head='regression'.*Fix: head='regression'"),
        *((layer.forecast, (state, dt), ValueError, "be finite, >= 0") for dt in ([-1.0], [math.nan], [1.0, 0.5])),
    ):
        with pytest.raises(kind, match=message):
            call(*arguments)


def test_what_is_not_finite_is_named():
    layer, x, t = case()
    for name, parameter in layer.named_parameters():
        broken = {name: torch.full_like(parameter, math.nan)}
        with pytest.raises(FloatingPointError, match=f"^{name} is NaN"):
            torch.func.functional_call(layer, broken, (x, t))
    layer, x, _ = case(discretization="imex", frequency=(1.0, 2.0))
    with pytest.raises(FloatingPointError, match=r"longer than about 2/√κ.*discretization='exact'"):
        layer(x.repeat(1, 20, 1), 3.0 * torch.arange(600))
    layer, x, _ = case(frequency=(1e-6, 1e-5), decay=(1e-7, 1e-6))
    with pytest.raises(FloatingPointError, match=r"too large for torch.float32\. Fix: standardise x"):
        layer(1e38 * x.abs().repeat(1, 50, 1), 100.0 * torch.arange(1500))


def with_holes(options):
    """Two series with missing values, whole samples of them, and the static features that the options want."""
    torch.manual_seed(1)
    x, t = torch.randn(2, 12, 3, dtype=torch.float64), times_with_ties(2, 12) + 1
    mask = torch.rand(2, 12, 3) < 0.6
    mask[:, 4:6] = False
    return torch.where(mask, x, torch.nan), t, mask, STATIC if "static_size" in options else None


@pytest.mark.sparse
@both
@features
def test_features_are_further_inputs_of_a_wider_layer(input, options):
    layer = make(3, 4, 5, input=input, decay=(0.01, 0.2), **options)
    if layer.inputs.rate is not None:
        nn.init.normal_(layer.inputs.rate)
    x, t, mask, static = with_holes(options)
    y, after = layer(x, t, mask=mask, static=static)
    columns = {name: value for name, value in options.items() if name != "static_size"}
    inputs = fed(x, t, mask, rate=layer.inputs.rate, time_unit=5.0, static=static, **columns)
    wide = make(layer.inputs.size, 4, 5, input=input)
    wide.load_state_dict({name: value for name, value in layer.state_dict().items() if "inputs" not in name})
    expected, end = wide(inputs, t, mask=mask.any(-1))
    leaves = list(layer.parameters())
    torch.testing.assert_close((y, after.v, after.x), (expected, end.v, end.x), rtol=1e-12, atol=1e-12)
    assert all(part.isfinite().all() for part in torch.autograd.grad(y.square().sum(), leaves))


def test_the_unit_of_ages_is_saved_where_there_are_ages():
    for kind in (hbnode.nn.Oscillators, hbnode.nn.OscillatorStack):
        trained, fresh = kind(3, 4, decay=(0.01, 0.2), missing="decay"), kind(3, 4, missing="decay")
        fresh.load_state_dict(trained.state_dict())
        x, t, mask, _ = with_holes({})
        assert fresh(x.float(), t, mask=mask)[0].equal(trained(x.float(), t, mask=mask)[0])
        assert "inputs.time_unit" not in kind(3, 4, mask_features=True).state_dict()


def test_a_classification_reads_each_series_at_its_end():
    stack = hbnode.nn.OscillatorStack(3, 8, num_layers=2, output_size=5, head="classification").double()
    x, t, mask, _ = with_holes({})
    y, _ = stack(x, t, mask=mask, lengths=[12, 7])
    for i, length in enumerate((12, 7)):
        alone, _ = stack(x[i : i + 1, :length], t[i, :length], mask=mask[i : i + 1, :length])
        torch.testing.assert_close(y[i], alone[0], rtol=0, atol=1e-10)
