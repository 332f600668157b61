"""The base class of the estimators of series: conversion of data and targets, training, and files without pickle."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch.utils.data import DataLoader
from typing_extensions import Self

from hbnode._checks import as_count, level_of_user
from hbnode.data import (
    Series,
    aligned,
    bucketed_batches,
    by_id,
    check_zone,
    column_of,
    has_zone,
    is_missing,
    is_table,
    observed,
    on_clock,
)
from hbnode.estimators.networks import BATCH, SeriesNetwork
from hbnode.features import checked, moments
from hbnode.training import stored_in, train, write_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRUSTED = ("hbnode.", "sklearn.", "aeon.", "torch.device")  # packages whose classes a file may contain
FORMAT = 3  # version of the file format
STEPS = 8  # minimum number of batches in an epoch, unless batches would have fewer than four series


class SeriesEstimator(BaseEstimator):
    """The base class of scikit-learn estimators for series: it converts data, trains networks, and saves and loads."""

    id: str | None
    time: str | None
    values: str | Sequence[str] | None
    static: str | Sequence[str] | None
    n_members: int
    learning_rate: float
    weight_decay: float
    max_epochs: int
    patience: int
    device: torch.device | str | None
    progress: bool | None
    features_: list[str]
    static_features_: list[str]
    clock_: tuple[float | None, np.datetime64 | None]
    networks_: list[Any]
    is_absolute_ = True  # whether times are used as they are, or as times since the first sample of each series
    _network: type[SeriesNetwork] = SeriesNetwork

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = self.__dict__.get("random_state") is None
        return tags

    # Data

    @property
    def _keys(self) -> tuple[Any, Any]:
        """A pair of names: the column of a table that contains ids, and the column that contains times."""
        return self.id, self.time

    def _to_series(self, data: Any, *, reset: bool) -> Series:
        """Convert data to series with the features, the unit and the origin of the training series.

        With ``reset``, data are the training series, whose features, unit and origin are stored.
        """
        id, time = self._keys
        names: dict[str, Any] = {"id": id, "time": time, "values": self.values, "static": self.static}
        as_count(self.n_members, "n_members")
        has_columns = is_table(data)
        if has_columns:
            data, names["static"] = self._encoded(data, reset)
            if not reset:
                names["values"] = self.features_
        data = checked(data)
        series, zone = observed(data, **names), has_zone(data, time)
        static = list(series.static_features)
        if has_columns and series.static is not None:
            levels = {f"{name}={level}" for name in self.levels_ for level in self.levels_[name]}
            is_level = torch.tensor([name in levels for name in static])
            series = dataclasses.replace(
                series, static=torch.where(is_level, series.static.nan_to_num(), series.static)
            )
        if reset:
            self.features_, self.static_features_ = list(series.features), static
            self.clock_, self.has_zone_ = (series.unit, series.origin), zone
            self.n_features_in_ = _width(data, series)
        elif _width(data, series) != self.n_features_in_ and _width(data, series) != len(series.features):
            wanted = f"{type(self).__name__} is expecting {self.n_features_in_} features as input"
            raise ValueError(f"X has {_width(data, series)} features, but {wanted}. Fix: arrays (n, channels, T).")
        series = on_clock(series, self.clock_)
        if self.is_absolute_:
            check_zone(zone, self.has_zone_)
        return aligned(series, self.features_, self.static_features_)

    def _encoded(self, table: Any, reset: bool) -> tuple[Any, list[str]]:
        """One-hot encode categorical static columns of a table. Return the table and the names of its static columns.

        Each level of a category in the training table gives one column. For an unknown level, all columns of the
        category are 0. For a missing level they are NaN, which :meth:`_to_series` replaces by 0.
        """
        wanted = listed(self.static)
        if reset:
            self.levels_: dict[str, list[str]] = {}
        for name in (*self._keys, *wanted):
            if name is not None:
                column_of(table, name)  # raises KeyError if the name is missing or in the index
        columns, names = {name: table[name] for name in getattr(table, "columns", table)}, []
        for name in wanted:
            if name not in columns or (name not in self.levels_ if not reset else not _is_category(columns[name])):
                names.append(name)
                continue
            entries = [None if is_missing(entry) else _level_name(entry) for entry in list(columns.pop(name))]
            if reset:
                self.levels_[name] = sorted({entry for entry in entries if entry is not None})
            for level in self.levels_[name]:
                if (key := f"{name}={level}") in columns:
                    fault = f"the table has a column {key!r}, the name of the level {level!r} of {name!r}"
                    raise ValueError(f"{fault}. Fix: table.rename(columns={{{key!r}: 'other'}}).")
                share = [np.nan if entry is None else float(entry == level) for entry in entries]
                columns[key] = np.array(share)
                names.append(key)
        return columns, names

    def _check_columns(self, series: Series, targets: NDArray[Any]) -> None:
        """Check the columns that ``values=None`` selects from a table.

        Raise ValueError if a column is constant in each series and reveals the target. Warn of other columns that are
        constant in each series.
        """
        if self.id is None or self.values is not None:
            return
        low, high = (fold.reduce(series.x.numpy(), 1) for fold in (np.fmin, np.fmax))
        is_fixed = ((low == high) | np.isnan(low)).all(0) & ~np.isnan(low).all(0)
        fixed = {name: column for name, column, each in zip(self.features_, low.T, is_fixed, strict=True) if each}
        told = [name for name in fixed if any(_tells(fixed[name], y) for y in targets.reshape(len(targets), -1).T)]
        if told:
            rest = [name for name in self.features_ if name not in told]
            fix = f"values={rest}" if rest else "a table with further columns"
            raise ValueError(f"columns {told} of the table equal y or a code of it. Fix: {fix}.")
        if fixed and len(fixed) < len(self.features_) and series.mask.sum(1).max() > 1:
            warnings.warn(
                f"values=None takes the columns {self.features_}, and {list(fixed)} are constant in each series. Fix: "
                f"static={list(fixed)}, or name the columns of values=.",
                stacklevel=level_of_user(),
            )

    def _fit_scale(self, series: Series, constant: float) -> None:
        """Store the mean and the standard deviation of each channel and static feature.

        ``constant`` replaces the standard deviation of a constant channel.
        """
        self.mean_, std = moments(series.x)
        self.std_ = np.where(std > 0, std, constant)
        if series.static is not None:
            self.static_mean_, std = moments(series.static)
            self.static_std_ = np.where(std > 0, std, constant)

    def _scaled(self, series: Series) -> Series:
        """Return the series with values and static features standardised by the training data."""
        x, static = (series.x.double() - torch.as_tensor(self.mean_)) / torch.as_tensor(self.std_), series.static
        if static is not None:
            static = (static.double() - torch.as_tensor(self.static_mean_)) / torch.as_tensor(self.static_std_)
        return dataclasses.replace(series, x=x, static=static)

    # Networks

    def _trained(
        self, network: Any, loss: Any, lengths: torch.Tensor, validation: Any, seed: int, name: str
    ) -> SeriesNetwork:
        """Train a network by AdamW (:func:`hbnode.training.train`) on batches of series of similar length.

        Arguments:
            network: the network.
            loss: function of a network and the indices of series that returns the training loss.
            lengths: lengths of the series.
            validation: function of a network that returns the validation loss.
            seed: seed of the random batches.
            name: name of the progress bar.
        """
        size, rows = min(BATCH, max(4, len(lengths) // STEPS)), torch.arange(len(lengths))
        batches = bucketed_batches(lengths, size, generator=torch.Generator().manual_seed(seed))
        train(
            network.to(self.device or "cpu"),
            loss,
            DataLoader(rows, batch_sampler=batches, collate_fn=torch.stack),  # type: ignore[arg-type]  # a tensor
            validation,
            optimizer=torch.optim.AdamW(network.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay),
            max_epochs=self.max_epochs,
            patience=self.patience,
            progress=self.progress,
            name=name,
        )
        return network

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a file without pickle. An error leaves an existing file unchanged.

        The file has torch's format. It stores networks as state dicts, and scikit-learn objects in the format of skops.

        Arguments:
            path: the file, which is replaced if it exists.

        Raises:
            NotFittedError: if the estimator is not fitted.
        """
        import skops.io

        check_is_fitted(self)
        rest = {name: value for name, value in vars(self).items() if name not in ("networks_", "history_")}
        of_index = [name for name in ("values", "static", "future") if hasattr(rest.get(name), "tolist")]
        rest |= {name: list(rest[name]) for name in of_index}
        networks = [(each.config, each.cpu().state_dict()) for each in getattr(self, "networks_", ())]
        entries = torch.frombuffer(bytearray(skops.io.dumps(rest)), dtype=torch.uint8)
        write_whole({"format": FORMAT, "kind": type(self).__name__, "rest": entries, "networks": networks}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the estimator that :meth:`save` wrote to a file.

        Only objects of hbnode, scikit-learn and aeon are created, so an untrusted file cannot execute code.

        Arguments:
            path: the file.

        Raises:
            ValueError: if the file was not written by :meth:`save`, or holds an estimator of another class.
        """
        import skops.io

        stored = stored_in(path)
        if stored.get("format") != FORMAT:
            raise ValueError(f"{path} must be a file made by save, whole and of this version. Fix: save it again.")
        if stored["kind"] != cls.__name__:
            kind = stored["kind"]
            raise ValueError(f"{path} must hold a {cls.__name__}, got {kind}. Fix: hbnode.estimators.{kind}.load.")
        entries = stored["rest"].numpy().tobytes()
        unknown = skops.io.get_untrusted_types(data=entries)
        foreign = [name for name in unknown if not name.startswith(TRUSTED)]
        if foreign:
            raise ValueError(f"{path} holds the classes {foreign}, which are not trusted. Fix: a file made by save.")
        estimator = cls()
        estimator.__dict__.update(skops.io.loads(entries, trusted=unknown))
        if stored["networks"]:
            estimator.networks_ = []
            for config, state in stored["networks"]:
                network = cls._network(**config)
                network.load_state_dict(state)
                estimator.networks_.append(network.eval())
        return estimator


def targets_of(y: Any, series: Series, data: Any, name: str = "y") -> NDArray[Any]:
    """Return the targets of all series as an array, (batch, ...). Weights and groups are converted in the same way.

    If ``data`` contains ids, a pandas Series that is indexed by these ids is sorted in the order of the series.

    Raises:
        ValueError: if there is not one entry for each series, or the index of a pandas Series has other ids.
    """
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None. Fix: fit(X, y), one for each series.")
    if isinstance(y, Mapping):
        raise ValueError(f"{name} must be an array or a pandas Series, got a dictionary. Fix: pandas.Series({name}).")
    is_list = isinstance(data, (list, tuple)) and isinstance(data[0], Series)
    if is_list or isinstance(data, (Series, dict)) or hasattr(data, "columns"):
        y = by_id(y, series.ids, name)
    targets: NDArray[Any] = np.asarray(y.detach().cpu() if isinstance(y, torch.Tensor) else y)
    if targets.ndim == 0 or len(targets) != len(series):
        fix = f"{name}.loc[ids] with one entry for each id, for a table with several rows of one series"
        raise ValueError(
            f"{name} must have one entry for each of {len(series)} series, got {targets.shape}. Fix: {fix}."
        )
    return targets


def listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(() if names is None else names)


def _width(data: Any, series: Series) -> int:
    """Return scikit-learn's ``n_features_in_``: the number of columns of a 2-D array, else the number of channels."""
    return data.shape[1] if isinstance(data, np.ndarray) and data.ndim == 2 else len(series.features)


def _tells(column: NDArray[Any], targets: NDArray[Any]) -> bool:
    """Return whether the values (batch,) of a column reveal the targets (batch,).

    This is the case if the values equal the targets. With more than five series it is also the case if each value
    belongs to one target, and each target to one value. If no value repeats, the values must also increase or decrease
    with the targets.
    """
    values, codes = (np.unique(each[~np.isnan(column)], return_inverse=True)[1] for each in (column, targets))
    count = values.max() + 1
    is_code = len({*zip(values.tolist(), codes.tolist(), strict=True)}) == count == codes.max() + 1 > 1
    is_ordered = any(np.array_equal(each, codes) for each in (values, count - 1 - values))
    is_long = len(values) > 5 and (is_ordered or count < len(values))
    return is_code and (is_long or np.array_equal(column, targets))


def _level_name(entry: Any) -> str:
    """Return the name of a level (entry) of a categorical column: the entry as text.

    1.0 becomes "1", because pandas converts integers to floats in a column with missing entries.
    """
    is_whole = isinstance(entry, (float, np.floating)) and float(entry).is_integer()
    return str(int(entry) if is_whole else entry)


def _is_category(column: Any) -> bool:
    if str(getattr(column, "dtype", "")) == "category":
        return True
    array = np.asarray(column)
    return array.dtype.kind in "OUS" and any(isinstance(entry, str) for entry in array.tolist())
