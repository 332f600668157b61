import copy
import functools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special
from torch import nn

import hbnode
from tests import problems
from tests.models import every_field, make_field, make_input, slow

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


@every_field
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


NORMAL = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)


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


class Plain(nn.Module):
    def forward(self, h):
        return -0.5 * h


HOLDERS = {  # every constructor that takes f, and a solve
    "HBNODE": lambda f: hbnode.ODEBlock(hbnode.HBNODE(f))(torch.ones(2, 2)),
    "NODE": lambda f: hbnode.ODEBlock(hbnode.NODE(f))(torch.ones(2, 2)),
    "ANODE": lambda f: hbnode.ODEBlock(hbnode.ANODE(f, 1))(torch.ones(2, 2)),
    "NesterovNODE": lambda f: hbnode.ODEBlock(hbnode.NesterovNODE(f))(torch.ones(2, 2)),
    "AdamNODE": lambda f: hbnode.ODEBlock(hbnode.AdamNODE(f))(torch.ones(2, 2)),
    "per sample": lambda f: hbnode.HeavyBallODEBlock(f, per_sample=True)(torch.ones(2, 2)),
    "adjoint": lambda f: hbnode.HeavyBallODEBlock(f, generalized=True, gradient="adjoint")(torch.ones(2, 2)),
    "HeavyBallSDE": lambda f: hbnode.sdeint(
        hbnode.HeavyBallSDE(f), (torch.ones(2, 2), torch.ones(2, 2)), [0.0, 1.0], dt=0.5, seed=0
    )[0],
    "HeavyBallFlow": lambda f: hbnode.distributions.HeavyBallFlow(f, 2).log_prob(torch.ones(2, 2), torch.ones(2, 2)),
    "HeavyBallAnnealing": lambda f: hbnode.distributions.HeavyBallAnnealing(
        NORMAL.log_prob, NORMAL, 2, force=f
    ).log_z(2, seed=0),
    "ODERNN": lambda f: seeded(hbnode.ODERNN, 2, 2, field=hbnode.HBNODE(f))(torch.ones(2, 3, 2), [0.0, 0.5, 1.0])[0],
    "ODERNN, a function": lambda f: seeded(hbnode.ODERNN, 2, 2, field=lambda n: hbnode.NODE(f))(
        torch.ones(2, 3, 2), [0.0, 0.5, 1.0]
    )[0],
    "LatentODE": lambda f: seeded(hbnode.nn.LatentODE, 2, 2, 3, field=hbnode.HBNODE(f)).elbo(
        torch.ones(2, 3, 2), [0.0, 0.5, 1.0]
    ).value,
    "LatentSDE": lambda f: seeded(hbnode.nn.LatentSDE, 2, 2, 3, sde=hbnode.HeavyBallSDE(f)).elbo(
        torch.ones(2, 3, 2), [0.0, 0.5, 1.0]
    ).value,
    "spectrum": lambda f: hbnode.diagnostics.spectrum(hbnode.HeavyBallODEBlock(f), torch.ones(2, 2)).eigenvalues,
    "adjoint_norms": lambda f: hbnode.diagnostics.adjoint_norms(hbnode.HeavyBallODEBlock(f), torch.ones(2, 2)).total,
}  # fmt: skip


def seeded(make, *arguments, **options):
    torch.manual_seed(0)
    return make(*arguments, **options)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", [*(name for name in HOLDERS if name != "adjoint_norms"), *slow("adjoint_norms")])
def test_any_function_of_a_user_is_solved_as_the_same_lambda(name):
    expected = HOLDERS[name](lambda h: -0.5 * h)
    same = [
        *(lambda t, h: -0.5 * h, Plain(), Plain().forward, nn.Sequential(Plain())),
        functools.partial(lambda t, h, scale: scale * h, scale=-0.5),
        *(nn.DataParallel(Plain()), torch.jit.script(Plain())),
    ]
    for func in same:
        torch.testing.assert_close(HOLDERS[name](func), expected, rtol=1e-4, atol=1e-5)


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


def test_constants_of_channels_move_to_a_device_without_float64():
    def move(x):
        if x.dtype == torch.float64:
            raise TypeError("the device has no float64")
        return x.to("meta")

    field = constant_field([0.9, 0.1])._apply(move)
    assert field.damping.is_meta
    assert field.state_dict()["damping"].tolist() == [0.9, 0.1]


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


def test_the_largest_damping_can_be_set():
    learned, constant = hbnode.HBNODE(nn.Identity(), damping=0.5), constant_field(0.5)
    learned.max_damping = constant.max_damping = 2.0
    assert learned.damping.item() == pytest.approx(1.0)
    assert constant.damping == 0.5


def test_checkpoints_of_other_constants_are_refused():
    state = constant_field([0.9, 0.1]).state_dict()
    with pytest.raises(RuntimeError, match=r"the constant 'damping' has shape \(2,\) in the state_dict and \(\) here"):
        constant_field(0.9).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"damping"'):
        hbnode.HBNODE(nn.Linear(2, 2)).load_state_dict(state)
    del state["xi"]
    for given in (state, dict(state)):  # the second has no metadata, as what safetensors reads
        with pytest.raises(RuntimeError, match=r'Missing key.*"xi"'):
            constant_field([0.9, 0.1]).load_state_dict(given)
    assert constant_field([0.9, 0.1]).load_state_dict(state, strict=False).missing_keys == ["xi"]


GRADIENTS = [
    *({"gradient": "direct"}, {"gradient": "checkpoint"}, {"gradient": "checkpoint", "per_sample": True}),
    *({"gradient": "reversible", "steps": 60}, {"method": "tsit5"}, {"method": "dopri5"}),
]


@pytest.mark.parametrize("settings", GRADIENTS, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 1), (2,)], ids=["one", "per sample", "per feature"])
def test_a_constant_damping_keeps_its_gradient(settings, shape):
    """Of the spring h'' + γh' + 4h = 0 from rest, with γ computed by another network."""
    other, x = torch.randn(shape, dtype=torch.float64, requires_grad=True), make_input()[:, :2]
    gamma = torch.sigmoid(other)
    block = hbnode.HeavyBallODEBlock(
        lambda h: -4 * h, damping=gamma, learn_damping=False, rtol=1e-10, atol=1e-10, **settings
    )
    (found,) = torch.autograd.grad(block(x).sin().sum(), other)
    gamma = torch.sigmoid(other)
    w = (4 - gamma**2 / 4).sqrt()
    h = torch.exp(-gamma / 2) * x * (w.cos() + gamma / (2 * w) * w.sin())
    torch.testing.assert_close(found, torch.autograd.grad(h.sin().sum(), other)[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"method": "tsit5"}, {"method": "dopri5"}], ids=str)
def test_a_constant_parameter_stays_that_of_its_owner(settings):
    """It is seen after it has changed, has a gradient in the adjoint too, and is in no checkpoint of the field."""
    gamma, x = nn.Parameter(torch.tensor(0.3, dtype=torch.float64)), make_input()[:, :2]

    def block(damping, gradient):
        kwargs = {"rtol": 1e-10, "atol": 1e-10, "gradient": gradient} | settings
        return hbnode.HeavyBallODEBlock(lambda h: -4 * h, damping=damping, learn_damping=False, **kwargs)

    shared = block(gamma, "adjoint")
    assert not [*shared.parameters(), *shared.state_dict()]
    with torch.no_grad():
        gamma.add_(0.2)
    torch.testing.assert_close(shared(x), block(0.5, "direct")(x))
    (found,) = torch.autograd.grad(shared(x).sum(), gamma)
    (expected,) = torch.autograd.grad(block(gamma, "direct")(x).sum(), gamma)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert copy.deepcopy(shared).double().field.damping == 0.5


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "reversible"])
@pytest.mark.parametrize("name", ["damping", "temperature"])
def test_constants_of_an_sde_keep_their_gradients(name, gradient):
    def end(value):
        constants = {"damping": 0.5, "temperature": 0.5} | {name: value}
        sde = hbnode.HeavyBallSDE(lambda h: -h.sin(), learn_damping=False, **constants)
        start = sde.initial_state(torch.ones(2, 2, dtype=torch.float64))
        return hbnode.sdeint(sde, start, [0.0, 1.0], dt=0.2, seed=0, gradient=gradient)[0][-1].sum()

    value, step = torch.tensor(0.7, dtype=torch.float64), 1e-5
    (found,) = torch.autograd.grad(end(leaf := value.clone().requires_grad_()), leaf)
    assert found.item() == pytest.approx((end(value + step) - end(value - step)).item() / (2 * step), rel=1e-7)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda **x: hbnode.HBNODE(nn.Identity(), **x), "damping max_damping"),
        (lambda **x: hbnode.GHBNODE(nn.Identity(), **x), "damping xi"),
        (lambda **x: hbnode.NesterovNODE(nn.Identity(), **x), "start"),
        (lambda **x: hbnode.AdamNODE(nn.Identity(), learn_rates=False, **x), "rates eps"),
        (lambda **x: hbnode.HeavyBallSDE(nn.Identity(), learn_temperature=True, **x), "damping temperature"),
        (lambda **x: hbnode.HeavyBallODEBlock(nn.Identity(), **x), "damping max_damping jump_times"),
        (lambda **x: hbnode.distributions.HeavyBallFlow(nn.Identity(), 2, **x), "damping"),
        (
            lambda **x: hbnode.distributions.HeavyBallAnnealing(NORMAL.log_prob, NORMAL, 1, **x),
            "step_size damping schedule",
        ),
        (lambda **x: hbnode.ODERNN(1, 2, **x), "time_unit"),
        (lambda **x: hbnode.nn.MomentumAttention(4, 2, **x), "momentum step_size eps"),
        (lambda **x: hbnode.nn.MomentumLSTM(1, 2, **x), "forget_bias"),
        (lambda **x: hbnode.nn.Oscillators(1, 1, 1, **x), "frequency decay"),
        (lambda **x: hbnode.nn.SolveDropout(**x), "p"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused(make, names):
    for name in names.split():
        several = name in ("rates", "frequency", "decay", "schedule")
        value = torch.tensor([0.0, 1.0] if several else 0.5, requires_grad=True)
        with pytest.raises(ValueError, match=rf"{name} requires a gradient.*Fix: {name}={name}.detach\(\)"):
            make(**{name: value})
        if not several and name != "jump_times":
            make(**{name: value.detach()})


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


# After HBNODE


def end_of(field, state, t, **settings):
    """The last state, (parts, ...), in float64 and at a tight tolerance."""
    state = tuple(torch.as_tensor(part, dtype=torch.float64).reshape(1, -1) for part in state)
    solution = hbnode.odeint(field, state, t, **(TIGHT | settings))
    return torch.stack([part[-1, 0] for part in solution]).detach().numpy()


def test_nesterovnode_of_a_spring_is_a_bessel_function():
    """h'' + 3/t h' = -ω² h: h = (A J1(ωt) + B Y1(ωt)) / t. At rest at t = 0 it is 2 J1(ωt) / (ωt)."""
    omega, field = 2.5, hbnode.NesterovNODE(lambda h: -(2.5**2) * h, start=0.0)
    h, _ = end_of(field, ([1.0], [0.0]), [0.0, 4.0])
    assert h[0] == pytest.approx(2 * special.jv(1, omega * 4) / (omega * 4), abs=1e-8)
    basis = lambda t: np.array([special.jv(1, omega * t), special.yv(1, omega * t)]) / t
    slopes = lambda t: omega * -np.array([special.jv(2, omega * t), special.yv(2, omega * t)]) / t
    weights = np.linalg.solve([basis(1.0), slopes(1.0)], [0.3, -0.8])
    exact = np.array([[weights @ basis(3.0)], [weights @ slopes(3.0)]])
    np.testing.assert_allclose(end_of(field, ([0.3], [-0.8]), [1.0, 3.0]), exact, rtol=0, atol=1e-8)
    field.start = 1.0  # the same, with the time counted from 1
    np.testing.assert_allclose(end_of(field, ([0.3], [-0.8]), [0.0, 2.0]), exact, rtol=0, atol=1e-8)


def test_nesterovnode_is_the_papers_first_order_system():
    """x' = p, p' = -p + f(h, t) / k - (1/4 - 3 / 4t²) x with h = kx and k = t^(-3/2) e^(t/2), by scipy."""
    f = lambda t, h: math.sin(3 * h) + t - h
    k = lambda t: t**-1.5 * math.exp(t / 2)
    slope = lambda t: k(t) * (0.5 - 1.5 / t)

    def system(t, y):
        x, p = y
        return p, -p + f(t, k(t) * x) / k(t) - (1 / 4 - 3 / (4 * t * t)) * x

    h0, m0, x0 = 0.7, -0.4, 0.7 / k(1)
    start = [x0, (m0 - slope(1) * x0) / k(1)]
    x, p = integrate.solve_ivp(system, (1, 3), start, rtol=1e-12, atol=1e-12, method="DOP853").y[:, -1]
    field = hbnode.NesterovNODE(lambda t, h: torch.sin(3 * h) + t - h, start=0.0)
    found = end_of(field, ([h0], [m0]), [1.0, 3.0])
    np.testing.assert_allclose(found[:, 0], [k(3) * x, k(3) * p + slope(3) * x], rtol=1e-8)


def test_nesterovnode_begins_at_rest_where_its_damping_is_infinite():
    field = hbnode.NesterovNODE(lambda h: -h, start=0.0)
    assert field(torch.tensor(0.0), (torch.ones(2), torch.zeros(2)))[1].tolist() == [-0.25, -0.25]
    with pytest.raises(hbnode.errors.NonFiniteError, match=r"t=0"):
        hbnode.odeint(field, (torch.ones(1, 2), torch.ones(1, 2)), [0.0, 1.0])
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[0.0, 1.0], [0.5, 2.0]], dtype=torch.float64)  # one sample begins there, one does not
    solve = lambda x, gradient: hbnode.odeint(field, field.initial_state(x), t, steps=3, gradient=gradient)
    assert torch.autograd.gradcheck(lambda x: solve(x, "direct"), (x,))
    assert torch.autograd.gradcheck(lambda x: solve(x, "checkpoint"), (x,))


def test_adamnode_is_the_papers_equation():
    """By scipy, and for a constant f in closed form."""
    a, b, eps = 0.3, 0.6, 1e-3
    f = lambda t, h: np.sin(3 * h) + t

    def system(t, y):
        h, m, v = y.reshape(3, 2)
        return np.concatenate([m / np.sqrt(v + eps), a * (f(t, h) - m), b * (f(t, h) ** 2 - v)])

    start = np.array([[0.7, -0.2], [0.1, 0.5], [0.4, 1.0]])
    exact = integrate.solve_ivp(system, (0, 3), start.ravel(), rtol=1e-12, atol=1e-12, method="DOP853").y[:, -1]
    options = {"rates": (a, b), "learn_rates": False, "eps": eps}
    field = hbnode.AdamNODE(lambda t, h: torch.sin(3 * h) + t, **options).double()
    with torch.no_grad():
        field.alpha.copy_(torch.logit(torch.tensor([a, b], dtype=torch.float64)))  # float32 rounded them
    np.testing.assert_allclose(end_of(field, start, [0.0, 3.0]), exact.reshape(3, 2), rtol=1e-8)
    field.func, field.time_dependent = (lambda h: torch.full_like(h, 2.0)), False
    h, m, v = end_of(field, ([0.5], [-1.0], [4.0]), [0.0, 3.0])[:, 0]
    rest = 3 * math.exp(-3 * a)  # f - m
    assert (m, v) == pytest.approx((2 - rest, 4), abs=1e-8)
    assert h == pytest.approx(0.5 + (6 - (3 - rest) / a) / math.sqrt(4 + eps), abs=1e-8)


def test_the_rates_of_adamnode():
    field = hbnode.AdamNODE(nn.Identity())
    assert field.rates.tolist() == pytest.approx([1 / (1 + math.exp(3))] * 2)
    assert field.alpha.requires_grad
    assert not hbnode.AdamNODE(nn.Identity(), learn_rates=False).alpha.requires_grad
    h, m, v = field.initial_state(x := torch.randn(3, 2))
    assert h is x
    assert (m.unique().tolist(), v.unique().tolist()) == ([0.0], [1.0])


def potential(h):
    return (1 - h.cos()).sum(1) + 0.1 * h[:, 0] * h[:, -1] ** 2


def test_porthamiltonian_of_a_pendulum_is_an_elliptic_function():
    """sin(h/2) = k cd(t | k²) with k = sin(h(0)/2), from rest."""
    pendulum, k = hbnode.PortHamiltonian(lambda h: (1 - h.cos()).sum(1)), math.sin(1.0)
    h, m = end_of(pendulum, ([2.0], [0.0]), [0.0, 5.0], method="nystrom8")[:, 0]
    _, cn, dn, _ = special.ellipj(5.0, k * k)
    assert h == pytest.approx(2 * math.asin(k * cn / dn), abs=1e-8)
    energy = pendulum.energy((torch.tensor([[h]]), torch.tensor([[m]])))
    assert energy.item() == pytest.approx(1 - math.cos(2.0), abs=1e-8)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"gradient": "direct"}, {"gradient": "adjoint"}, {"per_sample": True},
        {"method": "tsit5"}, {"method": "dopri5", "gradient": "adjoint"}, {"method": "leapfrog", "steps": 4},
        {"method": "leapfrog", "steps": 4, "gradient": "reversible"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)  # fmt: skip
def test_porthamiltonian_is_an_hbnode_with_the_gradient_of_its_potential(settings):
    w = torch.tensor([1.3, 0.7], dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 2, dtype=torch.float64)

    def force(h):
        return -torch.stack(
            [
                w[0] * (w[0] * h[:, 0]).sin() + 0.1 * h[:, 1] ** 2,
                w[1] * (w[1] * h[:, 1]).sin() + 0.2 * h[:, 0] * h[:, 1],
            ],
            1,
        )

    learned = hbnode.PortHamiltonian(lambda h: (1 - (w * h).cos()).sum(1) + 0.1 * h[:, 0] * h[:, 1] ** 2, damping=0.2)
    known = hbnode.HBNODE(force, damping=0.2, learn_damping=False)
    values, counts = [], []
    for field in (learned, known):
        block = hbnode.ODEBlock(field, rtol=1e-6, atol=1e-6, **settings)
        leaf = x.clone().requires_grad_()
        h = block(leaf)
        values.append([h, *torch.autograd.grad(h.sin().sum(), (leaf, w))])
        counts.append(block.nfe.forward)
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-11)
    assert counts[0] - counts[1] in (0, 1)  # 1: the step at which the checkpoint mode finds that it must keep the graph
    block = hbnode.ODEBlock(learned, rtol=1e-6, atol=1e-6, **settings)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(block(x.clone()), values[0][0])


def test_the_energy_of_a_damped_porthamiltonian_falls_by_what_friction_takes():
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    field = hbnode.PortHamiltonian(net, damping=0.4)
    h, m = (torch.randn(5, 2, dtype=torch.float64).requires_grad_() for _ in range(2))
    energy = field.energy((h, m))
    assert energy.shape == (5,)
    dh, dm = torch.autograd.grad(energy.sum(), (h, m))
    rates = field(torch.tensor(0.0), (h, m))
    torch.testing.assert_close(rates, (dm, -dh - 0.4 * dm))
    torch.testing.assert_close((dh * rates[0] + dm * rates[1]).sum(1), -0.4 * m.square().sum(1))
    assert torch.autograd.gradgradcheck(lambda h: field.force(torch.tensor(0.0), h), (h,))
    forced = hbnode.PortHamiltonian(lambda t, h: -t * h.sum(1))  # the port: a force of t on every coordinate
    assert forced.force(torch.tensor(3.0), torch.zeros(2, 2)).tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert hbnode.ODEBlock(field)(torch.empty(0, 2, dtype=torch.float64)).shape == (0, 2)


@pytest.mark.parametrize("gradient", ["checkpoint", "direct", "adjoint", "reversible"])
def test_a_constant_of_the_potential_gets_the_gradient_0(gradient):
    """DistributedDataParallel stops if a parameter gets none."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    block = hbnode.ODEBlock(hbnode.PortHamiltonian(net), method="leapfrog", steps=3, gradient=gradient)
    block(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert net[2].bias.grad.tolist() == [0.0]
    steep = hbnode.PortHamiltonian(lambda h: 1e30 * h.square().sum(1))  # V is infinite, its gradient is not
    h = torch.full((1, 1), 1e5).requires_grad_()
    assert steep.force(torch.tensor(0.0), h).item() == pytest.approx(-2e35)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: hbnode.NesterovNODE(nn.Identity(), start=-1.0), ValueError, "start must be a number >= 0, got -1.0"),
        (lambda: hbnode.AdamNODE(nn.Identity(), rates=(0.0, 0.1)), ValueError, "two numbers between 0 and 1, got"),
        (lambda: hbnode.AdamNODE(nn.Identity(), rates=0.1), ValueError, r"got 0.1. Fix: rates=\(0.1, 0.1\)"),
        (lambda: hbnode.AdamNODE(nn.Identity(), eps=-1.0), ValueError, "eps must be a number >= 0, got -1.0"),
        (
            lambda: hbnode.odeint(hbnode.AdamNODE(nn.Identity()), (torch.ones(1, 2), torch.ones(1, 2)), [0.0, 1.0]),
            TypeError,
            r"three tensors \(h, m, v\), got .*Fix: field.initial_state",
        ),
        (
            lambda: hbnode.ODEBlock(hbnode.PortHamiltonian(nn.Linear(2, 2)))(torch.ones(3, 2)),
            ValueError,
            r"the potential returned shape \(3, 2\); expected one number per sample, \(3,\). Fix: end a network",
        ),
        (
            lambda: hbnode.ODERNN(2, 4, field=lambda n: hbnode.AdamNODE(nn.Linear(n, n))),
            ValueError,
            "AdamNODE has 3 tensors. Fix: field='hbnode'",
        ),
    ],
)
def test_bad_arguments_of_later_fields(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
