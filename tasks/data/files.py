"""Find the files of data sets in the folder ``HBNODE_DATA``, download and check them, or simulate data instead."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tasks.common.files import readable

T = TypeVar("T")
logger = logging.getLogger(__name__)


def data_folder() -> Path | None:
    """Return the folder ``HBNODE_DATA``; None if it is not set."""
    root = os.environ.get("HBNODE_DATA")
    return Path(root) if root else None


def find(names: Sequence[str], folders: Sequence[str] = ("",)) -> Path | None:
    """Return the first file with one of these names in these folders of ``HBNODE_DATA``; None if there is none."""
    root = data_folder()
    paths = (root / folder / name for folder in folders for name in names) if root else ()
    return next((path for path in paths if path.is_file()), None)


def missing(name: str, fix: str) -> FileNotFoundError:
    """Return the error for a missing file or folder.

    Arguments:
        name: name of the file or folder.
        fix: advice in the error message.
    """
    return FileNotFoundError(f"{name} is not in HBNODE_DATA={os.environ.get('HBNODE_DATA')!r}. {fix}")


def read_or_simulate(source: str, name: str, read: Callable[[], T], simulate: Callable[[], T]) -> tuple[T, str]:
    """Return data and their source. A warning says when missing data are replaced by simulated ones.

    Arguments:
        source: "generated" simulates, "auto" simulates if there are no data, any other name reads.
        name: name of the source of the data that ``read`` returns.
        read: reads the data, and raises FileNotFoundError if there is none.
        simulate: makes simulated data.
    """
    if source != "generated":
        try:
            return read(), name
        except FileNotFoundError as error:
            if source != "auto":
                raise
            logger.warning("This run uses simulated data. %s", error)
    return simulate(), "generated"


def download(url: str, name: str, md5: str, folder: str, fix: str) -> Path:
    """Download a file unless it was downloaded before, and return its path.

    Arguments:
        url: address of the file without its name.
        name: name of the file.
        md5: checksum of the file.
        folder: folder for the file in ``HBNODE_DATA``, or in the user's cache if ``HBNODE_DATA`` is not set.
        fix: what the user should put into ``HBNODE_DATA``, for the error message.

    Raises:
        FileNotFoundError: if it cannot be downloaded, or if its checksum differs.
    """
    import pooch

    root = os.environ.get("HBNODE_DATA")
    cache = Path(root or pooch.os_cache("hbnode")) / folder
    try:
        return Path(pooch.retrieve(url + name, f"md5:{md5}", fname=name, path=cache, progressbar=True))
    except (OSError, ValueError) as error:  # no network, or a wrong file
        raise FileNotFoundError(
            f"{name} is neither in HBNODE_DATA={root!r} nor could it be downloaded ({error}). "
            f"Fix: set HBNODE_DATA to a folder and put {fix}."
        ) from error


def from_benchmarks(read: Callable[[Any], T], name: str, fix: str) -> T:
    """Return data of the package ``nonlinear_benchmarks``, which downloads them.

    Arguments:
        read: function of the package that returns the data.
        name: name of the file that is not in ``HBNODE_DATA``.
        fix: what the error advises.

    Raises:
        FileNotFoundError: if the package is not installed, or raises an error.
    """
    try:
        import nonlinear_benchmarks

        return read(nonlinear_benchmarks)
    except Exception as error:  # not installed, no network, or an answer without the data
        raise missing(name, f"The package nonlinear_benchmarks failed ({error!r}). {fix}") from error


def read_columns(path: Path, columns: Sequence[str], rows: int, fix: str) -> Tensor:
    """Return the first columns of a CSV file with a header as a float64 tensor (rows, columns).

    Arguments:
        path: path of the file.
        columns: names of the first columns; further columns are ignored.
        rows: number of rows that the file must have.
        fix: what the error advises.

    Raises:
        ValueError: if the header, an entry or the number of rows is wrong.
    """
    import pandas as pd

    with readable(path, fix):
        table = pd.read_csv(path, index_col=False, float_precision="round_trip")
        header = list(table.columns[: len(columns)])
        if header != list(columns):
            raise ValueError(f"expected the header {','.join(columns)}, got {header}")
        record = torch.tensor(table[header].dropna(how="all").to_numpy("float64"))
    return check_record(record, (rows, len(columns)), str(path), fix)


def check_record(record: Tensor, shape: tuple[int, int], name: str, fix: str) -> Tensor:
    """Return the record if it is finite and has this shape; otherwise raise ValueError."""
    if record.shape != shape or not torch.isfinite(record).all():
        raise ValueError(
            f"{name}: expected {shape[0]:,} rows of {shape[1]} finite numbers, got shape {tuple(record.shape)} with "
            f"{int((~torch.isfinite(record)).sum())} numbers that are not finite. {fix}"
        )
    return record
