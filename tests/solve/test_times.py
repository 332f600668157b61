"""Times of outputs, jumps and rests, with their gradients, against closed forms and finite differences."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import hbnode
from tests.models import AGAIN

X = torch.ones(1, 1, dtype=torch.float64)
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def slope(solve, t, weights):
    """The derivative of the weighted outputs, each solved by itself, with respect to the times after the first."""
    found = []
    for i in range(1, len(t)):
        at = [solve([t[0], t[i] + side]) for side in (-1e-5, 1e-5)]
        found.append(weights[i] * (at[1] - at[0]) / 2e-5)
    return found


@pytest.mark.parametrize("width", [0.05, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sides_of_every_jump_are_seen(width, dtype):
    pulse = lambda t, y: torch.where((t > 5) & (t < 5 + width), 1.0, 0.0).to(y) * torch.ones_like(y)
    y = hbnode.odeint(pulse, X.to(dtype), [0.0, 10.0], jump_times=[5.0, 5.0 + width])
    assert y[-1].item() == pytest.approx(1 + width, abs=1e-4 * width if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
def test_gradients_know_the_jumps(gradient):
    height = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    pulse = lambda t, y: height * torch.where((t > 5) & (t < 5.05), 1.0, 0.0).to(y) * torch.ones_like(y)
    hbnode.odeint(pulse, X, [0.0, 10.0], jump_times=[5.0, 5.05], gradient=gradient)[-1].sum().backward()
    assert height.grad.item() == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("t", [[0.0, 1.0, 2.0, 2.5], [0.0, 1.0]])
def test_the_gradient_of_a_time_on_a_knot_is_the_slope_there(t, per_sample):
    signal = hbnode.Signal(float64(0, 1, 2, 3), float64(0, 1, -1, 2))
    t = float64(*t).requires_grad_()
    h = hbnode.odeint(lambda t, y: -y + signal(t), X, t, per_sample=per_sample, **TIGHT)
    h.sum().backward()
    assert t.grad[1:].tolist() == pytest.approx((signal(t) - h.flatten())[1:].tolist(), rel=1e-6)


@pytest.mark.parametrize("row", [[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 0.7, 0.7], [0, 0.5, 1]])
@pytest.mark.parametrize("method", ["tsit5", "nystrom8", "exponential"])
def test_gradients_of_times_that_repeat(row, method):
    field = hbnode.HBNODE(lambda h: -h, damping=0.5, learn_damping=False)
    state, weights = (X, 0.3 * X), float64(1, 2, 3)
    t = float64(row).requires_grad_()
    (weights.view(-1, 1, 1) * hbnode.odeint(field, state, t, method=method, **TIGHT)[0]).sum().backward()

    def alone(times):
        if times[0] == times[1]:
            return X.item()
        return hbnode.odeint(field, state, times, method="dopri8", rtol=1e-12, atol=1e-12)[0][-1].item()

    assert t.grad[0, 1:].tolist() == pytest.approx(slope(alone, [float(x) for x in row], weights.tolist()), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"steps": 8}])
def test_times_in_forward_mode(options):
    solve = lambda t: hbnode.odeint(lambda t, y: -y * (1 + t), X, t, gradient="direct", **TIGHT, **options)
    t = float64(0.0, 0.5, 1.0)
    reverse = torch.func.jacrev(solve)(t)
    torch.testing.assert_close(torch.func.jacfwd(solve)(t), reverse)
    assert reverse[1, 0, 0, 1].item() == pytest.approx(-1.5 * np.exp(-0.625), rel=1e-3)
    with pytest.raises(ValueError, match=r"Fix: odeint with t of shape \(batch, T\)"):
        torch.func.vmap(solve)(torch.stack([t, t]))


def test_one_time_alone():
    t = float64(0.5).requires_grad_()
    assert torch.equal(hbnode.odeint(lambda t, y: -y, X, t)[0], X)


@pytest.mark.parametrize("method", ["nystrom4", "nystrom8", "exponential"])
def test_a_damping_of_each_sample_with_steps_of_its_own(method):
    damping = float64(0.1, 1.0, 3.0).view(3, 1)
    h0, t = float64(1.0, 2.0, 0.5).view(3, 1), [0.0, 0.3, 1.0, 2.0]
    field = hbnode.HBNODE(lambda h: -h, damping=damping, learn_damping=False)
    h, _ = hbnode.odeint(field, field.initial_state(h0), t, method=method, per_sample=True, **TIGHT)
    for i in range(3):
        own = hbnode.HBNODE(lambda h: -h, damping=damping[i].item(), learn_damping=False)
        expected, _ = hbnode.odeint(own, own.initial_state(h0[i : i + 1]), t, method="dopri8", rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(h[:, i], expected[:, 0], rtol=1e-6, atol=1e-6)


def test_parts_of_unlike_dimensions_each_at_the_time_of_their_sample():
    field = lambda t, y: (-y[0], torch.zeros_like(y[1]) + t)
    t = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    _, q = hbnode.odeint(field, (torch.ones(3), torch.zeros(3, 3)), t)
    torch.testing.assert_close(q[-1], (t[:, 1:] ** 2 / 2).expand(3, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("gradient", "options"),
    [("adjoint", {}), ("adjoint", {"method": "dopri5"}), ("reversible", {"steps": 4}), ("checkpoint", {})],
)
def test_an_autocast_inside_of_f(gradient, options):
    linear = nn.Linear(2, 2)

    def f(h):
        with torch.autocast("cpu", torch.bfloat16):
            return linear(h).to(h)

    field = hbnode.HBNODE(f)
    state = field.initial_state(torch.randn(3, 2))
    hbnode.odeint(field, state, [0.0, 1.0], gradient=gradient, rtol=0.1, atol=0.1, **options)[0].sum().backward()
    assert linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "t",
    [
        pd.Series([0.0, 1.0, 2.0], index=[5, 6, 7]),
        pd.DataFrame(np.tile([0.0, 1.0, 2.0], (2, 1)), columns=list("abc")),
        np.array([0, 1, 2]),
    ],
    ids=["series", "table", "array"],
)
def test_times_of_pandas_and_numpy(t):
    y = hbnode.odeint(lambda t, y: -y, torch.ones(2, 1, dtype=torch.float64), t, **TIGHT)
    assert y[:, 0, 0].tolist() == pytest.approx(np.exp([-0.0, -1.0, -2.0]).tolist(), rel=1e-6)


def test_a_set_is_no_times():
    with pytest.raises(TypeError, match="a tensor or a sequence, got set"):
        hbnode.odeint(lambda t, y: -y, X, {0.0, 1.0})


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN], ids=["direct", "kept", "again"])
@pytest.mark.parametrize("needs_t", [False, True])
def test_a_step_that_overflows_for_one_sample_leaves_its_gradient_finite(gradient, needs_t):
    weight = torch.tensor(1.0, requires_grad=True)
    x, field = torch.tensor([[1.8], [0.1]], requires_grad=True), hbnode.NODE(lambda h: -weight * h**15)
    t = torch.tensor([0.0, 0.05, 1.0], requires_grad=needs_t)
    options = {"first_step": 0.1}  # 1.8^15 is 7e3, and the next stage overflows
    h = hbnode.odeint(field, x, t, per_sample=True, gradient=gradient, options=options)
    h.sum().backward()
    exact = (1.8**-14 + 14 * t.detach()[1:].double()) ** (-1 / 14)
    assert h[1:, 0, 0].tolist() == pytest.approx(exact.tolist(), rel=1e-4)
    assert weight.grad.item() == pytest.approx(-(exact**15 * t.detach()[1:]).sum().item(), rel=1e-2)
    assert torch.isfinite(x.grad).all()
    assert not needs_t or t.grad[1].item() == pytest.approx(-(exact[0] ** 15).item(), rel=1e-2)
