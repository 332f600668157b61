"""Images with their labels: scikit-learn's digits, MNIST and CIFAR-10."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tasks.common.files import readable
from tasks.data.files import data_folder, download, find

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


def read_digits(split: str) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's handwritten digits, 8x8, 16 grey levels: 1,437 for training and 360 for testing.

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


def read_mnist(split: str) -> tuple[Tensor, Tensor]:
    """Return MNIST, 28x28: 60,000 images for training and 10,000 for testing. LeCun, Bottou, Bengio and Haffner, 1998.

    Returns:
        Images (N, 1, 28, 28) in [0, 1] and labels (N,).
    """
    prefix = "train" if split == "train" else "t10k"
    images, labels = (read_idx(_mnist_file(f"{prefix}-{name}-ubyte.gz")) for name in ("images-idx3", "labels-idx1"))
    images, labels = as_images(images, labels, (28, 28), "MNIST")
    return images[:, None], labels


def _mnist_file(name: str) -> Path:
    """Return the path of a file, gzipped or not, in ``MNIST/raw`` (as in torchvision), ``MNIST`` or ``HBNODE_DATA``."""
    found = find((name, name.removesuffix(".gz")), ("MNIST/raw", "MNIST", ""))
    return found or download(
        MNIST_URL, name, MNIST_MD5[name], "MNIST/raw", "the four idx files into a folder MNIST/raw in it"
    )


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, gzipped or not: two zeros, type, rank, big-endian sizes, data.

    Raises:
        ValueError: if the file is not an idx file, or its length does not match its header.
    """
    with readable(path, "Fix: delete the file and download it again."):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:3] != b"\x00\x00\x08":
            raise ValueError(f"expected it to begin 00 00 08, as unsigned bytes do, got {raw[:3]!r}")
        shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
        data = raw[4 + 4 * len(shape) :]
        if len(data) != math.prod(shape) or not data:
            raise ValueError(f"expected {math.prod(shape)} bytes for the shape {shape} of its header, got {len(data)}")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


def read_cifar10(split: str) -> tuple[Tensor, Tensor]:
    """Return CIFAR-10, 32x32 in colour: 50,000 images for training and 10,000 for testing. Krizhevsky, 2009.

    It reads the official python batches in ``HBNODE_DATA``, the folder ``cifar-10-batches-py`` or its archive.
    Otherwise it reads a subset there, ``cifar10-subset/cifar10_subset.npz`` with ``x_train``, ``y_train``, ``x_test``,
    ``y_test``, images uint8 (N, 32, 32, 3). Otherwise it downloads the archive.

    Returns:
        Images (N, 3, 32, 32) in [0, 1] and labels (N,).
    """
    archive, subset = find((CIFAR10_ARCHIVE,)), find(("cifar10_subset.npz",), ("cifar10-subset",))
    root = data_folder()
    folder = root / CIFAR10_FOLDER if root and (root / CIFAR10_FOLDER).is_dir() else None
    if subset and not archive and not folder:
        with readable(subset, "Fix: get it anew, or the official batches."):
            arrays = np.load(io.BytesIO(subset.read_bytes()), allow_pickle=False)
            images, labels = torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"])
            images = images.permute(0, 3, 1, 2)
    else:
        names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
        parts = [_read_batch(*batch) for batch in _batch_files(folder, archive, names)]
        images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return as_images(images, labels, (3, 32, 32), "CIFAR-10")


def _batch_files(folder: Path | None, archive: Path | None, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of python batches from a folder or an archive, downloaded if there is none."""
    if folder:
        for name in names:
            with readable(folder / name, "Fix: get the batches anew."):
                yield str(folder / name), (folder / name).read_bytes()
        return
    fix = "the folder cifar-10-batches-py into it"
    archive = archive or download(CIFAR10_URL, CIFAR10_ARCHIVE, CIFAR10_MD5, "", fix)
    with readable(archive, "Fix: delete it and get it anew."), tarfile.open(archive) as opened:
        for name in names:
            member = opened.extractfile(f"{CIFAR10_FOLDER}/{name}")
            yield f"{archive}: {name}", member.read() if member else b""


def _read_batch(source: str, content: bytes) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 32, 32) and labels (N,) of one python batch."""
    with readable(source, "Fix: delete it and get it anew.", "is no CIFAR-10 batch"):
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = torch.as_tensor(batch[b"data"].copy()), torch.tensor(batch[b"labels"])
        return images.reshape(-1, 3, 32, 32), labels


class _BatchUnpickler(pickle.Unpickler):
    """Loads dictionaries of strings, lists and arrays only. Other pickles are refused: they can run any code."""

    def find_class(self, module: str, name: str) -> object:
        """Return only the functions that NumPy arrays need, under the names of all NumPy versions."""
        if (module.replace("._core", ".core"), name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, and no CIFAR-10 file does")


def as_images(images: Tensor, labels: Tensor, shape: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    """Check images and labels, and return the images scaled to [0, 1] and the labels.

    Arguments:
        images: (N, *shape).
        labels: (N,), 0 to 9.
        shape: shape of an image in this data set.
        name: name of the data set, for error messages.

    Raises:
        ValueError: if shapes or labels do not match the data set.
    """
    if not len(labels) or not set(labels.tolist()) <= set(range(10)) or images.shape != (len(labels), *shape):
        raise ValueError(
            f"these are no {name} files: images {tuple(images.shape)}, labels {tuple(labels.shape)}; expected "
            f"(N, {', '.join(map(str, shape))}) and (N,) with labels 0 to 9. Fix: get them anew, all of them."
        )
    return images.float() / 255, labels.long()


READ = {"digits": read_digits, "mnist": read_mnist, "cifar10": read_cifar10}
SHAPE = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
