"""The native methods: their orders, their control of steps, and what they say when they fail."""

import copy
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.nn.nets import MLP
from hbnode.solve.methods import EXPONENTIAL, METHODS, NYSTROM, SPLITTING
from tests.models import AGAIN, every_model, make_field, make_input
from tests.problems import Driven, Kepler, driven_exact, kepler_exact, kepler_start

ORDERS = {"nystrom4": 4, "nystrom6": 6, "nystrom8": 8, "exponential": 5, "tsit5": 5, "leapfrog": 2, "blanes_moan4": 4}
STEPS = {"nystrom4": (16, 32), "nystrom6": (8, 16), "nystrom8": (4, 8), "tsit5": (16, 32)}
every_method = pytest.mark.parametrize("method", METHODS)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def driven(gamma=0.4, **options):
    h, m = driven_exact(gamma, 0.0)
    return hbnode.HBNODE(Driven(gamma), damping=gamma, learn_damping=False, **options), (float64(h), float64(m))


def errors(method, t, **settings):
    """Of h and m at the last time."""
    field, state = driven()
    h, m = hbnode.odeint(field, state, t, method=method, **settings)
    exact = driven_exact(0.4, t[-1])
    return abs(h[-1].item() - exact[0]), abs(m[-1].item() - exact[1])


# Orders


@every_method
@pytest.mark.parametrize("t", [[0.0, 2.0], [2.0, 0.5]], ids=["up", "down"])
def test_order_of_convergence(method, t):
    field, _ = driven()
    h, m = driven_exact(0.4, t[0])
    coarse, fine = STEPS.get(method, (16, 32))
    found = []
    for steps in (coarse, fine):
        got = hbnode.odeint(field, (float64(h), float64(m)), t, method=method, steps=steps)
        found.append([abs(x[-1].item() - e) for x, e in zip(got, driven_exact(0.4, t[1]), strict=True)])
    for first, second in zip(*found, strict=True):
        assert math.log2(first / second) > ORDERS[method] - 0.4
    assert max(found[1]) < 3e-3


@pytest.mark.parametrize("method", SPLITTING)
def test_order_of_the_splittings_for_ghbnode(method):
    torch.manual_seed(0)
    field = make_field("ghbnode").double()
    state = (make_input(), make_input())
    exact, _ = hbnode.odeint(field, state, [0.0, 1.0], method="dopri8", save="exact", rtol=1e-12, atol=1e-13)
    found = []
    for steps in (8, 16):
        h, _ = hbnode.odeint(field, state, [0.0, 1.0], method=method, steps=steps)
        found.append((h[-1] - exact[-1]).norm().item())
    assert math.log2(found[0] / found[1]) == pytest.approx(ORDERS[method], abs=0.3)


@pytest.mark.parametrize("method", SPLITTING)
def test_an_activation_that_is_not_elementwise(method):
    """It gets the momentum in the shape of the state."""
    activation = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).double()
    field = hbnode.GHBNODE(MLP(4, [6], 4), activation=activation).double()
    state = (make_input(), make_input())
    exact, _ = hbnode.odeint(field, state, [0.0, 1.0], method="tsit5", rtol=1e-10, atol=1e-10)
    for gradient in ("direct", "checkpoint", AGAIN, "reversible"):
        h, _ = hbnode.odeint(field, state, [0.0, 1.0], method=method, steps=100, gradient=gradient)
        torch.testing.assert_close(h[-1], exact[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["nystrom4", "nystrom6", "nystrom8", "exponential", "tsit5"])
def test_tighter_tolerances_reach_smaller_errors(method):
    previous = math.inf
    for tolerance in (1e-3, 1e-5, 1e-7, 1e-9):
        error = max(errors(method, [0.0, 2.0], rtol=tolerance, atol=tolerance))
        assert error < 30 * tolerance
        assert error < previous
        previous = error


@pytest.mark.parametrize("method", [*NYSTROM, *EXPONENTIAL, "tsit5"])
def test_two_bodies(method):
    """Eccentricities 0.1 to 0.9 over a period and a half, each sample with steps of its own and in one batch."""
    e = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    h, m = kepler_exact(e, 20.0)
    field = hbnode.HBNODE(Kepler(), damping=0.0, learn_damping=False)
    tolerance = 1e-7 if method == "nystrom4" else 1e-9
    tight = {"rtol": tolerance, "atol": tolerance}
    for per_sample in (False, True):
        got = hbnode.odeint(field, kepler_start(e), [0.0, 20.0], method=method, per_sample=per_sample, **tight)
        np.testing.assert_allclose(got[0][-1].numpy(), h, atol=2e4 * tolerance)
        np.testing.assert_allclose(got[1][-1].numpy(), m, atol=2e5 * tolerance)


@pytest.mark.parametrize("method", [*NYSTROM, *EXPONENTIAL, *SPLITTING])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 4.0])
def test_damping_without_a_force(method, gamma):
    """H' = m, m' = -gamma m: splittings damp exactly in one step of any size, Nystrom methods to their order.

    Exponential methods solve it exactly.
    """
    field = hbnode.HBNODE(lambda h: 0.0 * h, damping=gamma, learn_damping=False)
    steps = 20 if method in NYSTROM else 1
    h, m = hbnode.odeint(field, (float64(1.0), float64(2.0)), [0.0, 1.5], method=method, steps=steps)
    decay = math.exp(-1.5 * gamma)
    assert m[-1].item() == pytest.approx(2 * decay, rel=1e-3 if method in NYSTROM else 1e-14)
    if method not in SPLITTING:
        way = 2 * (1.5 if gamma == 0 else (1 - decay) / gamma)
        assert h[-1].item() == pytest.approx(1 + way, rel=1e-4 if method in NYSTROM else 1e-14)


@pytest.mark.parametrize("method", [*NYSTROM, *EXPONENTIAL, *SPLITTING])
@pytest.mark.parametrize("learn", [True, False])
def test_a_damping_for_each_channel(method, learn):
    """The same as one solve for each channel, in values and in the gradient for every gamma."""
    gammas = float64(0.05, 0.4, 0.9)
    h0, m0 = torch.randn(2, 5, 3, dtype=torch.float64)
    force = lambda h: -torch.sin(2 * h)
    steps = 4
    field = hbnode.HBNODE(force, damping=gammas, learn_damping=learn).double()
    h, _ = hbnode.odeint(field, (h0, m0), [0.0, 1.0], method=method, steps=steps)
    assert ("omega" in field.state_dict()) == learn
    torch.testing.assert_close(field.damping.detach(), gammas, rtol=1e-7, atol=0)
    for i, gamma in enumerate(field.damping.detach().tolist()):
        single = hbnode.HBNODE(force, damping=gamma, learn_damping=learn).double()
        state = (h0[:, i : i + 1], m0[:, i : i + 1])
        expected, _ = hbnode.odeint(single, state, [0.0, 1.0], method=method, steps=steps)
        torch.testing.assert_close(h[..., i : i + 1], expected, rtol=1e-6, atol=1e-7)
        if learn:
            (got,) = torch.autograd.grad(h[-1][:, i].sum(), field.omega, retain_graph=True)
            (wanted,) = torch.autograd.grad(expected[-1].sum(), single.omega)
            assert got[i].item() == pytest.approx(wanted.item(), rel=1e-5)


# Times


@every_method
def test_several_outputs_and_the_way_back(method):
    field = make_field("hbnode").double()
    state = field.initial_state(make_input())
    steps = 40 if method in SPLITTING else None
    tight = {"method": method, "steps": steps, "rtol": 1e-10, "atol": 1e-10}
    t = [0.0, 0.3, 0.35, 1.0]
    there = hbnode.odeint(field, state, t, **tight)
    for k in range(1, 4):
        alone = hbnode.odeint(field, state, [0.0, t[k]], **tight)
        torch.testing.assert_close(there[0][k], alone[0][-1], rtol=1e-4, atol=1e-4)
    back = hbnode.odeint(field, tuple(part[-1] for part in there), t[::-1], **tight)
    torch.testing.assert_close(back[0].flip(0), there[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(back[1].flip(0), there[1], rtol=1e-8, atol=1e-8)


@every_model
@pytest.mark.parametrize(
    ("per_sample", "steps", "sign"),
    [(False, None, 1.0), (True, None, -1.0), (False, 3, -1.0)],
    ids=["batch", "sample", "grid"],
)
def test_times_of_ones_own_are_a_loop_over_samples(model, per_sample, steps, sign):
    """In values and in all gradients, those for the times included."""
    field = make_field(model).double()
    x = make_input().requires_grad_()
    t = sign * float64([0.0, 0.5, 1.5], [0.2, 0.3, 0.3], [-1.0, 1.0, 1.25])
    t = t.requires_grad_()
    settings = {"steps": steps, "per_sample": per_sample, "rtol": 1e-11, "atol": 1e-11}

    def flat(h):
        tensors = [x, t, *field.parameters()]
        found = list(torch.autograd.grad(h.sin().sum(), tensors))
        found[1] = torch.cat([found[1][0], found[1][1, :1], found[1][1, 1:].sum(0, keepdim=True), found[1][2]])
        return torch.cat([h.detach().reshape(-1), *(g.reshape(-1) for g in found)])

    together = flat(field.readout(hbnode.odeint(field, field.initial_state(x), t, **settings)))
    rows = []
    for i in range(3):
        times, index = t[i], [0, 1, 2]
        if i == 1:  # a repeated time is no interval for a single sample; the gradients of both are summed above
            times, index = t[i, :2], [0, 1, 1]
        h = field.readout(hbnode.odeint(field, field.initial_state(x[i : i + 1]), times, **settings))
        rows.append(h[index])
    alone = flat(torch.cat(rows, 1))
    torch.testing.assert_close(together, alone, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("gradient", ["checkpoint", "direct"])
def test_gradients_for_times(gradient):
    """Exact for the map in which steps are constant fractions of their interval, with times that f sees."""
    field = make_field("hbnode").double()
    state = tuple(part.detach() for part in field.initial_state(make_input()))
    t = float64(0.1, 0.6, 1.3).requires_grad_()

    def end(t, method):
        steps = 2
        return hbnode.odeint(field, state, t, method=method, steps=steps, gradient=gradient)[0][1:].sum(1)

    for method in ("nystrom4", "nystrom8", "blanes_moan4", "tsit5"):
        assert torch.autograd.gradcheck(lambda t, method=method: end(t, method), (t,), nondet_tol=1e-12)


# Step control


@every_model
def test_a_sample_does_not_depend_on_its_batch_mates(model):
    """With a step for each sample; with one for the batch it does, within the tolerance."""
    torch.manual_seed(2)
    field = make_field(model).double()
    x = 3 * torch.randn(6, 4, dtype=torch.float64)
    x[3:] *= 20

    def solve(x, **settings):
        state = field.initial_state(x)
        return field.readout(hbnode.odeint(field, state, [0.0, 3.0], rtol=1e-4, atol=1e-4, **settings))[-1]

    alone = torch.cat([solve(x[i : i + 1], per_sample=True) for i in range(6)])
    together = solve(x, per_sample=True)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(solve(x[order], per_sample=True), alone[order], rtol=1e-12, atol=1e-12)
    assert (solve(x) - torch.cat([solve(x[i : i + 1]) for i in range(6)])).abs().max() > 1e-9


def test_steps_of_one_sample_are_those_of_the_batch_of_one():
    field, state = driven()
    batch, sample = hbnode.nfe.NFE(), hbnode.nfe.NFE()
    for nfe, per_sample in ((batch, False), (sample, True)):
        with hbnode.count_nfe(field) as count:
            hbnode.odeint(field, tuple(part[None] for part in state), [0.0, 1.0, 5.0], per_sample=per_sample)
        nfe.forward, nfe.steps, nfe.rejected = count.forward, count.steps, count.rejected
    assert abs(batch.forward - sample.forward) <= 2 * 8


def test_the_first_step_costs_no_probe_and_steps_are_shared_out_equally():
    seen = []
    field = hbnode.HBNODE(lambda t, h: seen.append(float(t)) or -h, damping=0.0, learn_damping=False)
    with hbnode.count_nfe(field) as nfe, torch.no_grad():
        hbnode.odeint(field, (torch.ones(1), torch.zeros(1)), [0.0, 1.0], method="nystrom4", rtol=1e-4, atol=1e-4)
    assert nfe.forward == 1 + 3 * (nfe.steps + nfe.rejected) == len(seen)
    assert seen[-1] == 1.0
    assert max(seen) == 1.0


def test_first_step_and_max_step():
    field, state = driven()
    for options, steps in (({"max_step": 0.1}, 20), ({"max_step": 0.1, "first_step": 5.0}, 20)):
        with hbnode.count_nfe(field) as nfe:
            hbnode.odeint(field, state, [0.0, 2.0], rtol=1.0, atol=1.0, options=options)
        assert nfe.steps == steps


class Counted(nn.Module):
    """A force that counts its calls."""

    def __init__(self):
        super().__init__()
        self.rate, self.calls = nn.Parameter(torch.ones(())), 0

    def forward(self, h):
        self.calls += 1
        return -self.rate * h.sin()


@every_method
@pytest.mark.parametrize("gradient", ["checkpoint", "direct", AGAIN], ids=["kept", "direct", "again"])
def test_evaluations_are_counted(method, gradient):
    """Explicit methods evaluate once at the start, which is not computed again."""
    func = Counted()
    block = hbnode.HeavyBallODEBlock(func, method=method, steps=17, gradient=gradient).double()
    block(make_input().requires_grad_()).sum().backward()
    nfe, stages = block.nfe, METHODS[method].evaluations
    assert nfe.total == func.calls
    assert nfe.steps == 17
    assert nfe.forward == stages * nfe.steps + METHODS[method].is_fsal
    assert (nfe.backward, nfe.backward_steps) == ((stages * nfe.steps, nfe.steps) if gradient is AGAIN else (0, 0))
    assert ("(graph kept)" in str(nfe)) == (gradient is not AGAIN)


@pytest.mark.parametrize("method", SPLITTING)
@pytest.mark.parametrize("gradient", ["reversible", "adjoint"])
def test_leaves_are_found_by_one_more_evaluation(method, gradient):
    func = Counted()
    block = hbnode.HeavyBallODEBlock(func, method=method, steps=5, gradient=gradient).double()
    block(make_input()).sum().backward()
    assert block.nfe.forward == 5 * METHODS[method].evaluations + 1
    assert block.nfe.total == func.calls
    assert block.nfe.backward > 0
    assert "(graph kept)" not in str(block.nfe)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=["kept", "again"])
@pytest.mark.parametrize("steps", [6, None], ids=["grid", "adaptive"])
def test_a_second_backward_pass(gradient, steps):
    solver = {"method": "nystrom4", "steps": steps, "gradient": gradient}
    block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), **solver).double()
    x = make_input().requires_grad_()
    h = block(x).sum()
    first = torch.autograd.grad(h, [x, *block.parameters()], retain_graph=True)
    once = block.nfe.backward
    assert once == (3 * block.nfe.steps if gradient is AGAIN else 0)
    second = torch.autograd.grad(h, [x, *block.parameters()])
    assert block.nfe.backward == 2 * once
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


# Failures by name


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", ["nystrom4", "nystrom6", "nystrom8", "exponential", "tsit5"])
def test_nan_in_f_is_named_with_its_time(method, per_sample):
    field = hbnode.HBNODE(lambda t, h: torch.where(t > 0.5, torch.nan, -h), learn_damping=False)
    state = (torch.ones(2, 1), torch.zeros(2, 1))
    with pytest.raises(hbnode.errors.NonFiniteError, match="field returned non-finite values") as error:
        hbnode.odeint(field, state, [0.0, 1.0], method=method, per_sample=per_sample)
    assert 0.5 < error.value.t < 0.51
    assert 0 < error.value.step_size < 0.1
    assert error.value.nfe < 1000


@every_method
def test_nan_on_a_grid_is_named_with_its_time(method):
    field = hbnode.HBNODE(lambda t, h: torch.where(t > 0.5, torch.nan, -h), learn_damping=False)
    for gradient in ("checkpoint", "direct"):
        settings = {"method": method, "steps": 20, "gradient": gradient}
        state = (torch.ones(2), torch.zeros(2, requires_grad=True))
        with pytest.raises(hbnode.errors.NonFiniteError, match="field returned non-finite values") as error:
            hbnode.odeint(field, state, [0.0, 1.0], **settings)
        assert 0.5 < error.value.t <= 0.55


@pytest.mark.parametrize("per_sample", [False, True])
def test_what_is_not_finite_at_the_start(per_sample):
    field = hbnode.HBNODE(lambda h: -h, learn_damping=False)
    root = hbnode.HBNODE(lambda h: h.log(), learn_damping=False)
    one, bad = torch.ones(2, 1), torch.tensor([[1.0], [math.inf]])
    for steps in (None, 3):
        settings = {"per_sample": per_sample, "steps": steps}
        with pytest.raises(hbnode.errors.NonFiniteError, match="initial state is not finite") as error:
            hbnode.odeint(field, (bad, one), [0.5, 1.0], **settings)
        assert error.value.t == 0.5
        with pytest.raises(hbnode.errors.NonFiniteError, match="field returned non-finite values") as error:
            hbnode.odeint(root, (-one, one), [0.5, 1.0], **settings)
        assert error.value.t == 0.5


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", ["nystrom4", "nystrom8", "tsit5"])
def test_blow_up_underflows_soon(method, per_sample):
    """H'' = 6 h² from 1, 2 is 1/(1 - t)²."""
    field = hbnode.HBNODE(lambda h: 6 * h**2, damping=0.0, learn_damping=False)
    with pytest.raises((hbnode.errors.StepSizeUnderflowError, hbnode.errors.NonFiniteError)) as error:
        hbnode.odeint(field, (float64([1.0]), float64([2.0])), [0.0, 2.0], method=method, per_sample=per_sample)
    assert error.value.t == pytest.approx(1.0, abs=1e-3)
    assert error.value.nfe < 20_000


@pytest.mark.parametrize("per_sample", [False, True])
def test_limits(per_sample):
    fast = hbnode.HBNODE(lambda t, h: torch.cos(1e3 * t) - h, learn_damping=False)
    state = (torch.zeros(2, 1), torch.zeros(2, 1))
    settings = {"per_sample": per_sample, "method": "nystrom4"}
    with pytest.raises(hbnode.errors.MaxStepsError, match="max_steps=20 steps") as error:
        hbnode.odeint(fast, state, [0.0, 10.0], max_steps=20, **settings)
    assert error.value.nfe == 1 + 3 * 20
    assert error.value.step_size > 0
    with pytest.raises(hbnode.errors.MaxNFEError, match="max_nfe=50 evaluations") as error:
        hbnode.odeint(fast, state, [0.0, 10.0], options={"max_nfe": 50}, **settings)
    assert error.value.nfe <= 50
    with pytest.raises(hbnode.errors.StepSizeUnderflowError) as error:
        hbnode.odeint(fast, state, [0.0, 10.0], options={"min_step": 0.1}, rtol=1e-6, atol=1e-6, **settings)
    assert 0 < error.value.step_size < 0.1
    with pytest.raises(hbnode.errors.MaxNFEError):
        hbnode.odeint(fast, state, [0.0, 1.0], method="leapfrog", steps=50, options={"max_nfe": 30})


def test_a_tolerance_too_tight_for_float32():
    field = make_field("hbnode")
    state = field.initial_state(make_input(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"far below what torch\.float32 carries"):
        hbnode.odeint(field, state, [0.0, 1.0], rtol=1e-10, atol=1e-10)
    with torch.no_grad(), hbnode.count_nfe(field) as nfe:  # just above: it ends
        hbnode.odeint(field, state, [0.0, 1.0], rtol=2e-9, atol=1e-12, max_steps=1000)
    assert nfe.total < 9000


SPRING = hbnode.HBNODE(lambda h: -h, learn_damping=False)
PAIR = (torch.ones(2, 1), torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "leapfrog"}, "has a fixed grid. Fix: steps=n"),
        ({"method": "nystrom4", "field": hbnode.NODE(lambda h: -h), "y0": torch.ones(2)}, "an HBNODE, got NODE"),
        ({"method": "nystrom4", "field": hbnode.GHBNODE(lambda h: -h)}, "got GHBNODE.*Fix: method='tsit5'"),
        ({"method": "leapfrog", "steps": 2, "field": hbnode.SONODE(lambda h, v: -h)}, "got SONODE"),
        ({"save": True}, r"save must be one of \('interpolate', 'exact'\), got True"),
        ({"method": "leapfrog", "steps": 2, "options": {"dense": True}}, r"has \['dense'\], which method='leapfrog'"),
        ({"jump_times": [1.0], "steps": 3}, "jump_times are for adaptive steps, got steps=3"),
        ({"options": {"max_step": 0.0}}, r"options\['max_step'\] must be positive"),
        ({"steps": 1.5}, "steps must be a positive integer, got 1.5"),
        ({"options": {"land": True}}, r"has \['land'\]"),
        ({"gradient": "reversible"}, "has a fixed grid"),
        (
            {"gradient": "reversible", "method": "nystrom4"},
            "one of .'leapfrog', 'blanes_moan4'., got method='nystrom4'",
        ),
        ({"adjoint_options": {}}, "adjoint_options are for torchdiffeq's methods"),
        ({"per_sample": "each"}, "per_sample must be True or False, got 'each'"),
        ({"t": torch.zeros(3, 2)}, r"t has shape \(3, 2\) for a batch of 2"),
        ({"t": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}, "must increase along each row, or decrease"),
        ({"t": torch.tensor([[0.0, 1.0]] * 2), "gradient": "adjoint"}, "gradient='adjoint' does not know t of shape"),
        ({"per_sample": True, "gradient": "adjoint"}, "does not know per_sample=True"),
        ({"per_sample": True, "y0": (torch.ones(()), torch.ones(()))}, r"whose parts have the shape \(batch, ...\)"),
        ({"y0": (torch.ones(2, 1), torch.ones(2, 2))}, "h and m must have one shape"),
        ({"event_fn": lambda t, y: y[0].sum(), "method": "tsit5"}, "event_fn is for torchdiffeq's methods"),
        ({"compile": True, "method": "dopri5"}, "compile=True is for native methods"),
        ({"compile": True, "field": lambda t, y: y}, "compile=True needs an hbnode field, got function"),
    ],
)
def test_bad_input(change, message):
    arguments = {"field": SPRING, "y0": PAIR, "t": [0.0, 1.0]} | change
    with pytest.raises(ValueError, match=message):
        hbnode.odeint(arguments.pop("field"), arguments.pop("y0"), arguments.pop("t"), **arguments)


def test_a_field_that_changes_the_equation_is_not_taken_for_an_hbnode():
    class Forced(hbnode.HBNODE):
        def forward(self, t, state):
            h, m = self._pair(state)
            return m + 1.0, -self.damping * m + self.evaluate(t, h)

    field = Forced(lambda h: 0.0 * h, damping=0.0, learn_damping=False)
    h, _ = hbnode.odeint(field, (float64(0.0), float64(0.0)), [0.0, 1.0])
    assert h[-1].item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"Forced has a forward of its own. Fix"):
        hbnode.odeint(field, (float64(0.0), float64(0.0)), [0.0, 1.0], method="nystrom4")


def test_states_of_every_structure():
    scalar = hbnode.odeint(lambda t, y: -y, torch.tensor(1.0), [0.0, 1.0])
    assert scalar.shape == (2,)
    uneven = hbnode.odeint(
        lambda t, y: (-y[0], y[1] * 0 + y[0].sum(), -y[2]),
        (float64([1.0, 2.0]), float64(0.0, 0.0), torch.tensor(3.0, dtype=torch.float64)),
        [0.0, 1.0],
        rtol=1e-9,
        atol=1e-9,
    )
    assert [tuple(part.shape) for part in uneven] == [(2, 1, 2), (2, 2), (2,)]
    assert uneven[1][-1, 0].item() == pytest.approx(3 * (1 - math.exp(-1)), abs=1e-8)
    assert uneven[2][-1].item() == pytest.approx(3 * math.exp(-1), abs=1e-8)
    for model in ("node", "hbnode", "sonode"):
        field = make_field(model).double()
        state = field.initial_state(torch.zeros(0, 4, dtype=torch.float64))
        for settings in ({}, {"per_sample": True}, {"gradient": "direct"}):
            h = field.readout(hbnode.odeint(field, state, [0.0, 1.0], **settings))
            assert h.shape == (2, 0, 4)
    one = hbnode.odeint(SPRING, PAIR, [0.5])
    assert one[0].shape == (1, 2, 1)


@pytest.mark.parametrize(
    ("gamma", "method", "per_sample"),
    [
        (200.0, "nystrom4", False),
        (500.0, "nystrom8", True),
        (500.0, "nystrom4", True),
        (1000.0, "nystrom8", False),
        (200.0, "exponential", False),
        (1000.0, "exponential", True),
    ],
)
def test_strong_damping_does_not_hide_errors(gamma, method, per_sample):
    """A step far beyond 1/gamma would map everything to 0, error included."""
    slow = (gamma - math.sqrt(gamma**2 - 4)) / 2  # the root of h'' + gamma h' + h = 0 that lasts
    field = hbnode.HBNODE(lambda h: -h, damping=gamma, learn_damping=False)
    start = (float64([1.0]), float64([-slow]))
    h, _ = hbnode.odeint(field, start, [0.0, 1.0], method=method, per_sample=per_sample, rtol=1e-3, atol=1e-3)
    assert h[-1].item() == pytest.approx(math.exp(-slow), abs=1e-3)


@pytest.mark.parametrize("gradient", ["checkpoint", "direct"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_an_interval_that_is_empty_for_all(gradient, per_sample):
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), gradient=gradient, per_sample=per_sample).double()
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    path = block(x, float64([0.0, 0.5, 0.5, 1.0]))
    torch.testing.assert_close(path[1], path[2])
    once, again = (torch.autograd.grad(path[k].sum(), x, retain_graph=True)[0] for k in (1, 2))
    torch.testing.assert_close(once, again)
    assert once.abs().sum() > 0.5


def test_unequal_intervals_with_a_learned_damping():
    x = make_input()
    for method in METHODS:
        found = []
        for gradient in ("direct", "checkpoint", *(["reversible"] if method in SPLITTING else [])):
            torch.manual_seed(0)
            block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), method=method, gradient=gradient, steps=4)
            block = block.double()
            block(x, [0.0, 0.4, 1.0]).sin().sum().backward()
            found.append(torch.cat([p.grad.reshape(-1) for p in block.parameters()]))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-11)


def test_inference_mode_first():
    """What a method makes once, it makes for all modes; in a process of its own, in which no solve came before."""
    code = """
import torch, hbnode
block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2))
with torch.inference_mode():
    h = block(torch.ones(1, 2))
again = block(torch.ones(1, 2))
again.sum().backward()
torch.testing.assert_close(again.detach(), h.clone())
assert all(p.grad is not None for p in block.parameters())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_result_may_be_changed_in_place():
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2)).double()
    x = torch.tensor([[1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    changed, kept = (torch.autograd.grad(nn.ReLU(inplace)(block(x)).sum(), x)[0] for inplace in (True, False))
    torch.testing.assert_close(changed, kept)


@pytest.mark.parametrize("method", ["nystrom4", "leapfrog", "tsit5"])
@pytest.mark.parametrize("gradient", ["checkpoint", "direct", "adjoint"])
def test_an_f_that_changes_its_input_is_named(method, gradient):
    func = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    steps = 2 if method == "leapfrog" else None
    block = hbnode.HeavyBallODEBlock(func, method=method, gradient=gradient, steps=steps)
    for leaf in (False, True):
        for mode in (torch.no_grad, torch.enable_grad):
            with mode(), pytest.raises(ValueError, match="func changes its input in place"):
                block(torch.ones(1, 2, requires_grad=leaf))
    with torch.inference_mode():  # has no versions to tell by: f gets a copy
        expected = hbnode.HeavyBallODEBlock(nn.Sequential(nn.ReLU(), func[1]), method=method, steps=steps)
        torch.testing.assert_close(block(torch.ones(1, 2)), expected(torch.ones(1, 2)))


def test_an_f_that_works_in_place_on_a_view_of_its_own_is_told_by_torch():
    def func(h):
        return h * sum(part.mul_(2) for part in (h + 1).unbind(0))

    with pytest.raises(RuntimeError, match="Output 0 of Unbind"):
        hbnode.HeavyBallODEBlock(func, generalized=True)(torch.ones(2, 2, requires_grad=True))


def test_times_that_are_none():
    for t, kind, message in (
        (5.0, TypeError, "t must be times, a tensor or a sequence, got float"),
        ([0.0, torch.ones(2)], ValueError, "no single times"),
    ):
        with pytest.raises(kind, match=message):
            hbnode.odeint(SPRING, PAIR, t)
    one = nn.Parameter(torch.ones(1))
    h, _ = hbnode.odeint(SPRING, PAIR, [0.0, one])
    assert torch.autograd.grad(h[-1].sum(), one)[0].shape == (1,)
    with pytest.raises(ValueError, match=r"damping has shape \(3,\), which does not broadcast"):
        hbnode.odeint(hbnode.HBNODE(lambda h: -h, damping=torch.full((3,), 0.1)), PAIR, [0.0, 1.0])


def strongly_damped(gamma, **solver):
    """A block for h'' + γh' = -h, with its exact solution from (1, 0) at its end: that of two real exponentials."""
    field = hbnode.HBNODE(lambda h: -h, damping=gamma, learn_damping=False)
    block = hbnode.ODEBlock(field, **{"rtol": 1e-6, "atol": 1e-6, **solver})
    root = math.sqrt(gamma**2 / 4 - 1)
    slow, fast = -1 / (gamma / 2 + root), -(gamma / 2 + root)
    t = block.t_span[1]
    return block, (fast * math.exp(slow * t) - slow * math.exp(fast * t)) / (fast - slow)


ONE = torch.ones(1, 1, dtype=torch.float64)


def test_a_constant_damping_that_is_strong_gets_the_exponential_method():
    block, exact = strongly_damped(20.0, t_span=(0.0, 3.0))
    assert "method='exponential'" in repr(block)
    assert block(ONE).item() == pytest.approx(exact, abs=1e-5)
    assert 1 + 4 * (block.nfe.steps + block.nfe.rejected) == block.nfe.forward  # a step of "exponential"
    weaker, _ = strongly_damped(16.0, t_span=(0.0, 3.0))
    assert "method='nystrom8'" in repr(weaker)
    grid, _ = strongly_damped(20.0, t_span=(0.0, 3.0), steps=4)
    assert "method='nystrom8'" in repr(grid)
    field = hbnode.HBNODE(lambda h: -h, damping=[3.0, 400.0], learn_damping=False)
    assert "method='exponential'" in repr(hbnode.ODEBlock(field, t_span=(0.0, -3.0)))
    field = hbnode.HBNODE(lambda h: -h, damping=200.0, max_damping=300.0)
    assert "method='nystrom8'" in repr(hbnode.ODEBlock(field))


@pytest.mark.parametrize("method", ["nystrom8", "nystrom4", "tsit5"])
def test_a_damping_that_takes_too_many_steps_is_named_at_once(method):
    block, exact = strongly_damped(1e4, t_span=(0.0, 10.0), method=method)
    message = (
        r"the damping of 10000 over a time of 10 takes about .*Fix: method='exponential', which solves the damping"
    )
    with pytest.raises(hbnode.errors.MaxStepsError, match=message) as error:
        block(ONE)
    assert error.value.nfe == 0
    block.method = "exponential"
    assert block(ONE).item() == pytest.approx(exact, abs=1e-5)
    assert block.nfe.forward < 50


def test_too_many_steps_for_the_damping_of_a_ghbnode_are_named_at_once():
    field = hbnode.GHBNODE(lambda h: -h, damping=1e4, learn_damping=False, xi=0.0, learn_xi=False)
    block = hbnode.ODEBlock(field, t_span=(0.0, 10.0))
    with pytest.raises(hbnode.errors.MaxStepsError, match="Fix: max_steps=33334, a grid of method='leapfrog'"):
        block(ONE)
    block.method, block.steps = "leapfrog", 40  # the fix
    assert block(ONE).item() == pytest.approx(math.exp(-1e-3), abs=1e-4)


def test_too_many_steps_that_the_damping_keeps_short_are_named():
    block, _ = strongly_damped(1001.0, method="nystrom4", max_steps=1002)
    with pytest.raises(
        hbnode.errors.MaxStepsError, match="Fix: method='exponential', because the damping of 1001 keeps"
    ):
        block(ONE)
    block.method = "exponential"
    block(ONE)


class Overridden(hbnode.HBNODE):
    def __call__(self, *args):
        self.calls = getattr(self, "calls", 0) + 1
        return super().__call__(*args)


def doubled(field):
    return lambda t, state: tuple(2 * part for part in type(field).forward(field, t, state))


CHANGES = {  # of a field, with what an error says of it
    "hook": (lambda field: field.register_forward_hook(lambda *_: None), "it has hooks"),
    "pre-hook": (lambda field: field.register_forward_pre_hook(lambda *_: None), "it has hooks"),
    "backward hook": (lambda field: field.register_full_backward_hook(lambda *_: None), "it has hooks"),
    "forward": (lambda field: setattr(field, "forward", doubled(field)), "its forward was replaced"),
    "friction": (lambda field: setattr(field, "friction", lambda m: m**3), "its friction was replaced"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [hbnode.HBNODE, hbnode.GHBNODE])
def test_a_field_whose_call_was_changed_is_called(change, make):
    field = make(nn.Linear(2, 2))
    block = hbnode.ODEBlock(field)
    CHANGES[change][0](field)
    assert "method='tsit5'" in repr(block)
    for method in ("nystrom4", "leapfrog"):
        if make is hbnode.HBNODE or method == "leapfrog":
            block.method, block.steps = method, 1
            with pytest.raises(ValueError, match=f"{CHANGES[change][1]}. Fix: method='tsit5'"):
                block(torch.ones(1, 2))


def test_what_was_changed_takes_effect():
    x = torch.randn(3, 2, dtype=torch.float64)
    plain = hbnode.ODEBlock(hbnode.HBNODE(nn.Linear(2, 2)).double(), rtol=1e-9, atol=1e-9)
    twice = copy.deepcopy(plain)
    twice.field.forward = doubled(twice.field)
    torch.testing.assert_close(twice(x), plain(x, [0.0, 2.0])[-1], rtol=1e-7, atol=1e-7)  # d/dt doubled: twice as far
    seen = []
    hooked = copy.deepcopy(plain)
    hooked.field.register_forward_hook(lambda *_: seen.append(1))
    hooked.field.func.register_forward_hook(lambda *_: seen.append(2))
    torch.testing.assert_close(hooked(x), plain(x), rtol=1e-7, atol=1e-7)
    assert seen.count(1) == seen.count(2) == hooked.nfe.forward
    overridden = hbnode.ODEBlock(Overridden(nn.Linear(2, 2)))
    overridden(torch.ones(1, 2))
    assert overridden.field.calls == overridden.nfe.forward
    with pytest.raises(ValueError, match="Overridden has a __call__ of its own"):
        hbnode.ODEBlock(overridden.field, method="nystrom8")(torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize(("method", "make"), [("nystrom8", hbnode.HBNODE), ("leapfrog", hbnode.GHBNODE)])
def test_a_compiled_field_is_called(method, make):
    """Its call at m = 0 is the force, so that the methods which evaluate the force alone call what was compiled."""
    calls = []

    def backend(graph, _):
        return lambda *args: (calls.append(1), graph.forward(*args))[1]

    steps = 2 if method == "leapfrog" else None
    field = make(nn.Linear(2, 2)).double()
    plain = hbnode.ODEBlock(field, method=method, steps=steps)
    around = hbnode.ODEBlock(torch.compile(field, backend=backend), method=method, steps=steps)
    inside = hbnode.ODEBlock(copy.deepcopy(field), method=method, steps=steps)
    inside.field.compile(backend=backend)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    wanted = [x, *field.parameters()]
    expected = torch.autograd.grad(plain(x).sum(), wanted)
    for block in (around, inside):
        calls.clear()
        y = block(x)
        assert len(calls) == block.nfe.forward
        torch.testing.assert_close(y, plain(x))
        found = torch.autograd.grad(y.sum(), [x, *block.parameters()])
        torch.testing.assert_close(found, expected)


def test_a_field_inside_of_a_wrapper_is_called_through_it():
    """DistributedDataParallel reduces gradients in its own call only, so f is not fetched from inside."""
    from hbnode.solve.term import is_heavy_ball

    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    assert not is_heavy_ball(wrapped, hbnode.HBNODE)
    assert is_heavy_ball(torch.compile(SPRING, backend="eager"), hbnode.HBNODE)


def test_nested_solves_share_a_mask():
    """The mask belongs to the outermost solve, or each of its evaluations would see another field."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = hbnode.HeavyBallODEBlock(nn.Sequential(nn.Linear(4, 4), hbnode.nn.SolveDropout(0.5)))

        def forward(self, h):
            return self.inner(h)

    func, masks = Outer(), []
    dropout = func.inner.field.func[1]
    dropout.register_forward_hook(lambda module, args, out: masks.append((out == 0).tolist()))
    hbnode.HeavyBallODEBlock(func, rtol=1e-4, atol=1e-4)(torch.ones(8, 4))
    assert len(masks) > 20
    assert all(mask == masks[0] for mask in masks)
    assert dropout.solve is None
