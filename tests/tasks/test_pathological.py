"""The pathological problems: options, models, losses and runs, and the table of who needs Hessian-free optimization."""

import json
import sys

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import pathological
from tasks.common import train
from tasks.common.config import parse
from tasks.common.train import OPTIMIZERS
from tasks.data.pathological import PROBLEMS, Problem
from tasks.models.sequence_models import LAYERS, SequenceModel
from tasks.pathological import PathologicalConfig, SequenceLoss, make_model, make_optimizer
from tests.tasks.small_runs import read_metrics

TINY = "--device cpu --length 10 --hidden 6 --batch-size 12 --test-size 30 --max-cg 8".split()


def options_of(*argv):
    return parse(PathologicalConfig, pathological.PRESETS, "", ["--device", "cpu", *argv])


def test_what_is_not_given_comes_from_the_tables():
    adam = options_of("--model", "gru").filled()
    assert (adam.batch_size, adam.iterations, adam.curvature_size) == (100, 50, 0)
    assert adam.lr == pathological.RATES["adam"].get("gru", pathological.RATES["adam"][""])
    hf = options_of("--optimizer", "hf").filled()
    assert (hf.iterations, hf.structural_damping, hf.max_cg) == (1, 1 / 30, 60)
    assert 0 < hf.curvature_size <= hf.batch_size
    given = options_of("--lr", "0.5", "--batch-size", "7", "--iterations", "3").filled()
    assert (given.lr, given.batch_size, given.iterations) == (0.5, 7, 3)
    assert options_of("--optimizer", "hf", "--batch-size", "40").filled().curvature_size == 40
    memorization = options_of("--problem", "memorization_5", "--optimizer", "hf").filled()
    assert (memorization.batch_size, memorization.damping, memorization.max_cg) == (32, 0.1, 300)
    supplement = options_of("--preset", "supplement").filled()
    assert (supplement.batch_size, supplement.curvature_size, supplement.max_cg) == (10_000, 1_000, 300)
    assert (supplement.damping, supplement.structural_damping) == (0.1, 1 / 30)
    starts = {
        options_of("--preset", preset, "--optimizer", "hf", "--length", "60", *options).filled().damping
        for preset in ("default", "supplement")
        for options in (["--structural-damping", "0"], ["--problem", "permutation"], ["--damping", "7"])
    }
    assert sorted(starts) == pytest.approx([0.03, 0.3, 0.6, 6, 7])
    for rates in pathological.RATES.values():
        assert set(rates) <= {"", *LAYERS}
    assert set(pathological.SETTINGS) == set(pathological.RATES) == set(OPTIMIZERS)


def test_what_an_optimizer_needs_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, message in (("soap", "soap needs the package"), ("hf", "--optimizer hf trains in one process")):
        with pytest.raises(SystemExit):
            options_of("--optimizer", name)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", LAYERS)
def test_padding_changes_no_output_and_is_not_damped(name):
    problem = Problem("addition", 10)
    model = make_model(options_of("--model", name, "--hidden", "4"), problem).double()
    x, _, last = problem.draw(12, torch.Generator().manual_seed(0))
    x = x.double()
    whole, (h, metric) = model.with_hidden(x, last)
    assert (whole.shape, h.shape) == ((12, 1), (12, x.shape[1], 4))
    longer = torch.cat([x, torch.randn(len(x), 3, 2, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(model(longer, last), whole, rtol=1e-10, atol=1e-10)
    for one, end in enumerate(last.tolist()):
        assert (metric[one, : end + 1] > 0).all()
        assert not metric[one, end + 1 :].any()
        alone = model(x[one : one + 1, : end + 1], last[one : one + 1])
        torch.testing.assert_close(alone, whole[one : one + 1], rtol=1e-10, atol=1e-10)


def test_structural_damping_of_a_tanh_network_is_that_of_its_pre_activations():
    """sum (dh)^2 / (1 - h^2) is sum (1 - h^2) (dt)^2, line 17 of Algorithm 1, and finite where h is 1."""
    model = SequenceModel("tanh", 2, 4, 1, length=10, reads_end=True).double()
    x, last = torch.randn(3, 5, 2, dtype=torch.float64), torch.tensor([4, 2, 4])
    _, (h, metric) = model.with_hidden(x, last)
    inside = torch.arange(5) <= last[:, None]
    torch.testing.assert_close(metric[inside], 1 / (1 - h[inside].square()))
    with torch.no_grad():
        model.layer.weight_ih.fill_(1e6)
    assert model.with_hidden(x.abs() + 1, last)[1][1].isfinite().all()


def test_the_tanh_network_begins_with_fifteen_connections_of_each_unit_and_input():
    model = SequenceModel("tanh", 2, 100, 8, length=50, reads_end=True)
    assert (model.layer.weight_hh != 0).sum(1).tolist() == [15] * 100
    assert (model.layer.weight_ih != 0).sum(0).tolist() == [15] * 2
    assert (model.head.weight != 0).sum(1).tolist() == [15] * 8
    assert model.layer.weight_hh[model.layer.weight_hh != 0].std().item() == pytest.approx(15**-0.5, rel=0.05)


def test_forget_gates():
    plain = SequenceModel("lstm", 2, 5, 1, length=50, reads_end=True).layer
    bias = plain.bias_ih_l0 + plain.bias_hh_l0
    assert bias.tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10
    chrono = SequenceModel("lstm_chrono", 2, 500, 1, length=50, reads_end=True).layer
    bias = (chrono.bias_ih_l0 + chrono.bias_hh_l0).detach()
    assert torch.equal(bias[:500], -bias[500:1000])
    steps = bias[500:1000].exp()
    assert float(steps.min()) >= 1
    assert float(steps.max()) <= 49
    assert steps.mean().item() == pytest.approx(25, abs=2)
    assert not bias[1000:].any()
    adam = SequenceModel("adam_lstm", 2, 5, 1, length=50, reads_end=True).layer
    assert (adam.bias_ih_l0 + adam.bias_hh_l0)[5:10].tolist() == [1.0] * 5


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_optimizers_minimise_the_same_loss(name):
    """The objective's own value is what the Hessian-free optimizer reports."""
    problem = Problem(name, 10)
    argv = "--model gru --hidden 3 --optimizer hf --max-cg 2 --problem".split()
    config = options_of(*argv, name).filled()
    model, objective = make_model(config, problem), SequenceLoss(problem, 5)
    batch = problem.draw(7, torch.Generator().manual_seed(0))
    value, means = objective(model, batch)
    assert 0 <= means["error"] <= 1
    optimizer = make_optimizer(config, model, problem)
    loss = optimizer.step(
        lambda: objective.outputs(model, batch), lambda: objective.outputs(model, batch, with_hidden=True)
    )
    assert float(loss) == pytest.approx(value.item(), rel=1e-5)
    assert objective(model, batch)[0] < value


def test_the_loss_is_summed_over_steps_and_averaged_over_sequences():
    problem = Problem("memorization_5", 10)
    outputs = torch.zeros(4, 20, 3)
    targets = problem.every()[1][:4]
    value = SequenceLoss(problem, 0).value(outputs, targets)
    assert value.item() == pytest.approx(20 * torch.tensor(3.0).log().item())
    half = SequenceLoss(Problem("addition", 10), 0).value(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    assert half.item() == pytest.approx((1 + 9) / 4)


# Runs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer, tmp_path):
    if optimizer == "soap":
        pytest.importorskip("pytorch_optimizer")
    options = [*TINY, "--model", "dtriv", "--optimizer", optimizer, "--iterations", "2", "--epochs", "1"]
    pathological.main([*options, "--problem", "memorization_10", "--out", str(tmp_path)])
    (row,) = read_metrics(tmp_path)
    progress = {"damping", "ratio", "cg_iterations", "step_length", "reduction"}
    assert (progress <= row.keys()) == (optimizer == "hf")
    assert optimizer != "hf" or float(row["reduction"]) > 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["iterations"], summary["sequences"], summary["solved"]) == (2, 24, False)
    assert (tmp_path / "memorization.png").read_bytes()[:4] == b"\x89PNG"


def test_an_orthogonal_weight_has_a_smaller_rate():
    config = options_of("--model", "dtriv", "--hidden", "4", "--lr", "0.1").filled()
    problem = Problem("addition", 10)
    groups = make_optimizer(config, make_model(config, problem), problem).param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.01])


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


def test_a_run_that_diverges_is_a_failure_with_a_summary(tmp_path, capsys):
    options = "--device cpu --length 10 --hidden 6 --optimizer sgd --clip 0 --iterations 1 --test-size 20".split()
    pathological.main([*options, "--lr", "1e12", "--out", str(tmp_path / "later")])
    assert "Fix: a smaller --lr" in capsys.readouterr().out
    summary = json.loads((tmp_path / "later" / "summary.json").read_text())
    assert (summary["solved"], summary["diverged"]) == (False, True)
    with pytest.raises(SystemExit, match=r"is (inf|nan)\. Fix: a smaller --lr"):
        pathological.main([*options, "--lr", "1e35", "--out", str(tmp_path / "at once")])


def test_a_run_ends_when_it_succeeds(tmp_path):
    """Two symbols in ten steps, which an orthogonal network learns at once."""
    options = "--device cpu --problem temporal_order --length 10 --model dtriv --hidden 30 --lr 1e-2 --test-size 1200"
    pathological.main([*options.split(), "--seconds", "60", "--out", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = read_metrics(tmp_path)
    assert summary["solved"]
    assert summary["seconds"] < 60
    assert rows[-1]["test_sequences"] == "1200"
    assert [float(row["test_error"]) < 0.01 for row in rows] == [False] * (len(rows) - 1) + [True]
    pathological.main([*options.split(), "--seconds", "90", "--out", str(tmp_path)])
    assert read_metrics(tmp_path) == rows


def test_few_wrong_of_the_first_sequences_are_no_success_yet(monkeypatch):
    """All are tested if fewer than 2 % of the first thousand are wrong, and all count."""
    errors = {1000: 0.019, 1500: 0.009}
    monkeypatch.setattr(pathological, "evaluate", lambda run, model, data, *rest: {"test_error": errors[len(data[0])]})
    for first, found in ((0.019, {"test_error": 0.009, "test_sequences": 1500}), (0.02, {"test_sequences": 1000})):
        errors[1000] = first
        row = pathological.tested(None, None, (torch.zeros(1500),), None)
        assert row == {"test_error": first, **found}
        assert pathological.is_solved(row, 1500) == (row["test_sequences"] == 1500)
    assert not pathological.is_solved({"test_error": 0.0, "test_sequences": 1000}, 1500)
