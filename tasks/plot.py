"""Draw run folders: ``python -m tasks.plot runs/demo`` prints a table and writes one figure.

There is one of each for every task, preset and data set found. Runs that differ in their seed only are averaged; bands
show the smallest and the largest.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from tasks._run import MODELS, read_json, write_figure

COLORS = {name: f"C{index}" for index, name in enumerate(MODELS)}
TITLES = {"node": "NODE", "anode": "ANODE", "sonode": "SONODE", "hbnode": "HBNODE", "ghbnode": "GHBNODE"}
NOT_COMPARED = ("seed", "out", "device", "checkpoint_seconds", "animate")  # options that leave the numbers as they are
COLUMNS = ("test accuracy", "train loss", "parameters", "NFE forward", "NFE backward", "s/epoch")
logger = logging.getLogger("tasks.plot")


class Group:
    """Finished runs of one task that differ in their seed only."""

    def __init__(self, config: dict[str, object]) -> None:
        self.config = config
        self.label = TITLES[str(config["model"])]
        self.color = COLORS[str(config["model"])]
        self.folders: list[Path] = []
        self.seeds: list[object] = []
        self.summaries: list[dict[str, object]] = []
        self.metrics: list[dict[str, np.ndarray]] = []

    def add(self, folder: Path) -> None:
        """Read a finished run of the group."""
        summary = read_json(folder / "summary.json")
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        self.metrics.append({name: np.array([float(row[name]) for row in rows]) for name in rows[0]})
        self.summaries.append(summary)
        self.seeds.append(read_json(folder / "config.json")["seed"])
        self.folders.append(folder)

    @property
    def model(self) -> str:
        """Which of the five models."""
        return str(self.config["model"])

    @property
    def experiment(self) -> str:
        """Which figure the runs belong to: task, preset and data set."""
        names = (self.config[name] for name in ("task", "preset", "dataset") if name in self.config)
        return "-".join(map(str, names))

    def mean(self, name: str) -> float:
        """Mean of an entry of the summaries over the seeds."""
        return float(np.mean([summary[name] for summary in self.summaries]))

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and values (seed, epoch), as far as all seeds went."""
        epochs = min(len(metrics["epoch"]) for metrics in self.metrics)
        return self.metrics[0]["epoch"][:epochs], np.stack([metrics[name][:epochs] for metrics in self.metrics])


def collect(root: Path) -> list[Group]:
    """The finished runs under a folder, grouped; others are mentioned and left out."""
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
    return sorted(groups.values(), key=lambda group: (group.experiment, MODELS.index(group.model)))


def tell_apart(groups: Sequence[Group]) -> str:
    """Put the options in which the groups differ into their labels; return some that they share."""
    names = [name for name in groups[0].config if name not in (*NOT_COMPARED, "task", "model", "preset", "dataset")]
    differing = [name for name in names if len({str(group.config.get(name)) for group in groups}) > 1]
    several = len({group.model for group in groups}) < len(groups)
    for index, group in enumerate(groups):
        group.label = " ".join([group.label, *(f"{name}={group.config.get(name)}" for name in differing)])
        if several:
            group.color = f"C{index}"
    shared = [name for name in ("method", "tol", "gradient", "adjoint_norm", "batch_size") if name not in differing]
    return ", ".join(f"{name} {groups[0].config.get(name)}" for name in shared)


def table(groups: Sequence[Group]) -> str:
    """One line per group: accuracy, loss, size and cost."""
    rows = [("model", "seeds", *COLUMNS)]
    for group in groups:
        accuracies = [float(summary["test_accuracy"]) for summary in group.summaries]
        spread = f" ±{np.std(accuracies) * 100:.1f}" if len(accuracies) > 1 else ""
        rows.append(
            (
                group.label,
                str(len(group.summaries)),
                f"{np.mean(accuracies) * 100:.1f} %{spread}",
                f"{group.mean('train_loss'):.3g}",
                f"{group.mean('parameters'):.0f}",
                f"{group.mean('nfe_forward_mean'):.1f}",
                f"{group.mean('nfe_backward_mean'):.1f}",
                f"{group.mean('seconds_per_epoch'):.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw(groups: Sequence[Group], title: str) -> plt.Figure:
    """Accuracy or loss and evaluations against epoch, the final cost as bars, and examples where a run kept some."""
    examples = next((e for g in reversed(groups) if g.model == "hbnode" for e in [_examples(g)] if e), None)
    figure = plt.figure(figsize=(14, 8) if examples else (14, 4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1]) if examples else (figure, None)
    left, middle, right = upper.subplots(1, 3)
    upper.suptitle(title, fontsize="medium")
    classification = str(groups[0].config["task"]) == "image_classification"
    _curves(left, groups, "test_accuracy" if classification else "train_loss")
    left.set_ylabel("test accuracy" if classification else "training loss")
    left.legend(fontsize="small")
    _curves(middle, groups, "nfe_forward", "-")
    _curves(middle, groups, "nfe_backward", "--")
    middle.set_ylabel("evaluations of f per batch")
    middle.set_ylim(bottom=0)
    middle.plot([], [], "k-", label="forward")
    middle.plot([], [], "k--", label="backward")
    middle.legend(*_only(middle, ("forward", "backward")), fontsize="small")
    _bars(right, groups)
    if lower is not None:
        _draw_examples(lower, *examples)
    return figure


def _curves(ax: plt.Axes, groups: Sequence[Group], name: str, style: str = "-") -> None:
    for group in groups:
        epochs, values = group.curve(name)
        ax.plot(epochs, values.mean(0), style, color=group.color, label=group.label)
        if len(values) > 1:
            ax.fill_between(epochs, values.min(0), values.max(0), color=group.color, alpha=0.15, lw=0)
    ax.set_xlabel("epoch")
    ax.xaxis.get_major_locator().set_params(integer=True)


def _only(ax: plt.Axes, names: Sequence[str]) -> tuple[list, list]:
    handles, labels = ax.get_legend_handles_labels()
    chosen = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label in names]
    return [handle for handle, _ in chosen], [label for _, label in chosen]


def _bars(ax: plt.Axes, groups: Sequence[Group]) -> None:
    """Mean evaluations per batch over the training, with the seconds per epoch above."""
    positions = np.arange(len(groups))
    forward = np.array([group.mean("nfe_forward_mean") for group in groups])
    backward = np.array([group.mean("nfe_backward_mean") for group in groups])
    colors = [group.color for group in groups]
    ax.bar(positions, forward, color=colors, label="forward")
    ax.bar(positions, backward, bottom=forward, color=colors, alpha=0.5, hatch="//", label="backward")
    for x, height, group in zip(positions, forward + backward, groups, strict=True):
        seconds = f"{group.mean('seconds_per_epoch'):.2g} s\nan epoch"
        ax.text(x, height, seconds, ha="center", va="bottom", fontsize="small")
    ax.set_xticks(positions, [group.label.replace(" ", "\n") for group in groups])
    ax.set_ylabel("mean evaluations per batch")
    ax.set_ylim(top=1.3 * max(forward + backward))
    plain = [plt.Rectangle((0, 0), 1, 1, color="0.4"), plt.Rectangle((0, 0), 1, 1, color="0.7", hatch="//")]
    ax.legend(plain, ["forward", "backward"], fontsize="small", loc="upper right")


def _examples(group: Group) -> tuple[dict[str, torch.Tensor], Group] | None:
    path = group.folders[0] / "examples.pt"
    return (torch.load(path, weights_only=True), group) if path.exists() else None


def _draw_examples(figure: plt.Figure, examples: dict[str, torch.Tensor], group: Group) -> None:
    """Test images with the model's predictions, wrong ones in red."""
    axes = figure.subplots(4, 15).flat
    for ax, image, label, prediction in zip(
        axes, examples["images"], examples["labels"].tolist(), examples["predictions"].tolist(), strict=False
    ):
        ax.imshow(image.numpy(), cmap="gray_r")
        right = label == prediction
        ax.set_title(
            f"{prediction}" if right else f"{prediction}, is {label}",
            color="black" if right else "red",
            fontsize="small",
            pad=2,
        )
    for ax in figure.axes:
        ax.set_axis_off()
    accuracy = float(group.summaries[0]["test_accuracy"]) * 100
    figure.suptitle(f"{group.label} on {group.config['dataset']}: test images and its answers, {accuracy:.1f} % right")


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table and write a figure for each experiment under a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("runs"), help="folder of run folders [runs]")
    parser.add_argument("--out", type=Path, help="the figure's path [ROOT/EXPERIMENT.png]")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    experiments: dict[str, list[Group]] = defaultdict(list)
    for group in collect(options.root):
        experiments[group.experiment].append(group)
    if not experiments:
        parser.error(f"no finished run under {options.root}. Fix: train one first, see python -m tasks.")
    if options.out and len(experiments) > 1:
        parser.error(f"--out names one figure, but {options.root} holds {sorted(experiments)}. Fix: name one of them.")
    for name, groups in experiments.items():
        path = options.out or options.root / f"{name}.png"
        title = f"{name}: {tell_apart(groups)}"
        print(f"{title}\n{table(groups)}")
        write_figure(draw(groups, title), path)
        print(f"figure: {path}\n")


if __name__ == "__main__":
    main()
