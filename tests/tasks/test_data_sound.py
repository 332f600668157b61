"""Speech and piano rolls: hand-written files read exactly, splits, spectra and cepstra against their formulas."""

import io
import wave
import zipfile

import numpy as np
import pytest
import torch

from tasks.data import polyphonic, speech


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    return tmp_path


def riff(samples, rate=8000):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, dtype="<i2").tobytes())
    return buffer.getvalue()


SAMPLES = [0, 1, -1, 255, 256, -256, 32767, -32768]


def digit_files(recordings=12):
    """A file for each digit, speaker and recording, whose only sample tells the three."""
    return {
        f"{digit}_{speaker}_{index}.wav": riff([1000 * digit + 100 * number + index])
        for digit in (0, 7)
        for number, speaker in enumerate(("ann", "bob"))
        for index in range(recordings)
    }


def write_zip(folder, files):
    (folder / "fsdd").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "fsdd" / "recordings.zip", "w") as archive:
        archive.writestr("recordings/", "")
        for name, content in files.items():
            archive.writestr(f"recordings/{name}", content)


@pytest.mark.parametrize("zipped", [True, False])
def test_digits_are_split_by_the_recording(zipped, folder):
    if zipped:
        write_zip(folder, digit_files())
    else:
        (folder / "fsdd" / "recordings").mkdir(parents=True)
        for name, content in digit_files().items():
            (folder / "fsdd" / "recordings" / name).write_bytes(content)
    waves, source = speech.read_speech()
    assert source == "digits"
    numbers = {part: sorted(round(32768 * x.item()) for x in recordings) for part, recordings in waves.items()}
    for part, indices in {"test": range(5), "validation": range(5, 10), "train": range(10, 12)}.items():
        assert numbers[part] == sorted(1000 * d + 100 * s + i for d in (0, 7) for s in (0, 1) for i in indices)


# Spectra and cepstra


def test_spectra_are_the_formula():
    samples = torch.randn(300, dtype=torch.float64)
    padded = np.concatenate([np.zeros(256), samples.numpy(), np.zeros(84), np.zeros(256)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    transform = np.exp(-2j * np.pi * np.outer(np.arange(256), np.arange(129)) / 256)
    frames = [(padded[s : s + 256] * window) @ transform for s in range(0, len(padded) - 255, 128)]
    found = speech.log_spectra(samples)
    assert found.shape == (6, 129)
    torch.testing.assert_close(found, torch.from_numpy(10 * np.log10(1e-5 + np.abs(np.array(frames)) ** 2)))
    assert torch.equal(speech.log_spectra(torch.zeros(300)), torch.full((6, 129), -50.0))


# Piano rolls


def rolls(*lengths):
    generator = np.random.default_rng(sum(lengths))
    return [generator.integers(0, 2, (length, 88)) for length in lengths]


PARTS = {"traindata": rolls(5, 3, 4), "validdata": rolls(2), "testdata": rolls(6, 2)}


def write(path, parts):
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    cells = {name: np.empty((1, len(pieces)), dtype=object) for name, pieces in parts.items()}
    for name, pieces in parts.items():
        for index, piece in enumerate(pieces):
            cells[name][0, index] = np.asarray(piece, dtype="uint8")
    savemat(path, cells)


def test_pieces_of_a_file(folder):
    for within in ("polyphonic", ""):
        write(folder / within / "JSB_Chorales.mat", PARTS)
        pieces, found = polyphonic.read_polyphonic("auto" if within else "jsb")
        assert found == "jsb"
        for part, variable in zip(("train", "validation", "test"), PARTS, strict=True):
            assert [x.tolist() for x in pieces[part]] == [x.tolist() for x in PARTS[variable]]
            assert all(x.dtype == torch.uint8 for x in pieces[part])
        (folder / within / "JSB_Chorales.mat").unlink()


def test_missing_and_damaged_pieces(folder):
    assert polyphonic.read_polyphonic()[1] == "generated"
    with pytest.raises(FileNotFoundError, match=r"polyphonic/Piano_midi\.mat is not in HBNODE_DATA=.*Fix: put Piano"):
        polyphonic.read_polyphonic("piano")
    path = folder / "polyphonic" / "Piano_midi.mat"
    for parts, message in (
        (PARTS | {"testdata": []}, "expected pieces of 2 or more steps of 88 zeros and ones in testdata"),
        ({"traindata": PARTS["traindata"]}, "validdata"),
        (PARTS | {"validdata": rolls(4, 1)}, "in validdata"),
        (PARTS | {"validdata": [np.zeros((5, 87))]}, "in validdata"),
        (PARTS | {"testdata": [np.full((5, 88), 2)]}, "in testdata"),
    ):
        write(path, parts)
        with pytest.raises(ValueError, match=message + r".*Fix: put Piano_midi\.mat"):
            polyphonic.read_polyphonic("piano")
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"Piano_midi\.mat cannot be read"):
        polyphonic.read_polyphonic("piano")
