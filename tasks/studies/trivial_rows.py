"""Trivial rows: errors of a constant and of the last value on the irregular series, without training.

``errors.csv`` has a row for each data set and model, and a column for each error:

- plane vibration, both splits: the mean of the training rows ("constant") and the last sample ("last value"), squared
  error of the eight rows ahead, standardised.
- Walker2D: the mean training frame and the last frame, squared error of the next frame in the data's units.
- speech: the mean training frame and the last frame, squared error of the next frame.
- classification, three seeds as in tasks.classification: the share of each class in the training series, as
  probabilities ("constant"); accuracy and cross-entropy of the test series.

Data that is not there is left out, and named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks import classification, plane_vibration, speech, walker2d
from tasks.common.config import Options, option, parse
from tasks.common.run import write_study
from tasks.data.f16 import read_plane_vibration

SETS: dict[str, dict[str, Any]] = {  # of classification, the options of the page Results
    "clinic": {},
    "ItalyPowerDemand": {"drop": 0.5},
    "BasicMotions": {"drop": 0.5, "samples": 50},
    "ACSF1": {},
    "PLAID": {},
    "PigCVP": {},
}
Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class TrivialOptions(Options):
    """Options of the study."""

    seeds: int = option(3, "splits of the sets of classification, counting up from 0")
    out: str = option("runs/trivial_rows", "folder for the table")


def of_vibration() -> Iterator[Row]:
    """Yield the rows of plane vibration."""
    record, source = read_plane_vibration()
    for protocol, split in (("honest", "phase-disjoint split"), ("paper", "the paper's split")):
        splits = plane_vibration.Splits.from_record(record, protocol)
        x, _, target = splits.batches["test"]
        mean = splits.batches["train"][0].mean((0, 1))
        for model, guess in (("constant", mean.expand_as(target)), ("last value", x[:, -1:].expand_as(target))):
            squares = (guess - target).square()
            about: Row = {"case": f"vibration ({source}), {split}", "size": len(x), "model": model, "seed": ""}
            found = {"test_forecast_mse": squares.mean(), "test_acceleration_mse": squares[..., 2:].mean()}
            yield about | {name: value.item() for name, value in found.items()}


def of_walking() -> Iterator[Row]:
    """Yield the rows of Walker2D."""
    splits = walker2d.Splits.from_options(walker2d.WalkerConfig(model="gru"))
    x, _, target = splits.test
    for model, guess in (("constant", splits.mean.expand_as(target)), ("last value", x)):
        about: Row = {"case": f"Walker2D ({splits.source})", "size": len(x), "model": model, "seed": ""}
        yield about | {"test_mse": (guess - target).square().mean().item()}


def of_speech() -> Iterator[Row]:
    """Yield the rows of speech."""
    batches, source = speech.read_batches(speech.SpeechConfig(model="plain"))
    errors = speech.yardsticks(batches["train"], batches["test"])
    for model, name in (("constant", "mean_mse"), ("last value", "repeat_mse")):
        about: Row = {"case": f"speech ({source})", "size": len(batches["test"][0]), "model": model, "seed": ""}
        yield about | {"test_mse": errors[name]}


def of_classes(dataset: str, seeds: int) -> Iterator[Row]:
    """Yield the rows of a set of classification: a constant has the classes' shares of the training series."""
    for seed in range(seeds):
        config = classification.ClassificationConfig(model="gru", dataset=dataset, seed=seed, **SETS[dataset])
        data, names = classification.load(config)
        labels: dict[str, Tensor] = {part: samples[-1] for part, samples in data.items()}
        counts = torch.bincount(labels["train"], minlength=len(names)).double()
        shares, test = (counts + 1) / (counts + 1).sum(), labels["test"]  # one more of each: no class is impossible
        about: Row = {"case": dataset, "size": len(test), "model": "constant", "seed": seed}
        right = (test == shares.argmax()).double().mean()
        yield about | {"test_accuracy": right.item(), "test_loss": -shares[test].log().mean().item()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all that has its data, and write the table."""
    options = parse(TrivialOptions, {}, __doc__, argv)
    sources: dict[str, Callable[[], Iterator[Row]]] = {
        "plane vibration": of_vibration,
        "Walker2D": of_walking,
        "speech": of_speech,
        **{name: lambda name=name: of_classes(name, options.seeds) for name in SETS},  # type: ignore[misc]
    }
    rows: list[Row] = []
    for name, source in sources.items():
        try:
            rows += source()
        except (FileNotFoundError, ValueError) as error:
            print(f"{name} is left out: {error}")
    names = dict.fromkeys(name for row in rows for name in row)
    table = [{name: row.get(name, "") for name in names} for row in rows]
    print(*rows, sep="\n")
    write_study(Path(options.out), "errors", table, task="trivial_rows")


if __name__ == "__main__":
    main()
