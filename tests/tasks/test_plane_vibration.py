"""Plane vibration: the record and its stand-in, both splits, what the models see, the loss."""

import pytest
import torch

from tasks import plane_vibration
from tasks.data import f16


@pytest.fixture(scope="module")
def made_up():
    return f16.vibrating_structure()


# Splits


# Models


@pytest.fixture
def short(monkeypatch):
    """Windows of 26 samples in place of 64."""
    monkeypatch.setattr(plane_vibration, "WINDOW", 26)


def window(batch=3, seed=0):
    """Samples and stamps in float64: the models that read them are, too."""
    generator = torch.Generator().manual_seed(seed)
    length = plane_vibration.WINDOW
    gaps = torch.randint(1, 4, (batch, length), generator=generator).double()
    t = torch.cat([torch.zeros(batch, 1), gaps.cumsum(1)], dim=1)
    return torch.randn(batch, length, 5, generator=generator, dtype=torch.float64), t


@pytest.mark.parametrize("model", ["node", "ghbnode"])
def test_a_prediction_has_seen_the_samples_before_it_only(model, short):
    """With an encoder that sees nothing: in the paper's model it sees the window. It starts near rest."""
    torch.manual_seed(0)
    forecaster = plane_vibration.Forecaster(model, shrink=0.01).double()
    torch.nn.init.zeros_(forecaster.rnn.encoder.linear.weight)
    x, t = window()
    other, later = x.clone(), t.clone()
    other[:, 16:] += 1.0
    later[:, -1] += 3
    with torch.no_grad():
        (forecast, following), another, shifted = (forecaster(*args) for args in ((x, t), (other, t), (x, later)))
    torch.testing.assert_close(following[:, :16], another[1][:, :16])  # the last has seen 16 samples, of stamp 17
    assert (following[:, 16] - another[1][:, 16]).abs().min() > 1e-6
    assert (forecast - another[0]).abs().max() > 1e-6
    torch.testing.assert_close(forecast[:, 0], following[:, -1])
    torch.testing.assert_close(shifted[0][:, 0], forecast[:, 3], rtol=1e-3, atol=1e-4)  # 3 rows later
    assert forecast.square().mean() < 30


def test_the_loss_is_the_error_of_the_forecast_and_a_tenth_of_that_at_the_next_stamps():
    x, t = window()
    target = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs = torch.zeros(3, 8, 5), torch.ones(3, 64, 5)
    loss, means = plane_vibration.squared_errors(lambda *args: outputs, (x, t, target))
    stamps = torch.cat([x[:, 1:], target[:, :1]], dim=1)
    parts = [target.square().mean(), (1 - stamps).square().mean()]
    torch.testing.assert_close(loss, parts[0] + 0.1 * parts[1])
    assert [means["forecast_mse"], means["next_mse"]] == pytest.approx([part.item() for part in parts])
    likely, _ = plane_vibration.squared_errors(lambda *args: (*outputs, torch.tensor([3.0, 4.0, 5.0])), (x, t, target))
    assert likely.item() == pytest.approx(-4 / (64 * 5))
