"""The Hessian-free optimizer as it is used: which models it takes, what it refuses and how, what it reports."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hbnode
from hbnode.optim import tanh_hidden
from hbnode.optim.conjugate_gradients import Solution
from hbnode.optim.conjugate_gradients import backtrack, line_search

X, Y = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Net(nn.Module):
    """A layer that returns states, and a readout."""

    def __init__(self, layer, width=4):
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(width, 3)

    def forward(self, x):
        out = self.layer(x)
        return self.readout(out[0] if isinstance(out, tuple) else out)


class Packed(Net):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 3, 1]), batch_first=True)
        return self.readout(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


class Timed(Net):
    def forward(self, x):
        return self.readout(self.layer(x, torch.arange(5.0).expand(len(x), 5))[0])


class Checkpointed(Net):
    def forward(self, x):
        return self.readout(checkpoint(self.layer, x, use_reentrant=False))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Net(nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))


MODELS = {
    **{
        f"{cell} {name}": lambda cell=cell, options=options: Net(
            getattr(nn, cell)(3, 4, batch_first=True, **options), 8 if "bidirectional" in options else 4
        )
        for cell in ("RNN", "GRU", "LSTM")
        for name, options in {
            "plain": {},
            "deep": {"num_layers": 2, "dropout": 0.3, "bidirectional": True},
            "without bias": {"bias": False},
        }.items()
    },
    **{
        f"{cell} packed": lambda cell=cell: Packed(getattr(nn, cell)(3, 4, batch_first=True))
        for cell in ("RNN", "GRU", "LSTM")
    },
    "RNN relu": lambda: Net(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)),
    "TanhRNN packed": lambda: Packed(hbnode.nn.TanhRNN(3, 4, batch_first=True)),
    "DTRIV": lambda: Net(hbnode.nn.DTRIV(3, 4, batch_first=True)),
    **{
        f"{rule} {kind.__name__}": lambda kind=kind, rule=rule: Net(kind(3, 4, rule=rule, batch_first=True))
        for kind, rule in (
            (hbnode.nn.MomentumDTRIV, "momentum"),
            (hbnode.nn.MomentumGRU, "momentum"),
            (hbnode.nn.MomentumLSTM, "adam"),
            (hbnode.nn.MomentumRNN, "rmsprop"),
            (hbnode.nn.MomentumLSTM, "adaptive"),
        )
    },
    "adam MomentumLSTM wide": lambda: Net(hbnode.nn.MomentumLSTM(3, 600, rule="adam", batch_first=True), 600),
    "adaptive MomentumGRU wide": lambda: Net(hbnode.nn.MomentumGRU(3, 600, rule="adaptive", batch_first=True), 600),
    "ODERNN": lambda: Timed(hbnode.ODERNN(3, 4, field="hbnode")),
    "ODEBlock": lambda: Net(hbnode.HeavyBallODEBlock(nn.Linear(3, 3), steps=4, method="nystrom4"), 3),
    "adjoint": lambda: Net(hbnode.HeavyBallODEBlock(nn.Linear(3, 3), method="dopri5", gradient="adjoint"), 3),
    "encoder": encoder,
    "checkpoint": lambda: Checkpointed(nn.Sequential(nn.Linear(3, 4), nn.Tanh())),
    "compiled": lambda: Net(torch.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), backend="aot_eager")),
    "batch norm": lambda: Net(
        nn.Sequential(nn.Linear(3, 4), nn.Flatten(1), nn.BatchNorm1d(20), nn.Unflatten(1, (5, 4)))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """The first step checks that J and J^T are transposes."""
    model = MODELS[name]()
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", max_cg=3)
    losses = [float(optimizer.step(lambda: (model(X), Y))) for _ in range(3)]
    assert optimizer.progress.new_loss < losses[0]
    v = torch.randn(2, sum(parameter.numel() for parameter in model.parameters()))
    a, b = (torch.dot(one, optimizer.product(other)) for one, other in (v, v.flip(0)))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["momentum", "heavy_ball", "softmax"])
def test_transformers(attention):
    model = hbnode.nn.MomentumTransformer(5, 8, 2, 1, 16, attention=attention)
    tokens = torch.randint(5, (3, 6))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="cross_entropy", max_cg=3)
    losses = [float(optimizer.step(lambda: (model(tokens), tokens))) for _ in range(3)]
    assert losses[-1] < losses[0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.tanh()
        return ctx.y.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * (1 - ctx.y**2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda net, x: net.readout(Once.apply(net.layer(x))),
            "has no graph, that of OnceBackward. Fix: another operation",
        ),
        (
            lambda net, x: net.readout(checkpoint(net.layer, x.clone().requires_grad_(), use_reentrant=True)),
            r"reentrant checkpoints.*use_reentrant=False",
        ),
    ],
    ids=["once", "reentrant"],
)
def test_a_model_that_cannot_be_differentiated_twice_is_refused(wrong, message):
    model = Net(nn.Linear(3, 4))
    before = copy.deepcopy(model.state_dict())
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    with pytest.raises(RuntimeError, match=rf"cannot be differentiated twice.*{message}"):
        optimizer.step(lambda: (wrong(model, X), Y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def classes(outputs):
    return torch.zeros(outputs.shape[:-1], dtype=torch.long)


REFUSED = {
    "a loss": ("mse", lambda z: (z - Y).square().mean(), TypeError, r"must return .* got Tensor. Fix: .*no backward"),
    "nothing": ("mse", lambda z: None, TypeError, "got NoneType"),
    "a state": ("mse", lambda z: ((z, None), Y), TypeError, "got tuple. Fix: output, state = model"),
    "shape": ("mse", lambda z: (z, Y[..., 0]), ValueError, "must have the shape of the outputs"),
    "no graph": ("mse", lambda z: (z.detach(), Y, z), ValueError, "no graph to the parameters. Fix"),
    "empty": ("mse", lambda z: (z[:0], Y[:0]), ValueError, "have no cases"),
    "whole numbers": ("mse", lambda z: (z.long(), Y), TypeError, "must be real numbers"),
    "no hidden": ("mse", lambda z: (z, Y), ValueError, r"needs hidden states.*tanh_hidden"),
    "hidden": ("mse", lambda z: (z, Y, "h"), TypeError, "hidden must be a tensor, a pair"),
    "hidden without graph": ("mse", lambda z: (z, Y, X), ValueError, "the hidden of forward"),
    "negative": ("mse", lambda z: (z, Y, (z, -torch.ones(3))), ValueError, "must be finite numbers >= 0"),
    "weight": ("mse", lambda z: (z, Y, z, torch.ones(4, 5)), ValueError, "must broadcast to .*unsqueeze"),
    "classes": ("cross_entropy", lambda z: (z.mT, classes(z), z), ValueError, r"Fix: outputs.movedim\(1, -1\)"),
    "one-hot": ("cross_entropy", lambda z: (z, Y, z), ValueError, r"Fix: targets.argmax\(-1\)"),
    "range": ("cross_entropy", lambda z: (z, classes(z) + 3, z), ValueError, r"must be in \[0, 3\).*got 3"),
    "probability": ("bce", lambda z: (z, Y, z), ValueError, r"expects targets in \[0, 1\]"),
    "nan": ("mse", lambda z: (z * math.nan, Y, z), FloatingPointError, "the loss is nan before the step"),
    "gradient": ("mse", lambda z: (z.abs().sub(z.abs()).sqrt(), Y, z), FloatingPointError, "gradient of weight"),
    "draws": ("mse", lambda z: (z, Y + next(COUNT), z), ValueError, r"other targets.*x, y = next\(batches\)"),
}
COUNT = iter(range(100))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_closure_must_not_return(name):
    loss, wrong, error, message = REFUSED[name]
    model = nn.Linear(3, 3)
    optimizer = hbnode.optim.HessianFree(model.named_parameters(), loss=loss, structural_damping=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=f"(?s){message}"):
        optimizer.step(lambda: wrong(model(X)))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": "crossentropy"}, ValueError, "Fix: loss='cross_entropy'"),
        ({"damping": -1.0}, ValueError, "damping must be a number >= 0"),
        ({"damping": 1e-4}, ValueError, "at least min_damping=0.0002"),
        ({"max_cg": 0}, ValueError, "max_cg must be an integer >= 1"),
        ({"params": [torch.zeros(2).half()]}, ValueError, r"float32 or float64.*model.float\(\)"),
        ({"params": [torch.zeros(2), torch.zeros(2).double()]}, ValueError, "one dtype and one device"),
        ({"params": [{"params": [torch.zeros(2)], "damping": 1.0}]}, ValueError, r"options of its own, \['damping'\]"),
    ],
    ids=["loss", "negative", "floor", "none", "half", "mixed", "group"],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        hbnode.optim.HessianFree(**({"params": [torch.zeros(2)], "loss": "mse"} | options))


def test_frozen_and_unused_parameters_stay():
    model = Net(nn.GRU(3, 4, batch_first=True))
    model.layer.weight_hh_l0.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2))
    before = copy.deepcopy(model.state_dict())
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    optimizer.step(lambda: (model(X), Y))
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"layer.weight_hh_l0", "unused"}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        optimizer.step(lambda: (model(X), Y))


def test_a_step_that_helps_nowhere_is_rejected():
    """And lambda grows, though the loss is not a number there."""
    model = nn.Linear(3, 3)
    start = model.weight.detach().clone()
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")

    def evaluate():
        return model(X) + (0.0 if torch.equal(model.weight, start) else math.nan), Y

    optimizer.step(evaluate)
    progress = optimizer.progress
    assert (progress.outcome, progress.step_length, progress.reduction) == ("rejected", 0.0, 0.0)
    assert progress.ratio == -math.inf
    assert torch.equal(model.weight, start)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.15)
    assert "rejected" in str(progress)


def test_a_graph_from_before_the_step_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    loss = model(X).sum()
    optimizer.step(lambda: (model(X), Y))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    v = torch.ones(31)
    expected = optimizer.product(v)
    with torch.no_grad():
        model[1].weight.add_(1.0)
    torch.testing.assert_close(optimizer.product(v), expected)


def test_a_stationary_point():
    model = nn.Linear(3, 3)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    y = model(X).detach()
    optimizer.step(lambda: (model(X), y))
    assert optimizer.progress.outcome == "stationary"
    assert optimizer.param_groups[0]["damping"] == 0.1  # which is not what leaves nothing to gain


@pytest.mark.parametrize("hidden", [0, 30])
def test_an_exact_fit_leaves_the_damping_alone(hidden):
    """All that float32 has to say is rounding then; new targets are fitted as soon as by a fresh optimizer."""

    def make():
        return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1)) if hidden else nn.Linear(3, 1)

    def steps_to_fit(model, optimizer, y):
        for step in range(50):
            if step and optimizer.progress.new_loss < 1e-3:
                return step
            optimizer.step(lambda: (model(x), y))
        return 50

    x = torch.randn(10, 3)
    y = x.sum(1, keepdim=True)
    model, fresh = make(), make()
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    for _ in range(60):
        optimizer.step(lambda: (model(x), y))
    assert (optimizer.progress.outcome, math.isnan(optimizer.progress.ratio)) == ("stationary", True)
    assert optimizer.progress.loss < 1e-12
    assert optimizer.progress.damping < 0.1
    wanted = steps_to_fit(fresh, hbnode.optim.HessianFree(fresh.parameters(), loss="mse"), -y)
    assert steps_to_fit(model, optimizer, -y) <= wanted + 2


def test_ignored_positions_and_weights_of_zero_have_no_say():
    model, again = nn.Linear(3, 4), nn.Linear(3, 4)
    again.load_state_dict(model.state_dict())
    y = torch.randint(4, (4, 5))
    ignored = y.clone()
    ignored[:, 2:] = -100
    weight = torch.ones(4, 5)
    weight[:, 2:] = 0
    one = hbnode.optim.HessianFree(model.parameters(), loss="cross_entropy")
    other = hbnode.optim.HessianFree(again.parameters(), loss="cross_entropy")
    for _ in range(2):
        one.step(lambda: (model(X), ignored))
        other.step(lambda: (again(X), y, None, weight))
    torch.testing.assert_close(model.weight, again.weight)
    other.step(lambda: (again(X), y, None, torch.zeros(4, 5)))
    assert other.progress.outcome == "stationary"


def test_dropout_draws_one_mask_a_step():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", damping=1.0)
    drawn = []

    def evaluate():
        drawn.append(torch.rand(()).item())
        return model(X), Y

    for _ in range(2):
        optimizer.step(evaluate)
        assert len(drawn) > 2
        assert len(set(drawn)) == 1
        assert optimizer.progress.reduction > 0
        drawn.clear()


def test_the_preconditioner_is_the_mean_square_of_the_cases_gradients():
    from hbnode.optim.preconditioner import preconditioner

    model = nn.Linear(3, 3, dtype=torch.float64)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", preconditioner_samples=3)
    x, y = X.double(), Y.double()
    optimizer.step(lambda: (model(x), y))
    assert optimizer.progress.reduction > 0
    with torch.enable_grad():
        found = preconditioner(optimizer._last.ready(), 4000, 0.1)
    squares = []
    for case, target in zip(x, y, strict=True):
        loss = (model(case) - target).square().sum() / 2
        squares.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]) ** 2)
    torch.testing.assert_close(found, (torch.stack(squares).mean(0) + 0.1) ** 0.75, rtol=0.1, atol=0)


def test_the_preconditioner_of_a_parameter_that_is_not_used():
    model, unused = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
    options = {"damping": 0.0, "min_damping": 0.0, "preconditioner_samples": 3}
    optimizer = hbnode.optim.HessianFree([*model.parameters(), unused], loss="mse", **options)
    optimizer.step(lambda: (model(X), Y))
    assert optimizer.progress.reduction > 0
    assert torch.equal(unused, torch.ones(2))


def test_backtracking_and_the_line_search():
    directions = [torch.tensor([float(k)]) for k in range(1, 5)]
    solution = Solution(directions, [-1.0, -2.0, -3.0, -4.0], 4, "limit")
    trial = backtrack(solution, lambda d: abs(float(d) - 2))
    assert (float(trial.direction), trial.model, trial.loss) == (2.0, -2.0, 0.0)
    length, loss = line_search(Trial(torch.tensor([4.0]), -1.0, 9.0), 1.0, torch.tensor([-2.0]), lambda d: (d - 1) ** 2)
    assert length == pytest.approx(0.8**4)
    assert loss == pytest.approx((4 * 0.8**4 - 1) ** 2)
    assert line_search(Trial(torch.tensor([1.0]), -1.0, 9.0), 1.0, torch.tensor([2.0]), float) == (0.0, 1.0)


def test_copies_and_files(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    with pytest.raises(RuntimeError, match="there was none"):
        optimizer.product(torch.ones(12))
    optimizer.step(lambda: (model(X), Y))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"]
        assert copied.progress is None
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["state"][0]["direction"], optimizer.state[model.weight]["direction"])
    with pytest.raises(ValueError, match=r"must be \(12,\)"):
        optimizer.product(torch.ones(11))


def test_states_that_saturate_are_damped_without_nan():
    h, weight = tanh_hidden(torch.tensor([0.0, 0.5, 1.0, -1.0], requires_grad=True))
    assert h.requires_grad
    assert weight.isfinite().all()
    torch.testing.assert_close(weight[:2], torch.tensor([1.0, 4 / 3]))


def test_an_lstm_read_out_at_its_cell_state():
    model = nn.LSTM(2, 3, batch_first=True).double()
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    x = torch.randn(5, 4, 2, dtype=torch.float64)
    loss = optimizer.step(lambda: (model(x)[1][1][-1], torch.zeros(5, 3, dtype=torch.float64)))
    assert loss.dtype == torch.float64
    assert optimizer.progress.reduction > 0


def test_states_of_others_are_refused():
    model = nn.Linear(3, 5, bias=False)
    x = torch.randn(9, 3)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    optimizer.step(lambda: (model(x), x @ torch.ones(3, 5)))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"of another optimizer"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(ValueError, match=r"Fix: HessianFree\(..., loss='mse'\)"):
        hbnode.optim.HessianFree(model.parameters(), loss="bce").load_state_dict(state)
    with pytest.raises(ValueError, match=r"direction of shape \(5, 3\) for a parameter of shape \(3, 5\)"):
        hbnode.optim.HessianFree(nn.Linear(5, 3, bias=False).parameters(), loss="mse").load_state_dict(state)
    state["param_groups"][0]["damping"] = float("nan")
    with pytest.raises(ValueError, match=r"damping of the state_dict is nan"):
        optimizer.load_state_dict(state)


class _Once(torch.autograd.Function):
    """The sine, whose backward pass has no graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() * ctx.saved_tensors[0].detach().cos()


def test_a_small_part_without_second_derivative_is_refused():
    a, b, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(9, 3)
    optimizer = hbnode.optim.HessianFree([*a.parameters(), *b.parameters()], loss="mse")
    with pytest.raises(RuntimeError, match=r"a part of its backward pass has no graph, that of _OnceBackward"):
        optimizer.step(lambda: (20 * a(x) + _Once.apply(b(x)), torch.zeros(9, 2)))


def test_a_small_part_without_second_derivative_beside_another_path_is_refused():
    a, b, x = nn.Linear(3, 2), nn.Linear(2, 2), torch.randn(9, 3)
    optimizer = hbnode.optim.HessianFree([*a.parameters(), *b.parameters()], loss="mse")
    with pytest.raises(RuntimeError, match=r"that of _OnceBackward"):
        optimizer.step(lambda: (torch.cat([1000 * b(a(x)), _Once.apply(a(x))], 1), torch.zeros(9, 4)))


class _Doubled(torch.autograd.Function):
    """The identity, whose backward pass has another derivative than it should."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + grad.sign() * (grad.abs() - grad.abs().detach())


def test_a_wrong_second_derivative_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(9, 3)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    with pytest.raises(RuntimeError, match=r"the derivative of its backward pass is wrong"):
        optimizer.step(lambda: (_Doubled.apply(model(x)), torch.zeros(9, 2)))


def test_a_hook_that_detaches_a_gradient_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(9, 3)
    model.weight.register_hook(lambda gradient: gradient.detach().clamp(-1, 1))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    with pytest.raises(RuntimeError, match=r"a hook of a parameter takes the graph"):
        optimizer.step(lambda: (model(x), torch.zeros(9, 2)))


def test_what_overflows_is_named():
    model, x = nn.Linear(3, 1), torch.full((5, 3), 1e10)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    with pytest.raises(FloatingPointError, match=r"the square of the gradient is inf"):
        optimizer.step(lambda: (model(x), torch.zeros(5, 1)))


def test_a_huge_damping_comes_down():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", damping=1e7)
    for _ in range(40):
        optimizer.step(lambda: (model(x), y))
    assert optimizer.progress.outcome == "accepted"
    assert optimizer.progress.damping < 100


@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_a_curvature_batch_that_is_not_finite(where):
    x, y, model = torch.randn(9, 3), torch.randn(9, 2), nn.Linear(3, 2)
    bad = {"inputs": x.clone(), "targets": y.clone()}
    bad[where][4] = float("nan")
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    with pytest.raises(FloatingPointError, match=r"of curvature\(\) are not finite"):
        optimizer.step(lambda: (model(x), y), lambda: (model(bad["inputs"]), bad["targets"]))


def test_a_weight_of_zero_leaves_nan_out():
    x, y, model = torch.randn(9, 3), torch.randn(9, 2), nn.Linear(3, 2)
    y[4] = float("nan")
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    optimizer.step(lambda: (model(x), y, None, (~y.isnan()).float()))
    assert optimizer.progress.new_loss < optimizer.progress.loss


def test_cases_are_not_classes():
    model, x, y = nn.Linear(3, 2), torch.randn(9, 3), torch.randint(2, (9,))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="cross_entropy", case_dim=1)
    with pytest.raises(ValueError, match=r"case_dim=1 must be a dimension of the outputs that counts cases"):
        optimizer.step(lambda: (model(x), y))
    with pytest.raises(TypeError, match=r"case_dim must be a whole number"):
        hbnode.optim.HessianFree(model.parameters(), loss="mse", case_dim="x")


def test_hidden_states_that_are_no_tanh():
    with pytest.raises(ValueError, match=r"h must be in \[-1, 1\], values of tanh, got up to 1.5"):
        hbnode.optim.tanh_hidden(torch.tensor([1.5]))
    model, x, y = nn.Linear(3, 2), torch.randn(9, 3), torch.randn(9, 2)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", structural_damping=0.1)
    with pytest.raises(ValueError, match=r"weight of hidden must broadcast to \(9, 2\)"):
        optimizer.step(lambda: (model(x), y, (model(x), torch.ones(4, 9, 2))))


def test_closures_that_differentiate():
    torch.manual_seed(0)
    x = torch.randn(20, 2, dtype=torch.float64).requires_grad_()
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")

    def evaluate():
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return force, -x.detach()

    for _ in range(5):
        optimizer.step(evaluate)
    assert optimizer.progress.new_loss < 0.1


@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM, nn.RNN, hbnode.nn.TanhRNN])
def test_derivatives_of_recurrent_layers_in_a_closure_are_refused(make):
    x, model = torch.randn(4, 5, 2).requires_grad_(), make(2, 3, batch_first=True)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")

    def evaluate():
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        return slope, torch.zeros_like(slope)

    with pytest.raises(RuntimeError, match=r"differentiates through torch's recurrent layer"):
        optimizer.step(evaluate)


def test_autocast_around_a_step_rounds_nothing():
    x, y = torch.randn(20, 4), torch.randn(20, 3)
    steps = []
    for is_on in (False, True):
        torch.manual_seed(0)
        model = nn.GRU(4, 3, batch_first=True)
        optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            steps.append(optimizer.step(lambda: (model(x[:, None])[0][:, -1], y)).item())  # noqa: B023
        steps.append(optimizer.progress.new_loss)
    assert steps[:2] == steps[2:]


def test_autocast_in_a_closure_is_refused():
    model, x, y = nn.GRU(4, 3, batch_first=True), torch.randn(20, 5, 4), torch.randn(20, 5, 3)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")

    def evaluate():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)[0].float(), y

    with pytest.raises(RuntimeError, match=r"under autocast to torch.bfloat16.*Fix: leave torch.autocast out"):
        optimizer.step(evaluate)


def test_a_product_after_parameters_were_frozen():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
    optimizer.step(lambda: (model(X), Y))
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"2 of them are frozen since. Fix: requires_grad_\(True\)"):
        optimizer.product(torch.ones(31))
    optimizer.step(lambda: (model(X), Y))
    assert optimizer.product(torch.ones(15)).shape == (15,)


def test_steps_in_threads_leave_settings_as_they_were():
    import torch._dynamo  # so that its stance is set too

    x, y = torch.randn(200, 4), torch.randn(200, 3)
    models = [nn.Linear(4, 3) for _ in range(4)]

    def train(model):
        optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
        for _ in range(5):
            optimizer.step(lambda: (model(x), y))

    was = torch.backends.mkldnn.enabled
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, models))
    assert torch.backends.mkldnn.enabled == was
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(models[0], backend=backend)(x)
    assert graphs
