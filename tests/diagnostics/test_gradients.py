"""Adjoint norms, against closed forms and gradients of the input."""

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from torch import nn

import hbnode
from tests.diagnostics.test_spectra import LINEAR, TIGHT, Net


@pytest.mark.parametrize("name", ["ghbnode", "node"])
def test_adjoint_norms_of_a_linear_field(name):
    """The gradient a(t) = a(T) exp((T - t) H) with a(T) = (dL/dh, 0)."""
    field, matrix = LINEAR[name]
    block = hbnode.ODEBlock(field(), (0.0, 3.0), **TIGHT)
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
