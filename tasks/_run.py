"""What every task shares: a dataclass as command line, and a run folder with checkpoints."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
import platform
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import distributed, nn

import hbnode

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("node", "anode", "sonode", "hbnode", "ghbnode")


def option(default: object, text: str, choices: Sequence[str] | None = None, *, may_change: bool = False) -> typing.Any:
    """A field of a task's configuration.

    Arguments:
        default: its value if nothing else is said.
        text: its help.
        choices: the values it can have.
        may_change: whether a run may be resumed with another value, because its numbers stay the same.
    """
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "may_change": may_change})


@dataclasses.dataclass(frozen=True)
class Config:
    """Options that all tasks have."""

    model: str = option("hbnode", "which of the five models", MODELS)
    preset: str = option("default", "a set of defaults, see below; other options override it")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    epochs: int = option(20, "passes over the training data", may_change=True)
    batch_size: int = option(64, "samples in a step")
    lr: float = option(1e-3, "Adam's learning rate")
    schedule: str = option("constant", "learning rate: constant, or falling to 0 as a cosine", ("constant", "cosine"))
    clip: float = option(0.0, "largest norm of the gradient; 0 does not clip")
    method: str = option("dopri5", "solver")
    tol: float = option(1e-3, "rtol = atol of an adaptive solver")
    steps: int = option(0, "steps of a solver with a fixed grid, such as rk4")
    gradient: str = option("adjoint", "how to differentiate", ("adjoint", "direct"))
    adjoint_norm: str = option("seminorm", "error norm of the adjoint; the papers used full", ("seminorm", "full"))
    device: str = option("auto", "cpu, cuda, or auto", may_change=True)
    checkpoint_seconds: float = option(30.0, "time between checkpoints within an epoch", may_change=True)
    out: str = option("", "run folder; empty makes one under runs/", may_change=True)

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
        free = {field.name for field in dataclasses.fields(self.config) if field.metadata["may_change"]}
        if self.config.schedule == "cosine":
            free -= {"epochs"}
        changed = {
            name: (found.get(name), wanted.get(name))
            for name in (found.keys() | wanted.keys()) - free
            if found.get(name) != wanted.get(name)
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
