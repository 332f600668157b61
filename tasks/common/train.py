"""The training loop of every task: it counts, reports, saves, and goes on where a killed run stopped.

One process trains on the CPU or on one GPU; ``torchrun --nproc-per-node=N -m tasks.X`` trains on several with torch's
DistributedDataParallel, each process on its share of every batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import signal
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm

import hbnode
from tasks.common.files import damaged
from tasks.common.run import Config, Run
from tasks.common.workers import Workers

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

EVAL_BATCH_SIZE = 512  # of the test data; the evaluations that a batch takes depend on it


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Training data made anew for every epoch.

    Attributes:
        samples: how many an epoch has.
        make: makes those of an epoch, counted from 0, of its number and the seed alone: a resumed run makes them again.
    """

    samples: int
    make: Callable[[int], Batch]


def fit(
    run: Run,
    model: nn.Module,
    train: Batch | Fresh,
    test: Batch,
    loss: Loss,
    *,
    every: int = 1,
    held_out: str = "test",
    optimizer: MakeOptimizer | None = None,
    after_step: Callable[[int], None] | None = None,
    best: str = "",
    eval_batch_size: int = EVAL_BATCH_SIZE,
) -> dict[str, float]:
    """Train for the configured epochs, from the last checkpoint if there is one; one row an epoch.

    Arguments:
        run: where to write; its rows are filled.
        model: trained in place.
        train: tensors of equal length, the training data, or how to make those of an epoch.
        test: the test data likewise, evaluated after every epoch.
        loss: (model, batch) -> the batch's mean loss, and further means to report.
        every: how many epochs between two printed lines.
        held_out: what the test data is called; "validation" where another set is the test.
        optimizer: makes the optimizer of the model; Adam if not given. The schedule multiplies each group's rate.
        after_step: called with the number of steps done after each of them; that it goes by this number, and not by
            its own count, is what makes a resumed run the same.
        best: a column, such as "validation_accuracy", whose best epoch's weights the model has in the end. The highest
            value is best of an accuracy, the lowest of all else. Empty: the last epoch's weights.
        eval_batch_size: samples of a batch of the test data.

    Returns:
        For the summary: ``best_epoch``, and the best value as ``best_`` and its name; nothing without ``best``.
    """
    trainer = _Trainer(run, model, train, loss, optimizer)
    test = tuple(x.to(run.workers.device) for x in test)
    run.begin(trainer.position / trainer.per_epoch)
    with interruptible() as interrupted, flushed_denormals(), trainer.bar:
        while trainer.position < trainer.total:
            is_last = trainer.step()
            if after_step is not None:
                after_step(trainer.position)
            if is_last:
                run.rows.append(trainer.row(evaluate(run, model, test, loss, held_out, eval_batch_size)))
                trainer.keep_best(best)
                if run.workers.rank == 0 and len(run.rows) % every == 0:
                    figures = "  ".join(f"{name} {value:.4g}" for name, value in run.rows[-1].items())
                    tqdm.write(f"{run.config.model}, seed {run.config.seed}: {figures}")
            wanted = run.workers.sum({"stop": float(interrupted()), "save": float(trainer.is_checkpoint_due())})
            if any(wanted.values()) or trainer.position in (trainer.per_epoch, trainer.total):
                trainer.save()  # before the first metrics, so that there are none without a checkpoint
            if is_last:
                run.write_metrics()
            if wanted["stop"] and trainer.position < trainer.total:
                trainer.bar.close()
                raise SystemExit(f"interrupted: saved to {run.folder}; the same command goes on from there")
    return trainer.restore_best(best)


class _Trainer:
    """A model, its optimizer and its place in the training data: all that a checkpoint holds."""

    def __init__(
        self, run: Run, model: nn.Module, train: Batch | Fresh, loss: Loss, optimizer: MakeOptimizer | None
    ) -> None:
        self.run, self.config, self.workers, self.loss = run, run.config, run.workers, loss
        self.loss_scale = self.config.loss_scale if isinstance(self.config, Config) else 1.0
        self.model = model.to(self.workers.device)
        self.optimizer = optimizer(model) if optimizer else torch.optim.Adam(model.parameters(), lr=self.config.lr)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.train = train if isinstance(train, Fresh) else Fresh(len(train[0]), lambda epoch: train)
        self.epoch = -1  # that the data is of
        self.data: Batch = ()
        self.per_epoch = -(-self.train.samples // self.config.batch_size)
        self.total = self.config.epochs * self.per_epoch
        self.position = 0  # batches done
        self.totals: dict[str, float] = {}  # sums over the epoch so far
        self.best: dict[str, typing.Any] = {}  # epoch, value and weights of the best so far
        self._resume()
        self.wrapped = self.workers.wrap(model)
        alone = self.workers.rank == 0 and multiprocessing.parent_process() is None
        hidden = None if alone else True  # one bar at a time, and on a terminal only
        self.bar = tqdm(total=self.total, initial=self.position, disable=hidden, unit="batch")
        self.saved = time.monotonic()

    def step(self) -> bool:
        """Train on one batch; whether it was the last of its epoch."""
        epoch, index = divmod(self.position, self.per_epoch)
        order = _order(self.config.seed, epoch, self.train.samples)
        batch, samples, weight = _share(self._of(epoch), order, index, self.config.batch_size, self.workers)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * _schedule(self.config.schedule, self.position, self.total)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with hbnode.count_nfe(self.wrapped) as nfe:
            try:
                value, means = self.loss(self.wrapped, batch)
                (value * weight * self.loss_scale).backward()
            except hbnode.SolverError as error:
                raise SystemExit(
                    f"epoch {epoch + 1}, batch {index + 1}: {type(error).__name__}: {error}. "
                    f"Fix: a smaller --lr, --clip 1, or another --tol; what was done is in {self.run.folder}"
                ) from error
        if self.loss_scale != 1:
            for p in self.model.parameters():
                p.grad = p.grad if p.grad is None else p.grad / self.loss_scale
        if self.config.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        if value.is_cuda:
            torch.cuda.synchronize(value.device)
        seconds = time.perf_counter() - start
        require_finite({"loss": value.item(), **means}, f"epoch {epoch + 1}, batch {index + 1}", self.run)
        counts = {"batches": 1, "nfe_forward": nfe.forward, "nfe_backward": nfe.backward, "seconds": seconds}
        _add(self.totals, _weighted(value, means, samples) | counts)
        self.position += 1
        shown = {"loss": f"{value.item():.4f}"}
        if isinstance(self.config, Config):
            mean = (self.totals[name] / self.totals["batches"] for name in ("nfe_forward", "nfe_backward"))
            shown["nfe"] = "/".join(f"{x:.0f}" for x in mean)
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        return index + 1 == self.per_epoch

    def _of(self, epoch: int) -> Batch:
        """The training data of an epoch."""
        if epoch != self.epoch:
            self.data = tuple(x.to(self.workers.device) for x in self.train.make(epoch))
            self.epoch = epoch
        return self.data

    def row(self, test: dict[str, float]) -> dict[str, float]:
        """The epoch's row of metrics.csv; evaluations are means per batch and process, seconds those of the steps."""
        totals = self.workers.sum(self.totals)
        self.totals = {}
        samples, batches = totals.pop("samples"), totals.pop("batches")
        forward, backward = (totals.pop(name) / batches for name in ("nfe_forward", "nfe_backward"))
        ratio = backward / forward if forward else 0.0  # a baseline has no ODE
        seconds = totals.pop("seconds") / self.workers.size
        means = {f"train_{name}": value / samples for name, value in totals.items()}
        costs = {"nfe_forward": forward, "nfe_backward": backward, "nfe_ratio": ratio}
        conditions = {"batch_size": samples / self.per_epoch, "loss_scale": self.loss_scale}
        of_odes = {**costs, **conditions} if isinstance(self.config, Config) else {}
        return {"epoch": self.position // self.per_epoch, **means, **test, **of_odes, "seconds": seconds}

    def keep_best(self, name: str) -> None:
        """Keep the weights if the last row is better than all before."""
        if not name:
            return
        value, sign = self.run.rows[-1][name], -1 if name.endswith("accuracy") else 1
        if not self.best or sign * value < sign * self.best["value"]:
            weights = {key: x.detach().clone() for key, x in self.model.state_dict().items()}
            self.best = {"epoch": self.run.rows[-1]["epoch"], "value": value, "model": weights}

    def restore_best(self, name: str) -> dict[str, float]:
        """Give the model the weights that were kept; what the summary says of them."""
        if not name:
            return {}
        self.model.load_state_dict(self.best["model"])
        return {"best_epoch": self.best["epoch"], f"best_{name}": self.best["value"]}

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
            best=self.best,
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
            self.best = checkpoint.get("best", {})  # older checkpoints have none
            self.run.rows, self.position = checkpoint["rows"], checkpoint["position"]
            self.totals = checkpoint["totals"] if self.workers.rank == 0 else {}  # summed over all when it was saved
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise SystemExit(damaged(self.run.folder / "checkpoint.pt", f"does not fit the model: {error}")) from error
        self.run.write_metrics()


def evaluate(
    run: Run, model: nn.Module, data: Batch, loss: Loss, name: str, batch_size: int = EVAL_BATCH_SIZE
) -> dict[str, float]:
    """Means over the test data, and of a task of ODEs the evaluations that a batch of it takes."""
    totals: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for index in range(-(-len(data[0]) // batch_size)):
            batch, samples, _ = _share(data, torch.arange(len(data[0])), index, batch_size, run.workers)
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
    means = {f"{name}_{key}": value / samples for key, value in totals.items()}
    require_finite(means, f"{name} data", run)
    return means | ({f"{name}_nfe": nfe / batches} if isinstance(run.config, Config) else {})


def require_finite(means: Mapping[str, float], where: str, run: Run) -> None:
    """End with a sentence that names what is not finite, and where."""
    for name, value in means.items():
        if not math.isfinite(value):
            raise SystemExit(
                f"{where}: {name} is {value}. Fix: a smaller --lr, or --clip 1, with another --out; what was done is "
                f"in {run.folder}"
            )


def _schedule(name: str, position: int, total: int) -> float:
    """The factor of the learning rate after so many of all steps."""
    factors = {
        "constant": 1.0,
        "cosine": (1 + math.cos(math.pi * position / total)) / 2,
        "step": 0.95 ** (position // 1000),
    }
    return factors[name]


def _weighted(value: Tensor, means: dict[str, float], samples: int) -> dict[str, float]:
    return {"samples": samples} | {k: v * samples for k, v in {"loss": value.item(), **means}.items()}


def _add(totals: dict[str, float], new: dict[str, float]) -> None:
    for name, value in new.items():
        totals[name] = totals.get(name, 0.0) + value


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of the samples in an epoch."""
    return torch.randperm(length, generator=epoch_generator(seed, epoch))


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of an epoch: of its number and the seed alone, so that a resumed run repeats them."""
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


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
def flushed_denormals() -> Iterator[None]:
    """Within it numbers below 1e-38 are zero: saturated gates make so many that an LSTM takes four times as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
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
