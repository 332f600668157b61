"""Studies: images per second, regression by memories."""

import json

import pytest
import torch

from tasks.data.recall import unit_keys
from tasks.studies import image_throughput, recall_regression

SMALL = "--device cpu --batch-size 2 --d-model 8 --heads 2 --layers 1 --feedforward 8".split()

# Images a second


def test_throughput_writes_ratios_to_softmax(tmp_path):
    image_throughput.main([*"--model softmax,momentum --length 6 --repeats 1".split(), *SMALL, "--out", str(tmp_path)])
    softmax, momentum = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    ratio = momentum["images_per_second"] / softmax["images_per_second"]
    assert momentum["over_softmax"] == pytest.approx(ratio, rel=1e-2)


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
