"""The recurrent layers and cells: values, gradients, arguments, states, number formats, programs."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import hbnode
from hbnode import _torch
from hbnode.nn import recurrent, rules
from tests.models import slow
from tests.momentum_layers import (
    PAIRS,
    RULES,
    TORCH,
    assert_equal_to_twin,
    close,
    every_layer,
    every_way,
    gradients,
    kind,
    make_input,
    make_pair,
    make_state,
    some_layers,
)


def without_momentum(cell, *arguments, **options):
    """A layer or cell that is to be torch.nn's."""
    return kind(cell, suffix=options.pop("suffix", ""))(*arguments, momentum=0.0, step_size=1.0, **options).double()


# Values and gradients


@every_layer
def test_values_and_gradients(cell, rule):
    layer, twin = make_pair(cell, rule)
    for time in (1, 7):
        assert_equal_to_twin(layer, twin, make_input(time))
    x = make_input(60)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


@pytest.mark.parametrize(("cell", "rule"), [*PAIRS, ("gru", "restart"), ("lstm", "rmsprop")])
def test_layers_directions_and_lengths(cell, rule):
    layer, twin = make_pair(cell, rule, layers=2, bidirectional=True)
    x = make_input(9, 4)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))
    assert_equal_to_twin(layer, twin, x, make_state(layer, x), lengths=[5, 9, 1, 6])


@dataclasses.dataclass(frozen=True)
class Shrinking(rules.Rule):
    half_life: float = 9.0

    memory = ("t",)

    def filter(self, g, memory):
        t = torch.arange(1, len(g) + 1).unsqueeze(1) + memory.t
        return g * 0.5 ** (t / self.half_life).unsqueeze(-1), rules.RuleState(t=memory.t + len(g))


@pytest.mark.parametrize(("cell", "rule"), [*((cell, RULES[rule]) for cell, rule in PAIRS), ("gru", Shrinking())])
def test_a_cell_step_by_step_is_the_layer(cell, rule):
    layer, one = (kind(cell, suffix=suffix)(2, 3, rule=rule).double() for suffix in ("", "Cell"))
    one.load_state_dict({name.replace("_l0", ""): value for name, value in layer.state_dict().items()})
    x = make_input(100)
    expected, last = layer(x)
    outputs, state, alone = [], None, None
    for row in x:
        h, state = one(row, state)
        h_alone, alone = one(row[1], alone)
        outputs.append(h)
    outputs = torch.stack(outputs)
    close(outputs, expected, 1e-12)
    close(h_alone, h[1], 1e-13)
    for name, value in state.as_dict().items():
        end = getattr(last, name)
        close(value.double(), end.double() if name == "t" else end[0].double(), 1e-12)
    slopes = (
        torch.autograd.grad(y.square().sum(), list(m.parameters())) for y, m in ((outputs, one), (expected, layer))
    )
    close(*slopes, 1e-10)
    first, state = layer(x[:50])
    close(torch.cat([first, layer(x[50:], state)[0]]), expected, 1e-12)


@pytest.mark.parametrize(("cell", "rule"), [("lstm", "adam"), ("dtriv", "momentum"), ("gru", "nag")])
def test_second_derivatives_and_forward_mode(cell, rule):
    layer, twin = make_pair(cell, rule)
    x, along = make_input(4, 1).requires_grad_(), make_input(4, 1)

    def second(output):
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    forward = lambda function: torch.func.jvp(lambda x: function(x)[0], (x.detach(),), (along,))[1]
    expected, tangent = second(twin(layer, x)[0]), forward(lambda x: twin(layer, x))
    for _ in every_way():
        with _torch.double_backward():
            close(second(layer(x)[0]), expected, 1e-10)
        if cell != "lstm":  # of which oneDNN's has no forward mode
            close(forward(layer), tangent, 1e-12)


# Beside torch.nn's layers


@pytest.mark.sparse
@pytest.mark.parametrize(
    ("cell", "options"),
    [*((c, x) for x in ({}, {"bias": False, "bidirectional": True}) for c in TORCH), ("rnn", {"nonlinearity": "relu"})],
    ids=str,
)
def test_without_momentum_it_is_torchs_layer(cell, options):
    options = options | {"num_layers": 2, "batch_first": True, "dropout": 0.5}
    ours, theirs = without_momentum(cell, 2, 3, **options).eval(), TORCH[cell](2, 3, **options).double().eval()
    for one, other in ((theirs, ours), (ours, theirs)):  # either loads the other's weights
        one.reset_parameters()
        other.load_state_dict(one.state_dict())
    ours.flatten_parameters()
    x = make_input().transpose(0, 1).requires_grad_()
    h, c = torch.randn(2, 2 * len(ours.directions), 3, 3, dtype=torch.float64)
    start = (h, c) if cell == "lstm" else h
    (output, state), (expected, last) = ours(x, hx=start), theirs(x, hx=start)
    close(output, expected, 1e-13)
    close((state.h, state.c) if cell == "lstm" else state.h, last, 1e-13)
    names = [name for name, _ in ours.named_parameters()]
    wanted = gradients(expected, {}, [x, *map(theirs.get_parameter, names)])
    close(gradients(output, {}, [x, *ours.parameters()]), wanted, 1e-11)


@some_layers
def test_batch_first_and_unbatched(cell, rule):
    layer, first = (make_pair(cell, rule, layers=2, bidirectional=True, batch_first=b)[0] for b in (False, True))
    first.load_state_dict(layer.state_dict())
    x = make_input()
    state, entries = make_state(layer, x)
    expected, last = layer(x, state)
    output, other = first(x.transpose(0, 1), state)
    close((output, other.h), (expected.transpose(0, 1), last.h), 1e-13)
    single = recurrent.RecurrentState(**{name: s[1] if name == "t" else s[:, 1] for name, s in entries.items()})
    for one in (layer, first):
        output, alone = one(x[:, 1], single)
        close((output, alone.h), (expected[:, 1], last.h[:, 1]), 1e-13)
        assert alone.t is None or alone.t == last.t[1]


def test_dropout_between_layers_in_training_only():
    """The second layer takes the first's output with a share p at zero and the rest 1/(1-p) as large."""
    layer, x = without_momentum("rnn", 2, 500, num_layers=2, dropout=0.25), make_input(1, 4)
    nn.init.eye_(layer.weight_ih_l1)
    nn.init.zeros_(layer.weight_hh_l1)
    layer.weight_ih_l0.data.mul_(0.1)
    dropped, exact = layer(x)[0].atanh(), layer.eval()(x)[0].atanh()
    zero = dropped == 0
    assert abs(zero.double().mean().item() - 0.25) < 0.05
    close(dropped[~zero], exact[~zero] / 0.75, 1e-7)


# Initial weights


def test_initialisation_of_an_lstm():
    """Appendices A and F: orthogonal W, eye_ on all of U (its first block), biases 0 but both forget slices."""
    layer = recurrent.MomentumLSTM(5, 4, 2, bidirectional=True, forget_bias=-4.0)
    for name, parameter in layer.named_parameters():
        if name.startswith("weight_ih"):
            close(parameter.T @ parameter, torch.eye(parameter.shape[1]), 1e-5)
        elif name.startswith("weight_hh"):
            assert torch.equal(parameter, torch.eye(16, 4))
        else:
            assert parameter.tolist() == [0.0] * 4 + [-4.0] * 4 + [0.0] * 8
    cell = recurrent.MomentumLSTMCell(3, 4, rule="adam")
    assert cell.bias_ih.tolist() == cell.bias_hh.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


def test_what_is_refused():
    x = make_input()
    (lstm, _), (gru, _) = make_pair("lstm", "momentum"), make_pair("gru", "restart", layers=2)
    cell, tanh, (_, state) = hbnode.nn.MomentumLSTMCell(2, 3).double(), hbnode.nn.TanhRNN(2, 3).double(), gru(x)
    for message, call in (
        ("positional arguments", lambda: hbnode.nn.MomentumLSTM(2, 3, 1, 0.9)),  # momentum after num_layers
        ("momentum must be in", lambda: hbnode.nn.MomentumLSTMCell(2, 3, False)),  # bias, as of torch.nn.LSTMCell
        (r"\(T, batch, input_size\).*input_size=2.*got.*3\).*Fix: ", lambda: lstm(make_input(inputs=3))),
        ("one sample at a time", lambda: cell(x)),
        (r"read by name.*Fix: state\.h", lambda: state[-1]),
        (r"h0 must be \(1, 3, 3\), got \(3, 3\)", lambda: tanh(x, torch.zeros(3, 3))),
    ):
        with pytest.raises((TypeError, ValueError, AttributeError), match=message):
            call()
    for change in ({"h": state.h[:1]}, {"v": None}, {"m": state.v}, {"h": state.h.float()}, {"t": state.t.double()}):
        with pytest.raises(ValueError, match=rf"state\.{next(iter(change))} must be .*got"):
            gru(x, dataclasses.replace(state, **change))


# States


@pytest.mark.parametrize("rule", ["restart", "adam", "adaptive"])
def test_a_state_is_copied_moved_and_loaded_whole(rule, tmp_path):
    layer, x = make_pair("lstm", rule)[0], make_input()
    _, state = layer(x)
    torch.save({"state": state}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
    for copied in (loaded, pickle.loads(pickle.dumps(state.detach())), copy.deepcopy(state.detach()), state.cpu()):
        assert torch.equal(layer(x, copied)[0], layer(x, state)[0])
    with torch.inference_mode():
        _, frozen = layer(x)
    layer(x, frozen)[0].sum().backward()
    half = state.to(torch.bfloat16)
    memory = {name: torch.int64 if name == "t" else torch.float32 for name in layer.rule.memory}
    kinds = {name: z.dtype for name, z in half.as_dict().items()}
    assert kinds == {"h": torch.bfloat16, "c": torch.bfloat16, **memory}
    layer.bfloat16()(x.bfloat16(), half)


def test_packed_parts_continue():
    """Truncated backpropagation over sequences of unequal lengths: t counts each sequence's own samples."""
    (layer, _), x = make_pair("lstm", "restart"), make_input(9)
    start, middle, end = [0, 0, 0], [2, 5, 4], [4, 9, 6]
    pack = lambda *cut: pack_sequence([x[i:j, b] for b, (i, j) in enumerate(zip(*cut, strict=True))], False)
    whole, _ = layer(pack(start, end))
    first, state = layer(pack(start, middle))
    second, last = layer(pack(middle, end), state)
    parts = zip(unpack_sequence(first), unpack_sequence(second), strict=True)
    close([torch.cat(part) for part in parts], unpack_sequence(whole), 1e-13)
    assert last.t.tolist() == end


# Number formats


# What is not finite


@pytest.mark.parametrize("value", [math.nan, *slow(math.inf)])
@some_layers
def test_what_is_not_finite_changes_nothing_before_its_time(cell, rule, value):
    single, _ = make_pair(cell, rule, layers=2)
    x = make_input(60)
    changed = x.clone()
    changed[50, 1, 0] = value
    for state in (None, make_state(single, x)[0]):
        expected, found = single(x, state)[0], single(changed, state)[0]
        close(found[:50], expected[:50], 1e-13)
        close(found[:, ::2], expected[:, ::2], 1e-13)  # nor another sequence
    layer, _ = make_pair(cell, rule, bidirectional=True)
    pack = lambda z: pack_padded_sequence(z, torch.tensor([60, 55, 60]), enforce_sorted=False)
    found, expected = (pad_packed_sequence(layer(pack(z))[0])[0] for z in (changed, x))
    close(found[:50, 1, :3], expected[:50, 1, :3], 1e-13)
    close(found[51:, 1, 3:], expected[51:, 1, 3:], 1e-13)


# Copies, parametrizations, transforms


def test_weight_norm_of_rows_of_zeros_is_refused():
    layer, x, weight_norm = hbnode.nn.MomentumLSTM(2, 3), torch.randn(5, 2), nn.utils.parametrizations.weight_norm
    with pytest.raises(ValueError, match=r"weight_norm makes NaN of weight_hh_l0.*Fix: torch.nn.init.orthogonal_"):
        weight_norm(copy.deepcopy(layer), "weight_hh_l0")(x)
    nn.init.orthogonal_(layer.weight_hh_l0)
    expected, _ = layer(x)
    weight_norm(layer, "weight_hh_l0")  # a parametrization is read at each call
    torch.testing.assert_close(layer(x)[0], expected)


# Conversion to torch's layers


@pytest.mark.parametrize(
    ("cell", "rule", "options"),
    [
        ("lstm", "momentum", {"layers": 2, "bidirectional": True}),
        ("gru", "rmsprop", {"bias": False, "batch_first": True}),
    ],
)
def test_to_torch(cell, rule, options):
    (layer, _), x = make_pair(cell, rule, **options), make_input(20)
    expected, state = layer(x)
    copied = layer.to_torch()
    assert {type(module) for module in copied.layers} == {TORCH[cell]}
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)  # the copy has its own
    output, last = copied(x)
    close(output, expected, 1e-12)
    close(last, (state.h, state.c) if cell == "lstm" else state.h, 1e-12)
    with pytest.raises(ValueError, match="no layer of the cell of ParametrizedDTRIV"):
        hbnode.nn.DTRIV(2, 3).to_torch()


# TanhRNN


def tanh_loop(rnn, x, h=None):
    """All h (batch, T, n) of x (batch, T, inputs); from h if it is given."""
    found = []
    for x_t in x.unbind(1):
        before = rnn.bias_init if h is None else h @ rnn.weight_hh.T
        h = torch.tanh(x_t @ rnn.weight_ih.T + rnn.bias + before)
        found.append(h)
    return torch.stack(found, 1)


@pytest.mark.parametrize("steps", [1, 6])
def test_values_and_gradients_of_a_tanh_rnn(steps):
    rnn = hbnode.nn.TanhRNN(3, 5, batch_first=True).double()
    x = torch.randn(4, steps, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    for given in ((x,), (x, h0)):
        output, last = rnn(*given)
        expected = tanh_loop(rnn, x, *(h[0] for h in given[1:]))
        close((output, last), (expected, expected[:, -1:].transpose(0, 1)), 1e-13)
        leaves = [*given, *rnn.parameters()]
        close(gradients(output, {}, leaves), gradients(expected, {}, leaves), 1e-12)


def test_packed_sequences_of_a_tanh_rnn():
    rnn = hbnode.nn.TanhRNN(3, 5, batch_first=True).double()
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 6, 4)]
    output, last = rnn(pack_sequence(sequences, enforce_sorted=False))
    for x, h, end in zip(sequences, unpack_sequence(output), last[0], strict=True):
        close((h, end[None]), rnn(x), 1e-13)


def test_a_state_may_be_h_or_h_and_c():
    (layer, _), (rnn, _), x = make_pair("lstm", "adam", layers=2), make_pair("rnn", "restart", layers=2), make_input()
    h, c = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    full = recurrent.RecurrentState(h, c, *torch.zeros(2, 2, 3, 12, dtype=torch.float64))
    close(layer(x, (h, c))[0], layer(x, full)[0], 0)
    close(layer(x, h)[0], layer(x, dataclasses.replace(full, c=torch.zeros_like(h)))[0], 0)
    fresh = recurrent.RecurrentState(h, v=torch.zeros_like(h), t=torch.zeros(3, dtype=torch.int64))
    close(rnn(x, h)[0], rnn(x, fresh)[0], 1e-13)
    h, c = state = layer(x)[1]
    assert (h is state.h, c is state.c, state[1] is c) == (True,) * 3
