"""Mel-frequency cepstral coefficients (MFCC) of speech at 8 kHz, with their slopes: 39 features a frame."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tasks.data.speech import BINS, RATE, power_spectra

BANDS = 26
CEPSTRA = 13
FEATURES = 3 * CEPSTRA
SLOPE_WIDTH = 2  # frames on either side
FLOOR = 1e-5  # added to the energy of a band: silence is log 1e-5


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
