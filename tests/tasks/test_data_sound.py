"""Speech and piano rolls: hand-written files read exactly, splits, spectra and cepstra against their formulas."""

import io
import math
import wave
import zipfile

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("scipy")
pytest.importorskip("soundfile")

from tasks import speech as task
from tasks.data import polyphonic, speech
from tasks.data import speech as mfcc


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    return tmp_path


def riff(samples, rate=8000, channels=1):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, dtype="<i2").tobytes())
    return buffer.getvalue()


def sphere(samples, rate=16000, order="01", coding="pcm"):
    header = (
        "NIST_1A\n   1024\ndatabase_id -s5 TIMIT\n; a comment\nchannel_count -i 1\n"
        f"sample_count -i {len(samples)}\nsample_rate -i {rate}\nsample_n_bytes -i 2\n"
        f"sample_byte_format -s2 {order}\nsample_coding -s{len(coding)} {coding}\nend_head\n"
    )
    content = np.asarray(samples, dtype="<i2" if order == "01" else ">i2").tobytes()
    return header.encode().ljust(1024, b" ") + content


SAMPLES = [0, 1, -1, 255, 256, -256, 32767, -32768]


@pytest.mark.parametrize(
    "content",
    [
        b"no sound",
        riff(SAMPLES)[:-3],
        riff(SAMPLES, channels=2),
        riff([]),
        sphere(SAMPLES)[:-2],
        sphere(SAMPLES)[:900],
        sphere(SAMPLES, coding="pcm,embedded-shorten-v2.00"),
    ],
)
def test_files_that_cannot_be_read(content):
    with pytest.raises(ValueError, match=r"a\.wav cannot be read .*expected a RIFF or NIST SPHERE file of one channel"):
        speech.read_wave(content, "a.wav")


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


def test_damaged_digits(folder):
    with pytest.raises(FileNotFoundError, match=r"fsdd/recordings\.zip is not in HBNODE_DATA=.*Fix: put the folder"):
        speech.read_speech("digits")
    with pytest.raises(ValueError, match="source must be one of"):
        speech.read_speech("speech")
    for files, message in (
        (digit_files() | {"noise.wav": riff(SAMPLES)}, r"noise\.wav: expected a name such as 7_jackson_32\.wav"),
        (digit_files() | {"1_ann_0.wav": riff(SAMPLES, rate=16000)}, "expected 8000 samples a second, got 16000"),
        (digit_files(5), "expected recordings of each part, got .*'validation': 0"),
    ):
        write_zip(folder, files)
        with pytest.raises(ValueError, match=message):
            speech.read_speech("digits")
    (folder / "fsdd" / "recordings.zip").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"recordings\.zip cannot be read"):
        speech.read_speech("auto")


def test_timit(folder, monkeypatch):
    """Sentences SA, other speakers of the test folder, and second copies are left out; 16 kHz becomes 8 kHz."""
    core, development = speech.TIMIT_CORE.split(), speech.TIMIT_DEVELOPMENT.split()
    assert (len(set(core)), len(set(development)), set(core) & set(development)) == (24, 50, set())
    assert [sum(name[0] == sex for name in core) for sex in "mf"] == [16, 8]  # two men, one woman from each region
    with pytest.raises(FileNotFoundError, match=r"TIMIT is not in .*timit\. Fix: --timit FOLDER"):
        speech.read_speech("timit")

    def put(path, samples, content=sphere):
        path = folder / "timit" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(samples))

    put("TRAIN/DR1/FCJF0/SA1.WAV", [9] * 8)
    put("TRAIN/DR1/FCJF0/SI1027.WAV", [1] * 8)
    put("TRAIN/DR1/FCJF0/SX37.WAV", [1] * 8)
    put("TRAIN/DR1/FCJF0/SX37.WAV.wav", [1] * 8, lambda x: riff(x, 16000))
    put("TEST/DR1/MDAB0/SX49.WAV", [2] * 10)
    put("TEST/DR1/MDAB0/SA2.WAV", [9] * 10)
    put("TEST/DR1/FAKS0/SX43.WAV", [3] * 12)
    put("TEST/DR2/FAAA0/SX43.WAV", [9] * 12)
    monkeypatch.setattr(speech, "TIMIT_SIZES", {"train": 2, "validation": 1, "test": 1})
    waves, _ = speech.read_speech("timit")
    lengths = {part: [len(x) for x in recordings] for part, recordings in waves.items()}
    assert lengths == {"train": [4, 4], "validation": [5], "test": [6]}
    put("TEST/DR1/FAKS0/SX223.WAV", [3] * 12)
    with pytest.raises(ValueError, match=r"expected \{'train': 2.*\} utterances, got \{'train': 2.*'test': 2\}\. Fix:"):
        speech.read_speech("timit", str(folder / "timit"))
    put("TEST/DR1/FAKS0/SX223.WAV", [3] * 12, lambda x: sphere(x, rate=22050))
    with pytest.raises(ValueError, match="expected 8000 or 16000 samples a second, got 22050"):
        speech.read_speech("timit", str(folder / "timit"))


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


def test_16_khz_become_8_khz_of_both_kinds_of_files_and_orders_of_bytes():
    """A tone well below 4 kHz is sampled at half the rate; what is above 4 kHz is filtered out."""
    for content, rate in ((riff(SAMPLES), 8000), (sphere(SAMPLES), 16000), (sphere(SAMPLES, order="10"), 16000)):
        samples, found = speech.read_wave(content, "a.wav")
        assert (found, samples.dtype) == (rate, torch.float32)
        assert torch.equal(samples, torch.tensor(SAMPLES) / 32768)
    t = torch.arange(1600, dtype=torch.float64) / 16000
    low, high = (torch.sin(2 * torch.pi * f * t) for f in (500, 6000))
    found = speech.to_8_khz(low + high, 16000, "a.wav")
    torch.testing.assert_close(found[50:-50], low[::2][50:-50], rtol=0, atol=2e-3)
    assert speech.to_8_khz(low, 8000, "a.wav") is low


def loop_mfcc(samples):
    """The same in loops."""
    padded = np.concatenate([np.zeros(256), samples, np.zeros(-len(samples) % 128), np.zeros(256)])
    window = [0.5 - 0.5 * math.cos(2 * math.pi * n / 256) for n in range(256)]
    top = 2595 * math.log10(1 + 4000 / 700)
    cepstra = []
    for begin in range(0, len(padded) - 255, 128):
        power = np.abs(np.fft.rfft(padded[begin : begin + 256] * window)) ** 2
        logs = []
        for band in range(1, 27):
            energy = 0.0
            for index in range(129):
                place = 2595 * math.log10(1 + index * 4000 / 128 / 700) / (top / 27)
                energy += max(0.0, 1 - abs(place - band)) * power[index]
            logs.append(math.log(energy + 1e-5))
        scale = [math.sqrt((1 if k == 0 else 2) / 26) for k in range(13)]
        angles = [[math.pi * k * (n + 0.5) / 26 for n in range(26)] for k in range(13)]
        cepstra.append(
            [scale[k] * sum(x * math.cos(a) for x, a in zip(logs, angles[k], strict=True)) for k in range(13)]
        )
    rows = [np.array(cepstra)]
    for _ in range(2):
        x, last = rows[-1], len(cepstra) - 1
        rise = [[n * (x[min(t + n, last)] - x[max(t - n, 0)]) for n in (1, 2)] for t in range(last + 1)]
        rows.append(np.array([sum(steps) / 10 for steps in rise]))
    return np.concatenate(rows, axis=1)


def test_cepstra_are_those_of_loops():
    samples = torch.randn(700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = mfcc.mfcc(samples)
    assert found.shape == (9, 39)
    torch.testing.assert_close(found, torch.from_numpy(loop_mfcc(samples.numpy())), rtol=1e-10, atol=1e-10)
    expected = torch.zeros(39)
    expected[0] = math.log(1e-5) * math.sqrt(26)
    torch.testing.assert_close(mfcc.mfcc(torch.zeros(300)), expected.expand(6, -1), rtol=1e-5, atol=1e-4)


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


def test_cepstra_of_training_are_standardised_and_fewer_recordings_are_from_everywhere(monkeypatch):
    waves = speech.tones((12, 2, 2))
    monkeypatch.setattr(speech, "tones", lambda: dict(waves))
    batches, _ = task.read_batches(task.SpeechConfig(data="generated", features="mfcc"))
    known = torch.cat([mfcc.mfcc(w) for w in waves["train"]])
    raw = mfcc.mfcc(waves["test"][0])
    torch.testing.assert_close(batches["test"][0][0, : len(raw)], (raw - known.mean(0)) / known.std(0, correction=0))
    for size, chosen in ((0, range(12)), (4, [0, 3, 6, 9]), (5, [0, 2, 4, 7, 9]), (99, range(12))):
        batches, _ = task.read_batches(task.SpeechConfig(data="generated", train_size=size))
        assert batches["train"][1].tolist() == [-(-len(waves["train"][k]) // 128) + 2 for k in chosen]


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
    with pytest.raises(ValueError, match="name must be one of"):
        polyphonic.read_polyphonic("bach")
    path = folder / "polyphonic" / "Piano_midi.mat"
    for parts, message in (
        (PARTS | {"testdata": []}, "expected pieces in the cell array testdata, got none"),
        ({"traindata": PARTS["traindata"]}, "expected pieces in the cell array validdata, got none"),
        (PARTS | {"validdata": rolls(4, 1)}, r"got shape \(1, 88\) as number 1 of validdata"),
        (PARTS | {"validdata": [np.zeros((5, 87))]}, r"got shape \(5, 87\) as number 0 of validdata"),
        (PARTS | {"testdata": [np.full((5, 88), 2)]}, r"88 zeros and ones, got shape \(5, 88\)"),
    ):
        write(path, parts)
        with pytest.raises(ValueError, match=message + r".*Fix: put Piano_midi\.mat"):
            polyphonic.read_polyphonic("piano")
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"Piano_midi\.mat cannot be read"):
        polyphonic.read_polyphonic("piano")
