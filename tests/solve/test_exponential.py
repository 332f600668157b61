"""``method="exponential"``: its twin, its limits, its orders, and what it takes where the damping is strong."""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from torch import nn

import hbnode
from hbnode.nn.nets import MLP
from hbnode.solve.methods import METHODS, phi_functions
from tests.problems import Driven, driven_exact
from tests.reference import exponential_grid

METHOD = METHODS["exponential"]
KUTTA = [[0.2], [-17 / 27, 35 / 27], [2.6, -22 / 7, 54 / 35], [14 / 336, 125 / 336, 162 / 336, 35 / 336]]
NYSTROM_H = [[1 / 50], [-1 / 27, 7 / 27], [3 / 10, -2 / 35, 9 / 35], [14 / 336, 100 / 336, 54 / 336, 0]]
NYSTROM_M = [14 / 336, 125 / 336, 162 / 336, 35 / 336]


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


# Coefficients


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("z", [0.0, -1e-9, -0.3, -1.999, -2.0, -2.5, -30.0, 1.5, 9.0])
def test_phi_functions(z, xp):
    """Against their series in rational numbers."""
    found = phi_functions(xp, z if xp is np else torch.tensor(z, dtype=torch.float64), 6)
    for k in range(6):
        term = total = Fraction(1, math.factorial(k))
        for j in range(1, 250):
            term *= Fraction(z) / (j + k)
            total += term
        assert found[k].item() == pytest.approx(float(total), rel=3e-15)


def stages(matrix):
    """A of h, and the weights of m."""
    return [row[2 : 3 + i].tolist() for i, row in enumerate(matrix[:4])], matrix[4, 2:6].tolist()


def test_without_damping_it_is_nystroms_method():
    h, m = stages(METHOD.matrix(torch, float64(0.0)[0], float64(1.0)[0]))
    for row, expected in zip((*h, m), (*NYSTROM_H, NYSTROM_M), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-14)


def test_where_the_damping_is_strong_it_is_kuttas_method():
    """H Σ a_ij f_j / γ with a of order 4, which the order conditions confirm."""
    h, _ = stages(1e12 * METHOD.matrix(torch, float64(1e12)[0], float64(1.0)[0]))
    for row, expected in zip(h, KUTTA, strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-10)
    a, b = np.zeros((4, 4)), np.array(KUTTA[3])
    for i, row in enumerate(KUTTA[:3], start=1):
        a[i, : len(row)] = row
    c = a.sum(1)
    np.testing.assert_allclose([b.sum(), b @ c, b @ c**2, b @ c**3], [1, 1 / 2, 1 / 3, 1 / 4])
    found = [b @ a @ c, b @ (c * (a @ c)), b @ a @ c**2, b @ a @ a @ c]
    np.testing.assert_allclose(found, [1 / 6, 1 / 8, 1 / 12, 1 / 24])


@pytest.mark.parametrize("gamma", [0.0, 1e-7, 0.4, 6.0, 30.0])
def test_the_defects_of_the_stages_cancel(gamma):
    """Σ w_i d_i = 0 for every γ: with forces 1, t and t² all stages but the first one are exact or cancel."""
    size = 0.7
    matrix = METHOD.matrix(torch, float64(gamma)[0], float64(size)[0])
    nodes = float64(0.0, 0.2, 2 / 3, 1.0)
    weights = float64(*NYSTROM_M)
    for power in range(4):
        exact = [exponential_position(gamma, size * float(c), power) for c in nodes[1:]]
        found = matrix[:4, 2:6] @ (size * nodes) ** power
        defects = float64(*exact) - found[:3]
        assert abs(weights[1:] @ defects) < 1e-14 or power == 3
        assert exact[2] == pytest.approx(found[3].item(), abs=1e-14)


def exponential_position(gamma, time, power):
    """The position at a time under the force t^power, from rest at 0."""
    system = np.zeros((power + 3, power + 3))
    system[:-1, 1:] = np.eye(power + 2)
    system[1, 1] = -gamma
    return math.factorial(power) * expm(system * time)[0, -1]


# The plain twin


@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
@pytest.mark.parametrize("gamma", [0.02, 0.9, 40.0])
def test_the_plain_twin(gamma, gradient):
    """In values, and in the gradients for h, m, γ and all parameters."""
    torch.manual_seed(0)
    func = MLP(3, [8], 3, activation=nn.Tanh)
    field = hbnode.HBNODE(lambda t, h: (1 + t) * func(h), damping=gamma, max_damping=100.0).double()
    func.double()
    leaves = [*torch.randn(2, 4, 3, dtype=torch.float64), field.omega, *func.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    times = [0.3, 0.8, 1.3, 1.8]
    settings = {"method": "exponential", "steps": 3, "gradient": gradient}
    found = [x[-1] for x in hbnode.odeint(field, tuple(leaves[:2]), times[:: len(times) - 1], **settings)]
    twin = exponential_grid(field.force, *leaves[:2], field.damping, times)
    for one, other in zip(found, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad(sum(x.sin().sum() for x in pair), leaves) for pair in (found, twin)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


# Orders


@pytest.mark.parametrize(("gamma", "order"), [(0.0, 5), (0.4, 5), (2.0, 5), (1000.0, 4)])
def test_orders(gamma, order):
    """5 for steps below 1/γ, 4 where the damping is strong."""
    field = hbnode.HBNODE(Driven(gamma), damping=gamma, learn_damping=False)
    state = tuple(float64(x) for x in driven_exact(gamma, 0.0))
    found = []
    for steps in (8, 16):
        h, _ = hbnode.odeint(field, state, [0.0, 2.0], method="exponential", steps=steps)
        found.append(abs(h[-1].item() - driven_exact(gamma, 2.0)[0]))
    assert order - 0.4 < math.log2(found[0] / found[1]) < order + 1


def test_a_damping_that_tends_to_infinity():
    """h' = f/γ: the solution over the time γ is that of h' = f over the time 1, but for 1/γ²."""
    field = hbnode.HBNODE(lambda h: -h - h**3, damping=1e8, learn_damping=False)
    start = (float64([2.0]), float64([-1e-7]))
    (h, m), (limit,) = (
        hbnode.odeint(field, start, [0.0, 1e8], method="exponential", rtol=1e-9, atol=1e-9),
        hbnode.odeint(lambda t, y: (-y[0] - y[0] ** 3,), start[:1], [0.0, 1.0], rtol=1e-12, atol=1e-12),
    )
    torch.testing.assert_close(h[-1], limit[-1], rtol=0, atol=1e-8)
    torch.testing.assert_close(1e8 * m[-1], -limit[-1] - limit[-1] ** 3, rtol=1e-5, atol=0)


# Evaluations


def network(gamma, samples=2):
    """The force of a network of 8 dimensions with steep weights."""
    torch.manual_seed(0)
    func = MLP(8, [64, 64], 8, activation=nn.Tanh).double()
    with torch.no_grad():
        for weight in func.parameters():
            if weight.dim() == 2:
                weight *= 3.0
    field = hbnode.HBNODE(func, damping=gamma, learn_damping=False)
    h, fast = torch.randn(2, samples, 8, dtype=torch.float64)
    with torch.no_grad():
        momenta = {"f/γ": func(h) / gamma, "rest": 0 * h, "fast": 5 * fast}
    return field, h, momenta


@functools.cache
def with_scipy(gamma, start, *t):
    """(h, m) of :func:`network` at the times by an implicit method of scipy's, sample by sample, to eight digits."""
    field, h, momenta = network(gamma)
    m, func = momenta[start], field.func

    def slope(_, y):
        h, m = torch.from_numpy(y).view(2, -1)
        with torch.no_grad():
            return torch.cat([m, func(h) - gamma * m]).numpy()

    def jacobian(_, y):
        by_h = torch.autograd.functional.jacobian(func, torch.from_numpy(y[:8])).numpy()
        return np.block([[np.zeros((8, 8)), np.eye(8)], [by_h, -gamma * np.eye(8)]])

    ends = []
    for sample in zip(h, m, strict=True):
        options = {"method": "Radau", "jac": jacobian, "t_eval": list(t), "rtol": 1e-8, "atol": 1e-8}
        ends.append(solve_ivp(slope, (0.0, t[-1]), torch.cat(sample).numpy(), **options).y.reshape(2, 8, -1))
    return torch.from_numpy(np.stack(ends, 1)).movedim(-1, 0)  # (times, 2, samples, 8)


def error(found, exact):
    return (torch.stack(found, 1)[-1] - exact[-1]).square().mean().sqrt().item()


@pytest.mark.parametrize(("start", "most"), [("f/γ", 400), ("rest", 800), ("fast", 800)])
@pytest.mark.parametrize("gamma", [30.0, 300.0])
def test_evaluations_where_the_damping_is_strong(gamma, start, most):
    """To an error of 1e-4 at T = 2γ, with the first steps through the fast transient. The targets were 400 and 800."""
    field, h, momenta = network(gamma)
    exact = with_scipy(gamma, start, 2 * gamma)
    for per_sample in (False, True):
        with hbnode.count_nfe(field) as nfe, torch.no_grad():
            state, t = (h, momenta[start]), [0.0, 2 * gamma]
            found = hbnode.odeint(field, state, t, method="exponential", per_sample=per_sample, rtol=1e-4, atol=1e-4)
        assert error(found, exact) < 1e-4
        assert nfe.forward < most / 4
        assert nfe.forward == 1 + 4 * (nfe.steps + nfe.rejected)


@pytest.mark.parametrize("start", ["f/γ", "rest", "fast"])
def test_evaluations_where_the_damping_is_weak(start):
    """At γ = 1, at most 1.5 times those of nystrom4 at equal errors."""
    field, h, momenta = network(1.0, samples=8)
    state, t = (h, momenta[start]), [0.0, 5.0]
    with torch.no_grad():
        exact = torch.stack(hbnode.odeint(field, state, t, method="nystrom8", rtol=1e-10, atol=1e-10), 1)
        needed = {}
        for method in ("nystrom4", "exponential"):
            runs = []
            for tolerance in np.logspace(-1.5, -6.5, 6):
                with hbnode.count_nfe(field) as nfe:
                    found = hbnode.odeint(field, state, t, method=method, rtol=tolerance, atol=tolerance)
                runs.append((math.log(error(found, exact)), math.log(nfe.forward)))
            errors, evaluations = zip(*sorted(runs), strict=True)
            wanted = np.log([1e-3, 1e-4, 1e-5])
            needed[method] = np.exp(np.interp(wanted, errors, evaluations))
    assert (needed["exponential"] < 1.5 * needed["nystrom4"]).all()


@pytest.mark.parametrize("gamma", [30.0, 300.0])
def test_outputs_in_the_fast_transient(gamma):
    """Inside of steps too the errors are those of the tolerance."""
    field, h, momenta = network(gamma)
    t = np.concatenate([np.linspace(0.0, 10 / gamma, 41), np.linspace(10 / gamma, 2 * gamma, 41)[1:]])
    exact = with_scipy(gamma, "fast", *t)
    for save in ("interpolate", "exact"):
        with hbnode.count_nfe(field) as nfe, torch.no_grad():
            found = hbnode.odeint(field, (h, momenta["fast"]), t, method="exponential", save=save, rtol=1e-5, atol=1e-5)
        assert (torch.stack(found, 1) - exact).abs().max() < 1e-4
        assert save == "exact" or nfe.forward < 400


# What it is not for, and what goes wrong
