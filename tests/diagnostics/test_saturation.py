"""Shares of saturated values: exact for single layers, and as counted in the outputs of recurrent layers."""

import pytest
import torch
from torch import nn

import hbnode
from hbnode.diagnostics import saturation


def test_the_bounds_of_each_kind_of_layer():
    x = torch.tensor([[0.0, 2.64, 2.65, -2.65, 4.59, 4.6, -4.6, -100.0]])  # tanh 2.6467 = σ(4.5951) = 0.99
    shares = {nn.Tanh: 6 / 8, nn.Sigmoid: 3 / 8, nn.Softsign: 1 / 8, nn.Hardtanh: 7 / 8, nn.Hardsigmoid: 4 / 8}
    for kind, share in shares.items():
        assert saturation(nn.Sequential(nn.Identity(), kind()), x) == {"1": share}
    assert saturation(nn.Hardtanh(-3, 4.59), x) == {"Hardtanh": 4 / 8}
    assert saturation(nn.Sequential(nn.ReLU(), nn.ReLU6()), x) == {}
    assert saturation(nn.RNN(8, 4, nonlinearity="relu"), x) == {}


def layers():
    return nn.GRU(3, 8), nn.RNN(3, 8), hbnode.nn.MomentumRNN(3, 8), hbnode.nn.TanhRNN(3, 8), nn.GRUCell(3, 8)


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
def test_recurrent_layers_count_their_hidden_states(layer):
    x = 80 + 10 * torch.randn(5, 3) if isinstance(layer, nn.GRUCell) else 80 + 10 * torch.randn(20, 5, 3)
    h = layer(x) if isinstance(layer, nn.GRUCell) else layer(x)[0]
    assert saturation(layer, x) == {type(layer).__name__: pytest.approx(float((h.abs() > 0.99).double().mean()))}


@pytest.mark.parametrize("field", ["node", "hbnode"])
def test_an_ode_rnn_of_inputs_far_from_0_is_named(field):
    torch.manual_seed(0)
    x, t = 80 + 10 * torch.randn(8, 20, 3), torch.arange(20.0)
    rnn, scale = hbnode.ODERNN(3, 16, field=field, dropout=0.5, num_layers=2).fit_time_unit(t), hbnode.nn.Standardize(3)
    shares = saturation(rnn, x, t)
    assert next(iter(shares)) == "layers.0.cell"
    assert shares["layers.0.cell"] > 0.25
    assert not max(saturation(rnn, scale.fit(x)(x), t).values()) > 0.01
    assert rnn.training
    assert not any(module._forward_hooks for module in rnn.modules())
