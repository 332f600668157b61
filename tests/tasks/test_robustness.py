"""The attacks against closed forms, and what the task writes and refuses."""

import json

import pytest
import torch
from torch import nn

from tasks import image_classification
from tasks.rows import read_csv
from tasks.studies import robustness

QUICK = "--device cpu --subset 96 --test-subset 63 --batch-size 32 --small --tol 0.1 --epochs 1".split()
SIZE = 0.1


def generator():
    return torch.Generator().manual_seed(0)


def linear():
    """A linear model of two classes, with images and labels."""
    images = 0.8 * torch.rand(50, 1, 4, 4) + 0.1
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), images, torch.randint(2, (50,))


def test_the_gradient_is_the_linear_models():
    model, images, labels = linear()
    weight = model[1].weight
    away = (weight[1 - labels] - weight[labels]).view_as(images)
    wrong = model(images).softmax(1)[torch.arange(50), 1 - labels]
    torch.testing.assert_close(robustness.gradient(model, images, labels), wrong[:, None, None, None] * away)
    assert robustness.gradient_ratio(model, images, labels) == pytest.approx(1, abs=1e-3)


def perturbed(attack, model, images, labels):
    extra = {"steps": 20} if attack == "pgd" else {}
    return getattr(robustness, attack)(model, images, labels, SIZE, generator(), **extra)


@pytest.mark.parametrize("attack", ["noise", "signs", "fgsm", "pgd"])
def test_perturbed_images_are_images_and_stay_in_the_box(attack):
    """Between two classes the worst image in the box is x + size sign(w_wrong - w_right): a step, or many, finds it."""
    model, images, labels = linear()
    if attack in ("fgsm", "pgd"):
        weight = model[1].weight.detach()
        worst = images + SIZE * (weight[1 - labels] - weight[labels]).view_as(images).sign()
        torch.testing.assert_close(perturbed(attack, model, images, labels), worst)
    images = torch.rand(50, 1, 4, 4).round()  # black and white: half of all moves would leave [0, 1]
    moved = perturbed(attack, model, images, labels)
    assert 0 <= moved.min() < moved.max() <= 1
    assert not torch.equal(moved, images)
    if attack == "noise":
        grey = torch.full((100, 1, 20, 20), 0.5)
        change = robustness.noise(nn.Identity(), grey, torch.zeros(100), SIZE, generator()) - grey
        assert (change.mean().item(), change.std().item()) == pytest.approx((0, SIZE), abs=0.002)
    else:
        assert (moved - images).abs().max() <= SIZE + 1e-6


@pytest.mark.slow
def test_the_attacked_model_is_the_trained_one_with_an_exact_gradient(tmp_path, monkeypatch):
    """A reversible run is solved by a splitting method, which checkpoint alone would not choose."""
    folder = tmp_path / "runs"
    image_classification.main([*QUICK, "--gradient", "reversible", "--steps", "2", "--out", str(folder)])
    _, trained = image_classification.load_run(folder)
    model, (images, labels) = robustness.load_attacked(folder)
    assert torch.equal(model(images), trained(images))
    assert robustness.gradient_ratio(model, images, labels) == pytest.approx(1, abs=0.1)
    monkeypatch.setattr(robustness, "SIZES", dict.fromkeys(robustness.SIZES, (0.0, 0.1)))
    robustness.main([str(folder), "--device", "cpu", "--pgd-steps", "2", "--out", str(tmp_path)])
    rows = read_csv(tmp_path / "robustness.csv")
    assert len(rows) == sum(map(len, robustness.SIZES.values()))
    clean = json.loads((folder / "summary.json").read_text())["test_accuracy"]
    found = [float(row["accuracy"]) for row in rows if float(row["size"]) == 0]
    assert found == pytest.approx([clean] * len(found))
    assert (tmp_path / "robustness.png").read_bytes()[:4] == b"\x89PNG"
