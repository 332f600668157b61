"""States of the momentum recurrent layers: carried, read as torch.nn's, copied, refused."""

import copy
import dataclasses
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import hbnode
from tests.momentum_layers import (
    close,
    every_layer,
    gradients,
    make_input,
    make_pair,
    make_state,
    present,
    some_layers,
)


def test_a_state_may_be_h_or_h_and_c():
    x = make_input()
    h, c = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    layer, _ = make_pair("lstm", "adam", layers=2)
    zero = layer(x)[1]
    assert zero.v.shape == zero.m.shape == (2, 3, 12)
    wide = torch.zeros(2, 3, 12, dtype=torch.float64)
    full = dataclasses.replace(zero, h=h, c=c, v=wide, m=wide)
    expected, _ = layer(x, full)
    assert torch.equal(layer(x, (h, c))[0], expected)
    expected, _ = layer(x, dataclasses.replace(full, c=torch.zeros_like(h)))
    assert torch.equal(layer(x, h)[0], expected)
    rnn, _ = make_pair("rnn", "restart", layers=2)
    fresh = dataclasses.replace(
        rnn(x)[1], h=h, v=torch.zeros(2, 3, 3, dtype=torch.float64), t=torch.zeros(3, dtype=torch.int64)
    )
    close(rnn(x, h)[0], rnn(x, fresh)[0], 1e-13)


@every_layer
def test_shapes_of_the_state(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True)
    output, state = layer(make_input())
    assert output.shape == (7, 3, 6)
    wide = (4, 3, 3 * layer.step.gates)
    expected = {"h": (4, 3, 3)} | ({"c": (4, 3, 3)} if cell == "lstm" else {})
    expected |= {name: (3,) if name == "t" else wide for name in layer.rule.memory}
    assert {name: tuple(value.shape) for name, value in present(state).items()} == expected
    if state.t is not None:
        assert state.t.dtype == torch.int64
        assert state.t.tolist() == [7, 7, 7]


def head():
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


@pytest.mark.parametrize("cell", ["rnn", "gru", "dtriv"])
def test_the_state_is_read_as_the_h_of_torch(cell):
    layer, _ = make_pair(cell, "adam", layers=2)
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
    layer, _ = make_pair("lstm", "momentum", layers=2)
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
    _, state = make_pair(cell, "momentum")[0](make_input())
    with pytest.raises((TypeError, AttributeError), match=r"RecurrentState carries .*v beside h\. Fix: state\.h"):
        use(state)


def test_what_an_lstm_state_has_not():
    _, state = make_pair("lstm", "momentum")[0](make_input())
    for use in (lambda: state.shape, lambda: head()(state), lambda: numpy.asarray(state)):
        with pytest.raises((TypeError, AttributeError), match=r"Fix: state\.h"):
            use()
    with pytest.raises(IndexError, match=r"pair \(h, c\).*Fix: state\.h\[-1\]"):
        state[-1]


def test_plain_states_that_are_refused_say_what_to_pass():
    x = make_input()
    gru, _ = make_pair("gru", "momentum", layers=2)
    _, state = gru(x)
    with pytest.raises(TypeError, match=r"tuple of \(Tensor, Tensor\). Fix: .*state\.detach\(\)"):
        gru(x, tuple(h.detach() for h in state))  # the repackage_hidden of torch's examples
    cell, _ = make_pair("lstm", "momentum", suffix="Cell")
    h, c = cell(x[0])  # as of torch.nn.LSTMCell
    with pytest.raises(TypeError, match=r"\(Tensor, RecurrentState\). Fix: output, state = cell"):
        cell(x[1], (h, c))
    with pytest.raises(TypeError, match="Fix: return the output alone"):
        nn.parallel.gather([state, state], "cpu")


@pytest.mark.parametrize("rule", ["restart", "adam", "adaptive"])
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
    cell, _ = make_pair("lstm", "nag", suffix="Cell")
    x = make_input(2)
    _, state = cell(x[0])
    expected, last = cell(x[1], state)
    compiled = torch.compile(cell, backend="eager", fullgraph=True)
    for call in (compiled, torch.vmap(cell), lambda *given: checkpoint(cell, *given, use_reentrant=False)):
        output, end = call(x[1], state)
        close(output, expected, 1e-14)
        close(end.v, last.v, 1e-14)
        assert torch.equal(end.t, last.t)


def test_packed_parts_continue():
    """Truncated backpropagation over sequences of unequal lengths: t counts each sequence's own samples."""
    for rule in ("nag", "restart", "adaptive"):
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
        if rule != "adaptive":
            assert last.t.tolist() == lengths


@some_layers
def test_in_parts_is_at_once(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2)
    x = make_input(13).requires_grad_()
    start, entries = make_state(layer, x)
    leaves = [x, *layer.parameters(), *(value for name, value in entries.items() if name != "t")]
    expected, last = layer(x, start)
    wanted = gradients(expected, present(last), leaves)
    outputs, state = [], start
    for part in x.tensor_split((1, 6, 11)):
        output, state = layer(part, state)
        outputs.append(output)
    close(torch.cat(outputs), expected, 1e-12)
    for name, value in present(last).items():
        close(present(state)[name].double(), value.double(), 1e-12)
    for one, another in zip(gradients(torch.cat(outputs), present(state), leaves), wanted, strict=True):
        close(one, another, 1e-10)
    assert not any(value.requires_grad for value in present(state.detach()).values())


@pytest.mark.parametrize("restart", [17, 5])
def test_a_carried_momentum_fades_at_the_right_times(restart):
    """Of a schedule, t goes on in the part that runs as torch's layer, after v_0 has decayed."""
    layer = hbnode.nn.MomentumLSTM(2, 3, rule=hbnode.nn.rules.ScheduledRestart(restart, 0.6)).double()
    x = make_input(103)
    whole, last = layer(x)
    _, state = layer(x[:39])
    second, end = layer(x[39:], state)
    close(second, whole[39:], 1e-12)
    close(end.v, last.v, 1e-12)


def test_a_large_momentum_that_is_carried_over_fades_in_full():
    layer = hbnode.nn.MomentumLSTM(2, 3)
    x = 1e6 * make_input(1).float(), make_input(100).float()
    _, state = layer(x[0])
    after, end = layer(x[1], state)
    cell = hbnode.nn.MomentumLSTMCell(2, 3)
    cell.load_state_dict({name[:-3]: value for name, value in layer.state_dict().items()})
    stepped = state.map(lambda z: z[0])
    for sample in x[1]:
        h, stepped = cell(sample, stepped)
    torch.testing.assert_close(after[-1], h, rtol=0, atol=1e-5)
    torch.testing.assert_close(end.v[0], stepped.v, rtol=0, atol=1e-4)
