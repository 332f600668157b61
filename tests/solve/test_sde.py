"""HeavyBallSDE and hbnode.sdeint as a stranger calls them, and torchsde's solvers on the SDE."""

import copy
import io
import pickle
import re

import pytest
import torch
import torchsde
from torch import nn

import hbnode
from hbnode.solve.sde import step_seeds
from hbnode.solve.torchsde import STRATONOVICH
from tests.pretend_device import pretended_device

METHODS = ("ubu", "baoab", "nystrom4")
THEIRS = ("euler", "milstein", "srk", "midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")


def make_sde(**options):
    torch.manual_seed(0)
    return hbnode.HeavyBallSDE(hbnode.nn.MLP(3, [8], 3), **{"damping": 0.5, "temperature": 0.3} | options)


def make_state(*shape, dtype=torch.float32):
    torch.manual_seed(1)
    shape = shape or (4, 3)
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


# The field


def test_its_drift_is_the_hbnode():
    sde = make_sde(learn_damping=False)
    field = hbnode.HBNODE(sde.func, damping=0.5, learn_damping=False)
    t, state = torch.tensor(0.3), make_state()
    for x, y in zip(sde(t, state), field(t, state), strict=True):
        assert torch.equal(x, y)
    ours, theirs = (hbnode.odeint(x, state, [0.0, 1.0])[0] for x in (sde, field))
    assert torch.equal(ours, theirs)


def test_temperature_fixed_and_learned():
    fixed, learned = make_sde(temperature=0.25), make_sde(temperature=0.25, learn_temperature=True)
    assert fixed.temperature == 0.25
    assert learned.temperature.item() == pytest.approx(0.25)
    assert "log_temperature" in dict(learned.named_parameters())
    assert fixed.state_dict()["temperature"].item() == 0.25
    other = make_sde(temperature=0.5)
    other.load_state_dict(fixed.state_dict())
    assert other.temperature == 0.25
    channels = make_sde(temperature=torch.tensor([0.1, 0.2, 0.3])).half()
    assert channels.temperature.dtype == torch.float64
    assert "temperature=0.1..0.3 of shape (3,)" in repr(channels)
    assert "temperature=0.25 (learned)" in repr(learned)
    with pytest.raises(ValueError, match=r"temperature must be a number >= 0.*Fix: pass temperature=0.0"):
        make_sde(temperature=-1.0)
    with pytest.raises(ValueError, match=r"a learned temperature must start above 0.*Fix:"):
        make_sde(temperature=0.0, learn_temperature=True)
    with pytest.raises(ValueError, match="sde_type must be"):
        make_sde(sde_type="Ito")


@pytest.mark.parametrize("learn", [True, False])
def test_copies(learn):
    sde, state = make_sde(learn_damping=learn, learn_temperature=learn), make_state()
    expected = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, seed=0)
    file = io.BytesIO()
    torch.save(sde.state_dict(), file)
    file.seek(0)
    loaded = make_sde(damping=0.1, temperature=0.9, learn_damping=learn, learn_temperature=learn)
    loaded.load_state_dict(torch.load(file))
    for other in (copy.deepcopy(sde), pickle.loads(pickle.dumps(sde)), loaded):
        found = hbnode.sdeint(other, state, [0.0, 1.0], dt=0.1, seed=0)
        assert torch.equal(torch.stack(found), torch.stack(expected))


def test_the_diffusion():
    sde, y = make_sde(temperature=torch.tensor([0.0, 0.5, 2.0])), torch.randn(4, 6)
    v = torch.randn(4, 3)
    g = sde.g(torch.zeros(()), y)
    assert g.shape == (4, 6, 3)
    torch.testing.assert_close(g[0, 3:].diagonal(), (2 * 0.5 * torch.tensor([0.0, 0.5, 2.0])).sqrt())
    torch.testing.assert_close(sde.g_prod(torch.zeros(()), y, v), torch.einsum("bij,bj->bi", g, v))
    (gradient,) = torch.autograd.grad(g.sum(), sde.omega)
    assert torch.isfinite(gradient)
    with pytest.raises(ValueError, match=r"even number of columns.*Fix: torch.cat"):
        sde.f(torch.zeros(()), torch.randn(4, 5))


# Calls


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
def test_shapes(method, shape, gradient):
    sde = hbnode.HeavyBallSDE(nn.Tanh(), damping=0.5)
    state = make_state(*shape) if shape else (torch.tensor(1.0), torch.tensor(0.5))
    h, m = hbnode.sdeint(sde, state, [0.0, 0.3, 1.0], dt=0.25, method=method, gradient=gradient, seed=0)
    assert h.shape == m.shape == (3, *shape)
    assert torch.equal(h[0], state[0])
    (h.sum() + m.square().sum()).backward()
    assert torch.isfinite(sde.omega.grad)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "reversible"])
def test_one_time_is_the_start(gradient):
    sde = make_sde()
    h, m = (x.requires_grad_() for x in make_state())
    found = hbnode.sdeint(sde, (h, m), [0.4], dt=0.1, gradient=gradient)
    assert torch.equal(torch.stack(found), torch.stack([h, m]).unsqueeze(1))
    found[0].sum().backward()
    assert torch.equal(h.grad, torch.ones_like(h))


@pytest.mark.parametrize("method", METHODS)
def test_steps_end_on_the_output_times(method):
    """More outputs change nothing if they are ends of steps; steps are never longer than dt."""
    sde, state = make_sde(), make_state(dtype=torch.float32)
    few = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.25, method=method, seed=0)
    many = hbnode.sdeint(sde, state, [0.0, 0.25, 0.5, 1.0], dt=0.25, method=method, seed=0)
    for x, y in zip(few, many, strict=True):
        torch.testing.assert_close(x[-1], y[-1])
    with hbnode.diagnostics.record_steps(sde) as steps:
        hbnode.sdeint(sde, state, [0.0, 0.1, 1.0], dt=0.3, method=method)
    assert steps.size == pytest.approx([0.1, 0.3, 0.3, 0.3])


def test_seeds():
    sde, state = make_sde(), make_state()

    def end(**options):
        return hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, **options)[0][-1]

    assert torch.equal(end(seed=3), end(seed=3))
    assert not torch.allclose(end(seed=3), end(seed=4))
    torch.manual_seed(0)
    first, second = end(), end()
    torch.manual_seed(0)
    assert torch.equal(end(), first)
    assert not torch.allclose(first, second)
    state_before = torch.get_rng_state()
    end(seed=3)
    assert torch.equal(torch.get_rng_state(), state_before)
    assert torch.isfinite(end(seed=2**63)).all()


def test_the_noise_of_a_seed_stays_the_same():
    """From one version to the next."""
    assert step_seeds(5, 3).tolist() == [9032386870367886174, 9032386870255349748, 9032386868761174387]
    noise = hbnode.solve.BrownianIncrements.draw(make_sde(), torch.zeros(1), [0.0, 1.0], dt=0.5, method="baoab", seed=5)
    torch.testing.assert_close(noise.normals.flatten(), torch.tensor([-0.20076655, -0.47008884]))


def test_normals_of_steps_are_independent():
    """Of neighbouring steps and seeds: correlations within four standard errors."""
    sde, h = make_sde(), torch.zeros(20_000, 1)
    draws = [
        hbnode.solve.BrownianIncrements.draw(sde, h, [0.0, 1.0], dt=0.125, method="baoab", seed=seed).normals.flatten(1)
        for seed in (0, 1)
    ]
    rows = torch.cat(draws)
    correlations = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlations.abs().max() < 4.5 / 20_000**0.5
    assert (rows.mean(1).abs() < 4.5 / 20_000**0.5).all()


def test_given_noise():
    sde, state, t = make_sde(), make_state(), [0.0, 0.5, 1.0]
    for method in METHODS:
        options = {"method": method, "dt": 0.125}
        noise = hbnode.solve.BrownianIncrements.draw(sde, state[0], t, seed=5, **options)
        drawn, given = (hbnode.sdeint(sde, state, t, **options, **x) for x in ({"seed": 5}, {"noise": noise}))
        assert torch.equal(torch.stack(drawn), torch.stack(given))
        half = noise.coarser()
        assert half.sizes.tolist() == [0.25] * 4
        assert half.normals.dtype == torch.float32
        assert torch.isfinite(torch.stack(hbnode.sdeint(sde, state, t, method=method, dt=0.25, noise=half))).all()
        with pytest.raises(ValueError, match=r"the noise has 4 steps, and t and dt make 8.*Fix: dt="):
            hbnode.sdeint(sde, state, t, noise=half, **options)
        with pytest.raises(ValueError, match=r"steps of unlike size cannot be composed"):
            hbnode.solve.BrownianIncrements.draw(sde, state[0], [0.0, 0.3, 1.0], dt=1.0, method=method).coarser()
        with pytest.raises(ValueError, match=r"the noise has 1 steps.*expected an even number"):
            half.coarser().coarser().coarser()
        with pytest.raises(ValueError, match=r"noise.normals has shape .*Fix: BrownianIncrements.draw"):
            hbnode.sdeint(sde, make_state(2, 3), t, noise=noise, **options)
    with pytest.raises(ValueError, match=r"the noise is for method='nystrom4'"):
        hbnode.sdeint(sde, state, t, dt=0.125, noise=noise)
    with pytest.raises(ValueError, match=r"noise is for one of .*Fix: method='baoab'"):
        hbnode.solve.BrownianIncrements.draw(sde, state[0], t, dt=0.1, method="boaab")


def test_composed_variables_are_independent_and_normal():
    sde, h = make_sde(damping=0.9), torch.zeros(40_000, 1, dtype=torch.float64)
    for method in METHODS:
        noise = (
            hbnode.solve.BrownianIncrements.draw(sde, h, [0.0, 4.0], dt=0.5, method=method, seed=1).coarser().coarser()
        )
        rows = noise.normals.flatten(0, 1).squeeze(-1)
        expected = torch.eye(len(rows), dtype=torch.float64)
        torch.testing.assert_close(rows @ rows.T / len(h), expected, rtol=0.0, atol=4.5 * (2 / len(h)) ** 0.5)


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"method": "UBUU"}, ValueError, "Fix: method='ubu'"),
        ({"method": "eulr"}, ValueError, "Fix: method='euler'"),
        ({"gradient": "adjoint"}, ValueError, "Fix: gradient='checkpoint'"),
        ({"method": "nystrom4", "gradient": "reversible"}, ValueError, "Fix: method='ubu' with gradient='reversible'"),
        ({"method": "srk", "gradient": "checkpoint"}, ValueError, "expected one of ('direct', 'adjoint')"),
        ({"dt": 0.0}, ValueError, "dt must be a positive number"),
        ({"dt": None}, ValueError, "dt must be a positive number"),
        ({"dt": 1e-12}, ValueError, "Fix: dt=2e-07 or longer"),
        ({"dt": 1e-12, "method": "euler"}, ValueError, "Fix: dt=2e-07 or longer"),
        ({"t": [1.0, 0.0]}, ValueError, "t[0]=1 is followed by t[1]=0. Fix: sort the times"),
        ({"t": [0.0, 0.0]}, ValueError, "Fix: sort the times"),
        ({"t": torch.tensor([0.0, 1.0], requires_grad=True)}, ValueError, "Fix: t.detach()"),
        ({"t": 1.0}, TypeError, "Fix: [0.0, 1.0]"),
        ({"t": torch.tensor([[0.0, 1.0], [0.0, 2.0]])}, ValueError, "Fix: solve at all times of all samples"),
        ({"seed": -1}, ValueError, "seed must be an integer >= 0"),
        ({"seed": 2**64 + 1}, ValueError, "seed must be below 2**64, got 18446744073709551617. Fix: seed=1"),
        ({"noise": torch.zeros(3)}, TypeError, "Fix: hbnode.solve.BrownianIncrements.draw(...)"),
        ({"y0": torch.zeros(4, 3)}, TypeError, "Fix: field.initial_state(x) makes it"),
        ({"y0": [torch.zeros(4, 3)] * 2}, TypeError, "Fix: tuple(y0)"),
        ({"y0": (torch.zeros(4, 3), torch.zeros(4, 2))}, ValueError, "h and m must have one shape"),
        ({"y0": (torch.zeros(4, 3).double(),) * 2}, TypeError, "expected one dtype"),
        ({"sde": hbnode.HBNODE(nn.Tanh())}, TypeError, "Fix: hbnode.HeavyBallSDE(func)"),
        ({"sde": make_sde(temperature=torch.ones(2))}, ValueError, "does not broadcast to that of h"),
        ({"sde": make_sde(temperature=torch.ones(2)), "method": "srk"}, ValueError, "does not broadcast to that of h"),
        ({"sde": hbnode.HeavyBallSDE(lambda h: h.neg_())}, ValueError, "let func work on h.clone()"),
        ({"sde": hbnode.HeavyBallSDE(lambda h: h.neg_()), "method": "srk"}, ValueError, "let func work on h.clone()"),
        ({"sde": hbnode.HeavyBallSDE(nn.Linear(3, 2))}, ValueError, "expected a tensor of the shape of h"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)
def test_wrong_calls_say_what_to_do(options, error, fix):
    call = {"sde": make_sde(), "y0": make_state(), "t": [0.0, 1.0], "dt": 0.1} | options
    sde, y0, t = (call.pop(name) for name in ("sde", "y0", "t"))
    with pytest.raises(error, match=re.escape(fix)):
        hbnode.sdeint(sde, y0, t, **call)


def test_strong_damping():
    """UBU and BAOAB keep the law of m whatever γ is; the third refuses steps that are too long for it."""
    zero = torch.zeros(20_000, 1)
    for damping in (1e3, 1e6):
        sde = hbnode.HeavyBallSDE(lambda h: -h, damping=damping, temperature=0.5, learn_damping=False)
        for method in ("ubu", "baoab"):
            _, m = hbnode.sdeint(sde, (zero, zero), [0.0, 1.0], method=method, dt=0.1, seed=0)
            assert abs(m[-1].var() - 0.5) < 0.02
        with pytest.raises(ValueError, match=r"needs steps of at most 2/γ.*Fix: dt=0\.\d+|Fix: dt=2e-06"):
            hbnode.sdeint(sde, (zero, zero), [0.0, 1.0], method="nystrom4", dt=0.1)


def test_values_that_are_not_finite():
    sde, state = hbnode.HeavyBallSDE(lambda h: 1e3 * h**3), make_state()
    for method in (*METHODS, "euler"):
        with pytest.raises(hbnode.errors.NonFiniteError, match="smaller dt") as caught:
            hbnode.sdeint(sde, state, [0.0, 1.0, 2.0], dt=0.25, method=method, seed=0)
        assert 0 <= caught.value.t <= 2
        assert caught.value.step_size == 0.25
        assert caught.value.nfe > 0
    with pytest.raises(hbnode.errors.NonFiniteError, match="the initial state is not finite"):
        hbnode.sdeint(make_sde(), (state[0] * float("nan"), state[1]), [0.0, 1.0], dt=0.1)
    late = hbnode.HeavyBallSDE(lambda t, h: -h / (t < 0.62))
    with pytest.raises(hbnode.errors.NonFiniteError) as caught:
        hbnode.sdeint(late, state, [0.0, 1.0], dt=0.1)
    assert caught.value.t == pytest.approx(0.65)  # in the middle of the step, where f is evaluated


def test_signals_and_their_ends():
    signal = hbnode.Signal(torch.linspace(0, 1, 5), torch.ones(5))
    sde = hbnode.HeavyBallSDE(lambda t, h: signal(t) - h)
    assert torch.isfinite(hbnode.sdeint(sde, make_state(), [0.0, 1.0], dt=0.1)[0]).all()
    for method in ("ubu", "srk"):
        with pytest.raises(ValueError, match=r"the signal was asked for t=1\."):
            hbnode.sdeint(sde, make_state(), [0.0, 2.0], dt=0.1, method=method)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "reversible"])
def test_autocast(gradient):
    sde, state = make_sde(), make_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, m = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, gradient=gradient, seed=0)
    assert h.dtype == torch.float32
    (h.sum() + m.sum()).backward()
    plain, _ = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, seed=0)
    torch.testing.assert_close(h, plain, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    sde, state = make_sde().to(dtype), make_state(dtype=dtype)
    for method in METHODS:
        h, _ = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.25, method=method, seed=0)
        assert h.dtype == dtype
        assert torch.isfinite(h).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_inside_of_torch_compile():
    sde, state = make_sde(), make_state()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.sde = sde

        def forward(self, h, m):
            h, m = hbnode.sdeint(self.sde, (2 * h, m), [0.0, 1.0], dt=0.1, seed=0, gradient="checkpoint")
            return h[-1] + 1

    model = Model()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(*state), model(*state))
    compiled(*state).sum().backward()
    whole = torch.compile(sde, backend="eager")
    expected = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, seed=0)
    torch.testing.assert_close(hbnode.sdeint(whole, state, [0.0, 1.0], dt=0.1, seed=0), expected)


def test_vmap_over_the_state():
    sde, (h, m) = make_sde(), make_state(5, 4, 3)
    noise = hbnode.solve.BrownianIncrements.draw(sde, h[0], [0.0, 1.0], dt=0.25, seed=0)
    solve = lambda h, m: hbnode.sdeint(sde, (h, m), [0.0, 1.0], dt=0.25, noise=noise)[0]
    torch.testing.assert_close(torch.vmap(solve)(h, m), torch.stack([solve(*pair) for pair in zip(h, m, strict=True)]))
    slope = torch.func.grad(lambda h: solve(h, m[0]).sum())(h[0])
    assert torch.isfinite(slope).all()
    with pytest.raises(ValueError, match=r"transforms of torch.func.*Fix: gradient='direct'"):
        torch.func.grad(lambda h: hbnode.sdeint(sde, (h, m[0]), [0.0, 1.0], dt=0.25, gradient="checkpoint")[0].sum())(
            h[0]
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "reversible"])
def test_on_a_device(method, gradient):
    if (method, gradient) == ("nystrom4", "reversible"):
        return
    with pretended_device() as device:
        sde = device.move(make_sde(learn_temperature=True))
        h, m = (device.move(x).requires_grad_() for x in make_state())
        before = device.synchronisations
        found = hbnode.sdeint(sde, (h, m), [0.0, 0.5, 1.0], dt=0.1, method=method, gradient=gradient, seed=0)
        torch.stack(found).square().sum().backward()
        waited = device.synchronisations - before
        for x in (*found, h.grad, sde.omega.grad, sde.log_temperature.grad):
            assert x.is_cuda
    assert waited <= 6


# torchsde


@pytest.mark.parametrize("method", THEIRS)
def test_torchsdes_solvers(method):
    """Each runs on the SDE, through torchsde and through us, and agrees with UBU in law."""
    sde_type = "stratonovich" if method in STRATONOVICH else "ito"
    sde = hbnode.HeavyBallSDE(lambda h: -h, damping=1.0, temperature=0.5, learn_damping=False, sde_type=sde_type)
    torch.manual_seed(0)
    h, m = torch.ones(2000, 1), torch.zeros(2000, 1)
    y = torchsde.sdeint(sde, torch.cat([h, m], -1), torch.tensor([0.0, 1.0]), method=method, dt=0.1)
    ours, _ = hbnode.sdeint(sde, (h, m), [0.0, 1.0], method=method, dt=0.1, seed=0)
    exact, _ = hbnode.sdeint(sde, (h, m), [0.0, 1.0], dt=0.02, seed=0)
    for end in (y[-1, :, :1], ours[-1]):
        assert abs(end.mean() - exact[-1].mean()) < 0.06
        assert abs(end.std() / exact[-1].std() - 1) < 0.12


@pytest.mark.parametrize("method", THEIRS)
@pytest.mark.parametrize("gradient", ["direct", "adjoint"])
def test_torchsdes_gradients(method, gradient):
    sde = make_sde(learn_temperature=True)
    state = tuple(x.requires_grad_() for x in make_state(2, 3))
    with hbnode.count_nfe(sde) as nfe:
        h, m = hbnode.sdeint(sde, state, [0.0, 0.5, 1.0], method=method, dt=0.125, gradient=gradient, seed=0)
        (h.square().sum() + m.square().sum()).backward()
    assert h.shape == (3, 2, 3)
    assert nfe.forward >= 8
    assert (nfe.backward > 0) == (gradient == "adjoint")
    for x in (*state, *sde.parameters()):
        assert torch.isfinite(x.grad).all()
        assert x.grad.abs().sum() > 0


def test_torchsdes_adjoint_under_strong_damping():
    """Where its gradient is far off it is refused; short of that it is not, nor without a gradient."""
    sde, state = make_sde(damping=10.0, max_damping=20.0), make_state()
    options = {"method": "euler", "gradient": "adjoint", "dt": 0.01, "seed": 0}
    with pytest.raises(
        hbnode.errors.ReversalError, match=r"grow by e\^10 .*Fix: method='ubu' with gradient='checkpoint'"
    ):
        hbnode.sdeint(sde, state, [0.0, 1.0], **options)
    with torch.no_grad():
        hbnode.sdeint(sde, state, [0.0, 1.0], **options)
    found = []
    for gradient in ("direct", "adjoint"):
        h, _ = hbnode.sdeint(sde, state, torch.linspace(0, 1, 11), **options | {"gradient": gradient})
        found.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(h[-1].square().sum(), [*sde.parameters()])]))
    assert (found[1] - found[0]).norm() / found[0].norm() < 0.2


def test_a_seed_with_torchsde():
    sde, state = make_sde(), make_state()
    one, two, other = (hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, method="srk", seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)
    noise = hbnode.solve.BrownianIncrements.draw(sde, state[0], [0.0, 1.0], dt=0.1)
    with pytest.raises(ValueError, match=r"noise is for .*Fix: torchsde.sdeint"):
        hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, method="srk", noise=noise)
    with pytest.raises(ValueError, match="Fix: leave seed out"):
        hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.1, seed=1, noise=noise)


def test_hooks_are_not_missed():
    sde = make_sde()
    sde.register_forward_hook(lambda module, args, value: value)
    with pytest.raises(ValueError, match=r"has hooks or a forward of its own.*Fix: put them into func"):
        hbnode.sdeint(sde, make_state(), [0.0, 1.0], dt=0.1)


def test_wrong_constants_say_what_to_do():
    for name in ("temperature", "damping"):
        with pytest.raises(TypeError, match=rf"{name} must be a number or a tensor, got 'hot'.*Fix: {name}="):
            hbnode.HeavyBallSDE(nn.Tanh(), **{name: "hot"})
    with pytest.raises(TypeError, match="temperature must be a number or a tensor, got None"):
        hbnode.HeavyBallSDE(nn.Tanh(), temperature=None)
    with pytest.raises(TypeError, match=r"got Tanh. Fix: hbnode.HeavyBallSDE\(func\)"):
        hbnode.solve.BrownianIncrements.draw(nn.Tanh(), torch.zeros(1), [0.0, 1.0], dt=0.1)


@pytest.mark.parametrize("start", [0.0, 1e6, 1e7, 1.7e9])
@pytest.mark.parametrize("method", ["ubu", "euler"])
def test_large_times(start, method):
    """Whole numbers of float32, of which only the fraction of a second is rounded."""
    sde, state = make_sde(), make_state()
    with hbnode.count_nfe(sde) as nfe:
        h, _ = hbnode.sdeint(sde, state, [start, start + 128], dt=1.0, method=method, seed=0)
        near, _ = hbnode.sdeint(sde, state, [0.0, 128.0], dt=1.0, method=method, seed=0)
    assert nfe.forward == 2 * (128 + (method == "euler"))
    torch.testing.assert_close(h, near)
