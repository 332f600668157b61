import copy
import functools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special
from torch import nn

import hbnode
from tests.models import every_field, make_field, make_input

TIGHT = {"rtol": 1e-10, "atol": 1e-10, "method": "dopri8", "save": "exact"}
GAMMA, XI, A, B, EPS = 0.4, 0.7, 0.3, 0.6, 1e-3


def force(t, h):
    return (torch if isinstance(h, torch.Tensor) else np).sin(3 * h) + t - h


EQUATIONS = {  # each field, and its right-hand side from the paper
    "NODE": (lambda: hbnode.NODE(force), lambda t, h: [force(t, h)]),
    "SONODE": (
        lambda: hbnode.SONODE(lambda t, h, v: force(t, h) - GAMMA * v),
        lambda t, h, m: [m, force(t, h) - GAMMA * m],
    ),
    "HBNODE": (
        lambda: hbnode.HBNODE(force, damping=GAMMA, learn_damping=False),
        lambda t, h, m: [m, -GAMMA * m + force(t, h)],
    ),
    "GHBNODE": (
        lambda: hbnode.GHBNODE(force, damping=1.5, max_damping=2.0, xi=XI).double(),
        lambda t, h, m: [np.tanh(m), -1.5 * m + force(t, h) - XI * h],
    ),
    "NesterovNODE": (
        lambda: hbnode.NesterovNODE(force, start=1.5),
        lambda t, h, m: [m, -3 / (1.5 + t) * m + force(t, h)],
    ),
    "AdamNODE": (
        lambda: hbnode.AdamNODE(force, rates=(A, B), eps=EPS).double(),
        lambda t, h, m, v: [m / np.sqrt(v + EPS), A * (force(t, h) - m), B * (force(t, h) ** 2 - v)],
    ),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_fields_are_the_papers_equations_by_scipy(name):
    make, equation = EQUATIONS[name]
    parts = equation.__code__.co_argcount - 1
    start = np.random.default_rng(0).uniform(0.1, 1.0, (parts, 4))

    def system(t, y):
        return np.concatenate(equation(t, *y.reshape(parts, 4)))

    exact = integrate.solve_ivp(system, (0, 2), start.ravel(), rtol=1e-12, atol=1e-12, method="DOP853").y[:, -1]
    state = tuple(torch.tensor(part)[None] for part in start)
    solution = hbnode.odeint(make(), state if parts > 1 else state[0], [0.0, 2.0], **TIGHT)
    found = torch.cat([part[-1, 0] for part in (solution if parts > 1 else [solution])])
    tolerance = 1e-6 if name in ("GHBNODE", "AdamNODE") else 1e-8  # whose constants are parameters made in float32
    np.testing.assert_allclose(found.detach(), exact, rtol=tolerance, atol=tolerance)


@every_field
def test_fields_run_in_plain_torchdiffeq(model):
    import torchdiffeq

    field = make_field(model).double()
    state = field.initial_state(make_input())
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    expected = hbnode.odeint(field, state, t, rtol=1e-9, atol=1e-9)
    for solver in (torchdiffeq.odeint, torchdiffeq.odeint_adjoint):
        solution = solver(field, state, t, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(field.readout(solution), field.readout(expected), rtol=1e-6, atol=1e-7)


def test_initial_states():
    x, images = torch.randn(4, 3), torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(hbnode.ANODE(nn.Identity(), 2).initial_state(x), torch.cat([x, torch.zeros(4, 2)], 1))
    assert hbnode.ANODE(nn.Identity(), 2).initial_state(images).shape == (4, 5, 5, 5)
    torch.testing.assert_close(hbnode.HBNODE(abs).initial_state(x), (x, 0 * x))
    torch.testing.assert_close(hbnode.HBNODE(abs, initial_momentum=torch.exp).initial_state(x), (x, x.exp()))
    torch.testing.assert_close(hbnode.AdamNODE(abs).initial_state(x), (x, 0 * x, 0 * x + 1))


class Timed(nn.Module):
    def forward(self, t, h):
        return t * 0.0 - 0.5 * h


class Plain(nn.Module):
    def forward(self, h):
        return -0.5 * h


def timed(t: torch.Tensor, h: torch.Tensor, scale: float = 0.5):
    return t * 0.0 - h * scale


FUNCTIONS = {  # and whether each takes the time
    "default": (lambda: lambda h, scale=0.5: -h * scale, False),
    "sequential": (lambda: nn.Sequential(Plain()), False),
    "method": (lambda: Plain().forward, False),
    "module": (Timed, True),
    "partial": (lambda: functools.partial(lambda a, t, h: -a * h, 0.5), True),
    "partial by name": (lambda: functools.partial(lambda t, h, scale: scale * h, scale=-0.5), True),
    "parallel": (lambda: nn.DataParallel(Timed()), True),
    "compiled module": (lambda: torch.compile(Timed(), backend="eager"), True),
    "compiled": (lambda: torch.compile(timed, backend="eager"), True),
    "script": (lambda: torch.jit.script(timed), True),
    "trace": (lambda: torch.jit.trace(Timed(), (torch.ones(()), torch.ones(2, 2))), True),
    "script of a module": (lambda: torch.jit.script(Plain()), False),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_whether_a_function_takes_the_time_is_read_off_it(name):
    func, takes_time = FUNCTIONS[name]
    field, x = hbnode.HBNODE(func()), torch.ones(2, 2)
    assert field.time_dependent == takes_time
    torch.testing.assert_close(hbnode.ODEBlock(field)(x), hbnode.HeavyBallODEBlock(lambda h: -0.5 * h)(x))


NORMAL = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)
HOLDERS = {  # of a function, and a value
    "block": lambda f: hbnode.HeavyBallODEBlock(f, per_sample=True)(torch.ones(2, 2)),
    "sde": lambda f: hbnode.sdeint(hbnode.HeavyBallSDE(f), (torch.ones(2, 2),) * 2, [0.0, 1.0], dt=0.5, seed=0)[0],
    "flow": lambda f: hbnode.distributions.HeavyBallFlow(f, 2).log_prob(torch.ones(2, 2), torch.ones(2, 2)),
    "annealing": lambda f: hbnode.distributions.HeavyBallAnnealing(NORMAL.log_prob, NORMAL, 2, force=f).log_z(
        2, seed=0
    ),
    "rnn": lambda f: hbnode.ODERNN(2, 2, field=lambda n: hbnode.NODE(f))(torch.ones(2, 3, 2), [0.0, 0.5, 1.0])[0],
}


@pytest.mark.parametrize("name", HOLDERS)
def test_every_holder_of_a_function_reads_whether_it_takes_the_time(name):
    values = []
    for func in (Plain(), Timed()):
        torch.manual_seed(0)
        values.append(HOLDERS[name](func))
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hbnode.HBNODE(abs, damping=1.0), "strictly between 0 and max_damping"),
        (lambda: constant_field(-0.1), "must be a number >= 0"),
        (lambda: hbnode.GHBNODE(abs, xi=0.0), "learned xi must start above 0"),
        (lambda: hbnode.ANODE(abs, 1).initial_state(torch.zeros(3)), "needs an input of shape"),
        (
            lambda: hbnode.HBNODE(abs, initial_momentum=nn.Linear(2, 3)).initial_state(torch.zeros(4, 2)),
            r"initial_momentum returned shape \(4, 3\); expected the shape of the input, \(4, 2\)",
        ),
        (lambda: hbnode.NODE(3), "func must be callable, got int"),
        (lambda: hbnode.NODE(lambda *args: args[0]), r"expected \(h\) or \(t, h\).*Fix: say which"),
        (lambda: hbnode.NODE(torch.tanh), r"expected \(h\) or \(t, h\).*Fix: say which"),
        (lambda: hbnode.AdamNODE(abs, rates=0.1), r"got 0.1. Fix: rates=\(0.1, 0.1\)"),
        (
            lambda: hbnode.odeint(hbnode.AdamNODE(abs), (torch.ones(1, 2), torch.ones(1, 2)), [0.0, 1.0]),
            r"three tensors \(h, m, v\), got .*Fix: field.initial_state",
        ),
        (
            lambda: hbnode.ODEBlock(hbnode.PortHamiltonian(nn.Linear(2, 2)))(torch.ones(3, 2)),
            r"the potential returned shape \(3, 2\); expected one number per sample, \(3,\). Fix: end a network",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# Constants of the equation


class Damping(nn.Module):
    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self):
        return self.field.solver_damping()


def constant_field(damping, xi=0.7, **options):
    return hbnode.GHBNODE(nn.Linear(2, 2), damping=damping, learn_damping=False, xi=xi, learn_xi=False, **options)


EXACT = torch.tensor([0.9, 0.1], dtype=torch.float64)


def test_constants_are_not_rounded():
    one, field = (copy.deepcopy(constant_field(damping).half()).double() for damping in (0.9, [0.9, 0.1]))
    assert (one.damping, one.xi) == (0.9, 0.7)
    assert torch.equal(field.damping, EXACT)
    assert torch.equal(field.solver_damping(), EXACT)
    assert field.float()(torch.tensor(0.0), tuple(torch.randn(2, 3, 2)))[1].dtype == torch.float32
    assert torch.equal(field.to_empty(device="cpu").damping, EXACT)
    lent = torch.func.functional_call(Damping(field), {"field._damping_on_device": 2 * EXACT})
    assert torch.equal(lent, 2 * EXACT)
    field = field.to("meta")
    assert field.damping.device.type == "meta"
    assert torch.equal(field.solver_damping(), EXACT)  # read without a device


def test_constants_of_channels_move_to_a_device_without_float64():
    def move(x):
        if x.dtype == torch.float64:
            raise TypeError("the device has no float64")
        return x.to("meta")

    field = constant_field([0.9, 0.1])._apply(move)
    assert field.damping.is_meta
    assert field.state_dict()["damping"].tolist() == [0.9, 0.1]


@pytest.mark.parametrize(("damping", "other"), [(0.9, 0.1), ([0.9, 0.1], [0.2, 0.3])])
def test_constants_are_in_the_checkpoint(damping, other):
    """One in half precision of the same constants rounds nothing."""
    saved = constant_field(damping)
    state = saved.state_dict()
    halved = {name: value.half() for name, value in state.items()}
    for field, given in ((constant_field(other, xi=0.2), state), (constant_field(damping), halved)):
        field.load_state_dict(given)
        assert torch.equal(torch.as_tensor(field.double().damping), torch.as_tensor(saved.damping))
        assert field.xi == 0.7


def test_the_largest_damping_is_in_the_checkpoint_and_can_be_set():
    other = hbnode.HBNODE(nn.Linear(2, 2))
    other.load_state_dict(hbnode.HBNODE(nn.Linear(2, 2), damping=1.5, max_damping=2.0).state_dict())
    assert other.damping.item() == pytest.approx(1.5)
    other.max_damping = 4.0
    assert other.damping.item() == pytest.approx(3.0)


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


GRADIENTS = [
    *({"gradient": "direct"}, {"gradient": "checkpoint"}, {"gradient": "checkpoint", "per_sample": True}),
    *({"gradient": "reversible", "steps": 60}, {"method": "tsit5"}, {"method": "dopri5"}),
]


@pytest.mark.sparse
@pytest.mark.parametrize("settings", GRADIENTS, ids=str)
@pytest.mark.parametrize("shape", [(2,), (), (3, 1)], ids=["per feature", "one", "per sample"])
def test_a_constant_damping_keeps_its_gradient(settings, shape):
    """Of the spring h'' + γh' + 4h = 0 from rest, with γ computed by another network."""
    other, x = torch.randn(shape, dtype=torch.float64, requires_grad=True), make_input()[:, :2]
    block = hbnode.HeavyBallODEBlock(
        lambda h: -4 * h, damping=torch.sigmoid(other), learn_damping=False, rtol=1e-10, atol=1e-10, **settings
    )
    (found,) = torch.autograd.grad(block(x).sin().sum(), other)
    gamma = torch.sigmoid(other)
    w = (4 - gamma**2 / 4).sqrt()
    h = torch.exp(-gamma / 2) * x * (w.cos() + gamma / (2 * w) * w.sin())
    torch.testing.assert_close(found, torch.autograd.grad(h.sin().sum(), other)[0], rtol=1e-7, atol=1e-9)


def test_a_constant_parameter_stays_that_of_its_owner():
    """It is seen after it has changed, has a gradient in the adjoint too, and is in no checkpoint of the field."""
    gamma, x = nn.Parameter(torch.tensor(0.3, dtype=torch.float64)), make_input()[:, :2]

    def block(damping, gradient):
        options = {"rtol": 1e-10, "atol": 1e-10, "gradient": gradient, "learn_damping": False}
        return hbnode.HeavyBallODEBlock(lambda h: -4 * h, damping=damping, **options)

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

    assert torch.autograd.gradcheck(end, torch.tensor(0.7, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("kind", "arguments", "name"),
    [
        (hbnode.HBNODE, (abs,), "damping"),
        (hbnode.GHBNODE, (abs,), "xi"),
        (hbnode.NesterovNODE, (abs,), "start"),
        (hbnode.AdamNODE, (abs,), "eps"),
        (functools.partial(hbnode.HeavyBallSDE, learn_temperature=True), (abs,), "temperature"),
        (hbnode.distributions.HeavyBallAnnealing, (NORMAL.log_prob, NORMAL, 1), "step_size"),
        (hbnode.ODERNN, (1, 2), "time_unit"),
        (hbnode.nn.MomentumAttention, (4, 2), "momentum"),
        (hbnode.nn.MomentumLSTM, (1, 2), "forget_bias"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused(kind, arguments, name):
    value = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ValueError, match=rf"{name} requires a gradient.*Fix: {name}={name}.detach\(\)"):
        kind(*arguments, **{name: value})
    kind(*arguments, **{name: value.detach()})


# Fields that are special where they begin, or have a potential


def test_nesterovnode_of_a_spring_begins_at_rest_as_a_bessel_function():
    """h'' + 3/t h' = -ω² h: h = 2 J1(ωt) / (ωt), although the damping is infinite at t = 0."""
    omega, field = 2.5, hbnode.NesterovNODE(lambda h: -(2.5**2) * h, start=0.0)
    x, t = torch.ones(1, 1, dtype=torch.float64), [0.0, 4.0]
    h, _ = hbnode.odeint(field, (x, 0 * x), t, **TIGHT)
    assert h[-1].item() == pytest.approx(2 * special.jv(1, omega * 4) / (omega * 4), abs=1e-8)
    assert field(torch.tensor(0.0), (x, 0 * x))[1].item() == -(omega**2) / 4
    with pytest.raises(hbnode.errors.NonFiniteError, match=r"t=0"):
        hbnode.odeint(field, (x, x), t)
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[0.0, 1.0], [0.5, 2.0]], dtype=torch.float64)  # one sample begins there, one does not
    for gradient in ("direct", "checkpoint"):
        solve = functools.partial(hbnode.odeint, field, t=t, steps=3, gradient=gradient)
        assert torch.autograd.gradcheck(lambda x, solve=solve: solve(field.initial_state(x)), (x,))


def test_porthamiltonian_of_a_pendulum_is_an_elliptic_function():
    """sin(h/2) = k cd(t | k²) with k = sin(h(0)/2), from rest."""
    pendulum, k = hbnode.PortHamiltonian(lambda h: (1 - h.cos()).sum(1)), math.sin(1.0)
    start = (torch.full((1, 1), 2.0, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    h, m = hbnode.odeint(pendulum, start, [0.0, 5.0], **(TIGHT | {"method": "nystrom8"}))
    _, cn, dn, _ = special.ellipj(5.0, k * k)
    assert h[-1].item() == pytest.approx(2 * math.asin(k * cn / dn), abs=1e-8)
    assert pendulum.energy((h[-1], m[-1])).item() == pytest.approx(1 - math.cos(2.0), abs=1e-8)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"gradient": "adjoint"}, {"per_sample": True}, {"method": "dopri5", "gradient": "adjoint"},
        {"method": "leapfrog", "steps": 4, "gradient": "reversible"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)  # fmt: skip
def test_porthamiltonian_is_an_hbnode_with_the_gradient_of_its_potential(settings):
    w = torch.tensor([1.3, 0.7], dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    learned = hbnode.PortHamiltonian(lambda h: (1 - (w * h).cos()).sum(1), damping=0.2)
    known = hbnode.HBNODE(lambda h: -w * (w * h).sin(), damping=0.2, learn_damping=False)
    values, counts = [], []
    for field in (learned, known):
        block = hbnode.ODEBlock(field, rtol=1e-6, atol=1e-6, **settings)
        h = block(x)
        values.append([h, *torch.autograd.grad(h.sin().sum(), (x, w))])
        counts.append(block.nfe.forward)
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-11)
    assert counts[0] - counts[1] in (0, 1)  # 1: the step at which the checkpoint mode finds that it must keep the graph
    block = hbnode.ODEBlock(learned, rtol=1e-6, atol=1e-6, **settings)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(block(x.clone()), values[0][0])


def test_the_energy_of_a_damped_porthamiltonian_falls_by_what_friction_takes():
    field = hbnode.PortHamiltonian(hbnode.nn.MLP(2, [8], 1).double(), damping=0.4)
    h, m = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    dh, dm = torch.autograd.grad(field.energy((h, m)).sum(), (h, m))
    torch.testing.assert_close(field(torch.tensor(0.0), (h, m)), (dm, -dh - 0.4 * dm))
    assert torch.autograd.gradgradcheck(lambda h: field.force(torch.tensor(0.0), h), (h,))
    forced = hbnode.PortHamiltonian(lambda t, h: -t * h.sum(1))  # the port: a force of t on every coordinate
    assert forced.force(torch.tensor(3.0), torch.zeros(2, 2)).tolist() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("gradient", ["checkpoint", "direct", "adjoint", "reversible"])
def test_a_constant_of_the_potential_gets_the_gradient_0(gradient):
    """DistributedDataParallel stops if a parameter gets none."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    block = hbnode.ODEBlock(hbnode.PortHamiltonian(net), method="leapfrog", steps=3, gradient=gradient)
    block(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert net[2].bias.grad.tolist() == [0.0]


def test_the_force_is_finite_where_the_potential_is_not():
    steep = hbnode.PortHamiltonian(lambda h: 1e30 * h.square().sum(1))
    h = torch.full((1, 1), 1e5, requires_grad=True)
    assert steep.force(torch.tensor(0.0), h).item() == pytest.approx(-2e35)
