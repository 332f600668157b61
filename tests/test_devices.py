"""Every public entry point on a pretended device: nothing mixes devices, and how often the host waits is counted."""

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils._python_dispatch import TorchDispatchMode

import hbnode
from hbnode import _torch
from hbnode._tree import parts
from hbnode.solve.methods import METHODS as NATIVE
from hbnode.solve.methods import Explicit
from tests.models import AGAIN, SHAPES, every_field, make_field, make_input
from tests.momentum_layers import GRID, kind
from tests.pretend_device import pretended_device

ADAPTIVE = [name for name, method in NATIVE.items() if isinstance(method, Explicit)]
REVERSIBLE = [name for name, method in NATIVE.items() if method.is_reversible]
A_SOLVE = 3  # synchronisations beside those of its steps: damping, first step, gradient of the damping
A_LOOK = 1  # for forces to come, where the first guess rests on nothing


@pytest.fixture
def device():
    with pretended_device() as device:
        yield device


def train(device, block, *arguments):
    """The output of a block and its gradients, all of them there; (counts, synchronisations)."""
    x = device.move(torch.randn(SHAPES["vector"])).requires_grad_()
    before = device.synchronisations
    y = block(x, *arguments)
    y.square().sum().backward()
    waited = device.synchronisations - before
    for tensor in (y, x.grad, *(p.grad for p in block.parameters() if p.grad is not None)):
        assert tensor.is_cuda
    assert any(p.grad is not None for p in block.parameters())
    return block.nfe, waited


def attempts(nfe):
    return nfe.steps + nfe.rejected


# The device itself


def test_the_device_refuses_to_mix_and_counts(device):
    x = device.move(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"shape \(3,\) is on the CPU"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).is_cuda
    assert torch.tensor([1.0], device=x.device).is_cuda
    assert x[torch.tensor([0])].is_cuda
    assert not device.synchronisations
    for wait in (lambda z: z.tolist(), torch.Tensor.cpu, torch.nonzero, lambda z: float(z[0, 0]), lambda z: z[z > 0]):
        before = device.synchronisations
        wait(x)
        assert device.synchronisations == before + 1


# Solves


@pytest.mark.sparse
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", [None, *ADAPTIVE])
def test_an_adaptive_solve_waits_once_for_each_step(device, method, per_sample):
    field = make_field("hbnode").float()
    block = hbnode.ODEBlock(field, method=method, per_sample=per_sample, rtol=1e-2, atol=1e-2)
    nfe, waited = train(device, device.move(block), [0.0, 1.0, 3.0])
    assert waited <= attempts(nfe) + A_SOLVE + A_LOOK


def test_recording_and_times_of_each_sample(device):
    """Recording the steps waits only where each sample has its own; the times of each sample are copied once."""
    block = device.move(hbnode.ODEBlock(make_field("hbnode").float(), per_sample=True, rtol=1e-2, atol=1e-2))
    t = device.move(torch.rand(3, 9).cumsum(1)).requires_grad_()
    nfe, waited = train(device, block, t)
    assert t.grad.is_cuda
    assert waited <= attempts(nfe) + A_SOLVE + A_LOOK + 1
    for waits, block.per_sample in ((4, True), (1, False)):
        with hbnode.diagnostics.record_steps(block) as steps:
            nfe, waited = train(device, block, [0.0, 1.0, 3.0])
        assert len(steps) >= nfe.steps
        assert waited <= attempts(nfe) * waits + A_SOLVE + A_LOOK


@pytest.mark.sparse
@every_field
@pytest.mark.parametrize(
    "gradient", ["direct", "checkpoint", AGAIN, "adjoint"], ids=["direct", "kept", "again", "adjoint"]
)
def test_every_model_and_gradient(device, model, gradient):
    block = hbnode.ODEBlock(make_field(model).float(), rtol=1e-2, atol=1e-2, gradient=gradient)
    nfe, waited = train(device, device.move(block))
    backward = nfe.backward_steps + nfe.backward_rejected + A_SOLVE if gradient == "adjoint" else 0
    again = nfe.backward_steps if gradient is AGAIN else 0  # each looks whether it ended where it did before
    assert waited <= attempts(nfe) + A_SOLVE + A_LOOK + backward + again


@pytest.mark.parametrize(
    ("method", "gradient"),
    [*((m, "checkpoint") for m in ADAPTIVE), ("nystrom4", AGAIN), *((m, "reversible") for m in REVERSIBLE)],
    ids=lambda x: "again" if x is AGAIN else x,
)
def test_a_fixed_grid_waits_for_its_end_alone(device, method, gradient):
    block = hbnode.ODEBlock(make_field("hbnode").float(), method=method, gradient=gradient, steps=5)
    _, waited = train(device, device.move(block))
    looks = {"reversible": 1, AGAIN: 2}.get(gradient, 0)  # whether it came back to the start, or ended as before
    assert waited <= A_SOLVE + looks


class Products(TorchDispatchMode):
    """Lists the matrix products of float32 tensors that are not on the CPU; those of float64 are exact."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func._schema.name in ("aten::mm", "aten::bmm", "aten::mv", "aten::addmm")
            and args[0].is_cuda
            and args[0].dtype == torch.float32
        ):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("damping", "per_sample"), [(0.3, False), (torch.rand(4), True)])
def test_the_state_is_in_no_matrix_product(device, damping, per_sample):
    """Which may be rounded to TF32, as is meant for networks; sums give the same numbers."""
    block = hbnode.HeavyBallODEBlock(nn.Tanh(), damping=damping, learn_damping=False, per_sample=per_sample)
    x, times = torch.randn(3, 4), torch.linspace(0, 1, 9)
    expected = block(x, times)
    with Products() as products:
        found = device.move(block)(device.move(x), times)
    assert not products.found
    torch.testing.assert_close(found.values_on_cpu, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", [{}, {"method": "dopri5"}], ids=str)
def test_an_integral_along_the_path_and_states_of_unlike_shapes(device, solver):
    net = nn.Sequential(nn.Linear(3, 3), hbnode.nn.SolveDropout(0.5))
    block = device.move(hbnode.HeavyBallODEBlock(net, rtol=1e-2, atol=1e-2, **solver))
    x = device.move(torch.randn(2, 3))
    h, q = block.with_integral(x, lambda t, state, dh: dh[0].square().sum(1))
    q.sum().backward()
    y0 = (device.move(torch.ones(2, 3)), device.move(torch.ones(2)))
    ends = hbnode.odeint(lambda t, y: (-y[0] * t, -y[1]), y0, [0.0, 1.0], **solver)
    assert all(part.is_cuda for part in (h, q, *block.trajectory(x), *ends))


def test_images(device):
    block = device.move(hbnode.ODEBlock(make_field("ghbnode", "image").float(), method="tsit5", steps=2))
    assert block(device.move(make_input("image", torch.float32))).is_cuda


def test_diagnostics_and_plots(device):
    """Their numbers end on the host."""
    plt = pytest.importorskip("matplotlib.pyplot")
    block = device.move(hbnode.ODEBlock(make_field("hbnode").float(), method="tsit5", steps=2))
    x, plot = device.move(make_input("vector", torch.float32)).requires_grad_(), hbnode.diagnostics.plot
    assert hbnode.diagnostics.adjoint_norms(block, x).h[0] > 0
    assert hbnode.diagnostics.spectrum(block, x).eigenvalues.is_cpu
    drawn = [
        plot.trajectories(block(x, [0.0, 0.5, 1.0]), [0.0, 0.5, 1.0]),
        plot.phase_portrait(block, x),
        plot.vector_field(block, at=parts(block.start(x))[0][0]),
        plot.steps(block, x),
    ]
    plt.close("all")
    block.method = block.steps = None
    assert hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-2], reference_tolerance=1e-6).error[0] < 1e-2
    assert all(ax.lines or ax.collections for ax in drawn)


# Without float64


def test_no_square_overflows_in_a_root_mean_square():
    large = torch.tensor([[3e30, -4e30], [0.0, 0.0], [3e-30, 4e-30], [1.0, torch.inf]])
    expected = large.double().square().mean(1).sqrt()
    torch.testing.assert_close(_torch.root_mean_square(large, (1,)), expected, rtol=1e-12, atol=0)
    with pretended_device(float64=False) as device:
        found = _torch.root_mean_square(device.move(large), (1,)).values_on_cpu
        assert _torch.root_mean_square(device.move(large[:0]), (0, 1)).values_on_cpu == 0
        each = _torch.root_mean_square(device.move(x := torch.rand(2, 3, 4)), (0, 2)).values_on_cpu
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(each, x.square().mean((0, 2)).sqrt())


def values_of(model, *inputs):
    if isinstance(model, hbnode.HeavyBallODEBlock):
        return [model(*inputs)]
    x, t, mask = inputs
    output, state = model(x, t, mask=mask)
    return [output, model.forecast(state, [0.1, 0.5])[0]]


@pytest.mark.parametrize(
    "options",
    [
        {"rtol": 1e-2}, {"rtol": 1e-2, "per_sample": True}, {"damping": 0.3, "learn_damping": False, "steps": 4},
        {"rtol": 1e-2, "method": "dopri5"}, {"field": "ghbnode"}, {"field": "node", "per_sample": False},
    ],
    ids=str,
)  # fmt: skip
def test_models_train_on_a_device_without_float64(options):
    if "field" in options:
        model = hbnode.ODERNN(3, 8, missing="decay", time_unit=2.0, **options)
        inputs = torch.randn(4, 6, 3), torch.rand(4, 6).cumsum(1), torch.rand(4, 6, 3) > 0.2
    else:
        model, inputs = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), **options), (torch.randn(3, 4),)

    def values_and_gradients(*inputs):
        found = values_of(model, *inputs)
        return [*found, *torch.autograd.grad(sum(y.square().sum() for y in found), list(model.parameters()))]

    expected = values_and_gradients(*inputs)
    with pretended_device(float64=False) as device:
        device.move(model)
        found = [z.values_on_cpu for z in values_and_gradients(*map(device.move, inputs))]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# Signals


def driven(device, kind="linear", ahead=0.0, **options):
    """A block whose func asks a signal on [0, 1] for the time so far ahead; the signal is closed over."""
    t = torch.linspace(0, 1, 3)
    signal = hbnode.Signal(device.move(t), device.move(t.sin()), kind)
    func = nn.Linear(4, 4)
    field = hbnode.HBNODE(lambda t, h: func(h) + signal(t + ahead), damping=0.1, learn_damping=False)
    field.func_of = device.move(func)  # a parameter to differentiate
    return hbnode.ODEBlock(field, rtol=1e-2, atol=1e-2, **options)


METHODS = {
    "adaptive": {},
    "sample": {"per_sample": True},
    "again": {"gradient": AGAIN},
    "adjoint": {"gradient": "adjoint"},
    "reversible": {"method": "leapfrog", "gradient": "reversible", "steps": 4},
    "dopri5": {"method": "dopri5", "save": "exact"},
}


@pytest.mark.parametrize(("name", "kind"), [*zip(METHODS, ["linear", "cubic"] * 3, strict=True)])
def test_a_signal_waits_for_nothing_and_is_not_extrapolated_in_silence(device, monkeypatch, name, kind):
    waited, forward = [], hbnode.Signal.forward

    def watched(signal, t):
        before = device.synchronisations
        u = forward(signal, t)
        waited.append(device.synchronisations - before)
        return u

    monkeypatch.setattr(hbnode.Signal, "forward", watched)
    nfe, in_all = train(device, driven(device, kind, **METHODS[name]))
    assert len(waited) == nfe.total
    assert not any(waited)
    if name in ("adaptive", "sample"):
        assert in_all <= attempts(nfe) + A_SOLVE + A_LOOK
    if name != "adjoint":
        with pytest.raises(ValueError, match=r"the signal was evaluated at t=1\..*outside its sample times \[0, 1\]"):
            driven(device, ahead=0.3, **METHODS[name])(device.move(torch.randn(3, 4)))


def test_a_solve_within_a_solve_hides_no_query_outside(device):
    signal = hbnode.Signal(device.move(torch.tensor([0.0, 1.0])), device.move(torch.tensor([3.0, 5.0])))
    with pytest.raises(ValueError, match=r"evaluated at t=1\.5"):  # outside of a solve at once
        signal(device.move(torch.tensor([0.5, 1.5])))

    def force(t, h):
        value = signal(t).expand_as(h)
        hbnode.odeint(lambda t, y: -y, torch.ones_like(h), [0.0, 1.0], steps=1)
        return value

    start = device.move(torch.zeros(1, 1)), device.move(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="outside its sample times"):
        hbnode.odeint(hbnode.HBNODE(force, damping=0.1, learn_damping=False), start, [0.0, 2.0], steps=4)


# Sequences


@pytest.mark.parametrize("per_sample", [False, True])
def test_an_ode_rnn_waits_once_for_each_step(device, per_sample):
    rnn = device.move(hbnode.ODERNN(3, 8, field="hbnode", rtol=1e-2, atol=1e-2, per_sample=per_sample))
    x, t = device.move(torch.randn(4, 6, 3)), device.move(torch.rand(4, 6).cumsum(1))
    mask = device.move(torch.rand(4, 6) > 0.2)
    output, state = rnn(x, t, mask=mask, lengths=torch.tensor([6, 5, 3, 1]))
    taken = attempts(rnn.nfe)
    output.square().sum().backward()
    ahead, _ = rnn.forecast(state, [0.1, 0.5])
    taken += attempts(rnn.nfe)
    assert ahead.is_cuda
    assert rnn.cell.weight_hh.grad.is_cuda
    starts = 7 * 2  # a gap is a solve of its own: norms choose its first step, and γ learns
    assert device.synchronisations <= taken + 2 * A_SOLVE + starts


def test_an_ode_rnn_with_all_its_options(device):
    options = {"missing": "decay", "mask_features": True, "elapsed_features": True, "static_size": 2}
    rnn = device.move(hbnode.ODERNN(3, 8, num_layers=2, dropout=0.5, time_unit=5.0, **options))
    x, t = device.move(torch.randn(4, 6, 3)), device.move(torch.rand(4, 6).cumsum(1))
    rnn.fit_time_unit(t)
    scale = device.move(hbnode.nn.Standardize(3)).fit(x)
    mask, static = device.move(torch.rand(4, 6, 3) > 0.5), device.move(torch.randn(4, 2))
    lengths = torch.tensor([6, 5, 3, 1])
    output, _ = rnn(scale(x), t, mask=mask, lengths=lengths, static=static)
    output.square().sum().backward()
    assert rnn.inputs.rate.grad.is_cuda
    starts = 2 * 7  # of the gaps of two layers, as above
    assert device.synchronisations <= attempts(rnn.nfe) + 4 * A_SOLVE + 3 + starts  # two fits; static is checked
    assert hbnode.diagnostics.saturation(rnn, scale(x), t, static=static)["ODERNN"] < 0.1
    both = device.move(hbnode.ODERNN(3, 8, bidirectional=True, options={"step_size": 0.5}))
    packed = [nn.utils.rnn.pack_padded_sequence(z, lengths, batch_first=True) for z in (x, t)]
    assert both(*packed)[0].data.is_cuda


# Recurrent layers


@pytest.mark.parametrize(("cell", "rule"), GRID[:-1])
def test_recurrent_layers_and_cells(device, cell, rule):
    layer, one = (device.move(kind(cell, suffix=suffix)(3, 5, rule=rule)) for suffix in ("", "Cell"))
    x = device.move(torch.randn(7, 2, 3)).requires_grad_()
    output, state = layer(x)
    output.square().sum().backward()
    assert device.synchronisations <= 2
    h, of_cell = one(x[0])
    assert all(y.is_cuda for y in (x.grad, layer(x[:2], state)[0], h, one(x[1], of_cell)[0]))


# Optimizers


@pytest.mark.parametrize("make", [hbnode.nn.TanhRNN, nn.LSTM])
def test_hessian_free_waits_once_for_each_iteration(device, make):
    layer, readout = device.move(make(3, 5)), device.move(nn.Linear(5, 2))
    x, y = device.move(torch.randn(7, 2, 3)), device.move(torch.randint(2, (7, 2)))
    optimizer = hbnode.optim.HessianFree(
        [*layer.parameters(), *readout.parameters()],
        loss="cross_entropy", structural_damping=0.1, preconditioner_samples=2, case_dim=1,
    )  # fmt: skip

    def evaluate():
        h, _ = layer(x)
        return readout(h), y, hbnode.optim.tanh_hidden(h)

    assert optimizer.step(evaluate).item() > 0
    before = device.synchronisations
    optimizer.step(evaluate)
    assert device.synchronisations - before <= optimizer.progress.cg_iterations + 60


@pytest.mark.parametrize("checkpoint", [False, True])
def test_annealing_waits_for_its_bound_alone(device, checkpoint):
    zeros = device.move(torch.zeros(2))
    prior = Independent(Normal(zeros, zeros + 1, validate_args=False), 1, validate_args=False)
    options = {"force": nn.Linear(2, 2), "checkpoint": checkpoint}
    annealing = hbnode.distributions.HeavyBallAnnealing(lambda x: -x.pow(4).sum(-1), prior, 5, **options)
    device.move(annealing)
    before = device.synchronisations
    annealing.bound(3).backward()
    assert device.synchronisations - before <= 2  # are the weights finite, is the bound
    assert all(p.grad.is_cuda for p in annealing.parameters())
    assert all(part.is_cuda for part in (*annealing.sample(3), *annealing.log_z(3)))


@pytest.mark.parametrize(("discretization", "input"), [("exact", "impulse"), ("imex", "hold")])
def test_oscillators_wait_for_checks_and_for_the_kinds_of_oscillators(device, discretization, input):
    layer = device.move(hbnode.nn.Oscillators(3, 4, discretization=discretization, input=input))
    x, t = device.move(torch.randn(2, 20, 3)), device.move(torch.rand(2, 20).cumsum(1))
    for times, lengths in ((None, None), (t, None), (t, [20, 5])):
        before = device.synchronisations
        y, state = layer(x, times, lengths=lengths)
        y.sum().backward()
        waited = device.synchronisations - before
        assert y.is_cuda
        assert state.v.is_cuda
        assert layer.log_damping.grad.is_cuda
        assert waited <= 2 + (times is not None) * (1 + 4 * (discretization == "exact"))
    assert layer.forecast(state, device.move(torch.tensor([0.5])))[0].is_cuda
    cell = device.move(hbnode.nn.OscillatorCell(3, 4, discretization=discretization, input=input))
    assert cell(x[:, 0], cell(x[:, 1])[1], 0.5)[0].is_cuda
    stack = device.move(hbnode.nn.OscillatorStack(3, 4))
    assert stack(x, t, lengths=[20, 5])[0].is_cuda
