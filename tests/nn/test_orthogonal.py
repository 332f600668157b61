"""DTRIV's orthogonal weight: how it starts, how it stays, and moving its basis."""

import copy
import math
import pickle

import pytest
import torch
from hbnode.nn.orthogonal import Trivialization
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import hbnode
from hbnode.nn import recurrent, rules
from tests.momentum_layers import RULES, close, gradients, kind, make_input, make_pair, make_state

some_rules = pytest.mark.parametrize("rule", ["", "restart", "adam"])  # none, linear, not linear


def make(rule, *sizes, **options):
    """A DTRIV with a rule, "" is none."""
    return kind("dtriv", rule)(*sizes, **({"rule": rule} if rule else {}), **options)


def off_orthogonal(weight):
    """The largest entry of Q^T Q - I."""
    return (weight.mT @ weight - torch.eye(len(weight), dtype=weight.dtype)).abs().max().item()


def train(layer, steps, rate=0.1, between=None):
    """Some steps of plain gradient descent on random targets."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    handle = between(optimizer) if between else None
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(5, 4, n, generator=generator, dtype=layer.bias_l0.dtype) for n in (2, layer.hidden_size))
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x)[0] - y).square().mean().backward()
        optimizer.step()
    return handle


# The start


@pytest.mark.parametrize(("rule", "init", "size"), [("", "cayley", 1), ("adam", "henaff", 2), ("restart", "cayley", 7)])
def test_it_starts_as_rotations_of_planes(rule, init, size):
    layer = make(rule, 2, size, 2, init=init, bidirectional=True, dtype=torch.float64)
    for end in ("_l0", "_l1_reverse"):
        weight = getattr(layer, "weight_hh" + end).detach()
        assert off_orthogonal(weight) < 1e-14
        blocks = torch.zeros(size, size, dtype=torch.bool)
        for k in range(0, size, 2):
            blocks[k : k + 2, k : k + 2] = True
        assert not weight[~blocks].any()
        assert torch.linalg.det(weight).item() == pytest.approx(1.0)


@pytest.mark.parametrize(("init", "furthest"), [("cayley", math.pi / 2), ("henaff", math.pi)])
def test_angles_of_the_start(init, furthest):
    """Eigenvalues exp(±i s), s uniform in [0, π/2] or in [-π, π]."""
    weight = recurrent.DTRIV(2, 1000, init=init, dtype=torch.float64).weight_hh_l0.detach()
    values = torch.linalg.eigvals(weight)
    torch.testing.assert_close(values.abs(), torch.ones(1000, dtype=torch.float64))
    angles = values.angle().abs().sort().values[::2]
    assert angles.max() <= furthest
    share = torch.arange(1, 501) / 500
    assert (share - angles / furthest).abs().max() < 0.1  # Kolmogorov and Smirnov: 0.073 at 1 %
    sines = weight.diagonal(-1)[::2]
    assert ((sines > 0).double().mean() - (1.0 if init == "cayley" else 0.5)).abs() < 0.08


@some_rules
def test_the_other_parameters_start_as_the_authors(rule):
    layer = make(rule, 200, 300)
    assert layer.weight_ih_l0.shape == (300, 200)
    assert layer.weight_ih_l0.std().item() == pytest.approx(math.sqrt(2 / 200), rel=0.03)
    assert layer.bias_l0.shape == (300,)
    assert 0.009 < layer.bias_l0.abs().max() <= 0.01
    names = {name for name, _ in layer.named_parameters()}
    assert {"weight_ih_l0", "bias_l0"} < names
    assert len(names) == 3


# Training


@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("rule", ["", "momentum", "adam"])
def test_it_stays_orthogonal(rule, every):
    layer = make(rule, 2, 12, dtype=torch.float64)
    start = layer.weight_hh_l0.detach().clone()
    train(layer, 40, 1.0, (lambda optimizer: recurrent.rebase_every(optimizer, layer, every)) if every else None)
    assert off_orthogonal(layer.weight_hh_l0.detach()) < 1e-12
    assert (layer.weight_hh_l0 - start).abs().max() > 1e-3


def test_it_stays_orthogonal_in_float32():
    layer = recurrent.DTRIV(2, 30)
    train(layer, 100, 1.0, lambda optimizer: recurrent.rebase_every(optimizer, layer, 1))
    assert off_orthogonal(layer.weight_hh_l0.detach()) < 2e-5


@some_rules
def test_rebasing_does_not_change_the_function(rule):
    layer = make(rule, 2, 6, 2, bidirectional=True, dtype=torch.float64)
    x = make_input(6)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    expected = layer(x)[0].detach()
    before = copy.deepcopy(layer.state_dict())
    layer.rebase()
    close(layer(x)[0], expected, 1e-12)
    moved = [key for key, value in layer.state_dict().items() if not torch.equal(value, before[key])]
    assert len(moved) == 8  # base and coordinates of four weights
    assert all("weight_hh" in key for key in moved)


@some_rules
def test_rebasing_keeps_the_parameters_that_an_optimizer_holds(rule):
    layer = make(rule, 2, 6, dtype=torch.float64)
    before = {key: id(parameter) for key, parameter in layer.named_parameters()}
    train(layer, 3, 0.5)
    layer.rebase()
    assert {key: id(parameter) for key, parameter in layer.named_parameters()} == before
    weight = layer.weight_hh_l0.detach().clone()
    train(layer, 1, 0.5)
    assert (layer.weight_hh_l0 - weight).abs().max() > 1e-6


@some_rules
def test_gradient_right_after_rebasing(rule):
    """That of the coordinates is the skew part of B^T dL/dQ at the present Q = B, dL/dQ from the plain twin.

    The authors' code built Q before it moved the basis and so applied the gradient of the old coordinates.
    """
    layer, twin = make_pair("dtriv", rule, hidden=4)
    x = make_input()
    for _ in range(2):
        layer.rebase()
        (coordinates,) = (p for key, p in layer.named_parameters() if key.startswith("parametrizations"))
        found = torch.autograd.grad(layer(x)[0].square().sum(), coordinates)[0]
        q = layer.weight_hh_l0.detach().clone().requires_grad_()
        weights = (layer.weight_ih_l0, q, None, None, layer.bias_l0)
        output, _ = twin.direction(weights, x, twin.start(3, 4, x))
        along = q.detach().T @ torch.autograd.grad(output.square().sum(), q)[0]
        close(found, (along - along.T).tril(-1), 1e-12)
        with torch.no_grad():
            coordinates -= 0.1 * found  # and again from there


@some_rules
def test_gradient_away_from_the_basis(rule):
    """Between two rebases: that of B exp(A), A = tril(X) - tril(X)^T, by differences."""
    layer, _ = make_pair("dtriv", rule, hidden=4)
    x = make_input()
    (coordinates,) = (p for key, p in layer.named_parameters() if key.startswith("parametrizations"))
    found = torch.autograd.grad(layer(x)[0].square().sum(), coordinates)[0]
    direction = torch.randn_like(coordinates).tril(-1)
    values = []
    with torch.no_grad():
        for sign in (1, -2, 1):  # to +eps, to -eps, and back
            coordinates += sign * 1e-5 * direction
            values.append(layer(x)[0].square().sum().item())
    slope = (values[0] - values[1]) / 2e-5
    assert (found * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_rebase_every_counts_steps_and_can_be_removed(monkeypatch):
    layer = recurrent.MomentumDTRIV(2, 4)
    calls = []
    monkeypatch.setattr(layer, "rebase", lambda: calls.append(1))
    handle = train(layer, 7, between=lambda optimizer: recurrent.rebase_every(optimizer, layer, 3))
    assert len(calls) == 2
    handle.remove()
    train(layer, 7)
    assert len(calls) == 2


def test_rebase_every_finds_the_layers_of_a_model():
    model = torch.nn.ModuleList([recurrent.DTRIV(2, 4), torch.nn.Linear(4, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recurrent.rebase_every(optimizer, model, 1)
    model[1](model[0](torch.randn(5, 3, 2))[0]).square().sum().backward()
    optimizer.step()
    weight = model[0].weight_hh_l0.detach()
    (base,) = (value for key, value in model[0].named_buffers() if key.endswith("base"))
    assert torch.equal(base, weight)  # exp(0) = I
    with pytest.raises((TypeError, ValueError), match=r"must be .*got.*Fix: "):
        recurrent.rebase_every(optimizer, model, 0)


def test_groups_of_parameters():
    model = torch.nn.ModuleList([make("adam", 2, 4, 2, bidirectional=True), torch.nn.Linear(8, 1)])
    groups = recurrent.parameter_groups(model, 1e-3, 1e-4)
    assert [group["lr"] for group in groups] == [1e-3, 1e-4]
    found = [{id(p) for p in group["params"]} for group in groups]
    names = dict(model.named_parameters())
    assert found[1] == {id(p) for name, p in names.items() if "parametrizations" in name}
    assert len(found[1]) == 4
    assert found[0] | found[1] == {id(p) for p in names.values()}
    torch.optim.RMSprop(groups)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "suffix"), [("", ""), ("momentum", "Cell")])
def test_half_precision(rule, suffix, dtype):
    """The weight is made in float32: at the start a finite gradient, and no rounding that grows with rebases."""
    layer = kind("dtriv", rule, suffix)(2, 6, dtype=dtype)
    for _ in range(3):
        layer(torch.ones(4, 2, dtype=dtype))[0].float().square().sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad.isfinite().all()
            parameter.data -= 0.1 * parameter.grad
        layer.rebase()
    (parametrization,) = (m for m in layer.modules() if isinstance(m, Trivialization))
    assert off_orthogonal(parametrization.base) < 1e-5
    (name,) = layer.parametrizations
    assert getattr(layer, name).dtype == dtype
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(getattr(again, name), getattr(layer, name))
    assert off_orthogonal(layer.float().parametrizations[name][0].base) < 1e-5


def test_the_weight_is_torchs_own_parametrization():
    """Values and gradients away from zero, and either loads the other's state_dict."""
    ours, weight = recurrent.DTRIV(2, 5, dtype=torch.float64), torch.nn.Linear(5, 5, bias=False, dtype=torch.float64)
    torch.nn.utils.parametrizations.orthogonal(weight, orthogonal_map="matrix_exp")
    with torch.no_grad():
        weight.parametrizations.weight.original.add_(torch.randn(5, 5, dtype=torch.float64))
    mine = ours.parametrizations.weight_hh_l0
    mine.load_state_dict(weight.parametrizations.weight.state_dict())
    close(ours.weight_hh_l0, weight.weight, 1e-14)
    found = torch.autograd.grad(ours.weight_hh_l0.cos().sum(), mine.original)[0]
    close(found, torch.autograd.grad(weight.weight.cos().sum(), weight.parametrizations.weight.original)[0], 1e-13)


def test_construction_under_autocast_and_on_the_meta_device():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = recurrent.MomentumDTRIV(2, 5)
    assert off_orthogonal(layer.weight_hh_l0.detach()) < 1e-5
    with torch.device("meta"):
        layer = recurrent.DTRIV(2, 5, 2)
    copied = copy.deepcopy(layer)
    assert copied.weight_hh_l1.is_meta
    assert recurrent.DTRIVCell(2, 5, device="meta").weight_hh.is_meta
    copied.to_empty(device="cpu").reset_parameters()
    assert off_orthogonal(copied.weight_hh_l1.detach()) < 1e-5


def test_rebasing_under_distributed_data_parallel(tmp_path):
    """DDP holds the tensors that it reduces, and a base is one of the buffers that it sends."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = recurrent.DTRIV(2, 4)
        held = {id(z) for z in (*layer.parameters(), *layer.buffers())}
        model = DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recurrent.rebase_every(optimizer, layer, 1)
        for _ in range(3):
            model(torch.randn(5, 2, 2))[0].square().sum().backward()
            optimizer.step()
        del model  # freed after its process group, it waits for gloo's thread, which waits for the interpreter's lock
    finally:
        distributed.destroy_process_group()
    assert {id(z) for z in (*layer.parameters(), *layer.buffers())} == held
    assert off_orthogonal(layer.weight_hh_l0.detach()) < 1e-5


# Weights


def test_an_orthogonal_matrix_may_be_assigned():
    layer, twin = make_pair("dtriv", "momentum", hidden=4)
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    layer.weight_hh_l0 = q
    close(layer.weight_hh_l0, q, 1e-14)
    x = make_input()
    close(layer(x)[0], twin(layer, x)[0], 1e-12)
    layer.weight_hh_l0 = torch.zeros(4, 4, dtype=torch.float64)  # no sign of R is 0
    assert off_orthogonal(layer.weight_hh_l0) < 1e-14


@some_rules
def test_a_state_dict_takes_the_basis_along(rule):
    layer, _ = make_pair("dtriv", rule, layers=2)
    layer.rebase()
    other, _ = make_pair("dtriv", rule, layers=2)
    other.load_state_dict(layer.state_dict())
    x = make_input()
    assert torch.equal(other(x)[0], layer(x)[0])


@pytest.mark.parametrize("threshold", [-0.3, 0.3])
def test_modrelu(threshold):
    """sign(z) relu(|z| + b): with b < 0 a dead zone, with b > 0 a jump at 0."""
    layer = recurrent.DTRIV(1, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.tensor([[1.0], [-2.0]]))
        layer.bias_l0.fill_(threshold)
    z = torch.tensor([0.1, 0.5, -0.2, -4.0], dtype=torch.float64)
    output, _ = layer(z.view(1, 4, 1))
    for row, value in zip(output[0], z.tolist(), strict=True):
        for h, drive in zip(row.tolist(), (value, -2 * value), strict=True):
            assert h == pytest.approx(math.copysign(max(abs(drive) + threshold, 0.0), drive), abs=1e-14)


def test_silent_inputs():
    """z = 0 exactly: sign(0) = 0, and the gradients are finite."""
    for rule in ("", *RULES):
        layer, twin = make_pair("dtriv", rule)
        x = torch.zeros(4, 2, 2, dtype=torch.float64, requires_grad=True)
        output, state = layer(x)
        assert not output.any()
        assert not twin(layer, x)[0].any()
        for g in gradients(output, {}, [x, *layer.parameters()]):
            assert g.isfinite().all()
        assert state.c is None


def test_a_state_starts_it():
    layer, twin = make_pair("dtriv", "momentum")
    x = make_input()
    state, entries = make_state(layer, x)
    close(layer(x, state)[0], twin(layer, x, entries)[0], 1e-12)


def test_pickling_keeps_what_is_frozen_and_the_mode_and_draws_nothing():
    layer = hbnode.nn.MomentumDTRIV(2, 4, momentum=0.3).eval()
    layer.bias_l0.requires_grad_(False)
    before = torch.get_rng_state()
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(torch.get_rng_state(), before)
    assert not again.training
    assert not again.bias_l0.requires_grad
    assert again.weight_ih_l0.requires_grad
    assert again.rule == layer.rule


class WithHead(hbnode.nn.MomentumDTRIV):
    def __init__(self):
        super().__init__(2, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x, state=None, *, hx=None):
        output, state = super().forward(x, state, hx=hx)
        return self.head(output), state


@pytest.mark.parametrize("what", ["subclass", "spectral norm", "removed", "changed"])
@pytest.mark.parametrize("copied", ["pickled", "deep", "shallow"])
def test_a_copy_is_whole(what, copied):
    layer = (
        WithHead() if what == "subclass" else hbnode.nn.DTRIVCell(2, 4) if what == "removed" else hbnode.nn.DTRIV(2, 4)
    )
    x = torch.randn(3, 2)
    if what == "spectral norm":
        torch.nn.utils.parametrizations.spectral_norm(layer, "weight_ih_l0").eval()
    if what == "removed":
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight_hh")
    if what == "changed":
        layer.rule, layer.note = rules.Momentum(), "mine"
    expected, _ = layer(x)
    copiers = {"pickled": lambda z: pickle.loads(pickle.dumps(z)), "deep": copy.deepcopy, "shallow": copy.copy}
    again = copiers[copied](layer)
    assert torch.equal(again(x)[0], expected)
    assert vars(again).get("note") == vars(layer).get("note")
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in layer.named_parameters()]
    of_both = zip(again.parameters(), layer.parameters(), strict=True)
    assert all((mine is other) == (copied == "shallow") for mine, other in of_both)


def test_pickling_keeps_who_holds_a_parameter():
    """As of every module: an optimizer beside it, a tied weight, the device that it was moved to."""
    layer = hbnode.nn.DTRIV(2, 4, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer, optimizer = pickle.loads(pickle.dumps((layer, optimizer)))
    held = optimizer.param_groups[0]["params"]
    assert all(mine is other for mine, other in zip(layer.parameters(), held, strict=True))
    assert layer(torch.randn(3, 2))[0].device.type == "cpu"


def test_a_parametrization_that_was_removed():
    layer = hbnode.nn.DTRIV(2, 4)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight_hh_l0")
    layer.rebase()
    assert recurrent.parameter_groups(layer, 1e-3, 1e-4)[1]["params"] == []
    layer.reset_parameters()
    assert off_orthogonal(layer.weight_hh_l0) < 1e-5


def test_parametrized_inputs_are_drawn_anew():
    layer = hbnode.nn.DTRIV(2, 4)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_ih_l0")
    before = layer.weight_ih_l0.detach()
    layer.reset_parameters()
    assert (layer.weight_ih_l0 != before).all()


def test_other_parametrizations_and_a_second_bias():
    layer = hbnode.nn.DTRIV(2, 4)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_ih_l0")
    inner = recurrent.parameter_groups(layer, 1e-3, 1e-4)[1]["params"]
    assert len(inner) == 1
    assert inner[0].shape == (4, 4)
    layer.rebase()
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        hbnode.nn.DTRIV(2, 4, bias=False)
