"""The Hessian-free optimizer: conjugate gradients, steps, what it refuses, and the models that it takes."""

import copy
import itertools
import math
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hbnode
from hbnode.optim import tanh_hidden
from hbnode.optim.conjugate_gradients import backtrack, conjugate_gradients, line_search
from tests.models import slow

X, Y = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(0)).unbind()
CLASSES = torch.zeros(4, 5, dtype=torch.long)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def optimizer_of(model, loss="mse", **options):
    return hbnode.optim.HessianFree(model.parameters(), loss=loss, **options)


class Net(nn.Module):
    """A layer that may return a state too, and a readout."""

    def __init__(self, layer, width=4):
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(width, 3)

    def forward(self, x):
        out = self.layer(x)
        return self.readout(out[0] if isinstance(out, tuple) else out)


# Conjugate gradients and searches


def test_conjugate_gradients_solve():
    root, b = torch.randn(20, 20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    a = root @ root.T + 0.1 * torch.eye(20, dtype=torch.float64)
    expected = torch.linalg.solve(a, b)
    for start, scale in itertools.product((None, 0.9 * expected, -expected), (None, a.diagonal())):
        solution = conjugate_gradients(lambda v: a @ v, b, start, limit=60, tolerance=0.0, preconditioner=scale)
        torch.testing.assert_close(solution.iterates[-1][0], expected, rtol=1e-7, atol=1e-8)
        for d, value in solution.iterates:
            assert value == pytest.approx(float(d @ a @ d / 2 - b @ d), abs=1e-9)


def test_conjugate_gradients_stop_by_the_rule_of_martens():
    """With values by i, the first i > k, k = max(10, i / 10), at which the relative progress over k is below k eps."""
    a, b = torch.linspace(0.01, 1, 200, dtype=torch.float64), torch.ones(200, dtype=torch.float64)
    limited = [conjugate_gradients(lambda v: a * v, b, None, limit=limit, tolerance=0.0) for limit in range(1, 60)]
    values = [0.0, *(solution.iterates[-1][1] for solution in limited)]
    assert limited[-1].stop == "limit"
    expected = next(i for i in range(11, 60) if (values[i] - values[i - 10]) / values[i] < 10 * 5e-4)
    found = conjugate_gradients(lambda v: a * v, b, None, limit=60)
    assert (found.stop, found.iterations) == ("progress", expected)
    steps = sorted({math.ceil(1.3**j) for j in range(30) if 1.3**j < expected} | {expected})
    assert [value for _, value in found.iterates] == [values[i] for i in steps]
    assert conjugate_gradients(lambda v: -v, b, None, limit=9).stop == "negative curvature"
    assert conjugate_gradients(lambda v: v, b, None, limit=9).stop == "solved"


def test_backtracking_and_the_line_search():
    iterates = [(torch.tensor([float(k)]), -float(k)) for k in range(1, 5)]
    assert backtrack(iterates, lambda d: abs(float(d) - 2)) == (torch.tensor([2.0]), -2.0, 0.0)
    d, g = torch.tensor([4.0]), torch.tensor([-2.0])
    length, loss = line_search(d, 9.0, 1.0, g, lambda d: float(d - 1) ** 2)
    assert (length, loss) == (pytest.approx(0.8**4), pytest.approx((4 * 0.8**4 - 1) ** 2))
    assert line_search(d, 9.0, 1.0, -g, float) == (0.0, 1.0)
    assert line_search(d, 1.0 - 0.081, 1.0, g, float) == (1.0, 1.0 - 0.081)  # 0.01 alpha g^T d = -0.08
    assert line_search(d, 1.0 - 0.079, 1.0, g, lambda d: 0.0)[0] == 0.8


# Steps


def test_a_step_solves_linear_least_squares():
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer, start = optimizer_of(model, damping=0.0, min_damping=0.0), model.weight.detach().clone()
    optimizer.step(lambda: (model(x), y))
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones_like(x[:, :1])], 1), y).solution
    torch.testing.assert_close(model.weight, solution[:-1].T, rtol=1e-3, atol=1e-3)
    direction = optimizer.state[model.weight]["direction"]  # where the next step starts
    torch.testing.assert_close(direction, model.weight - start, rtol=1e-2, atol=1e-2)
    assert optimizer.progress.ratio == pytest.approx(1, abs=1e-6)
    assert (optimizer.progress.step_length, optimizer.progress.outcome) == (1, "accepted")


@pytest.mark.parametrize("samples", [0, 2])
def test_a_resumed_run_goes_on_exactly(samples):
    model = nn.ModuleList([hbnode.nn.TanhRNN(2, 4, batch_first=True), nn.Linear(4, 3)])
    batches = [(torch.randn(8, 5, 2), torch.randint(3, (8, 5))) for _ in range(6)]
    options = {"structural_damping": 0.1, "preconditioner_samples": samples}

    def run(model, optimizer, batches):
        for x, y in batches:

            def forward(x=x, y=y):
                h, _ = model[0](x)
                return model[1](h), y, tanh_hidden(h)

            optimizer.step(forward)

    optimizer = optimizer_of(model, "cross_entropy", **options)
    run(model, optimizer, batches[:3])
    resumed = copy.deepcopy(model)
    again = optimizer_of(resumed, "cross_entropy", **options)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    run(model, optimizer, batches[3:])
    run(resumed, again, batches[3:])
    assert optimizer.progress == again.progress
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_a_step_that_helps_nowhere_is_rejected_and_lambda_grows():
    model = nn.Linear(3, 3)
    start = model.weight.detach().clone()
    optimizer = optimizer_of(model)
    optimizer.step(lambda: (model(X) + (0.0 if torch.equal(model.weight, start) else math.nan), Y))
    progress = optimizer.progress
    assert (progress.outcome, progress.step_length, progress.reduction) == ("rejected", 0.0, 0.0)
    assert torch.equal(model.weight, start)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("damping", "outcome", "loss", "largest"), [(0.1, "stationary", 1e-12, 0.1), (1e7, "accepted", 1.0, 100)]
)
def test_lambda_comes_down_and_stays_down_after_an_exact_fit(damping, outcome, loss, largest):
    x, model = torch.randn(10, 3), nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = optimizer_of(model, damping=damping)
    for _ in range(40):
        optimizer.step(lambda: (model(x), x.sum(1, keepdim=True)))
    assert optimizer.progress.outcome == outcome
    assert optimizer.progress.loss < loss
    assert optimizer.progress.damping < largest


def test_the_preconditioner_is_the_mean_square_of_the_cases_gradients():
    model, unused = nn.Linear(3, 3, dtype=torch.float64), nn.Parameter(torch.ones(2, dtype=torch.float64))
    parameters, x, y = [*model.parameters(), unused], X.double(), Y.double()
    options = {"damping": 0.0, "min_damping": 0.0, "preconditioner_samples": 3}
    optimizer = hbnode.optim.HessianFree(parameters, loss="mse", **options)
    optimizer.step(lambda: (model(x), y))
    assert optimizer.progress.reduction > 0
    with torch.no_grad():
        found = optimizer._model.preconditioner(4000)
    losses = (model(x) - y).square().sum((1, 2)) / 2
    gradients = [torch.autograd.grad(loss, parameters[:-1], retain_graph=True) for loss in losses]
    squares = [torch.cat([g.flatten() for g in each]) ** 2 for each in gradients]
    torch.testing.assert_close(found[:12], torch.stack(squares).mean(0) ** 0.75, rtol=0.1, atol=0)
    assert (found[12:] == 2.0**-52 * found.max()).all()


def test_a_graph_from_before_the_step_is_refused_and_products_belong_to_the_step():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer, v, loss = optimizer_of(model), torch.ones(31), model(X).sum()
    optimizer.step(lambda: (model(X), Y))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    expected = optimizer.product(v)
    with torch.no_grad():
        model[1].weight.add_(1.0)
    torch.testing.assert_close(optimizer.product(v), expected)
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"2 of them were frozen after it. Fix: requires_grad_\(True\)"):
        optimizer.product(v)


def test_ignored_positions_and_weights_of_zero_have_no_effect():
    model, again, y = nn.Linear(3, 4), nn.Linear(3, 4), torch.randint(4, (4, 5))
    again.load_state_dict(model.state_dict())
    ignored, weight = y.clone(), torch.ones(4, 5)
    ignored[:, 2:], weight[:, 2:] = -100, 0
    one, other = optimizer_of(model, "cross_entropy"), optimizer_of(again, "cross_entropy")
    for _ in range(2):
        one.step(lambda: (model(X), ignored))
        other.step(lambda: (again(X), y, None, weight))
    torch.testing.assert_close(model.weight, again.weight)
    other.step(lambda: (again(X), y, None, torch.zeros(4, 5)))
    assert other.progress.outcome == "stationary"
    model, y = nn.Linear(3, 3), Y.clone()
    y[1] = math.nan
    optimizer = optimizer_of(model)
    optimizer.step(lambda: (model(X), y, None, (~y.isnan()).float()))
    assert optimizer.progress.reduction > 0


def test_dropout_draws_one_mask_for_a_step():
    model, drawn = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)), []
    optimizer = optimizer_of(model, damping=1.0)

    def evaluate():
        drawn.append(torch.rand(()).item())
        return model(X), Y

    for _ in range(2):
        optimizer.step(evaluate)
        assert len(drawn) > 2
        assert len(set(drawn)) == 1
        assert optimizer.progress.reduction > 0
        drawn.clear()


def test_closures_that_differentiate():
    x = torch.randn(20, 2, dtype=torch.float64).requires_grad_()
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = optimizer_of(model)
    for _ in range(5):
        optimizer.step(lambda: (torch.autograd.grad(model(x).sum(), x, create_graph=True)[0], -x.detach()))
    assert optimizer.progress.new_loss < 0.1


def test_tanh_hidden():
    h, weight = tanh_hidden(torch.tensor([0.0, 0.5, 1.0, -1.0], requires_grad=True))
    assert h.requires_grad
    assert weight.isfinite().all()
    torch.testing.assert_close(weight[:2], torch.tensor([1.0, 4 / 3]))


# Parameters, copies and states


def test_frozen_and_unused_parameters_stay_and_groups_are_added():
    model = Net(nn.GRU(3, 4, batch_first=True))
    model.layer.weight_hh_l0.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2))
    before = copy.deepcopy(model.state_dict())
    optimizer = hbnode.optim.HessianFree([*model.layer.parameters(), model.unused], loss="mse")
    optimizer.add_param_group({"params": model.readout.parameters()})
    optimizer.step(lambda: (model(X), Y))
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"layer.weight_hh_l0", "unused"}
    model.layer.weight_hh_l0.requires_grad_(True)
    optimizer.step(lambda: (model(X), Y))
    assert not torch.equal(model.layer.weight_hh_l0, before["layer.weight_hh_l0"])


def test_copies_files_and_other_dtypes(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = optimizer_of(model, damping=0.3)
    optimizer.step(lambda: (model(X), Y))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["state"][0]["direction"], optimizer.state[model.weight]["direction"])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    assert copied.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"] < 0.3
    model.double()
    optimizer.step(lambda: (model(X.double()), Y.double()))
    assert optimizer.progress.reduction > 0


def test_states_of_others_are_refused():
    model = nn.Linear(3, 5, bias=False)
    optimizer = optimizer_of(model)
    optimizer.step(lambda: (model(X), X @ torch.ones(3, 5)))
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(ValueError, match=r"direction of shape \(5, 3\) for .* \(3, 5\)"):
        optimizer_of(nn.Linear(5, 3, bias=False)).load_state_dict(optimizer.state_dict())


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": nn.functional.cross_entropy}, "must be one of.*Fix: loss='cross_entropy'"),
        ({"damping": 1e-4}, "at least min_damping=0.0002"),
        ({"params": [torch.zeros(2).half()]}, r"float32 or float64.*model.float\(\)"),
        ({"params": [{"params": [torch.zeros(2)], "damping": 1.0}]}, r"its own, got \['damping'\]"),
    ],
    ids=["loss", "damping", "half", "group"],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        hbnode.optim.HessianFree(**({"params": [torch.zeros(2)], "loss": "mse"} | options))


REFUSED = {
    "loss": ("mse", lambda z: (z - Y).square().mean(), TypeError, r"must return .* got Tensor. Fix: .* backward"),
    "state": ("mse", lambda z: ((z, None), Y), TypeError, "got tuple. Fix: output, state = model"),
    "targets": ("mse", lambda z: (z, Y[..., 0]), ValueError, "must have the shape of the outputs"),
    "detached": ("mse", lambda z: (z.detach(), Y, z), ValueError, "the outputs of .* do not depend on"),
    "weights": ("mse", lambda z: (z, Y, z, torch.ones(4, 5)), ValueError, "must broadcast to .*unsqueeze"),
    "classes": ("cross_entropy", lambda z: (z.mT, CLASSES, z), ValueError, r"Fix: outputs.movedim\(1, -1\)"),
    "range": ("bce", lambda z: (z, Y, z), ValueError, r"expects targets in \[0, 1\]"),
    "nan": ("mse", lambda z: (z * math.nan, Y, z), FloatingPointError, "the loss is nan before the step"),
    "root": ("mse", lambda z: (z.abs().sub(z.abs()).sqrt(), Y, z), FloatingPointError, "gradient of weight"),
    "noise": ("mse", lambda z: (z + random.random(), Y, z), ValueError, "the loss .* and then .* Fix: draw noise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_closure_must_not_return(name):
    (loss, wrong, error, message), model = REFUSED[name], nn.Linear(3, 3)
    optimizer = hbnode.optim.HessianFree(model.named_parameters(), loss=loss, structural_damping=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=f"(?s){message}"):
        optimizer.step(lambda: wrong(model(X)))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_steps_without_a_closure_and_a_curvature_that_is_not_finite():
    model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"earlier backward\(\) are not used. Fix: optimizer.step\(lambda: \(model"):
        optimizer_of(model).step()
    with pytest.raises(FloatingPointError, match=r"of curvature\(\) are not finite"):
        optimizer_of(model).step(lambda: (model(X), Y), lambda: (model(X * math.nan), Y))


class Detached(torch.autograd.Function):
    """The sine, whose backward pass has no graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() * ctx.saved_tensors[0].detach().cos()


def clamped(model, x):
    model[0].weight.register_hook(lambda grad: grad.detach().clamp(-1, 1))
    return model[0](x)


def reentrant(model, x):
    return model[1](checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=True))


NOT_TWICE = [
    (lambda m, x: 1000 * m(x) + Detached.apply(m[0](x)), "backward pass of DetachedBackward has no graph"),
    (clamped, "a hook of a parameter detaches its gradient"),
    (reentrant, "reentrant checkpoints.*use_reentrant=False"),
]


@pytest.mark.parametrize(("evaluate", "message"), NOT_TWICE, ids=["detached", "hook", "reentrant"])
def test_a_model_that_cannot_be_differentiated_twice_is_refused(evaluate, message):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=f"cannot be differentiated twice.*{message}"):
        optimizer_of(model).step(lambda: (evaluate(model, X), Y))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Models


class Timed(Net):
    def forward(self, x):
        return self.readout(self.layer(x, 0.5 * torch.arange(5.0).expand(len(x), 5))[0])


class Checkpointed(Net):
    def forward(self, x):
        return self.readout(checkpoint(self.layer, x, use_reentrant=False))


class LanguageModel(nn.Module):
    """An embedding that is its readout too."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, 8), nn.GRU(8, 8, 2, batch_first=True, dropout=0.2)
        self.readout = nn.Linear(8, 5, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, tokens):
        return self.readout(self.layer(self.embed(tokens))[0])


def sequential(*layers, x=X, y=Y):
    return lambda: (nn.Sequential(*copy.deepcopy(layers)), x, y)


TOKENS = torch.arange(18).view(3, 6) % 5
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
PICTURES = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))


MODELS = {
    "DTRIV": lambda: (Net(hbnode.nn.DTRIV(3, 4, batch_first=True)), X, Y),
    "momentum GRU": lambda: (Net(hbnode.nn.MomentumGRU(3, 4, rule="adam", batch_first=True)), X, Y),
    "ODERNN": lambda: (Timed(hbnode.ODERNN(3, 4, field="hbnode")), X, Y),
    "encoder": sequential(nn.Linear(3, 4), ENCODER, nn.Linear(4, 3)),
    "checkpoint": lambda: (Checkpointed(nn.Sequential(nn.Linear(3, 4), nn.Tanh())), X, Y),
    "language model": lambda: (LanguageModel(), TOKENS, TOKENS),
    "pictures": sequential(*PICTURES, x=torch.randn(16, 1, 8, 8), y=torch.arange(16) % 10),
    "one sample": sequential(nn.Linear(3, 2), x=X[0, :1], y=CLASSES[0, :1]),
}
SLOW = {
    "adjoint": lambda: (hbnode.HeavyBallODEBlock(nn.Linear(3, 3), method="dopri5", gradient="adjoint"), X, Y),
    "compiled": lambda: (torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), backend="aot_eager"), X, Y),
}


@pytest.mark.parametrize("name", [*MODELS, *slow(*SLOW)])
def test_models(name):
    """The first step checks that J and J^T are transposes."""
    model, x, y = (MODELS | SLOW)[name]()
    optimizer = optimizer_of(model, "mse" if y.is_floating_point() else "cross_entropy", max_cg=3)
    losses = [float(optimizer.step(lambda: (model(x), y))) for _ in range(3)]
    assert optimizer.progress.new_loss < losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    v = torch.randn(2, sum(parameter.numel() for parameter in model.parameters()))
    a, b = (torch.dot(one, optimizer.product(other)) for one, other in (v, v.flip(0)))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_steps_in_threads_leave_settings_as_they_were():
    import torch._dynamo  # so that its stance is set too

    models, was = [nn.Linear(3, 3) for _ in range(4)], torch.backends.mkldnn.enabled

    def train(model):
        optimizer = optimizer_of(model)
        for _ in range(5):
            optimizer.step(lambda: (model(X), Y))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, models))
    assert torch.backends.mkldnn.enabled == was
    graphs = []
    torch.compile(models[0], backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(X)
    assert graphs
