"""Run the experiments, collect their results, draw the pages of Results, and show run folders.

    python -m tasks.results                    # list the pages with their state, CPU hours and origin of results python
    -m tasks.results run                # run the commands that are not finished; repeat it to resume python -m
    tasks.results run digits speech  # run only two experiments; --yes does not ask python -m tasks.results collect #
    write the results of existing runs to docs/results python -m tasks.results draw               # draw the tables and
    figures of the pages into docs/_results python -m tasks.results show runs/digits   # show a table and figures of the
    finished runs in a folder

``tasks/experiments.py`` defines the commands. Each command runs with one thread in the folder
``runs/results/EXPERIMENT/TABLE``, and resumes there. When a command has ended, ``TABLE.json`` is written beside the
folder, and the results are written to ``docs/results/EXPERIMENT.csv``. They replace the CSV rows of the same table and
model; all other rows stay. CSV rows copied from an earlier page, whose runs are lost, are marked "transcribed" in the
column "origin".
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tasks.common.files import read_json, write_figure, write_json
from tasks.experiments import COMMANDS, Command
from tasks.result_tables import TITLES, read_results, show, write_results
from tasks.rows import COLUMNS, Group, Row, grouped, read_csv, tell_apart, write_rows

PAGES = Path("docs/results")
RUNS = Path("runs/results")
TRANSCRIBED = "transcribed from docs"  # origin of results whose runs are lost
SHOWN = "train_,validation_,test_,best_,final_,nfe_forward,nfe_backward,seconds,separates,solved"


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Replace the old rows of each table and model by the new rows, if the new rows are of finished runs.

    New rows of unfinished runs are added, and replace only earlier rows of unfinished runs.
    """

    def key(row: Row) -> tuple[str, str]:
        return row["table"], row["model"]

    ended = {key(row) for row in new if row.get("statistic") != "unfinished"}
    found: list[Row] = []
    placed: set[tuple[str, str]] = set()
    for row in old:
        if key(row) not in ended and row["statistic"] != "unfinished":
            found.append(row)
        elif key(row) in ended - placed:  # insert the new rows at the first old row
            found += [other for other in new if key(other) == key(row)]
            placed.add(key(row))
    return found + [row for row in new if row not in found]


def collect(name: str, root: Path, pages: Path) -> int:
    """Write the results of an experiment's runs to its CSV file, and return the number of rows."""
    new = []
    for key, command in chosen([name]).items():
        data, size = command.data
        about = {"table": key.partition("/")[2], "data": data, "size": size, "command": command.text(root / key)}
        for row in command.read(root / key):
            filled = about | {column: value for column, value in row.items() if value}
            new.append({column: filled.get(column, "") for column in COLUMNS})
    if new:
        write_rows(pages / f"{name}.csv", merged(read_csv(pages / f"{name}.csv"), new))
    return len(new)


# Running


def chosen(names: Sequence[str]) -> dict[str, Command]:
    """Return the commands of the named experiments."""
    return {key: command for key, command in COMMANDS.items() if key.partition("/")[0] in names}


def unfinished(names: Sequence[str], root: Path) -> dict[str, Command]:
    """Return the commands of the named experiments that have not ended with their present options."""

    def is_done(key: str, command: Command) -> bool:
        path = root / f"{key}.json"
        return path.exists() and read_json(path)["command"] == command.text(root / key)

    return {key: command for key, command in chosen(names).items() if not is_done(key, command)}


def listing(names: Sequence[str], root: Path, pages: Path) -> str:
    """Return a line for each experiment with its commands, CPU hours and rows, and a last line with the sums."""
    head = f"{'page':<18} {'commands done':>13} {'CPU hours left':>14} {'rows':>6} {'runs lost':>9}  title"
    lines, total, lost = [head], 0, 0
    for name in names:
        rows, page = read_csv(pages / f"{name}.csv"), pages / f"{name}.md"
        waiting, commands = unfinished([name], root), chosen([name])
        done = f"{len(commands) - len(waiting)} of {len(commands)}" if commands else "make bench"
        hours = sum(command.hours for command in waiting.values())
        without = sum(row["origin"].startswith(TRANSCRIBED) for row in rows)
        title = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") if page.exists() else ""
        lines.append(f"{name:<18} {done:>13} {hours:>14.1f} {len(rows):>6} {without:>9}  {title}")
        total, lost = total + len(rows), lost + without
    hours = sum(command.hours for command in unfinished(names, root).values())
    lines.append(f"{lost:,} of {total:,} rows were transcribed from earlier pages, and their runs are lost.")
    return "\n".join([*lines, f"The commands that are left take about {hours:.1f} CPU hours of one thread."])


def ask(names: Sequence[str], root: Path, jobs: int) -> None:
    """Ask whether to start the remaining commands. End the program without the answer yes or without a terminal."""
    left = unfinished(names, root)
    hours = sum(command.hours for command in left.values())
    said = f"{len(left)} commands will run for about {hours:.1f} CPU hours, {jobs} at a time."
    if left and not sys.stdin.isatty():
        raise SystemExit(f"{said} There is no terminal to confirm this. Fix: --yes, or make results YES=1.")
    if left and input(f"{said} Start them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SystemExit("Nothing was started.")


def run(names: Sequence[str], root: Path, pages: Path, jobs: int) -> list[str]:
    """Run the remaining commands, ``jobs`` at a time, and return a message for each command that failed."""
    processes: list[subprocess.Popen[bytes]] = []
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

    def execute(key: str, command: Command) -> str:
        print(f"{key}: {command.text(root / key)}", flush=True)
        for line in command.arguments(root / key):
            processes.append(process := subprocess.Popen([sys.executable, "-m", *line], env=os.environ | threads))
            if status := process.wait():
                return f"{key}: exit status {status}, see its output above"
        write_json(root / f"{key}.json", {"command": command.text(root / key)})
        return ""

    failed: list[str] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(execute, *left): left[0].partition("/")[0] for left in unfinished(names, root).items()}
        for future in as_completed(futures):
            failed += filter(None, [future.result()])
            try:
                collect(futures[future], root, pages)
            except SystemExit as error:  # the other commands continue
                failed.append(str(error))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()  # has no effect on a process that has ended
        for process in processes:
            process.wait()
    return failed


# Run folders


def show_runs(root: Path, columns: tuple[str, ...], out: Path | None) -> None:
    """Print a table and write figures of the finished runs in a folder, for each task, preset and data set."""
    experiments: dict[str, list[Group]] = {}
    for group in grouped(root):
        experiments.setdefault(group.experiment, []).append(group)
    if not experiments:
        raise SystemExit(f"{root} has no finished run. Fix: train one first; python -m tasks lists the tasks.")
    if out and len(experiments) > 1:
        raise SystemExit(
            f"--out names one figure, but {root} has {sorted(experiments)}. Fix: show one of their folders."
        )
    for name, groups in experiments.items():
        tell_apart(groups, TITLES)
        text, figures = show(groups, columns, name)
        print(text)
        for suffix, figure in figures.items():
            path = out or root / f"{name}.png"
            path = path.with_stem(path.stem + suffix)
            write_figure(figure, path)
            print(f"figure: {path}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("list", "run", "collect", "draw", "show"), default="list")
    parser.add_argument("names", nargs="*", metavar="name", help="experiments [all]; for show: folders of runs [runs]")
    parser.add_argument("--yes", action="store_true", help="run without asking")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="number of simultaneous commands [2]")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder of the runs [{RUNS}]")
    parser.add_argument("--pages", type=Path, default=PAGES, help=f"folder of the CSV files with the results [{PAGES}]")
    parser.add_argument("--columns", default=SHOWN, help=f"for show: prefixes of the results to show [{SHOWN}]")
    parser.add_argument(
        "--out", type=Path, help="for show: figure file [FOLDER/NAME.png]; for draw: folder [docs/_results]"
    )
    options = parser.parse_intermixed_args(argv)
    if options.action == "show":
        return options
    if not options.pages.is_dir():
        parser.error(f"there is no folder {options.pages}. Fix: run this in a checkout, or --pages FOLDER.")
    known = dict.fromkeys(key.partition("/")[0] for key in COMMANDS)
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"unknown experiments {unknown}; expected some of {', '.join(known)}")
    options.names = options.names or sorted({*known, *read_results(options.pages)})
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """List, run, collect or draw experiments, or show run folders."""
    options = parse(argv)
    names, root, pages = options.names, options.runs, options.pages
    logging.basicConfig(format="%(message)s")
    if options.action == "show":
        for folder in names or ["runs"]:
            show_runs(Path(folder), tuple(options.columns.split(",")), options.out)
    elif options.action == "draw":
        written = write_results(pages, options.out or pages.parent / "_results")
        print(f"{len(written)} tables and figures are in {written[0].parent}")
    elif options.action == "collect":
        for name in names:
            print(f"{name}: {collect(name, root, pages)} rows")
    else:
        print(listing(names, root, pages))
    if options.action != "run":
        return
    if not options.yes:
        ask(names, root, options.jobs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C
    try:
        failed = run(names, root, pages, options.jobs)
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. Fix: repeat the command to resume.") from None
    if failed:
        raise SystemExit("\n".join(failed))
    print("All commands are done.")


if __name__ == "__main__":
    main()
