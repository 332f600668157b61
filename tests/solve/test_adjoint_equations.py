"""Propositions 1 to 4 of Wang et al. (2022): the adjoint equations, integrated by scipy, against autograd."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import hbnode
from tests.models import make_field

T, D = 1.3, 4
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
REFERENCE = {"method": "dopri8", "rtol": 1e-12, "atol": 1e-12, "save": "exact"}


@pytest.fixture(params=["hbnode", "ghbnode"])
def problem(request):
    field = make_field(request.param).double()
    h0, m0 = (torch.randn(D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    h, m = hbnode.odeint(field, (h0, m0), [0.0, T], **REFERENCE)
    weight_h, weight_m = torch.randn(2, D, dtype=torch.float64)
    loss = (weight_h * h[-1].sin()).sum() + (weight_m * m[-1].sin()).sum()
    end = [part[-1].detach().numpy() for part in (h, m)]
    at_end = [(w * part[-1].cos()).detach().numpy() for w, part in zip((weight_h, weight_m), (h, m), strict=True)]
    gradients = torch.autograd.grad(loss, [h0, m0, field.omega, *field.func.parameters()])
    return field, end, at_end, [g.numpy() for g in gradients]


def jacobians(field, t, h):
    """F(h, t), df/dh, and the function a -> a df/dtheta."""
    t, h = torch.tensor(t, dtype=torch.float64), torch.as_tensor(h)
    jacobian = torch.autograd.functional.jacobian(lambda h: field.func(t, h), h).numpy()

    def vjp(a):
        f = field.func(t, h)
        grads = torch.autograd.grad(f, list(field.func.parameters()), torch.as_tensor(a))
        return np.concatenate([g.reshape(-1).numpy() for g in grads])

    return field.func(t, h).detach().numpy(), jacobian, vjp


def test_first_order_adjoint_of_propositions_2_and_3(problem):
    """Equations (41) and (49), with the integrals for the parameters of f and for gamma."""
    field, (h_end, m_end), (ah_end, am_end), (dh0, dm0, domega, *dtheta) = problem
    gamma = field.damping.item()
    xi = field.xi.item() if isinstance(field, hbnode.GHBNODE) else 0.0
    sigma, slope = (np.tanh, lambda m: 1 - np.tanh(m) ** 2) if xi else ((lambda m: m), np.ones_like)

    def backward(t, z):
        h, m, ah, am = z[: 4 * D].reshape(4, D)
        f, jacobian, vjp = jacobians(field, t, h)
        dh, dm = sigma(m), -gamma * m + f - xi * h
        dah = -am @ (jacobian - xi * np.eye(D))
        dam = -ah * slope(m) + gamma * am
        return np.concatenate([dh, dm, dah, dam, [am @ m], -vjp(am)])

    size = sum(g.size for g in dtheta)
    start = np.concatenate([h_end, m_end, ah_end, am_end, [0.0], np.zeros(size)])
    z = solve_ivp(backward, (T, 0.0), start, method="DOP853", **TIGHT).y[:, -1]
    np.testing.assert_allclose(z[2 * D : 3 * D], dh0, atol=1e-8)
    np.testing.assert_allclose(z[3 * D : 4 * D], dm0, atol=1e-8)
    # dL/dgamma = -integral of a_m . m, and gamma = sigmoid(omega)
    np.testing.assert_allclose(z[4 * D] * gamma * (1 - gamma), domega, atol=1e-8)
    np.testing.assert_allclose(z[4 * D + 1 :], np.concatenate([g.reshape(-1) for g in dtheta]), atol=1e-8)


def test_second_order_adjoint_of_proposition_1():
    """Equation (26): a'' - gamma a' = a df/dh with a = dL/dm (the paper prints dL/dh)."""
    field = make_field("hbnode").double()
    gamma = field.damping.item()
    h0, m0 = (torch.randn(D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    h, m = hbnode.odeint(field, (h0, m0), [0.0, T], **REFERENCE)
    weight = torch.randn(D, dtype=torch.float64)
    dh0, dm0, *dtheta = torch.autograd.grad(weight @ h[-1], [h0, m0, *field.func.parameters()])

    def backward(t, z):
        h, m, a, da = z[: 4 * D].reshape(4, D)
        f, jacobian, vjp = jacobians(field, t, h)
        return np.concatenate([m, -gamma * m + f, da, a @ jacobian + gamma * da, -vjp(a)])

    size = sum(g.numel() for g in dtheta)
    # equation (39): the loss sees h only, so a(T) = 0 and a'(T) = -dL/dh_T
    start = np.concatenate([h[-1].detach(), m[-1].detach(), np.zeros(D), -weight.numpy(), np.zeros(size)])
    z = solve_ivp(backward, (T, 0.0), start, method="DOP853", **TIGHT).y[:, -1]
    a, da = z[2 * D : 3 * D], z[3 * D : 4 * D]
    np.testing.assert_allclose(a, dm0.numpy(), atol=1e-8)
    np.testing.assert_allclose(gamma * a - da, dh0.numpy(), atol=1e-8)  # remark 6
    np.testing.assert_allclose(z[4 * D :], torch.cat([g.reshape(-1) for g in dtheta]).numpy(), atol=1e-8)


@pytest.mark.parametrize("xi", [0.0, 0.8])
def test_eigenvalues_of_proposition_4_come_in_pairs(xi):
    """-M, for constant Jacobians J of sigma and F of f, has eigenvalues in pairs that sum to (t - T) gamma."""
    rng = np.random.default_rng(0)
    gamma, t = 0.3, 0.4
    jacobian, slopes = rng.normal(size=(D, D)), rng.uniform(0.2, 1.0, D)
    field = hbnode.GHBNODE(
        lambda h: h @ torch.as_tensor(jacobian).T,
        activation=lambda m: m * torch.as_tensor(slopes),
        damping=gamma,
        learn_damping=False,
        xi=xi,
        learn_xi=False,
    )
    z = torch.zeros(2 * D, dtype=torch.float64)
    right_hand_side = lambda z: torch.cat(field(torch.tensor(0.0), (z[:D], z[D:])))
    m = torch.autograd.functional.jacobian(right_hand_side, z).numpy() * (t - T)
    eigenvalues = np.linalg.eigvals(-m)
    partners = (T - t) * -gamma - eigenvalues  # each one's partner must be an eigenvalue too
    distance = np.abs(partners[:, None] - eigenvalues[None, :]).min(axis=1)
    assert distance.max() < 1e-10
