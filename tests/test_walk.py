"""What a call passes through inside of hbnode: functions, files and depth, which are to go down and not up."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import hbnode

BASE = str(Path(hbnode.__file__).parent) + "/"


def walk(call):
    """Distinct functions and files of hbnode that a warm call passes through, and the depth of its frames."""
    call()
    call()
    functions, depth, deepest = set(), dict.fromkeys([threading.get_ident()], 0), 0

    def profile(frame, event, arg):
        nonlocal deepest
        code, thread = frame.f_code, threading.get_ident()
        if not code.co_filename.startswith(BASE):
            return
        if event == "call":
            depth[thread] = depth.get(thread, 0) + 1
            deepest = max(deepest, depth[thread])
            functions.add((code.co_filename, code.co_firstlineno))
        elif event == "return":
            depth[thread] = depth.get(thread, 0) - 1

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return len(functions), len({file for file, _ in functions}), deepest


def block():
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))
    block, x = hbnode.HeavyBallODEBlock(net), torch.randn(8, 5)
    return lambda: block(x).square().mean().backward()


def ode_rnn():
    x, t, mask = torch.randn(6, 10, 4), (0.1 + torch.rand(6, 10)).cumsum(1), torch.rand(6, 10, 4) > 0.3
    rnn = hbnode.ODERNN(4, 8, rtol=1e-3, atol=1e-3)
    return lambda: rnn(x, t, mask=mask)[0].square().mean().backward()


def sdeint():
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))
    sde = hbnode.HeavyBallSDE(net, damping=0.5, temperature=0.1)
    y = sde.initial_state(torch.randn(8, 5))
    return lambda: hbnode.sdeint(sde, y, [0.0, 0.5], dt=0.1)[0].square().mean().backward()


def lstm():
    x, lstm = torch.randn(6, 10, 4), hbnode.nn.MomentumLSTM(4, 5, batch_first=True)
    return lambda: lstm(x)[0].square().mean().backward()


def oscillators():
    x, t = torch.randn(6, 10, 4), (0.1 + torch.rand(6, 10)).cumsum(1)
    layer = hbnode.nn.Oscillators(4, 5, 8)
    return lambda: layer(x, t)[0].square().mean().backward()


def memory():
    q, k, v = torch.randn(3, 2, 4, 100, 8).unbind()
    q.requires_grad_()
    k = nn.functional.normalize(k, dim=-1)
    heavy_ball_memory = hbnode.nn.functional.heavy_ball_memory
    return lambda: heavy_ball_memory(q, k, v, log_momentum=-1.0, step=0.3).square().mean().backward()


def hessian_free():
    rnn, readout = nn.RNN(4, 5, batch_first=True), nn.Linear(5, 1)
    x, y = torch.randn(6, 10, 4), torch.randn(6, 1)
    optimizer = hbnode.optim.HessianFree([*rnn.parameters(), *readout.parameters()], loss="mse", max_cg=5)
    return lambda: optimizer.step(lambda: (readout(rnn(x)[0][:, -1]), y))


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        *((block, (91, 14, 13)), (ode_rnn, (101, 13, 12)), (sdeint, (67, 12, 11)), (lstm, (30, 4, 10))),
        *((oscillators, (69, 6, 10)), (memory, (39, 4, 7)), (hessian_free, (60, 7, 10))),
    ],
    ids=lambda made: getattr(made, "__name__", ""),
)
def test_what_a_call_passes_through(make, limits):
    found = walk(make())
    assert all(x <= most for x, most in zip(found, limits, strict=True)), f"{found}, more than {limits}"
