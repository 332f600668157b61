"""Studies: gradients through time, grids of momentum and step size, images a second, recall, tables and figures."""

import csv
import dataclasses
import itertools
import json
import math
import shutil

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from tasks import copying, language_model, pathological, pixel_mnist, plot, recall
from tasks.data.recall import unit_keys
from tasks.models.contenders import TITLES
from tasks.models.recurrent import VARIANTS
from tasks.pixel_mnist import PixelMnistConfig
from tasks.recall_table import best_rate
from tasks.studies import image_throughput, momentum_ablation, pixel_mnist_gradients, recall_regression
from tests.tasks.small_runs import names_in

TRANSFORMER = "--device cpu --d-model 8 --heads 2 --layers 1 --feedforward 8".split()
QUICK = "--device cpu --dataset digits --side 4 --train-size 24 --test-size 10 --batch-size 8 --hidden 6".split()


def tiny(**options):
    return PixelMnistConfig(**{"dataset": "digits", "side": 4, "hidden": 5} | options)


# Gradients through time


def unrolled(model, x, y, cell, rule):
    """dL/dh_t of the equations written out, by a perturbation 0 that is added to each h_t; and all h_t."""
    layer = model.layer
    w, u = layer.weight_ih_l0, layer.weight_hh_l0
    h = c = x.new_zeros(len(x), u.shape[1])
    v, zeros, states = x.new_zeros(len(x), len(w)), [], []
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
        states.append(h)
        zeros.append(torch.zeros_like(h, requires_grad=True))
        h = h + zeros[-1]
    loss = nn.functional.cross_entropy(model.head(h), y, reduction="sum")
    return torch.stack(torch.autograd.grad(loss, zeros), dim=1), torch.stack(states, dim=1).detach()


def pictures(count=4, pixels=30):
    return torch.rand(count, pixels, 1, dtype=torch.float64), torch.arange(count) % 10


@pytest.mark.parametrize("model", ["plain", "momentum"])
@pytest.mark.parametrize("cell", ["dtriv", "rnn", "lstm"])
def test_gradients_are_total_derivatives(cell, model):
    options = {"momentum": 0.9, "step_size": 0.6} if model == "momentum" else {}
    config = tiny(cell=cell, model=model, hidden=7, **options)
    net, batch = config.make_model().double(), pictures()
    found = pixel_mnist_gradients.gradients(net, batch)
    expected, _ = unrolled(net, *batch, cell, config.rule_options(config.rules()))
    assert found.shape == (4, 30, 7)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("cell", ["dtriv", "rnn"])
def test_the_gradient_is_the_product_without_a_term_of_momentum(cell, momentum):
    """dL/dh_t = U^T D_{t+1} dL/dh_{t+1}: D is 1 where a modReLU is not cut off, 1 - h^2 of a tanh."""
    config = tiny(cell=cell, model="momentum", hidden=7, momentum=momentum, step_size=0.6)
    net, (x, y) = config.make_model().double(), pictures()
    if cell == "rnn":
        nn.init.orthogonal_(net.layer.weight_hh_l0)
    _, states = unrolled(net, x, y, cell, config.rule_options(config.rules()))
    slopes = (states != 0).double() if cell == "dtriv" else 1 - states.square()
    logits = net.head(states[:, -1]).detach()
    error = logits.softmax(1) - nn.functional.one_hot(y, 10)
    product = [error @ net.head.weight.detach()]
    for slope in slopes.flip(1).unbind(1)[:-1]:
        product.insert(0, (slope * product[0]) @ net.layer.weight_hh_l0.detach())
    found = pixel_mnist_gradients.gradients(net, (x, y))
    difference = (found - torch.stack(product, dim=1)).norm(dim=-1) / found.norm(dim=-1)
    assert difference.max() < 1e-12


@pytest.mark.parametrize(
    ("cell", "model"), [*itertools.product(["lstm"], VARIANTS), ("gru", "momentum"), ("dtriv", "adam")]
)
def test_nothing_passes_through_the_rule(cell, model):
    net = tiny(cell=cell, model=model).make_model().double()
    assert pixel_mnist_gradients.share_of_rule(net, pictures(pixels=12)) == 0


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


@pytest.mark.parametrize(
    ("cell", "models"), [("dtriv", ("plain", "gain", "momentum")), ("lstm", ("plain", "forget", "momentum"))]
)
def test_gradients_write_their_files(cell, models, tmp_path, capsys):
    argv = "--dataset digits --side 4 --hidden 6 --train-size 200 --iterations 3 --every 2 --measured 5".split()
    pixel_mnist_gradients.main([*argv, "--cell", cell, "--out", str(tmp_path / "run")])
    names = {"gradients.csv", "gradients.json", "gradients.png"}
    assert names_in(tmp_path / "run") == names
    with open(tmp_path / "run" / "gradients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [(row["model"], int(row["iteration"]), int(row["t"])) for row in rows]
    assert keys == list(itertools.product(models, (0, 2, 3), range(1, 17)))
    assert all(float(row["q10"]) <= float(row["median"]) <= float(row["q90"]) for row in rows)
    said = capsys.readouterr().out
    assert f"Momentum{cell.upper()}: |dL/dh_t| / |dL/dh_T| at t = 8 and 4: " in said
    assert said.count("share that passes through the rule 0") == 3
    summary = json.loads((tmp_path / "run" / "gradients.json").read_text())
    assert summary["configs"][0]["hidden"] == 6
    assert summary["rules"]["momentum"]["momentum"] == 0.6


def test_an_orthogonal_weight_keeps_the_norm_where_nothing_is_cut_off():
    config = tiny(cell="dtriv", model="momentum", hidden=6)
    net = config.make_model().double()
    nn.init.constant_(net.layer.bias_l0, 0.01)  # then no modReLU is
    norms = pixel_mnist_gradients.gradients(net, pictures()).norm(dim=-1)
    torch.testing.assert_close(norms, norms[:, -1:].expand_as(norms), rtol=1e-5, atol=0)  # a basis of float32


def test_an_untrained_lstm_has_no_gradient_where_the_next_pixel_is_black():
    """Its recurrent weight reaches the input gate alone, and the cell's input is 0 there; with momentum it is not."""
    x, y = pictures()
    x[x < 0.5] = 0
    x[:, 0] = 1
    next_is_black = x[:, 1:, 0] == 0
    for model, expected in (("plain", next_is_black), ("momentum", torch.zeros_like(next_is_black))):
        net = tiny(model=model).make_model().double()
        norms = pixel_mnist_gradients.gradients(net, (x, y)).norm(dim=-1)
        assert torch.equal(norms[:, :-1] == 0, expected)


def test_a_loss_that_is_not_finite_is_named():
    config = tiny(model="momentum")
    net = config.make_model()
    optimizer = pixel_mnist.make_optimizer(net, config)
    batch = (torch.full((2, 16, 1), math.nan), torch.tensor([0, 1]))
    with pytest.raises(SystemExit, match=r"MomentumLSTM: the training loss is nan at iteration 3\. Fix:"):
        pixel_mnist_gradients.step(net, optimizer, batch, config, 3)


# The grid of momentum and step size


def test_the_authors_numbers_are_in_their_places():
    grids = {name: momentum_ablation.of_authors(judged) for name, judged in momentum_ablation.TASKS.items()}
    assert grids["pixel_mnist"][0.9, 0.1] == 99.08
    assert grids["pixel_mnist"][0.0, 1.0] == 98.90
    assert grids["pixel_mnist"][0.3, 0.6] == 65.73
    assert grids["speech"][0.9, 0.1] == 121.07
    assert grids["speech"][0.1, 0.1] == 5.86
    assert grids["speech"][0.0, 1.0] == 9.33
    assert all(len(grid) == 25 for grid in grids.values())
    said = momentum_ablation.without_momentum(grids["speech"], is_higher_better=False)
    assert said == (
        "LSTM (momentum 0, step size 1) 9.33; best pair 0.1, 0.1: 5.86; "
        "96 % of the gain without momentum, at step size 0.1: 6"
    )


def test_what_there_is_without_momentum():
    means = {(0.0, 1.0): 10.0, (0.0, 0.5): 13.0, (0.6, 1.0): 14.0, (0.6, 0.5): 9.0}
    assert "75 % of the gain" in momentum_ablation.without_momentum(means, is_higher_better=True)
    assert "best pair 0.6, 0.5: 9; 0 % of the gain" in momentum_ablation.without_momentum(means, is_higher_better=False)
    assert "no gain" in momentum_ablation.without_momentum({(0.0, 1.0): 5.0, (0.6, 1.0): 5.0}, is_higher_better=True)
    assert "needs the pair 0, 1" in momentum_ablation.without_momentum({(0.6, 1.0): 5.0}, is_higher_better=True)


@pytest.fixture
def one_by_one(monkeypatch):
    """Runs in this process; the pairs of those that began."""
    began = []

    def run(configs, train):
        failed = []
        for config in configs:
            began.append((config.momentum, config.step_size))
            try:
                train(config)
            except SystemExit as error:
                failed.append(str(error))
        return failed

    monkeypatch.setattr(momentum_ablation, "run_side_by_side", run)
    return began


def test_the_ablation_runs_the_grid_and_goes_on(one_by_one, tmp_path, capsys):
    options = [*QUICK, "--epochs", "1", "--seeds", "2", "--out", str(tmp_path)]
    options = ["--momenta", "0.6", "0", "--step-sizes", "1", "0.5", *options]
    momentum_ablation.main(options)
    assert one_by_one == list(itertools.product((0.6, 0.0), (1.0, 0.5))) * 2
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        "ablation.csv",
        "ablation.json",
        "ablation.png",
    }
    with open(tmp_path / "ablation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(float(row["momentum"]), float(row["step_size"])) for row in rows] == one_by_one[:4]
    assert [float(row["gain"]) for row in rows] == pytest.approx([2.5, 1.25, 1, 0.5])
    folders = [tmp_path / f"momentum0.6-step1-seed{seed}" for seed in (0, 1)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [s["rule"]["momentum"] for s in summaries] == [0.6, 0.6]
    mean = 50 * sum(s["test_accuracy"] for s in summaries)
    assert float(rows[0]["test accuracy, %"]) == pytest.approx(mean)
    assert "runs: LSTM (momentum 0, step size 1)" in capsys.readouterr().out
    momentum_ablation.main(options)
    assert capsys.readouterr().out.count("is finished already") == 8
    with pytest.raises(SystemExit, match="holds runs with other options"):
        momentum_ablation.main([*options, "--lr", "0.5"])


# Images a second


def test_throughput_writes_a_table_with_ratios_to_softmax(tmp_path, capsys, monkeypatch):
    measured = iter([9.0, 9.0, 4.0, 1.0, 4.0, 2.0, 4.0, 0.5] * 2)  # softmax and momentum in rounds; the first is void
    drawn = []

    def seconds(model, config, batch_size, length):
        drawn.append(length)
        return next(measured)

    monkeypatch.setattr(image_throughput, "seconds", seconds)
    monkeypatch.setattr(image_throughput.random.Random, "sample", lambda self, names, count: names)
    argv = [*"--model softmax,momentum --length 6 12 --batch-size 2 --repeats 3 --device cpu".split(), *TRANSFORMER[2:]]
    image_throughput.main([*argv, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "throughput.json").read_text())
    rows = {(row["model"], row["length"]): row for row in report["rows"]}
    assert set(rows) == {(name, length) for name in ("softmax", "momentum") for length in (6, 12)}
    for (name, _), row in rows.items():
        expected = (0.5, 1.0) if name == "softmax" else (2.0, 4.0)
        assert (row["images_per_second"], row["over_softmax"]) == expected
    assert rows["momentum", 6]["state_bytes"] == rows["momentum", 12]["state_bytes"]
    assert rows["softmax", 6]["state_bytes"] == 2 * 6 * 8 * 4  # keys and values of a layer
    assert rows["softmax", 12]["state_bytes"] == 2 * 12 * 8 * 4
    assert drawn == [6] * 8 + [12] * 8
    assert report["threads"] == torch.get_num_threads()
    assert "× softmax" in capsys.readouterr().out


def test_the_bytes_of_a_state():
    nested = (torch.zeros(2, 3), [torch.zeros(4, dtype=torch.float64)], {"x": (torch.zeros(5),)})
    assert image_throughput.state_bytes(nested) == 24 + 32 + 20
    assert image_throughput.state_bytes((object(), None)) == 0


# Recall


def one_after_another(configs, train):
    for config in configs:
        train(config)
    return []


def test_one_command_makes_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "run_side_by_side", one_after_another)
    sizes = "--most 8 --keys 16 --values 16 --iterations 2 --epochs 1 --batch-size 4 --test-size 4 --jobs 1".split()
    options = [
        *TRANSFORMER,
        *sizes,
        "--kind",
        "all",
        "--model",
        "linear,momentum",
        "--rates",
        "1e-3,1e-2",
        "--seeds",
        "2",
    ]
    recall.main([*options, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    for kind in recall.KINDS:
        assert f"{kind}, equal state" in out
    assert "counting" in out
    assert out.count(TITLES["linear"]) >= 3
    with open(tmp_path / "recall.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["seeds"] for row in rows} == {"2"}
    assert {row["model"] for row in rows} == {"linear", "momentum"}
    assert {(row["kind"], row["share"]) for row in rows} == {
        *((kind, "accuracy") for kind in recall.KINDS),
        ("again", "stale"),
    }
    again = [row for row in rows if row["kind"] == "again" and row["model"] == "linear"]
    assert {int(row["pairs"]) for row in again} == {1, 2, 4, 8}
    assert (tmp_path / "recall.png").read_bytes()[:4] == b"\x89PNG"
    folders = [path.parent for path in tmp_path.rglob("summary.json")]
    assert len(folders) == 2 * 3 * (2 + 1)
    for row in rows:
        candidates = [tmp_path / f"{row['kind']}-state-{row['model']}-lr{rate}-seed0" for rate in ("0.001", "0.01")]
        assert float(row["lr"]) == best_rate(candidates)


def test_no_run_no_rate(tmp_path, caplog):
    assert best_rate([tmp_path]) is None
    recall.report(tmp_path)
    assert "no finished run of recall" in caplog.text


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
    with pytest.raises(SystemExit):
        recall_regression.main(["--sequences", "0"])


@pytest.mark.slow
def test_momentum_averages_noise_and_does_not_accelerate():
    """The design's table to 10 %; without noise nothing is left to tell the two apart."""
    published = {"white": (0.0149, 0.0107), "ill-conditioned": (0.0355, 0.0347)}
    with torch.no_grad():
        for keys, condition in recall_regression.KEYS.items():
            spread = recall_regression.deviations(condition)
            exact, noisy = (recall_regression.errors(spread, noise, 64, seed=0) for noise in (0.0, 0.3))
            *_, found, _ = recall_regression.rows(exact, {})
            assert max(found["delta"], found["momentum_delta"]) < 1e-12
            *_, found, _ = recall_regression.rows(noisy, {})
            assert (found["length"], found["settings"]) == (1000, "safe")
            assert (found["delta"], found["momentum_delta"]) == pytest.approx(published[keys], rel=0.1)


# Tables and figures of runs without ODEs


def test_tables_and_figures_name_what_was_compared(tmp_path, capsys):
    tiny = "--device cpu --length 12 --hidden 5 --iterations 2 --batch-size 8 --test-size 10 --epochs 2".split()
    for model in ("plain", "momentum"):
        copying.main([*tiny, "--model", model, "--out", str(tmp_path / "runs" / model)])
    for optimizer in ("adam", "hf"):
        options = [*tiny, "--model", "gru", "--optimizer", optimizer, "--max-cg", "4"]
        pathological.main([*options, "--out", str(tmp_path / "runs" / optimizer)])
    text = "--model transformer --data generated --train-size 600 --test-size 100 --context 10 --epochs 1".split()
    for name in ("heavy_ball", "deeper"):
        options = [*TRANSFORMER, *text, "--connection", name]
        language_model.main([*options, "--out", str(tmp_path / "runs" / name)])
    capsys.readouterr()
    plot.main([str(tmp_path / "runs")])
    out = capsys.readouterr().out
    assert "NFE" not in out
    for name in ("copying-default-lstm-12", "pathological-default-addition-12", "language_model-default-generated"):
        assert name in out
        assert (tmp_path / "runs" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    for said in ("trivial loss", "test accuracy %", "optimizer=adam", "optimizer=hf", "\nheavy ball ", "\ndeeper "):
        assert said in out
    assert {line.split("  ")[0] for line in out.splitlines()} >= {"LSTM", "MomentumLSTM"}
    for name in ("adam", "hf", "heavy_ball", "deeper"):
        shutil.rmtree(tmp_path / "runs" / name)
    figure = plot.draw(plot.collect(tmp_path / "runs"), "")
    assert [ax.get_ylabel() for ax in figure.axes] == ["train loss", "test loss", "seconds per epoch"]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear"]
    (trivial,) = [line for line in figure.axes[1].lines if line.get_label() == "no memory"]
    assert trivial.get_ydata()[0] == pytest.approx(10 * math.log(8) / 32)
    assert figure.axes[0].lines[0].get_linestyle() == "--"
