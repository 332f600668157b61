"""Models with a fixed grid as graphs of torch.compile, torch.export and torch.jit.trace, and what importing takes."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.nn import SolveDropout
from hbnode.solve.compiled import CompilationWarning
from tests.models import AGAIN, compile_without_back_end, gradients, make_field, make_input, pretend_tracing

FIELDS = {
    "node": lambda: hbnode.NODE(hbnode.nn.MLP(3, [4], 3, activation=nn.Tanh, time_dependent=True)),
    "anode": lambda: hbnode.ANODE(hbnode.nn.MLP(4, [4], 4, activation=nn.Tanh), 1),
    "sonode": lambda: hbnode.SONODE(hbnode.nn.MLP(6, [4], 3, activation=nn.Tanh), initial_velocity=nn.Linear(3, 3)),
    "hbnode": lambda: hbnode.HBNODE(hbnode.nn.MLP(3, [4], 3, activation=nn.Tanh, time_dependent=True)),
    "hbnode, fixed damping": lambda: hbnode.HBNODE(nn.Linear(3, 3), damping=0.0, learn_damping=False),
    "hbnode, channels": lambda: hbnode.HBNODE(nn.Linear(3, 3), damping=torch.tensor([0.1, 0.2, 0.3])),
    "hbnode, constants": lambda: hbnode.HBNODE(nn.Linear(3, 3), damping=[0.1, 0.2, 0.3], learn_damping=False),
    "ghbnode": lambda: hbnode.GHBNODE(hbnode.nn.MLP(3, [4], 3, activation=nn.Tanh)),
}
# each field and each method at least once
CASES = [  # each field and each kind of method at least once
    ("hbnode", "nystrom4"),
    ("ghbnode", "leapfrog"),
    ("node", "rk4"),
    ("anode", "tsit5"),
    ("sonode", "heun3"),
    ("hbnode", "exponential"),
    ("hbnode, fixed damping", "nystrom4"),
    ("hbnode, channels", "midpoint"),
    ("hbnode, constants", "nystrom6"),
    ("ghbnode", "euler"),
]


GRAPHS = [pytest.param(*case, marks=pytest.mark.slow if i > 2 else []) for i, case in enumerate(CASES)]


class Model(nn.Module):
    """A block between layers, as users have it, at given times."""

    def __init__(self, field, **solver):
        super().__init__()
        torch.manual_seed(0)
        self.block = hbnode.ODEBlock(FIELDS[field](), **solver)
        self.head = nn.Linear(4 if field == "anode" else 3, 2)
        self.double()

    def forward(self, x, t=None):
        return self.head(self.block(x, t).relu_())


def rows(batch=5):
    return torch.randn(batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


TIMES = [[0.0, 0.5, 2.0], [1.0, 0.2, -0.1], [[0.0, 0.5, 2.0], [0.0, 2.0, 2.0]]]  # a row for each sample; some repeat


def outputs_and_gradients(model, inputs, parameters):
    y = model(*inputs)
    return y, *torch.autograd.grad(y.square().sum(), [*inputs, *parameters])


@pytest.fixture
def _traced(monkeypatch):
    pretend_tracing(monkeypatch)


@pytest.fixture
def _compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("field", "method", "t"),
    [*((*case, None) for case in CASES), *((*case, t) for case in [*CASES[:2], ("hbnode", "tsit5")] for t in TIMES)],
)
def test_what_is_traced_computes_what_an_eager_solve_does(field, method, t, request):
    model = Model(field, method=method, steps=2, gradient="direct")
    inputs = [rows(2), *([] if t is None else [torch.tensor(t, dtype=torch.float64, requires_grad=True)])]
    expected, eager = outputs_and_gradients(model, inputs, model.parameters()), model.block.nfe
    request.getfixturevalue("_traced")
    found = outputs_and_gradients(model, inputs, model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert model.block.nfe == eager


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("field", "method"), GRAPHS)
def test_one_graph_of_torch_compile(field, method):
    model, x = Model(field, method=method, steps=2), rows()
    expected, eager = outputs_and_gradients(model, [x], model.parameters()), model.block.nfe
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found = outputs_and_gradients(compiled, [x], model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert (model.block.nfe.steps, model.block.nfe.backward) == (eager.steps, 0)
    with hbnode.count_nfe(model) as nfe, pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x)  # what is inside of a graph cannot be counted
    assert nfe.total == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("field", "method"), GRAPHS)
def test_exported_or_traced_for_any_batch(field, method):
    model, x = Model(field, method=method, steps=2, gradient="adjoint"), rows().detach()
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    traced = torch.jit.trace(model, (x,))
    for x in map(rows, (1, 2, 7)):
        torch.testing.assert_close([exported(x), traced(x)], [model(x)] * 2, rtol=1e-12, atol=1e-13)
    model.block.method, model.block.steps = None, None
    with pytest.raises(ValueError, match="Fix: steps=n"):
        torch.jit.trace(model, (x,))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Fix: steps=n"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("kind", [list, np.array], ids=["list", "array"])
def test_times_as_numbers_are_tensors_of_the_graph(kind):
    """A second graph is for the second list, whose numbers torch.compile takes for variables from then on."""
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(3, 3), method="leapfrog", steps=1).double(), rows()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for end in (1.0, 1.1, 1.2, 1.3):
        t = kind([0.0, end])
        torch.testing.assert_close(compiled(x, t), block(x, t), rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if kind is list else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_importing_hbnode_imports_little_more_than_torch_and_starts_no_threads():
    """OpenMP's do not survive a user's os.fork, which would hang."""
    code = (
        "import os, sys, torch; count = lambda: len(os.listdir('/proc/self/task')); old, before = count(), "
        "set(sys.modules); import hbnode; print(count() - old, *sorted(set(sys.modules) - before))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    threads, *names = done.stdout.split()
    heavy = ("torch", "torchdiffeq", "scipy", "sympy", "matplotlib", "pandas", "numpy")
    assert "hbnode" in names
    assert [name for name in names if name.split(".")[0] in heavy] == []
    assert threads == "0"


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=["kept", "again"])
def test_a_gradient_that_saves_memory_is_taken_outside_of_the_graph(gradient):
    model, x = Model("hbnode", steps=30, gradient=gradient), rows()
    torch.compile(model, backend="eager")(x).sum().backward()
    assert model.block.nfe.forward > 0
    assert (model.block.nfe.backward > 0) == (gradient is AGAIN)


@pytest.mark.slow
def test_a_signal_in_a_graph():
    """Inside of its samples it is what it was, outside of them NaN."""
    signal = hbnode.Signal(torch.linspace(0, 2, 9), torch.linspace(0, 2, 9).sin())
    exported = torch.export.export(signal, (torch.tensor([0.3, 1.7]),)).module()
    t = torch.tensor([0.0, 1.9])
    torch.testing.assert_close(exported(t), signal(t))
    assert exported(torch.tensor([1.0, 2.5])).isnan().tolist() == [False, True]


# compile=True: single steps are compiled


@pytest.fixture
def eager_compiler(monkeypatch):
    compile_without_back_end(monkeypatch)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("hbnode", {"method": "nystrom4"}),
        ("hbnode", {"method": "nystrom4", "steps": 2}),
        ("hbnode", {"method": "nystrom4", "steps": 25}),  # too long for one program
        ("node", {"per_sample": True}),
        pytest.param("ghbnode", {"method": "leapfrog", "steps": 2}, marks=pytest.mark.slow),
        pytest.param("hbnode", {"gradient": "direct"}, marks=pytest.mark.slow),
        pytest.param("sonode", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")  # dynamo's own, about inputs that are not leaves
def test_compiled_steps_compute_the_same(model, settings, eager_compiler):
    """With a leaf that f closes over, whichever weights it has and whether gradients are wanted."""
    field, leaf = make_field(model).double(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    func = field.func
    field.func = nn.Sequential()  # of a structure of its own
    field.func.forward, field.func.inside = lambda *args: leaf * func(*args), func
    x, t = make_input(), torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)

    def solve(compile):
        found, count = gradients(field, x, t, compile=compile, **settings)
        with torch.no_grad():
            end = field.readout(hbnode.odeint(field, field.initial_state(x), t, compile=compile, **settings))[-1]
        slope = hbnode.odeint(field, field.initial_state(x), t, compile=compile, **settings)
        return found, end, *torch.autograd.grad(field.readout(slope).sum(), leaf), count

    for factor in (1.0, 1.0, 1.5):
        with torch.no_grad():
            leaf.mul_(factor)
            next(func.parameters()).mul_(factor)
        (*expected, count), (*found, again) = solve(False), solve(True)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert again == count
    assert field.compiled
    assert not any(program.failed for program in field.compiled.values())
    assert copy.deepcopy(field).compiled == {}


def test_what_cannot_be_compiled_is_said_and_solved_without(eager_compiler):
    class Untraceable(nn.Module):
        def forward(self, h):
            torch._dynamo.graph_break()
            return -h

    block, x = hbnode.HeavyBallODEBlock(Untraceable(), compile=True).double(), make_input().requires_grad_()
    with pytest.warns(CompilationWarning, match="compile=True has no effect"):
        h = block(x)
    h.sum().backward()
    block(x)  # said once
    torch.testing.assert_close(h, hbnode.HeavyBallODEBlock(Untraceable()).double()(x))
    block.field.func = SolveDropout(0.5)
    with pytest.warns(CompilationWarning, match="draws random numbers"):
        block(x)


def test_beyond_its_last_graph_a_program_runs_without_compilation(eager_compiler, monkeypatch):
    """Each number of dimensions needs a graph; those that exist are still used."""
    monkeypatch.setattr(hbnode.solve.compiled, "GRAPHS", 1)
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), compile=True), torch.randn(2, 3, 2)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        block(x)
        with pytest.warns(CompilationWarning, match="1 graphs of this field"):
            block(x[0])
        block(x[0]), block(x)  # said once
    assert not any(program.failed for program in block.field.compiled.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", ["hbnode", "sonode"])
@pytest.mark.parametrize("settings", [{}, {"steps": 3}], ids=str)
def test_compiled_by_inductor(model, settings):
    field = make_field(model).double()
    x, t = make_input(), torch.tensor([0.0, 1.0], dtype=torch.float64)
    expected, _ = gradients(field, x, t, **settings)
    found, _ = gradients(field, x, t, compile=True, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
