"""Adjoint norms and spectra, against closed forms and finite differences in float64."""

import csv
import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from torch import nn

import hbnode
from hbnode.diagnostics.spectra import gauss_legendre, jacobian, paired
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


# Adjoint norms


@pytest.mark.parametrize("solver", [{}, {"method": "dopri8", "save": "exact"}])
@pytest.mark.parametrize("name", LINEAR)
def test_adjoint_norms_of_a_linear_field(name, solver):
    """The gradient a(t) = a(T) exp((T - t) H) with a(T) = (dL/dh, 0)."""
    field, matrix = LINEAR[name]
    block = hbnode.ODEBlock(field(), (0.0, 3.0), **TIGHT, **solver)
    x = torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 2.0], [-0.5, 0.7]], dtype=torch.float64)
    norms = hbnode.diagnostics.adjoint_norms(block, x, [0.0, 0.5, 2.9, 3.0], loss=lambda h: (weight * h).sum())
    end = np.concatenate([weight.numpy(), np.zeros((2, len(matrix) - 2))], 1)
    for i in range(4):
        exact = end @ expm(matrix * (3.0 - norms.t[i]))
        assert norms.h[i] == pytest.approx(np.linalg.norm(exact[:, :2]), rel=1e-8)
        assert norms.total[i] == pytest.approx(np.linalg.norm(exact), rel=1e-8)
        if norms.m is not None:
            assert norms.m[i] == pytest.approx(np.linalg.norm(exact[:, 2:]), rel=1e-8, abs=1e-12)
    assert (norms.m is None) == (name == "node")


@pytest.mark.parametrize("gradient", ["checkpoint", "adjoint"])
def test_adjoint_norms_by_finite_differences(gradient):
    """Each part of the state at t, moved both ways, and the loss of h(T) in the block's own solve."""
    block = hbnode.HeavyBallODEBlock(
        Net(2), generalized=True, t_span=(0.0, 2.0), gradient=gradient, rtol=1e-9, atol=1e-9
    ).double()
    x, t = torch.randn(1, 2, dtype=torch.float64), [0.0, 0.7, 2.0]
    norms = hbnode.diagnostics.adjoint_norms(block, x, t)
    path = hbnode.odeint(block.field, block.field.initial_state(x), t, **TIGHT)
    state = torch.stack([part[1].detach() for part in path])

    def loss(at):
        with torch.no_grad():
            h, _ = hbnode.odeint(block.field, tuple(at), t[1:], **TIGHT)
        return h[-1].square().mean().item()

    step, slopes = 1e-5, torch.zeros_like(state)
    for index in np.ndindex(*state.shape):
        move = torch.zeros_like(state)
        move[index] = step
        slopes[index] = (loss(state + move) - loss(state - move)) / (2 * step)
    assert norms.h[1] == pytest.approx(slopes[0].norm().item(), rel=1e-6)
    assert norms.m[1] == pytest.approx(slopes[1].norm().item(), rel=1e-6)


def test_adjoint_norms_at_the_start_are_the_gradient_of_the_input():
    block = hbnode.HeavyBallODEBlock(Net(), method="leapfrog", steps=10).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    norms = hbnode.diagnostics.adjoint_norms(block, x)
    assert norms.t == pytest.approx(np.linspace(0, 1, 11))  # the block's own grid
    assert x.grad is None
    assert all(p.grad is None for p in block.parameters())
    assert block.nfe.total == 0
    block(x).square().mean().backward()
    assert norms.h[0] == pytest.approx(x.grad.norm().item(), rel=1e-12)


def test_adjoint_norms_with_augmentation_a_head_and_without_gradients_around():
    block = hbnode.HeavyBallODEBlock(nn.Linear(3, 3), augment=1)
    model, y = nn.Linear(3, 4), torch.tensor([0, 3])
    with torch.inference_mode():
        x = torch.randn(2, 2)
        norms = hbnode.diagnostics.adjoint_norms(block, x, loss=lambda h: nn.functional.cross_entropy(model(h), y))
    assert (norms.t[0], norms.t[-1], len(norms.t)) == (0.0, 1.0, 50)
    assert all(norm > 0 for norm in norms.h)
    assert norms.m[-1] == 0
    with torch.no_grad():
        assert hbnode.diagnostics.adjoint_norms(block, x.tolist()).total[0] > 0


def test_what_adjoint_norms_refuse():
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2)), torch.zeros(1, 2)
    with pytest.raises(TypeError, match=r"adjoint_norms expected an ODEBlock, got Linear. Fix: pass the block inside"):
        hbnode.diagnostics.adjoint_norms(nn.Linear(2, 2), x)
    with pytest.raises(ValueError, match=r"loss must return a scalar tensor, got shape \(1, 2\). Fix: end it with"):
        hbnode.diagnostics.adjoint_norms(block, x, loss=lambda h: h)
    with pytest.raises(ValueError, match=r"loss must return a scalar tensor, got float"):
        hbnode.diagnostics.adjoint_norms(block, x, loss=lambda h: h.sum().item())
    with pytest.raises(ValueError, match=r"t must hold two or more times \(T,\), got shape \(1,\)"):
        hbnode.diagnostics.adjoint_norms(block, x, [0.0])


# Spectra


@pytest.mark.parametrize("generalized", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.05, 2.0])
def test_the_eigenvalues_come_in_pairs_that_sum_to_minus_the_damping(generalized, damping):
    """Proposition 4, for a force that is not linear and paths that are no points."""
    options = {"damping": damping, "learn_damping": False, "generalized": generalized}
    block = hbnode.HeavyBallODEBlock(Net(), t_span=(0.0, 4.0), **options).double()
    found = hbnode.diagnostics.spectrum(block, torch.randn(5, 3, dtype=torch.float64))
    assert found.damping == damping
    assert found.pairs.shape == (5, 3, 2)
    torch.testing.assert_close(
        found.pairs.sum(-1), torch.full((5, 3), -damping, dtype=torch.complex128), atol=1e-12, rtol=0
    )
    assert torch.equal(found.pairs.reshape(5, 6), found.eigenvalues)
    assert (found.pairs.real.amax(-1) >= -damping / 2 - 1e-12).all()  # half of the gradient decays no faster


@pytest.mark.parametrize("t", [None, 0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", LINEAR)
def test_the_spectrum_of_a_linear_field(name, t):
    field, matrix = LINEAR[name]
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
    block = hbnode.ODEBlock(
        hbnode.HBNODE(lambda t, h: t**7 * h @ torch.tensor(A).T, damping=0.5, learn_damping=False), (0.0, 2.0)
    )
    found = hbnode.diagnostics.spectrum(block, torch.zeros(1, 2, dtype=torch.float64))
    assert_same(found.eigenvalues[0], np.linalg.eigvals(block_matrix(16 * A, 0.5)))


@pytest.mark.parametrize("name", LINEAR)
def test_the_spectrum_of_an_empty_batch_is_empty(name, tmp_path):
    field, matrix = LINEAR[name]
    for t in (None, 0.5):
        found = hbnode.diagnostics.spectrum(hbnode.ODEBlock(field()), torch.zeros(0, 2, dtype=torch.float64), t)
        assert found.eigenvalues.shape == (0, len(matrix))
    assert "hbnode" not in name or found.pairs.shape == (0, 2, 2)
    found.to_csv(tmp_path / "spectrum.csv")
    assert len((tmp_path / "spectrum.csv").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", LINEAR)
def test_a_state_without_a_batch_is_refused_with_what_helps(name):
    field, matrix = LINEAR[name]
    block, x = hbnode.ODEBlock(field()), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\(batch, d, ...\), got shape \(2,\). Fix: x.unsqueeze\(0\) for one sample"):
        hbnode.diagnostics.spectrum(block, x)
    assert_same(hbnode.diagnostics.spectrum(block, x.unsqueeze(0)).eigenvalues[0], np.linalg.eigvals(matrix))
    each = hbnode.ODEBlock(hbnode.NODE(lambda h: -3 * h))
    with pytest.raises(ValueError, match=r"got shape \(3, 0\)"):
        hbnode.diagnostics.spectrum(each, torch.ones(3, 0))
    with pytest.raises(ValueError, match=r"x.unsqueeze\(1\) for one feature"):
        hbnode.diagnostics.spectrum(each, x)
    assert hbnode.diagnostics.spectrum(each, x.unsqueeze(1)).eigenvalues.real.tolist() == [[pytest.approx(-3)]] * 2


@pytest.mark.parametrize(
    "diagnose", [hbnode.diagnostics.spectrum, hbnode.diagnostics.adjoint_norms], ids=["spectrum", "adjoint_norms"]
)
def test_counts_that_are_open_include_a_diagnosis(diagnose):
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2))
    with hbnode.count_nfe(block) as nfe, hbnode.diagnostics.record_steps(block) as steps:
        diagnose(block, torch.ones(1, 2))
    assert nfe.forward > 0
    assert len(steps) > 0
    assert block.nfe.total == 0


def test_gauss_legendre():
    nodes, weights = gauss_legendre(8)
    expected, theirs = np.polynomial.legendre.leggauss(8)
    np.testing.assert_allclose(nodes, (expected + 1) / 2, atol=1e-14)
    np.testing.assert_allclose(weights, theirs / 2, atol=1e-14)


def test_jacobians_of_images_and_of_what_does_not_depend_on_the_state():
    field = hbnode.HBNODE(nn.Conv2d(2, 2, 3, padding=1), damping=0.5).double()
    state = (torch.randn(3, 2, 2, 2, dtype=torch.float64), torch.randn(3, 2, 2, 2, dtype=torch.float64))
    found = jacobian(field, torch.tensor(0.0), state)

    def flat(z):
        h, m = z.reshape(2, 1, 2, 2, 2)
        return torch.cat([part.reshape(-1) for part in field(torch.tensor(0.0), (h, m))])

    for sample in range(3):
        z = torch.cat([part[sample].reshape(-1) for part in state])
        torch.testing.assert_close(found[sample], torch.autograd.functional.jacobian(flat, z))
    assert not jacobian(lambda t, y: torch.ones(2, 2), torch.tensor(0.0), (torch.ones(2, 2),)).any()


def test_pairs_of_eigenvalues_that_are_equal_nearly():
    gamma = 0.4
    one = torch.tensor([-0.2, -0.2 + 1e-9, -0.2 - 1e-9, -0.2, 3.0 - 0.2j, -3.4 + 0.2j, 1j - 0.2, -1j - 0.2])
    shuffled = torch.stack([one[torch.randperm(8)] for _ in range(5)]).to(torch.complex128)
    sums = paired(shuffled, gamma).unflatten(1, (-1, 2)).sum(-1)
    torch.testing.assert_close(sums, torch.full_like(sums, -gamma), atol=1e-6, rtol=0)


def test_a_damping_for_each_feature_has_no_pairs():
    field = hbnode.HBNODE(linear_func(A), damping=torch.tensor([0.1, 0.4]).double(), learn_damping=False)
    found = hbnode.diagnostics.spectrum(hbnode.ODEBlock(field), torch.zeros(1, 2, dtype=torch.float64))
    matrix = block_matrix(A, 0.0) - np.diag([0, 0, *field.damping])
    assert_same(found.eigenvalues[0], np.linalg.eigvals(matrix), 1e-12)
    assert found.damping is None
    with pytest.raises(ValueError, match=r"only the eigenvalues of a heavy ball with one damping γ come in pairs"):
        found.pairs  # noqa: B018


# Files


def test_both_write_what_they_hold(tmp_path):
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2)), torch.randn(3, 2)
    norms, found = hbnode.diagnostics.adjoint_norms(block, x, [0.0, 0.5, 1.0]), hbnode.diagnostics.spectrum(block, x)
    norms.to_csv(tmp_path / "norms.csv")
    found.to_csv(tmp_path / "spectrum.csv")
    rows = {path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in tmp_path.iterdir()}
    assert {name: [float(row[name]) for row in rows["norms"]] for name in ("t", "h", "m", "total")} == vars(norms)
    values = [complex(float(row["real"]), float(row["imag"])) for row in rows["spectrum"]]
    assert values == found.eigenvalues.reshape(-1).tolist()
    assert [row["sample"] for row in rows["spectrum"]] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    node = hbnode.diagnostics.adjoint_norms(hbnode.ODEBlock(hbnode.NODE(nn.Linear(2, 2))), x, [0.0, 1.0])
    assert list(node.columns()) == ["t", "h", "total"]
