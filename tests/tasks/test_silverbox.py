"""The Silverbox: what a window holds, simulation against scipy, a short training, growth against closed forms."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from tasks import silverbox
from tasks.data import silverbox as silverbox_data
from tasks.studies import silverbox_growth
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
    """Input and output at each sample."""
    times = np.arange(float(count))

    def field(t, x):
        return x[1], -GAMMA * x[1] - A * x[0] - B * x[0] ** 3 + GAIN * force(t)

    solved = solve_ivp(field, (0.0, count - 1.0), (0.3, 0.0), "DOP853", times, rtol=1e-10, atol=1e-12)
    return np.stack([force(times), solved.y[0]], axis=1)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A short record in HBNODE_DATA, and a split to go with it."""
    monkeypatch.setattr(silverbox_data, "ROWS", ROWS)
    monkeypatch.setattr(silverbox, "SETS", SETS)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    volts = torch.tensor(duffing(ROWS)) / 20 + 0.01
    lines = "".join(f"{u!r},{y!r},\n" for u, y in volts.tolist())
    (tmp_path / "SNLS80mV.csv").write_text(f'"V1","V2",\n{lines}')
    return volts


# Data


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


# Growth at initialisation


def draws_of(model, weight, bias, start):
    draws = silverbox_growth.Draws(model, range(len(weight)), lambda t: torch.zeros(1, dtype=torch.float64))
    draws.weight, draws.bias, draws.start = (torch.tensor(x, dtype=torch.float64) for x in (weight, bias, start))
    return draws


@pytest.mark.parametrize("model", ["sonode", "hbnode", "ghbnode"])
def test_growth_of_the_second_order_models_is_that_of_their_linear_equation(model):
    """h'' = -c h' + k h from (h0, m0), with c and k of each model; sigma of a small momentum is the identity."""
    weight = [[[0.1, -0.2, 0.7]]] if model == "sonode" else [[[0.1, 0.7]]]
    gamma = 1 / (1 + math.exp(3))
    c, k = {"sonode": (0.2, 0.1), "hbnode": (gamma, 0.1), "ghbnode": (gamma, 0.1 - math.log(2))}[model]
    times = torch.arange(64, dtype=torch.float64)
    matrix = torch.tensor([[0.0, 1.0], [k, -c]], dtype=torch.float64)
    exact = torch.linalg.matrix_exp(times[:, None, None] * matrix) @ torch.tensor([0.9, -0.4], dtype=torch.float64)
    norms = draws_of(model, weight, [[0.0]], [[-0.4]]).norms(0.9, times, 1e-7)
    torch.testing.assert_close(norms[:, 0], exact[:, 0].abs(), rtol=1e-5, atol=1e-6)


def test_one_that_diverges_is_infinite_and_leaves_the_others_alone():
    times = torch.arange(5, dtype=torch.float64)
    draws = draws_of("node", [[[0.0, 0.0]], [[300.0, 0.0]], [[0.1, 0.0]]], [[0.0]] * 3, [[0.0]] * 3)
    norms = draws.norms(0.9, times, tol=1e-2)
    assert norms[:, 1].isinf().tolist() == [False, False, True, True, True]  # exp(300 t), beyond float64
    torch.testing.assert_close(norms[:, 2], 0.9 * (0.1 * times).exp(), rtol=1e-2, atol=0)
    found = silverbox_growth.statistics(norms)
    assert found["diverged"].tolist() == [0, 0, 1, 1, 1]
    assert found["mean"].isinf().tolist() == [False, False, True, True, True]
    assert found["median"].isfinite().all()
