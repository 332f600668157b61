"""The linear filter over time, as matrices and as a loop, against the recurrence."""

import math

import pytest
import torch

from hbnode.nn import _scan
from hbnode.nn._scan import linear_filter
from tests.momentum_layers import close


def slowly(x, mu, s, v=None):
    v, values = torch.zeros_like(x[0]) if v is None else v, []
    for mu_t, row in zip(mu, x, strict=True):
        v = mu_t * v + s * row
        values.append(v)
    return torch.stack(values)


@pytest.fixture(params=[math.inf, 0], ids=["matrices", "loop"])
def form(request, monkeypatch):
    monkeypatch.setattr(_scan, "LOOP_WIDTH", request.param)


@pytest.mark.sparse
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("steps", [97, 1, 4, 31, 32, 33, 1024, 1100])
@pytest.mark.parametrize("kind", ["constant", "varying", "zeros", "each"])
def test_the_filter_is_the_recurrence(steps, kind):
    mu = {
        "constant": torch.full((steps,), 0.9),
        "varying": torch.rand(steps),
        "zeros": (torch.arange(1, steps + 1) % 7) / 10,
        "each": torch.rand(steps, 2),
    }[kind].double()
    each = mu.unsqueeze(-1) if kind == "each" else mu
    x = torch.randn(steps, 2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for given in (None, v):
        found = linear_filter(x, mu[0].item() if kind == "constant" else mu, 0.3, given)
        expected = slowly(x, each, 0.3, given)
        close(found, expected, 1e-13)
        w, leaves = torch.randn_like(found), [x] if given is None else [x, v]
        close(*(torch.autograd.grad((y * w).sum(), leaves) for y in (found, expected)), 1e-12)


def test_the_filter_forgets_without_overflow():
    """A cumulative sum of x / mu^t would not be finite."""
    x = torch.randn(5000, 1, 1)
    torch.testing.assert_close(linear_filter(x, 0.01, 1.0), slowly(x.double(), [0.01] * 5000, 1.0).float())
    kept = linear_filter(torch.ones(5000, 1, 1), 1.0, 1.0)
    torch.testing.assert_close(kept.flatten(), torch.arange(1.0, 5001.0))
