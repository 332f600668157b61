"""Pixel MNIST: order of the pixels, split, tables, training and resuming; gradients through time; the ablation."""

import csv
import dataclasses
import importlib
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from tasks import pixel_mnist
from tasks.data.mnist import read_mnist
from tasks.models.recurrent import VARIANTS, RuleOptions
from tasks.pixel_mnist import PRESETS, PixelMnistConfig
from tasks.studies import momentum_ablation, pixel_mnist_gradients
from tests.tasks.small_runs import names_in, read_metrics

QUICK = "--device cpu --dataset digits --side 4 --train-size 24 --test-size 10 --batch-size 8 --hidden 6".split()


def tiny(**options):
    """A configuration of little images."""
    return PixelMnistConfig(**{"dataset": "digits", "side": 4, "hidden": 5} | options)


# Data


def test_the_permutation_is_that_of_other_papers():
    order = pixel_mnist.permutation(92916, 784)
    assert order[:8].tolist() == [319, 576, 323, 107, 355, 716, 197, 20]
    assert order.sort().values.tolist() == list(range(784))
    torch.manual_seed(1)
    assert torch.equal(pixel_mnist.permutation(92916, 784), order)
    assert not torch.equal(pixel_mnist.permutation(1, 784), order)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("side", [28, 14, 4])
def test_sequences_are_the_pixels_of_the_smaller_image(side, permuted):
    images = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    config = PixelMnistConfig(side=side, permuted=permuted)
    found = pixel_mnist.sequences(images, config)
    block = 28 // side
    order = pixel_mnist.permutation(92916, side**2) if permuted else range(side**2)
    assert found.shape == (3, side**2, 1)
    for t, pixel in enumerate(order):
        row, column = divmod(int(pixel), side)
        part = images[:, 0, row * block : (row + 1) * block, column * block : (column + 1) * block]
        torch.testing.assert_close(found[:, t, 0], part.mean((1, 2)))


def numbered(split, train=60, test=20):
    """Images that tell their number."""
    first, count = (0, train) if split == "train" else (train, test)
    numbers = torch.arange(first, first + count)
    return (numbers / 100.0).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28), numbers


@pytest.mark.parametrize(("train_size", "test_size"), [(0, 0), (7, 3), (10**6, 10**6)])
def test_no_image_is_in_two_parts(train_size, test_size, monkeypatch):
    monkeypatch.setitem(pixel_mnist.READ, "mnist", numbered)
    config = PixelMnistConfig(side=14, permuted=True, train_size=train_size, test_size=test_size)
    parts = pixel_mnist.load_data(config)
    for x, y in parts.values():
        torch.testing.assert_close(x, (y / 100.0).reshape(-1, 1, 1).expand(-1, 196, 1))
    cut = {"train": train_size, "validation": test_size, "test": test_size}
    for (name, (_, y)), numbers in zip(parts.items(), (range(50), range(50, 60), range(60, 80)), strict=True):
        assert y.tolist() == list(numbers)[: cut[name] or None]


def test_the_last_10_000_of_mnist_are_held_out():
    root = os.environ.get("HBNODE_DATA")
    if not root or not (Path(root) / "MNIST" / "raw").is_dir():
        pytest.skip("MNIST is not in HBNODE_DATA")
    parts = pixel_mnist.load_data(PixelMnistConfig(side=4, train_size=0, test_size=0))
    assert {name: len(y) for name, (_, y) in parts.items()} == {"train": 50_000, "validation": 10_000, "test": 10_000}
    images, labels = read_mnist("train")
    assert torch.equal(parts["validation"][1], labels[50_000:])
    torch.testing.assert_close(parts["validation"][0].mean((1, 2)), images[50_000:].mean((1, 2, 3)))
    x, _ = parts["train"]
    assert 0 <= x.min() < 0.01
    assert 0.9 < x.max() <= 1


def test_without_the_images_it_says_what_to_do(monkeypatch):
    def absent(split):
        raise FileNotFoundError("it is not there. Fix: get it.")

    monkeypatch.setitem(pixel_mnist.READ, "mnist", absent)
    with pytest.raises(SystemExit, match=r"Fix: get it\. Or --dataset digits"):
        pixel_mnist.load_data(PixelMnistConfig())


# Tables

TABLE_6 = """
mnist-128           False  lstm   128  0    1e-3  -
mnist-256           False  lstm   256  0    1e-3  -
pmnist-128          True   lstm   128  0    1e-3  -
pmnist-256          True   lstm   256  0    1e-3  -
mnist-dtriv-170     False  dtriv  170  1    1e-3  1e-4
mnist-dtriv-360     False  dtriv  360  0    5e-4  1e-4
mnist-dtriv-512     False  dtriv  512  100  5e-4  1e-4
pmnist-dtriv-170    True   dtriv  170  1    7e-4  2e-4
pmnist-dtriv-360    True   dtriv  360  0    7e-4  5e-5
pmnist-dtriv-512    True   dtriv  512  0    3e-4  7e-5
"""
# tables 7 to 10: model, momentum, step size, beta, restart; a dash is not there
RULES = """
mnist-128         momentum  0.6  0.6   -     -
mnist-256         momentum  0.6  0.6   -     -
pmnist-128        momentum  0.6  1.0   -     -
pmnist-256        momentum  0.6  1.0   -     -
pmnist-dtriv-170  momentum  0.6  0.9   -     -
pmnist-dtriv-360  momentum  0.3  0.3   -     -
pmnist-dtriv-512  momentum  0.3  0.3   -     -
mnist-128         adam      0.6  0.6   0.1   -
pmnist-256        adam      0.6  1.0   0.01  -
pmnist-dtriv-512  adam      0.3  0.3   0.8   -
mnist-128         rmsprop   0.0  0.6   0.99  -
mnist-256         rmsprop   0.0  0.6   0.9   -
pmnist-128        rmsprop   0.0  1.0   0.01  -
pmnist-256        rmsprop   0.0  1.0   0.01  -
pmnist-dtriv-512  rmsprop   0.0  0.3   0.9   -
mnist-128         sr        -    1.0   -     2
mnist-256         sr        -    1.0   -     2
pmnist-128        sr        -    0.01  -     6
pmnist-256        sr        -    0.9   -     40
pmnist-dtriv-512  sr        -    0.3   -     2
mnist-128         gain      -    0.6   -     -
pmnist-256        nag       -    1.0   -     -
pmnist-256        adaptive  -    1.0   -     -
"""
PARAMETERS = {
    "mnist-128": 68_362,
    "pmnist-256": 267_786,
    "pmnist-dtriv-170": 16_415,
    "mnist-dtriv-360": 68_950,
    "pmnist-dtriv-512": 136_970,
}


@pytest.mark.parametrize("line", TABLE_6.strip().splitlines())
def test_presets_are_table_6(line):
    name, permuted, cell, hidden, rebase, lr, orthogonal = line.split()
    config = PixelMnistConfig(**PRESETS[name])
    found = (config.dataset, config.side, config.permuted, config.cell, config.hidden, config.rebase)
    assert found == ("mnist", 28, permuted == "True", cell, int(hidden), int(rebase))
    assert (config.lr, config.epochs, config.batch_size, config.clip) == (float(lr), 150, 128, 1.0)
    assert (config.train_size, config.test_size, config.forget_bias) == (0, 0, 1.0)
    if orthogonal != "-":
        assert config.orthogonal_lr == float(orthogonal)
    assert set(PRESETS) == {row.split()[0] for row in TABLE_6.strip().splitlines()}


@pytest.mark.parametrize("line", RULES.strip().splitlines())
def test_rules_are_tables_7_to_10(line):
    preset, model, *numbers = line.split()
    config = PixelMnistConfig(**PRESETS[preset] | {"model": model})
    rule = config.rule_options(config.rules())
    for name, number in zip(("momentum", "step_size", "beta", "restart"), numbers, strict=True):
        if number != "-":
            assert getattr(rule, name) == float(number)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_papers_numbers_of_parameters(name):
    config = PixelMnistConfig(**PRESETS[name])
    assert pixel_mnist.degrees_of_freedom(config.make_model(), config) == PARAMETERS[name]


# Model and optimizer


def test_the_plain_model_is_torchs_lstm_and_a_readout_of_its_last_state():
    model = tiny(model="plain").make_model().double()
    lstm = nn.LSTM(1, 5, batch_first=True).double()
    lstm.load_state_dict(model.layer.state_dict())
    x = torch.rand(3, 16, 1, dtype=torch.float64)
    _, (h, _) = lstm(x)
    torch.testing.assert_close(model(x), h[0] @ model.head.weight.T + model.head.bias)
    assert model.layer.bias_ih_l0[5:10].tolist() == [1.0] * 5


def test_the_loss():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    loss, means = pixel_mnist.cross_entropy(lambda x: logits, (None, torch.tensor([0, 1, 1])))
    each = [math.log(math.exp(2) + 2) - 2, math.log(math.e + 2) - 1, math.log(math.exp(3) + 2)]
    assert loss.item() == pytest.approx(sum(each) / 3)
    assert means["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("cell", "alpha"), [("lstm", 0.9), ("dtriv", 0.99)])
def test_the_optimizer_has_a_rate_for_orthogonal_weights(cell, alpha):
    config = tiny(cell=cell, lr=3e-3, orthogonal_lr=1e-4)
    model = config.make_model()
    groups = pixel_mnist.make_optimizer(model, config).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert {group["alpha"] for group in groups} == {alpha}
    assert rates.keys() == {id(p) for p in model.parameters()}
    for name, p in model.named_parameters():
        assert rates[id(p)] == (1e-4 if cell == "dtriv" and "weight_hh" in name else 3e-3)


@pytest.mark.parametrize(("cell", "every", "expected"), [("dtriv", 3, [3, 6]), ("dtriv", 0, []), ("lstm", 3, [])])
def test_the_basis_is_moved_when_it_is_time(cell, every, expected, monkeypatch):
    config = tiny(cell=cell, rebase=every)
    model = config.make_model()
    moved = []
    monkeypatch.setattr(model.layer, "rebase", lambda: moved.append(step), raising=False)
    for step in range(1, 8):
        pixel_mnist.rebase(model, config, step)
    assert moved == expected


# Runs


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "momentum", "--permuted"],
        ["--model", "forget"],
        ["--model", "adam", "--cell", "dtriv", "--rebase", "2"],
    ],
    ids=" ".join,
)
def test_a_run_resumes_to_the_same_numbers_and_writes_its_files(options, tmp_path, capsys):
    options = [*options, *QUICK, "--lr", "0.01"]
    pixel_mnist.main([*options, "--epochs", "3", "--out", str(tmp_path / "whole")])
    assert "24/10/10 images of 16 pixels" in capsys.readouterr().out
    pixel_mnist.main([*options, "--epochs", "1", "--out", str(tmp_path / "parts")])
    pixel_mnist.main([*options, "--epochs", "3", "--out", str(tmp_path / "parts")])
    rows = read_metrics(tmp_path / "whole")
    assert rows == read_metrics(tmp_path / "parts")
    columns = {f"{part}_{name}" for part in ("train", "validation") for name in ("loss", "accuracy")}
    assert columns <= rows[0].keys()
    names = {"config.json", "metrics.csv", "summary.json", "checkpoint.pt"}
    assert names_in(tmp_path / "whole") == names
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    for name in ("test_loss", "test_accuracy", "last_test_loss", "last_test_accuracy", "best_epoch"):
        assert summaries[0][name] == summaries[1][name]
    before = (tmp_path / "parts" / "summary.json").read_bytes()
    pixel_mnist.main([*options, "--epochs", "3", "--out", str(tmp_path / "parts")])
    assert (tmp_path / "parts" / "summary.json").read_bytes() == before  # finished already
    with pytest.raises(SystemExit, match=r"permutation: 92916 there, 7 wanted"):
        pixel_mnist.main([*options, "--permutation", "7", "--epochs", "3", "--out", str(tmp_path / "parts")])


def test_what_is_tested_are_the_weights_of_the_best_epoch_and_of_the_last(tmp_path):
    folder = tmp_path / "run"
    pixel_mnist.main([*QUICK, "--lr", "0.1", "--epochs", "5", "--model", "plain", "--out", str(folder)])
    summary = json.loads((folder / "summary.json").read_text())
    accuracies = [float(row["validation_accuracy"]) for row in read_metrics(folder)]
    assert summary["best_epoch"] == accuracies.index(max(accuracies)) + 1
    described = json.loads((folder / "config.json").read_text())
    config = PixelMnistConfig(**{f.name: described[f.name] for f in dataclasses.fields(PixelMnistConfig)})
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    for weights, prefix in ((checkpoint["best"]["model"], ""), (checkpoint["model"], "last_")):
        model = config.make_model()
        model.load_state_dict(weights)
        with torch.no_grad():
            loss, means = pixel_mnist.cross_entropy(model, pixel_mnist.load_data(config)["test"])
        assert summary[f"{prefix}test_loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert summary[f"{prefix}test_accuracy"] == pytest.approx(means["accuracy"])


@pytest.mark.parametrize("model", VARIANTS)
def test_every_variant_learns(model):
    """Which half of a sequence is bright."""
    torch.manual_seed(0)
    config = tiny(model=model, hidden=16, lr=1e-2, step_size=None if model == "plain" else 1.0)
    net = config.make_model()
    optimizer = pixel_mnist.make_optimizer(net, config)
    y = torch.arange(32) % 2
    x = torch.zeros(32, 16, 1)
    x[y == 0, :8], x[y == 1, 8:] = 1.0, 1.0
    for _ in range(40):
        loss, means = pixel_mnist.cross_entropy(net, (x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert means["accuracy"] == 1
    assert loss < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--side", "5"], "--side must divide 28, the edge of mnist, got 5"),
        (["--dataset", "digits", "--side", "14"], "--side must divide 8, the edge of digits, got 14"),
        (["--orthogonal-lr", "0"], "--orthogonal-lr must be positive"),
        (["--permutation", str(2**32)], "--permutation must be below 2**32"),
        (["--model", "nesterov"], "invalid choice: 'nesterov'"),
    ],
)
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit):
        pixel_mnist.main(options)
    assert message in capsys.readouterr().err


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


def test_gradients_refuse_bad_options(capsys):
    for argv, message in (
        (["--every", "0"], "--every must be positive"),
        (["--model", "plain", "--momentum", "0.5"], "--momentum says nothing to --model plain"),
        (["--side", "9"], "--side must divide 28"),
    ):
        with pytest.raises(SystemExit):
            pixel_mnist_gradients.main(argv)
        assert message in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_named():
    config = tiny(model="momentum")
    net = config.make_model()
    optimizer = pixel_mnist.make_optimizer(net, config)
    batch = (torch.full((2, 16, 1), math.nan), torch.tensor([0, 1]))
    with pytest.raises(SystemExit, match=r"MomentumLSTM: the training loss is nan at iteration 3\. Fix:"):
        pixel_mnist_gradients.step(net, optimizer, batch, config, 3)


# The ablation


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


@pytest.mark.parametrize("task", momentum_ablation.TASKS)
def test_the_tasks_of_the_ablation_are_there(task):
    module, judged = importlib.import_module(f"tasks.{task}"), momentum_ablation.TASKS[task]
    config = getattr(module, judged.kind)(model="momentum", momentum=0.25, step_size=0.5)
    assert (config.momentum, config.step_size) == (0.25, 0.5)
    assert callable(module.train)
    assert "default" not in module.PRESETS


@pytest.fixture
def one_by_one(monkeypatch):
    """Runs in this process; the pairs of those that began."""
    began = []

    def run(configs, train, jobs, threads):
        failed = []
        for config in configs:
            began.append((config.momentum, config.step_size))
            try:
                train(config)
            except SystemExit as error:
                failed.append(str(error))
        return failed

    monkeypatch.setattr(momentum_ablation, "side_by_side", run)
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


def test_a_pair_that_fails_leaves_a_dash(one_by_one, tmp_path, monkeypatch):
    train = pixel_mnist.train

    def fails(config):
        if config.momentum == 0.9:
            raise SystemExit("loss is nan")
        train(config)

    monkeypatch.setattr(pixel_mnist, "train", fails)
    options = [*QUICK, "--epochs", "1", "--momenta", "0.9", "0", "--step-sizes", "1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"not finished:\n.*momentum0\.9-step1-seed0$"):
        momentum_ablation.main(options)
    assert (tmp_path / "ablation.png").exists()
    assert len((tmp_path / "ablation.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("task", "values", "errors"),
    [("pixel_mnist", (90.0, 10.0, 99.0), (10.0, 90.0, 1.0)), ("speech", (5.0, 1e6, 7.0), (5.0, 1e6, 7.0))],
)
def test_colors_are_errors_and_what_is_missing_a_dash(task, values, errors, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(momentum_ablation, "write_figure", lambda figure, path: drawn.update(figure=figure))
    grid = dict(zip(((0.0, 0.1), (0.6, 0.1), (0.6, 1.0)), values, strict=True))
    momentum_ablation.draw_grids({"runs": grid}, momentum_ablation.TASKS[task], tmp_path / "grid.png")
    ax, _ = drawn["figure"].axes  # beside it the scale of the colors
    expected = [errors[1], errors[2], errors[0], math.nan]
    assert ax.images[0].get_array().filled(math.nan).flatten().tolist() == pytest.approx(expected, nan_ok=True)
    assert ax.images[0].get_clim() == pytest.approx((min(errors), max(errors)))
    assert [text.get_text() for text in ax.texts] == [*(f"{values[k]:.4g}" for k in (1, 2, 0)), "-"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0.6", "0"]
    importlib.import_module("matplotlib.pyplot").close(drawn["figure"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--momenta", "1"], "--momenta must be in [0, 1)"),
        (["--step-sizes", "0"], "--step-sizes must be positive"),
        (["--jobs", "0"], "--jobs must be positive"),
        (["--momentum", "0.5"], "--momentum is what the ablation sets"),
        (["--step-size=0.5"], "--step-size is what the ablation sets"),
        (["--model", "adam"], "--model is what the ablation sets"),
        (["--task", "copying"], "invalid choice: 'copying'"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_the_ablation_refuses_bad_options(options, message, capsys):
    with pytest.raises(SystemExit):
        momentum_ablation.main(options)
    assert message in capsys.readouterr().err


def test_a_rule_that_the_options_give_comes_first():
    config = tiny(model="momentum", momentum=0.1, step_size=0.2)
    assert config.rule_options(config.rules()) == RuleOptions(momentum=0.1, step_size=0.2)
