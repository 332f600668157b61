"""Functions that load results in ways that :func:`tasks.rows.runs` and :func:`tasks.rows.study` do not cover."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common.files import read_json
from tasks.data.recall import IGNORED, Bindings
from tasks.rows import Group, Reader, Row, RunFolder, environment, grouped, number, read_csv, renamed, run_folders, runs

Predicted = dict[object, tuple[np.ndarray, np.ndarray]]  # seed -> (labels, predicted class probabilities)


def pair_of(config: Mapping[str, Any]) -> str:
    """Return the label of a model and its optimizer on the pages."""
    pair = f"{config['model']} {config['optimizer']}"
    damping = ", structural damping" if config["structural_damping"] else ", undamped"
    return pair + damping if pair == "tanh hf" else pair


def positions_of(config: Mapping[str, Any]) -> str:
    """Return the label of a model. For softmax attention it includes the kind of position encoding."""
    kind = "rotary" if config["positions"] == "auto" else config["positions"]
    return f"softmax, {kind}" if config["model"] == "softmax" else str(config["model"])


def images_per_second(folder: Path) -> Iterator[Row]:
    """Yield the speed of softmax attention in images per second, and the relative speed of the other models."""
    path = folder / "throughput.json"
    if path.exists():
        found = read_json(path)
        for row in found["rows"]:
            metric = "images_per_second" if row["model"] == "softmax" else "over_softmax"
            told = {"model": row["model"], "case": f"{row['length']:,} pixels"}
            yield environment(found, path) | told | {"metric": metric, "value": number(row[metric])}


def forecasts(*metrics: str) -> Reader:
    """Return a reader of latent models, which yields errors on held-out and forecast values, and further metrics."""
    scores = {"log_likelihood": "log_likelihood", "mse": "squared_error", "coverage": "coverage"}
    columns = {
        f"final_{part}_{name}": {"metric": metric, "case": case}
        for part, case in (("held", "held out"), ("forecast", "forecast"))
        for name, metric in scores.items()
    }
    others = {"final_elbo": "bound", "final_kl_path": "paths_divergence", "train_nfe": "nfe_forward_mean"}
    names = {"hbsde": "heavy_ball", "sde": "first order"}
    reader = runs(*columns, *metrics, label=lambda c: names.get(str(c["model"]), str(c["model"])), table="{dataset}")
    return renamed(reader, **columns, **{name: {"metric": metric} for name, metric in others.items()})


# Recall

RECALLED = re.compile(r"test_(\d+)_(?:([\d.]+)_)?(accuracy|stale)")  # number of pairs, noise, and metric
SHOWN_PAIRS = {"once": ("8", "16", "32"), "again": ("4", "8", "16"), "noisy": ("8",)}


def best_rates(found: list[RunFolder]) -> dict[tuple[str, str, str], float]:
    """Return the learning rate with the best validation accuracy for the first seed, by kind, equal size and model."""
    best: dict[tuple[str, str, str], tuple[int, float, float]] = {}
    for run in found:
        if run.summary:
            key = run.config["kind"], run.config["equal"], run.config["model"]
            score = -run.config["seed"], float(run.summary["best_validation_accuracy"]), run.config["lr"]
            best[key] = max(score, best.get(key, score))
    return {key: rate for key, (_, _, rate) in best.items()}


def recalled(positions: str = "") -> Reader:
    """Return a reader of recall runs with the best learning rates. ``positions`` is appended to the models' names."""

    def read(folder: Path) -> Iterator[Row]:
        found = run_folders(folder)
        rates = best_rates(found)
        for run in found:
            config, kind = run.config, run.config["kind"]
            if not run.summary or config["lr"] != rates[kind, config["equal"], config["model"]]:
                continue
            model = config["model"] + (", equal heads" if config["equal"] == "heads" else "") + positions
            for name, value in run.summary.items():
                match = RECALLED.fullmatch(name)
                if not match or match[1] not in SHOWN_PAIRS[kind]:
                    continue
                pairs, noise = int(match[1]), float(match[2] or 0)
                case = f"noise {noise:g}" if kind == "noisy" else f"{pairs} pairs"
                about = run.conditions() | {"table": kind, "case": case}
                metric = "accuracy" if match[3] == "accuracy" else "old_value_accuracy"
                yield about | {"model": model, "metric": metric, "value": number(value)}
                if kind == "noisy" and config["model"] == "linear" and not positions:
                    times = config["times"]
                    length = 2 * pairs * (times + 1)
                    setting = Bindings(pairs, length, config["keys"], config["values"], times, noise=noise)
                    yield about | {"model": "counting", "metric": metric, "value": number(right_by_counting(setting))}

    return read


@functools.cache
def right_by_counting(setting: Bindings, count: int = 500) -> float:
    """Return the accuracy of answering with the most frequent value of a key. Ties are broken at random."""
    tokens, targets, _ = setting.draw(count, torch.Generator().manual_seed(0))
    told = tokens[:, : 2 * setting.pairs * setting.times]
    shown = torch.nn.functional.one_hot(told[:, 1::2] - 1 - setting.keys, setting.values)
    sequence, place = (targets != IGNORED).nonzero(as_tuple=True)
    of_key = told[sequence, ::2] == tokens[sequence, place, None]
    votes = (shown[sequence] * of_key.unsqueeze(2)).sum(1)  # argmax takes the first maximum; values are in random order
    return (votes.argmax(1) == targets[sequence, place]).float().mean().item()


# Classification


def compared(folder: Path, resamples: int = 1000) -> Iterator[Row]:
    """Yield the difference of each classification model from the best model, and its loss at equal training time.

    The difference is in AUROC, or with more than two classes in accuracy. Its 95 % interval is from a paired bootstrap
    over the test series of each seed; it does not include the variation between splits. The loss is the smallest
    validation loss within the training time of the fastest network.
    """
    groups = grouped(folder)
    if not groups:
        return
    by = "test_auroc" if "test_auroc" in groups[0].runs[0].summary else "test_accuracy"
    groups.sort(key=lambda group: -_mean(group, by))
    seconds = min((_mean(group, "training_seconds") for group in groups if _mean(group, "parameters")), default=np.inf)
    for group in groups:
        about = group.runs[0].conditions() | {"model": group.model, "seed": "", "seeds": str(len(group.runs))}
        limit = seconds if _mean(group, "parameters") else np.inf
        if not np.isnan(loss := loss_within(group, limit)):
            told = {"metric": "validation_loss_at_equal_seconds", "statistic": "mean"}
            yield about | told | {"value": number(loss)}
        if group is not groups[0] and set(group.seeds) & set(groups[0].seeds):
            found = difference(predictions(group), predictions(groups[0]), resamples)
            for statistic, value in zip(("mean", "low", "high"), found, strict=True):
                yield about | {"metric": "difference_to_first", "statistic": statistic, "value": number(value)}


def _mean(group: Group, name: str) -> float:
    return float(np.mean([run.summary[name] for run in group.runs]))


def loss_within(group: Group, seconds: float) -> float:
    """Return the smallest validation loss within a training time, averaged over seeds; NaN before the first epoch."""
    found = []
    for run in group.runs:
        spent = np.cumsum([float(row["seconds"]) for row in run.epochs])
        losses = [float(row["validation_loss"]) for row, s in zip(run.epochs, spent, strict=True) if s <= seconds]
        found.append(min(losses, default=np.nan))
    return float(np.mean(found))


def predictions(group: Group) -> Predicted:
    """Return the test predictions of the runs in a group."""
    tables = {run.config["seed"]: read_csv(run.path / "predictions.csv") for run in group.runs}
    return {
        seed: (
            np.array([int(row["label"]) for row in rows]),
            np.array([[float(value) for name, value in row.items() if name != "label"] for row in rows]),
        )
        for seed, rows in tables.items()
    }


def score(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the AUROC for two classes, or the accuracy for more. It is NaN if one of two classes has no series."""
    if predicted.shape[1] != 2:
        return float((predicted.argmax(1) == labels).mean())
    positive, negative = np.sort(predicted[labels == 1, 1]), predicted[labels == 0, 1]
    below, up_to = (np.searchsorted(positive, negative, side) for side in ("left", "right"))
    pairs = len(positive) * len(negative)
    return float((2 * len(positive) - below - up_to).sum() / 2 / pairs) if pairs else float("nan")


def difference(one: Predicted, other: Predicted, resamples: int, seed: int = 0) -> tuple[float, float, float]:
    """Return the score difference, averaged over the seeds that both models have, and its 95 % interval."""
    random = np.random.default_rng(seed)
    found = np.zeros(resamples + 1)
    shared = [key for key in one if key in other]
    for key in shared:
        (labels, mine), (_, theirs) = one[key], other[key]
        for i in range(resamples + 1):
            index = random.integers(len(labels), size=len(labels)) if i else np.arange(len(labels))
            found[i] += (score(labels[index], mine[index]) - score(labels[index], theirs[index])) / len(shared)
    low, high = np.nanquantile(found[1:], [0.025, 0.975])
    return float(found[0]), float(low), float(high)
