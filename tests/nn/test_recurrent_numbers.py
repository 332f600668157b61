"""Number formats, derivatives and samples that are not finite, of the momentum recurrent layers."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hbnode
from hbnode import _torch
from hbnode.nn.recurrent import layers
from tests.momentum_layers import (
    PAIRS,
    close,
    every_layer,
    kind,
    make_input,
    make_pair,
    make_state,
    some_layers,
    two_rules,
)

# Number formats


@some_layers
def test_float32_is_close_to_float64(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input(20 if cell == "dtriv" else 200)  # modReLU jumps at 0, and an orthogonal weight forgets nothing
    expected, _ = layer(x)
    output, state = copy.deepcopy(layer).float()(x.float())
    assert output.dtype == state.h.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("cell", "rule"), PAIRS[:5])
def test_bfloat16(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input(20)
    expected, _ = layer(x)
    half = copy.deepcopy(layer).bfloat16()
    output, state = half(x.bfloat16())
    assert output.dtype == state.h.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())
    assert (output.double() - expected).abs().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adaptive", "nag"])
def test_half_precision_keeps_its_memory_in_float32(rule, dtype):
    layer, cell = (kind(2, 3, rule=rule, dtype=dtype) for kind in (hbnode.nn.MomentumLSTM, hbnode.nn.MomentumLSTMCell))
    cell.load_state_dict({key[:-3]: value for key, value in layer.state_dict().items()})
    silent = torch.zeros(20, 2, 2, dtype=dtype)
    output, state = layer(silent)
    output, state = layer(silent, state)
    if dtype == torch.bfloat16:  # a slope of 1e4 at silent inputs is too much for float16
        output.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
    stepped = None
    for sample in (*silent, *silent):
        h, stepped = cell(sample, stepped)
    for found in (state, stepped):
        assert all(z.dtype == torch.float32 for z in (found.v, found.m, found.g) if z is not None)
    torch.testing.assert_close(output[-1], h, rtol=0, atol=0.05)


@some_layers
def test_autocast(cell, rule):
    """torch's layer runs in half precision; momentum and scans keep the precision of the parameters."""
    layer, _ = make_pair(cell, rule)
    layer.float()
    x = make_input(40).float()
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, state = layer(x[:20])
        second, state = layer(x[20:], state)
    output = torch.cat([first.float(), second.float()])
    output.sum().backward()
    assert (output - expected).abs().mean() < 0.02
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert all(z.dtype == torch.float32 for z in (state.v, state.m, state.g) if z is not None)


@pytest.mark.parametrize(("cell", "rule"), [("dtriv", "momentum"), ("gru", "adam"), ("lstm", "restart")])
def test_autocast_keeps_the_memory_of_half_precision_parameters(cell, rule):
    layer = kind(cell)(3, 4, rule=rule).bfloat16()
    x = torch.randn(40, 1, 3, dtype=torch.bfloat16)
    state = inside = None
    with torch.no_grad():
        for x_t in x.split(1):
            _, state = layer(x_t, state)
            with torch.autocast("cpu", torch.bfloat16):
                _, inside = layer(x_t, inside)
    assert torch.equal(inside.v, state.v)


def test_the_first_call_under_autocast_draws_no_random_numbers():
    layer, drawn = hbnode.nn.MomentumLSTM(3, 4), []
    _torch.cpu_has_layer.cache_clear()
    for _ in range(2):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.ones(2, 1, 3))
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


def test_autocast_where_the_cpu_has_no_lstm_in_half_precision(monkeypatch):
    """torch's layer runs in float32 there; in float16 no CPU of today has one."""
    layer, _ = make_pair("lstm", "momentum")
    layer.float()
    x = make_input().float()
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.float16):
        layer(x)[0].float().sum().backward()
    monkeypatch.setattr(layers, "cpu_has_layer", lambda name, dtype: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x)
    assert torch.equal(output, expected)


def test_what_the_cpu_has_does_not_depend_on_the_default_dtype():
    layer = hbnode.nn.MomentumLSTM(3, 4)
    _torch.cpu_has_layer.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            output, _ = layer(torch.ones(2, 1, 3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert output.dtype == layer.weight_ih_l0.dtype


# Derivatives


@some_layers
def test_no_grad_inference_and_frozen_parameters(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input()
    expected, _ = layer(x)
    with torch.no_grad():
        close(layer(x)[0], expected, 1e-14)
    with torch.inference_mode():
        close(layer(x)[0], expected, 1e-14)
    layer.requires_grad_(False)
    assert not layer(x)[0].requires_grad
    x.requires_grad_()
    found = torch.autograd.grad(layer(x)[0].sum(), x)[0]
    layer.requires_grad_(True)
    close(found, torch.autograd.grad(layer(x)[0].sum(), x)[0], 1e-13)


@pytest.mark.parametrize(("cell", "rule"), [("lstm", "adam"), ("dtriv", "momentum"), ("gru", "rmsprop")])
def test_training_after_inference_mode_and_no_second_derivative(cell, rule, monkeypatch):
    monkeypatch.setattr(layers, "SMALL_PRODUCT", 0)
    layer = kind(cell)(2, 3, rule=rule)
    x = make_input(40).float().requires_grad_()
    with torch.inference_mode():
        layer(x.detach())
    output, state = layer(x)
    second, _ = layer(x, state)
    second.sum().backward()
    output, _ = layer(x)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*Fix: "):
        torch.autograd.grad(output.square().sum(), x, create_graph=True)


def test_a_fresh_linear_rule_is_differentiated_as_torchs_layer_is():
    layer = hbnode.nn.MomentumRNN(2, 3).double()
    x = make_input(12).requires_grad_()
    (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert layer.weight_ih_l0.grad.abs().max() > 0


# What is not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
@every_layer
def test_what_is_not_finite_changes_nothing_before_its_time(cell, rule, value):
    for carried in (False, True):
        layer, _ = make_pair(cell, rule, layers=2)
        x = make_input(60)
        state = make_state(layer, x)[0] if carried else None
        expected, _ = layer(x, state)
        x[50, 1, 0] = value
        found, _ = layer(x, state)
        close(found[:50], expected[:50], 1e-13)
        close(found[:, ::2], expected[:, ::2], 1e-13)  # nor another sequence
        with torch.no_grad():
            close(layer(x, state)[0][:50], expected[:50], 1e-13)
        if not carried and cell != "dtriv":
            close(layer.to_stock()(x)[0][:50], expected[:50], 1e-12)


@two_rules
def test_what_is_not_finite_in_packed_sequences_and_backwards(rule):
    layer, _ = make_pair("gru", rule, bidirectional=True)
    x = make_input(60, 2)
    lengths = torch.tensor([40, 60])
    expected, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    x[30, 0] = math.nan
    found, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    (found, _), (expected, _) = pad_packed_sequence(found), pad_packed_sequence(expected)
    assert torch.equal(found[:30, 0, :3], expected[:30, 0, :3])
    assert torch.equal(found[31:, 0, 3:], expected[31:, 0, 3:])
    assert torch.equal(found[:, 1], expected[:, 1])
    assert found[30:40, 0, :3].isnan().all()


@pytest.mark.parametrize("rule", [None, "momentum", "nag", "restart"])
def test_gradients_of_what_comes_before_an_infinite_sample(rule):
    """Finite as those of torch.nn.LSTM, but for the weights of the infinite input: 0 * inf."""
    layer = (hbnode.nn.MomentumLSTM(2, 3, rule=rule) if rule else nn.LSTM(2, 3)).double()
    x = make_input(60).requires_grad_()
    leaves = [x, *(p for key, p in layer.named_parameters() if not key.startswith("weight_ih"))]
    expected = torch.autograd.grad(layer(x)[0][:50].sum(), leaves)
    with torch.no_grad():
        x[50, 1, 0] = math.inf
    found = torch.autograd.grad(layer(x)[0][:50].sum(), leaves)
    for one, another in zip(found, expected, strict=True):
        close(one, another, 1e-13)
