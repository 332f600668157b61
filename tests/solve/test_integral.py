"""``block.with_integral``: integrals along the path, against closed forms in float64."""

import math
import re

import pytest
import torch
from torch import nn

import hbnode
from tests.models import every_model, make_field, make_input

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
SOLVERS = [
    {},
    {"gradient": "direct"},
    {"gradient": "adjoint"},
    {"per_sample": True},
    {"method": "tsit5", "steps": 60},
    {"method": "dopri5"},
    {"method": "dopri5", "gradient": "adjoint", "adjoint_options": {}},
    {"method": "rk4", "steps": 200},
]
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=str)


def energy(t, state, derivative):
    """|h'|² of each sample."""
    h = derivative if isinstance(derivative, torch.Tensor) else derivative[0]
    return h.square().flatten(1).sum(1)


class Spring(nn.Module):
    def __init__(self, omega=1.3):
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(omega, dtype=torch.float64))

    def forward(self, h):
        return -(self.omega**2) * h


def spring_block(**solver):
    return hbnode.HeavyBallODEBlock(
        Spring(), damping=0.0, learn_damping=False, t_span=(0.5, 2.5), **{**TIGHT, **solver}
    )


def spring_energy(x, omega, t):
    """The integral of h'² over h = x cos(ωt), summed over features."""
    return (x**2).sum(1) * omega**2 * (t / 2 - torch.sin(2 * omega * t) / (4 * omega))


def make_x(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@every_solver
def test_the_kinetic_energy_of_an_oscillator_and_its_gradients(solver):
    block, x = spring_block(**solver), make_x(3, 2).requires_grad_()
    weight = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)  # a parameter that g closes over
    h, q = block.with_integral(x, lambda t, state, derivative: weight * energy(t, state, derivative))
    omega = block.field.func.omega
    span = torch.tensor(2.0, dtype=torch.float64)
    exact = (omega * span).cos() * x, weight * spring_energy(x, omega, span)
    torch.testing.assert_close((h, q), exact, rtol=1e-7, atol=1e-7)
    wanted = [x, omega, weight]
    found = torch.autograd.grad(h.square().sum() + q.sin().sum(), wanted)
    expected = torch.autograd.grad(exact[0].square().sum() + exact[1].sin().sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solver", [*SOLVERS[:4], {"steps": 3}, SOLVERS[6]], ids=str)
def test_the_log_density_of_a_linear_flow(solver):
    """Its trace times the length of time, exact or estimated with noise e: eᵀAe."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3).double()
    block, x, noise = hbnode.ODEBlock(hbnode.NODE(net), (1.0, -0.5), **solver), make_x(4, 3), make_x(4, 3)

    def exact(t, h, derivative):
        return -torch.func.vmap(lambda h: torch.func.jacrev(net)(h).trace())(h)

    def estimate(t, h, derivative):
        return -(torch.func.vjp(net, h)[1](noise)[0] * noise).sum(1)

    for integrand, trace in ((exact, net.weight.trace().expand(4)), (estimate, ((noise @ net.weight) * noise).sum(1))):
        _, q = block.with_integral(x, integrand)
        torch.testing.assert_close(q, 1.5 * trace, rtol=1e-8, atol=1e-8)
        found = torch.autograd.grad(q.sum(), net.weight)
        torch.testing.assert_close(found, torch.autograd.grad(1.5 * trace.sum(), net.weight), rtol=1e-7, atol=1e-7)


def test_the_log_density_of_a_nonlinear_flow_is_that_of_its_map():
    """Of h' = sin h: the integral of cos h is log |dh(T) / dh(0)|."""
    block, x = hbnode.ODEBlock(hbnode.NODE(lambda h: h.sin()), **TIGHT), make_x(5, 1).requires_grad_()
    h, q = block.with_integral(x, lambda t, h, derivative: h.cos().sum(1))
    torch.testing.assert_close((h / 2).tan(), (x / 2).tan() * math.e, rtol=1e-7, atol=1e-7)
    (slope,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(q, slope.log().sum(1), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("solver", [{}, {"method": "dopri5"}, {"per_sample": True}], ids=str)
def test_at_many_times(solver):
    block, x, times = spring_block(**solver), make_x(2, 3), torch.linspace(-1.0, 3.0, 9, dtype=torch.float64)
    h, q = block.with_integral(x, energy, times)
    exact = torch.stack([spring_energy(x, block.field.func.omega, t + 1.0) for t in times])
    assert (h.shape, q.shape) == ((9, 2, 3), (9, 2))
    torch.testing.assert_close(q, exact, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(h, block(x, times), rtol=1e-7, atol=1e-7)


def test_at_times_of_each_sample_on_images():
    """Also the time that f and g are given is the sample's own."""
    field = hbnode.HBNODE(lambda t, h: t + 0 * h, damping=0.0, learn_damping=False)
    block, x = hbnode.ODEBlock(field, augment=1, **TIGHT), make_x(2, 1, 3, 3)
    times = torch.tensor([[0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    h, q = block.with_integral(x, lambda t, state, derivative: (t * state[1]).flatten(1).mean(1), times)
    for i, end in enumerate((1.0, 2.0)):  # h'' = t
        torch.testing.assert_close(h[1, i, :1], x[i] + end**3 / 6, rtol=1e-8, atol=1e-8)
        assert q[1, i].item() == pytest.approx(end**4 / 8)
    assert not q[0].any()


@every_model
def test_every_field(model):
    """The integral of h' is h(T) - h(0)."""
    field, x = make_field(model).double(), make_input()
    block = hbnode.ODEBlock(field, **TIGHT)

    def velocity(t, state, derivative):
        return (derivative if isinstance(derivative, torch.Tensor) else derivative[0])[:, 0]

    h, q = block.with_integral(x, velocity)
    torch.testing.assert_close(q, h[:, 0] - x[:, 0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(h, block(x), rtol=1e-7, atol=1e-7)
    q.sum().backward()
    assert all(p.grad is not None for p in field.parameters())


@pytest.mark.parametrize("solver", [{"method": "tsit5"}, {"method": "dopri5"}, {"per_sample": True}], ids=str)
def test_the_error_norms_of_the_state_and_the_integral_are_apart(solver):
    """A thousand features at rest do not hide the error of q, and an easy q does not loosen the steps of h."""
    rest = hbnode.ODEBlock(hbnode.NODE(lambda h: 0 * h), t_span=(0.0, 3.0), rtol=1e-7, atol=1e-7, **solver)
    _, q = rest.with_integral(make_x(2, 1000), lambda t, h, derivative: ((20 * t).cos() + 0 * h).mean(1))
    assert (q - math.sin(60.0) / 20).abs().max() < 1e-6
    block = hbnode.ODEBlock(hbnode.NODE(lambda h: -3 * h.sin()), t_span=(0.0, 1.0), **solver)
    x = make_x(2, 1)
    exact = 2 * ((x / 2).tan() * math.exp(-3)).atan()
    error, evaluations = (block(x) - exact).abs().max(), block.nfe.forward
    h, q = block.with_integral(x, lambda t, h, derivative: 0 * h.sum(1))
    assert (h - exact).abs().max() < 1.2 * error
    assert abs(block.nfe.forward - evaluations) <= 12
    assert not q.any()


@pytest.mark.parametrize("solver", [{"method": "tsit5"}, {"method": "dopri5"}, {"per_sample": True}], ids=str)
def test_an_empty_batch_has_an_empty_integral(solver):
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **solver), torch.randn(0, 2, requires_grad=True)
    h, q = block.with_integral(x, energy)
    assert (h.shape, q.shape) == ((0, 2), (0,))
    h, q = block.with_integral(x, energy, [0.0, 0.5, 1.0])
    assert (h.shape, q.shape) == ((3, 0, 2), (3, 0))
    (q.sum() + h.sum()).backward()
    assert not block.field.func.weight.grad.any()


def test_counts_modules_and_masks():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), hbnode.nn.SolveDropout(0.5), nn.Tanh(), nn.Linear(8, 2)).double()
    block = hbnode.HeavyBallODEBlock(net, rtol=1e-4, atol=1e-4)

    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, t, state, derivative):
            return self.scale * energy(t, state, derivative)

    penalty = Penalty()
    with hbnode.count_nfe(block) as nfe, hbnode.diagnostics.record_steps(block) as steps:
        h, q = block.with_integral(make_x(3, 2), penalty)
        (h.sum() + q.sum()).backward()
    assert nfe == block.nfe
    assert nfe.forward > 0
    assert len(steps) == nfe.steps + nfe.rejected
    torch.testing.assert_close(penalty.scale.grad, q.detach().sum(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "solver",
    [
        {"method": "nystrom8"},
        {"method": "leapfrog", "steps": 8},
        {"gradient": "reversible", "steps": 8},
    ],
)
def test_a_method_of_the_heavy_ball_alone_is_refused(solver):
    block, x = hbnode.HeavyBallODEBlock(nn.Identity(), **solver), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"Fix: block.method, block.gradient = 'tsit5', 'checkpoint'"):
        block.with_integral(x, energy)
    block.method, block.gradient = "tsit5", "checkpoint"
    assert block.with_integral(x, energy)[1].shape == (2,)


def test_an_integrand_of_another_shape_is_refused_with_what_helps():
    block, x = hbnode.ODEBlock(hbnode.NODE(nn.Identity())), torch.ones(2, 3)
    with pytest.raises(ValueError, match=re.escape("one number for each sample, (2,). Fix: g.flatten(1).sum(1)")):
        block.with_integral(x, lambda t, h, derivative: h.square())
    assert block.with_integral(x, lambda t, h, derivative: h.square().flatten(1).sum(1))[1].shape == (2,)
    with pytest.raises(ValueError, match=r"shape \(batch, ...\), got shape \(\). Fix: x.unsqueeze\(0\)"):
        block.with_integral(torch.tensor(1.0), energy)


INTEGRANDS = {"two arguments": lambda t, h: h.sum(1), "a module": nn.Identity(), "a number": 3.0}


@pytest.mark.parametrize("integrand", INTEGRANDS.values(), ids=INTEGRANDS)
def test_an_integrand_that_cannot_be_called_is_refused(integrand):
    block = hbnode.ODEBlock(hbnode.NODE(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=r"expected \(t, state, derivative\). Fix: lambda t, h, dh|not a callable"):
        block.with_integral(torch.ones(2, 1), integrand)


@pytest.mark.parametrize("solver", [{}, {"method": "dopri5"}], ids=str)
def test_under_autocast_and_without_gradients(solver):
    block, x = hbnode.ODEBlock(hbnode.NODE(nn.Linear(3, 3)), rtol=1e-2, atol=1e-2, **solver), torch.randn(4, 3)
    expected = block.with_integral(x, energy)
    with torch.autocast("cpu", torch.bfloat16):
        found = block.with_integral(x, energy)
        found[1].sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(block.with_integral(x, energy), expected)
    with torch.inference_mode():
        torch.testing.assert_close(block.with_integral(x, energy), expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_autograd_in_an_integrand_is_refused_with_what_helps():
    def divergence(t, h, derivative):
        return torch.autograd.grad(derivative.sum(), h, create_graph=True)[0].sum(1)

    block = hbnode.ODEBlock(hbnode.NODE(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=r"Fix: torch.func, for instance torch.func.vjp"):
        block.with_integral(torch.ones(2, 1), divergence)
