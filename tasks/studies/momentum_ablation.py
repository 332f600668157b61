"""Momentum and step size of a MomentumLSTM on speech, all pairs of them.

Figure 7 of Nguyen et al., MomentumRNN (2020): test error on TIMIT (158 units), the mean of five seeds. Each pair is a
run of tasks.speech in its own folder, and the same command continues after an interrupt. The other options are those
of tasks.speech:

    python -m tasks.studies.momentum_ablation --epochs 3

The heat map of the runs is beside the authors' numbers. In these the step size 0.1 without momentum has 96 % of the
gain of the best pair over the LSTM (momentum 0, step size 1). The command prints this share for the runs too.
Validation chooses the epoch; the numbers are of the test set.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks import speech
from tasks.common.config import option, parse
from tasks.common.figures import panels
from tasks.common.files import read_json
from tasks.common.run import run_side_by_side, write_study

MOMENTA = (0.9, 0.6, 0.3, 0.1, 0.0)
STEP_SIZES = (0.1, 0.3, 0.6, 0.9, 1.0)
AUTHORS = (  # rows MOMENTA, columns STEP_SIZES; from plot_code.ipynb of their repository, figure 7
    (121.07, 38.92, 45.47, 51.19, 51.66),
    (7.24, 8.84, 10.46, 11.89, 12.25),
    (5.87, 6.89, 8.73, 9.53, 9.86),
    (5.86, 7.05, 8.01, 9.22, 9.61),
    (6.00, 7.10, 7.85, 9.05, 9.33),
)
SOURCE = "TIMIT, 158 units, best validation epoch of 700, 5 seeds"
Pair = tuple[float, float]  # momentum, step size


@dataclasses.dataclass(frozen=True)
class AblationConfig(speech.SpeechConfig):
    """Options of the study: those of speech, and the grid."""

    momenta: str = option(",".join(map(str, MOMENTA)), "mu, several with commas between")
    step_sizes: str = option(",".join(map(str, STEP_SIZES)), "s, several with commas between")
    out: str = option("runs/momentum_ablation-speech", "folder of the runs and the figure", may_change=True)

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        super().check()
        if self.model != "momentum" or self.cell != "lstm" or self.momentum is not None or self.step_size is not None:
            raise ValueError("the study sets model, cell, momentum and step size. Fix: --momenta and --step-sizes.")
        for config in self.runs():
            config.check()

    def runs(self) -> list[speech.SpeechConfig]:
        """Return a configuration for each seed and pair."""
        grid = [dict.fromkeys(map(float, text.split(","))) for text in (self.momenta, self.step_sizes)]
        described, seeds = dataclasses.asdict(self), range(self.seed, self.seed + self.seeds)
        found = []
        for seed, (mu, s) in itertools.product(seeds, itertools.product(*grid)):
            changes = {"momentum": mu, "step_size": s, "seed": seed, "seeds": 1}
            out = f"{self.out}/momentum{mu:g}-step{s:g}-seed{seed}"
            found.append(speech.SpeechConfig.read(described, **changes, out=out))
        return found


def without_momentum(means: Mapping[Pair, float]) -> str:
    """Return how much of the gain of the best pair over momentum 0, step size 1 there is with momentum 0."""
    plain = means.get((0.0, 1.0))
    still = {pair: value for pair, value in means.items() if pair[0] == 0}
    if plain is None or len(still) == len(means):
        return "the gain over an LSTM needs the pair 0, 1 and others with momentum"
    best, alone = (min(found, key=found.__getitem__) for found in (means, still))
    gain = plain - means[best]
    text = f"LSTM (momentum 0, step size 1) {plain:.4g}; best pair {best[0]:g}, {best[1]:g}: {means[best]:.4g}"
    if gain <= 0:
        return f"{text}: no gain"
    share = 100 * (plain - means[alone]) / gain
    return f"{text}; {share:.0f} % of the gain without momentum, at step size {alone[1]:g}: {means[alone]:.4g}"


def draw_grids(grids: Mapping[str, Mapping[Pair, float]], path: Path) -> None:
    """Draw grids side by side with the numbers in the cells. Each has its own logarithmic scale of colors."""
    from matplotlib.colors import LogNorm

    title = "test MSE; yellow is better"
    with panels(path, 1, len(grids), size=(1 + 6.2 * len(grids), 4.6), title=title, legend=False) as (figure, axes):
        for ax, (name, grid) in zip(axes[0], grids.items(), strict=True):
            table = pd.Series(grid).unstack().sort_index(ascending=False)
            values, momenta, steps = table.to_numpy(), table.index, table.columns
            low, high = np.nanmin(values), np.nanmax(values)
            image = ax.imshow(values, cmap="viridis_r", norm=LogNorm(low, max(high, 1.1 * low)))
            bar = figure.colorbar(image, ax=ax, label="test MSE")
            ticks_of_short_axis(bar.ax.yaxis)
            for (row, column), value in np.ndenumerate(values):
                color = "white" if image.norm(value) > 0.6 else "black"
                ax.text(column, row, "-" if np.isnan(value) else f"{value:.4g}", ha="center", va="center", color=color)
            ax.set_xticks(range(len(steps)), [f"{s:g}" for s in steps])
            ax.set_yticks(range(len(momenta)), [f"{mu:g}" for mu in momenta])
            ax.set(xlabel="step size s", ylabel="momentum mu")
            ax.set_title(name, fontsize="medium")


def main(argv: Sequence[str] | None = None) -> None:
    """Train the missing runs of the grid; write ``ablation.csv``, ``.json`` and ``.png`` of the finished ones."""
    base = parse(AblationConfig, {}, __doc__, argv)
    configs, folder = base.runs(), Path(base.out)
    failed = run_side_by_side(configs, speech.train)
    found: dict[Pair, list[float]] = {}
    for config in configs:
        path = Path(config.out) / "summary.json"
        if path.exists():
            pair = config.momentum or 0.0, config.step_size or 0.0
            found.setdefault(pair, []).append(float(read_json(path)["test_mse"]))
    if found:
        means = {pair: sum(values) / len(values) for pair, values in found.items()}
        authors = dict(zip(itertools.product(MOMENTA, STEP_SIZES), itertools.chain(*AUTHORS), strict=True))
        shares = {"runs": without_momentum(means), "authors": without_momentum(authors)}
        print("\n".join(f"{name}: {text}" for name, text in shares.items()))
        rows = []
        for (mu, s), values in found.items():
            about = {"momentum": mu, "step_size": s, "gain": s / (1 - mu), "seeds": len(values)}
            rows.append(about | {"test MSE": means[mu, s], "least": min(values), "most": max(values)})
        described = {"task": "momentum_ablation-speech", "base": dataclasses.asdict(base), "metric": "test_mse"}
        write_study(folder, "ablation", rows, **described, authors=SOURCE, found=shares)
        ours = f"these runs: {base.hidden} units, {base.epochs} epochs, seeds: {base.seeds}"
        draw_grids({ours: means, SOURCE: authors}, folder / "ablation.png")
        print(f"figure: {folder / 'ablation.png'}")
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} runs failed"]))


if __name__ == "__main__":
    main()
