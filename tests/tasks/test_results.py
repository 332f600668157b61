"""Results: files of runs become rows, rows become tables, and no number of a results page is typed by hand."""

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

import importlib

from tasks import results, results_pages, walker2d
from tasks.common import run as task_run
from tasks.experiments import EXPERIMENTS
from tasks.result_rows import COLUMNS, Command, Experiment, read_rows, renamed, runs, study, write_rows
from tasks.results import collect
from tasks.results_pages import lookup, read_results, substitute, tables, write_results
from tasks.studies import exactness, shallow_rows

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))
NUMBER = re.compile(r"(?<![\w-])\d")
MACHINE = {"torch": "2.13", "device": "a processor", "threads": 1, "commit": "abc"}


def row(**values):
    return dict.fromkeys(COLUMNS, "") | values


def write_run(folder, *, seed=0, epochs=2, done=2.0, **summary):
    folder.mkdir(parents=True)
    config = {"model": "hbnode", "seed": seed, "epochs": epochs, "solver": "native", "method": "", "tol": 1e-3}
    (folder / "config.json").write_text(json.dumps(config | {"gradient": "", "steps": 0}))
    (folder / "metrics.csv").write_text(f"epoch,loss,seconds\n1.0,1,2\n{done},0.5,3\n")
    if summary:
        found = {"epoch": done, "parameters": 10, **MACHINE, **summary}
        (folder / "summary.json").write_text(json.dumps(found))


# The pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_table_of_a_page_is_typed_by_hand(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    typed = [line for line in lines if line.lstrip().startswith("|") and NUMBER.search(line)]
    assert not typed, f"{page.name} has a table with numbers. Fix: collect them into docs/results and include the table"


def test_no_measured_number_of_a_claim_is_typed_by_hand():
    with (DOCS / "results" / "claims.csv").open(newline="", encoding="utf-8") as lines:
        for claim in csv.DictReader(lines):
            assert not NUMBER.search(results_pages.REFERENCE.sub("", claim["measured"])), claim["claim"]
            assert claim["verdict"].split(":")[0].split(";")[0].split()[0].rstrip(",") in (
                "yes",
                "partly",
                "no",
                "not",
                "early",
            )
            assert not claim["page"] or (DOCS / "results" / f"{claim['page']}.md").exists()


def test_pages_include_every_table_and_every_reference_is_found(tmp_path):
    written = {path.name for path in write_results(DOCS / "results", tmp_path)}
    files = read_results(DOCS / "results")
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    included = set(re.findall(r"\.\./_results/([^)\n]+?)(?:\n|\))", "\n".join(texts)))
    assert not included - written
    assert not {name for name in written - included if not name.startswith("recurrent-cost")}  # on the page Benchmarks
    for text in texts:
        assert not results_pages.REFERENCE.search(substitute(text, files))
    assert {page.stem for page in PAGES} >= set(EXPERIMENTS)


def test_a_table_shows_its_file(tmp_path):
    facts = [
        row(
            table="t", model="hbnode", metric="test_accuracy", seed=str(i), value=value, origin="abc", parameters="1234"
        )
        for i, value in enumerate(("0.964", "0.95", "0.97"))
    ]
    facts += [row(table="t", model="gru", metric="seconds", value="2512", statistic="unfinished", seed="1")]
    write_rows(tmp_path / "one.csv", facts)
    text = tables("one", read_rows(tmp_path / "one.csv"))["t"]
    assert "| HBNODE | 96.4 [95, 97] |" in text
    assert "seeds 3" in text
    assert "origin abc" in text
    assert "*Not finished:* gru, seed 1" in text
    facts[0]["value"] = "0.955"
    write_rows(tmp_path / "one.csv", facts)
    assert "| HBNODE | 95.5 [95, 97] |" in tables("one", read_rows(tmp_path / "one.csv"))["t"]


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
        ("{three: gru; loss}", "no file three"),
        ("{one: gru; error}", "nothing found"),
        ("{two: gru; loss}", "in tables"),
        ("{two.b: gru; loss; min}", "has no min"),
    ):
        with pytest.raises(ValueError, match=said):
            substitute(wrong, files)


# Collecting and running


def test_runs_become_rows_and_replace_transcribed_ones(tmp_path):
    command = Command("t", ("tasks.x --seeds 2",), 1, runs("test_loss"), "data", "10 rows")
    root, pages = tmp_path / "runs", tmp_path / "pages"
    old = [
        row(table="t", model=model, metric=metric, value="9", origin="transcribed from a page")
        for model, metric in (("hbnode", "test_loss"), ("hbnode", "loss"), ("gru", "test_loss"))
    ]
    write_rows(pages / "one.csv", old)
    assert collect("one", Experiment("?", (command,)), root, pages) == 0
    write_run(root / "one" / "t" / "b", seed=1, done=1.5)
    collect("one", Experiment("?", (command,)), root, pages)
    found = read_rows(pages / "one.csv")
    assert [line["value"] for line in found] == ["9", "9", "9", "1.5"]
    assert (found[3]["statistic"], found[3]["epochs_done"], found[3]["epochs_asked"]) == ("unfinished", "1.5", "2")
    write_run(root / "one" / "t" / "a", test_loss=0.25)
    assert collect("one", Experiment("?", (command,)), root, pages) == 2
    found = read_rows(pages / "one.csv")
    assert [(line["model"], line["value"]) for line in found] == [("hbnode", "0.25"), ("hbnode", "1.5"), ("gru", "9")]
    collect("one", Experiment("?", (command,)), root, pages)
    assert read_rows(pages / "one.csv") == found  # collecting again changes nothing
    new = {"data": "data", "size": "10 rows", "tolerance": "0.001", "cpu": "a processor", "origin": "abc", "seed": "0"}
    assert {name: found[0][name] for name in new} == new
    with pytest.raises(SystemExit, match="has no error"):
        collect("one", Experiment("?", (Command("t", ("tasks.x",), 1, runs("error")),)), root, pages)


def test_studies_become_rows(tmp_path):
    (tmp_path / "found.csv").write_text("model,case,a,b\nx,one,0.5,\ny,two,inf,2\n")
    (tmp_path / "found.json").write_text(json.dumps(MACHINE))
    found = list(study("found.csv", "a", "b")(tmp_path))
    assert [(line["model"], line["metric"], line["value"]) for line in found] == [
        ("x", "a", "0.5"),
        ("y", "a", "diverged"),
        ("y", "b", "2"),
    ]
    assert {line["origin"] for line in found} == {"abc"}
    assert list(study("missing.csv", "a")(tmp_path)) == []


def test_metrics_become_others(tmp_path):
    (tmp_path / "found.csv").write_text("model,kind,a,error\nx,one,0.5,0.1\n")
    reader = study("found.csv", "a", "error", case=lambda line: line["kind"] * 2, table=lambda line: line["kind"])
    found = list(renamed(reader, error={"metric": "a", "statistic": "stderr"})(tmp_path))
    assert [(line["table"], line["case"], line["metric"], line.get("statistic")) for line in found] == [
        ("one", "oneone", "a", None),
        ("one", "oneone", "a", "stderr"),
    ]


FILES = {  # of the folder of a command, what its task writes, cut down
    ("annealing", "bounds"): {
        "annealing.csv": "target,sampler,evaluations,trained,gap,bound_error\n"
        + "".join(
            f"{target},heavy ball,16,{trained},-1,0.1\n" for target, trained in (("many_well", True), ("cancer", False))
        )
    },
    ("recall", "table"): {
        "recall.csv": "kind,equal,model,pairs,noise,share,mean,counting\n"
        "once,state,linear,8,0.0,accuracy,0.9,\nagain,state,softmax,4,0.0,stale,0.1,\n"
        "noisy,state,linear,8,0.2,accuracy,0.7,0.98\nnoisy,state,linear,4,0.2,accuracy,0.7,0.98\n"
    },
    ("image-generation", "throughput"): {
        "throughput.json": json.dumps(
            {
                "rows": [
                    {"model": name, "length": 3072, "images_per_second": 2.0, "over_softmax": ratio}
                    for name, ratio in (("softmax", 1.0), ("momentum", 5.0))
                ]
            }
        )
    },
}


@pytest.mark.parametrize("name", FILES, ids=lambda name: name[0])
def test_a_rerun_replaces_what_was_transcribed(name, tmp_path):
    """Table, model, case and metric of new rows are found among those on the page."""
    experiment, table = name
    (command,) = (one for one in EXPERIMENTS[experiment].commands if one.table == table)
    for file, text in FILES[name].items():
        (tmp_path / file).write_text(text)
    found = list(command.read(tmp_path))
    page = {fact(line) for line in read_rows(DOCS / "results" / f"{experiment}.csv")}
    assert found
    for line in found:
        assert fact({"table": table, "statistic": "", **{k: v for k, v in line.items() if v}}) in page


def fact(line):
    return tuple(line[name] for name in ("table", "model", "case", "metric", "statistic"))


def test_what_is_missing_is_run(tmp_path, monkeypatch, capfd):
    root, pages = tmp_path / "runs", tmp_path / "pages"
    write = "import pathlib; p = pathlib.Path('{out}'); p.mkdir(parents=True, exist_ok=True); p.joinpath('f.csv')"
    right = f"timeit -n 1 -r 1 \"{write}.write_text('model,a\\nx,1\\n')\""
    wrong = 'timeit -n 1 -r 1 "raise OSError(\\"{out}\\")"'
    experiments = {
        "good": Experiment("Does it?", (Command("t", (right, right), 1, study("f.csv", "a")),)),
        "bad": Experiment("Does it?", (Command("t", (wrong,), 2, study("f.csv", "a")),)),
    }
    assert "not done" in results.listing(experiments, root, pages).splitlines()[0]
    failed = results.run(experiments, root, pages, 2)
    assert [line.split(":")[0] for line in failed] == ["bad/t"]
    assert read_rows(pages / "good.csv")[0]["value"] == "1"
    assert results.run({"good": experiments["good"]}, root, pages, 1) == []
    assert capfd.readouterr().out.count("good/t: ") == 1  # the second call has nothing to do
    good, bad = results.listing(experiments, root, pages).splitlines()
    assert re.match(r"good +done +1 of 1 commands +1\.0 h +1 rows", good)
    assert re.match(r"bad +not done", bad)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_are_understood(name, monkeypatch, tmp_path):
    """Every command of a task has options that the task takes; those of studies have at least a module."""
    taken = []
    monkeypatch.setattr(task_run, "sweep", lambda config, train: taken.append(config))
    for command in EXPERIMENTS[name].commands:
        for module, *arguments in command.arguments(tmp_path / name / command.table):
            task = importlib.import_module(module)
            if task.main.__module__ == "tasks.common.run" or hasattr(task, "sweep"):
                if hasattr(task, "sweep"):
                    monkeypatch.setattr(task, "sweep", lambda config, train: taken.append(config))
                task.main(arguments)
                assert Path(taken[-1].out).is_relative_to(tmp_path / name / command.table)


def test_the_list_is_printed(capsys, tmp_path):
    results.main(["list", "digits", "speech", "--runs", str(tmp_path)])
    assert capsys.readouterr().out.count("not done") == 2
    with pytest.raises(SystemExit):
        results.main(["run", "no-such"])
    assert "unknown experiments ['no-such']" in capsys.readouterr().err
    results.main(["collect", "digits", "--runs", str(tmp_path)])
    assert "digits: 0 rows" in capsys.readouterr().out


def test_values_at_epochs_and_cases(tmp_path):
    write_run(tmp_path / "a", test_loss=0.25)
    found = list(runs("loss", "seconds", at={1: "begin", 2: "end"}, table=lambda config: "x")(tmp_path))
    assert [(line["case"], line["metric"], line["value"], line["table"]) for line in found] == [
        ("begin", "loss", "1", "x"),
        ("end", "loss", "0.5", "x"),
        ("begin", "seconds", "2", "x"),
        ("end", "seconds", "3", "x"),
    ]
    (line,) = runs("seconds", case=lambda config: f"{config['epochs']} epochs")(tmp_path)
    assert (line["case"], line["value"]) == ("2 epochs", "5")
    solved = [row(metric="solved", value="1"), row(metric="solved", value="0")]
    assert results_pages.cell(solved) == "1 of 2"
    assert results_pages.cell([row(metric="solved", value="2", seeds="3")]) == "2 of 3"


# The studies that take no training


def test_memory_and_reversible_gradients_are_exact():
    errors = {(line["model"], line["decay"]): line["relative_error"] for line in exactness.memory(0)}
    ours = [error for (model, _), error in errors.items() if model != "divided keys"]
    assert max(ours) < 1e-6
    assert math.isnan(errors["divided keys", "0.1"])
    assert errors["divided keys", "0.9"] < 1e-6
    found, stored = exactness.gradients("leapfrog", "reversible", 8)
    exact, kept = exactness.gradients("leapfrog", "direct", 8)
    assert (found - exact).norm() < 1e-13 * exact.norm()
    assert stored < kept / 3


def test_the_likelihood_of_noisy_oscillators_is_celerite2s():
    pytest.importorskip("celerite2")
    errors = {line["model"]: line["relative_error"] for line in exactness.likelihood(0) if line["samples"] == 1000}
    assert errors["celerite2"] == 0.0
    assert errors["Oscillators(noise=True)"] < 1e-9


def test_the_shallow_rows_of_vibration(monkeypatch):
    monkeypatch.setattr(shallow_rows, "FITTED", ("ridge",))
    for protocol in ("honest", "paper"):
        errors = {line["model"]: line["test_forecast_mse"] for line in shallow_rows.vibration_rows(0, protocol)}
        assert errors["ridge"] < errors["last value"] < errors["constant"]


def test_windows_are_interpolated_and_see_no_later_frame():
    t = torch.tensor([[0.0, 1, 3, 4, 6]]) * walker2d.FRAME
    x = torch.stack([t / walker2d.FRAME, torch.zeros_like(t)], 2)
    windows = shallow_rows.windows_of_walking((x, t, x + 1))
    assert windows.x.shape == (5, shallow_rows.PAST, 2)
    assert windows.last[:, 0, 0].tolist() == [0, 1, 3, 4, 6]
    assert windows.y[:, 0, 0].tolist() == [1, 2, 4, 5, 7]
    assert windows.grid()[2, -4:, 0].tolist() == [0, 1, 2, 3]  # frame 2 is missing
    assert not windows.grid()[0].any()
    few = shallow_rows.windows_of_walking((x, t, x + 1), 2)
    assert len(few.x) == len(few.age) == len(few.y) == 2


@pytest.mark.parametrize("name", ["ridge", "minirocket", "boosting"])
def test_fitted_rows_beat_the_last_value(name):
    if name == "minirocket":
        pytest.importorskip("aeon")
    phase, age = 6 * torch.rand(160, 1), torch.arange(16.0, 0, -1).expand(160, -1)
    x, y = (torch.sin(phase - 0.5 * steps)[..., None] for steps in (age, torch.zeros(160, 1)))
    parts = [
        shallow_rows.Windows(x[some], age[some], y[some]) for some in (slice(100), slice(100, 130), slice(130, 160))
    ]
    test = parts[2]
    forecast = shallow_rows.fit(name, *parts[:2], 0)(test)
    assert (forecast - test.y).square().mean() < 0.2 * (test.last - test.y).square().mean()
