"""The task of annealing: exact normalising constants, a small run, and that it goes on where it was."""

import math

import pytest
import torch

from tasks import annealing
from tests.models import slow


def test_log_z_of_the_many_well_is_that_of_its_pairs():
    target = annealing.many_well()
    a, b = torch.linspace(-5, 5, 801, dtype=torch.float64), torch.linspace(-9, 9, 201, dtype=torch.float64)
    x = torch.zeros(len(a) * len(b), 50, dtype=torch.float64)
    x[:, :2] = torch.cartesian_prod(a, b)
    density = target.log_prob(x).exp().view(len(a), len(b))
    of_pair = torch.trapezoid(torch.trapezoid(density, b), a).log().item()
    assert target.log_z == pytest.approx(25 * of_pair, rel=1e-9)


def test_logistic_regression_is_likelihood_times_prior():
    target = annealing.cancer()
    at_zero = target.log_prob(torch.zeros(1, 31)).item()
    assert at_zero == pytest.approx(569 * math.log(0.5) - 15.5 * math.log(2 * math.pi), rel=1e-5)


@pytest.mark.parametrize("sampler", slow(*annealing.DAMPINGS))
def test_training_raises_the_bound(sampler):
    options = annealing.AnnealingOptions(paths=800, iterations=80)
    model = annealing.tune(annealing.many_well(), sampler, 4, options)
    trained = annealing.train(model, options)
    before, after = (annealing.bound(one, 400, 17) for one in (model, trained))
    assert after > before + 1
