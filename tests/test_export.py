"""state_dicts in safetensors, and models as ONNX files and AOTInductor packages, as docs/deploy.md describes."""

import shutil

import pytest
import torch
from torch import nn

import hbnode
from tests.models import slow
from tests.test_torch import LAYERS, X, value_of


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_dict_survives_safetensors(name):
    safetensors = pytest.importorskip("safetensors.torch")
    make, arguments = LAYERS[name]
    layer, other = make(), make()
    state = {key: value.contiguous() for key, value in layer.state_dict().items()}
    other.load_state_dict(safetensors.load(safetensors.save(state)))
    assert value_of(other, X, arguments).equal(value_of(layer, X, arguments))


# Graphs


class Output(nn.Module):
    """The output of a layer, without its state; inputs after the second have names."""

    def __init__(self, layer, *names):
        super().__init__()
        self.layer, self.names = layer, names

    def forward(self, *inputs):
        return self.layer(*inputs[:2], **dict(zip(self.names, inputs[2:], strict=True)))[0]


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def block():
    return hbnode.HeavyBallODEBlock(net(), method="leapfrog", steps=2)


BATCH = torch.export.Dim("batch", min=2, max=64)
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SERIES = {
    "linear": lambda: hbnode.nn.Oscillators(2, 4),
    "selective": lambda: hbnode.nn.Oscillators(2, 4, selective=True),
    "stack": lambda: hbnode.nn.OscillatorStack(2, 4, 1),
}


@QUIET
@pytest.mark.parametrize(
    ("name", "times"), [("linear", "own"), *slow(("linear", "none"), ("selective", "shared"), ("stack", "none"))]
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


# Adaptive solves


def adaptive(method, func=None, **settings):
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
PUSHED = {"func": lambda t, h: 2 * torch.tanh(h) + torch.sin(7 * t) * torch.ones_like(h)}


@pytest.mark.slow  # torch traces these loops for seconds, however small the network
@QUIET
@pytest.mark.parametrize(
    ("method", "settings", "times"),
    [
        ("nystrom4", {}, None),
        ("exponential", {"per_sample": True, **CHANNELS}, TIMES),
        ("nystrom6", {"save": "exact"}, TIMES),
        ("nystrom8", {"per_sample": True}, TIMES),
        ("tsit5", {}, TIMES),
        ("tsit5", {"generalized": True, "per_sample": True, **CHANNELS}, None),
        ("nystrom4", PUSHED, TIMES),
        ("tsit5", {"per_sample": True, **PUSHED}, TIMES),
        ("nystrom4", {"t_span": (1.0, 0.0), "options": {"first_step": 0.01, "max_step": 0.2}}, None),
    ],
)
def test_an_adaptive_solve_is_exported_with_the_steps_of_each_batch(method, settings, times):
    model, run = reported(adaptive(method, **settings), times)
    counts = []
    for batch, scale in ((2, 0.01), (7, 1.0), (31, 10.0)):
        x = scale * torch.randn(batch, 4, dtype=torch.float64)
        given = (x,) if times is None else (x, times)
        output, evaluations, reason = run(*given)
        expected, counted, _ = model(*given)
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
        assert int(evaluations) == int(counted)
        assert not reason.any()
        assert reason.shape == ((batch,) if settings.get("per_sample") else ())
        counts.append(int(evaluations))
    assert len(set(counts)) > 1 or settings


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize(
    ("reason", "settings", "error"),
    [
        (1, {"per_sample": True}, hbnode.errors.NonFiniteError),
        (2, {"options": {"min_step": 0.3, "first_step": 0.9}}, hbnode.errors.StepSizeUnderflowError),
        (3, {"max_steps": 2}, hbnode.errors.MaxStepsError),
        (3, {"options": {"max_nfe": 5}}, hbnode.errors.MaxNFEError),
    ],
)
def test_an_exported_solve_that_fails_answers_nan_and_a_reason(reason, settings, error):
    """Each sample for itself, where it has steps of its own."""
    log = lambda h: -torch.log(1.5 - h)
    block = hbnode.HeavyBallODEBlock(log, method="nystrom4", rtol=1e-8, atol=1e-8, **settings)
    model, run = reported(block, shape=(1,))
    x = torch.tensor([[1.0], [1.6 if reason == 1 else 1.2], [0.0]], dtype=torch.float64)
    output, _, found = run(x)
    assert found.tolist() == ([0, 1, 0] if reason == 1 else reason)
    assert output[1].isnan().all()
    if reason == 1:
        torch.testing.assert_close(output[::2], block(x[::2]).detach())
    else:
        assert output.isnan().all()
    with pytest.raises(error):
        model(x)


def rnn(**settings):
    return Output(hbnode.ODERNN(2, 4, time_unit=1.0, **settings), "mask").eval()


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
        *slow(
            {"steps": 1, "method": "rk4", "per_sample": False},
            {"steps": 1, "method": "leapfrog", "missing": "decay", "num_layers": 2, "bidirectional": True},
            {},
        ),
    ],
    ids=str,
)
def test_an_ode_rnn_is_exported_for_any_batch(settings):
    model = rnn(**settings)
    with torch.no_grad():
        run = torch.export.export(model, irregular(3), dynamic_shapes=(({0: BATCH},) * 3,)).module()
    for inputs in map(irregular, (2, 5)):
        torch.testing.assert_close(run(*inputs), model(*inputs).detach(), rtol=1e-5, atol=1e-6)


@QUIET
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hbnode.ODEBlock(hbnode.NODE(net()), method="rodas5p"), r"cannot be traced or exported.* Fix: "),
        (lambda: adaptive("dopri5"), r"cannot be traced or exported.* Fix: "),
        (lambda: adaptive(None, jump_times=[0.5]), r"cannot be traced or exported.* Fix: "),
        (lambda: hbnode.solve.Reported(block()), "without adaptive solves"),
        (lambda: rnn(options={"step_size": 0.1}), r"step_size.*Fix: steps=n"),
        (lambda: rnn(per_sample=False), "need per_sample=True"),
    ],
)
def test_what_needs_python_in_its_loop_is_not_exported(model, message):
    model = model()
    with pytest.raises(ValueError, match=message):
        torch.export.export(model, irregular(3) if isinstance(model, Output) else (torch.randn(3, 4),))


# Files


def onnx(model, inputs, shapes, folder):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = folder / "model.onnx"
    torch.onnx.export(model, inputs, dynamo=True, verbose=False, dynamic_shapes=shapes).save(file)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return lambda *given: torch.tensor(session.run(None, {k: x.numpy() for k, x in zip(names, given, strict=True)})[0])


def aotinductor(model, inputs, shapes, folder):
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
        file = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(file)


FILES = {  # a model, the sizes of a sample of its inputs, and whether its forward takes *inputs
    "fixed steps": (block, [(4,)], False),
    "adaptive": (lambda: adaptive("nystrom4"), [(4,)], False),
    "per sample": (lambda: adaptive("tsit5", generalized=True, per_sample=True), [(4,)], False),
    "cell": (lambda: Output(hbnode.nn.OscillatorCell(2, 4)), [(2,)], True),
    "filters": (lambda: Output(hbnode.nn.MomentumLSTM(2, 4, batch_first=True).to_torch()), [(70, 2)], True),
    "stack": (lambda: Output(hbnode.nn.OscillatorStack(2, 4, 1)), [(8, 2), (8,)], True),
}


@pytest.mark.slow
@QUIET
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("save", "name"),
    [
        *((onnx, name) for name in FILES if name != "stack"),
        *((aotinductor, name) for name in FILES if name not in ("cell", "filters")),
    ],
)
def test_models_as_files(save, name, tmp_path):
    make, sizes, takes_several = FILES[name]
    model, shapes = make().eval(), ({0: BATCH},) * len(sizes)
    inputs = lambda batch: tuple(torch.rand(batch, *size).cumsum(1) for size in sizes)
    run = save(model, inputs(3), (shapes,) if takes_several else shapes, tmp_path)
    for given in map(inputs, (2, 7)):
        torch.testing.assert_close(run(*given), model(*given).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@QUIET
def test_a_scan_of_oscillators_has_no_operator_in_onnx(tmp_path):
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="Failed to convert the exported program") as error:
        onnx(Output(hbnode.nn.OscillatorStack(2, 4, 1)).eval(), (torch.randn(3, 8, 2),), None, tmp_path)
    assert "hbnode.oscillators" in str(error.value)


@QUIET
@pytest.mark.parametrize("size", [6, *slow(40)])
def test_a_filter_is_exported_without_cumprod_which_onnx_does_not_have(size):
    model, x = hbnode.nn.MomentumLSTM(2, 4, batch_first=True).to_torch(), torch.randn(1, size, 2)
    exported = torch.export.export(model, (x,))
    assert not any("cumprod" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x)[0], model(x)[0])
