"""Oscillators as a model of the tasks: their sizes, what they see, and short runs."""

import dataclasses
import json

import torch

from tasks import plane_vibration, silverbox
from tasks.common.files import write_tensors
from tasks.models.oscillating import NoisyForecaster, NoisyOscillators, RowForecaster
from tasks.studies import plane_vibration_frequencies

# Silverbox


def test_silverbox_sees_v2_of_the_past_alone():
    torch.manual_seed(0)
    model = silverbox.make_model(silverbox.SilverboxConfig(model="oscillators", past=5))
    past, drive = torch.randn(2, 5, 2), torch.randn(2, 7 * silverbox.FINE + 1)
    simulated = model(past, drive)
    assert simulated.shape == (2, 7)
    drive[:, 4 * silverbox.FINE] += 1.0  # V1 at the fourth sample
    later = model(past, drive)
    assert torch.equal(later[:, :3], simulated[:, :3])
    assert (later[:, 3:] - simulated[:, 3:]).abs().min() > 0
    past[:, -1, 1] += 1.0
    assert (model(past, drive) - later).abs().max() > 1e-6


# Plane vibration

RANGES = {"frequency": (0.004, 0.05), "decay": (0.002, 0.05)}


def window(batch=3, length=20):
    """Samples and stamps, with one gap longer than the longest that is told apart."""
    torch.manual_seed(0)
    gaps = torch.randint(1, 4, (batch, length))
    gaps[0, 3] = 11
    return torch.randn(batch, length, 5), torch.nn.functional.pad(gaps.cumsum(1), (1, 0)).float()


def test_a_forecast_is_of_the_rows_from_the_next_stamp_on():
    """Each output of these oscillators is the number of the row it is a forecast of, counted from a sample."""
    model = RowForecaster(5, 8, 2000, **RANGES)
    model.oscillators.forward = lambda x, t: (torch.arange(1.0, 16.0).repeat_interleave(5).expand(3, 20, -1), None)
    x, t = window()
    forecast, following = model(x, t)
    gaps = t.diff(dim=1)
    assert torch.equal(following, gaps.clamp(max=8).unsqueeze(2).expand(-1, -1, 5))
    assert torch.equal(forecast, (gaps[:, -1:] + torch.arange(8)).unsqueeze(2).expand(-1, -1, 5))


def test_a_prediction_has_seen_the_samples_before_it_only():
    torch.manual_seed(0)
    noisy = NoisyOscillators(5, 4, noise=0.1, **RANGES)
    for model in (RowForecaster(5, 8, 2000, **RANGES), NoisyForecaster(noisy, 8)):
        x, t = window()
        forecast, following, *_ = model(x, t)
        x[:, 12] += 1.0
        other, others, *_ = model(x, t)
        assert torch.equal(following[:, :12], others[:, :12])
        assert (following[:, 12] - others[:, 12]).abs().min() > 0
        assert (forecast - other).abs().max() > 1e-6


def test_noisy_oscillators_forecast_as_their_layer_does():
    torch.manual_seed(0)
    noisy = NoisyOscillators(5, 4, noise=0.1, **RANGES)
    x, t = window()
    forecast, following, log_likelihood = NoisyForecaster(noisy, 8)(x, t)
    filtered = noisy.oscillators.filter(x, t[:, :-1])
    ahead, _ = noisy.oscillators.forecast(filtered.state, t.diff(dim=1)[:, -1:] + torch.arange(8.0))
    torch.testing.assert_close(forecast, ahead.mean.float())
    torch.testing.assert_close(following, torch.cat([filtered.before.mean[:, 1:], ahead.mean[:, :1]], 1).float())
    torch.testing.assert_close(log_likelihood, noisy.oscillators.log_likelihood(x, t[:, :-1]))


def test_frequencies_of_runs_are_drawn_and_tabulated(tmp_path):
    config = plane_vibration.PlaneVibrationConfig(model="kalman", data="generated")
    state = plane_vibration.make_model(config).state_dict()
    (tmp_path / "kalman").mkdir()
    write_tensors(tmp_path / "kalman" / "checkpoint.pt", {"model": state})
    described = {"task": "plane_vibration", **dataclasses.asdict(config)}
    (tmp_path / "kalman" / "config.json").write_text(json.dumps(described))
    plane_vibration_frequencies.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert len((tmp_path / "out" / "frequencies.csv").read_text().splitlines()) == 13
