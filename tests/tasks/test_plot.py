"""Tables and figures of runs."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import image_classification, image_generation, lra, plot, point_cloud
from tasks.common.figures import legend_beside, line_style
from tasks.run_groups import collect, titles
from tasks.studies import momentum_ablation

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


def test_seconds_are_drawn_of_runs_that_had_the_machine_to_themselves(runs):
    folder = runs("cloud0", "tighter")
    assert "seconds" in plot._panels(plot.collect(folder))
    path = folder / "tighter" / "summary.json"
    summary = json.loads(path.read_text())
    for change in ({"runs_at_a_time": 2}, {"threads": 99}, {"runs_at_a_time": None}):
        path.write_text(json.dumps(summary | change))
        assert list(plot._panels(plot.collect(folder))) == ["train_loss", "nfe_forward"]


def test_a_single_epoch_is_seen_and_models_stand_beside_one_another(runs):
    folder = runs("cloud0", "cloud1", "tighter")
    for path in folder.rglob("metrics.csv"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    figure = plot.draw(plot.collect(folder), "title")
    for ax in figure.axes:
        lines = [line for line in ax.get_lines() if line.get_label().startswith("NODE")]
        positions = [line.get_xdata().tolist() for line in lines]
        assert len({x for (x,) in positions}) == len(lines) == 2
        assert all(0.5 < x < 1.5 for (x,) in positions)
        assert all(line.get_marker() not in ("", "None") for line in lines)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 > max(ax.get_window_extent().x1 for ax in figure.axes)
    plot.plt.close(figure)


@pytest.mark.parametrize(("count", "length"), [(2, 30), (5, 8), (5, 100), (1, 1), (10, 3)])
def test_equal_lines_can_be_told_apart(count, length):
    """No two have the same marker of the same size, and long lines have theirs at different points."""
    figure, ax = plot.plt.subplots()
    styles = [line_style(index, count, length) for index in range(count)]
    for style in styles:
        ax.plot(range(length), [1.0] * length, **style)
    figure.draw_without_rendering()
    plot.plt.close(figure)
    assert len({(style["marker"], style["markersize"]) for style in styles}) == count
    marked = [set(range(style["markevery"][0], length, style["markevery"][1])) for style in styles]
    assert all(marked)
    if length >= 2 * count:
        assert len(set.union(*marked)) == sum(map(len, marked))


def test_a_legend_names_each_line_once():
    figure, axes = plot.plt.subplots(1, 2, layout="constrained")
    for ax in axes:
        ax.plot([0, 1], label="a")
        ax.plot([1, 0], label="b")
    assert [text.get_text() for text in legend_beside(figure).get_texts()] == ["a", "b"]
    plot.plt.close(figure)


def test_the_colors_of_a_grid_are_a_scale(monkeypatch):
    figures = []
    monkeypatch.setattr(momentum_ablation, "write_figure", lambda figure, path: figures.append(figure))
    for task, exact in (("pixel_mnist", 100 - 37.39), ("speech", 121.07)):
        judged = momentum_ablation.TASKS[task]
        grid = momentum_ablation.of_authors(judged)
        missing = {pair: value for pair, value in grid.items() if pair != (0.0, 1.0)}
        momentum_ablation.draw_grids({"one": grid, "two": missing, "single": {(0.0, 1.0): 7.0}}, judged, Path("x.png"))
        images = [ax.images[0] for ax in figures[-1].axes if ax.images]
        assert images[0].norm.vmax == pytest.approx(exact)
        assert len(figures[-1].axes) == 6  # each with its scale
        figures[-1].draw_without_rendering()
        plot.plt.close(figures[-1])


def test_plot_of_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path)])
    assert "no finished run under" in capsys.readouterr().err


def test_every_family_of_models_has_names():
    assert titles({"model": "cfc"})["cfc"] == "CfC"
    assert titles({"model": "momentum", "cell": "rnn"})["momentum"] == "MomentumRNN"
    assert titles({"model": "momentum", "heads": 2})["momentum"] == "momentum"
    assert titles({"model": "transformer", "heads": 2, "connection": "heavy_ball"})["heavy_ball"] == "heavy ball"


def test_images_that_were_drawn_stand_below_the_curves(tmp_path, capsys):
    options = (
        "--device cpu --side 4 --train-size 8 --test-size 4 --d-model 4 --heads 2 --layers 1 --feedforward 4".split()
    )
    for model in ("softmax", "linear"):
        image_generation.main([*options, "--model", model, "--epochs", "1", "--out", str(tmp_path / model)])
    groups = collect(tmp_path)
    figure = plot.draw(groups, "title")
    figure.draw_without_rendering()
    rows = [ax.get_ylabel() for ax in figure.axes if ax.images and ax.get_ylabel()]
    assert rows == ["softmax", "linear"]
    drawn = torch.load(tmp_path / "linear" / "samples.pt", weights_only=True)[1]
    shown = [ax.images[0].get_array() for ax in figure.axes if ax.images][len(drawn) :]
    for image, pixels in zip(drawn, shown, strict=True):
        assert (pixels.flatten() * 16).tolist() == pytest.approx(image.tolist())
    plot.plt.close(figure)
    capsys.readouterr()
    plot.main([str(tmp_path)])
    assert "test bits per dim" in capsys.readouterr().out
    assert is_png(tmp_path / "image_generation-default-digits-4.png")


def test_what_guesses_reach_is_drawn_and_tabulated(tmp_path, capsys):
    options = "--device cpu --min-length 5 --max-length 20 --train-size 16 --test-size 8 --d-model 4 --layers 1".split()
    argv = [*options, "--epochs", "2", "--iterations", "2", "--warmup", "1", "--out", str(tmp_path / "run")]
    lra.main(argv)
    (group,) = collect(tmp_path)
    summary = group.summaries[0]
    figure = plot.draw([group], "title")
    loss, accuracy, *_ = figure.axes
    lines = {line.get_label(): line.get_ydata()[0] for line in accuracy.get_lines()}
    assert lines["majority class"] == summary["validation_majority_accuracy"]
    assert lines["first operator alone"] == summary["validation_root_accuracy"]
    assert [line.get_label() for line in loss.get_lines()] == ["momentum"]
    plot.plt.close(figure)
    header, _, row = plot.table([group]).splitlines()
    assert "majority accuracy %" in header
    assert f"{100 * summary['root_accuracy']:.1f}" in row
