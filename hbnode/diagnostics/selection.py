"""Which samples and features of a trajectory are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Index: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | Tensor | None"  # arrays of numpy too
MOST_LINES = 1000


def chosen(h: Tensor, features: Index, samples: Index) -> tuple[Tensor, list[int]]:
    """The chosen part of a trajectory, (T, samples, features), and the numbers of its features."""
    h = h.reshape(*h.shape, *[1] * (3 - h.dim())).flatten(2)
    numbered = indices(features, h.shape[2], "features")
    h = h[:, indices(samples, h.shape[1], "samples")][:, :, numbered]
    if h.shape[1] * h.shape[2] > MOST_LINES:
        raise ValueError(
            f"{h.shape[1]} samples of {h.shape[2]} features are more than {MOST_LINES} lines. "
            "Fix: features=slice(4), samples=slice(8), for instance."
        )
    return h, numbered


def indices(which: Index, count: int, name: str) -> list[int]:
    """Which of so many, as numbers from 0: an index, several, a slice, or a mask of one boolean for each."""
    everything = list(range(count))
    if which is None or isinstance(which, slice):
        return everything[which or slice(None)]
    wanted = torch.as_tensor(which)
    if wanted.dtype == torch.bool:
        if wanted.shape != (count,):
            raise IndexError(
                f"{name} is a mask of shape {tuple(wanted.shape)}, but h has {count} {name}. "
                f"Fix: a mask of shape ({count},), or indices."
            )
        return wanted.nonzero().flatten().tolist()
    try:
        return [everything[i] for i in wanted.reshape(-1).tolist()]
    except IndexError:
        raise IndexError(f"{name}={which!r} is not within the {count} {name} of h. Fix: 0 to {count - 1}.") from None
