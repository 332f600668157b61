"""Finished runs in groups that differ in their seed only, and what these are called in tables and figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tasks.common.config import LATER, MODELS
from tasks.common.files import read_json
from tasks.models.baselines import BASELINES
from tasks.models.classifiers import SHALLOW
from tasks.models.classifiers import TITLES as CLASSIFIERS
from tasks.models.contenders import TITLES as CONTENDERS
from tasks.models.densities import TITLES as DENSITIES
from tasks.models.depth import DepthConfig
from tasks.models.latent_sdes import TITLES as LATENT_SDES
from tasks.models.oscillating import TITLES as OSCILLATING
from tasks.models.recurrent import OSCILLATORS, VARIANTS, title
from tasks.models.sequence_models import TITLES as SEQUENCE_MODELS

NOT_COMPARED = ("seed", "seeds", "jobs", "out", "device", "checkpoint_seconds", "animate", "curve", "timit")
FIGURE = (  # options that say which figure a run belongs to
    *("task", "preset", "dataset", "data", "features", "protocol"),
    *("cell", "problem", "length", "side", "permuted"),
)
PLAIN = {  # what others are compared with, drawn with a broken line
    *(*BASELINES, *SHALLOW, "ncde", "momentum_lstm", "cnf", "sde", "plain", "gain", "steady", "forget"),
    *("softmax", "linear", "linear_gain", "residual"),
}
MACHINE = ("device", "threads", "runs_at_a_time")  # entries of a summary that its seconds depend on
Titles = Callable[[Mapping[str, Any]], Mapping[str, str]]
logger = logging.getLogger("tasks.plot")


def fields(config: Mapping[str, Any]) -> dict[str, str]:
    """Return titles of the five models, the two after them, and what stands beside them."""
    later = {"nesterovnode": "NesterovNODE", "adamnode": "AdamNODE"}
    return {name: name.upper() for name in (*MODELS, *BASELINES)} | later | {"cfc": "CfC", **OSCILLATING}


def recurrent(config: Mapping[str, Any]) -> dict[str, str]:
    """Return titles of recurrent layers with momentum of one cell, or of transformers with momentum over depth."""
    if config["model"] == "transformer":
        return {name: name.replace("_", " ") for name in DepthConfig.models}
    return {name: title(name, str(config["cell"])) for name in (*VARIANTS, OSCILLATORS)}


# For each task what it is judged by, and what its models are called, in the order of tables.
EXPERIMENTS: dict[str, tuple[str, Titles | Mapping[str, str]]] = {
    "adding": ("test_loss", recurrent),
    "bouncing_balls": ("test_kl", recurrent),
    "classification": ("validation_accuracy", CLASSIFIERS),
    "copying": ("test_loss", recurrent),
    "density": ("test_loss", DENSITIES),
    "image_classification": ("test_accuracy", fields),
    "image_generation": ("test_bits_per_dim", CONTENDERS),
    "language_model": ("validation_perplexity", recurrent),
    "latent_sde": ("test_loss", {**LATENT_SDES, "kalman": OSCILLATING["kalman"]}),
    "lra": ("validation_accuracy", CONTENDERS),
    "pathological": ("test_error", SEQUENCE_MODELS),
    "pendulum": ("test_loss", {"node": "NODE", "sonode": "SONODE", "port_hamiltonian": "PortHamiltonian"}),
    "pixel_mnist": ("validation_accuracy", recurrent),
    "plane_vibration": ("validation_forecast_mse", fields),
    "point_cloud": ("train_loss", fields),
    "polyphonic_music": ("validation_nll", recurrent),
    "recall": ("validation_accuracy", CONTENDERS),
    "silverbox": ("validation_loss", fields),
    "speech": ("validation_mse", recurrent),
    "transformer_copy": ("test_accuracy", CONTENDERS),
    "translation": ("validation_bleu", CONTENDERS),
    "walker2d": ("validation_loss", fields),
}


class Group:
    """Finished runs of one task that differ in their seed only."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.metric, titles = EXPERIMENTS[config["task"]]
        names = titles(config) if callable(titles) else titles
        self.place = list(names).index(self.model)
        self.title, self.color = names[self.model], f"C{self.place}"
        self.label = self.title  # with the options in which it differs from other groups, see tell_apart
        self.folders: list[Path] = []
        self.seeds: list[object] = []
        self.summaries: list[dict[str, Any]] = []
        self.metrics: list[pd.DataFrame] = []

    def add(self, folder: Path) -> None:
        """Read a finished run of the group."""
        summary = read_json(folder / "summary.json")
        self.metrics.append(pd.read_csv(folder / "metrics.csv", index_col="epoch"))
        self.summaries.append(summary)
        self.seeds.append(read_json(folder / "config.json")["seed"])
        self.folders.append(folder)

    @property
    def model(self) -> str:
        """Which model."""
        return str(self.config["connection" if self.config["model"] == "transformer" else "model"])

    @property
    def is_ode(self) -> bool:
        """Whether it is a field, and not a baseline, which evaluates none."""
        return self.solves and self.model in (*MODELS, *LATER)

    @property
    def solves(self) -> bool:
        """Whether it is a run of a task that solves ODEs, a baseline of these included."""
        return "solver" in self.config

    @property
    def is_plain(self) -> bool:
        """Whether it is what others are compared with, drawn with a broken line."""
        return self.model in PLAIN

    @property
    def experiment(self) -> str:
        """Which figure the runs belong to: task, preset, data set, how it is split or read, and the layer's cell."""
        config = self.config | ({"dataset": Path(self.config["table"]).stem} if self.config.get("table") else {})
        values = {name: config[name] for name in FIGURE if config.get(name) not in (None, False)}
        return "-".join(name if value is True else str(value) for name, value in values.items())

    def mean(self, name: str) -> float:
        """Return mean of an entry of the summaries over the seeds."""
        return float(np.mean([summary[name] for summary in self.summaries]))

    @property
    def machine(self) -> dict[str, object] | None:
        """What its seconds depend on; None where they tell nothing: runs shared a machine, or had different ones."""
        found = [{name: summary.get(name) for name in MACHINE} for summary in self.summaries]
        return found[0] if found[0]["runs_at_a_time"] == 1 and all(other == found[0] for other in found) else None

    @property
    def train_metric(self) -> str:
        """What the model makes of the training data: the same, of an ODE judged by validation data, or the loss."""
        of_validation = self.solves and self.metric.startswith("validation_")
        return self.metric.replace("validation_", "train_") if of_validation else "train_loss"

    @property
    def uses_adjoint(self) -> bool:
        """Whether the backward evaluations are those of an adjoint; otherwise steps are taken again, or kept."""
        return self.config["gradient"] == "adjoint" or (
            not self.config["gradient"] and self.config["solver"] == "torchdiffeq"
        )

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and values (seed, epoch), as far as all seeds went."""
        found = pd.concat([metrics[name] for metrics in self.metrics], axis=1, join="inner")
        return found.index.to_numpy(), found.to_numpy().T

    def tolerances(self) -> dict[str, np.ndarray]:
        """Return what ``tolerance.csv`` holds, each column (seed, tolerance); empty if a run has none."""
        paths = [folder / "tolerance.csv" for folder in self.folders]
        if not all(path.exists() for path in paths):
            return {}
        tables = [pd.read_csv(path) for path in paths]
        return {str(name): np.stack([table[name] for table in tables]) for name in tables[0]}


def collect(root: Path) -> list[Group]:
    """Return the finished runs under a folder, grouped; others are mentioned and left out."""
    groups: dict[str, Group] = {}
    for path in sorted(root.rglob("config.json")):
        folder = path.parent
        try:
            config = read_json(path)
            key = json.dumps({k: v for k, v in config.items() if k not in NOT_COMPARED}, sort_keys=True)
            if key in groups and config["seed"] in groups[key].seeds:
                logger.warning("%s repeats a run and is left out", folder)
                continue
            group = groups.get(key) or Group(config)
            group.add(folder)
        except (SystemExit, OSError, KeyError, IndexError, ValueError) as error:
            logger.warning("%s is no finished run and is left out (%s)", folder, error)
        else:
            groups[key] = group
    for group in groups.values():
        mixed = [name for name in MACHINE if len({summary.get(name) for summary in group.summaries}) > 1]
        if mixed:
            logger.warning("the seconds of %s are means over different %s", group.label, " and ".join(mixed))
    return sorted(groups.values(), key=lambda group: (group.experiment, group.place))


def tell_apart(groups: Sequence[Group]) -> str:
    """Put the options in which the groups differ into their labels; return some that they share."""
    names = [name for name in groups[0].config if name not in (*NOT_COMPARED, *FIGURE, "model", "connection")]
    differing = [name for name in names if len({str(group.config.get(name)) for group in groups}) > 1]
    several = len({group.model for group in groups}) < len(groups)
    for index, group in enumerate(groups):
        values = {name: group.config.get(name) for name in differing}
        group.label = " ".join([group.label, *(f"{name}={x}" for name, x in values.items() if x is not None)])
        if several:
            group.color = f"C{index}"
    said = ("solver", "method", "tol", "gradient") if groups[0].solves else ("hidden", "lr")
    shared = [name for name in (*said, "batch_size") if name not in differing and groups[0].config.get(name)]
    return ", ".join(f"{name} {groups[0].config.get(name)}" for name in shared)
