"""Trains several models and seeds in parallel, a process for each run."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tasks.common.config import TaskConfig

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

C = TypeVar("C", bound=TaskConfig)
PRELOADED = ["tasks.common.train"]  # imported once for all runs; it must start no thread of OpenMP


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
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
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
