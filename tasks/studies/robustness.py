"""Robustness of trained image classifiers: accuracy under Gaussian noise, FGSM and PGD of growing size.

Open problem 1 in section 3.5 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design?
(2022): are heavy-ball neural ODEs robust to noise and to adversarial examples, more than others? Train models first,

    python -m tasks.image_classification --preset full --model all --seeds 5 --out runs/digits
    python -m tasks.studies.robustness runs/digits

All models get the same noise and the same random starts. Sizes are in units of pixels in [0, 1], and every perturbed
image is clamped to [0, 1]. FGSM (Goodfellow et al., arXiv:1412.6572) takes one step along the gradient's sign; PGD
(Madry et al., arXiv:1706.06083) starts at random in the box and takes many, each 2.5 size / steps long.

A wrong gradient makes a model look robust (Athalye et al., arXiv:1802.00420), and so would torchdiffeq's adjoint: it
solves for the gradient up to a tolerance, which the small gradients of sure answers fall below. The attacks therefore
differentiate the very steps that the solver took, whichever gradient the model was trained with; the answers stay those
of the trained model. Three checks are reported: the gradient against a central difference of the loss, and PGD against
FGSM and against random signs of the same size, neither of which may do more harm. They warn of masking; that none is
there they do not prove, and other attacks may be stronger.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

import hbnode
from hbnode.solve.odeint import resolve
from tasks import pages
from tasks.common.config import REQUIRED, Options, option, parse
from tasks.common.figures import line_style, panels
from tasks.common.files import write_json, write_table
from tasks.common.run import Workers, environment
from tasks.common.train import EVAL_BATCH_SIZE, Samples
from tasks.image_classification import load_data, load_run
from tasks.rows import Group, grouped, tell_apart

SIZES = {
    "noise": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0),
    "signs": (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
    "fgsm": (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
    "pgd": (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
}
TITLES = {
    "noise": "Gaussian noise, by standard deviation",
    "signs": "random signs, by size (a check of the attacks)",
    "fgsm": "FGSM, by largest change of a pixel",
    "pgd": "PGD, by largest change of a pixel",
}
# What a fair comparison holds equal. Solver, precision and penalties may differ: a label says so.
TRAINING = ("dataset", "subset", "test_subset", "small", "epochs", "batch_size", "lr", "schedule", "clip", "processes")
SLACK = 0.02  # accuracy by which PGD may fall behind a weaker attack before it counts as masked
GRADIENT_SLACK = 0.2  # likewise of the central difference's ratio to the gradient, which steps that change blur
logger = logging.getLogger("tasks.studies.robustness")
Perturb = Callable[[nn.Module, Tensor, Tensor, float, torch.Generator], Tensor]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RobustnessOptions(Options):
    """Options of the study."""

    positive = "pgd_steps"

    root: str = option(REQUIRED, "folder of run folders of tasks.image_classification")
    out: str = option("", "where to write robustness.csv, .json and .png; empty is the folder of the runs")
    images: int = option(0, "the first N test images only; 0 is all of them")
    pgd_steps: int = option(20, "steps of PGD")
    seed: int = option(0, "of the noise and of PGD's starts")
    device: str = option("auto", "what computes", ("auto", "cpu", "cuda"))


def noise(model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return images with Gaussian noise of standard deviation ``size``."""
    drawn = torch.randn(images.shape, generator=generator).to(images)
    return (images + size * drawn).clamp(0, 1)


def signs(model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return images with every pixel moved by ``size``, up or down at random."""
    drawn = torch.randint(2, images.shape, generator=generator).to(images)
    return (images + size * (2 * drawn - 1)).clamp(0, 1)


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return images moved by ``size`` along the sign of the loss's gradient."""
    return (images + size * gradient(model, images, labels).sign()).clamp(0, 1)


def pgd(
    model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator, *, steps: int
) -> Tensor:
    """Return images after steps along the gradient's sign from a random start, within ``size`` of the first ones."""
    low, high = (images - size).clamp(min=0), (images + size).clamp(max=1)
    start = 2 * torch.rand(images.shape, generator=generator) - 1
    moved = torch.clamp(images + size * start.to(images), low, high)
    for _ in range(steps):
        moved = torch.clamp(moved + 2.5 * size / steps * gradient(model, moved, labels).sign(), low, high)
    return moved


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return gradient of each image's cross-entropy; summed, so that a batch's size does not shrink it."""
    images = images.detach().requires_grad_()
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    return torch.autograd.grad(loss, images)[0]


def gradient_ratio(model: nn.Module, images: Tensor, labels: Tensor, step: float = 0.01) -> float:
    """Change of the loss along the gradient's sign, as a central difference, over what the gradient says: about 1."""
    slope = gradient(model, images, labels)
    with torch.no_grad():
        ahead, behind = (
            nn.functional.cross_entropy(model(images + way * slope.sign()), labels, reduction="sum")
            for way in (step, -step)
        )
    return ((ahead - behind) / (2 * step * slope.abs().sum())).item()


def measure(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], perturb: Perturb, size: float, seed: int
) -> tuple[float, float]:
    """Return the accuracy on perturbed images, and the mean number of evaluations for a batch of them."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, and drawn anew: the same for all models and sizes
    right = evaluations = 0
    for images, labels in batches:
        moved = perturb(model, images, labels, size, generator) if size else images
        with torch.no_grad(), hbnode.count_nfe(model) as nfe:
            right += (model(moved).argmax(1) == labels).sum().item()
        evaluations += nfe.forward
    return right / sum(len(labels) for _, labels in batches), evaluations / len(batches)


def load_attacked(folder: Path) -> tuple[nn.Module, Samples]:
    """Return a run's model, whose gradient is that of the steps taken, and its test data."""
    config, trained = load_run(folder)
    exact = "checkpoint" if config.solver == "native" else "direct"
    method = resolve(trained.block.settings(), trained.block.field).method  # which may depend on the gradient
    model = dataclasses.replace(config, method=method or "", gradient=exact, adjoint_norm="full").make_model()
    model.load_state_dict(trained.state_dict())
    return model.eval().requires_grad_(False), load_data(config)[1]


def comparable(root: Path) -> list[Group]:
    """Return the finished image classification runs under a folder, in groups; all must be trained alike."""
    groups = [group for group in grouped(root) if group.config.get("task") == "image_classification"]
    if not groups:
        raise SystemExit(
            f"no finished run of image classification under {root}. Fix: train some first, "
            f"python -m tasks.image_classification --preset full --model all --seeds 3 --out {root}"
        )
    tell_apart(groups, pages.TITLES)
    differing = []
    for name in TRAINING:
        found: dict[str, list[str]] = {}
        for group in groups:
            found.setdefault(str(group.config.get(name)), []).append(pages.TITLES[group.model])
        if len(found) > 1:
            listed = ", ".join(f"{value} ({', '.join(sorted(set(models)))})" for value, models in sorted(found.items()))
            differing.append(f"{name}: {listed}")
    if differing:
        raise SystemExit(
            f"the runs under {root} were not trained alike; {'; '.join(differing)}. "
            "Fix: name a folder whose runs have the same training, or train the others anew with equal options."
        )
    if len({tuple(sorted(map(str, group.seeds))) for group in groups}) > 1:
        seeds = "; ".join(f"{group.label}: {', '.join(map(str, group.seeds))}" for group in groups)
        logger.warning("the models were not trained with the same seeds (%s)", seeds)
    return groups


def attack(groups: Sequence[Group], options: RobustnessOptions, device: torch.device) -> list[Row]:
    """Return rows of robustness.csv: every run under every attack, and the check of its gradient."""
    attacks: dict[str, Perturb] = {
        "noise": noise,
        "signs": signs,
        "fgsm": fgsm,
        "pgd": functools.partial(pgd, steps=options.pgd_steps),
    }
    runs = [(group, run.config["seed"], run.path) for group in groups for run in group.runs]
    rows: list[Row] = []
    with tqdm(total=len(runs) * sum(map(len, SIZES.values())), disable=None, unit="attack") as bar:
        for group, seed, folder in runs:
            model, (images, labels) = load_attacked(folder)
            chosen = (part[: options.images or None].to(device).split(EVAL_BATCH_SIZE) for part in (images, labels))
            batches = list(zip(*chosen, strict=True))
            model.to(device)
            try:
                ratio = gradient_ratio(model, *batches[0])
                for name, perturb in attacks.items():
                    for size in SIZES[name]:
                        bar.set_postfix_str(f"{group.label}, seed {seed}, {name} {size:g}", refresh=False)
                        accuracy, nfe = measure(model, batches, perturb, size, options.seed)
                        row = {"model": group.label, "seed": seed, "attack": name, "size": size, "accuracy": accuracy}
                        rows.append(row | {"nfe_forward": nfe, "gradient_ratio": ratio, "folder": str(folder)})
                        bar.update()
            except hbnode.SolverError as error:
                raise SystemExit(f"{folder}: {type(error).__name__}: {error}. Fix: leave this run out.") from error
    return rows


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Of each model the seeds, the gradient's ratios, and the curves: medians, smallest and largest over the seeds."""
    models: dict[str, dict[str, Any]] = {}
    for label, mine in pd.DataFrame(rows).groupby("model", sort=False):
        ratios = mine.drop_duplicates("seed")
        models[str(label)] = {"seeds": ratios["seed"].tolist(), "gradient_ratio": ratios["gradient_ratio"].tolist()}
        for name, here in mine.groupby("attack", sort=False):
            curves = here.groupby("size").agg(
                accuracy=("accuracy", "median"),
                accuracy_min=("accuracy", "min"),
                accuracy_max=("accuracy", "max"),
                nfe_forward=("nfe_forward", "median"),
            )
            models[str(label)][str(name)] = curves.reset_index().to_dict("list")
    return models


def signs_of_masking(rows: Sequence[Row]) -> list[str]:
    """Return signs of masking: gradients that mislead, and sizes at which PGD does less than weaker attacks."""
    accuracy = {(row["model"], row["seed"], row["attack"], row["size"]): row["accuracy"] for row in rows}
    found = []
    for model, seed, ratio in dict.fromkeys((row["model"], row["seed"], row["gradient_ratio"]) for row in rows):
        if not abs(ratio - 1) <= GRADIENT_SLACK:  # nan is a sign too
            found.append(f"{model}, seed {seed}: the loss changes {ratio:.2f} times as much as its gradient says")
        for size in SIZES["pgd"]:
            strongest = accuracy[model, seed, "pgd", size]
            for weaker in ("fgsm", "signs"):
                if strongest > accuracy[model, seed, weaker, size] + SLACK:
                    left = f"{strongest:.1%} after PGD, {accuracy[model, seed, weaker, size]:.1%} after {weaker}"
                    found.append(f"{model}, seed {seed}, size {size:g}: accuracy {left}")
    return found


def table(models: dict[str, dict[str, Any]]) -> str:
    """Return median accuracies in per cent, a block for each attack."""
    width = max(map(len, models))
    lines = []
    for name, title in TITLES.items():
        lines.append(f"{title}: accuracy in %, median over the seeds")
        lines.append(" ".join(["size".ljust(width), "seeds", *(f"{size:6g}" for size in SIZES[name])]))
        for label, model in models.items():
            values = (f"{100 * value:6.1f}" for value in model[name]["accuracy"])
            lines.append(" ".join([label.ljust(width), f"{len(model['seeds']):5}", *values]))
        lines.append("")
    return "\n".join(lines)


def draw(models: dict[str, dict[str, Any]], colors: dict[str, str], title: str, path: Path) -> None:
    """Draw accuracy against size: noise, FGSM, PGD; lines are medians, bands go from the smallest to the largest."""
    with panels(path, 1, 3, size=(15, 4), title=title, sharey=True) as (_, axes):
        for ax, name in zip(axes[0], ("noise", "fgsm", "pgd"), strict=True):
            for index, (label, model) in enumerate(models.items()):
                curve = model[name]
                style = line_style(index, len(models), len(curve["size"]))
                ax.plot(curve["size"], curve["accuracy"], color=colors[label], label=label, **style)
                if len(model["seeds"]) > 1:
                    limits = curve["accuracy_min"], curve["accuracy_max"]
                    ax.fill_between(curve["size"], *limits, color=colors[label], alpha=0.15, lw=0)
            ax.axhline(0.1, color="0.5", ls=":", lw=1, label="chance")
            heading, _, unit = TITLES[name].partition(", by ")
            ax.set_title(heading, fontsize="medium")
            ax.set(xlabel=f"{unit} (pixels in [0, 1])", xlim=(0, None))
        axes[0, 0].set(ylim=(0, 1), ylabel="test accuracy")


def main(argv: Sequence[str] | None = None) -> None:
    """Attack all finished runs under a folder, print a table and write table, summary and figure."""
    options = parse(RobustnessOptions, {}, __doc__, argv)
    logging.basicConfig(format="%(message)s")
    groups = comparable(Path(options.root))
    device = Workers.join(options.device).device
    rows = attack(groups, options, device)
    models, masked = summarise(rows), signs_of_masking(rows)
    print(table(models))
    ratios = [ratio for model in models.values() for ratio in model["gradient_ratio"]]
    print(f"central difference over gradient: {min(ratios):.3f} to {max(ratios):.3f}, 1 is exact")
    for sign in masked:
        logger.warning("a masked gradient? %s", sign)
    training = {name: groups[0].config.get(name) for name in TRAINING}
    summary = {
        "task": "robustness",
        "settings": {name: getattr(options, name) for name in ("images", "pgd_steps", "seed")}
        | {"eval_batch_size": EVAL_BATCH_SIZE},
        "training": training,
        "models": models,
        "signs_of_masking": masked,
        **environment(device),
    }
    out = Path(options.out or options.root)
    write_table(out / "robustness.csv", rows)
    write_json(out / "robustness.json", summary)
    about = ", ".join(f"{name} {training[name]}" for name in ("dataset", "epochs", "batch_size", "lr"))
    title = f"robustness: {about}, PGD of {options.pgd_steps} steps, median and range of the seeds"
    draw(models, {group.label: group.color for group in groups}, title, out / "robustness.png")
    print(f"figure: {out / 'robustness.png'}")


if __name__ == "__main__":
    main()
