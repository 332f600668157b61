"""The Silverbox: its data and split, growth against closed forms, simulation against scipy, training and resuming."""

import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from tasks import silverbox
from tasks.data import silverbox as silverbox_data
from tests.tasks.small_runs import read_metrics

GAMMA, A, B, GAIN = 0.07, 0.5, 0.05, 0.2  # of a Duffing oscillator much like the Silverbox, in samples
ROWS = 800
SETS = {
    "train": slice(250, 650),
    "multisine": slice(650, 800),
    "arrow_no_extrapolation": slice(20, 140),
    "arrow_full": slice(20, 200),
}


def force(t):
    """A sum of sines of up to a quarter of the sampling rate; numpy or torch."""
    sin = torch.sin if isinstance(t, torch.Tensor) else np.sin
    return sum(sin(2 * math.pi * f * t + 7 * f) for f in (0.013, 0.057, 0.11, 0.17, 0.24))


def duffing(count):
    """Input, output and its velocity at each sample."""
    times = np.arange(float(count))
    solved = solve_ivp(
        lambda t, x: (x[1], -GAMMA * x[1] - A * x[0] - B * x[0] ** 3 + GAIN * force(t)),
        (0.0, count - 1.0),
        (0.3, 0.0),
        t_eval=times,
        rtol=1e-10,
        atol=1e-12,
        method="DOP853",
    )
    return np.stack([force(times), *solved.y], axis=1)


@pytest.fixture(scope="module")
def samples():
    return torch.tensor(duffing(ROWS))


@pytest.fixture
def record(samples, tmp_path, monkeypatch):
    """A short record in HBNODE_DATA, and a split to go with it."""
    monkeypatch.setattr(silverbox_data, "ROWS", ROWS)
    monkeypatch.setattr(silverbox, "SETS", SETS)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path / "data"))
    volts = samples[:, :2] / 20 + 0.01
    path = tmp_path / "data" / "silverbox" / "SNLS80mV.csv"
    path.parent.mkdir(parents=True)
    path.write_text('"V1","V2",\n' + "".join(f"{u!r},{y!r},\n" for u, y in volts.tolist()))
    return volts


# Data


def test_the_record_is_read_from_the_data_folder_or_the_package(record, tmp_path, monkeypatch):
    path = tmp_path / "data" / "silverbox" / "SNLS80mV.csv"
    assert torch.equal(silverbox_data.read_silverbox(), record)
    path = path.rename(tmp_path / "data" / "SNLS80mV.csv")
    assert torch.equal(silverbox_data.read_silverbox(), record)
    path.unlink()
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)
    with pytest.raises(FileNotFoundError, match=r"nonlinear_benchmarks failed .*Fix: put SNLS80mV\.csv"):
        silverbox_data.read_silverbox()
    whole = {False: iter(record.T.numpy())}  # the package's data set unpacks into u and y
    package = types.SimpleNamespace(Silverbox=lambda train_test_split: whole.pop(train_test_split))
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", package)
    assert torch.equal(silverbox_data.read_silverbox(), record)
    with pytest.raises(FileNotFoundError, match=r"nonlinear_benchmarks failed \(KeyError\(False\)\)\. Fix: put"):
        silverbox_data.read_silverbox()


def test_the_input_is_refined_to_the_signal_between_its_samples():
    fine = silverbox.refine(force(torch.arange(200, dtype=torch.float64)))
    assert fine.shape == (199 * silverbox.FINE + 1,)
    times = torch.arange(len(fine), dtype=torch.float64) / silverbox.FINE
    error = (fine - force(times)).abs()
    assert error[:: silverbox.FINE].max() < 1e-9
    assert error[40 * silverbox.FINE : -40 * silverbox.FINE].max() < 1e-3


def test_windows_lie_where_they_should():
    samples = torch.stack([torch.arange(100.0), 1000 + torch.arange(100.0)], dim=1)
    fine = torch.arange(99 * silverbox.FINE + 1) / silverbox.FINE
    past, drive, target = silverbox.windows(samples, fine, past=5, length=10, stride=7)
    assert len(past) == len(drive) == len(target) == (100 - 15) // 7 + 1
    for i in range(len(past)):
        last = 7 * i + 4  # where the state is
        assert torch.equal(past[i], samples[last - 4 : last + 1])
        assert torch.equal(drive[i, :: silverbox.FINE], samples[last : last + 11, 0])
        assert torch.equal(target[i], samples[last + 1 : last + 11, 1])


def test_a_run_learns_and_says_its_errors_in_millivolts(record, tmp_path):
    options = "--device cpu --epochs 2 --window 20 --past 5 --stride 5 --validation 120 --batch-size 64 --out"
    silverbox.main([*options.split(), str(tmp_path)])
    rows = read_metrics(tmp_path)
    assert float(rows[-1]["train_loss"]) < 0.9 * float(rows[0]["train_loss"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    trained = silverbox.Simulator("hbnode", 5, rtol=1e-3, steps=1)
    trained.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"])
    records, scale = silverbox.split(record, 120)
    for name in ("multisine", "arrow_no_extrapolation"):
        simulated = silverbox.simulate(trained, records[name], silverbox.SilverboxConfig(past=5))
        expected = 1000 * scale * np.sqrt(np.mean((simulated - records[name][50:, 1]).double().numpy() ** 2))
        # the arrow's first part is simulated with the rest, and knows the input after its end
        assert summary[f"{name}_rmse_mV"] == pytest.approx(expected, rel=1e-2 if "no_ext" in name else 1e-4)
