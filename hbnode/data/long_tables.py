"""Tables of one row a sample, or one row a measurement, as padded series."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hbnode._checks import nearest
from hbnode._times import as_duration, as_seconds, as_times
from hbnode.data.series import Series

if TYPE_CHECKING:  # numpy is there wherever a table is, but hbnode does not need it
    from numpy.typing import NDArray

Duplicates = Literal["mean", "first", "last", "error"]
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "D": 86400.0, "W": 604800.0}


def from_long(
    table: Any,
    *,
    id: str,
    time: str,
    values: str | Sequence[str],
    static: str | Sequence[str] | None = None,
    variable: str | None = None,
    features: str | Sequence[str] | None = None,
    duplicates: Duplicates = "mean",
    unit: str | datetime.timedelta | None = None,
    dtype: torch.dtype = torch.float32,
) -> Series:
    """Padded series of a table in long form.

    The table is a DataFrame of pandas or polars, or a dictionary of columns. It has a row for each sample, with a
    column for each feature; or, with ``variable``, a row for each measurement, which names its feature. Rows may come
    in any order. Series are in the order in which the table first names them; their samples are sorted by time.

    Arguments:
        table: the table.
        id: column that identifies the series.
        time: column of times: numbers, or dates.
        values: columns of the features; with ``variable``, the one column of the measured values. Missing values are
            NaN or null.
        static: columns of features that do not change within a series, or are missing.
            Default: ``None``.
        variable: column that names the feature of each row's measurement. Default: ``None``.
        features: with ``variable``, the features and their order; rows of others are left out, and a series without
            any other row has the length 0. Give those of the training data, ``features=train.features``. None takes
            all, sorted by name. Default: ``None``.
        duplicates: what becomes of values that a series has of one feature at one time: their ``"mean"``, the
            ``"first"`` or ``"last"`` of the table, or an ``"error"``. Default: ``"mean"``.
        unit: of dates, the length of time that is 1 in t: ``"s"``, ``"min"``, ``"h"``, ``"D"``, ``"W"``, or a duration;
            t is counted since 1970. None is a second. Default: ``None``.
        dtype: of the values. Default: ``torch.float32``.

    Returns:
        The series, with x, t, mask, lengths, static and ids.

    Raises:
        KeyError: if there is no such column.
        ValueError, TypeError: if a column does not hold what it should; the message names it.

    Example:
        >>> import hbnode
        >>> table = {"patient": ["a", "a", "b", "a"], "hour": [2.0, 0.5, 1.0, 2.0], "pulse": [80.0, 70.0, 60.0, 90.0]}
        >>> series = hbnode.data.from_long(table, id="patient", time="hour", values=["pulse"])
        >>> series.ids, series.lengths, series.t, series.x[..., 0]
        (['a', 'b'], tensor([2, 1]), tensor([[0.5000, 2.0000],
                [1.0000, 1.0000]], dtype=torch.float64), tensor([[70., 85.],
                [60., nan]]))
    """
    import numpy

    kinds = get_args(Duplicates)
    if duplicates not in kinds:
        near = nearest(duplicates, kinds) or "mean"
        raise ValueError(f"duplicates must be one of {kinds}, got {duplicates!r}. Fix: {near!r}.")
    columns = [values] if isinstance(values, str) else list(values)
    statics = [] if static is None else [static] if isinstance(static, str) else list(static)
    if variable is not None and len(columns) != 1:
        raise ValueError(f"with variable=, values must be one column, got {columns}. Fix: values='value'.")
    if features is not None and variable is None:
        raise ValueError("features is for tables with variable=. Fix: values=, which has an order already.")
    ids, codes = _codes(_column(table, id), id)
    times = _times(_column(table, time), time, unit)
    if variable is None:
        names, feature = columns, None
    else:
        names, feature = _features(_column(table, variable), variable, features)
    numbers = numpy.stack([_numbers(_column(table, name), name) for name in columns], 1)

    fixed = [_constant(_numbers(_column(table, name), name), codes, ids, name) for name in statics]
    order = numpy.lexsort((times, codes))
    if feature is not None:
        order = order[feature[order] >= 0]
    codes, times, numbers = codes[order], times[order], numbers[order]
    is_new = numpy.ones(len(codes), dtype=bool)
    is_new[1:] = (numpy.diff(codes) != 0) | (numpy.diff(times) != 0)
    places = numpy.arange(len(names))[None] if feature is None else feature[order][:, None]
    merged = _merged(numbers, is_new.cumsum() - 1, places, len(names), duplicates)
    counts = numpy.bincount(codes[is_new], minlength=len(ids))
    x, t = (torch.from_numpy(part) for part in _padded(merged, times[is_new], codes[is_new], counts))
    constant = torch.from_numpy(numpy.stack(fixed, 1)).to(dtype) if fixed else None
    return Series(x.to(dtype), t, ~torch.isnan(x), torch.from_numpy(counts).long(), constant, ids, names, statics)


def _column(table: Any, name: str) -> Any:
    known = list(table.columns) if hasattr(table, "columns") else list(table)
    if name not in known:
        is_index = name in getattr(getattr(table, "index", None), "names", ())
        fix = "table.reset_index()" if is_index else nearest(name, tuple(map(str, known))) or repr(known[:1])
        raise KeyError(f"the table has no column {name!r}, but {known}. Fix: {fix}.")
    return table[name]


def _array(column: Any, name: str) -> NDArray[Any]:
    import numpy

    array: NDArray[Any] = numpy.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if array.ndim != 1:
        raise ValueError(
            f"column {name!r} must be one entry a row, got shape {array.shape}. Fix: a column for each, with a name of "
            "its own."
        )
    return array


def _codes(column: Any, name: str) -> tuple[list[Any], NDArray[Any]]:
    """The different entries in the order in which they first come, and which of them each row has."""
    import numpy

    array = _array(column, name)
    if len(array) == 0:
        raise ValueError("the table has no rows. Fix: at least one.")
    known: dict[Any, int] = {}
    entries = [entry.item() if hasattr(entry, "item") else entry for entry in array.tolist()]
    if any(entry is None or str(entry) in ("<NA>", "NaT") or entry != entry for entry in entries):
        raise ValueError(f"column {name!r} has missing entries; expected one in each row. Fix: drop these rows.")
    codes = numpy.array([known.setdefault(entry, len(known)) for entry in entries])
    return list(known), codes


def _features(column: Any, name: str, wanted: str | Sequence[str] | None) -> tuple[list[str], NDArray[Any]]:
    """Names of the features, and the place of each row's; -1 for one that is not wanted."""
    import numpy

    found, codes = _codes(column, name)
    names = sorted(found) if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    places = {feature: i for i, feature in enumerate(names)}
    of_rows = numpy.array([places.get(feature, -1) for feature in found])[codes]
    if (of_rows < 0).all():
        raise ValueError(f"column {name!r} has none of the features {names}, but {found}. Fix: features=None.")
    return names, of_rows


def _times(column: Any, name: str, unit: str | datetime.timedelta | None) -> NDArray[Any]:
    import numpy

    seconds = as_seconds(column)
    if seconds is None and unit is not None:
        raise ValueError(f"unit={unit!r} is for dates, and column {name!r} holds numbers. Fix: leave it out.")
    if isinstance(unit, str) and unit not in UNITS:
        raise ValueError(f"unit must be one of {tuple(UNITS)} or a duration, got {unit!r}. Fix: 'h'.")
    length = 1.0 if unit is None else UNITS[unit] if isinstance(unit, str) else as_duration(unit, "unit")
    array = _array(column, name)
    if seconds is None and array.dtype.kind in "OUT" and any(isinstance(entry, str) for entry in array.tolist()):
        raise TypeError(
            f"column {name!r} must hold numbers or dates, got text. Fix: pandas.to_datetime(table[{name!r}])."
        )
    times: NDArray[Any] = (as_times(column, name) if seconds is None else seconds / length).double().numpy()
    if not numpy.isfinite(times).all():
        row = int((~numpy.isfinite(times)).nonzero()[0][0])
        raise ValueError(f"column {name!r} is missing or infinite in row {row}. Fix: drop rows without a time.")
    return times


def _numbers(column: Any, name: str) -> NDArray[Any]:
    """A column as float64, missing values as NaN."""
    import numpy

    array = _array(column, name)
    if array.dtype.kind == "O" and hasattr(column, "to_numpy"):
        array = numpy.array([numpy.nan if str(entry) == "<NA>" else entry for entry in array.tolist()], dtype=object)
    try:
        if array.dtype.kind not in "biufO":
            raise ValueError
        numbers: NDArray[Any] = array.astype(numpy.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"column {name!r} must hold numbers, got {array.dtype}. Fix: codes or pandas.get_dummies for categories; "
            "of dates the time since another."
        ) from None
    if numpy.isinf(numbers).any():
        raise ValueError(f"column {name!r} holds infinite values. Fix: make them NaN, which is missing.")
    return numbers


def _merged(
    numbers: NDArray[Any], stamps: NDArray[Any], places: NDArray[Any], features: int, rule: Duplicates
) -> NDArray[Any]:
    """The values of each stamp and feature, (stamps, features).

    Arguments:
        numbers: values (rows, columns), the rows sorted by stamp.
        stamps: the stamp of each row.
        places: the feature of each value, to broadcast with (rows, columns).
        features: how many there are.
        rule: what becomes of several values of one stamp and feature.
    """
    import numpy

    places = numpy.broadcast_to(places, numbers.shape)
    observed = ~numpy.isnan(numbers)
    index, found = (stamps[:, None] * features + places)[observed], numbers[observed]
    shape = (int(stamps[-1]) + 1, features)
    count = numpy.bincount(index, minlength=shape[0] * features)
    if rule == "error" and (count > 1).any():
        raise ValueError(
            f"{int((count > 1).sum())} values of a feature have more than one row of one series and time. "
            "Fix: duplicates='mean', 'first' or 'last'."
        )
    merged: NDArray[Any] = numpy.full(shape[0] * features, numpy.nan)
    if rule == "mean":
        numpy.divide(numpy.bincount(index, found, minlength=len(merged)), count, out=merged, where=count > 0)
    else:
        step = -1 if rule == "first" else 1
        merged[index[::step]] = found[::step]  # of equal places the last one stays
    return merged.reshape(shape)


def _padded(
    x: NDArray[Any], times: NDArray[Any], codes: NDArray[Any], counts: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values (series, T, features) and times (series, T) of stamps sorted by series and time."""
    import numpy

    total = int(counts.max())
    place = numpy.arange(len(codes)) - (counts.cumsum() - counts)[codes]
    padded = numpy.full((len(counts), total, x.shape[1]), numpy.nan)
    t = numpy.full((len(counts), total), -numpy.inf)
    padded[codes, place], t[codes, place] = x, times
    t[counts == 0] = 0.0
    return padded, numpy.maximum.accumulate(t, axis=1)


def _constant(numbers: NDArray[Any], codes: NDArray[Any], ids: list[Any], name: str) -> NDArray[Any]:
    """One value for each series, of those that are there."""
    import numpy

    least, most = (numpy.full(len(ids), numpy.nan) for _ in range(2))
    numpy.fmin.at(least, codes, numbers)
    numpy.fmax.at(most, codes, numbers)
    changes = least < most
    if changes.any():
        one = ids[int(changes.nonzero()[0][0])]
        raise ValueError(
            f"static column {name!r} changes within series {one!r}. Fix: make it one of values=, or take its first."
        )
    return least
