"""The trainer: schedules, resumed runs, the best weights, losses that are not finite."""

import math

import pytest
import torch

from tasks.common.config import TaskConfig
from tasks.common.run import Run
from tasks.common.train import fit
from tests.tasks.small_runs import read_metrics


def square(model, batch):
    x, y = batch
    error = torch.nn.functional.mse_loss(model(x), y)
    return error, {"accuracy": 1 / (1 + error.item())}


def fit_line(folder, epochs, config=(), **options):
    described = {"batch_size": 8, "lr": 0.05, "epochs": epochs, "out": str(folder), "device": "cpu", **dict(config)}
    run = Run("line", TaskConfig(**described), "")
    model = torch.nn.Linear(1, 1)
    x = torch.rand(24, 1, generator=torch.Generator().manual_seed(0))
    found = fit(run, model, (x[:16], 3 * x[:16]), (x[16:], 3 * x[16:]), square, **options)
    run.finish(model, **found)
    return model, found


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)


def test_groups_keep_their_rates_under_the_schedule(tmp_path):
    rates, steps = [], []

    def make(model):
        groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        optimizer.register_step_pre_hook(lambda o, *_: rates.append([group["lr"] for group in o.param_groups]))
        return optimizer

    fit_line(tmp_path, 2, optimizer=make, config={"schedule": "cosine"}, after_step=steps.append)
    factors = [(1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]
    assert rates == [pytest.approx([0.2 * f, 0.02 * f]) for f in factors]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(("best", "sign"), [("test_loss", 1), ("test_accuracy", -1)])
def test_the_best_epochs_weights_are_restored(best, sign, tmp_path):
    """A rate that diverges in the end: the best epoch is not the last. In one go, and in parts."""
    shrinking, steps = {"optimizer": sgd(1.3), "best": best}, []
    whole, found = fit_line(tmp_path / "whole", 8, **shrinking)
    for epochs in (3, 8, 8):
        parts, resumed = fit_line(tmp_path / "parts", epochs, after_step=steps.append, **shrinking)
    assert steps == list(range(1, 17))
    assert resumed == found
    torch.testing.assert_close(dict(parts.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
    values = [sign * float(row[best]) for row in read_metrics(tmp_path / "whole")]
    index = values.index(min(values))
    assert index < len(values) - 1
    assert found == {"best_epoch": index + 1, f"best_{best}": sign * values[index]}


def test_a_loss_that_is_not_finite_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"epoch \d, batch \d: loss is (inf|nan)\. Fix: a smaller --lr"):
        fit_line(tmp_path / "train", 20, optimizer=sgd(1e30))
    with pytest.raises(SystemExit, match=r"test data: test_loss is (inf|nan)\. Fix: a smaller --lr"):
        fit_line(tmp_path / "test", 1, optimizer=sgd(1e30), config={"batch_size": 16})
    assert not (tmp_path / "test" / "summary.json").exists()
