"""Conversion of numbers, dates and durations to times."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from hbnode._checks import as_tensor, check_real, refuse_gradient
from hbnode._torch import may_look

if TYPE_CHECKING:
    from numpy.typing import NDArray

TimeKind = Literal["dates", "durations", "text"]

EPOCH = np.datetime64(0, "us")
SECOND = np.timedelta64(1, "s")
SPACINGS = 100  # a gap between times must be at least this many spacings of floating-point numbers


def as_times(value: object, name: str) -> Tensor:
    """Convert numbers to a tensor of times; raise TypeError for dates, durations and strings, whose unit is unknown."""
    if not isinstance(value, Tensor):
        refuse_dates(value, name)
    times = as_tensor(value, name)
    has_bools = isinstance(value, (list, tuple)) and any(isinstance(entry, bool) for entry in value)
    return check_real(times.bool() if has_bools else times, name)


def has_lost_digits(t: Tensor, gaps: Tensor, unit: float) -> Tensor:
    """Return whether rounding of times to their dtype changes the gaps between them noticeably.

    ``t`` are times, and ``gaps`` are the differences between successive times. Rounding is noticeable if it can exceed
    a hundredth of the median positive gap. If no gap is positive, ``unit`` replaces the median gap, except for float64.
    Times that are multiples of 8 times the spacing of floating-point numbers count as exact, such as half hours below
    10^6 in float32.
    """
    # spacing of floating-point numbers just below the largest time
    spacing = torch.finfo(t.dtype).eps / 2 * t.abs().amax().log2().ceil().exp2()
    is_gap = gaps > 0
    is_short = is_gap & (gaps < SPACINGS * spacing)
    is_coarse = SPACINGS * spacing > (math.inf if t.dtype == torch.float64 else unit)
    is_exact = (t % (8 * spacing) == 0).all() & (is_gap.any() | (8 * spacing <= unit))  # rounded times do not pass
    return torch.where(is_gap.any(), 2 * is_short.sum() >= is_gap.sum(), is_coarse) & ~is_exact


def lost_digits(t: Tensor, gaps: Tensor, name: str, unit: float) -> ValueError:
    """Return the error to raise for times for which :func:`has_lost_digits` returns True."""
    gaps, largest = gaps[gaps > 0], float(t.abs().amax())
    spacing = torch.finfo(t.dtype).eps / 2 * 2.0 ** math.ceil(math.log2(largest))
    scale = f"their median gap {float(gaps.median()):.3g}" if len(gaps) else f"the unit of time {unit:g}"
    return ValueError(
        f"{name} has lost digits: {t.dtype} stores times near {largest:.3g} as multiples of {spacing:.3g}, "
        f"more than a hundredth of {scale}. Fix: {name} in float64 from the start, "
        "torch.tensor(times, dtype=torch.float64); or counted from a time near the data."
    )


def check_digits(t: Tensor, gaps: Tensor, name: str, unit: float) -> None:
    """Raise ValueError if times in a dtype less precise than float64 have lost digits by rounding."""
    rounds = t.is_floating_point() and t.dtype != torch.float64
    if rounds and t.numel() and may_look() and bool(has_lost_digits(t.detach(), gaps.detach(), unit)):
        raise lost_digits(t, gaps, name, unit)


def as_unit(value: object, name: str) -> float:
    """Return a time unit, which must be a positive number, as a float."""
    refuse_dates([value], name)
    refuse_gradient(value, name)
    try:
        length = -1.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # caught below
    except (TypeError, ValueError, RuntimeError):
        length = -1.0
    if not 0 < length < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}. Fix: {name}=1.0.")
    return length


def refuse_dates(value: object, name: str) -> None:
    """Raise TypeError for dates, durations and strings; the message names the Series method that converts them."""
    kind = kind_of(value)
    if kind is None:
        return
    fixes = {
        "dt": "series.times(dt) - state.t.unsqueeze(-1)" if kind == "dates" else "series.durations(dt)",
        "time_unit": "time_unit=series.durations(time_unit)",
    }
    fix = fixes.get(name, f"series.times({name})")
    fix = f"{fix}, where series = hbnode.data.from_long(..., unit='h')"
    raise TypeError(f"{name} must hold numbers in the unit of t, got {kind}, which a Series converts. Fix: {fix}.")


def kind_of(value: object) -> TimeKind | None:
    """Return "dates", "durations" or "text", whichever an array, a column or nested lists hold, or None for numbers.

    Only the first entry is examined.
    """
    array: Any = value
    while isinstance(array, (list, tuple)):
        array = next((each for each in array if each is not None), None)
    kind = getattr(getattr(array, "dtype", None), "kind", "")
    if hasattr(array, "to_numpy") and kind not in ("M", "m"):
        array = array.to_numpy()
        kind = array.dtype.kind
    if kind in ("O", "T"):
        array = next((each for each in array.reshape(-1) if each is not None), None)
    if kind == "M" or isinstance(array, datetime.date) or hasattr(array, "start_time"):
        return "dates"
    if kind == "m" or isinstance(array, datetime.timedelta):
        return "durations"
    return "text" if kind == "U" or isinstance(array, str) else None


def seconds_since(value: object, origin: np.datetime64 = EPOCH) -> NDArray[np.float64]:
    """Convert dates to seconds since ``origin``, and durations to seconds; NaT becomes NaN.

    Values of NumPy, pandas, polars and the standard library are accepted. A date without a time zone is read as UTC. A
    pandas period is converted to its start.
    """
    exact = exact_times(value)
    if exact.dtype.kind == "m":
        return np.asarray(exact / SECOND, dtype=np.float64)
    # in whole seconds first, because int64 nanoseconds overflow at 292 years
    whole, start = exact.astype("datetime64[s]"), origin.astype("datetime64[s]")
    return np.asarray((whole - start) / SECOND + ((exact - whole) - (origin - start)) / SECOND, dtype=np.float64)


def exact_times(value: object) -> NDArray[Any]:
    """Convert dates to datetime64 (UTC) and durations to timedelta64, without rounding.

    The result is in microseconds, or in a finer unit of the given values if they have fractions of microseconds.

    Raises:
        TypeError: if only some dates have a time zone, or if an entry is of another kind than the first entry.
    """
    array, kind, zones = _entries(value), kind_of(value), zones_of(value)
    if len(zones) > 1 and None in zones.values():
        fix = "pandas.to_datetime(dates, utc=True), if those without one are in UTC"
        raise TypeError(f"dates must have a time zone in all entries or in none, got both. Fix: {fix}.")
    exact = np.asarray(_exact(array.tolist(), kind) if array.dtype.kind == "O" else array)
    return _in_microseconds(exact)


def zones_of(value: object) -> dict[str, Any]:
    """Return a dict with the name and the object of each time zone that occurs in dates.

    For dates without a time zone, the dict has the entry ``"None": None``. NumPy dates are ignored.
    """
    dtype = getattr(value, "dtype", None)
    zone = getattr(dtype, "tz", None) or getattr(dtype, "time_zone", None)  # pandas stores a tzinfo, polars a name
    if zone is not None:
        import zoneinfo  # imported only here, because its import is slow

        return {str(zone): zoneinfo.ZoneInfo(zone) if isinstance(zone, str) else zone}
    entries = _entries(value)
    dates = [each for each in entries.flat if isinstance(each, datetime.date)] if entries.dtype.kind == "O" else []
    zones = [getattr(each, "tzinfo", None) for each in dates if each == each]  # NaT is not equal to itself
    return {str(zone): zone for zone in zones}


def _entries(value: Any) -> NDArray[Any]:
    dtype: Any = getattr(value, "dtype", None)
    if getattr(dtype, "tz", None) is not None:  # pandas would return an array of objects
        return np.asarray(value.to_numpy(dtype=f"datetime64[{dtype.unit}]"))
    return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)


def _in_microseconds(exact: Any) -> Any:
    """Convert NumPy times to microseconds if this loses no digits; int64 nanoseconds overflow after 292 years."""
    whole = exact.astype(f"{exact.dtype.kind}8[us]")
    return whole if ((whole == exact) | np.isnat(exact)).all() else exact


def _exact(value: Any, kind: TimeKind | None) -> Any:
    """Convert a date or duration, or nested lists of them, to NumPy scalars."""
    if isinstance(value, list):
        return [_exact(part, kind) for part in value]
    if value is None or (isinstance(value, datetime.date) and value != value):  # pandas.NaT, which is a date
        return np.datetime64("NaT") if kind == "dates" else np.timedelta64("NaT")
    if kind_of(value) != kind:
        raise TypeError(f"expected {kind}, got {value!r} among them. Fix: only {kind}.")
    value = getattr(value, "start_time", value)  # the start of a pandas period
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    if hasattr(value, "to_numpy"):  # a pandas Timestamp or Timedelta
        return _in_microseconds(value.to_numpy())
    if isinstance(value, datetime.timedelta):
        return np.timedelta64(value, "us")
    return np.datetime64(value).astype("datetime64[us]") if isinstance(value, datetime.date) else value
