import copy
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from tests import problems
from tests.models import every_model, make_field, make_input

TIGHT = {"rtol": 1e-10, "atol": 1e-10, "method": "dopri8", "save": "exact"}
A = np.array([[-1.0, 0.5, 0.0], [0.2, -2.0, 0.7], [-0.3, 0.1, 0.4]])


def test_sonode_sees_the_velocity():
    """A damped oscillator once more: here the damping is in f."""
    field = hbnode.SONODE(lambda h, v: -9.0 * h - 0.4 * v)
    state = (torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64))
    h, _ = hbnode.odeint(field, state, [0.0, 2.0], **TIGHT)
    assert h[-1].item() == pytest.approx(problems.damped_oscillator(3.0, 0.4, 1.0, 0.5, 2.0)[0], abs=1e-8)


def test_right_hand_sides_are_the_papers_equations():
    h, m, t = *torch.randn(2, 5, 3, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    f = hbnode.nn.MLP(3, [4], 3, time_dependent=True).double()
    torch.testing.assert_close(hbnode.NODE(f)(t, h), f(t, h))
    field = hbnode.HBNODE(f)
    dh, dm = field(t, (h, m))
    torch.testing.assert_close(dh, m)
    torch.testing.assert_close(dm, -field.damping * m + f(t, h))
    field = hbnode.GHBNODE(f)
    dh, dm = field(t, (h, m))
    torch.testing.assert_close(dh, torch.tanh(m))
    torch.testing.assert_close(dm, -field.damping * m + f(t, h) - field.xi * h)


def test_learned_constants_start_where_the_paper_starts_them():
    field = hbnode.GHBNODE(nn.Identity())
    assert field.omega.item() == pytest.approx(-3.0)
    assert field.damping.item() == pytest.approx(1 / (1 + math.exp(3)))
    assert field.chi.item() == pytest.approx(0.0, abs=1e-7)
    assert field.xi.item() == pytest.approx(math.log(2))
    field = hbnode.GHBNODE(nn.Identity(), damping=1.5, max_damping=2.0, xi=3.0)
    assert field.damping.item() == pytest.approx(1.5)
    assert field.xi.item() == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["omega", "chi"])
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_gradients_of_damping_and_xi_against_finite_differences(name, gradient):
    field = make_field("ghbnode").double()
    state, parameter = tuple(part.detach() for part in field.initial_state(make_input())), getattr(field, name)

    def loss(shift=0.0):
        with torch.no_grad():
            parameter.add_(shift)
        h, m = hbnode.odeint(field, state, [0.0, 2.0], rtol=1e-10, atol=1e-10, gradient=gradient)
        return (h[-1] ** 2).sum() + m[-1].sum()

    (slope,) = torch.autograd.grad(loss(), parameter)
    up, down = loss(1e-5), loss(-2e-5)
    assert slope.item() == pytest.approx(((up - down) / 2e-5).item(), rel=1e-5, abs=1e-7)


@every_model
def test_fields_run_in_plain_torchdiffeq(model):
    import torchdiffeq

    field = make_field(model).double()
    state = field.initial_state(make_input())
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for solver in (torchdiffeq.odeint, torchdiffeq.odeint_adjoint):
        solution = solver(field, state, t, rtol=1e-9, atol=1e-9)
        expected = hbnode.odeint(field, state, t, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(field.readout(solution), field.readout(expected), rtol=1e-6, atol=1e-7)


def test_initial_states():
    x = torch.randn(4, 3)
    torch.testing.assert_close(hbnode.ANODE(nn.Identity(), 2).initial_state(x), torch.cat([x, torch.zeros(4, 2)], 1))
    images = torch.randn(4, 3, 5, 5)
    assert hbnode.ANODE(nn.Identity(), 2).initial_state(images).shape == (4, 5, 5, 5)
    h, m = hbnode.HBNODE(nn.Identity()).initial_state(x)
    assert h is x
    assert not m.any()
    _, m = hbnode.HBNODE(nn.Identity(), initial_momentum=lambda x: 2 * x).initial_state(x)
    torch.testing.assert_close(m, 2 * x)


class Timed(nn.Module):
    def forward(self, t, h):
        return t * h


def timed(t: torch.Tensor, h: torch.Tensor, scale: float = 2.0):
    return t * h * scale


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("func", "takes_time"),
    [
        (lambda: lambda h, scale=1.0: h * scale, False),
        (lambda: nn.Sequential(nn.Linear(2, 2)), False),
        (Timed, True),
        (lambda: lambda t, h: h, True),
        (lambda: functools.partial(lambda a, t, h: h, 1), True),
        (lambda: nn.DataParallel(Timed()), True),
        (lambda: torch.compile(Timed(), backend="eager"), True),
        (lambda: torch.compile(timed, backend="eager"), True),
        (lambda: hbnode.nn.MLP(2, [3], 2, time_dependent=True), True),
        (lambda: hbnode.nn.MLP(2, [3], 2), False),
        (lambda: torch.jit.script(timed), True),
        (lambda: torch.jit.trace(Timed(), (torch.ones(()), torch.ones(2, 2))), True),
        (lambda: torch.jit.script(nn.Linear(2, 2)), False),
    ],
)
def test_whether_func_takes_the_time_is_read_off_it(func, takes_time):
    assert hbnode.NODE(func()).time_dependent == takes_time


def test_the_time_and_the_velocity_of_a_second_order_func():
    assert hbnode.SONODE(lambda t, h, v: h).time_dependent
    assert not hbnode.SONODE(lambda h, v: h).time_dependent
    assert hbnode.NODE(lambda *args: args[1], time_dependent=True).time_dependent


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: hbnode.HBNODE(nn.Identity(), damping=1.0), ValueError, "strictly between 0 and max_damping"),
        (lambda: constant_field(-0.1), ValueError, "must be a number >= 0"),
        (lambda: hbnode.HBNODE(nn.Identity(), max_damping=0.0), ValueError, "max_damping must be a positive number"),
        (lambda: hbnode.GHBNODE(nn.Identity(), xi=0.0), ValueError, "learned xi must start above 0"),
        (lambda: constant_field(0.1, xi=-1.0), ValueError, "xi must be a number >= 0"),
        (lambda: hbnode.ANODE(nn.Identity(), augment=-1), ValueError, "augment must be an integer >= 0"),
        (lambda: hbnode.ANODE(nn.Identity(), 1).initial_state(torch.zeros(3)), ValueError, "needs an input of shape"),
        (
            lambda: hbnode.HBNODE(nn.Identity(), initial_momentum=nn.Linear(2, 3)).initial_state(torch.zeros(4, 2)),
            ValueError,
            r"initial_momentum returned shape \(4, 3\); expected the shape of the input, \(4, 2\)",
        ),
        (lambda: hbnode.NODE(3), TypeError, "func must be callable, got int"),
        *(
            (lambda func=func: hbnode.NODE(func), TypeError, r"expected \(h\) or \(t, h\).*Fix: say which")
            for func in (lambda *args: args[0], lambda: 0, lambda t, h, v: h, torch.tanh)
        ),
    ],
)
def test_bad_arguments(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


class Damping(nn.Module):
    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self):
        return self.field.solver_damping()


@pytest.mark.parametrize(
    "cast", [lambda f: f.float().double(), lambda f: f.half().double(), lambda f: copy.deepcopy(f.float())]
)
def test_constants_are_not_rounded(cast):
    assert (cast(constant_field(0.9)).damping, cast(constant_field(0.9)).xi) == (0.9, 0.7)
    assert list(hbnode.HBNODE(nn.Identity(), learn_damping=False).parameters()) == []
    field = cast(constant_field([0.9, 0.1]))
    assert torch.equal(field.damping, EXACT)
    assert torch.equal(field.solver_damping(), EXACT)
    assert field.float()(torch.tensor(0.0), tuple(torch.randn(2, 3, 2)))[1].dtype == torch.float32
    assert torch.equal(field.to_empty(device="cpu").damping, EXACT)
    lent = torch.func.functional_call(Damping(field), {"field._damping_on_device": 2 * EXACT})
    assert torch.equal(lent, 2 * EXACT)
    field = field.to("meta")
    assert field.damping.device.type == "meta"
    assert torch.equal(field.solver_damping(), EXACT)  # read without a device


def constant_field(damping, xi=0.7, **options):
    return hbnode.GHBNODE(nn.Linear(2, 2), damping=damping, learn_damping=False, xi=xi, learn_xi=False, **options)


EXACT = torch.tensor([0.9, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("damping", [0.9, [0.9, 0.1]])
@pytest.mark.parametrize("cast", [lambda value: value, lambda value: value.half()], ids=["exact", "half"])
def test_constants_are_in_the_checkpoint(damping, cast):
    """One in half precision of the same constants rounds nothing."""
    saved = nn.Sequential(constant_field(damping).double())
    state = {name: cast(value) for name, value in saved.state_dict().items()}
    other = nn.Sequential(constant_field(damping))
    if state["0.damping"].dtype == torch.float64:
        other = nn.Sequential(constant_field(0.1 if damping == 0.9 else [0.2, 0.3], xi=0.2))
    other.load_state_dict(state)
    for field in (other[0], other.double()[0]):
        assert torch.equal(torch.as_tensor(field.damping), torch.as_tensor(saved[0].damping))
        assert field.xi == 0.7


def test_the_largest_damping_is_in_the_checkpoint():
    other = hbnode.HBNODE(nn.Linear(2, 2))
    other.load_state_dict(hbnode.HBNODE(nn.Linear(2, 2), damping=1.5, max_damping=2.0).state_dict())
    assert other.damping.item() == pytest.approx(1.5)


def test_a_checkpoint_without_constants():
    """Those of the first version had none (for channels: rounded ones, by another name)."""
    old = {name: p.detach() for name, p in constant_field(0.5).named_parameters()}
    field = constant_field(0.9)
    with pytest.warns(UserWarning, match=r"does not hold the constant '(damping|xi)'.*keeps its own, 0\.[97]\. Fix: "):
        field.load_state_dict(old)
    assert field.damping == 0.9
    field, own = constant_field([0.9, 0.1]), [0.5, 0.1]
    with pytest.warns(UserWarning, match="'xi'"):
        field.load_state_dict({**old, "_dampings": torch.tensor(own)})
    assert field.damping.tolist() == torch.tensor(own).double().tolist()
    learned = hbnode.HBNODE(nn.Linear(2, 2))
    learned.load_state_dict(dict(learned.named_parameters()))  # max_damping was 1 then, as it is: no word of it


def test_checkpoints_of_other_constants_are_refused():
    state = constant_field([0.9, 0.1]).state_dict()
    with pytest.raises(RuntimeError, match=r"the constant 'damping' has shape \(2,\) in the state_dict and \(\) here"):
        constant_field(0.9).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"damping"'):
        hbnode.HBNODE(nn.Linear(2, 2)).load_state_dict(state)
    del state["xi"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"xi"'):
        constant_field([0.9, 0.1]).load_state_dict(state)
    assert constant_field([0.9, 0.1]).load_state_dict(state, strict=False).missing_keys == ["xi"]


@pytest.mark.parametrize(
    ("gamma", "xi"), [(0.0, None), (0.3, None), (2.0, None), (0.1, 0.7), (0.0, 0.0), (0.5, 2.0)], ids=str
)
def test_a_linear_f_is_a_matrix_exponential(gamma, xi):
    """Of an HBNODE, and of a GHBNODE with the identity for σ."""
    state = np.random.default_rng(0).normal(size=(4, 6))
    constants = {"damping": gamma, "learn_damping": False}
    if xi is None:
        field = hbnode.HBNODE(problems.linear_func(A), **constants)
    else:
        field = problems.identity_ghbnode(problems.linear_func(A), **constants, xi=xi, learn_xi=False)
    exact = problems.linear_exact(problems.block_matrix(A, gamma, xi or 0.0), state, 1.7)
    end = hbnode.odeint(field, tuple(torch.tensor(state).split(3, 1)), [0.0, 1.7], **TIGHT)
    np.testing.assert_allclose(torch.cat([part[-1] for part in end], 1).detach(), exact, rtol=0, atol=1e-8)
