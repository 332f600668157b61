import copy
import math

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicHermiteSpline
from torch import nn

import hbnode
from tests.models import AGAIN


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    return np.sort(rng.uniform(0, 5, 12)), rng.normal(size=(12, 3))


def test_linear_equals_numpy(samples):
    t, u = samples
    query = np.linspace(t[0], t[-1], 101)
    signal = hbnode.Signal(torch.tensor(t), torch.tensor(u))
    expected = np.stack([np.interp(query, t, channel) for channel in u.T], axis=-1)
    np.testing.assert_allclose(signal(torch.tensor(query)), expected, atol=1e-13)


def test_cubic_equals_scipys_hermite_spline_with_finite_difference_slopes(samples):
    t, u = samples
    query = np.linspace(t[0], t[-1], 101)
    signal = hbnode.Signal(torch.tensor(t), torch.tensor(u), "cubic")
    expected = CubicHermiteSpline(t, u, np.gradient(u, t, axis=0, edge_order=2))(query)
    np.testing.assert_allclose(signal(torch.tensor(query)), expected, atol=1e-12)


def test_cubic_is_exact_for_quadratics(samples):
    t = torch.tensor(samples[0])
    query = torch.linspace(float(t[0]), float(t[-1]), 33, dtype=torch.float64)
    signal = hbnode.Signal(t, 3 * t**2 - t + 2, "cubic")
    torch.testing.assert_close(signal(query), 3 * query**2 - query + 2)


@pytest.mark.parametrize("kind", ["linear", "cubic"])
def test_shapes_and_gradients(samples, kind):
    t = torch.tensor(samples[0])
    u = torch.randn(12, 2, 3, dtype=torch.float64, requires_grad=True)
    assert hbnode.Signal(t, u, kind)(t[3]).shape == (2, 3)
    assert hbnode.Signal(t, u, kind)(t[:4].reshape(2, 2)).shape == (2, 2, 2, 3)
    torch.testing.assert_close(hbnode.Signal(t, u, kind)(t), u)
    query = torch.tensor([0.5, 1.7, 3.1], dtype=torch.float64, requires_grad=True)
    flat = u[:, 0, :1].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda u, q: hbnode.Signal(t, u, kind)(q), (flat, query))


@pytest.mark.parametrize(
    "gradient", ["checkpoint", AGAIN, "direct", "adjoint"], ids=["kept", "again", "direct", "adjoint"]
)
def test_a_driven_oscillator(gradient):
    """h'' = -4 h + sin(t) from rest: h = (2 sin t - sin 2t) / 6."""
    t = torch.linspace(0, 4, 401, dtype=torch.float64)
    u = t.sin().requires_grad_()
    drive = hbnode.Signal(t, u, "cubic")
    field = hbnode.HBNODE(lambda t, h: -4 * h + drive(t), damping=0.0, learn_damping=False)
    rest = field.initial_state(torch.zeros(1, dtype=torch.float64))
    tight = {"rtol": 1e-9, "atol": 1e-9, "gradient": gradient}
    h, _ = hbnode.odeint(field, rest, [0.0, 1.0, 3.0], **tight)
    exact = [(2 * math.sin(s) - math.sin(2 * s)) / 6 for s in (1.0, 3.0)]
    np.testing.assert_allclose(h[1:, 0].detach(), exact, atol=1e-8)
    (slope,) = torch.autograd.grad(h[-1].sum(), u)
    # h is linear in the drive, so the gradient contracted with the drive is h itself
    assert (slope @ u).item() == pytest.approx(exact[1], abs=1e-6)


def test_queries_outside_are_refused_or_held():
    t, u = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 5.0])
    with pytest.raises(ValueError, match=r"asked for t=1.5, outside of its samples \[0, 1\].*Fix: give it samples"):
        hbnode.Signal(t, u)(torch.tensor([0.5, 1.5]))
    held = hbnode.Signal(t, u, outside="hold")
    torch.testing.assert_close(held(torch.tensor([-1.0, 2.0])), torch.tensor([3.0, 5.0]))


def test_held_ends_have_the_slope_of_what_is_inside():
    signal = hbnode.Signal(torch.arange(4.0), torch.tensor([0.0, 2.0, 2.0, 5.0]), outside="hold")
    t = torch.tensor([-1.0, 0.0, 0.5, 3.0, 4.0], requires_grad=True)
    value = signal(t)
    assert value.tolist() == [0.0, 0.0, 1.0, 5.0, 5.0]
    (slope,) = torch.autograd.grad(value.sum(), t)
    assert slope.tolist() == [0.0, 2.0, 2.0, 3.0, 0.0]


def test_moves_with_a_module_and_stays_out_of_its_state_dict():
    signal = hbnode.Signal(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 5.0]))
    assert signal.state_dict() == {}
    assert copy.deepcopy(signal).double()(torch.tensor(0.5, dtype=torch.float64)).dtype == torch.float64
    assert repr(signal) == "Signal(samples=2, kind='linear', outside='raise')"


@pytest.mark.parametrize("kind", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sample_times_are_not_rounded_with_the_module(kind, dtype):
    """In bfloat16 the sample times after 50 would be 0.25 apart, and those of dates all the same in float32."""
    t = torch.linspace(0, 100, 1001, dtype=torch.float64)
    for start in (0.0, 1.7e9):
        signal = hbnode.Signal(start + t, t.sin(), kind)
        query = start + torch.linspace(50.0, 51.0, 7, dtype=torch.float64)
        moved = nn.Sequential(copy.deepcopy(signal)).to(dtype)[0]
        assert moved(query).dtype == dtype
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(moved(query).double(), signal(query), atol=bound, rtol=0)
        torch.testing.assert_close(moved.double()(query), signal(query), atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([0.0, 1.0]), torch.zeros(2), "spline"), "unknown kind 'spline'"),
        ((torch.tensor([0.0, 1.0]), torch.zeros(3)), r"needs t of shape \(T,\) and u of shape"),
        ((torch.tensor([0.0, 1.0]), torch.zeros(2), "cubic"), "with T >= 3"),
        ((torch.tensor([0.0, 0.0]), torch.zeros(2)), "strictly increasing"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        hbnode.Signal(*arguments)
    with pytest.raises(TypeError, match=r"u torch.int64. Fix: t.float\(\), u.float\(\)"):
        hbnode.Signal(torch.tensor([0.0, 1.0]), torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="unknown outside='wrap'"):
        hbnode.Signal(torch.tensor([0.0, 1.0]), torch.zeros(2), outside="wrap")
    with pytest.raises(TypeError, match=r"t must be a tensor, got list. Fix: torch.tensor\(x, dtype=torch.float32\)"):
        hbnode.Signal([0.0, 1.0], torch.zeros(2))


@pytest.mark.parametrize("end", [0.1, 0.3, 0.7, 1.1, 1e9 + 0.3])
@pytest.mark.parametrize("kind", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exact_end_in_another_dtype_is_inside(end, kind, dtype):
    """0.1 and 1.1 in float32 lie past those in float64, 0.7 before."""
    other = torch.float64 if dtype == torch.float32 else torch.float32
    signal = hbnode.Signal(torch.linspace(0, end, 11, dtype=other), torch.arange(11, dtype=dtype), kind)
    for t in (torch.tensor(end, dtype=dtype), torch.full((2, 1), end, dtype=dtype)):
        torch.testing.assert_close(signal(t), torch.full_like(t, 10.0))
    field = hbnode.HBNODE(lambda t, h: signal(t) - h, damping=0.1, learn_damping=False)
    state = torch.zeros(2, 1, dtype=dtype)
    for per_sample in (False, True):
        hbnode.odeint(field, (state, state), [0.0, end], per_sample=per_sample, steps=2)
    for t in (end * (1 + 1e-5), -1e-5 * end):
        with pytest.raises(ValueError, match="outside of its samples"):
            signal(torch.tensor(t, dtype=dtype))
