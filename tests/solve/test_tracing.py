"""Models with a fixed grid as graphs of torch.compile, torch.export and torch.jit.trace, and what importing takes."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hbnode
from hbnode import _torch
from tests.models import AGAIN, pretend_tracing

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


def make_input(batch=5):
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
    model, x = Model(field, method=method, steps=2, gradient="direct"), make_input()
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
    state = field.initial_state(make_input(2))
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


def test_trajectories_and_integrals_as_they_are_traced():
    block = hbnode.HeavyBallODEBlock(nn.Tanh(), initial_momentum=nn.Tanh(), gradient="direct", steps=4)
    x = torch.randn(2, 2, dtype=torch.float64)

    def solve():
        trajectory = block.double().trajectory(x, [0.0, 0.4, 1.5])
        block.method = "tsit5"
        return *trajectory, *block.with_integral(x, lambda t, state, derivative: derivative[0].square().sum(1))

    expected = solve()
    block.method = None
    with pytest.MonkeyPatch.context() as patch:
        pretend_tracing(patch)
        torch.testing.assert_close(solve(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun2", "heun3", "rk4"])
def test_times_of_torchdiffeqs_methods(method):
    t = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    y0 = torch.ones(2, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)

    def field(t, state):
        return t * state[0] - state[1].sum(), state[1].cos()

    expected = hbnode.odeint(field, y0, t, method=method, steps=3)
    with pytest.MonkeyPatch.context() as patch:
        pretend_tracing(patch)
        found = hbnode.odeint(field, y0, t, method=method, steps=3)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.usefixtures("_traced")
def test_a_func_that_begins_in_place():
    x = torch.randn(2, 3)
    in_place, plain = (nn.Sequential(nn.ReLU(inplace=flag), nn.Linear(3, 3)) for flag in (True, False))
    in_place.load_state_dict(plain.state_dict())
    found, expected = (hbnode.HeavyBallODEBlock(func, steps=2)(x) for func in (in_place, plain))
    torch.testing.assert_close(found, expected)


SLOW = pytest.mark.slow
EVERY = [(*case, [SLOW] if case not in (("hbnode", "nystrom4"), ("ghbnode", "leapfrog")) else []) for case in CASES]
EVERY = [pytest.param(field, method, marks=marks) for field, method, marks in EVERY]


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("field", "method"), EVERY)
def test_one_graph_of_torch_compile(field, method):
    model, x = Model(field, method=method, steps=2), make_input()
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
    model, x = Model(field, method=method, steps=2, gradient="adjoint"), make_input()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, (x.detach(),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 2, 7):
        x = make_input(count)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(("field", "method"), [("hbnode", "nystrom4"), ("sonode", "heun3")])
def test_jit_trace(field, method):
    model = Model(field, method=method, steps=2)
    traced = torch.jit.trace(model, (make_input().detach(),))
    x = make_input(7)
    torch.testing.assert_close(traced(x), model(x), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.usefixtures("_compiler")
def test_adaptive_steps_are_no_graph_and_say_so():
    model, x = Model("hbnode"), make_input().detach()
    for trace in (lambda: torch.export.export(model, (x,)), lambda: torch.jit.trace(model, (x,))):
        with pytest.raises(ValueError, match="Fix: steps=n"):
            trace()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Fix: steps=n"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("gradient", ["checkpoint", AGAIN], ids=["kept", "again"])
def test_a_gradient_that_saves_memory_is_taken_outside_of_the_graph(gradient):
    model, x = Model("hbnode", steps=30, gradient=gradient), make_input()
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
