"""The rows of docs/migrate.md that compare hbnode with what is installed: torchdiffeq, diffrax and torch.nn."""

import math
import warnings

import pytest
import torch
import torchdiffeq
from torch import nn

import hbnode
from hbnode import odeint

T = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)


def f(t, y):
    return torch.cat([y[..., 1:], -y[..., :1] - 0.1 * t * y[..., 1:]], -1)


def start():
    return torch.tensor([[1.0, 0.0]], dtype=torch.float64)


# torchdiffeq


def test_the_default_tolerances_are_looser():
    spin, t = lambda t, y: torch.stack([y[..., 1], -y[..., 0]], -1), torch.tensor([0.0, 20.0], dtype=torch.float64)
    solutions = (
        torchdiffeq.odeint(spin, start(), t),
        odeint(spin, start(), t),
        odeint(spin, start(), t, method="dopri5"),
    )
    errors = [(y[-1, 0, 0] - math.cos(20)).abs().item() for y in solutions]
    assert errors[0] < 1e-6 < errors[1] < 1e-4 < errors[2] < 1e-3


def test_the_same_method_and_tolerances_have_the_same_numbers_and_gradients():
    net, options = hbnode.NODE(nn.Linear(2, 2).double()), {"method": "dopri5", "rtol": 1e-7, "atol": 1e-9}
    theirs = torchdiffeq.odeint_adjoint(net, start(), T, **options)
    ours = odeint(net, start(), T, gradient="adjoint", adjoint_options={}, **options)
    assert torch.equal(theirs, ours)
    assert torch.equal(*(torch.autograd.grad(y.sum(), net.func.weight)[0] for y in (theirs, ours)))


def test_options_that_are_arguments():
    y = odeint(f, start(), T[:2], method="rk4", steps=5)
    assert torch.allclose(y, torchdiffeq.odeint(f, start(), T[:2], method="rk4", options={"step_size": 0.1}))
    jumping = lambda t, y: (t > 1).to(y) - y
    y = odeint(jumping, start(), T, jump_times=[1.0])
    expected = torchdiffeq.odeint(jumping, start(), T, options={"jump_t": T.new_tensor([1.0])})
    assert torch.allclose(y, expected, atol=1e-4)


# diffrax


def test_the_calls_that_replace_diffrax():
    diffrax, jax = pytest.importorskip("diffrax"), pytest.importorskip("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jax.numpy.stack([y[1], -y[0] - 0.1 * t * y[1]])), diffrax.Tsit5(),
            0.0, 2.0, 0.1, jax.numpy.array([1.0, 0.0]), saveat=diffrax.SaveAt(ts=jax.numpy.array([0.0, 0.5, 2.0])),
            stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
        )  # fmt: skip
    y = odeint(f, start(), T)[:, 0]
    assert torch.allclose(y, torch.tensor(solution.ys.tolist(), dtype=y.dtype), atol=1e-4)
    both = torch.cat([start(), 5 * start()])
    assert torch.allclose(odeint(f, both, T, per_sample=True)[:, :1], odeint(f, start(), T), atol=1e-12)
