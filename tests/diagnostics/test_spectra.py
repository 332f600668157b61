"""Spectra, against closed forms in float64."""

import csv
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.diagnostics.spectra import jacobian, pair_eigenvalues
from tests.problems import block_matrix, identity_ghbnode, linear_func

A = np.array([[-1.0, 0.5], [-0.3, -2.0]])
GAMMA, XI = 0.3, 0.2
TIGHT = {"rtol": 1e-11, "atol": 1e-11}
LINEAR = {
    "hbnode": (lambda: hbnode.HBNODE(linear_func(A), damping=GAMMA, learn_damping=False), block_matrix(A, GAMMA)),
    "ghbnode": (
        lambda: identity_ghbnode(linear_func(A), damping=GAMMA, learn_damping=False, xi=XI, learn_xi=False),
        block_matrix(A, GAMMA, XI),
    ),
    "sonode": (lambda: hbnode.SONODE(lambda h, v: h @ torch.tensor(A).T - GAMMA * v), block_matrix(A, GAMMA)),
    "node": (lambda: hbnode.NODE(linear_func(A)), A),
}


def assert_same(found, exact, atol=1e-10):
    """Eigenvalues in any order."""
    left = list(exact)
    for value in found.tolist():
        nearest = min(left, key=lambda other: abs(other - value))
        assert value == pytest.approx(nearest, abs=atol)
        left.remove(nearest)
    assert not left


class Net(nn.Module):
    """A force that is not linear and depends on time."""

    def __init__(self, d=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, d))

    def forward(self, t, h):
        return self.layers(h) * torch.cos(t) - h


@pytest.mark.parametrize(("damping", "generalized"), [(2.0, False), (0.0, True), (0.05, True)])
def test_the_eigenvalues_come_in_pairs_that_sum_to_minus_the_damping(damping, generalized):
    """Proposition 4, for a force that is not linear and paths that are no points."""
    options = {"damping": damping, "learn_damping": False, "generalized": generalized}
    block = hbnode.HeavyBallODEBlock(Net(), t_span=(0.0, 4.0), **options).double()
    found = hbnode.diagnostics.spectrum(block, torch.randn(40, 3, dtype=torch.float64))
    sums = torch.full((40, 3), -damping, dtype=torch.complex128)
    torch.testing.assert_close(found.pairs.sum(-1), sums, atol=1e-12, rtol=0)
    assert torch.equal(found.pairs.reshape(40, 6), found.eigenvalues)
    assert (found.pairs.real.amax(-1) >= -damping / 2 - 1e-12).all()  # half of the gradient decays no faster


@pytest.mark.parametrize("name", LINEAR)
def test_the_spectrum_of_a_linear_field(name):
    field, matrix = LINEAR[name]
    for t in (None, 0.0, 0.6):
        found = hbnode.diagnostics.spectrum(hbnode.ODEBlock(field()), torch.randn(2, 2, dtype=torch.float64), t)
        for row in found.eigenvalues:
            assert_same(row, np.linalg.eigvals(matrix))
        assert (found.damping == GAMMA) == ("hbnode" in name)


@pytest.mark.parametrize("t_span", [(0.0, 1.0), (1.0, 0.0)])
def test_the_mean_over_the_path_of_a_field_that_is_not_linear(t_span):
    """H' = -h² from 1 at 0: h = 1 / (1 + t), and the mean of -2h over (0, 1) is -2 ln 2."""
    block = hbnode.ODEBlock(hbnode.NODE(lambda h: -(h**2)), t_span, **TIGHT)
    x = torch.tensor([[1.0 / (1.0 + t_span[0])]], dtype=torch.float64)
    assert hbnode.diagnostics.spectrum(block, x).eigenvalues.item().real == pytest.approx(-2 * math.log(2), rel=1e-9)
    assert hbnode.diagnostics.spectrum(block, x, 0.5).eigenvalues.item().real == pytest.approx(-2 / 1.5, rel=1e-9)


def test_the_mean_over_time_of_a_field_that_takes_it():
    """F = t⁷ A h, whose mean over (0, 2) is 16 A h."""
    field = hbnode.HBNODE(lambda t, h: t**7 * h @ torch.tensor(A).T, damping=0.5, learn_damping=False)
    found = hbnode.diagnostics.spectrum(hbnode.ODEBlock(field, (0.0, 2.0)), torch.zeros(1, 2, dtype=torch.float64))
    assert_same(found.eigenvalues[0], np.linalg.eigvals(block_matrix(16 * A, 0.5)))


def test_a_state_without_a_batch_or_features_is_refused():
    block = hbnode.ODEBlock(hbnode.NODE(lambda h: -3 * h))
    for x, got in ((torch.ones(2), "(2,)"), (torch.ones(3, 0), "(3, 0)")):
        with pytest.raises(ValueError, match=re.escape(f"(batch, d, ...), got shape {got}. Fix: x.unsqueeze(0)")):
            hbnode.diagnostics.spectrum(block, x)


def test_jacobians_of_images_and_of_what_does_not_depend_on_the_state():
    field = hbnode.HBNODE(nn.Conv2d(2, 2, 3, padding=1), damping=0.5).double()
    state = torch.randn(2, 3, 2, 2, 2, dtype=torch.float64).unbind()
    found = jacobian(field, torch.tensor(0.0), state)

    def flat(z):
        return torch.cat(field(torch.tensor(0.0), tuple(z.reshape(2, 1, 2, 2, 2)))).flatten()

    for sample in range(3):
        z = torch.cat([part[sample].flatten() for part in state])
        torch.testing.assert_close(found[sample], torch.autograd.functional.jacobian(flat, z))
    assert not jacobian(lambda t, y: torch.ones(2, 2), torch.tensor(0.0), (torch.ones(2, 2),)).any()


def test_pairs_of_eigenvalues_that_are_equal_nearly():
    gamma = 0.4
    one = torch.tensor([-0.2, -0.2 + 1e-9, -0.2 - 1e-9, -0.2, 3.0 - 0.2j, -3.4 + 0.2j, 1j - 0.2, -1j - 0.2])
    shuffled = torch.stack([one[torch.randperm(8)] for _ in range(5)]).to(torch.complex128)
    sums = pair_eigenvalues(shuffled, gamma).unflatten(1, (-1, 2)).sum(-1)
    torch.testing.assert_close(sums, torch.full_like(sums, -gamma), atol=1e-6, rtol=0)


def test_a_damping_for_each_feature_has_no_pairs():
    field = hbnode.HBNODE(linear_func(A), damping=torch.tensor([0.1, 0.4]).double(), learn_damping=False)
    found = hbnode.diagnostics.spectrum(hbnode.ODEBlock(field), torch.zeros(1, 2, dtype=torch.float64))
    matrix = block_matrix(A, 0.0) - np.diag([0, 0, *field.damping])
    assert_same(found.eigenvalues[0], np.linalg.eigvals(matrix), 1e-12)
    assert found.damping is None
    with pytest.raises(ValueError, match="pairs needs an HBNODE or GHBNODE with one damping γ"):
        found.pairs  # noqa: B018


def test_files_and_counts(tmp_path):
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2))
    with hbnode.count_nfe(block) as nfe, hbnode.diagnostics.record_steps(block) as steps:
        found = hbnode.diagnostics.spectrum(block, torch.randn(3, 2))
    assert min(nfe.forward, len(steps)) > 0
    assert block.nfe.total == 0
    found.to_csv(tmp_path / "spectrum.csv")
    rows = list(csv.DictReader((tmp_path / "spectrum.csv").read_text().splitlines()))
    values = [complex(float(row["real"]), float(row["imag"])) for row in rows]
    assert values == found.eigenvalues.reshape(-1).tolist()
    assert [row["sample"] for row in rows] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
