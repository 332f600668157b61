"""Robustness of trained image classifiers: accuracy under Gaussian noise, FGSM and PGD of growing size.

Open problem 1 in section 3.5 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design?
(2022): are heavy-ball neural ODEs more robust than others to noise and to adversarial examples? Train models first,

    python -m tasks.image_classification --preset full --model all --seeds 5 --out runs/digits
    python -m tasks.studies.robustness runs/digits

All models get the same noise and the same random starts. Pixels are in [0, 1], perturbation sizes are in the same unit,
and every perturbed image is clamped to [0, 1]. FGSM (Goodfellow et al., arXiv:1412.6572) takes one step along the sign
of the gradient. PGD (Madry et al., arXiv:1706.06083) starts at a random point of the allowed box and takes many such
steps of length 2.5 size / steps.

Inaccurate gradients would make a model look robust (gradient masking). So the attacks always differentiate the steps of
the solver, even if the model was trained with another gradient method. Accuracies are those of the unchanged model.
Three checks for masking are reported. The gradient is compared with a central difference of the loss. PGD is compared
with FGSM and with random signs of the same size, which should not lower the accuracy more than PGD. These checks cannot
prove that there is no masking, and other attacks may be stronger.
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
from tasks.common.config import REQUIRED, Options, option, parse
from tasks.common.figures import line_style, panels
from tasks.common.files import read_json, write_json, write_table
from tasks.common.run import Workers, environment
from tasks.common.train import EVAL_BATCH_SIZE, Samples
from tasks.image_classification import load_data, load_run

_ATTACKED = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
SIZES = {
    "noise": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0),
    "signs": _ATTACKED,
    "fgsm": _ATTACKED,
    "pgd": _ATTACKED,
}
TITLES = {
    "noise": "Gaussian noise, by standard deviation",
    "signs": "random signs, by size (a check of the attacks)",
    "fgsm": "FGSM, by largest change of a pixel",
    "pgd": "PGD, by largest change of a pixel",
}
# Options in which the trained runs of a study may differ
MAY_DIFFER = ("model", "seed", "seeds", "jobs", "device", "checkpoint_seconds", "out", "curve")
SLACK = 0.02  # PGD may leave this much more accuracy than a weaker attack before masking is reported
GRADIENT_SLACK = 0.2  # tolerance of the ratio of the central difference to the gradient
logger = logging.getLogger("tasks.studies.robustness")
Perturb = Callable[[nn.Module, Tensor, Tensor, float, torch.Generator], Tensor]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RobustnessOptions(Options):
    """Command-line options of the study."""

    positive = "pgd_steps"

    root: str = option(REQUIRED, "folder that contains run folders of tasks.image_classification")
    out: str = option("", "folder for robustness.csv, .json and .png; empty: that of the runs")
    images: int = option(0, "only the first N test images; 0: all")
    pgd_steps: int = option(20, "steps of PGD")
    seed: int = option(0, "random seed of the noise and of PGD's starts")
    device: str = option("auto", "device: cpu, cuda or auto", ("auto", "cpu", "cuda"))


def noise(model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return the images plus Gaussian noise of standard deviation ``size``."""
    drawn = torch.randn(images.shape, generator=generator).to(images)
    return (images + size * drawn).clamp(0, 1)


def signs(model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return the images with every pixel changed by ``size`` or ``-size`` at random."""
    drawn = torch.randint(2, images.shape, generator=generator).to(images)
    return (images + size * (2 * drawn - 1)).clamp(0, 1)


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return the images moved by ``size`` along the sign of the loss gradient."""
    return (images + size * gradient(model, images, labels).sign()).clamp(0, 1)


def pgd(
    model: nn.Module, images: Tensor, labels: Tensor, size: float, generator: torch.Generator, *, steps: int
) -> Tensor:
    """Return the images after steps along the gradient's sign, from a random start, within ``size`` of the original."""
    low, high = (images - size).clamp(min=0), (images + size).clamp(max=1)
    start = 2 * torch.rand(images.shape, generator=generator) - 1
    moved = torch.clamp(images + size * start.to(images), low, high)
    for _ in range(steps):
        moved = torch.clamp(moved + 2.5 * size / steps * gradient(model, moved, labels).sign(), low, high)
    return moved


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each image's cross-entropy. The loss is a sum, so it is independent of the batch size."""
    images = images.detach().requires_grad_()
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    return torch.autograd.grad(loss, images)[0]


def gradient_ratio(model: nn.Module, images: Tensor, labels: Tensor, step: float = 0.01) -> float:
    """Return the loss's central difference along the gradient's sign, divided by its prediction from the gradient."""
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
    """Return the accuracy on perturbed images, and the mean number of function evaluations per batch."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that all models and sizes get the same numbers
    right = evaluations = 0
    for images, labels in batches:
        moved = perturb(model, images, labels, size, generator) if size else images
        with torch.no_grad(), hbnode.count_nfe(model) as nfe:
            right += (model(moved).argmax(1) == labels).sum().item()
        evaluations += nfe.forward
    return right / sum(len(labels) for _, labels in batches), evaluations / len(batches)


def load_attacked(folder: Path) -> tuple[nn.Module, Samples]:
    """Return the model of a run, set to differentiate through the solver's steps, and its test data."""
    config, trained = load_run(folder)
    exact = "checkpoint" if config.solver == "native" else "direct"
    method = resolve(trained.block.settings(), trained.block.field).method  # the default method depends on the gradient
    model = dataclasses.replace(config, method=method or "", gradient=exact, adjoint_norm="full").make_model()
    model.load_state_dict(trained.state_dict())
    return model.eval().requires_grad_(False), load_data(config)[1]


def finished_runs(root: Path) -> dict[Path, dict[str, Any]]:
    """Return the options of the finished image-classification runs in a folder, after checking that they agree."""
    configs = {path.parent: read_json(path.with_name("config.json")) for path in sorted(root.rglob("summary.json"))}
    configs = {folder: found for folder, found in configs.items() if found["task"] == "image_classification"}
    if not configs:
        raise SystemExit(f"no finished run of tasks.image_classification under {root}. Fix: train some first.")
    first = next(iter(configs.values()))
    differing = {
        name for found in configs.values() for name in first if name not in MAY_DIFFER and found[name] != first[name]
    }
    if differing:
        raise SystemExit(
            f"the runs under {root} differ in {', '.join(sorted(differing))}. Fix: a folder of runs with equal options."
        )
    return configs


def attack(configs: dict[Path, dict[str, Any]], options: RobustnessOptions, device: torch.device) -> list[Row]:
    """Return the rows of robustness.csv.

    They have the accuracy of every run under every attack, and the check of its gradient.
    """
    attacks: dict[str, Perturb] = {
        "noise": noise,
        "signs": signs,
        "fgsm": fgsm,
        "pgd": functools.partial(pgd, steps=options.pgd_steps),
    }
    rows: list[Row] = []
    with tqdm(total=len(configs) * sum(map(len, SIZES.values())), disable=None, unit="attack") as bar:
        for folder, config in configs.items():
            model, (images, labels) = load_attacked(folder)
            chosen = (part[: options.images or None].to(device).split(EVAL_BATCH_SIZE) for part in (images, labels))
            batches = list(zip(*chosen, strict=True))
            model.to(device)
            ratio = gradient_ratio(model, *batches[0])
            for name, perturb in attacks.items():
                for size in SIZES[name]:
                    accuracy, nfe = measure(model, batches, perturb, size, options.seed)
                    about = {"model": config["model"], "seed": config["seed"], "attack": name, "size": size}
                    found = {"accuracy": accuracy, "nfe_forward": nfe, "gradient_ratio": ratio, "folder": str(folder)}
                    rows.append(about | found)
                    bar.update()
    return rows


def signs_of_masking(rows: Sequence[Row]) -> list[str]:
    """Return messages about inaccurate gradients, and about sizes at which a weaker attack does more harm than PGD."""
    accuracy = {(row["model"], row["seed"], row["attack"], row["size"]): row["accuracy"] for row in rows}
    found = []
    for model, seed, ratio in dict.fromkeys((row["model"], row["seed"], row["gradient_ratio"]) for row in rows):
        if not abs(ratio - 1) <= GRADIENT_SLACK:  # also true for NaN
            found.append(f"{model}, seed {seed}: the loss changes {ratio:.2f} times as much as its gradient predicts")
        for size in SIZES["pgd"]:
            strongest = accuracy[model, seed, "pgd", size]
            for weaker in ("fgsm", "signs"):
                if strongest > accuracy[model, seed, weaker, size] + SLACK:
                    left = f"{strongest:.1%} after PGD, {accuracy[model, seed, weaker, size]:.1%} after {weaker}"
                    found.append(f"{model}, seed {seed}, size {size:g}: accuracy {left}")
    return found


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the accuracy against the perturbation size for noise, FGSM and PGD: the median and range over the seeds."""
    models = dict.fromkeys(row["model"] for row in rows)
    with panels(path, 1, 3, size=(15, 4), title=title, sharey=True) as (_, axes):
        for ax, name in zip(axes[0], ("noise", "fgsm", "pgd"), strict=True):
            for index, model in enumerate(models):
                found = pd.DataFrame([row for row in rows if (row["model"], row["attack"]) == (model, name)])
                curve = found.groupby("size")["accuracy"].agg(["min", "median", "max"])
                style = line_style(index, len(models), len(curve))
                ax.plot(curve.index, curve["median"], color=f"C{index}", label=model, **style)
                ax.fill_between(curve.index, curve["min"], curve["max"], color=f"C{index}", alpha=0.15, lw=0)
            ax.axhline(0.1, color="0.5", ls=":", lw=1, label="chance")
            heading, _, unit = TITLES[name].partition(", by ")
            ax.set_title(heading, fontsize="medium")
            ax.set(xlabel=f"{unit} (pixels in [0, 1])", xlim=(0, None))
        axes[0, 0].set(ylim=(0, 1), ylabel="test accuracy")


def main(argv: Sequence[str] | None = None) -> None:
    """Attack all finished runs in a folder, print a table, and write the table, summary and figure."""
    options = parse(RobustnessOptions, {}, __doc__, argv)
    logging.basicConfig(format="%(message)s")
    configs = finished_runs(Path(options.root))
    device = Workers.join(options.device).device
    rows = attack(configs, options, device)
    masked = signs_of_masking(rows)
    for sign in masked:
        logger.warning("a masked gradient? %s", sign)
    training = {name: value for name, value in next(iter(configs.values())).items() if name not in MAY_DIFFER}
    settings = {name: getattr(options, name) for name in ("images", "pgd_steps", "seed")}
    settings |= {"eval_batch_size": EVAL_BATCH_SIZE}
    about = {"task": "robustness", "settings": settings, "training": training}
    out = Path(options.out or options.root)
    write_table(out / "robustness.csv", rows)
    write_json(out / "robustness.json", {**about, "signs_of_masking": masked, **environment(device)})
    shared = ", ".join(f"{name} {training[name]}" for name in ("dataset", "epochs", "batch_size", "lr"))
    title = f"robustness: {shared}, PGD of {options.pgd_steps} steps, median and range of the seeds"
    draw(rows, title, out / "robustness.png")
    print(f"figure: {out / 'robustness.png'}")


if __name__ == "__main__":
    main()
