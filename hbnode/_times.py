"""Conversion of numbers, dates and durations to times."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from hbnode._checks import as_tensor, check_real
from hbnode._torch import may_look

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["dates", "durations", "text"]

EPOCH = np.datetime64(0, "us")
SECOND = np.timedelta64(1, "s")
SPACINGS = 100  # of floats in a gap, at least


def as_times(value: object, name: str) -> Tensor:
    """Convert numbers to a tensor of times; raise TypeError for dates, durations and text, whose unit is unknown."""
    if not isinstance(value, Tensor):
        refuse_dates(value, name)
    times = as_tensor(value, name)
    has_bools = isinstance(value, (list, tuple)) and any(isinstance(entry, bool) for entry in value)
    return check_real(times.bool() if has_bools else times, name)


def has_lost_digits(t: Tensor, gaps: Tensor, unit: float) -> Tensor:
    """Return whether rounding of times exceeds a hundredth of the median gap above 0, or of ``unit`` without a gap.

    The unit counts for dtypes below float64 only. Whole numbers with ample digits are exact.
    """
    spacing, is_gap = torch.finfo(t.dtype).eps * t.abs().amax().log2().floor().exp2(), gaps > 0  # of floats
    is_short = is_gap & (gaps < SPACINGS * spacing)
    is_coarse = SPACINGS * spacing > (math.inf if t.dtype == torch.float64 else unit)
    is_whole = (t == t.round()).all() & (spacing <= 0.125)  # which chance does not make of rounded times
    return torch.where(is_gap.any(), 2 * is_short.sum() >= is_gap.sum(), is_coarse) & ~is_whole


def lost_digits(t: Tensor, gaps: Tensor, name: str, unit: float) -> ValueError:
    """Return the error for times of which :func:`has_lost_digits` is true."""
    gaps, largest = gaps[gaps > 0], float(t.abs().amax())
    spacing = torch.finfo(t.dtype).eps * 2.0 ** math.floor(math.log2(largest))
    scale = f"their median gap {float(gaps.median()):.3g}" if len(gaps) else f"the unit of time {unit:g}"
    return ValueError(
        f"{name} has lost digits: {t.dtype} stores times near {largest:.3g} as multiples of {spacing:.3g}, "
        f"more than a hundredth of {scale}. Fix: {name} in float64 from the start, "
        "torch.tensor(times, dtype=torch.float64); or counted from a time near the data."
    )


def check_digits(t: Tensor, gaps: Tensor, name: str, unit: float) -> None:
    """Raise ValueError if times of a dtype below float64 have lost digits."""
    rounds = t.is_floating_point() and t.dtype != torch.float64
    if rounds and t.numel() and may_look() and bool(has_lost_digits(t.detach(), gaps.detach(), unit)):
        raise lost_digits(t, gaps, name, unit)


def as_unit(value: object, name: str) -> float:
    """Convert a positive number to a float, the length of a unit of time."""
    refuse_dates([value], name)
    try:
        length = -1.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # caught below
    except (TypeError, ValueError, RuntimeError):
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
