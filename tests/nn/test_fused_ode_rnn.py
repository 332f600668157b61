"""ODERNN: the fused form with its own VJP, against the plain form."""

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.nn import ode_rnn as layer
from hbnode.nn._fused_ode_rnn import Run, coefficient_matrix
from hbnode.solve.methods import METHODS

LENGTHS = torch.tensor([6, 4, 1])
CASES = {
    "node": {"field": "node"},
    "anode": {"field": "anode"},
    "sonode": {"field": "sonode"},
    "hbnode": {},
    "ghbnode": {"field": "ghbnode"},
    "hbnode-nystrom8": {"method": "nystrom8", "rtol": 1e-6},
    "hbnode-exponential": {"method": "exponential"},
    "hbnode-tsit5": {"method": "tsit5"},
    "hbnode-leapfrog": {"method": "leapfrog", "steps": 1},
    "ghbnode-leapfrog": {"field": "ghbnode", "method": "leapfrog", "options": {"step_size": 0.3}},
    "hbnode-blanes_moan4": {"method": "blanes_moan4", "steps": 2},
    "node-steps": {"field": "node", "steps": 2},
    "ghbnode-steps": {"field": "ghbnode", "steps": 3},
    "common": {"per_sample": False},
    "ghbnode-common": {"field": "ghbnode", "per_sample": False, "rtol": 1e-5},
    "residual": {"residual": True},
    "rnn-cell": {"cell": "rnn", "missing": "decay", "mask_features": True},
    "own-cell": {"cell": lambda inputs, size: OwnCell(inputs, size), "residual": True},
    "layers": {"num_layers": 2, "field": "ghbnode"},
    "both-directions": {"bidirectional": True, "options": {"step_size": 0.2}},
    "zeros": {"initial_state": "zeros", "field": "node"},
    "constant": {"field": lambda n: hbnode.HBNODE(network(n), damping=0.7, learn_damping=False)},
    "constant-tsit5": {
        "field": lambda n: hbnode.GHBNODE(network(n), damping=0.7, learn_damping=False, xi=0.3, learn_xi=False)
    },
    "elu": {"field": lambda n: hbnode.HBNODE(hbnode.nn.MLP(n, [3, 5], n))},
    "many-layers": {"field": lambda n: hbnode.HBNODE(network(n))},
}


class OwnCell(nn.Module):
    """A cell that is not known."""

    def __init__(self, inputs, size):
        super().__init__()
        self.linear = nn.Linear(inputs + size, size)

    def forward(self, x, s):
        return torch.sin(self.linear(torch.cat([x, s], 1)))


def network(n):
    layers = nn.Linear(n, 3), nn.Sigmoid(), nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, n)
    return nn.Sequential(nn.Sequential(*layers[:2]), *layers[2:])


def make_rnn(**options):
    torch.manual_seed(0)
    rnn = hbnode.ODERNN(3, 4, **{"rtol": 1e-3, "atol": 1e-3, **options})
    with torch.no_grad():
        for p in rnn.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return rnn.double()


def make_series(longest=2.0):
    generator = torch.Generator().manual_seed(1)
    steps = 0.05 + longest * torch.rand(3, 6, generator=generator, dtype=torch.float64) ** 3
    mask = torch.rand(3, 6, 3, generator=generator) < 0.6
    mask[0, 2] = False
    return torch.randn(3, 6, 3, generator=generator, dtype=torch.float64), steps.cumsum(1), mask


def solved(rnn, x, t, mask, lengths=LENGTHS):
    """All that a module makes of a series, its gradients, and what it cost."""
    x = x.clone().requires_grad_()
    output, state = rnn(x, t, mask=mask, lengths=lengths)
    counts = rnn.nfe_per_gap
    values = [output, state.h]
    if not rnn.bidirectional:
        values += rnn.filter(x, t, mask=mask, lengths=lengths).before.h, rnn.forecast(state, [0.0, 0.4, 2.5])[0]
    inputs = [x, *rnn.parameters()]
    weights = [torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value) for value in values]
    total = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
    grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return values, [torch.zeros_like(z) if g is None else g for g, z in zip(grads, inputs, strict=True)], counts


@pytest.fixture
def plainly(monkeypatch):
    """Runs a function with the plain form."""

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "fuse", lambda *args: None)
            return function(*args)

    return run


@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_counts(case, gradient, plainly):
    rnn = make_rnn(**CASES[case], gradient=gradient)
    inputs = make_series()
    with hbnode.count_nfe(rnn) as nfe:
        values, grads, counts = solved(rnn, *inputs)
    twins, expected, counted = plainly(solved, make_rnn(**CASES[case]), *inputs)
    torch.testing.assert_close(values, twins, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-11)
    assert (nfe.backward > 0) == (gradient == "checkpoint")
    assert [nfe.as_dict() for nfe in counts] == [nfe.as_dict() for nfe in counted]


@pytest.mark.parametrize("case", CASES)
def test_known_networks_are_fused(case, monkeypatch):
    found, fuse = [], layer.fuse
    monkeypatch.setattr(layer, "fuse", lambda *args: (found.append(fuse(*args)), found[-1])[1])
    solved(make_rnn(**CASES[case]), *make_series())
    assert found
    assert None not in found


def odd(what):
    """A module in which something is not as its class says, or not known."""
    rnn = make_rnn()
    func = rnn.field.func
    if what == "hook":
        func.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    elif what == "hook of the cell":
        rnn.cell.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif what == "forward":
        func.layers[0].forward = lambda h: h[:, :4].sin()
    elif what == "parametrization":
        nn.utils.parametrizations.weight_norm(func.layers[0])
        with torch.no_grad():
            func.layers[0].parametrizations.weight.original0.mul_(2)
    elif what == "weight that is none":
        weight = func.layers[0].weight
        del func.layers[0].weight
        func.layers[0].weight = 2 * weight
    elif what == "layer":
        func.layers.insert(1, nn.LayerNorm(4).double())
    elif what == "function":
        del rnn.field.func
        rnn.field.func = torch.tanh
    elif what == "field":
        rnn.field.forward = lambda t, state: (state[1], -state[0])
    return rnn


ODD = "hook", "hook of the cell", "forward", "parametrization", "weight that is none", "layer", "function", "field"


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_known_is_called(what, plainly):
    rnn = odd(what)
    values, grads, _ = solved(rnn, *make_series())
    twins, expected, _ = plainly(solved, rnn, *make_series())
    torch.testing.assert_close(values, twins, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(values[0], solved(make_rnn(), *make_series())[0][0])


@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
@pytest.mark.parametrize("case", ["hbnode", "ghbnode", "ghbnode-leapfrog", "rnn-cell"])
def test_second_derivatives_and_second_passes(case, gradient, plainly):
    rnn = make_rnn(**CASES[case], gradient=gradient)
    x, t, mask = make_series()

    def penalty(rnn):
        x_ = x.clone().requires_grad_()
        loss = rnn(x_, t, mask=mask)[0].square().sum()
        (slope,) = torch.autograd.grad(loss, x_, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(rnn.parameters()), allow_unused=True)

    for got, expected in zip(penalty(rnn), plainly(penalty, make_rnn(**CASES[case])), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    loss = rnn(x, t, mask=mask)[0].square().sum()
    first, second = (torch.autograd.grad(loss, rnn.cell.weight_hh, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-13)


def test_transforms_of_torch_func():
    rnn = make_rnn(steps=2)
    x, t, mask = make_series()
    parameters = dict(rnn.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(rnn, parameters, (x, t), {"mask": mask})[0].square().sum()

    by_func = torch.func.grad(loss)(parameters)
    lent = {name: (1.0 * p.detach()).requires_grad_() for name, p in parameters.items()}
    by_call = torch.autograd.grad(loss(lent), list(lent.values()))
    for name, got in zip(parameters, by_call, strict=True):
        torch.testing.assert_close(got, by_func[name], rtol=1e-9, atol=1e-11)


def test_frozen_parts_and_no_gradient():
    rnn = make_rnn()
    x, t, mask = make_series()
    expected = rnn(x, t, mask=mask)[0]
    with torch.no_grad():
        torch.testing.assert_close(rnn(x, t, mask=mask)[0], expected, rtol=0, atol=0)
    rnn.field.requires_grad_(False)
    output = rnn(x, t, mask=mask)[0]
    output.sum().backward()
    assert rnn.field.omega.grad is None
    assert rnn.cell.weight_hh.grad.any()
    rnn.requires_grad_(False)
    assert not rnn(x, t, mask=mask)[0].requires_grad


@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
def test_outputs_may_be_changed_in_place(gradient):
    rnn = make_rnn(gradient=gradient)
    x, t, mask = make_series()
    expected = torch.autograd.grad((2 * rnn(x, t, mask=mask)[0]).sum(), rnn.cell.weight_hh)
    output, _ = rnn(x, t, mask=mask)
    output *= 2
    torch.testing.assert_close(torch.autograd.grad(output.sum(), rnn.cell.weight_hh), expected)


def test_weights_may_not_be_changed_before_the_gradient():
    rnn = make_rnn()
    x, t, mask = make_series()
    output, _ = rnn(x, t, mask=mask)
    with torch.no_grad():
        rnn.field.func.layers[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_many_gradients_at_once():
    rnn = make_rnn()
    x, t, mask = make_series()
    last = rnn(x, t, mask=mask)[0][0, -1]
    (at_once,) = torch.autograd.grad(last, rnn.cell.weight_hh, torch.eye(4).double(), True, is_grads_batched=True)
    for mine, part in zip(at_once, last, strict=True):
        torch.testing.assert_close(mine, torch.autograd.grad(part, rnn.cell.weight_hh, retain_graph=True)[0])


@pytest.mark.parametrize("name", ["nystrom4", "nystrom8", "exponential", "tsit5"])
def test_the_matrix_of_a_vjp_is_that_of_the_method(name):
    method, sizes = METHODS[name], np.array([0.0, 0.3, 2.0])
    expected = torch.from_numpy(method.matrix(np, 0.4, sizes)).permute(1, 2, 0)
    for error in (True, False):
        packed = torch.from_numpy(method.packed(np, 0.4, sizes, error=error))
        got = coefficient_matrix(method, packed, error=error).squeeze(-1)
        torch.testing.assert_close(got, expected[: len(got)], rtol=1e-12, atol=1e-14)


# What a network may be, and what a user does with the outputs


class Wraps(nn.Module):
    """A network that is not known, around one that is."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, h):
        return self.net(h)


def series(batch=5, length=7):
    torch.manual_seed(1)
    return torch.randn(batch, length, 3, dtype=torch.float64), torch.rand(batch, length, dtype=torch.float64).cumsum(1)


def twice_the_same_activation():
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4))


def twice_the_same_layer():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def an_mlp_with_one_activation():
    act = nn.Tanh()
    return hbnode.nn.MLP(4, [4, 4], 4, activation=lambda: act)


@pytest.mark.parametrize("make", [twice_the_same_activation, twice_the_same_layer, an_mlp_with_one_activation])
@pytest.mark.parametrize("kind", [hbnode.NODE, hbnode.HBNODE])
def test_a_module_that_is_in_a_network_twice(kind, make):
    found = []
    for wrap in (lambda net: net, Wraps):
        torch.manual_seed(0)
        rnn = hbnode.ODERNN(3, 4, field=kind(wrap(make()))).double()
        y = rnn(*series())[0]
        found.append([y, *torch.autograd.grad(y.sin().sum(), list(rnn.parameters()))])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["node", "anode", "sonode", "hbnode", "ghbnode"])
@pytest.mark.parametrize("method", ["forward", "evaluate"])
def test_a_field_that_was_changed_is_called(name, method):
    torch.manual_seed(0)
    rnn = hbnode.ODERNN(3, 4, field=name).double()
    x, t = series()
    calls, own = [], getattr(rnn.field, method)

    def changed(*args):
        calls.append(1)
        return own(*args)

    plain = rnn(x, t)[0]
    setattr(rnn.field, method, changed)
    torch.testing.assert_close(rnn(x, t)[0], plain, rtol=1e-2, atol=1e-2)  # perhaps by another method
    assert calls


def test_a_hook_of_a_field_is_called():
    rnn, calls = hbnode.ODERNN(3, 4, field="node").double(), []
    rnn.field.register_forward_hook(lambda *args: calls.append(1))
    rnn(*series())
    assert len(calls) == rnn.nfe.forward


@pytest.mark.parametrize("kind", [nn.Tanh, nn.GRUCell])
def test_a_class_of_torch_whose_call_was_replaced(kind, monkeypatch):
    rnn, calls = hbnode.ODERNN(3, 4, field="hbnode").double(), []
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args: (calls.append(1), own(self, *args))[1])
    rnn(*series())
    assert calls


@pytest.mark.parametrize("solver", [{"options": {"step_size": 0.1}}, {"steps": 2}, {}], ids=str)
def test_one_sample_and_no_gap(solver):
    x, t = series(length=1)
    rnn = hbnode.ODERNN(3, 4, **solver).double()
    output, state = rnn(x, t)
    assert output.shape == (5, 1, 4)
    assert rnn(x, t + 1, state)[0].shape == (5, 1, 4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_for_them(context, monkeypatch):
    rnn, kept, forward = hbnode.ODERNN(3, 4).double(), [], Run.forward

    def watched(*args, keep):
        kept.append(keep)
        return forward(*args, keep=keep)

    monkeypatch.setattr(Run, "forward", watched)
    with context():
        rnn(*series())
    assert kept == [False]


def test_outputs_and_states_have_storage_of_their_own():
    rnn = hbnode.ODERNN(3, 4).double()
    x, t = series()
    with torch.no_grad():
        output, state = rnn(x, t)
        path = rnn.forecast(state, torch.rand(5, 9, dtype=torch.float64).cumsum(1))[0]
    assert output.is_contiguous()
    assert path.is_contiguous()
    assert state.h.untyped_storage().nbytes() <= 8 * 2 * 5 * 4
    assert output.view(5, -1).shape == (5, 28)


def test_a_cell_that_changes_the_state_that_it_is_given():
    class InPlace(nn.Module):
        def __init__(self, size, state):
            super().__init__()
            self.linear = nn.Linear(size, state)

        def forward(self, x, h):
            h.mul_(0.5)
            return h + self.linear(x)

    rnn = hbnode.ODERNN(3, 4, cell=InPlace).double()
    x, t = series(batch=1)
    with torch.no_grad():
        rnn.start.fill_(1.0)
        rnn(x, t)
    assert (rnn.start == 1).all()


@pytest.mark.parametrize("known", [True, False])
def test_second_derivatives_where_a_sample_rests(known):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    rnn = hbnode.ODERNN(3, 4, field=hbnode.HBNODE(net if known else Wraps(net)), method="nystrom4").double()
    x, t = series(batch=2, length=4)
    parameters = list(rnn.parameters())
    y = rnn(x, t, lengths=torch.tensor([4, 2]))[0]
    first = torch.autograd.grad(y.square().sum(), parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    assert all(torch.isfinite(g).all() for g in second)
