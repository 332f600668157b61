"""Models with a fixed grid as graphs of torch.compile, torch.export and torch.jit.trace, and what importing takes."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hbnode
from hbnode import _torch
from hbnode.nn import MLP, SolveDropout
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
CASES = [
    ("node", "tsit5"),
    ("node", "rk4"),
    ("anode", "tsit5"),
    ("sonode", "tsit5"),
    ("sonode", "heun3"),
    ("hbnode", "nystrom4"),
    ("hbnode", "nystrom6"),
    ("hbnode", "nystrom8"),
    ("hbnode", "blanes_moan4"),
    ("hbnode, fixed damping", "nystrom4"),
    ("hbnode, channels", "nystrom4"),
    ("hbnode, channels", "midpoint"),
    ("hbnode, constants", "nystrom4"),
    ("ghbnode", "leapfrog"),
    ("ghbnode", "tsit5"),
    ("ghbnode", "euler"),
    ("ghbnode", "heun2"),
]


class Model(nn.Module):
    """A block between layers, as users have it."""

    def __init__(self, field, **solver):
        super().__init__()
        torch.manual_seed(0)
        self.block = hbnode.ODEBlock(FIELDS[field](), **solver)
        self.head = nn.Linear(4 if field == "anode" else 3, 2)
        self.double()

    def forward(self, x):
        return self.head(self.block(x).relu_())


def make_rows(batch=5):
    return torch.randn(batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def outputs_and_gradients(model, x, parameters):
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), [x, *parameters])


@pytest.fixture
def _traced(monkeypatch):
    pretend_tracing(monkeypatch)


@pytest.fixture
def _compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("field", "method"), CASES)
def test_what_is_traced_computes_what_an_eager_solve_does(field, method, request):
    model, x = Model(field, method=method, steps=2, gradient="direct"), make_rows()
    parameters = list(model.parameters())
    expected, eager = outputs_and_gradients(model, x, parameters), model.block.nfe
    request.getfixturevalue("_traced")
    torch.testing.assert_close(outputs_and_gradients(model, x, parameters), expected, rtol=1e-12, atol=1e-13)
    assert model.block.nfe == eager


@pytest.mark.parametrize("method", ["tsit5", "nystrom4", "leapfrog"])
@pytest.mark.parametrize("rows", [False, True])
def test_times_and_their_gradients(method, rows, request):
    """Backwards in time too; a row of times for each sample, in which some repeat."""
    torch.manual_seed(0)
    field = FIELDS["hbnode"]().double()
    state = field.initial_state(make_rows(2))
    for times in ([0.0, 0.5, 2.0], [1.0, 0.2, -0.1]):
        t = torch.tensor([times, [times[0], times[2], times[2]]] if rows else times, dtype=torch.float64)
        t.requires_grad_()
        solver = {"method": method, "steps": 3, "gradient": "direct"}

        def solve(t=t, solver=solver):
            h, m = hbnode.odeint(field, state, t, **solver)
            return h, m, *torch.autograd.grad(h.square().sum() + m.sum(), [t, *field.parameters()], allow_unused=True)

        expected = solve()
        with pytest.MonkeyPatch.context() as patch:
            pretend_tracing(patch)
            torch.testing.assert_close(solve(), expected, rtol=1e-12, atol=1e-12)


SLOW = pytest.mark.slow
EVERY = [(*case, [SLOW] if case not in (("hbnode", "nystrom4"), ("ghbnode", "leapfrog")) else []) for case in CASES]
EVERY = [pytest.param(field, method, marks=marks) for field, method, marks in EVERY]


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("field", "method"), EVERY)
def test_one_graph_of_torch_compile(field, method):
    model, x = Model(field, method=method, steps=2), make_rows()
    parameters = list(model.parameters())
    expected, eager = outputs_and_gradients(model, x, parameters), model.block.nfe
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs_and_gradients(compiled, x, parameters), expected, rtol=1e-12, atol=1e-13)
    assert (model.block.nfe.steps, model.block.nfe.backward) == (eager.steps, 0)
    with hbnode.count_nfe(model) as nfe, pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x)  # what is inside of a graph cannot be counted
    assert nfe.total == 0


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("field", "method"), EVERY)
def test_exported_for_any_batch(field, method):
    model, x = Model(field, method=method, steps=2, gradient="adjoint"), make_rows()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, (x.detach(),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 2, 7):
        x = make_rows(count)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(("field", "method"), [("hbnode", "nystrom4"), ("sonode", "heun3")])
def test_jit_trace(field, method):
    model = Model(field, method=method, steps=2)
    traced = torch.jit.trace(model, (make_rows().detach(),))
    x = make_rows(7)
    torch.testing.assert_close(traced(x), model(x), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.usefixtures("_compiler")
def test_adaptive_steps_are_no_graph_and_say_so():
    model, x = Model("hbnode"), make_rows().detach()
    for trace in (lambda: torch.export.export(model, (x,)), lambda: torch.jit.trace(model, (x,))):
        with pytest.raises(ValueError, match="Fix: steps=n"):
            trace()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Fix: steps=n"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=["kept", "again"])
def test_a_gradient_that_saves_memory_is_taken_outside_of_the_graph(gradient):
    model, x = Model("hbnode", steps=30, gradient=gradient), make_rows()
    torch.compile(model, backend="eager")(x).sum().backward()
    assert model.block.nfe.forward > 0
    assert (model.block.nfe.backward > 0) == (gradient is AGAIN)


@pytest.mark.usefixtures("_compiler")
def test_a_graph_is_not_taken_for_a_transform():
    """Which would take plain, slow paths in compiled code."""

    def doubled(x):
        return x + 1 if _torch.is_transformed() else 2 * x

    x = torch.full((2,), 3.0)
    assert torch.compile(doubled, backend="eager", fullgraph=True)(x).tolist() == doubled(x).tolist() == [6.0, 6.0]
    assert torch.func.vmap(doubled)(x).tolist() == [4.0, 4.0]


def test_importing_hbnode_imports_little_more_than_torch():
    code = "import sys, torch; before = set(sys.modules); import hbnode; print(*sorted(set(sys.modules) - before))"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "hbnode" in names
    heavy = ("torch", "torchdiffeq", "scipy", "sympy", "matplotlib", "pandas", "numpy")
    assert [name for name in names if name.split(".")[0] in heavy] == []


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_importing_hbnode_starts_no_threads():
    """OpenMP's do not survive a user's os.fork, which would hang."""
    code = (
        "import os, torch; n = lambda: len(os.listdir('/proc/self/task')); old = n(); import hbnode; print(n() - old)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["0"]


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
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ghbnode", {"method": "leapfrog", "steps": 2}),
                ("hbnode", {}),
                ("hbnode", {"gradient": "direct"}),
                ("hbnode", {"per_sample": True}),
                ("sonode", {}),
                ("sonode", {"steps": 3}),
                ("ghbnode", {"method": "blanes_moan4", "steps": 2}),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")  # dynamo's own, about inputs that are not leaves
def test_compiled_steps_compute_the_same(model, settings, eager_compiler):
    field = make_field(model).double()
    x, t = make_input(), torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    expected, count = gradients(field, x, t, **settings)
    for _ in range(2):
        found, again = gradients(field, x, t, compile=True, **settings)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert again == count
    assert field.compiled
    assert not any(program.failed for program in field.compiled.values())
    assert copy.deepcopy(field).compiled == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
@pytest.mark.parametrize("steps", [None, 2], ids=str)
def test_a_closure_over_a_leaf_with_compiled_steps(steps, eager_compiler):
    leaf = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, h):
            return leaf * self.net(h)

    func, x, found = Scaled().double(), make_input(), []
    for compile in (False, True):
        solver = {"method": "nystrom4", "rtol": 1e-6, "atol": 1e-6, "steps": steps}
        block = hbnode.HeavyBallODEBlock(func, compile=compile, **solver).double()
        found.append(torch.autograd.grad(block(x).sum(), [leaf, *func.parameters()]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_what_cannot_be_compiled_is_said_and_solved_without(eager_compiler):
    class Untraceable(nn.Module):
        def forward(self, h):
            torch._dynamo.graph_break()
            return -h

    block = hbnode.HeavyBallODEBlock(Untraceable(), compile=True).double()
    x = make_input().requires_grad_()
    with pytest.warns(CompilationWarning, match="compile=True has no effect"):
        h = block(x)
    h.sum().backward()
    block(x)  # said once
    plain = hbnode.HeavyBallODEBlock(Untraceable()).double()
    torch.testing.assert_close(h, plain(x))


def test_random_numbers_are_not_compiled():
    dropout = hbnode.HeavyBallODEBlock(nn.Sequential(nn.Linear(4, 4), SolveDropout(0.5)), compile=True).double()
    with pytest.warns(CompilationWarning, match="draws random numbers"):
        dropout(make_input())


def ends_of_short_solves(block):
    """The end of a solve, its gradients and its count, time and again, with whatever may change in between."""
    x, found = make_input(), []

    def solve(x):
        h = block(x)
        inputs = [z for z in (x, *block.parameters()) if z.requires_grad]
        gradients = torch.autograd.grad(h.sin().sum(), inputs, retain_graph=True) if inputs else ()
        again = torch.autograd.grad(h.sin().sum(), inputs) if inputs else ()
        found.extend([h.detach(), *gradients, *again])
        counts.append((block.nfe.forward, block.nfe.steps, block.nfe.rejected))

    counts: list[tuple] = []
    solve(x.requires_grad_())
    solve(x.detach())
    with torch.no_grad():
        found.append(block(x))
        block.field.func.layers[0].weight.mul_(1.5)
    solve(x[:2].detach())
    block.field.func.layers[0].weight = nn.Parameter(block.field.func.layers[0].weight.detach() / 2)
    solve(x)
    block.field.func.layers.requires_grad_(False)
    solve(x)
    block.t_span = (0.5, -1.0)
    solve(x)
    lent = {name: 2 * p for name, p in block.named_parameters()}
    found.append(torch.func.functional_call(block, lent, x))
    nn.functional.relu(block(x), inplace=True)
    return found, counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")
@pytest.mark.parametrize(
    ("method", "gradient"),
    [
        ("nystrom4", "checkpoint"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("nystrom4", "direct"), ("leapfrog", "checkpoint"), ("tsit5", "direct"))
        ),
    ],
)
def test_short_compiled_solves_whatever_changes(method, gradient, eager_compiler):
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        net = MLP(4, [6], 4, activation=nn.Tanh, time_dependent=True)
        solver = {"method": method, "steps": 2, "gradient": gradient, "compile": compile}
        block = hbnode.HeavyBallODEBlock(net, **solver).double()
        found.append(ends_of_short_solves(block))
    (expected, counts), (got, compiled_counts) = found
    assert len(got) == len(expected)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert compiled_counts == counts
    assert block.field.compiled
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
