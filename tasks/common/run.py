"""Run folders, resuming of runs, distributed training, and several runs at the same time."""

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
from torch import Tensor, distributed, nn

import hbnode
from tasks.common import files
from tasks.common.config import TaskConfig, parse

C = TypeVar("C", bound=TaskConfig)
PRELOADED = ["tasks.common.train"]  # imported once for all processes; the import must not start OpenMP threads
RESULTS = ("checkpoint.pt", "metrics.csv", "summary.json")
OTHER_FOLDER = "Fix: --out another-folder, or delete that one."


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that train one model in data-parallel training.

    Attributes:
        rank: the rank of this process.
        size: the number of processes.
        device: the device of this process.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> Workers:
        """Join the process group if torchrun started this process.

        Arguments:
            device: "cpu", "cuda", or "auto" for CUDA if it is available.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
        if device.startswith("cuda"):
            device = f"cuda:{local}" if size > 1 or device == "cuda" else device
            torch.cuda.set_device(device)
        if size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(distributed.get_rank() if size > 1 else 0, size, torch.device(device))

    def to_device(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors on this process's device."""
        return tuple(x.to(self.device) for x in tensors)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train. With several processes it is a module that averages the gradients over them."""
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

    Repeating a command resumes its run: it finds the folder, and checks that ``config.json`` has the same options. The
    trainer continues from the last checkpoint, even within an epoch. The results equal those of an uninterrupted run.

    Arguments:
        task: name of the task.
        config: options of the task.
        label: name of the folder in ``runs/task``. It is not used if ``config.out`` names a folder.

    Raises:
        SystemExit: if the folder contains a run with other options, or results without a checkpoint.
    """

    def __init__(self, task: str, config: TaskConfig, label: str) -> None:
        self.task = task
        self.config = config
        self.workers = Workers.join(config.device)
        self.folder = Path(config.out or Path("runs") / task / label)
        self.rows: list[dict[str, float]] = []
        self.is_finished = False
        self.described = {"task": task, **dataclasses.asdict(config), "processes": self.workers.size}
        if (self.folder / "config.json").exists():
            self._check_options(files.read_json(self.folder / "config.json"))
        found = [name for name in RESULTS if (self.folder / name).exists()]
        missing = [name for name in ("config.json", "checkpoint.pt") if not (self.folder / name).exists()]
        if found and missing:
            raise SystemExit(f"{self.folder} holds {', '.join(found)} but no {missing[0]}. {OTHER_FOLDER}")
        torch.manual_seed(config.seed)

    def _check_options(self, found: dict[str, object]) -> None:
        free = {field.name for field in dataclasses.fields(self.config) if field.metadata["may_change"]}
        if self.config.schedule == "cosine":
            free -= {"epochs"}
        changed = [
            f"{name}: {found.get(name)!r} there, {self.described.get(name)!r} wanted"
            for name in sorted((found.keys() | self.described.keys()) - free)
            if found.get(name) != self.described.get(name)
        ]
        if changed:
            raise SystemExit(f"{self.folder} holds a different run ({', '.join(changed)}). {OTHER_FOLDER}")

    def begin(self, epochs_done: float, *, is_done: bool = False) -> None:
        """Write ``config.json`` before the training, unless the run is finished.

        Arguments:
            epochs_done: number of epochs trained so far.
            is_done: whether the run has ended before the configured number of epochs.
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
        """Print the model's name and size, the folder, and further lines. Only the first process prints."""
        if self.workers.rank == 0:
            size = f"{count_parameters(model)} parameters"
            print(f"{name}, seed {self.config.seed}: {size}, writing to {self.folder}", *about, sep="\n")

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint, or None if there is none."""
        path = self.folder / "checkpoint.pt"
        return files.read_tensors(path) if path.exists() else None

    def save_checkpoint(self, **state: object) -> None:
        """Write the checkpoint. Only the first process writes."""
        if self.workers.rank == 0:
            files.write_tensors(self.folder / "checkpoint.pt", state)

    def write_metrics(self) -> None:
        """Write all rows of metrics so far to ``metrics.csv``."""
        if self.workers.rank == 0 and self.rows:
            files.write_table(self.folder / "metrics.csv", self.rows)

    def finish(self, model: nn.Module, **extra: object) -> None:
        """Write ``summary.json``: the last row of metrics, further results, the model's size, and the machine."""
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
                    if name in self.rows[0]  # only tasks with ODEs have these columns
                },
                **extra,
                **environment(self.workers.device),
                "processes": self.workers.size,
                "runs_at_a_time": self.config.jobs or 1,
            }
            files.write_json(self.folder / "summary.json", summary)
        if self.workers.size > 1:
            gc.collect()  # a DistributedDataParallel that outlives its group can hang in gloo's threads
            distributed.barrier()
            distributed.destroy_process_group()


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def environment(device: torch.device) -> dict[str, object]:
    """Return a dictionary with the versions, the device, the git commit and the command of this process."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        git = subprocess.run(describe, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout
    except OSError:  # git is not installed
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
    """Write the rows of a study as ``name.csv``, and its other results as ``name.json``."""
    files.write_table(folder / f"{name}.csv", rows)
    files.write_json(folder / f"{name}.json", {**about, **environment(torch.device("cpu"))})


def _processor() -> str:
    """Return the name of the processor, or an empty string if it is unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Several runs


def command(
    kind: type[C], presets: Mapping[str, str], doc: str | None, train: Callable[[C], None]
) -> Callable[..., None]:
    """Return the ``main`` function of a task, which parses a command line and trains the selected models.

    Arguments:
        kind: class of the task's options.
        presets: see :func:`tasks.common.config.parse`.
        doc: text at the start of the help.
        train: the task, a function at the top level of its module.
    """

    def main(argv: Sequence[str] | None = None) -> None:
        sweep(parse(kind, presets, doc, argv), train)

    return main


def sweep(config: C, train: Callable[[C], None]) -> None:
    """Train every model with every seed that the options name.

    Each run has its own folder. A run that fails does not stop the others. After an interrupt the current runs save
    their state and no further run starts.

    Arguments:
        config: the options.
        train: the task, a function at the top level of its module.
    """
    models = config.chosen()
    seeds = range(config.seed, config.seed + config.seeds)
    if len(models) * len(seeds) == 1:
        run_here(config.with_model(models[0]), train)
        return
    configs = [
        dataclasses.replace(
            config.with_model(model),
            seed=seed,
            seeds=1,
            out=str(Path(config.out) / f"{model}-seed{seed}") if config.out else "",  # "": the task names it
        )
        for seed in seeds
        for model in models
    ]
    failed = run_side_by_side(configs, train)
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} of {len(configs)} runs failed"]))


def run_here(config: C, train: Callable[[C], None], threads: int = 0) -> None:
    """Train one model in this process. Errors in data, files or options end the process with their message.

    Arguments:
        config: the options.
        train: the function that trains a model.
        threads: number of torch threads; 0: unchanged.
    """
    if threads:
        torch.set_num_threads(threads)
    with stopped_by(signal.SIGINT), files.exit_on(OSError, ImportError, ValueError):
        train(config)


def run_side_by_side(configs: Sequence[C], train: Callable[[C], None]) -> list[str]:
    """Train each configuration in a separate process, and return a message for each run that failed.

    Arguments:
        configs: one configuration for each run. All have the same ``device`` and the same ``jobs``, the largest number
            of simultaneous runs. A single configuration is trained in this process.
        train: the task, a function at the top level of its module.
    """
    if len(configs) <= 1:
        for config in configs:
            run_here(config, train)
        return []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit("torchrun trains one model with one seed. Fix: no --seeds, and one --model.")
    device = configs[0].device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    jobs = min(configs[0].jobs or (1 if on_gpu else cores), len(configs))
    threads = max(1, min(torch.get_num_threads(), cores // jobs))
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(PRELOADED)
    waiting, failed = [dataclasses.replace(config, jobs=jobs) for config in reversed(configs)], []
    running: dict[Any, tuple[BaseProcess, C]] = {}  # the key is a handle that becomes ready when the process ends
    with stopped_by(signal.SIGINT, signal.SIGTERM):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    config = waiting.pop()
                    process = context.Process(target=run_here, args=(config, train, threads))
                    process.start()
                    running[process.sentinel] = process, config
                for sentinel in wait(list(running)):
                    process, config = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        killed = f"killed by signal {-process.exitcode}"
                        why = killed if process.exitcode < 0 else "failed, as said above"
                        failed.append(f"{config.label}, seed {config.seed}: {why}")
        finally:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.join()
    return failed


@contextmanager
def stopped_by(*numbers: int) -> Iterator[None]:
    """End the process with a message when it receives one of these signals.

    SIGINT has this effect even if it was ignored before, as in processes that a shell starts in the background.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on with what is not finished") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
