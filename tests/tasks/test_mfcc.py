"""MFCC features: the parts against closed forms, the whole against a plain twin, and speech that is trained on them."""

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import speech
from tasks.data import mfcc
from tasks.data import speech as speech_data
from tests.tasks.small_runs import names_in


def tone(frequency, length=1600):
    t = torch.arange(length, dtype=torch.float64) / speech_data.RATE
    return 0.5 * torch.sin(2 * math.pi * frequency * t)


def test_the_transform_is_orthonormal_and_scipys():
    from scipy.fft import dct

    basis = mfcc.cosine_basis()
    torch.testing.assert_close(basis @ basis.T, torch.eye(13, dtype=torch.float64), rtol=0, atol=1e-14)
    x = torch.randn(5, 26, dtype=torch.float64)
    torch.testing.assert_close(x @ basis.T, torch.from_numpy(dct(x.numpy(), norm="ortho"))[:, :13])


def test_mel():
    assert mfcc.mel(torch.tensor(0.0)).item() == 0
    assert mfcc.mel(torch.tensor(700.0)).item() == pytest.approx(2595 * math.log10(2))


def test_filters_share_every_bin_between_the_outer_centres():
    filters = mfcc.mel_filters()
    assert filters.shape == (26, 129)
    assert filters.min() == 0
    assert (filters.sum(1) > 0.5).all()  # no band is without a bin
    assert ((filters > 0).sum(0) <= 2).all()
    centres = np.linspace(0, 2595 * math.log10(1 + 4000 / 700), 28)[1:-1]
    hertz = np.arange(129) * 31.25
    inside = (hertz >= 700 * (10 ** (centres[0] / 2595) - 1)) & (hertz <= 700 * (10 ** (centres[-1] / 2595) - 1))
    torch.testing.assert_close(filters.sum(0)[torch.from_numpy(inside)], torch.ones(inside.sum(), dtype=torch.float64))


@pytest.mark.parametrize("frequency", [250, 1000, 3000])
def test_a_tone_is_in_the_band_whose_centre_is_nearest(frequency):
    energies = speech_data.power_spectra(tone(frequency)) @ mfcc.mel_filters().T
    centres = np.linspace(0, 2595 * math.log10(1 + 4000 / 700), 28)[1:-1]
    expected = np.abs(centres - 2595 * math.log10(1 + frequency / 700)).argmin()
    assert energies[4:-4].argmax(1).unique().tolist() == [expected]


def test_slopes_are_those_of_lines():
    t = torch.arange(9, dtype=torch.float64)
    x = torch.stack([3 * t + 1, t**2, torch.full_like(t, 5.0)], dim=1)
    found = mfcc.slopes(x)
    torch.testing.assert_close(found[2:-2], torch.stack([0 * t + 3, 2 * t, 0 * t], dim=1)[2:-2])
    assert found[0, 0].item() == pytest.approx(3 * (1 * 1 + 2 * 2) / 10)  # what is before the first frame repeats it
    assert not mfcc.slopes(x[:1]).any()
    fit = [np.polyfit(np.arange(5), x[s : s + 5, 1].numpy(), 1)[0] for s in range(5)]
    torch.testing.assert_close(found[2:-2, 1], torch.tensor(fit, dtype=torch.float64))


def plain_mfcc(samples):
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


def test_the_features_are_the_plain_twins():
    samples = torch.randn(700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = mfcc.mfcc(samples)
    assert found.shape == (9, 39)
    torch.testing.assert_close(found, torch.from_numpy(plain_mfcc(samples.numpy())), rtol=1e-10, atol=1e-10)
    silence = mfcc.mfcc(torch.zeros(300))
    assert silence.dtype == torch.float32
    expected = torch.zeros(39)
    expected[0] = math.log(1e-5) * math.sqrt(26)
    torch.testing.assert_close(silence, expected.expand(6, -1), rtol=1e-5, atol=1e-4)


def test_features_of_training_are_standardised(monkeypatch):
    waves = speech_data.tones((6, 2, 2))
    monkeypatch.setattr(speech_data, "tones", lambda: dict(waves))
    batches, _ = speech.read_batches(speech.SpeechConfig(data="generated", features="mfcc"))
    x, lengths, _ = batches["train"]
    frames = torch.cat([rows[: length + 1] for rows, length in zip(x, lengths.tolist(), strict=True)])
    torch.testing.assert_close(frames.mean(0), torch.zeros(39), rtol=0, atol=1e-4)
    torch.testing.assert_close(frames.std(0, correction=0), torch.ones(39))
    raw = mfcc.mfcc(waves["test"][0])
    known = torch.cat([mfcc.mfcc(w) for w in waves["train"]])
    expected = (raw - known.mean(0)) / known.std(0, correction=0)
    torch.testing.assert_close(batches["test"][0][0, : len(raw)], expected)


def test_speech_is_trained_on_them(tmp_path, capsys, monkeypatch):
    whole = speech_data.tones
    monkeypatch.setattr(speech_data, "tones", lambda: whole((6, 3, 3)))
    monkeypatch.chdir(tmp_path)
    options = "--device cpu --data generated --hidden 5 --batch-size 4 --features mfcc --model plain --epochs 1"
    speech.main(options.split())
    folder = tmp_path / "runs" / "speech" / "default-generated-mfcc-lstm-plain-adam-seed0"
    summary = json.loads((folder / "summary.json").read_text())
    assert 0.3 < summary["test_mse"] < 3  # the mean frame has about 1
    assert "prediction.png" in names_in(folder)
