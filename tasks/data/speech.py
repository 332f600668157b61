"""Speech at 8 kHz, found in ``HBNODE_DATA`` or made up, its log-magnitude spectra, and cepstral coefficients."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tasks.data.files import data_folder, find, missing, readable

SOURCES = ("auto", "digits", "timit", "generated")
PARTS = ("train", "validation", "test")
RATE = 8000  # samples a second
WINDOW = 256  # samples
HOP = 128
BINS = WINDOW // 2 + 1

DIGITS_TEST = 5  # recordings 0 to 4 of a digit by a speaker, as its README has it
DIGITS_VALIDATION = 10  # 5 to 9; training has the rest
DIGITS_FIX = (
    "Fix: put the folder recordings of github.com/Jakobovski/free-spoken-digit-dataset, or a recordings.zip of it, "
    "into a folder fsdd and set HBNODE_DATA to the folder above it, or --data generated."
)

# speakers of TIMIT's core test set, and of the development set that is usual (Halberstadt, 1998)
TIMIT_CORE = """mdab0 mwbt0 felc0 mtas1 mwew0 fpas0 mjmp0 mlnt0 fpkt0 mlll0 mtls0 fjlm0
mbpm0 mklt0 fnlp0 mcmj0 mjdh0 fmgd0 mgrt0 mnjm0 fdhc0 mjln0 mpam0 fmld0"""
TIMIT_DEVELOPMENT = """faks0 fdac1 fjem0 mgwt0 mjar0 mmdb1 mmdm2 mpdf0 fcmh0 fkms0 mbdg0 mbwm0 mcsh0 fadg0 fdms0 fedw0
mgjf0 mglb0 mrtk0 mtaa0 mtdt0 mthc0 mwjg0 fnmr0 frew0 fsem0 mbns0 mmjr0 mdls0 mdlf0 mdvc0 mers0 fmah0 fdrw0 mrcs0 mrjm4
fcal1 mmwh0 fjsj0 majc0 mjsw0 mreb0 fgjd0 fjmg0 mroa0 mteb0 mjfc0 mrjr0 fmml0 mrws1"""
TIMIT_SIZES = {"train": 3696, "validation": 192, "test": 400}  # utterances, eight of each speaker

BANDS = 26
CEPSTRA = 13
FEATURES = 3 * CEPSTRA
SLOPE_WIDTH = 2  # frames on either side
FLOOR = 1e-5  # added to the energy of a band: silence is log 1e-5

Waves = dict[str, list[Tensor]]


def read_speech(source: str = "auto", timit: str = "") -> tuple[Waves, str]:
    """Recordings of training, validation and test, waveforms in [-1, 1] at 8 kHz, and where they come from.

    "digits" is the Free Spoken Digit Dataset, 3,000 recordings of six speakers: for each speaker and digit test has the
    recordings 0 to 4, validation 5 to 9, training 10 to 49. It is ``fsdd/recordings.zip`` or ``fsdd/recordings`` in
    ``HBNODE_DATA``. "timit" is TIMIT without the SA sentences, which all speakers say: training has the 462 speakers of
    its training folder, validation the 24 of the core test set, test the 50 of the usual development set. "generated"
    is :func:`tones`, "auto" digits if they are there and tones if not.

    Arguments:
        source: one of SOURCES.
        timit: the folder of TIMIT; empty is ``HBNODE_DATA/timit``.

    Raises:
        FileNotFoundError: if the data is asked for and is not there.
        ValueError: if a file is damaged, or recordings are missing.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    if source == "timit":
        return _timit(Path(timit or (data_folder() or Path(os.devnull)) / "timit")), "timit"
    if source != "generated":
        try:
            return _digits(), "digits"
        except FileNotFoundError:
            if source == "digits":
                raise
    return tones(), "generated"


# Spoken digits


def _digits() -> Waves:
    parts: Waves = {part: [] for part in PARTS}
    for name, content in sorted(_digit_files()):
        try:
            _, _, number = name.removesuffix(".wav").split("_")
            index = int(number)
        except ValueError as error:
            raise ValueError(f"{name}: expected a name such as 7_jackson_32.wav. {DIGITS_FIX}") from error
        part = "test" if index < DIGITS_TEST else "validation" if index < DIGITS_VALIDATION else "train"
        samples, rate = read_wave(content, name)
        if rate != RATE:
            raise ValueError(f"{name}: expected {RATE} samples a second, got {rate}. {DIGITS_FIX}")
        parts[part].append(samples)
    return _checked(parts, DIGITS_FIX)


def _digit_files() -> Iterator[tuple[str, bytes]]:
    root = data_folder()
    archive = find(("fsdd/recordings.zip",))
    if archive:
        with readable(archive, DIGITS_FIX), zipfile.ZipFile(archive) as opened:
            found = {name: opened.read(name) for name in opened.namelist() if name.endswith(".wav")}
        yield from ((Path(name).name, content) for name, content in found.items())
    elif root and (root / "fsdd/recordings").is_dir():
        for path in (root / "fsdd/recordings").glob("*.wav"):
            yield path.name, path.read_bytes()
    else:
        raise missing("fsdd/recordings.zip", DIGITS_FIX)


# TIMIT


def _timit(folder: Path) -> Waves:
    fix = "Fix: --timit FOLDER, the one that has TRAIN and TEST in it, or --data digits."
    if not folder.is_dir():
        raise FileNotFoundError(f"TIMIT is not in {folder}. {fix}")
    found: dict[tuple[str, str, str], Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() == ".wav" and len(path.relative_to(folder).parts) >= 4:
            part, _, speaker, name = (piece.lower() for piece in path.parts[-4:])
            found[part, speaker, name.split(".")[0]] = path  # some copies have SA1.WAV and SA1.WAV.wav
    members = {"validation": TIMIT_CORE.split(), "test": TIMIT_DEVELOPMENT.split()}
    parts: Waves = {part: [] for part in PARTS}
    for (part, speaker, sentence), path in found.items():
        wanted = ["train"] if part == "train" else [name for name, speakers in members.items() if speaker in speakers]
        if wanted and not sentence.startswith("sa"):
            samples, rate = read_wave(path.read_bytes(), str(path))
            parts[wanted[0]].append(to_8_khz(samples, rate, str(path)))
    sizes = {name: len(waves) for name, waves in parts.items()}
    if sizes != TIMIT_SIZES:
        raise ValueError(f"{folder}: expected {TIMIT_SIZES} utterances, got {sizes}. {fix}")
    return _checked(parts, fix)


def to_8_khz(samples: Tensor, rate: int, name: str) -> Tensor:
    """Samples of 8 or 16 kHz at 8 kHz, filtered by SciPy's (and Matlab's) default low-pass filter."""
    from scipy.signal import resample_poly

    if rate not in (RATE, 2 * RATE):
        raise ValueError(f"{name}: expected {RATE} or {2 * RATE} samples a second, got {rate}. Fix: resample it.")
    return samples if rate == RATE else torch.from_numpy(resample_poly(samples.numpy(), 1, 2))


# Files


def read_wave(content: bytes, name: str) -> tuple[Tensor, int]:
    """Samples in [-1, 1], float32, and their rate, of a RIFF or a NIST SPHERE file of one channel of 16 bits.

    Raises:
        ValueError: if it is neither, is compressed, or ends early.
    """
    import soundfile

    wanted = "expected a RIFF or NIST SPHERE file of one channel of 16 bits, not compressed"
    fix = f"Fix: {wanted}: get the file anew, or convert it, as sph2pipe -f wav does."
    with readable(name, fix), soundfile.SoundFile(io.BytesIO(content)) as file:
        if (file.channels, file.subtype) != (1, "PCM_16"):
            raise ValueError(f"{file.channels} channels of {file.subtype}")
        samples, rate = file.read(dtype="float32"), file.samplerate
        declared = re.search(rb"sample_count -i (\d+)", content[:1024])  # by NIST SPHERE
        is_cut = declared and int(declared[1]) != len(samples)
        if is_cut or len(samples) == 0 or re.search(r"^data : \d+ \(should be", file.extra_info, re.MULTILINE):
            raise ValueError(f"it ends after {len(samples)} samples")
    return torch.from_numpy(samples), rate


def _checked(parts: Waves, fix: str) -> Waves:
    sizes = {name: len(waves) for name, waves in parts.items()}
    if min(sizes.values()) == 0:
        raise ValueError(f"expected recordings of each part, got {sizes}. {fix}")
    return parts


# Made up


def tones(counts: tuple[int, int, int] = (240, 40, 40)) -> Waves:
    """Made-up voices: three to six harmonics of a pitch that glides, under two swells, with noise; 0.25 to 0.6 s.

    Arguments:
        counts: how many for training, validation and test.
    """
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    def voice() -> Tensor:
        t = torch.arange(round(RATE * uniform(0.25, 0.6))) / RATE
        start, stop = uniform(90, 250), uniform(90, 250)
        phase = 2 * math.pi * (start * t + (stop - start) * t**2 / (2 * t[-1]))
        harmonics = range(1, round(uniform(3, 6)) + 1)
        sound = sum(uniform(0.2, 1) / k * torch.sin(k * phase + uniform(0, 2 * math.pi)) for k in harmonics)
        swell = torch.sin(math.pi * t / t[-1]).square() * (1 + 0.5 * torch.sin(2 * math.pi * uniform(3, 8) * t))
        return 0.1 * swell * sound + 1e-3 * torch.randn(len(t), generator=generator)

    return {part: [voice() for _ in range(count)] for part, count in zip(PARTS, counts, strict=True)}


# Spectra


def power_spectra(samples: Tensor) -> Tensor:
    """|X|² of a short-time Fourier transform.

    A Hann window of 256 samples moves by 128; zeros fill the last hop, and 256 of them stand at either end.

    Arguments:
        samples: (N,).

    Returns:
        (ceil(N / 128) + 3, 129).
    """
    padded = torch.nn.functional.pad(samples, (WINDOW, -len(samples) % HOP + WINDOW))
    window = torch.hann_window(WINDOW, dtype=samples.dtype)
    return torch.stft(padded, WINDOW, HOP, window=window, center=False, return_complex=True).T.abs().square()


def log_spectra(samples: Tensor) -> Tensor:
    """10 log10(1e-5 + |X|^2), see :func:`power_spectra`, in dB and as it is: no standardisation.

    Arguments:
        samples: (N,).

    Returns:
        (ceil(N / 128) + 3, 129), from -50 dB, silence, to about 40.
    """
    return 10 * torch.log10(1e-5 + power_spectra(samples))


# Cepstra


def mel(frequency: Tensor) -> Tensor:
    """Hertz as mel, 2595 log10(1 + f / 700), the formula of O'Shaughnessy, Speech Communication (1987)."""
    return 2595 * torch.log10(1 + frequency / 700)


def mel_filters() -> Tensor:
    """Weights of the bins of a spectrum in each band, (26, 129), float64.

    Of 28 frequencies from 0 to 4 kHz at equal distances in mel, each band has three in a row: its weight is 0 at the
    first, 1 at the second, 0 at the third, and linear in mel between them.
    """
    limit = mel(torch.tensor(RATE / 2, dtype=torch.float64)).item()
    edges = torch.linspace(0, limit, BANDS + 2, dtype=torch.float64)
    bins = mel(torch.linspace(0, RATE / 2, BINS, dtype=torch.float64))
    width = edges[1]
    return (1 - (bins - edges[1:-1, None]).abs() / width).clamp(min=0)


def cosine_basis() -> Tensor:
    """The first 13 rows of the orthonormal discrete cosine transform (DCT-II) of 26 values, (13, 26), float64.

    Row k is sqrt(2 / 26) cos(pi k (n + 1/2) / 26), and row 0 is 1 / sqrt(26).
    """
    k = torch.arange(CEPSTRA, dtype=torch.float64)[:, None]
    n = torch.arange(BANDS, dtype=torch.float64)
    basis = math.sqrt(2 / BANDS) * torch.cos(math.pi * k * (n + 0.5) / BANDS)
    basis[0] /= math.sqrt(2)
    return basis


def slopes(x: Tensor) -> Tensor:
    """The slope of the line through five frames around each, least squares; beyond the ends they repeat.

    d_t = sum of n (x_{t+n} - x_{t-n}) / (2 sum of n²), n = 1, 2.

    Arguments:
        x: (frames, features).
    """
    padded = torch.cat([x[:1].expand(SLOPE_WIDTH, -1), x, x[-1:].expand(SLOPE_WIDTH, -1)])
    steps = range(1, SLOPE_WIDTH + 1)
    middle = SLOPE_WIDTH
    total = torch.zeros_like(x)
    for n in steps:
        total += n * (padded[middle + n : middle + n + len(x)] - padded[middle - n : middle - n + len(x)])
    return total / (2 * sum(n**2 for n in steps))


def mfcc(samples: Tensor) -> Tensor:
    """13 cepstral coefficients, their slopes, and the slopes of these, as they are: no standardisation.

    The frames and their power are those of :func:`tasks.data.speech.power_spectra`. The energies of 26 bands, see
    :func:`mel_filters`, plus 1e-5; their natural logarithms; and of the cosine transform of these the coefficients 0 to
    12. There is neither pre-emphasis nor liftering.

    Arguments:
        samples: (N,).

    Returns:
        (frames, 39). A slope knows two frames after its own, and the slope of slopes four.
    """
    power = power_spectra(samples)
    energies = power @ mel_filters().to(power).T
    cepstra = (energies + FLOOR).log() @ cosine_basis().to(power).T
    first = slopes(cepstra)
    return torch.cat([cepstra, first, slopes(first)], dim=1)
