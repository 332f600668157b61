"""Classification of irregular time series: five ODE-RNNs, recurrent networks, a neural CDE, boosting and MiniRocket.

--dataset clinic is simulated: patients with static features and six time-dependent features, most of whose values are
missing. One patient in five deteriorates. The other data sets are from the UEA and UCR archive, as shipped with Python
packages; see tasks/data/labelled_series.py. For your own data use ``hbnode.estimators.SeriesClassifier``.

All models have the same protocol. The seed determines a stratified 60/20/20 split of all series, so results are not
comparable with those on the archive's own split. A fraction --drop of the values is removed at random, and at most
--samples random time points of each series are used. Each network has about --parameters parameters. The test uses the
weights of the best validation epoch. Boosting and the logistic regressions (on summary statistics, on MiniRocket's
features, on the last values) are fitted with four settings, of which validation selects one. The model "constant"
predicts the class frequencies. The reported seconds are the time of all training steps. The time unit is estimated from
the data, unless --time-unit gives one.

predictions.csv contains the predicted probabilities for the test series. tasks.results computes from it the differences
between models, with bootstrap intervals.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hbnode.data import Series
from hbnode.nn.sequences import fitted_unit
from tasks.common.config import MODELS, SCHEDULES, option
from tasks.common.files import write_table
from tasks.common.run import Run, command
from tasks.common.train import Samples, accuracy, clock, fit
from tasks.data.labelled_series import DATASETS, read_labelled_series, thinned
from tasks.models.baselines import BASELINES, IrregularSeriesConfig
from tasks.models.classifiers import CLASSIFIERS, SHALLOW, fit_shallow, make_classifier


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(IrregularSeriesConfig):
    """Command-line options of the classification task."""

    models = CLASSIFIERS
    positive = "parameters"

    epochs: int = option(30, "passes over the training series", may_change=True)
    lr: float = option(5e-3, "Adam's learning rate")
    schedule: str = option("cosine", "learning-rate schedule, as for the other tasks", SCHEDULES)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    time_unit: float = option(0.0, "time unit of the models, in units of the data's times; 0: ten median gaps")
    dataset: str = option("clinic", "the data set", DATASETS)
    drop: float = option(0.0, "share of the values to drop at random", below=1)
    samples: int = option(100, "largest number of times of a series, chosen at random; 0: all")
    parameters: int = option(5000, "approximate number of parameters of a network")
    pool: str = option("last", "output features that the classification head takes as input", ("last", "last and mean"))
    dropout: float = option(0.0, "dropout of a network's inputs and features", below=1)

    def try_out(self, model: str) -> None:
        """Solve a small ODE-RNN with these options, or check that the package of another model is installed."""
        if model in MODELS or model in BASELINES:
            super().try_out(model)
        if model == "minirocket" and importlib.util.find_spec("aeon") is None:
            raise ValueError("--model minirocket needs aeon. Fix: pip install aeon.")


def load(config: ClassificationConfig) -> tuple[dict[str, Samples], list[str]]:
    """Return a dictionary with the training, validation and test data, and the names of the classes.

    Each data set is a tuple (x, t, mask, lengths, static features, class).
    """
    series, labels, names = read_labelled_series(config.dataset)
    series = thinned(series, config.drop, config.samples, config.seed)
    parts = split(labels, config.seed)
    return {
        name: as_samples(series.select(index), labels[index], series.x.shape[1]) for name, index in parts.items()
    }, names


def split(labels: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the indices of the training, validation and test series: 60, 20 and 20 % of each class."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    for label in labels.unique():
        places = (labels == label).nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=generator)]
        held = max(1, round(0.2 * len(places)))
        cut = places.split([len(places) - 2 * held, held, held])
        for name, part in zip(parts, cut, strict=True):
            parts[name].append(part)
    return {name: torch.cat(part) for name, part in parts.items()}


def as_samples(series: Series, labels: Tensor, total: int) -> Samples:
    """Return the series as tensors, padded to ``total`` time points."""
    static = series.x.new_zeros(len(series), 0) if series.static is None else series.static
    missing = (0, 0, 0, total - series.x.shape[1])
    x = nn.functional.pad(series.x, missing, value=torch.nan)
    mask = nn.functional.pad(series.mask, missing, value=False)
    t = torch.cat([series.t, series.t[:, -1:].expand(-1, missing[-1])], 1)
    return x, t, mask, series.lengths, static, labels


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean negative log-likelihood of the labels, and the accuracy."""
    *inputs, labels = batch
    longest = int(inputs[3].max())
    x, t, mask = (part[:, :longest] for part in inputs[:3])
    logits = model(x, t, mask, *inputs[3:])
    return nn.functional.cross_entropy(logits, labels), accuracy(logits, labels)


def probabilities(model: nn.Module, data: Samples) -> np.ndarray:
    """Return the predicted class probabilities, an array (series, classes)."""
    model.eval()
    with torch.no_grad():
        parts = [
            model(*batch).double().softmax(1) for batch in zip(*(part.split(512) for part in data[:-1]), strict=True)
        ]
    return torch.cat(parts).cpu().numpy()


def scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracy, the mean negative log-likelihood, and with two classes the AUROC."""
    from sklearn.metrics import log_loss, roc_auc_score

    classes = range(predicted.shape[1])
    found = {
        "test_accuracy": float((predicted.argmax(1) == labels).mean()),
        "test_loss": float(log_loss(labels, predicted, labels=list(classes))),
    }
    return found | ({"test_auroc": float(roc_auc_score(labels, predicted[:, 1]))} if len(classes) == 2 else {})


def train_shallow(run: Run, config: ClassificationConfig, data: dict[str, Samples]) -> np.ndarray:
    """Fit a model without a network, write its single row of metrics, and return the test probabilities."""
    run.begin(config.epochs if run.load_checkpoint() else 0)
    begun = clock(run.workers.device)
    predict = fit_shallow(config.model, data["train"], data["validation"], config.seed)
    seconds = clock(run.workers.device) - begun
    means: dict[str, float] = {}
    for name in ("train", "validation"):
        found = scores(predict(data[name]), data[name][-1].numpy())
        means |= {key.replace("test", name): value for key, value in found.items()}
    run.rows = [{"epoch": config.epochs, **means, "nfe_forward": 0.0, "nfe_backward": 0.0, "seconds": seconds}]
    if not run.is_finished:
        run.save_checkpoint(rows=run.rows)
        run.write_metrics()
    return predict(data["test"])


def train(config: ClassificationConfig) -> None:
    """Train one model with one seed."""
    data, names = load(config)
    kind = f"{config.preset}-{config.dataset}" + ("-mean" if config.pool != "last" else "")
    kind += f"-dropout{config.dropout:g}" if config.dropout else ""
    run = Run("classification", config, f"{kind}-drop{config.drop:g}-{config.model}-seed{config.seed}")
    x, t, mask, lengths, static, _ = data["train"]
    missing = 1 - float(mask.sum()) / (float(lengths.sum()) * x.shape[2])
    parts = "/".join(str(len(part[0])) for part in data.values())
    about = f"{config.dataset}: {parts} series, {x.shape[2]} features, {missing:.0%} missing, {len(names)} classes"
    extra: dict[str, Any] = {}
    model: nn.Module = nn.Module()
    if config.model in SHALLOW:
        run.announce(model, config.model, about)
        predicted = train_shallow(run, config, data)
    else:
        unit = config.time_unit or fitted_unit(t, mask, lengths)
        sizes, options = (len(names), unit, config.parameters), config.rnn_options()
        samples = x, t, mask, lengths, static
        model = make_classifier(config.model, samples, *sizes, options, config.pool, config.dropout)
        run.announce(model, config.model, about, f"unit of time {unit:.4g}")
        extra = fit(
            run, model, data["train"], data["validation"], cross_entropy, held_out="validation", best="validation_loss"
        ) | {"time_unit": unit}
        predicted = probabilities(model, run.workers.to_device(data["test"]))
    labels = data["test"][-1].numpy()
    if not run.is_finished and run.workers.rank == 0:
        rows = [
            {"label": int(y), **{f"p{k}": float(p) for k, p in enumerate(row)}}
            for y, row in zip(labels, predicted, strict=True)
        ]
        write_table(run.folder / "predictions.csv", rows)
    seconds = sum(row["seconds"] for row in run.rows)
    run.finish(model, **scores(predicted, labels), **extra, training_seconds=seconds, data=config.dataset)


main = command(ClassificationConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
