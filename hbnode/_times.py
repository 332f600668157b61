"""Times as users have them: numbers, dates, durations."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import Tensor

from hbnode._checks import as_tensor

_DATES = (datetime.date, datetime.timedelta)


def as_times(value: object, name: str) -> Tensor:
    """A tensor of times: dates as seconds since 1970 (UTC), durations as seconds, both in float64; numbers as they are.

    Dates and durations are those of numpy, pandas, polars and the standard library; a date without a time zone is taken
    as UTC.
    """
    if isinstance(value, Tensor):
        return value
    seconds = as_seconds(value)
    return as_tensor(value, name) if seconds is None else seconds


def as_seconds(value: object) -> Tensor | None:
    """The seconds of dates and durations, as of :func:`as_times`; None of anything else."""
    array: Any = value
    if hasattr(array, "to_numpy"):
        has_zone = getattr(array.dtype, "tz", None) is not None if hasattr(array, "dtype") else False
        array = array.to_numpy(dtype="datetime64[ns]") if has_zone else array.to_numpy()
    kind = getattr(getattr(array, "dtype", None), "kind", "")
    if kind in ("M", "m"):
        return torch.as_tensor(_seconds_of_array(array), dtype=torch.float64)
    if kind == "O":
        array = array.tolist()
    if isinstance(array, (list, tuple)) and _is_of_dates(array):
        return torch.tensor(_seconds_of_list(array), dtype=torch.float64)
    return None


def as_duration(value: object, name: str) -> float:
    """A positive length of time: a number as it is, a duration in seconds."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    is_duration = kind == "m" or isinstance(value, datetime.timedelta)
    try:
        length = float(as_times([value], name)[0]) if is_duration else float(value)  # type: ignore[arg-type] # is caught
    except (TypeError, ValueError):
        length = -1.0
    if not 0 < length < float("inf"):
        raise ValueError(f"{name} must be a positive number or a duration, got {value!r}. Fix: {name}=1.0.")
    return length


def _seconds_of_array(array: Any) -> Any:
    """Of an array of numpy's datetime64 or timedelta64."""
    import numpy

    since = array - numpy.datetime64(0, "s") if array.dtype.kind == "M" else array
    return since / numpy.timedelta64(1, "s")  # NaT becomes NaN


def _is_of_dates(values: Any) -> bool:
    """Whether the first entry of nested lists is a date or a duration."""
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
    return isinstance(values, _DATES) or getattr(getattr(values, "dtype", None), "kind", "") in ("M", "m")


def _seconds_of_list(value: Any) -> Any:
    """Of nested lists of dates or durations."""
    if isinstance(value, (list, tuple)):
        return [_seconds_of_list(part) for part in value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.timezone.utc)
        return aware.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.timezone.utc).timestamp()
    return _seconds_of_array(value).tolist()  # of an array of dates, or one date of numpy
