"""The fused form of an ODERNN: against the reference, and whatever users do to a module around its passes."""

import functools
import threading
from operator import imul

import pytest
import torch
from torch import nn

import hbnode
from hbnode.nn import ode_rnn
from hbnode.nn._fused_ode_rnn import Run

LENGTHS = torch.tensor([6, 4, 1])
CONSTANT = {"damping": 0.7, "learn_damping": False, "xi": 0.3, "learn_xi": False}
CASES = {
    **{name: {"field": name} for name in ("node", "anode", "sonode", "ghbnode")},
    "hbnode": {},
    "hbnode-nystrom8": {"method": "nystrom8", "rtol": 1e-6},
    "ghbnode-leapfrog": {"field": "ghbnode", "method": "leapfrog", "options": {"step_size": 0.3}},
    "ghbnode-steps": {"field": "ghbnode", "steps": 3},
    "ghbnode-common": {"field": "ghbnode", "per_sample": False, "rtol": 1e-5},
    "rnn-cell": {"cell": "rnn", "missing": "decay", "mask_features": True},
    "own-cell": {"cell": lambda inputs, size: OwnCell(inputs, size), "residual": True},
    "layers": {"num_layers": 2, "field": "ghbnode"},
    "both-directions": {"bidirectional": True, "options": {"step_size": 0.2}},
    "constant-tsit5": {"field": lambda n: hbnode.GHBNODE(network(n), **CONSTANT)},
    "elu": {"field": lambda n: hbnode.HBNODE(hbnode.nn.MLP(n, [3, 5], n))},
    "one-layer-twice": {"field": lambda n: hbnode.HBNODE(one_layer_twice(n))},
}
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
every_gradient = pytest.mark.parametrize("gradient", ["direct", "checkpoint"])


class OwnCell(nn.Module):
    """A cell that is not known, and changes the state that it is given."""

    def __init__(self, inputs, size):
        super().__init__()
        self.linear = nn.Linear(inputs + size, size)

    def forward(self, x, s):
        return torch.sin(self.linear(torch.cat([x, s.mul_(0.5)], 1)))


def network(n):
    layers = nn.Linear(n, 3), nn.Sigmoid(), nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, n)
    return nn.Sequential(nn.Sequential(*layers[:2]), *layers[2:])


def one_layer_twice(n):
    layer = nn.Linear(n, n)
    return nn.Sequential(layer, nn.Tanh(), layer)


def make_rnn(**options):
    torch.manual_seed(0)
    rnn = hbnode.ODERNN(3, 4, **{"rtol": 1e-3, "atol": 1e-3, **options})
    with torch.no_grad():
        for p in rnn.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return rnn.double()


def make_series():
    generator = torch.Generator().manual_seed(1)
    steps = 0.05 + 2.0 * torch.rand(3, 6, generator=generator, dtype=torch.float64) ** 3
    steps[0, 1] = steps[:, 3] = 0.0  # equal times in one series, and in all
    mask = torch.rand(3, 6, 3, generator=generator) < 0.6
    mask[0, 2] = False
    return torch.randn(3, 6, 3, generator=generator, dtype=torch.float64), steps.cumsum(1), mask


def solved(rnn):
    """All outputs for a series, their gradients, and the evaluations."""
    x, t, mask = make_series()
    x.requires_grad_()
    output, state = rnn(x, t, mask=mask, lengths=LENGTHS)
    counts = [nfe.as_dict() for nfe in rnn.nfe_per_gap]
    values = [output, state.h]
    if not rnn.bidirectional:
        values += rnn.filter(x, t, mask=mask, lengths=LENGTHS).before.h, rnn.forecast(state, [0.0, 0.4, 2.5])[0]
    total = sum((value * torch.linspace(0.5, 1.5, value.numel()).view_as(value)).sum() for value in values)
    return values, torch.autograd.grad(total, [x, *rnn.parameters()], materialize_grads=True), counts


def trained(rnn, call=None):
    """The output and the gradients of all parameters after a backward pass."""
    rnn.zero_grad()
    y = (rnn if call is None else call)(*make_series()[:2])[0]
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in rnn.parameters() if p.grad is not None)]


@pytest.fixture
def reference(monkeypatch):
    """Runs a function with the reference."""

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(ode_rnn, "fuse", lambda *args: None)
            return function(*args)

    return run


@pytest.mark.sparse
@every_gradient
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_counts(case, gradient, reference, monkeypatch):
    values, grads, counts = reference(solved, make_rnn(**CASES[case]))
    found, fuse = [], ode_rnn.fuse
    monkeypatch.setattr(ode_rnn, "fuse", lambda *args: (found.append(fuse(*args)), found[-1])[1])
    rnn = make_rnn(**CASES[case], gradient=gradient)
    with hbnode.count_nfe(rnn) as nfe:
        got = solved(rnn)
    assert found
    assert None not in found
    close(got[:2], (values, grads))
    assert got[2] == counts
    assert (nfe.backward > 0) == (gradient == "checkpoint")


@pytest.mark.parametrize("options", [{}, {"field": "ghbnode", "per_sample": False}], ids=str)
def test_more_gaps_than_have_their_coefficients_computed_at_once(options, reference, monkeypatch):
    monkeypatch.setattr("hbnode.nn._fused_ode_rnn.SIZES_AT_ONCE", 7)
    monkeypatch.setattr("hbnode.nn._fused_ode_rnn.NUMPY_SIZES", 4)
    got, expected = solved(make_rnn(**options)), reference(solved, make_rnn(**options))
    close(got[:2], expected[:2])


def without_parameter(linear):
    weight = linear.weight
    del linear.weight
    linear.weight = 2 * weight


CHANGES = {  # of a module: something does not do what its class says, or is not known
    "hook": lambda rnn: rnn.field.func.layers[0].register_forward_hook(lambda module, args, output: 2 * output),
    "hook of the cell": lambda rnn: rnn.cell.register_forward_hook(lambda module, args, output: 2 * output),
    "forward": lambda rnn: setattr(rnn.field.func.layers[0], "forward", lambda h: h[:, :4].sin()),
    "weight that is no parameter": lambda rnn: without_parameter(rnn.field.func.layers[0]),
    "field": lambda rnn: setattr(rnn.field, "forward", lambda t, state: (state[1], -state[0])),
    "evaluation": lambda rnn: setattr(rnn.field, "evaluate", lambda t, h: -h),
    "damping of each channel": lambda rnn: setattr(rnn.field, "omega", nn.Parameter(torch.ones(4).double())),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_not_known_is_called(what, reference):
    known, rnn = make_rnn(), make_rnn()
    CHANGES[what](rnn)
    found = solved(rnn)
    close(found[:2], reference(solved, rnn)[:2])
    assert not torch.allclose(found[0][0], solved(known)[0][0])


@pytest.mark.sparse
@every_gradient
@pytest.mark.parametrize("case", ["hbnode", "ghbnode-leapfrog", "rnn-cell"])
def test_second_derivatives(case, gradient, reference):
    x, t, mask = make_series()

    def penalty(rnn):
        x_ = x.clone().requires_grad_()
        loss = rnn(x_, t, mask=mask, lengths=LENGTHS)[0].square().sum()
        (slope,) = torch.autograd.grad(loss, x_, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(rnn.parameters()), allow_unused=True)

    expected = reference(penalty, make_rnn(**CASES[case]))
    close(penalty(make_rnn(**CASES[case], gradient=gradient)), expected)


def test_gradients_of_many_outputs_at_once():
    rnn, (x, t, _) = make_rnn(steps=2), make_series()
    last = rnn(x, t)[0][0, -1]
    (at_once,) = torch.autograd.grad(last, rnn.cell.weight_hh, torch.eye(4).double(), True, is_grads_batched=True)
    for own, part in zip(at_once, last, strict=True):
        close(own, torch.autograd.grad(part, rnn.cell.weight_hh, retain_graph=True)[0])


def test_frozen_parts_and_no_gradient(monkeypatch):
    rnn, (x, t, mask), runs, init = make_rnn(), make_series(), [], Run.__init__
    monkeypatch.setattr(Run, "__init__", lambda run, *args, **kwargs: (runs.append(run), init(run, *args, **kwargs))[1])
    expected = rnn(x, t, mask=mask)[0]
    assert runs[0].records
    expected.sum().backward()
    assert not runs[0].records  # what the backward pass needs is stored for it alone
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            close(rnn(x, t, mask=mask)[0], expected, rtol=0, atol=0)
    assert not any(step.stages for run in runs[1:] for gap, _ in run.records for step in gap.steps)
    rnn.zero_grad()
    rnn.field.requires_grad_(False)
    rnn(x, t, mask=mask)[0].sum().backward()
    assert rnn.field.omega.grad is None
    assert rnn.cell.weight_hh.grad.any()


@every_gradient
def test_outputs_may_be_changed_in_place_and_weights_may_not(gradient):
    rnn, (x, t, _) = make_rnn(gradient=gradient), make_series()
    slopes = (torch.autograd.grad(change(rnn(x, t)[0], 2).sum(), rnn.cell.weight_hh) for change in (torch.mul, imul))
    close(*slopes)
    for parameter in (rnn.field.func.layers[0].weight, rnn.field.func.layers[2].bias, rnn.cell.weight_hh):
        output, _ = rnn(x, t)
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@every_gradient
def test_data_replaced_before_the_backward_pass_does_not_enter_it(gradient):
    expected = trained(make_rnn(gradient=gradient))
    for name in dict(make_rnn().named_parameters()):
        rnn = make_rnn(gradient=gradient)
        y = rnn(*make_series()[:2])[0]
        parameter = rnn.get_parameter(name)
        parameter.data = parameter.data + 1.0
        y.square().sum().backward()
        close([y, *(p.grad for p in rnn.parameters() if p.grad is not None)], expected)


def test_a_second_pass_over_a_retained_graph_evaluates_nothing():
    rnn, (x, t, _) = make_rnn(), make_series()
    loss = rnn(x, t)[0].square().sum()
    parameters = [rnn.cell.weight_hh, *rnn.field.parameters()]
    with hbnode.count_nfe(rnn) as nfe:
        close(*(torch.autograd.grad(loss, parameters, retain_graph=is_first) for is_first in (True, False)))
    assert nfe.backward == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_threads():
    rnn, found = make_rnn(), []
    expected, parameters = trained(rnn), [p for p in rnn.parameters() if p.grad is not None]

    def work():
        y = rnn(*make_series()[:2])[0]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), parameters)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for call in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            call(thread)
    close(found, 4 * [expected])


@every_gradient
def test_a_backward_pass_inside_autocast_is_as_precise_as_its_forward_pass(gradient):
    rnn, (x, t, _) = make_rnn(gradient=gradient).float(), make_series()
    slopes = []
    for enabled in (False, True):
        loss = rnn(x.float(), t)[0].square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            slopes.append(torch.autograd.grad(loss, [rnn.cell.weight_hh, rnn.field.func.layers[0].weight]))
    close(*slopes, rtol=0, atol=0)


@pytest.mark.parametrize("solver", [{"options": {"step_size": 0.1}}, {"steps": 2}, {}], ids=str)
def test_shapes_and_storage(solver):
    rnn, (x, t, _) = make_rnn(**solver), make_series()
    with torch.no_grad():
        output, state = rnn(x, t)
        path = rnn.forecast(state, torch.rand(3, 9, dtype=torch.float64).cumsum(1))[0]
    assert output.is_contiguous()
    assert path.is_contiguous()
    assert state.h.untyped_storage().nbytes() <= 8 * 2 * 3 * 4
    output, state = rnn(x[:, :1], t[:, :1])  # without a gap
    assert output.shape == rnn(x[:, :1], t[:, :1] + 1, state)[0].shape == (3, 1, 4)


@every_gradient
def test_hooks_of_parameters_are_called_once(gradient):
    rnn, calls = make_rnn(gradient=gradient), []
    expected = trained(rnn)
    for p in rnn.parameters():
        p.register_hook(lambda g: calls.append("before"))
        p.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    close(trained(rnn), expected)
    assert calls.count("before") == calls.count("after") == len(expected) - 1
