"""Forces that depend on time, from rest and from equilibrium: no method may step over them."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hbnode
from hbnode.solve.control import PROBES
from hbnode.solve.methods import METHODS as ALL_METHODS
from tests.models import AGAIN
from tests.problems import Forced

METHODS = [name for name, method in ALL_METHODS.items() if method.error_order is not None]
CONTROLS = [False, True]


def solve(force, t, **settings):
    start = torch.full((1, 1), float(force.h0), dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    with torch.no_grad():
        h, m = hbnode.odeint(force.field(), start, torch.as_tensor(t, dtype=torch.float64), **settings)
    return np.stack([h[:, 0, 0].numpy(), m[:, 0, 0].numpy()])


def error_over_tolerance(force, t, tolerance, **settings):
    exact = force.exact(np.asarray(t, dtype=float))
    error = np.abs(solve(force, t, rtol=tolerance, atol=tolerance, **settings) - exact)
    return (error / (1 + np.abs(exact))).max() / tolerance


def test_the_exact_solution_itself():
    """The reference against solutions in closed form, and against a tight solve in many steps."""
    t = np.linspace(0, 2, 5)
    w = 2 * math.pi * 3
    sine = Forced(sines=[(1.0, 3.0)]).exact(t)
    np.testing.assert_allclose(sine, [t / w - np.sin(w * t) / w**2, (1 - np.cos(w * t)) / w], atol=1e-15)
    for gamma, kappa in ((0.1, 0.0), (1.0, 30.0), (3.0, 1.0), (2.0, 1.0)):
        force = Forced(gamma, kappa, 1.0 if kappa else 0.0, [(0.7, 2.5)], [(1.0, 0.8, 0.3)])
        tight = solve(force, t, method="dopri8", rtol=1e-12, atol=1e-12, save="exact", options={"max_step": 0.05})
        np.testing.assert_allclose(force.exact(t), tight, atol=1e-10)


@pytest.mark.parametrize("per_sample", CONTROLS)
@pytest.mark.parametrize("method", METHODS)
def test_harmonics_that_vanish_at_the_nodes(method, per_sample):
    """Sines alone, with a spring, and with outputs at whole seconds."""
    for frequency, kappa, t in ((10, 0.0, [0.0, 1.0]), (20, 1.0, [0.0, 1.0]), (10, 0.0, [0.0, 1.0, 2.0])):
        force = Forced(0.1, kappa, sines=[(1.0, frequency)])
        assert error_over_tolerance(force, t, 1e-4, method=method, per_sample=per_sample) < 100


@pytest.mark.parametrize("per_sample", CONTROLS)
def test_harmonics_with_the_default_method(per_sample):
    for frequency, t in ((20, [0.0, 1.0, 2.0, 3.0]), (100, [0.0, 1.0])):
        force = Forced(0.1, sines=[(1.0, frequency)])
        assert error_over_tolerance(force, t, 1e-5, per_sample=per_sample) < 100


@pytest.mark.parametrize("per_sample", CONTROLS)
@pytest.mark.parametrize("method", METHODS)
def test_bumps_in_the_middle(method, per_sample):
    for center in (0.3, 0.5, 0.57, 0.82):
        for tolerance in (1e-3, 1e-6):
            force = Forced(0.1, bumps=[(1.0, center, 0.1 / 2.3548)])
            assert error_over_tolerance(force, [0.0, 1.0], tolerance, method=method, per_sample=per_sample) < 100


def test_the_default_sees_ten_hertz_at_any_tolerance():
    force = Forced(0.1, sines=[(1.0, 10.0)])
    for tolerance in (1e-2, 1e-5, 1e-8, 1e-12):
        end = solve(force, [0.0, 1.0], rtol=tolerance, atol=tolerance)[0, -1]
        assert end == pytest.approx(0.01515, abs=5e-6 + 10 * tolerance)


FREQUENCIES = st.one_of(st.integers(1, 200), st.sampled_from([10, 20, 40, 50, 100, 200, 1 / 3, 2.5]))
AMPLITUDES = st.floats(0.3, 1.0)


@st.composite
def problems(draw):
    """A forced oscillator and the end of its solve."""
    end = draw(st.sampled_from([1.0, 2.0, 3.0]))
    kappa = draw(st.sampled_from([0.0, 1.0, 30.0]))
    sines = draw(st.lists(st.tuples(AMPLITUDES, FREQUENCIES), max_size=2))
    width = st.floats(0.1, 1.0).map(lambda share: share * end / 2.3548)  # from the full width at half maximum
    bumps = draw(st.lists(st.tuples(AMPLITUDES, st.floats(0, end), width), min_size=not sines, max_size=2))
    h0 = draw(st.sampled_from([0.0, 1.0])) if kappa else 0.0
    return Forced(draw(st.sampled_from([0.0, 0.1, 1.0])), kappa, h0, sines, bumps), end


@settings(max_examples=25)
@given(
    problems(),
    st.sampled_from(METHODS),
    st.sampled_from(CONTROLS),
    st.sampled_from([1e-3, 1e-4, 1e-5, 1e-6]),
    st.sampled_from([2, 2, 4, 11]),
)
@example((Forced(0.1, 1.0, 1.0, [(0.7, 20)]), 3.0), "nystrom4", True, 1e-3, 4)
@example((Forced(0.1, 30.0, 0.0, [(0.5, 22), (0.9, 84)]), 3.0), "nystrom4", False, 1e-4, 2)
@example((Forced(0.0, 1.0, 1.0, [(0.33, 96)]), 2.0), "tsit5", True, 1e-3, 2)
@example((Forced(0.0, sines=[(1.0, 200)]), 1.0), "tsit5", False, 1e-4, 2)
@example((Forced(0.0, sines=[(1.0, 128)]), 1.0), "tsit5", True, 1e-4, 5)
def test_no_force_is_stepped_over(problem, method, per_sample, tolerance, outputs):
    """The error stays within 100 tolerances, or an error says why there is no solution."""
    force, end = problem
    t = np.linspace(0, end, outputs)
    options = {"max_nfe": 2000}
    try:
        ratio = error_over_tolerance(force, t, tolerance, method=method, per_sample=per_sample, options=options)
    except hbnode.errors.MaxNFEError:
        return
    assert ratio < 100


def evaluations(func, **settings):
    field = hbnode.HBNODE(func)
    with hbnode.count_nfe(field) as nfe, torch.no_grad():
        hbnode.odeint(field, field.initial_state(torch.zeros(3, 2)), [0.0, 1.0], **settings)
    return nfe.forward


@pytest.mark.parametrize("per_sample", CONTROLS)
@pytest.mark.parametrize("method", METHODS)
def test_what_it_costs(method, per_sample):
    """Nothing where f is autonomous; four evaluations a solve where a network's last layer starts at zero."""
    one_step = 1 + ALL_METHODS[method].evaluations
    assert evaluations(lambda h: -h, method=method, per_sample=per_sample) == one_step
    net = hbnode.nn.MLP(2, [8], 2, time_dependent=True)
    torch.nn.init.zeros_(net.layers[-1].weight)
    torch.nn.init.zeros_(net.layers[-1].bias)
    assert evaluations(net, method=method, per_sample=per_sample) == one_step + len(PROBES)


def spike(samples, at):
    u = torch.zeros(samples, dtype=torch.float64)
    u[at] = 1.0
    return u


@pytest.mark.parametrize("per_sample", CONTROLS)
@pytest.mark.parametrize("method", METHODS)
def test_a_spike_of_a_signal_is_seen(method, per_sample):
    """One sample of 101 is not zero: h'' = u kicks the ball by the integral of u."""
    t = torch.linspace(0, 10, 101, dtype=torch.float64)
    for kind in ("linear", "cubic"):
        drive = hbnode.Signal(t, spike(101, 37), kind)
        field = hbnode.HBNODE(lambda t, h: drive(t) + 0 * h, damping=0.0, learn_damping=False)  # noqa: B023
        rest = field.initial_state(torch.zeros(2, 1, dtype=torch.float64))
        with torch.no_grad():
            _, m = hbnode.odeint(field, rest, [0.0, 10.0], method=method, per_sample=per_sample, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(m[-1], torch.full((2, 1), 0.1, dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("direction", [1, -1])
def test_steps_end_on_the_knots_of_a_signal(direction):
    """Between its knots a linear signal is a polynomial, for which steps that end on them are exact."""
    t = torch.tensor([0.0, 0.3, 0.37, 1.0, 1.9, 2.0], dtype=torch.float64)
    u = torch.tensor([0.0, 5.0, -3.0, 2.0, 2.0, -4.0], dtype=torch.float64)
    signal = hbnode.Signal(t, u)
    field = hbnode.HBNODE(lambda t, h: signal(t) + 0 * h, damping=0.0, learn_damping=False)
    ends = [0.05, 1.2, 1.95][::direction]
    start = field.initial_state(torch.zeros(1, 1, dtype=torch.float64))
    with hbnode.count_nfe(field) as nfe:
        h, m = hbnode.odeint(field, start, ends, method="nystrom8", rtol=1e-6, atol=1e-6)
    knots = sorted({*ends, *(float(k) for k in t if 0.05 < k < 1.95)})[::direction]
    exact_m, exact_h = [0.0], [0.0]
    for a, b in itertools.pairwise(knots):
        ua, ub = signal(torch.tensor([a, b], dtype=torch.float64)).tolist()
        exact_h.append(exact_h[-1] + exact_m[-1] * (b - a) + (b - a) ** 2 * (ua / 3 + ub / 6))
        exact_m.append(exact_m[-1] + (b - a) * (ua + ub) / 2)
    for i, end in enumerate(ends):
        assert h[i].item() == pytest.approx(exact_h[knots.index(end)], abs=1e-12)
        assert m[i].item() == pytest.approx(exact_m[knots.index(end)], abs=1e-12)
    assert nfe.forward < 150


def test_gradients_with_knots_in_the_way():
    """Checkpointed steps that end on knots have the gradient of backpropagation, γ and the times included."""
    t = torch.linspace(0, 2, 9, dtype=torch.float64)
    found = []
    for gradient in ("direct", "checkpoint", AGAIN):
        u = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        drive = hbnode.Signal(t, u)
        field = hbnode.HBNODE(lambda t, h: drive(t) - h.sin(), damping=0.3).double()  # noqa: B023
        times = torch.tensor([0.1, 0.9, 1.7], dtype=torch.float64, requires_grad=True)
        h, m = hbnode.odeint(
            field, field.initial_state(torch.ones(2, 1, dtype=torch.float64)), times, gradient=gradient
        )
        (h[1:].square().sum() + m[-1].sum()).backward()
        found.append([u.grad, times.grad, *(p.grad for p in field.parameters())])
    for checkpoint in found[1:]:
        torch.testing.assert_close(checkpoint, found[0], atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize(
    ("method", "per_sample", "kind"),
    [*itertools.product(METHODS, CONTROLS, ["linear"]), ("nystrom8", False, "cubic")],
)
def test_the_gradient_of_the_last_time_is_the_velocity(method, per_sample, kind):
    """dh(T)/dT = m(T), and dm(T)/dT = u(T) - h(T) - γ m(T), with kinks of the signal on the way."""
    knots = torch.linspace(0, 3, 13, dtype=torch.float64)
    drive = hbnode.Signal(knots, (3 * knots).sin(), kind)
    field = hbnode.HBNODE(lambda t, h: drive(t) - h, damping=0.1, learn_damping=False)
    x = torch.ones(2, 1, dtype=torch.float64)
    for gradient in ("direct", "checkpoint", AGAIN):
        for t in ([0.0, 1.2, 2.9], [0.0, 1.03, 1.1, 2.03, 2.1, 2.9], [2.9, 0.3]):
            t = torch.tensor(t, dtype=torch.float64, requires_grad=True)
            settings = {"method": method, "per_sample": per_sample, "gradient": gradient, "rtol": 1e-7, "atol": 1e-7}
            h, m = hbnode.odeint(field, (x, 0 * x), t, **settings)
            assert h.shape == (len(t), 2, 1)
            by_h, by_m = (torch.autograd.grad(y[-1, 0, 0], t, retain_graph=True)[0] for y in (h, m))
            end = drive(t[-1].detach()) - h[-1, 0, 0] - 0.1 * m[-1, 0, 0]
            assert by_h[-1].item() == pytest.approx(m[-1, 0, 0].item(), abs=1e-5)
            assert by_m[-1].item() == pytest.approx(end.item(), abs=1e-5)
            assert (by_h[1:-1].abs() < 1e-5).all()


@pytest.mark.parametrize("per_sample", CONTROLS)
def test_gradients_of_times_of_ones_own_with_knots(per_sample):
    """Rows of times, forwards and backwards: each as if it were solved alone."""
    knots = torch.linspace(-1, 3, 10, dtype=torch.float64)
    drive = hbnode.Signal(knots, (3 * knots).sin())
    field = hbnode.HBNODE(lambda t, h: drive(t) - h, damping=0.1, learn_damping=False)
    x = torch.tensor([[1.0], [-0.5]], dtype=torch.float64)
    t = torch.tensor([[0.0, 0.7, 2.2], [0.4, 0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    settings = {"rtol": 1e-9, "atol": 1e-9}
    h, _ = hbnode.odeint(field, (x, 0 * x), t, per_sample=per_sample, **settings)
    (together,) = torch.autograd.grad(h[1:].sum(), t)
    for i in range(2):
        alone, _ = hbnode.odeint(field, (x[i : i + 1], 0 * x[i : i + 1]), t[i], **settings)
        torch.testing.assert_close(h[:, i : i + 1], alone, rtol=1e-7, atol=1e-7)
        (by_t,) = torch.autograd.grad(alone[1:].sum(), t)
        torch.testing.assert_close(together[i], by_t[i], rtol=1e-5, atol=1e-5)


def test_an_ode_rnn_with_a_signal_has_gradients_of_times():
    """Against finite differences."""
    knots = torch.linspace(0, 4, 17, dtype=torch.float64)
    drive = hbnode.Signal(knots, (3 * knots).sin())
    rnn = hbnode.ODERNN(1, 2, field=hbnode.HBNODE(lambda t, h: drive(t).view(-1, 1) - h), rtol=1e-8, atol=1e-8).double()
    x = torch.ones(1, 3, 1, dtype=torch.float64)
    t = torch.tensor([[0.0, 0.9, 2.7]], dtype=torch.float64, requires_grad=True)
    (by_t,) = torch.autograd.grad(rnn(x, t)[0].sum(), t)
    for i in range(1, 3):
        move = torch.zeros_like(t)
        move[0, i] = 1e-4
        with torch.no_grad():
            slope = (rnn(x, t + move)[0].sum() - rnn(x, t - move)[0].sum()) / 2e-4
        assert by_t[0, i].item() == pytest.approx(slope.item(), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_the_samples_of_a_signal(method):
    """h is linear in the samples: the gradient is the response to a hat at each of them, as by a tight solve."""
    knots = torch.linspace(0, 3, 16, dtype=torch.float64)

    def by_samples(**settings):
        u = knots.sin().requires_grad_()
        drive = hbnode.Signal(knots, u)
        field = hbnode.HBNODE(lambda t, h: drive(t) - h, damping=0.1, learn_damping=False)
        x = torch.ones(1, 1, dtype=torch.float64)
        h, _ = hbnode.odeint(field, (x, 0 * x), torch.linspace(0, 3, 40, dtype=torch.float64), **settings)
        return torch.autograd.grad(h.sum(), u)[0]

    tight = by_samples(method="rk4", options={"step_size": 3 / 39 / 13})
    found = by_samples(method=method, rtol=1e-5, atol=1e-5)
    assert (found - tight).abs().max() < 1e-3 * tight.abs().max()


@pytest.mark.parametrize("per_sample", CONTROLS)
@pytest.mark.parametrize("method", METHODS)
def test_steps_and_the_jumps_in_their_way(method, per_sample):
    """Steps cover the interval, end on jumps that are given, and pass knots of a signal only while a node sees each."""
    jumps = [0.1, 0.2, 0.5, 0.6, 0.7, 0.8, 0.9]
    start = torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    field = hbnode.HBNODE(lambda t, h: sum(t > jump for jump in jumps) - h, learn_damping=False)
    with hbnode.diagnostics.record_steps(field) as steps:
        hbnode.odeint(field, start, [0.0, 1.0], method=method, per_sample=per_sample, jump_times=jumps)
    taken = [(a, a + size) for a, size, good in zip(steps.t, steps.size, steps.accepted, strict=True) if good]
    for (_, end), (begin, _) in itertools.pairwise(taken[:: 2 if per_sample else 1]):
        assert begin == pytest.approx(end, abs=1e-12)
    assert taken[0][0] == 0.0
    assert taken[-1][1] == pytest.approx(1.0)
    assert all(any(abs(end - jump) < 1e-9 for _, end in taken) for jump in jumps)
