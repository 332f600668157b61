"""HeavyBallSDE and sdeint: values, orders and laws against closed forms, gradients against the references, use."""

import copy
import dataclasses
import gc
import math
import pickle
import re
import weakref

import mpmath
import pytest
import torch
import torchsde
from torch import nn

import hbnode
from benchmarks.gradients import Living
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.sde import linear_part
from hbnode.solve.torchsde import STRATONOVICH
from tests import reference_sde
from tests.pretend_device import pretended_device

METHODS = ("ubu", "baoab", "nystrom4")
T = [0.0, 0.5, 1.1, 1.5]
ROWS = torch.tensor(  # ties at the start, inside and at the end; the third sample never moves
    [[0.0, 0.5, 0.5, 1.7], [0.3, 0.3, 1.0, 1.1], [2.0, 2.0, 2.0, 2.0], [-1.0, 0.0, 0.9, 0.9]], dtype=torch.float64
)
THEIRS = ("euler", "milstein", "srk", "midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")
AGAIN = Checkpoint(keep_bytes=0)  # after the first steps, all are computed again
GRADIENTS = [
    (method, gradient)
    for method in METHODS
    for gradient in ("direct", "checkpoint", AGAIN, "reversible")
    if (method, gradient) != ("nystrom4", "reversible")
]


def make_sde(dtype=torch.float32, time_dependent=False, **options):
    torch.manual_seed(0)
    net = hbnode.nn.MLP(3, [8], 3, time_dependent=time_dependent)
    return hbnode.HeavyBallSDE(net, **{"damping": 0.6, "temperature": 0.4} | options).to(dtype)


def make_state(*shape, dtype=torch.float32):
    """Of leaves."""
    torch.manual_seed(1)
    return tuple(torch.randn(shape or (4, 3), dtype=dtype).requires_grad_() for _ in range(2))


FINE = {"dtype": torch.float64, "time_dependent": True, "learn_temperature": True}


# The field


@pytest.mark.parametrize("temperature", [0.25, torch.tensor([0.1, 0.2, 0.3])], ids=["one", "channels"])
@pytest.mark.parametrize("learned", [True, False])
def test_copies(learned, temperature):
    sde, state = make_sde(learn_temperature=learned, temperature=temperature), make_state()
    expected = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, seed=0)
    loaded = make_sde(damping=0.1, temperature=2 * temperature, learn_temperature=learned)
    loaded.load_state_dict(sde.state_dict())
    for other in (copy.deepcopy(sde), pickle.loads(pickle.dumps(sde)), loaded):
        torch.testing.assert_close(torch.as_tensor(other.temperature).float(), torch.as_tensor(temperature))
        found = hbnode.sdeint(other, state, [0.0, 1.0], dt=0.1, seed=0)
        assert torch.equal(torch.stack(found), torch.stack(expected))


def test_the_diffusion():
    sde, y = make_sde(temperature=torch.tensor([0.0, 0.5, 2.0])), torch.randn(4, 6)
    v, g = torch.randn(4, 3), sde.g(torch.zeros(()), y)
    assert g.shape == (4, 6, 3)
    torch.testing.assert_close(g[0, 3:].diagonal(), (2 * 0.6 * torch.tensor([0.0, 0.5, 2.0])).sqrt())
    torch.testing.assert_close(sde.g_prod(torch.zeros(()), y, v), torch.einsum("bij,bj->bi", g, v))
    (gradient,) = torch.autograd.grad(g.sum(), sde.omega)
    assert torch.isfinite(gradient)
    with pytest.raises(ValueError, match=r"even number of columns.*Fix: torch.cat"):
        sde.f(torch.zeros(()), torch.randn(4, 5))
    with pytest.raises(ValueError, match=r"temperature must be a number >= 0.*Fix: pass temperature=0.0"):
        make_sde(temperature=-1.0)


# Calls


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 4), (0, 3)], ids=str)
def test_shapes(method, shape):
    sde = hbnode.HeavyBallSDE(nn.Tanh(), damping=0.5)
    state = make_state(*shape) if shape else (torch.tensor(1.0), torch.tensor(0.5))
    common = torch.tensor([0.0, 0.3, 1.0])
    for t in (common, common.expand(shape[0], 3)) if shape else (common,):
        h, m = hbnode.sdeint(sde, state, t, dt=0.25, method=method, seed=0)
        assert h.shape == m.shape == (3, *shape)
        assert torch.equal(h[0], state[0])
        (h.sum() + m.square().sum()).backward()
    assert torch.isfinite(sde.omega.grad)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "reversible"])
def test_one_time_is_the_start_and_autocast_is_left_outside(gradient):
    sde = make_sde()
    h, m = make_state()
    found = hbnode.sdeint(sde, (h, m), [0.4], dt=0.1, gradient=gradient)
    assert torch.equal(torch.stack(found), torch.stack([h, m]).unsqueeze(1))
    found[0].sum().backward()
    assert torch.equal(h.grad, torch.ones_like(h))
    solve = lambda: hbnode.sdeint(sde, (h, m), [0.0, 1.0], dt=0.1, gradient=gradient, seed=0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        end = solve()
    end.sum().backward()
    assert end.dtype == torch.float32
    torch.testing.assert_close(end, solve(), rtol=0.05, atol=0.05)


def test_steps_end_on_the_output_times_of_every_sample():
    sde, state, t = make_sde(), make_state(), torch.tensor([[0.0, 0.1, 1.0]] * 3 + [[1.0, 1.2, 1.2]])
    with hbnode.diagnostics.record_steps(sde) as steps:
        hbnode.sdeint(sde, state, t[0], dt=torch.tensor(0.3))
        hbnode.sdeint(sde, state, t, dt=0.3)
    assert steps.size[:4] == pytest.approx([0.1, 0.3, 0.3, 0.3])
    assert {*steps.sample} == {None, 0, 1, 2, 3}


@pytest.mark.parametrize("method", ["ubu", "srk"])
def test_seeds(method):
    sde, state = make_sde(), make_state()
    end = lambda **options: hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, method=method, **options)[0][-1]
    torch.manual_seed(2)
    first, second = end(), end()
    torch.manual_seed(2)
    one, same, other = end(seed=3), end(seed=3), end(seed=2**63)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    assert not torch.allclose(first, second)
    if method == "ubu":  # a seed leaves the generator of torch alone
        assert torch.equal(end(), first)


def draw(*arguments, **options):
    return hbnode.solve.BrownianIncrements.draw(*arguments, **options)


@pytest.mark.parametrize("method", METHODS)
def test_given_noise(method):
    sde, state, t = make_sde(), make_state(), [0.0, 0.5, 1.0]
    options = {"method": method, "dt": 0.125}
    noise = draw(sde, state[0], t, **options)
    half = noise.coarser()
    assert half.sizes.tolist() == [0.25] * 4
    assert half.normals.dtype == torch.float32
    for wrong, message in (
        ({"noise": half}, r"the noise has 4 steps, but t and dt give 8.*Fix: dt="),
        ({"noise": draw(sde, state[0][:2], t, **options)}, r"noise.normals has shape .*Fix: BrownianIncrements.draw"),
        ({"noise": noise, "seed": 1}, "Fix: leave seed out"),
        ({"noise": noise, "method": "srk"}, "noise is for .*Fix: torchsde.sdeint"),
        ({"noise": noise, "method": "baoab" if method == "ubu" else "ubu"}, f"the noise is for method='{method}'"),
        ({"noise": noise, "t": torch.tensor([t] * 4)}, r"expected noise.sizes of shape \(8, 4\).*Fix: dt="),
    ):
        with pytest.raises(ValueError, match=message):
            hbnode.sdeint(sde, state, **{"t": t} | options | wrong)
    with pytest.raises(ValueError, match="the steps of a pair have different sizes"):
        draw(sde, state[0], [0.0, 0.3, 1.0], dt=1.0, method=method).coarser()
    with pytest.raises(ValueError, match=r"the noise has 1 steps.*expected an even number"):
        half.coarser().coarser().coarser()
    with pytest.raises(ValueError, match="Fix: one row of times for each sample"):
        draw(sde, state[0][:2], ROWS, **options)


@pytest.mark.parametrize("method", METHODS)
def test_composed_variables_are_independent_and_normal(method):
    """Those of all steps and of neighbouring seeds."""
    h = torch.zeros(40_000, 1, dtype=torch.float64)
    draws = [draw(make_sde(damping=0.9), h, [0.0, 4.0], dt=0.5, method=method, seed=seed) for seed in (0, 1)]
    rows = torch.cat([draws[0].normals, draws[1].coarser().coarser().normals]).flatten(0, 1).squeeze(-1)
    expected = torch.eye(len(rows), dtype=torch.float64)
    torch.testing.assert_close(rows @ rows.T / len(h), expected, rtol=0.0, atol=5 * (2 / len(h)) ** 0.5)
    assert (rows.mean(1).abs() < 4.5 / len(h) ** 0.5).all()


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"method": "UBUU"}, ValueError, "Fix: method='ubu'"),
        ({"gradient": "adjoint"}, ValueError, "Fix: gradient='checkpoint'"),
        ({"method": "nystrom4", "gradient": "reversible"}, ValueError, "Fix: method='ubu' with gradient='reversible'"),
        ({"method": "srk", "gradient": "checkpoint"}, ValueError, "expected one of ('direct', 'adjoint')"),
        ({"dt": 0.0}, ValueError, "dt must be a positive number"),
        ({"dt": 1e-12}, ValueError, "Fix: dt=2e-07 or longer"),
        ({"dt": 1e-12, "method": "euler"}, ValueError, "Fix: dt=2e-07 or longer"),
        ({"t": [1.0, 0.0]}, ValueError, "t[0]=1 is followed by t[1]=0. Fix: sort the times"),
        ({"t": torch.tensor([0.0, 1.0], requires_grad=True)}, ValueError, "Fix: t.detach()"),
        ({"t": torch.tensor([[0.0, 1.0], [0.0, 2.0]])}, ValueError, "Fix: one row of times for each sample"),
        ({"t": torch.tensor([[2.0, 1.0]] * 4)}, ValueError, "t[0, 0]=2 is followed by t[0, 1]=1. Fix: sort"),
        ({"t": torch.tensor([[0.0, 1.0]] * 4), "method": "srk"}, ValueError, "Fix: method='ubu'; or, if all rows"),
        ({"seed": 2**64 + 1}, ValueError, "seed must be below 2**64, got 18446744073709551617. Fix: seed=1"),
        ({"y0": torch.zeros(4, 3)}, TypeError, "Fix: field.initial_state(x) makes it"),
        ({"sde": hbnode.HBNODE(nn.Tanh())}, TypeError, "Fix: hbnode.HeavyBallSDE(func)"),
        ({"sde": make_sde(temperature=torch.ones(2))}, ValueError, "does not broadcast to that of h"),
        ({"sde": hbnode.HeavyBallSDE(lambda h: h.neg_())}, ValueError, "let func work on h.clone()"),
        ({"sde": hbnode.HeavyBallSDE(lambda h: h.neg_()), "method": "srk"}, ValueError, "let func work on h.clone()"),
        ({"sde": hbnode.HeavyBallSDE(nn.Linear(3, 2))}, ValueError, "expected a tensor of the shape of h"),
        ({"sde": hbnode.HeavyBallSDE(nn.Dropout(0.5))}, ValueError, "Dropout is in training mode"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)
def test_wrong_calls_say_what_to_do(options, error, fix):
    call = {"sde": make_sde(), "y0": make_state(), "t": [0.0, 1.0], "dt": 0.1} | options
    with pytest.raises(error, match=re.escape(fix)):
        hbnode.sdeint(**call)


def test_strong_damping():
    """UBU and BAOAB keep the law of m whatever γ is; the third refuses steps that are too long for it."""
    zero = torch.zeros(20_000, 1)
    for damping in (1e3, 1e6):
        sde = hbnode.HeavyBallSDE(lambda h: -h, damping=damping, temperature=0.5, learn_damping=False)
        for method in ("ubu", "baoab"):
            _, m = hbnode.sdeint(sde, (zero, zero), [0.0, 1.0], method=method, dt=0.1, seed=0)
            assert abs(m[-1].var() - 0.5) < 0.02
        with pytest.raises(ValueError, match=r"needs steps of at most 2/γ.*Fix: dt=0\.\d+|Fix: dt=1.98e-06"):
            hbnode.sdeint(sde, (zero, zero), [0.0, 1.0], method="nystrom4", dt=0.1)


def test_values_that_are_not_finite():
    sde, state = hbnode.HeavyBallSDE(lambda h: 1e3 * h**3), make_state()
    for method in (*METHODS, "euler"):
        with pytest.raises(hbnode.errors.NonFiniteError, match="smaller dt") as caught:
            hbnode.sdeint(sde, state, [0.0, 1.0, 2.0], dt=0.25, method=method, seed=0)
        assert 0 <= caught.value.t <= 2
        assert caught.value.nfe > 0
    with pytest.raises(hbnode.errors.NonFiniteError, match="the initial state is not finite"):
        hbnode.sdeint(sde, (state[0] * float("nan"), state[1]), [0.0, 1.0], dt=0.1)
    late = hbnode.HeavyBallSDE(lambda t, h: -h / ((t < 5.0) | (h < 0)))
    state = torch.tensor([[-99.0], [99.0]]), torch.zeros(2, 1)
    for t in ([4.0, 5.5], torch.tensor([[0.0, 0.5], [4.0, 5.5]])):
        with pytest.raises(hbnode.errors.NonFiniteError) as caught:
            hbnode.sdeint(late, state, t, dt=0.5, seed=0)
        assert caught.value.t == pytest.approx(5.25)  # in the middle of the step, where f is evaluated
        assert caught.value.step_size == 0.5


def test_signals_and_their_ends():
    signal = hbnode.Signal(torch.linspace(0, 1, 5), torch.ones(5))
    sde = hbnode.HeavyBallSDE(lambda t, h: signal(t) - h)
    for method in ("ubu", "srk"):
        hbnode.sdeint(sde, make_state(), [0.0, 1.0], dt=0.1, method=method)
        with pytest.raises(ValueError, match=r"the signal was evaluated at t=1\."):
            hbnode.sdeint(sde, make_state(), [0.0, 2.0], dt=0.1, method=method)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    sde, state = make_sde(dtype), make_state(dtype=dtype)
    for method in METHODS:
        h, _ = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.25, method=method, seed=0)
        assert h.dtype == dtype
        assert torch.isfinite(h).all()
    with pytest.raises(hbnode.errors.ReversalError, match=r"rounding errors.*Fix: gradient='checkpoint', float64"):
        hbnode.sdeint(sde, state, [0.0, 0.1], dt=0.1, gradient="reversible")


class Model(nn.Module):
    def __init__(self, sde, **options):
        super().__init__()
        self.sde, self.options = sde, options

    def forward(self, h, m):
        h, m = hbnode.sdeint(self.sde, (2 * h, m), [0.0, 1.0], dt=0.1, seed=0, **self.options)
        return h[-1] + 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_inside_of_torch_compile():
    sde, state = make_sde(), make_state()
    model = Model(sde, gradient="checkpoint")
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(*state), model(*state))
    compiled(*state).sum().backward()


def test_vmap_over_the_state():
    sde, (h, m) = make_sde(), make_state(5, 4, 3)
    options = {"t": [0.0, 1.0], "dt": 0.25}
    noise = draw(sde, h[0], seed=0, **options)
    solve = lambda h, m: hbnode.sdeint(sde, (h, m), noise=noise, **options)[0]
    torch.testing.assert_close(torch.vmap(solve)(h, m), torch.stack([solve(*pair) for pair in zip(h, m, strict=True)]))
    assert torch.isfinite(torch.func.grad(lambda h: solve(h, m[0]).sum())(h[0])).all()
    again = lambda h: hbnode.sdeint(sde, (h, m[0]), gradient="checkpoint", **options)[0].sum()
    with pytest.raises(ValueError, match=r"transforms of torch.func.*Fix: gradient='direct'"):
        torch.func.grad(again)(h[0])


@pytest.mark.parametrize(
    ("method", "gradient"), [("ubu", "reversible"), ("baoab", "checkpoint"), ("nystrom4", "direct")]
)
def test_on_a_device(method, gradient):
    with pretended_device() as device:
        sde = device.move(make_sde(learn_temperature=True))
        h, m = (device.move(x).requires_grad_() for x in make_state())
        before = device.synchronisations
        found = hbnode.sdeint(sde, (h, m), [0.0, 0.5, 1.0], dt=0.1, method=method, gradient=gradient, seed=0)
        torch.stack(found).square().sum().backward()
        assert device.synchronisations - before <= 6
        assert all(x.is_cuda for x in (*found, h.grad, sde.omega.grad, sde.log_temperature.grad))


# torchsde


@pytest.mark.parametrize("method", THEIRS)
def test_torchsdes_solvers(method):
    """Each runs on the SDE, through torchsde and through us, and agrees with UBU in law."""
    sde_type = "stratonovich" if method in STRATONOVICH else "ito"
    force = lambda t, h: torch.cos(t) - h
    sde = hbnode.HeavyBallSDE(force, damping=1.0, temperature=0.5, learn_damping=False, sde_type=sde_type)
    h, m, t = torch.ones(2000, 1), torch.zeros(2000, 1), torch.tensor([2.0, 3.0])
    y = torchsde.sdeint(sde, torch.cat([h, m], -1), t, method=method, dt=0.1)
    ours, _ = hbnode.sdeint(sde, (h, m), t, method=method, dt=0.1, seed=0)
    exact, _ = hbnode.sdeint(sde, (h, m), t, dt=0.02, seed=0)
    for end in (y[-1, :, :1], ours[-1]):
        assert abs(end.mean() - exact[-1].mean()) < 0.08
        assert abs(end.std() / exact[-1].std() - 1) < 0.12


def test_torchsdes_adjoint_finds_tensors_that_f_closes_over():
    """Their gradients are those of the same tensors as parameters of a module."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, found = torch.randn(3, 2, dtype=torch.float64), []
    for func in (net, lambda h: net(h)):
        sde = hbnode.HeavyBallSDE(func, damping=0.5, temperature=0.1, sde_type="stratonovich").double()
        options = {"dt": 0.1, "seed": 0, "method": "heun", "gradient": "adjoint"}
        h, m = hbnode.sdeint(sde, sde.initial_state(x), [0.0, 0.5, 1.0], **options)
        found.append(torch.autograd.grad(h.square().sum() + m[-1].sum(), [*net.parameters(), sde.omega]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
    assert all(gradient.any() for gradient in found[0])


def test_torchsdes_adjoint_refuses_what_it_cannot_differentiate():
    weight, late = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    doubled = 2 * weight
    options = {"dt": 0.1, "seed": 0, "method": "heun", "gradient": "adjoint"}
    for func, message in (
        (lambda h: doubled * h, "a tensor that was computed outside it"),
        (lambda t, h: (late if t > 0.5 else weight) * h, "that it did not use at first"),
    ):
        sde = hbnode.HeavyBallSDE(func, sde_type="stratonovich").double()
        with pytest.raises(ValueError, match=message):
            hbnode.sdeint(sde, sde.initial_state(torch.ones(1, 2).double()), [0.0, 1.0], **options)[0].sum().backward()


@pytest.mark.parametrize(
    ("gradient", "method"),
    [("checkpoint", "ubu"), (AGAIN, "baoab"), ("reversible", "ubu"), ("adjoint", "heun")],
)
def test_a_network_that_keeps_an_output_is_freed_and_one_that_does_not_is_outlived(gradient, method):
    for keeps in (True, False):
        net, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(3, 2, requires_grad=True)
        sde, freed = hbnode.HeavyBallSDE(net, sde_type="stratonovich"), weakref.ref(net)
        h, m = hbnode.sdeint(sde, sde.initial_state(x), [0.0, 1.0], dt=0.1, gradient=gradient, method=method)
        loss = h.square().sum()
        expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
        net.last, loss = ((h, m), None) if keeps else ((), loss)
        del net, sde, h, m
        gc.collect()
        if keeps:
            assert freed() is None
        else:
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_torchsdes_adjoint_under_strong_damping():
    """Where its gradient is far off it is refused; from more outputs it is not, nor without a gradient."""
    sde, state = make_sde(damping=10.0, max_damping=20.0), make_state()
    options = {"method": "euler", "gradient": "adjoint", "dt": 0.01, "seed": 0}
    with pytest.raises(
        hbnode.errors.ReversalError, match=r"grow by e\^10 .*Fix: method='ubu' with gradient='checkpoint'"
    ):
        hbnode.sdeint(sde, state, [0.0, 1.0], **options)
    hbnode.sdeint(sde, state, torch.linspace(0, 1, 11), **options)
    with torch.no_grad():
        hbnode.sdeint(sde, state, [0.0, 1.0], **options)


@pytest.mark.parametrize("method", ["ubu", "euler"])
def test_large_times(method):
    """Whole numbers of float32, of which only the fraction of a second is rounded."""
    sde, state = make_sde(), make_state()
    with hbnode.count_nfe(sde) as nfe:
        h, _ = hbnode.sdeint(sde, state, [1.7e9, 1.7e9 + 128], dt=1.0, method=method, seed=0)
        near, _ = hbnode.sdeint(sde, state, [0.0, 128.0], dt=1.0, method=method, seed=0)
    assert nfe.forward == 2 * (128 + (method == "euler"))
    torch.testing.assert_close(h, near)


@pytest.mark.sparse
@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
@pytest.mark.parametrize(  # and the number of steps before each time, which the widest interval decides
    ("t", "ends"), [(ROWS, (0, 4, 8, 13)), (torch.tensor(T), (0, 2, 5, 7))], ids=["rows", "common"]
)
def test_values_and_gradients_are_those_of_the_reference(t, ends, method, gradient):
    """Those of γ and η included, with the noise of each sample and, at times of one's own, its steps."""
    sde, state, options = make_sde(**FINE), make_state(dtype=torch.float64), {"method": method, "dt": 0.25}
    noise = draw(sde, state[0], t, seed=4, **options)
    given, drawn = (
        torch.stack(hbnode.sdeint(sde, state, t, gradient=gradient, **options, **x))
        for x in ({"noise": noise}, {"seed": 4})
    )
    assert torch.equal(given, drawn)
    sizes = noise.sizes.view(len(noise.sizes), -1).expand(-1, 4)
    assert (sizes <= 0.25 + 1e-12).all()
    alone = [
        of_reference(method, sde, (h, m), own, dataclasses.replace(noise, sizes=sizes[:, i], normals=normals), ends)
        for i, (h, m, own, normals) in enumerate(zip(*state, t.expand(4, 4), noise.normals.unbind(2), strict=True))
    ]
    expected = torch.stack(alone, 2)
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)
    inputs = [*state, *sde.parameters()]
    slopes = [torch.autograd.grad(loss(*x), inputs) for x in (given, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-8)


def loss(h, m):
    weights = torch.arange(1, len(h) + 1, dtype=h.dtype).view(-1, *[1] * (h.dim() - 1))
    return (weights * (h.square() + m.sin())).mean()


def gradients(sde, state, **options):
    parameters = [p for p in sde.parameters() if p.requires_grad]
    value = loss(*hbnode.sdeint(sde, state, **options))
    return value.detach(), torch.autograd.grad(value, [*state, *parameters], allow_unused=True)


def flat(gradients):
    return torch.cat([x.reshape(-1) for x in gradients if x is not None])


@pytest.mark.sparse
@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
@pytest.mark.parametrize("t", [ROWS[:2], [0.0, 0.4, 1.0]], ids=["rows", "common"])
def test_channels_of_their_own(t, method, gradient):
    """Images with γ and η for each channel, where f does not mix them, are each channel by itself."""
    found = []
    for damping, temperature in ((torch.tensor([0.2, 0.7]), torch.tensor([0.1, 0.9])), (0.7, 0.9)):
        damping, temperature = (torch.as_tensor(x).view(-1, 1, 1) for x in (damping, temperature))
        sde = hbnode.HeavyBallSDE(nn.Tanh(), damping=damping, temperature=temperature, learn_temperature=True).double()
        state = make_state(2, 2, 3, 3, dtype=torch.float64)
        h = hbnode.sdeint(sde, state, t, method=method, dt=0.1, seed=3, gradient=gradient)[0][:, :, 1]
        slopes = torch.autograd.grad(h.square().sum(), [state[1], sde.omega, sde.log_temperature])
        found.append([h, slopes[0], slopes[1][-1], slopes[2][-1]])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["ubu", "baoab"])
def test_memory(method):
    """Reversible keeps the output alone, checkpoints h and m before each segment and the graph of the first steps."""
    few, many = (kept("reversible", steps, method) for steps in (10, 100))
    assert many == few
    assert many < kept(AGAIN, 100, method) / 3 < kept("direct", 100, method) / 10
    for every in (1, 4) if method == "ubu" else ():
        few, many = (kept(Checkpoint(keep_bytes=0, every=every), steps) for steps in (20, 60))
        assert many - few <= 40 / every * (2 * 64 * 3 * 4 + 64)


@pytest.mark.parametrize("method", ["ubu", "baoab"])
def test_reversible_in_float32(method):
    """Against the direct gradient: undoing the steps multiplies rounding errors by exp(γT), here with γ = 1."""
    sde, state = make_sde(max_damping=2.0, damping=1.0, learn_temperature=True), make_state()
    steps, span = 50, 4.0
    for seed in range(2):
        options = {"t": [0.0, span], "method": method, "dt": span / steps, "seed": seed}
        expected, ours = (flat(gradients(sde, state, gradient=g, **options)[1]) for g in ("direct", "reversible"))
        assert (ours - expected).norm() / expected.norm() <= torch.finfo(torch.float32).eps * math.exp(span)


def kept(gradient, steps, method="ubu"):
    """Bytes of the tensors that the forward pass made and that are alive after it."""
    sde, state = make_sde(learn_temperature=True), make_state(64, 3)
    with Living([*state, *sde.parameters()]) as living:
        value = loss(*hbnode.sdeint(sde, state, [0.0, 1.0], method=method, dt=1 / steps, gradient=gradient, seed=0))
        size = living.size()
    value.backward()
    return size


def test_evaluations_are_counted():
    sde, state = make_sde(**FINE), make_state(dtype=torch.float64)
    once = Checkpoint(keep_bytes=0, every=1)
    for method, gradient, *counts in (  # forward, backward, backward_steps
        ("ubu", "direct", 31, 0, 0),
        ("ubu", "reversible", 32, 31, 31),  # one more, to find what f depends on
        ("baoab", once, 32, 31, 31),
        ("baoab", "reversible", 32, 32, 31),
        ("nystrom4", once, 94, 93, 31),
    ):
        with hbnode.count_nfe(sde) as nfe:
            gradients(sde, state, t=[0.0, 0.5, 1.1, 3.1], method=method, dt=0.1, gradient=gradient)
        assert [nfe.forward, nfe.backward, nfe.backward_steps, nfe.steps] == [*counts, 31], (method, gradient)


# Times of one's own


def of_reference(method, sde, state, t, noise, ends):
    """The trajectories of h and m of one sample by the plain twin, interval by interval."""
    path = [torch.stack(state)]
    for k, start in enumerate(t[:-1]):
        path.append(path[-1])
        if start < t[k + 1]:
            steps = slice(ends[k], ends[k + 1])
            own = dataclasses.replace(noise, sizes=noise.sizes[steps], normals=noise.normals[steps])
            after = reference_sde.solve(method, sde.func, *path[-2], sde.damping, sde.temperature, own, float(start))
            path[-1] = torch.stack(after)
    return torch.stack(path, 1)


@pytest.mark.parametrize(("method", "gradient"), GRADIENTS)
def test_a_sample_does_not_move_between_equal_times(method, gradient):
    """Not by a bit, nor from 0."""
    sde = hbnode.HeavyBallSDE(nn.Tanh(), damping=0.4, learn_temperature=True)
    h, m = torch.zeros(3, 2, requires_grad=True), torch.tensor([[0.0, 1.0]] * 3, requires_grad=True)
    t = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.5, 1.5], [1.0, 1.0, 3.0]])
    options = {"method": method, "gradient": gradient, "dt": 0.5, "seed": 0}
    found = torch.stack(hbnode.sdeint(sde, (h, m), t, **options))
    still = (found[:, 1:] == found[:, :-1]).flatten(3)
    assert torch.equal(still.all(-1).all(0), t.diff().T == 0)
    for x in torch.autograd.grad(found.square().sum(), [h, m, *sde.parameters()]):
        assert torch.isfinite(x).all()
    _, m_end = hbnode.sdeint(sde, (h, m), torch.ones(3, 2), **options)
    assert torch.equal(torch.autograd.grad(m_end[1].sum(), m)[0], torch.ones_like(m))


# Undoing the damping


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 6.7), (torch.float64, 26.8)], ids=["float32", "float64"])
def test_growth_is_refused(dtype, most):
    sde, state = make_sde(dtype, damping=2.0, learn_damping=False), make_state(dtype=dtype)
    options = {"dt": 0.2, "gradient": "reversible"}
    hbnode.sdeint(sde, state, [0.0, most / 2 - 0.05], **options)
    with pytest.raises(hbnode.errors.ReversalError, match=r"reversing the damping .*Fix: gradient='checkpoint'"):
        hbnode.sdeint(sde, state, [0.0, most / 2 + 0.05], **options)
    gradients(sde, state, t=torch.linspace(0, 2 * most, 9), **options)  # starts anew from every output


@pytest.mark.parametrize(("method", "temperature"), [("ubu", 0.0), ("baoab", 0.5)])
def test_a_way_back_to_zero(method, temperature):
    """From rest at 0, where a relative error says nothing; also where the state stays there."""
    zero, slopes = torch.zeros(500, 1), []
    sde = hbnode.HeavyBallSDE(nn.Tanh(), damping=1.0, max_damping=2.0, temperature=temperature)
    for gradient in ("direct", "reversible"):
        solution = hbnode.sdeint(sde, (zero, zero), [0.0, 1.0, 3.0], method=method, dt=0.1, seed=0, gradient=gradient)
        slopes.append(torch.autograd.grad(loss(*solution), sde.omega)[0])
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-5)


def test_a_way_back_that_misses_is_refused():
    sde = hbnode.HeavyBallSDE(lambda h: 30 * torch.sin(8 * h), damping=0.5, temperature=0.1)
    h, m = hbnode.sdeint(sde, make_state(), [0.0, 6.0], dt=0.1, gradient="reversible", seed=0)
    with pytest.raises(hbnode.errors.ReversalError, match=r"the reversed steps miss their start"):
        loss(h, m).backward()


# What f depends on


@pytest.mark.parametrize("gradient", [AGAIN, "reversible"])
def test_leaves_that_f_closes_over(gradient):
    weight, state = torch.randn(3, 3, dtype=torch.float64, requires_grad=True), make_state(dtype=torch.float64)

    def slope(factor, gradient):
        inner = weight if factor == 1 else weight * factor
        sde = hbnode.HeavyBallSDE(lambda h: torch.tanh(h @ inner), damping=0.5).double()
        value = loss(*hbnode.sdeint(sde, state, T, dt=0.1, gradient=gradient, seed=0))
        return torch.autograd.grad(value, weight)[0]

    torch.testing.assert_close(slope(1, gradient), slope(1, "direct"))
    if gradient is AGAIN:
        torch.testing.assert_close(slope(2, gradient), slope(2, "direct"))
    else:
        with pytest.raises(ValueError, match=r"computed outside it.*Fix: use gradient='direct'"):
            slope(2, gradient)


@pytest.mark.parametrize("gradient", [AGAIN, "reversible"])
def test_random_layers_and_buffers(gradient):
    state, options = make_state(dtype=torch.float64), {"t": T, "dt": 0.1, "seed": 0}
    masked = nn.Sequential(nn.Linear(3, 3), hbnode.nn.SolveDropout(0.5))
    noisy = lambda h: h + torch.randn_like(h)
    for func in (masked, noisy) if gradient is AGAIN else (masked,):
        sde, found = hbnode.HeavyBallSDE(func).double(), []
        for mode in ("direct", gradient):
            torch.manual_seed(0)
            found.append(flat(gradients(sde, state, gradient=mode, **options)[1]))
        torch.testing.assert_close(*found)
    refused = {"func changes its buffers.*Fix: put that layer in eval mode": nn.BatchNorm1d(3)}
    if gradient == "reversible":
        refused["func draws random numbers.*Fix: gradient='checkpoint'"] = noisy
    for message, func in refused.items():
        with pytest.raises(ValueError, match=message):
            hbnode.sdeint(hbnode.HeavyBallSDE(func).double(), state, gradient=gradient, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_of_a_gradient(method):
    sde, state = make_sde(**FINE), make_state(dtype=torch.float64)
    found = []
    for gradient in ("direct", AGAIN):
        value = loss(*hbnode.sdeint(sde, state, T, dt=0.05, seed=0, method=method, gradient=gradient))
        (first,) = torch.autograd.grad(value, state[:1], create_graph=True)
        found.append(flat(torch.autograd.grad(first.square().sum(), [*state, *sde.parameters()])))
    torch.testing.assert_close(*found)
    if method != "nystrom4":
        value = loss(*hbnode.sdeint(sde, state, T, dt=0.1, method=method, gradient="reversible"))
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(value, state, create_graph=True)


@pytest.mark.parametrize("gradient", ["direct", AGAIN, "reversible"])
def test_parameters_by_functional_call(gradient):
    """What a step of gradient descent on lent parameters needs."""
    sde, state = make_sde(**FINE), make_state(dtype=torch.float64)
    lent = {name: (1.5 * p).detach().requires_grad_() for name, p in Model(sde).named_parameters()}
    found = []
    for mode in ("direct", gradient):
        value = torch.func.functional_call(Model(sde, gradient=mode), lent, state).square().sum()
        found.append(flat(torch.autograd.grad(value, list(lent.values()))))
    torch.testing.assert_close(*found)
    assert found[0].abs().sum() > 0


def exact_linear_part(gamma, t):
    """a, b, p, q and r in many digits, from the integrals I and J of the noise over e^(-γ(t - s)) and over 1."""
    if not gamma:
        return t, 1, mpmath.sqrt(t), t**2 / 2 / mpmath.sqrt(t), mpmath.sqrt(t**3 / 12)
    a, b = (1 - mpmath.exp(-gamma * t)) / gamma, mpmath.exp(-gamma * t)
    of_i = (1 - b**2) / (2 * gamma)
    of_j = (t - 2 * a + of_i) / gamma**2
    p = mpmath.sqrt(of_i)
    q = a**2 / 2 / p
    return a, b, p, q, mpmath.sqrt(of_j - q**2)


# The coefficients


@pytest.mark.parametrize("z", [0.0, 1e-12, 1e-6, 0.9e-3, 1.1e-3, 0.1, 1.9, 2.1, 30.0, 1e4])
def test_the_linear_part_at_any_damping(z):
    """And its slope."""
    gamma, tau = torch.tensor(z / 0.7, dtype=torch.float64, requires_grad=True), torch.tensor(0.7, dtype=torch.float64)
    found = list(linear_part(gamma, tau))
    with mpmath.workdps(80):
        at, t = mpmath.mpf(gamma.item()), mpmath.mpf(0.7)
        expected = torch.tensor([float(x) for x in exact_linear_part(at, t)], dtype=torch.float64)
        torch.testing.assert_close(torch.stack(found).detach(), expected, rtol=1e-13, atol=1e-300)
        for i, x in enumerate(found if z < 1e3 else ()):
            (slope,) = torch.autograd.grad(x, gamma, retain_graph=True)
            near = at or mpmath.mpf("1e-12")
            derivative = mpmath.diff(lambda g, i=i: exact_linear_part(g, t)[i], near, h=near * mpmath.mpf("1e-20"))
            assert slope.item() == pytest.approx(float(derivative), rel=1e-8, abs=1e-11)


def double_well(damping=1.0, temperature=0.5):
    return hbnode.HeavyBallSDE(lambda h: h - h**3, damping=damping, temperature=temperature, learn_damping=False)


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.sparse
@pytest.mark.parametrize("span", [torch.linspace(0.0, 2.0, 400), torch.tensor(2.0)], ids=["rows", "common"])
@pytest.mark.parametrize(("method", "order", "coarsest"), [("ubu", 2, 8), ("baoab", 1, 8), ("nystrom4", 3, 16)])
def test_strong_order(method, order, coarsest, span):
    """Of h and m at the end, with the noise of a fine path composed again and again."""
    sde, state = double_well(), make_state(400, 1, dtype=torch.float64)
    t = torch.stack([torch.zeros_like(span), span], -1).double()
    noise, ends = draw(sde, state[0], t, dt=2 / 512, method=method, seed=1), []
    while len(noise.sizes) >= coarsest:
        dt = float(noise.sizes.max())
        ends.append([x[-1] for x in hbnode.sdeint(sde, state, t, dt=dt, method=method, noise=noise)])
        noise = noise.coarser()
    for x, *path in zip(*ends, strict=True):
        fine, *_, coarse = (rms(y - x) for y in path[-4:])
        assert math.log2(coarse / fine) / 3 == pytest.approx(order, abs=0.35)


# At temperature 0


@pytest.mark.parametrize(("damping", "temperature"), [(0.6, 0.0), (0.0, 5.0)])
@pytest.mark.parametrize("method", METHODS)
def test_without_noise_it_is_the_ode(method, damping, temperature):
    sde = double_well(damping, temperature)
    state = (torch.linspace(-1.5, 1.5, 5, dtype=torch.float64).unsqueeze(1), torch.ones(5, 1, dtype=torch.float64))
    t, field = [0.0, 0.7, 2.0], hbnode.HBNODE(sde.func, damping=damping, learn_damping=False)
    exact, ours = (torch.stack(hbnode.odeint(f, state, t, rtol=1e-11, atol=1e-11)) for f in (field, sde))
    assert torch.equal(ours, exact)
    errors = [rms(torch.stack(hbnode.sdeint(sde, state, t, method=method, dt=dt)) - exact) for dt in (0.1, 0.05)]
    order = {"ubu": 2, "baoab": 2, "nystrom4": 4}[method]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.3)
