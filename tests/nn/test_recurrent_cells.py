"""Every rule and cell against the plain twins in float64, values and all gradients."""

import dataclasses

import pytest
import torch

from hbnode.nn import recurrent, rules
from tests.momentum_layers import (
    CELLS,
    PAIRS,
    RULES,
    assert_equal_to_twin,
    close,
    every_layer,
    every_rule,
    gradients,
    make_input,
    make_pair,
    make_state,
    present,
    some_layers,
    two_rules,
)
from tests.reference_recurrent import Twin

every_cell = pytest.mark.parametrize("cell", CELLS)


# The twins themselves


def test_the_twin_by_hand():
    """Two steps of each rule with numbers that one can follow: W = U = 1, tanh, s = 1/2, no bias."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x1, x2 = 0.4 * one, 0.1 * one
    drives = {
        "momentum": (0.2, 0.5 * 0.2 + 0.05),
        "nag": (0.2, 1 / 4 * 0.2 + 0.05),
        "restart": (0.2, 0.0 * 0.2 + 0.05),  # F = 2: μ_1 = 1/4 of v_0 = 0, μ_2 = 0
        "adam": (0.2 / (0.2 * 0.16 + 0.01) ** 0.5, 0.15 / (0.8 * 0.2 * 0.16 + 0.2 * 0.01 + 0.01) ** 0.5),
        "rmsprop": (0.2 / (0.2 * 0.16 + 0.01) ** 0.5, 0.05 / (0.8 * 0.2 * 0.16 + 0.2 * 0.01 + 0.01) ** 0.5),
        "adaptive": (0.2, (1 - 0.75**0.5) ** 2 * 0.2 + 0.05),
    }
    numbers = {"momentum": 0.5, "step_size": 0.5, "restart": 2, "beta": 0.8, "eps": 0.01, "delta": 1e-3}
    for rule, (first, second) in drives.items():
        twin = Twin("rnn", rule, numbers)
        weights = (one, one, None, None, None)
        state = twin.step(weights, x1, twin.start(1, 1, one))
        close(state["h"], torch.tanh(first * one), 1e-15)
        expected = torch.tanh(torch.tanh(first * one) + second)
        close(twin.step(weights, x2, state)["h"], expected, 1e-15)


# Layers


@every_layer
def test_values_and_gradients(cell, rule):
    layer, twin = make_pair(cell, rule)
    assert_equal_to_twin(layer, twin, make_input())
    x = make_input(60)  # more than a block of the filter and of the scan
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


@every_layer
def test_layers_directions_and_lengths(cell, rule):
    layer, twin = make_pair(cell, rule, layers=2, bidirectional=True)
    x = make_input(9, 4)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))
    assert_equal_to_twin(layer, twin, x, make_state(layer, x), lengths=[5, 9, 1, 6])


@two_rules
def test_relu(rule):
    layer, twin = make_pair("rnn", rule, nonlinearity="relu")
    x = make_input(12)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


@pytest.mark.parametrize(("cell", "rule"), PAIRS[:5])
def test_without_biases(cell, rule):
    layer, twin = make_pair(cell, rule, bias=False)
    assert not any("bias" in name for name, _ in layer.named_parameters())
    x = make_input(12)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


def test_one_weight_in_both_places():
    layer, twin = make_pair("rnn", "momentum", 3, 3, bias=False)
    layer.weight_ih_l0 = layer.weight_hh_l0
    assert_equal_to_twin(layer, twin, make_input(12, inputs=3))


@dataclasses.dataclass(frozen=True)
class Alternating(rules.LinearRule):
    rate: float = 0.8
    step_size: float = 1.0

    def coefficients(self, t, steps):
        return torch.full((steps,), -self.rate, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class Shrinking(rules.Rule):
    half_life: float = 9.0

    memory = ("t",)

    def filter(self, g, memory):
        t = torch.arange(1, len(g) + 1).unsqueeze(1) + memory.t
        return g * 0.5 ** (t / self.half_life).unsqueeze(-1), rules.Memory(t=memory.t + len(g))


@pytest.mark.parametrize("rule", [Alternating(), Shrinking()], ids=["linear", "not linear"])
def test_rules_of_ones_own(rule):
    layer = recurrent.MomentumGRU(2, 3, rule=rule).double()
    cell = recurrent.MomentumGRUCell(2, 3, rule=rule).double()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    x, stepped, state = make_input(200), [], None
    for x_t in x:
        h, state = cell(x_t, state)
        stepped.append(h)
    first, state = layer(x[:50])
    second, _ = layer(x[50:], state)
    close(layer(x)[0], torch.stack(stepped), 1e-12)
    close(torch.cat([first, second]), torch.stack(stepped), 1e-12)


@some_layers
def test_one_step(cell, rule):
    layer, twin = make_pair(cell, rule)
    x = make_input(1)
    assert_equal_to_twin(layer, twin, x)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


@pytest.mark.parametrize("restart", [1, 2, 40])
def test_restarts(restart, monkeypatch):
    monkeypatch.setitem(RULES, "restart", rules.ScheduledRestart(restart, 0.6))
    layer, twin = make_pair("lstm", "restart")
    x = make_input(11)
    assert_equal_to_twin(layer, twin, x)
    if restart == 1:  # μ = 0 always
        plain, _ = make_pair("lstm", "momentum")
        plain = recurrent.MomentumLSTM(2, 3, momentum=0.0, step_size=0.6).double()
        plain.load_state_dict(layer.state_dict())
        close(plain(x)[0], layer(x)[0], 1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.99, 1.0])
def test_extreme_momentum(momentum, monkeypatch):
    monkeypatch.setitem(RULES, "momentum", rules.Momentum(momentum, 0.1))
    layer, twin = make_pair("lstm", "momentum")
    x = make_input(300, 2)
    assert_equal_to_twin(layer, twin, x, make_state(layer, x))


# Cells


@some_layers
def test_a_cell_step_by_step_is_the_layer(cell, rule):
    layer, _ = make_pair(cell, rule)
    one, _ = make_pair(cell, rule, suffix="Cell")
    one.load_state_dict({name.replace("_l0", ""): value for name, value in layer.state_dict().items()})
    x = make_input(6)
    expected, last = layer(x)
    outputs, state = [], None
    for row in x:
        h, state = one(row, state)
        assert torch.equal(h, state.h)
        outputs.append(h)
    close(torch.stack(outputs), expected, 1e-13)
    for name, value in present(state).items():
        assert value.shape == (present(last)[name].shape if name == "t" else present(last)[name].shape[1:])
        close(value.double(), present(last)[name].double().reshape(value.shape), 1e-13)
    expected = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    found = torch.autograd.grad(torch.stack(outputs).square().sum(), list(one.parameters()))
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-11)


@some_layers
def test_a_cell_without_a_batch(cell, rule):
    one, _ = make_pair(cell, rule, suffix="Cell")
    x = make_input(2)
    _, state = one(x[0])
    _, alone = one(x[0, 1])
    h, _ = one(x[1], state)
    again, _ = one(x[1, 1], alone)
    assert again.shape == (3,)
    close(again, h[1], 1e-14)


@pytest.mark.parametrize(("rule", "strict"), [*((rule, False) for rule in RULES), ("restart", True)])
def test_export_of_a_cell(rule, strict):
    one, _ = make_pair("lstm", rule, suffix="Cell")
    x = make_input(2)
    state = one(x[0])[1].detach()
    program = torch.export.export(one, (x[1], state), strict=strict)
    h, last = program.module()(x[1], state)
    expected, expected_last = one(x[1], state)
    close(h, expected, 1e-14)
    close(last[0], expected_last.h, 1e-14)


# Silence


@pytest.mark.parametrize("rule", ["adam", "rmsprop"])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_gradients_at_silent_inputs(rule, eps, monkeypatch):
    """g = v = m = 0: d = s g / sqrt(eps), so that a bias's gradient is s / sqrt(eps) times the plain one."""
    monkeypatch.setitem(RULES, rule, dataclasses.replace(RULES[rule], eps=eps))
    layer, twin = make_pair("lstm", rule)
    with torch.no_grad():
        layer.bias_ih_l0.zero_()
    x = torch.zeros(5, 2, 2, dtype=torch.float64)
    assert_equal_to_twin(layer, twin, x, gradient_tolerance=1e-9)
    output, _ = layer(x[:1])
    inside, outside = gradients(output, {}, [layer.bias_ih_l0, layer.bias_hh_l0])
    close(inside, outside * RULES[rule].step_size / eps**0.5, 1e-12)


@every_rule
def test_constant_and_silent_inputs_have_finite_gradients(rule):
    """Norms of g_t and of its change are zero there."""
    layer, twin = make_pair("lstm", rule)
    assert_equal_to_twin(layer, twin, torch.ones(6, 2, 2, dtype=torch.float64))
    with torch.no_grad():
        layer.bias_ih_l0.zero_()
    x = make_input(8, 2)
    x[:3] = 0
    x[5:] = 0
    x.requires_grad_()
    output, last = layer(x)
    for g in gradients(output, present(last), [x, *layer.parameters()]):
        assert g.isfinite().all()
    close(output, twin(layer, x)[0], 1e-10)
