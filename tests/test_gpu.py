"""On CUDA: the values and gradients of the CPU, for each kind of model, without a transfer more than on the CPU."""

import copy

import pytest
import torch
from torch import nn

import hbnode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))


T = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64)
MODELS = {  # with the shapes of their inputs; a second input is the times
    "block": (lambda: hbnode.HeavyBallODEBlock(net()), (3, 4), False),
    "block, fixed steps": (lambda: hbnode.HeavyBallODEBlock(net(), steps=4), (3, 4), False),
    "block, per sample": (lambda: hbnode.HeavyBallODEBlock(net(), per_sample=True), (3, 4), False),
    "block, reversible": (
        lambda: hbnode.HeavyBallODEBlock(net(), method="leapfrog", steps=4, gradient="reversible"), (3, 4), False,
    ),
    "block, dopri5": (lambda: hbnode.ODEBlock(hbnode.NODE(net()), method="dopri5", gradient="adjoint"), (3, 4), False),
    "ode_rnn": (lambda: hbnode.ODERNN(2, 4), (3, 4, 2), True),
    "momentum_lstm": (lambda: hbnode.nn.MomentumLSTM(2, 4, batch_first=True), (3, 4, 2), False),
    "dtriv": (lambda: hbnode.nn.MomentumDTRIV(2, 4, batch_first=True, rule="adam"), (3, 4, 2), False),
    "oscillators": (lambda: hbnode.nn.Oscillators(2, 4), (3, 4, 2), True),
    "selective": (lambda: hbnode.nn.Oscillators(2, 4, selective=True), (3, 4, 2), True),
    "stack": (lambda: hbnode.nn.OscillatorStack(2, 4), (3, 4, 2), True),
    "heavy_ball_memory": (
        lambda: hbnode.nn.MomentumTransformer(None, 8, 2, 1, 8, 0.0, attention="heavy_ball"), (3, 4, 8), False,
    ),
    "momentum_attention": (lambda: hbnode.nn.MomentumTransformer(None, 8, 2, 1, 8, 0.0), (3, 4, 8), False),
}  # fmt: skip


def output_and_gradients(model, *inputs):
    y = model(*inputs)
    y = y[0] if isinstance(y, tuple) else y
    grads = torch.autograd.grad(y.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_computes_what_the_cpu_computes(name):
    make, shape, has_times = MODELS[name]
    model = make().double()
    inputs = (torch.randn(shape, dtype=torch.float64), *([T] if has_times else []))
    right = output_and_gradients(model, *inputs)
    found = output_and_gradients(copy.deepcopy(model).cuda(), *(z.cuda() for z in inputs))
    for one, other in zip(found, right, strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-8)


def test_events_and_noise_run_on_a_gpu():
    event = hbnode.Event(lambda t, y: y[0][..., 0] - 0.5)
    start = torch.ones(2, 1, dtype=torch.float64).cuda(), torch.zeros(2, 1, dtype=torch.float64).cuda()
    _, record = hbnode.odeint(
        hbnode.HBNODE(lambda t, h: -h, damping=0.0, learn_damping=False), start, [0.0, 2.0], events=event
    )
    torch.testing.assert_close(
        record.t.cpu().flatten(), torch.full((2,), torch.pi / 3, dtype=torch.float64), atol=1e-4, rtol=0
    )
    sde = hbnode.HeavyBallSDE(net()).cuda()
    h, _ = hbnode.sdeint(sde, sde.initial_state(torch.randn(3, 4).cuda()), [0.0, 1.0], dt=0.1, seed=0)
    assert h.is_cuda
    assert h.isfinite().all()
