"""``block.with_integral``: integrals along the path, against closed forms in float64."""

import math

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


def energy(t, state, derivative):
    """|h'|² of each sample."""
    h = derivative if isinstance(derivative, torch.Tensor) else derivative[0]
    return h.square().flatten(1).sum(1)


def make_x(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_the_kinetic_energy_of_an_oscillator_and_its_gradients(solver):
    """At many times: the integral of c h'² over h = x cos(ωt), summed over features."""
    omega, scale = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.3, 1.7))
    x, s = make_x(3, 2).requires_grad_(), torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    force, weighed = lambda h: -(omega**2) * h, lambda *given: scale * energy(*given)
    block = hbnode.HeavyBallODEBlock(force, damping=0.0, learn_damping=False, **TIGHT | solver)
    with hbnode.count_nfe(block) as nfe, hbnode.diagnostics.record_steps(block) as steps:
        h, q = block.with_integral(x, weighed, 0.5 + s)
    assert nfe == block.nfe
    assert nfe.forward > 0
    assert len(steps) >= nfe.steps + nfe.rejected
    exact_h = (omega * s).cos()[:, None, None] * x
    exact_q = scale * (omega**2 * (s / 2 - torch.sin(2 * omega * s) / (4 * omega)))[:, None] * (x**2).sum(1)
    torch.testing.assert_close((h, q), (exact_h, exact_q), rtol=1e-7, atol=1e-7)
    losses = h.square().sum() + q.sin().sum(), exact_h.square().sum() + exact_q.sin().sum()
    found, expected = (torch.autograd.grad(loss, [x, omega, scale]) for loss in losses)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solver", [*SOLVERS[:4], {"steps": 3}, SOLVERS[6]], ids=str)
def test_the_log_density_of_a_linear_flow(solver):
    """Its trace times the length of time, exact or estimated with noise e: eᵀAe."""
    net = nn.Linear(3, 3).double()
    block, x, noise = hbnode.ODEBlock(hbnode.NODE(net), (1.0, -0.5), **solver), make_x(4, 3), make_x(4, 3)
    exact = lambda t, h, dh: -torch.func.vmap(lambda h: torch.func.jacrev(net)(h).trace())(h)
    estimate = lambda t, h, dh: -(torch.func.vjp(net, h)[1](noise)[0] * noise).sum(1)
    for integrand, trace in ((exact, net.weight.trace().expand(4)), (estimate, ((noise @ net.weight) * noise).sum(1))):
        _, q = block.with_integral(x, integrand)
        torch.testing.assert_close(q, 1.5 * trace, rtol=1e-8, atol=1e-8)
        found = torch.autograd.grad(q.sum(), net.weight)
        torch.testing.assert_close(found, torch.autograd.grad(1.5 * trace.sum(), net.weight), rtol=1e-7, atol=1e-7)


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
    h, q = block.with_integral(x, lambda t, state, dh: (dh if isinstance(dh, torch.Tensor) else dh[0])[:, 0])
    torch.testing.assert_close(q, h[:, 0] - x[:, 0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(h, block(x), rtol=1e-7, atol=1e-7)
    q.sum().backward()
    assert all(p.grad is not None for p in field.parameters())


@pytest.mark.parametrize("solver", [{"method": "tsit5"}, {"method": "dopri5"}, {"per_sample": True}], ids=str)
def test_an_empty_batch_autocast_and_modes_without_gradients(solver):
    block = hbnode.ODEBlock(hbnode.NODE(nn.Linear(2, 2)), rtol=1e-2, atol=1e-2, **solver)
    for t, times in ((None, ()), ([0.0, 0.5, 1.0], (3,))):
        h, q = block.with_integral(torch.randn(0, 2, requires_grad=True), energy, t)
        assert (h.shape, q.shape) == ((*times, 0, 2), (*times, 0))
        (q.sum() + h.sum()).backward()
    assert not block.field.func.weight.grad.any()
    x = torch.randn(4, 2)
    expected = block.with_integral(x, energy)
    with torch.autocast("cpu", torch.bfloat16):
        found = block.with_integral(x, energy)
        found[1].sum().backward()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(block.with_integral(x, energy), expected)


def divergence(t, state, derivative):
    return torch.autograd.grad(derivative[0].sum(), state[0], create_graph=True)[0].sum(1)


@pytest.mark.parametrize(
    ("solver", "integrand", "shape", "kind", "message"),
    [
        *(
            (solver, energy, (2, 3), ValueError, r"Fix: block.method, block.gradient = 'tsit5', 'checkpoint'")
            for solver in ({"method": "nystrom8"}, {"gradient": "reversible", "steps": 8})
        ),
        ({}, lambda t, state, dh: dh[0], (2, 3), ValueError, r"per sample, \(2,\). Fix: g.flatten\(1\).sum\(1\)"),
        ({}, energy, (), ValueError, r"the shape \(batch, ...\), got .*Fix: x.unsqueeze\(0\)"),
        ({}, lambda t, h: h, (2, 3), TypeError, r"expected \(t, state, derivative\). Fix: lambda t, h, dh"),
        ({}, divergence, (2, 3), ValueError, "Fix: torch.func, for instance torch.func.vjp"),
    ],
)
def test_what_is_refused(solver, integrand, shape, kind, message):
    block = hbnode.HeavyBallODEBlock(nn.Tanh(), **solver)
    with pytest.raises(kind, match=message):
        block.with_integral(torch.ones(shape), integrand)


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
