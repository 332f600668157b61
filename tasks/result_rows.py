"""The rows of results: how commands' runs and studies become rows, and the files that hold these.

A file of results is ``docs/results/EXPERIMENT.csv`` with the columns :data:`COLUMNS`: one row for each model, seed and
metric with the conditions under which it was measured.
"""

from __future__ import annotations

import csv
import datetime
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.files import read_json, write_table

COLUMNS = (
    *("table", "model", "case", "seed", "metric", "statistic", "value", "seeds"),  # the fact; statistic: over the seeds
    *("data", "size", "parameters", "solver", "gradient", "tolerance", "epochs_done", "epochs_asked"),
    *("cpu", "threads", "torch", "date", "command", "origin"),  # origin: the commit, or the page it was copied from
)
ORDER = (  # of models in a table; others follow, by name
    *("node", "anode", "sonode", "hbnode", "ghbnode", "nesterovnode", "adamnode", "lstm", "gru", "gru-d", "cfc"),
    *("plain", "gain", "forget", "momentum", "nag", "sr", "adaptive", "adam", "rmsprop", "softmax", "linear"),
)
Row = dict[str, str]
Reader = Callable[[Path], Iterator[Row]]


@dataclass(frozen=True)
class Command:
    """One command of an experiment, or several that follow one another.

    Attributes:
        table: which table of the experiment's page its rows belong to.
        lines: modules and their arguments; ``{out}`` is the command's folder, ``{runs}`` that of all experiments. A
            line without either has ``--out {out}`` appended.
        hours: CPU hours of one thread, about.
        read: gives the rows of the command's folder.
        data: the data set.
        size: how much of it.
    """

    table: str
    lines: tuple[str, ...]
    hours: float
    read: Reader
    data: str = ""
    size: str = ""

    def arguments(self, out: Path) -> list[list[str]]:
        """Return each line as the arguments of ``python -m``."""
        lines = (line if "{" in line else line + " --out {out}" for line in self.lines)
        return [shlex.split(line.format(out=out, runs=out.parents[1])) for line in lines]

    def text(self, out: Path) -> str:
        """Return the command as a reader would type it."""
        return " && ".join(shlex.join(["python", "-m", *line]) for line in self.arguments(out))


@dataclass(frozen=True)
class Experiment:
    """A question and the commands that answer it."""

    question: str
    commands: tuple[Command, ...]

    @property
    def hours(self) -> float:
        """CPU hours of all commands."""
        return sum(command.hours for command in self.commands)


# Readers of what commands leave behind


def runs(
    *metrics: str,
    label: Callable[[Mapping[str, Any]], str] = lambda config: str(config["model"]),
    case: Callable[[Mapping[str, Any]], str] = lambda config: "",
    table: Callable[[Mapping[str, Any]], str] = lambda config: "",
    at: Mapping[int, str] | None = None,
) -> Reader:
    """Return a reader of run folders.

    Arguments:
        metrics: options, entries of ``summary.json``, or columns of ``metrics.csv``; "seconds" is the sum of theirs.
        label: what the model is called, from the run's options.
        case: what tells runs of a model apart, such as the length of a problem.
        table: which table of the page the rows belong to; empty is the command's.
        at: epochs whose values are taken, and the case of each; None takes those of the end.
    """

    def read(folder: Path) -> Iterator[Row]:
        configs = {path: read_json(path) for path in sorted(folder.rglob("config.json"))}
        rank = {name: place for place, name in enumerate(ORDER)}
        for path, config in sorted(configs.items(), key=lambda entry: rank.get(entry[1]["model"], len(rank))):
            about = {
                "table": table(config),
                "model": label(config),
                "case": case(config),
                "seed": str(config["seed"]),
                "solver": _solver(config),
                "gradient": str(config.get("gradient") or ""),
                "tolerance": "" if config.get("tol") is None or config.get("steps") else f"{config['tol']:g}",
                "epochs_asked": str(config["epochs"]),
            }
            summary, rows = path.with_name("summary.json"), _epochs(path.with_name("metrics.csv"))
            if not summary.exists():
                done = f"{float(rows[-1]['epoch']):g}" if rows else "0"
                yield about | {"metric": "epochs", "statistic": "unfinished", "value": done, "epochs_done": done}
                continue
            end = config | read_json(summary)
            end["seconds"] = sum(float(row["seconds"]) for row in rows)
            about |= {"parameters": str(end["parameters"] or ""), "epochs_done": f"{end['epoch']:g}"}
            about |= environment(end, summary)
            if end.get("source") == "generated":  # in place of the data that were not there
                about["data"] = "generated data"
            chosen = {"": end} if at is None else {at[int(k)]: row for row in rows if (k := float(row["epoch"])) in at}
            for name in metrics:
                for moment, found in chosen.items():
                    if name not in found:
                        raise SystemExit(f"{summary} has no {name}; there are {', '.join(found)}.")
                    yield about | {"case": moment or about["case"], "metric": name, "value": number(found[name])}

    return read


def study(
    file: str,
    *metrics: str,
    model: Callable[[Mapping[str, str]], str] = lambda row: row["model"],
    case: Sequence[str] | Callable[[Mapping[str, str]], str] = (),
    where: Callable[[Mapping[str, str]], bool] = lambda row: True,
    table: str | Callable[[Mapping[str, str]], str] = "",
    log10: bool = False,
) -> Reader:
    """Return a reader of the table that a study writes.

    Arguments:
        file: the table, CSV, in the command's folder; what it was measured on is in the JSON file of the same name.
        metrics: its columns, one row each.
        model: what the model of a row of the table is called.
        case: columns that tell a model's rows apart, or what gives the case of a row; none: the column "case", if any.
        where: which rows of the table to take.
        table: which table of the page the rows belong to, or what gives it for a row; empty is the command's.
        log10: whether to take the logarithms of the values; metrics are then called "log10_...".
    """

    def case_of(line: Mapping[str, str]) -> str:
        if callable(case):
            return case(line)
        return ", ".join(f"{name.replace('_', ' ')} {line[name]}" for name in case) or line.get("case", "")

    def read(folder: Path) -> Iterator[Row]:
        path = folder / file
        if not path.exists():
            return
        machine = path.with_suffix(".json")
        about = environment(read_json(machine) if machine.exists() else {}, path)
        with path.open(newline="", encoding="utf-8") as lines:
            for line in csv.DictReader(lines):
                if not where(line):
                    continue
                told = {
                    "table": table(line) if callable(table) else table,
                    "model": model(line),
                    "case": case_of(line),
                    "seed": line.get("seed", ""),
                    "data": line.get("data", ""),
                    "size": line.get("size", ""),
                }
                for name in metrics:
                    if line[name] == "" and "case" in line:  # a metric that this case does not have
                        continue
                    value = line[name]
                    if log10:
                        value = str(math.log10(float(value)))
                    yield about | told | {"metric": f"log10_{name}" if log10 else name, "value": number(value)}

    return read


def renamed(reader: Reader, **columns: Row) -> Reader:
    """Return a reader whose rows of some metrics have other columns.

    Arguments:
        reader: whose rows to take.
        columns: by metric the columns to replace, such as ``bound_error={"metric": "gap", "statistic": "stderr"}``.
    """
    return lambda folder: (row | columns.get(row["metric"], {}) for row in reader(folder))


def both(*readers: Reader) -> Reader:
    """Return a reader of all that several readers give."""
    return lambda folder: (row for reader in readers for row in reader(folder))


def environment(found: Mapping[str, Any], path: Path) -> Row:
    """Return where and when something was measured, from what a run or a study says of it."""
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc).date().isoformat()
    names = {"cpu": "device", "threads": "threads", "torch": "torch", "origin": "commit"}
    return {column: str(found.get(name, "")) for column, name in names.items()} | {"date": date}


def number(value: object) -> str:
    """Return a value as a file has it: six digits, 1 and 0 of what is true or not; "diverged" of what is not finite."""
    if isinstance(value, (bool, int)):
        return str(int(value))
    if value is None or value == "":
        return "diverged"
    found = float(str(value))
    return f"{found:.6g}" if abs(found) < float("inf") else "diverged"


def _solver(config: Mapping[str, Any]) -> str:
    if "solver" not in config:
        return ""
    method = config.get("method") or ("dopri5" if config["solver"] == "torchdiffeq" else "")
    return " ".join(word for word in (config["solver"], method) if word)


def _epochs(metrics: Path) -> list[dict[str, str]]:
    if not metrics.exists():
        return []
    with metrics.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


# Files of results


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of results; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path} has the columns {reader.fieldnames}; expected {list(COLUMNS)}.")
        return list(reader)


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write a file of results, whole or not at all."""
    write_table(path, [{name: row.get(name, "") for name in COLUMNS} for row in rows])
