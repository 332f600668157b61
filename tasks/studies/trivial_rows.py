"""Trivial rows: errors of a constant and of the last value on the irregular series, without training.

``errors.csv`` has a row for each data set and model, and a column for each error:

- plane vibration, both splits: the mean of the training rows ("constant") and the last sample ("last value"), squared
  error of the eight rows ahead, standardised.
- Walker2D: the mean training frame and the last frame, squared error of the next frame in the data's units.
- speech: the mean training frame and the last frame, squared error of the next frame.

Data that is not there is left out, and named. tasks.classification has a constant and the last value as models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tasks import plane_vibration, speech, walker2d
from tasks.common.config import Options, option, parse
from tasks.common.run import write_study
from tasks.data.f16 import read_plane_vibration

Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class TrivialOptions(Options):
    """Options of the study."""

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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all that has its data, and write the table."""
    options = parse(TrivialOptions, {}, __doc__, argv)
    sources: dict[str, Callable[[], Iterator[Row]]] = {
        "plane vibration": of_vibration,
        "Walker2D": of_walking,
        "speech": of_speech,
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
