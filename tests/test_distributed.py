"""DistributedDataParallel over two gloo processes gives the gradient of one process."""

import torch
import torch.multiprocessing
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hbnode
from tests.models import AGAIN


class Last(nn.Module):
    """The last output of a recurrent module, read."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(3, 1)

    def forward(self, x):
        x = x.unsqueeze(-1)
        if isinstance(self.rnn, hbnode.ODERNN):
            return self.head(self.rnn(x, torch.tensor([0.0, 1.0, 3.0]))[0][:, -1])
        return self.head(self.rnn(x.transpose(0, 1))[0][-1])


class Streamed(nn.Module):
    """A transformer over numbers, read at the end."""

    def __init__(self, attention):
        super().__init__()
        options = {"attention": attention, "connection": "nesterov", "dropout": 0.0}
        self.embed, self.body = nn.Linear(1, 8), hbnode.nn.MomentumTransformer(None, 8, 2, 2, 8, **options)

    def forward(self, x):
        return self.body(self.embed(x.unsqueeze(-1)))[:, -1]


class Likelihood(nn.Module):
    """The log-likelihood of a series under noisy oscillators, which do not use all of their parameters."""

    def __init__(self):
        super().__init__()
        self.oscillators = hbnode.nn.Oscillators(1, 1, 3, noise=True)

    def forward(self, x):
        return self.oscillators.log_likelihood(x.unsqueeze(-1))


def block(method, gradient, **kind):
    func = hbnode.nn.MLP(3, [6], 3)
    solver = {"method": method, "steps": 3, "gradient": gradient}
    return nn.Sequential(hbnode.HeavyBallODEBlock(func, **kind, **solver), nn.Linear(3, 1))


MODELS = {  # with the evaluations of a forward pass, if they are known
    "rk4": (lambda: block("rk4", "direct", generalized=True), 12),
    "adjoint": (lambda: block("rk4", "adjoint", generalized=True), 12),
    "checkpoint": (lambda: block("nystrom8", "checkpoint"), 25),
    "again": (lambda: block("nystrom8", AGAIN), 25),
    "momentum_attention": (lambda: Streamed("momentum"), None),
    "heavy_ball_memory": (lambda: Streamed("heavy_ball"), None),
    "noisy_oscillators": (Likelihood, None),
    "ode_rnn": (lambda: Last(hbnode.ODERNN(1, 3, rtol=1e-3, atol=1e-3, time_unit=10.0)), None),
    **{
        f"{rule} {kind.__name__}": (lambda kind=kind, rule=rule: Last(kind(1, 3, rule=rule)), None)
        for kind, rule in (
            (hbnode.nn.MomentumLSTM, "momentum"),
            (hbnode.nn.MomentumGRU, "adam"),
            (hbnode.nn.MomentumDTRIV, "restart"),
        )
    },
}


def gradients(model, x):
    model(x).pow(2).mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.requires_grad])


def make_model(name):
    torch.manual_seed(0)
    return MODELS[name][0]()


def worker(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.load(f"{folder}/x.pt", weights_only=True)
    for name, (_, evaluations) in MODELS.items():
        model = DistributedDataParallel(make_model(name))
        with hbnode.count_nfe(model) as nfe:
            flat = gradients(model, x[rank::2])
        assert evaluations in (None, nfe.forward), (name, nfe.forward)
        torch.save(flat, f"{folder}/{name}{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def test_two_processes_compute_the_gradient_of_one(tmp_path):
    x = torch.randn(8, 3)
    torch.save(x, tmp_path / "x.pt")
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    for name in MODELS:
        expected = gradients(make_model(name), x)
        for rank in range(2):
            got = torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
