"""What every task shares: a dataclass as command line, and a run folder with checkpoints."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import io
import json
import math
import platform
import statistics
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import distributed, nn

import hbnode
from hbnode import _torchdiffeq_solve
from tasks.common.files import FolderLock, outputs, read_checkpoint, read_json, write_checkpoint, write_whole
from tasks.common.workers import Workers

MODELS = ("node", "anode", "sonode", "hbnode", "ghbnode")
BASELINES = ("lstm", "gru", "gru-d", "cfc")  # of tasks.models.baselines, without an ODE
SCHEDULES = ("constant", "cosine", "step")
GRADIENTS = ("", "direct", "checkpoint", "reversible", "adjoint")


def option(
    default: object, text: str, choices: Sequence[str] = (), *, may_change: bool = False, is_signed: bool = False
) -> typing.Any:
    """A field of a task's configuration.

    Arguments:
        default: its value if nothing else is said; the help does not show None.
        text: its help.
        choices: the values it can have; empty: any.
        may_change: whether a run may be resumed with another value.
        is_signed: whether it may be negative.
    """
    metadata = {"help": text, "choices": choices or None, "may_change": may_change, "is_signed": is_signed}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Options that all tasks have, and what is fixed for a task."""

    models: ClassVar[tuple[str, ...]] = ()  # those it can train

    model: str = option("all", "one of {models}, several with commas between, or all")
    preset: str = option("default", "a set of defaults, see below; other options override it")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    seeds: int = option(1, "how many seeds to run, counting up from --seed", may_change=True)
    jobs: int = option(0, "of several runs, how many at a time; 0: one a core, one alone on a GPU", may_change=True)
    epochs: int = option(20, "passes over the training data", may_change=True)
    batch_size: int = option(64, "samples in a step")
    lr: float = option(1e-3, "learning rate")
    schedule: str = option(
        "constant",
        "learning rate: constant, falling to 0 as a cosine, or 5 %% less after every 1,000 steps",
        SCHEDULES,
    )
    clip: float = option(0.0, "largest norm of the gradient; 0 does not clip")
    device: str = option("auto", "cpu, cuda, or auto", may_change=True)
    checkpoint_seconds: float = option(30.0, "time between checkpoints within an epoch", may_change=True)
    out: str = option(
        "", "run folder, of several runs the folder of theirs; empty makes it under runs/", may_change=True
    )

    def chosen(self) -> tuple[str, ...]:
        """The models that ``--model`` names, in its order and each once."""
        names = self.models if self.model == "all" else tuple(dict.fromkeys(self.model.split(",")))
        for name in names:
            if name not in self.models:
                known = ", ".join((*self.models, "all"))
                raise ValueError(f"argument --model: invalid choice: {name!r} (choose from {known})")
        return names

    def check(self) -> None:
        """Refuse options that no run can have, before anything is written."""
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if not isinstance(value, (int, float)):
                continue
            if not -math.inf < value < math.inf:
                raise ValueError(f"{flag} is {value}")
            if value < 0 and not field.metadata["is_signed"]:
                raise ValueError(f"{flag} must not be negative, got {value}")
            if field.name in ("seeds", "epochs", "batch_size", "lr", "tol", "loss_scale") and value == 0:
                raise ValueError(f"{flag} must be positive, got 0")
        if self.seed + self.seeds > 2**32:
            raise ValueError(f"--seed must be below 2**32, got {self.seed + self.seeds - 1}")
        if self.device != "auto":
            torch.device(self.device)
        self.chosen()


@dataclasses.dataclass(frozen=True)
class Config(TaskConfig):
    """Options of the tasks that solve ODEs."""

    models: ClassVar[tuple[str, ...]] = MODELS  # a task of series adds BASELINES
    is_recurrent: ClassVar[bool] = False  # whether its ODEs are solved within an ODERNN

    model: str = option("hbnode", "one of {models}, several with commas between, or all")
    lr: float = option(1e-3, "Adam's learning rate")
    loss_scale: float = option(1.0, "factor of the loss in the backward pass, which an adjoint's evaluations depend on")
    solver: str = option("native", "hbnode's solvers, or torchdiffeq's as in the papers", ("native", "torchdiffeq"))
    method: str = option("", "method; empty is the best native one for the model, or torchdiffeq's dopri5")
    tol: float = option(1e-3, "rtol = atol of an adaptive method")
    steps: int = option(0, "steps of a fixed grid; 0 chooses the steps by the tolerance")
    gradient: str = option(
        "",
        "how to differentiate; empty is checkpoint (native), direct (native, of series) or adjoint (torchdiffeq)",
        GRADIENTS,
    )
    adjoint_norm: str = option(
        "seminorm", "error norm of torchdiffeq's adjoint; the papers used full", ("seminorm", "full")
    )

    def ode_options(self) -> dict[str, object]:
        """The arguments of an ODEBlock that the options describe."""
        options = {
            "method": self.method or None,
            "rtol": self.tol,
            "atol": self.tol,
            "gradient": self.gradient or None,
            "options": {"steps": self.steps} if self.steps else None,
        }
        if self.solver == "native":
            return options
        norm = {"norm": "seminorm"} if self.adjoint_norm == "seminorm" else {}
        return options | {
            "method": self.method or "dopri5",
            "gradient": self.gradient or "adjoint",
            "adjoint_options": norm,
        }

    def rnn_options(self) -> dict[str, object]:
        """The arguments of an ODERNN: those of an ODEBlock, and steps of its own for each sample where possible."""
        return self.ode_options() | {"step_control": "sample" if self.solver == "native" else "batch"}

    def check(self) -> None:
        """Refuse what no run can have; a solve is tried for the rest."""
        super().check()
        theirs = self.solver == "torchdiffeq"
        if self.method and theirs != (self.method in _torchdiffeq_solve.METHODS):
            raise ValueError(
                f"--method {self.method} is not one of --solver {self.solver}. "
                f"Fix: --solver {'native' if theirs else 'torchdiffeq'}, or leave --method out."
            )
        if self.method in _torchdiffeq_solve.FIXED and not self.steps:
            raise ValueError(f"--method {self.method} has a fixed grid; say how fine with --steps")
        for model in (name for name in self.chosen() if name in TRIAL):  # a trial: method, tolerance, steps, gradient
            x = torch.ones(1, 2, requires_grad=True)
            if self.is_recurrent:
                rnn = hbnode.ODERNN(2, 2, field=TRIAL[model](), **self.rnn_options())
                rnn(x.unsqueeze(1).expand(1, 2, 2), torch.tensor([0.0, 1.0]))[0].sum().backward()
            else:
                hbnode.ODEBlock(TRIAL[model](), **self.ode_options())(x).sum().backward()
        for model in (name for name in self.chosen() if name in BASELINES):
            from tasks.models.baselines import make_baseline

            make_baseline(model, input_size=1, parameters=1000)  # a trial: what it needs is installed


C = typing.TypeVar("C", bound=TaskConfig)


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
        text = field.metadata["help"].format(models=", ".join(kind.models))
        text += "" if field.default is None else f" [{field.default}]"
        choices = tuple(presets) if field.name == "preset" else field.metadata["choices"]
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            of = next(iter(typing.get_args(hints[field.name])), hints[field.name])  # float | None is a float
            parser.add_argument(flag, type=of, default=argparse.SUPPRESS, choices=choices, help=text)
    given = vars(parser.parse_args(argv))
    try:
        config = kind(**{**presets[given.get("preset", "default")], **given})
        config.check()
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        parser.error(str(error))
    return config


# A field of each kind, to try options on.
TRIAL: dict[str, Callable[[], nn.Module]] = {
    "node": lambda: hbnode.NODE(lambda h: -h),
    "anode": lambda: hbnode.ANODE(lambda h: -h, augment=1),
    "sonode": lambda: hbnode.SONODE(lambda h, v: -h),
    "hbnode": lambda: hbnode.HBNODE(lambda h: -h),
    "ghbnode": lambda: hbnode.GHBNODE(lambda h: -h),
}


class Run:
    """A run folder: ``config.json``, ``metrics.csv``, ``summary.json``, ``checkpoint.pt``.

    Every file appears whole or not at all. A folder is refused that another process writes to, or that holds a run with
    other options, what is left of one, or files of other origin that might be overwritten.
    """

    def __init__(self, task: str, config: TaskConfig, label: str) -> None:
        self.task = task
        self.config = config
        self.workers = Workers.join(config.device)
        self.folder = Path(config.out or Path("runs") / task / label)
        self.rows: list[dict[str, float]] = []
        self.is_finished = False
        self.described = {"task": task, **dataclasses.asdict(config), "processes": self.workers.size}
        if self.folder.exists() and not self.folder.is_dir():
            raise SystemExit(f"{self.folder} is a file; expected a folder for the run. Fix: --out another-folder.")
        self.lock = FolderLock(self.folder) if self.workers.rank == 0 else None
        self._refuse_others()
        torch.manual_seed(config.seed)

    def _refuse_others(self) -> None:
        """End if the folder holds what this run would overwrite and cannot go on from."""
        found = outputs(self.folder) if self.folder.exists() else set()
        if "config.json" in found:
            self._refuse_another(read_json(self.folder / "config.json"))
        missing = [name for name in ("config.json", "checkpoint.pt") if name not in found]
        if missing and found - {"config.json"}:  # which is alone if the process ended before its first checkpoint
            listed = ", ".join(sorted(found)[:4])
            raise SystemExit(
                f"{self.folder} holds {listed} but no {missing[0]}: expected nothing, or a run to go on from. "
                "Fix: --out another-folder, or delete that one."
            )

    def _refuse_another(self, found: dict[str, object]) -> None:
        free = {field.name for field in dataclasses.fields(self.config) if field.metadata["may_change"]}
        if self.config.schedule == "cosine":
            free -= {"epochs"}
        wanted = self.described
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

    def begin(self, epochs_done: float) -> None:
        """Note that training starts or goes on; a finished run is left as it is."""
        if epochs_done > self.config.epochs:
            raise SystemExit(
                f"{self.folder} has {epochs_done:g} epochs behind it, more than --epochs {self.config.epochs}. "
                "Fix: ask for more epochs, or --out another-folder."
            )
        summary = self.folder / "summary.json"
        self.is_finished = epochs_done == self.config.epochs and summary.exists()
        if self.workers.rank == 0:
            if self.is_finished:
                print(f"{self.folder} is finished already; delete it to run it anew")
            else:
                summary.unlink(missing_ok=True)
                write_whole(self.folder / "config.json", json.dumps(self.described, indent=2).encode())

    def load_checkpoint(self) -> dict | None:
        """The last checkpoint, checked to be this task's and this model's, or None."""
        path = self.folder / "checkpoint.pt"
        return read_checkpoint(path, self.task, self.config.model) if path.exists() else None

    def save_checkpoint(self, **state: object) -> None:
        """Write the checkpoint; only the first process does."""
        if self.workers.rank == 0:
            checkpoint = {"task": self.task, "model_name": self.config.model, **state}
            write_checkpoint(self.folder / "checkpoint.pt", checkpoint)

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
        if self.workers.rank == 0 and not self.is_finished:
            seconds = [row["seconds"] for row in self.rows]
            summary = {
                "task": self.task,
                "model": self.config.model,
                "parameters": count_parameters(model),
                **self.rows[-1],
                "seconds_per_epoch": statistics.median(seconds),
                **{
                    f"{name}_mean": sum(row[name] for row in self.rows) / len(seconds)
                    for name in ("nfe_forward", "nfe_backward")
                    if name in self.rows[0]  # of a task that solves ODEs
                },
                **extra,
                **environment(self.workers.device),
                "processes": self.workers.size,
                "runs_at_a_time": self.config.jobs or 1,
            }
            write_whole(self.folder / "summary.json", json.dumps(summary, indent=2).encode())
        if self.lock is not None:
            self.lock.release()
        if self.workers.size > 1:
            gc.collect()  # a DistributedDataParallel that outlives its group can hang in gloo's threads
            distributed.barrier()
            distributed.destroy_process_group()


def count_parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def environment(device: torch.device) -> dict[str, object]:
    """Where a run was made: versions, device, commit."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        git = subprocess.run(describe, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout
    except OSError:  # no git
        git = ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hbnode": hbnode.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "commit": git.strip() or "unknown",
        "command": " ".join(sys.argv[1:]),
    }


def _processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
