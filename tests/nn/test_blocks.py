import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from tests.models import AGAIN, make_field

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
        hbnode.HeavyBallODEBlock(hbnode.nn.MLP(4, [16], 4), augment=2, method="rk4", steps=4),
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
        ({"gradient": AGAIN}, False),
        ({"gradient": AGAIN, "steps": 20}, True),
        ({"gradient": "adjoint"}, False),
        ({"gradient": "adjoint", "save": "interpolate"}, True),
        ({"gradient": "reversible", "steps": 3}, True),
        ({"method": "dopri5"}, False),
        ({"method": "dopri5", "gradient": "adjoint"}, False),
        ({"method": "rk4", "gradient": "adjoint", "steps": 3}, True),
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
        {"gradient": "checkpoint"},
        {"gradient": AGAIN, "steps": 20},
        {"gradient": "adjoint"},
        {"gradient": "reversible", "steps": 3},
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
        found, expected = module(*inputs), source(*inputs)
        pair = (found, expected) if isinstance(source, hbnode.ODEBlock) else (found[0], expected[0])
        torch.testing.assert_close(*pair, rtol=0, atol=0)


def test_steps_for_each_sample_under_vmap():
    x = torch.randn(4, 3, 2, dtype=torch.float64) * torch.tensor([0.1, 1.0, 5.0, 20.0]).view(-1, 1, 1)
    func = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    solver = {"method": "tsit5", "rtol": 1e-8, "atol": 1e-8, "per_sample": True}
    block = hbnode.HeavyBallODEBlock(func, gradient="direct", t_span=(0.0, 5.0), **solver).double()
    torch.testing.assert_close(
        torch.func.vmap(block)(x), torch.stack([block(part) for part in x]), rtol=1e-6, atol=1e-6
    )


def test_what_does_not_work_under_a_transform_says_so():
    x = torch.randn(4, 3, 2)
    for gradient in ("direct", "adjoint"):
        block = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), method="dopri5", gradient=gradient)
        for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
            with pytest.raises(ValueError, match=r"method='dopri5' does not work .*Fix: a native method"):
                transform(block)(x)


class Frame:
    """As much of a DataFrame as matters here."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values


@pytest.mark.parametrize(
    ("x", "fix"),
    [
        (np.ones((2, 3)), "torch.tensor(x, dtype=torch.float32)"),
        ([[1.0, 1.0, 1.0]], "torch.tensor(x, dtype=torch.float32)"),
        (Frame(np.ones((2, 3))), "torch.tensor(x.to_numpy(), dtype=torch.float32)"),
        ([torch.ones(3), torch.ones(3)], "torch.stack(x)"),
    ],
)
@pytest.mark.parametrize("make", [hbnode.NODE, hbnode.HBNODE, hbnode.SONODE, lambda f: hbnode.ANODE(f, 0)])
def test_what_is_no_tensor_is_refused_with_what_makes_it_one(x, fix, make):
    func = (lambda h, v: -h) if make is hbnode.SONODE else nn.Linear(3, 3)
    block = hbnode.ODEBlock(make(func))
    for refuses in (block, block.field.initial_state):
        with pytest.raises(TypeError, match=r"must be a tensor, got .*Fix: " + re.escape(fix)):
            refuses(x)
    assert block(eval(fix)).shape[-1] == 3  # the fix helps
    with pytest.raises(TypeError, match=r"the state must be a tensor or a tuple of tensors, got .*Fix: ") as error:
        hbnode.odeint(block.field, x, [0.0, 1.0])
    if "field.initial_state" in str(error.value):
        made = str(error.value).split("Fix: ")[1].rstrip(".").split(", or torch.cat")[0]
        hbnode.odeint(block.field, eval(made, {"torch": torch, "field": block.field, "y0": x}), [0.0, 1.0])


def test_all_constants_of_the_fields_are_arguments_of_the_block():
    func = nn.Linear(2, 2)
    assert hbnode.HeavyBallODEBlock(func, damping=1.5, max_damping=3.0).field.damping.item() == pytest.approx(1.5)
    block = hbnode.HeavyBallODEBlock(func, generalized=True, xi=0.3, learn_xi=False, activation=torch.sin)
    assert (block.field.xi, block.field.activation) == (0.3, torch.sin)
    with pytest.raises(ValueError, match=r"xi, activation belongs to .*Fix: generalized=True"):
        hbnode.HeavyBallODEBlock(func, xi=0.3, activation=torch.sin)
    with pytest.raises(ValueError, match=r"Fix: max_damping=3, for instance"):
        hbnode.HeavyBallODEBlock(func, damping=1.5)
    with pytest.raises(ValueError, match=r"Fix: damping=0.01, for instance"):
        hbnode.HeavyBallODEBlock(func, damping=0.0)


class Late(nn.Module):
    def forward(self, h, t):
        return h * t


@pytest.mark.parametrize(
    "make",
    [
        lambda: hbnode.HeavyBallODEBlock(lambda h, t: h),
        lambda: hbnode.HBNODE(Late(), time_dependent=True),
        lambda: hbnode.SONODE(lambda h, v, t: h),
        lambda: hbnode.odeint(lambda y, t: -y, torch.ones(2), [0.0, 1.0]),
    ],
)
def test_the_time_comes_first(make):
    with pytest.raises(TypeError, match=r"is called with the time first. Fix: let it take \(t, "):
        make()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("rk45", "method='dopri5'"),
        ("RK4", "method='rk4'"),
        ("Tsit5", "method='tsit5'"),
        ("nystrom", "method='nystrom8'"),
        ("heun", "method='heun2'"),
        ("LSODA", "method='scipy_solver' with options={'solver': 'LSODA'} and gradient='adjoint'"),
        ("zzz", "method=None"),
        (4, "method=None"),
    ],
)
def test_an_unknown_method_suggests_the_nearest(name, fix):
    with pytest.raises(ValueError, match=f"unknown method {name!r}.*Fix: {re.escape(fix)}"):
        hbnode.HeavyBallODEBlock(nn.Identity(), method=name)


@pytest.mark.parametrize(
    ("wrong", "fix", "right"),
    [
        ({"options": {"max_num_steps": 9}}, "max_steps=n", {"max_steps": 9}),
        ({"options": {"step_size": 0.1}}, "steps=n", {"steps": 9}),
        ({"options": {"steps": 9}}, "steps=n", {"steps": 9}),
        ({"options": {"land": True}}, "save='exact'", {"save": "exact"}),
        ({"options": {"dense": False}}, "save='interpolate' or save='exact'", {"save": "exact"}),
        ({"options": {"jump_t": [0.5]}}, "jump_times=[...]", {"jump_times": [0.5]}),
        ({"steps": 0}, "steps=8", {"steps": 8}),
        ({"steps": True}, "steps=8", {"steps": 8}),
        ({"steps": 2.0}, "steps=8", {"steps": 8}),
        ({"method": "leapfrog"}, "steps=n", {"method": "leapfrog", "steps": 9}),
        ({"per_sample": "sample"}, "per_sample=True", {"per_sample": True}),
        ({"per_sample": True, "method": "dopri5"}, "per_sample=False", {"per_sample": False, "method": "dopri5"}),
        ({"save": "land"}, "save='exact'", {"save": "exact"}),
        ({"save": "interpolation"}, "save='interpolate'", {"save": "interpolate"}),
        ({"save": 3}, "leave it out", {}),
        ({"save": "exact", "method": "rk4", "options": {"step_size": 0.3}}, "leave save out", {"method": "rk4"}),
        ({"jump_times": 0.5}, "jump_times=[0.5]", {"jump_times": [0.5]}),
        ({"jump_times": [float("nan")]}, "jump_times=[0.5]", {"jump_times": [0.5]}),
        ({"jump_times": [0.5], "steps": 9}, "leave steps out", {"jump_times": [0.5]}),
        ({"jump_times": [0.5], "method": "rk4"}, "method='dopri5'", {"jump_times": [0.5], "method": "dopri5"}),
        (
            {"jump_times": [0.5], "method": "dopri5", "options": {"jump_t": torch.tensor([0.5])}},
            "jump_times alone",
            {"jump_times": [0.5], "method": "dopri5"},
        ),
        (
            {"options": {"norm": max}},
            "method='dopri5'",
            {"method": "dopri5", "options": {"norm": lambda state: state[0].norm()}},
        ),
        ({"options": {"min_steps": 0.1}}, "options={'min_step': ...}", {"options": {"min_step": 1e-3}}),
        ({"options": 8}, "steps=8 for a grid, else options={'max_nfe': 1000}", {"options": {"max_nfe": 1000}}),
        (
            {"method": "leapfrog", "steps": 9, "options": {"max_step": 1.0}},
            "leave it out",
            {"method": "leapfrog", "steps": 9},
        ),
        (
            {"method": "dopri5", "steps": 9},
            "method='rk4'",
            {"method": "rk4", "steps": 9},
        ),
        ({"method": "rk4", "options": {"first_step": 0.1}}, "method='dopri5'", {"method": "dopri5"}),
        ({"method": "dopri5", "options": {"max_num_steps": 9}}, "max_steps=n", {"method": "dopri5", "max_steps": 9}),
        ({"method": "dopri5", "options": {"land": True}}, "save='exact'", {"method": "dopri5", "save": "exact"}),
        ({"method": "dopri5", "options": {"max_nfe": 99}}, "method=None", {"options": {"max_nfe": 99}}),
        ({"method": "rk4", "options": {"steps": 9}}, "steps=n", {"method": "rk4", "steps": 9}),
        (
            {"method": "rk4", "options": 8},
            "options={'step_size': 0.1}",
            {"method": "rk4", "options": {"step_size": 0.1}},
        ),
        (
            {"method": "tsit5", "gradient": "reversible"},
            "gradient='checkpoint', or method='leapfrog' with steps=n",
            {"method": "leapfrog", "gradient": "reversible", "steps": 9},
        ),
        (
            {"adjoint_options": {}},
            "leave them out, or method='dopri5' with gradient='adjoint'",
            {"method": "dopri5", "gradient": "adjoint", "adjoint_options": {}},
        ),
    ],
)
def test_the_fix_helps(wrong, fix, right):
    x = torch.ones(2, 2)
    with pytest.raises((ValueError, TypeError), match=re.escape(f"Fix: {fix}")) as error:
        hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **wrong)(x)
    assert str(error.value).endswith(".")
    assert hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **right)(x).shape == (2, 2)


def test_a_splitting_of_another_field_suggests_what_works():
    block = hbnode.ODEBlock(hbnode.NODE(nn.Linear(2, 2)), gradient="reversible", steps=2)
    with pytest.raises(ValueError, match=r"Fix: method='tsit5' with gradient='checkpoint'"):
        block(torch.ones(1, 2))
    block.method, block.gradient = "tsit5", "checkpoint"
    assert block(torch.ones(1, 2)).shape == (1, 2)


def test_settings_that_are_changed_count_in_the_next_call():
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), options={"max_step": 1.0}), torch.randn(3, 2)
    block(x)
    loose = block.nfe.steps
    block.options["max_step"] = 0.05  # in place
    block(x)
    assert block.nfe.steps >= 20 > loose
    block.options, block.method, block.steps = None, "nystrom4", 3
    block(x)
    assert block.nfe.steps == 3
    block.rtol = -1.0
    with pytest.raises(ValueError, match="rtol must be a positive number"):
        block(x)
    block.rtol, block.method, block.steps = 1e-3, "dopri5", None
    block.jump_times = [0.5]  # a list, as an argument may be
    assert torch.equal(block(x), copy.deepcopy(block)(x))
