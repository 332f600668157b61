"""The training loop of every task: it counts, reports, saves, and goes on where a killed run stopped.

One process trains on the CPU or on one GPU; ``torchrun --nproc-per-node=N -m tasks.X`` trains on several with torch's
DistributedDataParallel, each process on its share of every batch.
"""

from __future__ import annotations

import functools
import math
import signal
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm

import hbnode
from tasks._run import Config, Run, Workers

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]


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
            totals=workers.sum(totals) if totals else {},
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
            due = workers.rank == 0 and time.monotonic() - saved >= config.checkpoint_seconds
            wanted = workers.sum({"stop": float(interrupted()), "save": float(due)})
            done = position == config.epochs * per_epoch
            if done or any(wanted.values()):
                save()
            if wanted["stop"] and not done:
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


@functools.lru_cache(maxsize=1)
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
    return checkpoint["position"], checkpoint["totals"] if run.workers.rank == 0 else {}  # already summed over all


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
