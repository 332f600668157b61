"""``jump_times``: steps end where f jumps, against closed forms in float64."""

import math

import pytest
import torch

import hbnode

JUMP, END, HEIGHT = 0.37, 1.0, 0.5
SOLVERS = {
    "tsit5": {"method": "tsit5"},
    "dopri5": {"method": "dopri5"},
    "dopri5, adjoint": {"method": "dopri5", "gradient": "adjoint"},
    "tsit5, direct": {"method": "tsit5", "gradient": "direct"},
    "tsit5, adjoint": {"method": "tsit5", "gradient": "adjoint"},
    "tsit5, per sample": {"method": "tsit5", "per_sample": True},
    "tsit5, exact": {"method": "tsit5", "save": "exact"},
    "dopri5, exact": {"method": "dopri5", "save": "exact"},
}
TIGHT = {"rtol": 1e-7, "atol": 1e-7}


def solve(t, **solver):
    """Outputs of y' = c [t >= JUMP] - y, the gradient of the last one for c, the count and the steps."""
    height = torch.tensor(HEIGHT, dtype=torch.float64, requires_grad=True)
    field = lambda t, y: torch.where(t < JUMP, 0.0, height) - y
    with hbnode.count_nfe(field) as nfe, hbnode.diagnostics.record_steps(field) as steps:
        y = hbnode.odeint(field, torch.ones(2, 1, dtype=torch.float64), t, **TIGHT | solver)
    (slope,) = torch.autograd.grad(y[-1, 0, 0], height)
    return y[:, 0, 0].tolist(), slope.item(), nfe, steps


def exact(t):
    return math.exp(-t) + HEIGHT * max(1 - math.exp(-(t - JUMP)), 0.0)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solve_past_a_jump(name):
    t = [0.0, 0.2, 0.6, END]
    y, slope, nfe, steps = solve(t, **SOLVERS[name], jump_times=[JUMP])
    assert y == pytest.approx([exact(time) for time in t], abs=2e-5)
    assert slope == pytest.approx(1 - math.exp(JUMP - END), abs=2e-5)
    forward = [i for i in range(len(steps)) if not steps.backward[i]]
    assert min(abs(steps.t[i] + steps.size[i] - JUMP) for i in forward) < 1e-9
    *_, without, _ = solve(t, **SOLVERS[name])
    assert nfe.forward < without.forward


@pytest.mark.parametrize("name", SOLVERS)
def test_an_output_at_a_jump(name):
    t = [0.0, JUMP, END]
    y, *_ = solve(t, **SOLVERS[name], jump_times=[JUMP])
    assert y == pytest.approx([exact(time) for time in t], abs=2e-5)


@pytest.mark.parametrize("method", ["tsit5", "dopri5"])
@pytest.mark.parametrize(
    "jump_times", [[JUMP, -1.0, 2.0], (2.0, JUMP), torch.tensor([JUMP, JUMP, 0.5], dtype=torch.float64)], ids=str
)
def test_any_times_in_any_order(method, jump_times):
    for t in ([0.0, END], [END, 0.0]):
        field = lambda t, y: torch.where(t < JUMP, 0.0, HEIGHT) * torch.ones_like(y)
        y = hbnode.odeint(field, torch.zeros(1).double(), t, method=method, jump_times=jump_times, **TIGHT)
        assert y[-1].item() == pytest.approx(math.copysign(HEIGHT * (END - JUMP), t[1] - t[0]), abs=1e-5)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", ["nystrom4", "nystrom6", "nystrom8", "exponential"])
def test_a_heavy_ball_that_is_pushed(method, per_sample):
    push = lambda t, h: torch.where(t < JUMP, 0.0, HEIGHT) * torch.ones_like(h)
    block = hbnode.HeavyBallODEBlock(
        push, damping=0.0, learn_damping=False, method=method, per_sample=per_sample, jump_times=[JUMP], **TIGHT
    )
    h = block(torch.zeros(3, 1, dtype=torch.float64))
    assert h[:, 0].tolist() == pytest.approx([HEIGHT * (END - JUMP) ** 2 / 2] * 3, abs=1e-5)
    block.jump_times = None
    assert block(torch.zeros(3, 1, dtype=torch.float64)).shape == (3, 1)


def test_times_of_each_samples_own():
    t = torch.tensor([[0.0, 1.0], [0.2, 1.0]], dtype=torch.float64)
    field = lambda t, y: torch.where(t < JUMP, 0.0, HEIGHT) * torch.ones_like(y)
    zero = torch.zeros(2, 1, dtype=torch.float64)
    for settings in ({}, {"per_sample": True}):
        y = hbnode.odeint(field, zero, t, jump_times=[JUMP], **settings, **TIGHT)
        assert y[-1, :, 0].tolist() == pytest.approx([HEIGHT * (END - JUMP)] * 2, abs=1e-5)
