"""The methods: their coefficients against order conditions, their orders, what is exact, strong damping."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from torch import nn

import hbnode
from hbnode.nn.nets import MLP
from hbnode.solve.methods import METHODS, Explicit, phi_functions
from tests.models import make_field, make_input
from tests.order_conditions import check_orders, matrix_of
from tests.problems import Driven, driven_exact
from tests.reference import exponential_grid

ADAPTIVE = [name for name, method in METHODS.items() if not method.needs_fixed_steps]
EXPLICIT = [name for name in ADAPTIVE if isinstance(METHODS[name], Explicit)]
FOR_PAIRS = [name for name, method in METHODS.items() if method.rows == 2]
REVERSIBLE = [name for name, method in METHODS.items() if method.is_reversible]
EXACT_DAMPING = [name for name in FOR_PAIRS if METHODS[name].damping_limit == math.inf]


# Orders, of each method from its tableau


@pytest.mark.parametrize("name", ADAPTIVE)
def test_order_conditions(name):
    check_orders(METHODS[name])


@pytest.mark.parametrize("name", REVERSIBLE)
def test_compositions_of_any_two_flows(name):
    """exp(h(A + B)) against the composition, for matrices that do not commute; symmetric, so exactly invertible."""
    tableau = METHODS[name].tableau
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 5)) / 2

    def composed(h):
        product = expm(h * tableau.drifts[0] * a)
        for drift, kick in zip(tableau.drifts[1:], tableau.kicks, strict=True):
            product = expm(h * drift * a) @ expm(h * kick * b) @ product
        return product

    errors = [np.linalg.norm(composed(h) - expm(h * (a + b))) for h in (0.2, 0.1)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(tableau.order + 1, abs=0.15)
    np.testing.assert_allclose(composed(-0.3) @ composed(0.3), np.eye(5), atol=1e-14)
    assert sum(tableau.drifts) == pytest.approx(1)
    assert sum(tableau.kicks) == pytest.approx(1)


# Coefficients of a step


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("method", [*EXPLICIT, *REVERSIBLE])
def test_the_coefficients_of_a_step_are_those_of_its_matrix(method, error):
    """In NumPy and torch, with their derivatives: by a complex step in NumPy, and by torch, of which there are more."""
    rule = METHODS[method]
    gamma, size = np.broadcast_arrays(np.array([[0.0], [1e-7], [0.4], [12.0], [30.0]]), np.array([0.3, 1.2, -0.7]))
    theta, sizes = torch.tensor(gamma, requires_grad=True), torch.tensor(size)
    of_numbers = rule.packed(np, gamma + 1e-30j, size + 0j, error=error)
    of_tensors = rule.packed(torch, theta, sizes, error=error)
    largest = of_tensors.detach().abs().max().item()
    assert np.abs(of_numbers.real - of_tensors.detach().numpy()).max() < 1e-14 * largest
    if of_tensors.requires_grad:
        weights = torch.randn_like(of_tensors)
        (slope,) = torch.autograd.grad((weights * of_tensors).sum(), theta)
        found = (weights.numpy() * of_numbers.imag / 1e-30).sum()
        assert found == pytest.approx(slope.sum().item(), rel=1e-10, abs=1e-13)
        for g, h in ((0.047, 0.3), (2.0, -0.7), (30.0, 0.4)):
            g, h = torch.tensor(g, dtype=torch.float64, requires_grad=True), torch.tensor(h, dtype=torch.float64)
            assert torch.autograd.gradgradcheck(lambda g, h=h: rule.packed(torch, g, h, error=error), g, atol=1e-4)
    if method in REVERSIBLE:
        return
    matrix = matrix_of(rule, gamma, size)
    count = matrix.shape[-2] - (0 if error else rule.rows)
    first, *later = rule.unpack(of_tensors.detach(), 2, error=error)
    found = np.zeros((5, 3, count, matrix.shape[-1]))
    found[..., : rule.rows + 1] = np.moveaxis(first.numpy(), (0, 1), (-2, -1))
    for i, column in enumerate(later):
        found[..., i + 1 :, rule.rows + 1 + i] = np.moveaxis(column.numpy(), 0, -1)
    scale = np.abs(matrix).max((-2, -1), keepdims=True)
    assert (np.abs(found - matrix[..., :count, :]) < 1e-14 * scale).all()


@pytest.mark.parametrize(("method", "gamma", "order"), [("leapfrog", None, 2), ("exponential", 1000.0, 4)])
def test_orders(method, gamma, order):
    """That of a splitting for a GHBNODE, and of the exponential method: 4 where the damping is strong."""
    if gamma is None:
        field, state = make_field("ghbnode").double(), (make_input(), make_input())
        exact = hbnode.odeint(field, state, [0.0, 2.0], method="dopri8", rtol=1e-12, atol=1e-13)[0][-1]
    else:
        field = hbnode.HBNODE(Driven(gamma), damping=gamma, learn_damping=False)
        state = tuple(float64(x) for x in driven_exact(gamma, 0.0))
        exact = float64(driven_exact(gamma, 2.0)[0])
    ends = [hbnode.odeint(field, state, [0.0, 2.0], method=method, steps=steps)[0][-1] for steps in (8, 16)]
    coarse, fine = ((end - exact).norm().item() for end in ends)
    assert order - 0.4 < math.log2(coarse / fine) < order + 1


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("method", FOR_PAIRS)
@pytest.mark.parametrize("gamma", [0.0, 0.3, 4.0])
def test_damping_without_a_force(method, gamma):
    """H' = m, m' = -gamma m: splittings damp exactly in one step of any size, Nystrom methods to their order.

    Exponential methods solve it exactly.
    """
    field = hbnode.HBNODE(lambda h: 0.0 * h, damping=gamma, learn_damping=False)
    steps = 1 if method in EXACT_DAMPING else 20
    h, m = hbnode.odeint(field, (float64(1.0), float64(2.0)), [0.0, 1.5], method=method, steps=steps)
    decay = math.exp(-1.5 * gamma)
    assert m[-1].item() == pytest.approx(2 * decay, rel=1e-14 if method in EXACT_DAMPING else 1e-3)
    if method not in REVERSIBLE:
        way = 2 * (1.5 if gamma == 0 else (1 - decay) / gamma)
        assert h[-1].item() == pytest.approx(1 + way, rel=1e-14 if method in EXACT_DAMPING else 1e-4)


@pytest.mark.parametrize("method", FOR_PAIRS)
@pytest.mark.parametrize("learn", [True, False])
def test_a_damping_for_each_channel(method, learn):
    """The same as one solve for each channel, in values and in the gradient for every gamma."""
    gammas = float64(0.05, 0.4, 0.9)
    h0, m0 = torch.randn(2, 5, 3, dtype=torch.float64)
    force = lambda h: -torch.sin(2 * h)
    steps = 4
    field = hbnode.HBNODE(force, damping=gammas, learn_damping=learn).double()
    h, _ = hbnode.odeint(field, (h0, m0), [0.0, 1.0], method=method, steps=steps)
    assert ("omega" in field.state_dict()) == learn
    torch.testing.assert_close(field.damping.detach(), gammas, rtol=1e-7, atol=0)
    for i, gamma in enumerate(field.damping.detach().tolist()):
        single = hbnode.HBNODE(force, damping=gamma, learn_damping=learn).double()
        state = (h0[:, i : i + 1], m0[:, i : i + 1])
        expected, _ = hbnode.odeint(single, state, [0.0, 1.0], method=method, steps=steps)
        torch.testing.assert_close(h[..., i : i + 1], expected, rtol=1e-6, atol=1e-7)
        if learn:
            (got,) = torch.autograd.grad(h[-1][:, i].sum(), field.omega, retain_graph=True)
            (wanted,) = torch.autograd.grad(expected[-1].sum(), single.omega)
            assert got[i].item() == pytest.approx(wanted.item(), rel=1e-5)


# Coefficients


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("z", [0.0, -1e-9, -0.3, -1.999, -2.0, -2.5, -30.0, 1.5, 9.0])
def test_phi_functions(z, xp):
    """Against their series in rational numbers."""
    found = phi_functions(xp, np.array(z) if xp is np else torch.tensor(z, dtype=torch.float64), 6)
    for k in range(6):
        term = total = Fraction(1, math.factorial(k))
        for j in range(1, 250):
            term *= Fraction(z) / (j + k)
            total += term
        assert found[k].item() == pytest.approx(float(total), rel=3e-15)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
@pytest.mark.parametrize("gamma", [0.0, 0.02, 0.9, 40.0])
def test_the_exponential_method_is_its_reference(gamma, gradient):
    """In values, and in the gradients for h, m, γ and all parameters."""
    torch.manual_seed(0)
    func = MLP(3, [8], 3, activation=nn.Tanh)
    field = hbnode.HBNODE(lambda t, h: (1 + t) * func(h), damping=gamma, max_damping=100.0, learn_damping=gamma > 0)
    field, func = field.double(), func.double()
    leaves = [*torch.randn(2, 4, 3, dtype=torch.float64), *field.parameters(), *func.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    times = [0.3, 0.8, 1.3, 1.8]
    settings = {"method": "exponential", "steps": 3, "gradient": gradient}
    found = tuple(x[-1] for x in hbnode.odeint(field, tuple(leaves[:2]), [0.3, 1.8], **settings))
    expected = exponential_grid(field.force, *leaves[:2], field.damping, times)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad(sum(x.sin().sum() for x in pair), leaves) for pair in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


# What it is not for, and what goes wrong


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", ["exponential", "leapfrog", "blanes_moan4", "nystrom6"])
def test_vmap_over_the_damping_equals_a_loop(method, per_sample):
    block = hbnode.ODEBlock(
        hbnode.HBNODE(lambda t, h: t - h**3), method=method, steps=2, gradient="direct", per_sample=per_sample
    ).double()
    (name,), x = dict(block.named_parameters()), torch.ones(2, 3, dtype=torch.float64)
    end = lambda theta: torch.func.functional_call(block, {name: theta}, x)
    thetas = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(end)(thetas), torch.stack([end(theta) for theta in thetas]))
