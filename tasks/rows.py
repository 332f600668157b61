"""Convert run folders and the tables of studies to rows of results, and read and write the CSV files of results.

Results are stored in ``docs/results/EXPERIMENT.csv`` with the columns :data:`COLUMNS`. Each row contains one value: of
one metric, for one table, model, case and seed, with the conditions of the measurement.
"""

from __future__ import annotations

import csv
import datetime
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.files import read_json, write_table

COLUMNS = (
    # What was measured. "statistic" says how the value summarises several seeds; it is "" for a single run.
    *("table", "model", "case", "seed", "metric", "statistic", "value", "seeds"),
    *("data", "size", "parameters", "solver", "gradient", "tolerance", "epochs_done", "epochs_asked"),
    # "origin" is the commit of the code that was run, or the page from which the value was copied.
    *("cpu", "threads", "torch", "date", "command", "origin"),
)
ORDER = (  # order of models in a table; other models follow in the order of their folders
    *("node", "anode", "sonode", "hbnode", "ghbnode", "nesterovnode", "adamnode", "lstm", "gru", "gru-d", "cfc"),
    *("plain", "gain", "forget", "momentum", "nag", "sr", "adaptive", "adam", "rmsprop", "softmax", "linear"),
)
RANK = {name: place for place, name in enumerate(ORDER)}
# Runs of one group may differ in these options.
FREE = ("seed", "seeds", "jobs", "out", "device", "checkpoint_seconds", "curve")
# Runs in one figure agree in these options.
FIGURE = ("task", "preset", "dataset", "data", "features", "protocol", "cell", "problem", "length", "side", "permuted")
Row = dict[str, str]
Reader = Callable[[Path], Iterator[Row]]
Text = str | Callable[[Mapping[str, Any]], str]  # a format string for the options of a run, or a function of them
logger = logging.getLogger(__name__)


def formatted(text: Text, values: Mapping[str, Any]) -> str:
    """Return a text filled in with the options of a run, or with the columns of a study's table."""
    return text(values) if callable(text) else text.format_map(values)


# Run folders


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. ``summary`` is empty until the run has finished."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    epochs: Sequence[Row]

    @property
    def results(self) -> dict[str, Any]:
        """The options and the summary of a finished run. "seconds" is the total over all epochs."""
        return {**self.config, **self.summary, "seconds": sum(float(row["seconds"]) for row in self.epochs)}

    def conditions(self) -> Row:
        """Return the columns that describe how the run was made."""
        config, summary = self.config, self.summary
        about = {
            "seed": str(config["seed"]),
            "solver": _solver(config),
            "gradient": str(config.get("gradient") or ""),
            "tolerance": "" if config.get("tol") is None or config.get("steps") else f"{config['tol']:g}",
            "epochs_asked": str(config["epochs"]),
        }
        if not summary:
            done = f"{float(self.epochs[-1]['epoch']):g}" if self.epochs else "0"
            return about | {"metric": "epochs", "statistic": "unfinished", "value": done, "epochs_done": done}
        about |= {"parameters": str(summary["parameters"] or ""), "epochs_done": f"{summary['epoch']:g}"}
        about |= environment(summary, self.path / "summary.json")
        if summary.get("source") == "generated":  # the task found no data and simulated them
            about["data"] = "generated data"
        return about


def run_folders(root: Path) -> list[RunFolder]:
    """Return the runs in a folder and its subfolders, in the order of :data:`ORDER`."""
    found = []
    for path in sorted(root.rglob("config.json")):
        summary, metrics = path.with_name("summary.json"), path.with_name("metrics.csv")
        finished = read_json(summary) if summary.exists() else {}
        found.append(RunFolder(path.parent, read_json(path), finished, read_csv(metrics)))
    return sorted(found, key=lambda run: RANK.get(str(run.config["model"]), len(RANK)))


def _solver(config: Mapping[str, Any]) -> str:
    if "solver" not in config:
        return ""
    method = config.get("method") or ("dopri5" if config["solver"] == "torchdiffeq" else "")
    return " ".join(word for word in (config["solver"], method) if word)


# Groups of runs


@dataclass
class Group:
    """Finished runs that differ only in their seed. ``label`` and ``color`` are used in tables and figures."""

    runs: list[RunFolder]
    label: str = ""
    color: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The options of the first run of the group."""
        return self.runs[0].config

    @property
    def model(self) -> str:
        """The name of the model, or of the connection in a transformer with momentum over depth."""
        return str(self.config["connection" if self.config["model"] == "transformer" else "model"])

    @property
    def experiment(self) -> str:
        """The name of the figure that shows the group: the task, its preset, and the data set or problem."""
        config = self.config | ({"dataset": Path(self.config["table"]).stem} if self.config.get("table") else {})
        values = {name: config[name] for name in FIGURE if config.get(name) not in (None, False)}
        return "-".join(name if value is True else str(value) for name, value in values.items())

    @property
    def seeds(self) -> list[object]:
        """The seeds of the runs."""
        return [run.config["seed"] for run in self.runs]


def grouped(root: Path) -> list[Group]:
    """Return the finished runs in a folder as groups. A warning names each run that is left out."""
    groups: dict[str, Group] = {}
    for run in run_folders(root):
        key = json.dumps({name: value for name, value in run.config.items() if name not in FREE}, sort_keys=True)
        if not run.summary:
            logger.warning("%s has not finished and is left out", run.path)
        elif key in groups and run.config["seed"] in groups[key].seeds:
            logger.warning("%s repeats a run and is left out", run.path)
        else:
            groups.setdefault(key, Group([])).runs.append(run)
    return list(groups.values())


def tell_apart(groups: Sequence[Group], titles: Mapping[str, str]) -> None:
    """Give each group a color, and a label with its model and the options in which the groups differ."""
    options = [name for name in groups[0].config if name not in (*FREE, "model", "connection")]
    differing = [name for name in options if len({str(group.config.get(name)) for group in groups}) > 1]
    for index, group in enumerate(groups):
        values = [f"{name}={group.config[name]}" for name in differing if group.config.get(name) is not None]
        group.label, group.color = " ".join([titles.get(group.model, group.model), *values]), f"C{index}"


# Readers: functions that read the folder of a command and yield rows of results


def runs(
    *metrics: str, label: Text = "{model}", case: Text = "", table: Text = "", at: Mapping[int, str] | None = None
) -> Reader:
    """Return a function that yields the results of run folders.

    Arguments:
        metrics: names of options, of entries of ``summary.json``, or of columns of ``metrics.csv``.
        label: name of the model in the results.
        case: text that distinguishes runs of one model, such as the length of a problem.
        table: name of the table; empty: the table of the command.
        at: dictionary from epochs to cases; results are taken after these epochs. None: results of the finished run.
    """

    def read(folder: Path) -> Iterator[Row]:
        for run in run_folders(folder):
            names = {"table": formatted(table, run.config), "model": formatted(label, run.config)}
            about = names | {"case": formatted(case, run.config)} | run.conditions()
            if not run.summary:
                yield about
                continue
            by_epoch = {float(row["epoch"]): row for row in run.epochs}
            moments = {"": run.results} if at is None else {at[k]: by_epoch[k] for k in at if k in by_epoch}
            for name in metrics:
                for moment, found in moments.items():
                    if name not in found:
                        raise SystemExit(f"{run.path} has no metric {name!r}. Fix: one of {', '.join(found)}.")
                    yield about | {"case": moment or about["case"], "metric": name, "value": number(found[name])}

    return read


def study(
    file: str,
    *metrics: str,
    model: Text = "{model}",
    case: Text = lambda row: row.get("case", ""),
    where: Callable[[Mapping[str, str]], bool] = lambda row: True,
    table: Text = "",
) -> Reader:
    """Return a function that yields the results in the CSV file of a study.

    Arguments:
        file: the CSV file in the folder of the command. The JSON file of the same name describes the machine.
        metrics: columns of the CSV file to yield.
        model: name of the model in the results.
        case: text that distinguishes results of one model.
        where: function that selects the rows of the CSV file.
        table: name of the table; empty: the table of the command.
    """

    def read(folder: Path) -> Iterator[Row]:
        path = folder / file
        machine = path.with_suffix(".json")
        about = environment(read_json(machine) if machine.exists() else {}, path) if path.exists() else {}
        for line in filter(where, read_csv(path)):
            told = {name: line.get(name, "") for name in ("seed", "data", "size")}
            told |= {"table": formatted(table, line), "model": formatted(model, line), "case": formatted(case, line)}
            for name in metrics:
                if line[name] or "case" not in line:  # some cases have no value for some metrics
                    yield about | told | {"metric": name, "value": number(line[name])}

    return read


def renamed(reader: Reader, **columns: Row) -> Reader:
    """Return a reader that changes columns in the results for some metrics.

    Arguments:
        reader: function that yields results.
        columns: for each metric the values that replace those of its columns. With ``bound_error={"metric": "gap",
            "statistic": "stderr"}`` the results of the metric "bound_error" become those of "gap".
    """
    return lambda folder: (row | columns.get(row["metric"], {}) for row in reader(folder))


def both(*readers: Reader) -> Reader:
    """Return a reader that yields the results of several readers, one after another."""
    return lambda folder: (row for reader in readers for row in reader(folder))


def environment(found: Mapping[str, Any], path: Path) -> Row:
    """Return the machine, versions and date of a measurement, from the JSON object that the run or study stored."""
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc).date().isoformat()
    names = {"cpu": "device", "threads": "threads", "torch": "torch", "origin": "commit"}
    return {column: str(found.get(name, "")) for column, name in names.items()} | {"date": date}


def number(value: object) -> str:
    """Format a value with six digits: 1 or 0 for booleans, and "diverged" for values that are not finite."""
    if isinstance(value, (bool, int)):
        return str(int(value))
    found = float("nan" if value is None or value == "" else str(value))
    return f"{found:.6g}" if abs(found) < float("inf") else "diverged"


# Files


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file, or an empty list if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows of results to a CSV file."""
    write_table(path, [{name: row.get(name, "") for name in COLUMNS} for row in rows])
