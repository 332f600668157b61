"""The training loop of all tasks. It counts function evaluations, reports metrics, and saves and resumes runs.

One process trains on the CPU or on one GPU. ``torchrun --nproc-per-node=N -m tasks.X`` trains on N GPUs with
DistributedDataParallel, where each process has a part of every batch. Tasks that compare optimizers offer these:

- "adam": torch.optim.Adam.
- "soap": SOAP, Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv:2409.11321), from the package
  pytorch_optimizer, without weight decay. It has the same learning rate and moment decays as Adam, so the comparison
  shows the effect of the preconditioner. It trains weights of any shape, while torch's Muon trains only matrices.
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

Samples = tuple[Tensor, ...]  # tensors of equal length, which are a batch or a whole data set
Loss = Callable[[nn.Module, Samples], tuple[Tensor, dict[str, float]]]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
TEST_SEED = 2**62  # a seed that training data never uses
EVAL_BATCH_SIZE = 512  # batch size for test data, which affects the number of function evaluations
OPTIMIZER_TITLES = {"adam": "Adam", "soap": "SOAP", "hf": "HF"}
OPTIMIZERS = tuple(OPTIMIZER_TITLES)
Outputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Any]  # outputs, targets, and optionally hidden states
LossName = Literal["mse", "bce", "cross_entropy"]
SILENT = -100.0  # a logit whose loss for the target 0 is exactly 0 in float32
PROGRESS = ("damping", "ratio", "cg_iterations", "step_length", "reduction")


def made_by(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    """Return a function that makes this kind of optimizer for a model's parameters."""
    return lambda model: kind(model.parameters(), **options)


def clock(device: torch.device) -> float:
    """Return the time in seconds: processor time on a CPU, because other processes do not change it."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()


# Data


@dataclasses.dataclass(frozen=True)
class FreshData:
    """Training data that are newly drawn in every epoch.

    Attributes:
        samples: number of samples in an epoch.
        make: function that returns the data of an epoch. They depend only on the index of the epoch and on the seed, so
            that a resumed run has the same data.
    """

    samples: int
    make: Callable[[int], Samples]


class Minibatch(typing.NamedTuple):
    """The data of one training step.

    Attributes:
        batch: the data that the loss takes as its argument.
        samples: number of samples in this process. It weights the metrics of this batch in the means over the epoch.
        weight: factor by which the loss is multiplied before the backward pass.
        rate: factor of the learning rate, in addition to that of the schedule.
        length: number of units by which the position in the training data advances.
        place: name of the minibatch in error messages.
    """

    batch: Samples
    samples: int
    weight: float
    rate: float
    length: int
    place: str


class TrainingData(typing.Protocol):
    """Training data as a sequence of minibatches that depend only on the epoch, the seed and the position.

    Attributes:
        unit: name of the unit in which positions are counted.
        per_epoch: number of units in an epoch.
    """

    unit: str
    per_epoch: int

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return the minibatch that begins at this position of an epoch, counted from 0."""


class Batches:
    """Training data in batches, shuffled before every pass. Each process gets a part of every batch.

    Arguments:
        run: the run, whose options contain the batch size and the seed.
        train: the training data, or a FreshData that makes new data for every pass.
        per_epoch: number of batches in an epoch, which may end in the middle of a pass; 0: one whole pass.
        rate: function from the index of a step, counted over all epochs, to a factor of the learning rate.
    """

    unit = "batch"

    def __init__(
        self, run: Run, train: Samples | FreshData, per_epoch: int = 0, rate: Callable[[int], float] = lambda step: 1.0
    ) -> None:
        self.config, self.workers, self.rate = run.config, run.workers, rate
        self.train = train if isinstance(train, FreshData) else FreshData(len(train[0]), lambda number: train)
        self.per_pass = -(-self.train.samples // self.config.batch_size)
        self.per_epoch = per_epoch or self.per_pass
        self.made = -1  # index of the pass whose data are in memory
        self.data: Samples = ()

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return this process's part of a batch."""
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
        config: options, which include ``iterations``, ``batch_size``, ``seed`` and ``test_size``.
        draw: function of a number of samples and a random generator that returns the samples.
    """
    samples = config.iterations * config.batch_size
    train = FreshData(samples, lambda epoch: draw(samples, epoch_generator(config.seed, epoch)))
    return train, draw(config.test_size, torch.Generator().manual_seed(TEST_SEED))


def accuracy(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the share of samples whose label has the highest score. The last dimension of the scores is the class."""
    return {"accuracy": (scores.argmax(-1) == labels).float().mean().item()}


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    """Return the shuffled order of the samples in an epoch."""
    return torch.randperm(length, generator=epoch_generator(seed, epoch))


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a random generator seeded by the seed and the epoch only, so that resumed runs are reproducible."""
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def share_of_batch(
    data: Samples, order: Tensor, index: int, batch_size: int, workers: Workers
) -> tuple[Samples, int, float]:
    """Return this process's part of a batch, its number of samples, and the weight of its mean loss.

    The weighted losses, averaged over the processes, are the mean loss of the batch, even if the parts differ in size.
    A process without samples gets one sample of weight 0, because every process must take part in averaging gradients.
    """
    chosen = order[index * batch_size : (index + 1) * batch_size]
    part = chosen[workers.rank :: workers.size]
    samples = len(part)
    part = part if samples else chosen[:1]
    return tuple(x[part.to(x.device)] for x in data), samples, samples * workers.size / len(chosen)


# Optimizers


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(TaskConfig):
    """Command-line options of tasks that compare optimizers."""

    positive = "damping max_cg"

    optimizer: str = option("adam", "adam, soap (from pytorch_optimizer), or hf (Hessian-free)", OPTIMIZERS)
    curvature_size: int = option(0, "hf: samples of a batch that are used for the curvature; 0: all")
    damping: float = option(0.1, "hf: initial lambda")
    min_damping: float = option(2e-4, "hf: smallest lambda, which keeps structural damping on a plateau")
    structural_damping: float = option(1 / 30, "hf: mu, strength of structural damping relative to lambda; 0: none")
    max_cg: int = option(300, "hf: conjugate-gradient iterations per step")

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], loss: LossName
    ) -> torch.optim.Optimizer:
        """Return the optimizer that the options name.

        Arguments:
            parameters: the parameters to train, or groups of them.
            loss: name of the loss that a Hessian-free optimizer minimises.

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
        """Return a function that makes the optimizer for a model; see :meth:`make_optimizer`."""
        return lambda model: self.make_optimizer(model.parameters(), loss)

    def check(self) -> None:
        """Raise an error if options contradict each other or a package is missing."""
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
    """Return a SOAP optimizer. The package is imported here because it is optional."""
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise ImportError(
            f"soap needs the package pytorch_optimizer ({error}). Fix: pip install -e '.[peers]', or choose another "
            "--optimizer."
        ) from error
    return SOAP(parameters, lr=lr, weight_decay=0.0)


class Objective(abc.ABC):
    """A loss of outputs and targets: a sum over features and time steps, averaged over the samples.

    Attributes:
        loss: "mse" (half the squared error), "bce" (of logits) or "cross_entropy" (of logits, classes in the last
            dimension).
        curvature_size: number of samples, from the start of a batch, from which a Hessian-free optimizer computes
            curvature; 0: all.
    """

    loss: LossName

    def __init__(self, curvature_size: int = 0) -> None:
        self.curvature_size = curvature_size

    @abc.abstractmethod
    def parts(self, batch: Samples) -> tuple[Samples, Tensor, Tensor | None]:
        """Return the model's inputs, the targets, and a mask that is False in padding (None: no padding)."""

    def outputs(self, model: nn.Module, batch: Samples, *, with_hidden: bool = False) -> Outputs:
        """Return a model's outputs for a batch and the targets, changed so that padding has zero loss.

        Arguments:
            model: the model.
            batch: tensors whose first dimension is the sample.
            with_hidden: whether to also return the hidden states for :meth:`hbnode.optim.HessianFree.step`.
        """
        inputs, targets, mask = self.parts(batch)
        outputs, hidden = cast(Any, model).with_hidden(*inputs) if with_hidden else (model(*inputs), None)
        if mask is not None:
            outputs = outputs.where(mask, targets if self.loss == "mse" else SILENT)
            hidden = hidden and (hidden[0], hidden[1] * mask)
        return (outputs, targets, hidden) if with_hidden else (outputs, targets)

    def means(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return further metrics of a batch, as means over its samples."""
        return {}

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch, and further metrics."""
        outputs, targets, *_ = self.outputs(model, batch)
        return self.value(outputs, targets), self.means(outputs.detach(), targets)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of given outputs."""
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
    """Take a step of Hessian-free optimization, and return the loss before the step and statistics of the step.

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
    """Raised when a loss or another metric of a run is not finite."""


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
    """Train on shuffled batches for the configured number of epochs, starting from the last checkpoint if there is one.

    Arguments:
        run: the run folder. One row of metrics is added for each epoch.
        model: the model, which is trained in place.
        train: the training data, as tensors of equal length or as FreshData.
        test: the test data, evaluated after every epoch.
        loss: (model, batch) -> the batch's mean loss, and further means to report.
        held_out: name of the test data in metrics, "validation" if there is a separate test set.
        optimizer: function that makes the optimizer for the model. Default: Adam. The schedule multiplies the learning
            rate of every parameter group.
        eval_batch_size: batch size for the test data.
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
    """Train, test the weights of the best validation epoch once, and return the results for the summary.

    Arguments:
        trainer: the trainer.
        data: dictionary with the data sets "validation" and "test".
        name: name of the model in the printed result.
        best: validation metric that selects the epoch, such as "accuracy".
        batch_size: batch size for validation and test.
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
    """Trains a model. Holds what a checkpoint contains: the model, its optimizer and the position in the training data.

    Arguments:
        run: the run folder, to which rows of metrics are added.
        model: the model, which is trained in place.
        data: the training data.
        loss: (model, batch) -> the batch's mean loss, and further metrics. If these include "loss", it is reported
            instead of the loss that is differentiated.
        optimizer: function that makes the optimizer for the model. Default: Adam.
        parts: further objects to store in checkpoints, by name, each with ``state_dict`` and ``load_state_dict``.
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
        self.rates = [group.get("lr") for group in self.optimizer.param_groups]  # HessianFree has no rate
        self.total = self.config.epochs * data.per_epoch
        self.position = 0  # number of units of the training data processed so far
        self.totals: Any = Counter()  # sums of the metrics over the current epoch
        self.best: dict[str, Any] = {}  # epoch, value and weights of the best epoch so far
        self._resume()
        self.wrapped = self.workers.wrap(model)
        alone = self.workers.rank == 0 and multiprocessing.parent_process() is None
        hidden = None if alone else True  # show at most one progress bar, and only in a terminal
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
        """Train for the configured number of epochs, and add one row of metrics after each.

        Arguments:
            validate: called after every epoch; returns the validation or test metrics for the row.
            every: number of epochs between two printed lines.
            after_step: called after each step with the position in the training data. It should use this position
                instead of counting calls, so that a resumed run gives the same results.
            best: name of a metric, such as "validation_accuracy". After training, the weights of the best epoch are
                loaded: the largest value for accuracy and BLEU, the smallest for other metrics. If empty, the weights
                of the last epoch are kept.
            weights: context manager in which the model has the weights to validate and store, for example averaged
                ones.
            stop: function of all rows so far that returns whether to stop training.

        Returns:
            ``best_epoch`` and ``best_NAME``, the best value of the metric NAME. Empty if ``best`` is empty.
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
                    self.save()  # before the metrics, so that metrics never exist without a checkpoint
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
        """Take an optimizer step, and return the loss before it and further metrics."""
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
        """Return a row of metrics.csv.

        Function evaluations are means per batch and process; seconds are training time.
        """
        totals = self.workers.sum(self.totals)
        self.totals = Counter()
        samples, batches = totals.pop("samples"), totals.pop("batches")
        forward, backward = (totals.pop(name) / batches for name in ("nfe_forward", "nfe_backward"))
        ratio = backward / forward if forward else 0.0  # models without an ODE have no evaluations
        seconds = totals.pop("seconds") / self.workers.size
        means = {name if name in PROGRESS else f"train_{name}": value / samples for name, value in totals.items()}
        costs = {"nfe_forward": forward, "nfe_backward": backward, "nfe_ratio": ratio}
        of_odes = costs | {"batch_size": samples / self.data.per_epoch} if isinstance(self.config, ODEConfig) else {}
        return {"epoch": self.position // self.data.per_epoch, **means, **test, **of_odes, "seconds": seconds}

    def keep_best(self, name: str) -> None:
        """Store the weights if the last row of metrics is the best so far."""
        if not name:
            return
        value, sign = self.run.rows[-1][name], -1 if name.endswith(("accuracy", "bleu")) else 1
        if not self.best or sign * value < sign * self.best["value"]:
            weights = {key: x.detach().clone() for key, x in self.model.state_dict().items()}
            self.best = {"epoch": self.run.rows[-1]["epoch"], "value": value, "model": weights}

    def restore_best(self, name: str) -> dict[str, float]:
        """Load the stored best weights into the model, and return their epoch and metric."""
        if not name:
            return {}
        self.model.load_state_dict(self.best["model"])
        return {"best_epoch": self.best["epoch"], f"best_{name}": self.best["value"]}

    def is_checkpoint_due(self) -> bool:
        """Return whether it is time for a checkpoint. The first process decides for all."""
        return self.workers.rank == 0 and time.monotonic() - self.saved >= self.config.checkpoint_seconds

    def save(self) -> None:
        """Write a checkpoint. All processes must call this method together."""
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
        self.totals = Counter(checkpoint["totals"] if self.workers.rank == 0 else {})  # sums over all processes
        self.run.write_metrics()


def evaluate(
    run: Run, model: nn.Module, data: Samples, loss: Loss, name: str, batch_size: int = EVAL_BATCH_SIZE
) -> dict[str, float]:
    """Return the mean metrics on the test data, and in tasks with ODEs the function evaluations per batch."""
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
    """If a solver or an optimizer fails, end the process with a message that says where."""
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
    """Raise Diverged if a metric is not finite. The message names the metric and the place."""
    for name, value in means.items():
        if not math.isfinite(value):
            raise Diverged(
                f"{where}: {name} is {value}. Fix: a smaller --lr, or --clip 1, with another --out; what was done is "
                f"in {run.folder}"
            )


def _schedule(name: str, position: int, total: int) -> float:
    """Return the factor of the learning rate at a position of the training, out of ``total`` positions."""
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
    """Round denormal numbers (below 1e-38) to zero. Without this, an LSTM with saturated gates is four times slower."""
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
