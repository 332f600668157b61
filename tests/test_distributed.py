"""DistributedDataParallel and FSDP2 over two gloo processes give the gradient of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hbnode
from tests.models import AGAIN

ROOT = Path(__file__).parents[1]
SCRIPTS = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"), re.M | re.S)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Likelihood(nn.Module):
    """The log-likelihood of a series under noisy oscillators, which do not use all of their parameters."""

    def __init__(self):
        super().__init__()
        self.oscillators = hbnode.nn.Oscillators(1, 1, 3, noise=True)

    def forward(self, x):
        return self.oscillators.log_likelihood(x)


def block(**solver):
    damping = torch.tensor([0.05])  # fully_shard refuses scalar parameters
    return hbnode.HeavyBallODEBlock(hbnode.nn.MLP(3, [6], 3), damping=damping, steps=3, **solver)


def transformer(**options):
    return hbnode.nn.MomentumTransformer(None, 8, 2, 1, 8, output_size=3, dropout=0.0, **options)


TIMES = torch.tensor([0.0, 1.0, 3.0, 4.0])
SHARDED = [  # with the shape of eight samples, and further arguments
    (lambda: block(method="rk4", gradient="direct"), (8, 3)),
    (lambda: block(method="rk4", gradient="adjoint"), (8, 3)),
    (lambda: block(method="nystrom8", gradient="checkpoint"), (8, 3)),
    (lambda: block(method="nystrom8", gradient=AGAIN), (8, 3)),
    (lambda: block(method="leapfrog", gradient="reversible"), (8, 3)),
    (lambda: hbnode.ODERNN(2, 3, field="node", time_unit=10.0), (8, 4, 2), TIMES),
    (lambda: hbnode.nn.MomentumLSTM(2, 3, batch_first=True), (8, 4, 2)),
    (lambda: hbnode.nn.MomentumDTRIV(2, 3, batch_first=True, rule="adam"), (8, 4, 2)),
    (lambda: hbnode.nn.OscillatorStack(2, 3), (8, 4, 2)),
    (lambda: transformer(attention="heavy_ball"), (8, 4, 8)),
]
REPLICATED = [
    *SHARDED,
    (Likelihood, (8, 4, 1)),
    (lambda: transformer(attention="momentum", connection="nesterov"), (8, 4, 8)),
]
WRAPPERS = {"ddp": (DistributedDataParallel, REPLICATED), "fsdp": (fully_shard, SHARDED)}


def loss_of(model, x, *more):
    y = model(x, *more)
    return (y[0] if isinstance(y, tuple) else y).square().mean()


def compare(name):
    """Compare the gradients with those of one process, in each process that torchrun starts."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    wrap, models = WRAPPERS[name]
    for make, shape, *more in models:
        compare_one(wrap, make, shape, more)
    distributed.barrier()  # no wrapped model is left: its destructor can wait for ever without the process group
    distributed.destroy_process_group()


def compare_one(wrap, make, shape, more):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    with hbnode.count_nfe(model) as alone:
        loss_of(model, x, *more).backward()
    right = [p.grad for p in model.parameters()]
    model.zero_grad()
    wrapped = wrap(model)
    with hbnode.count_nfe(wrapped) as nfe:
        loss_of(wrapped, x[distributed.get_rank() :: 2], *more).backward()
    assert len(shape) > 2 or nfe.forward == alone.forward > 0
    for p, grad in zip(model.parameters(), right, strict=True):
        if grad is not None:
            found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-5)


def run(*arguments, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_two_processes_compute_the_gradient_of_one(name, tmp_path):
    (tmp_path / "compare.py").write_text(f"from tests.test_distributed import compare\n\ncompare({name!r})\n")
    run(*TORCHRUN, "compare.py", folder=tmp_path)


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
