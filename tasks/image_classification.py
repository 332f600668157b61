"""Image classification with the five models: digits (8x8, offline) and MNIST.

Section 3.4.2 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022): a
convolutional f with the time as an extra channel, a learned initial state, and a linear head on h(1).

The paper prints channels, parameter counts, batch size 64 and learning rate 1e-3. The rest of the preset "paper" is the
authors' code: hidden sizes, tolerance 1e-4 (the paper prints one, 1e-5, for CIFAR10 only), gradients clipped at 10 (the
paper speaks of clipping the adjoint state), 40 epochs, the adjoint's full error norm. It departs from the code in
GHBNODE's xi, which starts at ln 2 (there 2.13), and in the sign of f, which is the paper's.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hbnode
from tasks import _data
from tasks._run import Config, Run, count_parameters, option, parse, write_whole
from tasks._train import EVAL_BATCH_SIZE, fit

# Channels of h and of f's hidden layers. MNIST: section 3.4.2, footnote 6 and Table 5, with the hidden sizes of the
# authors' code. Digits: the same channels, hidden sizes that give the five models about equal parameter counts.
CHANNELS = {"node": 1, "anode": 6, "sonode": 5, "hbnode": 5, "ghbnode": 6}
HIDDEN = {
    "mnist": {"node": 92, "anode": 64, "sonode": 50, "hbnode": 50, "ghbnode": 45},
    "digits": {"node": 38, "anode": 33, "sonode": 24, "hbnode": 24, "ghbnode": 23},
    "digits-small": {"node": 28, "anode": 21, "sonode": 16, "hbnode": 16, "ghbnode": 15},
}
SIZE = {"digits": 8, "mnist": 28}


@dataclasses.dataclass(frozen=True)
class ImageConfig(Config):
    """Options of image classification."""

    dataset: str = option("digits", "which images", ("digits", "mnist"))
    small: bool = option(False, "a smaller f, for digits only")
    subset: int = option(0, "train on the first N images only; 0 is all of them")
    test_subset: int = option(0, "test on the first N images only; 0 is all of them")

    def __post_init__(self) -> None:
        if self.small and self.dataset != "digits":
            raise ValueError("--small is for --dataset digits; mnist has the paper's sizes")


PRESETS = {
    "demo": {"dataset": "digits", "small": True, "epochs": 8, "batch_size": 32, "lr": 8e-3, "schedule": "cosine"},
    "full": {"dataset": "digits", "epochs": 12, "batch_size": 32, "lr": 8e-3, "schedule": "cosine"},
    "paper": {
        "dataset": "mnist",
        "epochs": 40,
        "lr": 1e-3,
        "tol": 1e-4,
        "clip": 10.0,
        "adjoint_norm": "full",
    },
}


class InitialState(nn.Module):
    """The learned start of the second-order models: x -> (h, m), h = [x, learned channels], m learned."""

    def __init__(self, in_channels: int, hidden: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 1),
            nn.LeakyReLU(0.3),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            nn.LeakyReLU(0.3),
            nn.Conv2d(hidden, 2 * channels - in_channels, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(batch, in_channels, H, W)`` to two tensors ``(batch, channels, H, W)``."""
        h, m = torch.cat([x, self.net(x)], dim=1).split(self.channels, dim=1)
        return h, m


class Classifier(nn.Module):
    """An ODE block with a linear head on h(1)."""

    def __init__(self, model: str, dataset: str, *, small: bool = False, **solver: object) -> None:
        super().__init__()
        hidden = HIDDEN["digits-small" if small else dataset][model]
        channels, size, image_channels = CHANNELS[model], SIZE[dataset], 1
        func = hbnode.nets.ConvNet(2 * channels if model == "sonode" else channels, hidden, channels)
        field = {
            "node": lambda: hbnode.NODE(func),
            "anode": lambda: hbnode.ANODE(func, augment=channels - image_channels),
            "sonode": lambda: hbnode.SONODE(func),
            "hbnode": lambda: hbnode.HBNODE(func),
            "ghbnode": lambda: hbnode.GHBNODE(func),
        }[model]()
        second_order = model in ("sonode", "hbnode", "ghbnode")
        start = InitialState(image_channels, hidden, channels) if second_order else None
        self.block = hbnode.ODEBlock(field, initial_state=start, **solver)
        self.head = nn.Linear(channels * size * size, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, 10)`` of images ``(batch, 1, H, W)``."""
        return self.head(self.block(x).flatten(1))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Mean cross-entropy of a batch, and its accuracy."""
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean().item()}


def save_examples(run: Run, model: nn.Module, images: Tensor, labels: Tensor, count: int = 60) -> None:
    """Keep some test images with their predictions in ``examples.pt``, for the figure."""
    with torch.no_grad():
        predictions = model(images[:count].to(run.workers.device)).argmax(1).cpu()
    buffer = io.BytesIO()
    torch.save({"images": images[:count, 0], "labels": labels[:count], "predictions": predictions}, buffer)
    write_whole(run.folder / "examples.pt", buffer.getvalue())


def main(argv: Sequence[str] | None = None) -> None:
    """Train one model on one data set."""
    config = parse(ImageConfig, PRESETS, __doc__, argv)
    load = _data.digits if config.dataset == "digits" else _data.mnist
    try:
        train, test = load("train"), load("test")
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    train = tuple(x[: config.subset or None] for x in train)
    test = tuple(x[: config.test_subset or None] for x in test)
    run = Run("image_classification", config, f"{config.preset}-{config.dataset}-{config.model}-seed{config.seed}")
    model = Classifier(config.model, config.dataset, small=config.small, **config.solver())
    if run.workers.rank == 0:
        print(
            f"{config.model} on {config.dataset}: {len(train[0])} training and {len(test[0])} test images, "
            f"{count_parameters(model)} parameters, writing to {run.folder}"
        )
    fit(run, model, train, test, cross_entropy)
    if run.workers.rank == 0 and not run.is_finished:
        save_examples(run, model, *test)
    run.finish(
        model,
        training_images=len(train[0]),
        test_images=len(test[0]),
        eval_batch_size=EVAL_BATCH_SIZE,
        loss_scale="mean",
    )


if __name__ == "__main__":
    main()
