"""The momentum recurrent layers as torch.nn's: values, arguments, initialisation, refusals."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hbnode
from hbnode.nn import recurrent, rules
from tests.momentum_layers import (
    CELLS,
    RULES,
    STOCK,
    close,
    every_layer,
    gradients,
    kind,
    make_input,
    make_pair,
    make_state,
    plain,
    present,
    some_layers,
    two_rules,
)


@pytest.mark.parametrize("cell", STOCK)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_without_momentum_it_is_torchs_layer(cell, options):
    ours, theirs = plain(cell, 2, 3, **options), STOCK[cell](2, 3, **options).double()
    fresh = copy.deepcopy(ours)
    ours.load_state_dict(theirs.state_dict())
    x = make_input(12).requires_grad_()
    (output, state), (expected, last) = ours(x), theirs(x)
    close(output, expected, 1e-13)
    last = last if cell == "lstm" else (last,)
    for one, another in zip((state.h, state.c), last, strict=False):
        close(one, another, 1e-13)
    ends, names = {"h": state.h}, [*dict(ours.named_parameters())]
    found = gradients(output, ends, [x, *ours.parameters()])
    wanted = gradients(expected, {"h": last[0]}, [x, *(theirs.get_parameter(name) for name in names)])
    for one, another in zip(found, wanted, strict=True):
        close(one, another, 1e-11)
    theirs.load_state_dict(fresh.state_dict())
    close(fresh(x)[0], theirs(x)[0], 1e-13)


@pytest.mark.parametrize("cell", STOCK)
def test_without_momentum_a_cell_is_torchs(cell):
    ours, _ = make_pair(cell, "momentum", suffix="Cell")
    ours = kind(cell, suffix="Cell")(2, 3, momentum=0.0, step_size=1.0).double()
    theirs = getattr(nn, CELLS[cell] + "Cell")(2, 3).double()
    ours.load_state_dict(theirs.state_dict())
    x, h, c = make_input(1)[0], *torch.randn(2, 3, 3, dtype=torch.float64)
    start = (h, c) if cell == "lstm" else h
    expected = theirs(x, start)
    close(ours(x, start)[0], expected[0] if cell == "lstm" else expected, 1e-14)


def test_nonlinearity_of_the_plain_rnn():
    ours, theirs = plain("rnn", 2, 3, nonlinearity="relu"), nn.RNN(2, 3, nonlinearity="relu").double()
    theirs.load_state_dict(ours.state_dict())
    x = make_input()
    close(ours(x)[0], theirs(x)[0], 1e-13)


@some_layers
def test_batch_first_and_unbatched(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True)
    x = make_input()
    state, _ = make_state(layer, x)
    expected, last = layer(x, state)
    first, _ = make_pair(cell, rule, layers=2, bidirectional=True, batch_first=True)
    first.load_state_dict(layer.state_dict())
    output, other = first(x.transpose(0, 1), state)
    close(output, expected.transpose(0, 1), 1e-13)
    close(other.h, last.h, 1e-13)
    entries = {name: s[1] if name == "t" else s[:, 1] for name, s in present(state).items()}
    single = recurrent.RecurrentState(**entries)
    for one in (layer, first):
        output, alone = one(x[:, 1], single)
        close(output, expected[:, 1], 1e-13)
        for name, value in present(alone).items():
            assert value.shape == entries[name].shape
            close(
                value.double(), (present(last)[name][1] if name == "t" else present(last)[name][:, 1]).double(), 1e-13
            )


@two_rules
@pytest.mark.parametrize("sorted_lengths", [True, False])
def test_packed_is_each_sequence_alone(rule, sorted_lengths):
    layer, _ = make_pair("gru", rule, layers=2, bidirectional=True)
    x = make_input(8, 4)
    lengths = [8, 5, 5, 2] if sorted_lengths else [5, 2, 8, 5]
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=sorted_lengths)
    output, last = layer(packed)
    assert isinstance(output, nn.utils.rnn.PackedSequence)
    padded, found = pad_packed_sequence(output)
    assert found.tolist() == lengths
    for b, length in enumerate(lengths):
        alone, end = layer(x[:length, b : b + 1])
        close(padded[:length, b : b + 1], alone, 1e-13)
        for name, value in present(end).items():
            mine = present(last)[name]
            close((mine[b : b + 1] if name == "t" else mine[:, b : b + 1]).double(), value.double(), 1e-13)


def test_dropout_between_layers_in_training_only():
    torch.manual_seed(1)
    layer, _ = make_pair("lstm", "momentum", layers=2, hidden=20, dropout=0.5)
    x = make_input()
    one, another = layer(x)[0], layer(x)[0]
    assert not torch.equal(one, another)
    layer.eval()
    expected, _ = layer(x)
    assert torch.equal(layer(x)[0], expected)
    layer.dropout = 0.0
    layer.train()
    close(layer(x)[0], expected, 1e-14)
    single, _ = make_pair("lstm", "momentum", layers=2, hidden=20)
    single.load_state_dict(layer.state_dict())
    close(single(x)[0], expected, 1e-14)


def test_dropout_scales_what_it_keeps():
    """The second layer sees the first's output with a share p at zero and the rest 1/(1-p) as large."""
    layer = plain("rnn", 2, 500, num_layers=2, dropout=0.25)
    with torch.no_grad():
        layer.weight_ih_l1.copy_(torch.eye(500))
        layer.weight_hh_l1.zero_()
        layer.weight_hh_l0.zero_()
        layer.weight_ih_l0.mul_(0.1)
    x = make_input(1, 4)
    dropped, exact = layer(x)[0].atanh(), layer.eval()(x)[0].atanh()
    zero = dropped == 0
    assert abs(zero.double().mean().item() - 0.25) < 0.05
    torch.testing.assert_close(dropped[~zero], exact[~zero] / 0.75)


def test_initialisation_of_an_lstm():
    """Appendices A and F: orthogonal W, eye_ on all of U (its first block), biases 0 but both forget slices."""
    layer = recurrent.MomentumLSTM(5, 4, 2, bidirectional=True, forget_bias=-4.0)
    for end in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        weight = getattr(layer, "weight_ih" + end).detach()
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), rtol=0, atol=1e-5)
        assert torch.equal(getattr(layer, "weight_hh" + end), torch.eye(16, 4))
        for name in ("bias_ih", "bias_hh"):
            assert getattr(layer, name + end).tolist() == [0.0] * 4 + [-4.0] * 4 + [0.0] * 8
    cell = recurrent.MomentumLSTMCell(3, 4, rule="adam")
    assert cell.bias_ih.tolist() == cell.bias_hh.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


@pytest.mark.parametrize(("cell", "rule"), [("rnn", "momentum"), ("rnn", "nag"), ("gru", "rmsprop")])
def test_initialisation_of_the_others(cell, rule):
    layer = kind(cell)(2, 4, rule=rule)
    weight = layer.weight_ih_l0.detach()
    torch.testing.assert_close(weight.T @ weight, torch.eye(2), rtol=0, atol=1e-5)
    assert torch.equal(layer.weight_hh_l0, torch.eye(*layer.weight_hh_l0.shape))
    assert not layer.bias_ih_l0.any()
    assert not layer.bias_hh_l0.any()


def test_refusals():
    layer, _ = make_pair("lstm", "momentum")
    x = make_input()
    for wrong, error, message in (
        (make_input(inputs=3), ValueError, r"must be .*input_size=2.*got.*3\).*Fix: "),
        (torch.zeros(2, dtype=torch.float64), ValueError, r"must be .*got.*Fix: "),
        (torch.zeros(1, 1, 1, 2, dtype=torch.float64), ValueError, r"must be .*got.*Fix: "),
        (torch.zeros(7, 3, 2, dtype=torch.int64), (TypeError, ValueError), r"must be .*got.*int64.*Fix: "),
        (torch.zeros(7, 3, 2), (TypeError, ValueError), r"float64.*got.*float32.*Fix: "),
        (torch.zeros(0, 3, 2, dtype=torch.float64), ValueError, r"must be .*got.*Fix: "),
        ([[1.0]], TypeError, r"must be .*got.*Fix: "),
    ):
        with pytest.raises(error, match=message):
            layer(wrong)
    h = torch.zeros(1, 3, 3, dtype=torch.float64)
    wide = torch.zeros(1, 3, 12, dtype=torch.float64)
    good = layer(x)[1]
    for state in (
        h[:, :2],
        h[:, :, :2],
        h[0],
        (h, h[:, :2]),
        dataclasses.replace(good, v=wide[:, :2]),
        dataclasses.replace(good, v=h),
    ):
        with pytest.raises(ValueError, match=r"must be .*\(1, 3, (3|12)\).*got.*Fix: "):
            layer(x, state)
    for state in ((h, h, h), (h,), "zeros", {"h": h}):
        with pytest.raises((TypeError, ValueError), match=r"must be .*got.*Fix: "):
            layer(x, state)
    with pytest.raises((TypeError, ValueError), match=r"must be .*got.*Fix: "):
        layer(x, h.float())


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {"momentum": -0.1}),
        ("lstm", {"momentum": 1.1}),
        ("lstm", {"step_size": 0.0}),
        ("lstm", {"step_size": float("nan")}),
        ("lstm", {"dropout": 1.5}),
        ("lstm", {"num_layers": 0}),
        ("lstm", {"bias": 0.9}),
        ("rnn", {"nonlinearity": "sigmoid"}),
        ("dtriv", {"init": "saxe"}),
    ],
    ids=str,
)
def test_arguments_refused(cell, options):
    (argument,) = options
    with pytest.raises((TypeError, ValueError), match=rf"{argument} must be .*got .*Fix: "):
        kind(cell)(2, 3, **options)


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (rules.ScheduledRestart, {"restart": 0}),
        (rules.ScheduledRestart, {"restart": 2.5}),
        (rules.Adam, {"beta": 1.0}),
        (rules.Adam, {"eps": 0.0}),
        (rules.RMSProp, {"eps": -1.0}),
        (rules.AdaptiveMomentum, {"delta": 2.0}),
    ],
)
def test_numbers_of_a_rule_refused(make, numbers):
    (argument,) = numbers
    with pytest.raises(ValueError, match=rf"{argument} must be .*got .*Fix: "):
        make(**numbers)


@pytest.mark.parametrize("suffix", ["", "Cell"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_rule_by_name_and_as_an_object(cell, suffix):
    make = functools.partial(kind(cell, suffix=suffix), 2, 3)
    assert make().rule == rules.Momentum(0.6, 0.6)
    assert make(momentum=0.9, step_size=0.5).rule == rules.Momentum(0.9, 0.5)
    for name, rule in RULES.items():
        assert make(rule=name).rule == type(rule)()
        assert make(rule=name, step_size=0.5).rule == dataclasses.replace(type(rule)(), step_size=0.5)
        assert make(rule=rule).rule is rule
    assert make(rule="adam", momentum=0.9).rule == rules.Adam(momentum=0.9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "nesterov"}, ValueError, r"rule must be one of 'momentum', .*got 'nesterov'\. Fix: rule='nag'\."),
        ({"rule": "Adam"}, ValueError, r"got 'Adam'\. Fix: rule='adam'\."),
        ({"rule": "rms_prop"}, ValueError, r"got 'rms_prop'\. Fix: rule='rmsprop'\."),
        ({"rule": "sr"}, ValueError, r"got 'sr'\. Fix: rule='restart'\."),
        ({"rule": "adaptive_momentum"}, ValueError, r"Fix: rule='adaptive'\."),
        ({"rule": "?"}, ValueError, r"Fix: rule='momentum'\."),
        (
            {"rule": rules.Adam},
            TypeError,
            r"rule must be a name or an object.*got the class Adam\. Fix: rule=Adam\(\)",
        ),
        ({"rule": 0.9}, TypeError, r"rule must be .*got float\. Fix: rule="),
        (
            {"rule": "nag", "momentum": 0.9},
            ValueError,
            r"rule='nag' must come without momentum.*got 0\.9\. Fix: ",
        ),
        (
            {"rule": rules.Adam(), "step_size": 0.6},
            ValueError,
            r"step_size must be an argument of the rule, got 0\.6 beside Adam\(.*Fix: Adam\(\.\.\., step_size=0\.6\)",
        ),
        (
            {"rule": rules.NAG(), "momentum": 0.6},
            ValueError,
            r"momentum must be an argument of the rule, got 0\.6 beside NAG\(.*Fix: leave out momentum",
        ),
    ],
)
def test_rules_refused(options, error, message):
    for make in (hbnode.nn.MomentumLSTM, hbnode.nn.MomentumGRUCell, hbnode.nn.MomentumDTRIV):
        with pytest.raises(error, match=message):
            make(2, 3, **options)


@pytest.mark.parametrize(
    ("make", "option"),
    [(hbnode.nn.MomentumLSTM, "nonlinearity"), (hbnode.nn.MomentumLSTM, "beta"), (hbnode.nn.DTRIV, "step_size")],
)
def test_arguments_of_others_are_refused(make, option):
    with pytest.raises(TypeError, match=option):
        make(2, 3, **{option: 0.5})


@pytest.mark.parametrize("cell", STOCK)
def test_arguments_are_torchs(cell):
    options = {"bias": False, "batch_first": True, "dropout": 0.5, "bidirectional": True}
    options |= {"nonlinearity": "relu"} if cell == "rnn" else {}
    ours, theirs = plain(cell, 2, 3, 2, **options).eval(), STOCK[cell](2, 3, 2, **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = make_input().transpose(0, 1)
    close(ours(x)[0], theirs(x)[0], 1e-13)
    assert ours.dropout == 0.5
    ours.flatten_parameters()
    h, c = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    start = (h, c) if cell == "lstm" else h
    close(ours(x, hx=start)[0], theirs(x, hx=start)[0], 1e-13)


def test_arguments_of_a_cell_by_position():
    for cell in ("rnn", "lstm", "gru"):
        one = kind(cell, suffix="Cell")(3, 4, 0.9, 0.5, False)
        assert one.rule == rules.Momentum(0.9, 0.5)
        assert not one.has_bias
    assert hbnode.nn.MomentumDTRIVCell(3, 4, 0.9, 0.5).rule == rules.Momentum(0.9, 0.5)
    x, (h, c) = make_input(1).float()[0], torch.randn(2, 3, 3)
    cell = hbnode.nn.MomentumLSTMCell(2, 3)
    assert torch.equal(cell(x, hx=(h, c))[0], cell(x, (h, c))[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hbnode.nn.MomentumLSTM(10, 20, 1, 0.9), "positional arguments"),
        (lambda: hbnode.nn.MomentumLSTM(10, 20, 0.9), "num_layers"),
        (lambda: hbnode.nn.MomentumLSTMCell(10, 20, False), "momentum must be in"),
        (
            lambda: hbnode.nn.MomentumLSTMCell(10, 20, 0.9, 0.6, 0.9),
            "bias must be True or False, got 0.9. Fix: ",
        ),
        (lambda: hbnode.nn.MomentumLSTM(2, 3)(make_input().float(), torch.zeros(1, 3, 3), hx=0), "two names"),
    ],
)
def test_arguments_in_the_wrong_place(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@every_layer
def test_an_empty_batch(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True, batch_first=True)
    x = torch.zeros(0, 7, 2, dtype=torch.float64)
    output, state = layer(x)
    output, state = layer(x, state)
    assert output.shape == (0, 7, 6)
    assert state.h.shape == (4, 0, 3)
    output.sum().backward()
    assert not any(p.grad.any() for p in layer.parameters())
    with pytest.raises(ValueError, match="at least one sample"):
        layer(torch.zeros(3, 0, 2, dtype=torch.float64))
