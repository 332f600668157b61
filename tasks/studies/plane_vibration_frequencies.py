"""Plane vibration: compare the learned frequencies of noisy oscillators with the resonances of the structure.

Train models, then run the study on their folder:

    python -m tasks.plane_vibration --model kalman --lr 0.1 --epochs 13 --seeds 5 --out runs/kalman
    python -m tasks.studies.plane_vibration_frequencies runs/kalman

The force repeats after 8192 samples. So the ratio of the Fourier transforms of acceleration and force, both averaged
over the nine periods, is the structure's frequency response at the excited frequencies, which are 0.05 Hz apart. To
find resonances, the magnitudes of the three responses are combined as a root of the sum of squares, converted to
decibels, and smoothed over five frequencies. A resonance is a peak with a prominence of 3 dB.

Each marker in the figure is an oscillator, drawn at its undamped frequency. The area of the marker is the oscillator's
share of the variance of the standardised accelerations under the model. The oscillators are independent, so the shares
add up to 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from scipy.signal import find_peaks
from torch import Tensor

import hbnode
from tasks.common.config import REQUIRED, Options, option, parse
from tasks.common.figures import panels
from tasks.common.files import exit_on, read_json, read_tensors, write_table
from tasks.data import f16
from tasks.models.oscillating import NoisyForecaster
from tasks.plane_vibration import PlaneVibrationConfig, make_model

BAND = (2.0, 15.0)  # frequency range of the force in Hz


@dataclasses.dataclass(frozen=True)
class FrequencyOptions(Options):
    """Command-line options of the study."""

    runs: str = option(REQUIRED, "folder of one or several finished runs")
    out: str = option(".", "folder for the table and the figure")


def frequency_response(record: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the frequencies in the band in Hz, (N,), and the ratios of accelerations and force, (N, 3)."""
    spectra = torch.fft.rfft(record.reshape(-1, f16.PERIOD, record.shape[1]).mean(0), dim=0)
    f = torch.fft.rfftfreq(f16.PERIOD, 1 / f16.RATE)
    inside = (f >= BAND[0]) & (f <= BAND[1])
    return f[inside].numpy(), (spectra[inside, 2:] / spectra[inside, :1]).numpy()


def resonances(f: np.ndarray, response: np.ndarray) -> list[float]:
    """Return the frequencies of the peaks in Hz."""
    decibels = 10 * np.log10(np.square(np.abs(response)).sum(1))
    smooth = np.convolve(np.pad(decibels, 2, mode="edge"), np.full(5, 0.2), "valid")
    places, _ = find_peaks(smooth, prominence=3)
    return [round(float(f[place]), 2) for place in places]


def load_run(folder: Path) -> tuple[PlaneVibrationConfig, hbnode.nn.Oscillators]:
    """Return the options and the trained oscillators of a run with ``--model kalman``."""
    config = PlaneVibrationConfig.read(read_json(folder / "config.json"))
    if config.model != "kalman":
        raise SystemExit(f"{folder} is a run of --model {config.model}. Fix: --model kalman.")
    forecaster = cast(NoisyForecaster, make_model(config))
    forecaster.load_state_dict(read_tensors(folder / "checkpoint.pt")["model"])
    return config, forecaster.model.oscillators


@torch.no_grad()
def spectrum(layer: hbnode.nn.Oscillators) -> list[dict[str, float]]:
    """Return each oscillator's frequency, damping ratio and shares in the variances, sorted by frequency."""
    omega = layer.stiffness.sqrt()
    noise = layer.process_noise
    assert noise is not None
    spread = (noise**2 / (2 * layer.damping)).repeat(2)  # stationary variance of v and of √κ x
    parts = (spread * layer.weight_out**2).unflatten(1, (2, -1)).sum(1)  # (channels, oscillators)
    shares = {"acceleration_share": parts[2:].sum(0) / parts[2:].sum(), "force_share": parts[0] / parts[0].sum()}
    columns = {"hertz": f16.RATE * omega / (2 * math.pi), "damping_ratio": layer.damping / (2 * omega), **shares}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return sorted((dict(zip(columns, row, strict=True)) for row in rows), key=lambda row: row["hertz"])


def draw(f: np.ndarray, response: np.ndarray, runs: Sequence[tuple[int, list[dict[str, float]]]], path: Path) -> None:
    """Draw the frequency response with its resonances, and below it the oscillators of each seed."""
    with panels(path, 2, size=(9, 5.6), legend=False, sharex=True, height_ratios=(3, 0.6 + 0.35 * len(runs))) as (
        _,
        axes,
    ):
        above, below = axes[:, 0]
        for channel in range(3):
            above.plot(f, 20 * np.log10(np.abs(response[:, channel])), lw=0.9, label=f"acceleration {channel + 1}")
        peaks = resonances(f, response)
        above.secondary_xaxis("top").set_xticks(peaks, [f"{peak:.1f}" for peak in peaks])
        for ax, peak in itertools.product((above, below), peaks):
            ax.axvline(peak, color="0.6", lw=0.8, ls=":", zorder=0)
        for place, (_, oscillators) in enumerate(runs):
            hertz = [row["hertz"] for row in oscillators]
            for name, color in (("acceleration_share", "C3"), ("force_share", "C0")):
                area = [900 * row[name] for row in oscillators]
                below.scatter(hertz, [place] * len(hertz), area, color=color, alpha=0.5, lw=0)
            below.plot(hertz, [place] * len(hertz), "|", color="0.2", ms=8)
        above.set_ylabel("acceleration over force, dB")
        above.legend(loc="upper left", fontsize="small")
        below.set(xlabel="Hz", xlim=BAND, yticks=range(len(runs)), yticklabels=[f"seed {seed}" for seed, _ in runs])
        below.set_ylim(-0.7, len(runs) - 0.3)
        said = "oscillators; area: share in the variance of the accelerations (red), of the force (blue)"
        below.set_title(said, fontsize="medium")


def main(argv: Sequence[str] | None = None) -> None:
    """Load the runs, print a table, and write ``frequencies.csv`` and ``frequencies.png``."""
    options = parse(FrequencyOptions, {}, __doc__, argv)
    loaded = [load_run(path.parent) for path in sorted(Path(options.runs).rglob("checkpoint.pt"))]
    if not loaded:
        raise SystemExit(f"no checkpoint.pt in {options.runs}. Fix: finished runs of --model kalman.")
    with exit_on(FileNotFoundError, ValueError):
        record, source = f16.read_plane_vibration(loaded[0][0].data)
    f, response = frequency_response(record)
    runs = [(config.seed, spectrum(layer)) for config, layer in loaded]
    peaks = resonances(f, response)
    print(f"{source}: resonances at {', '.join(f'{peak:.2f}' for peak in peaks)} Hz")
    write_table(Path(options.out, "frequencies.csv"), [{"seed": seed, **row} for seed, rows in runs for row in rows])
    draw(f, response, runs, Path(options.out, "frequencies.png"))


if __name__ == "__main__":
    main()
