"""Tables and figures of runs, from run folders written as the tasks leave them."""

import csv
import dataclasses
import importlib
import json
import re

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import plot
from tasks.common.config import TaskConfig
from tasks.common.figures import line_style
from tasks.copying import CopyingConfig
from tasks.image_classification import ImageConfig
from tasks.lra import LRAConfig
from tasks.plane_vibration import PlaneVibrationConfig
from tasks.point_cloud import PointCloudConfig
from tasks.run_groups import EXPERIMENTS, collect

MACHINE = {"device": "cpu", "threads": 1, "runs_at_a_time": 1}
NFE = {"nfe_forward": 8.0, "nfe_backward": 4.0, "nfe_ratio": 0.5}
EPOCHS = (1.0, 0.5)


def write_run(folder, config, names, changes=(), **summary):
    """A run whose columns of these names are 1, then 0.5."""
    folder.mkdir(parents=True)
    task = type(config).__module__.rpartition(".")[2]
    rows = [{"epoch": i, **dict.fromkeys(names, v), **NFE, "seconds": 2.0} for i, v in enumerate(EPOCHS, 1)]
    if config.model not in ImageConfig.models:
        rows = [row | dict.fromkeys(NFE, 0.0) for row in rows]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    costs = {"parameters": 10, "seconds_per_epoch": 2.0, "nfe_forward_mean": 8.0, "nfe_backward_mean": 4.0}
    described = {"task": task, **dataclasses.asdict(config), **dict(changes)}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "summary.json").write_text(json.dumps({**rows[-1], **costs, **MACHINE, **summary}))


def write_images(folder, *, accuracy=0.5, options=(), **summary):
    config = ImageConfig(**dict(options))
    names = ("train_loss", "test_loss", "test_accuracy", "test_nfe")
    write_run(folder, config, names, test_accuracy=accuracy, **summary)


def write_cloud(folder, **options):
    write_run(folder, PointCloudConfig(model="node", **options), ("train_loss", "train_accuracy"), separates=True)


def write_vibration(folder, model, *, mse=0.5, **options):
    names = ("train_forecast_mse", "validation_forecast_mse", "validation_nfe")
    write_run(folder, PlaneVibrationConfig(model=model, **options), names, test_forecast_mse=mse)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_table(text):
    """The lines of the first table, by their first cell."""
    _, header, _, *rest = text.splitlines()
    columns, *lines = (re.split(r"  +", line.strip()) for line in (header, *rest))
    return {cells[0]: dict(zip(columns, cells, strict=True)) for cells in lines if len(cells) == len(columns)}


def test_a_table_and_a_figure_for_each_task(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path)])
    assert "no finished run under" in capsys.readouterr().err
    for seed, accuracy in ((0, 0.25), (1, 0.75)):
        write_images(tmp_path / f"images{seed}", accuracy=accuracy, options={"seed": seed})
        write_cloud(tmp_path / f"cloud{seed}", seed=seed)
        rows = "".join(f"{10.0**-k},{k},{k},0.1,{0.1**k}\n" for k in range(1, 4))
        head = "tolerance,forward,backward,error,gradient_error\n"
        (tmp_path / f"images{seed}" / "tolerance.csv").write_text(head + rows)
    plot.main([str(tmp_path)])
    line = read_table(capsys.readouterr().out)["HBNODE"]
    assert (line["seeds"], line["test accuracy %"], line["NFE forward"]) == ("2", "50.0 [25.0, 75.0]", "8.0")
    for name in ("image_classification-default-digits", "image_classification-default-digits-tolerance"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "point_cloud-default.png").read_bytes()[:4] == b"\x89PNG"
    assert [len(group.summaries) for group in collect(tmp_path)] == [2, 2]


def test_runs_are_told_apart_by_their_options(tmp_path, capsys):
    for name, tol in (("loose", 0.1), ("tight", 0.01), ("again", 0.1)):
        write_cloud(tmp_path / name, tol=tol)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("[]")
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert {name: line["seeds"] for name, line in read_table(out).items()} == {
        "NODE tol=0.01": "1",
        "NODE tol=0.1": "1",
    }
    assert "solver native, batch_size 120" in out
    for protocol in ("paper", "honest"):
        write_vibration(tmp_path / protocol, "gru", protocol=protocol, data="f16", mse=None)
    names = [group.experiment for group in collect(tmp_path)][:2]
    assert names == ["plane_vibration-default-f16-honest", "plane_vibration-default-f16-paper"]
    assert "diverged" in plot.table(collect(tmp_path)[:1])


def test_evaluations_are_compared_where_they_can_be(tmp_path, capsys):
    """A ratio of backward to forward evaluations is printed of adjoints only, and penalties are no loss."""
    for name, options in (("plain", {}), ("penalties", {"regularize": "both"}), ("adjoint", {"solver": "torchdiffeq"})):
        write_images(tmp_path / name, options={"model": "node", **options})
    edit(tmp_path / "penalties" / "summary.json", train_cross_entropy=0.125)
    plot.main([str(tmp_path)])
    lines = read_table(capsys.readouterr().out)
    assert lines["NODE solver=native regularize=none"]["ratio"] == "-"
    assert lines["NODE solver=torchdiffeq regularize=none"]["ratio"] == "0.50"
    assert lines["NODE solver=native regularize=both"]["train loss"] == "0.125"
    assert lines["NODE solver=native regularize=none"]["train loss"] == "0.5"


def test_baselines_stand_beside_models_without_evaluations(tmp_path, capsys):
    for seed, mse in ((0, 0.1), (1, 0.4)):
        for model in ("gru", "node", "lstm"):
            write_vibration(tmp_path / f"{model}{seed}", model, seed=seed, mse=mse)
    plot.main([str(tmp_path)])
    lines = read_table(capsys.readouterr().out)
    assert list(lines) == ["NODE", "LSTM", "GRU"]
    assert lines["GRU"]["test forecast mse"] == "0.25 [0.1, 0.4]"
    for name in ("NFE forward", "backward", "ratio", "validation NFE"):
        assert [lines[model][name] for model in ("LSTM", "GRU")] == ["-", "-"]
    figure = plot.draw(collect(tmp_path), "")
    drawn = {ax.get_ylabel(): [line.get_label() for line in ax.get_lines()] for ax in figure.axes}
    assert drawn.pop("forward evaluations per batch") == ["NODE"]
    assert drawn.pop("evaluations repeated in the backward pass") == ["NODE"]
    assert list(drawn) == ["train forecast mse", "validation forecast mse", "seconds per epoch"]
    assert all(names == ["NODE", "LSTM", "GRU"] for names in drawn.values())
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear", "linear", "linear"]
    plot.plt.close(figure)


def test_seconds_are_of_runs_that_had_the_machine_to_themselves(tmp_path, caplog):
    write_cloud(tmp_path / "0")
    write_cloud(tmp_path / "1", tol=0.5)
    for change, is_drawn in (({}, True), ({"runs_at_a_time": 2}, False), ({"threads": 99}, False)):
        edit(tmp_path / "1" / "summary.json", **{**MACHINE, **change})
        assert ("seconds" in plot._panels(collect(tmp_path))) == is_drawn
    write_cloud(tmp_path / "2", seed=1)
    edit(tmp_path / "2" / "summary.json", threads=99)
    collect(tmp_path)
    assert "the seconds of NODE are means over different threads" in caplog.text


def test_a_single_epoch_is_seen_and_models_stand_beside_one_another(tmp_path):
    for name, options in (("0", {}), ("1", {"seed": 1}), ("2", {"tol": 0.5})):
        write_cloud(tmp_path / name, **options)
        path = tmp_path / name / "metrics.csv"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    figure = plot.draw(collect(tmp_path), "title")
    for ax in figure.axes:
        lines = [line for line in ax.get_lines() if line.get_label().startswith("NODE")]
        positions = [line.get_xdata().tolist() for line in lines]
        assert len({x for (x,) in positions}) == len(lines) == 2
        assert all(0.5 < x < 1.5 for (x,) in positions)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 > max(ax.get_window_extent().x1 for ax in figure.axes)
    plot.plt.close(figure)


@pytest.mark.parametrize(("count", "length"), [(2, 30), (5, 8), (5, 100), (1, 1), (10, 3)])
def test_equal_lines_can_be_told_apart(count, length):
    """No two have the same marker of the same size, and long lines have theirs at different points."""
    styles = [line_style(index, count, length) for index in range(count)]
    assert len({(style["marker"], style["markersize"]) for style in styles}) == count
    marked = [set(range(style["markevery"][0], length, style["markevery"][1])) for style in styles]
    assert all(marked)
    if length >= 2 * count:
        assert len(set.union(*marked)) == sum(map(len, marked))


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_every_model_of_a_task_has_a_title(task):
    module = importlib.import_module(f"tasks.{task}")
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, TaskConfig) and kind.__module__ == module.__name__
    ]
    assert kinds
    for kind in kinds:
        titles = EXPERIMENTS[task][1]
        titles = titles(dataclasses.asdict(kind())) if callable(titles) else titles
        assert set(kind.models) - {"transformer"} <= titles.keys()


def test_what_guesses_reach_is_drawn_and_tabulated(tmp_path):
    guesses = {"majority_accuracy": 0.125, "root_accuracy": 0.25}
    drawn = {f"validation_{name}": value + 0.1 for name, value in guesses.items()}
    write_run(tmp_path / "a", LRAConfig(model="momentum"), ("train_loss", "validation_accuracy"), **guesses, **drawn)
    copies = CopyingConfig(model="plain", length=12)
    write_run(tmp_path / "b", copies, ("train_loss", "test_loss"), trivial_loss=0.65)
    copying, arena = collect(tmp_path)
    figure = plot.draw([arena], "title")
    loss, accuracy, *_ = figure.axes
    lines = {line.get_label(): line.get_ydata()[0] for line in accuracy.get_lines()}
    assert (lines["majority class"], lines["first operator alone"]) == (0.225, 0.35)
    assert [line.get_label() for line in loss.get_lines()] == ["momentum"]
    plot.plt.close(figure)
    header, _, row = (re.split(r"  +", line) for line in plot.table([arena]).splitlines())
    cells = dict(zip(header, row, strict=True))
    assert (cells["majority accuracy %"], cells["root accuracy %"]) == ("12.5", "25.0")
    figure = plot.draw([copying], "title")
    assert [(ax.get_ylabel(), ax.get_yscale()) for ax in figure.axes] == [
        ("train loss", "log"),
        ("test loss", "log"),
        ("seconds per epoch", "linear"),
    ]
    (trivial,) = [line for line in figure.axes[1].lines if line.get_label() == "no memory"]
    assert trivial.get_ydata()[0] == 0.65
    plot.plt.close(figure)
