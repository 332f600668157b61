import copy
import math

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicHermiteSpline
from torch import nn

import hbnode


@pytest.mark.parametrize("kind", ["linear", "cubic"])
def test_shapes_and_gradients(kind):
    t = torch.rand(12, dtype=torch.float64).cumsum(0)
    u = torch.randn(12, 2, 3, dtype=torch.float64)
    signal, flat = hbnode.Signal(t, u, kind), u[:, 0, :1].clone().requires_grad_()
    assert signal(t[:4].reshape(2, 2)).shape == (2, 2, 2, 3)
    torch.testing.assert_close(signal(t), u)
    query = torch.tensor([1.0, 1.7, 3.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda u, q: hbnode.Signal(t, u, kind)(q), (flat, query))


def test_a_driven_oscillator():
    """h'' = -4 h + sin(t) from rest: h = (2 sin t - sin 2t) / 6."""
    t = torch.linspace(0, 4, 81, dtype=torch.float64)
    u = t.sin().requires_grad_()
    drive = hbnode.Signal(t, u, "cubic")
    field = hbnode.HBNODE(lambda t, h: -4 * h + drive(t), damping=0.0, learn_damping=False)
    rest = field.initial_state(torch.zeros(1, dtype=torch.float64))
    h, _ = hbnode.odeint(field, rest, [0.0, 1.0, 3.0], rtol=1e-9, atol=1e-9)
    exact = [(2 * math.sin(s) - math.sin(2 * s)) / 6 for s in (1.0, 3.0)]
    np.testing.assert_allclose(h[1:, 0].detach(), exact, atol=1e-5)  # the error of the interpolation
    (slope,) = torch.autograd.grad(h[-1].sum(), u)
    # h is linear in the drive, so the gradient contracted with the drive is h itself
    assert (slope @ u).item() == pytest.approx(h[-1].item(), abs=1e-8)


def test_queries_outside_are_refused_or_held():
    """Held ends have the slope of what is inside."""
    t, u = torch.arange(4.0), torch.tensor([0.0, 2.0, 2.0, 5.0])
    with pytest.raises(ValueError, match=r"evaluated at t=3.5, outside its sample times \[0, 3\].*Fix: add samples"):
        hbnode.Signal(t, u)(torch.tensor([0.5, 3.5]))
    query = torch.tensor([-1.0, 0.0, 0.5, 3.0, 4.0], requires_grad=True)
    value = hbnode.Signal(t, u, outside="hold")(query)
    assert value.tolist() == [0.0, 0.0, 1.0, 5.0, 5.0]
    assert torch.autograd.grad(value.sum(), query)[0].tolist() == [0.0, 2.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("kind", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sample_times_are_not_rounded_with_the_module(kind, dtype):
    """In bfloat16 the sample times after 50 would be 0.25 apart, and those of dates all the same in float32."""
    t = torch.linspace(0, 100, 1001, dtype=torch.float64)
    for start in (0.0, 1.7e9):
        signal = hbnode.Signal(start + t, t.sin(), kind)
        query = start + torch.linspace(50.0, 51.0, 7, dtype=torch.float64)
        moved = nn.Sequential(copy.deepcopy(signal)).to(dtype)[0]
        assert moved.state_dict() == {}
        assert moved(query).dtype == dtype
        bound = 4 * torch.finfo(dtype).eps
        for values in (moved(query).double(), moved.double()(query)):
            torch.testing.assert_close(values, signal(query), atol=bound, rtol=0)


TIMES, ZEROS = torch.tensor([0.0, 1.0]), torch.zeros(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TIMES, torch.zeros(3)), r"needs t of shape \(T,\) and u of shape"),
        ((TIMES, ZEROS, "cubic"), "with T >= 3"),
        ((ZEROS, ZEROS), r"strictly increasing, but t\[0\]=0 is followed by 0"),
        ((TIMES, torch.tensor([0, 10])), r"and torch.int64. Fix: t.double\(\), u.float\(\)"),
        ((TIMES, torch.tensor([0.0, torch.nan])), r"u must be finite.*Signal\(t\[keep\], u\[keep\]\)"),
        (([0.0, 1.0], ZEROS), r"t must be a tensor, got list. Fix: torch.tensor\(x"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hbnode.Signal(*arguments)


@pytest.mark.sparse
@pytest.mark.parametrize("end", [0.1, 0.7, 1e9 + 0.3])
@pytest.mark.parametrize("kind", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exact_end_in_another_dtype_is_inside(end, kind, dtype):
    """0.1 in float32 lies past that in float64, 0.7 before."""
    other = torch.float64 if dtype == torch.float32 else torch.float32
    signal = hbnode.Signal(torch.linspace(0, end, 11, dtype=other), torch.arange(11, dtype=dtype), kind)
    for t in (torch.tensor(end, dtype=dtype), torch.full((2, 1), end, dtype=dtype)):
        torch.testing.assert_close(signal(t), torch.full_like(t, 10.0))
    field = hbnode.HBNODE(lambda t, h: signal(t) - h, damping=0.1, learn_damping=False)
    state = torch.zeros(2, 1, dtype=dtype)
    for per_sample in (False, True):
        hbnode.odeint(field, (state, state), [0.0, end], per_sample=per_sample, steps=2)
    for t in (end * (1 + 1e-5), -1e-5 * end):
        with pytest.raises(ValueError, match="outside its sample times"):
            signal(torch.tensor(t, dtype=dtype))


def test_it_equals_numpy_and_scipys_hermite_spline_with_finite_difference_slopes():
    rng = np.random.default_rng(0)
    t, u = np.sort(rng.uniform(0, 5, 12)), rng.normal(size=(12, 3))
    query = np.linspace(t[0], t[-1], 101)
    linear, cubic = (hbnode.Signal(torch.tensor(t), torch.tensor(u), kind) for kind in ("linear", "cubic"))
    expected = np.stack([np.interp(query, t, channel) for channel in u.T], axis=-1)
    np.testing.assert_allclose(linear(torch.tensor(query)), expected, atol=1e-13)
    expected = CubicHermiteSpline(t, u, np.gradient(u, t, axis=0, edge_order=2))(query)
    np.testing.assert_allclose(cubic(torch.tensor(query)), expected, atol=1e-12)


def test_values_under_vmap_and_mapped_times():
    t = torch.linspace(0, 1, 5, dtype=torch.float64)
    values, rnn = torch.randn(3, 5, 1, dtype=torch.float64), hbnode.ODERNN(1, 2).double()

    def end(u):
        signal = hbnode.Signal(t, u)
        return hbnode.odeint(lambda t, y: signal(t) - y, u[:2], [0.0, 1.0], steps=4, gradient="direct")[-1]

    for one in (end, torch.func.jacrev(end)):
        torch.testing.assert_close(torch.func.vmap(one)(values), torch.stack([one(u) for u in values]))
    with pytest.raises(ValueError, match=r"t is mapped by torch.vmap. Fix: a Signal of one row"):
        torch.func.vmap(lambda t: hbnode.Signal(t, values[0])(0.5))(t.expand(3, 5))
    with pytest.raises(ValueError, match=r"t is mapped by torch.vmap. Fix: a batch, rnn\(x, t\)"):
        torch.func.vmap(lambda t: rnn(values[:1], t[None])[0])(t.expand(3, 5))


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_samples_that_end_after_the_last_event(first):
    """Evaluations before the solve, which look for knots or a force, are later than the samples."""
    t = torch.linspace(0, 5, 6, dtype=torch.float64)
    signal, event = hbnode.Signal(t, torch.tensor([first, *[1.0] * 5]).double()), hbnode.Event(lambda t, y: y[:, 0] - 3)
    given = lambda t, y: signal(0.5 * t) + 0 * y, torch.zeros(1, 1, dtype=torch.float64), [0.0, 100.0]
    _, record = hbnode.odeint(*given, events=event)
    assert record.t.item() == pytest.approx(4 - first, abs=1e-4)
    with pytest.raises(ValueError, match="outside its sample times"):
        hbnode.odeint(*given)


def test_pulses_at_scaled_times_under_transforms():
    """y(10) = y_0 + 100 times the area 0.1 u of a triangle."""
    t = torch.linspace(0, 1, 101, dtype=torch.float64)

    def end(y0, height):
        signal = hbnode.Signal(t, height * (t == t[50]))
        return hbnode.odeint(lambda t, y: 100 * signal(t / 10) + 0 * y, y0, [0.0, 10.0], gradient="direct")[-1]

    start, height = torch.zeros(3, 1, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(end, (0, None))(start, height), start + 5)
    slope = torch.func.grad(lambda height: end(start[0], height).sum())(height)
    assert slope.item() == pytest.approx(10, rel=1e-6)
    signal = hbnode.Signal(t, t)
    torch.testing.assert_close(torch.func.vmap(signal)(t[:3]), t[:3])
