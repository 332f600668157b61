"""Momentum and step size of a MomentumLSTM, all pairs of them, on pixel MNIST or speech.

Figure 7 of Nguyen et al., MomentumRNN (2020): test accuracy on MNIST (256 units) and test error on TIMIT (158 units),
the mean of five seeds. Each pair is a run of the task, with its own folder, and the same command goes on with what is
not finished. Options that are not listed here are the task's:

    python -m tasks.studies.momentum_ablation --task pixel_mnist --epochs 10 --train-size 5000

The heat map of the runs stands beside the authors' numbers. Their grids show what the text does not say: on TIMIT the
step size 0.1 alone, with momentum 0, brings 96 % of what the best pair gains over the LSTM (momentum 0, step size 1),
and on MNIST it mostly learns where the input's gain in the long run, s / (1 - mu), is 0.75 or more. How much of the
gain is there without momentum is printed of the runs too. Validation picks the epoch, the numbers are of the test set.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks import pixel_mnist, speech
from tasks.common.config import parse
from tasks.common.figures import panels
from tasks.common.files import read_json
from tasks.common.run import run_side_by_side, write_study
from tasks.models.recurrent import RecurrentConfig

MOMENTA = (0.9, 0.6, 0.3, 0.1, 0.0)
STEP_SIZES = (0.1, 0.3, 0.6, 0.9, 1.0)
Pair = tuple[float, float]  # momentum, step size


@dataclasses.dataclass(frozen=True)
class Judged:
    """What a task is judged by, and what the authors found.

    Attributes:
        module: the task.
        kind: its options.
        metric: entry of a run's summary.
        is_higher_better: as of an accuracy.
        factor: of the metric in the figure, in which the authors' numbers are.
        unit: what they are.
        source: of the authors' numbers: what they were measured on.
        authors: their numbers, rows MOMENTA, columns STEP_SIZES; from plot_code.ipynb of their repository, figure 7.
    """

    module: ModuleType
    kind: type[RecurrentConfig]
    metric: str
    is_higher_better: bool
    factor: float
    unit: str
    source: str
    authors: tuple[tuple[float, ...], ...]


TASKS = {
    "pixel_mnist": Judged(
        pixel_mnist,
        pixel_mnist.PixelMnistConfig,
        "test_accuracy",
        True,
        100.0,
        "test accuracy, %",
        "MNIST, 784 pixels, 256 units, best test epoch of 150, 5 seeds",
        (
            (99.08, 98.90, 98.68, 98.22, 98.24),
            (86.88, 99.08, 99.08, 99.00, 99.03),
            (67.30, 84.17, 65.73, 99.03, 99.03),
            (51.67, 79.25, 84.74, 85.50, 99.07),
            (37.39, 83.58, 83.49, 81.54, 98.90),
        ),
    ),
    "speech": Judged(
        speech,
        speech.SpeechConfig,
        "test_mse",
        False,
        1.0,
        "test MSE",
        "TIMIT, 158 units, best validation epoch of 700, 5 seeds",
        (
            (121.07, 38.92, 45.47, 51.19, 51.66),
            (7.24, 8.84, 10.46, 11.89, 12.25),
            (5.87, 6.89, 8.73, 9.53, 9.86),
            (5.86, 7.05, 8.01, 9.22, 9.61),
            (6.00, 7.10, 7.85, 9.05, 9.33),
        ),
    ),
}


def without_momentum(means: Mapping[Pair, float], is_higher_better: bool) -> str:
    """How much of what the best pair gains over momentum 0, step size 1 is there with momentum 0 already."""
    sign = 1 if is_higher_better else -1
    plain = means.get((0.0, 1.0))
    still = {pair: value for pair, value in means.items() if pair[0] == 0}
    if plain is None or len(still) == len(means):
        return "the gain over an LSTM needs the pair 0, 1 and others with momentum"
    best, alone = (max(found, key=lambda pair: sign * found[pair]) for found in (means, still))
    gain = sign * (means[best] - plain)
    said = f"LSTM (momentum 0, step size 1) {plain:.4g}; best pair {best[0]:g}, {best[1]:g}: {means[best]:.4g}"
    if gain <= 0:
        return f"{said}: no gain"
    share = 100 * abs(means[alone] - plain) / gain  # alone is plain at worst
    return f"{said}; {share:.0f} % of the gain without momentum, at step size {alone[1]:g}: {means[alone]:.4g}"


def of_authors(judged: Judged) -> dict[Pair, float]:
    """The authors' grid by pair."""
    values = itertools.chain.from_iterable(judged.authors)
    return dict(zip(itertools.product(MOMENTA, STEP_SIZES), values, strict=True))


def collect(configs: Sequence[RecurrentConfig], judged: Judged) -> tuple[dict[Pair, list[float]], list[str]]:
    """The metric of the finished runs, by pair, and the folders of those that are not."""
    found: dict[Pair, list[float]] = {}
    missing = []
    for config in configs:
        pair = config.momentum or 0.0, config.step_size or 0.0  # plan() gives both
        summary = Path(config.out) / "summary.json"
        if summary.exists():
            value = judged.factor * float(read_json(summary)[judged.metric])
            found.setdefault(pair, []).append(value)
        else:
            missing.append(config.out)
    return found, missing


def table(found: Mapping[Pair, Sequence[float]], metric: str) -> list[dict[str, float]]:
    """Rows of the runs' numbers."""
    pairs = [{"momentum": mu, "step_size": s, "gain": s / (1 - mu)} for mu, s in found]
    values = [{"seeds": len(x), metric: sum(x) / len(x), "least": min(x), "most": max(x)} for x in found.values()]
    return [pair | value for pair, value in zip(pairs, values, strict=True)]


def draw_grids(grids: Mapping[str, Mapping[Pair, float]], judged: Judged, path: Path) -> None:
    """Draw grids side by side, a color scale each, the numbers in the cells; a pair that is not there is a dash.

    The scale is logarithmic in the error, so that a pair that does not learn does not leave one color for all others.
    """
    from matplotlib.colors import LogNorm

    size, title = (1 + 6.2 * len(grids), 4.6), f"{judged.unit}; yellow is better"
    with panels(path, 1, len(grids), size=size, title=title, legend=False) as (figure, axes):
        for ax, (name, grid) in zip(axes[0], grids.items(), strict=True):
            table = pd.Series(grid).unstack().sort_index(ascending=False)
            values, momenta, steps = table.to_numpy(), table.index, table.columns
            errors = np.maximum(judged.factor - values, 0.01) if judged.is_higher_better else values
            low, high = np.nanmin(errors), np.nanmax(errors)
            shown = ax.imshow(errors, cmap="viridis_r", norm=LogNorm(low, max(high, 1.1 * low)))
            bar = figure.colorbar(shown, ax=ax, label=judged.unit.replace("accuracy", "error"))
            ticks_of_short_axis(bar.ax.yaxis)
            for (row, column), value in np.ndenumerate(values):
                color = "white" if shown.norm(errors[row, column]) > 0.6 else "black"
                said = "-" if np.isnan(value) else f"{value:.4g}"
                ax.text(column, row, said, ha="center", va="center", color=color)
            ax.set_xticks(range(len(steps)), [f"{s:g}" for s in steps])
            ax.set_yticks(range(len(momenta)), [f"{mu:g}" for mu in momenta])
            ax.set(xlabel="step size s", ylabel="momentum mu")
            ax.set_title(name, fontsize="medium")


def parse_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this file, and those of the task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--task", default="pixel_mnist", choices=TASKS, help="what to train on [pixel_mnist]")
    parser.add_argument("--momenta", type=float, nargs="+", default=MOMENTA, help=f"mu {MOMENTA}")
    parser.add_argument("--step-sizes", type=float, nargs="+", default=STEP_SIZES, help=f"s {STEP_SIZES}")
    parser.add_argument("--out", type=Path, help="folder of the runs and the figure [runs/momentum_ablation-TASK]")
    options, rest = parser.parse_known_args(argv)
    for name in ("--model", "--cell", "--momentum", "--step-size"):
        if any(argument.partition("=")[0] == name for argument in rest):
            parser.error(f"{name} is what the ablation sets. Fix: leave it out, or --momenta and --step-sizes.")
    if not all(0 <= mu < 1 for mu in options.momenta):
        parser.error(f"--momenta must be in [0, 1), got {options.momenta}")
    if not all(s > 0 for s in options.step_sizes):
        parser.error(f"--step-sizes must be positive, got {options.step_sizes}")
    return options, rest


def plan(options: argparse.Namespace, base: RecurrentConfig, folder: Path) -> list[RecurrentConfig]:
    """A run for each pair and seed."""
    return [
        dataclasses.replace(
            base, momentum=mu, step_size=s, seed=seed, seeds=1, out=str(folder / f"momentum{mu:g}-step{s:g}-seed{seed}")
        )
        for seed in range(base.seed, base.seed + base.seeds)
        for mu, s in itertools.product(dict.fromkeys(options.momenta), dict.fromkeys(options.step_sizes))
    ]


def report(found: Mapping[Pair, Sequence[float]], task: str, base: RecurrentConfig, folder: Path) -> None:
    """Write and draw the grid beside the authors', and print how much of the gain needs no momentum."""
    judged = TASKS[task]
    means = {pair: sum(values) / len(values) for pair, values in found.items()}
    authors = of_authors(judged)
    said = {
        "runs": without_momentum(means, judged.is_higher_better),
        "authors": without_momentum(authors, judged.is_higher_better),
    }
    print("\n".join(f"{name}: {sentence}" for name, sentence in said.items()))
    about = {"task": f"momentum_ablation-{task}", "base": dataclasses.asdict(base), "metric": judged.metric}
    rows = table(found, judged.unit)
    write_study(folder, "ablation", rows, **about, authors=judged.source, found=said)
    ours = f"these runs: {base.hidden} units, {base.epochs} epochs, seeds: {base.seeds}"
    draw_grids({ours: means, judged.source: authors}, judged, folder / "ablation.png")
    print(f"figure: {folder / 'ablation.png'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing of the grid; write ``ablation.csv``, ``.json`` and ``.png`` of what is there."""
    options, rest = parse_options(argv)
    judged, folder = TASKS[options.task], options.out or Path("runs") / f"momentum_ablation-{options.task}"
    module = judged.module
    base = parse(judged.kind, module.PRESETS, module.__doc__ or "", ["--model", "momentum", *rest])
    configs = plan(options, base, folder)
    failed = run_side_by_side(configs, module.train)
    found, missing = collect(configs, judged)
    if len(failed) > len(missing):  # a run that was refused leaves the summary of the one that is there
        raise SystemExit(f"{folder} holds runs with other options, as said above. Fix: --out another-folder.")
    if found:
        report(found, options.task, base, folder)
    if missing:
        raise SystemExit("\n".join(["not finished:", *missing]))


if __name__ == "__main__":
    main()
