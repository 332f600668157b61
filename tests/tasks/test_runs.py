"""Run folders: what is refused, what an interrupted, damaged or full one leaves, and sweeps; the processes are real."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tasks.common.run import PRELOADED, sweep
from tests.tasks.small_runs import PolynomialConfig, fail_or_write, polynomial, read_metrics, wait_for_position

ROOT = Path(__file__).parents[2]
FILES = ("checkpoint.pt", "config.json", "metrics.csv", "summary.json")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("polynomial") / "run"
    polynomial("--out", folder)
    return folder


@pytest.fixture
def finished(two_epochs, tmp_path):
    """The folder of a finished run of two epochs."""
    return Path(shutil.copytree(two_epochs, tmp_path / "run"))


# Refused


@pytest.mark.parametrize("lost", ["config.json", "checkpoint.pt"])
def test_results_without_their_run_are_not_overwritten(lost, finished):
    (finished / lost).unlink()
    before = contents(finished)
    with pytest.raises(SystemExit, match=r"holds .* but no .*\. Fix: --out another-folder"):
        polynomial("--epochs", "3", "--out", finished)
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lr 0.5", r"holds a different run \(lr: 0.1 there, 0.5 wanted\)\. Fix: --out another"),
        ("--epochs 1", r"has 2 epochs behind it, more than --epochs 1.*Fix: ask for more"),
    ],
)
def test_a_run_with_other_options_is_not_overwritten(options, message, finished):
    before = contents(finished)
    with pytest.raises(SystemExit, match=message):
        polynomial(*options.split(), "--out", finished)
    assert contents(finished) == before


def test_a_cosine_schedule_cannot_be_extended(tmp_path):
    polynomial("--schedule", "cosine", "--epochs", "1", "--out", tmp_path)
    with pytest.raises(SystemExit, match="epochs: 1 there, 2 wanted"):
        polynomial("--schedule", "cosine", "--epochs", "2", "--out", tmp_path)


def test_a_finished_run_is_left_alone_and_can_be_trained_longer_to_the_same_numbers(finished, tmp_path, monkeypatch):
    before = contents(finished)
    polynomial("--out", finished)
    assert contents(finished) == before
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    polynomial("--epochs", "4", "--out", finished)
    polynomial("--epochs", "4", "--out", tmp_path / "whole")
    assert read_metrics(finished) == read_metrics(tmp_path / "whole")


# Damaged, or on a full disk


@pytest.mark.parametrize(("name", "content"), [("checkpoint.pt", b"PK\x03\x04 cut"), ("config.json", b"{")])
def test_a_damaged_run_is_named(name, content, finished):
    (finished / name).write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{name} cannot be read[\s\S]*Fix: delete its folder"):
        polynomial("--out", finished)


@pytest.mark.parametrize("name", ["checkpoint.pt", "metrics.csv"])
def test_on_a_full_disk_the_run_ends_and_can_be_resumed(name, tmp_path):
    """Nothing is half written. If there are metrics, the first epoch's checkpoint was there before."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / f"{name}.partial{Path(name).suffix}").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="No space left on device"):
        polynomial("--epochs", "3", "--out", folder)
    assert set(contents(folder)) <= {"checkpoint.pt", "config.json"} - {name}
    polynomial("--epochs", "3", "--out", folder)
    polynomial("--epochs", "3", "--out", tmp_path / "whole")
    assert read_metrics(folder) == read_metrics(tmp_path / "whole")
    assert set(contents(folder)) == set(FILES)


# Processes


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_sweep_saves_what_goes_on_and_starts_no_more(number, tmp_path):
    """Also where SIGINT is ignored, as in what a shell starts in the background; the handlers are set back."""
    before = signal.signal(number, signal.SIG_IGN)
    folder = tmp_path / "line-seed0"

    def stop():
        wait_for_position(folder, 4, lambda: True)
        os.kill(os.getpid(), number)

    try:
        thread = threading.Thread(target=stop)
        thread.start()
        options = ["--seeds", "4", "--jobs", "1", "--checkpoint-seconds", "0.01", "--out", tmp_path]
        with pytest.raises(SystemExit, match="interrupted: the same command goes on with what is not finished"):
            polynomial(*options, "--epochs", "1000000")
        thread.join()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}
    assert set(contents(folder)) == {"checkpoint.pt", "config.json", "metrics.csv"}
    position = torch.load(folder / "checkpoint.pt", weights_only=True)["position"]
    assert len(read_metrics(folder)) == position // 3


# Sweeps


FORK = """
import importlib, os, signal, torch
for name in {PRELOADED}:
    importlib.import_module(name)
child = os.fork()
if child == 0:
    signal.alarm(30)
    torch.set_num_threads(2)
    torch.ones(10**6).sin()
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_what_runs_are_forked_from_has_no_threads_of_openmp():
    """A child would wait for them for ever in its first large operation on two threads or more."""
    code = FORK.replace("{PRELOADED}", repr(PRELOADED))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "2"}, check=True)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    config = PolynomialConfig(model="all", seeds=3, jobs=2, out=str(tmp_path))
    with pytest.raises(SystemExit) as end:
        sweep(config, fail_or_write)
    *lines, last = str(end.value).split("\n")
    models = PolynomialConfig.models
    killed = [f"{model}, seed 0: killed by signal 9" for model in models]
    assert sorted(lines) == sorted(killed + [f"{model}, seed 1: failed, as said above" for model in models])
    assert last == "6 of 9 runs failed"
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {f"{model}-seed2.txt": f"{model}, 2 at a time" for model in models}
