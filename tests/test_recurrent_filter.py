"""The linear filter over time, and the rules by themselves."""

import dataclasses

import pytest
import torch

from hbnode.recurrent import rules
from hbnode.recurrent.filter import linear_filter
from tests.momentum_layers import RULES, close
from tests.reference_recurrent import Twin

NAMES = {rule: rule for rule in RULES} | {"SR": "ScheduledRestart"}


def make_rule(name):
    return getattr(rules, NAMES[name])(**RULES[name])


def slowly(x, mu, s):
    v, values = torch.zeros_like(x[0]), []
    for mu_t, row in zip(mu, x, strict=True):
        v = mu_t * v + s * row
        values.append(v)
    return torch.stack(values)


@pytest.mark.parametrize("steps", [1, 2, 39, 40, 41, 80, 83, 97, 784])
@pytest.mark.parametrize("kind", ["constant", "varying", "zeros", "restarts"])
def test_the_filter_is_the_recurrence(steps, kind):
    mu = {
        "constant": torch.full((steps,), 0.9),
        "varying": torch.rand(steps),
        "zeros": torch.zeros(steps),
        "restarts": (torch.arange(1, steps + 1) % 7) / 10,
    }[kind].double()
    x = torch.randn(steps, 2, 3, dtype=torch.float64, requires_grad=True)
    found, expected = linear_filter(x, mu, 0.3), slowly(x, mu, 0.3)
    close(found, expected, 1e-13)
    w = torch.randn_like(found)
    one, another = (torch.autograd.grad((v * w).sum(), x)[0] for v in (found, expected))
    close(one, another, 1e-13)


def test_the_filter_forgets_without_overflow():
    """A cumulative sum of x / mu^t would not be finite."""
    x = torch.randn(5000, 1, 1)
    found = linear_filter(x, torch.full((5000,), 0.01, dtype=torch.float64), 1.0)
    torch.testing.assert_close(found, slowly(x.double(), torch.full((5000,), 0.01), 1.0).float())
    kept = linear_filter(torch.ones(5000, 1, 1), torch.ones(5000, dtype=torch.float64), 1.0)
    torch.testing.assert_close(kept.flatten(), torch.arange(1.0, 5001.0))


def test_gradgradcheck_of_the_filter():
    x = torch.randn(45, 1, 2, dtype=torch.float64, requires_grad=True)
    mu = torch.rand(45, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: linear_filter(x, mu, 0.5), x)
    assert torch.autograd.gradgradcheck(lambda x: linear_filter(x, mu, 0.5).sin(), x)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("cuts", [(), (4, 5)])
def test_a_rule_is_its_equation(name, cuts):
    rule, twin = make_rule(name), Twin("rnn", name, RULES[name])
    g = torch.randn(12, 2, 3, dtype=torch.float64, requires_grad=True)
    eye, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    memory, drives = rule.start(g[0]), []
    for part in g.tensor_split(cuts):
        drive, memory = rule.drive(part, memory)
        drives.append(drive)
    state, expected = twin.start(2, 3, g[0]), []
    for row in g:
        state = twin.step((eye, zero, None, None, None), row, state)
        expected.append(state["h"])
    close(torch.cat(drives).tanh(), torch.stack(expected), 1e-13)
    one, another = (torch.autograd.grad(d.sum(), g)[0] for d in (torch.cat(drives).tanh(), torch.stack(expected)))
    close(one, another, 1e-11)


def test_schedules_of_momentum():
    nag = rules.NAG().coefficients(0, 4)
    torch.testing.assert_close(nag, torch.tensor([0.0, 1 / 4, 2 / 5, 3 / 6], dtype=torch.float64))
    torch.testing.assert_close(rules.NAG().coefficients(2, 2), nag[2:])
    sr = rules.ScheduledRestart(3).coefficients(0, 6)
    torch.testing.assert_close(sr, torch.tensor([1 / 4, 2 / 5, 0.0] * 2, dtype=torch.float64))
    assert not rules.ScheduledRestart(1).coefficients(0, 5).any()
    each = rules.NAG().coefficients(torch.tensor([0, 2]), 2)
    torch.testing.assert_close(each, torch.stack([nag[:2], nag[2:]], dim=1))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_a_value(name):
    rule = make_rule(name)
    assert rule == dataclasses.replace(rule)
    assert hash(rule) == hash(make_rule(name))
    assert repr(rule).startswith(NAMES[name] + "(")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.step_size = 2.0
