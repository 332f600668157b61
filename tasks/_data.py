"""Data sets: found in ``HBNODE_DATA``, or downloaded once with a checksum."""

from __future__ import annotations

import gzip
import math
import os
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
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise ValueError(
            f"the MNIST files disagree: images {tuple(images.shape)}, labels {tuple(labels.shape)}; "
            "expected (N, 28, 28) and (N,). Fix: download the four files anew."
        )
    return images[:, None].float() / 255, labels.long()


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
    if len(data) != math.prod(shape):
        raise ValueError(f"{path} is truncated: expected {math.prod(shape)} bytes for {shape}, got {len(data)}. {fix}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


def _mnist_file(name: str) -> Path:
    """The file in HBNODE_DATA, gzipped or not, in ``MNIST/raw`` (as torchvision lays it out), ``MNIST`` or itself."""
    root = os.environ.get("HBNODE_DATA")
    if root:
        for folder in (Path(root) / "MNIST" / "raw", Path(root) / "MNIST", Path(root)):
            for candidate in (folder / name, folder / name.removesuffix(".gz")):
                if candidate.is_file():
                    return candidate
    import pooch

    cache = Path(root) / "MNIST" / "raw" if root else pooch.os_cache("hbnode") / "MNIST"
    try:
        return Path(
            pooch.retrieve(MNIST_URL + name, f"md5:{MNIST_MD5[name]}", fname=name, path=cache, progressbar=True)
        )
    except (OSError, ValueError) as error:  # no network, or a file that is not the one
        raise FileNotFoundError(
            f"{name} is neither in HBNODE_DATA={root!r} nor could it be downloaded ({error}). "
            "Fix: put the four idx files into a folder MNIST/raw and set HBNODE_DATA to the folder above it."
        ) from error
