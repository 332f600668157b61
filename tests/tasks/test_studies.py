"""Studies: gradients through time, images per second, regression by memories."""

import csv
import itertools
import json

import pytest
import torch
from torch import nn

from tasks.data.recall import unit_keys
from tasks.pixel_mnist import PixelMnistConfig
from tasks.studies import image_throughput, pixel_mnist_gradients, recall_regression
from tests.tasks.small_runs import names_in

TRANSFORMER = "--device cpu --d-model 8 --heads 2 --layers 1 --feedforward 8".split()


def tiny(**options):
    return PixelMnistConfig(**{"dataset": "digits", "side": 4, "hidden": 5} | options)


# Gradients through time


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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


def test_gradients_write_their_files(tmp_path, capsys):
    argv = "--dataset digits --side 4 --hidden 6 --train-size 200 --iterations 3 --every 2 --measured 5".split()
    pixel_mnist_gradients.main([*argv, "--preset", "lstm", "--out", str(tmp_path)])
    assert names_in(tmp_path) == {"gradients.csv", "gradients.json", "gradients.png"}
    rows = read_rows(tmp_path / "gradients.csv")
    keys = [(row["model"], int(row["iteration"]), int(row["t"])) for row in rows]
    assert keys == list(itertools.product(("plain", "forget", "momentum"), (0, 2, 3), range(1, 17)))
    assert all(float(row["q10"]) <= float(row["median"]) <= float(row["q90"]) for row in rows)
    said = capsys.readouterr().out
    assert "MomentumLSTM: |dL/dh_t| / |dL/dh_T| at t = 8 and 4: " in said
    assert said.count("share through the rule 0") == 3
    assert json.loads((tmp_path / "gradients.json").read_text())["rules"]["momentum"]["momentum"] == 0.6


# The grid of momentum and step size


# Images a second


def test_throughput_writes_a_table_with_ratios_to_softmax(tmp_path, capsys, monkeypatch):
    measured = iter([9.0, 9.0, 4.0, 1.0, 4.0, 2.0, 4.0, 0.5] * 2)  # softmax and momentum in rounds; the first is void
    monkeypatch.setattr(image_throughput, "seconds", lambda *args: next(measured))
    monkeypatch.setattr(image_throughput.random.Random, "sample", lambda self, names, count: names)
    argv = [*"--model softmax,momentum --length 6,12 --batch-size 2 --repeats 3".split(), *TRANSFORMER]
    image_throughput.main([*argv, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "throughput.json").read_text())
    rows = {(row["model"], row["length"]): row for row in report["rows"]}
    assert set(rows) == set(itertools.product(("softmax", "momentum"), (6, 12)))
    for (name, length), row in rows.items():
        found = (row["images_per_second"], row["over_softmax"])
        assert found == ((0.5, 1.0) if name == "softmax" else (2.0, 4.0))
        if name == "softmax":
            assert row["state_bytes"] == 2 * length * 8 * 4  # keys and values of a layer
    assert 0 < rows["momentum", 6]["state_bytes"] == rows["momentum", 12]["state_bytes"]
    assert "× softmax" in capsys.readouterr().out


# Recall


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
