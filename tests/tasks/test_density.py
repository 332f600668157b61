"""Densities in the plane."""

import math

import pytest
import torch

from tasks import density
from tasks.data.planar import EXTENT, grid, log_normalizer, ring
from tasks.models.densities import CNF


def test_the_integral_of_an_energy():
    assert log_normalizer(lambda x: x.square().sum(-1) / 0.5) == pytest.approx(math.log(math.pi * 0.5), abs=1e-6)


def test_the_density_of_a_cnf_integrates_to_one_and_is_that_of_its_samples():
    torch.manual_seed(0)
    model = CNF(8, 1e-6)
    points = grid(161)
    with torch.no_grad():
        total = model.log_prob(points, 1).exp().sum() * (2 * EXTENT / 160) ** 2
        x, log_prob = model.draw(20)
        assert torch.allclose(model.log_prob(x, 1), log_prob, atol=1e-4)
    assert total.item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("model", density.TITLES)
def test_importance_sampling_finds_the_integral_of_the_ring(model, monkeypatch):
    monkeypatch.setattr(density, "SPAN", 1.0)  # shorter, an untrained flow stays nearer to the ring
    torch.manual_seed(0)
    made = density.make_model(density.DensityConfig(model=model, hidden=8, device="cpu"))
    found = density.effective_sample_size(made, 20_000)
    assert found["log_z"] == pytest.approx(log_normalizer(ring), abs=0.2)
