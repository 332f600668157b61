"""Series with covariates that are known at later times, such as a calendar or a weather forecast."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hbnode._tree import record
from hbnode.data import Series

ROUNDING = 1e-12  # of times, relative to the largest


@record
class Past(Series):
    """Series up to now, with covariates that are known at later times too.

    Attributes:
        known: the covariates, at times of their own; None if there are none.
        zone: the time zone of the user's dates; None if there is none.
    """

    known: Series | None = None
    zone: Any = None

    @override
    def select(self, index: Any) -> Past:
        found: Any = super().select(index)
        return dataclasses.replace(found, known=None if self.known is None else self.known.select(index))


def foreseen(past: Series, dt: Tensor, age: Tensor | float = 0.0) -> Tensor:
    """Return the F covariates at times ``dt`` (n, K) after the last sample, and their changes, (n, K, 2 F).

    The changes are those since ``age`` (n, 1) before the last sample, 0 by default. The covariates are linear between
    their samples and NaN outside of them.
    """
    series = getattr(past, "known", None)
    if series is None:
        return dt.new_zeros(*dt.shape, 0)
    end = past.t.amax(1, keepdim=True)
    at, t, x, mask = (part.numpy() for part in (torch.cat([end - age, end + dt], 1), series.t, series.x, series.mask))
    found, rounding = np.full((*at.shape, x.shape[2]), np.nan), ROUNDING * abs(t).max()
    for row, column in np.argwhere(mask.any(1)):
        seen = mask[row, :, column]
        times, values = np.pad(t[row, seen], 1, "edge"), np.pad(x[row, seen, column], 1, "edge")
        times[[0, -1]] += -rounding, rounding
        found[row, :, column] = np.interp(at[row], times, values, np.nan, np.nan)
    return torch.from_numpy(np.concatenate([found[:, 1:], found[:, 1:] - found[:, :1]], -1))
