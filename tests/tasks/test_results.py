"""Results: runs and studies become rows, rows become tables and figures, and no number of a page is typed by hand."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks import readers, result_tables, results, walker2d
from tasks.common import run as task_run
from tasks.experiments import COMMANDS, Command
from tasks.result_tables import lookup, read_results, substitute, tables, write_results
from tasks.rows import COLUMNS, read_csv, renamed, runs, study, write_rows
from tasks.studies import shallow_rows

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))
NAMES = list(dict.fromkeys(key.partition("/")[0] for key in COMMANDS))
NUMBER = re.compile(r"(?<![\w-])\d")
MACHINE = {"torch": "2.13", "device": "a processor", "threads": 1, "commit": "abc"}


def row(**values):
    return dict.fromkeys(COLUMNS, "") | values


def write_run(folder, *, epochs=2, done=2.0, options=(), **summary):
    """The files of a run of two epochs, which has finished if it has a summary."""
    folder.mkdir(parents=True)
    config = {"task": "x", "model": "hbnode", "dataset": "y", "seed": 0, "epochs": epochs, "solver": "native"}
    config |= {"method": "", "tol": 1e-3, "gradient": "", "steps": 0} | dict(options)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.csv").write_text(f"epoch,test_loss,nfe_forward,seconds\n1.0,1,8,2\n{done},0.5,9,3\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps({"epoch": done, "parameters": 10} | MACHINE | summary))


# The pages


def test_no_measured_number_is_typed_by_hand():
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        typed = [line for line in lines if line.lstrip().startswith("|") and NUMBER.search(line)]
        assert not typed, (
            f"{page.name} has a table with numbers. Fix: collect them into docs/results, include the table"
        )
    for claim in read_csv(DOCS / "results" / "claims.csv"):
        assert not NUMBER.search(result_tables.REFERENCE.sub("", claim["measured"])), claim["claim"]
        assert re.match(r"(yes|partly|no|not|early)\b", claim["verdict"])
        assert not claim["page"] or (DOCS / "results" / f"{claim['page']}.md").exists()


def test_pages_include_every_table_and_every_reference_is_found(tmp_path):
    written = {path.name for path in write_results(DOCS / "results", tmp_path)}
    files = read_results(DOCS / "results")
    assert all(set(rows[0]) == set(COLUMNS) for rows in files.values())
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    included = set(re.findall(r"\.\./_results/([^)\n]+?)(?:\n|\))", "\n".join(texts)))
    assert not included - written
    assert not {name for name in written - included if not name.startswith("recurrent-cost")}  # on the page Benchmarks
    for text in texts:
        assert not result_tables.REFERENCE.search(substitute(text, files))
    assert {page.stem for page in PAGES} >= set(NAMES)


def test_a_table_shows_its_file(tmp_path):
    of_seeds = {"table": "t", "model": "hbnode", "metric": "test_accuracy", "origin": "abc", "parameters": "1234"}
    facts = [row(**of_seeds, seed=str(i), value=value) for i, value in enumerate(("0.964", "0.95", "0.97"))]
    facts += [row(table="t", model="gru", metric="seconds", value="2512", statistic="unfinished", seed="1")]
    write_rows(tmp_path / "one.csv", facts)
    text = tables("one", read_csv(tmp_path / "one.csv"))["t"]
    for part in ("| HBNODE | 96.4 [95, 97] |", "seeds 3", "origin abc", "*Not finished:* gru, seed 1"):
        assert part in text
    assert result_tables.cell([row(metric="solved", value="1"), row(metric="solved", value="0")]) == "1 of 2"
    wide = result_tables.grid([row(model="gru", metric=f"m{k}", value=str(k)) for k in range(9)])
    assert wide == [["", "GRU"], *([f"m{k}", str(k)] for k in range(9))]


def test_references():
    facts = [
        row(table="a", model="gru", metric="loss", statistic=name, value=value)
        for name, value in (("median", "0.5"), ("min", "0.25"), ("max", "54062"))
    ]
    files = {"one": facts, "two": [*facts, row(table="b", model="gru", metric="loss", value="1")]}
    assert substitute("x {one: gru; loss}, {one.a: gru; loss; range}", files) == "x 0.5, 0.25–54,062"
    assert lookup(files, "two", "b", "gru; loss") == "1"
    runs_of = [row(table="a", model="gru", metric="separates", seed=str(i), value=v) for i, v in enumerate("1011")]
    assert lookup({"cloud": runs_of}, "cloud", "a", "gru; separates") == "75"
    for wrong, said in (
        ("{one: gru; error}", "nothing found"),
        ("{two: gru; loss}", "in tables"),
    ):
        with pytest.raises(ValueError, match=said):
            substitute(wrong, files)


# Rows


def test_runs_become_rows_and_replace_transcribed_ones(tmp_path, monkeypatch):
    command = Command(1, "x --seeds 2", runs("test_loss", "seconds"), ("data", "10 rows"))
    monkeypatch.setattr(results, "COMMANDS", {"one/t": command})
    root, folder = tmp_path / "runs", tmp_path / "pages"
    old = [
        row(table="t", model=model, metric=metric, value="9", origin="transcribed from a page")
        for model, metric in (("hbnode", "test_loss"), ("hbnode", "loss"), ("gru", "test_loss"))
    ]
    write_rows(folder / "one.csv", old)
    assert results.collect("one", root, folder) == 0
    write_run(root / "one" / "t" / "b", done=1.5, options={"seed": 1})
    results.collect("one", root, folder)
    found = read_csv(folder / "one.csv")
    assert [line["value"] for line in found] == ["9", "9", "9", "1.5"]
    assert (found[3]["statistic"], found[3]["epochs_done"], found[3]["epochs_asked"]) == ("unfinished", "1.5", "2")
    write_run(root / "one" / "t" / "a", test_loss=0.25)
    assert results.collect("one", root, folder) == 3
    found = read_csv(folder / "one.csv")
    values = [("hbnode", "0.25"), ("hbnode", "5"), ("hbnode", "1.5"), ("gru", "9")]
    assert [(line["model"], line["value"]) for line in found] == values
    results.collect("one", root, folder)
    assert read_csv(folder / "one.csv") == found  # collecting again changes nothing
    new = {"data": "data", "size": "10 rows", "tolerance": "0.001", "cpu": "a processor", "origin": "abc", "seed": "0"}
    assert {name: found[0][name] for name in new} == new
    of_epochs = runs("test_loss", at={1: "begin", 2: "end"}, table="{task}", label="{model}!")(root)
    parts = [(line["table"], line["model"], line["case"], line["value"]) for line in of_epochs]
    assert parts[:2] == [("x", "hbnode!", "begin", "1"), ("x", "hbnode!", "end", "0.5")]


def test_studies_become_rows(tmp_path):
    (tmp_path / "found.csv").write_text("model,case,a,b\nx,one,0.5,\ny,two,inf,2\n")
    (tmp_path / "found.json").write_text(json.dumps(MACHINE))
    found = list(
        renamed(study("found.csv", "a", "b", table="{case}s"), b={"metric": "a", "statistic": "stderr"})(tmp_path)
    )
    assert [(line["table"], line["model"], line["metric"], line.get("statistic"), line["value"]) for line in found] == [
        ("ones", "x", "a", None, "0.5"),
        ("twos", "y", "a", None, "diverged"),
        ("twos", "y", "a", "stderr", "2"),
    ]


def test_recall_has_the_best_rate_of_each_model(tmp_path):
    for lr, best in ((1e-3, 0.5), (1e-2, 0.6)):
        config = {"kind": "once", "equal": "state", "model": "linear", "lr": lr}
        write_run(tmp_path / str(lr), options=config, best_validation_accuracy=best, test_8_accuracy=best)
    assert [line["value"] for line in COMMANDS["recall/table"].read(tmp_path)] == ["0.6"]


def test_differences_between_classifiers(tmp_path):
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(0)
    labels = random.integers(2, size=200)
    good = np.clip(0.5 + 0.2 * (2 * labels - 1) + 0.2 * random.normal(size=200), 0, 1).round(2)
    pair, noise = np.stack([1 - good, good], 1), random.random((200, 2))
    assert readers.score(labels, pair) == pytest.approx(roc_auc_score(labels, good))
    for model, predicted in (("gru", pair), ("node", noise)):
        auroc = readers.score(labels, predicted)
        write_run(tmp_path / model, options={"model": model}, test_auroc=auroc, training_seconds=2.0)
        lines = ["label,p0,p1", *(f"{y},{p[0]},{p[1]}" for y, p in zip(labels, predicted, strict=True))]
        (tmp_path / model / "predictions.csv").write_text("\n".join(lines))
        metrics = tmp_path / model / "metrics.csv"
        metrics.write_text(metrics.read_text().replace("test_loss", "validation_loss"))
    found = {
        (line["model"], line["metric"], line["statistic"]): float(line["value"]) for line in readers.compared(tmp_path)
    }
    low, mean, high = (found["node", "difference_to_first", name] for name in ("low", "mean", "high"))
    assert low < mean < high < 0
    assert found["gru", "validation_loss_at_equal_seconds", "mean"] == 1  # after the first epoch, of two seconds
    assert not any(model == "gru" and metric == "difference_to_first" for model, metric, _ in found)


# The command


def test_what_is_missing_is_run(tmp_path, monkeypatch, capfd):
    root, folder = tmp_path / "runs", tmp_path / "pages"
    folder.mkdir()
    code = "import sys, pathlib; out = pathlib.Path(sys.argv[-1]); out.mkdir(parents=True, exist_ok=True)\n"
    code += "out.joinpath('f.csv').write_text('model,a\\nx,1\\n'); sys.exit(int(sys.argv[1]))\n"
    (tmp_path / "tasks_of_a_test.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Command, "arguments", lambda self, out: [["tasks_of_a_test", self.line, str(out)]])
    read = study("f.csv", "a")
    monkeypatch.setattr(results, "COMMANDS", {"good/t": Command(1.5, "0", read), "bad/t": Command(1.5, "3", read)})
    options = ["--runs", str(root), "--pages", str(folder)]
    with pytest.raises(SystemExit, match=r"2 commands will run for about 3\.0 CPU hours.* Fix: --yes"):
        results.main(["run", *options])
    assert not root.exists()
    with pytest.raises(SystemExit, match="bad/t: exit status 3"):
        results.main(["run", "--yes", *options])
    assert read_csv(folder / "good.csv")[0]["value"] == "1"
    results.main(["run", "good", *options])  # nothing is left, so that it does not ask
    capfd.readouterr()
    results.main(options)
    states = {line.split()[0]: line.split()[1:5] for line in capfd.readouterr().out.splitlines()}
    assert (states["good"], states["bad"]) == (["1", "of", "1", "0.0"], ["0", "of", "1", "1.5"])


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_understood(name, monkeypatch, tmp_path):
    """Every command of a task has options that the task takes; those of studies have at least a module."""
    taken = []
    monkeypatch.setattr(task_run, "sweep", lambda config, train: taken.append(config))
    for key, command in results.chosen([name]).items():
        for module, *arguments in command.arguments(tmp_path / key):
            task = importlib.import_module(module)
            if task.main.__module__ == "tasks.common.run" or hasattr(task, "sweep"):
                if hasattr(task, "sweep"):
                    monkeypatch.setattr(task, "sweep", lambda config, train: taken.append(config))
                task.main(arguments)
                assert Path(taken[-1].out).is_relative_to(tmp_path / key)


# Run folders


def test_a_table_and_figures_of_run_folders(tmp_path, capsys):
    for name, options, loss in (
        ("a", {}, 0.25),
        ("b", {"seed": 1}, 0.75),
        ("gru", {"model": "gru"}, None),
    ):
        write_run(tmp_path / name, options=options, test_loss=loss, test_accuracy=0.5, nfe_forward_mean=8.5)
    head = "tolerance,forward,backward,error,gradient_error\n"
    for name in ("a", "b"):
        (tmp_path / name / "tolerance.csv").write_text(head + "".join(f"{10.0**-k},{k},{k},0.1,0.1\n" for k in (1, 2)))
    results.main(["show", str(tmp_path)])
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["test loss", "test accuracy %", "NFE, forward", "seconds"],
        ["HBNODE", "0.5 [0.25, 0.75]", "50", "8.5", "5"],
        ["GRU, 1 of 2 seeds", "diverged", "50", "8.5", "5"],
    ]
    for name in ("x-y.png", "x-y-tolerance.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


# The studies that take no training


def test_windows_are_interpolated_and_see_no_later_frame():
    t = torch.tensor([[0.0, 1, 3, 4, 6]]) * walker2d.FRAME
    x = torch.stack([t / walker2d.FRAME, torch.zeros_like(t)], 2)
    windows = shallow_rows.windows_of_walking((x, t, x + 1))
    assert windows.x.shape == (5, shallow_rows.PAST, 2)
    assert windows.last[:, 0, 0].tolist() == [0, 1, 3, 4, 6]
    assert windows.y[:, 0, 0].tolist() == [1, 2, 4, 5, 7]
    assert windows.grid()[2, -4:, 0].tolist() == [0, 1, 2, 3]  # frame 2 is missing
    assert not windows.grid()[0].any()
