"""Gauss-Newton products of recurrent layers: Algorithm 1 of the paper, dense matrices, and their own symmetry."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hbnode
from hbnode.optim import tanh_hidden
from tests.reference_hessian_free import algorithm_1

DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Net(nn.Module):
    """A recurrent layer with a readout at every sample."""

    def __init__(self, rnn, width=4, **options):
        super().__init__()
        self.rnn, self.readout = rnn, nn.Linear(width, 3, **options)

    def forward(self, x):
        return self.readout(self.rnn(x)[0])


class PackedNet(Net):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 4, 2, 1]), batch_first=True)
        return self.readout(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class CellStateNet(Net):
    def forward(self, x):
        return self.readout(self.rnn(x)[1][1][-1])


def tanh_net():
    return Net(hbnode.nn.TanhRNN(2, 4, batch_first=True, **DOUBLE), **DOUBLE)


@pytest.mark.parametrize("loss", ["mse", "bce", "cross_entropy"])
@pytest.mark.parametrize("steps", [1, 6])
def test_the_product_is_algorithm_1(loss, steps):
    model, x, v = tanh_net(), torch.randn(5, steps, 2, **DOUBLE), torch.randn(47, **DOUBLE)
    y = torch.randint(3, (5, steps)) if loss == "cross_entropy" else torch.rand(5, steps, 3, **DOUBLE)
    options = {"damping": 0.3, "structural_damping": 0.7, "min_damping": 0.0}
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss=loss, **options)
    before = parameters_to_vector(model.parameters()).detach().clone()

    def forward():
        h, _ = model.rnn(x)
        return model.readout(h), y, tanh_hidden(h)

    optimizer.step(forward)
    vector_to_parameters(before, model.parameters())
    weights = [z.detach() for z in model.parameters()]
    parts = [torch.empty_like(z) for z in weights]
    vector_to_parameters(v, parts)
    expected = torch.cat([z.flatten() for z in algorithm_1(weights, parts, x, 0.3, 0.7, loss)]) + 0.3 * v
    torch.testing.assert_close(optimizer.product(v), expected, rtol=1e-10, atol=1e-12)


LAYERS = {
    "RNN without bias": lambda: Net(nn.RNN(2, 4, bias=False)),
    "RNN deep": lambda: Net(nn.RNN(2, 4, 2, dropout=0.3, bidirectional=True), 8),
    "GRU deep": lambda: Net(nn.GRU(2, 4, 2, dropout=0.3, bidirectional=True), 8),
    "LSTM deep": lambda: Net(nn.LSTM(2, 4, 2, dropout=0.3, bidirectional=True), 8),
    "LSTM packed without bias": lambda: PackedNet(nn.LSTM(2, 4, bias=False, batch_first=True)),
    "RNN relu": lambda: Net(nn.RNN(2, 4, nonlinearity="relu")),
    "LSTM projected": lambda: Net(nn.LSTM(2, 6, proj_size=4)),
    "LSTM read out at its cell state": lambda: CellStateNet(nn.LSTM(2, 4)),
    "TanhRNN packed": lambda: PackedNet(hbnode.nn.TanhRNN(2, 4, batch_first=True)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_forms_of_layers(name):
    """Against double backward passes through the layers themselves, at the same random numbers."""
    model, x = LAYERS[name]().double(), torch.randn(5, 6, 2, **DOUBLE)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse", max_cg=3, damping=0.3)
    before, state = parameters_to_vector(model.parameters()).detach().clone(), torch.get_rng_state()
    y = torch.zeros_like(model(x)).detach()
    torch.set_rng_state(state)
    optimizer.step(lambda: (model(x), y))
    assert optimizer.progress.reduction > 0
    vector_to_parameters(before, model.parameters())
    v = torch.randn(len(before), **DOUBLE)
    torch.set_rng_state(state)
    z, u = model(x), torch.zeros_like(y, requires_grad=True)
    grads = torch.autograd.grad(z, list(model.parameters()), u, create_graph=True)
    (jv,) = torch.autograd.grad(torch.cat([g.flatten() for g in grads]), u, v, retain_graph=True)
    product = torch.cat([g.flatten() for g in torch.autograd.grad(z, list(model.parameters()), jv)])
    torch.testing.assert_close(optimizer.product(v), product / len(y) + 0.3 * v, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [nn.GRU, hbnode.nn.TanhRNN])
def test_derivatives_of_recurrent_layers_in_a_closure_are_refused(make):
    x, model = torch.randn(4, 5, 2).requires_grad_(), make(2, 3, batch_first=True)
    optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")

    def evaluate():
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        return slope, torch.zeros_like(slope)

    with pytest.raises(RuntimeError, match=r"differentiates through torch's recurrent layer"):
        optimizer.step(evaluate)


def test_autocast_around_a_step_has_no_effect_and_within_a_closure_is_refused():
    x, y, losses = torch.randn(20, 1, 4), torch.randn(20, 1, 3), []
    for is_on in (False, True):
        torch.manual_seed(0)
        model = nn.GRU(4, 3, batch_first=True)
        optimizer = hbnode.optim.HessianFree(model.parameters(), loss="mse")
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            optimizer.step(lambda: (model(x)[0], y))  # noqa: B023
        losses.append((optimizer.progress.loss, optimizer.progress.new_loss))
    assert losses[0] == losses[1]

    def evaluate():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)[0].float(), y

    with pytest.raises(RuntimeError, match=r"under autocast to torch.bfloat16.*Fix: leave torch.autocast out"):
        optimizer.step(evaluate)
