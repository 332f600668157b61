"""Images: what is read, and what is refused."""

import gzip
import math
import pickle
import shutil

import numpy as np
import pytest
import torch

from tasks import image_classification
from tasks.data.images import read_cifar10, read_mnist


def idx_bytes(shape, data):
    return b"\x00\x00\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + bytes(data)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    return tmp_path


def write_mnist(folder, images=(32, 28, 28), labels=tuple(range(10)) * 3 + (0, 1)):
    """Gzipped images whose pixels count up, and labels that are not zipped."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    pixels = bytes(k % 251 for k in range(math.prod(images)))
    for prefix in ("train", "t10k"):
        (raw / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images, pixels)))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes((len(labels),), labels))
    return raw


def test_mnist_is_read_from_the_data_folder(folder):
    write_mnist(folder)
    x, y = read_mnist("train")
    torch.testing.assert_close(x, (torch.arange(32 * 784) % 251).view(32, 1, 28, 28) / 255)
    assert y.tolist() == [k % 10 for k in range(32)]
    for images, labels, message in (
        ((6, 28, 28), [0, 1, 2, 3, 4, 10], r"images \(6, 28, 28\), labels \(6,\)"),
        ((6, 32, 32), range(6), r"images \(6, 32, 32\)"),
        ((6, 28, 28), range(5), r"labels \(5,\)"),
        ((6, 784), range(6), r"images \(6, 784\)"),
    ):
        write_mnist(folder, images, labels)
        with pytest.raises(ValueError, match=rf"no MNIST files: .*{message}.*expected \(N, 28, 28\) and \(N,\) with"):
            read_mnist("train")
    with pytest.raises(ValueError, match="no MNIST files"):
        image_classification.load_data(image_classification.ImageConfig(dataset="mnist"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("images-idx3-ubyte.gz", lambda content: content[:100]),
        ("images-idx3-ubyte.gz", lambda content: content[:200] + bytes([content[200] ^ 255]) + content[201:]),
        ("images-idx3-ubyte.gz", lambda content: b"<html>404</html>"),
        ("labels-idx1-ubyte", lambda content: b"\x00\x00\x08\x03"),
        ("labels-idx1-ubyte", lambda content: content[:-3]),
        ("labels-idx1-ubyte", lambda content: idx_bytes((0,), [])),
    ],
)
def test_a_damaged_mnist_file_is_named(name, damage, folder):
    file = write_mnist(folder) / f"train-{name}"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{file.name}.*Fix: delete the file and download it again"):
        read_mnist("train")


def write_cifar(folder, count=4, labels=None):
    """The official layout: five training batches and one for testing."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels = np.full((count, 3072), index, np.uint8)
        pixels[:, 1024:2048] = 100  # green
        batch = {b"batch_label": b"x", b"labels": labels or [index] * count, b"data": pixels}
        (batches / name).write_bytes(pickle.dumps(batch, protocol=2))
    return batches


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_is_read_from_the_official_batches(packed, folder):
    batches = write_cifar(folder)
    if packed:
        shutil.make_archive(str(folder / "cifar-10-python"), "gztar", folder, batches.name)
        shutil.rmtree(batches)
    x, y = read_cifar10("train")
    assert x.shape == (20, 3, 32, 32)
    assert y.tolist() == [k for k in range(5) for _ in range(4)]
    torch.testing.assert_close(x[:, 1], torch.full((20, 32, 32), 100 / 255))
    torch.testing.assert_close(x[-1, 0], torch.full((32, 32), 4 / 255))
    assert read_cifar10("test")[1].tolist() == [5] * 4
    write_cifar(folder, labels=[0, 1, 2, 99])
    with pytest.raises(ValueError, match=r"no CIFAR-10 files: images \(4, 3, 32, 32\), labels \(4,\)"):
        read_cifar10("test")


def test_a_pickle_that_would_run_something_is_refused(folder):
    batches = write_cifar(folder)
    (batches / "test_batch").write_bytes(b"cposix\nsystem\n(S'touch " + str(folder / "ran").encode() + b"'\ntR.")
    with pytest.raises(ValueError, match=r"test_batch is no CIFAR-10 batch .*posix.system.*Fix: delete it"):
        read_cifar10("test")
    assert not (folder / "ran").exists()
    (batches / "data_batch_3").write_bytes(b"short")
    with pytest.raises(ValueError, match="data_batch_3 is no CIFAR-10 batch"):
        read_cifar10("train")
