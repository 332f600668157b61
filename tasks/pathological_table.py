"""Who needs Hessian-free optimization: eleven models with an optimizer each, on problems of long memory.

The runs are those of ``tasks.pathological``, on addition, temporal order and the memorization of five bits, at T = 50,
100 and 200, within an equal budget of seconds of one core. What is finished is skipped, and a run that was stopped goes
on where it was, so that the command can be ended and given again at any time. In the end, or with --report at any time,
it prints the table of all finished runs under the folder, and writes:

- ``pathological.md`` and ``pathological.csv``: how many runs succeeded, and the median of their seconds; where none
  did, the median share of test sequences that were wrong in the end. Runs with options of their own have lines of
  their own, which name these.
- ``pathological.png``: the seconds of every run that succeeded.
- ``damping.png``: Hessian-free runs of the tanh RNN with structural damping and without, over iterations.

A run that succeeded in its last iteration, but after more than its budget, counts as a failure. One that ended without
success before the budget of the table is left out.

    python -m tasks.pathological_table --lengths 50,100 --seeds 3 --jobs 1 --out runs/pathological_table
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tasks.common.figures import legend_beside
from tasks.common.files import read_json, write_figure, write_table, write_whole
from tasks.common.sweep import run_side_by_side
from tasks.data.pathological import TITLES as PROBLEM_TITLES
from tasks.pathological import PathologicalConfig, folder_name, pair_name, pair_title, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger("tasks.pathological_table")
PROBLEMS = ("addition", "temporal_order", "memorization_5")
LENGTHS = (50, 100, 200)
DAMPED, UNDAMPED = "tanh-hf", "tanh-hf-undamped"
CURVES = {"train_loss": "loss", "test_error": "share wrong", "damping": "λ", "ratio": "ρ"}
PAIRS: dict[str, dict[str, Any]] = {
    DAMPED: {"model": "tanh", "optimizer": "hf"},
    UNDAMPED: {"model": "tanh", "optimizer": "hf", "structural_damping": 0.0},
    "tanh-adam": {"model": "tanh", "optimizer": "adam"},
    "lstm-adam": {"model": "lstm", "optimizer": "adam"},
    "lstm_chrono-adam": {"model": "lstm_chrono", "optimizer": "adam"},
    "gru-adam": {"model": "gru", "optimizer": "adam"},
    "dtriv-adam": {"model": "dtriv", "optimizer": "adam"},
    "adam_lstm-adam": {"model": "adam_lstm", "optimizer": "adam"},
    "gru-hf": {"model": "gru", "optimizer": "hf"},
    "tanh-soap": {"model": "tanh", "optimizer": "soap"},
    "gru-soap": {"model": "gru", "optimizer": "soap"},
}
OF_HESSIAN_FREE = ("damping", "min_damping", "structural_damping", "max_cg", "curvature_size")
Runs = dict[tuple[str, int, str], list[dict[str, Any]]]  # summaries of finished ones by problem, T and line


def configs(options: argparse.Namespace) -> Iterator[PathologicalConfig]:
    """The runs, in the order in which they are made: of a seed the short problems first."""
    seeds = range(options.seed, options.seed + options.seeds)
    for seed, length, problem, pair in itertools.product(seeds, options.lengths, options.problems, options.pairs):
        config = usual(
            options, problem=problem, length=length, seed=seed, device="cpu", jobs=options.jobs, **PAIRS[pair]
        )
        yield dataclasses.replace(config, out=str(options.out / folder_name(config)))


def usual(options: argparse.Namespace, **own: Any) -> PathologicalConfig:
    """The options of a run as those of the table have them."""
    shared = {name: getattr(options, name) for name in ("seconds", "hidden", "test_size")}
    return PathologicalConfig(clock="cpu", **shared, **own)


def is_done(config: PathologicalConfig) -> bool:
    """Whether a run has succeeded, diverged, or spent its seconds."""
    path = Path(config.out) / "summary.json"
    return path.exists() and has_ended(read_json(path), config.seconds)


def has_ended(summary: Mapping[str, Any], budget: float) -> bool:
    """Whether more seconds, up to those of the budget, would change nothing."""
    return bool(summary["solved"] or summary["diverged"]) or float(summary["seconds"]) >= budget


# Tables


def read_runs(options: argparse.Namespace) -> Runs:
    """The finished runs under the table's folder, in its order; pairs that it does not name come last.

    Raises:
        SystemExit: two runs have the same options and the same seed.
    """
    runs: Runs = {}
    for path in sorted(options.out.rglob("summary.json")):
        summary = read_json(path)
        if summary["task"] != "pathological":
            continue
        if not has_ended(summary, options.seconds):
            logger.warning(
                "left out: %s ended without success after %.0f seconds of %g",
                path.parent,
                summary["seconds"],
                options.seconds,
            )
            continue
        config = read_json(path.parent / "config.json")
        found = runs.setdefault((config["problem"], config["length"], line_name(config, options)), [])
        for run in found:
            if run["seed"] == config["seed"]:
                raise SystemExit(
                    f"{run['folder']} and {path.parent} are runs of the same options and seed. Fix: move one of them "
                    "out of --out."
                )
        found.append({**summary, "seed": config["seed"], "folder": path.parent})
    problems = list(PROBLEM_TITLES)
    order = sorted(runs, key=lambda key: (problems.index(key[0]), key[1], place_of_line(key[2])))
    return {key: runs[key] for key in order}


def line_name(config: Mapping[str, Any], options: argparse.Namespace) -> str:
    """The pair of a run, and where its options are not those of the table, these: "gru-adam lr=0.1 hidden=50"."""
    pair = pair_name(config)
    own = PAIRS.get(pair, {name: config[name] for name in ("model", "optimizer", "structural_damping")})
    wanted = vars(usual(options, problem=config["problem"], length=config["length"], **own).filled())
    unused = {"seed", "preset", *(() if config["optimizer"] == "hf" else OF_HESSIAN_FREE)}
    others = [
        f"{field.name}={config[field.name]}"
        for field in dataclasses.fields(PathologicalConfig)
        if field.name in config.keys() - unused
        and not field.metadata["may_change"]
        and config[field.name] != wanted[field.name]
    ]
    return " ".join([pair, *others])


def line_title(line: str) -> str:
    """What it is called in the table and the figure."""
    pair, *others = line.split(" ")
    return ", ".join([pair_title(pair), *others])


def rows(runs: Runs, budget: float) -> list[dict[str, Any]]:
    """A row for each problem, T and line."""
    table = []
    for (problem, length, line), found in runs.items():
        pair, _, others = line.partition(" ")
        seconds = [run["seconds"] for run in found if succeeded(run, budget)]
        about = {"problem": problem, "length": length, "pair": pair, "options": others}
        about["parameters"] = found[0]["parameters"]
        counts = {"runs": len(found), "solved": len(seconds)}
        median = float(np.median(seconds)) if seconds else ""
        error = float(np.median([run["test_error"] for run in found]))
        table.append({**about, **counts, "seconds": median, "test_error": error})
    return table


def succeeded(run: Mapping[str, Any], budget: float) -> bool:
    """Whether a run solved its problem within so many seconds."""
    return bool(run["solved"]) and float(run["seconds"]) <= budget


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown: a line for each pair, a column for each problem and T."""
    columns = list(dict.fromkeys((row["problem"], row["length"]) for row in table))
    cells = {(row["problem"], row["length"], line_of(row)): cell(row) for row in table}
    names = [f"{PROBLEM_TITLES[problem]}, T = {length}" for problem, length in columns]
    lines = ["| " + " | ".join(["", *names]) + " |", "|---" * (len(columns) + 1) + "|"]
    for line in sorted(set(map(line_of, table)), key=place_of_line):
        of_it = [cells.get((problem, length, line), "") for problem, length in columns]
        lines.append("| " + " | ".join([line_title(line), *of_it]) + " |")
    return "\n".join(lines)


def line_of(row: Mapping[str, Any]) -> str:
    """The line of a row, as :func:`line_name` has it."""
    return f"{row['pair']} {row['options']}".strip()


def cell(row: Mapping[str, Any]) -> str:
    """Successes of all runs, and the median of their seconds or, without any, of the errors."""
    of_all = f"{row['solved']}/{row['runs']}"
    return f"{of_all}, {row['seconds']:.0f} s" if row["solved"] else f"{of_all}, {100 * row['test_error']:.0f} % wrong"


def place_of_line(line: str) -> tuple[int, str]:
    """Its place in tables and figures."""
    pair = line.partition(" ")[0]
    return (list(PAIRS).index(pair) if pair in PAIRS else len(PAIRS)), line


# Figures


def draw(runs: Runs, budget: float, path: Path) -> None:
    """The seconds of every run that succeeded, a panel for each problem and T."""
    import matplotlib.pyplot as plt

    problems = list(dict.fromkeys(problem for problem, _, _ in runs))
    lengths = sorted({length for _, length, _ in runs})
    lines = sorted({line for *_, line in runs}, key=place_of_line)
    size = 2.5 + 3 * len(lengths), 1 + (0.25 * len(lines) + 0.5) * len(problems)
    figure, axes = plt.subplots(
        len(problems), len(lengths), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for (row, problem), (column, length) in itertools.product(enumerate(problems), enumerate(lengths)):
        ax = axes[row][column]
        for place, line in enumerate(lines):
            draw_line(ax, runs.get((problem, length, line), []), place, budget)
        if not any(key[:2] == (problem, length) for key in runs):
            ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", va="center", color="0.4")
        ax.set_title(f"{PROBLEM_TITLES[problem]}, T = {length}", fontsize="medium")
        ax.axvline(budget, color="0.6", lw=1)
        ax.grid(axis="y", color="0.92")
        ax.set_axisbelow(True)
    axes[0][0].set(xscale="log", xlim=(None, 2.6 * budget), ylim=(len(lines) - 0.5, -0.5))
    for ax in axes[:, 0]:
        ax.set_yticks(range(len(lines)), [line_title(line) for line in lines], fontsize="small")
    said = f"seconds of training until fewer than 1 % are wrong\nright of the line: how many runs in {budget:g} s"
    figure.supxlabel(said, fontsize="medium")
    write_figure(figure, path)


def draw_line(ax: Axes, found: Sequence[Mapping[str, Any]], place: int, budget: float) -> None:
    """A point for each run of a line, and how many of all succeeded."""
    solved = [run["seconds"] for run in found if succeeded(run, budget)]
    color = f"C{place % 10}"
    ax.plot(solved, [place] * len(solved), "o", color=color, ms=6, alpha=0.8)
    if found:
        ax.text(1.15 * budget, place, f"{len(solved)}/{len(found)}", va="center", fontsize="small", color="0.2")


def draw_damping(runs: Runs, path: Path) -> bool:
    """Loss, error, lambda and rho over the iterations of the tanh RNN, with structural damping and without.

    There is a row for each problem, at the shortest T of which both were run; false if there is none.
    """
    import matplotlib.pyplot as plt

    both = [key[:2] for key in runs if key[2] == DAMPED and (*key[:2], UNDAMPED) in runs]
    shortest = {problem: min(length for other, length in both if other == problem) for problem, _ in both}
    if not shortest:
        return False
    figure, axes = plt.subplots(
        len(shortest), len(CURVES), figsize=(14, 0.6 + 2.6 * len(shortest)), squeeze=False, layout="constrained"
    )
    for line, (problem, length) in zip(axes, shortest.items(), strict=True):
        for pair, color, label in ((DAMPED, "C0", "structural damping"), (UNDAMPED, "C3", "without")):
            for run in runs[problem, length, pair]:
                metrics = pd.read_csv(Path(run["folder"]) / "metrics.csv")
                for ax, name in zip(line, CURVES, strict=True):
                    ax.plot(metrics["epoch"], metrics[name], color=color, label=label, lw=1, alpha=0.8)
        for ax, (name, said) in zip(line, CURVES.items(), strict=True):
            ax.set(ylabel=said, xlabel="iteration")
            if name in ("train_loss", "damping"):
                ax.set_yscale("log")
            if name == "ratio":
                ax.set_ylim(-0.5, 2)
                for threshold in (0.25, 0.75):
                    ax.axhline(threshold, color="0.6", lw=0.8, ls=":")
        line[0].set_title(f"{PROBLEM_TITLES[problem]}, T = {length}", fontsize="medium", loc="left")
    legend_beside(figure)
    write_figure(figure, path)
    return True


# The command


def report(options: argparse.Namespace) -> None:
    """Print the table of the finished runs under its folder, and write it and its figures there."""
    root, budget = options.out, options.seconds
    runs = read_runs(options)
    if not runs:
        logger.warning("no finished run of the pathological problems under %s", root)
        return
    table = rows(runs, budget)
    text = markdown(table)
    print(text)
    write_whole(root / "pathological.md", (text + "\n").encode())
    write_table(root / "pathological.csv", table)
    draw(runs, budget, root / "pathological.png")
    written = [root / name for name in ("pathological.md", "pathological.csv", "pathological.png")]
    if draw_damping(runs, root / "damping.png"):
        written.append(root / "damping.png")
    print("written: " + ", ".join(map(str, written)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default="all", help=f"{', '.join(PAIRS)}, with commas between, or all [all]")
    problems = f"{', '.join(PROBLEM_TITLES)}, with commas between; all: {', '.join(PROBLEMS)} [all]"
    parser.add_argument("--problems", default="all", help=problems)
    parser.add_argument("--lengths", default="50,100,200", help="T, several with commas between [50,100,200]")
    parser.add_argument("--seed", type=int, default=0, help="the first seed [0]")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds [3]")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of training of a run [300]")
    parser.add_argument("--hidden", type=int, default=100, help="size of h [100]")
    parser.add_argument("--test-size", type=int, default=10_000, help="test sequences [10000]")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: one a core [1]")
    parser.add_argument("--out", type=Path, default=Path("runs/pathological_table"), help="[runs/pathological_table]")
    parser.add_argument("--report", action="store_true", help="run nothing: the table of what is finished")
    options = parser.parse_args(argv)
    try:
        options.pairs = chosen(options.pairs, PAIRS, PAIRS)
        options.problems = chosen(options.problems, PROBLEM_TITLES, PROBLEMS)
        options.lengths = list(dict.fromkeys(int(length) for length in options.lengths.split(",")))
        if options.seeds < 1:
            raise ValueError(f"--seeds must be positive, got {options.seeds}")
        for config in configs(options):
            config.check()
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    return options


def chosen(names: str, known: Collection[str], every: Iterable[str]) -> list[str]:
    """Those that an option names."""
    found = list(every) if names == "all" else list(dict.fromkeys(names.split(",")))
    for name in found:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs that are not finished, then write the table and its figures."""
    options = parse(argv)
    waiting = [] if options.report else [config for config in configs(options) if not is_done(config)]
    failed = run_side_by_side(waiting, train)
    report(options)
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} runs failed"]))


if __name__ == "__main__":
    main()
