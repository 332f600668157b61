"""MNIST: found in ``HBNODE_DATA``, or downloaded."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from tasks.data.arrays import as_images
from tasks.data.download import download, find

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def read_mnist(split: str) -> tuple[Tensor, Tensor]:
    """MNIST, 28x28: 60,000 images for training and 10,000 for testing. LeCun, Bottou, Bengio and Haffner, 1998.

    Returns:
        Images (N, 1, 28, 28) in [0, 1] and labels (N,).
    """
    prefix = "train" if split == "train" else "t10k"
    images = read_idx(_mnist_file(f"{prefix}-images-idx3-ubyte.gz"))
    labels = read_idx(_mnist_file(f"{prefix}-labels-idx1-ubyte.gz"))
    images, labels = as_images(images, labels, (28, 28), "MNIST")
    return images[:, None], labels


def _mnist_file(name: str) -> Path:
    """Return the file, gzipped or not, in ``MNIST/raw`` (as of torchvision), ``MNIST`` or ``HBNODE_DATA`` itself."""
    found = find((name, name.removesuffix(".gz")), ("MNIST/raw", "MNIST", ""))
    return found or download(URL, name, MD5[name], "MNIST/raw", "the four idx files into a folder MNIST/raw in it")


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
