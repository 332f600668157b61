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
    for name, values in curve.columns().items():
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
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-3], reference_tolerance=1e-12)
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


class Kinked(nn.Module):
    """The force h' = 1 + rate relu(h - 1), whose derivative jumps when h passes 1."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(2.0))

    def forward(self, h):
        return 1 + self.rate * (h - 1).relu()


def test_the_reference_knows_its_own_error_at_kinks():
    """From h(0) = x < 1 the kink is passed at the time 1 - x, and h(1) = 1 + (exp(2 x) - 1) / 2."""
    block, x = hbnode.ODEBlock(hbnode.NODE(Kinked())), torch.linspace(0.1, 0.9, 40)[:, None]
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-1, 1e-4])
    assert curve.reference.tolerance == pytest.approx(1e-6)
    assert curve.reference.remark == ""
    exact = 1 + (2 * x).double().expm1() / 2
    block.rtol = block.atol = 1e-4
    error = (block(x).double() - exact).pow(2).mean().sqrt().item()
    assert curve.error[1] == pytest.approx(error, abs=3 * curve.reference.error)
    assert curve.reference.error < error / 3


@pytest.mark.parametrize("limit", ["evaluations", "memory"])
def test_a_reference_beyond_its_budget_is_looser_and_says_so(limit, monkeypatch):
    if limit == "memory":  # of 40 steps with 4 states of 40 samples in float64
        monkeypatch.setattr("hbnode.diagnostics.tolerance.MOST_BYTES", 40 * 4 * 40 * 8)
    block, x = hbnode.ODEBlock(hbnode.NODE(Kinked())), torch.linspace(0.1, 0.9, 40)[:, None]
    nfe = 200 if limit == "evaluations" else 4000
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-1, 1e-4], reference_tolerance=1e-12, max_nfe=nfe)
    most = 240 if limit == "memory" else max(nfe, 4 * max(curve.forward))
    assert curve.reference.tolerance > 1e-12
    assert f"because the solve needs more than max_nfe={most} function evaluations" in curve.reference.remark
    assert curve.reference.gradient_error > 0


def test_a_function_that_closes_over_float32_has_a_reference_in_float32():
    weight = torch.randn(3, 3)
    block = hbnode.HeavyBallODEBlock(lambda h: torch.tanh(h @ weight))
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, torch.randn(5, 3), [1e-2, 1e-5])
    assert "not in float64" in curve.reference.remark
    assert curve.error[1] < 1e-5


def test_bad_input():
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2)), torch.zeros(1, 2)
    with pytest.raises(ValueError, match="Linear contains no ODEBlock"):
        hbnode.diagnostics.nfe_vs_tolerance(nn.Linear(2, 2), x, [1e-3])
    with pytest.raises(ValueError, match="tolerances is empty"):
        hbnode.diagnostics.nfe_vs_tolerance(block, x, [])
    with pytest.raises(ValueError, match=r"reference_tolerance=1e-05 must be below all tolerances, got 1e-05"):
        hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-2, 1e-5], reference_tolerance=1e-5)
