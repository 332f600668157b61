"""Studies: gradients through time, grids of momentum and step size, images a second, recall, tables and figures."""

import csv
import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import matplotlib.pyplot as plt

from tasks import recall
from tasks.data.recall import unit_keys
from tasks.experiments import COMMANDS
from tasks.pixel_mnist import PixelMnistConfig
from tasks.readers import best_rates
from tasks.rows import run_folders
from tasks.studies import image_throughput, momentum_ablation, pixel_mnist_gradients, recall_regression
from tests.tasks.small_runs import names_in

TRANSFORMER = "--device cpu --d-model 8 --heads 2 --layers 1 --feedforward 8".split()
QUICK = "--device cpu --dataset digits --side 4 --train-size 24 --test-size 10 --batch-size 8 --hidden 6".split()


def tiny(**options):
    return PixelMnistConfig(**{"dataset": "digits", "side": 4, "hidden": 5} | options)


# Gradients through time


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def one_after_another(configs, train):
    for config in configs:
        train(config)
    return []


def unrolled(model, x, y, cell, rule):
    """dL/dh_t of the equations written out, by a perturbation 0 that is added to each h_t."""
    layer = model.layer
    w, u = layer.weight_ih_l0, layer.weight_hh_l0
    h = c = x.new_zeros(len(x), u.shape[1])
    v, zeros = x.new_zeros(len(x), len(w)), []
    for x_t in x.unbind(1):
        g = x_t @ w.T if cell == "dtriv" else x_t @ w.T + layer.bias_ih_l0
        v = rule.momentum * v + rule.step_size * g
        if cell == "dtriv":
            z = h @ u.T + v
            h = z.sign() * (z.abs() + layer.bias_l0).relu()
        elif cell == "rnn":
            h = (h @ u.T + layer.bias_hh_l0 + v).tanh()
        else:
            i, f, k, o = (h @ u.T + layer.bias_hh_l0 + v).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * k.tanh()
            h = o.sigmoid() * c.tanh()
        zeros.append(torch.zeros_like(h, requires_grad=True))
        h = h + zeros[-1]
    loss = nn.functional.cross_entropy(model.head(h), y, reduction="sum")
    return torch.stack(torch.autograd.grad(loss, zeros), dim=1)


def pictures(count=4, pixels=30):
    return torch.rand(count, pixels, 1, dtype=torch.float64), torch.arange(count) % 10


@pytest.mark.parametrize("cell", ["dtriv", "rnn", "lstm"])
def test_gradients_are_total_derivatives_and_nothing_passes_through_the_rule(cell):
    config = tiny(cell=cell, model="momentum", hidden=7, momentum=0.9, step_size=0.6)
    net, batch = config.make_model().double(), pictures()
    found = pixel_mnist_gradients.gradients(net, batch)
    expected = unrolled(net, *batch, cell, config.rule_options(config.rules()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert pixel_mnist_gradients.share_of_rule(net, batch) == 0
    assert pixel_mnist_gradients.share_of_rule(tiny(cell=cell, model="adam").make_model().double(), batch) == 0


def test_a_share_that_there_is_would_be_seen():
    """A layer whose next momentum holds the last state, which no rule's does."""

    class Leaky(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, state=None):
            output, state = self.layer(x, state)
            return output, dataclasses.replace(state, v=state.v + state.h.repeat(1, 1, 4))

    net = tiny(model="momentum").make_model().double()
    net.layer = Leaky(net.layer)
    assert pixel_mnist_gradients.share_of_rule(net, pictures(pixels=12)) > 0.01


def test_quantiles_of_the_norms():
    norms = torch.rand(2, 11, 3, dtype=torch.float64)
    found = pixel_mnist_gradients.quantiles(norms)
    ordered = norms.sort(dim=1).values
    assert list(pixel_mnist_gradients.LEVELS) == ["median", "q10", "q90"]
    torch.testing.assert_close(found, ordered[:, [5, 1, 9]])


def test_gradients_write_their_files(tmp_path, capsys):
    argv = "--dataset digits --side 4 --hidden 6 --train-size 200 --iterations 3 --every 2 --measured 5".split()
    pixel_mnist_gradients.main([*argv, "--cell", "lstm", "--out", str(tmp_path)])
    assert names_in(tmp_path) == {"gradients.csv", "gradients.json", "gradients.png"}
    rows = read_rows(tmp_path / "gradients.csv")
    keys = [(row["model"], int(row["iteration"]), int(row["t"])) for row in rows]
    assert keys == list(itertools.product(("plain", "forget", "momentum"), (0, 2, 3), range(1, 17)))
    assert all(float(row["q10"]) <= float(row["median"]) <= float(row["q90"]) for row in rows)
    said = capsys.readouterr().out
    assert "MomentumLSTM: |dL/dh_t| / |dL/dh_T| at t = 8 and 4: " in said
    assert said.count("share that passes through the rule 0") == 3
    assert json.loads((tmp_path / "gradients.json").read_text())["rules"]["momentum"]["momentum"] == 0.6


# The grid of momentum and step size


def test_the_authors_numbers_are_in_their_places():
    grids = {name: momentum_ablation.of_authors(judged) for name, judged in momentum_ablation.TASKS.items()}
    places = [(0.9, 0.1), (0.0, 1.0), (0.3, 0.6), (0.1, 0.1)]
    assert [grids["pixel_mnist"][place] for place in places[:3]] == [99.08, 98.90, 65.73]
    assert [grids["speech"][place] for place in (places[0], places[1], places[3])] == [121.07, 9.33, 5.86]
    assert all(len(grid) == 25 for grid in grids.values())


@pytest.mark.parametrize(
    ("means", "is_higher_better", "said"),
    [
        ({(0.0, 1.0): 10.0, (0.0, 0.5): 13.0, (0.6, 1.0): 14.0}, True, "75 % of the gain without momentum, at step"),
        ({(0.0, 1.0): 10.0, (0.0, 0.5): 13.0, (0.6, 0.5): 9.0}, False, "best pair 0.6, 0.5: 9; 0 % of the gain"),
        ({(0.0, 1.0): 5.0, (0.6, 1.0): 5.0}, True, "no gain"),
        ({(0.6, 1.0): 5.0}, True, "needs the pair 0, 1"),
    ],
)
def test_what_there_is_without_momentum(means, is_higher_better, said):
    assert said in momentum_ablation.without_momentum(means, is_higher_better=is_higher_better)


def test_the_colors_of_a_grid_are_a_scale(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("tasks.common.figures.write_figure", lambda figure, path: figures.append(figure))
    judged = momentum_ablation.TASKS["pixel_mnist"]
    grids = {"one": momentum_ablation.of_authors(judged), "single": {(0.0, 1.0): 7.0}}
    momentum_ablation.draw_grids(grids, judged, tmp_path / "x.png")
    images = [ax.images[0] for ax in figures[-1].axes if ax.images]
    assert images[0].norm.vmax == pytest.approx(100 - 37.39)
    assert len(figures[-1].axes) == 2 * len(grids)  # each with its scale
    figures[-1].draw_without_rendering()
    plt.close(figures[-1])


@pytest.mark.slow
def test_the_ablation_runs_the_grid_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(momentum_ablation, "run_side_by_side", one_after_another)
    options = ["--momenta", "0.6", "0", "--step-sizes", "1", "0.5", "--epochs", "1", "--seeds", "2"]
    options = [*options, *QUICK, "--out", str(tmp_path)]
    momentum_ablation.main(options)
    assert names_in(tmp_path) >= {"ablation.csv", "ablation.json", "ablation.png"}
    rows = read_rows(tmp_path / "ablation.csv")
    pairs = [(float(row["momentum"]), float(row["step_size"])) for row in rows]
    assert pairs == list(itertools.product((0.6, 0.0), (1.0, 0.5)))
    assert [float(row["gain"]) for row in rows] == pytest.approx([2.5, 1.25, 1, 0.5])
    folders = [tmp_path / f"momentum0.6-step1-seed{seed}" for seed in (0, 1)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [s["rule"]["momentum"] for s in summaries] == [0.6, 0.6]
    assert float(rows[0]["test accuracy, %"]) == pytest.approx(50 * sum(s["test_accuracy"] for s in summaries))
    capsys.readouterr()
    momentum_ablation.main(options)
    assert capsys.readouterr().out.count("is finished already") == 8
    with pytest.raises(SystemExit, match="holds a different run"):
        momentum_ablation.main([*options, "--lr", "0.5"])


# Images a second


def test_throughput_writes_a_table_with_ratios_to_softmax(tmp_path, capsys, monkeypatch):
    measured = iter([9.0, 9.0, 4.0, 1.0, 4.0, 2.0, 4.0, 0.5] * 2)  # softmax and momentum in rounds; the first is void
    monkeypatch.setattr(image_throughput, "seconds", lambda *args: next(measured))
    monkeypatch.setattr(image_throughput.random.Random, "sample", lambda self, names, count: names)
    argv = [*"--model softmax,momentum --length 6 12 --batch-size 2 --repeats 3".split(), *TRANSFORMER]
    image_throughput.main([*argv, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "throughput.json").read_text())
    rows = {(row["model"], row["length"]): row for row in report["rows"]}
    assert set(rows) == set(itertools.product(("softmax", "momentum"), (6, 12)))
    for (name, length), row in rows.items():
        found = (row["images_per_second"], row["over_softmax"])
        assert found == ((0.5, 1.0) if name == "softmax" else (2.0, 4.0))
        if name == "softmax":
            assert row["state_bytes"] == 2 * length * 8 * 4  # keys and values of a layer
    assert rows["momentum", 6]["state_bytes"] == rows["momentum", 12]["state_bytes"]
    assert "× softmax" in capsys.readouterr().out


# Recall


@pytest.mark.slow
def test_one_command_makes_the_runs_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "run_side_by_side", one_after_another)
    options = (
        "--most 8 --keys 16 --values 16 --iterations 2 --epochs 1 --batch-size 4 --test-size 4 --jobs 1 --kind all"
    )
    options += " --model linear,momentum --rates 1e-3,1e-2 --seeds 2"
    recall.main([*TRANSFORMER, *options.split(), "--out", str(tmp_path)])
    runs = run_folders(tmp_path)
    assert len(runs) == 2 * 3 * (2 + 1)
    rates = best_rates(runs)
    assert len(rates) == 2 * 3
    for (kind, _, model), rate in rates.items():
        mine = [run for run in runs if (run.config["kind"], run.config["model"]) == (kind, model)]
        first = {run.config["lr"]: run.summary["best_validation_accuracy"] for run in mine if run.config["seed"] == 0}
        assert first.keys() == {1e-3, 1e-2}
        assert first[rate] == max(first.values())
        assert [run.config["lr"] for run in mine if run.config["seed"] == 1] == [rate]
    found = list(COMMANDS["recall/table"].read(tmp_path))
    assert {line["case"] for line in found if line["table"] == "again"} == {"4 pairs", "8 pairs"}
    metrics = {(line["table"], line["metric"]) for line in found}
    assert metrics == {("once", "accuracy"), ("again", "accuracy"), ("again", "old_value_accuracy")}


def test_errors_of_the_plain_recurrence(monkeypatch):
    """The delta rule with momentum, step by step in float64, on the same random numbers."""
    monkeypatch.setattr(recall_regression, "LENGTHS", (30, 70))
    monkeypatch.setattr(recall_regression, "FEATURES", 6)
    monkeypatch.setattr(recall_regression, "TARGETS", 4)
    spread, noise = recall_regression.deviations(12.0), 0.3
    found = recall_regression.errors(spread, noise, 3, seed=5)
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(3, 1, 6, 4, generator=generator)
    k = unit_keys(spread, (3, 1, 70), generator)
    q = torch.randn(k.shape, generator=generator)
    v = k @ w
    v = v + noise * torch.randn(v.shape, generator=generator)
    w, k, q, v = (x[:, 0].double() for x in (w, k, q, v))
    for row, momentum in enumerate(recall_regression.MOMENTA):
        for column, g in enumerate(recall_regression.STEPS):
            s, p = torch.zeros(2, 3, 6, 4, dtype=torch.float64)
            wrong = []
            for t in range(70):
                e = v[:, t] - torch.einsum("bdm,bd->bm", s, k[:, t])
                p = momentum * p + torch.einsum("bd,bm->bdm", k[:, t], e)
                s = s + (1 - momentum) * g * p
                wrong.append(torch.einsum("bdm,bd->bm", s - w, q[:, t]).square().mean().item())
            expected = sum(wrong[27:30]) / 3, sum(wrong[63:70]) / 7
            assert found[row, column].tolist() == pytest.approx(expected, rel=1e-3)


def test_the_best_settings_of_each_set():
    sets, steps = recall_regression.settings(), torch.tensor(recall_regression.STEPS)
    assert sets["any"].all()
    assert sets["safe"][0].all()
    for momentum, allowed in zip(recall_regression.MOMENTA[1:], sets["safe"][1:], strict=True):
        assert torch.equal(allowed, steps <= 3 * (1 - momentum))
    found = torch.ones(*sets["any"].shape, len(recall_regression.LENGTHS))
    found[3, 1, -1], found[0, 2, -1], found[-1, -1, -1] = 0.25, 0.5, 0.125
    *_, safe, every = recall_regression.rows(found, {"keys": "white"})
    assert (safe["delta"], safe["delta_step"]) == (0.5, recall_regression.STEPS[2])
    assert (safe["momentum_delta"], safe["momentum"], safe["momentum_step"]) == (0.25, 0.9, recall_regression.STEPS[1])
    assert (every["momentum_delta"], every["momentum"]) == (0.125, 0.99)
    assert (safe["settings"], every["settings"], every["length"]) == ("safe", "any", 1000)


def test_the_regression_leaves_table_and_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall_regression, "LENGTHS", (10, 20))
    recall_regression.main(["--sequences", "2", "--out", str(tmp_path)])
    assert "ill-conditioned  noise 0.3 after   20, safe" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"regression.csv", "regression.json", "regression.png"}
    assert len(json.loads((tmp_path / "regression.json").read_text())["table"]) == 2 * 2 * 2 * 2
