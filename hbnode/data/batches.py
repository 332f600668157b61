"""Batches of irregular series for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from hbnode._checks import as_count, as_tensor
from hbnode.data.series import Series, joined

POOL = 50  # batches among whose series those of like length are put together


class Dataset(data.Dataset[Any]):
    """The series of a batch one by one, for a DataLoader with ``collate_fn=hbnode.data.collate``.

    Arguments:
        series: the series.
        targets: what is to be predicted of each, (batch, ...), a tensor or an array. Default: ``None``.

    Raises:
        ValueError: if there is not one target for each series.

    Example:
        >>> import torch, hbnode
        >>> table = {"id": [1, 1, 1, 2, 2, 3], "t": [0.0, 1, 3, 0, 5, 2], "y": [0.1, 0.2, 0.3, 1.0, 1.1, 2.0]}
        >>> series = hbnode.data.from_long(table, id="id", time="t", values=["y"])
        >>> labels = torch.tensor([0, 1, 1])
        >>> loader = torch.utils.data.DataLoader(
        ...     hbnode.data.Dataset(series, labels),
        ...     batch_sampler=hbnode.data.bucketed_batches(series.lengths, 2, shuffle=False),
        ...     collate_fn=hbnode.data.collate,
        ... )
        >>> for batch, y in loader:
        ...     print(batch.ids, tuple(batch.x.shape), y)
        [3, 2] (2, 2, 1) tensor([1, 1])
        [1] (1, 3, 1) tensor([0])
    """

    def __init__(self, series: Series, targets: Tensor | None = None) -> None:
        if targets is not None and len(targets) != len(series):
            raise ValueError(
                f"targets must be one for each of {len(series)} series, got {len(targets)}. "
                "Fix: labels in the order of series.ids, labels.loc[series.ids] of a pandas Series."
            )
        self.series = series
        self.targets = as_tensor(targets, "targets") if hasattr(targets, "to_numpy") else targets  # by place

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> Series | tuple[Series, Tensor]:
        """A series by itself, without padding, and its target if there are any."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} series")
        one = self.series.select([index % len(self)])
        return one if self.targets is None else (one, self.targets[index])


def collate(items: Sequence[Series] | Sequence[tuple[Series, Any]]) -> Series | tuple[Series, Tensor]:
    """One padded batch of the items of a :class:`Dataset`, for a DataLoader's ``collate_fn``.

    Arguments:
        items: series, or pairs of a series and a target.
    """
    if not items:
        raise ValueError("there are no items. Fix: a batch of at least one.")
    series = [item if isinstance(item, Series) else item[0] for item in items]
    targets = [item[1] for item in items if not isinstance(item, Series)]
    batch = joined(series)
    return (batch, torch.stack([torch.as_tensor(target) for target in targets])) if targets else batch


class BucketedBatches(data.Sampler[list[int]]):
    """Batches of series of like length: see :func:`bucketed_batches`."""

    def __init__(
        self, lengths: Sequence[int], batch_size: int, shuffle: bool, drop_last: bool, generator: torch.Generator | None
    ) -> None:
        self.lengths, self.batch_size = list(lengths), batch_size
        self.shuffle, self.drop_last, self.generator = shuffle, drop_last, generator

    def __len__(self) -> int:
        whole, rest = divmod(len(self.lengths), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """New batches each time, if shuffled."""
        count, size = len(self.lengths), self.batch_size
        if not self.shuffle:
            order = sorted(range(count), key=self.lengths.__getitem__)
            yield from [order[i : i + size] for i in range(0, count, size)][: len(self)]
            return
        order = torch.randperm(count, generator=self.generator).tolist()
        kept = order[: len(self) * size]  # with drop_last, other series are left out each time
        pools = [kept[i : i + POOL * size] for i in range(0, len(kept), POOL * size)]
        batches = []
        for pool in pools:
            pool.sort(key=self.lengths.__getitem__)
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        for i in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[i]


def bucketed_batches(
    lengths: Tensor | Sequence[int],
    batch_size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
) -> BucketedBatches:
    """Batches of series of like length, so that little is padding: the ``batch_sampler`` of a DataLoader.

    Shuffled, each pass has other batches: 50 batches of series at a time are drawn at random, put in order of length,
    and cut; the batches then come in random order.

    Arguments:
        lengths: length of each series, (batch,).
        batch_size: series of a batch.
        shuffle: whether batches are drawn anew in each pass; else they are in order of length. Default: ``True``.
        drop_last: whether a batch that is not full is left out. Default: ``False``.
        generator: of the random numbers; None is torch's own. Default: ``None``.

    Returns:
        An iterable over lists of places.
    """
    counts = torch.as_tensor(lengths)
    if counts.dim() != 1 or counts.is_floating_point():
        raise ValueError(
            f"lengths must be whole numbers (batch,), got {counts.dtype} {tuple(counts.shape)}. Fix: .long()."
        )
    return BucketedBatches(counts.tolist(), as_count(batch_size, "batch_size"), shuffle, drop_last, generator)
