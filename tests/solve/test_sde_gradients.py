"""hbnode.sdeint against the plain twins, and its gradients against each other."""

import math

import mpmath
import pytest
import torch
from torch import nn

import hbnode
from benchmarks.gradients import Living
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.sde import free_flight
from tests import reference_sde

METHODS = ("ubu", "baoab", "nystrom4")
AGAIN = Checkpoint(keep_bytes=0)  # after the first steps, all are computed again
GRADIENTS = [
    (method, gradient)
    for method in METHODS
    for gradient in ("direct", "checkpoint", AGAIN, "reversible")
    if (method, gradient) != ("nystrom4", "reversible")
]
T = [0.0, 0.5, 1.1, 1.5]


def make_sde(dtype=torch.float64, time_dependent=True, **options):
    torch.manual_seed(0)
    net = hbnode.nn.MLP(3, [8], 3, time_dependent=time_dependent)
    options = {"damping": 0.6, "temperature": 0.4, "learn_temperature": True} | options
    return hbnode.HeavyBallSDE(net, **options).to(dtype)


def make_state(dtype=torch.float64, shape=(4, 3)):
    torch.manual_seed(1)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(2))


def loss(h, m):
    weights = torch.arange(1, len(h) + 1, dtype=h.dtype).view(-1, *[1] * (h.dim() - 1))
    return (weights * (h.square() + m.sin())).mean()


def gradients(sde, state, **options):
    parameters = [p for p in sde.parameters() if p.requires_grad]
    value = loss(*hbnode.sdeint(sde, state, **options))
    return value.detach(), torch.autograd.grad(value, [*state, *parameters], allow_unused=True)


def flat(gradients):
    return torch.cat([x.reshape(-1) for x in gradients if x is not None])


@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
def test_the_plain_twin(method, gradient):
    """Values and gradients, those of γ and η included."""
    sde, state = make_sde(), make_state()
    noise = hbnode.solve.BrownianIncrements.draw(sde, state[0], [0.3, 2.3], dt=0.25, method=method, seed=4)
    options = {"method": method, "dt": 0.25, "gradient": gradient}
    ends = [x[-1] for x in hbnode.sdeint(sde, state, [0.3, 2.3], noise=noise, **options)]
    expected = reference_sde.solve(method, sde.func, *state, sde.damping, sde.temperature, noise, start=0.3)
    for x, y in zip(ends, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    inputs = [*state, *sde.parameters()]
    ours, theirs = (torch.autograd.grad((h * m + h.sin()).sum(), inputs) for h, m in (ends, expected))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("time_dependent", [True, False])
@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
def test_gradients_agree(method, gradient, time_dependent):
    sde, state = make_sde(time_dependent=time_dependent), make_state()
    options = {"t": T, "method": method, "dt": 0.1, "seed": 3}
    value, expected = gradients(sde, state, **options)
    found, ours = gradients(sde, state, gradient=gradient, **options)
    assert torch.equal(found, value)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
def test_channels_of_their_own(method, gradient):
    """Images with γ and η for each channel."""
    torch.manual_seed(0)
    damping, temperature = torch.tensor([0.2, 0.7]).view(2, 1, 1), torch.tensor([0.1, 0.9]).view(2, 1, 1)
    net = hbnode.nn.ConvNet(2, 3, 2)
    sde = hbnode.HeavyBallSDE(net, damping=damping, temperature=temperature, learn_temperature=True).double()
    state = make_state(shape=(2, 2, 3, 3))
    options = {"t": [0.0, 0.4, 1.0], "method": method, "dt": 0.1, "seed": 3}
    _, expected = gradients(sde, state, **options)
    _, ours = gradients(sde, state, gradient=gradient, **options)
    assert sde.omega.shape == sde.log_temperature.shape == (2, 1, 1)
    torch.testing.assert_close(flat(ours), flat(expected), rtol=1e-9, atol=1e-12)
    alone = hbnode.HeavyBallSDE(net, damping=0.7, temperature=0.9, learn_temperature=True).double()
    if gradient == "direct":  # the second channel where all channels have its γ and η and f does not mix them
        for equation in (sde, alone):
            equation.func = nn.Tanh()
            equation.time_dependent = False
        h, _ = hbnode.sdeint(sde, state, **options)
        one, _ = hbnode.sdeint(alone, state, **options)
        torch.testing.assert_close(h[:, :, 1], one[:, :, 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["ubu", "baoab"])
@pytest.mark.parametrize("steps", [50, 400])
@pytest.mark.parametrize("span", [2.0, 4.0])
def test_reversible_in_float32(method, steps, span):
    """Against the direct gradient: undoing the steps multiplies rounding errors by exp(γT), here with γ = 1."""
    sde, state = make_sde(torch.float32, max_damping=2.0, damping=1.0), make_state(torch.float32)
    errors = []
    for seed in range(6 if steps == 50 else 3):
        options = {"t": [0.0, span], "method": method, "dt": span / steps, "seed": seed}
        _, expected = gradients(sde, state, **options)
        _, ours = gradients(sde, state, gradient="reversible", **options)
        errors.append(((flat(ours) - flat(expected)).norm() / flat(expected).norm()).item())
    assert max(errors) <= torch.finfo(torch.float32).eps * math.exp(span)


def kept(gradient, steps, method="ubu"):
    """Bytes of the tensors that the forward pass made and that are alive after it."""
    sde, state = make_sde(torch.float32), make_state(torch.float32, (64, 3))
    with Living([*state, *sde.parameters()]) as living:
        value = loss(*hbnode.sdeint(sde, state, [0.0, 1.0], method=method, dt=1 / steps, gradient=gradient, seed=0))
        size = living.size()
    value.backward()
    return size


@pytest.mark.parametrize("method", ["ubu", "baoab"])
def test_reversible_keeps_the_output_alone(method):
    few, many = (kept("reversible", steps, method) for steps in (20, 200))
    assert many == few
    assert many < kept(AGAIN, 200, method) / 10 < kept("direct", 200, method) / 30


@pytest.mark.parametrize("every", [1, 4])
def test_checkpoint_keeps_h_and_m_before_each_segment(every):
    """The first steps keep their graph, at any length of the solve."""
    few, many = (kept(Checkpoint(keep_bytes=0, every=every), steps) for steps in (100, 200))
    assert many - few <= 100 / every * (2 * 64 * 3 * 4 + 64)


def test_evaluations_are_counted():
    sde, state = make_sde(), make_state()
    expected = {
        ("ubu", "direct"): (31, 0),
        ("ubu", "checkpoint"): (31, 31),
        ("ubu", "reversible"): (32, 31),  # one more, to find what f depends on
        ("baoab", "direct"): (32, 0),
        ("baoab", "checkpoint"): (32, 31),
        ("baoab", "reversible"): (32, 32),
        ("nystrom4", "direct"): (94, 0),
        ("nystrom4", "checkpoint"): (94, 93),
    }
    for (method, gradient), counts in expected.items():
        again = Checkpoint(keep_bytes=0, every=1) if gradient == "checkpoint" else gradient
        with hbnode.count_nfe(sde) as nfe:
            gradients(sde, state, t=[0.0, 0.5, 1.1, 3.1], method=method, dt=0.1, gradient=again)
        assert (nfe.forward, nfe.backward) == counts
        assert nfe.steps == 31
        steps_again = counts[1] // (3 if method == "nystrom4" else 1)
        assert nfe.backward_steps == (31 if gradient == "reversible" else steps_again)


# Undoing the damping


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 6.7), (torch.float64, 26.8)], ids=["float32", "float64"])
def test_growth_is_refused(dtype, most):
    sde = make_sde(dtype, damping=2.0, learn_damping=False)
    options = {"method": "ubu", "dt": 0.05, "gradient": "reversible"}
    hbnode.sdeint(sde, make_state(dtype), [0.0, most / 2 - 0.05], **options)
    with pytest.raises(
        hbnode.errors.ReversalError, match=r"undoing the damping of 2 over .* Fix: gradient='checkpoint'"
    ):
        hbnode.sdeint(sde, make_state(dtype), [0.0, most / 2 + 0.05], **options)
    t = torch.linspace(0, 2 * most, 9)  # starts anew from every output
    gradients(sde, make_state(dtype), t=t, **options)


@pytest.mark.parametrize("method", ["ubu", "baoab"])
def test_a_way_back_to_zero(method):
    """From rest at 0, where a relative error says nothing; and with f that pushes away from there."""
    sde = hbnode.HeavyBallSDE(nn.Tanh(), damping=1.0, max_damping=2.0, temperature=0.5, learn_temperature=True)
    zero = torch.zeros(500, 1)
    found = []
    for gradient in ("direct", "reversible"):
        h, m = hbnode.sdeint(sde, (zero, zero), [0.0, 1.0, 3.0], method=method, dt=0.1, gradient=gradient, seed=0)
        found.append(flat(torch.autograd.grad(loss(h, m), [*sde.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    frozen = hbnode.HeavyBallSDE(nn.Tanh(), damping=0.5, temperature=0.0)  # stays at 0
    h, m = hbnode.sdeint(frozen, (zero, zero), [0.0, 1.0], method=method, dt=0.1, gradient="reversible")
    assert frozen.omega.grad is None
    (h.sum() + m.sum()).backward()
    assert frozen.omega.grad == 0


def test_a_way_back_that_misses_is_refused():
    sde = hbnode.HeavyBallSDE(lambda h: 30 * torch.sin(8 * h), damping=0.5, temperature=0.1)
    h, m = hbnode.sdeint(sde, make_state(torch.float32), [0.0, 6.0], dt=0.1, gradient="reversible", seed=0)
    with pytest.raises(hbnode.errors.ReversalError, match=r"the steps, undone, end .* away from where they began"):
        loss(h, m).backward()


# What f depends on


@pytest.mark.parametrize("gradient", [AGAIN, "reversible"])
def test_leaves_that_f_closes_over(gradient):
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    sde = hbnode.HeavyBallSDE(lambda h: torch.tanh(h @ weight), damping=0.5).double()
    state = make_state()
    found = []
    for mode in ("direct", gradient):
        value = loss(*hbnode.sdeint(sde, state, T, dt=0.1, gradient=mode, seed=0))
        found.append(torch.autograd.grad(value, weight)[0])
    torch.testing.assert_close(*found)
    inner = weight * 2
    other = hbnode.HeavyBallSDE(lambda h: torch.tanh(h @ inner), damping=0.5).double()
    if gradient is AGAIN:
        value = loss(*hbnode.sdeint(other, state, T, dt=0.02, gradient=gradient, seed=0))
        exact = loss(*hbnode.sdeint(other, state, T, dt=0.02, seed=0))
        torch.testing.assert_close(*(torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (value, exact)))
        return
    with pytest.raises(ValueError, match=r"computed outside it.*Fix: use gradient='direct'"):
        hbnode.sdeint(other, state, T, dt=0.1, gradient=gradient)


@pytest.mark.parametrize("gradient", [AGAIN, "reversible"])
def test_random_layers_and_buffers(gradient):
    state = make_state()
    masked = nn.Sequential(nn.Linear(3, 3), hbnode.nn.SolveDropout(0.5))
    sde = hbnode.HeavyBallSDE(masked).double()
    noisy = hbnode.HeavyBallSDE(lambda h: h + torch.randn_like(h)).double()
    for equation in (sde, noisy) if gradient is AGAIN else (sde,):
        torch.manual_seed(0)
        _, expected = gradients(equation, state, t=T, dt=0.04, seed=0)
        torch.manual_seed(0)
        _, ours = gradients(equation, state, t=T, dt=0.04, seed=0, gradient=gradient)
        torch.testing.assert_close(flat(ours), flat(expected))
    if gradient == "reversible":
        with pytest.raises(ValueError, match=r"func draws random numbers.*Fix: gradient='checkpoint'"):
            hbnode.sdeint(noisy, state, T, dt=0.1, gradient=gradient)
    with pytest.raises(ValueError, match="Dropout is in training mode"):
        hbnode.sdeint(hbnode.HeavyBallSDE(nn.Dropout(0.5)).double(), state, T, dt=0.1)
    norm = hbnode.HeavyBallSDE(nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match=r"func changes its buffers.*Fix: put that layer in eval mode"):
        hbnode.sdeint(norm, state, T, dt=0.1, gradient=gradient)


@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
def test_a_force_without_a_gradient(method, gradient):
    """f that depends on nothing, and everything frozen but the state."""
    sde = hbnode.HeavyBallSDE(lambda h: torch.ones_like(h), damping=0.5, learn_damping=False)
    state = make_state()
    _, expected = gradients(sde, state, t=T, method=method, dt=0.1, seed=0)
    _, ours = gradients(sde, state, t=T, method=method, dt=0.1, seed=0, gradient=gradient)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_of_a_gradient(method):
    sde, state = make_sde(), make_state()
    found = []
    for gradient in ("direct", AGAIN):
        value = loss(*hbnode.sdeint(sde, state, T, dt=0.05, seed=0, method=method, gradient=gradient))
        (first,) = torch.autograd.grad(value, state[:1], create_graph=True)
        found.append(flat(torch.autograd.grad(first.square().sum(), [*state, *sde.parameters()])))
    torch.testing.assert_close(*found)
    if method != "nystrom4":
        value = loss(*hbnode.sdeint(sde, state, T, dt=0.1, method=method, gradient="reversible"))
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(value, state, create_graph=True)


@pytest.mark.parametrize("gradient", ["direct", AGAIN, "reversible"])
def test_parameters_by_functional_call(gradient):
    """What a step of gradient descent on lent parameters needs."""
    sde, state = make_sde(), make_state()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.sde = sde

        def forward(self, h, m):
            return loss(*hbnode.sdeint(self.sde, (h, m), T, dt=0.04, seed=0, gradient=gradient))

    model = Model()
    lent = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    value = torch.func.functional_call(model, lent, state)
    _, expected = gradients(sde, state, t=T, dt=0.04, seed=0)
    found = torch.autograd.grad(value, list(lent.values()))
    torch.testing.assert_close(flat(found), flat(expected[2:]))


# The coefficients


@pytest.mark.parametrize("z", [0.0, 1e-12, 1e-6, 0.9e-3, 1.1e-3, 0.1, 1.9, 2.1, 30.0, 1e4])
def test_the_free_flight_at_any_damping(z):
    tau = 0.7
    found = free_flight(torch.tensor(z / tau, dtype=torch.float64), torch.tensor(tau, dtype=torch.float64))
    with mpmath.workdps(80):
        t, gamma = mpmath.mpf(tau), mpmath.mpf(float(torch.tensor(z / tau, dtype=torch.float64)))
        if gamma:
            a, b = (1 - mpmath.exp(-gamma * t)) / gamma, mpmath.exp(-gamma * t)
            of_i, both = (1 - b**2) / (2 * gamma), a**2 / 2
            of_j = (t - 2 * a + of_i) / gamma**2
        else:
            a, b, of_i, both, of_j = t, mpmath.mpf(1), t, t**2 / 2, t**3 / 3
        p = mpmath.sqrt(of_i)
        q = both / p
        r = mpmath.sqrt(of_j - q**2)
        expected = [float(x) for x in (a, b, p, q, r)]
    torch.testing.assert_close(
        torch.stack(list(found)), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-300
    )


@pytest.mark.parametrize("z", [0.0, 1e-4, 1e-3, 0.1, 2.0, 30.0])
def test_the_slope_of_the_free_flight(z):
    gamma, tau = torch.tensor(z / 0.7, dtype=torch.float64, requires_grad=True), torch.tensor(0.7, dtype=torch.float64)
    for i in range(5):
        (found,) = torch.autograd.grad(free_flight(gamma, tau)[i], gamma)
        with mpmath.workdps(50):

            def coefficient(gamma, i=i):
                t = mpmath.mpf(0.7)
                a, b = (1 - mpmath.exp(-gamma * t)) / gamma, mpmath.exp(-gamma * t)
                of_i = (1 - b**2) / (2 * gamma)
                q = a**2 / 2 / mpmath.sqrt(of_i)
                of_j = (t - 2 * a + of_i) / gamma**2
                return (a, b, mpmath.sqrt(of_i), q, mpmath.sqrt(of_j - q**2))[i]

            at = mpmath.mpf(gamma.item()) if z else mpmath.mpf("1e-12")
            expected = float(mpmath.diff(coefficient, at, h=mpmath.mpf("1e-14")))
        assert found.item() == pytest.approx(expected, rel=1e-8, abs=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_cannot_be_undone(dtype):
    sde = make_sde(dtype, damping=0.0, learn_damping=False)
    with pytest.raises(
        hbnode.errors.ReversalError, match=r"rounding errors, 0\.00.*Fix: gradient='checkpoint', float64"
    ):
        hbnode.sdeint(sde, make_state(dtype), [0.0, 0.1], dt=0.1, gradient="reversible")
