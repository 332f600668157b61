"""Files of data sets: found in the folder ``HBNODE_DATA``, or downloaded once with a checksum."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def find(names: Sequence[str], folders: Sequence[str] = ("",)) -> Path | None:
    """Return the first file of these names in these folders of ``HBNODE_DATA``; None if there is none."""
    root = os.environ.get("HBNODE_DATA")
    paths = (Path(root) / folder / name for folder in folders for name in names) if root else ()
    return next((path for path in paths if path.is_file()), None)


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


def from_benchmarks(read: Callable[[Any], T], missing: str, fix: str) -> T:
    """Return what ``read`` gets from the package ``nonlinear_benchmarks``, which downloads data.

    Arguments:
        read: called with the package.
        missing: the beginning of an error's message: which file is not where.
        fix: its end.

    Raises:
        FileNotFoundError: if the package is not installed, or fails.
    """
    try:
        import nonlinear_benchmarks
    except ImportError as error:
        raise FileNotFoundError(f"{missing}, and nonlinear_benchmarks is not installed. {fix}") from error
    try:
        return read(nonlinear_benchmarks)
    except Exception as error:  # no network, or an answer without the data, and it raises whatever it likes
        raise FileNotFoundError(f"{missing}, and nonlinear_benchmarks failed ({error!r}). {fix}") from error
