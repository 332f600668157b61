"""The rules by themselves: their equations, their numbers, their names."""

import dataclasses

import pytest
import torch

import hbnode
from hbnode.nn import _scan, rules
from tests.momentum_layers import RULES, close
from tests.reference_recurrent import Twin

every_rule = pytest.mark.parametrize("name", RULES)


def test_the_reference_in_two_steps():
    """Numbers that one can follow: W = U = 1, tanh, s = 1/2, no bias."""
    one = torch.ones(1, 1, dtype=torch.float64)
    first_m, second_m = 0.2 * 0.16 + 0.01, 0.8 * 0.2 * 0.16 + 0.2 * 0.01 + 0.01
    expected = {
        "momentum": (0.2, 0.5 * 0.2 + 0.05),
        "nag": (0.2, 1 / 4 * 0.2 + 0.05),
        "restart": (0.2, 0.0 * 0.2 + 0.05),  # F = 2: μ_1 = 1/4 of v_0 = 0, μ_2 = 0
        "adam": (0.2 / first_m**0.5, 0.15 / second_m**0.5),
        "rmsprop": (0.2 / first_m**0.5, 0.05 / second_m**0.5),
        "adaptive": (0.2, (1 - 0.75**0.5) ** 2 * 0.2 + 0.05),
    }
    numbers = {"momentum": 0.5, "step_size": 0.5, "restart": 2, "beta": 0.8, "eps": 0.01, "delta": 1e-3}
    for rule, (first, second) in expected.items():
        twin, weights = Twin("rnn", rule, numbers), (one, one, None, None, None)
        state = twin.step(weights, 0.4 * one, twin.start(1, 1, one))
        close(state["h"], torch.tanh(first * one), 1e-15)
        wanted = torch.tanh(torch.tanh(first * one) + second)
        close(twin.step(weights, 0.1 * one, state)["h"], wanted, 1e-15)


@pytest.mark.sparse
@every_rule
@pytest.mark.parametrize(("steps", "width", "cuts"), [(12, 3, (4, 5)), (300, 1, ()), (97, 40, (50,))])
@pytest.mark.parametrize("wide", [_scan.LOOP_WIDTH, 0], ids=["matrices", "loop"])
def test_a_rule_is_its_equation(name, steps, width, cuts, wide, monkeypatch):
    """Values, memories and gradients, at once and in parts; some inputs are zero or do not change."""
    monkeypatch.setattr(_scan, "LOOP_WIDTH", wide)
    rule, twin = RULES[name], Twin("rnn", name, dataclasses.asdict(RULES[name]))
    g = torch.randn(steps, 2, width, dtype=torch.float64)
    g[1:3, 0], g[6] = 0.0, g[5]
    g.requires_grad_()
    eye, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    memory, found = rule.start(g[0]), []
    for part in g.tensor_split(cuts):
        d, memory = rule.filter(part, memory)
        found.append(d.tanh())
    state, expected = twin.start(2, width, g[0]), []
    for row in g:
        state = twin.step((eye, zero, None, None, None), row, state)
        expected.append(state["h"])
    found, expected = torch.cat(found), torch.stack(expected)
    close(found, expected, 1e-12)
    for key in set(rule.memory) - {"t"}:
        close(getattr(memory, key), state[key], 1e-12)
    close(*(torch.autograd.grad(y.sum(), g)[0] for y in (found, expected)), 1e-10)


def test_schedules_of_momentum():
    nag, close = rules.NAG(), torch.testing.assert_close
    close(nag.coefficients(0, 4), torch.tensor([0.0, 1 / 4, 2 / 5, 3 / 6], dtype=torch.float64))
    restart = rules.ScheduledRestart(3).coefficients(0, 6)
    close(restart, torch.tensor([1 / 4, 2 / 5, 0.0] * 2, dtype=torch.float64))
    assert not rules.ScheduledRestart(1).coefficients(0, 5).any()
    each = nag.coefficients(torch.tensor([0, 2]), 2)
    close(each, torch.stack([nag.coefficients(0, 2), nag.coefficients(2, 2)], dim=1))


@pytest.mark.sparse
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_rule
def test_memories_of_half_precision_are_in_float32(name, dtype):
    rule, g = RULES[name], torch.ones(20, 2, 3, dtype=dtype)
    d, memory = rule(g, rule.start(g[0]))
    assert d.dtype == dtype
    assert {z.dtype for z in memory[:3] if z is not None} == {torch.float32}
    close(d.double(), rule(g.double(), rule.start(g[0].double()))[0], 0.01)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("Momentum", {"momentum": 1.1}),
        ("NAG", {"step_size": 0.0}),
        ("ScheduledRestart", {"restart": 2.5}),
        ("Adam", {"beta": 1.0}),
        ("AdaptiveMomentum", {"delta": 1.0}),
    ],
)
def test_numbers_refused(name, numbers):
    (argument,) = numbers
    with pytest.raises(ValueError, match=f"{argument} must be .*got "):
        getattr(rules, name)(**numbers)


def test_a_rule_by_name_and_as_an_object():
    assert rules.make_rule("momentum", 0.9, 0.5) == rules.Momentum(0.9, 0.5)
    assert rules.make_rule("adam", momentum=0.9) == rules.Adam(momentum=0.9)
    for name, rule in RULES.items():
        assert rules.make_rule(name) == type(rule)()
        assert rules.make_rule(name, step_size=0.5) == dataclasses.replace(type(rule)(), step_size=0.5)
        assert rules.make_rule(rule) is rule


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "nesterov"}, ValueError, r"one of 'momentum', .*got 'nesterov'\. Fix: rule='nag'"),
        ({"rule": "?"}, ValueError, r"Fix: rule='momentum'"),
        ({"rule": rules.Adam}, TypeError, r"got the class Adam\. Fix: rule=Adam\(\)"),
        ({"rule": 0.9}, TypeError, r"got float\. Fix: rule="),
        ({"rule": "nag", "momentum": 0.9}, ValueError, r"takes no momentum.*got momentum=0\.9"),
        (
            {"rule": rules.Adam(), "step_size": 0.6},
            ValueError,
            r"got step_size=0\.6 and Adam\(.*Fix: Adam\(\.\.\., step_size",
        ),
        ({"rule": rules.NAG(), "momentum": 0.6}, ValueError, r"and NAG\(.*Fix: leave out momentum"),
    ],
)
def test_rules_refused(options, error, message):
    for make in (hbnode.nn.MomentumLSTM, hbnode.nn.MomentumGRUCell, hbnode.nn.MomentumDTRIV):
        with pytest.raises(error, match=message):
            make(2, 3, **options)
