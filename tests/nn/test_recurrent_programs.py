"""Copies, parametrizations, devices, compilation and export of the momentum recurrent layers."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import hbnode
from hbnode.nn import rules
from hbnode.nn.recurrent import layers
from tests.momentum_layers import (
    PAIRS,
    RULES,
    STOCK,
    close,
    every_layer,
    gradients,
    kind,
    make_input,
    make_pair,
    make_state,
    present,
    some_layers,
    two_rules,
)

# Copies, parametrizations, devices


@some_layers
def test_copies(cell, rule, tmp_path):
    layer, _ = make_pair(cell, rule, layers=2)
    x = make_input()
    expected, _ = layer(x)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], expected)
    assert torch.equal(copy.deepcopy(layer)(x)[0], expected)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other, _ = make_pair(cell, rule, layers=2)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(x)[0], expected)
    assert type(layer).__name__.removeprefix("Parametrized") in repr(layer)
    assert "2, 3" in repr(layer)
    assert "num_layers=2" in repr(layer)


def test_what_is_printed():
    rule = "rule=Momentum(momentum=0.6, step_size=0.6)"
    assert repr(hbnode.nn.MomentumRNN(3, 4, nonlinearity="relu")) == f"MomentumRNN(3, 4, {rule}, nonlinearity='relu')"
    assert repr(hbnode.nn.MomentumLSTMCell(3, 4, forget_bias=2.0)) == f"MomentumLSTMCell(3, 4, {rule}, forget_bias=2.0)"
    assert f"{rule}, init='henaff'" in repr(hbnode.nn.MomentumDTRIVCell(3, 4, init="henaff"))


@pytest.mark.parametrize(("cell", "rule"), PAIRS[2:])
@pytest.mark.parametrize("is_large", [False, True])
def test_transforms_of_torch_func(cell, rule, is_large, monkeypatch):
    if is_large:  # the scan, and the filter with a backward pass of its own
        monkeypatch.setattr(layers, "SMALL_PRODUCT", 0)
        monkeypatch.setattr(rules, "MANY", 0)
    layer, _ = make_pair(cell, rule)
    x = make_input(20)
    x.requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def loss(values, x):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0].square().sum()

    expected = torch.autograd.grad(loss(values, x), values)
    for mine, theirs in zip(torch.func.grad(loss)(values, x), expected, strict=True):
        close(mine, theirs, 1e-12)
    if cell != "lstm":  # of which oneDNN's has no forward mode
        (slope,), along = torch.autograd.grad(loss(values, x), [x]), torch.randn_like(x)
        _, moved = torch.func.jvp(lambda x: loss(values, x), (x.detach(),), (along,))
        close(moved, (slope * along).sum(), 1e-12)
    if cell == "dtriv":  # torch's own layers have no rule for vmap
        many = torch.stack([x, 2 * x]).detach()
        one_by_one = torch.stack([layer(each)[0] for each in many])
        close(torch.func.vmap(lambda x: layer(x)[0])(many), one_by_one, 1e-12)


@two_rules
def test_a_weight_may_be_parametrized(rule):
    """Weight drop: what reads the weight reads it by its attribute, at each call."""

    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    layer, _ = make_pair("lstm", rule)
    other = copy.deepcopy(layer)
    nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", Half())
    nn.utils.parametrize.register_parametrization(layer, "weight_ih_l0", Half())
    with torch.no_grad():
        other.weight_hh_l0.div_(2)
        other.weight_ih_l0.div_(2)
    x = make_input()
    close(layer(x)[0], other(x)[0], 1e-14)


@pytest.mark.parametrize(
    ("cell", "rule", "suffix"), [("lstm", "momentum", ""), ("gru", "adam", ""), ("lstm", "restart", "Cell")]
)
def test_weight_norm_of_rows_of_zeros_is_refused(cell, rule, suffix):
    layer = kind(cell, suffix=suffix)(2, 3, rule=rule)
    weight = "weight_hh" if suffix else "weight_hh_l0"
    x = torch.randn(5, 2)
    bad = nn.utils.parametrizations.weight_norm(copy.deepcopy(layer), weight)
    with pytest.raises(ValueError, match=rf"weight_norm makes NaN of {weight}.*Fix: torch.nn.init.orthogonal_"):
        bad(x)
    nn.init.orthogonal_(getattr(layer, weight))
    nn.utils.parametrizations.weight_norm(layer, weight)
    assert layer(x)[0].isfinite().all()


def test_initial_weights_are_drawn_anew_under_a_parametrization():
    layer = hbnode.nn.MomentumLSTM(2, 3)
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    layer.reset_parameters()
    torch.testing.assert_close(layer.weight_hh_l0[:3], torch.eye(3))
    assert torch.equal(layer.bias_hh_l0[3:6], torch.ones(3))


def test_shapes_on_the_meta_device():
    for cell, rule in (("lstm", "momentum"), ("gru", "adam"), ("dtriv", "restart")):
        layer = kind(cell)(2, 3, 2, rule=rule, device="meta")
        output, state = layer(torch.empty(40, 5, 2, device="meta"))
        assert output.shape == (40, 5, 3)
        assert layer(torch.empty(40, 5, 2, device="meta"), state)[0].is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_layer
def test_on_cuda(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2)
    x = make_input(30)
    state, entries = make_state(layer, x)
    expected, last = layer(x, state)
    leaves = [*layer.parameters()]
    wanted = gradients(expected, present(last), leaves)
    there = copy.deepcopy(layer).cuda()
    moved = dataclasses.replace(state, **{name: value.detach().cuda() for name, value in entries.items()})
    output, end = there(x.cuda(), moved)
    close(output.cpu(), expected, 1e-10)
    ends = {name: value.cpu() for name, value in present(end).items()}
    for one, another in zip(gradients(output.cpu(), ends, [*there.parameters()]), wanted, strict=True):
        close(one.cpu(), another, 1e-9)


# Compilation


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, unless warnings are errors
@some_layers
def test_under_torch_compile(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input()
    expected, last = layer(x)
    output, state = torch.compile(layer, backend="eager")(x)
    close(output, expected, 1e-13)
    close(state.h, last.h, 1e-13)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # inductor's own warnings are not ours
@pytest.mark.parametrize(
    ("cell", "rule"),
    [
        ("lstm", "momentum"),
        ("lstm", "adam"),
        ("rnn", "adaptive"),
        ("gru", "rmsprop"),
        ("dtriv", "restart"),
        ("dtriv", "adam"),
    ],
)
def test_compiled_by_inductor(cell, rule):
    layer, _ = make_pair(cell, rule)
    compiled, _ = make_pair(cell, rule, compile=True)
    compiled.load_state_dict(layer.state_dict())
    x = make_input(50).requires_grad_()
    state, entries = make_state(layer, x)
    starts = [value for name, value in entries.items() if name != "t"]
    (expected, last), (output, end) = layer(x, state), compiled(x, state)
    close(output, expected, 1e-12)
    found = gradients(output, present(end), [x, *compiled.parameters(), *starts])
    for one, another in zip(found, gradients(expected, present(last), [x, *layer.parameters(), *starts]), strict=True):
        close(one, another, 1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_torch_compile_with_inductor(rule):
    layer, _ = make_pair("lstm", rule)
    x = make_input().requires_grad_()
    expected, _ = layer(x)
    output, _ = torch.compile(layer)(x)
    close(output, expected, 1e-12)
    leaves = [x, *layer.parameters()]
    for one, another in zip(gradients(output, {}, leaves), gradients(expected, {}, leaves), strict=True):
        close(one, another, 1e-10)


# Export


@pytest.mark.parametrize(("cell", "rule"), PAIRS[:5])
def test_to_stock(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True)
    x = make_input(20)
    expected, state = layer(x)
    stock = layer.to_stock()
    assert any(type(module) is STOCK[cell] for module in stock.modules())
    output, last = stock(x)
    close(output, expected, 1e-12)
    last = last if cell == "lstm" else (last,)
    for one, another in zip(last, (state.h, state.c), strict=False):
        close(one, another, 1e-12)


@pytest.mark.parametrize(("cell", "rule"), [("lstm", "momentum"), ("gru", "adam")])
@pytest.mark.parametrize("options", [{"bias": False}, {"batch_first": True, "num_layers": 2}], ids=str)
def test_to_stock_with_options(cell, rule, options):
    layer = kind(cell)(2, 3, rule=rule, **options).double()
    x = make_input(9)
    close(layer.to_stock()(x)[0], layer(x)[0], 1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@two_rules
def test_traced_plain_layers_take_any_length(rule):
    layer, _ = make_pair("gru", rule, bidirectional=True)
    traced = torch.jit.trace(layer.to_stock(), make_input(), check_trace=False)
    for time in (1, 32, 1100):
        x = make_input(time, 2)
        if time == 32:
            x[20, 0, 1] = torch.nan
        output, (expected, _) = traced(x)[0], layer(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12, equal_nan=True)


class Output(nn.Module):
    """What a layer returns first: torch.jit.trace knows no states but in tuples."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("cell", "rule"), [("lstm", "momentum"), ("gru", "nag"), ("dtriv", "adam")])
def test_traced_layers(cell, rule):
    """Of any length with linear rules and torch's layers."""
    layer, _ = make_pair(cell, rule)
    traced = torch.jit.trace(Output(layer), make_input(6), check_trace=False)
    for time in (6,) if cell == "dtriv" else (1, 4, 6, 40):
        x = make_input(time, 2 if cell != "dtriv" else 3)
        close(traced(x), layer(x)[0], 1e-12)


@pytest.mark.parametrize(("cell", "rule"), [("lstm", "momentum"), ("dtriv", "restart"), ("gru", "rmsprop")])
def test_exported_layers(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input(5)
    close(torch.export.export(Output(layer), (x,), strict=False).module()(x), layer(x)[0], 1e-12)


@pytest.mark.parametrize(("batch_first", "axis"), [(False, 1), (True, 0)])
def test_plain_layers_take_batches_only(batch_first, axis):
    layer = hbnode.nn.MomentumLSTM(2, 3, batch_first=batch_first)
    x = torch.randn(5, 2)
    with pytest.raises(ValueError, match=rf"got \(5, 2\). Fix: x.unsqueeze\({axis}\)"):
        layer.to_stock()(x)
    close(layer.to_stock()(x.unsqueeze(axis))[0].squeeze(axis), layer(x)[0], 1e-6)
    with pytest.raises(ValueError, match="got PackedSequence"):
        layer.to_stock()(nn.utils.rnn.pack_sequence([x]))


def test_the_filter_is_exported_for_any_length_and_batch():
    layer, _ = make_pair("lstm", "nag")
    (before,) = layer.to_stock().filters
    axes = {"x": {0: torch.export.Dim("T"), 1: torch.export.Dim("batch")}}
    program = torch.export.export(before, (make_input(),), dynamic_shapes=axes).module()
    for time, batch in ((2, 5), (70, 2), (1100, 3)):
        x = make_input(time, batch)
        close(program(x), before(x), 1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own export
@pytest.mark.parametrize("rule", RULES)
def test_plain_layers_are_exported_for_any_length(rule):
    patches = pytest.importorskip("torch.export._patches", reason="torch unrolls its LSTM")
    layer, _ = make_pair("lstm", rule)
    axes = {"x": {0: torch.export.Dim("T"), 1: torch.export.Dim("batch")}}
    with patches.register_lstm_while_loop_decomposition(), torch.no_grad():
        program = torch.export.export(layer.to_stock().eval(), (make_input(),), dynamic_shapes=axes).module()
    for time in (2, 70):
        x = make_input(time, 2)
        close(program(x)[0], layer(x)[0], 1e-12)
