"""The tasks: presets, options, and runs of two of them."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

import hbnode
from tasks import image_classification, point_cloud
from tasks.common.config import SCHEDULES, ODEConfig, parse
from tasks.common.run import count_parameters
from tasks.common.train import _schedule
from tasks.models.regularization import Regularized
from tests.models import MODELS
from tests.tasks.small_runs import names_in, read_metrics, start, train_a_share

QUICK = "--device cpu --subset 95 --test-subset 31 --batch-size 32 --small --tol 0.1".split()
CLOUD = "--device cpu --tol 0.1".split()


# Models and presets


def test_point_cloud_presets_have_the_papers_parameter_counts():
    """525, 567, 528, 568, 568 in the paper; the printed 528 counts a damping that SONODE does not have."""
    counts = [count_parameters(point_cloud.Separator(model)) for model in MODELS]
    assert counts == [525, 567, 527, 568, 568]


def test_mnist_models_have_the_papers_parameter_counts():
    """Table 5: 85,315 85,462 86,179 85,931 85,235; see the README for the two that differ by one."""
    counts = [count_parameters(image_classification.Classifier(model, "mnist")) for model in MODELS]
    assert counts == [85_316, 85_462, 86_179, 85_930, 85_235]


@pytest.mark.parametrize("small", [False, True])
def test_digits_models_are_of_about_equal_size(small):
    counts = [count_parameters(image_classification.Classifier(m, "digits", small=small)) for m in MODELS]
    assert max(counts) < 1.06 * min(counts)


def test_cifar10_models_have_the_papers_parameter_counts():
    """All of Table 5's second row."""
    counts = [count_parameters(image_classification.Classifier(model, "cifar10")) for model in MODELS]
    assert counts == [173_611, 172_452, 171_635, 172_916, 172_916]


def test_paper_presets():
    config = parse(point_cloud.PointCloudConfig, point_cloud.PRESETS, "", ["--preset", "paper"])
    assert (config.tol, config.epochs, config.lr) == (1e-7, 300, 1e-2)
    assert config.batch_size == len(point_cloud.make_cloud(0)[0]) == 120
    solver = {"method": "dopri5", "gradient": "adjoint", "adjoint_options": {}}  # the full norm, as the authors ran it
    assert solver.items() <= config.ode_options().items()
    for dataset, tol, clip, schedule in (("mnist", 1e-4, 10.0, "constant"), ("cifar10", 1e-5, 1.0, "step")):
        argv = ["--preset", f"paper-{dataset}"]
        config = parse(image_classification.ImageConfig, image_classification.PRESETS, "", argv)
        assert (config.dataset, config.batch_size, config.lr, config.epochs) == (dataset, 64, 1e-3, 40)
        assert (config.tol, config.clip, config.schedule) == (tol, clip, schedule)
        assert solver.items() <= config.ode_options().items()
    assert image_classification.Classifier("ghbnode", "cifar10").block.field.xi == 1.5


def test_options_override_the_preset():
    argv = ["--preset", "paper", "--tol", "1e-4", "--model", "sonode", "--animate"]
    config = parse(point_cloud.PointCloudConfig, point_cloud.PRESETS, "", argv)
    assert (config.tol, config.adjoint_norm, config.model, config.animate) == (1e-4, "full", "sonode", True)
    assert config.ode_options()["adjoint_options"] == {}


def test_solvers():
    options = ODEConfig().ode_options()
    assert (options["method"], options["gradient"]) == (None, None)
    options = ODEConfig(solver="torchdiffeq").ode_options()
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
        parse(image_classification.ImageConfig, image_classification.PRESETS, "", argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_task_list(capsys):
    from tasks.__main__ import main

    main()
    out = capsys.readouterr().out
    assert "tasks.image_classification" in out
    assert "tasks.point_cloud" in out


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


@pytest.mark.parametrize(
    ("model", "solver"), [*((model, "native") for model in MODELS), ("anode", "torchdiffeq"), ("hbnode", "torchdiffeq")]
)
def test_image_classification_learns_and_leaves_what_redraws_its_figure(model, solver, tmp_path, capsys):
    folder = tmp_path / model
    options = ["--model", model, "--epochs", "2", "--out", str(folder), "--lr", "5e-3", "--solver", solver]
    image_classification.main([*options, *QUICK])
    names = {"config.json", "metrics.csv", "summary.json", "checkpoint.pt", "examples.pt"}
    assert names_in(folder) == names
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
    assert (summary["training_images"], summary["training_images_of_all"]) == (95, 1437)
    assert f"writing to {folder}" in capsys.readouterr().out


@pytest.fixture
def undrawn(monkeypatch):
    """Point clouds without figures, which take longer than a short training."""
    monkeypatch.setattr(point_cloud, "draw_evolution", lambda *args: None)


def test_the_loss_scale_leaves_exact_gradients_alone_and_costs_the_adjoint_evaluations(undrawn, tmp_path):
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
    rates = {schedule: [_schedule(schedule, n, 4000) for n in (0, 1000, 2000)] for schedule in SCHEDULES}
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


def test_penalties_are_of_a_state_of_one_tensor():
    with pytest.raises(TypeError, match=r"one tensor, got 2 of them\. Fix: a NODE or an ANODE"):
        hbnode.ODEBlock(Regularized(hbnode.HBNODE(torch.nn.Linear(1, 1))))(torch.ones(1, 1))


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


def test_point_cloud_draws_its_evolution(tmp_path, monkeypatch):
    monkeypatch.setattr(point_cloud, "FRAMES", 6)
    for model, options in (("anode", ["--animate"]), ("ghbnode", [])):  # in space and in the plane
        point_cloud.main([*CLOUD, "--model", model, "--epochs", "2", "--out", str(tmp_path / model), *options])
        assert (tmp_path / model / "evolution.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "anode" / "evolution.gif").read_bytes()[:3] == b"GIF"
    assert not list(tmp_path.rglob("*partial*"))
    drawn = []
    monkeypatch.setattr(point_cloud, "draw_evolution", lambda *args: drawn.append(args[-1]))
    for options in ([], ["--animate"]):  # which may be wanted later
        point_cloud.main([*CLOUD, "--model", "ghbnode", "--epochs", "2", "--out", str(tmp_path / "ghbnode"), *options])
    assert drawn == [True]


def test_the_curve_can_be_asked_for_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(image_classification, "CURVE_IMAGES", 2)
    options = ["--epochs", "1", "--out", str(tmp_path), *QUICK]
    image_classification.main(options)
    assert not (tmp_path / "tolerance.csv").exists()
    image_classification.main([*options, "--curve"])
    assert (tmp_path / "tolerance.csv").exists()


# 8 batches, the last of one point
UNEVEN = "--device cpu --epochs 3 --solver torchdiffeq --method rk4 --steps 3 --batch-size 17".split()


def assert_trained_as_one(one, two):
    assert json.loads((two / "summary.json").read_text())["processes"] == 2
    for a, b in zip(read_metrics(one), read_metrics(two), strict=True):
        for name, value in a.items():
            assert float(b[name]) == pytest.approx(float(value), rel=1e-4), name


def test_two_processes_train_as_one(undrawn, tmp_path):
    """Each takes half of every batch; on a fixed grid the training is that of one process, uneven parts included."""
    point_cloud.main([*UNEVEN, "--out", str(tmp_path / "one")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(train_a_share, rank, port, [*UNEVEN, "--out", str(tmp_path / "two")]) for rank in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert_trained_as_one(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_processes_under_torchrun(undrawn, tmp_path):
    point_cloud.main([*UNEVEN, "--out", str(tmp_path / "one")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*torchrun, "-m", "tasks.point_cloud", *UNEVEN, "--out", str(tmp_path / "two")],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert_trained_as_one(tmp_path / "one", tmp_path / "two")


def test_wrong_options_do_not_take_the_folder(tmp_path, capsys):
    for wrong, message in (
        (["--steps", "5", "--solver", "torchdiffeq"], "steps=5 is a fixed grid"),
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


def test_a_solve_that_fails_says_where_in_the_training(tmp_path):
    options = "--device cpu --model node --lr 1e6 --epochs 50 --batch-size 40".split()
    with pytest.raises(SystemExit, match=r"epoch \d+, batch \d: \w+Error: .*Fix: a smaller --lr"):
        point_cloud.main([*options, "--out", str(tmp_path)])


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ODEConfig().lr = 1.0
