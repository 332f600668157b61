"""On CUDA: the values and gradients of the CPU, for each kind of model, without a transfer more than on the CPU."""

import copy

import pytest
import torch
from torch import nn

import hbnode
from tests.test_torch import LAYERS, T, X, value_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


BLOCKS = {
    f"block, {settings}": (lambda settings=settings: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **settings), "x[:, 0]")
    for settings in (
        {}, {"per_sample": True}, {"method": "leapfrog", "steps": 4, "gradient": "reversible"},
        {"method": "dopri5", "gradient": "adjoint"},
    )
}  # fmt: skip
MODELS = BLOCKS | {name: layer for name, layer in LAYERS.items() if not name.startswith(("Latent", "flow"))}  # no noise


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_computes_what_the_cpu_computes(name):
    make, arguments = MODELS[name]
    model, values = make().double(), []
    for each, x, t in ((model, X.double(), T), (copy.deepcopy(model).cuda(), X.double().cuda(), T.cuda())):
        y = value_of(each, x, arguments, t)
        gradients = torch.autograd.grad(y.square().sum(), list(each.parameters()), allow_unused=True)
        values.append([y, *(grad for grad in gradients if grad is not None)])
    assert all(found.is_cuda for found in values[1])
    torch.testing.assert_close([found.cpu() for found in values[1]], values[0], rtol=1e-6, atol=1e-8)


def test_events_and_noise_run_on_a_gpu():
    event = hbnode.Event(lambda t, y: y[0][..., 0] - 0.5)
    start = torch.ones(2, 1, dtype=torch.float64).cuda(), torch.zeros(2, 1, dtype=torch.float64).cuda()
    _, record = hbnode.odeint(
        hbnode.HBNODE(lambda t, h: -h, damping=0.0, learn_damping=False), start, [0.0, 2.0], events=event
    )
    torch.testing.assert_close(
        record.t.cpu().flatten(), torch.full((2,), torch.pi / 3, dtype=torch.float64), atol=1e-4, rtol=0
    )
    sde = hbnode.HeavyBallSDE(nn.Linear(4, 4)).cuda()
    h, _ = hbnode.sdeint(sde, sde.initial_state(torch.randn(3, 4).cuda()), [0.0, 1.0], dt=0.1, seed=0)
    assert h.is_cuda
    assert h.isfinite().all()
