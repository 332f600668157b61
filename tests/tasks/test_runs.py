"""Run folders: what is refused, what a killed, damaged or full one leaves, and sweeps; the processes are real."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")

from tasks.common import files
from tasks.common.run import PRELOADED, Run, sweep
from tests.tasks.small_runs import PolynomialConfig, fail_or_write, polynomial, read_metrics, start, wait_for_position

ROOT = Path(__file__).parents[2]
FILES = ("checkpoint.pt", "config.json", "metrics.csv", "summary.json")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("polynomial") / "run"
    polynomial("--out", folder)
    return folder


@pytest.fixture
def finished(two_epochs, tmp_path):
    """The folder of a finished run of two epochs."""
    return Path(shutil.copytree(two_epochs, tmp_path / "run"))


# What is refused


LEFT = [
    ("config.json",),
    ("checkpoint.pt",),
    ("metrics.csv",),
    ("summary.json",),
    ("checkpoint.pt", "config.json"),
    ("config.json", "metrics.csv", "summary.json"),
    ("checkpoint.pt", "metrics.csv", "summary.json"),
]


@pytest.mark.parametrize("left", LEFT, ids="-".join)
def test_whatever_is_left_of_a_run_is_not_overwritten_by_another(left, finished):
    for name in set(FILES) - set(left):
        (finished / name).unlink()
    before = contents(finished)
    with pytest.raises(SystemExit, match=r"(lr: 0.1 there|no (config.json|checkpoint.pt)).*Fix: --out another-folder"):
        polynomial("--lr", "0.5", "--out", finished)
    # nor by itself, if it could only begin anew; a lone configuration is of a run killed before its first checkpoint
    if left != ("config.json",) and not {"checkpoint.pt", "config.json"} <= set(left):
        with pytest.raises(SystemExit, match=r"holds .* but no (config.json|checkpoint.pt): .*Fix: --out another"):
            polynomial("--epochs", "3", "--out", finished)
        assert contents(finished) == before
    else:
        assert contents(finished) == before
        polynomial("--epochs", "3", "--out", finished)
        assert len(read_metrics(finished)) == 3


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "{}"), ("config.json", "[1]"), ("metrics.csv", "a,b\n"), ("weights.pt", "")]
)
def test_files_of_other_origin_are_not_overwritten(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    (tmp_path / "log.txt").write_text("begun")  # a shell's > run/log.txt is let be
    with pytest.raises(SystemExit, match=r"different run|holds no JSON object|but no config.json"):
        polynomial("--out", tmp_path)
    assert contents(tmp_path) == {name: content.encode(), "log.txt": b"begun"}
    (tmp_path / name).unlink()
    polynomial("--out", tmp_path)
    assert (tmp_path / "log.txt").read_text() == "begun"


def test_no_metrics_without_a_checkpoint(tmp_path):
    """Killed at any time, a run goes on: if there are metrics, the first epoch's checkpoint was there before."""
    (tmp_path / "metrics.csv.partial.csv").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=r"metrics.csv cannot be written"):
        polynomial("--out", tmp_path)
    assert set(contents(tmp_path)) == {"checkpoint.pt", "config.json"}
    polynomial("--out", tmp_path)
    assert len(read_metrics(tmp_path)) == 2


def test_a_cosine_schedule_cannot_be_extended(tmp_path):
    polynomial("--schedule", "cosine", "--epochs", "1", "--out", tmp_path)
    with pytest.raises(SystemExit, match="epochs: 1 there, 2 wanted"):
        polynomial("--schedule", "cosine", "--epochs", "2", "--out", tmp_path)


def test_a_finished_run_is_left_alone_and_can_be_trained_longer_to_the_same_numbers(
    finished, tmp_path, capsys, monkeypatch
):
    before = contents(finished)
    polynomial("--out", finished)
    assert "is finished already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has 2 epochs behind it, more than --epochs 1.*Fix: ask for more"):
        polynomial("--epochs", "1", "--out", finished)
    with pytest.raises(SystemExit, match="schedule: 'constant' there, 'cosine' wanted"):
        polynomial("--schedule", "cosine", "--epochs", "4", "--out", finished)
    assert contents(finished) == before
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    polynomial("--epochs", "4", "--out", finished)
    polynomial("--epochs", "4", "--out", tmp_path / "whole")
    assert read_metrics(finished) == read_metrics(tmp_path / "whole")
    assert json.loads((finished / "summary.json").read_text())["commit"] == "unknown"
    Run("polynomial", PolynomialConfig(device="cpu", epochs=5, out=str(finished)), "").begin(4)
    assert not (finished / "summary.json").exists()  # until it is finished again


# Damage


def test_a_checkpoint_that_does_not_fit_is_refused(finished, tmp_path):
    path = finished / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)  # it is an ordinary one to torch
    checkpoint["model"]["weight"] = torch.zeros(1, 7)
    torch.save(checkpoint, path)  # without a digest, as older ones are
    with pytest.raises(SystemExit, match=r"does not fit the model[\s\S]*size mismatch"):
        polynomial("--out", finished)
    polynomial("--model", "cubic", "--out", tmp_path / "other")
    (tmp_path / "other" / "checkpoint.pt").replace(path)
    with pytest.raises(SystemExit, match=r"is a checkpoint of model_name='cubic'; expected 'line'. Fix: --out"):
        polynomial("--out", finished)


@pytest.mark.parametrize(
    ("name", "content"), [("checkpoint.pt", b"PK\x03\x04 cut"), ("checkpoint.pt", b""), ("config.json", b"{")]
)
def test_a_damaged_run_is_named(name, content, finished):
    (finished / name).write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{name} cannot be read[\s\S]*Fix: delete its folder"):
        polynomial("--out", finished)


def test_every_flipped_byte_of_a_checkpoint_is_seen_or_changes_nothing(tmp_path):
    """torch verifies nothing, and the checksums of the zip archive do not cover its directory."""
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, {"task": "polynomial", "model_name": "line", "weights": torch.arange(5.0)})
    content, whole = path.read_bytes(), files.read_checkpoint(path, "polynomial", "line")
    mark = len(content) - 64 - len(files.SEAL)  # where the digest begins; before it is its length
    for index in range(len(content)):
        flipped = content[:index] + bytes([content[index] ^ 0xFF]) + content[index + 1 :]
        if mark - 2 <= index < mark + len(files.SEAL):
            path.write_bytes(flipped)
            with contextlib.suppress(SystemExit):
                assert equal(files.read_checkpoint(path, "polynomial", "line"), whole)
        else:
            with pytest.raises(ValueError, match="its bytes have changed"):
                files.verify(flipped)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


# Writing


@pytest.mark.parametrize("name", FILES)
def test_on_a_full_disk_the_run_ends_with_a_sentence_and_goes_on_later(name, finished, tmp_path):
    before = contents(finished)
    (finished / f"{name}.partial{Path(name).suffix}").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=rf"{name} cannot be written: No space left on device. Fix: make room"):
        polynomial("--epochs", "3", "--out", finished)
    after = contents(finished)
    assert set(after) <= set(FILES)  # nothing half written
    assert after.get(name, before[name]) == before[name]
    polynomial("--epochs", "3", "--out", finished)
    polynomial("--epochs", "3", "--out", tmp_path / "whole")
    assert read_metrics(finished) == read_metrics(tmp_path / "whole")
    assert set(contents(finished)) == set(FILES)


@pytest.mark.parametrize("folder", ["/proc/run", "{file}/run", "{tmp}/locked/run"])
def test_a_folder_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    if "locked" in folder and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("root may write everywhere")
    folder = folder.format(file=tmp_path / "file", tmp=tmp_path)
    with pytest.raises(SystemExit, match=rf"{folder} cannot be written: .*Fix: make room or allow it"):
        polynomial("--out", folder)


# Processes


def test_two_processes_on_one_folder_and_a_killed_one_that_is_resumed_to_the_same_numbers(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = ["--model", "cubic", "--checkpoint-seconds", "0.01", "--out"]
    process = start(polynomial, *options, killed, "--epochs", "100000")
    try:
        wait_for_position(killed, 8, process.is_alive)
        with pytest.raises(SystemExit, match=rf"another process is writing to {killed}. Fix: wait"):
            polynomial(*options, killed, "--epochs", "100000")
        assert process.is_alive()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    position = torch.load(killed / "checkpoint.pt", weights_only=True)["position"]
    for folder in (killed, whole):  # the lock ended with the process
        polynomial(*options, folder, "--epochs", str(position // 3 + 2))
    assert read_metrics(killed) == read_metrics(whole)
    assert equal(*(torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (killed, whole)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


def test_interrupted_before_the_training_it_ends_with_a_sentence():
    def read_data(config):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit, match="interrupted: the same command goes on"):
        sweep(PolynomialConfig(), read_data)


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


def test_all_models_and_seeds_side_by_side(tmp_path):
    polynomial("--model", "line,cubic", "--seeds", "2", "--seed", "5", "--epochs", "1", "--out", tmp_path)
    folders = {path.parent.name for path in tmp_path.rglob("summary.json")}
    assert folders == {f"{model}-seed{seed}" for model in ("line", "cubic") for seed in (5, 6)}
    polynomial("--model", "cubic", "--seed", "6", "--epochs", "1", "--out", tmp_path / "alone")
    rows = [read_metrics(folder)[0] for folder in (tmp_path / "alone", tmp_path / "cubic-seed6")]
    one, other = ({name: float(value) for name, value in row.items()} for row in rows)
    assert one == pytest.approx(other, rel=1e-4)  # threads may round otherwise
