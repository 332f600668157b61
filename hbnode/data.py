"""Irregular series: conversion of tables in long form to padded series, and batches for PyTorch's DataLoader."""

from __future__ import annotations

import dataclasses
import datetime
import operator
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import Self, override

from hbnode._checks import as_count, as_integers, as_tensor, check_bool, check_choice, nearest, to_tensor
from hbnode._times import EPOCH, SECOND, SPACINGS, as_times, check_digits, exact_times, kind_of, seconds_since, zones_of
from hbnode._torch import may_look
from hbnode._tree import Record, record

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BucketedBatches", "Dataset", "Series", "as_series", "bucketed_batches", "collate", "from_long"]

Duplicates = Literal["mean", "first", "last", "error"]
Unit = str | datetime.timedelta | np.timedelta64
Date = str | datetime.date | np.datetime64
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "D": 86400.0, "W": 604800.0}
ROUNDING = 0.01  # largest relative change of the gap between two samples that is allowed when rounding to float64
ARRAYS = "a list of pairs (t, x), or an array (batch, channels, T)"
POOL = 50  # number of batches in a pool, within which series are sorted by length


Known = TypeVar("Known", float, np.datetime64)
_OF_DATES: list[Any] = [np.dtype, type(EPOCH.dtype), EPOCH.__reduce__()[0]]
torch.serialization.add_safe_globals(_OF_DATES)  # for torch.load(weights_only=True) of a Series with an origin


@record
class Series(Record):
    """A batch of irregular series, padded to the length of the longest.

    Call an :class:`hbnode.ODERNN`, :class:`hbnode.nn.Oscillators` or :class:`hbnode.nn.OscillatorStack` as
    ``layer(**series.inputs())``. :meth:`to` changes the device or dtype.
    ``dataclasses.replace(series, x=scale(series.x))`` replaces an attribute.

    Models take times as numbers in the unit of t. A series stores this unit and the date of t = 0. :meth:`durations`
    and :meth:`times` convert durations and dates to such numbers. :meth:`dates` converts times to dates.

    Attributes:
        x: values (batch, T, features); NaN for missing values and on padding.
        t: times (batch, T) in float64. Padding repeats the time of the last sample.
        mask: True for observed values, (batch, T, features), bool.
        lengths: number of samples of each series, (batch,).
        static: features that are constant in time, (batch, static features); NaN if missing. None without them.
        ids: identifiers of the series.
        features: names of the features.
        static_features: names of the static features.
        unit: length of one unit of t in seconds; None if the unit is unknown.
        origin: the date of t = 0 (UTC); None if times are not dates.

    Example:
        >>> import datetime, numpy, hbnode
        >>> table = {"id": [1, 1], "time": numpy.array(["2020-01-01", "2020-01-02"], "datetime64[D]"), "y": [3.0, 4.0]}
        >>> series = hbnode.data.from_long(table, id="id", time="time", values="y", unit="h", origin="2020-01-01")
        >>> series.t
        tensor([[ 0., 24.]], dtype=torch.float64)
        >>> series.durations([datetime.timedelta(minutes=90), datetime.timedelta(days=1)])
        tensor([ 1.5000, 24.0000], dtype=torch.float64)
        >>> series.times(["2020-01-03", "2020-01-03 06:00"])
        tensor([48., 54.], dtype=torch.float64)
        >>> series.dates(series.t + 0.5)
        array([['2020-01-01T00:30:00.000000', '2020-01-02T00:30:00.000000']],
              dtype='datetime64[us]')
    """

    x: Tensor
    t: Tensor
    mask: Tensor
    lengths: Tensor
    static: Tensor | None = None
    ids: Sequence[Any] = ()
    features: Sequence[str] = ()
    static_features: Sequence[str] = ()
    unit: float | None = None
    origin: np.datetime64 | None = None

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __repr__(self) -> str:
        batch, length, count = self.x.shape
        names = f" {list(self.features)}" if 0 < len(self.features) <= 8 else ""
        static = "" if self.static is None else f", {self.static.shape[1]} static"
        return f"Series({batch} series, up to {length} samples, {count} features{names}{static})"

    def __getitem__(self, index: int | Tensor | Sequence[int] | slice) -> Series:
        """Return one series as a batch of size 1 for an integer, and ``self.select(index)`` for any other index."""
        if isinstance(index, slice) or np.ndim(index):
            return self.select(index)  # type: ignore[arg-type]
        place = operator.index(index)  # type: ignore[arg-type]
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} is out of range for {len(self)} series")
        return self.select([place % len(self)])

    def inputs(self) -> dict[str, Any]:
        """Return the tensors x, t, mask, lengths and static in a dict, as keyword arguments for a layer."""
        return {name: getattr(self, name) for name in ("x", "t", "mask", "lengths", "static")}

    @override
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the series on another device or in another dtype. The arguments are those of :meth:`torch.Tensor.to`.

        The tensors t, mask and lengths keep their dtypes.

        Raises:
            ValueError: if a finite value or static feature would be infinite in the new dtype.
        """
        moved = super().to(*args, **kwargs)
        if moved.x.dtype != self.x.dtype and may_look() and not moved.x.is_meta:
            fault = f"numbers that are infinite in {moved.x.dtype}. Fix: series.to({self.x.dtype})."
            for (is_infinite, names), (was, _) in zip(_infinite(_named(moved)), _infinite(self), strict=True):
                _refuse_infinite(is_infinite & ~was.to(is_infinite.device), names, fault)
        return moved

    def select(self, index: Tensor | Sequence[int] | slice) -> Series:
        """Return some of the series, padded to the length of the longest selected series.

        Arguments:
            index: integer indices (n,), a slice, or a bool mask (batch,).
        """
        whole = range(len(self))[index] if isinstance(index, slice) else index
        rows = as_integers(whole, "index", "series.select([3]) for one series")
        if rows.dtype == torch.bool and rows.shape == (len(self),):
            rows = rows.nonzero()[:, 0]
        if rows.dim() != 1 or rows.dtype == torch.bool or (rows.is_floating_point() and len(rows)):
            got = f"{rows.dtype} {tuple(rows.shape)}"
            wanted = f"integers (n,), a slice, or a bool mask ({len(self)},)"
            raise ValueError(f"index must be {wanted}, got {got}. Fix: series.select([3]).")
        rows = rows.long()
        lengths = self.lengths[rows.to(self.lengths.device)]
        total = int(lengths.max()) if len(lengths) else 0
        rows = rows.to(self.x.device)
        x, t, mask = (part[rows, :total] for part in (self.x, self.t, self.mask))
        static = None if self.static is None else self.static[rows]
        ids = [self.ids[i] for i in rows.tolist()] if self.ids else ()
        return dataclasses.replace(self, x=x, t=t, mask=mask, lengths=lengths, static=static, ids=ids)

    def durations(self, durations: Any) -> Tensor:
        """Convert durations to numbers in the unit of t. The result is float64 and has the shape of ``durations``.

        Arguments:
            durations: a single duration, an array or nested lists. Durations may come from numpy, pandas, polars or the
                standard library, or be text that pandas reads, such as ``"1h"``. Numbers must be in the unit of t; they
                are not converted.

        Raises:
            TypeError: if the unit of t is unknown, or ``durations`` are dates.
        """
        kind = kind_of(durations)
        if kind == "dates":
            raise TypeError("expected durations, got dates. Fix: series.times(dates) for their times.")
        if kind is None:
            return _as_numbers(durations, "durations")
        return torch.as_tensor(_durations(durations) / self._known(self.unit, kind))

    def times(self, dates: Any) -> Tensor:
        """Convert dates to values of t. The result is float64 and has the shape of ``dates``.

        A forecast takes the time dt since a state: ``dt = series.times(dates) - state.t.unsqueeze(-1)``.

        Arguments:
            dates: a single date, an array or nested lists. Dates may come from numpy, pandas, polars or the standard
                library, or be ISO text such as ``"2020-01-31 12:00"``. Numbers must be values of t; they are not
                converted. A date without a time zone is in UTC. A pandas Period is converted to its start.

        Raises:
            TypeError: if the series has no origin, if ``dates`` are durations, or if only some of the dates have a time
                zone.
        """
        kind = kind_of(dates)
        if kind is None:
            return _as_numbers(dates, "dates")
        origin = self._known(self.origin, kind)
        if kind == "durations":
            raise TypeError("expected dates, got durations. Fix: series.durations(durations).")
        seconds = seconds_since(_dates(dates), origin)
        return torch.as_tensor(seconds / self._known(self.unit, kind))

    def dates(self, t: Any) -> NDArray[np.datetime64]:
        """Convert values of t to a datetime64 array of dates in UTC, with the shape of t. NaN becomes NaT.

        Dates are rounded to nanoseconds if the origin has nanoseconds, otherwise to microseconds.

        Raises:
            TypeError: if the series has no origin.
        """
        origin, unit = self._known(self.origin, "times to convert to dates"), self._known(self.unit, "times")
        return np.asarray(origin + _timedelta(_as_numbers(t, "t") * unit, np.datetime_data(origin)[0] == "ns"))

    def to_frame(self, *, id: str = "id", time: str = "time") -> Any:
        """Return the series as a pandas DataFrame in long form, with one row for each sample.

        The column of times has the dates of :meth:`dates` if the series has an origin, durations if it has only a unit,
        and numbers otherwise. Missing values are NaN. Series of length 0 have no rows. All other series are recovered
        by ``from_long(series.to_frame(), id="id", time="time", values=series.features)`` with the same ``static``,
        ``unit`` and ``origin``.

        Arguments:
            id: name of the column of ids. Default: ``"id"``.
            time: name of the column of times. Default: ``"time"``.

        Raises:
            ValueError: if two columns would have the same name.
        """
        import pandas

        whole = _named(self)
        row, sample = (torch.arange(self.x.shape[1]) < self.lengths.cpu().unsqueeze(1)).numpy().nonzero()
        x, t, mask = (part.numpy(force=True)[row, sample] for part in (self.x.double(), self.t, self.mask))
        times = t if self.unit is None else _timedelta(torch.from_numpy(t) * self.unit, True)
        columns = [[whole.ids[i] for i in row], times if self.origin is None else self.dates(t)]
        columns += [*np.where(mask, x, np.nan).T]
        columns += [] if self.static is None else [*self.static.double().numpy(force=True)[row].T]
        names = [id, time, *whole.features, *whole.static_features]
        if len({*names}) < len(names):
            raise ValueError(f"columns must have different names, got {names}. Fix: to_frame(id='_id', time='_time').")
        return pandas.DataFrame(dict(zip(names, columns, strict=True)))

    def _known(self, value: Known | None, got: str) -> Known:
        if value is None:
            raise TypeError(
                f"the series has unit={self.unit!r} and origin={self.origin!r}, which cannot convert {got}. Fix: "
                "numbers in the unit of t; or set the unit of t, dataclasses.replace(series, unit=3600.0, "
                "origin=numpy.datetime64('2020-01-01')) for hours since 2020."
            )
        return value

    @staticmethod
    @override
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name in ("t", "mask", "lengths") else new


# Conversion of new series to the unit of time and the features of the training series


def on_clock(series: Series, clock: tuple[float | None, np.datetime64 | None]) -> Series:
    """Return the series with times that count from the origin of the training series.

    Arguments:
        series: the series.
        clock: the unit and the origin of the training series.

    Raises:
        ValueError: if the units differ, or only one of the two has an origin.
    """
    (unit, origin), found = clock, (series.unit, series.origin)
    if found[0] != unit or (found[1] is None) != (origin is None):
        fix = "the same kind of times, and the same unit= in from_long"
        wanted, got = _clock_name(unit, origin), _clock_name(*found)
        raise ValueError(f"times must be as in fit, {wanted}, got {got}. Fix: {fix}.")
    if unit is None or origin is None or series.origin is None or series.origin == origin:
        return series
    shift = (series.origin - origin) / SECOND / unit
    return dataclasses.replace(series, t=series.t + float(shift), origin=origin)


def _clock_name(unit: float | None, origin: np.datetime64 | None) -> str:
    kind = "numbers" if unit is None else "durations" if origin is None else "dates"
    return kind if unit is None else f"{kind} in units of {unit:g} s"


def aligned(series: Series, features: Sequence[Any], static_features: Sequence[Any] | None = None) -> Series:
    """Return a series with its channels and static features in the order of the training series.

    Channels are matched by name. They are matched by position if the new or the training series has the default names
    ``"x0"``, ``"x1"``, ... Static features are matched in the same way; their default names are ``"static0"``, ...

    Arguments:
        series: the new series. It must have names, as a result of :func:`as_series` has.
        features: names of the training channels.
        static_features: names of the training static features. None keeps the order of the static features.
            Default: ``None``.

    Raises:
        ValueError: if names are missing or unknown.
    """
    order = _order(series.features, features, "channels", "features")
    static = _order(series.static_features, static_features, "static features", "static_features")
    if order == sorted(order) and static == sorted(static):
        return series
    names = [series.features[i] for i in order], [series.static_features[i] for i in static]
    x, mask, fixed = series.x[..., order], series.mask[..., order], series.static
    fixed = None if fixed is None else fixed[:, static]
    return dataclasses.replace(series, x=x, mask=mask, static=fixed, features=names[0], static_features=names[1])


def _order(found: Sequence[Any], wanted: Sequence[Any] | None, kind: str, argument: str) -> list[int]:
    """Return a list with the position in ``found`` of each name in ``wanted``, matched as in :func:`aligned`.

    ``kind`` and ``argument`` name the channels or static features in the error message.
    """
    if wanted is None or list(found) == list(wanted):
        return list(range(len(found)))
    names, fits = list(map(str, found)), list(map(str, wanted))
    if sorted(names) == sorted(fits):
        return [names.index(name) for name in fits]
    if len(names) != len(fits) or _default(argument, len(names)) not in (names, fits):
        lost, new = ([each for each in one if each not in other] for one, other in ((fits, names), (names, fits)))
        raise ValueError(
            f"series must have {len(fits)} {kind} as in fit, got {len(names)}: missing {lost}, unknown {new}. Fix: the "
            f"same columns as in fit, {fits}; if only the names differ, dataclasses.replace(series, {argument}={fits})."
        )
    return list(range(len(names)))


def by_id(targets: Any, ids: Sequence[Any], name: str = "y") -> Any:
    """Return targets in the order of the series, whose ids are ``ids``.

    Pandas targets whose index consists of these ids are put in the order of ``ids``. An index 0, 1, 2, ... that does
    not consist of the ids is ignored. Other targets are returned unchanged.

    Raises:
        ValueError: if a pandas index holds other ids.
    """
    index = list(targets.index) if hasattr(targets, "iloc") else list(ids)
    if index == list(ids) or len(index) != len(ids):
        return targets
    if Counter(index) == Counter(ids):
        place = {label: i for i, label in enumerate(index)}
        return targets.iloc[[place[one] for one in ids]]
    if index == list(range(len(index))):
        return targets
    strangers = [label for label in index if label not in {*ids}]
    fault = f"{strangers[0]!r}, which is no id" if strangers else "an id more than once"
    raise ValueError(
        f"the index of {name} must be the ids of the series, got {fault}. Fix: {name}.to_numpy(), if it is in the "
        f"order of the series; {name}.loc[list(series.ids)] before a split by position, as in cross_val_score."
    )


# Tables in long form


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
    unit: Unit | None = None,
    origin: Date | None = None,
    dtype: torch.dtype = torch.float32,
) -> Series:
    """Convert a table in long form to padded series.

    The table has one row per sample and one column per feature. With ``variable`` it has one row per measurement, and
    the column ``variable`` names the measured feature. Rows may be in any order. The series are in the order of their
    first rows. The samples of a series are sorted by time.

    Arguments:
        table: a DataFrame of pandas or polars, or a dictionary of columns.
        id: column that identifies the series.
        time: column of times: numbers, dates or durations. A pandas Period is converted to its start.
        values: columns of the features; with ``variable``, the single column of measured values. Missing values are
            NaN or null.
        static: columns of features that are constant within each series; values may be missing. Default: ``None``.
        variable: column with the name of the measured feature in each row. Default: ``None``.
        features: with ``variable``, the features and their order. Rows of other features are dropped, and a series with
            only such rows has length 0. For validation and test data use ``features=train.features``. None takes
            all features, sorted by name. Default: ``None``.
        duplicates: how to merge several values of the same feature, series and time: ``"mean"`` takes their mean,
            ``"first"`` or ``"last"`` takes the first or last one in the table, ``"error"`` raises ValueError.
            Default: ``"mean"``.
        unit: for dates and durations, the unit of t: ``"s"``, ``"min"``, ``"h"``, ``"D"``, ``"W"``, or a duration.
            None is a second. Default: ``None``.
        origin: for dates, the date of t = 0: a date or ISO text, in UTC if it has no time zone. Use the same origin for
            validation and test data. None is 1970-01-01 (UTC). With None and a gap shorter than about 24 microseconds
            (100 spacings of float64), it is the first date, rounded down to a second. Default: ``None``.
        dtype: dtype of the values. Default: ``torch.float32``.

    Returns:
        A :class:`Series`.

    Raises:
        KeyError: if the table has no such column.
        ValueError, TypeError: if an id, a time or a variable is missing, if entries have a wrong type, or if rounding
            to float64 would change a gap between two times by more than 1 %. The message names the column.

    Example:
        >>> import hbnode
        >>> table = {"patient": ["a", "a", "b", "a"], "hour": [2.0, 0.5, 1.0, 2.0], "pulse": [80.0, 70.0, 60.0, 90.0]}
        >>> series = hbnode.data.from_long(table, id="patient", time="hour", values=["pulse"])
        >>> series.ids, series.lengths, series.t, series.x[..., 0]
        (['a', 'b'], tensor([2, 1]), tensor([[0.5000, 2.0000],
                [1.0000, 1.0000]], dtype=torch.float64), tensor([[70., 85.],
                [60., nan]]))
    """
    check_choice(duplicates, "duplicates", get_args(Duplicates))
    columns = _names(values, "values")
    if not columns:
        raise ValueError("values names no column, got []. Fix: values=['value'].")
    statics = [] if static is None else _names(static, "static")
    if variable is not None and len(columns) != 1:
        raise ValueError(f"with variable=, values must be one column, got {columns}. Fix: values='value'.")
    if features is not None and variable is None:
        raise ValueError("features= needs variable=, got None. Fix: features=None; values= sets the order of features.")
    used = [id, time, *columns, *statics, *([] if variable is None else [variable])] if isinstance(table, dict) else []
    sizes = {name: len(_array(column_of(table, name), f"column {name!r}")) for name in used}
    if len({*sizes.values()}) > 1:
        fix = f"[value] * {max(sizes.values())} for a constant"
        raise ValueError(f"columns must have one entry per row, got lengths {sizes}. Fix: {fix}.")
    ids, codes = _codes(column_of(table, id), id)
    exact = _exact_times(column_of(table, time), f"table[{time!r}]", unit, origin)
    names, feature = columns, np.arange(len(columns))[None]  # feature indices that broadcast to (rows, columns)
    if variable is not None:
        names, feature = _features(column_of(table, variable), variable, features)
    numbers = _matrix(table, columns, "values")
    constant = None
    if statics:
        constant = _in_dtype(_constant(_matrix(table, statics, "static"), codes, ids, statics), dtype, statics)
    feature = np.broadcast_to(feature, numbers.shape)
    order = np.lexsort((exact, codes))
    order = order[feature[order, 0] >= 0]
    codes, exact, numbers, feature = codes[order], exact[order], numbers[order], feature[order]
    is_new = np.ones(len(codes), dtype=bool)  # whether a row is the first one with its series and time
    is_new[1:] = (np.diff(codes) != 0) | (exact[1:] != exact[:-1])
    merged, count = _merge(numbers, is_new.cumsum() - 1, feature, len(names), duplicates)
    codes, exact = codes[is_new], exact[is_new]
    if duplicates == "error" and (count > 1).any():
        point, one = np.argwhere(count > 1)[0]
        first = f"{names[one]!r} of series {ids[codes[point]]!r} at t={exact[point]}"
        raise ValueError(f"{(count > 1).sum()} values have several rows, first {first}. Fix: duplicates='mean'.")
    series = _padded(codes, exact, merged, ids, names, dtype, f"table[{time!r}]", unit, origin)
    _check_digits(table[time], series.t.numpy(), f"table[{time!r}]")
    return dataclasses.replace(series, static=constant, static_features=statics)


def _padded(
    codes: NDArray[Any], exact: NDArray[Any], x: NDArray[Any], ids: list[Any], names: list[Any], dtype: torch.dtype,
    name: str, unit: Unit | None, origin: Date | None,
) -> Series:  # fmt: skip
    """Build a padded Series from the samples of all series, sorted by series and time.

    Arguments:
        codes: index in ``ids`` of the series of each sample, (samples,).
        exact: times without rounding, (samples,).
        x: values, (samples, features).
        ids: ids of the series.
        names: names of the features.
        dtype: dtype of the values.
        name: name of the times in error messages.
        unit: unit of the times, as in :func:`from_long`.
        origin: date of time 0, as in :func:`from_long`.
    """
    t, length, zero = _times(exact, codes, name, unit, origin)
    counts = np.bincount(codes, minlength=len(ids))
    place = np.arange(len(codes)) - (counts.cumsum() - counts)[codes]
    values = np.full((len(ids), max(1, counts.max()), x.shape[1]), np.nan)
    times = np.full(values.shape[:2], -np.inf)
    values[codes, place], times[codes, place] = x, t
    times[counts == 0] = 0.0
    times = np.maximum.accumulate(times, axis=1)
    padded, mask = _in_dtype(values, dtype, names), torch.from_numpy(~np.isnan(values))
    lengths = torch.from_numpy(counts).long()
    return Series(padded, torch.from_numpy(times), mask, lengths, None, ids, names, (), length, zero)


def _in_dtype(values: NDArray[Any], dtype: torch.dtype, names: Sequence[Any]) -> Tensor:
    """Convert an array (..., columns) to a tensor of the given dtype. Raise ValueError if a value is too large for it.

    ``names`` are the names of the columns, for the error message.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype of torch, got {dtype!r}. Fix: dtype=torch.float32.")
    converted = torch.from_numpy(values).to(dtype)
    _refuse_infinite(converted.isinf(), names, f"numbers that are infinite in {dtype}. Fix: dtype=torch.float64.")
    return converted


def column_of(table: Any, name: str) -> Any:
    for has, fix in (("collect", "collect"), ("column_names", "to_pandas")):  # a LazyFrame of polars, pyarrow's table
        if hasattr(table, has):
            raise TypeError(f"table must be a DataFrame, got {type(table).__name__}. Fix: table.{fix}().")
    if not (hasattr(table, "columns") or isinstance(table, Mapping)):
        got = type(table).__name__
        raise TypeError(
            f"table must be a DataFrame or a dict of columns, got {got}. Fix: hbnode.data.as_series(table)."
        )
    known = list(table.columns) if hasattr(table, "columns") else list(table)
    if isinstance(name, Tensor) or not isinstance(name, Hashable):
        raise TypeError(f"a column must be given by its name, got {name!r}. Fix: one of {known}.")
    if name not in known:
        is_index = name in getattr(getattr(table, "index", None), "names", ())
        near = nearest(name, tuple(map(str, known)))
        fix = next((repr(each) for each in known if str(each) == near), f"{[*known, 'id'][0]!r}, or another of them")
        fix = "table.reset_index()" if is_index else fix
        raise KeyError(f"the table has no column {name!r}; its columns are {known}. Fix: {fix}.")
    return table[name]


def _array(column: Any, name: str) -> NDArray[Any]:
    array: NDArray[Any] = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one entry per row, got shape {array.shape}. Fix: split it into columns.")
    return array


def _codes(column: Any, name: str) -> tuple[list[Any], NDArray[Any]]:
    """Encode a column as integers. Return its distinct entries in order of appearance, and their indices, (rows,)."""
    array = _array(column, f"column {name!r}")
    if len(array) == 0:
        raise ValueError("the table has no rows; expected at least one. Fix: check how its rows were selected.")
    known: dict[Any, int] = {}
    array = exact_times(array) if array.dtype.kind in "mM" else array  # tolist would convert nanoseconds to integers
    entries = [entry.item() if hasattr(entry, "item") else entry for entry in array.tolist()]
    if any(map(is_missing, entries)):
        raise ValueError(f"column {name!r} has missing entries; expected one in each row. Fix: drop these rows.")
    codes = np.array([known.setdefault(entry, len(known)) for entry in entries])
    return list(known), codes


def is_missing(entry: Any) -> bool:
    return entry is None or str(entry) in ("<NA>", "NaT") or entry != entry


def _features(column: Any, name: str, wanted: str | Sequence[str] | None) -> tuple[list[str], NDArray[Any]]:
    """Encode a column that contains a feature name in each row as integers.

    Return the list of feature names, and for each row the index of its feature in this list, (rows, 1). ``wanted``
    selects features; None selects all. Rows with another feature have the index -1.
    """
    found, codes = _codes(column, name)
    names = sorted(found) if wanted is None else _names(wanted, "features")
    index = {feature: i for i, feature in enumerate(names)}
    of_rows = np.array([index.get(feature, -1) for feature in found])[codes, None]
    if (of_rows < 0).all():
        raise ValueError(f"column {name!r} has none of the features {names}; it has {found}. Fix: features=None.")
    return names, of_rows


def _exact_times(column: Any, name: str, unit: Unit | None, origin: Date | None) -> NDArray[Any]:
    """Convert a column of times to an array (rows,) of numbers, datetime64 or timedelta64, without rounding.

    Raise an error if the times are text, or if ``unit`` or ``origin`` is given and does not apply to them.
    """
    kind = kind_of(_array(column, name))
    if kind == "text":
        raise TypeError(f"{name} must hold numbers or dates, got text. Fix: pandas.to_datetime({name}).")
    for argument, given in (("unit", unit), ("origin", origin)):
        if given is not None and (kind is None or (argument, kind) == ("origin", "durations")):
            found = kind or "numbers"
            raise ValueError(f"{argument}={given!r} is for dates, and {name} holds {found}. Fix: {argument}=None.")
    if kind is None:
        exact = _array(column, name)
        exact = _numbers(exact, name, f"pandas.to_numeric({name})") if exact.dtype.kind == "O" else exact
        exact = exact if exact.dtype.kind in "iu" else as_times(exact, name).double().numpy()
    else:
        exact = exact_times(column)
    is_missing = ~np.isfinite(exact)
    if is_missing.any():
        row = int(is_missing.nonzero()[0][0])
        raise ValueError(f"{name} is missing or infinite in row {row}. Fix: drop rows without a time.")
    return exact


def _times(
    exact: NDArray[Any], codes: NDArray[Any], name: str, unit: Unit | None, origin: Date | None
) -> tuple[NDArray[np.float64], float | None, np.datetime64 | None]:
    """Convert unrounded times, sorted by series and time, to float64.

    Returns:
        The times (samples,); the length of their unit in seconds, None for numbers; the origin, None unless they are
        dates.
    """
    is_gap = (np.diff(codes) == 0) & (exact[1:] != exact[:-1])
    if exact.dtype.kind in "iu":  # the difference of two int64 may overflow int64, but fits into uint64
        gaps = np.diff(exact.astype(np.int64)).view(np.uint64)[is_gap]
    else:
        gaps = np.diff(exact)[is_gap] / (SECOND if exact.dtype.kind in "mM" else 1.0)
    length = _seconds_per(unit) if exact.dtype.kind in "mM" else None
    zero: Any = None
    if exact.dtype.kind == "M":
        zero = EPOCH if origin is None else exact_times(_dates(origin, "origin"))[()]
        if np.ndim(zero) or np.isnat(zero):
            raise ValueError(f"origin must be one date, got {origin!r}. Fix: origin='2020-01-31'.")
        if origin is None and (SPACINGS * np.spacing(abs(seconds_since(exact)).max()) > gaps).any():
            zero = exact.min().astype("datetime64[s]").astype(exact.dtype)
    times = exact.astype(np.float64) if length is None else seconds_since(exact, EPOCH if zero is None else zero)
    if (abs(np.diff(times)[is_gap] - gaps) > ROUNDING * gaps).any():
        fix = f"origin=None for dates, {name} - {name}.min() for numbers and durations"
        raise ValueError(f"{name} has times that are too close to each other for float64. Fix: {fix}.")
    return times / (length or 1.0), length, zero


def _check_digits(column: Any, t: NDArray[np.float64], name: str) -> None:
    """Raise ValueError if times were rounded to float16 or float32 so that the gaps between them are inaccurate.

    Arguments:
        column: the column of times, in its original dtype.
        t: the same times in float64, sorted within each series, (..., T).
        name: name of the column in the error message.
    """
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(str(_array(column, name).dtype))
    if dtype is not None:
        check_digits(torch.from_numpy(t).to(dtype), torch.from_numpy(t).diff(), name, 1.0)


def _seconds_per(unit: Unit | None) -> float:
    """Return the length of a unit of time in seconds. The unit is a name such as "h", a duration, or None (1 s)."""
    if isinstance(unit, str) and unit in UNITS:
        return UNITS[unit]
    length = 1.0 if unit is None else float(seconds_since(unit)) if kind_of(unit) == "durations" else -1.0
    if not 0 < length < np.inf:
        near = next((name for name in UNITS if str(unit).lower().startswith(name.lower())), "h")
        raise ValueError(f"unit must be one of {tuple(UNITS)} or a positive duration, got {unit!r}. Fix: {near!r}.")
    return length


def _names(names: Any, argument: str) -> list[Any]:
    """Convert one or several column names to a list. Raise ValueError if a name occurs twice."""
    if isinstance(names, str):
        return [names]
    if not isinstance(names, Iterable) or isinstance(names, Tensor):
        raise TypeError(f"{argument} must be names of columns, got {names!r}. Fix: {argument}=['value'].")
    found = names.tolist() if hasattr(names, "tolist") else list(names)
    if any(found.count(name) > 1 for name in found):
        fix = f"{list(dict.fromkeys(found))}; table.loc[:, ~table.columns.duplicated()] for a table that has one twice"
        raise ValueError(f"{argument} must name each column once, got {found}. Fix: {argument}={fix}.")
    return found


def _durations(durations: Any) -> NDArray[np.float64]:
    """Convert durations, or text such as "1h" that pandas reads, to an array of seconds with the same shape."""
    if kind_of(durations) != "text":
        return seconds_since(durations)
    import pandas

    text = np.asarray(durations, dtype=object)
    has_units = all(isinstance(each, str) and not re.search(r"^\d*$|M[Ss]$|mS$", each.strip()) for each in text.flat)
    if has_units:  # not a bare number, which pandas reads as nanoseconds, nor "MS", which may mean months
        with suppress(ValueError):
            return np.array([pandas.to_timedelta(each).total_seconds() for each in text.flat]).reshape(text.shape)
    raise ValueError(f"durations must be text such as '1h' or '30min', got {durations!r}. Fix: '1h'.")


def _timedelta(seconds: Tensor, has_nanoseconds: bool) -> NDArray[np.timedelta64]:
    """Convert a tensor of seconds to an array of timedelta64 with the same shape; NaN becomes NaT.

    Durations are rounded to nanoseconds with ``has_nanoseconds``, otherwise to microseconds.
    """
    name, steps = ("ns", 1e9) if has_nanoseconds else ("us", 1e6)
    number = seconds.detach().cpu().numpy()
    since = np.where(np.isfinite(number), number * steps, np.iinfo(np.int64).min).round()  # the smallest int64 is NaT
    return np.asarray(since.astype(np.int64).astype(f"timedelta64[{name}]"))


def _dates(dates: Any, name: str = "dates") -> Any:
    """Convert one or several dates in text such as "2020-01-31" to datetime64, and return other dates unchanged.

    Raise ValueError if the values are not dates. ``name`` is the name of the argument in the message.
    """
    try:
        kind, text = kind_of(dates), np.asarray(dates)
        if kind == "dates":
            return dates
        if kind == "text" and all("-" in each for each in text.reshape(-1).tolist()):  # NumPy would read "12" as a year
            return text.astype("datetime64")[()]
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be dates or ISO text, got {dates!r}. Fix: pandas.to_datetime({name}).")


def _as_numbers(values: Any, name: str) -> Tensor:
    if isinstance(values, (int, float)):
        return torch.tensor(float(values), dtype=torch.float64)
    return as_tensor(values, name).double()


def _matrix(table: Any, names: list[Any], argument: str) -> NDArray[Any]:
    """Return the columns ``names`` of a table as a float64 array, (rows, columns).

    Raise TypeError if a column contains text, dates or durations. ``argument`` is the argument that names the columns.
    """
    columns = {name: _array(column_of(table, name), f"column {name!r}") for name in names}
    wrong = [name for name, column in columns.items() if kind_of(column)]
    rest = [name for name in names if name not in wrong]
    fix = "codes or pandas.get_dummies for categories, differences from another date for dates"
    fix = f"{argument}={rest}; {fix}" if wrong and rest else fix
    if wrong:
        raise TypeError(f"columns {wrong} must hold numbers, got text, dates or durations. Fix: {fix}.")
    return np.stack([_numbers(column, f"column {name!r}", fix) for name, column in columns.items()], 1)


def _numbers(value: Any, name: str, fix: str) -> NDArray[Any]:
    """Convert numbers to a float64 array, with NaN for missing values. Raise an error for text and infinite values.

    ``name`` (what the numbers are) and ``fix`` (how to correct them) are parts of the error message.
    """
    array: Any = None
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        if array.dtype.kind == "O":
            array = np.where(array.astype(str) == "<NA>", np.nan, array)
        if array.dtype.kind not in "biufO" or any(isinstance(x, str) for x in array.flat if array.dtype.kind == "O"):
            raise ValueError
        numbers: NDArray[Any] = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        kind = getattr(array, "dtype", type(value).__name__)
        raise TypeError(f"{name} must hold numbers in one shape, got {kind}. Fix: {fix}.") from None
    if np.isinf(numbers).any():
        raise ValueError(f"{name} holds infinite values. Fix: replace them by NaN, a missing value.")
    return numbers


def _merge(
    numbers: NDArray[Any], points: NDArray[Any], feature: NDArray[Any], features: int, rule: Duplicates
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Merge all values that have the same series, time and feature.

    Arguments:
        numbers: values, (rows, columns).
        points: index of the sample (pair of series and time) of each row, (rows,), not decreasing.
        feature: index of the feature of each value, (rows, columns).
        features: number of features.
        rule: how to merge, as ``duplicates`` of :func:`from_long`.

    Returns:
        The merged values, and how many values were merged into each of them, (samples, features) each.
    """
    observed = ~np.isnan(numbers)
    index, found = (points[:, None] * features + feature)[observed], numbers[observed]
    size = (int(points[-1]) + 1) * features
    count = np.bincount(index, minlength=size)
    merged: NDArray[Any] = np.full(size, np.nan)
    if rule == "mean":
        np.divide(np.bincount(index, found, minlength=size), count, out=merged, where=count > 0)
    else:
        step = -1 if rule == "first" else 1
        merged[index[::step]] = found[::step]  # NumPy keeps the last value of equal indices
    return merged.reshape(-1, features), count.reshape(-1, features)


def _constant(numbers: NDArray[Any], codes: NDArray[Any], ids: list[Any], names: list[Any]) -> NDArray[Any]:
    """Return the value of each static feature of each series, (batch, columns); NaN if it is missing in all rows.

    ``numbers`` (rows, columns) holds the static columns, ``codes`` (rows,) the index of the series of each row. Raise
    ValueError if a column changes within a series.
    """
    least, most = np.full((2, len(ids), len(names)), np.nan)
    np.fmin.at(least, codes, numbers)
    np.fmax.at(most, codes, numbers)
    if (least < most).any():
        row, column = np.argwhere(least < most)[0]
        name = names[column]
        raise ValueError(f"static column {name!r} changes within series {ids[row]!r}. Fix: move it to values=.")
    return least


# Batches


def observed(data: Any, **options: Any) -> Series:
    """Convert data with :func:`as_series`, and return a detached series on the CPU with consistent mask and padding.

    Values are NaN where the mask is False. The mask is False for NaN and on padding. Padding repeats the time of the
    last sample. A series of length 0 gets one sample without values.
    """
    series = as_series(data, **options).to("cpu").detach().outside_inference_mode()
    if not series.x.shape[1]:
        x, t, mask = pad(series.x, (0, 0, 0, 1)), pad(series.t, (0, 1)), pad(series.mask, (0, 0, 0, 1))
        series = dataclasses.replace(series, x=x, t=t, mask=mask)
    is_sample = torch.arange(series.x.shape[1]) < series.lengths.unsqueeze(1)
    mask = series.mask & is_sample.unsqueeze(-1) & ~series.x.isnan()
    x, lengths = torch.where(mask, series.x, torch.nan), series.lengths.clamp(min=1)
    t = torch.where(is_sample, series.t, series.t.gather(1, lengths.unsqueeze(1) - 1))
    return dataclasses.replace(series, x=x, t=t, mask=mask, lengths=lengths)


class Dataset(TorchDataset[Any]):
    """A dataset of single series with optional targets, for a DataLoader with ``collate_fn=hbnode.data.collate``.

    :meth:`batches` returns a DataLoader of series of similar length.

    Arguments:
        series: the series of all items.
        targets: target of each series, (batch, ...), a tensor or an array. A pandas Series or DataFrame that is indexed
            by the ids is sorted in the order of the series. Default: ``None``.

    Raises:
        ValueError: if the numbers of targets and series differ, or a pandas index has other ids.

    Example:
        >>> import torch, hbnode
        >>> table = {"id": [1, 1, 1, 2, 2, 3], "t": [0.0, 1, 3, 0, 5, 2], "y": [0.1, 0.2, 0.3, 1.0, 1.1, 2.0]}
        >>> series = hbnode.data.from_long(table, id="id", time="t", values=["y"])
        >>> labels = torch.tensor([0, 1, 1])
        >>> for batch, y in hbnode.data.Dataset(series, labels).batches(2, shuffle=False):
        ...     print(batch.ids, tuple(batch.x.shape), y)
        [3, 2] (2, 2, 1) tensor([1, 1])
        [1] (1, 3, 1) tensor([0])
    """

    def __init__(self, series: Series, targets: Tensor | None = None) -> None:
        if not isinstance(series, Series):
            raise TypeError(f"series must be Series, got {type(series).__name__}. Fix: hbnode.data.as_series(data).")
        if targets is not None and (not hasattr(targets, "__len__") or isinstance(targets, Mapping)):
            fix = "[targets[one] for one in series.ids]" if isinstance(targets, Mapping) else "torch.tensor(targets)"
            raise TypeError(f"targets must be an array, got {type(targets).__name__}. Fix: {fix}.")
        if targets is not None and len(targets) != len(series):
            fix = "labels in the order of series.ids, for a pandas Series labels.loc[series.ids]"
            raise ValueError(f"targets must be one for each of {len(series)} series, got {len(targets)}. Fix: {fix}.")
        self.series, targets = series, by_id(targets, series.ids, "targets")
        self.targets = as_tensor(targets, "targets") if hasattr(targets, "to_numpy") else targets  # no index labels

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> Series | tuple[Series, Tensor]:
        """Return a single series without padding (batch size 1), and its target if the dataset has targets."""
        one = self.series[index]
        return one if self.targets is None else (one, self.targets[index])

    def batches(
        self, batch_size: int, *, shuffle: bool = True, generator: torch.Generator | None = None
    ) -> DataLoader[Any]:
        """Return a DataLoader that uses :func:`bucketed_batches` and :func:`collate`.

        Arguments:
            batch_size: number of series per batch.
            shuffle: whether to form new random batches in each epoch. Default: ``True``.
            generator: random number generator; None uses torch's global generator. Default: ``None``.
        """
        sampler = bucketed_batches(self.series.lengths, batch_size, shuffle=shuffle, generator=generator)
        return DataLoader(self, batch_sampler=sampler, collate_fn=collate, generator=generator)


def collate(items: Sequence[Series] | Sequence[tuple[Series, Any]]) -> Series | tuple[Series, Tensor]:
    """Join items of a :class:`Dataset` into one padded batch; use as ``collate_fn`` of a DataLoader.

    Features are sorted in the order of the first item that has feature names. If only some of the series have static
    features, the other series get NaN for them.

    Arguments:
        items: series, or pairs of a series and a target.

    Raises:
        TypeError: if an item is neither a series nor such a pair.
        ValueError: if there are no items, if only some items have a target or an id, or if the features, static
            features, units or origins of the items differ.
    """
    series, targets, ids = _parts_of_items(items)
    named = [_named(one) for one in series]
    features, statics = (_most_named(named, name) for name in ("features", "static_features"))
    series = [aligned(_with_static(one, statics), features, statics) for one in named]
    axes = {(one.unit, one.origin) for one in series}
    if len(axes) > 1:
        found = sorted(axes, key=str)
        raise ValueError(
            f"series must have one unit and origin of time, got {found}. Fix: one unit= and origin= in from_long."
        )
    total, x, mask, t = max(one.x.shape[1] for one in series), [], [], []
    for one in series:
        missing = total - one.x.shape[1]
        x.append(pad(one.x, (0, 0, 0, missing), value=torch.nan))
        mask.append(pad(one.mask, (0, 0, 0, missing)))
        t.append(pad(one.t, (0, missing), value=-torch.inf))
    static = torch.cat([cast("Tensor", one.static) for one in series]) if statics else None
    times = torch.cat(t).cummax(1).values.nan_to_num(neginf=0.0)
    parts = torch.cat(x), times, torch.cat(mask), torch.cat([one.lengths for one in series]), static
    batch = _finite(Series(*parts, ids, features, statics, *axes.pop()))
    if not targets:
        return batch
    return batch, torch.stack([to_tensor(x, "a target", "one number per series", None, None) for x in targets])


def _parts_of_items(items: Sequence[Any]) -> tuple[list[Series], list[Any], list[Any]]:
    """Split the items of a :class:`Dataset` into three lists: the series, the targets and the ids.

    The list of targets or ids is empty if no item has any. Raise ValueError if only some items have them.
    """
    if not items:
        raise ValueError("there are no items. Fix: a batch of at least one item.")
    pairs = [item if isinstance(item, (tuple, list)) and len(item) == 2 else (item,) for item in items]
    series, targets = [each[0] for each in pairs], [each[1] for each in pairs if len(each) == 2]
    strange = [type(item).__name__ for item, one in zip(items, series, strict=True) if not isinstance(one, Series)]
    if strange:
        raise TypeError(f"an item must be Series, or (series, target), got {strange[0]}. Fix: collate([dataset[0]]).")
    if len(targets) not in (0, len(series)):
        fault = f"got {len(targets)} targets of {len(series)} series"
        raise ValueError(f"all items must have a target, or none, {fault}. Fix: items of one Dataset.")
    ids = [name for one in series for name in one.ids]
    if len(ids) not in (0, sum(map(len, series))):
        fault = f"all series must have ids, or none, got {len(ids)} ids of {sum(map(len, series))} series"
        raise ValueError(f"{fault}. Fix: dataclasses.replace(series, ids=()) for those that have some.")
    return series, targets, ids


def _most_named(series: Sequence[Series], name: str) -> list[Any]:
    """Return the names of the first series whose names differ from the default names.

    If there is no such series, return the names of the first series that has names. ``name`` is the attribute of a
    series that holds the names: features or static_features.
    """
    found: list[list[Any]] = [getattr(one, name) for one in series]
    return max(found, key=lambda names: bool(names) + (names != _default(name, len(names))))


def _with_static(series: Series, names: Sequence[Any]) -> Series:
    """Return the series with static features that are all NaN if it has none, otherwise unchanged."""
    if series.static is not None or not names:
        return series
    missing = series.x.new_full((len(series), len(names)), torch.nan)
    return dataclasses.replace(series, static=missing, static_features=names)


class BucketedBatches(Sampler[list[int]]):
    """A batch sampler whose batches consist of series of similar length. :func:`bucketed_batches` creates it."""

    def __init__(
        self, lengths: Sequence[int], batch_size: int, shuffle: bool, drop_last: bool, generator: torch.Generator | None
    ) -> None:
        self.lengths, self.batch_size = list(lengths), batch_size
        self.shuffle, self.drop_last, self.generator = shuffle, drop_last, generator

    def __len__(self) -> int:
        whole, rest = divmod(len(self.lengths), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        pools, size = [list(range(len(self.lengths)))], self.batch_size
        if self.shuffle:
            order = torch.randperm(len(self.lengths), generator=self.generator).tolist()
            order = order[: len(self) * size]  # with drop_last, a random remainder is dropped
            pools = [order[i : i + POOL * size] for i in range(0, len(order), POOL * size)]
        batches = []
        for pool in pools:
            pool.sort(key=self.lengths.__getitem__)
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        places = torch.randperm(len(batches), generator=self.generator).tolist() if self.shuffle else range(len(self))
        yield from [batches[i] for i in places]


def bucketed_batches(
    lengths: Tensor | Sequence[int],
    batch_size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
) -> BucketedBatches:
    """Return batches of series of similar length, which need little padding; use as ``batch_sampler`` of a DataLoader.

    With ``shuffle`` every epoch has new batches: all series are randomly divided into pools of 50 batches, each pool is
    sorted by length and cut into batches, and all batches are returned in random order.

    Arguments:
        lengths: length of each series, (batch,).
        batch_size: number of series per batch.
        shuffle: whether to form new random batches in each epoch. If False, batches are sorted by length.
            Default: ``True``.
        drop_last: whether to drop an incomplete batch. Default: ``False``.
        generator: random number generator; None uses torch's global generator. Default: ``None``.

    Returns:
        An iterable over batches, each a list of indices of series.

    Raises:
        ValueError: if ``lengths`` are not integers (batch,).
    """
    counts = as_integers(lengths, "lengths", "series.lengths")
    if counts.dim() != 1 or counts.is_floating_point():
        got = f"{counts.dtype} {tuple(counts.shape)}"
        raise ValueError(f"lengths must be integers (batch,), got {got}. Fix: series.lengths.")
    check_bool(shuffle, "shuffle")
    check_bool(drop_last, "drop_last")
    return BucketedBatches(counts.tolist(), as_count(batch_size, "batch_size"), shuffle, drop_last, generator)


# Other forms of data


def as_series(
    data: Any,
    *,
    id: str | None = None,
    time: str | None = None,
    values: str | Sequence[str] | None = None,
    static: str | Sequence[str] | None = None,
    variable: str | None = None,
    unit: Unit | None = None,
    origin: Date | None = None,
    dtype: torch.dtype = torch.float64,
) -> Series:
    """Convert a table, a list of series or an array to padded series.

    Arguments:
        data: one of

            - a :class:`Series`, which gets default ids and feature names if it has none, or a list of them, which
              :func:`collate` joins;
            - a table in long form, which :func:`from_long` converts;
            - a list with a pair (t, x) for each series, with times t (n,) in any order and values x (n,) or
              (n, channels); a list [t, x] is a pair if t holds dates or durations, or x is an array (n, channels);
            - a list with an array (channels, n) for each series, at the times 0, 1, 2, ...;
            - an array or tensor (batch, channels, T), or (batch, T) for one channel, at the times 0, 1, 2, ...;
            - a pandas Series, which is one series at the times of its index.

            NaN is a missing value. In arrays, samples at the end of a series that have no value are padding.
        id: for a table, the column that identifies the series. Default: ``None``.
        time: for a table, the column of times. Default: ``None``.
        values: for a table, the columns of the features. None takes all columns that no other argument names.
            Default: ``None``.
        static: for a table, the columns of features that are constant within each series. Default: ``None``.
        variable: for a table, the column with the name of the measured feature in each row. Default: ``None``.
        unit: for dates, the unit of t, as in :func:`from_long`. Default: ``None``.
        origin: for dates, the date of t = 0, as in :func:`from_long`. Default: ``None``.
        dtype: dtype of the values. Default: ``torch.float64``.

    Returns:
        A :class:`Series`. A list or an array gets the ids 0, 1, 2, ... and the feature names ``"x0"``, ``"x1"``, ...

    Raises:
        TypeError, ValueError: if the data have another form.

    Example:
        >>> import numpy as np, hbnode
        >>> hbnode.data.as_series([([0.0, 0.4], [1.0, 2.0]), ([0.1, 0.2, 0.9], [3.0, np.nan, 4.0])])
        Series(2 series, up to 3 samples, 1 features ['x0'])
        >>> hbnode.data.as_series(np.zeros((5, 2, 100)))
        Series(5 series, up to 100 samples, 2 features ['x0', 'x1'])
    """
    if isinstance(data, Series):
        check_digits(data.t, data.t.diff(), "t", 1.0)
        return _finite(_named(data))
    if _is_indexed(data):
        data = [(data.index, data)]
    if is_table(data):
        options = {"static": static, "variable": variable, "unit": unit, "origin": origin, "dtype": dtype}
        return _from_table(data, id, time, values, options)
    parts = data if isinstance(data, (list, tuple)) else ()
    if parts and all(isinstance(one, Series) for one in parts):
        return _named(cast("Series", collate(parts)))
    if parts and all(map(_is_pair, parts)):
        return _joined(_sorted_pairs(parts, unit, origin), unit, origin, dtype)
    _refuse_lists_for_pairs(parts)
    if parts and all(getattr(one, "ndim", 0) == 2 for one in parts):
        rows = [_numbers(one, f"series {i}", ARRAYS).T for i, one in enumerate(parts)]
    else:
        rows = _rows_of_array(_numbers(data, "an array of series", ARRAYS))
    return _joined([(np.arange(len(x)), x) for x in map(_without_end, rows)], None, None, dtype)


def _from_table(table: Any, id: str | None, time: str | None, values: Any, options: dict[str, Any]) -> Series:
    """Convert a table with :func:`from_long`. ``values=None`` takes all columns that no other argument names."""
    if id is None or time is None:
        missing = "id" if id is None else "time"
        fix = "id='patient', time='hour' for these columns; table.to_numpy() for one series in each row"
        raise ValueError(f"a table needs the names of its columns, got {missing}=None. Fix: {fix}.")
    if values is None:
        static = options["static"]
        used = {id, time, options["variable"], *([] if static is None else _names(static, "static"))}
        values = [name for name in getattr(table, "columns", table) if name not in used]
    return from_long(table, id=id, time=time, values=values, **options)


def _sorted_pairs(
    pairs: Sequence[Any], unit: Unit | None, origin: Date | None
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Convert each pair (t, x) to a pair of arrays sorted by time: unrounded times (n,) and values (n, channels)."""
    found, kinds = [], dict[Any, int]()
    for i, (times, x) in enumerate(pairs):
        t, values = np.zeros(0), _numbers(x, f"x of series {i}", ARRAYS)
        if len(times):
            t = _exact_times(times, f"data[{i}][0]", unit, origin)
            kinds["mM".find(t.dtype.kind), has_zone([(times, x)])] = i
        values = values[:, None] if values.ndim == 1 else values
        if values.ndim != 2 or len(values) != len(t):
            got = f"{t.shape} and {np.shape(x)}"
            raise ValueError(f"series {i} must be t (n,) and x (n,) or (n, channels), got {got}. Fix: (t, x.T).")
        order = np.argsort(t, kind="stable")
        _check_digits(times, t[order], f"data[{i}][0]")
        found.append((t[order], values[order]))
    if len(kinds) > 1:
        raise TypeError(
            "times must be numbers in all series, or dates in all, with a time zone in all or in none, got both in "
            f"the series {list(kinds.values())}. Fix: pandas.to_datetime(t), or pandas.to_datetime(t, utc=True)."
        )
    return found


def _rows_of_array(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Split an array (batch, channels, T) or (batch, T) into a list with the values (T, channels) of each series."""
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(
            f"an array of series must be (batch, channels, T), or (batch, T) for one channel, with at least one "
            f"sample, got shape {array.shape}. Fix: x[None] for one series (channels, T), x[None, None] for (T,)."
        )
    return list((array[:, None] if array.ndim == 2 else array).swapaxes(1, 2))


def _named(series: Series) -> Series:
    """Return the series with default names where names are missing.

    Default ids are 0, 1, ..., default features ``"x0"``, ``"x1"``, ..., default static features ``"static0"``, ...

    Raises:
        ValueError: if there are too few or too many names, or two features have the same name.
    """
    static = 0 if series.static is None else series.static.shape[1]
    changed: dict[str, Any] = {}
    for name, count in (("ids", len(series)), ("features", series.x.shape[2]), ("static_features", static)):
        given = list(getattr(series, name))
        names = (given if count else []) or _default(name, count)
        if len(names) != count or (name != "ids" and len({*map(str, names)}) < count):
            fix = f"dataclasses.replace(series, {name}=()) for default names"
            raise ValueError(f"{name} must be {count} different names, got {names}. Fix: {fix}.")
        changed |= {} if names == given else {name: names}
    return dataclasses.replace(series, **changed) if changed else series


def _finite(series: Series) -> Series:
    """Return the series unchanged. Raise ValueError if an observed value or a static feature is infinite."""
    mended = (
        "mask=series.mask & ~series.x.isinf()",
        "static=torch.where(series.static.isinf(), torch.nan, series.static)",
    )
    for (is_infinite, names), part in zip(_infinite(series), mended, strict=False):
        _refuse_infinite(is_infinite, names, f"infinite values. Fix: dataclasses.replace(series, {part}).")
    return series


def _infinite(series: Series) -> Iterator[tuple[Tensor, Sequence[Any]]]:
    """Yield a mask of infinite entries and the names of its columns: first for the values, then for static features.

    Infinite values that ``series.mask`` marks as missing are not in the mask.
    """
    yield series.x.isinf() & series.mask, series.features
    if series.static is not None:
        yield series.static.isinf(), series.static_features


def _refuse_infinite(is_infinite: Tensor, names: Sequence[Any], fault: str) -> None:
    """Raise ValueError if a mask (..., columns) of infinite entries has a True entry.

    The message consists of the name of the first such column, "holds" and ``fault``.
    """
    if is_infinite.any():
        name = names[int(is_infinite.flatten(0, -2).any(0).byte().argmax())]
        raise ValueError(f"{name!r} holds {fault}")


def _default(name: str, count: int) -> list[Any]:
    """Return ``count`` default names for the attribute ``name`` of a series: ids, features or static_features."""
    prefix = {"features": "x", "static_features": "static"}.get(name)
    return list(range(count)) if prefix is None else [f"{prefix}{i}" for i in range(count)]


def is_table(data: Any) -> bool:
    """Return whether ``data`` is a DataFrame or a dict of columns. SciPy's dok_matrix, also a dict, is not a table."""
    return hasattr(data, "columns") or (isinstance(data, dict) and not hasattr(data, "toarray"))


def _is_indexed(data: Any) -> bool:
    return hasattr(data, "iloc") and data.ndim == 1


def has_zone(data: Any, time: Any = None) -> bool | None:
    """Return whether a date in ``data`` has a time zone; None if ``data`` cannot have time zones (Series, array).

    ``time`` is the name of the column of times in a table.
    """
    zones = zones_in(data, time)
    return None if zones is None else any(zone is not None for zone in zones.values())


def check_zone(found: bool | None, in_fit: bool | None) -> None:
    """Raise ValueError unless new dates and training dates both have time zones, or both have none.

    The arguments are results of :func:`has_zone` for the new and for the training data. None is always allowed.
    """
    if None not in (found, in_fit) and found != in_fit:
        fault, fix = ("with", "") if in_fit else ("without", ".tz_localize(None)")
        fix = f"pandas.DatetimeIndex(pandas.to_datetime(dates, utc=True)){fix}"
        raise ValueError(f"dates must be {fault} a time zone, as in fit. Fix: {fix}.")


def zones_in(data: Any, time: Any = None) -> dict[str, Any] | None:
    """Return a dict from the names of the time zones in a table or in pairs (t, x) to the time zone objects.

    For dates without a time zone, the dict has the entry ``"None": None``. NumPy dates are ignored. For other data the
    result is None. ``time`` is the name of the column of times in a table.
    """
    is_pairs = isinstance(data, (list, tuple)) and all(map(_is_pair, data))
    if not is_pairs and not is_table(data) and not _is_indexed(data):
        return None
    times = [t for t, _ in data] if is_pairs else [data.index if _is_indexed(data) else data[time]]
    return {name: zone for each in times for name, zone in zones_of(each).items()}


def is_list_of_series(data: Any) -> bool:
    """Return whether ``data`` is a list of Series, pairs (t, x) or 2-D arrays, rather than a nested list of numbers."""
    if not isinstance(data, (list, tuple)) or not data:
        return False
    first: Any = data[0]
    inner = first[0] if isinstance(first, list) and first else first
    return isinstance(first, (Series, tuple)) or getattr(first, "ndim", 0) == 2 or _is_column(inner) or _is_pair(first)


def _is_column(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 1


def _is_pair(value: Any) -> bool:
    """Return whether ``value`` is a pair of times and values: a tuple (t, x), or a list [t, x] that is clearly one.

    A list is clearly a pair if t holds dates or durations, or x is an array (n, channels).
    """
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    has_channels = _is_column(value[0]) and getattr(value[1], "ndim", 0) == 2
    return isinstance(value, tuple) or has_channels or kind_of(value[0]) in ("dates", "durations")


def _refuse_lists_for_pairs(data: Any) -> None:
    """Raise TypeError for one pair (t, x) that is not in a list, and for lists [t, x] that look like two channels."""
    is_list = [isinstance(one, list) and not isinstance(next(iter(one), []), (list, tuple)) for one in data]
    if isinstance(data, tuple) and len(data) == 2 and (any(map(_is_column, data)) or all(is_list)):
        raise TypeError("data must be a list of series, got one pair (t, x). Fix: [(t, x)].")
    if any(isinstance(one, list) and len(one) == 2 and any(map(_is_column, one)) for one in data):
        raise TypeError("a series must be a tuple (t, x), got a list [t, x]. Fix: [tuple(one) for one in data].")


def _without_end(x: NDArray[Any]) -> NDArray[Any]:
    """Remove the samples at the end of a series (T, channels) that have no value, but keep at least one sample."""
    seen = ~np.isnan(x).all(1)
    return x[: max(1, len(x) - int(seen[::-1].argmax()) if seen.any() else 1)]


def _joined(
    pairs: list[tuple[NDArray[Any], NDArray[Any]]], unit: Unit | None, origin: Date | None, dtype: torch.dtype
) -> Series:
    """Build a Series from a pair of sorted times (n,) and values (n, channels) for each series.

    For an empty pair the series has one sample without values.
    """
    widths = sorted({x.shape[1] for _, x in pairs})
    if len(widths) > 1:
        raise ValueError(f"all series must have one number of channels, got {widths}. Fix: NaN for absent channels.")
    codes = np.repeat(np.arange(len(pairs)), [len(t) for t, _ in pairs])
    exact = np.concatenate([t for t, _ in pairs if len(t)] or [np.zeros(0)])
    ids, x = list(range(len(pairs))), np.concatenate([x for _, x in pairs])
    series = _padded(codes, exact, x, ids, _default("features", widths[0]), dtype, "t", unit, origin)
    return dataclasses.replace(series, lengths=series.lengths.clamp(min=1))
