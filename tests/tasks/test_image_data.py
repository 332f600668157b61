"""Images: what is read, and what is refused."""

import math
import shutil

import pytest
import torch

pytest.importorskip("sklearn")

from tasks import image_classification
from tasks.data.images import read_cifar10, read_digits, read_mnist


def test_digits():
    x, _ = read_digits("train")
    test_x, test_y = read_digits("test")
    assert x.shape == (1437, 1, 8, 8)
    assert test_x.shape == (360, 1, 8, 8)
    assert (x.min(), x.max()) == (0, 1)
    assert torch.bincount(test_y).min() >= 34  # stratified
    seen = {tuple(image.flatten().tolist()) for image in x}
    assert sum(tuple(image.flatten().tolist()) in seen for image in test_x) == 0


def idx_bytes(shape, data):
    return b"\x00\x00\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + bytes(data)


def write_mnist(folder, count=32):
    import gzip

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for prefix in ("train", "t10k"):
        pixels = torch.randint(256, (count * 784,), generator=generator).tolist()
        labels = torch.randint(10, (count,), generator=generator).tolist()
        images = gzip.compress(idx_bytes((count, 28, 28), pixels))
        (raw / f"{prefix}-images-idx3-ubyte.gz").write_bytes(images)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes((count,), labels))  # unzipped is fine too
    return raw


def test_mnist_is_read_from_the_data_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    x, y = read_mnist("train")
    assert x.shape == (32, 1, 28, 28)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert 0 <= x.min() < x.max() <= 1


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("images", lambda content: content[:1000]),
        ("images", lambda content: content[:5000] + bytes([content[5000] ^ 255]) + content[5001:]),
        ("images", lambda content: b"<html>404</html>"),
        ("labels", lambda content: b"\x00\x00\x08\x03"),
        ("labels", lambda content: content[:-3]),
        ("labels", lambda content: idx_bytes((0,), [])),
        ("labels", lambda content: b"abcdefgh"),
    ],
)
def test_a_damaged_mnist_file_is_named(name, damage, tmp_path, monkeypatch):
    raw = write_mnist(tmp_path)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    images, labels = raw / "train-images-idx3-ubyte.gz", raw / "train-labels-idx1-ubyte"
    file = {"images": images, "labels": labels}[name]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{file.name}.*Fix: delete the file and download it again"):
        read_mnist("train")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((6, 28, 28), [0, 1, 2, 3, 4, 10], r"images \(6, 28, 28\), labels \(6,\) from 0 to 10"),
        ((6, 32, 32), range(6), r"images \(6, 32, 32\)"),
        ((6, 28, 28), range(5), r"labels \(5,\) from 0 to 4"),
        ((6, 784), range(6), r"images \(6, 784\)"),
    ],
)
def test_idx_files_that_are_not_mnists_are_named(images, labels, message, tmp_path, monkeypatch):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images, bytes(math.prod(images))))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes((len(labels),), labels))
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    match = rf"no MNIST files: .*{message}.*expected \(N, 28, 28\) and \(N,\) with labels 0 to 9. Fix: get them anew"
    with pytest.raises(ValueError, match=match):
        read_mnist("train")
    with pytest.raises(SystemExit, match=match):
        image_classification.load_data(image_classification.ImageConfig(dataset="mnist"))


def write_cifar(folder, count=4, labels=None):
    """The official layout: five training batches and one for testing."""
    import pickle

    import numpy as np

    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels = np.full((count, 3072), index, np.uint8)
        pixels[:, 1024:2048] = 100  # green
        batch = {b"batch_label": b"x", b"labels": labels or [index] * count, b"data": pixels}
        (batches / name).write_bytes(pickle.dumps(batch, protocol=2))
    return batches


def test_cifar10_labels_above_9_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    write_cifar(tmp_path, labels=[0, 1, 2, 99])
    with pytest.raises(ValueError, match=r"no CIFAR-10 files: images \(4, 3, 32, 32\), labels \(4,\) from 0 to 99"):
        read_cifar10("test")


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_is_read_from_the_official_batches(packed, tmp_path, monkeypatch):
    batches = write_cifar(tmp_path)
    if packed:
        shutil.make_archive(str(tmp_path / "cifar-10-python"), "gztar", tmp_path, batches.name)
        shutil.rmtree(batches)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    x, y = read_cifar10("train")
    assert x.shape == (20, 3, 32, 32)
    assert y.tolist() == [k for k in range(5) for _ in range(4)]
    torch.testing.assert_close(x[:, 1], torch.full((20, 32, 32), 100 / 255))
    torch.testing.assert_close(x[-1, 0], torch.full((32, 32), 4 / 255))
    assert read_cifar10("test")[1].tolist() == [5] * 4


def test_cifar10_is_read_from_a_subset(tmp_path, monkeypatch):
    import numpy as np

    (tmp_path / "cifar10-subset").mkdir()
    images = np.arange(2 * 32 * 32 * 3, dtype=np.int64).astype(np.uint8).reshape(2, 32, 32, 3)
    labels = np.array([3, 9], np.uint8)
    path = tmp_path / "cifar10-subset" / "cifar10_subset.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    x, y = read_cifar10("train")
    assert y.tolist() == [3, 9]
    torch.testing.assert_close(x[1, 2, 4, 5] * 255, torch.tensor(float(images[1, 4, 5, 2])))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cifar10_subset.npz cannot be read[\s\S]*Fix: get it anew"):
        read_cifar10("train")


def test_a_pickle_that_would_run_something_is_refused(tmp_path, monkeypatch):
    batches = write_cifar(tmp_path)
    (batches / "test_batch").write_bytes(b"cposix\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"test_batch is no CIFAR-10 batch .*posix.system.*Fix: delete it"):
        read_cifar10("test")
    assert not (tmp_path / "ran").exists()
    (batches / "data_batch_3").write_bytes(b"short")
    with pytest.raises(ValueError, match="data_batch_3 is no CIFAR-10 batch"):
        read_cifar10("train")
