"""The closed form of oscillators against mpmath, for any damping and stiffness, with its gradients."""

import itertools
import math

import pytest
import torch

import hbnode
from hbnode.nn.oscillators import held_response
from tests.reference_oscillators import exact_entries

GAMMAS = [0.0, 1e-8, 1e-3, 0.1, 1.0, 2.0, 2.0000001, 3.0, 10.0, 200.0]
KAPPAS = [0.0, 1e-12, 1e-6, 1e-4, 0.1, 0.25, 1.0, 1.0000001, 2.25, 30.0, 1e4]
GAPS = [1e-4, 1e-2, 0.03, 0.5, 1.0, 1.5, 10.0, 100.0]
GRID = list(itertools.product(GAMMAS, KAPPAS, GAPS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["64", "32"])
def test_entries_against_mpmath(dtype, tolerance):
    grid = [point for point in GRID if dtype == torch.float64 or math.sqrt(point[1]) * point[2] <= 10]
    points = torch.tensor(grid, dtype=torch.float64).to(dtype)
    found = torch.stack([*hbnode.nn.functional.oscillator_step(*points.T), *held_response(*points.T)], 1).double()
    for point, row in zip(points.double().tolist(), found.tolist(), strict=True):
        exact = exact_entries(*point)
        root = math.sqrt(point[1])
        slide = min(point[2], 1 / root if root else math.inf)  # the size of what v adds to x
        for value, right, size in zip(row, exact, (1, root, slide, 1, slide, float(exact[5])), strict=True):
            assert abs(value - float(right)) <= tolerance * size, (point, value, right)


@pytest.mark.parametrize("dt", [0.01, 0.5, 1.5, 3.0])
def test_gradients(dt):
    pairs = list(itertools.product([0.0, 0.1, 2.0, 3.0, 10.0], [0.0, 1e-4, 0.25, 1.0, 2.25, 30.0]))
    gamma, kappa = torch.tensor(pairs, dtype=torch.float64).T.requires_grad_().unbind()
    leaves = gamma.detach().requires_grad_(), kappa.detach().requires_grad_()
    gap = torch.full_like(gamma, dt).requires_grad_()
    torch.autograd.gradcheck(
        lambda *z: tuple(hbnode.nn.functional.oscillator_step(*z)), (*leaves, gap), atol=1e-6, rtol=1e-5
    )
    torch.autograd.gradcheck(held_response, (*leaves, gap), atol=1e-6, rtol=1e-5)


def test_second_derivatives():
    z = torch.tensor([[0.1, 1.0, 0.7], [2.0, 1.0, 0.5], [5.0, 1.0, 2.0]], dtype=torch.float64).T.contiguous()
    leaves = tuple(part.clone().requires_grad_() for part in z)
    torch.autograd.gradgradcheck(lambda *z: tuple(hbnode.nn.functional.oscillator_step(*z)), leaves, atol=1e-6)


def test_a_step_of_sums_is_the_product_of_steps():
    def matrix(dt):
        return torch.stack(list(hbnode.nn.functional.oscillator_step(gamma, kappa, dt)), -1).unflatten(-1, (2, 2))

    gamma, kappa = torch.rand(2, 20, dtype=torch.float64) * torch.tensor([[5.0], [3.0]])
    torch.testing.assert_close(matrix(0.4) @ matrix(1.1), matrix(1.5), rtol=0, atol=1e-14)


def test_numbers_and_tensors():
    step = hbnode.nn.functional.oscillator_step(0.5, 2.0, 0.3)
    assert step.vv.dtype == torch.float64
    assert step.vv.shape == ()
    assert hbnode.nn.functional.oscillator_step(torch.rand(3), 2, 0.3).vx.dtype == torch.float32
    assert hbnode.nn.functional.oscillator_step(torch.rand(3, 1), torch.rand(4), 0.3).xx.shape == (3, 4)
    no_time = hbnode.nn.functional.oscillator_step(torch.rand(3), torch.rand(3), 0.0)
    assert [entry.tolist() for entry in no_time] == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3]
