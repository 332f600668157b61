"""The loop of the native methods: steps and their control, outputs inside of steps, what is refused, failures."""

import copy
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.solve.methods import METHODS, Explicit
from tests.models import AGAIN, every_model, make_field, make_input
from tests.problems import Driven, damped_oscillator, driven_exact

ADAPTIVE = tuple(name for name, method in METHODS.items() if isinstance(method, Explicit))
REVERSIBLE = tuple(name for name, method in METHODS.items() if method.is_reversible)
every_method = pytest.mark.parametrize("method", METHODS)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


OTHERS = ("dopri5", "rk4", "fixed_adams")


@pytest.mark.sparse
@pytest.mark.parametrize("method", [*METHODS, *OTHERS])
@pytest.mark.parametrize("grad", [True, False])
def test_a_field_that_returns_one_buffer(grad, method):
    """It writes every value into the same tensor; the values that a method keeps are those of their own stages."""
    force = lambda t, y: torch.cos(5 * t) - 4 * y
    buffer, results = torch.empty(2, 1, dtype=torch.float64), []
    buffered = lambda t, y: buffer.copy_(force(t, y))
    for f in (force, buffered):
        y0 = float64([1.0], [0.5]).requires_grad_(grad)
        is_second = method in METHODS and METHODS[method].rows == 2
        field = hbnode.HBNODE(f, damping=0.4, learn_damping=False) if is_second else f
        settings = {"steps": 6} if method in (*REVERSIBLE, *OTHERS[1:]) else {"options": {"first_step": 1.0}}
        start, t = ((y0, 0 * y0) if is_second else y0), torch.linspace(0, 2, 9)
        y = hbnode.odeint(field, start, t, method=method, **settings)
        y = y[0] if is_second else y
        gradient = torch.autograd.grad((y * y.detach()).sum(), y0)[0] if grad else y0
        results.append((y.detach(), gradient))
        buffer = buffer.detach().clone()
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)


@pytest.mark.sparse
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("method", "gradient"), [*((name, None) for name in ADAPTIVE), ("tsit5", "adjoint")])
def test_values_whose_squares_overflow_are_finite(method, gradient, per_sample):
    """Linear fields in float32: y = e^-t y_0 or cos(t) y_0, with y_0 = 1e25 and its gradient."""
    y0 = torch.full((2, 3), 1e25, requires_grad=True)
    field, start, exact = lambda t, y: -y, y0, math.exp(-1)
    if method != "tsit5":
        field = hbnode.HBNODE(lambda h: -h, damping=0.0, learn_damping=False)
        start, exact = (y0, 0 * y0), math.cos(1)
    y = hbnode.odeint(field, start, [0.0, 1.0], method=method, gradient=gradient, per_sample=per_sample)
    y = (y if method == "tsit5" else y[0])[-1]
    y.sum().backward()
    for found in (y / 1e25, y0.grad):
        assert found.flatten().tolist() == pytest.approx([exact] * 6, abs=1e-4)


# Times


@pytest.mark.sparse
@every_model
@pytest.mark.parametrize(
    ("per_sample", "steps", "sign"),
    [(False, None, 1.0), (True, None, -1.0), (False, 3, -1.0)],
    ids=["batch", "sample", "grid"],
)
def test_times_of_ones_own_are_a_loop_over_samples(model, per_sample, steps, sign):
    """In values and in all gradients, those for the times included."""
    field, x = make_field(model).double(), make_input().requires_grad_()
    t = (sign * float64([0.0, 0.5, 1.5], [0.2, 0.3, 0.3], [-1.0, 1.0, 1.25])).requires_grad_()
    settings = {"steps": steps, "per_sample": per_sample, "rtol": 1e-11, "atol": 1e-11}

    def flat(h):
        of_x, of_t, *rest = torch.autograd.grad(h.sin().sum(), [x, t, *field.parameters()])
        of_t = [of_t[0], of_t[1, :1], of_t[1, 1:].sum(0, keepdim=True), of_t[2]]
        return torch.cat([part.reshape(-1) for part in (h.detach(), of_x, *of_t, *rest)])

    together = flat(field.readout(hbnode.odeint(field, field.initial_state(x), t, **settings)))
    rows = []
    for i in range(3):  # a repeated time is no interval for a single sample; the gradients of both are summed above
        times, index = (t[i, :2], [0, 1, 1]) if i == 1 else (t[i], [0, 1, 2])
        h = field.readout(hbnode.odeint(field, field.initial_state(x[i : i + 1]), times, **settings))
        rows.append(h[index])
    torch.testing.assert_close(together, flat(torch.cat(rows, 1)), rtol=1e-7, atol=1e-7)


# Step control


def test_the_first_step_costs_no_probe_and_does_not_depend_on_the_unit_of_the_state():
    """With a state and an atol 1,024 times as large, and a linear force."""
    counts, seen = [], []
    field = hbnode.HBNODE(lambda t, h: seen.append(float(t)) or -h, damping=0.0, learn_damping=False)
    for unit in (1.0, 1024.0):
        seen.clear()
        with hbnode.count_nfe(field) as nfe, torch.no_grad():
            state = float64([unit]), float64([0.0])
            hbnode.odeint(field, state, [0.0, 5.0], method="nystrom4", rtol=1e-5, atol=1e-5 * unit)
        assert nfe.forward == 1 + 3 * (nfe.steps + nfe.rejected) == len(seen)
        assert seen[-1] == max(seen) == 5.0
        counts.append((nfe.steps, nfe.rejected))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("first_step", [0.1, 5.0])
def test_first_step_and_max_step(first_step):
    block = make_block(rtol=1.0, atol=1.0, options={"max_step": 0.1, "first_step": first_step})
    block(float64([0.0]), [0.0, 2.0])
    assert block.nfe.steps == 20


@pytest.mark.parametrize(
    ("method", "solver"),
    [
        *((method, {"per_sample": method != "nystrom4"}) for method in ADAPTIVE),
        ("nystrom4", {"per_sample": True}),
        *((method, {"steps": 20}) for method in METHODS),
        ("nystrom4", {"steps": 20, "gradient": "direct"}),
    ],
    ids=str,
)
def test_what_is_not_finite_is_named_with_its_time(method, solver):
    ones = torch.ones(2, 1), torch.zeros(2, 1, requires_grad=True)
    bad, messages = (torch.tensor([[1.0], [math.inf]]), ones[1]), ("field returned non-finite", "initial state is not")
    late = lambda t, h: torch.where(t > 0.5, torch.nan, -h)
    for func, state, message, t in (
        (late, ones, messages[0], (0.5, 0.55)),
        (lambda h: (-h).log(), ones, messages[0], (0.0, 0.05)),
        (late, bad, messages[1], (0.0, 0.0)),
    ):
        field = hbnode.HBNODE(func, learn_damping=False)
        with pytest.raises(hbnode.errors.NonFiniteError, match=message) as error:
            hbnode.odeint(field, state, [0.0, 1.0], method=method, **solver)
        assert t[0] <= error.value.t <= t[1]
        assert error.value.nfe < 1000
        assert func is not late or state is bad or 0 < error.value.step_size < 0.1


def test_states_of_every_structure():
    state = (float64([1.0, 2.0]), float64(0.0, 0.0), torch.tensor(3.0, dtype=torch.float64))
    field = lambda t, y: (-y[0], y[1] * 0 + y[0].sum(), -y[2])
    uneven = hbnode.odeint(field, state, [0.0, 1.0], rtol=1e-9, atol=1e-9)
    assert [tuple(part.shape) for part in uneven] == [(2, 1, 2), (2, 2), (2,)]
    assert uneven[1][-1, 0].item() == pytest.approx(3 * (1 - math.exp(-1)), abs=1e-8)
    assert uneven[2][-1].item() == pytest.approx(3 * math.exp(-1), abs=1e-8)


# Failures by name


@pytest.mark.parametrize(
    "solver", [{"method": "nystrom8"}, {"method": "tsit5", "per_sample": True}, {"method": "dopri5"}], ids=str
)
def test_blow_up_is_divergence_with_its_time_and_size(solver):
    """H'' = 6 h² from 1, 2 is 1/(1 - t)²."""
    field = hbnode.HBNODE(lambda h: 6 * h**2, damping=0.0, learn_damping=False)
    with pytest.raises(hbnode.errors.DivergenceError, match=r"diverges: .* state is .*e\+") as error:
        hbnode.odeint(field, (float64([1.0]), float64([2.0])), [0.0, 2.0], **solver)
    assert error.value.t == pytest.approx(1.0, abs=1e-3)
    assert error.value.nfe < 20_000


def test_a_jump_is_no_divergence():
    field = hbnode.NODE(lambda t, y: torch.where(t < 0.5, 1.0, -1e9 * torch.sign(torch.sin(1e9 * y))) + 0 * y)
    for given in (None, [0.3]):
        with pytest.raises(hbnode.errors.StepSizeUnderflowError) as error:
            hbnode.odeint(field, float64([1.0]), [0.0, 1.0], jump_times=given, options={"min_step": 1e-6})
        assert ("jump_times" in str(error.value)) == (given is None)  # not advised where it was given


@pytest.mark.parametrize("per_sample", [False, True])
def test_limits(per_sample):
    fast = hbnode.HBNODE(lambda t, h: torch.cos(1e3 * t) - h, learn_damping=False)
    state, settings = (torch.zeros(2, 1), torch.zeros(2, 1)), {"per_sample": per_sample, "method": "nystrom4"}
    with pytest.raises(hbnode.errors.MaxStepsError, match="max_steps=20 steps") as error:
        hbnode.odeint(fast, state, [0.0, 10.0], max_steps=20, **settings)
    assert error.value.nfe == 1 + 3 * 20
    assert error.value.step_size > 0
    with pytest.raises(hbnode.errors.StepSizeUnderflowError) as error:
        hbnode.odeint(fast, state, [0.0, 10.0], options={"min_step": 0.1}, rtol=1e-6, atol=1e-6, **settings)
    assert 0 < error.value.step_size < 0.1
    with pytest.raises(hbnode.errors.MaxNFEError) as error:
        hbnode.odeint(fast, state, [0.0, 1.0], method="leapfrog", steps=50, options={"max_nfe": 30})
    assert 0.0 < error.value.t < error.value.nfe / 50 + 0.1


@pytest.mark.parametrize(
    "settings",
    [{}, {"per_sample": True}, {"method": "rodas5p"}, {"steps": 3}, {"steps": 3, "jump_times": [0.5]}],
    ids=str,
)
def test_max_nfe_is_the_largest_number_of_evaluations(settings):
    field, h = hbnode.NODE(lambda t, h: torch.cos(9 * t) - h), torch.ones(2, 1)
    with hbnode.count_nfe(field) as nfe:
        hbnode.odeint(field, h, [0.0, 1.0], **settings)
    with hbnode.count_nfe(field) as limited:
        hbnode.odeint(field, h, [0.0, 1.0], options={"max_nfe": nfe.forward}, **settings)
    assert limited == nfe
    with pytest.raises(hbnode.errors.MaxNFEError, match=f"max_nfe={nfe.forward - 1} function eval") as error:
        hbnode.odeint(field, h, [0.0, 1.0], options={"max_nfe": nfe.forward - 1}, **settings)
    assert error.value.nfe < nfe.forward


@pytest.mark.parametrize("method", ["nystrom4", "nystrom8"])
def test_the_strongest_damping_of_all_channels_limits_the_steps(method):
    field = hbnode.HBNODE(lambda h: 0 * h, damping=[0.1, 500.0, 3.0], learn_damping=False)
    with hbnode.nfe.record_steps(field) as steps:
        hbnode.odeint(field, (torch.ones(2, 3), torch.zeros(2, 3)), [0.0, 1.0], method=method, rtol=1e3, atol=1e3)
    assert 0.9 < max(steps.size) * 500.0 / METHODS[method].damping_limit < 1.1


@pytest.mark.parametrize(("outputs", "accepted"), [((1.0, 1.0), (True, True)), ((0.5, 1.0), (False, True))])
def test_a_step_with_an_output_inside_needs_a_smaller_error(outputs, accepted):
    """Half of the tolerance is too much where the error of dense output may be four times that of the step."""
    tableau, slopes = METHODS["tsit5"].tableau, [-1.0]
    for row in tableau.a:
        slopes.append(-1.0 - sum(weight * slope for weight, slope in zip(row, slopes, strict=True)))
    error = abs(sum(weight * slope for weight, slope in zip(tableau.error, slopes, strict=True)))
    t, field = float64([0.0, outputs[0], 1.0], [0.0, outputs[1], 1.0]), hbnode.NODE(lambda h: -h)
    with hbnode.nfe.record_steps(field) as steps:
        hbnode.odeint(field, float64([1.0], [1.0]), t, atol=2 * error, rtol=1e-12, options={"first_step": 1.0})
    assert steps.size[:2] == [1.0, 1.0]
    assert tuple(steps.accepted[:2]) == accepted


@pytest.mark.parametrize(("gamma", "method"), [(200.0, "nystrom4"), (500.0, "nystrom8"), (1000.0, "exponential")])
def test_strong_damping_does_not_hide_errors(gamma, method):
    """A step far beyond 1/gamma would map everything to 0, error included."""
    slow = (gamma - math.sqrt(gamma**2 - 4)) / 2  # the root of h'' + gamma h' + h = 0 that lasts
    field = hbnode.HBNODE(lambda h: -h, damping=gamma, learn_damping=False)
    state = (float64([1.0]), float64([-slow]))
    h, _ = hbnode.odeint(field, state, [0.0, 1.0], method=method, rtol=1e-3, atol=1e-3)
    assert h[-1].item() == pytest.approx(math.exp(-slow), abs=1e-3)


@pytest.mark.slow
def test_inference_mode_first():
    """What a method makes once, it makes for all modes; in a process of its own, in which no solve came before."""
    code = """
import torch, hbnode
block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2))
with torch.inference_mode():
    block(torch.ones(1, 2))
block(torch.ones(1, 2)).sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_result_may_be_changed_in_place():
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2)).double()
    x = torch.tensor([[1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    changed, kept = (torch.autograd.grad(nn.ReLU(inplace)(block(x)).sum(), x)[0] for inplace in (True, False))
    torch.testing.assert_close(changed, kept)


@pytest.mark.parametrize(
    ("damping", "options", "solver", "method"),
    [
        (20.0, {}, {}, "exponential"),
        (20.0, {}, {"steps": 4}, "nystrom8"),
        ([3.0, 400.0], {}, {"t_span": (0.0, -3.0)}, "exponential"),
        (200.0, {"learn_damping": True, "max_damping": 300.0}, {}, "nystrom8"),
    ],
    ids=str,
)
def test_a_constant_damping_that_is_strong_gets_the_exponential_method(damping, options, solver, method):
    field = hbnode.HBNODE(lambda h: -h, damping=damping, **{"learn_damping": False} | options)
    assert f"method='{method}'" in repr(hbnode.ODEBlock(field, **{"t_span": (0.0, 3.0)} | solver))


@pytest.mark.parametrize(
    ("make", "method", "fix"),
    [
        *((hbnode.HBNODE, method, {"method": "exponential"}) for method in ("nystrom8", "nystrom4", "tsit5")),
        (hbnode.GHBNODE, None, {"method": "leapfrog", "steps": 40}),
    ],
)
def test_a_damping_that_takes_too_many_steps_is_named_at_once(make, method, fix):
    options = {"xi": 0.0, "learn_xi": False} if make is hbnode.GHBNODE else {}
    field = make(lambda h: -h, damping=1e4, learn_damping=False, **options)
    block, x = hbnode.ODEBlock(field, t_span=(0.0, 10.0), method=method), float64([1.0])
    message = f"the damping of 10000 over a time of 10 takes about .*Fix: .*method='{fix['method']}'"
    with pytest.raises(hbnode.errors.MaxStepsError, match=message) as error:
        block(x)
    assert error.value.nfe == 0
    fixed = hbnode.ODEBlock(field, t_span=(0.0, 10.0), **fix)
    assert fixed(x).item() == pytest.approx(math.exp(-1e-3), abs=1e-4)


class Overridden(hbnode.HBNODE):
    def __call__(self, *args):
        self.calls = getattr(self, "calls", 0) + 1
        return super().__call__(*args)


class Forced(hbnode.HBNODE):
    def forward(self, t, state):
        dh, dm = super().forward(t, state)
        return dh + 1.0, dm


def doubled(field):
    return lambda t, state: tuple(2 * part for part in type(field).forward(field, t, state))


CHANGES = {  # of a field, with what an error says of it
    "hook": (lambda field: field.register_forward_hook(lambda *_: None), "it has hooks"),
    "pre-hook": (lambda field: field.register_forward_pre_hook(lambda *_: None), "it has hooks"),
    "backward hook": (lambda field: field.register_full_backward_hook(lambda *_: None), "it has hooks"),
    "forward": (lambda field: setattr(field, "forward", doubled(field)), "its forward was replaced"),
    "friction": (lambda field: setattr(field, "friction", lambda m: m**3), "its friction was replaced"),
    "call": (lambda field: None, "Overridden has a __call__ of its own"),
    "subclass": (lambda field: None, "Forced has a forward of its own"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [hbnode.HBNODE, hbnode.GHBNODE])
def test_a_field_whose_call_was_changed_is_called(change, make):
    field = {"call": Overridden, "subclass": Forced}.get(change, make)(nn.Linear(2, 2))
    block = hbnode.ODEBlock(field)
    CHANGES[change][0](field)
    assert "method='tsit5'" in repr(block)
    block.method, block.steps = ("leapfrog" if make is hbnode.GHBNODE else "nystrom4"), 1
    with pytest.raises(ValueError, match=f"{CHANGES[change][1]}. Fix: method='tsit5'"):
        block(torch.ones(1, 2))


def test_what_was_changed_takes_effect():
    x = torch.randn(3, 2, dtype=torch.float64)
    plain = hbnode.ODEBlock(hbnode.HBNODE(nn.Linear(2, 2)).double(), rtol=1e-9, atol=1e-9)
    twice, hooked = copy.deepcopy(plain), copy.deepcopy(plain)
    twice.field.forward = doubled(twice.field)
    torch.testing.assert_close(twice(x), plain(x, [0.0, 2.0])[-1], rtol=1e-7, atol=1e-7)  # d/dt doubled: twice as far
    calls = []
    hooked.field.register_forward_hook(lambda *_: calls.append(1))
    hooked.field.func.register_forward_hook(lambda *_: calls.append(2))
    torch.testing.assert_close(hooked(x), plain(x), rtol=1e-7, atol=1e-7)
    assert calls.count(1) == calls.count(2) == hooked.nfe.forward
    overridden = hbnode.ODEBlock(Overridden(nn.Linear(2, 2)))
    overridden(torch.ones(1, 2))
    assert overridden.field.calls == overridden.nfe.forward
    forced = Forced(lambda h: 0.0 * h, damping=0.0, learn_damping=False)
    assert hbnode.odeint(forced, (float64(0.0), float64(0.0)), [0.0, 1.0])[0][-1].item() == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize(("method", "make"), [("nystrom8", hbnode.HBNODE), ("leapfrog", hbnode.GHBNODE)])
def test_a_compiled_field_is_called(method, make):
    """Its call at m = 0 is the force, so that the methods which evaluate the force alone call what was compiled."""
    torch._dynamo.reset()
    calls, field, x = [], make(nn.Linear(2, 2)).double(), float64([0.3, -0.5]).requires_grad_()
    backend = lambda graph, _: lambda *args: (calls.append(1), graph.forward(*args))[1]
    settings = {"method": method, "steps": 2 if method == "leapfrog" else None}
    expected = hbnode.ODEBlock(field, **settings)(x)
    slopes = torch.autograd.grad(expected.sum(), [x, *field.parameters()])
    inside = copy.deepcopy(field)
    inside.compile(backend=backend)
    for compiled in (torch.compile(field, backend=backend), inside):
        block = hbnode.ODEBlock(compiled, **settings)
        calls.clear()
        y = block(x)
        assert len(calls) == block.nfe.forward
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), [x, *block.parameters()]), slopes)


def test_a_field_inside_of_a_wrapper_is_called_through_it():
    """DistributedDataParallel reduces gradients in its own call only, so f is not fetched from inside."""
    from hbnode.solve.term import is_heavy_ball

    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    assert not is_heavy_ball(wrapped, hbnode.HBNODE)


def test_nested_solves_share_a_mask():
    """The mask belongs to the outermost solve, or each of its evaluations would see another field."""
    func, masks = nn.Sequential(nn.Linear(4, 4), hbnode.nn.SolveDropout(0.5)), []
    func[1].register_forward_hook(lambda module, args, out: masks.append((out == 0).tolist()))
    inner = hbnode.HeavyBallODEBlock(func)
    hbnode.HeavyBallODEBlock(nn.Sequential(inner), rtol=1e-4, atol=1e-4)(torch.ones(8, 4))
    assert len(masks) > 20
    assert all(mask == masks[0] for mask in masks)
    assert func[1].solve is None


every_adaptive = pytest.mark.parametrize("method", ADAPTIVE)
DRIVEN = hbnode.HBNODE(Driven(0.4), damping=0.4, learn_damping=False)


def worst(found, exact, tolerance):
    """The largest error over the tolerance at its scale, of all parts and times."""
    found, exact = torch.stack(found).detach().double().numpy()[..., 0], np.stack(exact)
    return (np.abs(found - exact) / (tolerance + tolerance * np.abs(exact))).max()


# Errors


@pytest.mark.sparse
@every_adaptive
@pytest.mark.parametrize("problem", ["driven", "undamped"])
def test_errors_stay_within_the_tolerance(method, problem):
    """Between the ends of steps they are no larger than at them, but for the tolerance itself."""
    t = np.linspace(0.0, 3.0, 151)
    if problem == "driven":
        field, exact = DRIVEN, driven_exact(0.4, t)
    else:
        field = hbnode.HBNODE(lambda h: -9.0 * h, damping=0.0, learn_damping=False)
        exact = damped_oscillator(3.0, 0.0, 1.0, 0.5, t)
    start = tuple(float64(x[0]) for x in exact)
    for tolerance in (1e-2, 1e-4, 1e-7):
        found, ends = (
            hbnode.odeint(field, start, times, method=method, rtol=tolerance, atol=tolerance)
            for times in (t, t[[0, -1]])
        )
        at_the_end = worst(ends, [x[[0, -1]] for x in exact], tolerance)
        assert worst(found, exact, tolerance) < 1.0 + 3.0 * max(at_the_end, 1.0)


# Which steps pass output times


@every_adaptive
def test_steps_that_are_longer_than_the_intervals_pass_them(method):
    """Then many output times cost no more than one, whichever way time goes, unless steps are to end on them."""
    t = np.linspace(0.0, 2.0, 101)
    for times in (t, t[::-1].copy()):
        exact, counts = driven_exact(0.4, times), []
        start = tuple(float64(x[0]) for x in exact)
        for save in ("interpolate", "exact"):
            with hbnode.count_nfe(DRIVEN) as nfe:
                found = hbnode.odeint(DRIVEN, start, times, method=method, rtol=1e-4, atol=1e-4, save=save)
            assert worst(found, exact, 1e-3 if save == "interpolate" else 1e-4) < 1
            counts.append(nfe.forward)
        assert counts[0] < counts[1] / (5 if METHODS[method].order >= 4 else 3)
        assert nfe.steps == 100


@pytest.mark.sparse
@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
@pytest.mark.parametrize("save", ["interpolate", "exact"])
@pytest.mark.parametrize("model", ["hbnode", "node"])
def test_one_time_and_an_empty_batch(save, gradient, model):
    field = make_field(model)
    for rows, t in ((3, [0.3]), (0, np.linspace(0, 1, 9))):
        x = torch.randn(rows, 4, requires_grad=True)
        h = field.readout(hbnode.odeint(field, field.initial_state(x), t, gradient=gradient, save=save))
        assert h.shape == (len(t), *x.shape)
        torch.testing.assert_close(h[0], field.readout(field.initial_state(x)))
        h.sum().backward()


# Counts


SOLVERS = {
    "nystrom8": {"method": "nystrom8"},
    "tsit5, past outputs": {"method": "tsit5", "save": "interpolate"},
    "grid": {"method": "leapfrog", "steps": 5},
    "dopri5": {"method": "dopri5"},
    "rk4": {"method": "rk4", "steps": 5},
}


class Pulse(nn.Module):
    """A force with a sudden beginning, so that steps are rejected."""

    def forward(self, t, h):
        return torch.exp(-(((t - 0.6) / 0.1) ** 2)) - h


def make_block(**solver):
    return hbnode.HeavyBallODEBlock(Pulse(), damping=0.1, **{"gradient": "direct"} | solver).double()


@pytest.mark.parametrize("t", [[0.0, 0.3, 1.0], [1.0, 0.7, 0.0]])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_accepted_steps_follow_one_another_from_start_to_end(name, t):
    block = make_block(**{"rtol": 1e-8, "atol": 1e-8} | SOLVERS[name])
    with torch.no_grad(), hbnode.diagnostics.record_steps(block) as steps:
        block(torch.zeros(2, 1, dtype=torch.float64), t)
    assert len(steps) == block.nfe.steps + block.nfe.rejected
    assert sum(steps.accepted) == block.nfe.steps
    assert not any(steps.backward)
    now, sign = t[0], 1 if t[-1] > t[0] else -1
    for i, accepted in enumerate(steps.accepted):
        assert steps.t[i] == pytest.approx(now, abs=1e-12)
        if accepted:
            now = now + sign * steps.size[i]
        else:
            assert steps.size[i + 1] < steps.size[i]
    assert all(steps.accepted) == ("steps" in SOLVERS[name])
    assert now == pytest.approx(t[-1], abs=1e-12) or name == "dopri5"  # which steps past the last output time
    assert sign * now >= sign * t[-1] - 1e-12


def test_every_sample_has_steps_of_its_own():
    block = make_block(per_sample=True, method="tsit5")
    x = torch.tensor([[0.0], [30.0], [-1.0]], dtype=torch.float64)
    with torch.no_grad(), hbnode.diagnostics.record_steps(block) as steps:
        block(x)
    for sample in range(len(x)):
        rows = [i for i, of in enumerate(steps.sample) if of == sample]
        assert sum(steps.size[i] for i in rows if steps.accepted[i]) == pytest.approx(1.0, abs=1e-12)
        with torch.no_grad(), hbnode.diagnostics.record_steps(block) as alone:
            block(x[sample : sample + 1])
        assert alone.size == pytest.approx([steps.size[i] for i in rows], rel=1e-9)


@pytest.mark.parametrize(
    "solver", [{"method": "dopri5", "gradient": "adjoint"}, {"gradient": "adjoint"}, {"gradient": AGAIN}], ids=str
)
def test_the_steps_of_an_adjoint_are_marked(solver):
    """Those that are computed again are not recorded."""
    block = make_block(**solver)
    with hbnode.diagnostics.record_steps(block) as steps:
        block(torch.ones(2, 1, dtype=torch.float64).requires_grad_()).sum().backward()
    assert block.nfe.backward_steps > 0
    assert steps.backward.count(False) == block.nfe.steps + block.nfe.rejected
    if solver["gradient"] is AGAIN:
        assert not any(steps.backward)
    else:
        assert steps.backward.count(True) == block.nfe.backward_steps + block.nfe.backward_rejected
        assert steps.t[steps.backward.index(True)] == 1.0


def test_steps_before_a_failure_and_of_one_module_only():
    block, other = make_block(method="tsit5", rtol=1e-10, atol=1e-10, max_steps=7), make_block()
    x = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(hbnode.errors.MaxStepsError), hbnode.diagnostics.record_steps(block) as steps:  # noqa: PT012
        other(x)
        block(x)
    block(x, [0.0, 1e-3])
    assert len(steps) == 7


@pytest.mark.parametrize("settings", [{}, {"method": "rk4", "steps": 2}, {"method": "dopri5"}], ids=str)
def test_a_common_step_of_an_ode_rnn_has_the_samples_and_times_of_the_batch(settings):
    """Sequences that have ended take no part; the others keep their numbers and their own times."""
    rnn = hbnode.ODERNN(2, 3, per_sample=False, rtol=0.1, atol=0.1, **settings)
    rnn.has_warned = True  # of long gaps
    t = torch.tensor([[0.0], [100.0], [200.0]]) + 10 * torch.arange(3.0)
    with hbnode.diagnostics.record_steps(rnn) as steps:
        rnn(torch.randn(3, 3, 2), t, lengths=torch.tensor([1, 3, 2]))
    assert set(steps.sample) == {1, 2}
    for sample, start, length in ((1, 100.0, 20.0), (2, 200.0, 10.0)):
        rows = [i for i, other in enumerate(steps.sample) if other == sample and steps.accepted[i]]
        assert steps.t[rows[0]] == start
        total = sum(steps.size[i] for i in rows)  # dopri5 passes the end
        assert total == pytest.approx(length, rel=1e-5) or (settings.get("method") == "dopri5" and total > length)


def test_a_tolerance_just_above_the_rounding_of_float32_ends():
    block = hbnode.ODEBlock(make_field("hbnode"), rtol=2e-9, atol=1e-12, max_steps=1000)
    with torch.no_grad():
        block(make_input(dtype=torch.float32))
    assert block.nfe.total < 9000
