"""Propositions 2 and 3 of Wang et al. (2022): the adjoint equations, integrated by scipy, against autograd."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import hbnode
from tests.models import make_field

T, D = 1.3, 4


def jacobians(field, t, h):
    """F(h, t), df/dh, and the function a -> a df/dtheta."""
    t, h = torch.tensor(t, dtype=torch.float64), torch.as_tensor(h)
    jacobian = torch.autograd.functional.jacobian(lambda h: field.func(t, h), h).numpy()

    def vjp(a):
        f = field.func(t, h)
        grads = torch.autograd.grad(f, list(field.func.parameters()), torch.as_tensor(a))
        return np.concatenate([g.reshape(-1).numpy() for g in grads])

    return field.func(t, h).detach().numpy(), jacobian, vjp


@pytest.mark.parametrize("model", ["hbnode", "ghbnode"])
def test_first_order_adjoint_of_propositions_2_and_3(model):
    """Equations (41) and (49), with the integrals for the parameters of f and for gamma."""
    field = make_field(model).double()
    start = tuple(torch.randn(2, D, dtype=torch.float64, requires_grad=True).unbind())
    settings = {"method": "dopri8", "rtol": 1e-12, "atol": 1e-12, "save": "exact"}
    end = [part[-1] for part in hbnode.odeint(field, start, [0.0, T], **settings)]
    at_end = torch.autograd.grad(sum(x.sin() @ torch.randn(D).double() for x in end), end, retain_graph=True)
    leaves = [*start, field.omega, *field.func.parameters()]
    dh0, dm0, domega, *dtheta = torch.autograd.grad(end, leaves, at_end)
    gamma = field.damping.item()
    xi = field.xi.item() if model == "ghbnode" else 0.0
    sigma, slope = (np.tanh, lambda m: 1 - np.tanh(m) ** 2) if xi else ((lambda m: m), np.ones_like)

    def backward(t, z):
        h, m, ah, am = z[: 4 * D].reshape(4, D)
        f, jacobian, vjp = jacobians(field, t, h)
        dh, dm = sigma(m), -gamma * m + f - xi * h
        dah = -am @ (jacobian - xi * np.eye(D))
        dam = -ah * slope(m) + gamma * am
        return np.concatenate([dh, dm, dah, dam, [am @ m], -vjp(am)])

    size = sum(g.numel() for g in dtheta)
    z_end = np.concatenate([*(x.detach() for x in (*end, *at_end)), np.zeros(1 + size)])
    z = solve_ivp(backward, (T, 0.0), z_end, method="DOP853", rtol=1e-11, atol=1e-12).y[2 * D :, -1]
    # dL/dgamma = -integral of a_m . m, and gamma = sigmoid(omega)
    z[2 * D] *= gamma * (1 - gamma)
    expected = torch.cat([g.reshape(-1) for g in (dh0, dm0, domega, *dtheta)])
    np.testing.assert_allclose(z, expected.numpy(), atol=1e-8)
