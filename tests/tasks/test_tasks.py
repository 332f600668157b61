"""Options, and the tasks of images and of a point cloud: sizes of models, presets, losses, and two processes."""

import json
import socket

import pytest
import torch

import hbnode
from tasks import image_classification, point_cloud
from tasks.__main__ import main as tasks_main
from tasks.common.run import count_parameters
from tasks.models.regularization import Regularized
from tests.models import MODELS
from tests.tasks.small_runs import read_metrics, start, train_a_share

# Models and options


@pytest.mark.parametrize(
    ("make", "counts"),
    [  # 528 for SONODE in the paper, which counts a damping that it does not have; 85,315 and 85,931 for two below
        (point_cloud.Separator, [525, 567, 527, 568, 568]),
        (lambda name: image_classification.Classifier(name, "mnist"), [85_316, 85_462, 86_179, 85_930, 85_235]),
    ],
    ids=["cloud", "mnist"],
)
def test_models_have_the_papers_parameter_counts(make, counts):
    assert [count_parameters(make(model)) for model in MODELS] == counts


def test_the_point_cloud_lies_where_the_paper_says():
    points, targets = point_cloud.make_cloud(0)
    radius = points.norm(dim=1)
    assert radius[:40].max() < 0.5
    assert 0.85 < radius[40:].min() <= radius[40:].max() < 1
    assert targets[:, 0].tolist() == [-1.0] * 40 + [1.0] * 80


# Penalties


@pytest.mark.parametrize("solver", [{}, {"method": "dopri5", "gradient": "adjoint"}])
def test_penalties_of_a_linear_field(solver):
    """h' = ah: the kinetic energy is a^2 h0^2 (e^2a - 1) / 2a, the Jacobian's penalty a^2 e^2 for the noise e."""
    linear = torch.nn.Linear(1, 1, bias=False).double()
    block = hbnode.ODEBlock(Regularized(hbnode.NODE(linear)), rtol=1e-9, atol=1e-9, **solver)
    x = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    found = block(x)
    a, h = linear.weight[0, 0], x[:, 0]
    kinetic, jacobian = a**2 * h**2 * ((2 * a).exp() - 1) / (2 * a), a**2 * block.field.noise[:, 0] ** 2
    expected = torch.stack([h * a.exp(), kinetic, jacobian], dim=1)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(part[:, 1:].sum(), linear.weight)[0] for part in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


# Runs


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, monkeypatch):
    """Each takes half of every batch; on a fixed grid the training is that of one process, uneven parts included."""
    monkeypatch.setattr(point_cloud, "draw_evolution", lambda *args: None)
    options = "--device cpu --epochs 2 --solver torchdiffeq --method rk4 --steps 3 --batch-size 17".split()
    point_cloud.main([*options, "--out", str(tmp_path / "one")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(train_a_share, rank, port, [*options, "--out", str(tmp_path / "two")]) for rank in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["processes"] == 2
    for a, b in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        for name, value in a.items():
            assert float(b[name]) == pytest.approx(float(value), rel=1e-4), name


@pytest.mark.slow
def test_a_solve_that_fails_says_where_in_the_training(tmp_path):
    options = "--device cpu --model node --lr 1e6 --epochs 50 --batch-size 40".split()
    with pytest.raises(SystemExit, match=r"epoch \d+, batch \d: \w+Error: .*Fix: a smaller --lr"):
        point_cloud.main([*options, "--out", str(tmp_path)])


def test_python_m_tasks_lists_runs_and_refuses(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tasks"])
    tasks_main()
    assert "python -m tasks.point_cloud" in capsys.readouterr().out
    for name, message in (("point_cloud", "0"), ("point_clouds", r"did you mean tasks\.point_cloud\?")):
        monkeypatch.setattr("sys.argv", ["tasks", name, "--help"])
        with pytest.raises(SystemExit, match=message):
            tasks_main()
