"""The gradients of native solves: against tight references and each other, and what they refuse."""

import contextlib
import copy
import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import hbnode
from benchmarks.gradients import Living
from hbnode.nn import SolveDropout
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.methods import METHODS, Rosenbrock
from tests.models import AGAIN, Watched, every_field, every_model, gradients, make_field, make_input, slow

TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def net(dim=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, 4), nn.Tanh(), nn.Linear(4, dim)).double()


def name(gradient):
    """Of a way to compute gradients, for the names of tests."""
    return "again" if gradient is AGAIN else str(gradient)


REVERSIBLE = [name for name, method in METHODS.items() if method.is_reversible]
NOT_ROSENBROCK = [name for name, method in METHODS.items() if not isinstance(method, Rosenbrock)]


def methods_of(model):
    """The adaptive ones first."""
    suits = lambda name: METHODS[name].field == "any" or model.upper() in METHODS[name].field.split(", ")
    return sorted(filter(suits, NOT_ROSENBROCK), key=lambda name: METHODS[name].needs_fixed_steps)


@pytest.mark.parametrize(
    ("model", "shape"), [("hbnode", "image"), *slow(("hbnode", "vector"), ("ghbnode", "vector"), ("node", "vector"))]
)
def test_all_gradients_agree_with_a_tight_reference(model, shape):
    """In x, in the output times, in gamma, xi and all parameters of f and of the initial momentum."""
    field = make_field(model, shape).double()
    x, t = make_input(shape), float64(0.2, 0.7, 0.71, 0.73, 1.5)  # steps pass the third
    reference, _ = gradients(field, x, t, method="dopri8", save="exact", rtol=1e-12, atol=1e-12, gradient="adjoint")
    for i, method in enumerate(methods_of(model) if shape == "vector" else ["nystrom8", "leapfrog"]):
        modes = ["direct", *(["reversible"] if method in REVERSIBLE else []), *(["adjoint"] if i == 0 else [])]
        steps = 40 if method in REVERSIBLE else None
        for gradient in modes:
            found, _ = gradients(field, x, t, method=method, gradient=gradient, steps=steps, **TIGHT)
            error = (found - reference).norm() / reference.norm()
            assert error < (1e-4 if method == "leapfrog" else 1e-7), (method, gradient)


@pytest.mark.sparse
@every_field
@pytest.mark.parametrize("solver", [{}, {"steps": 3}, {"save": "exact"}], ids=["adaptive", "grid", "exact"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_checkpoint_and_direct_are_the_same_number(model, solver, per_sample):
    """At any tolerance: both are exact for the numbers that were computed."""
    field, x, t = make_field(model).double(), make_input(), float64(0.0, 0.4, 0.45, 2.0)
    for method in methods_of(model):
        if method in REVERSIBLE and "steps" not in solver:
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
        if method in REVERSIBLE:
            reversed_, third = gradients(field, x, t, gradient="reversible", **settings)
            torch.testing.assert_close(reversed_, direct, rtol=1e-9, atol=1e-11)
            assert third.backward == third.forward - 1


@pytest.mark.parametrize("method", NOT_ROSENBROCK)
def test_second_derivatives(method):
    rate, omega = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.3, 0.4))
    x, t = torch.randn(1, 2, dtype=torch.float64, requires_grad=True), float64(0.0, 0.7).requires_grad_()

    def end(x, rate, omega, t):
        field = hbnode.HBNODE(lambda t, h: -rate * torch.sin(h) * t, damping=0.2).double()
        del field.omega
        field.omega = omega
        settings = {"method": method, "steps": 2, "gradient": AGAIN}
        return hbnode.odeint(field, (x, torch.zeros_like(x)), t, **settings)[0][-1]

    assert torch.autograd.gradgradcheck(end, (x, rate, omega, t))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, inside torch.func
@pytest.mark.parametrize("steps", [None, 3], ids=["adaptive", "grid"])
@every_model
def test_the_transforms_of_torch_func(model, steps):
    """Which take the direct gradient by themselves."""
    block = hbnode.ODEBlock(make_field(model).double(), steps=steps, rtol=1e-4, atol=1e-4)
    x, v = make_input(), make_input()
    leaf, parameters = x.clone().requires_grad_(), dict(block.named_parameters())
    lent = lambda p: torch.func.functional_call(block, p, (x,))
    expected = block(leaf)
    w = torch.randn_like(expected)
    gradient, *of_parameters = torch.autograd.grad(expected, [leaf, *parameters.values()], w)
    value, tangent = torch.func.jvp(block, (x,), (v,))
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close((tangent * w).sum(), (gradient * v).sum())
    torch.testing.assert_close(torch.func.vjp(block, x)[1](w)[0], gradient)
    torch.testing.assert_close(list(torch.func.grad(lambda p: (lent(p) * w).sum())(parameters).values()), of_parameters)
    mapped = torch.func.vmap(torch.func.grad_and_value(lambda row: block(row[None]).sum()))(x)[1]
    torch.testing.assert_close(mapped, expected.detach().flatten(1).sum(1), rtol=1e-3, atol=1e-3)
    both = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    with torch.no_grad():  # an ensemble, where operations in place would loop over the members, and say so
        ends = torch.func.vmap(lent)(both)
    torch.testing.assert_close(ends[0], expected.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "reversible", "adjoint"], ids=name)
def test_transforms_and_second_derivatives_are_refused_by_name(gradient):
    block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), gradient=gradient, method="blanes_moan4", steps=3).double()
    x = make_input().requires_grad_()
    with pytest.raises(ValueError, match=r"under the transforms of torch.func.*Fix: gradient='direct'"):
        torch.func.vmap(lambda row: block(row[None]).sum())(x)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="or in forward mode"):
        block(forward_ad.make_dual(x, x))
    if gradient in ("reversible", "adjoint"):
        with pytest.raises(RuntimeError, match=f"gradient='{gradient}' gives first derivatives only"):
            torch.autograd.grad(block(x).sum(), x, create_graph=True)


# What f may be, and what may happen between the passes: the gradient is that of "direct"

ALL_AT_ONCE = Checkpoint(keep_bytes=0, every=100)
MODES = pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, ALL_AT_ONCE, "reversible", "adjoint"], ids=name)


def leapfrog(func, gradient, **options):
    options = {"method": "leapfrog", "steps": 30} | options
    if gradient == "adjoint":  # of the ODE, not of the grid
        options = {"rtol": 1e-9, "atol": 1e-9}
    return hbnode.HeavyBallODEBlock(func, gradient=gradient, **options).double()


def with_frozen_parameters(gradient):
    """Before the solve, and between the passes."""
    block, x = leapfrog(net(), gradient), torch.ones(1, 2).double().requires_grad_()
    block.field.func[0].requires_grad_(False)
    h = block(x)
    block.field.func[2].bias.requires_grad_(False)
    return torch.autograd.grad(h.sum(), [x, block.field.func[2].weight])


def with_lent_parameters(gradient):
    """As functional_call lends them for the forward pass."""
    block, x = leapfrog(net(), gradient), torch.ones(1, 2).double()
    lent = {name: (2 * p).detach().requires_grad_() for name, p in block.named_parameters()}
    return torch.autograd.grad(torch.func.functional_call(block, lent, x).sum(), list(lent.values()))


def with_another_mode(gradient):
    class ModeDependent(nn.Module):
        def forward(self, h):
            return -2 * h if self.training else -h

    block, x = leapfrog(ModeDependent(), gradient), torch.ones(1, 2).double().requires_grad_()
    h = block(x)
    block.eval()
    found = torch.autograd.grad(h.sum(), x)
    assert not block.field.func.training
    return found


def with_buffers_of_two_solves(gradient):
    class Conditioned(nn.Sequential):
        def forward(self, h):
            return super().forward(h) * self.condition

    x, func = torch.ones(1, 2).double().requires_grad_(), Conditioned(net())
    block, ends = leapfrog(func, gradient), []
    for value in (1.5, -0.5):
        func.register_buffer("condition", torch.full((2,), value, dtype=torch.float64))
        ends.append(block(x))
    return [torch.autograd.grad(h.sum(), x)[0] for h in reversed(ends)]


def with_a_state_of_zeros(gradient):
    """Where an error relative to the start says nothing."""
    block = leapfrog(net(), gradient)
    return torch.autograd.grad(block(torch.zeros(3, 2).double(), [0.0, 0.5, 1.0]).sum(), [*block.parameters()])


def with_dropout_that_keeps_its_mask(gradient):
    torch.manual_seed(5)
    block = leapfrog(nn.Sequential(net(), SolveDropout(0.5)), gradient, steps=8)
    x = torch.ones(4, 2).double().requires_grad_()
    first, second = block(x), block(x)  # two solves, two masks
    assert not torch.allclose(first, second)
    return torch.autograd.grad(first.sum(), x)


def with_a_leaf_and_two_backward_passes(gradient):
    slope, inside = torch.tensor(1.3, dtype=torch.float64, requires_grad=True), net()
    y = leapfrog(lambda h: slope * inside(h), gradient)(torch.ones(1, 2).double(), [0.0, 0.3, 1.0])
    return [torch.autograd.grad(y.sum(), slope, retain_graph=True)[0] for _ in range(2)]


SITUATIONS = [
    *(with_frozen_parameters, with_lent_parameters, with_a_leaf_and_two_backward_passes, with_another_mode),
    *(with_buffers_of_two_solves, with_a_state_of_zeros, with_dropout_that_keeps_its_mask),
]


@MODES
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_gradient_is_that_of_direct(situation, gradient):
    tolerance = 1e-3 if gradient == "adjoint" else 1e-10
    for one, two in zip(situation(gradient), situation("direct"), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gradient", ["checkpoint", Checkpoint(every=1), AGAIN, ALL_AT_ONCE, "reversible", "adjoint"])
def test_what_changed_between_the_passes_is_noticed(gradient):
    """Also in the step that is measured, whose tensors have hooks: autograd does not look at their versions."""
    weight = nn.Parameter(torch.full((2,), 0.5, dtype=torch.float64))
    block = leapfrog(lambda t, h: weight * h if t < 0.1 else -h, gradient, steps=20)
    h = block(torch.ones(1, 2).double())
    with torch.no_grad():
        weight.add_(1.0)
    kind, message = RuntimeError, "modified by an inplace operation"
    if gradient in (AGAIN, ALL_AT_ONCE):
        kind, message = hbnode.errors.RecomputationError, "ends in another state.*method 'leapfrog'"
    with pytest.raises(kind, match=message):
        h.sum().backward()


class Late(nn.Module):
    """A network that uses a tensor of someone else's at late times only."""

    def __init__(self, other):
        super().__init__()
        self.net, self.other = nn.Linear(2, 2), (other,)

    def forward(self, t, h):
        return self.net(h) if t < 0.5 else self.other[0] * h


def with_a_computed_tensor(gradient, steps):
    leaf = torch.tensor(0.7, requires_grad=True, dtype=torch.float64)
    late, rate = Late(leaf.sin()).double(), leaf.cos()
    func = lambda t, h: late(t, h) - rate * h
    block = hbnode.HeavyBallODEBlock(func, steps=steps, gradient=gradient).double()
    h = block(torch.ones(1, 2, dtype=torch.float64)).square().sum()
    return torch.autograd.grad(h, [leaf, *late.net.parameters()])


def with_a_computed_weight(gradient, steps):
    code, func = torch.ones(4, 2, dtype=torch.float64, requires_grad=True), net()
    del func[0].weight
    func[0].weight = 2.0 * code
    block = hbnode.HeavyBallODEBlock(func, steps=steps, gradient=gradient).double()
    return torch.autograd.grad(block(torch.ones(1, 2).double()).sum(), code)


def with_noise(gradient, steps):
    """Each evaluation draws; what is computed again draws the same, and leaves the generator where it was."""

    def noisy(t, h):
        return -h if t < 0.3 else -h * (1 + 0.01 * torch.rand_like(h))

    block = hbnode.HeavyBallODEBlock(noisy, gradient=gradient, steps=steps, rtol=0.1, atol=0.1).double()
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    h = block(x)
    torch.rand(3)
    before = torch.get_rng_state()
    found = torch.autograd.grad(h.sum(), x)
    assert torch.equal(before, torch.get_rng_state())
    return found


def with_a_time_that_f_changes(gradient, steps):
    inside = net()

    def func(t, h):
        t *= 2.0
        return inside(h) * (1 + t)

    block = hbnode.HeavyBallODEBlock(func, gradient=gradient, steps=steps).double()
    block(torch.ones(1, 2).double())
    return [block(torch.ones(1, 2).double())]


@pytest.mark.sparse
@pytest.mark.parametrize(
    "situation", [with_a_computed_tensor, with_a_computed_weight, with_noise, with_a_time_that_f_changes]
)
@pytest.mark.parametrize("steps", [None, 20], ids=["adaptive", "grid"])
@pytest.mark.parametrize("gradient", [AGAIN, "checkpoint"], ids=name)
def test_checkpoint_takes_what_reversible_and_adjoint_refuse(gradient, steps, situation):
    found = []
    for mode in ("direct", gradient):
        torch.manual_seed(5)
        found.append(situation(mode, steps))
    for one, two in zip(*found, strict=True):
        assert one.abs().sum() > 1e-3
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("gradient", ["adjoint", "reversible"])
def test_what_would_be_dropped_is_refused(gradient):
    method = {"method": "leapfrog", "steps": 4} if gradient == "reversible" else {}
    leaf, x = torch.tensor(0.7, requires_grad=True), torch.ones(1, 2)
    computed = leaf * 2
    block = hbnode.HeavyBallODEBlock(lambda h: -computed * h, gradient=gradient, **method)
    with pytest.raises(ValueError, match=r"computed outside it \(by MulBackward0\).*Fix: use gradient='direct'"):
        block(x)
    with torch.no_grad():
        block(x)
    for late in (leaf, computed):
        block = hbnode.HeavyBallODEBlock(Late(late), gradient=gradient, **method)
        with pytest.raises(ValueError, match=r"this gradient mode would drop|that it did not use at first"):
            block(x).sum().backward()


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", AGAIN, "adjoint", "reversible"], ids=name)
def test_hooks_of_parameters(gradient):
    """Each runs once on the whole gradient, or is refused."""
    block, x, calls = leapfrog(nn.Linear(2, 2), gradient), torch.ones(1, 2, dtype=torch.float64), []
    weight = block.field.func.weight
    block.field.func.bias.register_post_accumulate_grad_hook(calls.append)
    block(x).sum().backward()
    assert len(calls) == 1
    expected, weight.grad = weight.grad, None
    weight.register_hook(lambda g: calls.append(g) or 2 * g)
    if gradient in ("adjoint", "reversible"):
        with pytest.raises(ValueError, match=r"has a hook of register_hook.*Fix: register_post_accumulate_grad_hook"):
            block(x)
        return
    block(x).sum().backward()
    assert len(calls) == 3
    torch.testing.assert_close(weight.grad, 2 * expected)


BETWEEN = {  # the passes: changes of a field after which a step ends in another state
    "layer": lambda field: field.func.__setitem__(1, nn.ReLU()),
    "weight": lambda field: setattr(field.func[0].weight, "data", field.func[0].weight.data + 0.1),
    "hook": lambda field: field.func[0].register_forward_hook(lambda module, args, out: 2 * out),
    "activation": lambda field: setattr(field, "activation", torch.sin),
}


@pytest.mark.sparse
@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize(("method", "steps"), [("tsit5", None), ("tsit5", 3), ("leapfrog", 6)], ids=str)
def test_a_step_that_ends_elsewhere_when_it_is_computed_again(method, steps, change):
    field = hbnode.GHBNODE(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x, settings = torch.ones(1, 2, requires_grad=True), {"method": method, "steps": steps}
    for gradient in ("checkpoint", AGAIN):
        block = hbnode.ODEBlock(copy.deepcopy(field), gradient=gradient, **settings)
        h, expected = block(x).sum(), hbnode.ODEBlock(field, gradient="direct", **settings)(x).sum()
        BETWEEN[change](block.field)
        if gradient is AGAIN and (change, method) != ("activation", "leapfrog"):  # where it is part of the method
            with pytest.raises(hbnode.errors.RecomputationError, match="ends in another state") as error:
                h.backward()
            assert 0.0 <= error.value.t <= 1.0
            assert 0.0 < error.value.step_size <= 1.0
        elif change != "weight":  # torch itself misses a change of the data alone
            torch.testing.assert_close(torch.autograd.grad(h, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        *((nn.Dropout(0.3), {"method": m}, r"Dropout is in training.*SolveDropout\(p\)") for m in (None, "dopri5")),
        *((nn.BatchNorm1d(8), {"gradient": g}, "changes its buffers") for g in ("checkpoint", AGAIN, "adjoint")),
    ],
)
def test_layers_that_change_in_training_are_refused(layer, settings, message):
    func = nn.Sequential(nn.Linear(4, 8), layer, nn.Tanh(), nn.Linear(8, 4))
    block, x = hbnode.HeavyBallODEBlock(func, **settings).double(), make_input().requires_grad_()
    block.eval()(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    with pytest.raises(ValueError, match=message):
        block.train()(x)


def test_autocast_is_repeated_where_steps_are_computed_again():
    dtypes, found, func = set(), [], nn.Linear(4, 4)
    func.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    for gradient in ("checkpoint", AGAIN, "direct"):
        block = hbnode.HeavyBallODEBlock(func, gradient=gradient, rtol=1e-2, atol=1e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = block(torch.ones(2, 4))
        assert h.dtype == torch.float32
        found.append(torch.autograd.grad(h.sum(), func.weight)[0])
    assert dtypes == {torch.bfloat16}
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-2, atol=1e-3)


def test_two_threads_use_one_block():
    block = hbnode.HeavyBallODEBlock(net(), steps=8, gradient=AGAIN).double()
    values = lambda x: torch.autograd.grad(block(x).sum(), [*block.parameters()])
    inputs = torch.randn(2, 3, 2, dtype=torch.float64)
    expected = [values(x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(values, [*inputs] * 3))
    torch.testing.assert_close(found, expected * 3, rtol=1e-12, atol=1e-13)


WITHOUT_A_GRAPH = [
    ("adjoint", {}), ("adjoint", {"per_sample": True}), ("adjoint", {"method": "dopri5"}), ("reversible", {"steps": 40})
]  # fmt: skip


@pytest.mark.parametrize(("gradient", "solver"), [*WITHOUT_A_GRAPH, ("checkpoint", {})], ids=str)
def test_inference_tensors_as_the_initial_state(gradient, solver):
    block = hbnode.HeavyBallODEBlock(net(), gradient=gradient, rtol=1e-8, atol=1e-8, **solver).double()
    x = torch.randn(2, 2, dtype=torch.float64)
    with torch.inference_mode():
        of_inference = x.clone()
    one, two = (torch.autograd.grad(block(y).sum(), [*block.parameters()]) for y in (of_inference, x))
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize(("gradient", "solver"), WITHOUT_A_GRAPH, ids=str)
def test_sparse_gradients(gradient, solver):
    x, found = torch.ones(2, 2, dtype=torch.float64), []
    weight = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for sparse in (False, True):
        func = lambda h, sparse=sparse: -nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=sparse) * h
        block = hbnode.HeavyBallODEBlock(func, gradient=gradient, **solver).double()
        if sparse and "method" in solver:
            with pytest.raises(ValueError, match=r"sparse=True.*Fix: sparse=False"):
                block(x)
            return
        found.append(torch.autograd.grad(block(x).sum(), weight)[0].to_dense())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("gradient", "solver"), WITHOUT_A_GRAPH, ids=str)
def test_torchs_checkpoint_inside_f(gradient, solver):
    """The reentrant one cannot run in the backward pass of another function."""
    inside, x, found = net(), torch.randn(2, 2, dtype=torch.float64), []
    for func in (inside, lambda h: torch.utils.checkpoint.checkpoint(inside, h, use_reentrant=False)):
        block = hbnode.HeavyBallODEBlock(func, gradient=gradient, **solver).double()
        found.append(torch.autograd.grad(block(x).sum(), [*inside.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    block.field.func = lambda h: torch.utils.checkpoint.checkpoint(inside, h, use_reentrant=True)
    with pytest.raises(ValueError, match=r"use_reentrant=True.*Fix: use_reentrant=False"):
        block(x)


# Memory


class Mark(torch.autograd.Function):
    """The identity; its node is counted while it lives."""

    alive: ClassVar = weakref.WeakSet()

    @staticmethod
    def forward(ctx, x):
        ctx.mark = nn.Identity()
        Mark.alive.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Marked(nn.Module):
    """A network that raises in a late call, if asked."""

    def __init__(self, lasts=10**6):
        super().__init__()
        self.layers, self.lasts = net(), lasts

    def forward(self, h):
        self.lasts -= 1
        if self.lasts < 0:
            raise KeyError("late")
        return Mark.apply(self.layers(h))


CROSSING = hbnode.Event(lambda t, y: t - 0.3 + 0 * y[0][:, 0], jump=lambda t, y: (y[0], -y[1]))
LOOPS = {
    "direct": ("direct", {}),
    "checkpoint": ("checkpoint", {}),
    "measured-steps": (Checkpoint(keep_bytes=4000), {"steps": 20}),
    "again": (AGAIN, {}),
    "rodas5p": ("checkpoint", {"method": "rodas5p"}),
    "per-sample": ("checkpoint", {"per_sample": True}),
    "events": ("checkpoint", {"events": CROSSING}),
    "adjoint": ("adjoint", {}),
    "adjoint-events": ("adjoint", {"events": CROSSING}),
    "dopri5-adjoint": ("adjoint", {"method": "dopri5"}),
    "reversible": ("reversible", {"steps": 20}),
}
SLOW = {"direct", "rodas5p", "dopri5-adjoint", "adjoint-events"}
every_loop = pytest.mark.parametrize(
    ("gradient", "solver"),
    [pytest.param(*loop, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, loop in LOOPS.items()],
)


def solved(field, x, gradient, solver):
    """All tensors of the solution, those of events included."""
    result = hbnode.odeint(field, field.initial_state(x), [0.0, 1.0, 2.0], gradient=gradient, **solver)
    return (*result[0], result[1].t, *result[1].state) if "events" in solver else result


@pytest.mark.sparse
@pytest.mark.parametrize("use", ["retain", "detach", "raise"])
@every_loop
def test_a_dropped_graph_is_freed(gradient, solver, use):
    """That of the steps, and that of what comes before the solve."""
    field = hbnode.HBNODE(Marked(10 if use == "raise" else 10**6)).double()
    Mark.alive.clear()
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        with pytest.raises(KeyError) if use == "raise" else contextlib.nullcontext():
            h = solved(field, Mark.apply(x), gradient, solver)[0][-1]
            if use == "retain":
                h.sum().backward(retain_graph=True)
            h = h.detach()
    gc.collect()
    assert len(Mark.alive) == 0


@every_loop
def test_a_dropped_solution_is_freed_without_garbage_collection(gradient, solver):
    for first in (True, False):
        field = hbnode.HBNODE(net()).double()
        result = solved(field, torch.randn(2, 2, dtype=torch.float64), gradient, solver)
        weight = weakref.ref(field.func[0].weight)
        if first:  # imports of torch keep frames
            gc.collect()
            gc.disable()
    try:
        del field, result
        assert weight() is None
    finally:
        gc.enable()


@every_loop
def test_a_network_that_keeps_an_output_is_freed(gradient, solver):
    for use in ("keep", "backward"):
        net = Marked()
        net.last = solved(hbnode.HBNODE(net).double(), torch.randn(2, 2, dtype=torch.float64), gradient, solver)
        if use == "backward":
            net.last[0][-1].sum().backward()
        freed = weakref.ref(net)
        del net
        gc.collect()
        assert freed() is None


@every_loop
def test_a_solve_outlives_its_network(gradient, solver):
    """The gradient of the input is the same if only a tensor that was computed from an output is left."""
    field, found = hbnode.HBNODE(Marked()).double(), []
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    for kept in (field, None):
        field = copy.deepcopy(field)
        loss = sum(part.square().sum() for part in solved(field, x, gradient, solver))
        field = kept
        gc.collect()
        found += torch.autograd.grad(loss, x)
    assert torch.equal(*found)


def kept(gradient, steps, method="blanes_moan4"):
    """Bytes of the tensors that the forward pass made and that are alive after it."""
    torch.manual_seed(0)
    solver = {"method": method, "gradient": gradient, "steps": steps, "t_span": (0.0, 6.0)}
    block = hbnode.HeavyBallODEBlock(hbnode.nn.MLP(8, [64, 64], 8), rtol=1e-4, atol=1e-4, **solver)
    x = torch.randn(64, 8, requires_grad=True)
    with Living([x, *block.parameters()]) as living:
        h = block(x)
        gc.collect()
        return living.size() + 0 * h.numel()


def test_memory_of_steps_of_one_size():
    assert kept(AGAIN, 16) < 5 * kept(AGAIN, 4)
    assert kept("reversible", 16) == kept("reversible", 4) < kept(AGAIN, 16) < kept("direct", 16) / 10


@pytest.mark.parametrize("steps", [8, *slow(None)])
def test_memory_is_kept_up_to_a_number_of_bytes(steps):
    """Of adaptive steps, the first ones keep what they need."""
    direct = kept("direct", steps, "nystrom4")
    assert kept("checkpoint", steps, "nystrom4") == pytest.approx(direct, rel=0.1)
    some = kept(Checkpoint(keep_bytes=direct // 2), steps, "nystrom4")
    assert kept(AGAIN, steps, "nystrom4") < some < 0.75 * direct


def test_parameters_are_not_memory_that_a_step_keeps():
    """720 kB of weights do not count among the 1 MiB that the graphs of eight steps may keep: no step is repeated."""
    field, x = hbnode.NODE(nn.Linear(300, 300).double()), torch.randn(1, 300).double().requires_grad_()
    with hbnode.count_nfe(field) as nfe:
        hbnode.odeint(field, x, [0.0, 1.0], steps=8, gradient=Checkpoint(keep_bytes=2**20))[-1].sum().backward()
    assert nfe.backward == 0


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


def test_long_times_in_float32_are_accurate_or_refused():
    """Undoing the damping multiplies rounding errors by exp(gamma T)."""
    x = torch.randn(8, 4)

    def solve(gamma, gradient, dtype=torch.float32):
        field = hbnode.HBNODE(net(4), damping=gamma, learn_damping=False)
        block = hbnode.ODEBlock(field, method="blanes_moan4", steps=100, gradient=gradient).to(dtype)
        slopes = torch.autograd.grad(block(x.to(dtype)).pow(2).sum(), [*block.parameters()])
        return torch.cat([g.reshape(-1) for g in slopes])

    exact = solve(6.0, "checkpoint", torch.float64)
    for gradient, most in (("checkpoint", 1e-4), ("reversible", 1e-2)):
        assert (solve(6.0, gradient) - exact).norm() / exact.norm() < most
    with pytest.raises(hbnode.errors.ReversalError, match="gradient='checkpoint'"):
        solve(20.0, "reversible")


@pytest.mark.parametrize("method", ["exponential", "tsit5"])
def test_an_adjoint_that_misses_its_start_is_refused(method):
    """Where the damping shrinks the state by e^20: the gradient would be a hundred times too large."""
    field = hbnode.HBNODE(hbnode.nn.MLP(3, [8], 3), damping=20.0, max_damping=50.0).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    solver = {"method": method, "rtol": 1e-4, "atol": 1e-4}
    with pytest.raises(hbnode.errors.ReversalError, match=r"grow backwards.*Fix: gradient='checkpoint'"):
        gradients(field, x, float64(0.0, 1.0), gradient="adjoint", **solver)
    t = torch.linspace(0, 1, 6, dtype=torch.float64)  # starts anew from every output
    exact, found = (gradients(field, x, t, gradient=way, **solver)[0] for way in ("checkpoint", "adjoint"))
    assert (found - exact).norm() / exact.norm() < 1e-2


@pytest.mark.sparse
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("gradient", "solver"), [("checkpoint", {}), (AGAIN, {}), *WITHOUT_A_GRAPH], ids=str)
def test_a_buffer_may_count_the_calls_of_func(gradient, solver, in_place):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(-0.5, dtype=torch.float64))
            self.register_buffer("count", torch.tensor(0))
            self.calls = 0

        def forward(self, h):
            self.calls += 1
            self.count = self.count.add_(1) if in_place else self.count + 1
            return self.slope * h

    func = Counting()
    field = hbnode.HBNODE(func, damping=0.0, learn_damping=False)
    state = field.initial_state(torch.ones(1, 1).double())
    h = hbnode.odeint(field, state, [0.0, 1.0], gradient=gradient, **TIGHT | solver)[0]
    slope = torch.autograd.grad(h[-1].sum(), func.slope)[0].item()
    omega = 0.5**0.5  # h = cos ωt, ω² = -slope
    assert slope == pytest.approx(math.sin(omega) / (2 * omega), rel=1e-4 if "steps" in solver else 1e-7)
    assert int(func.count) == func.calls


def test_the_adjoint_of_a_leaf_of_another_dtype():
    """A constant damping is float64 for any dtype of the state."""
    damping, found = float64(0.5).requires_grad_(), []
    field = hbnode.HBNODE(lambda h: -h, damping=damping, learn_damping=False)
    for gradient in ("direct", "adjoint"):
        h, _ = hbnode.odeint(field, (torch.ones(1, 1), torch.zeros(1, 1)), [0, 1], gradient=gradient)
        found += torch.autograd.grad(h[-1].sum(), damping)
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)


def test_a_tensor_that_f_kept_when_the_outputs_are_dropped():
    kept, f = [], net(3).double()
    field = lambda t, y: kept.append(f(y)) or kept[-1]
    hbnode.odeint(field, torch.ones(1, 3, dtype=torch.float64), [0.0, 1.0], gradient=AGAIN)
    with pytest.raises(RuntimeError, match="outputs of the solve were dropped before the backward pass"):
        kept[-1].sum().backward()


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
def test_a_complex_parameter(gradient):
    """z' = i a z from 1 + i, as two real numbers, has |z(1)|² = 2 exp(-2 Im a)."""
    a = torch.tensor(0.3 + 0.8j, dtype=torch.complex128, requires_grad=True)
    rotation = lambda t, y: torch.view_as_real(1j * a * torch.view_as_complex(y))
    y = hbnode.odeint(rotation, torch.ones(3, 2).double(), [0.0, 1.0], gradient=gradient, **TIGHT)
    (slope,) = torch.autograd.grad(y[-1].square().sum(), a)
    assert slope.item() == pytest.approx(-12j * math.exp(-1.6), abs=1e-8)
