"""The training loop of every task: it counts, reports, saves, and goes on where a killed run stopped.

One process trains on the CPU or on one GPU; ``torchrun --nproc-per-node=N -m tasks.X`` trains on several with torch's
DistributedDataParallel, each process on its share of every batch.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import signal
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm

import hbnode
from tasks._run import Config, Run, damaged
from tasks._workers import Workers

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]

EVAL_BATCH_SIZE = 512  # of the test data; the evaluations that a batch takes depend on it


def fit(
    run: Run, model: nn.Module, train: Batch, test: Batch, loss: Loss, *, every: int = 1, held_out: str = "test"
) -> None:
    """Train with Adam for the configured epochs, from the last checkpoint if there is one; one row an epoch.

    Arguments:
        run: where to write; its rows are filled.
        model: trained in place.
        train: tensors of equal length, the training data.
        test: the test data likewise, evaluated after every epoch.
        loss: (model, batch) -> the batch's mean loss, and further means to report.
        every: how many epochs between two printed lines.
        held_out: what the test data is called; "validation" where another set is the test.
    """
    trainer = _Trainer(run, model, train, loss)
    test = tuple(x.to(run.workers.device) for x in test)
    run.begin(trainer.position / trainer.per_epoch)
    with _interruptible() as interrupted, trainer.bar:
        while trainer.position < trainer.total:
            if trainer.step():
                run.rows.append(trainer.row(evaluate(run, model, test, loss, held_out)))
                run.write_metrics()
                if run.workers.rank == 0 and len(run.rows) % every == 0:
                    figures = "  ".join(f"{name} {value:.4g}" for name, value in run.rows[-1].items())
                    tqdm.write(f"{run.config.model}, seed {run.config.seed}: {figures}")
            wanted = run.workers.sum({"stop": float(interrupted()), "save": float(trainer.is_checkpoint_due())})
            if any(wanted.values()) or trainer.position == trainer.total:
                trainer.save()
            if wanted["stop"] and trainer.position < trainer.total:
                trainer.bar.close()
                raise SystemExit(f"interrupted: saved to {run.folder}; the same command goes on from there")


class _Trainer:
    """A model, its optimizer and its place in the training data: all that a checkpoint holds."""

    def __init__(self, run: Run, model: nn.Module, train: Batch, loss: Loss) -> None:
        self.run, self.config, self.workers, self.loss = run, run.config, run.workers, loss
        self.model = model.to(self.workers.device)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.config.lr)
        self.train = tuple(x.to(self.workers.device) for x in train)
        self.per_epoch = -(-len(train[0]) // self.config.batch_size)
        self.total = self.config.epochs * self.per_epoch
        self.position = 0  # batches done
        self.totals: dict[str, float] = {}  # sums over the epoch so far
        self._resume()
        self.wrapped = self.workers.wrap(model)
        alone = self.workers.rank == 0 and multiprocessing.parent_process() is None
        hidden = None if alone else True  # one bar at a time, and on a terminal only
        self.bar = tqdm(total=self.total, initial=self.position, disable=hidden, unit="batch")
        self.saved = time.monotonic()

    def step(self) -> bool:
        """Train on one batch; whether it was the last of its epoch."""
        epoch, index = divmod(self.position, self.per_epoch)
        order = _order(self.config.seed, epoch, len(self.train[0]))
        batch, samples, weight = _share(self.train, order, index, self.config.batch_size, self.workers)
        for group in self.optimizer.param_groups:
            group["lr"] = _learning_rate(self.config, self.position, self.total)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with hbnode.count_nfe(self.wrapped) as nfe:
            try:
                value, means = self.loss(self.wrapped, batch)
                (value * weight * self.config.loss_scale).backward()
            except hbnode.SolverError as error:
                raise SystemExit(
                    f"epoch {epoch + 1}, batch {index + 1}: {type(error).__name__}: {error}. "
                    f"Fix: a smaller --lr, --clip 1, or another --tol; what was done is in {self.run.folder}"
                ) from error
        if self.config.loss_scale != 1:
            for p in self.model.parameters():
                p.grad = p.grad if p.grad is None else p.grad / self.config.loss_scale
        if self.config.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        if value.is_cuda:
            torch.cuda.synchronize(value.device)
        seconds = time.perf_counter() - start
        counts = {"batches": 1, "nfe_forward": nfe.forward, "nfe_backward": nfe.backward, "seconds": seconds}
        _add(self.totals, _weighted(value, means, samples) | counts)
        self.position += 1
        shown = "/".join(
            f"{self.totals[name] / self.totals['batches']:.0f}" for name in ("nfe_forward", "nfe_backward")
        )
        self.bar.set_postfix(loss=f"{value.item():.4f}", nfe=shown, refresh=False)
        self.bar.update()
        return index + 1 == self.per_epoch

    def row(self, test: dict[str, float]) -> dict[str, float]:
        """The epoch's row of metrics.csv; evaluations are means per batch and process, seconds those of the steps."""
        totals = self.workers.sum(self.totals)
        self.totals = {}
        samples, batches = totals.pop("samples"), totals.pop("batches")
        costs = {name: totals.pop(name) / batches for name in ("nfe_forward", "nfe_backward")}
        forward, backward = costs["nfe_forward"], costs["nfe_backward"]
        costs["nfe_ratio"] = backward / forward if forward else 0.0  # a baseline has no ODE
        seconds = totals.pop("seconds") / self.workers.size
        means = {f"train_{name}": value / samples for name, value in totals.items()}
        conditions = {"batch_size": samples / self.per_epoch, "loss_scale": self.config.loss_scale}
        epoch = self.position // self.per_epoch
        return {"epoch": epoch, **means, **test, **costs, **conditions, "seconds": seconds}

    def is_checkpoint_due(self) -> bool:
        """Whether enough time has passed, by the first process's clock."""
        return self.workers.rank == 0 and time.monotonic() - self.saved >= self.config.checkpoint_seconds

    def save(self) -> None:
        """Write a checkpoint; all processes call this together."""
        self.run.save_checkpoint(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            position=self.position,
            totals=self.workers.sum(self.totals) if self.totals else {},
            rows=self.run.rows,
            rng=torch.get_rng_state(),
        )
        self.saved = time.monotonic()

    def _resume(self) -> None:
        checkpoint = self.run.load_checkpoint()
        if checkpoint is None:
            return
        try:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            torch.set_rng_state(checkpoint["rng"])
            self.run.rows, self.position = checkpoint["rows"], checkpoint["position"]
            self.totals = checkpoint["totals"] if self.workers.rank == 0 else {}  # summed over all when it was saved
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise SystemExit(damaged(self.run.folder / "checkpoint.pt", f"does not fit the model: {error}")) from error
        self.run.write_metrics()


def evaluate(run: Run, model: nn.Module, data: Batch, loss: Loss, name: str) -> dict[str, float]:
    """Means over the test data, and the evaluations that a batch of it takes."""
    totals: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for index in range(-(-len(data[0]) // EVAL_BATCH_SIZE)):
            batch, samples, _ = _share(data, torch.arange(len(data[0])), index, EVAL_BATCH_SIZE, run.workers)
            with hbnode.count_nfe(model) as nfe:
                try:
                    value, means = loss(model, batch)
                except hbnode.SolverError as error:
                    raise SystemExit(
                        f"{name} data: {type(error).__name__}: {error}. Fix: a smaller --lr, --clip 1, or another "
                        f"--tol, with another --out; what was done is in {run.folder}"
                    ) from error
            _add(totals, _weighted(value, means, samples) | {"batches": 1, "nfe": nfe.forward})
    model.train()
    totals = run.workers.sum(totals)
    samples, batches, nfe = (totals.pop(key) for key in ("samples", "batches", "nfe"))
    return {f"{name}_{key}": value / samples for key, value in totals.items()} | {f"{name}_nfe": nfe / batches}


def _learning_rate(config: Config, position: int, total: int) -> float:
    factors = {
        "constant": 1.0,
        "cosine": (1 + math.cos(math.pi * position / total)) / 2,
        "step": 0.95 ** (position // 1000),
    }
    return config.lr * factors[config.schedule]


def _weighted(value: Tensor, means: dict[str, float], samples: int) -> dict[str, float]:
    return {"samples": samples} | {k: v * samples for k, v in {"loss": value.item(), **means}.items()}


def _add(totals: dict[str, float], new: dict[str, float]) -> None:
    for name, value in new.items():
        totals[name] = totals.get(name, 0.0) + value


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of the samples in an epoch: of the seed and the epoch alone, so that a resumed run repeats it."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def _share(data: Batch, order: Tensor, index: int, batch_size: int, workers: Workers) -> tuple[Batch, int, float]:
    """This process's part of a batch, how many samples of it count, and the weight of their mean loss.

    The mean over the processes of the weighted losses is the mean over the batch, however unequal the parts. A process
    left without a sample gets one that counts nothing, because all must take part in the averaging.
    """
    chosen = order[index * batch_size : (index + 1) * batch_size]
    part = chosen[workers.rank :: workers.size]
    samples = len(part)
    part = part if samples else chosen[:1]
    return tuple(x[part.to(x.device)] for x in data), samples, samples * workers.size / len(chosen)


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
