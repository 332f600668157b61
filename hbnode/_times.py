"""Conversion of numbers, dates and durations to tensors of times."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode._checks import as_tensor


def as_times(value: object, name: str) -> Tensor:
    """Convert numbers, dates or durations to a tensor of times.

    Dates become seconds since 1970 (UTC) and durations become seconds, in float64. They may be of numpy, pandas, polars
    or the standard library. A date without a time zone is in UTC. ``name`` is that of the argument, for error messages.
    """
    if isinstance(value, Tensor):
        return value
    seconds = as_seconds(value)
    return as_tensor(value, name) if seconds is None else seconds


def as_seconds(value: object) -> Tensor | None:
    """Convert dates and durations to seconds like :func:`as_times`, or return None for any other value."""
    array: Any = value
    if hasattr(array, "to_numpy"):
        has_zone = getattr(getattr(array, "dtype", None), "tz", None) is not None
        array = array.to_numpy(dtype="datetime64[ns]") if has_zone else array.to_numpy()
    if _kind(array) == "O":
        array = array.tolist()
    first = array
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    is_date = first is not array and isinstance(first, (datetime.date, datetime.timedelta))
    if not is_date and _kind(first) not in ("M", "m"):
        return None
    return torch.as_tensor(np.asarray(_seconds(array), dtype=np.float64))


def as_duration(value: object, name: str) -> float:
    """Convert a positive number or a duration to a float; a duration becomes its seconds."""
    is_duration = _kind(value) == "m" or isinstance(value, datetime.timedelta)
    try:
        length = float(as_times([value], name)[0]) if is_duration else float(value)  # type: ignore[arg-type]  # caught below
    except (TypeError, ValueError):
        length = -1.0
    if not 0 < length < float("inf"):
        raise ValueError(f"{name} must be a positive number or a duration, got {value!r}. Fix: {name}=1.0.")
    return length


def _kind(value: Any) -> str:
    return getattr(getattr(value, "dtype", None), "kind", "")


def _seconds(value: Any) -> Any:
    """Convert a date, a duration, a NumPy array of these, or nested lists of these, to seconds; NaT becomes NaN."""
    if isinstance(value, (list, tuple)):
        return [_seconds(part) for part in value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.timezone.utc)
        return aware.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.timezone.utc).timestamp()
    since = value - np.datetime64(0, "s") if value.dtype.kind == "M" else value
    return since / np.timedelta64(1, "s")
