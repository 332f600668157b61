"""The tasks: presets, run folders, resuming, plotting."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

import hbnode
from tasks import _data, _run, _sweep, _train, image_classification, plot, point_cloud
from tasks._regularize import Regularized
from tests.models import MODELS, every_model
from tests.runs import read_metrics

ROOT = Path(__file__).parents[1]
QUICK = "--device cpu --subset 190 --test-subset 63 --batch-size 32 --small --tol 0.1".split()  # 6 batches an epoch
CLOUD = "--device cpu --tol 0.1".split()


def start(task, *options):
    command = [sys.executable, "-m", f"tasks.{task}", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


# Models and presets


def test_point_cloud_presets_have_the_papers_parameter_counts():
    """525, 567, 528, 568, 568 in the paper; the printed 528 counts a damping that SONODE does not have."""
    counts = [_run.count_parameters(point_cloud.Separator(model)) for model in MODELS]
    assert counts == [525, 567, 527, 568, 568]


def test_mnist_models_have_the_papers_parameter_counts():
    """Table 5: 85,315 85,462 86,179 85,931 85,235; see the README for the two that differ by one."""
    counts = [_run.count_parameters(image_classification.Classifier(model, "mnist")) for model in MODELS]
    assert counts == [85_316, 85_462, 86_179, 85_930, 85_235]


@pytest.mark.parametrize("small", [False, True])
def test_digits_models_are_of_about_equal_size(small):
    counts = [_run.count_parameters(image_classification.Classifier(m, "digits", small=small)) for m in MODELS]
    assert max(counts) < 1.06 * min(counts)


def test_cifar10_models_have_the_papers_parameter_counts():
    """All of Table 5's second row."""
    counts = [_run.count_parameters(image_classification.Classifier(model, "cifar10")) for model in MODELS]
    assert counts == [173_611, 172_452, 171_635, 172_916, 172_916]


def test_paper_presets():
    config = _run.parse(point_cloud.PointCloudConfig, point_cloud.PRESETS, "", ["--preset", "paper"])
    assert (config.tol, config.epochs, config.lr) == (1e-7, 300, 1e-2)
    assert config.batch_size == len(point_cloud.make_cloud(0)[0]) == 120
    solver = {"method": "dopri5", "gradient": "adjoint", "adjoint_options": {}}  # the full norm, as the authors ran it
    assert solver.items() <= config.ode_options().items()
    for dataset, tol, clip, schedule in (("mnist", 1e-4, 10.0, "constant"), ("cifar10", 1e-5, 1.0, "step")):
        argv = ["--preset", f"paper-{dataset}"]
        config = _run.parse(image_classification.ImageConfig, image_classification.PRESETS, "", argv)
        assert (config.dataset, config.batch_size, config.lr, config.epochs) == (dataset, 64, 1e-3, 40)
        assert (config.tol, config.clip, config.schedule) == (tol, clip, schedule)
        assert solver.items() <= config.ode_options().items()
    assert image_classification.Classifier("ghbnode", "cifar10").block.field.xi == 1.5


def test_options_override_the_preset():
    argv = ["--preset", "paper", "--tol", "1e-4", "--model", "sonode", "--animate"]
    config = _run.parse(point_cloud.PointCloudConfig, point_cloud.PRESETS, "", argv)
    assert (config.tol, config.adjoint_norm, config.model, config.animate) == (1e-4, "full", "sonode", True)
    assert config.ode_options()["adjoint_options"] == {}


def test_solvers():
    options = _run.Config().ode_options()
    assert (options["method"], options["gradient"]) == (None, None)
    options = _run.Config(solver="torchdiffeq").ode_options()
    assert (options["method"], options["gradient"]) == ("dopri5", "adjoint")
    assert options["adjoint_options"] == {"norm": "seminorm"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "resnet"], "invalid choice: 'resnet'"),
        (["--epochs", "0"], "--epochs must be positive, got 0"),
        (["--tol", "-1"], "--tol must not be negative"),
        (["--preset", "none"], "invalid choice: 'none'"),
        (["--dataset", "mnist", "--small"], "--small is for --dataset digits"),
        (["--regularize", "both"], "--regularize is for --model node and anode, got hbnode"),
        (["--curve", "--steps", "3"], "--curve varies the tolerance"),
        (["--seeds", "0"], "--seeds must be positive"),
        (["--model", "all", "--method", "nystrom4"], "nystrom4"),
    ],
)
def test_bad_options(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        _run.parse(image_classification.ImageConfig, image_classification.PRESETS, "", argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_task_list(capsys):
    from tasks.__main__ import main

    main()
    out = capsys.readouterr().out
    assert "tasks.image_classification" in out
    assert "tasks.point_cloud" in out


# Data


def test_digits():
    x, _ = _data.digits("train")
    test_x, test_y = _data.digits("test")
    assert x.shape == (1437, 1, 8, 8)
    assert test_x.shape == (360, 1, 8, 8)
    assert (x.min(), x.max()) == (0, 1)
    assert torch.bincount(test_y).min() >= 34  # stratified
    seen = {tuple(image.flatten().tolist()) for image in x}
    assert sum(tuple(image.flatten().tolist()) in seen for image in test_x) == 0


def idx_bytes(shape, data):
    return b"\x00\x00\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + bytes(data)


def write_mnist(folder, count=32):
    import gzip

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for prefix in ("train", "t10k"):
        pixels = torch.randint(256, (count * 784,), generator=generator).tolist()
        labels = torch.randint(10, (count,), generator=generator).tolist()
        images = gzip.compress(idx_bytes((count, 28, 28), pixels))
        (raw / f"{prefix}-images-idx3-ubyte.gz").write_bytes(images)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes((count,), labels))  # unzipped is fine too
    return raw


def test_mnist_is_read_from_the_data_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    x, y = _data.mnist("train")
    assert x.shape == (32, 1, 28, 28)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert 0 <= x.min() < x.max() <= 1


@pytest.mark.parametrize(
    "damage", ["truncate gzip", "flip a byte", "truncate data", "only a head", "not gzip", "not idx"]
)
def test_a_damaged_mnist_file_is_named(damage, tmp_path, monkeypatch):
    raw = write_mnist(tmp_path)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    images, labels = raw / "train-images-idx3-ubyte.gz", raw / "train-labels-idx1-ubyte"
    if damage == "truncate gzip":
        images.write_bytes(images.read_bytes()[:1000])
        name = images.name
    elif damage == "flip a byte":
        content = bytearray(images.read_bytes())
        content[len(content) // 2] ^= 255
        images.write_bytes(content)
        name = images.name
    elif damage == "only a head":
        labels.write_bytes(b"\x00\x00\x08\x03")
        name = labels.name
    elif damage == "not gzip":
        images.write_bytes(b"<html>404</html>")
        name = images.name
    elif damage == "truncate data":
        labels.write_bytes(labels.read_bytes()[:-3])
        name = labels.name
    else:
        labels.write_bytes(b"abcdefgh")
        name = labels.name
    with pytest.raises(ValueError, match=rf"{name}.*Fix: delete the file and download it again"):
        _data.mnist("train")


def test_the_real_mnist_when_it_is_there():
    root = os.environ.get("HBNODE_DATA")
    if not root or not (Path(root) / "MNIST" / "raw").is_dir():
        pytest.skip("MNIST is not in HBNODE_DATA")
    x, y = _data.mnist("test")
    assert x.shape == (10_000, 1, 28, 28)
    assert torch.bincount(y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert x.mean().item() == pytest.approx(0.1325, abs=1e-4)


def write_cifar(folder, count=4):
    """The official layout: five training batches and one for testing."""
    import pickle

    import numpy as np

    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels = np.full((count, 3072), index, np.uint8)
        pixels[:, 1024:2048] = 100  # green
        batch = {b"batch_label": b"x", b"labels": [index] * count, b"data": pixels, b"filenames": [b"a"] * count}
        (batches / name).write_bytes(pickle.dumps(batch, protocol=2))
    return batches


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_is_read_from_the_official_batches(packed, tmp_path, monkeypatch):
    batches = write_cifar(tmp_path)
    if packed:
        shutil.make_archive(str(tmp_path / "cifar-10-python"), "gztar", tmp_path, batches.name)
        shutil.rmtree(batches)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    x, y = _data.cifar10("train")
    assert x.shape == (20, 3, 32, 32)
    assert y.tolist() == [k for k in range(5) for _ in range(4)]
    torch.testing.assert_close(x[:, 1], torch.full((20, 32, 32), 100 / 255))
    torch.testing.assert_close(x[-1, 0], torch.full((32, 32), 4 / 255))
    assert _data.cifar10("test")[1].tolist() == [5] * 4


def test_cifar10_is_read_from_a_subset(tmp_path, monkeypatch):
    import numpy as np

    (tmp_path / "cifar10-subset").mkdir()
    images = np.arange(2 * 32 * 32 * 3, dtype=np.int64).astype(np.uint8).reshape(2, 32, 32, 3)
    labels = np.array([3, 9], np.uint8)
    path = tmp_path / "cifar10-subset" / "cifar10_subset.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    x, y = _data.cifar10("train")
    assert y.tolist() == [3, 9]
    torch.testing.assert_close(x[1, 2, 4, 5] * 255, torch.tensor(float(images[1, 4, 5, 2])))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cifar10_subset.npz cannot be read[\s\S]*Fix: get it anew"):
        _data.cifar10("train")


def test_a_pickle_that_would_run_something_is_refused(tmp_path, monkeypatch):
    batches = write_cifar(tmp_path)
    (batches / "test_batch").write_bytes(b"cposix\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"test_batch is no CIFAR-10 batch .*posix.system.*Fix: delete it"):
        _data.cifar10("test")
    assert not (tmp_path / "ran").exists()
    (batches / "data_batch_3").write_bytes(b"short")
    with pytest.raises(ValueError, match="data_batch_3 is no CIFAR-10 batch"):
        _data.cifar10("train")


def test_the_point_cloud_lies_where_the_paper_says():
    points, targets = point_cloud.make_cloud(0)
    radius = points.norm(dim=1)
    assert points.shape == (120, 2)
    assert radius[:40].max() < 0.5
    assert 0.85 < radius[40:].min() <= radius[40:].max() < 1
    assert targets[:40].eq(-1).all()
    assert targets[40:].eq(1).all()
    # uniform in the disc: the squared radius is uniform in [0, 1/4]
    many = torch.cat([point_cloud.make_cloud(seed)[0][:40].pow(2).sum(1) for seed in range(100)])
    assert many.mean().item() == pytest.approx(0.125, abs=0.004)


# Runs


@every_model
@pytest.mark.parametrize("solver", ["native", "torchdiffeq"])
def test_image_classification_learns_and_leaves_what_redraws_its_figure(model, solver, tmp_path, capsys):
    folder = tmp_path / model
    options = ["--model", model, "--epochs", "2", "--out", str(folder), "--lr", "5e-3", "--solver", solver]
    image_classification.main([*options, *QUICK])
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.csv",
        "summary.json",
        "checkpoint.pt",
        "examples.pt",
    }
    rows = read_metrics(folder)
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    for row in rows:
        forward, backward, ratio = (float(row[f"nfe_{name}"]) for name in ("forward", "backward", "ratio"))
        assert forward >= 3
        assert (backward > 0) >= (solver == "torchdiffeq")
        assert ratio == pytest.approx(backward / forward)
        assert float(row["loss_scale"]) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert {"torch", "device", "commit", "threads", "parameters", "loss_scale", "batch_size"} <= summary.keys()
    assert (summary["training_images"], summary["training_images_of_all"]) == (190, 1437)
    assert f"writing to {folder}" in capsys.readouterr().out


def test_all_models_and_seedsside_by_side(tmp_path, capsys):
    options = [*CLOUD, "--model", "all", "--seeds", "2", "--seed", "5", "--epochs", "2", "--out", str(tmp_path)]
    point_cloud.main(options)
    folders = {path.parent.name for path in tmp_path.rglob("summary.json")}
    assert folders == {f"{model}-seed{seed}" for model in MODELS for seed in (5, 6)}
    alone = tmp_path / "alone"
    point_cloud.main([*CLOUD, "--model", "sonode", "--seed", "6", "--epochs", "2", "--out", str(alone)])
    together = read_metrics(tmp_path / "sonode-seed6")
    for one, other in zip(read_metrics(alone), together, strict=True):  # another number of threads may round otherwise
        assert {k: float(v) for k, v in one.items()} == pytest.approx({k: float(v) for k, v in other.items()}, rel=1e-3)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    (tmp_path / "hbnode-seed0").write_text("in the way")
    process = start("point_cloud", *CLOUD, "--seeds", "2", "--epochs", "1", "--out", tmp_path)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "hbnode-seed0 is a file" in output
    assert "hbnode, seed 0: failed, as said above\n1 of 2 runs failed" in output
    assert (tmp_path / "hbnode-seed1" / "summary.json").exists()


def die_or_write(config):
    """A task whose first run is killed."""
    if config.seed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    Path(config.out).with_suffix(".txt").write_text(f"{config.model}, {config.jobs} at a time")


def test_a_run_that_is_killed_does_not_stop_the_others(tmp_path):
    config = _run.Config(model="node", seeds=3, jobs=1, out=str(tmp_path))
    with pytest.raises(SystemExit, match=r"node, seed 0: killed by signal 9\n1 of 3 runs failed"):
        _sweep.sweep(config, die_or_write)
    assert {path.name for path in tmp_path.iterdir()} == {"node-seed1.txt", "node-seed2.txt"}
    assert (tmp_path / "node-seed1.txt").read_text() == "node, 1 at a time"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_runs_save_themselves_and_no_more_start(number, tmp_path):
    process = start("point_cloud", *CLOUD, "--seeds", "4", "--jobs", "1", "--epochs", "100000", "--out", tmp_path)
    wait_for_metrics(process, tmp_path / "hbnode-seed0" / "metrics.csv")
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    assert "interrupted: the same command goes on" in output
    assert (tmp_path / "hbnode-seed0" / "checkpoint.pt").exists()
    assert not (tmp_path / "hbnode-seed1").exists()


def wait_for_metrics(process, path):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"no {path}: {process.communicate()[0]}")


def test_the_loss_scale_leaves_exact_gradients_alone_and_costs_the_adjoint_evaluations(tmp_path):
    rows = {}
    for solver in ("native", "torchdiffeq"):
        for scale in ("1", "1024"):
            folder = tmp_path / f"{solver}-{scale}"
            options = ["--device", "cpu", "--tol", "1e-3", "--epochs", "1", "--solver", solver, "--loss-scale", scale]
            point_cloud.main([*options, "--out", str(folder)])
            rows[solver, scale] = read_metrics(folder)[0]
    assert {**rows["native", "1024"], "loss_scale": "1.0"} == rows["native", "1"]
    assert float(rows["torchdiffeq", "1024"]["nfe_backward"]) > float(rows["torchdiffeq", "1"]["nfe_backward"])


def test_learning_rate_schedules():
    rates = {schedule: [_train._schedule(schedule, n, 4000) for n in (0, 1000, 2000)] for schedule in _run.SCHEDULES}
    assert rates["constant"] == [1, 1, 1]
    assert rates["cosine"] == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5])
    assert rates["step"] == pytest.approx([1, 0.95, 0.95**2])


@pytest.mark.parametrize("solver", [{"gradient": "direct"}, {}, {"method": "dopri5", "gradient": "adjoint"}])
def test_penalties_of_a_linear_field(solver):
    """h' = ah: the kinetic energy is a^2 h0^2 (e^2a - 1) / 2a, the Jacobian's penalty a^2 e^2 for the noise e."""
    linear = torch.nn.Linear(1, 1, bias=False).double()
    block = hbnode.ODEBlock(Regularized(hbnode.NODE(linear)), rtol=1e-9, atol=1e-9, **solver)
    x = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    h, kinetic, jacobian = block(x).unbind(1)
    a = linear.weight[0, 0]
    torch.testing.assert_close(h, x[:, 0] * a.exp())
    expected = a**2 * x[:, 0] ** 2 * ((2 * a).exp() - 1) / (2 * a)
    torch.testing.assert_close(kinetic, expected)
    noise = block.field.noise[:, 0]
    torch.testing.assert_close(jacobian, a**2 * noise**2)
    (found,) = torch.autograd.grad((kinetic + jacobian).sum(), linear.weight, retain_graph=True)
    (exact,) = torch.autograd.grad((expected + a**2 * noise**2).sum(), linear.weight)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    block.eval()
    torch.testing.assert_close(block(x)[:, 0], h)


def test_a_regularised_run(tmp_path):
    options = ["--model", "anode", "--regularize", "both", "--epochs", "1", "--out", str(tmp_path), *QUICK]
    image_classification.main(options)
    (row,) = read_metrics(tmp_path)
    loss, entropy, kinetic, jacobian = (
        float(row[f"train_{name}"]) for name in ("loss", "cross_entropy", "kinetic", "jacobian")
    )
    assert kinetic > 0
    assert jacobian > 0
    assert loss == pytest.approx(entropy + 0.01 * (kinetic + jacobian), rel=1e-5)
    config, model = image_classification.load_run(tmp_path)
    assert config.regularize == "both"
    with torch.no_grad():
        assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_trained_model_is_loaded_with_its_accuracy(tmp_path):
    image_classification.main(["--epochs", "1", "--out", str(tmp_path), *QUICK])
    config, model = image_classification.load_run(tmp_path)
    _, (x, y) = image_classification.load_data(config)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy == pytest.approx(float(read_metrics(tmp_path)[-1]["test_accuracy"]))
    (tmp_path / "summary.json").unlink()
    with pytest.raises(SystemExit, match="is no finished run"):
        image_classification.load_run(tmp_path)


def test_a_run_in_bfloat16(tmp_path):
    image_classification.main(["--epochs", "1", "--bfloat16", "--out", str(tmp_path), *QUICK])
    _, model = image_classification.load_run(tmp_path)
    seen = []
    model.block.field.func.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.no_grad():
        assert model(torch.rand(2, 1, 8, 8)).dtype == torch.float32
    assert set(seen) == {torch.bfloat16}


def test_the_tolerance_curve_is_measured_and_drawn(tmp_path, capsys):
    for seed in ("0", "1"):
        options = ["--epochs", "1", "--solver", "torchdiffeq", "--curve", "--seed", seed]
        image_classification.main([*options, "--out", str(tmp_path / seed), *QUICK])
    with (tmp_path / "0" / "tolerance.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tolerance"]) for row in rows] == pytest.approx([1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    assert int(rows[0]["backward"]) < int(rows[-1]["backward"])
    assert float(rows[0]["gradient_error"]) > float(rows[-1]["gradient_error"]) > 0
    plot.main([str(tmp_path)])
    name = "image_classification-default-digits-tolerance.png"
    assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert name in capsys.readouterr().out


def test_point_cloud_draws_its_evolution(tmp_path):
    for model in ("anode", "ghbnode"):
        options = [*CLOUD, "--model", model, "--epochs", "3", "--out", str(tmp_path / model)]
        point_cloud.main([*options, *(["--animate"] if model == "ghbnode" else [])])
        assert (tmp_path / model / "evolution.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "ghbnode" / "evolution.gif").read_bytes()[:3] == b"GIF"
    assert not list(tmp_path.rglob("*partial*"))


def wait_for_checkpoint(process, folder, position):
    """Until the checkpoint says that this many batches are done."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = folder / "checkpoint.pt"
        if path.exists() and torch.load(path, weights_only=True)["position"] >= position:
            return
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint at {position}: {process.communicate()[0]}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_to_the_same_numbers(number, tmp_path):
    """Killed within a run of thousands of batches, resumed to a few more, and compared with one that was not."""
    options = ["--model", "ghbnode", "--checkpoint-seconds", "0.1", *QUICK]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start("image_classification", *options, "--epochs", "1000", "--out", killed)
    wait_for_checkpoint(process, killed, position=8)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 1), output
    if number == signal.SIGINT:
        assert "the same command goes on from there" in output
    assert not (killed / "summary.json").exists()
    position = torch.load(killed / "checkpoint.pt", weights_only=True)["position"]
    assert position >= 8
    epochs = str(position // 6 + 2)
    image_classification.main([*options, "--epochs", epochs, "--out", str(killed)])
    image_classification.main([*options, "--epochs", epochs, "--out", str(whole)])
    assert read_metrics(killed) == read_metrics(whole)
    weights = [torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder in (killed, whole)]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=0)


def test_a_finished_run_can_be_trained_longer_to_the_same_numbers(tmp_path):
    options = [*CLOUD, "--model", "node", "--batch-size", "40"]
    point_cloud.main([*options, "--epochs", "4", "--out", str(tmp_path / "whole")])
    point_cloud.main([*options, "--epochs", "2", "--out", str(tmp_path / "parts")])
    point_cloud.main([*options, "--epochs", "4", "--out", str(tmp_path / "parts")])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")


def test_a_different_run_is_not_overwritten(tmp_path):
    options = [*CLOUD, "--epochs", "1", "--out", str(tmp_path)]
    point_cloud.main(["--model", "node", *options])
    before = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(SystemExit, match=r"holds a different run .*lr: 0.01 there, 0.5 wanted.*Fix: --out"):
        point_cloud.main(["--model", "node", "--lr", "0.5", *options])
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_a_cosine_schedule_cannot_be_extended(tmp_path):
    options = [*CLOUD, "--schedule", "cosine", "--out", str(tmp_path)]
    point_cloud.main(["--epochs", "1", *options])
    with pytest.raises(SystemExit, match="epochs: 1 there, 2 wanted"):
        point_cloud.main(["--epochs", "2", *options])


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    for model in ("node", "anode"):
        point_cloud.main([*CLOUD, "--model", model, "--epochs", "1", "--out", str(tmp_path / model)])
    (tmp_path / "anode" / "checkpoint.pt").replace(tmp_path / "node" / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"is a checkpoint of model_name='anode'; expected 'node'. Fix: --out"):
        point_cloud.main([*CLOUD, "--model", "node", "--epochs", "1", "--out", str(tmp_path / "node")])


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    options = [*CLOUD, "--model", "node", "--epochs", "1", "--out", str(tmp_path)]
    point_cloud.main(options)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    checkpoint["model"]["head.0.weight"] = torch.zeros(1, 7)
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"does not fit the model[\s\S]*size mismatch"):
        point_cloud.main(options)


def test_two_processes_under_torchrun(tmp_path):
    """Each takes half of every batch; on a fixed grid the training is that of one process, uneven parts included."""
    # 8 batches, the last of one point
    options = "--device cpu --epochs 3 --solver torchdiffeq --method rk4 --steps 3 --batch-size 17".split()
    point_cloud.main([*options, "--out", str(tmp_path / "one")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*torchrun, "-m", "tasks.point_cloud", *options, "--out", str(tmp_path / "two")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["processes"] == 2
    for a, b in zip(one, two, strict=True):
        for name, value in a.items():
            assert float(b[name]) == pytest.approx(float(value), rel=1e-4), name


def test_a_finished_run_is_left_alone(tmp_path, capsys):
    options = [*CLOUD, "--model", "node", "--out", str(tmp_path)]
    point_cloud.main([*options, "--epochs", "2"])
    before = {name: (tmp_path / name).read_bytes() for name in ("summary.json", "config.json", "metrics.csv")}
    point_cloud.main([*options, "--epochs", "2"])
    assert "is finished already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has 2 epochs behind it, more than --epochs 1"):
        point_cloud.main([*options, "--epochs", "1"])
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_a_run_that_goes_on_has_no_summary_until_it_is_finished(tmp_path):
    options = [*CLOUD, "--model", "node", "--out", str(tmp_path)]
    point_cloud.main([*options, "--epochs", "1"])
    run = _run.Run("point_cloud", _run.parse(point_cloud.PointCloudConfig, {}, "", [*options, "--epochs", "2"]), "")
    run.begin(1)
    assert not (tmp_path / "summary.json").exists()


def test_wrong_options_do_not_take_the_folder(tmp_path, capsys):
    for wrong, message in (
        (["--steps", "5", "--solver", "torchdiffeq"], "options has"),
        (["--method", "foo"], "unknown method 'foo'"),
        (["--method", "rk4"], "--method rk4 is not one of --solver native"),
        (["--method", "tsit5", "--solver", "torchdiffeq"], "Fix: --solver native"),
        (["--method", "rk4", "--solver", "torchdiffeq"], "say how fine with --steps"),
        (["--method", "nystrom4", "--model", "ghbnode"], "nystrom4"),
        (["--gradient", "reversible"], "reversible"),
        (["--tol", "1e-12"], "far below what torch.float32 carries"),
        (["--device", "abacus"], "abacus"),
        (["--clip", "-1"], "--clip must not be negative"),
        (["--loss-scale", "nan"], "--loss-scale is nan"),
        (["--seed", "99999999999999999999"], "--seed must be below"),
    ):
        with pytest.raises(SystemExit) as exit_:
            point_cloud.main([*wrong, "--epochs", "1", "--out", str(tmp_path / "run")])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    point_cloud.main([*CLOUD, "--epochs", "1", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("name", "content"),
    [("checkpoint.pt", b""), ("checkpoint.pt", b"PK\x03\x04 cut"), ("checkpoint.pt", b"text"), ("config.json", b"{")],
)
def test_a_damaged_run_is_named(name, content, tmp_path):
    options = [*CLOUD, "--epochs", "1", "--out", str(tmp_path)]
    point_cloud.main(options)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{name} cannot be read[\s\S]*Fix: delete its folder"):
        point_cloud.main(options)


def test_a_solve_that_fails_says_where_in_the_training(tmp_path):
    options = "--device cpu --model node --lr 1e6 --epochs 50 --batch-size 40".split()
    with pytest.raises(SystemExit, match=r"epoch \d+, batch \d: \w+Error: .*Fix: a smaller --lr"):
        point_cloud.main([*options, "--out", str(tmp_path)])


def test_a_run_without_git_is_finished_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    point_cloud.main([*CLOUD, "--epochs", "1", "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["commit"] == "unknown"


def test_plot_tells_runs_apart(tmp_path, capsys):
    for name, tolerance in (("a", "0.1"), ("b", "0.01")):
        point_cloud.main(["--device", "cpu", "--epochs", "1", "--tol", tolerance, "--out", str(tmp_path / name)])
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("[]")
    capsys.readouterr()
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert re.search(r"^HBNODE tol=0.1 +1 ", out, re.M)
    assert re.search(r"^HBNODE tol=0.01 +1 ", out, re.M)
    assert "solver native, batch_size 120" in out


def test_plot_prints_a_table_and_draws_a_figure_for_each_task(tmp_path, capsys):
    for seed in (0, 1):
        common = ["--epochs", "2", "--seed", str(seed), "--out"]
        image_classification.main([*QUICK, *common, str(tmp_path / f"images{seed}")])
        point_cloud.main([*CLOUD, "--model", "node", *common, str(tmp_path / f"cloud{seed}")])
    capsys.readouterr()
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert re.search(r"^ *HBNODE +2 ", out, re.M)
    assert "NFE forward" in out
    for name in ("image_classification-default-digits", "point_cloud-default"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    groups = plot.collect(tmp_path)
    assert [len(group.summaries) for group in groups] == [2, 2]
    values = [json.loads((tmp_path / f"images{seed}/summary.json").read_text())["test_accuracy"] for seed in (0, 1)]
    assert groups[0].mean("test_accuracy") == pytest.approx(sum(values) / 2)


def test_plot_says_evaluations_that_can_be_compared(tmp_path, capsys):
    """A ratio of backward to forward evaluations is printed of adjoints only, and penalties are no loss."""
    common = ["--epochs", "1", *QUICK]
    image_classification.main([*common, "--model", "node", "--out", str(tmp_path / "a")])
    image_classification.main([*common, "--model", "node", "--regularize", "both", "--out", str(tmp_path / "b")])
    image_classification.main([*common, "--model", "node", "--solver", "torchdiffeq", "--out", str(tmp_path / "c")])
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    capsys.readouterr()
    plot.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    header = re.split(r"  +", lines[1].strip())
    rows = [re.split(r"  +", line.strip()) for line in lines[3:6]]
    columns = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert columns["NODE solver=native regularize=none"]["ratio"] == "-"
    assert float(columns["NODE solver=torchdiffeq regularize=none"]["ratio"]) > 0
    entropy = float(columns["NODE solver=native regularize=both"]["train loss"])
    assert entropy == pytest.approx(summary["train_cross_entropy"], rel=1e-2)
    assert "test NFE" in header


def test_plot_warns_of_seconds_from_different_machines(tmp_path, caplog):
    for seed in ("0", "1"):
        point_cloud.main([*CLOUD, "--epochs", "1", "--seed", seed, "--out", str(tmp_path / seed)])
    path = tmp_path / "1" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 99}))
    plot.collect(tmp_path)
    assert "the seconds of HBNODE are means over different threads" in caplog.text


def test_artefacts_can_be_asked_for_afterwards(tmp_path):
    options = [*CLOUD, "--epochs", "1", "--out", str(tmp_path / "cloud")]
    point_cloud.main(options)
    point_cloud.main([*options, "--animate"])
    assert (tmp_path / "cloud" / "evolution.gif").exists()
    options = ["--epochs", "1", "--out", str(tmp_path / "images"), *QUICK]
    image_classification.main(options)
    image_classification.main([*options, "--curve"])
    assert (tmp_path / "images" / "tolerance.csv").exists()


def test_plot_of_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path)])
    assert "no finished run under" in capsys.readouterr().err


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _run.Config().lr = 1.0
