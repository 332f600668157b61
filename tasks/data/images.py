"""Data sets: found in ``HBNODE_DATA``, or downloaded once with a checksum."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import pickle
import tarfile
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR10_ARCHIVE = "cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR10_FOLDER = "cifar-10-batches-py"


def digits(split: str) -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits, 8x8, 16 grey levels: 1,437 for training and 360 for testing.

    The split is stratified and fixed. Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI, 1998.

    Returns:
        Images (N, 1, 8, 8) in [0, 1] and labels (N,).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    x, y = (train_x, train_y) if split == "train" else (test_x, test_y)
    return torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)


def mnist(split: str) -> tuple[Tensor, Tensor]:
    """MNIST, 28x28: 60,000 images for training and 10,000 for testing. LeCun, Bottou, Bengio and Haffner, 1998.

    Returns:
        Images (N, 1, 28, 28) in [0, 1] and labels (N,).
    """
    prefix = "train" if split == "train" else "t10k"
    images = read_idx(_mnist_file(f"{prefix}-images-idx3-ubyte.gz"))
    labels = read_idx(_mnist_file(f"{prefix}-labels-idx1-ubyte.gz"))
    images, labels = _checked(images, labels, (28, 28), "MNIST")
    return images[:, None], labels


def _checked(images: Tensor, labels: Tensor, shape: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    """Bytes as images in [0, 1], with their labels, if both are what this data set has."""
    span = f" from {labels.min()} to {labels.max()}" if labels.numel() else ""
    is_known = bool(span) and labels.min() >= 0 and labels.max() <= 9
    if not is_known or images.shape[1:] != shape or labels.shape != images.shape[:1]:
        raise ValueError(
            f"these are no {name} files: images {tuple(images.shape)}, labels {tuple(labels.shape)}{span}; expected "
            f"(N, {', '.join(map(str, shape))}) and (N,) with labels 0 to 9. Fix: get them anew, all of them."
        )
    return images.float() / 255, labels.long()


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, gzipped or not: two zeros, type, rank, big-endian sizes, data.

    Raises:
        ValueError: if it is not such a file, or shorter or longer than its header says.
    """
    fix = "Fix: delete the file and download it again."
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no gzip file ({error}). {fix}") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is no idx file of unsigned bytes: expected it to begin 00 00 08, got {raw[:3]!r}. {fix}"
        )
    rank = raw[3]
    if len(raw) < 4 + 4 * rank:
        raise ValueError(f"{path} is truncated: its header of {4 + 4 * rank} bytes is not whole. {fix}")
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    data = raw[4 + 4 * rank :]
    if not data:
        raise ValueError(f"{path} is empty: its header says {shape}. {fix}")
    if len(data) != math.prod(shape):
        raise ValueError(f"{path} is truncated: expected {math.prod(shape)} bytes for {shape}, got {len(data)}. {fix}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """CIFAR-10, 32x32 in colour: 50,000 images for training and 10,000 for testing. Krizhevsky, 2009.

    The official python batches (the folder ``cifar-10-batches-py`` or its archive) in ``HBNODE_DATA``; else a subset
    there, ``cifar10-subset/cifar10_subset.npz`` with ``x_train``, ``y_train``, ``x_test``, ``y_test``, images uint8
    (N, 32, 32, 3); else the archive is downloaded.

    Returns:
        Images (N, 3, 32, 32) in [0, 1] and labels (N,).
    """
    root = os.environ.get("HBNODE_DATA")
    subset = Path(root or "") / "cifar10-subset" / "cifar10_subset.npz"
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    if root and (Path(root) / CIFAR10_FOLDER).is_dir():
        files = [Path(root) / CIFAR10_FOLDER / name for name in names]
        images, labels = _join([_read_cifar_batch(file.read_bytes(), file) for file in files])
    elif root and not (Path(root) / CIFAR10_ARCHIVE).is_file() and subset.is_file():
        images, labels = _read_cifar_subset(subset, split)
    else:
        images, labels = _join(_read_cifar_archive(_cifar_archive(root), names))
    return _checked(images, labels, (3, 32, 32), "CIFAR-10")


class _CifarUnpickler(pickle.Unpickler):
    """Reads dictionaries of strings, lists and arrays, and runs nothing else that a pickle might hold."""

    def find_class(self, module: str, name: str) -> object:
        """What an array of numpy needs, whichever version wrote it."""
        if (module.replace("._core", ".core"), name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file does")


def _read_cifar_batch(content: bytes, source: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels (N,) of one python batch."""
    try:
        batch = _CifarUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = torch.as_tensor(batch[b"data"].copy()), torch.tensor(batch[b"labels"])
        return images.reshape(-1, 3, 32, 32), labels
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise ValueError(
            f"{source} is no CIFAR-10 batch ({type(error).__name__}: {error}). Fix: delete it and get it anew."
        ) from error


def _read_cifar_archive(path: Path, names: list[str]) -> list[tuple[Tensor, Tensor]]:
    try:
        with tarfile.open(path) as archive:
            members = [archive.extractfile(f"{CIFAR10_FOLDER}/{name}") for name in names]
            contents = [member.read() for member in members]
    except (tarfile.TarError, EOFError, KeyError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}). Fix: delete it and get it anew.") from error
    return [_read_cifar_batch(content, path) for content in contents]


def _read_cifar_subset(path: Path, split: str) -> tuple[Tensor, Tensor]:
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


def _cifar_archive(root: str | None) -> Path:
    """The archive in HBNODE_DATA, or downloaded."""
    if root and (Path(root) / CIFAR10_ARCHIVE).is_file():
        return Path(root) / CIFAR10_ARCHIVE
    return _download(CIFAR10_URL, CIFAR10_ARCHIVE, CIFAR10_MD5, "", "the folder cifar-10-batches-py into it")


def _mnist_file(name: str) -> Path:
    """The file in HBNODE_DATA, gzipped or not, in ``MNIST/raw`` (as torchvision lays it out), ``MNIST`` or itself."""
    root = os.environ.get("HBNODE_DATA")
    if root:
        for folder in (Path(root) / "MNIST" / "raw", Path(root) / "MNIST", Path(root)):
            for candidate in (folder / name, folder / name.removesuffix(".gz")):
                if candidate.is_file():
                    return candidate
    return _download(MNIST_URL, name, MNIST_MD5[name], "MNIST/raw", "the four idx files into a folder MNIST/raw in it")


def _download(url: str, name: str, md5: str, folder: str, fix: str) -> Path:
    """The file, downloaded once, into a folder of HBNODE_DATA if that is set."""
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


SILVERBOX_ROWS = 131_072
SILVERBOX_FIX = "Fix: get SNLS80mV.csv anew, from SilverboxFiles.zip of nonlinearbenchmark.org."
SILVERBOX_START = 50  # samples of a test set that are given, to find the state there; errors count from the next on
SILVERBOX_SETS = {  # the official split, as in Silverbox() of the package nonlinear_benchmarks 1.0.1
    "train": slice(40_650, 105_712),  # three quarters of the ten multisines, validation included
    "multisine": slice(105_712, 127_400),
    "arrow_no_extrapolation": slice(100, 32_100),  # the arrow while about as high as the multisines
    "arrow_full": slice(100, 40_575),
}


def silverbox() -> Tensor:
    """The Silverbox: input V1 and output V2 of an electronic Duffing oscillator, in volts, 610.35 samples a second.

    ``SNLS80mV.csv``, or ``silverbox/SNLS80mV.csv``, in ``HBNODE_DATA``; else what the package ``nonlinear_benchmarks``
    downloads. T. Wigren and J. Schoukens, Three free data sets for development and benchmarking in nonlinear system
    identification, European Control Conference 2013; nonlinearbenchmark.org.

    Returns:
        (131072, 2) in float64.
    """
    root = os.environ.get("HBNODE_DATA")
    for folder in (Path(root) / "silverbox", Path(root)) if root else ():
        if (folder / "SNLS80mV.csv").is_file():
            return _silverbox_csv(folder / "SNLS80mV.csv")
    fix = (
        "Fix: put SNLS80mV.csv from SilverboxFiles.zip of nonlinearbenchmark.org into a folder silverbox and set "
        "HBNODE_DATA to the folder above it, or pip install nonlinear_benchmarks, which downloads it."
    )
    try:
        import nonlinear_benchmarks
    except ImportError as error:
        raise FileNotFoundError(
            f"silverbox/SNLS80mV.csv is not in HBNODE_DATA={root!r}, and nonlinear_benchmarks is not installed. {fix}"
        ) from error
    try:
        v1, v2 = nonlinear_benchmarks.Silverbox(train_test_split=False)
    except Exception as error:  # no network, or an answer that is not the file, and it raises whatever it likes
        raise FileNotFoundError(
            f"silverbox/SNLS80mV.csv is not in HBNODE_DATA={root!r}, and nonlinear_benchmarks failed ({error}). {fix}"
        ) from error
    return _checked_silverbox(torch.stack([torch.as_tensor(v).double() for v in (v1, v2)], dim=1), "the package's data")


def _silverbox_csv(path: Path) -> Tensor:
    """Two columns under the header ``"V1","V2"``; its lines end in a comma."""
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = csv.reader(file)
        header = next(lines, [])[:2]
        if header != ["V1", "V2"]:
            raise ValueError(f"{path} is not the Silverbox's: expected the header V1,V2, got {header}. {SILVERBOX_FIX}")
        for line in lines:
            if not line:
                continue
            try:
                rows.append((float(line[0]), float(line[1])))
            except (ValueError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {lines.line_num}: expected two numbers, got {line}. {SILVERBOX_FIX}"
                ) from error
    return _checked_silverbox(torch.tensor(rows, dtype=torch.float64), str(path))


def _checked_silverbox(record: Tensor, name: str) -> Tensor:
    if record.shape != (SILVERBOX_ROWS, 2) or not bool(torch.isfinite(record).all()):
        raise ValueError(
            f"{name}: expected {SILVERBOX_ROWS:,} rows of two finite numbers, got shape {tuple(record.shape)}"
            f"{'' if bool(torch.isfinite(record).all()) else ' with others among them'}. {SILVERBOX_FIX}"
        )
    return record
