"""Files of data sets: found in the folder ``HBNODE_DATA``, or downloaded once with a checksum; read and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def data_folder() -> Path | None:
    """Return the folder ``HBNODE_DATA``, None without one."""
    root = os.environ.get("HBNODE_DATA")
    return Path(root) if root else None


def find(names: Sequence[str], folders: Sequence[str] = ("",)) -> Path | None:
    """Return the first file of these names in these folders of ``HBNODE_DATA``; None if there is none."""
    root = data_folder()
    paths = (root / folder / name for folder in folders for name in names) if root else ()
    return next((path for path in paths if path.is_file()), None)


def missing(name: str, fix: str) -> FileNotFoundError:
    """Return the error that a file or folder is not there.

    Arguments:
        name: of the file or folder.
        fix: what the error advises.
    """
    return FileNotFoundError(f"{name} is not in HBNODE_DATA={os.environ.get('HBNODE_DATA')!r}. {fix}")


@contextmanager
def readable(path: Path | str, fix: str, problem: str = "cannot be read") -> Iterator[None]:
    """Within it any exception, of which a damaged file raises whatever it likes, is a ValueError that names the file.

    Arguments:
        path: of the file.
        fix: what the error advises.
        problem: what it says of the file.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} {problem} ({type(error).__name__}: {error}). {fix}") from error


def download(url: str, name: str, md5: str, folder: str, fix: str) -> Path:
    """Return the file, downloaded once, into a folder of ``HBNODE_DATA`` if that is set.

    Arguments:
        url: of the file, without its name.
        name: of the file.
        md5: its checksum.
        folder: where to put it, in ``HBNODE_DATA`` or in the cache of the user.
        fix: what the error asks the user to put into ``HBNODE_DATA``.

    Raises:
        FileNotFoundError: if it cannot be downloaded, or is another file.
    """
    import pooch

    root = os.environ.get("HBNODE_DATA")
    cache = Path(root or pooch.os_cache("hbnode")) / folder
    try:
        return Path(pooch.retrieve(url + name, f"md5:{md5}", fname=name, path=cache, progressbar=True))
    except (OSError, ValueError) as error:  # no network, or a file that is not the one
        raise FileNotFoundError(
            f"{name} is neither in HBNODE_DATA={root!r} nor could it be downloaded ({error}). "
            f"Fix: set HBNODE_DATA to a folder and put {fix}."
        ) from error


def from_benchmarks(read: Callable[[Any], T], name: str, fix: str) -> T:
    """Return what ``read`` gets from the package ``nonlinear_benchmarks``, which downloads data.

    Arguments:
        read: called with the package.
        name: of the file that is not in ``HBNODE_DATA``.
        fix: what the error advises.

    Raises:
        FileNotFoundError: if the package is not installed, or fails.
    """
    try:
        import nonlinear_benchmarks
    except ImportError as error:
        raise missing(name, f"The package nonlinear_benchmarks is not installed. {fix}") from error
    try:
        return read(nonlinear_benchmarks)
    except Exception as error:  # no network, or an answer without the data, and it raises whatever it likes
        raise missing(name, f"The package nonlinear_benchmarks failed ({error!r}). {fix}") from error


def read_columns(path: Path, columns: Sequence[str], rows: int, fix: str) -> Tensor:
    """The first columns of a CSV file with a header, in float64, (rows, columns).

    Arguments:
        path: of the file; further columns are disregarded.
        columns: their names.
        rows: how many the file must have.
        fix: what the error advises.

    Raises:
        ValueError: if the header, an entry or the number of rows is another.
    """
    import pandas as pd

    with readable(path, fix):
        try:
            table = pd.read_csv(
                path, index_col=False, skip_blank_lines=False, encoding_errors="replace", float_precision="round_trip"
            )
        except pd.errors.EmptyDataError:
            table = pd.DataFrame()
    header = list(table.columns[: len(columns)])
    if header != list(columns):
        raise ValueError(f"{path}: expected the header {','.join(columns)}, got {header}. {fix}")
    wanted = table[header].dropna(how="all")  # blank lines
    numbers = wanted.apply(pd.to_numeric, errors="coerce")
    if bool(numbers.isna().any(axis=None)):
        line = numbers.isna().any(axis=1).idxmax()
        found = wanted.loc[line].tolist()
        raise ValueError(f"{path}, line {line + 2}: expected {len(columns)} numbers, got {found}. {fix}")
    return check_record(torch.tensor(numbers.to_numpy("float64")), (rows, len(columns)), str(path), fix)


def check_record(record: Tensor, shape: tuple[int, int], name: str, fix: str) -> Tensor:
    """The record, if it is of this shape and finite.

    Raises:
        ValueError: if it is not.
    """
    is_finite = bool(torch.isfinite(record).all())
    if record.shape != shape or not is_finite:
        raise ValueError(
            f"{name}: expected {shape[0]:,} rows of {shape[1]} finite numbers, got shape {tuple(record.shape)}"
            f"{'' if is_finite else ' with others among them'}. {fix}"
        )
    return record


def pad_bytes(texts: Sequence[bytes], max_length: int) -> tuple[Tensor, Tensor]:
    """Texts as rows of their bytes, cut to ``max_length`` and padded with 0, (N, longest) uint8; lengths (N,).

    A zero byte, which no text should have, becomes a space, so that 0 is padding alone.
    """
    lengths = torch.tensor([min(len(text), max_length) for text in texts], dtype=torch.long)
    rows = torch.zeros(len(texts), int(lengths.max()) if len(texts) else 0, dtype=torch.uint8)
    for row, text in zip(rows, texts, strict=True):
        cut = bytearray(text[:max_length].replace(b"\0", b" "))
        if cut:
            row[: len(cut)] = torch.frombuffer(cut, dtype=torch.uint8)
    return rows, lengths
