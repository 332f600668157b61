"""Padded batches of irregular series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import override

from hbnode._tree import Record, record


class Inputs(TypedDict):
    """What :meth:`Series.inputs` returns."""

    x: Tensor
    t: Tensor
    mask: Tensor
    lengths: Tensor
    static: Tensor | None


@record
class Series(Record):
    """A batch of irregular series, padded to the length of the longest.

    ``rnn(**series.inputs())`` hands it to an :class:`hbnode.ODERNN`. It moves with :meth:`to`;
    ``dataclasses.replace(series, x=scale(series.x))`` changes a part of it.

    Attributes:
        x: values (batch, T, features); NaN where missing, and on padding.
        t: times (batch, T) in float64; on padding that of the last sample.
        mask: which values were observed, (batch, T, features).
        lengths: samples of each series, (batch,).
        static: features that do not change, (batch, static features); NaN where missing. None if there are none.
        ids: what identifies each series.
        features: names of the features.
        static_features: names of the static features.
    """

    x: Tensor
    t: Tensor
    mask: Tensor
    lengths: Tensor
    static: Tensor | None = None
    ids: Sequence[Any] = ()
    features: Sequence[str] = ()
    static_features: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __repr__(self) -> str:
        batch, length, count = self.x.shape
        names = f" {list(self.features)}" if 0 < len(self.features) <= 8 else ""
        static = "" if self.static is None else f", {self.static.shape[1]} static"
        return f"Series({batch} series, up to {length} samples, {count} features{names}{static})"

    def inputs(self) -> Inputs:
        """The arguments of an :class:`hbnode.ODERNN`: x, t, mask, lengths and static, which may be None."""
        return {"x": self.x, "t": self.t, "mask": self.mask, "lengths": self.lengths, "static": self.static}

    def select(self, index: Tensor | Sequence[int] | slice) -> Series:
        """Some of the series, padded no more than they need.

        Arguments:
            index: their places, or a mask (batch,) of bool.
        """
        if isinstance(index, slice):
            index = range(len(self))[index]
        places = torch.as_tensor(list(index) if isinstance(index, range) else index)
        if places.dtype == torch.bool and places.shape == (len(self),):
            places = places.nonzero()[:, 0]
        if places.dim() != 1 or places.dtype == torch.bool or (places.is_floating_point() and len(places)):
            raise ValueError(
                f"index must be places (n,), or a mask ({len(self)},) of bool, got {places.dtype} of shape "
                f"{tuple(places.shape)}. Fix: [3] for one series."
            )
        places = places.long()
        lengths = self.lengths[places.to(self.lengths.device)]
        total = int(lengths.max()) if len(lengths) else 0
        places = places.to(self.x.device)
        x, t, mask = (part[places, :total] for part in (self.x, self.t, self.mask))
        static = None if self.static is None else self.static[places]
        ids = [self.ids[i] for i in places.tolist()] if self.ids else ()
        return Series(x, t, mask, lengths, static, ids, self.features, self.static_features)

    @staticmethod
    @override
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name in ("t", "mask", "lengths") else new


def joined(parts: Sequence[Series]) -> Series:
    """Batches of series as one."""
    total = max(part.x.shape[1] for part in parts)
    x, mask, t = [], [], []
    for part in parts:
        missing = (0, 0, 0, total - part.x.shape[1])
        x.append(torch.nn.functional.pad(part.x, missing, value=torch.nan))
        mask.append(torch.nn.functional.pad(part.mask, missing, value=False))
        last = part.t[:, -1:] if part.t.shape[1] else part.t.new_zeros(len(part), 1)
        t.append(torch.cat([part.t, last.expand(-1, missing[-1])], 1))
    lengths = torch.cat([part.lengths for part in parts])
    statics = [part.static for part in parts if part.static is not None]
    static = torch.cat(statics) if statics else None
    ids = [one for part in parts for one in part.ids]
    first = parts[0]
    return Series(
        torch.cat(x), torch.cat(t), torch.cat(mask), lengths, static, ids, first.features, first.static_features
    )
