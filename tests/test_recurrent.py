"""The momentum recurrent layers as torch.nn's: calls, states, files, transforms, devices."""

import copy
import dataclasses
import math
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import hbnode
from hbnode import recurrent
from hbnode.recurrent import autocast, executor
from tests.momentum_layers import CELLS, RULES, SPACES, close, gradients, make_input, make_pair, make_state, present

every_rule = pytest.mark.parametrize("rule", RULES)
PAIRS = [  # each rule and each cell, the scan and the filter
    *(("rnn", "AdaptiveMomentum"), ("lstm", "Momentum"), ("lstm", "Adam"), ("gru", "NAG"), ("gru", "RMSProp")),
    *(("dtriv", "SR"), ("dtriv", "")),
]
some_layers = pytest.mark.parametrize(("cell", "rule"), PAIRS)
GRID = [(cell, rule) for cell in CELLS for rule in RULES] + [("dtriv", "")]
every_layer = pytest.mark.parametrize(("cell", "rule"), GRID)
STOCK = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def plain(cell, *arguments, **options):
    """A layer that is to be torch.nn's."""
    name = "Momentum" + CELLS[cell]
    return getattr(recurrent, name)(*arguments, momentum=0.0, step_size=1.0, **options).double()


# What torch.nn does


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
    ours, _ = make_pair(cell, "Momentum", suffix="Cell")
    ours = getattr(recurrent, f"Momentum{CELLS[cell]}Cell")(2, 3, momentum=0.0, step_size=1.0).double()
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


@some_layers
@pytest.mark.parametrize("sorted_lengths", [True, False])
def test_packed_is_each_sequence_alone(cell, rule, sorted_lengths):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True)
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


@some_layers
@pytest.mark.parametrize("cuts", [(1, 6, 11)])
def test_in_parts_is_at_once(cell, rule, cuts):
    layer, _ = make_pair(cell, rule, layers=2)
    x = make_input(13).requires_grad_()
    start, entries = make_state(layer, x)
    leaves = [x, *layer.parameters(), *(value for name, value in entries.items() if name != "t")]
    expected, last = layer(x, start)
    wanted = gradients(expected, present(last), leaves)
    outputs, state = [], start
    for part in x.tensor_split(cuts):
        output, state = layer(part, state)
        outputs.append(output)
    close(torch.cat(outputs), expected, 1e-12)
    for name, value in present(last).items():
        close(present(state)[name].double(), value.double(), 1e-12)
    for one, another in zip(gradients(torch.cat(outputs), present(state), leaves), wanted, strict=True):
        close(one, another, 1e-10)
    assert not any(value.requires_grad for value in present(state.detach()).values())


def test_packed_parts_continue():
    """Truncated backpropagation over sequences of unequal lengths: t counts each sequence's own samples."""
    for rule in ("NAG", "SR", "AdaptiveMomentum"):
        layer, _ = make_pair("lstm", rule)
        x = make_input(9)
        lengths = [9, 6, 4]
        whole, _ = layer(pack_padded_sequence(x, torch.tensor(lengths)))
        _, state = layer(pack_padded_sequence(x[:5], torch.tensor([5, 4, 2])))
        rest = torch.stack([nn.functional.pad(x[n:, b], (0, 0, 0, n))[:4] for b, n in enumerate((5, 4, 2))], dim=1)
        output, last = layer(pack_padded_sequence(rest, torch.tensor([4, 2, 2])), state)
        found, expected = pad_packed_sequence(output)[0], pad_packed_sequence(whole)[0]
        for b, (start, length) in enumerate(zip((5, 4, 2), lengths, strict=True)):
            close(found[: length - start, b], expected[start:length, b], 1e-13)
        if rule != "AdaptiveMomentum":
            assert last.t.tolist() == lengths


def test_dropout_between_layers_in_training_only():
    torch.manual_seed(1)
    layer, _ = make_pair("lstm", "Momentum", layers=2, hidden=20, dropout=0.5)
    x = make_input()
    one, another = layer(x)[0], layer(x)[0]
    assert not torch.equal(one, another)
    layer.eval()
    expected, _ = layer(x)
    assert torch.equal(layer(x)[0], expected)
    layer.dropout = 0.0
    layer.train()
    close(layer(x)[0], expected, 1e-14)
    single, _ = make_pair("lstm", "Momentum", layers=2, hidden=20)
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


# States


def test_a_state_may_be_h_or_h_and_c():
    x = make_input()
    h, c = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    layer, _ = make_pair("lstm", "Adam", layers=2)
    zero = layer(x)[1]
    assert zero.v.shape == zero.m.shape == (2, 3, 12)
    wide = torch.zeros(2, 3, 12, dtype=torch.float64)
    full = dataclasses.replace(zero, h=h, c=c, v=wide, m=wide)
    expected, _ = layer(x, full)
    assert torch.equal(layer(x, (h, c))[0], expected)
    expected, _ = layer(x, dataclasses.replace(full, c=torch.zeros_like(h)))
    assert torch.equal(layer(x, h)[0], expected)
    rnn, _ = make_pair("rnn", "SR", layers=2)
    fresh = dataclasses.replace(
        rnn(x)[1], h=h, v=torch.zeros(2, 3, 3, dtype=torch.float64), t=torch.zeros(3, dtype=torch.int64)
    )
    close(rnn(x, h)[0], rnn(x, fresh)[0], 1e-13)


@pytest.mark.parametrize("space", SPACES)
def test_shapes_of_the_state(space):
    x = make_input()
    for cell, factor in {"rnn": 1, "lstm": 4, "gru": 3, "dtriv": 1}.items():
        width = 3 if space == "hidden" else 3 * factor
        for rule in RULES:
            layer, _ = make_pair(cell, rule, layers=2, bidirectional=True, space=space)
            output, state = layer(x)
            assert output.shape == (7, 3, 6)
            shapes = {name: tuple(value.shape) for name, value in present(state).items()}
            expected = {"h": (4, 3, 3)} | ({"c": (4, 3, 3)} if cell == "lstm" else {})
            expected |= {} if rule == "RMSProp" else {"v": (4, 3, width)}
            expected |= {"m": (4, 3, width)} if rule in ("Adam", "RMSProp") else {}
            expected |= {"g": (4, 3, width)} if rule == "AdaptiveMomentum" else {}
            assert shapes == expected | ({"t": (3,)} if rule in ("NAG", "SR") else {})
            if state.t is not None:
                assert state.t.dtype == torch.int64
                assert state.t.tolist() == [7, 7, 7]


# Initialisation


def test_initialisation_of_an_lstm():
    """Appendices A and F: orthogonal W, eye_ on all of U (its first block), biases 0 but both forget slices."""
    layer = recurrent.MomentumLSTM(5, 4, 2, bidirectional=True, forget_bias=-4.0)
    for end in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        weight = getattr(layer, "weight_ih" + end).detach()
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), rtol=0, atol=1e-5)
        assert torch.equal(getattr(layer, "weight_hh" + end), torch.eye(16, 4))
        for name in ("bias_ih", "bias_hh"):
            assert getattr(layer, name + end).tolist() == [0.0] * 4 + [-4.0] * 4 + [0.0] * 8
    cell = recurrent.AdamLSTMCell(3, 4)
    assert cell.bias_ih.tolist() == cell.bias_hh.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


@pytest.mark.parametrize("name", ["MomentumRNN", "MomentumGRU", "NAGRNN", "RMSPropGRU"])
def test_initialisation_of_the_others(name):
    layer = getattr(recurrent, name)(2, 4)
    weight = layer.weight_ih_l0.detach()
    torch.testing.assert_close(weight.T @ weight, torch.eye(2), rtol=0, atol=1e-5)
    assert torch.equal(layer.weight_hh_l0, torch.eye(*layer.weight_hh_l0.shape))
    assert not layer.bias_ih_l0.any()
    assert not layer.bias_hh_l0.any()


def test_names_are_public():
    for rule in ("Momentum", "NAG", "SR", "Adam", "RMSProp", "AdaptiveMomentum"):
        for cell in CELLS.values():
            for suffix in ("", "Cell"):
                assert getattr(hbnode, rule + cell + suffix) is getattr(recurrent, rule + cell + suffix)
                assert rule + cell + suffix in hbnode.__all__
                assert getattr(recurrent, rule + cell + suffix).__doc__
    assert hbnode.DTRIV is recurrent.DTRIV


# Number formats and transforms


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


@some_layers
def test_gradcheck(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input(4, 2)
    state, entries = make_state(layer, x)
    names = [name for name in entries if name != "t"]

    def call(x, *values):
        start = dataclasses.replace(state, **dict(zip(names, values, strict=True)))
        output, last = layer(x, start)
        return output, *(value for name, value in present(last).items() if name != "t")

    inputs = (x.requires_grad_(), *(entries[name] for name in names))
    assert torch.autograd.gradcheck(call, inputs)


@every_rule
def test_gradcheck_of_parameters(rule):
    layer, _ = make_pair("lstm", rule)
    x = make_input(4, 2)
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(*values):
        output, last = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return output, last.h

    assert torch.autograd.gradcheck(call, values)


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


@every_rule
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


# What is not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
@every_rule
def test_what_is_not_finite_changes_nothing_before_its_time(rule, value):
    for cell in CELLS:
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


@every_rule
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


@pytest.mark.parametrize("name", ["LSTM", "MomentumLSTM", "NAGLSTM", "SRLSTM"])
def test_gradients_of_what_comes_before_an_infinite_sample(name):
    """Finite as those of torch.nn.LSTM, but for the weights of the infinite input: 0 * inf."""
    layer = (nn.LSTM if name == "LSTM" else getattr(recurrent, name))(2, 3).double()
    x = make_input(60).requires_grad_()
    leaves = [x, *(p for key, p in layer.named_parameters() if not key.startswith("weight_ih"))]
    expected = torch.autograd.grad(layer(x)[0][:50].sum(), leaves)
    with torch.no_grad():
        x[50, 1, 0] = math.inf
    found = torch.autograd.grad(layer(x)[0][:50].sum(), leaves)
    for one, another in zip(found, expected, strict=True):
        close(one, another, 1e-13)


# What is refused


def test_refusals():
    layer, _ = make_pair("lstm", "Momentum")
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
    ("name", "options"),
    [
        ("MomentumLSTM", {"momentum": -0.1}),
        ("MomentumLSTM", {"momentum": 1.1}),
        ("MomentumLSTM", {"step_size": 0.0}),
        ("MomentumLSTM", {"step_size": float("nan")}),
        ("MomentumLSTM", {"momentum_space": "weights"}),
        ("MomentumLSTM", {"dropout": 1.5}),
        ("MomentumLSTM", {"num_layers": 0}),
        ("MomentumRNN", {"nonlinearity": "sigmoid"}),
        ("SRLSTM", {"restart": 0}),
        ("SRLSTM", {"restart": 2.5}),
        ("AdamLSTM", {"beta": 1.0}),
        ("AdamLSTM", {"eps": 0.0}),
        ("RMSPropLSTM", {"eps": -1.0}),
        ("AdaptiveMomentumLSTM", {"delta": 2.0}),
        ("MomentumDTRIV", {"init": "saxe"}),
    ],
    ids=str,
)
def test_arguments_refused(name, options):
    (argument,) = options
    with pytest.raises((TypeError, ValueError), match=rf"{argument} must be .*got"):
        getattr(recurrent, name)(2, 3, **options)


@pytest.mark.parametrize(
    ("name", "option"), [("NAGLSTM", "momentum"), ("MomentumLSTM", "nonlinearity"), ("DTRIV", "step_size")]
)
def test_arguments_of_others_are_refused(name, option):
    with pytest.raises(TypeError, match=option):
        getattr(recurrent, name)(2, 3, **{option: 0.5})


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
    ("cell", "rule", "space"),
    [
        ("lstm", "Momentum", "gates"),
        ("lstm", "Adam", "gates"),
        ("rnn", "AdaptiveMomentum", "gates"),
        ("gru", "RMSProp", "gates"),
        ("dtriv", "SR", "gates"),
        ("dtriv", "Adam", "hidden"),
    ],
)
def test_compiled_by_inductor(cell, rule, space):
    layer, _ = make_pair(cell, rule, space=space)
    compiled, _ = make_pair(cell, rule, space=space, compile=True)
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
@pytest.mark.parametrize("rule", ["Momentum", "Adam"])
def test_torch_compile_with_inductor(rule):
    layer, _ = make_pair("lstm", rule)
    x = make_input().requires_grad_()
    expected, _ = layer(x)
    output, _ = torch.compile(layer)(x)
    close(output, expected, 1e-12)
    leaves = [x, *layer.parameters()]
    for one, another in zip(gradients(output, {}, leaves), gradients(expected, {}, leaves), strict=True):
        close(one, another, 1e-10)


# Devices and processes


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


def test_autocast_where_the_cpu_has_no_lstm_in_half_precision(monkeypatch):
    """torch's layer runs in float32 there; in float16 no CPU of today has one."""
    layer, _ = make_pair("lstm", "Momentum")
    layer.float()
    x = make_input().float()
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.float16):
        layer(x)[0].float().sum().backward()
    monkeypatch.setattr(autocast, "_runs_on_cpu", lambda stock, dtype: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x)
    assert torch.equal(output, expected)


def test_shapes_on_the_meta_device():
    for name in ("MomentumLSTM", "AdamGRU", "SRDTRIV"):
        layer = getattr(recurrent, name)(2, 3, 2, device="meta")
        output, state = layer(torch.empty(40, 5, 2, device="meta"))
        assert output.shape == (40, 5, 3)
        assert layer(torch.empty(40, 5, 2, device="meta"), state)[0].is_meta


# What a review found


@pytest.mark.parametrize("numbers", [{"restart": 17}, {"restart": 5}])
def test_a_carried_momentum_fades_at_the_right_times(numbers):
    """Of a schedule, t goes on in the part that runs as torch's layer, after v_0 has decayed."""
    layer = hbnode.SRLSTM(2, 3, step_size=0.6, **numbers).double()
    x = make_input(103)
    whole, last = layer(x)
    _, state = layer(x[:39])
    second, end = layer(x[39:], state)
    close(second, whole[39:], 1e-12)
    close(end.v, last.v, 1e-12)


def test_a_large_momentum_that_is_carried_over_fades_in_full():
    layer = hbnode.MomentumLSTM(2, 3)
    x = 1e6 * make_input(1).float(), make_input(100).float()
    _, state = layer(x[0])
    after, end = layer(x[1], state)
    cell = hbnode.MomentumLSTMCell(2, 3)
    cell.load_state_dict({name[:-3]: value for name, value in layer.state_dict().items()})
    stepped = state.map(lambda z: z[0])
    for sample in x[1]:
        h, stepped = cell(sample, stepped)
    torch.testing.assert_close(after[-1], h, rtol=0, atol=1e-5)
    torch.testing.assert_close(end.v[0], stepped.v, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["AdamLSTM", "MomentumDTRIV", "RMSPropGRU"])
def test_training_after_inference_mode_and_no_second_derivative(name, monkeypatch):
    monkeypatch.setattr(executor, "SMALL_PRODUCT", 0)
    layer = getattr(hbnode, name)(2, 3)
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
    layer = hbnode.MomentumRNN(2, 3).double()
    x = make_input(12).requires_grad_()
    (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert layer.weight_ih_l0.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["AdamLSTM", "RMSPropLSTM", "AdaptiveMomentumLSTM", "NAGLSTM"])
def test_half_precision_keeps_its_memory_in_float32(name, dtype):
    layer, cell = (getattr(hbnode, name + suffix)(2, 3, dtype=dtype) for suffix in ("", "Cell"))
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


@pytest.mark.parametrize("name", ["MomentumLSTM", "AdamGRU"])
@pytest.mark.parametrize("options", [{"momentum_space": "hidden"}, {"batch_first": True, "num_layers": 2}], ids=str)
def test_to_stock_with_options(name, options):
    layer = getattr(hbnode, name)(2, 3, **options).double()
    x = make_input(9)
    close(layer.to_stock()(x)[0], layer(x)[0], 1e-12)


@pytest.mark.parametrize("name", ["MomentumLSTM", "AdamGRU", "SRLSTMCell"])
def test_weight_norm_of_rows_of_zeros_is_refused(name):
    layer = getattr(hbnode, name)(2, 3)
    weight = "weight_hh" if name.endswith("Cell") else "weight_hh_l0"
    x = torch.randn(5, 2)
    bad = nn.utils.parametrizations.weight_norm(copy.deepcopy(layer), weight)
    with pytest.raises(ValueError, match=rf"weight_norm makes NaN of {weight}.*Fix: torch.nn.init.orthogonal_"):
        bad(x)
    nn.init.orthogonal_(getattr(layer, weight))
    nn.utils.parametrizations.weight_norm(layer, weight)
    assert layer(x)[0].isfinite().all()


def test_initial_weights_are_drawn_anew_under_a_parametrization():
    layer = hbnode.MomentumLSTM(2, 3)
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    layer.reset_parameters()
    torch.testing.assert_close(layer.weight_hh_l0[:3], torch.eye(3))
    assert torch.equal(layer.bias_hh_l0[3:6], torch.ones(3))


# The state as torch.nn's


def head():
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


@pytest.mark.parametrize("cell", ["rnn", "gru", "dtriv"])
def test_the_state_is_read_as_the_h_of_torch(cell):
    layer, _ = make_pair(cell, "Adam", layers=2)
    output, state = layer(make_input())
    h = state.h
    assert torch.equal(state[-1], output[-1])
    assert torch.equal(torch.cat([state[-2], state[-1]], 1), torch.cat([h[0], h[1]], 1))
    assert torch.equal(head()(state), head()(h))
    assert torch.equal(head()(state[-1]), head()(h[-1]))
    assert torch.equal(torch.cat([state, h]), torch.cat([h, h]))
    assert torch.equal(nn.functional.relu(state), h.relu())
    assert (state.shape, state.dtype, state.device, len(state)) == (h.shape, h.dtype, h.device, 2)
    assert torch.equal(state.transpose(0, 1).flatten(1), h.transpose(0, 1).flatten(1))
    first, second = state
    assert torch.equal(torch.stack([first, second]), h)
    assert (numpy.asarray(state.detach()) == h.detach().numpy()).all()


def test_the_state_of_an_lstm_is_the_pair_of_torch():
    layer, _ = make_pair("lstm", "Momentum", layers=2)
    output, (h, c) = layer(make_input())
    _, state = layer(make_input())
    assert torch.equal(h[-1], output[-1])
    assert len(state) == 2
    assert state[0] is state.h
    assert state[1] is state.c
    assert c.shape == (2, 3, 3)
    nn.LSTM(2, 3, 2).double()(make_input(), tuple(state))


REFUSED = {
    "mask": lambda state: state * torch.ones(3, 1),
    "mask first": lambda state: torch.ones(3, 1) * state,
    "select": lambda state: state.index_select(1, torch.tensor([0])),
    "where": lambda state: torch.where(torch.ones(3, 1) > 0, state, 0.0),
    "assign": lambda state: state.__setitem__(0, 0.0),
    "data": lambda state: state.data,
    "zero_": lambda state: state.zero_(),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_what_would_leave_the_momentum_behind_is_refused(cell, use):
    _, state = make_pair(cell, "Momentum")[0](make_input())
    with pytest.raises((TypeError, AttributeError), match=r"RecurrentState carries .*v beside h\. Fix: state\.h"):
        use(state)


def test_what_an_lstm_state_has_not():
    _, state = make_pair("lstm", "Momentum")[0](make_input())
    for use in (lambda: state.shape, lambda: head()(state), lambda: numpy.asarray(state)):
        with pytest.raises((TypeError, AttributeError), match=r"Fix: state\.h"):
            use()
    with pytest.raises(IndexError, match=r"pair \(h, c\).*Fix: state\.h\[-1\]"):
        state[-1]


def test_plain_states_that_are_refused_say_what_to_pass():
    x = make_input()
    gru, _ = make_pair("gru", "Momentum", layers=2)
    _, state = gru(x)
    with pytest.raises(TypeError, match=r"tuple of \(Tensor, Tensor\). Fix: .*state\.detach\(\)"):
        gru(x, tuple(h.detach() for h in state))  # the repackage_hidden of torch's examples
    cell, _ = make_pair("lstm", "Momentum", suffix="Cell")
    h, c = cell(x[0])  # as of torch.nn.LSTMCell
    with pytest.raises(TypeError, match=r"\(Tensor, RecurrentState\). Fix: output, state = cell"):
        cell(x[1], (h, c))
    with pytest.raises(TypeError, match="Fix: return the output alone"):
        nn.parallel.gather([state, state], "cpu")


@pytest.mark.parametrize("rule", ["SR", "Adam", "AdaptiveMomentum"])
def test_a_state_is_copied_moved_and_loaded_whole(rule, tmp_path):
    layer, _ = make_pair("lstm", rule)
    x = make_input()
    _, state = layer(x)
    expected, _ = layer(x, state)
    torch.save({"state": state}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
    for copied in (loaded, pickle.loads(pickle.dumps(state.detach())), copy.deepcopy(state.detach()), state.cpu()):
        assert torch.equal(layer(x, copied)[0], expected)
    half = state.to(torch.bfloat16)
    assert {name: z.dtype for name, z in half.as_dict().items()} == {
        "h": torch.bfloat16,
        "c": torch.bfloat16,
        **{name: torch.int64 if name == "t" else torch.float32 for name in layer.rule.memory},
    }
    copy.deepcopy(layer).bfloat16()(x.bfloat16(), half)
    assert all(z.device.type == "meta" for z in state.to("meta").as_dict().values())
    assert repr(state).startswith("RecurrentState(h=(1, 3, 3), c=(1, 3, 3), ")
    assert layer.rule.memory == tuple(name for name, z in state.as_dict().items() if name not in "hc")


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, unless warnings are errors
def test_a_state_passes_through_transforms():
    cell, _ = make_pair("lstm", "NAG", suffix="Cell")
    x = make_input(2)
    _, state = cell(x[0])
    expected, last = cell(x[1], state)
    compiled = torch.compile(cell, backend="eager", fullgraph=True)
    for call in (compiled, torch.vmap(cell), lambda *given: checkpoint(cell, *given, use_reentrant=False)):
        output, end = call(x[1], state)
        close(output, expected, 1e-14)
        close(end.v, last.v, 1e-14)
        assert torch.equal(end.t, last.t)


# Calls as torch.nn's


@pytest.mark.parametrize(
    ("cell", "arguments"),
    [
        ("lstm", (2, 3, 2, False, True, 0.5, True)),
        ("gru", (2, 3, 2, False, True, 0.5, True)),
        ("rnn", (2, 3, 2, "relu", False, True, 0.5, True)),
    ],
)
def test_arguments_by_position_are_torchs(cell, arguments):
    ours, theirs = plain(cell, *arguments).eval(), STOCK[cell](*arguments).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = make_input().transpose(0, 1)
    close(ours(x)[0], theirs(x)[0], 1e-13)
    assert ours.dropout == 0.5
    ours.flatten_parameters()
    h, c = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    start = (h, c) if cell == "lstm" else h
    close(ours(x, hx=start)[0], theirs(x, hx=start)[0], 1e-13)


def test_arguments_of_a_cell_by_position():
    for name, numbers, rest in (
        ("MomentumLSTMCell", {"momentum": 0.9, "step_size": 0.5}, ()),
        ("NAGGRUCell", {"step_size": 0.5}, ()),
        ("SRRNNCell", {"restart": 7, "step_size": 0.5}, ("relu",)),
        ("AdamLSTMCell", {"momentum": 0.9, "step_size": 0.5, "beta": 0.8, "eps": 1e-4}, ()),
        ("RMSPropGRUCell", {"step_size": 0.5, "beta": 0.8, "eps": 1e-4}, ()),
        ("AdaptiveMomentumLSTMCell", {"step_size": 0.5, "delta": 0.1}, ()),
    ):
        cell = getattr(hbnode, name)(3, 4, *numbers.values(), False, *rest)
        assert dataclasses.asdict(cell.rule) == numbers
        assert not cell.has_bias
    assert hbnode.MomentumDTRIVCell(3, 4, 0.9, 0.5).rule == recurrent.rules.Momentum(0.9, 0.5)
    x, (h, c) = make_input(1).float()[0], torch.randn(2, 3, 3)
    cell = hbnode.MomentumLSTMCell(2, 3)
    assert torch.equal(cell(x, hx=(h, c))[0], cell(x, (h, c))[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hbnode.MomentumLSTM(10, 20, 1, 0.9, 0.6), "bias must be True or False, got 0.9. Fix: .*momentum="),
        (lambda: hbnode.MomentumLSTM(10, 20, 0.9, 0.6), "num_layers"),
        (lambda: hbnode.MomentumRNN(10, 20, 2, True, True), "nonlinearity must be"),
        (lambda: hbnode.MomentumLSTMCell(10, 20, False), "momentum must be in"),
        (lambda: hbnode.MomentumLSTMCell(10, 20, 0.9, 0.6, 0.9), "bias must be True or False"),
        (lambda: hbnode.MomentumLSTM(10, 20, proj_size=5), r"proj_size must be 0.*Fix: .*Linear\(hidden_size"),
        (lambda: hbnode.MomentumLSTM(2, 3)(make_input().float(), torch.zeros(1, 3, 3), hx=0), "two names"),
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@every_rule
def test_traced_plain_layers_take_any_length(rule):
    layer, _ = make_pair("gru", rule, bidirectional=True)
    traced = torch.jit.trace(layer.to_stock(), make_input(), check_trace=False)
    for time in (1, 32, 1100):
        x = make_input(time, 2)
        if time == 32:
            x[20, 0, 1] = torch.nan
        output, (expected, _) = traced(x)[0], layer(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12, equal_nan=True)


def test_the_filter_is_exported_for_any_length_and_batch():
    layer, _ = make_pair("lstm", "NAG")
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
