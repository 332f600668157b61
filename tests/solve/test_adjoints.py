"""The gradients of native solves: against tight references and each other, and what they refuse."""

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hbnode
from hbnode.nn import MLP, SolveDropout
from hbnode.solve import compiled as compiled_steps
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.methods import EXPONENTIAL, METHODS, NYSTROM, SPLITTING
from tests.models import AGAIN, MODELS, Watched, compile_without_back_end, every_model, make_field, make_input

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def name(gradient):
    """Of a way to compute gradients, for the names of tests."""
    return "again" if gradient is AGAIN else str(gradient)


def gradients(field, x, t, **settings):
    """Of a scalar of h and m at all times, with respect to x, t, and every parameter; and the field's evaluations."""
    x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
    with hbnode.count_nfe(field) as nfe:
        states = hbnode.odeint(field, field.initial_state(x), t, **settings)
        states = states if isinstance(states, tuple) else (states,)
        value = sum((part.sin() * (i + 1)).sum() for i, part in enumerate(states))
        found = torch.autograd.grad(value, [x, t, *field.parameters()])
    return torch.cat([g.reshape(-1) for g in found]), nfe


def methods_of(model):
    if model == "hbnode":
        return [*NYSTROM, *EXPONENTIAL, *SPLITTING, "tsit5"]
    return ["tsit5", *SPLITTING] if model == "ghbnode" else ["tsit5"]


@pytest.mark.parametrize(("model", "shape"), [*((model, "vector") for model in MODELS), ("hbnode", "image")])
def test_all_gradients_agree_with_a_tight_reference(model, shape):
    """In x, in the output times, in gamma, xi and all parameters of f and of the initial momentum."""
    field = make_field(model, shape).double()
    x, t = make_input(shape), float64(0.2, 0.7, 1.5)
    reference, _ = gradients(field, x, t, method="dopri8", save="exact", rtol=1e-12, atol=1e-12, gradient="adjoint")
    methods = methods_of(model) if shape == "vector" else {methods_of(model)[0], methods_of(model)[-1]}
    for i, method in enumerate(methods):
        gradients_of = ["direct", "reversible"] if method in SPLITTING else ["direct"]
        for gradient in (*gradients_of, *(("checkpoint", "adjoint") if i == 0 else ())):
            settings = {"method": method, "gradient": gradient, **TIGHT}
            if method in SPLITTING:
                settings["steps"] = 100
            found, _ = gradients(field, x, t, **settings)
            error = (found - reference).norm() / reference.norm()
            assert error < (1e-4 if method == "leapfrog" else 1e-8), (method, gradient)


@every_model
@pytest.mark.parametrize("solver", [{}, {"steps": 3}, {"save": "exact"}], ids=["adaptive", "grid", "exact"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_checkpoint_and_direct_are_the_same_number(model, solver, per_sample):
    """At any tolerance: both are exact for the numbers that were computed."""
    field = make_field(model).double()
    x, t = make_input(), float64(0.0, 0.4, 0.45, 2.0)
    for method in methods_of(model):
        if method in SPLITTING and "steps" not in solver:
            continue
        settings = {"method": method, "per_sample": per_sample, "rtol": 1e-3, "atol": 1e-3} | solver
        direct, count = gradients(field, x, t, gradient="direct", **settings)
        assert (count.backward, count.backward_steps) == (0, 0)
        for gradient in ("checkpoint", AGAIN, Checkpoint(keep_bytes=0, every=2)):
            replayed, again = gradients(field, x, t, gradient=gradient, **settings)
            torch.testing.assert_close(replayed, direct, rtol=1e-9, atol=1e-11)
            assert (again.forward, again.steps, again.rejected) == (count.forward, count.steps, count.rejected)
            steps = 0 if gradient == "checkpoint" else count.steps
            assert (again.backward, again.backward_steps) == (METHODS[method].evaluations * steps, steps)
        if method in SPLITTING:
            reversed_, third = gradients(field, x, t, gradient="reversible", **settings)
            torch.testing.assert_close(reversed_, direct, rtol=1e-9, atol=1e-11)
            assert third.backward == third.forward - 1


@every_model
@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN, "reversible"], ids=name)
def test_gradcheck(model, gradient):
    torch.manual_seed(1)
    field = make_field(model).double()
    for method in methods_of(model):
        if gradient == "reversible" and method not in SPLITTING:
            continue
        block = hbnode.ODEBlock(field, method=method, gradient=gradient, steps=2)
        x = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
        t = float64(0.1, 0.5, 0.9).requires_grad_()
        assert torch.autograd.gradcheck(block, (x, t), nondet_tol=1e-12)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN, "reversible"], ids=name)
@pytest.mark.parametrize("method", [*NYSTROM, *EXPONENTIAL, *SPLITTING])
def test_gradcheck_of_the_damping_and_of_a_parameter(method, gradient):
    if gradient == "reversible" and method not in SPLITTING:
        pytest.skip("refused")
    x = torch.randn(1, 4, dtype=torch.float64)
    rate = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    field = hbnode.HBNODE(lambda t, h: -rate * h.sin(), damping=0.3).double()

    def end(rate, omega):
        settings = {"method": method, "gradient": gradient, "steps": 2}
        return hbnode.odeint(field, (x, x), [0.0, 1.0], **settings)[0][-1]

    assert torch.autograd.gradcheck(end, (rate, field.omega), nondet_tol=1e-12)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN], ids=name)
@pytest.mark.parametrize("method", [*NYSTROM, *EXPONENTIAL, *SPLITTING, "tsit5"])
def test_second_derivatives(method, gradient):
    rate = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    omega = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    t = float64(0.0, 0.7).requires_grad_()

    def end(x, rate, omega, t):
        field = hbnode.HBNODE(lambda t, h: -rate * torch.sin(h) * t, damping=0.2).double()
        del field.omega
        field.omega = omega
        settings = {"method": method, "steps": 2, "gradient": gradient}
        return hbnode.odeint(field, (x, torch.zeros_like(x)), t, **settings)[0][-1]

    assert torch.autograd.gradcheck(end, (x, rate, omega, t))
    assert torch.autograd.gradgradcheck(end, (x, rate, omega, t))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, inside torch.func
@pytest.mark.parametrize("steps", [None, 3], ids=["adaptive", "grid"])
@every_model
def test_the_transforms_of_torch_func(model, steps):
    """Which take the direct gradient by themselves."""
    field = make_field(model).double()
    block = hbnode.ODEBlock(field, steps=steps, rtol=1e-4, atol=1e-4)
    x, v = make_input(), torch.randn(3, 4, dtype=torch.float64)
    value, tangent = torch.func.jvp(block, (x,), (v,))
    out, pull = torch.func.vjp(block, x)
    w = torch.randn_like(out)
    (pulled,) = pull(w)
    x_leaf = x.clone().requires_grad_()
    expected = block(x_leaf)
    (gradient,) = torch.autograd.grad(expected, x_leaf, w)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(pulled, gradient)
    torch.testing.assert_close((tangent * w).sum(), (gradient * v).sum())
    mapped = torch.func.vmap(lambda row: block(row[None])[0])(x)
    torch.testing.assert_close(mapped, expected.detach(), rtol=1e-3, atol=1e-3)
    parameters = dict(block.named_parameters())
    of_parameters = torch.func.grad(lambda p: (torch.func.functional_call(block, p, (x,)) * w).sum())(parameters)
    wanted = torch.autograd.grad((block(x) * w).sum(), list(parameters.values()))
    for got, want in zip(of_parameters.values(), wanted, strict=True):
        torch.testing.assert_close(got, want)
    per_sample = torch.func.vmap(torch.func.grad(lambda row: block(row[None]).sum()))(x)
    assert per_sample.shape == x.shape


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible", "adjoint"], ids=name)
def test_the_others_say_that_they_have_no_transforms(gradient):
    settings = {"gradient": gradient, "method": "blanes_moan4", "steps": 3}
    block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), **settings).double()
    x, total = make_input(), lambda row: block(row[None]).sum()
    message = r"gradient=.* does not work under the transforms of torch.func.*Fix: gradient='direct'"
    with pytest.raises(ValueError, match=message):
        torch.func.vmap(total)(x)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(total)(x[0])


@pytest.mark.parametrize("gradient", ["reversible", "adjoint"])
def test_the_others_say_that_they_have_one_derivative(gradient):
    settings = {"gradient": gradient, "method": "blanes_moan4", "steps": 3}
    block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), **settings).double()
    x = make_input().requires_grad_()
    with pytest.raises(RuntimeError, match=f"gradient='{gradient}' gives first derivatives only"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=name)
@pytest.mark.parametrize("steps", [2, 30, None], ids=["short", "long", "adaptive"])
def test_checkpoint_has_all_derivatives(gradient, steps):
    settings = {"method": "nystrom4", "steps": steps, "rtol": 1e-3, "atol": 1e-3}
    block = hbnode.HeavyBallODEBlock(hbnode.nn.MLP(4, [6], 4, activation=nn.Tanh), **settings).double()
    direct, x = copy.deepcopy(block), make_input().requires_grad_()
    block.gradient, direct.gradient = gradient, "direct"
    found = []
    for model in (block, direct):
        (first,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *model.parameters()]))
        assert ("graph kept" in str(model.nfe)) == (model.gradient is not AGAIN)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible", "adjoint"], ids=name)
@pytest.mark.parametrize("method", ["leapfrog", "nystrom4"])
def test_an_f_that_changes_its_buffers_is_refused(gradient, method):
    if gradient == "reversible" and method == "nystrom4":
        pytest.skip("refused")
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    with pytest.raises(ValueError, match="func changes its buffers"):
        hbnode.HeavyBallODEBlock(normed, method=method, steps=20, gradient=gradient)(make_input())


# What f may be


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible", "adjoint", "direct"], ids=name)
def test_frozen_and_partly_frozen_fields(gradient):
    settings = {"gradient": gradient, "method": "blanes_moan4", "steps": 4}
    block = hbnode.HeavyBallODEBlock(hbnode.nn.MLP(4, [6], 4), **settings).double()
    block.field.func.layers[0].requires_grad_(False)
    x = make_input()
    block(x).sum().backward()
    assert all(p.grad is None for p in block.field.func.layers[0].parameters())
    assert all(p.grad is not None for p in block.field.func.layers[2].parameters())
    block.requires_grad_(False)
    assert not block(x).requires_grad
    x = x.requires_grad_()
    block(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "adjoint", "direct"], ids=name)
def test_closures_over_leaves_get_their_gradient(gradient):
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for field, state in (
        (lambda t, y: -rate * y, float64([2.0])),
        (hbnode.HBNODE(lambda h: -rate * h, damping=0.0, learn_damping=False), (float64([2.0]), float64([0.0]))),
    ):
        y = hbnode.odeint(field, state, [0.0, 1.0], gradient=gradient, **TIGHT)
        y = y if isinstance(y, torch.Tensor) else y[0]
        (slope,) = torch.autograd.grad(y[-1].sum(), rate)
        w = math.sqrt(0.7)
        exact = -2 * math.exp(-0.7) if callable(field) and not isinstance(field, nn.Module) else -math.sin(w) / w
        assert slope.item() == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("gradient", ["adjoint", "reversible"])
def test_what_would_be_dropped_is_refused(gradient):
    method = {"method": "leapfrog", "steps": 4} if gradient == "reversible" else {}
    leaf = torch.tensor(0.7, requires_grad=True)
    computed = leaf * 2
    state = (torch.ones(2), torch.zeros(2))
    field = hbnode.HBNODE(lambda h: -computed * h)
    with pytest.raises(ValueError, match=r"computed outside it \(by MulBackward0\).*Fix: use gradient='direct'"):
        hbnode.odeint(field, state, [0.0, 1.0], gradient=gradient, **method)
    with torch.no_grad():
        hbnode.odeint(field, state, [0.0, 1.0], gradient=gradient, **method)
    late = torch.tensor(0.5, requires_grad=True)
    field = hbnode.HBNODE(lambda t, h: -(leaf if t < 0.5 else late) * h)

    def solve():
        h, _ = hbnode.odeint(field, state, [0.0, 0.4, 1.0], gradient=gradient, **method)
        h[-1].sum().backward()

    with pytest.raises(ValueError, match="that it did not use at first"):
        solve()


class Late(nn.Module):
    """A network that uses a tensor of someone else's at late times only."""

    def __init__(self, other):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.other = (other,)

    def forward(self, t, h):
        return self.net(h) if t < 0.5 else self.other[0] * h


@pytest.mark.parametrize("gradient", ["adjoint", "reversible"])
@pytest.mark.parametrize("computed", [False, True])
def test_a_network_that_uses_other_tensors_later(gradient, computed):
    method = {"method": "leapfrog", "steps": 4} if gradient == "reversible" else {}
    leaf = torch.tensor(0.7, requires_grad=True)
    block = hbnode.HeavyBallODEBlock(Late(leaf * 2 if computed else leaf), gradient=gradient, **method)
    with pytest.raises(ValueError, match="whose gradient this gradient mode would drop"):
        block(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("steps", [20, None], ids=["grid", "adaptive"])
def test_checkpoint_reaches_every_tensor_that_f_closes_over(computed, steps):
    """A leaf or not, used from the start or only later."""
    found = []
    torch.manual_seed(0)
    late = Late(None)
    for gradient in ("direct", "checkpoint", AGAIN):
        leaf = torch.tensor(0.7, requires_grad=True, dtype=torch.float64)
        late.other = (leaf.sin() if computed else leaf,)
        rate = leaf.cos() if computed else leaf

        def func(t, h, rate=rate):
            return late(t, h) - rate * h

        block = hbnode.HeavyBallODEBlock(func, method="nystrom4", steps=steps, gradient=gradient)
        late.double()
        h = block.double()(torch.ones(1, 2, dtype=torch.float64)).square().sum()
        found.append(torch.autograd.grad(h, [leaf, *late.net.parameters()]))
        assert found[-1][0].abs() > 0.1
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN, "adjoint", "reversible"], ids=name)
def test_hooks_of_parameters(gradient):
    """Each runs once on the whole gradient, or is refused."""
    method = {"method": "leapfrog", "steps": 20}
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), gradient=gradient, **method).double()
    plain = copy.deepcopy(block)
    x, weight = torch.ones(1, 2, dtype=torch.float64), block.field.func.weight
    seen = []
    weight.register_hook(lambda g: seen.append(g) or 2 * g)
    if gradient in ("adjoint", "reversible"):
        with pytest.raises(ValueError, match=r"has a hook of register_hook.*Fix: register_post_accumulate_grad_hook"):
            block(x)
        return
    block(x).sum().backward()
    plain(x).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(weight.grad, 2 * plain.field.func.weight.grad)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible"], ids=name)
def test_an_activation_that_closes_over_a_leaf(gradient):
    slope = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    field = hbnode.GHBNODE(nn.Linear(4, 4), activation=lambda m: torch.tanh(slope * m)).double()
    x, found = make_input(), []
    for mode in ("direct", gradient):
        block = hbnode.ODEBlock(field, method="leapfrog", steps=20, gradient=mode)
        found.append(torch.autograd.grad(block(x).sum(), slope)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("gradient", "frozen", "compile"),
    [
        *itertools.product(["checkpoint", AGAIN, "reversible", "adjoint"], [False, True], [False]),
        ("checkpoint", False, True),
        pytest.param("checkpoint", True, True, marks=pytest.mark.slow),
        pytest.param("reversible", False, True, marks=pytest.mark.slow),
        pytest.param("adjoint", False, True, marks=pytest.mark.slow),
    ],
    ids=name,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
def test_functional_call(gradient, frozen, compile, request):
    """The backward pass evaluates with the parameters that were lent for the forward pass."""
    if compile:
        request.getfixturevalue("eager_compiler")
    torch.manual_seed(0)
    steps = 4 if compile and gradient == "checkpoint" else 30
    settings = {"method": "leapfrog", "steps": steps, "rtol": 1e-9, "atol": 1e-9}
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **settings, compile=compile).double().requires_grad_(not frozen)
    x, found = torch.ones(1, 2, dtype=torch.float64), []
    block(x)
    for mode in ("direct", gradient):
        block.gradient = mode
        lent = {name: (2 * p).detach().requires_grad_() for name, p in block.named_parameters()}
        h = torch.func.functional_call(block, lent, x)
        found.append(torch.autograd.grad(h.sum(), list(lent.values())))
    for one, two in zip(*found, strict=True):
        tolerance = 1e-3 if gradient == "adjoint" else 1e-10  # the adjoint is that of the ODE, not of the grid
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
def test_parameters_modes_and_buffers_of_each_solve_are_its_own(compile, request):
    if compile:
        request.getfixturevalue("eager_compiler")

    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 2)
            self.register_buffer("condition", torch.ones(2, dtype=torch.float64))

        def forward(self, h):
            return (2.0 if self.training else 1.0) * self.net(h) * self.condition

    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    func = Conditioned()
    for gradient in ("direct", "checkpoint", AGAIN):
        solver = {"method": "nystrom4", "steps": 2 if compile else 8, "compile": compile}
        block = hbnode.HeavyBallODEBlock(func, gradient=gradient, **solver).double().train()
        func.condition = torch.full((2,), 1.5, dtype=torch.float64)
        first = block(x)
        block.eval()
        func.condition = torch.full((2,), -0.5, dtype=torch.float64)
        second = block(x)
        func.net.weight = nn.Parameter(func.net.weight.detach().clone())
        got = [torch.autograd.grad(h.sum(), x)[0] for h in (second, first)]
        if gradient == "direct":
            expected = got
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible", "adjoint"], ids=name)
def test_freezing_between_the_passes(gradient):
    settings = {"method": "leapfrog", "steps": 30, "gradient": gradient}
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **settings)
    x = torch.ones(1, 2, requires_grad=True)
    h = block(x)
    block.requires_grad_(False)
    h.sum().backward()
    assert torch.isfinite(x.grad).all()
    h = block(x)
    block.requires_grad_(True)
    h.sum().backward()


def test_saved_tensor_hooks():
    for gradient in ("checkpoint", AGAIN, "adjoint"):
        block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), steps=30, gradient=gradient).double()
        x = torch.ones(1, 2, dtype=torch.float64)
        expected = torch.autograd.grad(block(x).sum(), block.field.func.weight)
        with torch.autograd.graph.save_on_cpu():
            h = block(x)
        torch.testing.assert_close(torch.autograd.grad(h.sum(), block.field.func.weight), expected)


def test_forward_mode():
    import torch.autograd.forward_ad as forward

    block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4)).double()
    x, v = make_input(), make_input()
    with forward.dual_level():
        tangent = forward.unpack_dual(block(forward.make_dual(x, v))).tangent
        for gradient in ("checkpoint", "adjoint"):
            block.gradient = gradient
            with pytest.raises(ValueError, match="nor in forward mode"):
                block(forward.make_dual(x, v))
    block.gradient = None
    torch.testing.assert_close(tangent, torch.func.jvp(block, (x,), (v,))[1])


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible", "adjoint"], ids=name)
def test_weights_changed_between_the_passes_are_noticed(gradient):
    settings = {"method": "leapfrog", "steps": 4, "gradient": gradient}
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **settings)
    h = block(torch.ones(1, 2))
    with torch.no_grad():
        block.field.func.weight.add_(1.0)
    kind, message = RuntimeError, "modified by an inplace operation"
    if gradient is AGAIN:
        kind, message = hbnode.errors.RecomputationError, "ends in another state.*method 'leapfrog'"
    with pytest.raises(kind, match=message):
        h.sum().backward()


BETWEEN = {  # the passes: changes of a field after which a step ends in another state
    "layer": lambda field: field.func.__setitem__(1, nn.ReLU()),
    "weight": lambda field: setattr(field.func[0].weight, "data", field.func[0].weight.data + 0.1),
    "hook": lambda field: field.func[0].register_forward_hook(lambda module, args, out: 2 * out),
    "pre-hook": lambda field: field.func.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "activation": lambda field: setattr(field, "activation", torch.sin),
}


@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize(("method", "steps"), [("leapfrog", 6), ("tsit5", None), ("tsit5", 3)], ids=str)
def test_a_step_that_ends_elsewhere_when_it_is_computed_again(change, method, steps):
    field = hbnode.GHBNODE(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x = torch.ones(1, 2, requires_grad=True)
    for gradient in ("checkpoint", AGAIN):
        block = hbnode.ODEBlock(copy.deepcopy(field), method=method, steps=steps, gradient=gradient)
        direct = hbnode.ODEBlock(copy.deepcopy(field), method=method, steps=steps, gradient="direct")
        h, expected = block(x).sum(), direct(x).sum()
        BETWEEN[change](block.field)
        if gradient is AGAIN and (change, method) != ("activation", "leapfrog"):  # where it is part of the method
            with pytest.raises(hbnode.errors.RecomputationError, match="ends in another state") as error:
                h.backward()
            assert isinstance(error.value, hbnode.SolverError)
            assert 0.0 <= error.value.t <= 1.0
            assert 0.0 < error.value.step_size <= 1.0
        elif change != "weight":  # torch itself misses a change of the data alone
            torch.testing.assert_close(torch.autograd.grad(h, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        pytest.param(AGAIN, hbnode.errors.RecomputationError, "ends in another state", id="again"),
        pytest.param("reversible", ValueError, "that it did not use at first", id="reversible"),
    ],
)
def test_another_func_in_the_backward_pass_is_noticed(gradient, error, message):
    field = hbnode.HBNODE(nn.Linear(2, 2))
    settings = {"method": "leapfrog", "steps": 50, "gradient": gradient}
    h, _ = hbnode.odeint(field, field.initial_state(torch.ones(3, 2)), [0.0, 1.0], **settings)
    field.func = nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        h[-1].sum().backward()


def with_layer(layer, **settings):
    torch.manual_seed(0)
    func = nn.Sequential(nn.Linear(4, 8), layer, nn.Tanh(), nn.Linear(8, 4))
    return hbnode.HeavyBallODEBlock(func, rtol=1e-8, atol=1e-8, **settings).double()


@pytest.mark.parametrize("method", [None, "dopri5", "tsit5"])
def test_ordinary_dropout_is_refused_in_training(method):
    block = with_layer(nn.Dropout(0.3), method=method)
    with pytest.raises(ValueError, match=r"Dropout is in training mode inside a solve.*SolveDropout\(p\)"):
        block(make_input())
    block.eval()(make_input())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient": "direct"},
        {"gradient": AGAIN},
        {"gradient": "adjoint"},
        {"gradient": "reversible", "steps": 30},
        {"method": "dopri5", "gradient": "adjoint"},
        {"per_sample": True},
        {"per_sample": True, "gradient": AGAIN},
        {"method": "leapfrog", "steps": 30, "gradient": AGAIN},
    ],
    ids=str,
)
def test_solve_dropout_keeps_its_mask_for_the_solve_and_its_backward_pass(settings):
    block = with_layer(SolveDropout(0.5), **settings)
    x = make_input().requires_grad_()
    masks = []
    block.field.func[1].register_forward_hook(lambda module, args, out: masks.append((out == 0).tolist()))
    first, second = block(x), block(x)
    assert not torch.allclose(first, second)  # two solves, two masks
    count = len(masks)
    (gradient,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    if settings.get("gradient", "checkpoint") not in ("direct", "checkpoint"):
        assert len(masks) > count
        assert all(mask == masks[0] for mask in masks[count:])  # of the first solve, though the second came after
    moved = torch.zeros_like(x)
    moved[0, 0] = 1e-5
    block.field.func[1].register_forward_pre_hook(lambda module, args: None)
    exact = []
    for sign in (1, -1):
        frozen = copy.deepcopy(block)
        keep = torch.tensor(masks[0]).logical_not().double() * 2
        frozen.field.func[1] = Times(keep)
        exact.append(frozen(x.detach() + sign * moved).sum())
    slope = ((exact[0] - exact[1]) / 2e-5).item()
    assert gradient[0, 0].item() == pytest.approx(slope, rel=1e-4)
    block.eval()
    torch.testing.assert_close(block(x), block(x), rtol=0, atol=0)


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_batch_norm_in_eval_mode_and_in_training():
    for gradient in ("checkpoint", AGAIN, "direct", "adjoint"):
        block = with_layer(nn.BatchNorm1d(8), gradient=gradient)
        block.field.func[1].running_mean.uniform_()
        block.eval()
        x = make_input().requires_grad_()
        block(x).sum().backward()
        assert torch.isfinite(x.grad).all()
        block.train()
        if gradient == "direct":
            block(x)
        else:
            with pytest.raises(ValueError, match=r"func changes its buffers .* Fix: put that layer in eval mode"):
                block(x)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "adjoint"], ids=name)
def test_the_mode_of_the_forward_pass_is_restored_in_the_backward_pass(gradient):
    class ModeDependent(nn.Module):
        def forward(self, h):
            return -2 * h if self.training else -h

    block = hbnode.HeavyBallODEBlock(ModeDependent(), gradient=gradient, **TIGHT).double()
    x = make_input().requires_grad_()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    h = block(x)
    block.eval()
    (got,) = torch.autograd.grad(h.sum(), x)
    torch.testing.assert_close(got, expected)
    assert not block.field.func.training


@pytest.mark.parametrize("steps", [3, None], ids=["grid", "adaptive"])
def test_random_numbers_in_f_are_drawn_again(steps):
    """Each evaluation draws; what is computed again draws the same, and leaves the generator where it was."""

    def noisy(h):
        return -h * (1 + 0.01 * torch.rand_like(h))

    x = make_input().requires_grad_()
    found = []
    for gradient in ("direct", "checkpoint", AGAIN):
        torch.manual_seed(5)
        block = hbnode.HeavyBallODEBlock(noisy, gradient=gradient, steps=steps, rtol=0.1, atol=0.1).double()
        h = block(x)
        torch.rand(3)
        before = torch.get_rng_state()
        found.append(torch.autograd.grad(h.sum(), x)[0])
        assert torch.equal(before, torch.get_rng_state())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_autocast_is_repeated_where_steps_are_computed_again():
    seen = []
    for gradient in ("checkpoint", AGAIN, "direct"):
        torch.manual_seed(0)
        block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), gradient=gradient, rtol=1e-2, atol=1e-2)
        block.field.func.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = block(torch.ones(2, 4))
        assert h.dtype == torch.float32
        h.sum().backward()
        seen.append(block.field.func.weight.grad)
    assert {x for x in seen if isinstance(x, torch.dtype)} == {torch.bfloat16}
    first, *others = (x for x in seen if isinstance(x, torch.Tensor))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-2, atol=1e-3)


# Memory


class Live(TorchDispatchMode):
    """Bytes of the storages made under it that are still alive."""

    def __init__(self):
        super().__init__()
        self.made = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in torch.utils._pytree.tree_leaves(out):
            if isinstance(part, torch.Tensor):
                self.made[id(part.untyped_storage())] = part.untyped_storage()
        return out

    def bytes(self):
        return sum(storage.nbytes() for storage in list(self.made.values()))


def kept(gradient, steps, method="blanes_moan4"):
    """Bytes between the forward and the backward pass."""
    torch.manual_seed(0)
    solver = {"method": method, "gradient": gradient, "steps": steps, "t_span": (0.0, 10.0)}
    block = hbnode.HeavyBallODEBlock(hbnode.nn.MLP(8, [64, 64], 8), **solver)
    x = torch.randn(64, 8, requires_grad=True)
    with Live() as live:
        h = block(x)
        gc.collect()
        return live.bytes() + 0 * h.numel()


def test_memory():
    for method in ("nystrom4", "blanes_moan4"):
        assert kept(AGAIN, 64, method) < 5 * kept(AGAIN, 16, method)
        assert kept(AGAIN, 64, method) < kept("direct", 64, method) / 10
    assert kept("reversible", 64) == kept("reversible", 16) < kept(AGAIN, 16)


@pytest.mark.parametrize("steps", [64, None], ids=["grid", "adaptive"])
def test_the_graph_is_kept_up_to_a_number_of_bytes(steps):
    """Of all that a solve needs, or of adaptive steps, whose number is not known, the first."""
    method, direct = "nystrom4", kept("direct", steps, "nystrom4")
    assert kept("checkpoint", steps, method) == pytest.approx(direct, rel=0.1)
    some = kept(Checkpoint(keep_bytes=direct // 2), steps, method)
    assert kept(AGAIN, steps, method) < some < 0.75 * direct


@pytest.mark.parametrize("method", [*NYSTROM, "tsit5"])
def test_the_graph_that_is_kept_is_within_its_bytes(method):
    direct = kept("direct", 64, method)
    assert kept(Checkpoint(keep_bytes=round(1.1 * direct)), 64, method) >= 0.9 * direct
    assert kept(Checkpoint(keep_bytes=round(0.9 * direct)), 64, method) < 0.3 * direct


@pytest.mark.parametrize("gradient", [AGAIN, Checkpoint(keep_bytes=0, every=1), "reversible"], ids=str)
def test_what_is_computed_again_keeps_nothing_alive(gradient):
    func, x = Watched(), make_input().requires_grad_()
    settings = {"gradient": gradient, "method": "leapfrog", "steps": 20}
    block = hbnode.HeavyBallODEBlock(func, **settings).double()
    gc.disable()
    try:
        for _ in range(3):
            block(x).sum().backward()
        assert len(func.alive) == 0
        assert 0 < func.most <= getattr(gradient, "every", 1) + 1
    finally:
        gc.enable()


# Reversible


@pytest.mark.parametrize("model", ["hbnode", "ghbnode"])
@pytest.mark.parametrize("method", SPLITTING)
def test_the_way_there_and_back_is_exact(model, method):
    field = make_field(model).double()
    state = field.initial_state(make_input())
    steps = 64
    there = hbnode.odeint(field, state, [0.0, 1.0], method=method, steps=steps)
    back = hbnode.odeint(field, tuple(part[-1] for part in there), [1.0, 0.0], method=method, steps=steps)
    for part, start in zip(back, state, strict=True):
        assert (part[-1] - start).abs().max() < 1e-12


@pytest.mark.parametrize("gamma", [0.5, 2.0, 6.0, 20.0])
def test_long_times_in_float32_are_accurate_or_refused(gamma):
    """Undoing the damping multiplies rounding errors by exp(gamma T)."""
    torch.manual_seed(0)
    func = hbnode.nn.MLP(4, [16], 4, activation=nn.Tanh)
    x = torch.randn(8, 4)

    def solve(gradient, dtype):
        settings = {"method": "blanes_moan4", "steps": 100, "gradient": gradient}
        field = hbnode.HBNODE(copy.deepcopy(func), damping=gamma, learn_damping=False)
        block = hbnode.ODEBlock(field, **settings).to(dtype)
        block(x.to(dtype)).pow(2).sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in block.parameters()])

    exact = solve("checkpoint", torch.float64)
    if gamma > 6:
        with pytest.raises(hbnode.errors.ReversalError, match="gradient='checkpoint'"):
            solve("reversible", torch.float32)
    else:
        assert (solve("reversible", torch.float32) - exact).norm() / exact.norm() < 1e-2
    assert (solve("checkpoint", torch.float32) - exact).norm() / exact.norm() < 1e-4


# Compiled


@pytest.fixture
def eager_compiler(monkeypatch):
    compile_without_back_end(monkeypatch)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("hbnode", {"method": "nystrom4"}),
        ("hbnode", {"method": "nystrom4", "steps": 2}),
        ("hbnode", {"method": "nystrom4", "steps": 25}),  # too long for one program
        ("node", {"per_sample": True}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ghbnode", {"method": "leapfrog", "steps": 2}),
                ("hbnode", {}),
                ("hbnode", {"gradient": "direct"}),
                ("hbnode", {"per_sample": True}),
                ("sonode", {}),
                ("sonode", {"steps": 3}),
                ("ghbnode", {"method": "blanes_moan4", "steps": 2}),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")  # dynamo's own, about inputs that are not leaves
def test_compiled_steps_compute_the_same(model, settings, eager_compiler):
    field = make_field(model).double()
    x, t = make_input(), float64(0.0, 0.4, 1.0)
    expected, count = gradients(field, x, t, **settings)
    for _ in range(2):
        found, again = gradients(field, x, t, compile=True, **settings)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert again == count
    assert field.compiled
    assert not any(program.failed for program in field.compiled.values())
    assert copy.deepcopy(field).compiled == {}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("hbnode", {"method": "nystrom4"}),
        ("hbnode", {"method": "nystrom4", "steps": 2}),
        ("hbnode", {"method": "nystrom4", "gradient": AGAIN}),
        ("node", {"per_sample": True}),
        ("ghbnode", {"method": "leapfrog", "steps": 3}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
def test_compiled_steps_at_times_without_a_gradient(model, settings, eager_compiler):
    block = hbnode.ODEBlock(make_field(model), **settings).double()
    x, found = make_input(), []
    for compile in (False, True, True):
        block.compile_steps = compile
        for t in (None, [0.0, 0.4, 1.0]):
            with hbnode.count_nfe(block) as nfe:
                y = block(x, t)
                found.append((y, *torch.autograd.grad(y.sin().sum(), list(block.field.parameters()))))
            assert nfe == block.nfe
            found[-1] = (*found[-1], torch.tensor(list(nfe.as_dict().values())))
    for i in range(4):
        torch.testing.assert_close(found[2 + i], found[i % 2], rtol=1e-10, atol=1e-12)
    assert block.field.compiled
    assert not any(program.failed for program in block.field.compiled.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
@pytest.mark.parametrize("steps", [None, 2], ids=str)
def test_a_closure_over_a_leaf_with_compiled_steps(steps, eager_compiler):
    leaf = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, h):
            return leaf * self.net(h)

    func, x, found = Scaled().double(), make_input(), []
    for compile in (False, True):
        solver = {"method": "nystrom4", "rtol": 1e-6, "atol": 1e-6, "steps": steps}
        block = hbnode.HeavyBallODEBlock(func, compile=compile, **solver).double()
        found.append(torch.autograd.grad(block(x).sum(), [leaf, *func.parameters()]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_activation_of_compiled_steps(eager_compiler):
    field = hbnode.GHBNODE(MLP(4, [6], 4, activation=nn.Tanh))
    block = hbnode.ODEBlock(field, method="leapfrog", steps=3, compile=True).double()
    x = make_input()
    with torch.no_grad():
        block(x)
        field.activation = torch.sin
        changed = block(x)
        block.compile_steps = False
        torch.testing.assert_close(changed, block(x))


def test_what_cannot_be_compiled_is_said_and_solved_without(eager_compiler):
    class Untraceable(nn.Module):
        def forward(self, h):
            torch._dynamo.graph_break()
            return -h

    block = hbnode.HeavyBallODEBlock(Untraceable(), compile=True).double()
    x = make_input().requires_grad_()
    with pytest.warns(compiled_steps.CompilationWarning, match="compile=True has no effect"):
        h = block(x)
    h.sum().backward()
    block(x)  # said once
    plain = hbnode.HeavyBallODEBlock(Untraceable()).double()
    torch.testing.assert_close(h, plain(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
@pytest.mark.parametrize("solver", [{}, {"steps": 3}, {"per_sample": True}], ids=str)
def test_compiled_states_whose_parts_differ_in_shape(solver, eager_compiler):
    class Uneven(hbnode.Field):
        def initial_state(self, x):
            return x, x[:, :1]

        def forward(self, t, state):
            return -state[0], self.func(state[1])

    field, found = Uneven(nn.Linear(1, 1), parts=1, time_dependent=False).double(), []
    for compile in (False, True):
        torch.manual_seed(0)
        y, z = hbnode.odeint(field, field.initial_state(make_input()), [0.0, 1.0], compile=compile, **solver)
        found.append((y, z, *torch.autograd.grad(z.sin().sum(), field.func.parameters())))
    torch.testing.assert_close(found[1][0][-1], found[1][0][0] * math.exp(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], found[0])
    assert not any(program.failed for program in field.compiled.values())


def test_random_numbers_are_not_compiled():
    dropout = with_layer(SolveDropout(0.5), compile=True)
    with pytest.warns(compiled_steps.CompilationWarning, match="draws random numbers"):
        dropout(make_input())


def ends_of_short_solves(block):
    """The end of a solve, its gradients and its count, time and again, with whatever may change in between."""
    x, found = make_input(), []

    def solve(x):
        h = block(x)
        inputs = [z for z in (x, *block.parameters()) if z.requires_grad]
        gradients = torch.autograd.grad(h.sin().sum(), inputs, retain_graph=True) if inputs else ()
        again = torch.autograd.grad(h.sin().sum(), inputs) if inputs else ()
        found.extend([h.detach(), *gradients, *again])
        counts.append((block.nfe.forward, block.nfe.steps, block.nfe.rejected))

    counts: list[tuple] = []
    solve(x.requires_grad_())
    solve(x.detach())
    with torch.no_grad():
        found.append(block(x))
        block.field.func.layers[0].weight.mul_(1.5)
    solve(x[:2].detach())
    block.field.func.layers[0].weight = nn.Parameter(block.field.func.layers[0].weight.detach() / 2)
    solve(x)
    block.field.func.layers.requires_grad_(False)
    solve(x)
    block.t_span = (0.5, -1.0)
    solve(x)
    lent = {name: 2 * p for name, p in block.named_parameters()}
    found.append(torch.func.functional_call(block, lent, x))
    nn.functional.relu(block(x), inplace=True)
    return found, counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
@pytest.mark.parametrize(
    ("method", "gradient"),
    [
        ("nystrom4", "checkpoint"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("nystrom4", "direct"), ("leapfrog", "checkpoint"), ("tsit5", "direct"))
        ),
    ],
)
def test_short_compiled_solves_whatever_changes(method, gradient, eager_compiler):
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        net = MLP(4, [6], 4, activation=nn.Tanh, time_dependent=True)
        solver = {"method": method, "steps": 2, "gradient": gradient, "compile": compile}
        block = hbnode.HeavyBallODEBlock(net, **solver).double()
        found.append(ends_of_short_solves(block))
    (expected, counts), (got, compiled_counts) = found
    assert len(got) == len(expected)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert compiled_counts == counts
    assert block.field.compiled
    assert not any(program.failed for program in block.field.compiled.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", ["hbnode", "sonode"])
@pytest.mark.parametrize("settings", [{}, {"steps": 3}], ids=str)
def test_compiled_by_inductor(model, settings):
    field = make_field(model).double()
    x, t = make_input(), float64(0.0, 1.0)
    expected, _ = gradients(field, x, t, **settings)
    found, _ = gradients(field, x, t, compile=True, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["exponential", "nystrom8", "tsit5"])
def test_an_adjoint_that_misses_its_start_is_refused(method):
    """Where the damping shrinks the state by e^20: the gradient would be a hundred times too large."""
    field = hbnode.HBNODE(hbnode.nn.MLP(3, [8], 3), damping=20.0, max_damping=50.0).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    solver = {"method": method, "rtol": 1e-4, "atol": 1e-4}
    with pytest.raises(hbnode.errors.ReversalError, match=r"grows on the way back.*Fix: gradient='checkpoint'"):
        gradients(field, x, float64(0.0, 1.0), gradient="adjoint", **solver)
    t = torch.linspace(0, 1, 6, dtype=torch.float64)  # starts anew from every output
    exact, _ = gradients(field, x, t, gradient="checkpoint", **solver)
    found, _ = gradients(field, x, t, gradient="adjoint", **solver)
    assert (found - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("method", [*SPLITTING])
def test_a_way_back_to_zero(method):
    """From rest at 0, where an error relative to the start says nothing."""
    field, zero = hbnode.HBNODE(nn.Linear(2, 2)), torch.zeros(3, 2)
    found = []
    for gradient in ("direct", "reversible"):
        h, m = hbnode.odeint(field, (zero, zero), [0.0, 0.5, 1.0], method=method, gradient=gradient, steps=8)
        grads = torch.autograd.grad(h.sum() + m.square().sum(), [*field.parameters()])
        found.append(torch.cat([g.reshape(-1) for g in grads]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
