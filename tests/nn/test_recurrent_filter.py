"""The linear filter over time, and the rules by themselves."""

import dataclasses
import math

import pytest
import torch

from hbnode.nn import _filter as filters
from hbnode.nn import rules
from hbnode.nn._filter import linear_filter
from tests.momentum_layers import RULES, close, numbers
from tests.reference_recurrent import Twin


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
def test_gradgradcheck_of_the_filter():
    x = torch.randn(45, 1, 2, dtype=torch.float64, requires_grad=True)
    mu = torch.rand(45, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: linear_filter(x, mu, 0.5), x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: linear_filter(x, mu, 0.5).sin(), x, fast_mode=True)


@pytest.mark.parametrize("mu", [0.9, 0.0, "varying", "each"])
def test_the_filter_goes_on_from_a_state(mu):
    mu = {"varying": torch.rand(97), "each": torch.rand(97, 2)}.get(mu, mu)
    mu = mu.double() if isinstance(mu, torch.Tensor) else mu
    each = torch.full((97,), mu, dtype=torch.float64) if isinstance(mu, float) else mu
    x, v = torch.randn(97, 2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    given = torch.cat([each[:1], each]).double()
    before = torch.cat([v.unsqueeze(0) / 0.3, x])
    expected = slowly(before, given.unsqueeze(-1) if given.dim() == 2 else given, 0.3)[1:]
    close(linear_filter(x, mu, 0.3, v), expected, 1e-13)


def test_the_filter_under_vmap():
    x, mu = torch.randn(3, 50, 2, 4, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    slope = torch.func.vmap(torch.func.grad(lambda x: linear_filter(x, mu, 0.5).sin().sum()))
    for one, row in zip(slope(x), x, strict=True):
        row.requires_grad_()
        close(one, torch.autograd.grad(slowly(row, mu, 0.5).sin().sum(), row)[0], 1e-13)


@pytest.mark.parametrize("steps", [7, 90])
def test_many_gradients_of_the_filter_at_once(steps):
    """As torch.autograd.functional.jacobian(..., vectorize=True) asks for them."""
    x, mu = torch.randn(steps, 2, 1, dtype=torch.float64), torch.rand(steps, dtype=torch.float64)
    jacobians = (
        torch.autograd.functional.jacobian(lambda x: linear_filter(x, mu, 0.5).sum(0), x, vectorize=at_once)
        for at_once in (True, False)
    )
    close(*jacobians, 1e-13)


@pytest.fixture(params=["looks", "cannot look"])
def values_can_be_asked(request, monkeypatch):
    """On a GPU nothing asks whether all is finite, which would wait for the device."""
    if request.param == "cannot look":
        monkeypatch.setattr(filters.math, "isfinite", lambda _: False)


@pytest.mark.usefixtures("values_can_be_asked")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mu", [0.9, 1e-30, "varying", "restarts"])
def test_what_is_not_finite_changes_nothing_before_its_time(value, mu):
    """Nor does the transpose anything after it."""
    mu = {"varying": torch.rand(97), "restarts": (torch.arange(1, 98) % 7) / 10}.get(mu, mu)
    mu = mu.double() if isinstance(mu, torch.Tensor) else mu
    x = torch.randn(97, 2, 3, dtype=torch.float64)
    expected = linear_filter(x, mu, 0.5)
    x[50, 0, 1] = value
    x.requires_grad_()
    found = linear_filter(x, mu, 0.5)
    is_reached = torch.zeros(97, 2, 3, dtype=torch.bool)
    is_reached[50:, 0, 1] = True
    close(found[~is_reached], expected[~is_reached], 1e-15)
    assert not found[is_reached].isfinite().any()
    (slope,) = torch.autograd.grad(found[:50].sum(), x, retain_graph=True)
    assert slope.isfinite().all()
    one, another = torch.ones(2, 97, 2, 3, dtype=torch.float64)
    another[20, 0, 1] = value
    (wanted,) = torch.autograd.grad(found, x, one, retain_graph=True)
    (slope,) = torch.autograd.grad(found, x, another)
    is_reached = torch.zeros(97, 2, 3, dtype=torch.bool)
    is_reached[:21, 0, 1] = True
    close(slope[~is_reached], wanted[~is_reached], 1e-15)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("steps", "width", "cuts"), [(12, 3, ()), (12, 3, (4, 5)), (300, 1, ()), (97, 40, (50,))])
@pytest.mark.parametrize("many", [rules.MANY, 0], ids=["by filters", "with a backward pass of its own"])
def test_a_rule_is_its_equation(name, steps, width, cuts, many, monkeypatch):
    """Values and gradients over several blocks, at once and in parts."""
    monkeypatch.setattr(rules, "MANY", many)
    rule, twin = RULES[name], Twin("rnn", name, numbers(name))
    g = torch.randn(steps, 2, width, dtype=torch.float64, requires_grad=True)
    eye, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)

    def filtered():
        memory, drives = rule.start(g[0]), []
        for part in g.tensor_split(cuts):
            drive, memory = rule.filter(part, memory)
            drives.append(drive)
        return torch.cat(drives), memory

    (found, memory), state, expected = filtered(), twin.start(2, width, g[0]), []
    for row in g:
        state = twin.step((eye, zero, None, None, None), row, state)
        expected.append(state["h"])
    close(found.tanh(), torch.stack(expected), 1e-12)
    for key in set(rule.memory) - {"t"}:
        close(getattr(memory, key), state[key], 1e-12)
    one, another = (torch.autograd.grad(d.sum(), g)[0] for d in (found.tanh(), torch.stack(expected)))
    close(one, another, 1e-10)
    with torch.no_grad():
        close(filtered()[0], found, 1e-12)


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
    rule = RULES[name]
    assert rule == dataclasses.replace(rule)
    assert hash(rule) == hash(dataclasses.replace(rule))
    assert repr(rule).startswith(type(rule).__name__ + "(")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.step_size = 2.0
