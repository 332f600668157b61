"""``block.trajectory``: the state that ``block(x, t)`` reads h from."""

import pytest
import torch
from torch import nn

import hbnode
from tests.models import AGAIN, every_model, make_field, make_input
from tests.problems import damped_oscillator

TIMES = [0.0, 0.4, 1.5]


def _oscillator(**solver):
    block = hbnode.HeavyBallODEBlock(
        lambda h: -4 * h, damping=0.3, learn_damping=False, initial_momentum=nn.Tanh(), rtol=1e-9, atol=1e-9, **solver
    )
    return block, torch.tensor([[0.5], [-1.0]], dtype=torch.float64)


@pytest.mark.parametrize("solver", [{}, {"method": "tsit5"}, {"method": "dopri5"}, {"per_sample": True}], ids=str)
def test_the_position_and_momentum_of_an_oscillator(solver):
    block, x = _oscillator(**solver)
    h, m = block.trajectory(x, TIMES)
    for i, t in enumerate(TIMES):
        exact = damped_oscillator(2.0, 0.3, x.numpy(), x.tanh().numpy(), t)
        torch.testing.assert_close((h[i], m[i]), tuple(map(torch.as_tensor, exact)), rtol=1e-7, atol=1e-7)


def test_times_for_each_sample():
    block, x = _oscillator()
    times = torch.tensor([[0.0, 0.5], [0.0, 2.0]], dtype=torch.float64)
    h, m = block.trajectory(x, times)
    for i in range(2):
        exact = damped_oscillator(2.0, 0.3, x[i].numpy(), x[i].tanh().numpy(), float(times[i, 1]))
        torch.testing.assert_close((h[1, i], m[1, i]), tuple(map(torch.as_tensor, exact)), rtol=1e-7, atol=1e-7)


@every_model
def test_it_is_what_odeint_returns_and_counts_what_a_call_does(model):
    field = make_field(model).double()
    block, x = hbnode.ODEBlock(field, t_span=(0.5, 2.0)), make_input()
    states, call = block.trajectory(x, TIMES), block(x, TIMES)
    nfe = block.nfe
    torch.testing.assert_close(states, hbnode.odeint(field, field.initial_state(x), TIMES), rtol=0, atol=0)
    torch.testing.assert_close(field.readout(states), call, rtol=0, atol=0)
    block.trajectory(x, TIMES)
    assert block.nfe == nfe
    of_span = field.readout(block.trajectory(x))  # the two ends of t_span
    torch.testing.assert_close(of_span, torch.stack([field.readout(field.initial_state(x)), block(x)]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "gradient", ["direct", "checkpoint", AGAIN, "adjoint"], ids=["direct", "kept", "again", "adjoint"]
)
def test_gradients_flow_through_the_momentum(gradient):
    """At m(1) of h'' = w h from h = x, m = 0: √w sinh(√w) x."""
    func = nn.Linear(1, 1, bias=False).double()
    w = torch.tensor([[1.7]], dtype=torch.float64, requires_grad=True)
    func.weight.data.copy_(w)
    block = hbnode.HeavyBallODEBlock(func, damping=0.0, learn_damping=False, gradient=gradient, rtol=1e-10, atol=1e-10)
    x = torch.tensor([[0.8]], dtype=torch.float64, requires_grad=True)
    _, m = block.trajectory(x)
    found = torch.autograd.grad(m[-1].sum(), [x, func.weight])
    expected = torch.autograd.grad((w.sqrt() * w.sqrt().sinh() * x).sum(), [x, w])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    assert block.nfe.backward > 0 or gradient == "direct" or "graph kept" in str(block.nfe)


def test_an_initial_state_and_augmentation():
    def start(x):
        return x[:, :2], x[:, 2:]

    block = hbnode.ODEBlock(hbnode.SONODE(lambda h, v: -h), initial_state=start)
    x = torch.randn(3, 4)
    h, v = block.trajectory(x)
    torch.testing.assert_close((h[0], v[0]), start(x), rtol=0, atol=0)
    h, m = hbnode.HeavyBallODEBlock(nn.Linear(3, 3), augment=1).trajectory(x[:, :2])
    assert h.shape == m.shape == (2, 3, 3)
    assert not h[0, :, 2].any()


@every_model
@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
@pytest.mark.parametrize("steps", [2, None], ids=["grid", "adaptive"])
def test_a_block_gives_the_end_of_its_trajectory(model, steps, gradient):
    """Which it solves without a trajectory: the gradient of h does not pass through the last value of f."""
    block = hbnode.ODEBlock(make_field(model), gradient=gradient, steps=steps).double()
    x = make_input().requires_grad_()
    inputs = [x, *block.parameters()]

    def values(h):
        loss = h.sin().sum()
        first = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
        return [h, *first, *torch.autograd.grad(loss, inputs, allow_unused=True)]  # the second time from points

    end, evaluations = values(block(x)), (block.nfe.forward, block.nfe.steps)
    trajectory = values(block.field.readout(block.trajectory(x))[-1])
    assert (block.nfe.forward, block.nfe.steps) == evaluations
    for a, b in zip(end, trajectory, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-14)
