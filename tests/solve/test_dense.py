"""Outputs inside of steps: their errors, gradients, counts, and when steps pass output times at all."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hbnode
from hbnode.solve.control import UNEVEN
from hbnode.solve.methods import EXPONENTIAL, METHODS, NYSTROM, RUNGE_KUTTA
from tests.models import AGAIN, make_field, make_input
from tests.problems import Driven, damped_oscillator, driven_exact

ADAPTIVE = (*NYSTROM, *EXPONENTIAL, *RUNGE_KUTTA)
every_method = pytest.mark.parametrize("method", ADAPTIVE)
TOLERANCES = (1e-2, 1e-4, 1e-6, 1e-9)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def oscillator(gamma, omega=3.0):
    return hbnode.HBNODE(lambda h: -(omega**2) * h, damping=gamma, learn_damping=False).double()


def driven(gamma=0.4):
    return hbnode.HBNODE(Driven(gamma), damping=gamma, learn_damping=False)


def start(exact):
    """The state at the first of the times of an exact (h, m), of shape (1,)."""
    return tuple(float64(x[0]) for x in exact)


def worst(found, exact, tolerance):
    """The largest error over the tolerance at its scale, of all parts and times."""
    ratios = [
        np.abs(x.detach().double().numpy().reshape(e.shape) - e) / (tolerance + tolerance * np.abs(e))
        for x, e in zip(found, exact, strict=True)
    ]
    return max(ratio.max() for ratio in ratios)


# Errors


@every_method
@pytest.mark.parametrize("problem", ["damped", "undamped", "driven"])
def test_errors_stay_within_the_tolerance(method, problem):
    """Between the ends of steps they are no larger than at them, but for the tolerance itself."""
    t = np.linspace(0.0, 3.0, 151)
    if problem == "driven":
        field, exact = driven(), driven_exact(0.4, t)
    else:
        gamma = 0.3 if problem == "damped" else 0.0
        field, exact = oscillator(gamma), damped_oscillator(3.0, gamma, 1.0, 0.5, t)
    for tolerance in TOLERANCES:
        solve = functools.partial(hbnode.odeint, field, start(exact), method=method, rtol=tolerance, atol=tolerance)
        with hbnode.count_nfe(field) as nfe:
            found = solve(t, save="interpolate")
        ends = solve(t[[0, -1]])
        at_the_end = worst(ends, [x[[0, -1]] for x in exact], tolerance)
        assert worst(found, exact, tolerance) < 1.0 + 3.0 * max(at_the_end, 1.0)
        assert nfe.steps < 150 or tolerance < 1e-6


@pytest.mark.parametrize(
    ("method", "size", "orders"),
    [
        ("nystrom4", 0.1, (4, 4)),
        ("nystrom6", 0.4, (6, 5)),
        ("nystrom8", 0.4, (7, 6)),
        ("exponential", 0.2, (4, 4)),
        ("tsit5", 0.4, (4, 4)),
    ],
)
@pytest.mark.parametrize("t", [(0.0, 2.0), (2.0, 0.5)], ids=["up", "down"])
def test_order_of_convergence(method, size, orders, t):
    """Between steps of a size that is held fixed, for h and for m."""
    t = np.linspace(*t, 41)
    exact = driven_exact(0.4, t)
    found = []
    for step in (size, size / 2):
        options = {"first_step": step, "max_step": step}
        got = hbnode.odeint(driven(), start(exact), t, method=method, options=options, rtol=1.0, atol=1.0)
        found.append([np.abs(x[:, 0].numpy() - e).max() for x, e in zip(got, exact, strict=True)])
    for first, second, order in zip(*found, orders, strict=True):
        assert np.log2(first / second) > order - 0.4


# Gradients


@pytest.mark.parametrize("model", ["hbnode", "node"])
@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
def test_gradients_agree_with_a_tight_reference(model, gradient):
    """Of a random weighting of all outputs: for x, the times, gamma and all parameters."""
    torch.manual_seed(0)
    field = make_field(model).double()
    x = make_input()
    t = torch.linspace(0.2, 1.5, 4 if gradient == "adjoint" else 14, dtype=torch.float64)
    weights = torch.randn(len(t), *x.shape, dtype=torch.float64)

    def gradients(**settings):
        leaves = [x.detach().requires_grad_(), t.detach().requires_grad_(), *field.parameters()]
        states = hbnode.odeint(field, field.initial_state(leaves[0]), leaves[1], **settings)
        states = states if isinstance(states, tuple) else (states,)
        value = sum(((i + 1) * weights * part).sum() for i, part in enumerate(states))
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, leaves)])

    tight = {"rtol": 1e-12, "atol": 1e-12, "save": "exact", "gradient": "direct"}
    reference = gradients(**tight, method="nystrom8" if model == "hbnode" else "tsit5")
    for method in ADAPTIVE if model == "hbnode" else RUNGE_KUTTA:
        for tolerance in (1e-3, 1e-9):
            found = gradients(method=method, gradient=gradient, rtol=tolerance, atol=tolerance, save="interpolate")
            error = (found - reference).norm() / reference.norm()
            assert error < 20 * tolerance, (method, tolerance)


def matrix_of(method, gamma, size):
    """C of a step without an error estimate, from its coefficients in the order of their use."""
    first, *later = method.unpack(method.packed(torch, gamma, size, error=False), 0, error=False)
    later = [nn.functional.pad(column, (len(first) - len(column), 0)) for column in later]
    return torch.cat([first, torch.stack(later, 1)], 1)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN], ids=["direct", "kept", "again"])
@every_method
def test_the_gradient_for_the_times_is_that_of_the_map(method, gradient):
    """A slow twin: steps end at constant fractions of the output intervals that they end in."""
    field = driven()
    t = float64(0.0, 0.3, 0.5, 0.6, 1.1, 1.2).requires_grad_()
    state = (float64(1.5), float64(0.2))
    settings = {"method": method, "options": {"first_step": 0.3, "max_step": 0.3}}
    got = hbnode.odeint(field, state, t, gradient=gradient, rtol=1.0, atol=1.0, **settings)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    found = torch.autograd.grad((weights[:, None] * (got[0] + 2 * got[1])).sum(), t)[0]

    inner, grid, n = METHODS[method], t.detach().tolist(), METHODS[method].rows
    gamma, begin, outputs = torch.tensor(0.4, dtype=torch.float64), t[0], [torch.stack(state)]
    rows = torch.stack(state) if n == 2 else torch.stack(state)[None]
    evaluate = field.force if n == 2 else lambda s, y: torch.stack(field(s, tuple(y)))
    first = 0.3 * UNEVEN
    for end in np.linspace(first, 1.2, 4).tolist():  # of four steps three end inside of an interval
        i = max(k for k in range(5) if grid[k] < end - 1e-9)
        fraction = (end - grid[i]) / (grid[i + 1] - grid[i])
        end = t[i] * (1 - fraction) + t[i + 1] * fraction
        size = end - begin
        matrix = matrix_of(inner, gamma, size)
        columns = [*rows, evaluate(begin, rows[0])]
        for k, node in enumerate(inner.nodes):
            x = torch.tensordot(matrix[k, : len(columns)], torch.stack(columns), 1)
            columns.append(evaluate(begin + node * size, x))
        columns = torch.stack(columns)
        for time in t[1:-1]:
            if begin < time < end:
                blend = inner.blend(torch, gamma, size[None], ((time - begin) / size)[None])[0]
                outputs.append(torch.tensordot(blend, columns, 1).view(2, 1))
        stages = len(inner.nodes) - 1
        rows = torch.tensordot(matrix[stages : stages + n], columns, 1)
        begin = end
    outputs = torch.stack([*outputs, rows.view(2, 1)])
    torch.testing.assert_close(torch.stack(got, 1), outputs, rtol=1e-10, atol=1e-12)
    wanted = torch.autograd.grad((weights[:, None] * (outputs[:, 0] + 2 * outputs[:, 1])).sum(), t)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


# Which steps pass output times


def nfe_of(field, state, t, **settings):
    with hbnode.count_nfe(field) as nfe:
        found = hbnode.odeint(field, state, t, **settings)
    return nfe, found


@every_method
def test_steps_that_are_longer_than_the_intervals_pass_them(method):
    """Then many output times cost no more than one, whichever way time goes."""
    t = np.linspace(0.0, 2.0, 101)
    for times in (t, t[::-1].copy()):
        exact = driven_exact(0.4, times)
        settings = {"method": method, "rtol": 1e-4, "atol": 1e-4}
        passing, found = nfe_of(driven(), start(exact), times, **settings)
        landing, there = nfe_of(driven(), start(exact), times, **settings, save="exact")
        assert passing.forward < landing.forward / 5
        assert landing.steps == 100
        assert worst(there, exact, 1e-4) < 1
        for one, other in zip(found, there, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@every_method
def test_a_step_ends_on_each_output_time_if_that_is_asked_for(method):
    t = [0.0, 0.5, 1.0, 2.0]
    exact = driven_exact(0.4, np.array(t))
    settings = {"method": method, "rtol": 1e-6, "atol": 1e-6}
    ends = {}
    for save in ("interpolate", "exact"):
        field = driven()
        with hbnode.diagnostics.record_steps(field) as steps:
            found = hbnode.odeint(field, start(exact), t, **settings, save=save)
        assert worst(found, exact, 1e-6) < 20
        taken = zip(steps.t, steps.size, steps.accepted, strict=True)
        ends[save] = {round(begin + size, 9) for begin, size, accepted in taken if accepted}
    assert ends["exact"] >= set(t[1:])
    assert not ends["interpolate"] >= set(t[1:])


def test_irregular_times():
    """A cluster of outputs is passed; the long intervals beside it are landed on; many lie in one step."""
    t = np.concatenate([[0.0, 2.0], 2.0 + np.linspace(1e-3, 1e-2, 50), [2.5, 4.0, 4.0 + 1e-9]])
    exact = driven_exact(0.4, t)
    for method in ADAPTIVE:
        settings = {"method": method, "rtol": 1e-7, "atol": 1e-7}
        nfe, found = nfe_of(driven(), start(exact), t, **settings)
        few, _ = nfe_of(driven(), start(exact), t[[0, 1, -3, -2]], **settings)
        assert nfe.steps <= few.steps + 4
        assert worst(found, exact, 1e-7) < 10


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
@pytest.mark.parametrize("save", ["interpolate", "exact"])
def test_one_time_and_an_empty_batch(save, gradient):
    for field in (make_field("hbnode"), make_field("node")):
        settings = {"gradient": gradient, "save": save}
        x = make_input(dtype=torch.float32).requires_grad_()
        once = field.readout(hbnode.odeint(field, field.initial_state(x), [0.3], **settings))
        torch.testing.assert_close(once[0], field.readout(field.initial_state(x)))
        once.sum().backward()
        empty = x.detach()[:0].requires_grad_()
        none = field.readout(hbnode.odeint(field, field.initial_state(empty), np.linspace(0, 1, 9), **settings))
        assert none.shape == (9, 0, x.shape[1])
        none.sum().backward()
        assert empty.grad.shape == empty.shape


# Counts, and the rest of the library


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_outputs_cost_little_beside_the_steps():
    """No work for each output: the operations of a solve do not grow with their number."""
    field = driven()
    state = start(driven_exact(0.4, np.zeros(1)))
    counts = []
    for outputs in (50, 1000):
        with Operations() as operations:
            hbnode.odeint(field, state, np.linspace(0, 2, outputs), method="nystrom6")
        counts.append(operations.count)
    assert counts[1] < 1.1 * counts[0]
