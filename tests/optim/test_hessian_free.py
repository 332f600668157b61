"""The Hessian-free optimizer: its products, its conjugate gradients, its steps."""

import copy
import pickle

import pytest
import torch
from curvlinops import GGNLinearOperator
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hbnode
from hbnode.optim import tanh_hidden
from hbnode.optim.conjugate_gradients import conjugate_gradients
from tests.reference_hessian_free import algorithm_1, dense

LOSSES = ["mse", "bce", "cross_entropy"]


class Net(nn.Module):
    """A recurrent layer with a readout at every sample, batch first."""

    def __init__(self, rnn, outputs=2):
        super().__init__()
        self.rnn, self.readout = rnn, nn.Linear(rnn.hidden_size, outputs, dtype=rnn.bias.dtype)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.readout(h), h


def tanh_net(inputs=2, hidden=4, outputs=3, dtype=torch.float64):
    torch.manual_seed(0)
    rnn = hbnode.nn.TanhRNN(inputs, hidden, batch_first=True, dtype=dtype)
    return Net(rnn, outputs)


def targets_for(loss, outputs):
    if loss == "cross_entropy":
        return torch.randint(outputs.shape[-1], outputs.shape[:-1])
    return torch.rand_like(outputs)


def stepped(model, loss, x, y, **options):
    """An optimizer after a step, and the parameters before it."""
    before = parameters_to_vector(model.parameters()).detach().clone()
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss=loss, **options)

    def forward():
        z, h = model(x)
        return z, y, tanh_hidden(h)

    optimizer.step(forward)
    return optimizer, before


# Products


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("steps", [1, 6])
def test_the_product_is_algorithm_1(loss, steps):
    model = tanh_net()
    x, v = torch.randn(5, steps, 2, dtype=torch.float64), torch.randn(47, dtype=torch.float64)
    y = targets_for(loss, model(x)[0])
    optimizer, before = stepped(model, loss, x, y, damping=0.3, structural_damping=0.7)
    vector_to_parameters(before, model.parameters())
    weights = [z.detach() for z in model.parameters()]
    holder = [torch.empty_like(z) for z in weights]
    vector_to_parameters(v, holder)
    expected = torch.cat([z.flatten() for z in algorithm_1(weights, holder, x, 0.3, 0.7, loss)]) + 0.3 * v
    torch.testing.assert_close(optimizer.product(v), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_matrix_is_symmetric_and_positive_semi_definite(loss):
    model = tanh_net()
    x = torch.randn(5, 6, 2, dtype=torch.float64)
    y = targets_for(loss, model(x)[0])
    matrices = []
    for damping, mu in ((0.0, 0.0), (0.5, 0.0), (0.5, 2.0)):
        copied = copy.deepcopy(model)
        optimizer, _ = stepped(copied, loss, x, y, damping=damping, structural_damping=mu, min_damping=0.0)
        matrices.append(dense(optimizer.product, 47))
        torch.testing.assert_close(matrices[-1], matrices[-1].T, rtol=0, atol=1e-14)
    plain, damped, structural = matrices
    assert torch.linalg.eigvalsh(plain)[0] > -1e-14
    torch.testing.assert_close(damped, plain + 0.5 * torch.eye(47, dtype=torch.float64))
    assert torch.linalg.eigvalsh(structural - damped)[0] > -1e-14
    assert (structural - damped).norm() > 0.1


OF_CURVLINOPS = {"mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss, "cross_entropy": nn.CrossEntropyLoss}
CELLS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM, "tanh": None}


@pytest.mark.parametrize(("cell", "loss"), [*zip(CELLS, LOSSES, strict=False), *(("tanh", loss) for loss in LOSSES)])
def test_the_product_is_that_of_curvlinops(cell, loss):
    """Which averages over positions and features too, and does not halve squares."""
    torch.manual_seed(0)
    model = tanh_net()
    if CELLS[cell] is not None:
        model.rnn = CELLS[cell](2, 4, num_layers=2, batch_first=True, bidirectional=True, dtype=torch.float64)
        model.readout = nn.Linear(8, 3, dtype=torch.float64)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)[0].flatten(0, 1)

    x = torch.randn(5, 6, 2, dtype=torch.float64)
    y = targets_for(loss, model(x)[0])
    optimizer, before = stepped(model, loss, x, y, damping=0.0, min_damping=0.0)
    vector_to_parameters(before, model.parameters())
    wrapped, data = Flat(), [(x, y.flatten(0, 1))]
    parameters = list(wrapped.parameters())
    operator = GGNLinearOperator(wrapped, OF_CURVLINOPS[loss](), parameters, data, check_deterministic=False)
    scale = {"mse": 6 * 3 / 2, "bce": 6 * 3, "cross_entropy": 6}[loss]
    v = torch.randn(before.numel(), dtype=torch.float64)
    torch.testing.assert_close(optimizer.product(v), scale * (operator @ v), rtol=1e-10, atol=1e-12)


# Conjugate gradients


def test_conjugate_gradients_solve():
    torch.manual_seed(0)
    root, b = torch.randn(20, 20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    a = root @ root.T + 0.1 * torch.eye(20, dtype=torch.float64)
    expected = torch.linalg.solve(a, b)
    for start in (None, 0.9 * expected):
        for scale in (None, a.diagonal()):
            found = conjugate_gradients(lambda v: a @ v, b, start, limit=60, tolerance=0.0, preconditioner=scale)
            torch.testing.assert_close(found.iterates[-1], expected, rtol=1e-7, atol=1e-8)
            for d, value in zip(found.iterates, found.values, strict=True):
                assert value == pytest.approx(float(d @ a @ d / 2 - b @ d), abs=1e-9)


# Steps


def test_a_step_solves_linear_least_squares():
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", damping=0.0, min_damping=0.0)
    optimizer.step(lambda: (model(x), y))
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones_like(x[:, :1])], 1), y).solution
    torch.testing.assert_close(model.weight, solution[:-1].T, rtol=1e-3, atol=1e-3)
    assert optimizer.progress.ratio == pytest.approx(1, abs=1e-6)
    assert optimizer.progress.step_length == 1


def run(model, optimizer, batches):
    for x, y in batches:

        def forward(x=x, y=y):
            z, h = model(x)
            return z, y, tanh_hidden(h)

        optimizer.step(forward)


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_goes_on_exactly(dtype, samples):
    model = tanh_net(dtype=dtype)
    batches = [(torch.randn(8, 5, 2, dtype=dtype), torch.randint(3, (8, 5))) for _ in range(6)]
    options = {"loss": "cross_entropy", "structural_damping": 0.1, "preconditioner_samples": samples}
    optimizer = hbnode.optim.HessianFree(model.parameters(), **options)
    run(model, optimizer, batches[:3])
    resumed = copy.deepcopy(model)
    again = hbnode.optim.HessianFree(resumed.parameters(), **options)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    run(model, optimizer, batches[3:])
    run(resumed, again, batches[3:])
    assert optimizer.progress == again.progress
    for one, another in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, another)
