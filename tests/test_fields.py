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


def solve_pair(field, h0, m0, t):
    h, m = hbnode.odeint(field, (torch.as_tensor(h0), torch.as_tensor(m0)), [0.0, t], **TIGHT)
    return np.concatenate([h[-1].detach().numpy(), m[-1].detach().numpy()], axis=-1)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 2.0])
def test_hbnode_with_a_linear_f_is_a_matrix_exponential(gamma):
    rng = np.random.default_rng(0)
    h0, m0 = rng.normal(size=(2, 4, 3))
    field = hbnode.HBNODE(problems.linear_func(A), damping=gamma, learn_damping=False)
    exact = problems.linear_exact(problems.block_matrix(A, gamma), np.concatenate([h0, m0], axis=-1), 1.7)
    np.testing.assert_allclose(solve_pair(field, h0, m0, 1.7), exact, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("gamma", "xi"), [(0.1, 0.7), (0.0, 0.0), (0.5, 2.0)])
def test_ghbnode_with_the_identity_for_sigma_is_a_matrix_exponential(gamma, xi):
    rng = np.random.default_rng(1)
    h0, m0 = rng.normal(size=(2, 4, 3))
    constants = {"damping": gamma, "learn_damping": False, "xi": xi, "learn_xi": False}
    field = problems.identity_ghbnode(problems.linear_func(A), **constants)
    exact = problems.linear_exact(problems.block_matrix(A, gamma, xi), np.concatenate([h0, m0], axis=-1), 1.7)
    np.testing.assert_allclose(solve_pair(field, h0, m0, 1.7), exact, rtol=0, atol=1e-8)


def test_damped_oscillator():
    field = hbnode.HBNODE(lambda h: -9.0 * h, damping=0.4, learn_damping=False)
    state = (torch.tensor([1.0, -0.5], dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64))
    t = torch.linspace(0, 5, 11, dtype=torch.float64)
    h, m = hbnode.odeint(field, state, t, **TIGHT)
    exact_h, exact_m = problems.damped_oscillator(3.0, 0.4, state[0].numpy(), state[1].numpy(), t.numpy()[:, None])
    np.testing.assert_allclose(h.numpy(), exact_h, atol=1e-8)
    np.testing.assert_allclose(m.numpy(), exact_m, atol=1e-8)


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


def test_fixed_constants_are_not_rounded_to_float32():
    field = hbnode.GHBNODE(nn.Identity(), damping=0.9, learn_damping=False, xi=0.7, learn_xi=False).float().double()
    assert field.damping == 0.9
    assert field.xi == 0.7
    assert list(field.parameters()) == []


@pytest.mark.parametrize("name", ["omega", "chi"])
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_gradients_of_damping_and_xi_against_finite_differences(name, gradient):
    field = make_field("ghbnode").double()
    state = field.initial_state(make_input())
    state = tuple(part.detach() for part in state)
    parameter = getattr(field, name)

    def loss():
        h, m = hbnode.odeint(field, state, [0.0, 2.0], **TIGHT, gradient=gradient)
        return (h[-1] ** 2).sum() + m[-1].sum()

    (slope,) = torch.autograd.grad(loss(), parameter)
    with torch.no_grad():
        eps, value = 1e-5, parameter.clone()
        parameter.copy_(value + eps)
        up = loss()
        parameter.copy_(value - eps)
        down = loss()
    assert slope.item() == pytest.approx(((up - down) / (2 * eps)).item(), rel=1e-5, abs=1e-7)


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


class Positional(nn.Module):
    def forward(self, h, scale=1.0):
        return h * scale


class Timed(nn.Module):
    def forward(self, t, h):
        return t * h


def test_whether_func_takes_the_time_is_read_off_it():
    assert not hbnode.NODE(Positional()).time_dependent
    assert not hbnode.NODE(nn.Linear(2, 2)).time_dependent
    assert not hbnode.NODE(nn.Sequential(nn.Linear(2, 2))).time_dependent
    assert hbnode.NODE(Timed()).time_dependent
    assert hbnode.NODE(lambda t, h: h).time_dependent
    assert hbnode.NODE(functools.partial(lambda a, t, h: h, 1)).time_dependent
    assert hbnode.NODE(nn.DataParallel(Timed())).time_dependent
    assert hbnode.NODE(torch.compile(Timed(), backend="eager")).time_dependent
    assert hbnode.NODE(torch.compile(lambda t, h: t * h, backend="eager")).time_dependent
    assert hbnode.SONODE(lambda t, h, v: h).time_dependent
    assert not hbnode.SONODE(lambda h, v: h).time_dependent
    assert hbnode.NODE(hbnode.nn.MLP(2, [3], 2, time_dependent=True)).time_dependent
    assert not hbnode.NODE(hbnode.nn.MLP(2, [3], 2)).time_dependent
    assert hbnode.NODE(lambda *args: args[1], time_dependent=True).time_dependent


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_whether_a_func_of_torchscript_takes_the_time():
    def timed(t: torch.Tensor, h: torch.Tensor, scale: float = 2.0):
        return t * h * scale

    assert hbnode.NODE(torch.jit.script(timed)).time_dependent
    assert hbnode.NODE(torch.jit.trace(Timed(), (torch.ones(()), torch.ones(2, 2)))).time_dependent
    assert not hbnode.NODE(torch.jit.script(nn.Linear(2, 2))).time_dependent


@pytest.mark.parametrize("func", [lambda *args: args[0], lambda: 0, lambda t, h, v: h, torch.tanh])
def test_a_func_whose_signature_does_not_tell_is_refused(func):
    with pytest.raises(TypeError, match=r"expected \(h\) or \(t, h\).*Fix: say which with time_dependent"):
        hbnode.NODE(func)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hbnode.HBNODE(nn.Identity(), damping=1.0), "strictly between 0 and max_damping"),
        (lambda: hbnode.HBNODE(nn.Identity(), damping=-0.1, learn_damping=False), "must be a number >= 0"),
        (lambda: hbnode.HBNODE(nn.Identity(), max_damping=0.0), "max_damping must be a positive number"),
        (lambda: hbnode.GHBNODE(nn.Identity(), xi=0.0), "learned xi must start above 0"),
        (lambda: hbnode.GHBNODE(nn.Identity(), xi=-1.0, learn_xi=False), "xi must be a number >= 0"),
        (lambda: hbnode.ANODE(nn.Identity(), augment=-1), "augment must be an integer >= 0"),
        (lambda: hbnode.ANODE(nn.Identity(), 1).initial_state(torch.zeros(3)), "needs an input of shape"),
        (
            lambda: hbnode.HBNODE(nn.Identity(), initial_momentum=nn.Linear(2, 3)).initial_state(torch.zeros(4, 2)),
            r"initial_momentum returned shape \(4, 3\); expected the shape of the input, \(4, 2\)",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_func_that_is_no_function():
    with pytest.raises(TypeError, match="func must be callable, got int"):
        hbnode.NODE(3)


def constant_field(damping, xi=0.7, **options):
    return hbnode.GHBNODE(nn.Linear(2, 2), damping=damping, learn_damping=False, xi=xi, learn_xi=False, **options)


EXACT = torch.tensor([0.9, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    "cast", [lambda f: f.double(), lambda f: f.half().double(), lambda f: copy.deepcopy(f.float())]
)
def test_constants_of_channels_are_not_rounded_either(cast):
    field = cast(constant_field([0.9, 0.1]))
    assert torch.equal(field.damping, EXACT)
    assert torch.equal(field.solver_damping(), EXACT)
    h, m = torch.randn(2, 3, 2)
    assert field.float()(torch.tensor(0.0), (h, m))[1].dtype == torch.float32
    assert torch.equal(field.to_empty(device="cpu").damping, EXACT)


def test_constants_of_channels_move_with_the_field():
    field = constant_field([0.9, 0.1]).to("meta")
    assert field.damping.device.type == "meta"
    assert torch.equal(field.solver_damping(), EXACT)  # read without a device
    lent = {"_damping_there": 2 * EXACT}
    field = constant_field([0.9, 0.1])
    seen = torch.func.functional_call(
        Calling(field, lambda field: field.solver_damping()), {f"field.{k}": v for k, v in lent.items()}
    )
    assert torch.equal(seen, 2 * EXACT)


class Calling(nn.Module):
    def __init__(self, field, call):
        super().__init__()
        self.field, self.call = field, call

    def forward(self):
        return self.call(self.field)


@pytest.mark.parametrize("damping", [0.9, [0.9, 0.1]])
def test_constants_are_in_the_checkpoint(damping, tmp_path):
    saved = nn.Sequential(constant_field(damping).double())
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    other = nn.Sequential(constant_field(0.1 if damping == 0.9 else [0.2, 0.3], xi=0.2))
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(torch.as_tensor(other[0].damping), torch.as_tensor(saved[0].damping))
    assert other[0].xi == 0.7
    assert torch.equal(torch.as_tensor(other.double()[0].damping), torch.as_tensor(saved[0].damping))
    other = hbnode.HBNODE(nn.Linear(2, 2))
    other.load_state_dict(hbnode.HBNODE(nn.Linear(2, 2), damping=1.5, max_damping=2.0).state_dict())
    assert other.damping.item() == pytest.approx(1.5)


def test_a_cast_checkpoint_of_the_same_constants_rounds_nothing():
    field = constant_field([0.9, 0.1])
    field.load_state_dict({name: value.half() for name, value in field.state_dict().items()})
    assert torch.equal(field.damping, EXACT)
    assert field.xi == 0.7


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
