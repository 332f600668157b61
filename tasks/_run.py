"""What every task shares: a dataclass as command line, a run folder, and a training loop that survives being killed.

One process trains on the CPU or on one GPU; ``torchrun --nproc-per-node=N -m tasks.X`` trains on several with torch's
DistributedDataParallel, each process on its share of every batch.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from tqdm import tqdm

import hbnode

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("node", "anode", "sonode", "hbnode", "ghbnode")
_MAY_CHANGE = ("epochs", "device", "out", "checkpoint_seconds")  # between the parts of a resumed run

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]


def option(default: object, text: str, choices: Sequence[str] | None = None) -> typing.Any:  # noqa: ANN401
    """A field of a task's configuration: its default, its help text, its choices."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Config:
    """Options that all tasks have."""

    model: str = option("hbnode", "which of the five models", MODELS)
    preset: str = option("default", "a set of defaults, see below; other options override it")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    epochs: int = option(20, "passes over the training data")
    batch_size: int = option(64, "samples in a step")
    lr: float = option(1e-3, "Adam's learning rate")
    schedule: str = option("constant", "learning rate: constant, or falling to 0 as a cosine", ("constant", "cosine"))
    clip: float = option(0.0, "largest norm of the gradient; 0 does not clip")
    method: str = option("dopri5", "solver")
    tol: float = option(1e-3, "rtol = atol of an adaptive solver")
    steps: int = option(0, "steps of a solver with a fixed grid, such as rk4")
    gradient: str = option("adjoint", "how to differentiate", ("adjoint", "direct"))
    adjoint_norm: str = option("seminorm", "error norm of the adjoint; the papers used full", ("seminorm", "full"))
    device: str = option("auto", "cpu, cuda, or auto")
    checkpoint_seconds: float = option(30.0, "time between checkpoints within an epoch")
    out: str = option("", "run folder; empty makes one under runs/")

    def solver(self) -> dict[str, object]:
        """The arguments of an ODEBlock that the options describe."""
        norm = {"norm": "seminorm"} if self.adjoint_norm == "seminorm" else {}
        return {
            "method": self.method,
            "rtol": self.tol,
            "atol": self.tol,
            "gradient": self.gradient,
            "adjoint_options": norm,
            "options": {"steps": self.steps} if self.steps else None,
        }


C = typing.TypeVar("C", bound=Config)


def parse(kind: type[C], presets: Mapping[str, Mapping[str, object]], doc: str, argv: Sequence[str] | None) -> C:
    """Turn a command line into a configuration: defaults, then the preset, then the options given."""
    presets = {"default": {}, **presets}
    named = "\n".join(f"  {name}: " + ", ".join(f"{k}={v}" for k, v in p.items()) for name, p in presets.items() if p)
    parser = argparse.ArgumentParser(
        description=doc, epilog=f"presets:\n{named}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = f"{field.metadata['help']} [{field.default}]"
        choices = tuple(presets) if field.name == "preset" else field.metadata["choices"]
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(flag, type=hints[field.name], default=argparse.SUPPRESS, choices=choices, help=text)
    given = vars(parser.parse_args(argv))
    try:
        config = kind(**{**presets[given.get("preset", "default")], **given})
    except ValueError as error:
        parser.error(str(error))
    for name in ("epochs", "batch_size", "lr", "tol"):
        if not getattr(config, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(config, name)}")
    return config


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that train together, and this one's place among them."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> Workers:
        """Join the processes that torchrun started, or work alone."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise SystemExit(f"--device {device}: no CUDA device is available. Fix: --device cpu.")
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(0, 1, torch.device(device))
        if device.startswith("cuda"):
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(distributed.get_rank(), distributed.get_world_size(), torch.device(device))

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to train: itself, or one whose gradients are averaged over the processes."""
        return model if self.size == 1 else nn.parallel.DistributedDataParallel(model)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over the processes."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))


class Run:
    """A run folder: ``config.json``, ``metrics.csv``, ``summary.json``, ``checkpoint.pt``.

    Every file appears whole or not at all. A folder that holds a run with other options is refused.
    """

    def __init__(self, task: str, config: Config, label: str) -> None:
        self.task = task
        self.config = config
        self.workers = Workers.join(config.device)
        self.folder = Path(config.out or Path("runs") / task / label)
        self.rows: list[dict[str, float]] = []
        described = {"task": task, **dataclasses.asdict(config)}
        path = self.folder / "config.json"
        if path.exists():
            self._refuse_another(json.loads(path.read_text(encoding="utf-8")), described)
        if self.workers.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(described, indent=2).encode())
        torch.manual_seed(config.seed)

    def _refuse_another(self, found: dict[str, object], wanted: dict[str, object]) -> None:
        changed = {
            name: (found.get(name), wanted.get(name))
            for name in found.keys() | wanted.keys()
            if found.get(name) != wanted.get(name)
            and (name not in _MAY_CHANGE or (name == "epochs" and self.config.schedule == "cosine"))
        }
        if changed:
            listed = ", ".join(f"{name}: {old!r} there, {new!r} wanted" for name, (old, new) in sorted(changed.items()))
            raise SystemExit(
                f"{self.folder} holds a different run ({listed}). Fix: --out another-folder, or delete that one."
            )

    def load_checkpoint(self) -> dict | None:
        """The last checkpoint, checked to be this task's and this model's, or None."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return None
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, wanted in (("task", self.task), ("model_name", self.config.model)):
            if checkpoint.get(name) != wanted:
                raise SystemExit(
                    f"{path} is a checkpoint of {name}={checkpoint.get(name)!r}; expected {wanted!r}. "
                    "Fix: --out another-folder."
                )
        return checkpoint

    def save_checkpoint(self, **state: object) -> None:
        """Write the checkpoint; only the first process does."""
        if self.workers.rank == 0:
            buffer = io.BytesIO()
            torch.save({"task": self.task, "model_name": self.config.model, **state}, buffer)
            write_whole(self.folder / "checkpoint.pt", buffer.getvalue())

    def write_metrics(self) -> None:
        """Write all rows so far to ``metrics.csv``."""
        if self.workers.rank == 0 and self.rows:
            text = io.StringIO()
            writer = csv.DictWriter(text, fieldnames=list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
            write_whole(self.folder / "metrics.csv", text.getvalue().encode())

    def finish(self, model: nn.Module, **extra: object) -> None:
        """Write ``summary.json``: the last row, the model's size, and where it was run."""
        if self.workers.rank == 0:
            seconds = [row["seconds"] for row in self.rows]
            summary = {
                "task": self.task,
                "model": self.config.model,
                "parameters": count_parameters(model),
                **self.rows[-1],
                "seconds_per_epoch": sum(seconds) / len(seconds),
                "nfe_forward_mean": sum(row["nfe_forward"] for row in self.rows) / len(seconds),
                "nfe_backward_mean": sum(row["nfe_backward"] for row in self.rows) / len(seconds),
                **extra,
                **environment(self.workers),
            }
            write_whole(self.folder / "summary.json", json.dumps(summary, indent=2).encode())
        if self.workers.size > 1:
            distributed.destroy_process_group()


def fit(
    run: Run, model: nn.Module, train: Batch, test: Batch, loss: Loss, *, eval_batch_size: int = 512, every: int = 1
) -> None:
    """Train with Adam for the configured epochs, from the last checkpoint if there is one; one row a epoch.

    Arguments:
        run: where to write; its rows are filled.
        model: trained in place.
        train: tensors of equal length, the training data.
        test: the test data likewise, evaluated after every epoch.
        loss: (model, batch) -> the batch's mean loss, and further means to report.
        eval_batch_size: samples at a time for the test data.
        every: how many epochs between two printed lines.
    """
    config, workers = run.config, run.workers
    model.to(workers.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    position, totals = _resume(run, model, optimizer)
    wrapped = workers.wrap(model)
    train, test = (tuple(x.to(workers.device) for x in data) for data in (train, test))
    per_epoch = -(-len(train[0]) // config.batch_size)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        run.save_checkpoint(
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            position=position,
            totals=totals,
            rows=run.rows,
            rng=torch.get_rng_state(),
        )
        saved = time.monotonic()

    bar = tqdm(
        total=config.epochs * per_epoch, initial=position, disable=None if workers.rank == 0 else True, unit="batch"
    )
    with _interruptible() as interrupted, bar:
        while position < config.epochs * per_epoch:
            epoch, index = divmod(position, per_epoch)
            batch = _share(train, _order(config.seed, epoch, len(train[0])), index, config.batch_size, workers)
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(config, position / (config.epochs * per_epoch))
            _add(totals, _step(wrapped, optimizer, batch, loss, config.clip))
            position += 1
            bar.set_postfix(loss=f"{totals['loss'] / totals['samples']:.4f}", nfe=_per_batch(totals), refresh=False)
            bar.update()
            if index + 1 == per_epoch:
                tested = evaluate(run, model, test, loss, eval_batch_size)
                run.rows.append(_row(epoch + 1, workers.sum(totals), tested, workers.size))
                totals.clear()
                run.write_metrics()
                if workers.rank == 0 and (epoch + 1) % every == 0:
                    figures = "  ".join(f"{name} {value:.4g}" for name, value in run.rows[-1].items())
                    tqdm.write(f"{config.model}: {figures}")
            stop = workers.sum({"stop": float(interrupted())})["stop"] > 0
            done = position == config.epochs * per_epoch
            if stop or done or (workers.rank == 0 and time.monotonic() - saved >= config.checkpoint_seconds):
                save()
            if stop and not done:
                bar.close()
                raise SystemExit(f"interrupted: saved to {run.folder}; the same command goes on from there")


def evaluate(run: Run, model: nn.Module, data: Batch, loss: Loss, batch_size: int) -> dict[str, float]:
    """Means over the test data, and the evaluations that a batch of it takes."""
    totals: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for index in range(-(-len(data[0]) // batch_size)):
            batch = _share(data, torch.arange(len(data[0])), index, batch_size, run.workers)
            with hbnode.count_nfe(model) as nfe:
                value, means = loss(model, batch)
            _add(totals, _weighted(value, means, len(batch[0])) | {"batches": 1, "nfe": nfe.forward})
    model.train()
    totals = run.workers.sum(totals)
    samples, batches, nfe = (totals.pop(name) for name in ("samples", "batches", "nfe"))
    return {f"test_{name}": value / samples for name, value in totals.items()} | {"test_nfe": nfe / batches}


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Loss, clip: float
) -> dict[str, float]:
    start = time.perf_counter()
    optimizer.zero_grad()
    with hbnode.count_nfe(model) as nfe:
        value, means = loss(model, batch)
        value.backward()
    if clip > 0:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    if value.is_cuda:
        torch.cuda.synchronize()
    counts = {"batches": 1, "nfe_forward": nfe.forward, "nfe_backward": nfe.backward}
    return _weighted(value, means, len(batch[0])) | counts | {"seconds": time.perf_counter() - start}


def _learning_rate(config: Config, progress: float) -> float:
    return config.lr * (1.0 if config.schedule == "constant" else (1 + math.cos(math.pi * progress)) / 2)


def _weighted(value: Tensor, means: dict[str, float], samples: int) -> dict[str, float]:
    return {"samples": samples} | {k: v * samples for k, v in {"loss": value.item(), **means}.items()}


def _add(totals: dict[str, float], new: dict[str, float]) -> None:
    for name, value in new.items():
        totals[name] = totals.get(name, 0.0) + value


def _per_batch(totals: dict[str, float]) -> str:
    return "/".join(f"{totals[name] / totals['batches']:.0f}" for name in ("nfe_forward", "nfe_backward"))


def _row(epoch: int, totals: dict[str, float], test: dict[str, float], processes: int) -> dict[str, float]:
    """A row of metrics.csv; evaluations are means per batch and process, seconds those of the training steps."""
    samples, batches = totals.pop("samples"), totals.pop("batches")
    costs = {name: totals.pop(name) / batches for name in ("nfe_forward", "nfe_backward")}
    seconds = totals.pop("seconds") / processes
    means = {f"train_{name}": value / samples for name, value in totals.items()}
    return {"epoch": epoch, **means, **test, **costs, "batch_size": samples / batches * processes, "seconds": seconds}


def _order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of the samples in an epoch: of the seed and the epoch alone, so that a resumed run repeats it."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def _share(data: Batch, order: Tensor, index: int, batch_size: int, workers: Workers) -> Batch:
    """This process's part of a batch."""
    chosen = order[index * batch_size : (index + 1) * batch_size]
    chosen = chosen[workers.rank :: workers.size] if len(chosen) >= workers.size else chosen
    return tuple(x[chosen.to(x.device)] for x in data)


def _resume(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, float]]:
    """Load the last checkpoint into the model and the optimizer: batches done, and the sums of the epoch so far."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return 0, {}
    try:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise SystemExit(
            f"the checkpoint in {run.folder} does not fit the model: {error}. Fix: --out another-folder."
        ) from error
    torch.set_rng_state(checkpoint["rng"])
    run.rows = checkpoint["rows"]
    run.write_metrics()
    return checkpoint["position"], checkpoint["totals"]


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a flag that is looked at between steps; a second one stops at once."""
    received = []

    def note(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def count_parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def environment(workers: Workers) -> dict[str, object]:
    """Where a run was made: versions, device, commit."""
    cuda = workers.device.type == "cuda"
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hbnode": hbnode.__version__,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "processes": workers.size,
        "threads": torch.get_num_threads(),
        "commit": git.stdout.strip() or "unknown",
        "command": " ".join(sys.argv[1:]),
    }


def write_figure(figure: Figure, path: Path) -> None:
    """Save a figure whole or not at all, and close it."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    write_whole(path, buffer.getvalue())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the process ends."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
