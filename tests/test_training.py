"""The training loop: against a plain loop, and resumed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hbnode.training import train


def problem(dropout=0.0, generator=None):
    torch.manual_seed(0)
    x = torch.randn(50, 3, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 1
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    return net, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=generator is not None, generator=generator)


def squared(net, x, y):
    return (net(x) - y).square().mean()


def validation_of(losses, weights):
    """A validation that returns these losses, and keeps the parameters of each epoch."""
    losses = iter(losses)

    def validation(net):
        weights.append(copy.deepcopy(net.state_dict()))
        return next(losses)

    return validation


def test_it_is_the_plain_loop():
    net, loader = problem()
    expected, found = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for epoch in range(4):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = squared(expected, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.7)
            optimizer.step()
            losses += [loss.item()] * len(x)
        validation = squared(expected, *loader.dataset.tensors).item()
        found.append((epoch, np.mean(losses), validation, optimizer.param_groups[0]["lr"]))
        schedule.step()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    options = {"optimizer": optimizer, "scheduler": schedule, "max_epochs": 4, "clip_norm": 0.7}
    with torch.no_grad():  # of the caller
        record = train(net, squared, loader, loader, **options)
    own = [[each[name] for name in ("epoch", "loss", "validation", "learning_rate")] for each in record]
    np.testing.assert_allclose(own, found)
    assert not net.training
    torch.testing.assert_close(list(net.parameters()), list(expected.parameters()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("patience", "epochs"), [(2, 6), (None, 8)])
def test_the_best_epoch_is_kept(patience, epochs):
    net, loader = problem()
    validation = validation_of([5.0, 3.0, 4.0, 2.0, 6.0, 2.0, 9.0, 9.0], weights := [])
    record = train(net, squared, loader, validation, max_epochs=8, patience=patience)
    assert len(record) == epochs
    assert all(value.equal(weights[3][name]) for name, value in net.state_dict().items())


def test_a_resumed_run_equals_one_without_a_break(tmp_path):
    def run(epochs, path):
        net, loader = problem(dropout=0.3, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        options = {"optimizer": optimizer, "scheduler": schedule, "checkpoint": path, "max_epochs": epochs}
        return net, train(net, squared, loader, loader, **options)

    expected, record = run(6, None)
    path = tmp_path / "run.pt"
    run(3, path)
    torch.manual_seed(99)
    net, resumed = run(6, path)
    assert resumed == record
    assert all(own.equal(other) for own, other in zip(net.parameters(), expected.parameters(), strict=True))
    assert run(6, path)[1] == record  # which trains no further
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]
    torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match="another model or optimizer"):
        train(nn.Linear(3, 1).double(), squared, problem()[1], checkpoint=path)


def test_dicts_are_moved_and_count_by_the_length_of_their_entries():
    class Moved:
        def to(self, device):
            return device

    batches = [{"pair": (Moved(), "name"), "step": torch.tensor(1), "x": torch.zeros(n, 1)} for n in (1, 3)]

    def loss(net, batch):
        assert batch["pair"] == (torch.device("cpu"), "name")
        return (net(batch["x"]) * 0 + len(batch["x"])).square().mean()

    record = train(nn.Linear(1, 1), loss, batches, batches, max_epochs=1)
    assert record[0]["loss"] == record[0]["validation"] == (1 * 1**2 + 3 * 3**2) / 4


OTHER = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": OTHER}, "optimizer has no parameter of the model"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(OTHER, 1)}, "scheduler must be of the optimizer"),
        ({"batches": []}, "at least one batch"),
        ({"loss": 3}, "loss must be a function"),
    ],
)
def test_what_is_refused(options, message):
    net, loader = problem()
    with pytest.raises((TypeError, ValueError), match=message):
        train(net, **{"loss": squared, "batches": loader, **options})


def test_a_loss_that_is_not_finite_leaves_the_best_parameters():
    net, loader = problem()
    validation = validation_of([1.0, 2.0], weights := [])

    def loss(net, x, y):
        return squared(net, x, y) * (float("nan") if len(weights) == 2 else 1)

    with pytest.raises(FloatingPointError, match="the loss of batch 0 in epoch 2 is nan"):
        train(net, loss, loader, validation)
    assert all(value.equal(weights[0][name]) for name, value in net.state_dict().items())
