"""Oscillators over series: the scan against a loop, times, masks, parts, states, and how torch's tools take them."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import hbnode
from hbnode import _torch
from hbnode.nn import _oscillator_scan as layout
from tests.reference_oscillators import imex_entries, layer_loop

VARIANTS = list(itertools.product(["exact", "imex"], ["impulse", "hold"]))
variants = pytest.mark.parametrize(("discretization", "input"), VARIANTS)


@pytest.fixture
def narrow(monkeypatch):
    """Pieces so small that a short series has many, of many chunks and of one."""
    monkeypatch.setattr(layout, "_WIDTH", 64)


def make(*sizes, dtype=torch.float64, mixed=False, **options):
    torch.manual_seed(0)
    layer = hbnode.nn.Oscillators(*(sizes or (3, 4, 5)), **options).to(dtype)
    if mixed:  # overdamped, critical and swinging oscillators
        with torch.no_grad():
            layer.log_damping.copy_(torch.linspace(-4, 1.5, layer.num_oscillators))
            layer.log_stiffness.zero_()
            layer.log_damping[-2] = math.log(2.0)
    return layer


def gaps_before(t, batch, start=None):
    t = t.expand(batch, -1)
    return t.diff(prepend=t[:, :1] if start is None else start.unsqueeze(1))


def gradients(outputs, weights, leaves):
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, leaves)


def compare(found, twin, leaves, tolerance):
    """Values and gradients of two triples."""
    weights = [torch.randn_like(y) for y in twin]
    for one, other in zip(found, twin, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, other.abs().max())
    pairs = zip(gradients(found, weights, leaves), gradients(twin, weights, leaves), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= tolerance * max(1.0, other.abs().max())


@variants
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("times", ["none", "even", "shared", "own"])
@pytest.mark.parametrize("length", [1, 53])
def test_scan_against_the_loop(narrow, discretization, input, mixed, times, length):
    layer = make(discretization=discretization, input=input, mixed=mixed)
    x = torch.randn(2, length, 3, dtype=torch.float64).requires_grad_()
    t = {
        "none": None,
        "even": 0.3 * torch.arange(length, dtype=torch.float64),
        "shared": (0.1 + torch.rand(length, dtype=torch.float64)).cumsum(0),
        "own": (0.1 + torch.rand(2, length, dtype=torch.float64)).cumsum(1),
    }[times]
    start = [torch.randn(2, layer.num_oscillators, dtype=torch.float64).requires_grad_() for _ in range(2)]
    held = torch.randn(2, 3, dtype=torch.float64) if input == "hold" else None
    gaps = torch.ones(2, length, dtype=torch.float64)
    if t is not None:
        begin = torch.full((2,), -0.3, dtype=torch.float64)
        gaps = gaps_before(t, 2, begin + float(t.flatten()[0]) if times == "even" else begin)
    leaves = [x, *start, *layer.parameters()]
    begin = None if t is None else (t.expand(2, -1)[:, 0] - gaps[:, 0])
    state = hbnode.nn.OscillatorState(*start, torch.full((2,), -1.0) if t is None else begin, held)
    y, after = layer(x, t, state)
    compare((y, after.v, after.x), layer_loop(layer, x, gaps, *start, held=held), leaves, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("input", ["impulse", "hold"])
@pytest.mark.parametrize("is_even", [True, False])
def test_long_series_against_the_loop(input, is_even):
    layer = make(2, 2, 4, input=input)
    x = torch.randn(1, 20_000, 2, dtype=torch.float64)
    gaps = torch.full((1, 20_000), 0.5, dtype=torch.float64) if is_even else torch.rand(1, 20_000).double() + 0.1
    t = gaps.cumsum(1)
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    y, after = layer(x, t)
    with torch.no_grad():
        for found, right in zip((y, after.v, after.x), layer_loop(layer, x, gaps, zeros, zeros), strict=True):
            assert (found - right).abs().max() <= 1e-10 * right.abs().max()
    part = x[:, :2000].requires_grad_()
    found, after = layer(part, t[:, :2000])
    twin = layer_loop(layer, part, gaps[:, :2000], zeros, zeros)
    compare((found, after.v, after.x), twin, [part, *layer.parameters()], 1e-10)


@pytest.mark.parametrize("input", ["impulse", "hold"])
@pytest.mark.parametrize("is_even", [True, False])
def test_single_precision(input, is_even):
    """Values and gradients of the same numbers, over 20,000 samples."""
    single = make(2, 2, 4, input=input, dtype=torch.float32)
    double = copy.deepcopy(single).double()
    x, weights = torch.randn(2, 1, 20_000, 2)
    t = (torch.full((20_000,), 0.5) if is_even else torch.rand(20_000) + 0.1).double().cumsum(0)
    low, right = single(x, t)[0], double(x.double(), t)[0]
    assert (low - right).norm() <= 1e-5 * right.norm()
    ours = gradients([low], [weights], list(single.parameters()))
    theirs = gradients([right], [weights.double()], list(double.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_against_a_dense_solve():
    layer = make(1, 1, 3)
    x, t = torch.randn(1, 6, 1, dtype=torch.float64), (0.2 + torch.rand(6, dtype=torch.float64)).cumsum(0)
    gamma, kappa = layer.damping, layer.stiffness
    state = torch.zeros(2, 3, dtype=torch.float64)
    outputs = []
    for i in range(6):
        if i:
            field = hbnode.NODE(lambda h: torch.stack([-gamma * h[0] - kappa * h[1], h[0]]))
            state = hbnode.odeint(field, state, t[i - 1 : i + 1], method="dopri8", rtol=1e-13, atol=1e-14)[-1]
        state = torch.stack([state[0] + (x[0, i] @ layer.weight_in.T), state[1]])
        both = torch.cat([state[0], kappa.sqrt() * state[1]])
        outputs.append(both @ layer.weight_out.T + x[0, i] @ layer.weight_skip.T)
    torch.testing.assert_close(layer(x, t)[0][0], torch.stack(outputs), rtol=0, atol=1e-10)


def test_imex_is_d_linoss():
    """Its state after sample n is that of ``input="hold"`` at sample n + 1."""
    layer = make(2, 3, 4, discretization="imex", input="hold")
    with torch.no_grad():
        layer.weight_skip.zero_()
    x = torch.randn(1, 300, 2, dtype=torch.float64)
    s, vx, xv, xx, fv, fx = imex_entries(layer.damping, layer.stiffness, 1.0)
    z = q = torch.zeros(4, dtype=torch.float64)
    outputs = []
    for sample in x[0]:
        u = layer.weight_in @ sample
        z, q = s * z + vx * q + fv * u, xv * z + xx * q + fx * u
        outputs.append(layer.weight_out @ torch.cat([z, layer.stiffness.sqrt() * q]))
    torch.testing.assert_close(layer(x)[0][0, 1:], torch.stack(outputs)[:-1], rtol=0, atol=1e-10)


@variants
@pytest.mark.parametrize("times", [None, "shared", "own"])
def test_masks_lengths_and_parts(narrow, discretization, input, times):
    layer = make(discretization=discretization, input=input)
    x, lengths = torch.randn(4, 60, 3, dtype=torch.float64), [60, 31, 2, 1]
    t = None if times is None else (torch.rand(4, 60).double() * 0.7 + 0.1).cumsum(1)
    t = t[0] if times == "shared" else t
    mask = torch.rand(4, 60, 3) < 0.6
    x = torch.where(mask, x, torch.nan)
    y, state = layer(x, t, mask=mask, lengths=lengths)
    zeros = torch.zeros(1, 5, dtype=torch.float64)
    for i, length in enumerate(lengths):
        assert not y[i, length:].any()
        row = torch.arange(60.0).double() if t is None else t if t.dim() == 1 else t[i]
        args = x[i : i + 1, :length], gaps_before(row[:length], 1), zeros, zeros, mask[i : i + 1, :length]
        twin = layer_loop(layer, *args)
        for found, right in zip((y[i, :length], state.v[i], state.x[i]), twin, strict=True):
            torch.testing.assert_close(found, right[0], rtol=0, atol=1e-10)
        assert state.t[i] == row[length - 1]
    whole, end = layer(x, t, mask=mask)
    parts, carry = [], None
    for part in (slice(0, 1), slice(1, 38), slice(38, 60)):
        out, carry = layer(x[:, part], None if t is None else t[..., part], carry, mask[:, part])
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(carry.v, end.v, rtol=0, atol=1e-10)


def test_a_mask_of_samples_and_of_nothing():
    layer, x, t = make(), torch.randn(2, 20, 3, dtype=torch.float64), torch.rand(2, 20).double().cumsum(1)
    mask = torch.rand(2, 20) < 0.5
    wide = mask.unsqueeze(-1).expand(-1, -1, 3)
    torch.testing.assert_close(layer(x, t, mask=mask)[0], layer(x, t, mask=wide)[0])
    nothing = torch.zeros(2, 20, dtype=torch.bool)
    y, state = layer(torch.full_like(x, torch.nan), t, mask=nothing)
    assert not y.any()
    assert not state.v.any()


def test_gradients_of_times(narrow):
    for mixed, (discretization, input) in itertools.product([False, True], VARIANTS):
        layer = make(2, 2, 4, discretization=discretization, input=input, mixed=mixed)
        x = torch.randn(2, 17, 2, dtype=torch.float64)
        t = (torch.rand(2, 17).double() + 0.1).cumsum(1).requires_grad_()
        zeros = torch.zeros(2, 4, dtype=torch.float64)
        y, state = layer(x, t)
        twin = layer_loop(layer, x, gaps_before(t, 2), zeros, zeros)
        compare((y, state.v, state.x), twin, [t], 1e-10)


@variants
def test_forecast(discretization, input):
    layer = make(discretization=discretization, input=input)
    x, t = torch.randn(2, 9, 3, dtype=torch.float64), torch.rand(2, 9).double().cumsum(1)
    _, state = layer(x, t)
    ahead, last = layer.forecast(state, [0.0, 0.4, 1.0])
    times = t[:, -1:] + torch.tensor([0.4, 1.0], dtype=torch.float64)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    y, after = layer(torch.zeros(2, 2, 3, dtype=torch.float64), times, state, nothing)
    torch.testing.assert_close(ahead[:, 1:], y, rtol=0, atol=1e-12)
    torch.testing.assert_close((last.v, last.x, last.t), (after.v, after.x, after.t), rtol=0, atol=1e-12)
    own, _ = layer.forecast(state, torch.tensor([[0.1, 0.4], [0.4, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(own[1], ahead[1, 1:], rtol=0, atol=1e-12)


def test_both_directions():
    layer = make(bidirectional=True)
    x, lengths = torch.randn(3, 30, 3, dtype=torch.float64), [30, 12, 1]
    for t in (None, torch.rand(3, 30).double().cumsum(1), torch.rand(30).double().cumsum(0)):
        y, _ = layer(x, t, lengths=lengths)
        for i, length in enumerate(lengths):
            row = torch.arange(30.0).double() if t is None else t if t.dim() == 1 else t[i]
            turned = (row[length - 1] - row[:length]).flip(0)
            behind, _ = layer.reverse(x[i : i + 1, :length].flip(1), turned)
            torch.testing.assert_close(y[i, :length, 4:], behind[0].flip(0), rtol=0, atol=1e-12)
            assert not y[i, length:].any()
    _, state = layer(x)
    with pytest.raises(ValueError, match=r"bidirectional layer takes no state.*Fix"):
        layer(x, None, state)
    with pytest.raises(ValueError, match=r"makes no forecast.*Fix"):
        layer.forecast(state, [1.0])


def test_packed_sequences():
    layer, series = make(), [torch.randn(n, 3, dtype=torch.float64) for n in (4, 9, 1)]
    times = [torch.rand(len(each)).double().cumsum(0) for each in series]
    packed = nn.utils.rnn.pack_sequence(series, enforce_sorted=False)
    y, state = layer(packed, nn.utils.rnn.pack_sequence(times, enforce_sorted=False))
    padded, lengths = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
    assert lengths.tolist() == [4, 9, 1]
    for i, (each, t) in enumerate(zip(series, times, strict=True)):
        torch.testing.assert_close(padded[i, : len(t)], layer(each.unsqueeze(0), t)[0][0])
    assert state.t.tolist() == [float(t[-1]) for t in times]
    with pytest.raises(ValueError, match=r"lengths were given.*Fix"):
        layer(packed, None, None, None, [4, 9, 1])


@pytest.mark.parametrize("input", ["impulse", "hold"])
def test_the_cell_continues_a_layer(input):
    layer, cell = make(input=input), hbnode.nn.OscillatorCell(3, 4, 5, input=input).double()
    cell.load_state_dict(layer.state_dict())
    x, t = torch.randn(2, 12, 3, dtype=torch.float64), torch.rand(2, 12).double().cumsum(1)
    whole, end = layer(x, t)
    y, state = layer(x[:, :7], t[:, :7])
    for i in range(7, 12):
        y, state = cell(x[:, i], state, t[:, i] - t[:, i - 1])
        torch.testing.assert_close(y, whole[:, i], rtol=0, atol=1e-12)
    torch.testing.assert_close((state.v, state.x, state.t), (end.v, end.x, end.t), rtol=0, atol=1e-12)
    y, state = cell(x[:, 0])
    torch.testing.assert_close(y, whole[:, 0])
    for wrong, message in [
        ((x[0, 0],), r"x must be \(batch, input_size\)"),
        ((x[:, 0], state, -1.0), "not negative"),
    ]:
        with pytest.raises(ValueError, match=message + r".*Fix"):
            cell(*wrong)


def test_times_that_are_even_but_for_rounding_take_the_fast_way(monkeypatch):
    kinds = []
    scan = hbnode.nn.oscillators.layer.scan
    monkeypatch.setattr(
        hbnode.nn.oscillators.layer, "scan", lambda kind, *rest: (kinds.append(kind), scan(kind, *rest))[1]
    )
    layer, x = make(dtype=torch.float32), torch.randn(2, 50, 3)
    for t in (None, torch.arange(50), torch.linspace(0, 7, 50), torch.arange(50) * 0.1 + torch.rand(2, 1)):
        layer(x, t)
    layer(x, torch.linspace(0, 7, 50), lengths=[50, 3])
    assert kinds == ["fixed"] * 5
    layer(x, torch.linspace(0, 7, 50) ** 1.001)
    assert kinds[-1] == "exact"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    layer, x = make(dtype=torch.float32), torch.randn(2, 300, 3)
    exact, state = layer(x.to(dtype).float())
    y, low = layer(x.to(dtype))
    assert y.dtype == dtype
    assert low.v.dtype == torch.float32
    torch.testing.assert_close(y.float(), exact, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(low.v, state.v)
    x = x.to(dtype).requires_grad_()
    y, _ = copy.deepcopy(layer).to(dtype)(x, torch.rand(300).cumsum(0))
    y.float().square().mean().backward()
    assert y.dtype == x.grad.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x.detach().float())[0], exact)


def test_frozen_parameters_and_inputs():
    layer, x = make(), torch.randn(2, 40, 3, dtype=torch.float64)
    with torch.no_grad():
        assert not layer(x)[0].requires_grad
    for name, parameter in layer.named_parameters():
        layer.requires_grad_(False)
        parameter.requires_grad_()
        y, _ = layer(x, torch.rand(40).double().cumsum(0))
        y.sum().backward()
        assert parameter.grad.any(), name
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x)[0].sum().backward()
    assert x.grad.any()


def test_copies_and_states(tmp_path):
    layer, x = make(), torch.randn(2, 40, 3, dtype=torch.float64)
    y, state = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], y)
    fresh = hbnode.nn.Oscillators(3, 4, 5).double()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x)[0], y)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(layer(x, None, loaded)[0], layer(x, None, state.detach())[0])
    assert "num_oscillators=5, discretization='exact'" in repr(layer)
    script = io.BytesIO()
    torch.save(layer.state_dict(), script)


def test_inputs_that_are_not_contiguous():
    layer, x = make(), torch.randn(3, 40, 2, dtype=torch.float64).permute(2, 1, 0)
    t = torch.rand(40, 2).double().cumsum(0).T
    torch.testing.assert_close(layer(x, t)[0], layer(x.contiguous(), t.contiguous())[0])


def test_second_derivatives_and_transforms():
    layer = make(2, 2, 3)
    x, t = torch.randn(1, 6, 2, dtype=torch.float64), torch.rand(6).double().cumsum(0)
    y, _ = layer(x, t)
    (grad,) = torch.autograd.grad(y.square().sum(), layer.log_stiffness, create_graph=True)
    (found,) = torch.autograd.grad(grad.sum(), layer.log_stiffness)
    with _torch.double_backward():
        y, _ = layer(x, t)
        (grad,) = torch.autograd.grad(y.square().sum(), layer.log_stiffness, create_graph=True)
        (right,) = torch.autograd.grad(grad.sum(), layer.log_stiffness)
    torch.testing.assert_close(found, right)
    assert found.abs().min() > 0
    _, tangent = torch.func.jvp(lambda x: layer(x)[0], (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, layer(torch.ones_like(x))[0])


@pytest.mark.parametrize("input", ["impulse", "hold"])
def test_torch_compile_has_one_graph(input):
    layer = make(input=input, mixed=True)
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for t in (None, torch.rand(2, 50).double().cumsum(1)):
        y, state = layer(x, t)
        found, after = compiled(x, t)
        torch.testing.assert_close((found, after.v), (y, state.v))
        ours, theirs = (torch.autograd.grad(z.square().sum(), list(layer.parameters())) for z in (found, y))
        torch.testing.assert_close(ours, theirs)


def test_initial_oscillators_are_in_their_ranges():
    layer = hbnode.nn.Oscillators(1, 1, 500, frequency=(0.1, 2.0), decay=(0.01, 0.3))
    damped = (layer.stiffness - (layer.damping / 2).square()).sqrt() / (2 * math.pi)
    assert 0.099 < damped.min() < 0.11
    assert 1.8 < damped.max() < 2.01
    assert 0.0099 < layer.damping.min() / 2 < 0.011
    assert 0.28 < layer.damping.max() / 2 < 0.301
    assert (layer.frequency >= damped).all()
    white, t = torch.randn(20, 2000, 1), torch.arange(2000) * 0.125
    for input in ("impulse", "hold"):
        layer = hbnode.nn.Oscillators(1, 1, 200, frequency=(0.02, 2.0), decay=(0.1, 1.0), input=input)
        _, state = layer(white, t)
        for part in (state.v, layer.stiffness.sqrt() * state.x):
            assert 0.5 < part.std() < 1.5


def test_ranges_of_gaps():
    t = torch.tensor([[0.0, 1.0, 2.0, 10.0], [5.0, 6.0, 0.0, 0.0]])
    assert hbnode.nn.oscillator_ranges(t, lengths=[4, 2]) == {"frequency": (0.1, 0.25), "decay": (0.1, 0.1)}
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    assert hbnode.nn.oscillator_ranges(t, mask)["frequency"] == (0.1, 0.125)
    ranges = hbnode.nn.oscillator_ranges(torch.arange(100) / 50)
    layer = hbnode.nn.Oscillators(1, 2, **ranges)
    assert layer.frequency_range == ranges["frequency"] == pytest.approx((50 / 99, 12.5))
    with pytest.raises(ValueError, match=r"no two observed samples.*Fix"):
        hbnode.nn.oscillator_ranges([1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 2), {}), "input_size must be an integer >= 1"),
        (((1, 2, 0), {}), "num_oscillators must be an integer >= 1"),
        (((1, 2), {"discretization": "euler"}), "discretization must be 'exact' or 'imex'"),
        (((1, 2), {"input": "zoh"}), "input must be 'impulse' or 'hold'"),
        (((1, 2), {"frequency": (0.0, 1.0)}), r"frequency must be \(low, high\)"),
        (((1, 2), {"decay": 3}), r"decay must be \(low, high\)"),
    ],
    ids=["input_size", "num_oscillators", "discretization", "input", "frequency", "decay"],
)
def test_wrong_options(arguments, message):
    with pytest.raises(ValueError, match=message + r".*Fix"):
        hbnode.nn.Oscillators(*arguments[0], **arguments[1])


def test_wrong_input():
    layer, x = make(dtype=torch.float32), torch.randn(2, 5, 3)
    _, state = layer(x, torch.arange(5.0))
    wrong = [
        ((x[0],), ValueError, r"x must be \(batch, T, input_size\)"),
        ((x[:, :0],), ValueError, r"at least one sample"),
        ((x.double(),), TypeError, "the parameters are torch.float32"),
        ((x, torch.zeros(5)), ValueError, "t must increase strictly"),
        ((x, torch.arange(4)), ValueError, "t must be"),
        ((x / 0,), ValueError, "x is not finite"),
        ((x, torch.arange(5.0), state), ValueError, "state's time lies after"),
        ((x, None, (state.v, state.x)), TypeError, "must be an OscillatorState"),
        ((x[:1], None, state), ValueError, "the state's v must have shape"),
        ((x, None, None, torch.ones(2, 5)), ValueError, "mask must be bool"),
        ((x, None, None, None, [6, 1]), ValueError, "lengths must lie"),
    ]
    for arguments, kind, message in wrong:
        with pytest.raises(kind, match=message + r"(.|\n)*Fix"):
            layer(*arguments)
    for dt, message in [([-1.0], "not be negative"), (torch.zeros(3, 2), "dt must be"), ([], "dt must be")]:
        with pytest.raises(ValueError, match=message + r".*Fix"):
            layer.forecast(state, dt)


# The stack


@pytest.mark.parametrize("head", ["regression", "classification", "next"])
@pytest.mark.parametrize("input", ["impulse", "hold"])
def test_a_stack_ignores_padding_and_goes_on(head, input):
    torch.manual_seed(0)
    model = hbnode.nn.OscillatorStack(3, 8, num_layers=2, output_size=5, head=head, input=input).double()
    x, t = torch.randn(3, 20, 3, dtype=torch.float64), torch.rand(3, 20).double().cumsum(1)
    mask = torch.rand(3, 20, 3) < 0.7
    lengths = [20, 7, 1]
    y, state = model(x, t, mask=mask, lengths=lengths)
    assert y.shape == ((3, 5) if head == "classification" else (3, 20, 5))
    for i, length in enumerate(lengths):
        alone, end = model(x[i : i + 1, :length], t[i, :length], mask=mask[i : i + 1, :length])
        found = y[i] if head == "classification" else y[i, :length]
        torch.testing.assert_close(found, alone[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(state.v[:, i], end.v[:, 0], rtol=0, atol=1e-10)
    if head != "classification":
        assert not y[1, 7:].any()
        whole, _ = model(x, t, mask=mask)
        first, state = model(x[:, :9], t[:, :9], mask=mask[:, :9], t_next=t[:, 9] if head == "next" else None)
        second, state = model(x[:, 9:], t[:, 9:], state, mask[:, 9:])
        torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-10)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_stack_sees_amplitudes_without_the_norm():
    """Times a thousand, blocks are nearly those of ReLUs: with the norm, only the encoder and its biases see it."""
    x, gains = torch.randn(2, 30, 3), {}
    for norm in (True, False):
        torch.manual_seed(0)
        model = hbnode.nn.OscillatorStack(3, 8, norm=norm)
        assert any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()) == norm
        h = [
            block(model.encoder(scale * x), None, None, None, None)[0].detach()
            for block in model.blocks
            for scale in (1, 1e3)
        ]
        added = [(h[i] - model.encoder(scale * x).detach()).abs().mean() for i, scale in enumerate((1, 1e3))]
        gains[norm] = added[1] / added[0]
    assert gains[True] < 10 < 300 < gains[False]


def test_a_stack_in_both_directions_and_wrong_options():
    model = hbnode.nn.OscillatorStack(3, 8, bidirectional=True, dropout=0.5)
    assert model(torch.randn(2, 9, 3))[0].shape == (2, 9, 8)
    assert "Dropout(p=0.5" in repr(model)
    for options, message in [
        ({"head": "mean"}, "head must be"),
        ({"head": "next", "bidirectional": True}, "from behind"),
    ]:
        with pytest.raises(ValueError, match=message + r".*Fix"):
            hbnode.nn.OscillatorStack(3, 8, **options)


@pytest.mark.parametrize("input", ["impulse", "hold"])
def test_more_oscillators_than_outputs_of_which_some_do_not_swing(input):
    torch.manual_seed(0)
    layer = hbnode.nn.Oscillators(1, 1, 8, input=input).double()
    with torch.no_grad():
        layer.log_damping[0], layer.log_stiffness[0] = 3.0, 0.0
    x, t = torch.randn(2, 20, 1, dtype=torch.float64), (0.1 + torch.rand(2, 20, dtype=torch.float64)).cumsum(1)
    whole, _ = layer(x, t)
    first, state = layer(x[:, :9], t[:, :9])
    rest, _ = layer(x[:, 9:], t[:, 9:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=1e-10, atol=1e-12)
    whole.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("start", [0.0, 1.7e9])
def test_times_that_drift_slowly_are_not_taken_as_equally_spaced(start):
    torch.manual_seed(0)
    count, unit = 4_000, 1.0 if start == 0.0 else 1e-3
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


def test_the_gradient_of_times_passes_through_the_time_of_a_state():
    layer, t = hbnode.nn.Oscillators(1, 1, 4).double(), torch.arange(5, dtype=torch.float64, requires_grad=True)
    x, rest = torch.randn(1, 10, 1, dtype=torch.float64), torch.arange(5, 10, dtype=torch.float64)
    _, state = layer(x[:, :5], t)
    y, _ = layer(x[:, 5:], rest, state)
    whole, _ = layer(x, torch.cat([t, rest]))
    got, expected = (torch.autograd.grad(z.square().sum(), t)[0] for z in (y, whole[:, 5:]))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_a_cell_names_a_sample_that_is_not_finite():
    with pytest.raises(ValueError, match="x must be finite, got NaN or inf"):
        hbnode.nn.OscillatorCell(1, 8)(torch.tensor([[float("nan")]]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_takes_what_is_not_contiguous():
    torch.manual_seed(0)
    layer = hbnode.nn.Oscillators(2, 4, 8)
    x = torch.randn(20, 3, 2).transpose(0, 1).requires_grad_()
    t = (0.1 + torch.rand(3, 20)).cumsum(1)
    compiled, eager = torch.compile(layer, fullgraph=True)(x, t)[0], layer(x, t)[0]
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (compiled, eager)))


def test_a_stack_names_states_and_times_that_do_not_fit():
    stack, x = hbnode.nn.OscillatorStack(2, 4, num_layers=2, head="next"), torch.randn(3, 5, 2)
    _, state = stack(x)
    _, deeper = hbnode.nn.OscillatorStack(2, 4, num_layers=3)(x)
    _, of_a_layer = hbnode.nn.Oscillators(2, 4)(x)
    for wrong in (deeper, of_a_layer, (state.v, state.x)):
        with pytest.raises(ValueError, match="state must be an OscillatorStackState of 2 layers"):
            stack(x, state=wrong)
    t = torch.arange(5.0)
    same = [stack(x, t, t_next=t_next)[0] for t_next in (7.0, torch.full((3,), 7.0))]
    torch.testing.assert_close(*same, rtol=0, atol=0)
    for wrong in (3.0, torch.tensor([7.0, 7.0, float("nan")])):
        with pytest.raises(ValueError, match="t_next must not lie before the last time"):
            stack(x, t, t_next=wrong)
    with pytest.raises(ValueError, match="t_next is for head='next'"):
        hbnode.nn.OscillatorStack(2, 4)(x, t, t_next=7.0)
