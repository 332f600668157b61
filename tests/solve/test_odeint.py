import datetime
import math
import pickle

import pandas as pd
import pytest
import torch
import torchdiffeq
from torch import nn

import hbnode
from hbnode.solve.methods import TORCHDIFFEQ_METHODS
from hbnode.solve.torchdiffeq_methods import CALLBACKS
from tests.models import make_field, make_input


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tuple_states_are_solved_as_torchdiffeq_solves_the_stacked_state(gradient, dtype):
    """The papers' settings must mean the same: same steps, same evaluations, same numbers, backward included."""
    field, calls = make_field("hbnode").to(dtype), []
    h0, m0 = torch.randn(2, 5, 4, dtype=dtype)
    inner = [p for name, p in field.named_parameters() if not name.startswith("initial_")]

    class Stacked(nn.Module):
        def forward(self, t, z):
            calls.append(1)
            return torch.stack(field(t, (z[0], z[1])))

    t, settings = torch.tensor([0.0, 1.0, 3.0], dtype=dtype), {"rtol": 1e-4, "atol": 1e-4, "method": "dopri5"}
    solver, extra = torchdiffeq.odeint, {}
    if gradient == "adjoint":
        solver, extra = torchdiffeq.odeint_adjoint, {"adjoint_params": inner}
    z = solver(Stacked(), torch.stack([h0, m0]), t, **settings, **extra)
    forward = len(calls)
    expected = torch.autograd.grad(z[:, 0].pow(2).sum(), inner)

    with hbnode.count_nfe(field) as nfe:
        h, m = hbnode.odeint(field, (h0, m0), t, **settings, gradient=gradient, adjoint_options={})
        found = torch.autograd.grad(h.pow(2).sum(), inner)
    assert (nfe.forward, nfe.backward) == (forward, len(calls) - forward)
    precise = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(torch.stack([h, m], 1), z, **precise)
    torch.testing.assert_close(found, expected, **precise)


def test_the_adjoints_default_is_the_seminorm_and_inherits_options():
    field = make_field("node").double()
    x = make_input()

    def backward_nfe(**options):
        with hbnode.count_nfe(field) as nfe:
            settings = {"method": "dopri5", "rtol": 1e-6, "atol": 1e-6, "gradient": "adjoint"} | options
            y = hbnode.odeint(field, x, [0.0, 2.0], **settings)[-1]
            (100 * y.sum()).backward()
        return nfe.backward

    assert backward_nfe() == backward_nfe(adjoint_options={"norm": "seminorm"}) < backward_nfe(adjoint_options={})
    grid = {"method": "rk4", "steps": 9}
    assert backward_nfe(**grid) == backward_nfe(**grid, adjoint_options={}) == 36


def test_land_steps_exactly_onto_the_output_times():
    latest = []
    hbnode.odeint(lambda t, y: latest.append(float(t)) or -y, float64(1.0), [0.0, 0.7], method="dopri5", save="exact")
    assert max(latest) <= 0.7


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun3", "rk4"])
def test_gradients_for_t_differentiate_steps_that_are_fractions_of_their_interval(method):
    t = float64(0.0, 0.5, 1.2).requires_grad_()

    def end(t):
        return hbnode.odeint(lambda t, y: t * y.sin() + y, float64(0.3), t, method=method, steps=3)[1:]

    assert torch.autograd.gradcheck(end, (t,))


def test_adjoint_gradients_for_t():
    """Learned times in a list too."""
    t = float64(0.1, 0.6, 1.3).requires_grad_()
    (expected,) = torch.autograd.grad((1 + ((t[1:] ** 2 - t[0] ** 2) / 2).exp().sum()), t)
    for gradient in ("adjoint", "direct"):
        settings = {"gradient": gradient, "rtol": 1e-9, "atol": 1e-9}
        for times in (t, list(t)):
            y = hbnode.odeint(lambda t, y: t * y, float64(1.0), times, **settings)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), t)[0], expected, rtol=1e-6, atol=1e-7)


LINEAR = {  # fields y' = A y of two numbers, given the learned k
    "node": lambda k: hbnode.NODE(lambda y: torch.stack([y[:, 1], -k * y[:, 0] - 0.4 * y[:, 1]], 1)),
    "sonode": lambda k: hbnode.SONODE(lambda h, v: -k * h - 0.4 * v),
    "hbnode": lambda k: hbnode.HBNODE(lambda h: -k * h, damping=0.4),
    "ghbnode": lambda k: hbnode.GHBNODE(lambda h: -k * h, damping=0.4, xi=0.3, activation=lambda m: m),
}


@pytest.mark.sparse
@pytest.mark.parametrize("model", LINEAR)
@pytest.mark.parametrize(
    "times",
    [
        [0.0, 0.7, 2.0],
        [[0.0, 0.5, 2.0], [0.3, 0.3, 1.0], [0.3, 0.3, 0.3]],
        [[2.0, 0.5, 0.1], [0.3, 0.2, -1], [1, 0, 0]],
    ],
)
def test_the_adjoint_of_samples_with_their_own_steps_and_times_is_that_of_the_matrix_exponential(model, times):
    k, t = float64(2.0).requires_grad_(), torch.tensor(times, dtype=torch.float64, requires_grad=True)
    y0, field = float64([1.0, -0.5], [0.2, 2.0], [30.0, 1.0]).requires_grad_(), LINEAR[model](k).double()
    state = y0 if model == "node" else (y0[:, :1], y0[:, 1:])
    solve = lambda gradient: hbnode.odeint(field, state, t, per_sample=True, gradient=gradient, rtol=1e-8, atol=1e-8)
    y = solve("adjoint")
    torch.testing.assert_close(y, solve("checkpoint"), rtol=0, atol=0)
    y = y if model == "node" else torch.cat(y, 2)
    damping = getattr(field, "damping", float64(0.4)).reshape(1)
    matrix = torch.cat([float64(0.0, 1.0), -k - getattr(field, "xi", 0.0), -damping]).view(2, 2)
    since = (t - t[..., :1]).expand(3, -1).T.contiguous()[..., None, None]
    exact = (torch.linalg.matrix_exp(since * matrix) @ y0[..., None])[..., 0]
    weights = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view_as(y)
    leaves = [y0, k, t, *field.parameters()]
    found, wanted = (torch.autograd.grad((weights * x).sum(), leaves) for x in (y, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("method", "steps"), [("dopri5", None), ("tsit5", None), ("tsit5", 4), ("rk4", 4)])
def test_times_may_be_lists_integers_or_decreasing_and_be_changed_afterwards(method, steps):
    decay = lambda t, y: -t.exp() * y
    solve = lambda t: hbnode.odeint(decay, float64(1.0), t, method=method, steps=steps)[-1].item()
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    expected = solve(times)
    assert expected == pytest.approx(math.exp(1 - math.e), rel=1e-2)
    assert solve([1.0, 0.0]) * expected == pytest.approx(1.0, rel=1e-2)
    times.mul_(3.0)
    for t in ([0, 1], torch.tensor([0, 1]), (0.0, 1.0)):
        assert solve(t) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("field", "method", "steps", "t", "message"),
    [
        *(("late", m, None, (0.5, 0.8), "returned non-finite values") for m in ("dopri5", "bosh3", "scipy_solver")),
        ("late", "rk4", 10, (0.5, 0.8), "returned non-finite values"),
        ("last", "rk4", None, (1.0, 1.0), "returned non-finite values"),
        ("start", None, None, (0.0, 0.0), "initial state is not finite"),
    ],
)
def test_what_is_not_finite_is_named_with_its_time(field, method, steps, t, message):
    after = {"late": 0.5, "last": 0.95, "start": 2.0}[field]
    y0 = torch.tensor([1.0, math.inf if field == "start" else 1.0])
    with torch.no_grad(), pytest.raises(hbnode.errors.NonFiniteError, match=message) as error:
        hbnode.odeint(lambda t, y: torch.where(t > after, torch.nan, -y), y0, [0.0, 1.0], method=method, steps=steps)
    assert t[0] <= error.value.t <= t[1]
    assert error.value.nfe > 0 or field == "start"
    copied = pickle.loads(pickle.dumps(error.value))
    assert (type(copied), str(copied), copied.t) == (type(error.value), str(error.value), error.value.t)


# What a field closes over


def test_a_func_that_computes_gradients_itself():
    """A Hamiltonian-like field calls autograd inside; its evaluations are still told apart and its gradient right."""
    stiffness = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def force(h):
        with torch.enable_grad():
            h = h if h.requires_grad else h.detach().requires_grad_()
            energy = (stiffness * h**2 / 2).sum()
            return -torch.autograd.grad(energy, h, create_graph=True)[0]

    field = hbnode.HBNODE(force, damping=0.0, learn_damping=False)
    for gradient in ("direct", "adjoint"):
        with hbnode.count_nfe(field) as nfe:
            h, _ = hbnode.odeint(field, (float64(1.0), float64(0.0)), [0.0, 1.0], gradient=gradient)
            assert nfe.backward == 0
            (slope,) = torch.autograd.grad(h[-1].sum(), stiffness)
        w = math.sqrt(2.0)
        assert slope.item() == pytest.approx(-math.sin(w) / (2 * w), abs=1e-4)


# Failures by name


SPRING = {"field": hbnode.HBNODE(lambda h: -h, learn_damping=False), "y0": (torch.ones(2, 1), torch.zeros(2, 1))}


DATES = [datetime.datetime(2026, 11, 24), datetime.datetime(2026, 11, 25, 12)]


@pytest.mark.parametrize(("method", "nfe"), [("dopri5", 2 + 6 * 20), ("tsit5", 1 + 6 * 20), ("scipy_solver", None)])
def test_runaway_solves_stop(method, nfe):
    fast = lambda t, y: torch.cos(1e3 * t) + 0 * y
    with torch.no_grad(), pytest.raises(hbnode.errors.MaxStepsError, match="max_steps=20") as error:
        hbnode.odeint(fast, float64(0.0), [0.0, 10.0], method=method, max_steps=20)
    assert nfe in (None, error.value.nfe)
    hbnode.odeint(fast, float64(0.0), torch.linspace(0, 1, 201), method="euler", max_steps=10)  # a long grid is none


def test_failures_of_the_adjoint_are_named_too():
    y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    backward = []
    field = lambda t, y: torch.where((t > 3.0) & bool(backward), torch.nan, -y)
    solve = lambda: hbnode.odeint(field, y0, [4.0, 2.0], method="dopri5", gradient="adjoint")[-1].sum()
    with pytest.raises(hbnode.errors.NonFiniteError, match=r"adjoint state is not finite.*loss") as error:
        (solve() * math.inf).backward()
    assert error.value.t == pytest.approx(2.0)
    y = solve()
    backward.append(1)
    with pytest.raises(hbnode.errors.NonFiniteError) as error:
        y.backward()
    assert 3.0 < error.value.t <= 4.5  # in true time, of a solve that decreases
    root = lambda t, y: y.sqrt() * 0 - 0 * y  # whose slope is infinite at 0
    y = hbnode.odeint(root, y0 * 0, [0.0, 1.0], method="dopri5", gradient="adjoint")
    with pytest.raises(hbnode.errors.NonFiniteError, match="adjoint"):
        y[-1].sum().backward()


def test_assertions_of_the_user_come_through_and_those_of_torchdiffeq_are_named():
    def field(t, y):
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        hbnode.odeint(field, torch.ones(1), [0.0, 1.0])
    grid = {"grid_constructor": lambda func, y0, t: t + 1}  # does not begin where it must
    with pytest.raises(hbnode.SolverError, match="torchdiffeq's rk4 gave up"):
        hbnode.odeint(lambda t, y: -y, torch.ones(1), [0.0, 1.0], method="rk4", options=grid)


# Bad input


def closure_over_a_leaf():
    rate = torch.ones(1, requires_grad=True)
    return lambda t, y: -rate * y


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"method": "dopri6"}, ValueError, "unknown method 'dopri6'; expected one of .*dopri5"),
        ({"per_sample": True, "method": "dopri5"}, ValueError, "per_sample=True is not possible with method='dopri5'"),
        ({"rtol": 0.0}, ValueError, "rtol must be a positive number, got 0.0"),
        ({"rtol": 1e-10}, ValueError, "below the machine epsilon .* of torch.float32.*Fix: solve in float64"),
        ({"options": {"step_sise": 0.1}, "method": "dopri5"}, ValueError, r"\['step_sise'\], which method='dopri5'"),
        ({"options": {"max_num_steps": 9}, "method": "dopri5"}, ValueError, "Fix: max_steps=n, an argument"),
        ({"options": {"step_size": -0.1}, "method": "rk4"}, ValueError, r"options\['step_size'\] must be positive"),
        ({"adjoint_options": {"rtol": 1e-3}, "method": "dopri5"}, ValueError, r"adjoint_options has \['rtol'\]"),
        ({"adjoint_options": {}}, ValueError, "adjoint_options are for torchdiffeq's methods"),
        ({"t": [0.0, 0.5, 0.5]}, ValueError, r"t\[1\]=0.5 is followed by t\[2\]=0.5"),
        ({"t": [0.0, math.nan]}, ValueError, "t must be finite"),
        ({"t": pd.to_datetime(DATES)}, TypeError, r"numbers, .* got a DatetimeIndex.*Fix: .*pandas.Series\(t\)"),
        ({"t": DATES}, TypeError, r"Fix: dates and durations in days, t = pandas.Series\(t\), then"),
        ({"t": torch.zeros(2, 2), "method": "dopri5"}, ValueError, r"one-dimensional, got shape \(2, 2\)"),
        ({"t": torch.zeros(3, 2), **SPRING}, ValueError, r"t has shape \(3, 2\) for a batch of 2"),
        ({"t": torch.tensor([[0.0, 1.0], [1.0, 0.0]]), **SPRING}, ValueError, "must increase along each row"),
        ({"y0": torch.ones(1, dtype=torch.int64)}, TypeError, r"floating point .* got torch.int64. Fix: x.float\(\)"),
        ({"y0": (torch.ones(1), torch.ones(1).double())}, TypeError, "of one dtype, got torch.float32, torch.float64"),
        ({"y0": [1.0]}, TypeError, "a tensor or a tuple of tensors, got list"),
        ({"y0": torch.ones(()), "per_sample": True}, ValueError, r"whose parts have the shape \(batch, ...\)"),
        ({**SPRING, "y0": (torch.ones(2, 1), torch.ones(2, 2))}, ValueError, "h and m must have one shape"),
        ({"field": lambda t, y: y[:, None]}, ValueError, r"returned shape \(1, 1\) for a state of shape \(1\,\)"),
        ({"field": lambda t, y: y.double()}, TypeError, "returned torch.float64 for a state of torch.float32"),
        ({"field": hbnode.HBNODE(nn.Linear(1, 1))}, TypeError, "HBNODE is solved on a pair of tensors, got shape"),
        ({"field": hbnode.NODE(nn.Linear(1, 1)), "y0": SPRING["y0"]}, TypeError, "NODE is solved on a tensor, got"),
        ({"field": hbnode.NODE(lambda h: h.sum())}, ValueError, r"func returned shape \(\); expected .* \(1,\)"),
        ({"field": hbnode.NODE(nn.Linear(1, 1).double())}, TypeError, "state is torch.float32, the field's parameters"),
        ({**SPRING, "field": hbnode.HBNODE(nn.Tanh(), damping=[0.1] * 3)}, ValueError, "which does not broadcast"),
        ({"steps": 4, "method": "dopri5"}, ValueError, "steps=4 needs fixed steps, which method='dopri5' does not"),
        ({"steps": 2, "options": {"step_size": 0.1}, "method": "rk4"}, ValueError, "Fix: give one of them"),
        ({"jump_times": [0.5], "method": "fixed_adams"}, ValueError, "jump_times are not possible with method='fixed_"),
        ({"method": "scipy_solver", "field": closure_over_a_leaf()}, ValueError, "no direct gradient"),
        ({"method": "leapfrog", **SPRING}, ValueError, "needs fixed steps. Fix: steps=n"),
        ({"method": "nystrom4", "field": hbnode.NODE(nn.Tanh())}, ValueError, "an HBNODE, got NODE"),
        ({"gradient": "reversible", "method": "nystrom4"}, ValueError, "one of .'leapfrog', 'blanes_moan4'., got"),
        ({"compile": True, "method": "dopri5"}, ValueError, "compile=True is for native methods"),
        ({"compile": True}, ValueError, "compile=True needs an hbnode field, got function"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_input(change, kind, message):
    arguments = {"field": lambda t, y: -y, "y0": torch.ones(1), "t": [0.0, 1.0]} | change
    if "adjoint_options" in change and "method" in change:
        arguments["gradient"] = "adjoint"
    with pytest.raises(kind, match=message):
        hbnode.odeint(**arguments)


class Recording(nn.Module):
    """A field with torchdiffeq's callbacks."""

    def __init__(self, callbacks=()):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(1.5))
        self.told = []
        for name in callbacks:
            setattr(self, name, lambda t0, y0, dt, name=name: self.told.append((name, float(t0), float(dt))))

    def forward(self, t, y):
        return -self.rate * (1 + t) * y


@pytest.mark.sparse
@pytest.mark.parametrize("make", [hbnode.NODE, hbnode.HBNODE])
@pytest.mark.parametrize("method", ["tsit5", "dopri5", "rk4"])
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_an_f_that_changes_its_input_in_place_is_refused(gradient, method, make):
    func = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    block, x = hbnode.ODEBlock(make(func), method=method, gradient=gradient), torch.randn(3, 2)
    for grad, leaf in ((True, True), (True, False), (False, False)):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"func changes its input in place.*Fix"):
            block(x.clone().requires_grad_(leaf))
    expected = hbnode.ODEBlock(make(nn.Sequential(nn.ReLU(), func[1])), method=method, gradient=gradient)
    with torch.inference_mode():  # where tensors have no version to tell by, f gets a copy
        torch.testing.assert_close(block(x.clone()), expected(x.clone()))
    func[0] = nn.Threshold(0.0, 0.0)  # the fix
    torch.testing.assert_close(block(x), expected(x))


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
@pytest.mark.parametrize("end", [1.0, -1.0])
def test_callbacks_of_the_field_are_called_as_torchdiffeq_calls_them(method, end):
    names = {"dopri5": CALLBACKS, "rk4": ("callback_step",)}[method]
    names = [*names, *(f"{name}_adjoint" for name in names)]
    settings = {"rtol": 1e-5, "atol": 1e-5, "method": method, "options": {"step_size": 0.25} if method == "rk4" else {}}
    told = []
    for solver, own in (
        (hbnode.odeint, {"gradient": "adjoint", "adjoint_options": {}}),
        (torchdiffeq.odeint_adjoint, {}),
    ):
        field, y0 = Recording(names), torch.ones(3, requires_grad=True)
        solver(field, y0, torch.tensor([0.0, end]), **settings, **own)[-1].sum().backward()
        told.append(field.told)
    assert {name for name, _, _ in told[0]} >= {"callback_step", "callback_step_adjoint"}
    if end < 0:  # torchdiffeq tells an adjoint's callbacks of a solve that goes down the negated time
        told[1] = [(name, -t0 if "adjoint" in name else t0, dt) for name, t0, dt in told[1]]
    assert told[0] == told[1]
    with torch.no_grad(), pytest.warns(UserWarning, match="does not call callback_accept_step of the field. Fix: "):
        hbnode.odeint(Recording(["callback_accept_step"]), torch.ones(3), [0.0, end])


@pytest.mark.sparse
@pytest.mark.parametrize("method", TORCHDIFFEQ_METHODS)
@pytest.mark.parametrize("gradient", ["adjoint", "direct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_method_solves_the_decay_of_a_scalar(method, gradient, dtype):
    """In time of the state's dtype."""
    if gradient not in TORCHDIFFEQ_METHODS[method].gradients:
        return
    rate, times = torch.tensor(1.5, dtype=dtype, requires_grad=True), []
    steps = 60 if TORCHDIFFEQ_METHODS[method].needs_fixed_steps else None
    margin = 3e-2 if method == "euler" else 3e-3  # Euler's error is 1.5² · 1.0 · step / 2, relative to the solution
    options = {"max_order": 4} if "adams" in method else {}  # higher ones are unstable in steps that are this long
    settings = {"method": method, "gradient": gradient, "steps": steps, "rtol": 1e-6, "options": options}
    field = lambda t, y: times.append(t) or -rate * y
    y = hbnode.odeint(field, torch.tensor(2.0, dtype=dtype), [0.0, 0.4, 1.0], **settings)[-1]
    (slope,) = torch.autograd.grad(y, rate)
    assert y.item() == pytest.approx(2 * math.exp(-1.5), rel=margin)
    assert slope.item() == pytest.approx(-2 * math.exp(-1.5), rel=margin)
    assert {y.dtype, *(t.dtype for t in times)} == {dtype}
