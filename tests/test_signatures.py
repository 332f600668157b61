"""What an editor, ``help`` and an error show of the front of the library."""

import inspect
import re
from typing import get_args

import pytest
import torch
from torch import nn

import hbnode
from hbnode.solve import methods, settings

PUBLIC = [
    *(hbnode.odeint, hbnode.ODEBlock, hbnode.HeavyBallODEBlock, hbnode.ODEBlock.trajectory),
    *(hbnode.momentum_attention, hbnode.heavy_ball_memory),
    *(hbnode.MomentumAttention, hbnode.HeavyBallMemory, hbnode.SoftmaxAttention, hbnode.MomentumAttention.forward),
    *(hbnode.MomentumAttention.prefill, hbnode.MomentumAttention.step),
    *(hbnode.MomentumTransformerLayer, hbnode.MomentumTransformerLayer.forward),
    *(hbnode.MomentumTransformerDecoderLayer, hbnode.MomentumTransformerDecoderLayer.forward),
    *(hbnode.MomentumTransformer, hbnode.MomentumTransformer.forward, hbnode.MomentumTransformer.prefill),
    *(hbnode.MomentumTransformer.step, hbnode.MomentumTransformer.generate),
    *(hbnode.HessianFree, hbnode.HessianFree.step, hbnode.HessianFree.product, hbnode.optim.tanh_hidden),
    *(hbnode.HeavyBallFlow, hbnode.HeavyBallFlow.push, hbnode.HeavyBallFlow.pull, hbnode.HeavyBallFlow.log_prob),
    *(hbnode.HeavyBallFlow.posterior, hbnode.HeavyBallFlow.elbo, hbnode.HeavyBallFlow.log_prob_bound),
    *(hbnode.HeavyBallFlow.sample, hbnode.HeavyBallFlow.rsample, hbnode.HeavyBallFlow.rsample_and_log_prob),
    *(hbnode.ODERNN, hbnode.ODERNN.forward, hbnode.ODERNN.fit_time_unit, hbnode.nets.Standardize.fit),
    *(hbnode.data.from_long, hbnode.data.bucketed_batches, hbnode.data.Dataset),
    *(hbnode.TanhRNN, hbnode.TanhRNN.forward, hbnode.recurrent.sparse_),
    *(hbnode.MomentumRNN, hbnode.MomentumLSTM, hbnode.MomentumGRU, hbnode.MomentumDTRIV, hbnode.DTRIV),
    *(hbnode.MomentumRNNCell, hbnode.MomentumLSTMCell, hbnode.MomentumGRUCell, hbnode.MomentumDTRIVCell),
    hbnode.DTRIVCell,
    *(hbnode.sdeint, hbnode.HeavyBallSDE, hbnode.BrownianIncrements, hbnode.BrownianIncrements.draw),
    *(hbnode.HeavyBallAnnealing, hbnode.HeavyBallAnnealing.sample, hbnode.HeavyBallAnnealing.rsample),
    *(hbnode.HeavyBallAnnealing.bound, hbnode.HeavyBallAnnealing.log_z),
    *(hbnode.Oscillators, hbnode.Oscillators.forward, hbnode.Oscillators.forecast, hbnode.oscillator_step),
    *(hbnode.Oscillators.filter, hbnode.Oscillators.log_likelihood),
    *(hbnode.OscillatorCell, hbnode.OscillatorCell.forward, hbnode.oscillator_ranges),
    *(hbnode.OscillatorStack, hbnode.OscillatorStack.forward),
]


def _parameters(public):
    return {name: p for name, p in inspect.signature(public).parameters.items() if name != "self"}


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_every_argument_is_documented_with_its_default(public):
    parameters = _parameters(public)
    assert not [p for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    text = inspect.getdoc(public).split("Arguments:\n")[1]
    entries = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\w+:|\Z)", text, re.M | re.S))
    for name, parameter in parameters.items():
        described = " ".join(entries[name].split())
        if parameter.default is parameter.empty:
            assert "Default:" not in described, name
        else:
            default = parameter.default
            shown = f'"{default}"' if isinstance(default, str) else {1e-5: "1e-5", 1e-6: "1e-6"}.get(default, default)
            assert f"Default: {shown}" in described.replace("``", ""), (name, described)


def test_every_public_name_exists():
    assert [name for name in hbnode.__all__ if not hasattr(hbnode, name)] == []


def test_a_heavy_ball_block_has_every_argument_of_its_block_and_of_its_fields():
    of_block, own = _parameters(hbnode.ODEBlock), _parameters(hbnode.HeavyBallODEBlock)
    assert set(of_block) - set(own) == {"field"}
    assert set(_parameters(hbnode.GHBNODE)) <= set(own)
    for name in set(of_block) & set(own):
        assert own[name].default == of_block[name].default, name
        assert own[name].annotation == of_block[name].annotation, name
    of_odeint = _parameters(hbnode.odeint)
    for name in set(of_block) & set(of_odeint) - {"field"}:
        assert of_block[name].default == of_odeint[name].default, name
        assert of_block[name].annotation == of_odeint[name].annotation, name


@pytest.mark.parametrize("name", ["tolerance", "solver", "dampening"])
def test_a_misspelt_argument_names_the_class_that_was_called(name):
    with pytest.raises(TypeError, match=rf"HeavyBallODEBlock.*unexpected keyword argument '{name}'"):
        hbnode.HeavyBallODEBlock(nn.Identity(), **{name: 1e-3})


def test_the_literals_are_the_registries():
    assert set(get_args(settings.NativeMethod)) == set(methods.METHODS)
    assert get_args(settings.TorchdiffeqMethod) == settings.TORCHDIFFEQ
    assert get_args(settings.Gradient) == settings.GRADIENTS


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"method": "nystrom_8"}, "method='nystrom8'"),
        ({"method": "rk45"}, "method='dopri5'"),
        ({"gradient": "backprop"}, "gradient='direct'"),
        ({"gradient": "checkpointing"}, "gradient='checkpoint'"),
        ({"gradient": "adjoints"}, "gradient='adjoint'"),
        ({"gradient": "aca"}, "gradient='checkpoint'"),
        ({"gradient": "adjoint_method", "method": "dopri5"}, "gradient='adjoint'"),
        ({"gradient": "checkpoint", "method": "dopri5"}, "gradient='direct'"),
        ({"per_sample": "sample"}, "per_sample=True"),
        ({"steps": "four"}, "steps=8"),
    ],
    ids=str,
)
def test_an_unknown_name_suggests_the_nearest(given, fix):
    x = torch.ones(2, 2)
    for solve in (
        lambda: hbnode.odeint(lambda t, h: -h, x, [0.0, 1.0], **given),
        lambda: hbnode.ODEBlock(hbnode.NODE(nn.Identity()), **given),
        lambda: hbnode.HeavyBallODEBlock(nn.Identity(), **given),
        lambda: hbnode.ODERNN(1, 4, **given),
    ):
        with pytest.raises(ValueError, match=rf"Fix: {re.escape(fix)}"):
            solve()


@pytest.mark.parametrize("kind", [hbnode.NODE, hbnode.ANODE, hbnode.SONODE, hbnode.HBNODE, hbnode.GHBNODE])
def test_a_misspelt_argument_names_the_field(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}.__init__\(\) got an unexpected keyword argument 'gamma'"):
        kind(torch.nn.Identity(), gamma=1)


def test_names_of_fields_suggest_the_nearest():
    with pytest.raises(ValueError, match="Fix: 'anode'"):
        hbnode.ODERNN(1, 2, field="anod")
    with pytest.raises(ValueError, match="Fix: 'node'"):
        hbnode.ODERNN(1, 2, field="NODE")


def test_a_forecast_for_one_number_is_refused():
    rnn = hbnode.ODERNN(1, 2)
    _, state = rnn(torch.zeros(1, 1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"dt must be \(K,\).*Fix: \[0.5, 1.0\]"):
        rnn.forecast(state, 1.0)
