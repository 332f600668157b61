"""The discretized mixture of logistics: its probabilities, its gradients, and that the sampler follows them."""

import math

import pytest
import torch

from tasks.models import logistic_mixture

# logits, means and scales of two mixtures; the second has components beyond both ends, and one between two levels
MIXTURES = [
    [(0.2, -0.5, 0.3), (0.7, 0.1, 0.1), (-1.0, 0.9, 0.02)],
    [(0.0, -1.4, 0.1), (0.5, 1.3, 0.2), (1.0, 0.031, 1e-3)],
]


def parameters(mixture):
    logits, means, scales = zip(*mixture, strict=True)
    return torch.tensor([*logits, *means, *(math.log(scale) for scale in scales)], dtype=torch.float64)


def probability(mixture, x, levels):
    """P of the docstring, a difference of sigmoids, in Python's floats."""

    def sigmoid(z):
        return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))

    y, half = 2 * x / (levels - 1) - 1, 1 / (levels - 1)
    total = 0.0
    for logit, mean, scale in mixture:
        above = 1.0 if x == levels - 1 else sigmoid((y + half - mean) / scale)
        below = 0.0 if x == 0 else sigmoid((y - half - mean) / scale)
        total += math.exp(logit) * (above - below)
    return total / sum(math.exp(logit) for logit, _, _ in mixture)


def log_probabilities(mixture, levels):
    return logistic_mixture.log_probability(parameters(mixture).expand(levels, -1), torch.arange(levels), levels)


@pytest.mark.parametrize("levels", [2, 3, 17, 256])
@pytest.mark.parametrize("mixture", MIXTURES, ids=["inside", "beyond"])
def test_it_is_the_equation_and_sums_to_one(mixture, levels):
    found = log_probabilities(mixture, levels).exp()
    expected = torch.tensor([probability(mixture, x, levels) for x in range(levels)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("log_scale", [-1e4, -7.0, 0.0, 100.0])
@pytest.mark.parametrize("mean", [-50.0, 0.0])
def test_extreme_parameters_sum_to_one_with_finite_gradients_in_float32(mean, log_scale):
    p = torch.tensor([0.0, mean, log_scale], requires_grad=True)
    found = logistic_mixture.log_probability(p.expand(256, -1), torch.arange(256), 256)
    assert found.isfinite().all()
    assert found.exp().sum().item() == pytest.approx(1, abs=1e-4)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("mixture", MIXTURES, ids=["inside", "beyond"])
def test_the_sampler_follows_the_probabilities(mixture):
    count, levels = 200_000, 17
    p = parameters(mixture).expand(2, count // 2, -1).float()
    drawn = logistic_mixture.sample(p, levels, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, logistic_mixture.sample(p, levels, torch.Generator().manual_seed(0)))
    assert (drawn.dtype, drawn.shape) == (torch.long, (2, count // 2))
    found = drawn.flatten().bincount(minlength=levels) / count
    expected = log_probabilities(mixture, levels).exp()
    error = (expected * (1 - expected) / count).sqrt() + 1e-9
    assert ((found - expected).abs() / error).max() < 4
