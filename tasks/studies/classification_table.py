"""Tables of finished runs of tasks.classification, with bootstrap intervals of the differences.

    python -m tasks.studies.classification_table runs/classification

A table for each set: means over seeds of accuracy, AUROC of two classes, negative log-likelihood, seconds of training
and parameters. Models are in the order of AUROC, or of accuracy. "validation, 3 s" compares at equal seconds: the least
negative log-likelihood of the validation series that a network had after as many seconds as the fastest one took for
all of its epochs; boosting and logistic regression take the seconds they need. The last column is the difference to the
first row, with an interval of 95 %: in each of --resamples resamples the test series of each seed are drawn again, the
same for both models, and the differences are averaged over the seeds that both have. It does not know how far other
splits would be apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.common.config import REQUIRED, Options, option, parse
from tasks.common.files import markdown
from tasks.run_groups import Group, collect, tell_apart

Predicted = dict[int, tuple[np.ndarray, np.ndarray]]  # for each seed, labels and the probabilities of the classes


@dataclasses.dataclass(frozen=True)
class TableOptions(Options):
    """Options of the table."""

    positive = "resamples"

    folder: str = option(REQUIRED, "where finished runs are")
    resamples: int = option(1000, "of the bootstrap")


def predictions(group: Group) -> Predicted:
    """Return the test predictions of a group's runs."""
    found = {}
    for seed, folder in zip(group.seeds, group.folders, strict=True):
        table = pd.read_csv(folder / "predictions.csv")
        found[int(str(seed))] = table["label"].to_numpy(), table.drop(columns="label").to_numpy()
    return found


def score(labels: np.ndarray, predicted: np.ndarray) -> float:
    """AUROC of two classes, by ranks, ties shared; accuracy of more. NaN if a class has no series."""
    if predicted.shape[1] != 2:
        return float((predicted.argmax(1) == labels).mean())
    ranks = pd.Series(predicted[:, 1]).rank().to_numpy()
    positive = int(labels.sum())
    pairs = positive * (len(labels) - positive)
    return float((ranks[labels == 1].sum() - positive * (positive + 1) / 2) / pairs) if pairs else float("nan")


def difference(one: Predicted, other: Predicted, resamples: int, seed: int = 0) -> tuple[float, float, float]:
    """Return mean difference of the scores over the seeds that both have, and the ends of its interval of 95 %."""
    random = np.random.default_rng(seed)
    shared = sorted(one.keys() & other.keys())
    found = np.zeros(resamples + 1)
    for key in shared:
        (labels, mine), (_, theirs) = one[key], other[key]
        for i in range(resamples + 1):
            index = random.integers(len(labels), size=len(labels)) if i else np.arange(len(labels))
            found[i] += (score(labels[index], mine[index]) - score(labels[index], theirs[index])) / len(shared)
    low, high = np.nanquantile(found[1:], [0.025, 0.975])
    return float(found[0]), float(low), float(high)


def early(group: Group, seconds: float) -> str:
    """Return the least validation loss within some seconds, mean over seeds; a dash if no epoch was done by then."""
    found = []
    for folder in group.folders:
        metrics = pd.read_csv(folder / "metrics.csv")
        found.append(metrics["validation_loss"][metrics["seconds"].cumsum() <= seconds].min())
    return "–" if np.isnan(found).any() else f"{np.mean(found):.3f}"


def table(groups: Sequence[Group], resamples: int) -> str:
    """Return the table of one set, in Markdown."""
    two = "test_auroc" in groups[0].summaries[0]
    by = "test_auroc" if two else "test_accuracy"
    groups = sorted(groups, key=lambda group: -group.mean(by))
    best = predictions(groups[0])
    networks = [group.mean("training_seconds") for group in groups if group.mean("parameters")]
    limit = min(networks, default=0.0)
    rows = []
    for group in groups:
        far = "–"
        if group is not groups[0] and set(group.seeds) & set(groups[0].seeds):
            far = "{:+.3f} ({:+.3f} to {:+.3f})".format(*difference(predictions(group), best, resamples))
        size = group.mean("parameters")
        row = {"model": group.label, "accuracy": f"{group.mean('test_accuracy'):.3f}"}
        row |= {"AUROC": f"{group.mean(by):.3f}"} if two else {}
        row |= {"loss": f"{group.mean('test_loss'):.3f}"}
        row |= {f"validation, {limit:.0f} s": early(group, limit if size else np.inf)}
        row |= {"seconds": f"{group.mean('training_seconds'):.0f}", "parameters": f"{size:,.0f}" if size else ""}
        rows.append(row | {"seeds": str(len(group.seeds)), "to the first": far})
    return markdown(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of all sets under a folder."""
    options = parse(TableOptions, {}, __doc__, argv)
    groups = [group for group in collect(Path(options.folder)) if group.config["task"] == "classification"]
    if not groups:
        raise SystemExit(f"{options.folder} has no finished runs of tasks.classification. Fix: run it first.")
    sets: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        key = tuple(group.config[name] for name in ("table", "dataset", "drop", "samples"))
        sets.setdefault(key, []).append(group)
    for (path, dataset, drop, samples), members in sets.items():
        tell_apart(members)
        seeds = ", ".join(sorted({str(seed) for group in members for seed in group.seeds}))
        print(f"\n{path or dataset}, {drop:.0%} dropped, up to {samples or 'all'} stamps, seeds {seeds}\n")
        print(table(members, options.resamples))


if __name__ == "__main__":
    main()
