"""SeriesClassifier and aeon's MiniRocket on data sets of the UEA and UCR archive, with the archive's own splits.

``accuracy.csv`` has a row for each data set, model and seed: the accuracy on the archive's test set, and the processor
time of one thread to fit and to predict, in seconds. The models are:

- "default": :class:`hbnode.estimators.SeriesClassifier` with its default arguments;
- "features", "rocket", "oscillators", "odernn", "gru": SeriesClassifier with this value of ``kind``;
- "aeon": MiniRocketClassifier of the package aeon, on data sets whose series have equal lengths.

The data sets are shipped with aeon. Results that ``accuracy.csv`` already contains are not computed again, so the
command can be interrupted and repeated.

    python -m tasks.studies.archive --sets GunPoint,ItalyPowerDemand --models default,aeon
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hbnode.data import Series
from tasks.common.config import Options, names_in, option, parse
from tasks.common.files import exit_on
from tasks.common.run import write_study
from tasks.data.labelled_series import AEON, read_split
from tasks.rows import read_csv

MODELS = ("default", "features", "rocket", "aeon", "oscillators", "odernn", "gru")
Part = tuple[Series, Tensor]  # series and their class labels


@dataclasses.dataclass(frozen=True)
class ArchiveOptions(Options):
    """Command-line options of the study."""

    positive = "seeds"

    sets: str = option(",".join(AEON), "data sets, separated by commas")
    models: str = option(",".join(MODELS), "models, separated by commas")
    seeds: int = option(5, "number of seeds for each model, counting from 0")
    out: str = option("runs/archive", "folder for the table")

    def check(self) -> None:
        """Raise an error if a data set or a model is unknown."""
        super().check()
        names_in(self.sets, AEON, "--sets")
        names_in(self.models, MODELS, "--models")


def make(model: str, seed: int) -> Any:
    """Return an unfitted estimator."""
    from hbnode.estimators import SeriesClassifier

    if model == "aeon":
        from aeon.classification.convolution_based import MiniRocketClassifier

        return MiniRocketClassifier(random_state=seed)
    kind: Any = "auto" if model == "default" else model
    return SeriesClassifier(kind, random_state=seed, progress=False)


def measure(model: str, seed: int, train: Part, test: Part) -> dict[str, float]:
    """Return the test accuracy of a model, and the seconds it takes to fit and to predict."""
    inputs: list[Any] = [train[0], test[0]]
    if model == "aeon":
        inputs = [series.x.numpy().swapaxes(1, 2).astype(np.float64) for series in inputs]
    start = time.process_time()
    predicted = make(model, seed).fit(inputs[0], train[1].numpy()).predict(inputs[1])
    seconds = time.process_time() - start
    return {"test_accuracy": float((predicted == test[1].numpy()).mean()), "seconds": seconds}


def compile_kernels() -> None:
    """Compile the kernels of MiniRocket for one and for several channels, before any time is measured."""
    from hbnode.features import RocketFeatures

    for channels in (1, 2):
        RocketFeatures(84).fit_transform(np.random.default_rng(0).normal(size=(2, channels, 9)))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the missing results, and write the table after each."""
    options = parse(ArchiveOptions, {}, __doc__, argv)
    torch.set_num_threads(1)
    path = Path(options.out) / "accuracy.csv"
    rows: list[dict[str, object]] = [{**row} for row in read_csv(path)]
    done = {(row["case"], row["model"], row["seed"]) for row in rows}
    with exit_on(FileNotFoundError):
        splits = {name: read_split(name) for name in names_in(options.sets, AEON, "--sets")}
    compile_kernels()
    models = names_in(options.models, MODELS, "--models")
    for name, model, seed in itertools.product(splits, models, range(options.seeds)):
        train, test = splits[name]
        is_ragged = len(torch.cat([train[0].lengths, test[0].lengths]).unique()) > 1
        if (name, model, str(seed)) in done or (model == "aeon" and is_ragged):
            continue
        about = {"case": name, "model": model, "seed": seed}
        size = {"size": f"{len(train[1])} training and {len(test[1])} test series"}
        rows.append(about | size | measure(model, seed, train, test))
        write_study(Path(options.out), "accuracy", rows, task="archive")
        print(*rows[-1].values(), sep="  ", flush=True)


if __name__ == "__main__":
    main()
