"""CIFAR-10, or a subset of it: found in ``HBNODE_DATA``, or downloaded."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from tasks.data.arrays import as_images
from tasks.data.download import download, find

URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
FOLDER = "cifar-10-batches-py"


def read_cifar10(split: str) -> tuple[Tensor, Tensor]:
    """CIFAR-10, 32x32 in colour: 50,000 images for training and 10,000 for testing. Krizhevsky, 2009.

    The official python batches (the folder ``cifar-10-batches-py`` or its archive) in ``HBNODE_DATA``; else a subset
    there, ``cifar10-subset/cifar10_subset.npz`` with ``x_train``, ``y_train``, ``x_test``, ``y_test``, images uint8
    (N, 32, 32, 3); else the archive is downloaded.

    Returns:
        Images (N, 3, 32, 32) in [0, 1] and labels (N,).
    """
    root = os.environ.get("HBNODE_DATA")
    archive, subset = find((ARCHIVE,)), find(("cifar10_subset.npz",), ("cifar10-subset",))
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    if root and (Path(root) / FOLDER).is_dir():
        files = [Path(root) / FOLDER / name for name in names]
        images, labels = _join([_read_batch(file.read_bytes(), file) for file in files])
    elif subset and not archive:
        images, labels = _read_subset(subset, split)
    else:
        fix = "the folder cifar-10-batches-py into it"
        archive = archive or download(URL, ARCHIVE, MD5, "", fix)
        images, labels = _join(_read_archive(archive, names))
    return as_images(images, labels, (3, 32, 32), "CIFAR-10")


class _BatchUnpickler(pickle.Unpickler):
    """Reads dictionaries of strings, lists and arrays, and runs nothing else that a pickle might hold."""

    def find_class(self, module: str, name: str) -> object:
        """Return the names that an array of NumPy needs, written by any version."""
        if (module.replace("._core", ".core"), name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file does")


def _read_batch(content: bytes, source: Path) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 32, 32) and labels (N,) of one python batch."""
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = torch.as_tensor(batch[b"data"].copy()), torch.tensor(batch[b"labels"])
        return images.reshape(-1, 3, 32, 32), labels
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise ValueError(
            f"{source} is no CIFAR-10 batch ({type(error).__name__}: {error}). Fix: delete it and get it anew."
        ) from error


def _read_archive(path: Path, names: list[str]) -> list[tuple[Tensor, Tensor]]:
    try:
        with tarfile.open(path) as archive:
            members = [archive.extractfile(f"{FOLDER}/{name}") for name in names]
            contents = [member.read() for member in members if member]
    except (tarfile.TarError, EOFError, KeyError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}). Fix: delete it and get it anew.") from error
    return [_read_batch(content, path) for content in contents]


def _read_subset(path: Path, split: str) -> tuple[Tensor, Tensor]:
    import numpy as np

    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            images, labels = torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"])
        return images.permute(0, 3, 1, 2), labels
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); expected an npz with x_train, y_train, x_test, y_test, images "
            "(N, 32, 32, 3). Fix: get it anew, or the official batches."
        ) from error


def _join(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)
