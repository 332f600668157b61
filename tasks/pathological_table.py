"""Who needs Hessian-free optimization: eleven models with an optimizer each, on problems of long memory.

The runs are those of ``tasks.pathological``, on addition, temporal order and the memorization of five bits, at T = 50,
100 and 200, within an equal budget of seconds of one core. Finished runs are skipped and stopped ones resumed, so the
command can be ended and repeated at any time. In the end, or with --report at any time, it prints the table of the
finished ones among the runs that its options name, and writes:

- ``pathological.md`` and ``pathological.csv``: how many runs succeeded, and the median of their seconds; where none
  did, the median share of test sequences that were wrong in the end.
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
from typing import Any

import pandas as pd

from tasks.common.figures import panels
from tasks.common.files import markdown, read_json, write_whole
from tasks.common.run import run_side_by_side
from tasks.data.pathological import TITLES as PROBLEM_TITLES
from tasks.pathological import PathologicalConfig, folder_name, pair_title, train

logger = logging.getLogger("tasks.pathological_table")
PROBLEMS = ("addition", "temporal_order", "memorization_5")
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
Run = tuple[str, PathologicalConfig]  # a pair, and the options of one of its runs


def runs_of(options: argparse.Namespace) -> Iterator[Run]:
    """The runs, in the order in which they are made: of a seed the short problems first."""
    seeds = range(options.seed, options.seed + options.seeds)
    shared = {name: getattr(options, name) for name in ("seconds", "hidden", "test_size", "jobs")}
    for seed, length, problem, pair in itertools.product(seeds, options.lengths, options.problems, options.pairs):
        names = {"problem": problem, "length": length, "seed": seed, "device": "cpu"}
        config = PathologicalConfig(**names, **shared, **PAIRS[pair])
        yield pair, dataclasses.replace(config, out=str(options.out / folder_name(config)))


def has_ended(config: PathologicalConfig) -> bool:
    """Whether a run has succeeded, diverged, or spent its seconds."""
    path = Path(config.out) / "summary.json"
    summary = read_json(path) if path.exists() else {"solved": False, "diverged": False, "seconds": 0.0}
    return bool(summary["solved"] or summary["diverged"]) or float(summary["seconds"]) >= config.seconds


# The table


def read_runs(options: argparse.Namespace) -> pd.DataFrame:
    """The runs that have ended, a row each."""
    rows = []
    for pair, config in runs_of(options):
        if has_ended(config):
            summary = read_json(Path(config.out) / "summary.json")
            about = {"problem": config.problem, "length": config.length, "pair": pair, "folder": config.out}
            found = {name: summary[name] for name in ("parameters", "seconds", "test_error")}
            rows.append({**about, **found, "solved": summary["solved"] and summary["seconds"] <= options.seconds})
    return pd.DataFrame(rows)


def tabulate(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each problem, T and pair, in the order of the options."""
    rows = []
    for (problem, length, pair), found in runs.groupby(["problem", "length", "pair"], sort=False):
        about = {"problem": problem, "length": length, "pair": pair, "parameters": found["parameters"].iloc[0]}
        counts = {"runs": len(found), "solved": found["solved"].sum()}
        medians = {"seconds": found["seconds"][found["solved"]].median(), "test_error": found["test_error"].median()}
        rows.append({**about, **counts, **medians})
    order = {name: rank for rank, name in enumerate((*PROBLEM_TITLES, *PAIRS))}
    by = ["problem", "length", "pair"]
    return pd.DataFrame(rows).sort_values(by, key=lambda column: column.replace(order), kind="stable")


def in_columns(table: pd.DataFrame) -> list[dict[str, str]]:
    """The table for people: a row for each pair, a column for each problem and T."""
    cells = {(row["pair"], row["problem"], row["length"]): cell(row) for row in table.to_dict("records")}
    columns = list(dict.fromkeys((problem, length) for _, problem, length in cells))
    names = [f"{PROBLEM_TITLES[problem]}, T = {length}" for problem, length in columns]
    rows = {pair: [cells.get((pair, *column), "") for column in columns] for pair in PAIRS}
    return [{"": pair_title(pair), **dict(zip(names, row, strict=True))} for pair, row in rows.items() if any(row)]


def cell(row: Mapping[Any, Any]) -> str:
    """Successes of all runs, and the median of their seconds or, without any, of the errors."""
    share = f"{row['solved']}/{row['runs']}"
    return f"{share}, {row['seconds']:.0f} s" if row["solved"] else f"{share}, {100 * row['test_error']:.0f} % wrong"


# Figures


def draw(runs: pd.DataFrame, budget: float, path: Path) -> None:
    """The seconds of every run that succeeded, a panel for each problem and T."""
    problems = [name for name in PROBLEM_TITLES if name in set(runs["problem"])]
    lengths = sorted(set(runs["length"]))
    pairs = [pair for pair in PAIRS if pair in set(runs["pair"])]
    size = 2.5 + 3 * len(lengths), 1 + (0.25 * len(pairs) + 0.5) * len(problems)
    shared: dict[str, Any] = {"legend": False, "sharex": True, "sharey": True}
    with panels(path, len(problems), len(lengths), size=size, **shared) as (figure, axes):
        for ax, (problem, length) in zip(axes.flat, itertools.product(problems, lengths), strict=True):
            for place, pair in enumerate(pairs):
                found = runs[(runs["problem"] == problem) & (runs["length"] == length) & (runs["pair"] == pair)]
                solved = found["seconds"][found["solved"]]
                ax.plot(solved, [place] * len(solved), "o", color=f"C{place % 10}", ms=6, alpha=0.8)
                if len(found):
                    share = f"{len(solved)}/{len(found)}"
                    ax.text(1.15 * budget, place, share, va="center", fontsize="small", color="0.2")
            ax.set_title(f"{PROBLEM_TITLES[problem]}, T = {length}", fontsize="medium")
            ax.axvline(budget, color="0.6", lw=1)
            ax.grid(axis="y", color="0.92")
            ax.set_axisbelow(True)
        axes[0, 0].set(xscale="log", xlim=(None, 2.6 * budget), ylim=(len(pairs) - 0.5, -0.5))
        for ax in axes[:, 0]:
            ax.set_yticks(range(len(pairs)), map(pair_title, pairs), fontsize="small")
        said = f"seconds of training until fewer than 1 % are wrong\nright of the line: how many runs in {budget:g} s"
        figure.supxlabel(said, fontsize="medium")


def draw_damping(runs: pd.DataFrame, path: Path) -> None:
    """Loss, error, lambda and rho over the iterations of the tanh RNN, with structural damping and without.

    There is a row for each problem, at the shortest T of which both were run; without any there is no figure.
    """
    kinds = {DAMPED: ("C0", "structural damping"), UNDAMPED: ("C3", "without")}
    found = runs[runs["pair"].isin(list(kinds))]
    both = [key for key, of_key in found.groupby(["problem", "length"]) if of_key["pair"].nunique() == 2]
    shortest = {problem: min(length for other, length in both if other == problem) for problem, _ in both}
    if not shortest:
        return
    with panels(path, len(shortest), len(CURVES), size=(14, 0.6 + 2.6 * len(shortest))) as (_, axes):
        for line, (problem, length) in zip(axes, shortest.items(), strict=True):
            for run in found[(found["problem"] == problem) & (found["length"] == length)].to_dict("records"):
                metrics = pd.read_csv(Path(run["folder"]) / "metrics.csv")
                color, label = kinds[run["pair"]]
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


# The command


def report(options: argparse.Namespace) -> None:
    """Print the table of the finished runs, and write it and its figures."""
    root, runs = options.out, read_runs(options)
    if runs.empty:
        logger.warning("no finished run of the pathological problems under %s", root)
        return
    table = tabulate(runs)
    print(markdown(in_columns(table)))
    write_whole(root / "pathological.md", (markdown(in_columns(table)) + "\n").encode())
    write_whole(root / "pathological.csv", table.to_csv(index=False).encode())
    draw(runs, options.seconds, root / "pathological.png")
    draw_damping(runs, root / "damping.png")
    print(f"written to {root}")


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
        for _, config in runs_of(options):
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
    waiting = [config for _, config in runs_of(options) if not (options.report or has_ended(config))]
    failed = run_side_by_side(waiting, train)
    report(options)
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} runs failed"]))


if __name__ == "__main__":
    main()
