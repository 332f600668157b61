import pytest
import torch
from torch import nn

import hbnode
from tests.models import make_field

ONE = torch.tensor(1.0)


def test_heavy_ball_block_is_hbnode_or_ghbnode():
    assert isinstance(hbnode.HeavyBallODEBlock(nn.Linear(2, 2)).field, hbnode.HBNODE)
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), generalized=True, damping=0.3, t_span=(0, 2), rtol=1e-3)
    assert isinstance(block.field, hbnode.GHBNODE)
    assert block.field.damping.item() == pytest.approx(0.3)
    assert (block.t_span, block.rtol, block.atol) == ((0.0, 2.0), 1e-3, 1e-5)
    assert hbnode.HeavyBallODEBlock(nn.Identity(), damping=0.0, learn_damping=False).field.damping == 0.0
    assert hbnode.HeavyBallODEBlock(lambda *args: args[1], time_dependent=True)(torch.ones(1, 1)).shape == (1, 1)


def test_block_equals_odeint():
    field = make_field("hbnode").double()
    x = torch.randn(3, 4, dtype=torch.float64)
    h, _ = hbnode.odeint(field, field.initial_state(x), [0.0, 1.0])
    torch.testing.assert_close(hbnode.ODEBlock(field)(x), h[-1], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 3), (2, 4, 5)])
def test_augmentation(shape):
    block = hbnode.HeavyBallODEBlock(nn.Identity(), augment=2)
    out = block(torch.randn(*shape))
    assert out.shape == (shape[0], 6, *shape[2:])
    assert not out[:, 4:].any()  # h'' = h leaves the zeros where they are
    assert "augment=2" in repr(block)


def test_initial_momentum_sees_the_augmented_state():
    block = hbnode.HeavyBallODEBlock(nn.Linear(5, 5), augment=1, initial_momentum=nn.Linear(5, 5))
    block(torch.randn(3, 4)).sum().backward()
    assert block.field.initial_momentum.weight.grad.any()


def test_an_initial_state_module_replaces_the_fields_own():
    class Start(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 6)

        def forward(self, x):
            h, m = self.layer(x).chunk(2, dim=-1)
            return h, m

    block = hbnode.ODEBlock(hbnode.HBNODE(nn.Linear(3, 3)), initial_state=Start())
    out = block(torch.randn(5, 2))
    out.sum().backward()
    assert out.shape == (5, 3)
    assert block.initial_state.layer.weight.grad.any()


def test_span_and_direction():
    block = hbnode.ODEBlock(hbnode.NODE(lambda h: h), t_span=(1.0, 0.0), rtol=1e-8, atol=1e-8)
    out = block(torch.ones(1, 1, dtype=torch.float64))
    assert out.item() == pytest.approx(torch.tensor(-1.0).exp().item(), abs=1e-6)


def test_blocks_learn_in_a_sequential():
    torch.manual_seed(0)
    x = torch.randn(64, 2)
    y = (x.norm(dim=1) > 1).long()
    model = nn.Sequential(
        hbnode.HeavyBallODEBlock(hbnode.nets.MLP(4, [16], 4), augment=2, method="rk4", options={"steps": 4}),
        nn.Linear(4, 2),
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert (model(x).argmax(1) == y).float().mean() > 0.95


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: hbnode.ODEBlock(nn.Linear(2, 2)), TypeError, "expected a field, got Linear. Fix: wrap the network"),
        (lambda: hbnode.ODEBlock(make_field("node"), t_span=(0.0, 0.0)), ValueError, "two different times"),
        (lambda: hbnode.ODEBlock(make_field("node"), t_span=(0.0, 1.0, 2.0)), ValueError, "two different times"),
        (lambda: hbnode.ODEBlock(make_field("node"), t_span=1.0), TypeError, "t_span must be two numbers"),
        (lambda: hbnode.ODEBlock(make_field("node"), t_span=(0.0, ONE)), TypeError, "learned times go to block"),
        (lambda: hbnode.ODEBlock(make_field("node"), rtol=0.0), ValueError, "rtol must be a positive number"),
        (lambda: hbnode.ODEBlock(make_field("node"), method="rk5"), ValueError, "unknown method 'rk5'"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Identity(), gradient="magic"), ValueError, "unknown gradient 'magic'"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Identity(), augment=0.5), ValueError, "augment must be an integer"),
        (
            lambda: hbnode.HeavyBallODEBlock(nn.Identity(), augment=1, initial_state=nn.Identity()),
            ValueError,
            "augment and initial_state were both given",
        ),
        (
            lambda: hbnode.ODEBlock(hbnode.HBNODE(nn.Identity()), initial_state=nn.Identity())(torch.zeros(2, 3)),
            TypeError,
            "HBNODE is solved on a pair of tensors, got shape",
        ),
        (lambda: hbnode.HeavyBallODEBlock(nn.Identity(), tolerance=1e-3), TypeError, "unexpected keyword"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Linear(3, 3))(torch.zeros(2, 4)), RuntimeError, "shapes cannot be"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Linear(3, 4))(torch.zeros(2, 3)), ValueError, "func returned shape"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Linear(3, 3))(torch.zeros(2, 3).long()), TypeError, "x.float"),
        (
            lambda: hbnode.HeavyBallODEBlock(nn.Linear(3, 3))(torch.zeros(2, 3).double()),
            TypeError,
            "expected one dtype",
        ),
    ],
)
def test_bad_input(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("solver", "generalized"),
    [
        ({"gradient": "direct"}, False),
        ({"gradient": "checkpoint"}, False),
        ({"gradient": "checkpoint", "options": {"steps": 20}}, True),
        ({"gradient": "adjoint"}, False),
        ({"gradient": "adjoint", "options": {"dense": True}}, True),
        ({"gradient": "reversible", "options": {"steps": 3}}, True),
        ({"method": "dopri5"}, False),
        ({"method": "dopri5", "gradient": "adjoint"}, False),
        ({"method": "rk4", "gradient": "adjoint", "options": {"steps": 3}}, True),
    ],
)
def test_an_output_may_be_changed_in_place(solver, generalized):
    """As ``nn.ReLU(inplace=True)`` behind the block does; no backward pass needs what the caller has."""
    block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), generalized=generalized, **solver).double()
    x = torch.randn(3, 2, dtype=torch.float64)
    for times in (None, [0.0, 0.5, 1.0]):
        found = []
        for change in (lambda y: y.relu_(), lambda y: y.relu(), lambda y: y.mul_(2.0), lambda y: y.mul(2.0)):
            loss = change(block(x, times)).square().sum()
            found.append(torch.autograd.grad(loss, list(block.parameters())))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        torch.testing.assert_close(found[2], found[3], rtol=0, atol=0)


class Forced(nn.Module):
    """A func as torch.jit.script takes it, with a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, t: torch.Tensor, h: torch.Tensor):
        return self.layer(h).tanh() * self.scale * (1 + t)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "solver",
    [
        {"gradient": "direct"},
        {"gradient": "checkpoint", "options": {"steps": 20}},
        {"gradient": "adjoint"},
        {"gradient": "reversible", "options": {"steps": 3}},
        {"method": "dopri5"},
        {"method": "dopri5", "gradient": "adjoint"},
    ],
)
@pytest.mark.parametrize("compile", [torch.jit.script, lambda func: torch.jit.trace(func, (ONE, torch.ones(3, 2)))])
def test_a_func_of_torchscript(solver, compile):
    func, x = Forced(), torch.randn(3, 2)
    scripted = compile(func)  # shares its parameters
    plain, block = (hbnode.HeavyBallODEBlock(f, damping=0.1, **solver) for f in (func, scripted))
    block.field.omega = plain.field.omega
    found, expected = (torch.autograd.grad(b(x).square().sum(), list(func.parameters())) for b in (block, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hbnode.HeavyBallODEBlock(nn.Linear(2, 2)),
        lambda: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), damping=[0.1, 0.2], generalized=True),
        lambda: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), damping=[0.1, 0.2], learn_damping=False),
        lambda: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), damping=0.3, learn_damping=False),
        lambda: hbnode.ODERNN(2, 3),
        lambda: hbnode.ODERNN(2, 3, field="ghbnode"),
    ],
)
def test_constructed_on_the_meta_device(make):
    source = make()
    inputs = (torch.randn(1, 2),) if isinstance(source, hbnode.ODEBlock) else (torch.randn(1, 3, 2), torch.arange(3.0))
    with torch.device("meta"):
        assigned, filled = make(), make()
    assert all(p.is_meta for p in assigned.parameters())
    assert repr(assigned)
    assigned.load_state_dict(source.state_dict(), assign=True)
    filled.to_empty(device="cpu").load_state_dict(source.state_dict())
    for module in (assigned, filled):
        torch.testing.assert_close(module(*inputs), source(*inputs), rtol=0, atol=0)


def test_what_does_not_work_under_a_transform_says_so():
    x = torch.randn(4, 3, 2)
    sample = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), gradient="direct", step_control="sample")
    with pytest.raises(ValueError, match=r"step_control='sample' does not work .*Fix: step_control='batch'"):
        torch.func.vmap(sample)(x)
    for gradient in ("direct", "adjoint"):
        block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), method="dopri5", gradient=gradient)
        for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
            with pytest.raises(ValueError, match=r"method='dopri5' does not work .*Fix: a native method"):
                transform(block)(x)
