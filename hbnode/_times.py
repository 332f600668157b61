"""Conversion of numbers, dates and durations to times."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from hbnode._checks import as_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["dates", "durations", "text"]

EPOCH = np.datetime64(0, "us")
SECOND = np.timedelta64(1, "s")


def as_times(value: object, name: str) -> Tensor:
    """Convert numbers to a tensor of times; raise TypeError for dates, durations and text, whose unit is unknown."""
    if isinstance(value, Tensor):
        if value.is_meta and type(value) is Tensor:
            raise ValueError(f"{name} is on the device meta, which stores no numbers. Fix: {name} on another device.")
        if value.is_complex() or value.layout is not torch.strided:
            raise TypeError(f"{name} must hold real numbers, got {value!r}. Fix: a dense tensor of times.")
        return value
    refuse_dates(value, name)
    return as_tensor(value, name)


def as_unit(value: object, name: str) -> float:
    """Convert a positive number to a float, the length of a unit of time."""
    refuse_dates([value], name)
    try:
        length = float(value)  # type: ignore[arg-type]  # caught below
    except (TypeError, ValueError):
        length = -1.0
    if not 0 < length < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}. Fix: {name}=1.0.")
    return length


def refuse_dates(value: object, name: str) -> None:
    """Raise TypeError for dates, durations and text, with the method of a Series that converts them."""
    kind = kind_of(value)
    if kind is None:
        return
    fixes = {
        "dt": "series.times(dt) - state.t.unsqueeze(-1)" if kind == "dates" else "series.durations(dt)",
        "time_unit": "time_unit=series.durations(time_unit)",
    }
    fix = fixes.get(name, f"series.times({name})")
    raise TypeError(
        f"{name} must hold numbers in the unit of t, got {kind}, which an hbnode.data.Series converts. "
        f"Fix: {fix}, where series = hbnode.data.from_long(..., unit='h')."
    )


def kind_of(value: object) -> Kind | None:
    """Return what an array, a column or nested lists hold, by the first entry; None for anything else than times."""
    array: Any = value
    while isinstance(array, (list, tuple)) and array:
        array = array[0]
    kind = getattr(getattr(array, "dtype", None), "kind", "")
    if hasattr(array, "to_numpy") and kind not in ("M", "m"):
        array = array.to_numpy()
        kind = array.dtype.kind
    if kind in ("O", "T") and array.size:
        array = array.reshape(-1)[0]
    if kind == "M" or isinstance(array, datetime.date):
        return "dates"
    if kind == "m" or isinstance(array, datetime.timedelta):
        return "durations"
    return "text" if kind == "U" or isinstance(array, str) else None


def seconds_since(value: object, origin: np.datetime64 = EPOCH) -> NDArray[np.float64]:
    """Convert dates to seconds since ``origin``, and durations to seconds; NaT becomes NaN.

    They may be of numpy, pandas, polars or the standard library. A date without a time zone is in UTC.
    """
    array: Any = value
    if hasattr(array, "to_numpy"):
        has_zone = getattr(getattr(array, "dtype", None), "tz", None) is not None
        array = array.to_numpy(dtype="datetime64[ns]") if has_zone else array.to_numpy()
    if getattr(getattr(array, "dtype", None), "kind", "") == "O":
        array = array.tolist()
    return np.asarray(_seconds(array, origin, kind_of(value)), dtype=np.float64)


def _seconds(value: Any, origin: np.datetime64, kind: Kind | None) -> Any:
    if isinstance(value, (list, tuple)):
        return [_seconds(part, origin, kind) for part in value]
    if value is None or (isinstance(value, datetime.date) and value != value):  # pandas.NaT is a date
        return math.nan
    if kind_of(value) != kind:
        raise TypeError(f"expected {kind}, got {value!r} among them. Fix: only {kind}.")
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    if isinstance(value, datetime.date):
        value = np.datetime64(value).astype("datetime64[us]")
    return (value - origin if kind == "dates" else value) / SECOND
