"""The pathological problems: options, models, losses and runs."""

import json

import pytest
import torch

from tasks import pathological
from tasks.common import train
from tasks.common.config import parse
from tasks.data.pathological import Problem
from tasks.models.sequence_models import LAYERS
from tasks.pathological import PathologicalConfig, SequenceLoss, make_model, make_optimizer
from tests.tasks.small_runs import read_metrics

TINY = "--device cpu --length 10 --hidden 6 --batch-size 12 --test-size 30 --max-cg 8".split()


def options_of(*argv):
    return parse(PathologicalConfig, pathological.PRESETS, "", ["--device", "cpu", *argv])


@pytest.mark.parametrize("name", LAYERS)
def test_padding_changes_no_output_and_is_not_damped(name):
    problem = Problem("addition", 10)
    model = make_model(options_of("--model", name, "--hidden", "4"), problem).double()
    x, _, last = problem.draw(12, torch.Generator().manual_seed(0))
    x = x.double()
    whole, (_, metric) = model.with_hidden(x, last)
    longer = torch.cat([x, torch.randn(len(x), 3, 2, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(model(longer, last), whole, rtol=1e-10, atol=1e-10)
    for one, end in enumerate(last.tolist()):
        assert (metric[one, : end + 1] > 0).all()
        assert not metric[one, end + 1 :].any()
        alone = model(x[one : one + 1, : end + 1], last[one : one + 1])
        torch.testing.assert_close(alone, whole[one : one + 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["addition", "memorization_5"])
def test_all_optimizers_minimise_the_same_loss(name):
    """The objective's own value is what the Hessian-free optimizer reports."""
    problem = Problem(name, 10)
    argv = "--model gru --hidden 3 --optimizer hf --max-cg 2 --problem".split()
    config = options_of(*argv, name).filled()
    model, objective = make_model(config, problem), SequenceLoss(problem, 5)
    batch = problem.draw(7, torch.Generator().manual_seed(0))
    value, _ = objective(model, batch)
    optimizer = make_optimizer(config, model, problem)
    loss = optimizer.step(
        lambda: objective.outputs(model, batch), lambda: objective.outputs(model, batch, with_hidden=True)
    )
    assert float(loss) == pytest.approx(value.item(), rel=1e-5)
    assert objective(model, batch)[0] < value


# Runs


def test_a_run_ends_with_its_seconds_and_goes_on_with_more(tmp_path, capsys, monkeypatch):
    ticks = iter(range(0, 10**6, 7))
    monkeypatch.setattr(train, "clock", lambda device: float(next(ticks)))
    options = [*TINY, "--iterations", "3", "--lr", "1e-9", "--out", str(tmp_path), "--seconds"]
    pathological.main([*options, "42"])
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == 42  # of two tests, three steps before each
    assert len(read_metrics(tmp_path)) == 2
    pathological.main([*options, "42"])
    assert "is finished already" in capsys.readouterr().out
    pathological.main([*options, "60"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["seconds"], summary["iterations"]) == (63, 9)


def test_few_wrong_of_the_first_sequences_are_no_success_yet(monkeypatch):
    """All are tested if fewer than 2 % of the first thousand are wrong, and all count."""
    errors = {1000: 0.019, 1500: 0.009}
    monkeypatch.setattr(pathological, "evaluate", lambda run, model, data, *rest: {"test_error": errors[len(data[0])]})
    row = pathological.tested(None, None, (torch.zeros(1500),), None)
    assert row == {"test_error": 0.009, "test_sequences": 1500}
    errors[1000] = 0.02
    assert pathological.tested(None, None, (torch.zeros(1500),), None)["test_sequences"] == 1000
    assert not pathological.is_solved({"test_error": 0.0, "test_sequences": 1000}, 1500)
