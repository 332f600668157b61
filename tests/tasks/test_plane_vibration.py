"""Plane vibration: both splits, what the models see, the loss."""

import pytest
import torch

from tasks import plane_vibration
from tasks.data import f16

# Splits


@pytest.mark.parametrize(("protocol", "sizes"), [("paper", (509, 254, 254)), ("honest", (491, 243, 243))])
def test_segments_and_their_targets_are_the_right_rows(protocol, sizes):
    """Of a record that tells the numbers of its rows, as nine periods do not."""
    record = torch.arange(73_728, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    splits = plane_vibration.Splits.from_record(record, protocol)
    assert tuple(len(part) for part in splits.rows.values()) == sizes
    for name, rows in splits.rows.items():
        assert (rows.flatten().diff() >= 1).all()  # no row twice
        x, t, target = splits.batches[name]
        number = (x[..., 0] * splits.deviation[0] + splits.mean[0]).round().long()
        assert torch.equal(number, rows[:, :64])
        assert torch.equal(t, (rows - rows[:, :1]).float())
        ahead = (target[..., 4] * splits.deviation[4] + splits.mean[4]).div(5).round().long()
        assert torch.equal(ahead, rows[:, 64:] + torch.arange(8))


def test_no_phase_of_the_honest_split_is_in_two_parts():
    used = {}
    for name, part in plane_vibration.split_rows(73_728, "honest").items():
        every = torch.cat([part.flatten(), (part[:, -1:] + torch.arange(8)).flatten()])
        assert every.max() < 73_728
        used[name] = (every % 8192).unique()
    for one, another in (("train", "validation"), ("validation", "test"), ("train", "test")):
        distance = (used[one][:, None] - used[another]).abs()
        assert torch.minimum(distance, 8192 - distance).min() > 80  # around the period too


def test_standardised_with_what_training_may_know():
    """And trivial_errors: the last sample, and in the paper's protocol the same phase some periods earlier."""
    record = f16.vibrating_structure()
    splits = plane_vibration.Splits.from_record(record, "honest")
    torch.testing.assert_close(splits.deviation, record[torch.arange(73_728) % 8192 < 3976].std(0))
    whole = plane_vibration.Splits.from_record(record, "paper")
    last, first = whole.rows["test"][:, 63], whole.rows["test"][:, 64]
    errors = [(whole.record[first + k] - whole.record[last]).square().mean() for k in range(8)]
    found = whole.trivial_errors()
    assert found["persistence_forecast_mse"] == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)
    assert found["periods_earlier_forecast_mse"] == pytest.approx(2e-4, rel=0.1)  # two noises of 1 %


# Models


def window():
    """Samples and stamps in float64: the models that read them are, too."""
    gaps = torch.randint(1, 4, (3, plane_vibration.WINDOW)).double()
    t = torch.nn.functional.pad(gaps.cumsum(1), (1, 0))
    return torch.randn(3, plane_vibration.WINDOW, 5, dtype=torch.float64), t


@pytest.mark.parametrize("model", ["node", "ghbnode"])
def test_a_prediction_has_seen_the_samples_before_it_only(model, monkeypatch):
    """With an encoder that sees nothing: in the paper's model it sees the window. It starts near rest."""
    monkeypatch.setattr(plane_vibration, "WINDOW", 26)
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
    torch.testing.assert_close(forecast[:, 0], following[:, -1])
    torch.testing.assert_close(shifted[0][:, 0], forecast[:, 3], rtol=1e-3, atol=1e-4)  # 3 rows later


def test_the_loss_is_the_error_of_the_forecast_and_a_tenth_of_that_at_the_next_stamps():
    x, t = window()
    target = torch.randn(3, 8, 5, dtype=torch.float64)
    outputs = torch.zeros(3, 8, 5), torch.ones(3, 64, 5)
    loss, means = plane_vibration.squared_errors(lambda *args: outputs, (x, t, target))
    stamps = torch.cat([x[:, 1:], target[:, :1]], dim=1)
    parts = [target.square().mean(), (1 - stamps).square().mean()]
    torch.testing.assert_close(loss, parts[0] + 0.1 * parts[1])
    assert [means["forecast_mse"], means["next_mse"]] == pytest.approx([part.item() for part in parts])
    likely, _ = plane_vibration.squared_errors(lambda *args: (*outputs, torch.tensor([3.0, 4.0, 5.0])), (x, t, target))
    assert likely.item() == pytest.approx(-4 / (64 * 5))
