"""DistributedDataParallel and FSDP2 over two gloo processes give the gradient of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.slow
def test_two_processes_compute_the_gradient_of_one(tmp_path):
    x = torch.randn(8, 3)
    torch.save(x, tmp_path / "x.pt")
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    for name in MODELS:
        expected = gradients(make_model(name), x)
        for rank in range(2):
            got = torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


# FSDP2, and the scripts of docs/scaling.md, by torchrun

ROOT = Path(__file__).parents[1]
SCRIPTS = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"), re.M | re.S)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def sharded():
    """Models, each with the shapes of its inputs for eight samples."""
    damping = torch.tensor([0.05])  # fully_shard refuses scalar parameters
    for gradient in ("direct", "checkpoint", "reversible"):
        method = "leapfrog" if gradient == "reversible" else "nystrom8"
        func, solver = hbnode.nn.MLP(3, [6], 3), {"method": method, "steps": 3, "gradient": gradient}
        yield hbnode.HeavyBallODEBlock(func, damping=damping, **solver), (8, 3)
    yield hbnode.ODERNN(2, 3, field="node", time_unit=10.0), (8, 4, 2)
    yield hbnode.nn.MomentumLSTM(2, 3, batch_first=True), (8, 4, 2)
    yield hbnode.nn.MomentumDTRIV(2, 3, batch_first=True, rule="adam"), (8, 4, 2)
    yield hbnode.nn.OscillatorStack(2, 3), (8, 4, 2)
    options = {"attention": "heavy_ball", "dropout": 0.0}
    yield hbnode.nn.MomentumTransformer(None, 8, 2, 1, 8, output_size=3, **options), (8, 4, 8)


def loss_of(model, x):
    times = (torch.tensor([0.0, 1.0, 3.0, 4.0]),) if isinstance(model, hbnode.ODERNN) else ()
    y = model(x, *times)
    return (y[0] if isinstance(y, tuple) else y).square().mean()


def compare_shards():
    """Compare the gradients of FSDP2 with those of one process, in each process that torchrun starts."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    for model, shape in sharded():
        x = torch.randn(shape)
        loss_of(model, x).backward()
        right = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss_of(fully_shard(model), x[distributed.get_rank() :: 2]).backward()
        for p, grad in zip(model.parameters(), right, strict=True):
            if grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)
    distributed.destroy_process_group()


def run(*arguments, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fsdp_computes_the_gradient_of_one_process(tmp_path):
    (tmp_path / "shards.py").write_text("from tests.test_distributed import compare_shards\n\ncompare_shards()\n")
    run(*TORCHRUN, "shards.py", folder=tmp_path)


@pytest.mark.slow
def test_the_script_of_the_docs_trains_by_ddp_and_fsdp(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPTS[0])
    out = run(*TORCHRUN, "script.py", folder=tmp_path)
    assert re.search(r"DistributedDataParallel: loss 0\.\d+\s+fully_shard: loss 0\.\d+", out), out


@pytest.mark.slow
def test_the_script_of_the_docs_computes_features_on_a_cluster(tmp_path):
    pytest.importorskip("distributed")
    pytest.importorskip("sklearn")
    (tmp_path / "features.py").write_text(SCRIPTS[1])
    assert float(run("features.py", folder=tmp_path)) > 0.5


@pytest.mark.slow
def test_a_task_by_torchrun(tmp_path):
    pytest.importorskip("sklearn")
    task = ("-m", "tasks.image_classification", "--preset", "demo", "--model", "hbnode", "--epochs", "1")
    run(*TORCHRUN, *task, "--out", tmp_path, folder=ROOT)
    assert [*tmp_path.rglob("summary.json")]
