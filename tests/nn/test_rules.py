"""The rules by themselves: their equations, their numbers, their names."""

import dataclasses
import functools

import pytest
import torch

import hbnode
from hbnode.nn import _scan, rules
from tests.momentum_layers import RULES, close
from tests.reference_recurrent import Twin

every_rule = pytest.mark.parametrize("name", RULES)


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


@pytest.mark.sparse
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_rule
def test_memories_of_half_precision_are_in_float32(name, dtype):
    rule, g = RULES[name], torch.ones(20, 2, 3, dtype=dtype)
    d, memory = rule(g, rule.start(g[0]))
    assert d.dtype == dtype
    assert {z.dtype for z in memory[:3] if z is not None} == {torch.float32}
    close(d.double(), rule(g.double(), rule.start(g[0].double()))[0], 0.01)


def test_what_is_refused():
    layer = functools.partial(hbnode.nn.MomentumLSTM, 2, 3)
    for message, call in (
        ("momentum must be .*got 1.1", lambda: rules.Momentum(momentum=1.1)),
        (r"one of 'momentum', .*got 'nesterov'\. Fix: rule='nag'", lambda: layer(rule="nesterov")),
        (r"got the class Adam\. Fix: rule=Adam\(\)", lambda: layer(rule=rules.Adam)),
        (r"takes no momentum.*got momentum=0\.9", lambda: layer(rule="nag", momentum=0.9)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
