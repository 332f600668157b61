import copy
import pickle

import numpy
import pytest
import torch
from torch import nn

import hbnode

close, Standardize = torch.testing.assert_close, hbnode.nn.Standardize


def test_mlp_appends_the_time_as_a_feature():
    net = hbnode.nn.MLP(3, [5], 2, time_dependent=True)
    t, h = torch.tensor(0.7), torch.randn(4, 6, 3)
    joined = torch.cat([h, torch.full((4, 6, 1), 0.7)], dim=-1)
    close(net(t, h), net.layers(joined))


def test_conv_net_appends_the_time_as_a_channel_before_every_convolution():
    net = hbnode.nn.ConvNet(2, 5, 3)
    t, h = torch.tensor(0.7), torch.randn(4, 2, 6, 6)
    clock = torch.full((4, 1, 6, 6), 0.7)
    x = net.conv1(torch.cat([h, clock], 1)).relu()
    x = net.conv2(torch.cat([x, clock], 1)).relu()
    close(net(t, h), net.conv3(torch.cat([x, clock], 1)))


def test_standardize_ignores_what_is_missing():
    x = 5 + 3 * torch.randn(6, 8, 3, dtype=torch.float64)
    x[..., 1] = 2.0
    x[:, :, 2] = torch.nan
    x[0, :4, 0] = torch.nan
    lengths = torch.tensor([8, 5, 1, 8, 3, 2])
    mask = torch.rand(6, 8, 3) < 0.7
    scale = Standardize(3).double().fit(x, mask, lengths)
    kept = [value for b in range(6) for i in range(lengths[b]) if mask[b, i, 0] and not (value := x[b, i, 0]).isnan()]
    values = torch.stack(kept).numpy()
    close(scale.mean, torch.tensor([numpy.mean(values), 2.0, 0.0]).double())
    close(scale.std, torch.tensor([numpy.std(values), 1.0, 1.0]).double())
    assert scale(x)[0, :4, 0].isnan().all()
    close(scale.inverse(scale(x)), x, equal_nan=True)
    by_row = Standardize(3).double().fit(x, mask.any(-1))
    close(by_row.mean[0], x[..., 0][mask.any(-1) & ~x[..., 0].isnan()].mean())


def test_a_spread_is_scaled_back_without_the_mean():
    scale = Standardize(2).double().fit(40 + 5 * torch.randn(200, 2, dtype=torch.float64))
    mean, std = torch.randn(2, 7, 2, dtype=torch.float64)
    there = scale.inverse(hbnode.nn.Gaussian(mean, std))
    close((there.mean, there.std), (scale.inverse(mean), std * scale.std))


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e-300, 3e5 + 0.1])
def test_standardize_only_shifts_a_constant(value):
    """The mean of equal numbers is rounded, so that their variance is not exactly 0."""
    x = torch.full((1000, 1), value, dtype=torch.float64)
    scale = Standardize(1).fit(x)
    assert scale.std.item() == 1
    close(scale(x + 1), torch.ones_like(x), atol=0.1, rtol=0)
    close(Standardize(1).fit(1e6 + torch.arange(5.0)[:, None]).std, torch.tensor([2.0]).sqrt())


def test_standardize_refuses_what_its_dtype_does_not_hold():
    x = torch.randn(1000, 2, dtype=torch.float64)
    for far in (1.7e9 + 63 + x, 1e-50 * x, 1e50 * x):
        with pytest.raises(ValueError, match=r"feature 0 has mean .*; torch.float32 cannot represent them. Fix: Stand"):
            Standardize(2).fit(far)
        scaled = Standardize(2).double().fit(far)(far)
        close(scaled.mean(0), torch.zeros(2).double(), atol=1e-6, rtol=0)


def test_what_is_refused():
    scale, fresh, x, MLP = Standardize(2), Standardize(2).state_dict(), torch.randn(20, 2), hbnode.nn.MLP
    wrong_activation, not_fitted = (
        "activation must be a class.*Fix: activation=nn.ReLU",
        r"not fitted. Fix: scale.fit\(x\)",
    )
    for message, use in (
        (r"hidden must be the sizes of the hidden layers, got 16\. Fix: \[16\]", lambda: MLP(2, 16, 2)),
        (wrong_activation, lambda: MLP(2, [16], 2, activation=nn.ReLU())),
        (r"x must be \(..., 2\).*Fix: Standardize\(3\)", lambda: scale(torch.ones(4, 3))),
        ("infinite in feature 1", lambda: scale.fit(torch.tensor([[0.0, torch.inf]]))),
        (not_fitted, lambda: scale(x)),
        (not_fitted, lambda: (scale.load_state_dict(fresh), scale(x))),
        (not_fitted, lambda: torch.export.export(scale, (x,), strict=False)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            use()


@pytest.mark.parametrize(
    "load",
    [
        lambda scale, state: scale.load_state_dict(state),
        lambda scale, state: scale.load_state_dict(state, assign=True),
        lambda scale, state: [z.copy_(state[name]) for name, z in scale.named_buffers()],  # as DDP does
    ],
    ids=["load", "assign", "buffers"],
)
def test_a_loaded_standardize_is_fitted(load):
    x, scale = 80 + 10 * torch.randn(20, 2), Standardize(2)
    fitted = Standardize(2).fit(x)
    load(scale, fitted.state_dict())
    for one in (scale, copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert one(x).equal(fitted(x))
    if scale.is_fitted:
        assert torch.export.export(scale, (x,), strict=False).module()(x).equal(fitted(x))
        assert torch.compile(scale, backend="eager", fullgraph=True)(x).equal(fitted(x))


@pytest.mark.parametrize("field", ["node", "ghbnode"])
def test_models_of_equal_parameters(field):
    before, make = torch.get_rng_state(), lambda n: hbnode.ODERNN(8, n, field=field)
    rnn = hbnode.nn.match_parameters(make, 5000)
    misses = [abs(sum(p.numel() for p in make(rnn.hidden_size + k).parameters()) - 5000) for k in (-1, 0, 1)]
    assert min(misses) == misses[1]
    torch.set_rng_state(before)
    assert make(rnn.hidden_size).cell.weight_hh.equal(rnn.cell.weight_hh)
    with pytest.raises(ValueError, match="size 1 has 101 parameters"):
        hbnode.nn.match_parameters(lambda n: nn.Linear(100, n), 50)
    with pytest.raises(ValueError, match="does not increase with the size"):
        hbnode.nn.match_parameters(lambda n: nn.Linear(3, 3), 50)
