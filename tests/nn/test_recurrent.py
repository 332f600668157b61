"""The recurrent layers and cells: values, gradients, arguments, states, number formats, programs."""

import copy
import dataclasses
import inspect
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

import hbnode
from hbnode import _torch
from hbnode.nn import recurrent, rules
from hbnode.nn.recurrent import sparse_
from tests.models import slow
from tests.momentum_layers import (
    CELLS,
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

FORMS = ["", "Cell"]
two_layers = pytest.mark.parametrize(("cell", "rule"), [("lstm", "adam"), ("dtriv", "nag")])


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


@pytest.mark.parametrize(
    "rule", [rules.ScheduledRestart(1, 0.6), rules.Momentum(0.0), rules.Momentum(1.0, 0.1)], ids=str
)
def test_extreme_coefficients(rule, monkeypatch):
    name = "restart" if hasattr(rule, "restart") else "momentum"
    monkeypatch.setitem(RULES, name, rule)
    layer, twin = make_pair("lstm", name)
    x = make_input(200, 2)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


def test_one_weight_in_both_places():
    layer, twin = make_pair("rnn", "momentum", 3, 3, bias=False)
    layer.weight_ih_l0 = layer.weight_hh_l0
    assert_equal_to_twin(layer, twin, make_input(12, inputs=3))


@dataclasses.dataclass(frozen=True)
class Shrinking(rules.Rule):
    half_life: float = 9.0

    memory = ("t",)

    def filter(self, g, memory):
        t = torch.arange(1, len(g) + 1).unsqueeze(1) + memory.t
        return g * 0.5 ** (t / self.half_life).unsqueeze(-1), rules.Memory(t=memory.t + len(g))


@pytest.mark.parametrize(("cell", "rule"), [*((cell, RULES[rule]) for cell, rule in PAIRS), ("gru", Shrinking())])
def test_a_cell_step_by_step_is_the_layer(cell, rule):
    layer, one = (kind(cell, suffix=suffix)(2, 3, rule=rule).double() for suffix in FORMS)
    one.load_state_dict({name.replace("_l0", ""): value for name, value in layer.state_dict().items()})
    x = make_input(100)
    expected, last = layer(x)
    outputs, state, alone = [], None, None
    for row in x:
        h, state = one(row, state)
        h_alone, alone = one(row[1], alone)
        outputs.append(h)
    close(torch.stack(outputs), expected, 1e-12)
    close(h_alone, h[1], 1e-13)
    for name, value in state.as_dict().items():
        end = getattr(last, name)
        assert value.shape == (end.shape if name == "t" else end.shape[1:])
        close(value.double(), end.double().reshape(value.shape), 1e-12)
    first, state = layer(x[:50])
    close(torch.cat([first, layer(x[50:], state)[0]]), expected, 1e-12)
    expected = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    close(torch.autograd.grad(torch.stack(outputs).square().sum(), list(one.parameters())), expected, 1e-10)


@pytest.mark.parametrize(("cell", "rule"), [("lstm", "adam"), ("dtriv", "momentum"), ("gru", "nag")])
def test_second_derivatives(cell, rule):
    layer, twin = make_pair(cell, rule)
    x = make_input(4, 1).requires_grad_()

    def second(output):
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    expected = second(twin(layer, x)[0])
    for _ in every_way():
        with _torch.double_backward():
            close(second(layer(x)[0]), expected, 1e-10)


# Beside torch.nn's layers


@pytest.mark.sparse
@pytest.mark.parametrize("cell", TORCH)
@pytest.mark.parametrize("options", [{}, {"bias": False, "bidirectional": True}, {"nonlinearity": "relu"}], ids=str)
def test_without_momentum_it_is_torchs_layer(cell, options):
    if cell != "rnn" and "nonlinearity" in options:
        return
    options = options | {"num_layers": 2, "batch_first": True, "dropout": 0.5}
    ours, theirs = without_momentum(cell, 2, 3, **options).eval(), TORCH[cell](2, 3, **options).double().eval()
    fresh = copy.deepcopy(ours)
    ours.load_state_dict(theirs.state_dict())
    x = make_input().transpose(0, 1).requires_grad_()
    ours.flatten_parameters()
    h, c = torch.randn(2, 2 * len(ours.directions), 3, 3, dtype=torch.float64)
    start = (h, c) if cell == "lstm" else h
    (output, state), (expected, last) = ours(x, hx=start), theirs(x, hx=start)
    close(output, expected, 1e-13)
    close((state.h, state.c) if cell == "lstm" else state.h, last, 1e-13)
    names = [name for name, _ in ours.named_parameters()]
    wanted = gradients(expected, {}, [x, *map(theirs.get_parameter, names)])
    close(gradients(output, {}, [x, *ours.parameters()]), wanted, 1e-11)
    theirs.load_state_dict(fresh.state_dict())
    close(fresh(x)[0], theirs(x)[0], 1e-13)


@some_layers
def test_batch_first_and_unbatched(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True)
    x = make_input()
    state, entries = make_state(layer, x)
    expected, last = layer(x, state)
    first, _ = make_pair(cell, rule, layers=2, bidirectional=True, batch_first=True)
    first.load_state_dict(layer.state_dict())
    output, other = first(x.transpose(0, 1), state)
    close(output, expected.transpose(0, 1), 1e-13)
    close(other.h, last.h, 1e-13)
    single = recurrent.RecurrentState(**{name: s[1] if name == "t" else s[:, 1] for name, s in entries.items()})
    for one in (layer, first):
        output, alone = one(x[:, 1], single)
        close(output, expected[:, 1], 1e-13)
        for name, value in alone.as_dict().items():
            end = getattr(last, name)
            close(value.double(), (end[1] if name == "t" else end[:, 1]).double(), 1e-13)


def test_dropout_between_layers_in_training_only():
    """The second layer takes the first's output with a share p at zero and the rest 1/(1-p) as large."""
    layer = without_momentum("rnn", 2, 500, num_layers=2, dropout=0.25)
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
    layer.dropout = 0.0
    close(layer.train()(x)[0].atanh(), exact, 1e-14)


@two_layers
def test_an_empty_batch(cell, rule):
    layer, _ = make_pair(cell, rule, layers=2, bidirectional=True, batch_first=True)
    output, state = layer(torch.zeros(0, 7, 2, dtype=torch.float64))
    output, state = layer(torch.zeros(0, 7, 2, dtype=torch.float64), state)
    assert output.shape == (0, 7, 6)
    assert state.h.shape == (4, 0, 3)
    output.sum().backward()
    assert not any(p.grad.any() for p in layer.parameters())


# Initial weights


def test_initialisation_of_an_lstm():
    """Appendices A and F: orthogonal W, eye_ on all of U (its first block), biases 0 but both forget slices."""
    layer = recurrent.MomentumLSTM(5, 4, 2, bidirectional=True, forget_bias=-4.0)
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        weight = getattr(layer, "weight_ih" + suffix).detach()
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), rtol=0, atol=1e-5)
        assert torch.equal(getattr(layer, "weight_hh" + suffix), torch.eye(16, 4))
        for name in ("bias_ih", "bias_hh"):
            assert getattr(layer, name + suffix).tolist() == [0.0] * 4 + [-4.0] * 4 + [0.0] * 8
    cell = recurrent.MomentumLSTMCell(3, 4, rule="adam")
    assert cell.bias_ih.tolist() == cell.bias_hh.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


@pytest.mark.parametrize("cell", ["rnn", "gru"])
def test_initialisation_of_the_others(cell):
    layer = kind(cell)(2, 4, dtype=torch.bfloat16)
    weight = layer.weight_ih_l0.detach().float()
    torch.testing.assert_close(weight.T @ weight, torch.eye(2), rtol=0, atol=0.05)
    assert torch.equal(layer.weight_hh_l0.float(), torch.eye(*layer.weight_hh_l0.shape))
    assert not layer.bias_ih_l0.any()
    assert not layer.bias_hh_l0.any()
    nn.utils.parametrizations.weight_norm(layer, "weight_ih_l0")
    layer.reset_parameters()  # through the parametrization
    assert (layer.weight_ih_l0 != weight).any()


# Arguments


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_has_the_arguments_of_its_layer_for_one_step(cell):
    layer, one = (dict(inspect.signature(kind(cell, suffix=suffix)).parameters) for suffix in FORMS)
    assert set(layer) - set(one) == {"num_layers", "batch_first", "dropout", "bidirectional"}
    assert set(one) <= set(layer)
    assert all(one[name].default == layer[name].default for name in one)
    assert list(one)[:4] == ["input_size", "hidden_size", "momentum", "step_size"]


@pytest.mark.parametrize(
    "name", ["Momentum" + cell + suffix for cell in CELLS.values() for suffix in FORMS] + ["DTRIV"]
)
def test_every_argument_arrives(name):
    """Values off the defaults, each found on the module and in its repr."""
    values = {"hidden_size": 4, "num_layers": 2, "nonlinearity": "relu", "bias": False, "batch_first": True}
    values |= {"dropout": 0.25, "bidirectional": True, "init": "henaff", "forget_bias": 3.0}
    values |= {"rule": rules.Adam(eps=0.1)}
    make = getattr(hbnode.nn, name)
    given = {key: value for key, value in values.items() if key in inspect.signature(make).parameters}
    module = make(3, **given, device="meta", dtype=torch.float64)
    assert {(p.dtype, p.is_meta) for p in module.parameters()} == {(torch.float64, True)}
    for key in set(given) - {"bias"}:
        assert getattr(module, key) == given[key], key
    assert not any(key.startswith("bias_ih") for key, _ in module.named_parameters())
    assert all(f"{key}={given[key]!r}" in repr(module) for key in set(given) - {"rule", "hidden_size"})
    if "rule" in given and "DTRIV" not in name:
        assert f"{name}(3, 4, rule=Momentum(momentum=0.3, step_size=0.6))" in repr(make(3, 4, momentum=0.3))


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        ("MomentumLSTM", (), {"dropout": 1.0, "num_layers": 2}, "dropout must be .*got 1.0"),
        ("MomentumLSTM", (), {"dropout": 0.1}, "dropout needs num_layers >= 2"),
        ("MomentumLSTM", (), {"batch_first": 1}, "batch_first must be "),
        ("MomentumRNN", (), {"nonlinearity": "sigmoid"}, "nonlinearity must be .*got 'sigmoid'"),
        ("MomentumLSTM", (1, 0.9), {}, "positional arguments"),  # momentum after num_layers, by position
        ("MomentumLSTMCell", (False,), {}, "momentum must be in"),  # bias by position, as of torch.nn.LSTMCell
        ("MomentumLSTMCell", (0.9, 0.6, 0.9), {}, "bias must be "),
    ],
)
def test_arguments_refused(name, arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(hbnode.nn, name)(10, 20, *arguments, **options)


def test_inputs_refused():
    layer, cell = make_pair("lstm", "momentum")[0], hbnode.nn.MomentumLSTMCell(2, 3).double()
    x = make_input()
    for call, error, message in (
        (lambda: layer(make_input(inputs=3)), ValueError, r"\(T, batch, input_size\).*input_size=2.*got.*3\).*Fix: "),
        (lambda: layer(x[:0]), ValueError, "at least one sample"),
        (lambda: layer(pack_padded_sequence(x[..., :1], torch.tensor([7, 6, 5]))), ValueError, "a PackedSequence of"),
        (lambda: layer(x.long()), TypeError, r"got torch.int64. Fix: x.float\(\)"),
        (lambda: layer([x[0], x[1]]), TypeError, "got list. Fix: torch.stack"),
        (lambda: layer(x.float()), ValueError, r"x must be torch.float64.*or layer.to\(torch.float32\)"),
        (lambda: cell(x), ValueError, "one sample at a time"),
        (lambda: cell([0.0, 1.0]), TypeError, "x must be a tensor, got list"),
        (lambda: layer(x, torch.zeros(1, 3, 3), hx=0), TypeError, "two names"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_states_refused():
    x = make_input()
    layer, _ = make_pair("gru", "restart", layers=2)
    state = layer(x)[1].detach()
    for change in ({"h": state.h[:1]}, {"v": state.v[..., :3]}, {"v": None}, {"t": state.t[:1]}, {"m": state.v}):
        (name,) = change
        with pytest.raises(ValueError, match=rf"state\.{name} must be .*got"):
            layer(x, dataclasses.replace(state, **change))
    for change in ({"h": state.h.float()}, {"v": state.v.float()}, {"t": state.t.double()}, {"t": state.t > 0}):
        with pytest.raises(ValueError, match=r"must be .*got torch\."):
            layer(x, dataclasses.replace(state, **change))
    cell, _ = make_pair("lstm", "momentum", suffix="Cell")
    with pytest.raises(TypeError, match=r"\(Tensor, RecurrentState\). Fix: output, state = cell"):
        cell(x[1], cell(x[0]))  # as of torch.nn.LSTMCell
    with pytest.raises(TypeError, match="Fix: return only the output"):
        nn.parallel.gather([cell(x[0])[1]] * 2, "cpu")


# States


def test_a_state_may_be_h_or_h_and_c():
    x = make_input()
    h, c = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    layer, _ = make_pair("lstm", "adam", layers=2)
    zero = torch.zeros(2, 3, 12, dtype=torch.float64)
    full = recurrent.RecurrentState(h, c, zero, zero)
    assert torch.equal(layer(x, (h, c))[0], layer(x, full)[0])
    expected, _ = layer(x, dataclasses.replace(full, c=torch.zeros_like(h)))
    assert torch.equal(layer(x, h)[0], expected)
    rnn, _ = make_pair("rnn", "restart", layers=2)
    fresh = recurrent.RecurrentState(h, v=zero[..., :3], t=torch.zeros(3, dtype=torch.int64))
    close(rnn(x, h)[0], rnn(x, fresh)[0], 1e-13)


def test_a_state_is_read_by_name_or_as_the_pair_of_an_lstm():
    (_, lstm), (_, gru) = (make_pair(cell, "adam", layers=2)[0](make_input()) for cell in ("lstm", "gru"))
    h, c = lstm
    assert (h is lstm.h, c is lstm.c, lstm[1] is c) == (True,) * 3
    for use in (lambda: lstm[-1], lambda: gru[-1], lambda: tuple(gru)):
        with pytest.raises(TypeError, match=r"read by name.*Fix: state\.h"):
            use()
    with pytest.raises(AttributeError, match=r"no attribute 'squeeze'. Fix: state\.h\.squeeze"):
        gru.squeeze(0)
    gru.h.squeeze(0)
    assert not hasattr(gru, "unknown")


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
    memory = {name: torch.int64 if name == "t" else torch.float32 for name in layer.rule.memory}
    assert {name: z.dtype for name, z in half.as_dict().items()} == {"h": half.h.dtype, "c": half.h.dtype, **memory}
    assert half.h.dtype == torch.bfloat16
    copy.deepcopy(layer).bfloat16()(x.bfloat16(), half)
    assert all(z.device.type == "meta" for z in state.to("meta").as_dict().values())
    assert not any(z.requires_grad for z in state.detach().as_dict().values())


@pytest.mark.slow
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
    layer, _ = make_pair("lstm", "restart")
    x, lengths = make_input(9), [9, 6, 4]
    whole, _ = layer(pack_padded_sequence(x, torch.tensor(lengths)))
    _, state = layer(pack_padded_sequence(x[:5], torch.tensor([5, 4, 2])))
    rest = torch.stack([nn.functional.pad(x[n:, b], (0, 0, 0, n))[:4] for b, n in enumerate((5, 4, 2))], dim=1)
    output, last = layer(pack_padded_sequence(rest, torch.tensor([4, 2, 2])), state)
    found, expected = pad_packed_sequence(output)[0], pad_packed_sequence(whole)[0]
    for b, (start, length) in enumerate(zip((5, 4, 2), lengths, strict=True)):
        close(found[: length - start, b], expected[start:length, b], 1e-13)
    assert last.t.tolist() == lengths


def test_a_carried_momentum_fades_at_the_right_times():
    """Of a schedule, t continues in the part that runs as torch's layer, after v_0 has decayed."""
    layer = hbnode.nn.MomentumLSTM(2, 3, rule=rules.ScheduledRestart(17, 0.6)).double()
    x = make_input(103)
    whole, last = layer(x)
    _, state = layer(x[:39])
    second, end = layer(x[39:], state)
    close(second, whole[39:], 1e-12)
    close(end.v, last.v, 1e-12)


def test_a_large_momentum_that_is_carried_over_fades_in_full():
    layer, cell = hbnode.nn.MomentumLSTM(2, 3), hbnode.nn.MomentumLSTMCell(2, 3)
    cell.load_state_dict({name[:-3]: value for name, value in layer.state_dict().items()})
    _, state = layer(1e6 * make_input(1).float())
    x, stepped = make_input(100).float(), state.map(lambda z: z[0])
    after, end = layer(x, state)
    for sample in x:
        h, stepped = cell(sample, stepped)
    torch.testing.assert_close(after[-1], h, rtol=0, atol=1e-5)
    torch.testing.assert_close(end.v[0], stepped.v, rtol=0, atol=1e-4)


# Number formats


@some_layers
def test_half_precision(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input(10)
    expected, _ = layer(x)
    close(copy.deepcopy(layer).float()(x.float())[0].double(), expected, 2e-4)
    half = copy.deepcopy(layer).bfloat16()
    first, state = half(x.bfloat16())
    output, state = half(x.bfloat16(), state)
    assert output.dtype == state.h.dtype == torch.bfloat16
    assert all(z.dtype == torch.float32 for z in (state.v, state.m, state.g) if z is not None)
    output.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())
    if cell != "dtriv":  # modReLU jumps at 0, and an orthogonal weight forgets nothing
        assert (first.double() - expected).abs().mean() < 0.05


@some_layers
def test_autocast(cell, rule):
    """torch's layer runs in half precision; momentum and loops keep the precision of the parameters."""
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
    low, x = layer.bfloat16(), x.bfloat16()
    with torch.no_grad():
        _, state = low(x[:20])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, inside = low(x[:20])
    assert torch.equal(inside.v, state.v)


def test_autocast_of_a_layer_that_the_cpu_does_not_have():
    """No CPU of today has an LSTM of float16; asking it draws no random numbers."""
    layer, x = hbnode.nn.MomentumLSTM(2, 3), make_input().float()
    _torch.cpu_has_layer.cache_clear()
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.float16):
        output, _ = layer(x)
    assert torch.equal(output, layer(x)[0])
    assert torch.equal(torch.get_rng_state(), before)


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
        with torch.no_grad():
            close(single(changed, state)[0][:50], expected[:50], 1e-13)
        if state is None and cell != "dtriv":
            close(single.to_torch()(changed)[0][:50], expected[:50], 1e-12)
    layer, _ = make_pair(cell, rule, bidirectional=True)
    lengths = torch.tensor([60, 55, 60])
    (found, _), (expected, _) = (
        pad_packed_sequence(layer(pack_padded_sequence(z, lengths, enforce_sorted=False))[0]) for z in (changed, x)
    )
    close(found[:50, 1, :3], expected[:50, 1, :3], 1e-13)
    close(found[51:, 1, 3:], expected[51:, 1, 3:], 1e-13)


def test_gradients_of_what_comes_before_an_infinite_sample():
    """Finite as those of torch.nn.LSTM, but for the weights of the infinite input: 0 * inf."""
    layer = hbnode.nn.MomentumLSTM(2, 3, rule="nag").double()
    x = make_input(60).requires_grad_()
    leaves = [x, *(p for key, p in layer.named_parameters() if not key.startswith("weight_ih"))]
    expected = torch.autograd.grad(layer(x)[0][:50].sum(), leaves)
    with torch.no_grad():
        x[50, 1, 0] = math.inf
    close(torch.autograd.grad(layer(x)[0][:50].sum(), leaves), expected, 1e-13)


# Copies, parametrizations, transforms


@some_layers
def test_transforms_of_torch_func(cell, rule):
    layer, _ = make_pair(cell, rule)
    x = make_input(20).requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def loss(values, x):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0].square().sum()

    slope, *expected = torch.autograd.grad(loss(values, x), [x, *values])
    along = torch.randn_like(x)
    for _ in every_way():
        close(torch.func.grad(loss)(values, x), expected, 1e-12)
        if cell != "lstm":  # of which oneDNN's has no forward mode
            _, moved = torch.func.jvp(lambda x: loss(values, x), (x.detach(),), (along,))
            close(moved, (slope * along).sum(), 1e-12)
        if cell == "dtriv":  # torch's own layers have no rule for vmap
            many = torch.stack([x, 2 * x]).detach()
            one_by_one = torch.stack([layer(each)[0] for each in many])
            close(torch.func.vmap(lambda x: layer(x)[0])(many), one_by_one, 1e-12)
    layer.requires_grad_(False)  # of the input alone
    assert not layer(x.detach())[0].requires_grad
    close(torch.autograd.grad(layer(x)[0].square().sum(), x)[0], slope, 1e-13)


def test_weight_norm_of_rows_of_zeros_is_refused():
    layer, weight = hbnode.nn.MomentumLSTM(2, 3), "weight_hh_l0"
    x = torch.randn(5, 2)
    bad = nn.utils.parametrizations.weight_norm(copy.deepcopy(layer), weight)
    with pytest.raises(ValueError, match=rf"weight_norm makes NaN of {weight}.*Fix: torch.nn.init.orthogonal_"):
        bad(x)
    nn.init.orthogonal_(getattr(layer, weight))
    expected, _ = layer(x)
    nn.utils.parametrizations.weight_norm(layer, weight)  # a parametrization is read at each call
    torch.testing.assert_close(layer(x)[0], expected)


@pytest.mark.slow
def test_shapes_on_the_meta_device():
    for cell, rule in (("lstm", "momentum"), ("gru", "adam")):
        layer = kind(cell)(2, 3, 2, rule=rule, device="meta")
        output, state = layer(torch.empty(40, 5, 2, device="meta"))
        assert output.shape == (40, 5, 3)
        assert layer(torch.empty(40, 5, 2, device="meta"), state)[0].is_meta


# Compilation and export


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, unless warnings are errors
def test_under_torch_compile():
    layer, x = make_pair("lstm", "adam")[0], make_input()
    expected, last = layer(x)
    output, state = torch.compile(layer, backend="eager")(x)
    close(output, expected, 1e-13)
    close(state.h, last.h, 1e-13)
    layer.compile(backend="eager")  # not hidden by the argument of that name
    close(layer(x)[0], expected, 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "strict"), [("adaptive", False), ("restart", True)])
def test_export_of_a_cell(rule, strict):
    one, _ = make_pair("lstm", rule, suffix="Cell")
    x = make_input(2)
    state = one(x[0])[1].detach()
    h, last = torch.export.export(one, (x[1], state), strict=strict).module()(x[1], state)
    expected, expected_last = one(x[1], state)
    close(h, expected, 1e-14)
    close(last[0], expected_last.h, 1e-14)


@pytest.mark.parametrize(
    ("cell", "rule", "options"),
    [
        ("rnn", "adaptive", {"nonlinearity": "relu"}),
        ("lstm", "momentum", {"num_layers": 2, "bidirectional": True}),
        ("gru", "rmsprop", {"bias": False, "batch_first": True}),
    ],
)
def test_to_torch(cell, rule, options):
    layer = kind(cell)(2, 3, rule=rule, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    x = make_input(20)
    expected, state = layer(x)
    copied = layer.to_torch()
    assert {type(module) for module in copied.layers} == {TORCH[cell]}
    output, last = copied(x)
    close(output, expected, 1e-12)
    close(last, (state.h, state.c) if cell == "lstm" else state.h, 1e-12)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(copied(x)[0], output)  # its parameters are its own
    with pytest.raises(ValueError, match="got PackedSequence"):
        copied(nn.utils.rnn.pack_sequence([x[:, 0]]))
    with pytest.raises(ValueError, match=rf"got \(20, 2\). Fix: x.unsqueeze\({int(not layer.batch_first)}\)"):
        copied(x[:, 0])
    with pytest.raises(ValueError, match="no layer of the cell of ParametrizedDTRIV"):
        hbnode.nn.DTRIV(2, 3).to_torch()


class Output(nn.Module):
    """What a layer returns first: torch.jit.trace knows no states but in tuples."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("cell", "rule"), [("lstm", "momentum"), ("gru", "nag"), ("gru", "adam")])
def test_traced_layers_take_any_length(cell, rule):
    layer, _ = make_pair(cell, rule, bidirectional=rule != "momentum")
    module = Output(layer if rule == "momentum" else layer.to_torch())
    traced = torch.jit.trace(module, make_input(), check_trace=False)
    for time in (1, 32, 1100):
        x = make_input(time, 2)
        if time == 32:
            x[20, 0, 1] = torch.nan
        torch.testing.assert_close(traced(x), layer(x)[0], rtol=0, atol=1e-12, equal_nan=True)
    if rule == "momentum":
        x = make_input(5)
        close(torch.export.export(Output(layer), (x,), strict=False).module()(x), layer(x)[0], 1e-12)


# TanhRNN


def make_tanh(batch_first=True, dtype=torch.float64):
    return hbnode.nn.TanhRNN(3, 5, batch_first, dtype=dtype)


def tanh_loop(rnn, x, h=None):
    """All h (batch, T, n) of x (batch, T, inputs); from h if it is given."""
    found = []
    for x_t in x.unbind(1):
        before = rnn.bias_init if h is None else h @ rnn.weight_hh.T
        h = torch.tanh(x_t @ rnn.weight_ih.T + rnn.bias + before)
        found.append(h)
    return torch.stack(found, 1)


@pytest.mark.sparse
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("steps", [1, 6])
def test_values_and_gradients_of_a_tanh_rnn(steps, continued):
    rnn = make_tanh()
    x = torch.randn(4, steps, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True) if continued else None
    leaves = [x, *rnn.parameters()] + ([h0] if continued else [])
    output, last = rnn(x, h0)
    expected = tanh_loop(rnn, x, h0[0] if continued else None)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(last, expected[:, -1:].transpose(0, 1))
    torch.testing.assert_close(gradients(output, {}, leaves), gradients(expected, {}, leaves))


def test_layouts_of_a_tanh_rnn():
    rnn, first = make_tanh(), make_tanh(batch_first=False)
    first.load_state_dict(rnn.state_dict())
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    output, _ = rnn(x)
    torch.testing.assert_close(first(x.transpose(0, 1))[0], output.transpose(0, 1))
    one, h = rnn(x[0])
    assert h.shape == (1, 5)
    torch.testing.assert_close(one, output[0])
    torch.testing.assert_close(rnn(x[0, 3:], rnn(x[0, :3])[1])[0], output[0, 3:])
    assert rnn(x[:0])[0].shape == (0, 6, 5)


def test_packed_sequences_of_a_tanh_rnn():
    rnn, lengths = make_tanh(), torch.tensor([2, 6, 4])
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    packed = pack_padded_sequence(pad_sequence(sequences, True), lengths, batch_first=True, enforce_sorted=False)
    output, last = rnn(packed)
    (padded, _), (again, _) = (pad_packed_sequence(z, batch_first=True) for z in (output, rnn(packed, last)[0]))
    for k, x in enumerate(sequences):
        torch.testing.assert_close(padded[k, : len(x)], rnn(x)[0])
        torch.testing.assert_close(last[:, k], rnn(x)[1])
        torch.testing.assert_close(again[k, : len(x)], rnn(x, last[:, k])[0])


def test_inputs_that_a_tanh_rnn_refuses():
    x, rnn = torch.zeros(4, 6, 3), make_tanh(dtype=torch.float32)
    for call, error, message in (
        (lambda: rnn(x[..., :2]), ValueError, "input_size=3"),
        (lambda: rnn(x, torch.zeros(4, 5)), ValueError, r"h0 must be \(1, 4, 5\), got \(4, 5\)"),
        (lambda: rnn(x, (torch.zeros(1, 4, 5),)), TypeError, "h0 must be a tensor"),
        (lambda: rnn(x.double()), ValueError, "x must be torch.float32"),
        (lambda: hbnode.nn.TanhRNN(3, 5, 2), TypeError, "batch_first must be True or False, got 2"),
        (lambda: sparse_(torch.empty(3)), ValueError, "must be .*got"),
        (lambda: sparse_(torch.empty(3, 3), 1, -1.0), ValueError, "std must be a number >= 0"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_initial_weights_of_a_tanh_rnn():
    rnn = hbnode.nn.TanhRNN(8, 200)
    assert ((rnn.weight_hh != 0).sum(1) == 15).all()
    assert ((rnn.weight_ih != 0).sum(0) == 15).all()
    assert rnn.weight_hh[rnn.weight_hh != 0].var().item() == pytest.approx(1 / 15, rel=0.1)
    assert rnn.weight_ih[rnn.weight_ih != 0].var().item() == pytest.approx(1, rel=0.3)
    assert rnn.bias.var().item() == pytest.approx(1 / 15, rel=0.3)
    assert (sparse_(torch.empty(4, 7), 15) != 0).all()
    assert not sparse_(torch.empty(4, 7), 3, std=0.0).any()


def test_a_state_made_in_inference_mode_can_be_used_in_training():
    lstm, x = hbnode.nn.MomentumLSTM(3, 4), torch.randn(5, 2, 3)
    with torch.inference_mode():
        _, state = lstm(x)
    output = lstm(x, state)[0]
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lstm.parameters())
    torch.testing.assert_close(output, lstm(x, lstm(x)[1])[0])
