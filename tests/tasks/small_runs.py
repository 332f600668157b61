"""What the tests of tasks share: a task that takes no time, and processes of its own to run it in."""

import csv
import dataclasses
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

from tasks.common.config import TaskConfig, option, parse
from tasks.common.files import read_tensors
from tasks.common.run import Run, sweep
from tasks.common.train import fit


def read_metrics(folder):
    """All columns of a run's metrics but the wall-clock seconds."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert float(row.pop("seconds")) > 0
    return rows


def names_in(folder):
    """Of all files."""
    return {path.name for path in folder.iterdir()}


@dataclasses.dataclass(frozen=True)
class PolynomialConfig(TaskConfig):
    """Options of a task like any other, but for the time that it takes: three steps an epoch."""

    models = ("line", "parabola", "cubic")

    model: str = option("line", "one of {models}, several with commas between, or all")
    batch_size: int = option(4, "points in a step")
    epochs: int = option(2, "passes over the points", may_change=True)
    lr: float = option(0.1, "learning rate")


def mean_squared_error(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y), {}


def fit_polynomial(config):
    """Fit nine points of the exponential function."""
    run = Run("polynomial", config, f"{config.model}-seed{config.seed}")
    degree = 1 + config.models.index(config.model)
    t = torch.linspace(-1, 1, 9)[:, None]
    data = torch.cat([t**k for k in range(1, degree + 1)], dim=1), t.exp()
    model = torch.nn.Linear(degree, 1)
    fit(run, model, data, data, mean_squared_error, every=10**9)
    run.finish(model)


def polynomial(*options):
    """The command line of that task."""
    sweep(parse(PolynomialConfig, {}, "", ["--device", "cpu", *map(str, options)]), fit_polynomial)


def fail_or_write(config):
    """A task whose runs of seed 0 are killed, and those of seed 1 refused."""
    if config.seed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.seed == 1:
        raise SystemExit("refused")
    Path(config.out).with_suffix(".txt").write_text(f"{config.model}, {config.jobs} at a time")


def train_a_share(rank, port, options):
    """Train a point cloud as one of two processes, as torchrun would have it, without its figure."""
    from tasks import point_cloud

    shared = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in shared.items()})
    point_cloud.draw_evolution = lambda *args: None
    point_cloud.main(options)


def start(function, *args):
    """A process that runs it, from the server that sweeps start theirs from, where torch is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tasks.common.train"])
    process = context.Process(target=_run, args=(function, args))
    process.start()
    return process


def _run(function, args):
    torch.set_num_threads(1)
    function(*args)


def wait_for_position(folder, position, is_alive):
    """The checkpoint's position, once that many batches are done."""
    deadline = time.monotonic() + 120
    path = folder / "checkpoint.pt"
    while time.monotonic() < deadline and is_alive():
        if path.exists():
            found = read_tensors(path)["position"]
            if found >= position:
                return found
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint at {position} in {sorted(Path(folder).iterdir())}")
