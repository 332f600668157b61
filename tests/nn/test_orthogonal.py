"""DTRIV's orthogonal weight: how it starts, how it stays, and moving its base."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

import hbnode
from hbnode.nn import recurrent, rules
from tests.momentum_layers import assert_equal_to_twin, close, make_input, make_pair

some_rules = pytest.mark.parametrize("rule", ["", "adam"])


def off_orthogonal(weight):
    """The largest entry of Q^T Q - I."""
    return (weight.mT @ weight - torch.eye(len(weight), dtype=weight.dtype)).abs().max().item()


# The start


@pytest.mark.parametrize(("init", "size"), [("cayley", 1), ("henaff", 2), ("cayley", 7)])
def test_it_starts_as_rotations_of_planes(init, size):
    layer = recurrent.DTRIV(2, size, 2, init=init, bidirectional=True, dtype=torch.float64)
    for suffix in ("_l0", "_l1_reverse"):
        weight = getattr(layer, "weight_hh" + suffix).detach()
        assert off_orthogonal(weight) < 1e-14
        blocks = torch.block_diag(*[torch.ones(2, 2)] * (size // 2), *[torch.ones(1, 1)] * (size % 2))
        assert not weight[blocks == 0].any()
        assert torch.linalg.det(weight).item() == pytest.approx(1.0)


@pytest.mark.parametrize(("init", "furthest"), [("cayley", math.pi / 2), ("henaff", math.pi)])
def test_angles_of_the_start(init, furthest):
    """Eigenvalues exp(±i s), s uniform in [0, π/2] or in [-π, π]."""
    weight = recurrent.DTRIV(2, 400, init=init, dtype=torch.float64).weight_hh_l0.detach()
    angles = torch.linalg.eigvals(weight).angle().abs().sort().values[::2]
    assert angles.max() <= furthest
    assert (torch.arange(1, 201) / 200 - angles / furthest).abs().max() < 0.13  # Kolmogorov and Smirnov: 0.115 at 1 %
    sines = weight.diagonal(-1)[::2]
    assert ((sines > 0).double().mean() - (1.0 if init == "cayley" else 0.5)).abs() < 0.12


# Training


def test_rebasing_keeps_the_function_and_the_parameters():
    layer, _ = make_pair("dtriv", "", 2, 6, 2, bidirectional=True)
    x = make_input(6)
    expected, before = layer(x)[0].detach(), copy.deepcopy(layer.state_dict())
    held = [id(z) for z in (*layer.parameters(), *layer.buffers())]  # which optimizers and DDP hold
    layer.rebase()
    close(layer(x)[0], expected, 1e-12)
    assert [id(z) for z in (*layer.parameters(), *layer.buffers())] == held
    moved = [key for key, value in layer.state_dict().items() if not torch.equal(value, before[key])]
    assert len(moved) == 8  # base and coordinates of four weights


@some_rules
def test_gradient_right_after_rebasing(rule):
    """That of the coordinates is the skew part of B^T dL/dQ at the present Q = B, dL/dQ from the reference.

    The authors' code built Q before it moved the base and so applied the gradient of the old coordinates.
    """
    layer, twin = make_pair("dtriv", rule, hidden=4)
    x = make_input()
    for _ in range(2):
        layer.rebase()
        (coordinates,) = layer.orthogonal_parameters()
        found = torch.autograd.grad(layer(x)[0].square().sum(), coordinates)[0]
        q = layer.weight_hh_l0.detach().clone().requires_grad_()
        output, _ = twin.direction((layer.weight_ih_l0, q, None, None, layer.bias_l0), x, twin.start(3, 4, x))
        along = q.detach().T @ torch.autograd.grad(output.square().sum(), q)[0]
        close(found, (along - along.T).tril(-1), 1e-12)
        with torch.no_grad():
            coordinates -= 0.1 * found  # and again from there


def test_the_weight_is_torchs_own_parametrization():
    """Values and gradients away from zero, and either loads the other's state_dict."""
    ours, weight = recurrent.DTRIV(2, 5, dtype=torch.float64), torch.nn.Linear(5, 5, bias=False, dtype=torch.float64)
    parametrizations.orthogonal(weight, orthogonal_map="matrix_exp")
    with torch.no_grad():
        weight.parametrizations.weight.original.add_(torch.randn(5, 5, dtype=torch.float64))
    mine = ours.parametrizations.weight_hh_l0
    mine.load_state_dict(weight.parametrizations.weight.state_dict())
    close(ours.weight_hh_l0, weight.weight, 1e-14)
    found = torch.autograd.grad(ours.weight_hh_l0.cos().sum(), mine.original)[0]
    close(found, torch.autograd.grad(weight.weight.cos().sum(), weight.parametrizations.weight.original)[0], 1e-13)


def test_rebase_every_counts_steps_and_can_be_removed():
    model = torch.nn.ModuleList([recurrent.DTRIV(2, 4), torch.nn.Linear(4, 1)])
    base, optimizer = model[0].parametrizations.weight_hh_l0[0].base, torch.optim.SGD(model.parameters(), lr=1e-3)

    def moves():
        before = base.clone()
        model[1](model[0](torch.randn(5, 3, 2))[0]).square().mean().backward()
        optimizer.step()
        return not base.equal(before)

    handle = recurrent.rebase_every(optimizer, model, 3)
    assert [moves() for _ in range(7)] == [False, False, True] * 2 + [False]
    handle.remove()
    assert not any(moves() for _ in range(4))
    for wrong, steps, message in ((model, 0, "steps must be "), (model[1], 1, "Linear holds no orthogonal layer")):
        with pytest.raises(ValueError, match=message):
            recurrent.rebase_every(optimizer, wrong, steps)


def test_groups_of_parameters():
    model = torch.nn.ModuleList([recurrent.MomentumDTRIV(2, 4, 2, bidirectional=True), torch.nn.Linear(8, 1)])
    inner = {id(p) for p in model[0].orthogonal_parameters()}
    assert len(inner) == 4
    groups = recurrent.parameter_groups(model, 1e-3, 1e-4)
    found = [(group["lr"], {id(p) for p in group["params"]}) for group in groups]
    assert found == [(1e-3, {id(p) for p in model.parameters()} - inner), (1e-4, inner)]


def test_half_precision():
    """The weight is made in float32: at the start a finite gradient, and no rounding that grows with rebases."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = recurrent.MomentumDTRIVCell(2, 6, dtype=torch.float16)
    for _ in range(3):
        layer(torch.ones(4, 2).half())[0].float().square().sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad.isfinite().all()
            parameter.data -= 0.1 * parameter.grad
        layer.rebase()
    (name,) = layer.parametrizations
    assert getattr(layer, name).dtype == torch.float16
    for again in (layer, layer.float()):
        assert off_orthogonal(again.parametrizations[name][0].base) < 1e-5
    assert layer.double().parametrizations[name][0].base.dtype == torch.float64


# Weights


def test_an_orthogonal_matrix_may_be_assigned():
    layer, twin = make_pair("dtriv", "momentum", hidden=4)
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    layer.weight_hh_l0 = q
    close(layer.weight_hh_l0, q, 1e-14)
    assert_equal_to_twin(layer, twin, make_input())
    layer.weight_hh_l0 = 2 * q
    close(layer.weight_hh_l0, q, 1e-14)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_copy_is_whole(is_removed):
    layer, x = hbnode.nn.DTRIV(2, 4), torch.randn(3, 2)
    layer.rule = rules.Momentum()
    layer.bias_l0.requires_grad_(False)
    if is_removed:
        remove_parametrizations(layer, "weight_hh_l0")
    pickled, optimizer = pickle.loads(pickle.dumps((layer, torch.optim.SGD(layer.parameters(), lr=0.1))))
    for again in (pickled, copy.deepcopy(layer), copy.copy(layer)):
        assert torch.equal(again(x)[0], layer(x)[0])
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in layer.parameters()]
    held = optimizer.param_groups[0]["params"]
    assert all(mine is other for mine, other in zip(pickled.parameters(), held, strict=True))
