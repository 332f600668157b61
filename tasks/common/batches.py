"""Training data in batches, shared among processes; a resumed run repeats their order."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable

import torch
from torch import Tensor

from tasks.common.run import Run
from tasks.common.workers import Workers

Samples = tuple[Tensor, ...]  # tensors of equal length: a batch, or all of a data set


@dataclasses.dataclass(frozen=True)
class FreshData:
    """Training data made anew for every epoch.

    Attributes:
        samples: how many an epoch has.
        make: makes those of an epoch, counted from 0, of its number and the seed alone: a resumed run makes them again.
    """

    samples: int
    make: Callable[[int], Samples]


class Piece(typing.NamedTuple):
    """What one step trains on.

    Attributes:
        batch: what the loss gets.
        samples: how many this process has in it, the weight of its means in those of the epoch.
        weight: factor of the loss in the backward pass.
        rate: factor of the learning rate, multiplied with that of the schedule.
        length: by how much the position in the training data grows.
        place: what the piece is called in messages.
    """

    batch: Samples
    samples: int
    weight: float
    rate: float
    length: int
    place: str


class TrainingData(typing.Protocol):
    """Training data in pieces: those of an epoch follow from its number, the seed and the position alone.

    Attributes:
        unit: what the position counts.
        per_epoch: how many of these units an epoch has.
    """

    unit: str
    per_epoch: int

    def piece(self, epoch: int, start: int) -> Piece:
        """Return the piece of an epoch, counted from 0, that begins at this position."""


class ShuffledBatches:
    """Training data in batches, in another order in every epoch; each process has its share of a batch."""

    unit = "batch"

    def __init__(self, run: Run, train: Samples | FreshData) -> None:
        self.config, self.workers = run.config, run.workers
        self.train = train if isinstance(train, FreshData) else FreshData(len(train[0]), lambda epoch: train)
        self.per_epoch = -(-self.train.samples // self.config.batch_size)
        self.epoch, self.data = -1, train if isinstance(train, tuple) else ()  # the data of one epoch

    def piece(self, epoch: int, start: int) -> Piece:
        """Return a batch, of which this process has its share."""
        if epoch != self.epoch:
            self.epoch, self.data = epoch, tuple(x.to(self.workers.device) for x in self.train.make(epoch))
        order = _order(self.config.seed, epoch, self.train.samples)
        share = share_of_batch(self.data, order, start, self.config.batch_size, self.workers)
        return Piece(*share, rate=1.0, length=1, place=f"batch {start + 1}")


class StepBatches:
    """Training data in batches, a given number of them an epoch, which may end in the middle of a pass over the data.

    Arguments:
        run: its options say the batch size and the seed.
        train: the training data.
        per_epoch: batches in an epoch.
        rate: the factor of the learning rate in a step, counted from 0 over all epochs.
    """

    unit = "batch"

    def __init__(self, run: Run, train: Samples, per_epoch: int, rate: Callable[[int], float]) -> None:
        self.config, self.workers, self.per_epoch, self.rate = run.config, run.workers, per_epoch, rate
        self.data = tuple(x.to(run.workers.device) for x in train)

    def piece(self, epoch: int, start: int) -> Piece:
        """Return a batch, of which this process has its share."""
        step, samples, batch_size = epoch * self.per_epoch + start, len(self.data[0]), self.config.batch_size
        number, index = divmod(step, -(-samples // batch_size))
        order = _order(self.config.seed, number, samples)
        share = share_of_batch(self.data, order, index, batch_size, self.workers)
        return Piece(*share, rate=self.rate(step), length=1, place=f"batch {start + 1}")


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    """Return the order of the samples in an epoch."""
    return torch.randperm(length, generator=epoch_generator(seed, epoch))


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of an epoch: of its number and the seed alone, so that a resumed run repeats them."""
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def share_of_batch(
    data: Samples, order: Tensor, index: int, batch_size: int, workers: Workers
) -> tuple[Samples, int, float]:
    """This process's part of a batch, how many samples of it count, and the weight of their mean loss.

    The mean over the processes of the weighted losses is the mean over the batch, however unequal the parts. A process
    left without a sample gets one that counts nothing, because all must take part in the averaging.
    """
    chosen = order[index * batch_size : (index + 1) * batch_size]
    part = chosen[workers.rank :: workers.size]
    samples = len(part)
    part = part if samples else chosen[:1]
    return tuple(x[part.to(x.device)] for x in data), samples, samples * workers.size / len(chosen)
