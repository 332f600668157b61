"""The drop-in for torchdiffeq: torchdiffeq's results, hbnode's methods, and counts of both."""

import importlib
import inspect
import math
import sys
import warnings

import pytest
import torch
import torchdiffeq as original
from torch import nn
from torchdiffeq._impl.odeint import SOLVERS

import hbnode
import hbnode.torchdiffeq as torchdiffeq
from hbnode.solve.methods import METHODS

T = torch.linspace(0.0, 1.0, 4, dtype=torch.float64)


class Spiral(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Linear(2, 2).double(), 0

    def forward(self, t, y):
        self.calls += 1
        return torch.tanh(self.net(y)) * torch.cos(t)


def float64(*values, **kwargs):
    return torch.tensor(values, dtype=torch.float64, **kwargs)


def test_the_names_and_defaults_are_torchdiffeqs():
    assert torchdiffeq.__version__ == original.__version__
    assert set(torchdiffeq.__all__) == {name for name in vars(original) if not name.startswith("_")}
    for name in torchdiffeq.__all__:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (torchdiffeq, original))
        assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
        defaults = {key: p.default for key, p in theirs.items()}
        replaced = {"odeint_interface": torchdiffeq.odeint} if name == "odeint_event" else {}
        assert {key: p.default for key, p in ours.items()} == defaults | replaced


@pytest.mark.parametrize("method", [None, *SOLVERS])
@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_values_gradients_and_counts_are_torchdiffeqs(name, method):
    if method == "scipy_solver" and name == "odeint":
        pytest.skip("scipy has no direct gradient")
    func, y0, results = Spiral(), float64(1.0, 2.0, requires_grad=True), []
    for module in (original, torchdiffeq):
        func.calls = 0
        t = T.clone().requires_grad_(method != "scipy_solver")
        with hbnode.count_nfe(func) as nfe:
            y = getattr(module, name)(func, y0, t, method=method, rtol=1e-4, atol=1e-4)
            calls = func.calls
            gradients = torch.autograd.grad(y.square().sum(), (y0, *func.parameters(), *([t] * t.requires_grad)))
        results.append((calls, func.calls - calls, y, *gradients))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert (nfe.forward, nfe.backward) == results[1][:2]
    assert ("graph kept" in str(nfe)) == (name == "odeint")
    assert (nfe.steps > 0, nfe.backward_steps > 0) == (method != "scipy_solver", name != "odeint" and nfe.steps > 0)


def test_steps_are_counted_as_hbnode_counts_them():
    func, y0, t, found = Spiral(), float64(1.0, 2.0), T.flip(0) * 9, []  # backwards in time
    for solve in (
        lambda: torchdiffeq.odeint_adjoint(func, y0, t, rtol=1e-6, atol=1e-6, adjoint_options={"norm": "seminorm"}),
        lambda: hbnode.odeint(func, y0, t, method="dopri5", rtol=1e-6, atol=1e-6, gradient="adjoint"),
    ):
        with hbnode.count_nfe(func) as nfe, hbnode.diagnostics.record_steps(func) as record:
            solve().sum().backward()
        found.append((nfe.as_dict(), record))
    assert found[0] == found[1]
    assert nfe.rejected > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("method", ["dopri5", "rk4", "bosh3"])
def test_what_hbnode_refuses_is_torchdiffeqs(method, dtype):
    """Complex states, states without dimensions, tolerances by element or tensor, and perturbed times."""
    y0, options = torch.tensor(1.5, dtype=dtype), {"perturb": True} if method == "rk4" else {}
    tolerance, field = torch.tensor([1e-3, 1e-5, 1e-4]), lambda t, y: -t * y
    for given in (
        {"y0": y0, "options": options},
        {"y0": y0.expand(3), "rtol": tolerance, "atol": tolerance},
        {"y0": (y0, y0.expand(2)), "rtol": (1e-3, tolerance[:2]), "atol": (1e-3, 1e-4)},
    ):
        func = (lambda t, y: tuple(field(t, x) for x in y)) if isinstance(given["y0"], tuple) else field
        ours, theirs = (module.odeint(func, **given, t=T.float(), method=method) for module in (torchdiffeq, original))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_callbacks_and_warnings_are_torchdiffeqs(method, recwarn):
    func, calls = Spiral(), []
    for name in ("callback_step", "callback_accept_step", "callback_step_adjoint"):
        setattr(func, name, lambda t0, y0, dt, name=name: calls[-1].append((name, float(t0), float(dt))))
    for module in (original, torchdiffeq):
        calls.append([])
        recwarn.clear()
        warnings.simplefilter("always")  # also the second time
        y = module.odeint_adjoint(func, float64(1.0, 2.0), T.flip(0), method=method, options={"unknown": 1})
        y.sum().backward()
        assert {name for name, *_ in calls[-1]} >= {"callback_step", "callback_step_adjoint"}
        calls[-1] += sorted(str(warning.message) for warning in recwarn)
    assert calls[0] == calls[1]
    assert any("Unexpected arguments" in warning for warning in calls[0] if isinstance(warning, str))


@pytest.mark.parametrize("interface", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["forward", "reverse"])
def test_the_time_of_an_event_has_the_gradient_of_the_closed_form(interface, sign):
    """A ball thrown up from h with speed v has landed at t = (v ± √(v² + 2gh)) / g."""
    func, g = nn.Linear(1, 1), 10.0  # any module
    func.forward = lambda t, y: (y[1], torch.full_like(y[1], -g))
    h, v, t0 = (float64(x, requires_grad=True) for x in (2.0, 3.0, 0.5))
    with hbnode.count_nfe(func) as nfe:
        land, (_, speed) = torchdiffeq.odeint_event(
            func, (h, v), t0[0], event_fn=lambda t, y: y[0], reverse_time=sign < 0,
            odeint_interface=getattr(torchdiffeq, interface), rtol=1e-10, atol=1e-10,
        )  # fmt: skip
        gradients = torch.autograd.grad(land, (h, v, t0))
    root = (v**2 + 2 * g * h).sqrt()
    exact = t0 + (v + sign * root) / g
    torch.testing.assert_close([land, speed[-1]], [exact[0], -sign * root], rtol=0, atol=1e-7)
    torch.testing.assert_close(gradients, torch.autograd.grad(exact, (h, v, t0)), rtol=0, atol=1e-7)
    assert nfe.backward == 1 or interface == "odeint_adjoint"  # the derivative at the event


def test_events_and_dense_outputs_are_torchdiffeqs():
    func, y0 = Spiral(), float64(1.0, 2.0)
    for given in ({}, {"method": "rk4", "options": {"step_size": 0.1}}):
        given["event_fn"] = lambda t, y: 0.5 - t + 0.1 * y[1]
        for ours, theirs in zip(*(m.odeint(func, y0, T[:2], **given) for m in (torchdiffeq, original)), strict=True):
            assert torch.equal(ours, theirs)
    with hbnode.count_nfe(func) as nfe:
        func.calls = 0
        dense = torchdiffeq.odeint_dense(func, y0, T[0], T[-1])
    assert torch.equal(dense(T[1]), original.odeint_dense(func, y0, T[0], T[-1])(T[1]))
    assert 0 < nfe.forward < func.calls


def test_errors_are_torchdiffeqs():
    y0 = float64(1.0)
    with pytest.raises(AssertionError, match=r"t must be a torch\.Tensor"):
        torchdiffeq.odeint(lambda t, y: -y, y0, [0.0, 1.0])
    with pytest.raises(AssertionError, match="underflow in dt"):
        torchdiffeq.odeint(lambda t, y: y / 0.0, y0, T)
    with pytest.raises(ValueError, match=r"func must be an instance of nn\.Module"):
        torchdiffeq.odeint_adjoint(lambda t, y: -y, y0, T)


@pytest.mark.parametrize("whole", [True, False], ids=["sys.modules", "functions"])
def test_it_keeps_torchdiffeqs_functions(monkeypatch, whole):
    func, y0 = Spiral(), float64(1.0, 2.0)
    exact = original.odeint(func, y0, T)
    if whole:
        monkeypatch.setitem(sys.modules, "torchdiffeq", torchdiffeq)
    else:
        for name in torchdiffeq.__all__:
            monkeypatch.setattr(original, name, getattr(torchdiffeq, name))
    module = importlib.import_module("torchdiffeq")
    event = {"event_fn": lambda t, y: t - 1.0}
    with hbnode.count_nfe(func) as nfe:
        assert torch.equal(module.odeint(func, y0, T), exact)
        assert torch.equal(module.odeint_adjoint(func, y0, T), exact)
        assert torch.equal(module.odeint_dense(func, y0, T[0], T[-1])(T[0]), y0)
        assert module.odeint_event(func, y0, T[0], **event)[0].item() == pytest.approx(1.0)
        assert torch.equal(hbnode.odeint(func, y0, T, method="dopri5", rtol=1e-7, atol=1e-9), exact)
    assert nfe.forward > 0


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SOLVERS])
@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_native_methods_are_hbnodes(name, method):
    if (name, method) == ("odeint_adjoint", "rodas5p"):
        pytest.skip("the adjoint of a stiff equation grows, and is refused")
    field = hbnode.HBNODE(Spiral().net).double()
    state = (float64(1.0, 2.0)[None], float64(0.5, 0.5)[None].requires_grad_())
    gradient, t = {"odeint": "direct", "odeint_adjoint": "adjoint"}[name], T.clone().requires_grad_()
    results, counts = [], []
    for solve in (
        lambda: getattr(torchdiffeq, name)(field, state, t, method=method, options={"step_size": 0.1}),
        lambda: hbnode.odeint(field, state, t, method=method, steps=4, gradient=gradient),
    ):
        with hbnode.count_nfe(field) as nfe:
            h, m = solve()
            results.append((h, m, *torch.autograd.grad(h[-1].sum(), (state[1], t, *field.dynamics_parameters()))))
        counts.append(nfe)
    assert all(map(torch.equal, *results))
    assert counts[0] == counts[1]
    assert counts[0].steps == 12
    if method in ("tsit5", "nystrom8"):
        h, _ = getattr(torchdiffeq, name)(field, state, T, method=method, options={"max_num_steps": 100})
        torch.testing.assert_close(h, original.odeint(field, state, T, rtol=1e-11)[0], rtol=1e-7, atol=1e-7)


def test_native_methods_take_times_and_options_as_torchdiffeq_does():
    """A list of times, and tensors for numbers."""
    field, y0, t = lambda t, y: -y, float64(1.0, 2.0), [0.0, 0.5, 1.0]
    ours = torchdiffeq.odeint(field, y0, t, method="rodas5p", options={"step_size": torch.tensor(0.2)})
    assert torch.equal(ours, hbnode.odeint(field, y0, t, method="rodas5p", steps=3))
    ours = torchdiffeq.odeint(field, y0, T, method="rodas5p", options={"first_step": torch.tensor(0.1)})
    torch.testing.assert_close(ours, y0 * torch.exp(-T)[:, None], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "given",
    [
        {"adjoint_rtol": 1e-10, "adjoint_atol": torch.tensor(1e-10, dtype=torch.float64)},  # torchcde gives both
        {"adjoint_method": "nystrom8"},
        {"adjoint_method": "tsit5"},
        {"adjoint_options": {"norm": "seminorm"}},
        {"options": {"jump_t": float64(0.5)}, "adjoint_options": {"jump_t": float64(0.5)}},
        {"options": {"dtype": torch.float64, "first_step": None}, "adjoint_options": {"dtype": torch.float64}},
    ],
    ids=str,
)
def test_native_methods_take_what_their_adjoint_does_anyway(given):
    """h'' = -ω² h from h = 1 at rest: h = cos ωt, dh/dω = -t sin ωt."""
    omega, one = float64(2.0, requires_grad=True), float64(1.0)[None]
    func = hbnode.HBNODE(lambda h: -(omega**2) * h, damping=0.0, learn_damping=False)
    tight = {"method": "nystrom8", "rtol": 1e-10, "atol": 1e-10}
    h, _ = torchdiffeq.odeint_adjoint(func, (one, 0 * one), float64(0.0, 1.0), **tight, **given)
    found = h[-1].item(), torch.autograd.grad(h[-1].sum(), omega)[0].item()
    assert found == pytest.approx((math.cos(2.0), -math.sin(2.0)), abs=1e-7)


OF_HEAD = ["tsit5", "heun2", "implicit_euler", "implicit_midpoint", "trapezoid", "radauIIA3", "gl4", "sdirk2", "trbdf2"]


@pytest.mark.parametrize("method", [name for name in OF_HEAD if name not in SOLVERS])
@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_a_later_torchdiffeqs_methods_are_torchdiffeqs(monkeypatch, name, method):
    """The stand-in for a method of torchdiffeq's main branch is Euler's: y' = -y in one step of 1 gives 0."""
    monkeypatch.setitem(SOLVERS, method, type("Later", (SOLVERS["euler"],), {}))
    func, y0 = nn.Identity(), float64(1.0)
    func.forward = lambda t, y: -y
    with hbnode.count_nfe(func) as nfe:
        assert getattr(torchdiffeq, name)(func, y0, float64(0.0, 1.0), method=method)[-1].item() == 0.0
    assert nfe == nfe.steps == 1
    if method in METHODS:
        own = hbnode.odeint(func, y0, [0.0, 1.0], method=method, rtol=1e-9, atol=1e-9)
        assert own[-1].item() == pytest.approx(math.exp(-1.0), abs=1e-8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rtol": torch.ones(2)}, r"rtol must be one number .* Fix: rtol=1e-7"),
        ({"method": "leapfrog"}, "Fix: options={'step_size': 0.1}"),
        ({"options": {"grid_constructor": lambda f, y0, t: t}}, "Fix: options={'step_size': 0.1}"),
        ({"event_fn": lambda t, y: y}, "Fix: method='dopri5'"),
        ({"method": "tsit6"}, "Fix: method='tsit5'"),
        ({"adjoint_rtol": 1e-3}, "adjoint_rtol cannot.*Fix: leave them out"),
        ({"adjoint_method": "dopri5"}, "adjoint_method cannot.*Fix: leave them out"),
        ({"adjoint_options": {"norm": torch.norm}}, "norm cannot.*Fix: leave them out"),
        ({"method": "rodas5p", "adjoint_rtol": 1e-3}, r"no adjoint.*Fix: odeint\(func, y0, t, method='rodas5p'\)"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_what_native_methods_do_not_take_is_named(given, message):
    solve = torchdiffeq.odeint_adjoint if "adjoint" in str(given) else torchdiffeq.odeint
    with pytest.raises(ValueError, match=message):
        solve(Spiral(), float64(1.0, 2.0), T, **{"method": "nystrom8"} | given)
