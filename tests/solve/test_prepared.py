"""A solve after other solves is the same as the first, also where the field has changed between them."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.methods import METHODS
from tests.models import AGAIN

ways = pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=["kept", "again"])


def network(dim=3, hidden=8):
    return nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim)).double()


def a_block(**kwargs):
    kwargs = {"damping": 0.3, "method": "nystrom4", "steps": 3} | kwargs
    return hbnode.HeavyBallODEBlock(network(), **kwargs).double()


def values(block, x, t=None):
    """The output, and the gradients of all parameters."""
    parameters = [p for p in block.parameters() if p.requires_grad]
    y = block(x, t)
    return [y, *torch.autograd.grad(y.square().sum(), parameters, allow_unused=True)]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize(("damping", "step"), [(0.0, 0.3), (0.047, 0.3), (2.0, -0.7), (30.0, 0.4)])
def test_coefficients_of_numbers_are_those_of_tensors(method, damping, step, error):
    """And their derivatives: by a complex step where γ is a number, and by torch, of which there are more."""
    rule = METHODS[method]
    gamma = torch.tensor(damping, dtype=torch.float64, requires_grad=True)
    size = torch.tensor(step, dtype=torch.float64)
    of_tensors = rule.packed(torch, gamma, size, error=error)
    of_numbers = rule.packed(np, np.asarray(damping + 1e-30j), np.asarray(step), error=error)
    largest = of_tensors.detach().abs().max().item()
    assert np.abs(of_numbers.real - of_tensors.detach().numpy()).max() < 1e-14 * largest
    if not of_tensors.requires_grad:
        assert not of_numbers.imag.any()
        return
    weights = torch.randn_like(of_tensors)
    (slope,) = torch.autograd.grad((weights * of_tensors).sum(), gamma)
    assert (weights.numpy() * of_numbers.imag / 1e-30).sum() == pytest.approx(slope.item(), rel=1e-10, abs=1e-13)
    assert torch.autograd.gradcheck(lambda g: rule.packed(torch, g, size, error=error), gamma)
    assert torch.autograd.gradgradcheck(lambda g: rule.packed(torch, g, size, error=error), gamma, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gamma", [0.01, 0.8, 12.0])
def test_all_derivatives_in_the_damping(method, gamma):
    """Of the number γ = 20 sigmoid(ω), up to the third, as where each channel has a γ of its own."""
    found = []
    for damping in (gamma, [gamma]):
        field = hbnode.HBNODE(lambda h: -h.sin(), damping=damping, max_damping=20.0).double()
        state = torch.full((1, 1), 0.9, dtype=torch.float64), torch.full((1, 1), 0.4, dtype=torch.float64)
        value = hbnode.odeint(field, state, [0.0, 0.7], method=method, steps=2, gradient="direct")[0][-1].sum()
        derivatives = [value.reshape(())]
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), field.omega, create_graph=True)
            derivatives.append(value.reshape(()))
        found.append(torch.stack(derivatives).detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)  # the omegas are of float32


def another_network(block):
    block.field.func = network()


def another_layer(block):
    block.field.func[0] = nn.Linear(3, 8).double()


def one_more_layer(block):
    block.field.func.append(nn.Tanh())


def another_parameter(block):
    block.field.func[0].weight = nn.Parameter(torch.randn(8, 3, dtype=torch.float64))


def another_value(block):
    with torch.no_grad():
        block.field.func[0].weight.mul_(2.0)


def another_hyperparameter(block):
    block.rtol, block.method, block.steps = 1e-3, "nystrom6", 2


def more_steps(block):
    block.steps = 5


def another_gradient(block):
    block.gradient = "direct"


def another_damping(block):
    with torch.no_grad():
        block.field.omega.add_(1.0)


def a_frozen_layer(block):
    block.field.func[0].requires_grad_(False)


def a_hook(block):
    block.field.func[0].register_forward_hook(lambda module, args, value: 2.0 * value)


CHANGES: list[Callable] = [
    another_network,
    another_layer,
    one_more_layer,
    another_parameter,
    another_value,
    another_hyperparameter,
    more_steps,
    another_gradient,
    another_damping,
    a_frozen_layer,
    a_hook,
]


@ways
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_the_second_call_sees_what_has_changed(change, gradient):
    block, x = a_block(gradient=gradient), torch.randn(2, 3, dtype=torch.float64)
    before = values(block, x)
    change(block)
    anew = copy.deepcopy(block)
    after = values(block, x)
    assert_same(after, values(anew, x))
    assert torch.equal(after[0], before[0]) == (change in (another_gradient, a_frozen_layer))


def test_a_constant_damping_that_is_loaded():
    block, x = a_block(learn_damping=False), torch.randn(2, 3, dtype=torch.float64)
    before = values(block, x)[0]
    block.load_state_dict(block.state_dict() | {"field.damping": torch.tensor(0.9, dtype=torch.float64)})
    after = values(block, x)
    assert not torch.allclose(before, after[0])
    assert_same(after, values(copy.deepcopy(block), x))


@pytest.mark.parametrize(
    "gradient", ["direct", "checkpoint", AGAIN, "adjoint"], ids=["direct", "kept", "again", "adjoint"]
)
def test_a_weight_that_is_a_computed_tensor_by_now(gradient):
    block, x = a_block(gradient=gradient), torch.randn(2, 3, dtype=torch.float64)
    values(block, x)
    code = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    layer = block.field.func[0]
    del layer.weight
    layer.weight = 2.0 * code
    if gradient == "adjoint":
        with pytest.raises(ValueError, match="computed outside"):
            block(x)
        return
    (got,) = torch.autograd.grad(block(x).sum(), code)
    block.gradient, layer.weight = "direct", 2.0 * code
    (expected,) = torch.autograd.grad(block(x).sum(), code)
    assert bool(got.any())
    torch.testing.assert_close(got, expected)


def test_ordinary_dropout_is_refused_when_it_is_switched_on():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    block = hbnode.HeavyBallODEBlock(net, steps=2).double().eval()
    block(torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="SolveDropout"):
        block.train()(torch.zeros(1, 3, dtype=torch.float64))


def test_buffers_that_begin_to_change_are_refused():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    block = hbnode.HeavyBallODEBlock(net, steps=2).double().eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    block(x).sum().backward()
    with pytest.raises(ValueError, match="buffers"):
        block.train()(x)


def test_inference_mode_first():
    block, x = a_block(learn_damping=False), torch.randn(2, 3, dtype=torch.float64)
    with torch.inference_mode():
        block(x)
    assert_same(values(block, x), values(copy.deepcopy(block), x))


def test_another_dtype_and_shape():
    block, x = a_block(), torch.randn(2, 3, dtype=torch.float64)
    expected = block(x).detach()
    block.float()
    assert torch.allclose(block(x.float()).double(), expected, atol=1e-5)
    assert block(torch.zeros(5, 3)).shape == (5, 3)
    assert block(torch.zeros(0, 3)).shape == (0, 3)


@ways
def test_two_threads_use_one_block(gradient):
    block = a_block(learn_damping=False, gradient=gradient)
    x = torch.randn(2, 2, 3, dtype=torch.float64)
    expected = [values(block, part) for part in x]
    wrong = []

    def work(i):
        for _ in range(20):
            try:
                assert_same(values(block, x[i]), expected[i])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("t", [None, [0.0, 0.3, 1.0], torch.linspace(0, 1, 4, dtype=torch.float64)])
@pytest.mark.parametrize("steps", [1, 4, 5, 17])
@pytest.mark.parametrize("every", [1, 4, 100])
def test_steps_computed_again_have_the_gradient_of_direct(steps, t, every):
    """Some steps at a time, in every backward pass anew."""
    block = a_block(steps=steps, gradient=Checkpoint(keep_bytes=0, every=every))
    direct, x = copy.deepcopy(block), torch.randn(2, 3, dtype=torch.float64)
    direct.gradient = "direct"
    assert_same(values(block, x, t), values(direct, x, t))
    y = block(x, t)
    forward = block.nfe.forward
    first = torch.autograd.grad(y.sum(), block.field.omega, retain_graph=True)
    assert block.nfe.backward == forward - 1
    second = torch.autograd.grad(y.sum(), block.field.omega)
    assert_same(first, second)
    assert block.nfe.backward == 2 * (forward - 1)


class DrawsLater(nn.Module):
    """Noise in f from the middle of the solve on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, t, h):
        return self.linear(h) * (1.0 if float(t) < 0.5 else 1.0 + torch.rand_like(h))


@ways
def test_an_f_that_draws_only_later(gradient):
    block = hbnode.HeavyBallODEBlock(DrawsLater(), method="nystrom4", steps=12, gradient=gradient).double()
    x = torch.ones(2, 3)
    direct = copy.deepcopy(block)
    direct.gradient = "direct"
    torch.manual_seed(3)
    got = values(block, x.double())
    torch.manual_seed(3)
    assert_same(got, values(direct, x.double()))


# What may not be taken from one solve into the next


class ChangesTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, t, h):
        t *= 2.0
        return self.net(h) * (1 + t)


@pytest.mark.parametrize("steps", [8, None], ids=["grid", "adaptive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["NODE", "HBNODE"])
@ways
def test_an_f_that_changes_the_time_that_it_is_given(kind, dtype, steps, gradient):
    torch.manual_seed(0)
    block = hbnode.ODEBlock(getattr(hbnode, kind)(ChangesTime()), steps=steps, gradient=gradient).to(dtype)
    direct, x = copy.deepcopy(block), torch.randn(3, 2, dtype=dtype)
    direct.gradient = "direct"
    expected = values(direct, x)
    for _ in range(3):
        for got, wanted in zip(values(block, x), expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("method", "steps"), [("dopri5", None), ("rk4", None), ("tsit5", 4), ("tsit5", None)])
def test_times_that_the_user_changes_afterwards(method, steps):
    field, x = hbnode.NODE(lambda t, h: torch.cos(5 * t) * h, time_dependent=True), torch.ones(1, 1)
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    first = hbnode.odeint(field, x, t, method=method, steps=steps)
    t.mul_(3.0)
    torch.testing.assert_close(hbnode.odeint(field, x, [0.0, 1.0], method=method, steps=steps), first)


def closes_over(change):
    """What a field's gradient for a leaf is in each way, if a change lets it depend on that."""
    found = []
    for gradient in ("direct", "checkpoint", AGAIN):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        block = hbnode.ODEBlock(hbnode.NODE(net), gradient=gradient, steps=20).double()
        x, w = torch.randn(3, 2, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        if change.__name__ != "of_the_field":
            block(x)
        change(block, w)
        found.append(torch.autograd.grad(block(x).sum(), w)[0])
    return found


def of_the_field(block, w):
    net = block.field.func
    block.field.evaluate = lambda t, h: w * net(h)


def of_a_class(block, w):
    kind = type("Scaled", (nn.Linear,), {"forward": lambda self, h: w * nn.functional.linear(h, self.weight)})
    block.field.func[0].__class__ = kind


def of_a_layer(block, w):
    layer = block.field.func[0]
    del layer.in_features
    layer.forward = lambda h: w * nn.functional.linear(h, layer.weight)


@pytest.mark.parametrize("change", [of_the_field, of_a_class, of_a_layer])
def test_a_leaf_that_a_change_brings_in_has_a_gradient(change):
    direct, *others = closes_over(change)
    for other in others:
        torch.testing.assert_close(other, direct)


def test_a_layer_of_torch_whose_call_is_replaced_has_the_gradient_of_what_it_closes_over(monkeypatch):
    def of_all_tanh(block, w):
        monkeypatch.setattr(nn.Tanh, "forward", lambda self, h: w * torch.tanh(h))

    direct, *others = closes_over(of_all_tanh)
    for other in others:
        torch.testing.assert_close(other, direct)


@ways
def test_parameters_in_another_dict(gradient):
    block, x = a_block(steps=20, gradient=gradient), torch.randn(2, 3, dtype=torch.float64)
    block(x)
    block.field.func[0].__setstate__(copy.deepcopy(block.field.func[0].__dict__))
    direct = copy.deepcopy(block)
    direct.gradient = "direct"
    assert_same(values(block, x), values(direct, x))


@ways
def test_a_field_is_freed_at_once_and_options_are_not_kept(gradient):
    gc.disable()
    try:
        block = a_block(steps=20, gradient=gradient)
        block(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
        weight = weakref.ref(block.field.func[0].weight)
        del block
        assert weight() is None

        class Norm:
            def __call__(self, state):
                return state.abs().max()

        norm = Norm()
        kept = weakref.ref(norm)
        field = hbnode.NODE(network())
        hbnode.odeint(field, torch.randn(2, 3).double(), [0.0, 1.0], method="dopri5", options={"norm": norm})
        del norm
        gc.collect()  # of torchdiffeq's own circles
        assert kept() is None
    finally:
        gc.enable()


def test_more_times_in_the_span_of_a_block():
    block, x = a_block(), torch.randn(2, 3, dtype=torch.float64)
    block.t_span = (0.0, 0.5, 1.0)
    torch.testing.assert_close(block(x), block.trajectory(x)[0][-1], rtol=0, atol=0)


@ways
def test_an_output_without_a_gradient(gradient):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    block, x = a_block(gradient=gradient), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    (Stop.apply(block(x)).sum() + 2 * x.sum()).backward()
    assert (x.grad == 2).all()


def test_an_ensemble_without_gradients():
    """By vmap over parameters, where operations in place would loop over the samples, and say so."""
    block, x = a_block(), torch.randn(2, 3, dtype=torch.float64)
    lent = {name: torch.stack([p, 2 * p]) for name, p in block.named_parameters()}
    with torch.no_grad():
        both = torch.func.vmap(lambda p: torch.func.functional_call(block, p, x))(lent)
        for i in range(2):
            one = torch.func.functional_call(block, {name: p[i] for name, p in lent.items()}, x)
            torch.testing.assert_close(both[i], one)


@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN, "adjoint"], ids=["kept", "again", "adjoint"])
def test_hooks_of_whole_gradients(gradient):
    block, seen = a_block(steps=20, gradient=gradient), []
    block.field.func[0].weight.register_post_accumulate_grad_hook(seen.append)
    block(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    assert len(seen) == 1
