"""Evaluations and errors against the tolerance."""

import csv

import pytest
import torch
from torch import nn

import hbnode


def test_cost_rises_and_error_falls_with_the_tolerance(tmp_path):
    block = hbnode.HeavyBallODEBlock(hbnode.nn.MLP(3, [8], 3), method="dopri5", gradient="adjoint")
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, torch.randn(5, 3), [1e-1, 1e-3, 1e-5])
    assert curve.tolerance == [1e-1, 1e-3, 1e-5]
    assert curve.forward == sorted(curve.forward)
    assert curve.backward[0] >= 8
    assert curve.error[0] > curve.error[-1]
    assert curve.error[-1] < 1e-4
    assert curve.gradient_error[-1] < 1e-3
    curve.to_csv(tmp_path / "curve.csv")
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    for name, values in vars(curve).items():
        assert [float(row[name]) for row in rows] == values


def test_errors_are_against_the_exact_solution():
    """H' = -a h at a = 2: h(1) = x exp(-2), and the gradients for a and x are known."""

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, h):
            return -self.rate * h

    block = hbnode.ODEBlock(hbnode.NODE(Decay()), method="rk4", steps=2)
    x = torch.ones(1, 1, dtype=torch.float64)
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-3])
    z = -1.0  # rate times step, negative
    factor = 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24
    h, exact = factor**2, torch.tensor(-2.0).exp().item()
    assert curve.forward == [8]
    assert curve.error[0] == pytest.approx(abs(h - exact), rel=1e-5)
    slope = 2 * factor * (1 + z + z**2 / 2 + z**3 / 6) * -0.5
    got, expected = torch.tensor([2 * h * h, 2 * h * slope]), torch.tensor([2 * exact**2, -2 * exact**2])
    assert curve.gradient_error[0] == pytest.approx(((got - expected).norm() / expected.norm()).item(), rel=1e-3)


def test_a_model_with_blocks_inside_and_a_loss_of_ones_own():
    block = hbnode.HeavyBallODEBlock(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), gradient="adjoint", rtol=0.5)
    model = nn.Sequential(nn.Linear(2, 3), block, nn.Linear(3, 2))
    target = torch.randint(2, (6,))
    before = [p.clone() for p in model.parameters()]
    curve = hbnode.diagnostics.nfe_vs_tolerance(
        model, torch.randn(6, 2), [1e-2, 1e-4], loss=lambda out: nn.functional.cross_entropy(out, target)
    )
    assert curve.error[1] < 1e-3
    assert block.rtol == 0.5
    assert block.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_bad_input():
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2)), torch.zeros(1, 2)
    with pytest.raises(ValueError, match="Linear contains no ODEBlock"):
        hbnode.diagnostics.nfe_vs_tolerance(nn.Linear(2, 2), x, [1e-3])
    with pytest.raises(ValueError, match="tolerances is empty"):
        hbnode.diagnostics.nfe_vs_tolerance(block, x, [])
    with pytest.raises(ValueError, match=r"reference_tolerance=1e-05 must be below all tolerances, got 1e-05"):
        hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-2, 1e-5], reference_tolerance=1e-5)


def test_integers_into_an_embedding_and_a_generator_of_tolerances():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), hbnode.HeavyBallODEBlock(nn.Linear(6, 6), per_sample=True))
    curve = hbnode.diagnostics.nfe_vs_tolerance(model, torch.randint(7, (4, 2)), (10.0**-k for k in (2, 5)))
    assert curve.tolerance == [1e-2, 1e-5]
    assert 0 < curve.gradient_error[1] < 1e-3
