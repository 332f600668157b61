"""One suite over all five models: shapes, gradients, dtypes, copies, and the same gradient from every mode."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import hbnode
from tests.models import AGAIN, MODELS, SHAPES, Watched, every_model, make_field, make_input

every_shape = pytest.mark.parametrize("shape", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
SOLVERS = {
    "checkpoint": {},
    "again": {"gradient": AGAIN},
    "direct": {"gradient": "direct"},
    "adjoint": {"gradient": "adjoint"},
    "sample": {"per_sample": True},
    "grid": {"steps": 3},
    "dopri5": {"method": "dopri5"},
    "dopri5-adjoint": {"method": "dopri5", "gradient": "adjoint"},
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def make_block(model, shape="vector", dtype=torch.float64, **solver):
    return hbnode.ODEBlock(make_field(model, shape), **solver).to(dtype)


def output_shape(model, shape):
    batch, channels, *rest = SHAPES[shape]
    return (batch, channels + (model == "anode"), *rest)


@every_model
@every_shape
@every_dtype
@every_solver
@pytest.mark.parametrize("device", DEVICES)
def test_block(model, shape, dtype, solver, device):
    block = make_block(model, shape, dtype, **solver, rtol=1e-3, atol=1e-3).to(device)
    x = make_input(shape, dtype).to(device).requires_grad_()
    h = block(x)
    assert h.shape == output_shape(model, shape)
    assert h.dtype == dtype
    assert h.device == x.device
    h.pow(2).sum().backward()
    for name, p in [("x", x), *block.named_parameters()]:
        assert p.grad is not None, name
        assert p.grad.shape == p.shape
        assert torch.isfinite(p.grad).all()
        assert p.grad.any(), name


@pytest.mark.parametrize(
    ("model", "shape", "solver"),
    [
        *((model, "vector", SOLVERS["checkpoint"]) for model in MODELS),
        *(("ghbnode", "image", solver) for solver in SOLVERS.values()),
    ],
)
def test_copies_compute_the_same(model, shape, solver):
    block = make_block(model, shape, **solver)
    x = make_input(shape)
    expected = block(x)
    expected.sum().backward()  # a used block must copy as well as a fresh one
    torch.testing.assert_close(copy.deepcopy(block)(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(pickle.loads(pickle.dumps(block))(x), expected, rtol=0, atol=0)
    torch.manual_seed(1)
    fresh = make_block(model, shape, **solver)
    assert not torch.allclose(fresh(x), expected)
    fresh.load_state_dict(block.state_dict())
    torch.testing.assert_close(fresh(x), expected, rtol=0, atol=0)


@every_model
def test_repr_names_the_parts(model):
    text = repr(make_block(model))
    assert type(make_field(model)).__name__ in text
    assert ("nystrom8" if model == "hbnode" else "tsit5") in repr(make_block(model, rtol=1e-8))
    assert "checkpoint" in text
    assert "MLP" in text


@every_model
def test_gradcheck_direct(model):
    torch.manual_seed(1)
    block = make_block(model, method="rk4", steps=2)
    x = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


@every_model
@every_shape
def test_adjoint_and_direct_agree_with_a_tight_reference(model, shape):
    x = make_input(shape)
    gradients = {}
    solvers = {
        "direct": {"gradient": "direct", "rtol": 1e-9, "atol": 1e-9},
        "adjoint": {"gradient": "adjoint", "rtol": 1e-9, "atol": 1e-9},
        "reference": {"method": "dopri8", "save": "exact", "rtol": 1e-12, "atol": 1e-12},
    }
    for name, solver in solvers.items():
        torch.manual_seed(3)
        block = make_block(model, shape, **solver)
        block(x).sin().sum().backward()
        gradients[name] = torch.cat([p.grad.reshape(-1) for p in block.parameters()])
    for name in ("direct", "adjoint"):
        error = (gradients[name] - gradients["reference"]).norm() / gradients["reference"].norm()
        assert error < 1e-6, name


@every_model
@every_solver
def test_a_trajectory_passes_through_the_end_point(model, solver):
    block = make_block(model, **solver, t_span=(0.0, 2.0), rtol=1e-8, atol=1e-8)
    x = make_input()
    path = block(x, [0.0, 0.5, 1.1, 2.0])
    assert path.shape == (4, *output_shape(model, "vector"))
    tolerance = 1e-3 if "steps" in solver else 1e-6
    torch.testing.assert_close(path[-1], block(x), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(path[0][:, :4], x)


@every_model
def test_there_and_back_again(model):
    field = make_field(model).double()
    state = field.initial_state(make_input())
    tight = {"rtol": 1e-9, "atol": 1e-9}
    there = hbnode.odeint(field, state, [0.0, 1.0], **tight)
    there = there[-1] if isinstance(there, torch.Tensor) else tuple(part[-1] for part in there)
    back = hbnode.odeint(field, there, [1.0, 0.0], **tight)
    torch.testing.assert_close(field.readout(back)[-1], field.readout(state), rtol=1e-6, atol=1e-6)


@every_model
@pytest.mark.parametrize("shape", SHAPES)
def test_autocast(model, shape):
    """Under autocast the networks run in bfloat16 and the state stays float32, in the adjoint's solve as well."""
    exact = make_block(model, shape, torch.float32, gradient="adjoint", rtol=1e-2, atol=1e-2)
    block = copy.deepcopy(exact)
    x = make_input(shape, torch.float32)
    seen = []
    block.field.func.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = block(x)
    assert h.dtype == torch.float32
    h.sum().backward()
    assert block.nfe.backward > 0
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(h, exact(x), rtol=0.05, atol=0.05)


def test_autocast_with_weights_that_were_used_before():
    """Autocast's cache must not make them look like tensors computed outside."""
    x = make_input(dtype=torch.float32)
    gradients = []
    for gradient in ("direct", "adjoint"):
        torch.manual_seed(0)
        block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), gradient=gradient, rtol=1e-2, atol=1e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            block(block(x)).sum().backward()
        gradients.append(block.field.func.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


def test_bfloat16_state_on_a_fixed_grid():
    block = hbnode.HeavyBallODEBlock(nn.Linear(4, 4), method="rk4", steps=4)
    x = make_input(dtype=torch.float32)
    expected = block(x)
    got = copy.deepcopy(block).bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("default:The .grad attribute")  # dynamo's own, about inputs that are not leaves
@pytest.mark.parametrize(
    ("model", "solver"),
    [
        *((model, SOLVERS["checkpoint"]) for model in MODELS if model != "hbnode"),
        *(("hbnode", solver) for solver in SOLVERS.values()),
    ],
)
def test_torch_compile_with_the_eager_backend(model, solver):
    block = make_block(model, **solver, rtol=1e-4, atol=1e-4)
    x = make_input()
    expected = block(x)
    compiled = torch.compile(block, backend="eager")
    with hbnode.count_nfe(compiled) as nfe:
        got = compiled(x)
        got.sum().backward()
    torch.testing.assert_close(got, expected)
    assert nfe.forward == block.nfe.forward > 0
    assert (nfe.backward > 0) >= (solver.get("gradient") == "adjoint")
    field = make_field(model).double()
    plain = hbnode.ODEBlock(field)(x)
    torch.testing.assert_close(hbnode.ODEBlock(torch.compile(field, backend="eager"))(x), plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor's own warnings are not ours
@every_model
def test_torch_compile_with_inductor(model):
    field = make_field(model).double()
    x = make_input()
    expected = hbnode.ODEBlock(field)(x)
    field.func = torch.compile(field.func)
    got = hbnode.ODEBlock(field)(x)
    torch.testing.assert_close(got, expected)
    got.sum().backward()


@pytest.mark.parametrize("method", ["dopri5", "dopri8", "rk4"])
def test_the_adjoint_keeps_nothing_alive(method):
    """Neither between evaluations of the backward pass nor after it, without the garbage collector's help."""
    func, x = Watched(), make_input().requires_grad_()
    block = hbnode.HeavyBallODEBlock(func, gradient="adjoint", method=method).double()
    gc.disable()
    try:
        for _ in range(3):
            block(x).sum().backward()
        assert len(func.alive) == 0
        assert 0 < func.most <= 2
    finally:
        gc.enable()


@every_model
def test_an_empty_batch(model):
    for gradient in ("direct", "adjoint"):
        h = make_block(model, gradient=gradient)(torch.zeros(0, 4, dtype=torch.float64))
        assert h.shape == (0, output_shape(model, "vector")[1])


def test_frozen_parameters_get_no_gradient():
    for gradient in ("direct", "adjoint"):
        block = make_block("hbnode", gradient=gradient)
        block.field.func.layers[0].requires_grad_(False)
        block(make_input()).sum().backward()
        assert all(p.grad is None for p in block.field.func.layers[0].parameters())
        assert all(p.grad is not None for p in block.field.func.layers[2].parameters())


def test_buffers_move_and_are_seen():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, h):
            return -self.scale * h

    block = hbnode.ODEBlock(hbnode.NODE(Scaled()), rtol=1e-9, atol=1e-9).double()
    h = block(torch.ones(1, 1, dtype=torch.float64))
    assert h.item() == pytest.approx(torch.tensor(-2.0).exp().item(), abs=1e-6)
