"""Baselines without a network: forecasts by a constant, the last value, ridge regression, MiniRocket and boosting.

``errors.csv`` has a row for each model and a column for each error. ``--data`` selects the task whose test windows are
forecast:

- "vibration" and "vibration-paper", the two splits of plane vibration; the next eight standardised samples are
  forecast.
- "walker2d": the next frame is forecast, in the units of the data.
- "speech": the next frame is forecast, only by the constant and by the last value.

"constant" forecasts the mean of the training data, and "last value" repeats the last sample. The other models forecast
the difference from the last sample. Each is fitted with three settings, and the setting with the best validation error
is tested:

- "ridge": ridge regression on the window, linearly interpolated to a regular grid that ends one step before the
  forecast. The penalty is 0.01, 0.1 or 1 times the variance of the features.
- "minirocket": ridge regression on MiniRocket's features of that grid (Dempster et al., arXiv:2012.08791; from aeon).
  The penalty is 100, 1,000 or 10,000.
- "boosting": gradient boosting, one model for each output, on the last eight samples, their times, and statistics of
  the window. It has 100 trees and the learning rate 0.03, 0.1 or 0.3.

For Walker2D the inputs are the last 16 frames before each prediction. The models are trained on 20,000 random frames
and validated on 5,000. tasks.classification has similar models for classification.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks import plane_vibration, speech, walker2d
from tasks.common.config import Options, option, parse
from tasks.common.run import write_study
from tasks.common.train import Samples
from tasks.data.f16 import read_plane_vibration
from tasks.models.classifiers import summaries

PAST = 16  # number of Walker2D frames before each prediction
RECENT = 8  # number of last samples that boosting takes as input
FITTED = ("ridge", "minirocket", "boosting")
Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class ShallowOptions(Options):
    """Command-line options of the study."""

    data: str = option(
        "vibration", "the task whose windows are forecast", ("vibration", "vibration-paper", "walker2d", "speech")
    )
    seed: int = option(0, "random seed of MiniRocket and of the choice of Walker2D frames")
    out: str = option("runs/shallow_rows", "folder for the table")


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of irregular samples, and the values to forecast after each window.

    Attributes:
        x: samples (N, T, channels), float32, NaN before the first one.
        age: number of time steps from each sample to the first forecast value, (N, T).
        y: the values to forecast, (N, steps ahead, channels).
    """

    x: Tensor
    age: Tensor
    y: Tensor

    @property
    def last(self) -> Tensor:
        """The last sample of each window, in the shape of ``y``."""
        return self.x[:, -1:].expand_as(self.y)

    def grid(self) -> np.ndarray:
        """Return interpolated samples at T, ..., 2, 1 steps before the forecast, (N, T, channels)."""
        x, age = self.x.double().numpy(), self.age.double().numpy()
        first = np.isnan(x[..., 0]).sum(1)
        at = -np.arange(x.shape[1], 0, -1.0)
        rows = [
            np.stack([np.interp(at, -when[i:], one[i:, channel]) for channel in range(x.shape[2])], 1)
            for one, when, i in zip(x, age, first, strict=True)
        ]
        return np.stack(rows)

    def recent(self) -> np.ndarray:
        """Return the last samples, their ages and statistics of each window, (N, features)."""
        count, length = self.x.shape[:2]
        lengths, static = torch.full((count,), length), torch.zeros(count, 0)
        told = summaries(self.x, -self.age, ~self.x.isnan(), lengths, static)
        return np.concatenate([self.x[:, -RECENT:].flatten(1).numpy(), self.age[:, -RECENT:].numpy(), told], 1)


def fit(name: str, train: Windows, validation: Windows, seed: int) -> Callable[[Windows], Tensor]:
    """Fit a model with three settings, and return the forecast function with the smallest validation error.

    Arguments:
        name: one of :data:`FITTED`.
        train: training windows.
        validation: windows that select the setting.
        seed: random seed of MiniRocket.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def penalised(*penalties: float) -> list[Any]:
        return [make_pipeline(StandardScaler(), Ridge(penalty)) for penalty in penalties]

    features: Callable[[Windows], np.ndarray]
    if name == "boosting":
        features = Windows.recent
        trees = [HistGradientBoostingRegressor(learning_rate=rate, random_state=seed) for rate in (0.03, 0.1, 0.3)]
        models = [MultiOutputRegressor(one) for one in trees]
    elif name == "minirocket":
        from aeon.transformations.collection.convolution_based import MiniRocket

        kernels = MiniRocket(2_500, random_state=seed).fit(train.grid().swapaxes(1, 2))
        features = lambda windows: kernels.transform(windows.grid().swapaxes(1, 2))  # noqa: E731
        models = penalised(100, 1_000, 10_000)
    else:
        features = lambda windows: windows.grid().reshape(len(windows.x), -1)  # noqa: E731
        models = penalised(0.01, 0.1, 1)

    def forecast(model: Any, windows: Windows, x: np.ndarray) -> Tensor:
        return windows.last + torch.from_numpy(model.predict(x)).view_as(windows.y)

    x, change, held = features(train), (train.y - train.last).flatten(1).numpy(), features(validation)
    models = [model.fit(x, change) for model in models]
    best = min(models, key=lambda model: (forecast(model, validation, held) - validation.y).square().mean().item())
    return lambda windows: forecast(best, windows, features(windows))


def row(data: str, size: str, model: str) -> Row:
    """Return the columns of a table row that are not errors."""
    return {"case": "", "data": data, "size": size, "model": model, "seed": ""}


def vibration_rows(seed: int, protocol: str = "honest") -> Iterator[Row]:
    """Yield the table rows for one split of plane vibration."""
    record, source = read_plane_vibration()
    splits = plane_vibration.Splits.from_record(record, protocol)
    train, validation, test = (
        Windows(x, t[:, -1:] - t[:, :-1], y)
        for x, t, y in (splits.batches[part] for part in ("train", "validation", "test"))
    )
    forecasts = {"constant": train.x.mean((0, 1)).expand_as(test.y), "last value": test.last}
    forecasts |= {name: fit(name, train, validation, seed)(test) for name in FITTED}
    split = {"honest": "phase-disjoint split", "paper": "the paper's split"}[protocol]
    for model, forecast in forecasts.items():
        squares = (forecast - test.y).square()
        found = {"test_forecast_mse": squares.mean(), "test_acceleration_mse": squares[..., 2:].mean()}
        errors = {name: value.item() for name, value in found.items()}
        yield row(f"vibration ({source}), {split}", f"{len(test.x)} test segments", model) | errors


def windows_of_walking(batch: Samples, count: int = 0, seed: int = 0) -> Windows:
    """Return the frames before each prediction, or before ``count`` randomly chosen predictions."""
    x, t, y = batch
    past = torch.nn.functional.pad(x, (0, 0, PAST - 1, 0), value=torch.nan).unfold(1, PAST, 1).swapaxes(2, 3)
    when = torch.nn.functional.pad(t, (PAST - 1, 0), value=torch.nan).unfold(1, PAST, 1)
    age = ((t.unsqueeze(2) - when) / walker2d.FRAME).round() + 1
    total = y.shape[0] * y.shape[1]
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count] if count else None
    at = torch.arange(total) if chosen is None else chosen
    places = at // y.shape[1], at % y.shape[1]
    return Windows(past[places], age[places], y[places].unsqueeze(1))


def walking_rows(seed: int) -> Iterator[Row]:
    """Yield the table rows for Walker2D."""
    splits = walker2d.Splits.from_options(walker2d.WalkerConfig(model="gru"))
    train, validation = windows_of_walking(splits.train, 20_000, seed), windows_of_walking(splits.validation, 5_000)
    tests = [windows_of_walking(part) for part in zip(*(x.split(200) for x in splits.test), strict=True)]
    target = torch.cat([test.y for test in tests])
    forecasts = {"constant": splits.mean.expand_as(target), "last value": torch.cat([test.last for test in tests])}
    for name in FITTED:
        fitted = fit(name, train, validation, seed)
        forecasts[name] = torch.cat([fitted(test) for test in tests])
    for model, forecast in forecasts.items():
        about = row(f"Walker2D ({splits.source})", f"{len(splits.test[0])} test windows", model)
        yield about | {"test_mse": (forecast - target).square().mean().item()}


def speech_rows(seed: int) -> Iterator[Row]:
    """Yield the table rows for speech."""
    batches, source = speech.read_batches(speech.SpeechConfig(model="plain"))
    errors = speech.trivial_errors(batches["train"], batches["test"])
    for model, name in (("constant", "mean_mse"), ("last value", "repeat_mse")):
        about = row(f"speech ({source})", f"{len(batches['test'][0])} test recordings", model)
        yield about | {"test_mse": errors[name]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the errors, and write the table."""
    options = parse(ShallowOptions, {}, __doc__, argv)
    sources: dict[str, Callable[[int], Iterator[Row]]] = {
        "vibration": vibration_rows,
        "vibration-paper": partial(vibration_rows, protocol="paper"),
        "walker2d": walking_rows,
        "speech": speech_rows,
    }
    rows = list(sources[options.data](options.seed))
    print(*rows, sep="\n")
    write_study(Path(options.out), "errors", rows, task="shallow_rows")


if __name__ == "__main__":
    main()
