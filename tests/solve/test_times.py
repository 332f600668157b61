"""Times: of outputs, of jumps, and those that f sees, with their gradients, against closed forms."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hbnode
from hbnode.solve import methods
from hbnode.solve.grid import Grid
from tests.models import AGAIN
from tests.problems import Forced, damped_oscillator

X = torch.ones(1, 1, dtype=torch.float64)
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("width", [0.05, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sides_of_every_jump_are_seen(width, dtype):
    pulse = lambda t, y: torch.where((t > 5) & (t < 5 + width), 1.0, 0.0).to(y) * torch.ones_like(y)
    y = hbnode.odeint(pulse, X.to(dtype), [0.0, 10.0], jump_times=[5.0, 5.0 + width])
    assert y[-1].item() == pytest.approx(1 + width, abs=1e-4 * width if dtype is torch.float64 else 1e-5)


@pytest.mark.sparse
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", ["nystrom4", "nystrom8", "exponential", "tsit5", "rodas5p"])
def test_a_jump_in_float32_needs_no_step_below_the_rounding_of_times(method, per_sample):
    field = hbnode.HBNODE(lambda t, h: torch.where(t > 1, -40 * h, h), damping=0.5, learn_damping=False)
    h, exact = (
        hbnode.odeint(field, (x, 0 * x), [0.0, 2.0], jump_times=[1.0], rtol=1e-6, atol=1e-6, **settings)[0][-1]
        for x, settings in ((X.float(), {"method": method, "per_sample": per_sample}), (X, {"method": "nystrom8"}))
    )
    torch.testing.assert_close(h, exact.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("t", [[0.0, 1.0, 2.0, 2.5], [0.0, 1.0]])
def test_the_gradient_of_a_time_on_a_knot_is_the_slope_there(t, per_sample):
    signal = hbnode.Signal(float64(0, 1, 2, 3), float64(0, 1, -1, 2))
    t = float64(*t).requires_grad_()
    h = hbnode.odeint(lambda t, y: -y + signal(t), X, t, per_sample=per_sample, **TIGHT)
    h.sum().backward()
    assert t.grad[1:].tolist() == pytest.approx((signal(t) - h.flatten())[1:].tolist(), rel=1e-6)


@pytest.mark.parametrize("row", [[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 0.5, 1]])
@pytest.mark.parametrize("method", ["tsit5", "nystrom8", "exponential"])
def test_gradients_of_times_that_repeat(row, method):
    """The slope of an output in its own time is the velocity there."""
    field = hbnode.HBNODE(lambda h: -h, damping=0.5, learn_damping=False)
    t, weights = float64(row).requires_grad_(), float64(1, 2, 3)
    h, _ = hbnode.odeint(field, (X, 0.3 * X), t, method=method, **TIGHT)
    (weights.view(-1, 1, 1) * h).sum().backward()
    _, velocity = damped_oscillator(1.0, 0.5, 1.0, 0.3, np.array(row) - row[0])
    assert t.grad[0, 1:].tolist() == pytest.approx((weights.numpy() * velocity)[1:].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "t", [pd.Series([0.0, 1.0, 2.0], index=[5, 6, 7]), pd.DataFrame([[0.0, 1.0, 2.0]] * 2), np.array([0, 1, 2])]
)
def test_times_of_pandas_and_numpy(t):
    y = hbnode.odeint(lambda t, y: -y, torch.ones(2, 1, dtype=torch.float64), t, **TIGHT)
    assert y[:, 0, 0].tolist() == pytest.approx(np.exp([-0.0, -1.0, -2.0]).tolist(), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"steps": 8}])
def test_times_in_forward_mode(options):
    solve = lambda t: hbnode.odeint(lambda t, y: -y * (1 + t), X, t, gradient="direct", **TIGHT, **options)
    t = float64(0.0, 0.5, 1.0)
    reverse = torch.func.jacrev(solve)(t)
    torch.testing.assert_close(torch.func.jacfwd(solve)(t), reverse)
    assert reverse[1, 0, 0, 1].item() == pytest.approx(-1.5 * np.exp(-0.625), rel=1e-3)
    with pytest.raises(ValueError, match=r"Fix: odeint with t of shape \(batch, T\)"):
        torch.func.vmap(solve)(torch.stack([t, t]))


@pytest.mark.parametrize("method", ["nystrom4", "nystrom8", "exponential"])
def test_a_damping_of_each_sample_with_steps_of_its_own(method):
    damping, t = [0.1, 1.0, 1.9], [0.0, 0.3, 1.0, 2.0]
    field = hbnode.HBNODE(lambda h: -h, damping=float64(damping).view(3, 1), learn_damping=False)
    h, _ = hbnode.odeint(field, (X.expand(3, 1), 0 * X.expand(3, 1)), t, method=method, per_sample=True, **TIGHT)
    exact = np.stack([damped_oscillator(1.0, gamma, 1.0, 0.0, np.array(t))[0] for gamma in damping], 1)
    np.testing.assert_allclose(h[..., 0].numpy(), exact, rtol=0, atol=1e-6)


def test_parts_of_unlike_dimensions_each_at_the_time_of_their_sample():
    field = lambda t, y: (-y[0], torch.zeros_like(y[1]) + t)
    t = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    _, q = hbnode.odeint(field, (torch.ones(3), torch.zeros(3, 3)), t)
    torch.testing.assert_close(q[-1], (t[:, 1:] ** 2 / 2).expand(3, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", ["interpolate", "exact"])
@pytest.mark.parametrize("gradient", ["direct", AGAIN], ids=["kept", "again"])
def test_a_sample_that_overflows_does_not_move_the_times_of_others(gradient, save):
    """y' = cos t, of which dy/dt is the derivative in a last time; the first attempt overflows for the other sample."""
    is_steep = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    field = hbnode.NODE(lambda t, y: torch.cos(t) - is_steep * y * torch.exp(y * y))
    t, x = float64(0.2, 0.3, 0.35, 0.5, 0.6).requires_grad_(), float64([0.0], [3.0])
    settings = {"per_sample": True, "gradient": gradient, "save": save, "rtol": 1e-4, "atol": 1e-4}
    with hbnode.nfe.record_steps(field) as steps:
        y = hbnode.odeint(field, x, t, options={"first_step": 0.3}, **settings)[:, 0, 0]
    assert steps.accepted[:2] == [True, False]
    exact = torch.sin(t) - torch.sin(t[0])
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-4)
    for k in range(1, 5):
        found, expected = (torch.autograd.grad(z[k], t, retain_graph=True)[0] for z in (y, exact))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=["kept", "again"])
def test_a_step_that_overflows_for_one_sample_leaves_its_gradient_finite(gradient):
    weight = torch.tensor(1.0, requires_grad=True)
    x, field = torch.tensor([[1.8], [0.1]], requires_grad=True), hbnode.NODE(lambda h: -weight * h**15)
    t = torch.tensor([0.0, 0.05, 1.0], requires_grad=True)
    options = {"first_step": 0.1}  # 1.8^15 is 7e3, and the next stage overflows
    h = hbnode.odeint(field, x, t, per_sample=True, gradient=gradient, options=options)
    h.sum().backward()
    exact = (1.8**-14 + 14 * t.detach()[1:].double()) ** (-1 / 14)
    assert h[1:, 0, 0].tolist() == pytest.approx(exact.tolist(), rel=1e-4)
    assert weight.grad.item() == pytest.approx(-(exact**15 * t.detach()[1:]).sum().item(), rel=1e-2)
    assert torch.isfinite(x.grad).all()
    assert t.grad[1].item() == pytest.approx(-(exact[0] ** 15).item(), rel=1e-2)


JUMP, HEIGHT = 0.37, 0.5
SOLVERS = {
    "tsit5": {"method": "tsit5"},
    "dopri5": {"method": "dopri5"},
    "dopri5, adjoint": {"method": "dopri5", "gradient": "adjoint"},
    "tsit5, adjoint": {"method": "tsit5", "gradient": "adjoint"},
    "tsit5, per sample": {"method": "tsit5", "per_sample": True},
    "dopri5, exact": {"method": "dopri5", "save": "exact"},
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("t", [[0.0, 0.2, 0.6, 1.0], [0.0, JUMP, 1.0]], ids=["past", "on"])
def test_a_solve_past_a_jump(name, t):
    """Outputs of y' = c [t >= JUMP] - y, and the gradient of the last one for c."""
    height = torch.tensor(HEIGHT, dtype=torch.float64, requires_grad=True)
    field = lambda t, y: torch.where(t < JUMP, 0.0, height) - y
    solver = {"jump_times": [JUMP], "rtol": 1e-7, "atol": 1e-7} | SOLVERS[name]
    with hbnode.diagnostics.record_steps(field) as steps:
        y = hbnode.odeint(field, torch.ones(2, 1, dtype=torch.float64), t, **solver)
    exact = [math.exp(-time) + HEIGHT * max(1 - math.exp(JUMP - time), 0.0) for time in t]
    assert y[:, 0, 0].tolist() == pytest.approx(exact, abs=2e-5)
    (slope,) = torch.autograd.grad(y[-1, 0, 0], height)
    assert slope.item() == pytest.approx(1 - math.exp(JUMP - 1), abs=2e-5)
    assert min(abs(t + size - JUMP) for t, size in zip(steps.t, steps.size, strict=True)) < 1e-9


@pytest.mark.parametrize("method", ["tsit5", "dopri5"])
@pytest.mark.parametrize(
    "jump_times", [[JUMP, -1.0, 2.0], (2.0, JUMP), torch.tensor([JUMP, JUMP, 0.5], dtype=torch.float64)], ids=str
)
def test_any_times_in_any_order(method, jump_times):
    field = lambda t, y: torch.where(t < JUMP, 0.0, HEIGHT) * torch.ones_like(y)
    for t in ([0.0, 1.0], [1.0, 0.0]):
        y = hbnode.odeint(field, torch.zeros(1).double(), t, method=method, jump_times=jump_times)
        assert y[-1].item() == pytest.approx(math.copysign(HEIGHT * (1.0 - JUMP), t[1] - t[0]), abs=1e-5)


SIDES = {"before": lambda t: t < 1.0, "until": lambda t: t <= 1.0}  # where f has its first value


def fixed_solve(method, t, side, w=1.0, **settings):
    """The solve, in steps that are exact between jumps, of y' or h'' = w before the jump at 1 and -w after it."""
    push = lambda t, y: w * torch.where(SIDES[side](t), 1.0, -1.0).to(y).expand_as(y)
    start, is_any = torch.zeros(4, 1, dtype=torch.float64), methods.ALL_METHODS[method].field == "any"
    field = push if is_any else hbnode.HBNODE(push, damping=0.0, learn_damping=False)
    state = start if is_any else (start, start)
    with hbnode.count_nfe(field) as nfe:
        y = hbnode.odeint(field, state, t, method=method, steps=3, jump_times=[1.0], **settings)
    return (y if is_any else y[1])[..., 0], nfe.forward


@pytest.mark.sparse
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("t", [[0.0, 1.0, 2.0], [0.0, 2.0], [2.0, 0.5, 0.0], [1.0, 2.0], [0.0, 1.0], [2.0, 1.0]])
@pytest.mark.parametrize("method", methods.TRACEABLE)
def test_fixed_steps_at_a_jump(method, t, side):
    y, nfe = fixed_solve(method, t, side)
    hat = lambda time: 1 - abs(time - 1)
    assert y[:, 0].tolist() == pytest.approx([hat(time) - hat(t[0]) for time in t], abs=1e-13)
    parts = len({*t, *({1.0} if min(t) < 1 < max(t) else ())}) - 1
    has_first_same_as_last = method in methods.METHODS and methods.METHODS[method].is_fsal
    evaluations = methods.TRACEABLE[method].evaluations
    restarts = 1 + (1.0 in t[1:-1] or (1.0 not in t)) if has_first_same_as_last else 0
    assert nfe == 3 * parts * evaluations + restarts


MODES = [(name, mode) for name, method in methods.METHODS.items()
         for mode in (AGAIN, *method.gradients) if mode != "checkpoint"]  # fmt: skip


@pytest.mark.parametrize(("method", "gradient"), MODES)
def test_values_and_gradients_of_fixed_steps_with_a_jump(method, gradient):
    """q = w (hat(t) - hat(t_0)) has the gradients hat(t) - hat(t_0) for w and ±w for the times."""
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    t = float64([0, 2.5], [0.5, 1.5], [0, 0.5], [1.25, 2]).requires_grad_()
    y, _ = fixed_solve(method, t, "before", w, gradient=gradient)
    rise = (1 - (t.detach() - 1).abs()).diff()[:, 0]
    torch.testing.assert_close(y[-1], 2 * rise, rtol=0, atol=1e-12)
    of_w, of_t = torch.autograd.grad(y[-1].sum(), [w, t])
    assert of_w.item() == pytest.approx(rise.sum().item(), abs=1e-12)
    torch.testing.assert_close(of_t, 2.0 * torch.where(t < 1, 1.0, -1.0) * float64(-1, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        *({"steps": 3, "method": method} for method in ("tsit5", "nystrom8", "rodas5p")),
        {"save": "exact"},
        {"steps": 8, "events": hbnode.Event(lambda t, y: t - 9.0)},
    ],
    ids=["tsit5", "nystrom8", "rodas5p", "exact", "events"],
)
def test_the_gradient_of_an_output_time_on_a_jump_does_not_move_the_jump(settings):
    """y(2) = 1 - t_0 + 3 (t_2 - 1) does not depend on the output time 1."""
    t, start = float64(0, 1, 2).requires_grad_(), torch.zeros(1, 1, dtype=torch.float64)
    push = lambda t, y: torch.where(t < 1, 1.0, 3.0).to(y).expand_as(y)
    is_pair = settings.get("method") == "nystrom8"
    field = hbnode.HBNODE(push, damping=0.0, learn_damping=False) if is_pair else push
    y = hbnode.odeint(field, (start, start) if is_pair else start, t, jump_times=[1.0], **settings)
    y = y[1] if is_pair else y[0] if "events" in settings else y
    assert torch.autograd.grad(y[2, 0, 0], t)[0].tolist() == pytest.approx([-1, 0, 3], abs=1e-12)


def test_an_output_time_at_the_start_of_a_damped_ball():
    """The derivative of m(t) at t = t_0 is f(h_0) - γ m_0, although the solve takes no step there."""
    field = hbnode.HBNODE(lambda h: -h, damping=0.5, learn_damping=False)
    t, h, m = float64([0, 0, 1], [0, 0.5, 1]).requires_grad_(), float64([2], [1]), float64([3], [1])
    _, momenta = hbnode.odeint(field, (h, m), t)
    assert torch.autograd.grad(momenta[1, 0, 0], t)[0][0].tolist() == pytest.approx([3.5, -3.5, 0])


EPOCH = 1.7e9


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "dopri5"},
        {"steps": 8},
        {"t": [EPOCH + 10, EPOCH]},
        {"t": torch.tensor([[EPOCH, EPOCH + 10], [0.0, 9.0]], dtype=torch.float64)},
        {"jump_times": [EPOCH + 5]},
        {"field": hbnode.NODE(lambda y: -y), "events": hbnode.Event(lambda t, y: t - EPOCH - 5)},
    ],
    ids=lambda value: ",".join(value),
)
def test_late_times_that_float32_rounds_too_much(settings):
    given = {"field": lambda t, y: torch.cos(t) + 0 * y, "y0": torch.zeros(2, 1), "t": [EPOCH, EPOCH + 10], **settings}
    with pytest.raises(
        ValueError, match=r"the torch.float32 of the state rounds the times of f by 2e\+02\. Fix: count"
    ):
        hbnode.odeint(**given)
    given |= {"field": hbnode.NODE(lambda y: 1 + 0 * y), "events": None}  # it does not get the times
    assert hbnode.odeint(**given)[-1].abs().max().item() == pytest.approx(10, rel=1e-5)


def test_late_times_in_float64():
    times = [1e9, 1e9 + 3]
    with pytest.raises(ValueError, match=r"large times in float64, because torch\.float32"):
        hbnode.odeint(lambda t, y: -y, X, torch.tensor(times))
    y = hbnode.odeint(lambda t, y: torch.cos(t - times[0]) + 0 * y, 0 * X, times)
    assert y[-1].item() == pytest.approx(math.sin(3), abs=1e-4)
    assert hbnode.odeint(lambda t, y: -y, X.float(), [100.0, 100.001])[-1].item() == pytest.approx(math.exp(-1e-3))


KNOTS = torch.arange(101, dtype=torch.float64)
PULSE = hbnode.Signal(KNOTS, (KNOTS == 37).double(), outside="hold")  # of integral 1
DELAYS = torch.tensor([[5.0], [20.0]], dtype=torch.float64)
QUERIES = {  # times at which the pulse is asked, the end of the solve, the integral, and the further evaluations
    "itself": (lambda t: t, 100.0, 1.0, 0),
    "view": (lambda t: t.expand(2, 1), 100.0, 1.0, 0),
    "shifted": (lambda t: t - 5, 100.0, 1.0, 2),
    "hours": (lambda t: t / 3600, 360_000.0, 3600.0, 2),
    "backwards": (lambda t: 100 - t, 100.0, 1.0, 2),
    "number": (lambda t: 2 * float(t) - 5, 50.0, 0.5, 2),
    "delays": (lambda t: t - DELAYS, 100.0, 1.0, 2),
}


@pytest.mark.sparse
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_a_signal_asked_at_another_time(query, gradient):
    at, end, integral, further = QUERIES[query]
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    field = lambda t, y: weight * PULSE(at(t)) + 0 * y
    settings = {"per_sample": query == "delays", "gradient": gradient}
    with hbnode.count_nfe(field) as nfe:
        y = hbnode.odeint(field, torch.zeros(2, 1, dtype=torch.float64), [0.0, end], **settings)
    (slope,) = torch.autograd.grad(y[-1, 0, 0], weight)
    assert [*y[-1].flatten().tolist(), slope.item()] == pytest.approx([integral] * 3, rel=1e-9)
    trials = 4  # because the force is 0 at the start
    assert nfe.forward == 6 * (nfe.steps + nfe.rejected) + 1 + trials + further


@pytest.mark.parametrize(("query", "end"), [(lambda t: t % 101, 202.0), (lambda t: t - DELAYS, 101.0)])
def test_a_signal_asked_at_times_that_no_step_can_end_on(query, end):
    field, y0 = lambda t, y: PULSE(query(t)) + 0 * y, torch.zeros(2, 1, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"Fix: options=\{'max_step': w\}"):
        hbnode.odeint(field, y0, [0.0, end])
    y = hbnode.odeint(field, y0, [0.0, end], options={"max_step": 1.0})
    assert y[-1].flatten().tolist() == pytest.approx([end // 101] * 2, rel=1e-2)


@pytest.mark.parametrize("method", ["nystrom4", "nystrom6", "nystrom8"])
def test_the_gradient_of_a_signals_values(method):
    """Their effects on h(2) of h'' = u(t) are the integrals of (2 - t) times the hat functions of the knots."""
    knots = torch.linspace(0, 2, 51, dtype=torch.float64)
    u = (3 * knots).sin().requires_grad_()
    drive = hbnode.Signal(knots, u)
    field = hbnode.HBNODE(lambda t, h: drive(t) + 0 * h, damping=0.0, learn_damping=False)
    h, _ = hbnode.odeint(field, (0 * X, 0 * X), [0.0, 2.0], method=method)
    (slopes,) = torch.autograd.grad(h[-1].sum(), u)
    exact = 0.04 * (2 - knots)
    exact[0], exact[-1] = 0.04 * (1 - 0.04 / 6), 0.04**2 / 6
    torch.testing.assert_close(slopes, exact, rtol=0, atol=1e-12)


METHODS = [name for name, method in methods.METHODS.items() if method.error_order is not None]


FREQUENCIES = st.one_of(st.integers(1, 200), st.sampled_from([10, 20, 40, 50, 100, 200, 1 / 3, 2.5]))


@st.composite
def problems(draw):
    """A forced oscillator and the end of its solve."""
    end, kappa = draw(st.sampled_from([1.0, 2.0, 3.0])), draw(st.sampled_from([0.0, 1.0, 30.0]))
    sines = draw(st.lists(st.tuples(st.floats(0.3, 1.0), FREQUENCIES), min_size=1, max_size=2))
    h0 = draw(st.sampled_from([0.0, 1.0])) if kappa else 0.0
    return Forced(draw(st.sampled_from([0.0, 0.1, 1.0])), kappa, h0, sines), end


@settings(max_examples=5)
@given(
    problems(),
    st.sampled_from(METHODS),
    st.booleans(),
    st.sampled_from([1e-3, 1e-4, 1e-5]),
    st.sampled_from([2, 2, 4, 11]),
)
@example((Forced(0.1, 1.0, 1.0, [(0.7, 20)]), 3.0), "nystrom4", True, 1e-3, 4)
@example((Forced(0.0, 1.0, 1.0, [(0.33, 96)]), 2.0), "tsit5", True, 1e-3, 2)
@example((Forced(0.0, sines=[(1.0, 200)]), 1.0), "tsit5", False, 1e-4, 2)
@example((Forced(0.1, sines=[(1.0, 10)]), 2.0), "exponential", False, 1e-4, 3)
@example((Forced(0.1, 1.0, sines=[(1.0, 20)]), 1.0), "nystrom8", True, 1e-4, 2)
def test_no_force_is_stepped_over(problem, method, per_sample, tolerance, outputs):
    """The error stays within 100 tolerances, or an error says why there is no solution."""
    force, end = problem
    t, start = np.linspace(0, end, outputs), (X * force.h0, 0 * X)
    settings = {"method": method, "per_sample": per_sample, "options": {"max_nfe": 800}}
    try:
        with torch.no_grad():
            found = hbnode.odeint(force.field(), start, t, rtol=tolerance, atol=tolerance, **settings)
    except hbnode.errors.MaxNFEError:
        return
    exact = force.exact(t)
    error = np.abs(torch.stack(found)[..., 0, 0].numpy() - exact)
    assert (error / (1 + np.abs(exact))).max() / tolerance < 100


@pytest.mark.parametrize("direction", [1, -1])
def test_steps_end_on_the_knots_of_a_signal(direction):
    """Between its knots a linear signal is a polynomial, for which steps that end on them are exact."""
    knots, u = float64(0.0, 0.3, 0.37, 1.0, 1.9, 2.0), float64(0.0, 5.0, -3.0, 2.0, 2.0, -4.0)
    signal, ends = hbnode.Signal(knots, u), [0.05, 1.2, 1.95][::direction]
    field = hbnode.HBNODE(lambda t, h: signal(t) + 0 * h, damping=0.0, learn_damping=False)
    with hbnode.count_nfe(field) as nfe:
        found = hbnode.odeint(field, (0 * X, 0 * X), ends, method="nystrom8", rtol=1e-6, atol=1e-6)
    h, m = 0.0, 0.0
    for a, b in itertools.pairwise(sorted({*ends, *(k for k in knots.tolist() if 0.05 < k < 1.95)})[::direction]):
        ua, ub = signal(float64(a, b)).tolist()
        h, m = h + m * (b - a) + (b - a) ** 2 * (ua / 3 + ub / 6), m + (b - a) * (ua + ub) / 2
        if b in ends:
            assert [part[ends.index(b)].item() for part in found] == pytest.approx([h, m], abs=1e-12)
    assert nfe.forward < 150


@pytest.mark.parametrize("gradient", ["direct", AGAIN], ids=["direct", "again"])
@pytest.mark.parametrize(
    ("method", "per_sample", "kind"),
    [("nystrom8", False, "linear"), ("nystrom8", True, "cubic"), ("exponential", True, "linear")],
)
def test_the_gradient_of_the_last_time_is_the_velocity(method, per_sample, kind, gradient):
    """dh(T)/dT = m(T), and dm(T)/dT = u(T) - h(T) - γ m(T), with kinks of the signal on the way."""
    knots = torch.linspace(0, 3, 13, dtype=torch.float64)
    drive = hbnode.Signal(knots, (3 * knots).sin(), kind)
    field = hbnode.HBNODE(lambda t, h: drive(t) - h, damping=0.1, learn_damping=False)
    settings = {"method": method, "per_sample": per_sample, "gradient": gradient, "rtol": 1e-7, "atol": 1e-7}
    for t in (float64(0.0, 1.03, 1.1, 1.2, 2.03), float64(2.9, 0.3)):
        h, m = (part.flatten() for part in hbnode.odeint(field, (X, 0 * X), t.requires_grad_(), **settings))
        by_h, by_m = (torch.autograd.grad(y[-1], t, retain_graph=True)[0] for y in (h, m))
        assert by_h[-1].item() == pytest.approx(m[-1].item(), abs=1e-5)
        assert by_m[-1].item() == pytest.approx((drive(t[-1]) - h[-1] - 0.1 * m[-1]).item(), abs=1e-5)
        assert (by_h[1:-1].abs() < 1e-5).all()


def test_the_sides_of_a_jump_are_apart_by_more_than_the_rounding_of_any_time():
    """Also of the first time of a backward solve, which is the largest."""
    like = torch.zeros((), dtype=torch.float32)
    for t in ([0.0, 1000.0], [1000.0, 0.0], [-1000.0, 0.0]):
        assert Grid.of(torch.tensor(t, dtype=torch.float64), like, None).near >= 1000 * torch.finfo(like.dtype).eps
