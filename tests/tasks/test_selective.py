"""The study of selective oscillators: its problems, its models, and what it writes."""

import json

import pytest
import torch

from tasks.studies import selective
from tests.models import slow


def test_targets_are_those_of_the_marked_samples():
    generator = torch.Generator().manual_seed(0)
    x, t, total = selective.adding(50, 20, generator)
    assert (x[..., 1].sum(1) == 2).all()
    torch.testing.assert_close((x[..., 0] * x[..., 1]).sum(1, keepdim=True), total)
    assert (t.diff() >= 0).all()
    x, t, kind = selective.tone(50, 200, generator)
    assert (x[..., 1].sum(1) == 40).all()
    waves = torch.exp(2j * torch.pi * selective.TONES[:, None, None] * t)  # (tones, 50, 200)
    power = (waves * x[..., 0] * x[..., 1]).sum(-1).abs()
    assert (power.argmax(0) == kind).float().mean() > 0.9


@pytest.mark.parametrize("problem", ["adding", *slow("tone")])
def test_all_models_train(problem, tmp_path):
    small = "--length 20 --size 6 --seconds 0.01 --tuning-seconds 0.01 --tuning-seeds 1 --test-size 8"
    selective.main(f"--problem {problem} {small} --out {tmp_path}".split())
    written = json.loads((tmp_path / f"{problem}.json").read_text())
    assert [run["model"] for run in written["runs"]] == list(selective.MODELS)
    assert all(run["curve"] and run["steps"] for run in written["runs"])
    assert (tmp_path / f"{problem}.png").exists()
