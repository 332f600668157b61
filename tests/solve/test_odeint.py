import datetime
import logging
import math
import sys

import pandas as pd
import pytest
import torch
import torchdiffeq
from torch import nn

import hbnode
from hbnode.solve import settings as backend
from hbnode.solve.torchdiffeq import CALLBACKS
from tests.models import make_field, make_input


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "t",
    [
        pd.to_datetime(["2026-11-24 00:00", "2026-11-25 12:00"]),
        pd.to_timedelta([6, 42], unit="h"),
        [datetime.datetime(2026, 11, 24), datetime.datetime(2026, 11, 25, 12)],
    ],
    ids=["dates", "durations", "list"],
)
def test_dates_as_the_error_says(t):
    with pytest.raises(TypeError, match=r"Fix: dates and durations in days, t = pandas.Series\(t\), then"):
        hbnode.odeint(lambda t, y: -y, float64(1.0), t)
    t = pd.Series(t)
    t = (t - t.iloc[0]) / pd.Timedelta(days=1)
    y = hbnode.odeint(lambda t, y: -y, float64(1.0), t, rtol=1e-9, atol=1e-9)
    assert y[-1].item() == pytest.approx(math.exp(-1.5), rel=1e-7)


def test_all_of_torchdiffeqs_methods_are_offered():
    from torchdiffeq._impl.odeint import SOLVERS

    assert set(backend.TORCHDIFFEQ) == set(SOLVERS)


@pytest.mark.parametrize(
    ("method", "gradient"),
    [
        *((method, "direct") for method in (*backend.ADAPTIVE, *backend.FIXED)),
        *((m, "adjoint") for m in backend.TORCHDIFFEQ),
    ],
)
def test_every_method_solves_decay(method, gradient):
    rate = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    steps = 400 if "adams" in method else 100
    steps = steps if method in backend.FIXED else None
    margin = 2e-2 if method == "euler" else 3e-3  # Euler's error is 1.5² · 1.0 · step / 2, relative to the solution
    y = hbnode.odeint(
        lambda t, y: -rate * y,
        float64(2.0),
        [0.0, 0.4, 1.0],
        method=method,
        gradient=gradient,
        steps=steps,
        rtol=1e-6,
    )[-1]
    (slope,) = torch.autograd.grad(y.sum(), rate)
    assert y.item() == pytest.approx(2 * math.exp(-1.5), rel=margin)
    assert slope.item() == pytest.approx(-2 * math.exp(-1.5), rel=margin)


@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tuple_states_are_solved_as_torchdiffeq_solves_the_stacked_state(gradient, dtype):
    """The papers' settings must mean the same: same steps, same evaluations, same numbers, backward included."""
    field = make_field("hbnode").to(dtype)
    h0, m0 = torch.randn(2, 5, 4, dtype=dtype)
    calls = []

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = field

        def forward(self, t, z):
            calls.append(1)
            return torch.stack(self.field(t, (z[0], z[1])))

    def gradients():
        flat = torch.cat([p.grad.reshape(-1) for p in field.parameters() if p.grad is not None])
        field.zero_grad()
        return flat

    t = torch.tensor([0.0, 1.0, 3.0], dtype=dtype)
    solver = torchdiffeq.odeint if gradient == "direct" else torchdiffeq.odeint_adjoint
    inner = [p for name, p in field.named_parameters() if not name.startswith("initial_")]
    extra = {} if gradient == "direct" else {"adjoint_params": inner}
    z = solver(Stacked(), torch.stack([h0, m0]), t, rtol=1e-4, atol=1e-4, method="dopri5", **extra)
    forward = len(calls)
    z[:, 0].pow(2).sum().backward()
    expected = gradients()

    with hbnode.count_nfe(field) as nfe:
        h, m = hbnode.odeint(
            field, (h0, m0), t, rtol=1e-4, atol=1e-4, method="dopri5", gradient=gradient, adjoint_options={}
        )
        h.pow(2).sum().backward()
    assert (nfe.forward, nfe.backward) == (forward, len(calls) - forward)
    precise = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(h, z[:, 0], **precise)
    torch.testing.assert_close(m, z[:, 1], **precise)
    torch.testing.assert_close(gradients(), expected, **precise)


def test_the_adjoints_default_is_the_seminorm_and_inherits_options():
    field = make_field("node").double()
    x = make_input()

    def backward_nfe(**options):
        with hbnode.count_nfe(field) as nfe:
            settings = {"method": "dopri5", "rtol": 1e-6, "atol": 1e-6, "gradient": "adjoint"} | options
            y = hbnode.odeint(field, x, [0.0, 5.0], **settings)[-1]
            (100 * y.sum()).backward()
        return nfe.backward

    assert backward_nfe() == backward_nfe(adjoint_options={"norm": "seminorm"}) < backward_nfe(adjoint_options={})
    grid = {"method": "rk4", "steps": 9}
    assert backward_nfe(**grid) == backward_nfe(**grid, adjoint_options={}) == 36


def test_land_steps_exactly_onto_the_output_times():
    exact = math.cos(3.0)
    spring = hbnode.HBNODE(lambda h: -h, damping=0.0, learn_damping=False)
    state = (float64(1.0), float64(0.0))
    tight = {"method": "dopri8", "rtol": 1e-9, "atol": 1e-9}
    past = hbnode.odeint(spring, state, [0.0, 3.0], **tight)[0][-1].item()
    on = hbnode.odeint(spring, state, [0.0, 3.0], **tight, save="exact")[0][-1].item()
    assert abs(on - exact) < 1e-8 < abs(past - exact)
    latest = []

    def field(t, y):
        latest.append(float(t))
        return -y

    hbnode.odeint(field, float64(1.0), [0.0, 0.7], method="dopri5", save="exact")
    assert max(latest) <= 0.7


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun3", "rk4"])
def test_gradients_for_t_differentiate_steps_that_are_fractions_of_their_interval(method):
    t = float64(0.0, 0.5, 1.2).requires_grad_()

    def end(t):
        return hbnode.odeint(lambda t, y: t * y.sin() + y, float64(0.3), t, method=method, steps=3)[1:]

    assert torch.autograd.gradcheck(end, (t,))


def test_adjoint_gradients_for_t():
    t = float64(0.1, 0.6, 1.3).requires_grad_()
    tight = {"gradient": "adjoint", "rtol": 1e-9, "atol": 1e-9}
    y = hbnode.odeint(lambda t, y: t * y, float64(1.0), t, **tight)
    (slopes,) = torch.autograd.grad(y.sum(), t)
    exact = float64(0.1, 0.6, 1.3).requires_grad_()
    (expected,) = torch.autograd.grad((1 + ((exact[1:] ** 2 - exact[0] ** 2) / 2).exp().sum()), exact)
    torch.testing.assert_close(slopes, expected, rtol=1e-6, atol=1e-7)


def test_times_may_be_lists_integers_or_decreasing():
    decay = lambda t, y: -y
    for t in ([0, 1], torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), (0.0, 1.0)):
        assert hbnode.odeint(decay, float64(1.0), t)[-1].item() == pytest.approx(math.exp(-1), abs=1e-5)
    back = hbnode.odeint(decay, float64(1.0), [1.0, 0.5, 0.0])
    assert back[-1].item() == pytest.approx(math.e, abs=1e-4)


@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_events(gradient, method):
    """A ball thrown up lands after 2 v / g."""
    v = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    state = (float64(1e-9), v[None])
    fall = lambda t, y: (y[1], -9.81 * torch.ones_like(y[1]))
    options = {"step_size": 0.01, "interp": "cubic"} if method == "rk4" else None
    time, (h, m) = hbnode.odeint(
        fall,
        state,
        [0.0, 1.0],
        event_fn=lambda t, y: y[0],
        method=method,
        gradient=gradient,
        options=options,
        rtol=1e-8,
        atol=1e-8,
    )
    assert time.item() == pytest.approx(2 * 3.0 / 9.81, abs=1e-6)
    assert not time.requires_grad
    assert m[-1].item() == pytest.approx(-3.0, abs=1e-5)
    assert h[-1].item() == pytest.approx(0.0, abs=1e-6)
    (slope,) = torch.autograd.grad(h[-1].sum(), v)  # at a fixed time, h grows by t for each unit of v
    assert slope.item() == pytest.approx(time.item(), abs=1e-4)


def test_differentiable_event_times_through_torchdiffeqs_odeint_event():
    v = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    fall = lambda t, y: (y[1], -9.81 * torch.ones_like(y[1]))
    time, _ = torchdiffeq.odeint_event(
        fall,
        (float64(1e-9), v[None]),
        float64(0.0),
        event_fn=lambda t, y: y[0],
        odeint_interface=hbnode.odeint,
        rtol=1e-8,
        atol=1e-8,
    )
    (slope,) = torch.autograd.grad(time, v)
    assert slope.item() == pytest.approx(2 / 9.81, rel=1e-4)


# What a field closes over


def test_the_adjoint_reaches_leaves_that_func_closes_over():
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    net = nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    gradients = []
    for gradient in ("direct", "adjoint"):
        y = hbnode.odeint(lambda t, y: net(y) * rate, x, [0.0, 1.0], gradient=gradient, rtol=1e-9, atol=1e-9)
        gradients.append(torch.autograd.grad(y[-1].pow(2).sum(), [rate, *net.parameters()]))
    for direct, adjoint in zip(*gradients, strict=True):
        torch.testing.assert_close(adjoint, direct, rtol=1e-6, atol=1e-7)


def test_the_adjoint_refuses_what_it_would_drop():
    rate = torch.tensor(0.7, requires_grad=True) * 2
    with pytest.raises(ValueError, match=r"computed outside it \(by MulBackward0\).*Fix: use gradient='direct'"):
        hbnode.odeint(lambda t, y: -rate * y, torch.ones(2), [0.0, 1.0], gradient="adjoint")
    with torch.no_grad():  # no gradient asked for, none dropped
        hbnode.odeint(lambda t, y: -rate * y, torch.ones(2), [0.0, 1.0], gradient="adjoint")


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


def nan_after_half(t, y):
    return torch.where(t > 0.5, torch.nan, -y)


@pytest.mark.parametrize(("method", "steps"), [("dopri5", None), ("bosh3", None), ("rk4", 10), ("scipy_solver", None)])
def test_a_field_that_turns_nan_is_named_with_its_time(method, steps):
    with torch.no_grad(), pytest.raises(hbnode.errors.NonFiniteError, match="returned non-finite values") as error:
        hbnode.odeint(nan_after_half, torch.ones(2), [0.0, 1.0], method=method, steps=steps)
    assert 0.5 < error.value.t < 0.8
    assert error.value.nfe > 0
    assert "step size=" in str(error.value)


def test_a_long_grid_is_no_runaway():
    t = torch.linspace(0, 1, 201)
    y = hbnode.odeint(lambda t, y: -y, torch.ones(1), t, method="euler", max_steps=10)
    assert y[-1].item() == pytest.approx(math.exp(-1), abs=2e-3)


def test_scalar_states():
    weight = torch.tensor(1.5, requires_grad=True)
    for method, steps in (("rk4", 20), ("dopri5", None), ("implicit_adams", 20)):
        for gradient in ("direct", "adjoint"):
            settings = {"method": method, "steps": steps, "gradient": gradient}
            y = hbnode.odeint(lambda t, y: -weight * y, torch.tensor(1.0), [0.0, 1.0], **settings)[-1]
            (slope,) = torch.autograd.grad(y, weight)
            assert y.dtype == torch.float32
            assert y.item() == pytest.approx(math.exp(-1.5), abs=1e-4)
            assert slope.item() == pytest.approx(-math.exp(-1.5), abs=1e-3)


def test_learned_times_in_a_list_get_their_gradient():
    end = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    y = hbnode.odeint(lambda t, y: -y, float64(1.0), [0.0, end], method="rk4", steps=20)
    (slope,) = torch.autograd.grad(y[-1].sum(), end)
    assert slope.item() == pytest.approx(-math.exp(-1), abs=1e-6)


def test_adjoint_options_may_set_another_grid():
    y0 = torch.ones(1, requires_grad=True)
    field = lambda t, y: -y
    for adjoint, evaluations in (({"step_size": 0.2}, 5), ({"step_size": 0.1}, 10), ({}, 3)):
        with hbnode.count_nfe(field) as nfe:
            y = hbnode.odeint(
                field,
                y0,
                torch.tensor([0.0, 1.0]),
                method="euler",
                steps=3,
                gradient="adjoint",
                adjoint_options=adjoint,
            )
            y[-1].sum().backward()
        assert (nfe.forward, nfe.backward) == (3, evaluations)


def test_scipy_that_stops_early_is_named(monkeypatch):
    import torchdiffeq._impl.scipy_wrapper as wrapper

    def stops(*args, **kwargs):
        solution = solve_ivp(*args, **kwargs)
        solution.y = solution.y[:, :1]
        return solution

    solve_ivp = wrapper.solve_ivp
    monkeypatch.setattr(wrapper, "solve_ivp", stops)
    with torch.no_grad(), pytest.raises(hbnode.SolverError, match="scipy stopped after 1 of 2 output times"):
        hbnode.odeint(lambda t, y: -y, torch.ones(2), [0.0, 1.0], method="scipy_solver")


def test_a_bad_last_step_on_a_grid_is_not_carried_on():
    with pytest.raises(hbnode.errors.NonFiniteError) as error:
        hbnode.odeint(lambda t, y: torch.where(t > 0.95, torch.inf, -y), torch.ones(2), [0.0, 1.0], method="rk4")
    assert error.value.t == pytest.approx(1.0)


def test_a_state_that_starts_infinite():
    with pytest.raises(hbnode.errors.NonFiniteError, match="initial state is not finite") as error:
        hbnode.odeint(lambda t, y: -y, torch.tensor([1.0, math.inf]), [0.0, 1.0])
    assert error.value.t == 0


def test_finite_time_blow_up_underflows():
    """Y' = y^2 from 1 is infinite at t = 1."""
    with pytest.raises(hbnode.errors.StepSizeUnderflowError, match="step size underflowed") as error:
        hbnode.odeint(lambda t, y: y**2, float64(1.0), [0.0, 2.0], max_steps=10**6)
    assert error.value.t == pytest.approx(1.0, abs=1e-4)
    assert 0 < error.value.step_size < 1e-12


def test_runaway_solves_stop():
    for method, expected in (("dopri5", 2 + 6 * 20), ("tsit5", 1 + 6 * 20)):
        with pytest.raises(hbnode.errors.MaxStepsError, match="more than max_steps=20 steps") as error:
            hbnode.odeint(
                lambda t, y: torch.cos(1e3 * t) + 0 * y, float64(0.0), [0.0, 10.0], method=method, max_steps=20
            )
        assert error.value.nfe == expected
    with torch.no_grad(), pytest.raises(hbnode.errors.MaxStepsError, match="max_steps=50 evaluations"):
        hbnode.odeint(
            lambda t, y: torch.cos(1e3 * t) + 0 * y, float64(0.0), [0.0, 10.0], method="scipy_solver", max_steps=50
        )


def test_an_event_that_never_comes_stops():
    for method, options in (("dopri5", None), ("rk4", {"step_size": 0.1})):
        with pytest.raises(hbnode.errors.MaxStepsError):
            hbnode.odeint(
                lambda t, y: torch.cos(t) + 0 * y,
                float64(0.0),
                [0.0, 1.0],
                event_fn=lambda t, y: y.sum() - 5,
                method=method,
                options=options,
                max_steps=100,
            )


def test_failures_of_the_adjoint_are_named_too():
    y0 = torch.ones(2, requires_grad=True)
    y = hbnode.odeint(lambda t, y: -y, y0, [0.0, 1.0], method="dopri5", gradient="adjoint")
    with pytest.raises(hbnode.errors.NonFiniteError, match=r"adjoint state is not finite.*loss") as error:
        (y[-1] * math.inf).sum().backward()
    assert error.value.t == pytest.approx(1.0)

    # a root whose slope is infinite at 0
    root = lambda t, y: y.sqrt() * 0 - 0 * y
    y = hbnode.odeint(root, y0 * 0, [0.0, 1.0], method="dopri5", gradient="adjoint")
    with pytest.raises(hbnode.errors.NonFiniteError, match="adjoint"):
        y[-1].sum().backward()


def test_an_adjoint_of_a_decreasing_solve_reports_true_time():
    y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    state = {"backward": False}

    def field(t, y):
        return torch.where((t > 3.0) & state["backward"], torch.nan, -y)

    y = hbnode.odeint(field, y0, [4.0, 2.0], method="dopri5", gradient="adjoint")
    state["backward"] = True
    with pytest.raises(hbnode.errors.NonFiniteError) as error:
        y[-1].sum().backward()
    assert 3.0 < error.value.t <= 4.5


def test_solver_errors_pickle():
    import pickle

    error = hbnode.errors.MaxStepsError("too many", t=0.5, step_size=1e-3, nfe=7)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.t, copy.step_size, copy.nfe) == (type(error), str(error), 0.5, 1e-3, 7)
    assert issubclass(hbnode.errors.MaxStepsError, hbnode.SolverError)


def test_an_assertion_of_the_users_own_comes_through():
    def field(t, y):
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        hbnode.odeint(field, torch.ones(1), [0.0, 1.0])


def test_torchdiffeqs_assertions_do_not():
    grid = {"grid_constructor": lambda func, y0, t: t + 1}  # does not begin where it must
    with pytest.raises(hbnode.SolverError, match="torchdiffeq's rk4 gave up"):
        hbnode.odeint(lambda t, y: -y, torch.ones(1), [0.0, 1.0], method="rk4", options=grid)


# Bad input


ONE = torch.ones(1)
ADJOINT = {"method": "dopri5", "gradient": "adjoint"}


def closure_over_a_leaf():
    rate = torch.ones(1, requires_grad=True)
    return lambda t, y: -rate * y


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"method": "dopri6"}, ValueError, "unknown method 'dopri6'; expected one of .*dopri5"),
        ({"gradient": "backprop"}, ValueError, "unknown gradient 'backprop'.*expected one of .*'checkpoint'"),
        (
            {"per_sample": True, "method": "dopri5"},
            ValueError,
            "per_sample=True is not possible with method='dopri5'",
        ),
        ({"rtol": 0.0}, ValueError, "rtol must be a positive number, got 0.0"),
        ({"atol": -1e-3}, ValueError, "atol must be a positive number, got -0.001"),
        ({"rtol": 1e-10}, ValueError, "rtol=1e-10 is far below what torch.float32 carries.*Fix: solve in float64"),
        ({"rtol": "1e-3"}, ValueError, "rtol must be a positive number, got '1e-3'"),
        ({"t": [0.0, math.inf]}, ValueError, "t must be finite"),
        ({"options": "steps"}, TypeError, "options must be a dict, got str"),
        (
            {"options": {"step_sise": 0.1}, "method": "dopri5"},
            ValueError,
            r"options has \['step_sise'\], which method='dopri5' does not know",
        ),
        ({"options": {"max_num_steps": 9}, "method": "dopri5"}, ValueError, "Fix: max_steps=n, an argument"),
        ({"options": {"step_size": -0.1}, "method": "rk4"}, ValueError, r"options\['step_size'\] must be positive"),
        ({"adjoint_options": {"norm": "semi"}, **ADJOINT}, ValueError, "must be 'seminorm' or a function"),
        ({"adjoint_options": {"rtol": 1e-3}, **ADJOINT}, ValueError, r"adjoint_options has \['rtol'\]"),
        ({"event_fn": lambda t, y: 1.0}, TypeError, "event_fn must return a tensor, got float"),
        ({"field": hbnode.HBNODE(nn.Linear(1, 1))}, TypeError, "HBNODE is solved on a pair of tensors, got shape"),
        ({"field": hbnode.NODE(nn.Linear(1, 1)), "y0": (ONE, ONE)}, TypeError, "NODE is solved on a tensor, got"),
        ({"max_steps": 0}, ValueError, "max_steps must be an integer >= 1, got 0"),
        ({"t": [0.0, 0.5, 0.5]}, ValueError, r"t\[1\]=0.5 is followed by t\[2\]=0.5"),
        ({"t": [0.0, 1.0, 0.5]}, ValueError, r"t\[1\]=1 is followed by t\[2\]=0.5"),
        ({"t": [0.0, math.nan]}, ValueError, "t must be finite"),
        ({"t": pd.to_datetime(["2026-11-24", "2026-11-25"])}, TypeError, "numbers, .* got a DatetimeIndex"),
        ({"t": ["0.0", "1.0"]}, TypeError, "numbers, .* got a list of str"),
        ({"t": torch.zeros(2, 2), "method": "dopri5"}, ValueError, r"one-dimensional, got shape \(2, 2\)"),
        ({"t": []}, ValueError, "at least one time"),
        ({"y0": torch.ones(1, dtype=torch.int64)}, TypeError, r"floating point .* got torch.int64. Fix: x.float\(\)"),
        ({"y0": (ONE, ONE.double())}, TypeError, "of one dtype, got torch.float32, torch.float64"),
        ({"y0": [1.0]}, TypeError, "a tensor or a tuple of tensors, got list"),
        ({"field": 3}, TypeError, "field must be callable"),
        ({"field": lambda t, y: y[:, None]}, ValueError, r"returned shape \(1, 1\) for a state of shape \(1\,\)"),
        ({"field": lambda t, y: (y, y)}, ValueError, r"returned \(shape .* for a state of shape"),
        ({"field": lambda t, y: y.double()}, TypeError, "returned torch.float64 for a state of torch.float32"),
        ({"field": hbnode.NODE(lambda h: h.sum())}, ValueError, r"func returned shape \(\); expected .* \(1,\)"),
        ({"field": hbnode.NODE(lambda h: 1.0)}, ValueError, "func returned type float"),
        ({"field": hbnode.NODE(nn.Linear(1, 1).double())}, TypeError, "state is torch.float32, the field's parameters"),
        ({"steps": 4, "method": "dopri5"}, ValueError, "steps=4 is a fixed grid, which method='dopri5' does not have"),
        ({"steps": 0, "method": "rk4"}, ValueError, "steps must be a positive integer, got 0. Fix: steps=8"),
        ({"steps": 2, "options": {"step_size": 0.1}, "method": "rk4"}, ValueError, "Fix: give one of them"),
        ({"adjoint_options": {"steps": 2}, "method": "rk4", "gradient": "adjoint"}, ValueError, "Fix: steps=n"),
        ({"save": "exact", "method": "scipy_solver"}, ValueError, "not possible with method='scipy_solver'"),
        ({"jump_times": [0.5], "method": "rk4"}, ValueError, "jump_times are for adaptive steps, got method='rk4'"),
        ({"event_fn": lambda t, y: y.sum(), "t": [0.0, 1.0, 2.0]}, ValueError, "t must hold two times .* got 3"),
        ({"event_fn": lambda t, y: y.sum(), "method": "rk4"}, ValueError, "without options={'step_size': dt}"),
        ({"method": "scipy_solver", "y0": ONE.clone().requires_grad_()}, ValueError, "no direct gradient"),
        ({"method": "scipy_solver", "field": closure_over_a_leaf()}, ValueError, "no direct gradient"),
    ],
)
def test_bad_input(change, kind, message):
    arguments = {"field": lambda t, y: -y, "y0": ONE, "t": [0.0, 1.0]} | change
    with pytest.raises(kind, match=message):
        hbnode.odeint(arguments.pop("field"), arguments.pop("y0"), arguments.pop("t"), **arguments)


def test_a_tolerance_below_rounding_is_mentioned_once(caplog):
    sys.modules["hbnode.solve.odeint"]._log_tight_tolerance.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hbnode"):
        for _ in range(3):
            hbnode.odeint(lambda t, y: -y, torch.ones(2), [0.0, 1.0], rtol=1e-7, atol=1e-5)
    assert len(caplog.records) == 1
    assert "below the rounding of torch.float32" in caplog.text


class Recording(nn.Module):
    """A field that notes the times it is asked for, with torchdiffeq's callbacks."""

    def __init__(self, callbacks=()):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(1.5))
        self.times, self.told = [], []
        for name in callbacks:
            setattr(self, name, lambda t0, y0, dt, name=name: self.told.append((name, float(t0), float(dt))))

    def forward(self, t, y):
        self.times.append(t)
        return -self.rate * (1 + t) * y


@pytest.mark.parametrize("method", [*backend.ADAPTIVE, *backend.FIXED, "scipy_solver"])
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_a_scalar_state_and_its_time_are_of_one_dtype(method, gradient):
    field, y0 = Recording(), torch.tensor(2.0)
    steps = 12 if method in backend.FIXED else None
    with torch.set_grad_enabled(method != "scipy_solver"):
        y = hbnode.odeint(field, y0, [0.0, 1.0], method=method, gradient=gradient, steps=steps, rtol=1e-3)
        if y.requires_grad:
            y[-1].backward()
    assert y.dtype == torch.float32
    assert {t.dtype for t in field.times} == {torch.float32}


@pytest.mark.parametrize("method", ["dopri5", "rk4", "tsit5"])
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
@pytest.mark.parametrize("make", [hbnode.NODE, hbnode.HBNODE])
@pytest.mark.parametrize("leaf", [False, True])
def test_an_f_that_changes_its_input_in_place_is_refused(method, gradient, make, leaf):
    func = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    block = hbnode.ODEBlock(make(func), method=method, gradient=gradient)
    x = torch.randn(3, 2)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"func changes its input in place.*Fix"):
            block(x.clone().requires_grad_(leaf))
    expected = hbnode.ODEBlock(make(nn.Sequential(nn.ReLU(), func[1])), method=method, gradient=gradient)
    with torch.inference_mode():  # where tensors have no version to tell by, f gets a copy
        torch.testing.assert_close(block(x.clone()), expected(x.clone()))
    func[0] = nn.Sequential(Cloned(), nn.ReLU(inplace=True))  # the fix
    torch.testing.assert_close(block(x), expected(x))


class Cloned(nn.Module):
    def forward(self, h):
        return h.clone()


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
@pytest.mark.parametrize("end", [1.0, -1.0])
def test_callbacks_of_the_field_are_called_as_torchdiffeq_calls_them(method, end):
    names = {"dopri5": CALLBACKS, "rk4": ("callback_step",)}[method]
    names = [*names, *(f"{name}_adjoint" for name in names)]
    t = torch.tensor([0.0, end])
    told = []
    for solver in (hbnode.odeint, torchdiffeq.odeint_adjoint):
        field, y0 = Recording(names), torch.ones(3, requires_grad=True)
        own = {"gradient": "adjoint", "adjoint_options": {}} if solver is hbnode.odeint else {}
        settings = {
            "rtol": 1e-5,
            "atol": 1e-5,
            "method": method,
            "options": {"step_size": 0.25} if method == "rk4" else {},
        }
        solver(field, y0, t, **settings, **own)[-1].sum().backward()
        told.append(field.told)
    assert {name for name, _, _ in told[0]} >= {"callback_step", "callback_step_adjoint"}
    if end < 0:  # torchdiffeq tells an adjoint's callbacks of a solve that goes down the negated time
        told[1] = [(name, -t0 if "adjoint" in name else t0, dt) for name, t0, dt in told[1]]
    assert told[0] == told[1]


@pytest.mark.parametrize("method", [None, "tsit5", "rk4", "scipy_solver"])
def test_callbacks_that_a_method_does_not_call_are_mentioned(method):
    field = Recording(["callback_accept_step"])
    with torch.no_grad(), pytest.warns(UserWarning, match="does not call callback_accept_step of the field. Fix: "):
        hbnode.odeint(field, torch.ones(3), [0.0, 1.0], method=method)


@pytest.mark.parametrize("t", [[0.0, 1.0], [0.0, -1.0]])
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_perturb_keeps_away_from_the_start(gradient, t):
    field, y0 = Recording(), torch.ones(3)
    with hbnode.count_nfe(field) as nfe:
        hbnode.odeint(field, y0, t, method="euler", gradient=gradient, steps=2, options={"perturb": True})
    assert nfe.forward == len(field.times) == 2
    assert all(time != 0 for time in field.times)
    assert field.times[0].item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("method", "steps"), [("dopri5", None), ("rk4", None), ("tsit5", 4), ("tsit5", None)])
def test_times_that_the_user_changes_afterwards(method, steps):
    field, x = hbnode.NODE(lambda t, h: torch.cos(5 * t) * h, time_dependent=True), torch.ones(1, 1)
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    first = hbnode.odeint(field, x, t, method=method, steps=steps)
    t.mul_(3.0)
    torch.testing.assert_close(hbnode.odeint(field, x, [0.0, 1.0], method=method, steps=steps), first)
