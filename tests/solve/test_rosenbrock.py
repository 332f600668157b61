"""``rodas5p``: its coefficients, stiff problems, the systems it solves, gradients and fields that resist torch.func."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import nn

import hbnode
from hbnode.solve import jacobian
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.methods import METHODS
from hbnode.solve.tableaus import RODAS5P
from tests.order_conditions import Weights

DOUBLE = {"dtype": torch.float64}


def solve(field, y0, t, **solver):
    return hbnode.odeint(field, y0, t, method="rodas5p", **solver)


# Coefficients


def test_the_stages_and_the_embedded_solution_are_those_of_its_tableau():
    found = Weights(METHODS["rodas5p"])
    np.testing.assert_allclose(found.alpha.sum(1), RODAS5P.c, atol=1e-13)
    np.testing.assert_allclose(found.gamma.sum(1), RODAS5P.d, atol=1e-12)
    np.testing.assert_allclose(found.solution - found.error, found.alpha[7:], atol=1e-12)


def test_it_is_L_stable():
    found, one = Weights(METHODS["rodas5p"]), np.ones(8)
    beta, b = found.beta, found.solution[0]
    assert 1 - b @ np.linalg.solve(beta, one) == pytest.approx(0.0, abs=1e-12)  # R(∞)
    for y in np.geomspace(1e-2, 1e6, 200):
        assert abs(1 + 1j * y * b @ np.linalg.solve(np.eye(8) - 1j * y * beta, one)) <= 1 + 1e-12
    end = solve(lambda t, y: -1e12 * y, torch.ones(2, 1, **DOUBLE), [0.0, 1.0], steps=1)[-1]
    assert end.abs().max() < 1e-10


@pytest.mark.parametrize("per_sample", [False, True])
def test_dense_output_and_time_derivatives_on_a_stiff_driven_equation(per_sample):
    """Prothero and Robinson's equation, with the solution cos(t + phase)."""
    phase, t = torch.tensor([[0.0], [1.0], [2.0]], **DOUBLE), torch.linspace(0, 5, 33, **DOUBLE)
    field = lambda t, y: -1e6 * (y - (t + phase).cos()) - (t + phase).sin()
    with hbnode.count_nfe(field) as nfe:
        y = solve(field, phase.cos(), t, rtol=1e-6, atol=1e-6, per_sample=per_sample)
    torch.testing.assert_close(y, (t[:, None, None] + phase).cos(), rtol=0, atol=3e-6)
    assert nfe.steps + nfe.rejected < 40
    assert not y.requires_grad


# Stiff problems


def robertson(t, y, k=(0.04, 3e7, 1e4)):
    a, b, c = y.unbind(-1)
    slow, fast, back = k[0] * a, k[1] * b * b, k[2] * b * c
    return torch.stack([back - slow, slow - back - fast, fast], -1)


def van_der_pol(t, y, mu=1000.0):
    return torch.stack([y[..., 1], mu * (1 - y[..., 0] ** 2) * y[..., 1] - y[..., 0]], -1)


# The ends are the reference values of Mazzia and Magherini, Test Set for Initial Value Problem Solvers, release 2.4.
STIFF = {
    "robertson": (robertson, [1.0, 0, 0], 1e11, [0.2083340149701255e-7, 0.8333360770334713e-13, 0.9999999791665050]),
    "van der Pol": (van_der_pol, [2.0, 0.0], 2000.0, [1.706167732170483, -8.928097010247975e-4]),
}


@pytest.mark.parametrize("name", STIFF)
def test_stiff_problems_within_ten_tolerances_and_twice_the_evaluations_of_radau(name):
    field, y0, end, exact = STIFF[name]
    tolerances, exact = {"rtol": 1e-4, "atol": 1e-8}, torch.tensor(exact, **DOUBLE)
    with torch.no_grad(), hbnode.count_nfe(field) as nfe:
        y = solve(field, torch.tensor(y0, **DOUBLE), [0.0, end], **tolerances)[-1]
    assert ((y - exact).abs() / (1e-8 + 1e-4 * exact.abs())).max() < 10
    of_numpy = lambda t, y: field(t, torch.from_numpy(y)).numpy()
    radau = solve_ivp(of_numpy, [0.0, end], y0, method="Radau", **tolerances)  # its Jacobians are not in nfev
    assert nfe.forward - (nfe.steps + nfe.rejected) < 2 * radau.nfev


# The systems


def coupled(t, y):
    """Samples (batch, 2, 2) whose elements interact, and a time dependence."""
    flat = y.flatten(1)
    mixed = flat @ torch.linspace(-1, 1, 16, **DOUBLE).view(4, 4) - 3 * flat**3
    return (mixed + t.cos().reshape(-1, 1)).view_as(y)


@pytest.fixture
def shapes(monkeypatch):
    """Those of the matrices that are factored."""
    found, factor = [], torch.linalg.lu_factor_ex
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", lambda a: found.append(tuple(a.shape)) or factor(a))
    return found


def test_a_batch_has_one_system_per_sample_and_a_vector_is_one_system(shapes):
    y0, times = torch.linspace(-1, 1, 20, **DOUBLE).view(5, 2, 2), [0.0, 0.3, 1.0]
    batch = solve(coupled, y0, times, steps=2)
    assert set(shapes) == {(5, 4, 4)}
    shapes.clear()
    for i in range(5):
        vector = solve(lambda t, y: coupled(t, y.view(1, 2, 2)).flatten(), y0[i].flatten(), times, steps=2)
        torch.testing.assert_close(batch[:, i].flatten(1), vector, rtol=1e-13, atol=1e-13)
    assert set(shapes) == {(1, 4, 4)}
    parts = lambda y: (y.flatten(1)[:, :1], y.flatten(1)[:, 1:].reshape(-1, 3, 1))
    whole = lambda state: torch.cat([state[0], state[1].flatten(1)], 1).view(-1, 2, 2)
    pieces = solve(lambda t, state: parts(coupled(t, whole(state))), parts(y0), times, steps=2)
    torch.testing.assert_close(torch.cat([pieces[0], pieces[1].flatten(2)], 2), batch.flatten(2))
    assert solve(coupled, y0[:0], times).shape == (3, 0, 2, 2)


@pytest.mark.parametrize("damping", [0.4, 1e5, torch.tensor([0.3, 50.0, 1e4], **DOUBLE)], ids=["weak", "strong", "own"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_a_second_order_field_solves_systems_of_the_size_of_h(damping, per_sample, shapes):
    force = lambda t, h: -400 * h - h**3 + torch.sin(3 * t)
    field = hbnode.HBNODE(force, damping=damping, learn_damping=False)
    state, times = (torch.linspace(-1, 1, 6, **DOUBLE).view(2, 3), torch.ones(2, 3, **DOUBLE)), [0.0, 0.02, 0.1]
    solver = {"per_sample": True, "rtol": 1e-5, "atol": 1e-5} if per_sample else {"steps": 4}
    first_order = solve(lambda t, s: field(t, s), state, times, **solver)
    shapes.clear()
    pair = solve(field, state, times, **solver)
    assert set(shapes) == {(2, 3, 3)}
    tolerance = 1e-5 if per_sample else 1e-11
    torch.testing.assert_close(pair, first_order, rtol=tolerance, atol=tolerance)


# Gradients


def test_the_gradient_of_robertsons_rates_equals_finite_differences():
    """The differences are those of a batch with other rates in each sample, which have the same steps."""
    rates, y0 = torch.tensor([0.04, 3e7, 1e4], **DOUBLE), torch.tensor([1.0, 0.0, 0.0], **DOUBLE)
    weights = torch.tensor([1.0, 1e4, 2.0], **DOUBLE)
    found = rates.clone().requires_grad_()
    y = solve(lambda t, y: robertson(t, y, found), y0, [0.0, 40.0], rtol=1e-7, atol=1e-11)[-1]
    (gradient,) = torch.autograd.grad(y @ weights, found)
    shifts = torch.tensor([-2.0, -1.0, 1.0, 2.0], **DOUBLE) * 1e-3
    moved = (rates * (1 + shifts[:, None, None] * torch.eye(3, **DOUBLE))).view(12, 3)
    with torch.no_grad():
        others = solve(lambda t, y: robertson(t, y, moved.T), y0.expand(12, 3), [0.0, 40.0], rtol=1e-8, atol=1e-12)[-1]
    exact = torch.tensor([1.0, -8.0, 8.0, -1.0], **DOUBLE) @ (others @ weights).view(4, 3) / (12e-3 * rates)
    torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=0)


class Product(torch.autograd.Function):
    """A function that torch.func refuses, because it has no ``setup_context``."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.flatten(0, -2).T @ g.flatten(0, -2)


@pytest.mark.sparse
@pytest.mark.parametrize("gradient", [Checkpoint(keep_bytes=0), "direct", Checkpoint()])
@pytest.mark.parametrize("product", [torch.matmul, Product.apply], ids=["func", "vjps"])
def test_gradients_are_those_of_the_discrete_solution(gradient, product):
    w = torch.linspace(-2, 1, 9, **DOUBLE).view(3, 3).requires_grad_()
    y0 = torch.linspace(-1, 1, 6, **DOUBLE).view(2, 3).requires_grad_()
    t = torch.tensor([0.0, 0.4, 1.0], **DOUBLE).requires_grad_()

    def run(w, y0, t):
        return solve(lambda t, y: product(y, w).tanh() * t.cos(), y0, t, steps=2, gradient=gradient).square().sum()

    assert torch.autograd.gradcheck(run, (w, y0, t), rtol=1e-7)
    with torch.inference_mode(), hbnode.count_nfe(Product) as nfe:
        end = solve(lambda t, y: product(y, w).tanh() * t.cos(), y0, t, steps=2)
    assert nfe.forward == 0
    torch.testing.assert_close(end.square().sum().item(), run(w, y0, t).item())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own
def test_the_gradient_through_a_compiled_function_is_complete():
    """Autograd gives the gradient of a compiled function a partial graph, or none."""
    w, x = torch.linspace(-2, 1, 9, **DOUBLE).view(3, 3).requires_grad_(), torch.linspace(-1, 1, 6, **DOUBLE).view(2, 3)
    field = lambda t, x: (x @ w).tanh()
    of_w = []
    for f in (field, torch.compile(field, backend="aot_eager")):
        of_x, _ = jacobian.by_vjps(f, torch.tensor(0.5, **DOUBLE), x, create_graph=True)
        of_w += torch.autograd.grad(of_x.square().sum(), w)
    torch.testing.assert_close(*of_w, rtol=1e-12, atol=1e-12)


def test_a_solve_under_torch_func_and_higher_derivatives():
    def loss(w):
        return solve(lambda t, y: torch.tanh(w * y), torch.ones(1, 1, **DOUBLE), [0.0, 1.0], steps=2)[-1].sum()

    w = torch.tensor(-0.7, **DOUBLE, requires_grad=True)
    assert torch.func.grad(loss)(w.detach()).item() == pytest.approx(torch.autograd.grad(loss(w), w)[0].item())
    assert torch.autograd.gradgradcheck(loss, w)


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian", "vmap"])
@pytest.mark.parametrize("second_order", [False, True])
def test_nested_transforms_equal_a_loop_over_the_samples(transform, second_order):
    """torch.linalg.lu_solve and derivatives of linalg.solve are wrong if an outer vmap alone maps the matrices."""
    w, x = torch.linspace(-1, 1, 9, **DOUBLE).view(3, 3), torch.linspace(-1, 1, 12, **DOUBLE).view(4, 3)
    force = lambda t, h: (h @ w).tanh() * t.cos()
    field = hbnode.HBNODE(force, damping=0.3, learn_damping=False) if second_order else force

    def end(h):
        y = solve(field, (h[None], h[None]) if second_order else h[None], [0.0, 0.5], steps=1, gradient="direct")
        return torch.cat(y, -1)[-1, 0] if second_order else y[-1, 0]

    if transform == "vmap":
        one = lambda h: torch.func.vmap(end)(torch.stack([h, h.cos()]))
    else:
        one = getattr(torch.func, transform)((lambda h: end(h).square().sum()) if transform == "hessian" else end)
    torch.testing.assert_close(torch.func.vmap(one)(x), torch.stack([*map(one, x)]), rtol=1e-12, atol=1e-12)


def test_forward_mode_without_torch_func():
    w, x = torch.linspace(-1, 1, 9, **DOUBLE).view(3, 3).requires_grad_(), torch.linspace(-1, 1, 6, **DOUBLE).view(2, 3)

    def end(w):
        return solve(lambda t, y: (y @ w).tanh() * t.cos(), x, [0.0, 0.5], steps=2, gradient="direct")[-1]

    assert torch.autograd.gradcheck(end, w, check_forward_ad=True, check_batched_forward_grad=True, fast_mode=True)


def test_solves_in_four_threads_equal_those_in_one():
    """Steps inside saved tensor hooks use forward mode, whose level all threads of torch share."""
    x = torch.linspace(-1, 1, 12, **DOUBLE).view(4, 3)
    gradient = Checkpoint(keep_bytes=0)

    def gradients(number):
        w = torch.linspace(-1, number, 9, **DOUBLE).view(3, 3).requires_grad_()
        y = solve(lambda t, y: (y @ w).tanh(), x, [0.0, 2.0], steps=4, gradient=gradient)
        return torch.autograd.grad(y.square().sum(), w)[0]

    expected, interval = [gradients(number) for number in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(gradients, [*range(4)] * 3))
    finally:
        sys.setswitchinterval(interval)
    torch.testing.assert_close(found, expected * 3, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("record", [torch.export.export, torch.jit.trace])
@pytest.mark.parametrize(
    ("block", "what"),
    [
        (hbnode.ODEBlock(hbnode.NODE(nn.Linear(3, 3)), method="rodas5p", steps=2), "Jacobians of method='rodas5p'"),
        (hbnode.ODEBlock(hbnode.PortHamiltonian(nn.Linear(3, 1)), method="leapfrog", steps=2), "gradient of a potent"),
    ],
    ids=["rodas5p", "PortHamiltonian"],
)
def test_graphs_that_cannot_hold_derivatives_say_so(block, what, record):
    with pytest.raises(ValueError, match=f"torch.export and torch.jit.trace cannot record the {what}.*Fix: torch.comp"):
        record(block, (torch.ones(2, 3),))
