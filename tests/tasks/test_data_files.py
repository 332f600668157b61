"""Files of data sets: small ones are read exactly, damaged ones are named, and parts of the data share nothing."""

import gzip
import itertools
import pickle
import shutil
import sys
import types
import zipfile

import numpy as np
import pytest
import soundfile
import torch
from scipy.io import savemat

from tasks.data import f16, labelled_series, polyphonic, silverbox, speech, tatoeba
from tasks.data.images import read_cifar10, read_mnist
from tasks.data.subwords import PADDING, UNKNOWN, decode, learn_subwords
from tasks.data.text import read_text
from tasks.data.walker2d import read_walker2d


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    return tmp_path


def write(path, content):
    """Write bytes or text, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


# Images


def idx_bytes(shape, data):
    return b"\x00\x00\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + bytes(data)


def write_mnist(folder):
    """Gzipped images whose pixels count up, and labels that are not zipped."""
    pixels = bytes(k % 251 for k in range(4 * 784))
    write(folder / "MNIST/raw/train-images-idx3-ubyte.gz", gzip.compress(idx_bytes((4, 28, 28), pixels)))
    write(folder / "MNIST/raw/train-labels-idx1-ubyte", idx_bytes((4,), (0, 1, 2, 9)))


def write_cifar(folder):
    """The official layout: five training batches and one for testing."""
    for index, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels = np.full((4, 3072), index, np.uint8)
        pixels[:, 1024:2048] = 100  # green
        batch = {b"batch_label": b"x", b"labels": [index] * 4, b"data": pixels}
        write(folder / "cifar-10-batches-py" / name, pickle.dumps(batch, protocol=2))


def test_mnist_is_read_from_the_data_folder(folder):
    write_mnist(folder)
    x, y = read_mnist("train")
    torch.testing.assert_close(x, (torch.arange(4 * 784) % 251).view(4, 1, 28, 28) / 255)
    assert y.tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_is_read_from_the_official_batches(packed, folder):
    write_cifar(folder)
    if packed:
        shutil.make_archive(str(folder / "cifar-10-python"), "gztar", folder, "cifar-10-batches-py")
        shutil.rmtree(folder / "cifar-10-batches-py")
    x, y = read_cifar10("train")
    assert y.tolist() == [k for k in range(5) for _ in range(4)]
    torch.testing.assert_close(x[:, 1], torch.full((20, 32, 32), 100 / 255))
    torch.testing.assert_close(x[-1, 0], torch.full((32, 32), 4 / 255))
    assert read_cifar10("test")[1].tolist() == [5] * 4


# Speech and music


def test_digits_are_split_by_the_recording(folder):
    """The only sample of a file tells its digit, speaker and recording."""
    recordings = folder / "fsdd" / "recordings"
    recordings.mkdir(parents=True)
    for digit, (number, speaker), index in itertools.product((0, 7), enumerate(("ann", "bob")), range(12)):
        sample = np.array([1000 * digit + 100 * number + index], np.int16)
        soundfile.write(recordings / f"{digit}_{speaker}_{index}.wav", sample, 8000)
    shutil.make_archive(str(recordings), "zip", folder / "fsdd", "recordings")
    shutil.rmtree(recordings)
    waves, _ = speech.read_speech()
    numbers = {part: sorted(round(32768 * x.item()) for x in recordings) for part, recordings in waves.items()}
    for part, indices in {"test": range(5), "validation": range(5, 10), "train": range(10, 12)}.items():
        assert numbers[part] == sorted(1000 * d + 100 * s + i for d in (0, 7) for s in (0, 1) for i in indices)


def test_spectra_are_the_formula():
    samples = torch.randn(300, dtype=torch.float64)
    padded = np.concatenate([np.zeros(256), samples.numpy(), np.zeros(84), np.zeros(256)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    transform = np.exp(-2j * np.pi * np.outer(np.arange(256), np.arange(129)) / 256)
    frames = [(padded[s : s + 256] * window) @ transform for s in range(0, len(padded) - 255, 128)]
    expected = torch.from_numpy(10 * np.log10(1e-5 + np.abs(np.array(frames)) ** 2))
    torch.testing.assert_close(speech.log_spectra(samples), expected)


def test_pieces_of_a_file(folder):
    steps = {"traindata": 5, "validdata": 2, "testdata": 6}
    rolls = {name: np.array([np.ones((n, 88), "uint8"), None], object)[:1] for name, n in steps.items()}
    savemat(folder / "JSB_Chorales.mat", rolls)
    pieces, found = polyphonic.read_polyphonic("auto")
    assert found == "jsb"
    assert [pieces[part][0].sum().item() for part in ("train", "validation", "test")] == [5 * 88, 2 * 88, 6 * 88]


# Texts


def test_words_end_of_lines_and_a_limited_vocabulary(folder):
    def spelt(text):
        return [" ".join(text.words[number] for number in numbers) for numbers in text.parts.values()]

    for name, content in (("train", "a b a <unk>\n\n c a \n"), ("valid", "b d\n"), ("test", "c\n")):
        write(folder / f"ptb/ptb.{name}.txt", content)
    assert spelt(read_text()) == ["a b a <unk> <eos> <eos> c a <eos>", "b <unk> <eos>", "c <eos>"]
    text = read_text("ptb", vocabulary=3, train_size=7, test_size=2)
    assert spelt(text) == ["a <unk> a <unk> <eos> <eos> <unk>", "<unk> <unk>", "<unk> <eos>"]
    write(folder / "ptb/ptb.train.txt", "a b b\n")
    assert sorted(read_text("ptb").words) == ["<eos>", "<unk>", "a", "b"]  # always has <unk>


def test_parts_share_no_sentence_in_either_language(folder):
    """Sentences here have many translations each, and chains of these."""
    pairs = [(f"Sentence {i} {i // 7}!", f"Satz {i // 3}.") for i in range(3000)]
    pairs += [(english.lower().rstrip("!"), german + " So und so.") for english, german in pairs[::5]]
    content = "\n".join("\t".join(pair) + "\tCC-BY" for pair in pairs)
    (folder / "tatoeba-deu-eng").mkdir()
    with zipfile.ZipFile(folder / "tatoeba-deu-eng" / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", content)
    parts, source = tatoeba.read_pairs()
    assert source == "tatoeba"
    whole = tatoeba.split(pairs)
    assert sorted(pair for part in whole.values() for pair in part) == sorted(pairs)
    seen = [{(i, tatoeba.words_of(pair[i])) for pair in part for i in range(2)} for part in whole.values()]
    assert not any(seen[i] & seen[j] for i, j in ((0, 1), (0, 2), (1, 2)))
    assert len(whole["train"]) / len(pairs) == pytest.approx(0.9, abs=0.02)
    for name, part in parts.items():
        assert set(part) <= set(whole[name])
        assert name == "train" or len({tatoeba.words_of(english) for english, _ in part}) == len(part)
    few, _ = tatoeba.read_pairs(max_words=3, train_size=50, test_size=4)
    assert [len(part) for part in few.values()] == [50, 4, 4]
    assert not any("So" in german for part in few.values() for _, german in part)


TEXTS = ("low low low lower", "newest newest widest!", "He said: „low, lower“ …", "", " a\u202f  b ")


@pytest.mark.parametrize("size", [0, 40, 1000])
def test_subwords_decode_to_their_text(size):
    tokenizer = learn_subwords(TEXTS, size)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert decode(tokenizer, ids) == " ".join(text.split())
        assert not {PADDING, UNKNOWN} & set(ids)
    padded = [text.ids for text in tokenizer.encode_batch(["lower newest", "low"])]
    assert [decode(tokenizer, ids) for ids in padded] == ["lower newest", "low"]
    assert tokenizer.encode("lox").ids[-1] == UNKNOWN


# Series and records


def test_sets_of_the_archive_are_read_from_wheels_and_files(folder):
    text = "# about\n@classLabel true 0 1\n@data\n1,2,?:4,5,6:one\n7,8:9,10:0\n"
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels" / "sktime-1-py3-none-any.whl", "w") as wheel:
        for part in ("TRAIN", "TEST"):
            wheel.writestr(f"sktime/datasets/data/PLAID/PLAID_{part}.ts", text)
            write(folder / f"uea/PigCVP_{part}.txt", "  1.0e+00  2.5 3.5\n 2 4.5 5.5\n")
    series, labels, names = labelled_series.read_archive("PLAID")
    assert (names, labels.tolist(), series.lengths.tolist()) == (["0", "one"], [1, 0, 1, 0], [3, 2, 3, 2])
    assert series.x[0].nan_to_num(-1).tolist() == [[1, 4], [2, 5], [-1, 6]]
    assert series.t[1].tolist() == [0, 1, 1]
    assert series.mask[1].tolist() == [[True, True], [True, True], [False, False]]
    series, labels, names = labelled_series.read_archive("PigCVP")
    assert (names, labels.tolist()) == (["1", "2"], [0, 1, 0, 1])
    assert series.x[..., 0].tolist() == [[2.5, 3.5], [4.5, 5.5]] * 2


def columns(*names, record):
    return ",".join(f'"{name}"' for name in names) + ",\n" + "".join(f"{','.join(map(repr, r))},\n" for r in record)


def test_rollouts_are_read_in_their_order(folder):
    (folder / "walker").mkdir()
    for i in (0, 1):
        np.save(folder / "walker" / f"rollout_{i:03d}.npy", np.full((3, 17), i))
    assert [rollout[0, 0].item() for rollout in read_walker2d()[0]] == [0, 1]


def test_records_are_read_from_the_data_folder_or_the_package(folder, monkeypatch):
    record = torch.randn(100, 5, dtype=torch.float64)
    monkeypatch.setattr(f16, "ROWS", 100)
    monkeypatch.setattr(silverbox, "ROWS", 100)
    force, voltage, acceleration = record.T.numpy()[:1], record.T.numpy()[1:2], record.T.numpy()[2:]
    mat = folder / "package" / f"{f16.NAME}.mat"
    mat.parent.mkdir()
    savemat(mat, {"Force": force, "Voltage": voltage, "Acceleration": acceleration, "Fs": 400.0})
    package = types.SimpleNamespace(
        F16=lambda data_file_locations: ["other.mat", str(mat)],
        Silverbox=lambda train_test_split: iter(record.T[:2].numpy()),
    )
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", package)
    for _ in range(2):  # from the package, then from files
        assert torch.equal(f16.read_plane_vibration()[0], record)
        assert torch.equal(silverbox.read_silverbox(), record[:, :2])
        write(folder / "plane-vibration" / f"{f16.NAME}.csv", columns(*f16.COLUMNS, record=record.tolist()))
        write(folder / "SNLS80mV.csv", columns("V1", "V2", record=record[:, :2].tolist()))
        monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)


# Missing and damaged files


MISSING = [lambda: polyphonic.read_polyphonic("jsb"), lambda: read_text("ptb"), silverbox.read_silverbox, read_walker2d]


@pytest.mark.parametrize("read", MISSING)
def test_a_missing_file_is_named(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)
    with pytest.raises(FileNotFoundError, match=r"is not in .*Fix: p"):
        read()


CALLS_SYSTEM = b"cposix\nsystem\n(S'touch ran'\ntR."
CIFAR = "cifar-10-batches-py/test_batch"
DAMAGE = [  # the reader, the file, its content, and words of the message
    (lambda: read_mnist("train"), "MNIST/raw/train-labels-idx1-ubyte", idx_bytes((4,), [0]), "expected 4 bytes"),
    (lambda: read_cifar10("test"), CIFAR, CALLS_SYSTEM, r"test_batch is no CIFAR-10 batch .*posix\.system"),
    (read_text, "ptb/ptb.train.txt", b"caf\xe9", r"ptb\.train\.txt is no text in UTF-8"),
    (silverbox.read_silverbox, "SNLS80mV.csv", b"V1,V2\n1,nan\n", r"expected 131,072 rows of 2 finite numbers"),
    (read_walker2d, "walker/rollout_000.npy", b"short", r"rollout_000\.npy cannot be read"),
]


@pytest.mark.parametrize(("read", "file", "content", "message"), DAMAGE)
def test_a_damaged_file_is_named(read, file, content, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_mnist(folder)
    write_cifar(folder)
    write(folder / file, content)
    with pytest.raises(ValueError, match=rf"{message}[\s\S]*Fix: "):
        read()
    assert not (folder / "ran").exists()
