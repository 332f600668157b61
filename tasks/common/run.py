"""The folder of a run: its files, its checkpoint, how a run resumes from it, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import hbnode
from tasks.common.config import TaskConfig
from tasks.common.files import (
    FolderLock,
    outputs,
    read_checkpoint,
    read_json,
    write_checkpoint,
    write_json,
    write_table,
)
from tasks.common.workers import Workers


class Run:
    """A run folder: ``config.json``, ``metrics.csv``, ``summary.json``, ``checkpoint.pt``.

    How a run resumes: the same command finds the folder, ``config.json`` must have the same options, and the trainer
    continues from :meth:`load_checkpoint` in the middle of an epoch, with the numbers of an uninterrupted run.

    Files are written atomically. The constructor refuses a folder that another process writes to, or that holds a run
    with other options, parts of a run, or other files that might be overwritten.
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

    def begin(self, epochs_done: float, *, is_done: bool = False) -> None:
        """Note that training starts or goes on; a finished run is left as it is.

        Arguments:
            epochs_done: how many are behind it.
            is_done: whether nothing is left to do, though there may be fewer epochs than the options say.
        """
        if epochs_done > self.config.epochs:
            raise SystemExit(
                f"{self.folder} has {epochs_done:g} epochs behind it, more than --epochs {self.config.epochs}. "
                "Fix: ask for more epochs, or --out another-folder."
            )
        summary = self.folder / "summary.json"
        self.is_finished = (is_done or epochs_done == self.config.epochs) and summary.exists()
        if self.workers.rank == 0:
            if self.is_finished:
                print(f"{self.folder} is finished already; delete it to run it anew")
            else:
                summary.unlink(missing_ok=True)
                write_json(self.folder / "config.json", self.described)

    def announce(self, model: nn.Module, name: str, *about: str) -> None:
        """Print what is trained and where it goes, and lines about it; only the first process does."""
        if self.workers.rank == 0:
            size = f"{count_parameters(model)} parameters"
            print(f"{name}, seed {self.config.seed}: {size}, writing to {self.folder}", *about, sep="\n")

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint, checked to be this task's and this model's, or None."""
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
            write_table(self.folder / "metrics.csv", self.rows)

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
            write_json(self.folder / "summary.json", summary)
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
    """Return where a run was made: versions, device, commit."""
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
    """Return the processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
