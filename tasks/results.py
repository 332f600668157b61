"""The experiments behind the pages of Results: what is done, running what is missing, collecting what came out.

    python -m tasks.results                    # each experiment: done, in part or not done, and its CPU hours
    python -m tasks.results run                # what is missing, one thread each, two at a time; repeat it to resume
    python -m tasks.results run digits speech  # of these experiments only
    python -m tasks.results collect            # reads the runs that are there into docs/results again

An experiment (tasks/experiments.py) is a question and the commands that answer it. A command runs in a folder of its
own, ``runs/results/EXPERIMENT/TABLE``, and resumes there; beside it ``TABLE.json`` says that it has ended, and by which
command. After each, ``docs/results/EXPERIMENT.csv`` is written anew, whole or not at all: one row for each model, seed
and metric with the conditions under which it was measured (see
``tasks/result_rows.py``). A run that has not come to its end has one
row, metric "epochs", that says how far it came. New rows replace those of the same table and model that were
transcribed from an earlier page, whose runs are lost; all other rows stay.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.common.files import read_json, write_json
from tasks.common.run import stopped_by
from tasks.experiments import EXPERIMENTS
from tasks.result_rows import COLUMNS, Command, Experiment, Row, read_rows, write_rows

PAGES = Path("docs/results")
RUNS = Path("runs/results")


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return old rows, each group of one table and model replaced by the new one where that has finished runs.

    Unfinished runs stand beside the old rows, in place of what was said of them before.
    """

    def key(row: Mapping[str, str]) -> tuple[str, str]:
        return row["table"], row["model"]

    ended = {key(row) for row in new if row.get("statistic") != "unfinished"}
    found: list[Row] = []
    placed: set[tuple[str, str]] = set()
    for row in old:
        if key(row) not in ended and row["statistic"] != "unfinished":
            found.append(row)
        elif key(row) in ended - placed:  # the new ones in the place of the first old one
            found += [other for other in new if key(other) == key(row)]
            placed.add(key(row))
    return found + [row for row in new if row not in found]


def collect(name: str, experiment: Experiment, root: Path, pages: Path) -> int:
    """Write an experiment's file from the runs that are there; return how many rows came from them."""
    new = []
    for command in experiment.commands:
        out = folder_of(root, name, command)
        about = {"table": command.table, "data": command.data, "size": command.size, "command": command.text(out)}
        for row in command.read(out):
            filled = about | {column: value for column, value in row.items() if value}
            new.append({column: filled.get(column, "") for column in COLUMNS})
    if new:
        write_rows(pages / f"{name}.csv", merged(read_rows(pages / f"{name}.csv"), new))
    return len(new)


# Running


def folder_of(root: Path, name: str, command: Command) -> Path:
    """Return the folder that a command runs in."""
    return root / name / command.table


def marker(out: Path) -> Path:
    """Return the file that says of a command's folder that the command has ended."""
    return out.with_name(f"{out.name}.json")


def is_done(out: Path, command: Command) -> bool:
    """Whether the command, as it is now, has ended in its folder."""
    path = marker(out)
    return path.exists() and read_json(path)["command"] == command.text(out)


def state(out: Path, command: Command) -> str:
    """Return "done", "in part", or "not done"."""
    if is_done(out, command):
        return "done"
    return "in part" if out.exists() and any(out.iterdir()) else "not done"


def listing(experiments: Mapping[str, Experiment], root: Path, pages: Path) -> str:
    """Return a line for each experiment: how far it is, its hours, where its rows are from, and its question."""
    lines = []
    for name, experiment in experiments.items():
        states = [state(folder_of(root, name, command), command) for command in experiment.commands]
        done = states.count("done")
        said = "done" if done == len(states) else "not done" if set(states) == {"not done"} else "in part"
        rows = read_rows(pages / f"{name}.csv")
        copied = sum(row["origin"].startswith("transcribed") for row in rows)
        lines.append(
            f"{name:<22} {said:<9} {done} of {len(states)} commands  {experiment.hours:6.1f} h  "
            f"{len(rows):4d} rows, {copied:4d} transcribed  {experiment.question}"
        )
    return "\n".join(lines)


def run(experiments: Mapping[str, Experiment], root: Path, pages: Path, jobs: int) -> list[str]:
    """Run what is missing, so many commands at a time, one thread each; what is to be said of those that failed."""
    waiting = [
        (name, experiment, command)
        for name, experiment in experiments.items()
        for command in experiment.commands
        if not is_done(folder_of(root, name, command), command)
    ][::-1]
    running: dict[subprocess.Popen[bytes], tuple[str, Experiment, Command, list[list[str]]]] = {}
    failed = []
    with stopped_by(signal.SIGINT, signal.SIGTERM):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name, experiment, command = waiting.pop()
                    lines = command.arguments(folder_of(root, name, command))
                    print(f"{name}/{command.table}: {command.text(folder_of(root, name, command))}", flush=True)
                    running[_start(lines.pop(0))] = name, experiment, command, lines
                time.sleep(0.2)
                for process in [process for process in running if process.poll() is not None]:
                    name, experiment, command, lines = running.pop(process)
                    if process.returncode:
                        failed.append(f"{name}/{command.table}: exit status {process.returncode}, as said above")
                    elif lines:
                        running[_start(lines.pop(0))] = name, experiment, command, lines
                        continue
                    else:
                        out = folder_of(root, name, command)
                        write_json(marker(out), {"command": command.text(out)})
                    try:
                        collect(name, experiment, root, pages)
                    except SystemExit as error:  # the other commands go on
                        failed.append(str(error))
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    return failed


def _start(line: Sequence[str]) -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen([sys.executable, "-m", *line], env=os.environ | threads)


def main(argv: Sequence[str] | None = None) -> None:
    """List, run or collect experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("list", "run", "collect"), default="list")
    parser.add_argument("names", nargs="*", metavar="name", help="experiments; none: all")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="commands at a time [2]")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder of the runs [{RUNS}]")
    parser.add_argument("--pages", type=Path, default=PAGES, help=f"folder of the files of results [{PAGES}]")
    options = parser.parse_intermixed_args(argv)
    unknown = sorted(set(options.names) - set(EXPERIMENTS))
    if unknown:
        parser.error(f"unknown experiments {unknown}; expected some of {', '.join(EXPERIMENTS)}")
    chosen = {name: EXPERIMENTS[name] for name in options.names or EXPERIMENTS}
    failed = run(chosen, options.runs, options.pages, options.jobs) if options.action == "run" else []
    if options.action == "collect":
        for name, experiment in chosen.items():
            print(f"{name}: {collect(name, experiment, options.runs, options.pages)} rows")
    if failed:
        raise SystemExit("\n".join(failed))
    print(listing(chosen, options.runs, options.pages))


if __name__ == "__main__":
    main()
