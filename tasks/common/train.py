"""The training loop of every task. It counts evaluations, reports, saves, and resumes a run that was killed.

One process trains on the CPU or on one GPU. ``torchrun --nproc-per-node=N -m tasks.X`` trains on several with torch's
DistributedDataParallel, each process on its share of every batch. Tasks that compare optimizers have these by name:

- "adam": torch's.
- "soap": SOAP, Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv:2409.11321), from the package
  pytorch_optimizer, without weight decay. Its rate and moments are Adam's, so the comparison shows what curvature
  gains. It trains weights of any shape; Muon, in torch, trains matrices only.
- "hf": :class:`hbnode.optim.HessianFree`, with structural damping if the loss returns hidden states.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

import hbnode
from tasks.common.config import ODEConfig, TaskConfig, option
from tasks.common.run import Run, Workers

Samples = tuple[Tensor, ...]  # tensors of equal length: a batch, or all of a data set
Loss = Callable[[nn.Module, Samples], tuple[Tensor, dict[str, float]]]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
TEST_SEED = 2**62  # no training data has this seed
EVAL_BATCH_SIZE = 512  # of the test data; the evaluations of a batch depend on it
OPTIMIZER_TITLES = {"adam": "Adam", "soap": "SOAP", "hf": "HF"}
OPTIMIZERS = tuple(OPTIMIZER_TITLES)
Outputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Any]  # outputs, targets, and perhaps hidden states
LossName = Literal["mse", "bce", "cross_entropy"]
SILENT = -100.0  # a logit whose loss for the target 0 is exactly 0 in float32
PROGRESS = ("damping", "ratio", "cg_iterations", "step_length", "reduction")


def made_by(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    """Return a function that makes this optimizer of a model."""
    return lambda model: kind(model.parameters(), **options)


def clock(device: torch.device) -> float:
    """Return the time in seconds: processor time on a CPU, because other processes do not change it."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()


# Data


@dataclasses.dataclass(frozen=True)
class FreshData:
    """Training data that is new in every epoch.

    Attributes:
        samples: the samples of an epoch.
        make: returns the data of an epoch. It uses only the epoch's number, counted from 0, and the seed, so that a
            resumed run has the same data.
    """

    samples: int
    make: Callable[[int], Samples]


class Minibatch(typing.NamedTuple):
    """The data of one training step.

    Attributes:
        batch: the data, an argument of the loss.
        samples: the number of samples in this process, the weight of its means in the means of the epoch.
        weight: factor of the loss in the backward pass.
        rate: factor of the learning rate, multiplied with that of the schedule.
        length: how far the position in the training data advances.
        place: the name of the minibatch in messages.
    """

    batch: Samples
    samples: int
    weight: float
    rate: float
    length: int
    place: str


class TrainingData(typing.Protocol):
    """Training data in minibatches, which depend only on the epoch, the seed and the position.

    Attributes:
        unit: the unit of the position.
        per_epoch: the units of an epoch.
    """

    unit: str
    per_epoch: int

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return the minibatch that begins at this position of an epoch, counted from 0."""


class Batches:
    """Training data in batches, in a new order in every pass. Each process has a share of a batch.

    Arguments:
        run: its options have the batch size and the seed.
        train: the training data, or how to make those of a pass.
        per_epoch: the batches of an epoch, which may end within a pass; 0: a pass.
        rate: the factor of the learning rate in a step, counted from 0 over all epochs.
    """

    unit = "batch"

    def __init__(
        self, run: Run, train: Samples | FreshData, per_epoch: int = 0, rate: Callable[[int], float] = lambda step: 1.0
    ) -> None:
        self.config, self.workers, self.rate = run.config, run.workers, rate
        self.train = train if isinstance(train, FreshData) else FreshData(len(train[0]), lambda number: train)
        self.per_pass = -(-self.train.samples // self.config.batch_size)
        self.per_epoch = per_epoch or self.per_pass
        self.made = -1  # the number of the pass whose data is stored
        self.data: Samples = ()

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return this process's share of a batch."""
        step = epoch * self.per_epoch + start
        number, index = divmod(step, self.per_pass)
        if number != self.made:
            self.made, self.data = number, self.workers.to_device(self.train.make(number))
        order = _order(self.config.seed, number, self.train.samples)
        share = share_of_batch(self.data, order, index, self.config.batch_size, self.workers)
        return Minibatch(*share, rate=self.rate(step), length=1, place=f"batch {start + 1}")


def fresh_data(config: Any, draw: Callable[[int, torch.Generator], Samples]) -> tuple[FreshData, Samples]:
    """Return training data with ``iterations`` new batches in every epoch, and test data.

    Arguments:
        config: options, ``iterations``, ``batch_size``, ``seed`` and ``test_size`` among them.
        draw: draws samples, of their number and a generator.
    """
    samples = config.iterations * config.batch_size
    train = FreshData(samples, lambda epoch: draw(samples, epoch_generator(config.seed, epoch)))
    return train, draw(config.test_size, torch.Generator().manual_seed(TEST_SEED))


def accuracy(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the share of the labels with the highest score; scores have the classes in their last dimension."""
    return {"accuracy": (scores.argmax(-1) == labels).float().mean().item()}


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    """Return the order of the samples in an epoch."""
    return torch.randperm(length, generator=epoch_generator(seed, epoch))


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator that depends only on the seed and the epoch, so that a resumed run repeats its numbers."""
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def share_of_batch(
    data: Samples, order: Tensor, index: int, batch_size: int, workers: Workers
) -> tuple[Samples, int, float]:
    """Return this process's part of a batch, the number of its samples, and the weight of its mean loss.

    The mean of the weighted losses over the processes is the mean over the batch, even if the parts are unequal. A
    process without a sample gets one of weight 0, because every process must take part in the averaging.
    """
    chosen = order[index * batch_size : (index + 1) * batch_size]
    part = chosen[workers.rank :: workers.size]
    samples = len(part)
    part = part if samples else chosen[:1]
    return tuple(x[part.to(x.device)] for x in data), samples, samples * workers.size / len(chosen)


# Optimizers


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(TaskConfig):
    """Options of the tasks that compare optimizers."""

    positive = "damping max_cg"

    optimizer: str = option("adam", "adam, soap of pytorch_optimizer, or hf", OPTIMIZERS)
    curvature_size: int = option(0, "hf: samples of a batch for the curvature; 0: all")
    damping: float = option(0.1, "hf: initial lambda")
    min_damping: float = option(2e-4, "hf: the least lambda, which keeps structural damping on a plateau")
    structural_damping: float = option(1 / 30, "hf: mu, the factor of lambda on hidden states; 0: none")
    max_cg: int = option(300, "hf: steps of conjugate gradients in an iteration")

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], loss: LossName
    ) -> torch.optim.Optimizer:
        """Return the optimizer of these options.

        Arguments:
            parameters: the parameters to train, or groups of them.
            loss: the loss that a Hessian-free optimizer minimises.

        Raises:
            ImportError: if the optimizer is "soap" and pytorch_optimizer is not installed.
        """
        if self.optimizer == "hf":
            return hbnode.optim.HessianFree(
                parameters,
                loss=loss,
                damping=self.damping,
                min_damping=self.min_damping,
                structural_damping=self.structural_damping,
                max_cg=self.max_cg,
            )
        if self.optimizer == "soap":
            return _soap(parameters, self.lr)
        return torch.optim.Adam(parameters, lr=self.lr)

    def optimizer_of(self, loss: LossName) -> MakeOptimizer:
        """Return a function that makes the optimizer of a model; see :meth:`make_optimizer`."""
        return lambda model: self.make_optimizer(model.parameters(), loss)

    def check(self) -> None:
        """Raise an error if the options contradict each other, or if a package is missing."""
        super().check()
        if self.optimizer == "hf" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("--optimizer hf trains in one process. Fix: no torchrun.")
        if self.optimizer == "hf" and self.schedule != "constant":
            raise ValueError(
                f"--schedule {self.schedule} changes a learning rate, and hf has none. Fix: leave it out, or another "
                "--optimizer."
            )
        if self.optimizer == "hf" and self.damping < self.min_damping:
            raise ValueError(
                f"--damping must be at least --min-damping={self.min_damping:g}, got {self.damping:g}. Fix: a smaller "
                "--min-damping."
            )
        if self.optimizer == "soap":
            _soap([nn.Parameter(torch.zeros(1))], 1.0)


def _soap(parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """Return SOAP. Its package is imported only here, because it is optional."""
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise ImportError(
            f"soap needs the package pytorch_optimizer ({error}). Fix: pip install -e '.[peers]', or choose another "
            "--optimizer."
        ) from error
    return SOAP(parameters, lr=lr, weight_decay=0.0)


class Objective(abc.ABC):
    """A loss of outputs and targets, summed over features and steps and averaged over the samples.

    Attributes:
        loss: half the squared error, "mse"; "bce" of logits; or "cross_entropy" of scores, classes last.
        curvature_size: the samples of a batch, from its start, that a Hessian-free optimizer uses for the curvature;
            0: all.
    """

    loss: LossName

    def __init__(self, curvature_size: int = 0) -> None:
        self.curvature_size = curvature_size

    @abc.abstractmethod
    def parts(self, batch: Samples) -> tuple[Samples, Tensor, Tensor | None]:
        """Return the inputs of the model, the targets, and a mask of the targets without padding; None: no padding."""

    def outputs(self, model: nn.Module, batch: Samples, *, with_hidden: bool = False) -> Outputs:
        """Return the outputs of a batch and their targets. In padding the loss is zero.

        Arguments:
            model: the model.
            batch: samples, the first dimension of each tensor.
            with_hidden: whether to return hidden states too, for :meth:`hbnode.optim.HessianFree.step`.
        """
        inputs, targets, mask = self.parts(batch)
        outputs, hidden = cast(Any, model).with_hidden(*inputs) if with_hidden else (model(*inputs), None)
        if mask is not None:
            outputs = outputs.where(mask, targets if self.loss == "mse" else SILENT)
            hidden = hidden and (hidden[0], hidden[1] * mask)
        return (outputs, targets, hidden) if with_hidden else (outputs, targets)

    def means(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return further means to report over a batch."""
        return {}

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch, and further means."""
        outputs, targets, *_ = self.outputs(model, batch)
        return self.value(outputs, targets), self.means(outputs.detach(), targets)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of outputs."""
        if self.loss == "mse":
            total = (outputs - targets).square().sum() / 2
        elif self.loss == "bce":
            total = nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
        else:
            total = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
        return total / len(outputs)


def hessian_free_step(
    optimizer: hbnode.optim.HessianFree, model: nn.Module, batch: Samples, objective: Objective
) -> tuple[Tensor, dict[str, float]]:
    """Take a step, and return the loss before it and the optimizer's progress.

    Arguments:
        optimizer: the optimizer.
        model: trained in place.
        batch: samples for the loss and its gradient.
        objective: the loss.
    """
    with_hidden = any(group["structural_damping"] > 0 for group in optimizer.param_groups)
    part = tuple(x[: objective.curvature_size] for x in batch)
    loss = optimizer.step(
        lambda: objective.outputs(model, batch, with_hidden=with_hidden),
        (lambda: objective.outputs(model, part, with_hidden=with_hidden)) if 0 < len(part[0]) < len(batch[0]) else None,
    )
    return loss, {name: float(getattr(optimizer.progress, name)) for name in PROGRESS}


# The loop


class Diverged(SystemExit):
    """A loss or another number of a run is not finite."""


def fit(
    run: Run,
    model: nn.Module,
    train: Samples | FreshData,
    test: Samples,
    loss: Loss,
    *,
    held_out: str = "test",
    optimizer: MakeOptimizer | None = None,
    eval_batch_size: int = EVAL_BATCH_SIZE,
    **options: Any,
) -> dict[str, float]:
    """Train for the configured epochs on shuffled batches, from the last checkpoint if there is one.

    Arguments:
        run: the folder; its rows are filled, one per epoch.
        model: trained in place.
        train: tensors of equal length, the training data, or how to make those of an epoch.
        test: the test data, evaluated after every epoch.
        loss: (model, batch) -> the batch's mean loss, and further means to report.
        held_out: the name of the test data; "validation" if another set is the test.
        optimizer: makes the optimizer of the model; Adam if not given. The schedule multiplies each group's rate.
        eval_batch_size: samples of a batch of the test data.
        options: of :meth:`Trainer.fit`.

    Returns:
        The result of :meth:`Trainer.fit`.
    """
    trainer = Trainer(run, model, Batches(run, train), loss, optimizer)
    return trainer.fit(lambda: evaluate(run, model, test, loss, held_out, eval_batch_size), **options)


def fit_and_test(
    trainer: Trainer,
    data: Mapping[str, Samples],
    name: str,
    best: str,
    batch_size: int = EVAL_BATCH_SIZE,
    **options: Any,
) -> dict[str, float]:
    """Train, test the weights of the best epoch by validation once, and return both results for the summary.

    Arguments:
        trainer: the trainer.
        data: "validation" and "test".
        name: the name of the model in the printed result.
        best: the mean that selects the epoch, such as "accuracy".
        batch_size: samples of a batch of these data.
        options: of :meth:`Trainer.fit`.
    """
    run, model, loss = trainer.run, trainer.model, trainer.loss
    held_out = functools.partial(evaluate, run, model, data["validation"], loss, "validation", batch_size)
    found = trainer.fit(held_out, best=f"validation_{best}", **options)
    if not run.is_finished:
        found |= evaluate(run, model, data["test"], loss, "test", batch_size)
        if run.workers.rank == 0:
            print(f"{name}: test {best} {found[f'test_{best}']:.4g}, epoch {found['best_epoch']}")
    return found


class Trainer:
    """A model, its optimizer and its position in the training data: the content of a checkpoint.

    Arguments:
        run: the folder; its rows are filled.
        model: trained in place.
        data: the training data.
        loss: (model, batch) -> the batch's mean loss, and further means to report. If they have a "loss", it is
            reported instead of the loss that is differentiated.
        optimizer: makes the optimizer of the model; Adam if not given.
        parts: further parts of a checkpoint by name, each with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        data: TrainingData,
        loss: Loss,
        optimizer: MakeOptimizer | None = None,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        self.run, self.config, self.workers, self.data, self.loss = run, run.config, run.workers, data, loss
        self.model = model.to(self.workers.device)
        self.optimizer = optimizer(model) if optimizer else torch.optim.Adam(model.parameters(), lr=self.config.lr)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **(parts or {})}
        self.rates = [group.get("lr") for group in self.optimizer.param_groups]  # HessianFree has none
        self.total = self.config.epochs * data.per_epoch
        self.position = 0  # units of the training data that are done
        self.totals: Any = Counter()  # sums over the epoch so far
        self.best: dict[str, Any] = {}  # epoch, value and weights of the best epoch so far
        self._resume()
        self.wrapped = self.workers.wrap(model)
        alone = self.workers.rank == 0 and multiprocessing.parent_process() is None
        hidden = None if alone else True  # one bar at a time, and only on a terminal
        self.bar = tqdm(total=self.total, initial=self.position, disable=hidden, unit=data.unit)
        self.saved = time.monotonic()

    def fit(
        self,
        validate: Callable[[], dict[str, float]],
        *,
        every: int = 1,
        after_step: Callable[[int], object] | None = None,
        best: str = "",
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
        stop: Callable[[Sequence[Mapping[str, float]]], bool] = lambda rows: False,
    ) -> dict[str, float]:
        """Train until the configured epochs are done, with one row of metrics per epoch.

        Arguments:
            validate: called after every epoch, returns the columns of the row that are not means over training data.
            every: the epochs between two printed lines.
            after_step: called after each step with the position. It should depend on this number and not on a count of
                its own, so that a resumed run is equal.
            best: a column, such as "validation_accuracy". In the end the model has the weights of its best epoch: the
                largest accuracy or BLEU, the smallest value of other columns. Empty: those of the last epoch.
            weights: a context in which the model has the weights to validate and store, if these are not the trained
                ones.
            stop: called with the rows so far, returns whether to end the training.

        Returns:
            ``best_epoch``, and the best value as ``best_`` and its name; nothing without ``best``.
        """
        run, per_epoch = self.run, self.data.per_epoch
        if run.rows and stop(run.rows):
            self.total = self.position
        run.begin(self.position / per_epoch, is_done=self.position == self.total)
        with interruptible() as interrupted, flushed_denormals(), self.bar:
            while self.position < self.total:
                is_last = self.step()
                if after_step is not None:
                    after_step(self.position)
                if is_last:
                    with weights():
                        run.rows.append(self.row(validate()))
                        self.keep_best(best)
                    if stop(run.rows):
                        self.total = self.position
                    if self.workers.rank == 0 and len(run.rows) % every == 0:
                        figures = "  ".join(f"{name} {value:.4g}" for name, value in run.rows[-1].items())
                        tqdm.write(f"{self.config.label}, seed {self.config.seed}: {figures}")
                wanted = self.workers.sum({"stop": float(interrupted()), "save": float(self.is_checkpoint_due())})
                if any(wanted.values()) or self.position in (per_epoch, self.total):
                    self.save()  # before the metrics, so that a killed run has no metrics without a checkpoint
                if is_last:
                    run.write_metrics()
                if wanted["stop"] and self.position < self.total:
                    self.bar.close()
                    raise SystemExit(f"interrupted: saved to {run.folder}; the same command goes on from there")
        return self.restore_best(best)

    def step(self) -> bool:
        """Train on one minibatch, and return whether it was the last of its epoch."""
        epoch, start = divmod(self.position, self.data.per_epoch)
        minibatch = self.data.minibatch(epoch, start)
        where = f"epoch {epoch + 1}, {minibatch.place}"
        factor = minibatch.rate * _schedule(self.config.schedule, self.position, self.total)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor
        begun = clock(self.workers.device)
        with hbnode.count_nfe(self.wrapped) as nfe, failures_named(where, self.run):
            value, means = self.update(minibatch)
        if value.is_cuda:
            torch.cuda.synchronize(value.device)
        seconds = clock(self.workers.device) - begun
        means = {"loss": value.item(), **means}
        require_finite({name: value for name, value in means.items() if name not in PROGRESS}, where, self.run)
        counts = {"batches": 1, "nfe_forward": nfe.forward, "nfe_backward": nfe.backward, "seconds": seconds}
        self.totals.update(_weighted(means, minibatch.samples) | counts)
        self.position += minibatch.length
        shown = {"loss": f"{means['loss']:.4f}", **{name: f"{means[name]:.3g}" for name in PROGRESS if name in means}}
        if isinstance(self.config, ODEConfig):
            mean = (self.totals[name] / self.totals["batches"] for name in ("nfe_forward", "nfe_backward"))
            shown["nfe"] = "/".join(f"{x:.0f}" for x in mean)
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(minibatch.length)
        return self.position % self.data.per_epoch == 0

    def update(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, float]]:
        """Take a step of the optimizer, and return the loss before it and further means."""
        if isinstance(self.optimizer, hbnode.optim.HessianFree) and isinstance(self.loss, Objective):
            return hessian_free_step(self.optimizer, self.model, minibatch.batch, self.loss)
        self.optimizer.zero_grad()
        value, means = self.loss(self.wrapped, minibatch.batch)
        (value * minibatch.weight).backward()
        if self.config.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return value, means

    def row(self, test: dict[str, float]) -> dict[str, float]:
        """Return a row of metrics.csv. Evaluations are means per batch and process; seconds are those of the steps."""
        totals = self.workers.sum(self.totals)
        self.totals = Counter()
        samples, batches = totals.pop("samples"), totals.pop("batches")
        forward, backward = (totals.pop(name) / batches for name in ("nfe_forward", "nfe_backward"))
        ratio = backward / forward if forward else 0.0  # a baseline has no ODE
        seconds = totals.pop("seconds") / self.workers.size
        means = {name if name in PROGRESS else f"train_{name}": value / samples for name, value in totals.items()}
        costs = {"nfe_forward": forward, "nfe_backward": backward, "nfe_ratio": ratio}
        of_odes = costs | {"batch_size": samples / self.data.per_epoch} if isinstance(self.config, ODEConfig) else {}
        return {"epoch": self.position // self.data.per_epoch, **means, **test, **of_odes, "seconds": seconds}

    def keep_best(self, name: str) -> None:
        """Store the weights if the last row is the best one."""
        if not name:
            return
        value, sign = self.run.rows[-1][name], -1 if name.endswith(("accuracy", "bleu")) else 1
        if not self.best or sign * value < sign * self.best["value"]:
            weights = {key: x.detach().clone() for key, x in self.model.state_dict().items()}
            self.best = {"epoch": self.run.rows[-1]["epoch"], "value": value, "model": weights}

    def restore_best(self, name: str) -> dict[str, float]:
        """Load the stored weights into the model, and return their epoch and value."""
        if not name:
            return {}
        self.model.load_state_dict(self.best["model"])
        return {"best_epoch": self.best["epoch"], f"best_{name}": self.best["value"]}

    def is_checkpoint_due(self) -> bool:
        """Return whether enough time has passed, by the first process's clock."""
        return self.workers.rank == 0 and time.monotonic() - self.saved >= self.config.checkpoint_seconds

    def save(self) -> None:
        """Write a checkpoint; all processes call this together."""
        device = self.workers.device
        self.run.save_checkpoint(
            **{name: part.state_dict() for name, part in self.parts.items()},
            position=self.position,
            totals=dict(self.workers.sum(self.totals)) if self.totals else {},
            rows=self.run.rows,
            best=self.best,
            rng=torch.get_rng_state(),
            device_rng=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )
        self.saved = time.monotonic()

    def _resume(self) -> None:
        checkpoint = self.run.load_checkpoint()
        if checkpoint is None:
            return
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["rng"])
        if checkpoint["device_rng"] is not None and self.workers.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint["device_rng"], self.workers.device)
        self.best = checkpoint["best"]
        self.run.rows, self.position = checkpoint["rows"], checkpoint["position"]
        self.totals = Counter(checkpoint["totals"] if self.workers.rank == 0 else {})  # they are sums over processes
        self.run.write_metrics()


def evaluate(
    run: Run, model: nn.Module, data: Samples, loss: Loss, name: str, batch_size: int = EVAL_BATCH_SIZE
) -> dict[str, float]:
    """Return means over the test data, and in tasks with ODEs the evaluations per batch."""
    counter: Any = Counter()
    model.eval()
    with torch.no_grad():
        for index in range(-(-len(data[0]) // batch_size)):
            batch, samples, _ = share_of_batch(data, torch.arange(len(data[0])), index, batch_size, run.workers)
            with hbnode.count_nfe(model) as nfe, failures_named(f"{name} data", run):
                value, means = loss(model, run.workers.to_device(batch))
            counter.update(_weighted({"loss": value.item(), **means}, samples) | {"batches": 1, "nfe": nfe.forward})
    model.train()
    totals = dict(run.workers.sum(counter))
    seen, batches, evaluations = (totals.pop(key) for key in ("samples", "batches", "nfe"))
    means = {f"{name}_{key}": value / seen for key, value in totals.items()}
    require_finite(means, f"{name} data", run)
    return means | ({f"{name}_nfe": evaluations / batches} if isinstance(run.config, ODEConfig) else {})


@contextmanager
def failures_named(where: str, run: Run) -> Iterator[None]:
    """End the process with a message that names the place if a solver or an optimizer fails."""
    try:
        yield
    except hbnode.SolverError as error:
        raise SystemExit(
            f"{where}: {type(error).__name__}: {error}. Fix: a smaller --lr, --clip 1, or another --tol, with another "
            f"--out; what was done is in {run.folder}"
        ) from error
    except FloatingPointError as error:  # raised by HessianFree
        raise Diverged(f"{where}: {error} What was done is in {run.folder}") from error


def require_finite(means: Mapping[str, float], where: str, run: Run) -> None:
    """Raise Diverged with the name and the place of a number that is not finite."""
    for name, value in means.items():
        if not math.isfinite(value):
            raise Diverged(
                f"{where}: {name} is {value}. Fix: a smaller --lr, or --clip 1, with another --out; what was done is "
                f"in {run.folder}"
            )


def _schedule(name: str, position: int, total: int) -> float:
    """Return the factor of the learning rate at a position of the whole training."""
    factors = {
        "constant": 1.0,
        "cosine": (1 + math.cos(math.pi * position / total)) / 2,
        "step": 0.95 ** (position // 1000),
    }
    return factors[name]


def _weighted(means: dict[str, float], samples: int) -> dict[str, float]:
    return {"samples": samples} | {name: mean * samples for name, mean in means.items()}


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Round numbers below 1e-38 to zero. With them, an LSTM with saturated gates takes four times as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived. A second signal ends the process at once."""
    received = []

    def note(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
