"""What the methods of hbnode.sdeint converge to, and how fast."""

import math

import mpmath
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov

import hbnode
from tests import reference_sde

METHODS = ("ubu", "baoab", "nystrom4")
NORMALS = {"ubu": 4, "baoab": 1, "nystrom4": 3}


def double_well(damping=1.0, temperature=0.5):
    return hbnode.HeavyBallSDE(lambda h: h - h**3, damping=damping, temperature=temperature, learn_damping=False)


def spring(stiffness=1.0, damping=1.0, temperature=0.5):
    force = lambda h: -stiffness * h
    return hbnode.HeavyBallSDE(force, damping=damping, temperature=temperature, learn_damping=False)


def rms(x):
    return x.square().mean().sqrt().item()


def slope(steps, errors):
    """Of the logarithm of the errors over that of the step size."""
    x, y = torch.tensor(steps).log(), torch.tensor(errors).log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def strong_errors(sde, method, fine, levels, paths=400, span=2.0):
    """Errors of h and m at the end, with the noise of a fine path composed again and again."""
    torch.manual_seed(0)
    state = tuple(torch.randn(2, paths, 1, dtype=torch.float64))
    noise = hbnode.solve.BrownianIncrements.draw(sde, state[0], [0.0, span], dt=span / fine, method=method, seed=1)
    exact = [x[-1] for x in hbnode.sdeint(sde, state, [0.0, span], dt=span / fine, method=method, noise=noise)]
    found = {}
    while len(noise.sizes) > min(levels):
        noise = noise.coarser()
        n = len(noise.sizes)
        if n in levels:
            end = hbnode.sdeint(sde, state, [0.0, span], dt=span / n, method=method, noise=noise)
            found[n] = [rms(x[-1] - y) for x, y in zip(end, exact, strict=True)]
    return found


@pytest.mark.parametrize(
    ("method", "order", "fine", "levels"),
    [("ubu", 2, 1024, (8, 16, 32, 64)), ("baoab", 1, 2048, (8, 16, 32, 64)), ("nystrom4", 3, 1024, (16, 32, 64, 128))],
)
def test_strong_order(method, order, fine, levels):
    found = strong_errors(double_well(), method, fine, levels)
    steps = [1 / n for n in sorted(found)]
    for part in (0, 1):
        assert slope(steps, [found[n][part] for n in sorted(found)]) == pytest.approx(order, abs=0.25)


def moments(sde, method, state, t, dt):
    """The mean (2,) and covariance (2, 2) of a linear SDE's state at the end, exact for the scheme: no sampling.

    The state is linear in the normal variables, so one solve with each of them alone set to 1 makes the matrix.
    """
    steps = len(hbnode.solve.BrownianIncrements.draw(sde, torch.zeros(1, 1).double(), t, dt=dt, method=method).sizes)
    count = steps * NORMALS[method]
    normals = torch.cat([torch.zeros(1, count), torch.eye(count)]).T.reshape(steps, NORMALS[method], count + 1, 1)
    h, m = (torch.full((count + 1, 1), x, dtype=torch.float64) for x in state)
    sizes = hbnode.solve.BrownianIncrements.draw(sde, h, t, dt=dt, method=method).sizes
    damping = sde.solver_damping()
    noise = hbnode.solve.BrownianIncrements(method, sizes, normals.double(), damping)
    end = torch.cat([x[-1] for x in hbnode.sdeint(sde, (h, m), t, dt=dt, method=method, noise=noise)], 1)
    mean, rest = end[0], end[1:] - end[0]
    return mean, rest.T @ rest


def continuous_moments(stiffness, gamma, eta, state, time):
    """Mean and covariance of the linear SDE, from matrix exponentials (Van Loan)."""
    drift = torch.tensor([[0.0, 1.0], [-stiffness, -gamma]], dtype=torch.float64)
    noise = torch.tensor([[0.0, 0.0], [0.0, 2 * gamma * eta]], dtype=torch.float64)
    block = torch.cat([torch.cat([-drift, noise], 1), torch.cat([torch.zeros(2, 2).double(), drift.T], 1)])
    exponential = torch.linalg.matrix_exp(block * time)
    transition = exponential[2:, 2:].T
    return transition @ torch.tensor(state, dtype=torch.float64), transition @ exponential[:2, 2:]


@pytest.mark.parametrize(("method", "order"), [("ubu", 2), ("baoab", 2), ("nystrom4", 3)])
def test_weak_order_of_first_and_second_moments(method, order):
    state, time, steps = (1.0, -0.5), 2.0, (8, 16, 32, 64)
    mean, covariance = continuous_moments(1.5, 0.8, 0.6, state, time)
    errors = []
    for n in steps:
        found = moments(spring(1.5, 0.8, 0.6), method, state, [0.0, time], time / n)
        errors.append([(found[0] - mean).norm().item(), (found[1] - covariance).norm().item()])
    for part in (0, 1):
        assert slope([1 / n for n in steps], [e[part] for e in errors]) > order - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ubu", "baoab"])
def test_weak_order_in_a_double_well(method):
    """The bias of E[m²], from differences between solves with the same noise."""
    sde, paths, span = double_well(), 200_000, 2.0
    state = (torch.full((paths, 1), 1.5, dtype=torch.float64), torch.zeros(paths, 1, dtype=torch.float64))
    noise = hbnode.solve.BrownianIncrements.draw(sde, state[0], [0.0, span], dt=span / 64, method=method, seed=2)
    exact = hbnode.sdeint(sde, state, [0.0, span], dt=span / 64, method=method, noise=noise)[1][-1].square()
    biases = {}
    for n in (32, 16, 8):
        noise = noise.coarser()
        m = hbnode.sdeint(sde, state, [0.0, span], dt=span / n, method=method, noise=noise)[1][-1]
        biases[n] = (m.square() - exact).mean().item()
    # relative to H = span/64, a bias c H² at n steps is c (H_n² - H_64²)
    assert biases[8] / biases[16] == pytest.approx(63 / 15, rel=0.25)


@pytest.mark.parametrize("damping", [1e-9, 0.3, 40.0])
@pytest.mark.parametrize("steps", [1, 7])
def test_the_free_flight_has_its_exact_moments(damping, steps):
    free = hbnode.HeavyBallSDE(lambda h: 0 * h, damping=damping, temperature=0.7, learn_damping=False)
    state, time = (0.4, -1.2), 1.5
    mean, covariance = moments(free, "ubu", state, [0.0, 0.2, time], 1.3 / steps)
    with mpmath.workdps(60):
        g, t = mpmath.mpf(damping), mpmath.mpf(time)
        a, b, of_i = (1 - mpmath.exp(-g * t)) / g, mpmath.exp(-g * t), (1 - mpmath.exp(-2 * g * t)) / (2 * g)
        of_j, both = (t - 2 * a + of_i) / g**2, a**2 / 2
        square = 2 * g * mpmath.mpf(0.7)
        expected = [[float(square * x) for x in row] for row in ((of_j, both), (both, of_i))]
        expected_mean = [float(state[0] + a * state[1]), float(b * state[1])]
    exact = {"rtol": 1e-9, "atol": 1e-16}
    torch.testing.assert_close(mean, torch.tensor(expected_mean, dtype=torch.float64), **exact)
    torch.testing.assert_close(covariance, torch.tensor(expected, dtype=torch.float64), **exact)


def one_step(method, stiffness, gamma, eta, size):
    """The matrices of z ← M z + N ξ for f = -stiffness h, from the plain twin."""
    gamma, eta, size = (torch.tensor(x, dtype=torch.float64) for x in (gamma, eta, size))
    count = NORMALS[method]
    basis = torch.eye(2 + count, dtype=torch.float64)
    h, m, normals = basis[0], basis[1], basis[2:]
    t = torch.zeros((), dtype=torch.float64)
    step = reference_sde.STEPS[method]
    end = torch.stack(step(lambda t, h: -stiffness * h, h, m, gamma, eta, t, size, normals))
    return end[:, :2], end[:, 2:]


def stationary(method, stiffness, gamma, eta, size):
    """The covariance that a step leaves as it is: the solution of the scheme's discrete Lyapunov equation."""
    matrix, noise = one_step(method, stiffness, gamma, eta, size)
    return torch.tensor(solve_discrete_lyapunov(matrix.numpy(), (noise @ noise.T).numpy()))


def check_stationary(method, paths):
    stiffness, gamma, eta, size, time = 1.5, 1.0, 0.5, 0.25, 25.0
    zero, parts = torch.zeros(paths // 20, 1, dtype=torch.float64), []
    for seed in range(20):  # small enough for the caches
        end = hbnode.sdeint(spring(stiffness, gamma, eta), (zero, zero), [0.0, time], dt=size, method=method, seed=seed)
        parts.append(torch.cat([x[-1] for x in end], 1))
    end = torch.cat(parts)
    found, expected = end.T @ end / paths, stationary(method, stiffness, gamma, eta, size)
    # the variance of a product of Gaussians
    error = ((expected.diagonal().outer(expected.diagonal()) + expected.square()) / paths).sqrt()
    assert bool(((found - expected).abs() < 3 * error).all())


@pytest.mark.parametrize("method", METHODS)
def test_stationary_covariance(method):
    check_stationary(method, 40_000)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_stationary_covariance_with_a_million_samples(method):
    check_stationary(method, 1_000_000)


@pytest.mark.parametrize(("method", "order"), [("ubu", 2), ("baoab", 2), ("nystrom4", 3)])
def test_the_stationary_law_approaches_that_of_the_equation(method, order):
    stiffness, gamma, eta, sizes = 1.5, 1.0, 0.5, (0.4, 0.2, 0.1)
    expected = torch.diag(torch.tensor([eta / stiffness, eta], dtype=torch.float64))
    found = [stationary(method, stiffness, gamma, eta, size) for size in sizes]
    assert slope(sizes, [(x - expected).norm().item() for x in found]) > order - 0.2
    if method == "baoab":  # the law of h is exact for a linear force
        for x in found:
            assert x[0, 0].item() == pytest.approx(eta / stiffness, rel=1e-12)


def test_a_double_well_at_its_temperature():
    """E[h²] under exp(-F/η), by quadrature, within the scheme's bias and three standard errors."""
    paths, eta = 20_000, 0.5
    x = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    weight = torch.exp(-(x**4 / 4 - x**2 / 2) / eta)
    expected = ((x**2 * weight).sum() / weight.sum()).item()
    zero = torch.zeros(paths, 1, dtype=torch.float64)
    h, _ = hbnode.sdeint(double_well(1.0, eta), (zero, zero), [0.0, 30.0], dt=0.15, method="baoab", seed=3)
    squares = h[-1].square()
    assert abs(squares.mean().item() - expected) < 3 * squares.std().item() / math.sqrt(paths) + 0.004


# At temperature 0


@pytest.mark.parametrize("method", METHODS)
def test_temperature_zero_is_the_ode(method):
    sde = double_well(0.6, 0.0)
    state = (torch.linspace(-1.5, 1.5, 5, dtype=torch.float64).unsqueeze(1), torch.ones(5, 1, dtype=torch.float64))
    t = [0.0, 0.7, 2.0]
    exact = torch.stack(hbnode.odeint(sde, state, t, rtol=1e-11, atol=1e-11))
    errors = []
    for dt in (0.1, 0.05):
        errors.append(rms(torch.stack(hbnode.sdeint(sde, state, t, method=method, dt=dt)) - exact))
    order = {"ubu": 2, "baoab": 2, "nystrom4": 4}[method]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.3)


@pytest.mark.parametrize("method", METHODS)
def test_without_damping_there_is_no_noise(method):
    sde = hbnode.HeavyBallSDE(lambda h: -h, damping=0.0, temperature=5.0, learn_damping=False)
    state = sde.initial_state(torch.ones(3, 1, dtype=torch.float64))
    h, _ = hbnode.sdeint(sde, state, [0.0, math.pi], dt=0.01, method=method)
    torch.testing.assert_close(h[-1], -state[0], rtol=1e-4, atol=1e-4)
