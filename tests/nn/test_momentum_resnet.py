import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

import hbnode
from hbnode.errors import NonFiniteError, ReversalError
from hbnode.nn import MomentumResNet
from tests.models import slow


def make(depth=200, size=16, make_layer=None, **options):
    torch.manual_seed(0)
    make_layer = make_layer or (lambda: nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size)))
    return MomentumResNet([make_layer() for _ in range(depth)], **options)


def gradients(net, x):
    """Of x and all parameters, in one vector, after the output."""
    x = x.clone().requires_grad_()
    y = net(x)
    found = torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])
    return y.detach(), torch.cat([g.reshape(-1) for g in found])


def reference(net, x):
    """The paper's equations as a plain loop in float64, differentiated by autograd."""
    net, x = copy.deepcopy(net).double(), x.double().requires_grad_()
    gamma, y = net.momentum, x
    v = torch.zeros_like(y) if net.initial_velocity is None else net.initial_velocity(y)
    for layer in list(net.layers) * (net.depth // len(net.layers)):
        v = gamma * v + (1 - gamma) * layer(y)
        y = y + v
    found = torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])
    return y.detach(), torch.cat([g.reshape(-1) for g in found])


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("momentum", [0.9, *slow(0.98, 0.3)])
def test_the_gradient_of_200_layers_is_exact_up_to_float32_rounding(momentum):
    net, x = make(momentum=momentum, initial_velocity=nn.Linear(16, 16)), torch.randn(8, 16)
    (y, found), (exact_y, exact) = gradients(net, x), reference(net, x)
    assert distance(y, exact_y) < 2e-6
    assert distance(found, exact) < 3e-5
    y, found = gradients(net.double(), x.double())
    assert distance(y, exact_y) < 1e-10
    assert distance(found, exact) < 1e-10


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_direct_is_the_same_network(momentum):
    net, x = make(20, momentum=momentum, gradient="direct").double(), torch.randn(8, 16).double()
    (y, found), (exact_y, exact) = gradients(net, x), reference(net, x)
    assert distance(y, exact_y) < 1e-14
    assert distance(found, exact) < 1e-14


def test_one_module_is_shared_by_all_layers():
    shared = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())
    net, x = MomentumResNet(shared, depth=30).double(), torch.randn(3, 2, 5, 5, dtype=torch.float64)
    assert distance(gradients(net, x)[1], reference(net, x)[1]) < 1e-11
    assert len(list(net.parameters())) == 2


def test_the_lost_digits_bring_back_every_integer():
    from hbnode.nn.momentum_resnet import _Digits

    unit = 2**30

    v = torch.randint(-(2**62), 2**62, (1000,))
    for n in (1, 3, unit // 3, unit // 2, unit // 2 + 1, 966367642, unit - 1, unit):
        digits, values = _Digits(n, []), [v]
        for _ in range(150):
            values.append(digits.shrink(values[-1]))
        assert values[1].tolist() == [x * n // unit for x in v.tolist()]
        for before, after in zip(values[-2::-1], values[::-1], strict=False):
            assert torch.equal(digits.restore(after), before)


def test_memory_is_a_bit_per_layer_and_element():
    class Saved:
        def __init__(self, x):
            self.x = x.detach()

    alive = weakref.WeakSet()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: alive.add(made := Saved(x)) or made, lambda made: made.x):
        y = make()(torch.randn(8, 16, requires_grad=True))
    own = [saved.x for saved in alive if saved.x.shape == (8, 16)]
    assert y.requires_grad
    assert sum(x.nbytes for x in own) == 8 * 16 * (2 * 4 + 2 * 8 + 4 * 8)  # x, v; integers of both; 200 bits in 4 words


def test_dropout_and_autocast_are_the_same_in_both_passes():
    net, x = make(20, make_layer=lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))), torch.randn(8, 16)
    torch.manual_seed(1)
    expected = gradients(net, x)
    after, net.gradient = torch.rand(()), "direct"
    torch.manual_seed(1)
    found = gradients(net, x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.rand(()), after)
    net, x = make(20), torch.randn(8, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_a_changed_layer_is_an_error_and_not_a_wrong_gradient():
    class Flag(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return self.scale * super().forward(x)

    net = make(5, make_layer=lambda: Flag(16, 16))
    y = net(torch.randn(8, 16))
    net.layers[2].scale = 1.001
    with pytest.raises(ReversalError, match=r"do not recover the input.*Fix: gradient='direct'"):
        y.sum().backward()
    others = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    y = torch.func.functional_call(net, others, (torch.randn(8, 16),))
    with pytest.raises(ValueError, match=r"that it did not use at first.*Fix: use gradient='direct'"):
        y.sum().backward()
    outside = torch.ones(16, requires_grad=True)
    with pytest.raises(ValueError, match=r"a tensor of shape \(16,\) that it did not use at first"):
        make(2, make_layer=lambda: Closing(outside))(torch.randn(8, 16, requires_grad=True))
    make(2, make_layer=lambda: Closing(outside))(torch.randn(8, 16)).sum().backward()
    assert outside.grad.abs().min() > 0


class Closing(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.get = lambda: tensor

    def forward(self, x):
        return x * self.get()


@pytest.mark.parametrize(
    ("value", "layer"), [(float("nan"), 0), (float("inf"), 0), (3e6, 0), (2e6, 1), (-1e30, 0)], ids=str
)
def test_numbers_that_the_integers_cannot_hold_are_an_error(value, layer):
    net, x = MomentumResNet([nn.Identity()] * 3), torch.ones(2, 3)
    x[0, 0] = value
    with pytest.raises(
        NonFiniteError, match=r"not finite or exceeds 2.09715e.06.*Fix: check the learning rate"
    ) as error:
        net(x.requires_grad_())
    assert error.value.t == layer
    net.gradient = "direct"
    net(x)


@pytest.mark.parametrize(
    ("make_it", "kind", "message"),
    [
        (lambda: MomentumResNet(nn.Linear(2, 2)), ValueError, r"expected a list of modules, or one module and depth="),
        (lambda: MomentumResNet([nn.Linear(2, 2)], depth=2), ValueError, "got list and depth=2"),
        (lambda: MomentumResNet([]), TypeError, "layers must be modules, got nothing"),
        (lambda: MomentumResNet([torch.tanh]), TypeError, "layers must be modules, got builtin_function"),
        (lambda: MomentumResNet(nn.Identity(), depth=0), ValueError, "depth must be"),
        (lambda: MomentumResNet([nn.Identity()], momentum=1.1), ValueError, r"momentum must be in \[0, 1\], got 1.1"),
        (
            lambda: MomentumResNet([nn.Identity()], momentum=0.0),
            ValueError,
            "needs momentum > 0, got 0.0. Fix: gradient='direct'",
        ),
        (lambda: MomentumResNet([nn.Identity()], gradient="adjoint"), ValueError, "'reversible' or 'direct'"),
        (lambda: MomentumResNet([nn.Linear(2, 3)])(torch.ones(1, 2)), ValueError, r"returned shape \(1, 3\)"),
        (lambda: MomentumResNet([nn.Identity()])(torch.ones(1, 2).long()), TypeError, "got torch.int64. Fix: x.float"),
        (
            lambda: MomentumResNet([nn.BatchNorm1d(2)])(torch.randn(4, 2)),
            ValueError,
            "changes its buffers.*Fix: put that layer in eval mode",
        ),
    ],
)
def test_bad_arguments(make_it, kind, message):
    with pytest.raises(kind, match=message):
        make_it()


def test_higher_derivatives_and_hooks_are_refused_and_direct_has_them():
    net, x = make(3), torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"first derivatives only.*Fix: gradient='direct'"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    assert torch.func.grad(lambda x: net(x).sum())(x).shape == x.shape  # direct by itself
    net.gradient = "direct"
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    net.gradient = "reversible"
    net.layers[0][0].weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match=r"hook of register_hook.*Fix: register_post"):
        net(x)


def test_copies_empty_batches_and_other_modes():
    net, x = make(4), torch.randn(4, 16)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(net(x), other(x))
    with torch.inference_mode():
        assert torch.allclose(net(x), make(4)(x))
    y = net(x.requires_grad_())
    y.sum().backward(retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(again, x.grad)
    assert net(torch.empty(0, 16, requires_grad=True)).shape == (0, 16)
    for p in net.parameters():
        p.requires_grad_(False)
    assert not net(x.detach()).requires_grad
    assert "depth=4, momentum=0.9, gradient='reversible'" in repr(net)


@pytest.mark.parametrize("lossy", [hbnode.nn.SolveDropout(0.5), nn.Identity()], ids=["dropout", "none"])
def test_layers_without_parameters(lossy):
    net, x = MomentumResNet(nn.Sequential(nn.Tanh(), lossy), depth=40), torch.randn(8, 16, requires_grad=True)
    net(x).sum().backward()
    assert x.grad.abs().max() > 0
