"""Speech at 8 kHz, recorded or simulated, and its log-magnitude spectra."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tasks.common.files import readable
from tasks.data.files import data_folder, find, missing, read_or_simulate

SOURCES = ("auto", "digits", "generated")
PARTS = ("train", "validation", "test")
RATE = 8000  # samples per second
WINDOW = 256  # samples
HOP = 128
BINS = WINDOW // 2 + 1

DIGITS_TEST = 5  # test: recordings 0 to 4 of each digit and speaker, as in the data's README
DIGITS_VALIDATION = 10  # validation: recordings 5 to 9; training: the rest
DIGITS_FIX = (
    "Fix: put the folder recordings of github.com/Jakobovski/free-spoken-digit-dataset, or a recordings.zip of it, "
    "into a folder fsdd and set HBNODE_DATA to the folder above it, or --data generated."
)

Waves = dict[str, list[Tensor]]


def read_speech(source: str = "auto") -> tuple[Waves, str]:
    """Return training, validation and test recordings, as waveforms in [-1, 1] at 8 kHz, and their source.

    "digits" is the Free Spoken Digit Dataset, 3,000 recordings of six speakers. For each speaker and digit the test set
    has the recordings 0 to 4, validation 5 to 9, training 10 to 49. It is ``fsdd/recordings.zip`` or
    ``fsdd/recordings`` in ``HBNODE_DATA``. "generated" is :func:`tones`. "auto" is "digits" if the files exist,
    otherwise "generated" with a warning.

    Arguments:
        source: one of SOURCES.

    Raises:
        FileNotFoundError: if ``source`` is "digits" and there are no files.
        ValueError: if a file is damaged, or recordings are missing.
    """
    return read_or_simulate(source, "digits", _digits, tones)


# Spoken digits


def _digits() -> Waves:
    parts: Waves = {part: [] for part in PARTS}
    for name, content in sorted(_digit_files()):
        with readable(name, DIGITS_FIX, "is no name such as 7_jackson_32.wav"):
            index = int(name.removesuffix(".wav").split("_")[2])
        part = "test" if index < DIGITS_TEST else "validation" if index < DIGITS_VALIDATION else "train"
        parts[part].append(read_wave(content, name))
    if not all(parts.values()):
        raise ValueError(f"expected recordings of training, validation and test in fsdd. {DIGITS_FIX}")
    return parts


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


def read_wave(content: bytes, name: str) -> Tensor:
    """Return the samples of a mono wave file at 8 kHz, in [-1, 1], float32."""
    import soundfile

    with readable(name, DIGITS_FIX), soundfile.SoundFile(io.BytesIO(content)) as file:
        samples = file.read(dtype="float32")
        if (file.samplerate, samples.ndim) != (RATE, 1) or not len(samples):
            raise ValueError(f"expected {RATE} samples per second of one channel, got {file.samplerate}")
    return torch.from_numpy(samples)


# Simulated


def tones(counts: tuple[int, int, int] = (240, 40, 40)) -> Waves:
    """Return simulated voices of 0.25 to 0.6 s: harmonics of a gliding pitch, with a varying amplitude and noise.

    Arguments:
        counts: the number of recordings for training, validation and test.
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


def log_spectra(samples: Tensor) -> Tensor:
    """Return the log spectra 10 log10(1e-5 + |X|²) in dB, where X is a short-time Fourier transform.

    The Hann window has 256 samples and the hop is 128. The last hop is padded with zeros, then both ends with 256
    zeros.

    Arguments:
        samples: waveform (N,).

    Returns:
        Spectra (ceil(N / 128) + 3, 129), from -50 dB (silence) to about 40 dB. They are not standardised.
    """
    padded = torch.nn.functional.pad(samples, (WINDOW, -len(samples) % HOP + WINDOW))
    window = torch.hann_window(WINDOW, dtype=samples.dtype)
    spectra = torch.stft(padded, WINDOW, HOP, window=window, center=False, return_complex=True).T
    return 10 * torch.log10(1e-5 + spectra.abs().square())
