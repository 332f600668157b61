"""The Silverbox: what a window holds, growth against closed forms."""

import math

import pytest
import torch

from tasks import silverbox
from tasks.studies import silverbox_growth


def force(t):
    """A sum of sines of up to a quarter of the sampling rate."""
    return sum(torch.sin(2 * math.pi * f * t + 7 * f) for f in (0.013, 0.057, 0.11, 0.17, 0.24))


# Data


def test_the_input_is_refined_to_the_signal_between_its_samples():
    fine = silverbox.refine(force(torch.arange(200, dtype=torch.float64)))
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
    assert found["median"].isfinite().all()
