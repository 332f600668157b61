"""Tables and figures of runs."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import image_classification, plot, point_cloud

QUICK = "--device cpu --epochs 2 --subset 32 --test-subset 21 --batch-size 32 --small --tol 0.1".split()
CLOUD = "--device cpu --epochs 2 --model node".split()
RUNS = {
    "images0": (image_classification, QUICK),
    "images1": (image_classification, [*QUICK, "--seed", "1"]),
    "plain": (image_classification, [*QUICK, "--model", "node"]),
    "regularised": (image_classification, [*QUICK, "--model", "node", "--regularize", "both"]),
    "adjoint": (image_classification, [*QUICK, "--model", "node", "--solver", "torchdiffeq"]),
    "curve0": (image_classification, [*QUICK, "--model", "anode", "--solver", "torchdiffeq", "--curve"]),
    "curve1": (image_classification, [*QUICK, "--model", "anode", "--solver", "torchdiffeq", "--curve", "--seed", "1"]),
    "cloud0": (point_cloud, [*CLOUD, "--tol", "0.1"]),
    "cloud1": (point_cloud, [*CLOUD, "--tol", "0.1", "--seed", "1"]),
    "tighter": (point_cloud, [*CLOUD, "--tol", "0.01"]),
}


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_classification, "CURVE_IMAGES", 2)
        patch.setattr(point_cloud, "draw_evolution", lambda *args: None)
        for name, (task, options) in RUNS.items():
            task.main([*options, "--out", str(folder / name)])
    return folder


@pytest.fixture
def runs(all_runs, tmp_path, capsys):
    """Puts some of the runs into a folder of the test's own."""
    capsys.readouterr()

    def put(*names):
        for name in names:
            shutil.copytree(all_runs / name, tmp_path / name)
        return tmp_path

    return put


def is_png(path):
    return Path(path).read_bytes()[:4] == b"\x89PNG"


def test_plot_prints_a_table_and_draws_a_figure_for_each_task(runs, capsys):
    folder = runs("images0", "images1", "cloud0", "cloud1")
    plot.main([str(folder)])
    out = capsys.readouterr().out
    assert re.search(r"^ *HBNODE +2 ", out, re.M)
    assert "NFE forward" in out
    for name in ("image_classification-default-digits", "point_cloud-default"):
        assert is_png(folder / f"{name}.png")
    groups = plot.collect(folder)
    assert [len(group.summaries) for group in groups] == [2, 2]
    values = [json.loads((folder / f"images{seed}/summary.json").read_text())["test_accuracy"] for seed in (0, 1)]
    assert groups[0].mean("test_accuracy") == pytest.approx(sum(values) / 2)


def test_plot_tells_runs_apart(runs, capsys):
    folder = runs("cloud0", "tighter")
    shutil.copytree(folder / "cloud0", folder / "copy")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text("[]")
    plot.main([str(folder)])
    out = capsys.readouterr().out
    assert re.search(r"^NODE tol=0.1 +1 ", out, re.M)
    assert re.search(r"^NODE tol=0.01 +1 ", out, re.M)
    assert "solver native, batch_size 120" in out


def test_plot_says_evaluations_that_can_be_compared(runs, capsys):
    """A ratio of backward to forward evaluations is printed of adjoints only, and penalties are no loss."""
    folder = runs("plain", "regularised", "adjoint")
    plot.main([str(folder)])
    lines = capsys.readouterr().out.splitlines()
    header = re.split(r"  +", lines[1].strip())
    rows = [re.split(r"  +", line.strip()) for line in lines[3:6]]
    columns = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert columns["NODE solver=native regularize=none"]["ratio"] == "-"
    assert float(columns["NODE solver=torchdiffeq regularize=none"]["ratio"]) > 0
    entropy = float(columns["NODE solver=native regularize=both"]["train loss"])
    summary = json.loads((folder / "regularised" / "summary.json").read_text())
    assert entropy == pytest.approx(summary["train_cross_entropy"], rel=1e-2)
    assert "test NFE" in header


def test_the_tolerance_curve_is_measured_and_drawn(runs, capsys):
    folder = runs("curve0", "curve1")
    with (folder / "curve0" / "tolerance.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tolerance"]) for row in rows] == pytest.approx([1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    assert int(rows[0]["backward"]) < int(rows[-1]["backward"])
    assert float(rows[0]["gradient_error"]) > float(rows[-1]["gradient_error"]) > 0
    plot.main([str(folder)])
    name = "image_classification-default-digits-tolerance.png"
    assert is_png(folder / name)
    assert name in capsys.readouterr().out


def test_plot_warns_of_seconds_from_different_machines(runs, caplog):
    folder = runs("cloud0", "cloud1")
    path = folder / "cloud1" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 99}))
    plot.collect(folder)
    assert "the seconds of NODE are means over different threads" in caplog.text


def test_plot_of_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path)])
    assert "no finished run under" in capsys.readouterr().err
