"""Studies: images per second, regression by memories."""

import itertools
import json

import pytest
import torch

from tasks.data.recall import unit_keys
from tasks.studies import image_throughput, recall_regression

TRANSFORMER = "--device cpu --d-model 8 --heads 2 --layers 1 --feedforward 8".split()

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
    for (name, _), row in rows.items():
        found = (row["images_per_second"], row["over_softmax"])
        assert found == ((0.5, 1.0) if name == "softmax" else (2.0, 4.0))
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
