"""Every task, as small as it can be: it trains, is interrupted, resumes to the same numbers, and leaves its files."""

import importlib
import json
import math
import signal

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tasks import plane_vibration, silverbox, walker2d
from tasks.common.train import Trainer
from tasks.data import labelled_series, polyphonic, speech
from tasks.data import silverbox as silverbox_data
from tests.models import slow
from tests.tasks.small_runs import names_in, read_metrics

TRANSFORMER = "--d-model 8 --heads 2 --layers 1 --feedforward 8"
SEQUENCES = "--length 12 --hidden 5 --iterations 2 --batch-size 8 --test-size 10"
PIXELS = "--dataset digits --side 4 --train-size 24 --test-size 10 --batch-size 8 --hidden 6"
IMAGES = "--subset 64 --test-subset 31 --batch-size 32 --small --tol 0.1"
PATHS = "--length 10 --hidden 6 --batch-size 12 --test-size 30 --iterations 3"
VOICES = "--data generated --hidden 5 --batch-size 4"
RECORD = "--window 20 --past 5 --stride 50 --validation 120 --batch-size 8 --schedule constant"
SDE = "--schedule constant --train-size 8 --test-size 4 --batch-size 4 --hidden 4 --context 4 --paths 2"
TEXT = "--data generated --train-size 600 --test-size 100"
WORDS = "--embedding 6 --hidden 8 --bptt 12 --batch-size 5 --dropout 0.2 --weight-drop 0.3 --ar 0.1 --tar 0.1"
PAIRS = "--data generated --vocabulary 80 --train-size 60 --test-size 12 --batch-size 20 --max-words 0 --max-length 0"
PINWHEEL = "--iterations 2 --batch-size 8 --test-size 6 --hidden 4 --steps 2 --eval-samples 2 --final-samples 3"
# Of the fast tier, then of the slow one: those whose task is run above, or has tests that train, and cost most.
RUNS = f"""
adding --model adam --cell dtriv --schedule step {SEQUENCES}
bouncing_balls --model momentum {SEQUENCES}
classification --model gru --samples 4 --parameters 400 --batch-size 16
copying --model momentum {SEQUENCES}
image_classification {IMAGES}
image_generation --side 4 --train-size 24 --test-size 10 --batch-size 8 --drawn 3 {TRANSFORMER}
language_model {TEXT} {WORDS}
latent_sde --model kalman --dataset vibration --data generated --eval-samples 3 {SDE}
lra --min-length 5 --max-length 40 --train-size 60 --test-size 20 --iterations 3 --warmup 2 {TRANSFORMER}
pathological --problem addition --model dtriv {PATHS}
pixel_mnist --model adam --cell dtriv --rebase 2 --permuted {PIXELS}
point_cloud --tol 0.1
polyphonic_music --data generated --hidden 5 --length 20
recall --kind again --model heavy_ball --most 8 --iterations 2 --batch-size 4 --test-size 4 {TRANSFORMER}
silverbox --model hbnode {RECORD}
speech --model momentum {VOICES}
transformer_copy --length 12 --iterations 3 --batch-size 4 --test-size 6 {TRANSFORMER}
walker2d --model gru --windows 24 --batch-size 8 --ahead 3
"""
MORE_RUNS = f"""
density --model flow {PINWHEEL}
language_model --model transformer --connection deeper --context 10 --batch-size 8 {TEXT} {TRANSFORMER}
latent_sde --model hbsde --eval-samples 3 {SDE}
pathological --problem memorization_5 --model tanh --optimizer hf --max-cg 8 {PATHS}
pendulum --model port_hamiltonian --swings 8 --batch-size 4 --times 3 --hidden 4 --periods 2
plane_vibration --data generated --schedule constant --tol 0.1 --batch-size 2
translation --model adaptive --iterations 2 --schedule constant {PAIRS} {TRANSFORMER}
"""
DRAWING = "bouncing_balls density image_generation latent_sde pendulum plane_vibration point_cloud silverbox walker2d"


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """Little synthetic data where tasks look for theirs, and no other."""
    root = tmp_path / "data"
    (root / "walker").mkdir(parents=True)
    monkeypatch.setenv("HBNODE_DATA", str(root))
    random = np.random.default_rng(0)
    for number in range(8):
        path = random.normal(0, 0.1, (40, 17)).cumsum(0).astype(np.float32)
        np.save(root / "walker" / f"rollout_{number:03d}.npy", path)
    rows = "".join(f"{a!r},{b!r},\n" for a, b in random.normal(0, 0.1, (800, 2)).tolist())
    (root / "SNLS80mV.csv").write_text(f'"V1","V2",\n{rows}')
    monkeypatch.setattr(silverbox_data, "ROWS", 800)
    arrow = slice(20, 200)
    sets = {"train": slice(250, 650), "multisine": arrow, "arrow_no_extrapolation": arrow, "arrow_full": arrow}
    monkeypatch.setattr(silverbox, "SETS", sets)
    monkeypatch.setattr(walker2d, "LENGTH", 6)
    monkeypatch.setattr(plane_vibration, "WINDOW", 26)
    clinic, tones, chords, split = labelled_series.clinic, speech.tones, polyphonic.chords, plane_vibration.split_rows
    monkeypatch.setattr(labelled_series, "clinic", lambda count: clinic(40))
    monkeypatch.setattr(speech, "tones", lambda: tones((6, 3, 3)))
    monkeypatch.setattr(polyphonic, "chords", lambda: chords((4, 2, 2)))
    few = {name: rows[:4:2] for name, rows in split(73_728, "honest").items()}
    monkeypatch.setattr(plane_vibration, "split_rows", lambda *args: few)


@pytest.mark.parametrize("run", [*RUNS.strip().splitlines(), *slow(*MORE_RUNS.strip().splitlines())])
def test_a_task_trains_resumes_and_leaves_its_files(run, small_data, tmp_path, monkeypatch):
    task, *options = run.split()
    main = importlib.import_module(f"tasks.{task}").main
    command = [*options, "--device", "cpu", "--epochs", "2", "--out"]
    main([*command, str(tmp_path / "whole")])
    (summary,) = (tmp_path / "whole").rglob("summary.json")
    assert {"config.json", "metrics.csv", "summary.json", "checkpoint.pt"} <= names_in(summary.parent)
    assert (task in DRAWING.split()) <= any(summary.parent.glob("*.png"))
    rows = read_metrics(summary.parent)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())
    assert {"torch", "device", "commit", "parameters"} <= json.loads(summary.read_text()).keys()

    monkeypatch.setattr(Figure, "savefig", lambda *args, **options: None)  # figures take longer than the training
    step, done = Trainer.step, []

    def interrupted_step(trainer):
        done.append(step(trainer))
        if len(done) == 1:
            signal.raise_signal(signal.SIGINT)
        return done[-1]

    monkeypatch.setattr(Trainer, "step", interrupted_step)
    with pytest.raises(SystemExit, match="interrupted: saved to"):
        main([*command, str(tmp_path / "parts")])
    assert not list((tmp_path / "parts").rglob("summary.json"))
    main([*command, str(tmp_path / "parts")])
    (resumed,) = (tmp_path / "parts").rglob("summary.json")
    assert read_metrics(resumed.parent) == rows


def test_errors_of_the_silverbox_are_in_millivolts(small_data, tmp_path):
    silverbox.main([*f"--device cpu --epochs 1 {RECORD} --out".split(), str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    trained = silverbox.Simulator("hbnode", 5, rtol=1e-3, steps=1)
    trained.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"])
    volts = silverbox_data.read_silverbox()
    train = volts[silverbox.SETS["train"]][:-120, 1].double()
    records, _ = silverbox.split(volts, 120)
    simulated = silverbox.simulate(trained, records["multisine"], silverbox.SilverboxConfig(past=5)).double()
    errors = train.mean() + train.std() * simulated - volts[silverbox.SETS["multisine"]][50:, 1]
    assert summary["multisine_rmse_mV"] == pytest.approx(1000 * errors.square().mean().sqrt().item(), rel=1e-2)
