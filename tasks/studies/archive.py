"""The archive's own splits: SeriesClassifier beside aeon's MiniRocket on the sets of the UEA and UCR archive.

``accuracy.csv`` has a row for each set, model and seed: the share of the archive's test set that is right, and the
processor seconds of one thread to fit and predict. Models:

- "default": :class:`hbnode.estimators.SeriesClassifier` as it is;
- "features", "rocket", "oscillators", "odernn", "gru": its kinds;
- "aeon": MiniRocketClassifier of the package aeon, on sets of equal lengths only, which it demands.

Sets are those that aeon ships. What the table in ``--out`` has already is skipped, so that the command can be ended and
given again.

    python -m tasks.studies.archive --sets GunPoint,ItalyPowerDemand --models default,aeon
"""

from __future__ import annotations

import csv
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
from tasks.common.config import Options, option, parse
from tasks.common.files import exit_on
from tasks.common.run import write_study
from tasks.data.labelled_series import AEON, read_split

MODELS = ("default", "features", "rocket", "aeon", "oscillators", "odernn", "gru")
Part = tuple[Series, Tensor]  # series and their classes


@dataclasses.dataclass(frozen=True)
class ArchiveOptions(Options):
    """Options of the study."""

    positive = "seeds"

    sets: str = option("all", f"{', '.join(AEON)}, with commas between, or all")
    models: str = option("all", f"{', '.join(MODELS)}, with commas between, or all")
    seeds: int = option(5, "seeds of each model, counting up from 0")
    out: str = option("runs/archive", "folder for the table")

    def chosen(self) -> tuple[list[str], list[str]]:
        """Return the names of sets and of models."""
        sets = list(AEON) if self.sets == "all" else self.sets.split(",")
        return sets, list(MODELS) if self.models == "all" else self.models.split(",")

    def check(self) -> None:
        """Refuse options that no run can have."""
        super().check()
        for asked, known, name in zip(self.chosen(), (AEON, MODELS), ("sets", "models"), strict=True):
            unknown = [one for one in asked if one not in known]
            if unknown:
                raise ValueError(f"argument --{name}: {unknown[0]!r} is not one of {', '.join(known)}")


def make(model: str, seed: int) -> Any:
    """Return an estimator that is not fitted."""
    from hbnode.estimators import SeriesClassifier

    if model == "aeon":
        from aeon.classification.convolution_based import MiniRocketClassifier

        return MiniRocketClassifier(random_state=seed)
    kind: Any = "auto" if model == "default" else model
    return SeriesClassifier(kind, random_state=seed, progress=False)


def measure(model: str, seed: int, train: Part, test: Part) -> dict[str, float]:
    """Return accuracy and seconds of a model."""
    inputs: list[Any] = [train[0], test[0]]
    if model == "aeon":
        inputs = [series.x.numpy().swapaxes(1, 2).astype(np.float64) for series in inputs]
    start = time.process_time()
    predicted = make(model, seed).fit(inputs[0], train[1].numpy()).predict(inputs[1])
    seconds = time.process_time() - start
    return {"test_accuracy": float((predicted == test[1].numpy()).mean()), "seconds": seconds}


def compile_kernels() -> None:
    """Let aeon compile MiniRocket's kernels, of one and of several channels, so that no model pays for it."""
    from hbnode.features import RocketFeatures

    for channels in (1, 2):
        RocketFeatures(84).fit_transform(np.random.default_rng(0).normal(size=(2, channels, 9)))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing; write the table after each."""
    options = parse(ArchiveOptions, {}, __doc__, argv)
    sets, models = options.chosen()
    torch.set_num_threads(1)
    path = Path(options.out) / "accuracy.csv"
    rows: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
    done = {(row["case"], row["model"], str(row["seed"])) for row in rows}
    with exit_on(FileNotFoundError):
        splits = {name: read_split(name) for name in sets}
    compile_kernels()
    for name, model, seed in itertools.product(sets, models, range(options.seeds)):
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
