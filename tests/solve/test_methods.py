"""The coefficients against the order conditions that define them."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm

import hbnode
from hbnode.solve import tableaus
from hbnode.solve.methods import METHODS, _interpolant
from hbnode.solve.tableaus import RKN4, RKN6, RKN8, TSIT5

every_nystrom = pytest.mark.parametrize("tableau", [RKN4, RKN6, RKN8], ids=["RKN4", "RKN6", "RKN8"])
THETAS = (0.1, 0.37, 0.8, 1.0)


def lower(tableau):
    a = np.zeros((len(tableau.c), len(tableau.c)))
    for i, row in enumerate(tableau.a, start=1):
        a[i, : len(row)] = row
    return a


def partitions(total, smallest, make):
    """All multisets of trees, as tuples, whose sizes (given by ``make``) add up to ``total``."""
    if total == 0:
        yield ()
    for size in range(smallest, total + 1):
        trees = make(size)
        for count in range(1, total // size + 1):
            for chosen in itertools.combinations_with_replacement(trees, count):
                for rest in partitions(total - count * size, size + 1, make):
                    yield (*chosen, *rest)


def nystrom_trees(q):
    """Elementary differentials of g(u) of the power s^q along a solution of u'' = g(u): (velocities, subtrees).

    Each velocity u' has the power 1, a subtree of the power q, integrated twice, the power q + 2.
    """
    return [
        (velocities, subtrees)
        for velocities in range(q + 1)
        for subtrees in partitions(q - velocities, 2, lambda size: nystrom_trees(size - 2))
    ]


def power(tree):
    return tree[0] + sum(power(subtree) + 2 for subtree in tree[1])


def exact(tree):
    """The coefficient of s^q in g along the solution."""
    return math.prod(exact(subtree) / ((power(subtree) + 1) * (power(subtree) + 2)) for subtree in tree[1])


def stages(tree, a, c):
    """The same coefficient in the stages of the method."""
    return c ** tree[0] * math.prod((a @ stages(subtree, a, c) for subtree in tree[1]), start=np.ones(len(c)))


def nystrom_residuals(tableau, position, velocity, order, theta=1.0):
    """Of all order conditions; the tuple of the largest for position and velocity."""
    a, c = lower(tableau), np.array(tableau.c)
    worst = [0.0, 0.0]
    for q in range(order):
        for tree in nystrom_trees(q):
            phi = stages(tree, a, c)
            if q + 2 <= order:
                residual = np.dot(position, phi) - exact(tree) * theta ** (q + 2) / ((q + 1) * (q + 2))
                worst[0] = max(worst[0], abs(residual))
            worst[1] = max(worst[1], abs(np.dot(velocity, phi) - exact(tree) * theta ** (q + 1) / (q + 1)))
    return worst


def test_the_trees_are_those_of_the_literature():
    """Numbers of special Nystrom trees: Hairer, Norsett and Wanner, Solving ODEs I, table II.14.3."""
    assert [len(nystrom_trees(q)) for q in range(7)] == [1, 1, 2, 3, 6, 10, 20]


@every_nystrom
def test_nystrom_order_conditions(tableau):
    assert max(nystrom_residuals(tableau, tableau.b, tableau.b_velocity, tableau.order)) < 2e-14
    beyond = nystrom_residuals(tableau, tableau.b, tableau.b_velocity, tableau.order + 1)
    assert max(beyond) > 1e-7  # the order is that, and not higher


@every_nystrom
def test_nystrom_embedded_order_conditions(tableau):
    position = np.array(tableau.b) - tableau.error
    velocity = np.array(tableau.b_velocity) - tableau.error_velocity
    assert max(nystrom_residuals(tableau, position, velocity, tableau.error_order)) < 2e-14
    assert max(nystrom_residuals(tableau, position, velocity, tableau.error_order + 1)) > 1e-5


@every_nystrom
def test_nystrom_stages(tableau):
    """Row sums are c²/2, the last stage is at the end of the step, and its row is that of the solution."""
    np.testing.assert_allclose(lower(tableau).sum(1), np.array(tableau.c) ** 2 / 2, atol=5e-15)
    assert tableau.c[0] == 0
    assert tableau.c[-1] == 1
    assert tableau.b[-1] == 0


@pytest.mark.parametrize(("tableau", "order"), [(RKN4, 4), (RKN6, 6), (RKN8, 6)], ids=["RKN4", "RKN6", "RKN8"])
def test_nystrom_interpolants(tableau, order):
    """Of their orders in the position, one less in the velocity, and at the end the step's own solution."""
    inner = _interpolant(tableau, lower(tableau)).T
    k = np.arange(inner.shape[1])
    for theta in THETAS:
        position = inner @ (theta ** (k + 2) / ((k + 1) * (k + 2)))
        velocity = inner @ (theta ** (k + 1) / (k + 1))
        assert nystrom_residuals(tableau, position, velocity, order, theta)[0] < 2e-13
        assert nystrom_residuals(tableau, position, velocity, order - 1, theta)[1] < 2e-13
        if tableau is RKN8:  # and next to nothing is missed of the orders that follow
            missed = nystrom_residuals(tableau, position, velocity, 7, theta)[0]
            assert missed < 2e-9 < max(np.abs(tableau.error)) / 1e5
            assert nystrom_residuals(tableau, position, velocity, 6, theta)[1] < 2e-8
    np.testing.assert_allclose(position, tableau.b, atol=1e-13)
    np.testing.assert_allclose(velocity, tableau.b_velocity, atol=1e-12)


def test_the_interpolant_of_rkn6_is_that_of_its_authors():
    """One of its polynomials, from Dormand and Prince (1987)."""
    inner = _interpolant(RKN6, lower(RKN6))[:, 0]
    np.testing.assert_allclose(inner / np.arange(1, 6), [1, -15732 / 4212, 25544 / 4212, -19095 / 4212, 5400 / 4212])


def rooted_trees(order):
    """Rooted trees with so many vertices, as nested tuples of subtrees."""
    return list(partitions(order - 1, 1, rooted_trees))


def size(tree):
    return 1 + sum(map(size, tree))


def density(tree):
    return size(tree) * math.prod(map(density, tree))


def weights(tree, a):
    return math.prod((a @ weights(subtree, a) for subtree in tree), start=np.ones(len(a)))


def runge_kutta_residual(a, b, order, theta=1.0):
    return max(
        abs(np.dot(b, weights(tree, a)) - theta**n / density(tree))
        for n in range(1, order + 1)
        for tree in rooted_trees(n)
    )


def test_tsit5_order_conditions():
    a = lower(TSIT5)
    b = np.array([*TSIT5.a[-1], 0.0])
    assert [len(rooted_trees(n)) for n in range(1, 7)] == [1, 1, 2, 4, 9, 20]
    np.testing.assert_allclose(a.sum(1), TSIT5.c, atol=1e-14)
    assert runge_kutta_residual(a, b, 5) < 1e-13
    assert runge_kutta_residual(a, b, 6) > 1e-5
    assert runge_kutta_residual(a, b - TSIT5.error, 4) < 1e-13
    assert runge_kutta_residual(a, b - TSIT5.error, 5) > 1e-5
    for theta in THETAS:
        dense = theta * np.array(TSIT5.dense) @ theta ** np.arange(4)
        assert runge_kutta_residual(a, dense, 4, theta) < 1e-13


@pytest.mark.parametrize(
    ("drifts", "kicks", "order"),
    [
        (tableaus.STRANG_DRIFTS, tableaus.STRANG_KICKS, 2),
        (tableaus.BLANES_MOAN4_DRIFTS, tableaus.BLANES_MOAN4_KICKS, 4),
    ],
)
def test_compositions_of_any_two_flows(drifts, kicks, order):
    """exp(h(A + B)) against the composition, for matrices that do not commute; symmetric, so exactly invertible."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 5)) / 2

    def composed(h):
        product = expm(h * drifts[0] * a)
        for drift, kick in zip(drifts[1:], kicks, strict=True):
            product = expm(h * drift * a) @ expm(h * kick * b) @ product
        return product

    errors = [np.linalg.norm(composed(h) - expm(h * (a + b))) for h in (0.2, 0.1)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order + 1, abs=0.15)
    np.testing.assert_allclose(composed(-0.3) @ composed(0.3), np.eye(5), atol=1e-14)
    assert torch.tensor(drifts).sum() == pytest.approx(1)
    assert sum(kicks) == pytest.approx(1)


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("method", ["nystrom4", "nystrom6", "nystrom8", "exponential", "tsit5"])
def test_the_coefficients_of_a_step_are_those_of_its_matrix(method, error):
    """In the order of their use, for sizes of many samples and a damping of each channel; in NumPy and torch."""
    inner = METHODS[method]
    gamma, size = np.broadcast_arrays(np.array([[0.0], [1e-7], [0.4], [12.0]]), np.array([0.3, 1.2, -0.7]))
    matrix = inner.matrix(np, gamma, size)
    count = matrix.shape[-2] - (0 if error else inner.rows)
    packed = [
        torch.from_numpy(inner.packed(np, gamma, size, error=error)),
        inner.packed(torch, torch.from_numpy(gamma.copy()), torch.from_numpy(size.copy()), error=error),
    ]
    for coefficients in packed:
        first, *later = inner.unpack(coefficients, 2, error=error)
        found = np.zeros((4, 3, count, matrix.shape[-1]))
        found[..., : inner.rows + 1] = np.moveaxis(first.numpy(), (0, 1), (-2, -1))
        for i, column in enumerate(later):
            found[..., i + 1 :, inner.rows + 1 + i] = np.moveaxis(column.numpy(), 0, -1)
        largest = np.abs(matrix).max((-2, -1), keepdims=True)
        assert (np.abs(found - matrix[..., :count, :]) < 1e-14 * largest).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize(("damping", "step"), [(0.0, 0.3), (0.047, 0.3), (2.0, -0.7), (30.0, 0.4)])
def test_coefficients_of_numbers_are_those_of_tensors(method, damping, step, error):
    """And their derivatives: by a complex step where γ is a number, and by torch, of which there are more."""
    rule = METHODS[method]
    gamma = torch.tensor(damping, dtype=torch.float64, requires_grad=True)
    size = torch.tensor(step, dtype=torch.float64)
    of_tensors = rule.packed(torch, gamma, size, error=error)
    of_numbers = rule.packed(np, np.asarray(damping + 1e-30j), np.asarray(step), error=error)
    largest = of_tensors.detach().abs().max().item()
    assert np.abs(of_numbers.real - of_tensors.detach().numpy()).max() < 1e-14 * largest
    if not of_tensors.requires_grad:
        assert not of_numbers.imag.any()
        return
    weights = torch.randn_like(of_tensors)
    (slope,) = torch.autograd.grad((weights * of_tensors).sum(), gamma)
    assert (weights.numpy() * of_numbers.imag / 1e-30).sum() == pytest.approx(slope.item(), rel=1e-10, abs=1e-13)
    assert torch.autograd.gradcheck(lambda g: rule.packed(torch, g, size, error=error), gamma)
    assert torch.autograd.gradgradcheck(lambda g: rule.packed(torch, g, size, error=error), gamma, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gamma", [0.01, 0.8, 12.0])
def test_all_derivatives_in_the_damping(method, gamma):
    """Of the number γ = 20 sigmoid(ω), up to the third, as where each channel has a γ of its own."""
    found = []
    for damping in (gamma, [gamma]):
        field = hbnode.HBNODE(lambda h: -h.sin(), damping=damping, max_damping=20.0).double()
        state = torch.full((1, 1), 0.9, dtype=torch.float64), torch.full((1, 1), 0.4, dtype=torch.float64)
        value = hbnode.odeint(field, state, [0.0, 0.7], method=method, steps=2, gradient="direct")[0][-1].sum()
        derivatives = [value.reshape(())]
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), field.omega, create_graph=True)
            derivatives.append(value.reshape(()))
        found.append(torch.stack(derivatives).detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)  # the omegas are of float32
