"""Models with a fixed grid as graphs of torch.compile, torch.export and torch.jit.trace, and of compile=True."""

import copy
import importlib
import os
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

import hbnode
from hbnode import errors
from hbnode._tree import parts
from hbnode.nn import SolveDropout
from hbnode.solve import compiled
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.compiled import CompilationWarning
from hbnode.solve.settings import Settings
from tests.models import AGAIN, compile_without_back_end, gradients, make_field, make_input, pretend_tracing, slow

FIELDS = {
    "node": lambda: hbnode.NODE(hbnode.nn.MLP(3, [4], 3, activation=nn.Tanh, time_dependent=True)),
    "anode": lambda: hbnode.ANODE(hbnode.nn.MLP(4, [4], 4, activation=nn.Tanh), 1),
    "sonode": lambda: hbnode.SONODE(hbnode.nn.MLP(6, [4], 3, activation=nn.Tanh), initial_velocity=nn.Linear(3, 3)),
    "hbnode": lambda: hbnode.HBNODE(hbnode.nn.MLP(3, [4], 3, activation=nn.Tanh, time_dependent=True)),
    "hbnode, channels": lambda: hbnode.HBNODE(nn.Linear(3, 3), damping=torch.tensor([0.1, 0.2, 0.3])),
    "hbnode, constants": lambda: hbnode.HBNODE(nn.Linear(3, 3), damping=[0.1, 0.2, 0.3], learn_damping=False),
    "ghbnode": lambda: hbnode.GHBNODE(hbnode.nn.MLP(3, [4], 3, activation=nn.Tanh)),
}
CASES = [  # each field and each kind of method at least once
    ("hbnode", "nystrom4"),
    ("ghbnode", "leapfrog"),
    ("node", "rk4"),
    ("anode", "tsit5"),
    ("sonode", "heun3"),
    ("hbnode", "exponential"),
    ("hbnode, channels", "midpoint"),
    ("hbnode, constants", "nystrom6"),
]


GRAPHS = [("hbnode", "leapfrog"), *slow(*CASES)]


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
    torch.compiler.reset()
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
    with pytest.raises(ValueError, match=r"Fix: .*steps=n"):
        torch.jit.trace(model, (x,))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Fix: .*steps=n"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_importing_hbnode_starts_no_threads():
    """OpenMP's do not survive a user's os.fork, which would hang."""
    count = "len(os.listdir('/proc/self/task'))"
    code = f"import os, torch; before = {count}; import hbnode; assert {count} == before"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "2"})


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_a_gradient_that_saves_memory_is_taken_outside_of_the_graph():
    model = Model("hbnode", steps=30, gradient=AGAIN)
    torch.compile(model, backend="eager")(rows()).sum().backward()
    assert 0 < model.block.nfe.forward <= model.block.nfe.backward + 1


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
        *slow(
            ("hbnode", {"method": "nystrom4", "steps": 25}),  # beyond one program
            ("node", {"per_sample": True}),
            ("ghbnode", {"method": "leapfrog", "steps": 2}),
            ("sonode", {"gradient": "direct"}),
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("default:The .grad attribute")  # dynamo's own, about inputs that are not leaves
@pytest.mark.usefixtures("eager_compiler")
def test_compiled_steps_compute_the_same(model, settings):
    """With a leaf that f closes over, whichever weights it has and whether gradients are wanted."""
    field, leaf = make_field(model).double(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    func = field.func
    field.func = nn.Sequential()  # of a structure of its own
    field.func.forward, field.func.inside = lambda *args: leaf * func(*args), func
    x, t = make_input(), torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)

    def solve(compile):
        found, count = gradients(field, x, t, compile=compile, **settings)
        h = field.readout(hbnode.odeint(field, field.initial_state(x), t, compile=compile, **settings))
        with torch.no_grad():
            end = field.readout(hbnode.odeint(field, field.initial_state(x), t, compile=compile, **settings))[-1]
        return found, end, *torch.autograd.grad(h.sum(), leaf), count

    for factor in (1.0, 1.5):
        with torch.no_grad():
            leaf.mul_(factor)
            next(func.parameters()).mul_(factor)
        (*expected, count), (*found, again) = solve(False), solve(True)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert again == count
    assert field.compiled
    assert not any(program.failed for key, program in field.compiled.items() if key != "plans")
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
    field, event = hbnode.NODE(nn.Linear(2, 2)), hbnode.Event(lambda t, y: y[:, 0] - 9.0)
    with pytest.warns(CompilationWarning, match="events are searched for in Python. Fix: leave compile out"):
        hbnode.odeint(field, torch.ones(1, 2), [0.0, 0.1], events=event, compile=True)


@pytest.mark.slow
def test_beyond_its_last_graph_a_program_runs_without_compilation(eager_compiler, monkeypatch):
    """Each number of dimensions needs a graph; those that exist are still used."""
    monkeypatch.setattr(hbnode.solve.compiled, "GRAPHS", 1)
    block, x = hbnode.HeavyBallODEBlock(nn.Linear(2, 2), compile=True), torch.randn(2, 3, 2)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        block(x)
        with pytest.warns(CompilationWarning, match="1 graphs of this field"):
            block(x[0])
        block(x[0]), block(x)  # said once
    assert not any(program.failed for key, program in block.field.compiled.items() if key != "plans")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("model", "settings", "is_whole"),
    [
        ("sonode", {"steps": 3}, False),
        ("hbnode", {"rtol": 1e-2, "atol": 1e-2}, False),
        ("hbnode", {"rtol": 1e-2, "atol": 1e-2}, True),
    ],
)
def test_compiled_by_inductor(model, settings, is_whole, monkeypatch):
    monkeypatch.setattr(compiled, "STABLE", 1 if is_whole else 99)
    field, x, t = make_field(model, time_dependent=False).double(), make_input(), [0.0, 0.5]
    expected = solved(field, x, t, **settings)
    for _ in range(1 + is_whole):
        found = solved(field, x, t, compile=True, **settings)
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-9, atol=1e-11)
        assert found[2] == expected[2]
    for key, program in field.compiled.items():
        assert key == "plans" or not program.failed
        assert "steps" in settings or key == "plans" or len(program.whole) == is_whole


# compile=True: a whole adaptive solve


class Of(nn.Module):
    """A function of h as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


class Steep(nn.Module):
    """-3 h exp(h²), which overflows far from 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 3.0))

    def forward(self, h):
        return -self.w * h * h.square().exp()


@pytest.fixture
def no_compiler(monkeypatch):
    """What torch.compile would trace runs without it; after one solve, whole solves are one function."""

    def init(self, function, device_type):
        self.run, self.failed, self.is_full = function, False, False

    monkeypatch.setattr(compiled.Program, "__init__", init)
    for name in ("STABLE", "AGAIN"):
        monkeypatch.setattr(compiled, name, 1)


def solved(field, x, t, **settings):
    """The states at all times, gradients of x and of all parameters, and the number of evaluations and steps."""
    x, nfe, settings = x.clone().requires_grad_(), hbnode.nfe.NFE(), Settings(**settings).checked()
    solve = importlib.import_module("hbnode.solve.odeint").solve
    states = parts(solve(field, field.initial_state(x), t, settings, nfe, end=len(t) == 2))
    value = sum((row.sin() * torch.linspace(0.5, 1.5, row.numel()).view(row.shape)).sum() for row in states)
    return states, torch.autograd.grad(value, [x, *field.parameters()], allow_unused=True), nfe


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=5, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_a_solve_in_graphs_is_the_eager_one(no_compiler, data):
    """Values, gradients and counts, also after rejected steps, and if one lane overflows."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    damping, learn = data.draw(st.sampled_from([0.3, torch.tensor([0.1, 0.4, 0.9])])), data.draw(st.booleans())
    overflows = data.draw(st.booleans())
    func = Steep() if overflows else nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    field = hbnode.HBNODE(func, damping=damping, learn_damping=learn).double()
    x = torch.randn(3, 3, dtype=torch.float64) * torch.tensor([[0.1], [0.5], [1.5]])
    end = data.draw(st.sampled_from([1.0, -1.0])) * (0.5 if overflows else 3.0)
    t = [0.0, *(end * c for c in data.draw(st.sampled_from([[], [0.5], [0.1, 0.12, 0.9]]))), end]
    tol = 10.0 ** -data.draw(st.integers(2, 5))
    settings = {
        "method": data.draw(st.sampled_from(["nystrom4", "nystrom8", "exponential", "tsit5"])),
        "rtol": tol, "atol": tol, "per_sample": data.draw(st.booleans()),
        "save": data.draw(st.sampled_from(["interpolate", "exact"])),
    }  # fmt: skip
    if overflows:
        x[2], settings["options"] = 2.2, {"first_step": 0.5}
    expected = solved(field, x, t, **settings)
    for _ in range(3):  # by attempts, then whole, if no attempt is rejected
        found = solved(field, x, t, **settings, compile=True)
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-8, atol=1e-10)
        assert found[2] == expected[2]
        assert (found[2].steps, found[2].rejected) == (expected[2].steps, expected[2].rejected)
    assert expected[2].rejected or not overflows
    programs = next(iter(field.compiled.values()))
    assert programs.latest == expected[2].steps + expected[2].rejected
    is_whole = programs.latest <= compiled.LONGEST and not expected[2].rejected and not overflows
    assert len(programs.whole) == is_whole


@pytest.mark.usefixtures("no_compiler")
def test_a_rejected_attempt_with_infinite_derivatives_does_not_reach_gradients():
    """A root of 0 in the first attempt, whose gradient would be 0 * inf."""
    field = hbnode.NODE(Of(lambda h: -50 * h * (1 - h) + 0.1 * (h * (h > 0)).sqrt())).double()
    x, settings = torch.full((2, 3), 0.95, dtype=torch.float64), {"rtol": 1e-3, "atol": 1e-3}
    expected = solved(field, x, [0.0, 0.1], **settings)[2]
    for _ in range(3):
        assert solved(field, x, [0.0, 0.1], compile=True, **settings)[1][0].isfinite().all()
    programs = next(iter(field.compiled.values()))
    assert not programs.whole

    attempts = expected.steps + expected.rejected
    for end in torch.linspace(0.1, 0.2, 11).tolist():  # a graph of as many attempts, from solves without rejected ones
        other = torch.full((2, 3), 0.5, dtype=torch.float64), [0.0, end]
        nfe = solved(field, *other, **settings)[2]
        if (nfe.steps, nfe.rejected) == (attempts, 0):
            break
    for _ in range(2):
        assert solved(field, *other, compile=True, **settings)[2] == nfe
    assert list(programs.whole) == [attempts]
    assert solved(field, x, [0.0, 0.1], compile=True, **settings)[1][0].isfinite().all()


@pytest.mark.sparse
@pytest.mark.parametrize(
    ("error", "func", "settings"),
    [
        (errors.MaxStepsError, torch.tanh, {"max_steps": 2}),
        (errors.MaxNFEError, torch.tanh, {"options": {"max_nfe": 8}}),
        (errors.StepSizeUnderflowError, lambda h: -10 * h, {"options": {"min_step": 0.9, "first_step": 4.0}}),
        (errors.DivergenceError, torch.square, {}),
        (errors.NonFiniteError, lambda h: -1.0 - h.sqrt(), {}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("per_sample", [False, True])
def test_failures_of_graphs_are_those_of_the_loop(error, func, settings, per_sample, no_compiler):
    field, x, raised = hbnode.NODE(Of(func)), torch.full((2, 3), 0.5, dtype=torch.float64), []
    for is_compiled in (False, True):
        with pytest.raises(error) as caught, torch.no_grad():
            hbnode.odeint(field, x, [0.0, 4.0], method="tsit5", per_sample=per_sample, compile=is_compiled, **settings)
        raised.append((type(caught.value), str(caught.value), caught.value.t, caught.value.nfe))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    ("error", "limit"), [(errors.MaxStepsError, {"max_steps": 1}), (errors.MaxNFEError, {"options": {"max_nfe": 12}})]
)
def test_a_graph_of_a_whole_solve_has_the_limits_of_its_call(error, limit, no_compiler):
    """They may be lower than those of the calls for which it was made."""
    field, x = hbnode.NODE(Of(torch.tanh)), torch.full((2, 3), 0.5, dtype=torch.float64)
    settings = {"method": "tsit5", "compile": True, "rtol": 1e-4, "atol": 1e-4}
    with torch.no_grad():
        for _ in range(3):
            hbnode.odeint(field, x, [0.0, 4.0], **settings)
        programs = next(iter(field.compiled.values()))
        assert len(programs.whole) == 1
        with pytest.raises(error):
            hbnode.odeint(field, x, [0.0, 4.0], **settings, **limit)


def test_a_solve_like_an_earlier_one_sees_what_changed(no_compiler, monkeypatch):
    """It goes straight to its graph, but not with another damping, hook or dtype."""
    again, found = compiled.solve_again, []
    monkeypatch.setattr(compiled, "solve_again", lambda *args: found.append(again(*args)) or found[-1])
    field = hbnode.HBNODE(nn.Linear(3, 3), damping=0.3, learn_damping=False).double()
    x, t, settings = make_input()[:, :3], [0.0, 0.5], {"method": "nystrom4", "rtol": 1e-2, "atol": 1e-2}

    def check(is_again):
        found.clear()
        graph, eager = (solved(field, x, t, compile=compile, **settings)[:2] for compile in (True, False))
        torch.testing.assert_close(graph, eager, rtol=1e-9, atol=1e-11)
        assert any(solution is not None for solution in found) == is_again

    for is_again in (False, False, True):
        check(is_again)
    with torch.no_grad():
        field.func.weight.mul_(-1.5)
    check(True)
    field.func = nn.Linear(3, 3).double()
    check(True)
    field.load_state_dict(hbnode.HBNODE(nn.Linear(3, 3), damping=0.7, learn_damping=False).double().state_dict())
    check(False)
    check(True)
    with hbnode.diagnostics.record_steps(field) as steps:
        check(False)
    assert len(steps) == 2  # of the solves with and without compilation
    field.func.register_forward_hook(lambda module, args, output: 2.0 * output)
    check(False)
    settings["method"] = None
    field.register_forward_hook(lambda module, args, output: output)
    check(False)
    field.float()
    with pytest.raises(TypeError, match="expected one dtype"):
        solved(field, x, t, compile=True, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler", "_compiler")
def test_output_times_of_samples_with_own_steps_need_one_graph():
    """Whatever the strides of the state, and whether samples have their own times."""
    torch._dynamo.utils.counters.clear()
    field, x = hbnode.NODE(nn.Linear(3, 3)), torch.randn(5, 3)
    with torch.no_grad():
        for y in (x, x.T.contiguous().T, torch.randn(5, 6)[:, 1:4]):
            for t in ([0.0, 0.5, 3.0], [[0.0, 0.4, 2.0]] * 5):
                hbnode.odeint(field, y, t, per_sample=True, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("settings", [{}, {"steps": 2}, {"jump_times": [0.5]}], ids=str)
def test_an_empty_batch_is_solved(settings, no_compiler):
    h = hbnode.odeint(hbnode.NODE(nn.Linear(3, 3)), torch.ones(0, 3), [0.0, 1.0], compile=True, **settings)
    assert h.shape == (2, 0, 3)


def test_failures_of_a_program_of_fixed_steps_are_named(no_compiler):
    """NaNs, and more evaluations than a call may take, which may be fewer than those of the first call."""
    field, settings = hbnode.NODE(Of(torch.square)), {"method": "tsit5", "steps": 2, "compile": True}
    x = torch.ones(2, 3)
    with hbnode.count_nfe(field) as nfe:
        hbnode.odeint(field, x, [0.0, 0.5], options={"max_nfe": 13}, **settings)
    assert nfe.forward == 13
    with pytest.raises(errors.MaxNFEError):
        hbnode.odeint(field, x, [0.0, 0.5], options={"max_nfe": 12}, **settings)
    with pytest.raises(errors.NonFiniteError) as error:
        hbnode.odeint(field, 1e9 * x, [0.0, 0.5], **settings)
    assert 0 <= error.value.t < 0.5
    assert not any(program.failed for program in field.compiled.values())


@pytest.mark.parametrize("gradient", ["direct", AGAIN], ids=["kept", "again"])
def test_a_solution_of_graphs_may_be_changed_in_place(gradient, no_compiler):
    block, gradients = hbnode.HeavyBallODEBlock(Of(torch.sin), gradient=gradient).double(), []
    for block.compile in (False, True):
        x, t = rows(2), torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
        gradients.append(torch.autograd.grad(block(x, t).mul_(2.0).square().sum(), [x, t]))
    torch.testing.assert_close(*gradients)
    assert gradients[0][1].all()


@pytest.mark.parametrize("per_sample", [False, True])
def test_what_needs_no_gradient_has_none(per_sample, no_compiler):
    """Also if one sample overflows, and in a graph of the whole solve."""
    field, x = hbnode.NODE(Steep().requires_grad_(False)).double(), torch.tensor([[0.1], [2.2]]).double().expand(2, 3)
    settings = {"per_sample": per_sample, "rtol": 1e-3, "atol": 1e-3, "options": {"first_step": 0.5}}
    with hbnode.count_nfe(field) as nfe:
        expected = hbnode.odeint(field, x, [0.0, 0.5], **settings)
    for _ in range(3):
        with hbnode.count_nfe(field) as found:
            h = hbnode.odeint(field, x, [0.0, 0.5], **settings, compile=True)
        assert not h.requires_grad
        assert found == nfe
        torch.testing.assert_close(h, expected)


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_signal_in_a_solve_in_graphs(per_sample, no_compiler):
    """Its jumps are padded to a number of which there are few."""
    signal = hbnode.Signal(torch.linspace(0, 2, 6), torch.tensor([0.0, 5.0, -5.0, 0.0, 4.0, 0.0]))
    field, x = hbnode.NODE(lambda t, h: signal(t) - h).double(), torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    settings = {"method": "tsit5", "rtol": 1e-4, "atol": 1e-4, "per_sample": per_sample}
    expected = solved(field, x, [0.0, 0.7, 1.9], **settings)
    found = solved(field, x, [0.0, 0.7, 1.9], compile=True, **settings)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-9, atol=1e-10)
    assert found[2] == expected[2]
    programs = next(iter(field.compiled.values()))
    assert programs.latest == expected[2].steps + expected[2].rejected


def test_steps_to_exact_times_are_not_limited_by_their_number(no_compiler):
    field, x, t = hbnode.NODE(nn.Linear(3, 3)).double(), rows(2), [0.0, 0.1, 0.2, 0.3, 0.4]
    nfe = solved(field, x, t, save="exact")[2]
    attempts = nfe.steps + nfe.rejected
    assert solved(field, x, t, save="exact", compile=True, max_steps=attempts - 3)[2] == nfe
    assert next(iter(field.compiled.values())).latest == attempts


def test_attempts_beyond_keep_bytes_are_computed_again(no_compiler):
    field, x, t = make_field("hbnode", time_dependent=False).double(), make_input(), [0.0, 0.3, 1.0]
    expected = solved(field, x, t, gradient="direct")
    for keep in (0, 1, 20_000):
        *found, nfe = solved(field, x, t, gradient=Checkpoint(keep_bytes=keep), compile=True)
        torch.testing.assert_close(found, list(expected[:2]), rtol=1e-10, atol=1e-12)
        eager = solved(field, x, t, gradient=Checkpoint(keep_bytes=keep))[2]
        assert (nfe.forward, nfe.steps) == (eager.forward, eager.steps)
        assert keep or nfe.backward > 0
    h, _ = hbnode.odeint(field, field.initial_state(x), t, gradient=Checkpoint(keep_bytes=0), compile=True)
    with torch.no_grad():
        next(field.func.parameters()).mul_(1.5)
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        h.sum().backward()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="changes the kind of CPU")
def test_the_cache_on_disk_keeps_kinds_of_cpus_apart(tmp_path):
    """Inductor's own key does not have the width of vectors: another CPU's code gives wrong values, or none."""
    code = """
import warnings, torch, hbnode
warnings.filterwarnings("error", "compile=True has no effect")
torch.manual_seed(0)
field, x = hbnode.NODE(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())), torch.randn(64, 64)
with torch.no_grad():
    ends = [hbnode.odeint(field, x, [0.0, 1.0], method="tsit5", steps=1, compile=c)[-1] for c in (True, False)]
torch.testing.assert_close(*ends)
"""
    for capability in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | capability
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
