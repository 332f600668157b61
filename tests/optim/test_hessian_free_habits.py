"""The Hessian-free optimizer by the habits of torch.optim: what works as there, and what is said where it cannot."""

import numpy as np
import pytest
import torch
from torch import nn

import hbnode

X, Y = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).split([3, 2], 1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def optimizer_of(model, loss="mse", **options):
    return hbnode.optim.HessianFree(model.parameters(), loss=loss, **options)


# What is asked for


@pytest.mark.parametrize(
    ("loss", "fix"),
    [
        (nn.MSELoss(), "loss='mse'"),
        (nn.BCEWithLogitsLoss, "loss='bce'"),
        (nn.functional.cross_entropy, "loss='cross_entropy'"),
        ("nll", "loss='cross_entropy'"),
        ("l1", "one of these"),
    ],
    ids=["module", "class", "function", "synonym", "another"],
)
def test_a_loss_that_is_no_name_of_one(loss, fix):
    with pytest.raises(ValueError, match=f"must be the name of one.*Fix: {fix}"):
        optimizer_of(network(), loss)


def test_a_step_without_a_function():
    model = network()
    optimizer = optimizer_of(model)
    (model(X) - Y).square().mean().backward()
    with pytest.raises(TypeError, match=r"earlier backward\(\) are not used. Fix: optimizer.step\(lambda: \(model"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((model(X) - Y).square().mean()).backward()
    with pytest.raises(TypeError, match="needs a function"):
        scaler.step(optimizer)


def test_parameters_that_are_given_twice_or_have_another_dtype():
    model = network()
    parameters = [*model[0].parameters(), *model[2].parameters()]
    with (
        pytest.raises(ValueError, match=r"is given twice. Fix: list\(dict.fromkeys"),
        pytest.warns(UserWarning, match=r"duplicate parameters"),
    ):
        hbnode.optim.HessianFree([*parameters, model[0].weight], loss="mse")
    with pytest.raises(ValueError, match=r"must be real, got torch.complex64"):
        hbnode.optim.HessianFree([torch.zeros(2, dtype=torch.complex64)], loss="mse")
    with pytest.raises(ValueError, match="structural_damping must be a number >= 0, got True"):
        optimizer_of(model, structural_damping=True)
    optimizer = optimizer_of(model)
    optimizer.step(lambda: (model(X), Y))
    model.double()
    optimizer.step(lambda: (model(X.double()), Y.double()))
    assert optimizer.progress.reduction > 0
    model.bfloat16()
    with pytest.raises(ValueError, match=r"float32 or float64, got torch.bfloat16"):
        optimizer.step(lambda: (model(X.bfloat16()), Y))


@pytest.mark.parametrize("state", [{}, None, {"state": {}}])
def test_what_is_no_state(state):
    with pytest.raises(ValueError, match=r"is no state of an optimizer.*Fix: the one that HessianFree.state_dict"):
        optimizer_of(network()).load_state_dict(state)


def test_a_state_from_before_the_first_step():
    model = network()
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(optimizer_of(model, damping=0.3).state_dict())
    optimizer.step(lambda: (model(X), Y))
    assert optimizer.progress.damping == 0.3


# What a closure returns


CLASSES = torch.zeros(20, dtype=torch.long)
RETURNED = {
    "swapped": ("mse", lambda z: (Y, z), "targets of forward.. have a graph. Fix: outputs first"),
    "its own": ("mse", lambda z: (z, z.sin()), r"Fix: targets.detach\(\); those of the model itself"),
    "a column": ("cross_entropy", lambda z: (z, CLASSES[:, None]), r"targets of shape \(20,\).*squeeze\(-1\)"),
    "two states": ("mse", lambda z: (z, Y, (z, z.exp())), r"is a weight, and has a graph. Fix: a list \[h, c\]"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_mistakes_in_what_a_closure_returns(name):
    loss, returned, message = RETURNED[name]
    model = network()
    with pytest.raises(ValueError, match=message):
        optimizer_of(model, loss).step(lambda: returned(model(X)))


def test_noise_of_another_generator_is_noticed():
    model, draws = network(), np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"forward\(\) gives the loss .* and then .*. Fix: draw noise"):
        optimizer_of(model).step(lambda: (model(X + torch.from_numpy(draws.normal(size=(20, 3))).float()), Y))


def test_a_state_that_a_closure_carries_on_is_noticed():
    layer, readout, x, state = nn.GRU(3, 4), nn.Linear(4, 3), torch.randn(5, 2, 3), [None]
    optimizer = hbnode.optim.HessianFree([*layer.parameters(), *readout.parameters()], loss="mse")

    def carrying():
        out, last = layer(x, state[0])
        state[0] = last.detach()
        return readout(out), x

    with pytest.raises(ValueError, match=r"carry states from batch to batch, outside"):
        optimizer.step(carrying)


# What works


class LanguageModel(nn.Module):
    """An embedding that is its readout too."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, 8), nn.GRU(8, 8, 2, batch_first=True, dropout=0.2)
        self.readout = nn.Linear(8, 11, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, tokens):
        return self.readout(self.layer(self.embed(tokens))[0])


def pictures():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    return nn.Sequential(*layers)


WORKING = {
    "language model": lambda: (LanguageModel(), torch.randint(11, (4, 9)), torch.randint(11, (4, 9))),
    "pictures": lambda: (pictures(), torch.randn(16, 1, 8, 8), torch.randint(10, (16,))),
    "one sample": lambda: (nn.Linear(3, 2), X[:1], CLASSES[:1]),
    "DataParallel": lambda: (nn.DataParallel(network()), X, CLASSES),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), X, CLASSES),
}


@pytest.mark.parametrize("name", WORKING)
def test_models_as_people_have_them(name):
    model, x, y = WORKING[name]()
    optimizer = optimizer_of(model, "cross_entropy")
    losses = [float(optimizer.step(lambda: (model(x), y))) for _ in range(3)]
    assert optimizer.progress.new_loss < losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_part_is_frozen_for_a_while_and_groups_are_added():
    model = network()
    optimizer = hbnode.optim.HessianFree(model[0].parameters(), loss="mse")
    optimizer.step(lambda: (model(X), Y))
    optimizer.add_param_group({"params": model[2].parameters()})
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer.step(lambda: (model(X), Y))
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    optimizer.step(lambda: (model(X), Y))
    assert not torch.equal(model[0].weight, before)
