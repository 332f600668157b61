"""Latent SDEs: the divergence of the paths, gradients, data, training and resuming."""

import pytest
import torch

from tasks import latent_sde
from tasks.common.config import parse


class Constant(torch.nn.Module):
    """A control, or a drift, that is the same everywhere."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value.expand(len(x), -1)


def config_of(name, *options):
    return parse(latent_sde.LatentSDEConfig, {}, "", ["--device", "cpu", "--model", name, *options])


def model_of(name, *options):
    torch.manual_seed(0)
    return latent_sde.make_model(config_of(name, *options), 3)


@pytest.mark.parametrize("name", latent_sde.TITLES)
def test_the_divergence_of_a_constant_control_has_a_closed_form(name):
    model = model_of(name, "--size", "2", "--hidden", "4").double()
    model.control = Constant(torch.tensor([0.7, -1.2]).double())
    if name == "sde":
        model.drift = Constant(torch.zeros(2).double())
    seen = torch.ones(3, 9, dtype=torch.bool)
    seen[1, 5:] = False  # after the last sample there is no control: 4 intervals
    x = torch.randn(3, 9, 3, dtype=torch.float64)
    found = model(x, latent_sde.times(x, 0.1), seen).kl_path
    expected = torch.tensor([8, 4, 8]).double() * 0.1 * (0.7**2 + 1.2**2) / 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", latent_sde.TITLES)
def test_what_is_not_seen_changes_nothing(name):
    model = model_of(name, "--hidden", "8", "--context", "8")
    (x, seen, *_), _ = latent_sde.lorenz(4, 0)
    torch.manual_seed(1)
    first = latent_sde.predicted(model, x, seen, 0.1, 2)
    torch.manual_seed(1)
    again = latent_sde.predicted(model, x + 5 * (1 - seen).unsqueeze(-1), seen, 0.1, 2)
    assert torch.equal(first.mean, again.mean)


def test_noisy_oscillators_predict_from_the_rows_before():
    model = model_of("kalman")
    (x, seen, *masks), _ = latent_sde.lorenz(4, 0)
    loss, _ = latent_sde.noisy_loss(model.train(), (x, seen, *masks), 0.1)
    expected = model.oscillators.log_likelihood(x, 0.1 * torch.arange(50), seen > 0).sum() / (3 * seen.sum())
    torch.testing.assert_close(-loss, expected)
    means = latent_sde.noisy_loss(model.eval(), (x, seen, *masks), 0.1)[1]
    low, middle, high = latent_sde.quantiles(model, x, seen, config_of("kalman"))
    inside, held = ((x > low) & (x < high)).float().mean(-1), masks[0]
    assert means["held_coverage"] == pytest.approx(((inside * held).sum() / held.sum()).item(), abs=1e-6)
    other = latent_sde.quantiles(model, x + 5 * (1 - seen).unsqueeze(-1), seen, config_of("kalman"))[1]
    assert torch.equal(middle, other)
