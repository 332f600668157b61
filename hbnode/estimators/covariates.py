"""Series with covariates that are known at later times, such as a calendar or a weather forecast."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    at, t, rows = torch.cat([end - age, end + dt], 1), series.t, torch.arange(len(end)).unsqueeze(1)
    rounding = ROUNDING * t.abs().amax()
    right = torch.searchsorted(t, at - rounding).clamp(max=t.shape[1] - 1)
    left = (right - 1).clamp(min=0)
    before, after = t[rows, left], t[rows, right]
    share = torch.where(abs(after - at) <= rounding, 0.0, (after - at) / (after - before)).unsqueeze(-1)
    between = torch.lerp(series.x[rows, right], series.x[rows, left], share)
    x = torch.where(share == 0, series.x[rows, right], torch.where((share > 0) & (share <= 1), between, torch.nan))
    return torch.cat([x[:, 1:], x[:, 1:] - x[:, :1]], -1)
