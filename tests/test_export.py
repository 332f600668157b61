"""state_dicts in safetensors, and models as ONNX files and AOTInductor packages, as docs/deploy.md describes."""

import copy
import inspect
import shutil

import pytest
import torch
from torch import nn

import hbnode
from tests.models import LATER, MODELS, make_field, slow


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


MODULES = {  # every public module that has a state
    **{name: lambda name=name: make_field(name) for name in (*MODELS, *LATER)},
    "PortHamiltonian": lambda: hbnode.PortHamiltonian(nn.Sequential(nn.Linear(4, 1))),
    "HeavyBallSDE": lambda: hbnode.HeavyBallSDE(net(), damping=0.5, learn_damping=False),
    "Signal": lambda: hbnode.Signal(torch.arange(3.0), torch.randn(3, 2)),
    "ODEBlock": lambda: hbnode.ODEBlock(hbnode.NODE(net())),
    "HeavyBallODEBlock": lambda: hbnode.HeavyBallODEBlock(net(), generalized=True, initial_momentum=nn.Linear(4, 4)),
    "ODERNN": lambda: hbnode.ODERNN(2, 4, num_layers=2, missing="decay", static_size=1, time_unit=3.0),
    "LatentODE": lambda: hbnode.nn.LatentODE(2, 3, 4),
    "LatentSDE": lambda: hbnode.nn.LatentSDE(2, 3, 4),
    **{
        name: lambda name=name: getattr(hbnode.nn, name)(2, 4)
        for name in (
            *("MomentumRNN", "MomentumLSTM", "MomentumGRU", "MomentumDTRIV", "DTRIV", "TanhRNN"),
            *("MomentumRNNCell", "MomentumLSTMCell", "MomentumGRUCell", "MomentumDTRIVCell", "DTRIVCell"),
            *("Oscillators", "OscillatorStack", "OscillatorCell"),
        )
    },
    "Oscillators with noise": lambda: hbnode.nn.Oscillators(2, 2, 3, noise=True),
    "Oscillators, selective": lambda: hbnode.nn.Oscillators(2, 4, selective=True),
    **{
        name: lambda name=name: getattr(hbnode.nn, name)(8, 2)
        for name in ("MomentumAttention", "HeavyBallMemory", "SoftmaxAttention")
    },
    "MomentumTransformer": lambda: hbnode.nn.MomentumTransformer(11, 8, 2, 2, 8, attention="heavy_ball"),
    "MomentumTransformerLayer": lambda: hbnode.nn.MomentumTransformerLayer(8, 2, 8),
    "MomentumTransformerDecoderLayer": lambda: hbnode.nn.MomentumTransformerDecoderLayer(8, 2, 8),
    "MLP": lambda: hbnode.nn.MLP(2, [3], 2),
    "ConvNet": lambda: hbnode.nn.ConvNet(2, 3, 2),
    "Standardize": lambda: hbnode.nn.Standardize(2).fit(torch.randn(5, 2)),
    "SolveDropout": lambda: hbnode.nn.SolveDropout(),
    "HeavyBallFlow": lambda: hbnode.distributions.HeavyBallFlow(net(), 4),
    "HeavyBallAnnealing": lambda: hbnode.distributions.HeavyBallAnnealing(
        lambda h: -h.square().sum(-1),
        torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), 1), 1),
        3,
    ),
}


def test_every_public_module_is_listed():
    public = {
        name.lower()
        for module in (hbnode, hbnode.nn, hbnode.distributions)
        for name in module.__all__
        if isinstance(kind := getattr(module, name), type)
        and issubclass(kind, nn.Module)
        and not inspect.isabstract(kind)
    }
    assert public <= {name.lower() for name in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_a_state_dict_survives_safetensors(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    module = MODULES[name]()
    state = {key: value.contiguous() for key, value in module.state_dict().items()}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    safetensors.save_file(state, tmp_path / "model.safetensors")
    other = copy.deepcopy(module)
    with torch.no_grad():
        for value in other.state_dict().values():
            value.zero_()
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    found = other.state_dict()
    assert found.keys() == state.keys()
    for key in state:
        assert torch.equal(found[key], state[key]), key
        assert found[key].dtype == state[key].dtype


# Graphs


class Output(nn.Module):
    """The output of a layer, without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return self.layer(*inputs)[0]


def block():
    return hbnode.HeavyBallODEBlock(net(), method="leapfrog", steps=2).eval()


def stack():
    return Output(hbnode.nn.OscillatorStack(2, 4, 1)).eval()


BATCH = torch.export.Dim("batch", min=2, max=64)
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


SERIES = {
    "linear": lambda: hbnode.nn.Oscillators(2, 4),
    "selective": lambda: hbnode.nn.Oscillators(2, 4, selective=True),
    "stack": lambda: hbnode.nn.OscillatorStack(2, 4, 1),
}


@QUIET
@pytest.mark.parametrize(
    ("name", "times"), [("linear", "own"), ("stack", "none"), *slow(("linear", "none"), ("selective", "shared"))]
)
def test_oscillators_are_exported_for_any_length(name, times):
    """From a batch of 3 series of 6 samples; the gradient of the exported graph is that of the layer, too."""
    length, layer = torch.export.Dim("length"), Output(SERIES[name]()).double()

    def inputs(batch, size):
        x, t = (torch.rand(batch, size, n, dtype=torch.float64) for n in (2, 1))
        t = t[..., 0].cumsum(1)
        return {"none": (x,), "shared": (x, t[0]), "own": (x, t)}[times]

    shapes = {"none": ({1: length},), "shared": ({1: length}, {0: length}), "own": ({1: length},) * 2}[times]
    exported = torch.export.export(layer, inputs(3, 6), dynamic_shapes=(shapes,)).module()
    for size in (1, 2, 3, 7, 8, 40):
        given = inputs(3, size)
        torch.testing.assert_close(exported(*given), layer(*given), rtol=1e-10, atol=1e-12)
    names, gradients = list(dict(layer.named_parameters())), []
    for model in (exported, layer):
        parameters = [model.get_parameter(name) for name in names]
        gradients.append(torch.autograd.grad(model(*given).square().sum(), parameters))
    torch.testing.assert_close(*gradients)


@QUIET
def test_a_cell_of_oscillators_is_exported_for_any_batch():
    cell, batch = Output(hbnode.nn.OscillatorCell(2, 4)).double(), torch.export.Dim("batch")
    exported = torch.export.export(cell, (torch.randn(3, 2).double(),), dynamic_shapes=(({0: batch},),)).module()
    for x in (torch.randn(size, 2).double() for size in (1, 2, 7)):
        torch.testing.assert_close(exported(x), cell(x))


# Adaptive solves


class Pushed(nn.Module):
    """A force that depends on time."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, t, h):
        return 2 * self.net(h) + torch.sin(7 * t) * torch.ones_like(h)


def adaptive(method, func=None, **settings):
    if settings.pop("first_order", False):
        return hbnode.ODEBlock(hbnode.NODE(net()), method=method, rtol=1e-4, atol=1e-4, **settings)
    return hbnode.HeavyBallODEBlock(func or net(), method=method, rtol=1e-4, atol=1e-4, **settings)


def reported(block, times=None, *, shape=(4,)):
    """The exported graph of a block that reports its evaluations, for any batch."""
    model, any_batch = hbnode.solve.Reported(block).double().eval(), {0: torch.export.Dim("batch", min=2)}
    inputs = (torch.randn(5, *shape, dtype=torch.float64), *([] if times is None else [times]))
    shapes = ((any_batch, *([] if times is None else [{}])),)
    with torch.no_grad():
        return model, torch.export.export(model, inputs, dynamic_shapes=shapes).module()


TIMES = torch.tensor([0.0, 0.3, 0.35, 1.7], dtype=torch.float64)
CHANNELS = {"damping": torch.tensor([0.1, 0.3, 0.5, 0.9])}
ADAPTIVE = [
    ("nystrom4", {}, None),
    *slow(
        ("exponential", {"per_sample": True, **CHANNELS}, TIMES),
        *[(method, {}, TIMES) for method in ("nystrom4", "nystrom6", "nystrom8", "exponential", "tsit5")],
        *[(method, {"per_sample": True}, None) for method in ("nystrom6", "nystrom8", "tsit5")],
        ("tsit5", {"first_order": True}, TIMES),
        ("tsit5", {"generalized": True, "per_sample": True, **CHANNELS}, TIMES),
        ("nystrom4", {"func": Pushed}, None),
        ("tsit5", {"func": Pushed, "per_sample": True}, TIMES),
        ("nystrom4", {"save": "exact"}, TIMES),
        ("nystrom4", {"t_span": (1.0, 0.0), "options": {"first_step": 0.01, "max_step": 0.2}}, None),
    ),
]


@QUIET
@pytest.mark.parametrize(("method", "settings", "times"), ADAPTIVE)
def test_an_adaptive_solve_is_exported_with_the_steps_of_each_batch(method, settings, times):
    func = settings.get("func")
    settings = settings if func is None else {**settings, "func": func()}
    model, run = reported(adaptive(method, **settings), times)
    counts = set()
    for batch, scale in ((2, 0.01), (7, 1.0), (31, 10.0)):
        x = scale * torch.randn(batch, 4, dtype=torch.float64)
        given = (x,) if times is None else (x, times)
        output, evaluations, reason = run(*given)
        expected, counted, _ = model(*given)
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
        assert int(evaluations) == int(counted)
        assert not reason.any()
        assert reason.shape == ((batch,) if settings.get("per_sample") else ())
        counts.add(int(evaluations))
    if method == "nystrom4" and not settings:
        assert len(counts) > 1


class Log(nn.Module):
    def forward(self, h):
        return -torch.log(1.5 - h)


FAILURES = {
    "not finite": (1, {}, hbnode.errors.NonFiniteError),
    "underflow": (2, {"options": {"min_step": 0.3, "first_step": 0.9}}, hbnode.errors.StepSizeUnderflowError),
    "max_steps": (3, {"max_steps": 2}, hbnode.errors.MaxStepsError),
    "max_nfe": (3, {"options": {"max_nfe": 5}}, hbnode.errors.MaxNFEError),
}


@QUIET
@pytest.mark.parametrize("name", ["max_steps", *slow("not finite", "underflow", "max_nfe")])
def test_an_exported_solve_that_fails_answers_nan_and_a_reason(name):
    reason, settings, error = FAILURES[name]
    block = hbnode.HeavyBallODEBlock(Log(), method="nystrom4", rtol=1e-8, atol=1e-8, **settings)
    model, run = reported(block, shape=(1,))
    x = torch.tensor([[1.0], [1.6 if name == "not finite" else 1.2]], dtype=torch.float64)
    output, _, found = run(x)
    assert output.isnan().all()
    assert int(found) == reason
    with pytest.raises(error):
        model(x)


@pytest.mark.slow
@QUIET
def test_a_sample_that_fails_leaves_the_others():
    _, run = reported(hbnode.HeavyBallODEBlock(Log(), method="nystrom4", per_sample=True), shape=(1,))
    x = torch.tensor([[0.5], [1.6], [0.0]], dtype=torch.float64)
    output, _, reason = run(x)
    assert reason.tolist() == [0, 1, 0]
    block = hbnode.HeavyBallODEBlock(Log(), method="nystrom4", per_sample=True).double()
    torch.testing.assert_close(output[::2], block(x[::2]).detach(), rtol=1e-3, atol=1e-3)


class WithEvent(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = hbnode.HBNODE(net())

    def forward(self, x):
        event = hbnode.Event(lambda t, state: state[0][:, 0] - 0.3)
        return hbnode.odeint(self.field, self.field.initial_state(x), [0.0, 1.0], events=event)[0][0]


@QUIET
@pytest.mark.parametrize(
    "model",
    [
        lambda: hbnode.ODEBlock(hbnode.NODE(net()), method="rodas5p"),
        lambda: hbnode.HeavyBallODEBlock(net(), method="dopri5"),
        lambda: hbnode.HeavyBallODEBlock(net(), jump_times=[0.5]),
        WithEvent,
    ],
    ids=["Rosenbrock", "torchdiffeq", "jumps", "events"],
)
def test_what_needs_python_in_its_loop_is_not_exported(model):
    with pytest.raises(ValueError, match=r"cannot be traced or exported.* Fix: "):
        torch.export.export(model(), (torch.randn(3, 4),))


class Masked(nn.Module):
    """The outputs of an ODE-RNN for samples, times and a mask."""

    def __init__(self, **settings):
        super().__init__()
        self.rnn = hbnode.ODERNN(2, 4, time_unit=1.0, **settings)

    def forward(self, x, t, mask):
        return self.rnn(x, t, mask=mask)[0]


def irregular(batch):
    """The second gap of all series has length 0."""
    t = torch.rand(batch, 3).cumsum(1)
    t[:, 2] = t[:, 1]
    return torch.randn(batch, 3, 2), t, torch.rand(batch, 3, 2) > 0.3


@QUIET
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 2},
        *slow({"steps": 2, "per_sample": False}),
        *slow({"steps": 1, "method": "rk4", "per_sample": False}),
        *slow({"steps": 1, "method": "leapfrog", "missing": "decay", "num_layers": 2, "bidirectional": True}),
        *slow({}),
    ],
    ids=str,
)
def test_an_ode_rnn_is_exported_for_any_batch(settings):
    model = Masked(**settings).eval()
    with torch.no_grad():
        run = torch.export.export(model, irregular(3), dynamic_shapes=({0: BATCH},) * 3).module()
    for inputs in map(irregular, (2, 5)):
        torch.testing.assert_close(run(*inputs), model(*inputs).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [({"options": {"step_size": 0.1}}, r"step_size.*Fix: steps=n"), ({"per_sample": False}, "need per_sample=True")],
    ids=["step_size", "common steps"],
)
def test_an_ode_rnn_whose_steps_need_python_is_not_exported(settings, fix):
    with pytest.raises(ValueError, match=fix):
        torch.export.export(Masked(**settings), irregular(3))


def test_a_module_without_adaptive_solves_has_nothing_to_report():
    with pytest.raises(ValueError, match="without adaptive solves"):
        torch.export.export(hbnode.solve.Reported(block()), (torch.randn(3, 4),))


def onnx_session(model, inputs, file, **options):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(model, inputs, dynamo=True, verbose=False, **options).save(file)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return lambda *given: torch.tensor(session.run(None, {k: x.numpy() for k, x in zip(names, given, strict=True)})[0])


@pytest.mark.slow
@QUIET
def test_a_block_with_fixed_steps_as_onnx(tmp_path):
    model = block()
    run = onnx_session(model, (torch.randn(3, 4),), tmp_path / "block.onnx", dynamic_shapes=({0: BATCH},))
    x = torch.randn(7, 4)
    torch.testing.assert_close(run(x), model(x).detach())


ADAPTIVE_FILES = [
    lambda: adaptive("nystrom4"),
    lambda: adaptive("tsit5", generalized=True, per_sample=True),
]


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize("model", ADAPTIVE_FILES, ids=["nystrom4", "per sample"])
def test_an_adaptive_block_as_onnx(model, tmp_path):
    model = model().eval()
    run = onnx_session(model, (torch.randn(3, 4),), tmp_path / "block.onnx", dynamic_shapes=({0: BATCH},))
    for x in (torch.randn(2, 4), 5 * torch.randn(7, 4)):
        torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@QUIET
def test_a_cell_of_oscillators_as_onnx(tmp_path):
    model = Output(hbnode.nn.OscillatorCell(2, 4)).eval()
    run = onnx_session(model, (torch.randn(3, 2),), tmp_path / "cell.onnx", dynamic_shapes=(({0: BATCH},),))
    x = torch.randn(7, 2)
    torch.testing.assert_close(run(x), model(x).detach())


@pytest.mark.slow
@QUIET
def test_layers_of_torch_with_filters_as_onnx(tmp_path):
    model = Output(hbnode.nn.MomentumLSTM(2, 4, batch_first=True).to_torch()).eval()
    run = onnx_session(model, (torch.randn(3, 70, 2),), tmp_path / "lstm.onnx")
    x = torch.randn(3, 70, 2)
    torch.testing.assert_close(run(x), model(x).detach())


@QUIET
@pytest.mark.parametrize("size", [6, *slow(40)])
def test_a_filter_is_exported_without_cumprod_which_onnx_does_not_have(size):
    model, x = hbnode.nn.MomentumLSTM(2, 4, batch_first=True).to_torch(), torch.randn(1, size, 2)
    exported = torch.export.export(model, (x,))
    assert not any("cumprod" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x)[0], model(x)[0])


@pytest.mark.slow
@QUIET
def test_a_scan_of_oscillators_has_no_operator_in_onnx(tmp_path):
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="Failed to convert the exported program") as error:
        onnx_session(stack(), (torch.randn(3, 8, 2),), tmp_path / "stack.onnx")
    assert "hbnode.oscillators" in str(error.value)


def packaged(model, inputs, file, shapes=None):
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
        return torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(program, package_path=str(file))
        )


@pytest.mark.slow
@QUIET
@pytest.mark.timeout(1200)
def test_a_block_with_fixed_steps_as_an_aotinductor_package(tmp_path):
    model = block()
    run, x = packaged(model, (torch.randn(3, 4),), tmp_path / "block.pt2", ({0: BATCH},)), torch.randn(7, 4)
    torch.testing.assert_close(run(x), model(x).detach())


@pytest.mark.slow
@QUIET
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ADAPTIVE_FILES, ids=["nystrom4", "per sample"])
def test_an_adaptive_block_as_an_aotinductor_package(model, tmp_path):
    model = model().eval()
    run = packaged(model, (torch.randn(3, 4),), tmp_path / "block.pt2", ({0: BATCH},))
    for x in (torch.randn(2, 4), 5 * torch.randn(7, 4)):
        torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@QUIET
@pytest.mark.timeout(1200)
def test_a_stack_of_oscillators_as_an_aotinductor_package(tmp_path):
    model = stack()
    x, t = torch.randn(7, 8, 2), torch.rand(7, 8).cumsum(1)
    run = packaged(model, (x[:3], t[:3]), tmp_path / "stack.pt2", (({0: BATCH}, {0: BATCH}),))
    torch.testing.assert_close(run(x, t), model(x, t).detach())
