"""Draw run folders: ``python -m tasks.plot runs/demo`` prints a table and writes figures.

``python -m tasks.plot docs/results`` draws the tables and figures of the pages of Results from their CSV files into
``docs/_results``; see tasks/results_pages.py.

There is a table and a figure for every task, preset, data set and protocol found: accuracy or loss and evaluations
against epoch, as figures 6, 9, 10, 12 and 13 of the momentum-architectures paper, and seconds of runs that had the
machine to themselves. Another one shows evaluations and gradient error against tolerance (figure 11) where runs have
measured it. Runs that differ in their seed only are drawn as one line, the median. Its band reaches from the smallest
to the largest, or, of ten seeds and more, from the 10 % to the 90 % quantile. Baselines have no evaluations: a dash in
the table, and no line. Of recurrent layers with momentum there is a figure for each cell and length, without
evaluations; broken lines are layers without a rule, dotted ones what takes no memory or no reading. Of transformers,
broken lines are softmax and linear attention; below the curves of image generation are the images drawn last. Densities
in the plane have a figure of their own, of each model's first seed.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks.common.figures import legend_beside, line_style
from tasks.common.files import write_figure
from tasks.image_classification import CURVE_IMAGES
from tasks.results_pages import write_results
from tasks.run_groups import Group, collect, tell_apart

# What guesses reach, by entry of a summary: on the data of the curves, drawn, and on the test data, in the table.
DRAWN_GUESSES = {
    "trivial_loss": ("no memory", ":"),
    "validation_majority_accuracy": ("majority class", ":"),
    "validation_root_accuracy": ("first operator alone", "-."),
}
GUESSES = ("trivial_loss", "majority_accuracy", "root_accuracy")


def table(groups: Sequence[Group]) -> str:
    """One line per group: accuracy, loss, size and cost."""
    found = [_cells(group) for group in groups]
    columns = list(dict.fromkeys(name for cells in found for name in cells))
    rows = [("model", "seeds", *columns)]
    for group, cells in zip(groups, found, strict=True):
        rows.append((group.label, str(len(group.summaries)), *(cells.get(name, "-") for name in columns)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cells(group: Group) -> dict[str, str]:
    """Return a line of the table: its columns and what stands in them, medians and ranges or means over the seeds."""
    entries = group.summaries[0]
    kinds: tuple[str, ...] = ("_accuracy", "_bleu", "_mse", "_nll", "_perplexity", "_loss")
    if group.solves:
        kinds = ("_accuracy", "_auroc") if group.metric == "validation_accuracy" else ("_mse",)
    errors = [name for name in entries if name.startswith("test_") and name.endswith(kinds)]
    best = f"best_{group.metric}" if f"best_{group.metric}" in entries else group.metric
    errors += [name for name in entries if name.endswith("_rmse_mV")]
    values = {
        name: [_entry(summary, name) for summary in group.summaries]
        for name in (best, "best_epoch", group.train_metric, *errors)
        if name in entries
    }
    values |= {name: [group.mean(name)] for name in GUESSES if name in entries}
    cells = {}
    for name, found in values.items():
        unit = " %" if name.endswith("accuracy") else ""
        cells[name.replace("_", " ") + unit] = _range(found, unit)
    if "separates" in entries:
        cells["separated"] = f"{group.mean('separates') * 100:.0f} %"
    if "state" in entries:
        cells["state"] = f"{group.mean('state'):.0f}"
    return cells | {"parameters": f"{group.mean('parameters'):.0f}"} | _costs(group)


def _costs(group: Group) -> dict[str, str]:
    """Return the columns of evaluations, of a task that solves ODEs, and seconds."""
    seconds = {"s/epoch": f"{group.mean('seconds_per_epoch'):.3g}"}
    if not group.solves:
        return seconds
    forward, backward = group.mean("nfe_forward_mean"), group.mean("nfe_backward_mean")
    counted = [name for name in group.summaries[0] if name in ("test_nfe", "validation_nfe")]  # not of boosting
    return {
        "NFE forward": f"{forward:.1f}" if group.is_ode else "-",
        "backward": f"{backward:.1f}" if group.is_ode else "-",
        "ratio": f"{backward / forward:.2f}" if group.is_ode and group.uses_adjoint else "-",
        **{name.replace("_nfe", " NFE"): f"{group.mean(name):.1f}" if group.is_ode else "-" for name in counted},
        **seconds,
    }


def _entry(summary: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a summary, of the training loss that without penalties; None if the run diverged there."""
    value = summary.get("train_cross_entropy", summary[name]) if name == "train_loss" else summary[name]
    return None if value is None else float(value)


def _range(values: Sequence[float | None], unit: str) -> str:
    """Return a cell of the table: the median over the seeds, and the range if there are several."""
    if None in values:
        return "diverged"
    low, median, high = (f"{100 * x:.1f}" if unit else f"{x:.3g}" for x in _spread(np.array(values)))
    return f"{median} [{low}, {high}]" if len(values) > 1 else median


def _spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower end, median and upper end over the seeds, the first axis; see the top of the file."""
    low, high = (0.1, 0.9) if len(values) >= 10 else (0.0, 1.0)
    lower, median, upper = np.quantile(values, (low, 0.5, high), axis=0)
    return lower, median, upper


def draw(groups: Sequence[Group], title: str) -> Figure:
    """Return accuracy or loss, evaluations and perhaps seconds against epoch, and examples where a run kept some."""
    kept = [group for group in groups if group.model == "hbnode" and (group.folders[0] / "examples.pt").exists()]
    panels, below = _panels(groups), 4.0 if kept else 0
    figure = plt.figure(figsize=(2.0 + 3.7 * len(panels), 4 + below), layout="constrained")
    ratios = (4, below)
    upper, *lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0] if below else [figure]
    upper.suptitle(title, fontsize="medium")
    for ax, (name, label) in zip(upper.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_curves(ax, groups, name)
        ax.set_xlabel("epoch")
        ax.set_ylabel(label)
        if name.startswith(("nfe", "seconds")):
            ax.set_ylim(bottom=-0.02 * ax.get_ylim()[1])  # a line at 0 is seen
        elif groups[0].metric.startswith("validation_") or not groups[0].solves:
            is_positive = all((group.curve(name)[1] > 0).all() for group in groups)  # a log-likelihood may not be
            if is_positive and not name.endswith(("accuracy", "bleu")):
                ax.set_yscale("log")  # falls by orders of magnitude, and not to 0 as a point cloud's
            for guess, (said, line) in DRAWN_GUESSES.items():
                if name.endswith(guess.rpartition("_")[2]) and guess in groups[0].summaries[0]:
                    ax.axhline(groups[0].mean(guess), color="0.4", ls=line, label=said)
            if ax.get_yscale() == "log":
                ticks_of_short_axis(ax.yaxis)
    legend_beside(upper)
    if kept:
        _draw_examples(lower[0], kept[-1])
    return figure


def _draw_curves(ax: Axes, groups: Sequence[Group], name: str) -> None:
    """A line for each group; of a single epoch, points beside one another."""
    drawn = [group for group in groups if group.is_ode or not name.startswith("nfe")]
    longest = 1
    for group in drawn:
        epochs, values = group.curve(name)
        longest = max(longest, len(epochs))
        index = groups.index(group)
        shift = 0.0 if len(epochs) > 1 else 0.6 * ((index + 0.5) / len(groups) - 0.5)
        _line(ax, group, epochs + shift, values, line_style(index, len(groups), len(epochs)))
    if longest == 1:
        ax.set(xlim=(0.5, 1.5), xticks=[1])
    else:
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _panels(groups: Sequence[Group]) -> dict[str, str]:
    """Return the columns to draw and the labels of their axes; evaluations only if a model makes some in that pass."""
    metric, odes = groups[0].metric, [group for group in groups if group.is_ode]
    is_split = metric.startswith("validation_") or not groups[0].solves
    names = (groups[0].train_metric, metric) if is_split else (metric,)
    backward = (
        "backward evaluations per batch"
        if all(group.uses_adjoint for group in odes)
        else "evaluations repeated in the backward pass"
    )
    evaluations = {"nfe_forward": "forward evaluations per batch", "nfe_backward": backward}
    evaluations = {k: v for k, v in evaluations.items() if any(group.curve(k)[1].any() for group in odes)}
    panels = {name: name.replace("_", " ") for name in names} | evaluations
    machines = [group.machine for group in groups]
    comparable = machines[0] is not None and all(machine == machines[0] for machine in machines)
    return panels | ({"seconds": "seconds per epoch"} if comparable else {})


def draw_tolerances(groups: Sequence[Group], name: str) -> Figure:
    """Return evaluations of the trained models against tolerance, forward and backward, and what they buy."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    config = groups[0].config
    figure.suptitle(
        f"{name}: trained models on {CURVE_IMAGES} test images, {config['solver']} solver, loss scale "
        f"{config['loss_scale']:g}",
        fontsize="medium",
    )
    for index, group in enumerate(groups):
        columns = group.tolerances()
        style = line_style(index, len(groups), 1)
        for ax, column in zip(axes, ("forward", "backward"), strict=False):
            _line(ax, group, columns["tolerance"][0], columns[column], style)
        total = np.median(columns["forward"] + columns["backward"], axis=0)
        error = np.median(columns["gradient_error"], axis=0)
        axes[2].plot(total, error, color=group.color, label=group.label, **style)
    for ax, label in zip(axes, ("forward evaluations", "backward evaluations"), strict=False):
        ax.set(xscale="log", xlabel="tolerance (rtol = atol)", ylabel=label, ylim=(0, None))
        ax.invert_xaxis()
    axes[2].set(
        xscale="log", yscale="log", xlabel="evaluations, forward and backward", ylabel="relative gradient error"
    )
    for axis in (axes[2].xaxis, axes[2].yaxis):
        ticks_of_short_axis(axis)
    legend_beside(figure)
    return figure


def _line(ax: Axes, group: Group, x: np.ndarray, values: np.ndarray, style: Mapping[str, Any]) -> None:
    """The median over the seeds and its band, which is a bar where there is one epoch."""
    low, median, high = _spread(values)
    ax.plot(x, median, "--" if group.is_plain else "-", color=group.color, label=group.label, **style)
    if len(values) > 1 and len(x) == 1:
        ax.vlines(x, low, high, color=group.color, alpha=0.4, linewidth=4)
    elif len(values) > 1:
        ax.fill_between(x, low, high, color=group.color, alpha=0.15, lw=0)


def _draw_examples(figure: Figure | SubFigure, group: Group) -> None:
    """Test images with the model's predictions, wrong ones in red."""
    examples: dict[str, torch.Tensor] = torch.load(group.folders[0] / "examples.pt", weights_only=True)
    axes = figure.subplots(4, 15, subplot_kw={"xticks": [], "yticks": [], "frame_on": False}).flat
    for ax, image, label, prediction in zip(
        axes, examples["images"], examples["labels"].tolist(), examples["predictions"].tolist(), strict=False
    ):
        ax.imshow(image.permute(1, 2, 0).numpy(), cmap="gray_r")
        said, color = (f"{prediction}", "black") if label == prediction else (f"{prediction}, is {label}", "red")
        ax.set_title(said, color=color, fontsize="small", pad=2)
    accuracy = float(group.summaries[0]["test_accuracy"]) * 100
    figure.suptitle(f"{group.label} on {group.config['dataset']}: test images and its answers, {accuracy:.1f} % right")


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table and write figures for each experiment under a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", type=Path, nargs="?", default=Path("runs"), help="folder of run folders, or of results [runs]"
    )
    parser.add_argument("--out", type=Path, help="the figure's path [ROOT/EXPERIMENT.png]; of results, a folder")
    options = parser.parse_args(argv)
    if (options.root / "claims.csv").exists():
        for path in write_results(options.root, options.out or options.root.parent / "_results"):
            print(path)
        return
    logging.basicConfig(format="%(message)s")
    experiments = {name: list(of) for name, of in groupby(collect(options.root), key=lambda group: group.experiment)}
    if not experiments:
        parser.error(f"no finished run under {options.root}. Fix: train one first, see python -m tasks.")
    if options.out and len(experiments) > 1:
        parser.error(f"--out names one figure, but {options.root} holds {sorted(experiments)}. Fix: name one of them.")
    for name, groups in experiments.items():
        path = options.out or options.root / f"{name}.png"
        title = f"{name}: {tell_apart(groups)}"
        print(f"{title}\n{table(groups)}")
        figures = {"": draw(groups, title)}
        if measured := [group for group in groups if group.tolerances()]:
            figures["-tolerance"] = draw_tolerances(measured, name)
        for suffix, figure in figures.items():
            file = path.with_stem(path.stem + suffix)
            write_figure(figure, file)
            print(f"figure: {file}")
        print()


if __name__ == "__main__":
    main()
