"""A run: its folder, how it resumes, the processes that train it, and several runs side by side."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, nn

import hbnode
from tasks.common import files
from tasks.common.config import TaskConfig, parse

C = TypeVar("C", bound=TaskConfig)
PRELOADED = ["tasks.common.train"]  # imported once for all runs; it must start no thread of OpenMP


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
        size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
        if device.startswith("cuda"):
            device = f"cuda:{local}" if size > 1 or device == "cuda" else device
            if torch.device(device).index >= torch.cuda.device_count():
                raise SystemExit(
                    f"{device} is not there: this machine has {torch.cuda.device_count()} CUDA devices. "
                    "Fix: --device cpu, or as many processes as devices."
                )
            torch.cuda.set_device(device)
        if size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(distributed.get_rank() if size > 1 else 0, size, torch.device(device))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to train: itself, or one whose gradients are averaged over the processes."""
        return model if self.size == 1 else nn.parallel.DistributedDataParallel(model)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the processes."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))


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
        self.lock = files.FolderLock(self.folder) if self.workers.rank == 0 else None
        self._refuse_others()
        torch.manual_seed(config.seed)

    def _refuse_others(self) -> None:
        """End if the folder holds what this run would overwrite and cannot go on from."""
        found = files.outputs(self.folder) if self.folder.exists() else set()
        if "config.json" in found:
            self._refuse_another(files.read_json(self.folder / "config.json"))
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
                files.write_json(self.folder / "config.json", self.described)

    def announce(self, model: nn.Module, name: str, *about: str) -> None:
        """Print what is trained and where it goes, and lines about it; only the first process does."""
        if self.workers.rank == 0:
            size = f"{count_parameters(model)} parameters"
            print(f"{name}, seed {self.config.seed}: {size}, writing to {self.folder}", *about, sep="\n")

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint, checked to be this task's and this model's, or None."""
        path = self.folder / "checkpoint.pt"
        return files.read_checkpoint(path, self.task, self.config.model) if path.exists() else None

    def save_checkpoint(self, **state: object) -> None:
        """Write the checkpoint; only the first process does."""
        if self.workers.rank == 0:
            checkpoint = {"task": self.task, "model_name": self.config.model, **state}
            files.write_checkpoint(self.folder / "checkpoint.pt", checkpoint)

    def write_metrics(self) -> None:
        """Write all rows so far to ``metrics.csv``."""
        if self.workers.rank == 0 and self.rows:
            files.write_table(self.folder / "metrics.csv", self.rows)

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
            files.write_json(self.folder / "summary.json", summary)
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


def write_study(folder: Path, name: str, rows: Sequence[Mapping[str, object]], **about: object) -> None:
    """Write the results of a study, its rows as ``name.csv`` and what there is to say of them as ``name.json``."""
    files.write_table(folder / f"{name}.csv", rows)
    files.write_json(folder / f"{name}.json", {**about, **environment(torch.device("cpu"))})


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Several runs


def command(
    kind: type[C], presets: Mapping[str, str], doc: str | None, train: Callable[[C], None]
) -> Callable[..., None]:
    """Return the ``main`` of a task, which trains what a command line says.

    Arguments:
        kind: options of the task.
        presets: see :func:`tasks.common.config.parse`.
        doc: what the help says.
        train: the task, a function at the top level of its module.
    """

    def main(argv: Sequence[str] | None = None) -> None:
        sweep(parse(kind, presets, doc, argv), train)

    return main


def sweep(config: C, train: Callable[[C], None]) -> None:
    """Train one model with one seed, or all that the options name.

    Each run has its own folder. A run that fails does not stop the others. When interrupted, the current runs save
    themselves and no further ones start.

    Arguments:
        config: options; ``model``, or what else the task sweeps over, may be "all" or several, and ``seeds`` more
            than 1.
        train: the task, a function at the top level of its module.
    """
    models = config.chosen()
    seeds = range(config.seed, config.seed + config.seeds)
    if len(models) * len(seeds) == 1:
        with stopped_by(signal.SIGINT):
            train(config.with_model(models[0]))
        return
    configs = [
        dataclasses.replace(config.with_model(model), seed=seed, seeds=1, out=_folder(config, model, seed))
        for seed in seeds
        for model in models
    ]
    failed = run_side_by_side(configs, train)
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} of {len(configs)} runs failed"]))


def run_side_by_side(configs: Sequence[C], train: Callable[[C], None]) -> list[str]:
    """Run all, as many at a time as their ``jobs`` says, one alone in this process; what is to be said of failures.

    Arguments:
        configs: one for each run, alike in ``jobs`` and ``device``.
        train: the task, a function at the top level of its module.
    """
    if len(configs) <= 1:
        with stopped_by(signal.SIGINT):
            for config in configs:
                train(config)
        return []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit("torchrun trains one model with one seed. Fix: no --seeds, and one --model.")
    device = configs[0].device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    jobs = min(configs[0].jobs or (1 if on_gpu else cores), len(configs))
    threads = max(1, min(torch.get_num_threads(), cores // jobs))
    return side_by_side([dataclasses.replace(config, jobs=jobs) for config in configs], train, jobs, threads)


def _folder(config: TaskConfig, model: str, seed: int) -> str:
    """Return the run's folder, in that of the command; empty leaves it to the task."""
    return str(Path(config.out) / f"{model}-seed{seed}") if config.out else ""


def side_by_side(configs: Sequence[C], train: Callable[[C], None], jobs: int, threads: int) -> list[str]:
    """Run all, ``jobs`` at a time; what is to be said of those that failed."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(PRELOADED)
    waiting, failed = list(reversed(configs)), []
    running: dict[Any, tuple[BaseProcess, TaskConfig]] = {}  # by what the system signals the end with
    with stopped_by(signal.SIGINT, signal.SIGTERM):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    config = waiting.pop()
                    process = context.Process(target=_run, args=(train, config, threads))
                    process.start()
                    running[process.sentinel] = process, config
                for sentinel in wait(list(running)):
                    ended, of = running.pop(sentinel)
                    ended.join()
                    if ended.exitcode:
                        killed = f"killed by signal {-ended.exitcode}"
                        why = killed if ended.exitcode < 0 else "failed, as said above"
                        failed.append(f"{of.label}, seed {of.seed}: {why}")
        finally:
            for other, _ in running.values():
                other.terminate()
            for other, _ in running.values():
                other.join()
    return failed


def _run(train: Callable[[C], None], config: C, threads: int) -> None:
    torch.set_num_threads(threads)
    with stopped_by(signal.SIGINT):
        train(config)


@contextmanager
def stopped_by(*numbers: int) -> Iterator[None]:
    """Let these signals interrupt what is within, and end with a sentence.

    They do so even where a shell had started the process in the background, and with SIGINT ignored.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on with what is not finished") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
