"""DistributedDataParallel over two gloo processes gives the gradient of one process."""

import pytest
import torch
import torch.multiprocessing
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hbnode


class Last(nn.Module):
    """The last output of an ODERNN."""

    def __init__(self):
        super().__init__()
        self.rnn = hbnode.ODERNN(1, 3, rtol=1e-3, atol=1e-3)

    def forward(self, x):
        return self.rnn(x.unsqueeze(-1), torch.tensor([0.0, 1.0, 3.0]))[0][:, -1]


def make_model(solver):
    torch.manual_seed(0)
    if solver == "ode_rnn":
        return Last()
    method, gradient = solver
    grid = {"method": method, "options": {"steps": 3}, "gradient": gradient}
    generalized = method == "rk4"
    return nn.Sequential(
        hbnode.HeavyBallODEBlock(hbnode.nets.MLP(3, [6], 3), generalized=generalized, **grid), nn.Linear(3, 1)
    )


def gradients(model, x):
    model(x).pow(2).mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def compute(rank, solver, folder):
    model = DistributedDataParallel(make_model(solver))
    x = torch.load(f"{folder}/x.pt", weights_only=True)
    with hbnode.count_nfe(model) as nfe:
        flat = gradients(model, x[rank::2])
    assert nfe.forward in (12, 25) if solver != "ode_rnn" else nfe.forward > 0
    torch.save(flat, f"{folder}/gradient{rank}.pt")


def worker(rank, solver, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    compute(rank, solver, folder)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "solver", [("rk4", "direct"), ("rk4", "adjoint"), ("nystrom8", "checkpoint"), "ode_rnn"], ids=str
)
def test_two_processes_compute_the_gradient_of_one(solver, tmp_path):
    x = torch.randn(8, 3)
    torch.save(x, tmp_path / "x.pt")
    torch.multiprocessing.spawn(worker, (solver, str(tmp_path)), nprocs=2)
    expected = gradients(make_model(solver), x)
    for rank in range(2):
        got = torch.load(tmp_path / f"gradient{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
